//! What a device notes of itself for those who ask later why something went wrong: changes of state, errors, and what led to them.
//!
//! Notes are given to a [`Tracer`], which the driver brings; without one nothing is noted. Nothing is noted for a packet that goes
//! its way.

use std::fmt;
use std::net::IpAddr;

use rdmux_wire::roce::{NakCode, Operation, Reth};
use rdmux_wire::{Psn, Qpn};

use crate::cq::{Cqn, Status, WcOpcode};
use crate::memory::{Access, Fault};
use crate::qp::{Cause, QpState, QpType};
use crate::time::Time;

/// Keeps notes. It must not call back, and should take no longer than a packet does.
pub trait Tracer: fmt::Debug + Send {
    /// Something happened to a QP; QPN 0 stands for the device. `now` is 0 where the time is not known.
    fn note(&mut self, now: Time, qpn: Qpn, note: &Note);
}

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A QP was moved to another state by its owner, or on its behalf.
    Moved {
        /// Transport service.
        qp_type: QpType,
        /// State before.
        from: QpState,
        /// State now.
        to: QpState,
    },
    /// A QP was told who its peer is.
    Peer {
        /// Its address.
        address: IpAddr,
        /// Its QPN.
        qpn: Qpn,
        /// Path MTU, in bytes.
        mtu: u32,
    },
    /// A QP went to Error on its own. IBTA Vol 1, 10.3.1.7.
    Failed {
        /// What is wrong.
        status: Status,
        /// Whose doing it is.
        cause: Cause,
        /// State before.
        from: QpState,
    },
    /// A request of one's own ended in error.
    RequestFailed {
        /// As its completion says.
        status: Status,
        /// What it was.
        opcode: WcOpcode,
        /// Its own number.
        wr_id: u64,
        /// Address at the peer, or of one's own memory where that is what is wrong.
        va: u64,
        /// The key of that.
        key: u32,
        /// Bytes.
        length: u32,
    },
    /// No answer came in time to the packet of this PSN. IBTA Vol 1, 9.7.6.1.3.
    TimedOut {
        /// The oldest that is not answered.
        psn: Psn,
        /// How often it had been sent again before.
        resends: u8,
        /// Retries that the connection has; each sends twice.
        retry_count: u8,
    },
    /// The same, but the peer, on this host, had yet to take what was sent: nothing is lost.
    PeerStalled {
        /// The oldest that is not answered.
        psn: Psn,
    },
    /// No retry was left.
    RetriesUsed {
        /// The oldest that was not answered.
        psn: Psn,
        /// How often it had been sent again.
        resends: u8,
        /// Retries that the connection had; each sends twice.
        retry_count: u8,
        /// For how long no answer had brought it further, in ns.
        stuck_ns: u64,
        /// How long ago anything had come from the peer, in ns; `None`: nothing ever had.
        heard_ns: Option<u64>,
    },
    /// The peer had no receive, or was not ready. IBTA Vol 1, 9.7.5.2.8.
    RnrNak {
        /// The packet that it was not ready for.
        psn: Psn,
        /// How long it is to be waited, in ns.
        wait_ns: u64,
        /// How often that had been waited for it before.
        tries: u8,
        /// Retries that the connection has; 7: without end.
        rnr_retry: u8,
        /// That was one too many.
        is_last: bool,
    },
    /// The peer lacks packets from this PSN on.
    GapNak {
        /// The first that is missing.
        psn: Psn,
    },
    /// The peer refused a request for good.
    FatalNak {
        /// Its PSN.
        psn: Psn,
        /// Why.
        code: NakCode,
    },
    /// A request of the peer was refused for good.
    Refused(Refused),
    /// A request of the peer found no receive: it is to come again.
    NotReady {
        /// Its PSN.
        psn: Psn,
    },
    /// Requests of the peer are missing.
    Missing {
        /// The one that is expected.
        expected: Psn,
        /// The one that came.
        psn: Psn,
    },
    /// A flush that a peer asked for failed.
    FlushFailed {
        /// The PSN that the request began with.
        psn: Psn,
        /// Why.
        fault: Fault,
    },
    /// A completion queue overran. IBTA Vol 1, 11.6.3.1.
    Overrun {
        /// The queue.
        cqn: Cqn,
    },
    /// Something happened to a connection.
    Connection {
        /// Its communication id.
        id: u32,
        /// What.
        what: ConnectionNote,
        /// Of a rejection, its reason. IBTA Vol 1, 12.6.7.2.
        reason: u16,
    },
    /// The peer's process, on this host, has ended.
    PeerGone,
    /// A fault that was asked for ([`crate::faults`]) happened to a packet.
    Injected {
        /// What.
        what: Injection,
        /// On its way out, else in.
        sent: bool,
    },
    /// The network takes no packets, or takes them again.
    Port {
        /// It takes them.
        active: bool,
    },
    /// Notes were left out: there were too many.
    Skipped {
        /// How many.
        notes: u64,
    },
    /// A packet went by.
    Packet {
        /// Out, else in.
        sent: bool,
        /// Through memory of this host.
        local: bool,
        /// The opcode's number.
        opcode: u8,
        /// Its PSN.
        psn: Psn,
        /// UDP payload, in bytes.
        bytes: u32,
    },
}

/// A request of the peer that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Its PSN.
    pub psn: Psn,
    /// What its packet asked for.
    pub operation: Operation,
    /// The key that it names.
    pub key: u32,
    /// The address that it names.
    pub va: u64,
    /// Bytes.
    pub length: u32,
    /// Why.
    pub why: Denial,
}

impl Refused {
    /// One whose memory failed after its header had been looked at.
    pub(crate) fn of_memory(psn: Psn, operation: Operation, reth: Option<Reth>) -> Refused {
        Refused {
            psn,
            operation,
            key: reth.map_or(0, |reth| reth.rkey.0),
            va: reth.map_or(0, |reth| reth.va),
            length: reth.map_or(0, |reth| reth.length),
            why: Denial::Memory,
        }
    }
}

/// Why a request was refused. IBTA Vol 1, 9.7.4.1 and 9.9.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// No region or window has the key, or none any more.
    NoKey,
    /// The key is one of another protection domain.
    OtherDomain,
    /// The key does not grant that.
    NoRight {
        /// What the request needs.
        needs: Access,
        /// What the key grants.
        has: Access,
    },
    /// The range lies outside of what the key stands for.
    OutOfRange {
        /// Its first byte.
        begin: u64,
        /// Its bytes.
        length: u64,
    },
    /// The window serves another QP.
    OtherWindow,
    /// The QP does not allow that.
    NoRightOnQp {
        /// What the request needs.
        needs: Access,
        /// What the QP allows.
        has: Access,
    },
    /// The memory behind the key is not there any more, or failed.
    Memory,
    /// The message is longer than the receive that it found.
    TooLong,
    /// The memory of the receive failed.
    Receive(Status),
    /// The key that the message ends cannot be ended.
    Invalidation,
    /// The packet does not fit here: opcode, order, length, alignment, or a READ, atomic or FLUSH where none was promised.
    Invalid,
}

/// What happened to a connection. IBTA Vol 1, 12.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ConnectionNote {
    /// The peer accepted it.
    Accepted = 1,
    /// It stands.
    Established = 2,
    /// The peer refused it.
    Rejected = 3,
    /// No answer came.
    Unreachable = 4,
    /// It was ended: by the peer, or because it was not decided on.
    Disconnected = 5,
}

impl ConnectionNote {
    /// All of them.
    pub const ALL: [ConnectionNote; 5] = [
        ConnectionNote::Accepted,
        ConnectionNote::Established,
        ConnectionNote::Rejected,
        ConnectionNote::Unreachable,
        ConnectionNote::Disconnected,
    ];
}

/// What was done to a packet because it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Injection {
    /// It is lost.
    Lost = 1,
    /// It is damaged.
    Corrupted = 2,
    /// It comes twice.
    Duplicated = 3,
    /// Others overtake it.
    Reordered = 4,
    /// A QP fails with it.
    QpError = 5,
}

impl Injection {
    /// All of them.
    pub const ALL: [Injection; 5] = [
        Injection::Lost,
        Injection::Corrupted,
        Injection::Duplicated,
        Injection::Reordered,
        Injection::QpError,
    ];
}

impl Note {
    /// Whether it may happen as often as packets go by.
    pub fn is_frequent(&self) -> bool {
        match self {
            Note::TimedOut { .. }
            | Note::PeerStalled { .. }
            | Note::GapNak { .. }
            | Note::NotReady { .. }
            | Note::Missing { .. }
            | Note::Injected { .. }
            | Note::Skipped { .. }
            | Note::Packet { .. } => true,
            Note::RnrNak { is_last, .. } => !is_last,
            _ => false,
        }
    }

    /// Whether somebody will ask why.
    pub fn is_trouble(&self) -> bool {
        match self {
            Note::Failed { .. }
            | Note::RequestFailed { .. }
            | Note::RetriesUsed { .. }
            | Note::FatalNak { .. }
            | Note::Refused(_)
            | Note::FlushFailed { .. }
            | Note::Overrun { .. }
            | Note::PeerGone
            | Note::Port { active: false } => true,
            Note::Connection { what, .. } => {
                matches!(what, ConnectionNote::Rejected | ConnectionNote::Unreachable)
            }
            _ => false,
        }
    }
}

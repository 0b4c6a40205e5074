//! Notes that a device takes to explain failures later: changes of state, errors, and the events that led to them.
//!
//! The device passes notes to a [`Tracer`], which the driver supplies; without a tracer it takes none. A packet that is processed
//! normally causes no note.

use std::fmt;
use std::net::IpAddr;

use rdmux_wire::roce::{NakCode, Operation, Reth};
use rdmux_wire::{Psn, Qpn};
use strum::{FromRepr, VariantArray};

use crate::cq::{Cqn, Status, WcOpcode};
use crate::memory::{Access, Fault};
use crate::qp::{Cause, QpState, QpType};
use crate::time::Time;

/// Receives notes. A tracer must not call back into the device, and should take no longer than processing a packet does.
pub trait Tracer: fmt::Debug + Send {
    /// Receives a note about a QP; QPN 0 stands for the device. `now` is 0 where the time is not known.
    fn note(&mut self, now: Time, qpn: Qpn, note: &Note);
}

/// An event that the device notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// The owner of a QP, or the device on its behalf, moved it to another state.
    Moved {
        /// Transport service.
        qp_type: QpType,
        /// Previous state.
        from: QpState,
        /// New state.
        to: QpState,
    },
    /// A QP got its peer.
    Peer {
        /// The peer's address.
        address: IpAddr,
        /// The peer's QPN.
        qpn: Qpn,
        /// Path MTU, in bytes.
        mtu: u32,
    },
    /// A QP went to Error on its own. IBTA Vol 1, 10.3.1.7.
    Failed {
        /// Status of the failure.
        status: Status,
        /// Cause of the failure.
        cause: Cause,
        /// Previous state.
        from: QpState,
    },
    /// A request of this device ended in error.
    RequestFailed {
        /// Status, as in its completion.
        status: Status,
        /// Opcode of the request.
        opcode: WcOpcode,
        /// Number that the caller gave the request.
        wr_id: u64,
        /// Address in the peer's memory, or in own memory if that is at fault.
        va: u64,
        /// Key of that memory.
        key: u32,
        /// Bytes.
        length: u32,
    },
    /// The ACK timeout of the packet with this PSN expired. IBTA Vol 1, 9.7.6.1.3.
    TimedOut {
        /// PSN of the oldest packet without an answer.
        psn: Psn,
        /// Number of earlier retransmissions of that packet.
        resends: u8,
        /// Retry count of the connection; each retry sends twice.
        retry_count: u8,
    },
    /// The ACK timeout expired, but the peer, on this host, had not yet taken the packets: nothing is lost.
    PeerStalled {
        /// PSN of the oldest packet without an answer.
        psn: Psn,
    },
    /// The retries are exhausted.
    RetriesUsed {
        /// PSN of the oldest packet without an answer.
        psn: Psn,
        /// Number of retransmissions of that packet.
        resends: u8,
        /// Retry count of the connection; each retry sends twice.
        retry_count: u8,
        /// Time for which no answer had acknowledged anything new, in ns.
        stuck_ns: u64,
        /// Time since the last response to a request of the queue pair, in ns; `None` if there was none.
        heard_ns: Option<u64>,
    },
    /// The peer sent an RNR NAK: it had no receive, or was not ready. IBTA Vol 1, 9.7.5.2.8.
    RnrNak {
        /// PSN of the packet for which the peer was not ready.
        psn: Psn,
        /// Time for which the requester must wait, in ns.
        wait_ns: u64,
        /// Number of earlier RNR waits for that packet.
        tries: u8,
        /// RNR retry count of the connection; 7 means without limit.
        rnr_retry: u8,
        /// Set when the RNR retries are exhausted.
        is_last: bool,
    },
    /// The peer reported that packets from this PSN on are missing.
    GapNak {
        /// PSN of the first missing packet.
        psn: Psn,
    },
    /// The peer refused a request with a fatal NAK.
    FatalNak {
        /// PSN of the request.
        psn: Psn,
        /// Code of the NAK.
        code: NakCode,
    },
    /// The responder refused a request of the peer permanently.
    Refused(Refused),
    /// A request of the peer found no receive: the peer must send it again.
    NotReady {
        /// PSN of the request.
        psn: Psn,
    },
    /// A packet of the peer arrived behind a gap.
    Missing {
        /// PSN that the responder expects.
        expected: Psn,
        /// PSN that arrived.
        psn: Psn,
    },
    /// A flush that a peer requested failed.
    FlushFailed {
        /// First PSN of the request.
        psn: Psn,
        /// Fault of the memory.
        fault: Fault,
    },
    /// A completion queue overran. IBTA Vol 1, 11.6.3.1.
    Overrun {
        /// The queue.
        cqn: Cqn,
    },
    /// The state of a connection changed.
    Connection {
        /// Communication id of the connection.
        id: u32,
        /// Kind of change.
        what: ConnectionNote,
        /// Reason of a rejection. IBTA Vol 1, 12.6.7.2.
        reason: u16,
    },
    /// The peer's process, on this host, has ended.
    PeerGone,
    /// A fault was injected into a packet on request ([`crate::faults`]).
    Injected {
        /// Kind of fault.
        what: Injection,
        /// Set for an outgoing packet, clear for an incoming one.
        sent: bool,
    },
    /// The network stopped accepting packets, or accepts them again.
    Port {
        /// Set when the network accepts packets.
        active: bool,
    },
    /// Notes were dropped because there were too many.
    Skipped {
        /// Number of dropped notes.
        notes: u64,
    },
    /// A packet was sent or received.
    Packet {
        /// Set for a sent packet, clear for a received one.
        sent: bool,
        /// Set for a packet that went through memory of this host.
        local: bool,
        /// Number of the opcode.
        opcode: u8,
        /// PSN of the packet.
        psn: Psn,
        /// UDP payload length in bytes.
        bytes: u32,
    },
}

/// A refused request of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// PSN of the request.
    pub psn: Psn,
    /// Operation of the request's packet.
    pub operation: Operation,
    /// Key in the request.
    pub key: u32,
    /// Address in the request.
    pub va: u64,
    /// Bytes.
    pub length: u32,
    /// Reason of the refusal.
    pub why: Denial,
}

impl Refused {
    /// Returns the refusal of a request whose memory failed after its header had been checked.
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

/// Reason for which a request was refused. IBTA Vol 1, 9.7.4.1 and 9.9.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// No region or window has the key, or it has been invalidated.
    NoKey,
    /// The key belongs to another protection domain.
    OtherDomain,
    /// The key does not grant the access.
    NoRight {
        /// Rights that the request needs.
        needs: Access,
        /// Rights that the key grants.
        has: Access,
    },
    /// The range lies outside of the region or window.
    OutOfRange {
        /// First address of the region or window.
        begin: u64,
        /// Length of the region or window in bytes.
        length: u64,
    },
    /// The window is valid on another QP only.
    OtherWindow,
    /// The QP does not allow the access.
    NoRightOnQp {
        /// Rights that the request needs.
        needs: Access,
        /// Rights that the QP allows.
        has: Access,
    },
    /// The memory behind the key has gone or has failed.
    Memory,
    /// The message is longer than the receive that it found.
    TooLong,
    /// The memory of the receive failed.
    Receive(Status),
    /// The key that the message should invalidate cannot be invalidated.
    Invalidation,
    /// The packet is not valid at this point: opcode, order, length, alignment, or a READ, atomic or FLUSH without responder resources.
    Invalid,
}

/// Change of a connection's state. IBTA Vol 1, 12.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromRepr, VariantArray)]
#[repr(u8)]
pub enum ConnectionNote {
    /// The peer accepted the connection.
    Accepted = 1,
    /// The connection is established.
    Established = 2,
    /// The peer refused the connection.
    Rejected = 3,
    /// The peer did not answer.
    Unreachable = 4,
    /// The connection ended: the peer ended it, or the user did not decide on it in time.
    Disconnected = 5,
}

/// Fault that was injected into a packet on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromRepr, VariantArray)]
#[repr(u8)]
pub enum Injection {
    /// The packet is lost.
    Lost = 1,
    /// The packet is corrupted.
    Corrupted = 2,
    /// The packet arrives twice.
    Duplicated = 3,
    /// Other packets overtake it.
    Reordered = 4,
    /// A QP fails instead of receiving the packet.
    QpError = 5,
}

impl Note {
    /// Returns whether the event may occur as often as packets do.
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

    /// Returns whether the event is a failure that a user will want explained.
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

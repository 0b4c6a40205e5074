//! Work requests. IBTA Vol 1, 11.4.1.

use bitflags::bitflags;
use rdmux_wire::roce::{Placement, Selectivity};
use rdmux_wire::{LKey, RKey};

/// Most scatter/gather elements of a work request.
pub const SGE_MAX: usize = 32;

/// A piece of registered memory of one's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Address inside of the region.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// The region.
    pub lkey: u32,
}

impl Sge {
    /// `length` bytes at `addr` in the region of `lkey`.
    pub const fn new(addr: u64, length: u32, lkey: LKey) -> Sge {
        Sge {
            addr,
            length,
            lkey: lkey.0,
        }
    }
}

/// A scatter/gather list; up to two elements need no allocation.
#[derive(Clone, Debug)]
pub struct SgeList(Elements);

#[derive(Clone, Debug)]
enum Elements {
    Few([Sge; 2], u8),
    Many(Box<[Sge]>),
}

impl SgeList {
    /// No element: a zero-length operation.
    pub const EMPTY: SgeList = SgeList(Elements::Few(
        [Sge {
            addr: 0,
            length: 0,
            lkey: 0,
        }; 2],
        0,
    ));

    /// The elements in order.
    pub fn as_slice(&self) -> &[Sge] {
        match &self.0 {
            Elements::Few(list, n) => &list[..usize::from(*n)],
            Elements::Many(list) => list,
        }
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> u64 {
        self.as_slice().iter().map(|sge| u64::from(sge.length)).sum()
    }
}

impl From<Sge> for SgeList {
    fn from(sge: Sge) -> SgeList {
        SgeList(Elements::Few([sge, Sge::default()], 1))
    }
}

impl From<&[Sge]> for SgeList {
    fn from(list: &[Sge]) -> SgeList {
        match *list {
            [] => SgeList::EMPTY,
            [a] => a.into(),
            [a, b] => SgeList(Elements::Few([a, b], 2)),
            _ => SgeList(Elements::Many(list.into())),
        }
    }
}

/// What a send work request does.
#[derive(Clone, Debug)]
pub enum Operation {
    /// SEND the list's bytes into the peer's next receive.
    Send {
        /// Immediate data for the receiver's completion.
        imm: Option<u32>,
    },
    /// RDMA WRITE the list's bytes to the peer's memory.
    Write {
        /// Address there.
        va: u64,
        /// Key there.
        rkey: RKey,
        /// Immediate data; with it the peer uses up a receive.
        imm: Option<u32>,
    },
    /// RDMA READ from the peer's memory into the list.
    Read {
        /// Address there.
        va: u64,
        /// Key there.
        rkey: RKey,
    },
    /// FLUSH: the peer brings bytes to the placement asked for before this completes. IBTA Vol 1, A19.
    Flush {
        /// Address there.
        va: u64,
        /// Key there.
        rkey: RKey,
        /// Bytes.
        length: u32,
        /// Placement types.
        placement: Placement,
        /// The range, or the whole region.
        selectivity: Selectivity,
    },
}

bitflags! {
    /// Send flags, valued as `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Begin only when all earlier READs of the QP are complete. IBTA Vol 1, 10.8.3.3.
        const FENCE = 1 << 0;
        /// Make a completion also on success.
        const SIGNALED = 1 << 1;
        /// Wake a receiver that armed for solicited events.
        const SOLICITED = 1 << 2;
    }
}

/// A send work request.
#[derive(Clone, Debug)]
pub struct SendRequest {
    /// The caller's own number, given back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation,
    /// Own memory: source of SEND and WRITE, destination of READ, empty for FLUSH.
    pub sges: SgeList,
    /// Flags.
    pub flags: SendFlags,
}

/// A receive work request.
#[derive(Clone, Debug)]
pub struct RecvRequest {
    /// The caller's own number, given back in the completion.
    pub wr_id: u64,
    /// Where the message goes.
    pub sges: SgeList,
}

/// Why a work request was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// No such QP.
    #[error("no such QP")]
    NoQp,
    /// The QP's state does not take this request. IBTA Vol 1, 10.3.1.
    #[error("the QP's state does not take this request")]
    WrongState,
    /// The queue holds as many requests as it was made for.
    #[error("the work queue is full")]
    QueueFull,
    /// More elements than the QP was made for.
    #[error("too many scatter/gather elements")]
    TooManySges,
    /// Longer than a message may be (2^31 bytes).
    #[error("the message is too long")]
    TooLong,
}

//! Work requests. IBTA Vol 1, 11.4.1.

use bitflags::bitflags;
use rdmux_wire::roce::{MESSAGE_BYTES_MAX, Placement, Selectivity};
use rdmux_wire::{LKey, Qpn, RKey};

use crate::memory::Access;
use crate::region::RegionSpec;
use crate::srq::Srqn;
use crate::transmit::Path;

/// Most scatter/gather elements of a work request.
pub const SGE_MAX: usize = 32;
/// Most bytes that a send request carries in itself.
pub const INLINE_BYTES_MAX: usize = 1024;

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

/// A scatter/gather list, or bytes inline; up to two elements need no allocation.
#[derive(Clone, Debug)]
pub struct SgeList(Elements);

#[derive(Clone, Debug)]
enum Elements {
    Few([Sge; 2], u8),
    Many(Box<[Sge]>),
    Inline(Box<[u8]>),
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

    /// The bytes themselves instead of where they are: the caller's memory is free again at once and needs no registration.
    /// For SEND, WRITE and ATOMIC WRITE, up to [`INLINE_BYTES_MAX`].
    pub fn inline(bytes: &[u8]) -> SgeList {
        SgeList(Elements::Inline(bytes.into()))
    }

    /// The elements in order; none when the bytes are inline.
    pub fn as_slice(&self) -> &[Sge] {
        match &self.0 {
            Elements::Few(list, n) => &list[..usize::from(*n)],
            Elements::Many(list) => list,
            Elements::Inline(_) => &[],
        }
    }

    /// The bytes, when they are inline.
    pub fn as_inline(&self) -> Option<&[u8]> {
        match &self.0 {
            Elements::Inline(bytes) => Some(bytes),
            Elements::Few(..) | Elements::Many(_) => None,
        }
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> u64 {
        match self.as_inline() {
            Some(bytes) => bytes.len() as u64,
            None => self.as_slice().iter().map(|sge| u64::from(sge.length)).sum(),
        }
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
    /// SEND, and end the peer's memory region or type 2 window of this key. IBTA Vol 1, 9.4.1.1.2.
    SendInvalidate {
        /// Key there.
        rkey: RKey,
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
    /// Stores `swap` into the peer's aligned 8 bytes when they hold `compare`; what they held comes back into the list's 8
    /// bytes. Numbers in the peer's byte order. IBTA Vol 1, 9.4.5.
    CompareSwap {
        /// Address there, a multiple of 8.
        va: u64,
        /// Key there.
        rkey: RKey,
        /// Value to be found.
        compare: u64,
        /// Value to be stored.
        swap: u64,
    },
    /// Adds to the peer's aligned 8 bytes, wrapping; what they held comes back into the list's 8 bytes. IBTA Vol 1, 9.4.5.
    FetchAdd {
        /// Address there, a multiple of 8.
        va: u64,
        /// Key there.
        rkey: RKey,
        /// Value to be added.
        add: u64,
    },
    /// ATOMIC WRITE: places the list's 8 bytes at once, after everything before is placed. IBTA Vol 1, A19.
    AtomicWrite {
        /// Address there, a multiple of 8.
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
    /// Lets peers reach a part of a region by a window of its own key, from when this completes. IBTA Vol 1, 10.6.7.2. A type 1
    /// window is bound by [`crate::Rnic::bind_mw`], which chooses the key.
    Bind(Bind),
    /// Gives a region of [`crate::Rnic::alloc_mr`] its memory. IBTA Vol 1, 10.6.3.4 (fast register).
    Register(Box<Registration>),
    /// Ends a region of [`crate::Rnic::alloc_mr`] or a type 2 window of one's own until it is registered or bound again. IBTA Vol
    /// 1, 10.6.7.2.3.
    LocalInvalidate {
        /// Key.
        rkey: RKey,
    },
}

impl Operation {
    /// The address and key of the peer's memory, or of the window or region that it is about.
    pub(crate) fn names(&self) -> Option<(u64, u32)> {
        match self {
            Operation::Send { .. } => None,
            Operation::SendInvalidate { rkey } | Operation::LocalInvalidate { rkey } => Some((0, rkey.0)),
            Operation::Write { va, rkey, .. }
            | Operation::Read { va, rkey }
            | Operation::CompareSwap { va, rkey, .. }
            | Operation::FetchAdd { va, rkey, .. }
            | Operation::AtomicWrite { va, rkey }
            | Operation::Flush { va, rkey, .. } => Some((*va, rkey.0)),
            Operation::Bind(bind) => Some((bind.va, bind.window.0)),
            Operation::Register(registration) => Some((registration.spec.iova, registration.key.0)),
        }
    }

    /// Whether it is done by the device alone, without a packet.
    pub fn is_local(&self) -> bool {
        matches!(
            self,
            Operation::Bind(_) | Operation::Register(_) | Operation::LocalInvalidate { .. }
        )
    }

    /// Whether the peer answers with data into the list.
    pub fn takes_answer(&self) -> bool {
        matches!(
            self,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        )
    }
}

/// What a memory window is bound to. IBTA Vol 1, 10.6.7.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind {
    /// The window by its new key: that of the window but for the low 8 bits, which are the caller's.
    pub window: RKey,
    /// The region, registered with [`Access::MW_BIND`].
    pub region: LKey,
    /// First address inside of the region.
    pub va: u64,
    /// Bytes; 0 unbinds.
    pub length: u64,
    /// Remote rights; [`Access::ZERO_BASED`] makes peers' addresses count from the window's start.
    pub access: Access,
}

/// What [`Operation::Register`] makes of a region.
#[derive(Clone, Debug)]
pub struct Registration {
    /// The region by its new key: that of the region but for the low 8 bits, which are the caller's.
    pub key: RKey,
    /// Its memory and rights.
    pub spec: RegionSpec,
}

/// Whom a send request is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// The QP's peer: RC and UC.
    #[default]
    Connected,
    /// Any UD QP.
    Datagram {
        /// The address handle: how to get there.
        path: Path,
        /// The QP there; [`Qpn::MULTICAST`] with a group's address.
        qpn: Qpn,
        /// What that QP asks to be shown. IBTA Vol 1, 10.2.5.
        qkey: u32,
    },
    /// A shared receive queue of the peer: XRC.
    Srq(Srqn),
}

bitflags! {
    /// Send flags, valued as `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Begin only when all earlier READs and atomics of the QP are complete. IBTA Vol 1, 10.8.3.3.
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
    /// Own memory: source of SEND, WRITE and ATOMIC WRITE, destination of READ and atomics, else empty.
    pub sges: SgeList,
    /// Flags.
    pub flags: SendFlags,
    /// Whom it is for.
    pub to: Target,
}

impl SendRequest {
    /// Checks what does not depend on the QP's state; gives the bytes of the message.
    pub fn check(&self) -> Result<u32, PostError> {
        if self.sges.as_slice().len() > SGE_MAX {
            return Err(PostError::TooManySges);
        }
        let bytes = self.sges.bytes();
        let inline = self.sges.as_inline().is_some();
        if bytes > u64::from(MESSAGE_BYTES_MAX) || inline && bytes > INLINE_BYTES_MAX as u64 {
            return Err(PostError::TooLong);
        }
        let fits = match self.operation {
            Operation::Send { .. } | Operation::SendInvalidate { .. } | Operation::Write { .. } => true,
            Operation::Read { .. } => !inline,
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => bytes == 8 && !inline,
            Operation::AtomicWrite { .. } => bytes == 8,
            Operation::Flush { .. }
            | Operation::Bind(_)
            | Operation::Register(_)
            | Operation::LocalInvalidate { .. } => bytes == 0,
        };
        if fits {
            Ok(bytes as u32)
        } else {
            Err(PostError::Invalid)
        }
    }
}

/// A receive work request.
#[derive(Clone, Debug)]
pub struct RecvRequest {
    /// The caller's own number, given back in the completion.
    pub wr_id: u64,
    /// Where the message goes.
    pub sges: SgeList,
}

impl RecvRequest {
    /// Checks what does not depend on the queue.
    pub fn check(&self) -> Result<(), PostError> {
        if self.sges.as_inline().is_some() {
            Err(PostError::Invalid)
        } else if self.sges.as_slice().len() > SGE_MAX {
            Err(PostError::TooManySges)
        } else if self.sges.bytes() > u64::from(MESSAGE_BYTES_MAX) {
            // So a SEND that is longer than a message may be fits no receive. 9.7.4.1.7.
            Err(PostError::TooLong)
        } else {
            Ok(())
        }
    }
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
    /// More elements than [`SGE_MAX`].
    #[error("too many scatter/gather elements")]
    TooManySges,
    /// Longer than a message may be: 2^31 bytes, the path MTU on UD, the limit of inline data.
    #[error("the message is too long")]
    TooLong,
    /// The operation is none of this QP's transport, or its operands contradict each other.
    #[error("the QP does not take this operation")]
    Invalid,
    /// The QP takes its receives from a shared receive queue.
    #[error("the QP takes its receives from a shared receive queue")]
    HasSrq,
    /// No such shared receive queue.
    #[error("no such shared receive queue")]
    NoSrq,
    /// The device does not have this operation.
    #[error("the device does not offer this: {0}")]
    Unsupported(&'static str),
    /// The device refused the request; the number is the system's errno.
    #[error("the device refused the request: {}", std::io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}

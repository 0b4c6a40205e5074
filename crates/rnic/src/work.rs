//! Work requests. IBTA Vol 1, 11.4.1.

use bitflags::bitflags;
use rdmux_wire::roce::{MESSAGE_BYTES_MAX, Placement, Selectivity};
use rdmux_wire::{LKey, Qpn, RKey};

use crate::memory::Access;
use crate::region::RegionSpec;
use crate::remote::RemoteBuffer;
use crate::srq::Srqn;
use crate::transmit::Path;

/// Maximum scatter/gather elements of a work request.
pub const SGE_MAX: usize = 32;
/// Maximum bytes of inline data in a send request.
pub const INLINE_BYTES_MAX: usize = 1024;

/// A piece of own registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Address inside of the region.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region.
    pub lkey: u32,
}

impl Sge {
    /// Returns an element of `length` bytes at `addr` in the region of `lkey`.
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
    /// A list without elements: a zero-length operation.
    pub const EMPTY: SgeList = SgeList(Elements::Few(
        [Sge {
            addr: 0,
            length: 0,
            lkey: 0,
        }; 2],
        0,
    ));

    /// Returns a list that holds the bytes themselves: the caller may reuse its memory at once and need not register it. For SEND,
    /// WRITE and ATOMIC WRITE, up to [`INLINE_BYTES_MAX`].
    pub fn inline(bytes: &[u8]) -> SgeList {
        SgeList(Elements::Inline(bytes.into()))
    }

    /// Returns the elements in order; none if the bytes are inline.
    pub fn as_slice(&self) -> &[Sge] {
        match &self.0 {
            Elements::Few(list, n) => &list[..usize::from(*n)],
            Elements::Many(list) => list,
            Elements::Inline(_) => &[],
        }
    }

    /// Returns the element if it is the only one.
    #[inline]
    pub(crate) fn only(&self) -> Option<&Sge> {
        match &self.0 {
            Elements::Few(list, 1) => Some(&list[0]),
            _ => None,
        }
    }

    /// Returns the bytes if they are inline.
    pub fn as_inline(&self) -> Option<&[u8]> {
        match &self.0 {
            Elements::Inline(bytes) => Some(bytes),
            Elements::Few(..) | Elements::Many(_) => None,
        }
    }

    /// Returns the total bytes of all elements.
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

/// Operation of a send work request.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Sends the list's bytes into the peer's next receive.
    Send {
        /// Immediate data for the receiver's completion.
        imm: Option<u32>,
    },
    /// SEND that also invalidates the peer's memory region or type 2 window of this key. IBTA Vol 1, 9.4.1.1.2.
    SendInvalidate {
        /// Key at the peer.
        rkey: RKey,
    },
    /// RDMA WRITE of the list's bytes to the peer's memory.
    Write {
        /// Address at the peer.
        va: u64,
        /// Key at the peer.
        rkey: RKey,
        /// Immediate data; with it the message consumes a receive of the peer.
        imm: Option<u32>,
    },
    /// RDMA READ from the peer's memory into the list.
    Read {
        /// Address at the peer.
        va: u64,
        /// Key at the peer.
        rkey: RKey,
    },
    /// Stores `swap` into the peer's aligned 8 bytes if their value is `compare`, and returns the previous value in the list's 8 bytes.
    /// Numbers are in the peer's byte order. IBTA Vol 1, 9.4.5.
    CompareSwap {
        /// Address at the peer, a multiple of 8.
        va: u64,
        /// Key at the peer.
        rkey: RKey,
        /// Expected value.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Adds to the peer's aligned 8 bytes, wrapping, and returns the previous value in the list's 8 bytes. IBTA Vol 1, 9.4.5.
    FetchAdd {
        /// Address at the peer, a multiple of 8.
        va: u64,
        /// Key at the peer.
        rkey: RKey,
        /// Value to add.
        add: u64,
    },
    /// ATOMIC WRITE: writes the list's 8 bytes at once, after all earlier bytes are placed. IBTA Vol 1, A19.
    AtomicWrite {
        /// Address at the peer, a multiple of 8.
        va: u64,
        /// Key at the peer.
        rkey: RKey,
    },
    /// FLUSH: the peer brings bytes to the requested placement before this request completes. IBTA Vol 1, A19.
    Flush {
        /// Address at the peer.
        va: u64,
        /// Key at the peer.
        rkey: RKey,
        /// Bytes.
        length: u32,
        /// Placement types.
        placement: Placement,
        /// Selects the range or the whole region.
        selectivity: Selectivity,
    },
    /// Lets peers access a part of a region through a window with its own key, once this request has completed. IBTA Vol 1, 10.6.7.2.
    /// [`crate::Rnic::bind_mw`] binds type 1 windows and chooses their keys.
    Bind(Bind),
    /// Gives a region of [`crate::Rnic::alloc_mr`] its memory. IBTA Vol 1, 10.6.3.4 (fast register).
    Register(Box<Registration>),
    /// Invalidates a region of [`crate::Rnic::alloc_mr`] or an own type 2 window until it is registered or bound again. IBTA Vol 1,
    /// 10.6.7.2.3.
    LocalInvalidate {
        /// Key.
        rkey: RKey,
    },
}

impl Operation {
    /// Returns the address and key of the peer's memory, or of the window or region that the operation concerns.
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

    /// Returns whether the device executes the operation alone, without a packet.
    pub fn is_local(&self) -> bool {
        matches!(
            self,
            Operation::Bind(_) | Operation::Register(_) | Operation::LocalInvalidate { .. }
        )
    }

    /// Returns whether the peer answers with data for the list.
    pub fn takes_answer(&self) -> bool {
        matches!(
            self,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        )
    }
}

/// Binding of a memory window. IBTA Vol 1, 10.6.7.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind {
    /// New key of the window: its present key with low 8 bits of the caller's choice.
    pub window: RKey,
    /// The region, registered with [`Access::MW_BIND`].
    pub region: LKey,
    /// First address inside of the region.
    pub va: u64,
    /// Bytes; 0 unbinds.
    pub length: u64,
    /// Remote rights; with [`Access::ZERO_BASED`] peers' addresses count from the window's start.
    pub access: Access,
}

/// Parameters of [`Operation::Register`].
#[derive(Clone, Debug)]
pub struct Registration {
    /// New key of the region: its present key with low 8 bits of the caller's choice.
    pub key: RKey,
    /// Memory and rights of the region.
    pub spec: RegionSpec,
}

/// Destination of a send request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// The QP's peer: RC and UC.
    #[default]
    Connected,
    /// Any UD QP.
    Datagram {
        /// The address handle: path to the device of that QP.
        path: Path,
        /// QPN of the destination; [`Qpn::MULTICAST`] with a group's address.
        qpn: Qpn,
        /// Q_Key that the destination QP expects. IBTA Vol 1, 10.2.5.
        qkey: u32,
    },
    /// A shared receive queue of the peer: XRC.
    Srq(Srqn),
}

bitflags! {
    /// Send flags, valued as `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Begins only when all earlier READs and atomics of the QP are complete. IBTA Vol 1, 10.8.3.3.
        const FENCE = 1 << 0;
        /// Generates a completion also on success.
        const SIGNALED = 1 << 1;
        /// Wakes a receiver that armed its completion queue for solicited events.
        const SOLICITED = 1 << 2;
    }
}

/// A send work request.
#[derive(Clone, Debug)]
pub struct SendRequest {
    /// Number of the caller's choice, returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// Own memory: source of SEND, WRITE and ATOMIC WRITE, destination of READ and atomics, else empty.
    pub sges: SgeList,
    /// Flags.
    pub flags: SendFlags,
    /// Destination.
    pub to: Target,
}

impl SendRequest {
    /// Returns a request for an operation, for the QP's peer, with `wr_id` 0 and without flags.
    pub fn new(operation: Operation, sges: impl Into<SgeList>) -> SendRequest {
        SendRequest {
            wr_id: 0,
            operation,
            sges: sges.into(),
            flags: SendFlags::empty(),
            to: Target::Connected,
        }
    }

    /// Returns a SEND of the list's bytes.
    pub fn send(sges: impl Into<SgeList>) -> SendRequest {
        SendRequest::new(Operation::Send { imm: None }, sges)
    }

    /// Returns a WRITE of the bytes of `local` to the start of `remote`. `local` alone determines the length, as in every request
    /// that has bytes: the peer checks it against the region, not against `remote`. [`RemoteBuffer::slice`] checks a length.
    pub fn write(local: impl Into<SgeList>, remote: RemoteBuffer) -> SendRequest {
        let RemoteBuffer {
            address: va, rkey, ..
        } = remote;
        SendRequest::new(Operation::Write { va, rkey, imm: None }, local)
    }

    /// Returns a READ of the start of `remote` into `local`, which determines the length.
    pub fn read(local: impl Into<SgeList>, remote: RemoteBuffer) -> SendRequest {
        let RemoteBuffer {
            address: va, rkey, ..
        } = remote;
        SendRequest::new(Operation::Read { va, rkey }, local)
    }

    /// Returns a compare-and-swap of the first 8 bytes of `remote`, whose address must be a multiple of 8. `local`, of 8 bytes, receives
    /// their previous value in the byte order of this host; the peer counts in the byte order of its own.
    pub fn compare_swap(
        local: impl Into<SgeList>,
        remote: RemoteBuffer,
        compare: u64,
        swap: u64,
    ) -> SendRequest {
        let RemoteBuffer {
            address: va, rkey, ..
        } = remote;
        let operation = Operation::CompareSwap {
            va,
            rkey,
            compare,
            swap,
        };
        SendRequest::new(operation, local)
    }

    /// Returns a fetch-and-add to the first 8 bytes of `remote`: addresses and byte order as for [`SendRequest::compare_swap`].
    pub fn fetch_add(local: impl Into<SgeList>, remote: RemoteBuffer, add: u64) -> SendRequest {
        let RemoteBuffer {
            address: va, rkey, ..
        } = remote;
        SendRequest::new(Operation::FetchAdd { va, rkey, add }, local)
    }

    /// Returns an ATOMIC WRITE of the 8 bytes of `local` to the first 8 bytes of `remote`.
    pub fn atomic_write(local: impl Into<SgeList>, remote: RemoteBuffer) -> SendRequest {
        let RemoteBuffer {
            address: va, rkey, ..
        } = remote;
        SendRequest::new(Operation::AtomicWrite { va, rkey }, local)
    }

    /// Returns a FLUSH of `remote`. The length of a FLUSH has 32 bits: a longer buffer flushes the whole region of its key.
    pub fn flush(remote: RemoteBuffer, placement: Placement) -> SendRequest {
        let (length, selectivity) = match u32::try_from(remote.length) {
            Ok(length) => (length, Selectivity::Range),
            Err(_) => (0, Selectivity::MemoryRegion),
        };
        let operation = Operation::Flush {
            va: remote.address,
            rkey: remote.rkey,
            length,
            placement,
            selectivity,
        };
        SendRequest::new(operation, SgeList::EMPTY)
    }

    /// Sets the number that the completion returns.
    #[must_use]
    pub fn wr_id(mut self, wr_id: u64) -> SendRequest {
        self.wr_id = wr_id;
        self
    }

    /// Sets [`SendFlags::SIGNALED`]: the request completes also on success.
    #[must_use]
    pub fn signaled(self) -> SendRequest {
        self.with(SendFlags::SIGNALED)
    }

    /// Sets [`SendFlags::SOLICITED`].
    #[must_use]
    pub fn solicited(self) -> SendRequest {
        self.with(SendFlags::SOLICITED)
    }

    /// Sets [`SendFlags::FENCE`]: the request begins only when all earlier READs and atomics are complete.
    #[must_use]
    pub fn fence(self) -> SendRequest {
        self.with(SendFlags::FENCE)
    }

    fn with(mut self, flags: SendFlags) -> SendRequest {
        self.flags |= flags;
        self
    }

    /// Sets the immediate data of a SEND or WRITE. The other operations carry none: their requests stay unchanged.
    #[must_use]
    pub fn imm(mut self, data: u32) -> SendRequest {
        if let Operation::Send { imm } | Operation::Write { imm, .. } = &mut self.operation {
            *imm = Some(data);
        }
        self
    }

    /// Sets the destination: of a UD QP or an XRC initiator.
    #[must_use]
    pub fn to(mut self, target: Target) -> SendRequest {
        self.to = target;
        self
    }

    /// Checks the properties that do not depend on the QP's state; returns the message length in bytes.
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
    /// Number of the caller's choice, returned in the completion.
    pub wr_id: u64,
    /// Destination of the message's bytes.
    pub sges: SgeList,
}

impl RecvRequest {
    /// Returns a request for one message.
    pub fn new(wr_id: u64, sges: impl Into<SgeList>) -> RecvRequest {
        let sges = sges.into();
        RecvRequest { wr_id, sges }
    }

    /// Checks the properties that do not depend on the queue.
    pub fn check(&self) -> Result<(), PostError> {
        if self.sges.as_inline().is_some() {
            Err(PostError::Invalid)
        } else if self.sges.as_slice().len() > SGE_MAX {
            Err(PostError::TooManySges)
        } else if self.sges.bytes() > u64::from(MESSAGE_BYTES_MAX) {
            // With this check no receive fits a SEND that exceeds the maximum message length. 9.7.4.1.7.
            Err(PostError::TooLong)
        } else {
            Ok(())
        }
    }
}

/// Error of posting a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// No such QP.
    #[error("no such QP")]
    NoQp,
    /// The QP does not accept this request in its state. IBTA Vol 1, 10.3.1.
    #[error("the QP's state does not accept this request")]
    WrongState,
    /// The queue is full.
    #[error("the work queue is full")]
    QueueFull,
    /// More elements than [`SGE_MAX`].
    #[error("too many scatter/gather elements")]
    TooManySges,
    /// The message exceeds its limit: 2^31 bytes, the path MTU on UD, or the limit of inline data.
    #[error("the message is too long")]
    TooLong,
    /// The QP's transport does not have the operation, or its operands contradict each other.
    #[error("the QP does not support this operation, or its lengths or operands do not fit it")]
    Invalid,
    /// The QP takes its receives from a shared receive queue.
    #[error("the QP uses a shared receive queue for its receives")]
    HasSrq,
    /// No such shared receive queue.
    #[error("no such shared receive queue")]
    NoSrq,
    /// The device does not support this operation.
    #[error("the device does not offer this: {0}")]
    Unsupported(&'static str),
    /// The device refused the request; the number is the system's errno.
    #[error("the device refused the request: {}", std::io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: Sge = Sge::new(0x1000, 8, LKey(5));
    const REMOTE: RemoteBuffer = RemoteBuffer {
        address: 0x2000,
        length: 100,
        rkey: RKey(7),
    };

    /// Returns what a request is, without its flags and numbers.
    fn parts(request: &SendRequest) -> (String, usize) {
        (format!("{:?}", request.operation), request.sges.as_slice().len())
    }

    #[test]
    fn send_request__each_constructor() {
        let (va, rkey) = (REMOTE.address, REMOTE.rkey);
        let all = [
            (SendRequest::send(LOCAL), Operation::Send { imm: None }),
            (
                SendRequest::write(LOCAL, REMOTE),
                Operation::Write { va, rkey, imm: None },
            ),
            (SendRequest::read(LOCAL, REMOTE), Operation::Read { va, rkey }),
            (
                SendRequest::compare_swap(LOCAL, REMOTE, 3, 4),
                Operation::CompareSwap {
                    va,
                    rkey,
                    compare: 3,
                    swap: 4,
                },
            ),
            (
                SendRequest::fetch_add(LOCAL, REMOTE, 9),
                Operation::FetchAdd { va, rkey, add: 9 },
            ),
            (
                SendRequest::atomic_write(LOCAL, REMOTE),
                Operation::AtomicWrite { va, rkey },
            ),
        ];
        for (request, operation) in all {
            assert_eq!(parts(&request), (format!("{operation:?}"), 1));
            assert_eq!(request.sges.as_slice(), [LOCAL]);
            assert_eq!(
                (request.wr_id, request.flags, request.to),
                (0, SendFlags::empty(), Target::Connected)
            );
            assert_eq!(request.check(), Ok(8));
        }
    }

    #[test]
    fn flush__range_or_region() {
        let of_length = |length| SendRequest::flush(RemoteBuffer { length, ..REMOTE }, Placement::PERSISTENT);
        let expected = |length, selectivity| Operation::Flush {
            va: 0x2000,
            rkey: RKey(7),
            length,
            placement: Placement::PERSISTENT,
            selectivity,
        };
        for (bytes, length, selectivity) in [
            (100, 100, Selectivity::Range),
            (0xffff_ffff, u32::MAX, Selectivity::Range),
            (1 << 32, 0, Selectivity::MemoryRegion),
        ] {
            let request = of_length(bytes);
            assert_eq!(
                parts(&request),
                (format!("{:?}", expected(length, selectivity)), 0)
            );
            assert_eq!(request.check(), Ok(0));
        }
    }

    #[test]
    fn send_request__setters_add_to_each_other() {
        let srq = Target::Srq(Srqn(3));
        let request = SendRequest::send(LOCAL)
            .wr_id(7)
            .signaled()
            .solicited()
            .fence()
            .imm(5)
            .to(srq);
        assert_eq!(
            (request.wr_id, request.flags, request.to),
            (7, SendFlags::all(), srq)
        );
        assert!(matches!(request.operation, Operation::Send { imm: Some(5) }));
        let write = SendRequest::write(LOCAL, REMOTE).imm(6);
        assert!(matches!(write.operation, Operation::Write { imm: Some(6), .. }));
        let read = SendRequest::read(LOCAL, REMOTE);
        assert_eq!(parts(&read.clone().imm(6)), parts(&read));
    }

    #[test]
    fn recv_request__new() {
        let request = RecvRequest::new(4, LOCAL);
        assert_eq!((request.wr_id, request.sges.as_slice()), (4, &[LOCAL][..]));
    }
}

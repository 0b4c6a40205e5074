//! A posted work request.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | opcode; 0 is none, so that zeroed memory holds no request |
//! | 1 | flags |
//! | 2..4 | number of elements of the list, or of bytes with flag INLINE |
//! | 4..8 | queue |
//! | 8..16 | wr_id |
//! | 16..24 | remote address; of a datagram, the address handle and the QPN |
//! | 24..28 | remote key; of a datagram, the Q_Key |
//! | 28..32 | immediate data, key to invalidate, or the placement of a FLUSH |
//! | 32.. | the data: elements of 16 bytes (address, key, length), or bytes inline |
//! | 48..64 | operands of an atomic operation, which has one element; the bytes of a FLUSH are at 48..52 |
//!
//! The data goes on in the descriptors that follow, which hold nothing else: the first one tells how many. So one descriptor has room for two
//! elements or 32 bytes inline.

use bitflags::bitflags;

use super::{DESCRIPTOR_BYTES, Descriptor, QueueId};
use crate::bytes::{le16, le32, le64, put};
use crate::roce::{Feth, Placement, Selectivity};
use crate::{LKey, Malformed, Qpn, RKey};

const FLAGS_AT: usize = 1;
const COUNT_AT: usize = 2;
const QUEUE_AT: usize = 4;
const WR_ID_AT: usize = 8;
const VA_AT: usize = 16;
const QPN_AT: usize = 20;
const RKEY_AT: usize = 24;
const IMM_AT: usize = 28;
const OPERAND_AT: usize = 48;
const SWAP_AT: usize = 56;

const SEND: u8 = 1;
const SEND_IMM: u8 = 2;
const SEND_INVALIDATE: u8 = 3;
const WRITE: u8 = 4;
const WRITE_IMM: u8 = 5;
const READ: u8 = 6;
const COMPARE_SWAP: u8 = 7;
const FETCH_ADD: u8 = 8;
const ATOMIC_WRITE: u8 = 9;
const FLUSH: u8 = 10;
const RECV: u8 = 11;
const SHARED_RECV: u8 = 12;
const DATAGRAM: u8 = 13;
const DATAGRAM_IMM: u8 = 14;

bitflags! {
    /// Flags of a request, valued as `enum ibv_send_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct WorkFlags: u8 {
        /// Begins only when all earlier READs and atomics of the queue pair are complete. IBTA Vol 1, 10.8.3.3.
        const FENCE = 1 << 0;
        /// Generates a completion also on success.
        const SIGNALED = 1 << 1;
        /// Wakes a receiver that armed its completion queue for solicited events.
        const SOLICITED = 1 << 2;
    }
}

/// In the byte of the flags: the data is inline.
const INLINE: u8 = 1 << 3;

/// Memory of the peer that a request concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address at the peer.
    pub va: u64,
    /// Key, as the node named it to the application.
    pub rkey: RKey,
}

/// Destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Address handle, as the node named it to the application.
    pub handle: u32,
    /// The queue pair there.
    pub qpn: Qpn,
    /// The Q_Key that it demands. IBTA Vol 1, 10.2.5.
    pub qkey: u32,
}

/// Operation of a request. The operations are those of the verbs of the same name, IBTA Vol 1, 11.4.1 and A19.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkOperation {
    /// SEND.
    Send {
        /// Immediate data for the receiver's completion.
        imm: Option<u32>,
    },
    /// SEND of a datagram.
    Datagram {
        /// Destination.
        to: Destination,
        /// Immediate data for the receiver's completion.
        imm: Option<u32>,
    },
    /// SEND that also invalidates a key of the peer.
    SendInvalidate {
        /// The key.
        rkey: RKey,
    },
    /// RDMA WRITE.
    Write {
        /// Destination.
        remote: Remote,
        /// Immediate data; with it the message takes a receive of the peer.
        imm: Option<u32>,
    },
    /// RDMA READ.
    Read {
        /// Source.
        remote: Remote,
    },
    /// Stores `swap` into 8 bytes of the peer if they hold `compare`.
    CompareSwap {
        /// The 8 bytes.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Adds to 8 bytes of the peer.
    FetchAdd {
        /// The 8 bytes.
        remote: Remote,
        /// Value to add.
        add: u64,
    },
    /// ATOMIC WRITE of 8 bytes.
    AtomicWrite {
        /// Destination.
        remote: Remote,
    },
    /// FLUSH.
    Flush {
        /// First byte.
        remote: Remote,
        /// Bytes.
        length: u32,
        /// Placement types.
        placement: Placement,
        /// The range, or the whole region.
        selectivity: Selectivity,
    },
    /// A receive of the queue pair.
    Recv,
    /// A receive of a shared receive queue, which [`Work::queue`] names.
    SharedRecv,
}

/// How much data a request has: a scatter/gather list, or bytes inline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkData {
    /// This many elements, [`Work::ELEMENTS_MAX`] at most: [`Work::elements`].
    Elements(u16),
    /// This many bytes, [`Work::INLINE_BYTES_MAX`] at most, which the request itself holds: [`Work::inline`].
    Inline(u16),
}

/// A piece of the application's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// Address inside of the region.
    pub addr: u64,
    /// Key of the region, as the node named it to the application.
    pub lkey: LKey,
    /// Bytes.
    pub length: u32,
}

impl Element {
    /// Bytes of an element.
    pub const LEN: usize = 16;

    /// Reads an element.
    #[inline]
    pub fn parse(bytes: &[u8; Element::LEN]) -> Element {
        Element {
            addr: le64(bytes, 0),
            lkey: LKey(le32(bytes, 8)),
            length: le32(bytes, 12),
        }
    }

    /// Writes the element.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8; Element::LEN]) {
        put(bytes, 0, &self.addr.to_le_bytes());
        put(bytes, 8, &self.lkey.0.to_le_bytes());
        put(bytes, 12, &self.length.to_le_bytes());
    }
}

/// A work request: all but its data, which follows at [`Work::DATA_AT`] of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The queue to which it was posted.
    pub queue: QueueId,
    /// Number of the application's choice, returned in the completion.
    pub wr_id: u64,
    /// Flags; a receive has none.
    pub flags: WorkFlags,
    /// The operation.
    pub operation: WorkOperation,
    /// Its data. Atomic operations have one element of 8 bytes, FLUSH has none. SEND, WRITE and ATOMIC WRITE alone may have bytes inline.
    pub data: WorkData,
}

impl Work {
    /// Offset of the data in the request's bytes.
    pub const DATA_AT: usize = 32;
    /// Most elements of a request.
    pub const ELEMENTS_MAX: usize = 32;
    /// Most bytes inline.
    pub const INLINE_BYTES_MAX: usize = 1024;
    /// Most bytes inline of a request that is one descriptor.
    pub const INLINE_BYTES_ONE: usize = DESCRIPTOR_BYTES - Work::DATA_AT;

    /// Reads the first descriptor of a request.
    ///
    /// # Errors
    /// An undefined opcode or flag, or data that the operation cannot have.
    #[inline]
    pub fn parse(bytes: &Descriptor) -> Result<Work, Malformed> {
        let (opcode, flags) = (bytes[0], bytes[FLAGS_AT]);
        let remote = Remote {
            va: le64(bytes, VA_AT),
            rkey: RKey(le32(bytes, RKEY_AT)),
        };
        let imm = le32(bytes, IMM_AT);
        // Bits beyond those of a number are not the application's to use.
        let qpn = Qpn::new(le32(bytes, QPN_AT));
        let to = Destination {
            handle: le32(bytes, VA_AT),
            qpn,
            qkey: le32(bytes, RKEY_AT),
        };
        let operation = match opcode {
            DATAGRAM | DATAGRAM_IMM if qpn.value() != le32(bytes, QPN_AT) => {
                return undefined("QPN", le32(bytes, QPN_AT).into());
            }
            DATAGRAM => WorkOperation::Datagram { to, imm: None },
            DATAGRAM_IMM => WorkOperation::Datagram { to, imm: Some(imm) },
            SEND => WorkOperation::Send { imm: None },
            SEND_IMM => WorkOperation::Send { imm: Some(imm) },
            SEND_INVALIDATE => WorkOperation::SendInvalidate { rkey: RKey(imm) },
            WRITE => WorkOperation::Write { remote, imm: None },
            WRITE_IMM => WorkOperation::Write {
                remote,
                imm: Some(imm),
            },
            READ => WorkOperation::Read { remote },
            COMPARE_SWAP => WorkOperation::CompareSwap {
                remote,
                compare: le64(bytes, OPERAND_AT),
                swap: le64(bytes, SWAP_AT),
            },
            FETCH_ADD => WorkOperation::FetchAdd {
                remote,
                add: le64(bytes, OPERAND_AT),
            },
            ATOMIC_WRITE => WorkOperation::AtomicWrite { remote },
            FLUSH => {
                let feth = Feth::parse(&bytes[IMM_AT..])?;
                WorkOperation::Flush {
                    remote,
                    length: le32(bytes, OPERAND_AT),
                    placement: feth.placement,
                    selectivity: feth.selectivity,
                }
            }
            RECV => WorkOperation::Recv,
            SHARED_RECV => WorkOperation::SharedRecv,
            other => return undefined("work opcode", other.into()),
        };
        let count = le16(bytes, COUNT_AT);
        let data = if flags & INLINE == 0 {
            WorkData::Elements(count)
        } else {
            WorkData::Inline(count)
        };
        let work = Work {
            queue: QueueId(le32(bytes, QUEUE_AT)),
            wr_id: le64(bytes, WR_ID_AT),
            flags: match WorkFlags::from_bits(flags & !INLINE) {
                Some(flags) => flags,
                None => return undefined("work flags", flags.into()),
            },
            operation,
            data,
        };
        match work.operation {
            WorkOperation::Recv | WorkOperation::SharedRecv if flags != 0 => {
                undefined("flags of a receive", flags.into())
            }
            _ if !work.has_valid_data() => undefined("data of a work request", count.into()),
            WorkOperation::CompareSwap { .. } | WorkOperation::FetchAdd { .. } => {
                match work.elements(bytes).next() {
                    Some(Element { length: 8, .. }) => Ok(work),
                    _ => undefined("bytes of an atomic operation", 0),
                }
            }
            _ => Ok(work),
        }
    }

    /// Writes the first descriptor, and zeroes where its data goes. [`Work::put_elements`] or [`Work::put_inline`] writes the data.
    ///
    /// # Panics
    /// If the operation cannot have such data, or a receive has flags.
    #[inline]
    pub fn emit(&self, bytes: &mut Descriptor) {
        assert!(self.has_valid_data(), "{self:?}");
        bytes.fill(0);
        let (opcode, remote, imm) = match self.operation {
            WorkOperation::Send { imm: None } => (SEND, None, 0),
            WorkOperation::Send { imm: Some(imm) } => (SEND_IMM, None, imm),
            WorkOperation::Datagram { to, imm } => {
                put(bytes, VA_AT, &to.handle.to_le_bytes());
                put(bytes, QPN_AT, &to.qpn.value().to_le_bytes());
                put(bytes, RKEY_AT, &to.qkey.to_le_bytes());
                let opcode = if imm.is_some() { DATAGRAM_IMM } else { DATAGRAM };
                (opcode, None, imm.unwrap_or(0))
            }
            WorkOperation::SendInvalidate { rkey } => (SEND_INVALIDATE, None, rkey.0),
            WorkOperation::Write { remote, imm: None } => (WRITE, Some(remote), 0),
            WorkOperation::Write {
                remote,
                imm: Some(imm),
            } => (WRITE_IMM, Some(remote), imm),
            WorkOperation::Read { remote } => (READ, Some(remote), 0),
            WorkOperation::CompareSwap {
                remote,
                compare,
                swap,
            } => {
                put(bytes, OPERAND_AT, &compare.to_le_bytes());
                put(bytes, SWAP_AT, &swap.to_le_bytes());
                (COMPARE_SWAP, Some(remote), 0)
            }
            WorkOperation::FetchAdd { remote, add } => {
                put(bytes, OPERAND_AT, &add.to_le_bytes());
                (FETCH_ADD, Some(remote), 0)
            }
            WorkOperation::AtomicWrite { remote } => (ATOMIC_WRITE, Some(remote), 0),
            WorkOperation::Flush {
                remote,
                length,
                placement,
                selectivity,
            } => {
                put(bytes, OPERAND_AT, &length.to_le_bytes());
                let mut feth = [0; Feth::LEN];
                Feth {
                    placement,
                    selectivity,
                }
                .emit(&mut feth);
                (FLUSH, Some(remote), u32::from_le_bytes(feth))
            }
            WorkOperation::Recv => (RECV, None, 0),
            WorkOperation::SharedRecv => (SHARED_RECV, None, 0),
        };
        let is_receive = matches!(opcode, RECV | SHARED_RECV);
        assert!(!is_receive || self.flags.is_empty(), "{self:?}");
        let (count, inline) = match self.data {
            WorkData::Elements(count) => (count, 0),
            WorkData::Inline(count) => (count, INLINE),
        };
        bytes[0] = opcode;
        bytes[FLAGS_AT] = self.flags.bits() | inline;
        put(bytes, COUNT_AT, &count.to_le_bytes());
        put(bytes, QUEUE_AT, &self.queue.0.to_le_bytes());
        put(bytes, WR_ID_AT, &self.wr_id.to_le_bytes());
        if let Some(remote) = remote {
            put(bytes, VA_AT, &remote.va.to_le_bytes());
            put(bytes, RKEY_AT, &remote.rkey.0.to_le_bytes());
        }
        put(bytes, IMM_AT, &imm.to_le_bytes());
    }

    /// Returns the number of the request's descriptors, [`super::WORK_DESCRIPTORS_MAX`] at most.
    #[inline]
    pub fn descriptors(&self) -> usize {
        (Work::DATA_AT + self.data_bytes()).div_ceil(DESCRIPTOR_BYTES)
    }

    /// Returns the elements in the request's bytes, which are all of its descriptors. There are none if the data is inline.
    #[inline]
    pub fn elements<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = Element> + use<'a> {
        let len = match self.data {
            WorkData::Elements(_) => self.data_bytes(),
            WorkData::Inline(_) => 0,
        };
        let data = bytes.get(Work::DATA_AT..Work::DATA_AT + len).unwrap_or_default();
        data.as_chunks().0.iter().map(Element::parse)
    }

    /// Returns the bytes inline in the request's bytes, which are all of its descriptors. There are none if the data is a list.
    #[inline]
    pub fn inline<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        let len = match self.data {
            WorkData::Inline(_) => self.data_bytes(),
            WorkData::Elements(_) => 0,
        };
        bytes.get(Work::DATA_AT..Work::DATA_AT + len).unwrap_or_default()
    }

    /// Writes the elements into the request's bytes, behind [`Work::emit`].
    ///
    /// # Panics
    /// If their number is not that of [`Work::data`], or `bytes` is not all of the request's descriptors.
    pub fn put_elements(&self, bytes: &mut [u8], elements: &[Element]) {
        assert_eq!(self.data, WorkData::Elements(elements.len() as u16));
        let chunks = bytes[Work::DATA_AT..Work::DATA_AT + self.data_bytes()]
            .as_chunks_mut()
            .0;
        for (chunk, element) in chunks.iter_mut().zip(elements) {
            element.emit(chunk);
        }
    }

    /// Writes the bytes inline into the request's bytes, behind [`Work::emit`].
    ///
    /// # Panics
    /// If their number is not that of [`Work::data`], or `bytes` is not all of the request's descriptors.
    pub fn put_inline(&self, bytes: &mut [u8], inline: &[u8]) {
        assert_eq!(self.data, WorkData::Inline(inline.len() as u16));
        put(bytes, Work::DATA_AT, inline);
    }

    fn data_bytes(&self) -> usize {
        match self.data {
            WorkData::Elements(count) => usize::from(count) * Element::LEN,
            WorkData::Inline(count) => usize::from(count),
        }
    }

    /// Returns whether the operation can have so much data of that kind.
    fn has_valid_data(&self) -> bool {
        match (self.operation, self.data) {
            (
                WorkOperation::Send { .. }
                | WorkOperation::Datagram { .. }
                | WorkOperation::SendInvalidate { .. }
                | WorkOperation::Write { .. },
                WorkData::Inline(bytes),
            ) => usize::from(bytes) <= Work::INLINE_BYTES_MAX,
            (WorkOperation::AtomicWrite { .. }, WorkData::Inline(bytes)) => bytes == 8,
            (_, WorkData::Inline(_)) => false,
            (WorkOperation::Flush { .. }, WorkData::Elements(count)) => count == 0,
            (
                WorkOperation::CompareSwap { .. }
                | WorkOperation::FetchAdd { .. }
                | WorkOperation::AtomicWrite { .. },
                WorkData::Elements(count),
            ) => count == 1,
            (_, WorkData::Elements(count)) => usize::from(count) <= Work::ELEMENTS_MAX,
        }
    }
}

fn undefined<T>(what: &'static str, value: u64) -> Result<T, Malformed> {
    Err(Malformed::Undefined { what, value })
}

#[cfg(test)]
mod tests;

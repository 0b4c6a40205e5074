//! Memory of a peer, as work requests name it.

use std::ops::{Bound, RangeBounds};

use rdmux_wire::RKey;

/// A piece of a peer's registered memory: the operand of WRITE, READ, atomics and FLUSH. The peer makes it for its own memory and
/// sends it, for example as private data of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteBuffer {
    /// Address of the first byte at the peer.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// Key of the region or window at the peer.
    pub rkey: RKey,
}

impl RemoteBuffer {
    /// Length of [`RemoteBuffer::to_bytes`].
    pub const BYTES: usize = 20;

    /// Returns the encoding that [`RemoteBuffer::from_bytes`] reads: bytes 0 to 7 are the address, 8 to 15 the length, 16 to 19 the
    /// key, each in big-endian order.
    pub fn to_bytes(self) -> [u8; RemoteBuffer::BYTES] {
        let mut bytes = [0; RemoteBuffer::BYTES];
        bytes[..8].copy_from_slice(&self.address.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.length.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes
    }

    /// Returns the buffer of an encoding. All encodings are valid; the peer checks address and key of each request.
    pub fn from_bytes(bytes: &[u8; RemoteBuffer::BYTES]) -> RemoteBuffer {
        let [address @ .., l0, l1, l2, l3, l4, l5, l6, l7, k0, k1, k2, k3] = *bytes;
        RemoteBuffer {
            address: u64::from_be_bytes(address),
            length: u64::from_be_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
            rkey: RKey(u32::from_be_bytes([k0, k1, k2, k3])),
        }
    }

    /// Returns the part of the buffer that `range` selects, counted in bytes from its start. `None`: the range ends before it
    /// begins, exceeds the buffer, or exceeds the address space.
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Option<RemoteBuffer> {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.checked_add(1)?,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.checked_add(1)?,
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.length,
        };
        if end > self.length {
            return None;
        }
        // The whole part has addresses, not its start alone.
        self.address.checked_add(end)?;
        Some(RemoteBuffer {
            address: self.address.checked_add(start)?,
            length: end.checked_sub(start)?,
            rkey: self.rkey,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUFFER: RemoteBuffer = RemoteBuffer {
        address: 0x0102_0304_0506_0708,
        length: 0x1112_1314_1516_1718,
        rkey: RKey(0x2122_2324),
    };

    #[test]
    fn to_bytes__layout_and_back() {
        let bytes = BUFFER.to_bytes();
        let expected = [
            1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(RemoteBuffer::from_bytes(&bytes), BUFFER);
    }

    #[test]
    fn slice__inside() {
        let buffer = RemoteBuffer {
            length: 100,
            ..BUFFER
        };
        let part = |range: std::ops::Range<u64>| {
            buffer
                .slice(range)
                .map(|b| (b.address - buffer.address, b.length))
        };
        assert_eq!(part(0..100), Some((0, 100)));
        assert_eq!(part(99..100), Some((99, 1)));
        assert_eq!(part(100..100), Some((100, 0)));
        assert_eq!(buffer.slice(..), Some(buffer));
        assert_eq!(buffer.slice(10..), buffer.slice(10..=99));
        assert_eq!(
            buffer.slice(10..).and_then(|rest| rest.slice(5..10)),
            buffer.slice(15..20)
        );
        assert_eq!(buffer.slice(1..2).map(|b| b.rkey), Some(buffer.rkey));
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "the ranges are wrong on purpose")]
    fn slice__outside_is_none() {
        let buffer = RemoteBuffer {
            length: 100,
            ..BUFFER
        };
        assert_eq!(buffer.slice(0..101), None);
        assert_eq!(buffer.slice(..=100), None);
        assert_eq!(buffer.slice(101..), None);
        assert_eq!(buffer.slice(60..50), None);
        assert_eq!(buffer.slice(0..=u64::MAX), None);
        assert_eq!(buffer.slice((Bound::Excluded(u64::MAX), Bound::Unbounded)), None);
    }

    /// A peer may send any address and length.
    #[test]
    fn slice__past_the_address_space_is_none() {
        let buffer = RemoteBuffer {
            address: u64::MAX - 10,
            length: u64::MAX,
            ..BUFFER
        };
        assert_eq!(buffer.slice(0..10).map(|b| b.length), Some(10));
        assert_eq!(buffer.slice(5..11), None);
        assert_eq!(buffer.slice(..), None);
    }
}

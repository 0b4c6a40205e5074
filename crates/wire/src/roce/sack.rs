//! Selective negative acknowledgement: the report of an rdmux responder about a gap, to a requester that agreed to receive such reports
//! ([`crate::cm::Extensions::selective`]). It is not part of the specification, and is never sent to any other requester.
//!
//! It is an Acknowledge with the NAK of a PSN sequence error (IBTA Vol 1, 9.7.5.2.8), which has no payload in the specification. The
//! PSN of its BTH is the missing one, and it acknowledges everything before that PSN, like any such NAK. The payload is a bitmap:
//!
//! ```text
//! bit i%8 of byte i/8   the request packet with PSN + 1 + i was received and is kept
//! ```
//!
//! A READ request is represented by its first PSN only. The bitmap consists of whole 32-bit words, at least one, has at most
//! [`Sack::BYTES_MAX`] bytes, and fits the path MTU. Bits beyond its end count as 0. A responder does not drop a packet that it has
//! reported as received.

use crate::Malformed;
use crate::roce::{NakCode, Operation, Packet, Syndrome};

/// The bitmap of a selective negative acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sack<'a>(&'a [u8]);

impl<'a> Sack<'a> {
    /// Maximum bytes of the bitmap.
    pub const BYTES_MAX: usize = 512;

    /// Returns the number of PSNs after the missing one that a bitmap can cover at this path MTU.
    pub const fn reach(path_mtu: u32) -> u32 {
        let bytes = if path_mtu < Sack::BYTES_MAX as u32 {
            path_mtu
        } else {
            Sack::BYTES_MAX as u32
        };
        8 * bytes
    }

    /// Reads the bitmap in the payload of an Acknowledge.
    pub fn parse(payload: &'a [u8]) -> Result<Sack<'a>, Malformed> {
        if payload.is_empty() || payload.len() > Sack::BYTES_MAX || !payload.len().is_multiple_of(4) {
            return Err(Malformed::Undefined {
                what: "selective acknowledgement of this many bytes",
                value: payload.len() as u64,
            });
        }
        Ok(Sack(payload))
    }

    /// Returns the bitmap of a packet: `None` if the packet is not a NAK of a PSN sequence error, or is one without a payload.
    pub fn of(packet: &Packet<'a>) -> Option<Result<Sack<'a>, Malformed>> {
        let nak = Syndrome::Nak(NakCode::PsnSequence);
        let is_nak = packet.bth.opcode.operation == Operation::Acknowledge
            && packet.aeth().is_some_and(|aeth| aeth.syndrome == nak);
        (is_nak && !packet.payload().is_empty()).then(|| Sack::parse(packet.payload()))
    }

    /// Returns whether the packet `offset` PSNs after the missing one was received; the missing one itself was not.
    pub fn holds(&self, offset: u32) -> bool {
        let Some(bit) = offset.checked_sub(1) else {
            return false;
        };
        self.0
            .get(bit as usize / 8)
            .is_some_and(|byte| byte >> (bit % 8) & 1 == 1)
    }

    /// Returns the number of PSNs from the missing one to the last one received, or 0 if none was received.
    pub fn last(&self) -> u32 {
        let byte = self.0.iter().rposition(|byte| *byte != 0);
        byte.map_or(0, |at| 8 * at as u32 + 8 - self.0[at].leading_zeros())
    }

    /// Returns the number of packets that were received.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|byte| byte.count_ones()).sum()
    }

    /// Returns the bytes of a bitmap that covers the packet `last` PSNs after the missing one.
    pub fn len_for(last: u32) -> usize {
        (last.max(1).div_ceil(32) as usize * 4).min(Sack::BYTES_MAX)
    }

    /// Writes the bitmap of these offsets into `b`, whose length is that of [`Sack::len_for`]; offsets beyond it are omitted.
    pub fn emit(offsets: impl Iterator<Item = u32>, b: &mut [u8]) {
        b.fill(0);
        for offset in offsets {
            if let Some(bit) = offset.checked_sub(1)
                && let Some(byte) = b.get_mut(bit as usize / 8)
            {
                *byte |= 1 << (bit % 8);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse__inverts_emit() {
        for offsets in [&[1][..], &[1, 2, 8, 9, 31, 32], &[33], &[4096], &[2, 700, 4095]] {
            let last = *offsets.last().unwrap();
            let mut bytes = vec![0xee; Sack::len_for(last)];
            Sack::emit(offsets.iter().copied(), &mut bytes);
            let sack = Sack::parse(&bytes).unwrap();
            let held: Vec<u32> = (0..=4200).filter(|offset| sack.holds(*offset)).collect();
            assert_eq!(held, offsets);
            assert_eq!((sack.last(), sack.count()), (last, offsets.len() as u32));
        }
    }

    #[test]
    fn parse__first_bits() {
        let sack = Sack::parse(&[0b101, 0, 0, 0x80]).unwrap();
        assert!(!sack.holds(0) && sack.holds(1) && !sack.holds(2) && sack.holds(3));
        assert_eq!(sack.last(), 32);
        assert_eq!(Sack::parse(&[0; 4]).unwrap().last(), 0);
    }

    #[test]
    fn parse__lengths() {
        for len in [0, 1, 3, 6, 516] {
            assert!(Sack::parse(&vec![0; len]).is_err(), "{len}");
        }
        for len in [4, 8, 512] {
            assert!(Sack::parse(&vec![0; len]).is_ok(), "{len}");
        }
    }

    #[test]
    fn reach__fits_the_path_mtu() {
        assert_eq!([256, 512, 4096].map(Sack::reach), [256 * 8, 512 * 8, 512 * 8]);
        assert_eq!(Sack::len_for(Sack::reach(256)), 256);
        assert_eq!([0, 1, 32, 33].map(Sack::len_for), [4, 4, 4, 8]);
    }
}

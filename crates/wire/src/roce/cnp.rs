//! Congestion notification packets: a BTH with BECN set, and 16 reserved bytes. IBTA Vol 1, A17.9.3.
//!
//! Their opcode belongs to no transport service, so a receiver identifies them before it calls [`crate::roce::Packet`].

use crate::bytes::{be16, be24, be32, need, put, put24};
use crate::roce::{Bth, ICRC_LEN, PKEY_DEFAULT};
use crate::{Malformed, Qpn};

/// A congestion notification: a packet that this QP sent was marked in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cnp {
    /// The QP whose packets are marked.
    pub dest_qpn: Qpn,
    /// Partition key.
    pub pkey: u16,
}

impl Cnp {
    /// Opcode.
    pub const OPCODE: u8 = 0x81;
    /// Bytes of the packet before the ICRC.
    pub const LEN: usize = Bth::LEN + 16;

    /// Returns a notification with the default partition key.
    pub const fn new(dest_qpn: Qpn) -> Cnp {
        Cnp {
            dest_qpn,
            pkey: PKEY_DEFAULT,
        }
    }

    /// Returns whether a UDP payload is a CNP by its opcode.
    pub fn is_cnp(b: &[u8]) -> bool {
        b.first() == Some(&Cnp::OPCODE)
    }

    /// Reads a packet, ICRC included. Also returns the ICRC, which the caller must check. Ignores reserved fields.
    pub fn parse(b: &[u8]) -> Result<(Cnp, u32), Malformed> {
        need("CNP", b, Cnp::LEN + ICRC_LEN)?;
        let undefined = |what, value: u8| Malformed::Undefined {
            what,
            value: value.into(),
        };
        if b.len() > Cnp::LEN + ICRC_LEN || !Cnp::is_cnp(b) {
            return Err(undefined("CNP opcode or length", b[0]));
        }
        if b[1] & 0x0f != 0 {
            return Err(undefined("BTH transport version", b[1] & 0x0f));
        }
        if b[4] & 0x40 == 0 {
            return Err(undefined("CNP without BECN", b[4]));
        }
        let cnp = Cnp {
            dest_qpn: Qpn::new(be24(b, 5)),
            pkey: be16(b, 2),
        };
        Ok((cnp, be32(b, Cnp::LEN).swap_bytes()))
    }

    /// Writes everything except the ICRC to the first [`Cnp::LEN`] bytes of `b`.
    pub fn emit(&self, b: &mut [u8]) {
        b[..Cnp::LEN].fill(0);
        b[0] = Cnp::OPCODE;
        put(b, 2, &self.pkey.to_be_bytes());
        b[4] = 0x40; // BECN
        put24(b, 5, self.dest_qpn.value());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet() -> Vec<u8> {
        let mut bytes = vec![0xee; Cnp::LEN];
        Cnp::new(Qpn::new(0x12_3456)).emit(&mut bytes);
        bytes.extend_from_slice(&[1, 2, 3, 4]);
        bytes
    }

    #[test]
    fn emit__as_specified() {
        let mut expected = vec![0x81, 0, 0xff, 0xff, 0x40, 0x12, 0x34, 0x56, 0, 0, 0, 0];
        expected.extend_from_slice(&[0; 16]);
        expected.extend_from_slice(&[1, 2, 3, 4]);
        assert_eq!(packet(), expected);
    }

    #[test]
    fn parse__inverts_emit() {
        let cnp = Cnp::new(Qpn::new(0x12_3456));
        assert_eq!(Cnp::parse(&packet()), Ok((cnp, 0x0403_0201)));
    }

    #[test]
    fn parse__what_is_no_cnp() {
        let bytes = packet();
        for len in 0..bytes.len() {
            assert!(Cnp::parse(&bytes[..len]).is_err());
        }
        let broken = |at: usize, value: u8| {
            let mut bytes = packet();
            bytes[at] = value;
            Cnp::parse(&bytes).is_err()
        };
        assert!(broken(0, 0x80) && broken(1, 1) && broken(4, 0x80));
        let mut long = packet();
        long.push(0);
        assert!(Cnp::parse(&long).is_err());
    }
}

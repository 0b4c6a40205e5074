//! Carried acknowledgement: a positive acknowledgement inside of a request packet, between rdmux endpoints that agreed to it
//! ([`crate::cm::Extensions::carried_acks`]). It is not part of the specification, and is never sent to any other endpoint.
//!
//! Only a packet of a SEND or WRITE on RC carries one. Bit 6 behind the BTH's acknowledge request is set, one of those that are
//! reserved (IBTA Vol 1, 9.2), and four bytes stand between the pad and the ICRC, which covers both:
//!
//! ```text
//!  0  syndrome, that of an Acknowledge without a credit limit   1..3  PSN
//! ```
//!
//! They mean the same as an Acknowledge with this PSN: the sender has done all requests up to that one. They count as a header: a packet
//! that carries them is not longer than what a link with the path MTU carries ([`super::LINK_HEADERS`]). Programs that do not know of the bit see four more bytes of payload, and
//! everything else where it always is.
//!
//! The PSN is given in full: a packet may arrive late, and part of a PSN would then name a packet that was sent since.

use crate::bytes::{be24, need, put24};
use crate::{Malformed, Psn};

use super::{Bth, ICRC_LEN, Opcode, Syndrome, Transport};

/// Bytes of a carried acknowledgement.
pub const LEN: usize = 4;

/// Offset of the reserved bits in the BTH.
const FLAG_OFFSET: usize = 8;
/// The bit of a packet that carries an acknowledgement.
pub(super) const FLAG: u8 = 0x40;

/// Returns whether packets of this opcode may carry an acknowledgement.
pub const fn may_be_in(opcode: Opcode) -> bool {
    matches!(opcode.transport, Transport::Rc) && (opcode.operation.is_send() || opcode.operation.is_write())
}

/// Returns whether a packet with these bytes carries an acknowledgement, if it comes from an endpoint that agreed to that.
pub fn is_in(packet: &[u8]) -> bool {
    packet.get(FLAG_OFFSET).is_some_and(|byte| byte & FLAG != 0)
}

/// Makes a packet carry the acknowledgement of all requests up to `psn`. `packet`: the whole packet without its ICRC, whose last
/// [`LEN`] bytes are for the acknowledgement.
pub fn emit(packet: &mut [u8], psn: Psn) {
    packet[FLAG_OFFSET] |= FLAG;
    let at = packet.len() - LEN;
    packet[at] = Syndrome::ACK.code();
    put24(packet, at + 1, psn.value());
}

/// Reads the acknowledgement that a packet carries. `before`: bytes of its headers and its pad.
pub(super) fn parse(bytes: &[u8], opcode: Opcode, before: usize) -> Result<Psn, Malformed> {
    if !may_be_in(opcode) {
        return Err(Malformed::Undefined {
            what: "carried acknowledgement in opcode",
            value: opcode.code().into(),
        });
    }
    need("carried acknowledgement", bytes, before + LEN + ICRC_LEN)?;
    let at = bytes.len() - ICRC_LEN - LEN;
    if bytes[at] != Syndrome::ACK.code() {
        return Err(Malformed::Undefined {
            what: "syndrome of a carried acknowledgement",
            value: bytes[at].into(),
        });
    }
    debug_assert!(before >= Bth::LEN);
    Ok(Psn::new(be24(bytes, at + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Qpn;
    use crate::roce::{Operation, Packet};

    /// Returns a packet of `len` bytes of payload that carries an acknowledgement.
    fn packet(opcode: Opcode, len: usize) -> Vec<u8> {
        let mut bth = Bth::new(opcode, Qpn::new(7), Psn::new(3));
        (bth.ack_req, bth.pad) = (true, ((4 - len % 4) % 4) as u8);
        let mut bytes = vec![0; Bth::LEN];
        bth.emit(&mut bytes);
        bytes.resize(bytes.len() + opcode.ext().len(), 0xee);
        bytes.extend((0..len).map(|i| i as u8 + 1));
        bytes.resize(bytes.len() + usize::from(bth.pad) + LEN, 0);
        emit(&mut bytes, Psn::new(0xfe_dcba));
        bytes.extend([9; ICRC_LEN]);
        bytes
    }

    #[test]
    fn take_carried__leaves_the_payload() {
        for operation in [Operation::SendOnly, Operation::WriteOnlyImm, Operation::SendLast] {
            for len in 0..9 {
                let bytes = packet(Opcode::rc(operation), len);
                assert_eq!(bytes.len() % 4, 0);
                let mut packet = Packet::parse(&bytes).unwrap();
                assert_eq!((packet.payload().len(), packet.carried()), (len + LEN, None));
                packet.take_carried().unwrap();
                assert_eq!(packet.carried(), Some(Psn::new(0xfe_dcba)));
                let payload: Vec<u8> = (1..=len as u8).collect();
                assert_eq!(packet.payload(), payload);
                assert_eq!(packet.icrc(), 0x0909_0909);
                assert!(packet.bth.ack_req);
                // What is kept carries none any more.
                let kept = packet.to_local();
                assert!(!is_in(&kept));
                let mut kept = Packet::parse_local(&kept).unwrap();
                kept.take_carried().unwrap();
                assert_eq!((kept.payload(), kept.carried()), (&payload[..], None));
                assert_eq!(kept.imm(), packet.imm());
            }
        }
    }

    #[test]
    fn take_carried__none() {
        let mut bytes = packet(Opcode::rc(Operation::SendOnly), 8);
        bytes[FLAG_OFFSET] &= !FLAG;
        let mut packet = Packet::parse(&bytes).unwrap();
        packet.take_carried().unwrap();
        assert_eq!((packet.payload().len(), packet.carried()), (12, None));
    }

    #[test]
    fn take_carried__malformed() {
        let refused = |bytes: &[u8]| Packet::parse(bytes).unwrap().take_carried().is_err();
        let xrc = Opcode {
            transport: Transport::Xrc,
            operation: Operation::SendOnly,
        };
        for opcode in [
            Opcode::rc(Operation::ReadRequest),
            Opcode::rc(Operation::CompareSwap),
            xrc,
        ] {
            assert!(refused(&packet(opcode, 0)), "{opcode}");
        }
        let good = packet(Opcode::rc(Operation::SendOnly), 0);
        assert!(!refused(&good));
        assert!(refused(&[&good[..Bth::LEN], &good[Bth::LEN + LEN..]].concat()));
        for syndrome in [0, 0x60, 0x20, 0xff] {
            let mut bytes = good.clone();
            bytes[Bth::LEN] = syndrome;
            assert!(refused(&bytes), "{syndrome:#x}");
        }
    }
}

//! Coalesced packets: consecutive packets of one SEND or WRITE as one packet, between two devices of a host.
//!
//! Memory carries packets of any length, so full packets of a message need not be built, checked and executed one by one. A coalesced
//! packet has the headers of all of them, those of the first and of the last: its opcode says whether it begins the message and whether
//! it ends it. It takes as many PSNs as it stands for packets, from the one in its BTH on, so a sender that resends a part of them does
//! so in ordinary packets. The number of packets, less one, is in the last six of the bits behind the BTH's acknowledge request. They are
//! reserved on the wire (IBTA Vol 1, 9.2), where no packet is coalesced; the bit before them is that of [`super::carried`].

use super::{Bth, Ext, ICRC_LEN, Opcode, Operation, Packet, Position, Transport, carried};

/// Most payload bytes of a coalesced packet.
pub const PAYLOAD_BYTES_MAX: usize = 32 << 10;
/// Most packets that one stands for.
pub const COUNT_MAX: u32 = 64;

/// Offset of the reserved bits in the BTH.
const COUNT_OFFSET: usize = 8;
const COUNT_MASK: u8 = 0x3f;

/// Returns the number of packets that a packet with these bytes stands for.
pub fn count(packet: &[u8]) -> u32 {
    let reserved = packet.get(COUNT_OFFSET).map_or(0, |byte| byte & COUNT_MASK);
    u32::from(reserved) + 1
}

/// Sets the number of packets, 1 to [`COUNT_MAX`], that the packet in `bytes` stands for. It carries no acknowledgement.
pub fn set_count(bytes: &mut [u8], count: u32) {
    debug_assert!((1..=COUNT_MAX).contains(&count));
    if let Some(byte) = bytes.get_mut(COUNT_OFFSET) {
        *byte = *byte & !(COUNT_MASK | carried::FLAG) | (count - 1) as u8 & COUNT_MASK;
    }
}

/// Returns whether packets of this opcode are ever coalesced: the data of reliable services.
pub(super) fn may_be(opcode: Opcode) -> bool {
    let reliable = matches!(opcode.transport, Transport::Rc | Transport::Xrc);
    reliable && (opcode.operation.is_send() || opcode.operation.is_write())
}

/// Calls `each` with the ordinary packets for which a packet of memory stands, in order; their ICRC is 0. A packet that is not coalesced
/// is passed on as it is.
pub fn split(bytes: &[u8], mut each: impl FnMut(&[u8])) {
    let whole = match Packet::parse_local(bytes) {
        Ok(packet) if packet.count() > 1 => packet,
        _ => return each(bytes),
    };
    let (count, payload) = (whole.count() as usize, whole.payload());
    let mtu = payload.len().div_ceil(count).next_power_of_two();
    let operation = whole.bth.opcode.operation;
    let position = operation.position();
    let has = whole.bth.opcode.ext();
    let mut packet = Vec::with_capacity(Bth::LEN + has.len() + mtu + ICRC_LEN);
    for index in 0..count {
        let begins = position.begins() && index == 0;
        let ends = position.ends() && index + 1 == count;
        let part = Position::of(begins, ends);
        let (imm, invalidate) = (has.contains(Ext::IMM), has.contains(Ext::IETH));
        let (from, to) = (index * mtu, (index + 1) * mtu);
        let part_payload = &payload[from.min(payload.len())..to.min(payload.len())];
        let is_last = index + 1 == count;
        let mut bth = whole.bth;
        bth.opcode.operation = Operation::of_data(operation.is_write(), part, imm, invalidate);
        bth.psn = whole.bth.psn.plus(index as u32);
        bth.pad = if is_last { whole.bth.pad } else { 0 };
        bth.ack_req &= is_last;
        bth.solicited &= is_last;
        packet.clear();
        packet.resize(Bth::LEN, 0);
        bth.emit(&mut packet);
        let ext = bth.opcode.ext();
        for header in ext.iter() {
            packet.extend_from_slice(&whole.ext_bytes(header)[..header.len()]);
        }
        packet.extend_from_slice(part_payload);
        packet.resize(packet.len() + usize::from(bth.pad) + ICRC_LEN, 0);
        each(&packet);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Psn, Qpn};

    /// Returns a packet of `len` payload bytes that stands for `count`.
    fn packet(transport: Transport, operation: Operation, len: usize, count: u32) -> Vec<u8> {
        let mut bth = Bth::new(Opcode { transport, operation }, Qpn::new(7), Psn::new(0xff_fffe));
        (bth.ack_req, bth.solicited) = (true, true);
        bth.pad = ((4 - len % 4) % 4) as u8;
        let mut bytes = vec![0; Bth::LEN];
        bth.emit(&mut bytes);
        set_count(&mut bytes, count);
        bytes.extend((0..bth.opcode.ext().len()).map(|i| 0xe0 + i as u8));
        bytes.extend((0..len).map(|i| (i % 251) as u8));
        bytes.resize(bytes.len() + usize::from(bth.pad) + ICRC_LEN, 0);
        bytes
    }

    fn parts(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut parts = Vec::new();
        split(bytes, |part| parts.push(part.to_vec()));
        parts
    }

    #[test]
    fn split__has_the_headers_and_bytes_of_the_whole() {
        let operations = Operation::ALL.iter().filter(|op| op.is_send() || op.is_write());
        for operation in operations.copied() {
            for (transport, mtu, count, short) in [
                (Transport::Rc, 256, 2, 255),
                (Transport::Rc, 1024, 32, 1),
                (Transport::Xrc, 4096, 3, 0),
                (Transport::Rc, 256, COUNT_MAX, 7),
            ] {
                let position = operation.position();
                let len = mtu * count as usize - if position.ends() { short } else { 0 };
                let bytes = packet(transport, operation, len, count);
                let whole = Packet::parse_local(&bytes).unwrap();
                let parts = parts(&bytes);
                assert_eq!(parts.len(), count as usize, "{operation:?}");
                let mut payload = Vec::new();
                for (i, part) in parts.iter().enumerate() {
                    let (is_first, is_last) = (i == 0, i + 1 == parts.len());
                    let part = Packet::parse_local(part).unwrap();
                    let at = part.bth.opcode.operation.position();
                    assert_eq!(part.count(), 1);
                    assert_eq!(at.begins(), is_first && position.begins());
                    assert_eq!(at.ends(), is_last && position.ends());
                    assert_eq!(part.bth.psn, whole.bth.psn.plus(i as u32));
                    assert_eq!((part.bth.ack_req, part.bth.solicited), (is_last, is_last));
                    assert!(is_last || part.payload().len() == mtu);
                    let ends = at.ends();
                    assert_eq!(part.imm(), whole.imm().filter(|_| ends));
                    assert_eq!(part.invalidate(), whole.invalidate().filter(|_| ends));
                    assert_eq!(part.reth(), whole.reth().filter(|_| at.begins()));
                    assert_eq!(part.xrc_srqn(), whole.xrc_srqn());
                    payload.extend_from_slice(part.payload());
                }
                assert!(payload == whole.payload(), "{operation:?}");
            }
        }
    }

    #[test]
    fn split__passes_on_what_is_not_coalesced() {
        let single = packet(Transport::Rc, Operation::SendOnly, 100, 1);
        let foreign = packet(Transport::Uc, Operation::SendOnly, 600, 3);
        for bytes in [&single[..], &foreign, b"short"] {
            assert_eq!(parts(bytes), [bytes]);
        }
    }

    #[test]
    fn parse_local__refuses_what_is_never_coalesced() {
        for (transport, operation) in [
            (Transport::Uc, Operation::WriteOnly),
            (Transport::Ud, Operation::SendOnly),
            (Transport::Rc, Operation::ReadRequest),
            (Transport::Rc, Operation::ReadResponseMiddle),
        ] {
            let mut bytes = packet(transport, operation, 64, 2);
            assert!(Packet::parse_local(&bytes).is_err(), "{operation:?}");
            assert_eq!(Packet::parse(&bytes).map(|packet| packet.count()), Ok(1));
            set_count(&mut bytes, 1);
            assert!(Packet::parse_local(&bytes).is_ok());
        }
    }

    #[test]
    fn to_local__keeps_the_count_and_clears_reserved_bits_of_the_network() {
        let bytes = packet(Transport::Rc, Operation::SendOnly, 600, 3);
        let kept = Packet::parse_local(&bytes).unwrap().to_local();
        assert_eq!(Packet::parse_local(&kept).unwrap().count(), 3);
        let kept = Packet::parse(&bytes).unwrap().to_local();
        assert_eq!(Packet::parse_local(&kept).unwrap().count(), 1);
    }
}

//! Packets as a malicious but well-informed peer could send them: with the headers of their opcode, PSNs near the window, and a
//! correct ICRC.

use rdmux_rnic::{Psn, Qpn, RKey};
use rdmux_wire::roce::cnp::Cnp;
use rdmux_wire::roce::{Bth, Deth, Ext, GSI_QKEY, Opcode, Operation as Op, Transport, carried};

use super::input::Input;
use super::side::{IOVA, PSN, QKEY, QpKind, REGION, Side};

const REQUESTS: [Op; 18] = [
    Op::SendFirst,
    Op::SendMiddle,
    Op::SendLast,
    Op::SendLastImm,
    Op::SendOnly,
    Op::SendOnlyImm,
    Op::WriteFirst,
    Op::WriteMiddle,
    Op::WriteLast,
    Op::WriteLastImm,
    Op::WriteOnly,
    Op::WriteOnlyImm,
    Op::ReadRequest,
    Op::CompareSwap,
    Op::FetchAdd,
    Op::SendOnlyInvalidate,
    Op::Flush,
    Op::AtomicWrite,
];
const ANSWERS: [Op; 8] = [
    Op::Acknowledge,
    Op::Acknowledge,
    Op::Acknowledge,
    Op::ReadResponseFirst,
    Op::ReadResponseMiddle,
    Op::ReadResponseLast,
    Op::ReadResponseOnly,
    Op::AtomicAcknowledge,
];

fn transport(kind: QpKind) -> Transport {
    match kind {
        QpKind::Rc | QpKind::Selective | QpKind::Shared => Transport::Rc,
        QpKind::Uc => Transport::Uc,
        QpKind::Ud => Transport::Ud,
        QpKind::XrcSend | QpKind::XrcRecv => Transport::Xrc,
    }
}

/// Returns a packet for a QP of `to`, without its ICRC.
pub(super) fn forged(to: &Side, at: usize, mtu: usize, input: &mut Input<'_>) -> Vec<u8> {
    let queue = &to.queues[at];
    let what = input.byte();
    if what == 0xff {
        let mut bytes = vec![0; Cnp::LEN];
        Cnp::new(queue.qpn).emit(&mut bytes);
        return bytes;
    }
    let answers = match queue.kind {
        QpKind::Rc | QpKind::Selective | QpKind::Shared => what & 1 == 1,
        QpKind::XrcSend => what & 15 != 0,
        QpKind::Uc | QpKind::Ud | QpKind::XrcRecv => what & 15 == 0,
    };
    let operation = match queue.kind {
        QpKind::Ud => input.pick(&[Op::SendOnly, Op::SendOnlyImm]),
        _ if answers => input.pick(&ANSWERS),
        _ => input.pick(&REQUESTS),
    };
    let opcode = Opcode {
        transport: transport(queue.kind),
        operation,
    };
    let near = if answers { queue.near.1 } else { queue.near.0 };
    // Mostly the next PSN, otherwise one before or behind it.
    let psn = match input.byte() {
        near_by @ 0..=31 => near.plus(u32::from(near_by)).minus(8),
        32 => Psn::new(u32::from(input.word()) << 8),
        _ if answers => near,
        _ => near.plus(1),
    };
    let mut bth = Bth::new(opcode, queue.qpn, psn);
    bth.ack_req = input.byte() & 3 != 0;
    bth.solicited = what & 2 != 0;
    let payload = payload(operation, mtu, input);
    bth.pad = ((4 - payload.len() % 4) % 4) as u8;
    let mut bytes = vec![0; Bth::LEN];
    bth.emit(&mut bytes);
    extensions(to, queue.kind, opcode, payload.len(), mtu, input, &mut bytes);
    bytes.extend_from_slice(&payload);
    bytes.resize(bytes.len() + usize::from(bth.pad), 0);
    // On other queue pairs too, for which the bit means nothing.
    if !answers && what & 0x0c == 0x0c {
        bytes.resize(bytes.len() + carried::LEN, 0);
        let near_by = u32::from(input.byte()) % 32;
        carried::emit(&mut bytes, queue.near.1.plus(near_by).minus(16));
    }
    if what & 0xf0 == 0xf0 {
        let at = usize::from(input.byte()) % bytes.len();
        bytes[at] = input.byte();
    }
    bytes
}

fn payload(operation: Op, mtu: usize, input: &mut Input<'_>) -> Vec<u8> {
    let bare = matches!(
        operation,
        Op::ReadRequest | Op::CompareSwap | Op::FetchAdd | Op::Flush | Op::AtomicAcknowledge
    );
    let whole = matches!(
        operation,
        Op::SendFirst
            | Op::SendMiddle
            | Op::WriteFirst
            | Op::WriteMiddle
            | Op::ReadResponseFirst
            | Op::ReadResponseMiddle
    );
    let n = match input.byte() {
        0 => usize::from(input.word()) % (mtu + 16),
        1 => mtu,
        2 => 0,
        3 => 4 * usize::from(input.byte()),
        _ if bare => 0,
        _ if whole => mtu,
        // Mostly no bitmap.
        4..=128 if operation == Op::Acknowledge => 0,
        _ if operation == Op::AtomicWrite => 8,
        n => usize::from(n) % 64,
    };
    // A bitmap that is mostly 0 tests more than one that is all ones.
    let some = input.bytes(n.min(8));
    let mut payload = some;
    payload.resize(n, 0);
    payload
}

fn key(to: &Side, input: &mut Input<'_>) -> RKey {
    match input.byte() {
        0 => RKey(u32::from(input.word()) << 16),
        1 => to.keys[0].next(),
        n @ 2..=63 => to.keys[usize::from(n) % to.keys.len()],
        _ => to.keys[0],
    }
}

/// Returns an address at which `length` bytes lie inside the region, or just outside.
fn address(length: u64, input: &mut Input<'_>) -> u64 {
    match input.byte() {
        0 => u64::MAX - u64::from(input.byte()),
        1 => IOVA - 1,
        2 => IOVA + (REGION - u64::from(input.byte())),
        // Up to the end of the region, or one byte beyond it.
        n @ 4..=11 => (IOVA + REGION + u64::from(n & 1)).wrapping_sub(length),
        n => IOVA + u64::from(n & 0xf8) + u64::from(n == 3),
    }
}

fn extensions(
    to: &Side,
    kind: QpKind,
    opcode: Opcode,
    payload: usize,
    mtu: usize,
    input: &mut Input<'_>,
    bytes: &mut Vec<u8>,
) {
    let ext = opcode.ext();
    let mut push = |n: u64, len: usize| bytes.extend_from_slice(&n.to_be_bytes()[8 - len..]);
    if ext.contains(Ext::DETH) {
        let qkey = if input.one_in(16) { GSI_QKEY } else { QKEY };
        let mut deth = [0; Deth::LEN];
        let src_qpn = Qpn::new(5);
        Deth { qkey, src_qpn }.emit(&mut deth);
        push(u64::from_be_bytes(deth), 8);
    }
    if ext.contains(Ext::XRCETH) {
        let own = if input.one_in(16) { to.srq } else { to.xrc_srq };
        push(own.0.into(), 4);
    }
    if ext.contains(Ext::FETH) {
        let feth = if input.one_in(8) {
            input.byte()
        } else {
            1 + (input.byte() & 0x11)
        };
        push(feth.into(), 4);
    }
    if ext.contains(Ext::RETH) {
        let length = match input.byte() {
            0 => u32::from(input.word()) << 16,
            1 => 0,
            2 => 2 * mtu as u32,
            3 => u32::from(input.word() % 4096),
            n if opcode.operation == Op::ReadRequest => u32::from(n & 63) * 8,
            4..=64 => payload as u32 + 64,
            _ if opcode.operation == Op::WriteFirst => mtu as u32 + 64,
            _ => payload as u32,
        };
        push(address(length.into(), input), 8);
        push(key(to, input).0.into(), 4);
        push(length.into(), 4);
    }
    if ext.contains(Ext::ATOMIC) {
        push(address(8, input), 8);
        push(key(to, input).0.into(), 4);
        push(input.byte().into(), 8);
        push(input.byte().into(), 8);
    }
    if ext.contains(Ext::AETH) {
        let syndromes = [0x1f, 0x1f, 0x1f, 0x60, 0x60, 0x21, 0x1f];
        let syndrome = match input.byte() {
            0 => input.byte(),
            1..=3 => 0x60 + input.byte() % 4,
            // A NAK that ends the QP would end most runs at once.
            n if kind == QpKind::Selective && n & 1 == 1 => 0x60,
            n => syndromes[usize::from(n) % syndromes.len()],
        };
        push(u64::from(syndrome) << 24, 4);
    }
    if ext.contains(Ext::ATOMIC_ACK) {
        push(7, 8);
    }
    if ext.contains(Ext::IMM) {
        push(1, 4);
    }
    if ext.contains(Ext::IETH) {
        push(to.keys[usize::from(input.byte()) % to.keys.len()].0.into(), 4);
    }
}

/// Advances the PSN of a packet by `n`.
pub(super) fn count_on(bytes: &mut [u8], n: u32) {
    let psn = u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]]).wrapping_add(n);
    bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
}

/// Returns a packet for a QP made of a fuzzer's bytes, corrected only as far as the first checks require.
pub(super) fn raw(qpn: Qpn, input: &mut Input<'_>) -> Vec<u8> {
    let n = usize::from(input.byte());
    let mut bytes = input.bytes(n);
    bytes.resize(bytes.len().max(Bth::LEN), 0);
    let number = qpn.value().to_be_bytes();
    bytes[1] &= 0xf0;
    bytes[2..4].fill(0xff);
    bytes[5..8].copy_from_slice(&number[1..]);
    let psn = PSN.wrapping_add(u32::from(bytes[11])).to_be_bytes();
    bytes[9..12].copy_from_slice(&psn[1..]);
    bytes
}

/// Returns a CM message made of a fuzzer's bytes.
pub(super) fn mad(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = vec![0; Bth::LEN + 8];
    bytes[0] = 0x64;
    bytes[2..4].fill(0xff);
    bytes[7] = 1;
    bytes[12..16].copy_from_slice(&GSI_QKEY.to_be_bytes());
    let mad = [1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    bytes.extend_from_slice(&mad);
    bytes.push(0x10 + input.byte() % 12);
    let n = usize::from(input.byte());
    bytes.extend(input.bytes(n));
    bytes.resize(Bth::LEN + 8 + rdmux_wire::cm::MAD_LEN, 0);
    bytes
}

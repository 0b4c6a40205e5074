//! Invalid packets and the reaction that the specification requires. Side 0 sends requests and side 1 answers; the tests build the
//! packets by hand.

use rdmux_wire::roce::{
    Aeth, AtomicEth, Bth, Feth, NakCode, Opcode, Operation as Op, Packet, Reth, Syndrome, Transport,
};

use super::util::*;
use crate::*;

/// A packet that a side sent.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    op: Op,
    /// PSN relative to the first PSN of the connection.
    psn: i32,
    syndrome: Option<Syndrome>,
    payload: Vec<u8>,
}

const NAK_SEQUENCE: Syndrome = Syndrome::Nak(NakCode::PsnSequence);
const NAK_INVALID: Syndrome = Syndrome::Nak(NakCode::InvalidRequest);
const NAK_ACCESS: Syndrome = Syndrome::Nak(NakCode::RemoteAccess);
const NAK_OPERATION: Syndrome = Syndrome::Nak(NakCode::RemoteOperation);

fn said(op: Op, psn: i32, syndrome: Syndrome) -> Said {
    Said {
        op,
        psn,
        syndrome: Some(syndrome),
        payload: Vec::new(),
    }
}

/// An acknowledgement packet.
fn ack(psn: i32, syndrome: Syndrome) -> Said {
    said(Op::Acknowledge, psn, syndrome)
}

/// Returns the packets that a side sends.
fn says(pair: &mut Pair, side: usize) -> Vec<Said> {
    let mut buf = TransmitBuf::new(1 << 20, true);
    while pair.sides[side].rnic.poll_transmit(pair.now, &mut buf, true) {}
    let mut all = Vec::new();
    for train in buf.trains() {
        for bytes in buf.bytes()[train.range.clone()].chunks(train.segment_bytes) {
            let packet = Packet::parse(bytes).unwrap();
            all.push(Said {
                op: packet.bth.opcode.operation,
                psn: packet.bth.psn.since(Psn::new(PSN)),
                syndrome: packet.aeth().map(|aeth| aeth.syndrome),
                payload: packet.payload().to_vec(),
            });
        }
    }
    all
}

fn header(pair: &Pair, to: usize, op: Op, psn: u32) -> Bth {
    let mut bth = Bth::new(
        Opcode::rc(op),
        pair.sides[to].qpn,
        Psn::new(PSN.wrapping_add(psn)),
    );
    bth.ack_req = true;
    bth
}

/// Returns a packet for a side, without ICRC; `psn` counts from the first PSN of the connection.
fn packet(bth: Bth, ext: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut bth = bth;
    bth.pad = ((4 - payload.len() % 4) % 4) as u8;
    let mut bytes = vec![0; Bth::LEN];
    bth.emit(&mut bytes);
    bytes.extend_from_slice(ext);
    bytes.extend_from_slice(payload);
    bytes.resize(bytes.len() + usize::from(bth.pad), 0);
    bytes
}

/// Delivers a request to side 1 and returns its answers.
fn ask(pair: &mut Pair, op: Op, psn: u32, ext: &[u8], payload: &[u8]) -> Vec<Said> {
    give(pair, op, psn, ext, payload);
    says(pair, 1)
}

fn give(pair: &mut Pair, op: Op, psn: u32, ext: &[u8], payload: &[u8]) {
    let bytes = pair.craft(&packet(header(pair, 1, op, psn), ext, payload));
    pair.inject(&bytes);
}

/// Delivers an answer to side 0 that side 1 did not send.
fn answer(pair: &mut Pair, op: Op, psn: u32, syndrome: Syndrome, payload: &[u8]) {
    let mut aeth = [0; Aeth::LEN];
    Aeth { syndrome, msn: 0 }.emit(&mut aeth);
    let bytes = packet(header(pair, 0, op, psn), &aeth, payload);
    pair.inject_back(&bytes);
}

fn reth(va: u64, rkey: RKey, length: u32) -> [u8; Reth::LEN] {
    let mut bytes = [0; Reth::LEN];
    Reth { va, rkey, length }.emit(&mut bytes);
    bytes
}

fn flush_headers(va: u64, rkey: RKey, length: u32, placement: Placement) -> Vec<u8> {
    let mut bytes = vec![0; Feth::LEN];
    Feth {
        placement,
        selectivity: Selectivity::Range,
    }
    .emit(&mut bytes);
    bytes.extend_from_slice(&reth(va, rkey, length));
    bytes
}

/// Returns a RETH for side 1's region with the region's own key.
fn own(pair: &Pair, offset: u64, length: u32) -> [u8; Reth::LEN] {
    reth(IOVA + offset, pair.sides[1].rkey, length)
}

/// Asserts that side 1 refused with this code, is in Error, and wrote nothing.
fn refused(pair: &mut Pair, answers: &[Said], psn: i32, syndrome: Syndrome) {
    assert_eq!(answers, [ack(psn, syndrome)]);
    assert_eq!(pair.sides[1].state(), QpState::Error);
    pair.sides[1].memory.with(|m| assert!(m.iter().all(|b| *b == 0)));
}

fn recv(pair: &mut Pair, length: u32) {
    pair.recv(1, 9, 0, length);
}

fn statuses(pair: &mut Pair, side: usize) -> Vec<Status> {
    pair.sides[side]
        .completions()
        .iter()
        .map(|wc| wc.status)
        .collect()
}

// Malformed packets.

#[test]
fn malformed__too_short_for_its_headers_is_dropped() {
    let mut pair = Pair::new();
    let whole = pair.craft(&packet(
        header(&pair, 1, Op::WriteOnly, 0),
        &own(&pair, 0, 4),
        &[1; 4],
    ));
    for len in 1..Bth::LEN + Reth::LEN + 4 {
        pair.inject(&whole[..len]);
    }
    assert_eq!(
        pair.sides[1].rnic.counters().malformed,
        (Bth::LEN + Reth::LEN + 3) as u64
    );
    assert_eq!(says(&mut pair, 1), []);
    assert_eq!(pair.sides[1].state(), QpState::Rts);
}

#[test]
fn malformed__unknown_opcode_or_transport_version_is_dropped() {
    let mut pair = Pair::new();
    let mut bytes = packet(header(&pair, 1, Op::SendOnly, 0), &[], &[1; 4]);
    bytes[0] = 0x1b;
    let bad_opcode = pair.craft(&bytes);
    bytes[0] = 0x04;
    bytes[1] |= 1;
    let bad_version = pair.craft(&bytes);
    pair.inject(&bad_opcode);
    pair.inject(&bad_version);
    assert_eq!(pair.sides[1].rnic.counters().malformed, 2);
    assert_eq!(says(&mut pair, 1), []);
}

#[test]
fn malformed__empty_datagram_and_segment_of_nothing_are_dropped() {
    let mut pair = Pair::new();
    let (src, now) = (pair.sides[0].rnic.config().address, pair.now);
    pair.sides[1].rnic.handle_datagram(now, src, 0xc001, &[], 10);
    pair.sides[1].rnic.handle_datagram(now, src, 0xc001, &[1; 40], 0);
    assert_eq!(pair.sides[1].rnic.counters().malformed, 2);
}

#[test]
fn malformed__longer_than_any_packet_is_dropped() {
    let mut pair = Pair::new();
    let bytes = pair.craft(&packet(header(&pair, 1, Op::SendOnly, 0), &[], &[1; 9000]));
    pair.inject(&bytes);
    assert_eq!(pair.sides[1].rnic.counters().malformed, 1);
    assert_eq!(says(&mut pair, 1), []);
}

#[test]
fn icrc__wrong_is_dropped_without_a_word() {
    let mut pair = Pair::new();
    recv(&mut pair, 64);
    let good = pair.craft(&packet(header(&pair, 1, Op::SendOnly, 0), &[], &[7; 32]));
    for bit in 0..good.len() * 8 {
        // Byte 4 holds FECN and BECN, which the ICRC does not cover.
        if bit / 8 == 4 {
            continue;
        }
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        pair.inject(&bad);
    }
    assert!(pair.sides[1].rnic.counters().rx_icrc_encapsulated > 0);
    assert_eq!(says(&mut pair, 1), []);
    assert_eq!(pair.sides[1].completions(), []);
    pair.inject(&good);
    assert_eq!(says(&mut pair, 1), [ack(0, Syndrome::ACK)]);
}

#[test]
fn icrc__that_names_an_identification_no_train_has_is_dropped() {
    let mut pair = Pair::new();
    recv(&mut pair, 64);
    let bytes = packet(header(&pair, 1, Op::SendOnly, 0), &[], &[7; 32]);
    let with_id = pair.craft_with_id(&bytes, 128);
    pair.inject(&with_id);
    assert_eq!(pair.sides[1].rnic.counters().rx_icrc_encapsulated, 1);
    let with_id = pair.craft_with_id(&bytes, 127);
    pair.inject(&with_id);
    assert_eq!(says(&mut pair, 1), [ack(0, Syndrome::ACK)]);
}

// Misrouted packets.

#[test]
fn misrouted__unknown_qpn_is_dropped() {
    let mut pair = Pair::new();
    let mut bth = header(&pair, 1, Op::SendOnly, 0);
    bth.dest_qpn = Qpn::new(pair.sides[1].qpn.value() ^ 1);
    let bytes = pair.craft(&packet(bth, &[], &[1; 4]));
    pair.inject(&bytes);
    assert_eq!(pair.sides[1].rnic.counters().no_qp, 1);
    assert_eq!(says(&mut pair, 1), []);
}

#[test]
fn misrouted__from_another_address_is_dropped() {
    let mut pair = Pair::new();
    let bytes = pair.craft(&packet(
        header(&pair, 1, Op::WriteOnly, 0),
        &own(&pair, 0, 4),
        &[1; 4],
    ));
    let now = pair.now;
    pair.sides[1]
        .rnic
        .handle_datagram(now, [10, 0, 0, 9].into(), 0xc001, &bytes, bytes.len());
    assert_eq!(pair.sides[1].rnic.counters().wrong_peer, 1);
    assert_eq!(says(&mut pair, 1), []);
    pair.sides[1].memory.with(|m| assert_eq!(m[0], 0));
}

#[test]
fn misrouted__of_another_transport_is_dropped() {
    for transport in [Transport::Uc, Transport::Xrc] {
        let mut pair = Pair::new();
        let mut bth = header(&pair, 1, Op::SendOnly, 0);
        bth.opcode.transport = transport;
        let ext: &[u8] = if transport == Transport::Xrc { &[0; 4] } else { &[] };
        let bytes = pair.craft(&packet(bth, ext, &[1; 4]));
        pair.inject(&bytes);
        assert_eq!(pair.sides[1].rnic.counters().no_qp, 1, "{transport:?}");
        assert_eq!(says(&mut pair, 1), []);
    }
}

#[test]
fn pkey__that_does_not_match_is_dropped() {
    let mut pair = Pair::new();
    let mut bth = header(&pair, 1, Op::SendOnly, 0);
    bth.pkey = 0x8001;
    let bytes = pair.craft(&packet(bth, &[], &[1; 4]));
    pair.inject(&bytes);
    assert_eq!(pair.sides[1].rnic.counters().bad_pkey, 1);
    assert_eq!(says(&mut pair, 1), []);
}

#[test]
fn gsi__without_its_key_or_of_another_length_is_dropped() {
    let mut pair = Pair::new();
    for (qkey, length) in [(0x8001_0000u32, 255), (0x8001_0000, 257), (1, 256)] {
        let mut bth = header(&pair, 1, Op::SendOnly, 0);
        bth.opcode.transport = Transport::Ud;
        bth.dest_qpn = Qpn::GSI;
        let mut deth = [0; 8];
        deth[..4].copy_from_slice(&qkey.to_be_bytes());
        let bytes = pair.craft(&packet(bth, &deth, &vec![1; length]));
        pair.inject(&bytes);
    }
    assert_eq!(pair.sides[1].rnic.counters().malformed, 3);
}

// States.

#[test]
fn state__other_than_rtr_and_rts_takes_no_request() {
    for to in [QpState::Reset, QpState::Init, QpState::Error] {
        let mut pair = Pair::new();
        let mut attributes = QpAttributes::default();
        if to == QpState::Init {
            pair.modify(1, QpState::Reset, &attributes);
            attributes.access = Some(ALL_ACCESS);
        }
        pair.modify(1, to, &attributes);
        let ext = own(&pair, 0, 4);
        assert_eq!(ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 4]), [], "{to:?}");
        assert_eq!(pair.sides[1].rnic.counters().wrong_state, 1, "{to:?}");
        pair.sides[1].memory.with(|m| assert_eq!(m[0], 0, "{to:?}"));
    }
}

#[test]
fn state__rtr_takes_requests_but_no_answers_and_tells_of_the_first() {
    let mut pair = Pair::new();
    pair.back_to_rtr(1);
    let ext = own(&pair, 0, 4);
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 4]),
        [ack(0, Syndrome::ACK)]
    );
    let qpn = pair.sides[1].qpn;
    assert_eq!(
        pair.sides[1].rnic.poll_event(),
        Some(Event::CommunicationEstablished(qpn))
    );
    give(&mut pair, Op::Acknowledge, 1, &[0x1f, 0, 0, 1], &[]);
    assert_eq!(pair.sides[1].rnic.counters().wrong_state, 1);
}

#[test]
fn state__error_still_acknowledges_what_was_done() {
    let mut pair = Pair::new();
    recv(&mut pair, 64);
    recv(&mut pair, 64);
    give(&mut pair, Op::SendOnly, 0, &[], &[1; 4]);
    let ext = own(&pair, 0, 4);
    give(&mut pair, Op::ReadRequest, 1, &ext, &[]);
    give(&mut pair, Op::SendOnly, 2, &[], &[1; 4]);
    pair.modify(1, QpState::Error, &QpAttributes::default());
    // The last SEND was received too, but its acknowledgement would imply that the READ was answered.
    assert_eq!(says(&mut pair, 1), [ack(0, Syndrome::ACK)]);
}

// Sequence.

#[test]
fn psn__ahead_is_reported_once_and_dropped() {
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 4);
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 3, &ext, &[1; 4]),
        [ack(0, NAK_SEQUENCE)]
    );
    assert_eq!(ask(&mut pair, Op::WriteOnly, 4, &ext, &[1; 4]), []);
    pair.sides[1].memory.with(|m| assert_eq!(m[0], 0));
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 0, &ext, &[2; 4]),
        [ack(0, Syndrome::ACK)]
    );
    // The gap has closed, so the next one is reported.
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 2, &ext, &[1; 4]),
        [ack(1, NAK_SEQUENCE)]
    );
}

#[test]
fn psn__behind_is_acknowledged_again_and_not_executed() {
    let mut pair = Pair::new();
    recv(&mut pair, 64);
    recv(&mut pair, 64);
    let ext = own(&pair, 100, 4);
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 4]),
        [ack(0, Syndrome::ACK)]
    );
    assert_eq!(
        ask(&mut pair, Op::SendOnly, 1, &[], &[1; 4]),
        [ack(1, Syndrome::ACK)]
    );
    pair.sides[1].memory.with(|m| m.fill(9));
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 4]),
        [ack(1, Syndrome::ACK)]
    );
    assert_eq!(
        ask(&mut pair, Op::SendOnly, 1, &[], &[1; 4]),
        [ack(1, Syndrome::ACK)]
    );
    pair.sides[1].memory.with(|m| assert!(m.iter().all(|b| *b == 9)));
    assert_eq!(pair.sides[1].completions().len(), 1);
}

#[test]
fn order__of_first_middle_and_last_is_kept() {
    let full = [1; 1024];
    let wrong: [&[Op]; 10] = [
        &[Op::SendMiddle],
        &[Op::SendLast],
        &[Op::WriteMiddle],
        &[Op::WriteLast],
        &[Op::SendFirst, Op::SendFirst],
        &[Op::SendFirst, Op::SendOnly],
        &[Op::SendFirst, Op::WriteMiddle],
        &[Op::SendFirst, Op::ReadRequest],
        &[Op::SendFirst, Op::WriteOnly],
        &[Op::WriteFirst, Op::SendMiddle],
    ];
    for ops in wrong {
        let mut pair = Pair::new();
        recv(&mut pair, 4096);
        let mut answers = Vec::new();
        for (psn, op) in ops.iter().enumerate() {
            let reth = own(&pair, 8192, if *op == Op::WriteFirst { 3000 } else { 1024 });
            let opcode = Opcode::rc(*op);
            let ext: &[u8] = if opcode.ext().is_empty() { &[] } else { &reth };
            let payload: &[u8] = if *op == Op::ReadRequest { &[] } else { &full };
            answers = ask(&mut pair, *op, psn as u32, ext, payload);
        }
        assert_eq!(answers, [ack(ops.len() as i32 - 1, NAK_INVALID)], "{ops:?}");
        assert_eq!(pair.sides[1].state(), QpState::Error, "{ops:?}");
    }
}

// Lengths.

#[test]
fn length__of_first_and_middle_is_the_path_mtu() {
    for length in [0usize, 1, 1020, 1028] {
        let mut pair = Pair::new();
        let ext = own(&pair, 0, 3000);
        let answers = ask(&mut pair, Op::WriteFirst, 0, &ext, &vec![1; length]);
        refused(&mut pair, &answers, 0, NAK_INVALID);
    }
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 3000);
    ask(&mut pair, Op::WriteFirst, 0, &ext, &[0; 1024]);
    let answers = ask(&mut pair, Op::WriteMiddle, 1, &[], &[1; 512]);
    refused(&mut pair, &answers, 1, NAK_INVALID);
}

#[test]
fn length__of_last_is_at_least_one_byte() {
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 1024);
    ask(&mut pair, Op::WriteFirst, 0, &ext, &[0; 1024]);
    let answers = ask(&mut pair, Op::WriteLast, 1, &[], &[]);
    refused(&mut pair, &answers, 1, NAK_INVALID);
}

#[test]
fn length__of_only_is_at_most_the_path_mtu() {
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 1028);
    let answers = ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 1028]);
    refused(&mut pair, &answers, 0, NAK_INVALID);
}

#[test]
fn length__of_a_write_is_what_its_header_announced() {
    for announced in [0, 99, 101] {
        let mut pair = Pair::new();
        let ext = own(&pair, 0, announced);
        let answers = ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 100]);
        refused(&mut pair, &answers, 0, NAK_INVALID);
    }
    for announced in [1024 + 99, 1024 + 101] {
        let mut pair = Pair::new();
        let ext = own(&pair, 0, announced);
        ask(&mut pair, Op::WriteFirst, 0, &ext, &[0; 1024]);
        let answers = ask(&mut pair, Op::WriteLast, 1, &[], &[1; 100]);
        refused(&mut pair, &answers, 1, NAK_INVALID);
    }
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 1000);
    let answers = ask(&mut pair, Op::WriteFirst, 0, &ext, &[1; 1024]);
    refused(&mut pair, &answers, 0, NAK_INVALID);
}

#[test]
fn receive__too_small_ends_both_and_completes_with_a_length_error() {
    let mut pair = Pair::new();
    recv(&mut pair, 99);
    let answers = ask(&mut pair, Op::SendOnly, 0, &[], &[1; 100]);
    assert_eq!(answers, [ack(0, NAK_INVALID)]);
    assert_eq!(statuses(&mut pair, 1), [Status::LocalLength]);
    assert_eq!(pair.sides[1].state(), QpState::Error);
}

#[test]
fn receive__with_a_key_that_is_gone_is_a_remote_operation_error() {
    let mut pair = Pair::new();
    recv(&mut pair, 100);
    let lkey = pair.sides[1].lkey;
    pair.sides[1].rnic.dereg_mr(lkey).unwrap();
    let answers = ask(&mut pair, Op::SendOnly, 0, &[], &[1; 100]);
    refused(&mut pair, &answers, 0, NAK_OPERATION);
    assert_eq!(statuses(&mut pair, 1), [Status::LocalProtection]);
}

#[test]
fn receive__missing_is_rnr_for_send_and_write_with_immediate() {
    let mut pair = Pair::new();
    let rnr = Syndrome::RnrNak { timer: 1 };
    assert_eq!(ask(&mut pair, Op::SendOnly, 0, &[], &[1; 4]), [ack(0, rnr)]);
    // The next packet of the same window is not reported as a gap.
    assert_eq!(ask(&mut pair, Op::SendOnly, 1, &[], &[1; 4]), []);
    assert_eq!(ask(&mut pair, Op::SendOnly, 0, &[], &[1; 4]), [ack(0, rnr)]);
    let mut ext = own(&pair, 0, 4).to_vec();
    ext.extend_from_slice(&[0; 4]);
    assert_eq!(ask(&mut pair, Op::WriteOnlyImm, 0, &ext, &[1; 4]), [ack(0, rnr)]);
    pair.sides[1].memory.with(|m| assert_eq!(m[0], 0));
    recv(&mut pair, 0);
    assert_eq!(
        ask(&mut pair, Op::WriteOnlyImm, 0, &ext, &[1; 4]),
        [ack(0, Syndrome::ACK)]
    );
    assert_eq!(pair.sides[1].completions().len(), 1);
}

#[test]
fn receive__missing_at_the_last_packet_repeats_only_that() {
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 1028);
    ask(&mut pair, Op::WriteFirst, 0, &ext, &[1; 1024]);
    let rnr = Syndrome::RnrNak { timer: 1 };
    let imm = [0, 0, 0, 5];
    assert_eq!(ask(&mut pair, Op::WriteLastImm, 1, &imm, &[2; 4]), [ack(1, rnr)]);
    recv(&mut pair, 0);
    assert_eq!(
        ask(&mut pair, Op::WriteLastImm, 1, &imm, &[2; 4]),
        [ack(1, Syndrome::ACK)]
    );
    let wc = pair.sides[1].completions()[0];
    assert_eq!((wc.imm, wc.byte_len), (Some(5), 1028));
}

// Rights and bounds.

#[test]
fn length__beyond_the_longest_message_is_an_invalid_request() {
    for op in [Op::ReadRequest, Op::WriteFirst] {
        let mut pair = Pair::new();
        let rkey = pair.sides[1].rkey;
        let payload = vec![1; if op == Op::WriteFirst { 1024 } else { 0 }];
        let longest = 1 << 31;
        let answers = ask(&mut pair, op, 0, &reth(IOVA, rkey, longest + 1), &payload);
        refused(&mut pair, &answers, 0, NAK_INVALID);
        // One byte less only exceeds the region.
        let mut pair = Pair::new();
        let answers = ask(&mut pair, op, 0, &reth(IOVA, rkey, longest), &payload);
        refused(&mut pair, &answers, 0, NAK_ACCESS);
    }
}

#[test]
fn payload__of_a_read_or_flush_is_an_invalid_request() {
    for op in [Op::ReadRequest, Op::Flush] {
        let mut pair = Pair::new();
        let rkey = pair.sides[1].rkey;
        let ext = match op {
            Op::Flush => flush_headers(IOVA, rkey, 4, Placement::GLOBAL),
            _ => reth(IOVA, rkey, 4).to_vec(),
        };
        let answers = ask(&mut pair, op, 0, &ext, &[1; 4]);
        refused(&mut pair, &answers, 0, NAK_INVALID);
    }
}

/// Memory that can be registered but not read.
#[derive(Debug)]
struct Unreadable(Fault);

impl Memory for Unreadable {
    fn len(&self) -> u64 {
        4096
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Err(self.0)
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Err(self.0)
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(self.0)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Err(self.0)
    }
}

#[test]
fn read__of_memory_that_fails_tells_both_ends_the_same() {
    for (fault, nak, status) in [
        (Fault::Io(5), NAK_OPERATION, Status::RemoteOperation),
        (Fault::Unmapped, NAK_ACCESS, Status::RemoteAccess),
    ] {
        let mut pair = Pair::new();
        let spec = RegionSpec {
            memory: std::sync::Arc::new(Unreadable(fault)),
            memory_offset: 0,
            length: 4096,
            iova: IOVA,
            access: ALL_ACCESS,
        };
        let side = &mut pair.sides[1];
        let (_, rkey) = side.rnic.reg_mr(side.pd, spec).unwrap();
        let answers = ask(&mut pair, Op::ReadRequest, 0, &reth(IOVA, rkey, 4), &[]);
        refused(&mut pair, &answers, 0, nak);
        let qpn = pair.sides[1].qpn;
        assert_eq!(
            pair.sides[1].rnic.poll_event(),
            Some(Event::QpError(qpn, status, Cause::PeerRequest))
        );
    }
}

#[test]
fn rkey__unknown_is_a_remote_access_error() {
    for op in [Op::WriteOnly, Op::ReadRequest] {
        let mut pair = Pair::new();
        let ext = reth(IOVA, RKey(pair.sides[1].rkey.0 ^ 1), 4);
        let payload: &[u8] = if op == Op::WriteOnly { &[1; 4] } else { &[] };
        let answers = ask(&mut pair, op, 0, &ext, payload);
        refused(&mut pair, &answers, 0, NAK_ACCESS);
    }
}

#[test]
fn rkey__is_not_looked_at_for_no_bytes() {
    let mut pair = Pair::new();
    let ext = reth(1, RKey(1), 0);
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 0, &ext, &[]),
        [ack(0, Syndrome::ACK)]
    );
    assert_eq!(
        ask(&mut pair, Op::ReadRequest, 1, &ext, &[]),
        [said(Op::ReadResponseOnly, 1, Syndrome::ACK)]
    );
}

#[test]
fn rkey__of_another_protection_domain_is_a_remote_access_error() {
    let mut pair = Pair::new();
    let side = &mut pair.sides[1];
    let pd = side.rnic.alloc_pd();
    let spec = RegionSpec {
        memory: side.memory.clone(),
        memory_offset: 0,
        length: 4096,
        iova: IOVA,
        access: ALL_ACCESS,
    };
    let (_, rkey) = side.rnic.reg_mr(pd, spec).unwrap();
    let answers = ask(&mut pair, Op::WriteOnly, 0, &reth(IOVA, rkey, 4), &[1; 4]);
    refused(&mut pair, &answers, 0, NAK_ACCESS);
}

#[test]
fn bounds__by_one_byte_are_a_remote_access_error() {
    // The region lies in the middle of its memory, so that an access one byte beyond it would reach other bytes.
    for (offset, length) in [(-1i64, 4u32), (97, 4), (0, 101), (100, 1), (-1, 101)] {
        for op in [Op::WriteOnly, Op::ReadRequest, Op::Flush] {
            let mut pair = Pair::new();
            let side = &mut pair.sides[1];
            let spec = RegionSpec {
                memory: side.memory.clone(),
                memory_offset: 1000,
                length: 100,
                iova: IOVA,
                access: ALL_ACCESS,
            };
            let (_, rkey) = side.rnic.reg_mr(side.pd, spec).unwrap();
            let va = IOVA.wrapping_add_signed(offset);
            let ext = match op {
                Op::Flush => flush_headers(va, rkey, length, Placement::GLOBAL),
                _ => reth(va, rkey, length).to_vec(),
            };
            let payload = vec![1; if op == Op::WriteOnly { length as usize } else { 0 }];
            let answers = ask(&mut pair, op, 0, &ext, &payload);
            refused(&mut pair, &answers, 0, NAK_ACCESS);
        }
    }
    let mut pair = Pair::new();
    let ext = own(&pair, MEMORY as u64 - 4, 4);
    assert_eq!(
        ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 4]),
        [ack(0, Syndrome::ACK)]
    );
}

#[test]
fn bounds__that_wrap_around_the_address_space_are_a_remote_access_error() {
    let mut pair = Pair::new();
    let ext = reth(u64::MAX - 1, pair.sides[1].rkey, 4);
    let answers = ask(&mut pair, Op::WriteOnly, 0, &ext, &[1; 4]);
    refused(&mut pair, &answers, 0, NAK_ACCESS);
}

#[test]
fn access__missing_on_the_qp_is_an_invalid_request() {
    for (op, missing) in [
        (Op::WriteOnly, Access::REMOTE_WRITE),
        (Op::ReadRequest, Access::REMOTE_READ),
        (Op::Flush, Access::FLUSH_GLOBAL),
    ] {
        let mut pair = Pair::with(|rtr, _| rtr.access = Some(ALL_ACCESS.difference(missing)));
        let rkey = pair.sides[1].rkey;
        let ext = match op {
            Op::Flush => flush_headers(IOVA, rkey, 4, Placement::GLOBAL),
            _ => reth(IOVA, rkey, 4).to_vec(),
        };
        let payload: &[u8] = if op == Op::WriteOnly { &[1; 4] } else { &[] };
        let answers = ask(&mut pair, op, 0, &ext, payload);
        refused(&mut pair, &answers, 0, NAK_INVALID);
    }
}

#[test]
fn access__missing_on_the_region_is_a_remote_access_error() {
    for (op, missing) in [
        (Op::WriteOnly, Access::REMOTE_WRITE),
        (Op::ReadRequest, Access::REMOTE_READ),
        (Op::Flush, Access::FLUSH_GLOBAL),
    ] {
        let mut pair = Pair::new();
        let side = &mut pair.sides[1];
        let spec = RegionSpec {
            memory: side.memory.clone(),
            memory_offset: 0,
            length: 4096,
            iova: IOVA,
            access: ALL_ACCESS.difference(missing),
        };
        let (_, rkey) = side.rnic.reg_mr(side.pd, spec).unwrap();
        let ext = match op {
            Op::Flush => flush_headers(IOVA, rkey, 4, Placement::GLOBAL),
            _ => reth(IOVA, rkey, 4).to_vec(),
        };
        let payload: &[u8] = if op == Op::WriteOnly { &[1; 4] } else { &[] };
        let answers = ask(&mut pair, op, 0, &ext, payload);
        refused(&mut pair, &answers, 0, NAK_ACCESS);
    }
}

#[test]
pub(super) fn atomic__misaligned_or_of_another_length_is_an_invalid_request() {
    let rkey = RKey(1);
    let atomic = |va| {
        let mut b = [0; AtomicEth::LEN];
        AtomicEth {
            va,
            rkey,
            swap_or_add: 0,
            compare: 0,
        }
        .emit(&mut b);
        b.to_vec()
    };
    for (op, ext, payload) in [
        (Op::CompareSwap, atomic(IOVA + 4), &[][..]),
        (Op::FetchAdd, atomic(IOVA + 1), &[]),
        (Op::AtomicWrite, reth(IOVA + 4, rkey, 8).to_vec(), &[1; 8]),
        (Op::AtomicWrite, reth(IOVA, rkey, 16).to_vec(), &[1; 8]),
        (Op::AtomicWrite, reth(IOVA, rkey, 8).to_vec(), &[1; 4]),
    ] {
        let mut pair = Pair::new();
        let answers = ask(&mut pair, op, 0, &ext, payload);
        refused(&mut pair, &answers, 0, NAK_INVALID);
    }
}

// Duplicates of READ and FLUSH.

#[test]
fn duplicate_read__inside_of_the_stored_request_is_replayed() {
    let mut pair = Pair::new();
    pair.sides[1].memory.with(|m| m[..3000].fill(5));
    let ext = own(&pair, 0, 3000);
    assert_eq!(ask(&mut pair, Op::ReadRequest, 0, &ext, &[]).len(), 3);
    let ext = own(&pair, 1024, 1976);
    let answers = ask(&mut pair, Op::ReadRequest, 1, &ext, &[]);
    let ops: Vec<(Op, i32)> = answers.iter().map(|said| (said.op, said.psn)).collect();
    assert_eq!(ops, [(Op::ReadResponseFirst, 1), (Op::ReadResponseLast, 2)]);
    assert_eq!(pair.sides[1].state(), QpState::Rts);
}

#[test]
fn duplicate_write__is_acknowledged_up_to_the_next_read() {
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 4);
    let write = |pair: &mut Pair, psn| ask(pair, Op::WriteOnly, psn, &ext, &[1; 4]);
    let ack = |psn| [ack(psn, Syndrome::ACK)];
    assert_eq!(write(&mut pair, 0), ack(0));
    assert_eq!(write(&mut pair, 1), ack(1));
    assert_eq!(ask(&mut pair, Op::ReadRequest, 2, &ext, &[]).len(), 1);
    assert_eq!(write(&mut pair, 0), ack(1));
    assert_eq!(write(&mut pair, 3), ack(3));
    assert_eq!(write(&mut pair, 1), ack(1));
    assert_eq!(write(&mut pair, 3), ack(3));
    // Two duplicates in a row: one acknowledgement covers both, and its PSN is not that of a READ.
    give(&mut pair, Op::WriteOnly, 0, &ext, &[1; 4]);
    assert_eq!(write(&mut pair, 3), ack(3));
}

#[test]
fn duplicate_read__outside_of_the_stored_request_is_dropped() {
    let mut pair = Pair::new();
    let ext = own(&pair, 0, 2048);
    ask(&mut pair, Op::ReadRequest, 0, &ext, &[]);
    let rkey = pair.sides[1].rkey;
    for (psn, ext) in [
        (0, reth(IOVA + 1, rkey, 2047)),
        (0, reth(IOVA, rkey, 2049)),
        (0, reth(IOVA, RKey(rkey.0 ^ 1), 2048)),
        (1, reth(IOVA, rkey, 1024)),
        (1, reth(IOVA + 1024, rkey, 1025)),
    ] {
        assert_eq!(ask(&mut pair, Op::ReadRequest, psn, &ext, &[]), [], "psn {psn}");
    }
    assert_eq!(pair.sides[1].state(), QpState::Rts);
}

#[test]
fn duplicate_read__beyond_the_responder_resources_is_dropped() {
    let mut pair = Pair::with(|rtr, _| rtr.max_dest_rd_atomic = Some(2));
    let ext = own(&pair, 0, 4);
    for psn in 0..3 {
        assert_eq!(ask(&mut pair, Op::ReadRequest, psn, &ext, &[]).len(), 1);
    }
    assert_eq!(ask(&mut pair, Op::ReadRequest, 0, &ext, &[]), []);
    assert_eq!(ask(&mut pair, Op::ReadRequest, 1, &ext, &[]).len(), 1);
}

#[test]
fn flush__with_a_placement_that_the_memory_cannot_keep_is_a_remote_access_error() {
    let mut pair = Pair::new();
    let side = &mut pair.sides[1];
    let spec = RegionSpec {
        memory: side.memory.clone(),
        memory_offset: 0,
        length: 4096,
        iova: IOVA,
        access: ALL_ACCESS | Access::FLUSH_PERSISTENT,
    };
    assert_eq!(
        side.rnic.reg_mr(side.pd, spec),
        Err(RegisterError::FlushNotSupported)
    );
    let ext = flush_headers(IOVA, pair.sides[1].rkey, 4, Placement::PERSISTENT);
    let answers = ask(&mut pair, Op::Flush, 0, &ext, &[]);
    refused(&mut pair, &answers, 0, NAK_ACCESS);
}

#[test]
fn flush__repeated_while_it_runs_is_put_off_and_replayed_when_done() {
    let mut pair = Pair::new();
    let rkey = pair.slow_region(false, Ok(()));
    let ext = flush_headers(IOVA, rkey, 4, Placement::PERSISTENT);
    assert_eq!(ask(&mut pair, Op::Flush, 0, &ext, &[]), []);
    let answers = ask(&mut pair, Op::Flush, 0, &ext, &[]);
    assert!(
        matches!(
            answers[..],
            [Said {
                op: Op::Acknowledge,
                psn: 0,
                syndrome: Some(Syndrome::RnrNak { .. }),
                ..
            }]
        ),
        "{answers:?}"
    );
    let job = pair.sides[1].rnic.poll_flush().unwrap();
    assert!(pair.sides[1].rnic.poll_flush().is_none(), "flushed once only");
    pair.sides[1].rnic.handle_flush(pair.now, job.id, Ok(()));
    let done = [said(Op::ReadResponseOnly, 0, Syndrome::ACK)];
    assert_eq!(says(&mut pair, 1), done);
    assert_eq!(ask(&mut pair, Op::Flush, 0, &ext, &[]), done);
    assert!(pair.sides[1].rnic.poll_flush().is_none(), "not flushed again");
    // A result that is reported twice has no effect.
    pair.sides[1]
        .rnic
        .handle_flush(pair.now, job.id, Err(Fault::Io(5)));
    assert_eq!(pair.sides[1].state(), QpState::Rts);
}

#[test]
fn flush__that_fails_ends_both_with_a_remote_operation_error() {
    for immediate in [false, true] {
        let mut pair = Pair::new();
        let rkey = pair.slow_region(immediate, Err(Fault::Io(5)));
        pair.flush(rkey);
        pair.write(0, 0, 100);
        pair.step();
        if let Some(job) = pair.sides[1].rnic.poll_flush() {
            let result = job.memory.flush(job.offset, job.length, job.placement);
            let now = pair.now;
            pair.sides[1].rnic.handle_flush(now, job.id, result);
        }
        pair.run();
        assert_eq!(
            statuses(&mut pair, 0),
            [Status::RemoteOperation, Status::Flushed],
            "immediate {immediate}"
        );
        for side in [0, 1] {
            assert_eq!(pair.sides[side].state(), QpState::Error, "immediate {immediate}");
        }
    }
}

#[test]
fn flush__that_never_ends_holds_back_its_own_qp_only() {
    let mut pair = Pair::new();
    let rkey = pair.slow_region(false, Ok(()));
    let (other0, other1) = pair.second_qps();
    pair.flush(rkey);
    pair.write(0, 0, 100);
    let write = SendRequest {
        wr_id: 77,
        operation: Operation::Write {
            va: IOVA,
            rkey: pair.sides[1].rkey,
            imm: None,
        },
        sges: pair.sides[0].sge(0, 100),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    let now = pair.now;
    pair.sides[0].rnic.post_send(now, other0, write).unwrap();
    pair.pass(30_000_000_000);
    let done: Vec<u64> = pair.sides[0].completions().iter().map(|wc| wc.wr_id).collect();
    assert_eq!(done, [77]);
    for (side, qpn) in [(0, pair.sides[0].qpn), (1, pair.sides[1].qpn), (1, other1)] {
        assert_eq!(pair.sides[side].rnic.query_qp(qpn).unwrap().state, QpState::Rts);
    }
}

#[test]
fn flush__of_a_qp_that_has_gone_is_forgotten() {
    let mut pair = Pair::new();
    let rkey = pair.slow_region(false, Ok(()));
    pair.flush(rkey);
    pair.step();
    let job = pair.sides[1].rnic.poll_flush().unwrap();
    let qpn = pair.sides[1].qpn;
    pair.sides[1].rnic.destroy_qp(qpn);
    pair.sides[1].rnic.handle_flush(pair.now, job.id, Ok(()));
    assert_eq!(says(&mut pair, 1), []);
}

// Responses that the requester receives.

/// Returns a pair whose side 0 has a WRITE of two packets and another of one packet in flight.
fn writing() -> Pair {
    let mut pair = Pair::new();
    pair.deliver = Box::new(|_, _| false);
    pair.write(0, 0, 2000);
    pair.write(0, 0, 10);
    pair.step();
    pair
}

#[test]
fn nak__codes_end_the_oldest_request_and_flush_the_rest() {
    for (code, status) in [
        (NakCode::InvalidRequest, Status::RemoteInvalidRequest),
        (NakCode::RemoteAccess, Status::RemoteAccess),
        (NakCode::RemoteOperation, Status::RemoteOperation),
    ] {
        let mut pair = writing();
        answer(&mut pair, Op::Acknowledge, 0, Syndrome::Nak(code), &[]);
        assert_eq!(statuses(&mut pair, 0), [status, Status::Flushed]);
        assert_eq!(pair.sides[0].state(), QpState::Error);
        let qpn = pair.sides[0].qpn;
        assert_eq!(
            pair.sides[0].rnic.poll_event(),
            Some(Event::QpError(qpn, status, Cause::OwnRequest))
        );
    }
}

#[test]
fn nak__acknowledges_what_is_before_it() {
    let mut pair = writing();
    answer(&mut pair, Op::Acknowledge, 2, NAK_ACCESS, &[]);
    assert_eq!(statuses(&mut pair, 0), [Status::Success, Status::RemoteAccess]);
}

#[test]
fn nak__behind_a_read_that_lacks_its_data_ends_the_request_that_it_names() {
    let mut pair = Pair::new();
    pair.deliver = Box::new(|_, _| false);
    let operation = Operation::Read {
        va: IOVA,
        rkey: pair.sides[1].rkey,
    };
    let sges = pair.sides[0].sge(0, 100);
    pair.write(0, 0, 10);
    pair.post(0, operation, sges);
    pair.write(0, 0, 10);
    pair.write(0, 0, 10);
    pair.step();
    answer(&mut pair, Op::Acknowledge, 2, NAK_ACCESS, &[]);
    assert_eq!(
        statuses(&mut pair, 0),
        [
            Status::Success,
            Status::Flushed,
            Status::RemoteAccess,
            Status::Flushed
        ]
    );
}

#[test]
fn nak__of_a_gap_resends_from_there() {
    let mut pair = writing();
    answer(&mut pair, Op::Acknowledge, 1, NAK_SEQUENCE, &[]);
    let psns: Vec<i32> = says(&mut pair, 0).iter().map(|said| said.psn).collect();
    assert_eq!(psns, [1, 2]);
    assert_eq!(pair.sides[0].state(), QpState::Rts);
}

#[test]
fn rnr__within_its_retries_waits_and_beyond_them_ends() {
    let mut pair = Pair::with(|_, rts| rts.rnr_retry = Some(2));
    let sges = pair.sides[0].sge(0, 10);
    pair.post(0, Operation::Send { imm: None }, sges);
    pair.run();
    assert_eq!(statuses(&mut pair, 0), [Status::RnrRetryExceeded]);
    assert_eq!(pair.sides[0].rnic.counters().rcvd_rnr_err, 3);
}

#[test]
fn rnr__retries_are_counted_anew_after_progress() {
    for selective in [false, true] {
        let mut pair = Pair::with(|rtr, rts| {
            rts.rnr_retry = Some(2);
            rtr.selective = Some(selective);
        });
        for round in 1..4 {
            pair.post(0, Operation::Send { imm: None }, SgeList::inline(b"hello"));
            // Both retries are used.
            while pair.sides[0].rnic.counters().rcvd_rnr_err < 2 * round {
                assert_eq!(pair.sides[0].state(), QpState::Rts, "selective: {selective}");
                pair.pass(1_000);
            }
            recv(&mut pair, 64);
            pair.run();
            assert_eq!(
                statuses(&mut pair, 0),
                [Status::Success],
                "selective: {selective}"
            );
        }
    }
}

#[test]
fn rnr__a_copy_of_what_is_being_waited_out_counts_as_no_retry() {
    for selective in [false, true] {
        let mut pair = Pair::with(|rtr, rts| {
            rts.rnr_retry = Some(1);
            rtr.selective = Some(selective);
        });
        pair.post(0, Operation::Send { imm: None }, SgeList::inline(b"hello"));
        pair.step();
        let rnr = Syndrome::RnrNak { timer: 1 };
        for _ in 0..2 {
            answer(&mut pair, Op::Acknowledge, 0, rnr, &[]);
        }
        recv(&mut pair, 64);
        pair.run();
        assert_eq!(
            statuses(&mut pair, 0),
            [Status::Success],
            "selective: {selective}"
        );
    }
}

#[test]
fn rnr__counts_unless_an_rdmux_peer_waits_for_a_medium() {
    let cases = [
        (false, 20, true),
        (false, 12, true),
        (true, 1, true),
        (true, 20, false),
    ];
    for (peer_is_rdmux, timer, counts) in cases {
        for read in [false, true] {
            let rkey = RKey(1);
            let mut pair = Pair::with(|rtr, rts| {
                rtr.peer_is_rdmux = Some(peer_is_rdmux);
                rts.rnr_retry = Some(2);
            });
            let operation = match read {
                true => Operation::Read { va: IOVA, rkey },
                false => Operation::Write {
                    va: IOVA,
                    rkey,
                    imm: None,
                },
            };
            let sges = pair.sides[0].sge(0, 8);
            pair.post(0, operation, sges);
            pair.deliver = Box::new(|_, _| false);
            for _ in 0..3 {
                pair.step();
                answer(&mut pair, Op::Acknowledge, 0, Syndrome::RnrNak { timer }, &[]);
                pair.now = pair.now + 50_000_000;
                pair.sides[0].rnic.handle_timeout(pair.now);
            }
            let state = if counts { QpState::Error } else { QpState::Rts };
            assert_eq!(
                pair.sides[0].state(),
                state,
                "{peer_is_rdmux} {timer}, READ: {read}"
            );
        }
    }
}

#[test]
fn rnr__a_flush_that_runs_for_long_is_waited_for() {
    for selective in [false, true] {
        let mut pair = Pair::with(|rtr, rts| {
            rts.rnr_retry = Some(6);
            rtr.selective = Some(selective);
        });
        let rkey = pair.slow_region(false, Ok(()));
        pair.flush(rkey);
        let add = Operation::FetchAdd {
            va: IOVA,
            rkey: pair.sides[1].rkey,
            add: 1,
        };
        let sges = pair.sides[0].sge(0, 8);
        pair.post(0, add, sges);
        pair.pass(500_000_000);
        let job = pair.sides[1].rnic.poll_flush().unwrap();
        pair.sides[1].rnic.handle_flush(pair.now, job.id, Ok(()));
        pair.run();
        assert_eq!(
            statuses(&mut pair, 0),
            [Status::Success; 2],
            "selective: {selective}"
        );
    }
}

#[test]
fn ghost__acknowledgements_are_ignored() {
    let mut pair = writing();
    // PSNs that were never sent, and PSNs from long ago.
    for psn in [3, 100, 0x80_0000, 0u32.wrapping_sub(2), 0u32.wrapping_sub(100)] {
        for syndrome in [Syndrome::ACK, NAK_SEQUENCE, NAK_ACCESS] {
            answer(&mut pair, Op::Acknowledge, psn, syndrome, &[]);
        }
    }
    assert_eq!(statuses(&mut pair, 0), []);
    assert_eq!(pair.sides[0].state(), QpState::Rts);
    assert!(pair.sides[0].rnic.counters().stale_responses >= 15);
}

#[test]
fn ghost__read_response_of_the_wrong_length_or_shape_ends_the_qp() {
    for (op, length) in [
        (Op::ReadResponseOnly, 99),
        (Op::ReadResponseOnly, 101),
        (Op::ReadResponseFirst, 100),
    ] {
        let mut pair = Pair::new();
        pair.deliver = Box::new(|_, _| false);
        let rkey = pair.sides[1].rkey;
        let sges = pair.sides[0].sge(0, 100);
        pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
        pair.step();
        answer(&mut pair, op, 0, Syndrome::ACK, &vec![1; length]);
        assert_eq!(statuses(&mut pair, 0), [Status::BadResponse], "{op:?} {length}");
        pair.sides[0]
            .memory
            .with(|m| assert_eq!(m[0], 0, "{op:?} {length}"));
    }
}

#[test]
fn local__key_or_bounds_wrong_end_the_request_before_it_leaves() {
    let mut pair = Pair::new();
    let rkey = pair.sides[1].rkey;
    let operation = Operation::Write {
        va: IOVA,
        rkey,
        imm: None,
    };
    let sges = pair.sides[0].sge(MEMORY as u64 - 9, 10);
    pair.post(0, operation, sges);
    pair.run();
    assert_eq!(statuses(&mut pair, 0), [Status::LocalProtection]);
    assert_eq!(pair.sides[0].state(), QpState::Error);
    assert_eq!(pair.sides[1].state(), QpState::Rts);
}

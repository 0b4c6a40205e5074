//! Peers on one host: packets are never lost there, but a peer may not be running.

use rdmux_wire::roce::{Bth, ICRC_LEN, Operation as Op, Packet, Reth, coalesced};

use super::util::*;
use crate::*;

/// The local ACK timeout of the pair below, 4.096 us x 2^10.
const TIMEOUT_NS: u64 = 4_194_304;

/// Returns a pair on one host that has measured a round trip.
fn pair(selective: bool) -> Pair {
    let mut pair = Pair::with(|rtr, rts| {
        rtr.selective = Some(selective);
        (rts.timeout, rts.retry_count) = (Some(10), Some(7));
    });
    pair.set_local(true);
    pair.write(0, 0, 8);
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
    pair
}

/// Returns the counters of lost packets and of packets assumed to be lost.
fn losses(pair: &Pair) -> [u64; 6] {
    let [asking, answering] = [0, 1].map(|i| pair.sides[i].rnic.counters());
    [
        asking.tail_probes,
        asking.retransmitted_packets,
        asking.local_ack_timeout_err,
        asking.packet_seq_err,
        answering.duplicate_request,
        answering.out_of_sequence,
    ]
}

fn stalls(pair: &Pair) -> u64 {
    pair.sides[0].rnic.counters().local_stalls
}

#[test]
fn stopped__nothing_is_sent_again() {
    for selective in [false, true] {
        let mut pair = pair(selective);
        pair.stopped[1] = true;
        for _ in 0..40 {
            pair.write(0, 0, 3_000);
        }
        pair.pass(5 * TIMEOUT_NS);
        assert_eq!(pair.sides[0].completed(), []);
        assert_eq!(
            (losses(&pair), stalls(&pair)),
            ([0; 6], 3),
            "after 1, 2 and 4 timeouts"
        );
        pair.stopped[1] = false;
        pair.run();
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success); 40]);
        assert_eq!((losses(&pair), stalls(&pair)), ([0; 6], 3));
    }
}

/// Returns the time until a request without an answer ends.
fn given_up_after(pair: &mut Pair) -> u64 {
    let begin = pair.now;
    pair.write(0, 0, 8);
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::RetryExceeded)]);
    pair.now.since_ns(begin)
}

#[test]
fn stopped__for_good_ends_when_it_would_over_a_network() {
    for selective in [false, true] {
        let mut lossy = pair(selective);
        lossy.set_local(false);
        lossy.deliver = Box::new(|_, _| false);
        let over_a_network = given_up_after(&mut lossy);
        let mut stopped = pair(selective);
        stopped.stopped[1] = true;
        assert_eq!(given_up_after(&mut stopped), over_a_network);
        assert_eq!((losses(&stopped), stalls(&stopped)), ([0; 6], 15));
    }
}

#[test]
fn running__but_silent_is_asked_again() {
    for selective in [false, true] {
        let mut pair = pair(selective);
        let mut ignored = 0;
        pair.deliver = Box::new(move |to, _| {
            ignored += u32::from(to == 1);
            to == 0 || ignored > 1
        });
        pair.write(0, 0, 8);
        pair.run();
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
        let counters = pair.sides[0].rnic.counters();
        assert_eq!((counters.local_ack_timeout_err, counters.local_stalls), (1, 0));
    }
}

#[test]
fn running__behind_with_the_requests_of_others_is_asked_again() {
    let mut pair = pair(false);
    pair.stopped[1] = true;
    pair.write(0, 0, 8);
    pair.step();
    // Side 1 takes the request and forgets it, but does not take the packets behind it.
    let others = [(); 2].map(|()| pair.sides[1].inbox[0].clone());
    pair.sides[1].inbox.extend(others);
    pair.ignore_one(1);
    pair.pass(TIMEOUT_NS);
    assert_eq!(pair.sides[0].rnic.counters().retransmitted_packets, 0);
    pair.ignore_one(1);
    pair.pass(TIMEOUT_NS);
    assert_eq!(pair.sides[0].rnic.counters().retransmitted_packets, 1);
}

#[test]
fn link_broke__what_was_in_it_is_sent_again_at_once() {
    for selective in [false, true] {
        let mut pair = pair(selective);
        pair.stopped[1] = true;
        for _ in 0..10 {
            pair.write(0, 0, 3_000);
        }
        pair.step();
        pair.sides[1].inbox.clear();
        pair.stopped[1] = false;
        pair.set_local(false);
        pair.pass(TIMEOUT_NS / 2);
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success); 10]);
        assert_eq!(pair.sides[0].rnic.counters().local_ack_timeout_err, 0);
    }
}

#[test]
fn link_broke__under_a_read_and_a_flush() {
    for selective in [false, true] {
        let mut pair = pair(selective);
        let rkey = pair.slow_region(true, Ok(()));
        let bytes = pattern(9_000);
        pair.sides[1].memory.write(0, &bytes).unwrap();
        pair.stopped[1] = true;
        let (key, sges) = (pair.sides[1].rkey, pair.sides[0].sge(1 << 20, 9_000));
        pair.post(0, Operation::Read { va: IOVA, rkey: key }, sges);
        pair.flush(rkey);
        pair.step();
        pair.sides[1].inbox.clear();
        pair.stopped[1] = false;
        pair.set_local(false);
        pair.run();
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success); 2]);
        let mut found = vec![0; 9_000];
        pair.sides[0].memory.read(1 << 20, &mut found).unwrap();
        assert!(found == bytes);
    }
}

#[test]
fn link_broke__while_the_peer_is_not_ready_to_receive() {
    for selective in [false, true] {
        // The peer's RNR timer is 491.52 ms, longer than all retries together.
        let mut pair = Pair::with(|rtr, rts| {
            (rtr.selective, rtr.min_rnr_timer) = (Some(selective), Some(31));
            (rts.timeout, rts.retry_count) = (Some(10), Some(7));
        });
        pair.set_local(true);
        for _ in 0..3 {
            pair.post(0, Operation::Send { imm: None }, SgeList::inline(b"hello"));
        }
        pair.step();
        pair.step();
        assert_eq!(pair.sides[0].rnic.counters().rcvd_rnr_err, 1);
        pair.set_local(false);
        for _ in 0..3 {
            pair.recv(1, 1, 0, 64);
        }
        pair.run();
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success); 3]);
        assert_eq!(pair.sides[0].rnic.counters().local_ack_timeout_err, 0);
    }
}

#[test]
fn link_broke__of_a_pair_that_has_ended_or_ends() {
    for (selective, ends_first) in [(false, true), (false, false), (true, true), (true, false)] {
        let mut pair = pair(selective);
        pair.stopped[1] = true;
        pair.write(0, 0, 3_000);
        pair.step();
        if !ends_first {
            pair.set_local(false);
        }
        pair.modify(0, QpState::Error, &QpAttributes::default());
        pair.set_local(false);
        pair.pass(2 * TIMEOUT_NS);
        assert_eq!(pair.sides[0].completed(), [(7, Status::Flushed)]);
        assert_eq!(losses(&pair), [0; 6]);
        assert_eq!(pair.sides[0].rnic.poll_timeout(), None);
    }
}

/// One side accepts, moves to RTS at once, and sends before the other side, which requested the connection, knows of that.
#[test]
fn peer_is_ready__what_it_has_dropped_is_sent_again_at_once() {
    for selective in [false, true] {
        let attributes = |rtr: &mut QpAttributes, rts: &mut QpAttributes| {
            rtr.selective = Some(selective);
            // A single timeout would end the pair.
            (rts.timeout, rts.retry_count) = (Some(10), Some(0));
        };
        let mut pair = Pair::with(attributes);
        let [accepting, asking] = [0, 1].map(|i| pair.sides[i].qpn);
        pair.modify(1, QpState::Reset, &QpAttributes::default());
        pair.connect_qp(1, asking, accepting, &attributes, QpState::Init);
        for _ in 0..10 {
            pair.write(0, 0, 3_000);
        }
        while pair.step() {}
        pair.connect_qp(1, asking, accepting, &attributes, QpState::Rts);
        while pair.step() {}
        assert_eq!(pair.sides[0].completed(), []);
        pair.sides[0].rnic.peer_is_ready(pair.now, accepting);
        pair.pass(TIMEOUT_NS / 2);
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success); 10]);
        // A peer that has answered has dropped nothing.
        let before = pair.sides[0].rnic.counters().retransmitted_packets;
        pair.stopped[1] = true;
        pair.write(0, 0, 8);
        pair.step();
        pair.sides[0].rnic.peer_is_ready(pair.now, accepting);
        pair.stopped[1] = false;
        while pair.step() {}
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
        let counters = pair.sides[0].rnic.counters();
        assert_eq!(
            (counters.retransmitted_packets, counters.local_ack_timeout_err),
            (before, 0)
        );
    }
}

/// Returns the packets that side 0 sends for a WRITE of `length` bytes, which side 1 does not get.
fn sent_for(pair: &mut Pair, length: u32) -> Vec<Vec<u8>> {
    pair.stopped[1] = true;
    pair.write(0, 0, length);
    pair.step();
    pair.stopped[1] = false;
    let mut packets = Vec::new();
    for (_, train, segment_bytes, _) in pair.sides[1].inbox.drain(..) {
        packets.extend(train.chunks(segment_bytes).map(<[u8]>::to_vec));
    }
    packets
}

#[test]
fn coalesced__a_message_is_one_packet_with_the_psns_of_all() {
    for selective in [false, true] {
        let mut pair = pair(selective);
        let bytes = pattern(5_000);
        pair.sides[0].memory.write(0, &bytes).unwrap();
        let before = pair.sides[0].rnic.counters();
        let sent = sent_for(&mut pair, 5_000);
        let packet = Packet::parse_local(&sent[0]).unwrap();
        assert_eq!((sent.len(), packet.count(), packet.payload()), (1, 5, &bytes[..]));
        assert_eq!(packet.bth.opcode.operation, Op::WriteOnly);
        let now = pair.sides[0].rnic.counters();
        assert_eq!(
            now.sent_pkts - before.sent_pkts,
            5,
            "counted as the packets it stands for"
        );
        pair.pass(TIMEOUT_NS * 8);
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
        let next = sent_for(&mut pair, 8).remove(0);
        let next = Packet::parse_local(&next).unwrap().bth.psn;
        assert_eq!(next.since(packet.bth.psn), 5);
        let mut found = vec![0; bytes.len()];
        pair.sides[1].memory.read(0, &mut found).unwrap();
        assert!(found == bytes);
    }
}

#[test]
fn coalesced__a_long_message_continues_and_ends() {
    let mut pair = pair(false);
    let sent = sent_for(&mut pair, 100_000);
    let packets = sent.iter().map(|bytes| Packet::parse_local(bytes).unwrap());
    let parts: Vec<_> = packets
        .map(|packet| (packet.bth.opcode.operation, packet.count(), packet.bth.ack_req))
        .collect();
    assert_eq!(
        parts,
        [
            (Op::WriteFirst, 32, true),
            (Op::WriteMiddle, 32, true),
            (Op::WriteMiddle, 32, true),
            (Op::WriteLast, 2, true),
        ]
    );
}

#[test]
fn coalesced__what_was_executed_in_part_is_finished_by_ordinary_packets() {
    for selective in [false, true] {
        // All packets but the last one of a message arrive by the network, and their acknowledgement does not.
        let mut pair = pair(selective);
        pair.set_local(false);
        let bytes = pattern(3_000);
        pair.sides[0].memory.write(0, &bytes).unwrap();
        pair.deliver = Box::new(|to, datagram| {
            datagram.truncate(2 * (Bth::LEN + Reth::LEN + 1024 + ICRC_LEN));
            to == 1
        });
        pair.recv(1, 1, 0, 4_000);
        let sges = pair.sides[0].sge(0, 3_000);
        pair.post(0, Operation::Send { imm: None }, sges);
        pair.step();
        pair.deliver = Box::new(|_, _| true);
        pair.set_local(true);
        pair.run();
        assert_eq!(pair.sides[0].completed(), [(7, Status::Success)], "{selective}");
        assert_eq!(pair.sides[1].completed(), [(1, Status::Success)]);
        let mut found = vec![0; bytes.len()];
        pair.sides[1].memory.read(0, &mut found).unwrap();
        assert!(found == bytes);
    }
}

#[test]
fn coalesced__with_another_number_of_bytes_is_refused() {
    for (count, is_right) in [(3, true), (2, false), (4, false), (64, false)] {
        let mut pair = pair(false);
        let mut sent = sent_for(&mut pair, 3_000).remove(0);
        coalesced::set_count(&mut sent, count);
        let (path, segment_bytes) = (pair.path(0, pair.sides[1].address), sent.len());
        pair.sides[1].inbox.push_back((path, sent, segment_bytes, true));
        pair.step();
        let expected = if is_right { QpState::Rts } else { QpState::Error };
        assert_eq!(pair.sides[1].state(), expected, "{count}");
    }
}

/// The bits that say how many packets one stands for are reserved on the wire.
#[test]
fn coalesced__is_nothing_that_the_network_brings() {
    let mut pair = pair(false);
    pair.set_local(false);
    let mut sent = sent_for(&mut pair, 8).remove(0);
    sent.truncate(sent.len() - ICRC_LEN);
    coalesced::set_count(&mut sent, 2);
    let datagram = pair.craft(&sent);
    pair.inject(&datagram);
    pair.pass(TIMEOUT_NS * 8);
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
    assert_eq!(pair.sides[1].rnic.counters().rcvd_pkts, 2, "with that of `pair`");
}

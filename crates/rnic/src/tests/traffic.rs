//! Quanta, classes, congestion and rates.

use std::net::IpAddr;

use rdmux_wire::roce::Bth;
use rdmux_wire::roce::cnp::Cnp;

use super::util::*;
use crate::sched::{CLASSES, Policy, QUANTUM_BYTES};
use crate::*;

/// Posts a WRITE of `bytes` on one of side 0's QPs.
fn post(pair: &mut Pair, qpn: Qpn, bytes: u32) {
    let rkey = pair.sides[1].rkey;
    let side = &mut pair.sides[0];
    let request = SendRequest {
        wr_id: 7,
        operation: Operation::Write {
            va: IOVA,
            rkey,
            imm: None,
        },
        sges: side.sge(0, bytes),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    side.rnic.post_send(pair.now, qpn, request).unwrap();
}

/// Returns the trains that side 0 sends in one quantum: destination QPN and number of packets of each.
fn transmit(pair: &mut Pair) -> Vec<(Qpn, usize)> {
    let mut buf = TransmitBuf::new(QUANTUM_BYTES as usize, true);
    pair.sides[0].rnic.poll_transmit(pair.now, &mut buf, true);
    let qpn = |train: &Train| Bth::parse(&buf.bytes()[train.range.clone()]).unwrap().dest_qpn;
    buf.trains()
        .iter()
        .map(|train| (qpn(train), train.packets))
        .collect()
}

#[test]
fn poll_transmit__qps_of_a_class_are_served_round_robin() {
    let mut pair = Pair::with(|rtr, _| rtr.window_bytes = Some(1 << 20));
    let (second, second_peer) = pair.second_qps();
    let (first, first_peer) = (pair.sides[0].qpn, pair.sides[1].qpn);
    post(&mut pair, first, 200_000);
    post(&mut pair, second, 60_000);
    let peers: Vec<Qpn> = (0..3).map(|_| transmit(&mut pair)[0].0).collect();
    assert_eq!(peers, [first_peer, second_peer, first_peer]);
}

#[test]
fn poll_transmit__says_that_messages_of_the_cm_are_left() {
    let mut pair = Pair::new();
    let (now, peer) = (pair.now, pair.sides[1].address);
    let rnic = &mut pair.sides[0].rnic;
    for port in 0..8 {
        let service = rdmux_wire::cm::ServiceId::udp(port);
        rnic.cm().resolve(now, peer, service, None, b"").unwrap();
    }
    let (mut buf, mut packets, mut more) = (TransmitBuf::new(1000, true), 0, true);
    while more {
        buf.clear();
        more = rnic.poll_transmit(now, &mut buf, true);
        packets += buf.trains().iter().map(|train| train.packets).sum::<usize>();
    }
    assert_eq!(packets, 8);
}

#[test]
fn poll_transmit__a_strict_class_goes_first() {
    let mut classes = [Policy::default(); CLASSES];
    classes[6] = Policy::Strict;
    let traffic = Traffic {
        classes,
        ..Traffic::default()
    };
    let mut pair = Pair::with_traffic(traffic, |rtr, _| {
        rtr.window_bytes = Some(1 << 20);
        rtr.path.as_mut().unwrap().traffic_class = 48 << 2;
    });
    let (second, second_peer) = pair.second_qps();
    let (first, first_peer) = (pair.sides[0].qpn, pair.sides[1].qpn);
    post(&mut pair, second, 60_000);
    post(&mut pair, first, 150_000);
    let peers: Vec<Qpn> = (0..3).map(|_| transmit(&mut pair)[0].0).collect();
    assert_eq!(peers, [first_peer; 3]);
    while let [(peer, _), ..] = transmit(&mut pair)[..] {
        assert!([first_peer, second_peer].contains(&peer));
    }
    pair.run();
    assert_eq!(pair.sides[0].completions().len(), 2);
}

fn rate_limited(bps: u64) -> Pair {
    Pair::with(|rtr, _| rtr.rate_limit_bps = Some(bps))
}

/// Runs both sides until side 0 has `count` completions; returns the time that passed.
fn run_until_complete(pair: &mut Pair, count: usize) -> u64 {
    let (begin, mut done) = (pair.now, 0);
    while done < count {
        if !pair.step() {
            let timers = pair.sides.iter().filter_map(|side| side.rnic.poll_timeout());
            pair.now = pair.now.max(timers.min().expect("something is still to come"));
            for side in &mut pair.sides {
                side.rnic.handle_timeout(pair.now);
            }
        }
        for wc in pair.sides[0].completions() {
            assert_eq!(wc.status, Status::Success);
            done += 1;
        }
    }
    pair.now.since_ns(begin)
}

#[test]
fn rate_limit__writes_take_their_time() {
    // 1 MiB at 100 Mbit/s is 84 ms.
    let mut pair = rate_limited(100_000_000);
    pair.write(0, 0, 1 << 20);
    let took_ns = run_until_complete(&mut pair, 1);
    assert!((83_000_000..88_000_000).contains(&took_ns), "{took_ns}");
    assert_eq!(pair.sides[0].rnic.counters().local_ack_timeout_err, 0);
    // At this rate even one packet takes longer than the ACK timeout.
    let mut pair = rate_limited(1_000_000);
    pair.write(0, 0, 20_000);
    run_until_complete(&mut pair, 1);
    assert_eq!(pair.sides[0].rnic.counters().local_ack_timeout_err, 0);
}

#[test]
fn rate_limit__holds_for_read_responses() {
    let mut pair = rate_limited(100_000_000);
    let operation = Operation::Read {
        va: IOVA,
        rkey: pair.sides[1].rkey,
    };
    let sges = pair.sides[0].sge(0, 1 << 17);
    pair.post(0, operation, sges);
    let took_ns = run_until_complete(&mut pair, 1);
    assert!((10_000_000..11_500_000).contains(&took_ns), "{took_ns}");
}

#[test]
fn rate_limit__is_lifted_while_the_qp_works() {
    let mut pair = rate_limited(1_000_000);
    let lifted = QpAttributes {
        rate_limit_bps: Some(0),
        ..Default::default()
    };
    for i in 0..2 {
        pair.modify(i, QpState::Rts, &lifted);
    }
    pair.write(0, 0, 1 << 20);
    assert_eq!(run_until_complete(&mut pair, 1), 0);
}

#[test]
fn rate_limit__does_not_hold_up_others() {
    let mut pair = rate_limited(1_000_000);
    let (second, _) = pair.second_qps();
    let first = pair.sides[0].qpn;
    post(&mut pair, first, 100_000);
    post(&mut pair, second, 100_000);
    assert_eq!(run_until_complete(&mut pair, 1), 0);
}

/// Returns the ECN fields of the packets that side 0 sends for a WRITE.
fn ecn_of(pair: &mut Pair) -> Vec<u8> {
    pair.write(0, 0, 5000);
    let mut buf = TransmitBuf::new(1 << 18, true);
    pair.sides[0].rnic.poll_transmit(pair.now, &mut buf, true);
    buf.trains()
        .iter()
        .map(|train| train.path.traffic_class & ECN_MARKED)
        .collect()
}

#[test]
fn ecn__towards_peers_that_answer_marks() {
    assert_eq!(ecn_of(&mut Pair::new()), [ECN_CAPABLE; 2]);
    let foreign = |rtr: &mut QpAttributes, _: &mut QpAttributes| rtr.peer_is_rdmux = Some(false);
    assert_eq!(ecn_of(&mut Pair::with(foreign)), [0; 2]);
    // The user's own ECN bits are kept.
    let asked = |rtr: &mut QpAttributes, _: &mut QpAttributes| {
        rtr.peer_is_rdmux = Some(false);
        rtr.path.as_mut().unwrap().traffic_class = ECN_CAPABLE;
    };
    assert_eq!(ecn_of(&mut Pair::with(asked)), [ECN_CAPABLE; 2]);
    let off = Traffic {
        congestion: None,
        ..Traffic::default()
    };
    assert_eq!(ecn_of(&mut Pair::with_traffic(off, |_, _| {})), [0; 2]);
}

#[test]
fn ecn__not_on_loopback() {
    let local = |rtr: &mut QpAttributes, _: &mut QpAttributes| {
        let path = rtr.path.as_mut().unwrap();
        path.dst = path.src;
    };
    assert_eq!(ecn_of(&mut Pair::with(local)), [0; 2]);
}

#[test]
fn marked__packets_slow_their_sender_down() {
    let mut pair = Pair::new();
    pair.write(0, 0, 1 << 20);
    assert_eq!(
        run_until_complete(&mut pair, 1),
        0,
        "no limit before the first mark"
    );
    pair.marked[1] = true;
    pair.write(0, 0, 1 << 20);
    // The first CNP halves the rate of 10 Gbit/s, and more CNPs follow.
    let took_ns = run_until_complete(&mut pair, 1);
    assert!(took_ns > 2_000_000, "{took_ns}");
    let (sender, receiver) = (pair.sides[0].rnic.counters(), pair.sides[1].rnic.counters());
    assert!(receiver.np_ecn_marked_roce_packets >= 900);
    assert!((4..=took_ns / 50_000 + 1).contains(&receiver.np_cnp_sent));
    assert_eq!(sender.rp_cnp_handled, receiver.np_cnp_sent);
    assert_eq!(sender.malformed + sender.no_qp + sender.rx_icrc_encapsulated, 0);
    assert_eq!((sender.np_cnp_sent, receiver.rp_cnp_handled), (0, 0));
}

#[test]
fn marked__read_responses_slow_the_responder_down() {
    let mut pair = Pair::new();
    pair.marked[0] = true;
    let operation = Operation::Read {
        va: IOVA,
        rkey: pair.sides[1].rkey,
    };
    let sges = pair.sides[0].sge(0, 1 << 20);
    pair.post(0, operation, sges);
    assert!(run_until_complete(&mut pair, 1) > 2_000_000);
    assert!(pair.sides[1].rnic.counters().rp_cnp_handled > 0);
}

#[test]
fn cnp__leaves_in_a_traffic_class_of_its_own() {
    let mut pair = Pair::new();
    pair.marked[1] = true;
    pair.write(0, 0, 1);
    pair.step();
    pair.stopped[0] = true;
    pair.step();
    let sent = pair.sides[0].inbox.iter();
    let classes: Vec<u8> = sent.map(|(path, ..)| path.traffic_class).collect();
    assert!(classes.contains(&(48 << 2)), "{classes:?}");
}

/// Returns the counters of side 0 after it has received this CNP with a correct ICRC.
fn given(cnp: Cnp, change: impl Fn(&mut [u8])) -> Counters {
    let mut pair = Pair::new();
    let mut bytes = [0; Cnp::LEN];
    cnp.emit(&mut bytes);
    change(&mut bytes);
    pair.inject_back(&bytes);
    pair.sides[0].rnic.counters()
}

#[test]
fn cnp__is_checked_like_any_packet() {
    let qpn = Pair::new().sides[0].qpn;
    assert_eq!(given(Cnp::new(qpn), |_| {}).rp_cnp_handled, 1);
    let unknown = Cnp::new(Qpn::new(qpn.value() ^ 1));
    assert_eq!(given(unknown, |_| {}).no_qp, 1);
    let other = Cnp {
        pkey: 0x1234,
        ..Cnp::new(qpn)
    };
    assert_eq!(given(other, |_| {}).bad_pkey, 1);
    assert_eq!(given(Cnp::new(qpn), |b| b[4] = 0).malformed, 1);

    let mut pair = Pair::new();
    let mut bytes = [0; Cnp::LEN + 4];
    Cnp::new(pair.sides[0].qpn).emit(&mut bytes);
    let src = IpAddr::from([10, 0, 0, 2]);
    let give = |pair: &mut Pair, src| {
        let now = pair.now;
        pair.sides[0]
            .rnic
            .handle_datagram(now, src, 0xc001, &bytes, bytes.len());
        pair.sides[0].rnic.counters()
    };
    assert_eq!(give(&mut pair, src).rx_icrc_encapsulated, 1);
    assert_eq!(give(&mut pair, IpAddr::from([10, 0, 0, 3])).wrong_peer, 1);
    assert_eq!(pair.sides[0].rnic.counters().rp_cnp_handled, 0);
}

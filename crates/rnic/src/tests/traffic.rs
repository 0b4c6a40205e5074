//! Turns, classes, congestion and rates.

use rdmux_wire::roce::Bth;

use super::util::*;
use crate::sched::{CLASSES, Policy, TURN_BYTES};
use crate::*;

/// Side 0 posts a WRITE of `bytes` on a QP of its own.
fn post(pair: &mut Pair, qpn: Qpn, bytes: u32) {
    let side = &mut pair.sides[0];
    let request = SendRequest {
        wr_id: 7,
        operation: Operation::Write {
            va: IOVA,
            rkey: side.rkey,
            imm: None,
        },
        sges: side.sge(0, bytes),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    side.rnic.post_send(pair.now, qpn, request).unwrap();
}

/// What side 0 sends into a buffer that one turn fills: destination QPN and packets of each train.
fn transmit(pair: &mut Pair) -> Vec<(Qpn, usize)> {
    let mut buf = TransmitBuf::new(TURN_BYTES as usize, true);
    pair.sides[0].rnic.poll_transmit(pair.now, &mut buf, true);
    let qpn = |train: &Train| Bth::parse(&buf.bytes()[train.range.clone()]).unwrap().dest_qpn;
    buf.trains()
        .iter()
        .map(|train| (qpn(train), train.packets))
        .collect()
}

#[test]
fn poll_transmit__qps_of_a_class_take_turns() {
    let mut pair = Pair::with(|rtr, _| rtr.window_bytes = Some(1 << 20));
    let (second, second_peer) = pair.second_qps();
    let (first, first_peer) = (pair.sides[0].qpn, pair.sides[1].qpn);
    post(&mut pair, first, 200_000);
    post(&mut pair, second, 60_000);
    let peers: Vec<Qpn> = (0..3).map(|_| transmit(&mut pair)[0].0).collect();
    assert_eq!(peers, [first_peer, second_peer, first_peer]);
}

#[test]
fn poll_transmit__a_strict_class_goes_first() {
    let mut classes = [Policy::default(); CLASSES];
    classes[6] = Policy::Strict;
    let traffic = Traffic { classes };
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

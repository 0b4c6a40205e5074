//! Tests of counters and latencies.

use super::util::*;
use crate::*;

fn counters(pair: &Pair) -> [Counters; 2] {
    [0, 1].map(|i: usize| pair.sides[i].rnic.counters())
}

#[test]
fn counters__what_one_end_sent_the_other_received() {
    let mut pair = Pair::new();
    pair.write(0, 0, 10_000);
    let (va, rkey) = (IOVA, pair.sides[1].rkey);
    let sges = pair.sides[0].sge(0, 5_000);
    pair.post(0, Operation::Read { va, rkey }, sges);
    pair.run();
    let [a, b] = counters(&pair);
    assert_eq!((a.sent_pkts, a.sent_bytes), (b.rcvd_pkts, b.rcvd_bytes));
    assert_eq!((b.sent_pkts, b.sent_bytes), (a.rcvd_pkts, a.rcvd_bytes));
    // The bytes include the packets' headers, and nothing else.
    assert!((10_000..11_000).contains(&a.sent_bytes), "{}", a.sent_bytes);
    assert!((5_000..5_500).contains(&b.sent_bytes), "{}", b.sent_bytes);
}

#[test]
fn counters__completions_with_an_error_of_their_own_and_flushed_ones() {
    let mut pair = Pair::new();
    pair.recv(1, 9, 0, 64);
    let wrong = Operation::Write {
        va: IOVA,
        rkey: RKey(pair.sides[1].rkey.0 ^ 1 << 20),
        imm: None,
    };
    let sges = pair.sides[0].sge(0, 8);
    pair.post(0, wrong, sges);
    pair.write(0, 0, 8);
    pair.run();
    let [a, b] = counters(&pair);
    assert_eq!((a.req_cqe_error, a.req_cqe_flush_error), (1, 1));
    assert_eq!((b.resp_cqe_error, b.resp_cqe_flush_error), (0, 1));
    assert_eq!((a.resp_cqe_error, b.req_cqe_error), (0, 0));
}

#[test]
fn latencies__from_posting_to_completion() {
    let mut pair = Pair::new();
    let mut first = true;
    pair.deliver = Box::new(move |_, _| !std::mem::take(&mut first));
    let began = pair.now;
    pair.write(0, 0, 8);
    while pair.step() {}
    // The packet is lost. The retransmission happens at this time and is answered at once.
    let due = pair.sides[0].rnic.poll_timeout().unwrap();
    pair.run();
    assert_eq!(pair.sides[0].completed().len(), 1);
    let latencies = pair.sides[0].rnic.latencies();
    let written = latencies[WcOpcode::Write];
    assert_eq!((written.count(), written.sum_ns()), (1, due.since_ns(began)));
    assert_eq!(latencies[WcOpcode::Read], Histogram::default());

    // A failed request does not count: its duration means nothing.
    let wrong = Operation::Read {
        va: IOVA,
        rkey: RKey(pair.sides[1].rkey.0 ^ 1 << 20),
    };
    let sges = pair.sides[0].sge(0, 8);
    pair.post(0, wrong, sges);
    pair.run();
    assert_eq!(pair.sides[0].rnic.latencies()[WcOpcode::Read].count(), 0);
}

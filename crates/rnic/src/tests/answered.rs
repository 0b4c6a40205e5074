//! Requests that one response answers: a WRITE, and the FLUSH or READ behind it.

use std::cell::RefCell;
use std::rc::Rc;

use rdmux_wire::roce::{Operation as Op, Packet};

use super::util::*;
use crate::*;

/// Returns a pair that sends each packet as a datagram of its own, and a log of the packets to each side: operation, and whether an
/// acknowledgement is requested. `loses` decides by side and index which packets are lost.
fn pair(
    change: impl Fn(&mut QpAttributes, &mut QpAttributes),
    loses: impl Fn(usize, usize) -> bool + 'static,
) -> (Pair, Log) {
    let mut pair = Pair::with(change);
    pair.disable_trains();
    let sent: Log = Rc::default();
    let log = sent.clone();
    pair.deliver = Box::new(move |to, bytes| {
        let packet = Packet::parse(bytes).unwrap();
        let log = &mut log.borrow_mut()[to];
        log.push((packet.bth.opcode.operation, packet.bth.ack_req));
        !loses(to, log.len() - 1)
    });
    (pair, sent)
}

type Log = Rc<RefCell<[Vec<(Op, bool)>; 2]>>;

/// Posts a WRITE to side 1's region `rkey` at side 0.
fn write(pair: &mut Pair, rkey: RKey, length: u32) {
    let sges = pair.sides[0].sge(0, length);
    let va = IOVA;
    pair.post(0, Operation::Write { va, rkey, imm: None }, sges);
}

fn read(pair: &mut Pair, rkey: RKey) {
    let sges = pair.sides[0].sge(8192, 8);
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
}

fn all_done(pair: &mut Pair, count: usize) {
    let done = pair.sides[0].completions();
    assert_eq!(done.len(), count);
    assert!(done.iter().all(|wc| wc.status == Status::Success), "{done:?}");
}

#[test]
fn write__a_flush_behind_it_is_answered_for_both() {
    for selective in [false, true] {
        let (mut pair, log) = pair(|rtr, _| rtr.selective = Some(selective), |_, _| false);
        let rkey = pair.slow_region(true, Ok(()));
        write(&mut pair, rkey, 3000);
        pair.flush(rkey);
        pair.run();
        all_done(&mut pair, 2);
        let log = log.borrow();
        let forth = [
            (Op::WriteFirst, false),
            (Op::WriteMiddle, false),
            (Op::WriteLast, false),
            (Op::Flush, true),
        ];
        assert_eq!(log[1], forth);
        assert_eq!(log[0], [(Op::ReadResponseOnly, false)]);
    }
}

#[test]
fn write__leaves_in_the_train_of_the_flush_behind_it() {
    let mut pair = Pair::new();
    let datagrams: Rc<RefCell<[u32; 2]>> = Rc::default();
    let count = datagrams.clone();
    pair.deliver = Box::new(move |to, _| {
        count.borrow_mut()[to] += 1;
        true
    });
    let rkey = pair.slow_region(true, Ok(()));
    write(&mut pair, rkey, 1024);
    pair.flush(rkey);
    pair.run();
    all_done(&mut pair, 2);
    assert_eq!(*datagrams.borrow(), [1, 1]);
}

#[test]
fn write__a_read_behind_it_is_answered_for_both() {
    let (mut pair, log) = pair(|_, _| {}, |_, _| false);
    let rkey = pair.sides[1].rkey;
    write(&mut pair, rkey, 8);
    read(&mut pair, rkey);
    pair.run();
    all_done(&mut pair, 2);
    let log = log.borrow();
    assert_eq!(log[1], [(Op::WriteOnly, false), (Op::ReadRequest, true)]);
    assert_eq!(log[0], [(Op::ReadResponseOnly, false)]);
}

#[test]
fn write__is_acknowledged_before_a_flush_that_takes_its_time() {
    for selective in [false, true] {
        let (mut pair, log) = pair(|rtr, _| rtr.selective = Some(selective), |_, _| false);
        let rkey = pair.slow_region(false, Ok(()));
        write(&mut pair, rkey, 8);
        pair.flush(rkey);
        while pair.step() {}
        all_done(&mut pair, 1);
        let job = pair.sides[1].rnic.poll_flush().unwrap();
        pair.sides[1].rnic.handle_flush(pair.now, job.id, Ok(()));
        pair.run();
        all_done(&mut pair, 1);
        let log = log.borrow();
        assert_eq!(log[1].len(), 2);
        assert_eq!(log[0], [(Op::Acknowledge, false), (Op::ReadResponseOnly, false)]);
    }
}

#[test]
fn write__requests_an_acknowledgement_where_what_follows_may_wait() {
    let asks = |change: fn(&mut QpAttributes, &mut QpAttributes), post: &dyn Fn(&mut Pair, RKey)| {
        let (mut pair, log) = pair(change, |_, _| false);
        let rkey = pair.slow_region(true, Ok(()));
        post(&mut pair, rkey);
        pair.run();
        let posted = pair.sides[0].completions().len();
        let log = log.borrow();
        let of_write = log[1].iter().find(|(op, _)| *op == Op::WriteOnly).unwrap();
        (of_write.1, posted)
    };
    let plain = |pair: &mut Pair, rkey: RKey| {
        write(pair, rkey, 8);
        pair.flush(rkey);
    };
    let none = |_: &mut QpAttributes, _: &mut QpAttributes| {};
    assert_eq!(asks(none, &plain), (false, 2));
    // Another device than rdmux.
    assert_eq!(asks(|rtr, _| rtr.peer_is_rdmux = Some(false), &plain), (true, 2));
    // The initiator depth is used up by the READ before.
    let behind_a_read = |pair: &mut Pair, rkey: RKey| {
        read(pair, rkey);
        plain(pair, rkey);
    };
    assert_eq!(
        asks(|_, rts| rts.max_rd_atomic = Some(1), &behind_a_read),
        (true, 3)
    );
    assert_eq!(asks(none, &behind_a_read), (false, 3));
    // A fence.
    let fenced = |pair: &mut Pair, rkey: RKey| {
        read(pair, rkey);
        write(pair, rkey, 8);
        let request = SendRequest {
            wr_id: 1,
            operation: Operation::Read { va: IOVA, rkey },
            sges: pair.sides[0].sge(0, 8),
            flags: SendFlags::SIGNALED | SendFlags::FENCE,
            to: Target::Connected,
        };
        let side = &mut pair.sides[0];
        side.rnic.post_send(pair.now, side.qpn, request).unwrap();
    };
    assert_eq!(asks(none, &fenced), (true, 3));
    // No room in the window for the response of the READ.
    let long = |pair: &mut Pair, rkey: RKey| {
        write(pair, rkey, 8);
        let sges = pair.sides[0].sge(8192, 8 << 10);
        pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    };
    assert_eq!(asks(|rtr, _| rtr.window_bytes = Some(4 << 10), &long), (false, 2));
    let full = |pair: &mut Pair, rkey: RKey| {
        for _ in 0..3 {
            write(pair, rkey, 8);
        }
        long(pair, rkey);
    };
    assert_eq!(asks(|rtr, _| rtr.window_bytes = Some(4 << 10), &full), (true, 5));
}

#[test]
fn write__completes_whatever_is_lost() {
    for selective in [false, true] {
        // Each packet to side 1, then to side 0, then each two of the first four in either direction.
        let losses: Vec<Vec<(usize, usize)>> =
            [vec![(1, 0)], vec![(1, 1)], vec![(1, 0), (1, 1)], vec![(0, 0)]]
                .into_iter()
                .chain((0..16).map(|n| vec![(n & 1, n / 4), (1 - (n & 1), n / 2 % 4)]))
                .collect();
        for lost in losses {
            for flushes in [true, false] {
                let what = format!("selective: {selective}, flushes: {flushes}, lost: {lost:?}");
                let gone = lost.clone();
                let (mut pair, _) = pair(
                    |rtr, _| rtr.selective = Some(selective),
                    move |to, index| gone.contains(&(to, index)),
                );
                let bytes = pattern(2000);
                pair.sides[0].memory.write(0, &bytes).unwrap();
                let rkey = pair.sides[1].rkey;
                write(&mut pair, rkey, 2000);
                if flushes {
                    let operation = Operation::Flush {
                        va: IOVA,
                        rkey,
                        length: 2000,
                        placement: Placement::GLOBAL,
                        selectivity: Selectivity::Range,
                    };
                    pair.post(0, operation, SgeList::EMPTY);
                } else {
                    read(&mut pair, rkey);
                }
                pair.run();
                let done = pair.sides[0].completions();
                assert_eq!(done.len(), 2, "{what}");
                assert!(done.iter().all(|wc| wc.status == Status::Success), "{what}");
                let mut found = vec![0; 2000];
                pair.sides[1].memory.read(0, &mut found).unwrap();
                assert_eq!(found, bytes, "{what}");
            }
        }
    }
}

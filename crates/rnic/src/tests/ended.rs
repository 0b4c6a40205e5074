//! Memory whose use ends inside the device: the device's driver drops the last handle.

use std::sync::{Arc, Weak};

use super::util::*;
use crate::*;

/// A pair whose first side has a region without memory, and a registration of memory that nobody else holds.
struct Ending {
    pair: Pair,
    rkey: RKey,
    memory: Weak<dyn Memory>,
    register: Option<Operation>,
}

impl Ending {
    fn new() -> Ending {
        let mut pair = Pair::new();
        let pd = pair.sides[0].pd;
        let (_, key) = pair.sides[0].rnic.alloc_mr(pd, 0x1000).unwrap();
        let memory: Arc<dyn Memory> = Arc::new(HeapMemory::new(0x1000));
        let weak = Arc::downgrade(&memory);
        let spec = RegionSpec {
            memory,
            memory_offset: 0,
            length: 0x1000,
            iova: 0,
            access: ALL_ACCESS,
        };
        Ending {
            pair,
            rkey: key,
            memory: weak,
            register: Some(Operation::Register(Box::new(Registration { key, spec }))),
        }
    }

    fn modify(&mut self, to: QpState) {
        self.pair.modify(0, to, &QpAttributes::default());
    }

    /// Posts the registration, which executes if the queue pair is in RTS.
    fn register(&mut self) {
        let register = self.register.take().unwrap();
        self.pair.post(0, register, SgeList::EMPTY);
        self.pair.run();
    }

    /// Asserts that the device keeps the memory until the driver polls for it, and that nobody else holds it.
    fn leaves_it_to_the_driver(mut self, case: &str) {
        assert!(self.memory.upgrade().is_some(), "{case}: dropped inside");
        self.pair.sides[0].rnic.poll_ended_memories();
        assert!(self.memory.upgrade().is_none(), "{case}: still held");
    }
}

#[test]
fn poll_ended_memories__of_regions_that_are_invalidated() {
    let mut own = Ending::new();
    own.register();
    own.pair.sides[0].rnic.poll_ended_memories();
    assert!(own.memory.upgrade().is_some(), "the region has it");
    let rkey = own.rkey;
    own.pair
        .post(0, Operation::LocalInvalidate { rkey }, SgeList::EMPTY);
    own.pair.run();
    own.leaves_it_to_the_driver("invalidated by its owner");

    let mut peers = Ending::new();
    peers.register();
    let side = &mut peers.pair.sides[0];
    let sges = SgeList::EMPTY;
    let request = RecvRequest { wr_id: 9, sges };
    side.rnic.post_recv(peers.pair.now, side.qpn, request).unwrap();
    let rkey = peers.rkey;
    peers
        .pair
        .post(1, Operation::SendInvalidate { rkey }, SgeList::EMPTY);
    peers.pair.run();
    peers.leaves_it_to_the_driver("invalidated by the peer");
}

#[test]
fn poll_ended_memories__of_registrations_that_are_not_done() {
    let mut refused = Ending::new();
    let request = SendRequest {
        wr_id: 1,
        operation: refused.register.take().unwrap(),
        sges: SgeList::inline(b"x"),
        flags: SendFlags::empty(),
        to: Target::Connected,
    };
    let side = &mut refused.pair.sides[0];
    assert!(side.rnic.post_send(refused.pair.now, side.qpn, request).is_err());
    refused.leaves_it_to_the_driver("refused");

    let mut late = Ending::new();
    late.modify(QpState::Error);
    late.register();
    late.leaves_it_to_the_driver("posted in Error");

    for to in [QpState::Error, QpState::Reset] {
        let mut waiting = Ending::new();
        waiting.modify(QpState::Sqd);
        waiting.register();
        waiting.pair.sides[0].rnic.poll_ended_memories();
        assert!(waiting.memory.upgrade().is_some(), "the request has it");
        waiting.modify(to);
        waiting.leaves_it_to_the_driver(&format!("in a queue that went to {to:?}"));
    }

    let mut destroyed = Ending::new();
    destroyed.modify(QpState::Sqd);
    destroyed.register();
    let side = &mut destroyed.pair.sides[0];
    side.rnic.destroy_qp(side.qpn);
    destroyed.leaves_it_to_the_driver("destroyed");
}

#[test]
fn poll_ended_memories__of_flushes_that_are_forgotten() {
    let mut pair = Pair::new();
    let rkey = pair.slow_region(false, Ok(()));
    pair.flush(rkey);
    pair.pass(5_000_000);
    let side = &mut pair.sides[1];
    let memory = side.rnic.dereg_mr(LKey(rkey.0)).unwrap().unwrap();
    let weak = Arc::downgrade(&memory);
    drop(memory);
    side.rnic.destroy_qp(side.qpn);
    assert!(weak.upgrade().is_some(), "dropped inside");
    side.rnic.poll_ended_memories();
    assert!(weak.upgrade().is_none(), "still held");
}

#[test]
fn poll_flush__those_of_other_queue_pairs_stay() {
    for to in [Some(QpState::Error), Some(QpState::Reset), None] {
        let mut pair = Pair::new();
        let rkey = pair.slow_region(false, Ok(()));
        let (other, _) = pair.second_qps();
        let first = pair.sides[0].qpn;
        for qpn in [other, first, other] {
            pair.sides[0].qpn = qpn;
            pair.flush(rkey);
        }
        for _ in 0..4 {
            pair.step();
        }
        pair.sides[0].completions();
        match to {
            Some(to) => pair.modify(1, to, &QpAttributes::default()),
            None => pair.sides[1].rnic.destroy_qp(pair.sides[1].qpn),
        }
        let now = pair.now;
        let side = &mut pair.sides[1];
        let jobs: Vec<FlushJob> = std::iter::from_fn(|| side.rnic.poll_flush()).collect();
        assert_eq!(jobs.len(), 2, "{to:?}");
        for job in jobs {
            side.rnic.handle_flush(now, job.id, Ok(()));
        }
        for _ in 0..4 {
            pair.step();
        }
        let done = pair.sides[0].completions();
        let ended = done.iter().map(|wc| (wc.qpn, wc.status)).collect::<Vec<_>>();
        assert_eq!(ended, [(other, Status::Success); 2], "{to:?}");
    }
}

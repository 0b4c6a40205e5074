//! Requests that callers carry out without the device.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::*;

/// Returns a host whose side 0 holds grants, the lane of side 0, and a WRITE of 8 bytes.
fn host_with_lane() -> (Host, DirectLane, SendRequest) {
    let mut host = Host::new(true);
    host.warm();
    let (rkey, va) = host.key(Key::Whole);
    let side = &mut host.pair.sides[0];
    let request = SendRequest {
        wr_id: 0,
        operation: Operation::Write { va, rkey, imm: None },
        sges: side.sge(0, 8),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    let lane = side.rnic.direct_lane(side.qpn).unwrap();
    assert!(
        !is_done(&lane, &request),
        "the device knows the grants, not the lane"
    );
    (host, lane, request)
}

fn post(lane: &DirectLane, request: &SendRequest) -> Directly {
    lane.post(&mut Some(request.clone()), || panic!("nobody asked for times"))
}

fn is_done(lane: &DirectLane, request: &SendRequest) -> bool {
    matches!(post(lane, request), Directly::Done)
}

/// Returns the same with the lane split or not; the device has opened it.
fn host_with_open_lane(split: bool) -> (Host, DirectLane, SendRequest) {
    let (mut host, lane, request) = host_with_lane();
    if split {
        lane.split();
    }
    post_to_device(&mut host, &request);
    assert!(is_done(&lane, &request));
    (host, lane, request)
}

/// Returns the number of accesses by parts of lanes.
fn by_parts(host: &Host) -> u64 {
    let given = host.given.iter();
    given
        .map(|(.., granted)| granted.by_parts.load(Ordering::Relaxed))
        .sum()
}

/// Posts to the device, which opens the lane if it can.
fn post_to_device(host: &mut Host, request: &SendRequest) {
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    side.rnic.post_send(now, side.qpn, request.clone()).unwrap();
}

#[test]
fn post__only_while_nothing_is_before_it() {
    let (mut host, lane, request) = host_with_lane();
    post_to_device(&mut host, &request);
    assert!(is_done(&lane, &request));
    assert_eq!(host.pair.sides[0].completions().len(), 2);
    host.perform(Recv(64));
    host.post(send(8)).unwrap();
    assert!(!is_done(&lane, &request), "a SEND is before it");
    host.rest();
    assert!(!is_done(&lane, &request), "only the device opens it");
    post_to_device(&mut host, &request);
    assert!(is_done(&lane, &request));
    // A request that waits for the driver is before it too.
    let sends = host.pair.sides[0]
        .rnic
        .send_queue(host.pair.sides[0].qpn)
        .unwrap();
    assert!(sends.reserve(&request));
    assert!(!is_done(&lane, &request));
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    side.rnic.post_reserved(now, side.qpn, request.clone());
    assert!(is_done(&lane, &request));
}

#[test]
fn post__leaves_to_the_device_what_it_does_not_know() {
    let (mut host, lane, request) = host_with_lane();
    post_to_device(&mut host, &request);
    let with = |change: &dyn Fn(&mut SendRequest)| {
        let mut other = request.clone();
        change(&mut other);
        is_done(&lane, &other)
    };
    assert!(with(&|_| {}));
    let (rkey, va) = host.key(Key::Whole);
    let (read_only, _) = host.key(Key::ReadOnly);
    let write = |va, rkey, imm| Operation::Write { va, rkey, imm };
    assert!(
        !with(&|it| it.operation = write(va, read_only, None)),
        "another key"
    );
    assert!(!with(&|it| it.operation = write(va, rkey, Some(1))));
    assert!(!with(
        &|it| it.operation = write(va + MEMORY as u64 - 7, rkey, None)
    ));
    assert!(!with(&|it| it.operation = Operation::AtomicWrite { va, rkey }));
    assert!(!with(&|it| it.sges = SgeList::EMPTY));
    assert!(!with(&|it| it.to = Target::Srq(Srqn(1))));
    let own = host.own_keys[0].1;
    assert!(
        !with(&|it| it.sges = Sge::new(IOVA, 8, own).into()),
        "another region"
    );
    let lkey = host.pair.sides[0].lkey;
    let beyond = Sge::new(IOVA + MEMORY as u64 - 7, 8, lkey);
    assert!(!with(&|it| it.sges = beyond.into()));
    assert!(with(&|it| it.sges = SgeList::inline(b"12345678")));
    assert!(with(&|it| it.operation = Operation::Read { va, rkey }));
}

#[test]
fn post__not_to_a_queue_pair_that_has_changed() {
    let states = [QpState::Sqd, QpState::Error, QpState::Reset];
    for (to, split) in states.into_iter().flat_map(|to| [(to, false), (to, true)]) {
        let (mut host, lane, request) = host_with_open_lane(split);
        host.modify(0, to, QpAttributes::default());
        assert!(!is_done(&lane, &request), "{to:?}");
    }
    type Forget = fn(&mut Rnic, Qpn);
    let forgets: [(&str, Forget); 3] = [
        ("grants", |rnic, qpn| rnic.forget_grants(Time(0), qpn)),
        ("link", |rnic, qpn| rnic.set_local(qpn, false)),
        ("queue pair", |rnic, qpn| rnic.destroy_qp(qpn)),
    ];
    for ((what, forget), split) in forgets.into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let (mut host, lane, request) = host_with_open_lane(split);
        let side = &mut host.pair.sides[0];
        forget(&mut side.rnic, side.qpn);
        assert!(!is_done(&lane, &request), "{what}");
    }
}

/// A thread writes by its part, once the device has seen to the parts, and only by the grants of its part.
#[test]
fn post__by_the_part_of_the_thread() {
    let (mut host, lane, request) = host_with_open_lane(false);
    assert!(is_done(&lane, &request));
    lane.split();
    assert!(is_done(&lane, &request), "the first part is there");
    assert_eq!(by_parts(&host), 0);
    post_to_device(&mut host, &request);
    for thread in 1..=20 {
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(is_done(&lane, &request)));
        });
        assert_eq!(by_parts(&host), thread);
    }
    // All parts have learned what the device has learned for one.
    let own = host.own_keys[0].1;
    let other = SendRequest {
        sges: Sge::new(IOVA, 8, own).into(),
        ..request.clone()
    };
    assert!(!is_done(&lane, &other));
}

/// The counts of a lane are the device's, also when the queue pair has gone.
#[test]
fn counters__include_lanes() {
    for split in [false, true] {
        counters_include_a_lane(split);
    }
}

fn counters_include_a_lane(split: bool) {
    let (mut host, lane, request) = host_with_open_lane(split);
    let counts = |host: &Host| {
        let counters = host.pair.sides[0].rnic.counters();
        (counters.direct_requests, counters.direct_bytes)
    };
    let (requests, bytes) = counts(&host);
    for _ in 0..3 {
        assert!(is_done(&lane, &request));
    }
    assert_eq!(counts(&host), (requests + 3, bytes + 24));
    let side = &mut host.pair.sides[0];
    side.rnic.destroy_qp(side.qpn);
    assert_eq!(counts(&host), (requests + 3, bytes + 24));
}

#[test]
fn dereg_mr__leaves_no_handle_of_the_memory_in_a_lane() {
    for split in [false, true] {
        dereg_mr_leaves_no_handle(split);
    }
}

fn dereg_mr_leaves_no_handle(split: bool) {
    let (mut host, lane, request) = host_with_open_lane(split);
    let memory: Arc<dyn Memory> = Arc::new(HeapMemory::new(4096));
    let side = &mut host.pair.sides[0];
    let spec = region(memory.clone(), 0, 4096, Access::LOCAL_WRITE);
    let (lkey, _) = side.rnic.reg_mr(side.pd, spec.clone()).unwrap();
    let request = SendRequest {
        sges: Sge::new(IOVA, 8, lkey).into(),
        ..request
    };
    post_to_device(&mut host, &request);
    assert!(is_done(&lane, &request));
    let side = &mut host.pair.sides[0];
    // With other memory, the region is another one.
    let other: Arc<dyn Memory> = Arc::new(HeapMemory::new(4096));
    let change = |spec: &mut RegionSpec| spec.memory = other.clone();
    drop(side.rnic.rereg_mr(lkey, None, change).unwrap());
    assert!(!is_done(&lane, &request));
    drop(spec);
    assert_eq!(Arc::strong_count(&memory), 1);
    post_to_device(&mut host, &request);
    assert!(is_done(&lane, &request));
    let side = &mut host.pair.sides[0];
    drop(side.rnic.dereg_mr(lkey).unwrap());
    assert!(!is_done(&lane, &request));
    assert_eq!(Arc::strong_count(&other), 1);
}

/// A lane that knows many regions forgets some, and their owners need not know it any longer.
#[test]
fn learn__no_more_than_so_many_regions() {
    for split in [false, true] {
        learn_no_more_than_so_many_regions(split);
    }
}

fn learn_no_more_than_so_many_regions(split: bool) {
    let (mut host, lane, request) = host_with_open_lane(split);
    let memories: Vec<Arc<dyn Memory>> = (0..40)
        .map(|_| Arc::new(HeapMemory::new(4096)) as Arc<dyn Memory>)
        .collect();
    let mut lkeys = Vec::new();
    for memory in &memories {
        let side = &mut host.pair.sides[0];
        let spec = region(memory.clone(), 0, 4096, Access::LOCAL_WRITE);
        let (lkey, _) = side.rnic.reg_mr(side.pd, spec).unwrap();
        let request = SendRequest {
            sges: Sge::new(IOVA, 8, lkey).into(),
            ..request.clone()
        };
        post_to_device(&mut host, &request);
        assert!(is_done(&lane, &request));
        lkeys.push(lkey);
    }
    let known = memories.iter().filter(|memory| Arc::strong_count(memory) > 2);
    assert_eq!(known.count(), 16);
    let side = &mut host.pair.sides[0];
    side.rnic.destroy_qp(side.qpn);
    assert!(memories.iter().all(|memory| Arc::strong_count(memory) == 2));
    for lkey in lkeys {
        side.rnic.dereg_mr(lkey).unwrap();
    }
}

#[test]
fn deliver__notifies_a_waiter() {
    let (mut host, lane, request) = host_with_lane();
    post_to_device(&mut host, &request);
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    let cqn = side.cq;
    side.rnic.arm_cq(cqn, Arm::Next);
    let Directly::DoneAndTell(delivery) = post(&lane, &request) else {
        panic!("a waiter is to be notified");
    };
    assert_eq!(side.rnic.poll_event(), None);
    side.rnic.deliver(now, delivery);
    assert_eq!(side.rnic.poll_event(), Some(Event::Completion(cqn)));
    assert!(is_done(&lane, &request), "it was notified");
}

#[test]
fn deliver__fails_the_queue_pair_of_a_queue_that_overran() {
    let (mut host, lane, request) = host_with_lane();
    post_to_device(&mut host, &request);
    let delivery = loop {
        match post(&lane, &request) {
            Directly::Done => {}
            Directly::DoneAndTell(delivery) => break delivery,
            Directly::Not | Directly::DoneAndEnded => panic!("it is open"),
        }
    };
    assert!(!is_done(&lane, &request), "the queue pair is about to fail");
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    side.rnic.deliver(now, delivery);
    let events: Vec<_> = std::iter::from_fn(|| side.rnic.poll_event()).collect();
    let failed = Event::QpError(side.qpn, Status::LocalQpOperation, Cause::QueueOverrun);
    assert!(events.contains(&Event::CqError(side.cq)), "{events:?}");
    assert!(events.contains(&failed), "{events:?}");
}

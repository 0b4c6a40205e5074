//! SENDs of lanes: a program observes the same as without them, and whatever they do not cover goes to the device.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rdmux_wire::roce::coalesced;

use super::ring::*;
use super::util::*;
use crate::lane::PSNS_LENT;
use crate::*;

/// A kind of request: its name, and what makes one.
type Kind = (&'static str, fn(&mut Host) -> SendRequest);

const RECEIVES_AT: u64 = 1 << 20;

/// Everything that a program observes.
#[derive(Debug, PartialEq)]
struct Observed {
    completions: [Vec<WorkCompletion>; 2],
    events: [Vec<Event>; 2],
    states: [Option<QpState>; 2],
    received: Vec<u8>,
}

fn observe(host: &mut Host) -> Observed {
    let sides = &mut host.pair.sides;
    Observed {
        completions: sides.each_mut().map(Side::completions),
        events: sides
            .each_mut()
            .map(|side| std::iter::from_fn(|| side.rnic.poll_event()).collect()),
        states: sides
            .each_ref()
            .map(|side| side.rnic.query_qp(side.qpn).map(|info| info.state)),
        received: host.received(RECEIVES_AT, 64 << 10),
    }
}

/// Returns a host with lanes, or one without that has gone as far.
fn host_with(selective: bool, lanes: bool) -> Host {
    let mut host = Host::new(selective, lanes);
    if !lanes {
        host.warm();
    }
    host.pair.sides[0].memory.write(0, &pattern(64 << 10)).unwrap();
    host
}

/// Runs a program without lanes and with them, and compares what it observes.
fn same(what: &str, program: impl Fn(&mut Host)) {
    for selective in [false, true] {
        let run = |lanes| {
            let mut host = host_with(selective, lanes);
            program(&mut host);
            host.take_all();
            host.pair.run();
            observe(&mut host)
        };
        assert_eq!(run(true), run(false), "{what}, selective: {selective}");
    }
}

fn recv(host: &mut Host, wr_id: u64, length: u32) {
    host.pair.recv(1, wr_id, RECEIVES_AT + wr_id * 64, length);
}

/// Posts a SEND of 40 bytes whose number tells them.
fn send_one(host: &mut Host, wr_id: u64) {
    host.send(wr_id, wr_id * 8, 40);
}

fn operation(operation: Operation, sges: SgeList) -> SendRequest {
    send(7, operation, sges)
}

fn plain(host: &Host) -> SendRequest {
    let sges = host.pair.sides[0].sge(0, 8);
    operation(Operation::Send { imm: None }, sges)
}

/// Posts to the lane of side 0; returns whether the lane took the request.
fn by_lane(host: &mut Host, request: &SendRequest) -> bool {
    let lane = host.lane(0);
    let taken = lane.post(&mut Some(request.clone()), || panic!("a SEND has not ended"));
    let is_taken = matches!(taken, Directly::Done);
    host.by_lane[0] += u64::from(is_taken);
    is_taken
}

/// Returns counters that are not zero.
fn counted(rnic: &Rnic) -> Vec<(&'static str, u64)> {
    let counters = rnic.counters();
    let all = counters.iter().map(|(name, value, _)| (name, value));
    all.filter(|(_, value)| *value > 0).collect()
}

fn all_done(n: u64) -> Vec<(u64, Status)> {
    (0..n).map(|wr_id| (wr_id, Status::Success)).collect()
}

fn psns(host: &Host, i: usize) -> (Psn, Psn, usize) {
    let side = &host.pair.sides[i];
    let detail = side.rnic.qp_detail(side.qpn).unwrap();
    let outstanding = detail.info.send_outstanding;
    (detail.sq_psn, detail.rq_psn, outstanding)
}

#[test]
fn post__of_every_kind_goes_as_without_lanes() {
    let kinds: [Kind; 9] = [
        ("plain", |host| plain(host)),
        ("imm", |host| SendRequest {
            operation: Operation::Send { imm: Some(9) },
            ..plain(host)
        }),
        ("solicited", |host| SendRequest {
            flags: SendFlags::SIGNALED | SendFlags::SOLICITED,
            ..plain(host)
        }),
        ("silent", |host| SendRequest {
            flags: SendFlags::empty(),
            ..plain(host)
        }),
        ("inline", |host| SendRequest {
            sges: SgeList::inline(b"123456789"),
            ..plain(host)
        }),
        ("without bytes", |host| SendRequest {
            sges: SgeList::EMPTY,
            ..plain(host)
        }),
        ("elements", |host| {
            let lkey = host.pair.sides[0].lkey;
            let parts = [(3, 5), (100, 0), (200, 700), (4, 1)];
            let sges = parts.map(|(at, length)| Sge::new(IOVA + at, length, lkey));
            SendRequest {
                sges: sges.as_slice().into(),
                ..plain(host)
            }
        }),
        ("of several packets", |host| SendRequest {
            sges: host.pair.sides[0].sge(0, 5_001),
            ..plain(host)
        }),
        ("just a packet", |host| SendRequest {
            sges: host.pair.sides[0].sge(1, 1_024),
            ..plain(host)
        }),
    ];
    for (what, request) in kinds {
        same(what, |host| {
            for wr_id in 0..3 {
                recv(host, wr_id, 8_000);
            }
            let cq = host.pair.sides[1].cq;
            host.pair.sides[1].rnic.arm_cq(cq, Arm::Solicited);
            let request = request(host);
            for _ in 0..3 {
                host.post(request.clone());
            }
            if host.lanes {
                assert_eq!(host.by_lane[0], 3, "{what}");
            }
            host.take_all();
            if host.lanes {
                // The device saw the receives, and executed the first itself to find that nothing waits.
                assert_eq!(host.by_lane[1..], [2, 3], "{what}");
            }
        });
    }
}

#[test]
fn post__leaves_to_the_device_what_a_lane_does_not_cover() {
    let kinds: [Kind; 12] = [
        ("READ", |host| {
            let rkey = host.pair.sides[1].rkey;
            SendRequest {
                operation: Operation::Read { va: IOVA, rkey },
                ..plain(host)
            }
        }),
        ("WRITE", |host| {
            let (va, rkey) = (IOVA + RECEIVES_AT, host.pair.sides[1].rkey);
            SendRequest {
                operation: Operation::Write { va, rkey, imm: None },
                ..plain(host)
            }
        }),
        ("WRITE with immediate data", |host| {
            let (va, rkey) = (IOVA + RECEIVES_AT, host.pair.sides[1].rkey);
            SendRequest {
                operation: Operation::Write {
                    va,
                    rkey,
                    imm: Some(1),
                },
                ..plain(host)
            }
        }),
        ("atomic", |host| {
            let (va, rkey) = (IOVA, host.pair.sides[1].rkey);
            SendRequest {
                operation: Operation::FetchAdd { va, rkey, add: 1 },
                ..plain(host)
            }
        }),
        ("SEND with invalidate", |host| {
            let side = &mut host.pair.sides[1];
            let (_, rkey) = side.rnic.alloc_mr(side.pd, 64).unwrap();
            SendRequest {
                operation: Operation::SendInvalidate { rkey },
                ..plain(host)
            }
        }),
        ("fence", |host| SendRequest {
            flags: SendFlags::SIGNALED | SendFlags::FENCE,
            ..plain(host)
        }),
        ("too long", |host| SendRequest {
            sges: host.pair.sides[0].sge(0, 32 << 10),
            ..plain(host)
        }),
        ("unknown key", |host| {
            let lkey = LKey(host.pair.sides[0].lkey.0 ^ 0x100);
            SendRequest {
                sges: Sge::new(IOVA, 8, lkey).into(),
                ..plain(host)
            }
        }),
        ("unknown key behind a known one", |host| {
            let lkey = host.pair.sides[0].lkey;
            let sges = [Sge::new(IOVA, 8, lkey), Sge::new(IOVA, 8, LKey(lkey.0 ^ 1))];
            SendRequest {
                sges: sges.as_slice().into(),
                ..plain(host)
            }
        }),
        ("out of bounds", |host| SendRequest {
            sges: host.pair.sides[0].sge(MEMORY as u64 - 7, 8),
            ..plain(host)
        }),
        ("key of another domain", |host| {
            let side = &mut host.pair.sides[0];
            let pd = side.rnic.alloc_pd();
            let spec = RegionSpec {
                memory: side.memory.clone(),
                memory_offset: 0,
                length: 64,
                iova: IOVA,
                access: ALL_ACCESS,
            };
            let (lkey, _) = side.rnic.reg_mr(pd, spec).unwrap();
            SendRequest {
                sges: Sge::new(IOVA, 8, lkey).into(),
                ..plain(host)
            }
        }),
        ("window of work requests", |host| {
            let side = &mut host.pair.sides[0];
            let (lkey, _) = side.rnic.alloc_mr(side.pd, 64).unwrap();
            SendRequest {
                sges: Sge::new(IOVA, 8, lkey).into(),
                ..plain(host)
            }
        }),
    ];
    for (what, request) in kinds {
        same(what, |host| {
            for wr_id in 0..8 {
                recv(host, wr_id, 32 << 10);
            }
            // One by the lane is before it, and others are behind it.
            send_one(host, 1);
            let before = host.by_lane;
            let request = request(host);
            if host.lanes {
                assert!(!by_lane(host, &request), "{what}");
            }
            host.post(request);
            assert_eq!(host.by_lane[0], before[0], "{what}");
            for wr_id in 2..5 {
                send_one(host, wr_id);
            }
            host.take_all();
        });
    }
}

#[test]
fn post__not_to_another_target() {
    let mut host = host_with(false, true);
    let request = SendRequest {
        to: Target::Srq(Srqn(1)),
        ..plain(&host)
    };
    assert!(!by_lane(&mut host, &request));
    let request = plain(&host);
    assert!(by_lane(&mut host, &request));
}

/// Returns a second region of side 0 over other memory.
fn another_region(host: &mut Host, i: usize, access: Access) -> (LKey, Arc<dyn Memory>) {
    let memory: Arc<dyn Memory> = Arc::new(HeapMemory::new(4096));
    let side = &mut host.pair.sides[i];
    let spec = RegionSpec {
        memory: memory.clone(),
        memory_offset: 0,
        length: 4096,
        iova: IOVA,
        access,
    };
    let (lkey, _) = side.rnic.reg_mr(side.pd, spec).unwrap();
    (lkey, memory)
}

#[test]
fn post__learns_a_region_from_the_device() {
    let mut host = host_with(false, true);
    let (lkey, memory) = another_region(&mut host, 0, Access::LOCAL_WRITE);
    memory.write(0, b"another!").unwrap();
    for wr_id in 0..3 {
        recv(&mut host, wr_id, 64);
    }
    let request = SendRequest {
        sges: Sge::new(IOVA, 8, lkey).into(),
        ..plain(&host)
    };
    assert!(!by_lane(&mut host, &request));
    host.post_to_device(request.clone()).unwrap();
    assert!(by_lane(&mut host, &request));
    assert!(host.take_all().iter().all(|taken| *taken == Taken::Done));
    assert_eq!(host.received(RECEIVES_AT, 8), b"another!");
    assert_eq!(host.received(RECEIVES_AT + 64, 8), b"another!");
    assert_eq!(host.pair.sides[0].completed().len(), 2);
}

/// A region that ends, or gets other memory, while the lane has requests: those behind it see that.
#[test]
fn dereg_mr__of_what_a_lane_sends_from() {
    let mut host = host_with(false, true);
    let (lkey, memory) = another_region(&mut host, 0, Access::LOCAL_WRITE);
    for wr_id in 0..8 {
        recv(&mut host, wr_id, 64);
    }
    let request = SendRequest {
        sges: Sge::new(IOVA, 8, lkey).into(),
        ..plain(&host)
    };
    host.post_to_device(request.clone()).unwrap();
    assert!(by_lane(&mut host, &request));
    let other: Arc<dyn Memory> = Arc::new(HeapMemory::new(4096));
    other.write(0, b"changed!").unwrap();
    let change = |spec: &mut RegionSpec| spec.memory = other.clone();
    drop(host.pair.sides[0].rnic.rereg_mr(lkey, None, change).unwrap());
    assert_eq!(Arc::strong_count(&memory), 1, "no lane keeps it");
    assert!(!by_lane(&mut host, &request));
    host.post_to_device(request.clone()).unwrap();
    assert!(by_lane(&mut host, &request));
    drop(host.pair.sides[0].rnic.dereg_mr(lkey).unwrap());
    assert_eq!(Arc::strong_count(&other), 1);
    assert!(!by_lane(&mut host, &request));
    host.take_all();
    assert_eq!(host.received(RECEIVES_AT + 2 * 64, 8), b"changed!");
    assert_eq!(host.received(RECEIVES_AT + 3 * 64, 8), b"changed!");
    host.post_to_device(request).unwrap();
    host.pair.run();
    let ended: Vec<_> = host.pair.sides[0].completed();
    assert_eq!(ended[..4], [(7, Status::Success); 4]);
    assert_eq!(ended[4..], [(7, Status::LocalProtection)]);
}

#[test]
fn dereg_mr__of_what_a_lane_receives_into() {
    for ends in [false, true] {
        same("the region of a receive", |host| {
            let (lkey, memory) = another_region(host, 1, Access::LOCAL_WRITE);
            for wr_id in 0..5 {
                let sges = Sge::new(IOVA + wr_id * 8, 8, lkey).into();
                let request = RecvRequest { wr_id, sges };
                let (now, side) = (host.pair.now, &mut host.pair.sides[1]);
                side.rnic.post_recv(now, side.qpn, request).unwrap();
            }
            for wr_id in 0..5 {
                host.send(wr_id, wr_id * 8, 8);
            }
            for _ in 0..3 {
                assert_eq!(host.take(true), Taken::Done);
            }
            if host.lanes {
                assert!(host.by_lane[1] > 0);
            }
            let rnic = &mut host.pair.sides[1].rnic;
            let other: Arc<dyn Memory> = Arc::new(HeapMemory::new(4096));
            if ends {
                drop(rnic.dereg_mr(lkey).unwrap());
            } else {
                let change = |spec: &mut RegionSpec| spec.memory = other.clone();
                drop(rnic.rereg_mr(lkey, None, change).unwrap());
            }
            assert_eq!(Arc::strong_count(&memory), 1, "no lane keeps it");
            host.take_all();
            host.pair.run();
            let mut bytes = [0; 40];
            memory.read(0, &mut bytes).unwrap();
            assert_eq!(bytes[24..], [0; 16]);
            other.read(0, &mut bytes).unwrap();
            assert_eq!(bytes[24..] == pattern(40)[24..], !ends);
        });
    }
}

#[test]
fn take__a_receive_that_does_not_hold_the_send_ends_as_without_lanes() {
    type Receive = fn(&mut Host) -> SgeList;
    let receives: [(&str, Receive); 6] = [
        ("too short", |host| host.pair.sides[1].sge(RECEIVES_AT, 39)),
        ("empty", |_| SgeList::EMPTY),
        ("unknown key", |host| {
            Sge::new(IOVA, 64, LKey(host.pair.sides[1].lkey.0 ^ 0x100)).into()
        }),
        ("unknown key of the second element", |host| {
            let lkey = host.pair.sides[1].lkey;
            let at = IOVA + RECEIVES_AT;
            let sges = [Sge::new(at, 30, lkey), Sge::new(at + 30, 30, LKey(lkey.0 ^ 1))];
            sges.as_slice().into()
        }),
        ("no LOCAL_WRITE", |host| {
            let (lkey, _) = another_region(host, 1, Access::empty());
            Sge::new(IOVA, 64, lkey).into()
        }),
        ("out of bounds", |host| {
            host.pair.sides[1].sge(MEMORY as u64 - 30, 64)
        }),
    ];
    for (what, sges) in receives {
        same(what, |host| {
            recv(host, 0, 64);
            recv(host, 1, 64);
            let sges = sges(host);
            let (now, side) = (host.pair.now, &mut host.pair.sides[1]);
            let request = RecvRequest { wr_id: 2, sges };
            side.rnic.post_recv(now, side.qpn, request).unwrap();
            recv(host, 3, 64);
            for wr_id in 0..5 {
                send_one(host, wr_id);
            }
            for _ in 0..2 {
                assert_eq!(host.take(true), Taken::Done);
            }
            if host.lanes {
                assert_eq!(host.by_lane, [5, 1, 2], "{what}");
            }
            assert_eq!(host.take(true), Taken::Deferred, "{what}");
        });
    }
}

#[test]
fn take__goes_on_after_a_receive_was_missing() {
    same("no receive", |host| {
        recv(host, 0, 64);
        for wr_id in 0..3 {
            send_one(host, wr_id);
        }
        let taken = host.take_all();
        assert_eq!(taken, [Taken::Done, Taken::Deferred, Taken::Deferred]);
        while host.pair.step() {}
        for wr_id in 1..6 {
            recv(host, wr_id, 64);
        }
        host.pair.run();
        let before = host.by_lane;
        for wr_id in 3..6 {
            send_one(host, wr_id);
        }
        host.take_all();
        if host.lanes {
            assert_eq!(host.by_lane[0], before[0] + 2);
            assert_eq!(host.by_lane[1], before[1] + 2);
        }
    });
}

/// A SEND by the lane is not before one that was left to the driver.
#[test]
fn post__not_before_a_request_that_was_left_to_the_driver() {
    let mut host = host_with(false, true);
    for wr_id in 0..4 {
        recv(&mut host, wr_id, 64);
    }
    let mut requests = [0, 1, 2, 3].map(|wr_id| SendRequest {
        wr_id,
        ..plain(&host)
    });
    let sends = host.pair.sides[0].rnic.send_queue(host.pair.sides[0].qpn);
    let sends = sends.unwrap();
    assert!(by_lane(&mut host, &requests[0]));
    assert!(sends.reserve(&requests[1]));
    assert!(!by_lane(&mut host, &requests[2]));
    assert_eq!(host.take(true), Taken::Done);
    assert!(!by_lane(&mut host, &requests[2]), "nothing is in the lane");
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    side.rnic.post_reserved(now, side.qpn, requests[1].clone());
    assert!(!by_lane(&mut host, &requests[2]), "only the device lends");
    host.post_to_device(requests[2].clone()).unwrap();
    host.transmit();
    requests[3].wr_id = 3;
    host.post(requests[3].clone());
    host.take_all();
    host.pair.run();
    assert_eq!(host.pair.sides[0].completed(), all_done(4));
    assert_eq!(host.pair.sides[1].completed(), all_done(4));
}

/// Memory of side 1.
#[derive(Debug)]
struct Near(Arc<HeapMemory>);

impl PeerMemory for Near {
    fn write(&self, offset: u64, from: &dyn Memory, from_offset: u64, length: u64) -> Result<(), PeerFault> {
        let mut bytes = vec![0; length as usize];
        from.read(from_offset, &mut bytes).map_err(PeerFault::Own)?;
        self.write_bytes(offset, &bytes)
    }

    fn write_bytes(&self, offset: u64, bytes: &[u8]) -> Result<(), PeerFault> {
        self.0.write(offset, bytes).map_err(|_| PeerFault::Ended)
    }

    fn read(&self, _: u64, _: &dyn Memory, _: u64, _: u64) -> Result<(), PeerFault> {
        Err(PeerFault::Ended)
    }
}

/// Returns a host whose lane carries out WRITEs, and such a WRITE.
fn host_with_grant() -> (Host, SendRequest) {
    let mut host = host_with(false, true);
    let (va, rkey) = (IOVA + RECEIVES_AT, host.pair.sides[1].rkey);
    let request = SendRequest {
        operation: Operation::Write { va, rkey, imm: None },
        ..plain(&host)
    };
    // The first asks for the grant.
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    side.rnic.post_send(now, side.qpn, request.clone()).unwrap();
    host.pair.run();
    let grant = Grant {
        memory: Arc::new(Near(host.pair.sides[1].memory.clone())),
        memory_offset: 0,
        iova: IOVA,
        length: MEMORY as u64,
        access: Access::REMOTE_WRITE,
    };
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    side.rnic.set_grant(now, side.qpn, rkey, Some(grant));
    open(&mut host, &request);
    let ended = host.pair.sides[0].completed();
    assert_eq!(ended.len(), 3);
    (host, request)
}

/// Has the device open the lane for WRITEs.
fn open(host: &mut Host, request: &SendRequest) {
    let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
    assert!(side.rnic.post_directly(|| now, side.qpn, request));
    assert!(by_lane(host, request));
}

#[test]
fn post__a_write_by_the_lane_waits_for_the_sends_before_it() {
    let (mut host, write) = host_with_grant();
    for wr_id in 0..4 {
        recv(&mut host, wr_id, 64);
    }
    let plain = plain(&host);
    host.post_to_device(plain.clone()).unwrap();
    assert!(!by_lane(&mut host, &write), "the SEND is not done");
    host.take(true);
    open(&mut host, &write);
    // The device has just taken the state back.
    host.post_to_device(plain.clone()).unwrap();
    assert!(by_lane(&mut host, &plain));
    assert!(!by_lane(&mut host, &write), "nor are these");
    host.take_all();
    assert!(by_lane(&mut host, &write), "the lane has completed them");
    assert_eq!(host.pair.sides[0].completed().len(), 6);
}

/// The device gives the place of a request back before its completion shows, and a WRITE in between would complete first.
#[test]
fn post__no_write_by_the_lane_while_the_device_completes_sends() {
    let (mut host, write) = host_with_grant();
    for wr_id in 0..4 {
        recv(&mut host, wr_id, 64);
    }
    let plain = plain(&host);
    host.post_to_device(plain.clone()).unwrap();
    assert!(by_lane(&mut host, &plain));
    // A receive makes it take the two back.
    host.pair.recv(0, 9, RECEIVES_AT, 8);
    open_stays_closed(&mut host, &write);
    // A request that it cannot lend.
    host.take_all();
    open(&mut host, &write);
    host.ring().is_closed = true;
    host.post_to_device(plain).unwrap();
    open_stays_closed(&mut host, &write);
}

fn open_stays_closed(host: &mut Host, write: &SendRequest) {
    host.take_all();
    assert!(!by_lane(host, write), "only the device opens it");
}

#[test]
fn post__a_queue_that_is_full() {
    for lanes in [false, true] {
        let mut host = Host::new(false, lanes);
        let (a, b) = host.pair.second_qps();
        (host.pair.sides[0].qpn, host.pair.sides[1].qpn) = (a, b);
        host.pair.set_local(true);
        drop([0, 1].map(|i| host.lane(i)));
        host.warm();
        for wr_id in 0..16 {
            recv(&mut host, wr_id, 64);
            send_one(&mut host, wr_id);
        }
        let request = plain(&host);
        assert_eq!(host.try_post(request.clone()), Err(PostError::QueueFull));
        assert_eq!(psns(&host, 0).2, 16);
        assert_eq!(host.take(true), Taken::Done);
        recv(&mut host, 16, 64);
        host.try_post(SendRequest { wr_id: 16, ..request }).unwrap();
        host.take_all();
        assert_eq!(host.pair.sides[0].completed(), all_done(17));
        assert_eq!(host.pair.sides[1].completed(), all_done(17));
        assert!(
            !lanes || host.by_lane.iter().all(|n| *n > 10),
            "{:?}",
            host.by_lane
        );
    }
}

#[test]
fn post__not_beyond_the_window() {
    for selective in [false, true] {
        let mut host = host_with(selective, true);
        let request = plain(&host);
        let mut sent = 0;
        while by_lane(&mut host, &request) {
            sent += 1;
            assert!(sent <= 1_024);
        }
        assert!(sent >= 100, "{sent}");
        let before = host.ring().requests.len();
        host.post_to_device(request).unwrap();
        assert_eq!(
            host.ring().requests.len(),
            before,
            "the window holds for the device too"
        );
        for wr_id in 0..=sent {
            recv(&mut host, wr_id, 64);
        }
        host.take_all();
        host.pair.run();
        assert_eq!(
            host.pair.sides[0].completed(),
            vec![(7, Status::Success); sent as usize + 1]
        );
    }
}

/// The device looks at the sequence before PSNs that it compares are half of all apart.
#[test]
fn post__no_more_psns_than_were_lent() {
    let mut host = Host::with(true, |rtr, _| rtr.path_mtu = Some(256));
    let receives = host.pair.sides[1].rnic.receive_queue(host.pair.sides[1].qpn);
    let receives = receives.unwrap();
    let bytes = 256 * coalesced::COUNT_MAX;
    let rounds = u64::from(PSNS_LENT / coalesced::COUNT_MAX) + 2;
    let sges = host.pair.sides[1].sge(RECEIVES_AT, bytes);
    for wr_id in 0..rounds {
        let request = RecvRequest {
            wr_id,
            sges: sges.clone(),
        };
        receives.post(request).unwrap();
        host.send(wr_id, 0, bytes);
        assert_eq!(host.take(true), Taken::Done);
        assert_eq!(host.pair.sides[0].completed(), [(wr_id, Status::Success)]);
        assert_eq!(host.pair.sides[1].completed(), [(wr_id, Status::Success)]);
    }
    let by_device = host.by_lane.map(|n| rounds - n);
    assert!(by_device.iter().all(|n| (0..=2).contains(n)), "{by_device:?}");
    assert!(by_device[0] > 0 && by_device[1] > 0, "{by_device:?}");
}

#[test]
fn skip_psns__while_the_lanes_have_the_sequence() {
    same("PSNs are skipped", |host| {
        for wr_id in 0..12 {
            recv(host, wr_id, 64);
        }
        for round in 0..4 {
            for wr_id in 3 * round..3 * round + 3 {
                send_one(host, wr_id);
            }
            let [asking, answering] = [0, 1].map(|i| host.pair.sides[i].qpn);
            let now = host.pair.now;
            let skipped = host.pair.sides[0].rnic.skip_psns(now, asking, 1, 0);
            assert!(!skipped, "it has requests");
            host.take_all();
            let part = (1 << 23) - 2;
            assert!(host.pair.sides[0].rnic.skip_psns(now, asking, part, 0));
            assert!(host.pair.sides[1].rnic.skip_psns(now, answering, 0, part));
        }
    });
}

type Change = fn(&mut Host);

/// Changes happen when so many of five requests have been taken, and the sender has heard of so many.
#[test]
fn recall__at_every_point_completes_each_request_once_and_in_order() {
    fn modify(host: &mut Host, i: usize, to: QpState) {
        host.pair.modify(i, to, &QpAttributes::default());
    }
    fn verb(host: &mut Host, i: usize, call: impl Fn(&mut Rnic, Time, Qpn)) {
        let (now, side) = (host.pair.now, &mut host.pair.sides[i]);
        call(&mut side.rnic, now, side.qpn);
    }
    fn part(host: &mut Host, is_lost: bool) {
        if is_lost {
            host.ring().requests.clear();
        } else {
            while !host.ring().requests.is_empty() {
                host.take(false);
            }
        }
        host.pair.set_local(false);
    }
    let changes: [(&str, Change); 18] = [
        ("nothing", |_| ()),
        ("a receive", |host| recv(host, 5, 64)),
        ("error of the sender", |host| modify(host, 0, QpState::Error)),
        ("error of the receiver", |host| modify(host, 1, QpState::Error)),
        ("reset of the sender", |host| modify(host, 0, QpState::Reset)),
        ("reset of the receiver", |host| modify(host, 1, QpState::Reset)),
        ("drain", |host| {
            modify(host, 0, QpState::Sqd);
            recv(host, 5, 64);
            send_one(host, 5);
            host.take_all();
            host.pair.run();
            modify(host, 0, QpState::Rts);
            host.transmit();
        }),
        ("drain of the receiver", |host| modify(host, 1, QpState::Sqd)),
        ("end of the sender", |host| {
            verb(host, 0, |rnic, _, qpn| rnic.destroy_qp(qpn))
        }),
        ("end of the receiver", |host| {
            verb(host, 1, |rnic, _, qpn| rnic.destroy_qp(qpn))
        }),
        ("retirement of the sender", |host| verb(host, 0, Rnic::retire_qp)),
        ("retirement of the receiver", |host| {
            verb(host, 1, Rnic::retire_qp)
        }),
        ("no grants", |host| {
            verb(host, 0, Rnic::forget_grants);
            verb(host, 1, Rnic::forget_grants);
        }),
        ("the link", |host| part(host, true)),
        ("the link, all was taken", |host| part(host, false)),
        ("the link, one side learns of it", |host| {
            host.ring().requests.clear();
            let qpn = host.pair.sides[0].qpn;
            host.pair.sides[0].rnic.set_local(qpn, false);
        }),
        ("the link comes back", |host| {
            part(host, true);
            host.pair.run();
            host.pair.set_local(true);
            for wr_id in 5..8 {
                recv(host, wr_id, 64);
                send_one(host, wr_id);
                host.transmit();
            }
        }),
        ("a request of the other side", |host| {
            host.pair.recv(0, 9, 2 << 20, 64);
            let sges = host.pair.sides[1].sge(0, 8);
            host.pair.post(1, Operation::Send { imm: None }, sges);
            while host.pair.step() {}
        }),
    ];
    for (what, change) in changes {
        for taken in 0..=5 {
            for heard in 0..=taken {
                same(&format!("{what}, {taken} taken, {heard} heard"), |host| {
                    for wr_id in 0..5 {
                        recv(host, wr_id, 64);
                    }
                    for wr_id in 0..5 {
                        send_one(host, wr_id);
                    }
                    if host.lanes {
                        assert_eq!(host.by_lane[0], 5);
                    }
                    let mut news = Vec::new();
                    for n in 0..taken {
                        let (ticket, record) = host.ring().requests.remove(0);
                        assert_eq!(host.take_record(&record), Taken::Done);
                        if n < heard {
                            host.hear(ticket, Taken::Done);
                        } else {
                            news.push(ticket);
                        }
                    }
                    change(host);
                    // Late news, which a link that broke would have lost.
                    for ticket in news {
                        host.hear(ticket, Taken::Done);
                    }
                });
            }
        }
    }
}

#[test]
fn timeout__of_a_silent_peer_is_noticed() {
    let mut host = host_with(false, true);
    host.pair.stopped[1] = true;
    for wr_id in 0..5 {
        send_one(&mut host, wr_id);
    }
    assert_eq!(host.by_lane[0], 5);
    host.pair.run();
    let mut ended = vec![(0, Status::RetryExceeded)];
    ended.extend((1..5).map(|wr_id| (wr_id, Status::Flushed)));
    assert_eq!(host.pair.sides[0].completed(), ended);
}

/// A peer that is silent gains no time by requests that follow.
#[test]
fn timeout__is_that_of_the_oldest_request() {
    for selective in [false, true] {
        let posted = [false, true].map(|lanes| {
            let mut host = host_with(selective, lanes);
            host.pair.stopped[1] = true;
            let mut posted = 0;
            while host.pair.sides[0].state() == QpState::Rts {
                assert!(posted < 1_000, "lanes: {lanes}: it never ends");
                send_one(&mut host, posted);
                posted += 1;
                host.pair.pass(2_000_000);
            }
            posted
        });
        assert!(posted[1] <= posted[0] + 3, "{posted:?}");
    }
}

#[test]
fn timeout__not_while_the_peer_goes_on() {
    for selective in [false, true] {
        let mut host = host_with(selective, true);
        for wr_id in 0..100 {
            recv(&mut host, wr_id, 64);
        }
        send_one(&mut host, 0);
        for wr_id in 1..100 {
            send_one(&mut host, wr_id);
            // All that is ten timeouts.
            host.pair.pass(400_000);
            assert_eq!(host.take(true), Taken::Done);
        }
        let counters = host.pair.sides[0].rnic.counters();
        assert_eq!((counters.local_ack_timeout_err, counters.local_stalls), (0, 0));
        assert_eq!(counters.retransmitted_packets, 0);
        assert!(host.by_lane.iter().all(|n| *n > 20), "{:?}", host.by_lane);
        host.take(true);
        assert_eq!(host.pair.sides[0].completed(), all_done(100));
    }
}

#[test]
fn qp_detail__tells_what_the_lanes_have() {
    same("a detail", |host| {
        for wr_id in 0..4 {
            recv(host, wr_id, 8_000);
        }
        let mut told = vec![psns(host, 0), psns(host, 1)];
        for (wr_id, length) in [(0, 8), (1, 5_000), (2, 8), (3, 0)] {
            host.send(wr_id, 0, length);
            told.push(psns(host, 0));
        }
        while !host.ring().requests.is_empty() {
            host.take(true);
            told.extend([psns(host, 0), psns(host, 1)]);
        }
        // Two SENDs have warmed the host.
        let psn = |n: u32| Psn::new(PSN).plus(2 + n);
        let at = |sent, outstanding| (psn(sent), Psn::new(PSN), outstanding);
        assert_eq!(told[..2], [at(0, 0), (Psn::new(PSN), psn(0), 0)]);
        assert_eq!(told[2..6], [at(1, 1), at(6, 2), at(7, 3), at(8, 4)]);
        let ended = [1, 6, 7, 8].into_iter().zip([3, 2, 1, 0]);
        let taken = ended.flat_map(|(psns, left)| [at(8, left), (Psn::new(PSN), psn(psns), 0)]);
        assert_eq!(told[6..], taken.collect::<Vec<_>>());
    });
}

#[test]
fn counters__are_those_without_lanes() {
    let counts = [false, true].map(|lanes| {
        let mut host = host_with(false, lanes);
        for wr_id in 0..6 {
            recv(&mut host, wr_id, 8_000);
        }
        for (wr_id, length) in [(0, 8), (1, 5_000), (2, 3), (3, 0), (4, 1_024)] {
            host.send(wr_id, 0, length);
        }
        host.post(operation(
            Operation::Send { imm: Some(3) },
            SgeList::inline(b"12345"),
        ));
        host.take_all();
        assert_eq!(host.by_lane, if lanes { [6, 5, 6] } else { [0; 3] });
        let counts = |host: &Host| [0, 1].map(|i| counted(&host.pair.sides[i].rnic));
        let before = counts(&host);
        for side in &mut host.pair.sides {
            side.rnic.destroy_qp(side.qpn);
        }
        assert_eq!(counts(&host), before, "also when the queue pairs have gone");
        before
    });
    assert_eq!(counts[0], counts[1]);
}

#[test]
fn completions__notify_a_waiter() {
    for (arm, solicited, notifies) in [
        (Arm::Next, false, [true, true]),
        (Arm::Solicited, true, [false, true]),
        (Arm::Solicited, false, [false, false]),
    ] {
        same("a waiter", |host| {
            for wr_id in 0..4 {
                recv(host, wr_id, 64);
            }
            let mut request = plain(host);
            // Neither the first, which the device takes, nor its end.
            host.post(request.clone());
            host.take(true);
            let cqs = [0, 1].map(|i| host.pair.sides[i].cq);
            for (side, cq) in host.pair.sides.iter_mut().zip(cqs) {
                side.completions();
                side.rnic.arm_cq(cq, arm);
            }
            request.flags.set(SendFlags::SOLICITED, solicited);
            let before = host.by_lane;
            host.post(request);
            host.take(true);
            if host.lanes {
                assert_eq!(host.by_lane, before.map(|n| n + 1));
            }
            for (i, side) in host.pair.sides.iter_mut().enumerate() {
                let event = notifies[i].then_some(Event::Completion(cqs[i]));
                assert_eq!(side.rnic.poll_event(), event, "side {i}");
            }
        });
    }
}

#[test]
fn completions__that_overrun_a_queue_fail_the_queue_pair() {
    for overruns in 0..2 {
        same("an overrun", |host| {
            host.pair.set_local(false);
            for (i, side) in host.pair.sides.iter_mut().enumerate() {
                side.rnic.destroy_qp(side.qpn);
                let cq = if i == overruns {
                    side.rnic.create_cq(4)
                } else {
                    side.cq
                };
                let init = QpInit {
                    max_send_wr: 64,
                    max_recv_wr: 64,
                    ..QpInit::new(side.pd, cq)
                };
                side.qpn = side.rnic.create_qp(init).unwrap();
            }
            let [a, b] = [0, 1].map(|i| host.pair.sides[i].qpn);
            host.pair.connect_qp(0, a, b, &|_, _| {}, QpState::Rts);
            host.pair.connect_qp(1, b, a, &|_, _| {}, QpState::Rts);
            host.pair.set_local(true);
            drop([0, 1].map(|i| host.lane(i)));
            for wr_id in 0..10 {
                recv(host, wr_id, 64);
            }
            let before = host.by_lane;
            for wr_id in 0..10 {
                send_one(host, wr_id);
            }
            for _ in 0..4 {
                assert_eq!(host.take(true), Taken::Done);
            }
            assert!(!host.lanes || host.by_lane[0] >= before[0] + 9);
            let state = host.pair.sides[overruns].state();
            assert_eq!(state, QpState::Rts, "side {overruns}");
            host.take(true);
            assert_eq!(host.pair.sides[overruns].state(), QpState::Error);
        });
    }
}

/// Passes a ticket to the lanes alone.
fn end(host: &mut Host, ticket: Ticket) -> bool {
    let lanes = host.pair.sides[0].rnic.lanes();
    let mut deliveries = Vec::new();
    let recent = &mut Recent::default();
    let ended = lanes.end(
        ticket,
        recent,
        || panic!("nobody asked for times"),
        &mut deliveries,
    );
    assert!(deliveries.is_empty());
    ended
}

#[test]
fn end__what_a_peer_cannot_have_taken_ends_nothing() {
    let mut host = host_with(false, true);
    for wr_id in 0..4 {
        recv(&mut host, wr_id, 64);
        send_one(&mut host, wr_id);
    }
    let tickets: Vec<Ticket> = host.ring().requests.iter().map(|(ticket, _)| *ticket).collect();
    let [first, last] = [tickets[0], tickets[3]];
    for end_at in [
        last.end.plus(1),
        first.end.minus(1),
        first.end.minus(2),
        last.end.plus(1 << 22),
    ] {
        let forged = Ticket { end: end_at, ..last };
        assert!(end(&mut host, forged), "the lane knows it");
    }
    assert_eq!(host.pair.sides[0].completed(), []);
    assert_eq!(psns(&host, 0).2, 4);
    assert_eq!(host.take(true), Taken::Done);
    assert!(end(&mut host, first), "again");
    assert_eq!(host.pair.sides[0].completed(), [(0, Status::Success)]);
    for forged in [
        Ticket {
            incarnation: last.incarnation.wrapping_add(1),
            ..last
        },
        Ticket {
            qpn: Qpn::new(0x77_0000),
            ..last
        },
    ] {
        assert!(!end(&mut host, forged), "the device knows");
        let now = host.pair.now;
        host.pair.sides[0].rnic.handle_taken(now, forged, Taken::Done);
    }
    // One for several.
    for _ in 0..3 {
        host.take(false);
    }
    host.hear(last, Taken::Done);
    host.hear(tickets[2], Taken::Done);
    let ended = host.pair.sides[0].completed();
    assert_eq!(ended, all_done(4)[1..]);
    assert_eq!(psns(&host, 0).2, 0);
}

#[test]
fn end__not_after_a_reset() {
    let mut host = host_with(false, true);
    recv(&mut host, 0, 64);
    send_one(&mut host, 0);
    let (ticket, _) = host.ring().requests.remove(0);
    let (asking, answering) = (host.pair.sides[0].qpn, host.pair.sides[1].qpn);
    host.pair.modify(0, QpState::Reset, &QpAttributes::default());
    assert!(!end(&mut host, ticket));
    let psn = psns(&host, 1).1;
    let change = |_: &mut QpAttributes, rts: &mut QpAttributes| rts.sq_psn = Some(psn);
    host.pair.connect_qp(0, asking, answering, &change, QpState::Rts);
    host.pair.set_local(true);
    for wr_id in 1..4 {
        recv(&mut host, wr_id, 64);
        send_one(&mut host, wr_id);
    }
    assert_eq!(
        host.by_lane[0], 3,
        "the lane has the requests of the new connection"
    );
    assert!(!end(&mut host, ticket), "the device knows the incarnation");
    let now = host.pair.now;
    host.pair.sides[0].rnic.handle_taken(now, ticket, Taken::Done);
    assert_eq!(host.pair.sides[0].completed(), []);
    host.take_all();
    assert_eq!(host.pair.sides[0].completed().len(), 3);
    let qpn = host.pair.sides[0].qpn;
    host.pair.sides[0].rnic.destroy_qp(qpn);
    assert!(!end(&mut host, ticket));
}

#[test]
fn take__leaves_to_the_device_what_no_sender_of_ours_builds() {
    let mut host = host_with(false, true);
    for wr_id in 0..3 {
        recv(&mut host, wr_id, 8_000);
    }
    host.send(0, 0, 9);
    host.take(true);
    host.send(1, 0, 2_001);
    let (_, long) = host.ring().requests.remove(0);
    let long = long.bytes.into_inner();
    // The sender has it sent again in packets.
    let now = host.pair.now;
    host.pair.set_local(false);
    host.pair.run();
    host.pair.set_local(true);
    recv(&mut host, 3, 64);
    host.send(2, 0, 9);
    host.take(true);
    host.send(3, 0, 9);
    let bytes = host.ring().requests[0].1.bytes.borrow().clone();
    let src = host.pair.sides[0].address;
    let lanes = host.pair.sides[1].rnic.lanes();
    let take = |src, bytes: &[u8]| {
        let mut deliveries = Vec::new();
        let record = Record::of(bytes.to_vec());
        let taken = lanes.take(src, &record, &mut Recent::default(), || now, &mut deliveries);
        assert!(deliveries.is_empty());
        taken
    };
    assert_eq!(host.pair.sides[1].completed().len(), 3);
    assert!(!take(IpAddr::from([10, 0, 0, 9]), &bytes), "another host");
    // With others, the length fits the pad.
    for len in (0..bytes.len()).filter(|len| *len < 12 || len % 4 != bytes.len() % 4) {
        assert!(!take(src, &bytes[..len]), "{len} bytes");
    }
    assert!(!take(src, &[&bytes[..], &[0]].concat()), "one byte more");
    // Each bit of the headers matters, but for the one that makes payload immediate data, those that ask for an event and an
    // acknowledgement, and those of migration, the partition and congestion, which a receiver ignores.
    let moot = [(0, 0x01), (1, 0xc0), (2, 0x80), (4, 0xff), (8, 0x80)];
    for (at, bit) in (0..12).flat_map(|at| (0..8).map(move |n| (at, 1u8 << n))) {
        let is_moot = moot.iter().any(|(of, bits)| *of == at && bits & bit != 0);
        let mut other = bytes.clone();
        other[at] ^= bit;
        assert!(is_moot || !take(src, &other), "byte {at}, bit {bit:#x}");
    }
    // A message of two packets is longer than one, and not longer than two.
    for (len, count) in [
        (12, 2),
        (12 + 1_024, 2),
        (12 + 1_025, 1),
        (12 + 2_001, 2),
        (12 + 2_001, 4),
    ] {
        let mut other = long[..len].to_vec();
        other[9..12].copy_from_slice(&bytes[9..12]);
        other[1] = other[1] & !0x30 | (((4 - len % 4) % 4) as u8) << 4;
        coalesced::set_count(&mut other, count);
        assert!(!take(src, &other), "{count} packets of {len} bytes");
    }
    assert_eq!(host.pair.sides[1].completed(), []);
    assert_eq!(host.take(true), Taken::Done);
    assert_eq!(host.by_lane[1], 1, "the one that it expected");
    assert_eq!(host.pair.sides[1].completed(), [(3, Status::Success)]);
}

/// Lets threads end when the test has, or has failed.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two threads post, a third takes and ends: each request completes once, in the order of the ring.
#[test]
fn lanes__are_shared_by_threads() {
    const EACH: u64 = 1_500;
    for tells_ended in [false, true] {
        let mut host = host_with(false, true);
        host.ring().tells_ended = tells_ended;
        for wr_id in 0..2 * EACH {
            host.pair.recv(1, wr_id, RECEIVES_AT + wr_id * 8, 8);
        }
        // The device lends again what it took back to post the receives.
        host.pair.recv(1, 2 * EACH, RECEIVES_AT, 8);
        host.send(u64::MAX, 0, 8);
        assert_eq!(host.take(true), Taken::Done);
        for side in &mut host.pair.sides {
            side.completions();
        }
        let lane = host.lane(0);
        let shared = host.shared.clone();
        let [asking, answering] = [0, 1].map(|i| host.pair.sides[i].rnic.lanes());
        let src = host.pair.sides[0].address;
        let ends = AtomicBool::new(false);
        let order = thread::scope(|scope| {
            let _stops = Stops(&ends);
            for thread in 0..2 {
                let (lane, ends) = (lane.clone(), &ends);
                scope.spawn(move || {
                    for n in 0..EACH {
                        let wr_id = thread << 32 | n;
                        let sges = SgeList::inline(&wr_id.to_le_bytes());
                        let mut request = Some(send(wr_id, Operation::Send { imm: None }, sges));
                        // The window is full now and then.
                        while let Directly::Not = lane.post(&mut request, || panic!("nobody waits")) {
                            if ends.load(Ordering::Relaxed) {
                                return;
                            }
                            thread::yield_now();
                        }
                        assert!(request.is_none());
                    }
                });
            }
            let mut order = Vec::new();
            let (mut of_asking, mut of_answering) = (Recent::default(), Recent::default());
            let mut deliveries = Vec::new();
            while order.len() < 2 * EACH as usize {
                let taken = {
                    let mut ring = shared.0.lock();
                    (!ring.requests.is_empty()).then(|| ring.requests.remove(0))
                };
                let Some((ticket, record)) = taken else {
                    thread::yield_now();
                    continue;
                };
                let bytes = record.bytes.borrow()[12..20].to_vec();
                order.push(u64::from_le_bytes(bytes.try_into().unwrap()));
                assert!(answering.take(src, &record, &mut of_answering, || Time(1), &mut deliveries));
                assert!(asking.end(ticket, &mut of_asking, || Time(1), &mut deliveries));
            }
            assert!(deliveries.is_empty());
            order
        });
        let completed = host.pair.sides[0].completed();
        let expected: Vec<_> = order.iter().map(|wr_id| (*wr_id, Status::Success)).collect();
        assert!(completed == expected, "the order of completions");
        for thread in 0..2 {
            let of_thread = order.iter().filter(|wr_id| **wr_id >> 32 == thread);
            assert!(of_thread.map(|wr_id| wr_id & 0xffff_ffff).eq(0..EACH));
        }
        assert_eq!(host.pair.sides[1].completed().len(), 2 * EACH as usize);
        host.by_lane = [2 * EACH; 3];
    }
}

/// The device takes requests back, posts and completes some, while threads use the lane.
#[test]
fn lanes__are_recalled_under_threads() {
    const EACH: u64 = 400;
    let mut host = host_with(true, true);
    host.by_lane = [1; 3];
    for wr_id in 0..2 * EACH + 400 {
        host.pair.recv(1, wr_id, RECEIVES_AT + wr_id % 64 * 8, 8);
    }
    let lane = host.lane(0);
    let asking = host.pair.sides[0].rnic.lanes();
    let ends = AtomicBool::new(false);
    let (posted, shared) = (AtomicUsize::new(0), host.shared.clone());
    let mine = thread::scope(|scope| {
        let _stops = Stops(&ends);
        for thread in 1..3 {
            let (lane, posted, ends) = (lane.clone(), &posted, &ends);
            scope.spawn(move || {
                for n in 0..EACH {
                    let sges = SgeList::inline(&[1; 8]);
                    let mut request = Some(send(thread << 32 | n, Operation::Send { imm: None }, sges));
                    while let Directly::Not = lane.post(&mut request, || panic!("nobody waits")) {
                        if ends.load(Ordering::Relaxed) {
                            return;
                        }
                        thread::yield_now();
                    }
                    posted.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut mine = 0;
        while posted.load(Ordering::Relaxed) < 2 * EACH as usize && mine < 400 {
            // The device posts one of its own, which lends the lane the requests again.
            let sges = SgeList::inline(&[2; 8]);
            host.post_to_device(send(mine, Operation::Send { imm: None }, sges))
                .unwrap();
            mine += 1;
            let many = shared.0.lock().requests.len();
            for n in 0..many {
                let (ticket, record) = host.ring().requests.remove(0);
                let taken = host.take_record(&record);
                assert_eq!(taken, Taken::Done);
                let mut deliveries = Vec::new();
                let recent = &mut Recent::default();
                let by_lane = n % 2 == 0 && asking.end(ticket, recent, || Time(1), &mut deliveries);
                if !by_lane {
                    let now = host.pair.now;
                    host.pair.sides[0].rnic.handle_taken(now, ticket, taken);
                }
                assert!(deliveries.is_empty());
            }
            if mine % 3 == 0 {
                // It takes all back.
                host.pair.modify(0, QpState::Rts, &QpAttributes::default());
            }
        }
        mine
    });
    host.take_all();
    host.pair.run();
    let completed = host.pair.sides[0].completed();
    let by_threads = posted.load(Ordering::Relaxed);
    assert_eq!(completed.len(), by_threads + mine as usize);
    assert!(completed.iter().all(|(_, status)| *status == Status::Success));
    for thread in 0..3 {
        let of_thread = completed.iter().filter(|(wr_id, _)| wr_id >> 32 == thread);
        assert!(of_thread.map(|(wr_id, _)| wr_id & 0xffff_ffff).is_sorted());
    }
    assert_eq!(host.pair.sides[1].completed().len(), completed.len());
    assert_eq!(host.pair.sides[0].rnic.counters().retransmitted_packets, 0);
}

/// The device counts the shared receives that are left while their limit is armed.
#[test]
fn take__into_shared_receives_unless_their_limit_is_armed() {
    let mut host = host_with(false, true);
    let (pd, cq) = (host.pair.sides[1].pd, host.pair.sides[1].cq);
    let init = SrqInit {
        pd,
        max_wr: 64,
        xrc: None,
    };
    let srqn = host.pair.sides[1].rnic.create_srq(init).unwrap();
    let answering = QpInit {
        srq: Some(srqn),
        ..QpInit::new(pd, cq)
    };
    host.pair.replace_qps(QpType::Rc, answering);
    host.pair.set_local(true);
    host.lane(1);
    let post_shared = |host: &mut Host, wr_id: u64| {
        let sges = host.pair.sides[1].sge(RECEIVES_AT + wr_id * 64, 64);
        let receives = host.pair.sides[1].rnic.srq_receives(srqn).unwrap();
        receives.post(RecvRequest { wr_id, sges }).unwrap();
    };
    for wr_id in 0..8 {
        post_shared(&mut host, wr_id);
    }
    let send_and_take = |host: &mut Host, wr_id| {
        send_one(host, wr_id);
        let before = host.by_lane[1];
        assert_eq!(host.take(true), Taken::Done);
        host.by_lane[1] > before
    };
    // The first brings the device's news, and the second the key of the receives' memory.
    send_and_take(&mut host, 0);
    send_and_take(&mut host, 1);
    assert!(send_and_take(&mut host, 2), "by the lane");
    let side = &mut host.pair.sides[1];
    side.rnic.modify_srq(srqn, None, Some(4)).unwrap();
    assert!(!send_and_take(&mut host, 3), "the limit is armed, and 4 are left");
    let told = |host: &mut Host| {
        let mut events = std::iter::from_fn(|| host.pair.sides[1].rnic.poll_event());
        events.any(|event| event == Event::SrqLimitReached(srqn))
    };
    assert!(!told(&mut host));
    assert!(!send_and_take(&mut host, 4), "it is armed, and 3 are left");
    assert!(told(&mut host));
    send_and_take(&mut host, 5);
    assert!(send_and_take(&mut host, 6), "the limit is reached, and told once");
    assert!(!told(&mut host));
    assert_eq!(host.pair.sides[1].completed(), all_done(7));
    let whole = host.received(RECEIVES_AT, 7 * 64);
    let sent = pattern(7 * 8 + 40);
    for at in 0..7 {
        assert_eq!(whole[at * 64..][..40], sent[at * 8..][..40], "message {at}");
    }
}

/// Memory that a handler of the program provides, which may panic.
#[derive(Debug)]
struct Panics(HeapMemory, AtomicBool);

impl Memory for Panics {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        assert!(!self.1.load(Ordering::Relaxed), "the program's handler");
        self.0.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        assert!(!self.1.load(Ordering::Relaxed), "the program's handler");
        self.0.write(offset, bytes)
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Ok(())
    }
}

#[test]
fn panic__of_memory_loses_neither_receive_nor_place() {
    let mut host = host_with(false, true);
    let memory = Arc::new(Panics(HeapMemory::new(4096), AtomicBool::new(false)));
    let lkeys = [0, 1].map(|i| {
        let side = &mut host.pair.sides[i];
        let memory: Arc<dyn Memory> = memory.clone();
        let spec = RegionSpec {
            memory,
            memory_offset: 0,
            length: 4096,
            iova: IOVA,
            access: Access::LOCAL_WRITE,
        };
        side.rnic.reg_mr(side.pd, spec).unwrap().0
    });
    let sge = |i: usize| {
        SgeList::from(Sge {
            addr: IOVA,
            length: 8,
            lkey: lkeys[i].0,
        })
    };
    let receive = |host: &mut Host, wr_id| {
        let side = &host.pair.sides[1];
        let queue = side.rnic.receive_queue(side.qpn).unwrap();
        queue.post(RecvRequest { wr_id, sges: sge(1) }).unwrap();
    };
    let request = |wr_id| send(wr_id, Operation::Send { imm: None }, sge(0));
    for wr_id in 0..3 {
        receive(&mut host, wr_id);
        host.post(request(wr_id));
        assert_eq!(host.take(true), Taken::Done);
    }
    assert_eq!(host.pair.sides[0].completed(), all_done(3));
    let panics = |f: &mut dyn FnMut()| {
        memory.1.store(true, Ordering::Relaxed);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err());
        memory.1.store(false, Ordering::Relaxed);
    };
    let lane = host.lane(0);
    panics(&mut || drop(lane.post(&mut Some(request(3)), || Time(0))));
    assert!(by_lane(&mut host, &request(3)), "its place is free again");
    receive(&mut host, 3);
    let (lanes, src) = (host.pair.sides[1].rnic.lanes(), host.pair.sides[0].address);
    let posted = |host: &Host| {
        host.pair.sides[1]
            .rnic
            .query_qp(host.pair.sides[1].qpn)
            .unwrap()
            .recv_posted
    };
    let bytes = host.ring().requests[0].1.bytes.borrow().clone();
    let record = Record::of(bytes);
    panics(&mut || {
        lanes.take(src, &record, &mut Recent::default(), || Time(0), &mut Vec::new());
    });
    assert_eq!(posted(&host), 1, "the receive is there again");
    assert_eq!(host.take(true), Taken::Done);
    host.pair.sides[1].completed();
}

//! Accesses to memory on a medium, which the driver carries out.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use rdmux_wire::Psn;
use rdmux_wire::roce::{Bth, Opcode, Operation as Op, Packet, Reth, Syndrome};

use super::util::{ALL_ACCESS, IOVA, PSN, Pair};
use crate::access::AccessJob;
use crate::cq::{Status, WcOpcode};
use crate::memory::{Access, Atomic, Fault, HeapMemory, Medium, Memory, Placement};
use crate::qp::QpState;
use crate::region::RegionSpec;
use crate::work::{Operation, SgeList};
use crate::{RKey, Rnic};

/// Memory on a medium. Every access of a peer waits.
#[derive(Debug)]
struct OnMedium {
    heap: HeapMemory,
    gathers: bool,
}

impl Memory for OnMedium {
    fn len(&self) -> u64 {
        self.heap.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.heap.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.heap.write(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.heap.atomic(offset, atomic)
    }

    fn medium(&self) -> Option<Medium> {
        Some(Medium(1))
    }

    fn gathers(&self) -> bool {
        self.gathers
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL | Placement::PERSISTENT
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT)
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Ok(())
    }
}

const BYTES: u64 = 1 << 20;

/// A pair whose side 1 has a region on a medium.
struct Bench {
    pair: Pair,
    memory: Arc<OnMedium>,
    rkey: RKey,
}

impl Bench {
    fn new(gathers: bool) -> Bench {
        Bench::of(Pair::new(), gathers)
    }

    fn of(mut pair: Pair, gathers: bool) -> Bench {
        let heap = HeapMemory::new(BYTES as usize);
        let memory = Arc::new(OnMedium { heap, gathers });
        let spec = RegionSpec {
            memory: memory.clone(),
            memory_offset: 0,
            length: BYTES,
            iova: IOVA,
            access: ALL_ACCESS | Access::FLUSH_PERSISTENT,
        };
        let side = &mut pair.sides[1];
        let (_, rkey) = side.rnic.reg_mr(side.pd, spec).unwrap();
        Bench { pair, memory, rkey }
    }

    fn rnic(&mut self) -> &mut Rnic {
        &mut self.pair.sides[1].rnic
    }

    /// Posts a WRITE to the medium.
    fn write(&mut self, at: u64, length: u32, imm: Option<u32>) {
        let (va, rkey) = (IOVA + at, self.rkey);
        let sges = self.pair.sides[0].sge(0, length);
        self.pair.post(0, Operation::Write { va, rkey, imm }, sges);
    }

    fn post(&mut self, operation: Operation, length: u32) {
        let sges = self.pair.sides[0].sge(0, length);
        self.pair.post(0, operation, sges);
    }

    fn jobs(&mut self) -> Vec<AccessJob> {
        std::iter::from_fn(|| self.rnic().poll_access()).collect()
    }

    /// Carries out a job.
    fn run(&mut self, job: &AccessJob) {
        let (now, result) = (self.pair.now, job.run());
        self.rnic().handle_access(now, job.id, result);
    }

    /// Lets everything end: what waits for a time, then the accesses, and the accesses that those lead to.
    fn finish(&mut self) {
        self.pair.pass(LONG_NS);
        self.run_all();
        self.pair.run();
        self.run_all();
    }

    /// Carries out jobs until there are none, and delivers what follows.
    fn run_all(&mut self) {
        loop {
            while self.pair.step() {}
            let jobs = self.jobs();
            if jobs.is_empty() {
                return;
            }
            jobs.iter().for_each(|job| self.run(job));
        }
    }

    /// Fills the source of WRITEs.
    fn fill(&mut self, byte: u8) {
        self.pair.sides[0]
            .memory
            .with(|bytes| bytes[..1 << 16].fill(byte));
    }

    fn byte(&self, at: u64) -> u8 {
        self.memory.heap.with(|bytes| bytes[at as usize])
    }

    fn completed(&mut self) -> Vec<(WcOpcode, Status)> {
        let all = self.pair.sides[0].completions();
        all.iter().map(|wc| (wc.opcode, wc.status)).collect()
    }
}

/// NAKs, RNR NAKs included: PSN from the first of the connection on, and MSN.
type Naks = Rc<RefCell<Vec<(i32, u32)>>>;

/// Notes the NAKs to side 0, and drops requests to side 1 whose operation is `dropped`.
fn watch(pair: &mut Pair) -> (Naks, Rc<Cell<Option<Op>>>) {
    let (naks, dropped) = (Naks::default(), Rc::new(Cell::new(None)));
    pair.disable_trains();
    let (seen, drops) = (naks.clone(), dropped.clone());
    pair.deliver = Box::new(move |to, bytes| {
        let packet = Packet::parse(bytes).unwrap();
        if to == 1 {
            return drops.get() != Some(packet.bth.opcode.operation);
        }
        if let Some(aeth) = packet.aeth()
            && !matches!(aeth.syndrome, Syndrome::Ack { .. })
        {
            seen.borrow_mut()
                .push((packet.bth.psn.since(Psn::new(PSN)), aeth.msn));
        }
        true
    });
    (naks, dropped)
}

/// Time in which all retries of a requester run out, many times over.
const LONG_NS: u64 = 30_000_000_000;

#[test]
fn write__is_acknowledged_when_its_bytes_are_there_however_long_that_takes() {
    for (gathers, selective) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut bench = Bench::of(Pair::with(|rtr, _| rtr.selective = Some(selective)), gathers);
        bench.fill(7);
        bench.write(0, 5000, None);
        bench.pair.pass(LONG_NS);
        assert_eq!(bench.completed(), [], "{gathers} {selective}");
        assert_eq!(bench.pair.sides[0].state(), QpState::Rts);
        let jobs = bench.jobs();
        assert_eq!(jobs.iter().map(AccessJob::bytes).sum::<usize>(), 5000);
        assert_eq!(bench.byte(0), 0, "it was not left to the driver");
        jobs.iter().for_each(|job| bench.run(job));
        bench.pair.run();
        assert_eq!(bench.completed(), [(WcOpcode::Write, Status::Success)]);
        assert_eq!((bench.byte(0), bench.byte(4999)), (7, 7));
        assert!(bench.jobs().is_empty(), "a repeated request was executed again");
    }
}

#[test]
fn write__of_another_queue_pair_goes_on_meanwhile() {
    let mut bench = Bench::new(true);
    let (a, _) = bench.pair.second_qps();
    bench.write(0, 5000, None);
    while bench.pair.step() {}
    let rkey = bench.pair.sides[1].rkey;
    let sges = bench.pair.sides[0].sge(0, 100);
    let request = crate::SendRequest {
        flags: crate::SendFlags::SIGNALED,
        ..crate::SendRequest::new(
            Operation::Write {
                va: IOVA,
                rkey,
                imm: None,
            },
            sges,
        )
    };
    let now = bench.pair.now;
    bench.pair.sides[0].rnic.post_send(now, a, request).unwrap();
    while bench.pair.step() {}
    assert_eq!(bench.completed(), [(WcOpcode::Write, Status::Success)]);
}

#[test]
fn write__goes_on_behind_writes_to_the_same_medium() {
    let mut bench = Bench::new(false);
    for at in 0..8 {
        bench.write(at * 100, 100, None);
    }
    while bench.pair.step() {}
    let jobs = bench.jobs();
    assert_eq!(jobs.len(), 8);
    for (n, job) in jobs.iter().enumerate() {
        bench.run(job);
        while bench.pair.step() {}
        assert_eq!(bench.completed().len(), 1, "acknowledgement of WRITE {n}");
    }
}

#[test]
fn request__waits_for_the_writes_before_it() {
    let mut bench = Bench::new(true);
    let (side, rkey) = (bench.pair.sides[1].rkey, bench.rkey);
    let next = [
        ("SEND", Operation::Send { imm: None }, WcOpcode::Send, 8),
        (
            "WRITE elsewhere",
            Operation::Write {
                va: IOVA,
                rkey: side,
                imm: None,
            },
            WcOpcode::Write,
            8,
        ),
        ("READ", Operation::Read { va: IOVA, rkey }, WcOpcode::Read, 8),
        (
            "atomic",
            Operation::FetchAdd {
                va: IOVA,
                rkey,
                add: 1,
            },
            WcOpcode::FetchAdd,
            8,
        ),
        (
            "WRITE with imm",
            Operation::Write {
                va: IOVA + 64,
                rkey,
                imm: Some(1),
            },
            WcOpcode::Write,
            8,
        ),
    ];
    for (what, operation, opcode, length) in next {
        bench.pair.recv(1, 1, 4096, 64);
        bench.write(0, 1000, None);
        bench.post(operation, length);
        while bench.pair.step() {}
        let jobs = bench.jobs();
        assert_eq!(jobs.len(), 1, "{what} overtook");
        assert_eq!(
            (bench.completed(), bench.pair.sides[1].completions().len()),
            (vec![], 0),
            "{what}"
        );
        bench.run(&jobs[0]);
        bench.run_all();
        assert_eq!(
            bench.completed(),
            [(WcOpcode::Write, Status::Success), (opcode, Status::Success)],
            "{what}"
        );
        bench.pair.sides[1].completions();
    }
}

#[test]
fn write_with_immediate__completes_at_the_peer_when_its_bytes_are_there() {
    for length in [8, 5000] {
        let mut bench = Bench::new(true);
        bench.fill(5);
        bench.pair.recv(1, 3, 4096, 64);
        bench.write(0, length, Some(9));
        loop {
            while bench.pair.step() {}
            assert!(bench.pair.sides[1].completions().is_empty() || bench.byte(u64::from(length) - 1) == 5);
            let jobs = bench.jobs();
            if jobs.is_empty() {
                break;
            }
            assert!(bench.completed().is_empty());
            jobs.iter().for_each(|job| bench.run(job));
        }
        assert_eq!(bench.byte(u64::from(length) - 1), 5);
        assert_eq!(bench.completed(), [(WcOpcode::Write, Status::Success)]);
    }
}

#[test]
fn write__that_was_kept_is_placed_when_its_turn_comes() {
    let mut bench = Bench::new(true);
    bench.fill(4);
    bench.write(0, 1000, None);
    bench.pair.write(0, 0, 8);
    // All its packets but the last arrive while it is kept.
    bench.pair.disable_trains();
    bench.write(4096, 3000, None);
    bench.pair.deliver = Box::new(|_, bytes| bytes[0] != 0x08);
    while bench.pair.step() {}
    bench.run_all();
    assert_eq!(bench.byte(4096), 4);
    bench.pair.deliver = Box::new(|_, _| true);
    bench.pair.pass(100_000_000);
    bench.run_all();
    bench.pair.pass(100_000_000);
    assert_eq!(bench.completed().len(), 3);
}

#[test]
fn flush__begins_when_the_writes_before_it_are_done() {
    let mut bench = Bench::new(true);
    bench.write(0, 1000, None);
    bench.pair.flush(bench.rkey);
    while bench.pair.step() {}
    assert!(bench.rnic().poll_flush().is_none());
    bench.run_all();
    let job = bench.rnic().poll_flush().unwrap();
    let now = bench.pair.now;
    bench.rnic().handle_flush(now, job.id, Ok(()));
    bench.pair.run();
    assert_eq!(
        bench.completed(),
        [
            (WcOpcode::Write, Status::Success),
            (WcOpcode::Flush, Status::Success)
        ]
    );
}

#[test]
fn atomic__takes_effect_once_although_it_is_repeated() {
    let mut bench = Bench::new(true);
    bench.memory.heap.write(0, &40u64.to_ne_bytes()).unwrap();
    bench.post(
        Operation::FetchAdd {
            va: IOVA,
            rkey: bench.rkey,
            add: 2,
        },
        8,
    );
    bench.pair.pass(LONG_NS);
    let jobs = bench.jobs();
    assert_eq!(jobs.len(), 1);
    bench.run(&jobs[0]);
    bench.pair.run();
    assert!(bench.jobs().is_empty());
    assert_eq!(bench.completed(), [(WcOpcode::FetchAdd, Status::Success)]);
    let mut now = [0; 8];
    bench.memory.heap.read(0, &mut now).unwrap();
    assert_eq!(u64::from_ne_bytes(now), 42);
    let before = bench.pair.sides[0]
        .memory
        .with(|bytes| <[u8; 8]>::try_from(&bytes[..8]).unwrap());
    assert_eq!(u64::from_ne_bytes(before), 40);
}

#[test]
fn read__waits_for_its_bytes_however_long_that_takes() {
    for (gathers, selective) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut bench = Bench::of(Pair::with(|rtr, _| rtr.selective = Some(selective)), gathers);
        bench.memory.heap.with(|bytes| bytes.fill(3));
        bench.post(
            Operation::Read {
                va: IOVA,
                rkey: bench.rkey,
            },
            200_000,
        );
        bench.pair.pass(LONG_NS);
        assert_eq!(bench.completed(), [], "{gathers} {selective}");
        bench.run_all();
        bench.pair.run();
        bench.run_all();
        assert_eq!(
            bench.completed(),
            [(WcOpcode::Read, Status::Success)],
            "{gathers} {selective}"
        );
        assert!(
            bench.pair.sides[0]
                .memory
                .with(|bytes| bytes[..200_000].iter().all(|byte| *byte == 3))
        );
    }
}

#[test]
fn read__of_a_region_that_ends_while_its_bytes_are_fetched_is_refused() {
    let mut bench = Bench::new(true);
    bench.post(
        Operation::Read {
            va: IOVA,
            rkey: bench.rkey,
        },
        5000,
    );
    while bench.pair.step() {}
    let jobs = bench.jobs();
    let lkey = crate::LKey(bench.rkey.0);
    drop(bench.rnic().dereg_mr(lkey).unwrap());
    bench.run(&jobs[0]);
    bench.pair.run();
    assert_eq!(bench.completed(), [(WcOpcode::Read, Status::RemoteAccess)]);
}

#[test]
fn access__that_fails_ends_the_connection_and_only_what_was_done_is_acknowledged() {
    let mut bench = Bench::new(false);
    bench.pair.recv(1, 1, 4096, 64);
    for at in 0..3 {
        bench.write(at * 100, 100, None);
    }
    bench.post(Operation::Send { imm: None }, 8);
    while bench.pair.step() {}
    let jobs = bench.jobs();
    bench.run(&jobs[0]);
    let now = bench.pair.now;
    bench.rnic().handle_access(now, jobs[1].id, Err(Fault::Io(5)));
    bench.run(&jobs[2]);
    bench.pair.run();
    assert_eq!(
        bench.completed(),
        [
            (WcOpcode::Write, Status::Success),
            (WcOpcode::Write, Status::RemoteOperation),
            (WcOpcode::Write, Status::Flushed),
            (WcOpcode::Send, Status::Flushed),
        ]
    );
    assert_eq!(bench.pair.sides[1].state(), QpState::Error);
    assert_eq!(bench.pair.sides[1].completions()[0].status, Status::Flushed);
}

#[test]
fn access__of_a_queue_pair_that_has_ended_is_not_begun() {
    let mut bench = Bench::new(true);
    bench.write(0, 1000, None);
    while bench.pair.step() {}
    let qpn = bench.pair.sides[1].qpn;
    bench.rnic().destroy_qp(qpn);
    assert!(bench.jobs().is_empty());
    assert_eq!(bench.rnic().poll_ended_memories().len(), 1);
}

#[test]
fn request__that_is_refused_behind_accesses_is_answered_after_them() {
    let mut bench = Bench::new(true);
    bench.write(0, 1000, None);
    bench.write(BYTES - 10, 3000, None);
    bench.pair.pass(1_000_000);
    assert_eq!(bench.completed(), []);
    bench.run_all();
    bench.pair.run();
    assert_eq!(
        bench.completed(),
        [
            (WcOpcode::Write, Status::Success),
            (WcOpcode::Write, Status::RemoteAccess),
        ]
    );
}

#[test]
fn write__beyond_the_most_that_wait_is_kept() {
    for selective in [false, true] {
        let change = |rtr: &mut crate::QpAttributes, _: &mut _| {
            (rtr.selective, rtr.window_bytes) = (Some(selective), Some(4 << 20));
        };
        let mut bench = Bench::of(Pair::with(change), false);
        bench.fill(1);
        for at in 0..600 {
            bench.write(at * 8, 8, None);
        }
        while bench.pair.step() {}
        let jobs = bench.jobs();
        assert_eq!(jobs.len(), 256, "{selective}");
        jobs.iter().for_each(|job| bench.run(job));
        bench.run_all();
        assert_eq!(bench.completed().len(), 600, "{selective}");
        assert_eq!(
            bench.pair.sides[0].rnic.counters().retransmitted_packets,
            0,
            "{selective}"
        );
    }
}

#[test]
fn request__of_no_bytes_needs_no_access() {
    let mut bench = Bench::new(true);
    bench.post(
        Operation::Read {
            va: IOVA,
            rkey: bench.rkey,
        },
        0,
    );
    bench.pair.post(
        0,
        Operation::Write {
            va: IOVA,
            rkey: bench.rkey,
            imm: None,
        },
        SgeList::EMPTY,
    );
    while bench.pair.step() {}
    assert_eq!(bench.completed().len(), 2);
}

#[test]
fn write__of_a_peer_that_is_not_rdmux_is_left_to_its_timer() {
    let mut bench = Bench::of(Pair::with(|rtr, _| rtr.peer_is_rdmux = Some(false)), false);
    let (naks, _) = watch(&mut bench.pair);
    bench.fill(7);
    bench.write(0, 100, None);
    bench.pair.pass(15_000_000);
    assert!(bench.pair.sides[1].rnic.counters().duplicate_request > 0);
    bench.run_all();
    assert_eq!(bench.completed(), [(WcOpcode::Write, Status::Success)]);
    assert_eq!((bench.byte(99), naks.take()), (7, vec![]));
}

#[test]
fn request__waits_for_a_medium_although_the_peer_may_not_retry_on_rnr_nak() {
    for selective in [false, true] {
        let mut bench = Bench::of(
            Pair::with(|rtr, rts| {
                rtr.selective = Some(selective);
                rts.rnr_retry = Some(0);
            }),
            false,
        );
        let rkey = bench.rkey;
        let add = Operation::FetchAdd {
            va: IOVA,
            rkey,
            add: 1,
        };
        bench.pair.recv(1, 1, 4096, 64);
        bench.write(0, 100, Some(1));
        bench.post(Operation::Read { va: IOVA, rkey }, 100);
        bench.post(add, 8);
        for _ in 0..4 {
            bench.pair.pass(LONG_NS);
            let jobs = bench.jobs();
            jobs.iter().for_each(|job| bench.run(job));
        }
        bench.pair.run();
        let statuses: Vec<_> = bench.completed().iter().map(|(_, status)| *status).collect();
        assert_eq!(statuses, [Status::Success; 3], "{selective}");
    }
}

#[test]
fn write__before_a_read_that_waits_for_a_medium_is_acknowledged() {
    for selective in [false, true] {
        let mut bench = Bench::of(
            Pair::with(|rtr, rts| {
                rtr.selective = Some(selective);
                rts.retry_count = Some(1);
            }),
            false,
        );
        let rkey = bench.rkey;
        // The response to the READ is to answer the WRITE too, but comes late.
        bench.pair.write(0, 0, 8);
        bench.post(Operation::Read { va: IOVA, rkey }, 5_000);
        bench.pair.pass(LONG_NS);
        let completed = bench.completed();
        assert_eq!(completed, [(WcOpcode::Write, Status::Success)], "{selective}");
        bench.run_all();
        bench.pair.run();
        bench.run_all();
        assert_eq!(
            bench.completed(),
            [(WcOpcode::Read, Status::Success)],
            "{selective}"
        );
    }
}

#[test]
fn receive__missing_is_not_taken_for_a_medium_that_works() {
    let mut bench = Bench::of(
        Pair::with(|rtr, rts| {
            rtr.min_rnr_timer = Some(20);
            rts.rnr_retry = Some(2);
        }),
        false,
    );
    bench.write(0, 100, Some(1));
    bench.pair.pass(LONG_NS);
    assert_eq!(bench.completed(), [(WcOpcode::Write, Status::RnrRetryExceeded)]);
}

#[test]
fn nak__has_the_number_of_messages_that_are_done() {
    let mut bench = Bench::new(false);
    let (naks, _) = watch(&mut bench.pair);
    for at in 0..4 {
        bench.write(at * 100, 100, None);
    }
    bench.pair.pass(50_000_000);
    let told = naks.take();
    assert!(
        !told.is_empty() && told.iter().all(|nak| *nak == (0, 0)),
        "{told:?}"
    );
    let jobs = bench.jobs();
    bench.run(&jobs[0]);
    bench.pair.pass(50_000_000);
    let told = naks.take();
    assert!(
        !told.is_empty() && told.iter().all(|nak| *nak == (1, 1)),
        "{told:?}"
    );
    bench.run(&jobs[1]);
    let now = bench.pair.now;
    bench.rnic().handle_access(now, jobs[2].id, Err(Fault::Io(5)));
    bench.pair.run();
    assert_eq!(naks.take(), [(2, 2)]);
}

#[test]
fn nak__names_no_request_behind_a_read_that_is_not_answered() {
    for selective in [false, true] {
        let mut bench = Bench::of(Pair::with(|rtr, _| rtr.selective = Some(selective)), false);
        let (naks, dropped) = watch(&mut bench.pair);
        let rkey = bench.rkey;
        bench.post(Operation::Read { va: IOVA, rkey }, 100);
        while bench.pair.step() {}
        dropped.set(Some(Op::ReadRequest));
        bench.write(0, 100, None);
        bench.pair.pass(15_000_000);
        let told = naks.take();
        assert!(told.iter().all(|nak| *nak == (0, 0)), "{selective} {told:?}");
        dropped.set(None);
        bench.finish();
        assert_eq!(
            bench.completed(),
            [
                (WcOpcode::Read, Status::Success),
                (WcOpcode::Write, Status::Success)
            ],
            "{selective}"
        );
    }
}

#[test]
fn request__that_was_dropped_behind_a_medium_is_reported_as_missing() {
    for selective in [false, true] {
        let change = |rtr: &mut crate::QpAttributes, _: &mut _| rtr.selective = Some(selective);
        let mut bench = Bench::of(Pair::with(change), false);
        let (naks, _) = watch(&mut bench.pair);
        bench.write(0, 8, None);
        while bench.pair.step() {}
        let jobs = bench.jobs();
        // The second SEND is further ahead than the responder keeps requests.
        let mut bth = Bth::new(
            Opcode::rc(Op::SendOnly),
            bench.pair.sides[1].qpn,
            Psn::new(PSN).plus(1),
        );
        bth.ack_req = true;
        for psn in [1, 60_000] {
            bth.psn = Psn::new(PSN).plus(psn);
            let mut bytes = [0; Bth::LEN];
            bth.emit(&mut bytes);
            let bytes = bench.pair.craft(&bytes);
            bench.pair.inject(&bytes);
        }
        assert_eq!(bench.rnic().counters().dropped_busy, 1, "{selective}");
        bench.pair.recv(1, 1, 0, 64);
        bench.run(&jobs[0]);
        while bench.pair.step() {}
        assert_eq!(naks.take(), [(2, 2)], "{selective}");
    }
}

#[test]
fn request__does_not_take_the_result_of_another_access() {
    let mut bench = Bench::new(false);
    bench.pair.recv(1, 1, 4096, 64);
    bench.write(0, 8, Some(1));
    while bench.pair.step() {}
    let jobs = bench.jobs();
    // No receive is found for the WRITE when its bytes are there, and the peer sends another request in its place.
    bench.pair.stopped[0] = true;
    let rnr = |rnr| crate::faults::Spec {
        rnr,
        ..Default::default()
    };
    bench.rnic().set_faults(&rnr(100.0));
    bench.run(&jobs[0]);
    while bench.pair.step() {}
    bench.rnic().set_faults(&rnr(0.0));
    let mut bytes = [0; Bth::LEN + Reth::LEN];
    Bth::new(Opcode::rc(Op::WriteOnly), bench.pair.sides[1].qpn, Psn::new(PSN)).emit(&mut bytes);
    let reth = Reth {
        va: IOVA + 64,
        rkey: bench.rkey,
        length: 8,
    };
    reth.emit(&mut bytes[Bth::LEN..]);
    let bytes = bench.pair.craft(&[&bytes[..], &[9; 8]].concat());
    bench.pair.inject(&bytes);
    bench.run_all();
    assert_eq!(bench.byte(64), 9);
}

/// Repeats a READ of side 0 from a packet on, whose PSN counts from the first of the connection.
fn repeat_read(bench: &mut Bench, psn: u32, va: u64, length: u32) {
    let mut bytes = [0; Bth::LEN + Reth::LEN];
    let at = Psn::new(PSN).plus(psn);
    Bth::new(Opcode::rc(Op::ReadRequest), bench.pair.sides[1].qpn, at).emit(&mut bytes);
    let rkey = bench.rkey;
    Reth { va, rkey, length }.emit(&mut bytes[Bth::LEN..]);
    let bytes = bench.pair.craft(&bytes);
    bench.pair.inject(&bytes);
}

#[test]
fn nak__names_the_repeated_request_and_no_read_that_the_peer_has() {
    for selective in [false, true] {
        let mut bench = Bench::of(Pair::with(|rtr, _| rtr.selective = Some(selective)), false);
        let (naks, _) = watch(&mut bench.pair);
        let rkey = bench.rkey;
        bench.post(Operation::Read { va: IOVA, rkey }, 100);
        bench.run_all();
        repeat_read(&mut bench, 0, IOVA, 100);
        while bench.pair.step() {}
        bench.write(0, 100, None);
        bench.pair.pass(15_000_000);
        let told = naks.take();
        assert!(!told.is_empty(), "{selective}");
        assert!(told.iter().all(|nak| *nak == (1, 1)), "{selective} {told:?}");
        bench.finish();
        let both = [WcOpcode::Read, WcOpcode::Write].map(|opcode| (opcode, Status::Success));
        assert_eq!(bench.completed(), both, "{selective}");
    }
}

#[test]
fn read__repeated_in_parts_keeps_the_bytes_of_the_next_response_alone() {
    let mut bench = Bench::of(Pair::with(|rtr, _| rtr.selective = Some(true)), false);
    let (rkey, mtu, packets) = (bench.rkey, 1024, 4);
    bench.post(Operation::Read { va: IOVA, rkey }, packets * mtu);
    bench.run_all();
    for part in (0..packets).rev() {
        repeat_read(&mut bench, part, IOVA + u64::from(part * mtu), mtu);
        while bench.pair.step() {}
    }
    let mut fetches = 0;
    loop {
        let jobs = bench.jobs();
        if jobs.is_empty() {
            break;
        }
        fetches += jobs.len() as u32;
        // The last part was asked for first: its bytes come out of order.
        jobs.iter().for_each(|job| bench.run(job));
        while bench.pair.step() {}
    }
    assert_eq!(fetches, packets + (packets - 1));
}

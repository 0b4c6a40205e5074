//! The remains of QPs that fail, compared with what their memory shows.

use std::sync::Arc;

use super::ring::Host;
use super::util::*;
use crate::*;

/// Where requests take place in side 1's memory.
const SENT: u64 = 1 << 16;
const WRITTEN: u64 = 2 << 16;
const COUNTER: u64 = 3 << 16;
const WORD: u64 = 4 << 16;
/// Value of the counter before the test.
const BEFORE: u64 = 40;

/// A request of the test, with the number of its PSNs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    Read,
    FetchAdd,
    Flush,
    AtomicWrite,
}

/// The requests in the order of their identifiers.
const ALL: [(Kind, u32); 6] = [
    (Kind::Send, 2),
    (Kind::Write, 3),
    (Kind::Read, 3),
    (Kind::FetchAdd, 1),
    (Kind::Flush, 1),
    (Kind::AtomicWrite, 1),
];

fn psn(at: u32) -> Psn {
    Psn::new(PSN).plus(at)
}

/// Makes the QPs of both sides keep what is left.
fn keep(pair: &mut Pair) {
    let now = pair.now;
    for side in &mut pair.sides {
        assert!(side.rnic.keep_remains(now, side.qpn));
    }
}

fn take(pair: &mut Pair, side: usize) -> Option<Remains> {
    let (now, side) = (pair.now, &mut pair.sides[side]);
    side.rnic.take_remains(now, side.qpn)
}

fn fail(pair: &mut Pair, side: usize) {
    let (now, side) = (pair.now, &mut pair.sides[side]);
    side.rnic.fail_qp(now, side.qpn);
}

fn word(pair: &Pair, at: u64) -> u64 {
    let at = at as usize;
    pair.sides[1]
        .memory
        .with(|m| u64::from_ne_bytes(m[at..at + 8].try_into().unwrap()))
}

fn post(pair: &mut Pair, wr_id: u64, kind: Kind) {
    let rkey = pair.sides[1].rkey;
    let at = |at| IOVA + at;
    let (operation, length) = match kind {
        Kind::Send => (Operation::Send { imm: None }, 1500),
        Kind::Write => {
            let (va, imm) = (at(WRITTEN), None);
            (Operation::Write { va, rkey, imm }, 2500)
        }
        Kind::Read => {
            let va = at(WRITTEN);
            (Operation::Read { va, rkey }, 2500)
        }
        Kind::FetchAdd => {
            let (va, add) = (at(COUNTER), 2);
            (Operation::FetchAdd { va, rkey, add }, 8)
        }
        Kind::Flush => {
            let flush = Operation::Flush {
                va: at(WRITTEN),
                rkey,
                length: 8,
                placement: Placement::GLOBAL,
                selectivity: Selectivity::Range,
            };
            (flush, 0)
        }
        Kind::AtomicWrite => {
            let va = at(WORD);
            (Operation::AtomicWrite { va, rkey }, 8)
        }
    };
    // Results go elsewhere than the bytes that are sent.
    let from = if operation.takes_answer() { 1 << 20 } else { 0 };
    let sges = match length {
        0 => SgeList::EMPTY,
        _ => pair.sides[0].sge(from, length),
    };
    let request = SendRequest {
        wr_id,
        operation,
        sges,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    let (now, side) = (pair.now, &mut pair.sides[0]);
    side.rnic.post_send(now, side.qpn, request).unwrap();
}

/// Posts all requests, delivers packets while `delivers` says so of their side and index, and fails both QPs. Compares what is left with
/// what completed and with the memory.
fn run(selective: bool, case: &str, mut delivers: impl FnMut(usize, usize) -> bool + 'static) {
    let mut pair = Pair::with(|rtr, _| rtr.selective = Some(selective));
    pair.disable_trains();
    keep(&mut pair);
    let bytes = pattern(2500);
    pair.sides[0].memory.write(0, &bytes).unwrap();
    pair.sides[1]
        .memory
        .write(COUNTER, &BEFORE.to_ne_bytes())
        .unwrap();
    let mut counts = [0; 2];
    pair.deliver = Box::new(move |to, _| {
        counts[to] += 1;
        delivers(to, counts[to] - 1)
    });
    pair.recv(1, 70, SENT, 2000);
    for (wr_id, (kind, _)) in ALL.into_iter().enumerate() {
        post(&mut pair, wr_id as u64, kind);
    }
    while pair.step() {}
    fail(&mut pair, 0);
    fail(&mut pair, 1);
    // After the failure: it is in no send queue.
    post(&mut pair, 99, Kind::Write);
    let [ours, theirs] = [0, 1].map(|i| take(&mut pair, i).unwrap());
    assert_eq!((take(&mut pair, 0), take(&mut pair, 1)), (None, None), "{case}");
    assert_eq!(ours.mtu, 1024);
    assert_eq!((theirs.sent, theirs.done.refused), (Vec::new(), None), "{case}");
    assert_eq!(ours.done.expected, psn(0));

    let executed = theirs.done.expected.since(psn(0)) as u32;
    let completed = pair.sides[0].completed();
    let (done, rest): (Vec<_>, Vec<_>) = completed.into_iter().partition(|wc| wc.1 == Status::Success);
    let (posted_late, ended) = rest.split_last().unwrap();
    assert_eq!(*posted_late, (99, Status::Flushed), "{case}");
    let left: Vec<_> = ours
        .sent
        .iter()
        .map(|sent| (sent.wr_id, Status::Flushed))
        .collect();
    assert_eq!(left, ended, "{case}");
    let received = pair.sides[1].completed() == [(70, Status::Success)];
    let mut first = 0;
    for (wr_id, (kind, psns)) in ALL.into_iter().enumerate() {
        let case = format!("{case}, selective {selective}: {kind:?} at {first}, executed {executed}");
        let is_done = done.contains(&(wr_id as u64, Status::Success));
        let is_executed = executed >= first + psns;
        assert!(is_executed || !is_done, "{case}");
        if let Some(sent) = ours.sent.iter().find(|sent| sent.wr_id == wr_id as u64) {
            // All were begun, since the window is wider than they are.
            assert_eq!(sent.psns, Some((psn(first), psns)), "{case}");
        }
        let answer = theirs.done.answers.iter().find(|(at, _)| *at == psn(first));
        let answer = answer.map(|(_, answer)| *answer);
        let expects = |answered| is_executed.then_some(answered);
        match kind {
            Kind::Send => assert_eq!(received, is_executed, "{case}"),
            Kind::Write => {
                let placed = executed.saturating_sub(first).min(psns);
                let until = (placed as usize * 1024).min(bytes.len());
                let mut found = vec![0; bytes.len()];
                pair.sides[1].memory.read(WRITTEN, &mut found).unwrap();
                assert_eq!(found[..until], bytes[..until], "{case}");
                assert!(found[until..].iter().all(|byte| *byte == 0), "{case}");
            }
            Kind::Read => assert_eq!(answer, None, "{case}"),
            Kind::FetchAdd => {
                assert_eq!(
                    word(&pair, COUNTER),
                    BEFORE + 2 * u64::from(is_executed),
                    "{case}"
                );
                assert_eq!(answer, expects(Answered::Original(BEFORE)), "{case}");
            }
            Kind::Flush => assert_eq!(answer, expects(Answered::Done), "{case}"),
            Kind::AtomicWrite => {
                assert_eq!(word(&pair, WORD) != 0, is_executed, "{case}");
                assert_eq!(answer, expects(Answered::Done), "{case}");
            }
        }
        first += psns;
    }
}

/// Number of packets that the requests and the responses to them take, with some room.
const PACKETS: usize = 12;

#[test]
fn remains__say_what_was_executed_wherever_the_packets_end() {
    for selective in [false, true] {
        for (to_1, to_0) in (0..=PACKETS).flat_map(|to_1| (0..=PACKETS).map(move |to_0| (to_1, to_0))) {
            let case = format!("{to_1} requests and {to_0} responses arrive");
            run(selective, &case, move |to, index| index < [to_0, to_1][to]);
        }
    }
}

#[test]
fn remains__say_nothing_of_requests_that_were_kept_behind_a_gap() {
    for selective in [false, true] {
        for lost in 0..PACKETS {
            let case = format!("request packet {lost} is lost");
            run(selective, &case, move |to, index| to == 0 || index != lost);
        }
    }
}

#[test]
fn remains__are_kept_on_demand_and_taken_in_error() {
    let mut pair = Pair::new();
    fail(&mut pair, 0);
    assert_eq!(take(&mut pair, 0), None, "nobody asked for them");
    let now = pair.now;
    let qpn = pair.sides[0].qpn;
    assert!(
        !pair.sides[0].rnic.keep_remains(now, qpn),
        "it has failed already"
    );
    let uc = pair.create_qp(0, QpType::Uc);
    assert!(!pair.sides[0].rnic.keep_remains(now, uc));

    let side = &mut pair.sides[1];
    assert!(side.rnic.keep_remains(now, side.qpn));
    assert_eq!(side.rnic.take_remains(now, side.qpn), None, "it works");
    pair.modify(1, QpState::Error, &QpAttributes::default());
    let done = Done {
        expected: psn(0),
        refused: None,
        answers: Vec::new(),
    };
    let (mtu, sent) = (1024, Vec::new());
    assert_eq!(take(&mut pair, 1), Some(Remains { mtu, sent, done }));
    // In Reset they are forgotten.
    pair.modify(1, QpState::Reset, &QpAttributes::default());
    pair.modify(1, QpState::Error, &QpAttributes::default());
    assert_eq!(take(&mut pair, 1), None);
}

/// A request that a responder refuses.
fn refused(pair: &mut Pair) -> (u32, Option<(Psn, Status)>) {
    let done = take(pair, 1).unwrap().done;
    (done.expected.since(psn(0)) as u32, done.refused)
}

#[test]
fn remains__name_the_request_that_was_refused() {
    let mut pair = Pair::new();
    keep(&mut pair);
    pair.write(0, WRITTEN, 2500);
    let operation = Operation::Write {
        va: IOVA,
        rkey: RKey(0),
        imm: None,
    };
    let sges = pair.sides[0].sge(0, 2500);
    pair.post(0, operation, sges);
    pair.write(0, WRITTEN, 2500);
    pair.run();
    assert_eq!(refused(&mut pair), (3, Some((psn(3), Status::RemoteAccess))));
    let sent = take(&mut pair, 0).unwrap().sent;
    let psns: Vec<_> = sent.iter().map(|sent| sent.psns).collect();
    assert_eq!(psns, [Some((psn(3), 3)), Some((psn(6), 3))]);
}

#[test]
fn remains__name_a_read_whose_memory_is_gone_although_more_was_executed() {
    let mut pair = Pair::new();
    keep(&mut pair);
    let spec = RegionSpec {
        memory: Arc::new(HeapMemory::new(1 << 16)),
        memory_offset: 0,
        length: 1 << 16,
        iova: IOVA,
        access: ALL_ACCESS,
    };
    let pd = pair.sides[1].pd;
    let (lkey, rkey) = pair.sides[1].rnic.reg_mr(pd, spec).unwrap();
    pair.sides[0].memory.write(0, b"written").unwrap();
    let sges = pair.sides[0].sge(1 << 20, 2500);
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    pair.write(0, WRITTEN, 7);
    post(&mut pair, 1, Kind::FetchAdd);
    // Delivers the requests; responses are built in the next step.
    pair.step();
    pair.sides[1].rnic.dereg_mr(lkey).unwrap();
    pair.run();
    assert_eq!(refused(&mut pair), (5, Some((psn(0), Status::RemoteAccess))));
    let mut found = [0; 7];
    pair.sides[1].memory.read(WRITTEN, &mut found).unwrap();
    assert_eq!(&found, b"written");
    assert_eq!(word(&pair, COUNTER), 2);
    assert_eq!(pair.sides[0].completed()[0].1, Status::RemoteAccess);
}

/// Memory that gathers, and cannot be written.
#[derive(Debug)]
struct Broken;

impl Memory for Broken {
    fn len(&self) -> u64 {
        1 << 16
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Err(Fault::NoSpace)
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NoSpace)
    }

    fn gathers(&self) -> bool {
        true
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
fn remains__name_bytes_that_could_not_be_placed_although_they_count_as_executed() {
    let mut pair = Pair::new();
    pair.disable_trains();
    keep(&mut pair);
    let spec = RegionSpec {
        memory: Arc::new(Broken),
        memory_offset: 0,
        length: 1 << 16,
        iova: IOVA,
        access: ALL_ACCESS,
    };
    let pd = pair.sides[1].pd;
    let (_, rkey) = pair.sides[1].rnic.reg_mr(pd, spec).unwrap();
    pair.write(0, WRITTEN, 8);
    let (va, imm) = (IOVA, None);
    let sges = pair.sides[0].sge(0, 2500);
    pair.post(0, Operation::Write { va, rkey, imm }, sges);
    pair.run();
    assert_eq!(refused(&mut pair), (2, Some((psn(1), Status::RemoteOperation))));
}

#[test]
fn remains__name_a_flush_that_failed_and_are_unknown_while_one_runs() {
    for (also_runs, fails) in [(false, true), (true, true), (true, false)] {
        let mut pair = Pair::new();
        keep(&mut pair);
        let rkey = pair.slow_region(false, Err(Fault::NoSpace));
        pair.flush(rkey);
        if also_runs {
            pair.flush(rkey);
        }
        while pair.step() {}
        let rnic = &mut pair.sides[1].rnic;
        let jobs: Vec<_> = std::iter::from_fn(|| rnic.poll_flush()).collect();
        if fails {
            rnic.handle_flush(pair.now, jobs[0].id, Err(Fault::NoSpace));
        } else {
            fail(&mut pair, 1);
        }
        assert_eq!(pair.sides[1].state(), QpState::Error);
        let left = take(&mut pair, 1);
        if also_runs {
            assert_eq!(left, None);
        } else {
            let done = Done {
                expected: psn(1),
                refused: Some((psn(0), Status::RemoteOperation)),
                answers: vec![(psn(0), Answered::Failed)],
            };
            assert_eq!(left.unwrap().done, done);
        }
    }
}

#[test]
fn remains__count_what_a_ring_carried() {
    for (selective, lanes) in [(false, false), (true, false), (false, true), (true, true)] {
        for taken in 0..=3 {
            let mut host = Host::new(selective, lanes);
            keep(&mut host.pair);
            // Lanes were warmed by two SENDs.
            let first = 2 * u32::from(lanes);
            for (wr_id, at) in (0..3).map(|i| (10 + i, 4096 * i)) {
                host.pair.recv(1, wr_id, at, 4096);
                host.send(wr_id, at, 2000);
            }
            for _ in 0..taken {
                assert_eq!(host.take(false), Taken::Done);
            }
            for side in 0..2 {
                fail(&mut host.pair, side);
            }
            let sent = take(&mut host.pair, 0).unwrap().sent;
            let at = |i: u32| Some((psn(first + 2 * i), 2));
            let psns: Vec<_> = sent.iter().map(|sent| sent.psns).collect();
            assert_eq!(psns, [at(0), at(1), at(2)], "{selective} {lanes}");
            let done = take(&mut host.pair, 1).unwrap().done;
            assert_eq!(done.expected, psn(first + 2 * taken), "{selective} {lanes}");
            let received = host.pair.sides[1].completed();
            let received = received.iter().filter(|(_, status)| *status == Status::Success);
            assert_eq!(received.count(), taken as usize);
        }
    }
}

//! Failures of the queue pair between two nodes.

use super::super::recovery::{Evidence, Fate, fate};
use super::*;

impl World {
    /// Has the queue pair fail between two packets. A node's first request that had not completed has this status.
    pub(super) fn fail_queue_pair(&mut self, node: usize, status: Status) {
        self.is_ending = true;
        for at in 0..2 {
            // The ends of some are known.
            let known = self.dice.below(self.nodes[at].done.len() + 1);
            for _ in 0..known {
                let (sent, answer) = self.nodes[at].done.pop_front().unwrap();
                if let Some((list, bytes)) = answer {
                    self.scatter(at, &list, &bytes);
                }
                self.nodes[at]
                    .returned
                    .push_back((sent.post.number, Status::Success));
            }
            let it = &mut self.nodes[at];
            let done: Vec<Sent> = it.done.drain(..).map(|(sent, _)| sent).collect();
            let mut sent = Vec::new();
            let is_culprit = status != Status::RetryExceeded;
            let behind = done.len();
            for (n, one) in done.into_iter().chain(it.wire.drain(..)).enumerate() {
                let is_its = at == node && n == if is_culprit { behind } else { 0 };
                let its = if is_its { status } else { Status::Flushed };
                it.returned.push_back((one.post.number, its));
                let is_begun = one.executed > 0 || is_its || self.dice.one_in(2);
                sent.push(Unfinished {
                    wr_id: one.post.number,
                    psns: is_begun.then_some((one.first, one.count)),
                });
            }
            let executed = self.nodes[1 - at].psns.1;
            let it = &mut self.nodes[at];
            it.remains = Some(Remains {
                mtu: MTU,
                sent,
                done: Done {
                    expected: executed,
                    refused: it.refused.take(),
                    answers: it.answers.drain(..).collect(),
                },
            });
        }
    }

    /// Has a node see that the queue pair has failed.
    pub(super) fn notice(&mut self, node: usize) {
        let mux = &mut self.nodes[node].mux;
        match self.nodes[node].returned.pop_front() {
            Some((number, status)) => mux.handle_completion(number, status),
            None => mux.stop(),
        }
    }

    /// Has both ends learn what the other one has carried out.
    pub(super) fn carry_over(&mut self) {
        self.is_ending = false;
        let remains = [0, 1].map(|node| self.nodes[node].remains.take().unwrap());
        let handled = [0, 1].map(|node| self.nodes[node].mux.messages_handled());
        let first = self.dice.below(2);
        for node in [first, 1 - first] {
            let own = Some(remains[node].clone()).filter(|_| !self.has_ledger);
            let theirs = Some(remains[1 - node].done.clone());
            let psn = Psn::new(self.dice.next() as u32);
            let it = &mut self.nodes[node];
            it.buffers.clear();
            it.psns = (psn, psn);
            it.is_resumed = false;
            it.mux.carry_over(own, theirs, handled[1 - node]).unwrap();
            self.drain(node);
        }
    }

    pub(super) fn resume(&mut self, node: usize) {
        self.nodes[node].is_resumed = true;
        for post in self.nodes[node].mux.resume() {
            self.post(node, post);
        }
    }

    /// Checks the failure of a request that was in flight.
    pub(super) fn lost(&mut self, node: usize, at: usize, request: &SendRequest, status: Status) {
        let is_own = self.nodes[node].flows[at].failure == Some(Failure::Own);
        if is_own && !self.may_lose || self.has_region_that_goes(at) {
            return self.check_send(node, at, request.wr_id, status);
        }
        let seed = self.seed;
        let flow = &self.nodes[node].flows[at];
        assert!(self.may_lose || flow.is_doomed, "seed {seed}: {status:?}");
        assert_eq!(status, Status::RetryExceeded, "seed {seed}");
    }

    /// Has the queue pair fail, unless that would be the third time without progress.
    fn fail_now(&mut self) {
        let goes_on = |it: &Node| it.mux.barren.0 < 2 || it.mux.barren.1 != it.mux.completed();
        if !self.is_ending && self.nodes.iter().all(goes_on) {
            let node = self.dice.below(2);
            let status = [Status::RetryExceeded, Status::Flushed][self.dice.below(2)];
            self.fail_queue_pair(node, status);
        }
    }

    fn with_requests(seed: u64, connections: usize, requests: usize) -> World {
        let mut world = World::new(seed, connections, 16);
        for node in 0..2 {
            for at in 0..connections {
                (0..requests).for_each(|_| world.add_request(node, at));
            }
        }
        world
    }

    /// Takes so many steps. Returns false if it comes to an end.
    fn steps(&mut self, count: usize) -> bool {
        (0..count).all(|_| self.step())
    }
}

/// The queue pair fails at each step of a run.
#[test]
fn failure_at_any_step__no_application_notices() {
    for seed in runs(2) {
        let mut at = 0;
        loop {
            let mut world = World::with_requests(seed, 2, 6);
            let goes_on = world.steps(at);
            world.fail_now();
            world.run();
            if !goes_on {
                break;
            }
            at += 1 + at / 60;
        }
    }
}

/// Runs with failures of the queue pair all the time.
fn run_with_failures(world: &mut World) {
    // If the queue pair failed after each single step, it would never be used: no end resumes, and nothing is in flight whose failures count.
    let longest = 2 + world.dice.below(300);
    loop {
        let steps = world.dice.below(longest) + 1;
        if !world.steps(steps) {
            break;
        }
        world.fail_now();
    }
}

/// Queue pairs fail again and again, also while requests are posted anew.
#[test]
fn failures_in_a_row__no_application_notices() {
    for seed in runs(60) {
        let mut world = World::with_requests(seed, 4, 14);
        run_with_failures(&mut world);
        world.run();
    }
}

/// All connections send messages, with the fewest slots, over queue pairs that fail: credits begin anew.
#[test]
fn slots__suffice_after_failures() {
    for seed in runs(40) {
        let mut world = World::all_send(seed);
        run_with_failures(&mut world);
        world.run();
    }
}

/// A request reaches memory that fails, and the queue pair with it.
#[test]
fn culprit__is_the_only_one_with_an_error() {
    for seed in runs(150) {
        let mut world = World::with_requests(seed, 4, 8);
        world.nodes[0].flows[2].receives.clear();
        world.nodes[0].flows[2].recvs.clear();
        world.add_faulty_request(0, 2);
        (0..5).for_each(|_| {
            let wr_id = world.nodes[0].flows[2].sends.len() as u64;
            let request = SendRequest::new(
                Operation::Write {
                    va: base(2),
                    rkey: rkey(2),
                    imm: None,
                },
                Sge::new(base(2), 8, lkey(2)),
            );
            world.nodes[0].flows[2].to_post.push_back(request.wr_id(wr_id));
        });
        if seed % 2 == 0 {
            run_with_failures(&mut world);
        }
        world.run();
        for (node, it) in world.nodes.iter().enumerate() {
            for (at, flow) in it.flows.iter().enumerate() {
                let expected = usize::from((node, at) == (0, 2));
                assert_eq!(flow.caused, expected, "seed {seed}: {node}, {at}");
            }
        }
    }
}

/// An application ends while its queue pair fails.
#[test]
fn killed_connection__while_the_queue_pair_fails() {
    for seed in runs(80) {
        let mut world = World::with_requests(seed, 4, 12);
        let steps = world.dice.below(400);
        world.steps(steps);
        let first = world.dice.below(2);
        world.nodes.iter_mut().for_each(|it| it.flows[1].is_killed = true);
        if world.dice.one_in(2) {
            world.fail_now();
        }
        let id = world.nodes[first].flows[1].id;
        world.nodes[first].mux.abandon(id);
        world.drain(first);
        run_with_failures(&mut world);
        world.run_killed();
    }
}

/// Memory is deregistered while queue pairs fail: it goes, and nobody writes to it from then on.
#[test]
fn deregistration__while_queue_pairs_fail() {
    for seed in runs(120) {
        let mut world = World::with_regions_that_go(seed);
        let is_exact = seed % 3 > 0;
        (world.has_ledger, world.may_lose) = (!is_exact, !is_exact);
        run_with_failures(&mut world);
        world.run();
    }
}

/// Regions go before the peer has answered. If it still writes into one, the queue pair fails, and the connection whose memory it was has the error.
#[test]
fn deregistration__that_does_not_wait_for_the_peer() {
    let mut caused = 0;
    for seed in runs(200) {
        let mut world = World::with_regions_that_go(seed);
        world.is_impatient = true;
        world.run();
        for flows in world.nodes.iter().map(|it| &it.flows) {
            assert_eq!((flows[0].caused, flows[3].caused), (0, 0), "seed {seed}");
            caused += flows[1].caused + flows[2].caused;
        }
    }
    assert!(caused > 10 || has_seeds(), "{caused}");
}

/// An application ends with a connection and its memory while queue pairs fail.
#[test]
fn deregistration__of_a_killed_connection() {
    for seed in runs(120) {
        let mut world = World::with_regions_that_go(seed);
        let steps = world.dice.below(600);
        world.steps(steps);
        let owner = usize::from(world.nodes[1].flows[1].region != Region::Stays);
        world.nodes.iter_mut().for_each(|it| it.flows[1].is_killed = true);
        if world.dice.one_in(2) {
            world.fail_now();
        }
        let id = world.nodes[owner].flows[1].id;
        world.nodes[owner].mux.abandon(id);
        if world.nodes[owner].flows[1].region == Region::MayGo {
            world.deregister(owner, 1);
        }
        world.drain(owner);
        run_with_failures(&mut world);
        world.run_killed();
    }
}

/// Nobody knows what was carried out, but for messages: only what must not happen twice fails.
#[test]
fn ledger__fails_what_may_have_happened() {
    let mut lost = 0;
    for seed in runs(60) {
        let mut world = World::with_requests(seed, 4, 10);
        (world.has_ledger, world.may_lose) = (true, true);
        let steps = world.dice.below(500);
        world.steps(steps);
        world.fail_now();
        world.run();
        let flows = world.nodes.iter().flat_map(|it| &it.flows);
        lost += flows.filter(|flow| flow.has_failed).count();
    }
    assert!(lost > 0 || has_seeds());
}

/// Has a connection allow that a WRITE takes effect twice, and post nothing else that must not.
fn allow_replays(it: &mut Node, at: usize) {
    let flow = &mut it.flows[at];
    it.mux.connection(flow.id).unwrap().bound.replays_writes = true;
    let is_unique = |request: &SendRequest| {
        takes_slot(&request.operation) && !matches!(request.operation, Operation::Read { .. })
    };
    let ids: HashSet<u64> = flow
        .to_post
        .iter()
        .filter(|request| is_unique(request))
        .map(|request| request.wr_id)
        .collect();
    // An empty READ in place of each.
    for request in &mut flow.to_post {
        if ids.contains(&request.wr_id) {
            let read = Operation::Read {
                va: START,
                rkey: RKey(0),
            };
            *request = SendRequest::new(read, SgeList::EMPTY).wr_id(request.wr_id);
        }
    }
    for expected in &mut flow.sends {
        if ids.contains(&expected.wr_id) {
            (expected.own, expected.at_peer) = (Vec::new(), None);
        }
    }
}

#[test]
fn ledger__writes_are_replayed_where_that_is_allowed() {
    for seed in runs(40) {
        let mut world = World::with_requests(seed, 4, 14);
        world.has_ledger = true;
        for it in &mut world.nodes {
            (0..it.flows.len()).for_each(|at| allow_replays(it, at));
        }
        run_with_failures(&mut world);
        world.run();
    }
}

/// Beside connections that do not allow it.
#[test]
fn ledger__each_connection_decides_for_itself() {
    let mut lost = 0;
    for seed in runs(60) {
        let mut world = World::with_requests(seed, 4, 10);
        (world.has_ledger, world.may_lose) = (true, true);
        // The two ends of a connection have the same place, and fail together.
        for it in &mut world.nodes {
            [0, 2].iter().for_each(|at| allow_replays(it, *at));
        }
        let steps = world.dice.below(500);
        world.steps(steps);
        world.fail_now();
        world.run();
        for it in &world.nodes {
            let failed: Vec<_> = it.flows.iter().map(|flow| flow.has_failed).collect();
            assert!(!failed[0] && !failed[2], "seed {seed}: {failed:?}");
            lost += failed.iter().filter(|failed| **failed).count();
        }
    }
    assert!(lost > 0 || has_seeds());
}

/// A request whose cause nobody finds makes one queue pair after the other fail.
#[test]
fn third_failure_without_progress__fails_the_first_connection() {
    let mut world = World::new(1, 2, 16);
    for at in 0..2 {
        let own = world.allocate(0, at, 8);
        let request = Sge::new(own, 8, lkey(at));
        let va = world.allocate(1, at, 8);
        let write = Operation::Write {
            va,
            rkey: rkey(at),
            imm: None,
        };
        let it = &mut world.nodes[0];
        let request = SendRequest::new(write, request);
        let admission = it.mux.admit(it.flows[at].id, &request, 0, &mut it.keys);
        assert_eq!(admission, Admission::Wait(Wait::Key));
        world.answer_key(0);
        let it = &mut world.nodes[0];
        let posts = it
            .mux
            .send(it.flows[at].id, &request, (0, 8), true, at as u64, &mut it.keys);
        assert!(posts.unwrap().first.is_some());
    }
    let mux = &mut world.nodes[0].mux;
    for round in 0..3 {
        mux.handle_completion(0, Status::RetryExceeded);
        mux.handle_completion(1, Status::Flushed);
        assert!(mux.is_drained());
        let done = Done {
            expected: Psn::new(5),
            refused: None,
            answers: Vec::new(),
        };
        let remains = Remains {
            mtu: MTU,
            sent: Vec::new(),
            done: done.clone(),
        };
        mux.carry_over(Some(remains), Some(done), 0).unwrap();
        let numbers: Vec<u64> = mux.resume().iter().map(|post| post.number).collect();
        let expected: &[u64] = if round < 2 { &[0, 1] } else { &[1] };
        assert_eq!(numbers, expected);
    }
    let landed = std::iter::from_fn(|| mux.poll_event()).find_map(|event| match event {
        Event::Landed(tag, status) => Some((tag, status)),
        _ => None,
    });
    assert_eq!(landed, Some((0, Status::RetryExceeded)));
}

/// Requests that took effect, by their operation and by what is known.
#[test]
fn fate__of_each_operation() {
    let first = Psn::new(0xff_ffff);
    let piece = |request: Request, has_message| Piece {
        connection: None,
        request,
        progress: Progress::Back(Status::Flushed),
        is_fenced: false,
        has_message,
        ordinal: 7,
        tag: None,
    };
    let direct = |operation| piece(Request::Direct(operation, SgeList::EMPTY), false);
    let (va, rkey) = (0, RKey(1));
    let write = || Operation::Write { va, rkey, imm: None };
    let add = || Operation::FetchAdd { va, rkey, add: 1 };
    let flush = || Operation::Flush {
        va,
        rkey,
        length: 8,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    let message = |kind| {
        let header = Header {
            kind,
            is_solicited: false,
            destination: Qpn::new(1),
            source: Qpn::new(2),
            sequence: 0,
            length: 0,
            extra: Extra::None,
            emptied: 0,
        };
        piece(Request::Message(0, header, SgeList::EMPTY), false)
    };
    let exact = |packets: i32, answered: Option<Answered>| {
        let expected = Psn::new(first.value().wrapping_add_signed(packets));
        Evidence::Exact {
            sent: HashMap::from([(9, (first, 3))]),
            mtu: MTU,
            has_refused: false,
            done: Done {
                expected,
                refused: None,
                answers: answered.map(|answered| (first, answered)).into_iter().collect(),
            },
        }
    };
    let lost = Fate::Failed(Status::RetryExceeded);
    let read = || Operation::Read { va, rkey };
    let atomic_write = || Operation::AtomicWrite { va, rkey };
    for (piece, evidence, expected) in [
        (direct(write()), exact(-1, None), Fate::Again(0)),
        (direct(write()), exact(0, None), Fate::Again(0)),
        (direct(write()), exact(2, None), Fate::Again(2 * MTU)),
        (direct(write()), exact(3, None), Fate::Done),
        (direct(read()), exact(3, None), Fate::Again(0)),
        (direct(add()), exact(2, None), Fate::Again(0)),
        (
            direct(add()),
            exact(3, Some(Answered::Original(5))),
            Fate::Original(5),
        ),
        (direct(add()), exact(3, None), lost),
        (direct(flush()), exact(2, None), Fate::Again(0)),
        (direct(flush()), exact(3, Some(Answered::Done)), Fate::Done),
        (
            direct(flush()),
            exact(3, Some(Answered::Failed)),
            Fate::Failed(Status::RemoteOperation),
        ),
        (direct(flush()), exact(3, None), lost),
        (direct(atomic_write()), exact(2, None), Fate::Again(0)),
        (direct(atomic_write()), exact(3, Some(Answered::Done)), Fate::Done),
        (message(Kind::Send), exact(2, None), Fate::Again(0)),
        (message(Kind::Placed), exact(3, None), Fate::Done),
        (message(Kind::Slots), exact(0, None), Fate::Done),
        (direct(write()), Evidence::Ledger(8), Fate::Done),
        (direct(write()), Evidence::Ledger(7), lost),
        (
            piece(Request::Direct(write(), SgeList::EMPTY), true),
            Evidence::Ledger(7),
            Fate::Again(0),
        ),
        (direct(atomic_write()), Evidence::Ledger(8), Fate::Done),
        (direct(atomic_write()), Evidence::Ledger(7), lost),
        (direct(read()), Evidence::Ledger(8), Fate::Again(0)),
        (direct(add()), Evidence::Ledger(8), lost),
        (direct(flush()), Evidence::Ledger(8), lost),
        (message(Kind::Fail), Evidence::Ledger(8), Fate::Done),
        (message(Kind::Receives), Evidence::Ledger(7), Fate::Again(0)),
    ] {
        assert_eq!(
            fate(9, &piece, &evidence, false),
            expected,
            "{piece:?} {evidence:?}"
        );
        // Nothing of it was ever sent.
        let is_direct = matches!(piece.request, Request::Direct(..));
        if matches!(evidence, Evidence::Exact { .. }) && is_direct {
            assert_eq!(fate(10, &piece, &evidence, false), Fate::Again(0));
        }
    }
    let replayed = fate(9, &direct(write()), &Evidence::Ledger(7), true);
    assert_eq!(replayed, Fate::Again(0));
}

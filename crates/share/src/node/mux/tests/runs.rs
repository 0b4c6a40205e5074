//! Runs of the world: requests of all kinds, few slots, connections that fail or end, and anything from a peer.

use super::*;

/// Requests of all kinds and sizes, in both directions, on all connections.
#[test]
fn requests__as_on_queue_pairs_of_their_own() {
    for seed in runs(60) {
        let mut world = World::new(seed, 5, 16);
        for node in 0..2 {
            for at in 0..5 {
                (0..20).for_each(|_| world.add_request(node, at));
            }
        }
        world.run();
    }
}

impl World {
    /// All connections send messages, with the fewest slots.
    pub(super) fn all_send(seed: u64) -> World {
        let mut world = World::new(seed, 4, 8);
        for node in 0..2 {
            for at in 0..4 {
                for _ in 0..60 {
                    let expected = Expected {
                        byte_len: 8,
                        imm: Some(7),
                        ..world.expects(node, at, Status::Success, WcOpcode::Send)
                    };
                    let bytes = world.dice.bytes(8);
                    world.add_receive(1 - node, at, &expected, Some(&bytes), Some(7));
                    let request = SendRequest::new(Operation::Send { imm: Some(7) }, SgeList::inline(&bytes));
                    world.add(node, at, request, expected);
                }
            }
        }
        world
    }
}

/// All connections send messages in both directions as fast as they can, with the fewest slots: nobody waits for ever.
#[test]
fn slots__suffice_when_all_send() {
    for seed in runs(40) {
        let mut world = World::all_send(seed);
        world.run();
        assert!(world.nodes[0].messages >= 240);
    }
}

/// A connection that takes all slots whenever there are any leaves some to others.
#[test]
fn admit__a_connection_that_has_had_a_slot_waits_behind_others() {
    let mut world = World::new(1, 2, 16);
    let ids = [0, 1].map(|at| world.nodes[0].flows[at].id);
    for at in 0..2 {
        let (id, list) = (world.nodes[1].flows[at].id, Sge::new(base(at), 8, lkey(at)));
        for _ in 0..1024 {
            let receive = RecvRequest {
                wr_id: 0,
                sges: list.into(),
            };
            world.nodes[1].mux.post_recv(id, receive).unwrap();
        }
    }
    // All messages of one node are carried out and looked at.
    let exchange = |world: &mut World, node: usize| {
        while let Some(post) = {
            let it = &mut world.nodes[node];
            it.mux.poll_message(&mut it.keys)
        } {
            world.post(node, post);
        }
        while !world.nodes[node].wire.is_empty() {
            world.carry_out(node);
        }
        while let Some((sent, _)) = world.nodes[node].done.pop_front() {
            let number = sent.post.number;
            world.nodes[node].mux.handle_completion(number, Status::Success);
        }
        let it = &mut world.nodes[1 - node];
        while let Some(message) = it.inbox.pop_front() {
            it.mux.handle_message(&message, &mut it.keys).unwrap();
        }
    };
    exchange(&mut world, 1);
    let request = SendRequest::new(Operation::Send { imm: None }, SgeList::inline(&[0; 8]));
    let mut sent = [0, 0];
    for _ in 0..8 {
        // The first one asks first, and goes on as long as it may.
        for (at, id) in ids.into_iter().enumerate() {
            loop {
                let it = &mut world.nodes[0];
                match it.mux.admit(id, &request, 0, &mut it.keys) {
                    Admission::Post(_) => {}
                    other => {
                        assert_eq!(other, Admission::Wait(Wait::Slot));
                        break;
                    }
                }
                let posts = it.mux.send(id, &request, (0, 8), true, 0, &mut it.keys).unwrap();
                world.post(0, posts.first.unwrap());
                sent[at] += 1;
            }
        }
        exchange(&mut world, 0);
        exchange(&mut world, 1);
        let mut woken = Vec::new();
        while let Some(event) = world.nodes[0].mux.poll_event() {
            if let Event::Wake(id) = event {
                woken.push(id);
            }
        }
        assert_eq!(woken, [ids[1], ids[0]]);
    }
    assert!(sent[0] > 0);
}

/// One connection fails by what it asks for. Both of its ends have the errors that they would have otherwise, and no other connection notices.
#[test]
fn bad_requests__fail_their_connection_alone() {
    for seed in runs(120) {
        let mut world = World::new(seed, 4, 16);
        for node in 0..2 {
            for at in 0..4 {
                (0..10).for_each(|_| world.add_request(node, at));
            }
        }
        // Without requests of its own, the other end notices only what it is told.
        world.nodes[0].flows[2].receives.clear();
        world.nodes[0].flows[2].recvs.clear();
        world.nodes[1].flows[2].to_post.clear();
        world.nodes[1].flows[2].sends.clear();
        world.add_bad_request(0, 2);
        (0..5).for_each(|_| {
            let wr_id = world.nodes[0].flows[2].sends.len() as u64;
            let request = SendRequest::send(SgeList::EMPTY).wr_id(wr_id);
            world.nodes[0].flows[2].to_post.push_back(request);
        });
        world.run();
    }
}

/// An application that ends while its requests are in flight.
#[test]
fn killed_connection__leaves_the_others_alone() {
    for seed in runs(80) {
        let mut world = World::new(seed, 4, 16);
        for node in 0..2 {
            for at in 0..4 {
                (0..12).for_each(|_| world.add_request(node, at));
            }
        }
        for _ in 0..world.dice.below(400) {
            world.step();
        }
        let first = world.dice.below(2);
        for node in [first, 1 - first] {
            // Its peer's requests fail, or are in flight: nobody looks at either here.
            let it = &mut world.nodes[node];
            it.flows[1].is_killed = true;
        }
        let id = world.nodes[first].flows[1].id;
        world.nodes[first].mux.abandon(id);
        world.drain(first);
        for _ in 0..world.dice.below(200) {
            world.step();
        }
        world.run_killed();
    }
}

impl World {
    /// Runs with an end of connection 1 left alone, and then leaves the other one.
    pub(super) fn run_killed(&mut self) {
        for node in 0..2 {
            let id = self.nodes[node].flows[1].id;
            self.nodes[node].mux.abandon(id);
            self.drain(node);
        }
        self.run();
        for node in &mut self.nodes {
            assert!(node.flows[1].has_ended);
            assert_eq!(node.mux.connections(), 3);
            // The same QPNs can be connected again, those of another connection cannot.
            let bound = node.mux.connection(node.flows[0].id).unwrap().bound;
            let names = Bound {
                own: Qpn::new(bound.own.value() + 1),
                peer: Qpn::new(bound.peer.value() + 1),
                ..bound
            };
            assert!(node.mux.bind(bound, Receiver::new(1)).is_err());
            assert!(node.mux.bind(names, Receiver::new(1)).is_ok());
        }
    }
}

impl World {
    /// Applications deregister the memory of two connections, at one end or the other. All connections have requests.
    pub(super) fn with_regions_that_go(seed: u64) -> World {
        let mut world = World::new(seed, 4, 16);
        for at in [1, 2] {
            let node = world.dice.below(2);
            world.region_may_go(node, at);
        }
        for node in 0..2 {
            for at in [0, 3] {
                (0..10).for_each(|_| world.add_request(node, at));
            }
        }
        world
    }
}

/// The memory of a connection is deregistered while the peer sends into it and its own requests use it. Each deregistration has an end, behind which
/// nobody accesses the memory, and no other connection notices.
#[test]
fn withdraw__nobody_uses_the_region_any_more() {
    let (mut used, mut refused, mut sent) = (0, 0, 0);
    for seed in runs(200) {
        let mut world = World::with_regions_that_go(seed);
        world.run();
        for flow in world.nodes.iter().flat_map(|it| &it.flows[1..3]) {
            refused += usize::from(flow.failure == Some(Failure::Receive(Status::LocalProtection)));
            sent += flow.done.0;
        }
        used += world.used;
    }
    assert!(
        has_seeds() || used > 100 && refused > 50 && sent > 1000,
        "{used} {refused} {sent}"
    );
}

/// The shared queue pair ends for good while a region goes: nobody uses it any more.
#[test]
fn close__ends_the_uses_of_regions() {
    for seed in runs(80) {
        let mut world = World::with_regions_that_go(seed);
        for _ in 0..world.dice.below(500) {
            world.step();
        }
        for node in 0..2 {
            let mux = &mut world.nodes[node].mux;
            mux.close();
            let released = std::iter::from_fn(|| mux.poll_event());
            let released = released.filter_map(|event| match event {
                Event::Released(rkey) => Some(rkey),
                _ => None,
            });
            let released: Vec<RKey> = released.collect();
            for at in [1, 2] {
                let own = (lkey(at), rkey(at));
                let count = released.iter().filter(|other| **other == own.1).count();
                match world.nodes[node].flows[at].region {
                    Region::Goes(uses) => assert_eq!(uses, count, "seed {seed}"),
                    _ => assert_eq!(count, 0, "seed {seed}"),
                }
                let shared = (LKey(own.0.0 | SHADOW), RKey(own.1.0 | SHADOW));
                let mux = &mut world.nodes[node].mux;
                mux.release(own.1);
                assert!(mux.poll_event().is_none());
                assert_eq!(mux.withdraw(domain(node, at), own, shared, true), 0);
            }
        }
    }
}

/// The shared queue pair fails: every request has one completion, and every connection fails.
#[test]
fn failure_of_the_queue_pair__ends_every_request_once() {
    for seed in runs(40) {
        let mut world = World::new(seed, 3, 16);
        for node in 0..2 {
            for at in 0..3 {
                (0..12).for_each(|_| world.add_request(node, at));
            }
        }
        for _ in 0..world.dice.below(400) {
            world.step();
        }
        let it = &mut world.nodes[0];
        it.mux.close();
        assert_eq!(it.mux.posted(), it.mux.completed());
        let (mut failed, mut landed) = (HashSet::new(), HashSet::new());
        while let Some(event) = it.mux.poll_event() {
            match event {
                Event::Landed(tag, status) => {
                    let at = (tag >> 40) as usize;
                    it.flows[at].in_flight -= 1;
                    // A piece that had only waited for others has succeeded as long as none of its connection has failed.
                    let expected = match landed.contains(&at) {
                        false if status == Status::Success => Status::Success,
                        false => Status::RetryExceeded,
                        true => Status::Flushed,
                    };
                    assert_eq!(status, expected);
                    if status != Status::Success {
                        landed.insert(at);
                    }
                }
                Event::Received(id, completion) => {
                    let flow = it.flows.iter_mut().find(|flow| flow.id == id).unwrap();
                    assert_eq!(completion.wr_id, 1_000_000 + flow.done.1 as u64);
                    assert_eq!(completion.status, Status::Flushed);
                    flow.done.1 += 1;
                }
                Event::Failed(id, failure) => {
                    assert_eq!(failure, Failure::Shared);
                    assert!(failed.insert(id));
                }
                Event::Wake(_) | Event::Answer(..) => {}
                Event::Culprit(_) => panic!("no memory fails"),
                Event::Released(_) => panic!("no memory goes"),
                Event::Ended(_) => panic!("nobody left it"),
            }
        }
        assert!(it.flows.iter().all(|flow| flow.in_flight == 0));
        assert_eq!(failed.len(), 3);
        assert!(it.mux.poll_message(&mut it.keys).is_none());
        let id = it.flows[0].id;
        let request = SendRequest::send(SgeList::EMPTY);
        let admission = it.mux.admit(id, &request, 0, &mut it.keys);
        assert_eq!(admission, Admission::Wait(Wait::Failed));
        it.flows
            .iter()
            .map(|flow| flow.id)
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|id| it.mux.abandon(id));
        assert_eq!(it.mux.connections(), 0);
    }
}

/// A peer's node that sends anything, and ends of pieces that were never posted.
#[test]
fn anything__is_refused_or_ignored() {
    let mut refused = 0;
    for seed in runs(60) {
        let mut world = World::new(seed, 3, 16);
        for node in 0..2 {
            for at in 0..3 {
                (0..12).for_each(|_| world.add_request(node, at));
            }
        }
        let mut steps = world.dice.below(300);
        while steps > 0 && world.step() {
            steps -= 1;
        }
        for _ in 0..400 {
            let mut message = match world.nodes[0].inbox.len() {
                0 => vec![0; HEADER_LEN],
                len => world.nodes[0].inbox[world.dice.below(len)].clone(),
            };
            for _ in 0..world.dice.below(4) {
                let at = world.dice.below(message.len().min(64));
                message[at] = [0, 1, 2, 3, 6, 7, 8, world.dice.next() as u8][world.dice.below(8)];
            }
            let number = world.dice.below(600) as u64;
            let it = &mut world.nodes[0];
            if it.mux.handle_message(&message, &mut it.keys).is_err() {
                refused += 1;
            }
            it.mux.handle_completion(number, Status::Success);
            while it.mux.poll_message(&mut it.keys).is_some() {}
            while it.mux.poll_event().is_some() {}
        }
        let it = &mut world.nodes[0];
        it.mux.close();
        assert_eq!(it.mux.posted(), it.mux.completed());
    }
    assert!(has_seeds() || refused > 1000);
}

/// A connection whose peer's end is never bound ends all the same, and nobody answers an answer.
#[test]
fn answer_strays__of_queue_pairs_that_are_never_bound() {
    let mut world = World::new(1, 1, 16);
    let id = world.nodes[0].flows[0].id;
    world.nodes[1].mux = Mux::new(16);
    world.nodes[0].mux.abandon(id);
    let mut passed = Vec::new();
    // More turns than messages that may pass.
    for turn in 0..8 {
        let from = turn % 2;
        let it = &mut world.nodes[from];
        let mut messages = Vec::new();
        while let Some(post) = it.mux.poll_message(&mut it.keys) {
            it.mux.handle_completion(post.number, Status::Success);
            if let Posted::Message { header, body, .. } = post.request {
                messages.push([&header[..], body.as_inline().unwrap_or_default()].concat());
            }
        }
        let it = &mut world.nodes[1 - from];
        for message in messages {
            let (header, _) = Header::parse(&message).unwrap();
            passed.push((from, header.kind, header.extra));
            it.mux.handle_message(&message, &mut it.keys).unwrap();
        }
        // As long as it may be bound, its messages wait.
        it.mux
            .answer_strays(|own, peer| turn < 2 && (own, peer) == (names(1 - from, 0), names(from, 0)));
    }
    let end = |from, status| (from, Kind::Fail, Extra::Status(status));
    assert_eq!(
        passed,
        [
            end(0, CompletionStatus::RetryExceeded),
            end(1, CompletionStatus::Flushed)
        ]
    );
    assert_eq!(world.nodes[0].mux.connections(), 0);
}

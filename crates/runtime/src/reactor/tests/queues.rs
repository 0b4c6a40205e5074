//! Completion queues of a pool, and private ones.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

/// Returns what the connections of a reactor have reserved: completions, and the number of shares, by queue.
fn reserved<M>(reactor: &Reactor<M>) -> Vec<(u32, u32)> {
    let pool = reactor.ports[0].queues.pool().expect("a pool");
    let usage = pool.usage().into_iter().filter(|queue| queue.vector == 0);
    usage.map(|queue| (queue.used, queue.users)).collect()
}

#[test]
fn listen_together__sixty_four_connections_need_one_queue_for_each_reactor() {
    let address: SocketAddr = "127.0.12.50:7174".parse().unwrap();
    let limits = limits(32);
    let new = |_| Reactor::<()>::new(SIZES, limits.clone(), None).unwrap();
    let mut reactors: Vec<_> = (0..2).map(new).collect();
    let device = open(address.ip()).unwrap();
    Reactor::listen_together(&mut reactors, &device, address.port()).unwrap();
    let pool = reactors[0].ports[0].queues.pool().unwrap().clone();
    let engines: Vec<Device> = reactors
        .iter()
        .flat_map(|reactor| reactor.devices().cloned())
        .collect();
    let served: Vec<_> = reactors.into_iter().map(Echo::of).collect();
    let mut peers: Vec<Peer> = (0..64).map(|_| Peer::connect(address).unwrap()).collect();
    for peer in &mut peers {
        peer.send_soon(b"one of many");
    }
    for peer in &mut peers {
        assert_eq!(peer.message().unwrap(), b"one of many");
    }
    let common = 32 + limits.shared_receives.unwrap() as u32;
    let full = 32 * SIZES.completions() as u32 + common;
    let usage = pool.usage();
    let used: Vec<_> = usage
        .iter()
        .map(|queue| (queue.vector, queue.used, queue.users))
        .collect();
    assert_eq!(used, [(0, full, 33), (1, full, 33)]);
    assert!(usage.iter().all(|queue| queue.size == full), "{usage:?}");
    let queues = engines.iter().map(|engine| engine.object_counts().2);
    assert_eq!(queues.collect::<Vec<_>>(), [1, 1]);
    drop(peers);
    served.into_iter().for_each(|server| drop(server.stop()));
}

#[test]
fn close__gives_the_share_of_the_queue_back() {
    for shared_receives in [0, 2] {
        let mut both = Both::new("127.0.12.51:7174", SIZES, shared_receives);
        let of_port = reserved(&both.server);
        assert_eq!(of_port, [(4 + shared_receives as u32, 1)]);
        let nr = SIZES.completions() as u32;
        for _ in 0..3 {
            let [there, here] = both.connect();
            assert_eq!(reserved(&both.server), [(of_port[0].0 + nr, 2)]);
            assert_eq!(reserved(&both.client), [(PEER_SIZES.completions() as u32, 1)]);
            both.client.close(here, None);
            assert_eq!(reserved(&both.client), [(0, 0)]);
            both.wait_ended(there);
            both.server.close(there, None);
            while both.server.ports[0].connections > 0 {
                assert!(both.server.poll().is_none());
            }
            assert_eq!(reserved(&both.server), of_port);
        }
    }
}

#[test]
fn connect__of_nobody_gives_the_share_of_the_queue_back() {
    let (mut client, device) = dialer("127.0.12.52", 2, None);
    for closes in [false, true] {
        let to = "127.0.12.53:7174".parse().unwrap();
        let id = client.connect(&device, to, &ConnectParams::default()).unwrap();
        assert_eq!(reserved(&client)[0].1, 1);
        match closes {
            true => client.close(id, None),
            false => assert!(matches!(next(&mut client), ReactorEvent::Connected(_, Err(_)))),
        }
        assert_eq!(reserved(&client), [(0, 0)]);
    }
}

#[test]
fn next__connections_with_queues_of_their_own_are_served_in_turn() {
    let address = "127.0.12.54:7174".parse().unwrap();
    for shared_receives in [None, Some(2)] {
        let limits = Limits {
            shared_receives,
            queues: Queues::Private,
            ..limits(8)
        };
        let reactor = reactor_of(address, SIZES, limits);
        let device = reactor.devices().next().unwrap().clone();
        let server = Echo::of(reactor);
        let mut peers: Vec<Peer> = (0..8).map(|_| Peer::connect(address).unwrap()).collect();
        assert_eq!(device.object_counts().2, 8);
        for round in 0..50u32 {
            for peer in &mut peers {
                peer.send_soon(&round.to_be_bytes());
            }
            for peer in &mut peers {
                assert_eq!(peer.message().unwrap(), round.to_be_bytes());
            }
        }
        // One that ends takes its queue along, and its place is free.
        peers.pop().unwrap().link.close(LONG);
        let mut again = Peer::connect_soon(address);
        again.send_soon(b"again");
        assert_eq!(again.message().unwrap(), b"again");
        assert_eq!(device.object_counts().2, 8);
        drop((peers, again));
        let ends = server.stop();
        assert!(!ends.is_empty());
    }
}

#[test]
fn ended__a_connection_with_more_completions_than_it_reserves_ends_alone() {
    let mut both = Both::new("127.0.12.55:7174", SIZES, 2);
    let [_, stays] = both.connect();
    let [there, here] = both.connect();
    // Writes of nothing, many more than the connection has room for, whose completions nobody handles meanwhile.
    let device = both.device.clone();
    let write = Operation::Write {
        va: 0,
        rkey: RKey(0),
        imm: None,
    };
    let culprit = both.client.connection(here).unwrap();
    let began = Instant::now();
    while culprit.qp().error().is_none() {
        assert!(began.elapsed() < LONG, "nothing has failed");
        let _ = culprit.post(0, write.clone(), SgeList::EMPTY);
        device.progress();
    }
    let mut done = 0;
    let end = loop {
        match next(&mut both.client) {
            ReactorEvent::Completed(of, Completed::Operation(_)) => {
                assert_eq!(of, here);
                done += 1;
            }
            ReactorEvent::Ended(of, end) => {
                assert_eq!(of, here);
                break end;
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(end, ConnectionEnd::Failed(Status::LocalQpOperation));
    assert_eq!(done, PEER_SIZES.completions());
    both.client.close(here, None);
    assert_eq!(both.client.ports[0].connections, 1);
    both.wait_ended(there);
    both.send(stays, b"still there");
}

#[test]
fn accept__a_connection_shares_receives_in_whichever_queue_it_is() {
    let mut both = Both::new("127.0.12.57:7174", SIZES, 2);
    let mut connected: Vec<_> = (0..4).map(|_| both.connect()).collect();
    let write = Operation::Write {
        va: 0,
        rkey: RKey(0),
        imm: None,
    };
    for queues in [2, 2] {
        // The completions of one that has overrun its share, which is closed before they are polled, take room in the queue.
        let [there, here] = connected.remove(0);
        let device = both.server.ports[0].device.clone();
        let overruns = both.server.connection(there).unwrap();
        let began = Instant::now();
        while overruns.qp().error().is_none() {
            assert!(began.elapsed() < LONG, "nothing has failed");
            let _ = overruns.post(0, write.clone(), SgeList::EMPTY);
            device.progress();
        }
        both.server.close(there, None);
        both.client.close(here, None);
        let params = ConnectParams::default();
        let here = both.client.connect(&both.device, both.address, &params).unwrap();
        let request = loop {
            assert!(began.elapsed() < LONG, "no request");
            match both.server.poll_others() {
                Some(ReactorEvent::Request(request)) => break request,
                None => std::thread::yield_now(),
                other => panic!("{other:?}"),
            }
        };
        let there = both.server.accept(request, &params).unwrap();
        assert!(both.server.connection(there).unwrap().shares_receives());
        assert_eq!(reserved(&both.server).len(), queues);
        assert!(matches!(next(&mut both.client), ReactorEvent::Connected(of, Ok(())) if of == here));
        connected.push([there, here]);
        for [there, here] in &connected {
            for round in 0..SIZES.receives as u8 {
                both.send(*here, &[round]);
            }
            for round in 0..SIZES.receives as u8 {
                let slot = both.receive(*there, &[round]);
                both.server.connection(*there).unwrap().give_back(slot);
            }
        }
        assert!(both.server.poll().is_none());
        assert_eq!(posted_receives(&both.server), 6, "none is lost");
        let pool = both.server.ports[0].queues.pool().unwrap();
        let usage = pool.usage();
        assert!(usage.iter().all(|queue| queue.used <= queue.size), "{usage:?}");
    }
    for [there, here] in connected {
        both.client.close(here, None);
        both.wait_ended(there);
        both.server.close(there, None);
    }
    while both.server.ports[0].connections > 0 {
        both.server.poll();
    }
    assert_eq!(reserved(&both.server), [(6, 1); 2]);
}

/// The test binary runs this again in a process of its own, whose limit of descriptors it lowers.
#[test]
fn next__after_an_error_no_queue_reports() {
    if std::env::var_os("RDMUX_RUNTIME_ALONE").is_none() {
        let name = "reactor::tests::queues::next__after_an_error_no_queue_reports";
        let alone = std::process::Command::new("/proc/self/exe")
            .args(["--exact", name, "--nocapture"])
            .env("RDMUX_RUNTIME_ALONE", "1")
            .output()
            .unwrap();
        assert!(
            alone.status.success(),
            "{}",
            String::from_utf8_lossy(&alone.stderr)
        );
        return;
    }
    let mut both = Both::new("127.0.12.56:7174", SIZES, 2);
    let [there, here] = both.connect();
    while both.server.poll().is_some() {}
    let limit = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..limit
    };
    setrlimit(Resource::Nofile, none).unwrap();
    // A process must not wait for more descriptors than it may have.
    let error = both.server.next(Some(Instant::now() + LONG)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    setrlimit(Resource::Nofile, limit).unwrap();
    both.send(here, b"brought by the device's thread");
    let queue = both.server.ports[0].queues.all().next().unwrap();
    let mut fds = [PollFd::new(queue, PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(0));
    both.receive(there, b"brought by the device's thread");
}

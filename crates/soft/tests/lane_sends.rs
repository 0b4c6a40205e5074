//! SENDs within a host by several threads, most of them without the engine's lock: whoever polls takes the messages of all queue pairs of
//! its process, and ends their requests.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::{
    LONG, Pair, Random, Talked, Talker, Turns, nothing_is_left, open, open_with, pair, pairs, seed,
};
use rdmux_soft::capture::{self, Filter};
use rdmux_verbs::resources::DeviceAt;
use rdmux_verbs::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn talkers(pairs: &[Pair], seed: u64, count: u64) -> (Vec<Talker<'_>>, Vec<Talker<'_>>) {
    println!("seed {seed:#x}");
    let mut random = Random(seed);
    let make = |(client, server, _)| {
        let turns = match random.below(2) {
            0 => [Turns::Stream, Turns::Stream],
            _ => [Turns::First, Turns::Second],
        };
        let [a, b] = Talker::pair([client, server], random.next(), turns, count);
        (a, b)
    };
    pairs.iter().map(|(a, b, held)| (a, b, held)).map(make).unzip()
}

/// Runs talkers in one thread.
fn run_together<'a>(mut talkers: Vec<Talker<'a>>) {
    let deadline = Instant::now() + LONG;
    while talkers.iter().any(|talker| !talker.is_done()) {
        let mut any = false;
        for talker in &mut talkers {
            any |= talker.step();
        }
        if !any {
            thread::yield_now();
        }
        let state = || talkers.iter().map(Talker::state).collect::<Vec<_>>();
        assert!(Instant::now() < deadline, "{:#?}", state());
    }
}

#[test]
fn send__by_two_threads_with_a_queue_pair_each() {
    let pairs = pairs([127, 0, 76, 1], 2);
    let (clients, servers) = talkers(&pairs, seed(), 3_000);
    thread::scope(|scope| {
        for talker in clients.into_iter().chain(servers) {
            scope.spawn(move || talker.run());
        }
    });
    nothing_is_left(&pairs);
}

/// Four threads on one side of the link, and on the other one thread for all.
#[test]
fn send__by_four_threads_with_a_queue_pair_each() {
    let pairs = pairs([127, 0, 76, 2], 4);
    let (clients, servers) = talkers(&pairs, seed(), 2_000);
    thread::scope(|scope| {
        for talker in clients {
            scope.spawn(move || talker.run());
        }
        scope.spawn(move || run_together(servers));
    });
    nothing_is_left(&pairs);
}

/// One thread for both ends of the link.
#[test]
fn send__by_one_thread_to_itself() {
    let pairs = pairs([127, 0, 76, 3], 2);
    let (mut clients, mut servers) = talkers(&pairs, seed(), 2_000);
    clients.append(&mut servers);
    run_together(clients);
    nothing_is_left(&pairs);
}

/// Two threads post to one queue pair, a third one polls its queue, and a fourth one receives.
#[test]
fn send__by_two_threads_to_one_queue_pair() {
    const EACH: u64 = 10_000;
    const ROOM: u64 = 16;
    let pairs = pairs([127, 0, 76, 4], 1);
    let (client, server, _) = &pairs[0];
    let done = [AtomicU64::new(0), AtomicU64::new(0)];
    let deadline = Instant::now() + LONG;
    let (done, deadline) = (&done, &deadline);
    let late = |what: &str| assert!(Instant::now() < *deadline, "{what}: {done:?}");
    thread::scope(|scope| {
        for poster in 0..2_u64 {
            scope.spawn(move || {
                for n in 0..EACH {
                    while n >= done[poster as usize].load(Ordering::Acquire) + ROOM {
                        late("room");
                        thread::yield_now();
                    }
                    let number = poster << 32 | n;
                    let at = (poster * ROOM + n % ROOM) * 64;
                    client.memory.write(at, &number.to_ne_bytes()).unwrap();
                    let request = SendRequest::send(client.mr.sge(at, 8 + (n % 57) as u32));
                    client.qp.post_send(request.wr_id(number).signaled()).unwrap();
                }
            });
        }
        scope.spawn(move || {
            let mut next = [0; 2];
            while next != [EACH; 2] {
                let Some(wc) = client.cq.poll() else {
                    late("completions");
                    thread::yield_now();
                    continue;
                };
                let poster = (wc.wr_id >> 32) as usize;
                assert_eq!(wc.status, Status::Success);
                assert_eq!(wc.wr_id & 0xffff_ffff, next[poster], "of poster {poster}");
                next[poster] += 1;
                done[poster].store(next[poster], Ordering::Release);
            }
        });
        scope.spawn(move || {
            let post = |n: u64| {
                let sges = server.mr.sge(n % 64 * 64, 64);
                server.qp.post_recv(RecvRequest::new(n, sges)).unwrap();
            };
            (0..64).for_each(post);
            let mut next = [0; 2];
            for n in 0..2 * EACH {
                let wc = loop {
                    match server.cq.poll() {
                        Some(wc) => break wc,
                        None => thread::yield_now(),
                    }
                    late("messages");
                };
                assert_eq!((wc.status, wc.wr_id), (Status::Success, n));
                let number = server.word(n % 64 * 64);
                let poster = (number >> 32) as usize;
                assert_eq!(number & 0xffff_ffff, next[poster], "of poster {poster}");
                assert_eq!(u64::from(wc.byte_len), 8 + next[poster] % 57);
                next[poster] += 1;
                post(n + 64);
            }
            assert_eq!(next, [EACH; 2]);
        });
    });
    nothing_is_left(&pairs);
}

/// How a thread sleeps until something has completed.
#[derive(Clone, Copy, Debug)]
enum Sleep {
    Wait,
    Descriptor,
}

impl Sleep {
    /// Sleeps until there is a completion.
    #[track_caller]
    fn until_completion(self, cq: &CompletionQueue) -> WorkCompletion {
        match self {
            Sleep::Wait => cq.wait(LONG).unwrap().expect("a completion"),
            Sleep::Descriptor => loop {
                cq.arm(Arm::Next);
                if let Some(wc) = cq.poll() {
                    return wc;
                }
                let fd = cq.as_fd();
                let timeout = Timespec::try_from(LONG).unwrap();
                let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
                assert_eq!(ready.unwrap(), 1, "nobody has woken the sleeper");
                cq.take_event();
            },
        }
    }
}

/// Spends some time, seldom more than the lease of 2 ms after which callers are no longer trusted to come back. Time itself is meant: the
/// threads are to meet in any order, and no result depends on which.
fn dawdle(random: &mut Random) {
    match random.below(64) {
        0 => thread::sleep(Duration::from_micros(2_500)),
        1..8 => thread::sleep(Duration::from_micros(random.below(200))),
        _ => (0..random.below(2_000)).for_each(|_| std::hint::spin_loop()),
    }
}

/// Two threads send to each other and sleep until there is an answer, and until their own requests have ended. Beside each of them spins a
/// thread with another queue of the device, which takes their messages.
fn sleeps_beside_a_spinner(address: [u8; 4], sleep: Sleep) {
    const ROUNDS: u64 = 1_500;
    let seed = seed();
    println!("seed {seed:#x}");
    let pairs = pairs(address, 2);
    let (spinning, sleeping) = (&pairs[0], &pairs[1]);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for end in [&spinning.0, &spinning.1] {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(end.cq.poll(), None);
                    thread::yield_now();
                }
            });
        }
        let ends = [(&sleeping.0, true), (&sleeping.1, false)];
        let both = ends.map(|(end, begins)| {
            scope.spawn(move || {
                let mut random = Random(seed ^ u64::from(begins));
                let post = |n| end.qp.post_recv(RecvRequest::new(n, end.mr.sge(0, 4096)));
                (0..2).for_each(|n| post(n).unwrap());
                let send = |n: u64, bytes| {
                    let request = SendRequest::send(end.mr.sge(8192, bytes)).wr_id(n).signaled();
                    end.qp.post_send(request.imm(n as u32)).unwrap();
                    assert_eq!(sleep.until_completion(&end.cq).wr_id, n, "{sleep:?}");
                };
                for n in 0..ROUNDS {
                    let bytes = [8, 3000][random.below(2) as usize];
                    if begins {
                        dawdle(&mut random);
                        send(n, bytes);
                    }
                    let wc = sleep.until_completion(&end.recv_cq);
                    assert_eq!((wc.status, wc.imm), (Status::Success, Some(n as u32)));
                    post(n + 2).unwrap();
                    if !begins {
                        dawdle(&mut random);
                        send(n, bytes);
                    }
                }
            })
        });
        let ended = both.map(thread::ScopedJoinHandle::join);
        stop.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok), "{sleep:?}: {ended:?}");
    });
}

#[test]
fn wait__beside_a_thread_that_spins() {
    sleeps_beside_a_spinner([127, 0, 76, 5], Sleep::Wait);
}

#[test]
fn fd__beside_a_thread_that_spins() {
    sleeps_beside_a_spinner([127, 0, 76, 6], Sleep::Descriptor);
}

/// A thread spins until it has taken so many messages, and then never polls again: the requests of all messages end, and their sleeping
/// sender is woken.
#[test]
fn send__ends_though_the_receiver_polls_no_more() {
    let seed = seed();
    println!("seed {seed:#x}");
    let mut random = Random(seed);
    let pairs = pairs([127, 0, 76, 7], 1);
    let (client, server, _) = &pairs[0];
    let (go, begins) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            for (round, sends, bytes, sleep) in begins {
                let sleep: Sleep = sleep;
                for n in 0..sends {
                    let request = SendRequest::send(client.mr.sge(0, bytes)).wr_id(n);
                    let is_last = n + 1 == sends;
                    client
                        .qp
                        .post_send(if is_last { request.signaled() } else { request })
                        .unwrap();
                }
                let wc = sleep.until_completion(&client.cq);
                assert_eq!((wc.status, wc.wr_id), (Status::Success, sends - 1));
                tell.send(round).unwrap();
            }
        });
        let mut received = 0;
        let mut posted = 0;
        for round in 0..300_u64 {
            let (sends, bytes) = (1 + random.below(3), [8, 200, 3000][random.below(3) as usize]);
            let polled = random.below(sends + 1);
            let sleep = [Sleep::Wait, Sleep::Descriptor][random.below(2) as usize];
            while posted < received + sends {
                let request = RecvRequest::new(posted, server.mr.sge(0, 4096));
                server.qp.post_recv(request).unwrap();
                posted += 1;
            }
            let take = |received: &mut u64| {
                let wc = server.recv_cq.poll()?;
                assert_eq!((wc.status, wc.wr_id), (Status::Success, *received));
                *received += 1;
                Some(())
            };
            for _ in 0..random.below(3_000) {
                assert_eq!(take(&mut received), None);
            }
            let until = received + polled;
            go.send((round, sends, bytes, sleep)).unwrap();
            let deadline = Instant::now() + LONG;
            while received < until {
                if take(&mut received).is_none() {
                    thread::yield_now();
                }
                assert!(Instant::now() < deadline, "round {round}");
            }
            let ended = told.recv_timeout(LONG);
            assert_eq!(
                ended,
                Ok(round),
                "{sends} of {bytes} bytes, {polled} polled, {sleep:?}"
            );
            while received < posted {
                if take(&mut received).is_none() {
                    thread::yield_now();
                }
                assert!(Instant::now() < deadline, "round {round}");
            }
        }
        drop(go);
    });
    nothing_is_left(&pairs);
}

/// Captures begin and end in mid-stream: the messages between are in them.
#[test]
fn capture__in_mid_stream() {
    let pairs = pairs([127, 0, 76, 8], 2);
    let count = 6_000;
    let (mut clients, servers) = talkers(&pairs, seed(), count);
    let talked = Talked::default();
    let first = clients.remove(0).shown(&talked);
    clients.insert(0, first);
    let of = &pairs[0].0;
    let device = DeviceAt {
        address: of.device.address(),
        slot: (of.qp.qpn().value() >> 16) as u8,
    };
    let dir = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(format!("lanes-{}.pcapng", std::process::id()));
    thread::scope(|scope| {
        for talker in clients.into_iter().chain(servers) {
            scope.spawn(move || talker.run());
        }
        let so_far = || talked.posted.load(Ordering::SeqCst);
        let deadline = Instant::now() + LONG;
        let mut captures = 0;
        while so_far() < count - 500 {
            assert!(Instant::now() < deadline);
            let file = File::create(&path).unwrap();
            let capturing = capture::start(device, &file, &Filter::default()).unwrap();
            let before = so_far();
            while so_far() < before + 200 && so_far() < count {
                assert!(Instant::now() < deadline, "the stream has stopped");
                thread::yield_now();
            }
            let messages = so_far() - before;
            let counts = capturing.stop().unwrap();
            // The first may have been in the ring already.
            assert!(
                counts.packets + 1 >= messages,
                "{counts:?} of {messages} messages"
            );
            captures += 1;
            let after = so_far();
            while so_far() < after + 300 && so_far() < count {
                assert!(Instant::now() < deadline, "the stream has stopped");
                thread::yield_now();
            }
        }
        assert!(captures > 0);
        println!("{captures} captures");
    });
    let _ = std::fs::remove_file(path);
    nothing_is_left(&pairs);
}

/// Packets of one device are lost, doubled and late: no message is.
#[test]
fn faults__of_one_device() {
    let faults = "loss=2%,dup=2%,reorder=2%,seed=3".parse().unwrap();
    let options = Options {
        faults: Some(faults),
        ..Options::default()
    };
    let address = IpAddr::from([127, 0, 76, 9]);
    let (faulty, sound) = (open_with(address, options).unwrap(), open(address).unwrap());
    let pairs = [pair([&faulty, &sound], false), pair([&sound, &faulty], true)];
    let (clients, servers) = talkers(&pairs, seed(), 300);
    thread::scope(|scope| {
        for talker in clients.into_iter().chain(servers) {
            scope.spawn(move || talker.run());
        }
    });
    nothing_is_left(&pairs);
    assert!(faulty.fault_counts().unwrap().lost > 0);
}

/// A program that tears its connections down in a destructor of a thread polls when the thread's other variables are gone.
#[test]
fn poll__in_a_destructor_of_a_thread() {
    struct AtTheEnd(mpsc::Sender<WorkCompletion>, Pair);

    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            let AtTheEnd(result, (client, server, _)) = self;
            let deadline = Instant::now() + LONG;
            let request = SendRequest::send(client.mr.sge(0, 8)).wr_id(7).signaled();
            client.qp.post_send(request).unwrap();
            while Instant::now() < deadline {
                let _ = server.cq.poll();
                if let Some(wc) = client.cq.poll() {
                    return result.send(wc).unwrap();
                }
            }
        }
    }

    thread_local! {
        static LAST: std::cell::RefCell<Option<AtTheEnd>> = const { std::cell::RefCell::new(None) };
    }

    let (tell, told) = mpsc::channel();
    let mut pairs = pairs([127, 0, 76, 10], 1);
    let pair = pairs.remove(0);
    let held = thread::spawn(move || {
        // Variables end in the order opposite to that of their first use: this one after those of the device.
        LAST.set(Some(AtTheEnd(tell, pair)));
        LAST.with_borrow(|last| {
            let Some(AtTheEnd(_, (client, server, _))) = last else {
                return;
            };
            for n in 0..1_000 {
                let receive = RecvRequest::new(n, server.mr.sge(4096, 64));
                server.qp.post_recv(receive).unwrap();
                let request = SendRequest::send(client.mr.sge(0, 8)).signaled();
                client.qp.post_send(request).unwrap();
                let [mut sent, mut received] = [false; 2];
                while !sent || !received {
                    received |= server.cq.poll().is_some();
                    sent |= client.cq.poll().is_some();
                }
            }
            let receive = RecvRequest::new(0, server.mr.sge(4096, 64));
            server.qp.post_recv(receive).unwrap();
        });
    });
    held.join().unwrap();
    let wc = told.recv().unwrap();
    assert_eq!((wc.wr_id, wc.status), (7, Status::Success));
}

//! SENDs within a host that go without the engine's lock, while their queue pair, its memory or its link changes or ends, and with requests
//! of other kinds between them.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    ChildProcess, End, LONG, Pair, Random, Talker, Turns, nothing_is_left, open, pair, pairs, seed,
    talker_end, towards,
};
use rdmux_verbs::*;

const STREAMS: [Turns; 2] = [Turns::Stream; 2];

/// Spends a random time, mostly below a millisecond. Time itself is meant: the event that follows is to come at any moment of the traffic, and
/// no result depends on which.
fn dawdle(random: &mut Random) {
    match random.below(4) {
        0 => thread::sleep(Duration::from_micros(random.below(2_000))),
        _ => (0..random.below(100_000)).for_each(|_| std::hint::spin_loop()),
    }
}

/// Runs the streams of pairs by a thread for each end, and `beside` again and again until they have ended, but so many times at least.
fn beside_streams(pairs: &[Pair], seed: u64, count: u64, at_least: u64, mut beside: impl FnMut(u64)) {
    println!("seed {seed:#x}");
    thread::scope(|scope| {
        let talkers = pairs.iter().enumerate().flat_map(|(i, (a, b, _))| {
            Talker::pair([a, b], seed + i as u64, STREAMS, count).map(|mut talker| {
                talker.reregisters = i % 2 == 1;
                talker
            })
        });
        let running: Vec<_> = talkers.map(|talker| scope.spawn(move || talker.run())).collect();
        let mut round = 0;
        while round < at_least || !running.iter().all(thread::ScopedJoinHandle::is_finished) {
            beside(round);
            round += 1;
        }
        println!("{round} rounds");
    });
    nothing_is_left(pairs);
}

#[test]
fn query__in_mid_stream() {
    let pairs = pairs([127, 0, 77, 1], 2);
    beside_streams(&pairs, seed(), 1_000, 100, |_| {
        for end in pairs.iter().flat_map(|(a, b, _)| [a, b]) {
            let info = end.qp.query().expect("a queue pair");
            assert_eq!(info.state, QpState::Rts);
            end.device.counters();
        }
        thread::yield_now();
    });
}

#[test]
fn modify__to_sqd_and_back_in_mid_stream() {
    let (pairs, seed) = (pairs([127, 0, 77, 2], 2), seed());
    let mut random = Random(seed);
    beside_streams(&pairs, seed, 1_500, 30, |round| {
        let end = [&pairs[0].0, &pairs[0].1][random.below(2) as usize];
        let none = QpAttributes::default();
        end.qp.modify(QpState::Sqd, &none).unwrap();
        match random.below(2) {
            0 => {
                let event = end.device.wait_async_event(LONG);
                assert_eq!(event, Some(AsyncEvent::SqDrained(end.qp.qpn())), "round {round}");
            }
            _ => dawdle(&mut random),
        }
        end.qp.modify(QpState::Rts, &none).unwrap();
        // Takes the events for which it has not waited.
        while let Some(event) = end.device.poll_async_event() {
            assert_eq!(event, AsyncEvent::SqDrained(end.qp.qpn()), "round {round}");
        }
        dawdle(&mut random);
    });
}

/// The memory of sends and receives is registered anew every few messages, on both ends.
#[test]
fn rereg__in_mid_stream() {
    let pairs = pairs([127, 0, 77, 3], 4);
    beside_streams(&pairs, seed(), 1_000, 0, |_| thread::yield_now());
}

#[test]
fn modify__to_error_in_mid_stream() {
    let (pairs, seed) = (pairs([127, 0, 77, 4], 1), seed());
    let mut random = Random(seed);
    let devices = [&pairs[0].0.device, &pairs[0].1.device];
    beside_streams(&pairs, seed, 1_500, 40, |round| {
        let (a, b, _held) = pair(devices, round % 2 == 0);
        let ends = [&a, &b];
        let mut talkers = Talker::pair(ends, seed ^ round << 20, STREAMS, u64::MAX);
        let first = random.below(2) as usize;
        let deadline = Instant::now() + LONG;
        let [a, b] = thread::scope(|scope| {
            let running = talkers.each_mut().map(|talker| {
                talker.may_fail = true;
                scope.spawn(move || {
                    while !talker.is_flushed() {
                        if !talker.step() {
                            thread::yield_now();
                        }
                        assert!(Instant::now() < deadline, "{}", talker.state());
                    }
                    (talker.done, talker.received)
                })
            });
            dawdle(&mut random);
            for end in [ends[first], ends[1 - first]] {
                end.qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
                dawdle(&mut random);
            }
            running.map(|thread| thread.join().unwrap())
        });
        // Those without a completion on success may be flushed too.
        for talker in &mut talkers {
            while talker.step() {}
        }
        assert!(a.0 <= b.1 && b.0 <= a.1, "sent and received: {a:?}, {b:?}");
        for end in ends {
            assert_eq!((end.cq.poll(), end.recv_cq.poll()), (None, None));
        }
    });
}

/// Brings two queue pairs up towards each other, from a PSN on.
fn bring_up(ends: [&End; 2], psn: Psn) {
    let steps = [0, 1].map(|i: usize| {
        let peer = ends[1 - i];
        let mut steps = towards(&ends[i].qp, peer.device.address(), peer.qp.qpn(), 0);
        steps[1].1.rq_psn = Some(psn);
        steps[2].1.sq_psn = Some(psn);
        steps
    });
    let [a, b] = steps;
    for (a, b) in a.into_iter().zip(b) {
        ends[0].qp.modify(a.0, &a.1).unwrap();
        ends[1].qp.modify(b.0, &b.1).unwrap();
    }
}

#[test]
fn modify__to_reset_and_up_again_in_mid_stream() {
    let (pairs, seed) = (pairs([127, 0, 77, 5], 1), seed());
    let mut random = Random(seed);
    let a = talker_end(&pairs[0].0.device, false);
    let b = talker_end(&pairs[0].1.device, true);
    let ends = [&a, &b];
    beside_streams(&pairs, seed, 1_500, 40, |round| {
        bring_up(ends, Psn::new((round as u32 * 0x1_0000) & 0xff_ffff));
        let goes_through = round % 3 == 2;
        let count = if goes_through { 100 } else { u64::MAX };
        let talkers = Talker::pair(ends, seed ^ round << 20, STREAMS, count);
        let stop = AtomicBool::new(false);
        let mut first = random.below(2) as usize;
        thread::scope(|scope| {
            let running = talkers.map(|mut talker| {
                let stop = &stop;
                scope.spawn(move || {
                    if goes_through {
                        return talker.run();
                    }
                    talker.may_fail = true;
                    while !stop.load(Ordering::Relaxed) {
                        if !talker.step() {
                            thread::yield_now();
                        }
                    }
                })
            });
            if goes_through {
                return;
            }
            dawdle(&mut random);
            for _ in 0..2 {
                ends[first]
                    .qp
                    .modify(QpState::Reset, &QpAttributes::default())
                    .unwrap();
                first = 1 - first;
                dawdle(&mut random);
            }
            stop.store(true, Ordering::Relaxed);
            for thread in running {
                thread.join().unwrap();
            }
        });
        if goes_through {
            for end in ends {
                end.qp.modify(QpState::Reset, &QpAttributes::default()).unwrap();
            }
        }
        for end in ends {
            for cq in [&end.cq, &end.recv_cq] {
                while cq.poll().is_some() {}
            }
        }
    });
}

#[test]
fn drop__of_a_queue_pair_in_mid_stream() {
    let (pairs, seed) = (pairs([127, 0, 77, 6], 1), seed());
    let devices = [&pairs[0].0.device, &pairs[0].1.device];
    beside_streams(&pairs, seed, 1_500, 40, |round| {
        let (a, b, held) = pair(devices, round % 2 == 0);
        let seeds = [seed ^ round << 20, seed ^ round << 20 ^ 1 << 50];
        thread::scope(|scope| {
            let [of_a, of_b] = held;
            for (end, held, seeds) in [(a, of_a, seeds), (b, of_b, [seeds[1], seeds[0]])] {
                scope.spawn(move || {
                    let mut talker = Talker::new(&end, seeds, Turns::Stream, u64::MAX);
                    talker.may_fail = true;
                    for _ in 0..Random(seeds[0]).below(2_000) {
                        talker.step();
                    }
                    // The connection keeps the queue pair.
                    drop(held);
                });
            }
        });
    });
}

/// Memory that notices accesses after it was given back.
#[derive(Debug, Default)]
struct Watched {
    given_back: AtomicBool,
    accessed_late: AtomicBool,
    accesses: AtomicU64,
}

impl Watched {
    /// An access takes a while.
    fn access(&self, bytes: usize) {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        for _ in 0..bytes {
            if self.given_back.load(Ordering::SeqCst) {
                self.accessed_late.store(true, Ordering::SeqCst);
            }
        }
    }
}

impl Memory for Watched {
    fn len(&self) -> u64 {
        4096
    }

    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), Fault> {
        out.fill(7);
        self.access(out.len());
        Ok(())
    }

    fn write(&self, _: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.access(bytes.len());
        Ok(())
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

/// Deregisters the memory of sends or of receives in mid-stream: once that returns, no thread is inside of the memory, and none gets there
/// later.
fn dereg_in_mid_stream(address: [u8; 4], of_sends: bool) {
    let (pairs, seed) = (pairs(address, 1), seed());
    let mut random = Random(seed);
    let devices = [&pairs[0].0.device, &pairs[0].1.device];
    beside_streams(&pairs, seed, 1_000, 25, |round| {
        let (client, server, _held) = pair(devices, true);
        let memory = Arc::new(Watched::default());
        let of = if of_sends { &client } else { &server };
        let mr = of.pd.reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE).unwrap();
        let watched = mr.sge(0, 4096);
        let deadline = Instant::now() + LONG;
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let sge = if of_sends { watched } else { client.mr.sge(0, 4096) };
                let (mut open, mut flushes) = (0, false);
                loop {
                    if open < 8 && !flushes {
                        client.qp.post_send(SendRequest::send(sge).signaled()).unwrap();
                        open += 1;
                    }
                    match client.cq.poll() {
                        Some(wc) if wc.status == Status::Success => open -= 1,
                        // Those that were under way before the one that fails.
                        Some(wc) if wc.status == Status::Flushed && of_sends => flushes = true,
                        Some(wc) => break wc.status,
                        None => thread::yield_now(),
                    }
                    assert!(Instant::now() < deadline, "the key is still valid");
                }
            });
            let receiving = scope.spawn(|| {
                let sge = if of_sends { server.mr.sge(0, 4096) } else { watched };
                let mut open = 0;
                while !stop.load(Ordering::Relaxed) {
                    if open < 8 {
                        server.qp.post_recv(RecvRequest::new(0, sge)).unwrap();
                        open += 1;
                    }
                    match server.recv_cq.poll() {
                        Some(wc) if wc.status == Status::Success => open -= 1,
                        Some(wc) => return Some(wc.status),
                        None => thread::yield_now(),
                    }
                    assert!(Instant::now() < deadline, "there is no end");
                }
                None
            });
            while memory.accesses.load(Ordering::Relaxed) < 20 + random.below(100) {
                thread::yield_now();
                assert!(Instant::now() < deadline, "nothing is sent in round {round}");
            }
            drop(mr);
            memory.given_back.store(true, Ordering::SeqCst);
            assert_eq!(Arc::strong_count(&memory), 1, "the device has given it back");
            let sent = sending.join().unwrap();
            stop.store(true, Ordering::Relaxed);
            let received = receiving.join().unwrap();
            match of_sends {
                true => assert_eq!(sent, Status::LocalProtection),
                false => {
                    assert_eq!(sent, Status::RemoteOperation);
                    assert!(received.is_none_or(|status| status == Status::LocalProtection));
                }
            }
        });
        assert!(!memory.accessed_late.load(Ordering::SeqCst));
    });
}

#[test]
fn dereg__of_the_memory_of_sends() {
    dereg_in_mid_stream([127, 0, 77, 7], true);
}

#[test]
fn dereg__of_the_memory_of_receives() {
    dereg_in_mid_stream([127, 0, 77, 8], false);
}

/// Other processes: one ends links, and one talks by one queue pair until it is killed.
#[test]
fn child() {
    if let Ok(seed) = std::env::var("RDMUX_LANES_NONSENSE") {
        return end_links_by_nonsense(seed.parse().unwrap());
    }
    let Ok(told) = std::env::var("RDMUX_LANES_PEER") else {
        return;
    };
    let (at, seed) = told.split_once(' ').unwrap();
    let (at, seed): (SocketAddr, u64) = (at.parse().unwrap(), seed.parse().unwrap());
    let device = open(at.ip()).unwrap();
    let end = talker_end(&device, false);
    let listener = device.listen(at.port()).unwrap();
    println!("@ ready");
    let request = listener.accept(LONG).unwrap();
    let connection = request.accept(&end.qp, &ConnectParams::default(), &[]).unwrap();
    assert!(connection.wait_established());
    let mut talker = Talker::new(&end, [seed ^ 1, seed], Turns::Stream, u64::MAX);
    talker.may_fail = true;
    while !talker.is_flushed() {
        if !talker.step() {
            thread::yield_now();
        }
    }
    let _ = std::io::stdin().lines().map_while(Result::ok).count();
}

/// The peer is killed at any moment: what was sent to it has arrived or is flushed, and other queue pairs of the process go on.
#[test]
fn kill__of_the_peer_in_mid_stream() {
    let (pairs, seed) = (pairs([127, 0, 77, 10], 1), seed());
    let mut random = Random(seed);
    let device = &pairs[0].0.device;
    beside_streams(&pairs, seed, 1_500, 30, |round| {
        let at = SocketAddr::new([127, 0, 77, 11].into(), 7001 + round as u16 % 1_000);
        let seed = seed ^ round << 20;
        let mut process = ChildProcess::start(|command| {
            command.env("RDMUX_LANES_PEER", format!("{at} {seed}"));
        });
        process.expect("ready");
        let end = talker_end(device, round % 2 == 0);
        let held = device
            .connect(&end.qp, at, &ConnectParams::default(), &[])
            .unwrap();
        let mut talker = Talker::new(&end, [seed, seed ^ 1], Turns::Stream, u64::MAX);
        talker.may_fail = true;
        let deadline = Instant::now() + LONG;
        let until = random.below(5_000);
        let mut steps = 0;
        while !talker.is_flushed() {
            if !talker.step() {
                thread::yield_now();
            }
            if steps == until {
                process.kill();
            }
            steps += 1;
            assert!(Instant::now() < deadline, "round {round}: {}", talker.state());
        }
        drop(held);
    });
}

/// Returns the addresses of the memories of links that this process maps.
fn links() -> Vec<u64> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let links = maps.lines().filter(|line| line.contains("rdmux-link"));
    let begin = |line: &str| u64::from_str_radix(line.split_once('-').unwrap().0, 16).unwrap();
    links.map(begin).collect()
}

/// Ends links in mid-stream by positions in their rings that cannot be. All their messages arrive, by datagrams, and the streams of another
/// link notice nothing. This process has both ends, and no other links.
fn end_links_by_nonsense(seed: u64) {
    /// Where the first ring of a link begins, with the position of its consumer.
    const RING_AT: u64 = 2 * (4096 + 64 * 128) + 2 * 4096;
    let mut random = Random(seed);
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    let mut count = 0;
    for round in 0..10 {
        let links_before = links();
        let victims = pairs([127, 0, 77, 13], 2);
        let new = |begin: &u64| !links_before.contains(begin);
        let begin = links().into_iter().find(new).expect("a link");
        let others = pairs([127, 0, 77, 14], 1);
        let all: Vec<Pair> = victims.into_iter().chain(others).collect();
        let is_linked = |i: usize| all[i].0.qp.carrier() == Some(Carrier::SharedMemory);
        let mut ended = false;
        beside_streams(&all, seed ^ round << 20, 1_500, 1, |_| {
            dawdle(&mut random);
            // The consumer may store its position over the nonsense before the producer has seen that.
            // There may be another link already.
            ended |= !is_linked(0) || !links().contains(&begin);
            if ended {
                return;
            }
            let deadline = Instant::now() + Duration::from_micros(500);
            let nonsense = 0x5555_5555_u32.to_ne_bytes();
            // It fails if the link has ended just now.
            let _ = memory.write_all_at(&nonsense, begin + RING_AT);
            // One that has ended is soon mapped no more.
            while is_linked(0) && Instant::now() < deadline {
                thread::yield_now();
            }
        });
        count += u32::from(ended);
        assert!(is_linked(2), "the other link has ended");
    }
    // Most often it has not if the streams were over first.
    assert!(count > 0, "no link has ended");
    println!("@ done");
}

#[test]
fn link__that_ends_for_nonsense_in_mid_stream() {
    let seed = seed();
    println!("seed {seed:#x}");
    let process = ChildProcess::start(|command| {
        command.env("RDMUX_LANES_NONSENSE", seed.to_string());
    });
    process.expect("done");
}

/// Effect of an operation of the mixed stream, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Send { bytes: u32 },
    SendInvalidate { window: usize },
    Write { word: u64, imm: bool },
    AtomicWrite { word: u64 },
    Read,
    Add,
    Swap,
    Flush,
}

#[derive(Clone, Copy, Debug)]
struct Mixed {
    kind: Kind,
    fence: bool,
}

impl Mixed {
    fn consumes(&self) -> bool {
        matches!(
            self.kind,
            Kind::Send { .. } | Kind::SendInvalidate { .. } | Kind::Write { imm: true, .. }
        )
    }

    /// Returns the word that it sets to its number and one.
    fn sets(&self) -> Option<u64> {
        match self.kind {
            Kind::Write { word, .. } | Kind::AtomicWrite { word } => Some(word),
            Kind::Swap => Some(SWAPPED),
            _ => None,
        }
    }

    fn answers(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Add | Kind::Swap)
    }
}

/// Words of the peer's memory: those that are written, one that is swapped and one that counts.
const WRITTEN: u64 = 6;
const SWAPPED: u64 = WRITTEN;
const COUNTER: u64 = WRITTEN + 1;
const WORDS: usize = WRITTEN as usize + 2;
const WINDOWS: usize = 20;
/// Messages under way, and the bytes of each; where answers are.
const ROOM: u64 = 16;
const PIECE: u64 = 8192;
const ANSWERS_AT: u64 = ROOM * PIECE;
/// Where the peer's receives are.
const RECEIVES_AT: u64 = 4096;

fn mixture(random: &mut Random, count: usize) -> Vec<Mixed> {
    let mut windows = 0;
    // Runs of SENDs, so that they go by the lane too.
    let mut sends = 0;
    let mut next = || {
        sends = match (sends, random.below(8)) {
            (0, 0) => random.below(40),
            (sends, _) => sends.max(1) - 1,
        };
        let bytes = [8, 64, 3000, PIECE][random.below(4) as usize] as u32;
        let word = random.below(WRITTEN);
        let kind = match random.below(12) {
            _ if sends > 0 => Kind::Send { bytes },
            0..3 => Kind::Send { bytes },
            3..6 => Kind::Write { word, imm: false },
            6 => Kind::Write { word, imm: true },
            7 => Kind::AtomicWrite { word },
            8 => Kind::Read,
            9 => Kind::Add,
            10 => Kind::Swap,
            _ if random.below(2) == 0 && windows < WINDOWS => {
                windows += 1;
                Kind::SendInvalidate { window: windows - 1 }
            }
            _ => Kind::Flush,
        };
        let fence = sends == 0 && random.below(6) == 0;
        Mixed { kind, fence }
    };
    (0..count).map(|_| next()).collect()
}

/// Returns the least and the greatest value of each word after the operations before `done`, while those from `begun` on have not begun.
fn bounds(all: &[Mixed], done: usize, begun: usize) -> [(u64, u64); WORDS] {
    let value = |word: u64, end: usize| {
        if word == COUNTER {
            return all[..end].iter().filter(|m| m.kind == Kind::Add).count() as u64;
        }
        let last = all[..end].iter().rposition(|m| m.sets() == Some(word));
        last.map_or(0, |number| number as u64 + 1)
    };
    std::array::from_fn(|word| (value(word as u64, done), value(word as u64, begun)))
}

fn words(end: &End, at: u64) -> [u64; WORDS] {
    std::array::from_fn(|word| end.word(at + 8 * word as u64))
}

#[track_caller]
fn within(words: [u64; WORDS], bounds: [(u64, u64); WORDS], what: &str) {
    let is_within = words
        .iter()
        .zip(&bounds)
        .all(|(word, (least, greatest))| (least..=greatest).contains(&word));
    assert!(is_within, "{what}: {words:?} is not within {bounds:?}");
}

fn post_mixed(end: &End, peer: (u64, RKey), keys: &[RKey], all: &[Mixed], number: usize, signalled: bool) {
    let (n, mixed) = (number as u64, all[number]);
    let (va, rkey) = peer;
    let at = n % ROOM * PIECE;
    let answer = ANSWERS_AT + n % ROOM * 64;
    end.memory.write(at, &(n + 1).to_ne_bytes()).unwrap();
    let word = |bytes| SgeList::from(end.mr.sge(answer, bytes));
    let own = |bytes| SgeList::from(end.mr.sge(at, bytes));
    let (operation, sges) = match mixed.kind {
        Kind::Send { bytes } => (Operation::Send { imm: None }, own(bytes)),
        Kind::SendInvalidate { window } => (Operation::SendInvalidate { rkey: keys[window] }, own(8)),
        Kind::Write { word, imm } => {
            let imm = imm.then_some(number as u32);
            let va = va + 8 * word;
            (Operation::Write { va, rkey, imm }, own(8))
        }
        Kind::AtomicWrite { word } => (
            Operation::AtomicWrite {
                va: va + 8 * word,
                rkey,
            },
            own(8),
        ),
        Kind::Read => (Operation::Read { va, rkey }, word(8 * WORDS as u32)),
        Kind::Add => {
            let va = va + 8 * COUNTER;
            (Operation::FetchAdd { va, rkey, add: 1 }, word(8))
        }
        Kind::Swap => {
            let compare = bounds(all, number, number)[SWAPPED as usize].0;
            let (va, swap) = (va + 8 * SWAPPED, n + 1);
            let operation = Operation::CompareSwap {
                va,
                rkey,
                compare,
                swap,
            };
            (operation, word(8))
        }
        Kind::Flush => {
            let operation = Operation::Flush {
                va,
                rkey,
                length: 64,
                placement: Placement::GLOBAL,
                selectivity: Selectivity::Range,
            };
            (operation, SgeList::EMPTY)
        }
    };
    let mut flags = SendFlags::empty();
    flags.set(SendFlags::SIGNALED, signalled);
    flags.set(SendFlags::FENCE, mixed.fence);
    let request = SendRequest {
        wr_id: n,
        operation,
        sges,
        flags,
        to: Target::Connected,
    };
    end.qp.post_send(request).unwrap();
}

/// Checks what a READ or an atomic has brought.
fn check_answer(end: &End, all: &[Mixed], number: usize, posted: usize) {
    let answer = ANSWERS_AT + number as u64 % ROOM * 64;
    let next_is_fenced = all.get(number + 1).is_some_and(|next| next.fence);
    let begun = if next_is_fenced { number } else { posted };
    let bounds = bounds(all, number, begun);
    match all[number].kind {
        Kind::Read => within(words(end, answer), bounds, &format!("READ {number}")),
        Kind::Add => assert_eq!(end.word(answer), bounds[COUNTER as usize].0, "{number}"),
        Kind::Swap => assert_eq!(end.word(answer), bounds[SWAPPED as usize].0, "{number}"),
        _ => {}
    }
}

/// Operations of all kinds take effect in their order: all before a message have when it arrives, and none behind a message that has no
/// receive yet.
fn mixed(address: [u8; 4], count: usize) {
    let seed = seed();
    println!("seed {seed:#x}");
    let pairs = pairs(address, 1);
    let (client, server, _) = &pairs[0];
    let all = &mixture(&mut Random(seed), count);
    let window = || server.pd.alloc_mw(WindowType::Two).unwrap();
    let windows: Vec<_> = (0..WINDOWS).map(|_| window()).collect();
    let bind = |window: &MemoryWindow| {
        let key = window.rkey().next();
        let bind = Bind {
            window: key,
            region: server.mr.lkey(),
            va: server.mr.iova(),
            length: 16,
            access: Access::REMOTE_WRITE,
        };
        server.post(Operation::Bind(bind), SgeList::EMPTY);
        server.wait_success();
        key
    };
    let keys: &Vec<RKey> = &windows.iter().map(bind).collect();
    let deadline = Instant::now() + LONG;
    thread::scope(|scope| {
        let consuming: Vec<usize> = (0..all.len()).filter(|n| all[*n].consumes()).collect();
        scope.spawn(move || {
            let mut random = Random(seed ^ 2);
            let (mut posted, mut received) = (0, 0);
            while received < consuming.len() {
                if random.below(8) == 0 && posted - received < ROOM as usize && posted < consuming.len() {
                    let at = RECEIVES_AT + posted as u64 % ROOM * PIECE;
                    let sges = server.mr.sge(at, PIECE as u32);
                    server
                        .qp
                        .post_recv(RecvRequest::new(posted as u64, sges))
                        .unwrap();
                    posted += 1;
                }
                let done = received.checked_sub(1).map_or(0, |last| consuming[last] + 1);
                // The bytes of a WRITE may be there before its receive is.
                let begun = consuming.get(posted).map_or(all.len(), |next| next + 1);
                let what = || format!("{received} received, {posted} posted");
                if random.below(16) == 0 {
                    within(words(server, 0), bounds(all, done, begun), &what());
                }
                let Some(wc) = server.recv_cq.poll() else {
                    thread::yield_now();
                    assert!(Instant::now() < deadline, "{}", what());
                    continue;
                };
                assert_eq!((wc.status, wc.wr_id), (Status::Success, received as u64));
                let number = consuming[received];
                within(words(server, 0), bounds(all, number + 1, begun), &what());
                let message = server.word(RECEIVES_AT + received as u64 % ROOM * PIECE);
                match all[number].kind {
                    Kind::Send { bytes } => assert_eq!((wc.byte_len, message), (bytes, number as u64 + 1)),
                    Kind::SendInvalidate { window } => assert_eq!(wc.invalidated, Some(keys[window])),
                    _ => assert_eq!(wc.imm, Some(number as u32)),
                }
                received += 1;
            }
        });
        let mut random = Random(seed ^ 1);
        let (mut posted, mut done) = (0, 0);
        let mut signalled = std::collections::VecDeque::new();
        while done < all.len() {
            let burst = if random.below(4) == 0 {
                random.below(ROOM)
            } else {
                0
            };
            for _ in 0..burst {
                if posted == all.len() || posted - done == ROOM as usize {
                    break;
                }
                let silent = random.below(2) == 0 && posted % 8 != 7 && posted + 1 < all.len();
                let is_signalled = !silent || all[posted].answers();
                post_mixed(
                    client,
                    (server.mr.iova(), server.mr.rkey()),
                    keys,
                    all,
                    posted,
                    is_signalled,
                );
                if is_signalled {
                    signalled.push_back(posted);
                }
                posted += 1;
            }
            let Some(wc) = client.cq.poll() else {
                thread::yield_now();
                assert!(
                    Instant::now() < deadline,
                    "{done} done, {posted} posted: {:?}",
                    all[done]
                );
                continue;
            };
            let number = signalled.pop_front().expect("nothing is under way");
            assert_eq!(
                (wc.status, wc.wr_id),
                (Status::Success, number as u64),
                "{:?}",
                all[number]
            );
            check_answer(client, all, number, posted);
            done = number + 1;
        }
    });
    within(words(server, 0), bounds(all, all.len(), all.len()), "at the end");
    nothing_is_left(&pairs);
}

#[test]
fn post_send__of_all_kinds_in_order() {
    for _ in 0..4 {
        mixed([127, 0, 77, 12], 3_000);
    }
}

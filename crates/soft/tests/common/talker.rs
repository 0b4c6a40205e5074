//! Streams of messages between two ends, both ways. Their sizes, immediate data and bytes follow from a seed, so that either end knows what
//! is to come.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use rdmux_verbs::*;

use super::{End, LONG, RIGHTS, connect_at, open, shareable};

/// Messages that are under way at most, and receives.
const SLOTS: u64 = 16;
const MESSAGE_BYTES_MAX: u64 = 12 << 10;
/// Bytes of memory that a talker uses.
pub(crate) const TALKER_BYTES: usize = (2 * SLOTS * MESSAGE_BYTES_MAX) as usize;
/// Where the received messages are.
const INCOMING_AT: u64 = SLOTS * MESSAGE_BYTES_MAX;
/// Requests without a completion in a row, at most.
const UNSIGNALLED_MAX: u64 = 7;
/// Messages after which memory is registered anew, if it is at all.
const REREG_AFTER: u64 = 20;
/// Mark of the number of a receive.
const RECEIVE: u64 = 1 << 63;

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Returns the bytes and the immediate data of a message.
fn message(seed: u64, number: u64) -> (Vec<u8>, Option<u32>) {
    let mut random = Random(seed ^ number.wrapping_mul(0x1234_5678_9abc_def1));
    let bytes = match random.below(4) {
        0 => 8,
        1 => 8 + random.below(57),
        2 => 8 + random.below(4096),
        _ => 8 + random.below(MESSAGE_BYTES_MAX - 7),
    };
    let imm = (random.below(3) == 0).then_some(number as u32);
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_ne_bytes());
    (words.take(bytes as usize).collect(), imm)
}

/// Order in which the two sides send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turns {
    /// Each sends while it has room.
    Stream,
    /// One after the other; this end begins, or the other one.
    First,
    Second,
}

/// Numbers of messages, for other threads to look at.
#[derive(Debug, Default)]
pub(crate) struct Talked {
    pub(crate) posted: AtomicU64,
    pub(crate) received: AtomicU64,
}

/// One end of the exchange. It is driven by the thread that calls [`Talker::step`].
pub(crate) struct Talker<'a> {
    end: &'a End,
    seeds: [u64; 2],
    turns: Turns,
    count: u64,
    random: Random,
    talked: Option<&'a Talked>,
    /// Set when requests may fail, and when one has.
    pub(crate) may_fail: bool,
    has_failed: bool,
    sends_failed: bool,
    /// Set when the memory of sends and receives is to be registered anew from time to time.
    pub(crate) reregisters: bool,
    regions: [Option<MemoryRegion>; 2],
    /// Requests that are not known to be done: numbers, and whether they complete on success.
    open: VecDeque<(u64, bool)>,
    unsignalled: u64,
    posted: u64,
    receives: u64,
    pub(crate) received: u64,
    /// Requests that have completed with success, or before such a one; receives that were flushed.
    pub(crate) done: u64,
    flushed: u64,
}

impl<'a> Talker<'a> {
    /// `seeds`: of the own messages, and of the other end's. `count`: number of messages, of each end.
    pub(crate) fn new(end: &'a End, seeds: [u64; 2], turns: Turns, count: u64) -> Talker<'a> {
        Talker {
            end,
            seeds,
            turns,
            count,
            random: Random(seeds[0] ^ 0x5555),
            talked: None,
            may_fail: false,
            has_failed: false,
            sends_failed: false,
            reregisters: false,
            regions: [None, None],
            open: VecDeque::new(),
            unsignalled: 0,
            posted: 0,
            receives: 0,
            received: 0,
            done: 0,
            flushed: 0,
        }
    }

    /// Makes the talkers of two ends.
    pub(crate) fn pair(ends: [&'a End; 2], seed: u64, turns: [Turns; 2], count: u64) -> [Talker<'a>; 2] {
        let seeds = [Random(seed).next(), Random(seed ^ 1 << 40).next()];
        let [a, b] = ends;
        [
            Talker::new(a, seeds, turns[0], count),
            Talker::new(b, [seeds[1], seeds[0]], turns[1], count),
        ]
    }

    pub(crate) fn shown(mut self, talked: &'a Talked) -> Talker<'a> {
        self.talked = Some(talked);
        self
    }

    /// Ends the exchange after the messages that were posted: those of both ends, by agreement.
    pub(crate) fn is_done(&self) -> bool {
        let all = self.posted == self.count && self.received == self.count;
        all && self.open.iter().all(|(_, signalled)| !signalled)
    }

    /// Returns whether all requests have completed, after a failure. Those without a completion on success may have succeeded.
    pub(crate) fn is_flushed(&self) -> bool {
        let ended = self.received + self.flushed == self.receives;
        self.has_failed && ended && self.open.iter().all(|(_, signalled)| !signalled)
    }

    pub(crate) fn state(&self) -> String {
        format!(
            "{:?} {} posted, {} done, {} receives, {} received, open {:?}, flushed {}, of {}",
            self.turns,
            self.posted,
            self.done,
            self.receives,
            self.received,
            self.open,
            self.flushed,
            self.count
        )
    }

    /// Calls [`Talker::step`] until everything has arrived.
    pub(crate) fn run(mut self) {
        let deadline = Instant::now() + LONG;
        while !self.is_done() {
            if !self.step() {
                thread::yield_now();
            }
            assert!(Instant::now() < deadline, "{}", self.state());
        }
    }

    /// Posts what may be posted, and looks for a completion. Returns whether there was one.
    pub(crate) fn step(&mut self) -> bool {
        if !self.has_failed {
            // Late, so that messages come before there is a receive.
            if self.random.below(4) == 0 {
                for _ in 0..self.random.below(SLOTS) {
                    self.receive();
                }
            }
            for _ in 0..self.random.below(4) {
                self.send();
            }
        }
        let (cq, recv_cq) = (&self.end.cq, &self.end.recv_cq);
        let found = cq.poll().or_else(|| match cq.cqn() == recv_cq.cqn() {
            true => None,
            false => recv_cq.poll(),
        });
        if let Some(wc) = &found {
            self.take(wc);
        }
        found.is_some()
    }

    fn mr(&mut self, incoming: bool) -> &MemoryRegion {
        match &self.regions[usize::from(incoming)] {
            Some(mr) => mr,
            None => &self.end.mr,
        }
    }

    /// Gives the memory of one direction a region of its own, after the last one has ended. Returns false if that is still in use.
    fn register(&mut self, incoming: bool, in_use: bool) -> bool {
        if in_use {
            return false;
        }
        let region = &mut self.regions[usize::from(incoming)];
        drop(region.take());
        let memory = self.end.memory.clone();
        let mr = self.end.pd.reg_mr_all(memory.clone(), memory.address(), RIGHTS);
        *region = Some(mr.unwrap());
        true
    }

    fn receive(&mut self) {
        let open = self.receives - self.received;
        let all = self.receives >= self.count;
        let is_to_register = self.reregisters && self.receives.is_multiple_of(REREG_AFTER) && !all;
        if open == SLOTS || all || is_to_register && !self.register(true, open > 0) {
            return;
        }
        let at = INCOMING_AT + self.receives % SLOTS * MESSAGE_BYTES_MAX;
        let sges = self.mr(true).sge(at, MESSAGE_BYTES_MAX as u32).into();
        let request = RecvRequest {
            wr_id: RECEIVE | self.receives,
            sges,
        };
        match self.end.qp.post_recv(request) {
            Ok(()) => self.receives += 1,
            Err(error) => self.refused(error),
        }
    }

    #[track_caller]
    fn refused(&mut self, error: PostError) {
        assert!(self.may_fail, "{error}");
    }

    fn may_send(&mut self) -> bool {
        let number = self.posted;
        let turn = match self.turns {
            Turns::Stream => true,
            Turns::First => number <= self.received,
            Turns::Second => number < self.received,
        };
        let room = self.open.front().is_none_or(|(open, _)| number - open < SLOTS);
        let is_to_register = self.reregisters && number.is_multiple_of(REREG_AFTER);
        let in_use = !self.open.is_empty();
        turn && room && number < self.count && (!is_to_register || self.register(false, in_use))
    }

    fn send(&mut self) {
        if !self.may_send() {
            return;
        }
        let number = self.posted;
        let (bytes, imm) = message(self.seeds[0], number);
        let is_last =
            number + 1 == self.count || self.reregisters && (number + 1).is_multiple_of(REREG_AFTER);
        let signalled = is_last || self.unsignalled == UNSIGNALLED_MAX || self.random.below(3) == 0;
        let (at, len) = (number % SLOTS * MESSAGE_BYTES_MAX, bytes.len() as u32);
        self.end.memory.write(at, &bytes).unwrap();
        let how = self.random.below(4);
        let mr = self.mr(false);
        let sges = match how {
            0 if len <= 64 => SgeList::inline(&bytes),
            1 => [mr.sge(at, 3), mr.sge(at + 3, len - 3)].as_slice().into(),
            _ => mr.sge(at, len).into(),
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, signalled);
        flags.set(SendFlags::SOLICITED, self.random.below(2) == 0);
        let request = SendRequest {
            wr_id: number,
            operation: Operation::Send { imm },
            sges,
            flags,
            to: Target::Connected,
        };
        // Others may look at the number while the request is posted.
        match self.end.qp.post_send(request) {
            Ok(()) => {}
            Err(error) => return self.refused(error),
        }
        self.open.push_back((number, signalled));
        self.unsignalled = if signalled { 0 } else { self.unsignalled + 1 };
        self.posted += 1;
        if let Some(talked) = self.talked {
            talked.posted.store(self.posted, Ordering::SeqCst);
        }
    }

    fn take(&mut self, wc: &WorkCompletion) {
        let success = wc.status == Status::Success;
        assert!(success || self.may_fail, "{wc:?}: {}", self.state());
        if wc.wr_id & RECEIVE != 0 {
            return self.take_received(wc);
        }
        let number = wc.wr_id;
        // Those before it have succeeded in silence, unless requests fail: then each completes.
        while let Some((open, signalled)) = self.open.pop_front() {
            if open == number {
                assert!(signalled || !success, "{wc:?}");
                break;
            }
            let silent = open < number && !signalled && !self.sends_failed;
            assert!(silent, "{wc:?} before {open}: {}", self.state());
        }
        if success {
            assert!(!self.sends_failed, "{wc:?} after a failure: {}", self.state());
            assert_eq!(wc.opcode, WcOpcode::Send);
            assert!(number >= self.done, "{wc:?} again");
            self.done = number + 1;
        }
        self.has_failed |= !success;
        self.sends_failed |= !success;
    }

    fn take_received(&mut self, wc: &WorkCompletion) {
        let number = wc.wr_id & !RECEIVE;
        assert_eq!(number, self.received + self.flushed, "{wc:?}: {}", self.state());
        if wc.status != Status::Success {
            self.flushed += 1;
            self.has_failed = true;
            return;
        }
        assert_eq!(self.flushed, 0, "{wc:?} after one that was flushed");
        let (expected, imm) = message(self.seeds[1], number);
        let mut bytes = vec![0; wc.byte_len as usize];
        let at = INCOMING_AT + number % SLOTS * MESSAGE_BYTES_MAX;
        self.end.memory.read(at, &mut bytes).unwrap();
        assert!(
            bytes == expected,
            "message {number} differs, of {} bytes for {}",
            bytes.len(),
            expected.len()
        );
        assert_eq!(wc.imm, imm, "message {number}");
        self.received += 1;
        if let Some(talked) = self.talked {
            talked.received.store(self.received, Ordering::SeqCst);
        }
    }
}

/// Two ends, the first of which has asked for the connection.
pub(crate) type Pair = (End, End, [Connection; 2]);

/// Makes an end, whose receives complete to a queue of their own if a test says so.
pub(crate) fn talker_end(device: &Device, apart: bool) -> End {
    End::with(device, shareable(TALKER_BYTES), |_, options| QpOptions {
        recv_cq: match apart {
            true => device.create_cq(1024).unwrap(),
            false => options.recv_cq.clone(),
        },
        ..options
    })
}

/// Returns a port that no other connection of this process uses: one that was listened to may be in use for a while.
fn next_port() -> u16 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    10_000 + (NEXT.fetch_add(1, Ordering::Relaxed) % 20_000) as u16
}

/// Connects ends of two devices, and waits until their link is up.
pub(crate) fn pair(devices: [&Device; 2], apart: bool) -> Pair {
    let [client, server] = devices.map(|device| talker_end(device, apart));
    let params = ConnectParams {
        // 10 us, for the receives that are posted late.
        min_rnr_timer: 1,
        ..ConnectParams::default()
    };
    let held = connect_at(next_port(), &client.qp, &server.qp, &params);
    let linked =
        || [&client, &server].map(|end| end.qp.carrier()) == [const { Some(Carrier::SharedMemory) }; 2];
    let deadline = Instant::now() + LONG;
    while !linked() {
        assert!(Instant::now() < deadline, "there is no link");
        thread::yield_now();
    }
    (client, server, held)
}

/// Makes pairs of two devices of an address, so all on one link.
pub(crate) fn pairs(address: [u8; 4], count: usize) -> Vec<Pair> {
    let address = IpAddr::from(address);
    let devices = [(); 2].map(|()| open(address).unwrap());
    let make = |i| pair([&devices[0], &devices[1]], i % 2 == 1);
    (0..count).map(make).collect()
}

/// Checks that no completion is left.
pub(crate) fn nothing_is_left(pairs: &[Pair]) {
    for (client, server, _) in pairs {
        for end in [client, server] {
            for _ in 0..100 {
                assert_eq!(end.cq.poll(), None);
                assert_eq!(end.recv_cq.poll(), None);
            }
        }
    }
}

/// Returns the seed of a test: that of the environment, in hexadecimal digits, or a new one.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("RDMUX_LANES_SEED").ok();
    let now = || {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64
    };
    seed.map_or_else(now, |seed| {
        u64::from_str_radix(seed.trim_start_matches("0x"), 16).unwrap()
    })
}

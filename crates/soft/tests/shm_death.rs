//! Three processes of a host, each connected to both others and busy with it. One after the other is killed or stopped at any
//! moment: the others are notified of its end and notice nothing else.
//!
//! `RDMUX_CHAOS_KILLS` and `RDMUX_CHAOS_STOPS` say how often in all, `RDMUX_CHAOS_SEED` seeds the choices. The system decides the
//! moments, so a seed replays the choice of victims and sizes but no run exactly.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;
use rustix::process::{Pid, Signal, kill_process};

/// Time within which the others are notified of a death.
const TOLD_TIME: Duration = Duration::from_secs(60);
/// Additional time until a side that has accepted gives up a peer that died before it reported that it is connected, if no process
/// of that peer's address is left to report the death.
const ACCEPTED_TIME: Duration = Duration::from_secs(60);
/// Time within which two processes that live are connected.
const CONNECT_TIME: Duration = Duration::from_secs(60);
/// A connection on which nothing completes for this long hangs; a process is stopped for less.
const HANG_TIME: Duration = Duration::from_secs(60);
/// Longest deregistration: it waits for a peer that is stopped while it writes memory that it has mapped.
const DEREG_TIME: Duration = Duration::from_secs(30);
/// Time within which a connection of a process that was stopped goes on or ends.
const SETTLE_TIME: Duration = Duration::from_secs(5);
/// Time for which a process is stopped.
const STOP_TIME: Duration = Duration::from_secs(2);

const RECVS: u64 = 32;
const SENDS_MAX: usize = 8;
const MESSAGE_BYTES: u64 = 2048;
const AREA_BYTES: u64 = 256 << 10;
const SEND_AT: u64 = RECVS * MESSAGE_BYTES;
const SOURCE_AT: u64 = SEND_AT + SENDS_MAX as u64 * MESSAGE_BYTES;
const BACK_AT: u64 = SOURCE_AT + AREA_BYTES;

// ---- The work of each process.

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

fn pattern(key: u64, bytes: u64) -> Vec<u8> {
    let mut random = Random(key);
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
    words.take(bytes as usize).collect()
}

/// Beginning of a message; the rest is a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    /// Offers memory that the receiver is to write and to read again.
    Offer {
        va: u64,
        rkey: u32,
        bytes: u64,
        key: u64,
    },
    /// Reports that the offered memory was written with this pattern last, and is used no more.
    Done {
        key: u64,
    },
}

const HEADER_BYTES: u64 = 56;

fn encode(from: u32, seq: u64, bytes: u64, kind: Kind) -> Vec<u8> {
    let [tag, va, rkey, length, key] = match kind {
        Kind::Data => [0; 5],
        Kind::Offer { va, rkey, bytes, key } => [1, va, rkey.into(), bytes, key],
        Kind::Done { key } => [2, 0, 0, 0, key],
    };
    let header = [seq, bytes, tag, va, rkey, length, key];
    let mut out: Vec<u8> = header.into_iter().flat_map(u64::to_le_bytes).collect();
    out.extend(pattern((u64::from(from) << 40) ^ seq, bytes - HEADER_BYTES));
    out
}

fn decode(from: u32, seq: u64, packet: &[u8]) -> Option<Kind> {
    let word = |i: usize| Some(u64::from_le_bytes(*packet.get(8 * i..)?.first_chunk()?));
    let kind = match word(2)? {
        0 => Kind::Data,
        1 => Kind::Offer {
            va: word(3)?,
            rkey: word(4)? as u32,
            bytes: word(5)?,
            key: word(6)?,
        },
        2 => Kind::Done { key: word(6)? },
        _ => return None,
    };
    (encode(from, seq, packet.len() as u64, kind) == packet).then_some(kind)
}

/// Memory of this side that the peer writes.
struct Offered {
    memory: Arc<AnonymousMemory>,
    mr: Option<MemoryRegion>,
    key: u64,
}

/// Work of this side on memory of the peer.
#[derive(Clone, Copy)]
struct Task {
    va: u64,
    rkey: u32,
    bytes: u64,
    key: u64,
    rounds_left: u64,
    reading: bool,
    /// Number of requests of this round that have not completed.
    left: usize,
}

#[derive(Clone, Copy, Debug)]
enum Posted {
    Send { slot: u64 },
    Task,
}

/// One connection of a process.
struct Session {
    own: u32,
    peer: u32,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    memory: Arc<AnonymousMemory>,
    mr: Option<MemoryRegion>,
    random: Random,
    to_say: VecDeque<Kind>,
    posted: VecDeque<Posted>,
    send_slots: Vec<u64>,
    recvs: u64,
    sent: u64,
    received: u64,
    offered: Option<Offered>,
    task: Option<Task>,
    by_shm: bool,
}

/// Reason why a session is over.
#[derive(Debug)]
enum Ending {
    /// The connection has ended, or a request has failed.
    Over,
    Wrong(String),
}

impl From<String> for Ending {
    fn from(what: String) -> Ending {
        Ending::Wrong(what)
    }
}

fn any_memory(random: &mut Random, bytes: u64) -> Arc<AnonymousMemory> {
    let memory = match random.below(2) {
        0 => AnonymousMemory::new(bytes as usize),
        _ => AnonymousMemory::shareable(bytes as usize),
    };
    Arc::new(memory.expect("memory"))
}

impl Session {
    fn new(device: &Device, own: u32, peer: u32, mut random: Random) -> Session {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let memory = any_memory(&mut random, BACK_AT + AREA_BYTES);
        let mr = pd
            .reg_mr_all(memory.clone(), memory.address(), Access::LOCAL_WRITE)
            .unwrap();
        Session {
            own,
            peer,
            pd,
            cq,
            qp,
            memory,
            mr: Some(mr),
            random,
            to_say: VecDeque::new(),
            posted: VecDeque::new(),
            send_slots: (0..SENDS_MAX as u64).collect(),
            recvs: 0,
            sent: 0,
            received: 0,
            offered: None,
            task: None,
            by_shm: false,
        }
    }

    fn sge(&self, at: u64, bytes: u64) -> SgeList {
        self.mr.as_ref().unwrap().sge(at, bytes as u32).into()
    }

    fn post_recv(&mut self, slot: u64) -> Result<(), Ending> {
        let sges = self.sge(slot * MESSAGE_BYTES, MESSAGE_BYTES);
        let request = RecvRequest {
            wr_id: 1 << 32 | slot,
            sges,
        };
        self.qp
            .post_recv(request)
            .map_err(|error| format!("post_recv: {error}"))?;
        self.recvs += 1;
        Ok(())
    }

    fn post(&mut self, posted: Posted, operation: Operation, sges: SgeList) -> Result<(), Ending> {
        let request = SendRequest {
            wr_id: 0,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.qp
            .post_send(request)
            .map_err(|error| format!("post_send: {error}"))?;
        self.posted.push_back(posted);
        Ok(())
    }

    fn say(&mut self) -> Result<(), Ending> {
        while let Some(slot) = self.send_slots.pop() {
            let kind = self.to_say.pop_front().unwrap_or(Kind::Data);
            let bytes = match self.random.below(4) {
                0 => HEADER_BYTES,
                _ => HEADER_BYTES + self.random.below(MESSAGE_BYTES - HEADER_BYTES),
            };
            self.sent += 1;
            let at = SEND_AT + slot * MESSAGE_BYTES;
            let message = encode(self.own, self.sent, bytes, kind);
            self.memory.write(at, &message).unwrap();
            let sges = self.sge(at, bytes);
            self.post(Posted::Send { slot }, Operation::Send { imm: None }, sges)?;
        }
        Ok(())
    }

    fn offer(&mut self) -> Result<(), Ending> {
        let pages = 1 + self.random.below(AREA_BYTES / 4096);
        let memory = any_memory(&mut self.random, pages * 4096);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let begin = self.random.below(4096);
        let bytes = 1 + self.random.below(pages * 4096 - begin);
        let iova = memory.address() + begin;
        let mr = self.pd.reg_mr(memory.clone(), begin, bytes, iova, access);
        let mr = mr.map_err(|error| format!("registration: {error}"))?;
        let key = self.random.next();
        self.to_say.push_back(Kind::Offer {
            va: iova,
            rkey: mr.rkey().0,
            bytes,
            key,
        });
        self.offered = Some(Offered {
            memory,
            mr: Some(mr),
            key,
        });
        Ok(())
    }

    /// Checks the offered memory after the peer has reported that it is done with it, and takes it back.
    fn take_back(&mut self, key: u64) -> Result<(), Ending> {
        let mut offered = self.offered.take().ok_or("done with nothing".to_owned())?;
        let mr = offered.mr.take().unwrap();
        let begin = (mr.iova() - offered.memory.address()) as usize;
        let mut there = vec![0; offered.memory.len() as usize];
        offered.memory.read(0, &mut there).unwrap();
        let (before, rest) = there.split_at(begin);
        let (written, behind) = rest.split_at(mr.length() as usize);
        if written != pattern(key ^ offered.key, mr.length()) {
            return Err(format!("{} written bytes differ", written.len()).into());
        }
        if before.iter().chain(behind).any(|byte| *byte != 0) {
            return Err("bytes outside of the region were written".to_owned().into());
        }
        self.dereg(mr)
    }

    fn dereg(&self, mr: MemoryRegion) -> Result<(), Ending> {
        let since = Instant::now();
        drop(mr);
        match since.elapsed() {
            fast if fast < DEREG_TIME => Ok(()),
            slow => Err(format!("deregistration took {slow:?}").into()),
        }
    }

    /// Posts the next round of the task: WRITEs of all its bytes in pieces, or READs.
    fn next_round(&mut self) -> Result<(), Ending> {
        let Some(mut task) = self.task else { return Ok(()) };
        if task.rounds_left == 0 {
            self.task = None;
            self.to_say.push_back(Kind::Done { key: 0 });
            return Ok(());
        }
        let key = if task.rounds_left == 1 {
            0
        } else {
            task.rounds_left
        };
        let expected = pattern(key ^ task.key, task.bytes);
        if !task.reading {
            self.memory.write(SOURCE_AT, &expected).unwrap();
        }
        let own = if task.reading { BACK_AT } else { SOURCE_AT };
        let mut at = 0;
        while at < task.bytes {
            let left = task.bytes - at;
            let piece = match self.random.below(3) {
                0 => left.min(8),
                1 => 1 + self.random.below(left),
                _ => left,
            };
            // The send queue has a limited length.
            let piece = if task.left >= 16 { left } else { piece };
            let (va, rkey) = (task.va + at, RKey(task.rkey));
            let operation = match task.reading {
                true => Operation::Read { va, rkey },
                false => Operation::Write { va, rkey, imm: None },
            };
            let sges = self.sge(own + at, piece);
            self.post(Posted::Task, operation, sges)?;
            task.left += 1;
            at += piece;
        }
        self.task = Some(task);
        Ok(())
    }

    fn turn_done(&mut self) -> Result<(), Ending> {
        let Some(task) = &mut self.task else {
            return Err("a completion of no task".to_owned().into());
        };
        task.left -= 1;
        if task.left > 0 {
            return Ok(());
        }
        if task.reading {
            let key = if task.rounds_left == 1 {
                0
            } else {
                task.rounds_left
            };
            let expected = pattern(key ^ task.key, task.bytes);
            let mut back = vec![0; expected.len()];
            self.memory.read(BACK_AT, &mut back).unwrap();
            if back != expected {
                return Err(format!("{} bytes read back differ", back.len()).into());
            }
            task.rounds_left -= 1;
        }
        task.reading = !task.reading;
        self.next_round()
    }

    fn completed(&mut self, wc: &WorkCompletion) -> Result<(), Ending> {
        if wc.wr_id >> 32 == 1 {
            self.recvs -= 1;
            if wc.status != Status::Success {
                return Err(Ending::Over);
            }
            let slot = wc.wr_id & 0xffff_ffff;
            let mut message = vec![0; wc.byte_len as usize];
            self.memory.read(slot * MESSAGE_BYTES, &mut message).unwrap();
            self.received += 1;
            let kind = decode(self.peer, self.received, &message).ok_or_else(|| {
                let seq = message
                    .first_chunk()
                    .map_or(0, |bytes| u64::from_le_bytes(*bytes));
                format!(
                    "message {} is number {seq}, of {} bytes",
                    self.received, wc.byte_len
                )
            })?;
            self.post_recv(slot)?;
            return match kind {
                Kind::Data => Ok(()),
                Kind::Done { key } => {
                    self.take_back(key)?;
                    self.offer()
                }
                Kind::Offer { va, rkey, bytes, key } => {
                    self.task = Some(Task {
                        va,
                        rkey,
                        bytes,
                        key,
                        rounds_left: 1 + self.random.below(8),
                        reading: false,
                        left: 0,
                    });
                    self.next_round()
                }
            };
        }
        let posted = self
            .posted
            .pop_front()
            .ok_or("a completion of nothing".to_owned())?;
        if wc.status != Status::Success {
            let expected = [Status::Flushed, Status::RetryExceeded, Status::RnrRetryExceeded];
            return Err(match expected.contains(&wc.status) {
                true => Ending::Over,
                false => Ending::Wrong(format!("{posted:?}: {:?}", wc.status)),
            });
        }
        match posted {
            Posted::Send { slot } => {
                self.send_slots.push(slot);
                Ok(())
            }
            Posted::Task => self.turn_done(),
        }
    }

    fn talk(&mut self, connection: &Connection) -> Result<(), Ending> {
        self.offer()?;
        let mut progress = Instant::now();
        loop {
            self.say()?;
            let found = match self.random.below(4) {
                0 => self.cq.wait(Duration::from_millis(5)).unwrap(),
                _ => self.cq.poll(),
            };
            match found {
                Some(wc) => {
                    progress = Instant::now();
                    self.completed(&wc)?;
                    if !self.by_shm && self.random.below(16) == 0 {
                        self.by_shm = self.qp.carrier() == Some(Carrier::SharedMemory);
                    }
                }
                None if connection.is_ended() => return Err(Ending::Over),
                None if progress.elapsed() > HANG_TIME => {
                    let (posted, carrier) = (self.posted.len(), self.qp.carrier());
                    return Err(format!("nothing completes: {posted} requests, {carrier:?}").into());
                }
                None => {}
            }
        }
    }

    /// Winds up after the connection is over: everything that was posted completes, and memory comes back.
    fn wind_up(&mut self, connection: &Connection) -> Result<(), Ending> {
        let deadline = Instant::now() + TOLD_TIME;
        while self.recvs > 0 || !self.posted.is_empty() {
            let Some(wc) = self.cq.wait(Duration::from_millis(50)).unwrap() else {
                // Everything posted must complete soon after the end of the connection.
                if Instant::now() > deadline {
                    let (recvs, posted) = (self.recvs, self.posted.len());
                    return Err(format!("{recvs} receives and {posted} requests never complete").into());
                }
                continue;
            };
            // Data that arrived before the end is still right; later data is not used.
            match wc.wr_id >> 32 {
                1 => self.recvs -= 1,
                _ => drop(self.posted.pop_front()),
            }
        }
        if !connection.wait_ended(deadline.saturating_duration_since(Instant::now())) {
            return Err("a request failed, but the connection did not end"
                .to_owned()
                .into());
        }
        if let Some(mr) = self.offered.take().and_then(|mut offered| offered.mr.take()) {
            self.dereg(mr)?;
        }
        let mr = self.mr.take().unwrap();
        self.dereg(mr)
    }

    fn run(mut self, connection: &Connection) {
        println!("@ up {}", self.peer);
        let mut end = self.talk(connection);
        if matches!(end, Err(Ending::Over)) {
            end = self.wind_up(connection);
        }
        match end {
            Err(Ending::Wrong(what)) => println!("@ wrong {} {what}", self.peer),
            _ => {
                let carrier = if self.by_shm { "shm" } else { "udp" };
                println!("@ ended {} {} {carrier}", self.peer, self.received);
            }
        }
    }
}

/// Returns the numbers of descriptors other than UDP sockets, of descriptors that are files in memory, of mappings of such files, and of
/// all mappings; KiB of memory; and the numbers of requests without packets and of UDP sockets.
fn stats(device: &Device) -> String {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links: Vec<String> = links
        .filter_map(|fd| Some(fs::read_link(fd.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    // A look at the table misses sockets if others come or go meanwhile.
    let udp: String = (0..10)
        .map(|_| fs::read_to_string("/proc/self/net/udp").unwrap())
        .collect();
    let inodes: Vec<&str> = udp
        .lines()
        .filter_map(|line| line.split_whitespace().nth(9))
        .collect();
    let is_udp = |link: &String| {
        let inode = link
            .strip_prefix("socket:[")
            .and_then(|rest| rest.strip_suffix(']'));
        inode.is_some_and(|inode| inodes.contains(&inode))
    };
    let udp = links.iter().filter(|link| is_udp(link)).count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let direct = device.counters().direct_requests;
    format!(
        "{} {} {} {} {} {direct} {udp}",
        links.len() - udp,
        links.iter().filter(|link| link.contains("memfd:")).count(),
        maps.lines().filter(|line| line.contains("memfd:")).count(),
        maps.lines().count(),
        rss.unwrap().trim().trim_end_matches(" kB")
    )
}

#[test]
fn node() {
    let Ok(who) = std::env::var("RDMUX_CHAOS_NODE") else {
        return;
    };
    let [at, own, seed] = *who.split(' ').collect::<Vec<_>>() else {
        panic!("{who}")
    };
    let at: SocketAddr = at.parse().unwrap();
    let (own, seed): (u32, u64) = (own.parse().unwrap(), seed.parse().unwrap());
    rdmux_soft::register();
    let device = Device::open(at.ip()).unwrap();
    let listener = device.listen(at.port()).unwrap();
    println!("@ ready");
    let accepting = device.clone();
    thread::spawn(move || {
        while let Some(mut request) = listener.accept(Duration::from_secs(3_600)) {
            let device = accepting.clone();
            thread::spawn(move || {
                let peer = u32::from_le_bytes(*request.private_data().first_chunk().unwrap());
                let random = Random(seed ^ u64::from(peer));
                let mut session = Session::new(&device, own, peer, random);
                let qp = session.qp.clone();
                let prepare = || {
                    (0..RECVS).for_each(|slot| session.post_recv(slot).unwrap());
                    Ok(())
                };
                let params = ConnectParams::default();
                let accepted = request.accept_after(&qp, &params, &own.to_le_bytes(), prepare);
                match accepted {
                    Ok(connection) if connection.wait_established() => session.run(&connection),
                    other => println!("@ failed {peer} {other:?}"),
                }
            });
        }
    });
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match *line.split(' ').collect::<Vec<_>>() {
            ["stats"] => println!("@ stats {}", stats(&device)),
            ["connect", to, peer] => {
                let (to, peer): (SocketAddr, u32) = (to.parse().unwrap(), peer.parse().unwrap());
                let device = device.clone();
                thread::spawn(move || {
                    let random = Random(seed ^ u64::from(peer));
                    let mut session = Session::new(&device, own, peer, random);
                    let params = ConnectParams::default();
                    match device.connect(&session.qp, to, &params, &own.to_le_bytes()) {
                        Ok(connection) => {
                            (0..RECVS).for_each(|slot| session.post_recv(slot).unwrap());
                            session.run(&connection);
                        }
                        Err(error) => println!("@ failed {peer} {error}"),
                    }
                });
            }
            _ => panic!("{line}"),
        }
    }
    std::process::exit(0);
}

// ---- Starting and ending the processes.

struct Process {
    number: u32,
    at: SocketAddr,
    child: Child,
    stdin: ChildStdin,
}

impl Process {
    fn tell(&mut self, what: &str) {
        // A process that has just died receives nothing.
        let _ = writeln!(self.stdin, "{what}");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Chaos {
    addresses: [IpAddr; 3],
    seed: u64,
    random: Random,
    next_number: u32,
    processes: Vec<Process>,
    lines_in: Sender<(u32, String)>,
    lines: Receiver<(u32, String)>,
    ready: BTreeSet<u32>,
    /// Pairs of a process and the peer that it has a connection to.
    up: BTreeSet<(u32, u32)>,
    killed: BTreeMap<u32, Instant>,
    stopped: BTreeMap<u32, Instant>,
    stats: Option<Vec<u64>>,
    told_times: Vec<Duration>,
    messages: u64,
    by_shm: usize,
    by_udp: usize,
}

impl Chaos {
    fn start(addresses: [[u8; 4]; 3]) -> Chaos {
        let seed = std::env::var("RDMUX_CHAOS_SEED").map_or_else(
            |_| {
                SystemTime::UNIX_EPOCH
                    .elapsed()
                    .unwrap()
                    .as_nanos()
                    .rem_euclid(1 << 32) as u64
            },
            |seed| seed.parse().unwrap(),
        );
        println!("RDMUX_CHAOS_SEED={seed}");
        let (lines_in, lines) = mpsc::channel();
        let mut chaos = Chaos {
            addresses: addresses.map(IpAddr::from),
            seed,
            random: Random(seed),
            next_number: 0,
            processes: Vec::new(),
            lines_in,
            lines,
            ready: BTreeSet::new(),
            up: BTreeSet::new(),
            killed: BTreeMap::new(),
            stopped: BTreeMap::new(),
            stats: None,
            told_times: Vec::new(),
            messages: 0,
            by_shm: 0,
            by_udp: 0,
        };
        for i in 0..3 {
            let process = chaos.spawn(i);
            chaos.processes.push(process);
            chaos.introduce(i);
        }
        chaos.all_are_connected();
        chaos
    }

    fn spawn(&mut self, place: usize) -> Process {
        self.next_number += 1;
        let number = self.next_number;
        let at = SocketAddr::new(self.addresses[place], 10_000 + (number % 50_000) as u16);
        let mut child = Command::new("/proc/self/exe")
            .args(["--exact", "node", "--nocapture", "--test-threads=1"])
            .env(
                "RDMUX_CHAOS_NODE",
                format!("{at} {number} {}", self.random.next()),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        let lines = self.lines_in.clone();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some((_, what)) = line.split_once("@ ") {
                    let _ = lines.send((number, what.to_owned()));
                }
            }
            let _ = lines.send((number, "exit".to_owned()));
        });
        let stdin = child.stdin.take().unwrap();
        Process {
            number,
            at,
            child,
            stdin,
        }
    }

    /// Connects a new process to those that are there.
    fn introduce(&mut self, place: usize) {
        let number = self.processes[place].number;
        self.until(CONNECT_TIME, "a process that is ready", |chaos| {
            chaos.ready.contains(&number)
        });
        for other in 0..self.processes.len() {
            if other != place {
                self.connect(place, other);
            }
        }
    }

    fn connect(&mut self, place: usize, to: usize) {
        let to = &self.processes[to];
        let connect = format!("connect {} {}", to.at, to.number);
        self.processes[place].tell(&connect);
    }

    fn fail(&self, what: &str) -> ! {
        let living: Vec<_> = self.processes.iter().map(|p| (p.number, p.at)).collect();
        panic!(
            "{what}; living: {living:?}, up: {:?}, killed: {}, RDMUX_CHAOS_SEED={}",
            self.up,
            self.killed.len(),
            self.seed
        );
    }

    /// Returns whether a process was stopped lately: anything that it did since, or that happened to it, is not unexpected.
    fn was_stopped(&self, number: u32) -> bool {
        let after = |at: &Instant| at.elapsed() < STOP_TIME + HANG_TIME;
        self.stopped.get(&number).is_some_and(after)
    }

    fn heard(&mut self, from: u32, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let excused = |chaos: &Chaos, peer: u32| {
            chaos.killed.contains_key(&from)
                || chaos.killed.contains_key(&peer)
                || chaos.was_stopped(from)
                || chaos.was_stopped(peer)
        };
        match *words {
            ["ready"] => {
                self.ready.insert(from);
            }
            ["exit"] if self.killed.contains_key(&from) => {}
            ["up", peer] => {
                self.up.insert((from, peer.parse().unwrap()));
            }
            ["ended", peer, messages, carrier] => {
                let peer: u32 = peer.parse().unwrap();
                self.up.remove(&(from, peer));
                self.messages += messages.parse::<u64>().unwrap();
                match carrier {
                    "shm" => self.by_shm += 1,
                    _ => self.by_udp += 1,
                }
                if !excused(self, peer) {
                    self.fail(&format!("{from} lost its connection to {peer}, which lives"));
                }
                if let Some(at) = self.killed.get(&peer) {
                    self.told_times.push(at.elapsed());
                }
            }
            ["failed", peer, ..] => {
                if !excused(self, peer.parse().unwrap()) {
                    self.fail(&format!("{from}: {line}"));
                }
            }
            ["stats", ..] => {
                self.stats = Some(words[1..].iter().map(|n| n.parse().unwrap()).collect());
            }
            _ => self.fail(&format!("{from}: {line}")),
        }
    }

    /// Reads reports of the processes until `is_so` holds.
    fn until(&mut self, time: Duration, what: &str, is_so: impl Fn(&Chaos) -> bool) {
        let deadline = Instant::now() + time;
        while !is_so(self) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok((from, line)) => self.heard(from, &line),
                Err(RecvTimeoutError::Timeout) => self.fail(&format!("not in {time:?}: {what}")),
                Err(RecvTimeoutError::Disconnected) => unreachable!(),
            }
        }
    }

    fn listen_for(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((from, line)) = self.lines.recv_timeout(left) else {
                break;
            };
            self.heard(from, &line);
        }
        self.check_told();
    }

    /// Checks that every process that had a connection with a dead one was notified.
    fn check_told(&self) {
        for (process, peer) in &self.up {
            let lives = self.processes.iter().any(|p| p.number == *process);
            if lives && self.killed.get(peer).is_some_and(|at| at.elapsed() > TOLD_TIME) {
                self.fail(&format!("{process} was not told of the end of {peer}"));
            }
        }
    }

    fn are_connected(&self) -> bool {
        let numbers: Vec<u32> = self.processes.iter().map(|p| p.number).collect();
        let pairs = numbers.iter().flat_map(|a| numbers.iter().map(move |b| (*a, *b)));
        pairs.filter(|(a, b)| a != b).all(|pair| self.up.contains(&pair))
    }

    fn all_are_connected(&mut self) {
        self.until(CONNECT_TIME, "all connected", Chaos::are_connected);
        self.check_told();
    }

    fn kill(&mut self, place: usize) {
        let process = &mut self.processes[place];
        process.child.kill().unwrap();
        process.child.wait().unwrap();
        let number = process.number;
        self.killed.insert(number, Instant::now());
    }

    /// Kills one of the processes at some moment, and starts another in its place.
    fn kill_one(&mut self, places: std::ops::Range<usize>) {
        // The kill comes soon, while connections are being made, or when there are some.
        let wait_us = match self.random.below(2) {
            0 => self.random.below(20_000),
            _ => self.random.below(150_000),
        };
        self.listen_for(Duration::from_micros(wait_us));
        let place = places.start + self.random.below(places.len() as u64) as usize;
        self.kill(place);
        self.processes[place] = self.spawn(place);
        self.introduce(place);
        if self.random.below(8) == 0 {
            self.all_are_connected();
        }
    }

    fn stop_one(&mut self) {
        let wait_us = self.random.below(200_000);
        self.listen_for(Duration::from_micros(wait_us));
        let place = self.random.below(3) as usize;
        let number = self.processes[place].number;
        self.processes[place].signal(Signal::STOP);
        self.stopped.insert(number, Instant::now());
        self.listen_for(STOP_TIME);
        self.processes[place].signal(Signal::CONT);
        self.stopped.insert(number, Instant::now());
        // By now each of its connections goes on or has ended, at both ends.
        self.listen_for(SETTLE_TIME);
        for other in (0..3).filter(|other| *other != place) {
            let peer = self.processes[other].number;
            let ends = [(number, peer), (peer, number)].map(|pair| self.up.contains(&pair));
            if ends[0] != ends[1] {
                self.fail(&format!(
                    "{number} and {peer} disagree whether they are connected"
                ));
            }
            if !ends[0] {
                println!("the connection of {number}, which was stopped, with {peer} ended");
                self.connect(place, other);
            }
        }
        self.all_are_connected();
        self.stopped.clear();
    }

    fn stats_of(&mut self, place: usize) -> Vec<u64> {
        self.stats = None;
        self.processes[place].tell("stats");
        self.until(CONNECT_TIME, "figures", |chaos| chaos.stats.is_some());
        self.stats.take().unwrap()
    }

    /// Returns the figures of a process after all its connections have ended.
    ///
    /// Waits a while until there are at most `descriptors`, since those of links that are being made or closed go away.
    fn idle_stats_of(&mut self, place: usize, descriptors: u64) -> Vec<u64> {
        for other in (0..self.processes.len()).filter(|other| *other != place) {
            self.kill(other);
        }
        let number = self.processes[place].number;
        self.until(TOLD_TIME, "told of all", |chaos| {
            chaos.up.iter().all(|(process, _)| *process != number)
        });
        // The resources of a link are closed when its end has been served, which may be after the end of the connection; and some
        // processes may have died amid connecting.
        let mut stats = self.stats_of(place);
        let deadline = Instant::now() + ACCEPTED_TIME;
        while (stats[1] > 1 || stats[0] > descriptors) && Instant::now() < deadline {
            self.listen_for(Duration::from_millis(20));
            stats = self.stats_of(place);
        }
        stats
    }

    fn finish(mut self) {
        for place in 0..self.processes.len() {
            self.kill(place);
        }
        self.processes.clear();
        while self.lines.recv_timeout(Duration::from_millis(50)).is_ok() {}
        let names = fs::read_to_string("/proc/net/unix").unwrap();
        for address in self.addresses {
            let prefix = format!("@rdmux-4791-{address}");
            let left: Vec<&str> = names.lines().filter(|line| line.contains(&prefix)).collect();
            assert!(left.is_empty(), "names are left: {left:?}");
        }
        self.told_times.sort_unstable();
        let told = &self.told_times;
        println!(
            "{} killed; told of {}: median {:?}, longest {:?}; {} messages; ended by shared memory {}, by UDP {}",
            self.killed.len(),
            told.len(),
            told.get(told.len() / 2),
            told.last(),
            self.messages,
            self.by_shm,
            self.by_udp,
        );
    }
}

/// Returns how often a test kills: its share of the number that was asked for.
fn share(variable: &str, in_all: u64, percent: u64) -> u64 {
    let asked = std::env::var(variable).map_or(in_all, |n| n.parse().unwrap());
    (asked * percent).div_ceil(100)
}

const KILLS: u64 = 100;

fn kill_any_of_three(addresses: [[u8; 4]; 3], percent: u64) {
    let mut chaos = Chaos::start(addresses);
    for _ in 0..share("RDMUX_CHAOS_KILLS", KILLS, percent) {
        chaos.kill_one(0..3);
    }
    chaos.all_are_connected();
    chaos.finish();
}

#[test]
fn kill__any_of_three_that_share_an_address() {
    kill_any_of_three([[127, 0, 1, 101]; 3], 30);
}

#[test]
fn kill__any_of_three_with_addresses_of_their_own() {
    kill_any_of_three([[127, 0, 1, 102], [127, 0, 1, 103], [127, 0, 1, 104]], 20);
}

#[test]
fn kill__leaves_nothing_behind_in_who_survives() {
    let mut chaos = Chaos::start([[127, 0, 1, 105], [127, 0, 1, 105], [127, 0, 1, 106]]);
    let kills = share("RDMUX_CHAOS_KILLS", KILLS, 50);
    let mut figures = Vec::new();
    for part in [kills / 5, kills - kills / 5] {
        for _ in 0..part {
            chaos.kill_one(1..3);
        }
        let most = figures.first().map_or(u64::MAX, |early: &Vec<u64>| early[0]);
        figures.push(chaos.idle_stats_of(0, most));
        for place in [1, 2] {
            chaos.processes[place] = chaos.spawn(place);
            chaos.introduce(place);
        }
        chaos.all_are_connected();
    }
    println!(
        "descriptors, files in memory, mappings of them, mappings, KiB, requests without packets, UDP sockets: {figures:?}"
    );
    let [early, late] = &figures[..] else {
        unreachable!()
    };
    assert!(late[0] <= early[0], "descriptors are left");
    // The process keeps a socket for each slot that it ever sent to, of which there are 31, and those of the second block.
    assert!(late[6] <= early[6] + 31 + 16, "UDP sockets are left");
    // The address has one ledger, which is not mapped.
    assert_eq!(late[1..3], [1, 0], "files in memory are left");
    // The C library keeps stacks and arenas of threads.
    assert!(late[3] <= early[3] + 64, "mappings are left");
    assert!(late[4] <= early[4] + (8 << 10), "memory is left");
    chaos.finish();
}

#[test]
fn stop__is_noticed_by_nobody_else() {
    let mut chaos = Chaos::start([[127, 0, 1, 107], [127, 0, 1, 107], [127, 0, 1, 108]]);
    for _ in 0..share("RDMUX_CHAOS_STOPS", 2, 100) {
        chaos.stop_one();
    }
    chaos.finish();
}

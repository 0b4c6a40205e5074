//! The client: threads that each keep the queues of their connections full.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rdmux_memory::AnonymousMemory;
use rdmux_runtime::{Completed, EstablishError, MessageConnection, SIGNAL_EVERY, Sizes};
use rdmux_verbs::{
    Access, Carrier, CompletionQueue, ConnectParams, Device, Memory, MemoryRegion, OpenError,
    ProtectionDomain, Qpn, Status as CompletionStatus, WorkCompletion,
};
use serde_json::json;

use super::capsule::{
    Command, Identity, LBA_BYTES, MESSAGE_LEN_MAX, Opcode, QUEUE_MAX, RESPONSE_LEN, Response, Statistics,
    Status,
};
use super::{IODEPTH_DEFAULT, RUNTIME_DEFAULT, Rw};
use crate::cmd::perf::{PATIENCE, Test, WATCH};
use crate::output::{self, Align};

/// Longest time that the histogram distinguishes, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;
/// Blocks that a connection writes and checks with --verify.
const AREA_MAX: u64 = 1024;
/// The client's message when the server is gone.
const ENDED: &str = "the connection has ended: the server was stopped, or its process has ended";
/// Time for the server to agree to the end of a connection.
const CLOSING: Duration = Duration::from_secs(2);

/// Task of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Writes every block of the connection's own area once.
    Fill,
    /// The measurement: commands of each connection, or as many as there are until then.
    Measure {
        rw: Rw,
        ios: u64,
        until: Option<Instant>,
    },
    /// Reads every block of the connection's own area once.
    Check,
}

/// Settings that all connections share.
#[derive(Debug)]
struct Job {
    bs: u32,
    iodepth: usize,
    connections: u64,
    /// Blocks of `bs` bytes on a drive, and number of drives.
    blocks: u64,
    drives: u64,
    /// Blocks of a connection's own area; `None`: nothing is verified.
    area: Option<u64>,
    /// Part of the patterns of this run.
    nonce: u64,
}

impl Job {
    /// Returns the drive and the LBA of one of the blocks of all drives: consecutive ones are on consecutive drives.
    fn place_of(&self, block: u64) -> (u32, u64) {
        let on_drive = block / self.drives;
        let lba = on_drive * (u64::from(self.bs) / LBA_BYTES);
        ((block % self.drives) as u32, lba)
    }

    /// Fills `into` with what the block holds once it was written so often.
    fn pattern(&self, block: u64, writes: u32, into: &mut [u8]) {
        let mut word = mixed(self.nonce ^ mixed(block << 32 ^ u64::from(writes)));
        for bytes in into.chunks_mut(8) {
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
            word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
    }
}

/// Mixes the bits of a number, as SplitMix64 does.
fn mixed(mut word: u64) -> u64 {
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// A command in flight.
#[derive(Clone, Copy, Debug)]
struct Flight {
    began: Instant,
    block: u64,
    writes: bool,
}

/// A connection.
#[derive(Debug)]
struct Lane {
    link: MessageConnection,
    /// Place of its buffers in the memory of its thread: one for each command in flight.
    at: u64,
    free: Vec<u16>,
    flights: Vec<Option<Flight>>,
    /// The first block of its area, and for each how often it was written and whether a command is in flight.
    first: u64,
    area: Vec<(u32, bool)>,
    /// Commands not yet begun in this phase.
    left: u64,
    /// Those begun.
    begun: u64,
}

impl Lane {
    /// Chooses the block of the next command, and whether it writes. `None`: commands in flight occupy every block.
    fn next(&mut self, job: &Job, phase: Phase, random: &mut u64) -> Option<(u64, bool)> {
        let Phase::Measure { rw, .. } = phase else {
            return Some((self.first + self.begun, phase == Phase::Fill));
        };
        // xorshift.
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        let writes = match rw {
            Rw::Randread => false,
            Rw::Randwrite => true,
            Rw::Randrw => *random >> 63 == 0,
        };
        if self.area.is_empty() {
            return Some((*random % (job.blocks * job.drives), writes));
        }
        // A block that is read while it is written may hold anything.
        let length = self.area.len() as u64;
        let from = *random % length;
        let mut candidates = (from..length).chain(0..from);
        let at = candidates.find(|at| !self.area[*at as usize].1)?;
        Some((self.first + at, writes))
    }
}

/// A thread's connections, and all that they need.
#[derive(Debug)]
struct Worker {
    lanes: Vec<Lane>,
    by_qpn: HashMap<Qpn, usize>,
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    sizes: Sizes,
    random: u64,
    /// Commands in flight, and not yet begun, of all connections.
    in_flight: u64,
    left: u64,
    latency: Histogram<u64>,
    reads: u64,
    writes: u64,
    /// One block, to compare with.
    expected: Vec<u8>,
    found: Vec<u8>,
}

impl Worker {
    fn new(
        device: &Device,
        args: &super::super::Args,
        bs: u32,
        iodepth: usize,
        lanes: usize,
        number: usize,
    ) -> Result<Worker> {
        let sizes = Sizes {
            message_bytes: MESSAGE_LEN_MAX,
            sent_bytes: MESSAGE_LEN_MAX,
            receives: iodepth + 1,
            answers: 0,
            own: 2 * iodepth + SIGNAL_EVERY,
            operations: 0,
        };
        let pd = device.alloc_pd()?;
        let cq = device.create_cq((lanes * sizes.completions()) as u32)?;
        let bytes = lanes * iodepth * bs as usize;
        let memory = super::super::memory(args.memory, bytes).with_context(|| {
            let size = output::bytes(bytes as u64);
            format!("cannot allocate {size} for the buffers: use fewer --connections or a smaller --iodepth")
        })?;
        let memory = Arc::new(memory);
        // The first access of a page costs a fault.
        for at in (0..memory.len()).step_by(4096) {
            memory.write(at, &[0]).ok();
        }
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = pd.reg_mr_all(memory.clone(), memory.address(), access)?;
        Ok(Worker {
            lanes: Vec::with_capacity(lanes),
            by_qpn: HashMap::new(),
            mr,
            memory,
            cq,
            pd,
            sizes,
            random: mixed(number as u64 + 1),
            in_flight: 0,
            left: 0,
            latency: Histogram::new_with_max(LONGEST_NS, 3)?,
            reads: 0,
            writes: 0,
            expected: vec![0; bs as usize],
            found: vec![0; bs as usize],
        })
    }

    fn connect(&mut self, peer: SocketAddr, bs: u32, iodepth: usize) -> Result<()> {
        let params = ConnectParams::default();
        let connected = MessageConnection::connect(&self.pd, &self.cq, peer, &params, &self.sizes);
        let link = connected.map_err(|error| match error {
            EstablishError::Connect(error) => super::super::not_connected(error, peer, Test::Storage),
            other => other.into(),
        })?;
        self.by_qpn.insert(link.qp().qpn(), self.lanes.len());
        self.lanes.push(Lane {
            link,
            at: (self.lanes.len() * iodepth) as u64 * u64::from(bs),
            free: (0..iodepth as u16).rev().collect(),
            flights: vec![None; iodepth],
            first: 0,
            area: Vec::new(),
            left: 0,
            begun: 0,
        });
        Ok(())
    }

    /// Returns the next completion; `None`: there was none for a while.
    fn wait(&self) -> Result<Option<WorkCompletion>> {
        match self.cq.poll() {
            Some(wc) => Ok(Some(wc)),
            None => Ok(self.cq.wait(WATCH)?),
        }
    }

    /// Waits for what comes next; `None`: it concerns no command. Returns the connection in any case.
    fn next(&mut self) -> Result<(usize, Completed)> {
        let began = Instant::now();
        loop {
            if let Some(wc) = self.wait()? {
                let Some(at) = self.by_qpn.get(&wc.qpn).copied() else {
                    continue;
                };
                let completed = self.lanes[at].link.handle(&wc);
                return Ok((
                    at,
                    completed.map_err(|status| match status {
                        // Its cause is the end of the connection.
                        CompletionStatus::Flushed => anyhow::anyhow!(ENDED),
                        status => anyhow::anyhow!("the connection failed: {status}"),
                    })?,
                ));
            }
            let ended = self.lanes.iter().any(|lane| lane.link.end().is_some());
            ensure!(!ended, ENDED);
            ensure!(began.elapsed() < PATIENCE, super::super::silent());
        }
    }

    /// Sends a command that moves no bytes on the first connection, and returns what follows the response.
    fn ask(&mut self, opcode: Opcode) -> Result<Vec<u8>> {
        const ID: u16 = u16::MAX;
        let slot = loop {
            if let Some(slot) = self.lanes[0].link.take_slot() {
                break slot;
            }
            self.next()?;
        };
        self.lanes[0].link.send(slot, &Command::of(ID, opcode).emit())?;
        loop {
            if let (0, Completed::Message { bytes, .. }) = self.next()? {
                let (response, more) = Response::parse(&bytes).with_context(strange)?;
                ensure!(response.id == ID, strange());
                refused(response.status)?;
                return Ok(more.to_vec());
            }
        }
    }

    /// Executes a phase on all connections.
    fn run(&mut self, job: &Job, phase: Phase) -> Result<()> {
        for lane in &mut self.lanes {
            (lane.begun, lane.left) = match phase {
                Phase::Measure { ios, .. } => (0, ios),
                Phase::Fill | Phase::Check => (0, lane.area.len() as u64),
            };
        }
        self.left = self
            .lanes
            .iter()
            .fold(0, |sum, lane| sum.saturating_add(lane.left));
        let began = Instant::now();
        (0..self.lanes.len()).try_for_each(|at| self.fill(at, job, phase, began))?;
        while self.in_flight > 0 || self.left > 0 {
            let (at, completed) = self.next()?;
            let now = Instant::now();
            if let Phase::Measure {
                until: Some(until), ..
            } = phase
                && now >= until
            {
                self.left = 0;
                self.lanes.iter_mut().for_each(|lane| lane.left = 0);
            }
            if let Completed::Message { bytes, .. } = completed {
                self.responded(at, &bytes, job, phase, now)?;
            }
            // A completion of a send may have freed slots.
            self.fill(at, job, phase, now)?;
        }
        Ok(())
    }

    /// Begins as many commands as a connection may have in flight.
    fn fill(&mut self, at: usize, job: &Job, phase: Phase, now: Instant) -> Result<()> {
        let lane = &mut self.lanes[at];
        while lane.left > 0 && !lane.free.is_empty() && lane.link.has_slot() {
            let Some((block, writes)) = lane.next(job, phase, &mut self.random) else {
                break;
            };
            let (Some(id), Some(slot)) = (lane.free.pop(), lane.link.take_slot()) else {
                break;
            };
            let buffer = lane.at + u64::from(id) * u64::from(job.bs);
            if let Some((written, busy)) = lane.area.get_mut((block - lane.first) as usize) {
                *busy = true;
                if writes {
                    *written += 1;
                    job.pattern(block, *written, &mut self.expected);
                } else {
                    // The buffer then holds only bytes that the server has sent.
                    self.expected.fill(0);
                }
                self.memory.write(buffer, &self.expected)?;
            }
            let (drive, lba) = job.place_of(block);
            let command = Command {
                id,
                opcode: if writes { Opcode::Write } else { Opcode::Read },
                drive,
                lba,
                bytes: job.bs,
                va: self.mr.iova() + buffer,
                rkey: self.mr.rkey().0,
            };
            lane.link.send(slot, &command.emit())?;
            lane.flights[usize::from(id)] = Some(Flight {
                began: now,
                block,
                writes,
            });
            lane.begun += 1;
            lane.left -= 1;
            self.left -= 1;
            self.in_flight += 1;
        }
        Ok(())
    }

    fn responded(&mut self, at: usize, bytes: &[u8], job: &Job, phase: Phase, now: Instant) -> Result<()> {
        let (response, _) = Response::parse(bytes).with_context(strange)?;
        let lane = &mut self.lanes[at];
        let flight = lane
            .flights
            .get_mut(usize::from(response.id))
            .and_then(Option::take);
        let flight = flight.with_context(strange)?;
        refused(response.status)?;
        ensure!(response.bytes == job.bs, strange());
        if let Some((written, busy)) = lane.area.get_mut((flight.block - lane.first) as usize) {
            *busy = false;
            if !flight.writes {
                job.pattern(flight.block, *written, &mut self.expected);
                let buffer = lane.at + u64::from(response.id) * u64::from(job.bs);
                self.memory.read(buffer, &mut self.found)?;
                let differs = self.expected.iter().zip(&self.found).position(|(a, b)| a != b);
                if let Some(byte) = differs {
                    let (drive, lba) = job.place_of(flight.block);
                    bail!(
                        "verify: drive {drive}, LBA {lba}: byte {byte} of {} is not what this client has written: is another client writing?",
                        job.bs
                    );
                }
            }
        }
        lane.free.push(response.id);
        self.in_flight -= 1;
        if matches!(phase, Phase::Measure { .. }) {
            self.latency
                .saturating_record((now - flight.began).as_nanos() as u64);
            match flight.writes {
                true => self.writes += 1,
                false => self.reads += 1,
            }
        }
        Ok(())
    }
}

fn strange() -> String {
    format!(
        "the server's response is none of `rdmux perf storage`: it has {RESPONSE_LEN} bytes or more, and answers a command"
    )
}

fn refused(status: Status) -> Result<()> {
    ensure!(
        status == Status::Success,
        "the server refused a command: {status}"
    );
    Ok(())
}

/// Executes a phase on the threads of all workers; returns the time that it took.
fn phase(workers: &mut [Worker], job: &Job, phase: Phase) -> Result<Duration> {
    let began = Instant::now();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for worker in workers.iter_mut() {
            let thread = std::thread::Builder::new().name("storage".into());
            threads.push(thread.spawn_scoped(scope, || worker.run(job, phase))?);
        }
        for thread in threads {
            match thread.join() {
                Ok(result) => result?,
                Err(_) => bail!("a thread of the client has panicked"),
            }
        }
        Ok(())
    })?;
    Ok(began.elapsed())
}

pub(super) fn run(args: &super::super::Args, host: &str, bs: u32) -> Result<()> {
    let options = &args.storage;
    let iodepth = args.tx_depth.unwrap_or(IODEPTH_DEFAULT) as usize;
    ensure!(
        iodepth <= QUEUE_MAX,
        "--iodepth {iodepth}: a connection has at most {QUEUE_MAX} commands in flight; use more --connections"
    );
    let rw = options.rw.unwrap_or(Rw::Randread);
    let connections = usize::from(args.qp);
    let threads = usize::from(options.threads.unwrap_or(1)).min(connections);
    let (device, peer) = super::super::device_towards(args, host)?;
    let mut workers = Vec::new();
    for number in 0..threads {
        let engine = match number {
            0 => device.clone(),
            _ => match device.open_engine() {
                Err(OpenError::Unsupported(_)) => device.clone(),
                engine => engine?,
            },
        };
        // Connections are divided as evenly as possible.
        let lanes = (connections + threads - 1 - number) / threads;
        let mut worker = Worker::new(&engine, args, bs, iodepth, lanes, number)?;
        (0..lanes).try_for_each(|_| worker.connect(peer, bs, iodepth))?;
        workers.push(worker);
    }
    let identity = workers[0].ask(Opcode::Identify)?;
    let identity = Identity::parse(&identity).with_context(strange)?;
    ensure!(
        iodepth <= identity.queue as usize,
        "--iodepth {iodepth}: the server takes {} commands of a connection at a time",
        identity.queue
    );
    let geometry = identity.geometry;
    let mut job = Job {
        bs,
        iodepth,
        connections: connections as u64,
        blocks: geometry.drive_bytes / u64::from(bs),
        drives: geometry.drives.into(),
        area: None,
        nonce: RandomState::new().hash_one(std::process::id()),
    };
    ensure!(
        job.blocks > 0,
        "--bs {bs}: the server's drives have {} bytes: use a smaller --bs or start the server with a larger --drive-size",
        geometry.drive_bytes
    );
    if options.verify {
        let area = (job.blocks * job.drives / job.connections).min(AREA_MAX);
        ensure!(
            area > 0,
            "--verify: the server's drives have fewer blocks than there are connections: use fewer --connections or a larger --drive-size"
        );
        job.area = Some(area);
        let lanes = workers.iter_mut().flat_map(|worker| &mut worker.lanes);
        for (number, lane) in lanes.enumerate() {
            lane.first = number as u64 * area;
            lane.area = vec![(0, false); area as usize];
        }
        phase(&mut workers, &job, Phase::Fill)?;
    }
    let before = statistics(&mut workers[0])?;
    let cpu_ns = super::process_cpu_ns();
    let runtime = match (args.duration, args.iters) {
        (Some(seconds), _) => Some(Duration::from_secs(seconds.into())),
        (None, None) => Some(RUNTIME_DEFAULT),
        (None, Some(_)) => None,
    };
    let measure = Phase::Measure {
        rw,
        ios: args
            .iters
            .filter(|_| runtime.is_none())
            .map_or(u64::MAX >> 8, u64::from),
        until: runtime.map(|runtime| Instant::now() + runtime),
    };
    let elapsed = phase(&mut workers, &job, measure)?;
    let cpu_ns = super::process_cpu_ns() - cpu_ns;
    let server = statistics(&mut workers[0])?.since(&before);
    if options.verify {
        phase(&mut workers, &job, Phase::Check)?;
    }
    let mut latency = Histogram::new_with_max(LONGEST_NS, 3)?;
    workers
        .iter()
        .try_for_each(|worker| latency.add(&worker.latency))?;
    let report = Report {
        rw,
        threads,
        verified: options.verify,
        carrier: carrier(&workers[0].lanes[0].link),
        identity,
        elapsed,
        reads: workers.iter().map(|worker| worker.reads).sum(),
        writes: workers.iter().map(|worker| worker.writes).sum(),
        latency,
        cpu_ns,
        server,
        job,
    };
    for lane in workers.into_iter().flat_map(|worker| worker.lanes) {
        lane.link.close(CLOSING);
    }
    match args.json {
        true => output::say(&format!("{:#}", report.json())),
        false => output::say(&report.text()),
    }
    Ok(())
}

fn statistics(worker: &mut Worker) -> Result<Statistics> {
    let answer = worker.ask(Opcode::Statistics)?;
    Statistics::parse(&answer).with_context(strange)
}

fn carrier(link: &MessageConnection) -> &'static str {
    match link.qp().carrier() {
        Some(Carrier::SharedMemory) => "shared memory",
        Some(Carrier::Udp(_)) => "UDP",
        Some(Carrier::Rnic) => "RNIC",
        None => "unknown",
    }
}

/// Result of a run.
#[derive(Debug)]
struct Report {
    job: Job,
    rw: Rw,
    threads: usize,
    verified: bool,
    carrier: &'static str,
    identity: Identity,
    elapsed: Duration,
    reads: u64,
    writes: u64,
    latency: Histogram<u64>,
    /// Processor time of this process.
    cpu_ns: u64,
    /// Counters of the server during the run.
    server: Statistics,
}

/// Returns a server's settings as JSON.
pub(super) fn server_json(identity: &Identity) -> serde_json::Value {
    json!({
        "drives": identity.geometry.drives,
        "drive_bytes": identity.geometry.drive_bytes,
        "drive_latency_us": identity.latency.as_nanos() as f64 / 1e3,
        "drive_depth": identity.depth,
        "reactors": identity.reactors,
        "queues": identity.queues,
        "moderation": identity.moderation,
    })
}

/// Returns a server's settings as a line.
pub(super) fn server_words(identity: &Identity) -> String {
    format!(
        "{} of {}, latency {} us, depth {}; {}, queues {}, moderation {}",
        plural(identity.geometry.drives.into(), "drive"),
        output::bytes(identity.geometry.drive_bytes),
        identity.latency.as_nanos() as f64 / 1e3,
        identity.depth,
        plural(identity.reactors.into(), "reactor"),
        identity.queues,
        identity.moderation
    )
}

fn plural(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

impl Report {
    fn ios(&self) -> u64 {
        self.reads + self.writes
    }

    fn iops(&self) -> f64 {
        self.ios() as f64 / self.elapsed.as_secs_f64()
    }

    fn mib_per_s(&self) -> f64 {
        self.iops() * f64::from(self.job.bs) / f64::from(1 << 20)
    }

    /// Names and values of the latency's figures, in microseconds.
    fn latencies(&self) -> [(&'static str, f64); 7] {
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |quantile| us(self.latency.value_at_quantile(quantile));
        [
            ("min", us(self.latency.min())),
            ("mean", self.latency.mean() / 1e3),
            ("p50", at(0.5)),
            ("p99", at(0.99)),
            ("p99.9", at(0.999)),
            ("p99.99", at(0.9999)),
            ("max", us(self.latency.max())),
        ]
    }

    /// Returns processor time as microseconds of a command.
    fn us_per_io(&self, cpu_ns: u64) -> f64 {
        cpu_ns as f64 / self.ios().max(1) as f64 / 1e3
    }

    /// Names and values of what the server did each second.
    fn rates(&self) -> [(&'static str, f64); 4] {
        let server = &self.server;
        let seconds = server.time_ns.max(1) as f64 / 1e9;
        [
            ("reactor_wakeups", server.reactor_wakeups as f64 / seconds),
            ("other_wakeups", server.other_wakeups as f64 / seconds),
            ("completions", server.completions as f64 / seconds),
            ("cpu_ms", server.cpu_ns as f64 / seconds / 1e6),
        ]
    }

    fn json(&self) -> serde_json::Value {
        let mut value = json!({
            "test": "storage",
            "rw": self.rw.name(),
            "bs": self.job.bs,
            "iodepth": self.job.iodepth,
            "connections": self.job.connections,
            "threads": self.threads,
            "verified": self.verified,
            "carrier": self.carrier,
            "server": server_json(&self.identity),
            "runtime_s": self.elapsed.as_secs_f64(),
            "ios": self.ios(),
            "reads": self.reads,
            "writes": self.writes,
            "iops": self.iops(),
            "mib_per_s": self.mib_per_s(),
            "client_cpu_us": self.us_per_io(self.cpu_ns),
            "server_cpu_us": self.us_per_io(self.server.cpu_ns),
            "server_reactor_cpu_us": self.us_per_io(self.server.reactor_cpu_ns),
        });
        let object = |figures: &[(&str, f64)]| {
            let pairs = figures
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).into()));
            serde_json::Value::Object(pairs.collect())
        };
        value["latency_us"] = object(&self.latencies());
        value["server_per_s"] = object(&self.rates());
        value
    }

    fn text(&self) -> String {
        let latencies = self.latencies();
        let mut columns = latencies.map(|(name, _)| (name, Align::Right));
        columns[0].1 = Align::Left;
        let row = latencies.iter().map(|(_, us)| format!("{us:.1}")).collect();
        let [wakeups, others, completions, cpu_ms] = self.rates().map(|(_, rate)| rate);
        format!(
            "storage: {}, {} a command, {} in flight on each of {}, {}, over {}{}\n\
             server: {}\n\n\
             {:.0} IOPS, {:.1} MiB/s: {} and {} in {:.2} s\n\n\
             latency, us\n{}\n\n\
             processor time, us a command: client {:.2}, server {:.2} (its reactors {:.2})\n\
             server, each second: wake-ups {wakeups:.0} of its reactors and {others:.0} of other threads, {completions:.0} completions, {cpu_ms:.0} ms of processor time",
            self.rw.name(),
            output::bytes(self.job.bs.into()),
            self.job.iodepth,
            plural(self.job.connections, "connection"),
            plural(self.threads as u64, "thread"),
            self.carrier,
            if self.verified { ", verified" } else { "" },
            server_words(&self.identity),
            self.iops(),
            self.mib_per_s(),
            plural(self.reads, "read"),
            plural(self.writes, "write"),
            self.elapsed.as_secs_f64(),
            output::table(&columns, &[row]),
            self.us_per_io(self.cpu_ns),
            self.us_per_io(self.server.cpu_ns),
            self.us_per_io(self.server.reactor_cpu_ns),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        Job {
            bs: 1024,
            iodepth: 1,
            connections: 1,
            blocks: 8,
            drives: 3,
            area: None,
            nonce: 7,
        }
    }

    #[test]
    fn place_of__consecutive_blocks_are_on_consecutive_drives() {
        let places: Vec<(u32, u64)> = (0..7).map(|block| job().place_of(block)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (2, 0), (0, 2), (1, 2), (2, 2), (0, 4)]);
    }

    #[test]
    fn pattern__differs_by_block_by_write_and_by_run() {
        let pattern = |nonce, block, writes| {
            let mut bytes = [0; 1024];
            Job { nonce, ..job() }.pattern(block, writes, &mut bytes);
            bytes
        };
        let one = pattern(7, 1, 1);
        assert_eq!(one, pattern(7, 1, 1));
        for other in [pattern(7, 1, 2), pattern(7, 2, 1), pattern(8, 1, 1), [0; 1024]] {
            let same = one.chunks(8).zip(other.chunks(8)).filter(|(a, b)| a == b);
            assert_eq!(same.count(), 0, "no word is the same");
        }
    }
}

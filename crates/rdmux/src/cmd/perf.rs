//! `rdmux perf`: latency and bandwidth of one operation, with perftest's columns and flags.
//!
//! The server has no host argument, the client has one. They meet by CM on the port. The client's private data describes the test, and the
//! server's gives the address of its buffer:
//!
//! ```text
//! client  "RDPF" | version 2 | test u8 | queue pairs u16 | bytes u32 | flags u32 | depth u32 | va u64 | rkey u32    big endian
//! server  va u64 | rkey u32 | bytes u32
//! flags   bit 0: sleep on completion events
//! ```
//!
//! A server that runs another test refuses the connection, and gives the reason as text in the private data.

mod push;
mod storage;

use std::cell::Cell;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{CommandFactory, Parser, ValueEnum};
use rdmux_memory::AnonymousMemory;
use rdmux_push::{TargetError, is_malformed_ipv4, parse_size};
use rdmux_verbs::{
    Access, AsyncEvent, Carrier, CompletionQueue, ConnectError, ConnectParams, Connection, Counters, Device,
    Memory, MemoryRegion, Operation, Placement, QpOptions, QueuePair, RKey, RecvRequest, RejReason,
    Selectivity, SendFlags, SendRequest, SgeList, Status, Target, WorkCompletion,
};
use serde::Serialize;

/// Time that a server waits for a client's further connections, and that each side waits for the other's next step.
const PATIENCE: Duration = Duration::from_secs(60);
/// Period at which a sleeping side checks whether the other is still there.
const WATCH: Duration = Duration::from_secs(1);
/// Largest message of `-a`: 8 MiB, as perftest.
const ALL_SIZES_MAX: u32 = 1 << 23;
/// Largest message.
const SIZE_MAX: u32 = 1 << 30;
/// Requests in flight on each queue pair, unless `-t` says otherwise.
const TX_DEPTH_DEFAULT: u32 = 128;
/// Reason for the refusal of `-e`.
const NO_EVENTS: &str = "write-lat does not support -e: a WRITE generates no completion at its target, which polls the memory; use send-lat";
/// Number of WRITEs of which one is completed, which keeps the queue from filling up.
const COMPLETED_EVERY: u8 = 64;
/// Maximum number of checks of a byte between two calls that drive the device.
const LOOKS_MAX: u32 = 256;

/// What is measured.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Test {
    WriteLat,
    WriteBw,
    ReadLat,
    ReadBw,
    SendLat,
    SendBw,
    FlushLat,
    FlushBw,
    /// Reads of a region of `rdmux serve`, by message and by RDMA; prints a table by size and depth.
    PushRead,
    /// Writes to a region of `rdmux serve` until they are durable, by each method; prints a table by size and depth.
    PushWrite,
    /// Reads and writes of a service with simulated drives; both sides are this command.
    Storage,
}

impl Test {
    const ALL: [Test; 8] = [
        Test::WriteLat,
        Test::WriteBw,
        Test::ReadLat,
        Test::ReadBw,
        Test::SendLat,
        Test::SendBw,
        Test::FlushLat,
        Test::FlushBw,
    ];

    fn is_latency(self) -> bool {
        matches!(
            self,
            Test::WriteLat | Test::ReadLat | Test::SendLat | Test::FlushLat
        )
    }

    /// Returns whether each side has completions to sleep on while it waits for the other.
    fn has_events(self) -> bool {
        self != Test::WriteLat
    }

    fn title(self) -> &'static str {
        match self {
            Test::WriteLat => "RDMA_Write Latency Test",
            Test::WriteBw => "RDMA_Write BW Test",
            Test::ReadLat => "RDMA_Read Latency Test",
            Test::ReadBw => "RDMA_Read BW Test",
            Test::SendLat => "Send Latency Test",
            Test::SendBw => "Send BW Test",
            Test::FlushLat => "RDMA_Write + Flush Latency Test",
            Test::FlushBw => "RDMA_Write + Flush BW Test",
            Test::PushRead => "Push Read Latency Test",
            Test::PushWrite => "Push Write Latency Test",
            Test::Storage => "Storage Test",
        }
    }

    /// Returns its name on the command line.
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn default_size(self) -> u32 {
        if self.is_latency() { 2 } else { 65_536 }
    }

    fn default_iterations(self) -> u32 {
        if self.is_latency() { 1_000 } else { 5_000 }
    }
}

/// Measure latency or bandwidth, as perftest does.
///
/// Run it without HOST on the server, and with the server's name or address on the client. WRITE and SEND latency is half a round trip;
/// READ and FLUSH latency is a whole one (WRITE, then FLUSH with global visibility). Both ends poll, so each keeps one CPU busy, unless
/// `-e` is given.
///
/// push-read and push-write measure the push service: HOST is rdmux://HOST[:PORT]/REGION; without it, the command starts a server.
///
/// storage measures a service with simulated drives, in fio's words, at any number of clients: each command is a message of 64 bytes, the server
/// moves the block by RDMA WRITE (read) or RDMA READ (write) when the drive has finished, and responds. The server ends by Ctrl-C. Both sides
/// wait as the environment variable RDMUX_WAIT says.
#[derive(Parser, Debug, Clone)]
#[command(after_help = "\
JSON: one object, of the client: test, results (array of MsgSize, n_iterations, and for latency in us t_min, t_max, t_typical, t_avg, t_stdev,
percentile_99, percentile_99.9; for bandwidth BW_peak, BW_average, in MiB/s or Gb/s, and MsgRate, in millions), counters (of the
device, those above 0).
JSON of push-read and push-write: one object: test, domain, durable, carrier, client_cpu, server_cpu, client_waits, server_waits, cells
(array of method, bytes, depth, requests, p50_us, p99_us, mean_us, server_application_us, server_nic_us).
JSON of storage: of the client one object: test, rw, bs, iodepth, connections, threads, verified, carrier, server (object: drives, drive_bytes,
drive_latency_us, drive_depth, reactors, queues, moderation), runtime_s, ios, reads, writes, iops, mib_per_s, latency_us (object: min, mean, p50, p99,
p99.9, p99.99, max), processor time of a command: client_cpu_us, server_cpu_us, and of that server_reactor_cpu_us; server_per_s (object:
reactor_wakeups and other_wakeups, the voluntary context switches of its reactors and of its other threads, completions, those that its
reactors report, cpu_ms). Of the server one line, when clients can connect: listening, server.")]
pub(crate) struct Args {
    /// Test to run.
    #[arg(value_enum)]
    pub(crate) test: Test,
    /// Name or address of the server; without it, this process is the server.
    pub(crate) host: Option<String>,
    /// Bytes of a message, optionally with K, M or G; of storage, of a block [default: 2 for latency, 65536 for bandwidth, 4096 for storage].
    #[arg(short, long, visible_alias = "bs", value_name = "BYTES", value_parser = parse_message_size)]
    pub(crate) size: Option<u32>,
    /// Iterations; of storage, commands on each connection [default: 1000 for latency, 5000 for bandwidth, for storage a duration].
    #[arg(short = 'n', long, visible_alias = "ios", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iters: Option<u32>,
    /// Run for this many seconds, such as 5 or 5s, instead of a number of iterations [default: 5 for storage].
    #[arg(short = 'D', long, visible_alias = "runtime", value_name = "SECONDS", conflicts_with = "iters", value_parser = parse_seconds)]
    pub(crate) duration: Option<u32>,
    /// Number of round trips in one time measurement (latency), for round trips hardly longer than a reading of the clock. Percentiles are
    /// then those of the means of N round trips.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) group: u32,
    /// Number of queue pairs (bandwidth, storage).
    #[arg(short, long, visible_alias = "connections", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub(crate) qp: u16,
    /// Measure all sizes from 2 bytes to 8 MiB.
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Requests in flight on each queue pair (bandwidth, storage) [default: 128 for bandwidth, 32 for storage].
    #[arg(short, long, visible_alias = "iodepth", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) tx_depth: Option<u32>,
    /// Sleep on completion events instead of polling, at both ends; the client's choice holds for both. A WRITE generates no event at its
    /// target, so write-lat does not support this.
    #[arg(short, long)]
    pub(crate) events: bool,
    /// Kind of memory for the buffers of this side.
    #[arg(long, value_enum, default_value_t = MemoryKind::Shared)]
    pub(crate) memory: MemoryKind,
    /// Accepted for compatibility with perftest; CPU frequency is never checked.
    #[arg(short = 'F', long = "CPU-freq")]
    pub(crate) ignore_cpu_frequency: bool,
    /// Report Gb/sec instead of MiB/sec.
    #[arg(long)]
    pub(crate) report_gbits: bool,
    /// Port of the service.
    #[arg(short, long, default_value_t = 18515)]
    pub(crate) port: u16,
    /// Local address to use [default: 127.0.0.1 for the server, the source address of the route for the client].
    #[arg(short, long, value_name = "ADDRESS")]
    pub(crate) bind: Option<IpAddr>,
    /// Run on this CPU.
    #[arg(long, value_name = "CPU")]
    pub(crate) pin: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) push: push::PushArgs,
    #[command(flatten)]
    pub(crate) storage: storage::StorageArgs,
    #[command(flatten)]
    pub(crate) device: super::device::DeviceArgs,
}

/// What buffers are made of.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Memory that a peer on this host may map and write directly.
    Shared,
    /// Private memory of this process, as from `malloc`.
    Private,
}

fn parse_message_size(text: &str) -> Result<u32, String> {
    parse_size(text)
        .and_then(|bytes| u32::try_from(bytes).ok())
        .filter(|bytes| (1..=SIZE_MAX).contains(bytes))
        .ok_or_else(|| "give 1 byte to 1 GiB, as a number with or without K, M or G".into())
}

fn parse_seconds(text: &str) -> Result<u32, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse().ok();
    seconds
        .filter(|seconds| *seconds > 0)
        .ok_or_else(|| "give whole seconds from 1 on, such as 5 or 5s".into())
}

/// Allocates pages for buffers.
fn memory(kind: MemoryKind, bytes: usize) -> std::io::Result<AnonymousMemory> {
    match kind {
        MemoryKind::Shared => AnonymousMemory::shareable(bytes),
        MemoryKind::Private => AnonymousMemory::new(bytes),
    }
}

/// One line of results. Keys are as in perftest's JSON.
#[derive(Serialize, Debug, Clone)]
pub(crate) struct Row {
    #[serde(rename = "MsgSize")]
    pub(crate) bytes: u32,
    #[serde(rename = "n_iterations")]
    pub(crate) iterations: u64,
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

/// The figures of a line.
#[derive(Serialize, Debug, Clone)]
#[serde(untagged)]
pub(crate) enum Figures {
    Latency {
        t_min: f64,
        t_max: f64,
        t_typical: f64,
        t_avg: f64,
        t_stdev: f64,
        percentile_99: f64,
        #[serde(rename = "percentile_99.9")]
        percentile_99_9: f64,
    },
    Bandwidth {
        #[serde(rename = "BW_peak")]
        peak: f64,
        #[serde(rename = "BW_average")]
        average: f64,
        #[serde(rename = "MsgRate")]
        message_rate: f64,
    },
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.events && !args.test.has_events() {
        Args::command()
            .error(clap::error::ErrorKind::ArgumentConflict, NO_EVENTS)
            .exit();
    }
    if args.test != Test::Storage
        && let Some(option) = args.storage.given()
    {
        let wrong = format!("{option} is an option of `rdmux perf storage`");
        Args::command()
            .error(clap::error::ErrorKind::ArgumentConflict, wrong)
            .exit();
    }
    args.device.apply()?;
    if let Some(cpu) = args.pin {
        super::serve::pin(cpu)?;
    }
    if matches!(args.test, Test::PushRead | Test::PushWrite) {
        let common = push::Common {
            writes: args.test == Test::PushWrite,
            target: args.host.as_deref(),
            size: args.size,
            iterations: args.iters.unwrap_or(5_000),
            sleeps: args.events,
            pin: args.pin,
            bind: args.bind,
            json: args.json,
        };
        return push::run(&args.push, &common);
    }
    if args.test == Test::Storage {
        return storage::run(args);
    }
    match &args.host {
        None => serve(args),
        Some(host) => {
            let (rows, counters) = client(args, host)?;
            if args.json {
                let counters: serde_json::Map<_, _> = counters
                    .iter()
                    .filter(|c| c.1 > 0)
                    .map(|(name, value, _)| (name.to_owned(), value.into()))
                    .collect();
                let value =
                    serde_json::json!({ "test": args.test.title(), "results": rows, "counters": counters });
                writeln!(std::io::stdout().lock(), "{value:#}")?;
            }
            Ok(())
        }
    }
}

/// Request that the client sends in its private data.
#[derive(Clone, Copy, Debug)]
struct Request {
    test: Test,
    qps: u16,
    bytes: u32,
    depth: u32,
    /// Set when both sides sleep on completion events.
    events: bool,
}

/// Version of the protocol between client and server.
pub(crate) const VERSION: u8 = 2;

impl Request {
    /// Length including the client's buffer, which follows the request.
    const LEN: usize = 32;

    /// Returns the private data of a client whose buffer lies at `va`.
    fn emit(&self, va: u64, rkey: RKey) -> [u8; Request::LEN] {
        let mut b = [0; Request::LEN];
        b[..4].copy_from_slice(b"RDPF");
        b[4] = VERSION;
        b[5] = Test::ALL.iter().position(|t| *t == self.test).unwrap_or(0) as u8;
        b[6..8].copy_from_slice(&self.qps.to_be_bytes());
        b[8..12].copy_from_slice(&self.bytes.to_be_bytes());
        b[12..16].copy_from_slice(&u32::from(self.events).to_be_bytes());
        b[16..20].copy_from_slice(&self.depth.to_be_bytes());
        b[20..28].copy_from_slice(&va.to_be_bytes());
        b[28..32].copy_from_slice(&rkey.0.to_be_bytes());
        b
    }

    fn parse(b: &[u8]) -> Result<Request> {
        ensure!(
            b.len() >= Request::LEN && b[..4] == *b"RDPF",
            "the client is not `rdmux perf`"
        );
        ensure!(
            b[4] == VERSION,
            "the client speaks version {} of the perf protocol, the server version {}",
            b[4],
            VERSION
        );
        let word = |at: usize| u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let request = Request {
            test: *Test::ALL
                .get(usize::from(b[5]))
                .context("the client requests a test that the server does not have")?,
            qps: u16::from_be_bytes([b[6], b[7]]),
            bytes: word(8),
            depth: word(16),
            events: word(12) & 1 != 0,
        };
        ensure!(
            (1..=128).contains(&request.qps),
            "the client requests {} queue pairs; the server supports 1 to 128",
            request.qps
        );
        ensure!(
            (1..=SIZE_MAX).contains(&request.bytes),
            "the client requests messages of {} bytes; the server supports 1 to 1 GiB",
            request.bytes
        );
        ensure!(
            (1..=4096).contains(&request.depth),
            "the client requests depth {}; the server supports 1 to 4096",
            request.depth
        );
        ensure!(request.test.has_events() || !request.events, "{NO_EVENTS}");
        Ok(request)
    }
}

/// Returns the address and the key of the buffer to which the client of a request wants its answers written.
fn buffer_of(private_data: &[u8]) -> (u64, RKey) {
    let number = |range: std::ops::Range<usize>| {
        let bytes = private_data.get(range).unwrap_or_default();
        bytes
            .iter()
            .fold(0u64, |value, byte| value << 8 | u64::from(*byte))
    };
    (number(20..28), RKey(number(28..32) as u32))
}

/// Queue pairs and buffer of one side.
struct Side {
    cq: CompletionQueue,
    qps: Vec<QueuePair>,
    memory: Arc<AnonymousMemory>,
    mr: MemoryRegion,
    /// Number of checks of a byte that the peer writes, between two calls that drive the device.
    looks: Cell<u32>,
}

/// Creates a side with two buffers: requests send from the lower half, and the peer writes to the upper half. Each has room for one message
/// per queue pair.
fn side(device: &Device, request: &Request, kind: MemoryKind) -> Result<Side> {
    let pd = device.alloc_pd()?;
    let entries = u32::from(request.qps) * (request.depth + 8) * 2;
    let cq = device.create_cq(entries)?;
    let half = slot_bytes(request) * u64::from(request.qps);
    let memory = Arc::new(memory(kind, 2 * half as usize).context("allocating the buffers")?);
    // Touch it now: the first access of a page costs a fault.
    for at in (0..2 * half).step_by(4096) {
        memory.write(at, &[0]).ok();
    }
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::FLUSH_GLOBAL;
    let mr = pd.reg_mr_all(memory.clone(), memory.address(), access)?;
    let options = QpOptions {
        max_send_wr: 2 * request.depth + 2,
        max_recv_wr: 2 * request.depth + 2,
        ..QpOptions::new(&cq)
    };
    let qps = (0..request.qps)
        .map(|_| pd.create_qp(&options))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Side {
        cq,
        qps,
        memory,
        mr,
        looks: Cell::new(LOOKS_MAX),
    })
}

impl Side {
    /// Returns whether the peer has written a byte, and drives the device if it has not. A peer on this host may write the byte with no
    /// device in between: then this checks it often. Where the device delivers the byte, checks before the device was driven are in vain.
    fn has_come(&self, device: &Device, at: u64, expected: u8) -> bool {
        let looks = self.looks.get();
        if (0..looks).any(|_| self.memory.load_u8(at) == expected) {
            self.looks.set((2 * looks).min(LOOKS_MAX));
            return true;
        }
        device.progress();
        let came = self.memory.load_u8(at) == expected;
        if came {
            self.looks.set((looks / 2).max(1));
        }
        came
    }
}

fn slot_bytes(request: &Request) -> u64 {
    u64::from(request.bytes).max(64).next_multiple_of(64)
}

fn serve(args: &Args) -> Result<()> {
    let address = args.bind.unwrap_or(IpAddr::from([127, 0, 0, 1]));
    let device = open(args, address)?;
    let served = serve_on(&device, args);
    // To the connections of a test, the end of the node is like that of the client.
    check_there(&device)?;
    served
}

fn serve_on(device: &Device, args: &Args) -> Result<()> {
    let listener = device.listen(args.port)?;
    if !args.json {
        println!(
            "\n************************************\n* Waiting for client to connect... *\n************************************"
        );
    }
    let first = listener
        .accept(Duration::from_secs(3600))
        .context("no client within an hour")?;
    // A client that measures several sizes connects once for each.
    let mut next = Some(first);
    while let Some(connecting) = next.take() {
        let request = match request_for(args, connecting.private_data()) {
            Ok(request) => request,
            Err(error) => {
                connecting.reject(error.to_string().as_bytes());
                return Err(error);
            }
        };
        let side = side(device, &request, args.memory)?;
        let half = slot_bytes(&request) * u64::from(request.qps);
        let mut answer = [0; 16];
        answer[..8].copy_from_slice(&(side.mr.iova() + half).to_be_bytes());
        answer[8..12].copy_from_slice(&side.mr.rkey().0.to_be_bytes());
        answer[12..].copy_from_slice(&request.bytes.to_be_bytes());
        let mut connecting = Some(connecting);
        let mut connections = Vec::new();
        let mut sink = (0, RKey(0));
        for qp in &side.qps {
            let mut one = match connecting.take() {
                Some(one) => one,
                None => listener
                    .accept(PATIENCE)
                    .context("the client made fewer connections than it announced")?,
            };
            let receives = if matches!(request.test, Test::SendLat | Test::SendBw) {
                2 * request.depth
            } else {
                0
            };
            if request.test == Test::WriteLat {
                sink = buffer_of(one.private_data());
            }
            let connection = one.accept_after(qp, &params(), &answer, || {
                for i in 0..receives {
                    post_recv(qp, &side, &request, u64::from(i)).map_err(std::io::Error::other)?;
                }
                Ok(())
            })?;
            connections.push(connection);
        }
        for connection in &connections {
            ensure!(
                connection.wait_established(),
                "the client disconnected while connecting"
            );
        }
        answer_client(&request, device, &side, &connections, sink)?;
        drop(connections);
        if !args.all {
            break;
        }
        next = listener.accept(Duration::from_secs(2));
    }
    Ok(())
}

/// Fails when the device has gone, as that of a node that has ended.
fn check_there(device: &Device) -> Result<()> {
    let mut events = std::iter::from_fn(|| device.poll_async_event());
    let has_gone = events.any(|event| event == AsyncEvent::DeviceFatal);
    let address = device.address();
    if has_gone && device.provider() == "shared" {
        bail!(
            "the node of {address} has ended: start `rdmux node --device {address}`, then this command again"
        );
    }
    ensure!(!has_gone, "the device of {address} has gone");
    Ok(())
}

/// Returns the client's request, if this server runs the same test.
fn request_for(args: &Args, private_data: &[u8]) -> Result<Request> {
    let request = Request::parse(private_data)?;
    ensure!(
        request.test == args.test,
        "the client measures {}, the server {}: start both with the same test",
        request.test.name(),
        args.test.name()
    );
    Ok(request)
}

/// Runs the server's part of a test, until the client disconnects.
fn answer_client(
    request: &Request,
    device: &Device,
    side: &Side,
    connections: &[Connection],
    sink: (u64, RKey),
) -> Result<()> {
    let qp = &side.qps[0];
    let half = slot_bytes(request) * u64::from(request.qps);
    let mut watch = Watch {
        sleeps: request.events,
        device,
        connections,
        spins: 0,
        packets: 0,
        since: Instant::now(),
    };
    // Returns the next completion; `None` when there is none yet and it is time to check on the client.
    let completion = || -> Result<Option<WorkCompletion>> {
        Ok(if request.events {
            side.cq.wait(WATCH)?
        } else {
            side.cq.poll()
        })
    };
    match request.test {
        Test::WriteLat => {
            let last = half + u64::from(request.bytes.max(1)) - 1;
            let mut round = 0u8;
            loop {
                let expected = round.wrapping_add(1);
                if !side.has_come(device, last, expected) {
                    if watch.is_over()? {
                        return Ok(());
                    }
                    continue;
                }
                round = expected;
                side.memory.write(u64::from(request.bytes) - 1, &[round]).ok();
                let operation = Operation::Write {
                    va: sink.0,
                    rkey: sink.1,
                    imm: None,
                };
                let sges = side.mr.sge(0, request.bytes).into();
                let flags = if round.is_multiple_of(COMPLETED_EVERY) {
                    SendFlags::SIGNALED
                } else {
                    SendFlags::empty()
                };
                if qp
                    .post_send(SendRequest {
                        wr_id: 0,
                        operation,
                        sges,
                        flags,
                        to: Target::Connected,
                    })
                    .is_err()
                {
                    return Ok(());
                }
                if round.is_multiple_of(COMPLETED_EVERY) {
                    while side.cq.poll().is_some() {}
                }
            }
        }
        Test::SendLat => loop {
            let Some(wc) = completion()? else {
                if watch.is_over()? {
                    return Ok(());
                }
                continue;
            };
            if wc.status != Status::Success {
                return Ok(());
            }
            if wc.opcode != rdmux_verbs::WcOpcode::Recv {
                continue;
            }
            post_recv(qp, side, request, wc.wr_id)?;
            let sges = side.mr.sge(0, request.bytes).into();
            let operation = Operation::Send { imm: None };
            if qp
                .post_send(SendRequest {
                    wr_id: 0,
                    operation,
                    sges,
                    flags: SendFlags::empty(),
                    to: Target::Connected,
                })
                .is_err()
            {
                return Ok(());
            }
        },
        Test::SendBw => {
            let by_qpn: Vec<_> = side.qps.iter().map(|qp| (qp.qpn(), qp)).collect();
            loop {
                let Some(wc) = completion()? else {
                    if watch.is_over()? {
                        return Ok(());
                    }
                    continue;
                };
                if wc.status != Status::Success {
                    continue;
                }
                if let Some((_, qp)) = by_qpn.iter().find(|(qpn, _)| *qpn == wc.qpn) {
                    post_recv(qp, side, request, wc.wr_id)?;
                }
            }
        }
        // The requests are one-sided: the NIC answers them. This side only drives it, or sleeps.
        // Tests of the services never come here.
        Test::PushRead | Test::PushWrite | Test::Storage => Ok(()),
        Test::WriteBw | Test::ReadLat | Test::ReadBw | Test::FlushLat | Test::FlushBw => loop {
            if request.events {
                connections[0].wait_ended(WATCH);
            } else {
                device.progress();
            }
            if watch.is_over()? {
                return Ok(());
            }
        },
    }
}

/// A server's check that its client is still there: made now and then by a server that spins, each time by one that sleeps.
struct Watch<'a> {
    sleeps: bool,
    device: &'a Device,
    connections: &'a [Connection],
    spins: u32,
    packets: u64,
    since: Instant,
}

impl Watch<'_> {
    /// Returns whether the test is over. Fails when the client has sent nothing for too long: it was killed, or cut off.
    fn is_over(&mut self) -> Result<bool> {
        self.spins = self.spins.wrapping_add(1);
        if !self.sleeps && !self.spins.is_multiple_of(1 << 14) {
            return Ok(false);
        }
        if self.connections.iter().all(Connection::is_ended) {
            return Ok(true);
        }
        let broken = self.connections.iter().find_map(|c| c.qp()?.error());
        ensure!(
            broken.is_none(),
            "the connection failed: {}",
            broken.unwrap_or(Status::Flushed)
        );
        let packets = self.device.counters().rcvd_pkts;
        if packets != self.packets {
            (self.packets, self.since) = (packets, Instant::now());
        }
        // Within a host this side is notified of the client's death, and WRITEs bring no packets.
        let told = |c: &Connection| c.qp().and_then(QueuePair::carrier) == Some(Carrier::SharedMemory);
        ensure!(
            self.since.elapsed() < PATIENCE || self.connections.iter().all(told),
            "the client has been silent for {} s",
            PATIENCE.as_secs()
        );
        Ok(false)
    }
}

fn post_recv(qp: &QueuePair, side: &Side, request: &Request, wr_id: u64) -> Result<()> {
    let half = slot_bytes(request) * u64::from(request.qps);
    Ok(qp.post_recv(RecvRequest {
        wr_id,
        sges: side.mr.sge(half, request.bytes).into(),
    })?)
}

fn params() -> ConnectParams {
    ConnectParams::default()
}

/// Opens the device from which a server is reached; also returns the server's address.
fn device_towards(args: &Args, host: &str) -> Result<(Device, SocketAddr)> {
    ensure!(
        !is_malformed_ipv4(host),
        "{host} is not an IPv4 address: each of its numbers is at most 255"
    );
    let peer = (host, args.port)
        .to_socket_addrs()
        .with_context(|| format!("cannot resolve {host}"))?
        .next();
    let peer = peer.with_context(|| format!("{host} has no address"))?;
    let address = match args.bind {
        Some(address) => address,
        None => Device::address_to(peer).map_err(|source| TargetError::Route {
            peer: peer.ip(),
            source,
        })?,
    };
    Ok((open(args, address)?, peer))
}

/// Opens the device of an address. An error says that the user may name another one.
fn open(args: &Args, address: IpAddr) -> Result<Device> {
    match args.bind {
        Some(_) => Ok(Device::open(address)?),
        None => Device::open(address)
            .with_context(|| format!("no device at {address}, the address used without --bind ADDRESS")),
    }
}

/// Connects, measures every requested size, and prints the results unless JSON is requested.
fn client(args: &Args, host: &str) -> Result<(Vec<Row>, Counters)> {
    let (device, peer) = device_towards(args, host)?;
    let rows = measure_all(&device, peer, args);
    if rows.is_err() {
        check_there(&device)?;
    }
    Ok((rows?, device.counters()))
}

fn measure_all(device: &Device, peer: SocketAddr, args: &Args) -> Result<Vec<Row>> {
    let sizes: Vec<u32> = if args.all {
        (1..=ALL_SIZES_MAX.ilog2()).map(|n| 1 << n).collect()
    } else {
        vec![args.size.unwrap_or(args.test.default_size())]
    };
    let iterations = args.iters.unwrap_or(args.test.default_iterations());
    if !args.json {
        print_header(args, device.provider());
    }
    let mut rows = Vec::new();
    for bytes in sizes {
        let qps = if args.test.is_latency() { 1 } else { args.qp };
        let depth = if args.test.is_latency() {
            128
        } else {
            args.tx_depth.unwrap_or(TX_DEPTH_DEFAULT).min(iterations.max(1))
        };
        let request = Request {
            test: args.test,
            qps,
            bytes,
            depth,
            events: args.events,
        };
        let row = measure(device, peer, &request, iterations, args)?;
        if !args.json {
            print_row(&row);
        }
        rows.push(row);
    }
    if !args.json {
        println!("{:-<87}", "");
    }
    Ok(rows)
}

fn measure(
    device: &Device,
    peer: SocketAddr,
    request: &Request,
    iterations: u32,
    args: &Args,
) -> Result<Row> {
    let side = side(device, request, args.memory)?;
    let half = slot_bytes(request) * u64::from(request.qps);
    let mut connections = Vec::new();
    let private = request.emit(side.mr.iova() + half, side.mr.rkey());
    for qp in &side.qps {
        let connection = device
            .connect(qp, peer, &params(), &private)
            .map_err(|error| not_connected(error, peer, request.test))?;
        connections.push(connection);
    }
    let answer = connections[0].private_data();
    let short = "the server's reply is too short: start `rdmux perf` there with the same test";
    let va = u64::from_be_bytes(*answer.first_chunk().context(short)?);
    let rkey = answer.get(8..).and_then(<[u8]>::first_chunk).context(short)?;
    let rkey = RKey(u32::from_be_bytes(*rkey));
    let run = Run {
        request,
        device,
        side: &side,
        va,
        rkey,
    };
    let until = args
        .duration
        .map(|s| Instant::now() + Duration::from_secs(s.into()));
    let row = if request.test.is_latency() {
        run.latency(iterations, until, args.group)?
    } else {
        run.bandwidth(iterations, until, args)?
    };
    for connection in &connections {
        connection.disconnect_and_wait(Duration::from_secs(2));
    }
    Ok(row)
}

/// Returns the error for a connection that was not made: the server's message, or that there is no server.
fn not_connected(error: ConnectError, peer: SocketAddr, test: Test) -> anyhow::Error {
    if let ConnectError::Rejected {
        reason: RejReason::CONSUMER,
        private_data,
    } = &error
    {
        // Anybody may have sent this, and it is padded with zeros.
        let said: String = String::from_utf8_lossy(private_data)
            .chars()
            .take_while(|c| *c != '\0')
            .filter(|c| !c.is_control())
            .collect();
        if !said.is_empty() {
            return anyhow::anyhow!("the server at {peer} refused the test: {said}");
        }
    }
    anyhow::Error::new(error).context(format!(
        "no server at {peer}: start `rdmux perf {}` there first",
        test.name()
    ))
}

struct Run<'a> {
    request: &'a Request,
    device: &'a Device,
    side: &'a Side,
    va: u64,
    rkey: RKey,
}

impl Run<'_> {
    fn data(&self) -> SgeList {
        self.side.mr.sge(0, self.request.bytes).into()
    }

    fn flush(&self) -> Operation {
        Operation::Flush {
            va: self.va,
            rkey: self.rkey,
            length: self.request.bytes,
            placement: Placement::GLOBAL,
            selectivity: Selectivity::Range,
        }
    }

    fn wait(&self) -> Result<()> {
        let wc = if self.request.events {
            self.side.cq.wait(PATIENCE)?
        } else {
            self.poll()
        };
        let wc = wc.with_context(silent)?;
        ensure!(
            wc.status == Status::Success,
            "the connection failed: {}",
            wc.status
        );
        Ok(())
    }

    /// Returns the next completion; `None` when there is none for too long.
    fn poll(&self) -> Option<WorkCompletion> {
        let mut spins = 0u32;
        let mut deadline = None;
        loop {
            if let Some(wc) = self.side.cq.poll() {
                return Some(wc);
            }
            spins += 1;
            if spins.is_multiple_of(1 << 16)
                && Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + PATIENCE)
            {
                return None;
            }
        }
    }

    /// Waits for the peer's WRITE, which changes the last byte.
    fn wait_byte(&self, at: u64, expected: u8) -> Result<()> {
        let mut spins = 0u32;
        let mut deadline = None;
        loop {
            if self.side.has_come(self.device, at, expected) {
                return Ok(());
            }
            spins += 1;
            if spins.is_multiple_of(1 << 16) {
                let deadline = deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
                ensure!(Instant::now() < *deadline, silent());
                ensure!(self.side.qps[0].error().is_none(), "the connection failed");
            }
        }
    }

    /// Times round trips, `group` of them between two readings of the clock.
    fn latency(&self, iterations: u32, until: Option<Instant>, group: u32) -> Result<Row> {
        let Run { request, side, .. } = self;
        // In WRITE and SEND tests, a message goes there and back; the NIC answers a READ or FLUSH.
        let halves = if matches!(request.test, Test::WriteLat | Test::SendLat) {
            2.0
        } else {
            1.0
        };
        if request.test == Test::SendLat {
            for i in 0..64 {
                post_recv(&side.qps[0], side, request, i)?;
            }
        }
        let mut round = 0u8;
        for _ in 0..iterations.min(1000) / 10 {
            self.round_trip(&mut round)?;
        }
        let wanted = iterations.div_ceil(group) as usize;
        let mut samples: Vec<u64> = Vec::with_capacity(wanted);
        let mut begin = Instant::now();
        while until.map_or(samples.len() < wanted, |until| {
            samples.is_empty() || begin < until
        }) {
            for _ in 0..group {
                self.round_trip(&mut round)?;
            }
            let end = Instant::now();
            samples.push((end - begin).as_nanos() as u64 / u64::from(group));
            begin = end;
        }
        let trips = samples.len() as u64 * u64::from(group);
        Ok(latency_row(request.bytes, trips, samples, halves))
    }

    /// Makes one round trip there and back, or one request that the NIC answers. `round` counts WRITEs, which carry it in their last byte.
    fn round_trip(&self, round: &mut u8) -> Result<()> {
        let Run {
            request,
            side,
            va,
            rkey,
            ..
        } = self;
        let qp = &side.qps[0];
        let signaled = SendFlags::SIGNALED;
        let (va, rkey) = (*va, *rkey);
        let write = Operation::Write { va, rkey, imm: None };
        let request_of = |operation, sges, flags| SendRequest {
            wr_id: 0,
            operation,
            sges,
            flags,
            to: Target::Connected,
        };
        match request.test {
            Test::WriteLat => {
                *round = round.wrapping_add(1);
                let last = u64::from(request.bytes) - 1;
                side.memory.write(last, &[*round]).ok();
                let flags = if round.is_multiple_of(COMPLETED_EVERY) {
                    signaled
                } else {
                    SendFlags::empty()
                };
                qp.post_send(request_of(write, self.data(), flags))?;
                self.wait_byte(slot_bytes(request) + last, *round)?;
                if round.is_multiple_of(COMPLETED_EVERY) {
                    while side.cq.poll().is_some() {}
                }
            }
            Test::SendLat => {
                let send = Operation::Send { imm: None };
                qp.post_send(request_of(send, self.data(), SendFlags::empty()))?;
                self.wait()?;
                post_recv(qp, side, request, 0)?;
            }
            Test::ReadLat => {
                let read = Operation::Read { va, rkey };
                qp.post_send(request_of(read, self.data(), signaled))?;
                self.wait()?;
            }
            _ => {
                qp.post_send_list([
                    request_of(write, self.data(), SendFlags::empty()),
                    request_of(self.flush(), SgeList::EMPTY, signaled),
                ])?;
                self.wait()?;
            }
        }
        Ok(())
    }

    fn bandwidth(&self, iterations: u32, until: Option<Instant>, args: &Args) -> Result<Row> {
        let Run {
            request,
            side,
            va,
            rkey,
            ..
        } = self;
        let total = u64::from(iterations) * u64::from(request.qps);
        let mut posted = vec![0u64; side.qps.len()];
        let mut in_flight = vec![0u32; side.qps.len()];
        let index_of: std::collections::HashMap<_, _> =
            side.qps.iter().enumerate().map(|(i, qp)| (qp.qpn(), i)).collect();
        let mut done = 0u64;
        let mut peak = 0f64;
        let begin = Instant::now();
        let mut last_progress = begin;
        // The peak is the best stretch, measured from the posting of its first request, as perftest does, so that completions which come
        // all at once make no peak. `posted_at` holds the times of the requests not done and of a stretch before them.
        let stretch = (total / 100).max(4 * u64::from(request.depth)).min(total) as usize;
        let mut posted_at = std::collections::VecDeque::new();
        let mut not_done = 0usize;
        let mut completions = std::collections::VecDeque::new();
        loop {
            let over = until.is_some_and(|until| Instant::now() >= until);
            for (i, qp) in side.qps.iter().enumerate() {
                let wanted = if until.is_some() {
                    u64::MAX
                } else {
                    iterations.into()
                };
                let room = if over {
                    0
                } else {
                    u64::from(request.depth - in_flight[i]).min(wanted - posted[i])
                };
                if room == 0 {
                    continue;
                }
                let requests = (0..room).flat_map(|_| self.requests(*va, *rkey));
                qp.post_send_list(requests)?;
                posted_at.extend(std::iter::repeat_n(Instant::now(), room as usize));
                not_done += room as usize;
                posted[i] += room;
                in_flight[i] += room as u32;
            }
            if request.events && in_flight.iter().any(|n| *n > 0) {
                completions.extend(side.cq.wait(PATIENCE)?);
            }
            side.cq.poll_many(256, &mut completions);
            let n = completions.len();
            for wc in completions.drain(..) {
                ensure!(
                    wc.status == Status::Success,
                    "the connection failed: {}",
                    wc.status
                );
                if let Some(i) = index_of.get(&wc.qpn) {
                    in_flight[*i] -= 1;
                }
                done += 1;
            }
            if n > 0 {
                last_progress = Instant::now();
                not_done -= n;
                while posted_at.len() > not_done + stretch {
                    posted_at.pop_front();
                }
                if posted_at.len() == not_done + stretch
                    && let Some(first) = posted_at.front()
                {
                    peak = peak.max(stretch as f64 / last_progress.duration_since(*first).as_secs_f64());
                }
            } else if last_progress.elapsed() > PATIENCE {
                bail!(silent());
            }
            if (until.is_none() && done == total) || (over && in_flight.iter().all(|n| *n == 0)) {
                break;
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        let rate = done as f64 / seconds;
        let scale = if args.report_gbits {
            8e-9
        } else {
            1.0 / f64::from(1 << 20)
        } * f64::from(request.bytes);
        Ok(Row {
            bytes: request.bytes,
            iterations: done,
            figures: Figures::Bandwidth {
                peak: peak.max(rate) * scale,
                average: rate * scale,
                message_rate: rate / 1e6,
            },
        })
    }

    fn requests(&self, va: u64, rkey: RKey) -> impl Iterator<Item = SendRequest> {
        let request_of = |operation, sges, flags| SendRequest {
            wr_id: 0,
            operation,
            sges,
            flags,
            to: Target::Connected,
        };
        let write = || Operation::Write { va, rkey, imm: None };
        let signaled = SendFlags::SIGNALED;
        let (first, second) = match self.request.test {
            Test::ReadBw => (
                request_of(Operation::Read { va, rkey }, self.data(), signaled),
                None,
            ),
            Test::SendBw => (
                request_of(Operation::Send { imm: None }, self.data(), signaled),
                None,
            ),
            Test::FlushBw => (
                request_of(write(), self.data(), SendFlags::empty()),
                Some(request_of(self.flush(), SgeList::EMPTY, signaled)),
            ),
            _ => (request_of(write(), self.data(), signaled), None),
        };
        std::iter::once(first).chain(second)
    }
}

fn silent() -> String {
    format!("no answer from the server for {} s", PATIENCE.as_secs())
}

/// Returns the figures of round trips in nanoseconds; `parts` is 2 where half of a round trip counts.
fn latency_row(bytes: u32, iterations: u64, mut samples: Vec<u64>, parts: f64) -> Row {
    samples.sort_unstable();
    let n = samples.len();
    let us = |ns: f64| ns / parts / 1e3;
    let at = |p: f64| {
        samples
            .get(((n as f64 * p) as usize).min(n.saturating_sub(1)))
            .map_or(0.0, |ns| us(*ns as f64))
    };
    let mean = samples.iter().sum::<u64>() as f64 / n.max(1) as f64;
    let variance = samples.iter().map(|ns| (*ns as f64 - mean).powi(2)).sum::<f64>() / n.max(1) as f64;
    Row {
        bytes,
        iterations,
        figures: Figures::Latency {
            t_min: at(0.0),
            t_max: at(1.0),
            t_typical: at(0.5),
            t_avg: us(mean),
            t_stdev: us(variance.sqrt()),
            percentile_99: at(0.99),
            percentile_99_9: at(0.999),
        },
    }
}

fn print_header(args: &Args, provider: &str) {
    // Where the engine runs that the figures are of.
    let placement = match provider {
        "shared" => "proxied",
        "hw" => "RNIC",
        _ => "own",
    };
    println!("{:-<87}", "");
    println!("{:^87}", args.test.title());
    println!(
        " Provider        : {provider:<25} Placement : {placement}, both ends {}",
        if args.events { "sleep" } else { "poll" }
    );
    println!(
        " Number of qps   : {:<25} Transport : RC",
        if args.test.is_latency() { 1 } else { args.qp }
    );
    println!("{:-<87}", "");
    if args.test.is_latency() {
        println!(
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]"
        );
    } else {
        let unit = if args.report_gbits { "Gb/sec" } else { "MiB/sec" };
        println!(" #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]");
    }
}

fn print_row(row: &Row) {
    let Row {
        bytes, iterations, ..
    } = row;
    match &row.figures {
        Figures::Latency {
            t_min,
            t_max,
            t_typical,
            t_avg,
            t_stdev,
            percentile_99,
            percentile_99_9,
        } => println!(
            " {bytes:<7} {iterations:<13} {t_min:<14.2} {t_max:<14.2} {t_typical:<16.2} {t_avg:<14.2} {t_stdev:<15.2} {percentile_99:<22.2} {percentile_99_9:<22.2}"
        ),
        Figures::Bandwidth {
            peak,
            average,
            message_rate,
        } => {
            println!(" {bytes:<10} {iterations:<14} {peak:<19.2} {average:<20.2} {message_rate:<10.6}");
        }
    }
}

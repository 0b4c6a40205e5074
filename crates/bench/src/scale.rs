//! WRITEs of several threads, each with a queue pair, a completion queue and a region of its own, beside those of as many processes, and beside
//! threads that have one queue pair in common.
//!
//! This program starts itself as the server and as the clients ([`super::child`]), with [`COMMAND`] as its first argument. A client's result is
//! the number of WRITEs that it has posted.

use std::io::Read;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, Device, MemoryRegion, Operation, ProtectionDomain, QpOptions,
    QueuePair, RKey, SendFlags, SendRequest, Target,
};

use super::child::{Side, say, say_ready};
use super::table::{Column, Line, Ratio, Table};
use super::{LOOPBACK, pin};

/// The first argument of the server and the clients.
pub(super) const COMMAND: &str = "scale";

const THREADS: &str = "threads of one process";
const PROCESSES: &str = "processes of one thread";
/// Numbers of threads, where the machine has a CPU for each.
const COLUMNS: [Column; 6] = [(1, "1"), (2, "2"), (4, "4"), (8, "8"), (16, "16"), (32, "32")];

/// Time for which clients post.
const TIME: Duration = Duration::from_millis(500);
/// Posts between two looks at the clock.
const BATCH: u64 = 64;
/// Completed WRITEs before the first that counts: they bring the grants.
const WARM_UP: u32 = 2_000;
const PORT: u16 = 18516;
/// Bytes that a thread writes to, and most threads of a queue pair.
const SLICE_BYTES: usize = 8192;
const SLICES: usize = 32;

pub(super) fn table() -> Table {
    let cpus = thread::available_parallelism().map_or(1, |n| n.get());
    let columns: Vec<Column> = COLUMNS.into_iter().filter(|(n, _)| *n <= cpus).collect();
    let numbers: Vec<usize> = columns.iter().map(|(n, _)| *n).collect();
    Table {
        key: "million_writes_per_s",
        title: "WRITE 8 B, unsignaled, millions/s",
        digits: 2,
        columns,
        lines: vec![
            Line::new(THREADS, &numbers, |n| rate(&[n], 8, QueuePairs::Own)),
            Line::new(PROCESSES, &numbers, |n| rate(&vec![1; n], 8, QueuePairs::Own)),
        ],
        compares: false,
    }
}

pub(super) fn ratio(table: &Table) -> Ratio {
    Ratio::new(
        "WRITE 8 B, 2 threads / 2 processes",
        "at least 0.90",
        &table.rounds(THREADS, 2),
        &table.rounds(PROCESSES, 2),
    )
}

/// The queue pairs of a client's threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuePairs {
    /// Each thread has one.
    Own,
    /// They have one in common.
    One,
}

/// Returns the millions of WRITEs that clients post per second, each with so many threads. There may be more threads than CPUs.
pub(super) fn rate(clients: &[usize], bytes: u32, qps: QueuePairs) -> Result<f64> {
    let _server = side(&["serve"])?;
    let mut first_cpu = 0;
    let mut sides = Vec::new();
    for threads in clients {
        let numbers = [first_cpu.to_string(), threads.to_string(), bytes.to_string()];
        let [first, threads_of, length] = &numbers;
        let qps = if qps == QueuePairs::One { "one" } else { "own" };
        sides.push(side(&[first, threads_of, length, qps])?);
        first_cpu += threads;
    }
    sides.iter_mut().for_each(Side::begin);
    let mut posted = 0u64;
    for side in &mut sides {
        posted += side.result()?.parse::<u64>()?;
    }
    Ok(posted as f64 / TIME.as_secs_f64() / 1e6)
}

/// Starts the server or a client.
fn side(args: &[&str]) -> Result<Side> {
    let mut command = Command::new(std::env::current_exe()?);
    Side::start(command.arg(COMMAND).args(args))
}

/// Runs the server or a client, as the arguments after [`COMMAND`] say.
pub(super) fn child(args: &[String]) -> Result<()> {
    rdmux_soft::register();
    match args {
        [_] => serve(),
        [first_cpu, threads, bytes, qps] => {
            let qps = if qps == "one" {
                QueuePairs::One
            } else {
                QueuePairs::Own
            };
            client(first_cpu.parse()?, threads.parse()?, bytes.parse()?, qps)
        }
        _ => bail!("this is for the bench itself"),
    }
}

/// Objects of one connection at one side.
struct End {
    cq: CompletionQueue,
    qp: QueuePair,
    mr: MemoryRegion,
}

impl End {
    fn new(device: &Device, pd: &ProtectionDomain) -> Result<End> {
        let cq = device.create_cq(64)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let memory = Arc::new(AnonymousMemory::shareable(SLICE_BYTES * SLICES)?);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = pd.reg_mr_all(memory.clone(), memory.address(), access)?;
        Ok(End { cq, qp, mr })
    }
}

/// Accepts connections until it is ended.
fn serve() -> Result<()> {
    let device = Device::open(LOOPBACK)?;
    let pd = device.alloc_pd()?;
    let listener = device.listen(PORT)?;
    let mut ends = Vec::new();
    say_ready()?;
    while let Some(request) = listener.accept(Duration::MAX) {
        let end = End::new(&device, &pd)?;
        let mut where_to = end.mr.iova().to_be_bytes().to_vec();
        where_to.extend(end.mr.rkey().0.to_be_bytes());
        let connection = request.accept(&end.qp, &ConnectParams::default(), &where_to)?;
        ends.push((end, connection));
    }
    Ok(())
}

fn client(first_cpu: usize, threads: usize, bytes: u32, qps: QueuePairs) -> Result<()> {
    let device = Device::open(LOOPBACK)?;
    let pd = device.alloc_pd()?;
    let cpus = thread::available_parallelism()?.get();
    let connect = || Writer::connect(&device, &pd, bytes);
    let one = match qps {
        QueuePairs::Own => None,
        QueuePairs::One => Some(Arc::new(connect()?)),
    };
    let (connected, begin) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    let posted = thread::scope(|scope| {
        let (connect, one, connected, begin) = (&connect, &one, &connected, &begin);
        let posting: Vec<_> = (first_cpu..first_cpu + threads)
            .map(|cpu| {
                scope.spawn(move || {
                    let writer = pin(cpu % cpus).and_then(|()| match one {
                        Some(one) => Ok(one.clone()),
                        None => Ok(Arc::new(connect()?)),
                    });
                    connected.wait();
                    begin.wait();
                    writer?.post((cpu - first_cpu) % SLICES)
                })
            })
            .collect();
        connected.wait();
        say_ready()?;
        std::io::stdin().read_to_end(&mut Vec::new())?;
        begin.wait();
        let posted = posting.into_iter().map(|thread| match thread.join() {
            Ok(posted) => posted,
            Err(_) => bail!("a posting thread panicked"),
        });
        posted.sum::<Result<u64>>()
    })?;
    say(&posted.to_string())
}

/// A connection of one thread or several.
struct Writer {
    end: End,
    bytes: u32,
    request: SendRequest,
    _connection: rdmux_verbs::Connection,
}

impl Writer {
    /// Connects, and posts until the peer has granted its memory.
    fn connect(device: &Device, pd: &ProtectionDomain, bytes: u32) -> Result<Writer> {
        let end = End::new(device, pd)?;
        let peer = SocketAddr::new(LOOPBACK, PORT);
        let connection = device.connect(&end.qp, peer, &ConnectParams::default(), &[])?;
        let data = connection.private_data();
        let (va, rest) = data.split_first_chunk().context("the server sent no address")?;
        let rkey = *rest.first_chunk().context("the server sent no key")?;
        let operation = Operation::Write {
            va: u64::from_be_bytes(*va),
            rkey: RKey(u32::from_be_bytes(rkey)),
            imm: None,
        };
        let request = SendRequest {
            wr_id: 1,
            operation,
            sges: end.mr.sge(0, bytes).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        for _ in 0..WARM_UP {
            end.qp.post_send(request.clone())?;
            while end.cq.poll().is_none() {}
        }
        Ok(Writer {
            end,
            bytes,
            request: SendRequest {
                flags: SendFlags::empty(),
                ..request
            },
            _connection: connection,
        })
    }

    /// Posts for a time, from a slice of the own memory to the same one of the peer's; returns the number of WRITEs.
    fn post(&self, slice: usize) -> Result<u64> {
        let offset = (slice * SLICE_BYTES) as u64;
        let Operation::Write { va, rkey, imm } = self.request.operation else {
            bail!("the request is no WRITE");
        };
        let request = SendRequest {
            operation: Operation::Write {
                va: va + offset,
                rkey,
                imm,
            },
            sges: self.end.mr.sge(offset, self.bytes).into(),
            ..self.request.clone()
        };
        let begin = Instant::now();
        let mut posted = 0;
        while begin.elapsed() < TIME {
            for _ in 0..BATCH {
                self.end.qp.post_send(request.clone())?;
            }
            posted += BATCH;
        }
        Ok(posted)
    }
}

//! Measurements of the demo: WRITE, WRITE and FLUSH, and READ of a served file, over rdmux and over TCP with a server that does the same to
//! the same file (pwrite, pwrite and fdatasync, pread) and only then answers.
//!
//! A request over TCP is `operation u8 | 3 zeros | bytes u32 | offset u64` in big endian, then the bytes of a write. The answer
//! is the bytes of a read, else one byte.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use rdmux_push::client::{Buffer, Part, Wait as ClientWait};
use rdmux_push::{Access, Client, Key, Mapping, Options, Placement, Target};
use serde::{Deserialize, Serialize};

use super::super::serve::pin;
use crate::output;

pub(super) const SIZES: [u32; 2] = [4 << 10, 64 << 10];
pub(super) const QUEUE_DEPTHS: [usize; 3] = [1, 2, 8];
pub(super) const OPERATIONS: [Operation; 3] = [Operation::Write, Operation::Flush, Operation::Read];
/// Time for which a cell is measured.
const CELL: Duration = Duration::from_millis(400);
/// Time for which a cell runs unmeasured before that.
const WARM_UP: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Write,
    Flush,
    Read,
}

impl Operation {
    pub(super) fn word(self) -> &'static str {
        match self {
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Read => "read",
        }
    }

    fn of(code: u8) -> Option<Operation> {
        OPERATIONS.into_iter().find(|operation| *operation as u8 == code)
    }
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Wait {
    /// Spin.
    Poll,
    /// Sleep.
    Block,
}

impl Wait {
    pub(super) fn word(self) -> &'static str {
        match self {
            Wait::Poll => "poll",
            Wait::Block => "block",
        }
    }
}

#[derive(clap::Args, Debug)]
pub(super) struct Args {
    #[arg(long, required_unless_present = "tcp")]
    rdmux: Option<Target>,
    #[arg(long)]
    tcp: Option<SocketAddr>,
    #[arg(long)]
    key: PathBuf,
    #[arg(long)]
    server_pid: u32,
    #[arg(long, value_enum)]
    wait: Wait,
    #[arg(long)]
    cpu: usize,
}

#[derive(clap::Args, Debug)]
pub(super) struct TcpServeArgs {
    #[arg(long)]
    file: PathBuf,
    #[arg(long)]
    listen: IpAddr,
    #[arg(long, value_enum)]
    wait: Wait,
    #[arg(long)]
    cpu: usize,
}

/// Figures of one operation, size and depth. CPU is in seconds per GB.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Cell {
    pub(super) system: String,
    pub(super) operation: String,
    pub(super) bytes: u32,
    pub(super) depth: usize,
    pub(super) gigabytes_per_second: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) client_app: f64,
    pub(super) client_nic: f64,
    pub(super) server_app: f64,
    pub(super) server_nic: f64,
}

/// A system under measurement: requests are posted, and complete in order.
trait Subject {
    fn system(&self) -> &'static str;
    fn span(&self) -> u64;
    fn post(&mut self, operation: Operation, offset: u64, bytes: u32) -> Result<()>;
    fn complete(&mut self) -> Result<()>;
}

pub(super) fn run(args: &Args) -> Result<()> {
    pin(args.cpu)?;
    let mut subject: Box<dyn Subject> = match (&args.rdmux, args.tcp) {
        (Some(target), _) => Box::new(Rdma::connect(target, &args.key, args.wait)?),
        (None, Some(address)) => Box::new(Tcp::connect(address, args.wait)?),
        (None, None) => bail!("no target to measure: give --rdmux or --tcp"),
    };
    for operation in OPERATIONS {
        for bytes in SIZES {
            for depth in QUEUE_DEPTHS {
                let cell = measure(&mut *subject, operation, bytes, depth, args.server_pid)?;
                output::say(&serde_json::to_string(&cell)?);
            }
        }
    }
    Ok(())
}

fn measure(
    subject: &mut dyn Subject,
    operation: Operation,
    bytes: u32,
    depth: usize,
    server: u32,
) -> Result<Cell> {
    let mut offset = 0;
    drive(subject, operation, bytes, depth, WARM_UP, &mut offset, None)?;
    let mut latency_ns = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
    let me = std::process::id();
    let before = (Cpu::of(me), Cpu::of(server));
    let begun = Instant::now();
    let done = drive(
        subject,
        operation,
        bytes,
        depth,
        CELL,
        &mut offset,
        Some(&mut latency_ns),
    )?;
    let elapsed = begun.elapsed();
    let after = (Cpu::of(me), Cpu::of(server));
    let gigabytes = (done * u64::from(bytes)) as f64 / 1e9;
    let cpu = |before: u64, after: u64| after.saturating_sub(before) as f64 / 1e9 / gigabytes;
    Ok(Cell {
        system: subject.system().into(),
        operation: operation.word().into(),
        bytes,
        depth,
        gigabytes_per_second: gigabytes / elapsed.as_secs_f64(),
        p50_us: latency_ns.value_at_quantile(0.50) as f64 / 1e3,
        p99_us: latency_ns.value_at_quantile(0.99) as f64 / 1e3,
        client_app: cpu(before.0.app_ns, after.0.app_ns),
        client_nic: cpu(before.0.nic_ns, after.0.nic_ns),
        server_app: cpu(before.1.app_ns, after.1.app_ns),
        server_nic: cpu(before.1.nic_ns, after.1.nic_ns),
    })
}

/// Keeps `depth` requests in flight for some time; returns how many completed.
fn drive(
    subject: &mut dyn Subject,
    operation: Operation,
    bytes: u32,
    depth: usize,
    time: Duration,
    offset: &mut u64,
    mut latency_ns: Option<&mut Histogram<u64>>,
) -> Result<u64> {
    let end = Instant::now() + time;
    let mut posted: VecDeque<Instant> = VecDeque::with_capacity(depth);
    let mut done = 0;
    loop {
        let now = Instant::now();
        if posted.len() < depth && now < end {
            posted.push_back(now);
            subject.post(operation, *offset, bytes)?;
            *offset = (*offset + u64::from(bytes)) % subject.span();
            continue;
        }
        let Some(at) = posted.pop_front() else {
            return Ok(done);
        };
        subject.complete()?;
        done += 1;
        if let Some(histogram) = &mut latency_ns {
            histogram.saturating_record(at.elapsed().as_nanos() as u64);
        }
    }
}

/// CPU time of a process's threads. The names of the soft NIC's threads tell them from the others.
#[derive(Clone, Copy, Debug, Default)]
struct Cpu {
    app_ns: u64,
    nic_ns: u64,
}

impl Cpu {
    fn of(pid: u32) -> Cpu {
        let mut cpu = Cpu::default();
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let on_cpu_ns = read("schedstat")
                .split(' ')
                .next()
                .and_then(|ns| ns.parse::<u64>().ok());
            let part = if read("comm").starts_with("rdmux-") {
                &mut cpu.nic_ns
            } else {
                &mut cpu.app_ns
            };
            *part += on_cpu_ns.unwrap_or(0);
        }
        cpu
    }
}

struct Rdma {
    client: Client,
    mapping: Mapping,
    buffer: Buffer,
    placement: Placement,
    posted: u64,
}

impl Rdma {
    fn connect(target: &Target, key: &std::path::Path, wait: Wait) -> Result<Rdma> {
        let address = *target.resolve()?.first().context("no address")?;
        let options = Options {
            // The demo's own address: another user may have 127.0.0.1.
            from: address.ip().is_loopback().then_some(address.ip()),
            wait: match wait {
                Wait::Poll => ClientWait::Polled,
                Wait::Block => ClientWait::Blocked,
            },
            ..Options::default()
        };
        let mut client = Client::connect(address, &Key::load(key)?, &options)?;
        let mapping = client.map(&target.region, Access::READ | Access::WRITE, 0, 0, 0)?;
        let slots = QUEUE_DEPTHS.into_iter().max().unwrap_or(1);
        let buffer = client.buffer(slots * SIZES.into_iter().max().unwrap_or(1) as usize)?;
        Ok(Rdma {
            placement: mapping.strongest(),
            client,
            mapping,
            buffer,
            posted: 0,
        })
    }
}

impl Subject for Rdma {
    fn system(&self) -> &'static str {
        "rdmux"
    }

    fn span(&self) -> u64 {
        self.mapping.region_bytes()
    }

    fn post(&mut self, operation: Operation, offset: u64, bytes: u32) -> Result<()> {
        let slot = self.posted % QUEUE_DEPTHS.into_iter().max().unwrap_or(1) as u64 * u64::from(bytes);
        self.posted += 1;
        let (client, mapping, buffer) = (&mut self.client, &self.mapping, &self.buffer);
        match operation {
            Operation::Write => client.post_write(mapping, offset, buffer, slot, bytes, 1)?,
            Operation::Read => client.post_read(mapping, offset, buffer, slot, bytes, 1)?,
            Operation::Flush => {
                let part = Part {
                    offset,
                    buffer,
                    from: slot,
                    length: bytes,
                };
                let range = (offset, bytes.into());
                client.post_write_and_flush(mapping, part, range, self.placement, None, [0, 1])?;
            }
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<()> {
        // The WRITE before a FLUSH has a completion of its own.
        while self.client.next_done()?.token == 0 {}
        Ok(())
    }
}

struct Tcp {
    stream: Stream,
    span: u64,
    data: Vec<u8>,
    request: Vec<u8>,
    /// Bytes of each pending answer.
    answers: VecDeque<usize>,
}

impl Tcp {
    fn connect(address: SocketAddr, wait: Wait) -> Result<Tcp> {
        let mut stream = Stream::new(TcpStream::connect(address).context("TCP")?, wait)?;
        let mut span = [0; 8];
        stream.read_exact(&mut span)?;
        Ok(Tcp {
            stream,
            span: u64::from_be_bytes(span),
            data: vec![0x5a; SIZES.into_iter().max().unwrap_or(1) as usize],
            request: Vec::new(),
            answers: VecDeque::new(),
        })
    }
}

impl Subject for Tcp {
    fn system(&self) -> &'static str {
        "tcp"
    }

    fn span(&self) -> u64 {
        self.span
    }

    fn post(&mut self, operation: Operation, offset: u64, bytes: u32) -> Result<()> {
        self.request.clear();
        self.request.extend([operation as u8, 0, 0, 0]);
        self.request.extend(bytes.to_be_bytes());
        self.request.extend(offset.to_be_bytes());
        let reads = operation == Operation::Read;
        if !reads {
            self.request.extend_from_slice(&self.data[..bytes as usize]);
        }
        self.answers.push_back(if reads { bytes as usize } else { 1 });
        self.stream.write_all(&self.request)
    }

    fn complete(&mut self) -> Result<()> {
        let bytes = self.answers.pop_front().context("no request given")?;
        self.stream.read_exact(&mut self.data[..bytes])
    }
}

/// A TCP stream that spins or sleeps while it waits.
struct Stream {
    stream: TcpStream,
}

impl Stream {
    fn new(stream: TcpStream, wait: Wait) -> Result<Stream> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(wait == Wait::Poll)?;
        Ok(Stream { stream })
    }

    fn read_exact(&mut self, mut into: &mut [u8]) -> Result<()> {
        while !into.is_empty() {
            match self.stream.read(into) {
                Ok(0) => return Err(std::io::Error::from(ErrorKind::UnexpectedEof).into()),
                Ok(n) => into = &mut into[n..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write_all(&mut self, mut from: &[u8]) -> Result<()> {
        while !from.is_empty() {
            match self.stream.write(from) {
                Ok(n) => from = &from[n..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Serves one client, then ends.
pub(super) fn tcp_serve(args: &TcpServeArgs) -> Result<()> {
    pin(args.cpu)?;
    let file = File::options()
        .read(true)
        .write(true)
        .open(&args.file)
        .with_context(|| args.file.display().to_string())?;
    let span = file.metadata()?.len();
    let listener = TcpListener::bind((args.listen, 0)).with_context(|| args.listen.to_string())?;
    output::say(&listener.local_addr()?.to_string());
    let mut stream = Stream::new(listener.accept()?.0, args.wait)?;
    drop(listener);
    stream.write_all(&span.to_be_bytes())?;
    let mut data = vec![0; SIZES.into_iter().max().unwrap_or(1) as usize];
    loop {
        let mut head = [0; 16];
        if stream.read_exact(&mut head).is_err() {
            return Ok(());
        }
        let [code, _, _, _, a, b, c, d, offset @ ..] = head;
        let (bytes, offset) = (
            u32::from_be_bytes([a, b, c, d]) as usize,
            u64::from_be_bytes(offset),
        );
        let (Some(operation), Some(data)) = (Operation::of(code), data.get_mut(..bytes)) else {
            bail!("invalid request");
        };
        if operation == Operation::Read {
            file.read_exact_at(data, offset)?;
            stream.write_all(data)?;
            continue;
        }
        stream.read_exact(data)?;
        file.write_all_at(data, offset)?;
        if operation == Operation::Flush {
            rustix::fs::fdatasync(&file)?;
        }
        stream.write_all(&[1])?;
    }
}

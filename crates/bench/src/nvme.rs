//! `rdmux nvme target` over TCP, beside a bare pair of processes that exchanges the same bytes and waits in the same way, and beside fio on the
//! same file; and over RDMA, beside a bare pair on verbs.

mod rdma;
mod target;

use std::cell::RefCell;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rdmux_runtime::Waiting;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use super::child::{Side, say_ready};
use super::pair::{Server, free_port};
use super::table::{Column, Line, Ratio, Suite, Table, figures};
use super::{LOOPBACK, rdmux};

/// First argument of this program as a side of the bare pair.
pub(super) const COMMAND: &str = "nvme-bare";
/// Seconds of a run.
const SECONDS: u64 = 1;
/// Added to a number of commands in flight, for each queue.
const QUEUE: usize = 1000;
/// Bytes of a block, and of the PDUs of NVMe/TCP without digests: a command, a response, and the header of data.
const BLOCK: usize = 4096;
const COMMAND_PDU: usize = 72;
const RESPONSE_PDU: usize = 24;
const DATA_PDU: usize = 24;
/// The namespaces by their ids.
const NULL: &str = "1";
const MEMORY: &str = "2";
const FILE: &str = "3";
const FILE_BYTES: u64 = 256 << 20;

const LOADS: [Column; 5] = [
    (QUEUE + 1, "1 in flight"),
    (QUEUE + 8, "8"),
    (QUEUE + 32, "32"),
    (2 * QUEUE + 32, "2 queues of 32"),
    (4 * QUEUE + 32, "4 queues of 32"),
];

/// Those of RDMA.
const RDMA_LOADS: [Column; 3] = [(QUEUE + 1, "1 in flight"), (QUEUE + 8, "8"), (QUEUE + 32, "32")];

const BARE: &str = "bare pair";
const VERBS: &str = "bare verbs";
const NULL_ROW: &str = "null namespace";
const MEMORY_ROW: &str = "memory namespace";
const FILE_ROW: &str = "file namespace";
const FIO: &str = "fio, io_uring, direct";
const READ_IOPS: &str = "read_thousand_iops";
const WRITE_IOPS: &str = "write_thousand_iops";
const FILE_IOPS: &str = "file_thousand_iops";
const RDMA_READ_IOPS: &str = "rdma_read_thousand_iops";
const RDMA_WRITE_IOPS: &str = "rdma_write_thousand_iops";

/// Transport of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Tcp,
    Rdma,
}

impl Transport {
    /// Returns its name in addresses.
    fn scheme(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Rdma => "rdma",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

impl Direction {
    const ALL: [Direction; 2] = [Direction::Read, Direction::Write];

    /// Returns fio's word.
    fn name(self) -> &'static str {
        match self {
            Direction::Read => "randread",
            Direction::Write => "randwrite",
        }
    }

    fn parse(text: &str) -> Result<Direction> {
        let found = Direction::ALL.into_iter().find(|way| way.name() == text);
        found.with_context(|| format!("no direction {text}"))
    }

    /// Returns the bytes of a request, and of its answer.
    fn bytes(self) -> (usize, usize) {
        match self {
            Direction::Read => (COMMAND_PDU, DATA_PDU + BLOCK + RESPONSE_PDU),
            Direction::Write => (COMMAND_PDU + BLOCK, RESPONSE_PDU),
        }
    }
}

/// Figures of a run: thousands of I/Os a second, and CPU seconds of the serving process for a million of them.
type Run = [f64; 2];

/// Returns the tables of IOPS and of CPU time in both directions.
fn tables(target: &Shared, transport: Transport) -> Vec<Table> {
    let mut tables = Vec::new();
    for way in Direction::ALL {
        let [iops, cpu] = match (transport, way) {
            (Transport::Tcp, Direction::Read) => [READ_IOPS, "read_cpu_s_per_million"],
            (Transport::Tcp, Direction::Write) => [WRITE_IOPS, "write_cpu_s_per_million"],
            (Transport::Rdma, Direction::Read) => [RDMA_READ_IOPS, "rdma_read_cpu_s_per_million"],
            (Transport::Rdma, Direction::Write) => [RDMA_WRITE_IOPS, "rdma_write_cpu_s_per_million"],
        };
        let [title, cpu_title] = match way {
            Direction::Read => ["random reads: 1000 IOPS", "reads: CPU s/million IOs"],
            Direction::Write => ["random writes: 1000 IOPS", "writes: CPU s/million IOs"],
        };
        let (name, loads): (_, &[Column]) = match transport {
            Transport::Tcp => (BARE, &LOADS),
            Transport::Rdma => (VERBS, &RDMA_LOADS),
        };
        let columns: Vec<usize> = loads.iter().map(|(column, _)| *column).collect();
        let rows = [
            figures(name, &columns, move |load| bare(transport, way, load)),
            figures(NULL_ROW, &columns, perf(target, transport, way, NULL)),
            figures(MEMORY_ROW, &columns, perf(target, transport, way, MEMORY)),
        ];
        let mut lines: [Vec<Line>; 2] = Default::default();
        for [first, second] in rows {
            lines[0].push(first);
            lines[1].push(second);
        }
        let [measured, derived] = lines;
        let table = |key, title, digits, lines, compares| Table {
            key,
            title,
            digits,
            columns: loads.to_vec(),
            lines,
            compares,
        };
        tables.push(table(iops, title, 1, measured, true));
        tables.push(table(cpu, cpu_title, 2, derived, true));
    }
    tables
}

/// Returns what `--table nvme` measures.
pub(super) fn suites() -> [Suite; 3] {
    let target = Shared::default();
    let rdma = Suite {
        key: "nvme_rdma",
        conditions: "the same by RDMA between soft devices of one host, which share memory; the bare pair does on verbs what NVMe/RDMA asks for: SEND of 64 bytes, \
                     RDMA WRITE or READ of 4 KiB, SEND of 16 bytes; a write of rdmux has its 4 KiB in the SEND",
        claim: None,
        tables: tables(&target, Transport::Rdma),
        ratios: rdma_ratios,
    };
    [tcp(&target), rdma, target::suite()]
}

fn rdma_ratios(tables: &[Table]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for (key, words) in [
        (
            RDMA_READ_IOPS,
            ["reads of null / bare verbs, 1 in flight", "8", "32"],
        ),
        (
            RDMA_WRITE_IOPS,
            ["writes of null / bare verbs, 1 in flight", "8", "32"],
        ),
    ] {
        for ((column, _), name) in RDMA_LOADS.into_iter().zip(words) {
            let (null, bare) = (of(tables, key, NULL_ROW, column), of(tables, key, VERBS, column));
            ratios.push(Ratio::new(name, "at least 0.85", &null, &bare));
        }
    }
    ratios
}

/// Returns the figures of a row in a column.
fn of(tables: &[Table], key: &str, row: &str, column: usize) -> Vec<f64> {
    let table = tables.iter().find(|table| table.key == key);
    table.map_or(Vec::new(), |table| table.rounds(row, column))
}

fn tcp(target: &Shared) -> Suite {
    let mut tables = tables(target, Transport::Tcp);
    let both: Vec<Column> = vec![(QUEUE + 32, "reads"), (QUEUE + 33, "writes")];
    let columns: Vec<usize> = both.iter().map(|(column, _)| *column).collect();
    let way = |column: usize| Direction::ALL[column - QUEUE - 32];
    let on = |namespace: &'static str| {
        let target = target.clone();
        move |column: usize| Ok(perf(&target, Transport::Tcp, way(column), namespace)(QUEUE + 32)?[0])
    };
    let lines = vec![
        Line::new(FIO, &columns, {
            let target = target.clone();
            move |column| fio(&target, way(column))
        }),
        Line::new(MEMORY_ROW, &columns, on(MEMORY)),
        Line::new(FILE_ROW, &columns, on(FILE)),
    ];
    tables.push(Table {
        key: FILE_IOPS,
        title: "a file, 32 in flight: 1000 IOPS",
        digits: 1,
        columns: both,
        lines,
        compares: true,
    });
    Suite {
        key: "nvme",
        conditions: "rdmux nvme target with one reactor and rdmux nvme perf, TCP over loopback, 4 KiB, without digests and secrets, 1 s each; the bare \
                     pair exchanges the same bytes, its server waits as a reactor and its clients as perf; all where the scheduler puts them",
        claim: None,
        tables,
        ratios,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let of = |key, row, column| of(tables, key, row, column);
    let mut ratios = Vec::new();
    for (key, words) in [
        (READ_IOPS, ["reads of null / bare, 1 in flight", "8", "32"]),
        (WRITE_IOPS, ["writes of null / bare, 1 in flight", "8", "32"]),
    ] {
        for ((column, _), name) in LOADS.into_iter().zip(words) {
            let (null, bare) = (of(key, NULL_ROW, column), of(key, BARE, column));
            ratios.push(Ratio::new(name, "at least 0.8", &null, &bare));
        }
    }
    for (column, name) in [
        (QUEUE + 32, "file / the lower of fio and memory, reads"),
        (QUEUE + 33, "writes"),
    ] {
        let fio = of(FILE_IOPS, FIO, column);
        let memory = of(FILE_IOPS, MEMORY_ROW, column);
        let lower: Vec<f64> = fio.iter().zip(&memory).map(|(a, b)| a.min(*b)).collect();
        let file = of(FILE_IOPS, FILE_ROW, column);
        ratios.push(Ratio::new(name, "at least 0.8", &file, &lower));
    }
    ratios
}

/// A target that runs as long as this.
struct Target {
    server: Server,
    port: String,
    nqn: String,
    folder: tempfile::TempDir,
}

impl Target {
    /// Starts one with the three namespaces.
    fn start() -> Result<Target> {
        // Beside the programs: a folder of the system may be in memory.
        let beside = rdmux()?;
        let folder = tempfile::tempdir_in(beside.parent().context("no folder")?)?;
        let file = folder.path().join("disk");
        std::fs::write(&file, vec![1; FILE_BYTES as usize])?;
        let path = file.to_str().context("a path that is no text")?;
        let target = Target::of(folder, &["--ns", "mem:256M", "--ns", path], None)?;
        // Memory that nobody has written is made at the first access, which takes longer than the access.
        let mut fill = Command::new(beside);
        fill.args(["nvme", "write", &target.url(Transport::Tcp), "--nsid", MEMORY])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        ensure!(fill.status()?.success(), "the memory namespace is not written");
        Ok(target)
    }

    /// Starts one with the null namespace, further options, and a policy of moderation.
    fn with(options: &[&str], moderation: Option<&str>) -> Result<Target> {
        Target::of(tempfile::tempdir()?, options, moderation)
    }

    fn of(folder: tempfile::TempDir, options: &[&str], moderation: Option<&str>) -> Result<Target> {
        let port = free_port()?;
        // No other target of this host has it.
        let nqn = format!("nqn.2014-08.org.example:bench-{}-{port}", std::process::id());
        let mut command = Command::new(rdmux()?);
        command
            .args(["nvme", "target", "--allow-any-host", "--ns", "null:1G"])
            .args(["--nqn", &nqn, "--listen", &format!("tcp:{LOOPBACK}:{port}")])
            .args(["--listen", &format!("rdma:{LOOPBACK}:{port}")])
            .arg("--socket")
            .arg(folder.path().join("socket"))
            .args(options)
            .envs(moderation.map(|policy| ("RDMUX_MODERATION", policy)));
        let server = Server::start_until(&mut command, "listening")?;
        Ok(Target {
            server,
            port,
            nqn,
            folder,
        })
    }

    fn url(&self, transport: Transport) -> String {
        let (scheme, port, nqn) = (transport.scheme(), &self.port, &self.nqn);
        format!("nvme+{scheme}://{LOOPBACK}:{port}/{nqn}")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.server.kill();
    }
}

type Shared = Rc<RefCell<Option<Target>>>;

fn perf(
    target: &Shared,
    transport: Transport,
    way: Direction,
    namespace: &'static str,
) -> impl FnMut(usize) -> Result<Run> + use<> {
    let target = target.clone();
    move |load| {
        let mut target = target.borrow_mut();
        if target.is_none() {
            *target = Some(Target::start()?);
        }
        let target = target.as_ref().context("no target")?;
        let before = cpu_ns(target.server.pid())?;
        let (queues, depth) = ((load / QUEUE).to_string(), (load % QUEUE).to_string());
        let time = SECONDS.to_string();
        let options = [
            "--nsid",
            namespace,
            "--rw",
            way.name(),
            "--time",
            &time,
            "--queues",
            &queues,
            "--depth",
            &depth,
        ];
        let report = perf_of(target, transport, &options)?;
        let cpu = cpu_ns(target.server.pid())? - before;
        let ios = report["ios"].as_f64().context("perf reports no ios")?;
        let iops = report["iops"].as_f64().context("perf reports no iops")?;
        Ok([iops / 1e3, cpu as f64 / 1e9 / (ios / 1e6)])
    }
}

/// Runs `rdmux nvme perf` with these options, and returns its report.
fn perf_of(target: &Target, transport: Transport, options: &[&str]) -> Result<Value> {
    let output = Command::new(rdmux()?)
        .args(["nvme", "perf", &target.url(transport), "--json", "--warmup", "0"])
        .args(options)
        .stdin(Stdio::null())
        .output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "perf: {}", why.trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Returns the time that the threads of a process have had a CPU.
pub(super) fn cpu_ns(pid: u32) -> Result<u64> {
    cpu_ns_of(pid, |_| true)
}

/// Returns that of threads by their names.
pub(super) fn cpu_ns_of(pid: u32, counts: impl Fn(&str) -> bool) -> Result<u64> {
    let mut ns = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        if !counts(std::fs::read_to_string(task.join("comm"))?.trim()) {
            continue;
        }
        let text = std::fs::read_to_string(task.join("schedstat"))?;
        let first = text.split_whitespace().next();
        ns += first.and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(ns)
}

fn fio(target: &Shared, way: Direction) -> Result<f64> {
    let mut target = target.borrow_mut();
    if target.is_none() {
        *target = Some(Target::start()?);
    }
    let target = target.as_ref().context("no target")?;
    // Another file: the target has its own for itself alone.
    let file = target.folder.path().join("fio");
    if !file.exists() {
        std::fs::write(&file, vec![1; FILE_BYTES as usize])?;
    }
    let output = Command::new("fio")
        .args([
            "--name=bare",
            "--ioengine=io_uring",
            "--direct=1",
            "--bs=4k",
            "--iodepth=32",
        ])
        .args([
            "--time_based",
            "--output-format=json",
            &format!("--runtime={SECONDS}"),
        ])
        .args([
            &format!("--rw={}", way.name()),
            &format!("--filename={}", file.display()),
        ])
        .stdin(Stdio::null())
        .output()
        .context("fio is not installed")?;
    ensure!(
        output.status.success(),
        "fio: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let job = &report["jobs"][0];
    let iops = |kind: &str| job[kind]["iops"].as_f64().unwrap_or(0.0);
    Ok((iops("read") + iops("write")) / 1e3)
}

fn bare(transport: Transport, way: Direction, load: usize) -> Result<Run> {
    let port = free_port()?;
    let (queues, depth) = ((load / QUEUE).to_string(), (load % QUEUE).to_string());
    let start = |side: &str| {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([
            COMMAND,
            transport.scheme(),
            side,
            way.name(),
            &port.to_string(),
            &queues,
            &depth,
        ]);
        Side::start(&mut command)
    };
    let mut server = start("server")?;
    let mut client = start("client")?;
    client.begin();
    let ios: f64 = client.result()?.parse()?;
    let cpu: f64 = server.result()?.parse()?;
    client.end()?;
    server.end()?;
    Ok([ios / SECONDS as f64 / 1e3, cpu / 1e9 / (ios / 1e6)])
}

/// Runs as a side of the bare pair.
pub(super) fn child(args: &[String]) -> Result<()> {
    if let Some((target::IDLE, args)) = args.split_first().map(|(first, args)| (first.as_str(), args)) {
        return target::be_idle(args);
    }
    let [transport, side, way, port, queues, depth] = args else {
        bail!("give the transport, the side, the direction, a port, a number of queues and one in flight");
    };
    let (way, port, queues, depth) = (
        Direction::parse(way)?,
        port.parse()?,
        queues.parse()?,
        depth.parse()?,
    );
    let result = match (transport.as_str(), side.as_str()) {
        ("rdma", "server") => rdma::serve(way, port, depth)?,
        ("rdma", _) => rdma::request(port, depth)?,
        (_, "server") => serve(way, port, queues)?,
        _ => request(way, port, queues, depth)?,
    };
    writeln!(std::io::stdout(), "{result}")?;
    Ok(())
}

/// Answers the requests of so many connections until they end, in one thread that waits as a reactor does. Returns its CPU time in nanoseconds.
fn serve(way: Direction, port: u16, queues: usize) -> Result<u64> {
    let listener = TcpListener::bind((LOOPBACK, port))?;
    say_ready()?;
    let (request_len, answer_len) = way.bytes();
    let answer = vec![1; answer_len];
    let mut sockets: Vec<(TcpStream, usize)> = Vec::new();
    for _ in 0..queues {
        let (socket, _) = listener.accept()?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        sockets.push((socket, 0));
    }
    let mut buffer = vec![0; 64 << 10];
    let mut waiting = Waiting::new(None);
    let mut began = None;
    while !sockets.is_empty() {
        let mut has_come = false;
        let mut has_ended = None;
        for (number, (socket, received)) in sockets.iter_mut().enumerate() {
            match socket.read(&mut buffer) {
                Ok(0) => has_ended = Some(number),
                Ok(bytes) => {
                    has_come = true;
                    *received += bytes;
                    let answers = *received / request_len;
                    *received %= request_len;
                    // A client that ends leaves answers behind.
                    if send(socket, &answer, answers).is_err() {
                        has_ended = Some(number);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => has_ended = Some(number),
            }
        }
        if let Some(number) = has_ended {
            sockets.swap_remove(number);
            continue;
        }
        if has_come {
            if let Some(began) = began.take() {
                waiting.came(began);
            }
            continue;
        }
        let since = *began.get_or_insert_with(Instant::now);
        if !waiting.pause(since) {
            wait(sockets.iter().map(|(socket, _)| socket))?;
            waiting.slept(since, true);
            began = None;
        }
    }
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    Ok(cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64)
}

fn wait<'a>(sockets: impl Iterator<Item = &'a TcpStream>) -> Result<()> {
    let mut all: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    let long = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    ensure!(poll(&mut all, Some(&long))? > 0, "the other side has stopped");
    Ok(())
}

/// Sends the same bytes several times, as few calls as it takes.
fn send(socket: &mut TcpStream, bytes: &[u8], times: usize) -> Result<()> {
    let mut left = bytes.len() * times;
    while left > 0 {
        let first = left % bytes.len();
        let first = if first == 0 { bytes.len() } else { first };
        let mut slices = [IoSlice::new(&[]); 64];
        slices[0] = IoSlice::new(&bytes[bytes.len() - first..]);
        let number = (left - first).div_ceil(bytes.len()).min(slices.len() - 1);
        slices[1..=number].fill(IoSlice::new(bytes));
        match socket.write_vectored(&slices[..=number]) {
            Ok(sent) => left -= sent,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let mut all = [PollFd::new(&*socket, PollFlags::OUT)];
                poll(&mut all, None)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Keeps so many requests in flight on each of some connections, each with a thread that sleeps until answers come. Returns the answers that came in
/// time.
fn request(way: Direction, port: u16, queues: usize, depth: usize) -> Result<u64> {
    let connect = |_| TcpStream::connect((LOOPBACK, port));
    let sockets: Vec<_> = (0..queues).map(connect).collect::<Result<_, _>>()?;
    say_ready()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let threads: Vec<_> = sockets
        .into_iter()
        .map(|socket| thread::spawn(move || keep_full(socket, way, depth, end)))
        .collect();
    let mut all = 0;
    for thread in threads {
        all += thread
            .join()
            .map_err(|_| anyhow::anyhow!("a client has panicked"))??;
    }
    Ok(all)
}

fn keep_full(mut socket: TcpStream, way: Direction, depth: usize, end: Instant) -> Result<u64> {
    socket.set_nodelay(true)?;
    let (request_len, answer_len) = way.bytes();
    let bytes = vec![1; request_len];
    let mut buffer = vec![0; 256 << 10];
    send(&mut socket, &bytes, depth)?;
    let (mut answers, mut received) = (0, 0);
    loop {
        received += socket.read(&mut buffer)?;
        let come = received / answer_len;
        received %= answer_len;
        answers += come as u64;
        if Instant::now() >= end {
            return Ok(answers);
        }
        send(&mut socket, &bytes, come)?;
    }
}

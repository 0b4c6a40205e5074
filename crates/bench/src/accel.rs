//! Accelerators through the fabric, beside the same cores called in place and beside a bare stream of TCP.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rdmux_accel::{Core, Started};
use rdmux_nvmf::host::jobs::{Accelerator, JobEvent, Jobs, Request};
use rdmux_nvmf::host::{Options, Session, Transport};
use rdmux_wire::accel::{AcceleratorInfo, Algorithm, Job, JobKind, JobStatus};
use rdmux_wire::nvme::Nqn;

use super::child::{Side, say_ready};
use super::nvme::cpu_ns;
use super::pair::{Server, free_port};
use super::table::{Column, Line, Ratio, Suite, Table, figures};
use super::{LOOPBACK, rdmux};

/// First argument of this program as the other side of a bare stream.
pub(super) const COMMAND: &str = "accel-bare";
/// Time of a run.
const TIME: Duration = Duration::from_secs(1);
/// Bytes of a namespace for results.
const DRIVE_BYTES: &str = "mem:256M";
const WINDOW: u64 = 4 << 20;
/// Bytes of a file whose result is copied to a drive.
const FILE_BYTES: usize = 64 << 20;
/// Commands in flight.
const DEPTH: u16 = 16;
/// Added to a column for two cores.
const TWO: usize = 100;

const COLUMNS: [Column; 8] = [
    (0, "zstd text"),
    (1, "zstd JSON"),
    (2, "lz4 text"),
    (3, "lz4 JSON"),
    (4, "deflate text"),
    (5, "deflate JSON"),
    (6, "crc32c"),
    (7, "null"),
];
const BOTH: [Column; 8] = [
    (TWO, "zstd text"),
    (TWO + 1, "zstd JSON"),
    (TWO + 2, "lz4 text"),
    (TWO + 3, "lz4 JSON"),
    (TWO + 4, "deflate text"),
    (TWO + 5, "deflate JSON"),
    (TWO + 6, "crc32c"),
    (TWO + 7, "null"),
];

const ONE_MB: &str = "one_core_mb_per_s";
const TWO_MB: &str = "two_cores_mb_per_s";
const ONE_CPU: &str = "one_core_target_cpu_s_per_gb";
const TWO_CPU: &str = "two_cores_target_cpu_s_per_gb";
const RATIO: &str = "ratio";
const WIRE: &str = "wire_bytes_per_byte";
const IN_PLACE: &str = "in place";
const TCP: &str = "TCP";
const RDMA: &str = "RDMA";
const BARE: &str = "bare stream of TCP";
const COPY: &str = "compress --to: copied at the target";
const DECK: &str = "compress, then write the result";

/// Returns the algorithm, the kind of job and the data of a column.
fn work(column: usize) -> (Algorithm, JobKind, Data) {
    let data = if column.is_multiple_of(2) {
        Data::Text
    } else {
        Data::Json
    };
    match column % TWO {
        0 | 1 => (Algorithm::Zstd, JobKind::Compress, data),
        2 | 3 => (Algorithm::Lz4, JobKind::Compress, data),
        4 | 5 => (Algorithm::Deflate, JobKind::Compress, data),
        6 => (Algorithm::Crc32c, JobKind::Checksum, Data::Text),
        _ => (Algorithm::Null, JobKind::Pass, Data::Text),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Data {
    /// Words, the frequent ones short and few, as in a language (Zipf).
    Text,
    /// Lines of a log.
    Json,
}

impl Data {
    /// Makes so many bytes, the same each time.
    fn make(self, len: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(1);
        let words: Vec<String> = (0..20_000)
            .map(|nr: usize| {
                let letters = 2 + nr.max(1).ilog2() as usize / 2 + random.usize(0..4);
                (0..letters).map(|_| random.lowercase()).collect()
            })
            .collect();
        // The nth word comes with a probability of about 1/n.
        let mut word = || &words[((words.len() as f64).powf(random.f64()) as usize).min(words.len() - 1)];
        let (mut bytes, mut line) = (Vec::with_capacity(len + 256), 0u64);
        while bytes.len() < len {
            line += 1;
            match self {
                Data::Text => bytes.extend_from_slice(word().as_bytes()),
                Data::Json => bytes.extend_from_slice(
                    format!(
                        "{{\"time\":\"2026-01-01T00:{:02}:{:02}.{:03}Z\",\"level\":\"info\",\"service\":\"api\",\"request\":{line},\"path\":\"/v1/{}\",\"status\":200,\"message\":\"{} {}\"}}",
                        line / 60_000 % 60,
                        line / 1000 % 60,
                        line % 1000,
                        word(),
                        word(),
                        word(),
                    )
                    .as_bytes(),
                ),
            }
            bytes.push(if self == Data::Text && line % 12 > 0 {
                b' '
            } else {
                b'\n'
            });
        }
        bytes.truncate(len);
        bytes
    }
}

/// Figures of a run: MB/s of data, CPU seconds of the target for each GB, and bytes of data for each byte of the result.
type Run = [f64; 3];

/// Returns the data of the jobs of a column: what a window takes.
fn chunk(column: usize) -> Vec<u8> {
    let (algorithm, kind, data) = work(column);
    let info = info(algorithm);
    let bytes = match kind {
        JobKind::Compress => info.compress_max(),
        _ => info.data_bytes(),
    };
    data.make(bytes as usize)
}

fn info(algorithm: Algorithm) -> AcceleratorInfo {
    AcceleratorInfo {
        algorithm,
        level: rdmux_accel::level_range(algorithm).map_or(0, |(_, level)| level),
        windows: 8,
        window_bytes: WINDOW,
    }
}

/// Runs cores in this process, a thread each.
fn in_place(column: usize) -> Result<Run> {
    let (algorithm, kind, _) = work(column);
    let cores = 1 + column / TWO;
    let data = chunk(column);
    let is_over = AtomicBool::new(false);
    let (bytes, results) = (AtomicU64::new(0), AtomicU64::new(0));
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                let info = info(algorithm);
                let mut core = Core::new(algorithm, info.level);
                let job = Job {
                    kind,
                    algorithm,
                    level: 0,
                    id: 0,
                    length: data.len() as u32,
                    align: 0,
                };
                // A window's buffer, which comes back with the result in it.
                let mut buffer = vec![0; info.data_bytes() as usize];
                while !is_over.load(Ordering::Relaxed) {
                    buffer[..data.len()].copy_from_slice(&data);
                    let ran = core.run(Started::of(job, buffer));
                    bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
                    results.fetch_add(u64::from(ran.outcome.length), Ordering::Relaxed);
                    buffer = ran.bytes;
                }
            });
        }
        thread::sleep(TIME);
        is_over.store(true, Ordering::Relaxed);
    });
    let (bytes, results) = (bytes.into_inner() as f64, results.into_inner() as f64);
    Ok([
        bytes / 1e6 / began.elapsed().as_secs_f64(),
        f64::NAN,
        bytes / results,
    ])
}

/// A target with two cores of each algorithm, and a namespace for results.
struct Target {
    server: Server,
    port: u16,
    nqn: String,
    _folder: tempfile::TempDir,
}

type Shared = Rc<RefCell<Option<Target>>>;

impl Target {
    fn start() -> Result<Target> {
        let folder = tempfile::tempdir()?;
        let port = free_port()?;
        let nqn = format!("nqn.2014-08.org.example:bench-{}-{port}", std::process::id());
        let mut command = Command::new(rdmux()?);
        command.args(["nvme", "target", "--allow-any-host", "--nqn", &nqn]);
        for algorithm in [
            Algorithm::Zstd,
            Algorithm::Lz4,
            Algorithm::Deflate,
            Algorithm::Crc32c,
            Algorithm::Null,
        ] {
            command.args(["--accel", &format!("{}:2", algorithm.name())]);
        }
        command
            .args(["--accel-ns", DRIVE_BYTES])
            .args(["--listen", &format!("tcp:{LOOPBACK}:{port}")])
            .args(["--listen", &format!("rdma:{LOOPBACK}:{port}")])
            .arg("--socket")
            .arg(folder.path().join("socket"));
        Ok(Target {
            server: Server::start_until(&mut command, "listening")?,
            port: port.parse()?,
            nqn: format!("{nqn}:accel"),
            _folder: folder,
        })
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.server.kill();
    }
}

fn with_target<T>(target: &Shared, run: impl FnOnce(&Target) -> Result<T>) -> Result<T> {
    let mut target = target.borrow_mut();
    if target.is_none() {
        *target = Some(Target::start()?);
    }
    run(target.as_ref().context("no target")?)
}

/// Runs cores through the fabric.
fn through(target: &Shared, transport: Transport, column: usize) -> Result<Run> {
    with_target(target, |target| {
        let (algorithm, kind, _) = work(column);
        let address = (LOOPBACK, target.port).into();
        let nqn = Nqn::new(&target.nqn).context("no name")?;
        let options = Options {
            transport,
            ..Options::new(vec![address], nqn)
        };
        let session = Session::connect(options, 1)?;
        let mut cores = Accelerator::list(&session)?;
        cores.retain(|core| core.info.algorithm == algorithm);
        cores.truncate(1 + column / TWO);
        let queue = session.queue(1, DEPTH)?;
        let mut jobs = Jobs::new(&session, queue, &cores, 1);
        let data = chunk(column);
        let mut submitted = 0;
        let mut submit = |jobs: &mut Jobs, data: Vec<u8>| {
            submitted += 1;
            jobs.submit(Request {
                token: submitted,
                kind,
                level: 0,
                align: 0,
                data,
                stays: false,
            });
        };
        while jobs.has_room() {
            submit(&mut jobs, data.clone());
        }
        // Each window once, before it counts: memory is made then.
        let mut warm = cores.len() * 8;
        let (mut bytes, mut results) = (0, 0);
        let (mut began, mut before) = (Instant::now(), 0);
        let cpu = || cpu_ns(target.server.pid());
        while let Some(event) = jobs.wait()? {
            let JobEvent::Done(done) = event else { continue };
            ensure!(done.outcome.status == JobStatus::Done, "{:?}", done.outcome);
            if warm > 0 {
                warm -= 1;
                (began, before) = (Instant::now(), cpu()?);
            } else {
                bytes += u64::from(done.outcome.consumed);
                results += u64::from(done.outcome.length);
            }
            if began.elapsed() >= TIME && warm == 0 {
                break;
            }
            submit(&mut jobs, done.request.data);
        }
        let (elapsed, used) = (began.elapsed(), cpu()? - before);
        drop(jobs);
        session.close();
        let (bytes, results) = (bytes as f64, results as f64);
        Ok([
            bytes / 1e6 / elapsed.as_secs_f64(),
            used as f64 / bytes,
            bytes / results,
        ])
    })
}

/// The other side of a bare stream: takes chunks, and returns them or a block for each.
pub(super) fn child(args: &[String]) -> Result<()> {
    let [port, chunk, returns] = args else {
        anyhow::bail!("{COMMAND} PORT BYTES BYTES");
    };
    let listener = TcpListener::bind((LOOPBACK, port.parse()?))?;
    let mut bytes = vec![0; chunk.parse()?];
    let returned: usize = returns.parse()?;
    say_ready()?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    while stream.read_exact(&mut bytes).is_ok() {
        stream.write_all(&bytes[..returned])?;
    }
    Ok(())
}

/// Measures a bare stream that carries what a column's jobs carry. Two threads: one sends, one receives.
fn bare(column: usize) -> Result<Run> {
    let chunk = chunk(column);
    let returned = match work(column).0 {
        Algorithm::Null => chunk.len(),
        _ => 512,
    };
    let port = free_port()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args([COMMAND, &port, &chunk.len().to_string(), &returned.to_string()]);
    let side = Side::start(&mut command)?;
    let stream = TcpStream::connect((LOOPBACK, port.parse::<u16>()?))?;
    stream.set_nodelay(true)?;
    let (mut sender, mut receiver) = (stream.try_clone()?, stream);
    let is_over = Arc::new(AtomicBool::new(false));
    let sending = {
        let is_over = is_over.clone();
        thread::spawn(move || -> std::io::Result<()> {
            while !is_over.load(Ordering::Relaxed) {
                sender.write_all(&chunk)?;
            }
            sender.shutdown(std::net::Shutdown::Write)
        })
    };
    let mut answer = vec![0; returned];
    let (mut chunks, began) = (0u64, Instant::now());
    while receiver.read_exact(&mut answer).is_ok() {
        if began.elapsed() < TIME {
            chunks += 1;
        } else {
            is_over.store(true, Ordering::Relaxed);
        }
    }
    let _ = sending.join();
    side.end()?;
    let bytes = chunks as f64 * chunk_len(column) as f64;
    Ok([bytes / 1e6 / TIME.as_secs_f64(), f64::NAN, f64::NAN])
}

fn chunk_len(column: usize) -> u64 {
    let (algorithm, kind, _) = work(column);
    match kind {
        JobKind::Compress => info(algorithm).compress_max().into(),
        _ => info(algorithm).data_bytes().into(),
    }
}

/// Returns the bytes that loopback has carried.
fn wire_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/sys/class/net/lo/statistics/tx_bytes")?;
    Ok(text.trim().parse()?)
}

/// Compresses a file to a namespace of the target, and returns the bytes on the wire for each of the file.
fn to_drive(target: &Shared, copies: bool) -> Result<f64> {
    with_target(target, |target| {
        let folder = tempfile::tempdir()?;
        let [file, packed] = ["file", "packed"].map(|name| folder.path().join(name));
        std::fs::write(&file, Data::Text.make(FILE_BYTES))?;
        let url = format!("nvme+tcp://{LOOPBACK}:{}/{}", target.port, target.nqn);
        let run = |args: &[&str]| -> Result<()> {
            let mut command = Command::new(rdmux()?);
            command.args(args).stdin(Stdio::null()).stdout(Stdio::null());
            ensure!(command.status()?.success(), "rdmux {} failed", args.join(" "));
            Ok(())
        };
        let text = |path: &std::path::Path| path.display().to_string();
        let before = wire_bytes()?;
        let mut compress = vec!["accel", "compress"];
        let (file, packed) = (text(&file), text(&packed));
        compress.extend([file.as_str(), "--via", &url, "--algorithm", "zstd", "--quiet"]);
        let drive = "11";
        if copies {
            compress.extend(["--to", drive]);
            run(&compress)?;
        } else {
            compress.extend(["--output", &packed]);
            run(&compress)?;
            let out = std::fs::File::options().append(true).open(&packed)?;
            let length = out.metadata()?.len();
            out.set_len(length.next_multiple_of(512))?;
            run(&["nvme", "write", &url, &packed, "--nsid", drive, "--quiet"])?;
        }
        Ok((wire_bytes()? - before) as f64 / FILE_BYTES as f64)
    })
}

/// Returns what `--table accel` measures.
pub(super) fn suite() -> Suite {
    let target = Shared::default();
    let mut tables = Vec::new();
    let mut ratio = None;
    for (columns, key, title, cpu, cpu_title) in [
        (
            COLUMNS,
            ONE_MB,
            "1 core: MB/s",
            ONE_CPU,
            "1 core: target's CPU s/GB",
        ),
        (
            BOTH,
            TWO_MB,
            "2 cores: MB/s",
            TWO_CPU,
            "2 cores: target's CPU s/GB",
        ),
    ] {
        let all: Vec<usize> = columns.iter().map(|(column, _)| *column).collect();
        let streams: Vec<usize> = all.iter().copied().filter(|column| column % TWO >= 6).collect();
        let [place, _, place_ratio] = figures(IN_PLACE, &all, in_place);
        let [stream, ..] = figures(BARE, &streams, bare);
        let fabric = |name, transport| {
            let target = target.clone();
            figures(name, &all, move |column| through(&target, transport, column))
        };
        let [tcp, tcp_cpu, _] = fabric(TCP, Transport::Tcp);
        let [rdma, rdma_cpu, _] = fabric(RDMA, Transport::Rdma);
        let table = |key, title, digits, lines, compares| Table {
            key,
            title,
            digits,
            columns: columns.to_vec(),
            lines,
            compares,
        };
        tables.push(table(key, title, 0, vec![place, stream, tcp, rdma], true));
        tables.push(table(cpu, cpu_title, 2, vec![tcp_cpu, rdma_cpu], false));
        let mut of_results = table(RATIO, "bytes for each of the result", 2, vec![place_ratio], false);
        // A checksum has no result.
        of_results.columns.retain(|(column, _)| *column < 6);
        ratio.get_or_insert(of_results);
    }
    tables.extend(ratio);
    let wire = |name, copies| {
        let target = target.clone();
        Line::new(name, &[0], move |_| to_drive(&target, copies))
    };
    tables.push(Table {
        key: WIRE,
        title: "on the wire for each byte",
        digits: 3,
        columns: vec![(0, "zstd text")],
        lines: vec![wire(COPY, true), wire(DECK, false)],
        compares: false,
    });
    Suite {
        key: "accel",
        conditions: "rdmux nvme target --accel with one reactor and 8 windows of 4 MiB for each core, over loopback; the bare stream carries the same bytes \
                     each way; 1 s each; all where the scheduler puts them",
        claim: None,
        tables,
        ratios,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let of = |key: &str, row: &str, column: usize| {
        let table = tables.iter().find(|table| table.key == key);
        table.map_or(Vec::new(), |table| table.rounds(row, column))
    };
    let names: BTreeMap<usize, [&str; 4]> = [
        (
            0,
            [
                "zstd, text: TCP / in place",
                "RDMA / in place",
                "TCP: 2 cores / 1",
                "CPU s/GB, 2 / 1",
            ],
        ),
        (
            2,
            [
                "lz4, text: TCP / in place",
                "RDMA / in place",
                "TCP: 2 cores / 1",
                "CPU s/GB, 2 / 1",
            ],
        ),
        (
            4,
            [
                "deflate, text: TCP / in place",
                "RDMA / in place",
                "TCP: 2 cores / 1",
                "CPU s/GB, 2 / 1",
            ],
        ),
        (
            1,
            [
                "zstd, JSON: TCP / in place",
                "RDMA / in place",
                "TCP: 2 cores / 1",
                "CPU s/GB, 2 / 1",
            ],
        ),
    ]
    .into();
    let mut ratios = Vec::new();
    for (column, [tcp, rdma, cores, cpu]) in names {
        let place = of(ONE_MB, IN_PLACE, column);
        let one = of(ONE_MB, TCP, column);
        ratios.push(Ratio::new(tcp, "at least 0.95", &one, &place));
        ratios.push(Ratio::new(
            rdma,
            "at least 0.95",
            &of(ONE_MB, RDMA, column),
            &place,
        ));
        ratios.push(Ratio::new(
            cores,
            "at least 1.9 with 4 CPUs",
            &of(TWO_MB, TCP, TWO + column),
            &one,
        ));
        ratios.push(Ratio::new(
            cpu,
            "at most 1.05",
            &of(TWO_CPU, TCP, TWO + column),
            &of(ONE_CPU, TCP, column),
        ));
    }
    for (column, tcp, rdma) in [
        (6, "crc32c: TCP / bare stream", "RDMA / bare stream"),
        (7, "null: TCP / bare stream", "RDMA / bare stream"),
    ] {
        let stream = of(ONE_MB, BARE, column);
        ratios.push(Ratio::new(tcp, "at least 0.7", &of(ONE_MB, TCP, column), &stream));
        ratios.push(Ratio::new(
            rdma,
            "at least 0.7",
            &of(ONE_MB, RDMA, column),
            &stream,
        ));
    }
    ratios
}

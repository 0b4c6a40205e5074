//! The cost of a read and a write of an NVMe drive for its target, by each path of the data, as a talk of Eideticom (2018) compares them.
//!
//! The target and a model of a drive run in this process, where the byte ledger is; the host is a process of its own, and the network UDP over loopback.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rdmux_drive::MemoryKind;
use rdmux_nvmf::backend::drive::{DriveBackend, DriveSettings};
use rdmux_nvmf::backend::peer::PeerToPeer;
use rdmux_nvmf::host::{Options, Session, Transport, command};
use rdmux_nvmf::server::{Config, Handle, Listen, OFFLOAD_THREAD, Server};
use rdmux_nvmf::target::{Hosts, Listener, Namespace, Subsystem, Target, Terms};
use rdmux_sim::drive::{Bytes, Drive, Shape};
use rdmux_verbs::ledger::{Class, Entries, Ledger, Link};
use rdmux_wire::nvme::{Nqn, NsId, TransportKind};

use super::LOOPBACK;
use super::child::{Side, say, say_ready};
use super::nvme::cpu_ns_of;
use super::pair::free_port;
use super::table::{Column, Ratio, Suite, Table, figures};

/// First argument of this program as the host.
pub(super) const COMMAND: &str = "offload-host";
const SUBSYSTEM: &str = "nqn.2014-08.org.example:bench-offload";
/// Time of a run.
const TIME: Duration = Duration::from_secs(1);
/// Commands of a run that do not count.
const WARM: usize = 200;
const DRIVE_BYTES: u64 = 64 << 20;
const BLOCK_SHIFT: u8 = 12;
/// Name of the thread that is the drive: its processor time is not the target's.
const DRIVE_THREAD: &str = "model-drive";
/// Name of the thread of the RNIC in user space, which is in hardware elsewhere. It works while no other thread drives the RNIC.
const RNIC_THREAD: &str = "rdmux-nic";

const COLUMNS: [Column; 4] = [
    (0, "read 4 KiB"),
    (1, "write 4 KiB"),
    (2, "read 64 KiB"),
    (3, "write 64 KiB"),
];
/// A path of the data.
#[derive(Clone, Copy, Debug)]
struct Path {
    title: &'static str,
    buffers: MemoryKind,
    /// By the offload engine.
    offload: bool,
}

const VANILLA: Path = Path {
    title: "vanilla: data in DRAM",
    buffers: MemoryKind::Dram,
    offload: false,
};
const OFFLOAD: Path = Path {
    title: "offload: staging in DRAM",
    buffers: MemoryKind::Dram,
    offload: true,
};
const CMB: Path = Path {
    title: "CMB, peer-to-peer",
    buffers: MemoryKind::Cmb,
    offload: false,
};
const BOTH: Path = Path {
    title: "offload, and CMB",
    buffers: MemoryKind::Cmb,
    offload: true,
};
const PATHS: [Path; 4] = [VANILLA, OFFLOAD, CMB, BOTH];

const P50: &str = "p50_us";
const CPU: &str = "target_cpu_us_per_io";
const ENGINE: &str = "engine_cpu_us_per_io";
const RNIC: &str = "rnic_thread_cpu_us_per_io";
const DRAM: &str = "dram_bytes_per_io";
const ROOT: &str = "root_pcie_bytes_per_io";
const DRIVE: &str = "drive_bytes_per_io";
const ETHERNET: &str = "ethernet_bytes_per_io";

/// Bytes of an I/O of a column, and whether it writes.
fn io(column: usize) -> (u32, bool) {
    (if column < 2 { 4 << 10 } else { 64 << 10 }, column % 2 == 1)
}

/// The host: warms up, reads or writes for a while one command at a time once it is told to begin, and prints the number of commands, and their median time in nanoseconds.
pub(super) fn child(args: &[String]) -> Result<()> {
    let [port, column] = args else {
        bail!("{COMMAND} PORT COLUMN");
    };
    let (bytes, writes) = io(column.parse()?);
    let address: SocketAddr = (LOOPBACK, port.parse()?).into();
    let options = Options {
        transport: Transport::Rdma,
        ..Options::new(vec![address], Nqn::new(SUBSYSTEM).context("no name")?)
    };
    let session = Session::connect(options, 1)?;
    let mut queue = session.queue(1, 1)?;
    let blocks = bytes >> BLOCK_SHIFT;
    let places = DRIVE_BYTES / u64::from(bytes);
    let mut random = fastrand::Rng::with_seed(1);
    let mut buffer = vec![0x5a; bytes as usize];
    let mut run_one = || -> Result<u64> {
        let slba = random.u64(..places) * u64::from(blocks);
        let data = std::mem::take(&mut buffer);
        let command = match writes {
            true => command::write(NsId(1), slba, blocks, bytes, data),
            false => command::read(NsId(1), slba, blocks, bytes, data),
        };
        let began = Instant::now();
        let done = queue.run("I/O", command)?;
        let ns = began.elapsed().as_nanos() as u64;
        buffer = done.command.buffer;
        Ok(ns)
    };
    for _ in 0..WARM {
        run_one()?;
    }
    say_ready()?;
    // The end of the input is the sign to begin.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    let mut times = Histogram::<u64>::new(3)?;
    let began = Instant::now();
    while began.elapsed() < TIME {
        times.record(run_one()?)?;
    }
    say(&format!("{} {}", times.len(), times.value_at_quantile(0.5)))?;
    // Whoever started it counts bytes now, of which those of a disconnection are no I/O's, and then ends it.
    thread::park_timeout(10 * TIME);
    Ok(())
}

/// A target with a drive.
struct Serving {
    drive: Arc<Drive>,
    ledger: Arc<Ledger>,
    handle: Handle,
    server: Option<JoinHandle<()>>,
    drive_ends: Arc<AtomicBool>,
    drive_thread: Option<JoinHandle<()>>,
}

impl Serving {
    fn start(port: u16, path: Path) -> Result<Serving> {
        let drive = Drive::new(Shape::default(), Bytes::new(DRIVE_BYTES / 512), 1);
        let drive_ends = Arc::new(AtomicBool::new(false));
        let (moved, ends) = (drive.clone(), drive_ends.clone());
        let drive_thread = thread::Builder::new().name(DRIVE_THREAD.into()).spawn(move || {
            let began = Instant::now();
            while !ends.load(Ordering::Relaxed) {
                moved.set_now(began.elapsed().as_nanos() as u64);
                if !moved.step() {
                    thread::yield_now();
                }
            }
        })?;
        let ledger = Arc::<Ledger>::default();
        let settings = DriveSettings {
            buffers: path.buffers,
            p2p: match path.buffers {
                MemoryKind::Dram => PeerToPeer::Off,
                _ => PeerToPeer::Require,
            },
            offload: path.offload,
            ledger: Some(ledger.clone()),
            ..DriveSettings::default()
        };
        let backend = DriveBackend::of_function(drive.clone(), None, settings)?;
        let nqn = Nqn::new(SUBSYSTEM).context("no name")?;
        let subsystem = Subsystem::new(nqn, "bench", Hosts::any(Terms::default()));
        subsystem.add_namespace(Namespace {
            nsid: NsId(1),
            block_shift: BLOCK_SHIFT,
            uuid: [1; 16],
            is_protected: false,
            backend: Arc::new(backend),
        })?;
        let target = Target::default().with_ledger(ledger.clone());
        target.add_subsystem(Arc::new(subsystem))?;
        let listener = Listener {
            transport: TransportKind::Rdma,
            address: (LOOPBACK, port).into(),
        };
        let server = Server::bind(Config {
            target: Arc::new(target),
            // Data in capsules would cross DRAM by themselves.
            listen: vec![Listen {
                in_capsule_bytes: 0,
                ..Listen::from(listener)
            }],
            reactors: 1,
            offload: path.offload,
            waiting: None,
        })?;
        let handle = server.handle();
        let server = thread::Builder::new().name("target".into()).spawn(move || {
            // A target that fails has the host fail, which tells.
            let _ = server.run();
        })?;
        Ok(Serving {
            drive,
            ledger,
            handle,
            server: Some(server),
            drive_ends,
            drive_thread: Some(drive_thread),
        })
    }

    /// Returns the ledger, bytes on the wire, and processor time in nanoseconds: of the target without what follows, of its offload engine, and of the RNIC's own thread.
    fn figures(&self) -> Result<(Entries, u64, [u64; 3])> {
        let devices = rdmux_soft::metrics::devices();
        let counted = devices
            .iter()
            .map(|device| device.counters.sent_bytes + device.counters.rcvd_bytes);
        // The thread that waits for the host has next to none.
        let of_threads = |is_meant: &dyn Fn(&str) -> bool| cpu_ns_of(std::process::id(), is_meant);
        let others = [DRIVE_THREAD, OFFLOAD_THREAD, RNIC_THREAD];
        let target = of_threads(&|thread| !others.contains(&thread))?;
        let engine = of_threads(&|thread| thread == OFFLOAD_THREAD)?;
        let rnic = of_threads(&|thread| thread == RNIC_THREAD)?;
        Ok((self.ledger.entries(), counted.sum(), [target, engine, rnic]))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.handle.stop();
        let _ = self.server.take().map(JoinHandle::join);
        self.drive_ends.store(true, Ordering::Relaxed);
        let _ = self.drive_thread.take().map(JoinHandle::join);
    }
}

/// Figures of a run, for each I/O: median time and processor time in microseconds, the latter of the target, of its offload engine and of the RNIC's own thread, bytes in DRAM, at the root complex, of the
/// drive's data, and on the network.
fn run(path: Path, column: usize) -> Result<[f64; 8]> {
    let port = free_port()?;
    let serving = Serving::start(port.parse()?, path)?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args([COMMAND, &port, &column.to_string()])
        // All bytes cross the network, and the device counts them.
        .env("RDMUX_SHM", "off");
    let mut host = Side::start(&mut command)?;
    let (before, wire_before, cpu_before) = serving.figures()?;
    host.begin();
    let line = host.result()?;
    let (after, wire, cpu) = serving.figures()?;
    host.kill();
    let violation = serving.drive.violation();
    ensure!(violation.is_none(), "the drive: {violation:?}");
    let (commands, p50) = line.split_once(' ').context("no result of the host")?;
    let commands: f64 = commands.parse()?;
    let p50: f64 = p50.parse()?;
    let moved = after - before;
    let per_io = |bytes: u64| bytes as f64 / commands;
    let data = |link| moved.get(link, Class::Data);
    Ok([
        p50 / 1e3,
        per_io(cpu[0] - cpu_before[0]) / 1e3,
        per_io(cpu[1] - cpu_before[1]) / 1e3,
        per_io(cpu[2] - cpu_before[2]) / 1e3,
        per_io(moved.of_link(Link::RootDram)),
        per_io(moved.of_link(Link::NicRoot) + moved.of_link(Link::RootDrive)),
        per_io(data(Link::RootDrive) + data(Link::NicDrive)),
        per_io(wire - wire_before),
    ])
}

/// Returns what `--table offload` measures.
pub(super) fn suite() -> Suite {
    let columns: Vec<usize> = COLUMNS.iter().map(|(column, _)| *column).collect();
    let titles = [
        (P50, "p50, us", 1),
        (CPU, "target's CPU but for the next two, us for each I/O", 2),
        (ENGINE, "offload engine's CPU, us for each I/O", 1),
        (RNIC, "CPU of the RNIC's own thread, us for each I/O", 1),
        (DRAM, "DRAM, bytes for each I/O", 0),
        (ROOT, "root PCIe, bytes for each I/O", 0),
        (DRIVE, "drive, bytes for each I/O", 0),
        (ETHERNET, "Ethernet, bytes for each I/O", 0),
    ];
    let mut lines =
        PATHS.map(|path| figures(path.title, &columns, move |column| run(path, column)).into_iter());
    let tables = titles.into_iter().map(|(key, title, digits)| Table {
        key,
        title,
        digits,
        columns: COLUMNS.to_vec(),
        lines: lines.iter_mut().filter_map(Iterator::next).collect(),
        // Only some paths have an engine.
        compares: key != ENGINE,
    });
    Suite {
        key: "offload",
        conditions: "a target with one reactor and a model of a drive in one process, whose byte ledger counts, and a host with one I/O in flight in another; UDP over loopback, no data in capsules; \
                     1 s each; the work of the RNIC in user space is that of the thread which waits for it: the target's, the engine's, or its own",
        claim: Some(
            "The talk (Eideticom, 2018), beside vanilla, for an I/O of a size that it does not tell: latency 188 us (read) and 227 us (write); ConnectX-5 offload 128 and 138 us, CPU 0.02, memory 2.40, PCIe 1.03; \
             CMB 167 and 212 us, CPU 0.55, memory 0.09, PCIe 0.01; both 142 and 154 us, CPU 0.02, memory 0.02, PCIe 0.04; drive and Ethernet 1.00 each. Memory of 2.40 is no count of bytes: \
             offload moves those of vanilla, of which caches (DDIO) likely kept more off the memory.",
        ),
        tables: tables.collect(),
        ratios,
    }
}

/// Columns that are compared, with the talk's figures for offload, CMB and both, and the goals for them.
type Compared = (
    &'static str,
    &'static str,
    [[&'static str; 3]; 2],
    [&'static str; 3],
);

const AT_MOST_1: [&str; 3] = ["at most 1"; 3];
const THE_SAME: [&str; 3] = ["at most 1.01"; 3];
const COMPARED: [Compared; 6] = [
    (
        P50,
        "p50",
        [["0.68", "0.89", "0.76"], ["0.61", "0.93", "0.68"]],
        AT_MOST_1,
    ),
    (
        CPU,
        "target's CPU",
        [["0.02", "0.55", "0.02"]; 2],
        ["at most 0.05", "", "at most 0.05"],
    ),
    (
        DRAM,
        "DRAM",
        [["2.40", "0.09", "0.02"]; 2],
        ["", "at most 0.06", "at most 0.06"],
    ),
    (
        ROOT,
        "root PCIe",
        [["1.03", "0.01", "0.04"]; 2],
        ["", "at most 0.06", "at most 0.06"],
    ),
    (DRIVE, "drive", [["1.00"; 3]; 2], THE_SAME),
    (ETHERNET, "Ethernet", [["1.00"; 3]; 2], THE_SAME),
];

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let by_key: HashMap<&str, &Table> = tables.iter().map(|table| (table.key, table)).collect();
    let mut ratios = Vec::new();
    for (key, figure, of_talk, goals) in COMPARED {
        for (column, operation) in ["read 4 KiB", "write 4 KiB"].into_iter().enumerate() {
            let of = |path: Path| {
                by_key
                    .get(key)
                    .map_or(Vec::new(), |table| table.rounds(path.title, column))
            };
            for (at, path) in PATHS[1..].iter().enumerate() {
                let (row, talk) = (path.title, of_talk[column][at]);
                let name = format!("{operation}, {figure}, {row} / vanilla (talk {talk})");
                ratios.push(Ratio::new(&name, goals[at], &of(*path), &of(VANILLA)));
            }
        }
    }
    ratios
}

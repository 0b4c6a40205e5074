//! `rdmux demo push`: a file that is pushed, a client that is killed and resumes, and the figures beside those of TCP.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rdmux_push::{DEFAULT_PORT, file_system_of};
use serde_json::json;

use super::measure::{Cell, OPERATIONS, QUEUE_DEPTHS, SIZES, Wait};
use super::stage::{self, Stage};
use super::unused_loopback;
use crate::output::{self, Align};

/// Size of the measured file.
const MEASURED_BYTES: u64 = 64 << 20;
/// Approximate size of the file that is looked for where none is given.
const FILE_BYTES_WANTED: u64 = 64 << 20;
const FILE_BYTES_MAX: u64 = 512 << 20;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: file, bytes, file_system, durable, killed_at (bytes), resumed and pulled (as push and pull --json report),
wait, client_cpu, server_cpu, and cells: an array of system (rdmux or tcp), operation, bytes, depth, gigabytes_per_second,
p50_us, p99_us, and CPU seconds per GB as client_app, client_nic, server_app, server_nic.")]
pub(super) struct Args {
    /// File to push [default: a large file of this host].
    file: Option<PathBuf>,
    /// Report in JSON.
    #[arg(long)]
    json: bool,
    /// How both sides wait, for rdmux and TCP alike [default: poll with two CPUs or more, else block].
    #[arg(long, value_enum)]
    wait: Option<Wait>,
    /// Keep the served file in this folder [default: $TMPDIR or /var/tmp, whichever is on a disk].
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Address that the server listens on [default: an unused address of the loopback interface].
    #[arg(long, value_name = "ADDR")]
    listen: Option<IpAddr>,
    /// Words before the server's command, such as `ip netns exec NAME`.
    #[arg(long, value_name = "WORDS", hide = true)]
    server_prefix: Option<String>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let source = match &args.file {
        Some(file) => file.clone(),
        None => find_file()?,
    };
    let meta = std::fs::metadata(&source).with_context(|| source.display().to_string())?;
    ensure!(meta.is_file(), "{}: not a regular file", source.display());
    File::open(&source).with_context(|| source.display().to_string())?;
    let length = meta.len();
    ensure!(length > 0, "{}: the file is empty", source.display());
    let tell = |text: &str| {
        if !args.json {
            output::say(text);
        }
    };
    let mut stage = Stage::new(args.dir.as_deref(), args.server_prefix.as_deref())?;
    let kind = file_system_of(stage.folder());
    let durable = !matches!(kind.as_str(), "tmpfs" | "ramfs");
    let ip = args.listen.unwrap_or_else(|| unused_loopback(0));
    tell(&format!(
        "file    {}, {}",
        source.display(),
        output::bytes(length)
    ));
    tell(&format!(
        "served  {} on {kind}: {}",
        stage.path("region").display(),
        if durable {
            "durable after a flush"
        } else {
            "NOT DURABLE, the file system is in memory"
        }
    ));

    let server = stage.serve(
        &["--file", &format!("{},size={length}", stage.arg("region")?)],
        ip,
    )?;
    let url = format!("rdmux://{}/region", SocketAddr::new(ip, DEFAULT_PORT));
    let killed = push_and_kill(&mut stage, &source, length, &url)?;
    tell(&format!(
        "push    client killed with SIGKILL when {killed} of {length} bytes were acknowledged"
    ));

    let resumed = stage.report(&["push", &stage.arg_of(&source)?, &url, "--resume", "--json"])?;
    let from = resumed["resumed_from"].as_u64().unwrap_or(0);
    ensure!(
        from >= killed,
        "resumed at {from} though {killed} bytes were acknowledged: acknowledged bytes are lost"
    );
    tell(&format!(
        "resume  at {from}: {} bytes in {:.2} s, {:.2} GB/s; CRC-64 {} at both ends",
        length - from,
        resumed["seconds"].as_f64().unwrap_or(0.0),
        resumed["gigabytes_per_second"].as_f64().unwrap_or(0.0),
        resumed["crc64"].as_str().unwrap_or("?")
    ));

    let back = stage.path("back");
    let pulled = stage.report(&["pull", &url, &stage.arg("back")?, "--json"])?;
    ensure!(
        same(&source, &back)?,
        "the pulled file differs from {}",
        source.display()
    );
    std::fs::remove_file(&back)?;
    tell(&format!(
        "pull    {length} bytes in {:.2} s, {:.2} GB/s; the same, byte for byte",
        pulled["seconds"].as_f64().unwrap_or(0.0),
        pulled["gigabytes_per_second"].as_f64().unwrap_or(0.0)
    ));
    stage.end(server)?;

    let cpus = stage::cpus()?;
    let wait = args
        .wait
        .unwrap_or(if cpus.len() >= 2 { Wait::Poll } else { Wait::Block });
    // The server has a CPU beside the client's, where there is one for it.
    let (client_cpu, server_cpu) = (cpus[0], *cpus.get(1).unwrap_or(&cpus[0]));
    tell(&format!(
        "measure client on CPU {client_cpu}, server on CPU {server_cpu}, both {}",
        match wait {
            Wait::Poll => "spinning",
            Wait::Block => "sleeping while they wait",
        }
    ));
    let cells = measure_both(&mut stage, ip, wait, client_cpu, server_cpu)?;
    if args.json {
        let report = json!({
            "file": source.display().to_string(),
            "bytes": length,
            "file_system": kind,
            "durable": durable,
            "killed_at": killed,
            "resumed": resumed,
            "pulled": pulled,
            "wait": wait,
            "client_cpu": client_cpu,
            "server_cpu": server_cpu,
            "cells": cells,
        });
        output::say(&report.to_string());
        return Ok(());
    }
    output::say("");
    output::say(&table(&cells));
    output::say(if durable {
        "flush = write, then fdatasync before the response; latencies in µs"
    } else {
        "flush = write, then FLUSH for visibility: the file system is in memory, nothing is durable; latencies in µs"
    });
    output::say(
        "CPU seconds per GB: app = threads of the program, NIC = threads of the soft RNIC; s.app of TCP = its server",
    );
    output::say(
        "The server's NIC executes each request on a pushed file, so that it can revoke a client's access: single small writes take longer than \
         by TCP. Memory without a lease is faster: rdmux perf write-lat",
    );
    output::say("");
    // By the name that this command was called by: rdmux need not be in PATH.
    let rdmux = std::env::args_os().next().unwrap_or_else(|| "rdmux".into());
    let rdmux = rdmux.display();
    output::say(&format!("next: {rdmux} serve --file data.img,size=1G"));
    output::say(&format!("      {rdmux} push FILE rdmux://127.0.0.1/data.img"));
    output::say(&format!(
        "      {rdmux} push --help: --resume, --depth, --chunk; {rdmux} perf --help: latency and bandwidth alone"
    ));
    Ok(())
}

/// Pushes, and kills the client when half of the file is acknowledged. Returns the number of bytes acknowledged last.
fn push_and_kill(stage: &mut Stage, source: &Path, length: u64, url: &str) -> Result<u64> {
    let flush_every = length.div_ceil(16).min(1 << 30).to_string();
    let chunk = length.div_ceil(16).min(1 << 20).to_string();
    let half = length.div_ceil(2).to_string();
    let file = stage.arg_of(source)?;
    let args = [
        "push",
        &file,
        url,
        "--quiet",
        "--flush-every",
        &flush_every,
        "--chunk",
        &chunk,
        "--ack-log",
        "/dev/stdout",
        "--hold-at",
        &half,
    ];
    let mut client = stage.client(&args)?;
    let mut lines = BufReader::new(client.stdout()?).lines();
    let mut acknowledged = 0;
    while acknowledged < length.div_ceil(2) {
        let Some(line) = lines.next() else {
            bail!("the client exited early: {}", client.complaint());
        };
        acknowledged = line?
            .strip_prefix("ACK ")
            .and_then(|n| n.parse().ok())
            .context("cannot parse the client's output")?;
    }
    client.kill();
    Ok(acknowledged)
}

fn measure_both(
    stage: &mut Stage,
    ip: IpAddr,
    wait: Wait,
    client_cpu: usize,
    server_cpu: usize,
) -> Result<Vec<Cell>> {
    let (client_cpu, server_cpu) = (client_cpu.to_string(), server_cpu.to_string());
    let spec = format!("{},name=measured,size={MEASURED_BYTES}", stage.arg("measured")?);
    let mut serve = vec!["--file", &spec, "--cpu", &server_cpu];
    if wait == Wait::Poll {
        serve.push("--poll");
    }
    let mut cells = Vec::new();
    let server = stage.serve(&serve, ip)?;
    let target = format!("rdmux://{}/measured", SocketAddr::new(ip, DEFAULT_PORT));
    let pid = server.pid().to_string();
    let common = ["--wait", wait.word(), "--cpu", &client_cpu];
    let mut client = vec!["demo", "measure", "--rdmux", &target, "--server-pid", &pid];
    client.extend(common);
    cells.extend(stage.cells(&client)?);
    stage.end(server)?;

    // The same file again: its blocks are allocated.
    let path = stage.arg("measured")?;
    let ip = ip.to_string();
    let serve = [
        "demo",
        "tcp-serve",
        "--file",
        &path,
        "--listen",
        &ip,
        "--wait",
        wait.word(),
        "--cpu",
        &server_cpu,
    ];
    let (server, address) = stage.tcp_serve(&serve)?;
    let pid = server.pid().to_string();
    let mut client = vec!["demo", "measure", "--tcp", &address, "--server-pid", &pid];
    client.extend(common);
    cells.extend(stage.cells(&client)?);
    drop(server);
    Ok(cells)
}

/// Returns this program, or a larger file among the system's programs and libraries.
fn find_file() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("cannot find the executable of this program: give a FILE")?;
    let mut best = (std::fs::metadata(&exe)?.len(), exe.clone());
    let folders = [
        "/usr/bin",
        "/usr/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
    ];
    for entry in folders
        .iter()
        .flat_map(std::fs::read_dir)
        .flatten()
        .flatten()
        .take(50_000)
    {
        if best.0 >= FILE_BYTES_WANTED {
            break;
        }
        // The metadata of the entry itself: links are left out.
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_file()
            && (best.0..FILE_BYTES_MAX).contains(&meta.len())
            && File::open(entry.path()).is_ok()
        {
            best = (meta.len(), entry.path());
        }
    }
    Ok(best.1)
}

fn same(one: &Path, two: &Path) -> Result<bool> {
    let (mut one, mut two) = (BufReader::new(File::open(one)?), BufReader::new(File::open(two)?));
    let (mut a, mut b) = (vec![0; 1 << 20], Vec::new());
    loop {
        let n = one.read(&mut a)?;
        b.resize(n, 0);
        if n == 0 {
            return Ok(two.read(&mut [0])? == 0);
        }
        if two.read_exact(&mut b).is_err() || a[..n] != b[..] {
            return Ok(false);
        }
    }
}

/// Formats a value with two significant digits or more, and no more than two after the point.
fn short(value: f64) -> String {
    match value {
        v if v >= 9.95 => format!("{v:.0}"),
        v if v >= 0.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn rate(value: f64) -> String {
    if value < 0.1 {
        format!("{value:.3}")
    } else {
        format!("{value:.2}")
    }
}

fn table(cells: &[Cell]) -> String {
    let columns: Vec<(&str, Align)> = std::iter::once(("", Align::Left))
        .chain(
            [
                "size", "QD", "GB/s", "p50", "p99", "c.app", "c.NIC", "s.app", "s.NIC", "GB/s", "p50", "p99",
                "c.app", "s.app",
            ]
            .map(|title| (title, Align::Right)),
        )
        .collect();
    let find = |system: &str, key: (&str, u32, usize)| {
        cells
            .iter()
            .find(|cell| cell.system == system && (cell.operation.as_str(), cell.bytes, cell.depth) == key)
    };
    let mut rows = Vec::new();
    for operation in OPERATIONS {
        for bytes in SIZES {
            for depth in QUEUE_DEPTHS {
                let key = (operation.word(), bytes, depth);
                let mut row = vec![
                    operation.word().into(),
                    format!("{}K", bytes >> 10),
                    depth.to_string(),
                ];
                for system in ["rdmux", "tcp"] {
                    let Some(cell) = find(system, key) else { continue };
                    row.push(rate(cell.gigabytes_per_second));
                    row.push(short(cell.p50_us));
                    row.push(short(cell.p99_us));
                    row.push(short(cell.client_app));
                    if system == "rdmux" {
                        row.push(short(cell.client_nic));
                    }
                    row.push(short(cell.server_app));
                    if system == "rdmux" {
                        row.push(short(cell.server_nic));
                    }
                }
                rows.push(row);
            }
        }
    }
    let widths = output::widths(&columns, &rows);
    let start = |column: usize| widths[..column].iter().map(|width| width + 2).sum::<usize>();
    let mut head = " ".repeat(start(3));
    head += "rdmux";
    head += &" ".repeat(start(10).saturating_sub(head.len()));
    head += "TCP";
    format!("{head}\n{}", output::table(&columns, &rows))
}

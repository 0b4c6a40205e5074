//! `rdmux bench`: rdmux beside the machine's floor and its peers, in one run and one table. `bench/run` calls it.
//!
//! Every round measures every row once, so that a noisy moment hits all of them; the table shows medians over the rounds.
//! Each pair runs on CPU 0 and CPU 1 and both sides spin.

mod floor;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::json;

use self::floor::{raw_udp_bandwidth, raw_udp_latency};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const CPUS: [usize; 2] = [0, 1];
/// Payload of a packet at path MTU 4096 with the headers of a WRITE.
const SEGMENT_BYTES: u16 = 4_096 + 32;

/// Measure rdmux beside raw UDP, TCP, UCX and libfabric.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Rounds; the table shows their medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A line of a table: what, whose, and a value for each size over the rounds.
struct Line {
    name: &'static str,
    measure: Box<dyn Fn(usize) -> Result<f64>>,
    /// Rounds x sizes.
    values: Vec<Vec<f64>>,
    /// Why there is none.
    missing: Option<String>,
}

impl Line {
    fn new(name: &'static str, measure: impl Fn(usize) -> Result<f64> + 'static) -> Line {
        Line {
            name,
            measure: Box::new(measure),
            values: Vec::new(),
            missing: None,
        }
    }

    fn round(&mut self, sizes: &[usize]) {
        if self.missing.is_some() {
            return;
        }
        match sizes
            .iter()
            .map(|size| (self.measure)(*size))
            .collect::<Result<Vec<f64>>>()
        {
            Ok(values) => self.values.push(values),
            Err(error) => self.missing = Some(format!("{error:#}")),
        }
    }

    /// Lowest, median and highest of a column.
    fn spread(&self, column: usize) -> Option<(f64, f64, f64)> {
        let mut values: Vec<f64> = self.values.iter().map(|round| round[column]).collect();
        values.sort_by(f64::total_cmp);
        Some((*values.first()?, values[values.len() / 2], *values.last()?))
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(
        thread::available_parallelism().is_ok_and(|n| n.get() >= 2),
        "the bench needs two CPUs: both sides of a pair spin"
    );
    let latency_sizes = [8, 4096];
    let mut latency = [
        Line::new("raw UDP (unconnected, DF)", |size| {
            Ok(raw_udp_latency(LOOPBACK, CPUS, size.max(64), 10_000)? as f64 / 1e3)
        }),
        Line::new("TCP", tcp_latency),
        Line::new("rdmux WRITE", |size| perf("write-lat", size, 10_000, "t_typical")),
        Line::new("rdmux SEND", |size| perf("send-lat", size, 10_000, "t_typical")),
        Line::new("rdmux READ (whole trip / 2)", |size| {
            Ok(perf("read-lat", size, 10_000, "t_typical")? / 2.0)
        }),
        Line::new("UCX put, tcp", |size| ucx("ucp_put_lat", size, 3_000, 1)),
        Line::new("UCX am, tcp", |size| ucx("ucp_am_lat", size, 3_000, 1)),
        Line::new("libfabric msg, tcp", |size| libfabric(size, 3_000, 6)),
    ];
    let bandwidth_sizes = [64 << 10, 1 << 20];
    let mut bandwidth = [
        Line::new("raw UDP (GSO + GRO)", |_| {
            Ok(raw_udp_bandwidth(LOOPBACK, CPUS, SEGMENT_BYTES, Duration::from_millis(700))? / 1e6)
        }),
        Line::new("TCP stream", tcp_bandwidth),
        Line::new("rdmux WRITE", |size| {
            megabytes(perf("write-bw", size, count(size), "BW_average")?)
        }),
        Line::new("rdmux READ", |size| {
            megabytes(perf("read-bw", size, count(size), "BW_average")?)
        }),
        Line::new("rdmux SEND", |size| {
            megabytes(perf("send-bw", size, count(size), "BW_average")?)
        }),
        Line::new("UCX put, tcp", |size| {
            Ok(ucx("ucp_put_bw", size, count(size) / 4, 5)? * 1.048_576)
        }),
        Line::new("libfabric msg ping-pong, tcp", |size| {
            libfabric(size, count(size) / 4, 5)
        }),
    ];

    let bar = indicatif::ProgressBar::new(u64::from(args.rounds) * (latency.len() + bandwidth.len()) as u64);
    for _ in 0..args.rounds {
        for line in &mut latency {
            line.round(&latency_sizes);
            bar.inc(1);
        }
        for line in &mut bandwidth {
            line.round(&bandwidth_sizes);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    let mut out = std::io::stdout().lock();
    if args.json {
        let table = |lines: &[Line], sizes: &[usize]| -> Vec<_> {
            lines
                .iter()
                .map(|line| {
                    let columns: Vec<_> = sizes
                        .iter()
                        .enumerate()
                        .filter_map(|(i, size)| {
                            let (min, median, max) = line.spread(i)?;
                            Some(json!({ "bytes": size, "min": min, "median": median, "max": max }))
                        })
                        .collect();
                    json!({ "name": line.name, "sizes": columns, "missing": line.missing })
                })
                .collect()
        };
        let value = json!({
            "rounds": args.rounds,
            "latency_us": table(&latency, &latency_sizes),
            "bandwidth_mb_per_s": table(&bandwidth, &bandwidth_sizes),
        });
        writeln!(out, "{value:#}")?;
        return Ok(());
    }
    writeln!(
        out,
        "Medians (lowest to highest) of {} interleaved rounds on CPU 0 and 1, both sides spinning.",
        args.rounds
    )?;
    print(
        &mut out,
        "Half round trip, p50, us",
        &latency,
        ["8 B", "4 KiB"],
        2,
    )?;
    print(&mut out, "Bandwidth, MB/s", &bandwidth, ["64 KiB", "1 MiB"], 0)?;
    Ok(())
}

fn print(out: &mut impl Write, title: &str, lines: &[Line], sizes: [&str; 2], digits: usize) -> Result<()> {
    writeln!(
        out,
        "\n{title:<30} {:>23} {:>5}  {:>23} {:>5}",
        sizes[0], "ratio", sizes[1], "ratio"
    )?;
    let floor: Vec<Option<f64>> = (0..2).map(|i| lines[0].spread(i).map(|s| s.1)).collect();
    for line in lines {
        write!(out, "{:<30}", line.name)?;
        if let Some(why) = &line.missing {
            writeln!(out, " not measured: {why}")?;
            continue;
        }
        for (i, floor) in floor.iter().enumerate() {
            if let Some((min, median, max)) = line.spread(i) {
                let range = format!("({min:.digits$} to {max:.digits$})");
                let ratio = floor.map_or(String::new(), |floor| format!("{:.2}", median / floor));
                write!(out, " {median:>7.digits$} {range:>15} {ratio:>5} ")?;
            }
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Messages of a bandwidth run: about half a second's worth.
fn count(size: usize) -> u32 {
    ((1usize << 31) / size).clamp(400, 20_000) as u32
}

/// MiB/s to MB/s.
fn megabytes(mebibytes: f64) -> Result<f64> {
    Ok(mebibytes * 1.048_576)
}

/// Keeps this thread, and those that it starts from now on, on one CPU.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on CPU {cpu}"))
}

/// A child that is ended with the value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn perf(test: &str, size: usize, iterations: u32, key: &str) -> Result<f64> {
    let exe = std::env::current_exe()?;
    let command = |cpu: &str| {
        let mut command = Command::new(&exe);
        command.args([
            "perf",
            test,
            "--json",
            "--pin",
            cpu,
            "--bind",
            "127.0.0.1",
            "-t",
            "32",
        ]);
        command.stdin(Stdio::null());
        command
    };
    let _server = Server(command("1").stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    let (size, iterations) = (size.to_string(), iterations.to_string());
    let output = retry(|| {
        let output = command("0")
            .args(["127.0.0.1", "-s", &size, "-n", &iterations])
            .output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(output)
    })?;
    let value: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    value["results"][0][key]
        .as_f64()
        .context("no figure in perf's output")
}

/// Starts `client` again until the server listens.
fn retry<T>(mut client: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match client() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > deadline => return Err(error),
            // The server says nothing that one could wait for.
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// A foreign program pinned to a CPU, killed when it takes too long.
fn peer(cpu: &str, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["-s", "KILL", "60", "taskset", "-c", cpu, program])
        .args(args);
    command
        .env("UCX_TLS", "tcp")
        .env("UCX_NET_DEVICES", "lo")
        .env("UCX_WARN_UNUSED_ENV_VARS", "n");
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

fn free_port() -> Result<String> {
    Ok(TcpListener::bind((LOOPBACK, 0))?.local_addr()?.port().to_string())
}

fn installed(program: &str) -> Result<()> {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    ensure!(found, "{program} is not installed");
    Ok(())
}

/// A figure of `ucx_perftest`: `column` of its CSV line.
fn ucx(test: &str, size: usize, iterations: u32, column: usize) -> Result<f64> {
    installed("ucx_perftest")?;
    let port = free_port()?;
    let _server = Server(
        peer("1", "ucx_perftest", &["-p", &port, "-f"])
            .stdout(Stdio::null())
            .spawn()?,
    );
    let (size, iterations, warm_up) = (
        size.to_string(),
        iterations.to_string(),
        (iterations / 10).to_string(),
    );
    retry(|| {
        let args = [
            "127.0.0.1",
            "-p",
            &port,
            "-t",
            test,
            "-s",
            &size,
            "-n",
            &iterations,
            "-w",
            &warm_up,
            "-f",
            "-v",
        ];
        let output = peer("0", "ucx_perftest", &args).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text
            .lines()
            .last()
            .filter(|_| output.status.success())
            .context("ucx_perftest failed")?;
        line.split(',')
            .nth(column)
            .and_then(|field| field.trim().parse().ok())
            .context("ucx_perftest printed no figure")
    })
}

/// A figure of `fi_pingpong`: `column` of its last line.
fn libfabric(size: usize, iterations: u32, column: usize) -> Result<f64> {
    installed("fi_pingpong")?;
    let port = free_port()?;
    let (size, iterations) = (size.to_string(), iterations.to_string());
    let common = ["-p", "tcp", "-e", "msg", "-S", &size, "-I", &iterations];
    let _server = Server(
        peer("1", "fi_pingpong", &[&common[..], &["-B", &port]].concat())
            .stdout(Stdio::null())
            .spawn()?,
    );
    retry(|| {
        let output = peer(
            "0",
            "fi_pingpong",
            &[&common[..], &["-P", &port, "127.0.0.1"]].concat(),
        )
        .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text
            .lines()
            .last()
            .filter(|_| output.status.success())
            .context("fi_pingpong failed")?;
        line.split_whitespace()
            .nth(column)
            .and_then(|field| field.parse().ok())
            .context("fi_pingpong printed no figure")
    })
}

fn spin_read(stream: &mut TcpStream, buffer: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

fn spin_exchange(stream: &mut TcpStream, buffer: &mut [u8], write: bool) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        let result = if write {
            stream.write(&buffer[done..])
        } else {
            stream.read(&mut buffer[done..])
        };
        match result {
            Ok(0) => bail!("the TCP connection ended"),
            Ok(n) => done += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A connected pair of spinning TCP sockets without delay.
fn tcp_pair() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((LOOPBACK, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    Ok((near, far))
}

fn tcp_latency(size: usize) -> Result<f64> {
    const ROUNDS: usize = 10_000;
    let (mut near, mut far) = tcp_pair()?;
    thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<()> {
            pin(CPUS[1])?;
            let mut buffer = vec![0; size];
            for _ in 0..ROUNDS {
                spin_exchange(&mut far, &mut buffer, false)?;
                spin_exchange(&mut far, &mut buffer, true)?;
            }
            Ok(())
        });
        let ping = scope.spawn(move || -> Result<f64> {
            pin(CPUS[0])?;
            let mut buffer = vec![0; size];
            let mut samples = Vec::with_capacity(ROUNDS);
            for _ in 0..ROUNDS {
                let begin = Instant::now();
                spin_exchange(&mut near, &mut buffer, true)?;
                spin_exchange(&mut near, &mut buffer, false)?;
                samples.push(begin.elapsed().as_nanos() as u64);
            }
            samples.sort_unstable();
            Ok(samples[ROUNDS / 2] as f64 / 2e3)
        });
        let half = ping
            .join()
            .map_err(|_| anyhow::anyhow!("the TCP client failed"))?;
        echo.join()
            .map_err(|_| anyhow::anyhow!("the TCP server failed"))??;
        half
    })
}

fn tcp_bandwidth(size: usize) -> Result<f64> {
    let (mut near, mut far) = tcp_pair()?;
    let total = u64::from(count(size)) * size as u64;
    thread::scope(|scope| {
        let sink = scope.spawn(move || -> Result<f64> {
            pin(CPUS[1])?;
            let mut buffer = vec![0; size];
            let (begin, mut received) = (Instant::now(), 0u64);
            while received < total {
                match spin_read(&mut far, &mut buffer)? {
                    0 => bail!("the TCP connection ended"),
                    n => received += n as u64,
                }
            }
            Ok(total as f64 / begin.elapsed().as_secs_f64() / 1e6)
        });
        scope.spawn(move || -> Result<()> {
            pin(CPUS[0])?;
            let mut buffer = vec![0; size];
            for _ in 0..count(size) {
                spin_exchange(&mut near, &mut buffer, true)?;
            }
            Ok(())
        });
        sink.join()
            .map_err(|_| anyhow::anyhow!("the TCP server failed"))?
    })
}

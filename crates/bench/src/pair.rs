//! Pairs of processes that measure: `rdmux perf`, UCX and libfabric, one side on each CPU.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};

use super::{CPUS, LOOPBACK};

/// Time that a server may take to end after its client has ended.
const ENDING: Duration = Duration::from_secs(1);
/// Time that a server may take until it listens.
const STARTING: Duration = Duration::from_secs(10);

/// A child and the processes that it started, ended when the value is dropped. A server whose client has gone ends by itself, and removes
/// its shared memory.
pub(super) struct Server(Child);

impl Server {
    pub(super) fn start(command: &mut Command) -> Result<Server> {
        command.process_group(0).stdin(Stdio::null());
        Ok(Server(command.spawn()?))
    }

    /// Starts a server whose output is discarded; returns once it listens on a TCP port.
    pub(super) fn start_on(port: &str, command: &mut Command) -> Result<Server> {
        let number = port.parse()?;
        let mut server = Server::start(command.stdout(Stdio::null()))?;
        let deadline = Instant::now() + STARTING;
        while !is_listened_on(number) {
            ensure!(Instant::now() < deadline, "the server does not listen");
            ensure!(matches!(server.0.try_wait(), Ok(None)), "the server ended");
            // No event reports another program's socket, so poll.
            thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let deadline = Instant::now() + ENDING;
        while Instant::now() < deadline {
            if matches!(self.0.try_wait(), Ok(Some(_))) {
                return;
            }
            // Poll: std has no wait with a deadline.
            thread::sleep(Duration::from_millis(5));
        }
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}

/// A run of `rdmux perf`.
#[derive(Clone, Copy)]
pub(super) struct Perf {
    test: &'static str,
    bytes: usize,
    /// CPUs of the client and the server; `None` leaves them to the scheduler.
    cpus: Option<[usize; 2]>,
    port: u16,
    options: &'static [&'static str],
    over_udp: bool,
    blocked: bool,
}

impl Perf {
    pub(super) fn new(test: &'static str, bytes: usize) -> Perf {
        Perf {
            test,
            bytes,
            cpus: Some(CPUS),
            port: 18515,
            options: &[],
            over_udp: false,
            blocked: false,
        }
    }

    /// Adds options for both sides.
    pub(super) fn options(self, options: &'static [&'static str]) -> Perf {
        Perf { options, ..self }
    }

    /// Makes both sides sleep whenever they wait.
    pub(super) fn blocked(self) -> Perf {
        Perf {
            blocked: true,
            ..self
        }
    }

    /// Uses UDP although both sides are on one host.
    pub(super) fn over_udp(self) -> Perf {
        Perf {
            over_udp: true,
            ..self
        }
    }

    /// Sets the CPU of each side.
    pub(super) fn cpus(self, cpus: [usize; 2]) -> Perf {
        Perf {
            cpus: Some(cpus),
            ..self
        }
    }

    /// Makes this one of several pairs that share all CPUs, without priority.
    pub(super) fn in_crowd(self, index: u16) -> Perf {
        Perf {
            cpus: None,
            port: self.port + index,
            ..self
        }
    }

    fn command(&self, side: usize) -> Result<Command> {
        let exe = super::rdmux()?;
        let mut command = match self.cpus {
            Some(cpus) => {
                let mut command = Command::new(exe);
                command.args(["perf", self.test, "--pin", &cpus[side].to_string()]);
                command
            }
            None => {
                let mut command = crowded(&exe.to_string_lossy())?;
                command.args(["perf", self.test]);
                command
            }
        };
        command.args(["--bind", "127.0.0.1", "-t", "32", "-p", &self.port.to_string()]);
        command.args(self.options).stdin(Stdio::null());
        if self.over_udp {
            command.env("RDMUX_SHM", "off");
        }
        if self.blocked {
            command.env("RDMUX_WAIT", "blocked");
        }
        Ok(command)
    }

    /// Starts the server; returns once it listens.
    pub(super) fn serve(&self) -> Result<Server> {
        let mut command = self.command(1)?;
        let mut server = Server::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
        let stdout = server.0.stdout.take().context("no pipe")?;
        for line in BufReader::new(stdout).lines() {
            if line?.contains("Waiting for client") {
                return Ok(server);
            }
        }
        let mut why = String::new();
        if let Some(mut stderr) = server.0.stderr.take() {
            stderr.read_to_string(&mut why)?;
        }
        bail!("the server ended: {}", why.trim())
    }

    /// Starts a client, for [`Perf::finish`] to take its result.
    pub(super) fn start(&self, more: &[&str]) -> Result<Child> {
        let mut command = self.command(0)?;
        command.args(["127.0.0.1", "--json", "-s", &self.bytes.to_string()]);
        command.args(more);
        Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }

    /// Waits for a client; returns the row that it measured.
    pub(super) fn finish(client: Child) -> Result<Row> {
        let output = client.wait_with_output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let value: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        Ok(Row(value["results"][0].clone()))
    }

    /// Runs a server and a client; returns one figure.
    pub(super) fn run(&self, iterations: u32, key: &str) -> Result<f64> {
        let _server = self.serve()?;
        Perf::finish(self.start(&["-n", &iterations.to_string()])?)?.figure(key)
    }
}

/// Runs `rdmux perf push-write` over UDP; returns the median time of one durable push at a time by a method, in microseconds.
pub(super) fn push(method: &str, bytes: usize) -> Result<f64> {
    let mut command = Command::new(super::rdmux()?);
    command.args([
        "perf",
        "push-write",
        "--json",
        "-n",
        "3000",
        "-s",
        &bytes.to_string(),
    ]);
    command.args([
        "--pin",
        &CPUS[0].to_string(),
        "--server-pin",
        &CPUS[1].to_string(),
    ]);
    command.env("RDMUX_SHM", "off").stdin(Stdio::null());
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let value: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let cells = value["cells"].as_array().context("no cells in perf's output")?;
    let cell = cells
        .iter()
        .find(|cell| cell["method"] == method && cell["depth"] == 1);
    let cell = cell.with_context(|| format!("perf has not measured {method}"))?;
    cell["p50_us"].as_f64().context("no such figure in perf's output")
}

/// A row of perf's JSON.
pub(super) struct Row(serde_json::Value);

impl Row {
    pub(super) fn figure(&self, key: &str) -> Result<f64> {
        self.0[key].as_f64().context("no such figure in perf's output")
    }
}

/// Returns a command that runs a program on any of the CPUs, without priority, even where the bench has one: spinning processes with
/// priority would each hold a CPU for a slice of 100 ms.
pub(super) fn crowded(program: &str) -> Result<Command> {
    installed("chrt")?;
    let mut command = Command::new("chrt");
    command.args(["-o", "0", "taskset", "-c", "0,1", program]);
    Ok(command)
}

/// Returns whether some program listens on a TCP port.
fn is_listened_on(port: u16) -> bool {
    const LISTEN: &str = "0A";
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        let table = std::fs::read_to_string(path).unwrap_or_default();
        table.lines().any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().unwrap_or_default();
            local.ends_with(&format!(":{port:04X}")) && fields.nth(1) == Some(LISTEN)
        })
    })
}

/// Returns a command that runs a foreign program pinned to a CPU, and kills it when it takes too long.
pub(super) fn peer(cpu: &str, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["-s", "KILL", "60", "taskset", "-c", cpu, program])
        .args(args);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

pub(super) fn free_port() -> Result<String> {
    Ok(TcpListener::bind((LOOPBACK, 0))?.local_addr()?.port().to_string())
}

pub(super) fn installed(program: &str) -> Result<()> {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    ensure!(found, "{program} is not installed");
    Ok(())
}

/// Sets the transport of `ucx_perftest`.
pub(super) fn ucx_transport(command: &mut Command, tls: &str) {
    command.env("UCX_TLS", tls).env("UCX_WARN_UNUSED_ENV_VARS", "n");
    if tls == "tcp" {
        command.env("UCX_NET_DEVICES", "lo");
    }
}

/// Columns of `ucx_perftest`'s CSV lines.
pub(super) const UCX_LATENCY: usize = 1;
pub(super) const UCX_BANDWIDTH: usize = 5;
pub(super) const UCX_MESSAGE_RATE: usize = 7;

/// Runs `ucx_perftest`; returns a figure of its last line.
pub(super) fn ucx(tls: &str, test: &str, size: usize, iterations: u32, column: usize) -> Result<f64> {
    installed("ucx_perftest")?;
    let port = free_port()?;
    let mut server = peer("1", "ucx_perftest", &["-p", &port, "-f"]);
    ucx_transport(&mut server, tls);
    let _server = Server::start_on(&port, &mut server)?;
    let (size, iterations, warm_up) = (
        size.to_string(),
        iterations.to_string(),
        (iterations / 10).to_string(),
    );
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
    let mut client = peer("0", "ucx_perftest", &args);
    ucx_transport(&mut client, tls);
    let output = client.output()?;
    ensure!(output.status.success(), "ucx_perftest failed");
    ucx_figure(&String::from_utf8_lossy(&output.stdout), column)
}

/// Returns a column of the last line that `ucx_perftest` printed.
pub(super) fn ucx_figure(text: &str, column: usize) -> Result<f64> {
    text.lines()
        .last()
        .and_then(|line| line.split(',').nth(column)?.trim().parse().ok())
        .context("ucx_perftest printed no figure")
}

/// Columns of `fi_pingpong`'s lines.
pub(super) const FABRIC_BANDWIDTH: usize = 5;
pub(super) const FABRIC_LATENCY: usize = 6;

/// Runs `fi_pingpong`; returns a figure of its last line.
pub(super) fn libfabric(
    [provider, endpoint]: [&str; 2],
    size: usize,
    iterations: u32,
    column: usize,
) -> Result<f64> {
    installed("fi_pingpong")?;
    let port = free_port()?;
    let (size, iterations) = (size.to_string(), iterations.to_string());
    let common = ["-p", provider, "-e", endpoint, "-S", &size, "-I", &iterations];
    let server = [&common[..], &["-B", &port]].concat();
    let _server = Server::start_on(&port, &mut peer("1", "fi_pingpong", &server))?;
    let client = [&common[..], &["-P", &port, "127.0.0.1"]].concat();
    let output = peer("0", "fi_pingpong", &client).output()?;
    ensure!(output.status.success(), "fi_pingpong failed");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .last()
        .and_then(|line| line.split_whitespace().nth(column)?.parse().ok())
        .context("fi_pingpong printed no figure")
}

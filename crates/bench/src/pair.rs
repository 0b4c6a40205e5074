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

    /// Starts a server; returns once it has printed a line with this text.
    pub(super) fn start_until(command: &mut Command, text: &str) -> Result<Server> {
        let mut server = Server::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
        let stdout = server.0.stdout.take().context("no pipe")?;
        for line in BufReader::new(stdout).lines() {
            if line?.contains(text) {
                return Ok(server);
            }
        }
        let mut why = String::new();
        if let Some(mut stderr) = server.0.stderr.take() {
            stderr.read_to_string(&mut why)?;
        }
        bail!("the server ended: {}", why.trim())
    }

    /// Asks a server that would go on to end.
    pub(super) fn interrupt(&self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::INT);
    }

    /// Returns the number of its process.
    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits until it has ended by itself.
    pub(super) fn wait(&mut self) -> Result<()> {
        let status = self.0.wait()?;
        ensure!(status.success(), "another process of the run failed: {status}");
        Ok(())
    }

    /// Ends it by a signal that no process can handle.
    pub(super) fn kill(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
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

/// Words before a command that runs without priority, whatever this program has.
pub(super) const ORDINARY: &[&str] = &["chrt", "--other", "0"];

/// A process without priority that is always busy, until this is dropped.
pub(super) struct Busy(Server);

pub(super) fn busy(cpu: usize) -> Result<Busy> {
    let cpu = cpu.to_string();
    let words = ["taskset", "-c", &cpu, "sh", "-c", "while :; do :; done"];
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60"]).args(ORDINARY).args(words);
    command.stdout(Stdio::null());
    Ok(Busy(Server::start(&mut command)?))
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.kill();
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
        Server::start_until(&mut self.command(1)?, "Waiting for client")
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

impl Perf {
    /// Runs a push test, which starts its server by itself; returns the median time of a push by WRITE and FLUSH, one after the other, in
    /// microseconds.
    pub(super) fn push(&self, iterations: u32) -> Result<f64> {
        let mut command = Command::new(super::rdmux()?);
        let [client, server] = CPUS.map(|cpu| cpu.to_string());
        command.args([
            "perf",
            self.test,
            "--pin",
            &client,
            "--server-pin",
            &server,
            "--json",
        ]);
        command.args(["-s", &self.bytes.to_string(), "-n", &iterations.to_string()]);
        if self.over_udp {
            command.env("RDMUX_SHM", "off");
        }
        let value: serde_json::Value = serde_json::from_str(&stdout("rdmux perf", &mut command)?)?;
        let cells = value["cells"].as_array().context("no cells in perf's output")?;
        let cell = cells.iter().find(|cell| {
            cell["method"] == "WRITE, FLUSH" && cell["bytes"] == self.bytes && cell["depth"] == 1
        });
        cell.and_then(|cell| cell["p50_us"].as_f64())
            .context("no such cell in perf's output")
    }
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

/// Returns the same with rdmux's libraries.
pub(super) fn on_rdmux(cpu: &str, program: &str, args: &[&str]) -> Result<Command> {
    let rdmux = super::rdmux()?;
    let rdmux = rdmux.to_str().context("the path of rdmux is no text")?;
    let run = ["run", "--device", "127.0.0.1", "--", program];
    Ok(peer(cpu, rdmux, &[&run[..], args].concat()))
}

/// Runs a server that listens on a TCP port, and its client; returns the client's output.
pub(super) fn exchange(
    program: &str,
    port: &str,
    mut server: Command,
    mut client: Command,
) -> Result<String> {
    let _server = Server::start_on(port, &mut server)?;
    stdout(program, &mut client)
}

/// Runs a command, which `program` names in the error; returns its output.
pub(super) fn stdout(program: &str, command: &mut Command) -> Result<String> {
    let output = command.output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    let why = why.lines().last().unwrap_or_default();
    ensure!(
        output.status.success(),
        "{program} failed: {} {why}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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

/// UCX's transport over libibverbs.
pub(super) const RC: &str = "rc_v";

/// Sets the transport of a program on UCX.
pub(super) fn ucx_transport(command: &mut Command, tls: &str) {
    command.env("UCX_TLS", tls).env("UCX_WARN_UNUSED_ENV_VARS", "n");
    match tls {
        "tcp" => command.env("UCX_NET_DEVICES", "lo"),
        RC => command
            .env("UCX_NET_DEVICES", "rdmux0:1")
            .env("UCX_TLS", "rc_v,self"),
        _ => command,
    };
}

/// Columns of `ucx_perftest`'s CSV lines.
pub(super) const UCX_LATENCY: usize = 1;
pub(super) const UCX_BANDWIDTH: usize = 5;
pub(super) const UCX_MESSAGE_RATE: usize = 7;

/// Runs `ucx_perftest`, with transport `rc_v` on rdmux's libraries; returns a figure of its last line.
pub(super) fn ucx(tls: &str, test: &str, size: usize, iterations: u32, column: usize) -> Result<f64> {
    installed("ucx_perftest")?;
    let start = |cpu, args: &[&str]| -> Result<Command> {
        let mut command = match tls {
            RC => on_rdmux(cpu, "ucx_perftest", args)?,
            _ => peer(cpu, "ucx_perftest", args),
        };
        ucx_transport(&mut command, tls);
        Ok(command)
    };
    let port = free_port()?;
    let (size, iterations, warm_up) = (
        size.to_string(),
        iterations.to_string(),
        (iterations / 10).to_string(),
    );
    let server = ["-p", &port, "-f"];
    let client = [
        "127.0.0.1",
        "-t",
        test,
        "-s",
        &size,
        "-n",
        &iterations,
        "-w",
        &warm_up,
        "-v",
    ];
    let text = exchange(
        "ucx_perftest",
        &port,
        start("1", &server)?,
        start("0", &[&server[..], &client].concat())?,
    )?;
    ucx_figure(&text, column)
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
    let client = [&common[..], &["-P", &port, "127.0.0.1"]].concat();
    let [server, client] = [("1", server), ("0", client)].map(|(cpu, args)| peer(cpu, "fi_pingpong", &args));
    fabric_figure(&exchange("fi_pingpong", &port, server, client)?, column)
}

/// Both sides of `fi_pingpong` in a network of their own: libfabric's verbs provider uses no loopback interface.
const FABRIC_ON_RDMUX: &str = "
for name in lo v0 v1; do
  [ $name != v0 ] || ip link add v0 type veth peer name v1
  ip link set $name up
done
ip addr add 192.0.2.1/24 dev v0
taskset -c 1 \"$@\" >/dev/null &
trap \"kill $! 2>/dev/null || true\" EXIT
until [ \"$(ss -Hltn sport = :47592)\" ]; do
  kill -0 $!
  sleep 0.05
done
taskset -c 0 \"$@\" 192.0.2.1";

/// Runs `fi_pingpong` over the verbs provider on rdmux's libraries; returns a figure of its last line.
pub(super) fn libfabric_on_rdmux(size: usize, iterations: u32, column: usize) -> Result<f64> {
    installed("fi_pingpong")?;
    let rdmux = super::rdmux()?;
    let (size, iterations) = (size.to_string(), iterations.to_string());
    let mut command = peer("0,1", "unshare", &["-Urn", "sh", "-ec", FABRIC_ON_RDMUX, "sh"]);
    command
        .arg(rdmux)
        .args(["run", "--device", "192.0.2.1", "--", "fi_pingpong"]);
    command.args(["-p", "verbs", "-e", "msg", "-S", &size, "-I", &iterations]);
    fabric_figure(&stdout("fi_pingpong", &mut command)?, column)
}

fn fabric_figure(text: &str, column: usize) -> Result<f64> {
    text.lines()
        .last()
        .and_then(|line| line.split_whitespace().nth(column)?.parse().ok())
        .context("fi_pingpong printed no figure")
}

/// Options of `mpirun` and `oshrun`: two ranks, which choose their CPUs.
pub(super) const TWO_RANKS: &str = "-n 2 --oversubscribe --allow-run-as-root --bind-to none";

/// Runs the MPI program of `bench/mpi_ping_pong.c` over UCX; returns the median half round trip, in microseconds.
pub(super) fn mpi(tls: &str, size: usize, iterations: u32) -> Result<f64> {
    installed("mpirun")?;
    let program = super::beside("rdmux-mpi-ping-pong", "mpicc is not installed")?;
    let program = program.to_string_lossy();
    let (size, iterations) = (size.to_string(), iterations.to_string());
    let options =
        "--mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any --mca osc ucx --mca btl ^openib";
    let mut args: Vec<&str> = TWO_RANKS.split(' ').chain(options.split(' ')).collect();
    args.extend([&*program, &size, &iterations]);
    let mut command = match tls {
        RC => on_rdmux("0,1", "mpirun", &args)?,
        _ => peer("0,1", "mpirun", &args),
    };
    ucx_transport(&mut command, tls);
    let text = stdout("mpirun", &mut command)?;
    text.trim().parse().context("the MPI program printed no figure")
}

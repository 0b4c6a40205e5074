//! Hosts of a measurement: addresses of this machine, with a node on each or without nodes.

use std::cell::Cell;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::super::child::Side;
use super::super::load::{COMMAND, Report};
use super::super::pair::{Server, installed};

/// Place of the engine and of the queue pairs of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// In each program: an engine and queue pairs of its own.
    Own,
    /// In a node for each host; each connection has queue pairs of its own.
    Nodes,
    /// In a node for each host; the nodes share queue pairs.
    Shared,
}

/// Carrier of packets between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    /// Memory, where both ends are on this machine.
    Memory,
    /// UDP over the loopback interface.
    Udp,
    /// UDP over a link of two network namespaces, of so many Mbit/s. There are two hosts, and this needs root.
    Link { mbit: u32 },
}

/// First of the addresses of hosts on the loopback interface.
const LOOPBACK: [&str; 4] = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"];
const LINKED: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
/// Share of a link's rate that nodes keep to: headers take the rest.
const NODE_PERCENT: u32 = 90;
/// Time after which any program of a measurement is killed.
const SECONDS_MAX: &str = "120";
/// The first port of sinks; each has one of its own on its host.
const PORT: u16 = 19_000;

/// Hosts, files and settings of a measurement.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) placement: Placement,
    pub(super) carrier: Carrier,
    /// Number of hosts, 1 to 4.
    pub(super) hosts: usize,
    /// The `RDMUX_WAIT` of all programs; `None`: adaptive.
    pub(super) wait: Option<&'static str>,
    /// The only CPU of all programs.
    pub(super) cpu: Option<&'static str>,
}

impl Setup {
    /// Two hosts.
    pub(super) fn new(placement: Placement, carrier: Carrier) -> Setup {
        Setup {
            placement,
            carrier,
            hosts: 2,
            wait: None,
            cpu: None,
        }
    }

    pub(super) fn start(self) -> Result<Hosts> {
        let link = match self.carrier {
            Carrier::Link { mbit } => Some(Link::new(mbit)?),
            _ => None,
        };
        let mut hosts = Hosts {
            setup: self,
            folder: TempDir::new()?,
            link,
            nodes: Vec::new(),
            ports: Cell::new(PORT),
        };
        if self.placement != Placement::Own {
            for host in 0..self.hosts {
                let node = hosts.start_node(host)?;
                hosts.nodes.push(node);
            }
        }
        Ok(hosts)
    }
}

/// Hosts, with their nodes. The nodes end when the value is dropped.
pub(super) struct Hosts {
    setup: Setup,
    /// Folder of the nodes' sockets and key: the user may have nodes.
    folder: TempDir,
    link: Option<Link>,
    nodes: Vec<Server>,
    ports: Cell<u16>,
}

impl Hosts {
    pub(super) fn address(&self, host: usize) -> &'static str {
        match self.link {
            Some(_) => LINKED[host],
            None => LOOPBACK[host],
        }
    }

    /// Returns a command that runs a program on a host, and kills it when it takes too long.
    pub(super) fn command(&self, host: usize, program: &Path) -> Command {
        let mut words: Vec<String> = Vec::new();
        if let Some(link) = &self.link {
            words.extend(["nsenter".into(), format!("--net={}", link.namespace(host))]);
        }
        if let Some(cpu) = self.setup.cpu {
            words.extend(["taskset", "-c", cpu].map(String::from));
        }
        words.extend(["timeout", "-s", "KILL", SECONDS_MAX].map(String::from));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(program);
        command.env("XDG_RUNTIME_DIR", self.folder.path());
        command.env("XDG_CONFIG_HOME", self.folder.path());
        command.env_remove("RDMUX_PROVIDER").env_remove("RDMUX_WAIT");
        if self.setup.carrier != Carrier::Memory {
            command.env("RDMUX_SHM", "off");
        }
        if let Some(wait) = self.setup.wait {
            command.env("RDMUX_WAIT", wait);
        }
        command.stdin(Stdio::null());
        command
    }

    /// Returns the same for a program that uses a device.
    pub(super) fn program(&self, host: usize, program: &Path) -> Command {
        let mut command = self.command(host, program);
        if self.setup.placement != Placement::Own {
            command.env("RDMUX_PROVIDER", "shared");
        }
        command
    }

    fn start_node(&self, host: usize) -> Result<Server> {
        let mut node = self.command(host, &super::super::rdmux()?);
        node.args(["node", "--device", self.address(host)]);
        node.args((self.setup.placement == Placement::Shared).then_some("--share"));
        if let Carrier::Link { mbit } = self.setup.carrier {
            let config = self.folder.path().join("tenants.toml");
            let rate = mbit * NODE_PERCENT / 100;
            let uid = rustix::process::getuid().as_raw();
            let text = format!(
                "rate = \"{rate}Mbit\"\n[tenant.bench]\nuid = [{uid}]\nclasses = {{ 7 = \"strict\" }}\n"
            );
            std::fs::write(&config, text)?;
            node.arg("--config").arg(config);
        }
        Server::start_until(&mut node, "ready")
    }

    /// Ends a node as a crash would, and starts it again.
    pub(super) fn kill_node(&mut self, host: usize) -> Result<()> {
        self.nodes[host].kill();
        self.nodes[host] = self.start_node(host)?;
        Ok(())
    }

    /// Starts a sink.
    pub(super) fn sink(&self, host: usize) -> Result<Sink> {
        let port = self.ports.get();
        self.ports.set(port + 1);
        let mut command = self.program(host, &std::env::current_exe()?);
        let (address, number) = (self.address(host), port.to_string());
        command.args([COMMAND, "sink", "--bind", address, "--port", &number]);
        let side = Side::start(&mut command)?;
        let address = format!("{address}:{port}");
        Ok(Sink { side, address })
    }

    /// Starts a source of a host; returns once it is connected to its sinks.
    pub(super) fn source(&self, host: usize, to: &[&Sink], args: &str) -> Result<Side> {
        let mut command = self.program(host, &std::env::current_exe()?);
        command.args([COMMAND, "source", "--bind", self.address(host)]);
        for sink in to {
            command.args(["--to", &sink.address]);
        }
        Side::start(command.args(args.split_whitespace()))
    }

    /// Waits until the nodes have ended.
    pub(super) fn end(mut self) {
        self.nodes.iter().for_each(Server::interrupt);
        self.nodes.clear();
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.nodes.iter().for_each(Server::interrupt);
    }
}

/// A running sink.
pub(super) struct Sink {
    side: Side,
    address: String,
}

impl Sink {
    /// Has it end, and waits until it has.
    pub(super) fn end(self) -> Result<()> {
        self.side.end()
    }
}

/// Has sources begin at the same time; returns their results.
pub(super) fn run(sources: &mut [Side]) -> Result<Vec<Report>> {
    sources.iter_mut().for_each(Side::begin);
    let result = |source: &mut Side| Report::parse(&source.result()?);
    sources.iter_mut().map(result).collect()
}

/// Two network namespaces with a link between them, each with one process that holds it.
struct Link([Child; 2]);

impl Link {
    /// The process that holds a namespace: it ends with this process, and the namespace with it.
    const HOLDER: &str = "ip link set lo up && echo up && read -r end";

    fn new(mbit: u32) -> Result<Link> {
        ensure!(
            rustix::process::getuid().is_root(),
            "a link with a rate needs root"
        );
        for program in ["ip", "tc", "unshare", "nsenter"] {
            installed(program)?;
        }
        let hold = || -> Result<Child> {
            let mut holder = Command::new("unshare");
            holder.args(["-n", "sh", "-c", Link::HOLDER]);
            let mut holder = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let mut up = [0; 3];
            let output = holder.stdout.as_mut().context("no pipe")?;
            std::io::Read::read_exact(output, &mut up).context("no network namespace")?;
            Ok(holder)
        };
        let link = Link([hold()?, hold()?]);
        let [one, other] = &link.0;
        let (one, other) = (one.id(), other.id());
        shell(&format!(
            "ip link add v0 netns {one} type veth peer name v1 netns {other}"
        ))?;
        for (host, address) in LINKED.iter().enumerate() {
            let inside = |words: &str| shell(&format!("nsenter --net={} {words}", link.namespace(host)));
            inside(&format!("ip addr add {address}/24 dev v{host}"))?;
            inside(&format!("ip link set v{host} up"))?;
            // The queue is longer than what waits: nothing is dropped.
            inside(&format!(
                "tc qdisc add dev v{host} root tbf rate {mbit}mbit burst 256kb limit 64mb"
            ))?;
        }
        Ok(link)
    }

    fn namespace(&self, host: usize) -> String {
        format!("/proc/{}/ns/net", self.0[host].id())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for holder in &mut self.0 {
            drop(holder.stdin.take());
            let _ = holder.wait();
        }
    }
}

/// Runs a command without quotes.
fn shell(words: &str) -> Result<()> {
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().context("no program")?);
    let output = command.args(words).output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

//! Unmodified programs for RDMA on rdmux: those of Debian's ibverbs-utils, rdmacm-utils, perftest, UCX, libfabric and fio, as server and client
//! on this host. Several runs, of one user or of several, may go in parallel: each has its own loopback address and ports.

use std::cell::RefCell;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use tempfile::TempDir;

pub(crate) use self::host::free_address;
use self::host::{Claim, Network, XrcFiles, joined, listens, usage};
use self::table::{
    BYTES, CLIENT, COPY, Exchange, Host, Judge, Line, PORT, Place, Ready, SERVER, Test, table,
    why_not_with_faults,
};
use crate::process::{Job, Signals, output};
use crate::{Outcome, installed, last_lines, rdmux, say, succeeds};

mod host;
mod table;

#[derive(Args)]
pub(crate) struct Options {
    /// All of the programs' options, and 1,000 rounds each
    #[arg(long)]
    long: bool,
    /// The program rdmux, with its libraries beside it [default: that of the release build]
    #[arg(long, value_name = "RDMUX")]
    binary: Option<PathBuf>,
    /// With a bad network: docs/bad-network.md
    #[arg(long, value_name = "SPEC")]
    fault: Option<String>,
    /// Only those whose line has the word
    #[arg(long, value_name = "WORD", default_value = "")]
    only: String,
    /// Print one object at the end: {"passed", "failed", "left_out", "seconds", "lines": [{"line", "result", "seconds", "said", "why"}]}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    passed: usize,
    failed: usize,
    left_out: usize,
    seconds: f64,
    lines: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    line: String,
    #[serde(flatten)]
    verdict: Verdict,
}

#[derive(Serialize)]
#[serde(tag = "result")]
enum Verdict {
    #[serde(rename = "ok")]
    Passed {
        seconds: f64,
        #[serde(skip)]
        tries: u32,
    },
    #[serde(rename = "failed")]
    Failed {
        seconds: f64,
        /// The end of the programs' output.
        said: String,
        #[serde(skip)]
        tries: u32,
    },
    #[serde(rename = "left out")]
    LeftOut { why: String },
}

pub(crate) fn run(options: &Options, signals: &Signals) -> Result<Outcome> {
    if !["ib_write_lat", "ibv_rc_pingpong", "rping"]
        .into_iter()
        .all(installed)
    {
        let why = "perftest, ibverbs-utils and rdmacm-utils are not all installed";
        return Ok(Outcome::Skipped(why.to_owned()));
    }
    let binary = rdmux(options.binary.as_deref())?;
    let began = Instant::now();
    let run = Run {
        binary,
        fault: options.fault.clone(),
        signals,
        nodes: RefCell::default(),
        work: tempfile::tempdir()?,
        address: free_address()?,
        second: free_address()?,
    };
    fs::write(run.work.path().join(BYTES), random_bytes())?;

    let lines = run.lines(options)?;
    let count = |is: fn(&Verdict) -> bool| lines.iter().filter(|entry| is(&entry.verdict)).count();
    let report = Report {
        passed: count(|verdict| matches!(verdict, Verdict::Passed { .. })),
        failed: count(|verdict| matches!(verdict, Verdict::Failed { .. })),
        left_out: count(|verdict| matches!(verdict, Verdict::LeftOut { .. })),
        seconds: seconds(began),
        lines,
    };
    report.print(options.json)?;
    Ok(Outcome::of(report.failed == 0))
}

impl Report {
    fn print(&self, json: bool) -> Result<()> {
        if json {
            return say(serde_json::to_string_pretty(self)?);
        }
        let Self {
            passed,
            failed,
            seconds,
            ..
        } = self;
        let mut summary = format!("{passed} passed, {failed} failed in {seconds:.2} s");
        let mut reasons: Vec<(&str, u32)> = Vec::new();
        for entry in &self.lines {
            if let Verdict::LeftOut { why } = &entry.verdict {
                match reasons.iter_mut().find(|(reason, _)| reason == why) {
                    Some((_, count)) => *count += 1,
                    None => reasons.push((why, 1)),
                }
            }
        }
        for (why, count) in reasons {
            summary += &format!("; {count} left out: {why}");
        }
        say(summary)
    }
}

impl Entry {
    fn print(&self) -> Result<()> {
        let (result, seconds, tries, said) = match &self.verdict {
            Verdict::Passed { seconds, tries } => ("ok", seconds, tries, ""),
            Verdict::Failed { seconds, tries, said } => ("FAILED", seconds, tries, said.as_str()),
            Verdict::LeftOut { .. } => return Ok(()),
        };
        let tries = match tries {
            1 => String::new(),
            tries => format!(" ({tries} tries)"),
        };
        say(format_args!(
            "{result:<6}  {seconds:>6.2} s  {}{tries}",
            self.line
        ))?;
        said.lines().try_for_each(|line| say(format_args!("  {line}")))
    }
}

/// Returns the seconds since then, rounded to hundredths.
fn seconds(since: Instant) -> f64 {
    (since.elapsed().as_secs_f64() * 100.0).round() / 100.0
}

fn random_bytes() -> Vec<u8> {
    let mut bytes = vec![0; 3_000_001];
    fastrand::fill(&mut bytes);
    bytes
}

/// Within this time a server listens; otherwise its client fails.
const READY: Duration = Duration::from_secs(60);
/// Nodes end with the run.
const NODE_LIMIT: Duration = Duration::from_secs(3600);
/// The time that a server has left once its client has failed: it may wait for that client for ever.
const LEFT: Duration = Duration::from_secs(5);

struct Run<'a> {
    binary: PathBuf,
    fault: Option<String>,
    signals: &'a Signals,
    /// The nodes that run, by their addresses. They end before the folder.
    nodes: RefCell<Vec<(String, Job)>>,
    /// The folder where the programs run, which has all that rdmux keeps for its user.
    work: TempDir,
    address: Ipv4Addr,
    /// Address of a second node.
    second: Ipv4Addr,
}

/// The end of a line's programs.
enum Ran {
    Ended {
        passed: bool,
        tries: u32,
        /// How each side ended.
        ends: Vec<String>,
    },
    LeftOut(String),
}

/// The host of a program: a network namespace or this process's, with the address of the program's device.
struct Side<'a> {
    name: &'static str,
    network: Option<&'a Network>,
    address: String,
}

impl Run<'_> {
    fn host(&self, long: bool) -> Result<Host> {
        let signals = self.signals;
        let veth = "-Urn ip link add v0 type veth peer name v1";
        let veth: Vec<&str> = veth.split_whitespace().collect();
        let preloads = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
        let preloads = preloads.map(|folder| folder.path().join("rsocket/librspreload.so"));
        Ok(Host {
            address: self.address,
            group: self.group(),
            long,
            nobody: rustix::process::getuid().as_raw() == 65534,
            mount_namespaces: succeeds("unshare", &["-Urm", "true"], signals)?,
            network_namespaces: succeeds("unshare", &veth, signals)?,
            ucx: installed("ucx_perftest"),
            ucx_with_mpi: usage("ucx_perftest", signals)?.contains("-P <"),
            fio: installed("fio"),
            libfabric: installed("fi_pingpong"),
            cmtime_by_tcp: usage("cmtime", signals)?.contains("-S"),
            preloads: preloads
                .filter(|library| library.exists())
                .map(|library| library.display().to_string())
                .collect(),
        })
    }

    fn group(&self) -> Ipv4Addr {
        let [_, high, middle, low] = self.address.octets();
        Ipv4Addr::new(239, high, middle, low)
    }

    fn lines(&self, options: &Options) -> Result<Vec<Entry>> {
        let mut selected = table(&self.host(options.long)?);
        selected.retain(|line| line.name.contains(&options.only));
        if selected.is_empty() {
            bail!("no line has '{}'", options.only);
        }
        let mut lines = Vec::new();
        for line in selected {
            let entry = self.line(line)?;
            if !options.json {
                entry.print()?;
            }
            lines.push(entry);
        }
        Ok(lines)
    }

    /// Runs a line. An error of one line is its failure, and only a signal ends the others.
    fn line(&self, line: Line) -> Result<Entry> {
        let Line { name, test } = line;
        let began = Instant::now();
        let ran = match self.fault.as_ref().and_then(|_| why_not_with_faults(&name)) {
            Some(why) => Ok(Ran::LeftOut(why.to_owned())),
            None => self.test(test),
        };
        // A signal to the whole session may have ended what the line needs, before the line noticed the signal.
        self.signals.check()?;
        let seconds = seconds(began);
        let mut said = self.said();
        let verdict = match ran {
            Ok(Ran::LeftOut(why)) => Verdict::LeftOut { why },
            Ok(Ran::Ended {
                passed: true, tries, ..
            }) => Verdict::Passed { seconds, tries },
            Ok(Ran::Ended {
                passed: false,
                tries,
                ends,
            }) => {
                said.extend(ends);
                Verdict::Failed {
                    seconds,
                    said: said.join("\n"),
                    tries,
                }
            }
            Err(error) => {
                said.push(format!("{error:#}"));
                Verdict::Failed {
                    seconds,
                    said: said.join("\n"),
                    tries: 1,
                }
            }
        };
        Ok(Entry { line: name, verdict })
    }

    fn test(&self, test: Test) -> Result<Ran> {
        let here = self.side("one");
        let command = match test {
            Test::LeftOut(why) => return Ok(Ran::LeftOut(why)),
            Test::Exchange(exchange) => return self.exchange(&exchange),
            Test::Alone(options, program) => {
                let mut command = self.command(&here, options);
                command.arg("--").args(program.split_whitespace());
                command
            }
            Test::Shell(script) => {
                let mut command = Command::new("sh");
                let run = self.command(&here, &[]);
                command
                    .args(["-ec", script, "sh"])
                    .arg(run.get_program())
                    .args(run.get_args());
                command
            }
        };
        let mut job = self.start(&here, command, table::LIMIT)?;
        let end = job.wait(self.signals)?;
        Ok(Ran::Ended {
            passed: end.success(),
            tries: 1,
            ends: vec![format!("{}: {end}", here.name)],
        })
    }

    /// Starts the node of an address, unless it runs, and waits until it is ready.
    fn start_node(&self, name: &'static str, address: &str) -> Result<()> {
        let mut nodes = self.nodes.borrow_mut();
        if nodes.iter().any(|(known, _)| known == address) {
            return Ok(());
        }
        let side = Side {
            address: address.to_owned(),
            ..self.side(name)
        };
        let mut command = Command::new(&self.binary);
        command.args(["node", "--device", address]);
        let node = self.start(&side, command, NODE_LIMIT)?;
        let is_ready = self
            .signals
            .until(Some(&node), READY, || Ok(self.output(name).contains("ready")))?;
        if !is_ready {
            bail!("the node of {address}: {}", self.output(&format!("{name}.err")));
        }
        nodes.push((address.to_owned(), node));
        Ok(())
    }

    fn side(&self, name: &'static str) -> Side<'static> {
        Side {
            name,
            network: None,
            address: self.address.to_string(),
        }
    }

    /// Returns `rdmux run` with its options.
    fn command(&self, side: &Side<'_>, options: &[&str]) -> Command {
        let mut command = match side.network {
            Some(network) => network.command(&self.binary),
            None => Command::new(&self.binary),
        };
        command.args(["run", "--device", &side.address]);
        if let Some(fault) = &self.fault {
            command.args(["--fault", fault]);
        }
        command.args(options);
        command
    }

    /// Starts a command, whose output goes to files of the side's name.
    fn start(&self, side: &Side<'_>, mut command: Command, limit: Duration) -> Result<Job> {
        let work = self.work.path();
        command.current_dir(work).env("XDG_RUNTIME_DIR", work);
        let output = File::create(work.join(side.name))?;
        let errors = File::create(work.join(format!("{}.err", side.name)))?;
        Job::start(&command, output, errors, limit)
    }

    fn exchange(&self, exchange: &Exchange) -> Result<Ran> {
        let mut claim = match exchange.ready {
            Ready::PickedPort => Some(Claim::wait(self.signals)?),
            _ => None,
        };
        let port = claim.as_ref().map_or(0, |claim| claim.port);
        let _xrc = match exchange.xrc.then(XrcFiles::take).transpose() {
            Ok(files) => files,
            Err(why) => return Ok(Ran::LeftOut(why)),
        };
        let networks = networks(exchange.place, self.signals)?;
        let side = |name, index: usize, address: &str| match networks.get(index) {
            Some(network) => Side {
                name,
                network: Some(network),
                address: address.to_owned(),
            },
            None => self.side(name),
        };
        let (server_side, client_side) = match exchange.place {
            Place::TwoHosts => (side("server", 0, SERVER), side("client", 1, CLIENT)),
            Place::OneHost | Place::Loopback | Place::OneNode => {
                (side("server", 0, SERVER), side("client", 0, SERVER))
            }
            Place::TwoNodes => {
                let second = Side {
                    address: self.second.to_string(),
                    ..self.side("client")
                };
                (self.side("server"), second)
            }
        };
        if let Place::OneNode | Place::TwoNodes = exchange.place {
            self.start_node("node", &server_side.address)?;
            self.start_node("second-node", &client_side.address)?;
        }
        let start = |side: &Side<'_>, program: &str| {
            let mut command = self.command(side, exchange.run);
            command.envs(exchange.environment.iter().map(|(name, value)| (name, value)));
            let program = program.replace(PORT, &port.to_string());
            command.arg("--").args(program.split_whitespace());
            self.start(side, command, exchange.limit)
        };

        let mut server = start(&server_side, &exchange.server)?;
        let process = networks
            .first()
            .map_or("self".to_owned(), |network| network.process().to_string());
        let deadline = Instant::now() + READY;
        self.signals
            .until(Some(&server), READY, || match exchange.ready {
                Ready::PickedPort => listens(&process, None, port),
                Ready::Port(port) if networks.is_empty() => listens(&process, Some(self.address), port),
                Ready::Port(port) => listens(&process, None, port),
                Ready::Joined => joined(self.group()),
                Ready::Unknown => Ok(true),
            })?;
        // XRC's files are everybody's until the end.
        if !exchange.xrc {
            claim.take();
        }
        let mut tries = 0;
        let client_end = loop {
            tries += 1;
            let mut client = start(&client_side, &exchange.client)?;
            let end = client.wait(self.signals)?;
            let again =
                !end.success() && Instant::now() < deadline && exchange.ready.may_miss(exchange.place);
            if !again || !self.nobody_listened() || server.has_ended(self.signals)? {
                break end;
            }
        };
        let mut passed = client_end.success();
        let server_end = if exchange.endless {
            server.end()?
        } else {
            if !passed {
                server.limit(LEFT);
            }
            let end = server.wait(self.signals)?;
            passed &= end.success();
            end
        };
        let passed = self.judge(exchange, passed)?;
        let ends = [(&server_side, server_end), (&client_side, client_end)];
        Ok(Ran::Ended {
            passed,
            tries,
            ends: ends.map(|(side, end)| format!("{}: {end}", side.name)).into(),
        })
    }

    fn judge(&self, exchange: &Exchange, passed: bool) -> Result<bool> {
        let work = self.work.path();
        match exchange.judge {
            Judge::Status => Ok(passed),
            Judge::Copied => {
                let copy = fs::read(work.join(COPY)).unwrap_or_default();
                Ok(passed && copy == fs::read(work.join(BYTES))?)
            }
            Judge::Captured => Ok(passed && self.captured()?),
            Judge::MayBeFlushed(rounds) => Ok(passed || self.only_flushed(rounds)),
        }
    }

    /// Returns what a side has written to its standard output, or to the standard error.
    fn output(&self, side: &str) -> String {
        let output = fs::read(self.work.path().join(side)).unwrap_or_default();
        String::from_utf8_lossy(&output).into_owned()
    }

    /// Returns whether the client said that nobody listens, in the words that each has for that. Nothing else is tried again.
    fn nobody_listened(&self) -> bool {
        const ENDS: [&str; 5] = [
            "RDMA_CM_EVENT_REJECTED, error 8",
            "RDMA_CM_EVENT_REJECTED, error: 8",
            "CM event bl blka 8",
            "RDMA_CM_EVENT_UNREACHABLE, error: 1",
            "rpoll: Operation now in progress",
        ];
        const WORDS: [&str; 2] = ["event is RDMA_CM_EVENT_REJECTED instead", "Connection refused"];
        let said = self.output("client") + &self.output("client.err");
        said.lines().any(|line| {
            ENDS.iter().any(|end| line.ends_with(end)) || WORDS.iter().any(|word| line.contains(word))
        })
    }

    /// Returns whether both sides report all rounds, and no error but that completions were flushed.
    fn only_flushed(&self, rounds: u32) -> bool {
        let all = format!("={rounds} ");
        ["server", "client"].iter().all(|side| {
            let output = self.output(side);
            let said = format!("{output}\n{}", self.output(&format!("{side}.err")));
            let mut errors = said.lines().filter(|line| line.to_lowercase().contains("error"));
            output.contains(&all)
                && errors.all(|line| line.contains("cq_readerr: work request flushed error"))
        })
    }

    /// Returns whether there are two captures, and each has the messages. It removes them.
    fn captured(&self) -> Result<bool> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.work.path())? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "pcapng") {
                let mut check = Command::new(&self.binary);
                check.args(["capture", "check", "--json"]).arg(&path);
                let check = output(&check, self.signals)?;
                let summary: serde_json::Value = serde_json::from_str(&check.stdout).unwrap_or_default();
                let messages = summary["files"][0]["opcodes"]["RC SendOnly"].as_u64();
                found.push(check.end.success() && messages.is_some_and(|messages| messages >= 20));
                fs::remove_file(path)?;
            }
        }
        Ok(found == [true, true])
    }

    /// Removes the programs' output, and returns the lines at its end.
    fn said(&self) -> Vec<String> {
        let mut said = Vec::new();
        for side in ["one", "server", "client"] {
            let file = self.work.path().join(side);
            let errors = self.output(&format!("{side}.err"));
            let end = last_lines(&file, 8);
            let lines = errors.lines().chain(end.iter().map(String::as_str));
            said.extend(lines.map(|line| format!("{side}: {line}")));
            for file in [file.with_extension("err"), file] {
                // No line has all of the sides.
                let _absent = fs::remove_file(file);
            }
        }
        said
    }
}

/// Makes the network namespaces of a place, and their interfaces.
fn networks(place: Place, signals: &Signals) -> Result<Vec<Network>> {
    match place {
        Place::Loopback | Place::OneNode | Place::TwoNodes => Ok(Vec::new()),
        Place::OneHost => {
            let host = Network::new()?;
            host.ip(
                &[
                    "link add v0 type veth peer name v1".to_owned(),
                    format!("addr add {SERVER}/24 dev v0"),
                    "link set lo up".to_owned(),
                    "link set v0 up".to_owned(),
                    "link set v1 up".to_owned(),
                ],
                signals,
            )?;
            Ok(vec![host])
        }
        Place::TwoHosts => {
            let server = Network::new()?;
            let client = server.beside()?;
            server.ip(
                &[format!(
                    "link add v0 type veth peer name v0 netns {}",
                    client.process()
                )],
                signals,
            )?;
            for (network, address) in [(&server, SERVER), (&client, CLIENT)] {
                network.ip(
                    &[
                        format!("addr add {address}/24 dev v0"),
                        "link set v0 up".to_owned(),
                        "link set lo up".to_owned(),
                    ],
                    signals,
                )?;
            }
            Ok(vec![server, client])
        }
    }
}

//! `rdmux dsm run`: starts the nodes.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{self, Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use rdmux_dsm::{Cluster, FaultMode, NODES_MAX};
use rdmux_verbs::faults::Spec;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use strum::VariantArray;

use crate::cmd::serve::load_key;
use crate::{metrics, output, signals};

/// Exit statuses where there is no such program, and where it could not be started: POSIX, env.
const NO_PROGRAM: i32 = 127;
const NOT_STARTED: i32 = 126;

#[derive(clap::Args, Debug)]
#[command(after_long_help = "\
A cluster file lists all nodes, in TOML: nodes = [\"192.0.2.1:7180\", \"192.0.2.2:7180\"]. Start each node on its host with the same file. Nodes join \
only if their keys are the same, too.

Variables of the environment say how the nodes' threads wait (RDMUX_DSM_WAIT), and where the nodes record what they do (RDMUX_DSM_TRACE): docs/commands.md.

Exit status: that of the node of the lowest number that has failed, 128 and the signal's number if a signal ended it; 127 if there is no such program, 126 if \
it cannot be started, 2 for a wrong option, 1 for another error.")]
pub(crate) struct Args {
    /// Number of nodes, all on this host.
    #[arg(short = 'n', long, value_name = "N", conflicts_with_all = ["cluster", "node"], required_unless_present = "cluster")]
    nodes: Option<u32>,
    /// Address of this host's nodes.
    #[arg(long, value_name = "ADDRESS", default_value_t = Ipv4Addr::LOCALHOST.into(), conflicts_with = "cluster")]
    device: IpAddr,
    /// File with the addresses of all nodes.
    #[arg(long, value_name = "FILE", requires = "node")]
    cluster: Option<PathBuf>,
    /// Number of the node to run, from 0 on, in the order of the file.
    #[arg(long, value_name = "K", requires = "cluster")]
    node: Option<u32>,
    /// File with the cluster's key [default: your own, made on first use].
    #[arg(long, value_name = "FILE", requires = "cluster")]
    key: Option<PathBuf>,
    /// Way by which page faults are answered: by a service thread, by the faulting thread itself in a handler of SIGBUS, or the same by mprotect(2)
    /// and SIGSEGV [default: the first of thread, inline and mprotect that the host allows, as `rdmux doctor dsm` says].
    #[arg(long, value_name = "HOW", value_parser = fault_mode())]
    faults: Option<FaultMode>,
    /// Inject faults at the nodes' ports, in both directions, such as loss=1%,delay=5ms,seed=7 (docs/bad-network.md).
    #[arg(long, value_name = "SPEC")]
    fault: Option<Spec>,
    /// Serve metrics of the nodes for Prometheus over HTTP, for example at 127.0.0.1:9791, until they end; a PORT alone is on the loopback
    /// interface (docs/metrics.md).
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = metrics::parse_address)]
    metrics: Option<SocketAddr>,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

fn fault_mode() -> impl TypedValueParser<Value = FaultMode> {
    let names = FaultMode::VARIANTS.iter().map(<&'static str>::from);
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

pub(crate) fn run(args: Args) -> Result<()> {
    // Otherwise all nodes would report it.
    rdmux_verbs::check_environment()?;
    let Some((program, arguments)) = args.command.split_first() else {
        bail!("no program given: use rdmux dsm run -n N -- PROGRAM")
    };
    let command = |cluster: &Cluster| {
        let mut command = Command::new(program);
        command.args(arguments).envs(cluster.environment());
        command.envs(args.faults.map(|mode| (FaultMode::VARIABLE, mode.to_string())));
        command.envs(args.fault.as_ref().map(|spec| ("RDMUX_FAULT", spec.to_string())));
        command
    };
    if let (Some(file), Some(node)) = (&args.cluster, args.node) {
        let key = load_key(args.key.as_deref())?;
        let cluster = Cluster::of_file(file, node, &key)?;
        if args.metrics.is_some() {
            return run_all(program, &[cluster], command, args.metrics);
        }
        // The program replaces this process, so that nothing has to pass on signals and its exit status.
        let error = command(&cluster).exec();
        fail_to_start(program, &error);
    }
    let nodes = args.nodes.unwrap_or(1);
    if nodes == 0 || nodes as usize > NODES_MAX {
        bail!("-n {nodes}: there are 1 to {NODES_MAX} nodes");
    }
    let clusters =
        Cluster::on_this_host(args.device, nodes).with_context(|| format!("--device {}", args.device))?;
    run_all(program, &clusters, command, args.metrics)
}

/// Runs nodes of one cluster, and waits until all have ended.
fn run_all(
    program: &OsString,
    clusters: &[Cluster],
    command: impl Fn(&Cluster) -> Command,
    metrics: Option<SocketAddr>,
) -> Result<()> {
    if let (Some(address), Some(cluster)) = (metrics, clusters.first()) {
        metrics::show_cluster(cluster.clone());
        metrics::serve_at(address)?;
    }
    let children = Arc::new(Children::default());
    let stopped = children.clone();
    signals::handle(move || stopped.stop(), None::<fn()>)?;
    for cluster in clusters {
        match command(cluster).spawn() {
            Ok(child) => children.add(cluster.own().number(), child),
            Err(error) => {
                children.stop();
                children.wait();
                fail_to_start(program, &error);
            }
        }
    }
    match children.wait() {
        0 => Ok(()),
        status => process::exit(status),
    }
}

/// Reports that the program could not be started, and ends.
fn fail_to_start(program: &OsString, error: &std::io::Error) -> ! {
    let program = program.to_string_lossy();
    let is_missing = error.kind() == ErrorKind::NotFound;
    output::error(&match is_missing {
        true => anyhow!("{program}: program not found"),
        false => anyhow!("starting {program}: {error}"),
    });
    process::exit(if is_missing { NO_PROGRAM } else { NOT_STARTED })
}

/// The nodes.
#[derive(Default)]
struct Children(Mutex<List>);

#[derive(Default)]
struct List {
    /// In the order of their numbers, which come first; `None`: it has ended.
    nodes: Vec<(u32, Option<Child>)>,
    is_stopping: bool,
}

impl Children {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, number: u32, child: Child) {
        let mut list = self.lock();
        if list.is_stopping {
            terminate(&child);
        }
        list.nodes.push((number, Some(child)));
    }

    /// Asks all nodes to end, those that are started later too.
    fn stop(&self) {
        let mut list = self.lock();
        list.is_stopping = true;
        let children = list.nodes.iter().filter_map(|(_, child)| child.as_ref());
        children.for_each(terminate);
    }

    /// Waits for all nodes. Reports those that a signal has ended, and returns the exit status of the one of the lowest number that failed, or 0.
    fn wait(&self) -> i32 {
        let mut first = 0;
        for index in 0.. {
            let (node, pid) = {
                let list = self.lock();
                match list.nodes.get(index) {
                    Some((node, child)) => (*node, child.as_ref().map(Pid::from_child)),
                    None => break,
                }
            };
            // The child stays a zombie until it is removed from the list: nobody signals another process instead.
            let ended = pid.map(|pid| {
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                while matches!(waitid(WaitId::Pid(pid), options), Err(Errno::INTR)) {}
            });
            let child = ended.and_then(|()| self.lock().nodes.get_mut(index)?.1.take());
            let Some(mut child) = child else { continue };
            let Ok(status) = child.wait() else {
                // The system has kept no status of it.
                first = if first == 0 { 1 } else { first };
                continue;
            };
            if let Some(signal) = status.signal() {
                output::error(&anyhow!("node {node}: ended by signal {signal}"));
            }
            if first == 0 {
                first = status_of(status);
            }
        }
        first
    }
}

fn terminate(child: &Child) {
    // It fails if the node has ended.
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
}

fn status_of(status: ExitStatus) -> i32 {
    let of_signal = status.signal().map(|signal| 128 + signal);
    status.code().or(of_signal).unwrap_or(1)
}

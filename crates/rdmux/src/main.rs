//! rdmux: RDMA for every process on every Linux box. The one binary; each command is a module of [`cmd`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod cmd;
mod http;
mod metrics;
mod output;
mod recent;
mod signals;

use std::process::ExitCode;
use std::sync::LazyLock;

use clap::{CommandFactory, Parser, Subcommand};

/// RDMA for every process on every Linux host: remote memory over RoCEv2, by an RNIC in user space.
#[derive(Parser, Debug)]
#[command(name = "rdmux", version, long_version = long_version(), arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(flatten, next_help_heading = "Options of dev, link, stat and res")]
    objects: cmd::objects::Options,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Serve files and memory to push and pull.
    Serve(cmd::serve::Args),
    /// Write a file into a remote region and make it durable there.
    Push(cmd::push::Args),
    /// Read a remote region into a file.
    Pull(cmd::pull::Args),
    /// Keep an append-only log in regions of several servers.
    Log(cmd::log::Args),
    /// Own a device and share it with this user's applications.
    Node(cmd::node::Args),
    /// Serve NVMe namespaces to every NVMe host.
    Nvme(cmd::nvme::Args),
    /// Compress and checksum files by accelerators of a target.
    Accel(cmd::accel::Args),
    /// Run a program on several nodes that share memory.
    Dsm(cmd::dsm::Args),
    /// Measure latency or bandwidth, as perftest does.
    Perf(cmd::perf::Args),
    /// Run an unmodified RDMA program on a host without an RNIC.
    Run(cmd::run::Args),
    /// Show running devices, in the format of rdma(8).
    Dev(cmd::dev::DevArgs),
    /// Show the port of each running device: its state and network interface.
    Link(cmd::dev::LinkArgs),
    /// Show the counters of running devices.
    #[command(aliases = ["statistic", "stats"])]
    Stat(cmd::dev::StatArgs),
    /// Show the objects of running devices: queue pairs, regions, connections and so on.
    #[command(alias = "resource")]
    Res(cmd::res::Args),
    /// Show who uses a node, and how much.
    Top(cmd::top::Args),
    /// Explain the state of a queue pair, also after its process has ended.
    Explain(cmd::explain::Args),
    /// Print the events that devices recorded, also after their processes have ended.
    Trace(cmd::trace::Args),
    /// Demonstrate rdmux end to end on this host.
    Demo(cmd::demo::Args),
    /// Run the engine over simulated links that lose, duplicate, reorder and corrupt packets.
    Sim(cmd::sim::Args),
    /// Capture the packets of a running device, or check captures.
    Capture(cmd::capture::Args),
    /// Check this host: report each limit or obstacle, and its remedy.
    Doctor(cmd::doctor::Args),
    /// Switch DDIO on or off: whether the writes of a device go to the processor's cache first.
    Ddio(cmd::ddio::Args),
    /// Write man pages and completions below a folder, as ./install and packages need them.
    #[command(hide = true)]
    Generate(cmd::generate::Args),
}

/// Returns the program's version and the versions of the protocols that it speaks: two programs that do not work together are compared by
/// these.
fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let mut text = format!("{}\n", env!("CARGO_PKG_VERSION"));
        let protocols = [
            ("push", rdmux_push::VERSION),
            ("log", rdmux_log::VERSION),
            ("dsm", rdmux_dsm::VERSION),
            ("perf", cmd::perf::VERSION.into()),
            ("node", rdmux_wire::node::control::VERSION),
        ];
        for (name, version) in protocols.into_iter().chain(rdmux_soft::LOCAL_PROTOCOLS) {
            text += &format!("\n{name:<18} {version}");
        }
        text
    });
    &TEXT
}

fn main() -> ExitCode {
    // The first one is the default.
    rdmux_soft::register();
    rdmux_hw::register();
    rdmux_share::register();
    // Usage errors end here, with status 2.
    let cli = Cli::parse();
    let before = cli.objects;
    let shows_objects = matches!(
        cli.command,
        Command::Dev(_) | Command::Link(_) | Command::Stat(_) | Command::Res(_)
    );
    if before.is_any() && !shows_objects {
        cmd::objects::wrong_usage(
            "only dev, link, stat and res take --json, --pretty and --details before the command: put --json after any other command",
        );
    }
    let result = match cli.command {
        Command::Serve(args) => cmd::serve::run(args),
        Command::Push(args) => cmd::push::run(args),
        Command::Pull(args) => cmd::pull::run(args),
        Command::Log(args) => cmd::log::run(args),
        Command::Node(args) => cmd::node::run(&args),
        Command::Nvme(args) => cmd::nvme::run(args),
        Command::Accel(args) => cmd::accel::run(args),
        Command::Dsm(args) => cmd::dsm::run(args),
        Command::Perf(args) => cmd::perf::run(&args),
        Command::Run(args) => cmd::run::run(args),
        Command::Dev(args) => cmd::dev::run_dev(&args, before),
        Command::Link(args) => cmd::dev::run_link(&args, before),
        Command::Stat(args) => cmd::dev::run_stat(&args, before),
        Command::Res(args) => cmd::res::run(&args, before),
        Command::Top(args) => cmd::top::run(&args),
        Command::Explain(args) => cmd::explain::run(&args),
        Command::Trace(args) => cmd::trace::run(&args),
        Command::Demo(args) => cmd::demo::run(args),
        Command::Sim(args) => cmd::sim::run(&args),
        Command::Capture(args) => cmd::capture::run(&args),
        Command::Doctor(args) => cmd::doctor::run(&args),
        Command::Ddio(args) => cmd::ddio::run(&args),
        Command::Generate(args) => cmd::generate::run(&args, Cli::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            ExitCode::FAILURE
        }
    }
}

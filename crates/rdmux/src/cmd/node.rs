//! `rdmux node`: owns a device and serves applications on it: this user's, or those of tenants.

mod check;
mod web;

use std::env::{args_os, current_exe};
use std::fs::{OpenOptions, read_to_string};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Parser, Subcommand};
use rdmux_push::{Key, KeyError, default_key_path};
use rdmux_share::node::config::{Config, Finding};
use rdmux_share::node::{Node, NodeOptions, Stopper};
use rdmux_verbs::Device;
use rdmux_verbs::provider::folder::runtime_folder;
use rdmux_verbs::resources::places::SLOTS;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::recent::Recent;
use crate::{metrics, output, signals};

/// Own a device and share it with the applications of this user, or of tenants.
///
/// Applications use the device through this process: `--provider shared`, or the environment variable RDMUX_PROVIDER=shared, which works for
/// any program. Queue pairs and engine are in this process; the applications' payload is not copied on the way. When an application ends, also
/// by a signal, this process destroys what it had. It runs until Ctrl-C or SIGTERM; its applications then have a device that has gone.
///
/// With --config it serves tenants: users and control groups of this host, each with its part of the device and its limits. SIGHUP has it
/// read the file again; traffic goes on, and a wrong file changes nothing.
#[derive(Parser, Debug)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_long_help = "\
`rdmux run --shared` starts a node where there is none: rdmux node --detach --until-idle 10.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Local address of the device.
    #[arg(long = "device", value_name = "ADDRESS", default_value = "127.0.0.1")]
    address: IpAddr,
    /// Serve the tenants of this file (docs/node.md), and not this user alone. `rdmux node check` checks it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Let connections to other hosts share queue pairs, where the peer has a node that does so too and has the same key.
    #[arg(long)]
    share: bool,
    /// Show the node on a page at this address of the loopback interface, such as 127.0.0.1:7175; a PORT alone will do (docs/node.md).
    /// `rdmux node url` prints its URL with the token.
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = web::parse_address)]
    web: Option<SocketAddr>,
    /// The key of those nodes, and of the page: its file. Without it, that of this user, which is made if there is none.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Engines of the device, each with a thread that serves a part of the applications; with --share, at most 64. An RNIC has no engines.
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_engines)]
    engines: NonZeroU16,
    /// Run on this CPU.
    #[arg(long, value_name = "CPU")]
    pin: Option<usize>,
    /// End by itself after so many seconds without an application.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    until_idle: Option<u64>,
    /// Run in the background, and return once it is ready.
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    device: super::device::DeviceArgs,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Check a file of tenants, and show what it gives to whom.
    Check(check::Args),
    /// Print the URL of a node's page, with the token that the page needs.
    Url(UrlArgs),
}

#[derive(clap::Args, Debug)]
struct UrlArgs {
    /// Address of the page, as for --web.
    #[arg(value_name = "ADDR[:PORT]", default_value = "127.0.0.1", value_parser = web::parse_address)]
    address: SocketAddr,
    /// The node's key: its file. Without it, that of this user.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

fn parse_engines(text: &str) -> Result<NonZeroU16, String> {
    text.parse()
        .map_err(|_| format!("give a number from 1 to {}", u16::MAX))
}

fn parse_seconds(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "give whole seconds, such as 10".into())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.command {
        Some(Command::Check(args)) => check::run(args),
        Some(Command::Url(args)) => {
            let path = args
                .key
                .clone()
                .or_else(default_key_path)
                .ok_or(KeyError::NoHome)?;
            let key = match Key::load(&path) {
                // A new key would be none of a node that runs.
                Err(KeyError::Missing { path }) => bail!(
                    "there is no key {}: `rdmux node --web` makes this user's when it starts; --key FILE names another node's",
                    path.display()
                ),
                key => key?,
            };
            output::say(&web::url(args.address, &key));
            web::warn_if_nobody_listens(args.address);
            Ok(())
        }
        None => serve(args),
    }
}

fn serve(args: &Args) -> Result<()> {
    // Each engine has a place of its own at the device's address.
    let (engines, places) = (usize::from(args.engines.get()), SLOTS - 1);
    ensure!(
        engines <= places,
        "--engines {engines}: a device has at most {places} engines"
    );
    if args.detach {
        let is_relative = args.config.as_deref().is_some_and(Path::is_relative);
        ensure!(
            !is_relative,
            "with --detach the node runs in the folder /: give --config a path from there"
        );
        return detach(args.address);
    }
    args.device.apply()?;
    if let Some(cpu) = args.pin {
        super::serve::pin(cpu)?;
    }
    raise_descriptors();
    let config = args.config.as_deref().map(read).transpose()?;
    let device = Device::open(args.address)?;
    ensure!(
        device.provider() != "shared",
        "a node needs a device of its own: give --provider soft or hw, and unset RDMUX_PROVIDER"
    );
    let provider = device.provider();
    let tenants = config.as_ref().map_or(String::new(), tenants_of);
    ensure!(
        args.key.is_none() || args.share || args.web.is_some(),
        "--key FILE is for --share and --web"
    );
    let key = match args.share || args.web.is_some() {
        true => Some(key_of(args.key.as_deref())?),
        false => None,
    };
    let options = NodeOptions {
        config,
        key: key.clone().filter(|_| args.share),
        engines: args.engines.get().into(),
        ..NodeOptions::default()
    };
    let mut node = Node::open_with(device, options)?;
    node.warn_by(|warning| output::error(&anyhow!("warning: {warning}")));
    if let Some(seconds) = args.until_idle {
        node.end_when_idle(Duration::from_secs(seconds));
    }
    let recent = Arc::new(Recent::new(node.viewer()));
    if let (Some(address), Some(key)) = (args.web, key) {
        let at = web::serve(address, key, recent.clone())?;
        // The URL has no token here, as this may go to a log.
        let _ = writeln!(
            std::io::stderr(),
            "rdmux: page at http://{at}/, rdmux node url {at} has the token"
        );
    }
    metrics::show_node(recent);
    let (stopper, reloads) = (node.stopper(), node.stopper());
    let reload = args.config.clone().map(|file| move || reload(&reloads, &file));
    signals::handle(move || stopper.stop(), reload)?;
    output::say(&format!(
        "node of {} ({provider}{tenants}): ready for applications",
        args.address
    ));
    // Does nothing unless systemd asked for it.
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        output::error(&anyhow::Error::new(error).context("cannot notify systemd that the node is ready"));
    }
    Ok(node.run()?)
}

/// Loads a key: that of the file, or else this user's, which is made if there is none.
fn key_of(file: Option<&Path>) -> Result<Key, KeyError> {
    file.map_or_else(Key::load_or_create, Key::load)
}

/// Lets this process have as many descriptors as the system allows: each application, or connection, takes some.
pub(super) fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // It serves fewer otherwise: a node says so to those that it refuses.
    let _ = setrlimit(Resource::Nofile, most);
}

/// Reads a configuration, and reports its warnings.
fn read(file: &Path) -> Result<Config> {
    let (config, warnings) = Config::read(file)?;
    warn(&warnings);
    Ok(config)
}

fn warn(warnings: &[Finding]) {
    for warning in warnings {
        output::error(&anyhow!("warning: {warning}"));
    }
}

fn tenants_of(config: &Config) -> String {
    match config.tenants.len() {
        1 => ", 1 tenant".into(),
        count => format!(", {count} tenants"),
    }
}

/// Has the node go on with what its file says now. A wrong file changes nothing.
fn reload(stopper: &Stopper, file: &Path) {
    let applied = read(file).and_then(|config| {
        let tenants = tenants_of(&config);
        stopper.apply(config)?;
        Ok(tenants)
    });
    match applied {
        Ok(tenants) => output::say(&format!("{} is in force{tenants}", file.display())),
        Err(error) => output::error(&error.context(format!(
            "{} is not in force, the tenants stay as they were",
            file.display()
        ))),
    }
}

/// Runs this program again, without the option, in a process group of its own, until it is ready. What it reports later goes to a file.
fn detach(address: IpAddr) -> Result<()> {
    let log = runtime_folder()
        .context("no private folder of this user: set XDG_RUNTIME_DIR to one")?
        .join(format!("node-{address}.log"));
    let mut options = OpenOptions::new();
    // One that serves the address may write there too.
    let file = options.create(true).append(true).mode(0o600).open(&log);
    let file = file.with_context(|| log.display().to_string())?;
    let before = file.metadata()?.len() as usize;
    let mut command = process::Command::new(current_exe().context("the path of this program")?);
    command
        .args(args_os().skip(1).filter(|arg| arg != "--detach"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file)
        .current_dir("/")
        .process_group(0);
    let mut node = command.spawn().context("starting the node")?;
    let mut line = String::new();
    if let Some(output) = node.stdout.take() {
        BufReader::new(output).read_line(&mut line)?;
    }
    if line.is_empty() {
        node.wait()?;
        let said = read_to_string(&log).unwrap_or_default();
        let said = said.get(before..).unwrap_or_default().trim();
        bail!("{}", said.strip_prefix("rdmux: ").unwrap_or(said));
    }
    output::say(line.trim_end());
    Ok(())
}

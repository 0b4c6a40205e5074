//! `rdmux nvme target`: exports namespaces.

use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use rdmux_nvmf::auth::Secrets;
use rdmux_nvmf::backend::OpenError;
use rdmux_nvmf::control::config::{
    HostConfig, NamespaceConfig, OtherHosts, PcieStorage, REACTORS_MAX, Storage, SubsystemConfig,
    TargetConfig, parse_accelerators, parse_cntlids, parse_listener, parse_nqn,
};
use rdmux_nvmf::control::rpc::{ANSWER_MAX, RpcSocket, ledger_json, names, remove_stale};
use rdmux_nvmf::control::{Control, ControlError, SubsystemInfo};
use rdmux_nvmf::identity;
use rdmux_nvmf::passthrough::ControllerConfig;
use rdmux_nvmf::server::Listen;
use rdmux_nvmf::target::Listener;
use rdmux_wire::nvme::{Nqn, TransportKind};
use serde_json::{Value, json};

use super::change::warn_of_memory;
use super::stat::ledger_table;
use crate::cmd::device::DeviceArgs;
use crate::cmd::node::raise_descriptors;
use crate::output::{self, Align};
use crate::{metrics, signals};

/// Export files, block devices and memory as NVMe namespaces, until Ctrl-C.
///
/// `rdmux nvme ns`, `host`, `listener`, `referral` and `ana` change a target that runs, and `stat` shows what its hosts do. With --config it exports what a file describes; SIGHUP has it read the file
/// again, hosts stay connected, and a wrong file changes nothing.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object when the target listens: listen (array of transport, address, port, tls), subsystems (array of nqn, serial, secret_file and psk_file (null: no host needs the
common one), connect (array: the command of nvme-cli for each listener), namespaces (array of nsid, bytes, block_bytes, uuid, read_only, of: memory, null, pcie:ADDR or the path)),
mdns (array of the listeners that it announces: tcp:ADDR:PORT or rdma:ADDR:PORT; or null), socket (of requests that change it, or null). With --ledger another object at the
end: ledger (as of `rdmux nvme stat --ledger`).")]
pub(crate) struct Args {
    /// Export a file or a block device, memory of this process (`mem:1G`), or nothing that stores anything (`null:1G`: it reads as zeros);
    /// may be repeated. The namespaces are numbered from 1. `block=4096` sets the bytes of a block, `ro` refuses writes, `uuid=` replaces the
    /// namespace's UUID, by which hosts know it again, `ana=` its group of those that share a state of access (1). `pcie:0000:3b:00.0` is
    /// an NVMe drive that this process drives itself, with its first namespace, or another one behind a slash; `buffers=` is the memory that
    /// takes the data, `dram`, or memory of the drive: `cmb` or `pmr`; with these, `p2p=prefer` and
    /// `p2p=require` have data of NVMe/RDMA go between the RNIC and the drive; `unbind` takes the drive from the kernel's driver (docs/drives.md).
    #[arg(
        long = "ns",
        id = "namespaces",
        value_name = "PATH|mem:SIZE|null:SIZE|pcie:ADDR[,block=N][,ro][,uuid=UUID][,ana=GROUP]",
        required_unless_present_any = ["config", "accelerators", "controllers"]
    )]
    namespaces: Vec<NamespaceConfig>,
    /// Export cores that compress (zstd, lz4, deflate), checksum (crc32c, crc64nvme) or only carry (null), in a subsystem of their own, whose name ends
    /// in `:accel`; may be repeated. Each host has windows of its own there (8 of 4M), and 16 hosts may have some; `level=` is the highest of compressions (1).
    /// `rdmux accel` uses them.
    #[arg(
        long = "accel",
        id = "accelerators",
        value_name = "ALGORITHM[:CORES][,level=N][,window=SIZE][,windows=N][,hosts=N]",
        value_parser = parse_cores
    )]
    accelerators: Vec<Cores>,
    /// Export a namespace, as --ns has it, among the accelerators, so that results can be copied into it; may be repeated.
    #[arg(
        long = "accel-ns",
        id = "accel_namespaces",
        value_name = "PATH|mem:SIZE|null:SIZE[,...]",
        requires = "accelerators"
    )]
    accel_namespaces: Vec<NamespaceConfig>,
    /// Export a drive's own controller, with all of its namespaces, in a subsystem whose name ends in that of the device, as `:nvme0`; may be repeated. Hosts see the
    /// drive as it is; its I/O, admin and vendor's commands reach it through the kernel's driver, which keeps it. `allow=` adds commands that are refused otherwise, several
    /// with + between them: `format`, `sanitize`, `firmware`, and `vendor`, those whose length nothing tells (docs/controllers.md).
    #[arg(long = "ctrl", id = "controllers", value_name = "/dev/nvmeN[,allow=WORD+...]")]
    controllers: Vec<ControllerConfig>,
    /// Export what a file describes (docs/nvmf.md); SIGHUP has it read again.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["namespaces", "accelerators", "controllers", "listen", "tls", "psk", "nqn", "cntlids", "reactors", "secret", "allow_any_host"])]
    config: Option<PathBuf>,
    /// Listen on an address and port, by TCP or by RDMA; may be repeated. The default serves only this host.
    #[arg(long, value_name = "tcp|rdma:ADDR[:PORT]", default_value = "tcp:127.0.0.1", value_parser = parse_listener)]
    listen: Vec<Listener>,
    /// Require TLS 1.3 on connections by TCP.
    #[arg(long)]
    tls: bool,
    /// File with the key of TLS that hosts need, as `nvme gen-tls-key` prints it [default: your own, made on first use].
    #[arg(long, value_name = "FILE", requires = "tls")]
    psk: Option<PathBuf>,
    /// Name of the subsystem [default: one of this host and user, the same each time].
    #[arg(long, value_name = "NQN", value_parser = parse_nqn)]
    nqn: Option<Nqn>,
    /// Ids of controllers. Each node that serves the same name needs a range of its own: hosts refuse two controllers of one id [default: all].
    #[arg(long, value_name = "FIRST-LAST", value_parser = parse_cntlids)]
    cntlids: Option<RangeInclusive<u16>>,
    /// Threads that serve connections.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=i64::from(REACTORS_MAX)))]
    reactors: u16,
    /// File with the secret that hosts need, and in its second line that of the target [default: your own, made on first use].
    #[arg(long, value_name = "FILE", conflicts_with = "allow_any_host")]
    secret: Option<PathBuf>,
    /// Let every host that reaches the address read and write, without a secret.
    #[arg(long)]
    allow_any_host: bool,
    /// Announce the discovery service by mDNS on the networks of the listeners, so that hosts find it. Those on loopback are not announced.
    #[arg(long, conflicts_with = "config")]
    mdns: bool,
    /// Count the bytes that RNICs and drives move, by link of this host (docs/ledger.md): `rdmux nvme stat --ledger` shows them, and the target
    /// does at its end.
    #[arg(long, conflicts_with = "config")]
    ledger: bool,
    /// Have a thread of its own, the offload engine, serve hosts by RDMA: reads, writes and flushes of drives (`pcie:ADDR`) go between their queue pairs and one
    /// of the drive, and other threads have no work with them (docs/drives.md). `rdmux nvme stat --offload` shows its counters.
    #[arg(long, conflicts_with = "config")]
    offload: bool,
    /// Socket for the requests of `rdmux nvme ns`, `host`, `listener`, `referral` and `ana` [default: one in your folder for what runs].
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Describe the target in JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// The namespaces of one option.
#[derive(Clone, Debug)]
struct Cores(Vec<NamespaceConfig>);

fn parse_cores(text: &str) -> Result<Cores, String> {
    parse_accelerators(text).map(Cores)
}

impl Args {
    /// Returns the description of the target.
    fn description(&self) -> Result<TargetConfig> {
        if let Some(file) = &self.config {
            return Ok(TargetConfig::load(file)?);
        }
        let subsystem = |nqn: Option<Nqn>, namespaces: Vec<NamespaceConfig>| SubsystemConfig {
            nqn,
            other_hosts: match self.allow_any_host {
                true => OtherHosts::Any,
                false => OtherHosts::Secret,
            },
            secret: self.secret.clone(),
            psk: self.psk.clone(),
            cntlids: self.cntlids.clone(),
            hosts: Vec::new(),
            namespaces,
            controller: None,
            ana: Vec::new(),
        };
        let named = |suffix: &str| {
            let nqn = self.nqn.clone().unwrap_or_else(identity::default_nqn);
            parse_nqn(&format!("{nqn}:{suffix}")).map_err(anyhow::Error::msg)
        };
        let mut subsystems = Vec::new();
        if !self.namespaces.is_empty() {
            subsystems.push(subsystem(self.nqn.clone(), self.namespaces.clone()));
        }
        if !self.accelerators.is_empty() {
            let cores = self.accelerators.iter().flat_map(|cores| &cores.0);
            let namespaces = cores.chain(&self.accel_namespaces).cloned();
            subsystems.push(subsystem(Some(named("accel")?), namespaces.collect()));
        }
        for controller in &self.controllers {
            let device = controller.path.file_name().unwrap_or_default();
            subsystems.push(SubsystemConfig {
                controller: Some(controller.clone()),
                ..subsystem(Some(named(&device.to_string_lossy())?), Vec::new())
            });
        }
        let listen = self.listen.iter().map(|listener| Listen {
            tls: self.tls && listener.transport == TransportKind::Tcp,
            ..Listen::from(*listener)
        });
        Ok(TargetConfig {
            listen: listen.collect(),
            reactors: self.reactors,
            mdns: self.mdns,
            ledger: self.ledger,
            offload: self.offload,
            referrals: Vec::new(),
            subsystems,
        })
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    args.device.apply()?;
    let config = args.description()?;
    for subsystem in &config.subsystems {
        subsystem.namespaces.iter().for_each(warn_of_memory);
    }
    if config.offload
        && !config
            .listen
            .iter()
            .any(|listen| listen.listener.transport == TransportKind::Rdma)
    {
        output::error(&anyhow!(
            "note: the offload engine has no work: it serves NVMe/RDMA, so listen by it as well, with --listen rdma:ADDR"
        ));
    }
    let namespaces = config
        .subsystems
        .iter()
        .flat_map(|subsystem| &subsystem.namespaces);
    let drives: Vec<PcieStorage> = namespaces
        .filter_map(|namespace| match &namespace.storage {
            Storage::Pcie(pcie) => Some(pcie.clone()),
            _ => None,
        })
        .collect();
    let (control, server) = Control::start(config).map_err(|error| {
        tell_of_drives(&drives);
        in_file(error, args.config.as_deref())
    })?;
    let control = Arc::new(control);
    metrics::show_target(control.clone());
    // Hosts beyond the limit would wait to be accepted.
    raise_descriptors();
    let handle = server.handle();
    let reload = args.config.map(|file| {
        let control = control.clone();
        move || reload(&control, &file)
    });
    signals::handle(move || handle.stop(), reload)?;
    let socket = listen(args.socket.as_deref(), &control)?;
    let exported = Exported {
        subsystems: control.subsystems(),
        listeners: control.listening(),
        announced: control.announced(),
        socket: socket.as_ref().map(RpcSocket::path),
    };
    output::say(&if args.json {
        exported.json().to_string()
    } else {
        exported.text()
    });
    // Does nothing unless systemd asked for it.
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        output::error(&anyhow::Error::new(error).context("cannot notify systemd that the target listens"));
    }
    let ended = server.run();
    control.withdraw();
    tell_of_drives(&control.stop_drives());
    if let Some(entries) = control.ledger() {
        let ledger = ledger_json(&entries);
        output::say(&match args.json {
            true => json!({ "ledger": ledger }).to_string(),
            false => ledger_table(&ledger),
        });
    }
    Ok(ended?)
}

/// Tells how the kernel gets drives back that were taken from it.
fn tell_of_drives(drives: &[PcieStorage]) {
    for drive in drives.iter().filter(|drive| drive.unbind) {
        let address = &drive.place.address;
        if let Some(command) = rdmux_drive::give_back(address) {
            output::error(&anyhow!(
                "note: the kernel's driver does not have {address}; to give it back: {command}"
            ));
        }
    }
}

/// Returns the error of a target, with the line of its file that names what cannot be opened.
fn in_file(error: ControlError, file: Option<&Path>) -> anyhow::Error {
    let ControlError::Open(open) = &error else {
        return error.into();
    };
    let (OpenError::Open { path, .. } | OpenError::InUse(path) | OpenError::Kind(path)) = open;
    // What is read has been parsed before: a file that cannot be read again has no line.
    let named = path.to_string_lossy().into_owned();
    let line = file.and_then(|file| {
        let text = std::fs::read_to_string(file).ok()?;
        let at = text.lines().position(|line| line.contains(&named))?;
        Some(format!("{}:{}", file.display(), at + 1))
    });
    match line {
        Some(line) => anyhow!("{line}: {error}"),
        None => error.into(),
    }
}

/// Has the target go on with what its file says now. A wrong file changes nothing.
fn reload(control: &Control, file: &Path) {
    let config = TargetConfig::load(file).map_err(anyhow::Error::new);
    match config.and_then(|config| Ok(control.reload(config)?)) {
        Ok(()) => output::say(&format!("{} is in force", file.display())),
        Err(error) => output::error(&error.context(format!(
            "{} is not in force, the target stays as it was",
            file.display()
        ))),
    }
}

/// Listens for requests. Where nobody has chosen the socket, a target without one is better than none.
fn listen(chosen: Option<&Path>, control: &Arc<Control>) -> Result<Option<RpcSocket>> {
    if let Some(path) = chosen {
        let socket = RpcSocket::listen(path, control.clone()).map_err(|error| taken(path, error));
        let words = || {
            format!(
                "cannot listen for requests on {}: give another path with --socket",
                path.display()
            )
        };
        return Ok(Some(socket.with_context(words)?));
    }
    let Some(first) = control.subsystems().into_iter().next() else {
        return Ok(None);
    };
    // What others have left is in nobody's way.
    let _ = remove_stale();
    let path = RpcSocket::default_path(&first.nqn);
    let opened = path.map_err(anyhow::Error::new).and_then(|path| {
        let socket = RpcSocket::listen(&path, control.clone());
        socket.map_err(|error| taken(&path, error))
    });
    match opened {
        Ok(socket) => Ok(Some(socket)),
        Err(error) => {
            let words = "warning: the target takes no requests: give a path with --socket";
            output::error(&error.context(words));
            Ok(None)
        }
    }
}

/// Returns the error of a socket, with the subsystems of the target that has it.
fn taken(path: &Path, error: io::Error) -> anyhow::Error {
    let holder = match error.kind() {
        io::ErrorKind::AddrInUse => names(path, ANSWER_MAX).ok(),
        _ => None,
    };
    let path = path.display();
    match holder {
        Some(names) => anyhow!("{path}: the target of {} has it", names.join(" and ")),
        None => anyhow!(error).context(path.to_string()),
    }
}

/// A target, to be shown.
struct Exported<'a> {
    subsystems: Vec<SubsystemInfo>,
    listeners: Vec<Listen>,
    /// Those that mDNS announces; `None`: it is not asked for.
    announced: Option<Vec<Listener>>,
    socket: Option<&'a Path>,
}

/// Returns the name of a transport, as `nvme connect` takes it.
const fn transport_name(transport: TransportKind) -> &'static str {
    match transport {
        TransportKind::Rdma => "rdma",
        TransportKind::Tcp => "tcp",
    }
}

/// Returns the commands by which Linux hosts connect: one for all of them, or where only those in the list may, one for each.
fn connects(subsystem: &SubsystemInfo, listen: &Listen) -> Vec<String> {
    let listed = subsystem
        .hosts
        .iter()
        .map(|host| connect(subsystem, Some(host), listen));
    match subsystem.other_hosts {
        OtherHosts::None => listed.collect(),
        OtherHosts::Secret | OtherHosts::Any => vec![connect(subsystem, None, listen)],
    }
}

/// Returns the command by which a Linux host connects. With TLS its kernel needs the key before that.
fn connect(
    subsystem: &SubsystemInfo,
    host: Option<&HostConfig>,
    Listen { listener, tls, .. }: &Listen,
) -> String {
    let (ip, port) = (listener.address.ip(), listener.address.port());
    let transport = transport_name(listener.transport);
    let nqn = &subsystem.nqn;
    let mut command = format!("nvme connect -t {transport} -a {ip} -s {port} -n {nqn}");
    let name = host.map_or(String::new(), |host| format!(" --hostnqn {}", host.nqn));
    command += &name;
    let own = host.and_then(|host| host.psk.as_ref());
    if let Some(file) = own.or(subsystem.psk_file.as_ref()).filter(|_| *tls) {
        let key = format!(
            "nvme check-tls-key --identity=1 --insert --subsysnqn={nqn}{name} --keydata=\"$(cat {})\"",
            file.display()
        );
        command = format!("{key} && {command} --tls");
    }
    let own = host.and_then(|host| host.secret.as_ref());
    if let Some(file) = own.or(subsystem.secret_file.as_ref()) {
        let has_second = Secrets::load(file).is_ok_and(|secrets| secrets.controller.is_some());
        let lines: &[_] = match has_second {
            true => &[("--dhchap-secret", 1), ("--dhchap-ctrl-secret", 2)],
            false => &[("--dhchap-secret", 1)],
        };
        for (option, line) in lines {
            command += &format!(" {option} \"$(sed -n {line}p {})\"", file.display());
        }
    }
    command
}

impl Exported<'_> {
    fn text(&self) -> String {
        let mut text = String::new();
        for subsystem in &self.subsystems {
            if self.subsystems.len() > 1 {
                text += &format!("{}:\n", subsystem.nqn);
            }
            text += &namespaces_table(subsystem);
            for line in self
                .listeners
                .iter()
                .flat_map(|listener| connects(subsystem, listener))
            {
                text += &format!("\n{line}");
            }
            text += "\n";
        }
        if let Some(announced) = &self.announced {
            text += &match &announced[..] {
                [] => "mDNS announces nothing: listen on an address that other hosts reach\n".to_owned(),
                listeners => {
                    let listeners = listeners.iter().map(Listener::to_string);
                    format!("mDNS announces {}\n", listeners.collect::<Vec<_>>().join(", "))
                }
            };
        }
        text + "listening; end with Ctrl-C"
    }

    fn json(&self) -> Value {
        let listen: Vec<_> = self
            .listeners
            .iter()
            .map(|Listen { listener, tls, .. }| {
                json!({
                    "transport": transport_name(listener.transport),
                    "address": listener.address.ip().to_string(),
                    "port": listener.address.port(),
                    "tls": tls,
                })
            })
            .collect();
        let subsystems: Vec<_> = self
            .subsystems
            .iter()
            .map(|subsystem| {
                let connect = self
                    .listeners
                    .iter()
                    .flat_map(|listener| connects(subsystem, listener));
                json!({
                    "nqn": subsystem.nqn.as_str(),
                    "serial": subsystem.serial,
                    "secret_file": subsystem.secret_file,
                    "psk_file": subsystem.psk_file,
                    "connect": connect.collect::<Vec<_>>(),
                    "namespaces": namespaces_json(subsystem),
                })
            })
            .collect();
        let announced = self.announced.as_ref().map(|announced| {
            let listeners = announced.iter().map(Listener::to_string);
            listeners.collect::<Vec<_>>()
        });
        json!({
            "listen": listen,
            "subsystems": subsystems,
            "mdns": announced,
            "socket": self.socket,
        })
    }
}

/// Returns the namespaces of a subsystem as a table.
fn namespaces_table(subsystem: &SubsystemInfo) -> String {
    let rows: Vec<Vec<String>> = subsystem
        .namespaces
        .iter()
        .map(|namespace| {
            let access = if namespace.read_only { ", read-only" } else { "" };
            vec![
                namespace.nsid.to_string(),
                output::bytes(namespace.bytes),
                output::bytes(namespace.block_bytes.into()),
                format!("{}{access}", namespace.storage),
            ]
        })
        .collect();
    let columns = [
        ("namespace", Align::Right),
        ("size", Align::Right),
        ("block", Align::Right),
        ("of", Align::Left),
    ];
    output::table(&columns, &rows)
}

fn namespaces_json(subsystem: &SubsystemInfo) -> Value {
    let namespaces = subsystem.namespaces.iter().map(|namespace| {
        json!({
            "nsid": namespace.nsid.0,
            "bytes": namespace.bytes,
            "block_bytes": namespace.block_bytes,
            "uuid": identity::uuid_text(&namespace.uuid),
            "read_only": namespace.read_only,
            "of": namespace.storage.to_string(),
        })
    });
    namespaces.collect()
}

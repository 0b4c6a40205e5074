//! `rdmux nvme target`: exports namespaces.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use rdmux_nvmf::auth::Secrets;
use rdmux_nvmf::backend::{Backend, FileBackend, MemoryBackend, NullBackend};
use rdmux_nvmf::identity;
use rdmux_nvmf::server::{Config, Server};
use rdmux_nvmf::target::{Authentication, Hosts, Listener, Namespace, Subsystem, Target, Terms};
use rdmux_push::parse_size;
use rdmux_wire::nvme::{Nqn, NsId, TransportKind};
use serde_json::json;

use crate::cmd::device::DeviceArgs;
use crate::cmd::node::raise_descriptors;
use crate::cmd::serve::{parse_address, parse_positive};
use crate::output::{self, Align};

/// Port of NVMe/TCP and NVMe/RDMA, as IANA has it.
const DEFAULT_PORT: u16 = 4420;

/// Export files, block devices and memory as NVMe namespaces, until Ctrl-C.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object when the target listens: subsystem (its NQN), serial, secret_file (null: any host), listen (array of transport, address, port, connect: the command of
nvme-cli), namespaces (array of nsid, bytes, block_bytes, uuid, read_only, of: memory, null or the path).")]
pub(crate) struct Args {
    /// Export a file or a block device, memory of this process (`mem:1G`), or nothing that stores anything (`null:1G`: it reads as zeros);
    /// may be repeated. The namespaces are numbered from 1. `block=4096` sets the bytes of a block, `ro` refuses writes, `uuid=` replaces the
    /// namespace's UUID, by which hosts know it again.
    #[arg(
        long = "ns",
        id = "namespaces",
        value_name = "PATH|mem:SIZE|null:SIZE[,block=N][,ro][,uuid=UUID]",
        required = true,
        value_parser = NamespaceSpec::parse
    )]
    namespaces: Vec<NamespaceSpec>,
    /// Listen on an address and port, by TCP or by RDMA; may be repeated. The default serves only this host.
    #[arg(long, value_name = "tcp|rdma:ADDR[:PORT]", default_value = "tcp:127.0.0.1", value_parser = parse_listen)]
    listen: Vec<Listener>,
    /// Name of the subsystem [default: one of this host and user, the same each time].
    #[arg(long, value_name = "NQN", value_parser = parse_nqn)]
    nqn: Option<Nqn>,
    /// Threads that serve connections.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    reactors: u16,
    /// File with the secret that hosts need, and in its second line that of the target [default: your own, made on first use].
    #[arg(long, value_name = "FILE", conflicts_with = "allow_any_host")]
    secret: Option<PathBuf>,
    /// Let every host that reaches the address read and write, without a secret.
    #[arg(long)]
    allow_any_host: bool,
    /// Describe the target in JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct NamespaceSpec {
    place: Place,
    block_shift: u8,
    read_only: bool,
    uuid: Option<[u8; 16]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    File(PathBuf),
    Memory(u64),
    Null(u64),
}

impl NamespaceSpec {
    fn parse(text: &str) -> Result<NamespaceSpec, String> {
        let (mut place, mut block_shift, mut read_only, mut uuid) = (text, 9, false, None);
        // Options are taken off the end, so that a path may hold commas.
        while let Some((rest, option)) = place.rsplit_once(',') {
            if let Some(value) = option.strip_prefix("block=") {
                let bytes = parse_size(value).filter(|bytes| bytes.is_power_of_two());
                let bytes = bytes.filter(|bytes| (512..=65536).contains(bytes));
                let bytes = bytes.ok_or_else(|| {
                    format!("'{value}' is no size of a block: give a power of two, 512 to 65536")
                })?;
                block_shift = bytes.ilog2() as u8;
            } else if let Some(value) = option.strip_prefix("uuid=") {
                let parsed = identity::parse_uuid(value);
                uuid = Some(parsed.ok_or_else(|| format!("'{value}' is no UUID"))?);
            } else if option == "ro" {
                read_only = true;
            } else if place.starts_with("mem:") || place.starts_with("null:") {
                return Err(format!("'{option}' is none of block=N, ro and uuid=UUID"));
            } else {
                break;
            }
            place = rest;
        }
        let place = if let Some(text) = place.strip_prefix("mem:") {
            Place::Memory(parse_positive(text)?)
        } else if let Some(text) = place.strip_prefix("null:") {
            Place::Null(parse_positive(text)?)
        } else if place.is_empty() {
            return Err("no file given: use PATH, mem:SIZE or null:SIZE".into());
        } else {
            Place::File(place.into())
        };
        Ok(NamespaceSpec {
            place,
            block_shift,
            read_only,
            uuid,
        })
    }

    fn open(&self) -> Result<Arc<dyn Backend>> {
        Ok(match &self.place {
            Place::File(path) => Arc::new(FileBackend::open(path, self.read_only, 1 << self.block_shift)?),
            Place::Memory(bytes) => {
                let memory = MemoryBackend::new(*bytes);
                Arc::new(memory.with_context(|| format!("cannot have {} of memory", output::bytes(*bytes)))?)
            }
            Place::Null(bytes) => Arc::new(NullBackend(*bytes)),
        })
    }

    /// Returns the UUID: the same after a restart if the blocks are.
    fn uuid(&self, nqn: &Nqn, nsid: NsId) -> Result<[u8; 16]> {
        if let Some(uuid) = self.uuid {
            return Ok(uuid);
        }
        let storage = match &self.place {
            Place::File(path) => path.canonicalize()?.into_os_string().into_encoded_bytes(),
            Place::Memory(_) => rdmux_key::random_nonce()?.to_vec(),
            Place::Null(_) => b"null".to_vec(),
        };
        Ok(identity::namespace_uuid(nqn, nsid, &storage))
    }

    fn words(&self) -> String {
        match &self.place {
            Place::File(path) => path.display().to_string(),
            Place::Memory(_) => "memory".into(),
            Place::Null(_) => "null".into(),
        }
    }
}

fn parse_listen(text: &str) -> Result<Listener, String> {
    let (transport, address) = match text.split_once(':') {
        Some(("tcp", address)) => (TransportKind::Tcp, address),
        Some(("rdma", address)) => (TransportKind::Rdma, address),
        _ => return Err("give tcp:ADDR[:PORT] or rdma:ADDR[:PORT], an IPv6 address in brackets".into()),
    };
    Ok(Listener {
        transport,
        address: parse_address(address, DEFAULT_PORT)?,
    })
}

/// Returns the name of a transport, as `nvme connect` takes it.
const fn transport_name(transport: TransportKind) -> &'static str {
    match transport {
        TransportKind::Rdma => "rdma",
        TransportKind::Tcp => "tcp",
    }
}

fn parse_nqn(text: &str) -> Result<Nqn, String> {
    Nqn::new(text)
        .filter(|nqn| nqn.as_str().starts_with("nqn."))
        .ok_or_else(|| {
            format!(
                "'{text}' is no NQN: give nqn.YYYY-MM.DOMAIN:NAME, at most {} characters",
                Nqn::LEN_MAX
            )
        })
}

pub(crate) fn run(args: Args) -> Result<()> {
    args.device.apply()?;
    let (secrets, secret_file) = match (args.allow_any_host, args.secret) {
        (true, _) => (None, None),
        (false, Some(path)) => (Some(Secrets::load(&path)?), Some(path)),
        (false, None) => {
            let path = rdmux_key::config_path("nvme-secret");
            let path = path.context(
                "no folder for the secret: set HOME or XDG_CONFIG_HOME, or give a file with --secret FILE",
            )?;
            (Some(Secrets::load_or_create(&path)?), Some(path))
        }
    };
    let has_controller_secret = secrets
        .as_ref()
        .is_some_and(|secrets| secrets.controller.is_some());
    let authentication = secrets.map(|secrets| Authentication {
        secrets,
        random: || rdmux_key::random_nonce().ok(),
    });
    let hosts = Hosts::any(Terms {
        authentication,
        ..Terms::default()
    });
    let nqn = args.nqn.unwrap_or_else(identity::default_nqn);
    let _claim = identity::claim(&nqn).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            anyhow!("another target of this host serves {nqn}: end it, or give another name with --nqn")
        }
        _ => anyhow!(error).context(format!("cannot claim {nqn}")),
    })?;
    let serial = identity::serial(&nqn);
    let subsystem = Arc::new(Subsystem::new(nqn.clone(), &serial, hosts));
    for (spec, nsid) in args.namespaces.iter().zip(1..) {
        let nsid = NsId(nsid);
        let namespace = Namespace {
            nsid,
            block_shift: spec.block_shift,
            backend: spec.open()?,
            uuid: spec.uuid(&nqn, nsid)?,
            is_protected: spec.read_only,
        };
        subsystem
            .add_namespace(namespace)
            .with_context(|| format!("cannot export {}", spec.words()))?;
    }
    let target = Arc::new(Target::default());
    target.add_subsystem(subsystem.clone())?;
    let server = Server::bind(Config {
        target,
        listen: args.listen,
        reactors: args.reactors.into(),
        waiting: None,
    })?;
    // Hosts beyond the limit would wait to be accepted.
    raise_descriptors();
    let handle = server.handle();
    ctrlc::set_handler(move || handle.stop()).context("cannot install signal handlers")?;
    let exported = Exported {
        nqn: &nqn,
        serial: &serial,
        specs: &args.namespaces,
        subsystem: &subsystem,
        listen: server.listeners(),
        secret_file: secret_file.as_deref(),
        has_controller_secret,
    };
    output::say(&if args.json {
        exported.json()
    } else {
        exported.text()
    });
    // Does nothing unless systemd asked for it.
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        output::error(&anyhow::Error::new(error).context("cannot notify systemd that the target listens"));
    }
    server.run()?;
    Ok(())
}

/// Namespaces and listeners of a target, to be shown.
struct Exported<'a> {
    nqn: &'a Nqn,
    serial: &'a str,
    specs: &'a [NamespaceSpec],
    subsystem: &'a Subsystem,
    listen: &'a [Listener],
    secret_file: Option<&'a Path>,
    has_controller_secret: bool,
}

impl Exported<'_> {
    fn connect(&self, listener: &Listener) -> String {
        let (ip, port) = (listener.address.ip(), listener.address.port());
        let transport = transport_name(listener.transport);
        let mut command = format!("nvme connect -t {transport} -a {ip} -s {port} -n {}", self.nqn);
        if let Some(file) = self.secret_file {
            let lines: &[_] = match self.has_controller_secret {
                true => &[("--dhchap-secret", 1), ("--dhchap-ctrl-secret", 2)],
                false => &[("--dhchap-secret", 1)],
            };
            for (option, line) in lines {
                command += &format!(" {option} \"$(sed -n {line}p {})\"", file.display());
            }
        }
        command
    }

    fn text(&self) -> String {
        let namespaces = self.subsystem.list();
        let rows: Vec<Vec<String>> = namespaces
            .iter()
            .zip(self.specs)
            .map(|(namespace, spec)| {
                let access = if spec.read_only { ", read-only" } else { "" };
                vec![
                    namespace.nsid.to_string(),
                    output::bytes(namespace.blocks() << namespace.block_shift),
                    output::bytes(1 << namespace.block_shift),
                    format!("{}{access}", spec.words()),
                ]
            })
            .collect();
        let columns = [
            ("namespace", Align::Right),
            ("size", Align::Right),
            ("block", Align::Right),
            ("of", Align::Left),
        ];
        let mut text = output::table(&columns, &rows);
        for listener in self.listen {
            text += &format!("\n{}", self.connect(listener));
        }
        text + "\nlistening; end with Ctrl-C"
    }

    fn json(&self) -> String {
        let namespaces = self.subsystem.list();
        let namespaces: Vec<_> = namespaces
            .iter()
            .zip(self.specs)
            .map(|(namespace, spec)| {
                json!({
                    "nsid": namespace.nsid.0,
                    "bytes": namespace.blocks() << namespace.block_shift,
                    "block_bytes": 1u32 << namespace.block_shift,
                    "uuid": identity::uuid_text(&namespace.uuid),
                    "read_only": spec.read_only,
                    "of": spec.words(),
                })
            })
            .collect();
        let listen: Vec<_> = self
            .listen
            .iter()
            .map(|listener| {
                json!({
                    "transport": transport_name(listener.transport),
                    "address": listener.address.ip().to_string(),
                    "port": listener.address.port(),
                    "connect": self.connect(listener),
                })
            })
            .collect();
        json!({
            "subsystem": self.nqn.as_str(),
            "serial": self.serial,
            "secret_file": self.secret_file.map(|file| file.display().to_string()),
            "listen": listen,
            "namespaces": namespaces,
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse__takes_options_off_the_end() {
        let spec = |text| NamespaceSpec::parse(text).unwrap();
        assert_eq!(spec("mem:1G,block=4096,ro").place, Place::Memory(1 << 30));
        assert_eq!(
            (spec("null:1T,block=4K").block_shift, spec("/a,b,ro").read_only),
            (12, true)
        );
        assert_eq!(spec("/a,b,ro").place, Place::File("/a,b".into()));
        for (text, part) in [
            ("mem:x", "'x' is not a size"),
            ("mem:1G,block=1000", "'1000' is no size of a block"),
            ("null:1G,rw", "'rw' is none of"),
            (",ro", "no file given"),
        ] {
            let error = NamespaceSpec::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn parse_listen__names_the_transport() {
        let listener = |transport, address: &str| {
            let address = address.parse().unwrap();
            Ok(Listener { transport, address })
        };
        let tcp = |address| listener(TransportKind::Tcp, address);
        assert_eq!(parse_listen("tcp:127.0.0.1"), tcp("127.0.0.1:4420"));
        assert_eq!(parse_listen("tcp:[::1]:5000"), tcp("[::1]:5000"));
        let rdma = |address| listener(TransportKind::Rdma, address);
        assert_eq!(parse_listen("rdma:10.1.2.3"), rdma("10.1.2.3:4420"));
        for text in [
            "127.0.0.1",
            "tcp:0.0.0.0",
            "tcp:host",
            "tcp:127.0.0.1:x",
            "rdma:",
            "udp:127.0.0.1",
        ] {
            assert!(parse_listen(text).is_err(), "{text}");
        }
        assert!(parse_nqn("x").is_err() && parse_nqn("nqn.2014-08.org.example:a").is_ok());
    }
}

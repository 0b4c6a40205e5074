//! `rdmux serve`: offers files and memory to be pushed to and pulled from.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rdmux_push::{
    DEFAULT_PORT, Domain, Key, Name, Place, Placement, Region, Server, Sizing, Ways, parse_size, server,
    split_port,
};
use rdmux_verbs::Reach;
use rdmux_verbs::waiting::WaitMode;
use serde_json::json;

use crate::output::{self, Align};

/// Serve files and memory to push and pull, until Ctrl-C.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object when the server listens: listen (array of addresses), regions (array of name, bytes, path, file_system, domain, flush,
durable_by, read_only, direct, reach, mapped, sizing; path and file_system are null for memory, file_system for a device; reach is
direct, on demand or by message; sizing is what size= did to a file: created, grown or kept). Another one at the end, if clients transferred bytes by
message: by_message (bytes, cpu_seconds, cpu_seconds_per_gib: processor time of the server's threads).")]
#[command(group(clap::ArgGroup::new("regions").required(true).multiple(true).args(["files", "memories"])))]
pub(crate) struct Args {
    /// Address to listen on; may be repeated. The default serves only this host.
    #[arg(long, value_name = "ADDR[:PORT]", default_value = "127.0.0.1", value_parser = parse_listen)]
    listen: Vec<SocketAddr>,
    /// Serve a file or a DAX device under its base name, or under NAME with `name=`. `size=` creates the file or extends it; `ro` makes it
    /// read-only. rdmux detects persistent memory; `domain=adr`, `eadr` or `system` (the whole system, as with a battery) declares what
    /// survives a loss of power where the system does not report it.
    #[arg(
        long = "file",
        id = "files",
        value_name = "PATH[,size=N][,name=NAME][,domain=DOMAIN][,ro]",
        value_parser = FileSpec::parse
    )]
    files: Vec<FileSpec>,
    /// Serve memory of this process: zeroed at the start, lost at its exit.
    #[arg(long = "mem", id = "memories", value_name = "NAME,size=N", value_parser = MemorySpec::parse)]
    memories: Vec<MemorySpec>,
    /// File with the key that clients need [default: your own, made on first use].
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Consider a client dead when it has not answered for this time; its mappings end.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_keepalive)]
    keepalive: Duration,
    /// Revoke a mapping when another client needs its range and the holder has not released it for this time.
    #[arg(long, value_name = "SECONDS", default_value = "35", value_parser = parse_keepalive)]
    break_timeout: Duration,
    /// Describe the regions in JSON.
    #[arg(long)]
    json: bool,
    /// Do not report events of clients.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    device: super::device::DeviceArgs,
    /// Acknowledge persistent flushes without doing them: the negative control of a crash test.
    #[arg(long, hide = true)]
    unsafe_no_flush: bool,
    /// Spin instead of sleeping.
    #[arg(long, hide = true)]
    poll: bool,
    /// Run on this CPU only.
    #[arg(long, hide = true)]
    cpu: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FileSpec {
    path: PathBuf,
    name: Name,
    size: Option<u64>,
    read_only: bool,
    domain: Option<Domain>,
}

impl FileSpec {
    fn parse(text: &str) -> Result<FileSpec, String> {
        let (mut path, mut size, mut name, mut read_only, mut domain) = (text, None, None, false, None);
        // Options are taken off the end, so that a path may hold commas.
        while let Some((rest, option)) = path.rsplit_once(',') {
            if let Some(value) = option.strip_prefix("size=") {
                size = Some(parse_positive(value)?);
            } else if let Some(value) = option.strip_prefix("name=") {
                name = Some(parse_name(value)?);
            } else if let Some(value) = option.strip_prefix("domain=") {
                domain = Some(match value {
                    "adr" => Domain::Adr,
                    "eadr" => Domain::Eadr,
                    "system" => Domain::WholeSystem,
                    other => return Err(format!("'{other}' is not a domain: give adr, eadr or system")),
                });
            } else if option == "ro" {
                read_only = true;
            } else if option.contains('=') && !Path::new(path).exists() {
                return Err(format!(
                    "'{option}' is none of size=N, name=NAME, domain=DOMAIN and ro, and there is no file {path}"
                ));
            } else {
                break;
            }
            path = rest;
        }
        if read_only && size.is_some() {
            return Err("a read-only file cannot be resized: leave out ro or size=".into());
        }
        let path = PathBuf::from(path);
        let name = match name {
            Some(name) => name,
            None => {
                let base = path.file_name().ok_or("there is no file name in the path")?;
                parse_name(
                    base.to_str()
                        .ok_or("the file's name is not UTF-8: add name=NAME")?,
                )?
            }
        };
        Ok(FileSpec {
            path,
            name,
            size,
            read_only,
            domain,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct MemorySpec {
    name: Name,
    size: u64,
}

impl MemorySpec {
    fn parse(text: &str) -> Result<MemorySpec, String> {
        let (name, size) = text
            .rsplit_once(",size=")
            .ok_or("no size given: use NAME,size=N")?;
        if let Some((_, option)) = size.split_once(',') {
            return Err(format!("'{option}' is no option of memory: use NAME,size=N"));
        }
        Ok(MemorySpec {
            name: parse_name(name)?,
            size: parse_positive(size)?,
        })
    }
}

/// Reads a size of at least a byte.
pub(super) fn parse_positive(text: &str) -> Result<u64, String> {
    parse_size(text)
        .filter(|bytes| (1..=i64::MAX as u64).contains(bytes))
        .ok_or_else(|| {
            format!("'{text}' is not a size: give bytes, at least 1, or a number with K, M, G or T")
        })
}

fn parse_name(text: &str) -> Result<Name, String> {
    Name::new(text).ok_or_else(|| "a region's name has 1 to 255 bytes and no control characters".into())
}

fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    parse_address(text, DEFAULT_PORT)
}

/// Reads one address of this host to listen on.
pub(super) fn parse_address(text: &str, default_port: u16) -> Result<SocketAddr, String> {
    let (host, port) = split_port(text).ok_or("give ADDR or ADDR:PORT, an IPv6 address in brackets")?;
    let host = if host == "localhost" { "127.0.0.1" } else { host };
    let address: IpAddr = host
        .parse()
        .map_err(|_| format!("'{host}' is not an IP address of this host"))?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(format!(
            "{address} is not one address: give each address to listen on with its own --listen"
        ));
    }
    Ok(SocketAddr::new(address, port.unwrap_or(default_port)))
}

fn parse_keepalive(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .filter(|seconds: &f64| (0.4..=3600.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give seconds, 0.4 to 3600".into())
}

pub(crate) fn run(args: Args) -> Result<()> {
    args.device.apply()?;
    if let Some(cpu) = args.cpu {
        pin(cpu)?;
    }
    let key = load_key(args.key.as_deref())?;
    let mut regions = Vec::new();
    for spec in args.files {
        let region = Region::file_in(spec.name, &spec.path, spec.size, spec.read_only, spec.domain)
            .context("cannot serve")?;
        if let Some(why) = region.not_mapped() {
            let _ = writeln!(
                std::io::stderr(),
                "rdmux: {} is on persistent memory but served as an ordinary file: {why}",
                spec.path.display()
            );
        }
        regions.push(if args.unsafe_no_flush {
            region.without_flush()
        } else {
            region
        });
    }
    for spec in args.memories {
        regions.push(Region::anonymous(spec.name, spec.size)?);
    }
    if args.unsafe_no_flush {
        let _ = writeln!(
            std::io::stderr(),
            "rdmux: WARNING: --unsafe-no-flush: flushes are acknowledged but NOT executed; nothing is durable"
        );
    }
    let server = Server::bind(server::Config {
        listen: args.listen.clone(),
        key,
        regions,
        keepalive: args.keepalive,
        break_timeout: args.break_timeout,
        mappings_max: server::MAPPINGS_MAX_DEFAULT,
        device: rdmux_verbs::Options {
            waiting: if args.poll { Some(WaitMode::Running) } else { None },
            ..Default::default()
        },
    })?;
    crate::metrics::show_server(server.metrics());
    let stopper = server.stopper();
    ctrlc::set_handler(move || stopper.stop()).context("cannot install signal handlers")?;
    for region in server.regions() {
        if server.reach(region) == Reach::Processor {
            let _ = writeln!(
                std::io::stderr(),
                "rdmux: region {}: an RNIC without on-demand paging cannot access files: clients send bytes by message, and this \
                 processor copies them; the server reports the cost at its end and with --metrics",
                region.name()
            );
        }
    }
    let metrics = server.metrics();
    output::say(&if args.json {
        describe_json(&args.listen, &server)
    } else {
        describe(&args.listen, &server)
    });
    // Does nothing unless systemd asked for it.
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        output::error(&anyhow::Error::new(error).context("cannot notify systemd that the server listens"));
    }
    server.run(|event| {
        if !args.quiet {
            let _ = writeln!(std::io::stderr(), "rdmux serve: {event}");
        }
    })?;
    let metrics = metrics.read();
    if let Some(per_gib) = metrics.message_cpu_seconds_per_gib() {
        let (bytes, seconds) = (metrics.message_bytes, metrics.message_cpu_ns as f64 * 1e-9);
        if args.json {
            let by_message =
                json!({ "bytes": bytes, "cpu_seconds": seconds, "cpu_seconds_per_gib": per_gib });
            output::say(&json!({ "by_message": by_message }).to_string());
        } else if !args.quiet {
            let _ = writeln!(
                std::io::stderr(),
                "rdmux serve: {bytes} bytes by message took {seconds:.3} s of processor time, {per_gib:.2} s a GiB"
            );
        }
    }
    Ok(())
}

fn reach_words(reach: Reach) -> &'static str {
    match reach {
        Reach::Direct => "direct",
        Reach::OnDemand => "on demand",
        Reach::Processor => "by message",
    }
}

/// Binds this process, and threads that it starts later, to one CPU.
pub(super) fn pin(cpu: usize) -> Result<()> {
    rdmux_verbs::thread::pin(cpu).map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => {
            anyhow!("cannot run on CPU {cpu}: the host has none, or keeps this process off it")
        }
        _ => anyhow!(error).context(format!("cannot run on CPU {cpu}")),
    })
}

/// Returns the key in a file, or the user's own.
pub(super) fn load_key(file: Option<&Path>) -> Result<Key> {
    Ok(match file {
        Some(file) => Key::load(file)?,
        None => Key::load_or_create()?,
    })
}

/// Names the durability that a flush of a region gives.
pub(super) fn domain_words(domain: Domain) -> &'static str {
    match domain {
        Domain::None => "none",
        Domain::File => "file",
        Domain::Adr => "ADR",
        Domain::Eadr => "eADR",
        Domain::WholeSystem => "whole system",
    }
}

fn flush_kinds(placement: Placement) -> Vec<&'static str> {
    let kinds = [(Placement::GLOBAL, "visible"), (Placement::PERSISTENT, "durable")];
    kinds
        .iter()
        .filter(|(kind, _)| placement.contains(*kind))
        .map(|(_, word)| *word)
        .collect()
}

fn way_words(ways: Ways) -> Vec<&'static str> {
    let words = [
        (Ways::FLUSH, "flush"),
        (Ways::SOFTWARE_FLUSH, "software flush"),
        (Ways::READ_AFTER_WRITE, "read after write"),
    ];
    words
        .iter()
        .filter(|(way, _)| ways.contains(*way))
        .map(|(_, word)| *word)
        .collect()
}

fn describe(listen: &[SocketAddr], server: &Server) -> String {
    let rows: Vec<Vec<String>> = server
        .regions()
        .iter()
        .map(|region| {
            let mut place = match region.place() {
                Place::File(path, kind) => format!("{} on {kind}", path.display()),
                Place::Dax(path, kind) => format!("{} on {kind}, mapped", path.display()),
                Place::DaxDevice(path) => format!("{}, mapped", path.display()),
                Place::BlockDevice(path) => format!("{}, a block device", path.display()),
                Place::Memory | Place::Other => "memory of this process".into(),
            };
            match region.sizing() {
                Some(Sizing::Created) => place += ", created",
                Some(Sizing::Grown { from }) => place += &format!(", grown from {from} bytes"),
                Some(Sizing::Kept) => place += ", size kept",
                None => {}
            }
            match server.reach(region) {
                Reach::Direct => {}
                other => place += &format!(", {}", reach_words(other)),
            }
            let mut flush = flush_kinds(region.placement()).join(", ");
            if region.read_only() {
                flush = "read-only".into();
            }
            vec![
                region.name().to_string(),
                region.bytes().to_string(),
                place,
                domain_words(region.domain()).into(),
                flush,
                match way_words(server.ways(region)).join(", ") {
                    none if none.is_empty() || region.read_only() => "-".into(),
                    words => words,
                },
            ]
        })
        .collect();
    let columns = [
        ("region", Align::Left),
        ("bytes", Align::Right),
        ("where", Align::Left),
        ("survives", Align::Left),
        ("flush", Align::Left),
        ("durable by", Align::Left),
    ];
    let mut text = output::table(&columns, &rows);
    for address in listen {
        text += &format!("\nlistening on rdmux://{address}");
    }
    text + "; end with Ctrl-C"
}

fn describe_json(listen: &[SocketAddr], server: &Server) -> String {
    let regions: Vec<_> = server
        .regions()
        .iter()
        .map(|region| {
            let (path, kind) = match region.place() {
                Place::File(path, kind) | Place::Dax(path, kind) => {
                    (Some(path.display().to_string()), Some(kind))
                }
                Place::DaxDevice(path) | Place::BlockDevice(path) => (Some(path.display().to_string()), None),
                Place::Memory | Place::Other => (None, None),
            };
            json!({
                "name": region.name().as_str(),
                "bytes": region.bytes(),
                "path": path,
                "file_system": kind,
                "domain": domain_words(region.domain()),
                "flush": flush_kinds(region.placement()),
                "durable_by": way_words(server.ways(region)),
                "read_only": region.read_only(),
                "direct": server.reach(region) != Reach::Processor,
                "reach": reach_words(server.reach(region)),
                "sizing": region.sizing().map(|sizing| match sizing {
                    Sizing::Created => "created",
                    Sizing::Grown { .. } => "grown",
                    Sizing::Kept => "kept",
                }),
                "mapped": matches!(region.place(), Place::Dax(..) | Place::DaxDevice(_)),
            })
        })
        .collect();
    let listen: Vec<String> = listen.iter().map(SocketAddr::to_string).collect();
    json!({ "listen": listen, "regions": regions }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, name: &str, size: Option<u64>, read_only: bool) -> FileSpec {
        FileSpec {
            path: path.into(),
            name: Name::new(name).unwrap(),
            size,
            read_only,
            domain: None,
        }
    }

    #[test]
    fn file_spec__each_form() {
        for (text, spec) in [
            ("/a/b.img", file("/a/b.img", "b.img", None, false)),
            ("b,size=1M", file("b", "b", Some(1 << 20), false)),
            ("b,ro,name=x y", file("b", "x y", None, true)),
            ("a,b,size=9,name=n", file("a,b", "n", Some(9), false)),
            ("d/a,rox", file("d/a,rox", "a,rox", None, false)),
        ] {
            assert_eq!(FileSpec::parse(text), Ok(spec), "{text}");
        }
        let spec = FileSpec::parse("/dev/dax0.0,domain=eadr").unwrap();
        assert_eq!((spec.name.as_str(), spec.domain), ("dax0.0", Some(Domain::Eadr)));
        for text in [
            "a,domain=file",
            "",
            "/",
            "a,size=0",
            "a,size=x",
            "a,name=",
            "a,ro,size=1",
            "a,siz=1M",
            "a,nam=x,ro",
        ] {
            assert!(FileSpec::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn memory_spec__needs_name_and_size() {
        let spec = MemorySpec::parse("a,b,size=64K").unwrap();
        assert_eq!((spec.name.as_str(), spec.size), ("a,b", 65536));
        for text in [
            "a",
            "a,size=1M,foo=1",
            ",size=1",
            "a,size=",
            "a,size=0",
            "a,size=16777216T",
        ] {
            assert!(MemorySpec::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn parse_listen__addresses_and_ports() {
        for (text, address) in [
            ("127.0.0.1", "127.0.0.1:7174"),
            ("localhost:80", "127.0.0.1:80"),
            ("[::1]:7175", "[::1]:7175"),
            ("::1", "[::1]:7174"),
        ] {
            assert_eq!(parse_listen(text), Ok(address.parse().unwrap()), "{text}");
        }
        for text in [
            "",
            "0.0.0.0",
            "[::]",
            "host",
            "1.2.3.4:0",
            "1.2.3.4:x",
            "224.0.0.1",
        ] {
            assert!(parse_listen(text).is_err(), "{text}");
        }
    }
}

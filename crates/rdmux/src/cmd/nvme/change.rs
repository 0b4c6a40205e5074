//! `rdmux nvme ns`, `host`, `listener` and `referral`: show and change a target that runs, by requests to its socket.

use std::path::{Path, PathBuf, absolute};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use rdmux_nvmf::control::config::{NamespaceConfig, Storage, parse_in_capsule, parse_listener, parse_nqn};
use rdmux_nvmf::control::rpc::{call, sockets};
use rdmux_nvmf::target::{Listener, Rates};
use rdmux_push::parse_size;
use rdmux_wire::nvme::{Nqn, TransportKind};
use serde_json::{Value, json};

use crate::output::{self, Align};

/// The target and its subsystem.
#[derive(clap::Args, Debug)]
pub(crate) struct At {
    /// Socket of the target [default: that of the one target of this user that runs].
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Subsystem of the target [default: its only one].
    #[arg(long, value_name = "NQN", value_parser = parse_nqn)]
    nqn: Option<Nqn>,
    /// Print the result in JSON.
    #[arg(long)]
    pub(super) json: bool,
}

/// Show and change the namespaces of a target that runs.
#[derive(clap::Args, Debug)]
pub(crate) struct NamespaceArgs {
    #[command(subcommand)]
    command: NamespaceCommand,
}

#[derive(Subcommand, Debug)]
enum NamespaceCommand {
    /// List the namespaces.
    #[command(
        after_help = "JSON: an array of nqn, namespaces (array of nsid, name: memory, null or the path, uuid, bytes, block_bytes, read_only, ana_group)."
    )]
    List(At),
    /// Export another file or block device, or memory. Hosts are told.
    #[command(after_help = "JSON: result (the id of the namespace).")]
    Add {
        /// The storage, as for `rdmux nvme target --ns`.
        #[arg(value_name = "PATH|mem:SIZE|null:SIZE[,block=N][,ro][,uuid=UUID][,ana=GROUP]")]
        namespace: NamespaceConfig,
        /// Id of the namespace [default: the lowest that is free].
        #[arg(long, value_name = "N")]
        nsid: Option<u32>,
        #[command(flatten)]
        at: At,
    },
    /// Export a namespace no more. Commands that the target has begun are carried out; hosts are told.
    #[command(after_help = "JSON: result (true).")]
    Remove {
        /// Id of the namespace.
        nsid: u32,
        #[command(flatten)]
        at: At,
    },
    /// Take the size that the file has now. Hosts are told.
    #[command(after_help = "JSON: result (true if it is another one).")]
    Resize {
        /// Id of the namespace.
        nsid: u32,
        #[command(flatten)]
        at: At,
    },
}

/// Show and change who may use a target that runs.
#[derive(clap::Args, Debug)]
pub(crate) struct HostArgs {
    #[command(subcommand)]
    command: HostCommand,
}

#[derive(Subcommand, Debug)]
enum HostCommand {
    /// List the hosts that have terms of their own.
    #[command(
        after_help = "JSON: an array of nqn, hosts (array of nqn, secret and psk: its files or null, queues, iops and bandwidth: numbers or null)."
    )]
    List(At),
    /// Let a host in, or change its terms.
    #[command(after_help = "JSON: result (true).")]
    Add {
        /// Name of the host.
        #[arg(value_name = "HOSTNQN", value_parser = parse_nqn)]
        host: Nqn,
        /// File with its secret [default: the subsystem's].
        #[arg(long, value_name = "FILE")]
        secret: Option<PathBuf>,
        /// File with its key of TLS [default: the subsystem's].
        #[arg(long, value_name = "FILE")]
        psk: Option<PathBuf>,
        /// Maximum number of I/O queues of each of its controllers [default: the target's].
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
        queues: Option<u16>,
        /// I/O commands a second, at least 100, over all of its controllers [default: any number].
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(Rates::IOS_MIN..))]
        iops: Option<u64>,
        /// Bytes a second, at least 1M, over all of its controllers [default: any number].
        #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth)]
        bandwidth: Option<u64>,
        #[command(flatten)]
        at: At,
    },
    /// Take a host off the list; its controllers end, unless other hosts may use the subsystem on the same terms.
    #[command(after_help = "JSON: result (true).")]
    Remove {
        /// Name of the host.
        #[arg(value_name = "HOSTNQN", value_parser = parse_nqn)]
        host: Nqn,
        #[command(flatten)]
        at: At,
    },
    /// Change how hosts are treated that are not in the list. Controllers of those that may no more end.
    #[command(after_help = "JSON: result (true).")]
    Others {
        /// They need the secret of the subsystem, need none, or are refused.
        #[arg(value_name = "secret|any|none", value_parser = ["secret", "any", "none"])]
        others: String,
        #[command(flatten)]
        at: At,
    },
}

/// Show and change the addresses on which a target listens.
#[derive(clap::Args, Debug)]
pub(crate) struct ListenerArgs {
    #[command(subcommand)]
    command: ListenerCommand,
}

#[derive(Subcommand, Debug)]
enum ListenerCommand {
    /// List the addresses.
    #[command(
        after_help = "JSON: an array of trtype, adrfam, traddr, trsvcid, in_capsule_data_size (bytes), secure_channel (true: TLS)."
    )]
    List(At),
    /// Listen on another address.
    #[command(after_help = "JSON: result (trtype, adrfam, traddr, trsvcid).")]
    Add {
        /// The address.
        #[arg(value_name = "tcp|rdma:ADDR[:PORT]", value_parser = parse_listener)]
        listener: Listener,
        /// Bytes of data that come with a write, in its capsule, before they are asked for: a multiple of 16, at most 16K [default: 16K by TCP, 4K by RDMA].
        #[arg(long, value_name = "BYTES", value_parser = parse_in_capsule)]
        in_capsule_bytes: Option<u32>,
        /// Require TLS 1.3, by TCP alone.
        #[arg(long)]
        tls: bool,
        #[command(flatten)]
        at: At,
    },
    /// Listen no more on an address. Hosts that have come by it stay.
    #[command(after_help = "JSON: result (true).")]
    Remove {
        /// The address.
        #[arg(value_name = "tcp|rdma:ADDR[:PORT]", value_parser = parse_listener)]
        listener: Listener,
        #[command(flatten)]
        at: At,
    },
}

/// Show and change the other discovery services to which a target refers hosts.
#[derive(clap::Args, Debug)]
pub(crate) struct ReferralArgs {
    #[command(subcommand)]
    command: ReferralCommand,
}

#[derive(Subcommand, Debug)]
enum ReferralCommand {
    /// List the referrals.
    #[command(
        after_help = "JSON: an array of address (trtype, adrfam, traddr, trsvcid), subnqn, secure_channel."
    )]
    List(At),
    /// Refer hosts to another discovery service, or on other terms than before. Hosts that have asked for it are told.
    #[command(after_help = "JSON: result (true).")]
    Add {
        #[command(flatten)]
        to: Referred,
        /// Connections to it need TLS.
        #[arg(long)]
        secure: bool,
        #[command(flatten)]
        at: At,
    },
    /// Refer hosts there no more. Hosts that have asked for it are told.
    #[command(after_help = "JSON: result (true).")]
    Remove {
        #[command(flatten)]
        to: Referred,
        #[command(flatten)]
        at: At,
    },
}

/// Another discovery service.
#[derive(clap::Args, Debug)]
struct Referred {
    /// Its address.
    #[arg(value_name = "tcp|rdma:ADDR[:PORT]", value_parser = parse_listener)]
    address: Listener,
    /// Its name, if it has one of its own [default: the name that discovery services have].
    #[arg(long, value_name = "NQN", value_parser = parse_nqn)]
    subnqn: Option<Nqn>,
}

impl Referred {
    fn params(&self) -> Value {
        let mut params = json!({ "address": listen_address(&self.address) });
        if let Some(nqn) = &self.subnqn {
            params["subnqn"] = nqn.as_str().into();
        }
        params
    }
}

impl At {
    /// Returns the socket of the target.
    fn socket(&self) -> Result<PathBuf> {
        if let Some(path) = &self.socket {
            return Ok(path.clone());
        }
        let found =
            sockets().context("no folder with the sockets of targets: give one with --socket PATH")?;
        match &found[..] {
            [only] => Ok(only.clone()),
            [] => bail!(
                "no target of this user runs: start one with rdmux nvme target, or give its socket with --socket PATH"
            ),
            several => {
                let paths: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
                bail!(
                    "several targets run: choose one with --socket: {}",
                    paths.join(", ")
                )
            }
        }
    }

    pub(super) fn call(&self, method: &str, mut params: Value) -> Result<Value> {
        let is_of_target = method.starts_with("nvmf_target") || method.starts_with("nvmf_discovery");
        if is_of_target && self.nqn.is_some() {
            bail!("that is for all subsystems of the target: leave --nqn out");
        }
        if let Some(nqn) = &self.nqn {
            params["nqn"] = nqn.as_str().into();
        }
        Ok(call(&self.socket()?, method, params)?)
    }

    /// Prints the list that a method returns, a row for each of its items.
    fn tabulate(
        &self,
        method: &str,
        columns: &[(&str, Align)],
        row: impl FnMut(&Value) -> Vec<String>,
    ) -> Result<()> {
        let listed = self.call(method, json!({}))?;
        output::say(&if self.json {
            listed.to_string()
        } else {
            let rows: Vec<_> = listed.as_array().into_iter().flatten().map(row).collect();
            output::table(columns, &rows)
        });
        Ok(())
    }

    /// Carries a change out, and says what was done.
    pub(super) fn change(
        &self,
        method: &str,
        params: Value,
        words: impl FnOnce(&Value) -> String,
    ) -> Result<()> {
        let result = self.call(method, params)?;
        output::say(&if self.json {
            json!({ "result": result }).to_string()
        } else {
            words(&result)
        });
        Ok(())
    }

    /// Returns the subsystems, or the one that was named.
    pub(super) fn subsystems(&self) -> Result<Vec<Value>> {
        let listed = call(&self.socket()?, "nvmf_get_subsystems", json!({}))?;
        let Value::Array(mut listed) = listed else {
            bail!("the target gives no list of subsystems");
        };
        if let Some(nqn) = &self.nqn {
            listed.retain(|subsystem| subsystem["nqn"] == nqn.as_str());
            if listed.is_empty() {
                bail!("there is no subsystem {nqn}");
            }
        }
        Ok(listed)
    }

    /// Shows a part of each subsystem.
    fn list(&self, part: &str, table: impl Fn(&[Value]) -> String) -> Result<()> {
        let subsystems = self.subsystems()?;
        if self.json {
            let parts = subsystems
                .iter()
                .map(|subsystem| json!({ "nqn": subsystem["nqn"], part: subsystem[part] }));
            output::say(&parts.collect::<Value>().to_string());
            return Ok(());
        }
        for subsystem in &subsystems {
            if subsystems.len() > 1 {
                output::say(&format!("{}:", text(&subsystem["nqn"])));
            }
            output::say(&table(subsystem[part].as_array().map_or(&[], |array| array)));
        }
        Ok(())
    }
}

pub(super) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".into(),
        other => other.to_string(),
    }
}

fn bytes(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".into(), output::bytes)
}

pub(crate) fn namespaces(args: &NamespaceArgs) -> Result<()> {
    match &args.command {
        NamespaceCommand::List(at) => at.list("namespaces", |namespaces| {
            let rows: Vec<_> = namespaces
                .iter()
                .map(|namespace| {
                    let is_read_only = namespace["read_only"] == true;
                    let access = if is_read_only { ", read-only" } else { "" };
                    vec![
                        text(&namespace["nsid"]),
                        bytes(&namespace["bytes"]),
                        bytes(&namespace["block_bytes"]),
                        text(&namespace["uuid"]),
                        format!("{}{access}", text(&namespace["name"])),
                    ]
                })
                .collect();
            let columns = [
                ("namespace", Align::Right),
                ("size", Align::Right),
                ("block", Align::Right),
                ("uuid", Align::Left),
                ("of", Align::Left),
            ];
            output::table(&columns, &rows)
        }),
        NamespaceCommand::Add { namespace, nsid, at } => {
            let mut namespace = namespace.clone();
            // The target may run in another folder.
            if let Storage::File(path) = &mut namespace.storage {
                *path = resolve(path)?;
            }
            let mut params = namespace.to_json();
            if let Some(nsid) = nsid {
                params["nsid"] = (*nsid).into();
            }
            at.change("nvmf_subsystem_add_ns", json!({ "namespace": params }), |nsid| {
                format!("namespace {nsid} is exported")
            })
        }
        NamespaceCommand::Remove { nsid, at } => {
            at.change("nvmf_subsystem_remove_ns", json!({ "nsid": nsid }), |_| {
                format!("namespace {nsid} is exported no more")
            })
        }
        NamespaceCommand::Resize { nsid, at } => at.change(
            "nvmf_subsystem_resize_ns",
            json!({ "nsid": nsid }),
            |is_resized| match is_resized.as_bool() {
                Some(true) => format!("namespace {nsid} has the size of its file"),
                _ => format!("namespace {nsid} had the size of its file"),
            },
        ),
    }
}

fn parse_bandwidth(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).filter(|bytes| *bytes >= Rates::BYTES_MIN);
    bytes.ok_or_else(|| "give bytes a second, at least 1M, with or without K, M or G".into())
}

pub(crate) fn hosts(args: &HostArgs) -> Result<()> {
    match &args.command {
        HostCommand::List(at) => at.list("hosts", |hosts| {
            let rows: Vec<_> = hosts
                .iter()
                .map(|host| {
                    ["nqn", "queues", "iops", "bandwidth", "secret", "psk"]
                        .map(|key| text(&host[key]))
                        .into()
                })
                .collect();
            let columns = [
                ("host", Align::Left),
                ("queues", Align::Right),
                ("IOPS", Align::Right),
                ("bytes/s", Align::Right),
                ("secret", Align::Left),
                ("key of TLS", Align::Left),
            ];
            output::table(&columns, &rows)
        }),
        HostCommand::Add {
            host,
            secret,
            psk,
            queues,
            iops,
            bandwidth,
            at,
        } => {
            let secret = secret.as_deref().map(resolve).transpose()?;
            let psk = psk.as_deref().map(resolve).transpose()?;
            let params = json!({
                "host": host.as_str(),
                "secret": secret,
                "psk": psk,
                "queues": queues,
                "iops": iops,
                "bandwidth": bandwidth,
            });
            at.change("nvmf_subsystem_add_host", params, |_| {
                format!("{host} may use it")
            })
        }
        HostCommand::Remove { host, at } => at.change(
            "nvmf_subsystem_remove_host",
            json!({ "host": host.as_str() }),
            |_| format!("{host} is off the list"),
        ),
        HostCommand::Others { others, at } => {
            let params = json!({ "other_hosts": others });
            at.change("nvmf_subsystem_set_other_hosts", params, |_| {
                let may = match others.as_str() {
                    "secret" => "needs the secret",
                    "any" => "may use it without a secret",
                    _ => "is refused",
                };
                format!("a host that is not in the list {may}")
            })
        }
    }
}

/// Returns the word for the channel of a listener or a referral.
fn channel(of: &Value) -> String {
    match of["secure_channel"] == true {
        true => "TLS".to_owned(),
        false => "-".to_owned(),
    }
}

pub(crate) fn listeners(args: &ListenerArgs) -> Result<()> {
    match &args.command {
        ListenerCommand::List(at) => {
            let columns = [
                ("transport", Align::Left),
                ("address", Align::Left),
                ("port", Align::Right),
                ("in capsule", Align::Right),
                ("channel", Align::Left),
            ];
            at.tabulate("nvmf_target_get_listeners", &columns, |listener| {
                let mut row = address(listener);
                row.push(bytes(&listener["in_capsule_data_size"]));
                row.push(channel(listener));
                row
            })
        }
        ListenerCommand::Add {
            listener,
            in_capsule_bytes,
            tls,
            at,
        } => {
            let mut params = json!({ "listen_address": listen_address(listener), "secure_channel": tls });
            if let Some(bytes) = in_capsule_bytes {
                params["in_capsule_data_size"] = (*bytes).into();
            }
            at.change("nvmf_target_add_listener", params, |added| {
                format!(
                    "listening on {} port {}",
                    text(&added["traddr"]),
                    text(&added["trsvcid"])
                )
            })
        }
        ListenerCommand::Remove { listener, at } => {
            let params = json!({ "listen_address": listen_address(listener) });
            at.change("nvmf_target_remove_listener", params, |_| {
                format!("listening no more on {listener}")
            })
        }
    }
}

pub(crate) fn referrals(args: &ReferralArgs) -> Result<()> {
    match &args.command {
        ReferralCommand::List(at) => {
            let columns = [
                ("transport", Align::Left),
                ("address", Align::Left),
                ("port", Align::Right),
                ("channel", Align::Left),
                ("name", Align::Left),
            ];
            at.tabulate("nvmf_discovery_get_referrals", &columns, |referral| {
                let mut row = address(&referral["address"]);
                row.push(channel(referral));
                row.push(text(&referral["subnqn"]));
                row
            })
        }
        ReferralCommand::Add { to, secure, at } => {
            let mut params = to.params();
            params["secure_channel"] = (*secure).into();
            at.change("nvmf_discovery_add_referral", params, |_| {
                format!("hosts are referred to {}", to.address)
            })
        }
        ReferralCommand::Remove { to, at } => {
            at.change("nvmf_discovery_remove_referral", to.params(), |_| {
                format!("hosts are referred no more to {}", to.address)
            })
        }
    }
}

/// Returns transport, address and port for a table.
fn address(listed: &Value) -> Vec<String> {
    let transport = text(&listed["trtype"]).to_lowercase();
    vec![transport, text(&listed["traddr"]), text(&listed["trsvcid"])]
}

pub(super) fn listen_address(listener: &Listener) -> Value {
    let transport = match listener.transport {
        TransportKind::Tcp => "TCP",
        TransportKind::Rdma => "RDMA",
    };
    json!({
        "trtype": transport,
        "traddr": listener.address.ip().to_string(),
        "trsvcid": listener.address.port().to_string(),
    })
}

fn resolve(path: &Path) -> Result<PathBuf> {
    absolute(path).with_context(|| format!("no path of {}", path.display()))
}

//! `rdmux nvme ns`, `host`, `listener` and `referral`: show and change a target that runs, by requests to its socket.

use std::path::{Path, PathBuf, absolute};

use anyhow::{Context, Result, anyhow, bail};
use clap::Subcommand;
use rdmux_nvmf::control::config::{NamespaceConfig, Storage, parse_in_capsule, parse_listener, parse_nqn};
use rdmux_nvmf::control::rpc::{ANSWER_MAX, call, names, sockets};
use rdmux_nvmf::target::{Listener, Rates};
use rdmux_push::parse_size;
use rdmux_wire::nvme::{Nqn, NsId, TransportKind};
use serde_json::{Value, json};

use super::host::parse_nsid;
use crate::output::{self, Align};

/// The target and its subsystem.
#[derive(clap::Args, Debug)]
pub(crate) struct At {
    /// Socket of the target [default: that of the one target of this user that runs, or serves the subsystem].
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
        #[arg(value_name = "PATH|mem:SIZE|null:SIZE|pcie:ADDR[,block=N][,ro][,uuid=UUID][,ana=GROUP]")]
        namespace: NamespaceConfig,
        /// Id of the namespace [default: the lowest that is free].
        #[arg(long, value_name = "N", value_parser = parse_nsid)]
        nsid: Option<NsId>,
        #[command(flatten)]
        at: At,
    },
    /// Export a namespace no more. Commands that the target has begun are carried out; hosts are told.
    #[command(after_help = "JSON: result (true).")]
    Remove {
        /// Id of the namespace.
        #[arg(value_parser = parse_nsid)]
        nsid: NsId,
        #[command(flatten)]
        at: At,
    },
    /// Take the size that the file has now. Hosts are told.
    #[command(after_help = "JSON: result (true if it is another one).")]
    Resize {
        /// Id of the namespace.
        #[arg(value_parser = parse_nsid)]
        nsid: NsId,
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
        after_help = "JSON: an array of nqn, hosts (array of nqn, secret and psk: its files, or null: the subsystem's, queues, iops and bandwidth: numbers or null), other_hosts (secret: they need the subsystem's, any, or none: they are refused)."
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
        #[arg(long, value_name = "N", value_parser = parse_iops)]
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
            several => self.choose(several),
        }
    }

    /// Returns the socket of the target that serves the subsystem which was named.
    fn choose(&self, sockets: &[PathBuf]) -> Result<PathBuf> {
        let ask = |path: PathBuf| {
            let served = names(&path, ANSWER_MAX).map_err(|error| error.to_string());
            (path, served)
        };
        // One that does not answer holds up none of the others.
        let targets: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> = sockets
                .iter()
                .map(|path| scope.spawn(|| ask(path.clone())))
                .collect();
            asked
                .into_iter()
                .filter_map(|thread| thread.join().ok())
                .collect()
        });
        let serves = |served: &Result<Vec<String>, String>| {
            let is_named = |name: &String| self.nqn.as_ref().is_some_and(|nqn| nqn.as_str() == name);
            served.as_ref().is_ok_and(|names| names.iter().any(is_named))
        };
        let serving: Vec<_> = targets.iter().filter(|(_, served)| serves(served)).collect();
        if let [(path, _)] = &serving[..] {
            return Ok(path.clone());
        }
        let what = match &self.nqn {
            Some(nqn) if serving.is_empty() => format!("no target that answers serves {nqn}"),
            Some(nqn) => format!("several targets serve {nqn}"),
            None => "several targets run".to_owned(),
        };
        let described: Vec<_> = targets
            .iter()
            .map(|(path, served)| {
                let served = served.as_ref().map(|names| names.join(" and "));
                format!(
                    "{} ({})",
                    path.display(),
                    served.unwrap_or_else(|_| "does not answer".into())
                )
            })
            .collect();
        bail!("{what}: choose one with --socket: {}", described.join(", "))
    }

    pub(super) fn call(&self, method: &str, mut params: Value) -> Result<Value> {
        let is_of_target = method.starts_with("nvmf_target") || method.starts_with("nvmf_discovery");
        if is_of_target && self.nqn.is_some() {
            bail!("that is for all subsystems of the target: leave --nqn out");
        }
        if let Some(nqn) = &self.nqn {
            params["nqn"] = nqn.as_str().into();
        }
        Ok(call(&self.socket()?, method, params, ANSWER_MAX)?)
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
        let listed = call(&self.socket()?, "nvmf_get_subsystems", json!({}), ANSWER_MAX)?;
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

    /// Returns the size of a namespace, if it is known which one that is.
    fn size_of(&self, nsid: NsId) -> Option<String> {
        let subsystems = self.subsystems().ok()?;
        let [subsystem] = &subsystems[..] else {
            return None;
        };
        let mut namespaces = subsystem["namespaces"].as_array()?.iter();
        let namespace = namespaces.find(|namespace| namespace["nsid"] == nsid.0)?;
        Some(bytes(&namespace["bytes"]))
    }

    /// Shows parts of each subsystem.
    fn list(&self, parts: &[&str], shown: impl Fn(&Value) -> String) -> Result<()> {
        let subsystems = self.subsystems()?;
        if self.json {
            let all = subsystems.iter().map(|subsystem| {
                let mut json = json!({ "nqn": subsystem["nqn"] });
                for part in parts {
                    json[part] = subsystem[part].clone();
                }
                json
            });
            output::say(&all.collect::<Value>().to_string());
            return Ok(());
        }
        for subsystem in &subsystems {
            if subsystems.len() > 1 {
                output::say(&format!("{}:", text(&subsystem["nqn"])));
            }
            output::say(&shown(subsystem));
        }
        Ok(())
    }
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
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
        NamespaceCommand::List(at) => at.list(&["namespaces"], |subsystem| {
            let rows: Vec<_> = items(&subsystem["namespaces"])
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
            warn_of_memory(namespace);
            let mut namespace = namespace.clone();
            // The target may run in another folder.
            if let Storage::File(path) = &mut namespace.storage {
                *path = resolve(path)?;
            }
            let mut params = namespace.to_json();
            if let Some(nsid) = nsid {
                params["nsid"] = nsid.0.into();
            }
            at.change("nvmf_subsystem_add_ns", json!({ "namespace": params }), |nsid| {
                format!("namespace {nsid} is exported")
            })
        }
        NamespaceCommand::Remove { nsid, at } => {
            at.change("nvmf_subsystem_remove_ns", json!({ "nsid": nsid.0 }), |_| {
                format!("namespace {nsid} is exported no more")
            })
        }
        NamespaceCommand::Resize { nsid, at } => {
            let params = json!({ "nsid": nsid.0 });
            at.change("nvmf_subsystem_resize_ns", params, |is_resized| {
                let has = match is_resized.as_bool() {
                    Some(true) => "has",
                    _ => "had",
                };
                let size = at
                    .size_of(*nsid)
                    .map_or_else(String::new, |size| format!(", {size}"));
                format!("namespace {nsid} {has} the size of its file{size}")
            })
        }
    }
}

fn parse_iops(text: &str) -> Result<u64, String> {
    let ios = text.parse().ok().filter(|ios| *ios >= Rates::IOS_MIN);
    ios.ok_or_else(|| format!("give I/Os a second, at least {}", Rates::IOS_MIN))
}

fn parse_bandwidth(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).filter(|bytes| *bytes >= Rates::BYTES_MIN);
    bytes.ok_or_else(|| "give bytes a second, at least 1M, with or without K, M or G".into())
}

pub(crate) fn hosts(args: &HostArgs) -> Result<()> {
    match &args.command {
        HostCommand::List(at) => at.list(&["hosts", "other_hosts"], |subsystem| {
            let rows: Vec<_> = items(&subsystem["hosts"])
                .map(|host| {
                    let file = |key| match host[key].is_null() && !subsystem[key].is_null() {
                        true => "common".to_owned(),
                        false => text(&host[key]),
                    };
                    let mut row = ["nqn", "queues", "iops", "bandwidth"]
                        .map(|key| text(&host[key]))
                        .to_vec();
                    row.extend(["secret", "psk"].map(file));
                    row
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
            let others = match subsystem["other_hosts"].as_str() {
                Some("any") => "any may use it, without a secret",
                Some("none") => "refused",
                _ => "need the secret",
            };
            format!("{}\nothers: {others}", output::table(&columns, &rows))
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

/// Writes a warning to stderr if a namespace has more memory than this host.
pub(super) fn warn_of_memory(namespace: &NamespaceConfig) {
    let Storage::Memory(bytes) = namespace.storage else {
        return;
    };
    let system = rustix::system::sysinfo();
    let total = (system.totalram as u64).saturating_mul(system.mem_unit.into());
    if bytes > total {
        output::error(&anyhow!(
            "warning: a namespace of {} in memory is more than this host has, {}: the target ends when hosts have written so much",
            output::bytes(bytes),
            output::bytes(total)
        ));
    }
}

fn resolve(path: &Path) -> Result<PathBuf> {
    absolute(path).with_context(|| format!("no path of {}", path.display()))
}

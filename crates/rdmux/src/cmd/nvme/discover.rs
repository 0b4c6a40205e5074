//! `rdmux nvme discover`: what a target offers.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use rdmux_nvmf::host::{Controller, DiscoveryLog, Transport, Url};
use rdmux_wire::nvme::{DISCOVERY_NQN, DiscoveryEntry, Nqn, SubsystemKind, TransportKind};
use serde_json::{Value, json};

use super::host::HostArgs;
use crate::output::{self, Align};

/// Discovery services that are asked because others refer to them, and those of one of them that are believed.
const REFERRED_MAX: usize = 64;

/// List the subsystems that a target offers.
///
/// The default port is 4420, where rdmux and Linux serve discovery beside their namespaces; central discovery services listen on 8009.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: generation, entries (array of kind: subsystem, discovery or referral; transport, address, port, subsystem, secure_channel; or of unreadable: the reason); with --follow
referred (array of url, and generation and entries, or unreachable: the reason).")]
pub(crate) struct Args {
    /// The target: nvme+tcp://HOST[:PORT] or nvme+rdma://HOST[:PORT].
    #[arg(value_name = "URL")]
    url: Url,
    /// Ask the discovery services to which it refers as well, and those to which they do.
    #[arg(long)]
    follow: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

fn kind(entry: &DiscoveryEntry) -> &'static str {
    match entry.kind {
        SubsystemKind::Referral => "referral",
        SubsystemKind::Nvm => "subsystem",
        SubsystemKind::Discovery => "discovery",
    }
}

fn transport(entry: &DiscoveryEntry) -> &'static str {
    match entry.transport {
        TransportKind::Rdma => "rdma",
        TransportKind::Tcp => "tcp",
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    let discovery = Nqn::new(DISCOVERY_NQN).expect("the name is valid");
    ensure!(
        args.url
            .subsystem
            .as_ref()
            .is_none_or(|given| *given == discovery),
        "{}: give nvme+tcp://HOST[:PORT] or nvme+rdma://HOST[:PORT], without a subsystem: `rdmux nvme list` shows what is in one",
        args.url
    );
    let read = |url: &Url| -> Result<DiscoveryLog> {
        let options = args.host.options(url, &discovery)?;
        Ok(Controller::connect(&Arc::new(options), 0)?.discovery_log()?)
    };
    let log = read(&args.url)?;
    let mut referred = Vec::new();
    if args.follow {
        follow(&log, &mut referred, read);
    }
    if args.json {
        let mut json = log_json(&log);
        if args.follow {
            let referred = referred.iter().map(|(url, log)| {
                let mut json = match log {
                    Ok(log) => log_json(log),
                    Err(why) => json!({ "unreachable": output::reason(why) }),
                };
                json["url"] = url.to_string().into();
                json
            });
            json["referred"] = referred.collect();
        }
        output::say(&format!("{json:#}"));
        return Ok(());
    }
    output::say(&table(&log));
    for (url, log) in &referred {
        match log {
            Ok(log) => output::say(&format!("\n{url}:\n{}", table(log))),
            Err(why) => output::error(&anyhow!("{url}: {}", output::reason(why))),
        }
    }
    Ok(())
}

/// Asks the discovery services to which a log refers, and those to which they refer, each once. One that does not answer does not end the search.
fn follow(
    log: &DiscoveryLog,
    referred: &mut Vec<(Url, Result<DiscoveryLog>)>,
    read: impl Fn(&Url) -> Result<DiscoveryLog>,
) {
    fn places(log: &DiscoveryLog, kind: SubsystemKind) -> impl Iterator<Item = (TransportKind, SocketAddr)> {
        let of_kind = log
            .entries
            .iter()
            .flatten()
            .filter(move |entry| entry.kind == kind);
        of_kind
            .map(|entry| (entry.transport, entry.address))
            .take(REFERRED_MAX)
    }
    // A service names its own ways too, by which it would be asked again.
    let mut known: Vec<_> = places(log, SubsystemKind::Discovery).collect();
    let mut waiting: VecDeque<_> = places(log, SubsystemKind::Referral).collect();
    while let Some(place) = waiting.pop_front() {
        if known.contains(&place) {
            continue;
        }
        if referred.len() == REFERRED_MAX {
            return;
        }
        known.push(place);
        let (transport, address) = place;
        let url = Url {
            transport: match transport {
                TransportKind::Tcp => Transport::Tcp,
                TransportKind::Rdma => Transport::Rdma,
            },
            host: address.ip().to_string(),
            port: address.port(),
            subsystem: None,
        };
        let log = read(&url);
        if let Ok(log) = &log {
            known.extend(places(log, SubsystemKind::Discovery));
            waiting.extend(places(log, SubsystemKind::Referral));
        }
        referred.push((url, log));
    }
}

fn log_json(log: &DiscoveryLog) -> Value {
    let entries = log.entries.iter().map(|entry| match entry {
        Ok(entry) => json!({
            "kind": kind(entry),
            "transport": transport(entry),
            "address": entry.address.ip().to_string(),
            "port": entry.address.port(),
            "subsystem": entry.subsystem.as_str(),
            "secure_channel": entry.is_secure,
        }),
        Err(why) => json!({ "unreadable": why.to_string() }),
    });
    json!({ "generation": log.generation, "entries": entries.collect::<Vec<_>>() })
}

fn table(log: &DiscoveryLog) -> String {
    let rows: Vec<_> = log
        .entries
        .iter()
        .map(|entry| match entry {
            Ok(entry) => vec![
                kind(entry).to_owned(),
                transport(entry).to_owned(),
                entry.address.to_string(),
                if entry.is_secure { "TLS" } else { "-" }.to_owned(),
                entry.subsystem.to_string(),
            ],
            Err(why) => vec![
                "unreadable".to_owned(),
                "-".to_owned(),
                "-".to_owned(),
                "-".to_owned(),
                why.to_string(),
            ],
        })
        .collect();
    let columns = ["kind", "transport", "address", "channel", "subsystem"].map(|title| (title, Align::Left));
    output::table(&columns, &rows)
}

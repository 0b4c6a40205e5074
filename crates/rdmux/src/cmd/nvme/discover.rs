//! `rdmux nvme discover`: what a target offers.

use std::sync::Arc;

use anyhow::{Result, ensure};
use rdmux_nvmf::host::{Controller, Url};
use rdmux_wire::nvme::{DISCOVERY_NQN, DiscoveryEntry, Nqn, SubsystemKind, TransportKind};
use serde_json::json;

use super::host::HostArgs;
use crate::output::{self, Align};

/// List the subsystems that a target offers.
///
/// The default port is 4420, where rdmux and Linux serve discovery beside their namespaces; central discovery services listen on 8009.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: one object: generation, entries (array of kind: subsystem, discovery or referral; transport, address, port, subsystem, secure_channel; or of unreadable: the reason).")]
pub(crate) struct Args {
    /// The target: nvme+tcp://HOST[:PORT] or nvme+rdma://HOST[:PORT].
    #[arg(value_name = "URL")]
    url: Url,
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
    let options = args.host.options(&args.url, &discovery)?;
    let controller = Controller::connect(&Arc::new(options), 0)?;
    let log = controller.discovery_log()?;
    if args.json {
        let entries: Vec<_> = log
            .entries
            .iter()
            .map(|entry| match entry {
                Ok(entry) => json!({
                    "kind": kind(entry),
                    "transport": transport(entry),
                    "address": entry.address.ip().to_string(),
                    "port": entry.address.port(),
                    "subsystem": entry.subsystem.as_str(),
                    "secure_channel": entry.is_secure,
                }),
                Err(why) => json!({ "unreadable": why.to_string() }),
            })
            .collect();
        output::say(&format!(
            "{:#}",
            json!({ "generation": log.generation, "entries": entries })
        ));
        return Ok(());
    }
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
    output::say(&output::table(&columns, &rows));
    Ok(())
}

//! `rdmux nvme ana`: shows and changes by which ways hosts reach the namespaces of a target that runs.

use anyhow::Result;
use clap::Subcommand;
use rdmux_nvmf::control::config::{ana_state_name, parse_ana_state, parse_listener};
use rdmux_nvmf::target::Listener;
use rdmux_wire::nvme::{AnaState, NsId};
use serde_json::{Value, json};

use super::change::{At, listen_address, text};
use super::host::parse_nsid;
use crate::output::{self, Align};

/// Show and change by which ways hosts reach the namespaces of a target that runs (asymmetric namespace access, ANA).
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the states of access to the groups of namespaces, by listener.
    #[command(
        after_help = "JSON: an array of nqn, listeners (array of address: trtype, adrfam, traddr, trsvcid, ana_states: array of ana_group, ana_state, namespaces)."
    )]
    List(At),
    /// Change the state of access by a listener, or by all. Hosts are told, and their I/O takes other ways or waits. A later change replaces earlier ones
    /// wherever it applies.
    #[command(after_help = "JSON: result (true).")]
    Set {
        /// Hosts prefer optimized ways to non-optimized ones; by the others commands fail. A host takes `change` for a state that ends within 10 s.
        #[arg(value_name = "optimized|non-optimized|inaccessible|persistent-loss|change", value_parser = parse_ana_state)]
        state: AnaState,
        /// For hosts that have come by this listener [default: by any].
        #[arg(long, value_name = "tcp|rdma:ADDR[:PORT]", value_parser = parse_listener)]
        listener: Option<Listener>,
        /// For the namespaces of this group [default: for all].
        #[arg(long, value_name = "N")]
        group: Option<u32>,
        #[command(flatten)]
        at: At,
    },
    /// Put a namespace into another group, whose states of access it has. Hosts are told.
    #[command(after_help = "JSON: result (true).")]
    Group {
        /// Id of the namespace.
        #[arg(value_parser = parse_nsid)]
        nsid: NsId,
        /// Number of the group, 1 to 128; namespaces are in group 1 unless something else was asked for.
        group: u32,
        #[command(flatten)]
        at: At,
    },
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::List(at) => list(at),
        Command::Set {
            state,
            listener,
            group,
            at,
        } => {
            let mut params = json!({ "ana_state": ana_state_name(*state) });
            if let Some(listener) = listener {
                params["listen_address"] = listen_address(listener);
            }
            if let Some(group) = group {
                params["anagrpid"] = (*group).into();
            }
            at.change("nvmf_subsystem_listener_set_ana_state", params, |_| {
                let of = group.map_or_else(|| "all groups".into(), |group| format!("group {group}"));
                let by = listener.map_or_else(|| "all listeners".into(), |listener| listener.to_string());
                format!("{of} by {by}: {}", ana_state_name(*state))
            })
        }
        Command::Group { nsid, group, at } => {
            let params = json!({ "nsid": nsid.0, "anagrpid": group });
            at.change("nvmf_subsystem_set_ns_ana_group", params, |_| {
                format!("namespace {nsid} is in group {group}")
            })
        }
    }
}

fn list(at: &At) -> Result<()> {
    let mut described = Vec::new();
    for subsystem in at.subsystems()? {
        let nqn = subsystem["nqn"].clone();
        let listeners = at.call("nvmf_subsystem_get_listeners", json!({ "nqn": nqn }))?;
        described.push(json!({ "nqn": nqn, "listeners": listeners }));
    }
    if at.json {
        output::say(&Value::from(described).to_string());
        return Ok(());
    }
    for subsystem in &described {
        if described.len() > 1 {
            output::say(&format!("{}:", text(&subsystem["nqn"])));
        }
        output::say(&table(&subsystem["listeners"]));
    }
    Ok(())
}

fn table(listeners: &Value) -> String {
    let columns = [
        ("transport", Align::Left),
        ("address", Align::Left),
        ("port", Align::Right),
        ("group", Align::Right),
        ("access", Align::Left),
        ("namespaces", Align::Left),
    ];
    let mut rows = Vec::new();
    for listener in array(listeners) {
        let address = &listener["address"];
        for state in array(&listener["ana_states"]) {
            let namespaces = array(&state["namespaces"]).iter().map(Value::to_string);
            rows.push(vec![
                text(&address["trtype"]).to_lowercase(),
                text(&address["traddr"]),
                text(&address["trsvcid"]),
                text(&state["ana_group"]),
                text(&state["ana_state"]).replace('_', "-"),
                namespaces.collect::<Vec<_>>().join(", "),
            ]);
        }
    }
    output::table(&columns, &rows)
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], |array| array)
}

//! `rdmux dsm stat`: counts of the nodes that run on this host.

use std::net::SocketAddr;

use anyhow::{Result, anyhow, bail};
use rdmux_dsm::Consistency;
use rdmux_dsm::stat::{self, Count, Node, Unit};
use serde_json::{Map, Value, json};

use crate::cmd::objects::comm;
use crate::output::{self, Align};

/// Show what nodes of shared memories on this host have done: faults, fetches, invalidations, waits, messages.
///
/// The command shows the nodes of this user's processes; root sees those of all users. The first table of a cluster has a line for each node: events
/// that threads of the program have handled while they waited (stage 1), and those that the service thread has (stage 2); calls of threads,
/// and the time that they took, in ms. The second one has a line for each region of a node: faults of reads, of writes to pages that could not be read either,
/// and of writes to pages that could (upgrades); pages that were fetched from other nodes, and their KiB; pages that other nodes had to give up (invalidations) or
/// must not write any more (downgrades) since this node as their home asked for that (out), and those of this node (in). The last one has what has gone
/// between a node and each other one; recalls are invalidations and downgrades. All counts are since the node has joined.
///
/// With release consistency, invalidations (in) are copies that acquires have taken away, and downgrades (in) are pages that releases have protected. Such regions
/// have a further table: releases and acquires, and the time that threads have waited for them, in ms; twins, which are copies of pages before they were
/// written; flushes to homes (out), and those of others that this node has carried out as a home (in); pages of these that were read straight into its
/// own pages (landed), and those that were read with their twins (merged), and the KiB of both; RDMA READs of the logs of other nodes, and their KiB.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: an array of objects, one for each node: cluster (address of node 0), node, nodes, address,
pid, comm, seconds (since it has joined), epoch (nodes that are gone), page_bytes, stage_1_events,
stage_2_events, lock_waits, lock_wait_ns, barrier_waits, barrier_wait_ns, condition_waits,
condition_wait_ns, word_calls, word_call_ns, and
  regions  an array of region, bytes, faults (thread, inline or mprotect), consistency
           (sequential or release), read_faults, write_faults, upgrade_faults, fetches,
           fetched_bytes, invalidations_sent, downgrades_sent, invalidations, downgrades,
           messages; with release consistency alone not 0: releases, release_wait_ns,
           acquires, acquire_wait_ns, twins, flushes_sent, flushes, landed_units,
           merged_units, flush_read_bytes, log_reads, log_read_bytes
  peers    an array of node, address, gone, messages_sent, messages_received, bells_sent,
           bells_received, fetches, fetched_bytes, recalls_sent, recalls_received")]
pub(crate) struct Args {
    /// Address of node 0 of the cluster to show [default: all clusters].
    #[arg(value_name = "CLUSTER")]
    cluster: Option<SocketAddr>,
    /// Print JSON: an array of objects.
    #[arg(long)]
    json: bool,
}

/// Columns of the counts of nodes, regions and peers, with the names of the counts.
type Columns = [(&'static str, &'static str)];

const NODE: &Columns = &[
    ("stage 1", "stage_1_events"),
    ("stage 2", "stage_2_events"),
    ("locks", "lock_waits"),
    ("ms", "lock_wait_ns"),
    ("barriers", "barrier_waits"),
    ("ms", "barrier_wait_ns"),
    ("conditions", "condition_waits"),
    ("ms", "condition_wait_ns"),
    ("words", "word_calls"),
    ("ms", "word_call_ns"),
];

const REGION: &Columns = &[
    ("reads", "read_faults"),
    ("writes", "write_faults"),
    ("upgrades", "upgrade_faults"),
    ("fetches", "fetches"),
    ("KiB", "fetched_bytes"),
    ("invalidations out", "invalidations_sent"),
    ("in", "invalidations"),
    ("downgrades out", "downgrades_sent"),
    ("in", "downgrades"),
    ("messages", "messages"),
];

/// Those that only regions with release consistency have.
const RELEASE: &Columns = &[
    ("releases", "releases"),
    ("ms", "release_wait_ns"),
    ("acquires", "acquires"),
    ("ms", "acquire_wait_ns"),
    ("twins", "twins"),
    ("flushes out", "flushes_sent"),
    ("in", "flushes"),
    ("landed", "landed_units"),
    ("merged", "merged_units"),
    ("KiB", "flush_read_bytes"),
    ("log reads", "log_reads"),
    ("KiB", "log_read_bytes"),
];

const PEER: &Columns = &[
    ("messages out", "messages_sent"),
    ("in", "messages_received"),
    ("bells out", "bells_sent"),
    ("in", "bells_received"),
    ("fetches", "fetches"),
    ("KiB", "fetched_bytes"),
    ("recalls out", "recalls_sent"),
    ("in", "recalls_received"),
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let (mut nodes, mut refused) = (Vec::new(), Vec::new());
    for found in stat::nodes() {
        match found {
            Ok(node) if args.cluster.is_some_and(|it| it != node.cluster()) => {}
            Ok(node) => nodes.push((comm(node.pid), node)),
            Err(error) => refused.push(error),
        }
    }
    let is_none_refused = refused.is_empty();
    for error in refused {
        output::error(&error.into());
    }
    if let (Some(cluster), true) = (args.cluster, nodes.is_empty()) {
        bail!("no node of cluster {cluster} runs on this host: `rdmux dsm stat` shows all clusters");
    }
    if args.json {
        let list = nodes.iter().map(|(comm, node)| to_json(comm.as_deref(), node));
        output::say(&Value::Array(list.collect()).to_string());
    } else {
        let clusters = nodes.chunk_by(|(_, one), (_, next)| one.session == next.session);
        let texts: Vec<String> = clusters.map(cluster).collect();
        if !texts.is_empty() {
            output::say(&texts.join("\n\n"));
        } else if is_none_refused {
            output::error(&anyhow!(
                "nothing to show: no process of this user on this host is a node of a shared memory"
            ));
        }
    }
    Ok(())
}

fn to_json(comm: Option<&str>, node: &Node) -> Value {
    let object = |own: Value, counts: &mut dyn Iterator<Item = Count>| {
        let mut object: Map<String, Value> = own.as_object().cloned().unwrap_or_default();
        object.extend(counts.map(|count| (count.name.to_owned(), count.value.into())));
        Value::Object(object)
    };
    let regions = node.regions.iter().map(|region| {
        let own = json!({
            "region": region.number,
            "bytes": region.bytes,
            "faults": region.mode.to_string(),
            "consistency": region.consistency.to_string(),
        });
        object(own, &mut region.counts.iter())
    });
    let peers = others(node).map(|(number, peer)| {
        let own = json!({ "node": number, "address": peer.address, "gone": peer.is_gone });
        object(own, &mut peer.counts.iter())
    });
    let own = json!({
        "cluster": node.cluster(),
        "node": node.number,
        "nodes": node.peers.len(),
        "address": node.address(),
        "pid": node.pid,
        "comm": comm,
        "seconds": node.age().as_secs_f64(),
        "epoch": node.epoch,
        "page_bytes": node.page_bytes,
        "regions": regions.collect::<Vec<_>>(),
        "peers": peers.collect::<Vec<_>>(),
    });
    object(own, &mut node.counts.iter())
}

/// Returns the other nodes of a node's cluster, with their numbers.
fn others(node: &Node) -> impl Iterator<Item = (usize, &stat::Peer)> {
    let all = node.peers.iter().enumerate();
    all.filter(|(number, _)| *number != node.number as usize)
}

/// Returns the tables of the nodes of one cluster.
fn cluster(nodes: &[(Option<String>, Node)]) -> String {
    use Align::{Left, Right};

    let address: Option<SocketAddr> = nodes.first().map(|(_, node)| node.cluster());
    let all = nodes.first().map_or(0, |(_, node)| node.peers.len());
    let address = address.map(|it| it.to_string()).unwrap_or_default();
    let title = format!("cluster {address}: {} of {all} nodes on this host", nodes.len());
    let (mut own, mut regions, mut releases, mut peers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (comm, node) in nodes {
        let number = node.number.to_string();
        let cells = [
            number.clone(),
            node.address().to_string(),
            node.pid.to_string(),
            comm.clone().unwrap_or_else(|| "-".into()),
            format!("{:.1}", node.age().as_secs_f64()),
        ];
        own.push(with(cells, NODE, &mut node.counts.iter()));
        for region in &node.regions {
            let cells = [
                number.clone(),
                region.number.to_string(),
                kib(region.bytes),
                region.mode.to_string(),
            ];
            regions.push(with(cells, REGION, &mut region.counts.iter()));
            if region.consistency == Consistency::Release {
                let cells = [number.clone(), region.number.to_string()];
                releases.push(with(cells, RELEASE, &mut region.counts.iter()));
            }
        }
        for (other, peer) in others(node) {
            let cells = [
                number.clone(),
                other.to_string(),
                peer.address.to_string(),
                if peer.is_gone { "gone" } else { "there" }.to_owned(),
            ];
            peers.push(with(cells, PEER, &mut peer.counts.iter()));
        }
    }
    let mut text = title;
    let mut add = |first: &[(&'static str, Align)], counts: &Columns, rows: &[Vec<String>]| {
        if !rows.is_empty() {
            let counts = counts.iter().map(|(title, _)| (*title, Right));
            let columns: Vec<_> = first.iter().copied().chain(counts).collect();
            text += &format!("\n{}", output::table(&columns, rows));
        }
    };
    let first = [
        ("node", Right),
        ("address", Left),
        ("pid", Right),
        ("comm", Left),
        ("age s", Right),
    ];
    add(&first, NODE, &own);
    let first = [
        ("node", Right),
        ("region", Right),
        ("KiB", Right),
        ("faults", Left),
    ];
    add(&first, REGION, &regions);
    let first = [("node", Right), ("region", Right)];
    add(&first, RELEASE, &releases);
    let first = [
        ("node", Right),
        ("peer", Right),
        ("address", Left),
        ("state", Left),
    ];
    add(&first, PEER, &peers);
    text
}

/// Adds counts to the cells of a row, in the order of their columns.
fn with<const N: usize>(
    first: [String; N],
    columns: &Columns,
    counts: &mut dyn Iterator<Item = Count>,
) -> Vec<String> {
    let counts: Vec<Count> = counts.collect();
    let shown = columns.iter().map(|(_, name)| {
        let count = counts.iter().find(|count| count.name == *name);
        count.map_or_else(|| "-".into(), shown)
    });
    first.into_iter().chain(shown).collect()
}

fn shown(count: &Count) -> String {
    match count.unit {
        Unit::Count => count.value.to_string(),
        Unit::Bytes => kib(count.value),
        Unit::Ns => format!("{:.3}", count.value as f64 / 1e6),
    }
}

fn kib(bytes: u64) -> String {
    (bytes / 1024).to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;
    use rdmux_dsm::Stat;
    use rdmux_dsm::stat::{NodeStat, PeerStat};

    use super::*;

    #[derive(clap::Parser)]
    struct Whole {
        #[command(flatten)]
        _args: Args,
    }

    fn names(counts: impl Iterator<Item = Count>) -> BTreeSet<&'static str> {
        counts.map(|count| count.name).collect()
    }

    #[test]
    fn columns__show_each_count_once() {
        let region = [REGION, RELEASE].concat();
        for (columns, names) in [
            (NODE, names(NodeStat::default().iter())),
            (&region, names(Stat::default().iter())),
            (PEER, names(PeerStat::default().iter())),
        ] {
            let shown: BTreeSet<&str> = columns.iter().map(|(_, name)| *name).collect();
            assert_eq!((shown.len(), &shown), (columns.len(), &names));
        }
    }

    #[test]
    fn help__names_each_count() {
        let help = Whole::command().render_long_help().to_string();
        let words: BTreeSet<&str> = help.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        let mut all = names(NodeStat::default().iter());
        all.extend(names(Stat::default().iter()));
        all.extend(names(PeerStat::default().iter()));
        for name in all {
            assert!(words.contains(name), "{name}");
        }
    }
}

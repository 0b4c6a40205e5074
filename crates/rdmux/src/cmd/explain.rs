//! `rdmux explain`: explains the state of a queue pair by the notes of its device, also after the end of its process.

mod why;

use std::time::Duration;

use anyhow::{Result, bail};
use rdmux_soft::trace::{KEPT_MAX, Trace, TraceEntry, traces};
use rdmux_verbs::resources::{AskError, DeviceAt, Item, Object, QpResource, ask, devices, rnics};
use rdmux_verbs::{QpState, Qpn};
use serde_json::{Value, json};

use self::why::{Case, Verdict};
use super::res::state_name;
use super::trace::{entry_json, places, table};
use super::{notes, objects::Output};
use crate::output;

/// Time that all devices together have for their answers.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of events shown.
const EVENTS_MAX: usize = 12;

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Show the state of a queue pair, its cause, and the remedy.
    ///
    /// The command reads the last events of the queue pair's device; they remain for a while after its process has ended, even by a crash.
    /// It also reads the events of a peer on the same host, which tell why the peer refused a request.
    #[command(after_help = "\
JSON: an array of objects, one for each device that has or had a queue pair with this number: ifname (the address), port (the slot), pid,
comm, alive, lqpn, state, since, peer, rqpn, cause (a word of docs/observability.md), why, peer-says, next, events: as in `trace dump`.")]
    Qp {
        /// Number of the queue pair, decimal or 0x...
        #[arg(value_parser = parse_qpn)]
        number: u32,
        /// Device of the queue pair, if several devices have one with this number [default: all].
        #[arg(long, value_name = "ADDRESS/SLOT")]
        device: Option<DeviceAt>,
        #[command(flatten)]
        output: Output,
    },
}

fn parse_qpn(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    let number = parsed.ok().filter(|number| (2..1 << 24).contains(number));
    number.ok_or_else(|| "give a queue pair number from 2 to 16777215, decimal or hexadecimal with 0x".into())
}

/// A queue pair and everything known of it.
struct Found {
    device: DeviceAt,
    pid: Option<u32>,
    comm: Option<String>,
    /// The queue pair as its process reports it.
    live: Option<QpResource>,
    /// Set when its process lives.
    alive: bool,
    /// Set when its process lives but does not answer.
    silent: bool,
    /// Set when notes of its device are found.
    noted: bool,
    /// Notes of the queue pair and of its device as a whole.
    entries: Vec<TraceEntry>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Command::Qp {
        number,
        device,
        output,
    } = &args.command;
    let qpn = Qpn::new(*number);
    let traces = traces();
    let found = find(qpn, *device, &traces);
    let rnics = on_an_rnic(qpn, *device).map(|at| {
        format!(
            "queue pair {number} of {at} belongs to an RNIC (provider hw), which records no events: `rdmux res show qp link {at} lqpn \
             {number}` shows its state"
        )
    });
    if let Some(rnics) = rnics {
        if found.is_empty() {
            bail!("{rnics}");
        }
        eprintln!("rdmux: {rnics}");
    }
    if found.is_empty() {
        bail!(
            "no queue pair {number} is known here: `rdmux res show qp` lists existing queue pairs, `rdmux trace dump` the recorded events \
             of past ones, from {}: of the {KEPT_MAX} processes that ended last; a process with another XDG_RUNTIME_DIR records its events there",
            places()
        );
    }
    let verdicts: Vec<(Found, Verdict)> = found
        .into_iter()
        .map(|found| {
            let case = Case {
                qpn,
                state: found.live.as_ref().map(|qp| qp.state),
                is_idle: found.live.as_ref().is_some_and(|qp| qp.sends == 0),
                alive: found.alive,
                noted: found.noted,
                entries: &found.entries,
                traces: &traces,
            };
            let verdict = case.judge();
            (found, verdict)
        })
        .collect();
    if output.json {
        let list = Value::Array(
            verdicts
                .iter()
                .map(|(found, verdict)| to_json(qpn, found, verdict))
                .collect(),
        );
        output::say(&if output.pretty {
            format!("{list:#}")
        } else {
            list.to_string()
        });
        return Ok(());
    }
    let texts: Vec<String> = verdicts
        .iter()
        .map(|(found, verdict)| text(qpn, found, verdict))
        .collect();
    output::say(&texts.join("\n\n"));
    Ok(())
}

/// Returns every device that has, or had, a queue pair of this number.
fn find(qpn: Qpn, only: Option<DeviceAt>, traces: &[Trace]) -> Vec<Found> {
    let chosen: Vec<DeviceAt> = devices()
        .into_iter()
        // The top byte of a QPN is the slot of its device.
        .filter(|at| only.is_none_or(|only| only == *at) && u32::from(at.slot) == qpn.value() >> 16)
        .collect();
    let mut found = Vec::new();
    // Devices that are stopped or get no CPU: only their notes are available.
    let mut silent = Vec::new();
    for (device, answer) in ask(&chosen, Object::Qp, PATIENCE) {
        let told = match answer {
            Ok(told) => told,
            Err(AskError::NoAnswer { .. }) => {
                silent.push(device);
                continue;
            }
            Err(_) => continue,
        };
        let mine = told.items.into_iter().find_map(|item| match item {
            Item::Qp(qp) if qp.qpn == qpn => Some(qp),
            _ => None,
        });
        let Some(live) = mine else { continue };
        let trace = traces.iter().find(|trace| {
            trace.alive && trace.device == device && told.pid.is_none_or(|pid| pid == trace.pid)
        });
        found.push(Found {
            device,
            pid: told.pid,
            comm: trace.map(|trace| trace.comm.clone()),
            live: Some(live),
            alive: true,
            silent: false,
            noted: trace.is_some(),
            entries: trace.map(|trace| of_qp(trace, qpn)).unwrap_or_default(),
        });
    }
    // Devices that did not report the queue pair: the youngest trace of each that had it.
    let mut seen: Vec<DeviceAt> = found.iter().map(|found| found.device).collect();
    for trace in traces {
        let is_it = only.is_none_or(|only| only == trace.device) && !seen.contains(&trace.device);
        if is_it && trace.entries.iter().any(|entry| entry.qpn == qpn) {
            seen.push(trace.device);
            found.push(Found {
                device: trace.device,
                pid: Some(trace.pid),
                comm: Some(trace.comm.clone()),
                live: None,
                alive: trace.alive,
                silent: trace.alive && silent.contains(&trace.device),
                noted: true,
                entries: of_qp(trace, qpn),
            });
        }
    }
    found
}

/// Returns the RNIC on which a process has a queue pair of this number.
fn on_an_rnic(qpn: Qpn, only: Option<DeviceAt>) -> Option<DeviceAt> {
    let chosen: Vec<DeviceAt> = rnics()
        .into_iter()
        .filter(|at| only.is_none_or(|only| only == *at))
        .collect();
    let is_it = |item: &Item| matches!(item, Item::Qp(qp) if qp.qpn == qpn);
    let mut told = ask(&chosen, Object::Qp, PATIENCE).into_iter();
    let found = told.find(|(_, answer)| answer.as_ref().is_ok_and(|told| told.items.iter().any(is_it)));
    found.map(|(device, _)| device)
}

/// Returns the notes of a queue pair and of its device as a whole.
fn of_qp(trace: &Trace, qpn: Qpn) -> Vec<TraceEntry> {
    let entries = trace.entries.iter();
    entries
        .filter(|entry| entry.qpn == qpn || entry.qpn.value() == 0)
        .copied()
        .collect()
}

/// Returns the last events of the queue pair and its device.
fn last(found: &Found) -> &[TraceEntry] {
    &found.entries[found.entries.len().saturating_sub(EVENTS_MAX)..]
}

fn state_words(found: &Found, verdict: &Verdict) -> &'static str {
    let live = found.live.as_ref().map(|qp| qp.state);
    live.or(verdict.state)
        .map_or("-", |state: QpState| state_name(state))
}

fn text(qpn: Qpn, found: &Found, verdict: &Verdict) -> String {
    let process = match (found.pid, &found.comm) {
        (Some(pid), Some(comm)) => format!(", process {pid} ({comm})"),
        (Some(pid), None) => format!(", process {pid}"),
        (None, _) => String::new(),
    };
    let ended = match (found.alive, &found.live) {
        (false, _) => ", which has ended",
        (true, None) if found.silent => "; it does not answer, so this is its last recorded state",
        (true, None) => "; the queue pair has been destroyed",
        (true, Some(_)) => "",
    };
    let mut lines = vec![format!(
        "queue pair {} of {}{process}{ended}",
        qpn.value(),
        found.device
    )];
    let since = verdict.since_ns.map(|ns| format!(" since {}", notes::utc(ns)));
    lines.push(format!(
        "state  {}{}",
        state_words(found, verdict),
        since.unwrap_or_default()
    ));
    if let Some((address, qpn)) = verdict.peer {
        lines.push(format!("peer   {address} qp {}", qpn.value()));
    }
    lines.push(format!("why    {}", verdict.why));
    if let Some(says) = &verdict.peer_says {
        lines.push(format!("       peer says: {says}"));
    }
    for (i, step) in verdict.next.iter().enumerate() {
        lines.push(format!("{:<7}{step}", if i == 0 { "next" } else { "" }));
    }
    let events = last(found);
    if !events.is_empty() {
        lines.push(String::new());
        lines.push(table(events));
    }
    lines.join("\n")
}

fn to_json(qpn: Qpn, found: &Found, verdict: &Verdict) -> Value {
    json!({
        "ifname": found.device.address,
        "port": found.device.slot,
        "pid": found.pid,
        "comm": found.comm,
        "alive": found.alive,
        "lqpn": qpn.value(),
        "state": state_words(found, verdict),
        "since": verdict.since_ns.map(notes::utc),
        "peer": verdict.peer.map(|(address, _)| address),
        "rqpn": verdict.peer.map(|(_, qpn)| qpn.value()),
        "cause": verdict.cause,
        "why": verdict.why,
        "peer-says": verdict.peer_says,
        "next": verdict.next,
        "events": last(found).iter().map(entry_json).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_qpn__both_ways() {
        assert_eq!(
            (parse_qpn("196625"), parse_qpn("0x030011")),
            (Ok(196_625), Ok(196_625))
        );
        for nonsense in ["", "0", "1", "-3", "16777216", "0x", "qp"] {
            assert!(parse_qpn(nonsense).is_err(), "{nonsense}");
        }
    }
}

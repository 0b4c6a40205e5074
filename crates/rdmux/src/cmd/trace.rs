//! `rdmux trace`: notes that devices keep about themselves, also after the end of their processes.

use std::net::IpAddr;
use std::str::FromStr;

use anyhow::{Result, bail};
use rdmux_soft::trace::{Trace, TraceEntry, folders, traces};
use rdmux_verbs::resources::DeviceAt;
use serde_json::{Value, json};

use super::notes;
use super::objects::Output;
use crate::output::{self, Align};

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Print the recorded events of devices: state changes, errors and their causes, connections, faults; newest last.
    ///
    /// Each device of this user keeps its last events; those of ended processes remain for a while. The environment variable RDMUX_TRACE
    /// sets how much a program records: off, events (the default) or packets. See docs/observability.md.
    #[command(after_help = "\
JSON: an array of objects, the newest device last: ifname (the address), port (the slot), pid, comm, uid, alive, opened, events: each
number, time (UTC), time_ns, lqpn (0: the device), event, text.")]
    Dump {
        /// ADDRESS/SLOT, ADDRESS or a process id [default: all that have recorded events].
        #[arg(value_name = "DEVICE|PID")]
        which: Option<Which>,
        #[command(flatten)]
        output: Output,
    },
}

/// Owner of the notes that the user means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Device(DeviceAt),
    Address(IpAddr),
    Process(u32),
}

impl FromStr for Which {
    type Err = String;

    fn from_str(text: &str) -> Result<Which, String> {
        let device = text.parse().map(Which::Device).ok();
        let address = || text.parse().map(Which::Address).ok();
        let process = || text.parse().map(Which::Process).ok();
        let found = device.or_else(process).or_else(address);
        found.ok_or_else(|| "give ADDRESS/SLOT, ADDRESS, or the number of a process".into())
    }
}

impl Which {
    pub(crate) fn is_it(self, trace: &Trace) -> bool {
        match self {
            Which::Device(device) => trace.device == device,
            Which::Address(address) => trace.device.address == address,
            Which::Process(pid) => trace.pid == pid,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Command::Dump { which, output } = &args.command;
    // A device without events is of interest only to those who ask for it.
    let wanted = |trace: &Trace| which.map_or(!trace.entries.is_empty(), |which| which.is_it(trace));
    // The newest is last, as within each device.
    let found: Vec<Trace> = traces().into_iter().filter(wanted).rev().collect();
    if found.is_empty() && which.is_some() {
        bail!(
            "no device of that name or process has recorded events in {}: `rdmux trace dump` prints all recorded events; a process with \
             RDMUX_TRACE=off records none, one with another XDG_RUNTIME_DIR records them there",
            places()
        );
    }
    if output.json {
        let list = Value::Array(found.iter().map(trace_json).collect());
        output::say(&if output.pretty {
            format!("{list:#}")
        } else {
            list.to_string()
        });
        return Ok(());
    }
    let texts: Vec<String> = found.iter().map(text).collect();
    if !texts.is_empty() {
        output::say(&texts.join("\n\n"));
    }
    Ok(())
}

/// Names the folders in which notes are looked for.
pub(crate) fn places() -> String {
    let all: Vec<String> = folders().iter().map(|path| path.display().to_string()).collect();
    let others = if rustix::process::geteuid().is_root() {
        " and the folders of all users"
    } else {
        ""
    };
    all.join(", ") + others
}

/// Returns a line that names the owner of the notes.
pub(crate) fn whose(trace: &Trace) -> String {
    let ended = if trace.alive { "" } else { ", which has ended" };
    format!(
        "{} of process {} ({}){ended}",
        trace.device, trace.pid, trace.comm
    )
}

fn text(trace: &Trace) -> String {
    let events = match &trace.entries[..] {
        [] => "no events".to_owned(),
        entries => table(entries),
    };
    format!("{}\n{events}", whose(trace))
}

/// Returns events under a header.
pub(crate) fn table(entries: &[TraceEntry]) -> String {
    let rows: Vec<Vec<String>> = entries
        .iter()
        .map(|entry| {
            let qpn = entry.qpn.value();
            vec![
                notes::utc(entry.time_ns),
                if qpn == 0 { "-".into() } else { qpn.to_string() },
                notes::name(&entry.note).into(),
                notes::words(&entry.note),
            ]
        })
        .collect();
    let columns = [
        ("time", Align::Left),
        ("lqpn", Align::Right),
        ("event", Align::Left),
        ("what", Align::Left),
    ];
    output::table(&columns, &rows)
}

fn trace_json(trace: &Trace) -> Value {
    json!({
        "ifname": trace.device.address,
        "port": trace.device.slot,
        "pid": trace.pid,
        "comm": trace.comm,
        "uid": trace.uid,
        "alive": trace.alive,
        "opened": notes::utc(trace.opened_ns),
        "events": trace.entries.iter().map(entry_json).collect::<Vec<_>>(),
    })
}

pub(crate) fn entry_json(entry: &TraceEntry) -> Value {
    json!({
        "number": entry.number,
        "time": notes::utc(entry.time_ns),
        "time_ns": entry.time_ns,
        "lqpn": entry.qpn.value(),
        "event": notes::name(&entry.note),
        "text": notes::words(&entry.note),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which__device_address_or_process() {
        assert_eq!(
            "127.0.0.1/3".parse(),
            Ok(Which::Device("127.0.0.1/3".parse().unwrap()))
        );
        assert_eq!("127.0.0.1".parse(), Ok(Which::Address([127, 0, 0, 1].into())));
        assert_eq!("4711".parse(), Ok(Which::Process(4711)));
        assert!("eth0".parse::<Which>().is_err());
    }
}

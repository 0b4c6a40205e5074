//! `rdmux nvme stat`: what the controllers of a target that runs have carried out.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rdmux_verbs::ledger::{Class, Link};
use serde_json::{Value, json};
use strum::VariantArray;

use super::change::At;
use super::perf::parse_seconds;
use crate::output::{self, Align};

/// Counts of a controller, and of a subsystem.
const COUNTS: [&str; 5] = ["reads", "read_bytes", "writes", "written_bytes", "media_errors"];

/// Show what the hosts of a target that runs have read and written.
///
/// The last line of a subsystem has all of its controllers, also those of hosts that have left.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: an array of nqn, seconds (of the interval, or null), counts (reads, read_bytes, writes, written_bytes, media_errors: of all controllers), controllers (array of
cntlid, hostnqn, hostid, num_io_qpairs, and the counts of it). With --ledger an object of links (wire, nic-root, root-dram, root-drive, nic-drive), each an object
of classes (data, command, completion, doorbell) in bytes.")]
pub(crate) struct Args {
    /// Count for so many seconds, and show what was done in them a second.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    interval: Option<Duration>,
    /// Show the bytes that RNICs and drives have moved, by link of the target's host: it runs with --ledger.
    #[arg(long, conflicts_with = "interval")]
    ledger: bool,
    #[command(flatten)]
    at: At,
}

/// Returns the subsystems with their counts and controllers.
fn read(at: &At) -> Result<Vec<Value>> {
    let mut subsystems = Vec::new();
    for subsystem in at.subsystems()? {
        let params = json!({ "nqn": subsystem["nqn"] });
        subsystems.push(json!({
            "nqn": subsystem["nqn"],
            "seconds": null,
            "counts": subsystem["counts"],
            "controllers": at.call("nvmf_subsystem_get_controllers", params)?,
        }));
    }
    Ok(subsystems)
}

/// Returns the one of a list that has the same values of some keys.
fn same<'a>(list: &'a [Value], one: &Value, keys: &[&str]) -> Option<&'a Value> {
    let is_same = |other: &&Value| keys.iter().all(|key| other[key] == one[key]);
    list.iter().find(is_same)
}

/// Takes off what was counted before.
fn subtract(counts: &mut Value, before: &Value) {
    for key in COUNTS {
        let now = counts[key].as_u64().unwrap_or(0);
        counts[key] = now.saturating_sub(before[key].as_u64().unwrap_or(0)).into();
    }
}

/// Leaves of the counts what was added since those before.
fn since(subsystems: &mut [Value], before: &[Value], seconds: f64) {
    for subsystem in subsystems {
        subsystem["seconds"] = seconds.into();
        let Some(known) = same(before, subsystem, &["nqn"]) else {
            continue;
        };
        subtract(&mut subsystem["counts"], &known["counts"]);
        let known = known["controllers"].as_array().map_or(&[][..], |all| all);
        for controller in subsystem["controllers"].as_array_mut().into_iter().flatten() {
            if let Some(known) = same(known, controller, &["cntlid", "hostid"]) {
                subtract(controller, known);
            }
        }
    }
}

fn row(first: [String; 3], counts: &Value, seconds: Option<f64>) -> Vec<String> {
    let count = |key: &str| counts[key].as_u64().unwrap_or(0);
    let number = |key: &str| match seconds {
        Some(seconds) => format!("{:.0}", count(key) as f64 / seconds),
        None => count(key).to_string(),
    };
    let bytes = |key: &str| match seconds {
        Some(seconds) => output::bytes((count(key) as f64 / seconds) as u64),
        None => output::bytes(count(key)),
    };
    let counted = [
        number("reads"),
        bytes("read_bytes"),
        number("writes"),
        bytes("written_bytes"),
        count("media_errors").to_string(),
    ];
    first.into_iter().chain(counted).collect()
}

fn table(subsystem: &Value) -> String {
    let seconds = subsystem["seconds"].as_f64();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let controllers = subsystem["controllers"].as_array().map_or(&[][..], |all| all);
    let mut rows: Vec<_> = controllers
        .iter()
        .map(|one| {
            let first = ["cntlid", "hostnqn", "num_io_qpairs"].map(|key| text(&one[key]));
            row(first, one, seconds)
        })
        .collect();
    let all = ["all".into(), String::new(), String::new()];
    rows.push(row(all, &subsystem["counts"], seconds));
    let names = match seconds {
        Some(_) => ["reads/s", "read/s", "writes/s", "written/s"],
        None => ["reads", "read", "writes", "written"],
    };
    let mut columns = vec![
        ("controller", Align::Right),
        ("host", Align::Left),
        ("queues", Align::Right),
    ];
    columns.extend(names.map(|name| (name, Align::Right)));
    columns.push(("errors", Align::Right));
    output::table(&columns, &rows)
}

/// Shows the byte ledger, a line for each link.
pub(super) fn ledger_table(ledger: &Value) -> String {
    let classes = Class::VARIANTS;
    let rows = Link::VARIANTS.iter().map(|link| {
        let bytes = |class: &Class| ledger[link.name()][class.name()].as_u64().unwrap_or(0);
        let all: u64 = classes.iter().map(bytes).sum();
        let numbers = classes.iter().map(bytes).chain([all]);
        let numbers = numbers.map(|bytes| bytes.to_string());
        [link.name().to_owned()].into_iter().chain(numbers).collect()
    });
    let names = classes.iter().map(|class| class.name()).chain(["bytes"]);
    let columns = names.map(|name| (name, Align::Right));
    let columns: Vec<_> = [("link", Align::Left)].into_iter().chain(columns).collect();
    output::table(&columns, &rows.collect::<Vec<_>>())
}

fn show_ledger(at: &At) -> Result<()> {
    let ledger = at.call("nvmf_target_get_ledger", json!({}))?;
    if ledger.is_null() {
        bail!("the target does not count bytes by link: start it with --ledger");
    }
    output::say(&match at.json {
        true => ledger.to_string(),
        false => ledger_table(&ledger),
    });
    Ok(())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.ledger {
        return show_ledger(&args.at);
    }
    let mut subsystems = read(&args.at)?;
    if let Some(interval) = args.interval {
        let (before, began) = (subsystems, Instant::now());
        // Time is meant: the interval.
        thread::sleep(interval);
        subsystems = read(&args.at)?;
        since(&mut subsystems, &before, began.elapsed().as_secs_f64());
    }
    if args.at.json {
        output::say(&Value::from(subsystems).to_string());
        return Ok(());
    }
    for subsystem in &subsystems {
        if subsystems.len() > 1 {
            output::say(&format!("{}:", subsystem["nqn"].as_str().unwrap_or_default()));
        }
        output::say(&table(subsystem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since__leaves_what_was_done_in_the_interval() {
        let controller = |cntlid: u16, reads: u64| json!({ "cntlid": cntlid, "hostid": "a", "reads": reads });
        let state = |reads: u64, controllers: Vec<Value>| {
            vec![json!({ "nqn": "n", "counts": { "reads": reads }, "controllers": controllers })]
        };
        let before = state(100, vec![controller(1, 60), controller(2, 40)]);
        // One has left, one has come.
        let mut now = state(160, vec![controller(2, 90), controller(3, 7)]);
        since(&mut now, &before, 2.0);
        assert_eq!(now[0]["counts"]["reads"], 60);
        assert_eq!(now[0]["controllers"][0]["reads"], 50);
        assert_eq!(now[0]["controllers"][1]["reads"], 7);
        assert!(table(&now[0]).lines().last().unwrap().contains("30"), "a second");
    }
}

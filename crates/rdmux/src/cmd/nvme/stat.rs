//! `rdmux nvme stat`: what the controllers of a target that runs have carried out.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rdmux_nvmf::backend::offload::OffloadCounter;
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
of classes (data, command, completion, doorbell) in bytes. With --offload an array of nqn, nsid, name, and the counters of the namespace (num_read_cmd, num_read_blocks,
num_write_cmd, num_write_blocks, num_write_inline_cmd, num_flush_cmd, num_error_cmd, num_backend_error_cmd, last_read_latency and last_write_latency in microseconds, queue_depth).")]
pub(crate) struct Args {
    /// Count for so many seconds, and show what was done in them a second.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    interval: Option<Duration>,
    /// Show the bytes that RNICs and drives have moved, by link of the target's host: it runs with --ledger.
    #[arg(long, conflicts_with = "interval")]
    ledger: bool,
    /// Show what the offload engine has carried out, by namespace: the target runs with --offload.
    #[arg(long, conflicts_with_all = ["interval", "ledger"])]
    offload: bool,
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

/// Returns the namespaces of which the offload engine has commands, with its counters.
fn offloaded(subsystems: &[Value]) -> Vec<Value> {
    let mut found = Vec::new();
    for subsystem in subsystems {
        for namespace in subsystem["namespaces"].as_array().into_iter().flatten() {
            let Some(counters) = namespace["offload"].as_object() else {
                continue;
            };
            let mut own = json!({
                "nqn": subsystem["nqn"],
                "nsid": namespace["nsid"],
                "name": namespace["name"],
            });
            counters
                .iter()
                .for_each(|(name, value)| own[name] = value.clone());
            found.push(own);
        }
    }
    found
}

/// Shows them, a line for each counter, as long as those of an RNIC are.
fn offload_table(namespaces: &[Value]) -> String {
    let counters = OffloadCounter::VARIANTS.iter().map(|counter| {
        let values = namespaces.iter().map(|own| own[counter.name()].to_string());
        [counter.name().to_owned()].into_iter().chain(values).collect()
    });
    let names: Vec<String> = namespaces
        .iter()
        .map(|own| own["name"].as_str().unwrap_or_default().to_owned())
        .collect();
    let mut columns = vec![("counter", Align::Left)];
    columns.extend(names.iter().map(|name| (name.as_str(), Align::Right)));
    output::table(&columns, &counters.collect::<Vec<_>>())
}

fn show_offload(at: &At) -> Result<()> {
    let namespaces = offloaded(&at.subsystems()?);
    if namespaces.is_empty() {
        bail!("the target has no drive with an offload engine: start it with --offload and --ns pcie:ADDR");
    }
    output::say(&match at.json {
        true => Value::from(namespaces).to_string(),
        false => offload_table(&namespaces),
    });
    Ok(())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.ledger {
        return show_ledger(&args.at);
    }
    if args.offload {
        return show_offload(&args.at);
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
    fn offloaded__are_the_namespaces_with_counters() {
        let namespace = |nsid: u32, offload: Option<u64>| {
            let mut own = json!({ "nsid": nsid, "name": format!("pcie:{nsid}") });
            if let Some(reads) = offload {
                own["offload"] = json!({ "num_read_cmd": reads, "queue_depth": 0 });
            }
            own
        };
        let of = |nqn: &str, namespaces: Vec<Value>| json!({ "nqn": nqn, "namespaces": namespaces });
        let found = offloaded(&[
            of("a", vec![namespace(1, None), namespace(2, Some(17))]),
            of("b", vec![namespace(1, Some(4))]),
        ]);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (&found[0]["nqn"], &found[0]["nsid"], &found[0]["num_read_cmd"]),
            (&"a".into(), &2.into(), &17.into())
        );
        let table = offload_table(&found);
        let line = table
            .lines()
            .find(|line| line.starts_with("num_read_cmd"))
            .unwrap();
        assert!(line.contains("17") && line.ends_with('4'), "{line}");
    }

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

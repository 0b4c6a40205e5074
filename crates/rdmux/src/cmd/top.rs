//! `rdmux top`: who uses a node, and how much: tenants, applications and connections, live.

mod frame;
mod screen;
mod terminal;

use std::io::IsTerminal;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use rdmux_share::node::snapshot::Snapshot;
use rdmux_share::watch::{INTERVAL_MIN, Watch, Watched, watched};

use self::frame::Frame;
use crate::output::{self, Align};

/// Show who uses a node (`rdmux node`), and how much: its tenants, their applications and their connections, live.
///
/// On a terminal the command shows a screen, with keys as in htop; h lists them. Elsewhere it prints a table at each interval, and with
/// --json an object a line. You see your own applications; root and the node's user see all. RATE is that of requests that applications
/// make: WRITEs, SENDs and READs; SHARE is its part of the whole. P50 and P99 are times from the node's taking of a request to its
/// completion, DEPTH is the number of requests that are not complete.
#[derive(Parser, Debug)]
#[command(after_help = JSON)]
pub(crate) struct Args {
    /// The node of this address; not needed where there is one alone.
    #[arg(long = "device", value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// Time between two looks, in seconds.
    #[arg(short = 'd', long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
    /// End after so many intervals.
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = count)]
    count: Option<u64>,
    /// Print an object a line.
    #[arg(long)]
    json: bool,
}

const JSON: &str = "\
JSON: an object for each interval: time_ns, interval_ns, node (address, provider, waiting, is_whole, retransmitted_packets), and
  tenants       name, applications
  applications  id, pid, uid, name, tenant, queue_pairs
  connections   application, qpn, peer, class, route, shared_qp
each with requests_per_s, bytes_per_s, receives_per_s, received_bytes_per_s, share, p50_ns, p99_ns, waiting_requests, waiting_bytes
and errors (in the interval); connections_left_out, shared_qps (id, peer, tenant, peer_tenant, class, connections, window_bytes,
in_flight_bytes).";

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match seconds {
        Some(interval) if interval >= INTERVAL_MIN && interval.as_secs() <= 86_400 => Ok(interval),
        _ => Err(format!(
            "give seconds from {} to 86400",
            INTERVAL_MIN.as_secs_f64()
        )),
    }
}

fn count(text: &str) -> Result<u64, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| "give a number from 1 on".into())
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let node = chosen(watched(), args.address)?;
    let watch = node
        .watch(args.interval)
        .with_context(|| format!("the node of {}", node.address))?;
    let mut frames = Frames {
        watch,
        patience: args.interval + PATIENCE,
        before: None,
    };
    let is_screen = !args.json && std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if is_screen {
        return terminal::run(frames, args.count);
    }
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        let frame = frames.next()?;
        let text = match args.json {
            true => serde_json::to_string(&frame)?,
            false if shown == 0 => table(&frame),
            false => format!("\n{}", table(&frame)),
        };
        output::say(&text);
        shown += 1;
    }
    Ok(())
}

/// Time beyond the interval after which a node that sends nothing is given up.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the node of an address, or the only one.
fn chosen(mut nodes: Vec<Watched>, address: Option<IpAddr>) -> Result<Watched> {
    let all: Vec<String> = nodes.iter().map(|node| node.address.to_string()).collect();
    nodes.retain(|node| address.is_none_or(|address| node.address == address));
    match (&nodes[..], address) {
        ([node], _) => Ok(node.clone()),
        // Root sees those of several users: the first one is as good as any.
        ([node, ..], Some(_)) => Ok(node.clone()),
        ([], Some(address)) => bail!("there is no node of {address} that you may watch: {}", list(&all)),
        ([], None) => {
            bail!("there is no node that you may watch in this network namespace: `rdmux node` starts one")
        }
        (_, None) => bail!(
            "there are several nodes: name one by --device: {}",
            all.join(", ")
        ),
    }
}

fn list(all: &[String]) -> String {
    match all {
        [] => "`rdmux node` starts one".into(),
        all => format!("there are those of {}", all.join(", ")),
    }
}

/// The work of a node, from one interval to the next.
struct Frames {
    watch: Watch,
    patience: Duration,
    before: Option<Snapshot>,
}

impl Frames {
    /// Waits for the end of an interval.
    fn next(&mut self) -> Result<Frame> {
        loop {
            let Some(snapshot) = self.watch.next(self.patience)? else {
                bail!("the node does not answer: its process is stopped, or gets no CPU");
            };
            let before = self.before.replace(snapshot.clone());
            if let Some(before) = before {
                return Ok(Frame::of(&before, &snapshot));
            }
        }
    }
}

/// Returns a table for those who have no terminal.
fn table(frame: &Frame) -> String {
    use Align::{Left, Right};
    const COLUMNS: [(&str, Align); 11] = [
        ("WHO", Left),
        ("PEER", Left),
        ("ROUTE", Left),
        ("CLASS", Right),
        ("RATE", Right),
        ("SHARE", Right),
        ("REQ/S", Right),
        ("P50", Right),
        ("P99", Right),
        ("DEPTH", Right),
        ("ERRORS", Right),
    ];
    let rows = frame.tree();
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let mut cells = vec![format!("{}{}", "  ".repeat(row.level as usize), row.name)];
            cells.extend(row.cells());
            cells
        })
        .collect();
    format!("{}\n{}", frame.title(), output::table(&COLUMNS, &cells))
}

#[cfg(test)]
mod tests;

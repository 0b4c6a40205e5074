//! S6: short messages at random times beside long ones.

use anyhow::{Context, Result};

use super::super::child::Side;
use super::super::table::{Column, Ratio, Suite, Table, figures};
use super::LINK;
use super::hosts::{Placement, Setup, run};

/// A column.
struct Load {
    heading: &'static str,
    bytes: u32,
    /// Mice a second.
    per_second: u32,
    elephants: u32,
    elephant_bytes: u32,
    /// Mice in flight at most: more than arrive while the elephants' bytes pass the link once.
    depth: u32,
    /// Time that counts.
    time_ms: u32,
}

const LOADS: [Load; 6] = [
    load("16 KiB, 1 elephant", 16_384, 1, 1),
    load("16 KiB, 7 elephants", 16_384, 7, 1),
    load("49 KB, 1 elephant", 49_000, 1, 1),
    load("49 KB, 7 elephants", 49_000, 7, 1),
    load("16 KiB, 7 elephants of 16 MiB", 16_384, 7, 16),
    load("49 KB, 7 elephants of 16 MiB", 49_000, 7, 16),
];
const SHORT_1: usize = 0;
const SHORT_7: usize = 1;
const LONG_1: usize = 2;
const LONG_7: usize = 3;
const SHORT_16_MIB: usize = 4;
const LONG_16_MIB: usize = 5;

const fn load(heading: &'static str, bytes: u32, elephants: u32, elephant_mib: u32) -> Load {
    Load {
        heading,
        bytes,
        per_second: if bytes == 16_384 { 300 } else { 100 },
        elephants,
        elephant_bytes: elephant_mib << 20,
        depth: if elephant_mib == 1 { 64 } else { 512 },
        time_ms: if elephant_mib == 1 { 3000 } else { 6000 },
    }
}

const FIFO: &str = "own, one queue pair: FIFO";
const SAME: &str = "nodes, --share";
const STRICT: &str = "nodes, --share, strict class";
/// The TOS of class 7, which is strict.
const TOS_STRICT: u32 = 56 << 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Mice and elephants of one application, on one queue pair: in the order of their posts.
    OneQueuePair,
    /// Applications with an engine each.
    Own,
    /// Applications of nodes; the mice have the class of this TOS.
    Shared { tos: u32 },
}

const ROWS: [(&str, How); 4] = [
    (FIFO, How::OneQueuePair),
    ("engines of their own", How::Own),
    (SAME, How::Shared { tos: 0 }),
    (STRICT, How::Shared { tos: TOS_STRICT }),
];

pub(super) fn suite() -> Suite {
    let columns: Vec<usize> = (0..LOADS.len()).collect();
    let (mut typical, mut worst) = (Vec::new(), Vec::new());
    for (name, how) in ROWS {
        let [p50, p99] = figures(name, &columns, move |load| mice(how, load));
        typical.push(p50);
        worst.push(p99);
    }
    let headings: Vec<Column> = LOADS
        .iter()
        .enumerate()
        .map(|(nth, load)| (nth, load.heading))
        .collect();
    let table = |key, title, lines| Table {
        key,
        title,
        digits: 0,
        columns: headings.clone(),
        lines,
        compares: true,
    };
    Suite {
        key: "s6",
        conditions: "Two hosts, a link of 1 Gbit/s (veth, tbf); mice: 300 WRITEs of 16 KiB a second or 100 of 49 KB, at random times; elephants: \
                     WRITEs of 1 MiB where nothing else is said, one in flight each; nodes keep to 900 Mbit/s; all wait adaptively",
        claim: Some(
            "Avatar: up to 50 % less time. Goal, of FIFO's time: 1/20 at 16 KiB and in the strict class, 1/8 at 49 KB in the same class, with 7 \
             elephants; 1/4 with 1.",
        ),
        tables: vec![
            table("s6_p50_us", "S6: time of a mouse, p50, us", typical),
            table("s6_p99_us", "S6: time of a mouse, p99, us", worst),
        ],
        ratios: |tables| {
            let mut ratios = Vec::new();
            for (table, what) in tables.iter().zip(["p50", "p99"]) {
                for (row, column, goal) in [
                    (SAME, SHORT_7, "at least 20"),
                    (STRICT, SHORT_7, "at least 20"),
                    (SAME, LONG_7, "at least 8"),
                    (STRICT, LONG_7, "at least 20"),
                    (SAME, SHORT_1, "at least 4"),
                    (STRICT, SHORT_1, "at least 4"),
                    (SAME, LONG_1, "at least 4"),
                    (STRICT, LONG_1, "at least 4"),
                    (SAME, SHORT_16_MIB, "at least 20"),
                    (STRICT, SHORT_16_MIB, "at least 20"),
                    (SAME, LONG_16_MIB, "at least 8"),
                    (STRICT, LONG_16_MIB, "at least 20"),
                ] {
                    ratios.push(Ratio::new(
                        format!("S6, {}, {what}: FIFO / {row}", LOADS[column].heading).leak(),
                        goal,
                        &table.rounds(FIFO, column),
                        &table.rounds(row, column),
                    ));
                }
            }
            ratios
        },
    }
}

/// Returns the median and the 99th percentile of the time from a mouse's post to its completion, in us.
fn mice(how: How, load: usize) -> Result<[f64; 2]> {
    let Load {
        bytes,
        per_second,
        elephants,
        elephant_bytes,
        depth,
        time_ms,
        ..
    } = LOADS[load];
    let placement = match how {
        How::Shared { .. } => Placement::Shared,
        _ => Placement::Own,
    };
    let hosts = Setup::new(placement, LINK).start()?;
    let sink = hosts.sink(1)?;
    let mut args = format!("--bytes {bytes} --depth {depth} --per-second {per_second} --time-ms {time_ms}");
    match how {
        How::OneQueuePair => args += &format!(" --elephants {elephants} --elephant-bytes {elephant_bytes}"),
        How::Own => (),
        How::Shared { tos } => args += &format!(" --tos {tos}"),
    }
    let mut sources = vec![hosts.source(0, &[&sink], &args)?];
    if how != How::OneQueuePair {
        let args = format!("--bytes {elephant_bytes} --time-ms {}", time_ms + 200);
        let elephant = |_| hosts.source(0, &[&sink], &args);
        sources.extend((0..elephants).map(elephant).collect::<Result<Vec<Side>>>()?);
    }
    let reports = run(&mut sources)?;
    let mice = reports.first().context("no mice")?;
    Ok([mice.p50_us, mice.p99_us])
}

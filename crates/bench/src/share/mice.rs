//! S6: short messages at random times beside long ones.

use anyhow::{Context, Result};

use super::super::child::Side;
use super::super::table::{Column, Ratio, Suite, Table, figures};
use super::LINK;
use super::hosts::{Placement, Setup, run};

/// A column: bytes of a mouse, mice a second, and the number of elephants.
const LOADS: [(u32, u32, u32, &str); 4] = [
    (16_384, 300, 1, "16 KiB, 1 elephant"),
    (16_384, 300, 7, "16 KiB, 7 elephants"),
    (49_000, 100, 1, "49 KB, 1 elephant"),
    (49_000, 100, 7, "49 KB, 7 elephants"),
];
const SHORT_1: usize = 0;
const SHORT_7: usize = 1;
const LONG_1: usize = 2;
const LONG_7: usize = 3;

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
        .map(|(nth, load)| (nth, load.3))
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
                     WRITEs of 1 MiB, one in flight each; nodes keep to 900 Mbit/s; all wait adaptively",
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
                ] {
                    ratios.push(Ratio::new(
                        format!("S6, {}, {what}: FIFO / {row}", LOADS[column].3).leak(),
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
    let (bytes, per_second, elephants, _) = LOADS[load];
    let placement = match how {
        How::Shared { .. } => Placement::Shared,
        _ => Placement::Own,
    };
    let hosts = Setup::new(placement, LINK).start()?;
    let sink = hosts.sink(1)?;
    let mut args = format!("--bytes {bytes} --depth 64 --per-second {per_second} --time-ms 3000");
    match how {
        How::OneQueuePair => args += &format!(" --elephants {elephants}"),
        How::Own => (),
        How::Shared { tos } => args += &format!(" --tos {tos}"),
    }
    let mut sources = vec![hosts.source(0, &[&sink], &args)?];
    if how != How::OneQueuePair {
        let elephant = |_| hosts.source(0, &[&sink], "--bytes 1048576 --time-ms 3200");
        sources.extend((0..elephants).map(elephant).collect::<Result<Vec<Side>>>()?);
    }
    let reports = run(&mut sources)?;
    let mice = reports.first().context("no mice")?;
    Ok([mice.p50_us, mice.p99_us])
}

//! S1: threads that post to one queue pair.

use super::super::scale::{QueuePairs, rate};
use super::super::table::{Column, Line, Ratio, Suite, Table};

const THREADS: [Column; 5] = [(1, "1"), (3, "3"), (6, "6"), (9, "9"), (12, "12")];
const OWN: &str = "a queue pair each";
const ONE: &str = "one queue pair";

const SIZES: [(u32, &str, &str); 2] = [
    (
        64,
        "s1_64_million_writes_per_s",
        "S1: WRITE 64 B by threads, millions/s",
    ),
    (
        4096,
        "s1_4096_million_writes_per_s",
        "S1: WRITE 4 KiB by threads, millions/s",
    ),
];

pub(super) fn suite() -> Suite {
    Suite {
        key: "s1",
        conditions: "Shared memory, one engine in each process, unsignaled WRITEs of threads pinned in turn to all CPUs, 0.5 s each",
        claim: Some("Avatar: 34 % less with 6 threads and 44 % less with 9, by locks; it had 24 cores."),
        tables: SIZES.into_iter().map(table).collect(),
        ratios,
    }
}

fn table((bytes, key, title): (u32, &'static str, &'static str)) -> Table {
    let numbers = THREADS.map(|(n, _)| n);
    Table {
        key,
        title,
        digits: 2,
        columns: THREADS.to_vec(),
        lines: vec![
            Line::new(OWN, &numbers, move |n| rate(&[n], bytes, QueuePairs::Own)),
            Line::new(ONE, &numbers, move |n| rate(&[n], bytes, QueuePairs::One)),
        ],
        compares: true,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for (table, size) in tables.iter().zip(["64 B", "4 KiB"]) {
        for n in [6, 9] {
            ratios.push(Ratio::new(
                format!("S1, {size}: one queue pair, {n} threads / 1 thread").leak(),
                // Avatar's loss: 34 % with 6 threads, 44 % with 9.
                if n == 6 { "at least 0.66" } else { "at least 0.56" },
                &table.rounds(ONE, n),
                &table.rounds(ONE, 1),
            ));
        }
    }
    ratios
}

//! The price of changing what threads may do with pages: the memory primitive of a distributed shared memory, beside `mprotect`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rdmux_dsm::memory::userfault::{Abilities, Delivery, Options, Writes};
use rdmux_dsm::memory::{Access, Change, Costs, Engine, PageBatch, View};
use rdmux_memory::AnonymousMemory;

use super::CPUS;
use super::table::{Column, Line, Ratio, Suite, Table};

const COLUMNS: [Column; 6] = [
    (0, "protect 64 of 192"),
    (1, "invalidate 64 of 192"),
    (2, "256 dirty"),
    (3, "4,096 dirty"),
    (4, "256 dirty, one thread"),
    (5, "4,096 dirty, one thread"),
];
const MPROTECT: &str = "mprotect, page by page";
const SINGLE: &str = "userfaultfd, page by page";
const BATCH: &str = "PageBatch";
const WRITTEN: &str = "take_written (PAGEMAP_SCAN)";

/// Pages of a region in which some are dirty.
const REGION: u32 = 32_768;

/// Changes of a column.
struct Shape {
    pages: u32,
    /// Each so many pages one is changed.
    step: u32,
    change: Change,
    has_second_thread: bool,
    /// Measurements of a round, whose median counts.
    repeats: usize,
}

fn shape(column: usize) -> Shape {
    let of = |pages, count, change, has_second_thread, repeats| Shape {
        pages,
        step: pages / count,
        change,
        has_second_thread,
        repeats,
    };
    match column {
        0 => of(192, 64, Change::Protect, true, 21),
        1 => of(192, 64, Change::Invalidate, true, 21),
        2 => of(REGION, 256, Change::Protect, true, 11),
        3 => of(REGION, 4096, Change::Protect, true, 5),
        4 => of(REGION, 256, Change::Protect, false, 11),
        _ => of(REGION, 4096, Change::Protect, false, 5),
    }
}

/// Ways to change pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Mprotect,
    Single,
    Batch,
    Written,
}

fn engine(way: Way) -> Result<Engine> {
    if way == Way::Mprotect {
        return Ok(Engine::Mprotect);
    }
    let abilities = Abilities::probe();
    ensure!(abilities.is_enough(), "userfaultfd is not to be had here");
    let catches = abilities.catches.context("no userfaultfd")?;
    let writes = match way {
        Way::Written => Writes::Record,
        _ => Writes::Fault,
    };
    ensure!(
        writes == Writes::Fault || abilities.record,
        "the kernel records no writes"
    );
    Ok(Engine::Userfault(Options {
        catches,
        delivery: Delivery::Poll,
        writes,
    }))
}

/// Returns the microseconds of changing the pages of a column in one of the ways.
fn run(way: Way, column: usize) -> Result<f64> {
    let shape = shape(column);
    let engine = engine(way)?;
    let page_bytes = rustix::param::page_size();
    let memory = AnonymousMemory::shareable(shape.pages as usize * page_bytes)?;
    let view = View::new(Arc::new(memory), None, engine, Costs::measure(engine)?)?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if shape.has_second_thread {
            scope.spawn(|| {
                let _ = super::pin(CPUS[1]);
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let measuring = scope.spawn(|| {
            super::pin(CPUS[0])?;
            let times = (0..shape.repeats).map(|_| measure(way, &shape, &view));
            let mut times = times.collect::<Result<Vec<f64>>>()?;
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        });
        let median = measuring.join();
        is_over.store(true, Ordering::Relaxed);
        median.expect("no panic")
    })
}

fn measure(way: Way, shape: &Shape, view: &View) -> Result<f64> {
    let chosen = || (0..shape.pages).step_by(shape.step as usize);
    let count = chosen().len();
    let mut batch = PageBatch::new();
    prepare(way, shape, view, &mut batch)?;
    let began = Instant::now();
    let changed = match way {
        Way::Mprotect | Way::Single => {
            let mut changed = 0;
            for page in chosen() {
                changed += usize::from(view.change(page, shape.change)?);
            }
            changed
        }
        Way::Batch => {
            for page in chosen() {
                batch.add(page..page + 1, shape.change);
            }
            view.apply(&mut batch)?.pages
        }
        Way::Written => {
            let written = view.take_written(0..shape.pages)?;
            written.iter().map(Range::len).sum()
        }
    };
    let time = began.elapsed();
    ensure!(changed == count, "{changed} of {count} pages changed");
    Ok(time.as_secs_f64() * 1e6)
}

/// Makes the pages that are to change dirty. Where some of a large region are, the others are clean; else all are dirty.
fn prepare(way: Way, shape: &Shape, view: &View, batch: &mut PageBatch) -> Result<()> {
    let is_dirty = |page: u32| shape.pages < REGION || page.is_multiple_of(shape.step);
    let others = if shape.pages < REGION {
        Access::Write
    } else {
        Access::Read
    };
    batch.install(0..shape.pages, others);
    view.apply(batch)?;
    if way == Way::Written {
        view.take_written(0..shape.pages)?;
    } else {
        for page in (0..shape.pages).filter(|page| is_dirty(*page)) {
            batch.unprotect(page..page + 1);
        }
        view.apply(batch)?;
    }
    let page_bytes = rustix::param::page_size();
    for page in 0..shape.pages {
        let at = page as usize * page_bytes;
        match is_dirty(page) {
            true => drop(view.mapping().word(at).fetch_add(1, Ordering::Relaxed)),
            false => drop(view.mapping().load(at)),
        }
    }
    Ok(())
}

/// Returns what `--table dsm-pages` measures.
pub(super) fn suite() -> Suite {
    let all: Vec<usize> = COLUMNS.iter().map(|(column, _)| *column).collect();
    let line = |name, columns: &[usize], way| Line::new(name, columns, move |column| run(way, column));
    Suite {
        key: "dsm-pages",
        conditions: "pages of 4 KiB; 64 of 192: every third, the others may be written; dirty: of 32,768 at even distances, the others may be read; a second thread of the process \
                     spins, except where it says one thread; page by page the dirty pages are known, take_written finds them",
        claim: Some(
            "The talk (Mellanox and Technion, 2003): changing protections in the kernel is an order of magnitude faster than by system calls.",
        ),
        tables: vec![Table {
            key: "change_us",
            title: "us for all pages",
            digits: 1,
            columns: COLUMNS.to_vec(),
            lines: vec![
                line(MPROTECT, &all, Way::Mprotect),
                line(SINGLE, &all, Way::Single),
                line(BATCH, &all, Way::Batch),
                line(WRITTEN, &all[2..], Way::Written),
            ],
            compares: true,
        }],
        ratios,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let rows = [
        ("protect 64 of 192: mprotect / PageBatch", BATCH, 0),
        ("invalidate 64 of 192: mprotect / PageBatch", BATCH, 1),
        ("256 dirty: mprotect / take_written", WRITTEN, 2),
        ("4,096 dirty: mprotect / take_written", WRITTEN, 3),
        ("256 dirty, one thread: mprotect / take_written", WRITTEN, 4),
        ("4,096 dirty, one thread: mprotect / take_written", WRITTEN, 5),
    ];
    let table = &tables[0];
    rows.map(|(name, row, column)| {
        let (of, to) = (table.rounds(MPROTECT, column), table.rounds(row, column));
        Ratio::new(name, "at least 10", &of, &to)
    })
    .into()
}

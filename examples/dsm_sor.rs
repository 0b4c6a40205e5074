//! Red-black successive over-relaxation (SOR) of a grid in a distributed shared memory, checked against a run of its own without one.
//!
//! ```text
//! rdmux dsm run -n 2 -- dsm_sor [EDGE [ITERATIONS]]
//! ```
//!
//! The nodes divide the rows. Each reads the row beyond its first and its last one, which are all that moves.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rdmux_dsm::{Array, Cluster, RegionOptions, Session};

/// Factor of over-relaxation.
const OMEGA: f64 = 1.25;

fn main() -> Result<()> {
    rdmux_soft::register();
    rdmux_hw::register();
    let arguments: Vec<usize> = std::env::args()
        .skip(1)
        .map(|it| it.parse())
        .collect::<Result<_, _>>()?;
    let (edge, iterations) = match arguments[..] {
        [] => (1022, 20),
        [edge] => (edge, 20),
        [edge, iterations] => (edge, iterations),
        _ => bail!("usage: dsm_sor [EDGE [ITERATIONS]]"),
    };
    let session = Session::join(Cluster::of_environment()?, Duration::from_secs(30))?;
    run(&session, edge, iterations)
}

/// A grid with a border of fixed values, in memory of either kind.
trait Grid {
    fn get(&self, index: usize) -> f64;
    fn set(&mut self, index: usize, value: f64);
}

impl Grid for Vec<f64> {
    fn get(&self, index: usize) -> f64 {
        self[index]
    }
    fn set(&mut self, index: usize, value: f64) {
        self[index] = value;
    }
}

impl Grid for Array<'_, f64> {
    fn get(&self, index: usize) -> f64 {
        Array::get(self, index)
    }
    fn set(&mut self, index: usize, value: f64) {
        Array::set(self, index, value);
    }
}

/// Values of the border: heat at the first row.
fn border(grid: &mut impl Grid, edge: usize, rows: std::ops::Range<usize>) {
    let width = edge + 2;
    for row in rows {
        for column in 0..width {
            grid.set(row * width + column, if row == 0 { 100.0 } else { 0.0 });
        }
    }
}

/// Relaxes the elements of one colour in some rows.
fn relax(grid: &mut impl Grid, edge: usize, rows: std::ops::Range<usize>, colour: usize) {
    let width = edge + 2;
    for row in rows {
        let first = 1 + (row + colour) % 2;
        for at in (row * width + first..row * width + edge + 1).step_by(2) {
            let around = grid.get(at - width) + grid.get(at + width) + grid.get(at - 1) + grid.get(at + 1);
            let old = grid.get(at);
            grid.set(at, old + OMEGA * (around / 4.0 - old));
        }
    }
}

fn run(session: &Session, edge: usize, iterations: usize) -> Result<()> {
    let (node, nodes) = (session.node() as usize, session.nodes() as usize);
    let width = edge + 2;
    ensure!(edge >= nodes, "{edge} rows for {nodes} nodes");
    // Node k has rows first(k) to first(k + 1), the border besides.
    let first = |node: usize| 1 + node * edge / nodes;
    let rows = first(node)..first(node + 1);
    let bytes = (width * width * 8) as u64;
    let row = (bytes / 4096).div_ceil(nodes as u64);
    let region = session.region(&RegionOptions {
        row,
        ..RegionOptions::new(bytes)?
    })?;
    let mut grid = region.array::<f64>(0, width * width);
    let mut thread = session.thread(0)?;
    let parties = NonZeroU32::new(nodes as u32).unwrap_or(NonZeroU32::MIN);

    let with_border =
        if node == 0 { 0 } else { rows.start }..if node + 1 == nodes { width } else { rows.end };
    border(&mut grid, edge, with_border);
    thread.barrier(0, parties)?;
    let before = region.stat();
    let began = Instant::now();
    for _ in 0..iterations {
        for colour in 0..2 {
            relax(&mut grid, edge, rows.clone(), colour);
            thread.barrier(0, parties)?;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let after = region.stat();

    let own: f64 = (rows.start * width..rows.end * width)
        .map(|at| Array::get(&grid, at))
        .sum();
    let total = thread.sum(0, parties, own)?;
    let mut alone = vec![0.0; width * width];
    border(&mut alone, edge, 0..width);
    let began = Instant::now();
    for _ in 0..iterations {
        for colour in 0..2 {
            relax(&mut alone, edge, 1..edge + 1, colour);
        }
    }
    let sequential = began.elapsed().as_secs_f64();
    let wrong = (rows.start * width..rows.end * width).find(|at| Array::get(&grid, *at) != alone[*at]);
    if let Some(at) = wrong {
        bail!(
            "row {} column {}: {} instead of {}",
            at / width,
            at % width,
            Array::get(&grid, at),
            alone[at]
        );
    }
    println!(
        "node {node}: {seconds:.3} s, alone {sequential:.3} s, {} pages read, sum {total:.6}: correct",
        after.fetches - before.fetches
    );
    thread.barrier(0, parties)?;
    Ok(())
}

//! Product of two matrices in a distributed shared memory, checked against a run of its own without one.
//!
//! ```text
//! rdmux dsm run -n 2 -- dsm_matmul [EDGE]
//! ```
//!
//! The nodes divide the rows of all matrices. Each reads all rows of the second factor, of which those of other nodes move once.

mod dsm;

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use rdmux_dsm::{Access, Array};

use crate::dsm::{Node, Numbers, Options, Places, Report, seconds, share};

/// Rows of the product that are computed together, so that a row of the second factor is copied once for all of them.
const TOGETHER: usize = 16;

/// Product of two square matrices
#[derive(Parser)]
struct Arguments {
    /// Rows and columns of a matrix
    #[arg(default_value_t = 768)]
    edge: usize,
    #[command(flatten)]
    options: Options,
}

// Layers of the places, whose items are rows.
const A: usize = 0;
const B: usize = 1;
const PRODUCT: usize = 2;

struct Matrices<'a, N> {
    numbers: N,
    places: &'a Places,
    edge: usize,
}

impl<N: Numbers<f64>> Matrices<'_, N> {
    fn get(&self, matrix: usize, row: usize, column: usize) -> f64 {
        self.numbers.get(self.places.start(matrix, row) + column)
    }

    /// Sets some rows of both factors.
    fn begin(&self, rows: Range<usize>) {
        for row in rows {
            let (a, b) = (self.places.start(A, row), self.places.start(B, row));
            for column in 0..self.edge {
                self.numbers
                    .set(a + column, ((row * 31 + column * 17) % 101) as f64 / 7.0);
                self.numbers
                    .set(b + column, ((row * 13 + column * 29) % 103) as f64 / 11.0);
            }
        }
    }

    /// Computes some rows of the product. Each element is a sum in the order of the columns of A, so it is the same in each run.
    fn multiply(&self, rows: Range<usize>) {
        let edge = self.edge;
        let mut sums = vec![0.0; TOGETHER * edge];
        let mut of_b = vec![0.0; edge];
        for first in rows.clone().step_by(TOGETHER) {
            let together = first..rows.end.min(first + TOGETHER);
            sums.fill(0.0);
            for k in 0..edge {
                self.numbers.read(self.places.start(B, k), &mut of_b);
                for (row, sums) in together.clone().zip(sums.chunks_exact_mut(edge)) {
                    let a = self.get(A, row, k);
                    for (sum, b) in sums.iter_mut().zip(&of_b) {
                        *sum += a * b;
                    }
                }
            }
            for (row, sums) in together.zip(sums.chunks_exact(edge)) {
                self.numbers.write(self.places.start(PRODUCT, row), sums);
            }
        }
    }
}

impl Matrices<'_, Array<'_, f64>> {
    /// Gets the right to read the second factor, whose rows some nodes divide.
    fn prepare(&self, nodes: usize) -> Result<()> {
        for node in 0..nodes {
            let rows = share(self.edge, nodes, node);
            let start = self.places.start(B, rows.start);
            self.numbers
                .acquire(start..start + rows.len() * self.edge, Access::Read)?;
        }
        Ok(())
    }
}

/// Returns the places of the matrices, whose rows some nodes divide.
fn places(edge: usize, nodes: usize) -> Places {
    let node = |node| std::iter::repeat_n(node, share(edge, nodes, node).len());
    let nodes_of_rows: Vec<usize> = (0..nodes).flat_map(node).collect();
    Places::new(&nodes_of_rows, nodes, edge, 3)
}

fn main() -> Result<()> {
    let Arguments { edge, options } = Arguments::parse();
    let node = Node::join(options)?;
    let parties = node.parties();
    ensure!(edge >= parties, "{edge} rows for {parties} threads");
    let places_shared = places(edge, node.nodes());
    let region = node.region_of(&places_shared)?;
    let matrices = Matrices {
        numbers: region.array::<f64>(0, places_shared.words()),
        places: &places_shared,
        edge,
    };
    let outcomes = node.run(|party| {
        let rows = share(edge, parties, party.number);
        matrices.begin(rows.clone());
        let timed = party.time(&region, |party| {
            party.prepare(|| matrices.prepare(node.nodes()))?;
            matrices.multiply(rows.clone());
            Ok(())
        })?;
        let elements = rows.flat_map(|row| (0..edge).map(move |column| (row, column)));
        let sum = party.sum(
            elements
                .map(|(row, column)| matrices.get(PRODUCT, row, column))
                .sum(),
        )?;
        Ok((timed, sum))
    })?;
    let (shared, sum) = *outcomes.first().context("no thread")?;

    let places_alone = places(edge, 1);
    let alone = Matrices {
        numbers: places_alone.alone::<f64>(),
        places: &places_alone,
        edge,
    };
    alone.begin(0..edge);
    let seconds = seconds(|| alone.multiply(0..edge));
    for row in share(edge, node.nodes(), node.number()) {
        for column in 0..edge {
            let (is, should_be) = (
                matrices.get(PRODUCT, row, column),
                alone.get(PRODUCT, row, column),
            );
            if is != should_be {
                bail!("row {row} column {column}: {is} instead of {should_be}");
            }
        }
    }
    node.end(&Report {
        shared,
        alone: seconds,
        result: ("sum", sum),
    })
}

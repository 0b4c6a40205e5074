//! Red-black successive over-relaxation (SOR) of a grid in a distributed shared memory, checked against a run of its own without one.
//!
//! ```text
//! rdmux dsm run -n 2 -- dsm_sor [EDGE [ITERATIONS]]
//! ```
//!
//! The nodes divide the rows. Each reads the row beyond its first and its last one, which are all that moves. Each colour has pages of its own:
//! while all change one colour, nobody writes what the others read.

mod dsm;

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use rdmux_dsm::{Access, Array};

use crate::dsm::{Node, Numbers, Options, Places, Report, acquire, seconds, share};

/// Factor of over-relaxation.
const OMEGA: f64 = 1.25;

/// Points that are relaxed together. Copies of a constant, small length are loads and stores of the processor's registers.
const PIECE: usize = 16;

/// Red-black successive over-relaxation of a grid
#[derive(Parser)]
struct Arguments {
    /// Points of an edge of the grid, without its border
    #[arg(default_value_t = 1022)]
    edge: usize,
    #[arg(default_value_t = 20)]
    iterations: usize,
    #[command(flatten)]
    options: Options,
}

/// A grid with a border of fixed values. The points whose row and column add up to an odd number have colour 0, the others colour 1.
struct Grid<'a, N> {
    numbers: N,
    /// Rows as items, colours as layers.
    places: &'a Places,
    edge: usize,
}

impl<N: Numbers<f64>> Grid<'_, N> {
    fn index(&self, row: usize, column: usize) -> usize {
        self.places.start((row + column + 1) % 2, row) + column / 2
    }

    fn get(&self, row: usize, column: usize) -> f64 {
        self.numbers.get(self.index(row, column))
    }

    /// Sets the border and the points of some rows: heat at the first row.
    fn begin(&self, rows: Range<usize>) {
        for row in rows {
            for column in 0..self.edge + 2 {
                let value = if row == 0 { 100.0 } else { 0.0 };
                self.numbers.set(self.index(row, column), value);
            }
        }
    }

    /// Returns the number of points of one colour in a row, with those that only rows of the other parity have.
    fn width(&self) -> usize {
        (self.edge + 2).div_ceil(2)
    }

    /// Relaxes the points of one colour in some rows.
    fn relax(&self, rows: Range<usize>, colour: usize) {
        for row in rows {
            let first = 1 + (row + colour) % 2;
            let points = (self.edge + 2 - first) / 2;
            let [above, beside, below] =
                [row - 1, row, row + 1].map(|row| self.places.start(1 - colour, row));
            let row = Row {
                own: self.places.start(colour, row) + first / 2,
                above: above + first / 2,
                below: below + first / 2,
                beside,
            };
            let whole = points - points % PIECE;
            for point in (0..whole).step_by(PIECE) {
                self.relax_piece::<PIECE>(&row, point);
            }
            for point in whole..points {
                self.relax_piece::<1>(&row, point);
            }
        }
    }

    /// Relaxes some points of a row, which are side by side, in copies.
    #[inline]
    fn relax_piece<const LEN: usize>(&self, row: &Row, point: usize) {
        let read = |start: usize| {
            let mut numbers = [0.0; LEN];
            self.numbers.read(start + point, &mut numbers);
            numbers
        };
        let (above, below) = (read(row.above), read(row.below));
        let (left, right) = (read(row.beside), read(row.beside + 1));
        let mut points = read(row.own);
        for i in 0..LEN {
            let around = above[i] + below[i] + left[i] + right[i];
            points[i] += OMEGA * (around / 4.0 - points[i]);
        }
        self.numbers.write(row.own + point, &points);
    }
}

/// Indices of the first point of one colour in a row that is not of the border, and of the numbers around it.
struct Row {
    own: usize,
    above: usize,
    below: usize,
    /// Of the number at the left; that at the right is the next one.
    beside: usize,
}

impl Grid<'_, Array<'_, f64>> {
    /// Gets the rights to relax the points of one colour in some rows: to the rows beyond them, and to those that others have read.
    fn prepare(&self, rows: &Range<usize>, colour: usize) -> Result<()> {
        let row = |row, colour, access| {
            let start = self.places.start(colour, row);
            (start..start + self.width(), access)
        };
        acquire(
            &self.numbers,
            &[
                row(rows.start - 1, 1 - colour, Access::Read),
                row(rows.end, 1 - colour, Access::Read),
                row(rows.start, colour, Access::Write),
                row(rows.end - 1, colour, Access::Write),
            ],
        )
    }
}

/// Returns the rows of a party among those of the grid, with the border if it is asked for.
fn rows(edge: usize, parties: usize, party: usize, with_border: bool) -> Range<usize> {
    let rows = share(edge, parties, party);
    let is_first = with_border && party == 0;
    let is_last = with_border && party + 1 == parties;
    rows.start + usize::from(!is_first)..rows.end + 1 + usize::from(is_last)
}

/// Returns the places of a grid whose rows some nodes divide.
fn places(edge: usize, nodes: usize) -> Places {
    let node = |node| std::iter::repeat_n(node, rows(edge, nodes, node, true).len());
    let nodes_of_rows: Vec<usize> = (0..nodes).flat_map(node).collect();
    Places::new(&nodes_of_rows, nodes, (edge + 2).div_ceil(2), 2)
}

fn main() -> Result<()> {
    let Arguments {
        edge,
        iterations,
        options,
    } = Arguments::parse();
    let node = Node::join(options)?;
    let parties = node.parties();
    ensure!(edge >= parties, "{edge} rows for {parties} threads");
    let places_shared = places(edge, node.nodes());
    let region = node.region_of(&places_shared)?;
    let grid = Grid {
        numbers: region.array::<f64>(0, places_shared.words()),
        places: &places_shared,
        edge,
    };
    let outcomes = node.run(|party| {
        grid.begin(rows(edge, parties, party.number, true));
        let own = rows(edge, parties, party.number, false);
        let timed = party.time(&region, |party| {
            for half in 0..2 * iterations {
                party.prepare(|| grid.prepare(&own, half % 2))?;
                grid.relax(own.clone(), half % 2);
                party.barrier()?;
            }
            Ok(())
        })?;
        let points = own.flat_map(|row| (0..edge + 2).map(move |column| (row, column)));
        let sum = party.sum(points.map(|(row, column)| grid.get(row, column)).sum())?;
        Ok((timed, sum))
    })?;
    let (shared, sum) = *outcomes.first().context("no thread")?;

    let places_alone = places(edge, 1);
    let alone = Grid {
        numbers: places_alone.alone::<f64>(),
        places: &places_alone,
        edge,
    };
    alone.begin(0..edge + 2);
    let seconds = seconds(|| (0..2 * iterations).for_each(|half| alone.relax(1..edge + 1, half % 2)));
    for row in rows(edge, node.nodes(), node.number(), false) {
        for column in 0..edge + 2 {
            let (is, should_be) = (grid.get(row, column), alone.get(row, column));
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

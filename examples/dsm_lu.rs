//! LU decomposition of a matrix by blocks, without pivoting, in a distributed shared memory, checked against a run of its own without one.
//!
//! ```text
//! rdmux dsm run -n 2 -- dsm_lu [EDGE [BLOCK]]
//! ```
//!
//! The threads form a rectangle, which is laid over the blocks again and again: a thread owns the blocks on which it comes to lie. A block's numbers
//! follow each other in memory, in pages whose home is the owner's node. In each step the owners of the blocks beside and below the diagonal
//! block read that one, then all owners read blocks of its row and column.

mod dsm;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use rdmux_dsm::{Access, Array};

use crate::dsm::{Node, Numbers, Options, Places, Report, acquire, seconds};

/// LU decomposition of a square matrix
#[derive(Parser)]
struct Arguments {
    /// Rows and columns of the matrix, a multiple of those of a block
    #[arg(default_value_t = 768)]
    edge: usize,
    /// Rows and columns of a block
    #[arg(default_value_t = 32)]
    block: usize,
    #[command(flatten)]
    options: Options,
}

/// The threads as a rectangle.
#[derive(Clone, Copy)]
struct Rectangle {
    rows: usize,
    columns: usize,
}

impl Rectangle {
    /// Forms a rectangle that is as near to a square as may be.
    fn of(parties: usize) -> Rectangle {
        let divides = |rows: &usize| parties.is_multiple_of(*rows);
        let rows = (1..=parties.isqrt()).rev().find(divides).unwrap_or(1);
        let columns = parties / rows;
        Rectangle { rows, columns }
    }

    /// Returns the thread that owns a block.
    fn owner(self, row: usize, column: usize) -> usize {
        row % self.rows * self.columns + column % self.columns
    }
}

/// A matrix of `count` rows and columns of blocks, of `size` rows and columns each.
struct Blocks<'a, N> {
    numbers: N,
    places: &'a Places,
    count: usize,
    size: usize,
}

impl<N: Numbers<f64>> Blocks<'_, N> {
    fn start(&self, row: usize, column: usize) -> usize {
        self.places.start(0, row * self.count + column)
    }

    fn load(&self, row: usize, column: usize) -> Vec<f64> {
        let mut block = vec![0.0; self.size * self.size];
        self.numbers.read(self.start(row, column), &mut block);
        block
    }

    fn store(&self, row: usize, column: usize, block: &[f64]) {
        self.numbers.write(self.start(row, column), block);
    }

    /// Sets a block of a matrix whose diagonal outweighs the rest, so that no pivot is small.
    fn begin(&self, row: usize, column: usize) {
        let (size, edge) = (self.size, self.size * self.count);
        let mut block = vec![0.0; size * size];
        for (at, value) in block.iter_mut().enumerate() {
            let (i, j) = (row * size + at / size, column * size + at % size);
            *value = ((i * 37 + j * 23) % 97) as f64 / 97.0;
            if i == j {
                *value += edge as f64;
            }
        }
        self.store(row, column, &block);
    }

    /// Decomposes the block `k` of the diagonal: U, and below it L, whose own diagonal is 1.
    fn decompose(&self, k: usize) {
        let size = self.size;
        let mut block = self.load(k, k);
        for pivot in 0..size {
            let (upper, below) = block.split_at_mut((pivot + 1) * size);
            for row in below.chunks_exact_mut(size) {
                eliminate(row, pivot, &upper[pivot * size..]);
            }
        }
        self.store(k, k, &block);
    }

    /// Computes a block of L, below that of the diagonal.
    fn solve_below(&self, row: usize, k: usize) {
        let diagonal = self.load(k, k);
        let mut block = self.load(row, k);
        for row in block.chunks_exact_mut(self.size) {
            for (pivot, upper) in diagonal.chunks_exact(self.size).enumerate() {
                eliminate(row, pivot, upper);
            }
        }
        self.store(row, k, &block);
    }

    /// Computes a block of U, beside that of the diagonal.
    fn solve_beside(&self, k: usize, column: usize) {
        let size = self.size;
        let diagonal = self.load(k, k);
        let mut block = self.load(k, column);
        for pivot in 0..size {
            let (upper, below) = block.split_at_mut((pivot + 1) * size);
            for (at, row) in below.chunks_exact_mut(size).enumerate() {
                let factor = diagonal[(pivot + 1 + at) * size + pivot];
                subtract(row, factor, &upper[pivot * size..]);
            }
        }
        self.store(k, column, &block);
    }

    /// Subtracts the product of a block of L and one of U, both of step `k`.
    fn update(&self, row: usize, column: usize, k: usize) {
        let size = self.size;
        let (lower, upper) = (self.load(row, k), self.load(k, column));
        let mut block = self.load(row, column);
        for (row, factors) in block.chunks_exact_mut(size).zip(lower.chunks_exact(size)) {
            for (factor, upper) in factors.iter().zip(upper.chunks_exact(size)) {
                subtract(row, *factor, upper);
            }
        }
        self.store(row, column, &block);
    }

    /// Decomposes the blocks that one owner has, in step with the others: `meet` waits for them, and gets the right to read some blocks. Each number
    /// takes the same steps in the same order with any number of owners.
    fn run(
        &self,
        is_own: impl Fn(usize, usize) -> bool,
        mut meet: impl FnMut(&[(usize, usize)]) -> Result<()>,
    ) -> Result<()> {
        for k in 0..self.count {
            let rest = k + 1..self.count;
            if is_own(k, k) {
                self.decompose(k);
            }
            let needs_diagonal = rest.clone().any(|at| is_own(at, k) || is_own(k, at));
            let diagonal = [(k, k)];
            meet(if needs_diagonal { &diagonal } else { &[] })?;
            for at in rest.clone() {
                if is_own(at, k) {
                    self.solve_below(at, k);
                }
                if is_own(k, at) {
                    self.solve_beside(k, at);
                }
            }
            let has_row = |row: &usize| rest.clone().any(|column| is_own(*row, column));
            let has_column = |column: &usize| rest.clone().any(|row| is_own(row, *column));
            let lower = rest.clone().filter(has_row).map(|row| (row, k));
            let upper = rest.clone().filter(has_column).map(|column| (k, column));
            meet(&lower.chain(upper).collect::<Vec<_>>())?;
            for row in rest.clone() {
                for column in rest.clone().filter(|column| is_own(row, *column)) {
                    self.update(row, column, k);
                }
            }
        }
        Ok(())
    }
}

impl Blocks<'_, Array<'_, f64>> {
    /// Gets the right to read some blocks.
    fn prepare(&self, blocks: &[(usize, usize)]) -> Result<()> {
        let numbers = |(row, column): &(usize, usize)| {
            let start = self.start(*row, *column);
            (start..start + self.size * self.size, Access::Read)
        };
        acquire(&self.numbers, &blocks.iter().map(numbers).collect::<Vec<_>>())
    }
}

/// Returns the rows and columns of all blocks.
fn all(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |row| (0..count).map(move |column| (row, column)))
}

/// Makes the number of a row at the pivot one of L, and subtracts so many times the pivot's row from those after it.
fn eliminate(row: &mut [f64], pivot: usize, upper: &[f64]) {
    row[pivot] /= upper[pivot];
    let factor = row[pivot];
    subtract(&mut row[pivot + 1..], factor, &upper[pivot + 1..]);
}

fn subtract(row: &mut [f64], factor: f64, other: &[f64]) {
    for (number, other) in row.iter_mut().zip(other) {
        *number -= factor * other;
    }
}

fn main() -> Result<()> {
    let Arguments { edge, block, options } = Arguments::parse();
    ensure!(
        block > 0 && edge > 0 && edge.is_multiple_of(block),
        "{edge} rows are not divided into blocks of {block}"
    );
    let node = Node::join(options)?;
    let rectangle = Rectangle::of(node.parties());
    let (count, size) = (edge / block, block);
    let node_of = |(row, column)| rectangle.owner(row, column) / node.threads();
    let nodes_of_blocks: Vec<usize> = all(count).map(node_of).collect();
    let places_shared = Places::new(&nodes_of_blocks, node.nodes(), size * size, 1);
    let region = node.region_of(&places_shared)?;
    let blocks = Blocks {
        numbers: region.array::<f64>(0, places_shared.words()),
        places: &places_shared,
        count,
        size,
    };
    let outcomes = node.run(|party| {
        let number = party.number;
        let is_own = |row, column| rectangle.owner(row, column) == number;
        let own: Vec<_> = all(count).filter(|(row, column)| is_own(*row, *column)).collect();
        own.iter().for_each(|(row, column)| blocks.begin(*row, *column));
        let timed = party.time(&region, |party| {
            blocks.run(is_own, |needed| {
                party.barrier()?;
                party.prepare(|| blocks.prepare(needed))
            })
        })?;
        let sum_of = |(row, column): &(usize, usize)| blocks.load(*row, *column).iter().sum::<f64>();
        let sum = party.sum(own.iter().map(sum_of).sum())?;
        Ok((timed, sum))
    })?;
    let (shared, sum) = *outcomes.first().context("no thread")?;

    let places_alone = Places::new(&vec![0; count * count], 1, size * size, 1);
    let alone = Blocks {
        numbers: places_alone.alone::<f64>(),
        places: &places_alone,
        count,
        size,
    };
    all(count).for_each(|(row, column)| alone.begin(row, column));
    let mut outcome = Ok(());
    let seconds = seconds(|| outcome = alone.run(|_, _| true, |_| Ok(())));
    outcome?;
    for (row, column) in all(count).filter(|block| node_of(*block) == node.number()) {
        if blocks.load(row, column) != alone.load(row, column) {
            bail!("the block at row {row} column {column} of the blocks is wrong");
        }
    }
    node.end(&Report {
        shared,
        alone: seconds,
        result: ("sum", sum),
    })
}

#[cfg(test)]
#[allow(non_snake_case, reason = "tests are named function__case")]
mod tests {
    use super::*;

    #[test]
    fn run__has_the_factors_of_the_matrix() {
        let (count, size) = (4, 3);
        let edge = count * size;
        let places = Places::new(&vec![0; count * count], 1, size * size, 1);
        let blocks = Blocks {
            numbers: places.alone::<f64>(),
            places: &places,
            count,
            size,
        };
        all(count).for_each(|(row, column)| blocks.begin(row, column));
        let at = |i: usize, j: usize| blocks.load(i / size, j / size)[i % size * size + j % size];
        let matrix: Vec<f64> = all(edge).map(|(i, j)| at(i, j)).collect();
        blocks.run(|_, _| true, |_| Ok(())).unwrap();
        for (i, j) in all(edge) {
            let lower = |k| if k == i { 1.0 } else { at(i, k) };
            let product: f64 = (0..=i.min(j)).map(|k| lower(k) * at(k, j)).sum();
            assert!(
                (product - matrix[i * edge + j]).abs() < 1e-12,
                "row {i} column {j}"
            );
        }
    }
}

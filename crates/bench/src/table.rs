//! Tables of measurements: rows measured in turn, medians over the rounds, and ratios.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::rc::Rc;

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use serde_json::{Value, json};

/// A column: the parameter of its measurements (bytes, processes, CPUs), and its heading.
pub(super) type Column = (usize, &'static str);

/// Measures a row at one column.
type Measure = Box<dyn FnMut(usize) -> Result<f64>>;

/// A row: the name of the quantity and its program, and the columns that it has.
pub(super) struct Line {
    pub(super) name: &'static str,
    columns: Vec<usize>,
    measure: Measure,
    /// Values of each column, one a round.
    values: BTreeMap<usize, Vec<f64>>,
    /// Errors of the measurement, of the columns that have no values.
    missing: BTreeMap<usize, String>,
}

/// Returns rows of several tables, which show figures of the same runs: the first one measures, and has to be shown first.
pub(super) fn figures<const N: usize>(
    name: &'static str,
    columns: &[usize],
    mut measure: impl FnMut(usize) -> Result<[f64; N]> + 'static,
) -> [Line; N] {
    let kept = Rc::new(RefCell::new(BTreeMap::new()));
    let first = kept.clone();
    let mut measure = Some(move |column| {
        first.borrow_mut().remove(&column);
        let figures = measure(column)?;
        first.borrow_mut().insert(column, figures);
        Ok(figures[0])
    });
    std::array::from_fn(|nth| match measure.take() {
        Some(measure) => Line::new(name, columns, measure),
        None => {
            let kept = kept.clone();
            Line::new(name, columns, move |column| {
                let figures: [f64; N] = kept.borrow().get(&column).copied().context("see above")?;
                Ok(figures[nth])
            })
        }
    })
}

impl Line {
    pub(super) fn new(
        name: &'static str,
        columns: &[usize],
        measure: impl FnMut(usize) -> Result<f64> + 'static,
    ) -> Line {
        Line {
            name,
            columns: columns.to_vec(),
            measure: Box::new(measure),
            values: BTreeMap::new(),
            missing: BTreeMap::new(),
        }
    }

    fn round(&mut self) {
        for column in &self.columns {
            if self.missing.contains_key(column) {
                continue;
            }
            match (self.measure)(*column) {
                Ok(value) => self.values.entry(*column).or_default().push(value),
                Err(error) => {
                    self.missing.insert(*column, format!("{error:#}"));
                }
            }
        }
    }

    fn rounds(&self, column: usize) -> &[f64] {
        let is_complete = !self.missing.contains_key(&column);
        let values = self.values.get(&column).filter(|_| is_complete);
        values.map_or(&[], Vec::as_slice)
    }

    /// Returns the reasons why columns are not measured, each with its headings.
    fn missing(&self, columns: &[Column]) -> Vec<String> {
        let mut of_reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for (column, heading) in columns {
            let Some(reason) = self.missing.get(column) else {
                continue;
            };
            match of_reasons.iter_mut().find(|(other, _)| other == reason) {
                Some((_, headings)) => headings.push(heading),
                None => of_reasons.push((reason, vec![heading])),
            }
        }
        let text = |(reason, headings): (&str, Vec<&str>)| format!("{}: {reason}", headings.join(", "));
        of_reasons.into_iter().map(text).collect()
    }
}

/// Returns the lowest, the median and the highest value.
fn spread(values: &[f64]) -> Option<(f64, f64, f64)> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    Some((*values.first()?, values[values.len() / 2], *values.last()?))
}

/// Returns quotients of values of the same round: a machine that is four times slower for some seconds is slower for both.
fn quotients(of: &[f64], to: &[f64]) -> Vec<f64> {
    of.iter().zip(to).map(|(of, to)| of / to).collect()
}

/// Rows of one quantity.
pub(super) struct Table {
    /// Name in JSON, with the unit.
    pub(super) key: &'static str,
    pub(super) title: &'static str,
    /// Digits after the decimal point.
    pub(super) digits: usize,
    pub(super) columns: Vec<Column>,
    pub(super) lines: Vec<Line>,
    /// Set when each row is shown beside the first that has the column.
    pub(super) compares: bool,
}

impl Table {
    /// Returns the values of a row at a column, one a round; none where the row or a measurement is missing.
    pub(super) fn rounds(&self, name: &str, column: usize) -> Vec<f64> {
        let line = self.lines.iter().find(|line| line.name == name);
        line.map_or(Vec::new(), |line| line.rounds(column).to_vec())
    }

    /// Returns the median of a row at a column; `None` if it was not measured.
    pub(super) fn median(&self, name: &str, column: usize) -> Option<f64> {
        Some(spread(&self.rounds(name, column))?.1)
    }

    /// Returns the ratio of a row's values at a column to those of the first row that has the column.
    fn ratio(&self, line: &Line, column: usize) -> Option<f64> {
        let mut lines = self.lines.iter().filter(|_| self.compares);
        let floor = lines.find_map(|line| Some(line.rounds(column)).filter(|rounds| !rounds.is_empty()))?;
        Some(spread(&quotients(line.rounds(column), floor))?.1)
    }

    fn print(&self, out: &mut impl Write) -> Result<()> {
        let digits = self.digits;
        write!(out, "\n{:<32}", self.title)?;
        for (_, heading) in &self.columns {
            write!(
                out,
                " {heading:>25} {:>5} ",
                if self.compares { "ratio" } else { "" }
            )?;
        }
        writeln!(out)?;
        for line in &self.lines {
            let mut text = format!("{:<32}", line.name);
            for (column, _) in &self.columns {
                let Some((min, median, max)) = spread(line.rounds(*column)) else {
                    text += &format!(" {:>25} {:>5} ", "", "");
                    continue;
                };
                let range = format!("({min:.digits$} to {max:.digits$})");
                let ratio = self.ratio(line, *column);
                let ratio = ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
                text += &format!(" {median:>8.digits$} {range:>16} {ratio:>5} ");
            }
            writeln!(out, "{}", text.trim_end())?;
            for why in line.missing(&self.columns) {
                writeln!(out, "    not measured: {why}")?;
            }
        }
        Ok(())
    }

    fn print_markdown(&self, out: &mut impl Write) -> Result<()> {
        let headings: Vec<&str> = self.columns.iter().map(|(_, heading)| *heading).collect();
        writeln!(out, "\n| {} | {} |", self.title, headings.join(" | "))?;
        writeln!(out, "|---|{}", "---|".repeat(headings.len()))?;
        for line in &self.lines {
            let cell = |(column, _): &Column| match spread(line.rounds(*column)) {
                Some((_, median, _)) => format!("{median:.*}", self.digits),
                None => String::new(),
            };
            let cells: Vec<String> = self.columns.iter().map(cell).collect();
            writeln!(out, "| {} | {} |", line.name, cells.join(" | "))?;
        }
        for line in &self.lines {
            for why in line.missing(&self.columns) {
                writeln!(out, "\nNot measured: {}, {why}.", line.name)?;
            }
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let line = |line: &Line| {
            let columns: Vec<Value> = self
                .columns
                .iter()
                .filter_map(|(column, heading)| {
                    let (min, median, max) = spread(line.rounds(*column))?;
                    let ratio = self.ratio(line, *column);
                    Some(json!({ "at": heading, "min": min, "median": median, "max": max, "ratio": ratio }))
                })
                .collect();
            json!({ "name": line.name, "columns": columns, "missing": line.missing(&self.columns) })
        };
        self.lines.iter().map(line).collect()
    }
}

/// A quotient with a goal.
pub(super) struct Ratio {
    pub(super) name: String,
    /// `at most` or `at least`, and a number.
    pub(super) goal: &'static str,
    /// Lowest, median and highest over the rounds. `None`: one of the two was not measured.
    pub(super) value: Option<(f64, f64, f64)>,
}

impl Ratio {
    pub(super) fn new(name: impl Into<String>, goal: &'static str, of: &[f64], to: &[f64]) -> Ratio {
        let name = name.into();
        let value = spread(&quotients(of, to));
        Ratio { name, goal, value }
    }

    /// Returns whether the median meets the goal. `None`: it was not measured.
    fn is_met(&self) -> Option<bool> {
        let (_, median, _) = self.value?;
        let (bound, limit) = self.goal.rsplit_once(' ')?;
        let limit: f64 = limit.parse().ok()?;
        match bound {
            "at most" => Some(median <= limit),
            "at least" => Some(median >= limit),
            _ => None,
        }
    }

    fn verdict(&self) -> &'static str {
        match self.is_met() {
            Some(true) => "met",
            Some(false) => "missed",
            None => "",
        }
    }

    fn text(&self) -> String {
        self.value.map_or("not measured".into(), |(min, median, max)| {
            format!("{median:.2} ({min:.2} to {max:.2})")
        })
    }

    fn json(&self) -> Value {
        let [min, median, max] = [
            self.value.map(|v| v.0),
            self.value.map(|v| v.1),
            self.value.map(|v| v.2),
        ];
        json!({ "name": self.name, "goal": self.goal, "met": self.is_met(), "min": min, "median": median, "max": max })
    }
}

/// Tables that are measured together.
pub(super) struct Suite {
    pub(super) key: &'static str,
    /// Conditions of the measurement.
    pub(super) conditions: &'static str,
    /// Claims of others that the figures are to be compared with.
    pub(super) claim: Option<&'static str>,
    pub(super) tables: Vec<Table>,
    pub(super) ratios: fn(&[Table]) -> Vec<Ratio>,
}

impl Suite {
    pub(super) fn rows(&self) -> usize {
        self.tables.iter().map(|table| table.lines.len()).sum()
    }

    /// Measures each row once.
    pub(super) fn round(&mut self, bar: &ProgressBar) {
        for line in self.tables.iter_mut().flat_map(|table| &mut table.lines) {
            line.round();
            bar.inc(1);
        }
    }

    pub(super) fn print(&self, out: &mut impl Write) -> Result<()> {
        writeln!(out, "\n{}: {}", self.key, self.conditions)?;
        if let Some(claim) = self.claim {
            writeln!(out, "{claim}")?;
        }
        for table in &self.tables {
            table.print(out)?;
        }
        let ratios = (self.ratios)(&self.tables);
        if !ratios.is_empty() {
            writeln!(out, "\nRatios within a round")?;
        }
        for ratio in ratios {
            let line = format!(
                "{:<50} {:<24} goal: {:<13}  {}",
                ratio.name,
                ratio.text(),
                ratio.goal,
                ratio.verdict()
            );
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// Prints it as a chapter of a page. `plots` are the names of files with its plots.
    pub(super) fn print_markdown(&self, out: &mut impl Write, plots: &[String]) -> Result<()> {
        writeln!(out, "\n## {}\n\n{}.", self.key.to_uppercase(), self.conditions)?;
        if let Some(claim) = self.claim {
            writeln!(out, "\n{claim}")?;
        }
        for table in &self.tables {
            table.print_markdown(out)?;
        }
        for plot in plots {
            writeln!(out, "\n![{}]({plot})", self.key.to_uppercase())?;
        }
        let ratios = (self.ratios)(&self.tables);
        if !ratios.is_empty() {
            writeln!(out, "\n| ratio within a round | | goal | |\n|---|---|---|---|")?;
        }
        for ratio in ratios {
            let (value, verdict) = (ratio.text(), ratio.verdict());
            writeln!(out, "| {} | {value} | {} | {verdict} |", ratio.name, ratio.goal)?;
        }
        Ok(())
    }

    pub(super) fn json(&self) -> Value {
        let mut value: serde_json::Map<_, _> = self
            .tables
            .iter()
            .map(|table| (table.key.to_owned(), table.json()))
            .collect();
        value.insert("conditions".into(), self.conditions.into());
        value.insert("claim".into(), self.claim.into());
        let ratios: Vec<Value> = (self.ratios)(&self.tables).iter().map(Ratio::json).collect();
        value.insert("ratios".into(), ratios.into());
        value.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures__of_a_run_that_failed_are_missing_in_all_tables() {
        let mut runs = 0;
        let [mut one, mut other] = figures("row", &[7, 8], move |column| {
            runs += 1;
            anyhow::ensure!((column, runs) != (8, 4), "failed");
            Ok([runs as f64, 10.0 * runs as f64])
        });
        for _ in 0..2 {
            one.round();
            other.round();
        }
        assert_eq!(
            (one.rounds(7), other.rounds(7)),
            (&[1.0, 3.0][..], &[10.0, 30.0][..])
        );
        assert!(one.rounds(8).is_empty() && other.rounds(8).is_empty());
        let columns = [(7, "seven"), (8, "eight")];
        assert_eq!(one.missing(&columns), ["eight: failed"]);
    }
}

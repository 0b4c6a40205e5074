//! Tables of measurements: rows measured in turn, medians over the rounds, and ratios.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Result;
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
    /// Error of the measurement, where there are no values.
    missing: Option<String>,
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
            missing: None,
        }
    }

    fn round(&mut self) {
        for column in &self.columns {
            if self.missing.is_some() {
                return;
            }
            match (self.measure)(*column) {
                Ok(value) => self.values.entry(*column).or_default().push(value),
                Err(error) => self.missing = Some(format!("{error:#}")),
            }
        }
    }

    fn rounds(&self, column: usize) -> &[f64] {
        let is_complete = self.missing.is_none();
        let values = self.values.get(&column).filter(|_| is_complete);
        values.map_or(&[], Vec::as_slice)
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
            if let Some(why) = &line.missing {
                writeln!(out, "{text} not measured: {why}")?;
                continue;
            }
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
            json!({ "name": line.name, "columns": columns, "missing": line.missing })
        };
        self.lines.iter().map(line).collect()
    }
}

/// A quotient with a goal.
pub(super) struct Ratio {
    pub(super) name: &'static str,
    /// `at most` or `at least`, and a number.
    pub(super) goal: &'static str,
    /// Lowest, median and highest over the rounds. `None`: one of the two was not measured.
    pub(super) value: Option<(f64, f64, f64)>,
}

impl Ratio {
    pub(super) fn new(name: &'static str, goal: &'static str, of: &[f64], to: &[f64]) -> Ratio {
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
        for table in &self.tables {
            table.print(out)?;
        }
        let ratios = (self.ratios)(&self.tables);
        if !ratios.is_empty() {
            writeln!(out, "\nRatios within a round")?;
        }
        for ratio in ratios {
            let value = ratio.value.map_or("not measured".into(), |(min, median, max)| {
                format!("{median:.2} ({min:.2} to {max:.2})")
            });
            let verdict = match ratio.is_met() {
                Some(true) => "met",
                Some(false) => "missed",
                None => "",
            };
            let line = format!(
                "{:<50} {value:<24} goal: {:<13}  {verdict}",
                ratio.name, ratio.goal
            );
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    pub(super) fn json(&self) -> Value {
        let mut value: serde_json::Map<_, _> = self
            .tables
            .iter()
            .map(|table| (table.key.to_owned(), table.json()))
            .collect();
        let ratios: Vec<Value> = (self.ratios)(&self.tables).iter().map(Ratio::json).collect();
        value.insert("ratios".into(), ratios.into());
        value.into()
    }
}

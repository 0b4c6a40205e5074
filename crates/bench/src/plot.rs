//! Plots of tables, as SVG.

use std::fmt::Write;

use super::table::Table;

/// Name and contents of a file.
pub(super) type File = (String, String);

const COLOURS: [&str; 6] = ["#9a9a9a", "#f28e2b", "#e15759", "#76b7b2", "#4e79a7", "#59a14f"];
const BAR: f64 = 34.0;
/// Between two groups of bars.
const GAP: f64 = 30.0;
const LEFT: f64 = 20.0;
const TOP: f64 = 24.0;
/// Height of the longest bar.
const HEIGHT: f64 = 180.0;
/// Values that differ by more are drawn on a logarithmic scale: beside the longest bar, others would not be seen.
const LINEAR_MOST: f64 = 30.0;
const LEGEND_LINE: f64 = 16.0;
const LEGENDS_PER_LINE: usize = 3;
const LEGEND_WIDTH: f64 = 190.0;

/// Draws tables one below the other: a group of bars for each column, in it a bar for the median of each row.
pub(super) fn draw(title: &str, tables: &[&Table]) -> String {
    let groups = |table: &&Table| LEFT + (BAR * table.lines.len() as f64 + GAP) * table.columns.len() as f64;
    let legends = LEFT + LEGEND_WIDTH * LEGENDS_PER_LINE as f64;
    let width = tables.iter().map(groups).fold(legends, f64::max);
    let mut body = String::new();
    let mut top = TOP;
    for table in tables {
        top = panel(&mut body, table, top);
    }
    page(title, width, top, &body)
}

fn page(title: &str, width: f64, height: f64, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"8\" y=\"16\">{}</text>\n{body}</svg>\n",
        text(title)
    )
}

/// Draws the speedups of tables of times, one below the other: a curve for each row, whose first column is the base of the others. A column's number is that
/// of its nodes. Rows that are not measured have dashed curves.
pub(super) fn speedups(title: &str, tables: &[&Table], is_measured: impl Fn(&str) -> bool) -> String {
    const WIDTH: f64 = 560.0;
    let mut body = String::new();
    let mut top = TOP;
    for table in tables {
        let foot = top + LEGEND_LINE * table.lines.len() as f64 + 20.0 + HEIGHT;
        let most = table.columns.last().map_or(1, |(nodes, _)| *nodes).max(1) as f64;
        let step = (WIDTH - 2.0 * LEFT) / table.columns.len().saturating_sub(1).max(1) as f64;
        let y_of = |speedup: f64| foot - (speedup / most).min(1.0) * HEIGHT;
        for (at, (nodes, heading)) in table.columns.iter().enumerate() {
            let (x, y) = (LEFT + step * at as f64, y_of(*nodes as f64));
            let _ = writeln!(
                body,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"1.5\" fill=\"#c0c0c0\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                foot + 15.0,
                text(heading)
            );
        }
        for (nth, (line, colour)) in table.lines.iter().zip(COLOURS.iter().skip(2)).enumerate() {
            let dashes = match is_measured(line.name) {
                true => "",
                false => " stroke-dasharray=\"5 3\"",
            };
            let alone = table
                .columns
                .first()
                .and_then(|(nodes, _)| table.median(line.name, *nodes));
            let speedups = table.columns.iter().enumerate().filter_map(|(at, (nodes, _))| {
                Some((LEFT + step * at as f64, alone? / table.median(line.name, *nodes)?))
            });
            let speedups: Vec<(f64, f64)> = speedups.collect();
            let points = speedups
                .iter()
                .map(|(x, speedup)| format!("{x:.1},{:.1}", y_of(*speedup)));
            let points: Vec<String> = points.collect();
            let last = speedups
                .last()
                .map_or(String::new(), |(_, speedup)| format!(": {speedup:.2}"));
            let _ = writeln!(
                body,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{dashes}/>\
                 <text x=\"{LEFT}\" y=\"{:.1}\" fill=\"{colour}\">{}{last}</text>",
                points.join(" "),
                top + LEGEND_LINE * (nth + 1) as f64,
                text(line.name)
            );
        }
        let _ = writeln!(
            body,
            "<text x=\"8\" y=\"{:.0}\" font-weight=\"bold\">Speedup: {} (grey: as many times as there are nodes)</text>",
            foot + 32.0,
            text(table.title)
        );
        top = foot + 60.0;
    }
    page(title, WIDTH, top, &body)
}

/// Draws one table from `top` on; returns where it ends.
fn panel(svg: &mut String, table: &Table, top: f64) -> f64 {
    let rows = || {
        table
            .lines
            .iter()
            .map(|line| line.name)
            .zip(COLOURS.iter().cycle())
    };
    for (nth, (name, colour)) in rows().enumerate() {
        let x = LEFT + (nth % LEGENDS_PER_LINE) as f64 * LEGEND_WIDTH;
        let y = top + (nth / LEGENDS_PER_LINE) as f64 * LEGEND_LINE;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"11\" height=\"11\" fill=\"{colour}\"/>\
             <text x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            x + 16.0,
            y + 10.0,
            text(name)
        );
    }
    let legend = table.lines.len().div_ceil(LEGENDS_PER_LINE) as f64 * LEGEND_LINE;
    let foot = top + legend + 20.0 + HEIGHT;
    let medians = || {
        let columns = table.columns.iter().enumerate();
        let cells =
            columns.flat_map(|(at, (column, _))| rows().enumerate().map(move |row| (at, *column, row)));
        cells.filter_map(|(at, column, (nth, (name, colour)))| {
            Some((at, nth, colour, table.median(name, column)?))
        })
    };
    let values = || medians().map(|(.., value)| value).filter(|value| *value > 0.0);
    let most = values().fold(f64::MIN_POSITIVE, f64::max);
    let least = values().fold(most, f64::min);
    // The lowest bar is a tenth of a decade high.
    let is_logarithmic = most / least > LINEAR_MOST;
    let part = |value: f64| match is_logarithmic {
        true => ((value.max(least) / least).log10() + 0.1) / ((most / least).log10() + 0.1),
        false => value / most,
    };
    let group = BAR * table.lines.len() as f64 + GAP;
    for (at, nth, colour, value) in medians() {
        let tall = part(value) * HEIGHT;
        let x = LEFT + group * at as f64 + BAR * nth as f64;
        let y = foot - tall;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"9\">{value:.*}</text>",
            BAR - 2.0,
            x + BAR / 2.0 - 1.0,
            y - 3.0,
            table.digits,
        );
    }
    for (at, (_, heading)) in table.columns.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            LEFT + group * at as f64 + (group - GAP) / 2.0,
            foot + 15.0,
            text(heading),
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"8\" y=\"{:.0}\" font-weight=\"bold\">{}{}</text>",
        foot + 32.0,
        text(table.title),
        if is_logarithmic { " (logarithmic)" } else { "" },
    );
    foot + 60.0
}

/// Returns a text as SVG has it.
fn text(plain: &str) -> String {
    plain
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

//! Output for people: units, alignment, errors on one line.

use std::io::Write;

/// Writes an error as one line to stderr.
pub(crate) fn error(error: &anyhow::Error) {
    // Nobody reads a closed stderr: ignore the failure.
    let _ = writeln!(std::io::stderr(), "rdmux: {}", reason(error));
}

/// Returns an error as one line: the failure, then its causes, outermost first.
pub(crate) fn reason(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for (i, cause) in error.chain().enumerate() {
        let text = cause.to_string();
        // Some errors show their cause themselves: do not print it twice.
        if i > 0 && (line.ends_with(&text) || line.contains(&format!(": {text}"))) {
            continue;
        }
        if i > 0 {
            line.push_str(": ");
        }
        line.push_str(&text);
    }
    line.replace('\n', " ")
}

/// Formats bytes with a binary unit: `64 KiB`, `1.5 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// Writes a line to stdout. A pipe without a reader is no reason to fail; any other error, such as a full disk, ends the program.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(why) if why.kind() != std::io::ErrorKind::BrokenPipe => {
            error(&anyhow::Error::new(why).context("cannot write to standard output"));
            std::process::exit(1);
        }
        _ => {}
    }
}

/// Alignment of a column of a [`table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Returns the width of each column of a [`table`].
pub(crate) fn widths(columns: &[(&str, Align)], rows: &[Vec<String>]) -> Vec<usize> {
    columns
        .iter()
        .enumerate()
        .map(|(i, (title, _))| {
            let cells = rows
                .iter()
                .filter_map(|row| row.get(i))
                .map(|cell| cell.chars().count());
            cells.chain([title.chars().count()]).max().unwrap_or(0)
        })
        .collect()
}

/// Returns rows under a header, in aligned columns two spaces apart; no line ends in spaces.
pub(crate) fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let widths = widths(columns, rows);
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((cell, (_, align)), width) in cells.zip(columns).zip(&widths) {
            let pad = " ".repeat(width - cell.chars().count());
            match align {
                Align::Left => line.extend([cell, &pad, "  "]),
                Align::Right => line.extend([&pad, cell, "  "]),
            }
        }
        line.truncate(line.trim_end().len());
        line
    };
    let header = line(&mut columns.iter().map(|(title, _)| *title));
    let body = rows.iter().map(|row| line(&mut row.iter().map(String::as_str)));
    std::iter::once(header).chain(body).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table__aligns_by_the_widest_cell() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["long".into(), "1000".into()]];
        let text = table(&[("name", Align::Left), ("n", Align::Right)], &rows);
        assert_eq!(text, "name     n\na        1\nlong  1000");
    }

    #[test]
    fn bytes__units() {
        assert_eq!(
            [bytes(0), bytes(4096), bytes(1536), bytes(5 << 40)],
            ["0 B", "4 KiB", "1.5 KiB", "5 TiB"]
        );
    }
}

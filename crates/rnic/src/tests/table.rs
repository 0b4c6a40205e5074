//! State machines as tables in the source: a column for each state, a row for each event.

/// Name of the row that covers every event without a row of its own.
const OTHERS: &str = "others";

fn cells(line: &str) -> Vec<&str> {
    line.split('|').map(str::trim).collect()
}

/// Returns the columns' states, and the rows: event, cells, section.
pub(super) fn parse(table: &str) -> (Vec<&str>, Vec<Vec<&str>>) {
    let mut lines = table.trim().lines();
    let header = cells(lines.next().expect("a header"));
    let columns = header[1..header.len() - 1].to_vec();
    (columns, lines.map(cells).collect())
}

/// Returns a table with some of its rows replaced.
pub(super) fn with_rows(table: &str, changed: &str) -> String {
    let changed = changed.trim().lines();
    let changed: Vec<(&str, &str)> = changed.map(|line| (cells(line)[0], line)).collect();
    let line = |line| {
        let of_event = |(event, _): &&(&str, &str)| *event == cells(line)[0];
        changed.iter().find(of_event).map_or(line, |(_, line)| *line)
    };
    table.trim().lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Asserts every cell: `observed` returns the correct cell for a state and an event. If the table is wrong, the corrected table is printed.
pub(super) fn check(table: &str, events: &[&str], observed: impl Fn(&str, &str) -> String) {
    let (columns, rows) = parse(table);
    let named: Vec<&str> = rows
        .iter()
        .map(|row| row[0])
        .filter(|row| *row != OTHERS)
        .collect();
    let known: Vec<&str> = events
        .iter()
        .copied()
        .filter(|event| named.contains(event))
        .collect();
    assert_eq!(named, known, "rows are events, in their order");
    assert!(
        known.len() == events.len() || rows.len() > named.len(),
        "a row for each event, or for the others"
    );
    let mut wrong = Vec::new();
    let mut right = vec![cells(table.trim().lines().next().expect("a header")).join("|")];
    for row in &rows {
        let of_row = |event: &&&str| **event == row[0] || row[0] == OTHERS && !named.contains(*event);
        let mut first = None;
        for event in events.iter().filter(of_row) {
            let cells: Vec<String> = columns.iter().map(|column| observed(column, event)).collect();
            for (i, (column, is)) in columns.iter().zip(&cells).enumerate() {
                let cell = row[1..row.len() - 1].get(i).unwrap_or(&"");
                if cell != is {
                    wrong.push(format!("{column}, {event}: {is}, not {cell}"));
                }
            }
            first.get_or_insert(cells);
        }
        let cells = first.unwrap_or_default().join("|");
        right.push(format!("{}|{cells}|{}", row[0], row[row.len() - 1]));
    }
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", aligned(&right));
}

/// Returns the lines of a table with aligned columns.
fn aligned(lines: &[String]) -> String {
    let rows: Vec<Vec<&str>> = lines.iter().map(|line| cells(line)).collect();
    let width = |column: usize| {
        let widths = rows
            .iter()
            .map(|row| row.get(column).map_or(0, |cell| cell.len()));
        widths.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<&str>| {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join(" | ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

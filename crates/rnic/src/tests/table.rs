//! State machines as tables in the source: a column for each state, a row for each event.

fn cells(line: &str) -> Vec<&str> {
    line.split('|').map(str::trim).collect()
}

/// The columns' states and the rows: event, cells, section.
pub(super) fn parse(table: &str) -> (Vec<&str>, Vec<Vec<&str>>) {
    let mut lines = table.trim().lines();
    let header = cells(lines.next().expect("a header"));
    let columns = header[1..header.len() - 1].to_vec();
    (columns, lines.map(cells).collect())
}

/// Asserts every cell: `observed` gives what that of a state and an event would have to say. A table that does not hold is
/// printed as it would have to be.
pub(super) fn check(table: &str, events: &[&str], observed: fn(&str, &str) -> String) {
    let (columns, rows) = parse(table);
    let named: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(named, events, "a row for each event");
    let mut wrong = Vec::new();
    let mut right = String::new();
    for row in &rows {
        let cells: Vec<String> = columns.iter().map(|column| observed(column, row[0])).collect();
        for ((column, cell), is) in columns.iter().zip(&row[1..]).zip(&cells) {
            if cell != is {
                wrong.push(format!("{column}, {}: {is}, not {cell}", row[0]));
            }
        }
        right += &format!("{} | {} | {}\n", row[0], cells.join(" | "), row[row.len() - 1]);
    }
    assert!(wrong.is_empty(), "{wrong:#?}\n{right}");
}

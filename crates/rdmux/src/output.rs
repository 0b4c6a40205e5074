//! What a person reads: units, alignment, errors on one line.

use std::io::Write;

/// Writes an error as one line to stderr: what, then why, outermost first.
pub(crate) fn error(error: &anyhow::Error) {
    let mut line = String::from("rdmux: ");
    for (i, cause) in error.chain().enumerate() {
        let text = cause.to_string();
        // Errors that show their cause themselves would say it twice.
        if i > 0 && line.ends_with(&text) {
            continue;
        }
        if i > 0 {
            line.push_str(": ");
        }
        line.push_str(&text);
    }
    // A closed stderr is nobody to tell.
    let _ = writeln!(std::io::stderr(), "{}", line.replace('\n', " "));
}

/// `bytes` with a binary unit: `64 KiB`, `1.5 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

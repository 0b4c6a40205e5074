//! The one function by which a test of any crate reports that it cannot run here. Crates include it by `#[path]`, since a crate of
//! its own would have to stand below all others.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Records that the calling test does not run here, and why; the test then returns. libtest counts it as passed: `./test` subtracts
/// the tests that are listed in the file named by `RDMUX_SKIPS`. Without that file the line goes past libtest's capture.
pub(crate) fn skip(why: impl Display) {
    let thread = std::thread::current();
    // libtest names each thread after its test.
    let test = thread.name().unwrap_or("unknown");
    let line = format!("{}::{test} {why}", env!("CARGO_CRATE_NAME")).replace('\n', " ");
    match std::env::var_os("RDMUX_SKIPS") {
        Some(path) => {
            let mut list = OpenOptions::new().append(true).open(path).unwrap();
            list.write_all(format!("{line}\n").as_bytes()).unwrap();
        }
        None => std::io::stderr()
            .write_all(format!("skipped: {line}\n").as_bytes())
            .unwrap(),
    }
}

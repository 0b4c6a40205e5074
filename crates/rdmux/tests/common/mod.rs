//! Helpers with which several of the tests here run programs.
#![allow(dead_code, reason = "not every test needs all of it")]

/// Command by which root runs a program as an ordinary user.
pub(crate) const AS_NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid",
    "65534",
    "--regid",
    "65534",
    "--clear-groups",
];

/// Returns a program's output as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

//! What several of the tests here run programs with.
#![allow(dead_code, reason = "not every test needs all of it")]

/// What runs a program as an ordinary user, when it is called by root.
pub(crate) const AS_NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid",
    "65534",
    "--regid",
    "65534",
    "--clear-groups",
];

/// What a program said.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

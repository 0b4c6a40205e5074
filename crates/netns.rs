//! A test that runs in a network namespace of its own. Crates include it by `#[path]`, beside `skip.rs`.

use std::process::Command;

use crate::skip::skip;

/// Tells a test that it is in its namespace.
const INSIDE: &str = "RDMUX_TEST_NAMESPACE";

/// Runs the other test of this program that is named `namespace` in a network namespace, which a shell has prepared. That test returns at once
/// unless [`is_inside`]. Skips the calling test if this user can have no such namespace.
pub(crate) fn run_inside(prepare: &str) {
    let in_namespace = |then: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "sh", "-c"]);
        command
            .arg(format!("{prepare} && exec \"$@\""))
            .arg("sh")
            .args(then);
        command.env(INSIDE, "1");
        command.output().ok()
    };
    if !in_namespace(&["true"]).is_some_and(|tried| tried.status.success()) {
        return skip("this user can have no network namespace with a link");
    }
    let program = std::env::current_exe().unwrap();
    let output = in_namespace(&[program.to_str().unwrap(), "--exact", "namespace", "--nocapture"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

/// Returns true in the namespace.
pub(crate) fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

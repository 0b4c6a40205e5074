//! Helpers with which several of the tests here run programs.
#![allow(dead_code, reason = "not every test needs all of it")]

pub(crate) mod nodes;

/// Command by which root runs a program as an ordinary user.
pub(crate) const AS_NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid",
    "65534",
    "--regid",
    "65534",
    "--clear-groups",
];

/// Variable that is set in processes which [`is_alone`] starts.
const ALONE: &str = "RDMUX_TEST_ALONE";

/// Returns whether this is root in a network namespace of its own. Otherwise starts such a process, which runs the test of this name alone;
/// its failure is this one's. `skip` tells why there is none.
pub(crate) fn is_alone(test: &str, skip: impl FnOnce(&str)) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    if !rustix::process::geteuid().is_root() {
        skip("only root can be several users");
        return false;
    }
    let script = "ip link set lo up && exec \"$@\"";
    let output = std::process::Command::new("unshare")
        .args(["-n", "--fork", "--kill-child", "sh", "-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    println!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "it failed in a namespace of its own");
    false
}

/// Returns a program's output as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

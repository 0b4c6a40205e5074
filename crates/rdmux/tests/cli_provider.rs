//! `--provider` on hosts without an RNIC: the messages, and that they come at once.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../skip.rs"]
mod skip;

use skip::skip;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `rdmux perf` with a folder in which the loader looks first.
fn perf(arguments: &[&str], libraries: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rdmux"))
        .args(["perf", "write-lat", "127.0.0.1"])
        .args(arguments)
        .env("LD_LIBRARY_PATH", libraries)
        .output()
        .unwrap()
}

/// Returns the one line that a failed command prints.
fn line(output: &Output) -> String {
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn provider__misspelt() {
    let none = Path::new("/nonexistent");
    let output = perf(&["--provider", "hard"], none);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("'hard' is not a provider: give soft, hw or shared"),
        "{text}"
    );

    let output = Command::new(env!("CARGO_BIN_EXE_rdmux"))
        .args(["perf", "write-lat", "127.0.0.1"])
        .env("RDMUX_PROVIDER", "hard")
        .output()
        .unwrap();
    let text = line(&output);
    assert!(
        text.contains("RDMUX_PROVIDER=hard: it takes soft, hw or shared"),
        "{text}"
    );
}

#[test]
fn provider_hw__library_that_cannot_be_loaded() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("libibverbs.so.1"), "no library").unwrap();
    let text = line(&perf(&["--provider", "hw"], folder.path()));
    assert!(text.contains("needs the system's libibverbs.so.1"), "{text}");
    assert!(text.contains("install"), "{text}");
}

#[test]
fn provider_hw__own_drop_in_and_old_library() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libibverbs.so.1");
    let build = |source: &str| {
        let file = folder.path().join("library.c");
        fs::write(&file, source).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-o"]).arg(&library).arg(&file);
        cc.status().is_ok_and(|status| status.success())
    };
    if !build("int rdmux_drop_in;") {
        return skip("there is no C compiler");
    }
    let text = line(&perf(&["--provider", "hw"], folder.path()));
    assert!(text.contains("rdmux's own libibverbs.so.1"), "{text}");

    // A second file: the system's librdmacm would not load over a libibverbs without its symbols.
    assert!(build("int something;"));
    fs::copy(&library, folder.path().join("librdmacm.so.1")).unwrap();
    let text = line(&perf(&["--provider", "hw"], folder.path()));
    assert!(
        text.contains("a newer libibverbs.so.1: this one lacks ibv_get_device_list"),
        "{text}"
    );
}

#[test]
fn provider_hw__faults_and_captures_are_softs() {
    let none = Path::new("/nonexistent");
    let text = line(&perf(&["--provider", "hw", "--fault", "loss=1%"], none));
    assert!(text.contains("does not offer fault injection"), "{text}");
    let text = line(&perf(
        &["--provider", "hw", "--capture", "/nonexistent/file"],
        none,
    ));
    assert!(text.contains("does not offer captures"), "{text}");
}

#[test]
fn provider_hw__address_without_a_device() {
    // Loopback has no device, with libraries or without, with an RNIC or without.
    let text = line(&perf(&["--provider", "hw"], Path::new("/nonexistent")));
    let words = ["install", "no RDMA device"];
    assert!(words.iter().any(|word| text.contains(word)), "{text}");
}

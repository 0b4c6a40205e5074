//! The example `push_file` as a process, against a server of this one.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../crates/push/tests/common/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::*;
use rdmux_push::server::Config;
use rdmux_push::{Key, Placement, Region};

/// Runs the example as a user whose configuration is in a folder.
fn push_file(home: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_push_file"));
    command.args(arguments).env("XDG_CONFIG_HOME", home);
    // Errors would have backtraces.
    command.env("RUST_LIB_BACKTRACE", "0");
    command.output().unwrap()
}

#[test]
fn push_file__is_in_the_servers_file_at_its_offset() {
    let folder = tempfile::tempdir().unwrap();
    let (source, data) = (folder.path().join("source"), folder.path().join("data"));
    let region = Region::file(name("data"), &data, Some(16 << 20), false).unwrap();
    let is_durable = region.placement().contains(Placement::PERSISTENT);
    let key = Key::load_or_create_at(&folder.path().join("rdmux/key")).unwrap();
    let config = config("127.0.9.70:7174", vec![region, memory_region("memory", 1 << 20)]);
    let server = Running::start_with(Config { key, ..config });
    // More requests than places, the last one shorter.
    let bytes = pattern((9 << 20) + 77, 3);
    fs::write(&source, &bytes).unwrap();
    let (source, own) = (source.to_str().unwrap(), "127.0.9.70");

    let output = push_file(folder.path(), &[source, "rdmux://127.0.9.70/data@1000", own]);
    let error = String::from_utf8_lossy(&output.stderr);
    if is_durable {
        assert!(output.status.success(), "{error}");
        let expected = format!(
            "{} bytes are durable in rdmux://127.0.9.70:7174/data@1000\n",
            bytes.len()
        );
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
        let there = fs::read(&data).unwrap();
        let (before, rest) = there.split_at(1000);
        let (pushed, after) = rest.split_at(bytes.len());
        assert!(pushed == bytes, "bytes differ");
        assert!(
            before.iter().chain(after).all(|byte| *byte == 0),
            "bytes beside it"
        );
    } else {
        assert!(error.contains("does not survive a loss of power"), "{error}");
    }

    for (target, message) in [
        ("rdmux://127.0.9.70/memory", "do not fit region memory"),
        ("rdmux://127.0.9.70/nothing", "no region 'nothing'"),
        ("rdmux://127.0.9.70/data@8M", "do not fit region data"),
        ("127.0.9.70/data", "rdmux://HOST"),
    ] {
        let output = push_file(folder.path(), &[source, target, own]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{target}: {error}");
        assert!(error.contains(message), "{target}: {error}");
        assert_eq!(error.lines().count(), 1, "{target}: {error}");
    }
    drop(server);
}

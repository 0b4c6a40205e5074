//! A run of the programs that is interrupted ends them, and leaves no file behind.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

#[path = "../../crates/skip.rs"]
mod skip;

/// In place of rdmux: takes one of XRC's files, says its number, and never ends.
const NEVER_ENDS: &str = "#!/bin/sh\n: >/tmp/xrc_domain\necho $$ >\"$STARTED.new\" && mv \"$STARTED.new\" \"$STARTED\"\nexec sleep 1000\n";

fn script(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn programs__interrupted_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (rdmux, started) = (folder.path().join("rdmux"), folder.path().join("started"));
    script(&rdmux, NEVER_ENDS);
    for name in ["ib_write_lat", "ibv_rc_pingpong", "rping"] {
        script(&folder.path().join(name), "#!/bin/sh\n");
    }
    let temporary = folder.path().join("tmp");
    fs::create_dir(&temporary).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut run = Command::new(env!("CARGO_BIN_EXE_rdmux-xtask"))
            .args(["programs", "--only", "ibv_xsrq", "--binary"])
            .arg(&rdmux)
            .env("PATH", &path)
            .env("TMPDIR", &temporary)
            .env("STARTED", &started)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(180);
        while !started.exists() {
            if run.try_wait().unwrap().is_some() {
                skip::skip("the files /tmp/xrc_domain* are another user's");
                return;
            }
            assert!(Instant::now() < deadline, "no program has started");
            std::thread::yield_now();
        }
        let program = fs::read_to_string(&started).unwrap();
        kill_process(Pid::from_child(&run), signal).unwrap();
        assert_eq!(run.wait().unwrap().code(), Some(status));
        assert!(
            !Path::new("/proc").join(program.trim()).exists(),
            "the program runs on"
        );
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
        // Who has this lock is the only one who may have the files.
        let lock = File::open("/tmp").unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        assert!(!Path::new("/tmp/xrc_domain").exists());
        fs::remove_file(&started).unwrap();
    }
}

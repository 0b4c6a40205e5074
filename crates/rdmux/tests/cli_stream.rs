//! `rdmux push --stream` of memory that is written all the time.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, memfd_create};

const BYTES: u64 = 8 << 20;

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn stream__copies_what_was_there_when_the_writer_was_paused() {
    let folder = tempfile::Builder::new()
        .prefix("rdmux-stream-")
        .tempdir()
        .unwrap();
    let path = |name: &str| folder.path().join(name);
    let rdmux = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        command
            .args(args)
            .env("XDG_CONFIG_HOME", path("config"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    };
    let spec = format!("{},size={BYTES},name=vm", path("copy").display());
    let mut server = rdmux(&[
        "serve",
        "--quiet",
        "--json",
        "--listen",
        "127.0.86.1",
        "--file",
        &spec,
    ])
    .spawn()
    .unwrap();
    let mut head = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut head)
        .unwrap();
    let _server = Process(server);

    let memory = Arc::new(File::from(memfd_create("vm", MemfdFlags::CLOEXEC).unwrap()));
    memory.set_len(BYTES).unwrap();
    let end = Arc::new(AtomicBool::new(false));
    let writer = {
        let (memory, end) = (memory.clone(), end.clone());
        let (pause, paused, go_on) = (path("pause"), path("paused"), path("go-on"));
        std::thread::spawn(move || {
            let (mut count, mut has_paused) = (0u64, false);
            while !end.load(Ordering::Relaxed) {
                count += 1;
                // A few pages, so that rounds get shorter, and other bytes each time.
                let at = count.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 64 * 4096 + count % 512 * 8;
                memory.write_all_at(&count.to_le_bytes(), at).unwrap();
                if !has_paused && pause.exists() {
                    has_paused = true;
                    std::fs::copy(format!("/proc/self/fd/{}", memory.as_raw_fd()), &paused).unwrap();
                    std::fs::write(pause.with_extension("done"), "").unwrap();
                    while !go_on.exists() && !end.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                }
            }
            count
        })
    };
    let source = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let pause = format!(
        "touch {0}/pause; while [ ! -e {0}/pause.done ]; do sleep 0.01; done",
        folder.path().display()
    );
    let go_on = format!("touch {}/go-on", folder.path().display());
    let args = [
        "push",
        "--stream",
        "--json",
        "--pause",
        &pause,
        "--unpause",
        &go_on,
        &source,
        "rdmux://127.0.86.1/vm",
    ];
    let output = rdmux(&args).stderr(Stdio::piped()).output().unwrap();
    end.store(true, Ordering::Relaxed);
    assert!(writer.join().unwrap() > 1000, "somebody wrote");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rounds = report["rounds"].as_array().unwrap();
    assert_eq!(rounds[0]["bytes"], BYTES);
    assert_eq!(rounds.last().unwrap()["paused"], true);
    assert!(
        rounds.last().unwrap()["bytes"].as_u64().unwrap() < BYTES / 4,
        "{report}"
    );
    assert!(path("go-on").exists());
    let same = std::fs::read(path("copy")).unwrap() == std::fs::read(path("paused")).unwrap();
    assert!(same, "the copy is not what was there at the pause");
}

#[test]
fn stream__needs_a_way_to_pause() {
    let folder = tempfile::Builder::new()
        .prefix("rdmux-stream-")
        .tempdir()
        .unwrap();
    let memory = File::from(memfd_create("vm", MemfdFlags::CLOEXEC).unwrap());
    memory.set_len(4096).unwrap();
    let source = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    // Without a way to pause there is no last round.
    let output = Command::new(env!("CARGO_BIN_EXE_rdmux"))
        .args(["push", "--stream", &source, "rdmux://127.0.87.1/vm"])
        .env("XDG_CONFIG_HOME", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn stream__what_only_it_takes_is_refused_without_it() {
    for option in [["--pause-pid", "1"], ["--pause", "true"], ["--pause-below", "4K"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_rdmux"))
            .args(["push", "/proc/self/exe", "rdmux://127.0.87.1/vm"])
            .args(option)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{option:?}: {said}");
        assert!(said.contains("--stream"), "{option:?}: {said}");
    }
}

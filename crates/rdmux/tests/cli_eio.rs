//! A disk that fails: `fdatasync` of the served file returns EIO, by a seccomp filter on the server.
#![allow(non_snake_case, reason = "tests are named function__case")]
#![allow(unsafe_code, reason = "a seccomp filter between fork and exec")]
#![cfg(target_arch = "x86_64")]

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// A server that is killed when the value is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes `fdatasync` fail with EIO in this process and those that it starts.
fn fail_fdatasync() -> io::Result<()> {
    let statement = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let number_offset = 0; // of `nr` in `struct seccomp_data`
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, number_offset),
        statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_fdatasync as u32,
        ),
        statement(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EIO as u32,
        ),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: plain integers; the flag concerns this process only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `program` and the filter that it points at live until the call returns; the kernel copies both.
    if unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    } != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[test]
fn push__to_a_file_whose_disk_fails_is_an_error_and_stays_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("source"), vec![7u8; 100_000]).unwrap();
    let key = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path("key"));
    writeln!(key.unwrap(), "{}", "5a".repeat(32)).unwrap();
    let address = "127.0.1.60";

    let mut serve = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    let file = format!("{},size=1M", path("served"));
    serve.args([
        "serve",
        "--listen",
        address,
        "--key",
        &path("key"),
        "--file",
        &file,
    ]);
    serve
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: between fork and exec only prctl is called, which allocates nothing and takes no lock.
    unsafe { serve.pre_exec(fail_fdatasync) };
    let mut server = Server(serve.spawn().unwrap());
    let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines();
    if !lines.any(|line| line.unwrap().contains("listening")) {
        let mut said = String::new();
        server.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        panic!("the server starts, since it allocates with fsync: {said}");
    }

    let url = format!("rdmux://{address}/served");
    for attempt in ["first", "second"] {
        let output = Command::new(env!("CARGO_BIN_EXE_rdmux"))
            .args(["push", "--key", &path("key"), &path("source"), &url])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{attempt}: {said}");
        assert_eq!(said.lines().count(), 1, "{attempt}: {said}");
        assert!(
            !String::from_utf8_lossy(&output.stdout).contains("durable"),
            "{attempt}: nothing is promised"
        );
    }

    // The server lives and keeps serving reads.
    let output = Command::new(env!("CARGO_BIN_EXE_rdmux"))
        .args(["pull", "--key", &path("key"), &url, &path("back")])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(server.0.try_wait().unwrap().is_none());
    server.0.kill().unwrap();
    let mut log = String::new();
    server.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    println!("{log}");
}

//! A test's other process.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Role and seed of the child.
const ROLE: &str = "RDMUX_CHILD_ROLE";
const SEED: &str = "RDMUX_CHILD_SEED";

/// Returns the number in a variable.
pub(crate) fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|value| value.parse().expect("a number"))
}

/// This test binary, started again to run its test `child` alone, with a socket as its standard input.
pub(crate) struct Other {
    pub(crate) process: Child,
    pub(crate) socket: OwnedFd,
}

impl Other {
    pub(crate) fn start(role: &str, seed: u64) -> Other {
        Other::start_with(role, seed, |_| {})
    }

    /// As [`Other::start`], of a command that `change` changes.
    pub(crate) fn start_with(role: &str, seed: u64, change: impl FnOnce(&mut Command)) -> Other {
        let kind = SocketType::SEQPACKET;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(SEED, seed.to_string())
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null());
        change(&mut command);
        Other {
            process: command.spawn().unwrap(),
            socket,
        }
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns role and seed in such a process, `None` in a run of the tests. The process ends with the tests' process at the latest.
pub(crate) fn role() -> Option<(String, u64)> {
    let (Ok(role), Some(seed)) = (std::env::var(ROLE), number(SEED)) else {
        return None;
    };
    std::thread::spawn(|| {
        // The socket hangs up with the other process.
        let stdin = std::io::stdin();
        let _ = poll(&mut [PollFd::new(&stdin, PollFlags::empty())], None);
        std::process::abort();
    });
    Some((role, seed))
}

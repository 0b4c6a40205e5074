//! The identity of a process, as the kernel tells it: nothing that the process itself says counts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rdmux_verbs::provider::user::{is_one_user, peer_credentials, peer_pidfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// User and control group of the process that connected a socket. They stay what they were at that time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Effective uid; `None` if several users have this one in the user namespace of this process.
    pub(super) uid: Option<u32>,
    /// Process; 0 if it is in a PID namespace that this process does not see into.
    pub(super) pid: i32,
    /// Path in the tree of control groups, or why it is unknown.
    pub(super) cgroup: Result<String, &'static str>,
}

impl Identity {
    /// Returns the identity of the process at the other end of a Unix socket.
    ///
    /// # Errors
    /// The system does not tell even the user.
    pub(super) fn of(socket: impl AsFd) -> io::Result<Identity> {
        let (uid, pid) = peer_credentials(&socket)?;
        Ok(Identity {
            uid: Some(uid).filter(|uid| is_one_user(*uid)),
            pid,
            cgroup: cgroup_of(socket.as_fd(), pid),
        })
    }
}

/// Returns whether the kernel tells the control group of a process that connects.
pub(super) fn are_cgroups_known() -> bool {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let pair = socketpair(AddressFamily::UNIX, kind, flags, None);
    pair.is_ok_and(|(one, _other)| matches!(peer_pidfd(&one), Ok(Some(_))))
}

fn cgroup_of(socket: BorrowedFd<'_>, pid: i32) -> Result<String, &'static str> {
    let pidfd = match peer_pidfd(socket) {
        Ok(Some(pidfd)) => pidfd,
        Ok(None) => return Err("that needs Linux 6.5"),
        Err(_) => return Err("the process that connected has ended"),
    };
    // A process in a PID namespace beside that of the node has no number here.
    if pid <= 0 {
        return Err("the process is in another PID namespace");
    }
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"));
    // As long as a process is not gone, no other one has its number: what was read is that of this one.
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    if poll(&mut fds, Some(&Timespec::default())) != Ok(0) {
        return Err("the process that connected has ended");
    }
    let text = text.map_err(|_| "its /proc/PID/cgroup cannot be read")?;
    path_of(&text).ok_or("the system has no control groups of version 2 or systemd's")
}

/// Returns the path in the tree of version 2, or in systemd's of version 1: cgroups(7).
fn path_of(text: &str) -> Option<String> {
    let entries = || text.lines().map(|line| line.splitn(3, ':'));
    let of = |hierarchy: &str, controllers: &str| {
        entries().find_map(|mut entry| {
            let (number, names, path) = (entry.next()?, entry.next()?, entry.next()?);
            let is_it = names == controllers && (hierarchy.is_empty() || number == hierarchy);
            is_it.then(|| path.to_owned())
        })
    };
    of("0", "").or_else(|| of("", "name=systemd"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip::skip;

    #[test]
    fn path_of__each_version() {
        for (text, path) in [
            ("0::/user.slice/a.scope\n", Some("/user.slice/a.scope")),
            ("0::/a:b/c\n", Some("/a:b/c")),
            ("4:memory:/m\n1:name=systemd:/s\n", Some("/s")),
            ("4:memory:/m\n1:name=systemd:/s\n0::/v2\n", Some("/v2")),
            ("4:memory:/m\n", None),
            ("", None),
            ("0:", None),
        ] {
            assert_eq!(path_of(text).as_deref(), path, "{text:?}");
        }
    }

    #[test]
    fn of__this_process() {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (one, _other) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let identity = Identity::of(&one).unwrap();
        assert_eq!(identity.uid, Some(rustix::process::geteuid().as_raw()));
        if !are_cgroups_known() {
            return skip("the kernel has no SO_PEERPIDFD");
        }
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        assert_eq!(identity.cgroup.ok(), path_of(&own));
    }

    #[test]
    fn of__process_that_has_ended() {
        use rustix::net::{SocketAddrUnix, accept, bind, connect, listen, socket};
        // Set in the process that connects: this test, started again.
        const NAME: &str = "RDMUX_IDENTITY_NAME";
        let socket = || socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let address = |name: &str| SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        if let Ok(name) = std::env::var(NAME) {
            return connect(socket(), &address(&name)).unwrap();
        }
        if !are_cgroups_known() {
            return skip("the kernel has no SO_PEERPIDFD");
        }
        let listener = socket();
        let name = format!("rdmux-identity-{}", std::process::id());
        bind(&listener, &address(&name)).unwrap();
        listen(&listener, 1).unwrap();
        let ran = std::process::Command::new("/proc/self/exe")
            .args(["--exact", "node::identity::tests::of__process_that_has_ended"])
            .env(NAME, &name)
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}");
        // Another process may have the socket now, but it is not the one that connected.
        let socket = accept(&listener).unwrap();
        let identity = Identity::of(&socket).unwrap();
        assert_eq!(identity.uid, Some(rustix::process::geteuid().as_raw()));
        assert_eq!(identity.cgroup, Err("the process that connected has ended"));
    }
}

//! Determines whether a peer is a process of this user.
#![allow(unsafe_code, reason = "SO_PEERCRED, whose result in rustix may not be 0")]

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::io::Errno;

use crate::why::Why;

/// Number of the user who may query everybody's devices.
pub const ROOT: u32 = 0;

/// Uid that the kernel shows for users who have none in this user namespace, unless it is set to another.
const OVERFLOW_UID: u32 = 65_534;

/// Relation of a peer's user to the user of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// The same user.
    Own,
    /// Another user.
    Other,
    /// Perhaps the same user: in this process's user namespace both have the uid that all users share who have none of their own.
    Unknown,
}

/// Returns the number of the process at the other end, if it is a process of this user.
pub fn check_user(socket: &OwnedFd) -> Result<i32, Why> {
    let (uid, pid) = peer_credentials(socket)
        .map_err(|error| Why::System(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    match user_of(uid) {
        User::Own => Ok(pid),
        User::Other => Err(Why::OtherUser(uid)),
        User::Unknown => Err(Why::UnknownUser),
    }
}

/// Returns user and process at the other end of a connected Unix socket; process 0 when it is in another PID namespace,
/// where this process cannot see it. (rustix has this call, but its process id cannot hold the 0.)
pub fn peer_credentials(fd: impl AsFd) -> io::Result<(u32, i32)> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the value is a ucred, alive during the call, and its size is given.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok((credentials.uid, credentials.pid))
    }
}

/// Returns the relation to the user of a process for which the kernel reports this effective uid.
pub fn user_of(uid: u32) -> User {
    if uid != rustix::process::geteuid().as_raw() {
        return User::Other;
    }
    user_of_own_number(uid, overflow_uid(), || {
        fs::read_to_string("/proc/self/uid_map").unwrap_or_default()
    })
}

/// Does the same for a process with the uid of this process's user.
fn user_of_own_number(uid: u32, overflow: u32, uid_map: impl Fn() -> String) -> User {
    if uid != overflow || has_numbers_for_all(&uid_map()) {
        User::Own
    } else {
        User::Unknown
    }
}

/// Returns the uid of users who have none here. It is read once: a process that asks for a link may ask often.
fn overflow_uid() -> u32 {
    static READ: OnceLock<u32> = OnceLock::new();
    *READ.get_or_init(|| {
        let number = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
        let number = number.and_then(|number| number.trim().parse().ok());
        number.unwrap_or(OVERFLOW_UID)
    })
}

/// Returns whether every user has a uid in a user namespace with this map.
fn has_numbers_for_all(uid_map: &str) -> bool {
    let counts = uid_map.lines().map(|line| {
        let count = line.split_whitespace().nth(2);
        count.and_then(|count| count.parse::<u64>().ok()).unwrap_or(0)
    });
    // The one uid that may be left over never belongs to a user.
    counts.sum::<u64>() >= u64::from(u32::MAX)
}

/// Returns the uid of this process's user outside of its user namespace, in the parent namespace: users of different namespaces may have
/// the same uid, above all 0.
pub fn outer_number(uid: u32) -> u32 {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    outer_number_by(uid, &map).unwrap_or(uid)
}

fn outer_number_by(uid: u32, uid_map: &str) -> Option<u32> {
    uid_map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u32>().ok());
        let mut next = || numbers.next().flatten();
        let (inside, outside, count) = (next()?, next()?, next()?);
        let at = uid.checked_sub(inside).filter(|at| *at < count)?;
        outside.checked_add(at)
    })
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    const ALL: &str = "         0          0 4294967295\n";
    const ONE: &str = "         0       1000          1\n";
    const MANY: &str = "         0       1000          1\n         1     100000      65536\n";

    #[test]
    fn user_of_own_number__user_with_a_number() {
        for map in [ALL, ONE, MANY, ""] {
            assert_eq!(user_of_own_number(1000, 65_534, || map.into()), User::Own);
            assert_eq!(user_of_own_number(0, 65_534, || map.into()), User::Own);
        }
    }

    #[test]
    fn user_of_own_number__that_of_those_who_have_none() {
        assert_eq!(user_of_own_number(65_534, 65_534, || ALL.into()), User::Own);
        for map in [ONE, MANY, ""] {
            assert_eq!(user_of_own_number(65_534, 65_534, || map.into()), User::Unknown);
        }
        assert_eq!(user_of_own_number(65_534, 7, || MANY.into()), User::Own);
    }

    #[test]
    fn outer_number_by__each_map() {
        assert_eq!(outer_number_by(1000, ALL), Some(1000));
        assert_eq!(outer_number_by(0, ONE), Some(1000));
        assert_eq!(
            [0, 1, 2].map(|uid| outer_number_by(uid, MANY)),
            [1000, 100_000, 100_001].map(Some)
        );
        for map in ["", "0 1000", "0 1000 x", "1 4294967295 2"] {
            assert_eq!(outer_number_by(2, map), None);
        }
        // A user without a uid in this namespace.
        assert_eq!(outer_number_by(65_534, ONE), None);
    }

    #[test]
    fn user_of__another_number() {
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(user_of(own.wrapping_add(1)), User::Other);
    }
}

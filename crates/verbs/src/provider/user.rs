//! Determines which user and which process a peer is, and whether it is a process of this user.
#![allow(
    unsafe_code,
    reason = "SO_PEERCRED, whose result in rustix may not be 0; SO_PEERPIDFD and getpwnam_r, which rustix lacks"
)]

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
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

/// Returns a descriptor of the process that connected a Unix socket: its number cannot be another process's while the descriptor says that
/// it runs. `None` where the kernel has no such option, before Linux 6.5.
///
/// # Errors
/// The process has ended and is forgotten, or the system refuses a descriptor.
pub fn peer_pidfd(fd: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let mut pidfd: RawFd = -1;
    let mut len = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: the value is a descriptor's number, alive during the call, and its size is given.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut pidfd).cast(),
            &raw mut len,
        )
    };
    if rc < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENOPROTOOPT) => Ok(None),
            _ => Err(error),
        };
    }
    if pidfd < 0 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: the kernel made this descriptor for the caller, and nobody else has its number.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

/// Returns the uid of a user's name, from whatever the system has names from; `None` if there is no such user.
///
/// # Errors
/// The system cannot tell.
pub fn uid_of_name(name: &str) -> io::Result<Option<u32>> {
    // Longer entries than any directory service has.
    const ENTRY_BYTES_MAX: usize = 1 << 20;
    let Ok(name) = CString::new(name) else {
        return Ok(None);
    };
    let mut strings = vec![0; 1024];
    loop {
        let mut entry = std::mem::MaybeUninit::<libc::passwd>::uninit();
        let mut found = std::ptr::null_mut();
        // SAFETY: the name ends with 0; entry, strings, with their size, and result are alive during the call.
        let rc = unsafe {
            libc::getpwnam_r(
                name.as_ptr(),
                entry.as_mut_ptr(),
                strings.as_mut_ptr(),
                strings.len(),
                &raw mut found,
            )
        };
        match rc {
            // Besides 0, what name services report when they have no such user: getpwnam(3).
            0 | libc::ENOENT | libc::ESRCH if found.is_null() => return Ok(None),
            // SAFETY: the call succeeded, and the result points to the entry that it has filled in.
            0 => return Ok(Some(unsafe { entry.assume_init().pw_uid })),
            libc::EINTR => {}
            libc::ERANGE if strings.len() < ENTRY_BYTES_MAX => strings.resize(2 * strings.len(), 0),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Returns whether a uid that the kernel reports is that of one user: false for the uid that stands for all users who have none in this
/// process's user namespace, where there are such users.
pub fn is_one_user(uid: u32) -> bool {
    is_one_user_by(uid, overflow_uid(), || {
        fs::read_to_string("/proc/self/uid_map").unwrap_or_default()
    })
}

fn is_one_user_by(uid: u32, overflow: u32, uid_map: impl Fn() -> String) -> bool {
    uid != overflow || has_numbers_for_all(&uid_map())
}

/// Returns the relation to the user of a process for which the kernel reports this effective uid.
pub fn user_of(uid: u32) -> User {
    if uid != rustix::process::geteuid().as_raw() {
        return User::Other;
    }
    match is_one_user(uid) {
        true => User::Own,
        false => User::Unknown,
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
    use crate::skip::skip;

    const ALL: &str = "         0          0 4294967295\n";
    const ONE: &str = "         0       1000          1\n";
    const MANY: &str = "         0       1000          1\n         1     100000      65536\n";

    #[test]
    fn is_one_user_by__user_with_a_number() {
        for map in [ALL, ONE, MANY, ""] {
            assert!(is_one_user_by(1000, 65_534, || map.into()));
            assert!(is_one_user_by(0, 65_534, || map.into()));
        }
    }

    #[test]
    fn is_one_user_by__that_of_those_who_have_none() {
        assert!(is_one_user_by(65_534, 65_534, || ALL.into()));
        for map in [ONE, MANY, ""] {
            assert!(!is_one_user_by(65_534, 65_534, || map.into()));
        }
        assert!(is_one_user_by(65_534, 7, || MANY.into()));
    }

    #[test]
    fn uid_of_name__of_root_and_of_nobody_known() {
        assert_eq!(uid_of_name("root").unwrap(), Some(0));
        assert_eq!(uid_of_name("rdmux-no-such-user").unwrap(), None);
        assert_eq!(uid_of_name("ro\0ot").unwrap(), None);
    }

    #[test]
    fn peer_pidfd__of_this_process() {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (one, _other) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let Some(pidfd) = peer_pidfd(&one).unwrap() else {
            return skip("the kernel has no SO_PEERPIDFD");
        };
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        assert_eq!(
            poll(&mut fds, Some(&Timespec::default())),
            Ok(0),
            "this process runs"
        );
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

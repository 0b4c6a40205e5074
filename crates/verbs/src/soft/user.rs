//! Whether a peer is a process of this user.

use std::fs;

/// The number that the kernel gives users who have none in a user namespace, unless it is set to another.
const OVERFLOW_UID: u32 = 65_534;

/// What the user of a peer is to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// The same.
    Own,
    /// Another one.
    Other,
    /// Perhaps the same: in this process's user namespace both have a number that all users have who have none of their own.
    Unknown,
}

/// Whose a process is of which the kernel says that it has this effective uid.
pub(crate) fn user_of(uid: u32) -> User {
    let overflow = fs::read_to_string("/proc/sys/kernel/overflowuid");
    let overflow = overflow.ok().and_then(|number| number.trim().parse().ok());
    let map = || fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    compare(
        uid,
        rustix::process::geteuid().as_raw(),
        overflow.unwrap_or(OVERFLOW_UID),
        map,
    )
}

fn compare(uid: u32, own: u32, overflow: u32, uid_map: impl Fn() -> String) -> User {
    if uid != own {
        User::Other
    } else if uid != overflow || has_numbers_for_all(&uid_map()) {
        User::Own
    } else {
        User::Unknown
    }
}

/// Whether each user has a number in a user namespace with this map.
fn has_numbers_for_all(uid_map: &str) -> bool {
    let counts = uid_map.lines().map(|line| {
        let count = line.split_whitespace().nth(2);
        count.and_then(|count| count.parse::<u64>().ok()).unwrap_or(0)
    });
    // The number that is left over is never a user's.
    counts.sum::<u64>() >= u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    const ALL: &str = "         0          0 4294967295\n";
    const ONE: &str = "         0       1000          1\n";
    const MANY: &str = "         0       1000          1\n         1     100000      65536\n";

    #[test]
    fn compare__users_with_numbers() {
        for map in [ALL, ONE, MANY] {
            assert_eq!(compare(1000, 1000, 65_534, || map.into()), User::Own);
            assert_eq!(compare(0, 1000, 65_534, || map.into()), User::Other);
            assert_eq!(compare(65_534, 1000, 65_534, || map.into()), User::Other);
        }
    }

    #[test]
    fn compare__the_number_of_those_who_have_none() {
        assert_eq!(compare(65_534, 65_534, 65_534, || ALL.into()), User::Own);
        for map in [ONE, MANY, ""] {
            assert_eq!(compare(65_534, 65_534, 65_534, || map.into()), User::Unknown);
        }
    }
}

//! Faults of this process that wait for us: userfaultfd(2), ioctl_userfaultfd(2).
#![allow(unsafe_code, reason = "ioctls of userfaultfd(2), which rustix lacks")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::mm::{UserfaultfdFlags, userfaultfd};

/// `UFFD_API`.
const API: u64 = 0xaa;
/// `UFFD_USER_MODE_ONLY`. Linux 5.11.
const USER_MODE_ONLY: u32 = 1;
/// `USERFAULTFD_IOC_NEW`, of `/dev/userfaultfd`. Linux 6.1.
const NEW: libc::Ioctl = 0xaa00;
/// `UFFDIO_API`, `UFFDIO_REGISTER`, `UFFDIO_WRITEPROTECT`.
const ASK_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const WRITE_PROTECT: libc::Ioctl = 0xc018_aa06_u32 as libc::Ioctl;
/// `UFFD_FEATURE_MINOR_SHMEM` and `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`: both kinds of faults of files in memory. Linux 5.14, 5.19.
const FEATURES: u64 = 1 << 10 | 1 << 12;
/// `UFFDIO_REGISTER_MODE_MISSING`, `_WP`, `_MINOR`.
const MISSING: u64 = 1;
const WP: u64 = 2;
const MINOR: u64 = 4;

/// Faults that a [`Userfault`] catches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Catches {
    /// Those of threads, and those of their system calls.
    All,
    /// Those of threads alone: a system call that faults fails with `EFAULT`.
    Threads,
}

/// Whoever touches a page that is missing in a registered range waits until this value is dropped.
#[derive(Debug)]
pub(super) struct Userfault(OwnedFd);

impl Userfault {
    /// # Errors
    /// `EPERM` if the system does not permit it to this process; `ENOSYS` if the kernel lacks it, or a part that is needed here.
    pub(super) fn new(catches: Catches) -> io::Result<Userfault> {
        let fd = match catches {
            Catches::All => open_for_all()?,
            // SAFETY: a new descriptor concerns no memory yet.
            Catches::Threads => unsafe {
                userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY))?
            },
        };
        let mut api = [API, 0, 0];
        // SAFETY: `struct uffdio_api` is three words.
        checked(unsafe { libc::ioctl(fd.as_raw_fd(), ASK_API, api.as_mut_ptr()) })?;
        if api[1] & FEATURES != FEATURES {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Userfault(fd))
    }

    /// Catches the faults on missing pages of a range of private memory.
    ///
    /// # Errors
    /// Fails if the range is not such memory, or somebody else has registered it.
    pub(super) fn register_private(&self, range: &Range<u64>) -> io::Result<()> {
        self.register(range, MISSING | WP)
    }

    /// Catches the faults on pages of a file in memory that are not mapped yet.
    ///
    /// # Errors
    /// As [`Userfault::register_private`].
    pub(super) fn register_shared(&self, range: &Range<u64>) -> io::Result<()> {
        self.register(range, MISSING | MINOR | WP)
    }

    fn register(&self, range: &Range<u64>, modes: u64) -> io::Result<()> {
        let mut register = [range.start, range.end - range.start, modes, 0];
        // SAFETY: `struct uffdio_register` is four words. Threads that fault there wait until this value is dropped, no longer.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), REGISTER, register.as_mut_ptr()) })
    }

    /// Returns whether all of a range is mapped as it was when it was registered. The pages are missing: the call changes none.
    pub(super) fn holds(&self, range: &Range<u64>) -> bool {
        const PROTECT: u64 = 1;
        let mut protect = [range.start, range.end - range.start, PROTECT];
        // SAFETY: `struct uffdio_writeprotect` is three words. Nobody is woken, and pages that are missing are protected at most from
        // writes, on which their threads wait as they do on the page.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), WRITE_PROTECT, protect.as_mut_ptr()) }).is_ok()
    }
}

fn open_for_all() -> io::Result<OwnedFd> {
    // SAFETY: a new descriptor concerns no memory yet.
    match unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) } {
        Ok(fd) => Ok(fd),
        Err(refused) => {
            let Ok(device) = File::open("/dev/userfaultfd") else {
                return Err(refused.into());
            };
            // SAFETY: the argument is a number.
            let fd = unsafe { libc::ioctl(device.as_raw_fd(), NEW, libc::O_CLOEXEC) };
            checked(fd)?;
            // SAFETY: a descriptor that the kernel has just made for this call.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        }
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

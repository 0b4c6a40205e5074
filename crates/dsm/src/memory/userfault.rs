//! Page faults of this process that wait for us: userfaultfd(2), ioctl_userfaultfd(2), PAGEMAP_SCAN of ioctl_pagemap_scan(2).
//!
//! The numbers and structures are defined here, since the headers of older systems lack the newer ones; [`Abilities`] tells which of them the
//! running kernel has. A fault that is not answered lets its thread wait for as long as the [`Userfault`] lives. Once it is dropped, touches of
//! its pages raise no fault any more and read whatever the file holds: the mapping has to end first.
#![allow(unsafe_code, reason = "ioctls of userfaultfd(2), which rustix lacks")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rdmux_memory::AnonymousMemory;
use rdmux_memory::mapping::PlacedMapping;
use rustix::io::Errno;
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::{Access, Error};

/// `UFFD_API`.
const API: u64 = 0xaa;
/// `UFFD_USER_MODE_ONLY`. Linux 5.11.
const USER_MODE_ONLY: u32 = 1;
/// `USERFAULTFD_IOC_NEW`, of `/dev/userfaultfd`. Linux 6.1.
const NEW: libc::Ioctl = 0xaa00;

/// Directions of an ioctl's number: `_IOR`, `_IOWR`.
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// An ioctl whose argument is a structure of so many words of 64 bits, which the kernel reads and writes.
struct Request<const WORDS: usize> {
    number: libc::Ioctl,
    name: &'static str,
}

impl<const WORDS: usize> Request<WORDS> {
    const fn new(direction: u32, kind: u8, number: u8, name: &'static str) -> Request<WORDS> {
        let number = direction << 30 | (WORDS as u32 * 8) << 16 | (kind as u32) << 8 | number as u32;
        Request {
            number: number as libc::Ioctl,
            name,
        }
    }

    fn call(&self, fd: impl AsFd, argument: &mut [u64; WORDS]) -> Result<(), Errno> {
        // SAFETY: the number of the request says the argument's size, which is that of the array. The requests here change whether threads of
        // this process may access pages of a registered mapping, and those access them by copies and atomic operations only; addresses that
        // are in no such mapping are refused.
        let result = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), self.number, argument.as_mut_ptr()) };
        match result {
            0.. => Ok(()),
            _ => Err(last_errno()),
        }
    }

    fn error(&self, errno: Errno) -> Error {
        Error::Call {
            call: self.name,
            errno,
        }
    }
}

const ASK_API: Request<3> = Request::new(READ_WRITE, 0xaa, 0x3f, "UFFDIO_API");
const REGISTER: Request<4> = Request::new(READ_WRITE, 0xaa, 0, "UFFDIO_REGISTER");
const WAKE: Request<2> = Request::new(READ, 0xaa, 2, "UFFDIO_WAKE");
const WRITE_PROTECT: Request<3> = Request::new(READ_WRITE, 0xaa, 6, "UFFDIO_WRITEPROTECT");
const CONTINUE: Request<4> = Request::new(READ_WRITE, 0xaa, 7, "UFFDIO_CONTINUE");
const POISON: Request<4> = Request::new(READ_WRITE, 0xaa, 8, "UFFDIO_POISON");
const PAGEMAP_SCAN: Request<12> = Request::new(READ_WRITE, b'f', 16, "PAGEMAP_SCAN");

/// `UFFDIO_REGISTER_MODE_MISSING`, `_WP`, `_MINOR`.
const ALL_MODES: u64 = 1 | 2 | 4;
/// Bits of the ioctls that a registered range must allow: `_UFFDIO_WAKE`, `_UFFDIO_WRITEPROTECT`, `_UFFDIO_CONTINUE`.
const NEEDED_CALLS: u64 = 1 << 2 | 1 << 6 | 1 << 7;
/// `UFFDIO_CONTINUE_MODE_WP`. Linux 6.4.
const CONTINUE_PROTECTED: u64 = 1 << 1;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECT: u64 = 1;

/// `UFFD_FEATURE_SIGBUS`.
const FEATURE_SIGBUS: u64 = 1 << 7;
/// `UFFD_FEATURE_MINOR_SHMEM` and `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`. Linux 5.14, 5.19.
const FEATURE_MINOR: u64 = 1 << 10;
const FEATURE_WRITE_PROTECT: u64 = 1 << 12;
/// `UFFD_FEATURE_POISON`. Linux 6.6.
const FEATURE_POISON: u64 = 1 << 14;
/// `UFFD_FEATURE_WP_UNPOPULATED` and `UFFD_FEATURE_WP_ASYNC`. Linux 6.4, 6.7.
const FEATURE_RECORD: u64 = 1 << 13 | 1 << 15;

/// `UFFD_EVENT_PAGEFAULT`, and the flags of its message.
const EVENT_PAGEFAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1;
const FLAG_WP: u64 = 2;
const FLAG_MINOR: u64 = 4;
/// Bytes of `struct uffd_msg`.
const MESSAGE_BYTES: usize = 32;
/// Messages that one call reads at most.
const MESSAGES: usize = 16;

/// `PM_SCAN_WP_MATCHING`, `PM_SCAN_CHECK_WPASYNC`.
const SCAN_PROTECT: u64 = 1;
const SCAN_CHECK: u64 = 2;
/// `PAGE_IS_WRITTEN`.
const WRITTEN: u64 = 2;
/// Results that one scan returns at most.
const SCAN_RESULTS: usize = 256;

/// Answer where pages of files in memory cannot be installed and protected.
pub(crate) const FILES_LACK: Error = Error::Lacks("page faults in files in memory (Linux 5.19)");
/// Answer where pages cannot be installed for reading.
pub(crate) const INSTALL_LACKS: Error = Error::Lacks("pages that are installed for reading (Linux 6.4)");
/// Answer where pages cannot be poisoned.
pub(super) const POISON_LACKS: Error = Error::Lacks("poisoned pages (userfaultfd of Linux 6.6)");

/// Faults that can be caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Catches {
    /// Those of threads, and those of their system calls.
    All,
    /// Those of threads alone: a system call that faults fails with `EFAULT`.
    Threads,
}

/// Ways to userfaultfd(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The system call.
    Call,
    /// The device `/dev/userfaultfd`. Linux 6.1.
    Device,
}

/// Ways by which a fault is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// [`Userfault::read`] waits for one.
    Read,
    /// [`Userfault::read`] never waits: poll(2) does, on the descriptor.
    Poll,
    /// The thread gets `SIGBUS`.
    Signal,
}

/// Fate of a write to a page that is installed for reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// It is a fault.
    Fault,
    /// The kernel lets it pass, and [`Userfault::take_written`] returns the page. Take it before it is made absent, which ends the record.
    Record,
}

/// Choices at [`Userfault::open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Faults to catch.
    pub catches: Catches,
    /// Way by which they are announced.
    pub delivery: Delivery,
    /// Fate of writes.
    pub writes: Writes,
}

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The file has no frame there.
    Missing,
    /// The page is not installed.
    Absent,
    /// The page is installed for reading only.
    Protected,
}

/// A thread touches a page and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Address of the page.
    pub address: u64,
    /// Access that it wants.
    pub access: Access,
    /// Reason of the fault.
    pub kind: Kind,
}

impl Fault {
    /// Parses `struct uffd_msg`. Returns `None` for other events, which are not enabled.
    fn parse(message: &[u8; MESSAGE_BYTES]) -> Option<Fault> {
        let (words, _) = message.as_chunks::<8>();
        let [event, flags, address] = [0, 1, 2].map(|word| u64::from_ne_bytes(words[word]));
        if event.to_ne_bytes()[0] != EVENT_PAGEFAULT {
            return None;
        }
        let kind = match flags {
            _ if flags & FLAG_WP != 0 => Kind::Protected,
            _ if flags & FLAG_MINOR != 0 => Kind::Absent,
            _ => Kind::Missing,
        };
        let access = match flags & FLAG_WRITE {
            0 => Access::Read,
            _ => Access::Write,
        };
        let page = rustix::param::page_size() as u64;
        Some(Fault {
            address: address - address % page,
            access,
            kind,
        })
    }
}

/// Parts of userfaultfd(2) that the running kernel offers to this user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Faults that can be caught; `None`: userfaultfd(2) is not to be had.
    pub catches: Option<Catches>,
    /// Way to them.
    pub route: Option<Route>,
    /// Pages of a file in memory can be installed and protected: without it no [`View`](super::View) can use userfaultfd(2). Linux 5.19.
    pub files: bool,
    /// A page can be installed for reading in one step: without it there is a moment in which it can be written. Linux 6.4.
    pub install_for_reading: bool,
    /// Faults can be announced by `SIGBUS`, [`Delivery::Signal`]. Linux 4.14.
    pub signal: bool,
    /// Pages can be poisoned. Linux 6.6.
    pub poison: bool,
    /// Writes can be recorded, [`Writes::Record`]. Linux 6.7.
    pub record: bool,
}

impl Abilities {
    /// Asks the kernel.
    pub fn probe() -> Abilities {
        let opened = [Catches::All, Catches::Threads].into_iter().find_map(|catches| {
            let (fd, route) = open(catches, Delivery::Poll).ok()?;
            Some((catches, route, negotiate(&fd, 0).ok()?))
        });
        let Some((catches, route, features)) = opened else {
            return Abilities::default();
        };
        let has = |feature| features & feature == feature;
        let options = |writes| Options {
            catches,
            delivery: Delivery::Poll,
            writes,
        };
        let tried = try_install(options(Writes::Fault));
        Abilities {
            catches: Some(catches),
            route: Some(route),
            files: has(FEATURE_MINOR | FEATURE_WRITE_PROTECT) && tried.is_ok(),
            install_for_reading: tried.unwrap_or(false),
            signal: has(FEATURE_SIGBUS),
            poison: has(FEATURE_POISON),
            record: has(FEATURE_RECORD) && try_record(options(Writes::Record)).is_ok(),
        }
    }

    /// Returns whether a [`View`](super::View) can use userfaultfd(2) with [`Writes::Fault`].
    pub fn is_enough(&self) -> bool {
        self.catches.is_some() && self.files && self.install_for_reading
    }
}

/// Installs a page of a file. Returns whether that can be for reading alone, which no feature tells.
fn try_install(options: Options) -> Result<bool, Error> {
    let memory = AnonymousMemory::shareable(1).map_err(|error| Error::of("memfd_create", &error))?;
    let view = memory.map_again(None)?;
    let userfault = Userfault::open(options)?;
    let page = userfault.register(&view)?;
    let _ = memory.load_u8(0);
    match userfault.install(page.clone(), Access::Read) {
        Ok(()) => Ok(true),
        Err(Error::Lacks(_)) => userfault.install(page, Access::Write).map(|()| false),
        Err(error) => Err(error),
    }
}

/// Checks that the kernel can install a page for reading alone.
pub(super) fn check_install_for_reading(options: Options) -> Result<(), Error> {
    match try_install(options)? {
        true => Ok(()),
        false => Err(INSTALL_LACKS),
    }
}

/// Scans a page of a file.
fn try_record(options: Options) -> Result<(), Error> {
    let memory = AnonymousMemory::shareable(1).map_err(|error| Error::of("memfd_create", &error))?;
    let view = memory.map_again(None)?;
    let userfault = Userfault::open(options)?;
    let page = userfault.register(&view)?;
    userfault.take_written(page, |_| ())
}

/// Catches faults in registered mappings, until it is dropped.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    /// `/proc/self/pagemap`, by which recorded writes are found.
    pagemap: Option<File>,
    /// The kernel can poison pages.
    poisons: bool,
}

impl Userfault {
    /// # Errors
    /// [`Error::NotPermitted`] if the system does not permit it to this user, [`Error::Lacks`] if the kernel has no userfaultfd(2) or not all
    /// that the options need.
    pub fn open(options: Options) -> Result<Userfault, Error> {
        let (fd, _) = open(options.catches, options.delivery)?;
        let mut features = FEATURE_MINOR | FEATURE_WRITE_PROTECT;
        let mut pagemap = None;
        if options.delivery == Delivery::Signal {
            features |= FEATURE_SIGBUS;
        }
        if options.writes == Writes::Record {
            features |= FEATURE_RECORD;
            let file = File::open("/proc/self/pagemap");
            pagemap = Some(file.map_err(|error| Error::of("opening /proc/self/pagemap", &error))?);
        }
        match negotiate(&fd, features) {
            Ok(offered) => Ok(Userfault {
                fd,
                pagemap,
                poisons: offered & FEATURE_POISON != 0,
            }),
            Err(Errno::INVAL) if options.writes == Writes::Record => {
                Err(Error::Lacks("recorded writes (Linux 6.7)"))
            }
            Err(Errno::INVAL) => Err(FILES_LACK),
            Err(errno) => Err(ASK_API.error(errno)),
        }
    }

    /// Catches the faults of a mapping from now on. Returns its addresses.
    pub fn register(&self, view: &PlacedMapping) -> Result<Range<u64>, Error> {
        let (start, len) = (view.mapping().address(), view.mapping().len() as u64);
        let mut register = [start, len, ALL_MODES, 0];
        match REGISTER.call(&self.fd, &mut register) {
            Ok(()) if register[3] & NEEDED_CALLS == NEEDED_CALLS => Ok(start..start + len),
            Ok(()) | Err(Errno::INVAL) => Err(FILES_LACK),
            Err(Errno::BUSY) => Err(Error::Busy(start)),
            Err(errno) => Err(REGISTER.error(errno)),
        }
    }

    /// Installs pages whose bytes are in the file, and wakes the threads that wait for them. Those that are installed already can be written if `access` says
    /// so, and stay as they are otherwise.
    ///
    /// # Errors
    /// [`Error::NoFrame`] if the file has no frame for a page: those before it are installed. [`Error::Lacks`] if the kernel cannot install a page
    /// for reading in one step.
    pub fn install(&self, pages: Range<u64>, access: Access) -> Result<(), Error> {
        let page = rustix::param::page_size() as u64;
        let mode = match access {
            Access::Read => CONTINUE_PROTECTED,
            Access::Write => 0,
        };
        let mut at = pages.start;
        while at < pages.end {
            let mut argument = [at, pages.end - at, mode, 0];
            match CONTINUE.call(&self.fd, &mut argument) {
                Ok(()) => break,
                // The last word is the number of bytes done. It is none while another thread changes mappings, and then soon some.
                Err(Errno::AGAIN) => match i64::try_from(argument[3]) {
                    Ok(0) | Err(_) => std::thread::yield_now(),
                    Ok(_) => at += argument[3],
                },
                Err(Errno::EXIST) => {
                    match access {
                        Access::Read => self.wake(at..at + page)?,
                        Access::Write => self.unprotect(at..at + page)?,
                    }
                    at += page;
                }
                Err(Errno::FAULT) => return Err(Error::NoFrame(at)),
                // The kernel does not know the mode.
                Err(Errno::INVAL) if access == Access::Read => {
                    return Err(INSTALL_LACKS);
                }
                Err(errno) => return Err(CONTINUE.error(errno)),
            }
        }
        Ok(())
    }

    /// Takes the right to write from pages.
    pub fn protect(&self, pages: Range<u64>) -> Result<(), Error> {
        self.write_protect(pages, PROTECT)
    }

    /// Gives the right to write to pages that are installed, and wakes the threads that wait for them. Absent pages stay absent.
    pub fn unprotect(&self, pages: Range<u64>) -> Result<(), Error> {
        self.write_protect(pages, 0)
    }

    fn write_protect(&self, pages: Range<u64>, mode: u64) -> Result<(), Error> {
        loop {
            let mut argument = [pages.start, pages.end - pages.start, mode];
            match WRITE_PROTECT.call(&self.fd, &mut argument) {
                Err(Errno::AGAIN) => std::thread::yield_now(),
                result => return result.map_err(|errno| WRITE_PROTECT.error(errno)),
            }
        }
    }

    /// Wakes the threads that wait for pages: they touch them once more.
    pub fn wake(&self, pages: Range<u64>) -> Result<(), Error> {
        let mut argument = [pages.start, pages.end - pages.start];
        WAKE.call(&self.fd, &mut argument)
            .map_err(|errno| WAKE.error(errno))
    }

    /// Poisons pages that are absent: a thread that touches one, or waits for one, gets `SIGBUS`. Pages that are poisoned or installed, and
    /// absent ones that were protected, stay as they are: [`Userfault::unprotect`] ends a protection.
    ///
    /// # Errors
    /// [`Error::Lacks`] if the kernel cannot poison pages.
    pub fn poison(&self, pages: Range<u64>) -> Result<(), Error> {
        self.check_poison()?;
        let page = rustix::param::page_size() as u64;
        let mut at = pages.start;
        while at < pages.end {
            let mut argument = [at, pages.end - at, 0, 0];
            match POISON.call(&self.fd, &mut argument) {
                Ok(()) => break,
                Err(Errno::AGAIN) => match i64::try_from(argument[3]) {
                    Ok(0) | Err(_) => std::thread::yield_now(),
                    Ok(_) => at += argument[3],
                },
                Err(Errno::EXIST) => at += page,
                Err(errno) => return Err(POISON.error(errno)),
            }
        }
        Ok(())
    }

    /// Checks that the kernel can poison pages.
    pub(super) fn check_poison(&self) -> Result<(), Error> {
        match self.poisons {
            true => Ok(()),
            false => Err(POISON_LACKS),
        }
    }

    /// Finds pages that were written since they were protected, and protects them. Calls `f` with ranges of them in ascending order. Pages that
    /// are absent may be among them.
    ///
    /// # Errors
    /// [`Error::Lacks`] if writes are not recorded here.
    pub fn take_written(&self, pages: Range<u64>, mut f: impl FnMut(Range<u64>)) -> Result<(), Error> {
        const LACKS: Error = Error::Lacks("recorded writes (Linux 6.7)");
        let pagemap = self.pagemap.as_ref().ok_or(LACKS)?;
        let mut results = [[0; 3]; SCAN_RESULTS];
        let mut at = pages.start;
        loop {
            let (found, end) = scan(pagemap, at..pages.end, &mut results).map_err(|errno| match errno {
                Errno::NOTTY | Errno::PERM => LACKS,
                errno => PAGEMAP_SCAN.error(errno),
            })?;
            for [start, end, _] in &results[..found] {
                f(*start..*end);
            }
            // The scan ends before the end of the range if the results are full.
            if found < SCAN_RESULTS || end >= pages.end {
                return Ok(());
            }
            at = end;
        }
    }

    /// Appends faults, as many as there are and one call returns. With [`Delivery::Read`] it waits for the first.
    pub fn read(&self, faults: &mut Vec<Fault>) -> Result<(), Error> {
        let mut messages = [0; MESSAGE_BYTES * MESSAGES];
        match rustix::io::read(&self.fd, &mut messages[..]) {
            Ok(bytes) => {
                let (messages, _) = messages[..bytes].as_chunks::<MESSAGE_BYTES>();
                faults.extend(messages.iter().filter_map(Fault::parse));
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::Call {
                call: "reading a userfaultfd",
                errno,
            }),
        }
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Finds written pages of a range and protects them. Returns the number of results, and the end of what was scanned.
fn scan(
    pagemap: &File,
    pages: Range<u64>,
    results: &mut [[u64; 3]; SCAN_RESULTS],
) -> Result<(usize, u64), Errno> {
    let mut argument = [
        size_of::<[u64; 12]>() as u64,
        SCAN_PROTECT | SCAN_CHECK,
        pages.start,
        pages.end,
        0,
        results.as_mut_ptr().expose_provenance() as u64,
        SCAN_RESULTS as u64,
        0,
        0,
        WRITTEN,
        0,
        WRITTEN,
    ];
    // SAFETY: `struct pm_scan_arg` is these twelve words. The kernel writes the fifth, and as many results as the seventh says, each of three
    // words, to the address in the sixth, which is that of an array of so many.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN.number, argument.as_mut_ptr()) };
    let found = usize::try_from(found).map_err(|_| last_errno())?;
    Ok((found, argument[4]))
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Asks for features. Returns all that the kernel has.
fn negotiate(fd: &OwnedFd, features: u64) -> Result<u64, Errno> {
    let mut api = [API, features, 0];
    ASK_API.call(fd, &mut api)?;
    Ok(api[1])
}

fn open(catches: Catches, delivery: Delivery) -> Result<(OwnedFd, Route), Error> {
    let blocking = match delivery {
        Delivery::Read => UserfaultfdFlags::empty(),
        Delivery::Poll | Delivery::Signal => UserfaultfdFlags::NONBLOCK,
    };
    let mut flags = UserfaultfdFlags::CLOEXEC | blocking;
    if catches == Catches::Threads {
        flags |= UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
    }
    // SAFETY: a new descriptor concerns no memory yet.
    let refused = match unsafe { userfaultfd(flags) } {
        Ok(fd) => return Ok((fd, Route::Call)),
        Err(refused) => refused,
    };
    if catches == Catches::All
        && let Ok(device) = File::open("/dev/userfaultfd")
    {
        let flags = libc::c_ulong::from(flags.bits());
        // SAFETY: the argument is a number.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), NEW, flags) };
        if fd >= 0 {
            // SAFETY: a descriptor that the kernel has just made for this call.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            return Ok((fd, Route::Device));
        }
    }
    Err(match refused {
        Errno::PERM => Error::NotPermitted,
        Errno::NOSYS => Error::Lacks("userfaultfd"),
        errno => Error::Call {
            call: "userfaultfd",
            errno,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Change, Costs, Engine, View};
    use super::*;
    use crate::skip::skip;
    use std::sync::Arc;

    /// A system call that touches an absent page waits for it, or fails if the faults of threads alone are caught.
    #[test]
    fn open__catches_the_faults_of_system_calls() {
        let abilities = Abilities::probe();
        if !abilities.is_enough() {
            return skip(format!("userfaultfd is not as this test needs it: {abilities:?}"));
        }
        let all = [Catches::Threads, Catches::All];
        let (may, _) = all.split_at(if abilities.catches == Some(Catches::All) {
            2
        } else {
            1
        });
        for catches in may {
            let options = Options {
                catches: *catches,
                delivery: Delivery::Read,
                writes: Writes::Fault,
            };
            let memory = Arc::new(AnonymousMemory::shareable(1).unwrap());
            let view = View::new(memory, None, Engine::Userfault(options), Costs::TYPICAL).unwrap();
            let (reader, writer) = std::io::pipe().unwrap();
            rustix::io::write(&writer, b"ab").unwrap();
            let address = view.mapping().address();
            let read_into_view = || {
                // SAFETY: one byte at the address lies inside of the view, which lives until the thread has ended, and no reference is to it.
                let read = unsafe { libc::read(reader.as_raw_fd(), address as *mut libc::c_void, 1) };
                (read >= 0).then_some(read).ok_or_else(last_errno)
            };
            std::thread::scope(|scope| {
                let call = scope.spawn(read_into_view);
                if *catches == Catches::Threads {
                    assert_eq!(call.join().unwrap(), Err(Errno::FAULT));
                    return;
                }
                let mut faults = Vec::new();
                view.userfault().unwrap().read(&mut faults).unwrap();
                let expected = Fault {
                    address,
                    access: Access::Write,
                    kind: Kind::Missing,
                };
                assert_eq!(faults, [expected]);
                assert!(view.change(0, Change::Install(Access::Write)).unwrap());
                assert_eq!(call.join().unwrap(), Ok(1));
                assert_eq!(view.alias().load_u8(0), b'a');
            });
        }
    }

    const UNREGISTER: Request<2> = Request::new(READ, 0xaa, 1, "UFFDIO_UNREGISTER");

    /// A scan fails after its first results.
    #[test]
    fn take_written__that_fails_keeps_the_writes() {
        let abilities = Abilities::probe();
        let (true, Some(catches)) = (abilities.is_enough() && abilities.record, abilities.catches) else {
            return skip(format!("userfaultfd is not as this test needs it: {abilities:?}"));
        };
        let options = Options {
            catches,
            delivery: Delivery::Poll,
            writes: Writes::Record,
        };
        let page_bytes = rustix::param::page_size();
        let memory = Arc::new(AnonymousMemory::shareable(602 * page_bytes).unwrap());
        let view = View::new(memory, None, Engine::Userfault(options), Costs::TYPICAL).unwrap();
        for page in 0..600 {
            assert!(view.change(page, Change::Install(Access::Read)).unwrap());
        }
        assert_eq!(view.take_written(0..600).unwrap(), []);
        // One that the failing scan finds, and that is `Modified` in the table.
        assert!(view.change(590, Change::Unprotect).unwrap());
        let written: Vec<u32> = (0..600).step_by(2).collect();
        for page in &written {
            let word = view.mapping().word(*page as usize * page_bytes);
            word.store(1, std::sync::atomic::Ordering::Release);
        }
        let mut end = [
            view.mapping().address() + 600 * page_bytes as u64,
            2 * page_bytes as u64,
        ];
        UNREGISTER.call(view.userfault().unwrap(), &mut end).unwrap();
        assert!(matches!(view.take_written(0..602), Err(Error::Lacks(_))));
        let found = view.take_written(0..600).unwrap();
        for page in written {
            assert!(found.iter().any(|range| range.contains(&page)), "page {page}");
        }
    }

    #[test]
    fn parse__messages_of_other_events_are_none() {
        let message = |event: u8, flags: u64, address: u64| {
            let mut bytes = [0; MESSAGE_BYTES];
            bytes[0] = event;
            bytes[8..16].copy_from_slice(&flags.to_ne_bytes());
            bytes[16..24].copy_from_slice(&address.to_ne_bytes());
            bytes
        };
        let page = rustix::param::page_size() as u64;
        for (flags, access, kind) in [
            (4, Access::Read, Kind::Absent),
            (5, Access::Write, Kind::Absent),
            (3, Access::Write, Kind::Protected),
            (0, Access::Read, Kind::Missing),
            (1, Access::Write, Kind::Missing),
        ] {
            let fault = Fault::parse(&message(EVENT_PAGEFAULT, flags, 5 * page + 7));
            let address = 5 * page;
            assert_eq!(
                fault,
                Some(Fault {
                    address,
                    access,
                    kind
                })
            );
        }
        assert_eq!(Fault::parse(&message(0x15, 0, page)), None);
    }
}

//! Waits for descriptors as blocking calls do: signals interrupt them where they interrupt a read, and threads can be cancelled
//! there.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr;
use std::time::Duration;

unsafe extern "C-unwind" {
    /// The system's function, as a cancellation point: a cancelled thread unwinds there.
    #[link_name = "poll"]
    fn cancellable_poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout_ms: c_int) -> c_int;
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: c_int = 1;

/// Calls a function during which the thread is not cancelled, though it may be cancelled where it sleeps.
pub(crate) fn uncancelled<R>(call: impl FnOnce() -> R) -> R {
    let mut before = 0;
    // SAFETY: a state that there is, and a place of this function's.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
    let result = call();
    // SAFETY: the state that there was.
    unsafe { pthread_setcancelstate(before, ptr::null_mut()) };
    result
}

/// Returns whether a read of the descriptor blocks while there is nothing to read.
pub(crate) fn is_blocking(fd: RawFd) -> Result<bool, c_int> {
    // SAFETY: no memory is touched.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(last_errno());
    }
    Ok(flags & libc::O_NONBLOCK == 0)
}

pub(crate) fn entry(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}

fn last_errno() -> c_int {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// `ppoll(2)`, which is no cancellation point. `None`: waits for ever.
pub(crate) fn poll(fds: &mut [libc::pollfd], left: Option<Duration>) -> Result<usize, c_int> {
    let left = left.map(|left| libc::timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    let timeout = left.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: as many entries as the list has, and a time or none; no set of signals.
    let n = unsafe {
        libc::syscall(
            libc::SYS_ppoll,
            fds.as_mut_ptr(),
            fds.len(),
            timeout,
            ptr::null::<libc::sigset_t>(),
            size_of::<u64>(),
        )
    };
    usize::try_from(n).map_err(|_| last_errno())
}

/// Returns whether a call that a signal interrupted goes on, as `read(2)` does when the handler was set with `SA_RESTART`.
/// Every signal interrupts a poll, which does not report the signal: the call goes on if no handler was set without that flag.
pub(crate) fn restarts() -> bool {
    (1..=libc::SIGRTMAX()).all(|signal| {
        // SAFETY: all of it may be zero: numbers, and no function.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: nothing is changed, and what there is goes to a place of this function's.
        let known = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) } == 0;
        !known
            || [libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction)
            || action.sa_flags & libc::SA_RESTART != 0
    })
}

/// Waits until a descriptor is readable; fails at once with [`libc::EAGAIN`] if the program has set it to non-blocking. The
/// thread may be cancelled meanwhile (`pthread_cancel(3)`).
///
/// # Safety
/// The caller, and all functions between it and C, may be unwound: they have nothing to drop, and are `extern "C-unwind"` at
/// the edge.
pub(crate) unsafe fn readable_or_cancelled(fd: RawFd) -> Result<(), c_int> {
    let blocks = is_blocking(fd)?;
    // SAFETY: as the caller says.
    unsafe { one_readable_or_cancelled([Some(fd), None], blocks) }
}

/// Does the same for several descriptors, until one of them is readable, if the call is to block.
///
/// # Safety
/// As [`readable_or_cancelled`].
pub(crate) unsafe fn one_readable_or_cancelled(fds: [Option<RawFd>; 2], blocks: bool) -> Result<(), c_int> {
    let timeout_ms = if blocks { -1 } else { 0 };
    loop {
        // A negative descriptor is none for the system either.
        let mut entries = fds.map(|fd| entry(fd.unwrap_or(-1), libc::POLLIN));
        // SAFETY: two entries, of this function's; for unwinding see above.
        match unsafe { cancellable_poll(entries.as_mut_ptr(), 2, timeout_ms) } {
            0 => return Err(libc::EAGAIN),
            1.. => return Ok(()),
            _ => match last_errno() {
                libc::EINTR if restarts() => {}
                errno => return Err(errno),
            },
        }
    }
}

//! Threads of a library: the signals of the program that it is in are the program's. A thread that has one unblocked may be the one that
//! the system gives it to, and a program that waits for it with `sigwait(3)` or a `signalfd(2)` would not get it.
#![allow(unsafe_code, reason = "masks of signals, which rustix lacks")]

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

/// What an instruction of the thread itself brings about: blocked it would kill, and no handler that reports or mends it would be called.
const FAULTS: [libc::c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
];

/// Starts a thread that takes no signals but those of its own faults, from its first instruction on.
///
/// # Errors
/// When the system refuses a thread (`EAGAIN`).
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let before = block_signals();
    let thread = Builder::new().name(name.to_owned()).spawn(run);
    // SAFETY: a mask that this thread had, which is set for it alone.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    thread
}

/// Blocks all that can be for this thread, which a thread that it starts inherits. What was blocked before.
fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: sets of this thread's own, which `sigfillset` and `pthread_sigmask` give their values, as they cannot fail with these
    // arguments; the mask is changed for this thread alone.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(all.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

//! Threads of the library, which leave signals to the program. The system may deliver a signal to any thread that has it unblocked,
//! and a program that waits for the signal with `sigwait(3)` or a `signalfd(2)` would then not receive it.
#![allow(unsafe_code, reason = "masks of signals, which rustix lacks")]

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Signals that an instruction of the thread itself causes: a blocked one would kill, and no handler that reports or repairs the
/// fault would be called.
const FAULTS: [libc::c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
];

/// Starts a thread that receives no signals but those of its own faults, from its first instruction on.
///
/// # Errors
/// Fails if the system refuses a thread (`EAGAIN`).
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let before = block_signals();
    let thread = Builder::new().name(name.to_owned()).spawn(run);
    // SAFETY: the mask is one that this thread had, and is set for this thread alone.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    thread
}

/// Keeps this thread, and threads that it starts later, on one CPU.
///
/// # Errors
/// Those of `sched_setaffinity(2)`: `EINVAL` where there is no such CPU.
pub fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Blocks, for this thread, all signals that can be blocked, except `FAULTS`; a thread that it starts inherits that. Returns the
/// previous mask.
fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the sets are this thread's own; `sigfillset` and `pthread_sigmask` give them their values, as they cannot fail with
    // these arguments; the mask is changed for this thread alone.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        for fault in FAULTS {
            libc::sigdelset(all.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

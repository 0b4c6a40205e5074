//! Threads of the library, which leave signals to the program. The system may deliver a signal to any thread that has it unblocked,
//! and a program that waits for the signal with `sigwait(3)` or a `signalfd(2)` would then not receive it.
#![allow(
    unsafe_code,
    reason = "masks of signals, scheduling policies and time slices, which rustix lacks"
)]

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// Time slice of threads for which others wait, in ns: the shortest that Linux gives.
const SLICE_NS: u64 = 100_000;

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

/// Starts a thread that receives no signals but those of its own faults, from its first instruction on, and that has a [short time
/// slice](shorten_slice).
///
/// # Errors
/// Fails if the system refuses a thread (`EAGAIN`).
pub fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let run = move || {
        let _counted = Counted::new();
        shorten_slice();
        run()
    };
    without_signals(|| Builder::new().name(name.to_owned()).spawn(run))
}

/// Calls `f` while this thread receives no signals but those of its own faults.
pub fn without_signals<R>(f: impl FnOnce() -> R) -> R {
    let before = block_signals();
    let result = f();
    // SAFETY: the mask is one that this thread had, and is set for this thread alone.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

/// Threads of the library that run.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Set in threads of the library.
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// A thread of the library while it runs.
struct Counted;

impl Counted {
    fn new() -> Counted {
        OURS.set(true);
        RUNNING.fetch_add(1, Ordering::Relaxed);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Threads of the program in this process, as far as one of them can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramThreads {
    /// This thread is the only one; all others are the library's.
    This,
    /// There is one, and this thread is the library's.
    Another,
    /// There are several. A thread of the library that ends just now may count as the program's.
    Several,
}

/// Counts the threads of the program.
pub fn program_threads() -> ProgramThreads {
    let ours = RUNNING.load(Ordering::Relaxed);
    let all = std::fs::read_dir("/proc/self/task").map(Iterator::count);
    match all {
        Ok(all) if all != ours + 1 => ProgramThreads::Several,
        Ok(_) if OURS.get() => ProgramThreads::Another,
        Ok(_) => ProgramThreads::This,
        Err(_) => ProgramThreads::Several,
    }
}

/// Keeps this thread, and threads that it starts later, on one CPU.
///
/// # Errors
/// Those of `sched_setaffinity(2)`: `EINVAL` where there is no such CPU.
pub fn pin(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Returns whether this thread may run on a CPU.
pub fn may_run_on(cpu: usize) -> bool {
    cpu < CpuSet::MAX_CPU && sched_getaffinity(None).is_ok_and(|set| set.is_set(cpu))
}

/// Scheduling policy of a thread: sched(7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// `SCHED_OTHER`.
    Other,
    /// `SCHED_BATCH`: when it wakes, it does not take the CPU from a running thread.
    Batch,
    /// Any other policy, which this library leaves alone.
    Foreign,
}

/// Returns the scheduling policy of a thread of this process.
pub fn policy(thread: Pid) -> io::Result<Policy> {
    // SAFETY: no memory is passed.
    match unsafe { libc::sched_getscheduler(thread.as_raw_nonzero().get()) } {
        -1 => Err(io::Error::last_os_error()),
        libc::SCHED_OTHER => Ok(Policy::Other),
        libc::SCHED_BATCH => Ok(Policy::Batch),
        _ => Ok(Policy::Foreign),
    }
}

/// Sets the scheduling policy of a thread of this process. Needs no privilege; the nice value stays.
///
/// # Errors
/// `EINVAL` for [`Policy::Foreign`]; `EPERM` or `ENOSYS` where a filter of system calls refuses; `ESRCH` where the thread has ended.
pub fn set_policy(thread: Pid, policy: Policy) -> io::Result<()> {
    let policy = match policy {
        Policy::Other => libc::SCHED_OTHER,
        Policy::Batch => libc::SCHED_BATCH,
        Policy::Foreign => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads `param`, which lives until it returns.
    match unsafe { libc::sched_setscheduler(thread.as_raw_nonzero().get(), policy, &raw const param) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Shortens the time slices of this thread to 0.1 ms, if it has the policy `SCHED_OTHER`; threads and processes that it starts later have
/// them too. Its part of a busy CPU stays the same. But when it wakes it takes the CPU at once from a thread of longer slices, instead of
/// waiting until that one's slice is over, some milliseconds: for a thread that runs for a moment whenever something comes.
///
/// Does nothing before Linux 6.12, or where a filter of system calls answers `sched_setattr(2)` with an error.
pub fn shorten_slice() {
    // Earlier kernels tell of no slice.
    let Some(attr) =
        attributes().filter(|it| it.sched_policy == libc::SCHED_OTHER as u32 && it.sched_runtime > SLICE_NS)
    else {
        return;
    };
    let attr = libc::sched_attr {
        sched_runtime: SLICE_NS,
        ..attr
    };
    // What the kernel refuses stays as it was.
    // SAFETY: the call reads `attr`, which lives until it returns.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

/// Returns the scheduling attributes of this thread, unless a filter of system calls refuses.
fn attributes() -> Option<libc::sched_attr> {
    let mut attr = MaybeUninit::<libc::sched_attr>::zeroed();
    // SAFETY: the call writes no more than the bytes of `attr`.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            0,
            attr.as_mut_ptr(),
            size_of::<libc::sched_attr>(),
            0,
        )
    };
    // SAFETY: all bits may be 0, and the kernel has given the other ones their values.
    (outcome == 0).then(|| unsafe { attr.assume_init() })
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

#[cfg(test)]
mod tests {
    use rustix::thread::gettid;

    use super::*;

    #[test]
    fn spawn__gives_a_short_slice_that_a_change_of_policy_keeps() {
        if policy(gettid()).unwrap() != Policy::Other {
            // Threads of other policies keep theirs.
            return;
        }
        let before = attributes().map(|it| it.sched_runtime);
        let run = || {
            let first = attributes();
            for policy in [Policy::Batch, Policy::Other] {
                set_policy(gettid(), policy).unwrap();
            }
            [first, attributes()].map(|it| it.map(|it| it.sched_runtime))
        };
        let slices = spawn("short", run).unwrap().join().unwrap();
        // Before Linux 6.12 it is 0.
        let expected = before.map(|ns| ns.min(SLICE_NS));
        assert_eq!(slices, [expected; 2]);
        assert_eq!(attributes().map(|it| it.sched_runtime), before);
    }
}

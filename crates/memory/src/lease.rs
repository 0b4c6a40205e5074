//! File leases. Another process must not shorten a mapped file while this process touches the mapping, since that raises a signal
//! that kills. A process can have a write lease while nobody else has the file open. Another process that then opens or truncates
//! the file waits until the lease is given up or the system's lease break time is over. fcntl(2), "Leases".
//!
//! The system reports a break by a signal. The signal goes to one thread, which waits for it with the signal blocked: it concerns
//! no other thread and no handler of the program.
#![allow(
    unsafe_code,
    reason = "leases and the wait for their signal, which rustix lacks"
)]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::time::Duration;

use rdmux_rnic::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use rustix::time::{ClockId, clock_gettime};

/// Interval between attempts to take a lease again that was given up.
const RETAKE_EVERY: Duration = Duration::from_secs(1);

/// A write lease on a file. It is given up when another process wants the file, and taken again when no other process has it open.
#[derive(Debug)]
pub(crate) struct FileLease(Arc<Inner>);

/// Guard: while it lives, the file may be touched through its mapping.
#[derive(Debug)]
pub(crate) struct Held<'a>(#[expect(dead_code, reason = "held for its lock")] RwLockReadGuard<'a, bool>);

#[derive(Debug)]
struct Inner {
    file: Arc<File>,
    /// True while the lease is held; locked for reading while the mapping is touched.
    held: RwLock<bool>,
    /// Time at which the lease was last known to be unbroken, in milliseconds of the coarse monotonic clock.
    known_ms: AtomicU64,
    /// Time for which that knowledge is good, in milliseconds: a broken lease is ours for the break time at least.
    good_for_ms: u64,
    /// Set when the file is not what it was: the lease is never taken again.
    ended: AtomicBool,
    usable: Usable,
    break_told: Mutex<BreakTold>,
}

/// Receiver of break notifications of a [`FileLease`], which then lets go of the file.
#[derive(Debug)]
struct BreakTold {
    /// Without a receiver the lease is given up at once.
    tell: Option<Tell>,
    told: Wanted,
    /// True while the receiver was notified and has not let go yet.
    waiting: bool,
}

/// Check that says whether a file may be mapped again after other processes had it.
struct Usable(Box<dyn Fn() -> bool + Send + Sync>);

impl std::fmt::Debug for Usable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Usable")
    }
}

impl FileLease {
    /// Takes a write lease. `usable` is called before the lease counts as held again after a break, and must not touch the mapping.
    /// Fails if another process has the file open (`WouldBlock`), or the file belongs to another user (`PermissionDenied`).
    pub(crate) fn take(
        file: Arc<File>,
        usable: impl Fn() -> bool + Send + Sync + 'static,
    ) -> io::Result<FileLease> {
        let watcher = watcher()?;
        let inner = Arc::new(Inner {
            held: RwLock::new(false),
            known_ms: AtomicU64::new(now_ms()),
            good_for_ms: good_for_ms(),
            ended: AtomicBool::new(false),
            usable: Usable(Box::new(usable)),
            break_told: Mutex::new(BreakTold {
                tell: None,
                told: Wanted::Nothing,
                waiting: false,
            }),
            file,
        });
        // The lease is listed first: the break of a lease that nobody watches would be missed.
        let mut list = watcher.lock();
        list.retain(|lease| lease.strong_count() > 0);
        let weak: Weak<Inner> = Arc::downgrade(&inner);
        list.push(weak);
        drop(list);
        let mut held = inner.held.write();
        obtain(&inner.file, libc::F_WRLCK)?;
        *held = true;
        drop(held);
        Ok(FileLease(inner))
    }

    /// Watches the file, and calls `tell` as [`FileWatch::begin`] does. After a break the mapping is not touched, but other
    /// processes wait for [`FileWatch::let_go`].
    pub(crate) fn watch(&self, tell: impl Fn(Wanted) + Send + Sync + 'static) -> FileWatch {
        self.0.break_told().tell = Some(Tell(Box::new(tell)));
        FileWatch(Watching::FileLease(self.0.clone()))
    }

    /// Keeps the lease while the mapping is touched; returns `None` if the lease is not held. Hold it briefly: a process that
    /// breaks the lease waits.
    #[inline]
    pub(crate) fn hold(&self) -> Option<Held<'_>> {
        let guard = self.0.held.read();
        if !*guard {
            return None;
        }
        // The system may have taken the lease of a process that was stopped meanwhile. So the knowledge that the lease is unbroken
        // is good for less than the break time; after that the kernel is asked.
        let now = now_ms();
        let known = self.0.known_ms.load(Ordering::Relaxed);
        if now.saturating_sub(known) > self.0.good_for_ms {
            if !is_unbroken(&self.0.file) {
                return None;
            }
            self.0.known_ms.store(now, Ordering::Relaxed);
        }
        Some(Held(guard))
    }
}

/// Access that another process wants to a file that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    /// No access: no other process has it open.
    Nothing,
    /// Open it to read.
    Read,
    /// Open it to write, or truncate it.
    Write,
}

/// Watches over a file by a lease. Another process that wants to open or truncate the file waits until [`FileWatch::let_go`], or
/// until the system's lease break time is over. The watch does not notice processes that have the file open already, which is why
/// there is no watch then; nor what another host does, or what happens while the watch is let go; nor a change of the name.
#[derive(Debug)]
pub struct FileWatch(Watching);

#[derive(Debug)]
enum Watching {
    /// A lease that serves the watch alone.
    Own(Arc<Watch>),
    /// The lease under which the file is mapped.
    FileLease(Arc<Inner>),
}

#[derive(Debug)]
struct Watch {
    file: Arc<File>,
    /// Kind of lease: for reading alone on a file that is open for reading alone, so that others may read.
    kind: libc::c_int,
    state: Mutex<WatchState>,
    tell: Tell,
}

#[derive(Debug)]
struct WatchState {
    held: bool,
    /// Set when the file is never to be watched again.
    over: bool,
    told: Wanted,
}

struct Tell(Box<dyn Fn(Wanted) + Send + Sync>);

impl std::fmt::Debug for Tell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tell")
    }
}

impl FileWatch {
    /// Begins to watch. A thread of this module calls `tell` when another process wants the file, and when all processes for which
    /// it was let go have closed it. It calls `tell` under the watch's lock, so that the calls are in order: `tell` must not wait,
    /// nor use the watch. Fails if another process has the file open (`WouldBlock`), the file belongs to another user
    /// (`PermissionDenied`), or its file system has no leases.
    pub(crate) fn begin(
        file: Arc<File>,
        read_only: bool,
        tell: impl Fn(Wanted) + Send + Sync + 'static,
    ) -> io::Result<FileWatch> {
        let watcher = watcher()?;
        let watch = Arc::new(Watch {
            file,
            kind: if read_only { libc::F_RDLCK } else { libc::F_WRLCK },
            state: Mutex::new(WatchState {
                held: false,
                over: false,
                told: Wanted::Nothing,
            }),
            tell: Tell(Box::new(tell)),
        });
        // The watch is listed first: the break of a lease that nobody watches would be missed.
        let weak: Weak<Watch> = Arc::downgrade(&watch);
        let mut state = watch.lock();
        watcher.lock().push(weak);
        let obtained = obtain(&watch.file, watch.kind);
        (state.held, state.over) = (obtained.is_ok(), obtained.is_err());
        drop(state);
        obtained?;
        Ok(FileWatch(Watching::Own(watch)))
    }

    /// Lets other processes have the file. The watch resumes when they have closed it.
    pub fn let_go(&self) {
        let let_go = match &self.0 {
            Watching::Own(watch) => std::mem::take(&mut watch.lock().held),
            Watching::FileLease(lease) => std::mem::take(&mut lease.break_told().waiting),
        };
        if let_go {
            let _ = set(self.file(), libc::F_UNLCK);
            if let Ok(watcher) = watcher() {
                watcher.look_again();
            }
        }
    }

    /// Returns whether no other process has the file, as far as is known. If it was let go and the others have closed it, the watch
    /// resumes at once and calls `tell`. The watch of a mapping takes longer, since the file has to be made present again: this
    /// asks the watcher thread to do so, and until then the others count as having the file.
    pub fn is_alone(&self) -> bool {
        match &self.0 {
            Watching::Own(watch) => {
                watch.retake();
                let state = watch.lock();
                return state.held && state.told == Wanted::Nothing;
            }
            Watching::FileLease(lease) => {
                if !lease.is_lost() {
                    return lease.break_told().told == Wanted::Nothing;
                }
            }
        }
        if let Ok(watcher) = watcher() {
            watcher.asked.store(true, Ordering::Relaxed);
            watcher.look_again();
        }
        false
    }

    fn file(&self) -> &File {
        match &self.0 {
            Watching::Own(watch) => &watch.file,
            Watching::FileLease(lease) => &lease.file,
        }
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        match &self.0 {
            Watching::Own(watch) => {
                let mut state = watch.lock();
                state.over = true;
                let _ = set(&watch.file, libc::F_UNLCK);
            }
            Watching::FileLease(lease) => {
                lease.break_told().tell = None;
                self.let_go();
            }
        }
    }
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock()
    }
}

impl Watched for Watch {
    fn look(&self) {
        let mut state = self.lock();
        let wanted = match fcntl(&self.file, libc::F_GETLEASE, 0) {
            Ok(kind) if kind == self.kind => return,
            Ok(libc::F_RDLCK) => Wanted::Read,
            _ => Wanted::Write,
        };
        if state.held && !state.over && wanted > state.told {
            state.told = wanted;
            (self.tell.0)(wanted);
        }
    }

    fn is_lost(&self) -> bool {
        let state = self.lock();
        !state.held && !state.over
    }

    fn retake(&self) {
        let mut state = self.lock();
        if !state.held && !state.over && obtain(&self.file, self.kind).is_ok() {
            (state.held, state.told) = (true, Wanted::Nothing);
            (self.tell.0)(Wanted::Nothing);
        }
    }
}

impl Drop for FileLease {
    fn drop(&mut self) {
        *self.0.held.write() = false;
        self.0.ended.store(true, Ordering::Relaxed);
        let _ = set(&self.0.file, libc::F_UNLCK);
    }
}

/// Owner of a lease whose breaks the watcher thread receives.
trait Watched: Send + Sync {
    /// Checks whether another process wants the file.
    fn look(&self);
    /// Returns whether the lease was given up and is to be taken again.
    fn is_lost(&self) -> bool;
    /// Takes the lease again, if no other process has the file open.
    fn retake(&self);
}

impl Watched for Inner {
    /// Gives up a lease that another process waits for, once nobody touches the mapping.
    fn look(&self) {
        let wanted = match fcntl(&self.file, libc::F_GETLEASE, 0) {
            Ok(libc::F_WRLCK) => return,
            Ok(libc::F_RDLCK) => Wanted::Read,
            _ => Wanted::Write,
        };
        *self.held.write() = false;
        let mut told = self.break_told();
        let more = wanted > told.told;
        match &told.tell {
            None => drop(set(&self.file, libc::F_UNLCK)),
            Some(tell) if more => {
                (tell.0)(wanted);
                (told.told, told.waiting) = (wanted, true);
            }
            Some(_) => {}
        }
    }

    fn is_lost(&self) -> bool {
        let held = *self.held.read();
        !held && !self.ended.load(Ordering::Relaxed) && !self.break_told().waiting
    }

    fn retake(&self) {
        if obtain(&self.file, libc::F_WRLCK).is_err() {
            return;
        }
        let known = now_ms();
        if !(self.usable.0)() {
            self.ended.store(true, Ordering::Relaxed);
        }
        let mut held = self.held.write();
        if self.ended.load(Ordering::Relaxed) || !is_unbroken(&self.file) {
            let _ = set(&self.file, libc::F_UNLCK);
        } else {
            self.known_ms.store(known, Ordering::Relaxed);
            *held = true;
        }
        if !*held && !self.ended.load(Ordering::Relaxed) {
            return;
        }
        drop(held);
        let mut told = self.break_told();
        if std::mem::replace(&mut told.told, Wanted::Nothing) != Wanted::Nothing
            && let Some(tell) = &told.tell
        {
            (tell.0)(Wanted::Nothing);
        }
    }
}

impl Inner {
    fn break_told(&self) -> MutexGuard<'_, BreakTold> {
        self.break_told.lock()
    }
}

/// Returns the milliseconds of a clock that costs next to nothing. It stands still while the machine sleeps, as the system's own
/// count of the break time does.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Returns a quarter of the system's lease break time; that time is at least a second, or there is no limit.
fn good_for_ms() -> u64 {
    let seconds = fs::read_to_string("/proc/sys/fs/lease-break-time").unwrap_or_default();
    seconds.trim().parse::<u64>().unwrap_or(1).max(1) * 250
}

fn fcntl(file: &File, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: the descriptor is open, and these commands take and give numbers alone.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

fn set(file: &File, kind: libc::c_int) -> io::Result<()> {
    fcntl(file, libc::F_SETLEASE, kind).map(drop)
}

/// Takes a lease whose break signals go to the watcher's thread. The kernel forgets the receiver whenever a lease is given up; the
/// signal would then go to any thread, and would end the process.
fn obtain(file: &File, kind: libc::c_int) -> io::Result<()> {
    own(file, watcher()?.tid)?;
    set(file, kind)
}

/// Returns whether the lease is unbroken: while a lease is being broken, the kernel reports what it is about to become.
fn is_unbroken(file: &File) -> bool {
    fcntl(file, libc::F_GETLEASE, 0).is_ok_and(|kind| kind == libc::F_WRLCK)
}

/// Directs the signals of a file to one thread.
fn own(file: &File, tid: libc::pid_t) -> io::Result<()> {
    const F_SETOWN_EX: libc::c_int = 15;
    const F_OWNER_TID: libc::c_int = 0;
    #[repr(C)]
    struct Owner {
        kind: libc::c_int,
        id: libc::pid_t,
    }
    let owner = Owner {
        kind: F_OWNER_TID,
        id: tid,
    };
    // SAFETY: the descriptor is open, and `owner` is the structure that the command reads, which lives meanwhile.
    match unsafe { libc::fcntl(file.as_raw_fd(), F_SETOWN_EX, &raw const owner) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The thread that receives the signals of breaks.
struct Watcher {
    tid: libc::pid_t,
    leases: Mutex<Vec<Weak<dyn Watched>>>,
    /// Set when the thread is to look again after a while.
    lost: AtomicBool,
    /// Set when the thread is to take leases again that were given up, without waiting for that while.
    asked: AtomicBool,
}

impl Watcher {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn Watched>>> {
        self.leases.lock()
    }

    /// Makes the thread look at the leases, and take those again that were given up.
    fn look_again(&self) {
        self.lost.store(true, Ordering::Relaxed);
        // SAFETY: the thread lives as long as the process, and has the signal blocked: the signal ends its wait and does nothing
        // else.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.tid, libc::SIGIO) };
    }

    fn run(&self, signals: &libc::sigset_t) {
        loop {
            let timeout = libc::timespec {
                tv_sec: RETAKE_EVERY.as_secs() as libc::time_t,
                tv_nsec: 0,
            };
            let timeout = if self.lost.load(Ordering::Relaxed) {
                &raw const timeout
            } else {
                std::ptr::null()
            };
            // SAFETY: the set is initialised, the pointer for details of the signal is null, and the time is a structure that lives
            // meanwhile, or null.
            let signal = unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), timeout) };
            // Take leases again when the time is up or on request, not at the break of another lease: the process that waits for
            // that break does not wait for this.
            let retake = self.asked.swap(false, Ordering::Relaxed) || signal < 0;
            let leases: Vec<_> = self.lock().iter().filter_map(Weak::upgrade).collect();
            let mut lost = false;
            for lease in leases {
                if lease.is_lost() {
                    if retake {
                        lease.retake();
                    }
                } else {
                    lease.look();
                }
                lost |= lease.is_lost();
            }
            self.lost.store(lost, Ordering::Relaxed);
        }
    }
}

/// Returns the watcher, whose thread starts at the first lease.
fn watcher() -> io::Result<&'static Watcher> {
    static WATCHER: OnceLock<Watcher> = OnceLock::new();
    static STARTING: Mutex<()> = Mutex::new(());
    if let Some(watcher) = WATCHER.get() {
        return Ok(watcher);
    }
    let _one_at_a_time = STARTING.lock();
    if let Some(watcher) = WATCHER.get() {
        return Ok(watcher);
    }
    let (started, start) = mpsc::channel();
    rdmux_verbs::thread::spawn("rdmux-lease", move || {
        // SAFETY: a set of signals is plain numbers; `sigemptyset` gives it its value.
        let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is this thread's own.
        unsafe {
            libc::sigemptyset(&raw mut signals);
            libc::sigaddset(&raw mut signals, libc::SIGIO);
        }
        if started
            .send(rustix::thread::gettid().as_raw_nonzero().get())
            .is_ok()
        {
            WATCHER.wait().run(&signals);
        }
    })?;
    let tid = start.recv().map_err(|_| io::ErrorKind::WouldBlock)?;
    Ok(WATCHER.get_or_init(|| Watcher {
        tid,
        leases: Mutex::default(),
        lost: AtomicBool::new(false),
        asked: AtomicBool::new(false),
    }))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::skip::skip;

    #[test]
    fn begin__others_breaks_meanwhile_are_not_taken_for_its_own() {
        let path = std::env::temp_dir().join(format!("rdmux-lease-{}", std::process::id()));
        let mut options = File::options();
        let file = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        fs::remove_file(&path).unwrap();
        let file = Arc::new(file);
        let (tell, told) = mpsc::channel();
        let begin = || {
            let tell = tell.clone();
            FileWatch::begin(file.clone(), false, move |wanted| tell.send(wanted).unwrap())
        };
        if let Err(error) = begin() {
            return skip(format!("no leases here ({error})"));
        }
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    watcher().unwrap().look_again();
                }
            });
            for _ in 0..20_000 {
                drop(begin().unwrap());
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Empty));
    }
}

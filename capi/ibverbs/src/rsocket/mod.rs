//! Sockets over RDMA (rsocket(7)): streams over RC and datagrams over UD, with the protocol of rdma-core's `librdmacm`, so that its programs
//! are peers.
//!
//! A socket is a number in the table below, with a [`SocketState`] under one lock behind it. The calling thread moves the protocol on
//! ([`SocketState::progress`]), as in rdma-core: there is no thread for that, once it is connected. A call that waits for a stream drives the device for a
//! while ([`Socket::drive`]), which one call at a time does. Then, like all others, it leaves a [`Waker`] in the socket and
//! sleeps, because another thread's call may take the completion that it waits for.

mod buffers;
mod calls;
mod datagram;
mod iomap;
mod open;
mod options;
mod poll;
mod resources;
mod stream;

use std::collections::HashMap;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rdmux_verbs::sync::{Mutex, MutexGuard, RwLock};
use rdmux_verbs::{CompletionQueue, EventQueue};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use datagram::Datagram;
use open::{Listening, Opening};
use options::SocketOptions;
use stream::Stream;

use crate::cm_thread::Handled;
use crate::wait;

/// Time for which a call looks before it sleeps: an immediate response from the peer then needs no wake-up. The same as
/// rdma-core's `polling_time`.
const LOOKS: Duration = Duration::from_micros(10);
/// Time for which a call that waits for a stream alone drives the device, which is the best way to wait, before it sleeps so
/// that signals end it.
const DRIVES: Duration = Duration::from_millis(2);

/// A thread that waits for sockets.
struct Waker(OwnedFd);

impl Waker {
    /// Returns this thread's waker, without a pending wake-up.
    fn of_thread() -> Result<Arc<Waker>, c_int> {
        thread_local! {
            static WAKER: Result<Arc<Waker>, c_int> = {
                let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
                made.map(|fd| Arc::new(Waker(fd))).map_err(Errno::raw_os_error)
            };
        }
        // A thread that is ending has none.
        let waker = WAKER.try_with(Clone::clone).map_err(|_| libc::EINTR)??;
        let _ = rustix::io::read(&waker.0, &mut [0; 8]);
        Ok(waker)
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// State of a socket's life. A role with descriptors to wait on stays until the last holder of the socket has let go.
enum Role {
    /// Neither bound nor connected.
    New,
    /// Has a port.
    Bound(Listening),
    /// Waits for its peer's answer.
    Opening(Box<Opening>),
    /// Connecting failed.
    Failed,
    Stream(Box<Stream>),
    Datagram(Box<Datagram>),
}

struct SocketState {
    role: Role,
    options: SocketOptions,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    /// Error that `SO_ERROR` returns, once.
    error: c_int,
    /// Set when `rclose` was called.
    closed: bool,
    waiters: Vec<Arc<Waker>>,
}

impl SocketState {
    /// Takes in what has arrived, and sends what is pending. Returns whether anything has arrived: then other waiters may go on
    /// too.
    fn progress(&mut self) -> bool {
        let moved = match &mut self.role {
            Role::Bound(listening) => listening.progress(),
            Role::Stream(stream) => stream.progress(),
            Role::Datagram(datagram) => datagram.progress(),
            _ => false,
        };
        if moved {
            self.wake();
        }
        moved
    }

    fn wake(&self) {
        self.waiters.iter().for_each(|waiter| waiter.wake());
    }

    /// Arms the socket, and adds the descriptors that report new arrivals to a list.
    fn arm(&self, fds: &mut Vec<RawFd>) {
        match &self.role {
            Role::Bound(listening) if listening.accepts => listening.fds(fds),
            Role::Stream(stream) => stream.arm(fds),
            Role::Datagram(datagram) => datagram.arm(fds),
            Role::New | Role::Bound(_) | Role::Opening(_) | Role::Failed => {}
        }
    }

    fn forget(&mut self, waker: &Arc<Waker>) {
        if let Some(at) = self.waiters.iter().position(|waiter| Arc::ptr_eq(waiter, waker)) {
            self.waiters.swap_remove(at);
        }
    }

    /// Returns the stream, once it is connected.
    fn stream(&mut self) -> Result<&mut Stream, c_int> {
        match &mut self.role {
            Role::Stream(stream) => Ok(stream),
            _ if self.closed => Err(libc::EBADF),
            Role::Failed => Err(match std::mem::take(&mut self.error) {
                0 => libc::ENOTCONN,
                error => error,
            }),
            _ => Err(libc::ENOTCONN),
        }
    }
}

/// A socket.
struct Socket {
    /// Descriptor whose number is the socket's, so that the process has no other descriptor of that number.
    number: OwnedFd,
    /// AF_INET or AF_INET6.
    domain: c_int,
    /// Process that made it. A child of a fork has a copy, which is nothing but a number to be closed.
    process: u32,
    nonblocking: AtomicBool,
    state: Mutex<SocketState>,
    handled: Handled,
}

/// Time for which a call waits.
#[derive(Clone, Copy)]
enum Wait {
    Never,
    Until(Instant),
    Forever,
}

impl Socket {
    /// Makes a new socket, in the table.
    fn new(domain: c_int, role: Role, options: SocketOptions) -> Result<Arc<Socket>, c_int> {
        let number = eventfd(0, EventfdFlags::CLOEXEC).map_err(Errno::raw_os_error)?;
        let socket = Arc::new(Socket {
            number,
            domain,
            process: std::process::id(),
            nonblocking: AtomicBool::new(false),
            state: Mutex::new(SocketState {
                role,
                options,
                local: None,
                remote: None,
                error: 0,
                closed: false,
                waiters: Vec::new(),
            }),
            handled: Handled::default(),
        });
        let mut table = TABLE.write();
        table
            .get_or_insert_default()
            .insert(socket.number(), socket.clone());
        Ok(socket)
    }

    /// Returns the socket of a number.
    fn of(number: c_int) -> Option<Arc<Socket>> {
        let table = TABLE.read();
        let socket = table.as_ref()?.get(&number)?;
        socket.is_own().then(|| socket.clone())
    }

    /// Returns whether this process made it.
    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Like [`Socket::of`], for a call that works on sockets only.
    fn get(number: c_int) -> Result<Arc<Socket>, c_int> {
        Socket::of(number).ok_or(libc::EBADF)
    }

    /// Takes a socket out of the table.
    fn take(number: c_int) -> Result<Arc<Socket>, c_int> {
        let mut table = TABLE.write();
        let table = table.as_mut().ok_or(libc::EBADF)?;
        table.remove(&number).ok_or(libc::EBADF)
    }

    fn number(&self) -> RawFd {
        self.number.as_raw_fd()
    }

    /// Returns the queue, and the token, to which its connection reports what happens.
    fn queue(self: &Arc<Socket>) -> Result<(&EventQueue, u64), c_int> {
        self.handled.queue(|| {
            let handler: Weak<Socket> = Arc::downgrade(self);
            handler
        })
    }

    fn lock(&self) -> MutexGuard<'_, SocketState> {
        self.state.lock()
    }

    /// Returns the time for which a call with these flags waits.
    fn wait_of(&self, flags: c_int) -> Wait {
        if flags & libc::MSG_DONTWAIT != 0 || self.nonblocking.load(Ordering::Relaxed) {
            Wait::Never
        } else {
            Wait::Forever
        }
    }

    /// Waits at the completion queue of a stream, for a call that has started a wait there. Returns whether anything arrived.
    fn drive(&self, cq: &CompletionQueue, limit: Duration) -> bool {
        let found = cq.wait(limit).ok().flatten();
        let came = found.is_some();
        let mut state = self.lock();
        if let Role::Stream(stream) = &mut state.role {
            stream.end_wait(found);
        }
        // No other call has seen, or was notified of, what arrived meanwhile.
        state.wake();
        came
    }

    /// Calls `step` whenever something has arrived, until it gives a result.
    ///
    /// # Errors
    /// `EAGAIN` when the time is over, `EINTR` when a signal came, `EBADF` once the socket is closed, and those of `step`.
    fn block<T>(
        &self,
        wait: Wait,
        mut step: impl FnMut(&mut SocketState) -> Option<Result<T, c_int>>,
    ) -> Result<T, c_int> {
        let mut looks_until = None;
        let mut drives = true;
        loop {
            let mut state = self.lock();
            if state.closed {
                return Err(libc::EBADF);
            }
            state.progress();
            if let Some(result) = step(&mut state) {
                return result;
            }
            let now = Instant::now();
            let left = match wait {
                Wait::Never => return Err(libc::EAGAIN),
                Wait::Until(at) if at <= now => return Err(libc::EAGAIN),
                Wait::Until(at) => at - now,
                Wait::Forever => DRIVES,
            };
            if drives
                && let Role::Stream(stream) = &mut state.role
                && let Some(cq) = stream.start_wait()
            {
                drop(state);
                drives = self.drive(&cq, left.min(DRIVES));
                continue;
            }
            if now < *looks_until.get_or_insert(now + LOOKS) {
                drop(state);
                std::hint::spin_loop();
                continue;
            }
            let waker = Waker::of_thread()?;
            state.waiters.push(waker.clone());
            let mut fds = vec![waker.0.as_raw_fd()];
            state.arm(&mut fds);
            // An arrival before the descriptors were armed would not wake the thread.
            let again = state.progress();
            drop(state);
            let slept = if again { Ok(()) } else { sleep(&fds, wait) };
            self.lock().forget(&waker);
            slept?;
            (looks_until, drives) = (None, true);
        }
    }
}

/// Waits until one of the descriptors is readable, or the time is over.
fn sleep(fds: &[RawFd], wait: Wait) -> Result<(), c_int> {
    let mut fds: Vec<libc::pollfd> = fds.iter().map(|fd| wait::entry(*fd, libc::POLLIN)).collect();
    let left = match wait {
        Wait::Never => Some(Duration::ZERO),
        Wait::Until(at) => Some(at.saturating_duration_since(Instant::now())),
        Wait::Forever => None,
    };
    match wait::poll(&mut fds, left) {
        // Like `recv(2)`, which restarts when it has no timeout.
        Err(libc::EINTR) if left.is_none() && wait::restarts() => Ok(()),
        polled => polled.map(|_| ()),
    }
}

/// All sockets of the process, by their numbers.
static TABLE: RwLock<Option<HashMap<RawFd, Arc<Socket>>>> = RwLock::new(None);

//! `rpoll` and `rselect`: sockets and ordinary descriptors together.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{DRIVES, LOOKS, Role, Socket, SocketState, Waker};
use crate::wait::{self, entry};

/// Events that are reported whether the program asks for them or not.
const ALWAYS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;

impl SocketState {
    /// Returns the events that the socket has now.
    fn events(&mut self) -> i16 {
        self.progress();
        match &mut self.role {
            // As with a socket that is not connected.
            Role::New => libc::POLLOUT | libc::POLLHUP,
            Role::Bound(listening) if listening.accepts && listening.has_request() => libc::POLLIN,
            Role::Bound(_) | Role::Opening(_) => 0,
            Role::Failed => libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP,
            Role::Stream(stream) => stream.events(),
            Role::Datagram(datagram) => datagram.events(),
        }
    }
}

/// State of a call that waits for descriptors.
struct Polled<'a> {
    fds: &'a mut [libc::pollfd],
    /// The sockets among them, with their indices.
    sockets: Vec<(usize, Arc<Socket>)>,
}

impl Polled<'_> {
    /// Returns how many of the sockets have an event that the program asks for.
    fn look(&mut self) -> usize {
        let mut ready = 0;
        for (at, socket) in &self.sockets {
            let fd = &mut self.fds[*at];
            fd.revents = socket.lock().events() & (fd.events | ALWAYS);
            ready += usize::from(fd.revents != 0);
        }
        ready
    }

    /// If the only entry is one stream without a requested event, waits for it as a call on that stream alone does. Returns
    /// whether anything arrived.
    fn drive(&self, left: Option<Duration>) -> bool {
        let ([fd], [(_, socket)]) = (&*self.fds, &self.sockets[..]) else {
            return false;
        };
        let mut state = socket.lock();
        let is_ready = state.events() & (fd.events | ALWAYS) != 0;
        let queue = match &mut state.role {
            Role::Stream(stream) if !is_ready => stream.start_wait(),
            _ => return is_ready,
        };
        drop(state);
        let limit = left.map_or(DRIVES, |left| left.min(DRIVES));
        queue.is_some_and(|cq| socket.drive(&cq, limit))
    }

    /// Polls the other descriptors, together with `more`, for no longer than `left`.
    fn ask(&mut self, more: &[RawFd], left: Option<Duration>) -> Result<usize, c_int> {
        let is_socket = |at: usize| self.sockets.iter().any(|(of, _)| *of == at);
        let mut asked: Vec<libc::pollfd> = Vec::with_capacity(self.fds.len() + more.len());
        // poll(2) ignores entries with negative numbers.
        asked.extend(
            self.fds
                .iter()
                .enumerate()
                .map(|(at, fd)| entry(if is_socket(at) { -1 } else { fd.fd }, fd.events)),
        );
        asked.extend(more.iter().map(|fd| entry(*fd, libc::POLLIN)));
        wait::poll(&mut asked, left)?;
        let mut ready = 0;
        for (at, (fd, asked)) in self.fds.iter_mut().zip(&asked).enumerate() {
            if !self.sockets.iter().any(|(of, _)| *of == at) {
                fd.revents = asked.revents;
                ready += usize::from(fd.revents != 0);
            }
        }
        Ok(ready)
    }

    /// Leaves a waker in all sockets, and returns their descriptors.
    fn watch(&self, waker: &Arc<Waker>) -> Vec<RawFd> {
        let mut fds = vec![waker.0.as_raw_fd()];
        for (_, socket) in &self.sockets {
            let mut state = socket.lock();
            state.waiters.push(waker.clone());
            state.arm(&mut fds);
        }
        fds
    }

    fn unwatch(&self, waker: &Arc<Waker>) {
        for (_, socket) in &self.sockets {
            socket.lock().forget(waker);
        }
    }
}

/// `poll(2)` for sockets and other descriptors. `None`: waits for ever.
pub(super) fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<usize, c_int> {
    let of = |(at, fd): (usize, &libc::pollfd)| Some((at, Socket::of(fd.fd)?));
    let sockets: Vec<_> = fds.iter().enumerate().filter_map(of).collect();
    if sockets.is_empty() {
        return wait::poll(fds, timeout);
    }
    let others = fds.len() > sockets.len();
    let began = Instant::now();
    let left = || timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
    let mut polled = Polled { fds, sockets };
    let mut looks_until = None;
    loop {
        let mut ready = polled.look();
        let is_over = left().is_some_and(|left| left.is_zero());
        let looks = !is_over && Instant::now() < *looks_until.get_or_insert_with(|| Instant::now() + LOOKS);
        if ready == 0 && looks {
            std::hint::spin_loop();
            continue;
        }
        if others {
            ready += polled.ask(&[], Some(Duration::ZERO))?;
        }
        if ready > 0 || is_over {
            return Ok(ready);
        }
        if polled.drive(left()) {
            continue;
        }
        let waker = Waker::of_thread()?;
        let more = polled.watch(&waker);
        // An arrival before they were armed does not wake the thread.
        let slept = if polled.look() > 0 {
            Ok(0)
        } else {
            polled.ask(&more, left())
        };
        polled.unwatch(&waker);
        slept?;
        looks_until = None;
    }
}

/// One set of `select(2)`: bits of numbers below `count`.
pub(super) struct Set {
    set: *mut libc::fd_set,
    /// Events that a number in the set asks for, and events that set its bit in the result.
    asks: i16,
    answers: i16,
}

impl Set {
    fn has(&self, fd: c_int) -> bool {
        // SAFETY: null, or a set of the program's; the number is below its size.
        !self.set.is_null() && unsafe { libc::FD_ISSET(fd, self.set) }
    }

    fn clear(&self, fd: c_int) {
        // SAFETY: as above.
        unsafe { libc::FD_CLR(fd, self.set) };
    }
}

/// `select(2)` for sockets and other descriptors. The sets are left with those that are ready.
///
/// # Safety
/// Each is null, or a set of the program's.
pub(super) unsafe fn select(
    count: c_int,
    [read, write, except]: [*mut libc::fd_set; 3],
    timeout: Option<Duration>,
) -> Result<usize, c_int> {
    if !(0..=libc::FD_SETSIZE as c_int).contains(&count) {
        return Err(libc::EINVAL);
    }
    let sets = [
        (read, libc::POLLIN, libc::POLLIN | libc::POLLHUP | libc::POLLERR),
        (write, libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
        (except, libc::POLLPRI, libc::POLLPRI),
    ];
    let sets = sets.map(|(set, asks, answers)| Set { set, asks, answers });
    let mut fds = Vec::new();
    for fd in 0..count {
        let asked = sets.iter().filter(|set| set.has(fd));
        let events = asked.fold(0, |events, set| events | set.asks);
        if events != 0 {
            fds.push(entry(fd, events));
        }
    }
    poll(&mut fds, timeout)?;
    if fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
        return Err(libc::EBADF);
    }
    let mut ready = 0;
    for fd in &fds {
        for set in sets.iter().filter(|set| set.has(fd.fd)) {
            if fd.revents & set.answers != 0 {
                ready += 1;
            } else {
                set.clear(fd.fd);
            }
        }
    }
    Ok(ready)
}

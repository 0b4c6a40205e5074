//! Sleeping in the place of a device's engine.

use std::os::fd::{AsFd, BorrowedFd};

#[cfg(doc)]
use crate::Device;
use crate::device::CompletionQueue;
use crate::provider;

/// The place of a device's engine among the sleepers, from [`Device::watch`] until this is dropped. A thread that sleeps on descriptors
/// adds the descriptor of this: then a packet wakes this thread itself, and not the engine's thread, which would have to wake this one.
///
/// While this exists, packets are processed in [`EngineWatch::prepare`], when it is dropped, and by threads that poll or wait for a
/// completion queue of the device. A thread that holds this and does something else for long delays the device's acknowledgements: it drops this first.
///
/// An event loop with a socket of its own:
///
/// ```no_run
/// # use std::net::UdpSocket;
/// # use rdmux_verbs::{Arm, CompletionQueue, Device};
/// # use rustix::event::{PollFd, PollFlags, poll};
/// # fn serve(device: &Device, cq: &CompletionQueue, socket: &UdpSocket) -> std::io::Result<()> {
/// let mut datagram = [0; 1500];
/// loop {
///     cq.arm(Arm::Next);
///     while let Some(completion) = cq.poll() {
///         println!("{completion:?}");
///     }
///     // Another thread may be in the engine's place: then the completion queue's descriptor wakes this one.
///     let mut watch = device.watch();
///     if watch.as_mut().is_some_and(|watch| !watch.prepare()) {
///         continue;
///     }
///     let mut fds = vec![PollFd::new(socket, PollFlags::IN), PollFd::new(cq, PollFlags::IN)];
///     fds.extend(watch.as_ref().map(|watch| PollFd::new(watch, PollFlags::IN)));
///     poll(&mut fds, None)?;
///     if !fds[0].revents().is_empty() {
///         let (bytes, from) = socket.recv_from(&mut datagram)?;
///         println!("{bytes} bytes from {from}");
///     }
///     // Processes the packets that woke this thread, before it polls again.
///     drop(watch);
/// }
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the engine's thread takes the place back when this is dropped"]
pub struct EngineWatch {
    place: Box<dyn provider::EngineWatch>,
    /// Queues whose descriptors report completions that others bring.
    reporting: Vec<CompletionQueue>,
}

impl EngineWatch {
    pub(crate) fn new(place: Box<dyn provider::EngineWatch>) -> EngineWatch {
        EngineWatch {
            place,
            reporting: Vec::new(),
        }
    }

    /// Processes the packets that woke the caller, and prepares its next sleep. Returns false if it is not to sleep: something has arrived,
    /// and it looks at its objects first. What happens after a result of true makes a descriptor readable: the one of this, or one of the
    /// objects.
    pub fn prepare(&mut self) -> bool {
        self.end_reports();
        self.place.prepare()
    }

    /// Has the descriptor of a completion queue of the device become readable when somebody else than the caller brings a completion, until
    /// [`EngineWatch::prepare`] or the end of this. A caller in this place drives the device itself, so that it does not arm its queues
    /// ([`CompletionQueue::arm`]), which would have the device's thread drive for it. A completion that is there already causes no wake-up:
    /// poll after this.
    pub fn report(&mut self, cq: &CompletionQueue) {
        if !self.reporting.last().is_some_and(|last| last.is(cq)) {
            self.reporting.push(cq.clone());
        }
        cq.provided().watch(true);
    }

    /// Ends the reports before the caller brings completions itself, which are no news to it.
    fn end_reports(&mut self) {
        for cq in self.reporting.drain(..) {
            cq.provided().watch(false);
        }
    }

    /// Returns whether the caller, if it has found nothing since it took the place, was woken again and again for other threads' sake. Then
    /// it serves itself better by dropping this: one of those threads may take the place.
    pub fn serves_others(&self) -> bool {
        self.place.serves_others()
    }
}

impl Drop for EngineWatch {
    fn drop(&mut self) {
        self.end_reports();
    }
}

impl AsFd for EngineWatch {
    /// Returns a descriptor that is readable when the caller is to wake. It is the same for each [`EngineWatch`] of a device, so it can
    /// stay in an epoll set; it means something only while one exists.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.place.fd()
    }
}

//! Asynchronous events: changes of objects that no completion of their own requests reports. IBTA Vol 1, 11.6.3.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use rdmux_rnic::{Cause, Cqn, Qpn, Srqn, Status};

use crate::soft::engine::Waker;

/// Events kept for a program that does not take them; the oldest are dropped.
const KEPT_MAX: usize = 1024;

/// An asynchronous event. The names are those of `enum ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A completion queue overran; its queue pairs are in error.
    CqError(Cqn),
    /// A queue pair went to error for a reason of its own device: its memory failed, its completion queue overran, or the program
    /// asked for that fault ([`Options::faults`](crate::Options::faults)).
    QpFatal(Qpn),
    /// A queue pair went to error: its peer asked for something invalid.
    QpRequestError(Qpn),
    /// A queue pair went to error: its peer asked for memory that it may not reach.
    QpAccessError(Qpn),
    /// Data came in on a queue pair that is still in RTR.
    CommunicationEstablished(Qpn),
    /// The send queue of a queue pair in SQD has drained.
    SqDrained(Qpn),
    /// A queue pair in error consumes no further receives of its shared receive queue.
    LastWqeReached(Qpn),
    /// Fewer receives than the limit are left in a shared receive queue.
    SrqLimitReached(Srqn),
    /// The network takes packets again.
    PortActive,
    /// The network takes no packets: the address or its interface has gone.
    PortError,
}

impl AsyncEvent {
    /// Returns the event of a queue pair that went to error; `None` if the completion of its own request reports everything.
    pub(crate) fn of_qp_error(qpn: Qpn, status: Status, cause: Cause) -> Option<AsyncEvent> {
        match (cause, status) {
            (Cause::OwnRequest, _) => None,
            (Cause::PeerRequest, Status::RemoteInvalidRequest) => Some(AsyncEvent::QpRequestError(qpn)),
            (Cause::PeerRequest, Status::RemoteAccess) => Some(AsyncEvent::QpAccessError(qpn)),
            (Cause::PeerRequest | Cause::QueueOverrun | Cause::Injected, _) => Some(AsyncEvent::QpFatal(qpn)),
        }
    }
}

/// Events that the program has not taken yet.
#[derive(Debug)]
pub(crate) struct AsyncEvents {
    queue: VecDeque<AsyncEvent>,
    waker: Arc<Waker>,
}

impl AsyncEvents {
    pub(crate) fn new() -> io::Result<AsyncEvents> {
        Ok(AsyncEvents {
            queue: VecDeque::new(),
            waker: Arc::new(Waker::new()?),
        })
    }

    pub(crate) fn push(&mut self, event: AsyncEvent) {
        if self.queue.len() == KEPT_MAX {
            self.queue.pop_front();
        }
        self.queue.push_back(event);
        self.waker.wake();
    }

    pub(crate) fn take(&mut self) -> Option<AsyncEvent> {
        self.queue.pop_front()
    }

    /// Takes the oldest event for a waiting thread. One wake-up can stand for several events: while there are more, this wakes the
    /// next waiting thread.
    pub(crate) fn take_and_pass_on(&mut self) -> Option<AsyncEvent> {
        let event = self.take();
        if !self.queue.is_empty() {
            self.waker.wake();
        }
        event
    }

    pub(crate) fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn take_and_pass_on__wakes_the_next_while_there_are_more() {
        let mut events = AsyncEvents::new().unwrap();
        events.push(AsyncEvent::PortError);
        events.push(AsyncEvent::PortActive);
        let waker = events.waker();
        let is_woken = || waker.wait(Some(Duration::ZERO));
        assert!(is_woken() && !is_woken(), "both events are one wake-up");
        assert_eq!(events.take_and_pass_on(), Some(AsyncEvent::PortError));
        assert!(is_woken(), "one more is there");
        assert_eq!(events.take_and_pass_on(), Some(AsyncEvent::PortActive));
        assert!(!is_woken(), "none is there");
    }
}

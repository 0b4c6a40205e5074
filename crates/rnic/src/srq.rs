//! Shared receive queues. IBTA Vol 1, 10.2.9; for XRC also A14.

use crate::cq::Cqn;
use crate::queue::ReceiveQueue;
use crate::region::Pd;
use crate::work::{PostError, RecvRequest};

/// Number of a shared receive queue, 24 bits: on XRC peers name it in their packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Srqn(pub u32);

/// Handle of an XRC domain of one device. IBTA Vol 1, A14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Xrcd(pub u32);

/// Parameters of a new shared receive queue.
#[derive(Clone, Copy, Debug)]
pub struct SrqInit {
    /// Protection domain of the receives' memory.
    pub pd: Pd,
    /// Receives that the queue holds.
    pub max_wr: u32,
    /// For XRC: the domain that the queue serves, and the completion queue of its receives.
    pub xrc: Option<(Xrcd, Cqn)>,
}

/// Properties of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInfo {
    /// Receives that the queue holds.
    pub max_wr: u32,
    /// Receives that are posted and not consumed.
    pub posted: usize,
    /// The limit, while it is armed.
    pub limit: Option<u32>,
}

/// Error of changing a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrqError {
    /// No such queue.
    #[error("no such shared receive queue")]
    NoSrq,
    /// More receives are posted than the new size allows.
    #[error("{posted} receives are posted, more than the new size")]
    TooSmall {
        /// Receives posted.
        posted: usize,
    },
    /// The limit is higher than the queue's size. IBTA Vol 1, 10.2.9.1.
    #[error("the limit is higher than the queue's size")]
    LimitTooHigh,
    /// QPs still use the queue. IBTA Vol 1, 11.2.9.5.
    #[error("QPs still use the shared receive queue")]
    Busy,
    /// The device refused the queue; the number is the system's errno.
    #[error("the device refused it: {}", std::io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}

#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    pub(crate) init: SrqInit,
    /// Shared with the callers that post to it.
    pub(crate) queue: ReceiveQueue,
    limit: Option<u32>,
}

impl SharedReceiveQueue {
    pub(crate) fn new(init: SrqInit) -> SharedReceiveQueue {
        SharedReceiveQueue {
            init,
            queue: ReceiveQueue::new(init.max_wr, true),
            limit: None,
        }
    }

    pub(crate) fn post(&mut self, request: RecvRequest) -> Result<(), PostError> {
        self.queue.push(request)
    }

    /// Takes the oldest receive. The second value is set when the limit is reached, which is reported once. IBTA Vol 1, 10.2.9.1.
    pub(crate) fn take(&mut self) -> (Option<RecvRequest>, bool) {
        let Some((taken, left)) = self.queue.take() else {
            return (None, false);
        };
        let reached = self.limit.is_some_and(|limit| left < limit as usize);
        if reached && !mutant!(SrqLimitStaysArmed) {
            self.limit = None;
            self.queue.count(false);
        }
        (Some(taken), reached && !mutant!(SrqLimitUntold))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn modify(&mut self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let max_wr = max_wr.unwrap_or(self.queue.max());
        if limit.is_some_and(|limit| limit > max_wr) {
            return Err(SrqError::LimitTooHigh);
        }
        let too_small = |posted| SrqError::TooSmall { posted };
        self.queue.resize(max_wr).map_err(too_small)?;
        if let Some(limit) = limit {
            self.limit = (limit > 0).then_some(limit);
            self.queue.count(limit > 0);
        }
        Ok(())
    }

    pub(crate) fn info(&self) -> SrqInfo {
        SrqInfo {
            max_wr: self.queue.max(),
            posted: self.queue.len(),
            limit: self.limit,
        }
    }
}

//! Shared receive queues. IBTA Vol 1, 10.2.9; for XRC also A14.

use std::collections::VecDeque;

use crate::cq::Cqn;
use crate::region::Pd;
use crate::work::{PostError, RecvRequest};

/// Number of a shared receive queue, 24 bits: on XRC peers name it in their packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Srqn(pub u32);

/// Handle of an XRC domain of one device. IBTA Vol 1, A14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Xrcd(pub u32);

/// What a shared receive queue is made with.
#[derive(Clone, Copy, Debug)]
pub struct SrqInit {
    /// Protection domain of the receives' memory.
    pub pd: Pd,
    /// Receives it holds.
    pub max_wr: u32,
    /// For XRC: the domain that it serves, and where its completions go.
    pub xrc: Option<(Xrcd, Cqn)>,
}

/// What is known about a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInfo {
    /// Receives it holds.
    pub max_wr: u32,
    /// Receives posted and not used.
    pub posted: usize,
    /// The limit, while it is armed.
    pub limit: Option<u32>,
}

/// Why a shared receive queue was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrqError {
    /// No such queue.
    #[error("no such shared receive queue")]
    NoSrq,
    /// More receives are posted than the new size takes.
    #[error("{posted} receives are posted, more than the new size")]
    TooSmall {
        /// Receives posted.
        posted: usize,
    },
    /// The limit is higher than the queue's size. IBTA Vol 1, 10.2.9.1.
    #[error("the limit is higher than the queue's size")]
    LimitTooHigh,
    /// QPs still use it. IBTA Vol 1, 11.2.9.5.
    #[error("QPs still use the shared receive queue")]
    Busy,
}

#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    pub(crate) init: SrqInit,
    queue: VecDeque<RecvRequest>,
    limit: Option<u32>,
}

impl SharedReceiveQueue {
    pub(crate) fn new(init: SrqInit) -> SharedReceiveQueue {
        SharedReceiveQueue {
            init,
            queue: VecDeque::new(),
            limit: None,
        }
    }

    pub(crate) fn post(&mut self, request: RecvRequest) -> Result<(), PostError> {
        request.check()?;
        if self.queue.len() >= self.init.max_wr as usize {
            return Err(PostError::QueueFull);
        }
        self.queue.push_back(request);
        Ok(())
    }

    /// Takes the oldest receive. The second value: the limit was reached, which is told once. IBTA Vol 1, 10.2.9.1.
    pub(crate) fn take(&mut self) -> (Option<RecvRequest>, bool) {
        let taken = self.queue.pop_front();
        let reached = taken.is_some() && self.limit.is_some_and(|limit| self.queue.len() < limit as usize);
        if reached && !mutant!(SrqLimitStaysArmed) {
            self.limit = None;
        }
        (taken, reached && !mutant!(SrqLimitUntold))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn modify(&mut self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let max_wr = max_wr.unwrap_or(self.init.max_wr);
        let posted = self.queue.len();
        if posted > max_wr as usize {
            return Err(SrqError::TooSmall { posted });
        }
        if limit.is_some_and(|limit| limit > max_wr) {
            return Err(SrqError::LimitTooHigh);
        }
        self.init.max_wr = max_wr;
        if let Some(limit) = limit {
            self.limit = (limit > 0).then_some(limit);
        }
        Ok(())
    }

    pub(crate) fn info(&self) -> SrqInfo {
        SrqInfo {
            max_wr: self.init.max_wr,
            posted: self.queue.len(),
            limit: self.limit,
        }
    }
}

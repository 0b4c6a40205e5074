//! What can be changed of a completion queue that is there: its length, when it speaks up, and whether it keeps times.

use std::io;
use std::time::Instant;

use rdmux_rnic::{Moderation, WorkCompletion};

use crate::device::CompletionQueue;
use crate::features::{Features, Unsupported};

/// Why a completion queue keeps its length.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// It has more completions than that.
    #[error("the completion queue has more completions than it would have room for")]
    TooShort,
    /// The device refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl CompletionQueue {
    /// Makes room for `depth` completions; those that are there stay. IBTA Vol 1, 11.2.8.3.
    pub fn resize(&self, depth: u32) -> Result<(), ResizeError> {
        match (self.soft(), self.hw()) {
            (Some(cq), _) => cq.resize(depth),
            (_, Some(cq)) => cq.resize(depth),
            (None, None) => Ok(()),
        }
    }

    /// Lets completions come together before an armed queue speaks up; `None`: it speaks up at the first.
    ///
    /// # Errors
    /// Only devices that have [`Features::CQ_MODERATION`].
    pub fn moderate(&self, moderation: Option<Moderation>) -> Result<(), Unsupported> {
        self.soft_only(Features::CQ_MODERATION)?.moderate(moderation);
        Ok(())
    }

    /// Keeps when each completion comes, for [`CompletionQueue::poll_with_time`].
    ///
    /// # Errors
    /// Only devices that have [`Features::CQ_TIMES`].
    pub fn keep_times(&self) -> Result<(), Unsupported> {
        self.soft_only(Features::CQ_TIMES)?.keep_times();
        Ok(())
    }

    /// As [`CompletionQueue::poll`], and when the completion came: now, where that was not kept.
    pub fn poll_with_time(&self) -> Option<(WorkCompletion, Instant)> {
        match self.soft() {
            Some(cq) => cq.poll_with_time(),
            None => Some((self.poll()?, Instant::now())),
        }
    }

    fn soft_only(&self, feature: Features) -> Result<&crate::soft::device::CompletionQueue, Unsupported> {
        self.soft().ok_or_else(|| Unsupported {
            feature,
            device: self.device().address().to_string(),
        })
    }
}

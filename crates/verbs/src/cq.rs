//! Changes to an existing completion queue: its length, its moderation, and whether it records times.

use std::io;
use std::time::Instant;

use rdmux_rnic::{Moderation, WorkCompletion};

use crate::device::CompletionQueue;
use crate::features::{Features, Unsupported};

/// Why a completion queue was not resized.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The queue holds more completions than it would have room for.
    #[error("the completion queue holds more completions than the new size")]
    TooShort,
    /// The device refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl CompletionQueue {
    /// Makes room for `depth` completions; completions that are in the queue stay. IBTA Vol 1, 11.2.8.3.
    pub fn resize(&self, depth: u32) -> Result<(), ResizeError> {
        match (self.soft(), self.hw()) {
            (Some(cq), _) => cq.resize(depth),
            (_, Some(cq)) => cq.resize(depth),
            (None, None) => Ok(()),
        }
    }

    /// Lets several completions arrive before an armed queue raises its event; `None`: the first completion raises it.
    ///
    /// # Errors
    /// [`Unsupported`] unless the device has [`Features::CQ_MODERATION`].
    pub fn moderate(&self, moderation: Option<Moderation>) -> Result<(), Unsupported> {
        self.soft_only(Features::CQ_MODERATION)?.moderate(moderation);
        Ok(())
    }

    /// Records the time at which each completion arrives, for [`CompletionQueue::poll_with_time`].
    ///
    /// # Errors
    /// [`Unsupported`] unless the device has [`Features::CQ_TIMES`].
    pub fn keep_times(&self) -> Result<(), Unsupported> {
        self.soft_only(Features::CQ_TIMES)?.keep_times();
        Ok(())
    }

    /// Polls as [`CompletionQueue::poll`] does, and also returns when the completion arrived: the present time if the queue did not
    /// record it.
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

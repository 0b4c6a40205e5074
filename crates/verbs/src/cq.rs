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
        self.provided().resize(depth)
    }

    /// Lets several completions arrive before an armed queue raises its event; `None`: the first completion raises it.
    ///
    /// # Errors
    /// [`Unsupported`] unless the device has [`Features::CQ_MODERATION`].
    pub fn moderate(&self, moderation: Option<Moderation>) -> Result<(), Unsupported> {
        self.needs(Features::CQ_MODERATION)?;
        self.provided().moderate(moderation);
        Ok(())
    }

    /// Records the time at which each completion arrives, for [`CompletionQueue::poll_with_time`].
    ///
    /// # Errors
    /// [`Unsupported`] unless the device has [`Features::CQ_TIMES`].
    pub fn keep_times(&self) -> Result<(), Unsupported> {
        self.needs(Features::CQ_TIMES)?;
        self.provided().keep_times();
        Ok(())
    }

    /// Polls as [`CompletionQueue::poll`] does, and also returns when the completion arrived: the present time if the queue did not
    /// record it.
    pub fn poll_with_time(&self) -> Option<(WorkCompletion, Instant)> {
        self.drive_if_due();
        let found = self.provided().poll_with_time();
        self.note(found.is_some());
        found
    }

    /// Checks that the device has a feature.
    fn needs(&self, feature: Features) -> Result<(), Unsupported> {
        let device = self.device();
        if device.features().contains(feature) {
            return Ok(());
        }
        Err(Unsupported {
            feature,
            device: device.address().to_string(),
        })
    }
}

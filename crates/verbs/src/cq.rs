//! Changes to an existing completion queue: its length, its moderation, and whether it records times.

use std::io;
use std::time::Instant;

use rdmux_rnic::{Moderation, WorkCompletion};

use crate::device::CompletionQueue;
use crate::features::{Features, Unsupported};
use crate::moderation::{ModerationPolicy, Moderator};
#[cfg(doc)]
use crate::options::Options;

/// Why a completion queue was not resized.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The queue holds more completions than it would have room for.
    #[error("the completion queue holds more completions than the new size")]
    TooShort,
    /// It is a share of a pool's queue, in which others have reserved the rest, or whose pool is gone.
    #[error("the pool's completion queue has no room for so many completions")]
    NoRoom,
    /// It is a queue of a pool, whose users have reserved it.
    #[error("a completion queue of a pool keeps its size")]
    Pooled,
    /// The device refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl CompletionQueue {
    /// Makes room for `depth` completions; completions that are in the queue stay. Of a share of a pool's queue it changes the number of
    /// completions that are reserved. IBTA Vol 1, 11.2.8.3.
    pub fn resize(&self, depth: u32) -> Result<(), ResizeError> {
        if let Some(share) = self.share() {
            return share.resize(self, depth);
        }
        if self.lacks_share() {
            return Err(ResizeError::Pooled);
        }
        self.provided().resize(depth)
    }

    /// Lets several completions arrive before an armed queue raises its event, as this policy says. Without a call, the queue has the
    /// policy of its device ([`Options::moderation`]), also when that changes ([`crate::resources::set`]). An adaptive policy counts as an event
    /// each arming of the queue after it has raised one, unless no completion was taken since the arming before. (Linux counts those, too.) A
    /// thread that sleeps in [`CompletionQueue::wait`] itself is woken by each packet, and not moderated.
    ///
    /// # Errors
    /// [`Unsupported`] unless the device has [`Features::CQ_MODERATION`].
    pub fn moderate(&self, policy: ModerationPolicy) -> Result<(), Unsupported> {
        self.needs(Features::CQ_MODERATION)?;
        self.moderated()
            .set(policy, self.taken(), |moderator| self.apply(moderator));
        Ok(())
    }

    /// Returns the policy, and the moderation in effect.
    pub fn moderation(&self) -> (ModerationPolicy, Option<Moderation>) {
        self.follow_device();
        let moderator = self.moderated().moderator.lock();
        (moderator.policy(), moderator.moderation())
    }

    fn apply(&self, moderator: &Moderator) {
        self.provided()
            .moderate(moderator.policy().kind(), moderator.moderation());
    }

    /// Takes over a policy of the device that has changed, unless the queue has one of its own.
    #[inline]
    pub(crate) fn follow_device(&self) {
        if self.moderated().is_behind(self.device().moderation()) {
            self.follow();
        }
    }

    /// Takes over the policy of the device.
    pub(crate) fn follow(&self) {
        let device = self.device();
        let moderates = device.features().contains(Features::CQ_MODERATION);
        self.moderated()
            .follow(device.moderation(), self.taken(), |moderator| {
                if moderates {
                    self.apply(moderator);
                }
            });
    }

    /// Ends a run of a handler that sleeps in the place of the device ([`crate::Device::watch`]), where packets wake it and not events, which
    /// the device could delay. It has taken all completions, and is about to wait. `woken`: a wake-up began the run; if not, the handler
    /// polled, and the policy does not count the run. Returns the moderation of the next wake-up, by whose period the handler delays its look: it
    /// does not see how many completions come meanwhile.
    pub fn handled(&self, woken: bool) -> Option<Moderation> {
        self.follow_device();
        let moderated = self.moderated();
        if woken && let Some(queue) = self.counting() {
            queue.note_wake_up();
        }
        if !moderated.is_on() {
            return None;
        }
        moderated.handled(woken, || self.taken(), |moderator| self.apply(moderator));
        moderated.moderator.lock().moderation()
    }

    /// Tells the policy of an event, if the queue has raised one since it was armed, and its handler is about to arm it again.
    #[inline]
    pub(crate) fn handled_events(&self) {
        self.follow_device();
        let moderated = self.moderated();
        if moderated.is_adaptive() {
            let woken = self.provided().has_notified();
            moderated.handled(woken, || self.taken(), |moderator| self.apply(moderator));
        }
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
        self.note(usize::from(found.is_some()));
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

//! Sending rate of a QP, and its pending congestion notification.

use crate::dcqcn::{NotificationPoint, Parameters, ReactionPoint};
use crate::pacer::{Pacer, burst_bytes};
use crate::time::Time;

/// The rate of one QP: the lower of the rate that congestion control allows and the QP's own limit.
#[derive(Debug)]
pub(crate) struct Rate {
    reaction: ReactionPoint,
    notification: NotificationPoint,
    /// The user's limit; 0 for none.
    pub(crate) limit_bps: u64,
    pacer: Pacer,
    /// Set while a CNP is pending and the device's list of pending CNPs holds this QP.
    pub(crate) cnp_owed: bool,
    /// The QP sends no data before this moment.
    pub(crate) held_until: Option<Time>,
    /// Bytes that the QP may send together; no limit while no rate limits the QP.
    pub(crate) burst_bytes: u32,
}

impl Default for Rate {
    fn default() -> Rate {
        Rate {
            reaction: ReactionPoint::default(),
            notification: NotificationPoint::default(),
            limit_bps: 0,
            pacer: Pacer::default(),
            cnp_owed: false,
            held_until: None,
            burst_bytes: u32::MAX,
        }
    }
}

impl Rate {
    /// Handles a marked packet; returns whether it makes a CNP pending.
    pub(crate) fn handle_marked(&mut self, now: Time, with: &Parameters) -> bool {
        let owed = !self.cnp_owed && self.notification.handle_marked(now, with);
        self.cnp_owed |= owed;
        owed
    }

    /// Handles a CNP, by which the peer reports that packets of this QP were marked.
    pub(crate) fn handle_cnp(&mut self, now: Time, with: &Parameters) {
        self.reaction.handle_cnp(now, with);
    }

    /// Updates `held_until` and `burst_bytes`.
    pub(crate) fn look(&mut self, now: Time, with: Option<&Parameters>, packet_bytes: u32) {
        let rate_bps = self.bps(now, with);
        self.held_until = rate_bps.and_then(|_| self.pacer.waits_until(now));
        self.burst_bytes = rate_bps.map_or(u32::MAX, |bps| burst_bytes(bps, packet_bytes));
    }

    /// Returns whether nothing limits the QP, so that there is nothing to update: the case of most QPs, most of the time.
    pub(crate) fn is_free(&self) -> bool {
        self.burst_bytes == u32::MAX && self.limit_bps == 0 && self.reaction.is_idle()
    }

    /// Returns whether some rate limits the QP.
    pub(crate) fn is_limited(&self) -> bool {
        self.burst_bytes != u32::MAX
    }

    /// Counts `bytes` that the QP sent.
    pub(crate) fn charge(&mut self, now: Time, bytes: u64, with: Option<&Parameters>) {
        if let Some(with) = with {
            self.reaction.handle_sent(now, bytes, with);
        }
        if let Some(rate_bps) = self.bps(now, with) {
            self.pacer.charge(now, bytes, rate_bps);
        }
    }

    fn bps(&mut self, now: Time, with: Option<&Parameters>) -> Option<u64> {
        let congestion = with.and_then(|with| self.reaction.rate_bps(now, with));
        let limit = Some(self.limit_bps).filter(|bps| *bps > 0);
        match (congestion, limit) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

//! Moderation of wake-ups: how many completions one wake-up of a queue's handler waits for, and how long.
//!
//! A handler that wakes for each completion spends more time waking than working once the load is high; one that waits for more
//! completions answers a light load late. A [`Moderator`] chooses between the two by the load that it sees, as its
//! [`ModerationPolicy`] says. It is pure: it reads no clock and makes no system call.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{Moderation, ModerationKind, Time};

pub mod dim;
pub mod rate;

use dim::Dim;
use rate::Rate;

/// How a queue's wake-ups are moderated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModerationPolicy {
    /// The first completion wakes the handler.
    #[default]
    Off,
    /// Always the same moderation.
    Fixed(Moderation),
    /// As Linux's `rdma_dim` chooses it ([`dim`]).
    Dim,
    /// By the rate of completions ([`rate`]).
    Rate,
}

impl ModerationPolicy {
    /// Returns its kind.
    pub fn kind(self) -> ModerationKind {
        match self {
            ModerationPolicy::Off => ModerationKind::Off,
            ModerationPolicy::Fixed(_) => ModerationKind::Fixed,
            ModerationPolicy::Dim => ModerationKind::Dim,
            ModerationPolicy::Rate => ModerationKind::Rate,
        }
    }
}

impl Display for ModerationPolicy {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            ModerationPolicy::Off => f.write_str("off"),
            ModerationPolicy::Fixed(Moderation { count, period_us }) => write!(f, "{count},{period_us}us"),
            ModerationPolicy::Dim => f.write_str("dim"),
            ModerationPolicy::Rate => f.write_str("rate"),
        }
    }
}

/// A moderation policy cannot be read from this text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("moderation \"{0}\": use off, dim, rate, or COUNT,PERIOD such as 16,32us")]
pub struct UnknownPolicy(String);

impl FromStr for ModerationPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<ModerationPolicy, UnknownPolicy> {
        let fixed = || {
            let (count, period) = text.split_once(',')?;
            let period = period.strip_suffix("us").unwrap_or(period);
            let (count, period_us) = (count.parse().ok()?, period.parse().ok()?);
            Some(ModerationPolicy::Fixed(Moderation { count, period_us }))
        };
        match text {
            "off" => Ok(ModerationPolicy::Off),
            "dim" => Ok(ModerationPolicy::Dim),
            "rate" => Ok(ModerationPolicy::Rate),
            _ => fixed().ok_or_else(|| UnknownPolicy(text.to_owned())),
        }
    }
}

/// Moderates one queue, or the queues of one handler.
#[derive(Clone, Debug)]
pub struct Moderator {
    policy: ModerationPolicy,
    algorithm: Algorithm,
    moderation: Option<Moderation>,
    changes: u64,
}

#[derive(Clone, Debug)]
enum Algorithm {
    Constant,
    Dim(Dim),
    Rate(Rate),
}

impl Moderator {
    /// Makes a moderator that has seen no load yet.
    pub fn new(policy: ModerationPolicy) -> Moderator {
        let (algorithm, moderation) = match policy {
            ModerationPolicy::Off => (Algorithm::Constant, None),
            ModerationPolicy::Fixed(moderation) => (Algorithm::Constant, Some(moderation)),
            ModerationPolicy::Dim => (Algorithm::Dim(Dim::default()), Some(dim::PROFILES[0])),
            ModerationPolicy::Rate => (Algorithm::Rate(Rate::default()), None),
        };
        Moderator {
            policy,
            algorithm,
            moderation,
            changes: 0,
        }
    }

    /// Returns the policy.
    pub fn policy(&self) -> ModerationPolicy {
        self.policy
    }

    /// Returns the moderation in effect.
    pub fn moderation(&self) -> Option<Moderation> {
        self.moderation
    }

    /// Returns how often the moderation has changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Notes an event: at `now` the handler has finished a run for which a wake-up was the reason, and has taken so many completions since the event
    /// before. Returns true if [`Moderator::moderation`] is another one from now on.
    pub fn event(&mut self, now: Time, completions: u32) -> bool {
        let moderation = match &mut self.algorithm {
            Algorithm::Constant => return false,
            Algorithm::Dim(dim) => match dim.event(now, completions) {
                Some(moderation) => {
                    dim.applied();
                    Some(moderation)
                }
                None => return false,
            },
            Algorithm::Rate(rate) => rate.event(now, completions),
        };
        let changes = moderation != self.moderation;
        self.moderation = moderation;
        self.changes += u64::from(changes);
        changes
    }

    /// Discards the window of measurement: the handler has polled since the last event, so that what it took says nothing about wake-ups. The
    /// moderation stays that of the last rate.
    pub fn interrupt(&mut self) {
        match &mut self.algorithm {
            Algorithm::Constant => {}
            Algorithm::Dim(dim) => dim.restart(),
            Algorithm::Rate(rate) => rate.restart(),
        }
    }
}

/// Moderation of one completion queue by its handlers.
#[derive(Debug)]
pub(crate) struct Moderated {
    /// Set if the policy needs to know of events.
    adaptive: AtomicBool,
    pub(crate) moderator: Mutex<Moderator>,
    /// Completions taken until the event before.
    taken: AtomicU32,
}

impl Default for Moderated {
    fn default() -> Moderated {
        Moderated {
            adaptive: AtomicBool::new(false),
            moderator: Mutex::new(Moderator::new(ModerationPolicy::Off)),
            taken: AtomicU32::new(0),
        }
    }
}

impl Moderated {
    #[inline]
    pub(crate) fn is_adaptive(&self) -> bool {
        self.adaptive.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, moderator: Moderator, taken: u32) {
        let adaptive = !matches!(moderator.algorithm, Algorithm::Constant);
        let mut own = self.moderator.lock();
        *own = moderator;
        self.taken.store(taken, Ordering::Relaxed);
        self.adaptive.store(adaptive, Ordering::Relaxed);
    }

    /// Notes that a handler has finished a run, for which a wake-up was the reason or not; `taken`: the completions taken until now. Returns the
    /// policy, and the moderation that the queue is to have, if it changes.
    pub(crate) fn handled(&self, woken: bool, taken: u32) -> Option<(ModerationPolicy, Option<Moderation>)> {
        let mut moderator = self.moderator.lock();
        let before = self.taken.swap(taken, Ordering::Relaxed);
        if !woken {
            // A handler that arms an armed queue, and has found nothing, has polled no more than it does anyway.
            if before != taken {
                moderator.interrupt();
            }
            return None;
        }
        let changes = moderator.event(now(), taken.wrapping_sub(before));
        changes.then(|| (moderator.policy(), moderator.moderation()))
    }
}

/// Returns the time on a clock of this process.
pub fn now() -> Time {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    Time(BEGAN.elapsed().as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy__reads_what_it_prints() {
        let fixed = |count, period_us| ModerationPolicy::Fixed(Moderation { count, period_us });
        for policy in [
            ModerationPolicy::Off,
            ModerationPolicy::Dim,
            ModerationPolicy::Rate,
            fixed(16, 32),
        ] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert_eq!("8,16".parse(), Ok(fixed(8, 16)));
        for wrong in ["", "on", "8", "8,", ",8us", "70000,1us", "8,1ms"] {
            let error = wrong.parse::<ModerationPolicy>().unwrap_err();
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("moderation \"{wrong}\": use ")),
                "{error}"
            );
        }
    }
}

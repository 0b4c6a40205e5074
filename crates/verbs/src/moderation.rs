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
    /// The policy of users who want one that follows the load, and leave open which. Recorded loads, replayed, say which is better
    /// (tests/moderation.rs).
    pub const ADAPTIVE: ModerationPolicy = ModerationPolicy::Rate;

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
#[error("moderation \"{0}\": use off, dim, rate, or COUNT,PERIOD such as 16,32us, both up to 65535")]
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

impl ModerationPolicy {
    /// Encodes the policy, for messages between processes.
    pub(crate) fn to_word(self) -> u64 {
        let fixed = |Moderation { count, period_us }| u64::from(count) << 16 | u64::from(period_us);
        match self {
            ModerationPolicy::Off => 0,
            ModerationPolicy::Dim => 1,
            ModerationPolicy::Rate => 2,
            ModerationPolicy::Fixed(moderation) => 1 << 32 | fixed(moderation),
        }
    }

    /// Inverts [`ModerationPolicy::to_word`].
    pub(crate) fn from_word(word: u64) -> Option<ModerationPolicy> {
        Some(match (word >> 32, word as u32) {
            (0, 0) => ModerationPolicy::Off,
            (0, 1) => ModerationPolicy::Dim,
            (0, 2) => ModerationPolicy::Rate,
            (1, both) => ModerationPolicy::Fixed(Moderation {
                count: (both >> 16) as u16,
                period_us: both as u16,
            }),
            _ => return None,
        })
    }
}

/// The policy of a device's completion queues that have none of their own. It may change while the device is open: a queue follows when its
/// handler waits the next time, so that nobody has to know all queues.
#[derive(Debug, Default)]
pub struct DeviceModeration {
    policy: Mutex<ModerationPolicy>,
    /// Number of changes, modulo [`OWN`].
    changes: AtomicU32,
}

/// In place of a number of changes: the queue has a policy of its own.
const OWN: u32 = u32::MAX;

impl DeviceModeration {
    /// Begins with a policy.
    pub fn new(policy: ModerationPolicy) -> DeviceModeration {
        DeviceModeration {
            policy: Mutex::new(policy),
            changes: AtomicU32::new(0),
        }
    }

    /// Returns the policy.
    pub fn policy(&self) -> ModerationPolicy {
        *self.policy.lock()
    }

    /// Changes the policy.
    pub fn set(&self, policy: ModerationPolicy) {
        let mut own = self.policy.lock();
        if *own != policy {
            *own = policy;
            let changes = (self.changes.load(Ordering::Relaxed) + 1) % OWN;
            self.changes.store(changes, Ordering::Relaxed);
        }
    }

    #[inline]
    fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Returns the policy and the number of changes until it.
    fn both(&self) -> (ModerationPolicy, u32) {
        let policy = self.policy.lock();
        (*policy, self.changes())
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

    /// Notes a run of the handler that no wake-up began: it polled. The run is no event, but its completions belong to the rate. A handler that
    /// polls run after run decides nothing: the moderation stays that of the last rate.
    pub fn polled(&mut self, now: Time, completions: u32) {
        match &mut self.algorithm {
            Algorithm::Constant => {}
            Algorithm::Dim(dim) => dim.polled(completions),
            Algorithm::Rate(rate) => rate.polled(now, completions),
        }
    }
}

/// Moderation of one completion queue.
#[derive(Debug)]
pub(crate) struct Moderated {
    /// Set if there is anything to moderate.
    is_on: AtomicBool,
    /// Set if the policy needs to know of events.
    is_adaptive: AtomicBool,
    /// The change of the device's policy that the queue follows, or [`OWN`].
    follows: AtomicU32,
    pub(crate) moderator: Mutex<Moderator>,
    /// Completions taken until the event before.
    taken: AtomicU32,
}

impl Default for Moderated {
    fn default() -> Moderated {
        Moderated {
            is_on: AtomicBool::new(false),
            is_adaptive: AtomicBool::new(false),
            follows: AtomicU32::new(0),
            moderator: Mutex::new(Moderator::new(ModerationPolicy::Off)),
            taken: AtomicU32::new(0),
        }
    }
}

impl Moderated {
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_adaptive(&self) -> bool {
        self.is_adaptive.load(Ordering::Relaxed)
    }

    /// Returns whether the device's policy has changed since the queue followed it.
    #[inline]
    pub(crate) fn is_behind(&self, device: &DeviceModeration) -> bool {
        let follows = self.follows.load(Ordering::Relaxed);
        follows != device.changes() && follows != OWN
    }

    /// Gives the queue a policy of its own. `taken`: the completions taken until now; `apply` gives the queue its moderation.
    pub(crate) fn set(&self, policy: ModerationPolicy, taken: u32, apply: impl FnOnce(&Moderator)) {
        let mut own = self.moderator.lock();
        self.replace(policy, OWN, taken, &mut own);
        apply(&own);
    }

    /// Gives the queue its device's policy, unless it has one of its own.
    pub(crate) fn follow(&self, device: &DeviceModeration, taken: u32, apply: impl FnOnce(&Moderator)) {
        let mut own = self.moderator.lock();
        if self.follows.load(Ordering::Relaxed) != OWN {
            let (policy, changes) = device.both();
            self.replace(policy, changes, taken, &mut own);
            apply(&own);
        }
    }

    fn replace(&self, policy: ModerationPolicy, follows: u32, taken: u32, own: &mut Moderator) {
        *own = Moderator::new(policy);
        self.follows.store(follows, Ordering::Relaxed);
        self.taken.store(taken, Ordering::Relaxed);
        let is_adaptive = !matches!(own.algorithm, Algorithm::Constant);
        self.is_on
            .store(policy != ModerationPolicy::Off, Ordering::Relaxed);
        self.is_adaptive.store(is_adaptive, Ordering::Relaxed);
    }

    /// Notes that a handler has finished a run, for which a wake-up was the reason or not; `taken` returns the completions taken until now.
    /// `apply` gives the queue its moderation, if that changes.
    pub(crate) fn handled(&self, woken: bool, taken: impl FnOnce() -> u32, apply: impl FnOnce(&Moderator)) {
        let mut moderator = self.moderator.lock();
        let taken = taken();
        let completions = taken.wrapping_sub(self.taken.swap(taken, Ordering::Relaxed));
        // None if something else woke the handler. Where two threads take completions at once, the count may go back.
        if completions == 0 || completions > u32::MAX / 2 {
            return;
        }
        if !woken {
            moderator.polled(now(), completions);
        } else if moderator.event(now(), completions) {
            apply(&moderator);
        }
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

    #[test]
    fn policy__words_are_read_back() {
        let fixed = |count, period_us| ModerationPolicy::Fixed(Moderation { count, period_us });
        let policies = [
            ModerationPolicy::Off,
            ModerationPolicy::Dim,
            ModerationPolicy::Rate,
            fixed(0, 0),
            fixed(u16::MAX, 1),
        ];
        for policy in policies {
            assert_eq!(ModerationPolicy::from_word(policy.to_word()), Some(policy));
        }
        for wrong in [3, 2 << 32, u64::MAX] {
            assert_eq!(ModerationPolicy::from_word(wrong), None);
        }
    }

    #[test]
    fn follow__the_device_until_it_has_a_policy_of_its_own() {
        let device = DeviceModeration::new(ModerationPolicy::Off);
        let queue = Moderated::default();
        assert!(!queue.is_behind(&device));
        device.set(ModerationPolicy::Off);
        assert!(!queue.is_behind(&device), "nothing has changed");
        device.set(ModerationPolicy::Dim);
        assert!(queue.is_behind(&device));
        let mut applied = None;
        queue.follow(&device, 0, |moderator| applied = Some(moderator.moderation()));
        assert_eq!(applied, Some(Some(dim::PROFILES[0])));
        assert!(!queue.is_behind(&device) && queue.is_adaptive());
        queue.set(ModerationPolicy::Off, 0, |_| {});
        device.set(ModerationPolicy::Rate);
        assert!(!queue.is_behind(&device) && !queue.is_adaptive());
        queue.follow(&device, 0, |_| panic!("it has its own"));
        assert_eq!(queue.moderator.lock().policy(), ModerationPolicy::Off);
    }
}

//! Tenants: the users of one device, with weights and rates, as the classes of Linux's sch_htb.

use std::num::NonZeroU16;

use super::bucket::Bucket;
use super::classes::Classes;
use super::connection::{NEW, OLD};
use super::list::{Linked, Links, List};
use super::{CLASSES, Policy};
use crate::time::Time;

/// Lists of tenants: those within their guaranteed rate, and all that may send.
pub(super) const GUARANTEED: usize = 0;
pub(super) const SHARING: usize = 1;

/// Entitlement of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entitlement {
    /// Part of what guaranteed rates leave, in proportion to the weights of the other tenants that wait.
    pub weight: NonZeroU16,
    /// Rate, in bits per second, that the tenant gets before tenants that exceed theirs; 0 for none. When the guaranteed rates exceed what
    /// the device sends, they share it by weight.
    pub rate_bps: u64,
    /// Rate, in bits per second, that the tenant never exceeds, even if nobody else sends; at least the guaranteed rate. In any interval
    /// it may send what the rate allows, and once a burst (100 us at that rate, at least 128 KiB) and a piece.
    pub ceiling_bps: Option<u64>,
    /// Service of the tenant's classes.
    pub classes: [Policy; CLASSES],
}

impl Default for Entitlement {
    fn default() -> Entitlement {
        Entitlement {
            weight: NonZeroU16::MIN,
            rate_bps: 0,
            ceiling_bps: None,
            classes: [Policy::default(); CLASSES],
        }
    }
}

/// Groups of a class that may send.
#[derive(Debug, Default)]
pub(super) struct Band {
    pub(super) new: List<NEW>,
    pub(super) old: List<OLD>,
    /// Connections that wait in groups that may send.
    pub(super) waiting: u32,
}

/// State of a tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) weight: NonZeroU16,
    links: [Links; 2],
    /// Set for each list of tenants that has it.
    pub(super) listed: [bool; 2],
    /// Bytes that a turn adds.
    pub(super) quantum: i64,
    /// Bytes that it may send in this turn, for each list of tenants; negative when its last piece exceeded them.
    pub(super) credit: [i64; 2],
    pub(super) rate: Option<Bucket>,
    pub(super) ceiling: Option<Bucket>,
    /// For each list, the time at which it is to be checked whether the tenant comes into it; the queue of timers has an entry for it. It
    /// may be too early.
    pub(super) timers: [Option<Time>; 2],
    pub(super) groups: u32,
    pub(super) classes: Classes,
    pub(super) bands: [Band; CLASSES],
}

impl Linked for Tenant {
    fn links(&mut self, list: usize) -> &mut Links {
        &mut self.links[list]
    }
}

impl Tenant {
    pub(super) fn new(entitlement: &Entitlement, classes: Classes) -> Tenant {
        Tenant {
            weight: entitlement.weight,
            links: Default::default(),
            listed: [false; 2],
            quantum: 0,
            credit: [0; 2],
            rate: (entitlement.rate_bps > 0).then(|| Bucket::new(entitlement.rate_bps)),
            ceiling: entitlement.ceiling_bps.map(Bucket::new),
            timers: [None; 2],
            groups: 0,
            classes,
            bands: Default::default(),
        }
    }

    /// Changes what the tenant is entitled to, except for `entitlement.classes`.
    pub(super) fn set(&mut self, now: Time, entitlement: &Entitlement) {
        let change = |bucket: &mut Option<Bucket>, rate_bps: Option<u64>| match (bucket.as_mut(), rate_bps) {
            (Some(bucket), Some(rate_bps)) => bucket.set_rate(now, rate_bps),
            (_, rate_bps) => *bucket = rate_bps.map(Bucket::new),
        };
        self.weight = entitlement.weight;
        change(
            &mut self.rate,
            Some(entitlement.rate_bps).filter(|rate| *rate > 0),
        );
        change(&mut self.ceiling, entitlement.ceiling_bps);
    }

    /// Returns whether the tenant may send in this turn of `list`. If not, it gets the bytes of its next turn.
    pub(super) fn has_credit(&mut self, list: usize) -> bool {
        let credit = &mut self.credit[list];
        if *credit > 0 {
            return true;
        }
        *credit += self.quantum;
        false
    }
}

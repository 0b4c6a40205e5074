//! The lease table: it decides who may do what with which bytes, and when that right ends. No I/O and no clock: `now` counts
//! from any fixed moment.
//!
//! A *lease* says what its owner does with a range (access) and what others may do there meanwhile (share). Two leases of
//! different owners conflict if their ranges overlap and either owner does what the other does not share: the rule of SMB's
//! share modes. An owner's own leases never conflict.
//!
//! Every access to bytes needs a lease: a mapping for as long as it lives, an ordinary read or write for as long as it runs, a
//! local change of a file for as long as the file is open. A request for a conflicting lease waits. A conflicting mapping is
//! *broken*: its holder is notified ([`Effect::Notify`]) and has until the deadline to release it; then it is revoked
//! ([`Effect::Revoke`]). A conflicting operation is not broken: the request waits for its end. Requests for one range are granted
//! in the order in which they came, so that nobody waits for ever; a lease may be broken for the next request as soon as it is
//! granted.
//!
//! The driver invalidates a mapping's keys *before* it tells the table that the lease is gone: the keys are invalid already
//! when it calls [`Leases::release`] or [`Leases::owner_ended`], and it carries out [`Effect::Revoke`] before it answers with
//! [`Leases::release`]. So no write through a mapping follows the grant for which the mapping was broken.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use rdmux_wire::push::{Access, Conflict};

use super::id::{ClientId, OperationId, Owner, RegionId};

/// Identifies a lease from its request on. Ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u64);

/// The terms of a lease, as its request asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The owner: a connection, or a local operation.
    pub owner: Owner,
    /// Number of the region.
    pub region: RegionId,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Access that the owner wants.
    pub access: Access,
    /// Access that others may have there meanwhile.
    pub share: Access,
}

impl Claim {
    /// Returns whether the two claims cannot be held at the same time.
    pub fn conflicts(&self, other: &Claim) -> bool {
        let shared = other.share.contains(self.access) && self.share.contains(other.access);
        self.owner != other.owner && self.overlaps(other) && !shared
    }

    fn overlaps(&self, other: &Claim) -> bool {
        self.region == other.region
            && self.offset < other.offset.saturating_add(other.length)
            && other.offset < self.offset.saturating_add(self.length)
    }
}

/// Treatment of a lease when somebody else needs its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The lease is broken: its holder is notified, and has a limited time to release it.
    Mapping,
    /// The others wait for the lease: it ends by itself, soon.
    Operation,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The lease is held.
    Granted,
    /// The request waits; [`Effect::Granted`] follows.
    Waiting,
    /// This claim conflicts, and is held or was requested earlier.
    Refused(Claim),
}

/// Work for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Notify the holder that its lease is being broken, and of its deadline.
    Notify {
        /// The lease.
        lease: LeaseId,
        /// Its holder.
        owner: Owner,
        /// The deadline.
        until: Duration,
    },
    /// Make the mapping's keys invalid, then call [`Leases::release`], and tell the holder.
    Revoke {
        /// The lease.
        lease: LeaseId,
        /// Its holder.
        owner: Owner,
    },
    /// A request that waited is granted.
    Granted {
        /// The lease.
        lease: LeaseId,
        /// Its holder.
        owner: Owner,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaseState {
    Held,
    Breaking { until: Duration },
    Revoking,
}

#[derive(Debug)]
struct RegionLease {
    claim: Claim,
    kind: Kind,
    state: LeaseState,
}

/// Leases that are held, in an order in which the leases of other owners in a region are quick to find: one owner may have
/// thousands.
#[derive(Debug, Default)]
struct Held {
    leases: BTreeMap<(RegionId, Owner, LeaseId), RegionLease>,
    /// Region and owner of each lease.
    by_id: HashMap<LeaseId, (RegionId, Owner)>,
}

impl Held {
    fn insert(&mut self, id: LeaseId, lease: RegionLease) {
        let Claim { region, owner, .. } = lease.claim;
        self.by_id.insert(id, (region, owner));
        self.leases.insert((region, owner, id), lease);
    }

    fn get(&self, id: LeaseId) -> Option<&RegionLease> {
        let (region, owner) = *self.by_id.get(&id)?;
        self.leases.get(&(region, owner, id))
    }

    fn get_mut(&mut self, id: LeaseId) -> Option<&mut RegionLease> {
        let (region, owner) = *self.by_id.get(&id)?;
        self.leases.get_mut(&(region, owner, id))
    }

    fn remove(&mut self, id: LeaseId) -> Option<RegionLease> {
        let (region, owner) = self.by_id.remove(&id)?;
        self.leases.remove(&(region, owner, id))
    }

    /// Returns the leases that conflict with a claim.
    fn against(&self, claim: &Claim) -> impl Iterator<Item = (LeaseId, &RegionLease)> {
        let Claim { region, owner, .. } = *claim;
        let first = (region, Owner::Client(ClientId(0)), LeaseId(0));
        let last = (region, Owner::Local(OperationId(u64::MAX)), LeaseId(u64::MAX));
        let before = self.leases.range(first..(region, owner, LeaseId(0)));
        let behind = self.leases.range((region, owner, LeaseId(u64::MAX))..=last);
        before
            .chain(behind)
            .map(|((.., id), lease)| (*id, lease))
            .filter(|(_, lease)| claim.conflicts(&lease.claim))
    }
}

#[derive(Debug)]
struct Waiting {
    id: LeaseId,
    claim: Claim,
    kind: Kind,
}

impl Waiting {
    /// Returns whether an earlier request must be served first: an owner's operations on the same bytes keep their order too.
    fn comes_after(&self, earlier: &Waiting) -> bool {
        let operations = self.kind == Kind::Operation && earlier.kind == Kind::Operation;
        let same_owner = self.claim.owner == earlier.claim.owner;
        self.claim.conflicts(&earlier.claim)
            || operations && same_owner && self.claim.overlaps(&earlier.claim)
    }
}

/// The table. After every call but [`Leases::next_timeout`], the driver must carry out all effects that [`Leases::poll`]
/// returns.
#[derive(Debug)]
pub struct Leases {
    break_timeout: Duration,
    held: Held,
    /// Leases that are being broken, by deadline.
    breaking: BTreeSet<(Duration, LeaseId)>,
    /// Requests that wait, in the order in which they came.
    waiting: VecDeque<Waiting>,
    effects: VecDeque<Effect>,
    last_id: u64,
}

impl Leases {
    /// Creates a table that gives holders `break_timeout` to release a lease.
    pub fn new(break_timeout: Duration) -> Leases {
        Leases {
            break_timeout,
            held: Held::default(),
            breaking: BTreeSet::new(),
            waiting: VecDeque::new(),
            effects: VecDeque::new(),
            last_id: 0,
        }
    }

    /// Forgets all leases and requests; their numbers are not used again.
    pub fn clear(&mut self) {
        *self = Leases {
            last_id: self.last_id,
            ..Leases::new(self.break_timeout)
        };
    }

    /// Asks for a lease.
    pub fn request(
        &mut self,
        now: Duration,
        claim: Claim,
        kind: Kind,
        conflict: Conflict,
    ) -> (LeaseId, Answer) {
        self.last_id += 1;
        let id = LeaseId(self.last_id);
        let earlier = self.waiting.iter().map(|waiting| &waiting.claim);
        let held = self.held.against(&claim).map(|(_, lease)| &lease.claim);
        let against = held.chain(earlier).find(|other| claim.conflicts(other)).cloned();
        let request = Waiting { id, claim, kind };
        let answer = match against {
            Some(other) if conflict == Conflict::Fail => Answer::Refused(other),
            None if !self.waiting.iter().any(|earlier| request.comes_after(earlier)) => {
                self.hold(id, request.claim, kind);
                Answer::Granted
            }
            _ => {
                let against: Vec<_> = self.held.against(&request.claim).map(|(id, _)| id).collect();
                for id in against {
                    self.begin_break(now, id);
                }
                self.waiting.push_back(request);
                Answer::Waiting
            }
        };
        (id, answer)
    }

    /// Ends a lease, or cancels a request: the holder released it, the operation is done, or the driver carried out
    /// [`Effect::Revoke`]. A lease that has already gone does no harm.
    pub fn release(&mut self, now: Duration, id: LeaseId) {
        if !self.forget(id) {
            self.waiting.retain(|waiting| waiting.id != id);
        }
        self.settle(now);
    }

    /// Ends all mappings and cancels all requests of an owner. Its running operations continue until each is released.
    pub fn owner_ended(&mut self, now: Duration, owner: Owner) {
        let over = |lease: &RegionLease| lease.claim.owner == owner && lease.kind == Kind::Mapping;
        let ids: Vec<_> = self
            .held
            .leases
            .iter()
            .filter(|(_, lease)| over(lease))
            .map(|((.., id), _)| *id)
            .collect();
        for id in ids {
            self.forget(id);
        }
        self.waiting.retain(|waiting| waiting.claim.owner != owner);
        // The caller of `poll` releases an operation that was granted but not begun: its owner is no longer there to begin it.
        let granted = |effect: &Effect| matches!(effect, Effect::Granted { lease, .. } if self.held.by_id.contains_key(lease));
        self.effects
            .retain(|effect| effect.owner() != owner || granted(effect));
        self.settle(now);
    }

    /// Revokes the leases whose deadline has passed.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some((until, id)) = self.breaking.first().copied()
            && until <= now
        {
            self.breaking.pop_first();
            if let Some(lease) = self.held.get_mut(id) {
                lease.state = LeaseState::Revoking;
                self.effects.push_back(Effect::Revoke {
                    lease: id,
                    owner: lease.claim.owner,
                });
            }
        }
    }

    /// Returns the deadline of a lease that is being broken.
    pub fn deadline(&self, id: LeaseId) -> Option<Duration> {
        match self.held.get(id)?.state {
            LeaseState::Breaking { until } => Some(until),
            LeaseState::Held | LeaseState::Revoking => None,
        }
    }

    /// Returns when [`Leases::handle_timeout`] has something to do.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.breaking.first().map(|(until, _)| *until)
    }

    /// Returns the next effect for the driver.
    pub fn poll(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Returns whether a lease is held; a lease that is being broken is still held.
    pub fn is_held(&self, id: LeaseId) -> bool {
        self.held.by_id.contains_key(&id)
    }

    /// Returns the number of leases that are held.
    pub fn len(&self) -> usize {
        self.held.by_id.len()
    }

    /// Returns whether no lease is held.
    pub fn is_empty(&self) -> bool {
        self.held.by_id.is_empty()
    }

    fn hold(&mut self, id: LeaseId, claim: Claim, kind: Kind) {
        let state = LeaseState::Held;
        self.held.insert(id, RegionLease { claim, kind, state });
    }

    /// Removes a lease; returns whether it was held.
    fn forget(&mut self, id: LeaseId) -> bool {
        let lease = self.held.remove(id);
        if let Some(LeaseState::Breaking { until }) = lease.as_ref().map(|lease| lease.state) {
            self.breaking.remove(&(until, id));
        }
        lease.is_some()
    }

    /// Grants the requests that can be granted. Leases that block the others have been breaking since those came, or were just
    /// granted.
    fn settle(&mut self, now: Duration) {
        let mut at = 0;
        while at < self.waiting.len() {
            let request = &self.waiting[at];
            let mut earlier = self.waiting.range(..at);
            let free = !earlier.any(|earlier| request.comes_after(earlier))
                && self.held.against(&request.claim).next().is_none();
            if !free {
                at += 1;
                continue;
            }
            let Some(Waiting { id, claim, kind }) = self.waiting.remove(at) else {
                return;
            };
            let wanted = self.waiting.iter().any(|waiting| waiting.claim.conflicts(&claim));
            let owner = claim.owner;
            self.hold(id, claim, kind);
            self.effects.push_back(Effect::Granted { lease: id, owner });
            if wanted {
                self.begin_break(now, id);
            }
        }
    }

    fn begin_break(&mut self, now: Duration, id: LeaseId) {
        let Some(lease) = self.held.get_mut(id) else {
            return;
        };
        if lease.state != LeaseState::Held || lease.kind != Kind::Mapping {
            return;
        }
        let until = now + self.break_timeout;
        lease.state = LeaseState::Breaking { until };
        let owner = lease.claim.owner;
        self.breaking.insert((until, id));
        self.effects.push_back(Effect::Notify {
            lease: id,
            owner,
            until,
        });
    }
}

impl Effect {
    fn owner(&self) -> Owner {
        match self {
            Effect::Notify { owner, .. } | Effect::Revoke { owner, .. } | Effect::Granted { owner, .. } => {
                *owner
            }
        }
    }
}

#[cfg(test)]
mod tests;

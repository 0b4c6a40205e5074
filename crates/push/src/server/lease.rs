//! The lease table: who may do what with which bytes, and how that is taken back. No I/O and no clock: `now` counts from any
//! moment.
//!
//! A *lease* says what its owner does with a range (access) and what others may do there meanwhile (share). Two leases of
//! different owners conflict when their ranges overlap and either does what the other does not share: the rule of SMB's
//! share modes. An owner's own leases never conflict.
//!
//! Everything that touches bytes has a lease: a mapping for as long as it lives, an ordinary read or write for as long as it
//! runs, a local change of a file for as long as the file is open. Whoever asks for one that conflicts waits. A mapping in the
//! way is *broken*: its holder is told ([`Effect::Notify`]) and has until the deadline to let go; then it is revoked
//! ([`Effect::Revoke`]). An operation in the way is waited for. Waiters of one range are served in the order in which they
//! asked, so that nobody waits for ever; who is served may be broken at once for the next.
//!
//! The driver makes a mapping's keys invalid *before* it tells the table that the lease is gone: [`Leases::release`] and
//! [`Leases::owner_ended`] are called with keys that are dead already, and [`Effect::Revoke`] is carried out before
//! [`Leases::release`] answers it. Then no write through a mapping follows the grant to the one that it was broken for.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use rdmux_wire::push::{Access, Conflict};

/// Names a lease, from the request for it on. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u64);

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Who asks: a connection, or a local operation.
    pub owner: u64,
    /// Number of the region.
    pub region: usize,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What for.
    pub access: Access,
    /// What others may do there meanwhile.
    pub share: Access,
}

impl Claim {
    /// Whether the two cannot be held at a time.
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

/// How a lease ends when somebody else needs its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is broken: the holder is told, and has so long to let go.
    Mapping,
    /// It is waited for: it ends by itself, soon.
    Operation,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is held.
    Granted,
    /// [`Effect::Granted`] will come.
    Waiting,
    /// This one stands against it, or asked earlier.
    Refused(Claim),
}

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Tell the holder that its lease is being broken and that it has until then.
    Notify {
        /// The lease.
        lease: LeaseId,
        /// Its holder.
        owner: u64,
        /// The deadline.
        until: Duration,
    },
    /// Make the mapping's keys invalid, then call [`Leases::release`], and tell the holder.
    Revoke {
        /// The lease.
        lease: LeaseId,
        /// Its holder.
        owner: u64,
    },
    /// A request that waited is held now.
    Granted {
        /// The lease.
        lease: LeaseId,
        /// Its holder.
        owner: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Held,
    Breaking { until: Duration },
    Revoking,
}

#[derive(Debug)]
struct Lease {
    claim: Claim,
    kind: Kind,
    state: State,
}

/// What is held, in an order that makes the leases of others in a region quick to find: one owner may have thousands.
#[derive(Debug, Default)]
struct Held {
    leases: BTreeMap<(usize, u64, LeaseId), Lease>,
    /// Region and owner.
    by_id: HashMap<LeaseId, (usize, u64)>,
}

impl Held {
    fn insert(&mut self, id: LeaseId, lease: Lease) {
        let Claim { region, owner, .. } = lease.claim;
        self.by_id.insert(id, (region, owner));
        self.leases.insert((region, owner, id), lease);
    }

    fn get_mut(&mut self, id: LeaseId) -> Option<&mut Lease> {
        let (region, owner) = *self.by_id.get(&id)?;
        self.leases.get_mut(&(region, owner, id))
    }

    fn remove(&mut self, id: LeaseId) -> Option<Lease> {
        let (region, owner) = self.by_id.remove(&id)?;
        self.leases.remove(&(region, owner, id))
    }

    /// Those that a claim cannot be held beside.
    fn against(&self, claim: &Claim) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let Claim { region, owner, .. } = *claim;
        let before = self
            .leases
            .range((region, 0, LeaseId(0))..(region, owner, LeaseId(0)));
        let behind = self
            .leases
            .range((region, owner, LeaseId(u64::MAX))..(region + 1, 0, LeaseId(0)));
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
    /// Whether one that asked earlier must be served first: an owner's operations on the same bytes keep their order too.
    fn comes_after(&self, earlier: &Waiting) -> bool {
        let operations = self.kind == Kind::Operation && earlier.kind == Kind::Operation;
        let same_owner = self.claim.owner == earlier.claim.owner;
        self.claim.conflicts(&earlier.claim)
            || operations && same_owner && self.claim.overlaps(&earlier.claim)
    }
}

/// The table. After every call but [`Leases::next_timeout`], carry out what [`Leases::poll`] gives until it gives nothing.
#[derive(Debug)]
pub struct Leases {
    break_timeout: Duration,
    held: Held,
    /// Leases that are being broken, by deadline.
    breaking: BTreeSet<(Duration, LeaseId)>,
    /// In the order in which they asked.
    waiting: VecDeque<Waiting>,
    effects: VecDeque<Effect>,
    last_id: u64,
}

impl Leases {
    /// A table whose holders have so long to let go.
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

    /// Forgets all leases and requests, whose numbers are not used again.
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

    /// A lease is over, or a request is taken back: the holder let go, the operation is done, or [`Effect::Revoke`] was carried
    /// out. One that is not there any more does no harm.
    pub fn release(&mut self, now: Duration, id: LeaseId) {
        if !self.forget(id) {
            self.waiting.retain(|waiting| waiting.id != id);
        }
        self.settle(now);
    }

    /// All mappings and requests of an owner are over. Its operations that run go on, until each is released.
    pub fn owner_ended(&mut self, now: Duration, owner: u64) {
        let over = |lease: &Lease| lease.claim.owner == owner && lease.kind == Kind::Mapping;
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
        // An operation that was granted and not begun is released by who polls: it has nobody to begin it any more.
        let granted = |effect: &Effect| matches!(effect, Effect::Granted { lease, .. } if self.held.by_id.contains_key(lease));
        self.effects
            .retain(|effect| effect.owner() != owner || granted(effect));
        self.settle(now);
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some((until, id)) = self.breaking.first().copied()
            && until <= now
        {
            self.breaking.pop_first();
            if let Some(lease) = self.held.get_mut(id) {
                lease.state = State::Revoking;
                self.effects.push_back(Effect::Revoke {
                    lease: id,
                    owner: lease.claim.owner,
                });
            }
        }
    }

    /// When [`Leases::handle_timeout`] has something to do.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.breaking.first().map(|(until, _)| *until)
    }

    /// What is to be done next.
    pub fn poll(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Whether a lease is held. One that is being broken is.
    pub fn is_held(&self, id: LeaseId) -> bool {
        self.held.by_id.contains_key(&id)
    }

    /// Leases that are held.
    pub fn len(&self) -> usize {
        self.held.by_id.len()
    }

    /// Whether nobody holds any.
    pub fn is_empty(&self) -> bool {
        self.held.by_id.is_empty()
    }

    fn hold(&mut self, id: LeaseId, claim: Claim, kind: Kind) {
        let state = State::Held;
        self.held.insert(id, Lease { claim, kind, state });
    }

    /// Whether it was held.
    fn forget(&mut self, id: LeaseId) -> bool {
        let lease = self.held.remove(id);
        if let Some(State::Breaking { until }) = lease.as_ref().map(|lease| lease.state) {
            self.breaking.remove(&(until, id));
        }
        lease.is_some()
    }

    /// Grants what can be granted. What stands against the rest is being broken since they asked, or is the one just granted.
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
        if lease.state != State::Held || lease.kind != Kind::Mapping {
            return;
        }
        let until = now + self.break_timeout;
        lease.state = State::Breaking { until };
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
    fn owner(&self) -> u64 {
        match self {
            Effect::Notify { owner, .. } | Effect::Revoke { owner, .. } | Effect::Granted { owner, .. } => {
                *owner
            }
        }
    }
}

#[cfg(test)]
mod tests;

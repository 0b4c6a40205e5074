//! The scheduler of a device that several tenants share: tenants, in each eight classes, in each class connections.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::bucket::Bucket;
use super::classes::Classes;
use super::connection::{Connection, Group, NEW, OLD, Slot};
use super::list::{Key, List, Slab};
use super::tenant::{Entitlement, GUARANTEED, SHARING, Tenant};
use super::{CLASSES, Policy};
use crate::time::Time;

/// Sizes of a hierarchy. The defaults suit a link of 100 Gbit/s; `crates/sim/tests/sharing.txt` shows what they give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quanta {
    /// Bytes of a turn of a connection, of a class and of a tenant with the lowest weight.
    pub quantum_bytes: u32,
    /// Bytes that a connection which begins to send may send before others, and pays back; 0 switches that off. A short message should fit:
    /// it would otherwise wait for a turn of everybody. A connection may be ahead of its share by twice as much.
    pub sparse_bytes: u32,
    /// Longest piece that is sent at once.
    pub piece_bytes_max: u32,
    /// Percent of a tenant's bytes that a strict class may take while the tenant's lower classes wait, 1 to 100.
    pub strict_percent: u8,
}

impl Default for Quanta {
    fn default() -> Quanta {
        Quanta {
            quantum_bytes: 16 << 10,
            sparse_bytes: 64 << 10,
            piece_bytes_max: 64 << 10,
            strict_percent: 90,
        }
    }
}

/// Names a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TenantId(Key);

/// Names a group of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub(super) Key);

/// Names a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub(super) Key);

/// The turn of a connection: it may begin pieces until it has sent `bytes`; the last piece may exceed them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "every turn ends with `Hierarchy::end`"]
pub struct Turn<Id> {
    /// The caller's name of the connection.
    pub id: Id,
    /// The connection.
    pub connection: ConnectionId,
    /// Bytes within which it may begin pieces.
    pub bytes: u32,
    /// When another connection that may have little to send last began, if this one sends much: for [`piece_bytes`](super::piece_bytes).
    pub sparse_seen: Option<Time>,
    tenant: u32,
    list: usize,
    class: usize,
}

/// The scheduler of a device that several tenants share.
///
/// The caller adds tenants, groups (the shared QPs of a tenant and class) and connections, each with a queue of the caller's. It calls
/// [`wake`](Hierarchy::wake) when a connection has something to send and may send it, [`pick`](Hierarchy::pick) when the device takes more,
/// and then [`end`](Hierarchy::end) with what the connection has sent; best after every piece, so that whatever has begun to wait meanwhile
/// comes first. A connection that lacks credits of its receiver [rests](Hierarchy::rest) until it has them, and so does one that finds no
/// [slot](Hierarchy::take_slot) for a READ. A group whose window is full [is shut](Hierarchy::set_open).
///
/// Each call takes constant time, apart from turns that are skipped because an earlier one was exceeded, and allocates nothing once there
/// have been as many tenants, groups and connections before. Names of what was removed are ignored.
#[derive(Debug)]
pub struct Hierarchy<Id> {
    quanta: Quanta,
    tenants: Slab<Tenant>,
    pub(super) groups: Slab<Group>,
    pub(super) connections: Slab<Connection<Id>>,
    /// Tenants that wait within their guaranteed rate.
    guaranteed: List<GUARANTEED>,
    /// All tenants that wait and are below their ceiling.
    sharing: List<SHARING>,
    /// For each list, when tenants may come into it by themselves. Entries other than those in `Tenant::timers` are obsolete.
    timers: [BinaryHeap<Reverse<(Time, u32)>>; 2],
    /// When a connection last began to send as a new one, and when another one did.
    sparse: [Option<(Time, u32)>; 2],
    /// Bytes that all tenants together may send.
    rate: Option<Bucket>,
}

impl<Id: Copy> Hierarchy<Id> {
    /// Returns a hierarchy without tenants.
    ///
    /// # Panics
    /// When a quantum is 0 or a percentage is not in 1 to 100.
    pub fn new(quanta: Quanta) -> Hierarchy<Id> {
        assert!(quanta.quantum_bytes > 0 && (1..=100).contains(&quanta.strict_percent));
        Hierarchy {
            quanta,
            tenants: Slab::default(),
            groups: Slab::default(),
            connections: Slab::default(),
            guaranteed: List::default(),
            sharing: List::default(),
            timers: Default::default(),
            sparse: [None; 2],
            rate: None,
        }
    }

    /// Sets the rate, in bits per second, that all tenants together do not exceed; `None`: there is none. Only where the device's or the
    /// link's rate is what they wait for do they share it as they are entitled to. A burst is as that of a tenant's ceiling.
    pub fn set_rate(&mut self, now: Time, rate_bps: Option<u64>) {
        match (&mut self.rate, rate_bps) {
            (Some(bucket), Some(rate_bps)) => bucket.set_rate(now, rate_bps),
            (rate, rate_bps) => *rate = rate_bps.map(Bucket::new),
        }
    }

    /// Adds a tenant.
    pub fn add_tenant(&mut self, entitlement: &Entitlement) -> TenantId {
        let classes = self.classes(entitlement.classes);
        let key = self.tenants.insert(Tenant::new(entitlement, classes));
        self.set_quanta();
        TenantId(key)
    }

    /// Changes what a tenant is entitled to, also while it sends. What it has sent too much or may still send remains.
    pub fn set_tenant(&mut self, now: Time, tenant: TenantId, entitlement: &Entitlement) {
        if self.tenants.get(tenant.0).is_none() {
            return;
        }
        let mut classes = self.classes(entitlement.classes);
        let at = tenant.0.index;
        let state = &mut self.tenants[at];
        state.set(now, entitlement);
        for class in (0..CLASSES).filter(|class| state.bands[*class].waiting > 0) {
            classes.wait(class);
        }
        state.classes = classes;
        self.set_quanta();
        self.refresh(now, at);
    }

    /// Returns whether a tenant has a group.
    pub fn has_groups(&self, tenant: TenantId) -> bool {
        self.tenants.get(tenant.0).is_some_and(|tenant| tenant.groups > 0)
    }

    /// Returns how many connections of a tenant wait in groups that may send.
    pub fn waiting(&self, tenant: TenantId) -> u32 {
        let bands = self.tenants.get(tenant.0).map(|tenant| &tenant.bands);
        bands.into_iter().flatten().map(|band| band.waiting).sum()
    }

    /// Removes a tenant, all of whose groups have been removed.
    ///
    /// # Panics
    /// When the tenant has a group.
    pub fn remove_tenant(&mut self, tenant: TenantId) {
        if let Some(removed) = self.tenants.get(tenant.0) {
            assert_eq!(removed.groups, 0, "the tenant has groups");
            self.set_listed(tenant.0.index, [false; 2]);
            self.tenants.remove(tenant.0);
            self.set_quanta();
        }
    }

    /// Adds a group, which may send. `class` is below [`CLASSES`]. Returns `None` if there is no such tenant.
    pub fn add_group(&mut self, tenant: TenantId, class: usize) -> Option<GroupId> {
        assert!(class < CLASSES);
        self.tenants.get(tenant.0)?;
        self.tenants[tenant.0.index].groups += 1;
        Some(GroupId(self.groups.insert(Group::new(tenant.0.index, class))))
    }

    /// Removes a group, all of whose connections have been removed.
    ///
    /// # Panics
    /// When the group has a connection.
    pub fn remove_group(&mut self, group: GroupId) {
        if let Some(removed) = self.groups.get(group.0) {
            assert_eq!(removed.connections, 0, "the group has connections");
            self.tenants[removed.tenant].groups -= 1;
            self.set_group_listed(group.0.index);
            self.groups.remove(group.0);
        }
    }

    /// Adds a connection, which does not wait. Returns `None` if there is no such group.
    pub fn add_connection(&mut self, group: GroupId, id: Id) -> Option<ConnectionId> {
        self.groups.get(group.0)?;
        self.groups[group.0.index].connections += 1;
        Some(ConnectionId(
            self.connections.insert(Connection::new(id, group.0.index)),
        ))
    }

    /// Removes a connection, whether it waits or not.
    pub fn remove_connection(&mut self, now: Time, connection: ConnectionId) {
        self.drop_slot(now, connection);
        self.rest(now, connection);
        if let Some(removed) = self.connections.get(connection.0) {
            let at = removed.group;
            let group = &mut self.groups[at];
            group.remove(&mut self.connections, connection.0.index);
            group.connections -= 1;
            self.connections.remove(connection.0);
            self.set_group_listed(at);
        }
    }

    /// Has a connection wait: it has something to send, and may send it as far as it is concerned. Does nothing if it waits, or lacks a slot
    /// for a READ.
    pub fn wake(&mut self, now: Time, connection: ConnectionId) {
        let at = connection.0.index;
        let may_wait = |one: &&Connection<Id>| !one.waiting && one.slot != Slot::Lacking;
        let Some(woken) = self.connections.get(connection.0).filter(may_wait) else {
            return;
        };
        let group_at = woken.group;
        let group = &mut self.groups[group_at];
        if group.wake(&mut self.connections, at, &self.quanta) {
            let last = self.sparse[0].filter(|(_, last)| *last != at);
            self.sparse = [Some((now, at)), last.or(self.sparse[1])];
        }
        if group.open {
            self.add_waiting(now, group_at, 1);
        }
    }

    /// Has a connection wait no more, because it has nothing to send, or lacks what it needs to send. It keeps no credit. Does nothing if
    /// it does not wait.
    pub fn rest(&mut self, now: Time, connection: ConnectionId) {
        let at = connection.0.index;
        let Some(resting) = self.connections.get(connection.0).filter(|one| one.waiting) else {
            return;
        };
        let group_at = resting.group;
        let group = &mut self.groups[group_at];
        group.rest(&mut self.connections, at, &self.quanta);
        if group.open {
            self.remove_waiting(now, group_at, 1);
        }
    }

    /// Sets whether the connections of a group may send. Those of a group that is opened again go on with the turn in which it was shut.
    pub fn set_open(&mut self, now: Time, group: GroupId, open: bool) {
        let at = group.0.index;
        let Some(changed) = self.groups.get(group.0).filter(|group| group.open != open) else {
            return;
        };
        let waiting = changed.waiting;
        self.groups[at].open = open;
        if open {
            self.add_waiting(now, at, waiting);
        } else {
            self.remove_waiting(now, at, waiting);
        }
    }

    /// Returns when a connection last began to send as one that may have little to send, for [`piece_bytes`](super::piece_bytes).
    pub fn sparse_seen(&self) -> Option<Time> {
        self.sparse[0].map(|(seen, _)| seen)
    }

    fn sparse_beside(&self, at: u32) -> Option<Time> {
        // It sends its advance before others anyway, in pieces of any length.
        if !self.connections[at].is_bulk(&self.quanta) {
            return None;
        }
        let other = |(seen, by): (Time, u32)| (by != at).then_some(seen);
        self.sparse.into_iter().flatten().find_map(other)
    }

    /// Returns the connection that sends next. Its turn ends before the next one is picked.
    pub fn pick(&mut self, now: Time) -> Option<Turn<Id>> {
        if self.rate.as_ref().is_some_and(|rate| !rate.is_open(now)) {
            return None;
        }
        self.fire_timers(now);
        let (tenant, list) = self.pick_tenant()?;
        let state = &mut self.tenants[tenant];
        let (class, class_bytes) = state.classes.pick()?;
        let bytes = state.credit[list].min(class_bytes);
        let at = self.pick_connection(tenant, class)?;
        let connection = &self.connections[at];
        Some(Turn {
            id: connection.id,
            connection: ConnectionId(self.connections.key(at)),
            bytes: bytes.min(connection.bytes()) as u32,
            sparse_seen: self.sparse_beside(at),
            tenant,
            list,
            class,
        })
    }

    /// Ends a turn: the connection has sent `sent` bytes, and has `more` to send or not. One that has more but sent nothing waits for its
    /// next turn; it should rather [rest](Hierarchy::rest).
    pub fn end(&mut self, now: Time, turn: Turn<Id>, sent: u32, more: bool) {
        if let Some(rate) = &mut self.rate {
            rate.charge(now, sent.into());
        }
        if let Some(tenant) = self.tenants.at_mut(turn.tenant) {
            tenant.credit[turn.list] -= i64::from(sent);
            if turn.list == GUARANTEED
                && let Some(rate) = &mut tenant.rate
            {
                rate.charge(now, sent.into());
            }
            if let Some(ceiling) = &mut tenant.ceiling {
                ceiling.charge(now, sent.into());
            }
            tenant.classes.charge(turn.class, sent.into());
        }
        let (key, at) = (turn.connection.0, turn.connection.0.index);
        if let Some(connection) = self.connections.get(key) {
            let (group_at, waited) = (connection.group, connection.waiting);
            let group = &mut self.groups[group_at];
            let new = group.new.head() == Some(at);
            group.charge(&mut self.connections, at, sent.into(), more, &self.quanta);
            let (open, left) = (group.open, new && group.new.head() != Some(at));
            self.set_group_listed(group_at);
            let group = &self.groups[group_at];
            if left && group.listed[NEW] {
                let band = &mut self.tenants[group.tenant].bands[group.class];
                band.new.move_back(&mut self.groups, group_at);
            }
            if waited && !more && open {
                self.remove_waiting(now, group_at, 1);
                return;
            }
        }
        if self.tenants.at_mut(turn.tenant).is_some() {
            self.refresh(now, turn.tenant);
        }
    }

    /// Returns when the device, or a tenant that has reached its ceiling, may send again: when to pick next, if nothing could be picked.
    pub fn next_time(&mut self) -> Option<Time> {
        let device = self.rate.as_ref().map(Bucket::next);
        if device.is_some() && !(self.guaranteed.is_empty() && self.sharing.is_empty()) {
            return device;
        }
        self.next_tenant_time().map(|at| at.max(device.unwrap_or(at)))
    }

    fn next_tenant_time(&mut self) -> Option<Time> {
        while let Some(Reverse((at, tenant_at))) = self.timers[SHARING].peek().copied() {
            if let Some(tenant) = self.tenants.at_mut(tenant_at)
                && tenant.timers[SHARING] == Some(at)
            {
                if tenant.classes.is_waiting() {
                    return Some(at);
                }
                tenant.timers[SHARING] = None;
            }
            self.timers[SHARING].pop();
        }
        None
    }

    fn classes(&self, policies: [Policy; CLASSES]) -> Classes {
        let debt_max = self.quanta.piece_bytes_max.max(self.quanta.quantum_bytes);
        Classes::new(
            policies,
            self.quanta.quantum_bytes,
            debt_max.into(),
            self.quanta.strict_percent,
        )
    }

    /// Computes the quantum of every tenant, after a weight has changed: the lowest weight gets one quantum.
    fn set_quanta(&mut self) {
        let weight = |tenant: &mut Tenant| i64::from(tenant.weight.get());
        let least = self.tenants.iter_mut().map(weight).min().unwrap_or(1);
        for tenant in self.tenants.iter_mut() {
            tenant.quantum = i64::from(self.quanta.quantum_bytes) * weight(tenant) / least;
        }
    }

    /// Returns the tenant that sends next, and the list from which it is.
    fn pick_tenant(&mut self) -> Option<(u32, usize)> {
        while let Some(at) = self.guaranteed.head() {
            if self.tenants[at].has_credit(GUARANTEED) {
                return Some((at, GUARANTEED));
            }
            self.guaranteed.move_back(&mut self.tenants, at);
        }
        while let Some(at) = self.sharing.head() {
            if self.tenants[at].has_credit(SHARING) {
                return Some((at, SHARING));
            }
            self.sharing.move_back(&mut self.tenants, at);
        }
        None
    }

    /// Returns the connection that sends next in a class in which one waits.
    fn pick_connection(&mut self, tenant: u32, class: usize) -> Option<u32> {
        let band = &mut self.tenants[tenant].bands[class];
        if let Some(group) = band.new.head() {
            return self.groups[group].new.head();
        }
        while let Some(at) = band.old.head() {
            let group = &mut self.groups[at];
            if let Some(connection) = group.first_old(&mut self.connections, &self.quanta) {
                return Some(connection);
            }
            group.turns = group.old.len();
            if group.turns == 0 {
                group.listed[OLD] = false;
                band.old.remove(&mut self.groups, at);
            } else {
                band.old.move_back(&mut self.groups, at);
            }
        }
        None
    }

    fn add_waiting(&mut self, now: Time, group_at: u32, connections: u32) {
        self.set_group_listed(group_at);
        let group = &self.groups[group_at];
        let tenant = &mut self.tenants[group.tenant];
        let band = &mut tenant.bands[group.class];
        let began = band.waiting == 0 && connections > 0;
        band.waiting += connections;
        if began {
            tenant.classes.wait(group.class);
            self.refresh(now, self.groups[group_at].tenant);
        }
    }

    fn remove_waiting(&mut self, now: Time, group_at: u32, connections: u32) {
        self.set_group_listed(group_at);
        let group = &self.groups[group_at];
        let (tenant_at, class) = (group.tenant, group.class);
        let tenant = &mut self.tenants[tenant_at];
        let band = &mut tenant.bands[class];
        band.waiting -= connections;
        if band.waiting == 0 {
            // Connections without anything to send are in the lists only for the sake of others that send.
            while let Some(at) = band.old.head() {
                self.groups[at].clear(&mut self.connections);
                self.groups[at].listed[OLD] = false;
                band.old.remove(&mut self.groups, at);
            }
            tenant.classes.rest(class);
        }
        self.refresh(now, tenant_at);
    }

    /// Puts a group into the lists of its class, or takes it out, after its own lists have changed or it was opened or shut.
    fn set_group_listed(&mut self, at: u32) {
        let group = &mut self.groups[at];
        let listed = [
            group.open && !group.new.is_empty(),
            group.open && !group.old.is_empty(),
        ];
        let was = std::mem::replace(&mut group.listed, listed);
        if was == listed {
            return;
        }
        // A group that was shut during its turn goes on with it.
        let resumes = group.turns > 0;
        if group.old.is_empty() || (listed[OLD] && !was[OLD] && !resumes) {
            group.turns = group.old.len();
        }
        let band = &mut self.tenants[group.tenant].bands[group.class];
        match (was[NEW], listed[NEW]) {
            (false, true) => band.new.push_back(&mut self.groups, at),
            (true, false) => band.new.remove(&mut self.groups, at),
            _ => {}
        }
        match (was[OLD], listed[OLD]) {
            (false, true) if resumes => band.old.push_front(&mut self.groups, at),
            (false, true) => band.old.push_back(&mut self.groups, at),
            (true, false) => band.old.remove(&mut self.groups, at),
            _ => {}
        }
    }

    /// Puts a tenant into the lists that fit its state, or takes it out, and sets its timers.
    fn refresh(&mut self, now: Time, at: u32) {
        let tenant = &mut self.tenants[at];
        let waiting = tenant.classes.is_waiting();
        let open = tenant.ceiling.is_none_or(|ceiling| ceiling.is_open(now));
        let within = tenant.rate.is_some_and(|rate| rate.is_open(now));
        let due = [
            tenant.rate.filter(|_| !within).map(|rate| rate.next()),
            tenant.ceiling.filter(|_| !open).map(|ceiling| ceiling.next()),
        ];
        if waiting {
            for (list, due) in due.into_iter().enumerate() {
                if let Some(due) = due
                    && tenant.timers[list].is_none_or(|timer| due < timer)
                {
                    tenant.timers[list] = Some(due);
                    self.timers[list].push(Reverse((due, at)));
                }
            }
        }
        self.set_listed(at, [waiting && open && within, waiting && open]);
    }

    fn set_listed(&mut self, at: u32, listed: [bool; 2]) {
        let tenant = &mut self.tenants[at];
        let was = std::mem::replace(&mut tenant.listed, listed);
        if was == listed {
            return;
        }
        for list in [GUARANTEED, SHARING] {
            if was[list] != listed[list] {
                // A tenant that comes begins with a whole turn, unless it still owes something. One that goes saves up nothing.
                let credit = &mut tenant.credit[list];
                *credit = (*credit).min(0);
                if listed[list] && *credit == 0 {
                    *credit = tenant.quantum;
                }
            }
        }
        match (was[GUARANTEED], listed[GUARANTEED]) {
            (false, true) => self.guaranteed.push_back(&mut self.tenants, at),
            (true, false) => self.guaranteed.remove(&mut self.tenants, at),
            _ => {}
        }
        match (was[SHARING], listed[SHARING]) {
            (false, true) => self.sharing.push_back(&mut self.tenants, at),
            (true, false) => self.sharing.remove(&mut self.tenants, at),
            _ => {}
        }
    }

    #[inline]
    fn fire_timers(&mut self, now: Time) {
        for list in [GUARANTEED, SHARING] {
            while let Some(Reverse((at, tenant_at))) = self.timers[list].peek().copied()
                && at <= now
            {
                self.timers[list].pop();
                if let Some(tenant) = self.tenants.at_mut(tenant_at)
                    && tenant.timers[list] == Some(at)
                {
                    tenant.timers[list] = None;
                    self.refresh(now, tenant_at);
                }
            }
        }
    }
}

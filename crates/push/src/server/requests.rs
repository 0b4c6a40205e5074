//! Clients' requests, and how leases decide on them.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use rdmux_verbs::{Access, Placement};
use rdmux_wire::push::{self, CHANGES_MAX, Change, ChangeKind, Conflict, ErrorCode, Message};

use super::id::{ClientId, MappingId, OperationId, Owner, RegionId};
use super::lease::{Answer, Claim, Effect, Kind, LeaseId};
use super::service::{Driver, Mapping, Registered, ReplySlot, Service};
use super::session::{Action, EndReason, Map, Ordinary};
use super::work::{Failure, Task, Ticket};
use super::{CLOSING_TIMEOUT, ServerEvent};

/// A request that waits for a lease.
#[derive(Debug)]
pub(super) enum Pending {
    Map(Ticket, Map),
    Write(Ticket, Ordinary, Vec<u8>, Placement),
    Read(Ticket, Ordinary),
    /// An operation of the server's own, and the channel that reports that it may begin.
    Local(OperationId, mpsc::Sender<OperationId>),
    /// A program outside of the server that wants the file of the region with this number.
    Outside(RegionId, push::Access),
}

impl Pending {
    fn ticket(&self) -> Option<&Ticket> {
        match self {
            Pending::Map(ticket, _) | Pending::Write(ticket, ..) | Pending::Read(ticket, _) => Some(ticket),
            Pending::Local(..) | Pending::Outside(..) => None,
        }
    }

    pub(super) fn is_of(&self, client: ClientId) -> bool {
        self.ticket().is_some_and(|ticket| ticket.client == client)
    }
}

/// A client that is welcome once no job of its earlier connections runs.
#[derive(Debug)]
pub(super) struct Welcoming {
    id: [u8; 16],
    ticket: Ticket,
    revoked: u32,
}

impl Welcoming {
    pub(super) fn client(&self) -> ClientId {
        self.ticket.client
    }
}

impl<D: Driver> Service<D> {
    /// Handles a client's message. Its slot takes the next message when this one is answered.
    pub fn handle_message(&mut self, now: Duration, key: ClientId, slot: usize, message: &[u8]) {
        self.now = now;
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        if client.closing.is_some() {
            return;
        }
        if self.welcoming.iter().any(|welcoming| welcoming.client() == key) {
            return self.end(
                key,
                EndReason::Protocol("a message before the end of the handshake".into()),
            );
        }
        let (request, action) = client.session.handle(message);
        let ticket = Ticket {
            client: key,
            slot,
            request,
            lease: None,
        };
        match action {
            Action::Send(answer) => self.send(key, slot, request, &answer),
            Action::Welcome { client: id } => self.welcome(ticket, id),
            Action::Map(map) => self.map(ticket, map),
            Action::Unmap(mapping) => {
                self.revoke(key, mapping);
                let Some(client) = self.clients.get_mut(&key) else {
                    return;
                };
                client.mappings.remove(&mapping);
                client.changes.remove(&mapping);
                let event = ServerEvent::Unmapped { client: key, mapping };
                self.events.push(event);
                self.send(key, slot, request, &Message::Unmapped);
            }
            Action::Release(mapping) => {
                if self.revoke(key, mapping) {
                    self.events.push(ServerEvent::Released {
                        client: ticket.client,
                        mapping,
                    });
                }
                self.send(key, slot, request, &Message::Released);
            }
            Action::Flush {
                mapping,
                offset,
                length,
                placement,
            } => {
                let Some(mapping) = client.mappings.get(&mapping) else {
                    // The mapping is being made: nobody knows its number yet.
                    let answer = Message::Error {
                        code: ErrorCode::Protocol,
                        text: format!("no mapping {mapping}"),
                    };
                    return self.send(key, slot, request, &answer);
                };
                let (memory, number) = (mapping.memory.clone(), mapping.number);
                let task = Task::Flush {
                    memory,
                    offset,
                    length,
                    placement,
                };
                self.work(number, ticket, task);
            }
            Action::Write(ordinary, bytes, placement) => {
                let claim = self.claim_of(&ticket, &ordinary, push::Access::WRITE);
                let conflict = ordinary.conflict;
                self.claim(
                    claim,
                    conflict,
                    Pending::Write(ticket, ordinary, bytes, placement),
                );
            }
            Action::Read(ordinary) => {
                let claim = self.claim_of(&ticket, &ordinary, push::Access::READ);
                let conflict = ordinary.conflict;
                self.claim(claim, conflict, Pending::Read(ticket, ordinary));
            }
            Action::Checksum {
                region,
                offset,
                length,
            } => {
                let gone = client.gone.clone();
                let number = self.number_of(&region);
                let task = Task::Checksum {
                    region,
                    offset,
                    length,
                    gone,
                };
                self.work(number, ticket, task);
            }
            Action::Noticed(number) => {
                if client.notice == Some(number) {
                    client.notice = None;
                }
                self.receive_again(key, slot);
                self.notify(key);
            }
            Action::End(None, reason) => self.end(key, reason),
            Action::End(Some(last), reason) => {
                client.closing = Some(reason);
                client.deadline = Some(now + CLOSING_TIMEOUT);
                self.send(key, slot, request, &last);
            }
        }
    }

    fn number_of(&self, region: &Arc<crate::region::Region>) -> RegionId {
        let regions = &self.shared.regions;
        RegionId(regions.iter().position(|r| Arc::ptr_eq(r, region)).unwrap_or(0))
    }

    /// Handles a client that has proved that it has the key. When the client receives its welcome, its earlier mappings are
    /// revoked and its earlier writes are done.
    fn welcome(&mut self, ticket: Ticket, id: [u8; 16]) {
        let Some(client) = self.clients.get_mut(&ticket.client) else {
            return;
        };
        client.deadline = None;
        client.id = id;
        self.events.push(ServerEvent::Connected {
            client: ticket.client,
            peer: client.peer,
        });
        let mut revoked = 0;
        if id != [0; 16] {
            let earlier = self
                .clients
                .iter()
                .filter(|(key, c)| c.id == id && **key != ticket.client);
            let earlier: Vec<_> = earlier.map(|(key, _)| *key).collect();
            for key in earlier {
                let mappings = self.clients.get(&key).map_or(0, |c| c.mappings.len());
                revoked += mappings as u32;
                self.end(key, EndReason::ConnectedAgain);
            }
        }
        self.welcoming.push(Welcoming { id, ticket, revoked });
        self.welcome_all();
    }

    pub(super) fn welcome_all(&mut self) {
        while let Some(at) = self.welcoming.iter().position(|w| self.is_welcome(w)) {
            let Welcoming { ticket, revoked, .. } = self.welcoming.swap_remove(at);
            let Some(client) = self.clients.get(&ticket.client) else {
                continue;
            };
            let answer = client.session.welcome(revoked);
            self.send(ticket.client, ticket.slot, ticket.request, &answer);
        }
    }

    fn is_welcome(&self, welcoming: &Welcoming) -> bool {
        welcoming.id == [0; 16] || !self.runs_for(welcoming.id, welcoming.client())
    }

    fn claim_of(&self, ticket: &Ticket, ordinary: &Ordinary, access: push::Access) -> Claim {
        Claim {
            owner: Owner::Client(ticket.client),
            region: ordinary.number,
            offset: ordinary.offset,
            length: ordinary.length,
            access,
            // The operation ends soon, and keeps out only those that want to be alone.
            share: push::Access::all(),
        }
    }

    fn map(&mut self, ticket: Ticket, map: Map) {
        if map.access.contains(push::Access::WRITE) && map.transfer != 0 {
            self.take_over(ticket.client, &map);
        }
        let claim = Claim {
            owner: Owner::Client(ticket.client),
            region: map.number,
            offset: map.offset,
            length: map.length,
            access: map.access,
            share: map.share,
        };
        // Checks this before any holder is asked to release a lease. The region's file is looked for once the mapping has its lease: it may
        // be replaced while the request waits.
        if let Err(failure) = self.check_outside(&map) {
            return self.fail(Pending::Map(ticket, map), failure);
        }
        let conflict = map.conflict;
        self.claim(claim, conflict, Pending::Map(ticket, map));
    }

    /// Ends another connection that wrote for the same upload: its client died, or must not write any more.
    fn take_over(&mut self, key: ClientId, map: &Map) {
        let same = |mapping: &Mapping| {
            let overlaps =
                mapping.offset < map.offset + map.length && map.offset < mapping.offset + mapping.length;
            mapping.lease.is_some()
                && mapping.number == map.number
                && overlaps
                && mapping.transfer == map.transfer
        };
        let others = self.clients.iter().filter(|(other, _)| **other != key);
        let predecessors = others.filter(|(_, other)| other.mappings.values().any(same));
        for predecessor in predecessors.map(|(key, _)| *key).collect::<Vec<_>>() {
            self.end(predecessor, EndReason::TakenOver);
        }
    }

    /// Requests a lease for `pending`, and continues with it once it has the lease.
    pub(super) fn claim(&mut self, claim: Claim, conflict: Conflict, pending: Pending) {
        let kind = match pending {
            Pending::Map(..) => Kind::Mapping,
            _ => Kind::Operation,
        };
        let (lease, answer) = self.leases.request(self.now, claim, kind, conflict);
        match answer {
            Answer::Granted => self.granted(lease, pending),
            Answer::Waiting => drop(self.pending.insert(lease, pending)),
            Answer::Refused(other) => self.refused(&other, pending),
        }
        self.carry_out();
    }

    fn refused(&mut self, other: &Claim, pending: Pending) {
        let region = self.shared.regions[other.region.0].name();
        let holder = match other.owner {
            Owner::Local(_) => "a program of the server's host".to_owned(),
            Owner::Client(client) => format!("another client (client {client})"),
        };
        let does = if other.access.contains(push::Access::WRITE) {
            "is writing to"
        } else {
            "is reading"
        };
        let text = format!(
            "{holder} {does} this range of region {region}: wait until it ends; the mapping of a dead client ends within {} s",
            f64::from(self.shared.keepalive_ms) / 1e3
        );
        let failure = (ErrorCode::Busy, text);
        self.fail(pending, failure);
    }

    fn fail(&mut self, pending: Pending, (code, text): Failure) {
        let (ticket, answer) = match pending {
            Pending::Local(..) | Pending::Outside(..) => return,
            Pending::Map(ticket, map) => {
                let Some(client) = self.clients.get_mut(&ticket.client) else {
                    return;
                };
                let answer = client.session.mapped(&map, Err((code, text)));
                (ticket, answer)
            }
            Pending::Write(ticket, ..) | Pending::Read(ticket, _) => (ticket, Message::Error { code, text }),
        };
        self.send(ticket.client, ticket.slot, ticket.request, &answer);
    }

    fn granted(&mut self, lease: LeaseId, pending: Pending) {
        match pending {
            Pending::Map(ticket, map) => {
                let task = Task::Locate {
                    region: map.region.clone(),
                    lease,
                };
                let number = map.number;
                // It waits for the job now.
                self.pending.insert(lease, Pending::Map(ticket.clone(), map));
                self.work(number, ticket, task);
            }
            Pending::Write(mut ticket, ordinary, bytes, placement) => {
                ticket.lease = Some(lease);
                let (offset, length) = (ordinary.offset, ordinary.length);
                let task = Task::Write {
                    memory: ordinary.region.open(true, offset, length, 0),
                    offset,
                    bytes,
                    placement,
                    in_place: !self.has_mapping(ticket.client, ordinary.number),
                };
                self.work(ordinary.number, ticket, task);
            }
            Pending::Read(mut ticket, ordinary) => {
                ticket.lease = Some(lease);
                let (offset, length) = (ordinary.offset, ordinary.length);
                let task = Task::Read {
                    memory: ordinary.region.open(false, offset, length, 0),
                    offset,
                    length,
                    in_place: !self.has_mapping(ticket.client, ordinary.number),
                };
                self.work(ordinary.number, ticket, task);
            }
            Pending::Outside(number, access) => {
                self.opened(number, access);
                self.leases.release(self.now, lease);
            }
            Pending::Local(number, reply) => {
                self.locals.insert(number, lease);
                if reply.send(number).is_err() {
                    self.end_local(number);
                }
            }
        }
    }

    /// Returns whether a client has a mapping of a region: its ordinary operations continue on the file that the mapping was made for.
    fn has_mapping(&self, client: ClientId, region: RegionId) -> bool {
        let client = self.clients.get(&client);
        client.is_some_and(|client| client.mappings.values().any(|mapping| mapping.number == region))
    }

    /// Makes the mapping that waits with this lease, whose region is in place or not.
    pub(super) fn located(&mut self, lease: LeaseId, place: Result<(), Failure>) {
        // Its client may have ended, and its lease may have been revoked.
        let Some(pending) = self.pending.remove(&lease) else {
            return;
        };
        let Pending::Map(ticket, map) = &pending else {
            return;
        };
        let made = place
            .and_then(|()| self.check_map(ticket, map))
            .and_then(|()| self.register(ticket, map, lease));
        if made.is_err() {
            self.leases.release(self.now, lease);
            self.carry_out();
        }
        let Some(client) = self.clients.get_mut(&ticket.client) else {
            return;
        };
        let answer = client.session.mapped(map, made);
        self.send(ticket.client, ticket.slot, ticket.request, &answer);
        if let Some(until) = self.leases.deadline(lease) {
            self.breaks(lease, until);
        }
    }

    /// Checks a request for a mapping once it has its lease.
    fn check_map(&mut self, ticket: &Ticket, map: &Map) -> Result<(), Failure> {
        let client = self.clients.get(&ticket.client);
        if !client.is_some_and(|client| client.session.is_live(map.mapping)) {
            let text = format!("mapping {} ended before it was established", map.mapping);
            return Err((ErrorCode::Revoked, text));
        }
        self.check_outside(map)
    }

    /// Registers a mapping.
    fn register(&mut self, ticket: &Ticket, map: &Map, lease: LeaseId) -> Result<Registered, Failure> {
        let number = ticket.client;
        let Some(client) = self.clients.get_mut(&number) else {
            return Err((ErrorCode::Protocol, String::new()));
        };
        let write = map.access.contains(push::Access::WRITE);
        let memory = map.region.open(write, map.offset, map.length, map.transfer);
        let mut rights = Access::empty();
        rights.set(Access::REMOTE_READ, map.access.contains(push::Access::READ));
        if write {
            rights |= Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::for_flush(map.region.placement());
        }
        let registered = self
            .driver
            .register(number, map, memory.clone(), rights)
            .map_err(|why| (ErrorCode::NotSupported, why))?;
        self.events.push(ServerEvent::Mapped {
            client: number,
            mapping: map.mapping,
            region: map.region.name().clone(),
            offset: map.offset,
            length: map.length,
            access: map.access,
        });
        let mapping = Mapping {
            lease: Some(lease),
            memory,
            number: map.number,
            offset: map.offset,
            length: map.length,
            transfer: map.transfer,
        };
        client.mappings.insert(map.mapping, mapping);
        self.leased.insert(lease, (number, map.mapping));
        Ok(registered)
    }

    /// Invalidates a mapping's keys, and then lets others have its range. Returns whether the keys were valid.
    fn revoke(&mut self, key: ClientId, mapping: MappingId) -> bool {
        let client = self.clients.get_mut(&key);
        let Some(lease) = client
            .and_then(|client| client.mappings.get_mut(&mapping))
            .and_then(|mapping| mapping.lease.take())
        else {
            return false;
        };
        self.driver.deregister(key, mapping);
        self.leased.remove(&lease);
        self.leases.release(self.now, lease);
        self.carry_out();
        true
    }

    /// Carries out the effects of the lease table.
    pub(super) fn carry_out(&mut self) {
        // An effect may lead to more effects: the outermost call carries out all of them.
        if std::mem::replace(&mut self.carrying_out, true) {
            return;
        }
        self.carry_out_all();
        self.carrying_out = false;
    }

    fn carry_out_all(&mut self) {
        while let Some(effect) = self.leases.poll() {
            match effect {
                Effect::Granted { lease, .. } => match self.pending.remove(&lease) {
                    Some(pending) => self.granted(lease, pending),
                    None => self.leases.release(self.now, lease),
                },
                Effect::Notify { lease, until, .. } => self.breaks(lease, until),
                Effect::Revoke { lease, .. } => {
                    let Some((key, mapping)) = self.leased.get(&lease).copied() else {
                        self.leases.release(self.now, lease);
                        if let Some(pending) = self.pending.remove(&lease) {
                            let text = "another client needs the range: the lease was revoked before the mapping was established";
                            self.fail(pending, (ErrorCode::Revoked, text.into()));
                        }
                        continue;
                    };
                    if let Some(client) = self.clients.get_mut(&key) {
                        client.session.revoked(mapping);
                    }
                    self.events.push(ServerEvent::Revoked { client: key, mapping });
                    self.revoke(key, mapping);
                    self.changed(key, mapping, ChangeKind::Revoked, 0);
                }
            }
        }
    }

    /// Asks the holder of a mapping to release its lease. One whose region is still being located learns of it when it has the mapping.
    fn breaks(&mut self, lease: LeaseId, until: Duration) {
        let Some((key, mapping)) = self.leased.get(&lease).copied() else {
            return;
        };
        let within = until.saturating_sub(self.now);
        let ms = within.as_millis().try_into().unwrap_or(u32::MAX);
        self.changed(key, mapping, ChangeKind::Break, ms);
        if self.clients.contains_key(&key) {
            self.events.push(ServerEvent::Breaking {
                client: key,
                mapping,
                within,
            });
        }
    }

    /// Notifies a client of a change to a mapping.
    fn changed(&mut self, key: ClientId, mapping: MappingId, kind: ChangeKind, ms: u32) {
        if let Some(client) = self.clients.get_mut(&key) {
            let change = Change {
                mapping: mapping.0,
                kind,
                ms,
            };
            client.changes.insert(mapping, change);
            self.notify(key);
        }
    }

    /// Sends pending changes, unless the client has not taken the last notice: then it has no receive for another.
    fn notify(&mut self, key: ClientId) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        if client.notice.is_some() || client.changes.is_empty() || client.closing.is_some() {
            return;
        }
        let pop = || client.changes.pop_first().map(|(_, change)| change);
        let changes = std::iter::from_fn(pop).take(CHANGES_MAX).collect();
        client.notices_so_far += 1;
        client.notice = Some(client.notices_so_far);
        let notice = Message::Notice { changes };
        let number = client.notices_so_far;
        if !self.driver.send(key, ReplySlot::Notice, number, &notice) {
            self.end(key, EndReason::Failed("connection lost".into()));
        }
    }

    /// Returns a claim of a new owner on all of a region.
    pub(super) fn local_claim(
        &mut self,
        region: RegionId,
        access: push::Access,
        share: push::Access,
    ) -> Claim {
        self.locals_so_far += 1;
        Claim {
            owner: Owner::Local(OperationId(self.locals_so_far)),
            region,
            offset: 0,
            length: u64::MAX,
            access,
            share,
        }
    }

    /// Handles a request of the program that runs the server to have a region for itself. When the operation may begin, `reply`
    /// receives its number, for [`Service::handle_local_end`]; `reply` receives nothing if there is no such region.
    pub fn handle_local(
        &mut self,
        now: Duration,
        region: &push::Name,
        access: push::Access,
        share: push::Access,
        reply: mpsc::Sender<OperationId>,
    ) {
        self.now = now;
        let Some(at) = self.shared.regions.iter().position(|r| r.name() == region) else {
            return;
        };
        let claim = self.local_claim(RegionId(at), access, share);
        let number = OperationId(self.locals_so_far);
        self.claim(claim, Conflict::Break, Pending::Local(number, reply));
    }

    /// Handles the end of an operation of the server's own.
    pub fn handle_local_end(&mut self, now: Duration, number: OperationId) {
        self.now = now;
        self.end_local(number);
    }

    fn end_local(&mut self, number: OperationId) {
        if let Some(lease) = self.locals.remove(&number) {
            self.leases.release(self.now, lease);
            self.carry_out();
        }
    }
}

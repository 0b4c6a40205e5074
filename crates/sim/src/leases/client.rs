//! The clients: programs that map, push, flush, release, stop, die and connect again, and that obey breaks, or do not.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use rdmux_push::client::{Handshake, Next};
use rdmux_push::server::{ClientId, MappingId};
use rdmux_push::{Access, Conflict, Key};
use rdmux_rnic::{
    Operation, Placement, Qpn, RKey, Selectivity, SendFlags, SendRequest, SgeList, Status, Target,
    WorkCompletion,
};
use rdmux_wire::push::{ChangeKind, Message};

use super::checker::{UNIT, Uid};
use super::driver::{CLIENT, MessageQp, RECV, SERVER, SLOTS, Tag};
use super::run::{REGION_BYTES, Run};
use crate::pair::{Terms, bring_up};

/// Bits of the clients' work request ids; the id of a push also has its number.
pub(super) const PUSH: u64 = 1 << 62;
pub(super) const FLUSH: u64 = 1 << 61;
const MESSAGE: u64 = 1 << 60;
pub(super) const NUMBER: u64 = (1 << 56) - 1;

/// Maximum number of a client's requests in flight: two of a connection's messages are left for receipts.
const REQUESTS_MAX: usize = SLOTS - 4;
/// Maximum number of mappings that a client has at a time.
const HELD_MAX: usize = 6;
/// Longest push.
const PUSH_BYTES_MAX: u64 = 1024;

/// A mapping, as its client knows it.
#[derive(Debug)]
struct Held {
    mapping: MappingId,
    uid: Uid,
    rkey: RKey,
    va: u64,
    range: Range<u64>,
    access: Access,
    /// Pushes through it behind which no FLUSH was posted.
    pushes: Vec<u64>,
    /// Set when the server asked the client to release it.
    breaking: bool,
    /// Set when the client has told the server that it has released it, or has been told that it must.
    over: bool,
}

#[derive(Debug)]
enum Request {
    Map { range: Range<u64>, access: Access },
    Release(MappingId),
    Write(u64),
    Read,
}

#[derive(Debug)]
struct Connection {
    /// The client's number at the server.
    number: ClientId,
    end: MessageQp,
    handshake: Option<Handshake>,
    failed: bool,
    /// Completions that the client has not looked at.
    inbox: VecDeque<WorkCompletion>,
    requests: BTreeMap<u64, Request>,
    next_request: u64,
    held: Vec<Held>,
    /// By push or flush in flight: the mapping.
    under_way: BTreeMap<u64, MappingId>,
}

#[derive(Debug)]
pub(super) struct Client {
    name: [u8; 16],
    /// Set when the client releases mappings that the server asks for.
    obeys: bool,
    acts_left: u32,
    stopped: bool,
    connection: Option<Connection>,
}

impl Client {
    pub(super) fn new(name: [u8; 16], obeys: bool, acts: u32) -> Client {
        Client {
            name,
            obeys,
            acts_left: acts,
            stopped: false,
            connection: None,
        }
    }

    /// Returns its own QPN and its number at the server.
    pub(super) fn connected(&self) -> Option<(Qpn, ClientId)> {
        let connection = self.connection.as_ref()?;
        Some((connection.end.qpn, connection.number))
    }

    /// Returns whether the client has nothing more to do.
    pub(super) fn is_done(&self) -> bool {
        self.acts_left == 0
    }

    fn ready(&mut self) -> Option<&mut Connection> {
        let connection = self.connection.as_mut()?;
        let ready = connection.handshake.is_none() && !connection.failed;
        ready.then_some(connection)
    }
}

impl Run<'_> {
    /// Handles a completion of a client.
    pub(super) fn client_completes(&mut self, wc: &WorkCompletion) {
        let success = wc.status == Status::Success;
        if wc.wr_id & PUSH != 0 && success {
            self.driver().counts.acknowledged += 1;
            self.checker.acknowledged(wc.wr_id & NUMBER);
        }
        if wc.wr_id & FLUSH != 0
            && let Some(pushes) = self.flushes.remove(&(wc.wr_id & NUMBER))
            && success
        {
            self.driver().counts.flushes += 1;
            self.checker.flushed(&pushes);
        }
        self.driver().counts.refused += u64::from(wc.status == Status::RemoteAccess);
        let Some(at) = self.by_qpn.get(&wc.qpn).copied() else {
            return;
        };
        let client = &mut self.clients[at];
        if let Some(connection) = client.connection.as_mut().filter(|c| c.end.qpn == wc.qpn) {
            let first = connection.inbox.is_empty();
            connection.inbox.push_back(*wc);
            if first {
                let delay = self.dice.log_uniform(50_000);
                self.driver().later(delay, Tag::Hear(at as u64));
            }
        }
    }

    /// Lets a client handle the completions that have arrived.
    pub(super) fn hear(&mut self, at: usize) -> Result<(), String> {
        if self.clients[at].stopped {
            return Ok(());
        }
        while let Some(connection) = &mut self.clients[at].connection
            && let Some(wc) = connection.inbox.pop_front()
        {
            if wc.status != Status::Success {
                connection.failed = true;
            } else if wc.wr_id & RECV != 0 {
                let slot = (wc.wr_id & 0xffff) as usize;
                let message = connection.end.message(slot, wc.byte_len as usize);
                let driver = self.service.driver_mut();
                driver.ready(CLIENT, &connection.end, slot);
                let (request, message) = Message::parse(&message).map_err(|error| error.to_string())?;
                self.hears(at, request, message)?;
            } else {
                connection.under_way.remove(&wc.wr_id);
            }
        }
        self.let_go(at);
        Ok(())
    }

    fn hears(&mut self, at: usize, request: u64, message: Message) -> Result<(), String> {
        let heeds = self.dice.one_in(4);
        let client = &mut self.clients[at];
        let obeys = client.obeys;
        let Some(connection) = &mut client.connection else {
            return Ok(());
        };
        if let Some(handshake) = &mut connection.handshake {
            match handshake.handle(message) {
                Ok(Next::Send(message)) => drop(self.tell(at, 0, &message)),
                Ok(Next::Welcome { .. }) => connection.handshake = None,
                Err(failure) => return Err(format!("a handshake fails: {failure:?}")),
            }
            return Ok(());
        }
        match message {
            Message::Notice { changes } => {
                for change in changes {
                    let Some(held) = connection
                        .held
                        .iter_mut()
                        .find(|h| h.mapping == MappingId(change.mapping))
                    else {
                        continue;
                    };
                    match change.kind {
                        ChangeKind::Break => held.breaking = true,
                        ChangeKind::Revoked if obeys => held.over = true,
                        ChangeKind::Revoked => {}
                    }
                }
                if obeys || heeds {
                    self.tell(at, request, &Message::Noticed);
                }
            }
            Message::Mapped { mapping, extents, .. } => {
                let (Some(Request::Map { range, access }), [extent]) =
                    (connection.requests.remove(&request), extents.as_slice())
                else {
                    return Err(format!("a mapping is made that was not asked for: {request}"));
                };
                let number = connection.number;
                // If the server has restarted, the mapping belongs to nobody.
                let Some(uid) = self.checker.uid(number, MappingId(mapping)) else {
                    return Ok(());
                };
                connection.held.push(Held {
                    mapping: MappingId(mapping),
                    uid,
                    rkey: RKey(extent.rkey.0),
                    va: extent.va,
                    range,
                    access,
                    pushes: Vec::new(),
                    breaking: false,
                    over: false,
                });
            }
            _ => match connection.requests.remove(&request) {
                Some(Request::Write(push)) if message == Message::Written => self.checker.acknowledged(push),
                Some(Request::Release(mapping)) => connection.held.retain(|held| held.mapping != mapping),
                _ => {}
            },
        }
        Ok(())
    }

    /// Lets a client that obeys post nothing more, wait for what is in flight, and release the mappings that it was asked for.
    fn let_go(&mut self, at: usize) {
        let client = &mut self.clients[at];
        if !client.obeys {
            return;
        }
        let Some(connection) = client.ready() else {
            return;
        };
        let under_way = &connection.under_way;
        let due = connection.held.iter_mut().filter(|held| {
            let busy = under_way.values().any(|mapping| *mapping == held.mapping);
            held.breaking && !held.over && !busy
        });
        let due: Vec<MappingId> = due
            .map(|held| {
                held.over = true;
                held.mapping
            })
            .collect();
        for mapping in due {
            self.ask(
                at,
                Request::Release(mapping),
                &Message::Release { mapping: mapping.0 },
            );
        }
    }

    fn tell(&mut self, at: usize, request: u64, message: &Message) -> bool {
        let Some((qpn, _)) = self.clients[at].connected() else {
            return false;
        };
        self.driver().send_message(CLIENT, qpn, MESSAGE, request, message)
    }

    fn ask(&mut self, at: usize, request: Request, message: &Message) {
        let Some(connection) = self.clients[at].ready() else {
            return;
        };
        if connection.requests.len() >= REQUESTS_MAX {
            return;
        }
        connection.next_request += 1;
        let number = connection.next_request;
        connection.requests.insert(number, request);
        self.tell(at, number, message);
    }

    /// Lets a client perform its next action.
    pub(super) fn act(&mut self, at: usize) {
        let client = &mut self.clients[at];
        if client.acts_left == 0 {
            return;
        }
        client.acts_left -= 1;
        let delay = self.dice.log_uniform(self.break_ns / 2);
        self.driver().later(delay, Tag::Act(at as u64));
        if self.clients[at].stopped {
            return;
        }
        let connection = self.clients[at].connection.as_ref();
        if connection.is_none_or(|connection| connection.failed) {
            return self.connect(at);
        }
        if self.clients[at].ready().is_none() {
            // Sometimes the client loses patience.
            if self.dice.one_in(20) {
                self.connect(at);
            }
            return;
        }
        match self.dice.below(50) {
            0..24 => {
                for _ in 0..self.dice.between(1, 4) {
                    self.push(at);
                }
            }
            24..29 => self.flush(at),
            29..39 => self.map(at),
            39..41 => self.release(at),
            41..44 => self.write(at),
            44..46 => self.read(at),
            46 => {
                self.driver().counts.stopped += 1;
                for _ in 0..self.dice.between(0, 4) {
                    self.push(at);
                }
                self.clients[at].stopped = true;
                let delay = self.dice.log_uniform(3 * self.break_ns);
                self.driver().later(delay, Tag::GoOn(at as u64));
            }
            47 => {
                self.driver().counts.died += 1;
                if let Some(connection) = self.clients[at].connection.take() {
                    self.driver().destroy(CLIENT, &connection.end);
                }
            }
            _ => {
                // Its last pushes may still be in flight when the server welcomes it again.
                for _ in 0..self.dice.between(0, 4) {
                    self.push(at);
                }
                self.connect(at);
            }
        }
    }

    pub(super) fn go_on(&mut self, at: usize) -> Result<(), String> {
        self.clients[at].stopped = false;
        self.hear(at)
    }

    /// Connects, for the first time or again. The client forgets its previous connection without ending it.
    fn connect(&mut self, at: usize) {
        let driver = self.service.driver_mut();
        let (server, end) = (driver.make_end(SERVER), driver.make_end(CLIENT));
        let terms = Terms {
            mtu: driver.mtu,
            window_bytes: driver.window_bytes,
            src_port: 0xc000 + (self.connections % 1024) as u16,
        };
        self.connections += 1;
        bring_up(&mut driver.world, &mut self.dice, [server.qpn, end.qpn], terms);
        for slot in 0..SLOTS {
            driver.ready(CLIENT, &end, slot);
        }
        let (mut nonce, mut server_nonce) = ([0; 32], [0; 32]);
        self.dice.fill(&mut nonce);
        self.dice.fill(&mut server_nonce);
        let peer = driver.world.hosts[CLIENT].address;
        let now = self.now();
        let number = ClientId(self.connections);
        self.service.handle_connected(now, number, peer, server_nonce);
        self.driver().connected(number, server);
        self.by_qpn.insert(end.qpn, at);
        let handshake = Handshake::new(Key::new([7; 32]), nonce, self.clients[at].name);
        let hello = handshake.hello();
        self.clients[at].connection = Some(Connection {
            number,
            end,
            handshake: Some(handshake),
            failed: false,
            inbox: VecDeque::new(),
            requests: BTreeMap::new(),
            next_request: 0,
            held: Vec::new(),
            under_way: BTreeMap::new(),
        });
        self.tell(at, 0, &hello);
    }

    fn draw_range(&mut self) -> Range<u64> {
        let units = REGION_BYTES / UNIT;
        let len = match self.dice.below(8) {
            0 => units,
            _ => self.dice.log_uniform(units / 2),
        };
        let from = self.dice.below(units - len + 1);
        from * UNIT..(from + len) * UNIT
    }

    /// Draws a part of a range, no longer than a push may be.
    fn part_of(&mut self, range: &Range<u64>) -> Range<u64> {
        let units = (range.end - range.start) / UNIT;
        let len = self.dice.log_uniform(units.min(PUSH_BYTES_MAX / UNIT));
        let from = range.start + self.dice.below(units - len + 1) * UNIT;
        from..from + len * UNIT
    }

    fn map(&mut self, at: usize) {
        let range = self.draw_range();
        let conflict = if self.dice.one_in(6) {
            Conflict::Fail
        } else {
            Conflict::Break
        };
        let access = self
            .dice
            .pick(&[Access::WRITE, Access::READ | Access::WRITE, Access::READ]);
        let share = self.dice.pick(&[
            Access::empty(),
            Access::empty(),
            Access::READ,
            Access::READ | Access::WRITE,
        ]);
        let Some(connection) = self.clients[at].ready() else {
            return;
        };
        if connection.held.len() >= HELD_MAX {
            return;
        }
        let message = Message::Map {
            region: self.name.clone(),
            access,
            share,
            conflict,
            offset: range.start,
            length: range.end - range.start,
            transfer: 0,
        };
        self.ask(at, Request::Map { range, access }, &message);
    }

    /// Picks one of the mappings that a client uses.
    fn pick_held(&mut self, at: usize) -> Option<usize> {
        let client = &mut self.clients[at];
        let obeys = client.obeys;
        let held = &client.ready()?.held;
        let usable = held.iter().enumerate().filter(|(_, held)| {
            held.access.contains(Access::WRITE) && !(held.over || obeys && held.breaking)
        });
        let usable: Vec<usize> = usable.map(|(nth, _)| nth).collect();
        (!usable.is_empty()).then(|| self.dice.pick(&usable))
    }

    fn post(&mut self, at: usize, nth: usize, wr_id: u64, operation: Operation, bytes: &[u8]) -> bool {
        let Some((qpn, _)) = self.clients[at].connected() else {
            return false;
        };
        let request = SendRequest {
            wr_id,
            operation,
            sges: if bytes.is_empty() {
                SgeList::EMPTY
            } else {
                SgeList::inline(bytes)
            },
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let posted = self.driver().world.post_send(CLIENT, qpn, request).is_ok();
        if let Some(connection) = self.clients[at].ready().filter(|_| posted) {
            let mapping = connection.held[nth].mapping;
            connection.under_way.insert(wr_id, mapping);
        }
        posted
    }

    fn push(&mut self, at: usize) {
        let Some(nth) = self.pick_held(at) else { return };
        let Some(connection) = self.clients[at].ready() else {
            return;
        };
        let held = &connection.held[nth];
        let (all, uid, rkey, va) = (held.range.clone(), held.uid, held.rkey, held.va);
        let range = self.part_of(&all);
        let push = self.checker.posted(Some(uid), range.clone());
        let bytes = bytes_of(push, &range);
        let operation = Operation::Write {
            va: va + (range.start - all.start),
            rkey,
            imm: None,
        };
        if self.post(at, nth, PUSH | push, operation, &bytes) {
            self.driver().counts.pushes += 1;
            if let Some(connection) = self.clients[at].ready() {
                connection.held[nth].pushes.push(push);
            }
        }
    }

    fn flush(&mut self, at: usize) {
        let Some(nth) = self.pick_held(at) else { return };
        let whole = self.dice.one_in(4);
        let placement = self.dice.pick(&[Placement::GLOBAL, Placement::PERSISTENT]);
        let number = self.flushes_so_far;
        self.flushes_so_far += 1;
        let Some(connection) = self.clients[at].ready() else {
            return;
        };
        let held = &mut connection.held[nth];
        let pushes = std::mem::take(&mut held.pushes);
        let operation = Operation::Flush {
            va: held.va,
            rkey: held.rkey,
            length: (held.range.end - held.range.start) as u32,
            placement,
            selectivity: if whole {
                Selectivity::MemoryRegion
            } else {
                Selectivity::Range
            },
        };
        if self.post(at, nth, FLUSH | number, operation, &[]) {
            self.flushes.insert(number, pushes);
        }
    }

    fn release(&mut self, at: usize) {
        let Some(nth) = self.pick_held(at) else { return };
        let unmaps = self.dice.one_in(2);
        let Some(connection) = self.clients[at].ready() else {
            return;
        };
        let held = &mut connection.held[nth];
        held.over = true;
        let mapping = held.mapping;
        let message = if unmaps {
            Message::Unmap { mapping: mapping.0 }
        } else {
            Message::Release { mapping: mapping.0 }
        };
        self.ask(at, Request::Release(mapping), &message);
    }

    fn write(&mut self, at: usize) {
        let whole = self.draw_range();
        let mut range = self.part_of(&whole);
        // A message has its own header.
        range.end = range.end.min(range.start + PUSH_BYTES_MAX / 2);
        let push = self.checker.posted(None, range.clone());
        let message = Message::Write {
            region: self.name.clone(),
            offset: range.start,
            placement: Placement::empty(),
            conflict: Conflict::Break,
            bytes: bytes_of(push, &range),
        };
        self.ask(at, Request::Write(push), &message);
    }

    fn read(&mut self, at: usize) {
        let whole = self.draw_range();
        let range = self.part_of(&whole);
        let message = Message::Read {
            region: self.name.clone(),
            offset: range.start,
            length: (range.end - range.start).min(PUSH_BYTES_MAX / 2) as u32,
            conflict: Conflict::Break,
        };
        self.ask(at, Request::Read, &message);
    }
}

/// Returns the bytes of a push.
fn bytes_of(push: u64, range: &Range<u64>) -> Vec<u8> {
    push.to_be_bytes()
        .repeat(((range.end - range.start) / UNIT) as usize)
}

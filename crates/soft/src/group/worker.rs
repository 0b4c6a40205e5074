//! The group's thread: holder, member, or between the two.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rdmux_verbs::provider::seqpacket::receive_with_descriptors;
use rdmux_verbs::provider::user::{User, peer_credentials, user_of};
use rdmux_wire::cm::ServiceId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::ledger::Ledger;
use super::message::{self, GroupMessage};
use super::sockets::{Grown, Growth, Sockets};
use super::{Calls, GroupShared, MadDatagram, Route, SLOTS, block_of, route};
use crate::udp::{RxBatch, RxSocket};

/// Connections that wait to be accepted.
pub(super) const BACKLOG: i32 = 64;

/// Most connections of a holder: one per slot, and as many again that have not announced themselves.
const PEERS_MAX: usize = 2 * SLOTS;

/// Most joining processes to whom sockets are under way at a time: the kernel limits the descriptors of a user in messages.
const GIVEN_MAX: usize = 4;

/// Time that a process has to take sockets, or to give those that the holder has asked for. Then the next process is served.
const BLOCK_TIME: Duration = Duration::from_secs(1);

/// Most messages taken from one connection at a time, so that no peer delays the others: more than its queue holds.
const MESSAGES_PER_PASS: usize = 512;

/// Time for which a new holder leaves connection management unread while living members have not announced themselves.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// Time after a connection's end within which its process vanishes.
const INSPECTION_TIME: Duration = Duration::from_secs(1);

/// Time for which the slot of a process that died with connections rests: by its end, the peers have been notified or have given up.
const REST_TIME: Duration = Duration::from_secs(10);

/// Interval of checks for events that nothing signals.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Pauses between attempts to find the new holder.
const SEEK_PAUSE_MIN: Duration = Duration::from_millis(1);
const SEEK_PAUSE_MAX: Duration = Duration::from_millis(100);

/// Pause while the name of the holder belongs to another user.
const FOREIGN_PAUSE: Duration = Duration::from_secs(1);

pub(super) enum GroupRole {
    Holder(Holder),
    /// Connected to the holder.
    Member(OwnedFd),
    /// The holder ended.
    Seeking {
        pause: Duration,
    },
}

impl GroupRole {
    /// Returns the role of the first process of an address: there is no member that it would have to wait for.
    pub(super) fn holder(listener: OwnedFd) -> Self {
        GroupRole::Holder(Holder {
            listener,
            peers: Vec::new(),
            settle_until: None,
            inspect_until: None,
            orphaned: Vec::new(),
            growth: None,
        })
    }
}

pub(super) struct Holder {
    listener: OwnedFd,
    /// In the order in which they connected.
    peers: Vec<Peer>,
    settle_until: Option<Instant>,
    /// Set when a process has ended: end of the time in which this thread searches the slots for its connections.
    inspect_until: Option<Instant>,
    /// Slots whose connections are being ended, and the times at which their rest is over.
    orphaned: Vec<(u8, Instant)>,
    /// The next block, while this process binds it.
    growth: Option<Box<Growth>>,
}

impl Holder {
    /// Ends the connections that the former process of a slot has left, unless that has been done.
    fn disconnect_orphan(&mut self, slot: u8, ledger: &Ledger, calls: &Calls) {
        let is_orphaned = self.orphaned.iter().any(|(orphaned, _)| *orphaned == slot);
        if !is_orphaned && ledger.is_dirty(slot) {
            self.orphaned.push((slot, Instant::now() + REST_TIME));
            (calls.disconnect_orphans)(ledger.read(slot));
        }
    }

    /// Takes note of the slot and the services that a process announces. Returns whether its slot is new.
    fn announced(&mut self, i: usize, slot: u8, services: Vec<ServiceId>) -> bool {
        let is_new = self.peers[i].slot != Some(slot);
        if is_new {
            // The slot's new process has cleared it.
            self.orphaned.retain(|(orphaned, _)| *orphaned != slot);
        }
        for (j, peer) in self.peers.iter_mut().enumerate() {
            // A slot has one process, and only its latest connection counts.
            peer.gone |= j != i && peer.slot == Some(slot);
        }
        let peer = &mut self.peers[i];
        (peer.slot, peer.services) = (Some(slot), services);
        is_new
    }

    fn remove_gone(&mut self) {
        if self.peers.iter().any(|p| p.gone && p.slot.is_some()) {
            self.inspect_until = Some(Instant::now() + INSPECTION_TIME);
        }
        self.peers.retain(|p| !p.gone);
    }

    /// Tells the joining processes that wait for a block, or for one above, that there is none. They may ask again.
    fn refuse_blocks(&mut self, block: u8, errno: Errno) {
        for peer in &mut self.peers {
            peer.asked = None;
            if peer.wants.take_if(|wanted| *wanted >= block).is_some() {
                // One that does not read finds out by the end of its patience.
                let _ = message::send(&peer.fd, &GroupMessage::NoBlock(errno.raw_os_error()));
            }
        }
    }
}

struct Peer {
    fd: OwnedFd,
    /// `None` until the peer announces itself.
    slot: Option<u8>,
    services: Vec<ServiceId>,
    /// The slot that a joining process has claimed, and the block that it waits for.
    joins: Option<u8>,
    wants: Option<u8>,
    /// Set when sockets have been sent: the end of the time to take them. Cleared by the next message.
    given: Option<Instant>,
    /// Set when the holder has asked for sockets: the end of the time to give them. Cleared by the answer.
    asked: Option<Instant>,
    /// Set when the connection has ended, or the peer broke the rules.
    gone: bool,
}

impl Peer {
    fn new(fd: OwnedFd) -> Peer {
        Peer {
            fd,
            slot: None,
            services: Vec::new(),
            joins: None,
            wants: None,
            given: None,
            asked: None,
            gone: false,
        }
    }
}

pub(super) struct Worker {
    shared: Arc<GroupShared>,
    sockets: Sockets,
    ledger: Arc<Ledger>,
    cm_socket: RxSocket,
    slot: u8,
    role: GroupRole,
    next_slot: u8,
    calls: Calls,
    batch: RxBatch,
    buffer: Vec<u8>,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<GroupShared>,
        (sockets, ledger): (Sockets, Arc<Ledger>),
        (slot, cm_socket): (u8, RxSocket),
        role: GroupRole,
        calls: Calls,
    ) -> io::Result<Self> {
        if let GroupRole::Member(link) = &role {
            let mut state = shared.state();
            state.link = Some(link.try_clone()?);
            state.announce();
        }
        let next_slot = after(slot);
        let (batch, buffer) = (RxBatch::new(), vec![0; message::LEN_MAX]);
        Ok(Self {
            shared,
            sockets,
            ledger,
            cm_socket,
            slot,
            role,
            next_slot,
            calls,
            batch,
            buffer,
        })
    }

    /// Runs until the group is dropped.
    pub(super) fn run(mut self) {
        loop {
            self.wait();
            if self.shared.stop.load(Relaxed) {
                return;
            }
            match self.role {
                GroupRole::Holder(_) => self.hold(),
                GroupRole::Member(_) => self.follow(),
                GroupRole::Seeking { .. } => self.seek(),
            }
        }
    }

    /// Sleeps until there is work for the role.
    fn wait(&mut self) {
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![input(self.shared.wake.as_fd())];
        let aside = self.calls.aside.as_ref();
        fds.extend(aside.map(|(fd, _)| input(fd.as_fd())));
        let mut timeout = None;
        match &self.role {
            GroupRole::Holder(holder) => {
                fds.push(input(holder.listener.as_fd()));
                fds.extend(holder.peers.iter().map(|p| input(p.fd.as_fd())));
                fds.extend(
                    holder
                        .growth
                        .iter()
                        .flat_map(|growth| growth.descriptors())
                        .map(input),
                );
                match holder.settle_until {
                    None => fds.push(input(self.cm_socket.as_fd())),
                    // A member that the holder waits for may also die, which nothing signals.
                    Some(_) => timeout = Some(LOOK_AGAIN),
                }
                // A growth repeats its datagrams, and who has been given or asked for sockets has a limited time.
                let waits = holder.peers.iter().any(|p| p.wants.is_some());
                if holder.inspect_until.is_some() || waits {
                    timeout = Some(LOOK_AGAIN);
                } else if let Some(end) = holder.orphaned.iter().map(|(_, end)| *end).min() {
                    let left = end.saturating_duration_since(Instant::now());
                    timeout = Some(timeout.map_or(left, |t| t.min(left)));
                }
            }
            GroupRole::Member(link) => fds.push(input(link.as_fd())),
            GroupRole::Seeking { pause } => timeout = Some(*pause),
        }
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // Out of memory: poll has no other error for these descriptors. Trying again at once would spin.
            Err(_) => std::thread::sleep(SEEK_PAUSE_MAX),
        }
        if let Some((_, call)) = aside.filter(|_| !fds[1].revents().is_empty()) {
            call();
        }
    }

    fn hold(&mut self) {
        self.serve_peers();
        while self.give_blocks() && self.obtain_block() {}
        let GroupRole::Holder(holder) = &mut self.role else {
            return;
        };
        if let Some(until) = holder.settle_until {
            let missing = |slot| {
                slot != self.slot
                    && !holder.peers.iter().any(|p| p.slot.or(p.joins) == Some(slot))
                    && self.shared.names.is_slot_claimed(slot)
            };
            if Instant::now() < until && (1..SLOTS as u8).any(missing) {
                return;
            }
            holder.settle_until = None;
            // The former holder has ended, and others may have died with it.
            holder.inspect_until = Some(Instant::now() + INSPECTION_TIME);
        }
        self.disconnect_orphans();
        match self.cm_socket.recv_batch(&mut self.batch) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        // A process that offers a service announces it before anybody can ask for it: the holder reads its announcement first.
        self.serve_peers();
        self.route_mads();
    }

    /// Gives each of the received datagrams to the process that it is for.
    fn route_mads(&mut self) {
        let GroupRole::Holder(holder) = &mut self.role else {
            return;
        };
        let counters = &self.shared.counters;
        for datagram in self.batch.iter() {
            let src = datagram.src;
            for bytes in datagram.segments() {
                let target = match route(bytes).filter(|_| bytes.len() <= message::MAD_BYTES_MAX) {
                    None => {
                        counters.malformed.fetch_add(1, Relaxed);
                        continue;
                    }
                    Some(Route::Everyone) => {
                        for peer in &holder.peers {
                            let _ = message::send(&peer.fd, &GroupMessage::Mad { src, bytes });
                        }
                        Target::Own
                    }
                    Some(to) => target(&self.shared, &holder.peers, self.slot, to),
                };
                match target {
                    Target::Own => {
                        counters.delivered.fetch_add(1, Relaxed);
                        let bytes = bytes.to_vec();
                        (self.calls.deliver)(MadDatagram { src, bytes });
                    }
                    Target::Peer(i) => {
                        let peer = &mut holder.peers[i];
                        match message::send(&peer.fd, &GroupMessage::Mad { src, bytes }) {
                            Ok(()) => counters.forwarded.fetch_add(1, Relaxed),
                            Err(e) => {
                                peer.gone = e != Errno::AGAIN;
                                counters.undeliverable.fetch_add(1, Relaxed)
                            }
                        };
                    }
                    Target::Absent => {
                        counters.undeliverable.fetch_add(1, Relaxed);
                    }
                }
            }
        }
    }

    /// Ends the connections of processes that did not end them, and lets their slots rest meanwhile.
    fn disconnect_orphans(&mut self) {
        let GroupRole::Holder(holder) = &mut self.role else {
            return;
        };
        let (names, ledger) = (&self.shared.names, &self.ledger);
        let now = Instant::now();
        if let Some(until) = holder.inspect_until {
            for slot in (1..SLOTS as u8).filter(|slot| *slot != self.slot) {
                if ledger.is_dirty(slot) && !names.is_slot_claimed(slot) {
                    holder.disconnect_orphan(slot, ledger, &self.calls);
                }
            }
            holder.inspect_until = Some(until).filter(|until| now < *until);
        }
        holder.orphaned.retain(|(slot, end)| {
            if now < *end {
                return true;
            }
            // While this thread holds the name, nobody else begins to use the slot.
            if let Ok(_claim) = names.claim_slot(*slot) {
                ledger.clear(*slot);
            }
            false
        });
    }

    /// Accepts new connections and reads the messages of all.
    fn serve_peers(&mut self) {
        self.read_peers();
        for _ in 0..BACKLOG {
            let GroupRole::Holder(holder) = &self.role else {
                return;
            };
            let Ok(fd) = accept_with(&holder.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else {
                break;
            };
            // Another user learns this process's identity from its credentials, and gets nothing.
            if !peer_credentials(&fd).is_ok_and(|(uid, _)| user_of(uid) == User::Own) {
                continue;
            }
            if holder.peers.len() >= PEERS_MAX {
                self.read_peers();
            }
            let GroupRole::Holder(holder) = &mut self.role else {
                return;
            };
            if holder.peers.len() >= PEERS_MAX {
                // Connections that have not announced themselves make room, the oldest first.
                let Some(i) = holder.peers.iter().position(|p| p.slot.is_none()) else {
                    continue;
                };
                holder.peers.remove(i);
            }
            let welcome = GroupMessage::Welcome {
                version: message::VERSION,
                next_slot: self.next_slot,
            };
            if message::send_with_descriptors(&fd, &welcome, &[self.ledger.as_fd()]).is_ok() {
                holder.peers.push(Peer::new(fd));
            }
        }
        self.read_peers();
    }

    fn read_peers(&mut self) {
        let GroupRole::Holder(holder) = &mut self.role else {
            return;
        };
        let next_slot = self.next_slot;
        let (mut refusal, mut taken) = (None, Vec::new());
        for i in 0..holder.peers.len() {
            for _ in 0..MESSAGES_PER_PASS {
                let peer = &mut holder.peers[i];
                let received = match peer.asked {
                    Some(_) => receive_with_descriptors(&peer.fd, &mut self.buffer),
                    None => message::receive(&peer.fd, &mut self.buffer).map(|len| (len, Vec::new())),
                };
                let (len, descriptors) = match received {
                    Err(Errno::AGAIN) => break,
                    // This process has too many descriptors.
                    Err(Errno::MSGSIZE) => {
                        refusal = Some(Errno::MFILE);
                        break;
                    }
                    Err(_) | Ok((0, _)) => {
                        peer.gone = true;
                        break;
                    }
                    Ok(received) => received,
                };
                peer.given = None;
                match GroupMessage::decode(&self.buffer[..len]) {
                    Some(GroupMessage::Announce { slot, services }) if slot != self.slot => {
                        if holder.announced(i, slot, services) {
                            self.next_slot = after(slot);
                        }
                    }
                    Some(GroupMessage::Want { slot, block }) if peer.slot.is_none() => {
                        (peer.joins, peer.wants) = (Some(slot), Some(block));
                        taken.push(slot);
                    }
                    // An answer that comes late, after the block came from another process, is of no use.
                    Some(GroupMessage::Block(block)) if peer.slot.is_some() => {
                        if peer.asked.take().is_some() && block == self.sockets.blocks() {
                            peer.gone = !self.sockets.add(descriptors);
                        }
                    }
                    Some(GroupMessage::NoBlock(errno)) if peer.slot.is_some() => {
                        refusal = peer
                            .asked
                            .take()
                            .map(|_| Errno::from_raw_os_error(errno))
                            .or(refusal);
                    }
                    _ => {
                        peer.gone = true;
                        break;
                    }
                }
            }
        }
        // A joining process clears the records of its slot as soon as it has sockets.
        for slot in taken {
            holder.disconnect_orphan(slot, &self.ledger, &self.calls);
        }
        if let Some(errno) = refusal {
            holder.refuse_blocks(self.sockets.blocks(), errno);
        }
        holder.remove_gone();
        if self.next_slot != next_slot {
            for peer in &holder.peers {
                // A member that does not read misses a hint.
                let _ = message::send(&peer.fd, &GroupMessage::NextSlot(self.next_slot));
            }
        }
    }

    /// Gives the joining processes the sockets that they wait for. Returns whether one waits for sockets that this process does not have.
    fn give_blocks(&mut self) -> bool {
        let GroupRole::Holder(holder) = &mut self.role else {
            return false;
        };
        let now = Instant::now();
        let under_way = |p: &&Peer| p.given.is_some_and(|until| now < until);
        let mut given = holder.peers.iter().filter(under_way).count();
        let mut lacks = false;
        for peer in &mut holder.peers {
            let Some(block) = peer.wants else { continue };
            let Some(sockets) = self.sockets.block(block) else {
                lacks = true;
                continue;
            };
            if given >= GIVEN_MAX {
                continue;
            }
            match message::send_with_descriptors(&peer.fd, &GroupMessage::Block(block), &sockets) {
                Ok(()) => {
                    (peer.wants, peer.given) = (None, Some(now + BLOCK_TIME));
                    given += 1;
                }
                // Too many descriptors of this user are in messages that nobody has received: this is repeated.
                Err(Errno::TOOMANYREFS) => {}
                Err(_) => (peer.wants, peer.gone) = (None, true),
            }
        }
        holder.growth.take_if(|_| !lacks);
        lacks
    }

    /// Gets the next block from a member that has it, or else binds it. Returns whether this process has it now.
    fn obtain_block(&mut self) -> bool {
        let GroupRole::Holder(holder) = &mut self.role else {
            return false;
        };
        let (now, block) = (Instant::now(), self.sockets.blocks());
        if holder
            .peers
            .iter()
            .any(|p| !p.gone && p.asked.is_some_and(|until| now < until))
        {
            return false;
        }
        let has_it = |p: &&mut Peer| {
            !p.gone && p.asked.is_none() && p.slot.is_some_and(|slot| block_of(slot) >= block)
        };
        if let Some(peer) = holder.peers.iter_mut().find(has_it) {
            peer.asked = Some(now + BLOCK_TIME);
            // One that does not read does not answer either.
            let _ = message::send(
                &peer.fd,
                &GroupMessage::Want {
                    slot: self.slot,
                    block,
                },
            );
            return false;
        }
        // A member that has it may not have found this process yet.
        if holder.settle_until.is_some() {
            return false;
        }
        let growth = match holder.growth.take() {
            Some(growth) => Ok(growth),
            None => self.sockets.grow(),
        };
        match growth.and_then(|growth| growth.proceed(&mut self.batch)) {
            Ok(Grown::Block(sockets)) => {
                self.sockets.add_grown(sockets);
                true
            }
            Ok(Grown::NotYet(growth)) => {
                holder.growth = Some(growth);
                false
            }
            Err(e) => {
                holder.refuse_blocks(block, Errno::from_io_error(&e).unwrap_or(Errno::IO));
                false
            }
        }
    }

    fn follow(&mut self) {
        let GroupRole::Member(link) = &self.role else {
            return;
        };
        for _ in 0..MESSAGES_PER_PASS {
            let received = match message::receive(link, &mut self.buffer) {
                Err(Errno::AGAIN) => return,
                Err(_) | Ok(0) => None,
                Ok(len) => GroupMessage::decode(&self.buffer[..len]),
            };
            match received {
                Some(GroupMessage::Mad { src, bytes }) => (self.calls.deliver)(MadDatagram {
                    src,
                    bytes: bytes.to_vec(),
                }),
                Some(GroupMessage::NextSlot(slot)) => self.next_slot = slot,
                Some(GroupMessage::Want { block, .. }) => {
                    let sent = match self.sockets.block(block) {
                        Some(sockets) => {
                            message::send_with_descriptors(link, &GroupMessage::Block(block), &sockets)
                        }
                        None => Err(Errno::NOENT),
                    };
                    if let Err(errno) = sent {
                        let _ = message::send(link, &GroupMessage::NoBlock(errno.raw_os_error()));
                    }
                }
                // The greeting of a new holder, whose sockets this process already has.
                Some(GroupMessage::Welcome {
                    version: message::VERSION,
                    ..
                }) => {}
                _ => {
                    self.shared.state().link = None;
                    self.role = GroupRole::Seeking {
                        pause: Duration::ZERO,
                    };
                    return;
                }
            }
        }
    }

    /// Becomes the holder, or finds it. The holder's name belongs to one process at a time, so at most one becomes the holder.
    fn seek(&mut self) {
        let GroupRole::Seeking { pause } = &mut self.role else {
            return;
        };
        *pause = (*pause * 2).clamp(SEEK_PAUSE_MIN, SEEK_PAUSE_MAX);
        if let Ok(listener) = self.shared.names.claim_holder() {
            if rustix::net::listen(&listener, BACKLOG).is_ok() {
                let settle_until = Some(Instant::now() + SETTLE_TIME);
                self.role = GroupRole::Holder(Holder {
                    listener,
                    peers: Vec::new(),
                    settle_until,
                    inspect_until: None,
                    orphaned: Vec::new(),
                    growth: None,
                });
            }
            return;
        }
        let Ok(link) = self.shared.names.connect_holder() else {
            return;
        };
        if !peer_credentials(&link).is_ok_and(|(uid, _)| user_of(uid) == User::Own) {
            *pause = FOREIGN_PAUSE;
            return;
        }
        let Ok(for_state) = link.try_clone() else { return };
        let mut state = self.shared.state();
        state.link = Some(for_state);
        state.announce();
        if state.link.is_some() {
            drop(state);
            self.role = GroupRole::Member(link);
        }
    }
}

/// Recipient of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// This process: the datagram is for it, or for nobody, and then connection management here refuses it.
    Own,
    Peer(usize),
    /// A process that lives but has not announced itself.
    Absent,
}

fn target(shared: &GroupShared, peers: &[Peer], own_slot: u8, to: Route) -> Target {
    let peer = |found: &dyn Fn(&Peer) -> bool| peers.iter().position(|p| !p.gone && found(p));
    match to {
        Route::Everyone => Target::Own,
        Route::Slot(slot) if slot == own_slot => Target::Own,
        Route::Slot(slot) => match peer(&|p| p.slot == Some(slot)) {
            Some(i) => Target::Peer(i),
            None if (1..SLOTS as u8).contains(&slot) && shared.names.is_slot_claimed(slot) => Target::Absent,
            None => Target::Own,
        },
        Route::Service(service) => {
            if shared.state().services.iter().any(|(id, _)| *id == service) {
                return Target::Own;
            }
            match peer(&|p| p.services.contains(&service)) {
                Some(i) => Target::Peer(i),
                None if shared.names.is_service_claimed(service) => Target::Absent,
                None => Target::Own,
            }
        }
    }
}

/// Returns the slot after `slot`, in the circle of the slots of processes.
fn after(slot: u8) -> u8 {
    slot % (SLOTS as u8 - 1) + 1
}

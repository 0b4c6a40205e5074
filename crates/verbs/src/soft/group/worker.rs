//! The group's thread: holder, member, or between the two.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rdmux_wire::cm::ServiceId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::ledger::Ledger;
use super::message::{self, Message};
use super::sockets::Sockets;
use super::{Calls, MadDatagram, Route, SLOTS, Shared, Shares, route};
use crate::soft::udp::{self, RxBatch, RxSocket};
use crate::soft::user::{User, user_of};

/// Connections that wait to be accepted.
pub(super) const BACKLOG: i32 = 64;

/// Most connections of a holder: one per slot, and as many again that have not announced themselves.
const PEERS_MAX: usize = 2 * SLOTS;

/// Most messages taken from one connection at a time, so that no peer delays the others: more than its queue holds.
const MESSAGES_PER_TURN: usize = 512;

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

pub(super) enum Role {
    Holder(Holder),
    /// Connected to the holder.
    Member(OwnedFd),
    /// The holder ended.
    Seeking {
        pause: Duration,
    },
}

impl Role {
    /// Returns the role of the first process of an address: there is no member that it would have to wait for.
    pub(super) fn holder(listener: OwnedFd) -> Self {
        Role::Holder(Holder {
            listener,
            peers: Vec::new(),
            settle_until: None,
            inspect_until: None,
            orphaned: Vec::new(),
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
}

struct Peer {
    fd: OwnedFd,
    /// `None` until the peer announces itself.
    slot: Option<u8>,
    services: Vec<ServiceId>,
    /// Set when the connection has ended, or the peer broke the rules.
    gone: bool,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    sockets: Sockets,
    ledger: Arc<Ledger>,
    cm_socket: RxSocket,
    slot: u8,
    role: Role,
    next_slot: u8,
    calls: Calls,
    batch: RxBatch,
    buffer: Vec<u8>,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        (sockets, ledger): Shares,
        (slot, cm_socket): (u8, RxSocket),
        role: Role,
        calls: Calls,
    ) -> io::Result<Self> {
        if let Role::Member(link) = &role {
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
                Role::Holder(_) => self.hold(),
                Role::Member(_) => self.follow(),
                Role::Seeking { .. } => self.seek(),
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
            Role::Holder(holder) => {
                fds.push(input(holder.listener.as_fd()));
                fds.extend(holder.peers.iter().map(|p| input(p.fd.as_fd())));
                match holder.settle_until {
                    None => fds.push(input(self.cm_socket.as_fd())),
                    // A member that the holder waits for may also die, which nothing signals.
                    Some(_) => timeout = Some(LOOK_AGAIN),
                }
                if holder.inspect_until.is_some() {
                    timeout = Some(LOOK_AGAIN);
                } else if let Some(end) = holder.orphaned.iter().map(|(_, end)| *end).min() {
                    let left = end.saturating_duration_since(Instant::now());
                    timeout = Some(timeout.map_or(left, |t| t.min(left)));
                }
            }
            Role::Member(link) => fds.push(input(link.as_fd())),
            Role::Seeking { pause } => timeout = Some(*pause),
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
        let Role::Holder(holder) = &mut self.role else {
            return;
        };
        if let Some(until) = holder.settle_until {
            let missing = |slot| {
                slot != self.slot
                    && !holder.peers.iter().any(|p| p.slot == Some(slot))
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
        let Role::Holder(holder) = &mut self.role else {
            return;
        };
        for datagram in self.batch.iter() {
            for bytes in datagram.segments() {
                let counters = &self.shared.counters;
                let target = match route(bytes).filter(|_| bytes.len() <= message::MAD_BYTES_MAX) {
                    None => {
                        counters.malformed.fetch_add(1, Relaxed);
                        continue;
                    }
                    Some(Route::Everyone) => {
                        for peer in &holder.peers {
                            let src = datagram.src;
                            let _ = message::send(&peer.fd, &Message::Mad { src, bytes });
                        }
                        Target::Own
                    }
                    Some(to) => target(&self.shared, &holder.peers, self.slot, to),
                };
                match target {
                    Target::Own => {
                        counters.delivered.fetch_add(1, Relaxed);
                        (self.calls.deliver)(MadDatagram {
                            src: datagram.src,
                            bytes: bytes.to_vec(),
                        });
                    }
                    Target::Peer(i) => {
                        let peer = &mut holder.peers[i];
                        match message::send(
                            &peer.fd,
                            &Message::Mad {
                                src: datagram.src,
                                bytes,
                            },
                        ) {
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
        let Role::Holder(holder) = &mut self.role else {
            return;
        };
        let (now, names, ledger) = (Instant::now(), &self.shared.names, &self.ledger);
        if let Some(until) = holder.inspect_until {
            for slot in (1..SLOTS as u8).filter(|slot| *slot != self.slot) {
                let is_orphaned = holder.orphaned.iter().any(|(orphaned, _)| *orphaned == slot);
                if !is_orphaned && ledger.is_dirty(slot) && !names.is_slot_claimed(slot) {
                    holder.orphaned.push((slot, now + REST_TIME));
                    (self.calls.disconnect_orphans)(ledger.read(slot));
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
            let Role::Holder(holder) = &self.role else { return };
            let Ok(fd) = accept_with(&holder.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else {
                break;
            };
            // Another user learns this process's identity from its credentials, and gets nothing.
            if !udp::peer_credentials(&fd).is_ok_and(|(uid, _)| user_of(uid) == User::Own) {
                continue;
            }
            if holder.peers.len() >= PEERS_MAX {
                self.read_peers();
            }
            let Role::Holder(holder) = &mut self.role else {
                return;
            };
            if holder.peers.len() >= PEERS_MAX {
                // Connections that have not announced themselves make room, the oldest first.
                let Some(i) = holder.peers.iter().position(|p| p.slot.is_none()) else {
                    continue;
                };
                holder.peers.remove(i);
            }
            let mut descriptors = self.sockets.descriptors();
            descriptors.push(self.ledger.as_fd());
            let welcome = Message::Welcome {
                version: message::VERSION,
                next_slot: self.next_slot,
            };
            if message::send_with_descriptors(&fd, &welcome, &descriptors).is_ok() {
                holder.peers.push(Peer {
                    fd,
                    slot: None,
                    services: Vec::new(),
                    gone: false,
                });
            }
        }
        self.read_peers();
    }

    fn read_peers(&mut self) {
        let Role::Holder(holder) = &mut self.role else {
            return;
        };
        let next_slot = self.next_slot;
        for i in 0..holder.peers.len() {
            for _ in 0..MESSAGES_PER_TURN {
                let peer = &mut holder.peers[i];
                let len = match message::receive(&peer.fd, &mut self.buffer) {
                    Err(Errno::AGAIN) => break,
                    Err(_) | Ok(0) => {
                        peer.gone = true;
                        break;
                    }
                    Ok(len) => len,
                };
                match Message::decode(&self.buffer[..len]) {
                    Some(Message::Announce { slot, services }) if slot != self.slot => {
                        if peer.slot != Some(slot) {
                            self.next_slot = after(slot);
                            // The slot's new process has cleared it.
                            holder.orphaned.retain(|(orphaned, _)| *orphaned != slot);
                        }
                        peer.slot = Some(slot);
                        peer.services = services;
                        // A slot has one process, and only its latest connection counts.
                        for other in holder.peers.iter_mut().enumerate().filter(|(j, _)| *j != i) {
                            other.1.gone |= other.1.slot == Some(slot);
                        }
                    }
                    _ => {
                        peer.gone = true;
                        break;
                    }
                }
            }
        }
        if holder.peers.iter().any(|p| p.gone && p.slot.is_some()) {
            holder.inspect_until = Some(Instant::now() + INSPECTION_TIME);
        }
        holder.peers.retain(|p| !p.gone);
        if self.next_slot != next_slot {
            for peer in &holder.peers {
                // A member that does not read misses a hint.
                let _ = message::send(&peer.fd, &Message::NextSlot(self.next_slot));
            }
        }
    }

    fn follow(&mut self) {
        let Role::Member(link) = &self.role else { return };
        for _ in 0..MESSAGES_PER_TURN {
            let received = match message::receive(link, &mut self.buffer) {
                Err(Errno::AGAIN) => return,
                Err(_) | Ok(0) => None,
                Ok(len) => Message::decode(&self.buffer[..len]),
            };
            match received {
                Some(Message::Mad { src, bytes }) => (self.calls.deliver)(MadDatagram {
                    src,
                    bytes: bytes.to_vec(),
                }),
                Some(Message::NextSlot(slot)) => self.next_slot = slot,
                // The greeting of a new holder, whose sockets this process already has.
                Some(Message::Welcome {
                    version: message::VERSION,
                    ..
                }) => {}
                _ => {
                    self.shared.state().link = None;
                    self.role = Role::Seeking {
                        pause: Duration::ZERO,
                    };
                    return;
                }
            }
        }
    }

    /// Becomes the holder, or finds it. The holder's name belongs to one process at a time, so at most one becomes the holder.
    fn seek(&mut self) {
        let Role::Seeking { pause } = &mut self.role else {
            return;
        };
        *pause = (*pause * 2).clamp(SEEK_PAUSE_MIN, SEEK_PAUSE_MAX);
        if let Ok(listener) = self.shared.names.claim_holder() {
            if rustix::net::listen(&listener, BACKLOG).is_ok() {
                let settle_until = Some(Instant::now() + SETTLE_TIME);
                self.role = Role::Holder(Holder {
                    listener,
                    peers: Vec::new(),
                    settle_until,
                    inspect_until: None,
                    orphaned: Vec::new(),
                });
            }
            return;
        }
        let Ok(link) = self.shared.names.connect_holder() else {
            return;
        };
        if !udp::peer_credentials(&link).is_ok_and(|(uid, _)| user_of(uid) == User::Own) {
            *pause = FOREIGN_PAUSE;
            return;
        }
        let Ok(for_state) = link.try_clone() else { return };
        let mut state = self.shared.state();
        state.link = Some(for_state);
        state.announce();
        if state.link.is_some() {
            drop(state);
            self.role = Role::Member(link);
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

fn target(shared: &Shared, peers: &[Peer], own_slot: u8, to: Route) -> Target {
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

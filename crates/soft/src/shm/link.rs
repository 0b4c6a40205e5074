//! Links between the engines of one host: how they begin, carry messages, and end.
//!
//! Every process of an address listens under the name of its slot. So the peer of a queue pair is found by the peer's address and the top
//! byte of its QPN, within one network namespace, just as its UDP socket is. A link carries the same packets as UDP, so the queue pairs
//! need no agreement: a sender may change from one to the other at any packet, and when a link breaks nothing is lost but speed. The
//! link's connection ends with the peer, however the peer dies.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::trace::Note;
use rdmux_rnic::{
    Arrival, Fill, Grantable, LKey, LinkProgress, NoRings, Part, PeerRing, QpInfo, Qpn, RKey, RingBytes,
    Rings, Rnic, Taken, Ticket, Time, end_packet,
};
use rdmux_shm::{
    Channel, Corrupt, Given, Meta, NameError, NapWord, NotLent, Offer, Process, Segment, Side, Stay, Stays,
    nap, segment,
};
use rdmux_verbs::DeviceModeration;
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_verbs::provider::user::{ROOT, check_user};
use rdmux_verbs::provider::{NotDirect, Refusal, Why};
use rdmux_verbs::resources::places::connect_slot;
use rdmux_verbs::resources::report::{Answer, Question, Setting};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, accept_with};

use super::callers::{CallerLinks, PeerLink};
use super::message::{self, LinkMessage};
use crate::capture::{Capture, Filter};
use crate::group::SLOTS;
use crate::port::RnicPort;
use crate::udp;

mod lend;
mod share;
mod tell;

#[cfg(test)]
mod tests;

/// Most links of an engine, including those that are being established.
const LINKS_MAX: usize = 64;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;
/// Messages read from one peer per pass.
const MESSAGES_PER_PASS: usize = 64;
/// Records taken from one link per pass.
pub(super) const RECORDS_PER_PASS: usize = 16;
/// Payload bytes from which on a request names its memory: below, two copies in the caches cost no more than the peer's access.
const NAMED_BYTES_MIN: usize = 16 << 10;
/// Links at which a call of [`Links::have_news`] looks: with more of them a caller would see less often what comes without the rings.
pub(crate) const LINKS_PER_LOOK: usize = 8;
/// Longer than any request.
const REQUEST_BYTES_MAX: usize = 1 << 19;
/// Queue pairs whose reasons for using packets are kept; beyond that, reasons of destroyed queue pairs are discarded.
const REASONS_MAX: usize = 1024;
/// Time for which this side does not ask a peer again after it could not link to the peer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Returns the slot of a QPN's process.
pub(crate) fn slot_of(qpn: Qpn) -> u8 {
    (qpn.value() >> 16) as u8 % SLOTS as u8
}

/// Returns the device that a queue pair talks to: its address and slot.
fn peer_of(info: &QpInfo) -> Option<(IpAddr, u8)> {
    Some((info.path?.dst, slot_of(info.dest_qpn)))
}

#[derive(Debug)]
enum LinkState {
    /// Accepted; the peer has sent nothing yet.
    Unknown,
    /// A root process, while this process belongs to another user: it may list the objects, and nothing else.
    Looks,
    /// Asked for by this side, without an answer yet; with its channel.
    Asked(Box<Channel>),
    Up(Box<Channel>),
    /// To be removed.
    Over,
}

#[derive(Debug)]
struct ShmLink {
    id: u64,
    /// The epoll set that contains the connection.
    control: Arc<OwnedFd>,
    socket: OwnedFd,
    /// Process number of the peer; 0 when the peer is in another PID namespace.
    pid: i32,
    process: Result<Arc<Process>, NotDirect>,
    /// Address and slot of the peer. Known from the start if this side asked, else from the greeting.
    peer: Option<(IpAddr, u8)>,
    open: Arc<AtomicBool>,
    /// Set when the link is to end although the peer lives.
    alive: bool,
    state: LinkState,
    /// The link as callers use it, once it has been up.
    by_callers: Option<Arc<PeerLink>>,
}

/// All links of an engine.
#[derive(Debug)]
pub(crate) struct Links {
    address: IpAddr,
    slot: u8,
    on: bool,
    /// `None` when the engine is closed, or somebody else holds the name.
    listener: Option<OwnedFd>,
    /// Readable when there is work for [`Links::serve`].
    control: Arc<OwnedFd>,
    /// Epoll set that is readable when a peer has rung its doorbell, and when anything else has arrived: see [`Links::awake`].
    doorbells: Arc<OwnedFd>,
    list: Vec<ShmLink>,
    next_id: u64,
    /// Peers without a link, with the reason and the time of the last attempt.
    refused: HashMap<(IpAddr, u8), (Why, Instant)>,
    /// Queue pairs that wait for a link, by their peers.
    waiting: Vec<((IpAddr, u8), Qpn)>,
    /// Reasons why queue pairs did not get the memory that they asked for last.
    not_direct: HashMap<Qpn, NotDirect>,
    /// Number of sleepers that wait for a peer to ring its doorbell.
    asleep: u32,
    /// The link from which the last train came.
    heard_last: u64,
    /// Set when a connection could not be accepted, for want of a descriptor.
    left_waiting: bool,
    /// Set when a link has come up.
    met: bool,
    /// Set while memory is granted and asked for; else all data goes by packets.
    grants: bool,
    /// Peers that may still be inside of memory that was revoked from them.
    stays: Arc<Stays>,
    /// Set when packets get lost on purpose.
    loses: bool,
    /// The link whose peer has the device captured.
    capturing: Option<u64>,
    /// Policy of the device's completion queues, for clients that look or change it.
    moderation: Arc<DeviceModeration>,
    /// Memories of the program that move into files.
    sharings: share::Sharings,
    /// Memories that peers are to be lent.
    lendings: lend::Lendings,
    /// Set when requests have ended of which no peer tells those who sleep.
    untold_ends: bool,
    no_rings: NoRings,
    /// The links that are up, for callers that do without the engine.
    callers: Arc<CallerLinks>,
    /// Index in `list` at which the link to a slot was found last.
    by_slot: [u8; SLOTS],
    /// Index in `list` of the link at which [`Links::have_news`] has looked last.
    looked_at: usize,
    buffer: Vec<u8>,
}

/// Event data of the listener in the `control` epoll set; links have numbers from 1.
const LISTENER: u64 = 0;
/// Bit that marks the event data of a link's process there.
const DEATH: u64 = 1 << 63;

impl Links {
    /// `listener` is bound to the name of the slot, without which nobody can tell who this process is; `control` is an epoll set, and
    /// `doorbells` the one that gets the doorbells.
    pub(crate) fn new(
        address: IpAddr,
        slot: u8,
        listener: Option<OwnedFd>,
        control: OwnedFd,
        doorbells: Arc<OwnedFd>,
        on: bool,
    ) -> Links {
        Links {
            address,
            slot,
            on,
            listener,
            control: Arc::new(control),
            doorbells,
            list: Vec::new(),
            next_id: LISTENER + 1,
            refused: HashMap::new(),
            moderation: Arc::default(),
            waiting: Vec::new(),
            not_direct: HashMap::new(),
            asleep: 0,
            heard_last: LISTENER,
            left_waiting: false,
            met: false,
            grants: true,
            stays: Arc::default(),
            loses: false,
            capturing: None,
            sharings: share::Sharings::default(),
            lendings: lend::Lendings::default(),
            untold_ends: false,
            no_rings: NoRings,
            callers: Arc::default(),
            by_slot: [0; SLOTS],
            looked_at: 0,
            buffer: Vec::with_capacity(1 << 16),
        }
    }

    /// Lets others ask for links. Called once the engine that serves them exists.
    pub(crate) fn listen(&self) -> Result<(), Errno> {
        let Some(listener) = &self.listener else {
            return Ok(());
        };
        rustix::net::listen(listener, BACKLOG)?;
        // Edge-triggered: a connection that cannot be accepted, for want of a descriptor, does not keep the engine awake.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(
            &self.control,
            listener,
            epoll::EventData::new_u64(LISTENER),
            flags,
        )
    }

    /// Restricts the device to packets: it grants no memory, and asks for none.
    pub(crate) fn keep_to_packets(&mut self) {
        self.grants = false;
    }

    /// Declares that packets get lost here on purpose, before they go into a ring or after they come out of one.
    pub(crate) fn lose_packets(&mut self) {
        self.loses = true;
    }

    /// Returns how far a peer has come with the data sent to it; `None` where packets may get lost.
    pub(crate) fn progress(&self, peer: (IpAddr, u8)) -> Option<LinkProgress> {
        let link = self.list.iter().find(|link| link.peer == Some(peer))?;
        let LinkState::Up(channel) = &link.state else {
            return None;
        };
        (!self.loses && !channel.peer_loses()).then(|| channel.progress())
    }

    /// Ends all links, and releases the slot's name.
    pub(crate) fn close(&mut self) {
        self.on = false;
        self.listener = None;
        self.callers.set(Vec::new());
        self.list.clear();
    }

    fn up(&mut self) -> impl Iterator<Item = ((IpAddr, u8), &mut Channel)> {
        self.list
            .iter_mut()
            .filter_map(|link| match (&mut link.state, link.peer) {
                (LinkState::Up(channel), Some(peer)) => Some((peer, &mut **channel)),
                _ => None,
            })
    }

    // Packets.

    /// Returns whether there is no link.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns whether trains wait for room of which the peer may notify nobody.
    #[inline]
    pub(crate) fn have_waiting(&self) -> bool {
        let waits = |link: &ShmLink| matches!(&link.state, LinkState::Up(channel) if channel.has_waiting());
        self.list.iter().any(waits)
    }

    /// Returns the link to the process of a slot, if it is up.
    #[inline]
    fn link_to(&mut self, peer: (IpAddr, u8)) -> Option<&mut ShmLink> {
        let is_it = |link: &ShmLink| link.peer == Some(peer) && matches!(link.state, LinkState::Up(_));
        let hint = self.by_slot.get_mut(usize::from(peer.1))?;
        if !self.list.get(usize::from(*hint)).is_some_and(is_it) {
            *hint = self.list.iter().position(is_it)? as u8;
        }
        self.list.get_mut(usize::from(*hint))
    }

    /// Returns the rings for requests: none while all goes in packets that faults, captures or traces see.
    #[inline]
    pub(crate) fn rings(&mut self, rnic: &RnicPort) -> &mut dyn Rings {
        if rnic.sees_packets() {
            &mut self.no_rings
        } else {
            self
        }
    }

    /// Returns whether requests have ended that the caller has to look at ([`Links::receive`]), because no peer tells those who sleep.
    #[inline]
    pub(crate) fn take_untold_ends(&mut self) -> bool {
        std::mem::take(&mut self.untold_ends)
    }

    /// Wakes the peers that wait for the ends of their requests.
    #[inline]
    pub(crate) fn tell_ends(&mut self) {
        for (_, channel) in self.up() {
            if channel.ends().owes_ends() {
                channel.tell_ends();
            }
        }
    }

    /// Sends a train of packets to the process of a slot; returns false if there is no link to it.
    #[inline]
    pub(crate) fn send(&mut self, peer: (IpAddr, u8), meta: Meta, bytes: &[u8]) -> bool {
        let Some(link) = self.link_to(peer) else {
            return false;
        };
        let LinkState::Up(channel) = &mut link.state else {
            return false;
        };
        let sent = channel.send(meta, bytes);
        if sent.is_err() {
            link.give_up();
        }
        sent.is_ok()
    }

    /// Returns whether there is a link to the process of a slot.
    pub(crate) fn reach(&self, peer: (IpAddr, u8)) -> bool {
        let up = |link: &ShmLink| link.peer == Some(peer) && matches!(link.state, LinkState::Up(_));
        self.list.iter().any(up)
    }

    /// Looks at the next few links; returns whether one of their peers has sent something, or has taken requests.
    #[inline]
    pub(crate) fn have_news(&mut self) -> bool {
        for _ in 0..self.list.len().min(LINKS_PER_LOOK) {
            let next = self.looked_at + 1;
            self.looked_at = if next < self.list.len() { next } else { 0 };
            if let LinkState::Up(channel) = &self.list[self.looked_at].state
                && channel.has_news()
            {
                return true;
            }
        }
        false
    }

    /// Returns whether there is nothing to do before a peer does something.
    pub(crate) fn can_wait(&self) -> bool {
        !self.sharings.are_due()
            && !self.lendings.are_due()
            && !self.list.iter().any(ShmLink::owes_ends)
            && !self.untold_ends
            && !self.have_waiting()
    }

    /// Processes arrived packets; returns how many trains. `unsent`: whether the device has trains that wait for a socket.
    #[inline]
    pub(crate) fn receive(&mut self, rnic: &mut RnicPort, now: Time, unsent: bool) -> usize {
        let mut total = 0;
        if self.sharings.are_due() {
            self.share(rnic);
        }
        if self.lendings.are_due() {
            self.lend(rnic);
        }
        for link in &mut self.list {
            let (LinkState::Up(channel), Some((peer, _))) = (&mut link.state, link.peer) else {
                continue;
            };
            // Returns the room of requests that callers have taken. Waits for a caller that has the link: it executes RECORDS_PER_PASS requests
            // at most, of less than NAMED_BYTES_MIN bytes each.
            channel.ends().release();
            if channel.has_waiting() && channel.send_waiting().is_err() {
                link.give_up();
                continue;
            }
            if channel.look_for_ends().is_err() {
                link.give_up();
                continue;
            }
            if channel.is_ready() {
                let addresses = (peer, self.address);
                let (taken, result) = take_records(
                    rnic,
                    now,
                    channel,
                    addresses,
                    unsent,
                    (&self.callers, &mut self.buffer),
                );
                total += taken;
                self.heard_last = link.id;
                channel.release();
                if result.is_err() {
                    link.give_up();
                    continue;
                }
                if taken == RECORDS_PER_PASS {
                    // Some that are left may have been sent before the peer took the requests.
                    continue;
                }
            }
            total += usize::from(end_requests(rnic, now, channel));
            self.untold_ends |= channel.has_untold_ends();
        }
        total
    }

    /// Prepares for the sleep of a caller or thread: peers ring their doorbells for packets that they send, and for room that trains wait
    /// for. Returns false if something is there already; then nobody sleeps. [`Links::awake`] ends the sleep.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        if self.sharings.can_go_on() {
            return false;
        }
        self.asleep += 1;
        for link in &mut self.list {
            let LinkState::Up(channel) = &mut link.state else {
                continue;
            };
            match channel.prepare_sleep() {
                Ok(true) => {}
                Ok(false) => {
                    self.awake();
                    return false;
                }
                Err(Corrupt) => link.give_up(),
            }
        }
        true
    }

    /// Prepares for a nap of one caller on the words of all links, if [`Links::can_nap`]: peers end it by their next packets. Returns false if
    /// something is there already; then nobody naps. [`Links::end_nap`] ends the nap. `words` gets the words to nap on.
    pub(crate) fn prepare_nap(&mut self, words: &mut Vec<NapWord>) -> bool {
        words.clear();
        if self.sharings.can_go_on() {
            return false;
        }
        for link in &mut self.list {
            let LinkState::Up(channel) = &mut link.state else {
                continue;
            };
            let Some(word) = channel.prepare_nap() else {
                self.end_nap();
                return false;
            };
            words.push(word);
        }
        true
    }

    /// Lets peers ring their doorbells again during a nap, after they have rung. Returns false if requests have ended meanwhile.
    pub(crate) fn announce_nap(&mut self) -> bool {
        let mut calm = true;
        for (_, channel) in self.up() {
            calm &= channel.announce_nap();
        }
        calm
    }

    /// Ends the nap.
    pub(crate) fn end_nap(&mut self) {
        self.up().for_each(|(_, channel)| channel.end_nap());
    }

    /// Returns whether a caller can nap: there are links, not too many, and no train waits for room, for which peers ring the doorbell.
    pub(crate) fn can_nap(&mut self) -> bool {
        (1..=nap::WORDS_MAX).contains(&self.up().count()) && !self.have_waiting()
    }

    /// Takes the rings of doorbells that were rung late, while nobody sleeps on them.
    pub(crate) fn answer_doorbells(&mut self) {
        if self.asleep == 0 {
            self.up().for_each(|(_, channel)| channel.answer_doorbell());
        }
    }

    /// Ends the sleep of one sleeper. The last one stops the peers from ringing their doorbells, and answers those that were rung.
    pub(crate) fn awake(&mut self) {
        self.asleep = self.asleep.saturating_sub(1);
        if self.asleep > 0 {
            return;
        }
        let mut rung = false;
        for (_, channel) in self.up() {
            rung |= channel.awake();
        }
        if !rung {
            // Something else woke the sleeper, or a doorbell was rung late.
            self.up().for_each(|(_, channel)| channel.answer_doorbell());
        }
    }

    /// Returns the CPU of the peer that sent the last train, if it is known.
    #[inline]
    pub(crate) fn peer_cpu(&self) -> Option<u32> {
        let link = self.list.iter().find(|link| link.id == self.heard_last)?;
        let LinkState::Up(channel) = &link.state else {
            return None;
        };
        channel.peer_cpu()
    }

    /// Shows peers the CPU on which this process looks for their packets.
    pub(crate) fn tell_cpu(&mut self, cpu: u32) {
        for (_, channel) in self.up() {
            channel.tell_cpu(cpu);
        }
    }

    // Establishment of links.

    /// Links to the process of a queue pair's peer, if that process is on this host.
    pub(crate) fn want(&mut self, rnic: &mut Rnic, qpn: Qpn, info: &QpInfo) {
        // The queue pair may have waited for another peer.
        self.waiting.retain(|(_, waits)| *waits != qpn);
        let Some(peer) = peer_of(info) else { return };
        self.not_direct.remove(&qpn);
        if self
            .list
            .iter()
            .any(|link| link.peer == Some(peer) && matches!(link.state, LinkState::Up(_)))
        {
            rnic.set_local(qpn, true);
            return;
        }
        rnic.set_local(qpn, false);
        let refused_just_now = |(_, since): &(Why, Instant)| since.elapsed() < ASK_AGAIN;
        if self.refused.get(&peer).is_some_and(refused_just_now) {
            return;
        }
        self.waiting.push((peer, qpn));
        if self.list.iter().any(|link| link.peer == Some(peer)) {
            return;
        }
        if let Err(why) = self.connect(peer) {
            self.refuse(peer, why);
        }
    }

    /// Returns why packets to the peer of a queue pair go by UDP; `None` if they do not.
    pub(crate) fn why_not(&self, info: &QpInfo) -> Option<Why> {
        let peer = peer_of(info)?;
        let mut links = self.list.iter().filter(|link| link.peer == Some(peer));
        if links.clone().any(|link| matches!(link.state, LinkState::Up(_))) {
            return None;
        }
        if links.any(|link| matches!(link.state, LinkState::Asked(_))) {
            return Some(Why::NotYet);
        }
        Some(self.refused.get(&peer).map_or(Why::NotHere, |(why, _)| *why))
    }

    fn refuse(&mut self, peer: (IpAddr, u8), why: Why) {
        if self.refused.len() >= 2 * LINKS_MAX {
            self.refused.retain(|_, (_, since)| since.elapsed() < ASK_AGAIN);
        }
        self.refused.insert(peer, (why, Instant::now()));
        self.waiting.retain(|(waits_for, _)| *waits_for != peer);
    }

    fn connect(&mut self, peer: (IpAddr, u8)) -> Result<(), Why> {
        if !self.on {
            return Err(Why::Off);
        }
        if self.list.len() >= LINKS_MAX {
            return Err(Why::Refused(Refusal::Full));
        }
        let socket = connect_slot(peer.0, peer.1).map_err(|errno| match errno {
            Errno::CONNREFUSED => Why::NotHere,
            errno => Why::System(errno),
        })?;
        let pid = check_user(&socket)?;
        let (segment, file) = Segment::create().map_err(Why::System)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (doorbell, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(Why::System)?;
        let hello = LinkMessage::Hello {
            address: self.address,
            slot: self.slot,
        };
        let process = Process::of(pid, socket.as_fd());
        let channel = Channel::new(segment, Side::Asking, doorbell, process.clone().ok(), &self.stays);
        channel.tell_loses(self.loses);
        say(&socket, &hello, &[file.as_fd(), theirs.as_fd()]).map_err(|errno| match errno {
            Errno::PIPE | Errno::CONNRESET => last_word(&socket),
            errno => Why::System(errno),
        })?;
        self.add(
            socket,
            pid,
            process,
            Some(peer),
            LinkState::Asked(Box::new(channel)),
        )
        .map_err(Why::System)?;
        // The peer's earlier answer says nothing about the present.
        self.refused.remove(&peer);
        Ok(())
    }

    fn add(
        &mut self,
        socket: OwnedFd,
        pid: i32,
        process: Result<Arc<Process>, NotDirect>,
        peer: Option<(IpAddr, u8)>,
        state: LinkState,
    ) -> Result<(), Errno> {
        let id = self.next_id;
        self.next_id += 1;
        watch(&self.control, socket.as_fd(), id)?;
        if let Ok(process) = &process {
            // If the process has forked, its sockets outlive it.
            let once = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            epoll::add(
                &self.control,
                process.fd(),
                epoll::EventData::new_u64(id | DEATH),
                once,
            )?;
        }
        self.list.push(ShmLink {
            id,
            control: Arc::clone(&self.control),
            socket,
            pid,
            process,
            peer,
            open: Arc::new(AtomicBool::new(true)),
            alive: false,
            state,
            by_callers: None,
        });
        Ok(())
    }

    /// Handles the input of peers: connections, messages, and ends. Returns whether a link has come up.
    pub(crate) fn serve(&mut self, rnic: &mut RnicPort, now: Time) -> bool {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let n = epoll::wait(&self.control, &mut events[..], Some(&at_once)).unwrap_or(0);
        if self.left_waiting {
            self.accept();
        }
        for event in &events[..n] {
            match event.data.u64() {
                LISTENER => self.accept(),
                id if id & DEATH != 0 => {
                    let id = id & !DEATH;
                    self.hear(rnic, now, id);
                    if let Some(i) = self.list.iter().position(|link| link.id == id) {
                        self.part(rnic, now, i);
                    }
                }
                id => self.hear(rnic, now, id),
            }
        }
        self.list.retain(|link| !matches!(link.state, LinkState::Over));
        self.callers
            .set(self.list.iter_mut().filter_map(ShmLink::by_callers).collect());
        std::mem::take(&mut self.met)
    }

    /// Has clients see and change this policy.
    pub(crate) fn set_moderation(&mut self, moderation: Arc<DeviceModeration>) {
        self.moderation = moderation;
    }

    /// Returns the links that are up, for callers that do without the engine.
    pub(crate) fn callers(&self) -> Arc<CallerLinks> {
        Arc::clone(&self.callers)
    }

    /// Notes that requests have ended of which no peer tells those who sleep.
    pub(crate) fn note_untold_ends(&mut self) {
        self.untold_ends = true;
    }

    fn accept(&mut self) {
        self.left_waiting = false;
        // One more than the backlog may wait.
        for _ in 0..=BACKLOG {
            let Some(listener) = &self.listener else { return };
            let socket = match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => {
                    self.left_waiting = errno != Errno::AGAIN;
                    return;
                }
            };
            // Another user learns this process's identity from its credentials, and gets nothing; root may query.
            let (pid, only_looks) = match check_user(&socket) {
                Ok(pid) => (pid, false),
                Err(Why::OtherUser(ROOT)) => (0, true),
                Err(why) => {
                    if why == Why::UnknownUser {
                        let _ = say(&socket, &LinkMessage::Refused(Refusal::UnknownUser), &[]);
                    }
                    continue;
                }
            };
            if self.list.len() >= LINKS_MAX {
                let capturing = self.capturing;
                let unknown = |link: &ShmLink| {
                    matches!(link.state, LinkState::Unknown | LinkState::Looks)
                        && link.peer.is_none()
                        && capturing != Some(link.id)
                };
                let Some(i) = self.list.iter().position(unknown) else {
                    let _ = say(&socket, &LinkMessage::Refused(Refusal::Full), &[]);
                    continue;
                };
                self.list.remove(i);
            }
            let state = if only_looks {
                LinkState::Looks
            } else {
                LinkState::Unknown
            };
            let process = Process::of(pid, socket.as_fd());
            let _ = self.add(socket, pid, process, None, state);
        }
    }

    /// Reads the messages of one peer.
    fn hear(&mut self, rnic: &mut RnicPort, now: Time, id: u64) {
        for _ in 0..MESSAGES_PER_PASS {
            let Some(i) = self.list.iter().position(|link| link.id == id) else {
                return;
            };
            let mut buffer = [0; message::LEN_MAX];
            let received = receive_with_descriptors(&self.list[i].socket, &mut buffer);
            let heard = match received {
                Err(Errno::AGAIN) => return,
                // The peer has closed without reading all messages to it; the messages that it sent before are still to come.
                Err(Errno::CONNRESET) => continue,
                // The peer has gone.
                Ok((0, _)) => return self.part(rnic, now, i),
                Err(_) => None,
                Ok((len, descriptors)) => LinkMessage::decode(&buffer[..len]).and_then(|message| {
                    self.handle(rnic, now, i, message, descriptors)?;
                    Some(message)
                }),
            };
            match heard {
                None => {
                    self.list[i].leave();
                    return self.part(rnic, now, i);
                }
                // A page is long: others are served before the next one.
                Some(LinkMessage::List(_)) => return,
                Some(_) => {}
            }
        }
    }

    /// Handles a message; returns `None` if the link is to end.
    fn handle(
        &mut self,
        rnic: &mut RnicPort,
        now: Time,
        i: usize,
        message: LinkMessage,
        descriptors: Vec<OwnedFd>,
    ) -> Option<()> {
        let link = &mut self.list[i];
        match (message, &mut link.state) {
            (LinkMessage::Hello { address, slot }, LinkState::Unknown) => {
                self.welcome(i, address, slot, descriptors)?;
                self.tell_waiting(rnic, (address, slot));
            }
            (LinkMessage::Welcome, LinkState::Asked(_)) => {
                let peer = link.peer?;
                let LinkState::Asked(mut channel) = std::mem::replace(&mut link.state, LinkState::Over)
                else {
                    return None;
                };
                channel.add_doorbell_to(&self.doorbells).ok()?;
                link.state = LinkState::Up(channel);
                self.tell_waiting(rnic, peer);
            }
            (LinkMessage::Refused(refusal), LinkState::Asked(_)) => {
                let peer = link.peer?;
                self.refuse(peer, Why::Refused(refusal));
                return None;
            }
            (LinkMessage::Ask { rkey, of, by }, LinkState::Up(channel)) => {
                let peer = link.peer?;
                let ask = Ask { rkey, of, by };
                let lkey = LKey(rkey.0);
                let has_given = channel.has_given(of, lkey);
                if self.grants
                    && let Some(memory) = share::movable(rnic, peer, ask)
                    && (has_given || share::application(&memory).is_some_and(|it| self.sharings.moves(it)))
                {
                    let id = link.id;
                    self.begin_sharing(rnic, memory, lkey, Some((id, ask)));
                } else {
                    link.answer(rnic, ask, self.grants);
                }
            }
            (LinkMessage::Granted(offer), LinkState::Up(channel)) => {
                if !is_between(rnic, offer.by, link.peer?) {
                    return Some(());
                }
                match channel.take(&offer, descriptors, &link.process, &link.open) {
                    Ok(grant) => rnic.set_grant(now, offer.by, offer.rkey, Some(grant)),
                    Err(reason) => self.keep_reason(rnic, offer.by, reason),
                }
            }
            (LinkMessage::Denied { by, reason, .. }, LinkState::Up(_)) => {
                if is_between(rnic, by, link.peer?) {
                    self.keep_reason(rnic, by, NotDirect::Denied(reason));
                }
            }
            (LinkMessage::Capture { filter }, LinkState::Unknown) if link.peer.is_none() => {
                self.capture(rnic, now, i, filter, descriptors)?;
            }
            (LinkMessage::List(Question { object, from }), LinkState::Unknown | LinkState::Looks)
                if link.peer.is_none() =>
            {
                let page = self.page(rnic, object, from).encode();
                // A peer that does not read its pages gets no more.
                send_bytes(&self.list[i].socket, &page, &[]).ok()?;
            }
            (LinkMessage::Set(Setting::Moderation(policy)), LinkState::Unknown | LinkState::Looks)
                if link.peer.is_none() =>
            {
                self.moderation.set(policy);
                send_bytes(&link.socket, &Answer::Done.encode(), &[]).ok()?;
            }
            (LinkMessage::Lend(offer), LinkState::Up(channel)) => {
                let accepts = self.grants
                    && is_between(rnic, offer.by, link.peer?)
                    && channel
                        .borrow(&offer, descriptors, &link.process, &link.open)
                        .is_ok();
                let answer = LinkMessage::Lent {
                    index: offer.index,
                    generation: offer.generation,
                    accepts,
                };
                // A peer that does not read its messages keeps its memory.
                let _ = say(&link.socket, &answer, &[]);
            }
            (
                LinkMessage::Lent {
                    index,
                    generation,
                    accepts,
                },
                LinkState::Up(channel),
            ) => channel.answered(index, generation, accepts),
            // `Over`, or a message that is not allowed in this state.
            _ => return None,
        }
        Some(())
    }

    /// Takes the channel that the other side has made; returns `None` if the link is to end.
    fn welcome(&mut self, i: usize, address: IpAddr, slot: u8, descriptors: Vec<OwnedFd>) -> Option<()> {
        let link = &mut self.list[i];
        if !self.on {
            let _ = say(&link.socket, &LinkMessage::Refused(Refusal::Off), &[]);
            return None;
        }
        let [file, doorbell] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
        let segment = Segment::from_file(file.as_fd()).ok()?;
        let process = link.process.clone().ok();
        let mut channel = Channel::new(segment, Side::Answering, doorbell, process, &self.stays);
        channel.add_doorbell_to(&self.doorbells).ok()?;
        let slot = (1..SLOTS as u8).contains(&slot).then_some(slot)?;
        // Any process can claim this name: the sender must be the process that listens under it.
        let named = connect_slot(address, slot).ok()?;
        if check_user(&named) != Ok(link.pid) {
            return None;
        }
        channel.tell_loses(self.loses);
        say(&link.socket, &LinkMessage::Welcome, &[]).ok()?;
        link.peer = Some((address, slot));
        link.state = LinkState::Up(Box::new(channel));
        Some(())
    }

    /// Captures the engine's packets for another process; returns `None` if the link is to end.
    fn capture(
        &mut self,
        rnic: &mut RnicPort,
        now: Time,
        i: usize,
        filter: Filter,
        descriptors: Vec<OwnedFd>,
    ) -> Option<()> {
        let link = &self.list[i];
        if self.capturing.is_some() || rnic.is_captured() {
            let _ = say(&link.socket, &LinkMessage::Refused(Refusal::Full), &[]);
            return None;
        }
        let [file, done] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
        let device = format!("{}/{}", self.address, self.slot);
        rnic.capture(Capture::to(file, done, device, filter).ok()?);
        self.capturing = Some(link.id);
        say(&link.socket, &LinkMessage::Welcome, &[]).ok()?;
        self.keep_to_packets();
        self.revoke(|_| true);
        rnic.forget_grants(now);
        Some(())
    }

    fn tell_waiting(&mut self, rnic: &mut Rnic, peer: (IpAddr, u8)) {
        self.refused.remove(&peer);
        self.met = true;
        self.sharings.look_again();
        self.waiting.retain(|(waits_for, qpn)| {
            let is_it = *waits_for == peer;
            // The queue pair may have been reset meanwhile, and have another peer.
            if is_it && is_between(rnic, *qpn, peer) {
                rnic.set_local(*qpn, true);
            }
            !is_it
        });
    }

    /// Takes down a link. If the peer has gone, its connections end too, after all packets that it sent; else packets go by UDP.
    fn part(&mut self, rnic: &mut RnicPort, now: Time, i: usize) {
        if self.capturing == Some(self.list[i].id) {
            self.capturing = None;
            rnic.end_capture();
            self.grants = !rnic.keeps_to_packets();
            // Queue pairs ask for their grants again.
            rnic.forget_grants(now);
        }
        let link = &mut self.list[i];
        link.open.store(false, Ordering::Relaxed);
        let state = std::mem::replace(&mut link.state, LinkState::Over);
        let (peer, alive) = (link.peer, link.alive);
        let Some(peer) = peer else { return };
        let had = |qpn| slot_of(qpn) == peer.1;
        match state {
            LinkState::Asked(_) if !self.refused.contains_key(&peer) => self.refuse(peer, Why::NotHere),
            LinkState::Up(mut channel) => {
                if alive {
                    self.refuse(peer, Why::GivenUp);
                }
                let looked = channel.look_for_ends();
                // At most as many records as a ring holds: a peer that lives may keep sending.
                for _ in 0..segment::SLOTS / RECORDS_PER_PASS as u32 {
                    let addresses = (peer.0, self.address);
                    let (taken, result) = take_records(
                        rnic,
                        now,
                        &mut channel,
                        addresses,
                        true,
                        (&self.callers, &mut self.buffer),
                    );
                    channel.release();
                    if taken < RECORDS_PER_PASS || result.is_err() {
                        break;
                    }
                }
                if looked.is_ok() {
                    end_requests(rnic, now, &mut channel);
                }
                if !alive {
                    Self::note_gone(rnic, now, peer.0, had);
                    rnic.cm().peer_gone(now, peer.0, had);
                }
            }
            // This side gave the link up.
            LinkState::Unknown => self.refuse(peer, Why::GivenUp),
            _ => {}
        }
        for qpn in rnic.qps_to(peer.0, had) {
            rnic.set_local(qpn, false);
        }
    }

    /// Notes on the queue pairs concerned that the process of their peer has ended.
    fn note_gone(rnic: &mut Rnic, now: Time, peer: IpAddr, had: impl Fn(Qpn) -> bool) {
        for qpn in rnic.qps_to(peer, had) {
            rnic.note(now, qpn, Note::PeerGone);
        }
    }

    // Memory grants.

    /// Records why a queue pair does not get the memory that it asked for.
    fn keep_reason(&mut self, rnic: &Rnic, by: Qpn, reason: NotDirect) {
        if self.not_direct.len() >= REASONS_MAX {
            self.not_direct.retain(|qpn, _| rnic.query_qp(*qpn).is_some());
        }
        self.not_direct.insert(by, reason);
    }

    /// Asks the peer of a queue pair for memory.
    pub(crate) fn ask(&mut self, rnic: &Rnic, by: Qpn, rkey: RKey) {
        let Some(info) = rnic.query_qp(by) else { return };
        let Some(peer) = peer_of(&info) else { return };
        if !self.grants {
            return self.keep_reason(rnic, by, NotDirect::KeptToPackets);
        }
        let up = |link: &&ShmLink| link.peer == Some(peer) && matches!(link.state, LinkState::Up(_));
        if let Some(link) = self.list.iter().find(up) {
            let of = info.dest_qpn;
            // A peer that does not read its messages is not asked.
            let _ = say(&link.socket, &LinkMessage::Ask { rkey, of, by }, &[]);
        }
    }

    /// Revokes the grants for a queue pair.
    pub(crate) fn revoke_qp(&mut self, qpn: Qpn) {
        self.lendings.forget(|lending| lending.of == qpn);
        self.revoke(|given| given.qpn == qpn);
    }

    /// Returns the peers that may still be inside of memory that was granted for a queue pair.
    pub(crate) fn stays_of_qp(&self, qpn: Qpn) -> Vec<Arc<Stay>> {
        self.stays.of(|given| given.qpn == qpn)
    }

    /// Revokes the grants of a region. No peer can reach the region once the returned stays are over.
    #[must_use]
    pub(crate) fn revoke_region(&mut self, lkey: LKey) -> Vec<Arc<Stay>> {
        self.sharings.forget(lkey);
        self.lendings.forget(|lending| lending.lkey == lkey);
        self.revoke(|given| given.lkey == lkey);
        self.stays.of(|given| given.lkey == lkey)
    }

    fn revoke(&mut self, is_it: impl Fn(&Given) -> bool) {
        let mut inside = false;
        for (_, channel) in self.up() {
            inside |= channel.take_back(&is_it);
        }
        if inside {
            self.stays.wait_briefly(is_it);
        }
    }
}

impl Rings for Links {
    fn reach(&mut self, (dst, qpn): (IpAddr, Qpn)) -> bool {
        self.link_to((dst, slot_of(qpn))).is_some()
    }

    fn put(&mut self, (dst, qpn): (IpAddr, Qpn), ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> bool {
        let Some(link) = self.link_to((dst, slot_of(qpn))) else {
            return false;
        };
        let LinkState::Up(channel) = &mut link.state else {
            return false;
        };
        let put = channel.request(ticket, bytes, fill);
        let untold = channel.has_untold_ends();
        if put.is_err() {
            link.give_up();
        }
        self.untold_ends |= untold;
        put.unwrap_or(false)
    }

    fn ring_to(&mut self, (dst, qpn): (IpAddr, Qpn)) -> Option<Arc<dyn PeerRing>> {
        let link = self.link_to((dst, slot_of(qpn)))?.by_callers()?;
        Some(link)
    }

    fn named_bytes_min(&self) -> usize {
        NAMED_BYTES_MIN
    }

    fn put_named(&mut self, (dst, qpn): (IpAddr, Qpn), ticket: Ticket, heads: &[u8], parts: &[Part]) -> bool {
        let Some(link) = self.link_to((dst, slot_of(qpn))) else {
            return false;
        };
        let LinkState::Up(channel) = &mut link.state else {
            return false;
        };
        let put = channel.request_named(ticket, heads, parts);
        let untold = channel.has_untold_ends();
        match put {
            Err(NameError::Corrupt) => link.give_up(),
            Err(NameError::NotLent(NotLent::Offer(lkey))) if self.grants => {
                let (of, by) = (ticket.qpn, qpn);
                self.lendings.want(lend::Wanted { of, by, lkey });
            }
            _ => {}
        }
        self.untold_ends |= untold;
        put.unwrap_or(false)
    }
}

/// Takes records out of a ring; returns how many. `(peer, own)`: the addresses of the two devices. While responses wait to be sent
/// (`unsent`, or for room in the ring), requests are left to packets: their ends would overtake those.
fn take_records(
    rnic: &mut RnicPort,
    now: Time,
    channel: &mut Channel,
    (peer, own): (IpAddr, IpAddr),
    unsent: bool,
    (callers, buffer): (&CallerLinks, &mut Vec<u8>),
) -> (usize, Result<(), Corrupt>) {
    for taken in 0..RECORDS_PER_PASS {
        let record = match channel.receive() {
            Ok(Some(record)) => record,
            Ok(None) => return (taken, Ok(())),
            Err(corrupt) => return (taken, Err(corrupt)),
        };
        if let Some(meta) = record.train {
            channel.read(&record, buffer);
            rnic.handle_arrival(now, &arrival(peer, own, meta, buffer));
            continue;
        }
        callers.enliven();
        let at_once = !unsent && !channel.has_waiting();
        let taken = if record.parts > 0 {
            take_request(
                rnic,
                now,
                (peer, own),
                at_once,
                &channel.named_bytes(&record),
                buffer,
            )
        } else {
            take_request(rnic, now, (peer, own), at_once, &channel.bytes(&record), buffer)
        };
        channel.answer(&record, taken);
    }
    (RECORDS_PER_PASS, Ok(()))
}

/// Has the device carry out a request, or passes it on as a packet: always that if not `at_once`.
#[inline]
fn take_request(
    rnic: &mut RnicPort,
    now: Time,
    (peer, own): (IpAddr, IpAddr),
    at_once: bool,
    request: &impl RingBytes,
    buffer: &mut Vec<u8>,
) -> Taken {
    if at_once && let Some(taken) = rnic.handle_request(now, peer, request) {
        return taken;
    }
    // A longer one is none of the device's.
    buffer.clear();
    buffer.resize(request.bytes().min(REQUEST_BYTES_MAX), 0);
    if request.read(0, buffer).is_err() {
        return Taken::Again;
    }
    end_packet(buffer);
    let whole = Meta {
        segment_bytes: u16::MAX,
        traffic_class: 0,
    };
    let mut whole = arrival(peer, own, whole, buffer);
    whole.segment_bytes = buffer.len();
    rnic.handle_arrival(now, &whole);
    Taken::Deferred
}

/// Tells the device of the requests that the peer has taken; returns whether there were any.
fn end_requests(rnic: &mut Rnic, now: Time, channel: &mut Channel) -> bool {
    let mut last: Option<Ticket> = None;
    let mut any = false;
    while let Some((ticket, taken)) = channel.ended() {
        any = true;
        if taken != Taken::Done {
            if let Some(before) = last.take() {
                rnic.handle_taken(now, before, Taken::Done);
            }
            rnic.handle_taken(now, ticket, taken);
            continue;
        }
        // One that is done ends all before it.
        if let Some(before) = last.replace(ticket)
            && (before.qpn, before.incarnation) != (ticket.qpn, ticket.incarnation)
        {
            rnic.handle_taken(now, before, Taken::Done);
        }
    }
    if let Some(ticket) = last {
        rnic.handle_taken(now, ticket, Taken::Done);
    }
    any
}

/// A peer's request for memory: its key, the QP that is to serve it, and the QP that asks.
#[derive(Clone, Copy, Debug)]
struct Ask {
    rkey: RKey,
    of: Qpn,
    by: Qpn,
}

impl ShmLink {
    /// Returns whether the peer is to be woken when there is nothing else to do.
    fn owes_ends(&self) -> bool {
        matches!(&self.state, LinkState::Up(channel) if channel.ends().owes_ends())
    }

    /// Returns the link as callers use it, if it is up.
    fn by_callers(&mut self) -> Option<Arc<PeerLink>> {
        let (LinkState::Up(channel), Some((peer, _))) = (&self.state, self.peer) else {
            return None;
        };
        let new = || {
            Arc::new(PeerLink::new(
                peer,
                Arc::clone(channel.ends()),
                Arc::clone(&self.open),
            ))
        };
        Some(Arc::clone(self.by_callers.get_or_insert_with(new)))
    }

    /// Answers a peer that asks for memory.
    fn answer(&mut self, rnic: &mut Rnic, ask: Ask, grants: bool) {
        let (LinkState::Up(channel), Some(peer)) = (&mut self.state, self.peer) else {
            return;
        };
        let Ask { rkey, by, .. } = ask;
        let granted = if grants {
            grant(channel, rnic, peer, ask)
        } else {
            Err(Refusal::Off)
        };
        let (answer, file) = match granted {
            Ok((offer, file)) => (LinkMessage::Granted(offer), file),
            Err(reason) => (LinkMessage::Denied { rkey, by, reason }, None),
        };
        let files: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        // A peer that does not read its messages gets no answer.
        let _ = say(&self.socket, &answer, &files);
    }

    /// Ends this side of the connection, since the peer broke the rules or does not answer. The end of the connection takes down the rest.
    fn give_up(&mut self) {
        self.leave();
        self.state = LinkState::Unknown;
    }

    /// Tells the peer that the link ends, but not because this process has gone.
    fn leave(&mut self) {
        self.open.store(false, Ordering::Relaxed);
        self.alive = true;
        let _ = say(&self.socket, &LinkMessage::Over, &[]);
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        // Closing is not enough: a forked child holds the descriptors too.
        let _ = epoll::delete(&self.control, &self.socket);
        if let Ok(process) = &self.process {
            let _ = epoll::delete(&self.control, process.fd());
        }
    }
}

/// Grants a peer the memory that it asks for, if that is allowed.
fn grant(
    channel: &mut Channel,
    rnic: &mut Rnic,
    peer: (IpAddr, u8),
    ask: Ask,
) -> Result<(Offer, Option<OwnedFd>), Refusal> {
    let grantable = grantable(rnic, peer, ask)?;
    let Ask { rkey, of, by } = ask;
    channel.grant(&grantable, rkey, of, by)
}

/// Returns the memory that a peer asks for, if it may have it.
fn grantable(rnic: &mut Rnic, peer: (IpAddr, u8), ask: Ask) -> Result<Grantable, Refusal> {
    let asks_its_peer = rnic.query_qp(ask.of).is_some_and(|info| info.dest_qpn == ask.by);
    if !asks_its_peer || !is_between(rnic, ask.of, peer) {
        return Err(Refusal::NotGranted);
    }
    rnic.grantable(ask.of, ask.rkey).map_err(|_| Refusal::NotGranted)
}

/// Wraps a train that came through a ring.
fn arrival(src: IpAddr, dst: IpAddr, meta: Meta, bytes: &[u8]) -> Arrival<'_> {
    Arrival {
        src,
        src_port: udp::ROCE_PORT,
        dst,
        traffic_class: meta.traffic_class,
        bytes,
        segment_bytes: usize::from(meta.segment_bytes),
        local: true,
    }
}

/// Returns whether a queue pair of this device has its peer in the process of a slot.
fn is_between(rnic: &Rnic, qpn: Qpn, peer: (IpAddr, u8)) -> bool {
    rnic.query_qp(qpn)
        .is_some_and(|info| peer_of(&info) == Some(peer))
}

/// Returns why a peer closed the connection before it received anything.
fn last_word(socket: &OwnedFd) -> Why {
    let mut buffer = [0; message::LEN_MAX];
    match receive_with_descriptors(socket, &mut buffer).map(|(len, _)| LinkMessage::decode(&buffer[..len])) {
        Ok(Some(LinkMessage::Refused(refusal))) => Why::Refused(refusal),
        _ => Why::NotHere,
    }
}

fn say(socket: impl AsFd, message: &LinkMessage, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    send_bytes(socket, &message.encode(), descriptors)
}

fn watch(epoll: impl AsFd, fd: BorrowedFd<'_>, data: u64) -> Result<(), Errno> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
}

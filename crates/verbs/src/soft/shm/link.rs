//! Links between the engines of one host: how they begin, carry messages, and end.
//!
//! Every process of an address listens under the name of its slot. So the peer of a queue pair is found by the peer's address and the top
//! byte of its QPN, within one network namespace, just as its UDP socket is. A link carries the same packets as UDP, so the queue pairs
//! need no agreement: a sender may change from one to the other at any packet, and when a link breaks nothing is lost but speed. The
//! link's connection ends with the peer, however the peer dies.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdmux_memory::mapping::is_safe_to_map;
use rdmux_memory::{AnonymousMemory, ApplicationMemory};
use rdmux_rnic::trace::Note;
use rdmux_rnic::{Access, Arrival, Fault, Grant, LKey, LinkProgress, QpInfo, Qpn, RKey, Rnic, Time};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, accept_with};

use super::gate::Gate;
use super::grant::{Granted, MAPPED, Process, Reach, Window};
use super::message::{self, Message, Refusal};
use super::revocation;
use super::ring::{Consumer, Corrupt, Meta, Producer, PushError, Wake};
use super::segment::{self, Area, GRANTS, GrantWords, Segment, Side};
use super::stay::{Given, Stay, Stays};
use super::why::{NotDirect, Why};
use crate::soft::capture::Capture;
use crate::soft::group::{self, SLOTS};
use crate::soft::port::Port;
use crate::soft::udp;
use crate::soft::user::{User, user_of};

mod tell;

#[cfg(test)]
mod tests;

/// Most links of an engine, including those that are being established.
const LINKS_MAX: usize = 64;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;
/// Messages read from one peer per turn.
const MESSAGES_PER_TURN: usize = 64;
/// Rings of one peer's doorbell taken per turn.
const RINGS_PER_TURN: usize = 64;
/// Records taken from one link per turn.
const RECORDS_PER_TURN: usize = 16;
/// Most bytes that wait for room in a ring; trains beyond that count as lost on a network.
const WAITING_BYTES_MAX: usize = 16 << 20;
/// Cost of a waiting train besides its bytes: its place in the queue, which may be twice as long as needed, and the allocator's overhead.
const WAITING_ENTRY_BYTES: usize = 2 * size_of::<(Meta, Box<[u8]>)>() + 16;
/// Queue pairs whose reasons for using packets are kept; beyond that, reasons of destroyed queue pairs are discarded.
const REASONS_MAX: usize = 1024;
/// Time for which this side does not ask a peer again after it could not link to the peer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Number of the user who may query everybody's devices.
pub(in crate::soft) const ROOT: u32 = 0;

/// Returns the slot of a QPN's process.
pub(crate) fn slot_of(qpn: Qpn) -> u8 {
    (qpn.value() >> 16) as u8 % SLOTS as u8
}

/// Returns the device that a queue pair talks to: its address and slot.
fn peer_of(info: &QpInfo) -> Option<(IpAddr, u8)> {
    Some((info.path?.dst, slot_of(info.dest_qpn)))
}

#[derive(Debug)]
enum State {
    /// Accepted; the peer has sent nothing yet.
    Unknown,
    /// A root process, while this process belongs to another user: it may list the objects, and nothing else.
    Looks,
    /// Asked for by this side, without an answer yet; with its rings.
    Asked(Box<Rings>),
    Up(Box<Rings>),
    /// To be removed.
    Over,
}

#[derive(Debug)]
struct Rings {
    segment: Arc<Segment>,
    side: Side,
    tx: Producer<Area>,
    rx: Consumer<Area>,
    doorbell: Doorbell,
    /// Trains that wait for room, and their bytes.
    waiting: VecDeque<(Meta, Box<[u8]>)>,
    waiting_bytes: usize,
    /// Set when the peer will ring the doorbell as soon as there is room.
    wants_room: bool,
    /// Regions granted to the peer, by the grants' indices.
    given: Vec<Option<Given>>,
    generation: u32,
    /// Gate of the next grants that need one; `None` before the first of them.
    gate: Option<Arc<Gate>>,
    process: Option<Arc<Process>>,
    stays: Arc<Stays>,
}

/// This process's end of a pair of sockets; a byte sent wakes the peer. (Not an eventfd: any other holder of one can make its writers
/// block.)
#[derive(Debug)]
struct Doorbell {
    socket: Arc<OwnedFd>,
    /// The epoll set that contains the socket, once it rings for this process.
    doorbells: Option<Arc<OwnedFd>>,
}

#[derive(Debug)]
struct Link {
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
    state: State,
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
    /// Readable when a peer has rung its doorbell: see [`Links::awake`].
    doorbells: Arc<OwnedFd>,
    list: Vec<Link>,
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
    buffer: Vec<u8>,
}

/// Event data of the listener in the `control` epoll set; links have numbers from 1.
const LISTENER: u64 = 0;
/// Bit that marks the event data of a link's process there.
const DEATH: u64 = 1 << 63;

impl Links {
    /// `listener` is bound to the name of the slot, without which nobody can tell who this process is; `control` is an epoll set.
    pub(crate) fn new(
        address: IpAddr,
        slot: u8,
        listener: Option<OwnedFd>,
        control: OwnedFd,
        on: bool,
    ) -> Result<Links, Errno> {
        let doorbells = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Links {
            address,
            slot,
            on,
            listener,
            control: Arc::new(control),
            doorbells: Arc::new(doorbells),
            list: Vec::new(),
            next_id: LISTENER + 1,
            refused: HashMap::new(),
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
            buffer: Vec::with_capacity(1 << 16),
        })
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
        let State::Up(rings) = &link.state else {
            return None;
        };
        let peer_loses = rings.segment.loses(rings.side.other()).load(Ordering::Relaxed) != 0;
        (!self.loses && !peer_loses).then(|| rings.progress())
    }

    /// Ends all links, and releases the slot's name.
    pub(crate) fn close(&mut self) {
        self.on = false;
        self.listener = None;
        self.list.clear();
    }

    pub(crate) fn doorbells(&self) -> BorrowedFd<'_> {
        self.doorbells.as_fd()
    }

    fn up(&mut self) -> impl Iterator<Item = ((IpAddr, u8), &mut Rings)> {
        self.list
            .iter_mut()
            .filter_map(|link| match (&mut link.state, link.peer) {
                (State::Up(rings), Some(peer)) => Some((peer, &mut **rings)),
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
        let waits = |link: &Link| matches!(&link.state, State::Up(rings) if !rings.waiting.is_empty());
        self.list.iter().any(waits)
    }

    /// Sends a train of packets to the process of a slot; returns false if there is no link to it.
    #[inline]
    pub(crate) fn send(&mut self, peer: (IpAddr, u8), meta: Meta, bytes: &[u8]) -> bool {
        for link in &mut self.list {
            if link.peer == Some(peer)
                && let State::Up(rings) = &mut link.state
            {
                let sent = rings.send(meta, bytes);
                if sent.is_err() {
                    link.give_up();
                }
                return sent.is_ok();
            }
        }
        false
    }

    /// Returns whether there is a link to the process of a slot.
    pub(crate) fn reach(&self, peer: (IpAddr, u8)) -> bool {
        let up = |link: &Link| link.peer == Some(peer) && matches!(link.state, State::Up(_));
        self.list.iter().any(up)
    }

    /// Processes arrived packets; returns how many trains.
    #[inline]
    pub(crate) fn receive(&mut self, rnic: &mut Port, now: Time) -> usize {
        let mut total = 0;
        for link in &mut self.list {
            let (State::Up(rings), Some((peer, _))) = (&mut link.state, link.peer) else {
                continue;
            };
            if !rings.waiting.is_empty() && rings.send_waiting().is_err() {
                link.give_up();
                continue;
            }
            if !rings.rx.is_ready() {
                continue;
            }
            let mut taken = 0;
            let result = loop {
                match rings.rx.pop(&mut self.buffer) {
                    Ok(Some(meta)) => {
                        rnic.handle_arrival(now, &arrival(peer, self.address, meta, &self.buffer));
                    }
                    Ok(None) => break Ok(()),
                    Err(corrupt) => break Err(corrupt),
                }
                taken += 1;
                if taken == RECORDS_PER_TURN {
                    break Ok(());
                }
            };
            total += taken;
            self.heard_last = link.id;
            let wake = rings.rx.release();
            rings.ring(wake);
            if result.is_err() {
                link.give_up();
            }
        }
        total
    }

    /// Prepares for the sleep of a caller or thread: peers ring their doorbells for packets that they send, and for room that trains wait
    /// for. Returns false if something is there already; then nobody sleeps. [`Links::awake`] ends the sleep.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.asleep += 1;
        for link in &mut self.list {
            let State::Up(rings) = &mut link.state else {
                continue;
            };
            match rings.prepare_sleep() {
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

    /// Ends the sleep of one sleeper. The last one stops the peers from ringing their doorbells, and answers those that were rung.
    pub(crate) fn awake(&mut self) {
        self.asleep = self.asleep.saturating_sub(1);
        if self.asleep > 0 {
            return;
        }
        let mut rung = false;
        for (_, rings) in self.up() {
            let wanted_room = std::mem::take(&mut rings.wants_room);
            if rings.rx.awake() || wanted_room {
                rung |= rings.doorbell.answer_one();
            }
        }
        if !rung {
            // Something else woke the sleeper, or a doorbell was rung late.
            self.up().for_each(|(_, rings)| rings.doorbell.answer());
        }
    }

    /// Returns the CPU of the peer that sent the last train, if it is known.
    #[inline]
    pub(crate) fn peer_cpu(&self) -> Option<u32> {
        let link = self.list.iter().find(|link| link.id == self.heard_last)?;
        let State::Up(rings) = &link.state else {
            return None;
        };
        let cpu = rings.segment.cpu(rings.side.other());
        cpu.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Shows peers the CPU on which this process looks for their packets.
    pub(crate) fn tell_cpu(&mut self, cpu: u32) {
        for (_, rings) in self.up() {
            let word = rings.segment.cpu(rings.side);
            if word.load(Ordering::Relaxed) != cpu + 1 {
                word.store(cpu + 1, Ordering::Relaxed);
            }
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
            .any(|link| link.peer == Some(peer) && matches!(link.state, State::Up(_)))
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
        if links.clone().any(|link| matches!(link.state, State::Up(_))) {
            return None;
        }
        if links.any(|link| matches!(link.state, State::Asked(_))) {
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
        let socket = group::connect_slot(peer.0, peer.1).map_err(|errno| match errno {
            Errno::CONNREFUSED => Why::NotHere,
            errno => Why::System(errno),
        })?;
        let pid = check_user(&socket)?;
        let (segment, file) = Segment::create().map_err(Why::System)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (doorbell, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(Why::System)?;
        let hello = Message::Hello {
            address: self.address,
            slot: self.slot,
        };
        let loses = u32::from(self.loses);
        segment.loses(Side::Asking).store(loses, Ordering::Relaxed);
        say(&socket, &hello, &[file.as_fd(), theirs.as_fd()]).map_err(|errno| match errno {
            Errno::PIPE | Errno::CONNRESET => last_word(&socket),
            errno => Why::System(errno),
        })?;
        let process = Process::of(pid, socket.as_fd());
        let rings = Rings::new(segment, Side::Asking, doorbell, process.clone().ok(), &self.stays);
        self.add(socket, pid, process, Some(peer), State::Asked(Box::new(rings)))
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
        state: State,
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
        self.list.push(Link {
            id,
            control: Arc::clone(&self.control),
            socket,
            pid,
            process,
            peer,
            open: Arc::new(AtomicBool::new(true)),
            alive: false,
            state,
        });
        Ok(())
    }

    /// Handles the input of peers: connections, messages, and ends. Returns whether a link has come up.
    pub(crate) fn serve(&mut self, rnic: &mut Port, now: Time) -> bool {
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
        self.list.retain(|link| !matches!(link.state, State::Over));
        std::mem::take(&mut self.met)
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
                        let _ = say(&socket, &Message::Refused(Refusal::UnknownUser), &[]);
                    }
                    continue;
                }
            };
            if self.list.len() >= LINKS_MAX {
                let capturing = self.capturing;
                let unknown = |link: &Link| {
                    matches!(link.state, State::Unknown | State::Looks)
                        && link.peer.is_none()
                        && capturing != Some(link.id)
                };
                let Some(i) = self.list.iter().position(unknown) else {
                    let _ = say(&socket, &Message::Refused(Refusal::Full), &[]);
                    continue;
                };
                self.list.remove(i);
            }
            let state = if only_looks { State::Looks } else { State::Unknown };
            let process = Process::of(pid, socket.as_fd());
            let _ = self.add(socket, pid, process, None, state);
        }
    }

    /// Reads the messages of one peer.
    fn hear(&mut self, rnic: &mut Port, now: Time, id: u64) {
        for _ in 0..MESSAGES_PER_TURN {
            let Some(i) = self.list.iter().position(|link| link.id == id) else {
                return;
            };
            let mut buffer = [0; message::LEN_MAX];
            let received = group::receive_with_descriptors(&self.list[i].socket, &mut buffer);
            let heard = match received {
                Err(Errno::AGAIN) => return,
                // The peer has closed without reading all messages to it; the messages that it sent before are still to come.
                Err(Errno::CONNRESET) => continue,
                // The peer has gone.
                Ok((0, _)) => return self.part(rnic, now, i),
                Err(_) => None,
                Ok((len, descriptors)) => Message::decode(&buffer[..len]).and_then(|message| {
                    self.handle(rnic, now, i, message, descriptors)?;
                    Some(message)
                }),
            };
            match heard {
                None => {
                    self.list[i].leave();
                    return self.part(rnic, now, i);
                }
                // A page is long: others have their turn before the next one.
                Some(Message::List { .. }) => return,
                Some(_) => {}
            }
        }
    }

    /// Handles a message; returns `None` if the link is to end.
    fn handle(
        &mut self,
        rnic: &mut Port,
        now: Time,
        i: usize,
        message: Message,
        descriptors: Vec<OwnedFd>,
    ) -> Option<()> {
        let on = self.on;
        let link = &mut self.list[i];
        match (message, &mut link.state) {
            (Message::Hello { address, slot }, State::Unknown) => {
                if !on {
                    let _ = say(&link.socket, &Message::Refused(Refusal::Off), &[]);
                    return None;
                }
                let [file, doorbell] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
                let segment = Segment::from_file(file.as_fd()).ok()?;
                let process = link.process.clone().ok();
                let mut rings = Rings::new(segment, Side::Answering, doorbell, process, &self.stays);
                rings.doorbell.add_to(&self.doorbells).ok()?;
                let slot = (1..SLOTS as u8).contains(&slot).then_some(slot)?;
                // Any process can claim this name: the sender must be the process that listens under it.
                let named = group::connect_slot(address, slot).ok()?;
                if check_user(&named) != Ok(link.pid) {
                    return None;
                }
                let loses = u32::from(self.loses);
                rings.segment.loses(rings.side).store(loses, Ordering::Relaxed);
                say(&link.socket, &Message::Welcome, &[]).ok()?;
                link.peer = Some((address, slot));
                link.state = State::Up(Box::new(rings));
                self.tell_waiting(rnic, (address, slot));
            }
            (Message::Welcome, State::Asked(_)) => {
                let peer = link.peer?;
                let State::Asked(mut rings) = std::mem::replace(&mut link.state, State::Over) else {
                    return None;
                };
                rings.doorbell.add_to(&self.doorbells).ok()?;
                link.state = State::Up(rings);
                self.tell_waiting(rnic, peer);
            }
            (Message::Refused(refusal), State::Asked(_)) => {
                let peer = link.peer?;
                self.refuse(peer, Why::Refused(refusal));
                return None;
            }
            (Message::Ask { rkey, of, by }, State::Up(rings)) => {
                let peer = link.peer?;
                let granted = if self.grants {
                    rings.grant(rnic, peer, rkey, of, by)
                } else {
                    Err(Refusal::Off)
                };
                let (answer, file) = match granted {
                    Ok((granted, file)) => (Message::Granted(granted), file),
                    Err(reason) => (Message::Denied { rkey, by, reason }, None),
                };
                let files: Vec<_> = file.iter().map(AsFd::as_fd).collect();
                // A peer that does not read its messages gets no answer.
                let _ = say(&link.socket, &answer, &files);
            }
            (Message::Granted(granted), State::Up(rings)) => {
                if !is_between(rnic, granted.by, link.peer?) {
                    return Some(());
                }
                match rings.take(granted, descriptors, &link.process, &link.open) {
                    Ok(grant) => rnic.set_grant(now, granted.by, granted.rkey, Some(grant)),
                    Err(reason) => self.keep_reason(rnic, granted.by, reason),
                }
            }
            (Message::Denied { by, reason, .. }, State::Up(_)) => {
                if is_between(rnic, by, link.peer?) {
                    self.keep_reason(rnic, by, NotDirect::Denied(reason));
                }
            }
            (Message::Capture { filter }, State::Unknown) if link.peer.is_none() => {
                if self.capturing.is_some() || rnic.is_captured() {
                    let _ = say(&link.socket, &Message::Refused(Refusal::Full), &[]);
                    return None;
                }
                let [file, done] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
                let device = format!("{}/{}", self.address, self.slot);
                rnic.capture(Capture::to(file, done, device, filter).ok()?);
                self.capturing = Some(link.id);
                say(&self.list[i].socket, &Message::Welcome, &[]).ok()?;
                self.keep_to_packets();
                self.revoke(|_| true);
                rnic.forget_grants();
            }
            (Message::List { object, from }, State::Unknown | State::Looks) if link.peer.is_none() => {
                let page = self.page(rnic, object, from).encode();
                // A peer that does not read its pages gets no more.
                group::send_bytes(&self.list[i].socket, &page, &[]).ok()?;
            }
            // `Over`, or a message that is not allowed in this state.
            _ => return None,
        }
        Some(())
    }

    fn tell_waiting(&mut self, rnic: &mut Rnic, peer: (IpAddr, u8)) {
        self.refused.remove(&peer);
        self.met = true;
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
    fn part(&mut self, rnic: &mut Port, now: Time, i: usize) {
        if self.capturing == Some(self.list[i].id) {
            self.capturing = None;
            rnic.end_capture();
            self.grants = !rnic.keeps_to_packets();
            // Queue pairs ask for their grants again.
            rnic.forget_grants();
        }
        let link = &mut self.list[i];
        link.open.store(false, Ordering::Relaxed);
        let state = std::mem::replace(&mut link.state, State::Over);
        let (peer, alive) = (link.peer, link.alive);
        let Some(peer) = peer else { return };
        let had = |qpn| slot_of(qpn) == peer.1;
        match state {
            State::Asked(_) if !self.refused.contains_key(&peer) => self.refuse(peer, Why::NotHere),
            State::Up(mut rings) => {
                if alive {
                    self.refuse(peer, Why::GivenUp);
                }
                // At most as many records as a ring holds: a peer that lives may keep sending.
                for _ in 0..segment::SLOTS {
                    let Ok(Some(meta)) = rings.rx.pop(&mut self.buffer) else {
                        break;
                    };
                    rnic.handle_arrival(now, &arrival(peer.0, self.address, meta, &self.buffer));
                }
                if !alive {
                    Self::note_gone(rnic, now, peer.0, had);
                    rnic.cm().peer_gone(now, peer.0, had);
                }
            }
            // This side gave the link up.
            State::Unknown => self.refuse(peer, Why::GivenUp),
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
        let up = |link: &&Link| link.peer == Some(peer) && matches!(link.state, State::Up(_));
        if let Some(link) = self.list.iter().find(up) {
            let of = info.dest_qpn;
            // A peer that does not read its messages is not asked.
            let _ = say(&link.socket, &Message::Ask { rkey, of, by }, &[]);
        }
    }

    /// Revokes the grants for a queue pair.
    pub(crate) fn revoke_qp(&mut self, qpn: Qpn) {
        self.revoke(|given| given.qpn == qpn);
    }

    /// Returns the peers that may still be inside of memory that was granted for a queue pair.
    pub(in crate::soft) fn stays_of_qp(&self, qpn: Qpn) -> Vec<Arc<Stay>> {
        self.stays.of(|given| given.qpn == qpn)
    }

    /// Revokes the grants of a region. No peer can reach the region once the returned stays are over.
    #[must_use]
    pub(in crate::soft) fn revoke_region(&mut self, lkey: LKey) -> Vec<Arc<Stay>> {
        self.revoke(|given| given.lkey == lkey);
        self.stays.of(|given| given.lkey == lkey)
    }

    fn revoke(&mut self, is_it: impl Fn(&Given) -> bool) {
        let mut inside = false;
        for (_, rings) in self.up() {
            inside |= rings.take_back(&is_it);
        }
        if inside {
            self.stays.wait_briefly(is_it);
        }
    }
}

impl Link {
    /// Ends this side of the connection, since the peer broke the rules or does not answer. The end of the connection takes down the rest.
    fn give_up(&mut self) {
        self.leave();
        self.state = State::Unknown;
    }

    /// Tells the peer that the link ends, but not because this process has gone.
    fn leave(&mut self) {
        self.open.store(false, Ordering::Relaxed);
        self.alive = true;
        let _ = say(&self.socket, &Message::Over, &[]);
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Closing is not enough: a forked child holds the descriptors too.
        let _ = epoll::delete(&self.control, &self.socket);
        if let Ok(process) = &self.process {
            let _ = epoll::delete(&self.control, process.fd());
        }
    }
}

impl Doorbell {
    /// Adds the doorbell to the epoll set on which sleepers wait.
    fn add_to(&mut self, doorbells: &Arc<OwnedFd>) -> Result<(), Errno> {
        use rustix::net::sockopt::{socket_domain, socket_type};
        // The peer may have sent any descriptor, and polling some of them takes as long as their makers like.
        let is_doorbell = socket_domain(&self.socket)? == AddressFamily::UNIX
            && socket_type(&self.socket)? == SocketType::SEQPACKET;
        if !is_doorbell {
            return Err(Errno::INVAL);
        }
        watch(doorbells, self.socket.as_fd(), 0)?;
        self.doorbells = Some(Arc::clone(doorbells));
        Ok(())
    }

    /// Takes the pending rings of the doorbell.
    fn answer(&mut self) {
        for _ in 0..RINGS_PER_TURN {
            if !self.answer_one() {
                return;
            }
        }
    }

    /// Takes one ring of the doorbell; returns false if there was none. A doorbell that the peer has closed leaves the epoll set.
    fn answer_one(&mut self) -> bool {
        match rustix::net::recv(&self.socket, &mut [0; 64], RecvFlags::DONTWAIT) {
            Ok((_, n)) if n > 0 => true,
            Err(Errno::AGAIN) => false,
            _ => {
                self.remove();
                false
            }
        }
    }

    fn remove(&mut self) {
        if let Some(doorbells) = self.doorbells.take() {
            let _ = epoll::delete(&doorbells, &self.socket);
        }
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        // Closing it is not enough: a peer may hold this end too.
        self.remove();
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        // A peer that has not noticed the end of the link can no longer reach any memory.
        self.take_back(|_| true);
    }
}

impl Rings {
    fn new(
        segment: Arc<Segment>,
        side: Side,
        doorbell: OwnedFd,
        process: Option<Arc<Process>>,
        stays: &Arc<Stays>,
    ) -> Rings {
        Rings {
            tx: Producer::new(segment.ring(side)),
            rx: Consumer::new(segment.ring(side.other())),
            segment,
            side,
            doorbell: Doorbell {
                socket: Arc::new(doorbell),
                doorbells: None,
            },
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            wants_room: false,
            given: Vec::new(),
            generation: 0,
            gate: None,
            process,
            stays: Arc::clone(stays),
        }
    }

    #[inline]
    fn send(&mut self, meta: Meta, bytes: &[u8]) -> Result<(), Corrupt> {
        if self.waiting.is_empty() {
            match self.tx.push(meta, bytes) {
                Ok(wake) => {
                    self.ring(wake);
                    return Ok(());
                }
                Err(PushError::Corrupt(corrupt)) => return Err(corrupt),
                Err(PushError::Full) => {}
            }
        }
        if self.waiting_bytes + WAITING_ENTRY_BYTES + bytes.len() <= WAITING_BYTES_MAX {
            self.waiting_bytes += WAITING_ENTRY_BYTES + bytes.len();
            self.waiting.push_back((meta, bytes.into()));
        }
        Ok(())
    }

    fn send_waiting(&mut self) -> Result<(), Corrupt> {
        while let Some((meta, bytes)) = self.waiting.front() {
            match self.tx.push(*meta, bytes) {
                Ok(wake) => self.ring(wake),
                Err(PushError::Corrupt(corrupt)) => return Err(corrupt),
                Err(PushError::Full) => return Ok(()),
            }
            self.waiting_bytes -= WAITING_ENTRY_BYTES + bytes.len();
            self.waiting.pop_front();
        }
        Ok(())
    }

    fn progress(&self) -> LinkProgress {
        let (taken, all) = self.tx.taken();
        LinkProgress {
            taken,
            all: all && self.waiting.is_empty() && !self.rx.is_ready(),
        }
    }

    fn prepare_sleep(&mut self) -> Result<bool, Corrupt> {
        while !self.waiting.is_empty() && !self.wants_room {
            self.wants_room = self.tx.wants_room()?;
            if !self.wants_room {
                self.send_waiting()?;
            }
        }
        Ok(self.rx.prepare_sleep())
    }

    #[inline]
    fn ring(&self, wake: Wake) {
        if wake == Wake::Peer {
            // If the socket is full, earlier rings in it are not taken yet.
            let _ = rustix::net::send(
                &self.doorbell.socket,
                &[0],
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            );
        }
    }

    /// Revokes grants. Returns whether the peer may be inside of one: then the stays include it.
    fn take_back(&mut self, is_it: impl Fn(&Given) -> bool) -> bool {
        let is_index = |index: &usize| self.given[*index].as_ref().is_some_and(&is_it);
        let indices: Vec<u32> = (0..self.given.len()).filter(is_index).map(|i| i as u32).collect();
        if indices.is_empty() {
            return false;
        }
        let holder = self.side.other();
        let words = GrantWords {
            segment: &self.segment,
            holder,
        };
        let inside = revocation::take_back(&words, &indices);
        let taken: Vec<_> = indices.iter().map(|i| self.given[*i as usize].take()).collect();
        let Some((entry, index)) = inside else {
            return false;
        };
        let at = indices.iter().position(|i| *i == index);
        let given = at.and_then(|at| taken[at].clone());
        let is_inside = given.is_some();
        if let Some(given) = given {
            self.stays.add(Stay {
                given,
                entry,
                segment: Arc::clone(&self.segment),
                holder,
                process: self.process.clone(),
                doorbell: Arc::clone(&self.doorbell.socket),
            });
        }
        is_inside
    }

    /// Returns the gate for the peer's calls under its next grants.
    fn open_gate(&mut self) -> Result<Arc<Gate>, Errno> {
        let gate = match self.gate.take().filter(|gate| !gate.is_closed()) {
            Some(gate) => gate,
            None => Arc::new(Gate::new()?),
        };
        self.gate = Some(Arc::clone(&gate));
        Ok(gate)
    }

    /// Grants a peer the memory that it asks for, if that is allowed.
    fn grant(
        &mut self,
        rnic: &mut Rnic,
        peer: (IpAddr, u8),
        rkey: RKey,
        of: Qpn,
        by: Qpn,
    ) -> Result<(message::Granted, Option<OwnedFd>), Refusal> {
        let asks_its_peer = rnic.query_qp(of).is_some_and(|info| info.dest_qpn == by);
        if !asks_its_peer || !is_between(rnic, of, peer) {
            return Err(Refusal::NotGranted);
        }
        let grantable = rnic.grantable(of, rkey).map_err(|_| Refusal::NotGranted)?;
        // A peer that has forgotten an earlier grant gets the same grant again.
        let is_it = |given: &Given| given.qpn == of && given.lkey == grantable.lkey;
        let before = self
            .given
            .iter()
            .position(|given| given.as_ref().is_some_and(is_it));
        let free = || self.given.iter().position(Option::is_none);
        let index = before.or_else(free).unwrap_or(self.given.len());
        if index >= GRANTS as usize {
            return Err(Refusal::Full);
        }
        let memory = grantable.memory.as_any().ok_or(Refusal::NotShareable)?;
        let writable = grantable.access.contains(Access::REMOTE_WRITE);
        let (address, file) = if let Some(memory) = memory.downcast_ref::<AnonymousMemory>() {
            let file = match memory.file() {
                Some(file) if writable => Some(file.try_clone_to_owned().map_err(|_| Refusal::Full)?),
                // Memory that cannot be opened for reading alone is left to calls.
                Some(file) => read_only(file),
                None => None,
            };
            (memory.address(), file)
        } else if let Some(memory) = memory.downcast_ref::<ApplicationMemory>() {
            (memory.address(), None)
        } else {
            return Err(Refusal::NotShareable);
        };
        let offset = match file {
            Some(_) => grantable.memory_offset,
            None => address.wrapping_add(grantable.memory_offset),
        };
        let gate = match file {
            Some(_) => None,
            None => Some(self.open_gate().map_err(|_| Refusal::Full)?),
        };
        let is_open = |given: &Given| given.gate.as_ref().is_none_or(|gate| !gate.is_closed());
        let before = self.given.get(index).cloned().flatten().filter(is_open);
        let given = before.unwrap_or_else(|| {
            self.generation = self.generation.wrapping_add(1).max(1);
            Given {
                qpn: of,
                lkey: grantable.lkey,
                generation: self.generation,
                gate,
            }
        });
        let (generation, gate) = (
            given.generation,
            given.gate.as_ref().map_or(0, |gate| gate.address()),
        );
        if index == self.given.len() {
            self.given.push(Some(given));
        } else {
            self.given[index] = Some(given);
        }
        let index = index as u32;
        let word = self.segment.grant(self.side, index);
        word.store(generation, Ordering::Release);
        let granted = message::Granted {
            rkey,
            by,
            index,
            generation,
            access: grantable.access,
            iova: grantable.iova,
            length: grantable.length,
            offset,
            gate,
            left: self.segment.left_address(self.side.other()),
        };
        Ok((granted, file))
    }

    /// Accepts a grant by a peer, if this process can reach the memory.
    fn take(
        &self,
        granted: message::Granted,
        descriptors: Vec<OwnedFd>,
        process: &Result<Arc<Process>, NotDirect>,
        open: &Arc<AtomicBool>,
    ) -> Result<Grant, NotDirect> {
        if granted.index >= GRANTS || granted.length == 0 {
            return Err(NotDirect::Unmappable);
        }
        let end = granted.offset.checked_add(granted.length);
        let end = end.ok_or(NotDirect::Unmappable)?;
        let (reach, memory_offset) = match descriptors.first() {
            Some(file) => {
                let window = map(file, &granted, end).ok_or(NotDirect::Unmappable)?;
                let in_page = granted.offset % rustix::param::page_size() as u64;
                (Reach::Mapped(window), in_page)
            }
            None => {
                let process = process.as_ref().map_err(|reason| *reason)?;
                // This shows now, not with the first request, whether the system permits calls into the peer.
                let tried = process.read(granted.offset, &mut [0]);
                tried.map_err(|fault| NotDirect::Calls(errno_of(fault)))?;
                (Reach::Process(Arc::clone(process)), granted.offset)
            }
        };
        Ok(Grant {
            memory: Arc::new(Granted {
                reach,
                segment: Arc::clone(&self.segment),
                side: self.side,
                index: granted.index,
                generation: granted.generation,
                gate: granted.gate,
                left: granted.left,
                open: Arc::clone(open),
            }),
            memory_offset,
            iova: granted.iova,
            length: granted.length,
            access: granted.access,
        })
    }
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

/// Maps the memory that a peer granted, from the page in which it begins to its end.
fn map(file: &OwnedFd, granted: &message::Granted, end: u64) -> Option<Window> {
    if !is_safe_to_map(file, end) {
        return None;
    }
    let begin = granted.offset - granted.offset % rustix::param::page_size() as u64;
    let len = usize::try_from(end - begin).ok()?;
    let writable = granted.access.contains(Access::REMOTE_WRITE);
    Window::of_file(&MAPPED, file.as_fd(), begin, len, writable)
}

fn errno_of(fault: Fault) -> Errno {
    match fault {
        Fault::Io(errno) => Errno::from_raw_os_error(errno),
        _ => Errno::FAULT,
    }
}

/// Returns the number of the process at the other end, if it is a process of this user.
pub(in crate::soft) fn check_user(socket: &OwnedFd) -> Result<i32, Why> {
    let (uid, pid) = udp::peer_credentials(socket)
        .map_err(|error| Why::System(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    match user_of(uid) {
        User::Own => Ok(pid),
        User::Other => Err(Why::OtherUser(uid)),
        User::Unknown => Err(Why::UnknownUser),
    }
}

/// Opens a second descriptor of a file, which can only read.
fn read_only(file: BorrowedFd<'_>) -> Option<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some(std::fs::File::open(path).ok()?.into())
}

/// Returns why a peer closed the connection before it received anything.
fn last_word(socket: &OwnedFd) -> Why {
    let mut buffer = [0; message::LEN_MAX];
    match group::receive_with_descriptors(socket, &mut buffer).map(|(len, _)| Message::decode(&buffer[..len]))
    {
        Ok(Some(Message::Refused(refusal))) => Why::Refused(refusal),
        _ => Why::NotHere,
    }
}

fn say(socket: impl AsFd, message: &Message, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    group::send_bytes(socket, &message.encode(), descriptors)
}

fn watch(epoll: impl AsFd, fd: BorrowedFd<'_>, data: u64) -> Result<(), Errno> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
}

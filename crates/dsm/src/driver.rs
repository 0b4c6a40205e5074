//! Driver of the state machines of one node: takes completions, and carries out what the state machines decide.
//!
//! Whoever holds the [`Driver`] takes a [turn](Driver::turn), one at a time: the node's service thread, or a thread of the program that waits for
//! something. It never waits, and touches no view.

mod heap;
mod making;
mod presence;
mod release;
pub(crate) mod rest;
mod rights;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::{CompletionQueue, MemoryRegion, RemoteBuffer, Sge, Status, WcOpcode, WorkCompletion};
use rdmux_wire::dsm::frame::SLOTS;
use rdmux_wire::dsm::heap::Heap as HeapMessage;
use rdmux_wire::dsm::joining::Joining;
use rdmux_wire::dsm::membership::Membership as MembershipMessage;
use rdmux_wire::dsm::{Body, MESSAGE_LEN, Message, NodeId, sync as wire_sync};

pub(crate) use self::making::{Answer, Making, Offer};
pub(crate) use self::presence::Patience;
use self::presence::{Questions, Wait};
pub(crate) use self::release::Shadow;
use self::release::{Coherence, ReleaseRead};
use crate::heap::Arena;
use crate::link::{Link, LinkError, WorkId};
use crate::membership::{self, Membership};
use crate::memory::{self, Access, PageBatch, PageState};
use crate::protocol::{self, Action, Right, Violation};
use crate::region::Pages;
use crate::stat::{NodeCounter, PeerCounter, RegionCounter, Sheet};
use crate::sync;

/// Completions that are taken at once.
const BATCH: usize = 32;

/// Rounds of a turn. What comes during the last one waits for the next turn.
const ROUNDS: u32 = 16;

/// Messages of a node that may wait for news of the membership.
const HELD_MAX: usize = 65536;

/// Most regions of a cluster.
pub const REGIONS_MAX: usize = 64;

/// Reason why another node has no part in the memory any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Loss {
    /// The connection to it has failed.
    #[error("{0}")]
    Link(#[from] LinkError),
    /// It has disconnected.
    #[error("it has left")]
    Left,
    /// It has not answered.
    #[error("it has not answered for {:.1} seconds", .0.as_secs_f64())]
    Silent(Duration),
    /// Its device answers, but it takes no messages.
    #[error("its device answers, but it has taken no message for {:.1} seconds", .0.as_secs_f64())]
    Hung(Duration),
    /// It takes messages, but has not answered one that a correct node answers.
    #[error("it does not keep to the protocol: it takes messages, but has not answered one for {:.1} seconds", .0.as_secs_f64())]
    Unanswered(Duration),
    /// Another node has lost it.
    #[error("node {0} has lost its connection to it")]
    LostBy(u32),
    /// Its message is none that a correct node sends.
    #[error("it does not keep to the protocol: {0}")]
    Violation(#[from] Violation),
    /// Its message about threads is none that a correct node sends.
    #[error("it does not keep to the protocol: {0}")]
    Synchronisation(#[from] sync::Violation),
    /// It sends too many messages of an epoch of which nobody has told.
    #[error("it does not keep to the protocol: too many messages of an epoch that has not begun")]
    Held,
    /// Its message is of no kind, or about no region.
    #[error("it does not keep to the protocol: a message of kind {0} that nothing has asked for")]
    Message(u8),
}

/// A node, as this one knows it.
#[derive(Debug, Default)]
struct Peer {
    /// `None`: it is this node, or the connection has ended.
    link: Option<Link>,
    /// Set once the connection has ended.
    loss: Option<Loss>,
    /// The connection ends: its last frames are taken.
    is_ending: bool,
    /// Messages that wait for news of the membership.
    held: VecDeque<[u8; MESSAGE_LEN]>,
    questions: Questions,
}

/// A region, as its nodes have agreed on it.
#[derive(Debug)]
pub(crate) struct Region {
    pages: Pages,
    coherence: Coherence,
    /// The region of the alias. Others read it.
    mr: MemoryRegion,
    /// Keys of the others' aliases, by the numbers of the nodes.
    keys: Vec<Option<RemoteBuffer>>,
    /// Tasks of the protocol that are carried out together.
    protections: Vec<(u64, u64, Right)>,
    batch: PageBatch,
    /// The program may use it: all nodes have mapped it, and said by which keys it is read.
    is_made: bool,
    /// Units that this node hands out, of a region of a heap.
    arena: Option<Arena>,
    number: u32,
    sheet: Arc<Sheet>,
}

/// A read of another node's memory that is in progress.
#[derive(Clone, Copy, Debug)]
struct Pull {
    region: u32,
    /// The node that is read from.
    from: u32,
    read: Read,
}

/// Purpose of a read.
#[derive(Clone, Copy, Debug)]
enum Read {
    /// The contents of a unit, for a task of the protocol.
    Contents { unit: u64, task: u64 },
    /// Something of a region with release consistency.
    Release(ReleaseRead),
}

/// Queues of the completions of all links.
#[derive(Clone, Debug)]
pub(crate) struct Queues {
    /// Of requests.
    pub work: CompletionQueue,
    /// Of bells.
    pub bells: CompletionQueue,
}

/// State of one node.
#[derive(Debug)]
pub(crate) struct Driver {
    own: NodeId,
    queues: Queues,
    /// The queue of bells is armed, and no turn has driven the device since, whose own thread rests for a while after that.
    is_armed: bool,
    peers: Vec<Peer>,
    membership: Membership,
    regions: Vec<Option<Region>>,
    /// Numbers of the regions whose state machines have decided something that is not carried out.
    undone: Vec<u32>,
    making: Vec<Making>,
    sync: sync::Node,
    /// Ends of calls that their threads have not taken, by the numbers of the threads.
    outcomes: Vec<Option<sync::Outcome>>,
    pulls: Vec<Option<Pull>>,
    free_pulls: Vec<u32>,
    requests: heap::Requests,
    /// Waits for other nodes at the time of the last questions, with their beginnings.
    waits: BTreeMap<Wait, Instant>,
    /// Grows with all that a waiting thread may look at.
    changes: u64,
    /// The first error of the system, after which the memory is of no use.
    failure: Option<memory::Error>,
    sheet: Arc<Sheet>,
    /// Events that were handled, and are not in the sheet yet.
    events: u64,
}

impl Driver {
    pub(crate) fn new(
        own: NodeId,
        queues: Queues,
        links: Vec<Option<Link>>,
        homes: protocol::Homes,
        sheet: Sheet,
    ) -> Driver {
        let members: Vec<NodeId> = (0..links.len() as u32).filter_map(NodeId::new).collect();
        let peers = links.into_iter().map(|link| Peer {
            link,
            ..Peer::default()
        });
        Driver {
            own,
            queues,
            is_armed: false,
            peers: peers.collect(),
            membership: Membership::new(own, members.iter().copied()),
            regions: Vec::new(),
            undone: Vec::new(),
            making: Vec::new(),
            sync: sync::Node::new(own, 0, 0, &members, homes),
            outcomes: vec![None; sync::THREADS_MAX.into()],
            pulls: Vec::new(),
            free_pulls: Vec::new(),
            requests: heap::Requests::default(),
            waits: BTreeMap::new(),
            changes: 0,
            failure: None,
            sheet: Arc::new(sheet),
            events: 0,
        }
    }

    pub(crate) fn own(&self) -> NodeId {
        self.own
    }

    /// Returns the counts of this node.
    pub(crate) fn sheet(&self) -> &Sheet {
        &self.sheet
    }

    /// Counts the events that were handled since the last call.
    pub(crate) fn count_events(&mut self, stage: NodeCounter) {
        self.sheet.count(stage, std::mem::take(&mut self.events));
    }

    /// Returns a number that has grown if a thread that waits should look again.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns the first node that is gone, with the reason: this one if it was expelled.
    pub(crate) fn gone(&self) -> Option<(NodeId, String)> {
        let members: BTreeSet<NodeId> = self.membership.members().collect();
        let mut nodes = (0..self.peers.len() as u32).filter_map(NodeId::new);
        let node = match members.is_empty() {
            true => self.own,
            false => nodes.find(|node| !members.contains(node))?,
        };
        let loss = self
            .peers
            .get(node.number() as usize)
            .and_then(|peer| peer.loss.as_ref());
        let reason = loss.map_or_else(|| "the others have expelled it".to_owned(), Loss::to_string);
        Some((node, reason))
    }

    /// Returns the reason for which a node is gone, if it is or this one was expelled.
    pub(crate) fn loss_of(&self, node: NodeId) -> Option<String> {
        if self.membership.members().any(|member| member == node) {
            return None;
        }
        let loss = self.peers.get(node.number() as usize)?.loss.as_ref();
        Some(loss.map_or_else(
            || "the others have expelled this node".to_owned(),
            Loss::to_string,
        ))
    }

    /// Returns the members.
    pub(crate) fn members(&self) -> Vec<NodeId> {
        self.membership.members().collect()
    }

    /// Returns the epoch of the membership.
    pub(crate) fn epoch(&self) -> u64 {
        self.membership.epoch()
    }

    /// Notes an error of the system.
    pub(crate) fn fail(&mut self, error: memory::Error) {
        self.note_failure(Err(error));
    }

    pub(crate) fn failure(&self) -> Option<&memory::Error> {
        self.failure.as_ref()
    }

    /// Takes all frames and completions, and carries out what follows. Returns whether there were any. Without `thoroughly` it takes what takes no
    /// system call and no packet to notice.
    pub(crate) fn turn(&mut self, thoroughly: bool) -> bool {
        let mut any = false;
        for _ in 0..ROUNDS {
            if !(self.receive() | self.poll_work() | (thoroughly && self.poll_bells())) {
                break;
            }
            self.carry_out();
            any = true;
        }
        if any {
            self.tell();
        }
        self.settle();
        any
    }

    /// Ends a change of the state: rings the bells of nodes that may not see the frames which it has sent.
    pub(crate) fn settle(&mut self) {
        loop {
            self.carry_out();
            // Frames that were written when they were posted have their completions.
            self.poll_work();
            self.each_link(Link::ring);
            if self.undone.is_empty() {
                return;
            }
        }
    }

    /// Returns whether packets carry frames, which turns take only if they drive the device.
    pub(crate) fn uses_packets(&self) -> bool {
        self.links().any(Link::uses_packets)
    }

    fn links(&self) -> impl Iterator<Item = &Link> {
        self.peers.iter().filter_map(|peer| peer.link.as_ref())
    }

    /// Takes the frames that have come.
    fn receive(&mut self) -> bool {
        let mut any = false;
        for number in 0..self.peers.len() as u32 {
            any |= self.receive_from(number);
        }
        any
    }

    /// Takes the frames of a node that have come.
    fn receive_from(&mut self, number: u32) -> bool {
        let mut any = false;
        // The window bounds the frames of one link, but new ones may come as these are handled.
        for _ in 0..SLOTS {
            let Some(link) = self.link(number) else { break };
            match link.receive() {
                Ok(Some(frame)) => {
                    any = true;
                    if let Some(message) = frame.message {
                        self.events += 1;
                        self.sheet.count_peer(number, PeerCounter::MessagesReceived, 1);
                        self.arrived(number, message);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    self.lose(number, error.into());
                    break;
                }
            }
        }
        any
    }

    /// Returns whether all that this node has sent has arrived.
    pub(crate) fn has_sent_all(&self) -> bool {
        // A node that has left takes nothing more: its requests may stay without an end until the next probe.
        !self.links().any(|link| link.is_sending() && !link.is_ended())
    }

    /// Takes the completions of requests, if there are any without one.
    fn poll_work(&mut self) -> bool {
        if !self.links().any(Link::has_outstanding) {
            return false;
        }
        let mut completions = [WorkCompletion::default(); BATCH];
        let found = self.queues.work.poll_into(&mut completions);
        completions[..found].iter().for_each(|it| self.completed(it));
        // With nothing to take, the call drives the device.
        self.is_armed &= found > 0;
        found > 0
    }

    /// Takes the bells that have rung. Drives the device.
    fn poll_bells(&mut self) -> bool {
        let mut completions = [WorkCompletion::default(); BATCH];
        let found = self.queues.bells.poll_into(&mut completions);
        completions[..found].iter().for_each(|it| self.completed(it));
        self.is_armed = false;
        found > 0
    }

    fn each_link(&mut self, f: impl Fn(&mut Link) -> Result<(), LinkError>) {
        for number in 0..self.peers.len() as u32 {
            if let Some(link) = self.link(number)
                && let Err(error) = f(link)
            {
                self.lose(number, error.into());
            }
        }
    }

    fn tell(&mut self) {
        self.each_link(Link::tell);
    }

    /// Has the nodes ring no bell that would, as this one polls again.
    pub(crate) fn tell_awake(&mut self) {
        self.each_link(Link::tell_awake);
    }

    fn peer(&mut self, number: u32) -> Option<&mut Peer> {
        self.peers.get_mut(number as usize)
    }

    fn link(&mut self, number: u32) -> Option<&mut Link> {
        self.peer(number)?.link.as_mut()
    }

    fn completed(&mut self, completion: &WorkCompletion) {
        let (number, id) = WorkId::parse(completion.wr_id);
        let has_succeeded = completion.status == Status::Success;
        self.events += 1;
        if id == WorkId::Bell && has_succeeded {
            let counter = match completion.opcode {
                WcOpcode::Recv => PeerCounter::BellsReceived,
                _ => PeerCounter::BellsSent,
            };
            self.sheet.count_peer(number, counter, 1);
        }
        if let WorkId::Read(pull) = id {
            self.pulled(number, pull, has_succeeded);
        }
        let Some(link) = self.link(number) else {
            return;
        };
        if !(id == WorkId::Bell && completion.opcode == WcOpcode::Recv) {
            link.completed();
        }
        let outcome = match id {
            _ if !has_succeeded => Err(LinkError::Status(completion.status)),
            WorkId::Bell if completion.opcode == WcOpcode::Recv => link.has_rung(),
            WorkId::Bell => Ok(()),
            WorkId::Frame(count) => link.has_written(count),
            WorkId::Read(_) => link.has_read(),
            WorkId::Probe => {
                link.has_probed();
                Ok(())
            }
            WorkId::Word(word) => {
                link.has_told_sleep(word);
                Ok(())
            }
        };
        if let Err(error) = outcome {
            self.lose(number, error.into());
        }
    }

    /// Takes a message of a node, unless earlier ones of it wait.
    fn arrived(&mut self, number: u32, message: [u8; MESSAGE_LEN]) {
        let Some(peer) = self.peer(number) else { return };
        peer.questions.has_begun = true;
        // News of the membership ends the waits of the others.
        if !peer.held.is_empty() && !MembershipMessage::has_kind(message[0]) {
            peer.held.push_back(message);
            self.check_held(number);
            return;
        }
        self.dispatch(number, message);
    }

    fn dispatch(&mut self, number: u32, bytes: [u8; MESSAGE_LEN]) {
        let kind = bytes[0];
        let Some(from) = NodeId::new(number) else { return };
        if Joining::has_kind(kind) {
            let joining = Joining::parse(&bytes);
            if !joining.is_ok_and(|joining| self.joined(number, &joining)) {
                self.lose(number, Loss::Message(kind));
            }
            self.changes += 1;
            return;
        }
        if HeapMessage::has_kind(kind) {
            let message = HeapMessage::parse(&bytes);
            if !message.is_ok_and(|message| self.heap_message(number, message)) {
                self.lose(number, Loss::Message(kind));
            }
            return;
        }
        if MembershipMessage::has_kind(kind) {
            let message = MembershipMessage::parse(&bytes);
            if !message.is_ok_and(|message| self.membership.handle_message(from, message)) {
                self.lose(number, Loss::Message(kind));
            }
            self.follow_membership(Some(number));
            return;
        }
        if kind >= wire_sync::KIND_FIRST {
            let Ok(message) = wire_sync::Message::parse(&bytes) else {
                self.lose(number, Loss::Message(kind));
                return;
            };
            let taken = self.sync.handle_message(from, &message);
            self.hold_if(taken.is_err(), number, bytes);
            self.synchronise();
            return;
        }
        let Ok(message) = Message::parse(&bytes) else {
            self.lose(number, Loss::Message(kind));
            return;
        };
        let Some(region) = self.region(message.region) else {
            // A node that has mapped the region tells this all others, also those that have not mapped it.
            let is_early = message.body == Body::Settled && self.has_answered_offer(message.region, number);
            if !is_early {
                self.lose(number, Loss::Message(kind));
            }
            return;
        };
        let taken = region.coherence.handle_message(from, &message);
        if matches!(message.body, Body::Recall(_)) {
            self.sheet.count_peer(number, PeerCounter::RecallsReceived, 1);
        }
        self.hold_if(taken.is_err(), number, bytes);
        // It is carried out together with the requests of the next messages.
        self.decided(message.region);
    }

    /// Keeps a message if it has to wait for news of the membership.
    fn hold_if(&mut self, waits: bool, number: u32, message: [u8; MESSAGE_LEN]) {
        if waits && let Some(peer) = self.peer(number) {
            peer.held.push_back(message);
            self.check_held(number);
        }
    }

    fn check_held(&mut self, number: u32) {
        if self.peer(number).is_some_and(|peer| peer.held.len() > HELD_MAX) {
            self.lose(number, Loss::Held);
        }
    }

    /// Begins a call of a thread that waits for none.
    pub(crate) fn call(&mut self, thread: u16, call: sync::Call) {
        self.sync.handle_call(call, thread.into());
        self.synchronise();
    }

    /// Takes the end of a thread's call, if it has ended.
    pub(crate) fn take_outcome(&mut self, thread: u16) -> Option<sync::Outcome> {
        self.outcomes.get_mut(usize::from(thread))?.take()
    }

    /// Carries out what the synchronisation's state machine has decided.
    fn synchronise(&mut self) {
        while let Some(action) = self.sync.poll_action() {
            match action {
                sync::Action::Send { to, message } => {
                    let mut bytes = [0; MESSAGE_LEN];
                    message.emit(&mut bytes);
                    self.send(to.number(), bytes);
                }
                sync::Action::Done { ticket, outcome } => {
                    if let Some(place) = self.outcomes.get_mut(ticket as usize) {
                        *place = Some(outcome);
                    }
                    self.changes += 1;
                }
                sync::Action::Accuse { node, violation } => self.lose(node.number(), violation.into()),
            }
        }
    }

    fn region(&mut self, number: u32) -> Option<&mut Region> {
        self.regions.get_mut(number as usize)?.as_mut()
    }

    /// Asks for a right to a unit, unless this node has it or has asked.
    pub(crate) fn ask(&mut self, number: u32, pages: &Pages, unit: u32, access: Access) {
        let is_asked = |region: &mut Region| region.coherence.is_awaited(unit.into());
        if !pages.allow(unit, access) && !self.region(number).is_none_or(is_asked) {
            self.fault(number, unit, access);
        }
    }

    /// Takes a fault of the program, or its wish for a right.
    pub(crate) fn fault(&mut self, number: u32, unit: u32, access: Access) {
        let Some(region) = self.region(number) else { return };
        let counter = match (access, region.pages.state(unit)) {
            (Access::Read, _) => RegionCounter::ReadFaults,
            (Access::Write, PageState::Shared) => RegionCounter::UpgradeFaults,
            (Access::Write, _) => RegionCounter::WriteFaults,
        };
        region.coherence.handle_fault(unit.into(), access);
        self.events += 1;
        self.sheet.count_region(number, counter, 1);
        self.decided(number);
    }

    /// Notes that a region's state machine has decided something.
    fn decided(&mut self, number: u32) {
        if !self.undone.contains(&number) {
            self.undone.push(number);
        }
    }

    /// Carries out what the regions' state machines have decided.
    pub(crate) fn carry_out(&mut self) {
        while let Some(number) = self.undone.pop() {
            self.carry_out_of(number);
        }
    }

    fn carry_out_of(&mut self, number: u32) {
        if self.carry_out_release(number) {
            return;
        }
        while let Some(region) = self.region(number) {
            let Coherence::Sequential(protocol) = &mut region.coherence else {
                return;
            };
            let Some(action) = protocol.poll_action() else {
                let changed = region.protect();
                match changed {
                    Ok(0) => return,
                    Ok(_) => {}
                    Err(error) => self.fail(error),
                }
                continue;
            };
            match action {
                Action::Send { to, message } => {
                    self.count_message(number, to, message.body);
                    let mut bytes = [0; MESSAGE_LEN];
                    message.emit(&mut bytes);
                    self.send(to.number(), bytes);
                }
                Action::Pull { unit, task, from } => {
                    let region = number;
                    let from = from.number();
                    let read = Read::Contents { unit, task };
                    self.read_memory(Pull { region, from, read });
                }
                Action::Protect { unit, task, right } => region.protections.push((unit, task, right)),
                Action::Wake { unit } => {
                    let woken = region.pages.wake(unit as u32);
                    self.changes += 1;
                    self.note_failure(woken);
                }
                Action::Poison { unit, node } => {
                    // A protection that ended later would let the program use the unit again.
                    let poisoned = region
                        .protect()
                        .and_then(|_| region.pages.poison(unit as u32, node));
                    self.changes += 1;
                    self.note_failure(poisoned);
                }
                Action::Accuse { node, violation } => self.lose(node.number(), violation.into()),
            }
        }
    }

    fn note_failure(&mut self, outcome: Result<(), memory::Error>) {
        if let Err(error) = outcome {
            self.failure.get_or_insert(error);
            self.changes += 1;
        }
    }

    fn send(&mut self, to: u32, message: [u8; MESSAGE_LEN]) {
        let Some(link) = self.link(to) else { return };
        let sent = link.send(message);
        self.sheet.count_peer(to, PeerCounter::MessagesSent, 1);
        if let Err(error) = sent {
            self.lose(to, error.into());
        }
    }

    /// Counts a message about a unit of a region.
    fn count_message(&self, region: u32, to: NodeId, body: Body) {
        self.sheet.count_region(region, RegionCounter::Messages, 1);
        let counter = match body {
            Body::Recall(Right::Invalid) => RegionCounter::InvalidationsSent,
            Body::Recall(_) => RegionCounter::DowngradesSent,
            Body::Flush { .. } => RegionCounter::FlushesSent,
            // The home's answer.
            Body::Flushed { .. } => RegionCounter::Flushes,
            _ => return,
        };
        self.sheet.count_region(region, counter, 1);
        if let Body::Recall(_) = body {
            self.sheet.count_peer(to.number(), PeerCounter::RecallsSent, 1);
        }
    }

    fn send_to_all(&mut self, message: [u8; MESSAGE_LEN]) {
        (0..self.peers.len() as u32).for_each(|to| self.send(to, message));
    }

    /// Begins to read memory of another node.
    fn read_memory(&mut self, pull: Pull) {
        let from = pull.from;
        let index = self.free_pulls.pop().unwrap_or_else(|| {
            self.pulls.push(None);
            self.pulls.len() as u32 - 1
        });
        self.pulls[index as usize] = Some(pull);
        let region = self.region(pull.region);
        let buffers = region.and_then(|region| region.buffers(&pull));
        let posted = match (buffers, self.link(from)) {
            (Some((into, from)), Some(link)) => link.read(into, from, index).map_err(Some),
            _ => Err(None),
        };
        if let Err(error) = posted {
            if let Some(error) = error {
                self.lose(from, error.into());
            }
            self.pulled(from, index, false);
        }
    }

    /// Ends a read from a node. A completion that comes after the connection has ended is ignored: its number may be that of another read.
    fn pulled(&mut self, from: u32, index: u32, has_landed: bool) {
        let place = self.pulls.get_mut(index as usize);
        let of_node = place.filter(|pull| pull.is_some_and(|pull| pull.from == from));
        let Some(pull) = of_node.and_then(Option::take) else {
            return;
        };
        self.free_pulls.push(index);
        let (unit, task) = match pull.read {
            Read::Contents { unit, task } => (unit, task),
            Read::Release(read) => {
                self.release_read(pull.region, from, read, has_landed);
                self.decided(pull.region);
                return;
            }
        };
        let bytes = self
            .region(pull.region)
            .map(|region| region.pages.geometry().unit_bytes());
        if has_landed && let Some(bytes) = bytes {
            self.sheet.count_region(pull.region, RegionCounter::Fetches, 1);
            self.sheet
                .count_region(pull.region, RegionCounter::FetchedBytes, bytes);
            self.sheet.count_peer(from, PeerCounter::Fetches, 1);
            self.sheet.count_peer(from, PeerCounter::FetchedBytes, bytes);
        }
        if let Some(region) = self.region(pull.region) {
            region.coherence.handle_pulled(unit, task, has_landed);
        }
        self.decided(pull.region);
    }

    /// Ends the connection to a node, which will have to leave.
    fn lose(&mut self, number: u32, loss: Loss) {
        let has_only_left = matches!(
            loss,
            Loss::Left | Loss::Link(LinkError::Status(_) | LinkError::Post(_))
        );
        if has_only_left {
            self.take_last_frames(number);
        } else if let Some(peer) = self.peer(number) {
            peer.is_ending = true;
        }
        let (Some(node), Some(peer)) = (NodeId::new(number), self.peers.get_mut(number as usize)) else {
            return;
        };
        if peer.loss.is_none() {
            peer.loss = Some(loss);
            self.membership.handle_failed(node);
            self.follow_membership(None);
        }
    }

    /// Takes the frames that a node has written before it left, or before others told that it has: they may end waits.
    fn take_last_frames(&mut self, number: u32) {
        let peer = self.peer(number);
        let is_ending = peer.is_none_or(|peer| std::mem::replace(&mut peer.is_ending, true));
        if !is_ending {
            self.receive_from(number);
        }
    }

    /// Carries out what the membership's state machine has decided, upon a message of a node or without one.
    fn follow_membership(&mut self, told_by: Option<u32>) {
        while let Some(action) = self.membership.poll_action() {
            match action {
                membership::Action::Send { to, message } => self.send(to.number(), message.emit()),
                membership::Action::Drop(node) => {
                    self.take_last_frames(node.number());
                    if let Some(peer) = self.peer(node.number()) {
                        // Nothing of this node can be read by it from now on.
                        if let Some(link) = peer.link.take() {
                            link.end();
                        }
                        peer.held.clear();
                        if let Some(teller) = told_by {
                            peer.loss.get_or_insert(Loss::LostBy(teller));
                        }
                    }
                    self.end_pulls(node.number());
                    self.changes += 1;
                }
                membership::Action::Present(node) => self.has_answered(node),
                membership::Action::Gone { epoch, node } => self.end(epoch, node),
            }
        }
    }

    /// Ends all links.
    pub(crate) fn end_links(&mut self) {
        for peer in &mut self.peers {
            if let Some(link) = peer.link.take() {
                link.end();
            }
        }
    }

    /// Ends the reads from a node, which have no completions any more.
    fn end_pulls(&mut self, from: u32) {
        for index in 0..self.pulls.len() as u32 {
            self.pulled(from, index, false);
        }
    }

    /// Ends the part of a node in all regions, with an epoch.
    fn end(&mut self, epoch: u64, node: NodeId) {
        self.changes += 1;
        self.sheet.end_peer(node.number(), epoch);
        for number in 0..self.regions.len() as u32 {
            if let Some(region) = self.region(number) {
                region.coherence.handle_gone(epoch, &[node]);
                self.decided(number);
            }
        }
        self.sync.handle_gone(epoch, &[node]);
        self.synchronise();
        self.take_held();
    }

    /// Takes the messages that wait, as far as that is possible now.
    fn take_held(&mut self) {
        for number in 0..self.peers.len() as u32 {
            let Some(peer) = self.peer(number) else { continue };
            for message in std::mem::take(&mut peer.held) {
                if self.link(number).is_some() {
                    self.arrived(number, message);
                }
            }
        }
    }
}

impl Region {
    /// Returns the memory here and there of a read.
    fn buffers(&self, pull: &Pull) -> Option<(Sge, RemoteBuffer)> {
        match pull.read {
            Read::Contents { unit, .. } => {
                let key = self.keys.get(pull.from as usize).copied().flatten()?;
                let bytes = self.pages.geometry().bytes_of(unit as u32);
                let into = self.mr.sge(bytes.start, (bytes.end - bytes.start) as u32);
                Some((into, key.slice(bytes)?))
            }
            Read::Release(read) => self.release_buffers(pull.from, read),
        }
    }

    /// Protects the view of all pages as the protocol has said, together. Returns their number.
    fn protect(&mut self) -> Result<usize, memory::Error> {
        let protections = std::mem::take(&mut self.protections);
        let count = protections.len();
        let geometry = self.pages.geometry();
        let rights = protections
            .iter()
            .map(|(unit, _, right)| (geometry.page_of(*unit as u32), *right));
        let counts = |counter| self.sheet.count_region(self.number, counter, 1);
        let changed = rights::change(self.pages.view(), &mut self.batch, rights, counts);
        if let Coherence::Sequential(protocol) = &mut self.coherence {
            for (unit, task, _) in &protections {
                protocol.handle_protected(*unit, *task);
            }
        }
        // The memory serves again.
        self.protections = protections;
        self.protections.clear();
        changed.map(|()| count)
    }
}

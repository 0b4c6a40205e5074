//! Messages of two nodes for a third one's part of a region, with faults of its program, ends of its tasks and departures, as a fuzz target. Logs of
//! a node, too.
//!
//! Two programs share this file, as they do `targets.rs`: `fuzz_targets/dsm_protocol.rs`, and `crates/dsm/tests/fuzz.rs`.

use std::fmt::Debug;

use rdmux_dsm::Access;
use rdmux_dsm::protocol::{self, Ahead, Body, Homes, Message, NodeId, Settings};
use rdmux_dsm::release::log::{Reader, Rest};
use rdmux_dsm::release::{self, Looked, Run};
use rdmux_wire::dsm::MESSAGE_LEN;
use rdmux_wire::dsm::notice::{HEADER_LEN, LOG_LEN, RUNS};

/// Bytes of an event: its kind, and a message or other details.
const EVENT_LEN: usize = 1 + MESSAGE_LEN;
const REGION: u32 = 7;
const UNITS: u64 = 9;
/// Units of a flush at most.
const RUN_MAX: u32 = 3;
/// Flushes of other nodes that are carried out at a time.
const SLOTS: usize = 2;
/// Actions of an event at most: each unit has at most two requests of each of the nodes, and each request few actions.
const ACTIONS_MAX: usize = 32 * UNITS as usize;
/// Tasks that are in progress at a time at most, in a region with release consistency.
const TASKS_MAX: usize = 64;
/// Tasks at most that end one after the other when no other node is left.
const ENDS_MAX: usize = 1000;

/// The node that takes the events, the two that send messages, and one that never was a member.
const IDS: [NodeId; 4] = [id(0), id(1), id(2), id(3)];
const MEMBERS: usize = 3;

const fn id(number: u32) -> NodeId {
    NodeId::new(number).unwrap()
}

/// A byte, and events behind it. The byte chooses what takes them: a node of a region with sequential consistency and homes by number, the same with
/// homes by first touch, a node of a region with release consistency, or the reader of a log.
///
/// The node never panics, an event has a bounded number of actions, a message that no correct node sends changes nothing, and each wait ends
/// when the other nodes have left.
pub(crate) fn dsm_protocol(input: &[u8]) {
    let Some((choice, events)) = input.split_first() else {
        return;
    };
    let (events, _) = events.as_chunks::<EVENT_LEN>();
    let members = &IDS[..MEMBERS];
    match choice % 4 {
        0 => drive(Coherent::new(Homes::cyclic(members, 1).unwrap()), events),
        1 => drive(Coherent::new(Homes::first_touch(members).unwrap()), events),
        2 if choice & 4 == 0 => drive(Relaxed::new(Homes::cyclic(members, 3).unwrap()), events),
        2 => drive(Relaxed::new(Homes::first_touch(members).unwrap()), events),
        _ => read_log(events),
    }
}

fn settings(homes: Homes) -> Settings {
    Settings {
        region: REGION,
        units: UNITS,
        homes,
        epoch: 0,
        members: IDS[..MEMBERS].to_vec(),
    }
}

/// An action of a node of either kind.
enum Polled {
    Send(NodeId, Message),
    Accuse(NodeId),
    Other,
}

/// A node's part of a region, with its driver.
trait Part: Clone + Debug + PartialEq {
    fn hear(&mut self, from: NodeId, message: &Message) -> Result<(), Ahead>;
    fn fault(&mut self, unit: u64, access: Access);
    fn gone(&mut self, epoch: u64, gone: &[NodeId]);

    /// Takes a wish of the program, besides faults.
    fn ask(&mut self, choice: u8);

    /// Ends a task in progress, and returns whether there was one.
    fn end(&mut self, details: &[u8; MESSAGE_LEN]) -> bool;

    /// Ends tasks that are not in progress, which changes nothing.
    fn end_other(&mut self, details: &[u8; MESSAGE_LEN]);

    fn next_action(&mut self) -> Option<Polled>;

    /// Checks what holds after each event.
    fn check(&self);

    /// Checks that nothing waits.
    fn check_end(&self);
}

/// Hands events on to the node of a [`Part`].
macro_rules! hands_on {
    () => {
        fn hear(&mut self, from: NodeId, message: &Message) -> Result<(), Ahead> {
            self.node.handle_message(from, message)
        }

        fn fault(&mut self, unit: u64, access: Access) {
            self.waits[unit as usize] = true;
            self.node.handle_fault(unit, access);
        }

        fn gone(&mut self, epoch: u64, gone: &[NodeId]) {
            self.node.handle_gone(epoch, gone);
        }
    };
}

/// The other nodes, as the node has to know them.
struct Others {
    epoch: u64,
    are_members: [bool; MEMBERS],
    /// Messages of each node that have got their number here.
    numbered: [u64; MEMBERS],
    /// Messages of the node to each other one.
    sent: [u64; MEMBERS],
    /// Number of the node's last request for each unit, and number of its units if it is a flush.
    asked: [(u64, u32); UNITS as usize],
}

impl Others {
    fn new() -> Others {
        Others {
            epoch: 0,
            are_members: [true; MEMBERS],
            numbered: [0; MEMBERS],
            sent: [0; MEMBERS],
            asked: [(0, 0); UNITS as usize],
        }
    }

    fn is_member(&self, node: NodeId) -> bool {
        self.are_members[node.number() as usize]
    }

    /// Reads a message. There is one way to write it, so emitting gives back the bytes. Bit 7 of the event says that the message is taken as it
    /// is.
    fn message(&mut self, event: u8, bytes: &[u8; MESSAGE_LEN]) -> Option<(NodeId, Message)> {
        let from = 1 + usize::from(event & 1);
        let mut message = Message::parse(bytes).ok()?;
        let mut emitted = [0xee; MESSAGE_LEN];
        message.emit(&mut emitted);
        assert_eq!(emitted, *bytes);
        if event >> 7 == 0 {
            self.fit(from, &mut message);
        }
        Some((IDS[from], message))
    }

    /// Changes a message to one of the region, with the number that the node expects, and an answer to one to the last request.
    fn fit(&mut self, from: usize, message: &mut Message) {
        message.region = REGION;
        message.epoch = message.epoch.min(self.epoch);
        message.sequence = self.numbered[from];
        self.numbered[from] += 1;
        message.unit %= UNITS;
        let (request, asked) = self.asked[message.unit as usize];
        let named = |node: NodeId| IDS[node.number() as usize % IDS.len()];
        let is_answer = matches!(
            message.body,
            Body::Grant { .. } | Body::Refuse(_) | Body::Home(_) | Body::Flushed { .. }
        );
        message.request = if is_answer { request } else { message.request % 4 };
        match &mut message.body {
            Body::Grant { source, .. } => *source = source.map(named),
            Body::Refuse(node) | Body::Home(node) => *node = named(*node),
            Body::Flush { units } => *units = 1 + (*units - 1) % RUN_MAX,
            Body::Flushed { units } if asked > 0 => *units = asked,
            _ => {}
        }
    }

    /// Checks a message of the node.
    fn check(&mut self, to: NodeId, message: &Message) {
        let at = to.number() as usize;
        assert!(at > 0 && self.are_members[at], "a message to {to:?}");
        assert_eq!((message.region, message.epoch), (REGION, self.epoch));
        assert_eq!(message.sequence, self.sent[at]);
        self.sent[at] += 1;
        let units = match message.body {
            Body::Flush { units } => units,
            _ => 0,
        };
        if matches!(message.body, Body::Ask(_) | Body::Locate | Body::Flush { .. }) {
            self.asked[message.unit as usize] = (message.request, units);
        }
        let mut emitted = [0xee; MESSAGE_LEN];
        message.emit(&mut emitted);
        assert_eq!(Message::parse(&emitted), Ok(*message));
    }
}

/// Events of a byte and 48 details each. The low 4 bits of the byte are the kind of event, bits 4 to 6 a node that leaves.
fn drive(mut part: impl Part, events: &[[u8; EVENT_LEN]]) {
    let mut others = Others::new();
    for [event, details @ ..] in events {
        match event & 15 {
            0..8 => take(&mut part, &mut others, *event, details),
            8 | 9 => {
                let access = [Access::Read, Access::Write][usize::from(details[1] & 1)];
                part.fault(u64::from(details[0]) % UNITS, access);
            }
            10 => part.ask(details[0]),
            11..14 => {
                part.end(details);
            }
            14 => part.end_other(details),
            _ => {
                let node = IDS[usize::from(event >> 4 & 7) % MEMBERS];
                leave(&mut part, &mut others, &[node]);
            }
        }
        settle(&mut part, &mut others, None);
    }
    leave(&mut part, &mut others, &IDS[1..MEMBERS]);
    end_all(&mut part, &mut others);
    for unit in 0..UNITS {
        part.fault(unit, Access::Write);
        settle(&mut part, &mut others, None);
    }
    for choice in 0..2 {
        part.ask(choice);
        settle(&mut part, &mut others, None);
    }
    end_all(&mut part, &mut others);
}

/// Hands a message to the node, twice.
fn take(part: &mut impl Part, others: &mut Others, event: u8, bytes: &[u8; MESSAGE_LEN]) {
    let Some((from, message)) = others.message(event, bytes) else {
        return;
    };
    let before = part.clone();
    if let Err(ahead) = part.hear(from, &message) {
        assert!(ahead.epoch == message.epoch && message.epoch > others.epoch);
        assert_eq!(*part, before, "a message that waits changes nothing");
        return;
    }
    if !others.is_member(from) {
        assert_eq!(*part, before, "a message of a node that is gone is dropped");
    }
    if settle(part, others, Some(from)) {
        let mut other = before;
        let of_none = Message {
            region: !REGION,
            ..message
        };
        assert_eq!(other.hear(from, &of_none), Ok(()));
        while other.next_action().is_some() {}
        assert_eq!(*part, other, "a message that is accused changes nothing");
    }
    let before = part.clone();
    assert_eq!(part.hear(from, &message), Ok(()));
    assert_eq!(*part, before, "a message that comes again changes nothing");
}

/// Tells the node that those of some nodes that are members, maybe it itself, have left with a new epoch.
fn leave(part: &mut impl Part, others: &mut Others, nodes: &[NodeId]) {
    let members = nodes.iter().copied().filter(|it| others.is_member(*it));
    let gone: Vec<NodeId> = members.collect();
    others.epoch += 1;
    let is_expelled = gone.contains(&IDS[0]);
    for (is_member, node) in others.are_members.iter_mut().zip(IDS) {
        *is_member &= !is_expelled && !gone.contains(&node);
    }
    part.gone(others.epoch, &gone);
    settle(part, others, None);
}

/// Takes the actions of an event, which is a message of a node or none. Returns whether the message accuses the node.
fn settle(part: &mut impl Part, others: &mut Others, from: Option<NodeId>) -> bool {
    let (mut count, mut is_accused) = (0, false);
    while let Some(action) = part.next_action() {
        count += 1;
        assert!(count <= ACTIONS_MAX, "more than {ACTIONS_MAX} actions");
        match action {
            Polled::Send(to, message) => others.check(to, &message),
            Polled::Accuse(node) => {
                assert_eq!(Some(node), from, "the sender of the message is accused");
                is_accused = true;
            }
            Polled::Other => {}
        }
    }
    assert!(!is_accused || count == 1, "an accusation is the only action");
    part.check();
    is_accused
}

/// Ends all tasks when the other nodes have left: nothing waits any more. No read lands.
fn end_all(part: &mut impl Part, others: &mut Others) {
    let mut count = 0;
    while part.end(&[0; MESSAGE_LEN]) {
        settle(part, others, None);
        count += 1;
        assert!(count < ENDS_MAX, "tasks do not end");
    }
    part.check_end();
}

/// A node of a region with sequential consistency.
#[derive(Clone, Debug, PartialEq)]
struct Coherent {
    node: protocol::Node,
    /// The task of each unit that is in progress.
    tasks: [Option<protocol::Action>; UNITS as usize],
    /// Threads wait for a unit.
    waits: [bool; UNITS as usize],
}

impl Coherent {
    fn new(homes: Homes) -> Coherent {
        Coherent {
            node: protocol::Node::new(IDS[0], &settings(homes)),
            tasks: [None; UNITS as usize],
            waits: [false; UNITS as usize],
        }
    }
}

impl Part for Coherent {
    hands_on!();

    fn ask(&mut self, choice: u8) {
        self.fault(u64::from(choice) % UNITS, Access::Write);
    }

    fn end(&mut self, details: &[u8; MESSAGE_LEN]) -> bool {
        let first = usize::from(details[0]) % self.tasks.len();
        let mut units = (first..self.tasks.len()).chain(0..first);
        let task = units.find_map(|unit| self.tasks[unit].take());
        match task {
            Some(protocol::Action::Pull { unit, task, .. }) => {
                self.node.handle_pulled(unit, task, details[1] & 1 == 1);
            }
            Some(protocol::Action::Protect { unit, task, .. }) => self.node.handle_protected(unit, task),
            _ => {}
        }
        task.is_some()
    }

    fn end_other(&mut self, details: &[u8; MESSAGE_LEN]) {
        let [unit, other, flags, ..] = *details;
        let (unit, other) = (u64::from(unit) % UNITS, u64::from(other));
        let task = match self.tasks[unit as usize] {
            Some(protocol::Action::Pull { task, .. } | protocol::Action::Protect { task, .. }) => {
                task + 1 + other
            }
            _ => other,
        };
        let before = self.node.clone();
        match flags & 1 {
            0 => self.node.handle_pulled(unit, task, flags & 2 == 2),
            _ => self.node.handle_protected(unit, task),
        }
        assert_eq!(self.node, before, "no such task is in progress");
    }

    fn next_action(&mut self) -> Option<Polled> {
        let action = self.node.poll_action()?;
        match action {
            protocol::Action::Send { to, message } => return Some(Polled::Send(to, message)),
            protocol::Action::Accuse { node, .. } => return Some(Polled::Accuse(node)),
            protocol::Action::Pull { unit, .. } | protocol::Action::Protect { unit, .. } => {
                let before = self.tasks[unit as usize].replace(action);
                assert_eq!(before, None, "a unit has one task at a time");
            }
            protocol::Action::Wake { unit } | protocol::Action::Poison { unit, .. } => {
                self.waits[unit as usize] = false;
            }
        }
        if let protocol::Action::Pull { from, .. } = action {
            assert!(IDS[1..MEMBERS].contains(&from), "a read from {from:?}");
        }
        Some(Polled::Other)
    }

    fn check(&self) {
        for (unit, waits) in (0..).zip(self.waits) {
            assert!(!waits || self.node.is_awaited(unit), "unit {unit} has a request");
        }
        assert!(self.node.waits().all(|it| self.node.is_member(it.node)));
    }

    fn check_end(&self) {
        for unit in 0..UNITS {
            assert!(!self.node.is_awaited(unit), "unit {unit}");
            assert_eq!(self.node.waits_for(unit).next(), None, "unit {unit}");
        }
        assert_eq!(self.node.waits().next(), None);
    }
}

/// A node of a region with release consistency.
#[derive(Clone, Debug, PartialEq)]
struct Relaxed {
    node: release::Node,
    /// Tasks in progress.
    tasks: Vec<release::Action>,
    /// Threads wait for a unit.
    waits: [bool; UNITS as usize],
    /// The last release and the last acquire.
    rounds: [u64; 2],
}

impl Relaxed {
    fn new(homes: Homes) -> Relaxed {
        Relaxed {
            node: release::Node::new(IDS[0], &settings(homes), SLOTS, RUN_MAX),
            tasks: Vec::new(),
            waits: [false; UNITS as usize],
            rounds: [0; 2],
        }
    }
}

impl Part for Relaxed {
    hands_on!();

    fn ask(&mut self, choice: u8) {
        let round = match choice & 1 {
            0 => self.node.handle_release(),
            _ => self.node.handle_acquire(),
        };
        let last = &mut self.rounds[usize::from(choice & 1)];
        *last = round.max(*last);
    }

    fn end(&mut self, details: &[u8; MESSAGE_LEN]) -> bool {
        if self.tasks.is_empty() {
            return false;
        }
        let at = usize::from(details[0]) % self.tasks.len();
        let outcomes = [0, 1, 2].map(|bit| details[1] >> bit & 1 == 1);
        match self.tasks.remove(at) {
            release::Action::Pull { unit, task, .. } => self.node.handle_pulled(unit, task, outcomes[0]),
            release::Action::Compare { task, .. } => self.node.handle_compared(task, &outcomes),
            release::Action::Fetch { slot, .. } | release::Action::Land { slot, .. } => {
                self.node.handle_fetched(slot, outcomes[0]);
            }
            release::Action::Apply { slot, .. } => self.node.handle_applied(slot, &outcomes),
            release::Action::Look { node } => self.node.handle_looked(node, looked(details)),
            _ => {}
        }
        true
    }

    fn end_other(&mut self, details: &[u8; MESSAGE_LEN]) {
        let [kind, other, ..] = *details;
        // The node counts its tasks from 0 on, and looks at no log of a node that never was a member.
        let (task, slot) = (u64::MAX - u64::from(other), SLOTS + usize::from(other));
        let before = self.node.clone();
        match kind % 5 {
            0 => self.node.handle_pulled(u64::from(other) % UNITS, task, true),
            1 => self.node.handle_compared(task, &[true; RUN_MAX as usize]),
            2 => self.node.handle_fetched(slot, true),
            3 => self.node.handle_applied(slot, &[true; RUN_MAX as usize]),
            _ => self.node.handle_looked(IDS[MEMBERS], looked(details)),
        }
        assert_eq!(self.node, before, "no such task is in progress");
    }

    fn next_action(&mut self) -> Option<Polled> {
        let action = self.node.poll_action()?;
        match action {
            release::Action::Send { to, message } => return Some(Polled::Send(to, message)),
            release::Action::Accuse { node, .. } => return Some(Polled::Accuse(node)),
            release::Action::Compare { run, .. } => {
                assert!(run.units().end <= UNITS);
                self.tasks.push(action);
            }
            release::Action::Fetch { run, slot, .. }
            | release::Action::Land { run, slot, .. }
            | release::Action::Apply { run, slot, .. } => {
                assert!(run.units().end <= UNITS && slot < SLOTS);
                self.tasks.push(action);
            }
            release::Action::Pull { .. } | release::Action::Look { .. } => self.tasks.push(action),
            release::Action::Protect { unit, .. }
            | release::Action::Wake { unit }
            | release::Action::Poison { unit, .. } => self.waits[unit as usize] = false,
            release::Action::Append { run } => assert!(run.units().end <= UNITS),
            release::Action::Copy { .. } | release::Action::Ended => {}
        }
        Some(Polled::Other)
    }

    fn check(&self) {
        for (unit, waits) in (0..).zip(self.waits) {
            assert!(!waits || self.node.is_awaited(unit), "unit {unit} is awaited");
        }
        assert!(self.tasks.len() <= TASKS_MAX, "{:?}", self.tasks);
    }

    fn check_end(&self) {
        for unit in 0..UNITS {
            assert!(!self.node.is_awaited(unit), "unit {unit}");
        }
        assert_eq!(self.node.waits().next(), None);
        let [release, acquire] = self.rounds;
        assert!(self.node.released(release).is_some(), "release {release}");
        assert!(self.node.acquired(acquire), "acquire {acquire}");
    }
}

/// Returns the result of a look at a log.
fn looked(details: &[u8; MESSAGE_LEN]) -> Looked {
    let (runs, _) = details[8..].as_chunks::<8>();
    match details[1] & 3 {
        0 => Looked::Failed,
        1 => Looked::Lapped,
        _ => Looked::Runs(runs.iter().filter_map(|it| Run::parse(*it).ok()).collect()),
    }
}

/// Reads a log for each event, of which the first 16 details are the header, and the others go to a place in turn. Bit 7 of the event says that
/// the header is taken as it is; otherwise its counts are small.
fn read_log(events: &[[u8; EVENT_LEN]]) {
    let (mut reader, mut log) = (Reader::default(), vec![0u8; LOG_LEN]);
    for (number, [event, details @ ..]) in events.iter().enumerate() {
        let (header, runs) = details.split_at(HEADER_LEN);
        log[..HEADER_LEN].copy_from_slice(header);
        if event >> 7 == 0 {
            let (counts, _) = log[..HEADER_LEN].as_chunks_mut::<8>();
            for count in counts {
                *count = (u64::from_le_bytes(*count) % (2 * RUNS)).to_le_bytes();
            }
        }
        let at = HEADER_LEN + number * runs.len() % (LOG_LEN - HEADER_LEN - runs.len());
        log[at..at + runs.len()].copy_from_slice(runs);
        if let Rest::Read(parts) = reader.begin(&log[..HEADER_LEN]) {
            assert!(parts.iter().all(|it| it.start <= it.end && it.end <= LOG_LEN));
            if let Looked::Runs(runs) = reader.end(&log) {
                assert!(runs.len() as u64 <= RUNS);
            }
        }
    }
}

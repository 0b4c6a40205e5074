//! Nodes, their memories, programs and connections, of which a test chooses the next step. The rules that must hold are checked at each step.
#![allow(dead_code, reason = "each test uses a part")]

#[path = "../history/mod.rs"]
mod history;
pub(crate) mod model;

use std::collections::BTreeMap;
use std::sync::Arc;

use rdmux_dsm::protocol::{Access, Action, Body, Homes, Message, Node, NodeId, Right, Settings};

use self::history::{Event, has_order};
pub(crate) use crate::network::Place;
use crate::network::{Network, Underway};

/// An access of a program: the kind and the unit.
pub(crate) type Operation = (Access, usize);

/// Events that may happen besides the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Mishaps {
    /// Messages that come twice.
    pub(crate) duplicates: u8,
    /// Nodes that stop for ever.
    pub(crate) crashes: u8,
    /// Nodes that are expelled but go on until they are told.
    pub(crate) expulsions: u8,
    /// Tasks of drivers whose end is reported a second time.
    pub(crate) repeats: u8,
    /// The only node that may stop or be expelled; otherwise any one may.
    pub(crate) leaver: Option<Place>,
    /// Messages of a pair of nodes overtake each other.
    pub(crate) reorders: bool,
    /// A node sends what it likes. Units in which it has a part need not keep the rules.
    pub(crate) hostile: Option<Place>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    /// Worlds that differ in one step share most of them.
    sites: Vec<Arc<Site>>,
    pub(crate) threads: Vec<Thread>,
    network: Network<Message>,
    /// Homes of the units, or their registrars.
    homes: Arc<[Place]>,
    /// Value written last, by unit.
    last: Vec<u32>,
    /// By unit: the hostile node has a part in it, as its home or by a message about it for which it was not accused.
    has_part: Vec<bool>,
    /// Messages that the hostile node has sent, by receiver.
    numbers: BTreeMap<Place, u64>,
    /// Nodes that have left, in the order of the epochs.
    gone: Vec<Place>,
    mishaps: Mishaps,
    /// Faults that an access may take before its program gives it up.
    faults_max: u8,
    /// The first rule that was broken.
    pub(crate) flaw: Option<String>,
}

/// A node with its driver and its memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Site {
    node: Node,
    is_running: bool,
    /// Contents of the frames, and what the program may do with them, by unit.
    frames: Vec<u32>,
    views: Vec<Right>,
    /// Tasks of the driver that are in progress.
    pulls: Vec<Task<Place>>,
    protects: Vec<Task<Right>>,
    /// By unit: it is to be poisoned when its task in progress has ended.
    is_poisoned: Vec<bool>,
    /// The last tasks that have ended, whose end may be reported again.
    ended: Vec<Ended>,
}

/// A task of the driver, with the node to read from or the right to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Task<T> {
    unit: usize,
    number: u64,
    what: T,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ended {
    unit: usize,
    number: u64,
    is_pull: bool,
}

/// A thread of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Thread {
    at: Place,
    pub(crate) program: Arc<[Operation]>,
    /// Accesses that have ended, with the value read or written; none if the unit was lost, or the program gave up.
    pub(crate) results: Vec<Option<u32>>,
    waits: bool,
    faults: u8,
}

/// The next event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A thread attempts its next access.
    Access(usize),
    Deliver(Underway),
    Duplicate(Underway),
    /// A read of contents ends.
    Pulled {
        at: Place,
        index: usize,
        has_landed: bool,
    },
    Protected {
        at: Place,
        index: usize,
    },
    /// The end of a task is reported again.
    Repeat {
        at: Place,
        index: usize,
    },
    Crash(Place),
    Expel(Place),
    /// A node hears of an epoch, and of all who have left until then.
    Tell {
        at: Place,
        epoch: u64,
    },
}

/// Value of a frame that holds no contents.
const NOTHING: u32 = u32::MAX;
/// A node reports the end of one of its last few tasks again.
const REPEATABLE: usize = 4;

pub(crate) fn id(place: Place) -> NodeId {
    NodeId::new(place as u32).unwrap()
}

fn place(node: NodeId) -> Place {
    node.number() as Place
}

impl World {
    /// Makes a world of threads, each at a node. `homes` are those of the units, or their registrars if the first touch makes the home.
    pub(crate) fn new(
        threads: &[(Place, Arc<[Operation]>)],
        (homes, is_first_touch): (&[Place], bool),
        mishaps: Mishaps,
        faults_max: u8,
    ) -> World {
        let nodes = 1 + threads.iter().map(|it| it.0).max().unwrap();
        let ids: Vec<_> = homes.iter().map(|it| id(*it)).collect();
        let settings = Settings {
            region: 7,
            units: homes.len() as u64,
            homes: match is_first_touch {
                // The hash of a unit below 2 is the unit; others get any of the nodes.
                true => Homes::first_touch(ids).unwrap(),
                false => Homes::cyclic(ids, 1).unwrap(),
            },
            epoch: 0,
            members: (0..nodes).map(id).collect(),
        };
        let deciders = (0..settings.units).map(|it| place(settings.homes.of(it)));
        let homes: &[Place] = &deciders.collect::<Vec<_>>();
        let site = |at: Place| Site {
            node: Node::new(id(at), &settings),
            is_running: true,
            // Only the frame of the home holds the contents, which are 0, if it is known.
            frames: homes
                .iter()
                .map(|it| if is_first_touch || *it == at { 0 } else { NOTHING })
                .collect(),
            views: vec![Right::Invalid; homes.len()],
            pulls: vec![],
            protects: vec![],
            is_poisoned: vec![false; homes.len()],
            ended: vec![],
        };
        let thread = |(at, program): &(Place, Arc<[Operation]>)| Thread {
            at: *at,
            program: program.clone(),
            results: vec![],
            waits: false,
            faults: 0,
        };
        World {
            sites: (0..nodes).map(site).map(Arc::new).collect(),
            threads: threads.iter().map(thread).collect(),
            homes: homes.into(),
            network: Network::new(mishaps.reorders),
            last: vec![0; homes.len()],
            has_part: homes.iter().map(|it| mishaps.hostile == Some(*it)).collect(),
            numbers: BTreeMap::new(),
            gone: vec![],
            mishaps,
            faults_max,
            flaw: None,
        }
    }

    /// Adds all that can happen next.
    pub(crate) fn steps(&self, steps: &mut Vec<Step>) {
        if self.flaw.is_some() {
            return;
        }
        for (index, thread) in self.threads.iter().enumerate() {
            if self.sites[thread.at].is_running && !thread.waits && thread.next().is_some() {
                steps.push(Step::Access(index));
            }
        }
        for (at, site) in self.sites.iter().enumerate().filter(|(_, it)| it.is_running) {
            for (index, pull) in site.pulls.iter().enumerate() {
                let source = &self.sites[pull.what];
                let (is_open, is_sound) = (
                    self.lets_read(pull.what, at),
                    source.is_running && !self.has_left(pull.what),
                );
                if is_open {
                    steps.push(Step::Pulled {
                        at,
                        index,
                        has_landed: true,
                    });
                }
                if !is_open || !is_sound {
                    steps.push(Step::Pulled {
                        at,
                        index,
                        has_landed: false,
                    });
                }
            }
            steps.extend((0..site.protects.len()).map(|index| Step::Protected { at, index }));
            steps.extend((0..site.ended.len()).map(|index| Step::Repeat { at, index }));
            if site.node.is_member(id(at)) {
                let epochs = site.node.epoch() + 1..=self.gone.len() as u64;
                steps.extend(epochs.map(|epoch| Step::Tell { at, epoch }));
            }
            if !self.has_left(at) && self.mishaps.leaver.is_none_or(|it| it == at) {
                if self.mishaps.crashes > 0 {
                    steps.push(Step::Crash(at));
                }
                if self.mishaps.expulsions > 0 {
                    steps.push(Step::Expel(at));
                }
            }
        }
        steps.extend(self.network.ready().map(Step::Deliver));
        if self.mishaps.duplicates > 0 {
            steps.extend(self.network.all().map(Step::Duplicate));
        }
    }

    /// Returns whether nothing is left to happen but mishaps.
    pub(crate) fn is_quiet(&self) -> bool {
        if !self.network.is_empty() {
            return false;
        }
        let mut steps = vec![];
        self.steps(&mut steps);
        steps.iter().all(|it| it.is_mishap())
    }

    /// Returns the rule that is broken, if any.
    pub(crate) fn broken(&self) -> Option<String> {
        if let Some(flaw) = &self.flaw {
            return Some(flaw.clone());
        }
        if !self.is_quiet() {
            return None;
        }
        let stuck = self.stuck();
        if stuck.is_some() {
            return stuck;
        }
        let events = |thread: &Thread| {
            let history = thread.history().into_iter();
            let event = |((access, unit), value): (Operation, u32)| match access {
                Access::Read => Event::read(unit, value.into()),
                Access::Write => Event::write(unit, value.into()),
            };
            history.map(event).collect()
        };
        let events: Vec<Vec<Event>> = self.threads.iter().map(events).collect();
        (!has_order(&events, None)).then(|| format!("no order of {events:?}"))
    }

    /// Returns a site, which no other world shares from now on.
    fn site(&mut self, at: Place) -> &mut Site {
        Arc::make_mut(&mut self.sites[at])
    }

    /// Expels a node.
    pub(crate) fn expel(&mut self, at: Place) {
        self.gone.push(at);
    }

    /// Has the hostile node send a message.
    pub(crate) fn forge(&mut self, to: Place, unit: u64, request: u64, body: Body) {
        let from = self.mishaps.hostile.unwrap();
        let message = Message {
            region: 7,
            epoch: self.sites[from].node.epoch(),
            sequence: 0,
            request,
            unit,
            body,
        };
        self.send(from, to, message);
    }

    fn send(&mut self, from: Place, to: Place, mut message: Message) {
        if self.is_hostile(from) {
            // Its own messages and the forged ones are numbered together.
            let number = self.numbers.entry(to).or_default();
            message.sequence = *number;
            *number += 1;
        }
        if self.sites[to].is_running {
            self.network.send(from, to, message.sequence, message);
        }
    }

    /// Returns how many accesses took place to units in which the hostile node has no part.
    pub(crate) fn untouched(&self) -> usize {
        let histories = self.threads.iter().flat_map(Thread::history);
        histories.filter(|((_, unit), _)| !self.has_part[*unit]).count()
    }

    fn is_hostile(&self, at: Place) -> bool {
        self.mishaps.hostile == Some(at)
    }

    /// Returns the rule that is broken if nothing is left to happen and a thread waits.
    pub(crate) fn stuck(&self) -> Option<String> {
        let waits = |it: &Thread| it.waits && self.sites[it.at].is_running && !self.is_hostile(it.at);
        let index = self.threads.iter().position(waits)?;
        Some(format!("thread {index} waits for ever"))
    }

    pub(crate) fn take(&mut self, step: Step) {
        let unit = match step {
            Step::Access(index) => Some(self.access(index)),
            Step::Deliver(underway) => {
                let Underway { from, to, .. } = underway;
                let message = self.network.get(underway);
                if self.site(to).node.handle_message(id(from), &message).is_err() {
                    // It waits where it is.
                    return;
                }
                self.network.remove(underway);
                let is_accused = self.carry_out(to);
                if self.is_hostile(from) && self.sites[to].node.is_member(id(from)) && !is_accused {
                    self.has_part[message.unit as usize] = true;
                }
                Some(message.unit as usize)
            }
            Step::Duplicate(underway) => {
                self.mishaps.duplicates -= 1;
                self.network.duplicate(underway);
                return;
            }
            Step::Pulled {
                at,
                index,
                has_landed,
            } => {
                let Task { unit, number, what } = self.site(at).pulls.remove(index);
                self.site(at).frames[unit] = match has_landed {
                    true => self.sites[what].frames[unit],
                    false => NOTHING,
                };
                let is_pull = true;
                self.end_task(
                    at,
                    Ended {
                        unit,
                        number,
                        is_pull,
                    },
                    has_landed,
                );
                Some(unit)
            }
            Step::Protected { at, index } => {
                let Task { unit, number, what } = self.site(at).protects.remove(index);
                self.site(at).views[unit] = what;
                let is_pull = false;
                self.end_task(
                    at,
                    Ended {
                        unit,
                        number,
                        is_pull,
                    },
                    true,
                );
                Some(unit)
            }
            Step::Repeat { at, index } => {
                self.mishaps.repeats -= 1;
                let ended = self.site(at).ended.remove(index);
                self.report(at, ended, true);
                if self.mishaps.repeats == 0 {
                    self.sites
                        .iter_mut()
                        .for_each(|it| Arc::make_mut(it).ended.clear());
                }
                Some(ended.unit)
            }
            Step::Crash(at) => {
                self.mishaps.crashes -= 1;
                self.gone.push(at);
                self.site(at).is_running = false;
                self.network.stop(at);
                None
            }
            Step::Expel(at) => {
                self.mishaps.expulsions -= 1;
                self.expel(at);
                None
            }
            Step::Tell { at, epoch } => {
                let node = &mut Arc::make_mut(&mut self.sites[at]).node;
                let gone = &self.gone[node.epoch() as usize..epoch as usize];
                let gone: Vec<_> = gone.iter().map(|it| id(*it)).collect();
                node.handle_gone(epoch, &gone);
                self.carry_out(at);
                None
            }
        };
        // A step about one unit changes no other one.
        let units = unit.map_or(0..self.homes.len(), |unit| unit..unit + 1);
        for unit in units {
            if let Some(flaw) = self.flaw_of_unit(unit) {
                self.complain(unit, flaw);
            }
        }
    }

    /// Attempts a thread's next access, and returns its unit.
    fn access(&mut self, index: usize) -> usize {
        let thread = &mut self.threads[index];
        let (at, (access, unit)) = (thread.at, thread.next().unwrap());
        let site = Arc::make_mut(&mut self.sites[at]);
        if site.views[unit] >= access.needs() {
            if access == Access::Write {
                // Each write has a value of its own.
                let value = 1 + index as u32 * 1000 + thread.results.len() as u32;
                site.frames[unit] = value;
                self.last[unit] = value;
            }
            let value = site.frames[unit];
            thread.end(Some(value));
            if value != self.last[unit] && !self.has_left(at) {
                self.complain(unit, format!("node {at} reads {value} from {unit}"));
            }
        } else if thread.faults == self.faults_max {
            thread.end(None);
        } else {
            thread.faults += 1;
            thread.waits = true;
            site.node.handle_fault(unit as u64, access);
            self.carry_out(at);
        }
        unit
    }

    /// Ends a task, and begins what waits for its end.
    fn end_task(&mut self, at: Place, ended: Ended, has_landed: bool) {
        self.report(at, ended, has_landed);
        self.poison(at, ended.unit);
        if self.mishaps.repeats > 0 {
            let repeatable = &mut self.site(at).ended;
            repeatable.push(ended);
            if repeatable.len() > REPEATABLE {
                repeatable.remove(0);
            }
        }
    }

    fn report(&mut self, at: Place, ended: Ended, has_landed: bool) {
        let (node, unit) = (&mut self.site(at).node, ended.unit as u64);
        match ended.is_pull {
            true => node.handle_pulled(unit, ended.number, has_landed),
            false => node.handle_protected(unit, ended.number),
        }
        self.carry_out(at);
    }

    /// Poisons a unit if that is to be done and no task is in progress.
    fn poison(&mut self, at: Place, unit: usize) {
        let site = self.site(at);
        if site.is_poisoned[unit] && !site.has_task(unit) {
            site.views[unit] = Right::Invalid;
            self.end_waits(at, unit, |thread| thread.end(None));
        }
    }

    /// Does what a node's driver does, and returns whether the hostile node is accused.
    fn carry_out(&mut self, at: Place) -> bool {
        let mut is_accused = false;
        while let Some(action) = self.site(at).node.poll_action() {
            let site = self.site(at);
            match action {
                Action::Send { to, message } => {
                    self.send(at, place(to), message);
                }
                Action::Pull { unit, task, from } => {
                    let what = place(from);
                    site.pulls.push(Task::new(unit, task, what));
                    self.check_order(at, unit as usize);
                }
                Action::Protect { unit, task, right } => {
                    site.protects.push(Task::new(unit, task, right));
                    self.check_order(at, unit as usize);
                }
                Action::Wake { unit } => self.end_waits(at, unit as usize, |_| {}),
                Action::Poison { unit, node } => {
                    let unit = unit as usize;
                    site.is_poisoned[unit] = true;
                    self.poison(at, unit);
                    if !self.has_left(place(node)) {
                        self.complain(unit, format!("a unit is lost with {node:?}, which has not left"));
                    }
                }
                Action::Accuse { node, violation } => {
                    is_accused |= self.is_hostile(place(node));
                    if !self.is_hostile(at) && !self.is_hostile(place(node)) {
                        let flaw = format!("{node:?} is accused: {violation}");
                        self.flaw.get_or_insert(flaw);
                    }
                }
            }
        }
        is_accused
    }

    /// Complains if a task of a unit begins that has been poisoned.
    fn check_order(&mut self, at: Place, unit: usize) {
        if self.sites[at].is_poisoned[unit] {
            self.complain(
                unit,
                format!("node {at} goes on with unit {unit}, which it has poisoned"),
            );
        }
    }

    fn end_waits(&mut self, at: Place, unit: usize, end: impl Fn(&mut Thread)) {
        let is_at = |it: &Operation| it.1 == unit;
        for thread in self.threads.iter_mut().filter(|it| it.at == at && it.waits) {
            if thread.next().as_ref().is_some_and(is_at) {
                thread.waits = false;
                end(thread);
            }
        }
    }

    /// Returns the rule that is broken of those that hold between steps, for the nodes that have not left.
    fn flaw_of_unit(&self, unit: usize) -> Option<String> {
        let members = || {
            self.sites
                .iter()
                .enumerate()
                .filter(|(at, _)| !self.has_left(*at))
        };
        let holders = || members().filter(|(_, site)| site.holds(unit)).map(|(at, _)| at);
        let writer = members().find(|(_, site)| site.views[unit] == Right::Exclusive);
        if let Some((writer, _)) = writer
            && holders().count() > 1
        {
            let holders: Vec<_> = holders().collect();
            return Some(format!("{holders:?} have unit {unit}, and {writer} writes it"));
        }
        for (at, site) in members() {
            for from in site.pulls.iter().filter(|it| it.unit == unit).map(|it| it.what) {
                let is_written = writer.is_some_and(|it| it.0 == from);
                if is_written || site.views[unit] != Right::Invalid {
                    return Some(format!("unit {unit} is used while {at} reads it from {from}"));
                }
            }
        }
        let is_home = |at: &Place| self.sites[*at].node.home(unit as u64) == Some(id(*at));
        let mut homes = (0..self.sites.len()).filter(is_home);
        let home = homes.next()?;
        if let Some(other) = homes.next() {
            return Some(format!("unit {unit} has the homes {home} and {other}"));
        }
        if self.has_left(home) || holders().next().is_none() {
            return None;
        }
        let known = self.sites[home].node.holders(unit as u64);
        let is_known = |at: Place| known.contains(&id(at));
        (!holders().all(is_known)).then(|| {
            let holders: Vec<_> = holders().collect();
            format!("{holders:?} have unit {unit}, the home knows {known:?}")
        })
    }

    /// Returns whether the frames of a node are readable for another one: until it hears that the other has left. A read that ends now may have
    /// read the memory of a node before it stopped.
    fn lets_read(&self, source: Place, reader: Place) -> bool {
        self.sites[source].node.is_member(id(reader))
    }

    fn has_left(&self, at: Place) -> bool {
        self.gone.contains(&at)
    }

    /// Records a broken rule of a unit.
    fn complain(&mut self, unit: usize, flaw: String) {
        if !self.has_part[unit] {
            self.flaw.get_or_insert(flaw);
        }
    }
}

impl<T> Task<T> {
    fn new(unit: u64, number: u64, what: T) -> Task<T> {
        let unit = unit as usize;
        Task { unit, number, what }
    }
}

impl Step {
    /// Returns whether the step is none of the protocol, so that a run may end before it.
    pub(crate) fn is_mishap(&self) -> bool {
        matches!(
            self,
            Step::Crash(_) | Step::Expel(_) | Step::Duplicate(_) | Step::Repeat { .. }
        )
    }
}

impl Site {
    fn has_task(&self, unit: usize) -> bool {
        self.pulls.iter().any(|it| it.unit == unit) || self.protects.iter().any(|it| it.unit == unit)
    }

    fn holds(&self, unit: usize) -> bool {
        self.views[unit] != Right::Invalid || self.node.right(unit as u64) != Right::Invalid
    }
}

impl Thread {
    /// Returns the next access.
    fn next(&self) -> Option<Operation> {
        self.program.get(self.results.len()).copied()
    }

    /// Ends an access.
    fn end(&mut self, result: Option<u32>) {
        self.results.push(result);
        self.faults = 0;
    }

    /// Returns the access that has ended last, if it took place.
    pub(crate) fn last(&self) -> Option<(Operation, u32)> {
        let value = (*self.results.last()?)?;
        Some((self.program[self.results.len() - 1], value))
    }

    /// Returns the accesses that took place.
    fn history(&self) -> Vec<(Operation, u32)> {
        let ended = self.program.iter().zip(&self.results);
        ended.filter_map(|(it, result)| Some((*it, (*result)?))).collect()
    }
}

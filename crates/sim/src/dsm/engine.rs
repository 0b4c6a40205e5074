//! The clock of a replay, and what its nodes do as time goes on.

use std::collections::BTreeMap;

use rdmux_dsm::protocol::{self, NodeId};
use rdmux_dsm::release::{self, Looked};
use rdmux_dsm::trace::{Event, Trace, units_at_once};
use rdmux_dsm::{Access, sync};
use rdmux_wire::dsm::notice::HEADER_LEN;

use super::node::{Coherence, Node, Pages, State, Wait, Work};
use super::{Costs, Moment, ReplayError, Report};

/// Bytes of an entry of a log.
const LOG_ENTRY_BYTES: u64 = 8;

/// Something that happens at a node.
#[derive(Debug)]
enum Happening {
    /// Its thread comes to the event of its step.
    Computed,
    /// Something has come for it.
    Arrived(Work),
    /// It notices what has come while its thread computes.
    Late,
    /// It has handled something; nothing if it has only spent time.
    Handled(Option<Work>),
}

/// A replay in progress.
#[derive(Debug)]
pub(super) struct Engine<'a> {
    costs: Costs,
    nodes: Vec<Node<'a>>,
    members: Vec<NodeId>,
    /// All that will happen, by time, and at one time in the order in which it was decided.
    events: BTreeMap<(u64, u64), (usize, Happening)>,
    decided: u64,
    now: u64,
    failure: Option<ReplayError>,
}

impl<'a> Engine<'a> {
    pub(super) fn new(traces: &'a [Trace], costs: Costs) -> Result<Engine<'a>, ReplayError> {
        let nodes = traces.first().map_or(0, |trace| trace.nodes);
        let are_all = traces.iter().map(|trace| trace.node).eq(0..nodes);
        let first = traces.first().filter(|_| are_all);
        let is_of_run = |trace: &Trace| first.is_some_and(|first| trace.regions().eq(first.regions()));
        if first.is_none() || !traces.iter().all(is_of_run) {
            return Err(ReplayError::Nodes(traces.len(), nodes));
        }
        let members: Vec<NodeId> = (0..nodes).filter_map(NodeId::new).collect();
        let node = |(own, trace)| Node::new(own, &members, trace);
        let nodes = members.iter().copied().zip(traces).map(node);
        Ok(Engine {
            costs,
            nodes: nodes.collect::<Result<_, _>>()?,
            members,
            events: BTreeMap::new(),
            decided: 0,
            now: 0,
            failure: None,
        })
    }

    pub(super) fn run(mut self) -> Result<Vec<Report>, ReplayError> {
        for node in 0..self.nodes.len() {
            self.begin_step(node, 0);
        }
        while let Some(((now, _), (node, what))) = self.events.pop_first() {
            self.now = now;
            match what {
                Happening::Computed => self.computed(node),
                Happening::Arrived(work) => self.arrived(node, work),
                Happening::Late => {
                    if self.nodes[node].late_until == Some(now) {
                        self.take_held(node);
                        self.handle_next(node);
                    }
                }
                Happening::Handled(work) => self.handled(node, work),
            }
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        for (number, node) in self.nodes.iter().enumerate() {
            if !matches!(node.state, State::Ended) {
                return Err(ReplayError::Stuck {
                    node: number as u32,
                    line: node.line(),
                });
            }
        }
        // Nodes serve others after their end.
        let report = |node: Node<'_>| {
            let at_ns = node.report.end.at_ns;
            let end = Moment { at_ns, ..node.moment };
            Report { end, ..node.report }
        };
        Ok(self.nodes.into_iter().map(report).collect())
    }

    fn decide(&mut self, at: u64, node: usize, what: Happening) {
        self.events.insert((at, self.decided), (node, what));
        self.decided += 1;
    }

    /// Returns the time at a node, which may have spent some since the clock's.
    fn time(&self, node: usize) -> u64 {
        self.now.saturating_add(self.nodes[node].spent_ns)
    }

    fn spend(&mut self, node: usize, ns: u64) {
        let spent = &mut self.nodes[node].spent_ns;
        *spent = spent.saturating_add(ns);
    }

    fn fail(&mut self, node: usize, problem: impl Into<String>) {
        let line = self.nodes[node].line();
        self.failure.get_or_insert(ReplayError::Step {
            node: node as u32,
            line,
            problem: problem.into(),
        });
    }

    /// Has a node's thread begin its step at a time.
    fn begin_step(&mut self, number: usize, at: u64) {
        let node = &mut self.nodes[number];
        match node.steps.get(node.at) {
            Some(step) => {
                node.state = State::Computes;
                let computed = at.saturating_add(step.cpu_ns);
                self.decide(computed, number, Happening::Computed);
            }
            None => {
                node.state = State::Ended;
                node.moment.at_ns = at;
                node.report.end = node.moment;
                self.take_held(number);
                self.handle_next(number);
            }
        }
    }

    /// Ends a step at the node's time.
    fn end_step(&mut self, node: usize) {
        self.nodes[node].at += 1;
        let at = self.time(node);
        self.begin_step(node, at);
    }

    /// Takes the end of computing.
    fn computed(&mut self, number: usize) {
        let now = self.now;
        let node = &mut self.nodes[number];
        match &node.steps[node.at].event {
            Event::Region(_) | Event::Begin { .. } | Event::End { .. } => {}
            Event::Mark(mark) => {
                node.moment.at_ns = now;
                node.report.marks.push((*mark, node.moment));
            }
            _ => {
                // From now on it polls.
                node.state = State::Comes;
                self.take_held(number);
                self.nodes[number].queue.push_back(Work::Turn);
                self.handle_next(number);
                return;
            }
        }
        // The clock's time, whatever the node is handling.
        node.at += 1;
        self.begin_step(number, now);
    }

    fn arrived(&mut self, number: usize, work: Work) {
        let late = self.now.saturating_add(self.costs.late_ns);
        let node = &mut self.nodes[number];
        if self.costs.late_ns > 0 && node.is_computing() && !node.is_handling {
            node.held.push_back(work);
            if node.late_until.is_none() {
                node.late_until = Some(late);
                self.decide(late, number, Happening::Late);
            }
        } else {
            node.queue.push_back(work);
            self.handle_next(number);
        }
    }

    /// Lets what has come while the thread computed be handled.
    fn take_held(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        node.late_until = None;
        node.queue.append(&mut node.held);
    }

    /// Begins to handle what waits, unless something is being handled.
    fn handle_next(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        if node.is_handling {
            return;
        }
        let Some(work) = node.queue.pop_front() else {
            return;
        };
        node.is_handling = true;
        let ns = match work {
            Work::Units { .. } | Work::Threads { .. } | Work::Question { .. } | Work::Answer => {
                self.costs.message_ns
            }
            // The READs of units and their twins are begun together.
            Work::Pulled { .. } | Work::Looked { .. } | Work::Fetched { .. } => self.costs.read_ns,
            Work::Turn => match node.steps[node.at].event {
                Event::Pages { waits: true, .. } => self.costs.fault_ns,
                _ => 0,
            },
        };
        let at = self.now.saturating_add(ns);
        self.decide(at, number, Happening::Handled(Some(work)));
    }

    fn handled(&mut self, node: usize, work: Option<Work>) {
        self.nodes[node].spent_ns = 0;
        if let Some(work) = work {
            self.carry_out(node, work);
            self.look(node);
        }
        let spent = std::mem::take(&mut self.nodes[node].spent_ns);
        if spent > 0 {
            self.decide(self.now.saturating_add(spent), node, Happening::Handled(None));
        } else {
            self.nodes[node].is_handling = false;
            self.handle_next(node);
        }
    }

    fn carry_out(&mut self, number: usize, work: Work) {
        let node = &mut self.nodes[number];
        match work {
            Work::Units {
                from,
                region,
                message,
            } => {
                if !node.regions[region].coherence.handle_message(from, &message) {
                    return self.fail(number, "a message of an epoch that has not begun");
                }
                self.decided_about(number, region);
            }
            Work::Threads { from, message } => {
                if node.sync.handle_message(from, &message).is_err() {
                    return self.fail(number, "a message of an epoch that has not begun");
                }
                self.synchronise(number);
            }
            Work::Question { from } => self.send(number, from, Work::Answer),
            Work::Answer => node.is_answered = true,
            Work::Pulled { region, unit, task } => {
                node.moment.units_read += 1;
                node.regions[region].coherence.handle_pulled(unit, task);
                self.decided_about(number, region);
            }
            Work::Fetched { region, slot } => {
                if let Some(release) = node.regions[region].coherence.release() {
                    release.handle_fetched(slot, true);
                }
                self.decided_about(number, region);
            }
            Work::Looked {
                region,
                node: looked,
                runs,
            } => {
                if let Some(release) = node.regions[region].coherence.release() {
                    release.handle_looked(looked, Looked::Runs(runs));
                }
                self.decided_about(number, region);
            }
            Work::Turn => self.turn(number),
        }
    }

    /// Carries out the event of a node's step, whose end [`Engine::look`] finds.
    fn turn(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        let wait = match node.steps[node.at].event {
            Event::Pages {
                region,
                first,
                count,
                access,
                waits,
            } => {
                let pages = Pages {
                    region: region as usize,
                    access,
                    had: first,
                    asked: first,
                    end: first.saturating_add(count),
                };
                if !waits {
                    self.prefetch(number, pages);
                    self.end_step(number);
                    return;
                }
                Wait::Pages(pages)
            }
            Event::Release => Wait::Released(self.begin_rounds(number, release::Node::handle_release)),
            Event::Acquire => Wait::Acquired(self.begin_rounds(number, release::Node::handle_acquire)),
            Event::Exchange { node: other } => {
                let other = other as usize;
                node.is_answered = other == number;
                if other != number {
                    self.send(number, other, Work::Question { from: number });
                }
                Wait::Answer
            }
            Event::Call { thread, call } => {
                node.sync.handle_call(call, thread.into());
                self.synchronise(number);
                Wait::Outcome
            }
            Event::Region(_) | Event::Begin { .. } | Event::End { .. } | Event::Mark(_) => {
                self.end_step(number);
                return;
            }
        };
        self.nodes[number].state = State::Waits(wait);
    }

    fn begin_rounds(
        &mut self,
        number: usize,
        begin: impl Fn(&mut release::Node) -> u64,
    ) -> Vec<(usize, u64)> {
        let mut rounds = Vec::new();
        for region in 0..self.nodes[number].regions.len() {
            if let Some(release) = self.nodes[number].regions[region].coherence.release() {
                rounds.push((region, begin(release)));
                self.decided_about(number, region);
            }
        }
        rounds
    }

    /// Looks whether the node's thread has what it waits for.
    fn look(&mut self, number: usize) {
        match std::mem::replace(&mut self.nodes[number].state, State::Comes) {
            State::Waits(mut wait) => match self.has_ended(number, &mut wait) {
                true => self.end_step(number),
                false => self.nodes[number].state = State::Waits(wait),
            },
            state => self.nodes[number].state = state,
        }
    }

    /// Returns whether a wait has ended.
    fn has_ended(&mut self, number: usize, wait: &mut Wait) -> bool {
        match wait {
            Wait::Pages(pages) => self.have_been_had(number, pages),
            Wait::Answer => self.nodes[number].is_answered,
            Wait::Outcome => match self.nodes[number].outcome.take() {
                None => false,
                Some(Ok(_)) => true,
                Some(Err(failure)) => {
                    self.fail(number, failure.to_string());
                    true
                }
            },
            Wait::Released(rounds) => {
                for (region, round) in rounds {
                    let release = self.nodes[number].regions[*region].coherence.release();
                    match release.map_or(Some(Ok(())), |release| release.released(*round)) {
                        None => return false,
                        Some(Ok(())) => {}
                        Some(Err(_)) => self.fail(number, "writes were lost"),
                    }
                }
                true
            }
            Wait::Acquired(rounds) => rounds.iter().all(|(region, round)| {
                let release = self.nodes[number].regions[*region].coherence.release();
                release.is_none_or(|release| release.acquired(*round))
            }),
        }
    }

    /// Asks for units as `rdmux_dsm` does, and returns whether the node has had all of them.
    fn have_been_had(&mut self, number: usize, pages: &mut Pages) -> bool {
        let Pages {
            region, access, end, ..
        } = *pages;
        let at_once = units_at_once(self.nodes[number].regions[region].unit_bytes);
        loop {
            let ahead = end.min(pages.had.saturating_add(at_once));
            for unit in pages.asked..ahead {
                self.ask(number, region, unit, access);
            }
            self.decided_about(number, region);
            pages.asked = pages.asked.max(ahead);
            let before = pages.had;
            while pages.had < end && self.allows(number, region, pages.had, access) {
                pages.had += 1;
            }
            if pages.had >= end {
                return true;
            }
            if pages.had == before || pages.asked == end {
                // It may have been taken again before this look.
                self.ask(number, region, pages.had, access);
                self.decided_about(number, region);
                if !self.allows(number, region, pages.had, access) {
                    return false;
                }
            }
        }
    }

    /// Asks for the first units that are away.
    fn prefetch(&mut self, number: usize, pages: Pages) {
        let Pages {
            region,
            access,
            had,
            end,
            ..
        } = pages;
        let at_once = units_at_once(self.nodes[number].regions[region].unit_bytes);
        let is_away = |unit: &u32| !self.allows(number, region, *unit, access);
        let away: Vec<u32> = (had..end).filter(is_away).take(at_once as usize).collect();
        for unit in away {
            self.ask(number, region, unit, access);
        }
        self.decided_about(number, region);
    }

    fn allows(&self, number: usize, region: usize, unit: u32, access: Access) -> bool {
        self.nodes[number].regions[region].allows(unit.into(), access)
    }

    /// Asks for a right to a unit, unless the node has it or has asked.
    fn ask(&mut self, number: usize, region: usize, unit: u32, access: Access) {
        let region = &mut self.nodes[number].regions[region];
        let unit = unit.into();
        if !region.allows(unit, access) && !region.coherence.is_awaited(unit) {
            region.coherence.handle_fault(unit, access);
        }
    }

    fn send(&mut self, number: usize, to: usize, work: Work) {
        self.nodes[number].moment.messages += 1;
        let arrives = self.time(number).saturating_add(self.costs.latency_ns);
        self.decide(arrives, to, Happening::Arrived(work));
    }

    /// Begins a READ of some bytes from a node, whose end is handled.
    fn read(&mut self, number: usize, from: NodeId, bytes: u64, work: Work) {
        let latency_ns = self.costs.latency_ns;
        let asked = self.time(number).saturating_add(latency_ns);
        let source = &mut self.nodes[from.number() as usize];
        let begins = asked.max(source.is_sending_until);
        let sent = begins.saturating_add(self.costs.transfer_ns(bytes));
        source.is_sending_until = sent;
        self.decide(sent.saturating_add(latency_ns), number, Happening::Arrived(work));
    }

    /// Carries out what the state machine of the node's threads has decided.
    fn synchronise(&mut self, number: usize) {
        while let Some(action) = self.nodes[number].sync.poll_action() {
            match action {
                sync::Action::Send { to, message } => {
                    let from = self.members[number];
                    self.send(number, to.number() as usize, Work::Threads { from, message });
                }
                sync::Action::Done { outcome, .. } => self.nodes[number].outcome = Some(outcome),
                sync::Action::Accuse { violation, .. } => self.fail(number, violation.to_string()),
            }
        }
    }

    /// Carries out what the state machine of a region has decided.
    fn decided_about(&mut self, number: usize, region: usize) {
        match self.nodes[number].regions[region].coherence {
            Coherence::Sequential(_) => self.decided_sequential(number, region),
            Coherence::Release(_) => self.decided_release(number, region),
        }
    }

    fn decided_sequential(&mut self, number: usize, region: usize) {
        while let Coherence::Sequential(protocol) = &mut self.nodes[number].regions[region].coherence {
            let Some(action) = protocol.poll_action() else {
                match self.protect(number, region) {
                    0 => return,
                    _ => continue,
                }
            };
            match action {
                protocol::Action::Send { to, message } => self.send_about(number, region, to, message),
                protocol::Action::Pull { unit, task, from } => {
                    let bytes = self.nodes[number].regions[region].unit_bytes;
                    self.read(number, from, bytes, Work::Pulled { region, unit, task });
                }
                protocol::Action::Protect { unit, task, right } => {
                    let protections = &mut self.nodes[number].regions[region].protections;
                    protections.push((unit, task, right));
                }
                // Its thread looks after each thing that the node handles.
                protocol::Action::Wake { .. } => {}
                protocol::Action::Poison { unit, .. } => self.fail(number, format!("unit {unit} was lost")),
                protocol::Action::Accuse { violation, .. } => self.fail(number, violation.to_string()),
            }
        }
    }

    fn decided_release(&mut self, number: usize, region: usize) {
        loop {
            let part = &mut self.nodes[number].regions[region];
            let bytes = part.unit_bytes;
            let Some(release) = part.coherence.release() else {
                return;
            };
            let action = release.poll_action();
            // As in the driver: rights are changed together, before all that relies on them, and copying does not.
            match action {
                Some(release::Action::Protect { unit, right }) => {
                    part.protections.push((unit, 0, right));
                    continue;
                }
                Some(release::Action::Copy { .. }) => {
                    self.spend(number, self.costs.copy_ns(bytes));
                    continue;
                }
                _ => {}
            }
            self.protect(number, region);
            let Some(action) = action else { return };
            self.carry_out_release(number, region, action);
        }
    }

    fn carry_out_release(&mut self, number: usize, region: usize, action: release::Action) {
        let part = &mut self.nodes[number].regions[region];
        let bytes = part.unit_bytes;
        match action {
            release::Action::Send { to, message } => self.send_about(number, region, to, message),
            release::Action::Pull { unit, task, from } => {
                self.read(number, from, bytes, Work::Pulled { region, unit, task });
            }
            // A trace has no contents. What a program may write is taken for written, and units that two nodes have written are never the same
            // again.
            release::Action::Compare { run, task } => {
                if let Some(release) = part.coherence.release() {
                    release.handle_compared(task, &vec![true; run.count as usize]);
                }
                self.spend(number, self.costs.copy_ns(2 * bytes * u64::from(run.count)));
            }
            release::Action::Fetch { run, slot, from } => {
                let bytes = 2 * bytes * u64::from(run.count);
                self.read(number, from, bytes, Work::Fetched { region, slot });
            }
            release::Action::Land { run, slot, from } => {
                let bytes = bytes * u64::from(run.count);
                self.read(number, from, bytes, Work::Fetched { region, slot });
            }
            release::Action::Apply { run, slot, .. } => {
                if let Some(release) = part.coherence.release() {
                    release.handle_applied(slot, &vec![false; run.count as usize]);
                }
                self.spend(number, self.costs.copy_ns(2 * bytes * u64::from(run.count)));
            }
            release::Action::Append { run } => part.log.push(run),
            release::Action::Look { node } => self.look_at_log(number, region, node),
            release::Action::Wake { .. } | release::Action::Ended => {}
            // Those are carried out before.
            release::Action::Protect { .. } | release::Action::Copy { .. } => {}
            release::Action::Poison { unit, .. } => self.fail(number, format!("unit {unit} was lost")),
            release::Action::Accuse { violation, .. } => self.fail(number, violation.to_string()),
        }
    }

    /// Reads the header of a node's log, and what is new there by another READ.
    fn look_at_log(&mut self, number: usize, region: usize, node: NodeId) {
        let at = node.number() as usize;
        let log = &self.nodes[at].regions[region].log;
        let len = log.len();
        let runs = log[self.nodes[number].regions[region].looked[at]..].to_vec();
        self.nodes[number].regions[region].looked[at] = len;
        let trips = if runs.is_empty() { 2 } else { 4 };
        let bytes = HEADER_LEN as u64 + LOG_ENTRY_BYTES * runs.len() as u64;
        let ns = trips * self.costs.latency_ns.min(u64::MAX / 4);
        let arrives = self.time(number).saturating_add(ns);
        let arrives = arrives.saturating_add(self.costs.transfer_ns(bytes));
        let work = Work::Looked { region, node, runs };
        self.decide(arrives, number, Happening::Arrived(work));
    }

    fn send_about(&mut self, number: usize, region: usize, to: NodeId, message: protocol::Message) {
        let from = self.members[number];
        let work = Work::Units {
            from,
            region,
            message,
        };
        self.send(number, to.number() as usize, work);
    }

    /// Changes the rights of the program to units, together. Returns their number.
    fn protect(&mut self, number: usize, region: usize) -> usize {
        let part = &mut self.nodes[number].regions[region];
        let protections = std::mem::take(&mut part.protections);
        for (unit, task, right) in &protections {
            part.set_right(*unit, *right);
            if let Coherence::Sequential(protocol) = &mut part.coherence {
                protocol.handle_protected(*unit, *task);
            }
        }
        self.spend(number, self.costs.protects_ns(protections.len()));
        protections.len()
    }
}

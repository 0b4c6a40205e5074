//! The driver of a site: when it takes events, and in which order it carries out actions.
//!
//! It belongs to one thread at a time, which carries all out before it leaves it. So in a world with delays:
//!
//! - Messages and ends of reads may follow one another before the first action of any is carried out. So may faults of several threads. Releases and
//!   acquires begin, and their ends are seen, when there are no actions.
//! - Once it carries out actions it takes no more events until there are none, but those that follow from them. The others are comparisons and
//!   stores, which end at once; reads from a site that is known to be gone; and the loss of a site that crashed, which it may notice as it sends
//!   to it or reads from it.
//! - Actions are carried out in their order, but rights together, before the next action of another kind: in any order, but those of one unit in their
//!   own. Copies come before all rights that wait.
//!
//! At all times threads access what they have the right to, reads find and land, and other sites go on. One action is one step. Those without an effect
//! here are none.

use std::collections::{BTreeSet, VecDeque};

use rdmux_dsm::protocol::Right;
use rdmux_dsm::release::{Action, Run};

use super::{Site, Task, WORDS, World, Worlds, id, site, units};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Turn {
    phase: Phase,
    actions: VecDeque<Action>,
    /// Rights that are being changed together, by unit.
    rights: Vec<(usize, Right)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
enum Phase {
    /// There are no actions.
    #[default]
    Idle,
    /// Messages and ends of reads were taken.
    Taking,
    /// Faults of these threads were taken.
    Faulting(Vec<usize>),
    /// Actions are carried out.
    Acting {
        /// The last one was about the site that has crashed, whose loss may have been noticed.
        has_failed: bool,
    },
}

impl Turn {
    pub(super) fn is_idle(&self) -> bool {
        self.phase == Phase::Idle
    }

    /// Returns whether ends of reads may be taken.
    pub(super) fn takes_ends(&self) -> bool {
        matches!(self.phase, Phase::Idle | Phase::Taking)
    }

    /// Returns whether messages of a site may be taken. At the loss of a site the last ones that it has sent are.
    pub(super) fn takes_messages(&self, from: &Site) -> bool {
        self.takes_ends() || self.has_failed() && !from.is_up
    }

    /// Returns whether the fault of a thread may be taken.
    pub(super) fn takes_fault(&self, thread: usize) -> bool {
        match &self.phase {
            Phase::Idle => true,
            // It waits until its fault was answered.
            Phase::Faulting(threads) => !threads.contains(&thread),
            _ => false,
        }
    }

    /// Returns whether the news may be taken that a site is gone. At its loss only the coordinator, or who is alone, knows that at once.
    pub(super) fn takes_news(&self, worlds: &Worlds<'_>, number: usize) -> bool {
        self.takes_ends() || self.has_failed() && (number == 0 || worlds.sites == 2)
    }

    /// Returns whether the loss of the site that has crashed may be noticed while actions are carried out.
    pub(super) fn has_failed(&self) -> bool {
        matches!(self.phase, Phase::Acting { has_failed: true })
    }

    /// Returns the number of actions of which each may be the next one.
    pub(super) fn choices(&self) -> usize {
        match self.rights.len() {
            0 if self.copy().is_some() => 1,
            0 => self.group().max(self.actions.len().min(1)),
            left => left,
        }
    }

    /// Returns the place of a copy that is carried out before the rights that come first.
    fn copy(&self) -> Option<usize> {
        let is_right = |it: &&Action| matches!(it, Action::Protect { .. });
        let rights = self.actions.iter().take_while(is_right).count();
        let is_copy = matches!(self.actions.get(rights), Some(Action::Copy { .. }));
        is_copy.then_some(rights)
    }

    /// Returns how many rights come first, each of another unit.
    fn group(&self) -> usize {
        let mut seen = BTreeSet::new();
        let is_another = |it: &&Action| match it {
            Action::Protect { unit, .. } => seen.insert(*unit),
            _ => false,
        };
        self.actions.iter().take_while(is_another).count()
    }

    /// Removes the action that a choice is.
    fn next(&mut self, choice: usize) -> Option<Action> {
        if self.rights.is_empty() {
            if let Some(copy) = self.copy() {
                return self.actions.remove(copy);
            }
            let group = self.group();
            let rights = self.actions.drain(..group).filter_map(|it| match it {
                Action::Protect { unit, right } => Some((unit as usize, right)),
                _ => None,
            });
            self.rights.extend(rights);
            self.rights.sort_unstable();
        }
        if self.rights.is_empty() {
            return self.actions.pop_front();
        }
        let (unit, right) = self.rights.remove(choice);
        let unit = unit as u64;
        Some(Action::Protect { unit, right })
    }
}

impl World {
    /// Carries out what a site's node has decided upon a message, the end of a read, or the end of a site; in a world with delays later.
    pub(super) fn took(&mut self, worlds: &Worlds<'_>, number: usize) -> Result<(), String> {
        let phase = match &self.sites[number].turn.phase {
            Phase::Idle => Phase::Taking,
            others => others.clone(),
        };
        self.decided(worlds, number, phase)
    }

    /// The same upon the fault of a thread.
    pub(super) fn faulted(&mut self, worlds: &Worlds<'_>, thread: usize) -> Result<(), String> {
        let number = self.threads[thread].site;
        let mut threads = match &self.sites[number].turn.phase {
            Phase::Faulting(threads) => threads.clone(),
            _ => vec![],
        };
        threads.push(thread);
        threads.sort_unstable();
        self.decided(worlds, number, Phase::Faulting(threads))
    }

    /// The same upon the begin of a release or an acquire: nothing else is taken before its actions are carried out.
    pub(super) fn began(&mut self, worlds: &Worlds<'_>, number: usize) -> Result<(), String> {
        let phase = match &self.sites[number].turn.phase {
            Phase::Idle => Phase::Acting { has_failed: false },
            // It was an access, of which the node does not hear.
            others => others.clone(),
        };
        self.decided(worlds, number, phase)
    }

    fn decided(&mut self, worlds: &Worlds<'_>, number: usize, phase: Phase) -> Result<(), String> {
        self.sites[number].turn.phase = phase;
        self.sites[number].hear();
        while !worlds.delays && !self.sites[number].turn.is_idle() {
            self.act(number, 0)?;
        }
        Ok(())
    }

    /// Carries out one action of a site.
    pub(super) fn act(&mut self, number: usize, choice: usize) -> Result<(), String> {
        let mut has_failed = false;
        if let Some(action) = self.sites[number].turn.next(choice) {
            if let Some(with) = action_with(&action) {
                has_failed = !self.sites[with].is_up && self.sites[number].epoch == 0;
            }
            self.carry_out(number, action)?;
        }
        let site = &mut self.sites[number];
        site.turn.phase = Phase::Acting { has_failed };
        site.hear();
        Ok(())
    }

    fn carry_out(&mut self, number: usize, action: Action) -> Result<(), String> {
        let site = &mut self.sites[number];
        match action {
            Action::Send { to, message } => self.network.push((id(number), to, message)),
            Action::Pull { unit, task, from } => {
                let pull = Task::Pull {
                    unit: unit as usize,
                    task,
                    from: super::site(from),
                    found: None,
                };
                self.begin_read(number, pull);
            }
            Action::Copy { unit } => site.twins[unit as usize] = site.frames[unit as usize],
            Action::Protect { unit, right } => site.rights[unit as usize] = right,
            Action::Wake { .. } | Action::Ended => {}
            Action::Poison { unit, .. } => {
                site.lost[unit as usize] = true;
                site.rights[unit as usize] = Right::Invalid;
            }
            Action::Compare { run, task } => {
                let differ = units(run).map(|unit| site.frames[unit] != site.twins[unit]);
                let differ: Vec<bool> = differ.collect();
                site.node.handle_compared(task, &differ);
            }
            Action::Fetch { run, slot, from } => {
                let from = super::site(from);
                self.begin_read(number, Task::Fetch { run, slot, from });
            }
            Action::Land { run, slot, from } => {
                let (from, found) = (super::site(from), None);
                let land = Task::Land {
                    run,
                    slot,
                    from,
                    found,
                };
                self.begin_read(number, land);
            }
            Action::Apply { run, slot, is_shared } => site.store(number, run, slot, is_shared)?,
            Action::Append { run } => site.log.extend(run.first..run.first + run.count),
            Action::Look { node } => {
                let look = Task::Look {
                    from: super::site(node),
                    found: None,
                    has_lapped: false,
                };
                self.begin_read(number, look);
            }
            Action::Accuse { node, violation } => {
                return Err(format!("site {number} accuses {node:?} of {violation}"));
            }
        }
        Ok(())
    }

    /// Begins a read, which ends at once without a connection.
    fn begin_read(&mut self, number: usize, task: Task) {
        let is_gone = !self.sites[task.from()].is_up && self.sites[number].epoch > 0;
        let site = &mut self.sites[number];
        match is_gone {
            true => site.fail(task),
            false => site.tasks.push(task),
        }
    }
}

/// Returns the site that an action sends to or reads from.
fn action_with(action: &Action) -> Option<usize> {
    match action {
        Action::Send { to, .. } => Some(site(*to)),
        Action::Pull { from, .. } | Action::Fetch { from, .. } | Action::Land { from, .. } => {
            Some(site(*from))
        }
        Action::Look { node } => Some(site(*node)),
        _ => None,
    }
}

impl Site {
    /// Takes the actions that the node has decided on.
    fn hear(&mut self) {
        let actions = std::iter::from_fn(|| self.node.poll_action());
        let has_effect = |it: &Action| !matches!(it, Action::Wake { .. } | Action::Ended);
        self.turn.actions.extend(actions.filter(has_effect));
        if self.turn.choices() == 0 {
            self.turn.phase = Phase::Idle;
        }
    }

    /// Stores what a flush has brought.
    fn store(&mut self, number: usize, run: Run, slot: usize, is_shared: bool) -> Result<(), String> {
        let mut are_same = vec![];
        let copies = std::mem::take(&mut self.slots[slot]);
        for (unit, (copy, twin)) in units(run).zip(copies) {
            if self.rights[unit] == Right::Exclusive && !is_shared {
                return Err(format!(
                    "site {number} stores into unit {unit} as if it did not write it"
                ));
            }
            for word in (0..WORDS).filter(|word| copy[*word] != twin[*word]) {
                self.frames[unit][word] = copy[word];
            }
            are_same.push(self.frames[unit] == copy);
        }
        self.node.handle_applied(slot, &are_same);
        Ok(())
    }
}

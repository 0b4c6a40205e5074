//! Worlds with release consistency: nodes with real state machines, and memory, messages and reads of a model. All states of small ones, and random
//! runs of larger ones.
#![allow(dead_code, reason = "not every test needs all of it")]

mod turn;

use std::collections::{BTreeSet, HashSet};

use rdmux_dsm::protocol::{Access, Homes, Message, NodeId, Right, Settings};
use rdmux_dsm::release::{Looked, Node, Run};

use self::Op::{Barrier, Lock as L, Read as R, Unlock as U, Write as W};
use self::turn::Turn;

/// Words of a unit.
pub(crate) const WORDS: usize = 2;

type Words = [u8; WORDS];

/// A step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    /// Reads a word of a unit.
    Read(usize, usize),
    /// Writes a value.
    Write(usize, usize, u8),
    Lock(usize),
    Unlock(usize),
    /// Waits for all threads.
    Barrier,
}

/// Programs, each of a thread at a site, and what happens to them.
#[derive(Clone, Debug)]
pub(crate) struct Worlds<'a> {
    pub(crate) name: &'static str,
    pub(crate) sites: usize,
    /// Site of the home of each unit.
    pub(crate) homes: &'a [usize],
    /// The first touch makes the homes instead, of as many units.
    pub(crate) is_first_touch: bool,
    pub(crate) threads: &'a [(usize, &'a [Op])],
    /// Locks that the programs use.
    pub(crate) locks: usize,
    /// Marks words that have data races, those of each unit in turn. The words after the last mark have none.
    pub(crate) racy: &'a [bool],
    /// Flushes that a home carries out at a time.
    pub(crate) slots: usize,
    /// Units of a flush at most.
    pub(crate) run_max: u32,
    /// Units that a log has room for.
    pub(crate) log: usize,
    pub(crate) duplicates: usize,
    /// Site that may crash.
    pub(crate) crash: Option<usize>,
    /// Other steps come between an event and its actions, and between these, as far as the driver allows ([`turn`]).
    pub(crate) delays: bool,
    #[cfg(feature = "mutants")]
    pub(crate) mutant: Option<rdmux_dsm::mutant::Mutant>,
}

pub(crate) struct Checked {
    pub(crate) states: usize,
    /// A rule that was broken, with the steps before.
    pub(crate) broken: Option<String>,
}

/// Steps of a random run at most, many times what one takes.
const STEPS_MAX: usize = 1_000_000;

pub(crate) struct Played {
    pub(crate) steps: usize,
    /// Steps of programs that have ended.
    pub(crate) operations: usize,
    /// A rule that was broken.
    pub(crate) broken: Option<String>,
}

/// Progress of a thread in one step of its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Begin,
    Releasing(u64),
    /// At the barrier of a number.
    Waiting(usize),
    Acquiring(u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Thread {
    site: usize,
    at: usize,
    stage: Stage,
    /// It ended with an error, or with its node.
    has_failed: bool,
    /// Words that it has written and not released, with the values that they could have before.
    unreleased: Vec<(usize, usize, BTreeSet<u8>)>,
}

/// A read of another site's memory, with what it has found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Task {
    Pull {
        unit: usize,
        task: u64,
        from: usize,
        found: Option<Words>,
    },
    Fetch {
        run: Run,
        slot: usize,
        from: usize,
    },
    /// As `Fetch`, into the frames.
    Land {
        run: Run,
        slot: usize,
        from: usize,
        found: Option<Vec<Words>>,
    },
    Look {
        from: usize,
        found: Option<Vec<u32>>,
        has_lapped: bool,
    },
    /// One that has landed, of which the node has not heard.
    Ended {
        from: usize,
        end: End,
    },
}

/// End of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum End {
    Pulled { unit: usize, task: u64 },
    Fetched { slot: usize },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Site {
    node: Node,
    turn: Turn,
    is_up: bool,
    epoch: u64,
    rights: Vec<Right>,
    lost: Vec<bool>,
    frames: Vec<Words>,
    twins: Vec<Words>,
    /// Copies and twins.
    slots: Vec<Vec<(Words, Words)>>,
    log: Vec<u32>,
    seen: Vec<usize>,
    tasks: Vec<Task>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Lock {
    thread: Option<usize>,
    /// Epoch of which the next thread has to know.
    epoch: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    sites: Vec<Site>,
    threads: Vec<Thread>,
    network: Vec<(NodeId, NodeId, Message)>,
    locks: Vec<Lock>,
    /// Threads that have come to the barriers so far.
    arrived: usize,
    duplicates: usize,
    has_crashed: bool,
    /// Values that a read of each word may return.
    allowed: Vec<[BTreeSet<u8>; WORDS]>,
}

#[derive(Clone, Debug)]
enum Step {
    Thread(usize),
    Message(usize),
    Duplicate(usize),
    /// A read finds something, or ends if it has.
    Task(usize, usize),
    /// A site carries out one of the actions that may be next.
    Act(usize, usize),
    Crash,
    /// A site notices the loss of the one that has crashed while it carries out actions.
    Lose(usize),
    /// It hears that the one is gone.
    Hear(usize),
}

fn id(site: usize) -> NodeId {
    NodeId::new(site as u32).unwrap()
}

fn site(node: NodeId) -> usize {
    node.number() as usize
}

impl Worlds<'_> {
    /// Visits all states. Ends with the first rule that is broken.
    pub(crate) fn check(&self) -> Checked {
        #[cfg(feature = "mutants")]
        rdmux_dsm::mutant::set(self.mutant);
        let checked = self.visit();
        #[cfg(feature = "mutants")]
        rdmux_dsm::mutant::set(None);
        checked
    }

    fn visit(&self) -> Checked {
        let mut seen = HashSet::new();
        let first = self.first();
        seen.insert(first.clone());
        // States on the way to the present one, each with the steps that are left to try.
        let steps = first.steps(self);
        let mut path: Vec<(World, Vec<Step>, Option<Step>)> = vec![(first, steps, None)];
        while let Some((world, steps, _)) = path.last_mut() {
            let Some(step) = steps.pop() else {
                path.pop();
                continue;
            };
            let mut next = world.clone();
            let outcome = next.take(self, &step);
            if outcome.is_ok() && !seen.insert(next.clone()) {
                continue;
            }
            let steps = next.steps(self);
            let broken = outcome.err().or_else(|| next.stuck(self, &steps));
            path.push((next, steps, Some(step)));
            if let Some(broken) = broken {
                let steps: Vec<String> = path
                    .iter()
                    .filter_map(|it| it.2.as_ref())
                    .map(|it| format!("{it:?}"))
                    .collect();
                return Checked {
                    states: seen.len(),
                    broken: Some(format!("{broken} after {}", steps.join(", "))),
                };
            }
        }
        Checked {
            states: seen.len(),
            broken: None,
        }
    }

    /// Takes steps at random until there is none, or a rule is broken. A function returns a number below the one that it gets. At the end all programs
    /// have to have released what they have written.
    pub(crate) fn play(&self, mut below: impl FnMut(usize) -> usize) -> Played {
        let mut world = self.first();
        let mut count = 0;
        let broken = loop {
            let mut steps = world.steps(self);
            // Otherwise both would come early in each run.
            let (may_crash, may_double) = (below(20) == 0, below(8) == 0);
            steps.retain(|it| match it {
                Step::Crash => may_crash,
                Step::Duplicate(_) => may_double,
                _ => true,
            });
            if steps.is_empty() {
                break world.stuck(self, &steps).or_else(|| world.spoilt(self));
            }
            if count == STEPS_MAX {
                break Some("it does not end".to_owned());
            }
            count += 1;
            let step = &steps[below(steps.len())];
            if let Err(broken) = world.take(self, step) {
                break Some(broken);
            }
        };
        Played {
            steps: count,
            operations: world.threads.iter().map(|it| it.at).sum(),
            broken: broken.map(|it| format!("{it} after {count} steps")),
        }
    }

    fn first(&self) -> World {
        let units = self.homes.len();
        let ranges: Vec<(u64, NodeId)> = (0..)
            .zip(self.homes)
            .map(|(unit, home)| (unit, id(*home)))
            .collect();
        let settings = Settings {
            region: 3,
            units: units as u64,
            homes: match self.is_first_touch {
                true => Homes::first_touch((0..self.sites).map(id).collect::<Vec<_>>()).unwrap(),
                false => Homes::explicit(ranges).unwrap(),
            },
            epoch: 0,
            members: (0..self.sites).map(id).collect(),
        };
        let make = |number| Site {
            node: Node::new(id(number), &settings, self.slots, self.run_max),
            turn: Turn::default(),
            is_up: true,
            epoch: 0,
            rights: vec![Right::Invalid; units],
            lost: vec![false; units],
            frames: vec![[0; WORDS]; units],
            twins: vec![[0; WORDS]; units],
            slots: vec![vec![]; self.slots],
            log: vec![],
            seen: vec![0; self.sites],
            tasks: vec![],
        };
        let thread = |(site, _): &(usize, _)| Thread {
            site: *site,
            at: 0,
            stage: Stage::Begin,
            has_failed: false,
            unreleased: vec![],
        };
        World {
            sites: (0..self.sites).map(make).collect(),
            threads: self.threads.iter().map(thread).collect(),
            network: vec![],
            locks: vec![Lock::default(); self.locks],
            arrived: 0,
            duplicates: self.duplicates,
            has_crashed: false,
            allowed: vec![[0; WORDS].map(|value| BTreeSet::from([value])); units],
        }
    }
}

impl World {
    fn steps(&self, worlds: &Worlds<'_>) -> Vec<Step> {
        let mut steps: Vec<Step> = (0..self.threads.len())
            .filter(|it| self.can_go_on(worlds, *it))
            .map(Step::Thread)
            .collect();
        for (index, (from, to, message)) in self.network.iter().enumerate() {
            let (from, site) = (&self.sites[site(*from)], &self.sites[site(*to)]);
            if site.is_up && message.epoch <= site.epoch && site.turn.takes_messages(from) {
                steps.push(Step::Message(index));
                if self.duplicates > 0 {
                    steps.push(Step::Duplicate(index));
                }
            }
        }
        for (number, site) in self.sites.iter().enumerate().filter(|it| it.1.is_up) {
            let may_go_on = |task: &usize| {
                let task = &site.tasks[*task];
                let from = &self.sites[task.from()];
                site.turn.takes_ends() || !task.is_ending(from.is_up)
            };
            let tasks = (0..site.tasks.len()).filter(may_go_on);
            steps.extend(tasks.map(|task| Step::Task(number, task)));
            steps.extend((0..site.turn.choices()).map(|choice| Step::Act(number, choice)));
            if self.has_crashed && site.epoch == 0 {
                match site.turn.takes_news(worlds, number) {
                    true => steps.push(Step::Hear(number)),
                    false if site.turn.has_failed() => steps.push(Step::Lose(number)),
                    false => {}
                }
            }
        }
        if worlds.crash.is_some() && !self.has_crashed {
            steps.push(Step::Crash);
        }
        steps
    }

    /// Returns what is wrong if nothing can happen any more.
    fn stuck(&self, worlds: &Worlds<'_>, steps: &[Step]) -> Option<String> {
        if !steps.is_empty() {
            return None;
        }
        let waits = |it: &(usize, &Thread)| !it.1.has_failed && it.1.at < worlds.threads[it.0].1.len();
        let waiting = self.threads.iter().enumerate().find(waits);
        waiting.map(|(number, thread)| format!("thread {number} waits for ever: {thread:?}"))
    }

    /// Returns what is wrong with the frames of the homes after all that was written has been released.
    fn spoilt(&self, worlds: &Worlds<'_>) -> Option<String> {
        let home = |unit: usize| self.sites.iter().find_map(|it| it.node.home(unit as u64));
        let home = |unit| Some((unit, &self.sites[site(home(unit)?)]));
        for (unit, home) in (0..worlds.homes.len()).filter_map(home).filter(|it| it.1.is_up) {
            let frame = &home.frames[unit];
            for (word, (value, allowed)) in frame.iter().zip(&self.allowed[unit]).enumerate() {
                if !allowed.contains(value) {
                    return Some(format!(
                        "the home has {value} in word {word} of unit {unit}, not {allowed:?}"
                    ));
                }
            }
        }
        None
    }

    fn can_go_on(&self, worlds: &Worlds<'_>, number: usize) -> bool {
        let thread = &self.threads[number];
        let Some(op) = worlds.threads[number].1.get(thread.at) else {
            return false;
        };
        let site = &self.sites[thread.site];
        if thread.has_failed {
            return false;
        }
        match (*op, thread.stage) {
            (Op::Read(unit, _), _) => site.can(unit, Access::Read, number),
            (Op::Write(unit, ..), _) => site.can(unit, Access::Write, number),
            // The driver carries all out before another thread gets it.
            _ if !site.turn.is_idle() => false,
            (_, Stage::Acquiring(round)) => site.node.acquired(round),
            (_, Stage::Releasing(round)) => site.node.released(round).is_some(),
            (_, Stage::Waiting(until)) => self.arrived >= until,
            (Op::Lock(lock), _) => self.locks[lock].thread.is_none() && self.locks[lock].epoch <= site.epoch,
            (Op::Unlock(_) | Barrier, _) => true,
        }
    }

    fn take(&mut self, worlds: &Worlds<'_>, step: &Step) -> Result<(), String> {
        match *step {
            Step::Thread(number) => self.go_on(worlds, number)?,
            Step::Message(index) => {
                let (from, to, message) = self.network.remove(index);
                let _ = self.sites[site(to)].node.handle_message(from, &message);
                self.took(worlds, site(to))?;
            }
            Step::Duplicate(index) => {
                self.duplicates -= 1;
                let (from, to, message) = self.network[index];
                let _ = self.sites[site(to)].node.handle_message(from, &message);
                self.took(worlds, site(to))?;
            }
            Step::Task(number, task) => self.read(worlds, number, task)?,
            Step::Act(number, choice) => self.act(number, choice)?,
            Step::Crash => {
                let crashed = worlds.crash.unwrap();
                self.has_crashed = true;
                self.sites[crashed].is_up = false;
                self.sites[crashed].turn = Turn::default();
                self.sites[crashed].tasks.clear();
                for number in 0..self.threads.len() {
                    if self.threads[number].site == crashed {
                        self.crash_thread(number);
                    }
                }
            }
            Step::Lose(number) => self.end_tasks(worlds, number, worlds.crash.unwrap())?,
            Step::Hear(number) => {
                let gone = worlds.crash.unwrap();
                self.end_tasks(worlds, number, gone)?;
                let site = &mut self.sites[number];
                site.epoch = 1;
                site.node.handle_gone(1, &[id(gone)]);
                self.took(worlds, number)?;
            }
        }
        self.network.sort_unstable();
        self.sites.iter_mut().for_each(|site| site.tasks.sort_unstable());
        Ok(())
    }

    fn crash_thread(&mut self, number: usize) {
        let thread = &mut self.threads[number];
        thread.has_failed = true;
        for (unit, word, before) in std::mem::take(&mut thread.unreleased).into_iter().rev() {
            self.allowed[unit][word].extend(before);
        }
        for lock in self.locks.iter_mut().filter(|it| it.thread == Some(number)) {
            *lock = Lock {
                thread: None,
                epoch: 1,
            };
        }
    }

    /// Ends the reads of a node that is gone.
    fn end_tasks(&mut self, worlds: &Worlds<'_>, number: usize, gone: usize) -> Result<(), String> {
        let (ended, left): (Vec<Task>, Vec<Task>) = std::mem::take(&mut self.sites[number].tasks)
            .into_iter()
            .partition(|task| task.from() == gone);
        let site = &mut self.sites[number];
        site.tasks = left;
        for task in ended {
            if let Task::Land {
                run,
                found: Some(found),
                ..
            } = &task
            {
                // A part has come.
                for (unit, words) in units(*run).zip(found) {
                    site.frames[unit][0] = words[0];
                }
            }
            site.fail(task);
        }
        self.took(worlds, number)
    }

    /// Has a read find something, or ends it if it has.
    fn read(&mut self, worlds: &Worlds<'_>, number: usize, task: usize) -> Result<(), String> {
        let task = self.sites[number].tasks.remove(task);
        let source = &self.sites[task.from()];
        if !source.is_up && task.is_lost() {
            // It fails when the node is known to be gone.
            self.sites[number].fail(task);
            return self.took(worlds, number);
        }
        match task {
            Task::Pull {
                unit,
                task,
                from,
                found: None,
            } => {
                let found = Some(source.frames[unit]);
                self.sites[number].tasks.push(Task::Pull {
                    unit,
                    task,
                    from,
                    found,
                });
                return Ok(());
            }
            Task::Look {
                from, found: None, ..
            } => {
                let seen = self.sites[number].seen[from];
                let news = source.log[seen..].to_vec();
                let has_lapped = news.len() > worlds.log;
                let end = source.log.len();
                self.sites[number].seen[from] = end;
                let found = Some(news);
                self.sites[number].tasks.push(Task::Look {
                    from,
                    found,
                    has_lapped,
                });
                return Ok(());
            }
            Task::Pull {
                unit,
                task,
                from,
                found: Some(words),
            } => {
                let site = &mut self.sites[number];
                if site.rights[unit] != Right::Invalid {
                    return Err(format!(
                        "site {number} reads unit {unit} into memory that its program uses"
                    ));
                }
                site.frames[unit] = words;
                return self.landed(worlds, number, from, End::Pulled { unit, task });
            }
            Task::Fetch { run, slot, from } => {
                source.check_written(run, number, from)?;
                let copies = units(run).map(|unit| (source.frames[unit], source.twins[unit]));
                let copies = copies.collect();
                self.sites[number].slots[slot] = copies;
                return self.landed(worlds, number, from, End::Fetched { slot });
            }
            Task::Land {
                run,
                slot,
                from,
                found: None,
            } => {
                source.check_written(run, number, from)?;
                let found = Some(units(run).map(|unit| source.frames[unit]).collect());
                self.sites[number].tasks.push(Task::Land {
                    run,
                    slot,
                    from,
                    found,
                });
                return Ok(());
            }
            Task::Land {
                run,
                slot,
                from,
                found: Some(found),
            } => {
                let site = &mut self.sites[number];
                for (unit, words) in units(run).zip(found) {
                    site.frames[unit] = words;
                }
                return self.landed(worlds, number, from, End::Fetched { slot });
            }
            Task::Look {
                from,
                found: Some(units),
                has_lapped,
            } => {
                let runs = units
                    .iter()
                    .map(|unit| Run {
                        first: *unit,
                        count: 1,
                    })
                    .collect();
                let looked = match has_lapped {
                    true => Looked::Lapped,
                    false => Looked::Runs(runs),
                };
                self.sites[number].node.handle_looked(id(from), looked);
            }
            Task::Ended { end, .. } => self.sites[number].end(end),
        }
        self.took(worlds, number)
    }

    /// Has the node hear that a read has landed, now or later.
    fn landed(&mut self, worlds: &Worlds<'_>, number: usize, from: usize, end: End) -> Result<(), String> {
        let site = &mut self.sites[number];
        if worlds.delays {
            site.tasks.push(Task::Ended { from, end });
            return Ok(());
        }
        site.end(end);
        self.took(worlds, number)
    }

    fn go_on(&mut self, worlds: &Worlds<'_>, number: usize) -> Result<(), String> {
        let (at, stage) = (self.threads[number].at, self.threads[number].stage);
        let here = self.threads[number].site;
        let op = worlds.threads[number].1[at];
        let site = &mut self.sites[here];
        let next = match (op, stage) {
            (Op::Read(unit, _) | Op::Write(unit, ..), _) if site.lost[unit] => {
                self.crash_thread(number);
                return Ok(());
            }
            (Op::Read(unit, word), _) => {
                if site.rights[unit] == Right::Invalid {
                    site.node.handle_fault(unit as u64, Access::Read);
                    return self.faulted(worlds, number);
                }
                let value = site.frames[unit][word];
                if !self.allowed[unit][word].contains(&value) {
                    let allowed = &self.allowed[unit][word];
                    return Err(format!(
                        "thread {number} reads {value} from word {word} of unit {unit}, not {allowed:?}"
                    ));
                }
                None
            }
            (Op::Write(unit, word, value), _) => {
                if site.rights[unit] != Right::Exclusive {
                    site.node.handle_fault(unit as u64, Access::Write);
                    return self.faulted(worlds, number);
                }
                site.frames[unit][word] = value;
                let allowed = &mut self.allowed[unit][word];
                let before = std::mem::replace(allowed, BTreeSet::from([value]));
                if worlds.racy.get(unit * WORDS + word) == Some(&true) {
                    // A read may return either.
                    allowed.extend(before);
                } else if worlds.crash.is_some() {
                    self.threads[number].unreleased.push((unit, word, before));
                }
                None
            }
            (Op::Lock(lock), Stage::Begin) => {
                self.locks[lock].thread = Some(number);
                Some(Stage::Acquiring(site.node.handle_acquire()))
            }
            (Op::Unlock(_) | Barrier, Stage::Begin) => Some(Stage::Releasing(site.node.handle_release())),
            (Op::Unlock(_) | Barrier, Stage::Releasing(round)) => {
                let outcome = site.node.released(round).unwrap();
                let epoch = site.epoch;
                if outcome.is_err() {
                    self.crash_thread(number);
                    return Ok(());
                }
                self.threads[number].unreleased.clear();
                if let Op::Unlock(lock) = op {
                    self.locks[lock] = Lock { thread: None, epoch };
                    None
                } else {
                    let all = self.threads.len();
                    let until = self.arrived / all * all + all;
                    self.arrived += 1;
                    Some(Stage::Waiting(until))
                }
            }
            (_, Stage::Waiting(_)) => Some(Stage::Acquiring(site.node.handle_acquire())),
            (_, Stage::Acquiring(_) | Stage::Releasing(_)) => None,
        };
        let thread = &mut self.threads[number];
        thread.at += usize::from(next.is_none());
        thread.stage = next.unwrap_or(Stage::Begin);
        self.began(worlds, here)
    }
}

/// Returns the units of a run.
fn units(run: Run) -> std::ops::Range<usize> {
    run.first as usize..(run.first + run.count) as usize
}

impl Site {
    /// Checks that the program does not write units that another site reads for a flush.
    fn check_written(&self, run: Run, reader: usize, own: usize) -> Result<(), String> {
        match units(run).find(|unit| self.rights[*unit] == Right::Exclusive) {
            Some(unit) => Err(format!(
                "site {reader} fetches unit {unit} that site {own} writes"
            )),
            None => Ok(()),
        }
    }

    /// Returns whether an access of a thread has a next step: it is allowed, or faults and nothing has been asked for.
    fn can(&self, unit: usize, access: Access, thread: usize) -> bool {
        let faults = || !self.node.is_awaited(unit as u64) && self.turn.takes_fault(thread);
        self.lost[unit] || self.rights[unit] >= access.needs() || faults()
    }

    /// Ends a read that has landed.
    fn end(&mut self, end: End) {
        match end {
            End::Pulled { unit, task } => self.node.handle_pulled(unit as u64, task, true),
            End::Fetched { slot } => self.node.handle_fetched(slot, true),
        }
    }

    /// Ends a read whose source is gone.
    fn fail(&mut self, task: Task) {
        match task {
            Task::Pull { unit, task, .. }
            | Task::Ended {
                end: End::Pulled { unit, task },
                ..
            } => self.node.handle_pulled(unit as u64, task, false),
            Task::Fetch { slot, .. }
            | Task::Land { slot, .. }
            | Task::Ended {
                end: End::Fetched { slot },
                ..
            } => self.node.handle_fetched(slot, false),
            Task::Look { from, .. } => self.node.handle_looked(id(from), Looked::Failed),
        }
    }
}

impl Task {
    /// Returns the site that is read from.
    fn from(&self) -> usize {
        match *self {
            Task::Pull { from, .. }
            | Task::Fetch { from, .. }
            | Task::Land { from, .. }
            | Task::Look { from, .. }
            | Task::Ended { from, .. } => from,
        }
    }

    /// Returns whether it has found nothing yet: it is lost with its source.
    fn is_lost(&self) -> bool {
        match self {
            Task::Pull { found, .. } => found.is_none(),
            Task::Land { found, .. } => found.is_none(),
            Task::Look { found, .. } => found.is_none(),
            Task::Fetch { .. } => true,
            Task::Ended { .. } => false,
        }
    }

    /// Returns whether its next step is its end, of which the node hears, in a world with delays.
    fn is_ending(&self, source_is_up: bool) -> bool {
        let has_ended = match self {
            Task::Look { found, .. } => found.is_some(),
            _ => matches!(self, Task::Ended { .. }),
        };
        has_ended || !source_is_up && self.is_lost()
    }
}

/// Returns programs whose nodes have much room, and to which nothing happens.
pub(crate) const fn world<'a>(
    name: &'static str,
    homes: &'a [usize],
    threads: &'a [(usize, &'a [Op])],
) -> Worlds<'a> {
    let mut sites = 0;
    let mut index = 0;
    while index < threads.len() {
        if threads[index].0 >= sites {
            sites = threads[index].0 + 1;
        }
        index += 1;
    }
    Worlds {
        name,
        sites,
        homes,
        is_first_touch: false,
        threads,
        locks: 2,
        racy: &[],
        slots: 4,
        run_max: 2,
        log: 8,
        duplicates: 0,
        crash: None,
        delays: false,
        #[cfg(feature = "mutants")]
        mutant: None,
    }
}

/// Worlds of which a test visits all states.
pub(crate) const SMALL: &[Worlds<'static>] = &[
    Worlds {
        duplicates: 1,
        ..world(
            "2 nodes, 1 unit, a lock, a duplicate",
            &[0],
            &[
                (0, &[L(0), R(0, 0), W(0, 0, 1), U(0), L(0), R(0, 0), U(0)]),
                (
                    1,
                    &[L(0), R(0, 0), W(0, 0, 2), U(0), L(0), R(0, 0), W(0, 0, 3), U(0)],
                ),
            ],
        )
    },
    world(
        "2 nodes, 1 unit, false sharing between barriers",
        &[0],
        &[
            (
                0,
                &[
                    W(0, 0, 1),
                    Barrier,
                    R(0, 1),
                    Barrier,
                    W(0, 0, 2),
                    Barrier,
                    R(0, 1),
                ],
            ),
            (
                1,
                &[
                    W(0, 1, 3),
                    Barrier,
                    R(0, 0),
                    Barrier,
                    W(0, 1, 4),
                    Barrier,
                    R(0, 0),
                ],
            ),
        ],
    ),
    world(
        "3 nodes, 1 unit, false sharing, 2 locks",
        &[2],
        &[
            (0, &[L(0), W(0, 0, 1), U(0), L(1), R(0, 1), U(1)]),
            (1, &[L(1), W(0, 1, 2), U(1), L(0), R(0, 0), W(0, 0, 3), U(0)]),
            (2, &[L(0), R(0, 0), U(0)]),
        ],
    ),
    Worlds {
        slots: 2,
        run_max: 1,
        ..world(
            "3 nodes, 2 units, false sharing, flushes that wait for slots",
            &[0, 0],
            &[
                (
                    1,
                    &[
                        L(0),
                        W(0, 0, 1),
                        U(0),
                        L(0),
                        W(0, 0, 2),
                        U(0),
                        L(0),
                        W(0, 0, 3),
                        W(1, 0, 4),
                        U(0),
                    ],
                ),
                (2, &[L(1), W(0, 1, 5), U(1), L(1), R(0, 1), U(1)]),
            ],
        )
    },
    world(
        "2 nodes, 2 threads at one, 1 unit, 2 locks",
        &[1],
        &[
            (0, &[L(0), R(0, 0), W(0, 0, 1), U(0)]),
            (0, &[L(1), R(0, 1), W(0, 1, 2), U(1)]),
            (
                1,
                &[L(0), R(0, 0), W(0, 0, 3), U(0), L(1), R(0, 1), W(0, 1, 4), U(1)],
            ),
        ],
    ),
    world(
        "2 nodes, 2 threads at one, 2 units, 2 locks",
        &[1, 1],
        &[
            (0, &[L(0), W(0, 0, 1), U(0)]),
            (0, &[L(1), W(1, 0, 2), U(1)]),
            (1, &[L(1), R(1, 0), U(1), L(0), R(0, 0), U(0)]),
        ],
    ),
    world(
        "2 nodes, 2 threads at the home, 1 unit, 2 locks",
        &[0],
        &[
            (0, &[L(0), R(0, 0), W(0, 0, 1), U(0)]),
            (0, &[L(1), R(0, 1), W(0, 1, 2), U(1)]),
            (1, &[L(0), R(0, 0), W(0, 0, 3), U(0), L(1), R(0, 1), U(1)]),
        ],
    ),
    Worlds {
        slots: 1,
        log: 1,
        ..world(
            "2 nodes, 2 units, one slot, a log of one",
            &[1, 1],
            &[
                (0, &[L(0), W(0, 0, 1), W(1, 0, 2), U(0), L(0), R(1, 0), U(0)]),
                (1, &[L(0), R(0, 0), R(1, 0), W(1, 0, 3), U(0)]),
            ],
        )
    },
    Worlds {
        log: 1,
        run_max: 1,
        ..world(
            "3 nodes, 2 units, a log of one, flushes of one",
            &[2, 2],
            &[
                (0, &[Barrier, L(0), W(0, 0, 1), W(1, 0, 2), U(0)]),
                (1, &[R(0, 0), R(1, 0), Barrier, L(0), R(0, 0), R(1, 0), U(0)]),
                (2, &[Barrier]),
            ],
        )
    },
    world(
        "3 nodes, 1 unit, false sharing, releases without an acquire",
        &[2],
        &[
            (0, &[L(0), W(0, 0, 1), U(0)]),
            // Nobody else has the lock.
            (1, &[W(0, 1, 2), U(1), W(0, 1, 5), U(1)]),
            (2, &[L(0), R(0, 0), U(0)]),
        ],
    ),
    world(
        "2 nodes, 2 units, writes of the same value",
        &[1, 1],
        &[
            (
                0,
                &[
                    L(0),
                    W(0, 0, 0),
                    W(1, 0, 2),
                    U(0),
                    L(0),
                    W(0, 0, 0),
                    W(1, 0, 2),
                    U(0),
                ],
            ),
            (1, &[L(0), R(0, 0), R(1, 0), W(0, 0, 3), U(0)]),
        ],
    ),
    Worlds {
        crash: Some(0),
        ..world(
            "3 nodes, 1 unit, a crash of a writer",
            &[2],
            &[
                (0, &[L(0), W(0, 0, 1), U(0)]),
                (1, &[L(0), R(0, 0), U(0), L(0), R(0, 0), W(0, 0, 3), U(0)]),
                (2, &[L(0), R(0, 0), U(0)]),
            ],
        )
    },
    Worlds {
        crash: Some(0),
        ..world(
            "3 nodes, 1 unit, a crash of a writer, writes of the same value",
            &[2],
            &[
                (0, &[L(0), W(0, 0, 1), U(0)]),
                (1, &[L(0), W(0, 0, 0), U(0), L(0), R(0, 0), U(0)]),
                (2, &[L(0), R(0, 0), U(0)]),
            ],
        )
    },
    Worlds {
        crash: Some(2),
        ..world(
            "3 nodes, 2 units, a crash of a home",
            &[2, 1],
            &[
                (0, &[L(0), W(0, 0, 1), W(1, 0, 2), U(0)]),
                (1, &[L(0), R(0, 0), U(0), L(0), R(0, 0), R(1, 0), U(0)]),
                (2, &[L(0), W(0, 0, 3), U(0)]),
            ],
        )
    },
    Worlds {
        delays: true,
        ..world(
            "2 nodes, 1 unit, a lock, delays",
            &[0],
            &[
                (0, &[L(0), R(0, 0), W(0, 0, 1), U(0)]),
                (1, &[L(0), R(0, 0), W(0, 0, 2), U(0), L(0), R(0, 0), U(0)]),
            ],
        )
    },
    Worlds {
        delays: true,
        ..world(
            "2 nodes, 2 threads at one, 1 unit, 2 locks, delays",
            &[1],
            &[
                // It releases what the other one writes.
                (0, &[L(0), U(0)]),
                (0, &[L(1), W(0, 0, 1), U(1), L(1), R(0, 0), U(1)]),
                (1, &[L(1), R(0, 0), W(0, 0, 2), U(1)]),
            ],
        )
    },
    Worlds {
        delays: true,
        ..world(
            "2 nodes, 2 threads at the home, 1 unit, 2 locks, delays",
            &[0],
            &[
                (0, &[L(0), W(0, 0, 1), U(0)]),
                (0, &[L(1), W(0, 1, 2), U(1)]),
                (1, &[L(0), R(0, 0), W(0, 0, 3), U(0), L(1), R(0, 1), U(1)]),
            ],
        )
    },
    Worlds {
        sites: 3,
        delays: true,
        ..world(
            "3 nodes, 1 unit, false sharing, releases without an acquire, delays",
            &[2],
            &[
                (0, &[W(0, 0, 1), U(0), Barrier, R(0, 0)]),
                // Nobody else has the lock.
                (1, &[W(0, 1, 2), U(1), W(0, 1, 3), U(1), W(0, 1, 4), Barrier]),
            ],
        )
    },
    Worlds {
        delays: true,
        ..world(
            "2 nodes, 2 threads at one, 2 units, 2 locks, delays",
            &[1, 1],
            &[
                (0, &[L(0), W(0, 0, 1), W(1, 0, 2), U(0)]),
                (0, &[L(1), R(0, 1), W(1, 1, 4), U(1)]),
                (1, &[L(0), R(0, 0), W(1, 0, 3), U(0)]),
            ],
        )
    },
    Worlds {
        crash: Some(1),
        delays: true,
        ..world(
            "2 nodes, 2 units, a crash of a home, delays",
            &[1, 0],
            &[
                (0, &[L(0), W(0, 0, 1), U(0), L(0), R(1, 0), U(0)]),
                (0, &[L(1), R(0, 1), W(0, 1, 2), U(1)]),
                (1, &[L(0), W(1, 0, 3), U(0)]),
            ],
        )
    },
    Worlds {
        is_first_touch: true,
        duplicates: 1,
        ..world(
            "2 nodes, 2 units, first touch, false sharing, a duplicate",
            &[0, 0],
            &[
                (0, &[L(0), W(0, 0, 1), U(0), L(1), R(1, 1), U(1)]),
                (1, &[L(1), W(0, 1, 2), W(1, 1, 3), U(1), L(0), R(0, 0), U(0)]),
            ],
        )
    },
    Worlds {
        is_first_touch: true,
        sites: 3,
        ..world(
            "3 nodes, 1 unit, first touch, false sharing, 2 locks",
            &[0],
            &[
                (1, &[L(0), W(0, 0, 1), U(0), L(1), R(0, 1), U(1)]),
                (2, &[L(1), W(0, 1, 2), U(1), L(0), R(0, 0), W(0, 0, 3), U(0)]),
            ],
        )
    },
    Worlds {
        is_first_touch: true,
        sites: 3,
        crash: Some(0),
        ..world(
            "3 nodes, 1 unit, first touch, a crash of the registrar",
            &[0],
            &[
                (1, &[L(0), W(0, 0, 1), U(0), L(0), R(0, 0), U(0)]),
                (2, &[L(0), R(0, 0), W(0, 0, 2), U(0)]),
            ],
        )
    },
    Worlds {
        is_first_touch: true,
        sites: 3,
        crash: Some(1),
        ..world(
            "3 nodes, 1 unit, first touch, a crash",
            &[0],
            &[
                (1, &[L(0), W(0, 0, 1), U(0)]),
                (2, &[L(0), R(0, 0), W(0, 0, 2), U(0), L(0), R(0, 0), U(0)]),
            ],
        )
    },
    Worlds {
        is_first_touch: true,
        sites: 3,
        delays: true,
        ..world(
            "3 nodes, 1 unit, first touch, delays",
            &[0],
            &[
                (1, &[L(0), W(0, 0, 1), U(0)]),
                (1, &[L(1), R(0, 1), U(1)]),
                (2, &[L(1), W(0, 1, 2), U(1), L(0), R(0, 0), U(0)]),
            ],
        )
    },
];

//! A node of a replay: its thread, its state machines, and what it has to handle.

use std::collections::{BTreeMap, VecDeque};

use rdmux_dsm::protocol::{self, Message, NodeId, Right, Settings};
use rdmux_dsm::release::{self, Run};
use rdmux_dsm::trace::{RegionMade, Step, Trace};
use rdmux_dsm::{Access, Consistency, sync};

use super::{Moment, ReplayError, Report};

/// Something that a node handles.
#[derive(Debug)]
pub(super) enum Work {
    /// A message about units.
    Units {
        from: NodeId,
        region: usize,
        message: Message,
    },
    /// A message about threads.
    Threads {
        from: NodeId,
        message: sync::Message,
    },
    /// A question of another kind, and its answer.
    Question {
        from: usize,
    },
    Answer,
    /// The end of a READ.
    Pulled {
        region: usize,
        unit: u64,
        task: u64,
    },
    Fetched {
        region: usize,
        slot: usize,
    },
    Looked {
        region: usize,
        node: NodeId,
        runs: Vec<Run>,
    },
    /// The call of the node's own thread.
    Turn,
}

/// Aim of a thread that waits.
#[derive(Debug)]
pub(super) enum Wait {
    Pages(Pages),
    /// Releases, by region.
    Released(Vec<(usize, u64)>),
    /// Acquires, by region.
    Acquired(Vec<(usize, u64)>),
    Answer,
    Outcome,
}

/// Units that a thread waits for, as `rdmux_dsm` asks for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages {
    pub region: usize,
    pub access: Access,
    /// Units before the first were had, those before the second asked for, and those before the last are wanted.
    pub had: u32,
    pub asked: u32,
    pub end: u32,
}

/// State of a node's thread.
#[derive(Debug)]
pub(super) enum State {
    /// Computing, up to the event of the step.
    Computes,
    /// It has come to the event, and its turn has not.
    Comes,
    Waits(Wait),
    Ended,
}

/// State machine of a region.
#[derive(Debug)]
pub(super) enum Coherence {
    Sequential(Box<protocol::Node>),
    Release(Box<release::Node>),
}

impl Coherence {
    pub(super) fn handle_fault(&mut self, unit: u64, access: Access) {
        match self {
            Coherence::Sequential(node) => node.handle_fault(unit, access),
            Coherence::Release(node) => node.handle_fault(unit, access),
        }
    }

    pub(super) fn handle_pulled(&mut self, unit: u64, task: u64) {
        match self {
            Coherence::Sequential(node) => node.handle_pulled(unit, task, true),
            Coherence::Release(node) => node.handle_pulled(unit, task, true),
        }
    }

    /// Takes a message. Returns false if it would have to wait for an epoch.
    pub(super) fn handle_message(&mut self, from: NodeId, message: &Message) -> bool {
        let outcome = match self {
            Coherence::Sequential(node) => node.handle_message(from, message),
            Coherence::Release(node) => node.handle_message(from, message),
        };
        outcome.is_ok()
    }

    pub(super) fn is_awaited(&self, unit: u64) -> bool {
        match self {
            Coherence::Sequential(node) => node.is_awaited(unit),
            Coherence::Release(node) => node.is_awaited(unit),
        }
    }

    /// Returns the state machine of release consistency.
    pub(super) fn release(&mut self) -> Option<&mut release::Node> {
        match self {
            Coherence::Sequential(_) => None,
            Coherence::Release(node) => Some(node),
        }
    }
}

/// A node's part of a region.
#[derive(Debug)]
pub(super) struct Region {
    pub unit_bytes: u64,
    pub coherence: Coherence,
    /// Rights of the program, where it has some.
    rights: BTreeMap<u64, Right>,
    /// Changes of rights that are carried out together.
    pub protections: Vec<(u64, u64, Right)>,
    /// Units that this node has released.
    pub log: Vec<Run>,
    /// Entries of the logs of all nodes that this one has looked at.
    pub looked: Vec<usize>,
}

impl Region {
    fn new(own: NodeId, members: &[NodeId], made: &RegionMade) -> Result<Region, ReplayError> {
        let region = made.number;
        let homes = made.homes.homes(members.to_vec());
        let settings = Settings {
            region,
            units: made.units.into(),
            homes: homes.map_err(|error| ReplayError::Homes { region, error })?,
            epoch: 0,
            members: members.to_vec(),
        };
        let coherence = match made.consistency {
            Consistency::Sequential => Coherence::Sequential(Box::new(protocol::Node::new(own, &settings))),
            Consistency::Release => {
                let run_max = release::run_max(made.unit_bytes);
                Coherence::Release(Box::new(release::Node::new(
                    own,
                    &settings,
                    release::SLOTS,
                    run_max,
                )))
            }
        };
        Ok(Region {
            unit_bytes: made.unit_bytes,
            coherence,
            rights: BTreeMap::new(),
            protections: Vec::new(),
            log: Vec::new(),
            looked: vec![0; members.len()],
        })
    }

    pub(super) fn allows(&self, unit: u64, access: Access) -> bool {
        let right = self.rights.get(&unit).copied().unwrap_or_default();
        right >= access.needs()
    }

    pub(super) fn set_right(&mut self, unit: u64, right: Right) {
        match right {
            Right::Invalid => _ = self.rights.remove(&unit),
            _ => _ = self.rights.insert(unit, right),
        }
    }
}

/// A node.
#[derive(Debug)]
pub(super) struct Node<'a> {
    pub steps: &'a [Step],
    /// Index of the step that the thread is in.
    pub at: usize,
    pub state: State,
    pub regions: Vec<Region>,
    pub sync: sync::Node,
    /// End of the thread's call.
    pub outcome: Option<sync::Outcome>,
    pub is_answered: bool,
    /// Things that wait to be handled, while one is.
    pub queue: VecDeque<Work>,
    pub is_handling: bool,
    /// Things that have come while the thread computes, and the time at which it is handled at the latest.
    pub held: VecDeque<Work>,
    pub late_until: Option<u64>,
    /// Time that handling has taken since the clock's time, in nanoseconds.
    pub spent_ns: u64,
    /// The time from which on data can leave.
    pub is_sending_until: u64,
    pub moment: Moment,
    pub report: Report,
}

impl<'a> Node<'a> {
    pub(super) fn new(own: NodeId, members: &[NodeId], trace: &'a Trace) -> Result<Node<'a>, ReplayError> {
        let regions = trace.regions().map(|made| Region::new(own, members, made));
        let region = u32::MAX;
        let homes = protocol::Homes::hash(members.to_vec());
        let homes = homes.map_err(|error| ReplayError::Homes { region, error })?;
        Ok(Node {
            steps: &trace.steps,
            at: 0,
            state: State::Computes,
            regions: regions.collect::<Result<_, _>>()?,
            sync: sync::Node::new(own, 0, 0, members, homes),
            outcome: None,
            is_answered: false,
            queue: VecDeque::new(),
            is_handling: false,
            held: VecDeque::new(),
            late_until: None,
            spent_ns: 0,
            is_sending_until: 0,
            moment: Moment::default(),
            report: Report::default(),
        })
    }

    /// Returns the line of the trace that the thread is in. The first line is the trace's head.
    pub(super) fn line(&self) -> usize {
        self.at + 2
    }

    pub(super) fn is_computing(&self) -> bool {
        matches!(self.state, State::Computes)
    }
}

//! The units whose home this node is: the side of the protocol that decides.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rdmux_wire::dsm::{Body, NodeId, Right};

use super::{Output, Violation};
use crate::peers::Peers;

/// The directory. A unit that nobody has asked for is [`Entry::new`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Directory {
    entries: BTreeMap<u64, Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Entry {
    holders: Holders,
    /// Nodes whose memory has the contents as last written, whether they have a right or not. Those with a right are among them.
    fresh: BTreeSet<NodeId>,
    /// The request that is being carried out.
    turn: Option<Turn>,
    /// The requests behind it, one a node.
    queue: VecDeque<Ask>,
}

/// Nodes that have a right to a unit, besides the one that is being granted one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Holders {
    Shared(BTreeSet<NodeId>),
    Exclusive(NodeId),
    /// The contents are lost with a node.
    Lost(NodeId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ask {
    node: NodeId,
    request: u64,
    right: Right,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Turn {
    ask: Ask,
    /// The node that asked is gone.
    is_void: bool,
    step: Step,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// These have not yielded.
    Recalling(BTreeSet<NodeId>),
    /// The node that asked has not answered the grant. `has_failed`: it could not read from the source, which is a member all the same.
    Granting {
        right: Right,
        source: Option<NodeId>,
        has_failed: bool,
    },
}

impl Ask {
    /// Returns the greatest right that other nodes may keep.
    fn kept(self) -> Right {
        match self.right {
            Right::Exclusive => Right::Invalid,
            _ => Right::Shared,
        }
    }

    fn answer(self, unit: u64, body: Body, out: &mut Output) {
        out.post(self.node, unit, self.request, body);
    }
}

impl Entry {
    fn new(home: NodeId) -> Entry {
        Entry {
            holders: Holders::Shared(BTreeSet::new()),
            fresh: BTreeSet::from([home]),
            turn: None,
            queue: VecDeque::new(),
        }
    }

    /// Goes on as far as that is possible without a message.
    fn advance(&mut self, unit: u64, out: &mut Output) {
        loop {
            let Some(turn) = &self.turn else {
                let Some(ask) = self.queue.pop_front() else { return };
                self.begin(unit, ask, out);
                continue;
            };
            let Step::Recalling(rest) = &turn.step else { return };
            if !rest.is_empty() && !mutant!(RecallNotAwaited) {
                return;
            }
            let ask = turn.ask;
            if let Holders::Lost(node) = self.holders {
                ask.answer(unit, Body::Refuse(node), out);
                self.turn = None;
            } else if turn.is_void {
                self.turn = None;
            } else {
                self.grant(unit, ask, out);
                return;
            }
        }
    }

    /// Begins a turn: recalls what does not go together with the request.
    fn begin(&mut self, unit: u64, ask: Ask, out: &mut Output) {
        let kept = ask.kept();
        let mut recalled = match &self.holders {
            Holders::Exclusive(owner) if kept == Right::Invalid || !mutant!(OwnerKeepsRight) => {
                BTreeSet::from([*owner])
            }
            Holders::Shared(sharers) if kept == Right::Invalid => sharers.clone(),
            _ => BTreeSet::new(),
        };
        recalled.remove(&ask.node);
        if mutant!(OneSharerRecalled) {
            recalled = recalled.into_iter().take(1).collect();
        }
        for node in &recalled {
            out.post(*node, unit, ask.request, Body::Recall(kept));
        }
        self.turn = Some(Turn {
            ask,
            is_void: false,
            step: Step::Recalling(recalled),
        });
    }

    fn grant(&mut self, unit: u64, ask: Ask, out: &mut Output) {
        let is_alone = match &self.holders {
            Holders::Shared(sharers) => sharers.iter().all(|it| *it == ask.node),
            Holders::Exclusive(owner) => *owner == ask.node,
            Holders::Lost(_) => false,
        };
        let right = if is_alone { Right::Exclusive } else { ask.right };
        let source = match self.fresh.contains(&ask.node) {
            true => None,
            false => self.fresh.first().copied(),
        };
        ask.answer(unit, Body::Grant { right, source }, out);
        self.turn = Some(Turn {
            ask,
            is_void: false,
            step: Step::Granting {
                right,
                source,
                has_failed: false,
            },
        });
        if mutant!(InstalledNotAwaited) {
            self.install(ask.node, right);
            self.advance(unit, out);
        }
    }

    /// Ends the turn: the node has the right.
    fn install(&mut self, node: NodeId, right: Right) {
        match &mut self.holders {
            Holders::Shared(sharers) if right == Right::Shared => {
                sharers.insert(node);
                self.fresh.insert(node);
            }
            holders => {
                *holders = Holders::Exclusive(node);
                if !mutant!(FreshKept) {
                    self.fresh.clear();
                }
                self.fresh.insert(node);
            }
        }
        self.turn = None;
    }

    /// Takes a right away from the record of the holders.
    fn lower(&mut self, node: NodeId, kept: Right) {
        match &mut self.holders {
            Holders::Exclusive(owner) if *owner == node => {
                let left = (kept == Right::Shared).then_some(node);
                self.holders = Holders::Shared(left.into_iter().collect());
            }
            Holders::Shared(sharers) if kept == Right::Invalid => {
                sharers.remove(&node);
            }
            _ => {}
        }
    }

    /// Repairs the entry after a node has left.
    fn gone(&mut self, node: NodeId, home: NodeId) {
        self.queue.retain(|ask| ask.node != node || mutant!(GoneGranted));
        let mut is_lost = matches!(self.holders, Holders::Exclusive(owner) if owner == node);
        if is_lost && mutant!(ExclusiveNotLost) {
            is_lost = false;
            self.fresh = BTreeSet::from([home]);
        }
        let was_shared = self.fresh.remove(&node);
        if let Some(turn) = &mut self.turn {
            let is_asker = turn.ask.node == node && !mutant!(GoneGranted);
            match &mut turn.step {
                Step::Recalling(rest) => {
                    turn.is_void |= is_asker;
                    if !mutant!(GoneAwaited) {
                        rest.remove(&node);
                    }
                }
                Step::Granting { right, .. } if is_asker => {
                    is_lost |= *right == Right::Exclusive && !mutant!(GrantNotLost);
                    self.turn = None;
                }
                Step::Granting {
                    source: Some(source),
                    has_failed: true,
                    ..
                } if *source == node && !mutant!(FailureForgotten) => {
                    turn.step = Step::Recalling(BTreeSet::new());
                }
                Step::Granting { .. } => {}
            }
        }
        is_lost |= was_shared && mutant!(SharedLost);
        // The node that reads from one that is gone, this one or an earlier one, is going to say whether it has read.
        let is_read = self.turn.as_ref().is_some_and(|turn| {
            matches!(
                turn.step,
                Step::Granting {
                    source: Some(_),
                    has_failed: false,
                    ..
                }
            )
        }) && !mutant!(ReadNotAwaited);
        let is_kept = is_read || !self.fresh.is_empty() || matches!(self.holders, Holders::Lost(_));
        if is_lost || !is_kept {
            self.holders = Holders::Lost(node);
        } else {
            self.lower(node, Right::Invalid);
        }
    }
}

impl Directory {
    /// Returns the entry whose grant a node answers.
    fn granting(&mut self, unit: u64, from: (NodeId, u64)) -> Result<&mut Entry, Violation> {
        let is_granting = |entry: &&mut Entry| {
            let turn = entry.turn.as_ref();
            turn.is_some_and(|it| {
                (it.ask.node, it.ask.request) == from && matches!(it.step, Step::Granting { .. })
            })
        };
        let entry = self.entries.get_mut(&unit).filter(is_granting);
        entry.ok_or(Violation::Unexpected)
    }

    pub(super) fn ask(
        &mut self,
        unit: u64,
        (node, request): (NodeId, u64),
        right: Right,
        home: NodeId,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let entry = self.entries.entry(unit).or_insert_with(|| Entry::new(home));
        if entry.queue.iter().any(|ask| ask.node == node) {
            return Err(Violation::Unexpected);
        }
        if entry.turn.is_some() && mutant!(BusyForgotten) {
            return Ok(());
        }
        entry.queue.push_back(Ask { node, request, right });
        entry.advance(unit, out);
        Ok(())
    }

    pub(super) fn yielded(&mut self, unit: u64, node: NodeId, out: &mut Output) -> Result<(), Violation> {
        let entry = self.entries.get_mut(&unit).ok_or(Violation::Unexpected)?;
        let Some(turn) = &mut entry.turn else {
            return Err(Violation::Unexpected);
        };
        let kept = turn.ask.kept();
        match &mut turn.step {
            Step::Recalling(rest) if rest.contains(&node) => {
                rest.remove(&node);
                entry.lower(node, kept);
                entry.advance(unit, out);
                Ok(())
            }
            _ => Err(Violation::Unexpected),
        }
    }

    pub(super) fn installed(
        &mut self,
        unit: u64,
        from: (NodeId, u64),
        out: &mut Output,
    ) -> Result<(), Violation> {
        let entry = self.granting(unit, from)?;
        if let Some(Turn {
            step: Step::Granting { right, .. },
            ..
        }) = entry.turn
        {
            entry.install(from.0, right);
            entry.advance(unit, out);
        }
        Ok(())
    }

    pub(super) fn failed(
        &mut self,
        unit: u64,
        from: (NodeId, u64),
        peers: &Peers,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let entry = self.granting(unit, from)?;
        let Some(Turn { step, .. }) = &mut entry.turn else {
            return Err(Violation::Unexpected);
        };
        let Step::Granting {
            source: Some(source),
            has_failed,
            ..
        } = step
        else {
            return Err(Violation::Unexpected);
        };
        if peers.is_member(*source) {
            *has_failed = true;
            return Ok(());
        }
        if entry.fresh.is_empty() {
            entry.holders = Holders::Lost(*source);
        }
        *step = Step::Recalling(BTreeSet::new());
        entry.advance(unit, out);
        Ok(())
    }

    /// Repairs all entries after nodes have left, and goes on.
    pub(super) fn gone(&mut self, gone: &[NodeId], home: NodeId, out: &mut Output) {
        let mut gone = gone.to_vec();
        for (unit, entry) in &mut self.entries {
            // The node that asked is first: contents that it was reading from another one are lost with that one.
            let asker = entry.turn.as_ref().map(|turn| turn.ask.node);
            gone.sort_by_key(|node| asker != Some(*node));
            gone.iter().for_each(|node| entry.gone(*node, home));
            entry.advance(*unit, out);
        }
    }

    /// Returns the nodes that a unit's turn waits for.
    pub(super) fn waits_for(&self, unit: u64) -> impl Iterator<Item = NodeId> {
        let turn = self.entries.get(&unit).and_then(|entry| entry.turn.as_ref());
        let recalled = turn.and_then(|turn| match &turn.step {
            Step::Recalling(rest) => Some(rest),
            Step::Granting { .. } => None,
        });
        let other = turn.and_then(|turn| match turn.step {
            Step::Recalling(_) => None,
            // It can be granted again when the source has left.
            Step::Granting {
                source,
                has_failed: true,
                ..
            } => source,
            Step::Granting { .. } => Some(turn.ask.node),
        });
        recalled.into_iter().flatten().copied().chain(other)
    }

    /// Returns the nodes that may have a right to a unit, as recorded.
    pub(super) fn holders(&self, unit: u64) -> BTreeSet<NodeId> {
        let Some(entry) = self.entries.get(&unit) else {
            return BTreeSet::new();
        };
        let mut nodes = match &entry.holders {
            Holders::Shared(sharers) => sharers.clone(),
            Holders::Exclusive(node) => BTreeSet::from([*node]),
            Holders::Lost(_) => BTreeSet::new(),
        };
        if let Some(turn) = &entry.turn
            && matches!(turn.step, Step::Granting { .. })
        {
            nodes.insert(turn.ask.node);
        }
        nodes
    }

    /// Returns the node with which a unit is lost.
    pub(super) fn lost(&self, unit: u64) -> Option<NodeId> {
        match self.entries.get(&unit)?.holders {
            Holders::Lost(node) => Some(node),
            _ => None,
        }
    }
}

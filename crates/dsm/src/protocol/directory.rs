//! The units whose home this node is: the side of the protocol that decides.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

use rdmux_wire::dsm::{Body, NodeId, Right};

use super::nodes::NodeSet;
use super::slab::{List, Lists};
use super::table::Table;
use super::{Homes, Output, Violation, Wait};
use crate::peers::{Peers, Place};

/// The directory. A unit without an entry is as [`Entry::new`]; an entry that has become so again is removed.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    entries: Table<Entry>,
    /// Those of all entries.
    requests: Lists<Request>,
}

#[derive(Clone, Debug, Default)]
struct Entry {
    holders: Holders,
    /// Nodes that share the unit, besides those that are being granted a right. None if it is not shared.
    sharers: NodeSet,
    /// Nodes whose memory has the contents as last written, whether they have a right or not. Those with a right are among them. None if the
    /// contents are lost.
    fresh: NodeSet,
    /// Nodes that are recalled and have not yielded.
    rest: NodeSet,
    /// The requests that are being carried out: one, or several to read while no node can write, one a node.
    turns: List,
    /// The requests behind them, one a node.
    queue: List,
}

/// Nodes that have a right to a unit, besides those that are being granted one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Holders {
    #[default]
    Shared,
    Exclusive(Place),
    /// The contents are lost with a node.
    Lost(Place),
    /// The registrar has not said that this node is the home. Requests wait.
    Unknown,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Request {
    unit: u64,
    node: Place,
    /// Its number at that node.
    number: u64,
    right: Right,
    step: Step,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Step {
    /// Others come first.
    #[default]
    Waiting,
    /// Those that are in the way are recalled; or no frame is fresh before another read has ended. `is_void`: the node that asked is gone.
    Recalling { is_void: bool },
    /// The node that asked has not answered the grant. `has_failed`: it could not read from the source, which is a member all the same.
    Granting {
        right: Right,
        source: Option<Place>,
        has_failed: bool,
    },
}

/// The module's text says how much memory they take.
const _: () = assert!(size_of::<Entry>() <= 96 && size_of::<Request>() <= 40);

impl Request {
    /// Returns the greatest right that other nodes may keep.
    fn kept(self) -> Right {
        match self.right {
            Right::Exclusive => Right::Invalid,
            _ => Right::Shared,
        }
    }
}

impl Entry {
    fn new(home: Place) -> Entry {
        let mut entry = Entry::default();
        entry.fresh.insert(home);
        entry
    }

    /// Returns whether the entry tells no more than [`Entry::new`].
    fn is_new(&self, home: Place) -> bool {
        matches!(self.holders, Holders::Shared | Holders::Unknown)
            && self.turns.is_empty()
            && self.queue.is_empty()
            && self.sharers.is_empty()
            && self.fresh.iter().eq([home])
    }

    /// Ends the turn: the node has the right.
    fn install(&mut self, node: Place, right: Right) {
        if self.holders == Holders::Shared && right == Right::Shared {
            self.sharers.insert(node);
        } else {
            self.holders = Holders::Exclusive(node);
            self.sharers.clear();
            if !mutant!(FreshKept) {
                self.fresh.clear();
            }
        }
        self.fresh.insert(node);
    }

    /// Takes a right away from the record of the holders.
    fn lower(&mut self, node: Place, kept: Right) {
        match self.holders {
            Holders::Exclusive(owner) if owner == node => {
                self.holders = Holders::Shared;
                if kept == Right::Shared {
                    self.sharers.set_only(node);
                }
            }
            Holders::Shared if kept == Right::Invalid => {
                self.sharers.remove(node);
            }
            _ => {}
        }
    }

    /// Records that the contents are lost with a node.
    fn lose(&mut self, node: Place) {
        self.holders = Holders::Lost(node);
        self.sharers = NodeSet::default();
        self.fresh = NodeSet::default();
    }
}

/// A unit's entry, with all that a change of it needs.
struct Change<'a> {
    unit: u64,
    entry: &'a mut Entry,
    requests: &'a mut Lists<Request>,
    peers: &'a Peers,
    out: &'a mut Output,
}

impl Change<'_> {
    /// Ends the turn of a node.
    fn end_turn(&mut self, node: Place) {
        self.requests.retain(&mut self.entry.turns, |it| it.node != node);
    }

    fn answer(&mut self, request: Request, body: Body) {
        let node = self.peers.node(request.node);
        self.out.post(node, self.unit, request.number, body);
    }

    /// Goes on as far as that is possible without a message.
    fn advance(&mut self) {
        if self.entry.holders == Holders::Unknown && !mutant!(EarlyTaken) {
            return;
        }
        loop {
            let is_ready = |it: &Request| matches!(it.step, Step::Recalling { .. });
            if let Some(&mut turn) = self.requests.find(self.entry.turns, is_ready) {
                if !self.settle(turn) {
                    return;
                }
            } else if self.entry.turns.is_empty() || self.can_join() {
                let Some(request) = self.requests.pop(&mut self.entry.queue) else {
                    return;
                };
                self.begin(request);
            } else {
                return;
            }
        }
    }

    /// Ends a turn or grants it, and returns whether that is possible.
    fn settle(&mut self, turn: Request) -> bool {
        if !self.entry.rest.is_empty() && !mutant!(RecallNotAwaited) {
            return false;
        }
        let is_void = turn.step == Step::Recalling { is_void: true };
        if let Holders::Lost(node) = self.entry.holders {
            self.answer(turn, Body::Refuse(self.peers.node(node)));
            self.end_turn(turn.node);
        } else if is_void {
            self.end_turn(turn.node);
        } else if self.entry.fresh.is_empty() {
            return false;
        } else {
            self.grant(turn);
        }
        true
    }

    /// Returns whether the first request in the queue can be carried out together with those that are: all of them read, and no node gets to
    /// write.
    fn can_join(&self) -> bool {
        let Some(next) = self.requests.iter(self.entry.queue).next() else {
            return false;
        };
        let goes_with = |it: &Request| {
            let is_exclusive = matches!(
                it.step,
                Step::Granting {
                    right: Right::Exclusive,
                    ..
                }
            );
            it.node != next.node && (!is_exclusive || mutant!(WriterJoined))
        };
        (next.right == Right::Shared || mutant!(WriterJoins))
            && self.entry.holders == Holders::Shared
            && self.requests.iter(self.entry.turns).all(goes_with)
    }

    /// Begins a turn: recalls what does not go together with the request.
    fn begin(&mut self, request: Request) {
        let kept = request.kept();
        let Entry {
            holders,
            sharers,
            rest,
            ..
        } = self.entry;
        match *holders {
            Holders::Exclusive(owner) if kept == Right::Invalid || !mutant!(OwnerKeepsRight) => {
                rest.set_only(owner);
            }
            Holders::Shared if kept == Right::Invalid => rest.set(sharers),
            _ => rest.clear(),
        }
        rest.remove(request.node);
        if mutant!(OneSharerRecalled)
            && let Some(first) = rest.first()
        {
            rest.set_only(first);
        }
        for node in rest.iter() {
            let node = self.peers.node(node);
            self.out.post(node, self.unit, request.number, Body::Recall(kept));
        }
        let step = Step::Recalling { is_void: false };
        self.requests
            .push(&mut self.entry.turns, Request { step, ..request });
    }

    fn grant(&mut self, request: Request) {
        let node = request.node;
        let is_alone = match self.entry.holders {
            Holders::Shared => self.entry.sharers.iter().all(|it| it == node),
            Holders::Exclusive(owner) => owner == node,
            Holders::Lost(_) | Holders::Unknown => false,
        };
        let is_alone = is_alone && self.requests.iter(self.entry.turns).all(|it| it.node == node);
        let right = if is_alone { Right::Exclusive } else { request.right };
        let source = match self.entry.fresh.contains(node) {
            true => None,
            false => self.entry.fresh.first(),
        };
        let named = source.map(|it| self.peers.node(it));
        self.answer(request, Body::Grant { right, source: named });
        let turn = self.requests.find(self.entry.turns, |it| it.node == node);
        if let Some(turn) = turn {
            turn.step = Step::Granting {
                right,
                source,
                has_failed: false,
            };
        }
        if mutant!(InstalledNotAwaited) {
            self.install(node, right);
        }
    }

    /// Ends the turn, since the node has the right, and goes on.
    fn install(&mut self, node: Place, right: Right) {
        self.entry.install(node, right);
        self.end_turn(node);
        self.advance();
    }

    /// Returns whether a node may have read the contents, and is going to say it.
    fn is_read(&self) -> bool {
        let is_read = |it: &Request| {
            matches!(
                it.step,
                Step::Granting {
                    source: Some(_),
                    has_failed: false,
                    ..
                }
            )
        };
        self.requests.iter(self.entry.turns).any(is_read)
    }

    /// Repairs the entry after a node has left.
    fn gone(&mut self, node: Place) {
        let Change { entry, requests, .. } = self;
        requests.retain(&mut entry.queue, |it| it.node != node || mutant!(GoneGranted));
        let mut is_lost = entry.holders == Holders::Exclusive(node);
        if is_lost && mutant!(ExclusiveNotLost) {
            is_lost = false;
            entry.fresh.set_only(self.peers.own_place());
        }
        let was_shared = entry.fresh.remove(node);
        if !mutant!(GoneAwaited) {
            entry.rest.remove(node);
        }
        requests.retain(&mut entry.turns, |turn| {
            let is_asker = turn.node == node && !mutant!(GoneGranted);
            match &mut turn.step {
                Step::Recalling { is_void } => *is_void |= is_asker,
                Step::Granting { right, .. } if is_asker => {
                    is_lost |= *right == Right::Exclusive && !mutant!(GrantNotLost);
                    return false;
                }
                Step::Granting {
                    source: Some(source),
                    has_failed: true,
                    ..
                } if *source == node && !mutant!(FailureForgotten) => {
                    turn.step = Step::Recalling { is_void: false };
                }
                Step::Granting { .. } | Step::Waiting => {}
            }
            true
        });
        is_lost |= was_shared && mutant!(SharedLost);
        // The node that reads from one that is gone, this one or an earlier one, is going to say whether it has read.
        let is_read = self.is_read() && !mutant!(ReadNotAwaited);
        let is_kept =
            is_read || !self.entry.fresh.is_empty() || matches!(self.entry.holders, Holders::Lost(_));
        if is_lost || !is_kept {
            self.entry.lose(node);
        } else {
            self.entry.lower(node, Right::Invalid);
        }
    }
}

impl Directory {
    /// Makes the directory of a region of so many units.
    pub(super) fn new(units: u64) -> Directory {
        Directory {
            entries: Table::new(units),
            requests: Lists::default(),
        }
    }

    /// Changes a unit's entry, which `is_made` if it has none.
    fn change(
        &mut self,
        unit: u64,
        is_made: bool,
        (peers, out): (&Peers, &mut Output),
        change: impl FnOnce(&mut Change<'_>) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let home = peers.own_place();
        let entry = match is_made {
            true => self.entries.get_or_insert(unit, || Entry::new(home)),
            false => self.entries.get_mut(unit).ok_or(Violation::Unexpected)?,
        };
        let requests = &mut self.requests;
        let mut it = Change {
            unit,
            entry,
            requests,
            peers,
            out,
        };
        let outcome = change(&mut it);
        if it.entry.is_new(home) {
            self.entries.remove(unit);
        }
        outcome
    }

    pub(super) fn ask(
        &mut self,
        unit: u64,
        (node, number): (Place, u64),
        right: Right,
        parts: (&Peers, &mut Output),
    ) -> Result<(), Violation> {
        self.change(unit, true, parts, |it| {
            if it.requests.iter(it.entry.queue).any(|it| it.node == node) {
                return Err(Violation::Unexpected);
            }
            if !it.entry.turns.is_empty() && mutant!(BusyForgotten) {
                return Ok(());
            }
            let step = Step::Waiting;
            let request = Request {
                unit,
                node,
                number,
                right,
                step,
            };
            it.requests.push(&mut it.entry.queue, request);
            it.advance();
            Ok(())
        })
    }

    /// Takes a request for a unit whose home this node is not, as far as it knows.
    pub(super) fn ask_early(
        &mut self,
        unit: u64,
        from: (Place, u64),
        right: Right,
        (peers, out): (&Peers, &mut Output),
    ) -> Result<(), Violation> {
        if mutant!(EarlyForgotten) {
            return Ok(());
        }
        let home = peers.own_place();
        let entry = self.entries.get_or_insert(unit, || Entry::new(home));
        entry.holders = Holders::Unknown;
        self.ask(unit, from, right, (peers, out))
    }

    /// Takes a request as [`Directory::ask_early`], when the registrar is gone, so that this node does not become the home any more.
    pub(super) fn ask_late(
        &mut self,
        unit: u64,
        from: (Place, u64),
        right: Right,
        registrar: Place,
        (peers, out): (&Peers, &mut Output),
    ) -> Result<(), Violation> {
        self.entries.get_or_insert(unit, Entry::default).lose(registrar);
        self.ask(unit, from, right, (peers, out))
    }

    /// Takes the registrar's news that this node is the home, and begins with the requests that wait.
    pub(super) fn confirm(&mut self, unit: u64, parts: (&Peers, &mut Output)) {
        let outcome = self.change(unit, false, parts, |it| {
            it.entry.holders = Holders::Shared;
            it.advance();
            Ok(())
        });
        // Mostly there is no entry.
        outcome.unwrap_or_default();
    }

    pub(super) fn yielded(
        &mut self,
        unit: u64,
        node: Place,
        parts: (&Peers, &mut Output),
    ) -> Result<(), Violation> {
        self.change(unit, false, parts, |it| {
            let is_recalling = |it: &Request| matches!(it.step, Step::Recalling { .. });
            let turn = it.requests.find(it.entry.turns, is_recalling).copied();
            let turn = turn.ok_or(Violation::Unexpected)?;
            if !it.entry.rest.remove(node) {
                return Err(Violation::Unexpected);
            }
            it.entry.lower(node, turn.kept());
            it.advance();
            Ok(())
        })
    }

    pub(super) fn installed(
        &mut self,
        unit: u64,
        from: (Place, u64),
        parts: (&Peers, &mut Output),
    ) -> Result<(), Violation> {
        self.change(unit, false, parts, |it| {
            let is_its = |it: &Request| (it.node, it.number) == from;
            let Some(&mut Request {
                step: Step::Granting { right, .. },
                ..
            }) = it.requests.find(it.entry.turns, is_its)
            else {
                return Err(Violation::Unexpected);
            };
            it.install(from.0, right);
            Ok(())
        })
    }

    pub(super) fn failed(
        &mut self,
        unit: u64,
        from: (Place, u64),
        parts: (&Peers, &mut Output),
    ) -> Result<(), Violation> {
        self.change(unit, false, parts, |it| {
            let is_its = |it: &Request| (it.node, it.number) == from;
            let Some(turn) = it.requests.find(it.entry.turns, is_its) else {
                return Err(Violation::Unexpected);
            };
            let Step::Granting {
                source: Some(source),
                has_failed,
                ..
            } = &mut turn.step
            else {
                return Err(Violation::Unexpected);
            };
            let source = *source;
            if it.peers.is_member(it.peers.node(source)) {
                *has_failed = true;
                return Ok(());
            }
            turn.step = Step::Recalling { is_void: false };
            if it.entry.fresh.is_empty() && !it.is_read() {
                it.entry.lose(source);
            }
            it.advance();
            Ok(())
        })
    }

    /// Repairs all entries after nodes have left, and goes on.
    pub(super) fn gone(&mut self, gone: &[NodeId], homes: &Homes, peers: &Peers, out: &mut Output) {
        let mut gone: Vec<Place> = gone.iter().filter_map(|it| peers.place(*it)).collect();
        let mut from = 0;
        while let Some((unit, entry)) = self.entries.next_mut(from) {
            from = unit + 1;
            // The nodes that asked are first: contents that they were reading from another one are lost with that one.
            gone.sort_by_key(|node| !self.requests.iter(entry.turns).any(|it| it.node == *node));
            let requests = &mut self.requests;
            let mut it = Change {
                unit,
                entry,
                requests,
                peers,
                out,
            };
            gone.iter().for_each(|node| it.gone(*node));
            if it.entry.holders == Holders::Unknown
                && let Some(registrar) = peers.place(homes.of(unit))
                && !peers.is_member(homes.of(unit))
                && !mutant!(EarlyNotRefused)
            {
                it.entry.lose(registrar);
            }
            it.advance();
            if it.entry.is_new(peers.own_place()) {
                self.entries.remove(unit);
            }
        }
    }

    /// Returns the nodes that a unit's turns wait for.
    pub(super) fn waits_for<'a>(&'a self, unit: u64, peers: &'a Peers) -> impl Iterator<Item = NodeId> {
        let entry = self.entries.get(unit);
        let turns = entry.into_iter().flat_map(|it| self.requests.iter(it.turns));
        turns.flat_map(|turn| self.awaited(turn)).map(|it| peers.node(it))
    }

    /// Returns the waits of all turns.
    pub(super) fn waits<'a>(&'a self, peers: &'a Peers) -> impl Iterator<Item = Wait> {
        self.requests.all().flat_map(|turn| {
            self.awaited(turn).map(|node| Wait {
                unit: turn.unit,
                request: (peers.node(turn.node), turn.number),
                node: peers.node(node),
            })
        })
    }

    /// Returns the nodes that a turn waits for.
    fn awaited(&self, turn: &Request) -> impl Iterator<Item = Place> {
        let is_recalling = matches!(turn.step, Step::Recalling { .. });
        let entry = self.entries.get(turn.unit).filter(|_| is_recalling);
        let granted = match turn.step {
            Step::Recalling { .. } | Step::Waiting => None,
            // It can be granted again when the source has left.
            Step::Granting {
                source,
                has_failed: true,
                ..
            } => source,
            Step::Granting { .. } => Some(turn.node),
        };
        entry.into_iter().flat_map(|it| it.rest.iter()).chain(granted)
    }

    /// Returns the nodes that may have a right to a unit, as recorded.
    pub(super) fn holders(&self, unit: u64, peers: &Peers) -> BTreeSet<NodeId> {
        let Some(entry) = self.entries.get(unit) else {
            return BTreeSet::new();
        };
        let owner = match entry.holders {
            Holders::Exclusive(owner) => Some(owner),
            Holders::Shared | Holders::Lost(_) | Holders::Unknown => None,
        };
        let granted = self.requests.iter(entry.turns);
        let granted = granted.filter(|it| matches!(it.step, Step::Granting { .. }));
        let places = entry.sharers.iter().chain(owner).chain(granted.map(|it| it.node));
        places.map(|it| peers.node(it)).collect()
    }

    /// Returns the node with which a unit is lost.
    pub(super) fn lost(&self, unit: u64, peers: &Peers) -> Option<NodeId> {
        match self.entries.get(unit)?.holders {
            Holders::Lost(node) => Some(peers.node(node)),
            _ => None,
        }
    }

    /// Returns the entries without their requests.
    fn states(&self) -> impl Iterator<Item = (u64, Holders, [&NodeSet; 3])> {
        let entries = self.entries.iter();
        entries.map(|(unit, it)| (unit, it.holders, [&it.sharers, &it.fresh, &it.rest]))
    }

    /// Returns the requests, by unit, in their order.
    fn requests(&self) -> impl Iterator<Item = (u64, &Request)> {
        self.entries.iter().flat_map(move |(unit, entry)| {
            let lists = [entry.turns, entry.queue].into_iter();
            lists.flat_map(move |it| self.requests.iter(it).map(move |request| (unit, request)))
        })
    }
}

/// The numbers under which things are stored do not count.
impl PartialEq for Directory {
    fn eq(&self, other: &Directory) -> bool {
        self.states().eq(other.states()) && self.requests().eq(other.requests())
    }
}

impl Eq for Directory {}

impl Hash for Directory {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.states().for_each(|it| it.hash(state));
        u64::MAX.hash(state);
        self.requests().for_each(|it| it.hash(state));
    }
}

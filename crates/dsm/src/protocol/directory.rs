//! The units whose home this node is: the side of the protocol that decides.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

use rdmux_wire::dsm::{Body, NodeId, Right};

use super::nodes::{NodeSet, Place};
use super::peers::Peers;
use super::slab::{List, Lists};
use super::table::Table;
use super::{Action, Homes, Output, Violation};

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
    /// Nodes that share the unit, besides the one that is being granted a right. None if it is not shared.
    sharers: NodeSet,
    /// Nodes whose memory has the contents as last written, whether they have a right or not. Those with a right are among them. None if the
    /// contents are lost.
    fresh: NodeSet,
    /// Nodes that are recalled and have not yielded.
    rest: NodeSet,
    /// The request that is being carried out.
    turn: List,
    /// The requests behind it, one a node.
    queue: List,
}

/// Nodes that have a right to a unit, besides the one that is being granted one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Holders {
    #[default]
    Shared,
    Exclusive(Place),
    /// The contents are lost with a node.
    Lost(Place),
    /// The registrar has not said whether this node is the home. Requests wait.
    Unknown,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Request {
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
    /// Those that are in the way are recalled. `is_void`: the node that asked is gone.
    Recalling { is_void: bool },
    /// The node that asked has not answered the grant. `has_failed`: it could not read from the source, which is a member all the same.
    Granting {
        right: Right,
        source: Option<Place>,
        has_failed: bool,
    },
}

/// The module's text says how much memory they take.
const _: () = assert!(size_of::<Entry>() <= 96 && size_of::<Request>() <= 32);

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

    /// Returns whether the entry is [`Entry::new`].
    fn is_new(&self, home: Place) -> bool {
        self.holders == Holders::Shared
            && self.turn.is_empty()
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
    /// Returns the request that is being carried out.
    fn turn(&mut self) -> Option<&mut Request> {
        self.requests.find(self.entry.turn, |_| true)
    }

    fn end_turn(&mut self) {
        self.requests.pop(&mut self.entry.turn);
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
            let Some(turn) = self.turn().copied() else {
                let Some(request) = self.requests.pop(&mut self.entry.queue) else {
                    return;
                };
                self.begin(request);
                continue;
            };
            let Step::Recalling { is_void } = turn.step else {
                return;
            };
            if !self.entry.rest.is_empty() && !mutant!(RecallNotAwaited) {
                return;
            }
            if let Holders::Lost(node) = self.entry.holders {
                self.answer(turn, Body::Refuse(self.peers.node(node)));
                self.end_turn();
            } else if is_void {
                self.end_turn();
            } else {
                self.grant(turn);
                return;
            }
        }
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
            .push(&mut self.entry.turn, Request { step, ..request });
    }

    fn grant(&mut self, request: Request) {
        let node = request.node;
        let is_alone = match self.entry.holders {
            Holders::Shared => self.entry.sharers.iter().all(|it| it == node),
            Holders::Exclusive(owner) => owner == node,
            Holders::Lost(_) | Holders::Unknown => false,
        };
        let right = if is_alone { Right::Exclusive } else { request.right };
        let source = match self.entry.fresh.contains(node) {
            true => None,
            false => self.entry.fresh.first(),
        };
        let named = source.map(|it| self.peers.node(it));
        self.answer(request, Body::Grant { right, source: named });
        if let Some(turn) = self.turn() {
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
        self.end_turn();
        self.advance();
    }

    /// Has the grant be given again, with another source.
    fn grant_again(turn: &mut Request, rest: &mut NodeSet) {
        turn.step = Step::Recalling { is_void: false };
        rest.clear();
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
        let mut is_ended = false;
        if let Some(turn) = requests.find(entry.turn, |_| true) {
            let is_asker = turn.node == node && !mutant!(GoneGranted);
            match &mut turn.step {
                Step::Recalling { is_void } => {
                    *is_void |= is_asker;
                    if !mutant!(GoneAwaited) {
                        entry.rest.remove(node);
                    }
                }
                Step::Granting { right, .. } if is_asker => {
                    is_lost |= *right == Right::Exclusive && !mutant!(GrantNotLost);
                    is_ended = true;
                }
                Step::Granting {
                    source: Some(source),
                    has_failed: true,
                    ..
                } if *source == node && !mutant!(FailureForgotten) => {
                    Self::grant_again(turn, &mut entry.rest);
                }
                Step::Granting { .. } | Step::Waiting => {}
            }
        }
        if is_ended {
            requests.pop(&mut entry.turn);
        }
        is_lost |= was_shared && mutant!(SharedLost);
        // The node that reads from one that is gone, this one or an earlier one, is going to say whether it has read.
        let is_read = requests.iter(entry.turn).any(|turn| {
            matches!(
                turn.step,
                Step::Granting {
                    source: Some(_),
                    has_failed: false,
                    ..
                }
            )
        }) && !mutant!(ReadNotAwaited);
        let is_kept = is_read || !entry.fresh.is_empty() || matches!(entry.holders, Holders::Lost(_));
        if is_lost || !is_kept {
            entry.lose(node);
        } else {
            entry.lower(node, Right::Invalid);
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
            if !it.entry.turn.is_empty() && mutant!(BusyForgotten) {
                return Ok(());
            }
            let step = Step::Waiting;
            let request = Request {
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

    /// Takes a request that comes before the registrar has said which node is the home.
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

    /// Takes a request for a unit whose home nobody can know any more, since its registrar is gone.
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

    /// Takes the registrar's news of which node is the home, and begins with the requests that wait. If it is another one, no correct node has sent
    /// them.
    pub(super) fn located(&mut self, unit: u64, is_home: bool, parts: (&Peers, &mut Output)) {
        let outcome = self.change(unit, false, parts, |it| {
            if it.entry.holders == Holders::Unknown {
                it.entry.holders = Holders::Shared;
            }
            while !is_home && let Some(request) = it.requests.pop(&mut it.entry.queue) {
                let (node, violation) = (it.peers.node(request.node), Violation::NotHome);
                it.out.act(Action::Accuse { node, violation });
            }
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
            let turn = it.turn().copied().ok_or(Violation::Unexpected)?;
            let is_recalling = matches!(turn.step, Step::Recalling { .. });
            if !is_recalling || !it.entry.rest.remove(node) {
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
            let turn = it.turn().filter(|it| (it.node, it.number) == from);
            let Some(&mut Request {
                step: Step::Granting { right, .. },
                ..
            }) = turn
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
            let Change {
                entry,
                requests,
                peers,
                ..
            } = it;
            let turn = requests.find(entry.turn, |it| (it.node, it.number) == from);
            let Some(turn) = turn else {
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
            if peers.is_member(peers.node(*source)) {
                *has_failed = true;
                return Ok(());
            }
            if entry.fresh.is_empty() {
                entry.lose(*source);
            }
            Change::grant_again(turn, &mut entry.rest);
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
            // The node that asked is first: contents that it was reading from another one are lost with that one.
            let asker = self.requests.iter(entry.turn).next().map(|turn| turn.node);
            gone.sort_by_key(|node| asker != Some(*node));
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

    /// Returns the nodes that a unit's turn waits for.
    pub(super) fn waits_for<'a>(&'a self, unit: u64, peers: &'a Peers) -> impl Iterator<Item = NodeId> {
        let entry = self.entries.get(unit);
        let turn = entry.and_then(|entry| self.requests.iter(entry.turn).next());
        let is_recalling = turn.is_some_and(|turn| matches!(turn.step, Step::Recalling { .. }));
        let recalled = entry.filter(|_| is_recalling).map(|entry| entry.rest.iter());
        let other = turn.and_then(|turn| match turn.step {
            Step::Recalling { .. } | Step::Waiting => None,
            // It can be granted again when the source has left.
            Step::Granting {
                source,
                has_failed: true,
                ..
            } => source,
            Step::Granting { .. } => Some(turn.node),
        });
        recalled
            .into_iter()
            .flatten()
            .chain(other)
            .map(|it| peers.node(it))
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
        let granted = self.requests.iter(entry.turn);
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
            let lists = [entry.turn, entry.queue].into_iter();
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

//! The copies of units that this node has: the side of the protocol that asks, yields and installs.

use std::hash::{Hash, Hasher};

use rdmux_wire::dsm::{Body, NodeId, Right};

use super::table::Table;
use super::{Action, Homes, Output, Violation};
use crate::peers::Peers;

/// The copies, by unit. One that was never used is [`Page::default`]. Only faults of this node's program add any, and none is removed: the numbers
/// of tasks go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pages {
    pages: Table<Page>,
    homes: Homes,
    /// Requests so far.
    requests: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Page {
    /// Right of the view, or the one before while a protection is in progress.
    right: Right,
    /// The request for more.
    ask: Option<Ask>,
    /// The recall for which the view is being protected.
    recall: Option<Recall>,
    /// The node with which the unit was lost.
    lost: Option<NodeId>,
    /// Number of the task that was begun last. No other one is in progress.
    task: u64,
    /// The home, as the registrar has said.
    home: Option<NodeId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Ask {
    request: u64,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// Waits for the registrar. The right is to be asked for.
    Locating(Right),
    /// Waits for the home.
    Asked,
    /// The contents are being read.
    Pulling(Right),
    /// The view is being protected.
    Installing(Right),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Recall {
    request: u64,
    right: Right,
}

/// The module's text says how much memory it takes.
const _: () = assert!(size_of::<Page>() <= 64);

/// Leaves out the parts that never change.
impl Hash for Pages {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.pages.hash(state);
        self.requests.hash(state);
    }
}

impl Page {
    /// Returns the home, or the registrar if the home is not known.
    fn home(&self, unit: u64, homes: &Homes) -> NodeId {
        self.home.unwrap_or_else(|| homes.of(unit))
    }

    /// Returns whether the registrar or the home is to answer a request.
    fn waits(&self) -> bool {
        let step = self.ask.as_ref().map(|it| it.step);
        matches!(step, Some(Step::Asked | Step::Locating(_)))
    }

    /// Returns the right that is left when the protection in progress is in place, unless it is a greater one.
    fn right_kept(&self) -> Right {
        self.recall.as_ref().map_or(self.right, |it| it.right)
    }

    /// Returns whether the home is to answer a request.
    fn waits_for(&self, request: u64) -> bool {
        let step = Step::Asked;
        self.ask == Some(Ask { request, step })
    }

    /// Begins a task of the driver, and returns its number.
    fn begin(&mut self) -> u64 {
        self.task += 1;
        self.task
    }

    /// Protects the view.
    fn protect(&mut self, unit: u64, right: Right, out: &mut Output) {
        let task = self.begin();
        out.act(Action::Protect { unit, task, right });
    }

    /// Returns whether a task that has ended is the one in progress, if there is one.
    fn is_last(&self, task: u64) -> bool {
        self.task == task || mutant!(EarlierTaskTaken)
    }

    /// Ends all use of the copy.
    fn poison(&mut self, unit: u64, node: NodeId, out: &mut Output) {
        self.right = Right::Invalid;
        self.ask = None;
        self.lost = Some(node);
        out.act(Action::Poison { unit, node });
    }
}

impl Pages {
    pub(super) fn new(homes: Homes, units: u64) -> Pages {
        Pages {
            pages: Table::new(units),
            homes,
            requests: 0,
        }
    }

    pub(super) fn homes(&self) -> &Homes {
        &self.homes
    }

    /// Returns the home of a unit, if this node knows it.
    pub(super) fn home(&self, unit: u64) -> Option<NodeId> {
        match self.homes.is_first_touch() {
            true => self.pages.get(unit).and_then(|page| page.home),
            false => Some(self.homes.of(unit)),
        }
    }

    /// Returns the right of a copy.
    pub(super) fn right(&self, unit: u64) -> Right {
        self.pages.get(unit).map_or(Right::Invalid, |page| page.right)
    }

    /// Returns whether threads wait for a unit.
    pub(super) fn is_awaited(&self, unit: u64) -> bool {
        self.pages.get(unit).is_some_and(|page| page.ask.is_some())
    }

    pub(super) fn fault(&mut self, unit: u64, needed: Right, peers: &Peers, out: &mut Output) {
        let page = self.pages.get_or_insert(unit, Page::default);
        let home = page.home(unit, &self.homes);
        if let Some(node) = page.lost {
            out.act(Action::Poison { unit, node });
        } else if page.right_kept() >= needed {
            out.act(Action::Wake { unit });
        } else if page.ask.is_some() {
            // A thread that needs more than the request brings faults again.
        } else if !peers.is_member(peers.own()) {
            page.poison(unit, peers.own(), out);
        } else if !peers.is_member(home) && !mutant!(HomeGoneAwaited) {
            page.poison(unit, home, out);
        } else {
            let request = self.requests;
            self.requests += 1;
            let is_known = page.home.is_some() || !self.homes.is_first_touch();
            let (step, body) = match is_known {
                true => (Step::Asked, Body::Ask(needed)),
                false => (Step::Locating(needed), Body::Locate),
            };
            page.ask = Some(Ask { request, step });
            out.post(home, unit, request, body);
        }
    }

    /// Takes the registrar's answer, and asks the home.
    pub(super) fn located(
        &mut self,
        unit: u64,
        request: u64,
        home: NodeId,
        peers: &Peers,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let page = self.pages.get_mut(unit).ok_or(Violation::Unexpected)?;
        let ask = page.ask.as_mut().filter(|it| it.request == request);
        let Some(Ask { step, .. }) = ask else {
            return Err(Violation::Unexpected);
        };
        let Step::Locating(needed) = *step else {
            return Err(Violation::Unexpected);
        };
        *step = Step::Asked;
        page.home = Some(home);
        if peers.is_member(home) {
            out.post(home, unit, request, Body::Ask(needed));
        } else {
            page.poison(unit, home, out);
        }
        Ok(())
    }

    pub(super) fn recall(
        &mut self,
        unit: u64,
        request: u64,
        right: Right,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let page = self.pages.get_mut(unit).ok_or(Violation::Unexpected)?;
        let home = page.home(unit, &self.homes);
        let is_changing = page.ask.as_ref().is_some_and(|it| it.step != Step::Asked);
        if is_changing || page.recall.is_some() || page.right <= right {
            return Err(Violation::Unexpected);
        }
        if mutant!(UpgradeKeepsCopy) && page.ask.is_some() {
            out.post(home, unit, request, Body::Yielded);
            return Ok(());
        }
        page.recall = Some(Recall { request, right });
        page.protect(unit, right, out);
        if mutant!(YieldedEarly) {
            page.recall = None;
            page.right = right;
            out.post(home, unit, request, Body::Yielded);
        }
        Ok(())
    }

    pub(super) fn grant(
        &mut self,
        unit: u64,
        request: u64,
        (right, source): (Right, Option<NodeId>),
        peers: &Peers,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let page = self.pages.get_mut(unit).ok_or(Violation::Unexpected)?;
        let is_expected = page.waits_for(request) && page.recall.is_none() && source != Some(peers.own());
        let Some(ask) = page.ask.as_mut().filter(|_| is_expected) else {
            return Err(Violation::Unexpected);
        };
        let is_pulled = source.is_some() && !mutant!(TakenEarly);
        ask.step = match is_pulled {
            true => Step::Pulling(right),
            false => Step::Installing(right),
        };
        if let Some(from) = source {
            let task = page.begin();
            out.act(Action::Pull { unit, task, from });
        }
        if !is_pulled {
            page.protect(unit, right, out);
        }
        Ok(())
    }

    pub(super) fn refuse(
        &mut self,
        unit: u64,
        request: u64,
        node: NodeId,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let page = self.pages.get_mut(unit).ok_or(Violation::Unexpected)?;
        if !page.waits_for(request) {
            return Err(Violation::Unexpected);
        }
        page.poison(unit, node, out);
        Ok(())
    }

    pub(super) fn pulled(&mut self, unit: u64, task: u64, has_landed: bool, peers: &Peers, out: &mut Output) {
        let Some(page) = self.pages.get_mut(unit).filter(|it| it.is_last(task)) else {
            return;
        };
        let home = page.home(unit, &self.homes);
        let Some(ask) = &mut page.ask else { return };
        let Step::Pulling(right) = ask.step else { return };
        if has_landed || mutant!(FailureTaken) {
            ask.step = Step::Installing(right);
            page.protect(unit, right, out);
        } else if peers.is_member(home) {
            ask.step = Step::Asked;
            out.post(home, unit, ask.request, Body::Failed);
        } else {
            page.poison(unit, home, out);
        }
    }

    pub(super) fn protected(&mut self, unit: u64, task: u64, out: &mut Output) {
        let Some(page) = self.pages.get_mut(unit).filter(|it| it.is_last(task)) else {
            return;
        };
        let home = page.home(unit, &self.homes);
        if let Some(recall) = page.recall.take() {
            page.right = page.right.min(recall.right);
            out.post(home, unit, recall.request, Body::Yielded);
        } else if let Some(ask) = &page.ask
            && let Step::Installing(right) = ask.step
        {
            out.post(home, unit, ask.request, Body::Installed);
            page.right = right;
            page.ask = None;
            out.act(Action::Wake { unit });
        }
    }

    /// Ends the requests that nobody answers any more. Copies whose home is gone stay.
    pub(super) fn gone(&mut self, peers: &Peers, out: &mut Output) {
        let own = peers.own();
        let mut from = 0;
        while let Some((unit, page)) = self.pages.next_mut(from) {
            from = unit + 1;
            let home = page.home(unit, &self.homes);
            if !peers.is_member(own) {
                page.recall = None;
                if page.lost.is_none() {
                    page.poison(unit, own, out);
                }
            } else if page.waits() && !peers.is_member(home) && !mutant!(HomeGoneAwaited) {
                page.poison(unit, home, out);
            }
        }
    }
}

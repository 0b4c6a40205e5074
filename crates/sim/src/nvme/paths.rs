//! Hosts with two paths: controllers side by side, of which one has the I/O.
//!
//! A path is a [`Host`](super::host::Host) of its own, with the name of its neighbour, that reaches the target at one address. As a session of the shipped
//! host does, it takes the other path when its own is lost or not accessible; as long as a lost controller may act, nothing but reads goes
//! to the other path, and what was not done is sent again there after that. The target holds commands up until I/Os of a
//! controller that is over have ended: so what the host writes by the other path comes after what it wrote by the first.

use rdmux_nvmf::host::queue::Command;
use rdmux_wire::nvme::Status;

use super::host::Phase;
use super::run::{Event, Run};

/// State of a path that was lost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loss {
    /// Its controller may act until then.
    until: u64,
    /// Tick at which that was over, as long as nothing that was sent after it is done.
    settled: Option<u64>,
}

impl Run<'_> {
    /// Returns the number of a path's host.
    pub(super) fn host_of(&self, nr: usize) -> usize {
        if self.with_paths { nr / 2 } else { nr }
    }

    /// Returns the path that counts the operations of a path's host.
    pub(super) fn first_path(&self, nr: usize) -> usize {
        if self.with_paths { nr & !1 } else { nr }
    }

    fn other(&self, nr: usize) -> Option<usize> {
        self.with_paths.then_some(nr ^ 1)
    }

    /// Returns true if I/O goes to a path. One that is ready gets it from one that is not.
    pub(super) fn has_turn(&mut self, nr: usize) -> bool {
        let first = self.first_path(nr);
        let current = self.current[first];
        if current != nr && self.hosts[current].phase != Phase::Ready && self.hosts[nr].phase == Phase::Ready
        {
            self.current[first] = nr;
            self.counts.failovers += 1;
        }
        self.current[first] == nr
    }

    /// Returns true if no controller of the other path may act.
    pub(super) fn is_settled(&self, nr: usize) -> bool {
        self.other(nr)
            .is_none_or(|other| self.losses[other].until <= self.now)
    }

    /// The controller of a path is lost, and may act until a time.
    pub(super) fn path_lost(&mut self, nr: usize, until: u64) {
        let Some(other) = self.other(nr) else {
            return;
        };
        self.losses[nr] = Loss { until, settled: None };
        self.schedule(until, Event::Settled(nr));
        self.issue_later(other);
    }

    /// I/Os of a lost controller do not act after those that its host begins now.
    pub(super) fn settle(&mut self, nr: usize) {
        let Some(other) = self.other(nr) else {
            return;
        };
        if self.losses[nr].until > self.now || self.hosts[nr].phase == Phase::Ready {
            return;
        }
        let now = self.ticks.next();
        self.losses[nr].settled = Some(now);
        for write in self.hosts[nr].open_writes() {
            self.checker.close_own(write, now);
        }
        self.issue_later(other);
    }

    /// A command is done that a path has sent at a tick: if that was after the loss of the other one, nothing of that acts any more.
    pub(super) fn goes_on(&mut self, nr: usize, sent: u64) {
        let Some(other) = self.other(nr) else {
            return;
        };
        if self.losses[other].settled.is_some_and(|settled| settled < sent) {
            self.losses[other].settled = None;
            self.close_unknown(other);
        }
    }

    /// Returns true if a refusal has a command try the other path.
    pub(super) fn changes_path(&self, nr: usize, status: Status) -> bool {
        let is_of_access = [Status::ANA_INACCESSIBLE, Status::ANA_TRANSITION];
        let Some(other) = self.other(nr) else {
            return false;
        };
        let other = &self.hosts[other];
        is_of_access.iter().any(|of_ana| status.is(*of_ana))
            && other.phase == Phase::Ready
            && other.has_room()
            && self.is_settled(nr)
    }

    /// A command goes to the other path, and with it the I/O of its host.
    pub(super) fn move_to_other(&mut self, nr: usize, command: Command) {
        let Some(other) = self.other(nr) else {
            return;
        };
        let first = self.first_path(nr);
        if self.current[first] != other {
            self.current[first] = other;
            self.counts.failovers += 1;
        }
        self.hand_over(nr, other, command);
        self.issue_later(other);
    }

    fn hand_over(&mut self, from: usize, to: usize, command: Command) {
        let number = command.token >> 1;
        if let Some(operation) = self.hosts[from].operations.remove(&number) {
            self.hosts[to].operations.insert(number, operation);
            self.submit_again(to, command);
        }
    }

    /// Takes what the other path has left, as far as there is room.
    pub(super) fn take_repeats(&mut self, nr: usize) {
        let Some(other) = self.other(nr) else {
            return;
        };
        if self.hosts[other].phase == Phase::Ready {
            return;
        }
        let is_settled = self.is_settled(nr);
        for command in std::mem::take(&mut self.hosts[other].repeats) {
            let may_go = is_settled || self.only_reads(other, &command);
            if may_go && self.hosts[nr].phase == Phase::Ready && self.hosts[nr].has_room() {
                self.counts.repeats += 1;
                self.hand_over(other, nr, command);
            } else {
                self.hosts[other].repeats.push(command);
            }
        }
    }
}

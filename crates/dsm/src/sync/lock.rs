//! A lock at its home.

use std::collections::VecDeque;

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::sync::{Body, Mode};

use super::home::{Answers, Party};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Lock {
    holders: Vec<(Party, Mode)>,
    /// Those that want the lock, in the order of their arrival.
    queue: VecDeque<(Party, Mode)>,
    /// The node that left while it had the lock for itself, until another one has it for itself.
    recovered: Option<NodeId>,
}

impl Lock {
    pub(super) fn is_held_by(&self, party: Party) -> bool {
        self.holders.iter().any(|it| it.0 == party)
    }

    /// Returns whether the lock is as one that nobody has used.
    pub(super) fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.queue.is_empty() && self.recovered.is_none()
    }

    pub(super) fn ask(&mut self, party: Party, mode: Mode) {
        self.queue.push_back((party, mode));
    }

    /// Takes the lock back, and returns whether the party had it in this mode.
    pub(super) fn release(&mut self, party: Party, mode: Mode) -> bool {
        let place = self.holders.iter().position(|it| *it == (party, mode));
        place.map(|it| self.holders.swap_remove(it)).is_some()
    }

    /// Gives the lock to all that can have it now.
    pub(super) fn give(&mut self, object: u64, answers: &mut Answers<'_>) {
        while let Some((party, mode)) = self.queue.front().copied() {
            let wants_alone = mode == Mode::Exclusive && !mutant!(WriterAmongReaders);
            let is_alone =
                self.holders.iter().any(|it| it.1 == Mode::Exclusive) && !mutant!(ReaderBesideWriter);
            if is_alone || (wants_alone && !self.holders.is_empty()) {
                return;
            }
            self.queue.pop_front();
            self.holders.push((party, mode));
            let recovered = self.recovered;
            if mode == Mode::Exclusive || mutant!(ReaderTakesMark) {
                self.recovered = None;
            }
            answers.end(party, object, Body::Granted { recovered });
        }
    }

    /// Forgets nodes that have left.
    pub(super) fn gone(&mut self, gone: &[NodeId]) {
        self.queue
            .retain(|it| !gone.contains(&it.0.0) || mutant!(GoneLocks));
        for (party, mode) in &self.holders {
            if gone.contains(&party.0) && *mode == Mode::Exclusive && !mutant!(RecoveryUnmarked) {
                self.recovered = Some(party.0);
            }
        }
        self.holders
            .retain(|it| !gone.contains(&it.0.0) || mutant!(GoneKeepsLock));
    }
}

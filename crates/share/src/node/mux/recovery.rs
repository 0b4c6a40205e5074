//! A failure of the device's queue pair, after which another one goes on where it ended.
//!
//! Both ends stop, and take whatever comes back ([`Mux::is_drained`]). Then each learns what the other one has executed, and decides about each of its
//! pieces ([`fate`]): it took effect, or the next queue pair carries it out, in the same order and under the same number. An error concerns the
//! connection alone whose request was refused. The queue pair may fail again meanwhile: what was decided stays.

use std::collections::{HashMap, HashSet};

use rdmux_rnic::{Answered, Done, Operation, Psn, Remains, SgeList, Status};
use rdmux_wire::node::CompletionStatus;
use rdmux_wire::node::mux::Kind;

use super::super::cut::list_of_part;
use super::flight::{Piece, Progress, Request};
use super::{ConnectionId, Event, Failure, Mux, Post, Violation, Wait};

/// Failures of the queue pair without any progress after which the first request in flight is taken for their cause.
const BARREN_MAX: u32 = 3;

/// Knowledge of a queue pair that has failed.
#[derive(Debug)]
pub(super) enum Evidence {
    /// The packet sequence numbers of requests and what the peer has executed of them.
    Exact {
        sent: HashMap<u64, (Psn, u32)>,
        mtu: u32,
        /// Set if this end has refused a request of the peer.
        has_refused: bool,
        done: Done,
    },
    /// How many messages the peer has handled: it has executed all that was posted before the last one of them.
    Ledger(u32),
}

/// The fate of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It took effect.
    Done,
    /// It took effect; the value that it found is still to be written.
    Original(u64),
    /// It is carried out anew, from this byte on.
    Again(u32),
    /// It fails: it was refused, or nobody knows whether it took effect.
    Failed(Status),
}

impl Evidence {
    pub(super) fn new(own: Option<Remains>, theirs: Option<Done>, messages: u32) -> Evidence {
        let (Some(own), Some(done)) = (own, theirs) else {
            return Evidence::Ledger(messages);
        };
        let sent = own.sent.iter();
        Evidence::Exact {
            sent: sent.filter_map(|one| Some((one.wr_id, one.psns?))).collect(),
            mtu: own.mtu,
            has_refused: own.done.refused.is_some(),
            done,
        }
    }

    /// Returns the status of a request that the peer has refused.
    fn refused(&self, number: u64) -> Option<Status> {
        let Evidence::Exact { sent, done, .. } = self else {
            return None;
        };
        let (first, count) = sent.get(&number)?;
        let (psn, status) = done.refused?;
        let at = u32::try_from(psn.since(*first)).ok()?;
        (at < *count).then_some(status)
    }
}

/// Decides about a piece. `replays_writes`: its application allows that a WRITE takes effect twice.
pub(super) fn fate(number: u64, piece: &Piece, evidence: &Evidence, replays_writes: bool) -> Fate {
    let operation = match (&piece.request, piece.progress) {
        (_, Progress::Over(Status::Success) | Progress::Back(Status::Success)) => return Fate::Done,
        (_, Progress::Over(status)) => return Fate::Failed(status),
        (_, Progress::Again) => return Fate::Again(0),
        // The credits of slots begin anew.
        (Request::Message(_, header, _), _) if header.kind == Kind::Slots => return Fate::Done,
        (Request::Nothing, _) => return Fate::Done,
        (Request::Direct(operation, _), _) => Some(operation),
        (Request::Message(..), _) => None,
    };
    // Executing it once more does no harm, and brings the bytes.
    if let Some(Operation::Read { .. }) = operation {
        return Fate::Again(0);
    }
    let lost = Fate::Failed(Status::RetryExceeded);
    match evidence {
        Evidence::Exact { sent, mtu, done, .. } => {
            let Some((first, count)) = sent.get(&number) else {
                return Fate::Again(0);
            };
            let packets = u32::try_from(done.expected.since(*first)).unwrap_or(0);
            if packets < *count {
                return match operation {
                    Some(Operation::Write { .. }) => Fate::Again(packets.saturating_mul(*mtu)),
                    _ => Fate::Again(0),
                };
            }
            let answer = done.answers.iter().find(|(psn, _)| psn == first);
            match (operation, answer.map(|(_, answer)| *answer)) {
                (
                    Some(Operation::FetchAdd { .. } | Operation::CompareSwap { .. }),
                    Some(Answered::Original(original)),
                ) => Fate::Original(original),
                (Some(Operation::FetchAdd { .. } | Operation::CompareSwap { .. }), _) => lost,
                (Some(Operation::Flush { .. }), Some(Answered::Done)) => Fate::Done,
                // The kernel reports an error of a write-back once: a second FLUSH would succeed.
                (Some(Operation::Flush { .. }), Some(Answered::Failed)) => {
                    Fate::Failed(Status::RemoteOperation)
                }
                (Some(Operation::Flush { .. }), _) => lost,
                _ => Fate::Done,
            }
        }
        Evidence::Ledger(messages) => {
            let is_done = messages.wrapping_sub(piece.ordinal) as i32 > 0;
            match operation {
                Some(Operation::Write { .. } | Operation::AtomicWrite { .. }) | None if is_done => Fate::Done,
                None => Fate::Again(0),
                Some(Operation::Write { .. }) if piece.has_message => Fate::Again(0),
                Some(Operation::Write { .. } | Operation::AtomicWrite { .. }) if replays_writes => {
                    Fate::Again(0)
                }
                _ => lost,
            }
        }
    }
}

/// Returns whether a status is that of the request which made the queue pair fail. Others are those of the oldest request then.
fn is_own(status: Status) -> bool {
    matches!(
        status,
        Status::LocalLength
            | Status::LocalProtection
            | Status::LocalQpOperation
            | Status::RemoteAccess
            | Status::RemoteInvalidRequest
            | Status::RemoteOperation
    )
}

impl Request {
    /// Leaves the part of a WRITE from a byte on.
    fn cut_off(&mut self, from: u32) {
        let Request::Direct(Operation::Write { va, .. }, list) = self else {
            return;
        };
        *va = va.wrapping_add(from.into());
        *list = match list.as_inline() {
            Some(bytes) => SgeList::inline(bytes.get(from as usize..).unwrap_or_default()),
            None => {
                let rest = list.bytes().saturating_sub(from.into());
                list_of_part(list.as_slice(), from, rest.try_into().unwrap_or(u32::MAX))
            }
        };
    }
}

/// A connection that fails with a queue pair.
#[derive(Debug)]
struct Broken {
    cause: Status,
    /// Status of its next piece.
    next: Status,
}

impl Mux {
    /// Posts nothing from here on, until [`Mux::resume`].
    pub(in crate::node) fn stop(&mut self) {
        (self.is_stopped, self.is_held) = (true, false);
    }

    /// Posts nothing new from here on, until [`Mux::resume`] or the end of the queue pair. What is in flight goes on.
    pub(in crate::node) fn hold(&mut self) {
        self.is_held |= !self.is_stopped;
        self.is_stopped = true;
    }

    /// Returns whether it posts nothing new although the queue pair has not ended.
    pub(in crate::node) fn is_held(&self) -> bool {
        self.is_held
    }

    /// Returns the number of the oldest piece that the peer has not taken; `None` while nothing is in flight, or nothing can arrive.
    pub(in crate::node) fn oldest(&self) -> Option<u64> {
        let waits = !self.is_stopped && !self.is_empty();
        waits.then(|| self.flight.completed())
    }

    /// Returns whether nothing is in flight.
    pub(in crate::node) fn is_empty(&self) -> bool {
        self.flight.completed() == self.flight.end()
    }

    /// Returns a number that changes with each request of this end and each message of the peer.
    pub(in crate::node) fn activity(&self) -> u64 {
        self.flight.end().wrapping_add(self.messages_handled.into())
    }

    /// Returns whether everything posted has come back.
    pub(in crate::node) fn is_drained(&self) -> bool {
        let mut pieces = self.flight.iter();
        pieces.all(|(_, piece)| piece.progress != Progress::Posted)
    }

    /// Returns how many messages of the peer have come over this queue pair.
    pub(in crate::node) fn messages_handled(&self) -> u32 {
        self.messages_handled
    }

    /// Returns whether it is stopped and has something to send.
    pub(in crate::node) fn wants_to_resume(&self) -> bool {
        let again = |(_, piece): (u64, &Piece)| piece.progress == Progress::Again;
        let has_messages = !self.failures.is_empty() || !self.tellers.is_empty();
        let is_stopped = self.is_stopped && !self.has_failed;
        is_stopped && (self.is_wanted || has_messages || self.flight.iter().any(again))
    }

    /// Returns whether it has no connections, and nothing for the peer or for connections that are about to come.
    pub(in crate::node) fn is_unused(&self) -> bool {
        let has_pieces = self.flight.completed() < self.flight.end();
        let is_empty = self.by_names.is_empty() && self.early.is_empty() && self.failures.is_empty();
        self.is_stopped && !has_pieces && is_empty
    }

    /// Takes note that a request could not be posted, whose memory failed: it ends with this status, and its connection has failed. The queue pair
    /// is to be ended.
    pub(in crate::node) fn refused(&mut self, number: u64, status: Status) {
        self.is_stopped = true;
        let Some(piece) = self.flight.get_mut(number) else {
            return;
        };
        piece.progress = match (piece.connection, piece.tag) {
            (None, _) => Progress::Again,
            (_, None) => Progress::Over(Status::Success),
            (_, Some(_)) => Progress::Over(status),
        };
        if let Some(id) = piece.connection {
            self.events.push_back(Event::Culprit(id));
            self.fail(id);
        }
    }

    /// Takes note that the queue pair has not taken a request. It is to be ended.
    pub(in crate::node) fn not_posted(&mut self, number: u64) {
        self.is_stopped = true;
        if let Some(piece) = self.flight.get_mut(number) {
            piece.progress = Progress::Again;
        }
    }

    /// Takes note of what both ends have executed on a queue pair that has ended. What has not come back does not any more. `own` and
    /// `theirs`: what is left of the own queue pair, and what the peer's has executed; `messages`: how many messages of this node the peer's node has
    /// handled.
    ///
    /// # Errors
    /// More messages remain than the peer has slots: it has told of slots that were not empty.
    pub(in crate::node) fn carry_over(
        &mut self,
        own: Option<Remains>,
        theirs: Option<Done>,
        messages: u32,
    ) -> Result<(), Violation> {
        self.stop();
        let evidence = Evidence::new(own, theirs, messages);
        let culprit = self.culprit(&evidence);
        let told = self.told(&evidence);
        let (mut broken, mut order) = (HashMap::new(), Vec::new());
        let (mut again, mut answers) = (0, Vec::new());
        for (number, piece) in self.flight.iter_mut() {
            let connection = piece.connection.and_then(|id| {
                let entry = self.entries.get(id.index as usize)?;
                Some((id, entry.connection.as_ref()?))
            });
            let replays_writes = connection.is_some_and(|(_, it)| it.bound.replays_writes);
            let fate = fate(number, piece, &evidence, replays_writes);
            let Some((id, connection)) = connection else {
                again += usize::from(matches!(fate, Fate::Again(_)));
                piece.progress = match fate {
                    Fate::Again(_) => Progress::Again,
                    _ => Progress::Over(Status::Success),
                };
                continue;
            };
            let is_lost = connection.is_abandoned || connection.peer_ended || told.contains(&id);
            let breaks = match (culprit, fate) {
                (Some((at, status)), _) if at == number => Some(status),
                (_, Fate::Failed(status)) => Some(status),
                (_, Fate::Again(_)) if is_lost => Some(Status::RetryExceeded),
                _ => None,
            };
            if culprit.is_some_and(|(at, status)| at == number && is_own(status)) {
                self.events.push_back(Event::Culprit(id));
            }
            if let Some(status) = breaks {
                broken.entry(id).or_insert_with(|| {
                    order.push(id);
                    Broken {
                        cause: status,
                        next: status,
                    }
                });
            }
            piece.progress = match (broken.get_mut(&id), fate) {
                (Some(broken), _) if piece.tag.is_some() => {
                    Progress::Over(std::mem::replace(&mut broken.next, Status::Flushed))
                }
                (Some(_), _) | (None, Fate::Done | Fate::Failed(_)) => Progress::Over(Status::Success),
                (None, Fate::Original(original)) => {
                    if let Request::Direct(_, list) = &piece.request {
                        answers.push((id, list.clone(), original));
                    }
                    Progress::Over(Status::Success)
                }
                (None, Fate::Again(from)) => {
                    if from > 0 {
                        piece.request.cut_off(from);
                    }
                    again += usize::from(matches!(piece.request, Request::Message(..)));
                    Progress::Again
                }
            };
        }
        for (id, list, original) in answers {
            self.events.push_back(Event::Answer(id, list, original));
        }
        let is_exact = matches!(evidence, Evidence::Exact { .. });
        for id in order {
            let cause = broken[&id].cause;
            let failure = match cause {
                Status::RetryExceeded if !is_exact => Failure::Shared,
                _ => Failure::Own,
            };
            let told = match cause {
                Status::RemoteAccess => CompletionStatus::RemoteAccess,
                Status::RemoteInvalidRequest => CompletionStatus::RemoteInvalidRequest,
                _ => CompletionStatus::RetryExceeded,
            };
            self.fail_with(id, failure, told);
        }
        self.slots.restart();
        self.messages_sent = 0;
        self.messages_handled = 0;
        self.settle();
        self.wake_for_slots();
        match self.slots.has_for_again(again) {
            true => Ok(()),
            false => Err(Violation("news of slots that are not empty")),
        }
    }

    /// Finds the request that made the queue pair fail, and its status.
    fn culprit(&mut self, evidence: &Evidence) -> Option<(u64, Status)> {
        let completed = self.flight.completed();
        self.barren = match self.flight.end() > completed && self.barren.1 == completed {
            true => (self.barren.0 + 1, completed),
            false => (1, completed),
        };
        let mut pieces = self.flight.iter();
        let found = pieces.find_map(|(number, piece)| match piece.progress {
            Progress::Over(_) | Progress::Again => None,
            Progress::Back(status) if is_own(status) => Some((number, status)),
            Progress::Back(_) | Progress::Posted => Some((number, evidence.refused(number)?)),
        });
        let has_refused = matches!(
            evidence,
            Evidence::Exact {
                has_refused: true,
                ..
            }
        );
        if found.is_some() || has_refused {
            self.barren.0 = 0;
        }
        if found.is_some() || self.barren.0 < BARREN_MAX {
            return found;
        }
        let first = self
            .flight
            .iter()
            .find(|(_, piece)| piece.connection.is_some() && !matches!(piece.progress, Progress::Over(_)));
        Some((first?.0, Status::RetryExceeded))
    }

    /// Returns the connections of whose end the peer knows: their requests must not reach its memory any more.
    fn told(&self, evidence: &Evidence) -> HashSet<ConnectionId> {
        let told = self.flight.iter().filter_map(|(number, piece)| {
            let Request::Message(_, header, _) = &piece.request else {
                return None;
            };
            let is_told = header.kind == Kind::Fail && fate(number, piece, evidence, false) == Fate::Done;
            self.by_names
                .get(&(header.source, header.destination))
                .filter(|_| is_told)
        });
        told.copied().collect()
    }

    /// Goes on with a queue pair that is ready. Returns what is to be posted before anything else.
    pub(in crate::node) fn resume(&mut self) -> Vec<Post> {
        if !self.is_stopped || self.has_failed {
            return Vec::new();
        }
        (self.is_stopped, self.is_held) = (false, false);
        self.is_wanted = false;
        let again = |(number, piece): (u64, &Piece)| (piece.progress == Progress::Again).then_some(number);
        let again: Vec<u64> = self.flight.iter().filter_map(again).collect();
        let posts = again
            .into_iter()
            .filter_map(|number| self.launch(number))
            .collect();
        let ids: Vec<_> = self.by_names.values().copied().collect();
        for id in ids {
            self.wake(id, Wait::Shared);
        }
        self.wake_for_slots();
        posts
    }
}

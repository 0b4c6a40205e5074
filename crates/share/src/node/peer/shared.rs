//! The shared queue pairs of a node: RC, between two nodes, in one protection domain of each. [`Pool`] decides which there are, and [`Line`] knows how
//! each of them begins and ends; the QPNs are exchanged over the control channel.

mod qp;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use rdmux_verbs::{
    Answered, CompletionQueue, CreateError, Device, Done, Extensions, PathMtu, ProtectionDomain, Qpn, Remains,
};
use rdmux_wire::node::CompletionStatus;
use rdmux_wire::node::peer::{ANSWERS_MAX, Executed, Message, Outcome, Reason, Refusal, Response, SharedEnd};

use super::line::{Do, Input, Line};
use super::machine::{Asked, Event, Machine};
use super::pool::{Pool, Step};
use super::{Ended, PeerEvent, PeerId, SharedBy, SharedId};
use crate::control::convert::{outcome_of, outcome_to_wire};

pub(crate) use qp::{RECEIVE, SENDS, SLOTS, SharedQp};

/// Completions that the queue of a node without shared queue pairs has room for.
const ROOM_MIN: u32 = 256;
/// Time for the end of a queue pair at both ends, and for the peer to be ready after it has opened one. After that the line is over.
pub(crate) const END_TIME: Duration = Duration::from_secs(2);
/// Time after which completions that have not come are not waited for.
const DRAIN_TIME: Duration = Duration::from_millis(500);

/// The report of a peer on its end.
#[derive(Clone, Debug)]
struct Told {
    messages: u32,
    executed: Option<Executed>,
}

/// A line with its queue pair.
#[derive(Debug)]
struct Shared {
    by: SharedBy,
    /// The peer's number of the line.
    far: Option<u64>,
    line: Line<Asked, Told>,
    qp: Option<SharedQp>,
    /// Remains of the queue pair, until the peer tells the same of its own.
    remains: Option<Remains>,
    /// Set once the user of the line knows of it.
    is_known: bool,
    /// End of the time that is left for what the line waits for.
    until: Option<Instant>,
    /// Set once the user was told that completions are no longer waited for.
    is_overdue: bool,
}

impl Shared {
    fn new(by: &SharedBy) -> Shared {
        Shared {
            by: by.clone(),
            far: None,
            line: Line::new(),
            qp: None,
            remains: None,
            is_known: false,
            until: None,
            is_overdue: false,
        }
    }

    fn qpn(&self) -> Option<Qpn> {
        self.qp.as_ref().map(|qp| qp.qp().qpn())
    }

    /// Returns the line as the peer names it.
    fn there(&self) -> Option<(PeerId, u64)> {
        Some((self.by.peer, self.far?))
    }

    /// Returns when completions are no longer waited for.
    fn overdue_at(&self) -> Option<Instant> {
        let waits = self.line.is_ending() && !self.is_overdue;
        self.until
            .filter(|_| waits)
            .map(|until| until - (END_TIME - DRAIN_TIME))
    }
}

/// The shared queue pairs of a node.
// Queue pairs end before their completion queue.
#[derive(Debug)]
pub(super) struct SharedQps {
    lines: HashMap<SharedId, Shared>,
    by_qpn: HashMap<Qpn, SharedId>,
    /// Lines that wait for something that may not last long.
    timed: BTreeSet<SharedId>,
    pool: Pool,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    room: u32,
    /// Without, the ledgers of both nodes say which messages were executed.
    tells_executed: bool,
}

impl SharedQps {
    /// `tells_executed`: see [`super::Shares::tells_executed`].
    pub(super) fn new(
        device: &Device,
        pd: &ProtectionDomain,
        pool: Pool,
        tells_executed: bool,
    ) -> Result<SharedQps, CreateError> {
        Ok(SharedQps {
            lines: HashMap::new(),
            by_qpn: HashMap::new(),
            timed: BTreeSet::new(),
            pool,
            pd: pd.clone(),
            cq: device.create_cq(ROOM_MIN)?,
            room: ROOM_MIN,
            tells_executed,
        })
    }

    pub(super) fn cq(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Returns the queue pair of a line: one over which messages may come, or that is ending.
    pub(super) fn get(&self, id: SharedId) -> Option<&SharedQp> {
        let shared = self.lines.get(&id).filter(|shared| !shared.line.is_asked());
        shared?.qp.as_ref()
    }

    pub(super) fn by_qpn(&self, qpn: Qpn) -> Option<SharedId> {
        self.by_qpn.get(&qpn).copied()
    }

    pub(super) fn want(&mut self, now: Instant, by: &SharedBy) -> Option<SharedId> {
        self.pool.want(now, by)
    }

    /// Returns the most shared queue pairs at a time.
    pub(super) fn limit(&self) -> usize {
        self.pool.limit()
    }

    pub(super) fn is_coming(&self, by: &SharedBy) -> bool {
        self.pool.is_coming(by)
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.pool.len()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let timed = self.timed.iter().filter_map(|id| {
            let shared = self.lines.get(id)?;
            shared.overdue_at().or(shared.until)
        });
        timed.chain(self.pool.deadline()).min()
    }

    pub(super) fn check_time(&mut self, now: Instant, machine: &mut Machine, out: &mut VecDeque<PeerEvent>) {
        self.pool.check_time(now);
        for id in self.timed.clone() {
            let Some(shared) = self.lines.get_mut(&id) else {
                continue;
            };
            if shared.until.is_some_and(|until| until <= now) {
                self.over(now, machine, id, out);
            } else if shared.overdue_at().is_some_and(|at| at <= now) {
                shared.is_overdue = true;
                out.push_back(PeerEvent::QpOverdue { id });
            }
        }
    }

    /// Does what the pool wants.
    pub(super) fn work(&mut self, now: Instant, machine: &mut Machine, out: &mut VecDeque<PeerEvent>) {
        while let Some(step) = self.pool.next_step() {
            match step {
                Step::Open(id, by) => {
                    self.lines.entry(id).or_insert_with(|| Shared::new(&by));
                    let mtu = self.mtu_to(by.peer);
                    let end = self.make(id, &by).map(|qp| qp.end(mtu));
                    match end.is_some_and(|end| machine.open(now, id, &by, end)) {
                        true => self.on(now, machine, id, Input::Asks, out),
                        false => self.over(now, machine, id, out),
                    }
                }
                Step::Close { id, for_room } => self.on(now, machine, id, Input::Close { for_room }, out),
            }
        }
    }

    fn mtu_to(&self, peer: PeerId) -> PathMtu {
        self.pd
            .device()
            .path_mtu_to(peer.address)
            .unwrap_or(PathMtu::Bytes1024)
    }

    /// Makes the queue pair of a line, in place of one that is there.
    fn make(&mut self, id: SharedId, by: &SharedBy) -> Option<&mut SharedQp> {
        self.destroy(id);
        let needed = (self.by_qpn.len() as u32 + 1) * (SENDS + u32::from(SLOTS));
        if needed > self.room {
            let room = needed.next_power_of_two();
            self.cq.resize(room).ok()?;
            self.room = room;
        }
        let qp = SharedQp::new(&self.pd, &self.cq, by)?;
        if self.tells_executed {
            qp.qp().keep_remains();
        }
        self.by_qpn.insert(qp.qp().qpn(), id);
        Some(self.lines.get_mut(&id)?.qp.insert(qp))
    }

    fn destroy(&mut self, id: SharedId) {
        if let Some(qp) = self.lines.get_mut(&id).and_then(|shared| shared.qp.take()) {
            self.by_qpn.remove(&qp.qp().qpn());
        }
    }

    /// Handles an event of a line.
    fn on(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        id: SharedId,
        input: Input<Asked, Told>,
        out: &mut VecDeque<PeerEvent>,
    ) {
        let Some(shared) = self.lines.get_mut(&id) else {
            return;
        };
        let what = shared.line.on(input);
        match (shared.line.is_timed(), shared.until) {
            (true, None) => {
                (shared.until, shared.is_overdue) = (Some(now + END_TIME), false);
                self.timed.insert(id);
            }
            (false, Some(_)) => {
                shared.until = None;
                self.timed.remove(&id);
            }
            _ => {}
        }
        for what in what {
            self.act(now, machine, id, what, out);
        }
    }

    fn act(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        id: SharedId,
        what: Do<Asked, Told>,
        out: &mut VecDeque<PeerEvent>,
    ) {
        let Some(shared) = self.lines.get_mut(&id) else {
            return;
        };
        match what {
            Do::TellReady => {
                if let Some(there) = shared.there() {
                    machine.tell_ready(now, there);
                }
            }
            Do::Ready => {
                shared.is_known = true;
                self.pool.opened(now, id);
                out.push_back(PeerEvent::QpReady { id });
            }
            Do::AskUser { for_room } => out.push_back(PeerEvent::MayEnd { id, for_room }),
            Do::AskPeer => {
                let asks = shared.qpn().zip(shared.there());
                if !asks.is_some_and(|(qpn, there)| machine.close(now, (id, qpn), there)) {
                    self.over(now, machine, id, out);
                }
            }
            Do::Answer(asked, true) => machine.answer(asked, Message::Done {}),
            Do::Answer(asked, false) => machine.refuse(asked, Reason::Busy),
            Do::Stays => self.pool.stays(now, id),
            Do::Stop => {
                if let Some(qp) = &shared.qp {
                    qp.stop();
                }
                self.pool.ends(id);
                out.push_back(PeerEvent::QpEnding { id });
            }
            Do::Tell(messages) => {
                shared.remains = shared.qp.as_ref().and_then(SharedQp::take_remains);
                let executed = shared.remains.as_ref().map(|remains| executed(&remains.done));
                if let Some(there) = shared.there() {
                    machine.tell_ended(now, there, messages, executed);
                }
                self.destroy(id);
            }
            Do::Away(told) => {
                let ended = Ended {
                    own: shared.remains.take(),
                    theirs: told.executed.as_ref().map(done),
                    messages: told.messages,
                };
                self.pool.away(now, id);
                let ended = Box::new(ended);
                out.push_back(PeerEvent::QpEnded { id, ended });
            }
            Do::Over => self.over(now, machine, id, out),
        }
    }

    /// Takes note that the queue pair of a line has failed.
    pub(super) fn end(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        id: SharedId,
        out: &mut VecDeque<PeerEvent>,
    ) {
        self.on(now, machine, id, Input::Failed, out);
    }

    /// Takes note that nothing comes from the queue pair of a line any more, and that so many messages have.
    pub(super) fn drained(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        (id, messages): (SharedId, u32),
        out: &mut VecDeque<PeerEvent>,
    ) {
        self.on(now, machine, id, Input::Drained(messages), out);
    }

    /// Takes the answer to [`PeerEvent::MayEnd`].
    pub(super) fn may_end(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        (id, may): (SharedId, bool),
        out: &mut VecDeque<PeerEvent>,
    ) {
        self.on(now, machine, id, Input::UserSays(may), out);
    }

    /// Forgets a line that is away. The peer may still know it: then it is a new one here once the peer opens it.
    pub(super) fn forget(&mut self, now: Instant, id: SharedId) {
        if self.lines.get(&id).is_some_and(|shared| shared.line.is_away()) {
            self.lines.remove(&id);
            self.pool.ended(now, id);
        }
    }

    /// Ends a line for good, at both ends.
    pub(super) fn over(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        id: SharedId,
        out: &mut VecDeque<PeerEvent>,
    ) {
        if let Some(there) = self.lines.get(&id).and_then(Shared::there) {
            machine.tell_over(now, there);
        }
        self.gone(now, id, out);
    }

    fn gone(&mut self, now: Instant, id: SharedId, out: &mut VecDeque<PeerEvent>) {
        self.destroy(id);
        self.timed.remove(&id);
        if let Some(shared) = self.lines.remove(&id) {
            if shared.is_known {
                out.push_back(PeerEvent::QpGone { id });
            }
            // Connections may wait for its next queue pair, of which the line's user does not know.
            out.push_back(PeerEvent::QpRefused { by: shared.by });
        }
        self.pool.ended(now, id);
    }

    /// Ends the lines to a peer that is gone.
    pub(super) fn peer_gone(&mut self, now: Instant, peer: PeerId, out: &mut VecDeque<PeerEvent>) {
        let of_peer = |(id, shared): (&SharedId, &Shared)| (shared.by.peer == peer).then_some(*id);
        let ids: Vec<SharedId> = self.lines.iter().filter_map(of_peer).collect();
        for by in self.pool.forget(peer) {
            out.push_back(PeerEvent::QpRefused { by });
        }
        for id in ids {
            self.gone(now, id, out);
        }
    }

    /// Returns a line with a peer.
    fn with(&self, peer: PeerId, id: SharedId) -> Option<SharedId> {
        (self.lines.get(&id)?.by.peer == peer).then_some(id)
    }

    /// Handles what a peer has said about shared queue pairs. `extensions`: those of a peer's device.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        extensions: impl Fn(PeerId) -> Option<Extensions>,
        event: Event,
        out: &mut VecDeque<PeerEvent>,
    ) {
        match event {
            Event::OpenAsked { asked, by, line, end } => {
                self.open_asked(now, machine, extensions, (asked, by, line, end), out)
            }
            Event::Opened {
                id,
                qpn,
                peer,
                opened,
            } => self.opened(now, machine, extensions, (id, qpn, peer), opened, out),
            Event::ReadyTold { peer, id } => {
                if let Some(id) = self.with(peer, id) {
                    self.on(now, machine, id, Input::PeerReady, out);
                }
            }
            Event::CloseAsked {
                asked,
                peer,
                id,
                failed,
            } => match self.with(peer, id) {
                Some(id) if !failed => self.on(now, machine, id, Input::CloseAsked(asked), out),
                found => {
                    // The peer is told too: it may have a later line in place of the one that it means.
                    if let Some(id) = found {
                        self.over(now, machine, id, out);
                    }
                    machine.answer(asked, Message::Done {});
                }
            },
            Event::Closed { id, qpn, is_closed } => {
                // An answer may come behind news of the peer's end.
                if self
                    .lines
                    .get(&id)
                    .is_some_and(|shared| shared.qpn() == Some(qpn))
                {
                    self.on(now, machine, id, Input::PeerSays(is_closed), out);
                }
            }
            Event::EndTold {
                peer,
                id,
                messages,
                executed,
            } => {
                if let Some(id) = self.with(peer, id) {
                    let told = Told { messages, executed };
                    self.on(now, machine, id, Input::Told(told), out);
                }
            }
            Event::Peer(_) | Event::KeyAsked { .. } | Event::KeyReleased { .. } => {}
        }
    }

    fn open_asked(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        extensions: impl Fn(PeerId) -> Option<Extensions>,
        (asked, by, far, end): (Asked, SharedBy, u64, SharedEnd),
        out: &mut VecDeque<PeerEvent>,
    ) {
        if by.peer.address == self.pd.device().address() {
            return machine.refuse(asked, Reason::Own);
        }
        if self.pool.asked_for(&by).is_some() && machine.precedes(by.peer) {
            return machine.refuse(asked, Reason::Collides);
        }
        let Some(id) = self.pool.accept(now, &by) else {
            return machine.refuse(asked, Reason::Limit);
        };
        self.lines.entry(id).or_insert_with(|| Shared::new(&by)).far = Some(far);
        let mtu = self.mtu_to(by.peer);
        let made = self.make(id, &by).and_then(|qp| {
            qp.bring_up(mtu, end, extensions(by.peer)).ok()?;
            Some(qp.end(mtu))
        });
        match made {
            Some(end) => {
                machine.answer(asked, Message::QpOpened { line: id.0, end });
                self.on(now, machine, id, Input::Accepts, out);
            }
            None => {
                machine.refuse(asked, Reason::Device);
                self.gone(now, id, out);
            }
        }
    }

    fn opened(
        &mut self,
        now: Instant,
        machine: &mut Machine,
        extensions: impl Fn(PeerId) -> Option<Extensions>,
        (id, qpn, peer): (SharedId, Qpn, PeerId),
        opened: Result<(u64, SharedEnd), Reason>,
        out: &mut VecDeque<PeerEvent>,
    ) {
        let mtu = self.mtu_to(peer);
        let waits = |shared: &&mut Shared| shared.line.is_asked() && shared.qpn() == Some(qpn);
        let Some(shared) = self.lines.get_mut(&id).filter(waits) else {
            // Nobody waits for it here any more.
            if let Ok((line, _)) = opened {
                machine.tell_over(now, (peer, line));
            }
            return;
        };
        match opened {
            Ok((far, end)) => {
                shared.far = Some(far);
                let up = shared
                    .qp
                    .as_mut()
                    .map(|qp| qp.bring_up(mtu, end, extensions(peer)));
                match up {
                    Some(Ok(())) => self.on(now, machine, id, Input::Opened, out),
                    _ => self.over(now, machine, id, out),
                }
            }
            Err(Reason::Limit | Reason::Collides) => {
                self.destroy(id);
                self.on(now, machine, id, Input::Later, out);
                self.pool.later(now, id);
            }
            Err(_) => self.gone(now, id, out),
        }
    }
}

/// Returns what was executed as the control channel has it.
fn executed(done: &Done) -> Executed {
    let newest = done.answers.len().saturating_sub(ANSWERS_MAX);
    let answers = done.answers[newest..].iter().map(|(psn, answered)| {
        let (outcome, original) = match answered {
            Answered::Original(original) => (Outcome::Original, *original),
            Answered::Done => (Outcome::Done, 0),
            Answered::Failed => (Outcome::Failed, 0),
        };
        Response {
            psn: *psn,
            outcome,
            original,
        }
    });
    Executed {
        expected: done.expected,
        refused: done.refused.map(|(psn, status)| Refusal {
            psn,
            status: outcome_to_wire(status).unwrap_or(CompletionStatus::RemoteOperation),
        }),
        answers: answers.collect(),
    }
}

/// Returns what a peer says that was executed.
fn done(executed: &Executed) -> Done {
    let answers = executed.answers.iter().map(|response| {
        let answered = match response.outcome {
            Outcome::Original => Answered::Original(response.original),
            Outcome::Done => Answered::Done,
            Outcome::Failed => Answered::Failed,
        };
        (response.psn, answered)
    });
    let refused = |refusal: Refusal| (refusal.psn, outcome_of(refusal.status));
    Done {
        expected: executed.expected,
        refused: executed.refused.map(refused),
        answers: answers.collect(),
    }
}

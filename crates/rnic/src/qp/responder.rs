//! The responding half of an RC QP: sequence, duplicates, responses in order. IBTA Vol 1, 9.7.
//!
//! [`super::execute`] carries out requests. The responder decides whether a packet is the next one, a repetition, or one after a
//! gap, and which response follows. Responses leave in the order of the requests: a READ's data and the end of a FLUSH hold back
//! the acknowledgements of later requests, so that an acknowledgement always means that everything before it is done.
//!
//! Accesses to memory on a medium are left to the driver ([`crate::access`]). A WRITE to such memory goes on while earlier ones of
//! the same medium are carried out; every other request, and all after it, is kept until they have ended. A peer that asks again
//! meanwhile is told to come back later, so that its retries do not run out.

mod transmit;

use std::collections::VecDeque;

use rdmux_wire::Psn;
use rdmux_wire::roce::{NakCode, Operation as Op, Packet, Reth, Syndrome};

use crate::access::{AccessId, Accessed};
use crate::cq::Status;
use crate::lane::{DirectLane, PSNS_LENT, Receiving, Turn};
use crate::local::Taken;
use crate::memory::{Access, Fault, Medium};
use crate::qp::execute::{
    Effect, Execution, FlushSpec, Refusal, Request, Scope, Source, WritePacket, region,
};
use crate::qp::message::{Payload, assemble, fits, is_within};
use crate::qp::remains::{Answered, Done, Kept};
use crate::qp::reorder::Reorder;
use crate::qp::{Env, Head, QpAttributes, QpState};
use crate::queue::ReceiveQueue;
use crate::trace::{Note, Refused};
use crate::work::{PostError, RecvRequest};

/// RNR timer code of the response to a repeated request for which a medium still works: 10.24 ms. An rdmux peer does not count these
/// RNR NAKs as retries, so one for a missing receive has another code.
pub(crate) const MEDIUM_TIMER: u8 = 20;
/// RNR timer code of the response to an atomic operation while a FLUSH before it runs: 0.64 ms. The operation must not take effect
/// before the data that the FLUSH covers is safe. A19.
pub(crate) const ATOMIC_WAITS_TIMER: u8 = 12;
/// Most requests that one acknowledgement covers while it waits to be combined with later ones.
const ACK_WAITS_FOR: u32 = 16;

/// Number of times that a responder that is about to end sends its last acknowledgement again: on a network that loses 1 % both
/// ways, the peer misses the acknowledgement in eight of a million such endings.
const LAST_REPEATS: u32 = 2;

/// Most pending responses; requests beyond are dropped, and come again. Only a peer that ignores its initiator depth reaches this
/// limit.
pub(crate) const ANSWERS_MAX: usize = 1024;
/// Most WRITEs that wait for a medium; later requests are kept.
const PLACING_MAX: u32 = 256;

/// A pending response, in the order of the requests.
#[derive(Debug)]
enum Answer {
    Ack {
        psn: Psn,
        msn: u32,
        syndrome: Syndrome,
    },
    Read(ReadAnswer),
    /// No response: those that follow wait until this access has ended. The fields are those of an acknowledgement of the packet
    /// with which it began.
    Access {
        psn: Psn,
        msn: u32,
        id: AccessId,
    },
    /// A READ response without data, for a FLUSH or for an ATOMIC WRITE (which is done from the start). A19.
    Flush {
        psn: Psn,
        msn: u32,
        state: FlushState,
    },
    Atomic {
        psn: Psn,
        msn: u32,
        original: u64,
    },
}

impl Answer {
    fn psn(&self) -> Psn {
        match self {
            Answer::Ack { psn, .. }
            | Answer::Read(ReadAnswer { psn, .. })
            | Answer::Access { psn, .. }
            | Answer::Flush { psn, .. }
            | Answer::Atomic { psn, .. } => *psn,
        }
    }

    /// Returns the MSN before the request of a response that is not an acknowledgement.
    fn msn_before(&self) -> u32 {
        match self {
            Answer::Ack { msn, .. } | Answer::Access { msn, .. } => *msn,
            Answer::Read(ReadAnswer { msn, .. }) | Answer::Flush { msn, .. } | Answer::Atomic { msn, .. } => {
                msn.wrapping_sub(1) & 0xff_ffff
            }
        }
    }
}

/// The part of a READ's response that has not been sent.
#[derive(Debug)]
struct ReadAnswer {
    psn: Psn,
    msn: u32,
    source: Source,
    /// Set once a packet has been sent.
    begun: bool,
    fetch: Fetch,
    /// Set for a response that has been sent before. The peer may have received it, and the memory may have ended since.
    is_replay: bool,
}

/// Bytes of a READ on a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fetch {
    /// They need not be fetched, as far as is known.
    None,
    /// They are fetched from this address on.
    Runs(AccessId, u64),
    /// These bytes, from this address on.
    Done(u64, Vec<u8>),
}

impl Fetch {
    /// Returns `length` bytes at an address, if they were fetched.
    fn bytes(&self, va: u64, length: usize) -> Option<&[u8]> {
        let Fetch::Done(begin, bytes) = self else {
            return None;
        };
        let at = usize::try_from(va.checked_sub(*begin)?).ok()?;
        bytes.get(at..at.checked_add(length)?)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlushState {
    Runs,
    Done,
    Failed,
}

/// A request whose response is replayed when it comes again, without execution. 9.7.5.1.5 (responder resources).
#[derive(Clone, Copy, Debug)]
enum Resource {
    Read {
        psn: Psn,
        packets: u32,
        msn: u32,
        source: Source,
    },
    /// FLUSH and ATOMIC WRITE.
    Flush {
        psn: Psn,
        msn: u32,
    },
    Atomic {
        psn: Psn,
        msn: u32,
        original: u64,
    },
}

impl Resource {
    fn psn(&self) -> Psn {
        match self {
            Resource::Read { psn, .. } | Resource::Flush { psn, .. } | Resource::Atomic { psn, .. } => *psn,
        }
    }

    /// Returns the number of PSNs of the request.
    fn packets(&self) -> u32 {
        match self {
            Resource::Read { packets, .. } => *packets,
            Resource::Flush { .. } | Resource::Atomic { .. } => 1,
        }
    }

    /// Returns the PSN after those of the request.
    fn end(&self) -> Psn {
        self.psn().plus(self.packets())
    }

    fn msn(&self) -> u32 {
        match self {
            Resource::Read { msn, .. } | Resource::Flush { msn, .. } | Resource::Atomic { msn, .. } => *msn,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Responder {
    execution: Execution,
    /// PSN of the next new request.
    expected: Psn,
    msn: u32,
    /// Set when the gap at `expected` was reported; no other NAK is sent until it closes. 9.7.5.2.8.
    nak_sent: bool,
    answers: VecDeque<Answer>,
    /// Number of requests that the youngest acknowledgement in `answers` covers.
    ack_covers: u32,
    resources: VecDeque<Resource>,
    max_resources: u8,
    min_rnr_timer: u8,
    established: bool,
    /// Requests after the gap, if the peer agreed to selective retransmission; those that wait for a medium.
    early: Reorder,
    /// Set while the next request is kept because a medium works.
    held: bool,
    /// Set when a request was dropped meanwhile: nothing else reports it as missing.
    dropped: bool,
    /// Number of `Answer::Access`.
    placing: u32,
    /// The medium of the youngest of them.
    medium: Option<Medium>,
    /// The access for which the next request waits, if it has one of its own.
    awaited: Option<AccessId>,
    /// Set when a selective NAK is pending, which reports the missing request and those kept.
    sack_owed: bool,
    /// Set when the last request that was done has requested no acknowledgement: the response to the one behind it is to answer it.
    unasked: bool,
    /// Its state at its end, if the QP is to keep that.
    kept: Option<Box<Kept>>,
}

impl Responder {
    pub(crate) fn new(execution: Execution) -> Responder {
        Responder {
            execution,
            expected: Psn::new(0),
            msn: 0,
            nak_sent: false,
            answers: VecDeque::new(),
            ack_covers: 0,
            resources: VecDeque::new(),
            max_resources: 1,
            min_rnr_timer: 0,
            established: false,
            early: Reorder::default(),
            held: false,
            dropped: false,
            placing: 0,
            medium: None,
            awaited: None,
            sack_owed: false,
            unasked: false,
            kept: None,
        }
    }

    /// Makes it keep what it has executed.
    pub(crate) fn keep_remains(&mut self) {
        self.kept.get_or_insert_default();
    }

    /// Takes what it has executed, if it has kept that.
    pub(crate) fn take_done(&mut self) -> Option<Done> {
        self.kept.take()?.done
    }

    /// Notes what it has executed, now that no more is: the QP fails, for this request of the peer if there is one. Comes before anything
    /// that drops responses. A failure after the first changes nothing.
    fn note_end(&mut self, refused: Option<(Psn, Status)>) {
        let Some(mut kept) = self.kept.take() else { return };
        if !kept.has_ended {
            kept.has_ended = true;
            kept.done = self.done(refused);
        }
        self.kept = Some(kept);
    }

    /// Returns what it has executed; `None` while a medium works, which may yet execute more, or fail.
    fn done(&self, refused: Option<(Psn, Status)>) -> Option<Done> {
        let is_open = |answer: &Answer| {
            matches!(
                answer,
                Answer::Access { .. }
                    | Answer::Flush {
                        state: FlushState::Runs,
                        ..
                    }
            )
        };
        if self.awaited.is_some() || self.answers.iter().any(is_open) {
            return None;
        }
        let failed = |at: Psn| {
            let is_it = |answer: &Answer| matches!(answer, Answer::Flush { psn, state: FlushState::Failed, .. } if *psn == at);
            self.answers.iter().any(is_it)
        };
        let answers = self.resources.iter().filter_map(|resource| match *resource {
            Resource::Read { .. } => None,
            Resource::Flush { psn, .. } if failed(psn) => Some((psn, Answered::Failed)),
            Resource::Flush { psn, .. } => Some((psn, Answered::Done)),
            Resource::Atomic { psn, original, .. } => Some((psn, Answered::Original(original))),
        });
        Some(Done {
            expected: self.expected,
            refused,
            answers: answers.collect(),
        })
    }

    /// Lends the lane the turn, so that callers execute the SENDs that come next: nothing waits, neither a response nor a request.
    /// `shared`: the receives of the shared queue that the QP uses.
    pub(crate) fn lend(&mut self, head: &Head, lane: &DirectLane, shared: Option<&ReceiveQueue>) {
        let rests = self.rests()
            && !self.held
            && !self.nak_sent
            && self.placing == 0
            && self.established
            && !self.execution.is_inside_message();
        // A receive that is left over from a message that was given up comes before the shared ones.
        let has_left_over = shared.is_some() && !self.execution.recv.is_empty();
        let takes = matches!(head.state, QpState::Rts | QpState::Sqd) && !has_left_over;
        let Some(path) = head.path.filter(|_| rests && takes && !lane.has_receives()) else {
            return;
        };
        let receiving = Receiving {
            peer: path.dst,
            mtu: head.mtu,
            receives: shared.unwrap_or(&self.execution.recv).clone(),
        };
        let turn = Turn {
            expected: self.expected,
            msn: self.msn,
            left: PSNS_LENT,
        };
        lane.lend_receives(receiving, turn);
    }

    /// Takes the turn back from the lane, as if its requests had been executed here.
    pub(crate) fn recall(&mut self, lane: &DirectLane) {
        let turn = lane.take_back_receives();
        let has_moved = |turn: &Turn| turn.expected != self.expected && !mutant!(RecallForgetsTurn);
        if let Some(turn) = turn.filter(has_moved) {
            self.advance(turn.expected);
            self.msn = turn.msn;
            // None of them was answered by a packet.
            self.unasked = true;
        }
    }

    pub(crate) fn set(&mut self, attr: &QpAttributes) {
        self.expected = attr.rq_psn.unwrap_or(self.expected);
        self.max_resources = attr.max_dest_rd_atomic.unwrap_or(self.max_resources);
        self.min_rnr_timer = attr.min_rnr_timer.unwrap_or(self.min_rnr_timer);
    }

    /// Posts a receive request. In Error it completes at once, as flushed.
    pub(crate) fn post(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        request: RecvRequest,
    ) -> Result<(), PostError> {
        self.execution.post(env, head, request)
    }

    /// Completes every receive as flushed. If the last pending response is the NAK that reports the error to the peer, all
    /// responses stay. Otherwise only those at the front stay that report completed requests: the peer must not take a SEND that
    /// was received for one that was not.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>, head: &Head) {
        self.note_end(None);
        if let Some(id) = self.execution.collecting() {
            self.forget_access(id);
        }
        self.execution.flush(env, head);
        self.early.clear();
        self.sack_owed = false;
        (self.held, self.dropped, self.awaited) = (false, false, None);
        if !matches!(
            self.answers.back(),
            Some(
                Answer::Ack {
                    syndrome: Syndrome::Nak(_),
                    ..
                } | Answer::Flush {
                    state: FlushState::Failed,
                    ..
                }
            )
        ) {
            let done = |answer: &Answer| {
                matches!(
                    answer,
                    Answer::Ack {
                        syndrome: Syndrome::Ack { .. },
                        ..
                    } | Answer::Flush {
                        state: FlushState::Done,
                        ..
                    } | Answer::Atomic { .. }
                )
            };
            let kept = self.answers.iter().take_while(|answer| done(answer)).count();
            self.answers.truncate(kept);
            env.flushes.forget(head.qpn);
            env.accesses.forget(head.qpn);
            self.placing = 0;
        }
    }

    /// Queues the last acknowledgement again, twice: this half is about to end, and cannot repeat it later. If the last request was
    /// one whose response brings data, nothing is repeated: an acknowledgement does not stand for that response.
    pub(crate) fn repeat_last(&mut self) {
        let last = self.expected.minus(1);
        let youngest = self.resources.back();
        let answered = youngest.is_some_and(|resource| resource.end() == self.expected);
        let owes = |answer: &Answer| {
            !matches!(
                answer,
                Answer::Ack {
                    syndrome: Syndrome::ACK,
                    ..
                }
            )
        };
        // If no message has ended, there is no last acknowledgement.
        if !self.established || self.msn == 0 || answered || self.answers.iter().any(owes) {
            return;
        }
        for _ in 0..LAST_REPEATS {
            self.answers.push_back(Answer::Ack {
                psn: last,
                msn: self.msn,
                syndrome: Syndrome::ACK,
            });
        }
    }

    /// Returns whether the peer may READ at all: some resources were promised.
    pub(crate) fn takes_reads(&self) -> bool {
        self.max_resources > 0
    }

    /// Returns the numbers of packets kept and of pending responses.
    pub(crate) fn backlog(&self) -> (usize, usize) {
        (self.early.len(), self.answers.len())
    }

    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    pub(crate) fn posted(&self) -> usize {
        self.execution.recv.len()
    }

    /// Returns whether no answer is pending and no early packet is kept.
    pub(crate) fn rests(&self) -> bool {
        self.answers.is_empty() && self.early.is_empty() && !self.sack_owed
    }

    /// Advances by `psns`, fewer than 2^23, as if requests of so many packets had been done. The responder must be idle.
    pub(crate) fn skip(&mut self, psns: u32) {
        self.advance(self.expected.plus(psns));
    }

    // Requests.

    /// Handles a request packet. `Some`: the request was refused, a NAK is pending, and the caller fails the QP with this status.
    pub(crate) fn handle_request(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
    ) -> Option<Status> {
        if self.answers.len() >= ANSWERS_MAX {
            env.counters.dropped_busy += 1;
            return None;
        }
        let psn = packet.bth.psn;
        let ahead = if mutant!(PsnDoesNotWrap) {
            psn.value() as i32 - self.expected.value() as i32
        } else {
            psn.since(self.expected)
        };
        if self.held && ahead >= 0 {
            self.hold(env, head, packet);
            return None;
        }
        if ahead > 0 && !mutant!(GapAccepted) {
            env.counters.out_of_sequence += 1;
            if !self.nak_sent && !self.sack_owed {
                let expected = self.expected;
                env.note(head.qpn, Note::Missing { expected, psn });
            }
            if head.selective || mutant!(SackUnagreed) {
                self.keep_early(env, head, packet);
            } else if !self.nak_sent {
                self.nak_sent = true;
                self.owe(self.expected, Syndrome::Nak(NakCode::PsnSequence));
            }
            return None;
        }
        if ahead < 0 {
            env.counters.duplicate_request += 1;
            if !mutant!(DuplicateExecuted) || !packet.bth.opcode.operation.is_send() {
                self.handle_duplicate(env, head, packet);
                return None;
            }
        }
        if !self.established {
            self.established = true;
            env.tell_first_request(head);
        }
        if self.must_wait(env, head, packet) {
            self.hold(env, head, packet);
            return None;
        }
        match self.handle_next(env, head, packet, of_packet(packet)) {
            Ok(()) => {
                self.nak_sent = false;
                if head.selective {
                    self.gap_narrowed(env, head)
                } else {
                    None
                }
            }
            Err(refusal) => self.refused(env, head, packet, refusal),
        }
    }

    /// Handles a request that came in a ring. Returns how it was taken, or `None` if the caller is to pass it on as a packet; and, if it was
    /// refused, the status with which the caller fails the QP.
    pub(crate) fn take_request(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
        payload: Payload<'_>,
    ) -> (Option<Taken>, Option<Status>) {
        // A request whose turn has not come, or whose answer must wait for others, is one for packets.
        let rests = self.answers.is_empty() && !self.held && !self.nak_sent && !self.sack_owed;
        let in_turn = packet.bth.psn == self.expected || mutant!(TakenOutOfTurn);
        if !rests || !in_turn || !self.early.is_empty() {
            return (None, None);
        }
        if !self.established {
            self.established = true;
            env.tell_first_request(head);
        }
        match self.handle_next(env, head, packet, payload) {
            Ok(()) if self.answers.is_empty() => (Some(Taken::Done), None),
            Ok(()) => {
                // A medium works for it.
                self.owe(self.expected.minus(1), Syndrome::ACK);
                (Some(Taken::Deferred), None)
            }
            Err(Refusal::NotReady) => (None, None),
            Err(Refusal::SourceEnded) => self.took_nothing(packet),
            Err(refusal) => {
                // Only one that waits is executed again, with its bytes.
                let kept = matches!(refusal, Refusal::Waits(_)).then_some(payload);
                let Ok(bytes) = assemble(packet, payload.len(), kept) else {
                    return self.took_nothing(packet);
                };
                let status = match Packet::parse_local(&bytes) {
                    Ok(packet) => self.refused(env, head, &packet, refusal),
                    Err(_) => None,
                };
                (Some(Taken::Deferred), status)
            }
        }
    }

    /// Goes back to where the request was not begun, so that it can come again. What comes before that is not reported as a gap.
    fn took_nothing(&mut self, packet: &Packet<'_>) -> (Option<Taken>, Option<Status>) {
        self.nak_sent = true;
        if packet.bth.opcode.operation.position().begins() {
            self.execution.give_up_message();
        }
        (Some(Taken::Again), None)
    }

    /// Handles a request that cannot be carried out now, or ever. `Some`: the caller fails the QP with this status.
    fn refused(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
        refusal: Refusal,
    ) -> Option<Status> {
        let psn = packet.bth.psn;
        if let Refusal::Waits(id) = refusal {
            self.awaited = Some(id);
            self.hold(env, head, packet);
            return None;
        }
        let note = match refusal {
            Refusal::NotReady => Note::NotReady { psn },
            refusal => Note::Refused(self.execution.denial(env, head, packet, refusal)),
        };
        env.note(head.qpn, note);
        match refusal {
            Refusal::NotReady => {
                env.counters.resources_rnr_nak += 1;
                // Later packets of the window follow and must not be taken for a gap.
                self.nak_sent = true;
                self.sack_owed = false;
                let timer = if packet.bth.opcode.operation.is_atomic() {
                    ATOMIC_WAITS_TIMER
                } else if self.min_rnr_timer == MEDIUM_TIMER && head.peer_is_rdmux {
                    // The user's time is the least that the peer has to wait.
                    MEDIUM_TIMER + 1
                } else {
                    self.min_rnr_timer
                };
                self.owe(packet.bth.psn, Syndrome::RnrNak { timer });
                None
            }
            Refusal::Invalidation => {
                let status = Status::RemoteInvalidRequest;
                self.note_end(Some((psn, status)));
                Some(status)
            }
            refusal => Some(self.refuse(env, (psn, self.msn), refusal)),
        }
    }

    // Selective retransmission.

    /// Keeps a request that came after a gap, if that is not too wide, and makes a report to the peer pending.
    fn keep_early(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        let within = psn.since(self.expected) as u32 <= head.reach();
        if within && is_within(packet, head.mtu) && self.early.keep(psn, packet.count(), || packet.to_local())
        {
            env.counters.kept_requests += 1;
        }
        // A peer that received an RNR NAK for the missing request knows of it.
        self.sack_owed |= !self.nak_sent;
    }

    /// Executes the requests kept behind a missing one that has been executed, up to the next gap. `Some`: one was refused, and the
    /// caller fails the QP with this status.
    fn gap_narrowed(&mut self, env: &mut Env<'_>, head: &Head) -> Option<Status> {
        self.sack_owed = false;
        if self.early.is_empty() {
            return None;
        }
        if let Err(status) = self.execute_kept(env, head) {
            return status;
        }
        if self.held {
            return None;
        }
        let last = self.early.psns().next_back();
        if let Some(last) = last.filter(|_| mutant!(AckPastHole)) {
            self.owe(last, Syndrome::ACK);
        }
        // The peer waits for this, whether or not the last packet requested an acknowledgement.
        if self.early.is_empty() {
            self.owe(self.expected.minus(1), Syndrome::ACK);
        } else {
            self.sack_owed = true;
        }
        None
    }

    /// Executes the kept requests up to the next gap, or up to one that waits for a medium. `Err`: one was refused; the caller fails
    /// the QP with the status, if there is one.
    fn execute_kept(&mut self, env: &mut Env<'_>, head: &Head) -> Result<(), Option<Status>> {
        while !self.held
            && self.answers.len() < ANSWERS_MAX
            && let Some(bytes) = self.take_kept()
        {
            let Ok(mut packet) = Packet::parse_local(&bytes) else {
                break;
            };
            packet.bth.solicited &= !mutant!(KeptSolicitedLost);
            if self.must_wait(env, head, &packet) {
                self.hold(env, head, &packet);
            } else if let Err(refusal) = self.handle_next(env, head, &packet, of_packet(&packet)) {
                if mutant!(KeptRefusedSkipped) {
                    self.expected = self.expected.plus(1);
                }
                let status = self.refused(env, head, &packet, refusal);
                if !self.held {
                    return Err(status);
                }
            }
        }
        Ok(())
    }

    /// Takes the next request, if it is kept.
    fn take_kept(&mut self) -> Option<Box<[u8]>> {
        let next = if mutant!(KeptBeforeGapCloses) {
            self.early.first()?
        } else {
            self.expected
        };
        self.early.take(next)
    }

    // Media.

    /// Returns whether the next request waits for accesses in progress. Only a WRITE that uses up no receive can be carried out
    /// after them on the same medium; all others need their results.
    fn must_wait(&self, env: &Env<'_>, head: &Head, packet: &Packet<'_>) -> bool {
        if self.placing == 0 {
            return false;
        }
        let oldest = self.answers.iter().find_map(|answer| match answer {
            Answer::Access { psn, .. } => Some(*psn),
            _ => None,
        });
        let has_room = self.placing < PLACING_MAX
            && oldest.is_none_or(|oldest| self.expected.since(oldest) < head.reach() as i32);
        let goes_on = has_room
            && packet.bth.opcode.operation.is_write()
            && packet.imm().is_none()
            && self.execution.medium_of(env, head, packet) == self.medium;
        !goes_on
    }

    /// Keeps a request until a medium is done, or one behind it.
    fn hold(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        self.held = true;
        self.sack_owed = false;
        let within = psn.since(self.expected) as u32 <= head.reach();
        if !within || !is_within(packet, head.mtu) {
            env.counters.dropped_busy += 1;
            self.dropped = true;
        } else if !self.early.keep(psn, packet.count(), || packet.to_local()) {
            self.ask_for_time(head, self.expected);
        }
    }

    /// Executes the requests that were kept for a medium, as far as they need not wait any longer.
    fn resume(&mut self, env: &mut Env<'_>, head: &Head) -> Option<Status> {
        if self.awaited.is_some() || !std::mem::take(&mut self.held) {
            return None;
        }
        let before = self.expected;
        if let Err(status) = self.execute_kept(env, head) {
            if !head.selective {
                self.early.clear();
            }
            return status;
        }
        self.nak_sent &= self.expected == before;
        if self.held || !std::mem::take(&mut self.dropped) && self.early.is_empty() {
            return None;
        }
        // A request between those that were kept did not come, or one behind them was dropped.
        if head.selective {
            self.sack_owed = true;
        } else {
            self.early.clear();
            self.nak_sent = true;
            self.owe(self.expected, Syndrome::Nak(NakCode::PsnSequence));
        }
        None
    }

    /// Answers a repeated request with an RNR NAK, if nothing can be answered before a medium is done: the peer comes back later
    /// instead of counting a loss. A peer that is not rdmux would count the RNR NAK; it gets no answer, and its timer decides. `at`: the
    /// PSN for which the peer asks, at most the next one.
    fn ask_for_time(&mut self, head: &Head, at: Psn) {
        // The replay of a READ may be stale: the peer has what it asked for then.
        let is_open = |answer: &&Answer| match answer {
            Answer::Access { .. } | Answer::Read(ReadAnswer { is_replay: false, .. }) => true,
            Answer::Flush { state, .. } => *state == FlushState::Runs,
            _ => false,
        };
        let waits = match self.answers.front() {
            None => true,
            Some(Answer::Read(read)) => matches!(read.fetch, Fetch::Runs(..)),
            Some(oldest) => is_open(&oldest),
        };
        if !waits || !head.peer_is_rdmux {
            return;
        }
        // The NAK also acknowledges all requests before its own, so it names none behind one that is not done.
        let open = self.answers.iter().find(is_open);
        let (psn, msn) = match open.map(|open| (open.psn(), open.msn_before())) {
            Some((psn, msn)) if at.since(psn) > 0 => (psn, msn),
            Some((_, msn)) => (at, msn),
            None => (at, self.msn),
        };
        let syndrome = Syndrome::RnrNak { timer: MEDIUM_TIMER };
        self.answers.push_front(Answer::Ack { psn, msn, syndrome });
    }

    /// Handles the end of an access. `Some`: it failed, or a request behind it was refused, and the caller fails the QP with this
    /// status.
    pub(crate) fn handle_access(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        id: AccessId,
        result: Result<Accessed, Fault>,
    ) -> Option<Status> {
        if self.awaited == Some(id) {
            self.awaited = None;
            self.execution.done(result.map(|accessed| match accessed {
                Accessed::Atomic(before) => before,
                Accessed::Written | Accessed::Read(_) => 0,
            }));
            return self.resume(env, head);
        }
        let is_it = |answer: &Answer| match answer {
            Answer::Access { id: of, .. }
            | Answer::Read(ReadAnswer {
                fetch: Fetch::Runs(of, _),
                ..
            }) => *of == id,
            _ => false,
        };
        let at = self.answers.iter().position(is_it)?;
        let msn = self.answers[at].msn_before();
        let is_next = self.first_data() == Some(at);
        let (psn, operation, reth, fault) = match (&mut self.answers[at], result) {
            (Answer::Read(read), Ok(Accessed::Read(bytes))) => {
                if let Fetch::Runs(_, va) = read.fetch {
                    // The others are fetched again: a peer that repeats READs must not make this side keep the bytes of all of them.
                    read.fetch = if is_next {
                        Fetch::Done(va, bytes)
                    } else {
                        Fetch::None
                    };
                }
                return None;
            }
            (_, Ok(_)) => {
                self.forget_access(id);
                return self.resume(env, head);
            }
            (Answer::Read(read), Err(_)) if read.is_replay => {
                self.answers.remove(at);
                return None;
            }
            (Answer::Read(read), Err(fault)) => {
                let reth = read.first(read.source.bytes);
                (read.psn, Op::ReadRequest, Some(reth), fault)
            }
            (answer, Err(fault)) => (answer.psn(), Op::WriteMiddle, None, fault),
        };
        let refusal = Refusal::from(fault);
        self.note_end(Some((psn, nak_of(refusal).1)));
        // Nothing behind an access that failed is answered.
        self.answers.truncate(at);
        let placing = |answer: &&Answer| matches!(answer, Answer::Access { .. });
        self.placing = self.answers.iter().filter(placing).count() as u32;
        env.note(head.qpn, Note::Refused(Refused::of_memory(psn, operation, reth)));
        Some(self.refuse(env, (psn, msn), refusal))
    }

    /// Removes an access from the pending responses.
    fn forget_access(&mut self, id: AccessId) {
        let is_it = |answer: &Answer| matches!(answer, Answer::Access { id: of, .. } if *of == id);
        if let Some(at) = self.answers.iter().position(is_it) {
            self.answers.remove(at);
            self.placing -= 1;
        }
    }

    /// Queues the NAK that ends the connection, and returns the status with which the QP fails. `msn`: the number of messages before
    /// the refused one.
    fn refuse(&mut self, env: &mut Env<'_>, (psn, msn): (Psn, u32), refusal: Refusal) -> Status {
        let (code, status) = nak_of(refusal);
        self.note_end(Some((psn, status)));
        if refusal == Refusal::TooLong {
            self.execution.end_receive(env, Status::LocalLength);
        }
        env.counters.sent_naks += 1;
        self.owe_with(psn, msn, Syndrome::Nak(code));
        status
    }

    /// Returns whether bytes of a message wait for the end of their datagram.
    pub(crate) fn has_gathered(&self) -> bool {
        self.execution.has_gathered()
    }

    /// Places gathered bytes at the end of the datagram. `Some`: that failed, and the caller fails the QP with this status.
    pub(crate) fn place_gathered(&mut self, env: &mut Env<'_>, head: &Head) -> Option<Status> {
        let collecting = self.execution.collecting();
        let refusal = self.execution.place_gathered(env).err()?;
        collecting.into_iter().for_each(|id| self.forget_access(id));
        let last = self.expected.minus(1);
        let operation = match refusal {
            Refusal::Receive(_) => Op::SendMiddle,
            _ => Op::WriteMiddle,
        };
        env.note(head.qpn, Note::Refused(Refused::of_memory(last, operation, None)));
        // An acknowledgement of the same packet may be pending already; it was not sent, since the datagram ended just now.
        if matches!(self.answers.back(), Some(Answer::Ack { psn, syndrome: Syndrome::ACK, .. }) if *psn == last)
        {
            self.answers.pop_back();
        }
        Some(self.refuse(env, (last, self.msn), refusal))
    }

    /// Carries out the request at `expected`.
    fn handle_next(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
        payload: Payload<'_>,
    ) -> Result<(), Refusal> {
        let handled = self.execute_next(env, head, packet, payload);
        if !matches!(handled, Err(Refusal::Waits(_))) {
            self.execution.forget_awaited();
        }
        handled
    }

    fn execute_next(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
        payload: Payload<'_>,
    ) -> Result<(), Refusal> {
        let request = request_of(packet, payload, head.mtu)?;
        self.may_begin(env, packet)?;
        let effect = self.execute(env, head, packet, request)?;
        self.answer(env, head, packet, effect)
    }

    /// Checks whether a request can be carried out now, before the execution looks at it.
    fn may_begin(&self, env: &mut Env<'_>, packet: &Packet<'_>) -> Result<(), Refusal> {
        let operation = packet.bth.opcode.operation;
        // No resource was promised to the peer.
        let takes_resource = operation.is_atomic() || matches!(operation, Op::ReadRequest | Op::Flush);
        if takes_resource && self.max_resources == 0 {
            return Err(Refusal::InvalidRequest);
        }
        let flush_runs = |answer: &Answer| {
            matches!(
                answer,
                Answer::Flush {
                    state: FlushState::Runs,
                    ..
                }
            )
        };
        if operation.is_atomic() && self.answers.iter().any(flush_runs) && !mutant!(AtomicPassesFlush) {
            return Err(Refusal::NotReady);
        }
        if let Some(faults) = env.rnr_faults
            && needs_receive(operation, packet.imm().is_some())
            && faults.next_rnr()
        {
            return Err(Refusal::NotReady);
        }
        Ok(())
    }

    /// Has a request carried out. Later responses wait for the access to a medium that it announced.
    fn execute(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
        request: Request<'_>,
    ) -> Result<Effect, Refusal> {
        let scope = Scope::of(env, head, packet.xrc_srqn())?;
        let collecting = self.execution.collecting();
        let effect = self.execution.execute(env, head, scope, request);
        let announced = self.execution.take_announced();
        if effect.is_err() {
            if let Some(id) = collecting.filter(|_| self.execution.collecting().is_none()) {
                self.forget_access(id);
            }
        } else if let Some((id, medium)) = announced {
            let (psn, msn) = (packet.bth.psn, self.msn);
            self.medium = Some(medium);
            self.answers.push_back(Answer::Access { psn, msn, id });
            self.placing += 1;
        }
        effect
    }

    /// Makes the request behind one that was carried out the next, and the response pending.
    fn answer(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
        effect: Effect,
    ) -> Result<(), Refusal> {
        let psn = packet.bth.psn;
        let unasked = std::mem::take(&mut self.unasked);
        let ended = u32::from(!matches!(effect, Effect::Partial));
        let msn = (self.msn + ended) & 0xff_ffff;
        let (resource, answer) = match effect {
            Effect::Partial | Effect::Complete => {
                let count = if mutant!(CoalescedCountsOne) {
                    1
                } else {
                    packet.count()
                };
                let end = psn.plus(count);
                self.advance(end);
                self.msn = msn;
                if packet.bth.ack_req {
                    let past = u32::from(count > 1 && mutant!(CoalescedAckPast));
                    self.owe(end.minus(1).plus(past), Syndrome::ACK);
                } else {
                    self.unasked = ended == 1;
                }
                return Ok(());
            }
            Effect::Read(source) => {
                let packets = source.bytes.div_ceil(head.mtu).max(1);
                let resource = Resource::Read {
                    psn,
                    packets,
                    msn,
                    source,
                };
                let read = ReadAnswer {
                    psn,
                    msn,
                    source,
                    begun: false,
                    fetch: Fetch::None,
                    is_replay: false,
                };
                (resource, Answer::Read(read))
            }
            Effect::Atomic(original) => (
                Resource::Atomic { psn, msn, original },
                Answer::Atomic { psn, msn, original },
            ),
            Effect::AtomicWrite => {
                let state = FlushState::Done;
                (Resource::Flush { psn, msn }, Answer::Flush { psn, msn, state })
            }
            Effect::Flush(spec) => {
                let state = self.start_flush(env, head, psn, spec)?;
                // The medium may take longer than the peer waits for a lost packet.
                if unasked && state == FlushState::Runs && head.peer_is_rdmux {
                    self.owe(psn.minus(1), Syndrome::ACK);
                }
                (Resource::Flush { psn, msn }, Answer::Flush { psn, msn, state })
            }
        };
        self.advance(resource.end());
        self.msn = msn;
        self.keep(resource);
        self.answers.push_back(answer);
        Ok(())
    }

    fn start_flush(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        psn: Psn,
        spec: FlushSpec,
    ) -> Result<FlushState, Refusal> {
        if spec.memory.flush_is_immediate(spec.placement) {
            // Whatever the fault is, the right to flush was checked: the operation itself failed. A19.4.
            return match spec.memory.flush(spec.offset, spec.length, spec.placement) {
                Ok(()) => Ok(FlushState::Done),
                Err(_) => Err(Refusal::RemoteOperation),
            };
        }
        env.flushes.start(
            (head.qpn, psn),
            spec.memory,
            spec.offset,
            spec.length.saturating_sub(u64::from(mutant!(FlushShort))),
            spec.placement,
        );
        Ok(if mutant!(FlushAnsweredEarly) {
            FlushState::Done
        } else {
            FlushState::Runs
        })
    }

    /// Handles the end of a flush. Returns true when the QP is to fail: no response has promised durability, and none will.
    pub(crate) fn handle_flush(&mut self, psn: Psn, ok: bool) -> bool {
        let ok = ok || mutant!(FailedFlushAnswered);
        let owed = self
            .answers
            .iter()
            .position(|a| matches!(a, Answer::Flush { psn: p, .. } if *p == psn));
        let Some(at) = owed else { return false };
        if let Some(Answer::Flush { state, .. }) = self.answers.get_mut(at) {
            *state = if ok { FlushState::Done } else { FlushState::Failed };
        }
        if !ok {
            self.note_end(Some((psn, Status::RemoteOperation)));
            // Nothing behind a failed flush is answered.
            self.answers.truncate(at + 1);
        }
        !ok
    }

    /// Makes `psn`, at most 2^23 further, the PSN of the next request. Forgets the resources that no repetition can name any
    /// longer: a repetition is at most 2^23 PSNs old (IBTA Vol 1, 9.7.2), and an older resource would seem to come after it.
    fn advance(&mut self, psn: Psn) {
        self.expected = psn;
        let is_old = |resource: &Resource| psn.since(resource.end()) < 0;
        while self.resources.front().is_some_and(is_old) && !mutant!(OldResourceKept) {
            self.resources.pop_front();
        }
    }

    fn keep(&mut self, resource: Resource) {
        let most = self
            .max_resources
            .saturating_sub(mutant!(ResourceForgotten).into());
        while self.resources.len() >= usize::from(most).max(1) {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }

    fn owe(&mut self, psn: Psn, syndrome: Syndrome) {
        self.owe_with(psn, self.msn, syndrome);
    }

    fn owe_with(&mut self, psn: Psn, msn: u32, syndrome: Syndrome) {
        if syndrome == Syndrome::ACK
            && let Some(Answer::Ack {
                psn: last,
                msn: last_msn,
                syndrome: Syndrome::ACK,
            }) = self.answers.back_mut()
        {
            // One acknowledgement covers all requests before it.
            if psn.since(*last) > 0 {
                (*last, *last_msn) = (psn, msn);
            }
            self.ack_covers += 1;
            return;
        }
        self.ack_covers = 1;
        self.answers.push_back(Answer::Ack { psn, msn, syndrome });
    }

    /// Handles a request that was executed before. 9.7.5.1.4.
    fn handle_duplicate(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        // Its response is queued behind bytes that are being fetched, or would be.
        if let Some(Answer::Read(ReadAnswer {
            psn: first,
            fetch: Fetch::Runs(..),
            ..
        })) = self.answers.front()
            && psn.since(*first) >= 0
            && packet.bth.opcode.operation != Op::ReadRequest
        {
            return self.ask_for_time(head, psn);
        }
        match packet.bth.opcode.operation {
            Op::ReadRequest => {
                if let Some(reth) = packet.reth() {
                    self.replay_read(env, head, psn, reth);
                }
            }
            Op::AtomicWrite if mutant!(AtomicWriteReplayExecutes) => {
                self.replay_by_executing(env, head, packet);
            }
            Op::Flush | Op::AtomicWrite => self.replay_flush(psn),
            Op::CompareSwap | Op::FetchAdd if mutant!(AtomicReplayExecutes) => {
                self.replay_by_executing(env, head, packet);
            }
            Op::CompareSwap | Op::FetchAdd => self.replay_atomic(psn),
            _ => self.acknowledge_again(head, psn),
        }
    }

    fn replay_atomic(&mut self, psn: Psn) {
        let owed = |answer: &Answer| matches!(answer, Answer::Atomic { psn: p, .. } if *p == psn);
        if !self.answers.iter().any(owed)
            && let Some(Resource::Atomic { psn, msn, original }) = resource_covering(&self.resources, psn)
        {
            let original = if mutant!(AtomicReplayLost) { 0 } else { original };
            self.insert(Answer::Atomic { psn, msn, original });
        }
    }

    /// Answers a repeated SEND or WRITE: acknowledges what is done.
    fn acknowledge_again(&mut self, head: &Head, psn: Psn) {
        let (done, done_msn) = self.done_after(head, psn);
        match self.answers.front() {
            None if !self.early.is_empty() && !self.held => self.sack_owed = true,
            Some(Answer::Access { psn: first, .. }) if psn.since(*first) >= 0 => self.ask_for_time(head, psn),
            Some(Answer::Access { psn: first, msn, .. }) => {
                let (first, msn) = (first.minus(1), *msn);
                let before = if done.since(first) < 0 {
                    (done, done_msn)
                } else {
                    (first, msn)
                };
                let (psn, msn) = before;
                let syndrome = Syndrome::ACK;
                self.answers.push_front(Answer::Ack { psn, msn, syndrome });
            }
            // The FLUSH may run for longer than the peer's retries last, so the responder acknowledges everything before it now.
            Some(Answer::Flush {
                psn,
                msn,
                state: FlushState::Runs,
            }) => {
                let answer = Answer::Ack {
                    psn: psn.minus(1),
                    msn: msn.wrapping_sub(1) & 0xff_ffff,
                    syndrome: Syndrome::ACK,
                };
                self.answers.push_front(answer);
            }
            // So may a medium that a READ waits for.
            Some(Answer::Read(ReadAnswer {
                psn,
                msn,
                fetch: Fetch::Runs(..),
                ..
            })) => {
                let read = resource_covering(&self.resources, *psn);
                let (first, msn) = read.map_or((*psn, *msn), |read| (read.psn(), read.msn()));
                let answer = Answer::Ack {
                    psn: first.minus(1),
                    msn: msn.wrapping_sub(1) & 0xff_ffff,
                    syndrome: Syndrome::ACK,
                };
                self.answers.push_front(answer);
            }
            _ => {
                let told = |answer: &Answer| answer.psn().since(done) >= 0;
                if !self.answers.back().is_some_and(told) {
                    self.owe_with(done, done_msn, Syndrome::ACK);
                }
            }
        }
    }

    /// Returns the PSN up to which the acknowledgement of a repeated request reports completion, and its MSN. For a peer that is
    /// not rdmux it ends before the next READ or atomic: rxe takes an acknowledgement with the PSN of one for its response, and
    /// completes it without the data.
    fn done_after(&self, head: &Head, psn: Psn) -> (Psn, u32) {
        // The distance is counted from the last PSN of a resource: the first one may be more than half of all PSNs back.
        let next = self.resources.iter().find(|r| r.end().minus(1).since(psn) > 0);
        match next.filter(|_| !head.selective) {
            Some(resource) => (
                resource.psn().minus(1),
                resource.msn().wrapping_sub(1) & 0xff_ffff,
            ),
            None => (self.expected.minus(1), self.msn),
        }
    }

    /// A deliberate defect: executes a repeated request again, after those that came since.
    fn replay_by_executing(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) {
        let (expected, msn) = (self.expected, self.msn);
        let _ = self.handle_next(env, head, packet, of_packet(packet));
        (self.expected, self.msn) = (expected, msn);
    }

    /// Answers a repeated READ, from the PSN at which the peer begins to request it again.
    fn replay_read(&mut self, env: &mut Env<'_>, head: &Head, at: Psn, reth: Reth) {
        if self.replay_of_answer(head, at) {
            return;
        }
        let Some(Resource::Read {
            psn: first,
            packets,
            msn,
            source,
        }) = resource_covering(&self.resources, at)
        else {
            return;
        };
        // Only bytes that the first request named and the responder allowed are replayed. 9.7.5.1.5.
        let skip = at.since(first) as u32 * head.mtu;
        let inside = reth.rkey == source.rkey
            && at.since(first.plus(packets)) < 0
            && reth.va == source.va.wrapping_add(skip.into())
            && reth.length <= source.bytes - skip.min(source.bytes);
        let allowed =
            reth.length == 0 || region(env.regions, source.pd, head.qpn, reth, Access::REMOTE_READ).is_ok();
        if inside && allowed {
            let source = Source {
                va: if mutant!(ReadReplayedFromStart) {
                    source.va
                } else {
                    reth.va
                },
                rkey: reth.rkey,
                bytes: reth.length,
                pd: source.pd,
            };
            self.insert(Answer::Read(ReadAnswer {
                psn: at,
                msn,
                source,
                begun: false,
                fetch: Fetch::None,
                is_replay: true,
            }));
        }
    }

    /// Answers a repeated READ whose responses are still being sent: they go back to the PSN at which the peer begins to request it
    /// again. Returns false if there are none.
    fn replay_of_answer(&mut self, head: &Head, at: Psn) -> bool {
        for answer in &mut self.answers {
            if let Answer::Read(ReadAnswer {
                psn, source, begun, ..
            }) = answer
            {
                if at.since(*psn) >= 0 && at.since(psn.plus(source.bytes.div_ceil(head.mtu).max(1))) < 0 {
                    self.ask_for_time(head, at);
                    return true;
                }
                let first = resource_covering(&self.resources, *psn);
                // A peer that retransmits selectively needs only the part that it requests, besides the part in flight.
                if !head.selective
                    && let Some(Resource::Read {
                        psn: first,
                        source: whole,
                        ..
                    }) = first
                    && at.since(first) >= 0
                    && at.since(*psn) < 0
                {
                    let skip = at.since(first) as u32 * head.mtu;
                    *psn = at;
                    *source = Source {
                        va: whole.va.wrapping_add(skip.into()),
                        bytes: whole.bytes - skip,
                        ..whole
                    };
                    *begun = false;
                    return true;
                }
            }
        }
        false
    }

    /// Returns the position of the next response that is more than an acknowledgement.
    fn first_data(&self) -> Option<usize> {
        let is_data = |answer: &Answer| !matches!(answer, Answer::Ack { .. });
        self.answers.iter().position(is_data)
    }

    /// Inserts a replayed response at its place in the order of requests, for instance before a FLUSH that still runs: the peer
    /// must not receive later responses before this one.
    fn insert(&mut self, answer: Answer) {
        let at = answer.psn();
        // Only the next response keeps fetched bytes, which this one may become.
        if let Some(first) = self.first_data()
            && let Answer::Read(read) = &mut self.answers[first]
            && matches!(read.fetch, Fetch::Done(..))
        {
            read.fetch = Fetch::None;
        }
        let after = self.answers.iter().position(|a| a.psn().since(at) > 0);
        self.answers.insert(after.unwrap_or(self.answers.len()), answer);
    }

    fn replay_flush(&mut self, at: Psn) {
        let owed = self
            .answers
            .iter()
            .position(|a| matches!(a, Answer::Flush { psn, .. } if *psn == at));
        match owed {
            // The FLUSH runs: an RNR NAK makes the peer come back later instead of counting it as lost.
            Some(0) => {
                if let Some(Answer::Flush {
                    psn,
                    msn,
                    state: FlushState::Runs,
                }) = self.answers.front()
                {
                    let syndrome = Syndrome::RnrNak { timer: MEDIUM_TIMER };
                    let answer = Answer::Ack {
                        psn: *psn,
                        msn: *msn,
                        syndrome,
                    };
                    self.answers.push_front(answer);
                }
            }
            Some(_) => {}
            None => {
                if let Some(Resource::Flush { psn, msn }) = resource_covering(&self.resources, at) {
                    self.insert(Answer::Flush {
                        psn,
                        msn,
                        state: FlushState::Done,
                    });
                }
            }
        }
    }
}

/// Returns the code of the NAK for a refusal, and the status with which the QP fails.
fn nak_of(refusal: Refusal) -> (NakCode, Status) {
    match refusal {
        // 9.7.4.1.7 for a message that is too long.
        Refusal::InvalidRequest | Refusal::TooLong => (NakCode::InvalidRequest, Status::RemoteInvalidRequest),
        Refusal::RemoteAccess => (NakCode::RemoteAccess, Status::RemoteAccess),
        // 9.9.2.2 for a failure of the responder's own memory.
        Refusal::RemoteOperation
        | Refusal::Receive(_)
        | Refusal::NotReady
        | Refusal::Waits(_)
        | Refusal::SourceEnded
        | Refusal::Invalidation => (NakCode::RemoteOperation, Status::RemoteOperation),
    }
}

/// Returns the payload that is in a packet.
fn of_packet<'a>(packet: &Packet<'a>) -> Payload<'a> {
    Payload::Packet(packet.payload())
}

/// Returns the request of a packet, if the packet has the form that its operation requires.
fn request_of<'a>(packet: &Packet<'a>, payload: Payload<'a>, mtu: u32) -> Result<Request<'a>, Refusal> {
    let operation = packet.bth.opcode.operation;
    let position = operation.position();
    // A request for bytes or for a flush carries no payload. 9.4.4 and A19.4.
    let bare = matches!(
        operation,
        Op::ReadRequest | Op::Flush | Op::CompareSwap | Op::FetchAdd
    );
    if !fits(packet, payload.len(), mtu) || (bare && payload.len() > 0) {
        return Err(Refusal::InvalidRequest);
    }
    let (imm, solicited) = (packet.imm(), packet.bth.solicited);
    let request = match (operation, packet.reth(), packet.feth()) {
        (Op::ReadRequest, Some(reth), _) => Request::Read { reth },
        (Op::Flush, Some(reth), Some(feth)) => Request::Flush { reth, feth },
        (Op::AtomicWrite, Some(reth), _) => Request::AtomicWrite {
            reth,
            payload: packet.payload(),
        },
        (Op::CompareSwap | Op::FetchAdd, ..) => Request::Atomic {
            eth: packet.atomic().ok_or(Refusal::InvalidRequest)?,
            add: operation == Op::FetchAdd,
        },
        (op, ..) if op.is_send() => Request::Send {
            position,
            payload,
            imm,
            invalidate: packet.invalidate(),
            solicited,
        },
        (op, reth, _) if op.is_write() => Request::Write(WritePacket {
            position,
            reth,
            payload,
            imm,
            solicited,
        }),
        _ => return Err(Refusal::InvalidRequest),
    };
    Ok(request)
}

fn resource_covering(resources: &VecDeque<Resource>, at: Psn) -> Option<Resource> {
    resources
        .iter()
        .rev()
        .find(|resource| at.since(resource.psn()) >= 0 && at.since(resource.end()) < 0)
        .copied()
}

/// Returns whether a packet is the one of its message that uses up a receive.
fn needs_receive(operation: Op, has_imm: bool) -> bool {
    (operation.is_send() && operation.position().begins()) || (operation.is_write() && has_imm)
}

//! Derives a cause in plain words, and advice, from events.

use std::net::IpAddr;

use rdmux_soft::trace::{Trace, TraceEntry};
use rdmux_verbs::trace::{ConnectionNote, Denial, Injection, Note, Refused};
use rdmux_verbs::{Cause, QpState, Qpn, RejReason, Status, WcOpcode};

use crate::cmd::notes::{denied, duration, fault_words, heard, request};
use crate::cmd::res::state_name;
use crate::cmd::trace::places;

/// Nanoseconds by which the time of a note may be too early: an engine notes the time at which its turn began, and may be kept from the
/// CPU in it.
const TURN_MAX_NS: u64 = 1_000_000_000;

/// The evidence about a queue pair.
pub(super) struct Case<'a> {
    pub(super) qpn: Qpn,
    /// State that its process reports.
    pub(super) state: Option<QpState>,
    /// Set when its process reports that no request of its own is open.
    pub(super) is_idle: bool,
    /// Set when its process lives.
    pub(super) alive: bool,
    /// Set when notes of its device are found.
    pub(super) noted: bool,
    /// Notes of its device about it and about the device itself, oldest first.
    pub(super) entries: &'a [TraceEntry],
    /// Traces of all devices: that of its peer may be among them.
    pub(super) traces: &'a [Trace],
}

/// Explanation of a queue pair's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    /// State that the process reports, or else the last one noted.
    pub(super) state: Option<QpState>,
    pub(super) since_ns: Option<u64>,
    pub(super) peer: Option<(IpAddr, Qpn)>,
    /// Cause as one word, for programs.
    pub(super) cause: &'static str,
    pub(super) why: String,
    /// Note that its peer on this host made about the same failure.
    pub(super) peer_says: Option<String>,
    pub(super) next: Vec<String>,
}

/// Cause, explanation, and what to do next.
struct Answer {
    cause: &'static str,
    why: String,
    next: Vec<&'static str>,
}

impl Answer {
    fn new(cause: &'static str, why: String, next: &[&'static str]) -> Answer {
        Answer {
            cause,
            why,
            next: next.to_vec(),
        }
    }
}

const FEWER_FAULTS: &str =
    "lower loss= and corrupt= in --fault, RDMUX_FAULT or Options::faults (docs/bad-network.md)";
const AGAIN: &str = "connect again with a new queue pair, or move this one to RESET; its posted requests have completed as flushed";

impl Case<'_> {
    pub(super) fn judge(&self) -> Verdict {
        let own = || self.entries.iter().filter(|entry| entry.qpn == self.qpn);
        let end = self.end();
        // Number of the note of its last reset; its present life begins there.
        let begin = own()
            .rev()
            .filter(|entry| entry.number < end)
            .find(|entry| {
                matches!(
                    entry.note,
                    Note::Moved {
                        to: QpState::Reset,
                        ..
                    }
                )
            })
            .map_or(0, |entry| entry.number);
        let is_life = |entry: &&TraceEntry| entry.number > begin && entry.number < end;
        let life: Vec<&TraceEntry> = self.entries.iter().filter(is_life).collect();
        let is_connection = |entry: &TraceEntry| matches!(entry.note, Note::Connection { .. });
        // A queue pair begins in RESET, and a failed connection establishment leaves it there.
        let mut noted = (begin > 0 || own().all(is_connection)).then_some((QpState::Reset, None));
        let mut peer = None;
        for entry in life.iter().filter(|entry| entry.qpn == self.qpn) {
            match entry.note {
                Note::Moved { to, from, .. } if to != from => noted = Some((to, Some(entry.time_ns))),
                Note::Failed { .. } => noted = Some((QpState::Error, Some(entry.time_ns))),
                Note::Peer { address, qpn, .. } => peer = Some((address, qpn)),
                _ => {}
            }
        }
        let judged = self.state.or(noted.map(|(state, _)| state));
        let answer = match judged {
            Some(QpState::Error | QpState::Sqe) if !self.noted => without_notes(),
            Some(QpState::Error) => self.of_error(&life),
            Some(QpState::Sqe) => self
                .of_request(&life, peer)
                .unwrap_or_else(|| unknown("the send queue is in error")),
            Some(state) => self.of_health(state, &life, peer, end < u64::MAX),
            None => unknown("no event records its state"),
        };
        // The cause is that of the state before the end; the state is the one after.
        if end < u64::MAX {
            noted = own().rev().find_map(|entry| match entry.note {
                Note::Moved { to, .. } => Some((to, Some(entry.time_ns))),
                _ => None,
            });
        }
        let state = self.state.or(noted.map(|(state, _)| state));
        let since_ns = noted
            .filter(|(noted, _)| Some(*noted) == state)
            .and_then(|(_, since)| since);
        Verdict {
            state,
            since_ns,
            peer,
            cause: answer.cause,
            peer_says: self.peer_says(&answer, peer, begin),
            why: answer.why,
            next: answer.next.into_iter().map(str::to_owned).collect(),
        }
    }

    /// Returns the number of the note at which the owner moved the queue pair to RESET for the last time, or began to destroy it, which
    /// takes it through RESET: what was before that needs an explanation.
    fn end(&self) -> u64 {
        let moves = self.entries.iter().rev().filter(|entry| entry.qpn == self.qpn);
        let destroys = |entry: &&TraceEntry| {
            let Note::Moved { from, to, .. } = entry.note else {
                return false;
            };
            to == QpState::Reset && from != to || (from, to) == (QpState::Reset, QpState::Error)
        };
        match self.state {
            None => moves
                .take_while(destroys)
                .last()
                .map_or(u64::MAX, |entry| entry.number),
            Some(_) => u64::MAX,
        }
    }

    /// Explains a queue pair that is in error.
    fn of_error(&self, life: &[&TraceEntry]) -> Answer {
        let own = life.iter().filter(|entry| entry.qpn == self.qpn);
        let went = own.rev().find_map(|entry| match entry.note {
            Note::Failed { status, cause, .. } => Some((entry.number, Some((status, cause)))),
            Note::Moved {
                to: QpState::Error,
                from,
                ..
            } if from != QpState::Error => Some((entry.number, None)),
            _ => None,
        });
        let Some((at, failure)) = went else {
            return unknown("the queue pair is in error, and no event records the cause");
        };
        // Later events explain nothing: the end of a peer may be noted after the failure that it caused.
        let before: Vec<&TraceEntry> = life.iter().filter(|entry| entry.number <= at).copied().collect();
        let peer = before.iter().rev().find_map(|entry| match entry.note {
            Note::Peer { address, qpn, .. } => Some((address, qpn)),
            _ => None,
        });
        match failure {
            Some((_, Cause::OwnRequest)) => self
                .of_request(&before, peer)
                .unwrap_or_else(|| unknown("a request of this side failed")),
            Some((status, Cause::PeerRequest)) => self.of_peers_request(&before, status),
            Some((_, Cause::QueueOverrun)) => of_overrun(&before),
            Some((_, Cause::ShareOverrun)) => Answer::new(
                "cq-share-overrun",
                "its share of a completion queue of a pool overran: it received more completions than it reserves, and completions are lost"
                    .into(),
                &[
                    "reserve as many completions as requests are posted to the queue pairs of the share, or poll the queue more often",
                    AGAIN,
                ],
            ),
            Some((_, Cause::Injected)) => Answer::new(
                "injected",
                "an injected fault moved the queue pair to error (qp-error of RDMUX_FAULT, --fault or Options::faults)".into(),
                &["run without that fault, or check that the program handles it as docs/bad-network.md describes"],
            ),
            None => self.of_move(&before),
        }
    }

    /// Explains an error of one of its own requests.
    fn of_request(&self, before: &[&TraceEntry], peer: Option<(IpAddr, Qpn)>) -> Option<Answer> {
        let own: Vec<&Note> = before
            .iter()
            .filter(|entry| entry.qpn == self.qpn)
            .map(|entry| &entry.note)
            .collect();
        let (status, opcode, what) = own.iter().rev().find_map(|note| match **note {
            Note::RequestFailed {
                status,
                opcode,
                va,
                key,
                length,
                wr_id,
            } => {
                let own = matches!(
                    status,
                    Status::LocalProtection
                        | Status::LocalQpOperation
                        | Status::LocalLength
                        | Status::MemoryBind
                );
                let what = request(opcode, va, key, length, own);
                Some((status, opcode, format!("{what} (wr_id {wr_id})")))
            }
            _ => None,
        })?;
        let named = peer.map(|(address, qpn)| format!("{address} qp {}", qpn.value()));
        let to = named
            .as_ref()
            .map_or_else(String::new, |named| format!(" towards {named}"));
        let who = named.map_or_else(|| "the peer".to_owned(), |named| format!("the peer ({named})"));
        Some(match status {
            Status::RetryExceeded => self.of_retries(before, &what, peer, &to),
            Status::RnrRetryExceeded => {
                let last = own.iter().rev().find_map(|note| match note {
                    Note::RnrNak {
                        psn,
                        tries,
                        wait_ns,
                        is_last: true,
                        ..
                    } => Some((psn.value(), *tries, *wait_ns)),
                    _ => None,
                });
                let detail = last.map_or_else(String::new, |(psn, tries, wait)| {
                    format!(" for PSN {psn}, {tries} retries of {} each", duration(wait))
                });
                Answer::new(
                    "rnr-retry-exceeded",
                    format!("RNR retry counter exceeded: {who} had no receive posted{detail}; {what}"),
                    &[
                        "post enough receives at the peer before this side sends",
                        "or set rnr_retry to 7 (unlimited retries), or a longer min_rnr_timer at the peer",
                        AGAIN,
                    ],
                )
            }
            Status::RemoteAccess => Answer::new(
                "remote-access",
                format!("remote access error: {who} did not allow the {what}"),
                &[
                    "compare the address, length and rkey with the region that the peer registered, and the operation with the rights \
                     (remote write, read, atomic, flush) of its region or window",
                    "a key becomes invalid with its region or window: ask the peer for the current key",
                    AGAIN,
                ],
            ),
            Status::RemoteInvalidRequest => Answer::new(
                "remote-invalid-request",
                format!("remote invalid request error: {who} found the {what} invalid"),
                &[
                    "check the rights of the peer's queue pair (qp access flags), its max_dest_rd_atomic, and, for a SEND, the length of \
                     its posted receive",
                    AGAIN,
                ],
            ),
            Status::RemoteOperation if opcode == WcOpcode::Flush => Answer::new(
                "remote-flush-failed",
                format!(
                    "remote operation error: {who} could not carry out the {what}: the bytes are not durable"
                ),
                &[
                    "check the peer's file or disk; a failed flush is final for that memory (docs/persistence.md)",
                    AGAIN,
                ],
            ),
            Status::RemoteOperation => Answer::new(
                "remote-operation",
                format!("remote operation error: {who} failed to execute the {what}"),
                &[
                    "check the peer's memory: a full disk, a failed medium, a receive with invalid local memory",
                    AGAIN,
                ],
            ),
            Status::LocalProtection => Answer::new(
                "local-protection",
                format!("local protection error: {what} names local memory that its lkey does not cover"),
                &[
                    "check the scatter/gather list: the lkey must be of an existing region in the queue pair's protection domain, the \
                     range must lie inside the region, and a receive or READ needs local write",
                    AGAIN,
                ],
            ),
            Status::LocalLength => Answer::new(
                "local-length",
                format!("local length error: {what}"),
                &["provide a buffer as long as the message", AGAIN],
            ),
            Status::LocalQpOperation => Answer::new(
                "local-operation",
                format!(
                    "local QP operation error: {what} failed in this device: local memory failed, or the key was in the wrong state"
                ),
                &["check the memory or the file of the region", AGAIN],
            ),
            Status::MemoryBind => Answer::new(
                "memory-bind",
                format!("memory window bind error: {what}"),
                &[
                    "bind the window inside a region of the same protection domain that grants MW_BIND and the requested rights",
                    AGAIN,
                ],
            ),
            Status::BadResponse => Answer::new(
                "bad-response",
                format!("bad response error: the peer's response does not match the {what}"),
                &[
                    "compare the path MTU of both queue pairs: they must be the same (rdmux res show qp)",
                    "capture the peer's packets (rdmux capture) and check them (rdmux capture check)",
                    AGAIN,
                ],
            ),
            Status::Flushed | Status::Success => return None,
        })
    }

    /// Explains retries that got no answer.
    fn of_retries(
        &self,
        before: &[&TraceEntry],
        what: &str,
        peer: Option<(IpAddr, Qpn)>,
        to: &str,
    ) -> Answer {
        let of_qp = |entry: &&&TraceEntry| entry.qpn == self.qpn;
        let used = before
            .iter()
            .rev()
            .filter(of_qp)
            .find_map(|entry| match entry.note {
                Note::RetriesUsed {
                    psn,
                    resends,
                    retry_count,
                    stuck_ns,
                    heard_ns,
                } => Some((psn, resends, retry_count, stuck_ns, heard_ns)),
                _ => None,
            });
        let mut why = match used {
            Some((psn, resends, retry_count, stuck_ns, heard_ns)) => format!(
                "transport retry counter exceeded{to}: no response to PSN {} within {}, after {resends} retransmissions (retry_count \
                 {retry_count} allows {}, two for each retry); {}",
                psn.value(),
                duration(stuck_ns),
                2 * u32::from(retry_count),
                heard(heard_ns)
            ),
            None => format!("transport retry counter exceeded{to}"),
        };
        why += &format!("; {what}");
        let has = |is_it: &dyn Fn(&Note) -> bool| before.iter().any(|entry| is_it(&entry.note));
        if has(&|note| *note == Note::PeerGone) {
            why += "; the peer's process on this host has ended";
            return Answer::new("peer-gone", why, &["restart the peer", AGAIN]);
        }
        // Kind of its last timeout, whose note stands before that of the retries.
        let last = before.iter().rev().filter(of_qp).map(|entry| entry.note);
        let stalled = |note: &Note| match note {
            Note::PeerStalled { .. } => Some(true),
            Note::TimedOut { .. } => Some(false),
            _ => None,
        };
        if last.into_iter().find_map(|note| stalled(&note)) == Some(true) {
            why += "; no packet was lost: the peer's process, on this host, did not receive the packets because it was stopped or got no \
                    CPU";
            return Answer::new(
                "peer-stalled",
                why,
                &[
                    "find out what stops the peer's process (a debugger, a cgroup freezer, a busy machine)",
                    "give the connection a longer timeout or more retries if the peer may be stopped for that long",
                    AGAIN,
                ],
            );
        }
        let port = before.iter().rev().find_map(|entry| match entry.note {
            Note::Port { active } => Some(active),
            _ => None,
        });
        if port == Some(false) {
            why += "; this host's network accepts no packets";
            return Answer::new(
                "retry-exceeded",
                why,
                &[
                    "bring up the interface that `rdmux link show` names, restore its address, or remove down= from --fault or RDMUX_FAULT",
                    AGAIN,
                ],
            );
        }
        let reachable = [
            "check that the peer runs and is reachable: ping, `rdmux doctor` on both hosts, and UDP port 4791 in both directions in every \
             firewall between them",
            "a network with high loss needs a larger timeout or retry_count (docs/bad-network.md)",
            AGAIN,
        ];
        match self.injected(before, peer) {
            0 => Answer::new("retry-exceeded", why, &reachable),
            losses => {
                why += &format!("; injected faults dropped packets ({losses})");
                let next = [&[FEWER_FAULTS], &reachable[1..]].concat();
                Answer::new("retry-exceeded", why, &next)
            }
        }
    }

    /// Returns how many packets injected faults have dropped, at this side or at a peer on this host.
    fn injected(&self, life: &[&TraceEntry], peer: Option<(IpAddr, Qpn)>) -> usize {
        let dropped = |entry: &&TraceEntry| {
            matches!(
                entry.note,
                Note::Injected {
                    what: Injection::Lost | Injection::Corrupted,
                    ..
                }
            )
        };
        let own = life.iter().copied().filter(dropped).count();
        let since = life.iter().find(|entry| entry.qpn == self.qpn);
        let (Some((address, _)), Some(since)) = (peer, since) else {
            return own;
        };
        let theirs = self.traces.iter().filter(|trace| trace.device.address == address);
        let theirs = theirs.flat_map(|trace| &trace.entries).filter(dropped);
        own + theirs.filter(|entry| entry.time_ns >= since.time_ns).count()
    }

    /// Explains a request of its peer that could not be executed.
    fn of_peers_request(&self, before: &[&TraceEntry], status: Status) -> Answer {
        let last = before
            .iter()
            .rev()
            .filter(|entry| entry.qpn == self.qpn)
            .find_map(|entry| match entry.note {
                Note::Refused(refused) => Some(Answer::new(cause_of(&refused), refused_words(&refused), next_of(&refused))),
                Note::FlushFailed { fault, .. } => Some(Answer::new(
                    "flush-failed",
                    format!("a FLUSH requested by the peer failed: {}", fault_words(fault)),
                    &[
                        "check the disk of the file; the kernel has discarded the data that it could not write back",
                        "serve the file again: a failed flush is final for its memory (docs/persistence.md)",
                    ],
                )),
                _ => None,
            });
        last.unwrap_or_else(|| unknown(&format!("a request of the peer failed: {status}")))
    }

    /// Explains a move to error for which no failure is noted.
    fn of_move(&self, before: &[&TraceEntry]) -> Answer {
        for entry in before.iter().rev().filter(|entry| entry.qpn == self.qpn) {
            match entry.note {
                Note::PeerGone => {
                    return Answer::new(
                        "peer-gone",
                        "the peer's process, on this host, ended without disconnecting".into(),
                        &[
                            "find out why that process ended (its log, dmesg, the system's journal)",
                            AGAIN,
                        ],
                    );
                }
                Note::Connection { what, reason, .. } => match what {
                    ConnectionNote::Disconnected => {
                        // The note of the peer's death comes first, by another way.
                        let gone = before
                            .iter()
                            .any(|entry| entry.qpn == self.qpn && entry.note == Note::PeerGone);
                        if gone {
                            continue;
                        }
                        return Answer::new(
                            "disconnected",
                            "the peer disconnected (DREQ), or its host disconnected for it because its process had ended; or this side \
                             did not accept the reply within a minute"
                                .into(),
                            &["check at the peer why it disconnected", AGAIN],
                        );
                    }
                    ConnectionNote::Rejected | ConnectionNote::Unreachable => {
                        return of_refusal(what, reason);
                    }
                    ConnectionNote::Accepted | ConnectionNote::Established => break,
                },
                _ => {}
            }
        }
        Answer::new(
            "own-move",
            "the local program moved the queue pair to ERR or disconnected it".into(),
            &["this is normal: a queue pair is in ERR after its connection has ended"],
        )
    }

    /// Explains a queue pair that is not in error, or was not when its owner moved it to RESET.
    fn of_health(
        &self,
        state: QpState,
        life: &[&TraceEntry],
        peer: Option<(IpAddr, Qpn)>,
        is_over: bool,
    ) -> Answer {
        let last = life
            .iter()
            .rev()
            .find(|entry| entry.qpn == self.qpn)
            .map(|entry| entry.note);
        let gone = life
            .iter()
            .any(|entry| entry.qpn == self.qpn && entry.note == Note::PeerGone);
        if gone {
            return Answer::new(
                "peer-gone",
                "the peer's process, on this host, has ended; further requests will get no response".into(),
                &["disconnect, and restart the peer"],
            );
        }
        // An idle queue pair has since received what these notes waited for.
        let last = last.filter(|note| {
            !(self.is_idle
                && matches!(
                    note,
                    Note::TimedOut { .. } | Note::PeerStalled { .. } | Note::RnrNak { .. }
                ))
        });
        match (state, last) {
            (
                QpState::Reset | QpState::Init,
                Some(Note::Connection {
                    what: what @ (ConnectionNote::Rejected | ConnectionNote::Unreachable),
                    reason,
                    ..
                }),
            ) => of_refusal(what, reason),
            _ if is_over => Answer::new(
                "reset",
                format!(
                    "its program moved it from {} to RESET, or destroyed it; it had no error",
                    state_name(state)
                ),
                &["this is normal at the end of a connection"],
            ),
            (QpState::Rts, Some(Note::TimedOut { psn, resends, .. })) if self.alive => Answer::new(
                "retrying",
                format!(
                    "no failure yet, but PSN {} has no response after {} retransmissions",
                    psn.value(),
                    u32::from(resends) + 1
                ),
                match self.injected(life, peer) {
                    0 => &["check that the peer runs and is reachable; `rdmux capture` shows the packets"],
                    _ => &[FEWER_FAULTS],
                },
            ),
            (QpState::Rts, Some(Note::PeerStalled { psn })) if self.alive => Answer::new(
                "peer-stalled",
                format!(
                    "no packet is lost, but the peer's process, on this host, has not received PSN {} yet: the process is not running",
                    psn.value()
                ),
                &["find out what stops the peer's process (a debugger, a cgroup freezer, a busy machine)"],
            ),
            (QpState::Rts, Some(Note::RnrNak { psn, wait_ns, .. })) if self.alive => Answer::new(
                "rnr-wait",
                format!(
                    "the peer had no receive for PSN {} (RNR NAK): retransmitted after {}",
                    psn.value(),
                    duration(wait_ns)
                ),
                &["post receives at the peer"],
            ),
            (QpState::Reset | QpState::Init | QpState::Rtr, _) => Answer::new(
                "not-ready",
                "the queue pair is not connected yet: it sends nothing in this state".into(),
                &["connect it, or move it to RTR and RTS with its peer's address, QPN and PSN"],
            ),
            _ if !self.alive => Answer::new(
                "process-ended",
                "the queue pair had no error when its process ended".into(),
                &["find out why that process ended (its log, dmesg, the system's journal)"],
            ),
            _ => Answer::new("none", "the queue pair has no error".into(), &[]),
        }
    }

    /// Returns the note of the peer on this host about a request that failed there.
    fn peer_says(&self, answer: &Answer, peer: Option<(IpAddr, Qpn)>, begin: u64) -> Option<String> {
        let asked = [
            "remote-access",
            "remote-invalid-request",
            "remote-operation",
            "remote-flush-failed",
        ];
        let (address, qpn) = peer.filter(|_| asked.contains(&answer.cause))?;
        let since = self.entries.iter().find(|entry| entry.number > begin)?.time_ns;
        let since = since.saturating_sub(TURN_MAX_NS);
        let theirs = self.traces.iter().filter(|trace| trace.device.address == address);
        theirs
            .flat_map(|trace| trace.entries.iter().rev())
            .filter(|entry| entry.qpn == qpn && entry.time_ns >= since)
            .find_map(|entry| match entry.note {
                Note::Refused(refused) => Some(denied(&refused)),
                Note::FlushFailed { fault, .. } => Some(fault_words(fault)),
                _ => None,
            })
    }
}

/// Explains a connection that was not established.
fn of_refusal(what: ConnectionNote, reason: u16) -> Answer {
    if what == ConnectionNote::Rejected {
        return Answer::new(
            "rejected",
            format!("the peer refused the connection: {}", RejReason(reason)),
            &["check that the peer listens on that port and accepts the requested parameters"],
        );
    }
    Answer::new(
        "unreachable",
        "the peer did not answer the connection request".into(),
        &[
            "check that the peer runs and is reachable: ping, `rdmux doctor`, and UDP port 4791 in every firewall",
        ],
    )
}

fn of_overrun(before: &[&TraceEntry]) -> Answer {
    let cqn = before.iter().rev().find_map(|entry| match entry.note {
        Note::Overrun { cqn } => Some(cqn.0),
        _ => None,
    });
    let which = cqn.map_or_else(
        || "the completion queue".to_owned(),
        |cqn| format!("completion queue {cqn}"),
    );
    Answer::new(
        "cq-overrun",
        format!("{which} overran: it received more completions than it holds, and completions are lost"),
        &[
            "make the queue deeper than the total of requests posted to its queue pairs, or poll it more often",
            AGAIN,
        ],
    )
}

/// Explains an error where its device has no notes.
fn without_notes() -> Answer {
    Answer::new(
        "unknown",
        format!(
            "the queue pair is in error, and its device has no recorded events in {}: RDMUX_TRACE=off, a folder that is not writable, or \
             a process with another XDG_RUNTIME_DIR",
            places()
        ),
        &[
            "run this command with the XDG_RUNTIME_DIR of the process (see /proc/PID/environ)",
            "or reproduce the error with RDMUX_TRACE=events or under rdmux capture",
        ],
    )
}

fn unknown(why: &str) -> Answer {
    Answer::new(
        "unknown",
        format!(
            "{why}: RDMUX_TRACE=off, a runtime folder that is not writable, or newer events overwrote it"
        ),
        &["reproduce the error with RDMUX_TRACE=events or under rdmux capture"],
    )
}

fn cause_of(refused: &Refused) -> &'static str {
    match refused.why {
        Denial::NoKey
        | Denial::OtherDomain
        | Denial::NoRight { .. }
        | Denial::OutOfRange { .. }
        | Denial::OtherWindow => "peer-access",
        Denial::Memory => "memory-failed",
        Denial::Receive(_) => "receive-failed",
        // Its own program sees this as a local length error of its receive.
        Denial::TooLong => "local-length",
        Denial::NoRightOnQp { .. } | Denial::Invalidation | Denial::Invalid => "peer-invalid-request",
    }
}

fn refused_words(refused: &Refused) -> String {
    if refused.why == Denial::TooLong {
        return format!("local length error at its receive: {}", denied(refused));
    }
    format!("this side refused a request of the peer: {}", denied(refused))
}

fn next_of(refused: &Refused) -> &'static [&'static str] {
    match refused.why {
        Denial::NoKey => &[
            "send the peer the current key of its region, and deregister a region only when no peer uses it",
            AGAIN,
        ],
        Denial::OtherDomain => &[
            "register the region in the protection domain of this queue pair",
            AGAIN,
        ],
        Denial::NoRight { .. } => &[
            "register the region, or bind the window, with the missing right",
            AGAIN,
        ],
        Denial::OutOfRange { .. } => &[
            "correct the address or length that the peer uses, or register a larger region",
            AGAIN,
        ],
        Denial::OtherWindow => &[
            "let the peer use the queue pair that bound the window (type 2)",
            AGAIN,
        ],
        Denial::NoRightOnQp { .. } => &[
            "set that right in the queue pair's access flags in the transition to INIT",
            AGAIN,
        ],
        Denial::TooLong => &["post receives as long as the longest message", AGAIN],
        Denial::Receive(_) => &[
            "check the scatter/gather list of the receive: lkey, range, local write",
            AGAIN,
        ],
        Denial::Memory => &[
            "check the file or memory of the region: truncated, full disk, failed medium",
            AGAIN,
        ],
        Denial::Invalidation => &[
            "let the peer invalidate only keys of this queue pair's windows or fast-registered regions",
            AGAIN,
        ],
        Denial::Invalid => &[
            "capture the peer's packets (rdmux capture) and check them (rdmux capture check)",
            AGAIN,
        ],
    }
}

//! A writer's state for one replica.

use std::time::Duration;

use super::READ;
use crate::defect::defect;
use crate::format::{Frame, Header, Point, Scan};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No session before `until`.
    Down { until: Duration },
    /// The writer has asked for a session.
    Connecting,
    /// The writer reads the header first, so that it disturbs no other writer in vain.
    Peeking,
    /// Waiting until enough headers are read.
    Peeked,
    /// The writer has asked for the mapping for writing.
    Acquiring,
    /// The contents are being made durable, then the header is read again: no other writer can write.
    Settling,
    /// The writer holds the replica, which has no contents yet.
    Held,
    /// The header of a new log is being written.
    Formatting,
    /// The header of the new log is written.
    Formatted,
    /// The promise is being written.
    Promising,
    /// The log is being read.
    Reading,
    /// The log is read.
    Read,
    /// The replica has no say, and waits until others have determined the log.
    Waiting,
    /// The writer keeps the replica in step.
    Streaming,
    /// The replica cannot be part of this log.
    Unusable,
}

/// The meaning of the completion of a request in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// No meaning.
    Other,
    /// Both headers are read.
    Header,
    /// This many bytes of the log are read.
    Log(u64),
    /// The writer still held the replica in this round.
    Confirmed(u64),
    /// A header is durable.
    HeaderDurable(Header),
    /// The log is durable up to this position.
    Durable(u64),
}

#[derive(Debug)]
pub(super) struct Replica {
    pub(super) session: u64,
    pub(super) phase: Phase,
    pub(super) state: String,
    pub(super) retry: Duration,
    pub(super) ops: std::collections::VecDeque<Op>,
    pub(super) region_bytes: u64,
    /// The header as read, or as written and durable.
    pub(super) header: Option<Header>,
    pub(super) header_busy: bool,
    /// Set to write the header although nothing waits for it.
    pub(super) header_wanted: bool,
    pub(super) copied: Option<Copied>,
    /// Position up to which the log is written.
    pub(super) sent: u64,
    /// Position up to which the log is durable.
    pub(super) durable: u64,
    /// The same, over sessions of this epoch, in which no other writer has written.
    pub(super) known: Option<u64>,
    /// Start of the log in the durable header: one ring length from there may be used.
    pub(super) room_from: Option<u64>,
    /// Position up to which the replica must have everything before it has a say.
    pub(super) joining: Option<u64>,
    /// Set if the replica was seen to have no say before this epoch was promised to any replica, and has had none since.
    pub(super) may_join: bool,
    /// Last round in which the writer asked whether it still holds the replica, and the last round that the replica confirmed.
    pub(super) asked: u64,
    pub(super) confirmed: u64,
    /// Number of times that the replica was found to be promised to another writer.
    pub(super) outranked: u32,
}

impl Replica {
    pub(super) fn new() -> Replica {
        Replica {
            session: 0,
            phase: Phase::Down {
                until: Duration::ZERO,
            },
            state: String::new(),
            retry: Duration::ZERO,
            ops: Default::default(),
            region_bytes: 0,
            header: None,
            header_busy: false,
            header_wanted: false,
            copied: None,
            sent: 0,
            durable: 0,
            known: None,
            room_from: None,
            joining: None,
            may_join: false,
            asked: 0,
            confirmed: 0,
            outranked: 0,
        }
    }

    pub(super) fn has_session(&self) -> bool {
        !matches!(self.phase, Phase::Down { .. } | Phase::Unusable)
    }

    /// Returns the position up to which the replica counts towards a majority.
    pub(super) fn counts(&self) -> u64 {
        let joined = self.joining.is_none() || defect!(JoiningHasSay);
        self.known.filter(|_| joined).unwrap_or(0)
    }

    /// Notes that the durable header says that the log begins at `head`.
    pub(super) fn streams_from(&mut self, head: u64) {
        self.room_from = Some(head);
        if self.sent < head {
            self.sent = head;
        }
        self.durable = self.durable.max(head);
        if self.joining.is_none() {
            self.known = Some(self.durable);
        }
    }
}

/// A replica's log, as far as it is read.
#[derive(Clone, Debug)]
pub(super) struct Copied {
    pub(super) head: Point,
    pub(super) end: Point,
    pub(super) frames: Vec<Frame>,
    /// The bytes from `head` on.
    bytes: Vec<u8>,
    area: u64,
}

impl Copied {
    pub(super) fn new(header: &Header) -> Copied {
        Copied {
            head: header.head,
            end: header.head,
            frames: Vec::new(),
            bytes: Vec::new(),
            area: header.area,
        }
    }

    pub(super) fn area(&self) -> u64 {
        self.area
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The bytes of all frames.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..(self.end.position - self.head.position) as usize]
    }

    /// Scans what was read; returns position and length of the next read, or `None` if the log ends.
    pub(super) fn scan(&mut self) -> Option<(u64, u64)> {
        loop {
            let at = (self.end.position - self.head.position) as usize;
            match Frame::scan(&self.end, &self.bytes[at..], self.area - at as u64) {
                Scan::Frame(frame) => {
                    self.end = frame.end;
                    self.frames.push(frame);
                }
                Scan::End => return None,
                Scan::Need(bytes) => {
                    let have = self.bytes.len() as u64;
                    let need = (at as u64 + bytes as u64).max(have + READ).min(self.area);
                    // A ring that is full ends without a gap.
                    return (at as u64 + bytes as u64 <= self.area && need > have)
                        .then(|| (self.head.position + have, (need - have).min(READ)));
                }
            }
        }
    }
}

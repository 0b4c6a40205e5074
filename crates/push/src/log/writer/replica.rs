//! What a writer knows of one replica.

use std::time::Duration;

use super::READ;
use crate::log::defect::defect;
use crate::log::format::{Frame, Header, Point, Scan};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No session until then.
    Down { until: Duration },
    /// A session is asked for.
    Connecting,
    /// Its header is read, to disturb nobody in vain.
    Peeking,
    /// Waiting until enough headers are read.
    Peeked,
    /// The mapping for writing is asked for.
    Acquiring,
    /// What it holds is made durable, then its header is read again: nobody else writes now.
    Settling,
    /// It is ours and holds nothing yet.
    Held,
    /// The header of a new log is written.
    Formatting,
    /// That is done.
    Formatted,
    /// The promise is written.
    Promising,
    /// Its log is read.
    Reading,
    /// That is done.
    Read,
    /// It has no say, and waits until others have chosen the log.
    Waiting,
    /// It is kept in step.
    Streaming,
    /// It can't be part of this log.
    Unusable,
}

/// A request under way: what its completion means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Nothing.
    Other,
    /// Both headers are read.
    Header,
    /// So many bytes of the log are read.
    Log(u64),
    /// It still was ours in this round.
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
    /// As read, or as written and durable.
    pub(super) header: Option<Header>,
    pub(super) header_busy: bool,
    /// Write it although nothing waits for it.
    pub(super) header_wanted: bool,
    pub(super) copied: Option<Copied>,
    /// Written up to here.
    pub(super) sent: u64,
    /// Durable up to here.
    pub(super) durable: u64,
    /// The same, over sessions of this epoch: nobody else has written since.
    pub(super) known: Option<u64>,
    /// Where the log begins by its durable header: a ring's length from there may be used.
    pub(super) room_from: Option<u64>,
    /// It has a say when it has everything up to there.
    pub(super) joining: Option<u64>,
    /// It was seen, and still is, to have no say since before this epoch was promised anywhere.
    pub(super) may_join: bool,
    /// The last round in which it was asked whether it still is ours, and the last that it answered.
    pub(super) asked: u64,
    pub(super) confirmed: u64,
    /// How often it was found to be promised to another writer.
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

    /// What of it counts towards a majority.
    pub(super) fn counts(&self) -> u64 {
        let joined = self.joining.is_none() || defect!(JoiningHasSay);
        self.known.filter(|_| joined).unwrap_or(0)
    }

    /// Its durable header says that the log begins at `head`.
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
    /// From `head` on.
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

    /// Goes through what was read; returns position and length of what is to be read next, or nothing when the log ends.
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

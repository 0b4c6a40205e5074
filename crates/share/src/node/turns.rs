//! When the node's thread does what is neither to move requests nor to move completions: answering applications about their objects,
//! accepting them, and destroying what those that have ended had.
//!
//! An application decides how often it asks, and each answer holds up the data of all others, by tens of microseconds. So there is one such
//! *turn* at a time, in the order in which they were wanted, and between two of them a pass over all data. And while data of others flows, they have
//! a small part of the thread's time: after a burst, so little that fewer than one in a hundred of the others' messages meets one; more while
//! nobody sends short messages now and then, who alone would notice. Whose data flows alone waits for nothing.
//!
//! No I/O and no clock.

use std::collections::{HashSet, VecDeque};

use rdmux_rnic::Time;
use rdmux_rnic::sched::PIECE_BYTES_SHARED;

/// Time for which data counts as flowing after the last of it.
const FLOWING_NS: u64 = 10_000_000;
/// Time of turns that may be used at once.
pub(super) const BURST_NS: i64 = 5_000_000;
/// Part of the time, as its reciprocal, that turns have while data flows: beside short messages, and beside long ones alone. A message meets
/// the thread twice, when it is posted and when it completes.
pub(super) const PART_BESIDE_SHORT: u64 = 256;
const PART_BESIDE_LONG: u64 = 32;

/// How much the thread does of one thing before it does the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batches {
    /// Requests of an application that are taken.
    pub(super) requests: usize,
    /// Pieces that are posted.
    pieces: u32,
    /// Bytes within which pieces are begun.
    bytes: u64,
}

impl Batches {
    /// Those beside long messages alone.
    pub(super) const LONG: Batches = Batches {
        requests: 64,
        pieces: 64,
        bytes: u64::MAX,
    };

    /// Returns those beside short messages, which wait for the rest of a pass, and those beside long ones alone. Completions are taken as they
    /// come: each was posted, and what waits behind it may be somebody's short message.
    ///
    /// `are_together`: data of several applications flows. Otherwise only connections of one application wait for each other: short pieces are
    /// posted up to the bytes of four long ones, which a device in software sends with two system calls. With four short ones in a pass, an
    /// application with a message on each of many connections would have a system call for every four, here and at the peer's node.
    pub(super) fn of(is_beside_short: bool, are_together: bool) -> Batches {
        match (is_beside_short, are_together) {
            (true, true) => Batches {
                requests: 4,
                pieces: 4,
                bytes: u64::MAX,
            },
            (true, false) => Batches {
                requests: 16,
                pieces: 16,
                bytes: 4 * PIECE_BYTES_SHARED as u64,
            },
            (false, _) => Batches::LONG,
        }
    }

    /// Returns whether one more piece may be posted.
    pub(super) fn has_room(&self) -> bool {
        self.pieces > 0 && self.bytes > 0
    }

    /// Takes note that a piece is posted.
    pub(super) fn posted(&mut self, bytes: u32) {
        self.pieces = self.pieces.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes.into());
    }
}

/// Something that the node does in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Turn {
    /// To begin to serve an application.
    Serve,
    /// To handle a message of the application of a slot.
    Message(u32),
    /// To destroy an object of an application that has ended.
    Leave,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Turns {
    waiting: VecDeque<Turn>,
    is_waiting: HashSet<Turn>,
    /// Time that turns may still take; negative after one that took longer.
    credit_ns: i64,
    /// Time up to which it is counted, and the part of a nanosecond that is left over.
    counted: Time,
    left_over: u64,
    /// The application whose data moved last, and the last other one.
    flowing: [Option<(u32, Time)>; 2],
}

impl Turns {
    /// Returns one for which nothing waits.
    pub(super) fn new(now: Time) -> Turns {
        Turns {
            waiting: VecDeque::new(),
            is_waiting: HashSet::new(),
            credit_ns: BURST_NS,
            counted: now,
            left_over: 0,
            flowing: [None; 2],
        }
    }

    /// Returns whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Has a turn wait, behind the others that do.
    pub(super) fn want(&mut self, turn: Turn) {
        if self.is_waiting.insert(turn) {
            self.waiting.push_back(turn);
        }
    }

    /// Forgets a turn that nobody wants any more.
    pub(super) fn forget(&mut self, turn: Turn) {
        if self.is_waiting.remove(&turn) {
            self.waiting.retain(|other| *other != turn);
        }
    }

    /// Takes note that requests or completions of an application have moved.
    pub(super) fn moved(&mut self, now: Time, application: u32) {
        let [last, other] = &mut self.flowing;
        match last {
            Some((of, at)) if *of == application => *at = now,
            _ => {
                *other = last.take();
                *last = Some((application, now));
            }
        }
    }

    /// Returns whether data of several applications flows.
    pub(super) fn are_together(&self, now: Time) -> bool {
        let flows = |(_, last): &&(u32, Time)| now.since_ns(*last) < FLOWING_NS;
        self.flowing.iter().flatten().filter(flows).count() > 1
    }

    /// Takes the turn that is due. [`Turns::took`] follows. `is_beside_short`: somebody sends short messages now and then.
    pub(super) fn next(&mut self, now: Time, is_beside_short: bool) -> Option<Turn> {
        self.count(now, is_beside_short);
        let first = *self.waiting.front()?;
        let turn = match self.credit_ns > 0 || !self.flows_beside(now, first) {
            true => first,
            // Nobody but itself waits for it.
            false => self
                .flowing
                .iter()
                .flatten()
                .map(|(application, _)| Turn::Message(*application))
                .find(|turn| self.is_waiting.contains(turn) && !self.flows_beside(now, *turn))?,
        };
        self.forget(turn);
        Some(turn)
    }

    /// Takes note of the time that a turn took.
    pub(super) fn took(&mut self, now: Time, turn: Turn, ns: u64) {
        if self.flows_beside(now, turn) {
            self.credit_ns = self.credit_ns.saturating_sub_unsigned(ns);
        }
    }

    /// Returns when a turn that waits may be due although nothing happens; `None` if none waits.
    pub(super) fn next_time(&self, is_beside_short: bool) -> Option<Time> {
        let first = *self.waiting.front()?;
        let missing_ns = self.credit_ns.min(0).unsigned_abs() + 1;
        // What is left over may be of a smaller part.
        let passing_ns = missing_ns.saturating_mul(part(is_beside_short));
        let by_credit = self.counted + passing_ns.saturating_sub(self.left_over);
        Some(match self.last_beside(first) {
            Some(last) => by_credit.min(last + FLOWING_NS),
            None => self.counted,
        })
    }

    fn count(&mut self, now: Time, is_beside_short: bool) {
        let part = part(is_beside_short);
        let passed_ns = now.since_ns(self.counted) + self.left_over;
        self.counted = now;
        self.left_over = passed_ns % part;
        self.credit_ns = self
            .credit_ns
            .saturating_add_unsigned(passed_ns / part)
            .min(BURST_NS);
    }

    /// Returns when data of others than the one who wants a turn has moved last.
    fn last_beside(&self, turn: Turn) -> Option<Time> {
        let others = self.flowing.iter().flatten();
        others
            .filter(|(application, _)| turn != Turn::Message(*application))
            .map(|(_, at)| *at)
            .max()
    }

    fn flows_beside(&self, now: Time, turn: Turn) -> bool {
        self.last_beside(turn)
            .is_some_and(|last| now.since_ns(last) < FLOWING_NS)
    }
}

fn part(is_beside_short: bool) -> u64 {
    match is_beside_short {
        true => PART_BESIDE_SHORT,
        false => PART_BESIDE_LONG,
    }
}

#[cfg(test)]
mod tests;

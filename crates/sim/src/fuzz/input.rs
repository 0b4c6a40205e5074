//! Parser of a fuzzer's input, and record of what the input reached.

use std::collections::BTreeSet;

use rdmux_rnic::cm::CmEvent;
use rdmux_rnic::{Event, Status, WcOpcode};

use super::side::QpKind;

/// Remaining bytes of the input.
pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl Input<'_> {
    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub(super) fn word(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    pub(super) fn bytes(&mut self, n: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken.to_vec()
    }

    /// Returns true once in `n` times.
    pub(super) fn one_in(&mut self, n: u8) -> bool {
        self.byte() % n == n - 1
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }
}

/// Record of what inputs reached: a fuzzer that reaches nothing finds nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Packets that were delivered to a QP, by transport service, state and opcode.
    pub packets: BTreeSet<(u8, u8, u8)>,
    /// Completions, by transport service, operation and status.
    pub completions: BTreeSet<(u8, u8, u8)>,
    /// Names of asynchronous events, and of events that users of the connection manager received.
    pub events: BTreeSet<&'static str>,
    /// Counters of the engine that were incremented.
    pub counters: BTreeSet<&'static str>,
}

impl Reach {
    /// Adds what another input reached.
    pub fn add(&mut self, other: Reach) {
        self.packets.extend(other.packets);
        self.completions.extend(other.completions);
        self.events.extend(other.events);
        self.counters.extend(other.counters);
    }

    pub(super) fn completed(&mut self, kind: QpKind, opcode: WcOpcode, status: Status) {
        self.completions.insert((kind as u8, opcode as u8, status as u8));
    }

    pub(super) fn event(&mut self, event: &Event) {
        self.events.insert(match event {
            Event::Completion(_) => "completion",
            Event::CqError(_) => "CQ error",
            Event::QpError(..) => "QP error",
            Event::CommunicationEstablished(_) => "communication established",
            Event::FirstRequest(_) => "first request",
            Event::SqDrained(_) => "SQ drained",
            Event::LastWqeReached(_) => "last WQE reached",
            Event::SrqLimitReached(_) => "SRQ limit reached",
            Event::WantsGrant(..) => "wants a grant",
        });
    }

    pub(super) fn cm_event(&mut self, event: &CmEvent) {
        self.events.insert(match event {
            CmEvent::Request { .. } => "request",
            CmEvent::Reply { .. } => "reply",
            CmEvent::Established { .. } => "established",
            CmEvent::Rejected { .. } => "rejected",
            CmEvent::Unreachable { .. } => "unreachable",
            CmEvent::Disconnected { .. } => "disconnected",
            CmEvent::SidrRequest { .. } => "SIDR request",
            CmEvent::SidrReply { .. } => "SIDR reply",
        });
    }
}

//! Occurrences in runs, by name, so that a test can check that runs left out nothing that the engine has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rdmux_rnic::cm::CmEvent;
use rdmux_rnic::{Cause, Counters, Event, Status, WcOpcode};
use rdmux_wire::roce::Opcode;
use strum::VariantArray;

use crate::Ending;

/// Congestion notification, which is no opcode of a transport service. IBTA Vol 1, A17.9.3.
const CNP: u8 = 0x81;
/// CM messages by attribute id, from 0x10 on, without LAP and APR: nobody asks for another path. 12.6.
const CM_MESSAGES: [&str; 9] = [
    "REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP",
];
const CM_MESSAGE_FIRST: u16 = 0x10;

const EVENTS: [&str; 10] = [
    "Completion",
    "CqError",
    "QpError by its own request",
    "QpError by a request of its peer",
    "QpError by an overrun queue",
    "CommunicationEstablished",
    "SqDrained",
    "LastWqeReached",
    "SrqLimitReached",
    "WantsGrant",
];
const CM_EVENTS: [&str; 8] = [
    "Request",
    "Reply",
    "Established",
    "Rejected",
    "Unreachable",
    "Disconnected",
    "SidrRequest",
    "SidrReply",
];

/// Events of whole runs, besides each [`Ending`].
pub(crate) const RESTARTED_SELECTIVE: &str = "Restart under selective traffic";
pub(crate) const RESTARTED_GO_BACK: &str = "Restart under go-back-N traffic";
pub(crate) const OLD_PACKETS: &str = "packets of before a restart came";
pub(crate) const OUTAGE_SHORT: &str = "LinkDown, short";
pub(crate) const OUTAGE_LONG: &str = "LinkDown, long";
pub(crate) const SLOWER: &str = "path became ten times slower";
pub(crate) const FASTER: &str = "path became ten times faster";
pub(crate) const PSNS_SKIPPED: &str = "PSNs were skipped";
pub(crate) const ONE_MACHINE: &str = "both hosts on one machine";
pub(crate) const LINK_BROKE: &str = "link of one machine broke";
pub(crate) const ENDED_HALF_WAY: &str = "a grant ended half-way";
pub(crate) const REQUEST_DONE: &str = "a request in a ring was executed";
pub(crate) const NAMED_REQUEST_DONE: &str = "a request in a ring that names its memory was executed";
pub(crate) const SENT_BY_LANE: &str = "a SEND was put into a ring without the device";
pub(crate) const TAKEN_BY_LANE: &str = "a SEND was taken out of a ring without the device";
pub(crate) const ENDED_BY_LANE: &str = "SENDs were completed without the device";
pub(crate) const REQUEST_AGAIN: &str = "a request in a ring was to be sent again";
pub(crate) const REQUEST_DEFERRED: &str = "a request in a ring was left to packets";
const HAPPENED: [&str; 18] = [
    RESTARTED_SELECTIVE,
    RESTARTED_GO_BACK,
    OLD_PACKETS,
    OUTAGE_SHORT,
    OUTAGE_LONG,
    SLOWER,
    FASTER,
    PSNS_SKIPPED,
    ONE_MACHINE,
    LINK_BROKE,
    ENDED_HALF_WAY,
    REQUEST_DONE,
    NAMED_REQUEST_DONE,
    REQUEST_AGAIN,
    REQUEST_DEFERRED,
    SENT_BY_LANE,
    TAKEN_BY_LANE,
    ENDED_BY_LANE,
];

type Name = (&'static str, String);

/// Number of occurrences of each thing. A thing is named by its kind and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen(BTreeMap<Name, u64>);

const PACKET: &str = "packet";
const MESSAGE: &str = "CM message";
const COMPLETED: &str = "completed";
const STATUS: &str = "status";
const EVENT: &str = "event";
const CM_EVENT: &str = "CM event";
const RUN: &str = "run";
/// Counters that only devices of other makes, strangers, a service with too many requests and policies above the engine increment.
const OF_OTHERS: [&str; 5] = [
    "cq_moderation_changes",
    "dropped_busy",
    "icrc_residual_16",
    "rxe_flush_icrc",
    "wrong_peer",
];
const COUNTER: &str = "counter";

impl Seen {
    /// Adds what another run saw.
    pub fn add(&mut self, other: &Seen) {
        for (name, times) in &other.0 {
            *self.0.entry(name.clone()).or_default() += times;
        }
    }

    /// Returns the names of what the engine has and no run showed.
    pub fn missing(&self) -> Vec<String> {
        let missing = all().into_iter().filter(|name| !self.0.contains_key(name));
        missing.map(|(kind, name)| format!("{kind} {name}")).collect()
    }

    fn note(&mut self, kind: &'static str, name: impl Into<String>, times: u64) {
        *self.0.entry((kind, name.into())).or_default() += times;
    }

    pub(crate) fn happened(&mut self, what: impl Into<String>) {
        self.note(RUN, what, 1);
    }

    /// Adds a device's counters.
    pub(crate) fn counters(&mut self, counters: &Counters) {
        for (name, value, _) in counters.iter().filter(|(_, value, _)| *value > 0) {
            self.note(COUNTER, name, value);
        }
    }

    pub(crate) fn completion(&mut self, opcode: WcOpcode, status: Status) {
        self.note(STATUS, format!("{status:?}"), 1);
        if status == Status::Success {
            self.note(COMPLETED, format!("{opcode:?}"), 1);
        }
    }

    pub(crate) fn event(&mut self, event: &Event) {
        self.note(EVENT, EVENTS[event_at(event)], 1);
    }

    pub(crate) fn cm_event(&mut self, event: &CmEvent) {
        self.note(CM_EVENT, CM_EVENTS[cm_event_at(event)], 1);
    }

    /// Adds packets with this opcode.
    pub(crate) fn packets(&mut self, code: u8, times: u64) {
        if let Some(name) = packet_name(code).filter(|_| times > 0) {
            self.note(PACKET, name, times);
        }
    }

    /// Adds CM messages with this attribute id.
    pub(crate) fn messages(&mut self, attribute: u16, times: u64) {
        let at = usize::from(attribute.wrapping_sub(CM_MESSAGE_FIRST));
        if let Some(name) = CM_MESSAGES.get(at) {
            self.note(MESSAGE, *name, times);
        }
    }
}

fn packet_name(code: u8) -> Option<String> {
    if code == CNP {
        return Some("CNP".to_owned());
    }
    let Opcode { transport, operation } = Opcode::from_code(code)?;
    Some(format!("{transport:?} {operation:?}"))
}

fn event_at(event: &Event) -> usize {
    match event {
        Event::Completion(_) => 0,
        Event::CqError(_) => 1,
        Event::QpError(_, _, Cause::OwnRequest) => 2,
        Event::QpError(_, _, Cause::PeerRequest) => 3,
        // Nothing in here asks for the other causes.
        Event::QpError(_, _, Cause::QueueOverrun | Cause::ShareOverrun | Cause::Injected) => 4,
        Event::CommunicationEstablished(_) => 5,
        Event::SqDrained(_) => 6,
        Event::LastWqeReached(_) => 7,
        Event::SrqLimitReached(_) => 8,
        Event::WantsGrant(..) => 9,
        Event::FirstRequest(_) => panic!("nothing in here asks for it"),
    }
}

fn cm_event_at(event: &CmEvent) -> usize {
    match event {
        CmEvent::Request { .. } => 0,
        CmEvent::Reply { .. } => 1,
        CmEvent::Established { .. } => 2,
        CmEvent::Rejected { .. } => 3,
        CmEvent::Unreachable { .. } => 4,
        CmEvent::Disconnected { .. } => 5,
        CmEvent::SidrRequest { .. } => 6,
        CmEvent::SidrReply { .. } => 7,
    }
}

/// Returns the names of everything that the engine has.
fn all() -> BTreeSet<Name> {
    let mut all = BTreeSet::new();
    all.extend((0..=u8::MAX).filter_map(|code| Some((PACKET, packet_name(code)?))));
    all.extend(CM_MESSAGES.map(|name| (MESSAGE, name.to_owned())));
    all.extend(
        WcOpcode::VARIANTS
            .iter()
            .map(|&opcode| (COMPLETED, format!("{opcode:?}"))),
    );
    all.extend(
        Status::VARIANTS
            .iter()
            .map(|&status| (STATUS, format!("{status:?}"))),
    );
    all.extend(EVENTS.map(|name| (EVENT, name.to_owned())));
    all.extend(CM_EVENTS.map(|name| (CM_EVENT, name.to_owned())));
    let counters = Counters::default();
    let names = counters.iter().map(|(name, ..)| name);
    let counted = names.filter(|name| !OF_OTHERS.contains(name));
    all.extend(counted.map(|name| (COUNTER, name.to_owned())));
    all.extend(HAPPENED.map(|name| (RUN, name.to_owned())));
    all.extend(Ending::ALL.iter().map(|&ending| (RUN, format!("{ending:?}"))));
    all
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((kind, name), times) in &self.0 {
            writeln!(f, "{kind:<12} {name:<34} {times:>12}")?;
        }
        Ok(())
    }
}

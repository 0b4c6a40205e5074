//! Connections and listeners of an engine, and their events.

use rdmux_rnic::cm::{CmEvent, CmId};
use rdmux_rnic::trace::{ConnectionNote, Note};
use rdmux_rnic::{QpAttributes, QpInfo, QpState, Qpn, Time};
use rdmux_wire::cm::{RejReason, ServiceId};

use super::waker::{self, CmSink};
use super::{Core, LedgerRecord};

/// A service that an application offers.
#[derive(Debug)]
pub(crate) struct ListenerEntry {
    pub(crate) sink: CmSink,
    /// Set for a service of datagrams (SIDR), not of connections.
    pub(crate) datagrams: bool,
}

/// A connection that an application holds, or its query for a service.
#[derive(Debug)]
pub(crate) struct ConnectionEntry {
    pub(crate) sink: CmSink,
    /// Queue pair that ends with the connection; `None` once this side has ended the connection.
    pub(crate) qpn: Option<Qpn>,
    /// Entry in the ledger of the address, from the moment that the peer may regard the connection as established.
    pub(crate) record: Option<LedgerRecord>,
}

impl Core {
    /// Handles an event of a connection or of a listener.
    pub(super) fn dispatch(&mut self, now: Time, event: CmEvent) {
        let (id, ends) = match &event {
            CmEvent::Request { id, service, .. } => {
                return self.ask_listener(now, *id, *service, false, event);
            }
            CmEvent::SidrRequest { id, service, .. } => {
                return self.ask_listener(now, *id, *service, true, event);
            }
            CmEvent::Reply { id, .. } | CmEvent::Established { id } => (*id, false),
            CmEvent::Rejected { id, .. }
            | CmEvent::Unreachable { id }
            | CmEvent::Disconnected { id }
            | CmEvent::SidrReply { id, .. } => (*id, true),
        };
        self.note_connection(now, id, &event);
        let Some(entry) = self.connections.get(&id) else {
            // Peers that ask and give up must not fill a listener's queue.
            let queues = self.listeners.values().filter_map(|l| l.sink.0.upgrade());
            queues.for_each(|queue| waker::withdraw(&queue, id));
            return;
        };
        if let Some(qpn) = entry.qpn {
            if matches!(event, CmEvent::Established { .. }) {
                self.rnic.peer_is_ready(now, qpn);
            }
            // A queue pair whose connection was refused before it was established can be connected again.
            let refused = matches!(event, CmEvent::Rejected { .. });
            let unused = |qp: QpInfo| qp.state == QpState::Reset || refused && qp.state == QpState::Init;
            if ends && !self.rnic.query_qp(qpn).is_some_and(unused) {
                // Posted requests complete as flushed, so that whoever waits for them learns of the end.
                let _ = self
                    .rnic
                    .modify_qp(now, qpn, QpState::Error, &QpAttributes::default());
            }
        }
        if let CmEvent::Reply { id, .. } = event {
            self.record(id);
        }
        let Some(entry) = self.connections.get(&id) else {
            return;
        };
        entry.sink.tell(event);
        if ends {
            self.forget_connection(id);
        }
    }

    pub(crate) fn add_connection(&mut self, id: CmId, entry: ConnectionEntry) {
        if let Some(qpn) = entry.qpn {
            self.connected.insert(qpn, id);
            if self.qp_errors.contains_key(&qpn) {
                entry.sink.wake();
            }
        }
        self.connections.insert(id, entry);
    }

    pub(crate) fn forget_connection(&mut self, id: CmId) {
        if let Some(qpn) = self.connections.remove(&id).and_then(|entry| entry.qpn) {
            self.disconnected(id, qpn);
        }
    }

    /// Takes note that a queue pair no longer belongs to a connection. It may have been connected again since.
    pub(crate) fn disconnected(&mut self, id: CmId, qpn: Qpn) {
        if self.connected.get(&qpn) == Some(&id) {
            self.connected.remove(&qpn);
        }
    }

    /// Records in the trace what happened to a connection.
    fn note_connection(&mut self, now: Time, id: CmId, event: &CmEvent) {
        let (what, reason) = match event {
            CmEvent::Reply { .. } => (ConnectionNote::Accepted, 0),
            CmEvent::Established { .. } => (ConnectionNote::Established, 0),
            CmEvent::Rejected { reason, .. } => (ConnectionNote::Rejected, reason.0),
            CmEvent::Unreachable { .. } => (ConnectionNote::Unreachable, 0),
            CmEvent::Disconnected { .. } => (ConnectionNote::Disconnected, 0),
            CmEvent::Request { .. } | CmEvent::SidrRequest { .. } | CmEvent::SidrReply { .. } => return,
        };
        let qpn = self.connections.get(&id).and_then(|entry| entry.qpn);
        let note = Note::Connection {
            id: id.0,
            what,
            reason,
        };
        self.rnic.note(now, qpn.unwrap_or(Qpn::new(0)), note);
    }

    /// Hands a request to its listener. Rejects a request that has none, or one of the other kind only.
    fn ask_listener(&mut self, now: Time, id: CmId, service: ServiceId, datagrams: bool, event: CmEvent) {
        let listener = self.listeners.get(&service).filter(|l| l.datagrams == datagrams);
        if !listener.is_some_and(|listener| listener.sink.tell(event)) {
            let cm = self.rnic.cm();
            cm.reject(now, id, RejReason::INVALID_SERVICE_ID, &[]);
        }
    }

    /// Records a connection in the ledger, so that the holder can end it if this process dies.
    pub(crate) fn record(&mut self, id: CmId) {
        if let Some(peering) = self.rnic.cm().peering(id)
            && let Some(entry) = self.connections.get_mut(&id)
        {
            entry.record = self.records.record(&peering);
        }
    }
}

//! The part of a [snapshot](super::snapshot::Snapshot) that a worker tells, on its own thread.

use rdmux_rnic::Time;
use rdmux_verbs::moderation::now;
use rdmux_verbs::waiting::WaitMode;

use super::application::{Application, Shared};
use super::snapshot::{self, Counts, Route};
use super::worker::Worker;

/// State of a worker.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) time: Time,
    pub(super) waiting: WaitMode,
    /// Packets that its engine has retransmitted.
    pub(super) retransmitted_packets: u64,
    /// By tenant: its name, its applications here, and what they and those before them have moved.
    pub(super) tenants: Vec<(String, u32, Counts)>,
    pub(super) applications: Vec<snapshot::Application>,
    pub(super) connections: Vec<snapshot::Connection>,
    pub(super) connections_left_out: u64,
    pub(super) shared_qps: Vec<snapshot::SharedQp>,
}

impl Worker {
    /// Returns its state. The work is bounded by the numbers of applications, tenants and shared queue pairs, and by that of connections.
    pub(super) fn part(&self, connections_max: usize) -> Part {
        let shared = &self.shared;
        // A connection that only holds the node is no application.
        let is_attached = |one: &&Application| one.rings.is_some();
        let attached = || self.applications.iter().flatten().filter(is_attached);
        let past = self.past.iter().map(|(name, past)| (name.clone(), 0, *past));
        let time = now();
        let mut part = Part {
            time,
            waiting: self.waiting.mode(),
            retransmitted_packets: shared.device.counters().retransmitted_packets,
            tenants: past.collect(),
            applications: Vec::new(),
            connections: Vec::new(),
            connections_left_out: 0,
            shared_qps: match &shared.sharing {
                Some(sharing) => sharing.shown(&shared.egress, time),
                None => Vec::new(),
            },
        };
        // Each application has its part of the room.
        let most = connections_max / attached().count().max(1);
        for application in attached() {
            let counts = shared.egress.counts_of(application.slot);
            let tenant = application.belonging.account.name().to_owned();
            part.tenants.push((tenant, 1, counts.since(&application.before)));
            let shown = application.qps.ids().take(most.max(1));
            let before = part.connections.len();
            part.connections
                .extend(shown.filter_map(|id| application.connection(shared, id)));
            let shown = part.connections.len() - before;
            part.connections_left_out += (application.qps.len() - shown) as u64;
            part.applications.push(application.shown(&counts));
        }
        part
    }
}

impl Application {
    fn shown(&self, counts: &Counts) -> snapshot::Application {
        let identity = &self.belonging.identity;
        snapshot::Application {
            id: self.belonging.number,
            pid: u32::try_from(identity.pid).ok().filter(|pid| *pid > 0),
            uid: identity.uid,
            name: self.name.replace(char::is_control, "?"),
            tenant: self.belonging.account.name().to_owned(),
            queue_pairs: self.qps.len() as u32,
            counts: *counts,
        }
    }

    fn connection(&self, shared: &Shared, id: u32) -> Option<snapshot::Connection> {
        let qp = self.qps.get(id)?;
        let qpn = qp.qp.qpn();
        let of_sharing = shared.sharing.as_ref().and_then(|sharing| sharing.route(qpn));
        let (route, shared_qp, peer) = of_sharing.unwrap_or((Route::Own, None, qp.peer));
        let (counts, class) = shared.egress.state_of(qp.flow)?;
        Some(snapshot::Connection {
            application: self.belonging.number,
            qpn: qpn.value(),
            peer,
            class: class.map(|class| class as u8),
            route,
            shared_qp,
            counts,
        })
    }
}

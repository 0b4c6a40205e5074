//! Connections under faults: made, refused, ended by either side or both, forgotten by one of them.

use std::collections::HashMap;

use rdmux_rnic::QpInit;
use rdmux_rnic::cm::{CmEvent, CmId, Endpoint};
use rdmux_wire::cm::{RejReason, ServiceId};
use rdmux_wire::roce::{PathMtu, Transport};
use rdmux_wire::{Psn, Qpn};

use crate::dice::Dice;
use crate::world::{Faults, Shape, Step, World};
use crate::{Report, Settings};

const SERVICE: ServiceId = ServiceId::tcp(7174);
const NOBODYS: ServiceId = ServiceId::tcp(7175);

/// What both users will do with a connection.
#[derive(Clone, Copy, Debug)]
struct Plan {
    active_host: usize,
    /// Nobody listens on what is asked for.
    unknown_service: bool,
    passive_rejects: bool,
    active_rejects: bool,
    decision_ns: u64,
    /// When each side (active, passive) ends it after it was established; `None` leaves it to the other.
    end_ns: [Option<u64>; 2],
    /// The active side forgets it instead of ending it.
    active_forgets: bool,
    qpns: [Qpn; 2],
}

/// How far a side came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Asked,
    Open,
    Over,
}

#[derive(Debug)]
struct Side {
    connection: usize,
    passive: bool,
    seen: Seen,
}

const ASK: u64 = 0;
const DECIDE: u64 = 1;
const END: u64 = 2;

fn tag(what: u64, host: usize, id: u32) -> u64 {
    what << 40 | (host as u64) << 32 | u64::from(id)
}

struct Run {
    world: World,
    plans: Vec<Plan>,
    sides: HashMap<(usize, CmId), Side>,
    loss_percent: f64,
}

/// Runs `settings.operations` connections between two devices.
pub(crate) fn run(settings: &Settings) -> Report {
    let mut dice = Dice::new(settings.seed, 3);
    let shape = Shape {
        ipv6: dice.one_in(2),
        gso: true,
        gro: dice.one_in(2),
        lazy_acks: dice.one_in(3),
        latency_ns: dice.log_uniform(10_000_000),
        flush_ns_max: 1,
    };
    let faults = Faults {
        loss: settings.loss_percent,
        dup: settings.dup_percent,
        reorder: settings.reorder_percent,
        corrupt: settings.corrupt_percent,
    };
    let mut world = World::new(settings.seed, shape, faults, 1 << 18);
    let inits = [0, 1].map(|host: usize| {
        let rnic = &mut world.hosts[host].rnic;
        rnic.cm().listen(SERVICE);
        let (pd, cq) = (rnic.alloc_pd(), rnic.create_cq(16));
        QpInit {
            max_send_wr: 1,
            max_recv_wr: 1,
            ..QpInit::new(pd, cq)
        }
    });
    let plans: Vec<Plan> = (0..settings.operations)
        .map(|_| {
            let active_host = dice.below(2) as usize;
            let after = |dice: &mut Dice| dice.log_uniform(2_000_000_000);
            let end_ns = match dice.below(3) {
                0 => [Some(after(&mut dice)), None],
                1 => [None, Some(after(&mut dice))],
                _ => [Some(after(&mut dice)), Some(after(&mut dice))],
            };
            let active_forgets = end_ns[1].is_some() && dice.one_in(4);
            let qpns = [0, 1].map(|role: usize| {
                let host = active_host ^ role;
                let qp = world.hosts[host].rnic.create_qp(inits[host]);
                qp.expect("there are QPNs")
            });
            Plan {
                active_host,
                unknown_service: dice.one_in(8),
                passive_rejects: dice.one_in(6),
                active_rejects: dice.one_in(10),
                decision_ns: if dice.one_in(2) {
                    0
                } else {
                    dice.log_uniform(1_000_000_000)
                },
                end_ns,
                active_forgets,
                qpns,
            }
        })
        .collect();
    for connection in 0..plans.len() as u32 {
        let delay = dice.below(3_000_000_000);
        world.call_back(delay, tag(ASK, 0, connection));
    }
    let mut run = Run {
        world,
        plans,
        sides: HashMap::new(),
        loss_percent: settings.loss_percent + settings.corrupt_percent,
    };
    let mut report = Report::new(settings);
    report.address_family = if shape.ipv6 { "IPv6" } else { "IPv4" };
    report.latency_ns = shape.latency_ns;
    report.posted = u64::from(settings.operations);
    report.violation = run.drive().err();
    report.virtual_ns = run.world.now.0;
    report.steps = run.world.steps;
    report.link(&run.world.carried);
    report
}

impl Run {
    fn drive(&mut self) -> Result<(), String> {
        loop {
            match self.world.step() {
                Step::Rest => break,
                Step::Moved => {}
                Step::User(tag) => self.user(tag >> 40, (tag >> 32 & 1) as usize, tag as u32),
            }
            for host in 0..2 {
                while let Some(event) = self.world.hosts[host].cm_events.pop_front() {
                    self.event(host, &event)
                        .map_err(|what| format!("host {host}: {what} ({event:?})"))?;
                }
            }
            if self.world.steps > 100_000 + 20_000 * self.plans.len() as u64 {
                return Err("connections do not come to rest".to_owned());
            }
        }
        for host in 0..2 {
            let cm = self.world.hosts[host].rnic.cm();
            if !cm.is_empty() {
                return Err(format!("host {host}: {} connections are left over", cm.len()));
            }
            if self.world.hosts[host].rnic.poll_timeout().is_some() {
                return Err(format!("host {host}: a timer is left over"));
            }
        }
        match self.sides.iter().find(|(_, side)| side.seen != Seen::Over) {
            Some((at, side)) => Err(format!("{at:?}: {side:?}: never told how it ended")),
            None => Ok(()),
        }
    }

    fn endpoint(&self, plan: &Plan, role: usize) -> Endpoint {
        Endpoint {
            transport: Transport::Rc,
            qpn: plan.qpns[role],
            starting_psn: Psn::new(plan.qpns[role].value() ^ 0x55),
            responder_resources: 4,
            initiator_depth: 4,
            rnr_retry_count: 7,
            retry_count: 7,
            srq: false,
            ack_timeout: 14,
            path_mtu: PathMtu::Bytes1024,
            traffic_class: 0,
            extensions: None,
        }
    }

    fn user(&mut self, what: u64, host: usize, id: u32) {
        if what == ASK {
            let connection = id as usize;
            let plan = self.plans[connection];
            let (host, local) = (plan.active_host, self.endpoint(&plan, 0));
            let service = if plan.unknown_service { NOBODYS } else { SERVICE };
            let peer = self.world.hosts[1 - host].address;
            let data = id.to_be_bytes();
            let id = self.world.with(host, |rnic, now| {
                rnic.cm().connect(now, peer, service, None, &local, &data)
            });
            let side = Side {
                connection,
                passive: false,
                seen: Seen::Asked,
            };
            self.sides.insert((host, id.expect("there are ids")), side);
            return;
        }
        let id = CmId(id);
        let Some(side) = self.sides.get_mut(&(host, id)) else {
            return;
        };
        if side.seen == Seen::Over {
            return;
        }
        let (plan, connection) = (self.plans[side.connection], side.connection as u32);
        match (what, side.passive) {
            (DECIDE, true) if plan.passive_rejects => {
                side.seen = Seen::Over;
                self.world.with(host, |rnic, now| {
                    rnic.cm()
                        .reject(now, id, RejReason::CONSUMER, &connection.to_be_bytes());
                });
            }
            (DECIDE, true) => {
                let local = self.endpoint(&plan, 1);
                let accepted = self.world.with(host, |rnic, now| {
                    rnic.cm().accept(now, id, &local, &(!connection).to_be_bytes())
                });
                // A newer request of the same QP may have displaced it.
                if accepted.is_err()
                    && let Some(side) = self.sides.get_mut(&(host, id))
                {
                    side.seen = Seen::Over;
                }
            }
            (DECIDE, false) if plan.active_rejects => {
                side.seen = Seen::Over;
                self.world.with(host, |rnic, now| {
                    rnic.cm().reject(now, id, RejReason::CONSUMER, &[])
                });
            }
            (DECIDE, false) => {
                side.seen = Seen::Open;
                self.world.with(host, |rnic, _| rnic.cm().establish(id));
                self.plan_end(host, id, &plan, 0);
            }
            (_, false) if plan.active_forgets => {
                side.seen = Seen::Over;
                self.world.with(host, |rnic, _| rnic.cm().destroy(id));
            }
            _ => self.world.with(host, |rnic, now| rnic.cm().disconnect(now, id)),
        }
    }

    fn plan_end(&mut self, host: usize, id: CmId, plan: &Plan, role: usize) {
        if let Some(delay) = plan.end_ns[role] {
            self.world.call_back(delay, tag(END, host, id.0));
        }
    }

    fn event(&mut self, host: usize, event: &CmEvent) -> Result<(), String> {
        let number = |data: &[u8]| data.first_chunk().map_or(0, |n| u32::from_be_bytes(*n));
        if let CmEvent::Request {
            id,
            service,
            remote,
            private_data,
            ..
        } = event
        {
            let connection = number(private_data) as usize;
            let Some(plan) = self.plans.get(connection) else {
                return Err("a request that nobody made".to_owned());
            };
            if *service != SERVICE || plan.active_host == host || remote.qpn != plan.qpns[0] {
                return Err("a request that differs from what was asked".to_owned());
            }
            // A repeated request may come when its connection has ended already; never while that lives.
            let alive =
                |side: &&Side| side.connection == connection && side.passive && side.seen != Seen::Over;
            if self.sides.values().any(|side| alive(&side)) {
                return Err("a second request for a connection that lives".to_owned());
            }
            let side = Side {
                connection,
                passive: true,
                seen: Seen::Asked,
            };
            let delay = plan.decision_ns;
            self.sides.insert((host, *id), side);
            self.world.call_back(delay, tag(DECIDE, host, id.0));
            return Ok(());
        }
        let (CmEvent::Reply { id, .. }
        | CmEvent::Established { id }
        | CmEvent::Rejected { id, .. }
        | CmEvent::Unreachable { id }
        | CmEvent::Disconnected { id }
        | CmEvent::SidrRequest { id, .. }
        | CmEvent::SidrReply { id, .. }
        | CmEvent::Request { id, .. }) = event;
        let Some(side) = self.sides.get_mut(&(host, *id)) else {
            return Err("an event of an unknown connection".to_owned());
        };
        if side.seen == Seen::Over {
            return Err("an event of a connection that is over".to_owned());
        }
        let connection = side.connection as u32;
        let plan = self.plans[side.connection];
        match event {
            CmEvent::Reply {
                remote, private_data, ..
            } => {
                if side.passive || remote.qpn != plan.qpns[1] || number(private_data) != !connection {
                    return Err("a reply that differs from what was answered".to_owned());
                }
                let delay = plan.decision_ns / 2;
                self.world.call_back(delay, tag(DECIDE, host, id.0));
            }
            CmEvent::Established { .. } => {
                if !side.passive || side.seen != Seen::Asked {
                    return Err("established twice, or on the active side".to_owned());
                }
                side.seen = Seen::Open;
                self.plan_end(host, *id, &plan, 1);
            }
            CmEvent::Rejected {
                reason, private_data, ..
            } => {
                side.seen = Seen::Over;
                let expected = if side.passive {
                    // By the other user, or since the other side has gone.
                    [RejReason::CONSUMER, RejReason::INVALID_COMM_ID].contains(reason)
                } else if plan.unknown_service {
                    *reason == RejReason::INVALID_SERVICE_ID
                } else {
                    plan.passive_rejects
                        && *reason == RejReason::CONSUMER
                        && number(private_data) == connection
                };
                if !expected {
                    return Err("rejected for another reason".to_owned());
                }
            }
            CmEvent::Unreachable { .. } => {
                side.seen = Seen::Over;
                // Seven tries each way: below this loss it is never seen.
                if self.loss_percent < 5.0 {
                    return Err("unreachable".to_owned());
                }
                // The other side may take the connection for open, and waits for this one to end it.
                let others = self
                    .sides
                    .iter()
                    .filter(|(_, side)| side.connection == connection as usize);
                let others: Vec<(usize, CmId)> = others.map(|(at, _)| *at).collect();
                for (host, id) in others {
                    self.world.call_back(20_000_000_000, tag(END, host, id.0));
                }
            }
            CmEvent::Disconnected { .. } => side.seen = Seen::Over,
            CmEvent::Request { .. } | CmEvent::SidrRequest { .. } | CmEvent::SidrReply { .. } => {}
        }
        Ok(())
    }
}

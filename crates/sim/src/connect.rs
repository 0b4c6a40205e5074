//! Connection management under faults. Users establish, reject or withdraw connections and resolutions, leave them undecided,
//! end them from either side or from both, or forget them on one side. Users take their time, and hosts restart.
//!
//! Invariants: every user is notified exactly once of how its connection ended; private data arrives unchanged; at the end no
//! connection, no resting id and no timer is left. Without restarts, and with losses that the retries are made for, both ends
//! of a connection also agree on its state, and no peer is reported unreachable.

use std::collections::{BTreeMap, BTreeSet};

use rdmux_rnic::Time;
use rdmux_rnic::cm::{CmEvent, CmId, Endpoint};
use rdmux_wire::cm::{IpAddressing, RejReason, ServiceId, SidrStatus};
use rdmux_wire::roce::{PathMtu, Transport};
use rdmux_wire::{Psn, Qpn};

use crate::dice::Dice;
use crate::world::{Faults, Shape, Step, World};
use crate::{Report, Settings};

const SERVICE: ServiceId = ServiceId::tcp(7174);
const DATAGRAMS: ServiceId = ServiceId::udp(7174);
const NOBODYS: ServiceId = ServiceId::tcp(7175);
const QKEY: u32 = 0x0123_4567;
const SECOND: u64 = 1_000_000_000;
/// Up to this loss, in percent, seven tries each way are enough: one in ten million connections would fail.
const RELIABLE_LOSS: f64 = 5.0;

/// A disconnect that the peer has not answered by then gets no answer: the retries run out soon after.
const ANSWERED_NS: u64 = 8 * SECOND;

/// Answer of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    Yes,
    No,
    /// The passive user never decides; the active one withdraws its request before it is answered, or ends its connection
    /// instead of establishing it.
    Neither,
}

/// Actions that both users will take on a connection.
#[derive(Clone, Copy, Debug)]
struct Plan {
    active_host: usize,
    /// Set when the active side asks for the QP of a datagram service instead.
    resolution: bool,
    /// Set when no user listens on the requested service.
    unknown_service: bool,
    with_addressing: bool,
    transport: Transport,
    /// Decisions of the active and the passive user; `decision_ns`: the time that each takes.
    decisions: [Decision; 2],
    decision_ns: [u64; 2],
    /// Time after establishment at which each side (active, passive) ends the connection; `None` leaves it to the other side.
    end_ns: [Option<u64>; 2],
    /// Set when the active side forgets the connection instead of ending it.
    active_forgets: bool,
    qpns: [Qpn; 2],
}

/// Progress of a side.
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
const WITHDRAW: u64 = 3;
const RESTART: u64 = 4;
const PATH: u64 = 5;

fn tag(what: u64, host: usize, id: u32) -> u64 {
    what << 40 | (host as u64) << 32 | u64::from(id)
}

/// Message that carries private data.
#[derive(Clone, Copy, Debug)]
enum Carrier {
    Req,
    Rep,
    Rej,
    RejOfRep,
    SidrReq,
    SidrRep,
}

/// Private data of full size, different for each connection and message; it begins with the connection's number.
fn private_data(connection: usize, carrier: Carrier, len: usize) -> Vec<u8> {
    let mut data = (connection as u32).to_be_bytes().to_vec();
    let mut value = connection as u8 ^ (carrier as u8) << 5;
    while data.len() < len {
        value = value.wrapping_mul(5).wrapping_add(73);
        data.push(value | 1);
    }
    data
}

struct Run {
    world: World,
    plans: Vec<Plan>,
    sides: BTreeMap<(usize, u32), Side>,
    /// Connections that a restart may have cut.
    disturbed: BTreeSet<usize>,
    /// By side: the time since which it waits for the peer to agree to the end.
    ending: BTreeMap<(usize, u32), Time>,
    is_lossy: bool,
}

fn draw_plan(dice: &mut Dice, number: u32) -> Plan {
    let decision = |dice: &mut Dice, no: u64, neither: u64| match () {
        () if dice.one_in(no) => Decision::No,
        () if dice.one_in(neither) => Decision::Neither,
        () => Decision::Yes,
    };
    let thought = |dice: &mut Dice| match dice.below(8) {
        0..5 => 0,
        5..7 => dice.log_uniform(SECOND),
        _ => dice.log_uniform(30 * SECOND),
    };
    let after = |dice: &mut Dice| Some(dice.log_uniform(2 * SECOND));
    let end_ns = match dice.below(5) {
        0 => [after(dice), None],
        1 => [None, after(dice)],
        2 => [None, None],
        _ => [after(dice), after(dice)],
    };
    // Sometimes the QPNs of an earlier connection, as after a restart.
    let qpn = if dice.one_in(8) { number / 2 } else { number };
    let active_host = dice.below(2) as usize;
    let qpns = [active_host, 1 - active_host].map(|host| Qpn::new((host as u32 + 1) << 16 | (16 + qpn)));
    Plan {
        active_host,
        resolution: dice.one_in(4),
        unknown_service: dice.one_in(8),
        with_addressing: dice.one_in(2),
        transport: dice.pick(&[Transport::Rc, Transport::Rc, Transport::Uc, Transport::Xrc]),
        decisions: [decision(dice, 10, 10), decision(dice, 6, 10)],
        decision_ns: [thought(dice), thought(dice)],
        end_ns,
        active_forgets: end_ns[1].is_some() && dice.one_in(4),
        qpns,
    }
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
        one_machine: settings.one_machine,
    };
    let faults = Faults {
        loss: settings.loss_percent,
        dup: settings.dup_percent,
        reorder: settings.reorder_percent,
        corrupt: settings.corrupt_percent,
    };
    let mut world = World::new(settings.seed, shape, faults, 1 << 18);
    let plans: Vec<Plan> = (0..settings.operations)
        .map(|number| draw_plan(&mut dice, number))
        .collect();
    for connection in 0..plans.len() as u32 {
        world.call_back(dice.below(3 * SECOND), tag(ASK, 0, connection));
    }
    if dice.one_in(3) {
        for _ in 0..dice.between(1, 3) {
            let host = dice.below(2) as usize;
            world.call_back(dice.below(5 * SECOND), tag(RESTART, host, 0));
        }
    }
    if settings.path_changes {
        for _ in 0..dice.between(1, 5) {
            let latency_ns = dice.log_uniform(10_000_000) as u32;
            world.call_back(dice.below(5 * SECOND), tag(PATH, 0, latency_ns));
        }
    }
    let mut run = Run {
        world,
        plans,
        sides: BTreeMap::new(),
        disturbed: BTreeSet::new(),
        ending: BTreeMap::new(),
        is_lossy: settings.loss_percent + settings.corrupt_percent >= RELIABLE_LOSS,
    };
    let mut report = Report::new(settings);
    report.address_family = if shape.ipv6 { "IPv6" } else { "IPv4" };
    report.latency_ns = shape.latency_ns;
    report.posted = u64::from(settings.operations);
    report.violation = run.drive().err();
    report.world(&run.world);
    report
}

impl Run {
    fn drive(&mut self) -> Result<(), String> {
        for host in 0..2 {
            self.listen(host);
        }
        self.drive_to_rest()?;
        self.check_opinions()?;
        // Connections that neither side ended, or whose other side was lost.
        let open: Vec<(usize, u32)> = self
            .sides
            .iter()
            .filter(|(_, side)| side.seen == Seen::Open)
            .map(|(at, _)| *at)
            .collect();
        for (host, id) in open {
            self.disconnect(host, CmId(id));
        }
        self.drive_to_rest()?;
        for host in 0..2 {
            let rnic = &mut self.world.hosts[host].rnic;
            let (left, resting) = (rnic.cm().len(), rnic.cm().resting());
            if left + resting > 0 || rnic.poll_timeout().is_some() {
                return Err(format!(
                    "host {host}: leftovers: {left} connections, {resting} idle, timer at {:?}",
                    rnic.poll_timeout()
                ));
            }
        }
        match self.sides.iter().find(|(_, side)| side.seen != Seen::Over) {
            Some((at, side)) => Err(format!("{at:?}: {side:?}: got no event for its end")),
            None => Ok(()),
        }
    }

    fn drive_to_rest(&mut self) -> Result<(), String> {
        loop {
            match self.world.step() {
                Step::Rest => return Ok(()),
                Step::Moved => {}
                Step::User(tag) => self.user(tag >> 40, (tag >> 32 & 1) as usize, tag as u32),
            }
            for host in 0..2 {
                while let Some(event) = self.world.hosts[host].cm_events.pop_front() {
                    self.event(host, &event)
                        .map_err(|what| format!("host {host}: {what} ({event:?})"))?;
                }
            }
            if self.world.steps > 200_000 + 40_000 * self.plans.len() as u64 {
                return Err("connections do not become idle".to_owned());
            }
        }
    }

    /// Checks that, once nothing is in flight, every connection is open at both ends or at neither.
    fn check_opinions(&self) -> Result<(), String> {
        if let Some((at, side)) = self.sides.iter().find(|(_, side)| side.seen == Seen::Asked) {
            return Err(format!("{at:?}: {side:?}: the connection request had no result"));
        }
        for connection in (0..self.plans.len()).filter(|n| self.is_calm(*n)) {
            let open = |side: &&Side| side.connection == connection && side.seen == Seen::Open;
            if self.sides.values().filter(open).count() == 1 {
                return Err(format!("connection {connection} is open at one end"));
            }
        }
        Ok(())
    }

    /// Returns whether a connection's messages get through, sooner or later.
    fn is_calm(&self, connection: usize) -> bool {
        !self.is_lossy && !self.disturbed.contains(&connection)
    }

    fn listen(&mut self, host: usize) {
        self.world.with(host, |rnic, _| {
            rnic.cm().listen(SERVICE);
            rnic.cm().listen(DATAGRAMS);
        });
    }

    fn endpoint(&self, plan: &Plan, role: usize) -> Endpoint {
        Endpoint {
            transport: plan.transport,
            qpn: plan.qpns[role],
            starting_psn: Psn::new(plan.qpns[role].value() ^ 0x55),
            responder_resources: 4,
            initiator_depth: 4,
            rnr_retry_count: 7,
            retry_count: 7,
            srq: plan.qpns[role].value() & 1 != 0,
            ack_timeout: 14,
            path_mtu: PathMtu::Bytes1024,
            traffic_class: 0,
            extensions: None,
            plain: false,
        }
    }

    /// Returns whether `remote` is the endpoint that the other side sent, in the fields that a REP carries too.
    fn is_told(&self, remote: &Endpoint, plan: &Plan, role: usize) -> bool {
        let told = self.endpoint(plan, role);
        (remote.transport, remote.qpn, remote.srq, remote.starting_psn)
            == (told.transport, told.qpn, told.srq, told.starting_psn)
    }

    fn addressing(&self, plan: &Plan) -> Option<IpAddressing> {
        let [src, dst] = [plan.active_host, 1 - plan.active_host].map(|host| self.world.hosts[host].address);
        plan.with_addressing.then_some(IpAddressing {
            src_port: 7,
            src,
            dst,
        })
    }

    fn user(&mut self, what: u64, host: usize, id: u32) {
        match what {
            ASK => return self.ask(id as usize),
            RESTART => return self.restart(host),
            PATH => return self.world.change_latency(id.into()),
            _ => {}
        }
        let Some(side) = self.sides.get(&(host, id)) else {
            return;
        };
        let (connection, passive, seen) = (side.connection, side.passive, side.seen);
        let plan = self.plans[connection];
        let id = CmId(id);
        match what {
            _ if seen == Seen::Over => {}
            DECIDE if plan.resolution => self.answer(host, id, connection),
            DECIDE if passive => self.decide_request(host, id, connection),
            DECIDE => self.decide_reply(host, id, connection),
            WITHDRAW if seen == Seen::Asked => {
                self.world.with(host, |rnic, now| rnic.cm().disconnect(now, id));
                self.over_unless_it_is_ending(host, id);
            }
            END if !passive && plan.active_forgets => {
                self.set_seen(host, id, Seen::Over);
                self.world.with(host, |rnic, _| rnic.cm().destroy(id));
            }
            END => self.disconnect(host, id),
            _ => {}
        }
    }

    fn disconnect(&mut self, host: usize, id: CmId) {
        self.ending.entry((host, id.0)).or_insert(self.world.now);
        self.world.with(host, |rnic, now| rnic.cm().disconnect(now, id));
    }

    fn ask(&mut self, connection: usize) {
        let plan = self.plans[connection];
        let host = plan.active_host;
        let (local, addressing) = (self.endpoint(&plan, 0), self.addressing(&plan));
        let peer = self.world.hosts[1 - host].address;
        let head = addressing.map_or(0, |_| IpAddressing::LEN);
        let id = self.world.with(host, |rnic, now| {
            let cm = rnic.cm();
            if plan.resolution {
                let service = if plan.unknown_service { NOBODYS } else { DATAGRAMS };
                let data = private_data(connection, Carrier::SidrReq, 216 - head);
                cm.resolve(now, peer, service, addressing, &data)
            } else {
                let service = if plan.unknown_service { NOBODYS } else { SERVICE };
                let data = private_data(connection, Carrier::Req, 92 - head);
                cm.connect(now, peer, service, addressing, &local, &data)
            }
        });
        let id = id.expect("there are ids");
        let side = Side {
            connection,
            passive: false,
            seen: Seen::Asked,
        };
        self.sides.insert((host, id.0), side);
        if plan.decisions[0] == Decision::Neither {
            self.world
                .call_back(plan.decision_ns[0], tag(WITHDRAW, host, id.0));
        }
    }

    fn restart(&mut self, host: usize) {
        self.world.restart(host);
        self.listen(host);
        // Any connection that has begun may have messages in flight or a side that is lost.
        let begun: Vec<usize> = self.sides.values().map(|side| side.connection).collect();
        self.disturbed.extend(begun);
        self.sides.retain(|(at, _), _| *at != host);
    }

    fn answer(&mut self, host: usize, id: CmId, connection: usize) {
        let status = match self.plans[connection].decisions[1] {
            Decision::Yes => SidrStatus::VALID,
            Decision::No => SidrStatus::REJECT,
            Decision::Neither => return,
        };
        self.set_seen(host, id, Seen::Over);
        let qpn = self.plans[connection].qpns[1];
        let data = private_data(connection, Carrier::SidrRep, 136);
        // The answer fails when the user has not decided in time.
        let _ = self.world.with(host, |rnic, now| {
            rnic.cm().answer(now, id, status, qpn, QKEY, &data)
        });
    }

    fn decide_request(&mut self, host: usize, id: CmId, connection: usize) {
        let plan = self.plans[connection];
        match plan.decisions[1] {
            Decision::Neither => {}
            Decision::No => {
                self.set_seen(host, id, Seen::Over);
                let data = private_data(connection, Carrier::Rej, 148);
                self.world.with(host, |rnic, now| {
                    rnic.cm().reject(now, id, RejReason::CONSUMER, &data);
                });
            }
            Decision::Yes => {
                let local = self.endpoint(&plan, 1);
                let data = private_data(connection, Carrier::Rep, 196);
                let accepted = self
                    .world
                    .with(host, |rnic, now| rnic.cm().accept(now, id, &local, &data));
                // A newer request of the same QP may have displaced it.
                if accepted.is_err() {
                    self.set_seen(host, id, Seen::Over);
                }
            }
        }
    }

    fn decide_reply(&mut self, host: usize, id: CmId, connection: usize) {
        match self.plans[connection].decisions[0] {
            // The user withdraws at a time of its own, or has done so already.
            Decision::Neither => {
                self.set_seen(host, id, Seen::Open);
                self.disconnect(host, id);
            }
            Decision::No => {
                let data = private_data(connection, Carrier::RejOfRep, 148);
                self.world.with(host, |rnic, now| {
                    rnic.cm().reject(now, id, RejReason::CONSUMER, &data);
                });
                self.over_unless_it_is_ending(host, id);
            }
            Decision::Yes => {
                self.set_seen(host, id, Seen::Open);
                self.world.with(host, |rnic, _| rnic.cm().establish(id));
                self.plan_end(host, id, connection, 0);
            }
        }
    }

    /// Marks a rejected request or reply as over, because no event follows it, unless its end was in progress already.
    fn over_unless_it_is_ending(&mut self, host: usize, id: CmId) {
        let is_ending = self.world.hosts[host].rnic.cm().peering(id).is_some();
        self.set_seen(host, id, if is_ending { Seen::Open } else { Seen::Over });
    }

    fn set_seen(&mut self, host: usize, id: CmId, seen: Seen) {
        if let Some(side) = self.sides.get_mut(&(host, id.0)) {
            side.seen = seen;
        }
    }

    fn plan_end(&mut self, host: usize, id: CmId, connection: usize, role: usize) {
        if let Some(delay) = self.plans[connection].end_ns[role] {
            self.world.call_back(delay, tag(END, host, id.0));
        }
    }

    /// Returns the plan of the connection that an arriving request belongs to.
    fn requested(
        &mut self,
        host: usize,
        id: CmId,
        resolution: bool,
        told: (Option<IpAddressing>, &[u8]),
    ) -> Result<Plan, String> {
        let number = |data: &[u8]| data.first_chunk().map_or(0, |n| u32::from_be_bytes(*n));
        let connection = number(told.1) as usize;
        let Some(plan) = self.plans.get(connection).copied() else {
            return Err("a request without a requester".to_owned());
        };
        let carrier = if resolution {
            Carrier::SidrReq
        } else {
            Carrier::Req
        };
        let addressing = self.addressing(&plan);
        let differs = plan.resolution != resolution
            || plan.unknown_service
            || plan.active_host == host
            || told.0 != addressing
            || told.1 != private_data(connection, carrier, told.1.len());
        if differs {
            return Err("a request with other parameters than the requester's".to_owned());
        }
        // A repeated request may arrive after its connection has ended, but never while the connection lives.
        let alive = |side: &&Side| side.connection == connection && side.passive && side.seen != Seen::Over;
        if self.sides.values().any(|side| alive(&side)) {
            return Err("a second request for a connection that lives".to_owned());
        }
        let connected = |side: &&Side| {
            let peer = self.plans[side.connection].qpns[usize::from(!side.passive)];
            side.seen == Seen::Open && !resolution && peer == plan.qpns[0]
        };
        let here = self.sides.iter().filter(|((at, _), _)| *at == host);
        if here.map(|(_, side)| side).any(|side| connected(&side)) {
            return Err("a request by a QP that is connected".to_owned());
        }
        let side = Side {
            connection,
            passive: true,
            seen: Seen::Asked,
        };
        self.sides.insert((host, id.0), side);
        self.world.call_back(plan.decision_ns[1], tag(DECIDE, host, id.0));
        Ok(plan)
    }

    fn event(&mut self, host: usize, event: &CmEvent) -> Result<(), String> {
        match event {
            CmEvent::Request {
                id,
                service,
                addressing,
                remote,
                private_data,
                ..
            } => {
                let plan = self.requested(host, *id, false, (*addressing, private_data))?;
                if *service != SERVICE || !self.is_told(remote, &plan, 0) {
                    return Err("a request with other parameters than the requester's".to_owned());
                }
                return Ok(());
            }
            CmEvent::SidrRequest {
                id,
                addressing,
                private_data,
                ..
            } => {
                self.requested(host, *id, true, (*addressing, private_data))?;
                return Ok(());
            }
            _ => {}
        }
        let (CmEvent::Reply { id, .. }
        | CmEvent::Established { id }
        | CmEvent::Rejected { id, .. }
        | CmEvent::Unreachable { id }
        | CmEvent::Disconnected { id }
        | CmEvent::SidrRequest { id, .. }
        | CmEvent::SidrReply { id, .. }
        | CmEvent::Request { id, .. }) = event;
        let Some(side) = self.sides.get(&(host, id.0)) else {
            return Err("an event of an unknown connection".to_owned());
        };
        if side.seen == Seen::Over {
            return Err("an event of a connection that is over".to_owned());
        }
        let (connection, passive, seen) = (side.connection, side.passive, side.seen);
        let plan = self.plans[connection];
        let is_right = match event {
            CmEvent::Reply {
                remote,
                private_data: data,
                ..
            } => {
                self.world.call_back(plan.decision_ns[0], tag(DECIDE, host, id.0));
                !passive
                    && self.is_told(remote, &plan, 1)
                    && *data == private_data(connection, Carrier::Rep, 196)
            }
            CmEvent::Established { .. } => {
                self.set_seen(host, *id, Seen::Open);
                self.plan_end(host, *id, connection, 1);
                passive && seen == Seen::Asked
            }
            CmEvent::Rejected {
                reason,
                private_data: data,
                ..
            } => {
                self.set_seen(host, *id, Seen::Over);
                self.is_fair(connection, passive, *reason, data)
            }
            CmEvent::Unreachable { .. } => {
                self.set_seen(host, *id, Seen::Over);
                // A resolving side gets no MRA: while the user decides, its retries run out.
                let slow = plan.decisions[1] == Decision::Neither || plan.decision_ns[1] > SECOND / 20;
                !self.is_calm(connection) || plan.resolution && slow
            }
            CmEvent::Disconnected { .. } => {
                self.set_seen(host, *id, Seen::Over);
                let since = self.ending.remove(&(host, id.0));
                let in_time = since.is_none_or(|since| self.world.now.since_ns(since) < ANSWERED_NS);
                in_time || !self.is_calm(connection)
            }
            CmEvent::SidrReply {
                status,
                qpn,
                qkey,
                private_data: data,
                ..
            } => {
                self.set_seen(host, *id, Seen::Over);
                let expected = match plan.decisions[1] {
                    _ if plan.unknown_service => SidrStatus::UNSUPPORTED,
                    Decision::Yes => SidrStatus::VALID,
                    _ => SidrStatus::REJECT,
                };
                let told = plan.unknown_service
                    || (*qpn, *qkey) == (plan.qpns[1], QKEY)
                        && *data == private_data(connection, Carrier::SidrRep, 136);
                *status == expected && told
            }
            CmEvent::Request { .. } | CmEvent::SidrRequest { .. } => true,
        };
        match is_right {
            true => Ok(()),
            false => Err(format!(
                "connection {connection}: does not match the actions of its users: {plan:?}"
            )),
        }
    }

    /// Returns whether a rejection can have this reason.
    fn is_fair(&self, connection: usize, passive: bool, reason: RejReason, data: &[u8]) -> bool {
        let plan = self.plans[connection];
        let by_user = |decision, carrier| {
            reason == RejReason::CONSUMER
                && decision == Decision::No
                && data == private_data(connection, carrier, 148)
        };
        if !self.is_calm(connection) {
            return true;
        }
        // Sent by a peer that still knows the QPN of an earlier connection, or by one that has gone for that reason.
        let same_qpn = |other: &&Plan| other.qpns.iter().any(|qpn| plan.qpns.contains(qpn));
        if [RejReason::STALE_CONNECTION, RejReason::INVALID_COMM_ID].contains(&reason)
            && self.plans.iter().filter(same_qpn).count() > 1
        {
            return true;
        }
        if passive {
            return by_user(plan.decisions[0], Carrier::RejOfRep)
                // The active user withdrew; the reason depends on what the peer still knew of the connection.
                || plan.decisions[0] == Decision::Neither
                    && [RejReason::TIMEOUT, RejReason::INVALID_COMM_ID].contains(&reason)
                // The rejection by the user was lost.
                || plan.decisions[0] == Decision::No && reason == RejReason::INVALID_COMM_ID
                || plan.active_forgets && reason == RejReason::INVALID_COMM_ID;
        }
        match plan.decisions[1] {
            _ if plan.unknown_service => reason == RejReason::INVALID_SERVICE_ID,
            Decision::No => by_user(Decision::No, Carrier::Rej),
            Decision::Neither => reason == RejReason::TIMEOUT,
            Decision::Yes => false,
        }
    }
}

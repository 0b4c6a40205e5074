//! A run: the schedule of events, and the checks after each step.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rdmux_push::server::{OperationId, ServerEvent, Service, Shared};
use rdmux_push::{Access, Domain, Key, Name, Region};
use rdmux_rnic::{Qpn, Status};

use super::checker::{Checker, Right};
use super::client::Client;
use super::driver::{CLIENT, Came, OWN_NS_MAX, SERVER, SimDriver, Tag, WAKE_NS_MAX};
use super::{Defect, Report, Settings};
use crate::dice::Dice;
use crate::world::{Faults, Shape, Step, World};

/// Bytes of the region: few, so that clients compete for them.
pub(super) const REGION_BYTES: u64 = 2048;
/// Maximum number of steps; a run that takes more is a violation.
const STEPS_MAX: u64 = 2_000_000;
const MAPPINGS_MAX: u32 = 64;
/// Messages of a client that may be without an answer.
const MESSAGES_MAX: u16 = 14;
/// Shortest and longest break timeouts.
const BREAK_NS: [u64; 4] = [2_000_000, 20_000_000, 200_000_000, 2_000_000_000];

/// An operation of the server's own that waits.
#[derive(Debug)]
struct Own {
    granted: mpsc::Receiver<OperationId>,
    access: Access,
    share: Access,
    until_ns: u64,
}

pub(super) struct Run<'a> {
    settings: &'a Settings,
    pub(super) dice: Dice,
    pub(super) service: Service<SimDriver>,
    pub(super) checker: Arc<Checker>,
    pub(super) name: Name,
    pub(super) break_ns: u64,
    pub(super) clients: Vec<Client>,
    /// Client of each queue pair at the clients' host.
    pub(super) by_qpn: BTreeMap<Qpn, usize>,
    pub(super) connections: u64,
    /// By number of a FLUSH: the pushes before it.
    pub(super) flushes: BTreeMap<u64, Vec<u64>>,
    pub(super) flushes_so_far: u64,
    /// Completions that the server's thread has not looked at.
    inbox: Vec<rdmux_rnic::WorkCompletion>,
    timeout_planned: Option<Duration>,
    /// In one of so many steps, something that is on its way lands.
    stirs: u64,
    own: Vec<Own>,
    /// Number of servers so far: an event scheduled for one is not for the next.
    life: u64,
}

impl Run<'_> {
    pub(super) fn new(settings: &Settings) -> Run<'_> {
        let mut dice = Dice::new(settings.seed, 10);
        let shape = Shape {
            ipv6: dice.one_in(2),
            gso: dice.one_in(2),
            gro: dice.one_in(2),
            lazy_acks: dice.one_in(3),
            latency_ns: dice.log_uniform(1_000_000),
            flush_ns_max: 200_000,
            one_machine: false,
        };
        let faults = Faults {
            loss: settings.loss_percent,
            dup: settings.dup_percent,
            reorder: settings.reorder_percent,
            corrupt: 0.0,
        };
        let window_bytes = dice.pick(&[4 << 10, 16 << 10, 256 << 10]);
        let world = World::new(settings.seed, shape, faults, window_bytes);
        let checker = Arc::new(Checker::new(REGION_BYTES));
        let name = Name::new("r").expect("a name");
        // With a domain that waits for a medium, ordinary operations take time.
        let domain = dice.pick(&[Domain::File, Domain::File, Domain::WholeSystem]);
        let region = Region::new(name.clone(), checker.clone(), domain, false);
        let break_ns = dice.pick(&BREAK_NS);
        let shared = Arc::new(Shared {
            key: Key::new([7; 32]),
            regions: vec![Arc::new(region)],
            keepalive_ms: 5_000,
            mappings_max: MAPPINGS_MAX,
            messages_max: MESSAGES_MAX,
        });
        let driver = SimDriver::new(
            world,
            checker.clone(),
            Dice::new(settings.seed, 11),
            settings.defect,
            break_ns,
            window_bytes,
        );
        let service = Service::new(driver, shared, Duration::from_nanos(break_ns));
        let stirs = dice.pick(&[1, 10, 100]);
        let clients = (0..dice.between(2, 4)).map(|n| {
            let mut name = [n as u8; 16];
            name[0] = 1;
            Client::new(name, dice.one_in(2), settings.acts)
        });
        let clients = clients.collect();
        Run {
            settings,
            dice,
            service,
            checker,
            name,
            break_ns,
            clients,
            by_qpn: BTreeMap::new(),
            connections: 0,
            flushes: BTreeMap::new(),
            flushes_so_far: 0,
            inbox: Vec::new(),
            timeout_planned: None,
            stirs,
            own: Vec::new(),
            life: 0,
        }
    }

    pub(super) fn driver(&mut self) -> &mut SimDriver {
        self.service.driver_mut()
    }

    pub(super) fn now(&self) -> Duration {
        Duration::from_nanos(self.service.driver().world.now.0)
    }

    pub(super) fn run(mut self) -> Report {
        let violation = self.lives().err();
        let driver = self.service.driver();
        let mut counts = driver.counts;
        counts.drained = self.checker.drained();
        counts.strangers += driver.world.hosts[SERVER].rnic.counters().no_qp;
        let carried = driver.world.carried;
        counts.packets = carried.packets;
        counts.lost = carried.lost;
        counts.duplicated = carried.duplicated;
        counts.reordered = carried.reordered;
        counts.steps = driver.world.steps;
        Report {
            settings: *self.settings,
            violation,
            counts,
        }
    }

    fn lives(&mut self) -> Result<(), String> {
        for at in 0..self.clients.len() as u64 {
            let delay = self.dice.log_uniform(self.break_ns);
            self.driver().later(delay, Tag::Act(at));
        }
        let delay = self.dice.log_uniform(4 * self.break_ns);
        self.driver().later(delay, Tag::Fault);
        while self.step()? {}
        self.checker.drain_all();
        self.checker.finish();
        self.look()?;
        if !self.own.is_empty() || !self.service.driver().is_quiet() {
            return Err("a request waits without end".to_owned());
        }
        Ok(())
    }

    fn step(&mut self) -> Result<bool, String> {
        let step = self.driver().world.step();
        if let Step::User(tag) = step {
            self.user(Tag::unpack(tag))?;
        }
        if self.dice.one_in(self.stirs) {
            self.checker.stir(&mut self.dice);
        }
        let cqs = self.driver().cqs;
        let mut came = false;
        while let Some(wc) = self.driver().world.poll_cq(SERVER, cqs[SERVER]) {
            came |= self.inbox.is_empty();
            self.inbox.push(wc);
        }
        if came {
            let delay = self.dice.log_uniform(WAKE_NS_MAX);
            self.driver().later(delay, Tag::Wake);
        }
        while let Some(wc) = self.driver().world.poll_cq(CLIENT, cqs[CLIENT]) {
            self.client_completes(&wc);
        }
        self.look()?;
        Ok(step != Step::Rest)
    }

    /// Looks for violations.
    fn look(&mut self) -> Result<(), String> {
        if let Some(what) = self.checker.violation() {
            return Err(what);
        }
        let driver = self.service.driver_mut();
        driver.check_waits();
        let now = driver.world.now.0;
        if let Some(own) = self.own.iter().find(|own| own.until_ns < now) {
            return Err(format!(
                "an operation of the server waits {} ms longer than the breaks before it",
                (now - own.until_ns) / 1_000_000
            ));
        }
        if let Some(what) = driver.violation.take() {
            return Err(what);
        }
        if driver.world.steps > STEPS_MAX {
            return Err("the run does not become idle".to_owned());
        }
        driver.world.tap.violation.take().map_or(Ok(()), Err)
    }

    fn user(&mut self, tag: Tag) -> Result<(), String> {
        let now = self.now();
        match tag {
            Tag::Wake => self.wake(),
            Tag::Timeout => {
                let due = self.service.poll_timeout().is_some_and(|at| at <= now);
                if due && !self.driver().has(Defect::TimeNeverUp) {
                    self.service.handle_timeout(now);
                }
            }
            Tag::Job(number) => {
                if let Some(finished) = self.driver().job(number) {
                    self.service.finished(now, finished);
                }
            }
            Tag::Owed(number) => self.driver().owed(number),
            Tag::Free(number) => self.driver().free(number),
            Tag::Act(at) => self.act(at as usize),
            Tag::Hear(at) => self.hear(at as usize)?,
            Tag::GoOn(at) => self.go_on(at as usize)?,
            Tag::Fault => self.fault(),
            Tag::OwnEnds(number) => {
                if number >> 32 == self.life {
                    let number = OperationId(number & u64::from(u32::MAX));
                    self.driver().own -= 1;
                    self.checker.end_own(number);
                    self.service.handle_local_end(now, number);
                }
            }
        }
        self.after();
        Ok(())
    }

    /// Lets the server's thread handle what has arrived.
    fn wake(&mut self) {
        let now = self.now();
        for wc in std::mem::take(&mut self.inbox) {
            let Some((client, came)) = self.driver().what(&wc) else {
                continue;
            };
            if wc.status != Status::Success {
                let status = Some(wc.status).filter(|status| *status != Status::Flushed);
                self.service.handle_disconnected(now, client, status);
                continue;
            }
            match came {
                Came::Message(slot, bytes) => {
                    if let Some(message) = self.driver().take(client, slot, bytes) {
                        self.service.handle_message(now, client, slot, &message);
                    }
                }
                Came::Sent(slot) => self.service.handle_sent(now, client, slot),
                Came::Nothing => {}
            }
            self.after();
        }
    }

    /// Does what follows each call of the service.
    fn after(&mut self) {
        let now = self.now();
        while let Some((client, message)) = self.driver().made_up.pop_front() {
            self.service
                .handle_message(now, client, usize::from(u16::MAX), &message);
        }
        let mut granted = Vec::new();
        self.own.retain(|own| match own.granted.try_recv() {
            Ok(number) => {
                granted.push((number, own.access, own.share));
                false
            }
            Err(_) => true,
        });
        for (number, access, share) in granted {
            let right = Right {
                client: None,
                range: 0..REGION_BYTES,
                access,
                share,
            };
            self.checker.begin_own(number, right);
            let delay = self.dice.log_uniform(OWN_NS_MAX);
            let tag = Tag::OwnEnds(self.life << 32 | number.0);
            let driver = self.driver();
            driver.counts.local += 1;
            driver.later(delay, tag);
        }
        let events: Vec<ServerEvent> = self.service.poll_events().collect();
        let counts = &mut self.driver().counts;
        for event in events {
            match event {
                ServerEvent::Breaking { .. } => counts.breaks += 1,
                ServerEvent::Released { .. } | ServerEvent::Unmapped { .. } => counts.released += 1,
                ServerEvent::Revoked { .. } => counts.revoked += 1,
                _ => {}
            }
        }
        let timeout = self.service.poll_timeout();
        if timeout != self.timeout_planned {
            self.timeout_planned = timeout;
            if let Some(at) = timeout {
                let delay = at.saturating_sub(now).as_nanos() as u64;
                self.driver().later(delay, Tag::Timeout);
            }
        }
    }

    fn fault(&mut self) {
        if self.clients.iter().all(Client::is_done) {
            return;
        }
        let delay = self.dice.log_uniform(4 * self.break_ns);
        let long = self.dice.log_uniform(4 * self.break_ns);
        let driver = self.service.driver_mut();
        driver.later(delay, Tag::Fault);
        match self.dice.below(16) {
            0 | 1 => {
                driver.counts.faults += 1;
                driver.world.break_link(self.dice.below(2) as usize, long);
            }
            2 | 3 => {
                driver.counts.faults += 1;
                driver.world.lose_more(long);
            }
            4 => {
                driver.counts.faults += 1;
                let latency_ns = self.dice.log_uniform(1_000_000);
                driver.world.change_latency(latency_ns);
            }
            5..10 => {
                let n = self.dice.below(self.clients.len() as u64) as usize;
                if let Some((qpn, number)) = self.clients[n].connected() {
                    driver.counts.cut += 1;
                    // In one direction, the other, or both.
                    let ways = self.dice.between(1, 3);
                    if ways & 1 != 0 {
                        driver.world.cut_off(CLIENT, qpn, long);
                    }
                    if let Some(qpn) = driver.server_qpn(number).filter(|_| ways & 2 != 0) {
                        driver.world.cut_off(SERVER, qpn, long);
                    }
                }
            }
            10..15 => self.begin_own(),
            _ => self.restart(),
        }
    }

    /// Lets the program that runs the server ask for the region.
    fn begin_own(&mut self) {
        let (tx, granted) = mpsc::channel();
        let access = self.dice.pick(&[Access::READ, Access::WRITE]);
        let share = self.dice.pick(&[Access::empty(), Access::READ]);
        let now = self.now();
        let driver = self.service.driver_mut();
        let until_ns = driver.longest_wait();
        driver.own += 1;
        self.own.push(Own {
            granted,
            access,
            share,
            until_ns,
        });
        self.service
            .handle_local(now, &self.name.clone(), access, share, tx);
    }

    /// Ends the server's process and begins another.
    fn restart(&mut self) {
        self.inbox.clear();
        self.own.clear();
        self.life += 1;
        self.timeout_planned = None;
        // The new server has the same memory and no leases.
        self.service.forget();
        let driver = self.driver();
        driver.counts.restarts += 1;
        driver.restart();
    }
}

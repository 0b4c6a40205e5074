//! A run: the schedule of events, the faults, and the checks at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_nvmf::auth::Offer;
use rdmux_nvmf::host::{Options, Transport};
use rdmux_nvmf::target::{Hosts, Subsystem, Terms};
use rdmux_wire::nvme::{AnaState, HostId, Nqn, ReservationKeys, Status};
use rdmux_wire::nvme_tcp::Digests;

use super::checker::Checker;
use super::disk::{Disk, Fails, Shape, Store, Ticks};
use super::host::{Ending, Host, Phase};
use super::media::{self, Jobs};
use super::pace::{self, Pace};
use super::paths::Loss;
use super::server::{LOOK_NS, NQN, Server, address, nqn_of};
use super::stream::{Link, LinkId, Side};
use super::{Counts, KEEP_ALIVE_NS, MS, Report, SECOND, SLACK_NS, Settings};
use crate::dice::Dice;

/// Namespaces, with ids from 1.
pub(super) const NAMESPACES: u32 = 2;
/// Blocks of a namespace at least and at most, and those that are counters.
pub(super) const BLOCKS: u64 = 48;
pub(super) const BLOCKS_MAX: u64 = 60;
pub(super) const COUNTERS: u64 = 3;
pub(super) const IO_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which faults end at the latest.
const FAULTS_NS: u64 = 150 * SECOND;
/// Time for all operations to end once faults have.
const CALM_NS: u64 = 400 * SECOND;
const STEPS_MAX: u64 = 3_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Bytes arrive.
    Deliver(LinkId, Side),
    /// A medium goes on with an I/O.
    Media(u64),
    /// Connections of the target look at what they share.
    Change,
    /// The time has come for commands that a host's limits have held up.
    Held(LinkId),
    /// The target looks at deadlines, and hosts do.
    Look,
    /// A host connects.
    Connect(usize, u64),
    /// A host learns that a queue was closed, unless it has lost its controller meanwhile.
    QueueClosed(usize, u64),
    /// I/Os that the controller of a lost path had do not act any more.
    Settled(usize),
    SetupWaited(usize, LinkId),
    Issue(usize, u64),
    LookAtStatus(usize, u64),
    /// Nothing is on its way any more on a connection whose host has fallen silent.
    Silence(LinkId),
    Fault,
    /// The target starts.
    Start,
    Revive(usize),
    AddNamespace(u32),
    /// All hosts may use the target again.
    Admit,
}

/// Something that goes wrong, or changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Cut,
    Stall,
    HostDies,
    Kill,
    PowerCut,
    Access,
    Remove,
    Resize,
    Disk,
    Expel,
    Reset,
    Shutdown,
    Limits,
}

const FAULTS: [Fault; 13] = [
    Fault::Cut,
    Fault::Stall,
    Fault::HostDies,
    Fault::Kill,
    Fault::PowerCut,
    Fault::Access,
    Fault::Remove,
    Fault::Resize,
    Fault::Disk,
    Fault::Expel,
    Fault::Reset,
    Fault::Shutdown,
    Fault::Limits,
];

/// States over time.
type History = Vec<(u64, bool)>;

#[derive(Debug)]
pub(super) struct Run<'a> {
    settings: Settings,
    pub(super) dice: Dice,
    began: Instant,
    pub(super) now: u64,
    scheduled: u64,
    events: BTreeMap<(u64, u64), Event>,
    pub(super) ticks: Arc<Ticks>,
    pub(super) links: BTreeMap<LinkId, Link>,
    pub(super) last_link: LinkId,
    pub(super) last_operation: u64,
    pub(super) hosts: Vec<Host<'a>>,
    pub(super) server: Option<Server>,
    lives: u64,
    pub(super) disks: BTreeMap<u32, Arc<Disk>>,
    pub(super) store: Arc<Store>,
    file: Arc<File>,
    pub(super) checker: Checker,
    pub(super) counts: Counts,
    violation: Option<String>,
    /// Keys of the reservation command that a connection has.
    pub(super) reserving: BTreeMap<LinkId, ReservationKeys>,
    /// Its status, once it was carried out.
    pub(super) executed: BTreeMap<LinkId, Status>,
    /// Admin queues whose controllers were reset.
    pub(super) reset_links: BTreeSet<LinkId>,
    /// Connections on which commands may have arrived late, or in part.
    pub(super) stalled: BTreeSet<LinkId>,
    pub(super) has_faults: bool,
    pub(super) calm_since: Option<u64>,
    pub(super) with_reservations: bool,
    pub(super) with_copies: bool,
    /// Hosts are paths, of which two are a host's.
    pub(super) with_paths: bool,
    /// The path of each host that has its I/O, by its first one.
    pub(super) current: Vec<usize>,
    pub(super) losses: Vec<Loss>,
    faults: Vec<Fault>,
    fault_every: u64,
    /// Longest time from one operation of a host to the next.
    pub(super) pace: u64,
    /// One of so many I/Os takes a medium long.
    pub(super) hangs: u64,
    /// Limits by host, and what they have let begin.
    pub(super) paces: Vec<Pace>,
    /// By address.
    access: Vec<History>,
    pub(super) is_there: BTreeMap<u32, History>,
}

pub(super) fn run(settings: &Settings) -> Report {
    media::forget();
    let mut dice = Dice::new(settings.seed, 41);
    let with_paths = dice.one_in(4);
    let mut all: Vec<Options> = (0..settings.hosts as usize)
        .map(|host| options(host, &mut dice))
        .collect();
    if with_paths {
        all = all
            .iter()
            .flat_map(|options| [options.clone(), options.clone()])
            .collect();
    }
    Run::new(settings, &all, with_paths, dice).run()
}

fn options(host: usize, dice: &mut Dice) -> Options {
    let digests = [Digests::empty(), Digests::HEADER, Digests::DATA, Digests::all()];
    Options {
        transport: dice.pick(&[Transport::Tcp, Transport::Tcp, Transport::Rdma]),
        from: None,
        device: None,
        addresses: Vec::new(),
        subsystem: Nqn::new(NQN).expect("a name"),
        host: nqn_of(host),
        host_id: HostId([host as u8 + 1; 16]),
        secrets: None,
        requires_authentication: false,
        psk: None,
        concat: false,
        offer: Offer::default(),
        random: || None,
        digests: dice.pick(&digests),
        flow_control: dice.one_in(2),
        keep_alive: Duration::from_nanos(KEEP_ALIVE_NS),
        connect_timeout: Duration::from_secs(10),
        admin_timeout: Duration::from_secs(10),
        io_timeout: IO_TIMEOUT,
        loss_timeout: Duration::MAX,
    }
}

impl<'a> Run<'a> {
    fn new(settings: &Settings, options: &'a [Options], with_paths: bool, mut dice: Dice) -> Run<'a> {
        let ticks = Arc::new(Ticks::default());
        let has_cache = !dice.one_in(4);
        let disks = (1..=NAMESPACES).map(|nsid| {
            let may_wait = has_cache || dice.one_in(2);
            let shape = Shape {
                nsid,
                may_wait,
                has_cache,
                has_file: may_wait && !dice.one_in(4),
            };
            let own = Dice::new(dice.next(), 0);
            (
                nsid,
                Arc::new(Disk::new(shape, BLOCKS, BLOCKS_MAX, ticks.clone(), own)),
            )
        });
        let disks = disks.collect();
        let left = settings.operations;
        let hosts = options.iter().enumerate().map(|(nr, options)| {
            // The first path counts those of the other one.
            let left = if with_paths && nr % 2 == 1 { 0 } else { left };
            Host::new(options, left, &mut dice)
        });
        let hosts = hosts.collect();
        let with_copies = dice.one_in(2);
        let has_limits = dice.one_in(3) && !with_paths;
        let paces = options.iter().map(|_| match has_limits && dice.one_in(2) {
            true => Pace::new(pace::drawn(&mut dice, with_copies)),
            false => Pace::default(),
        });
        let paces = paces.collect();
        // Few kinds at a time: some hide others.
        let of_one_path = [Fault::HostDies, Fault::Expel, Fault::Limits];
        let faults = FAULTS.into_iter().filter(|_| dice.one_in(2));
        let faults = faults.filter(|fault| !with_paths || !of_one_path.contains(fault));
        let faults = faults.collect();
        // Operations are spread over the time that it takes to connect again, or come close together. With a second path they go on meanwhile.
        let pace = match with_paths {
            true => dice.pick(&[100 * MS, 400 * MS, SECOND]),
            false => dice.pick(&[5 * MS, 400 * MS, 2 * SECOND, 4 * SECOND]),
        };
        let fault_every = match pace < SECOND {
            true => dice.pick(&[50 * MS, 300 * MS, 2 * SECOND]),
            false => dice.pick(&[500 * MS, 2 * SECOND, 5 * SECOND]),
        };
        Run {
            settings: *settings,
            with_reservations: !dice.one_in(3) && !with_paths,
            with_copies,
            fault_every,
            pace,
            hangs: if with_paths { 8 } else { dice.pick(&[8, 30, 300]) },
            dice,
            began: Instant::now(),
            now: 0,
            scheduled: 0,
            events: BTreeMap::new(),
            ticks,
            links: BTreeMap::new(),
            last_link: 0,
            last_operation: 0,
            hosts,
            server: None,
            lives: 0,
            disks,
            store: Arc::default(),
            file: Arc::new(File::open("/dev/null").expect("/dev/null opens")),
            checker: Checker::default(),
            counts: Counts::default(),
            violation: None,
            reserving: BTreeMap::new(),
            executed: BTreeMap::new(),
            reset_links: BTreeSet::new(),
            stalled: BTreeSet::new(),
            has_faults: true,
            calm_since: None,
            with_paths,
            current: (0..options.len()).collect(),
            losses: vec![Loss::default(); options.len()],
            faults,
            paces,
            access: vec![vec![(0, true)]; 2],
            is_there: (1..=NAMESPACES).map(|nsid| (nsid, vec![(0, false)])).collect(),
        }
    }

    /// The state machines want an instant; only its distance from the first one counts.
    pub(super) fn instant(&self) -> Instant {
        self.began + Duration::from_nanos(self.now)
    }

    pub(super) fn violate(&mut self, what: String) {
        let ms = self.now / MS;
        self.violation.get_or_insert(format!("at {ms} ms: {what}"));
    }

    pub(super) fn schedule(&mut self, at: u64, event: Event) {
        self.scheduled += 1;
        self.events.insert((at.max(self.now), self.scheduled), event);
    }

    /// Has a stream deliver what it has.
    pub(super) fn schedule_pipe(&mut self, id: LinkId, to: Side) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let delay = link.delay(&mut self.dice);
        let pipe = link.pipe(to);
        if !pipe.is_scheduled && pipe.has_news() {
            pipe.is_scheduled = true;
            let at = (self.now + delay).max(pipe.stalled_until);
            self.schedule(at, Event::Deliver(id, to));
        }
    }

    fn run(mut self) -> Report {
        self.start();
        for nr in 0..self.hosts.len() {
            self.schedule(0, Event::Connect(nr, 0));
        }
        self.schedule(LOOK_NS, Event::Look);
        self.schedule(self.fault_every, Event::Fault);
        while self.violation.is_none() && !self.is_done() {
            self.step();
        }
        if self.violation.is_none() {
            self.finish();
        }
        self.report()
    }

    fn report(mut self) -> Report {
        self.counts.reads_checked = self.checker.reads_checked;
        self.counts.lost_writes = self.checker.lost_writes;
        for disk in self.disks.values() {
            let (flushes, writes) = disk.failures();
            self.counts.flush_failures += flushes;
            self.counts.write_failures += writes;
        }
        self.count_jobs();
        Report {
            settings: self.settings,
            violation: self.violation,
            counts: self.counts,
        }
    }

    fn count_jobs(&mut self) {
        if let Some(server) = &self.server {
            self.counts.nested += server.jobs.nested;
            self.counts.waits += server.jobs.waits;
        }
    }

    fn is_done(&self) -> bool {
        let is_done = |host: &Host<'_>| host.phase == Phase::Ready && host.left == 0 && host.in_flight() == 0;
        self.calm_since.is_some() && self.hosts.iter().all(is_done)
    }

    fn step(&mut self) {
        let Some(((at, _), event)) = self.events.pop_first() else {
            return self.violate("nothing happens any more".to_owned());
        };
        self.now = at;
        self.counts.steps += 1;
        if self.counts.steps > STEPS_MAX {
            return self.violate(format!("it takes more than {STEPS_MAX} steps"));
        }
        self.handle(event);
        let of_disks = self.disks.values().find_map(|disk| disk.violation());
        if let Some(what) = of_disks {
            self.violate(what);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Deliver(id, to) => {
                let Some(link) = self.links.get_mut(&id) else {
                    return;
                };
                let pipe = link.pipe(to);
                pipe.is_scheduled = false;
                if pipe.stalled_until > self.now {
                    return self.schedule_pipe(id, to);
                }
                match to {
                    Side::Target => self.arrive_at_target(id),
                    Side::Host => self.arrive_at_host(id),
                }
            }
            Event::Media(id) => self.handle_media(id),
            Event::Change => self.tell_of_change(),
            Event::Held(id) => self.resume(id),
            Event::Look => {
                self.look_at_deadlines();
                (0..self.hosts.len()).for_each(|nr| self.tick(nr));
                self.look_at_time();
                self.schedule(self.now + LOOK_NS, Event::Look);
            }
            Event::Connect(nr, generation) if self.hosts[nr].generation == generation => self.connect(nr),
            Event::QueueClosed(nr, generation) if self.hosts[nr].generation == generation => {
                self.lose(nr, false);
            }
            Event::Settled(nr) => self.settle(nr),
            Event::SetupWaited(nr, id) => self.setup_waited(nr, id),
            Event::Issue(nr, generation) if self.hosts[nr].generation == generation => self.issue(nr),
            Event::LookAtStatus(nr, generation) if self.hosts[nr].generation == generation => {
                self.look_at_status(nr);
            }
            Event::Connect(..) | Event::QueueClosed(..) | Event::Issue(..) | Event::LookAtStatus(..) => {}
            Event::Silence(id) => {
                if let Some(link) = self.links.get_mut(&id) {
                    link.to_target.drop_bytes();
                }
            }
            Event::Fault => {
                if self.has_faults {
                    self.go_wrong();
                    let pause = self.fault_every / 2 + self.dice.below(self.fault_every);
                    self.schedule(self.now + pause, Event::Fault);
                }
            }
            Event::Start => self.start(),
            Event::Revive(nr) => self.revive(nr),
            Event::AddNamespace(nsid) => self.add_again(nsid),
            Event::Admit => {
                if let Some(server) = &mut self.server {
                    server.set_hosts(&self.paces, Vec::new());
                }
            }
        }
    }

    /// Ends the faults when it is time, and looks whether all ends then.
    fn look_at_time(&mut self) {
        let few = self.settings.operations / 5;
        let is_late = self.now > FAULTS_NS || self.hosts.iter().all(|host| host.left <= few);
        if self.has_faults && is_late {
            self.heal();
        }
        if self.calm_since.is_some_and(|since| self.now > since + CALM_NS) {
            let left: Vec<_> = self
                .hosts
                .iter()
                .map(|host| (host.phase, host.left, host.in_flight()))
                .collect();
            self.violate(format!(
                "operations do not end although nothing fails: phase, left, in flight of hosts: {left:?}"
            ));
        }
    }

    /// Ends all faults.
    fn heal(&mut self) {
        self.has_faults = false;
        self.calm_since = Some(self.now);
        let has_failed = self.disks.values().any(|disk| disk.failed_at().0.is_some());
        for disk in self.disks.values() {
            disk.set_fails(Fails::default());
        }
        if has_failed {
            self.kill(false);
        }
        for at in 0..self.access.len() {
            self.set_access(at, AnaState::Optimized);
        }
        self.schedule(self.now, Event::Admit);
        for nr in 0..self.hosts.len() {
            self.schedule(self.now, Event::Revive(nr));
        }
    }

    fn start(&mut self) {
        if self.server.is_some() {
            return;
        }
        self.lives += 1;
        let nqn = Nqn::new(NQN).expect("a name");
        let subsystem = Subsystem::new(nqn, "simulated", Hosts::any(Terms::default()));
        let subsystem = subsystem.with_reservations(self.store.clone());
        let own = Dice::new(self.dice.next(), 0);
        let jobs = Jobs::new(self.lives << 32, own, self.disks.clone());
        let mut server = Server::new(self.lives, subsystem, jobs, self.file.clone());
        // It counts anew.
        for pace in &mut self.paces {
            *pace = Pace::new(pace.rates);
        }
        server.set_hosts(&self.paces, Vec::new());
        self.server = Some(server);
        for nsid in 1..=NAMESPACES {
            self.add_again(nsid);
        }
        for at in 0..self.access.len() {
            let is_accessible = self.access[at].last().is_some_and(|(_, is)| *is);
            let state = if is_accessible {
                AnaState::Optimized
            } else {
                AnaState::Inaccessible
            };
            if let Some(server) = &self.server {
                server.set_access(at, state);
            }
        }
    }

    fn add_again(&mut self, nsid: u32) {
        if self.server.is_none() || self.is_there_now(nsid) {
            return;
        }
        if !self.add_namespace(nsid) {
            return self.schedule(self.now + 50 * MS, Event::AddNamespace(nsid));
        }
        self.note_there(nsid, true);
        self.schedule(self.now, Event::Change);
    }

    fn is_there_now(&self, nsid: u32) -> bool {
        self.is_there[&nsid].last().is_some_and(|(_, there)| *there)
    }

    fn note_there(&mut self, nsid: u32, there: bool) {
        let now = self.ticks.next();
        if let Some(history) = self.is_there.get_mut(&nsid) {
            history.push((now, there));
        }
    }

    fn set_access(&mut self, at: usize, state: AnaState) {
        let is_accessible = state.refusal().is_none();
        self.access[at].push((self.ticks.next(), is_accessible));
        self.counts.ana_changes += 1;
        if let Some(server) = &self.server {
            server.set_access(at, state);
        }
        let at = self.now + self.dice.below(2 * MS);
        self.schedule(at, Event::Change);
    }

    /// Returns whether namespaces were accessible at an address at some time between two, and at all of it.
    pub(super) fn was_accessible(&self, local: SocketAddr, begin: u64, end: u64) -> (bool, bool) {
        let at = (0..self.access.len()).find(|at| address(*at) == local);
        over(&self.access[at.unwrap_or(0)], begin, end)
    }

    /// As [`Run::was_accessible`], for a namespace that comes and goes.
    pub(super) fn was_there(&self, nsid: u32, begin: u64, end: u64) -> (bool, bool) {
        over(&self.is_there[&nsid], begin, end)
    }

    /// The target dies.
    fn kill(&mut self, with_power_cut: bool) {
        self.count_jobs();
        let Some(mut server) = self.server.take() else {
            return;
        };
        let now = self.ticks.next();
        server.jobs.die();
        let life = server.life;
        drop(server);
        if with_power_cut {
            self.counts.power_cuts += 1;
            self.disks.values().for_each(|disk| disk.cut_power());
        } else {
            self.counts.kills += 1;
        }
        self.checker.target_died(with_power_cut, now);
        for nsid in 1..=NAMESPACES {
            self.disks[&nsid].reserve(|model| model.restart());
            self.note_there(nsid, false);
        }
        let of_life = self.links.iter().filter(|(_, link)| link.life == life);
        let ids: Vec<LinkId> = of_life.map(|(id, _)| *id).collect();
        for id in ids {
            let learns = !with_power_cut || self.dice.one_in(2);
            if let Some(link) = self.links.get_mut(&id) {
                link.to_target.is_over = true;
                match with_power_cut {
                    true => link.to_host.cut(learns, self.now, &mut self.dice),
                    false => link.to_host.close(self.now),
                }
            }
            self.schedule_pipe(id, Side::Host);
        }
        let at = self.now + 100 * MS + self.dice.below(2 * SECOND);
        self.schedule(at, Event::Start);
    }

    fn go_wrong(&mut self) {
        let has_failed = self.disks.values().any(|disk| disk.failed_at().0.is_some());
        if has_failed && self.dice.one_in(4) {
            let with_power_cut = self.dice.one_in(2);
            return self.kill(with_power_cut);
        }
        if self.faults.is_empty() {
            return;
        }
        let fault = self.dice.pick(&self.faults);
        let nr = self.dice.below(self.hosts.len() as u64) as usize;
        let nsid = self.dice.between(1, u64::from(NAMESPACES)) as u32;
        match fault {
            Fault::Cut => self.cut(nr),
            Fault::Stall => self.stall(nr),
            Fault::HostDies if self.dice.one_in(4) && self.hosts[nr].phase != Phase::Dead => {
                self.die(nr);
                let at = self.now + SECOND + self.dice.below(8 * SECOND);
                self.schedule(at, Event::Revive(nr));
            }
            Fault::Kill if self.dice.one_in(6) => self.kill(false),
            Fault::PowerCut if self.dice.one_in(6) => self.kill(true),
            Fault::Access => {
                let at = self.dice.below(self.access.len() as u64) as usize;
                let states = [
                    AnaState::Optimized,
                    AnaState::Optimized,
                    AnaState::NonOptimized,
                    AnaState::Inaccessible,
                    AnaState::Change,
                ];
                let state = self.dice.pick(&states);
                self.set_access(at, state);
            }
            Fault::Remove if self.server.is_some() && self.is_there_now(nsid) && self.dice.one_in(3) => {
                self.counts.namespace_changes += 1;
                self.note_there(nsid, false);
                if let Some(server) = &self.server {
                    server.remove(nsid);
                }
                self.schedule(self.now + self.fault_every / 8, Event::Change);
                let at = self.now + self.dice.below(2 * SECOND);
                self.schedule(at, Event::AddNamespace(nsid));
            }
            Fault::Resize if self.server.is_some() && self.is_there_now(nsid) => {
                self.counts.namespace_changes += 1;
                self.disks[&nsid].resize(self.dice.between(BLOCKS, BLOCKS_MAX));
                if let Some(server) = &self.server {
                    server.resize(nsid);
                }
                self.schedule(self.now + MS, Event::Change);
            }
            Fault::Disk => {
                let fails = Fails {
                    write: self.dice.pick(&[0, 0, 8, 60]),
                    flush: self.dice.pick(&[0, 0, 4, 30]),
                };
                self.disks[&nsid].set_fails(fails);
            }
            Fault::Expel if self.dice.one_in(4) => {
                if let Some(server) = &mut self.server {
                    server.set_hosts(&self.paces, vec![nr]);
                    self.schedule(self.now + MS, Event::Change);
                    let at = self.now + SECOND + self.dice.below(4 * SECOND);
                    self.schedule(at, Event::Admit);
                }
            }
            Fault::Limits if self.dice.one_in(4) => {
                self.paces[nr] = Pace::new(pace::drawn(&mut self.dice, self.with_copies));
                if let Some(server) = &mut self.server {
                    let expelled = std::mem::take(&mut server.expelled);
                    server.set_hosts(&self.paces, expelled);
                }
            }
            Fault::Reset if self.dice.one_in(2) => self.reset(nr, Ending::Reset),
            Fault::Shutdown if self.dice.one_in(2) => self.reset(nr, Ending::Shutdown),
            _ => {}
        }
    }

    /// Returns one of a host's connections.
    fn some_link(&mut self, nr: usize) -> Option<LinkId> {
        let links = self.hosts[nr].links();
        (!links.is_empty()).then(|| self.dice.pick(&links))
    }

    fn cut(&mut self, nr: usize) {
        let Some(id) = self.some_link(nr) else {
            return;
        };
        self.counts.cuts += 1;
        self.stalled.insert(id);
        let now = self.now;
        let (target_learns, host_learns) = (self.dice.one_in(2), !self.dice.one_in(4));
        if let Some(link) = self.links.get_mut(&id) {
            link.to_target.cut(target_learns, now, &mut self.dice);
            link.to_host.cut(host_learns, now, &mut self.dice);
        }
        self.schedule(now + SLACK_NS, Event::Silence(id));
        self.schedule_pipe(id, Side::Target);
        self.schedule_pipe(id, Side::Host);
    }

    fn stall(&mut self, nr: usize) {
        let Some(id) = self.some_link(nr) else {
            return;
        };
        self.counts.stalls += 1;
        let for_ns = match self.dice.below(3) {
            0 => self.dice.below(8 * SECOND),
            _ => self.dice.below(500 * MS),
        };
        let both = self.dice.one_in(2);
        let to_target = self.dice.one_in(2);
        self.stalled.insert(id);
        if let Some(link) = self.links.get_mut(&id) {
            if both || to_target {
                link.to_target.stalled_until = self.now + for_ns;
            }
            if both || !to_target {
                link.to_host.stalled_until = self.now + for_ns;
            }
        }
    }

    /// All operations are done: nothing may be left of them.
    fn finish(&mut self) {
        let busy = self.server.as_ref().map(Server::busy).unwrap_or_default();
        // Hosts keep their controllers alive all the time, and close their old ones.
        let mut queues = self.hosts.iter().flat_map(|host| &host.queues);
        if queues.any(|queue| busy.contains(&queue.id)) {
            return self.violate("a connection keeps a command of a host that has none".to_owned());
        }
        for nr in 0..self.hosts.len() {
            self.lose(nr, true);
            self.hosts[nr].phase = Phase::Over;
        }
        let until = self.now + 60 * SECOND;
        let is_quiet = |run: &Run<'_>| {
            let server = run.server.as_ref();
            server.is_none_or(|server| server.connections() == 0 && server.jobs.len() == 0)
        };
        while self.violation.is_none() && !is_quiet(self) {
            if self.now > until {
                return self.violate("the target keeps connections that their hosts have closed".to_owned());
            }
            self.step();
        }
        let now = self.ticks.next();
        for nsid in 1..=NAMESPACES {
            let disk = self.disks[&nsid].clone();
            for block in 0..BLOCKS_MAX {
                let place = (nsid, block);
                if let Err(why) = self.checker.read(place, disk.block(block), now, now + 1) {
                    self.violate(format!("at the end {why}"));
                }
                if block < COUNTERS
                    && let Err(why) = self.checker.check_pairs(place, disk.block(block))
                {
                    self.violate(why);
                }
            }
        }
        self.count_jobs();
        if let Some(server) = self.server.take()
            && server.leaks() > 0
        {
            self.violate("the target keeps state of connections that are no more".to_owned());
        }
    }
}

/// Returns whether something held at some time between two, and at all of it.
fn over(history: &History, begin: u64, end: u64) -> (bool, bool) {
    let at_begin = history.iter().rposition(|(tick, _)| *tick <= begin).unwrap_or(0);
    let during = history[at_begin..].iter().filter(|(tick, _)| *tick <= end);
    let during: Vec<bool> = during.map(|(_, held)| *held).collect();
    (during.contains(&true), !during.contains(&false))
}

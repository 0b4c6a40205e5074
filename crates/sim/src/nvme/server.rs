//! The target: drives the shipped state machines of its connections as a reactor does.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use rdmux_nvmf::target::{
    AnaRule, Hosts, Listener, Namespace, Operation, Port, Rates, Subsystem, Target, Terms,
};
use rdmux_nvmf::tcp::{self, Buffers, Connection};
use rdmux_wire::nvme::{AnaState, Nqn, NsId, ReservationCommand, Status, TransportKind};
use rdmux_wire::nvme_rdma::Request;

use super::disk::SimBackend;
use super::media::{Jobs, Stage};
use super::pace::Pace;
use super::rdma::TargetQp;
use super::run::{Event, Run};
use super::stream::{LinkId, Side};
use super::transport::{End, TargetConnection};
use super::{KEEP_ALIVE_NS, MS, SECOND};

/// Data of up to 16 KiB come in capsules.
const PORT: Port = tcp::port(16 << 10);
pub(super) const NQN: &str = "nqn.2014-08.org.example:simulated";
/// The group of all namespaces.
const GROUP: u32 = 1;
/// Time between two looks at deadlines.
pub(super) const LOOK_NS: u64 = 100 * MS;
/// Time that the target waits beyond a keep-alive time.
const GRACE_NS: u64 = SECOND;
/// Time that a host has for its first command.
const CONNECT_NS: u64 = 10 * SECOND;
/// Time for a host to close a connection that is over.
const LINGER_NS: u64 = SECOND;

/// The target during one of its lives.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) life: u64,
    target: Arc<Target>,
    subsystem: Arc<Subsystem>,
    connections: BTreeMap<LinkId, Served>,
    buffers: Buffers,
    pub(super) jobs: Jobs,
    /// Backends by namespace, as long as something uses them.
    backends: BTreeMap<u32, Weak<SimBackend>>,
    file: Arc<File>,
    /// Hosts that may not use it.
    pub(super) expelled: Vec<usize>,
}

#[derive(Debug)]
struct Served {
    connection: TargetConnection,
    closes_at: Option<u64>,
    /// Time of the last bytes.
    heard: u64,
    /// Time at which commands are looked at again that are held up.
    resumes_at: Option<u64>,
    /// Time since which they are.
    held_since: Option<u64>,
}

/// Returns an address at which hosts reach the target.
pub(super) fn address(nr: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, nr as u8 + 1], 4420))
}

pub(super) fn nqn_of(host: usize) -> Nqn {
    Nqn::new(format!("nqn.2014-08.org.example:host-{host}").as_str()).expect("a name")
}

fn uuid(nsid: u32) -> [u8; 16] {
    [nsid as u8; 16]
}

impl Server {
    pub(super) fn new(life: u64, subsystem: Subsystem, jobs: Jobs, file: Arc<File>) -> Server {
        let (target, subsystem) = (Arc::new(Target::default()), Arc::new(subsystem));
        target
            .add_subsystem(subsystem.clone())
            .expect("it is the first of that name");
        Server {
            life,
            target,
            subsystem,
            connections: BTreeMap::new(),
            buffers: Buffers::default(),
            jobs,
            backends: BTreeMap::new(),
            file,
            expelled: Vec::new(),
        }
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Returns the connections that have a command in their hands.
    pub(super) fn busy(&self) -> Vec<LinkId> {
        let all = self.connections.iter();
        let busy = all.filter(|(_, served)| !served.connection.is_idle());
        busy.map(|(id, _)| *id).collect()
    }

    /// Returns the number of references to its state that should not be there once it has no connection.
    pub(super) fn leaks(self) -> usize {
        let Server {
            target,
            subsystem,
            backends,
            ..
        } = self;
        drop(target);
        let of_subsystem = Arc::strong_count(&subsystem) - 1;
        drop(subsystem);
        of_subsystem + backends.values().map(Weak::strong_count).sum::<usize>()
    }

    pub(super) fn set_access(&self, at: usize, state: AnaState) {
        for transport in [TransportKind::Tcp, TransportKind::Rdma] {
            let rule = AnaRule {
                group: Some(GROUP),
                at: Some(Listener {
                    transport,
                    address: address(at),
                }),
                state,
            };
            self.subsystem.set_ana_state(rule).expect("the group is valid");
        }
    }

    pub(super) fn remove(&self, nsid: u32) {
        self.subsystem
            .remove_namespace(NsId(nsid))
            .expect("it is there, as the run knows");
    }

    pub(super) fn resize(&self, nsid: u32) {
        self.subsystem
            .resize_namespace(NsId(nsid))
            .expect("it is there, and has blocks");
    }

    /// Changes who may use it.
    pub(super) fn set_hosts(&mut self, paces: &[Pace], expelled: Vec<usize>) {
        let named = paces.iter().enumerate();
        let named = named.filter(|(host, _)| !expelled.contains(host));
        let named = named.map(|(host, pace)| {
            let terms = Terms {
                rates: pace.rates,
                ..Terms::default()
            };
            (nqn_of(host), terms)
        });
        let hosts = Hosts {
            others: None,
            named: named.collect(),
        };
        self.expelled = expelled;
        let nqn = Nqn::new(NQN).expect("a name");
        self.target.set_hosts(&nqn, hosts).expect("it is there");
    }
}

impl Run<'_> {
    /// Adds a namespace. Returns false if something still uses its disk, which only one may have open.
    pub(super) fn add_namespace(&mut self, nsid: u32) -> bool {
        let Some(server) = &mut self.server else {
            return false;
        };
        let is_open = server.backends.get(&nsid).map(Weak::strong_count);
        if is_open.is_some_and(|open| open > 0) {
            return false;
        }
        let disk = self.disks[&nsid].clone();
        let backend = Arc::new(SimBackend::open(disk.clone(), server.file.clone()));
        server.backends.insert(nsid, Arc::downgrade(&backend));
        disk.reserve(|model| model.restart());
        let namespace = Namespace {
            nsid: NsId(nsid),
            block_shift: 9,
            uuid: uuid(nsid),
            is_protected: false,
            backend,
        };
        server
            .subsystem
            .add_namespace(namespace)
            .expect("it is not there");
        true
    }

    /// Accepts a connection, of RDMA if it comes with a request. `None` if no target is there.
    pub(super) fn accept(&mut self, id: LinkId, local: SocketAddr, request: Option<&Request>) -> Option<u64> {
        let now = self.instant();
        let server = self.server.as_mut()?;
        let target = server.target.clone();
        let connection = match request {
            None => TargetConnection::Tcp(Box::new(Connection::new(target, PORT, local, now))),
            Some(request) => {
                TargetConnection::Rdma(Box::new(TargetQp::new(target, request, local.ip(), now)))
            }
        };
        let served = Served {
            connection,
            closes_at: None,
            heard: self.now,
            resumes_at: None,
            held_since: None,
        };
        server.connections.insert(id, served);
        Some(server.life)
    }

    /// Bytes, or the end of a connection, arrive at the target.
    pub(super) fn arrive_at_target(&mut self, id: LinkId) {
        let (now, instant) = (self.now, self.instant());
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let pipe = &mut link.to_target;
        let Some(server) = self.server.as_mut().filter(|server| server.life == link.life) else {
            return;
        };
        let Some(served) = server.connections.get_mut(&id) else {
            pipe.is_over = true;
            return;
        };
        if pipe.end(now).is_some() {
            pipe.is_over = true;
            return self.close_at_target(id);
        }
        if served.closes_at.is_some() {
            let mut unwanted = [0; 4096];
            while pipe.receive(&mut unwanted, &mut self.dice) > 0 {}
        } else {
            let connection = &mut served.connection;
            if connection.receive(pipe, &mut server.buffers, &mut self.dice, instant) > 0 {
                served.heard = now;
            }
        }
        self.pump(id);
        // There is room for what the host waits to send.
        self.send_from_host(id);
        self.schedule_pipe(id, Side::Target);
    }

    /// Carries I/Os of a connection out, and sends what it has to send.
    pub(super) fn pump(&mut self, id: LinkId) {
        let (now, instant) = (self.now, self.instant());
        loop {
            let Some(server) = &mut self.server else {
                return;
            };
            let Some(served) = server.connections.get_mut(&id) else {
                return;
            };
            let Some(link) = self.links.get_mut(&id).filter(|link| link.life == server.life) else {
                return;
            };
            if let Some(mut work) = served.connection.poll_io(&mut server.buffers, instant) {
                let (host, bytes) = (link.host, u64::from(work.io().length));
                if let Err(why) = self.paces[host].begin(bytes, self.hosts[host].depth, now) {
                    return self.violate(format!("host {host}: {why}"));
                }
                if work.io().may_wait() {
                    let job = server.jobs.add(id, link.host, work);
                    let at = now + self.media_delay();
                    self.schedule(at, Event::Media(job));
                } else {
                    let status = server.jobs.execute(link.host, &mut work);
                    served.connection.complete(work, status, &mut server.buffers);
                    self.schedule_started();
                }
                continue;
            }
            if served.connection.send(&mut link.to_host, &mut server.buffers) > 0 {
                continue;
            }
            let has_reset = served.connection.take_reset();
            let end = served.connection.end().filter(|_| served.closes_at.is_none());
            let lingers = served.connection.lingers();
            if end.is_some() {
                served.closes_at = Some(now + LINGER_NS);
            }
            if has_reset {
                let at = now + self.dice.below(2 * MS);
                self.schedule(at, Event::Change);
            }
            if let Some(end) = end {
                self.ended(id, end);
                if !lingers {
                    return self.close_at_target(id);
                }
            }
            break;
        }
        self.look_at_finish(id);
        self.look_at_held(id);
        self.schedule_pipe(id, Side::Host);
        self.report_finished();
    }

    /// Plans to look again at commands that are held up.
    fn look_at_held(&mut self, id: LinkId) {
        let (now, instant) = (self.now, self.instant());
        let Some(server) = &mut self.server else {
            return;
        };
        let host = self.links[&id].host;
        let Some(served) = server.connections.get_mut(&id) else {
            return;
        };
        let until = served.connection.held_until(instant);
        let ns = until.map_or(0, |until| until.duration_since(instant).as_nanos() as u64);
        // A controller that waits for the I/Os of one that is over looks each millisecond: each look at deadlines is enough.
        if self.paces[host].rates == Rates::default() || ns <= MS {
            served.held_since = None;
            return;
        }
        if served.held_since.is_none() {
            self.counts.held_up += 1;
        }
        let since = *served.held_since.get_or_insert(now);
        let at = now + ns.max(10 * MS);
        if served.resumes_at.is_none_or(|resumes_at| resumes_at > at) {
            served.resumes_at = Some(at);
            self.schedule(at, Event::Held(id));
        }
        if let Err(why) = self.paces[host].held(since, self.hosts[host].depth, now) {
            self.violate(format!("host {host}: {why}"));
        }
    }

    pub(super) fn resume(&mut self, id: LinkId) {
        let server = self.server.as_mut();
        if let Some(served) = server.and_then(|server| server.connections.get_mut(&id)) {
            served.resumes_at = None;
            self.pump(id);
        }
    }

    /// Closes a connection that is over once all is sent.
    fn look_at_finish(&mut self, id: LinkId) {
        let Some(served) = self
            .server
            .as_ref()
            .and_then(|server| server.connections.get(&id))
        else {
            return;
        };
        if served.closes_at.is_some()
            && !served.connection.has_unsent()
            && let Some(link) = self.links.get_mut(&id)
        {
            link.to_host.close(self.now);
        }
    }

    /// The target has ended a connection.
    fn ended(&mut self, id: LinkId, end: End) {
        let link = &self.links[&id];
        let host = link.host;
        match end {
            End::Silent => {
                self.counts.expired += 1;
                let served = self.server.as_ref().map(|server| &server.connections[&id]);
                let heard = served.map_or(0, |served| served.heard);
                // A command that has arrived in part is not heard.
                if self.now - heard < KEEP_ALIVE_NS && !self.stalled.contains(&id) {
                    self.violate(format!("the keep-alive of host {host} expired, which was heard"));
                }
            }
            End::ControllerOver => {
                let server = self.server.as_ref();
                let admin = server.and_then(|server| server.connections.get(&link.admin));
                let is_alive = admin.is_some_and(|admin| admin.connection.end().is_none());
                let is_meant = server.is_some_and(|server| server.expelled.contains(&host))
                    || self.reset_links.contains(&link.admin);
                if is_alive && !is_meant {
                    self.violate(format!("a queue of host {host} ended, whose controller did not"));
                }
            }
            End::Wrong(why) => self.violate(format!("the connection of host {host} ended: {why}")),
        }
    }

    pub(super) fn close_at_target(&mut self, id: LinkId) {
        let Some(server) = &mut self.server else {
            return;
        };
        let Some(served) = server.connections.remove(&id) else {
            return;
        };
        let has_io_queues = served.connection.has_io_queues();
        drop(served);
        if let Some(link) = self.links.get_mut(&id) {
            link.to_target.is_over = true;
            link.to_host.close(self.now);
        }
        self.schedule_pipe(id, Side::Host);
        if has_io_queues {
            let at = self.now + self.dice.below(2 * MS);
            self.schedule(at, Event::Change);
        }
    }

    /// All connections look at what they share.
    pub(super) fn tell_of_change(&mut self) {
        let Some(server) = &mut self.server else {
            return;
        };
        for served in server.connections.values_mut() {
            served.connection.handle_change();
        }
        let ids: Vec<LinkId> = server.connections.keys().copied().collect();
        ids.into_iter().for_each(|id| self.pump(id));
    }

    pub(super) fn look_at_deadlines(&mut self) {
        let (now, instant) = (self.now, self.instant());
        let Some(server) = &mut self.server else {
            return;
        };
        let ids: Vec<LinkId> = server.connections.keys().copied().collect();
        for id in ids {
            let Some(served) = self
                .server
                .as_mut()
                .and_then(|server| server.connections.get_mut(&id))
            else {
                continue;
            };
            if served.closes_at.is_some_and(|closes_at| closes_at <= now) {
                self.close_at_target(id);
                continue;
            }
            served.connection.handle_timeout(instant);
            let silent_for = now - served.heard;
            let is_late = silent_for > CONNECT_NS.max(KEEP_ALIVE_NS + GRACE_NS) + 2 * LOOK_NS;
            if is_late && self.links[&id].admin == id && served.connection.end().is_none() {
                let host = self.links[&id].host;
                self.violate(format!("the keep-alive of host {host} does not expire"));
            }
            self.pump(id);
        }
    }

    fn media_delay(&mut self) -> u64 {
        if self.has_faults && self.dice.one_in(self.hangs) {
            return self.dice.below(40 * SECOND);
        }
        match self.dice.below(if self.has_faults { 60 } else { 50 }) {
            0..30 => self.dice.below(MS),
            30..50 => self.dice.below(30 * MS),
            _ => self.dice.below(2 * SECOND),
        }
    }

    /// A medium goes on with an I/O.
    pub(super) fn handle_media(&mut self, id: u64) {
        let Some(server) = &mut self.server else {
            return;
        };
        // A thread waits as long as a medium takes: mostly it has not begun to.
        if self.has_faults && server.jobs.would_wait(id) && !self.dice.one_in(10) {
            let at = self.now + self.dice.below(SECOND);
            return self.schedule(at, Event::Media(id));
        }
        let is_scheduled = match server.jobs.get(id).map(|job| &job.stage) {
            None => return,
            Some(Stage::Waiting(_)) => server.jobs.start(id),
            Some(Stage::Started(_)) => {
                server.jobs.land(id);
                true
            }
            Some(Stage::OfThread(_)) => false,
        };
        if !is_scheduled {
            self.run_on_thread(id);
        } else if self
            .server
            .as_ref()
            .is_some_and(|server| server.jobs.get(id).is_some())
        {
            let at = self.now + self.media_delay();
            self.schedule(at, Event::Media(id));
        }
        self.schedule_started();
        self.report_finished();
    }

    fn run_on_thread(&mut self, id: u64) {
        let Some(server) = &mut self.server else {
            return;
        };
        let Some(job) = server.jobs.take(id) else {
            return;
        };
        let (Stage::Waiting(mut work) | Stage::OfThread(mut work)) = job.stage else {
            return;
        };
        let status = server.jobs.execute(job.host, &mut work);
        let nsid = work.io().namespace.nsid.0;
        if let Operation::Reserve(command) = work.io().operation {
            self.reserved(job.link, nsid, &command, status);
        }
        if let Some(server) = &mut self.server {
            server.jobs.finished.push((job.link, work, status));
        }
    }

    /// A reservation command was carried out: the checker's own reservations change with it.
    fn reserved(&mut self, link: LinkId, nsid: u32, command: &ReservationCommand, status: Status) {
        self.executed.insert(link, status);
        let was_not_saved = self.store.take_failed();
        if status.is(Status::SQ_DELETED)
            || status.is(Status::ABORT_REQUESTED)
            || (was_not_saved && status.is(Status::INTERNAL_ERROR))
        {
            return;
        }
        let Some(keys) = self.reserving.get(&link).copied() else {
            return self.violate("a reservation command ran that no host has sent".to_owned());
        };
        let host = self.links[&link].host;
        let before = self.disks[&nsid].reservations();
        let expected = self.disks[&nsid].reserve(|model| model.apply(host, command, &keys));
        let expected = expected.err().unwrap_or(Status::SUCCESS);
        self.counts.reservations += u64::from(status.is_success());
        if !status.is(expected) {
            self.violate(format!(
                "{command:?} of host {host} with {keys:?} gave {status} instead of {expected}: {before:?}"
            ));
        }
    }

    fn schedule_started(&mut self) {
        let Some(server) = &mut self.server else {
            return;
        };
        for id in std::mem::take(&mut server.jobs.started) {
            let at = self.now + self.media_delay();
            self.schedule(at, Event::Media(id));
        }
    }

    /// Connections learn of I/Os that are done.
    fn report_finished(&mut self) {
        while let Some(server) = &mut self.server {
            let Some((link, work, status)) = server.jobs.finished.pop() else {
                return;
            };
            let Some(served) = server.connections.get_mut(&link) else {
                continue;
            };
            served.connection.complete(work, status, &mut server.buffers);
            self.pump(link);
        }
    }
}

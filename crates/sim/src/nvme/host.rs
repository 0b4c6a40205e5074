//! A host: makes controllers and queues by the shipped state machines of the host's side, and makes new ones when they are lost.
//!
//! A host that was not told of the end of its controller waits until that has expired: what it had sent before may still arrive.

use std::collections::BTreeMap;
use std::time::Duration;

use rdmux_nvmf::host::queue::{Command, Completion};
use rdmux_nvmf::host::setup::{Setup, Step};
use rdmux_nvmf::host::{ControllerInfo, Options, Transport, command, rdma, tcp};
use rdmux_wire::nvme::{
    Cid, Configuration, CopyFormat, FabricsType, LogId, NsId, Opcode, Property, Register, Sqe,
};

use rdmux_wire::nvme_rdma::Request;

use super::checker::WriteId;
use super::operation::Operation;
use super::rdma::HostQp;
use super::run::{Event, Run};
use super::server::{LOOK_NS, address};
use super::stream::{Eof, Link, LinkId, Side};
use super::transport::HostConnection;
use super::{KEEP_ALIVE_NS, MS, SECOND, SLACK_NS};

const ADMIN_ENTRIES: u16 = 32;
const ADMIN_IN_CAPSULE_MAX: u32 = 8 << 10;
/// Time after which a controller has expired that was not told of its host's end.
const EXPIRED_NS: u64 = SLACK_NS + KEEP_ALIVE_NS + SECOND + 3 * LOOK_NS;
/// Tokens of commands that are no operations.
const EVENT: u64 = u64::MAX;
const KEEP_ALIVE: u64 = u64::MAX - 1;
const LOG: u64 = u64::MAX - 2;
const ABORT: u64 = u64::MAX - 3;
const CONFIGURE: u64 = u64::MAX - 4;
const STATUS: u64 = u64::MAX - 5;
const BEHAVIOR: u64 = u64::MAX - 6;
/// Shutdown notification of CC, and the states of CSTS: ready, failed, shutdown complete.
const SHUTDOWN_NORMAL: u64 = 1 << 14;
const READY: u64 = 1;
const FAILED: u64 = 1 << 1;
const SHUTDOWN_COMPLETE: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It has died.
    Dead,
    /// It connects at a time.
    Waits,
    /// It makes its controller.
    Admin,
    /// It makes its queues.
    Queues,
    Ready,
    /// It resets its controller, or shuts it down: since the time at which it asked for that.
    Resets(Ending, u64),
    /// It is done.
    Over,
}

/// End of a controller that its host asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Reset,
    Shutdown,
}

#[derive(Debug)]
pub(super) struct Host<'a> {
    options: &'a Options,
    pub(super) phase: Phase,
    /// Number of controllers so far: what was planned for one is not for the next.
    pub(super) generation: u64,
    admin: Option<Queue<'a>>,
    pub(super) queues: Vec<Queue<'a>>,
    info: Option<ControllerInfo>,
    pub(super) operations: BTreeMap<u64, Operation>,
    /// Commands of the controller before that are to be sent again.
    pub(super) repeats: Vec<Command>,
    /// Writes of which it does not know what has become of them.
    unknown: Vec<WriteId>,
    pub(super) left: u32,
    pub(super) depth: usize,
    pub(super) reserves: bool,
    kept_alive: u64,
    queues_number: u16,
    in_capsule_max: u32,
    /// By RDMA its commands ask for their keys to be invalidated.
    invalidates: bool,
}

/// A queue that a host opens.
#[derive(Clone, Copy, Debug)]
struct QueueParams {
    qid: u16,
    entries: u16,
    in_capsule_max: u32,
    cntlid: u16,
}

#[derive(Debug)]
pub(super) struct Queue<'a> {
    pub(super) id: LinkId,
    pub(super) connection: HostConnection,
    setup: Option<Setup<'a>>,
    /// The command of the setup that is not done.
    awaited: Option<&'static str>,
    waits: bool,
    opened: u64,
}

impl<'a> Host<'a> {
    pub(super) fn new(options: &'a Options, left: u32, dice: &mut crate::dice::Dice) -> Host<'a> {
        Host {
            options,
            phase: Phase::Waits,
            generation: 0,
            admin: None,
            queues: Vec::new(),
            info: None,
            operations: BTreeMap::new(),
            repeats: Vec::new(),
            unknown: Vec::new(),
            left,
            depth: dice.between(1, 8) as usize,
            reserves: false,
            kept_alive: 0,
            queues_number: dice.between(1, 2) as u16,
            in_capsule_max: dice.pick(&[0, 1024, 16 << 10, 16 << 10]),
            invalidates: dice.one_in(2),
        }
    }

    /// Returns its connections.
    pub(super) fn links(&self) -> Vec<LinkId> {
        let queues = self.queues.iter().chain(&self.admin);
        queues.map(|queue| queue.id).collect()
    }

    fn queue(&mut self, id: LinkId) -> Option<&mut Queue<'a>> {
        let mut queues = self.queues.iter_mut().chain(&mut self.admin);
        queues.find(|queue| queue.id == id)
    }

    /// Returns true if there is a queue with room for a command.
    pub(super) fn has_room(&self) -> bool {
        self.queues.iter().any(|queue| queue.connection.room() > 0)
    }

    /// Returns the writes that its lost controllers had.
    pub(super) fn open_writes(&self) -> Vec<WriteId> {
        let of_repeats = self.repeats.iter();
        let of_repeats = of_repeats.filter_map(|command| self.operations.get(&(command.token >> 1)));
        let of_repeats = of_repeats.flat_map(|operation| &operation.writes);
        self.unknown.iter().chain(of_repeats).copied().collect()
    }

    pub(super) fn in_flight(&self) -> usize {
        let of_queues = self.queues.iter().map(|queue| queue.connection.in_flight());
        of_queues.sum::<usize>() + self.repeats.len() + self.operations.len()
    }
}

fn property(kind: FabricsType, register: Register, value: u64, token: u64) -> Command {
    let property = Property {
        register,
        is_wide: false,
        value,
    };
    let mut command = Command::new(property.command(kind, Cid(0)));
    command.token = token;
    command
}

impl<'a> Run<'a> {
    /// Opens a connection. `None` if no target is there.
    fn open(
        &mut self,
        nr: usize,
        setup: Setup<'a>,
        params: QueueParams,
        admin: Option<LinkId>,
    ) -> Option<Queue<'a>> {
        let host = &self.hosts[nr];
        let QueueParams {
            qid,
            entries,
            in_capsule_max,
            cntlid,
        } = params;
        let request = Request {
            qid,
            receives: entries,
            sends: entries - 1,
            cntlid,
        };
        let is_io = qid > 0;
        let (connection, request) = match host.options.transport {
            Transport::Tcp => {
                let config = tcp::Config {
                    digests: host.options.digests,
                    entries,
                    in_capsule_max,
                    is_io,
                };
                let connection = tcp::Connection::new(config);
                (HostConnection::Tcp(Box::new(connection)), None)
            }
            Transport::Rdma => {
                let config = rdma::Config {
                    entries,
                    in_capsule_max: if is_io { in_capsule_max } else { 0 },
                    is_io,
                };
                let qp = HostQp::new(config, host.invalidates);
                (HostConnection::Rdma(Box::new(qp)), Some(request))
            }
        };
        self.last_link += 1;
        let id = self.last_link;
        let local = match admin.and_then(|admin| self.links.get(&admin)) {
            Some(link) => link.local,
            None if self.with_paths => address(nr % 2),
            None => address(self.dice.below(2) as usize),
        };
        let life = self.accept(id, local, request.as_ref())?;
        let link = Link::new(nr, admin.unwrap_or(id), life, local, &mut self.dice);
        self.links.insert(id, link);
        Some(Queue {
            id,
            connection,
            setup: Some(setup),
            awaited: None,
            waits: false,
            opened: self.now,
        })
    }

    /// A host makes a controller.
    pub(super) fn connect(&mut self, nr: usize) {
        let host = &mut self.hosts[nr];
        if host.phase != Phase::Waits {
            return;
        }
        host.generation += 1;
        let (options, queues) = (host.options, host.queues_number);
        let params = QueueParams {
            qid: 0,
            entries: ADMIN_ENTRIES,
            in_capsule_max: ADMIN_IN_CAPSULE_MAX,
            cntlid: 0,
        };
        let Some(queue) = self.open(nr, Setup::admin(options, queues), params, None) else {
            return self.try_again(nr, 0);
        };
        let id = queue.id;
        let host = &mut self.hosts[nr];
        host.phase = Phase::Admin;
        host.kept_alive = self.now;
        host.admin = Some(queue);
        self.advance_host(nr, id);
    }

    fn try_again(&mut self, nr: usize, after: u64) {
        let at = self.now + after + 20 * MS + self.dice.below(300 * MS);
        let generation = self.hosts[nr].generation;
        self.schedule(at, Event::Connect(nr, generation));
    }

    /// Bytes, or the end of a connection, arrive at a host.
    pub(super) fn arrive_at_host(&mut self, id: LinkId) {
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let nr = link.host;
        let Some(queue) = self.hosts[nr].queue(id) else {
            link.to_host.is_over = true;
            return;
        };
        if let Some(eof) = link.to_host.end(now)
            && link.to_host.is_empty()
        {
            link.to_host.is_over = true;
            return match (eof, link.admin == id) {
                (Eof::Closed, true) => self.lose(nr, true),
                // The end of the controller may be on its way.
                (Eof::Closed, false) => {
                    let generation = self.hosts[nr].generation;
                    self.schedule(now + 50 * MS, Event::QueueClosed(nr, generation));
                }
                (Eof::Broken, _) => self.lose(nr, false),
            };
        }
        queue.connection.receive(&mut link.to_host, &mut self.dice);
        self.advance_host(nr, id);
        // There is room for what the target waits to send.
        self.pump(id);
        self.schedule_pipe(id, Side::Host);
    }

    pub(super) fn send_from_host(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let nr = link.host;
        let Some(queue) = self.hosts[nr].queue(id) else {
            return;
        };
        queue.connection.send(&mut link.to_target);
        // A command that was refused early is done once its data have left.
        let has_completions = queue.connection.has_completions();
        self.schedule_pipe(id, Side::Target);
        if has_completions {
            self.advance_host(nr, id);
        }
    }

    /// Goes on with a connection, as far as that is possible now.
    fn advance_host(&mut self, nr: usize, id: LinkId) {
        let deadline = Some(self.instant() + self.hosts[nr].options.admin_timeout);
        loop {
            let Some(queue) = self.hosts[nr].queue(id) else {
                return;
            };
            if let Some(end) = queue.connection.end() {
                return self.violate(format!("host {nr}: {end}"));
            }
            if !queue.connection.is_ready() {
                break;
            }
            let Some(setup) = &mut queue.setup else {
                let Some(completion) = queue.connection.poll() else {
                    break;
                };
                self.handle_completion(nr, id, completion);
                continue;
            };
            if let Some(what) = queue.awaited {
                let Some(completion) = queue.connection.poll() else {
                    break;
                };
                if completion.command.token == EVENT {
                    self.handle_event(nr, &completion);
                    continue;
                }
                queue.awaited = None;
                // The controller may be gone since, or the host expelled.
                if setup.handle(what, &completion).is_err() {
                    return self.lose(nr, false);
                }
                continue;
            }
            if queue.waits {
                break;
            }
            match setup.next() {
                Err(_) => return self.lose(nr, false),
                Ok(Step::Submit(what, command)) => {
                    queue.awaited = Some(what);
                    queue.connection.submit(*command, deadline);
                }
                Ok(Step::Post(mut command)) => {
                    command.token = EVENT;
                    queue.connection.submit(*command, None);
                }
                Ok(Step::Wait(time)) => {
                    queue.waits = true;
                    self.counts.held_back += 1;
                    let at = self.now + time.as_nanos() as u64;
                    self.schedule(at, Event::SetupWaited(nr, id));
                    break;
                }
                Ok(Step::Done) => {
                    let setup = queue.setup.take();
                    self.set_up(nr, setup);
                }
            }
        }
        self.send_from_host(id);
    }

    pub(super) fn setup_waited(&mut self, nr: usize, id: LinkId) {
        if let Some(queue) = self.hosts[nr].queue(id) {
            queue.waits = false;
            self.advance_host(nr, id);
        }
    }

    /// A queue is ready.
    fn set_up(&mut self, nr: usize, setup: Option<Setup<'a>>) {
        let host = &mut self.hosts[nr];
        if host.phase == Phase::Admin {
            let info = setup.and_then(Setup::controller);
            let Some(info) = info else {
                return self.violate(format!("the controller of host {nr} is none"));
            };
            self.counts.controllers += 1;
            let is_rdma = self.hosts[nr].options.transport == Transport::Rdma;
            self.counts.by_rdma += u64::from(is_rdma);
            self.close_unknown(nr);
            let host = &mut self.hosts[nr];
            host.phase = Phase::Queues;
            host.info = Some(info);
            return self.enable_copies(nr);
        }
        let is_ready = |queue: &Queue<'_>| queue.setup.is_none();
        if host.phase == Phase::Queues && host.queues.iter().all(is_ready) {
            host.phase = Phase::Ready;
            for command in std::mem::take(&mut host.repeats) {
                self.counts.repeats += 1;
                self.submit_again(nr, command);
            }
            self.issue_later(nr);
        }
    }

    /// Nothing acts any more that the host has sent to controllers before this one.
    pub(super) fn close_unknown(&mut self, nr: usize) {
        let now = self.ticks.next();
        for write in std::mem::take(&mut self.hosts[nr].unknown) {
            self.checker.close(write, now);
        }
    }

    fn open_queue(&mut self, nr: usize, qid: u16) {
        let host = &self.hosts[nr];
        let (Some(info), Some(admin)) = (&host.info, &host.admin) else {
            return;
        };
        let (options, admin) = (host.options, admin.id);
        let entries = host.depth as u16 + 3;
        let params = QueueParams {
            qid,
            entries,
            in_capsule_max: info.in_capsule_max.min(host.in_capsule_max),
            cntlid: info.cntlid,
        };
        let setup = Setup::io(options, qid, entries, info.cntlid);
        match self.open(nr, setup, params, Some(admin)) {
            None => self.lose(nr, false),
            Some(queue) => {
                let id = queue.id;
                self.hosts[nr].queues.push(queue);
                self.advance_host(nr, id);
            }
        }
    }

    /// A controller is lost. `is_told`: its target has said so.
    pub(super) fn lose(&mut self, nr: usize, is_told: bool) {
        if matches!(self.hosts[nr].phase, Phase::Dead | Phase::Waits | Phase::Over) {
            return;
        }
        self.counts.losses += 1;
        if self
            .calm_since
            .is_some_and(|since| self.now > since + 150 * SECOND)
        {
            self.violate(format!(
                "host {nr} has lost its controller, although nothing fails"
            ));
        }
        self.hosts[nr].phase = Phase::Waits;
        self.abandon(nr);
        let after = if is_told { 0 } else { EXPIRED_NS };
        self.path_lost(nr, self.now + after);
        self.try_again(nr, after);
    }

    /// Closes all connections, and keeps what is to be sent again.
    fn abandon(&mut self, nr: usize) {
        let now = self.now;
        for id in self.hosts[nr].links() {
            if let Some(link) = self.links.get_mut(&id) {
                link.to_target.close(now);
                link.to_host.is_over = true;
            }
            self.schedule_pipe(id, Side::Target);
        }
        let host = &mut self.hosts[nr];
        host.admin = None;
        let mut completions = Vec::new();
        let mut commands = std::mem::take(&mut host.repeats);
        for mut queue in std::mem::take(&mut host.queues) {
            while let Some(completion) = queue.connection.poll() {
                completions.push((queue.id, completion));
            }
            commands.extend(queue.connection.take_commands());
        }
        for (id, completion) in completions {
            if completion.command.token < BEHAVIOR && !completion.command.sqe.opcode().eq(&Opcode::FABRICS) {
                self.operation_done(nr, id, completion);
            }
        }
        for command in commands {
            if command.sqe.opcode() == Opcode::FABRICS {
                continue;
            }
            if let Some(command) = self.operation_lost(nr, command) {
                self.hosts[nr].repeats.push(command);
            }
        }
    }

    /// Leaves writes open whose results are not known.
    pub(super) fn leave_open(&mut self, nr: usize, writes: &[WriteId]) {
        self.hosts[nr].unknown.extend_from_slice(writes);
    }

    /// A host dies: its connections fall silent.
    pub(super) fn die(&mut self, nr: usize) {
        self.counts.deaths += 1;
        for id in self.hosts[nr].links() {
            self.stalled.insert(id);
            if let Some(link) = self.links.get_mut(&id) {
                link.to_target.cut(false, self.now, &mut self.dice);
                link.to_host.is_over = true;
                self.schedule(self.now + SLACK_NS, Event::Silence(id));
            }
        }
        let host = &mut self.hosts[nr];
        (host.phase, host.admin) = (Phase::Dead, None);
        host.queues.clear();
        host.repeats.clear();
        let operations = std::mem::take(&mut host.operations);
        host.reserves = false;
        for operation in operations.into_values() {
            self.leave_open(nr, &operation.writes);
        }
    }

    /// A host that has died starts again.
    pub(super) fn revive(&mut self, nr: usize) {
        if self.hosts[nr].phase == Phase::Dead {
            self.hosts[nr].phase = Phase::Waits;
            self.try_again(nr, EXPIRED_NS);
        }
    }

    /// Looks at the deadlines of a host, and keeps its controller alive.
    pub(super) fn tick(&mut self, nr: usize) {
        let (now, instant) = (self.now, self.instant());
        let host = &mut self.hosts[nr];
        let timeout = host.options.admin_timeout;
        let mut queues = host.queues.iter().chain(&host.admin);
        let is_late = queues.any(|queue| {
            // The beginning of a connection has no command.
            let is_starting = !queue.connection.is_ready();
            let begins_late = is_starting && now - queue.opened > timeout.as_nanos() as u64;
            begins_late || queue.connection.has_expired(instant)
        });
        if is_late {
            return self.lose(nr, false);
        }
        let is_set_up = host.admin.as_ref().is_some_and(|admin| admin.setup.is_none());
        if is_set_up && now - host.kept_alive >= KEEP_ALIVE_NS / 2 {
            host.kept_alive = now;
            let mut command = Command::new(Sqe::new(Opcode::KEEP_ALIVE, Cid(0), NsId::NONE));
            command.token = KEEP_ALIVE;
            self.submit_admin(nr, command, Some(timeout));
        }
    }

    fn submit_admin(&mut self, nr: usize, command: Command, timeout: Option<Duration>) {
        let deadline = timeout.map(|timeout| self.instant() + timeout);
        let Some(admin) = &mut self.hosts[nr].admin else {
            return;
        };
        if admin.connection.room() > 1 {
            admin.connection.submit(command, deadline);
            let id = admin.id;
            self.send_from_host(id);
        }
    }

    /// Asks for copies from one namespace to another, before it has queues for them (Host Behavior Support, feature 16h: CDFE).
    fn enable_copies(&mut self, nr: usize) {
        let mut sqe = Sqe::new(Opcode::SET_FEATURES, Cid(0), NsId::NONE);
        sqe.set_dword(10, 0x16);
        let mut behavior = vec![0; 512];
        behavior[4..6].copy_from_slice(&CopyFormat::Any.bit().to_le_bytes());
        let mut command = Command::sending(sqe, behavior);
        command.token = BEHAVIOR;
        self.submit_admin(nr, command, Some(Duration::from_secs(10)));
    }

    /// Asks for any command to be aborted.
    pub(super) fn abort(&mut self, nr: usize) {
        let qid = self.dice.between(1, 2) as u32;
        let slot = self.dice.below(self.hosts[nr].depth as u64) as u32;
        let cid = slot + (self.dice.below(4) as u32) * 1024;
        let mut sqe = Sqe::new(Opcode::ABORT, Cid(0), NsId::NONE);
        sqe.set_dword(10, cid << 16 | qid);
        let mut command = Command::new(sqe);
        command.token = ABORT;
        self.submit_admin(nr, command, Some(Duration::from_secs(60)));
    }

    /// Resets the controller, or shuts it down.
    pub(super) fn reset(&mut self, nr: usize, ending: Ending) {
        if self.hosts[nr].phase != Phase::Ready {
            return;
        }
        self.counts.resets += 1;
        let begin = self.ticks.next();
        let host = &mut self.hosts[nr];
        host.phase = Phase::Resets(ending, begin);
        if let Some(admin) = &host.admin {
            self.reset_links.insert(admin.id);
        }
        let value = match ending {
            Ending::Reset => 0,
            Ending::Shutdown => u64::from(Configuration::enabled().0) | SHUTDOWN_NORMAL,
        };
        let set = property(
            FabricsType::PROPERTY_SET,
            Register::CONFIGURATION,
            value,
            CONFIGURE,
        );
        self.submit_admin(nr, set, Some(Duration::from_secs(10)));
    }

    pub(super) fn look_at_status(&mut self, nr: usize) {
        if matches!(self.hosts[nr].phase, Phase::Resets(..)) {
            let get = property(FabricsType::PROPERTY_GET, Register::STATUS, 0, STATUS);
            self.submit_admin(nr, get, Some(Duration::from_secs(10)));
        }
    }

    fn handle_status(&mut self, nr: usize, status: u64) {
        let Phase::Resets(ending, begin) = self.hosts[nr].phase else {
            return;
        };
        let is_over = match ending {
            Ending::Reset => status & READY == 0,
            Ending::Shutdown => status >> 2 & 3 == SHUTDOWN_COMPLETE,
        };
        if !is_over {
            let at = self.now + 5 * MS + self.dice.below(50 * MS);
            return self.schedule(at, Event::LookAtStatus(nr, self.hosts[nr].generation));
        }
        if ending == Ending::Shutdown && status & FAILED == 0 {
            self.flushed_all(begin);
        }
        self.abandon(nr);
        // The host knows that nothing of it acts any more, and gives up what was not done.
        for command in std::mem::take(&mut self.hosts[nr].repeats) {
            self.give_up(nr, &command);
        }
        self.close_unknown(nr);
        self.hosts[nr].phase = Phase::Waits;
        self.try_again(nr, 0);
    }

    fn handle_event(&mut self, nr: usize, completion: &Completion) {
        if !completion.status.is_success() {
            return;
        }
        self.counts.events += 1;
        let log = LogId((completion.result >> 16) as u8);
        let mut command = command::log_page(log, NsId::ALL, 0, 64, false);
        command.token = LOG;
        self.submit_admin(nr, command, Some(Duration::from_secs(10)));
        let mut command = Command::new(Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(0), NsId::NONE));
        command.token = EVENT;
        self.submit_admin(nr, command, None);
    }

    fn handle_completion(&mut self, nr: usize, id: LinkId, completion: Completion) {
        match completion.command.token {
            EVENT => self.handle_event(nr, &completion),
            KEEP_ALIVE | LOG | ABORT => {}
            CONFIGURE => self.look_at_status(nr),
            STATUS => self.handle_status(nr, completion.result),
            BEHAVIOR if completion.status.is_success() => {
                for qid in 1..=self.hosts[nr].queues_number {
                    self.open_queue(nr, qid);
                }
            }
            BEHAVIOR => self.violate(format!(
                "host {nr}: copies are not enabled: {}",
                completion.status
            )),
            _ => self.operation_done(nr, id, completion),
        }
    }
}

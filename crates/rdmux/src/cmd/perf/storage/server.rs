//! The server: reactors, each a thread with queues of its own to all drives, so that no command takes a lock.

use std::collections::HashMap;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rdmux_memory::AnonymousMemory;
use rdmux_runtime::{
    Completed, ConnectionEnd, ConnectionId, Limits, Mailbox, Reactor, ReactorEvent, Request, SIGNAL_EVERY,
    SendSlot, Sizes, WorkId,
};
use rdmux_verbs::thread::{may_run_on, pin};
use rdmux_verbs::{
    Access, ConnectParams, Device, Features, Memory, MemoryRegion, ModerationPolicy, Operation, Options,
    RKey, SendRequest,
};

use super::capsule::{
    Command, Geometry, Identity, MESSAGE_LEN_MAX, Malformed, Opcode, QUEUE_MAX, Response, Statistics, Status,
};
use super::drive::Drive;
use super::{DRIVE_BYTES_DEFAULT, DRIVE_DEPTH_DEFAULT, DRIVES_DEFAULT, LATENCY_DEFAULT, Queues};
use crate::output;

/// Connections of a reactor.
const CONNECTIONS_MAX: usize = 256;
/// Slots for responses. There are more than three times as many as commands in flight, since a client that continues at once acknowledges
/// many responses together (IBTA Vol 1, 9.7.5.1.2), and its next command needs a slot.
const SLOTS: usize = 3 * QUEUE_MAX + SIGNAL_EVERY;
const SIZES: Sizes = Sizes {
    message_bytes: MESSAGE_LEN_MAX,
    sent_bytes: MESSAGE_LEN_MAX,
    receives: QUEUE_MAX,
    answers: SLOTS,
    own: 0,
    // One for each command: an RDMA WRITE keeps its place in the send queue until the response behind it is acknowledged.
    operations: SLOTS,
};
/// Receives that the connections of a reactor share.
const SHARED_RECEIVES: usize = 16 * QUEUE_MAX;
/// Time of silence after which a client is taken for dead.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Time that a failed connection stays before its client is disconnected, so that the NAK with the cause arrives first.
const LINGER: Duration = Duration::from_millis(200);
/// Maximum number of events handled before the drives.
const EVENTS_MAX: usize = 32;

/// State that the reactors share.
#[derive(Debug)]
struct Shared {
    device: Device,
    geometry: Geometry,
    /// The contents of all drives, one after another.
    contents: Arc<AnonymousMemory>,
    /// The settings at the start.
    started: Identity,
    began: Instant,
    counts: Vec<Counts>,
}

/// Counters of one reactor. Only its thread writes.
#[derive(Debug, Default)]
struct Counts {
    thread: AtomicI32,
    completions: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    refused: AtomicU64,
}

/// Adds one to a counter that one thread writes.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl Shared {
    /// Returns the settings. The moderation of a running device can be changed.
    fn identity(&self) -> Identity {
        Identity {
            moderation: self.device.moderation_policy().to_string(),
            ..self.started.clone()
        }
    }

    fn statistics(&self) -> Statistics {
        let sum = |of: fn(&Counts) -> &AtomicU64| {
            let counts = self
                .counts
                .iter()
                .map(|counts| of(counts).load(Ordering::Relaxed));
            counts.sum::<u64>()
        };
        let mut statistics = Statistics {
            time_ns: self.began.elapsed().as_nanos() as u64,
            cpu_ns: super::process_cpu_ns(),
            completions: sum(|counts| &counts.completions),
            reads: sum(|counts| &counts.reads),
            writes: sum(|counts| &counts.writes),
            refused: sum(|counts| &counts.refused),
            ..Statistics::default()
        };
        for task in std::fs::read_dir("/proc/self/task")
            .into_iter()
            .flatten()
            .flatten()
        {
            let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let wakeups = voluntary_switches(&read("status"));
            let thread = task
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<i32>().ok());
            let is_reactor = |counts: &Counts| Some(counts.thread.load(Ordering::Relaxed)) == thread;
            if self.counts.iter().any(is_reactor) {
                let spent = read("schedstat");
                let spent = spent
                    .split_whitespace()
                    .next()
                    .and_then(|ns| ns.parse::<u64>().ok());
                statistics.reactor_wakeups += wakeups;
                statistics.reactor_cpu_ns += spent.unwrap_or(0);
            } else {
                statistics.other_wakeups += wakeups;
            }
        }
        statistics
    }
}

/// Returns the number that a thread's `status` in `/proc` states. proc_pid_status(5).
fn voluntary_switches(status: &str) -> u64 {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// A message from another thread.
#[derive(Debug)]
enum Mail {
    Stop,
}

/// A command on a drive, or on its way back.
#[derive(Clone, Copy, Debug)]
struct Place {
    connection: ConnectionId,
    slot: SendSlot,
}

/// The commands of a connection, by the slot of the response.
#[derive(Debug)]
struct Client {
    /// The drives' contents. It is dropped before the connection.
    contents: MemoryRegion,
    peer: IpAddr,
    commands: Box<[Option<Accepted>]>,
}

/// A command that names blocks of a drive.
#[derive(Clone, Copy, Debug)]
struct Accepted {
    command: Command,
    offset: u64,
}

/// State of one thread.
#[derive(Debug)]
struct Service {
    clients: HashMap<ConnectionId, Client>,
    reactor: Reactor<Mail>,
    drives: Vec<Drive<Place>>,
    shared: Arc<Shared>,
    /// Its number among the reactors.
    number: usize,
    response: Vec<u8>,
}

pub(super) fn run(args: &super::super::Args) -> Result<()> {
    let options = &args.storage;
    let address = args.bind.unwrap_or(IpAddr::from([127, 0, 0, 1]));
    let policy = options.moderation;
    let device = Device::open_with(
        address,
        Options {
            moderation: policy,
            ..Options::default()
        },
    )?;
    if policy.is_some_and(|policy| policy != ModerationPolicy::Off)
        && !device.features().contains(Features::CQ_MODERATION)
    {
        bail!("the device at {address} does not moderate completion queues: use --moderation off");
    }
    let queues = options.queues.unwrap_or_default();
    let cpus = options.reactor_cpus.as_ref().map_or(&[][..], |cpus| &cpus.0);
    ensure!(
        cpus.len() <= usize::from(options.reactors.unwrap_or(1)),
        "--reactor-cpus names {} CPUs: give as many --reactors, or fewer CPUs",
        cpus.len()
    );
    for &cpu in cpus {
        ensure!(
            may_run_on(cpu),
            "this process may not run on CPU {cpu}: give --reactor-cpus others"
        );
    }
    let geometry = Geometry {
        drives: options.drives.unwrap_or(DRIVES_DEFAULT),
        drive_bytes: options.drive_size.unwrap_or(DRIVE_BYTES_DEFAULT),
    };
    let reactors = options.reactors.unwrap_or(1);
    let identity = Identity {
        geometry,
        latency: options.latency.unwrap_or(LATENCY_DEFAULT),
        depth: options.drive_depth.unwrap_or(DRIVE_DEPTH_DEFAULT),
        queue: QUEUE_MAX as u32,
        reactors: reactors.into(),
        queues: queues.name().into(),
        moderation: device.moderation_policy().to_string(),
    };
    let bytes =
        usize::try_from(geometry.bytes()).context("the drives are larger than this machine's memory")?;
    let contents = super::super::memory(args.memory, bytes).with_context(|| {
        let size = output::bytes(geometry.bytes());
        format!("cannot allocate {size} for the drives: use fewer --drives or a smaller --drive-size")
    })?;
    // The first access of a page costs a fault.
    for at in (0..geometry.bytes()).step_by(4096) {
        contents.write(at, &[0]).ok();
    }
    let server = Server::start(&device, args.port, identity, queues, cpus, contents)?;
    let stopper = server.stopper.clone();
    ctrlc::set_handler(move || stopper.stop()).context("cannot install signal handlers")?;
    announce(
        &server.shared.started,
        SocketAddr::new(address, args.port),
        args.json,
    );
    server.join()
}

/// Ends a server from another thread.
#[derive(Clone, Debug)]
struct Stopper(Vec<Mailbox<Mail>>);

impl Stopper {
    fn stop(&self) {
        for mailbox in &self.0 {
            mailbox.send(Mail::Stop);
        }
    }
}

/// A server that clients can connect to.
#[derive(Debug)]
struct Server {
    shared: Arc<Shared>,
    stopper: Stopper,
    threads: Vec<JoinHandle<std::io::Result<()>>>,
}

impl Server {
    fn start(
        device: &Device,
        port: u16,
        identity: Identity,
        queues: Queues,
        cpus: &[usize],
        contents: AnonymousMemory,
    ) -> Result<Server> {
        let limits = limits(queues);
        let new = |_| Reactor::new(SIZES, limits.clone(), None);
        let mut reactors = (0..identity.reactors).map(new).collect::<Result<Vec<_>, _>>()?;
        Reactor::listen_together(&mut reactors, device, port)
            .with_context(|| format!("cannot serve at {}", SocketAddr::new(device.address(), port)))?;
        let stopper = Stopper(reactors.iter().map(Reactor::mailbox).collect());
        let shared = Arc::new(Shared {
            device: device.clone(),
            geometry: identity.geometry,
            contents: Arc::new(contents),
            started: identity,
            began: Instant::now(),
            counts: reactors.iter().map(|_| Counts::default()).collect(),
        });
        let mut threads = Vec::new();
        for (number, reactor) in reactors.into_iter().enumerate() {
            let service = Service::new(reactor, shared.clone(), number);
            let stopper = stopper.clone();
            let cpu = cpus.iter().cycle().nth(number).copied();
            let thread = std::thread::Builder::new().name(format!("storage-{number}"));
            threads.push(thread.spawn(move || {
                let result = cpu.map_or(Ok(()), pin).and_then(|()| service.run());
                // One that fails ends the others.
                stopper.stop();
                result
            })?);
        }
        Ok(Server {
            shared,
            stopper,
            threads,
        })
    }

    /// Waits until it is stopped.
    fn join(self) -> Result<()> {
        for thread in self.threads {
            match thread.join() {
                Ok(result) => result.context("the server's wait for its clients has failed")?,
                Err(_) => bail!("a thread of the server has panicked"),
            }
        }
        Ok(())
    }
}

/// Returns the limits of each reactor.
fn limits(queues: Queues) -> Limits {
    Limits {
        connections: CONNECTIONS_MAX,
        keepalive: KEEPALIVE,
        shared_receives: Some(SHARED_RECEIVES),
        queues: match queues {
            Queues::Pool => rdmux_runtime::Queues::Pool,
            Queues::Private => rdmux_runtime::Queues::Private,
        },
        ledger: None,
    }
}

/// Says that clients can connect.
fn announce(identity: &Identity, at: SocketAddr, json: bool) {
    output::say(&if json {
        let server = super::client::server_json(identity);
        serde_json::json!({ "listening": at.to_string(), "server": server }).to_string()
    } else {
        format!("listening on {at}: {}", super::client::server_words(identity))
    });
}

impl Service {
    fn new(reactor: Reactor<Mail>, shared: Arc<Shared>, number: usize) -> Service {
        let started = &shared.started;
        let drive = |_| Drive::new(started.latency, started.depth as usize);
        Service {
            clients: HashMap::new(),
            reactor,
            drives: (0..started.geometry.drives).map(drive).collect(),
            shared,
            number,
            response: Vec::with_capacity(MESSAGE_LEN_MAX),
        }
    }

    fn now(&self) -> Duration {
        self.shared.began.elapsed()
    }

    fn counts(&self) -> &Counts {
        &self.shared.counts[self.number]
    }

    /// Serves until it is stopped.
    fn run(mut self) -> std::io::Result<()> {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.counts().thread.store(thread, Ordering::Relaxed);
        loop {
            let next = self.drives.iter().filter_map(Drive::poll_timeout).min();
            let mut event = self.reactor.next(next.map(|next| self.shared.began + next))?;
            let mut events = 0;
            while let Some(happened) = event {
                if matches!(happened, ReactorEvent::Mail(Mail::Stop)) {
                    return Ok(());
                }
                self.handle(happened);
                events += 1;
                // The drives wait for the clients' messages no longer than this.
                event = (events < EVENTS_MAX).then(|| self.reactor.poll()).flatten();
            }
            let now = self.now();
            for drive in 0..self.drives.len() {
                self.poll_drive(drive, now);
            }
        }
    }

    fn handle(&mut self, event: ReactorEvent<Mail>) {
        match event {
            ReactorEvent::Request(request) => self.accept(request),
            ReactorEvent::Completed(connection, completed) => {
                count(&self.counts().completions);
                match completed {
                    Completed::Message {
                        slot: Some(slot),
                        bytes,
                    } => self.message(Place { connection, slot }, &bytes),
                    Completed::Operation(number) => {
                        let slot = SendSlot::new(number as usize);
                        self.moved(Place { connection, slot });
                    }
                    _ => {}
                }
            }
            ReactorEvent::Ended(connection, end) => self.ended(connection, end),
            // The server dials nobody, and has no descriptors of its own.
            ReactorEvent::Mail(_)
            | ReactorEvent::Connected(..)
            | ReactorEvent::Readable(_)
            | ReactorEvent::Writable(_) => {}
        }
    }

    fn accept(&mut self, request: Request) {
        let peer = request.peer();
        if let Err(why) = self.accept_one(request, peer) {
            complain(&format!("refused {peer}: {why:#}"));
        }
    }

    fn accept_one(&mut self, request: Request, peer: IpAddr) -> Result<()> {
        let id = self.reactor.accept(request, &ConnectParams::default())?;
        self.reactor.watch(id);
        let Some(connection) = self.reactor.connection(id) else {
            return Ok(());
        };
        let contents = &self.shared.contents;
        let registered =
            connection
                .pd()
                .reg_mr_all(contents.clone(), contents.address(), Access::LOCAL_WRITE);
        match registered {
            Ok(contents) => {
                let client = Client {
                    contents,
                    peer,
                    commands: vec![None; SLOTS].into(),
                };
                self.clients.insert(id, client);
                Ok(())
            }
            Err(why) => {
                self.reactor.close(id, None);
                Err(why).context("cannot register the drives' contents")
            }
        }
    }

    fn ended(&mut self, connection: ConnectionId, end: ConnectionEnd) {
        let why = match end {
            ConnectionEnd::Disconnected => None,
            ConnectionEnd::Failed(status) => Some(format!("the connection failed: {status}")),
            ConnectionEnd::Silent => Some(format!("it was silent for {} s", KEEPALIVE.as_secs())),
            ConnectionEnd::Lost => Some("the connection is lost".into()),
        };
        let failed = matches!(end, ConnectionEnd::Failed(_));
        self.close(connection, why.as_deref(), failed.then_some(LINGER));
    }

    /// Closes a connection, and prints why unless its client has ended it.
    fn close(&mut self, connection: ConnectionId, why: Option<&str>, linger: Option<Duration>) {
        let client = self.clients.remove(&connection);
        if let (Some(client), Some(why)) = (&client, why) {
            complain(&format!("closed the connection of {}: {why}", client.peer));
        }
        drop(client);
        self.reactor.close(connection, linger);
    }

    fn message(&mut self, place: Place, message: &[u8]) {
        let command = match Command::parse(message) {
            Ok(command) => command,
            Err(Malformed::Refused(id, status)) => return self.refuse(place, id, status),
            Err(why) => return self.close(place.connection, Some(&why.to_string()), None),
        };
        match command.opcode {
            Opcode::Identify => {
                let identity = self.shared.identity();
                self.respond(place, command.id, Status::Success, 0, |into| identity.emit(into));
            }
            Opcode::Statistics => {
                let statistics = self.shared.statistics();
                self.respond(place, command.id, Status::Success, 0, |into| {
                    statistics.emit(into)
                });
            }
            Opcode::Read | Opcode::Write => match self.shared.geometry.offset_of(&command) {
                Ok(offset) => self.submit(place, Accepted { command, offset }),
                Err(status) => self.refuse(place, command.id, status),
            },
        }
    }

    fn refuse(&mut self, place: Place, id: u16, status: Status) {
        count(&self.counts().refused);
        self.respond(place, id, status, 0, |_| {});
    }

    fn submit(&mut self, place: Place, accepted: Accepted) {
        let now = self.now();
        let at = accepted.command.drive as usize;
        let slot = self
            .clients
            .get_mut(&place.connection)
            .and_then(|client| client.commands.get_mut(place.slot.index()));
        let (Some(slot), Some(drive)) = (slot, self.drives.get_mut(at)) else {
            return;
        };
        *slot = Some(accepted);
        drive.submit(now, place);
        // A drive without latency has done it.
        self.poll_drive(at, now);
    }

    fn poll_drive(&mut self, drive: usize, now: Duration) {
        while let Some(place) = self.drives.get_mut(drive).and_then(|drive| drive.poll(now)) {
            self.move_bytes(place);
        }
    }

    /// Moves the bytes of a command that its drive has finished.
    fn move_bytes(&mut self, place: Place) {
        let Place { connection, slot } = place;
        // The client may have gone since.
        let (Some(client), Some(link)) = (self.clients.get(&connection), self.reactor.connection(connection))
        else {
            return;
        };
        let Some(Some(accepted)) = client.commands.get(slot.index()).copied() else {
            return;
        };
        let Command { va, rkey, bytes, .. } = accepted.command;
        let rkey = RKey(rkey);
        let sges = client.contents.sge(accepted.offset, bytes).into();
        let number = slot.index() as u64;
        match accepted.command.opcode {
            Opcode::Write => {
                if let Err(why) = link.post(number, Operation::Read { va, rkey }, sges) {
                    self.close(connection, Some(&why.to_string()), None);
                }
            }
            _ => {
                // The response behind it stands for it: the client gets them in this order, and both have one completion.
                let write = SendRequest::new(Operation::Write { va, rkey, imm: None }, sges);
                match link.qp().post_send(write.wr_id(WorkId::Operation(number).into())) {
                    Ok(()) => self.moved(place),
                    Err(why) => self.close(connection, Some(&why.to_string()), None),
                }
            }
        }
    }

    /// Responds to a command whose bytes have been moved, or go before the response.
    fn moved(&mut self, place: Place) {
        let client = self.clients.get_mut(&place.connection);
        let slot = client.and_then(|client| client.commands.get_mut(place.slot.index()));
        let Some(Accepted { command, .. }) = slot.and_then(Option::take) else {
            return;
        };
        count(match command.opcode {
            Opcode::Write => &self.counts().writes,
            _ => &self.counts().reads,
        });
        self.respond(place, command.id, Status::Success, command.bytes, |_| {});
    }

    fn respond(
        &mut self,
        place: Place,
        id: u16,
        status: Status,
        bytes: u32,
        more: impl FnOnce(&mut Vec<u8>),
    ) {
        self.response.clear();
        self.response.extend(Response { id, status, bytes }.emit());
        more(&mut self.response);
        let Some(link) = self.reactor.connection(place.connection) else {
            return;
        };
        if let Err(why) = link.send(place.slot, &self.response) {
            self.close(place.connection, Some(&why.to_string()), None);
        }
    }
}

/// Writes a line to stderr: of a client that goes wrong, the others need not know.
fn complain(line: &str) {
    let line = line.replace('\n', " ");
    let _ = writeln!(std::io::stderr(), "rdmux: {line}");
}

#[cfg(test)]
mod tests;

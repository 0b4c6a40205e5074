//! The node: the process that owns a device and serves the applications of its user, or of several tenants ([`config`]).
//!
//! [`Node`] is a driver: one thread that polls the rings of its applications and the device's completion queues while they have something, and
//! else sleeps in epoll, as the waiting policy says ([`rdmux_verbs::waiting`]). What an application may do, and what comes of it, is in
//! `application` and the modules behind it, which wait for nothing.

mod application;
pub mod config;
mod connections;
mod cut;
mod egress;
mod identity;
mod limits;
mod mux;
mod peer;
mod post;
mod requests;
mod sharing;
mod table;
mod tenants;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rdmux_key::Key;
use rdmux_rnic::sched::Quanta;
use rdmux_rnic::{Status, Time};
use rdmux_runtime::{Inbox, Mailbox, Waiting, mailbox};
use rdmux_verbs::moderation::now;
use rdmux_verbs::provider::folder;
use rdmux_verbs::{CreateError, Device, EventQueue};
use rdmux_wire::node::control::{ErrorCode, Kind, Limits, Message, VERSION};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

pub(crate) use application::{ADDRESS_HANDLES_MAX, SRQS_MAX};
use application::{Application, Belonging, Detached, Shared, Token};
use config::{Config, Resource, STRICT_PERCENT_DEFAULT};
use egress::Egress;
use identity::Identity;
use post::Take;
use sharing::{Gate, Sharing};
use tenants::Tenants;

pub use peer::PeersError;

use crate::control::convert::Refusal;
use crate::control::{Channel, Received};
use crate::place::Place;
pub use crate::place::Scope;
use crate::ring::{Layout, NodeEnd, WorkBytes};
use crate::start::StartLock;

/// Applications of a node.
pub const APPLICATIONS_MAX: usize = 1024;
/// Slots of an application's rings: of requests and of completions.
const SLOTS: (u32, u32) = (4096, 4096);
/// Passes over busy rings between two looks at descriptors, each of which is a system call.
const PASSES_PER_LOOK: u32 = 64;
/// Pieces that are posted at once.
const PIECES_PER_PASS: u32 = 64;
/// Polls that find nothing between two looks at descriptors.
const POLLS_PER_LOOK: u32 = 8;
/// Messages that an application may send in a row before others have their turn.
const MESSAGES_PER_TURN: usize = 64;

/// Doorbells and queues wake the node each time that they ring, and need no call to be silent again.
const EDGE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// Why a node refuses a configuration.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// Tenants have control groups, and the kernel does not tell those of processes.
    #[error("tenants with cgroup need Linux 6.5 or later: tell them apart by uid")]
    NoCgroups,
    /// Only a node that starts can take it.
    #[error("{0}: restart the node")]
    Restart(&'static str),
    /// The node has ended.
    #[error("the node has ended")]
    Ended,
}

/// Why a node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A node serves the address already.
    #[error("a node {1} serves {0} already")]
    InUse(IpAddr, Scope),
    /// The configuration needs what this system has not.
    #[error(transparent)]
    Config(#[from] ApplyError),
    /// The socket for applications cannot be made.
    #[error("the socket for applications: {0}")]
    Place(io::Error),
    /// The device refuses an object that the node needs.
    #[error("the node's device: {0}")]
    Device(#[from] CreateError),
    /// The channel to other nodes cannot be made.
    #[error(transparent)]
    Peers(PeersError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for NodeError {
    fn from(error: Errno) -> NodeError {
        NodeError::Io(error.into())
    }
}

/// Ends a node, or gives it another configuration, from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(Mailbox<Order>);

/// What other threads want of the node's.
#[derive(Debug)]
enum Order {
    Stop,
    /// A configuration to apply, and where to answer.
    Apply(Box<Config>, mpsc::Sender<Result<(), ApplyError>>),
}

impl Stopper {
    /// Has [`Node::run`] return.
    pub fn stop(&self) {
        self.0.send(Order::Stop);
    }

    /// Has the node go on with another configuration, and waits until it does. Traffic goes on. Applications keep their tenants; those of
    /// a tenant that is gone are in the tenant that a new process of theirs would be in, and are detached if that would be refused.
    ///
    /// # Errors
    /// The node refuses the configuration and keeps the old one, or does not run.
    pub fn apply(&self, config: Config) -> Result<(), ApplyError> {
        let (answer, answered) = mpsc::channel();
        self.0.send(Order::Apply(Box::new(config), answer));
        answered.recv().unwrap_or(Err(ApplyError::Ended))
    }
}

/// Subject of an event of the epoll set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Place,
    Orders,
    Events,
    Async,
    /// The engine, while the node sleeps in its place.
    Engine,
    /// The time without applications after which the node ends.
    Idle,
    /// A completion queue of what other nodes send, which the next pass looks at anyway.
    Peers,
    /// The control connection of the application of a slot.
    Control(u32),
    /// The doorbell or the completion queue of an application, which the next pass looks at anyway.
    Work(u32),
}

impl Source {
    fn word(self) -> u64 {
        match self {
            Source::Place => 0,
            Source::Orders => 1,
            Source::Events => 2,
            Source::Async => 3,
            Source::Engine => 4,
            Source::Idle => 5,
            Source::Peers => 6,
            Source::Control(slot) => 1 << 32 | u64::from(slot),
            Source::Work(slot) => 2 << 32 | u64::from(slot),
        }
    }

    fn of_word(word: u64) -> Option<Source> {
        let slot = word as u32;
        Some(match (word >> 32, slot) {
            (0, 0) => Source::Place,
            (0, 1) => Source::Orders,
            (0, 2) => Source::Events,
            (0, 3) => Source::Async,
            (0, 4) => Source::Engine,
            (0, 5) => Source::Idle,
            (0, 6) => Source::Peers,
            (1, _) => Source::Control(slot),
            (2, _) => Source::Work(slot),
            _ => return None,
        })
    }
}

/// Takes what a person should know.
struct Warn(Box<dyn FnMut(&str) + Send>);

impl std::fmt::Debug for Warn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Warn")
    }
}

/// A node that serves applications on its device.
#[derive(Debug)]
pub struct Node {
    warn: Warn,
    shared: Shared,
    place: Place,
    epoll: OwnedFd,
    orders: Inbox<Order>,
    stopper: Stopper,
    /// Set once it is to end.
    ends: bool,
    applications: Vec<Option<Application>>,
    /// A descriptor that is given up to accept and refuse an application when there is no other left.
    spare: Option<OwnedFd>,
    tenants: Tenants,
    strict_percent: u8,
    waiting: Waiting,
    bytes: WorkBytes,
    /// Set once the descriptor of the engine is in the epoll set.
    watches_engine: bool,
    /// Its end for lack of applications, if it ends then.
    idle: Option<Idle>,
}

/// The end of a node for lack of applications.
#[derive(Debug)]
struct Idle {
    timer: OwnedFd,
    after: Duration,
}

impl Idle {
    /// Starts the time, or stops it.
    fn set(&self, runs: bool) -> io::Result<()> {
        // A time of nothing would stop the timer.
        let after = if runs {
            self.after.max(Duration::from_millis(1))
        } else {
            Duration::ZERO
        };
        let value = Itimerspec {
            it_interval: Timespec::default(),
            it_value: after.try_into().map_err(io::Error::other)?,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value)?;
        Ok(())
    }
}

impl Node {
    /// Takes the place of the node of the device's address, for processes of this user.
    ///
    /// # Errors
    /// There is a node, or a system call failed.
    pub fn open(device: Device) -> Result<Node, NodeError> {
        Node::open_with(device, None, None)
    }

    /// Does the same for the tenants of a configuration; `None`: for processes of this user.
    ///
    /// # Errors
    /// There is a node, the configuration needs what the system has not, or a system call failed.
    pub fn open_for(device: Device, config: Option<Config>) -> Result<Node, NodeError> {
        Node::open_with(device, config, None)
    }

    /// Does the same, and shares queue pairs with the nodes of other hosts that have the same key.
    ///
    /// # Errors
    /// As [`Node::open_for`], or another process has the port for nodes.
    pub fn open_sharing(device: Device, config: Option<Config>, key: Key) -> Result<Node, NodeError> {
        Node::open_with(device, config, Some(key))
    }

    fn open_with(device: Device, config: Option<Config>, key: Option<Key>) -> Result<Node, NodeError> {
        let address = device.address();
        let scope = config.as_ref().map_or(Scope::User, scope_of);
        if let Some(config) = &config {
            check_cgroups(config)?;
        }
        let place = Place::take(address, scope).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => NodeError::InUse(address, scope),
            _ => NodeError::Place(error),
        })?;
        let (mailbox, orders) = mailbox()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let spare = epoll.try_clone().ok();
        let quanta = Quanta {
            strict_percent: config
                .as_ref()
                .map_or(STRICT_PERCENT_DEFAULT, |config| config.strict_percent),
            ..Quanta::default()
        };
        let rate_bps = config.as_ref().and_then(|config| config.rate_bps);
        let limits = limits::of_device(device.provider(), quanta, rate_bps);
        let mut egress = Egress::new(now(), limits);
        let tenants = Tenants::new(&mut egress, now(), config);
        let events = EventQueue::new()?;
        let sharing = match key {
            Some(key) => Some(Sharing::open(&device, &events, &mut egress, key)?),
            None => None,
        };
        let node = Node {
            shared: Shared {
                sharing,
                events,
                device,
                egress,
            },
            warn: Warn(Box::new(|_| {})),
            place,
            epoll,
            orders,
            stopper: Stopper(mailbox),
            ends: false,
            applications: Vec::new(),
            spare,
            tenants,
            strict_percent: quanta.strict_percent,
            waiting: Waiting::new(None),
            bytes: WorkBytes::new(),
            watches_engine: false,
            idle: None,
        };
        let level = epoll::EventFlags::IN;
        add(&node.epoll, &node.place.socket, Source::Place, level)?;
        add(&node.epoll, &node.orders, Source::Orders, level)?;
        add(&node.epoll, &node.shared.events, Source::Events, level)?;
        let asynchronous = node.shared.device.async_event_fd();
        add(&node.epoll, asynchronous, Source::Async, level)?;
        if let Some(sharing) = &node.shared.sharing {
            for cq in sharing.cqs() {
                add(&node.epoll, cq, Source::Peers, EDGE)?;
            }
        }
        Ok(node)
    }

    /// Has the node end by itself once it has had no application for so long. A process that holds it ([`crate::Held`]) counts as one.
    ///
    /// # Errors
    /// A system call failed.
    pub fn end_when_idle(&mut self, after: Duration) -> io::Result<()> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        add(&self.epoll, &timer, Source::Idle, epoll::EventFlags::IN)?;
        let idle = Idle { timer, after };
        idle.set(self.applications.iter().all(Option::is_none))?;
        self.idle = Some(idle);
        Ok(())
    }

    /// Ends the node, unless it has applications or somebody is about to have one.
    fn end_if_idle(&mut self) -> Result<(), NodeError> {
        let Some(idle) = &self.idle else { return Ok(()) };
        let _ = rustix::io::read(&idle.timer, &mut [0; 8]);
        // Nobody who starts nodes relies on this one from here on.
        let lock = StartLock::take()?;
        let is_alone = self.applications.iter().all(Option::is_none) && !self.accept()?;
        match lock {
            Some(_) if is_alone => {
                self.place.close();
                self.ends = true;
            }
            _ if is_alone => self.set_idle(true)?,
            _ => {}
        }
        Ok(())
    }

    fn set_idle(&self, is_idle: bool) -> io::Result<()> {
        match &self.idle {
            Some(idle) => idle.set(is_idle),
            None => Ok(()),
        }
    }

    /// Calls a function with what a person should know, a line of text: that a peer's node has another key, and what to do.
    pub fn warn_by(&mut self, warn: impl FnMut(&str) + Send + 'static) {
        self.warn = Warn(Box::new(warn));
    }

    /// Returns what ends [`Node::run`].
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Serves until it is stopped.
    ///
    /// # Errors
    /// The node itself can go on no more. Whatever an application does ends that application alone.
    pub fn run(mut self) -> Result<(), NodeError> {
        while !self.ends {
            let mut passes = 0;
            while self.pass() {
                passes += 1;
                if passes == PASSES_PER_LOOK {
                    break;
                }
            }
            if self.look()? || passes == PASSES_PER_LOOK {
                continue;
            }
            self.wait()?;
        }
        Ok(())
    }

    /// Moves requests from rings to the device and completions from the device to rings. Returns whether there were any.
    fn pass(&mut self) -> bool {
        let mut any = false;
        let now = now();
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            match application.take_work(&mut self.shared, now, &mut self.bytes, Take::Turn) {
                Ok(taken) => any |= taken,
                Err(why) => self.detach(slot as u32, &why),
            }
        }
        any |= self.post(now);
        any |= self.share(now);
        for application in self.applications.iter_mut().flatten() {
            // The time of a piece that completes at once is that of its execution.
            any |= application.take_completions(&mut self.shared, rdmux_verbs::moderation::now);
        }
        any | self.put_completions()
    }

    /// Handles what has come over shared queue pairs, and tells applications. Returns whether there was anything.
    fn share(&mut self, now: Time) -> bool {
        let Shared { sharing, egress, .. } = &mut self.shared;
        let Some(sharing) = sharing else { return false };
        let any = sharing.poll(egress, now);
        self.tell_news(now) || any
    }

    fn tell_news(&mut self, now: Time) -> bool {
        let mut any = false;
        while let Some((owner, news)) = self.shared.sharing.as_mut().and_then(Sharing::next_news) {
            any = true;
            if let Some(Some(application)) = self.applications.get_mut(owner.application as usize)
                && let Err(why) = application.has_news(&mut self.shared, now, owner.qp, news)
            {
                self.detach(owner.application, &why);
            }
        }
        while let Some(rkey) = self.shared.sharing.as_mut().and_then(Sharing::next_region_gone) {
            any = true;
            self.region_gone(rkey);
        }
        if let Some(sharing) = &mut self.shared.sharing {
            for warning in sharing.take_warnings() {
                (self.warn.0)(&warning);
            }
        }
        any
    }

    /// Answers the application that has deregistered a region which other nodes knew.
    fn region_gone(&mut self, rkey: rdmux_verbs::RKey) {
        for slot in 0..self.applications.len() {
            if let Some(application) = &mut self.applications[slot]
                && let Some(going) = application.going.remove(&rkey)
                && let Err(why) = application.channel.send(going.request, &Message::Done {})
            {
                self.detach(slot as u32, &why.into());
            }
        }
    }

    /// Posts pieces of requests to the device. Returns whether there were any.
    fn post(&mut self, now: Time) -> bool {
        for count in 0..PIECES_PER_PASS {
            let Shared { sharing, egress, .. } = &mut self.shared;
            let Some(piece) = egress.next(now, &mut Gate(sharing.as_mut())) else {
                return count > 0;
            };
            if let Some(sharing) = sharing
                && sharing.post_piece(egress, now, &piece)
            {
                continue;
            }
            match self.applications.get_mut(piece.owner.application as usize) {
                Some(Some(application)) => application.post_piece(&mut self.shared, now, &piece),
                Some(None) | None => self.shared.egress.refused(now, &piece, Status::LocalQpOperation),
            }
        }
        true
    }

    /// Puts completions into the rings of applications. Returns whether there were any.
    fn put_completions(&mut self) -> bool {
        while let Some(done) = self.shared.egress.poll_done() {
            if let Some(Some(application)) = self.applications.get_mut(done.owner.application as usize) {
                application.done(&done);
            }
        }
        let mut any = false;
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            let put = application.put_completions();
            let told = match application.has_drained() {
                true => application.tell_drained(&mut self.shared, now()),
                false => Ok(()),
            };
            match put.and_then(|put| told.map(|()| put)) {
                Ok(put) => any |= put,
                Err(why) => self.detach(slot as u32, &why),
            }
        }
        any
    }

    /// Polls as long as the policy expects that to cost less than a wake-up, and then sleeps.
    fn wait(&mut self) -> Result<(), NodeError> {
        let began = Instant::now();
        self.waiting.end_run();
        let mut polls = 0_u32;
        while self.waiting.pause(began) {
            polls = polls.wrapping_add(1);
            if self.pass() || polls.is_multiple_of(POLLS_PER_LOOK) && self.look()? {
                self.waiting.came(began);
                return Ok(());
            }
        }
        if self.prepare_sleep() {
            let mut watch = self.shared.device.watch();
            if let Some(watch) = &watch
                && !self.watches_engine
            {
                add(&self.epoll, watch, Source::Engine, epoll::EventFlags::IN)?;
                self.watches_engine = true;
            }
            let sleeps = watch.as_mut().is_none_or(|watch| watch.prepare());
            if sleeps {
                let until = self.shared.egress.next_time(now());
                let until = until.map(|until| Duration::from_nanos(until.since_ns(now())));
                let deadline = self.shared.sharing.as_mut().and_then(Sharing::deadline);
                let deadline = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                self.look_for([until, deadline].into_iter().flatten().min())?;
            }
            // Processes the packets that woke this thread, before the next pass.
            drop(watch);
            match sleeps {
                true => self.waiting.slept(began, true),
                false => self.waiting.came(began),
            }
        } else {
            self.waiting.came(began);
        }
        for application in self.applications.iter_mut().flatten() {
            application.awake();
        }
        Ok(())
    }

    /// Prepares all applications for a sleep. Returns false if there is something to do.
    fn prepare_sleep(&mut self) -> bool {
        let mut sleeps = true;
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            match application.prepare_sleep(&mut self.shared, now) {
                Ok(may) => sleeps &= may,
                Err(why) => {
                    self.detach(slot as u32, &why);
                    sleeps = false;
                }
            }
        }
        let Shared { sharing, egress, .. } = &mut self.shared;
        if let Some(sharing) = sharing {
            sleeps &= sharing.prepare_sleep(egress, now());
        }
        sleeps & !self.tell_news(now())
    }

    /// Looks at descriptors. Returns whether there was something to do besides what a pass does.
    fn look(&mut self) -> Result<bool, NodeError> {
        self.look_for(Some(Duration::ZERO))
    }

    /// Waits until a descriptor is readable, or the time is over, and looks at them.
    fn look_for(&mut self, timeout: Option<Duration>) -> Result<bool, NodeError> {
        let mut any = false;
        let Shared { sharing, egress, .. } = &mut self.shared;
        if let Some(sharing) = sharing {
            any |= sharing.look(egress, now());
        }
        any |= self.tell_news(now());
        // A token is there before the descriptor says so.
        for _ in 0..MESSAGES_PER_TURN {
            let Some(word) = self.shared.events.poll() else {
                break;
            };
            any = true;
            let Shared { sharing, egress, .. } = &mut self.shared;
            match sharing.as_mut().filter(|_| peer::is_token(word)) {
                Some(sharing) => sharing.happened(egress, now(), word),
                None => self.happened(Token::of_word(word)),
            }
        }
        any |= self.tell_news(now());
        let timeout = if any { Some(Duration::ZERO) } else { timeout };
        // A time that is too long for the system is as good as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut found = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 32];
        let count = match epoll::wait(&self.epoll, &mut found, timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for event in &found[..count] {
            any |= match Source::of_word(event.data.u64()) {
                Some(Source::Place) => self.accept()?,
                Some(Source::Async) => self.device_has_news(),
                Some(Source::Control(slot)) => self.control(slot),
                Some(Source::Idle) => {
                    self.end_if_idle()?;
                    true
                }
                Some(Source::Orders) => self.take_orders(),
                Some(Source::Events) => true,
                Some(Source::Engine | Source::Peers | Source::Work(_)) | None => false,
            };
        }
        Ok(any)
    }

    /// Accepts the applications that wait. Returns whether there were any.
    fn accept(&mut self) -> Result<bool, NodeError> {
        let mut any = false;
        for _ in 0..MESSAGES_PER_TURN {
            let socket = match self.place.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => break,
                Err(Errno::MFILE | Errno::NFILE) => {
                    self.refuse_for_want_of_descriptors();
                    break;
                }
                // It waits until there is room for it.
                Err(Errno::NOBUFS | Errno::NOMEM) => break,
                Err(error) => return Err(error.into()),
            };
            any = true;
            let channel = Channel::new(socket);
            match self.belonging_of(&channel) {
                Ok(belonging) => self.attach(channel, belonging),
                Err(why) => channel.refuse(why),
            }
        }
        Ok(any)
    }

    /// Refuses an application for which there is no descriptor. If it waited, the place would be readable all the time.
    fn refuse_for_want_of_descriptors(&mut self) {
        self.spare = None;
        if let Ok(Some(socket)) = self.place.accept() {
            let why = "it has as many descriptors as the limit of open files (RLIMIT_NOFILE) allows";
            Channel::new(socket).refuse(Refusal::new(ErrorCode::Limit, why));
        }
        self.spare = self.epoll.try_clone().ok();
    }

    /// Returns process and tenant of the other end of a channel, with a charge for an application.
    fn belonging_of(&self, channel: &Channel) -> Result<Belonging, Refusal> {
        let identity = Identity::of(channel)?;
        let account = self.tenants.account_of(&identity);
        let account = account.map_err(Refusal::no_access)?.clone();
        let charge = account.charge(Resource::Applications, 1)?;
        Ok(Belonging {
            identity,
            account,
            charge,
        })
    }

    /// Begins to serve an application, if there is room for one more.
    fn attach(&mut self, channel: Channel, belonging: Belonging) {
        let free = self.applications.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.applications.len());
        if slot >= APPLICATIONS_MAX {
            let why = format!("it has {APPLICATIONS_MAX} applications, as many as a node can have");
            return channel.refuse(Refusal::new(ErrorCode::Limit, why));
        }
        if slot == self.applications.len() {
            self.applications.push(None);
        }
        let slot_number = slot as u32;
        let Ok(mut application) = Application::new(&mut self.shared, channel, slot_number, belonging) else {
            return;
        };
        let control = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let added = add(
            &self.epoll,
            &application.channel,
            Source::Control(slot_number),
            control,
        )
        .and_then(|()| add(&self.epoll, &application.cq, Source::Work(slot_number), EDGE));
        match added {
            Ok(()) => {
                self.applications[slot] = Some(application);
                // A node whose timer does not stop looks for applications before it ends.
                let _ = self.set_idle(false);
            }
            Err(_) => application.leave(&mut self.shared, now()),
        }
    }

    /// Does what other threads want. Returns true.
    fn take_orders(&mut self) -> bool {
        self.orders.reset();
        while let Some(order) = self.orders.take() {
            match order {
                Order::Stop => self.ends = true,
                Order::Apply(config, answer) => {
                    let applied = self.apply(*config);
                    // A thread that waits no more needs no answer.
                    let _ = answer.send(applied);
                }
            }
        }
        true
    }

    /// Goes on with another configuration.
    fn apply(&mut self, config: Config) -> Result<(), ApplyError> {
        check_cgroups(&config)?;
        match (self.place.scope(), scope_of(&config)) {
            (Scope::User, Scope::Host) => {
                return Err(ApplyError::Restart(
                    "it names other users than the node's, who cannot reach the node's socket",
                ));
            }
            (Scope::Host, Scope::User) => {
                return Err(ApplyError::Restart(
                    "it names no other user than the node's, whose nodes have their sockets in a folder of the user's",
                ));
            }
            _ => {}
        }
        if self.strict_percent != config.strict_percent {
            return Err(ApplyError::Restart("strict_percent is another one"));
        }
        let now = now();
        self.tenants.set(&mut self.shared.egress, now, config);
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            let belonging = &application.belonging;
            if self.tenants.keeps(&belonging.account, &belonging.identity) {
                continue;
            }
            match self.tenants.account_of(&belonging.identity).cloned() {
                Ok(account) => application.move_to(&mut self.shared, now, &account),
                Err(why) => self.detach(slot as u32, &Detached::Protocol(why)),
            }
        }
        self.tenants.sweep(&mut self.shared.egress);
        Ok(())
    }

    /// Handles messages of an application. Returns whether there were any.
    fn control(&mut self, slot: u32) -> bool {
        let handled = self.messages(slot);
        let Some(Some(application)) = self.applications.get_mut(slot as usize) else {
            return false;
        };
        match handled {
            Ok(any) => {
                let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
                flags.set(epoll::EventFlags::OUT, application.channel.has_waiting());
                let data = epoll::EventData::new_u64(Source::Control(slot).word());
                let _ = epoll::modify(&self.epoll, &application.channel, data, flags);
                any
            }
            Err(why) => {
                self.detach(slot, &why);
                true
            }
        }
    }

    fn messages(&mut self, slot: u32) -> Result<bool, Detached> {
        for count in 0..MESSAGES_PER_TURN {
            let Some(Some(application)) = self.applications.get_mut(slot as usize) else {
                return Ok(count > 0);
            };
            application.channel.flush()?;
            // One that does not read its answers gets no more of them.
            if application.channel.has_waiting() {
                return Ok(count > 0);
            }
            let Some(received) = application.channel.receive()? else {
                return Ok(count > 0);
            };
            if application.rings.is_none() {
                application.attach(&self.shared, &self.epoll, received.request, &received.message)?;
                continue;
            }
            // Work that it has posted before the request comes before the request.
            let now = now();
            while application.take_work(&mut self.shared, now, &mut self.bytes, Take::All)? {}
            self.post(now);
            if let Some(Some(application)) = self.applications.get_mut(slot as usize) {
                application.answer(&mut self.shared, now, received)?;
            }
        }
        Ok(true)
    }

    /// Passes on what happened to an object of an application.
    fn happened(&mut self, token: Token) {
        let Some(Some(application)) = self.applications.get_mut(token.slot as usize) else {
            return;
        };
        let now = now();
        let told = loop {
            match application.happened(&mut self.shared, now, token) {
                Ok(true) => {}
                other => break other.map(|_| ()),
            }
        };
        if let Err(why) = told {
            self.detach(token.slot, &why);
        }
    }

    /// Passes the device's events on. Returns whether there were any.
    fn device_has_news(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.shared.device.poll_async_event() {
            any = true;
            for slot in 0..self.applications.len() {
                if let Some(application) = &mut self.applications[slot]
                    && let Err(why) = application.device_has_news(&mut self.shared, now(), event)
                {
                    self.detach(slot as u32, &why);
                }
            }
        }
        any
    }

    /// Ends an application: everything that it has goes.
    fn detach(&mut self, slot: u32, why: &Detached) {
        let Some(application) = self.applications.get_mut(slot as usize).and_then(Option::take) else {
            return;
        };
        let mut application = application;
        if let Detached::Protocol(why) = why {
            let text = format!("detached: {why}");
            let _ = application
                .channel
                .send(0, &Refusal::new(ErrorCode::Protocol, text).message());
        }
        application.leave(&mut self.shared, now());
        self.tenants.sweep(&mut self.shared.egress);
        // Its descriptors leave the epoll set when they are closed.
        drop(application);
        if self.applications.iter().all(Option::is_none) {
            // Without the timer it stays until somebody stops it.
            let _ = self.set_idle(true);
        }
    }
}

impl Application {
    /// Carries out a request and answers it.
    fn answer(&mut self, shared: &mut Shared, now: Time, received: Received) -> Result<(), Detached> {
        let answer = match received.message {
            Message::Destroy {
                kind: Kind::Region,
                id,
            } => match self.deregister(shared, received.request, id) {
                Ok(None) => return Ok(()),
                Ok(Some(answer)) => Ok(answer),
                Err(refusal) => Err(refusal),
            },
            message => self.carry_out(shared, now, message, received.descriptors),
        };
        let answer = match answer {
            Err(refusal) if refusal.code == ErrorCode::Protocol => {
                return Err(Detached::Protocol(refusal.text));
            }
            Err(refusal) => refusal.message(),
            Ok(answer) => answer,
        };
        Ok(self.channel.send(received.request, &answer)?)
    }

    /// Agrees on a version with an application, and gives it its rings.
    fn attach(
        &mut self,
        shared: &Shared,
        epoll: impl AsFd,
        request: u32,
        message: &Message,
    ) -> Result<(), Detached> {
        let Message::Attach {
            version_min,
            version_max,
            name,
        } = message
        else {
            return Err(Detached::Protocol(format!("{} before Attach", message.name())));
        };
        if !(*version_min..=*version_max).contains(&VERSION) {
            let text =
                format!("the node has version {VERSION}, the application {version_min} to {version_max}");
            let refusal = Refusal::new(ErrorCode::Version, text);
            self.channel.send(request, &refusal.clone().message())?;
            return Err(Detached::Protocol(refusal.text));
        }
        self.name.clone_from(name);
        let made = Layout::new(1, SLOTS.0, 1, SLOTS.1)
            .map_err(io::Error::other)
            .and_then(NodeEnd::create);
        let (end, files) = made.map_err(|error| Detached::Protocol(error.to_string()))?;
        let source = Source::Work(self.slot);
        add(epoll, end.waiter(), source, EDGE).map_err(|error| Detached::Protocol(error.to_string()))?;
        let device = &shared.device;
        let limits = device.limits();
        let account = &self.belonging.account;
        let most = |device: u32, own: usize, resource| {
            let tenant = account.limit(resource).try_into().unwrap_or(u32::MAX);
            device.min(own as u32).min(tenant)
        };
        let answer = Message::Attached {
            version: VERSION,
            address: device.address(),
            features: (device.features() & crate::FEATURES).bits(),
            limits: Limits {
                queue_pairs: most(limits.queue_pairs, application::QPS_MAX, Resource::QueuePairs),
                memory_regions: most(limits.memory_regions, application::REGIONS_MAX, Resource::Regions),
                work_requests: application::WORK_REQUESTS_MAX,
                sges: limits.sges,
                inline_bytes: limits.inline_bytes,
                message_bytes: limits.message_bytes,
            },
            active_mtu: device.active_mtu(),
            vectors: device.completion_vectors(),
            submission_slots: SLOTS.0,
            completion_slots: SLOTS.1,
        };
        self.channel.send_with(request, &answer, &files.as_fds())?;
        self.rings = Some(post::Rings::new(end));
        Ok(())
    }
}

/// Returns where the node of a configuration has its socket.
fn scope_of(config: &Config) -> Scope {
    match config.serves_others(folder::uid()) {
        true => Scope::Host,
        false => Scope::User,
    }
}

fn check_cgroups(config: &Config) -> Result<(), ApplyError> {
    match config.has_cgroups() && !identity::are_cgroups_known() {
        true => Err(ApplyError::NoCgroups),
        false => Ok(()),
    }
}

fn add(epoll: impl AsFd, descriptor: impl AsFd, source: Source, flags: epoll::EventFlags) -> io::Result<()> {
    let descriptor: BorrowedFd<'_> = descriptor.as_fd();
    let data = epoll::EventData::new_u64(source.word());
    Ok(epoll::add(epoll, descriptor, data, flags)?)
}

#[cfg(test)]
mod tests;

//! The node: the process that owns a device and serves the applications of its user, or of several tenants ([`config`]).
//!
//! [`Node`] accepts applications, and gives each to one of its workers ([`worker`]): threads with an engine of the device each, which serve them.
//! Module `application` and those behind it carry out the requests of applications, and wait for nothing.

mod application;
pub mod config;
mod connections;
mod cut;
mod division;
mod egress;
mod identity;
#[cfg(test)]
mod isolation;
mod leaving;
mod limits;
mod mux;
mod observe;
mod peer;
mod post;
mod quarantine;
mod requests;
#[cfg(test)]
mod scale;
mod services;
mod sharing;
pub mod snapshot;
mod table;
mod tenants;
mod turns;
mod worker;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rdmux_key::Key;
use rdmux_runtime::{Inbox, Mailbox, mailbox};
use rdmux_verbs::provider::folder;
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{CreateError, Device, OpenError};
use rdmux_wire::node::control::ErrorCode;
use rustix::io::Errno;

use application::Belonging;
pub(crate) use application::{ADDRESS_HANDLES_MAX, SRQS_MAX};
use config::Config;
use identity::Identity;
use peer::Shares;
use services::Services;
use snapshot::Viewer;
use tenants::{Capacity, Tenants};
use worker::{Warn, Worker};

pub use peer::PeersError;

use crate::control::Channel;
use crate::control::convert::Refusal;
use crate::place::Place;
pub use crate::place::Scope;
use crate::start::StartLock;
use crate::watch::Watchers;

/// Applications of a node, with the processes that only hold it.
pub const APPLICATIONS_MAX: usize = 1024;
/// Applications that are accepted in a row before orders have their turn.
const ACCEPTS_PER_TURN: usize = 64;

/// Time until the node looks again at who waits to be accepted, after the system had nothing left for one more socket.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

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
    /// The device has no further engine.
    #[error("an engine of the node's device: {0}")]
    Engine(#[from] OpenError),
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

/// Orders of other threads, and reports of workers.
#[derive(Debug)]
enum Order {
    Stop,
    /// A configuration to apply, and where to answer.
    Apply(Box<Config>, mpsc::Sender<Result<(), ApplyError>>),
    /// An application of this worker is gone.
    Left(usize),
    /// A worker has ended.
    Ended,
}

/// Properties of a node.
#[derive(Debug)]
pub struct NodeOptions {
    /// Its tenants; `None`: the processes of its user.
    pub config: Option<Config>,
    /// Has it share queue pairs with the nodes of other hosts that have the same key.
    pub key: Option<Key>,
    /// Most queue pairs at a time that it shares with other nodes: each engine has a part of them, one at least.
    pub shared_queue_pairs: usize,
    /// Engines of its device, each with a thread.
    pub engines: usize,
    /// Has it tell other nodes which packets its device has executed, where the device knows. For tests: without, it does as a node of an RNIC.
    #[doc(hidden)]
    pub tells_executed: bool,
}

impl Default for NodeOptions {
    fn default() -> NodeOptions {
        NodeOptions {
            config: None,
            key: None,
            shared_queue_pairs: 4096,
            engines: 1,
            tells_executed: true,
        }
    }
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

/// A node that serves applications on its device.
#[derive(Debug)]
pub struct Node {
    place: Place,
    /// The place for programs that watch the node, until it runs.
    watch_place: Option<Place>,
    orders: Inbox<Order>,
    mailbox: Mailbox<Order>,
    /// Set once it is to end.
    ends: bool,
    workers: Vec<Hired>,
    /// Number of the next application.
    next_number: u64,
    device: Device,
    tenants: Arc<Mutex<Tenants>>,
    /// A descriptor that is given up to accept and refuse an application when there is no other left.
    spare: Option<OwnedFd>,
    /// Until when it looks at nobody who waits to be accepted.
    rests: Option<Instant>,
    /// The end for lack of applications, if it ends then: the time without, and when that is over.
    idle: Option<(Duration, Instant)>,
}

/// A worker as the node knows it.
#[derive(Debug)]
struct Hired {
    /// Until it runs.
    worker: Option<Worker>,
    orders: Mailbox<worker::Order>,
    /// Its applications, those too that are on their way to it.
    applications: usize,
}

/// Reports the end of a worker, also by a panic.
struct Reported(Mailbox<Order>);

impl Drop for Reported {
    fn drop(&mut self) {
        self.0.send(Order::Ended);
    }
}

impl Node {
    /// Takes the place of the node of the device's address, for processes of this user.
    ///
    /// # Errors
    /// There is a node, or a system call failed.
    pub fn open(device: Device) -> Result<Node, NodeError> {
        Node::open_with(device, NodeOptions::default())
    }

    /// Takes the place of the node of the device's address.
    ///
    /// # Errors
    /// There is a node, the configuration needs what the system has not, the device has not as many engines, they are too many to share queue pairs,
    /// another process has the port for nodes, or a system call failed.
    pub fn open_with(device: Device, options: NodeOptions) -> Result<Node, NodeError> {
        let NodeOptions {
            config,
            key,
            shared_queue_pairs,
            engines,
            tells_executed,
        } = options;
        let address = device.address();
        let scope = config.as_ref().map_or(Scope::User, scope_of);
        if let Some(config) = &config {
            check_cgroups(config)?;
        }
        let place = Place::take(address, scope).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => NodeError::InUse(address, scope),
            _ => NodeError::Place(error),
        })?;
        let watch_place = place.for_watchers(address).map_err(NodeError::Place)?;
        let (mailbox, orders) = mailbox()?;
        let spare = place.socket.try_clone().ok();
        let capacity = Capacity::new(device.limits().queue_pairs.into());
        let tenants = Arc::new(Mutex::new(Tenants::new(config, capacity, engines.max(1))));
        let mut all = vec![device];
        for _ in 1..engines {
            all.push(all[0].open_engine()?);
        }
        let shares = key.map(|key| Shares::of_engines(&all, &key, (shared_queue_pairs, tells_executed)));
        let mut shares = shares.transpose()?.into_iter().flatten();
        let services = Services::default();
        let mut workers = Vec::new();
        for (number, engine) in all.iter().enumerate() {
            let engine = engine.clone();
            let parts = (shares.next(), &services);
            let (worker, orders) = Worker::new(number, engine, &tenants, parts, mailbox.clone())?;
            workers.push(Hired {
                worker: Some(worker),
                orders,
                applications: 0,
            });
        }
        Ok(Node {
            place,
            watch_place: Some(watch_place),
            orders,
            mailbox,
            ends: false,
            workers,
            next_number: 1,
            device: all.swap_remove(0),
            tenants,
            spare,
            rests: None,
            idle: None,
        })
    }

    /// Has the node end by itself once it has had no application for so long. A process that holds it ([`crate::Held`]) counts as one here,
    /// and nowhere else.
    pub fn end_when_idle(&mut self, after: Duration) {
        self.idle = Some((after, Instant::now() + after));
    }

    /// Calls a function with what a person should know, a line of text: that a peer's node has another key, and what to do.
    pub fn warn_by(&mut self, warn: impl FnMut(&str) + Send + 'static) {
        let warn = Warn::by(warn);
        for worker in self.workers.iter_mut().filter_map(|hired| hired.worker.as_mut()) {
            worker.warn_by(warn.clone());
        }
    }

    /// Returns what ends [`Node::run`].
    pub fn stopper(&self) -> Stopper {
        Stopper(self.mailbox.clone())
    }

    /// Returns what asks for the state of the node.
    pub fn viewer(&self) -> Viewer {
        let workers = self.workers.iter().map(|hired| hired.orders.clone());
        Viewer::new(workers.collect(), self.tenants.clone(), self.device.clone())
    }

    /// Serves until it is stopped.
    ///
    /// # Errors
    /// The node itself can go on no more. Whatever an application does ends that application alone.
    pub fn run(mut self) -> Result<(), NodeError> {
        let watch_place = self.watch_place.take();
        let watchers = watch_place.map(|place| Watchers::start(place, self.viewer()));
        let _watchers = watchers.transpose()?;
        let mut threads = Vec::new();
        let mut served = Ok(());
        for (number, hired) in self.workers.iter_mut().enumerate() {
            let Some(worker) = hired.worker.take() else {
                continue;
            };
            let reported = Reported(self.mailbox.clone());
            let thread = thread::Builder::new().name(format!("rdmux-node-{number}"));
            let started = thread.spawn(move || {
                let _reported = reported;
                worker.run()
            });
            match started {
                Ok(thread) => threads.push(thread),
                Err(error) => served = Err(error.into()),
            }
        }
        if served.is_ok() {
            served = self.serve();
        }
        for hired in &self.workers {
            hired.orders.send(worker::Order::Stop);
        }
        for thread in threads {
            let worked = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            served = served.and(worked);
        }
        served
    }

    /// Accepts applications, and carries out orders, until it is stopped.
    fn serve(&mut self) -> Result<(), NodeError> {
        while !self.ends {
            let is_alone = self.workers.iter().all(|hired| hired.applications == 0);
            let deadline = self.idle.filter(|_| is_alone).map(|(_, until)| until);
            let rests = self.rests.filter(|until| *until > Instant::now());
            let socket = rests.is_none().then(|| self.place.socket.as_fd());
            let until = [deadline, rests].into_iter().flatten().min();
            match self.orders.sleep(socket.as_slice(), until) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            }
            self.take_orders();
            let accepted = self.accept()?;
            if !accepted && deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.end_if_idle()?;
            }
        }
        Ok(())
    }

    fn take_orders(&mut self) {
        while let Some(order) = self.orders.take() {
            match order {
                Order::Stop | Order::Ended => self.ends = true,
                Order::Apply(config, answer) => {
                    let applied = self.apply(*config);
                    // A thread that waits no more needs no answer.
                    let _ = answer.send(applied);
                }
                Order::Left(worker) => {
                    self.workers[worker].applications -= 1;
                    self.stay();
                }
            }
        }
    }

    /// Begins the time without applications anew.
    fn stay(&mut self) {
        if let Some((after, until)) = &mut self.idle {
            *until = Instant::now() + *after;
        }
    }

    /// Ends the node, unless somebody is about to have an application.
    fn end_if_idle(&mut self) -> Result<(), NodeError> {
        // Nobody who starts nodes relies on this one from here on.
        let lock = StartLock::take()?;
        match lock {
            Some(_) if !self.accept()? => {
                self.place.close();
                self.ends = true;
            }
            _ => self.stay(),
        }
        Ok(())
    }

    /// Accepts the applications that wait. Returns whether there were any.
    fn accept(&mut self) -> Result<bool, NodeError> {
        let mut any = false;
        for _ in 0..ACCEPTS_PER_TURN {
            let socket = match self.place.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => break,
                Err(Errno::MFILE | Errno::NFILE) if self.refuse_for_want_of_descriptors() => break,
                // It waits, and the place is readable all the time.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    self.rests = Some(Instant::now() + ACCEPT_AGAIN);
                    break;
                }
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

    /// Refuses an application for which there is no descriptor. Returns false if there is none to do that either.
    fn refuse_for_want_of_descriptors(&mut self) -> bool {
        self.spare = None;
        let accepted = self.place.accept();
        let is_done = accepted.is_ok();
        if let Ok(Some(socket)) = accepted {
            let why = "it has as many descriptors as the limit of open files (RLIMIT_NOFILE) allows";
            Channel::new(socket).refuse(Refusal::new(ErrorCode::Limit, why));
        }
        self.spare = self.place.socket.try_clone().ok();
        is_done
    }

    /// Returns process and tenant of the other end of a channel, with a place among the tenant's connections.
    fn belonging_of(&mut self, channel: &Channel) -> Result<Belonging, Refusal> {
        let identity = Identity::of(channel)?;
        let account = self.tenants.lock().account_of(&identity).cloned();
        let account = account.map_err(Refusal::no_access)?;
        let seat = account.seat()?;
        let number = self.next_number;
        self.next_number += 1;
        Ok(Belonging {
            number,
            identity,
            account,
            seat,
            charge: None,
        })
    }

    /// Gives an application to the worker that has the fewest, if there is room for one more.
    fn attach(&mut self, channel: Channel, belonging: Belonging) {
        let all: usize = self.workers.iter().map(|hired| hired.applications).sum();
        if all >= APPLICATIONS_MAX {
            let why = format!("it has {APPLICATIONS_MAX} applications, as many as a node can have");
            return channel.refuse(Refusal::new(ErrorCode::Limit, why));
        }
        if let Some(hired) = self.workers.iter_mut().min_by_key(|hired| hired.applications) {
            hired.applications += 1;
            hired
                .orders
                .send(worker::Order::Serve(Box::new((channel, belonging))));
        }
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
        let mut tenants = self.tenants.lock();
        if tenants.strict_percent() != config.strict_percent {
            return Err(ApplyError::Restart("strict_percent is another one"));
        }
        tenants.set(config);
        drop(tenants);
        let (answer, answered) = mpsc::channel();
        for hired in &self.workers {
            hired.orders.send(worker::Order::Reload(answer.clone()));
        }
        drop(answer);
        // Ends when each worker has answered, or has ended.
        answered.iter().for_each(drop);
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

#[cfg(test)]
mod tests;

//! The traits of a provider of devices: [`Provider`] opens devices, and a trait for each kind of object does what the object of the
//! vocabulary of the same name promises ([`crate::Device`] holds a [`Device`], and so on).
//!
//! The types of the vocabulary do what all providers have in common: they keep the objects that they depend on alive, and refuse to
//! combine objects of different devices. Dropping an object of a provider destroys it. An object gets at another one of the same
//! provider by [`own`].
//!
//! Optional features have default implementations: the device does not offer them.
//!
//! Each provider is a crate of its own, whose `register` makes it known ([`register`]). A program registers the providers that it wants;
//! the first one is the default. Libraries above this one register none.
//!
//! The functions and types that this module re-exports are what providers have in common: events of connections and devices with their
//! waiters, the conditions of the machine, and the processes of the host ([`seqpacket`], [`user`], [`folder`], and the modules of
//! [`crate::resources`]).

pub mod folder;
pub mod seqpacket;
pub mod user;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_rnic::cm::Endpoint;
use rdmux_rnic::sync::{Mutex, MutexGuard};
use rdmux_rnic::{
    Arm, Bind, Counters, Cqn, LKey, McastError, Memory, Moderation, ModerationKind, ModifyError, PostError,
    QpAttributes, QpInfo, QpState, QpType, Qpn, RKey, RecvRequest, RegionSpec, RegisterError, Remains,
    SendFlags, SendRequest, SrqError, SrqInfo, Srqn, Status, WindowType, WorkCompletion,
};
use rdmux_wire::cm::ServiceId;
use rdmux_wire::roce::PathMtu;

use crate::cm::{Arrival, ConnectError, ConnectPair, ConnectParams, ListenError, Progress};
use crate::cq::ResizeError;
use crate::datagram::AttachError;
use crate::device::{Carrier, CreateError, PostListError, QpOptions, Reach};
use crate::event::AsyncEvent;
use crate::event_queue::EventQueue;
use crate::features::Features;
use crate::limits::Limits;
use crate::moderation::DeviceModeration;
use crate::options::{OpenError, Options};
use crate::process::FaultCounts;
use crate::sidr::{AnswerError, ResolveError};

pub use crate::cm::{ACK_TIMEOUT, accepting_type, deadline_after, no_external, transport_of};
pub use crate::event::{AsyncEvents, Object};
pub use crate::event_queue::Registration;
pub use crate::inbox::{Inbox, Seen};
pub use crate::load::{conditions, current_cpu, vector_per_cpu};
pub use crate::process::{capture_file, faults};
pub use crate::sidr::Found;
pub use crate::waker::{NAP_ASLEEP, Nap, Waker};
pub use crate::why::{NotDirect, Refusal, Why};

/// A provider of devices.
pub trait Provider: Debug + Send + Sync {
    /// Returns the name by which users choose it.
    fn name(&self) -> &'static str;

    /// Returns the variables of the environment that its devices heed. Opening a device checks them.
    fn variables(&self) -> &'static [Variable] {
        &[]
    }

    /// Opens the device of a local address. [`Options::provider`] is not the provider's to judge.
    ///
    /// # Errors
    /// The device cannot be opened, or the options, or [`capture_file`], ask for a feature that its devices lack.
    fn open(&self, address: IpAddr, options: &Options) -> Result<Box<dyn Device>, OpenError>;

    /// Returns the local addresses on which this process can open a device.
    fn addresses(&self) -> io::Result<Vec<IpAddr>>;
}

/// A variable of the environment that takes one of a few words.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// The words. Empty, it counts as unset.
    pub words: &'static [&'static str],
}

/// The object of a provider that an object of the vocabulary holds.
pub trait Provided {
    /// Returns that object.
    fn object(&self) -> &dyn Any;
}

/// Returns the object of a provider that an object of the vocabulary holds, as the provider's own type; `None` if another provider
/// made it.
pub fn own<T: Any>(object: &impl Provided) -> Option<&T> {
    object.object().downcast_ref()
}

/// See [`crate::Device`].
pub trait Device: Any + Debug + Send + Sync {
    /// See [`crate::Device::open_engine`].
    fn open_engine(&self) -> Result<Box<dyn Device>, OpenError> {
        Err(OpenError::Unsupported("several engines"))
    }

    /// See [`crate::Device::limits`].
    fn limits(&self) -> Limits;

    /// See [`crate::Device::features`].
    fn features(&self) -> Features;

    /// Returns the policy of its completion queues, which all its engines share. Until somebody changes it, it is [`Options::moderation`].
    fn moderation(&self) -> Arc<DeviceModeration>;

    /// See [`crate::Device::writes_by_processor`].
    fn writes_by_processor(&self) -> bool {
        false
    }

    /// See [`crate::Device::reach`].
    fn reach(&self, memory: &dyn Memory) -> Reach;

    /// See [`crate::Device::alloc_pd`].
    fn alloc_pd(&self) -> Result<Box<dyn ProtectionDomain>, CreateError>;

    /// See [`crate::Device::completion_vectors`].
    fn completion_vectors(&self) -> u32;

    /// See [`crate::Device::create_cq_on`]. The device has this completion vector.
    fn create_cq(&self, depth: u32, vector: u32) -> Result<Box<dyn CompletionQueue>, CreateError>;

    /// See [`crate::Device::create_cq_reporting_on`]. The device has this completion vector.
    fn create_cq_reporting(
        &self,
        _depth: u32,
        _vector: u32,
        _events: &EventQueue,
        _token: u64,
    ) -> Result<Box<dyn CompletionQueue>, CreateError> {
        Err(CreateError::Io(io::ErrorKind::Unsupported.into()))
    }

    /// See [`crate::Device::alloc_xrcd`].
    fn alloc_xrcd(&self) -> Result<Box<dyn XrcDomain>, CreateError> {
        Err(CreateError::Io(io::ErrorKind::Unsupported.into()))
    }

    /// See [`crate::Device::listen_service`].
    fn listen(&self, service: ServiceId, qp_types: &[QpType]) -> Result<Box<dyn Listener>, ListenError>;

    /// See [`crate::Device::start_connect`]. The queue pair is of this device, and of a type that has connections.
    fn start_connect(
        &self,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Box<dyn Connecting>, ConnectError>;

    /// See [`crate::Device::listen_datagram`].
    fn listen_datagram(&self, _port: u16) -> Result<Box<dyn DatagramListener>, ListenError> {
        Err(ListenError::Io(io::ErrorKind::Unsupported.into()))
    }

    /// See [`crate::Device::start_resolve`].
    fn start_resolve(
        &self,
        _source_port: u16,
        _peer: SocketAddr,
        _private_data: &[u8],
    ) -> Result<Box<dyn Resolving>, ResolveError> {
        Err(ResolveError::Io(io::ErrorKind::Unsupported.into()))
    }

    /// See [`crate::Device::progress`]. Nothing to do for a device that drives itself.
    fn progress(&self) {}

    /// See [`crate::Device::look_before_sleep`]: returns whether `look` found something.
    fn look_before_sleep(&self, look: &mut dyn FnMut() -> bool) -> bool {
        look()
    }

    /// See [`crate::Device::slept`].
    fn slept(&self, _since: Instant) {}

    /// See [`crate::Device::watch`].
    fn watch(&self) -> Option<Box<dyn EngineWatch>> {
        None
    }

    /// See [`crate::Device::acknowledge`].
    fn acknowledge(&self) {}

    /// See [`crate::Device::send_errors`].
    fn send_errors(&self) -> u64 {
        0
    }

    /// See [`crate::Device::path_mtu_to`].
    fn path_mtu_to(&self, peer: IpAddr) -> io::Result<PathMtu>;

    /// See [`crate::Device::active_mtu`].
    fn active_mtu(&self) -> PathMtu;

    /// See [`crate::Device::source_port`]. 0: the device chooses it.
    fn source_port(&self, _peer: Qpn) -> io::Result<u16> {
        Ok(0)
    }

    /// See [`crate::Device::counters`].
    fn counters(&self) -> Counters;

    /// See [`crate::Device::fault_counts`].
    fn fault_counts(&self) -> Option<FaultCounts> {
        None
    }

    /// See [`crate::Device::poll_async_event`].
    fn poll_async_event(&self) -> Option<AsyncEvent>;

    /// See [`crate::Device::async_event_fd`].
    fn async_event_fd(&self) -> BorrowedFd<'_>;

    /// See [`crate::Device::wait_async_event`].
    fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent>;

    /// See [`crate::Device::is_active`].
    fn is_active(&self) -> bool;

    /// See [`crate::Device::object_counts`].
    fn object_counts(&self) -> (usize, usize, usize);
}

/// See [`crate::EngineWatch`].
pub trait EngineWatch: Any + Debug + Send {
    /// See [`crate::EngineWatch::prepare`].
    fn prepare(&mut self) -> bool;

    /// See [`crate::EngineWatch::serves_others`].
    fn serves_others(&self) -> bool;

    /// Returns a descriptor that is readable when the caller is to wake.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// See [`crate::ProtectionDomain`].
pub trait ProtectionDomain: Any + Debug + Send + Sync {
    /// See [`crate::ProtectionDomain::create_qp`]. The objects in `options` are of this device.
    fn create_qp(&self, options: &QpOptions) -> Result<Box<dyn QueuePair>, CreateError>;

    /// Makes a shared receive queue; for XRC with its domain and the queue for its completions, both of this device.
    fn create_srq(
        &self,
        _max_wr: u32,
        _xrc: Option<(&crate::XrcDomain, &crate::CompletionQueue)>,
    ) -> Result<Box<dyn SharedReceiveQueue>, CreateError> {
        Err(CreateError::Io(io::ErrorKind::Unsupported.into()))
    }

    /// See [`crate::ProtectionDomain::reg_mr`].
    fn reg_mr(&self, spec: RegionSpec) -> Result<Box<dyn MemoryRegion>, RegisterError>;

    /// See [`crate::ProtectionDomain::alloc_mr`].
    fn alloc_mr(&self, _length_max: u64) -> Result<Box<dyn MemoryRegion>, RegisterError> {
        Err(RegisterError::Unsupported(Features::FAST_REGISTER.first_name()))
    }

    /// See [`crate::ProtectionDomain::alloc_mw`].
    fn alloc_mw(&self, window_type: WindowType) -> Result<Box<dyn MemoryWindow>, RegisterError> {
        Err(RegisterError::Unsupported(match window_type {
            WindowType::One => Features::MW_TYPE_1.first_name(),
            WindowType::Two => Features::MW_TYPE_2.first_name(),
        }))
    }
}

/// See [`crate::CompletionQueue`].
pub trait CompletionQueue: Any + Debug + Send + Sync {
    /// See [`crate::CompletionQueue::cqn`].
    fn cqn(&self) -> Cqn;

    /// Returns the queue in which completions arrive, if it is one of this process: then [`crate::CompletionQueue::poll`] looks there
    /// itself, without an indirect call, and calls [`CompletionQueue::poll`] when that queue is empty.
    fn queue(&self) -> Option<&rdmux_rnic::CompletionQueue> {
        None
    }

    /// See [`crate::CompletionQueue::poll`].
    fn poll(&self) -> Option<WorkCompletion>;

    /// See [`crate::CompletionQueue::poll_many`].
    fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize;

    /// See [`crate::CompletionQueue::poll_into`].
    fn poll_into(&self, into: &mut [WorkCompletion]) -> usize;

    /// See [`crate::CompletionQueue::poll_with_time`].
    fn poll_with_time(&self) -> Option<(WorkCompletion, Instant)> {
        Some((self.poll()?, Instant::now()))
    }

    /// See [`crate::CompletionQueue::arm`].
    fn arm(&self, arm: Arm);

    /// See [`crate::EngineWatch::report`], or ends that.
    fn watch(&self, _on: bool) {}

    /// See [`crate::CompletionQueue::take_event`].
    fn take_event(&self) -> bool;

    /// See [`crate::CompletionQueue::wait`].
    fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>>;

    /// Returns a descriptor that is readable when the armed queue has a completion, until it is armed again.
    fn fd(&self) -> BorrowedFd<'_>;

    /// See [`crate::CompletionQueue::resize`].
    fn resize(&self, depth: u32) -> Result<(), ResizeError>;

    /// Sets the moderation that a policy of this kind has chosen ([`crate::CompletionQueue::moderate`]). Called only if the device has
    /// [`Features::CQ_MODERATION`].
    fn moderate(&self, _kind: ModerationKind, _moderation: Option<Moderation>) {}

    /// Returns whether the queue has raised an event since it was armed. Called only if the device has [`Features::CQ_MODERATION`].
    fn has_notified(&self) -> bool {
        false
    }

    /// See [`crate::CompletionQueue::keep_times`]. Called only if the device has [`Features::CQ_TIMES`].
    fn keep_times(&self) {}
}

/// See [`crate::QueuePair`].
pub trait QueuePair: Any + Debug + Send + Sync {
    /// See [`crate::QueuePair::qpn`].
    fn qpn(&self) -> Qpn;

    /// See [`crate::QueuePair::post_send`].
    fn post_send(&self, request: SendRequest) -> Result<(), PostError>;

    /// See [`crate::QueuePair::post_send_list`].
    fn post_send_list(&self, requests: Vec<SendRequest>) -> Result<(), PostListError>;

    /// See [`crate::QueuePair::bind_mw`].
    fn bind_mw(&self, wr_id: u64, bind: Bind, flags: SendFlags) -> Result<RKey, PostError>;

    /// See [`crate::QueuePair::post_recv`].
    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError>;

    /// See [`crate::QueuePair::modify`].
    fn modify(&self, to: QpState, attributes: &QpAttributes) -> Result<(), ModifyError>;

    /// See [`crate::QueuePair::retire`].
    fn retire(&self);

    /// See [`crate::QueuePair::cut_off`]. For a provider whose [`QueuePair::retire`] waits for no peer this is enough.
    fn cut_off(&self) -> bool {
        self.retire();
        false
    }

    /// See [`crate::QueuePair::query`].
    fn query(&self) -> Option<QpInfo>;

    /// See [`crate::QueuePair::carrier`].
    fn carrier(&self) -> Option<Carrier>;

    /// See [`crate::QueuePair::error`].
    fn error(&self) -> Option<Status>;

    /// See [`crate::QueuePair::keep_remains`].
    fn keep_remains(&self) -> bool {
        false
    }

    /// See [`crate::QueuePair::take_remains`].
    fn take_remains(&self) -> Option<Remains> {
        None
    }

    /// See [`crate::QueuePair::ready_datagram`].
    fn ready_datagram(&self, qkey: u32) -> Result<(), ModifyError>;

    /// See [`crate::QueuePair::attach_mcast`].
    fn attach_mcast(&self, group: IpAddr) -> Result<(), AttachError>;

    /// See [`crate::QueuePair::detach_mcast`].
    fn detach_mcast(&self, group: IpAddr) -> Result<(), McastError>;
}

/// See [`crate::SharedReceiveQueue`].
pub trait SharedReceiveQueue: Any + Debug + Send + Sync {
    /// See [`crate::SharedReceiveQueue::srqn`].
    fn srqn(&self) -> Srqn;

    /// See [`crate::SharedReceiveQueue::post_recv`].
    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError>;

    /// See [`crate::SharedReceiveQueue::modify`].
    fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError>;

    /// See [`crate::SharedReceiveQueue::query`].
    fn query(&self) -> Option<SrqInfo>;
}

/// See [`crate::XrcDomain`].
pub trait XrcDomain: Any + Debug + Send + Sync {}

/// See [`crate::MemoryRegion`].
pub trait MemoryRegion: Any + Debug + Send + Sync {
    /// See [`crate::MemoryRegion::lkey`].
    fn lkey(&self) -> LKey;

    /// See [`crate::MemoryRegion::rkey`].
    fn rkey(&self) -> RKey;

    /// See [`crate::MemoryRegion::has_windows`].
    fn has_windows(&self) -> bool;

    /// See [`crate::MemoryRegion::rereg_in`]. The domain is of this device.
    fn rereg(&mut self, pd: &crate::ProtectionDomain, spec: RegionSpec) -> Result<(), RegisterError>;
}

/// See [`crate::MemoryWindow`].
pub trait MemoryWindow: Any + Debug + Send + Sync {
    /// See [`crate::MemoryWindow::rkey`].
    fn rkey(&self) -> RKey;

    /// Replaces the key, after the window was bound.
    fn set_rkey(&self, rkey: RKey);
}

/// See [`crate::Listener`].
pub trait Listener: Any + Debug + Send + Sync {
    /// See [`crate::Listener::accept`]. Refuses requests for queue pairs of other types.
    fn accept(&self, qp_types: &[QpType], timeout: Duration) -> Option<Box<dyn ConnectionRequest>>;

    /// See [`crate::Listener::notify`].
    fn notify(&self, events: &EventQueue, token: u64);

    /// Returns a descriptor that is readable when a request may have arrived, until [`Listener::accept`] finds none.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// Action between the moment when a queue pair takes receives and the answer to its peer.
pub type Prepare<'a> = Box<dyn FnOnce() -> Result<(), ConnectError> + 'a>;

/// See [`crate::ConnectionRequest`].
pub trait ConnectionRequest: Any + Debug + Send + Sync {
    /// See [`crate::ConnectionRequest::peer`].
    fn peer(&self) -> IpAddr;

    /// See [`crate::ConnectionRequest::peer_port`].
    fn peer_port(&self) -> u16 {
        0
    }

    /// See [`crate::ConnectionRequest::arrival`].
    fn arrival(&self) -> Arrival;

    /// See [`crate::ConnectionRequest::remote`].
    fn remote(&self) -> &Endpoint;

    /// See [`crate::ConnectionRequest::private_data`].
    fn private_data(&self) -> &[u8];

    /// See [`crate::ConnectionRequest::accept_after`]. The queue pair is of this device, and of the type that can accept the request.
    fn accept(
        &mut self,
        pair: ConnectPair<'_>,
        params: &ConnectParams,
        private_data: &[u8],
        prepare: Prepare<'_>,
    ) -> Result<Box<dyn Connection>, ConnectError>;

    /// See [`crate::ConnectionRequest::attributes`].
    fn attributes(&self, _to: QpState, _params: &ConnectParams) -> Result<QpAttributes, ConnectError> {
        Err(no_external())
    }

    /// See [`crate::ConnectionRequest::pass_to`]: returns whether `engine` is one of this device.
    fn pass_to(&mut self, _engine: &crate::Device) -> bool {
        false
    }

    /// See [`crate::ConnectionRequest::reject`].
    fn reject(&mut self, private_data: &[u8]);
}

/// See [`crate::Connecting`].
pub trait Connecting: Any + Debug + Send + Sync {
    /// See [`crate::Connecting::poll`]. Not called again after it has returned the result.
    fn poll(&mut self) -> Option<Result<Box<dyn Connection>, ConnectError>>;

    /// See [`crate::Connecting::wait`]. Not called after [`Connecting::poll`] has returned the result.
    fn wait(&mut self) -> Result<Box<dyn Connection>, ConnectError>;

    /// See [`crate::Connecting::notify`].
    fn notify(&self, events: &EventQueue, token: u64);
}

/// See [`crate::Connection`].
pub trait Connection: Any + Debug + Send + Sync {
    /// See [`crate::Connection::remote`].
    fn remote(&self) -> Option<&Endpoint>;

    /// See [`crate::Connection::private_data`].
    fn private_data(&self) -> &[u8];

    /// See [`crate::Connection::attributes`].
    fn attributes(&self, _to: QpState) -> Option<QpAttributes> {
        None
    }

    /// See [`crate::Connection::establish`]. Called only for a queue pair that its owner brings up.
    fn establish(&self) {}

    /// See [`crate::Connection::wait_established`].
    fn wait_established(&self) -> bool;

    /// See [`crate::Connection::notify`].
    fn notify(&self, events: &EventQueue, token: u64);

    /// See [`crate::Connection::progress`].
    fn progress(&self) -> Progress;

    /// See [`crate::Connection::rests_for`].
    fn rests_for(&self) -> Option<Duration> {
        None
    }

    /// See [`crate::Connection::wait_ended`].
    fn wait_ended(&self, timeout: Duration) -> bool;

    /// See [`crate::Connection::disconnect`].
    fn disconnect(&self);
}

/// See [`crate::DatagramListener`].
pub trait DatagramListener: Any + Debug + Send + Sync {
    /// See [`crate::DatagramListener::accept`].
    fn accept(&self, timeout: Duration) -> Option<Box<dyn ServiceRequest>>;

    /// See [`crate::DatagramListener::notify`].
    fn notify(&self, events: &EventQueue, token: u64);

    /// Returns a descriptor that is readable when a request may have arrived, until [`DatagramListener::accept`] finds none.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// See [`crate::ServiceRequest`].
pub trait ServiceRequest: Any + Debug + Send + Sync {
    /// See [`crate::ServiceRequest::peer`].
    fn peer(&self) -> IpAddr;

    /// See [`crate::ServiceRequest::peer_port`].
    fn peer_port(&self) -> u16 {
        0
    }

    /// See [`crate::ServiceRequest::arrival`].
    fn arrival(&self) -> Arrival;

    /// See [`crate::ServiceRequest::private_data`].
    fn private_data(&self) -> &[u8];

    /// See [`crate::ServiceRequest::accept`]. The queue pair is of this device.
    fn accept(&mut self, qp: &crate::QueuePair, private_data: &[u8]) -> Result<(), AnswerError>;

    /// See [`crate::ServiceRequest::reject`].
    fn reject(&mut self, private_data: &[u8]);
}

/// See [`crate::Resolving`].
pub trait Resolving: Any + Debug + Send + Sync {
    /// See [`crate::Resolving::poll`]. Not called again after it has returned the result.
    fn poll(&mut self) -> Option<Result<Found, ResolveError>>;

    /// See [`crate::Resolving::wait`]. Not called after [`Resolving::poll`] has returned the result.
    fn wait(&mut self) -> Result<Found, ResolveError>;

    /// See [`crate::Resolving::notify`].
    fn notify(&self, events: &EventQueue, token: u64);
}

/// The providers of this process, in the order of their registration: the first one is the default.
static REGISTERED: Mutex<Vec<&'static dyn Provider>> = Mutex::new(Vec::new());

/// Provider that [`set_process_provider`] set.
static PROCESS_PROVIDER: Mutex<Option<&'static dyn Provider>> = Mutex::new(None);

/// Returns the registered providers.
pub(crate) fn registered() -> Vec<&'static dyn Provider> {
    lock().clone()
}

fn lock() -> MutexGuard<'static, Vec<&'static dyn Provider>> {
    REGISTERED.lock()
}

/// Makes a provider known to this process. The first one that is registered is the default of the process. Does nothing if one of the same
/// name is registered.
pub fn register(provider: &'static dyn Provider) {
    let mut registered = lock();
    if registered.iter().all(|known| known.name() != provider.name()) {
        registered.push(provider);
    }
}

/// No provider of this name is registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{name}' is not a provider: {}", choice())]
pub struct UnknownProvider {
    /// The name.
    pub name: String,
}

fn choice() -> String {
    let names: Vec<&str> = registered().iter().map(|known| known.name()).collect();
    match &names[..] {
        [] => "the program has registered none".to_owned(),
        names => format!("give {}", one_of(names)),
    }
}

/// Returns words as a text for users: `a, b or c`.
pub(crate) fn one_of(words: &[&str]) -> String {
    match words {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => words.concat(),
    }
}

/// Returns the provider of a name.
///
/// # Errors
/// No provider of this name is registered.
pub fn named(name: &str) -> Result<&'static dyn Provider, UnknownProvider> {
    let found = registered().iter().find(|known| known.name() == name).copied();
    found.ok_or_else(|| UnknownProvider {
        name: name.to_owned(),
    })
}

/// Chooses the provider of the devices that this process opens from then on, unless their options name one: for programs whose user
/// decides.
///
/// # Errors
/// No provider of this name is registered.
pub fn set_process_provider(name: &str) -> Result<(), UnknownProvider> {
    let provider = named(name)?;
    *PROCESS_PROVIDER.lock() = Some(provider);
    Ok(())
}

/// Returns the provider of a device whose options name this one, or none: then as set by [`set_process_provider`] or the environment
/// variable `RDMUX_PROVIDER`, else the first that was registered.
pub(crate) fn chosen(option: Option<&str>) -> Result<&'static dyn Provider, OpenError> {
    if let Some(name) = option {
        return Ok(named(name)?);
    }
    if let Some(provider) = *PROCESS_PROVIDER.lock() {
        return Ok(provider);
    }
    match std::env::var("RDMUX_PROVIDER") {
        Ok(name) if !name.is_empty() => Ok(named(&name)?),
        _ => registered().first().copied().ok_or(OpenError::NoProvider),
    }
}

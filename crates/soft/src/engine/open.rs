//! Opening an engine: its place in the group of its address, its sockets, its thread.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
#[cfg(test)]
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use rdmux_rnic::cm::Peering;
use rdmux_rnic::{Config, Histogram, Rnic, Time, TransmitBuf};
use rdmux_verbs::provider::{AsyncEvents, Nap, Waker};
use rdmux_verbs::resources::DeviceAt;
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{OpenError, Options};
use rustix::event::epoll;
use rustix::io::Errno;

use super::handover::HandOver;
use super::leader::Leader;
use super::lock::EngineLock;
use super::looks::Looks;
use super::quiet::Quiet;
use super::sleep::Epoll;
use super::sockets::TxSockets;
use super::spinner::Spinner;
use super::standby::Standby;
use super::{Core, Engine, Sleeps, device_mtu};
use crate::capture;
use crate::engines::Engines;
use crate::group::{Calls, MadDatagram, PortGroup};
use crate::mcast::Memberships;
use crate::metrics;
use crate::port::RnicPort;
use crate::shm::link::Links;
use crate::trace::Level;
use crate::udp::{ROCE_PORT, RxBatch, TxSocket};

/// Bytes collected before they are sent.
const TRANSMIT_BYTES: usize = 256 << 10;

/// An engine that may not exist yet, or no more.
type EngineSlot = Arc<Mutex<Weak<Engine>>>;

impl Engine {
    /// Opens a further engine of the device that has `engines`.
    pub(crate) fn open(
        address: IpAddr,
        options: Options,
        engines: Arc<Engines>,
    ) -> Result<Arc<Engine>, OpenError> {
        if address.is_unspecified() || address.is_multicast() || is_broadcast(address) {
            return Err(OpenError::NotOneHost(address));
        }
        let slot = EngineSlot::default();
        let control = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| io("epoll")(e.into()))?;
        let aside = control.try_clone().map_err(io("epoll"))?;
        let group = PortGroup::join_with(address, group_calls(&slot, aside))?;
        // One clock for all engines: the load of a thread is measured by it.
        static START: OnceLock<Instant> = OnceLock::new();
        let start = *START.get_or_init(Instant::now);
        let (core, arrivals) = Core::open(address, &options, &engines, &group, control, start)?;
        let waiting = options.waiting.or_else(WaitMode::of_environment);
        let kick = Waker::new().map_err(io("eventfd"))?;
        let nap = Arc::new(Nap::default());
        let leader_kick = Waker::of_napper(nap.clone()).map_err(io("eventfd"))?;
        let watch_kick = Waker::new().map_err(io("eventfd"))?;
        let watch = any_of(&[arrivals.as_fd(), watch_kick.fd().as_fd()]);
        let watch = watch.map_err(|errno| io("epoll")(errno.into()))?;
        let engine = Arc::new(Engine {
            async_waker: core.async_events.waker(),
            armed_queues: core.rnic.armed_queues(),
            callers: core.links.callers(),
            lanes: core.rnic.lanes(),
            told: core.told.clone(),
            core: EngineLock::new(core),
            epoll: Epoll::new(&arrivals, &kick).map_err(io("epoll"))?,
            kick,
            start,
            hand_over: HandOver::new(),
            stop: AtomicBool::new(false),
            leader: Mutex::new(Leader::new(waiting)),
            leader_kick,
            nap,
            watch_kick,
            arrivals,
            watch,
            waiting,
            engines,
            group: Mutex::new(Some(group)),
            thread: Mutex::new(None),
            #[cfg(test)]
            overslept: AtomicUsize::new(0),
        });
        *slot.lock() = Arc::downgrade(&engine);
        engine.start()?;
        Ok(engine)
    }

    /// Begins to serve: the engines of other processes, and its thread's part.
    fn start(self: &Arc<Engine>) -> Result<(), OpenError> {
        let listening = self.lock().links.listen();
        listening.map_err(|errno| io("shared memory")(errno.into()))?;
        let (flushers, media) = {
            let core = self.lock();
            (core.flushers.clone(), core.media.clone())
        };
        for place in [&flushers.engine, &media.engine] {
            *place.lock() = Arc::downgrade(self);
        }
        let thread = rdmux_verbs::thread::spawn("rdmux-nic", {
            let engine = self.clone();
            move || engine.run()
        })
        .map_err(io("engine thread"))?;
        *self.thread.lock() = Some(thread);
        metrics::enlist(self);
        self.engines.add(self);
        Ok(())
    }
}

impl Core {
    /// Makes the state of an engine, and an epoll set that is readable when something has arrived for it.
    fn open(
        address: IpAddr,
        options: &Options,
        engines: &Engines,
        group: &PortGroup,
        control: OwnedFd,
        start: Instant,
    ) -> Result<(Core, Arc<OwnedFd>), OpenError> {
        let spec = options.faults;
        let rx = group.socket().map_err(io("UDP socket"))?;
        if let Some(bytes) = options.receive_buffer_bytes {
            rx.set_buffer_bytes(bytes).map_err(io("UDP receive buffer"))?;
        }
        let buffer_bytes = rx.buffer_bytes().map_err(io("UDP receive buffer"))?;
        let gsi = TxSocket::bind(address).map_err(io("UDP socket"))?;
        // Faults lose and delay single packets, so packets leave one at a time, without GSO.
        let gso = gsi.self_test().map_err(io("UDP self-test"))? && spec.is_none();
        let capture = capture::of_process(format!("{address}/{}", group.slot()))?;
        let listener = group.bind_slot().ok();
        let shares = options.shared_memory.is_on();
        let memberships = Memberships::new().map_err(io("epoll"))?;
        // Doorbells are in this set too, and not in one of their own: each level of sets costs a ring of the doorbell 1 us.
        let arrivals =
            any_of(&[rx.as_fd(), memberships.as_fd()]).map_err(|errno| io("epoll")(errno.into()))?;
        let arrivals = Arc::new(arrivals);
        let doorbells = arrivals.clone();
        let mut links = Links::new(address, group.slot(), listener, control, doorbells, shares);
        links.set_moderation(engines.moderation.clone());
        if spec.is_some() || capture.is_some() {
            links.keep_to_packets();
        }
        if spec.is_some() {
            links.lose_packets();
        }
        let config = Config {
            address,
            slot: group.slot(),
            seed: random()?,
            // Not derived from the seed, since peers receive it. It identifies the device that connects, not its node.
            guid: u64::from_le_bytes(random()?),
            gsi_src_port: gsi.local_addr().port(),
            receive_window_bytes: window_for(buffer_bytes),
            traffic: options.traffic,
            mtu: device_mtu(address).bytes(),
        };
        let now = Time(start.elapsed().as_nanos() as u64);
        let mut port = RnicPort::new(Rnic::new(config), spec, now);
        let device = DeviceAt {
            address,
            slot: group.slot(),
        };
        let level = Level::of_environment();
        port.trace(level, device, now);
        if let Some(capture) = capture {
            port.capture(capture);
        }
        let core = Core {
            rnic: port,
            rx,
            memberships,
            links,
            served_at: Time(0),
            sleeps: Sleeps::default(),
            thread_asleep: false,
            thread_reported: false,
            is_watched: false,
            watcher_asleep: false,
            caller_looks: false,
            standby: Standby::default(),
            doorbells: false,
            guarded: false,
            napping: false,
            leader_slept: false,
            naps: true,
            told: Arc::default(),
            polls: 0,
            spinner: Spinner::default(),
            polls_checked: 0,
            quiet: Quiet::default(),
            looks: Looks::default(),
            #[cfg(test)]
            looked: 0,
            #[cfg(test)]
            thread_woken: 0,
            #[cfg(test)]
            napped: 0,
            batch: RxBatch::new(),
            tx: TxSockets::new(address, gsi),
            buf: TransmitBuf::new(TRANSMIT_BYTES, gso),
            sent: 0,
            blocked: None,
            gso,
            address,
            cq_wakers: HashMap::new(),
            qp_errors: HashMap::new(),
            async_events: AsyncEvents::new().map_err(io("eventfd"))?,
            connections: HashMap::new(),
            connected: HashMap::new(),
            listeners: HashMap::new(),
            send_errors: 0,
            flush_times: Histogram::default(),
            records: group.records(),
            flushers: Arc::default(),
            media: Arc::default(),
            ended: Vec::new(),
        };
        Ok((core, arrivals))
    }
}

/// Returns the work that the group's thread does for an engine. It may receive a message before the engine exists. It drops such a
/// message, and the peer repeats it.
fn group_calls(engine: &EngineSlot, aside: OwnedFd) -> Calls {
    let [deliver, disconnect_orphans, serve] = [0; 3].map(|_| engine.clone());
    let deliver = move |mad: MadDatagram| {
        let engine = deliver.lock().upgrade();
        if let Some(engine) = engine {
            engine.handle_mad(&mad);
        }
    };
    let disconnect_orphans = move |dead: Vec<Peering>| {
        let engine = disconnect_orphans.lock().upgrade();
        if let Some(engine) = engine {
            engine.with(|core, now| {
                for peering in &dead {
                    core.rnic.cm().disconnect_orphan(now, peering);
                }
            });
        }
    };
    let serve = move || {
        let engine = serve.lock().upgrade();
        if let Some(engine) = engine {
            engine.serve_links();
        }
    };
    Calls {
        deliver: Box::new(deliver),
        disconnect_orphans: Box::new(disconnect_orphans),
        aside: Some((aside, Box::new(serve))),
    }
}

fn io(what: &'static str) -> impl Fn(io::Error) -> OpenError {
    move |source| OpenError::Io { what, source }
}

fn random<const N: usize>() -> Result<[u8; N], OpenError> {
    use rand_core::TryRngCore;
    let mut bytes = [0; N];
    let filled = rand_core::OsRng.try_fill_bytes(&mut bytes);
    filled.map_err(|error| io("random numbers")(io::Error::other(error)))?;
    Ok(bytes)
}

/// Returns the number of bytes that one connection may have in flight towards a socket with this buffer. The kernel charges more than
/// the payload, and several connections share the buffer: losses make those reduce their windows.
fn window_for(buffer_bytes: usize) -> u32 {
    (buffer_bytes / 4).clamp(16 << 10, 512 << 10) as u32
}

/// Creates a descriptor that is readable when one of these is.
fn any_of(fds: &[BorrowedFd<'_>]) -> Result<OwnedFd, Errno> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in fds {
        epoll::add(&set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok(set)
}

/// Returns whether an address is a broadcast address, of all networks or of one that this host is on.
fn is_broadcast(address: IpAddr) -> bool {
    use rustix::net::{AddressFamily, SocketType, connect, socket};
    let IpAddr::V4(v4) = address else { return false };
    // Only the kernel knows the networks: it refuses to connect a socket without SO_BROADCAST to a broadcast address.
    v4.is_broadcast()
        || socket(AddressFamily::INET, SocketType::DGRAM, None)
            .is_ok_and(|probe| connect(&probe, &SocketAddr::new(address, ROCE_PORT)) == Err(Errno::ACCESS))
}

//! Devices and their objects. Each ends its part of the device when it is dropped.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::{
    Access, Arm, Bind, Counters, Cqn, ModifyError, NotPosted, Pd, PostError, QpAttributes, QpInfo, QpInit,
    QpState, QpType, Qpn, RKey, ReceiveQueue, RecvRequest, SendFlags, SendQueue, SendRequest, Status,
    WorkCompletion,
};
use rdmux_wire::roce::PathMtu;

use crate::cm::deadline_after;
use crate::event::AsyncEvent;
use crate::region::{MemoryRegion, MemoryWindow};
use crate::soft::engine::{self, Core, Engine, Waker};
pub use crate::soft::engine::{OpenError, Options, SharedMemory};
use crate::soft::faults::FaultCounts;
use crate::srq::{SharedReceiveQueue, XrcDomain};

/// Why an object could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The device has no room for another.
    #[error("the device has no room for another object, or what it is to use does not fit it")]
    NoRoom,
    /// What it is to use belongs to another device.
    #[error("a completion queue, shared receive queue or XRC domain of another device")]
    OtherDevice,
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a list of work requests was not taken whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {index} of the list: {source}")]
pub struct PostListError {
    /// Which request was the first that was not taken, counted from 0: those before it are posted, those behind it are not.
    pub index: usize,
    /// Why.
    pub source: PostError,
}

/// The handle that closes the engine when the last object of the device has gone.
#[derive(Debug)]
pub(crate) struct Handle(pub(crate) Arc<Engine>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// An RDMA device with one address (GID).
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) handle: Arc<Handle>,
    address: IpAddr,
}

impl Device {
    /// Opens the soft RNIC on a local address.
    pub fn open(address: IpAddr) -> Result<Device, OpenError> {
        Device::open_with(address, Options::default())
    }

    /// Opens the soft RNIC on a local address, with options.
    pub fn open_with(address: IpAddr, options: Options) -> Result<Device, OpenError> {
        let address = address.to_canonical();
        Ok(Device {
            handle: Arc::new(Handle(Engine::open(address, options)?)),
            address,
        })
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.handle.0
    }

    /// Whether both are the same device, opened once: objects of different ones do not go together.
    pub(crate) fn is(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.handle.0, &other.handle.0)
    }

    /// The device's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Makes a protection domain.
    pub fn alloc_pd(&self) -> ProtectionDomain {
        let pd = self.engine().lock().rnic.alloc_pd();
        ProtectionDomain(Arc::new(PdInner {
            device: self.clone(),
            pd,
        }))
    }

    /// Makes a completion queue for `depth` completions.
    pub fn create_cq(&self, depth: u32) -> Result<CompletionQueue, CreateError> {
        let waker = Arc::new(Waker::new()?);
        let mut core = self.engine().lock();
        let cqn = core.rnic.create_cq(depth);
        let queue = core.rnic.cq(cqn).ok_or(CreateError::NoRoom)?;
        core.cq_wakers.insert(cqn, Arc::downgrade(&waker));
        drop(core);
        Ok(CompletionQueue(Arc::new(CqInner {
            device: self.clone(),
            cqn,
            queue,
            waker,
            waiters: AtomicUsize::new(0),
        })))
    }

    /// Lets the caller drive the device, unless somebody does: takes in what has arrived and sends what is owed. A program that
    /// polls memory instead of a completion queue calls this in its loop.
    pub fn progress(&self) {
        self.engine().poll(|| None::<()>);
    }

    /// Datagram trains that the system refused to send; the protocol took them for lost.
    pub fn send_errors(&self) -> u64 {
        self.engine().lock().send_errors
    }

    /// The path MTU towards a peer: the largest that the interface's MTU carries.
    pub fn path_mtu_to(&self, peer: IpAddr) -> io::Result<PathMtu> {
        engine::path_mtu_to(self.address, peer)
    }

    /// The UDP source port of packets to a queue pair of a peer, for programs that bring theirs up themselves
    /// ([`rdmux_rnic::Path::src_port`]).
    pub fn source_port(&self, peer: Qpn) -> io::Result<u16> {
        self.engine().lock().source_port(peer)
    }

    /// What the device counted.
    pub fn counters(&self) -> Counters {
        self.engine().counters()
    }

    /// What faults did to its packets, where it was opened with some ([`Options::faults`]).
    pub fn fault_counts(&self) -> Option<FaultCounts> {
        self.engine().lock().rnic.fault_counts()
    }

    /// Takes the oldest asynchronous event. IBTA Vol 1, 11.6.3.
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.engine().lock().async_events.take()
    }

    /// Readable when there may be an asynchronous event. Read eight bytes to reset it, then take events until there is none.
    pub fn async_event_fd(&self) -> BorrowedFd<'_> {
        self.engine().async_waker.fd().as_fd()
    }

    /// Takes the oldest asynchronous event; sleeps until there is one. `None`: the time is over.
    pub fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        let deadline = deadline_after(timeout);
        let take = || self.engine().lock().async_events.take_and_pass_on();
        loop {
            if let Some(event) = take() {
                return Some(event);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let engine = self.engine();
            if left.is_some_and(|left| left.is_zero()) || !engine.sleep(&engine.async_waker, left) {
                return take();
            }
        }
    }

    /// Queue pairs, memory regions and completion queues there are.
    pub fn object_counts(&self) -> (usize, usize, usize) {
        self.engine().lock().rnic.object_counts()
    }
}

#[derive(Debug)]
struct PdInner {
    device: Device,
    pd: Pd,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // Dropped when the engine is unlocked again: memory may unmap, close, or run its owner's code.
        let memories = self.device.engine().lock().rnic.dealloc_pd(self.pd);
        drop(memories);
    }
}

/// Protection domain: queue pairs reach the regions of their own domain only.
#[derive(Clone, Debug)]
pub struct ProtectionDomain(Arc<PdInner>);

impl ProtectionDomain {
    pub(crate) fn number(&self) -> Pd {
        self.0.pd
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Makes a queue pair.
    ///
    /// # Errors
    /// [`CreateError::OtherDevice`] when what `options` name was not made on this device.
    pub fn create_qp(&self, options: &QpOptions) -> Result<QueuePair, CreateError> {
        let device = self.device();
        let ours = options.send_cq.device().is(device)
            && options.recv_cq.device().is(device)
            && options.srq.as_ref().is_none_or(|srq| srq.device().is(device))
            && options.xrcd.as_ref().is_none_or(|xrcd| xrcd.device().is(device));
        if !ours {
            return Err(CreateError::OtherDevice);
        }
        let init = QpInit {
            qp_type: options.qp_type,
            srq: options.srq.as_ref().map(SharedReceiveQueue::srqn),
            xrcd: options.xrcd.as_ref().map(XrcDomain::number),
            max_send_wr: options.max_send_wr,
            max_recv_wr: options.max_recv_wr,
            recv_cq: options.recv_cq.0.cqn,
            ..QpInit::new(self.0.pd, options.send_cq.0.cqn)
        };
        let mut core = self.0.device.engine().lock();
        let qpn = core.rnic.create_qp(init).ok_or(CreateError::NoRoom)?;
        let sends = core.rnic.send_queue(qpn).ok_or(CreateError::NoRoom)?;
        let receives = core.rnic.receive_queue(qpn).ok_or(CreateError::NoRoom)?;
        drop(core);
        Ok(QueuePair(Arc::new(QpInner {
            pd: self.clone(),
            qpn,
            sends,
            receives,
            options: options.clone(),
        })))
    }
}

#[derive(Debug)]
struct CqInner {
    device: Device,
    cqn: Cqn,
    queue: rdmux_rnic::CompletionQueue,
    waker: Arc<Waker>,
    /// Threads in [`CompletionQueue::wait`].
    waiters: AtomicUsize,
}

impl Drop for CqInner {
    fn drop(&mut self) {
        let mut core = self.device.engine().lock();
        core.rnic.destroy_cq(self.cqn);
        core.cq_wakers.remove(&self.cqn);
    }
}

/// Completion queue with a completion channel of its own.
#[derive(Clone, Debug)]
pub struct CompletionQueue(Arc<CqInner>);

impl CompletionQueue {
    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its number, by which [`AsyncEvent::CqError`] names it.
    pub fn cqn(&self) -> Cqn {
        self.0.cqn
    }

    /// Takes the oldest completion, driving the device when there is none. Never sleeps, and waits for nobody who drives.
    #[inline]
    pub fn poll(&self) -> Option<WorkCompletion> {
        self.0.device.engine().poll(|| self.0.queue.poll())
    }

    /// Takes up to `max` completions, oldest first, into `into`; returns how many. Drives the device when there is none.
    pub fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        let look = || Some(self.0.queue.poll_many(max, into)).filter(|n| *n > 0);
        self.0.device.engine().poll(look).unwrap_or(0)
    }

    /// Asks for a wake-up through [`CompletionQueue::as_fd`]. A completion that is there already makes none: poll after
    /// arming.
    pub fn arm(&self, arm: Arm) {
        self.0.queue.arm(arm);
        self.0.device.engine().hand_over_to_channel();
    }

    /// Takes the oldest completion; waits until there is one, as the device waits ([`Options::waiting`]). `None`: the time is over.
    /// Waiting for no time arms the queue for any completion and looks once more: what comes later makes
    /// [`CompletionQueue::as_fd`] readable.
    pub fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>> {
        let CqInner { queue, waker, .. } = &*self.0;
        let look = || {
            let (wc, left) = queue.poll_and_count()?;
            if left > 0 {
                // Another thread may wait for it: one wake-up can stand for several completions.
                waker.wake();
            }
            Some(wc)
        };
        if timeout.is_zero() {
            return Ok(look().or_else(|| {
                self.arm(Arm::Next);
                look()
            }));
        }
        self.0.waiters.fetch_add(1, Ordering::SeqCst);
        let engine = self.0.device.engine();
        let found = engine.wait(deadline_after(timeout), waker, queue, look);
        if self.0.waiters.fetch_sub(1, Ordering::SeqCst) > 1 {
            // The wake-up may have been for all of them, and so was what the queue was armed for: they look and arm again.
            waker.wake();
        }
        Ok(found)
    }
}

impl AsFd for CompletionQueue {
    /// Readable when an armed queue has a completion. Read eight bytes to reset it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.waker.fd().as_fd()
    }
}

/// What carries the packets of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// Rings in memory that this process shares with the peer's, on the same host.
    SharedMemory,
    /// UDP; and why it is not shared memory.
    Udp(String),
}

/// How a queue pair is made.
#[derive(Clone, Debug)]
pub struct QpOptions {
    /// Transport service.
    pub qp_type: QpType,
    /// Where send completions go.
    pub send_cq: CompletionQueue,
    /// Where receive completions go.
    pub recv_cq: CompletionQueue,
    /// Send requests it holds.
    pub max_send_wr: u32,
    /// Receive requests it holds.
    pub max_recv_wr: u32,
    /// Takes its receives from here.
    pub srq: Option<SharedReceiveQueue>,
    /// XRC target: the domain whose shared receive queues peers may name.
    pub xrcd: Option<XrcDomain>,
}

impl QpOptions {
    /// RC, both kinds of completion to one queue, 128 requests each way.
    pub fn new(cq: &CompletionQueue) -> QpOptions {
        QpOptions {
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            max_send_wr: 128,
            max_recv_wr: 128,
            srq: None,
            xrcd: None,
        }
    }
}

#[derive(Debug)]
struct QpInner {
    pd: ProtectionDomain,
    qpn: Qpn,
    sends: SendQueue,
    receives: ReceiveQueue,
    /// What it uses lives as long as it does.
    options: QpOptions,
}

impl Drop for QpInner {
    fn drop(&mut self) {
        self.pd.device().engine().with(|core, now| {
            // Acknowledgements that waited for company are sent: what they stand for has been done.
            core.finish(now, true);
            core.rnic.destroy_qp(self.qpn);
            core.leave_groups();
            core.qp_errors.remove(&self.qpn);
        });
    }
}

/// Queue pair.
#[derive(Clone, Debug)]
pub struct QueuePair(Arc<QpInner>);

impl QueuePair {
    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    /// Transport service.
    pub fn qp_type(&self) -> QpType {
        self.0.options.qp_type
    }

    pub(crate) fn has_srq(&self) -> bool {
        self.0.options.srq.is_some() || self.qp_type() == QpType::XrcRecv
    }

    /// Its protection domain.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.0.pd
    }

    pub(crate) fn device(&self) -> &Device {
        self.0.pd.device()
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.device().engine()
    }

    /// Posts a send request and sends what the window allows.
    pub fn post_send(&self, request: SendRequest) -> Result<(), PostError> {
        self.engine().post_send(&self.0.sends, self.0.qpn, request)
    }

    /// Posts send requests in order, as one doorbell. Fails at the first that is not taken; those before it are posted.
    pub fn post_send_list(
        &self,
        requests: impl IntoIterator<Item = SendRequest>,
    ) -> Result<(), PostListError> {
        // What makes them is the caller's code, and may use the device: it runs before the engine is locked.
        let requests: Vec<SendRequest> = requests.into_iter().collect();
        self.engine().post_send_list(&self.0.sends, self.0.qpn, requests)
    }

    /// Posts the binding of a type 1 window to a range of addresses of a region, and gives the key by which peers reach them
    /// once the request has completed. Type 2 windows are bound by [`Operation::Bind`].
    ///
    /// [`Operation::Bind`]: rdmux_rnic::Operation::Bind
    pub fn bind_mw(
        &self,
        wr_id: u64,
        window: &MemoryWindow,
        region: &MemoryRegion,
        range: Range<u64>,
        access: Access,
        flags: SendFlags,
    ) -> Result<RKey, PostError> {
        let bind = Bind {
            window: window.rkey(),
            region: region.lkey(),
            va: range.start,
            length: range.end.saturating_sub(range.start),
            access,
        };
        let key = self
            .engine()
            .with(|core, now| core.rnic.bind_mw(now, self.0.qpn, wr_id, bind, flags))?;
        window.set_rkey(key);
        Ok(key)
    }

    /// Posts a receive request.
    pub fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        match self.0.receives.post(request) {
            Ok(()) => Ok(()),
            Err(NotPosted::Refused(error)) => Err(error),
            Err(NotPosted::Undecided(request)) => {
                // In Error it completes at once.
                let post = |core: &mut Core, now| core.rnic.post_recv(now, self.0.qpn, request);
                self.engine().with(post)
            }
        }
    }

    /// Changes state and attributes. Programs that connect through [`Device::connect`] need not call it.
    pub fn modify(&self, to: QpState, attributes: &QpAttributes) -> Result<(), ModifyError> {
        self.engine().with(|core, now| {
            core.rnic.modify_qp(now, self.0.qpn, to, attributes)?;
            if to == QpState::Rtr {
                core.meet(self.0.qpn);
            }
            if to == QpState::Reset {
                core.qp_errors.remove(&self.0.qpn);
            }
            Ok(())
        })
    }

    /// What is known about it.
    pub fn query(&self) -> Option<QpInfo> {
        self.engine().lock().rnic.query_qp(self.0.qpn)
    }

    /// What carries its packets; `None` before it has a peer.
    pub fn carrier(&self) -> Option<Carrier> {
        let core = self.engine().lock();
        let info = core
            .rnic
            .query_qp(self.0.qpn)
            .filter(|info| info.path.is_some())?;
        Some(match core.links.why_not(&info) {
            None => Carrier::SharedMemory,
            Some(why) => Carrier::Udp(why.to_string()),
        })
    }

    /// Why it went to Error on its own, if it did since it was made or reset.
    pub fn error(&self) -> Option<Status> {
        self.engine().lock().qp_errors.get(&self.0.qpn).copied()
    }
}

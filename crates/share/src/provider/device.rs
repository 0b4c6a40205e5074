//! The device of a node, and its protection domains.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_memory::shared_file;
use rdmux_rnic::{Counters, Memory, QpType, RegionSpec, RegisterError};
use rdmux_verbs::provider::{self, deadline_after};
use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{
    AsyncEvent, ConnectError, ConnectPair, ConnectParams, CreateError, DeviceModeration, EventQueue,
    Features, Limits, ListenError, Options, QpOptions, Reach,
};
use rdmux_wire::cm::ServiceId;
use rdmux_wire::node::control::{Kind, Message};
use rdmux_wire::roce::PathMtu;

use super::client::{AttachError, Attached, Client, no_answer};
use super::cm::{Connecting, Listener};
use super::cq::CompletionQueue;
use super::qp::QueuePair;
use super::region::MemoryRegion;
use super::srq::SharedReceiveQueue;
use crate::control::convert::{counters_of, create_error};

/// Variable of the environment for [`Options::replay_writes`].
pub(super) const REPLAY_WRITE: &str = "RDMUX_REPLAY_WRITE";

#[derive(Debug)]
struct Inner {
    attached: Attached,
    moderation: Arc<DeviceModeration>,
    waiting: Option<WaitMode>,
    replays_writes: bool,
}

/// The device of a node. Each object of it holds a clone.
#[derive(Clone, Debug)]
pub(super) struct Device(Arc<Inner>);

impl Device {
    pub(super) fn open(address: IpAddr, options: &Options) -> Result<Device, AttachError> {
        Ok(Device(Arc::new(Inner {
            attached: Attached::open(address)?,
            moderation: Arc::new(DeviceModeration::new(options.moderation.unwrap_or_default())),
            waiting: options.waiting.or_else(WaitMode::of_environment),
            replays_writes: options
                .replay_writes
                .unwrap_or_else(|| std::env::var_os(REPLAY_WRITE).is_some_and(|value| value == "1")),
        })))
    }

    pub(super) fn client(&self) -> &Client {
        &self.0.attached.client
    }

    /// Returns whether a WRITE may take effect twice after a failure of the node's queue pair.
    pub(super) fn replays_writes(&self) -> bool {
        self.0.replays_writes
    }

    pub(super) fn waiting(&self) -> Option<WaitMode> {
        self.0.waiting
    }

    fn create_cq_with(
        &self,
        depth: u32,
        vector: u32,
        chosen: Option<(&EventQueue, u64)>,
    ) -> Result<Box<dyn provider::CompletionQueue>, CreateError> {
        Ok(Box::new(CompletionQueue::new(self, depth, vector, chosen)?))
    }
}

impl provider::Device for Device {
    fn limits(&self) -> Limits {
        self.client().welcome.limits
    }

    fn features(&self) -> Features {
        self.client().welcome.features
    }

    fn moderation(&self) -> Arc<DeviceModeration> {
        self.0.moderation.clone()
    }

    fn reach(&self, memory: &dyn Memory) -> Reach {
        match shared_file(memory) {
            Some(_) => Reach::Direct,
            None => Reach::Processor,
        }
    }

    fn alloc_pd(&self) -> Result<Box<dyn provider::ProtectionDomain>, CreateError> {
        let answer = self.client().request(&Message::AllocPd {});
        match answer.map_err(|refusal| create_error(&refusal))? {
            Message::Made { id } => Ok(Box::new(ProtectionDomain {
                device: self.clone(),
                id,
            })),
            _ => Err(no_answer().into()),
        }
    }

    fn completion_vectors(&self) -> u32 {
        self.client().welcome.vectors
    }

    fn create_cq(&self, depth: u32, vector: u32) -> Result<Box<dyn provider::CompletionQueue>, CreateError> {
        self.create_cq_with(depth, vector, None)
    }

    fn create_cq_reporting(
        &self,
        depth: u32,
        vector: u32,
        events: &EventQueue,
        token: u64,
    ) -> Result<Box<dyn provider::CompletionQueue>, CreateError> {
        self.create_cq_with(depth, vector, Some((events, token)))
    }

    fn listen(
        &self,
        service: ServiceId,
        qp_types: &[QpType],
    ) -> Result<Box<dyn provider::Listener>, ListenError> {
        Ok(Box::new(Listener::new(self, service, qp_types)?))
    }

    fn start_connect(
        &self,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Box<dyn provider::Connecting>, ConnectError> {
        Ok(Box::new(Connecting::start(
            self,
            pair,
            peer,
            params,
            private_data,
        )?))
    }

    fn progress(&self) {
        self.client().rings.poll(self.client());
    }

    fn path_mtu_to(&self, peer: IpAddr) -> io::Result<PathMtu> {
        match self.client().request(&Message::AskMtu { peer }) {
            Ok(Message::Mtu { mtu }) => Ok(mtu),
            Ok(_) => Err(no_answer()),
            Err(refusal) => Err(refusal.to_io()),
        }
    }

    fn active_mtu(&self) -> PathMtu {
        self.client().welcome.active_mtu
    }

    fn counters(&self) -> Counters {
        match self.client().request(&Message::Count {}) {
            Ok(Message::Counts { values }) => counters_of(&values),
            _ => Counters::default(),
        }
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        let client = self.client();
        let take = || client.async_events.lock().take();
        take().or_else(|| {
            client.async_waker.reset_if_woken();
            take()
        })
    }

    fn async_event_fd(&self) -> BorrowedFd<'_> {
        self.client().async_waker.fd().as_fd()
    }

    fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        let client = self.client();
        let deadline = deadline_after(timeout);
        let take = || client.async_events.lock().take_and_pass_on();
        loop {
            if let Some(event) = take() {
                return Some(event);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) || !client.async_waker.wait(left) {
                return take();
            }
        }
    }

    fn is_active(&self) -> bool {
        self.client().is_active.load(Ordering::Relaxed)
    }

    fn object_counts(&self) -> (usize, usize, usize) {
        let client = self.client();
        let (qps, regions) = match client.request(&Message::CountObjects {}) {
            Ok(Message::Objects { qps, regions }) => (qps as usize, regions as usize),
            _ => (client.rings.qp_count(), 0),
        };
        (qps, regions, client.queues.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
pub(super) struct ProtectionDomain {
    pub(super) device: Device,
    pub(super) id: u32,
}

impl provider::ProtectionDomain for ProtectionDomain {
    fn create_qp(&self, options: &QpOptions) -> Result<Box<dyn provider::QueuePair>, CreateError> {
        Ok(Box::new(QueuePair::new(self, options)?))
    }

    fn create_srq(
        &self,
        max_wr: u32,
        xrc: Option<(&rdmux_verbs::XrcDomain, &rdmux_verbs::CompletionQueue)>,
    ) -> Result<Box<dyn provider::SharedReceiveQueue>, CreateError> {
        match xrc {
            None => Ok(Box::new(SharedReceiveQueue::new(self, max_wr)?)),
            Some(_) => Err(CreateError::Io(io::ErrorKind::Unsupported.into())),
        }
    }

    fn reg_mr(&self, spec: RegionSpec) -> Result<Box<dyn provider::MemoryRegion>, RegisterError> {
        Ok(Box::new(MemoryRegion::new(self, &spec)?))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        self.device.client().destroy(Kind::Pd, self.id);
    }
}

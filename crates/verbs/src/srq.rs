//! Shared receive queues and XRC domains. Each ends when it is dropped.

use std::any::Any;
use std::sync::Arc;

use rdmux_rnic::{PostError, RecvRequest, SrqError, SrqInfo, Srqn};

use crate::device::{CompletionQueue, CreateError, Device, ProtectionDomain};
use crate::provider::{self, Provided};

#[derive(Debug)]
struct SrqInner {
    provided: Box<dyn provider::SharedReceiveQueue>,
    pd: ProtectionDomain,
    /// Keeps alive the objects that an XRC queue uses.
    _xrc: Option<(XrcDomain, CompletionQueue)>,
}

/// Shared receive queue: receives for many queue pairs. IBTA Vol 1, 10.2.9.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue(Arc<SrqInner>);

impl Provided for SharedReceiveQueue {
    fn object(&self) -> &dyn Any {
        &*self.0.provided
    }
}

impl ProtectionDomain {
    /// Makes a shared receive queue for up to `max_wr` receives.
    pub fn create_srq(&self, max_wr: u32) -> Result<SharedReceiveQueue, CreateError> {
        self.make_srq(max_wr, None)
    }

    /// Makes a shared receive queue that peers name on XRC; its completions go to `cq`.
    pub fn create_xrc_srq(
        &self,
        max_wr: u32,
        xrcd: &XrcDomain,
        cq: &CompletionQueue,
    ) -> Result<SharedReceiveQueue, CreateError> {
        self.make_srq(max_wr, Some((xrcd.clone(), cq.clone())))
    }

    fn make_srq(
        &self,
        max_wr: u32,
        xrc: Option<(XrcDomain, CompletionQueue)>,
    ) -> Result<SharedReceiveQueue, CreateError> {
        let is_ours = |(xrcd, cq): &(XrcDomain, CompletionQueue)| {
            xrcd.device().is(self.device()) && cq.device().is(self.device())
        };
        if !xrc.as_ref().is_none_or(is_ours) {
            return Err(CreateError::OtherDevice);
        }
        // Its completions are those of queue pairs of other processes' choice, which no share counts.
        if xrc.as_ref().is_some_and(|(_, cq)| cq.is_pooled()) {
            return Err(CreateError::NoShare);
        }
        let provided = self
            .provided()
            .create_srq(max_wr, xrc.as_ref().map(|(xrcd, cq)| (xrcd, cq)))?;
        Ok(SharedReceiveQueue(Arc::new(SrqInner {
            provided,
            pd: self.clone(),
            _xrc: xrc,
        })))
    }
}

impl SharedReceiveQueue {
    pub(crate) fn device(&self) -> &Device {
        self.0.pd.device()
    }

    /// Returns its number, by which XRC peers name it.
    pub fn srqn(&self) -> Srqn {
        self.0.provided.srqn()
    }

    /// Posts a receive request.
    pub fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        self.0.provided.post_recv(request)
    }

    /// Resizes it, or arms its limit: when fewer receives are left, the device raises [`AsyncEvent::SrqLimitReached`] once. 0
    /// disarms.
    ///
    /// [`AsyncEvent::SrqLimitReached`]: crate::AsyncEvent::SrqLimitReached
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        self.0.provided.modify(max_wr, limit)
    }

    /// Returns what is known about it.
    pub fn query(&self) -> Option<SrqInfo> {
        self.0.provided.query()
    }
}

#[derive(Debug)]
struct XrcdInner {
    provided: Box<dyn provider::XrcDomain>,
    device: Device,
}

/// XRC domain: target queue pairs reach the shared receive queues of their own domain only. IBTA Vol 1, A14.
#[derive(Clone, Debug)]
pub struct XrcDomain(Arc<XrcdInner>);

impl Provided for XrcDomain {
    fn object(&self) -> &dyn Any {
        &*self.0.provided
    }
}

impl Device {
    /// Makes an XRC domain.
    pub fn alloc_xrcd(&self) -> Result<XrcDomain, CreateError> {
        let provided = self.provided().alloc_xrcd()?;
        let device = self.clone();
        Ok(XrcDomain(Arc::new(XrcdInner { provided, device })))
    }
}

impl XrcDomain {
    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }
}

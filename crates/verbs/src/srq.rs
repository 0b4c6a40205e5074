//! Shared receive queues and XRC domains. Each ends when it is dropped.

use std::sync::Arc;

use rdmux_rnic::{PostError, RecvRequest, SrqError, SrqInfo, Srqn};

use crate::device::{CompletionQueue, CreateError, Device, ProtectionDomain};
use crate::hw;
use crate::provider::Provided;
use crate::soft;

#[derive(Debug)]
struct SrqInner {
    provided: Provided<soft::srq::SharedReceiveQueue, hw::srq::SharedReceiveQueue>,
    pd: ProtectionDomain,
    /// Keeps alive the objects that an XRC queue uses.
    _xrc: Option<(XrcDomain, CompletionQueue)>,
}

/// Shared receive queue: receives for many queue pairs. IBTA Vol 1, 10.2.9.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue(Arc<SrqInner>);

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
        let provided = match self.provided() {
            Provided::Soft(pd) => {
                let number = |(xrcd, cq): &(XrcDomain, CompletionQueue)| {
                    Some((xrcd.soft()?.number(), cq.soft()?.cqn()))
                };
                Provided::Soft(pd.create_srq(max_wr, xrc.as_ref().and_then(number))?)
            }
            Provided::Hw(pd) => {
                let object = |(xrcd, cq): &'_ (XrcDomain, CompletionQueue)| {
                    Some((xrcd.hw()?.clone(), cq.hw()?.clone()))
                };
                Provided::Hw(pd.create_srq(max_wr, xrc.as_ref().and_then(object))?)
            }
        };
        Ok(SharedReceiveQueue(Arc::new(SrqInner {
            provided,
            pd: self.clone(),
            _xrc: xrc,
        })))
    }
}

impl SharedReceiveQueue {
    pub(crate) fn hw(&self) -> Option<&hw::srq::SharedReceiveQueue> {
        self.0.provided.hw()
    }

    pub(crate) fn device(&self) -> &Device {
        self.0.pd.device()
    }

    /// Returns its number, by which XRC peers name it.
    pub fn srqn(&self) -> Srqn {
        match &self.0.provided {
            Provided::Soft(srq) => srq.srqn(),
            Provided::Hw(srq) => srq.srqn(),
        }
    }

    /// Posts a receive request.
    pub fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        match &self.0.provided {
            Provided::Soft(srq) => srq.post_recv(request),
            Provided::Hw(srq) => srq.post_recv(request),
        }
    }

    /// Resizes it, or arms its limit: when fewer receives are left, the device raises [`AsyncEvent::SrqLimitReached`] once. 0
    /// disarms.
    ///
    /// [`AsyncEvent::SrqLimitReached`]: crate::AsyncEvent::SrqLimitReached
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        match &self.0.provided {
            Provided::Soft(srq) => srq.modify(max_wr, limit),
            Provided::Hw(srq) => srq.modify(max_wr, limit),
        }
    }

    /// Returns what is known about it.
    pub fn query(&self) -> Option<SrqInfo> {
        match &self.0.provided {
            Provided::Soft(srq) => srq.query(),
            Provided::Hw(srq) => srq.query(),
        }
    }
}

#[derive(Debug)]
struct XrcdInner {
    provided: Provided<soft::srq::XrcDomain, hw::device::XrcDomain>,
    device: Device,
}

/// XRC domain: target queue pairs reach the shared receive queues of their own domain only. IBTA Vol 1, A14.
#[derive(Clone, Debug)]
pub struct XrcDomain(Arc<XrcdInner>);

impl Device {
    /// Makes an XRC domain.
    pub fn alloc_xrcd(&self) -> Result<XrcDomain, CreateError> {
        let provided = match &self.provided {
            Provided::Soft(device) => Provided::Soft(device.alloc_xrcd()),
            Provided::Hw(device) => Provided::Hw(device.alloc_xrcd()?),
        };
        let device = self.clone();
        Ok(XrcDomain(Arc::new(XrcdInner { provided, device })))
    }
}

impl XrcDomain {
    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn soft(&self) -> Option<&soft::srq::XrcDomain> {
        self.0.provided.soft()
    }

    pub(crate) fn hw(&self) -> Option<&hw::device::XrcDomain> {
        self.0.provided.hw()
    }
}

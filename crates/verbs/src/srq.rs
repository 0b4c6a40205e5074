//! Shared receive queues and XRC domains. Each ends when it is dropped.

use std::sync::Arc;

use rdmux_rnic::{NotPosted, PostError, ReceiveQueue, RecvRequest, SrqError, SrqInfo, SrqInit, Srqn, Xrcd};

use crate::device::{CompletionQueue, CreateError, Device, ProtectionDomain};

#[derive(Debug)]
struct SrqInner {
    pd: ProtectionDomain,
    srqn: Srqn,
    receives: ReceiveQueue,
    /// What an XRC queue uses lives as long as it does.
    _xrc: Option<(XrcDomain, CompletionQueue)>,
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        // Its QPs hold it, so that none is left.
        let _ = self.pd.device().engine().lock().rnic.destroy_srq(self.srqn);
    }
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
        let init = SrqInit {
            pd: self.number(),
            max_wr,
            xrc: xrc.as_ref().map(|(xrcd, cq)| (xrcd.number(), cq.cqn())),
        };
        let mut core = self.device().engine().lock();
        let srqn = core.rnic.create_srq(init).ok_or(CreateError::NoRoom)?;
        let receives = core.rnic.srq_receives(srqn).ok_or(CreateError::NoRoom)?;
        drop(core);
        Ok(SharedReceiveQueue(Arc::new(SrqInner {
            pd: self.clone(),
            srqn,
            receives,
            _xrc: xrc,
        })))
    }
}

impl SharedReceiveQueue {
    pub(crate) fn device(&self) -> &Device {
        self.0.pd.device()
    }

    /// Its number: what XRC peers name it by.
    pub fn srqn(&self) -> Srqn {
        self.0.srqn
    }

    /// Posts a receive request.
    pub fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        self.0.receives.post(request).map_err(|why| match why {
            NotPosted::Refused(error) => error,
            // It is closed when it ends, and never before.
            NotPosted::Undecided(_) => PostError::NoSrq,
        })
    }

    /// Resizes it, or arms its limit: when fewer receives are left, [`AsyncEvent::SrqLimitReached`] tells once. 0 disarms.
    ///
    /// [`AsyncEvent::SrqLimitReached`]: crate::AsyncEvent::SrqLimitReached
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let mut core = self.0.pd.device().engine().lock();
        core.rnic.modify_srq(self.0.srqn, max_wr, limit)
    }

    /// What is known about it.
    pub fn query(&self) -> Option<SrqInfo> {
        self.0.pd.device().engine().lock().rnic.query_srq(self.0.srqn)
    }
}

#[derive(Debug)]
struct XrcdInner {
    device: Device,
    xrcd: Xrcd,
}

impl Drop for XrcdInner {
    fn drop(&mut self) {
        self.device.engine().lock().rnic.dealloc_xrcd(self.xrcd);
    }
}

/// XRC domain: target queue pairs reach the shared receive queues of their own domain only. IBTA Vol 1, A14.
#[derive(Clone, Debug)]
pub struct XrcDomain(Arc<XrcdInner>);

impl Device {
    /// Makes an XRC domain.
    pub fn alloc_xrcd(&self) -> XrcDomain {
        let xrcd = self.engine().lock().rnic.alloc_xrcd();
        XrcDomain(Arc::new(XrcdInner {
            device: self.clone(),
            xrcd,
        }))
    }
}

impl XrcDomain {
    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn number(&self) -> Xrcd {
        self.0.xrcd
    }
}

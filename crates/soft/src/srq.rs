//! Shared receive queues and XRC domains of a soft device.

use rdmux_rnic::{NotPosted, PostError, ReceiveQueue, RecvRequest, SrqError, SrqInfo, SrqInit, Srqn, Xrcd};
use rdmux_verbs::CreateError;
use rdmux_verbs::provider::{self, CompletionQueue as _, Object, own};

use super::device::{CompletionQueue, Device, ProtectionDomain};

#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    device: Device,
    srqn: Srqn,
    receives: ReceiveQueue,
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // Queue pairs hold their shared receive queue, so none of them is left.
        let mut core = self.device.lock();
        let _ = core.rnic.destroy_srq(self.srqn);
        core.async_events.forget(Object::Srq(self.srqn));
    }
}

impl SharedReceiveQueue {
    /// Makes a shared receive queue; for XRC with its domain and the queue for its completions.
    pub(super) fn new(
        pd: &ProtectionDomain,
        max_wr: u32,
        xrc: Option<(&rdmux_verbs::XrcDomain, &rdmux_verbs::CompletionQueue)>,
    ) -> Result<SharedReceiveQueue, CreateError> {
        let number = |(xrcd, cq)| {
            let cqn = own::<CompletionQueue>(cq).map(|cq| cq.cqn());
            own::<XrcDomain>(xrcd).map(XrcDomain::number).zip(cqn)
        };
        let xrc = match xrc {
            Some(xrc) => Some(number(xrc).ok_or(CreateError::OtherDevice)?),
            None => None,
        };
        let mut core = pd.device.lock();
        let srqn = core.rnic.create_srq(SrqInit {
            pd: pd.pd,
            max_wr,
            xrc,
        });
        let srqn = srqn.ok_or(CreateError::NoRoom)?;
        let receives = core.rnic.srq_receives(srqn).ok_or(CreateError::NoRoom)?;
        drop(core);
        Ok(SharedReceiveQueue {
            device: pd.device.clone(),
            srqn,
            receives,
        })
    }
}

impl provider::SharedReceiveQueue for SharedReceiveQueue {
    fn srqn(&self) -> Srqn {
        self.srqn
    }

    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        self.receives.post(request).map_err(|why| match why {
            NotPosted::Refused(error) => error,
            // The queue is closed when it is destroyed, and never before.
            NotPosted::Undecided(_) => PostError::NoSrq,
        })
    }

    fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        self.device.lock().rnic.modify_srq(self.srqn, max_wr, limit)
    }

    fn query(&self) -> Option<SrqInfo> {
        self.device.lock().rnic.query_srq(self.srqn)
    }
}

#[derive(Debug)]
pub(crate) struct XrcDomain {
    device: Device,
    xrcd: Xrcd,
}

impl Drop for XrcDomain {
    fn drop(&mut self) {
        self.device.lock().rnic.dealloc_xrcd(self.xrcd);
    }
}

impl provider::XrcDomain for XrcDomain {}

impl XrcDomain {
    pub(super) fn new(device: &Device) -> XrcDomain {
        let xrcd = device.lock().rnic.alloc_xrcd();
        let device = device.clone();
        XrcDomain { device, xrcd }
    }

    pub(crate) fn number(&self) -> Xrcd {
        self.xrcd
    }
}

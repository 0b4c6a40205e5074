//! Shared receive queues and XRC domains of a soft device.

use rdmux_rnic::{
    Cqn, NotPosted, PostError, ReceiveQueue, RecvRequest, SrqError, SrqInfo, SrqInit, Srqn, Xrcd,
};

use super::device::{Device, ProtectionDomain};
use crate::device::CreateError;
use crate::event::Object;

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

impl ProtectionDomain {
    pub(crate) fn create_srq(
        &self,
        max_wr: u32,
        xrc: Option<(Xrcd, Cqn)>,
    ) -> Result<SharedReceiveQueue, CreateError> {
        let pd = self.pd;
        let mut core = self.device.lock();
        let srqn = core.rnic.create_srq(SrqInit { pd, max_wr, xrc });
        let srqn = srqn.ok_or(CreateError::NoRoom)?;
        let receives = core.rnic.srq_receives(srqn).ok_or(CreateError::NoRoom)?;
        drop(core);
        Ok(SharedReceiveQueue {
            device: self.device.clone(),
            srqn,
            receives,
        })
    }
}

impl SharedReceiveQueue {
    pub(crate) fn srqn(&self) -> Srqn {
        self.srqn
    }

    pub(crate) fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        self.receives.post(request).map_err(|why| match why {
            NotPosted::Refused(error) => error,
            // The queue is closed when it is destroyed, and never before.
            NotPosted::Undecided(_) => PostError::NoSrq,
        })
    }

    pub(crate) fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        self.device.lock().rnic.modify_srq(self.srqn, max_wr, limit)
    }

    pub(crate) fn query(&self) -> Option<SrqInfo> {
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

impl Device {
    pub(crate) fn alloc_xrcd(&self) -> XrcDomain {
        let xrcd = self.lock().rnic.alloc_xrcd();
        let device = self.clone();
        XrcDomain { device, xrcd }
    }
}

impl XrcDomain {
    pub(crate) fn number(&self) -> Xrcd {
        self.xrcd
    }
}

//! Shared receive queues.

use std::sync::Arc;

use rdmux_rnic::{PostError, RecvRequest, SGE_MAX, SrqError, SrqInfo, Srqn};
use rustix::io::Errno;

use super::cq::CompletionQueue;
use super::device::{ProtectionDomain, XrcDomain};
use super::objects::Srq;
use crate::device::CreateError;
use crate::features::Features;

/// Shared receive queue.
#[derive(Clone, Debug)]
pub(crate) struct SharedReceiveQueue(Arc<Srq>);

impl ProtectionDomain {
    /// Makes a shared receive queue for up to `max_wr` receives; for XRC with its domain and the queue for its completions.
    pub(crate) fn create_srq(
        &self,
        max_wr: u32,
        xrc: Option<(XrcDomain, CompletionQueue)>,
    ) -> Result<SharedReceiveQueue, CreateError> {
        let device = self.device();
        let feature = if xrc.is_some() {
            Features::XRC
        } else {
            Features::SRQ
        };
        if !device.features().contains(feature) {
            return Err(CreateError::Io(device.lacks(feature).into()));
        }
        let xrc = xrc.map(|(xrcd, cq)| (xrcd.object().clone(), cq.object().clone()));
        let sges = u32::try_from(device.0.attr.orig_attr.max_srq_sge)
            .unwrap_or(1)
            .clamp(1, SGE_MAX as u32);
        let srq = Srq::new(self.object(), max_wr.max(1), sges, device.next_number(), xrc);
        let srq = srq.map_err(|error| match error {
            Errno::INVAL => CreateError::NoRoom,
            other => device.create_error(other, feature),
        })?;
        Ok(SharedReceiveQueue(Arc::new(srq)))
    }
}

impl SharedReceiveQueue {
    pub(super) fn object(&self) -> &Arc<Srq> {
        &self.0
    }

    /// Returns its number: for XRC the one by which peers name it; else the one by which events name it.
    pub(crate) fn srqn(&self) -> Srqn {
        Srqn(self.0.number())
    }

    /// Posts a receive request.
    pub(crate) fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        request.check()?;
        if request.sges.as_slice().len() > self.0.max_sge() {
            return Err(PostError::TooManySges);
        }
        self.0
            .post_recv(request.wr_id, &request.sges)
            .map_err(|error| match error {
                Errno::NOMEM | Errno::AGAIN => PostError::QueueFull,
                Errno::INVAL => PostError::Invalid,
                other => PostError::Refused(other.raw_os_error()),
            })
    }

    /// Resizes it, or arms its limit.
    pub(crate) fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let refused = |error: Errno| SrqError::Refused(error.raw_os_error());
        self.0.modify(max_wr, limit).map_err(refused)
    }

    /// Returns what is known about it. Devices do not report how many receives are posted.
    pub(crate) fn query(&self) -> Option<SrqInfo> {
        let attr = self.0.query().ok()?;
        Some(SrqInfo {
            max_wr: attr.max_wr,
            posted: 0,
            limit: (attr.srq_limit > 0).then_some(attr.srq_limit),
        })
    }
}

//! Shared receive queues.

use std::sync::Arc;

use rdmux_rnic::{PostError, RecvRequest, SGE_MAX, SrqError, SrqInfo, Srqn};
use rdmux_verbs::provider::{self, own};
use rdmux_verbs::{CreateError, Features};
use rustix::io::Errno;

use super::cq::CompletionQueue;
use super::device::{ProtectionDomain, XrcDomain};
use super::objects::Srq;

/// Shared receive queue.
#[derive(Clone, Debug)]
pub(crate) struct SharedReceiveQueue(Arc<Srq>);

impl SharedReceiveQueue {
    /// Makes a shared receive queue; for XRC with its domain and the queue for its completions.
    pub(super) fn new(
        pd: &ProtectionDomain,
        max_wr: u32,
        xrc: Option<(&rdmux_verbs::XrcDomain, &rdmux_verbs::CompletionQueue)>,
    ) -> Result<SharedReceiveQueue, CreateError> {
        let device = pd.device();
        let feature = if xrc.is_some() {
            Features::XRC
        } else {
            Features::SRQ
        };
        if !device.features().contains(feature) {
            return Err(CreateError::Io(device.lacks(feature).into()));
        }
        let object = |(xrcd, cq)| {
            let cq = own::<CompletionQueue>(cq)?.object().clone();
            Some((own::<XrcDomain>(xrcd)?.object().clone(), cq))
        };
        let xrc = match xrc {
            Some(xrc) => Some(object(xrc).ok_or(CreateError::OtherDevice)?),
            None => None,
        };
        let sges = u32::try_from(device.0.attr.orig_attr.max_srq_sge)
            .unwrap_or(1)
            .clamp(1, SGE_MAX as u32);
        let srq = Srq::new(pd.object(), max_wr.max(1), sges, device.next_number(), xrc);
        let srq = srq.map_err(|error| match error {
            Errno::INVAL => CreateError::NoRoom,
            other => device.create_error(other, feature),
        })?;
        Ok(SharedReceiveQueue(Arc::new(srq)))
    }

    pub(super) fn object(&self) -> &Arc<Srq> {
        &self.0
    }
}

impl provider::SharedReceiveQueue for SharedReceiveQueue {
    /// Returns its number: for XRC the one by which peers name it; else the one by which events name it.
    fn srqn(&self) -> Srqn {
        Srqn(self.0.number())
    }

    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
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

    fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let refused = |error: Errno| SrqError::Refused(error.raw_os_error());
        self.0.modify(max_wr, limit).map_err(refused)
    }

    /// Returns what is known about it. Devices do not report how many receives are posted.
    fn query(&self) -> Option<SrqInfo> {
        let attr = self.0.query().ok()?;
        Some(SrqInfo {
            max_wr: attr.max_wr,
            posted: 0,
            limit: (attr.srq_limit > 0).then_some(attr.srq_limit),
        })
    }
}

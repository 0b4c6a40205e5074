//! Receives that the connections of a listener share.

use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, Fault, Memory, MemoryRegion, PostError, ProtectionDomain, RecvRequest, SharedReceiveQueue,
};

use crate::connection::EstablishError;
use crate::work_id::WorkId;

/// A shared receive queue, and a buffer for each of its receives. A receive is posted again as soon as its message is copied. The buffers have a
/// protection domain of their own: no queue pair of a connection reaches them otherwise.
#[derive(Clone, Debug)]
pub(crate) struct SharedReceives(Arc<Inner>);

// The fields are in the order in which they must be dropped.
#[derive(Debug)]
struct Inner {
    srq: SharedReceiveQueue,
    mr: MemoryRegion,
    buffers: Arc<AnonymousMemory>,
    message_bytes: usize,
}

impl SharedReceives {
    /// Posts `count` receives for messages of up to `message_bytes`.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        count: usize,
        message_bytes: usize,
    ) -> Result<SharedReceives, EstablishError> {
        let srq = pd.create_srq(count as u32)?;
        let buffers = Arc::new(AnonymousMemory::new(count * message_bytes)?);
        let mr = pd.reg_mr_all(buffers.clone(), 0, Access::LOCAL_WRITE)?;
        let receives = SharedReceives(Arc::new(Inner {
            srq,
            mr,
            buffers,
            message_bytes,
        }));
        (0..count as u32).try_for_each(|index| receives.post(index))?;
        Ok(receives)
    }

    pub(crate) fn srq(&self) -> &SharedReceiveQueue {
        &self.0.srq
    }

    fn at(&self, index: u32) -> u64 {
        u64::from(index) * self.0.message_bytes as u64
    }

    /// Returns the message of a receive that is done, and posts the receive again.
    pub(crate) fn take(&self, index: u32, bytes: usize) -> Result<Vec<u8>, Fault> {
        let mut message = vec![0; bytes.min(self.0.message_bytes)];
        let read = self.0.buffers.read(self.at(index), &mut message);
        self.post_again(index);
        read.map(|()| message)
    }

    /// Posts a receive again that is done, and whose message nobody wants.
    pub(crate) fn post_again(&self, index: u32) {
        // The queue has a place for each receive. It refuses one only when its device is lost, as its connections are then.
        let _ = self.post(index);
    }

    fn post(&self, index: u32) -> Result<(), PostError> {
        let sges = self.0.mr.sge(self.at(index), self.0.message_bytes as u32).into();
        let wr_id = WorkId::Receive(index).into();
        self.0.srq.post_recv(RecvRequest { wr_id, sges })
    }
}

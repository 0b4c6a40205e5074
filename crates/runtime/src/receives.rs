//! The receives of messages, and those that connections share.

use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::ledger::{Class, Ledger};
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{Access, Device, Fault, Memory, MemoryRegion, PostError, RecvRequest, SharedReceiveQueue};

use crate::connection::{EstablishError, Sizes};
use crate::work_id::WorkId;

/// Returns the request for a receive into the buffer with an index, of the first buffers of a region.
pub(crate) fn receive_request(buffers: &MemoryRegion, message_bytes: usize, index: u32) -> RecvRequest {
    let at = u64::from(index) * message_bytes as u64;
    RecvRequest {
        wr_id: WorkId::Receive(index).into(),
        sges: buffers.sge(at, message_bytes as u32).into(),
    }
}

/// Returns the message that a receive has taken, in `bytes`, whatever these were.
pub(crate) fn message_of(
    buffers: &AnonymousMemory,
    message_bytes: usize,
    index: u32,
    byte_len: u32,
    mut bytes: Vec<u8>,
) -> Result<Vec<u8>, Fault> {
    bytes.resize((byte_len as usize).min(message_bytes), 0);
    buffers.read(u64::from(index) * message_bytes as u64, &mut bytes)?;
    Ok(bytes)
}

/// The shared receive queue of a listener's connections, and the buffers of its receives.
///
/// A message takes a receive with its first packet. A peer that never sends the last one keeps it, so each connection adds one receive to
/// those that all have in common: such peers keep nothing that the others need.
// The fields are in the order in which they must be dropped.
#[derive(Debug)]
pub(crate) struct SharedReceives {
    queue: SharedReceiveQueue,
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
    message_bytes: usize,
    stock: Mutex<Stock>,
}

#[derive(Debug)]
struct Stock {
    /// Buffers without a receive.
    idle: Vec<u32>,
    posted: usize,
    /// Receives that are to be posted.
    wanted: usize,
}

impl SharedReceives {
    /// Makes a queue with `common` receives, and one more for each of up to `connections` connections.
    pub(crate) fn new(
        device: &Device,
        sizes: &Sizes,
        common: usize,
        connections: usize,
        ledger: Option<&Arc<Ledger>>,
    ) -> Result<Arc<SharedReceives>, EstablishError> {
        // The connections have protection domains of their own; the queue's is for its buffers alone.
        let pd = device.alloc_pd()?;
        let most = common + connections;
        let queue = pd.create_srq(most as u32)?;
        let memory = Arc::new(AnonymousMemory::new(most * sizes.message_bytes)?);
        let booked = device.booked(memory.clone(), ledger, Class::Command);
        let mr = pd.reg_mr_all(booked, 0, Access::LOCAL_WRITE)?;
        let receives = SharedReceives {
            queue,
            mr,
            memory,
            message_bytes: sizes.message_bytes,
            stock: Mutex::new(Stock {
                idle: (0..most as u32).rev().collect(),
                posted: 0,
                wanted: common,
            }),
        };
        receives.post(&mut receives.stock.lock())?;
        Ok(Arc::new(receives))
    }

    fn post(&self, stock: &mut Stock) -> Result<(), PostError> {
        while stock.posted < stock.wanted
            && let Some(index) = stock.idle.last()
        {
            let request = receive_request(&self.mr, self.message_bytes, *index);
            self.queue.post_recv(request)?;
            stock.idle.pop();
            stock.posted += 1;
        }
        Ok(())
    }

    /// Posts the receive of a completion again. Every completion of a receive must come here once.
    pub(crate) fn repost(&self, index: u32) {
        let mut stock = self.stock.lock();
        stock.posted -= 1;
        stock.idle.push(index);
        // The queue has room for all of them, and takes requests as long as it exists.
        let _ = self.post(&mut stock);
    }

    #[cfg(test)]
    pub(crate) fn posted(&self) -> usize {
        self.queue.query().map_or(0, |queue| queue.posted)
    }
}

/// A connection's share of the receives.
#[derive(Debug)]
pub(crate) struct ReceiveShare(Arc<SharedReceives>);

impl ReceiveShare {
    pub(crate) fn new(receives: &Arc<SharedReceives>) -> Result<ReceiveShare, PostError> {
        let share = ReceiveShare(receives.clone());
        let mut stock = receives.stock.lock();
        stock.wanted += 1;
        receives.post(&mut stock)?;
        drop(stock);
        Ok(share)
    }

    pub(crate) fn queue(&self) -> &SharedReceiveQueue {
        &self.0.queue
    }

    /// Takes the message of a receive, which is posted again.
    pub(crate) fn take(&self, index: u32, byte_len: u32, bytes: Vec<u8>) -> Result<Vec<u8>, Fault> {
        let message = message_of(&self.0.memory, self.0.message_bytes, index, byte_len, bytes);
        self.0.repost(index);
        message
    }
}

impl Drop for ReceiveShare {
    fn drop(&mut self) {
        self.0.stock.lock().wanted -= 1;
    }
}

//! Memory of drives that the connections of a port reach.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdmux_drive::Pool;
use rdmux_verbs::ledger::Class;
use rdmux_verbs::{Access, MemoryRegion, Sge};

use crate::backend::peer::PeerData;
use crate::slab::Slab;

/// Longest wait of a command for room in a drive's memory, before it fails for now.
pub(super) const ROOM_WAIT: Duration = Duration::from_secs(2);
/// Time between two looks for room, which other reactors make as well.
pub(super) const ROOM_LOOK: Duration = Duration::from_millis(2);

/// Regions over the buffers of drives, in the protection domain of a slab: each is registered once, whatever the number of its commands.
#[derive(Debug, Default)]
pub(super) struct Regions(HashMap<usize, Region>);

#[derive(Debug)]
struct Region {
    /// While this is here, no other pool has its address.
    pool: Weak<Pool>,
    /// `None`: the device does not reach the memory.
    mr: Option<MemoryRegion>,
}

impl Regions {
    /// Returns true if the device reaches the buffers of a pool, which are registered if they are not.
    pub(super) fn reach(&mut self, slab: &Slab, pool: &Arc<Pool>) -> bool {
        let key = Arc::as_ptr(pool).addr();
        if !self.0.contains_key(&key) {
            self.forget_gone();
            let (memory, base) = pool.memory();
            // Hosts reach nothing of it.
            let memory = slab
                .pd()
                .device()
                .booked(memory.clone(), slab.ledger(), Class::Data);
            let mr = slab
                .pd()
                .reg_mr(memory, base, pool.bytes(), 0, Access::LOCAL_WRITE);
            let region = Region {
                pool: Arc::downgrade(pool),
                mr: mr.ok(),
            };
            self.0.insert(key, region);
        }
        self.0.get(&key).is_some_and(|region| region.mr.is_some())
    }

    /// Returns a piece of a registered pool, for a request.
    pub(super) fn sge(&self, data: &PeerData, length: u32) -> Option<Sge> {
        let (pool, at) = data.place()?;
        let region = self.0.get(&Arc::as_ptr(pool).addr())?;
        Some(region.mr.as_ref()?.sge(at, length))
    }

    /// Gives up the regions of drives that are no more.
    pub(super) fn forget_gone(&mut self) {
        self.0.retain(|_, region| region.pool.strong_count() > 0);
    }
}

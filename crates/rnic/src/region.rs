//! Protection domains and memory regions. IBTA Vol 1, 10.6.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use rand_core::RngCore;
use rdmux_wire::{LKey, RKey};

use crate::memory::{Access, Memory};

/// Handle of a protection domain of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pd(pub u32);

/// Why a region was not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The range lies outside of the memory, or wraps around the address space.
    #[error("the region lies outside of its memory")]
    OutOfRange,
    /// Flush rights were asked for that this memory cannot honour.
    #[error("this memory cannot honour the flush asked for: it keeps nothing over a loss of power")]
    FlushNotSupported,
    /// Remote write rights need local write rights. IBTA Vol 1, 10.6.3.1.
    #[error("remote write needs local write")]
    NeedsLocalWrite,
    /// No such protection domain.
    #[error("no such protection domain")]
    NoPd,
}

/// What to register.
#[derive(Clone, Debug)]
pub struct RegionSpec {
    /// The memory.
    pub memory: Arc<dyn Memory>,
    /// Where in the memory the region begins.
    pub memory_offset: u64,
    /// Bytes.
    pub length: u64,
    /// Address by which work requests and peers name the region's first byte.
    pub iova: u64,
    /// Rights.
    pub access: Access,
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) pd: Pd,
    pub(crate) spec: RegionSpec,
}

impl Region {
    /// Offset in the memory of `length` bytes at `va`, when they lie inside of the region.
    pub(crate) fn offset_of(&self, va: u64, length: u64) -> Option<u64> {
        let at = va.checked_sub(self.spec.iova)?;
        let end = at.checked_add(length)?;
        let limit = self.spec.length + u64::from(mutant!(BoundOffByOne));
        (end <= limit).then(|| self.spec.memory_offset + at)
    }
}

/// Keys are random numbers already: hash by the number itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only numbers are hashed");
    }

    fn write_u32(&mut self, n: u32) {
        // The map takes its buckets from the low bits and its tags from the high ones.
        self.0 = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

pub(crate) type NumberMap<V> = HashMap<u32, V, BuildHasherDefault<NumberHasher>>;

/// All protection domains and regions of a device.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    regions: NumberMap<Region>,
    pds: Vec<bool>,
}

impl Regions {
    pub(crate) fn alloc_pd(&mut self) -> Pd {
        let free = self.pds.iter().position(|used| !used).unwrap_or_else(|| {
            self.pds.push(false);
            self.pds.len() - 1
        });
        self.pds[free] = true;
        Pd(free as u32)
    }

    /// Ends a PD; whatever was registered in it goes with it, and its memory is returned.
    pub(crate) fn dealloc_pd(&mut self, pd: Pd) -> Vec<Arc<dyn Memory>> {
        let gone = self.regions.extract_if(|_, region| region.pd == pd);
        let memories = gone.map(|(_, region)| region.spec.memory).collect();
        if let Some(used) = self.pds.get_mut(pd.0 as usize) {
            *used = false;
        }
        memories
    }

    pub(crate) fn has_pd(&self, pd: Pd) -> bool {
        self.pds.get(pd.0 as usize).copied().unwrap_or(false)
    }

    pub(crate) fn register(
        &mut self,
        rng: &mut impl RngCore,
        pd: Pd,
        spec: RegionSpec,
    ) -> Result<(LKey, RKey), RegisterError> {
        if !self.has_pd(pd) {
            return Err(RegisterError::NoPd);
        }
        let inside = spec
            .memory_offset
            .checked_add(spec.length)
            .is_some_and(|end| end <= spec.memory.len());
        if !inside || spec.iova.checked_add(spec.length).is_none() {
            return Err(RegisterError::OutOfRange);
        }
        if spec.access.contains(Access::REMOTE_WRITE) && !spec.access.contains(Access::LOCAL_WRITE) {
            return Err(RegisterError::NeedsLocalWrite);
        }
        let flushes = spec.access & (Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT);
        if !Access::for_flush(spec.memory.placement()).contains(flushes) {
            return Err(RegisterError::FlushNotSupported);
        }
        // A peer must not guess a key: all 32 bits are random. Key 0 stays free, as peers use it for "none".
        let key = loop {
            let key = rng.next_u32();
            if key != 0 && !self.regions.contains_key(&key) {
                break key;
            }
        };
        self.regions.insert(key, Region { pd, spec });
        Ok((LKey(key), RKey(key)))
    }

    /// After this no access through the key succeeds; those under way were complete when they returned.
    pub(crate) fn deregister(&mut self, lkey: LKey) -> Option<Arc<dyn Memory>> {
        Some(self.regions.remove(&lkey.0)?.spec.memory)
    }

    /// The region of a key, when it belongs to `pd` and grants `access`.
    pub(crate) fn get(&self, key: u32, pd: Pd, access: Access) -> Option<&Region> {
        self.regions
            .get(&key)
            .filter(|r| r.pd == pd && r.spec.access.contains(access))
    }

    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }
}

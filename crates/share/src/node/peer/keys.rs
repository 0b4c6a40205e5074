//! The regions of applications, and the same memory in the protection domain of shared queue pairs.

use std::collections::HashMap;
use std::sync::Arc;

use rdmux_memory::ForeignMemory;
use rdmux_verbs::{Access, LKey, MemoryRegion, ProtectionDomain, RKey, RegionSpec};

use super::RemoteKey;

#[derive(Debug)]
struct Region {
    domain: u64,
    lkey: LKey,
    spec: RegionSpec,
    /// The memory in the protection domain of shared queue pairs, once somebody has asked for it.
    shadow: Option<Arc<MemoryRegion>>,
    /// The region of the application, once that has deregistered it, while it may still be used: no other region gets its keys.
    going: Option<MemoryRegion>,
}

/// Regions by the keys that applications know.
#[derive(Debug)]
pub(super) struct Keys {
    pd: ProtectionDomain,
    regions: HashMap<RKey, Region>,
    local: HashMap<LKey, RKey>,
}

impl Keys {
    pub(super) fn new(pd: ProtectionDomain) -> Keys {
        Keys {
            pd,
            regions: HashMap::new(),
            local: HashMap::new(),
        }
    }

    pub(super) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    pub(super) fn add(&mut self, domain: u64, (lkey, rkey): (LKey, RKey), spec: RegionSpec) {
        let (shadow, going) = (None, None);
        let region = Region {
            domain,
            lkey,
            spec,
            shadow,
            going,
        };
        self.local.insert(lkey, rkey);
        self.regions.insert(rkey, region);
    }

    /// Returns the protection domain of a region.
    pub(super) fn domain(&self, rkey: RKey) -> Option<u64> {
        self.regions.get(&rkey).map(|region| region.domain)
    }

    /// Keeps a region that goes, until [`Keys::remove`]. Nobody learns its key any more.
    pub(super) fn let_go(&mut self, region: MemoryRegion) {
        if let Some(known) = self.regions.get_mut(&region.rkey()) {
            known.going = Some(region);
        }
    }

    pub(super) fn remove(&mut self, rkey: RKey) {
        if let Some(region) = self.regions.remove(&rkey) {
            self.local.remove(&region.lkey);
        }
    }

    fn shadow(&mut self, domain: u64, rkey: RKey) -> Option<&Region> {
        let pd = &self.pd;
        let region = self.regions.get_mut(&rkey);
        let region = region.filter(|region| region.domain == domain && region.going.is_none())?;
        if region.shadow.is_none() {
            let spec = &region.spec;
            let memory = spec.memory.clone();
            // An access that fails would end the queue pair for all who share it.
            let any = memory.as_any();
            if any.is_some_and(|any| any.is::<ForeignMemory>()) {
                return None;
            }
            // Nodes write messages into receives, which peers must not.
            let access = match spec.access.contains(Access::LOCAL_WRITE) {
                true => spec.access | Access::REMOTE_WRITE,
                false => spec.access,
            };
            let shadow = pd.reg_mr(memory, spec.memory_offset, spec.length, spec.iova, access);
            region.shadow = Some(Arc::new(shadow.ok()?));
        }
        Some(region)
    }

    /// Returns the region with a local key, in the protection domain of shared queue pairs.
    pub(super) fn shadow_of_local(&mut self, domain: u64, lkey: LKey) -> Option<Arc<MemoryRegion>> {
        let rkey = *self.local.get(&lkey)?;
        self.shadow(domain, rkey)?.shadow.clone()
    }

    /// Returns what a peer may know of the region with a remote key.
    pub(super) fn shadow_of_remote(&mut self, domain: u64, rkey: RKey) -> Option<RemoteKey> {
        let region = self.shadow(domain, rkey)?;
        let spec = &region.spec;
        Some(RemoteKey {
            rkey: region.shadow.as_ref()?.rkey(),
            start: match spec.access.contains(Access::ZERO_BASED) {
                true => 0,
                false => spec.iova,
            },
            length: spec.length,
            access: spec.access.bits(),
        })
    }
}

//! Memory regions and windows of a soft device.

use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_rnic::{LKey, RKey, RegionSpec, RegisterError, WindowType};

use super::device::{Device, ProtectionDomain};
use super::shm::stay;

#[derive(Debug)]
pub(crate) struct MemoryRegion {
    device: Device,
    lkey: LKey,
    rkey: RKey,
}

#[derive(Debug)]
pub(crate) struct MemoryWindow {
    device: Device,
    rkey: AtomicU32,
}

impl ProtectionDomain {
    pub(crate) fn reg_mr(&self, spec: RegionSpec) -> Result<MemoryRegion, RegisterError> {
        // A second handle, so that memory that is refused is not dropped while the engine is locked.
        let _memory = spec.memory.clone();
        let (lkey, rkey) = self.device.lock().rnic.reg_mr(self.pd, spec)?;
        let device = self.device.clone();
        Ok(MemoryRegion { device, lkey, rkey })
    }

    pub(crate) fn alloc_mr(&self, length_max: u64) -> Result<MemoryRegion, RegisterError> {
        let (lkey, rkey) = self.device.lock().rnic.alloc_mr(self.pd, length_max)?;
        let device = self.device.clone();
        Ok(MemoryRegion { device, lkey, rkey })
    }

    pub(crate) fn alloc_mw(&self, window_type: WindowType) -> Result<MemoryWindow, RegisterError> {
        let rkey = self.device.lock().rnic.alloc_mw(self.pd, window_type)?;
        Ok(MemoryWindow {
            device: self.device.clone(),
            rkey: AtomicU32::new(rkey.0),
        })
    }
}

impl MemoryRegion {
    pub(crate) fn lkey(&self) -> LKey {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> RKey {
        self.rkey
    }

    pub(crate) fn has_windows(&self) -> bool {
        self.device.lock().rnic.has_mws(self.lkey)
    }

    pub(crate) fn rereg(
        &mut self,
        pd: &ProtectionDomain,
        replacement: RegionSpec,
    ) -> Result<(), RegisterError> {
        // A second handle, so that memory that is refused is not dropped while the engine is locked.
        let _memory = replacement.memory.clone();
        let mut core = self.device.lock();
        let before = core
            .rnic
            .rereg_mr(self.lkey, Some(pd.pd), |spec| *spec = replacement)?;
        let stays = core.links.revoke_region(self.lkey);
        drop(core);
        stay::wait(&stays);
        drop(before);
        Ok(())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let mut core = self.device.lock();
        core.rnic.unbind_mws(self.lkey);
        let memory = core.rnic.dereg_mr(self.lkey);
        let stays = core.links.revoke_region(self.lkey);
        drop(core);
        // From here on the memory belongs to the program again: no peer may write to it.
        stay::wait(&stays);
        // Drop the memory only after the engine is unlocked: dropping may unmap, close, or run code of the memory's owner.
        drop(memory);
    }
}

impl MemoryWindow {
    pub(crate) fn rkey(&self) -> RKey {
        RKey(self.rkey.load(Ordering::Relaxed))
    }

    pub(crate) fn set_rkey(&self, rkey: RKey) {
        self.rkey.store(rkey.0, Ordering::Relaxed);
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        self.device.lock().rnic.dealloc_mw(self.rkey());
    }
}

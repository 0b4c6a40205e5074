//! Memory regions and windows of a soft device.

use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_rnic::{LKey, RKey, RegionSpec, RegisterError, WindowType};
use rdmux_shm::stay;
use rdmux_verbs::provider::{self, MemoryWindow as _, own};

use super::device::{Device, ProtectionDomain};
use super::engine::InProgress;

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

impl MemoryRegion {
    /// Registers memory in a protection domain.
    pub(super) fn new(pd: &ProtectionDomain, spec: RegionSpec) -> Result<MemoryRegion, RegisterError> {
        // A second handle, so that memory that is refused is not dropped while the engine is locked.
        let _memory = spec.memory.clone();
        let (lkey, rkey) = pd.device.lock().rnic.reg_mr(pd.pd, spec)?;
        let device = pd.device.clone();
        Ok(MemoryRegion { device, lkey, rkey })
    }

    /// Makes a region without memory.
    pub(super) fn without_memory(
        pd: &ProtectionDomain,
        length_max: u64,
    ) -> Result<MemoryRegion, RegisterError> {
        let (lkey, rkey) = pd.device.lock().rnic.alloc_mr(pd.pd, length_max)?;
        let device = pd.device.clone();
        Ok(MemoryRegion { device, lkey, rkey })
    }
}

impl MemoryWindow {
    pub(super) fn new(pd: &ProtectionDomain, window_type: WindowType) -> Result<MemoryWindow, RegisterError> {
        let rkey = pd.device.lock().rnic.alloc_mw(pd.pd, window_type)?;
        Ok(MemoryWindow {
            device: pd.device.clone(),
            rkey: AtomicU32::new(rkey.0),
        })
    }
}

impl provider::MemoryRegion for MemoryRegion {
    fn lkey(&self) -> LKey {
        self.lkey
    }

    fn rkey(&self) -> RKey {
        self.rkey
    }

    fn has_windows(&self) -> bool {
        self.device.lock().rnic.has_mws(self.lkey)
    }

    fn rereg(
        &mut self,
        pd: &rdmux_verbs::ProtectionDomain,
        replacement: RegionSpec,
    ) -> Result<(), RegisterError> {
        let pd = own::<ProtectionDomain>(pd).ok_or(RegisterError::NoPd)?;
        // A second handle, so that memory that is refused is not dropped while the engine is locked.
        let _memory = replacement.memory.clone();
        let mut core = self.device.lock();
        let before = core
            .rnic
            .rereg_mr(self.lkey, Some(pd.pd), |spec| *spec = replacement)?;
        let stays = core.links.revoke_region(self.lkey);
        let accesses = core.media.in_progress(&before);
        drop(core);
        stay::wait(&stays);
        accesses.into_iter().for_each(InProgress::wait);
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
        let accesses = match &memory {
            Ok(Some(memory)) => core.media.in_progress(memory),
            _ => None,
        };
        drop(core);
        // From here on the memory belongs to the program again: no peer may write to it.
        stay::wait(&stays);
        accesses.into_iter().for_each(InProgress::wait);
        // Drop the memory only after the engine is unlocked: dropping may unmap, close, or run code of the memory's owner.
        drop(memory);
    }
}

impl provider::MemoryWindow for MemoryWindow {
    fn rkey(&self) -> RKey {
        RKey(self.rkey.load(Ordering::Relaxed))
    }

    fn set_rkey(&self, rkey: RKey) {
        self.rkey.store(rkey.0, Ordering::Relaxed);
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        self.device.lock().rnic.dealloc_mw(self.rkey());
    }
}

//! Memory regions and windows. Each ends when it is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_rnic::{Access, LKey, Memory, RKey, RegionSpec, RegisterError, Sge, WindowType};

use crate::device::ProtectionDomain;

impl ProtectionDomain {
    /// Registers `length` bytes at `offset` of a memory under the address `iova`.
    pub fn reg_mr(
        &self,
        memory: Arc<dyn Memory>,
        offset: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        // A second handle, so that memory that is refused is not dropped while the engine is locked.
        let spec = RegionSpec {
            memory: memory.clone(),
            memory_offset: offset,
            length,
            iova,
            access,
        };
        let (lkey, rkey) = self.device().engine().lock().rnic.reg_mr(self.number(), spec)?;
        Ok(MemoryRegion {
            pd: self.clone(),
            lkey,
            rkey,
            iova,
            length,
        })
    }

    /// Registers a whole memory under the address `iova`.
    pub fn reg_mr_all(
        &self,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        let length = memory.len();
        self.reg_mr(memory, 0, length, iova, access)
    }

    /// Makes a region without memory, for up to `length_max` bytes. [`Operation::Register`] gives it memory and
    /// [`Operation::LocalInvalidate`] or a peer's SEND with invalidate takes it away.
    ///
    /// [`Operation::Register`]: rdmux_rnic::Operation::Register
    /// [`Operation::LocalInvalidate`]: rdmux_rnic::Operation::LocalInvalidate
    pub fn alloc_mr(&self, length_max: u64) -> Result<MemoryRegion, RegisterError> {
        let mut core = self.device().engine().lock();
        let (lkey, rkey) = core.rnic.alloc_mr(self.number(), length_max)?;
        drop(core);
        Ok(MemoryRegion {
            pd: self.clone(),
            lkey,
            rkey,
            iova: 0,
            length: 0,
        })
    }

    /// Makes a memory window.
    pub fn alloc_mw(&self, window_type: WindowType) -> Result<MemoryWindow, RegisterError> {
        let mut core = self.device().engine().lock();
        let rkey = core.rnic.alloc_mw(self.number(), window_type)?;
        drop(core);
        Ok(MemoryWindow {
            pd: self.clone(),
            rkey: AtomicU32::new(rkey.0),
        })
    }
}

/// Registered memory. Registration neither pins pages nor touches them, whatever their number: each access finds its own, or is a
/// fault ([`Access::ON_DEMAND`] asks for what is always so). Dropping it unbinds its windows and deregisters: when the drop
/// returns, no peer reaches the memory any more. (One on this host that was stopped amid a copy, and does not go on within a second,
/// ends that copy later.)
#[derive(Debug)]
pub struct MemoryRegion {
    pd: ProtectionDomain,
    lkey: LKey,
    rkey: RKey,
    iova: u64,
    length: u64,
}

impl MemoryRegion {
    /// The key for own requests.
    pub fn lkey(&self) -> LKey {
        self.lkey
    }

    /// The key for peers' requests.
    pub fn rkey(&self) -> RKey {
        self.rkey
    }

    /// The address of the first byte.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Puts other memory behind the region, or changes its rights; keys stay. What was behind it is reached no more when this
    /// returns. After an error, as while windows are bound to it, the region is as it was.
    pub fn rereg(
        &mut self,
        memory: Arc<dyn Memory>,
        offset: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<(), RegisterError> {
        // A second handle, so that memory that is refused is not dropped while the engine is locked.
        let replacement = memory.clone();
        let mut core = self.pd.device().engine().lock();
        let before = core.rnic.rereg_mr(self.lkey, None, |spec| {
            *spec = RegionSpec {
                memory: replacement,
                memory_offset: offset,
                length,
                iova,
                access,
            };
        })?;
        core.links.revoke_region(self.lkey);
        drop(core);
        drop(before);
        (self.iova, self.length) = (iova, length);
        Ok(())
    }

    /// A scatter/gather element: `length` bytes at `offset` of the region.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge::new(self.iova.wrapping_add(offset), length, self.lkey)
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let mut core = self.pd.device().engine().lock();
        core.rnic.unbind_mws(self.lkey);
        let memory = core.rnic.dereg_mr(self.lkey);
        core.links.revoke_region(self.lkey);
        drop(core);
        // Dropped when the engine is unlocked: memory may unmap, close, or run its owner's code.
        drop(memory);
    }
}

/// Memory window: a key for a part of a region. Dropping it ends it.
#[derive(Debug)]
pub struct MemoryWindow {
    pd: ProtectionDomain,
    rkey: AtomicU32,
}

impl MemoryWindow {
    /// Its key: of a type 1 window the one of the last binding, of a type 2 window the first one, from which the user makes
    /// others by [`RKey::next`].
    pub fn rkey(&self) -> RKey {
        RKey(self.rkey.load(Ordering::Relaxed))
    }

    pub(crate) fn set_rkey(&self, rkey: RKey) {
        self.rkey.store(rkey.0, Ordering::Relaxed);
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        self.pd.device().engine().lock().rnic.dealloc_mw(self.rkey());
    }
}

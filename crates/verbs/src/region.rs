//! Memory regions and windows. Each ends when it is dropped.

use std::ops::RangeBounds;
use std::sync::Arc;

use rdmux_rnic::{Access, LKey, Memory, RKey, RegionSpec, RegisterError, RemoteBuffer, Sge, WindowType};

use crate::device::ProtectionDomain;
use crate::provider;

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
        let spec = RegionSpec {
            memory,
            memory_offset: offset,
            length,
            iova,
            access,
        };
        let provided = self.provided().reg_mr(spec)?;
        Ok(MemoryRegion {
            provided,
            pd: self.clone(),
            iova,
            length,
            zero_based: access.contains(Access::ZERO_BASED),
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
        let provided = self.provided().alloc_mr(length_max)?;
        Ok(MemoryRegion {
            provided,
            pd: self.clone(),
            iova: 0,
            length: 0,
            zero_based: false,
        })
    }

    /// Makes a memory window.
    pub fn alloc_mw(&self, window_type: WindowType) -> Result<MemoryWindow, RegisterError> {
        let provided = self.provided().alloc_mw(window_type)?;
        let _pd = self.clone();
        Ok(MemoryWindow { provided, _pd })
    }
}

/// Registered memory. Registration neither pins pages nor touches them, whatever their number: each access finds its own pages, or
/// is a fault ([`Access::ON_DEMAND`] asks for what is always so). Dropping the region unbinds its windows and deregisters it: when
/// the drop returns, no peer reaches the memory. The drop waits for a peer on this host that has *mapped* the memory and was
/// stopped while it copies (docs/shared-memory.md).
#[derive(Debug)]
pub struct MemoryRegion {
    provided: Box<dyn provider::MemoryRegion>,
    pd: ProtectionDomain,
    iova: u64,
    length: u64,
    /// Registered with [`Access::ZERO_BASED`].
    zero_based: bool,
}

impl MemoryRegion {
    /// Returns the key for local requests.
    pub fn lkey(&self) -> LKey {
        self.provided.lkey()
    }

    /// Returns the key for peers' requests.
    pub fn rkey(&self) -> RKey {
        self.provided.rkey()
    }

    /// The address of the first byte.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns whether memory windows are still bound to the region; with an RNIC, whether they were by the last known state. Dropping the
    /// region unbinds them.
    pub fn has_windows(&self) -> bool {
        self.provided.has_windows()
    }

    /// Replaces the memory of the region, or changes its rights. A soft device keeps the keys of the region; an RNIC changes them.
    /// When this returns, nobody reaches the previous memory through the region. After an error, such as while windows are bound to
    /// it, the region is as it was.
    pub fn rereg(
        &mut self,
        memory: Arc<dyn Memory>,
        offset: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<(), RegisterError> {
        let pd = self.pd.clone();
        self.rereg_in(&pd, memory, offset, length, iova, access)
    }

    /// Does the same, and moves the region to another protection domain of the device. IBTA Vol 1, 11.2.8.5.
    ///
    /// # Errors
    /// [`RegisterError::NoPd`] when the domain belongs to another device.
    pub fn rereg_in(
        &mut self,
        pd: &ProtectionDomain,
        memory: Arc<dyn Memory>,
        offset: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<(), RegisterError> {
        if !pd.device().is(self.pd.device()) {
            return Err(RegisterError::NoPd);
        }
        let spec = RegionSpec {
            memory,
            memory_offset: offset,
            length,
            iova,
            access,
        };
        self.provided.rereg(pd, spec)?;
        self.pd = pd.clone();
        (self.iova, self.length) = (iova, length);
        self.zero_based = access.contains(Access::ZERO_BASED);
        Ok(())
    }

    /// A scatter/gather element: `length` bytes at `offset` of the region.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge::new(self.iova.wrapping_add(offset), length, self.lkey())
    }

    /// Returns a scatter/gather element of the bytes in `range`, counted from the start of the region. `None`: the range exceeds the
    /// region, or has 4 GiB or more, which no element holds.
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Option<Sge> {
        let part = self.remote(range)?;
        Some(Sge::new(
            part.address,
            u32::try_from(part.length).ok()?,
            self.lkey(),
        ))
    }

    /// Returns the bytes in `range`, counted from the start of the region, as a peer names them in its requests. The peer's rights
    /// are those that the region and the queue pair give. `None`: the range exceeds the region. (A region of
    /// [`ProtectionDomain::alloc_mr`] has no bytes here: a work request gives it memory.)
    pub fn remote(&self, range: impl RangeBounds<u64>) -> Option<RemoteBuffer> {
        let whole = RemoteBuffer {
            address: if self.zero_based { 0 } else { self.iova },
            length: self.length,
            rkey: self.rkey(),
        };
        whole.slice(range)
    }
}

/// Memory window: a key for a part of a region. Dropping the window deallocates it.
#[derive(Debug)]
pub struct MemoryWindow {
    provided: Box<dyn provider::MemoryWindow>,
    _pd: ProtectionDomain,
}

impl MemoryWindow {
    /// Returns its key. For a type 1 window this is the key of the last binding; for a type 2 window it is the first key, from
    /// which the user makes others by [`RKey::next`].
    pub fn rkey(&self) -> RKey {
        self.provided.rkey()
    }

    pub(crate) fn set_rkey(&self, rkey: RKey) {
        self.provided.set_rkey(rkey)
    }
}

//! Memory regions and windows. Requests name both by key, but the library by its object: the registry of a domain maps keys to
//! objects.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_memory::Pages;
use rdmux_rnic::{Access, Bind, LKey, PostError, RKey, RegionSpec, RegisterError, SgeList, WindowType};
use rdmux_verbs::Features;
use rdmux_verbs::provider::{self, MemoryWindow as _, own};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rustix::io::Errno;

use super::device::{Listed, ProtectionDomain};
use super::objects::{Mr, Mw};
use super::resources::ObjectEntry;

/// Bits of a type 2 window's key that the program chooses.
const OWN_BITS: u32 = 0xff;

/// Regions and windows of a protection domain.
#[derive(Debug, Default)]
pub(super) struct Registry {
    regions: Mutex<HashMap<u32, RegisteredMr>>,
    /// By their keys without the bits that the program chooses.
    windows: Mutex<HashMap<u32, AllocatedMw>>,
}

#[derive(Debug)]
struct RegisteredMr {
    mr: Mr,
    iova: u64,
}

#[derive(Debug)]
struct AllocatedMw {
    /// `None`: its region has been deregistered, and the window was deallocated with it.
    mw: Option<Mw>,
    /// The region that it is bound to, or was bound to last.
    region: Option<u32>,
}

impl Registry {
    fn regions(&self) -> MutexGuard<'_, HashMap<u32, RegisteredMr>> {
        self.regions.lock()
    }

    fn windows(&self) -> MutexGuard<'_, HashMap<u32, AllocatedMw>> {
        self.windows.lock()
    }

    /// Posts the binding of a window to a region. Neither ends meanwhile: a region does not end before the windows that are bound
    /// to it.
    pub(super) fn bind<T>(
        &self,
        bind: &Bind,
        post: impl FnOnce(&Mw, &Mr) -> Result<T, PostError>,
    ) -> Result<T, PostError> {
        let mut windows = self.windows();
        let window = windows.get_mut(&(bind.window.0 & !OWN_BITS));
        let window = window.ok_or(PostError::Invalid)?;
        let mw = window.mw.as_ref().ok_or(PostError::Invalid)?;
        let regions = self.regions();
        let region = regions.get(&bind.region.0).ok_or(PostError::Invalid)?;
        let posted = post(mw, &region.mr)?;
        window.region = Some(bind.region.0);
        Ok(posted)
    }

    /// Returns whether a window is bound to a region, or was by the last known state.
    fn is_bound(&self, region: u32) -> bool {
        let windows = self.windows();
        windows
            .values()
            .any(|window| window.mw.is_some() && window.region == Some(region))
    }

    /// Replaces the key of a type 1 window.
    pub(super) fn rekey_window(&self, old: u32, new: u32) {
        let mut windows = self.windows();
        if let Some(window) = windows.remove(&(old & !OWN_BITS)) {
            windows.insert(new & !OWN_BITS, window);
        }
    }

    /// Returns the bytes of an ATOMIC WRITE, which the library takes by value.
    pub(super) fn eight_bytes(&self, sges: &SgeList) -> Result<[u8; 8], PostError> {
        let mut bytes = [0; 8];
        if let Some(inline) = sges.as_inline() {
            bytes.copy_from_slice(inline.first_chunk::<8>().ok_or(PostError::Invalid)?);
            return Ok(bytes);
        }
        let mut at = 0;
        for sge in sges.as_slice() {
            // The lock is held while the region is read: when its owner's drop returns, nobody reads it.
            let regions = self.regions();
            let region = regions.get(&sge.lkey).ok_or(PostError::Invalid)?;
            let to = bytes
                .get_mut(at..at + sge.length as usize)
                .ok_or(PostError::Invalid)?;
            let offset = sge.addr.checked_sub(region.iova).ok_or(PostError::Invalid)?;
            region.mr.read(offset, to).map_err(|_| PostError::Invalid)?;
            at += sge.length as usize;
        }
        Ok(bytes)
    }
}

fn refused(error: Errno) -> RegisterError {
    match error {
        Errno::NOMEM | Errno::NOSPC => RegisterError::NoResources,
        other => RegisterError::Refused(other.raw_os_error()),
    }
}

/// Registered memory, whose pages the device holds. Dropping it ends its windows and deregisters it.
#[derive(Debug)]
pub(crate) struct MemoryRegion {
    pd: ProtectionDomain,
    lkey: LKey,
    rkey: RKey,
    _listed: Listed,
}

impl MemoryRegion {
    /// Registers memory in a protection domain.
    pub(super) fn new(pd: &ProtectionDomain, spec: RegionSpec) -> Result<MemoryRegion, RegisterError> {
        let RegionSpec {
            memory,
            memory_offset: offset,
            length,
            iova,
            mut access,
        } = spec;
        let inside = offset.checked_add(length).is_some_and(|end| end <= memory.len());
        if !inside || iova.checked_add(length).is_none() {
            return Err(RegisterError::OutOfRange);
        }
        let device = pd.device();
        let flush = [
            (Access::FLUSH_GLOBAL, Features::FLUSH_GLOBAL),
            (Access::FLUSH_PERSISTENT, Features::FLUSH_PERSISTENT),
        ];
        for (right, feature) in flush {
            if access.contains(right) && !device.features().contains(feature) {
                return Err(RegisterError::Unsupported(feature.first_name()));
            }
        }
        if access.contains(Access::REMOTE_ATOMIC) && !device.features().contains(Features::ATOMIC) {
            return Err(RegisterError::Unsupported(Features::ATOMIC.first_name()));
        }
        if access.contains(Access::ON_DEMAND) && !device.features().contains(Features::ON_DEMAND) {
            return Err(RegisterError::Unsupported(Features::ON_DEMAND.first_name()));
        }
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
            return Err(RegisterError::NeedsLocalWrite);
        }
        let is_durable = memory.placement().contains(rdmux_rnic::Placement::PERSISTENT);
        if access.contains(Access::FLUSH_PERSISTENT) && !is_durable {
            return Err(RegisterError::FlushNotSupported);
        }
        if Pages::of(&*memory) == Some(Pages::ComeAndGo) {
            if !device.features().contains(Features::ON_DEMAND) {
                return Err(RegisterError::NotMapped);
            }
            // The device writes to the page cache: its FLUSH does not bring the bytes any further, though some devices take one.
            if access.contains(Access::FLUSH_PERSISTENT) {
                return Err(RegisterError::FlushNotSupported);
            }
            access |= Access::ON_DEMAND;
        }
        let made = Mr::new(pd.object(), memory, offset, length, iova, access.bits());
        let mr = made.ok_or(RegisterError::NotMapped)?.map_err(refused)?;
        let (lkey, rkey) = mr.keys();
        let entry = ObjectEntry::Mr {
            pdn: pd.number(),
            rkey,
            iova,
            length,
            access,
        };
        let region = RegisteredMr { mr, iova };
        pd.registry.regions().insert(lkey, region);
        Ok(MemoryRegion {
            pd: pd.clone(),
            lkey: LKey(lkey),
            rkey: RKey(rkey),
            _listed: Listed::new(device, entry),
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
        self.pd.registry.is_bound(self.lkey.0)
    }

    /// Registers a new region, after which the old one ends. `ibv_rereg_mr` is not used: what it changes differs between drivers,
    /// and after it has failed there is neither region.
    fn rereg(&mut self, pd: &rdmux_verbs::ProtectionDomain, spec: RegionSpec) -> Result<(), RegisterError> {
        let pd = own::<ProtectionDomain>(pd).ok_or(RegisterError::NoPd)?;
        if self.has_windows() {
            return Err(RegisterError::WindowsBound);
        }
        *self = MemoryRegion::new(pd, spec)?;
        Ok(())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let registry = &self.pd.registry;
        // A region with windows bound to it does not end, so the windows end first. Nobody binds another window to it meanwhile.
        let mut bound = Vec::new();
        let mut windows = registry.windows();
        for window in windows.values_mut() {
            if window.region == Some(self.lkey.0) {
                bound.extend(window.mw.take());
            }
        }
        let region = registry.regions().remove(&self.lkey.0);
        drop(windows);
        drop(bound);
        drop(region);
    }
}

/// Memory window.
#[derive(Debug)]
pub(crate) struct MemoryWindow {
    pd: ProtectionDomain,
    rkey: AtomicU32,
}

impl MemoryWindow {
    pub(super) fn new(pd: &ProtectionDomain, window_type: WindowType) -> Result<MemoryWindow, RegisterError> {
        let (number, feature) = match window_type {
            WindowType::One => (1, Features::MW_TYPE_1),
            WindowType::Two => (2, Features::MW_TYPE_2),
        };
        if !pd.device().features().contains(feature) {
            return Err(RegisterError::Unsupported(feature.first_name()));
        }
        let mw = Mw::new(pd.object(), number).map_err(refused)?;
        let rkey = mw.rkey();
        let window = AllocatedMw {
            mw: Some(mw),
            region: None,
        };
        pd.registry.windows().insert(rkey & !OWN_BITS, window);
        Ok(MemoryWindow {
            pd: pd.clone(),
            rkey: AtomicU32::new(rkey),
        })
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
        let window = self.pd.registry.windows().remove(&(self.rkey().0 & !OWN_BITS));
        drop(window);
    }
}

//! Protection domains and memory regions. IBTA Vol 1, 10.6.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use rand_core::RngCore;
use rdmux_wire::{LKey, Qpn, RKey};

use crate::device::RegionDetail;
use crate::lane::{DirectLane, OwnKey};
use crate::memory::{Access, Memory};
use crate::retired::RetiredMemories;
use crate::trace::Denial;
use crate::work::{Bind, Registration};

/// Handle of a protection domain of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pd(pub u32);

/// Error of registering a region.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The range lies outside of the memory, or wraps around the address space.
    #[error("the region lies outside of its memory")]
    OutOfRange,
    /// The caller requested flush rights that this memory cannot honour.
    #[error("this memory cannot execute a persistent flush: it does not survive a loss of power")]
    FlushNotSupported,
    /// Remote write and atomic rights need local write rights. IBTA Vol 1, 10.6.3.1.
    #[error("remote write and remote atomics need local write")]
    NeedsLocalWrite,
    /// No such protection domain.
    #[error("no such protection domain")]
    NoPd,
    /// No such region.
    #[error("no such memory region")]
    NoRegion,
    /// Memory windows are bound to the region: it cannot be deregistered or get other memory until they are unbound. IBTA Vol 1, 10.6.7.2.
    #[error("memory windows are still bound to the region")]
    WindowsBound,
    /// The device already has the maximum number of regions and windows.
    #[error("too many memory regions and windows")]
    NoResources,
    /// The caller shares the device with others, and has as much as it may have; the text says of what, and who decides.
    #[error("{0}")]
    Limit(Box<str>),
    /// The device accesses memory by its pages, and this memory has no lasting pages: a file, for example, which needs on-demand paging.
    #[error(
        "an RNIC without on-demand paging can access only memory that stays mapped, not files: copy through registered memory"
    )]
    NotMapped,
    /// The device does not support it.
    #[error("the device does not offer this: {0}")]
    Unsupported(&'static str),
    /// The device refused the memory; the number is the system's errno.
    #[error("the device refused the memory: {}", std::io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}

/// Types of memory windows. IBTA Vol 1, 10.6.7.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowType {
    /// Type 1: valid on every QP of its protection domain; bound by a verb.
    One,
    /// Type 2B: valid only on the QP that bound it; bound and invalidated by work requests.
    Two,
}

/// Kind of object that a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// A registered region.
    Memory,
    /// A region that gets and loses its memory by work requests. IBTA Vol 1, 10.6.3.4.
    Fast,
    /// A window.
    Window(WindowType),
}

/// Parameters of a registration.
#[derive(Clone, Debug)]
pub struct RegionSpec {
    /// The memory.
    pub memory: Arc<dyn Memory>,
    /// Offset of the region in the memory.
    pub memory_offset: u64,
    /// Bytes.
    pub length: u64,
    /// Address with which work requests and peers name the region's first byte.
    pub iova: u64,
    /// Access rights.
    pub access: Access,
}

impl RegionSpec {
    fn checked(self) -> Result<RegionSpec, RegisterError> {
        let inside = self
            .memory_offset
            .checked_add(self.length)
            .is_some_and(|end| end <= self.memory.len());
        if !inside || self.iova.checked_add(self.length).is_none() {
            return Err(RegisterError::OutOfRange);
        }
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if self.access.intersects(writes) && !self.access.contains(Access::LOCAL_WRITE) {
            return Err(RegisterError::NeedsLocalWrite);
        }
        let flushes = self.access & (Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT);
        if !Access::for_flush(self.memory.placement()).contains(flushes) {
            return Err(RegisterError::FlushNotSupported);
        }
        Ok(self)
    }

    pub(crate) fn view(&self) -> View<'_> {
        View {
            memory: &self.memory,
            memory_offset: self.memory_offset,
            length: self.length,
            iova: if self.access.contains(Access::ZERO_BASED) {
                0
            } else {
                self.iova
            },
        }
    }
}

/// Hasher for keys. They are random numbers already, so the hash is computed from the number alone.
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
        // The map takes the bucket index from the low bits and the tag from the high bits.
        self.0 = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

pub(crate) type NumberMap<V> = HashMap<u32, V, BuildHasherDefault<NumberHasher>>;

/// Memory that a key grants access to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) memory: &'a Arc<dyn Memory>,
    /// Offset of the view in the memory.
    pub(crate) memory_offset: u64,
    pub(crate) length: u64,
    /// Address of the view's first byte.
    pub(crate) iova: u64,
}

impl View<'_> {
    /// Returns the offset in the memory of the `length` bytes at `va` if they lie inside the view.
    pub(crate) fn offset_of(&self, va: u64, length: u64) -> Option<u64> {
        let at = va.checked_sub(self.iova)?;
        let end = at.checked_add(length)?;
        let limit = self.length + u64::from(mutant!(BoundOffByOne));
        (end <= limit).then(|| self.memory_offset + at)
    }
}

/// The object that a key names.
#[derive(Debug)]
struct KeyEntry {
    key: u32,
    pd: Pd,
    kind: Keyed,
    /// Number of windows bound to this region. While there are any, the region does not change.
    windows: u32,
    /// Lanes that know this region, and have to forget it before it changes or ends.
    lanes: Vec<DirectLane>,
}

#[derive(Debug)]
enum Keyed {
    Region(RegionSpec),
    /// A region that gets and loses its memory by work requests.
    Fast {
        length_max: u64,
        spec: Option<RegionSpec>,
    },
    Window {
        kind: WindowType,
        bound: Option<Bound>,
        /// Type 1: the key of the most recently posted binding, which may still wait in a queue.
        posted: RKey,
    },
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    bind: Bind,
    /// The QP that bound it.
    qpn: Qpn,
}

impl KeyEntry {
    /// Makes lanes forget the region: once this returns, none of them accesses its memory.
    fn end_loans(&mut self) {
        for lane in std::mem::take(&mut self.lanes) {
            lane.forget_key(self.key);
        }
    }

    fn spec(&self) -> Option<&RegionSpec> {
        match &self.kind {
            Keyed::Region(spec) => Some(spec),
            Keyed::Fast { spec, .. } => spec.as_ref(),
            Keyed::Window { .. } => None,
        }
    }
}

/// Error of a work request on keys: a key does not exist, belongs to someone else, or is in the wrong state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyError;

/// All protection domains, regions and windows of a device.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    /// Entries by the high 24 bits of their keys: the user may change the low 8 bits.
    entries: NumberMap<KeyEntry>,
    /// Type 2 windows by the QP that bound them; each window is named by its key without the low 8 bits.
    bound_on: BTreeSet<(Qpn, u32)>,
    pds: Vec<bool>,
    /// Receives the memories that work requests and packets take away from keys.
    pub(crate) retired: RetiredMemories,
}

/// Maximum number of regions and windows of a device. All other keys stay free, so that a free one is soon found and a guess seldom
/// hits.
pub const REGIONS_MAX: usize = 1 << 20;

impl Regions {
    pub(crate) fn new(retired: RetiredMemories) -> Regions {
        Regions {
            retired,
            ..Regions::default()
        }
    }

    pub(crate) fn alloc_pd(&mut self) -> Pd {
        let free = self.pds.iter().position(|used| !used).unwrap_or_else(|| {
            self.pds.push(false);
            self.pds.len() - 1
        });
        self.pds[free] = true;
        Pd(free as u32)
    }

    /// Deallocates a PD and everything registered in it; returns the memories.
    pub(crate) fn dealloc_pd(&mut self, pd: Pd) -> Vec<Arc<dyn Memory>> {
        // A window belongs to its region's domain, so a window and its region are removed together.
        let gone = self.entries.extract_if(|_, entry| entry.pd == pd);
        let memories = gone.filter_map(|(_, mut entry)| {
            entry.end_loans();
            Some(entry.spec()?.memory.clone())
        });
        let memories = memories.collect();
        let entries = &self.entries;
        self.bound_on.retain(|(_, window)| entries.contains_key(window));
        if let Some(used) = self.pds.get_mut(pd.0 as usize) {
            *used = false;
        }
        memories
    }

    pub(crate) fn has_pd(&self, pd: Pd) -> bool {
        self.pds.get(pd.0 as usize).copied().unwrap_or(false)
    }

    /// Adds an entry with a new key. All 32 bits are random, so that a peer cannot guess a key. Key 0 stays free, as peers use it for
    /// "none".
    fn insert(&mut self, rng: &mut impl RngCore, pd: Pd, kind: Keyed) -> Result<u32, RegisterError> {
        if !self.has_pd(pd) {
            return Err(RegisterError::NoPd);
        }
        if self.entries.len() >= REGIONS_MAX {
            return Err(RegisterError::NoResources);
        }
        let key = loop {
            let key = rng.next_u32();
            if key >> 8 != 0 && !self.entries.contains_key(&(key >> 8)) {
                break key;
            }
        };
        let entry = KeyEntry {
            key,
            pd,
            kind,
            windows: 0,
            lanes: Vec::new(),
        };
        self.entries.insert(key >> 8, entry);
        Ok(key)
    }

    pub(crate) fn register(
        &mut self,
        rng: &mut impl RngCore,
        pd: Pd,
        spec: RegionSpec,
    ) -> Result<(LKey, RKey), RegisterError> {
        let spec = spec.checked()?;
        let key = self.insert(rng, pd, Keyed::Region(spec))?;
        Ok((LKey(key), RKey(key)))
    }

    pub(crate) fn alloc_region(
        &mut self,
        rng: &mut impl RngCore,
        pd: Pd,
        length_max: u64,
    ) -> Result<(LKey, RKey), RegisterError> {
        let fast = Keyed::Fast {
            length_max,
            spec: None,
        };
        let key = self.insert(rng, pd, fast)?;
        Ok((LKey(key), RKey(key)))
    }

    pub(crate) fn alloc_window(
        &mut self,
        rng: &mut impl RngCore,
        pd: Pd,
        kind: WindowType,
    ) -> Result<RKey, RegisterError> {
        let window = Keyed::Window {
            kind,
            bound: None,
            posted: RKey(0),
        };
        let key = self.insert(rng, pd, window)?;
        self.keep_window_key(RKey(key));
        Ok(RKey(key))
    }

    /// Changes a region in place: its keys stay the same. After an error the region is unchanged.
    pub(crate) fn reregister(
        &mut self,
        lkey: LKey,
        pd: Option<Pd>,
        change: impl FnOnce(&mut RegionSpec),
    ) -> Result<Arc<dyn Memory>, RegisterError> {
        if pd.is_some_and(|pd| !self.has_pd(pd)) {
            return Err(RegisterError::NoPd);
        }
        let entry = self.exact_mut(lkey.0).ok_or(RegisterError::NoRegion)?;
        let Keyed::Region(spec) = &mut entry.kind else {
            return Err(RegisterError::NoRegion);
        };
        if entry.windows > 0 {
            return Err(RegisterError::WindowsBound);
        }
        let mut changed = spec.clone();
        change(&mut changed);
        let mut changed = changed.checked()?;
        if mutant!(ReregisterKeepsMemory) {
            changed.memory = spec.memory.clone();
        }
        let before = std::mem::replace(spec, changed);
        entry.pd = pd.unwrap_or(entry.pd);
        entry.end_loans();
        Ok(before.memory)
    }

    /// Returns the plain region of a remote key. Only the owner looks up windows and regions that work requests fill and empty.
    pub(crate) fn plain(&self, rkey: u32, pd: Pd) -> Option<&RegionSpec> {
        let entry = self.exact(rkey).filter(|entry| entry.pd == pd)?;
        match &entry.kind {
            Keyed::Region(spec) => Some(spec),
            Keyed::Fast { .. } | Keyed::Window { .. } => None,
        }
    }

    /// Returns a plain region of a domain for a lane, which has to forget it when it changes. (Regions that work requests fill and empty
    /// change by themselves.)
    pub(crate) fn lend(&mut self, lkey: u32, pd: Pd, lane: &DirectLane) -> Option<OwnKey> {
        let entry = self.exact_mut(lkey).filter(|entry| entry.pd == pd)?;
        let Keyed::Region(spec) = &entry.kind else {
            return None;
        };
        // The lane may know it for the other direction.
        if !entry.lanes.iter().any(|other| other.is(lane)) {
            entry.lanes.push(lane.clone());
        }
        Some(OwnKey {
            lkey,
            memory: spec.memory.clone(),
            memory_offset: spec.memory_offset,
            iova: spec.view().iova,
            length: spec.length,
            access: spec.access,
        })
    }

    /// Notes that a lane has forgotten a region.
    pub(crate) fn end_loan(&mut self, lkey: u32, lane: &DirectLane) {
        if let Some(entry) = self.exact_mut(lkey) {
            entry.lanes.retain(|other| !other.is(lane));
        }
    }

    /// Returns the memories of the plain regions, with their keys.
    pub(crate) fn memories(&self) -> impl Iterator<Item = (LKey, &Arc<dyn Memory>)> {
        let plain = |entry: &KeyEntry| matches!(entry.kind, Keyed::Region(_));
        let entries = self.entries.values().filter(move |entry| plain(entry));
        entries.filter_map(|entry| Some((LKey(entry.key), &entry.spec()?.memory)))
    }

    /// Deregisters a region. After the return no access through the key succeeds; earlier accesses completed before they returned.
    pub(crate) fn deregister(&mut self, lkey: LKey) -> Result<Option<Arc<dyn Memory>>, RegisterError> {
        let entry = self.entries.get(&(lkey.0 >> 8)).ok_or(RegisterError::NoRegion)?;
        let named = match entry.kind {
            Keyed::Region(_) => entry.key == lkey.0,
            // The region's key has changed with each registration.
            Keyed::Fast { .. } => true,
            Keyed::Window { .. } => false,
        };
        if !named {
            return Err(RegisterError::NoRegion);
        }
        if entry.windows > 0 {
            return Err(RegisterError::WindowsBound);
        }
        let mut entry = self.entries.remove(&(lkey.0 >> 8));
        entry.iter_mut().for_each(KeyEntry::end_loans);
        Ok(entry.and_then(|entry| Some(entry.spec()?.memory.clone())))
    }

    pub(crate) fn dealloc_window(&mut self, rkey: RKey) -> bool {
        let is_window = self
            .entries
            .get(&(rkey.0 >> 8))
            .is_some_and(|entry| matches!(entry.kind, Keyed::Window { .. }));
        if is_window {
            self.rebind(rkey.0 >> 8, None);
            self.entries.remove(&(rkey.0 >> 8));
        }
        is_window
    }

    /// Returns whether windows are bound to a region.
    pub(crate) fn has_windows(&self, lkey: LKey) -> bool {
        self.entries
            .get(&(lkey.0 >> 8))
            .is_some_and(|entry| entry.windows > 0)
    }

    /// Unbinds all windows of a region.
    pub(crate) fn unbind_all(&mut self, lkey: LKey) {
        let region = lkey.0 >> 8;
        if self.entries.get(&region).is_none_or(|entry| entry.windows == 0) {
            return;
        }
        let is_bound_to_it = |entry: &KeyEntry| match entry.kind {
            Keyed::Window { bound, .. } => bound.is_some_and(|bound| bound.bind.region.0 >> 8 == region),
            Keyed::Region(_) | Keyed::Fast { .. } => false,
        };
        let windows = self.entries.iter().filter(|(_, entry)| is_bound_to_it(entry));
        let windows: Vec<u32> = windows.map(|(window, _)| *window).collect();
        for window in windows {
            self.rebind(window, None);
        }
    }

    /// Unbinds the windows that are valid only on this QP, which has been destroyed: they must not be valid on a later QP with its number.
    pub(crate) fn forget_qp(&mut self, qpn: Qpn) {
        while let Some((_, window)) = self.bound_on.range((qpn, 0)..=(qpn, u32::MAX)).next().copied() {
            self.rebind(window, None);
        }
    }

    /// Changes the binding of a window, which is named by its key without the low 8 bits.
    fn rebind(&mut self, window: u32, to: Option<Bound>) {
        let entry = self.entries.get_mut(&window);
        let Some(Keyed::Window { kind, bound, .. }) = entry.map(|entry| &mut entry.kind) else {
            return;
        };
        let of_qp = *kind == WindowType::Two;
        let before = std::mem::replace(bound, to);
        if let Some(bound) = before {
            self.bound_on.remove(&(bound.qpn, window));
            self.change_windows(bound.bind.region, -1);
        }
        if let Some(bound) = to {
            if of_qp {
                self.bound_on.insert((bound.qpn, window));
            }
            self.change_windows(bound.bind.region, 1);
        }
    }

    fn change_windows(&mut self, region: LKey, by: i32) {
        if let Some(entry) = self.entries.get_mut(&(region.0 >> 8)) {
            entry.windows = entry.windows.saturating_add_signed(by);
        }
    }

    fn exact(&self, key: u32) -> Option<&KeyEntry> {
        let exact = |entry: &&KeyEntry| entry.key == key || mutant!(TagIgnored);
        self.entries.get(&(key >> 8)).filter(exact)
    }

    fn exact_mut(&mut self, key: u32) -> Option<&mut KeyEntry> {
        self.entries.get_mut(&(key >> 8)).filter(|entry| entry.key == key)
    }

    /// Returns the region of a local key if it belongs to `pd` and grants `access`.
    pub(crate) fn local(&self, lkey: u32, pd: Pd, access: Access) -> Option<View<'_>> {
        let entry = self.exact(lkey).filter(|entry| entry.pd == pd)?;
        entry
            .spec()
            .filter(|spec| spec.access.contains(access))
            .map(RegionSpec::view)
    }

    /// Returns the region or window of a remote key if it grants `access` to requests that arrive on this QP. IBTA Vol 1, 10.6.7.
    pub(crate) fn remote(&self, rkey: u32, pd: Pd, qpn: Qpn, access: Access) -> Option<View<'_>> {
        let entry = self.exact(rkey).filter(|entry| entry.pd == pd)?;
        let Keyed::Window { kind, bound, .. } = &entry.kind else {
            return entry
                .spec()
                .filter(|spec| spec.access.contains(access))
                .map(RegionSpec::view);
        };
        let bound = bound.filter(|bound| {
            bound.bind.access.contains(access) && (*kind == WindowType::One || bound.qpn == qpn)
        })?;
        let Bind {
            region,
            va,
            length,
            access: granted,
            ..
        } = bound.bind;
        let region = self.local(region.0, pd, Access::MW_BIND)?;
        Some(View {
            memory: region.memory,
            memory_offset: region.offset_of(va, length)?,
            length,
            iova: if granted.contains(Access::ZERO_BASED) {
                0
            } else {
                va
            },
        })
    }

    /// Binds a window on behalf of a QP's work request. IBTA Vol 1, 10.6.7.2.
    pub(crate) fn bind(&mut self, bind: &Bind, pd: Pd, qpn: Qpn) -> Result<(), KeyError> {
        let rights = bind.access.difference(Access::ZERO_BASED);
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        if bind.length > 0 {
            let region = self.exact(bind.region.0).filter(|entry| entry.pd == pd);
            let spec = region.and_then(KeyEntry::spec).ok_or(KeyError)?;
            let writes = rights.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            // A window cannot grant a flush that the region does not.
            let flushes = spec.access & (Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT);
            let allowed = spec.access.contains(Access::MW_BIND)
                && (remote | flushes).contains(rights)
                && (!writes || spec.access.contains(Access::LOCAL_WRITE))
                && spec.view().offset_of(bind.va, bind.length).is_some();
            if !allowed {
                return Err(KeyError);
            }
        }
        let entry = self.entries.get_mut(&(bind.window.0 >> 8)).ok_or(KeyError)?;
        let Keyed::Window { kind, bound, .. } = &mut entry.kind else {
            return Err(KeyError);
        };
        // A type 2 window must be invalidated before it is bound again, and the new key must differ, so that the old key grants nothing.
        let refused =
            *kind == WindowType::Two && (bound.is_some() || bind.length == 0 || bind.window.0 == entry.key);
        if entry.pd != pd || refused {
            return Err(KeyError);
        }
        if !mutant!(WindowKeyStays) {
            entry.key = bind.window.0;
        }
        let to = (bind.length > 0).then_some(Bound { bind: *bind, qpn });
        self.rebind(bind.window.0 >> 8, to);
        Ok(())
    }

    /// Returns the key that a type 1 window gets from a binding that is posted next: earlier bindings may still wait in a queue.
    /// `window` is the key that is valid at present, or the key of the most recently posted binding.
    pub(crate) fn next_window_key(&self, window: RKey) -> Option<RKey> {
        let entry = self.entries.get(&(window.0 >> 8))?;
        match entry.kind {
            Keyed::Window {
                kind: WindowType::One,
                posted,
                ..
            } if [entry.key, posted.0].contains(&window.0) => Some(posted.next()),
            _ => None,
        }
    }

    /// Records the key of a type 1 window whose binding was posted.
    pub(crate) fn keep_window_key(&mut self, window: RKey) {
        let entry = self.entries.get_mut(&(window.0 >> 8));
        if let Some(Keyed::Window { posted, .. }) = entry.map(|entry| &mut entry.kind) {
            *posted = window;
        }
    }

    /// Gives a region its memory on behalf of a work request. IBTA Vol 1, 10.6.3.4.
    pub(crate) fn fill(&mut self, registration: &Registration, pd: Pd) -> Result<(), KeyError> {
        let key = registration.key.0;
        let entry = self.entries.get_mut(&(key >> 8)).filter(|entry| entry.pd == pd);
        let entry = entry.ok_or(KeyError)?;
        let Keyed::Fast { length_max, spec } = &mut entry.kind else {
            return Err(KeyError);
        };
        if spec.is_some() || registration.spec.length > *length_max {
            return Err(KeyError);
        }
        *spec = Some(registration.spec.clone().checked().map_err(|_| KeyError)?);
        entry.key = key;
        Ok(())
    }

    /// Invalidates a key until its region is registered or its window is bound again. Fails for a region with bound windows. IBTA Vol
    /// 1, 10.6.7.2.3.
    pub(crate) fn invalidate(&mut self, rkey: RKey, pd: Pd, qpn: Qpn) -> Result<(), KeyError> {
        let entry = self.exact_mut(rkey.0).filter(|entry| entry.pd == pd);
        let entry = entry.ok_or(KeyError)?;
        match &mut entry.kind {
            Keyed::Fast { spec, .. } if entry.windows == 0 => {
                let ended = spec.take().ok_or(KeyError)?;
                self.retired.retire(ended.memory);
            }
            Keyed::Window {
                kind: WindowType::Two,
                bound,
                ..
            } if bound.is_some_and(|bound| bound.qpn == qpn) => self.rebind(rkey.0 >> 8, None),
            _ => return Err(KeyError),
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    // Inspection.

    pub(crate) fn pds(&self) -> impl Iterator<Item = Pd> {
        let used = self.pds.iter().enumerate().filter(|(_, used)| **used);
        used.map(|(i, _)| Pd(i as u32))
    }

    /// Returns the protection domain of each region and window.
    pub(crate) fn domains(&self) -> impl Iterator<Item = Pd> {
        self.entries.values().map(|entry| entry.pd)
    }

    /// Returns regions and windows by the high 24 bits of their keys.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.entries.keys().copied()
    }

    /// Returns the reason for which [`Regions::remote`] returns nothing, or a view without these bytes.
    pub(crate) fn denial(
        &self,
        rkey: u32,
        pd: Pd,
        qpn: Qpn,
        (va, length): (u64, u64),
        needs: Access,
    ) -> Denial {
        let Some(entry) = self.exact(rkey) else {
            return Denial::NoKey;
        };
        if entry.pd != pd {
            return Denial::OtherDomain;
        }
        let has = match &entry.kind {
            Keyed::Window { kind, bound, .. } => match bound {
                None => return Denial::NoKey,
                Some(bound) if *kind == WindowType::Two && bound.qpn != qpn => return Denial::OtherWindow,
                Some(bound) => bound.bind.access,
            },
            Keyed::Region(spec) => spec.access,
            Keyed::Fast { spec: Some(spec), .. } => spec.access,
            Keyed::Fast { spec: None, .. } => return Denial::NoKey,
        };
        if !has.contains(needs) {
            return Denial::NoRight { needs, has };
        }
        match self.remote(rkey, pd, qpn, needs) {
            Some(view) if view.offset_of(va, length).is_none() => Denial::OutOfRange {
                begin: view.iova,
                length: view.length,
            },
            // The memory behind the key has gone or has failed.
            _ => Denial::Memory,
        }
    }

    pub(crate) fn detail(&self, mrn: u32) -> Option<RegionDetail> {
        let entry = self.entries.get(&mrn)?;
        let of_spec = |spec: &RegionSpec| (spec.view().iova, spec.length, spec.access);
        let nothing = (0, 0, Access::empty());
        let (kind, (iova, length, access)) = match &entry.kind {
            Keyed::Region(spec) => (RegionKind::Memory, of_spec(spec)),
            Keyed::Fast { spec, .. } => (RegionKind::Fast, spec.as_ref().map_or(nothing, of_spec)),
            Keyed::Window { kind, bound, .. } => {
                let bound = bound.map(|Bound { bind, .. }| (bind.va, bind.length, bind.access));
                (RegionKind::Window(*kind), bound.unwrap_or(nothing))
            }
        };
        Some(RegionDetail {
            mrn,
            kind,
            rkey: entry.key,
            pd: entry.pd,
            iova,
            length,
            access,
            sharing: entry.spec().and_then(|spec| spec.memory.sharing()),
        })
    }
}

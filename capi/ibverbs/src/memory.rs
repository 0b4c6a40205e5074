//! Protection domains and memory regions.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use rdmux_memory::ApplicationMemory;
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{
    Access, Memory, MemoryRegion, MemoryWindow, ProtectionDomain, RegisterError, SendFlags, WindowType,
};

use crate::channel::errno_of;
use crate::context::ContextObject;
use crate::domains::Parent;
use crate::queue_pair::{QpObject, errno_of_post};
use crate::uses::{Use, Uses};
use crate::{abi, made, warn};

/// Object behind a program's `struct ibv_pd` pointer.
#[repr(C)]
pub(crate) struct PdObject {
    pub(crate) shown: abi::Pd,
    pub(crate) domain: ProtectionDomain,
    pub(crate) uses: Uses,
    /// Attributes of a parent domain.
    pub(crate) parent_of: Option<Parent>,
}

impl PdObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that `ibv_alloc_pd` gave out, and is not deallocated.
    pub(crate) unsafe fn of<'a>(domain: *mut abi::Pd) -> &'a PdObject {
        // SAFETY: as the caller says.
        unsafe { &*domain.cast::<PdObject>() }
    }
}

/// Makes a protection domain of an open context.
pub(crate) fn alloc_pd(context: *mut abi::Context) -> Result<*mut abi::Pd, c_int> {
    // SAFETY: an open context: what calls this has one.
    let own = unsafe { ContextObject::of(context) };
    let domain = own.device.alloc_pd().map_err(|error| errno_of(&error))?;
    let mut objects = own.objects();
    let handle = objects.new_handle();
    let made = new_domain(context, handle, domain, Uses::default(), None);
    objects.domains.insert(handle, made);
    Ok(made)
}

/// Makes the object that a program gets for a domain.
pub(crate) fn new_domain(
    context: *mut abi::Context,
    handle: u32,
    domain: ProtectionDomain,
    uses: Uses,
    parent_of: Option<Parent>,
) -> *mut abi::Pd {
    let shown = abi::Pd { context, handle };
    let domain = PdObject {
        shown,
        domain,
        uses,
        parent_of,
    };
    Box::into_raw(Box::new(domain)).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut abi::Context) -> *mut abi::Pd {
    made(alloc_pd(context))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(domain: *mut abi::Pd) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*domain).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: a domain that was made, says the caller.
    if let Err(errno) = unsafe { PdObject::of(domain) }.uses.check_unused() {
        return errno;
    }
    // SAFETY: as the caller says.
    unsafe { end_domain(domain) }
}

/// Ends a program's object for a domain.
///
/// # Safety
/// It was made, and is not used any more.
unsafe fn end_domain(domain: *mut abi::Pd) -> c_int {
    // SAFETY: a domain that was made, of a context that is open as long, says the caller.
    let mut objects = unsafe { ContextObject::of((*domain).context) }.objects();
    // SAFETY: as above.
    let handle = unsafe { (*domain).handle };
    // An imported domain has the handle of another.
    if objects.domains.get(&handle) == Some(&domain) {
        objects.domains.remove(&handle);
    }
    drop(objects);
    // SAFETY: made by a Box in `new_domain`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(domain.cast::<PdObject>()) });
    0
}

/// Ends a domain whose context is closed.
///
/// # Safety
/// It was made, has left the objects, and is not used any more.
pub(crate) unsafe fn end_left(domain: *mut abi::Pd) {
    // SAFETY: as the caller says.
    if unsafe { PdObject::of(domain) }.uses.check_unused().is_ok() {
        // SAFETY: made by a Box in `new_domain`; the rest as the caller says.
        drop(unsafe { Box::from_raw(domain.cast::<PdObject>()) });
    }
}

/// Object behind a program's `struct ibv_mr` pointer.
#[repr(C)]
pub(crate) struct MrObject {
    /// `registered` is held while the fields that a re-registration changes are written.
    shown: UnsafeCell<abi::Mr>,
    registered: Mutex<Registered>,
}

/// Properties of a region that a re-registration changes.
struct Registered {
    /// `None` for an imported region, which belongs to another.
    region: Option<MemoryRegion>,
    memory: Arc<dyn Memory>,
    /// Offset in the memory at which it begins.
    offset: u64,
    access: Access,
    /// Its domain; `None` for an imported region.
    of: Option<Use>,
}

impl MrObject {
    /// Returns whether memory windows are bound to it.
    fn has_windows(&self) -> bool {
        let registered = self.registered();
        registered.region.as_ref().is_some_and(MemoryRegion::has_windows)
    }

    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that a registration gave out, and is not deregistered.
    unsafe fn of<'a>(region: *mut abi::Mr) -> &'a MrObject {
        // SAFETY: as the caller says.
        unsafe { &*region.cast::<MrObject>() }
    }

    fn make(shown: abi::Mr, registered: Registered) -> *mut abi::Mr {
        let region = MrObject {
            shown: UnsafeCell::new(shown),
            registered: Mutex::new(registered),
        };
        Box::into_raw(Box::new(region)).cast()
    }

    fn registered(&self) -> MutexGuard<'_, Registered> {
        self.registered.lock()
    }
}

/// Returns the rights that a program asks for. Rights that the specification calls optional may be ignored:
/// IBV_ACCESS_OPTIONAL_RANGE.
pub(crate) fn rights(access: u32) -> Result<Access, c_int> {
    Access::from_bits(access & !0x3ff0_0000).ok_or(libc::EINVAL)
}

/// Registers `length` bytes at `offset` of a memory, and makes the structure that the program gets for them.
///
/// # Safety
/// A domain that was made, and is not deallocated.
pub(crate) unsafe fn register_memory(
    pd: *mut abi::Pd,
    memory: Arc<dyn Memory>,
    (offset, length): (u64, u64),
    iova: u64,
    access: Access,
) -> Result<*mut abi::Mr, c_int> {
    // SAFETY: as the caller says.
    let domain = unsafe { PdObject::of(pd) };
    let region = domain.domain.reg_mr(memory.clone(), offset, length, iova, access);
    let region = region.map_err(errno_of_register)?;
    // SAFETY: of an open context, which lives as long as its objects.
    let mut objects = unsafe { ContextObject::of(domain.shown.context) }.objects();
    let handle = objects.new_handle();
    let shown = abi::Mr {
        context: domain.shown.context,
        pd,
        addr: std::ptr::null_mut(),
        length: length as usize,
        handle,
        lkey: region.lkey().0,
        rkey: region.rkey().0,
    };
    let registered = Registered {
        region: Some(region),
        memory,
        offset,
        access,
        of: Some(domain.uses.begin()),
    };
    let made = MrObject::make(shown, registered);
    objects.regions.insert(handle, made);
    Ok(made)
}

/// Registers memory of the program.
///
/// # Safety
/// As `ibv_reg_mr(3)` has it.
pub(crate) unsafe fn register(
    pd: *mut abi::Pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> Result<*mut abi::Mr, c_int> {
    let access = rights(access)?;
    // SAFETY: memory of the program's, which it lets its device and peers use, says `ibv_reg_mr(3)`.
    let memory = Arc::new(unsafe { ApplicationMemory::new(address as u64, length as u64) });
    // SAFETY: as the caller says.
    let made = unsafe { register_memory(pd, memory, (0, length as u64), iova, access) }?;
    // SAFETY: just made.
    unsafe { (*made).addr = address };
    Ok(made)
}

fn errno_of_register(error: RegisterError) -> c_int {
    match error {
        RegisterError::NoResources | RegisterError::Limit(_) => libc::ENOMEM,
        RegisterError::WindowsBound => libc::EBUSY,
        RegisterError::Unsupported(_) => {
            // The number alone would not say what the memory lacks.
            warn(format_args!("registering memory: {error}"));
            libc::EINVAL
        }
        _ => libc::EINVAL,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut abi::Pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut abi::Mr {
    // SAFETY: as the caller says.
    made(unsafe { register(pd, address, length, address as u64, access.cast_unsigned()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut abi::Pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut abi::Mr {
    // SAFETY: as the caller says.
    made(unsafe { register(pd, address, length, iova, access.cast_unsigned()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut abi::Pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut abi::Mr {
    // SAFETY: as the caller says.
    made(unsafe { register(pd, address, length, iova, access) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(region: *mut abi::Mr) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*region).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: a region that was made, says the caller.
    if unsafe { MrObject::of(region) }.has_windows() {
        return libc::EBUSY;
    }
    // SAFETY: a region that was made, of a context that is open as long, says the caller.
    let mut objects = unsafe { ContextObject::of((*region).context) }.objects();
    // SAFETY: as above.
    let handle = unsafe { (*region).handle };
    // An imported region has the handle of another.
    if objects.regions.get(&handle) == Some(&region) {
        objects.regions.remove(&handle);
    }
    drop(objects);
    // SAFETY: as the caller says.
    unsafe { end_region(region) };
    0
}

/// Ends a region. A region that was not imported is deregistered.
///
/// # Safety
/// It was made, has left the objects, and is not used any more.
pub(crate) unsafe fn end_region(region: *mut abi::Mr) {
    // SAFETY: made by a Box; the rest as the caller says.
    let ended = unsafe { Box::from_raw(region.cast::<MrObject>()) };
    let Registered { region, memory, .. } = ended.registered.into_inner();
    if let Some(region) = region {
        drop(region);
        give_back(&memory);
    }
}

/// Gives memory of the program back that no region has any more: from here on the program does with it what it likes, while the device may
/// still keep the value for a moment.
fn give_back(memory: &Arc<dyn Memory>) {
    let memory = memory
        .as_any()
        .and_then(|any| any.downcast_ref::<ApplicationMemory>());
    if let Some(memory) = memory {
        memory.give_back();
    }
}

/// `enum ibv_rereg_mr_flags`, and the values that `ibv_rereg_mr` returns when it fails without any change.
const CHANGE_TRANSLATION: c_int = 1;
const CHANGE_PD: c_int = 1 << 1;
const CHANGE_ACCESS: c_int = 1 << 2;
const INPUT: c_int = -1;
const COMMAND_UNCHANGED: c_int = -4;

/// Changes a region.
///
/// # Safety
/// As `ibv_rereg_mr(3)` has it.
unsafe fn change(
    own: &MrObject,
    flags: c_int,
    pd: *mut abi::Pd,
    (address, length): (*mut c_void, usize),
    access: c_int,
) -> Result<(), c_int> {
    let mut registered = own.registered();
    let registered = &mut *registered;
    let shown = own.shown.get();
    // SAFETY: only the holder of what is registered writes it, as here.
    let (pd_before, address_before, length_before) = unsafe { ((*shown).pd, (*shown).addr, (*shown).length) };
    let region = registered.region.as_mut().ok_or(libc::EOPNOTSUPP)?;
    let access = if flags & CHANGE_ACCESS != 0 {
        rights(access.cast_unsigned())?
    } else {
        registered.access
    };
    let into = if flags & CHANGE_PD != 0 { pd } else { pd_before };
    let (memory, offset): (Arc<dyn Memory>, u64) = if flags & CHANGE_TRANSLATION != 0 {
        // SAFETY: as the caller says.
        let memory = unsafe { ApplicationMemory::new(address as u64, length as u64) };
        (Arc::new(memory), 0)
    } else {
        (registered.memory.clone(), registered.offset)
    };
    let (iova, address, length) = if flags & CHANGE_TRANSLATION != 0 {
        (address as u64, address, length)
    } else {
        (region.iova(), address_before, length_before)
    };
    // SAFETY: a domain that was made, says the caller.
    let domain = unsafe { PdObject::of(into) };
    let changed = region.rereg_in(
        &domain.domain,
        memory.clone(),
        offset,
        length as u64,
        iova,
        access,
    );
    changed.map_err(errno_of_register)?;
    registered.of = Some(domain.uses.begin());
    let before = std::mem::replace(&mut registered.memory, memory);
    if !Arc::ptr_eq(&before, &registered.memory) {
        give_back(&before);
    }
    (registered.offset, registered.access) = (offset, access);
    // SAFETY: as above.
    unsafe { ((*shown).pd, (*shown).addr, (*shown).length) = (into, address, length) };
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_rereg_mr(
    region: *mut abi::Mr,
    flags: c_int,
    pd: *mut abi::Pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let known = CHANGE_TRANSLATION | CHANGE_PD | CHANGE_ACCESS;
    if flags == 0 || flags & !known != 0 || flags & CHANGE_PD != 0 && pd.is_null() {
        crate::set_errno(libc::EINVAL);
        return INPUT;
    }
    // SAFETY: a region that was made, says the caller, and the rest.
    match unsafe { change(MrObject::of(region), flags, pd, (address, length), access) } {
        Ok(()) => 0,
        Err(errno) => {
            crate::set_errno(errno);
            COMMAND_UNCHANGED
        }
    }
}

/// Imports a region of the process into another context, by its handle. It ends with the one that was registered.
///
/// # Safety
/// A domain that was made, and is not deallocated.
unsafe fn import(pd: *mut abi::Pd, handle: u32) -> Result<*mut abi::Mr, c_int> {
    // SAFETY: as the caller says.
    let context = unsafe { (*pd).context };
    // SAFETY: an open context, which lives as long as its objects.
    let objects = unsafe { ContextObject::of(context) }.objects();
    let found = *objects.regions.get(&handle).ok_or(libc::ENOENT)?;
    // SAFETY: it is there while it is among the objects, which are held.
    let found = unsafe { MrObject::of(found) };
    let registered = found.registered();
    // SAFETY: only the holder of what is registered writes it, as here.
    let known = unsafe { &*found.shown.get() };
    let shown = abi::Mr {
        context,
        pd,
        addr: std::ptr::null_mut(),
        ..*known
    };
    let imported = Registered {
        region: None,
        memory: registered.memory.clone(),
        offset: registered.offset,
        access: registered.access,
        of: None,
    };
    Ok(MrObject::make(shown, imported))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_mr(pd: *mut abi::Pd, handle: u32) -> *mut abi::Mr {
    // SAFETY: as the caller says.
    made(unsafe { import(pd, handle) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_unimport_mr(region: *mut abi::Mr) {
    // SAFETY: as the caller says.
    unsafe { ibv_dereg_mr(region) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_pd(context: *mut abi::Context, handle: u32) -> *mut abi::Pd {
    // SAFETY: an open context, says the caller.
    let objects = unsafe { ContextObject::of(context) }.objects();
    // SAFETY: it is there while it is among the objects, which are held.
    let found = objects
        .domains
        .get(&handle)
        .map(|found| unsafe { PdObject::of(*found) });
    made(found.map_or(Err(libc::ENOENT), |found| {
        let (domain, uses) = (found.domain.clone(), found.uses.clone());
        Ok(new_domain(context, handle, domain, uses, None))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_unimport_pd(domain: *mut abi::Pd) {
    // SAFETY: as the caller says. Its users are those of the one that it was imported from.
    unsafe { end_domain(domain) };
}

/// Object behind a program's `struct ibv_mw` pointer.
#[repr(C)]
struct MwObject {
    /// The program binds it from one thread at a time.
    shown: UnsafeCell<abi::Mw>,
    window: MemoryWindow,
    _domain: Use,
}

unsafe fn allocate(pd: *mut abi::Pd, mw_type: u32) -> Result<*mut abi::Mw, c_int> {
    let window_type = match mw_type {
        1 => WindowType::One,
        2 => WindowType::Two,
        _ => return Err(libc::EINVAL),
    };
    // SAFETY: a domain that was made, says the caller.
    let domain = unsafe { PdObject::of(pd) };
    let window = domain.domain.alloc_mw(window_type).map_err(errno_of_register)?;
    let shown = abi::Mw {
        context: domain.shown.context,
        pd,
        rkey: window.rkey().0,
        handle: 0,
        mw_type,
    };
    Ok(Box::into_raw(Box::new(MwObject {
        shown: UnsafeCell::new(shown),
        window,
        _domain: domain.uses.begin(),
    }))
    .cast())
}

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut abi::Pd, mw_type: u32) -> *mut abi::Mw {
    // SAFETY: as the caller says.
    made(unsafe { allocate(pd, mw_type) })
}

pub(crate) unsafe extern "C" fn dealloc_mw(window: *mut abi::Mw) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*window).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: made by a Box in `allocate`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(window.cast::<MwObject>()) });
    0
}

/// Returns the rights that a window grants. Programs name local writes too, but those are a right of the region.
pub(crate) fn window_access(flags: u32) -> Result<Access, c_int> {
    let access = Access::from_bits(flags).ok_or(libc::EINVAL)?;
    Ok(access.difference(Access::LOCAL_WRITE))
}

pub(crate) unsafe extern "C" fn bind_mw(
    pair: *mut abi::Qp,
    window: *mut abi::Mw,
    bind: *mut abi::MwBind,
) -> c_int {
    // SAFETY: a queue pair and a window that were made, and a structure of the caller's.
    let (pair, own, bind) = unsafe { (QpObject::of(pair), &*window.cast::<MwObject>(), &*bind) };
    let info = bind.bind_info;
    if info.mr.is_null() {
        return libc::EOPNOTSUPP;
    }
    // SAFETY: a region that was made, says the caller.
    let registered = unsafe { MrObject::of(info.mr) }.registered();
    let Some(region) = registered.region.as_ref() else {
        return libc::EOPNOTSUPP;
    };
    let access = match window_access(info.mw_access_flags) {
        Ok(access) => access,
        Err(errno) => return errno,
    };
    let mut flags = SendFlags::from_bits_truncate(bind.send_flags);
    flags.set(
        SendFlags::SIGNALED,
        pair.signal_all || flags.contains(SendFlags::SIGNALED),
    );
    let range = info.addr..info.addr.wrapping_add(info.length);
    let bound = pair
        .pair
        .bind_mw(bind.wr_id, &own.window, region, range, access, flags);
    let bound = bound.map_err(|error| errno_of_post(&error));
    // SAFETY: the program's own structure, of which only the thread that binds the window writes the key.
    crate::status(bound.map(|rkey| unsafe { (*own.shown.get()).rkey = rkey.0 }))
}

/// Pages are fetched when they are used, so advice to fetch them is accepted and ignored.
pub(crate) extern "C" fn advise_mr(
    _: *mut abi::Pd,
    advice: u32,
    _: u32,
    list: *const abi::Sge,
    count: u32,
) -> c_int {
    // IBV_ADVISE_MR_ADVICE_PREFETCH, _WRITE and _NO_FAULT
    if advice > 2 || list.is_null() && count > 0 {
        libc::EINVAL
    } else {
        0
    }
}

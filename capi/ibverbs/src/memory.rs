//! Protection domains and memory regions.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use rdmux_verbs::{
    Access, ApplicationMemory, MemoryRegion, MemoryWindow, ProtectionDomain, RegisterError, SendFlags,
    WindowType,
};

use crate::channel::errno_of;
use crate::context::Context;
use crate::queue_pair::{Pair, errno_of_post};
use crate::{abi, made};

/// What a program's `struct ibv_pd` pointer points at.
#[repr(C)]
pub(crate) struct Domain {
    shown: abi::Pd,
    pub(crate) domain: ProtectionDomain,
}

impl Domain {
    /// What a program's pointer points at.
    ///
    /// # Safety
    /// The pointer is one that `ibv_alloc_pd` gave out, and is not deallocated.
    pub(crate) unsafe fn of<'a>(domain: *mut abi::Pd) -> &'a Domain {
        // SAFETY: as the caller says.
        unsafe { &*domain.cast::<Domain>() }
    }
}

/// Makes a protection domain of an open context.
pub(crate) fn alloc_pd(context: *mut abi::Context) -> Result<*mut abi::Pd, c_int> {
    // SAFETY: an open context: what calls this has one.
    let device = unsafe { &Context::of(context).device };
    let domain = device.alloc_pd().map_err(|error| errno_of(&error))?;
    let shown = abi::Pd { context, handle: 0 };
    Ok(Box::into_raw(Box::new(Domain { shown, domain })).cast())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut abi::Context) -> *mut abi::Pd {
    made(alloc_pd(context))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(domain: *mut abi::Pd) -> c_int {
    // SAFETY: made by a Box in `ibv_alloc_pd`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(domain.cast::<Domain>()) });
    0
}

/// What a program's `struct ibv_mr` pointer points at.
#[repr(C)]
pub(crate) struct Region {
    shown: abi::Mr,
    region: MemoryRegion,
    access: Access,
}

unsafe fn register(
    pd: *mut abi::Pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> Result<*mut abi::Mr, c_int> {
    // Those that the specification calls optional may be ignored: IBV_ACCESS_OPTIONAL_RANGE.
    let access = Access::from_bits(access & !0x3ff0_0000).ok_or(libc::EINVAL)?;
    // SAFETY: a domain that was made, says the caller.
    let domain = unsafe { Domain::of(pd) };
    // SAFETY: memory of the program's, which it lets its device and peers use, says `ibv_reg_mr(3)`.
    let memory = Arc::new(unsafe { ApplicationMemory::new(address as u64, length as u64) });
    let region = domain
        .domain
        .reg_mr_all(memory, iova, access)
        .map_err(|error| match error {
            RegisterError::NoResources => libc::ENOMEM,
            _ => libc::EINVAL,
        })?;
    let shown = abi::Mr {
        context: domain.shown.context,
        pd,
        addr: address,
        length,
        handle: 0,
        lkey: region.lkey().0,
        rkey: region.rkey().0,
    };
    let region = Region {
        shown,
        region,
        access,
    };
    Ok(Box::into_raw(Box::new(region)).cast())
}

fn errno_of_register(error: RegisterError) -> c_int {
    match error {
        RegisterError::NoResources => libc::ENOMEM,
        RegisterError::WindowsBound => libc::EBUSY,
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
    // SAFETY: made by a Box in `register`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(region.cast::<Region>()) });
    0
}

/// `enum ibv_rereg_mr_flags`, and the values of `ibv_rereg_mr` where it fails: it changed nothing.
const CHANGE_TRANSLATION: c_int = 1;
const CHANGE_PD: c_int = 1 << 1;
const CHANGE_ACCESS: c_int = 1 << 2;
const INPUT: c_int = -1;
const COMMAND_UNCHANGED: c_int = -4;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_rereg_mr(
    region: *mut abi::Mr,
    flags: c_int,
    _: *mut abi::Pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let changes = CHANGE_TRANSLATION | CHANGE_ACCESS;
    if flags == 0 || flags & !(changes | CHANGE_PD) != 0 {
        crate::set_errno(libc::EINVAL);
        return INPUT;
    }
    // SAFETY: a region that was made, which one thread changes at a time.
    let own = unsafe { &mut *region.cast::<Region>() };
    let (address, length) = if flags & CHANGE_TRANSLATION != 0 {
        (address, length)
    } else {
        (own.shown.addr, own.shown.length)
    };
    let wanted = Access::from_bits(access.cast_unsigned() & !0x3ff0_0000);
    let access = if flags & CHANGE_ACCESS != 0 {
        wanted
    } else {
        Some(own.access)
    };
    let changed = match access {
        // To another domain it does not go.
        Some(access) if flags & CHANGE_PD == 0 => {
            // SAFETY: as above.
            let memory = Arc::new(unsafe { ApplicationMemory::new(address as u64, length as u64) });
            let iova = if flags & CHANGE_TRANSLATION != 0 {
                address as u64
            } else {
                own.region.iova()
            };
            let changed = own.region.rereg(memory, 0, length as u64, iova, access);
            changed.map(|()| own.access = access).map_err(errno_of_register)
        }
        Some(_) => Err(libc::EOPNOTSUPP),
        None => Err(libc::EINVAL),
    };
    match changed {
        Ok(()) => {
            (own.shown.addr, own.shown.length) = (address, length);
            0
        }
        Err(errno) => {
            crate::set_errno(errno);
            COMMAND_UNCHANGED
        }
    }
}

/// What a program's `struct ibv_mw` pointer points at.
#[repr(C)]
struct Window {
    shown: abi::Mw,
    window: MemoryWindow,
}

unsafe fn allocate(pd: *mut abi::Pd, mw_type: u32) -> Result<*mut abi::Mw, c_int> {
    let window_type = match mw_type {
        1 => WindowType::One,
        2 => WindowType::Two,
        _ => return Err(libc::EINVAL),
    };
    // SAFETY: a domain that was made, says the caller.
    let domain = unsafe { Domain::of(pd) };
    let window = domain.domain.alloc_mw(window_type).map_err(errno_of_register)?;
    let shown = abi::Mw {
        context: domain.shown.context,
        pd,
        rkey: window.rkey().0,
        handle: 0,
        mw_type,
    };
    Ok(Box::into_raw(Box::new(Window { shown, window })).cast())
}

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut abi::Pd, mw_type: u32) -> *mut abi::Mw {
    // SAFETY: as the caller says.
    made(unsafe { allocate(pd, mw_type) })
}

pub(crate) unsafe extern "C" fn dealloc_mw(window: *mut abi::Mw) -> c_int {
    // SAFETY: made by a Box in `allocate`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(window.cast::<Window>()) });
    0
}

/// What a window grants: programs name local writes too, which are the region's.
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
    let (pair, own, bind) = unsafe { (Pair::of(pair), &mut *window.cast::<Window>(), &*bind) };
    let info = bind.bind_info;
    if info.mr.is_null() {
        return libc::EOPNOTSUPP;
    }
    // SAFETY: a region that was made, says the caller.
    let region = unsafe { &*info.mr.cast::<Region>() };
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
        .bind_mw(bind.wr_id, &own.window, &region.region, range, access, flags);
    crate::status(
        bound
            .map(|rkey| own.shown.rkey = rkey.0)
            .map_err(|error| errno_of_post(&error)),
    )
}

/// Pages are fetched when they are used: advice about that is taken, and nothing done.
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

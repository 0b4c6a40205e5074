//! Thread domains, and the parent domains that stand for one and a protection domain. `ibv_alloc_td(3)`, `ibv_alloc_parent_domain(3)`.

use std::ffi::c_int;

use crate::memory::{Domain, new_domain};
use crate::uses::Uses;
use crate::{abi, made};

/// What a program's `struct ibv_td` pointer points at. That its objects are one thread's helps nothing here: their locks are free then.
#[repr(C)]
struct ThreadDomain {
    shown: abi::Td,
    uses: Uses,
}

pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut abi::Context,
    init: *mut abi::TdInitAttr,
) -> *mut abi::Td {
    // SAFETY: a structure of the caller's.
    if unsafe { (*init).comp_mask } != 0 {
        return made(Err(libc::EINVAL));
    }
    let shown = abi::Td { context };
    let uses = Uses::default();
    Box::into_raw(Box::new(ThreadDomain { shown, uses })).cast()
}

pub(crate) unsafe extern "C" fn dealloc_td(domain: *mut abi::Td) -> c_int {
    // SAFETY: a domain that was made, says the caller.
    if let Err(errno) = unsafe { &*domain.cast::<ThreadDomain>() }.uses.check_unused() {
        return errno;
    }
    // SAFETY: made by a Box in `alloc_td`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(domain.cast::<ThreadDomain>()) });
    0
}

unsafe fn alloc(context: *mut abi::Context, init: &abi::ParentDomainInitAttr) -> Result<*mut abi::Pd, c_int> {
    use abi::parent_domain::*;
    let allocators = !init.alloc.is_null() && !init.free.is_null();
    let wanted = init.comp_mask & ALLOCATORS != 0;
    if init.pd.is_null() || init.comp_mask & !(ALLOCATORS | PD_CONTEXT) != 0 || wanted && !allocators {
        return Err(libc::EINVAL);
    }
    // SAFETY: a domain that was made, says the caller.
    let of = unsafe { Domain::of(init.pd) };
    if of.parent_of.is_some() {
        return Err(libc::EINVAL);
    }
    let mut parent_of = vec![of.uses.begin()];
    // SAFETY: null, or a domain that was made.
    if let Some(td) = unsafe { init.td.cast::<ThreadDomain>().as_ref() } {
        parent_of.push(td.uses.begin());
    }
    let (handle, domain) = (of.shown.handle, of.domain.clone());
    Ok(new_domain(
        context,
        handle,
        domain,
        Uses::default(),
        Some(parent_of),
    ))
}

/// Its allocators are for buffers that a device reads from the program's memory. There are none here, so they are never called.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut abi::Context,
    init: *mut abi::ParentDomainInitAttr,
) -> *mut abi::Pd {
    // SAFETY: as the caller says.
    made(unsafe { alloc(context, &*init) })
}

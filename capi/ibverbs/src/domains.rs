//! Thread domains, and the parent domains that combine one with a protection domain. `ibv_alloc_td(3)`,
//! `ibv_alloc_parent_domain(3)`.

use std::ffi::{c_int, c_void};

use crate::memory::{PdObject, new_domain};
use crate::uses::{Use, Uses};
use crate::{abi, made};

/// Object behind a program's `struct ibv_td` pointer. That one thread alone uses its objects brings nothing here: their locks
/// are free then.
#[repr(C)]
struct TdObject {
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
    Box::into_raw(Box::new(TdObject { shown, uses })).cast()
}

pub(crate) unsafe extern "C" fn dealloc_td(domain: *mut abi::Td) -> c_int {
    // SAFETY: a domain that was made, says the caller.
    if let Err(errno) = unsafe { &*domain.cast::<TdObject>() }.uses.check_unused() {
        return errno;
    }
    // SAFETY: made by a Box in `alloc_td`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(domain.cast::<TdObject>()) });
    0
}

/// The attributes of a parent domain beyond its protection domain.
pub(crate) struct Parent {
    pub(crate) allocators: Option<Allocators>,
    /// Domains that it consists of.
    _of: Vec<Use>,
}

/// A program's own allocation of memory that the library would allocate for it.
#[derive(Clone, Copy)]
pub(crate) struct Allocators {
    alloc: abi::AllocMemory,
    free: abi::FreeMemory,
    context: *mut c_void,
}

/// `IBV_ALLOCATOR_USE_DEFAULT`: the library allocates.
const USE_DEFAULT: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

/// No vendor's, and always the same.
const RESOURCE_TYPE: u64 = 0;

impl Allocators {
    /// Allocates memory of the program; `None` if the program leaves that to the library.
    ///
    /// # Safety
    /// The domain is theirs, and is not deallocated.
    pub(crate) unsafe fn alloc(
        &self,
        pd: *mut abi::Pd,
        size: usize,
        alignment: usize,
    ) -> Result<Option<*mut c_void>, c_int> {
        // SAFETY: a function of the program's, called as `ibv_alloc_parent_domain(3)` says.
        match unsafe { (self.alloc)(pd, self.context, size, alignment, RESOURCE_TYPE) } {
            USE_DEFAULT => Ok(None),
            at if at.is_null() => Err(libc::ENOMEM),
            at => Ok(Some(at)),
        }
    }

    /// Frees such memory.
    ///
    /// # Safety
    /// [`Allocators::alloc`] gave it, for this domain; it is not used any more.
    pub(crate) unsafe fn free(&self, pd: *mut abi::Pd, at: *mut c_void) {
        // SAFETY: as above.
        unsafe { (self.free)(pd, self.context, at, RESOURCE_TYPE) };
    }
}

unsafe fn alloc(context: *mut abi::Context, init: &abi::ParentDomainInitAttr) -> Result<*mut abi::Pd, c_int> {
    use abi::parent_domain::*;
    let has = |bit: u32| init.comp_mask & bit != 0;
    // Only the program itself sees this memory: a request that some of it may be unprotected asks for nothing.
    if init.pd.is_null() || has(!(ALLOCATORS | PD_CONTEXT | ALLOW_CC_UNPROTECTED_ALLOC)) {
        return Err(libc::EINVAL);
    }
    let allocators = if has(ALLOCATORS) {
        Some(Allocators {
            alloc: init.alloc.ok_or(libc::EINVAL)?,
            free: init.free.ok_or(libc::EINVAL)?,
            context: if has(PD_CONTEXT) {
                init.pd_context
            } else {
                std::ptr::null_mut()
            },
        })
    } else {
        None
    };
    // SAFETY: a domain that was made, says the caller.
    let of = unsafe { PdObject::of(init.pd) };
    if of.parent_of.is_some() {
        return Err(libc::EINVAL);
    }
    let mut uses = vec![of.uses.begin()];
    // SAFETY: null, or a domain that was made.
    if let Some(td) = unsafe { init.td.cast::<TdObject>().as_ref() } {
        uses.push(td.uses.begin());
    }
    let (handle, domain) = (of.shown.handle, of.domain.clone());
    Ok(new_domain(
        context,
        handle,
        domain,
        Uses::default(),
        Some(Parent {
            allocators,
            _of: uses,
        }),
    ))
}

/// The domain's allocators provide the buffers of `ibv_alloc_buf`. Queues use none: no device reads queues from the program's
/// memory.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut abi::Context,
    init: *mut abi::ParentDomainInitAttr,
) -> *mut abi::Pd {
    // SAFETY: as the caller says.
    made(unsafe { alloc(context, &*init) })
}

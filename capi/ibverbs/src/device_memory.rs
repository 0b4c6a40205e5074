//! Device memory, which a device without a board keeps in the process's pages, and the null region: reads of it give zeros, and
//! writes to it are discarded. `ibv_alloc_dm(3)`, `ibv_alloc_null_mr(3)`.

use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{Access, Atomic, Fault, Memory, Placement};

use crate::context::ContextObject;
use crate::{abi, made, memory, status};

/// Maximum number of bytes of one device memory.
pub(crate) const BYTES_MAX: u64 = 1 << 20;
/// Programs copy to and from device memory by words: offsets and lengths are multiples of these bytes.
const WORD: u64 = 4;

/// Object behind a program's `struct ibv_dm` pointer.
#[repr(C)]
struct DmObject {
    shown: abi::Dm,
    memory: Arc<AnonymousMemory>,
    /// Bytes that the program asked for; the memory has whole pages.
    length: u64,
}

impl DmObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that [`alloc_dm`] or [`ibv_import_dm`] gave out, and is not freed.
    unsafe fn of<'a>(memory: *mut abi::Dm) -> &'a DmObject {
        // SAFETY: as the caller says.
        unsafe { &*memory.cast::<DmObject>() }
    }

    fn give(
        context: *mut abi::Context,
        handle: u32,
        memory: Arc<AnonymousMemory>,
        length: u64,
    ) -> *mut abi::Dm {
        let shown = abi::Dm {
            context,
            memcpy_to_dm: Some(copy_to),
            memcpy_from_dm: Some(copy_from),
            comp_mask: abi::DM_MASK_HANDLE,
            handle,
        };
        let own = DmObject {
            shown,
            memory,
            length,
        };
        Box::into_raw(Box::new(own)).cast()
    }

    /// Returns whether a part of it may be copied.
    fn has(&self, offset: u64, length: usize) -> bool {
        let length = length as u64;
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        inside && offset.is_multiple_of(WORD) && length.is_multiple_of(WORD)
    }
}

unsafe fn alloc(context: *mut abi::Context, attr: &abi::AllocDmAttr) -> Result<*mut abi::Dm, c_int> {
    let length = attr.length as u64;
    // Pages are aligned to 4 KiB at least.
    if attr.comp_mask != 0 || length == 0 || attr.log_align_req > 12 {
        return Err(libc::EINVAL);
    }
    if length > BYTES_MAX {
        return Err(libc::ENOMEM);
    }
    let memory =
        AnonymousMemory::new(attr.length).map_err(|error| error.raw_os_error().unwrap_or(libc::ENOMEM))?;
    // SAFETY: an open context, says the caller.
    let mut objects = unsafe { ContextObject::of(context) }.objects();
    let handle = objects.new_handle();
    let made = DmObject::give(context, handle, Arc::new(memory), length);
    objects.memories.insert(handle, made);
    Ok(made)
}

pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut abi::Context,
    attr: *mut abi::AllocDmAttr,
) -> *mut abi::Dm {
    // SAFETY: as the caller says.
    made(unsafe { alloc(context, &*attr) })
}

pub(crate) unsafe extern "C" fn free_dm(memory: *mut abi::Dm) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*memory).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: a memory that was made, of a context that is open as long, says the caller.
    let (own, mut objects) = unsafe {
        (
            DmObject::of(memory),
            ContextObject::of((*memory).context).objects(),
        )
    };
    // Regions, and programs that imported it, hold it.
    if Arc::strong_count(&own.memory) > 1 {
        return libc::EBUSY;
    }
    objects.memories.remove(&own.shown.handle);
    drop(objects);
    // SAFETY: as the caller says.
    unsafe { end(memory) };
    0
}

/// Ends a program's memory; regions, and programs that imported it, still hold it.
///
/// # Safety
/// It was made, has left the objects, and is not used any more.
pub(crate) unsafe fn end(memory: *mut abi::Dm) {
    // SAFETY: made by a Box in `give`; the rest as the caller says.
    drop(unsafe { Box::from_raw(memory.cast::<DmObject>()) });
}

unsafe extern "C" fn copy_to(memory: *mut abi::Dm, offset: u64, from: *const c_void, length: usize) -> c_int {
    // SAFETY: a memory that was made, says the caller.
    let own = unsafe { DmObject::of(memory) };
    if !own.has(offset, length) {
        return libc::EINVAL;
    }
    if length == 0 {
        return 0;
    }
    // SAFETY: as many bytes of the caller's.
    let bytes = unsafe { slice::from_raw_parts(from.cast::<u8>(), length) };
    status(own.memory.write(offset, bytes).map_err(|_| libc::EFAULT))
}

unsafe extern "C" fn copy_from(to: *mut c_void, memory: *mut abi::Dm, offset: u64, length: usize) -> c_int {
    // SAFETY: a memory that was made, says the caller.
    let own = unsafe { DmObject::of(memory) };
    if !own.has(offset, length) {
        return libc::EINVAL;
    }
    let mut bytes = vec![0; length];
    let read = own.memory.read(offset, &mut bytes).map_err(|_| libc::EFAULT);
    if read.is_ok() && length > 0 {
        // SAFETY: room for as many bytes of the caller's, which are none of this function's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast::<u8>(), length) };
    }
    status(read)
}

pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut abi::Pd,
    memory: *mut abi::Dm,
    offset: u64,
    length: usize,
    access: u32,
) -> *mut abi::Mr {
    // SAFETY: a memory that was made, says the caller.
    let own = unsafe { DmObject::of(memory) };
    let inside = offset
        .checked_add(length as u64)
        .is_some_and(|end| end <= own.length);
    let access = memory::rights(access).and_then(|access| {
        // The region has no address but its beginning.
        let fits = inside && access.contains(Access::ZERO_BASED);
        if fits { Ok(access) } else { Err(libc::EINVAL) }
    });
    made(access.and_then(|access| {
        let part = (offset, length as u64);
        // SAFETY: a domain that was made, says the caller.
        unsafe { memory::register_memory(pd, own.memory.clone(), part, 0, access) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_import_dm(context: *mut abi::Context, handle: u32) -> *mut abi::Dm {
    // SAFETY: an open context, says the caller.
    let objects = unsafe { ContextObject::of(context) }.objects();
    // SAFETY: it is there while it is among the objects, which are held.
    let found = objects
        .memories
        .get(&handle)
        .map(|found| unsafe { DmObject::of(*found) });
    made(found.map_or(Err(libc::ENOENT), |found| {
        Ok(DmObject::give(
            context,
            handle,
            found.memory.clone(),
            found.length,
        ))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_unimport_dm(memory: *mut abi::Dm) {
    // SAFETY: made by a Box in `give`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(memory.cast::<DmObject>()) });
}

/// Memory that discards writes and reads as zeros.
#[derive(Debug)]
struct Null;

impl Memory for Null {
    fn len(&self) -> u64 {
        u64::MAX
    }

    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), Fault> {
        out.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Ok(0)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Ok(())
    }
}

/// Allocates a null region, for the requests of its own program alone.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut abi::Pd) -> *mut abi::Mr {
    // SAFETY: a domain that was made, says the caller.
    made(unsafe { memory::register_memory(pd, Arc::new(Null), (0, u64::MAX), 0, Access::LOCAL_WRITE) })
}

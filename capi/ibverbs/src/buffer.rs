//! Buffers that the library allocates for a program's regions, and registration by one structure of attributes. `ibv_alloc_buf(3)`,
//! `ibv_reg_mr_ex(3)`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_int, c_void};

use crate::domains::Allocators;
use crate::memory::{self, PdObject};
use crate::uses::Use;
use crate::{abi, made, minus_one};

/// Memory that a program's `struct ibv_buf` pointer points at.
struct Buffer {
    pd: *mut abi::Pd,
    address: *mut c_void,
    size: usize,
    memory: Backing,
    _domain: Use,
}

/// Source of a buffer's bytes.
enum Backing {
    Heap(Layout),
    /// The allocators of its parent domain.
    Program(Allocators),
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &self.memory {
            // SAFETY: allocated with this layout in `alloc`.
            Backing::Heap(layout) => unsafe { dealloc(self.address.cast(), *layout) },
            // SAFETY: allocated by them in `alloc`, for this domain, which the buffer keeps.
            Backing::Program(allocators) => unsafe { allocators.free(self.pd, self.address) },
        }
    }
}

/// Allocates whole pages.
///
/// # Safety
/// A domain that was made, and is not deallocated.
unsafe fn alloc(pd: *mut abi::Pd, size: usize) -> Result<Box<Buffer>, c_int> {
    // SAFETY: as the caller says.
    let domain = unsafe { PdObject::of(pd) };
    let page = rustix::param::page_size();
    let layout = Layout::from_size_align(size, page).map_err(|_| libc::ENOMEM)?;
    if size == 0 {
        return Err(libc::EINVAL);
    }
    let allocators = domain.parent_of.as_ref().and_then(|parent| parent.allocators);
    let given = match allocators {
        // SAFETY: as the caller says.
        Some(allocators) => unsafe { allocators.alloc(pd, size, page) }?.map(|at| (at, allocators)),
        None => None,
    };
    let (address, memory) = match given {
        Some((address, allocators)) => (address, Backing::Program(allocators)),
        None => {
            // SAFETY: the size is not zero.
            let address = unsafe { alloc_zeroed(layout) };
            (address.cast(), Backing::Heap(layout))
        }
    };
    if address.is_null() {
        return Err(libc::ENOMEM);
    }
    let _domain = domain.uses.begin();
    Ok(Box::new(Buffer {
        pd,
        address,
        size,
        memory,
        _domain,
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_buf(pd: *mut abi::Pd, size: usize, buffer: *mut *mut c_void) -> *mut c_void {
    // SAFETY: a domain that was made, says the caller.
    made(unsafe { alloc(pd, size) }.map(|own| {
        let address = own.address;
        // SAFETY: a place of the caller's.
        unsafe { *buffer = Box::into_raw(own).cast() };
        address
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_buf(buffer: *mut c_void) {
    // SAFETY: made by a Box in `ibv_alloc_buf`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(buffer.cast::<Buffer>()) });
}

/// Buffers are ordinary memory: none is a dma-buf.
#[unsafe(no_mangle)]
extern "C" fn ibv_export_buf_dmabuf_fd(_: *mut c_void) -> c_int {
    minus_one(Err(libc::ENODATA))
}

/// `enum ibv_mr_init_attr_mask`.
mod mask {
    pub(super) const IOVA: u64 = 1;
    pub(super) const ADDR: u64 = 1 << 1;
    pub(super) const FD: u64 = 1 << 2;
    pub(super) const FD_OFFSET: u64 = 1 << 3;
    pub(super) const DMAH: u64 = 1 << 4;
    pub(super) const BUF: u64 = 1 << 5;
}

/// `struct ibv_mr_init_attr`, of rdma-core 65. Programs that were compiled earlier have a shorter one, so the library does not
/// read fields that `comp_mask` does not name.
#[repr(C)]
struct MrInitAttr {
    length: usize,
    access: c_int,
    comp_mask: u64,
    iova: u64,
    addr: *mut c_void,
    fd: c_int,
    fd_offset: u64,
    dmah: *mut c_void,
    buf: *const Buffer,
}

const _: () = assert!(size_of::<MrInitAttr>() == 72);

/// Registers the memory that the attributes name.
///
/// # Safety
/// As `ibv_reg_mr_ex(3)` has it.
unsafe fn register(pd: *mut abi::Pd, attr: *const MrInitAttr) -> Result<*mut abi::Mr, c_int> {
    // SAFETY: these are there in each version of the structure, says the caller.
    let (length, access, has) = unsafe { ((*attr).length, (*attr).access, (*attr).comp_mask) };
    if has & !(mask::IOVA | mask::ADDR | mask::FD | mask::FD_OFFSET | mask::DMAH | mask::BUF) != 0 {
        return Err(libc::EINVAL);
    }
    let of_file = has & (mask::FD | mask::FD_OFFSET) != 0;
    if has & mask::BUF != 0 {
        // SAFETY: the structure has what its mask names.
        let (addr, buffer) = unsafe { ((*attr).addr, &*(*attr).buf) };
        let end = addr.addr().checked_add(length);
        let inside =
            addr >= buffer.address && end.is_some_and(|end| end <= buffer.address.addr() + buffer.size);
        if of_file || has & mask::ADDR == 0 || pd != buffer.pd || !inside {
            return Err(libc::EINVAL);
        }
    }
    // dma-buf memory of another device, and hints for a PCIe device's cache.
    if of_file || has & mask::DMAH != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if has & mask::ADDR == 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: the structure has what its mask names.
    let (addr, iova) = unsafe {
        let addr = (*attr).addr;
        let iova = if has & mask::IOVA != 0 {
            (*attr).iova
        } else {
            addr as u64
        };
        (addr, iova)
    };
    // SAFETY: as the caller says.
    unsafe { memory::register(pd, addr, length, iova, access.cast_unsigned()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_ex(pd: *mut abi::Pd, attr: *const MrInitAttr) -> *mut abi::Mr {
    // SAFETY: as the caller says.
    made(unsafe { register(pd, attr) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_buf_mr(
    pd: *mut abi::Pd,
    buf: *const Buffer,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut abi::Mr {
    let attr = MrInitAttr {
        length,
        access,
        comp_mask: mask::BUF | mask::ADDR,
        iova: 0,
        addr,
        fd: -1,
        fd_offset: 0,
        dmah: std::ptr::null_mut(),
        buf,
    };
    // SAFETY: as the caller says.
    made(unsafe { register(pd, &raw const attr) })
}

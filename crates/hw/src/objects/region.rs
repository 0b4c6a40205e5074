//! Memory regions and windows.
#![allow(unsafe_code, reason = "objects of a C library, and calls of it")]

use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdmux_memory::{dma_buf, mapped_at};
use rdmux_rnic::{Fault, Memory};
use rdmux_verbs::abi;
use rustix::io::Errno;

use super::{Pd, done, made};

shared! { Mr Mw }

/// A memory region. It holds its memory until the device has let go of it.
#[derive(Debug)]
pub(crate) struct Mr {
    pd: Arc<Pd>,
    pub(super) pointer: NonNull<abi::Mr>,
    memory: Option<Arc<dyn Memory>>,
    /// Offset in the memory.
    offset: u64,
    length: u64,
}

impl Mr {
    /// Registers `length` bytes at an offset of a memory. `None`: the memory has no pages that a device may reach by itself.
    pub(crate) fn new(
        pd: &Arc<Pd>,
        memory: Arc<dyn Memory>,
        offset: u64,
        length: u64,
        iova: u64,
        access: u32,
    ) -> Option<Result<Mr, Errno>> {
        let (library, pd_pointer) = (&pd.context.library, pd.pointer.as_ptr());
        let pointer = if let Some(dma_buf) = dma_buf(&*memory) {
            let (fd, access) = (dma_buf.as_raw_fd(), access.cast_signed());
            // SAFETY: the kernel checks the range, and keeps the dma-buf. What a device writes there, no reference of this process sees.
            unsafe { (library.ibv_reg_dmabuf_mr)(pd_pointer, offset, length as usize, iova, fd, access) }
        } else {
            let address = mapped_at(&*memory, offset, length)?;
            let address = std::ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: the bytes lie inside of a mapping that lives as long as the memory, which is held until they are deregistered, and of
            // which there are no references (`rdmux_memory::mapping`).
            unsafe { (library.ibv_reg_mr_iova2)(pd_pointer, address, length as usize, iova, access) }
        };
        Some(made(pointer).map(|pointer| Mr {
            pd: pd.clone(),
            pointer,
            memory: Some(memory),
            offset,
            length,
        }))
    }

    pub(crate) fn keys(&self) -> (u32, u32) {
        // SAFETY: the region lives, and its keys do not change.
        unsafe { ((*self.pointer.as_ptr()).lkey, (*self.pointer.as_ptr()).rkey) }
    }

    /// Copies bytes out, at an offset of the region.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let inside = offset
            .checked_add(out.len() as u64)
            .is_some_and(|end| end <= self.length);
        let memory = self.memory.as_ref().filter(|_| inside).ok_or(Fault::Unmapped)?;
        memory.read(self.offset + offset, out)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner.
        let result = done(unsafe { (self.pd.context.library.ibv_dereg_mr)(self.pointer.as_ptr()) });
        if result.is_err() {
            // The device still reaches it: nobody else may get its bytes.
            std::mem::forget(self.memory.take());
        }
    }
}

/// A memory window.
#[derive(Debug)]
pub(crate) struct Mw {
    pd: Arc<Pd>,
    pub(super) pointer: NonNull<abi::Mw>,
    dealloc: abi::DeallocMw,
}

impl Mw {
    /// Makes a window of type 1 or 2.
    pub(crate) fn new(pd: &Arc<Pd>, mw_type: u32) -> Result<Mw, Errno> {
        let ops = pd.context.ops();
        let (alloc, dealloc) = ops.alloc_mw.zip(ops.dealloc_mw).ok_or(Errno::OPNOTSUPP)?;
        // SAFETY: the domain lives as long as the window.
        let pointer = made(unsafe { alloc(pd.pointer.as_ptr(), mw_type) })?;
        Ok(Mw {
            pd: pd.clone(),
            pointer,
            dealloc,
        })
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: the window lives. The library writes its key when it is bound: the owner does not do both at a time.
        unsafe { (&raw const (*self.pointer.as_ptr()).rkey).read_volatile() }
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner; it holds its domain.
        unsafe { (self.dealloc)(self.pointer.as_ptr()) };
        let _ = &self.pd;
    }
}

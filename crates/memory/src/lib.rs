//! Memories over which a program registers regions: [`AnonymousMemory`], of this process alone or shareable with peers on the host;
//! [`ApplicationMemory`], addresses of the program's own; [`FileMemory`], reached through the kernel; and [`DaxMemory`], persistent
//! memory (DAX files and devices), mapped; and [`DeviceMemory`], of a PCIe function. Each implements [`Memory`], the trait by which a device accesses bytes.
//!
//! This crate knows no device. [`mapping`] has what the memories stand on: mapped pages, and copies between processes.
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

use std::os::fd::BorrowedFd;

use rdmux_rnic::Memory;

mod anonymous;
mod application;
mod convert;
mod dax;
mod device;
mod domain;
mod file;
mod lease;
pub mod mapping;
mod persist;
mod process;
#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;

pub use anonymous::AnonymousMemory;
pub use application::{ApplicationMemory, SharedPages};
pub use convert::{Convertible, Progress, convertible};
pub use dax::{DaxError, DaxMemory};
pub use device::DeviceMemory;
pub use file::FileMemory;
pub use lease::{FileWatch, Wanted};
pub use mapping::allows_calls_into_processes;
pub use process::{ForeignMemory, NotOffered, ProcessMemory, own_memory};

/// Permanence of a memory's pages: a device may hold on to pages that stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// They stay as long as the memory lives.
    Stay,
    /// They come and go: pages of a file, which belong to the page cache and end where somebody shortens the file.
    ComeAndGo,
}

impl Pages {
    /// Returns the permanence of a memory's pages; `None`: a device cannot reach them by itself.
    pub fn of(memory: &dyn Memory) -> Option<Pages> {
        let pages = memory.pages()?;
        match pages.downcast_ref::<FileMemory>() {
            Some(_) => Some(Pages::ComeAndGo),
            None => {
                let stay =
                    pages.is::<AnonymousMemory>() || pages.is::<DaxMemory>() || pages.is::<DeviceMemory>();
                stay.then_some(Pages::Stay)
            }
        }
    }
}

/// Returns the address in this process of `length` bytes at an offset of a memory. The bytes keep it as long as the memory lives.
pub fn mapped_at(memory: &dyn Memory, offset: u64, length: u64) -> Option<u64> {
    let pages = memory.pages()?;
    let mapping = if let Some(anonymous) = pages.downcast_ref::<AnonymousMemory>() {
        anonymous.mapping()
    } else if let Some(file) = pages.downcast_ref::<FileMemory>() {
        file.hand_out()?
    } else {
        pages.downcast_ref::<DaxMemory>()?.hand_out()
    };
    let end = offset.checked_add(length)?;
    (end <= mapping.len() as u64).then(|| mapping.address() + offset)
}

/// Returns the dma-buf that has the bytes of a memory at the same offsets, for a device that reaches them by itself; `None` if there is none.
pub fn dma_buf(memory: &dyn Memory) -> Option<BorrowedFd<'_>> {
    memory.pages()?.downcast_ref::<DeviceMemory>()?.dma_buf()
}

/// Returns the file in memory that holds the bytes of a memory at the same offsets, for another process that maps it; `None` if no file holds
/// them, or if nothing may bypass the memory.
pub fn shared_file(memory: &dyn Memory) -> Option<BorrowedFd<'_>> {
    let pages = memory.pages()?;
    pages.downcast_ref::<AnonymousMemory>()?.file()
}

/// Fate of bytes when power fails. `docs/persistence.md` says which flush reaches what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PersistenceDomain {
    /// Nothing survives: DRAM, tmpfs.
    None,
    /// The page cache: bytes survive once they are written back and the device's cache is flushed (`fdatasync`).
    File,
    /// Persistent memory and the memory controller's queue before it (ADR): bytes survive once they have left the processor's
    /// caches.
    Adr,
    /// The same and the caches (eADR, or CXL's Global Persistent Flush): bytes survive once every processor sees them.
    Eadr,
    /// The whole system, as with a battery.
    WholeSystem,
}

//! Memory regions. The node reaches their bytes by the first of these ways that there is:
//!
//! 1. It maps them: memory that was allocated for that, and pages of the program that can move into a file (`rdmux_memory`, `convert.rs`).
//!    They move before the node knows the region, so that nothing is written to them meanwhile.
//! 2. It accesses them in this process, which offers it its memory (`rdmux_memory`, `process.rs`): what does not move, and what a region has
//!    outside of its whole pages.

use std::os::fd::BorrowedFd;

use rdmux_memory::{ApplicationMemory, Pages, Progress, mapped_at, shared_file};
use rdmux_rnic::{LKey, Memory, RKey, RegionSpec, RegisterError};
use rdmux_verbs::provider::{self, own};
use rdmux_wire::node::control::{self as wire, Kind, Message};

use super::device::{Device, ProtectionDomain};
use crate::control::convert::register_error;

/// Why memory cannot be registered.
const NOT_SHAREABLE: &str = "memory that a node can neither map nor reach in this process: allocate it as shareable (AnonymousMemory::shareable), or choose another provider";

#[derive(Debug)]
pub(super) struct MemoryRegion {
    device: Device,
    id: u32,
    lkey: LKey,
    rkey: RKey,
}

/// The way by which the node reaches a region.
enum Way<'a> {
    /// All bytes are in a file, from this offset on.
    File(BorrowedFd<'a>, u64),
    /// The bytes begin at this address of the process, and some of their pages are in a file.
    Process(u64, Option<(BorrowedFd<'a>, wire::Pages)>),
}

/// Returns the way to a region's bytes; `None` if there is none.
fn way(memory: &dyn Memory, offset: u64, length: u64) -> Option<Way<'_>> {
    if let Some(file) = shared_file(memory) {
        return Some(Way::File(file, offset));
    }
    if Pages::of(memory) == Some(Pages::Stay) {
        return Some(Way::Process(mapped_at(memory, offset, length)?, None));
    }
    let memory: &ApplicationMemory = memory.as_any()?.downcast_ref()?;
    let address = memory.address().checked_add(offset)?;
    move_pages(memory);
    let Some(pages) = memory.shared_pages() else {
        return Some(Way::Process(address, None));
    };
    let (first, last) = (pages.addresses.start, pages.addresses.end);
    let end = address.checked_add(length)?;
    if first <= address && end <= last {
        return Some(Way::File(pages.file, address - first));
    }
    let (from, to) = (first.max(address), last.min(end));
    let is_whole = from == first && from < to;
    // The file is passed on with its first page: a region that begins behind that is reached in the process.
    let pages = is_whole.then_some((
        pages.file,
        wire::Pages {
            address: from,
            length: to.saturating_sub(from),
        },
    ));
    Some(Way::Process(address, pages))
}

/// Moves the whole pages of the program's memory into a file, if they can move now.
fn move_pages(memory: &ApplicationMemory) {
    loop {
        match memory.share_some(1) {
            Ok(Progress::More) => {}
            Ok(Progress::Done | Progress::NotHere | Progress::Elsewhere) => return,
            Err(reason) => return memory.refuse_sharing(reason),
        }
    }
}

impl MemoryRegion {
    pub(super) fn new(pd: &ProtectionDomain, spec: &RegionSpec) -> Result<MemoryRegion, RegisterError> {
        let RegionSpec {
            memory_offset: offset,
            length,
            iova,
            ..
        } = *spec;
        let client = pd.device.client();
        let access = spec.access.bits();
        let way = way(&*spec.memory, offset, length);
        let way = way.ok_or(RegisterError::Unsupported(NOT_SHAREABLE))?;
        let answer = match way {
            Way::File(file, offset) => {
                let request = Message::Register {
                    pd: pd.id,
                    offset,
                    length,
                    iova,
                    access,
                };
                client.request_with(&request, Some(file), None)
            }
            Way::Process(address, pages) => {
                let request = Message::RegisterOffered {
                    pd: pd.id,
                    address,
                    length,
                    iova,
                    access,
                    pages: pages.map(|(_, pages)| pages),
                };
                let file = pages.map(|(file, _)| file);
                let offered = client.offer_memory();
                offered.map_err(|_| RegisterError::Unsupported(NOT_SHAREABLE))?;
                client.request_with(&request, file, None)
            }
        };
        match answer.map_err(|refusal| register_error(&refusal))? {
            Message::Registered { id, lkey, rkey } => Ok(MemoryRegion {
                device: pd.device.clone(),
                id,
                lkey,
                rkey,
            }),
            _ => Err(RegisterError::Refused(rustix::io::Errno::PROTO.raw_os_error())),
        }
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
        false
    }

    fn rereg(&mut self, pd: &rdmux_verbs::ProtectionDomain, spec: RegionSpec) -> Result<(), RegisterError> {
        // A new region, as an RNIC's library makes one: its keys change.
        let pd = own::<ProtectionDomain>(pd).ok_or(RegisterError::NoPd)?;
        *self = MemoryRegion::new(pd, &spec)?;
        Ok(())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.device.client().destroy(Kind::Region, self.id);
    }
}

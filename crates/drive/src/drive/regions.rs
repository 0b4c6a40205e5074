//! Memory of a drive that commands reach: its Controller Memory Buffer and its Persistent Memory Region.

use std::io;
use std::sync::Arc;

use rdmux_wire::nvme::{CmbControl, CmbLayout, PcieCapabilities, PmrCapabilities, Register};

use super::DriveError;
use crate::Function;
use crate::memory::{MemoryKind, PAGE, Pool};

/// Looks for the Controller Memory Buffer, by either scheme: that of version 1.4, where hosts enable it, or the one before. 3.1.3.11 and 8.5.
pub(super) fn open_cmb(
    function: &dyn Function,
    capabilities: PcieCapabilities,
    pools: &mut Vec<Arc<Pool>>,
) -> Result<CmbLayout, DriveError> {
    let kind = MemoryKind::Cmb;
    if capabilities.cmb {
        // It tells of its buffer from then on.
        function.write_u64(Register::CMB_CONTROL.0, CmbControl::REGISTERS);
    }
    let location = function.read_u32(Register::CMB_LOCATION.0);
    let layout = CmbLayout::parse(location, function.read_u32(Register::CMB_SIZE.0));
    let layout = layout.ok_or(DriveError::NoMemory(kind))?;
    let failed = |error| DriveError::Memory {
        kind,
        why: Arc::new(error),
    };
    let bar = function.bar(layout.bar).map_err(failed)?;
    let address = bar
        .address
        .checked_add(layout.offset)
        .filter(|address| address.is_multiple_of(PAGE as u64))
        .ok_or_else(|| failed(io::Error::other("it does not begin at a page")))?;
    let directions = (layout.reads, layout.writes);
    let pool = Pool::of_bar(kind, &bar, layout.offset, layout.bytes, address, directions);
    if pool.bytes() == 0 {
        return Err(failed(io::Error::other("it lies outside of its BAR")));
    }
    pools.push(pool);
    Ok(layout)
}

/// Looks for the Persistent Memory Region. 8.14.
pub(super) fn open_pmr(
    function: &dyn Function,
    capabilities: PcieCapabilities,
    pools: &mut Vec<Arc<Pool>>,
) -> Result<PmrCapabilities, DriveError> {
    let kind = MemoryKind::Pmr;
    if !capabilities.pmr {
        return Err(DriveError::NoMemory(kind));
    }
    let pmr = PmrCapabilities::parse(function.read_u32(Register::PMR_CAPABILITIES.0));
    let failed = |error| DriveError::Memory {
        kind,
        why: Arc::new(error),
    };
    if !pmr.space {
        let why = "commands do not reach it (PMRCAP.CMSS)";
        return Err(failed(io::Error::other(why)));
    }
    let bar = function.bar(pmr.bar).map_err(failed)?;
    let bytes = bar.memory.len();
    if !bar.address.is_multiple_of(PAGE as u64) || bytes < PAGE as u64 {
        return Err(failed(io::Error::other("its BAR has no whole page")));
    }
    let pool = Pool::of_bar(kind, &bar, 0, bytes, bar.address, (pmr.reads, pmr.writes));
    pools.push(pool);
    Ok(pmr)
}

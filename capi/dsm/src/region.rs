//! Regions.

use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use rdmux_dsm::{Access, Consistency, FaultMode, Placement, RegionOptions, Session};

use crate::failure::{Failure, caught, keep, status};
use crate::objects::{check_outside, find, give};
use crate::session::outlived;

/// A region, with a count of its session.
pub(crate) struct Region {
    /// Dropped before the session.
    inner: rdmux_dsm::Region<'static>,
    session: Arc<Session>,
}

impl Region {
    fn make(session: Arc<Session>, options: &RegionOptions) -> Result<Region, Failure> {
        // SAFETY: the region is in this structure, whose count of the session is dropped after it.
        let inner = unsafe { outlived(&session) }.region(options)?;
        Ok(Region { inner, session })
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(crate) fn addresses(&self) -> Range<u64> {
        let start = self.inner.address();
        start..start + self.inner.mapping().len() as u64
    }

    /// Returns the offsets of bytes that the program gives by their address.
    ///
    /// # Errors
    /// They are not in the region.
    fn offsets(&self, address: usize, bytes: usize) -> Result<Range<u64>, Failure> {
        let all = self.addresses();
        let (start, bytes) = (address as u64, bytes as u64);
        self.inner.bytes_at(start, bytes).ok_or_else(|| {
            let place = format!("{:#x} to {:#x}", all.start, all.end);
            let text = format!("{bytes} bytes at {start:#x} are not in the region, which is at {place}");
            Failure::invalid(match all.contains(&start) && self.has_small_units() {
                true => format!("{text}, or not in one of its units as rdmux_dsm_region_place tells it"),
                false => text,
            })
        })
    }

    fn has_small_units(&self) -> bool {
        self.inner.bytes() < self.inner.mapping().len() as u64
    }
}

/// Returns the mode of an `enum rdmux_dsm_faults`.
pub(crate) fn mode_of(faults: c_uint) -> Result<FaultMode, Failure> {
    Ok(match faults {
        0 => FaultMode::of_environment()?,
        1 => FaultMode::Thread,
        2 => FaultMode::Inline,
        3 => FaultMode::Mprotect,
        other => return Err(Failure::invalid(format!("{other} is no enum rdmux_dsm_faults"))),
    })
}

/// Returns the order of an `enum rdmux_dsm_consistency`.
pub(crate) fn consistency_of(consistency: c_uint) -> Result<Consistency, Failure> {
    Ok(match consistency {
        0 => Consistency::Sequential,
        1 => Consistency::Release,
        other => {
            let text = format!("{other} is no enum rdmux_dsm_consistency");
            return Err(Failure::invalid(text));
        }
    })
}

/// `struct rdmux_dsm_region_options`
#[repr(C)]
struct Options {
    row: u64,
    faults: u32,
    homes: u32,
    node: u32,
    unit: u32,
    consistency: u32,
    reserved: [u32; 1],
}

impl Options {
    fn region_options(&self, bytes: u64) -> Result<RegionOptions, Failure> {
        if self.reserved != [0; 1] {
            return Err(Failure::invalid(
                "a reserved field of the region's options is not 0",
            ));
        }
        let mode = mode_of(self.faults)?;
        let homes = match (self.homes, self.row, self.node) {
            (0, row, 0) => Placement::InTurn(row.max(1)),
            (1, 0, 0) => Placement::Hash,
            (2, 0, 0) => Placement::FirstTouch,
            (3, 0, node) => Placement::node(node),
            (other @ 4.., ..) => return Err(Failure::invalid(format!("{other} is no enum rdmux_dsm_homes"))),
            _ => {
                let text = "row belongs to homes in turn, and node to homes by name: set the others to 0";
                return Err(Failure::invalid(text));
            }
        };
        let mut options = RegionOptions::in_mode(bytes, mode);
        if self.unit != 0 {
            options.unit = self.unit.into();
        }
        options.consistency = consistency_of(self.consistency)?;
        Ok(RegionOptions { homes, ..options })
    }
}

/// `struct rdmux_dsm_stat`
#[repr(C)]
struct Stat {
    read_faults: u64,
    write_faults: u64,
    fetches: u64,
    invalidations: u64,
    messages: u64,
    releases: u64,
    acquires: u64,
    twins: u64,
    flushes_sent: u64,
    flushes: u64,
    landed_units: u64,
    merged_units: u64,
    log_read_bytes: u64,
    reserved: [u64; 3],
}

/// Returns the bytes that the program says it has, which the library reads.
///
/// # Errors
/// There are none, or they are in a region.
///
/// # Safety
/// The pointer is null, or of so many bytes, which nobody else writes as long as the slice exists.
unsafe fn bytes_at<'a>(from: *const c_void, bytes: usize) -> Result<&'a [u8], Failure> {
    check(from, bytes)?;
    if bytes == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null and not too long, as checked; the rest says the caller.
    Ok(unsafe { std::slice::from_raw_parts(from.cast(), bytes) })
}

/// Returns the bytes that the program says it has, which the library writes.
///
/// # Errors
/// As [`bytes_at`].
///
/// # Safety
/// The pointer is null, or of so many bytes, which nobody else uses as long as the slice exists.
unsafe fn bytes_to<'a>(to: *mut c_void, bytes: usize) -> Result<&'a mut [u8], Failure> {
    check(to, bytes)?;
    if bytes == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `bytes_at`.
    Ok(unsafe { std::slice::from_raw_parts_mut(to.cast(), bytes) })
}

fn check(pointer: *const c_void, bytes: usize) -> Result<(), Failure> {
    if bytes > isize::MAX as usize {
        return Err(Failure::invalid(format!("no process has {bytes} bytes")));
    }
    if pointer.is_null() && bytes > 0 {
        return Err(Failure::invalid("no memory for the program's side of a copy"));
    }
    check_outside(pointer.addr(), bytes)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_region_make(
    session: *mut Session,
    bytes: u64,
    options: *const Options,
    region: *mut *mut Region,
) -> c_int {
    let make = || {
        let session = find(session)?;
        // SAFETY: the program gives a null pointer, or one to options.
        let options = match unsafe { options.as_ref() } {
            Some(options) => options.region_options(bytes)?,
            None => RegionOptions::new(bytes)?,
        };
        Region::make(session, &options)
    };
    // SAFETY: the program gives a null pointer, or one for a pointer.
    status(|| unsafe { give(region, make) }.map(|()| 0))
}

/// Returns what a call that cannot fail otherwise tells of a region.
fn told<R>(region: *mut Region, tell: impl FnOnce(&Region) -> R) -> Option<R> {
    let told = caught(|| Ok(tell(&*find(region)?)));
    told.map_err(keep).ok()
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_region_address(region: *mut Region) -> *mut c_void {
    let address = told(region, |region| region.inner.address());
    address.map_or(ptr::null_mut(), |address| {
        ptr::with_exposed_provenance_mut(address as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_region_bytes(region: *mut Region) -> u64 {
    told(region, |region| region.inner.bytes()).unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_region_place(region: *mut Region, offset: u64) -> *mut c_void {
    let place = || {
        let region = find(region)?;
        let bytes = region.inner.bytes();
        if offset >= bytes {
            return Err(Failure::invalid(format!("byte {offset} of a region of {bytes}")));
        }
        Ok(region.inner.address() + region.inner.place(offset))
    };
    caught(place).map_err(keep).map_or(ptr::null_mut(), |address| {
        ptr::with_exposed_provenance_mut(address as usize)
    })
}

/// Returns the access that the program gives by its number.
fn access_of(number: c_uint) -> Result<Access, Failure> {
    match number {
        1 => Ok(Access::Read),
        2 => Ok(Access::Write),
        other => Err(Failure::invalid(format!("{other} is no enum rdmux_dsm_access"))),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_acquire_range(
    region: *mut Region,
    start: *const c_void,
    bytes: usize,
    access: c_uint,
) -> c_int {
    status(|| {
        let region = find(region)?;
        let offsets = region.offsets(start.addr(), bytes)?;
        region.inner.acquire(offsets, access_of(access)?)?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_prefetch(
    region: *mut Region,
    start: *const c_void,
    bytes: usize,
    access: c_uint,
) -> c_int {
    status(|| {
        let region = find(region)?;
        let offsets = region.offsets(start.addr(), bytes)?;
        region.inner.prefetch(offsets, access_of(access)?);
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_read(
    region: *mut Region,
    from: *const c_void,
    to: *mut c_void,
    bytes: usize,
) -> c_int {
    status(|| {
        let region = find(region)?;
        let offsets = region.offsets(from.addr(), bytes)?;
        // SAFETY: the program gives memory of so many bytes, which this call alone uses.
        let out = unsafe { bytes_to(to, bytes) }?;
        region.inner.read(offsets.start, out)?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_write(
    region: *mut Region,
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    status(|| {
        let region = find(region)?;
        let offsets = region.offsets(to.addr(), bytes)?;
        // SAFETY: the program gives memory of so many bytes, which nobody writes during the call.
        let bytes = unsafe { bytes_at(from, bytes) }?;
        region.inner.write(offsets.start, bytes)?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_region_stat(region: *mut Region, to: *mut Stat) -> c_int {
    status(|| {
        let region = find(region)?;
        if to.is_null() {
            return Err(Failure::invalid("no place for the counts"));
        }
        let counted = region.inner.stat();
        let counts = Stat {
            read_faults: counted.read_faults,
            write_faults: counted.write_faults + counted.upgrade_faults,
            fetches: counted.fetches,
            // Rights that others have taken, all or in part.
            invalidations: counted.invalidations + counted.downgrades,
            messages: counted.messages,
            releases: counted.releases,
            acquires: counted.acquires,
            twins: counted.twins,
            flushes_sent: counted.flushes_sent,
            flushes: counted.flushes,
            landed_units: counted.landed_units,
            merged_units: counted.merged_units,
            log_read_bytes: counted.log_read_bytes,
            reserved: [0; 3],
        };
        // SAFETY: not null, so the program has room for the structure.
        unsafe { to.write(counts) };
        Ok(0)
    })
}

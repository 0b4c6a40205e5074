//! Functions by VFIO: an IOMMU lets them reach only what is mapped for them. Linux, Documentation/driver-api/vfio.rst and include/uapi/linux/vfio.h.
#![allow(unsafe_code, reason = "VFIO is ioctls with pointers")]

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rdmux_memory::DeviceMemory;
use rdmux_verbs::Memory;
use rdmux_verbs::sync::Mutex;

use crate::dma::PinnedMemory;
use crate::function::{Bar, DmaMemory, Function};
use crate::memory::PAGE;
use crate::sysfs::resource;

const SET_IOMMU: libc::c_ulong = 0x3b66;
const GROUP_GET_STATUS: libc::c_ulong = 0x3b67;
const GROUP_SET_CONTAINER: libc::c_ulong = 0x3b68;
const GROUP_GET_DEVICE: libc::c_ulong = 0x3b6a;
const DEVICE_GET_REGION: libc::c_ulong = 0x3b6c;
const MAP_DMA: libc::c_ulong = 0x3b71;
const DEVICE_FEATURE: libc::c_ulong = 0x3b75;
/// Feature DMA_BUF, which is to be returned. From Linux 6.19 on.
const GET_DMA_BUF: u32 = 1 << 16 | 11;
const TYPE_1_V2: libc::c_ulong = 3;
/// Group status: all functions of the group are VFIO's.
const VIABLE: u32 = 1;
/// Region of the configuration space; those before are BARs.
const CONFIG_REGION: u32 = 7;
/// Command word: memory space and bus master.
const COMMAND: (u64, u16) = (4, 0b110);
/// Addresses that memory is mapped at: above what firmware has for itself, below BARs and messages of interrupts.
const ADDRESSES: std::ops::Range<u64> = 1 << 24..1 << 31;

#[repr(C)]
#[derive(Default)]
struct Region {
    size: u32,
    flags: u32,
    index: u32,
    capabilities: u32,
    length: u64,
    offset: u64,
}

#[repr(C)]
struct Map {
    size: u32,
    flags: u32,
    address: u64,
    bus_address: u64,
    length: u64,
}

/// The feature, with one range of a region.
#[repr(C)]
struct DmaBuf {
    size: u32,
    flags: u32,
    region: u32,
    open_flags: u32,
    dma_buf_flags: u32,
    ranges: u32,
    offset: u64,
    length: u64,
}

/// A function by VFIO.
#[derive(Debug)]
pub(crate) struct VfioFunction {
    address: String,
    bars: [Option<u64>; 6],
    registers: DeviceMemory,
    device: File,
    /// Unmaps all when it is closed.
    container: File,
    _group: File,
    next_address: Mutex<u64>,
}

/// Calls an ioctl whose argument is a number, or a pointer to what it takes.
fn call(file: &File, request: libc::c_ulong, argument: usize) -> io::Result<i32> {
    // SAFETY: the callers below name requests of VFIO alone, and as argument a number, or the address of a value of the request's own type that lives
    // during the call and begins with its size.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

fn region(device: &File, index: u32) -> io::Result<Region> {
    let mut region = Region {
        size: size_of::<Region>() as u32,
        index,
        ..Region::default()
    };
    call(device, DEVICE_GET_REGION, (&raw mut region).expose_provenance())?;
    Ok(region)
}

fn map(device: &File, index: u32) -> io::Result<DeviceMemory> {
    let region = region(device, index)?;
    let length = usize::try_from(region.length).map_err(io::Error::other)?;
    if length == 0 {
        let error = format!("it has no BAR {index}");
        return Err(io::Error::new(io::ErrorKind::NotFound, error));
    }
    DeviceMemory::map(device, region.offset, length)
}

/// Makes a dma-buf of the first bytes of a BAR.
fn dma_buf(device: &File, index: u32, length: u64) -> io::Result<OwnedFd> {
    let mut asked = DmaBuf {
        size: size_of::<DmaBuf>() as u32,
        flags: GET_DMA_BUF,
        region: index,
        open_flags: (libc::O_RDWR | libc::O_CLOEXEC) as u32,
        dma_buf_flags: 0,
        ranges: 1,
        offset: 0,
        length,
    };
    let made = call(device, DEVICE_FEATURE, (&raw mut asked).expose_provenance())?;
    // SAFETY: the system has just made the descriptor for this call's caller.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

impl VfioFunction {
    /// Opens a function that vfio-pci has.
    pub(crate) fn open(address: &str, folder: &Path) -> io::Result<VfioFunction> {
        let group = fs::read_link(folder.join("iommu_group"))?;
        let group = group.file_name().ok_or(io::ErrorKind::NotFound)?;
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
        let group = open(&Path::new("/dev/vfio").join(group))?;
        let container = open(Path::new("/dev/vfio/vfio"))?;
        let mut status = [8u32, 0];
        call(&group, GROUP_GET_STATUS, status.as_mut_ptr().expose_provenance())?;
        if status[1] & VIABLE == 0 {
            let why = "other functions of its IOMMU group are not vfio-pci's";
            return Err(io::Error::other(why));
        }
        let descriptor: RawFd = container.as_raw_fd();
        call(
            &group,
            GROUP_SET_CONTAINER,
            (&raw const descriptor).expose_provenance(),
        )?;
        call(&container, SET_IOMMU, TYPE_1_V2 as usize)?;
        let name = CString::new(address).map_err(io::Error::other)?;
        let device = call(&group, GROUP_GET_DEVICE, name.as_ptr().expose_provenance())?;
        // SAFETY: the system has just made the descriptor for this call's caller.
        let device = unsafe { File::from_raw_fd(device) };
        let config = region(&device, CONFIG_REGION)?.offset;
        let mut word = [0; 2];
        device.read_exact_at(&mut word, config + COMMAND.0)?;
        let word = u16::from_le_bytes(word) | COMMAND.1;
        device.write_all_at(&word.to_le_bytes(), config + COMMAND.0)?;
        Ok(VfioFunction {
            address: address.to_owned(),
            bars: std::array::from_fn(|index| resource(folder, index as u8).ok().map(|(start, _)| start)),
            registers: map(&device, 0)?,
            device,
            container,
            _group: group,
            next_address: Mutex::new(ADDRESSES.start),
        })
    }
}

impl Function for VfioFunction {
    fn address(&self) -> &str {
        &self.address
    }

    fn register_bytes(&self) -> u64 {
        self.registers.len()
    }

    fn read_u32(&self, offset: u32) -> u32 {
        self.registers.load_u32(offset)
    }

    fn read_u64(&self, offset: u32) -> u64 {
        self.registers.load_u64(offset)
    }

    fn write_u32(&self, offset: u32, value: u32) {
        self.registers.store_u32(offset, value);
    }

    fn write_u64(&self, offset: u32, value: u64) {
        self.registers.store_u64(offset, value);
    }

    fn bar(&self, index: u8) -> io::Result<Bar> {
        let address = self.bars.get(usize::from(index)).copied().flatten();
        let address = address.ok_or(io::ErrorKind::NotFound)?;
        let mut memory = map(&self.device, index.into())?;
        // Without one, RNICs of the host do not reach it by themselves; processors do.
        if let Ok(dma_buf) = dma_buf(&self.device, index.into(), memory.len()) {
            memory = memory.with_dma_buf(dma_buf);
        }
        Ok(Bar {
            memory: Arc::new(memory),
            address,
        })
    }

    fn dma(&self, bytes: usize) -> io::Result<DmaMemory> {
        // The mapping below pins it.
        let memory = PinnedMemory::unpinned(bytes)?;
        let mut next = self.next_address.lock();
        let (start, end) = (*next, *next + memory.len());
        if end > ADDRESSES.end {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let mut mapped = Map {
            size: size_of::<Map>() as u32,
            // Reads and writes.
            flags: 3,
            address: memory.address(),
            bus_address: start,
            length: memory.len(),
        };
        call(&self.container, MAP_DMA, (&raw mut mapped).expose_provenance()).map_err(|error| match error
            .kind()
        {
            io::ErrorKind::OutOfMemory => {
                let why = format!("cannot pin {bytes} bytes of memory: raise memlock (ulimit -l)");
                io::Error::new(io::ErrorKind::OutOfMemory, why)
            }
            _ => error,
        })?;
        *next = end;
        Ok(DmaMemory {
            memory: Arc::new(memory),
            pages: (start..end).step_by(PAGE).collect(),
        })
    }
}

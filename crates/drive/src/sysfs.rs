//! Drives as the system shows them, and their functions by sysfs alone.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rdmux_memory::DeviceMemory;
use rdmux_verbs::Memory;
use rdmux_wire::nvme::{CmbLayout, PcieCapabilities, PmrCapabilities, Register};
use rustix::fs::{FlockOperation, OFlags, flock};

use crate::dma::PinnedMemory;
use crate::function::{Bar, DmaMemory, Function};
use crate::vfio::VfioFunction;

const DEVICES: &str = "sys/bus/pci/devices";
/// File of a function with the one driver that may bind to it.
const OVERRIDE: &str = "driver_override";
/// A name in it that no driver has.
const NO_DRIVER: &str = "rdmux";
/// Class of NVMe drives: mass storage, non-volatile memory, NVMe.
const NVME_CLASS: u32 = 0x01_08_02;
/// Offset of the command word of a function's configuration space.
const COMMAND: u64 = 4;
/// Command word: memory space.
const MEMORY_SPACE: u16 = 1 << 1;
/// Command word: bus master.
const BUS_MASTER: u16 = 1 << 2;

/// Address of a PCIe function.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress(String);

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PciAddress {
    type Err = DriveOpenError;

    /// Parses `0000:00:04.0`, or the same without the domain 0000.
    fn from_str(text: &str) -> Result<PciAddress, DriveOpenError> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts: Vec<&str> = rest.split(':').collect();
            if parts.len() == 2 {
                parts.insert(0, "0000");
            }
            let [domain, bus, device] = parts[..] else {
                return None;
            };
            let number = |text: &str, digits: std::ops::RangeInclusive<usize>| {
                let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
                let is_number = digits.contains(&text.len()) && is_hex;
                is_number.then(|| u32::from_str_radix(text, 16).ok()).flatten()
            };
            // Domains that the system makes itself have more digits.
            let domain = number(domain, 4..=8)?;
            let (bus, device, function) = (
                number(bus, 2..=2)?,
                number(device, 2..=2)?,
                number(function, 1..=1)?,
            );
            Some(PciAddress(format!(
                "{domain:04x}:{bus:02x}:{device:02x}.{function}"
            )))
        };
        parse().ok_or_else(|| DriveOpenError::Address(text.to_owned()))
    }
}

impl PciAddress {
    fn folder(&self) -> PathBuf {
        self.folder_in(Path::new("/"))
    }

    fn folder_in(&self, root: &Path) -> PathBuf {
        root.join(DEVICES).join(&self.0)
    }
}

/// Reason for which a drive is not opened.
#[derive(Debug, thiserror::Error)]
pub enum DriveOpenError {
    /// That is no address.
    #[error("'{0}' is no address of a PCIe function: give one as 0000:00:04.0; rdmux doctor lists drives")]
    Address(String),
    /// There is no such function.
    #[error("there is no PCIe function {0}: rdmux doctor lists drives")]
    Missing(PciAddress),
    /// It is something else.
    #[error("{address} is no NVMe drive, but of class {class:06x}: rdmux doctor lists drives")]
    Class {
        /// The function.
        address: PciAddress,
        /// Its class.
        class: u32,
    },
    /// A driver of the kernel has it.
    #[error(
        "{address} is bound to the kernel's driver {driver}: add ,unbind to take it away, or export its /dev/nvme* instead"
    )]
    Bound {
        /// The function.
        address: PciAddress,
        /// The driver.
        driver: String,
    },
    /// Somebody uses it.
    #[error("{address} is in use: {device} {how}")]
    InUse {
        /// The function.
        address: PciAddress,
        /// The block device.
        device: String,
        /// The use, and its end.
        how: String,
    },
    /// A program drives it.
    #[error("{0} is in use: a program drives it already; end that first")]
    Driven(PciAddress),
    /// An IOMMU is in front of it.
    #[error(
        "{0} is behind an IOMMU: bind it to vfio-pci (modprobe vfio-pci; echo vfio-pci >/sys/bus/pci/devices/{0}/driver_override; echo {0} >/sys/bus/pci/drivers_probe)"
    )]
    Iommu(PciAddress),
    /// The system refuses something.
    #[error("{address}: cannot {what}: {source}{}", hint(source))]
    System {
        /// The function.
        address: PciAddress,
        /// The refused access.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => ": run as root",
        // IO_STRICT_DEVMEM: mmap of a BAR that a driver has.
        io::ErrorKind::InvalidInput => ": a driver of the kernel may have it",
        _ => "",
    }
}

/// Returns how the kernel's driver gets a drive back, if it does not have it.
pub fn give_back(address: &PciAddress) -> Option<String> {
    let folder = address.folder();
    let unbind = match driver(&folder).as_deref() {
        None => String::new(),
        Some("vfio-pci") => format!("echo {address} >/sys/bus/pci/drivers/vfio-pci/unbind; "),
        Some(_) => return None,
    };
    let chosen = fs::read_to_string(folder.join(OVERRIDE)).ok()?;
    let clear = match chosen.trim() {
        "" | "(null)" => String::new(),
        _ => format!("echo >/{DEVICES}/{address}/{OVERRIDE}; "),
    };
    Some(format!(
        "{unbind}{clear}echo {address} >/sys/bus/pci/drivers_probe"
    ))
}

/// An NVMe drive as the system shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its address.
    pub address: PciAddress,
    /// The driver that has it.
    pub driver: Option<String>,
    /// Block devices of the kernel's driver.
    pub devices: Vec<String>,
    /// Use of one of them.
    pub in_use: Option<String>,
    /// An IOMMU translates for it.
    pub iommu: bool,
    /// Memory that it has, as far as the system or its registers tell without any of them being written.
    pub memory: Option<Offer>,
}

/// Memory that a drive has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its Controller Memory Buffer.
    pub cmb: Found<CmbLayout>,
    /// Its Persistent Memory Region, and the bytes of that.
    pub pmr: Found<(PmrCapabilities, u64)>,
}

/// Memory of a drive, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found<T> {
    /// Nobody tells if there is one.
    Unknown,
    /// There is none.
    None,
    /// There is one, of which the drive tells only who enables it.
    Hidden,
    /// There is this one.
    Known(T),
}

/// Returns the NVMe drives of a system, below the root of its files, in the order of their addresses.
pub fn list(root: &Path) -> Vec<Listed> {
    let folders = fs::read_dir(root.join(DEVICES)).into_iter().flatten().flatten();
    let names = folders.filter_map(|folder| folder.file_name().into_string().ok());
    let addresses = names.filter_map(|name| name.parse::<PciAddress>().ok());
    let drives = addresses.filter_map(|address| {
        let folder = address.folder_in(root);
        (class(&folder) == Some(NVME_CLASS)).then(|| Listed {
            driver: driver(&folder),
            devices: block_devices(&folder),
            in_use: in_use(root, &folder).map(|(device, how)| format!("{device} {how}")),
            iommu: has_iommu(&folder),
            memory: offer(&folder),
            address,
        })
    });
    let mut drives: Vec<Listed> = drives.collect();
    drives.sort_by(|a, b| a.address.cmp(&b.address));
    drives
}

/// Reads what memory a drive has. `None` if nobody tells: its registers cannot be read while a driver has it or it is not enabled, or by others than root.
fn offer(folder: &Path) -> Option<Offer> {
    if driver(folder).is_some() {
        // The kernel's driver tells of a buffer that it uses.
        let controller = fs::read_dir(folder.join("nvme")).ok()?.flatten().next()?;
        let number = |file: &str| {
            let text = fs::read_to_string(controller.path().join(file)).ok()?;
            text.trim().parse().ok()
        };
        return Some(Offer {
            cmb: Found::Known(CmbLayout::parse(number("cmbloc")?, number("cmbsz")?)?),
            pmr: Found::Unknown,
        });
    }
    let mut command = [0; 2];
    let config = File::open(folder.join("config")).ok()?;
    config.read_exact_at(&mut command, COMMAND).ok()?;
    if u16::from_le_bytes(command) & MEMORY_SPACE == 0 {
        return None;
    }
    let (registers, _) = map(folder, 0).ok()?;
    let register = registers.load_u64(Register::CAPABILITIES.0);
    if register == u64::MAX {
        return None;
    }
    let capabilities = PcieCapabilities::parse(register);
    let layout = CmbLayout::parse(
        registers.load_u32(Register::CMB_LOCATION.0),
        registers.load_u32(Register::CMB_SIZE.0),
    );
    let pmr = match capabilities.pmr {
        true => {
            let pmr = PmrCapabilities::parse(registers.load_u32(Register::PMR_CAPABILITIES.0));
            let bytes = resource(folder, pmr.bar).map_or(0, |(_, bytes)| bytes);
            Found::Known((pmr, bytes))
        }
        false => Found::None,
    };
    Some(Offer {
        cmb: match layout {
            Some(layout) => Found::Known(layout),
            None if capabilities.cmb => Found::Hidden,
            None => Found::None,
        },
        pmr,
    })
}

/// Opens a drive: by vfio-pci if that is bound to it, else by sysfs. A drive that the kernel's driver has is taken from it if `unbind`; one in use never.
///
/// # Errors
/// It is no drive, somebody has it, or the system refuses something.
pub fn open(address: &PciAddress, unbind: bool) -> Result<Arc<dyn Function>, DriveOpenError> {
    let class = class(&address.folder()).ok_or_else(|| DriveOpenError::Missing(address.clone()))?;
    if class != NVME_CLASS {
        let address = address.clone();
        return Err(DriveOpenError::Class { address, class });
    }
    let failed = |what: &str, source| DriveOpenError::System {
        address: address.clone(),
        what: what.to_owned(),
        source,
    };
    match driver(&address.folder()) {
        None => {}
        Some(driver) if driver == "vfio-pci" => {}
        Some(driver) => {
            if let Some((device, how)) = in_use(Path::new("/"), &address.folder()) {
                let address = address.clone();
                return Err(DriveOpenError::InUse { address, device, how });
            }
            let address = address.clone();
            if !unbind {
                return Err(DriveOpenError::Bound { address, driver });
            }
            let control = format!("/sys/bus/pci/drivers/{driver}/unbind");
            fs::write(control, &address.0)
                .map_err(|error| failed("take it from the kernel's driver", error))?;
        }
    }
    if driver(&address.folder()).is_none() && has_iommu(&address.folder()) {
        // Without the module the drive stays without a driver.
        let is_asked = unbind
            && fs::write(address.folder().join(OVERRIDE), "vfio-pci").is_ok()
            && fs::write("/sys/bus/pci/drivers_probe", &address.0).is_ok();
        if !is_asked || driver(&address.folder()).as_deref() != Some("vfio-pci") {
            return Err(DriveOpenError::Iommu(address.clone()));
        }
    }
    Ok(match driver(&address.folder()) {
        Some(_) => Arc::new(
            VfioFunction::open(&address.0, &address.folder()).map_err(|error| match error.kind() {
                io::ErrorKind::ResourceBusy => DriveOpenError::Driven(address.clone()),
                _ => failed("open it by vfio-pci", error),
            })?,
        ),
        None => Arc::new(SysfsFunction::open(address)?),
    })
}

fn class(folder: &Path) -> Option<u32> {
    let text = fs::read_to_string(folder.join("class")).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

fn driver(folder: &Path) -> Option<String> {
    let link = fs::read_link(folder.join("driver")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// Returns true if the addresses by which the function reads and writes memory are not physical ones.
fn has_iommu(folder: &Path) -> bool {
    let kind = fs::read_to_string(folder.join("iommu_group/type"));
    match kind {
        // The group says so if the IOMMU translates nothing.
        Ok(kind) => kind.trim() != "identity",
        Err(_) => folder.join("iommu_group").exists(),
    }
}

/// Returns the block devices that the kernel's driver has made of a drive, by name.
fn block_devices(folder: &Path) -> Vec<String> {
    let controllers = fs::read_dir(folder.join("nvme"));
    let controllers = controllers.into_iter().flatten().flatten();
    let entries = controllers.flat_map(|controller| {
        let entries = fs::read_dir(controller.path());
        entries.into_iter().flatten().flatten()
    });
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut devices: Vec<String> = names.filter_map(|name| block_device(&name)).collect();
    devices.sort();
    devices
}

/// Returns the block device that an entry of a controller's folder is: `nvme0n1`, or of several paths one, `nvme0c1n1`, to the same.
fn block_device(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (controller, namespace) = rest.rsplit_once('n')?;
    let subsystem = controller.split_once('c').map_or(controller, |(head, _)| head);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(subsystem) && is_number(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Returns the block device of a drive that somebody uses, and the use.
fn in_use(root: &Path, folder: &Path) -> Option<(String, String)> {
    block_devices(folder).into_iter().find_map(|device| {
        let how = use_of(root, &device)?;
        Some((format!("/dev/{device}"), how))
    })
}

fn use_of(root: &Path, device: &str) -> Option<String> {
    let folder = root.join("sys/class/block").join(device);
    let partitions = fs::read_dir(&folder).into_iter().flatten().flatten();
    let partitions = partitions
        .map(|entry| entry.path())
        .filter(|path| path.join("partition").exists());
    for part in partitions.chain([folder.clone()]) {
        let mut holders = fs::read_dir(part.join("holders")).into_iter().flatten().flatten();
        if let Some(holder) = holders.next() {
            let holder = holder.file_name();
            return Some(format!(
                "is a part of {}: take it out of that",
                holder.to_string_lossy()
            ));
        }
        let number = fs::read_to_string(part.join("dev")).unwrap_or_default();
        let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
        let mount = mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let is_it = fields.get(2).is_some_and(|field| *field == number.trim());
            is_it.then(|| fields.get(4).copied()).flatten()
        });
        if let Some(mount) = mount {
            return Some(format!("is mounted at {mount}: unmount it"));
        }
    }
    // Swap, mounts of other namespaces, and programs that have it for themselves.
    let mut options = OpenOptions::new();
    let flags = OFlags::EXCL | OFlags::NONBLOCK;
    options.read(true).custom_flags(flags.bits() as i32);
    match options.open(root.join("dev").join(device)) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Some("is open for a program or the system alone: end that".to_owned())
        }
        _ => None,
    }
}

/// A function by sysfs: BARs that are mapped, and memory by its physical address. What the function does with wrong addresses nobody checks.
#[derive(Debug)]
struct SysfsFunction {
    address: PciAddress,
    /// Its configuration space, locked against other processes.
    config: File,
    registers: DeviceMemory,
}

impl SysfsFunction {
    fn open(address: &PciAddress) -> Result<SysfsFunction, DriveOpenError> {
        let failed = |what: &str, source| DriveOpenError::System {
            address: address.clone(),
            what: what.to_owned(),
            source,
        };
        let mut options = OpenOptions::new();
        let config = options.read(true).write(true);
        let config = config.open(address.folder().join("config"));
        let config = config.map_err(|error| failed("open its configuration space", error))?;
        flock(&config, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| DriveOpenError::Driven(address.clone()))?;
        let enabled = fs::write(address.folder().join("enable"), "1");
        enabled.map_err(|error| failed("enable it", error))?;
        set_command(&config, MEMORY_SPACE | BUS_MASTER, 0)
            .map_err(|error| failed("let it reach memory", error))?;
        let (registers, _) = map(&address.folder(), 0).map_err(|error| failed("map its registers", error))?;
        // A driver of the kernel that is loaded meanwhile would take it, and its registers from this process.
        let kept = fs::write(address.folder().join(OVERRIDE), NO_DRIVER);
        kept.map_err(|error| failed("keep drivers from it", error))?;
        Ok(SysfsFunction {
            address: address.clone(),
            config,
            registers,
        })
    }
}

/// Sets and clears bits of a function's command word.
fn set_command(config: &File, set: u16, clear: u16) -> io::Result<()> {
    let mut word = [0; 2];
    config.read_exact_at(&mut word, COMMAND)?;
    let word = u16::from_le_bytes(word) & !clear | set;
    config.write_all_at(&word.to_le_bytes(), COMMAND)
}

/// Returns the address and the length of a BAR. A line of `resource` has its first and last byte, and flags.
pub(crate) fn resource(folder: &Path, index: u8) -> io::Result<(u64, u64)> {
    let text = fs::read_to_string(folder.join("resource"))?;
    let line = text.lines().nth(index.into()).unwrap_or_default();
    let numbers: Vec<u64> = line
        .split(' ')
        .filter_map(|number| u64::from_str_radix(number.strip_prefix("0x")?, 16).ok())
        .collect();
    match numbers[..] {
        [first, last, _] if first > 0 && last > first => Ok((first, last - first + 1)),
        _ => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("it has no BAR {index}"),
        )),
    }
}

/// Maps a BAR, which must have whole pages.
fn map(folder: &Path, index: u8) -> io::Result<(DeviceMemory, u64)> {
    let (start, length) = resource(folder, index)?;
    let length = usize::try_from(length).map_err(io::Error::other)?;
    if !length.is_multiple_of(rustix::param::page_size()) {
        let error = format!("BAR {index} has {length} bytes, which are not whole pages");
        return Err(io::Error::other(error));
    }
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true);
    // Registers are not cached.
    let file = file.custom_flags(OFlags::SYNC.bits() as i32);
    let file = file.open(folder.join(format!("resource{index}")))?;
    Ok((DeviceMemory::map(&file, 0, length)?, start))
}

impl Function for SysfsFunction {
    fn address(&self) -> &str {
        &self.address.0
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
        let (memory, address) = map(&self.address.folder(), index)?;
        Ok(Bar {
            memory: Arc::new(memory),
            address,
        })
    }

    fn dma(&self, bytes: usize) -> io::Result<DmaMemory> {
        PinnedMemory::with_frames(bytes)
    }
}

impl Drop for SysfsFunction {
    fn drop(&mut self) {
        // It must not reach memory that is not its driver's any more. One that has gone has no command word either.
        let _ = set_command(&self.config, 0, BUS_MASTER);
        let _ = fs::write(self.address.folder().join(OVERRIDE), "\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address__has_one_form() {
        let parse = |text: &str| text.parse::<PciAddress>().map(|address| address.to_string()).ok();
        assert_eq!(parse("0000:00:04.0").as_deref(), Some("0000:00:04.0"));
        assert_eq!(parse("3B:00.1").as_deref(), Some("0000:3b:00.1"));
        assert_eq!(parse("10000:01:00.0").as_deref(), Some("10000:01:00.0"));
        for text in [
            "",
            "00:04",
            "0:4.0",
            "0000:00:04.0/..",
            "../../x.0",
            "00:+4.0",
            "1:00:04.0",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn block_device__is_that_of_all_paths() {
        let cases = [
            ("nvme0n1", Some("nvme0n1")),
            ("nvme12c3n4", Some("nvme12n4")),
            ("ng0n1", None),
            ("hwmon1", None),
            ("nvme0", None),
            ("nvmexn1", None),
        ];
        for (name, device) in cases {
            assert_eq!(block_device(name).as_deref(), device, "{name}");
        }
    }

    #[test]
    fn resource__is_a_bar_with_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let text = "0x00000000febd4000 0x00000000febd7fff 0x0000000000140204\n0x0 0x0 0x0\n";
        fs::write(folder.path().join("resource"), text).unwrap();
        assert_eq!(resource(folder.path(), 0).unwrap(), (0xfebd_4000, 0x4000));
        assert!(resource(folder.path(), 1).is_err());
        assert!(resource(folder.path(), 7).is_err());
    }
}

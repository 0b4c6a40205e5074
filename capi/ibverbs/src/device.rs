//! Devices: one for each local address that peers can use. That address is its only GID.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;

use rdmux_verbs::resources::{node_guid, visible_addresses};
use rdmux_verbs::sync::Mutex;

use crate::{abi, warn};

/// Environment variable that names the devices' addresses, in their order.
const ADDRESSES: &str = "RDMUX_DEVICES";

/// Object behind a program's `struct ibv_device` pointer. Entries live as long as the process does: programs free the list and go on
/// to use what was in it.
#[repr(C)]
pub(crate) struct DeviceObject {
    pub(crate) shown: abi::Device,
    /// Vendors' libraries look here for the operations of their own driver, and find that there are none.
    driver: *const c_void,
    rest: [*const c_void; 7],
    pub(crate) address: IpAddr,
    pub(crate) index: c_int,
}

// SAFETY: written once, before anybody has a pointer to it; the pointers in it are null.
unsafe impl Sync for DeviceObject {}
// SAFETY: as above.
unsafe impl Send for DeviceObject {}

impl DeviceObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that [`ibv_get_device_list`] gave out.
    pub(crate) unsafe fn of<'a>(device: *mut abi::Device) -> &'a DeviceObject {
        // SAFETY: as the caller says; entries are never freed.
        unsafe { &*device.cast::<DeviceObject>() }
    }

    fn new(index: usize, address: IpAddr) -> DeviceObject {
        let name = format!("rdmux{index}");
        let mut shown = abi::Device {
            reserved: [ptr::null_mut(); 2],
            // IBV_NODE_CA, IBV_TRANSPORT_IB
            node_type: 1,
            transport_type: 0,
            name: [0; 64],
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        put(&mut shown.name, &name);
        put(&mut shown.dev_name, &format!("uverbs{index}"));
        put(
            &mut shown.dev_path,
            &format!("/sys/class/infiniband_verbs/uverbs{index}"),
        );
        put(&mut shown.ibdev_path, &format!("/sys/class/infiniband/{name}"));
        DeviceObject {
            shown,
            driver: ptr::null(),
            rest: [ptr::null(); 7],
            address,
            index: index as c_int,
        }
    }

    /// Returns all devices that exist now.
    pub(crate) fn all() -> Vec<&'static DeviceObject> {
        devices()
    }

    /// Returns the device of an address.
    pub(crate) fn at(address: IpAddr) -> Option<&'static DeviceObject> {
        devices().into_iter().find(|device| device.address == address)
    }

    /// Returns its node GUID, in network order.
    pub(crate) fn guid(&self) -> u64 {
        node_guid(self.address).to_be()
    }

    /// Returns its GID.
    pub(crate) fn gid(&self) -> abi::Gid {
        match self.address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        }
    }
}

/// Writes a C string into a field, truncated if it is too long.
pub(crate) fn put(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (to, from) in field.iter_mut().zip(text.bytes().take(room)) {
        *to = c_char::from_ne_bytes([from]);
    }
}

/// Returns the addresses for which devices are shown; none when the list of addresses is malformed.
fn addresses() -> Vec<IpAddr> {
    // Read once: the program may change its environment meanwhile, and threads of the library look for devices too.
    static LIST: OnceLock<Option<String>> = OnceLock::new();
    let list = LIST.get_or_init(|| std::env::var(ADDRESSES).ok());
    visible_addresses(list.as_deref()).unwrap_or_else(|word| {
        warn(format_args!(
            "{ADDRESSES}: {word} is not an IPv4 or IPv6 address: no device is shown"
        ));
        Vec::new()
    })
}

/// Returns the devices that exist now. A device that was shown once keeps its name and its place in memory.
fn devices() -> Vec<&'static DeviceObject> {
    static KNOWN: Mutex<Vec<&'static DeviceObject>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock();
    let mut now = Vec::new();
    for address in addresses() {
        let found = known.iter().find(|device| device.address == address).copied();
        let device = found.unwrap_or_else(|| {
            let device: &'static DeviceObject = Box::leak(Box::new(DeviceObject::new(known.len(), address)));
            known.push(device);
            device
        });
        now.push(device);
    }
    now
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut abi::Device {
    let devices = devices();
    // SAFETY: room for all and a null pointer; what calloc gave is zero, so the list ends with one.
    let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut abi::Device>()) };
    let list = list.cast::<*mut abi::Device>();
    if list.is_null() {
        return list;
    }
    for (i, device) in devices.iter().enumerate() {
        // SAFETY: `i` is less than the room. Programs only read what they get.
        unsafe { *list.add(i) = ptr::from_ref(&device.shown).cast_mut() };
    }
    if !count.is_null() {
        // SAFETY: not null, so a number of the caller's.
        unsafe { *count = devices.len() as c_int };
    }
    list
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut abi::Device) {
    // SAFETY: made by calloc in `ibv_get_device_list`, says the caller.
    unsafe { libc::free(list.cast()) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut abi::Device) -> *const c_char {
    // SAFETY: a device of the list, says the caller.
    unsafe { DeviceObject::of(device) }.shown.name.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_guid(device: *mut abi::Device) -> u64 {
    // SAFETY: a device of the list, says the caller.
    unsafe { DeviceObject::of(device) }.guid()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_index(device: *mut abi::Device) -> c_int {
    // SAFETY: a device of the list, says the caller.
    unsafe { DeviceObject::of(device) }.index
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Returns the length of a file in a device's folder without the end of the line, and writes its contents, or returns -1.
/// `rdmux run` shows which files there are.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    into: *mut c_char,
    room: usize,
) -> c_int {
    // SAFETY: strings of the caller's.
    let (folder, file) = unsafe { (CStr::from_ptr(folder), CStr::from_ptr(file)) };
    let path = Path::new(OsStr::from_bytes(folder.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
    let Ok(text) = std::fs::read(path) else {
        return crate::minus_one(Err(libc::ENOENT));
    };
    let text = text.strip_suffix(b"\n").unwrap_or(&text);
    let length = text.len().min(room.saturating_sub(1));
    if room > 0 {
        // SAFETY: room for that and an end, says the caller.
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr().cast(), into, length);
            *into.add(length) = 0;
        }
    }
    length as c_int
}

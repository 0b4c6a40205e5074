//! Devices: one for each local address that peers can use. Its only GID is that address.

use std::ffi::{c_char, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use rdmux_verbs::soft::resources::node_guid;

use crate::abi;

/// The environment variable that names the devices' addresses, in their order.
const ADDRESSES: &str = "RDMUX_DEVICES";

/// What a program's `struct ibv_device` pointer points at. Entries live as long as the process does: programs free the list and go on
/// to use what was in it.
#[repr(C)]
pub(crate) struct Device {
    pub(crate) shown: abi::Device,
    /// Vendors' libraries look here for the operations of a driver of theirs, and find that there are none.
    driver: *const c_void,
    rest: [*const c_void; 7],
    pub(crate) address: IpAddr,
    pub(crate) index: c_int,
}

// SAFETY: written once, before anybody has a pointer to it; the pointers in it are null.
unsafe impl Sync for Device {}
// SAFETY: as above.
unsafe impl Send for Device {}

impl Device {
    /// What a program's pointer points at.
    ///
    /// # Safety
    /// The pointer is one that [`ibv_get_device_list`] gave out.
    pub(crate) unsafe fn of<'a>(device: *mut abi::Device) -> &'a Device {
        // SAFETY: as the caller says; entries are never freed.
        unsafe { &*device.cast::<Device>() }
    }

    fn new(index: usize, address: IpAddr) -> Device {
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
        Device {
            shown,
            driver: ptr::null(),
            rest: [ptr::null(); 7],
            address,
            index: index as c_int,
        }
    }

    /// All that there are now.
    pub(crate) fn all() -> Vec<&'static Device> {
        devices()
    }

    /// The one of an address.
    pub(crate) fn at(address: IpAddr) -> Option<&'static Device> {
        devices().into_iter().find(|device| device.address == address)
    }

    /// Its node GUID, in network order.
    pub(crate) fn guid(&self) -> u64 {
        node_guid(self.address).to_be()
    }

    /// Its GID.
    pub(crate) fn gid(&self) -> abi::Gid {
        match self.address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        }
    }
}

/// Writes a string of C into a field, cut where it is too long.
pub(crate) fn put(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (to, from) in field.iter_mut().zip(text.bytes().take(room)) {
        *to = from.cast_signed();
    }
}

/// The addresses that devices are shown for: those of `RDMUX_DEVICES`, else those of the interfaces that are up, those that other hosts
/// can reach first.
fn addresses() -> Vec<IpAddr> {
    let Ok(wanted) = std::env::var(ADDRESSES) else {
        return local_addresses();
    };
    let mut found = Vec::new();
    for word in wanted.split([',', ' ']).filter(|word| !word.is_empty()) {
        match word.parse() {
            Ok(address) => found.push(address),
            Err(_) => eprintln!("rdmux: {ADDRESSES}: {word} is no IPv4 or IPv6 address: it is left out"),
        }
    }
    found
}

fn local_addresses() -> Vec<IpAddr> {
    let mut list = ptr::null_mut();
    // SAFETY: the list is made by the C library and freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return vec![Ipv4Addr::LOCALHOST.into()];
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: `next` is null or an entry of the list, which is freed after the loop.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: an entry's address is null or a socket address of its family.
        if let Some(address) = unsafe { address_of(entry.ifa_addr) } {
            found.push(address);
        }
    }
    // SAFETY: made by getifaddrs, and not used any more.
    unsafe { libc::freeifaddrs(list) };
    found.sort_by_key(|address| (address.is_loopback(), address.is_ipv6(), *address));
    found.dedup();
    found
}

/// The address of a socket address, where a device can have it: IPv6 of link-local scope means nothing without its link.
///
/// # Safety
/// Null, or a socket address of the size that its family has.
unsafe fn address_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: null or a socket address, says the caller.
    match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: of this family.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: of this family.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let v6 = std::net::Ipv6Addr::from(v6.sin6_addr.s6_addr);
            (!v6.is_unicast_link_local()).then_some(v6.into())
        }
        _ => None,
    }
}

/// The devices that there are now. One that was shown once keeps its name and its place in memory.
fn devices() -> Vec<&'static Device> {
    static KNOWN: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut now = Vec::new();
    for address in addresses() {
        let found = known.iter().find(|device| device.address == address).copied();
        let device = found.unwrap_or_else(|| {
            let device: &'static Device = Box::leak(Box::new(Device::new(known.len(), address)));
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
    unsafe { Device::of(device) }.shown.name.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_guid(device: *mut abi::Device) -> u64 {
    // SAFETY: a device of the list, says the caller.
    unsafe { Device::of(device) }.guid()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_index(device: *mut abi::Device) -> c_int {
    // SAFETY: a device of the list, says the caller.
    unsafe { Device::of(device) }.index
}

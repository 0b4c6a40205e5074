//! Address handles.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_verbs::{Device, Path, Qpn, Target};

use crate::context::ContextObject;
use crate::memory::PdObject;
use crate::uses::Use;
use crate::{abi, made};

/// Object behind a program's `struct ibv_ah` pointer.
#[repr(C)]
pub(crate) struct AhObject {
    shown: abi::Ah,
    device: Device,
    to: IpAddr,
    traffic_class: u8,
    /// Queue pair that was sent to last, and the source port of packets to it: `qpn << 16 | port`. 0: none yet.
    last: AtomicU64,
    _domain: Use,
}

/// Returns the address that a GID stands for.
pub(crate) fn address_of(gid: abi::Gid) -> IpAddr {
    IpAddr::from(Ipv6Addr::from(gid)).to_canonical()
}

/// Returns the peer's address and the traffic class of an address vector.
pub(crate) fn vector(attr: &abi::AhAttr) -> Result<(IpAddr, u8), c_int> {
    // On Ethernet there is no address but the global one.
    if attr.is_global == 0 || attr.grh.sgid_index != 0 || attr.port_num > 1 {
        return Err(libc::EINVAL);
    }
    Ok((address_of(attr.grh.dgid.0), attr.grh.traffic_class))
}

/// Returns the address vector of a peer's address.
pub(crate) fn vector_to(to: IpAddr, traffic_class: u8) -> abi::AhAttr {
    let gid = match to {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut attr = abi::AhAttr {
        is_global: 1,
        port_num: 1,
        ..abi::AhAttr::default()
    };
    attr.grh.dgid = abi::AlignedGid(gid.octets());
    attr.grh.hop_limit = 64;
    attr.grh.traffic_class = traffic_class;
    attr
}

impl AhObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is null, or one that `ibv_create_ah` gave out and is not destroyed.
    pub(crate) unsafe fn of<'a>(handle: *mut abi::Ah) -> Result<&'a AhObject, c_int> {
        // SAFETY: as the caller says.
        unsafe { handle.cast::<AhObject>().as_ref() }.ok_or(libc::EINVAL)
    }

    /// Returns the destination of a request.
    pub(crate) fn target(&self, qpn: u32, qkey: u32) -> Result<Target, c_int> {
        let qpn = Qpn::new(qpn);
        let last = self.last.load(Ordering::Relaxed);
        let src_port = if last != 0 && last >> 16 == u64::from(qpn.value()) {
            last as u16
        } else {
            let port = self
                .device
                .source_port(qpn)
                .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
            self.last
                .store(u64::from(qpn.value()) << 16 | u64::from(port), Ordering::Relaxed);
            port
        };
        let path = Path {
            src: self.device.address(),
            dst: self.to,
            src_port,
            traffic_class: self.traffic_class,
        };
        Ok(Target::Datagram { path, qpn, qkey })
    }
}

unsafe fn create(pd: *mut abi::Pd, attr: &abi::AhAttr) -> Result<*mut abi::Ah, c_int> {
    let (to, traffic_class) = vector(attr)?;
    // SAFETY: a domain that was made, says the caller.
    let context = unsafe { (*pd).context };
    // SAFETY: an open context, which lives as long as its objects.
    let device = unsafe { ContextObject::of(context) }.device.clone();
    let shown = abi::Ah {
        context,
        pd,
        handle: 0,
    };
    let handle = AhObject {
        shown,
        device,
        to,
        traffic_class,
        last: AtomicU64::new(0),
        // SAFETY: a domain that was made, says the caller.
        _domain: unsafe { PdObject::of(pd) }.uses.begin(),
    };
    Ok(Box::into_raw(Box::new(handle)).cast())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah(pd: *mut abi::Pd, attr: *mut abi::AhAttr) -> *mut abi::Ah {
    // SAFETY: as the caller says.
    made(unsafe { create(pd, &*attr) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_ah(handle: *mut abi::Ah) -> c_int {
    // SAFETY: made by a Box in `create`, and not used any more, says the caller.
    drop(unsafe { Box::from_raw(handle.cast::<AhObject>()) });
    0
}

/// Returns the address vector of the sender of a datagram, from the global route header before it.
///
/// # Safety
/// As `ibv_init_ah_from_wc(3)` has it.
unsafe fn way_back(port: u8, wc: &abi::Wc, header: *const u8) -> Result<abi::AhAttr, c_int> {
    if wc.wc_flags & abi::wc_flags::GRH == 0 || header.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: 40 bytes, says the caller.
    let header: [u8; 40] = unsafe { header.cast::<[u8; 40]>().read_unaligned() };
    // A17.4.5.2: over IPv4 the header is the packet's, in the last 20 bytes.
    let (source, traffic_class) = if header[0] >> 4 == 6 {
        let mut gid = [0; 16];
        gid.copy_from_slice(&header[8..24]);
        (Ipv6Addr::from(gid).into(), header[0] << 4 | header[1] >> 4)
    } else {
        let [a, b, c, d] = [header[32], header[33], header[34], header[35]];
        (Ipv4Addr::new(a, b, c, d).into(), header[21])
    };
    Ok(abi::AhAttr {
        port_num: port,
        ..vector_to(source, traffic_class)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_init_ah_from_wc(
    _: *mut abi::Context,
    port: u8,
    wc: *mut abi::Wc,
    header: *const u8,
    attr: *mut abi::AhAttr,
) -> c_int {
    // SAFETY: as the caller says.
    crate::status(unsafe { way_back(port, &*wc, header) }.map(|found| {
        // SAFETY: a place of the caller's.
        unsafe { *attr = found };
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut abi::Pd,
    wc: *mut abi::Wc,
    header: *const u8,
    port: u8,
) -> *mut abi::Ah {
    // SAFETY: as the caller says.
    made(unsafe { way_back(port, &*wc, header) }.and_then(|attr| {
        // SAFETY: as the caller says.
        unsafe { create(pd, &attr) }
    }))
}

//! Properties of devices and ports.

use std::ffi::{c_int, c_void};

use rdmux_verbs::{Features, INLINE_BYTES_MAX, MCAST_GROUPS_MAX, MCAST_QPS_MAX, PathMtu, SGE_MAX};

use rdmux_verbs::abi::device_cap;

use crate::context::ContextObject;
use crate::device::put;
use crate::queue_pair::WR_MAX;
use crate::{abi, completions, device_memory, minus_one, status};

/// Maximum number of completions that a queue can have.
pub(crate) const CQE_MAX: c_int = 1 << 20;
/// Maximum number of objects of a kind that a device can have: for queue pairs by their numbers, for the others just as many.
const OBJECTS_MAX: c_int = 1 << 16;
/// Maximum number of objects that have a number on the wire: docs/features.md.
const NUMBERED_MAX: c_int = 1 << 15;
/// Fewer than the 255 that a queue pair may have: as rxe reports, because perftest sets up its end by its peer's number.
const READS_MAX: c_int = 128;

/// More of `enum ibv_device_cap_flags`.
const PORT_ACTIVE_EVENT: u64 = 1 << 10;
const SYS_IMAGE_GUID: u64 = 1 << 11;
const RC_RNR_NAK_GEN: u64 = 1 << 12;
const SRQ_RESIZE: u64 = 1 << 13;

/// `enum ibv_odp_transport_cap_bits`, and `IBV_ODP_SUPPORT_IMPLICIT`.
mod odp {
    pub(super) const SEND: u32 = 1;
    pub(super) const RECV: u32 = 1 << 1;
    pub(super) const WRITE: u32 = 1 << 2;
    pub(super) const READ: u32 = 1 << 3;
    pub(super) const ATOMIC: u32 = 1 << 4;
    pub(super) const SRQ_RECV: u32 = 1 << 5;
    pub(super) const IMPLICIT: u64 = 1 << 1;
}

fn attributes(context: &ContextObject) -> abi::DeviceAttr {
    let of = context.of;
    // A device of a node lacks some.
    let features = context.device.features();
    let if_it_has = |feature, number| if features.contains(feature) { number } else { 0 };
    // SAFETY: numbers alone, all of which may be zero.
    let mut attr: abi::DeviceAttr = unsafe { std::mem::zeroed() };
    put(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    attr.node_guid = of.guid();
    attr.sys_image_guid = of.guid();
    attr.max_mr_size = u64::MAX;
    attr.page_size_cap = 0xffff_f000;
    // No vendor: the range of locally administered identifiers.
    attr.vendor_id = 0x02_0000;
    attr.vendor_part_id = 1;
    attr.max_qp = NUMBERED_MAX;
    attr.max_qp_wr = WR_MAX as c_int;
    // SEND with invalidate, local invalidate, windows of type 2. Only the kernel can register by a work request.
    let windows = device_cap::MEM_WINDOW | device_cap::MEM_WINDOW_TYPE_2B | device_cap::MEM_MGT_EXTENSIONS;
    let optional = [
        (Features::MW_TYPE_1 | Features::MW_TYPE_2, windows),
        (Features::XRC, device_cap::XRC),
        (Features::SRQ, SRQ_RESIZE),
    ];
    let optional = optional
        .into_iter()
        .filter(|(feature, _)| features.contains(*feature));
    let flags = optional.map(|(_, flags)| flags).fold(0, std::ops::BitOr::bitor);
    attr.device_cap_flags = (flags | PORT_ACTIVE_EVENT | SYS_IMAGE_GUID | RC_RNR_NAK_GEN) as u32;
    attr.max_mw = if_it_has(Features::MW_TYPE_1, OBJECTS_MAX);
    attr.max_srq = if_it_has(Features::SRQ, NUMBERED_MAX);
    attr.max_srq_wr = if_it_has(Features::SRQ, WR_MAX as c_int);
    attr.max_srq_sge = if_it_has(Features::SRQ, SGE_MAX as c_int);
    attr.max_sge = SGE_MAX as c_int;
    attr.max_sge_rd = SGE_MAX as c_int;
    attr.max_cq = OBJECTS_MAX;
    attr.max_cqe = CQE_MAX;
    attr.max_mr = OBJECTS_MAX;
    attr.max_pd = OBJECTS_MAX;
    attr.max_qp_rd_atom = READS_MAX;
    attr.max_res_rd_atom = READS_MAX * NUMBERED_MAX;
    attr.max_qp_init_rd_atom = 128;
    // IBV_ATOMIC_HCA: atomic with respect to the device's own atomic operations.
    attr.atomic_cap = if features.contains(Features::ATOMIC) { 1 } else { 0 };
    attr.max_ah = OBJECTS_MAX;
    let groups = |number| if_it_has(Features::MULTICAST, number);
    attr.max_mcast_grp = groups(MCAST_GROUPS_MAX as c_int);
    attr.max_mcast_qp_attach = groups(MCAST_QPS_MAX as c_int);
    attr.max_total_mcast_qp_attach = groups((MCAST_GROUPS_MAX * MCAST_QPS_MAX) as c_int);
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = 15;
    attr.phys_port_cnt = 1;
    attr
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(context: *mut abi::Context, attr: *mut abi::DeviceAttr) -> c_int {
    // SAFETY: an open context and a place of the caller's.
    unsafe { *attr = attributes(ContextObject::of(context)) };
    0
}

pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut abi::Context,
    _: *const c_void,
    attr: *mut abi::DeviceAttrEx,
    size: usize,
) -> c_int {
    if size < size_of::<abi::DeviceAttr>() {
        return libc::EINVAL;
    }
    // SAFETY: numbers alone, all of which may be zero.
    let mut whole: abi::DeviceAttrEx = unsafe { std::mem::zeroed() };
    // SAFETY: an open context, says the caller.
    let of = unsafe { ContextObject::of(context) };
    let features = of.device.features();
    whole.orig_attr = attributes(of);
    // The same flags; there would be room for more.
    whole.device_cap_flags_ex = whole.orig_attr.device_cap_flags.into();
    // Nothing is pinned: all memory is on demand.
    let datagrams = odp::SEND | odp::RECV | odp::SRQ_RECV;
    whole.odp_general_caps = abi::ODP_SUPPORT | odp::IMPLICIT;
    whole.odp_rc = datagrams | odp::WRITE | odp::READ | odp::ATOMIC;
    whole.odp_uc = datagrams | odp::WRITE;
    whole.odp_ud = datagrams;
    whole.xrc_odp = if features.contains(Features::XRC) {
        whole.odp_rc
    } else {
        0
    };
    if features.contains(Features::CQ_TIMES) {
        whole.completion_timestamp_mask = u64::MAX;
        whole.hca_core_clock = completions::CLOCK_KHZ;
    }
    let mut extended = 0;
    for (feature, flag) in [
        (Features::FLUSH_GLOBAL, device_cap::FLUSH_GLOBAL),
        (Features::ATOMIC_WRITE, device_cap::ATOMIC_WRITE),
    ] {
        extended |= if features.contains(feature) { flag } else { 0 };
    }
    whole.device_cap_flags_ex = u64::from(whole.orig_attr.device_cap_flags) | extended;
    whole.qp_rate_limit_min = 1;
    whole.qp_rate_limit_max = u32::MAX;
    let types = [abi::qp_type::RC, abi::qp_type::UC, abi::qp_type::UD];
    whole.qp_rate_limit_types = types.into_iter().map(|qp_type| 1 << qp_type).sum();
    whole.max_dm_size = device_memory::BYTES_MAX;
    whole.max_cq_count = u16::MAX;
    whole.max_cq_period = u16::MAX;
    whole.phys_port_cnt_ex = 1;
    let size = size.min(size_of::<abi::DeviceAttrEx>());
    // SAFETY: the caller has `size` bytes there.
    unsafe { std::ptr::copy_nonoverlapping((&raw const whole).cast::<u8>(), attr.cast::<u8>(), size) };
    0
}

fn port(context: &ContextObject, number: u8) -> Result<abi::PortAttr, c_int> {
    if number != 1 {
        return Err(libc::EINVAL);
    }
    // IBV_PORT_ACTIVE and LinkUp, or IBV_PORT_DOWN and Disabled.
    let (state, phys_state) = if context.device.is_active() {
        (4, 5)
    } else {
        (1, 3)
    };
    Ok(abi::PortAttr {
        state,
        max_mtu: PathMtu::Bytes4096.code().into(),
        active_mtu: context.device.active_mtu().code().into(),
        gid_tbl_len: GIDS_MAX as c_int,
        // IBV_PORT_CM_SUP, IBV_PORT_IP_BASED_GIDS
        port_cap_flags: 1 << 16 | 1 << 26,
        max_msg_sz: 1 << 31,
        pkey_tbl_len: 1,
        // 4x, 10 Gb/s a lane: arbitrary numbers, because the fields must have some.
        active_width: 2,
        active_speed: 4,
        phys_state,
        link_layer: abi::LINK_LAYER_ETHERNET,
        ..abi::PortAttr::default()
    })
}

pub(crate) unsafe extern "C" fn query_port(
    context: *mut abi::Context,
    number: u8,
    attr: *mut abi::PortAttr,
    size: usize,
) -> c_int {
    // SAFETY: an open context, says the caller.
    status(port(unsafe { ContextObject::of(context) }, number).map(|port| {
        let size = size.min(size_of::<abi::PortAttr>());
        // SAFETY: the caller has `size` bytes there.
        unsafe { std::ptr::copy_nonoverlapping((&raw const port).cast::<u8>(), attr.cast::<u8>(), size) };
    }))
}

/// The exported function serves programs from before the structure grew.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(
    context: *mut abi::Context,
    number: u8,
    attr: *mut abi::PortAttr,
) -> c_int {
    let old = std::mem::offset_of!(abi::PortAttr, port_cap_flags2);
    // SAFETY: as the caller says.
    unsafe { query_port(context, number, attr, old) }
}

/// Speed in units of 100 Mb/s: 4 lanes of 10 Gb/s, as [`port`] has them.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port_speed(_: *mut abi::Context, number: u32, speed: *mut u64) -> c_int {
    if number != 1 {
        return libc::EINVAL;
    }
    // SAFETY: a place of the caller's.
    unsafe { *speed = 400 };
    0
}

/// Entries of a port's GID table. One is empty: programs that are told to use index 1 query it.
const GIDS_MAX: u32 = 2;

/// Returns the GID at an index; `ENODATA`: that entry is empty.
fn gid(context: &ContextObject, port: u32, index: u32) -> Result<abi::Gid, c_int> {
    match (port, index) {
        (1, 0) => Ok(context.of.gid()),
        (1, 1..GIDS_MAX) => Err(libc::ENODATA),
        _ => Err(libc::EINVAL),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(
    context: *mut abi::Context,
    port: u8,
    index: c_int,
    into: *mut abi::AlignedGid,
) -> c_int {
    // SAFETY: an open context, says the caller.
    let found = gid(
        unsafe { ContextObject::of(context) },
        port.into(),
        index.cast_unsigned(),
    );
    let found = match found {
        Err(libc::ENODATA) => Ok(abi::Gid::default()),
        found => found,
    };
    // SAFETY: 16 bytes of the caller's.
    minus_one(found.map(|gid| unsafe { into.cast::<abi::Gid>().write_unaligned(gid) }))
}

fn entry(context: &ContextObject, port: u32, index: u32) -> Result<abi::GidEntry, c_int> {
    Ok(abi::GidEntry {
        gid: abi::AlignedGid(gid(context, port, index)?),
        gid_index: index,
        port_num: port,
        gid_type: abi::GID_TYPE_ROCE_V2,
        ndev_ifindex: 0,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut abi::Context,
    port: u32,
    index: u32,
    into: *mut abi::GidEntry,
    flags: u32,
    size: usize,
) -> c_int {
    if flags != 0 || size < size_of::<abi::GidEntry>() {
        return libc::EINVAL;
    }
    // SAFETY: an open context, says the caller.
    let found = entry(unsafe { ContextObject::of(context) }, port, index);
    // SAFETY: an entry of the caller's.
    status(found.map(|entry| unsafe { *into = entry }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut abi::Context,
    into: *mut abi::GidEntry,
    room: usize,
    flags: u32,
    size: usize,
) -> isize {
    if flags != 0 || room < 1 || size < size_of::<abi::GidEntry>() {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: an open context, says the caller.
    match entry(unsafe { ContextObject::of(context) }, 1, 0) {
        Ok(entry) => {
            // SAFETY: room for one, says the caller.
            unsafe { *into = entry };
            1
        }
        Err(errno) => -(errno as isize),
    }
}

/// From `<infiniband/driver.h>`: 0 is InfiniBand and RoCE v1, 1 is RoCE v2. An empty entry has type 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid_type(
    context: *mut abi::Context,
    port: u8,
    index: u32,
    gid_type: *mut u32,
) -> c_int {
    // SAFETY: an open context, says the caller.
    let is_there = gid(unsafe { ContextObject::of(context) }, port.into(), index).is_ok();
    // SAFETY: a place of the caller's.
    unsafe { *gid_type = is_there.into() };
    0
}

/// The only P_Key: that of the default partition, with full membership.
const PKEY: u16 = 0xffff;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_pkey(_: *mut abi::Context, port: u8, index: c_int, pkey: *mut u16) -> c_int {
    if (port, index) != (1, 0) {
        return minus_one(Err(libc::EINVAL));
    }
    // SAFETY: a place of the caller's.
    unsafe { *pkey = PKEY };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_pkey_index(_: *mut abi::Context, port: u8, pkey: u16) -> c_int {
    if port == 1 && u16::from_be(pkey) & 0x7fff == PKEY & 0x7fff {
        0
    } else {
        minus_one(Err(libc::EINVAL))
    }
}

const _: () = assert!(INLINE_BYTES_MAX >= 220, "programs ask for as much inline data");

//! The binary interface of `libibverbs.so.1` and `librdmacm.so.1`: structures and numbers, as rdma-core lays them out on 64-bit
//! machines. Only what programs share with the libraries is here, under the names of `<infiniband/verbs.h>` and
//! `<rdma/rdma_cma.h>` without their prefix. Sizes and offsets are in `abi/layout.rs`.
//!
//! Structures that a library hands out are longer than declared here, and are only reached through pointers.
#![allow(missing_debug_implementations, reason = "unions cannot be shown")]
#![allow(
    missing_docs,
    reason = "fields and numbers have the names of the C headers, which say what they are"
)]

use std::ffi::{c_char, c_int, c_void};

mod layout;
mod numbers;

pub use numbers::*;

/// `pthread_mutex_t` and `pthread_cond_t` of the GNU library.
type Mutex = [u64; 5];
type Condition = [u64; 6];

/// A GID, in network order.
pub type Gid = [u8; 16];

/// `struct ibv_device`.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    pub reserved: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

/// `struct ibv_context_ops`: the operations that programs call through the context and not by name.
#[repr(C)]
#[derive(Debug)]
pub struct ContextOps {
    pub unused_0: [*const c_void; 7],
    pub alloc_mw: Option<AllocMw>,
    pub bind_mw: Option<BindMw>,
    pub dealloc_mw: Option<DeallocMw>,
    pub unused_10: *const c_void,
    pub poll_cq: Option<PollCq>,
    pub req_notify_cq: Option<ReqNotifyCq>,
    pub unused_13: [*const c_void; 7],
    pub post_srq_recv: Option<PostSrqRecv>,
    pub unused_21: [*const c_void; 4],
    pub post_send: Option<PostSend>,
    pub post_recv: Option<PostRecv>,
    pub unused_27: [*const c_void; 5],
}

/// `struct ibv_context`.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: Mutex,
    /// [`EXTENDED`] if a [`VerbsContext`] ends here.
    pub abi_compat: usize,
}

/// Value of [`Context::abi_compat`] in a [`VerbsContext`].
pub const EXTENDED: usize = usize::MAX;

/// `struct verbs_context`, which ends with the context and grows at its front. An operation exists if [`VerbsContext::size`], which
/// counts the context too, reaches it, and it is not null.
#[repr(C)]
#[derive(Debug)]
pub struct VerbsContext {
    pub query_port: Option<QueryPort>,
    pub advise_mr: *const c_void,
    pub alloc_null_mr: Option<unsafe extern "C" fn(*mut Pd) -> *mut Mr>,
    pub read_counters: *const c_void,
    pub attach_counters_point_flow: *const c_void,
    pub create_counters: *const c_void,
    pub destroy_counters: *const c_void,
    pub reg_dm_mr: Option<RegDmMr>,
    pub alloc_dm: Option<unsafe extern "C" fn(*mut Context, *mut AllocDmAttr) -> *mut Dm>,
    pub free_dm: Option<unsafe extern "C" fn(*mut Dm) -> c_int>,
    pub modify_flow_action_esp: *const c_void,
    pub destroy_flow_action: *const c_void,
    pub create_flow_action_esp: *const c_void,
    pub modify_qp_rate_limit: Option<ModifyQpRateLimit>,
    pub alloc_parent_domain: Option<AllocParentDomain>,
    pub dealloc_td: Option<unsafe extern "C" fn(*mut Td) -> c_int>,
    pub alloc_td: Option<unsafe extern "C" fn(*mut Context, *mut TdInitAttr) -> *mut Td>,
    pub modify_cq: Option<ModifyCq>,
    pub post_srq_ops: *const c_void,
    pub destroy_rwq_ind_table: *const c_void,
    pub create_rwq_ind_table: *const c_void,
    pub destroy_wq: *const c_void,
    pub modify_wq: *const c_void,
    pub create_wq: *const c_void,
    pub query_rt_values: Option<QueryRtValues>,
    pub create_cq_ex: Option<CreateCqEx>,
    pub private: *const c_void,
    pub query_device_ex: Option<QueryDeviceEx>,
    pub destroy_flow: *const c_void,
    pub unused_2: *const c_void,
    pub create_flow: *const c_void,
    pub unused_1: *const c_void,
    pub open_qp: Option<OpenQp>,
    pub create_qp_ex: Option<CreateQpEx>,
    pub get_srq_num: Option<GetSrqNum>,
    pub create_srq_ex: Option<CreateSrqEx>,
    pub open_xrcd: Option<OpenXrcd>,
    pub close_xrcd: Option<CloseXrcd>,
    pub unused_3: u64,
    pub size: usize,
    pub context: Context,
}

/// `struct ibv_pd`.
#[repr(C)]
#[derive(Debug)]
pub struct Pd {
    pub context: *mut Context,
    pub handle: u32,
}

/// `struct ibv_td`.
#[repr(C)]
#[derive(Debug)]
pub struct Td {
    pub context: *mut Context,
}

/// `struct ibv_td_init_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TdInitAttr {
    pub comp_mask: u32,
}

/// `struct ibv_parent_domain_init_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ParentDomainInitAttr {
    pub pd: *mut Pd,
    pub td: *mut Td,
    pub comp_mask: u32,
    pub alloc: Option<AllocMemory>,
    pub free: Option<FreeMemory>,
    pub pd_context: *mut c_void,
}

/// `struct ibv_dm`.
#[repr(C)]
#[derive(Debug)]
pub struct Dm {
    pub context: *mut Context,
    pub memcpy_to_dm: Option<unsafe extern "C" fn(*mut Dm, u64, *const c_void, usize) -> c_int>,
    pub memcpy_from_dm: Option<unsafe extern "C" fn(*mut c_void, *mut Dm, u64, usize) -> c_int>,
    pub comp_mask: u32,
    pub handle: u32,
}

/// `struct ibv_alloc_dm_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocDmAttr {
    pub length: usize,
    pub log_align_req: u32,
    pub comp_mask: u32,
}

/// `struct ibv_xrcd`.
#[repr(C)]
#[derive(Debug)]
pub struct Xrcd {
    pub context: *mut Context,
}

/// `struct ibv_ah`.
#[repr(C)]
#[derive(Debug)]
pub struct Ah {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_mw`.
#[repr(C)]
#[derive(Debug)]
pub struct Mw {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub rkey: u32,
    pub handle: u32,
    pub mw_type: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
#[derive(Debug)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// `struct ibv_cq`.
#[repr(C)]
#[derive(Debug)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: Mutex,
    pub cond: Condition,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

/// `struct ibv_cq_ex`.
#[repr(C)]
#[derive(Debug)]
pub struct CqEx {
    pub cq: Cq,
    pub comp_mask: u32,
    pub status: u32,
    pub wr_id: u64,
    pub start_poll: Option<unsafe extern "C" fn(*mut CqEx, *const PollCqAttr) -> c_int>,
    pub next_poll: Option<unsafe extern "C" fn(*mut CqEx) -> c_int>,
    pub end_poll: Option<unsafe extern "C" fn(*mut CqEx)>,
    pub read_opcode: Option<CqRead<u32>>,
    pub read_vendor_err: Option<CqRead<u32>>,
    pub read_byte_len: Option<CqRead<u32>>,
    pub read_imm_data: Option<CqRead<u32>>,
    pub read_qp_num: Option<CqRead<u32>>,
    pub read_src_qp: Option<CqRead<u32>>,
    pub read_wc_flags: Option<CqRead<u32>>,
    pub read_slid: Option<CqRead<u32>>,
    pub read_sl: Option<CqRead<u8>>,
    pub read_dlid_path_bits: Option<CqRead<u8>>,
    pub read_completion_ts: Option<CqRead<u64>>,
    pub read_cvlan: *const c_void,
    pub read_flow_tag: *const c_void,
    pub read_tm_info: *const c_void,
    pub read_completion_wallclock_ns: Option<CqRead<u64>>,
}

/// `struct ibv_poll_cq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PollCqAttr {
    pub comp_mask: u32,
}

/// `struct ibv_cq_init_attr_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CqInitAttrEx {
    pub cqe: u32,
    pub cq_context: *mut c_void,
    pub channel: *mut CompChannel,
    pub comp_vector: u32,
    pub wc_flags: u64,
    pub comp_mask: u32,
    pub flags: u32,
    pub parent_domain: *mut Pd,
}

/// `struct ibv_modify_cq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ModifyCqAttr {
    pub attr_mask: u32,
    pub cq_count: u16,
    /// Microseconds.
    pub cq_period: u16,
}

/// `struct ibv_values_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ValuesEx {
    pub comp_mask: u32,
    /// `struct timespec`
    pub raw_clock: [i64; 2],
}

/// `struct ibv_srq`.
#[repr(C)]
#[derive(Debug)]
pub struct Srq {
    pub context: *mut Context,
    pub srq_context: *mut c_void,
    pub pd: *mut Pd,
    pub handle: u32,
    pub mutex: Mutex,
    pub cond: Condition,
    pub events_completed: u32,
}

/// `struct ibv_qp`.
#[repr(C)]
#[derive(Debug)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: u32,
    pub qp_type: u32,
    pub mutex: Mutex,
    pub cond: Condition,
    pub events_completed: u32,
}

/// `struct ibv_qp_ex`. Only newer libraries provide [`QpEx::wr_flush`]: it may be read if the queue pair was made with
/// [`qp_ex::FLUSH`].
#[repr(C)]
#[derive(Debug)]
pub struct QpEx {
    pub qp: Qp,
    pub comp_mask: u64,
    pub wr_id: u64,
    pub wr_flags: u32,
    pub wr_atomic_cmp_swp: *const c_void,
    pub wr_atomic_fetch_add: *const c_void,
    pub wr_bind_mw: *const c_void,
    pub wr_local_inv: *const c_void,
    pub wr_rdma_read: *const c_void,
    pub wr_rdma_write: *const c_void,
    pub wr_rdma_write_imm: *const c_void,
    pub wr_send: *const c_void,
    pub wr_send_imm: *const c_void,
    pub wr_send_inv: *const c_void,
    pub wr_send_tso: *const c_void,
    pub wr_set_ud_addr: *const c_void,
    pub wr_set_xrc_srqn: *const c_void,
    pub wr_set_inline_data: *const c_void,
    pub wr_set_inline_data_list: *const c_void,
    pub wr_set_sge: *const c_void,
    pub wr_set_sge_list: *const c_void,
    pub wr_start: Option<WrStart>,
    pub wr_complete: Option<WrComplete>,
    pub wr_abort: Option<WrStart>,
    pub wr_atomic_write: Option<WrAtomicWrite>,
    pub wr_flush: Option<WrFlush>,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network order, or the key that was invalidated.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_data_buf`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DataBuf {
    pub addr: *mut c_void,
    pub length: usize,
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `wr.rdma` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// `wr.atomic` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// `wr.ud` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ud {
    pub ah: *mut Ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// `wr` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Remote {
    pub rdma: Rdma,
    pub atomic: Atomic,
    pub ud: Ud,
}

/// `struct ibv_mw_bind_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MwBindInfo {
    pub mr: *mut Mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: u32,
}

/// `struct ibv_mw_bind`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MwBind {
    pub wr_id: u64,
    pub send_flags: u32,
    pub bind_info: MwBindInfo,
}

/// `bind_mw` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BindMwWr {
    pub mw: *mut Mw,
    pub rkey: u32,
    pub bind_info: MwBindInfo,
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: u32,
    /// In network order, or the key to invalidate.
    pub imm_data: u32,
    pub wr: Remote,
    /// `qp_type.xrc.remote_srqn`
    pub remote_srqn: u32,
    pub bind_mw: BindMwWr,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// `struct ibv_rx_hash_conf`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RxHashConf {
    pub rx_hash_function: u8,
    pub rx_hash_key_len: u8,
    pub rx_hash_key: *mut u8,
    pub rx_hash_fields_mask: u64,
}

/// `struct ibv_qp_init_attr_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttrEx {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
    pub comp_mask: u32,
    pub pd: *mut Pd,
    pub xrcd: *mut Xrcd,
    pub create_flags: u32,
    pub max_tso_header: u16,
    pub rwq_ind_tbl: *mut c_void,
    pub rx_hash_conf: RxHashConf,
    pub source_qpn: u32,
    pub send_ops_flags: u64,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalRoute {
    /// `union ibv_gid`, which is aligned as a number.
    pub dgid: AlignedGid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AlignedGid(pub Gid);

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `struct ibv_qp_rate_limit_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpRateLimitAttr {
    /// In 1000 bits per second.
    pub rate_limit: u32,
    pub max_burst_sz: u32,
    pub typical_pkt_sz: u16,
    pub comp_mask: u32,
}

/// `struct ibv_srq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

/// `struct ibv_srq_init_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
}

/// `struct ibv_srq_init_attr_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SrqInitAttrEx {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
    pub comp_mask: u32,
    pub srq_type: u32,
    pub pd: *mut Pd,
    pub xrcd: *mut Xrcd,
    pub cq: *mut Cq,
    pub max_num_tags: u32,
    pub max_ops: u32,
}

/// `struct ibv_xrcd_init_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct XrcdInitAttr {
    pub comp_mask: u32,
    pub fd: c_int,
    pub oflags: c_int,
}

/// `struct ibv_qp_open_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpOpenAttr {
    pub comp_mask: u32,
    pub qp_num: u32,
    pub xrcd: *mut Xrcd,
    pub qp_context: *mut c_void,
    pub qp_type: u32,
}

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GidEntry {
    pub gid: AlignedGid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    /// Only for newer libraries, which receive the size of the structure.
    pub active_speed_ex: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_device_attr_ex`: the fields in use; the others by their size.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttrEx {
    pub orig_attr: DeviceAttr,
    pub comp_mask: u32,
    pub odp_general_caps: u64,
    pub odp_rc: u32,
    pub odp_uc: u32,
    pub odp_ud: u32,
    pub completion_timestamp_mask: u64,
    pub hca_core_clock: u64,
    pub device_cap_flags_ex: u64,
    /// `tso_caps`, `rss_caps`, `max_wq_type_rq`.
    pub offloads: [u32; 11],
    /// In 1000 bits per second.
    pub qp_rate_limit_min: u32,
    pub qp_rate_limit_max: u32,
    /// A bit for each type of queue pairs.
    pub qp_rate_limit_types: u32,
    pub raw_packet_caps: u32,
    /// `tm_caps`
    pub tag_matching: [u32; 5],
    pub max_cq_count: u16,
    pub max_cq_period: u16,
    pub max_dm_size: u64,
    /// `pci_atomic_caps`
    pub pci_atomics: [u16; 3],
    pub xrc_odp: u32,
    pub phys_port_cnt_ex: u32,
}

/// `struct ibv_async_event`. The element is a pointer to the object, or the port's number.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AsyncEvent {
    pub element: usize,
    pub event_type: u32,
}

/// `struct sockaddr_storage`: the part that IP addresses need.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SockAddr(pub [u8; 28]);

/// `struct rdma_event_channel`.
#[repr(C)]
#[derive(Debug)]
pub struct EventChannel {
    pub fd: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
#[derive(Debug)]
pub struct CmId {
    pub verbs: *mut Context,
    pub channel: *mut EventChannel,
    pub context: *mut c_void,
    pub qp: *mut Qp,
    pub src_addr: [u64; 16],
    pub dst_addr: [u64; 16],
    pub sgid: Gid,
    pub dgid: Gid,
    pub pkey: u16,
    pub path_rec: *mut c_void,
    pub num_paths: c_int,
    /// The end of `struct rdma_route`.
    pub padding: u32,
    pub ps: u32,
    pub port_num: u8,
    pub event: *mut CmEvent,
    pub send_cq_channel: *mut CompChannel,
    pub send_cq: *mut Cq,
    pub recv_cq_channel: *mut CompChannel,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub pd: *mut Pd,
    pub qp_type: u32,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// `struct rdma_ud_param`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UdParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub ah_attr: AhAttr,
    pub qp_num: u32,
    pub qkey: u32,
}

/// `param` of `struct rdma_cm_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub union CmParam {
    pub conn: ConnParam,
    pub ud: UdParam,
}

/// `struct rdma_cm_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CmEvent {
    pub id: *mut CmId,
    pub listen_id: *mut CmId,
    pub event: u32,
    pub status: c_int,
    pub param: CmParam,
}

/// `ibv_alloc_mw`
pub type AllocMw = unsafe extern "C" fn(*mut Pd, u32) -> *mut Mw;
/// `ibv_bind_mw`
pub type BindMw = unsafe extern "C" fn(*mut Qp, *mut Mw, *mut MwBind) -> c_int;
/// `ibv_dealloc_mw`
pub type DeallocMw = unsafe extern "C" fn(*mut Mw) -> c_int;
/// `ibv_poll_cq`
pub type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
/// `ibv_req_notify_cq`
pub type ReqNotifyCq = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
/// `ibv_post_srq_recv`
pub type PostSrqRecv = unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int;
/// `ibv_post_send`
pub type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
/// `ibv_post_recv`
pub type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;
/// `ibv_query_port`, with the size of the caller's structure.
pub type QueryPort = unsafe extern "C" fn(*mut Context, u8, *mut PortAttr, usize) -> c_int;
/// `ibv_query_device_ex`, with the size of the caller's structure.
pub type QueryDeviceEx = unsafe extern "C" fn(*mut Context, *const c_void, *mut DeviceAttrEx, usize) -> c_int;
/// `ibv_create_qp_ex`
pub type CreateQpEx = unsafe extern "C" fn(*mut Context, *mut QpInitAttrEx) -> *mut Qp;
/// `ibv_modify_qp_rate_limit`
pub type ModifyQpRateLimit = unsafe extern "C" fn(*mut Qp, *mut QpRateLimitAttr) -> c_int;
/// Function that reads one field of a completion, such as `ibv_wc_read_*`.
pub type CqRead<T> = unsafe extern "C" fn(*mut CqEx) -> T;
/// `ibv_reg_dm_mr`: offset, bytes, rights.
pub type RegDmMr = unsafe extern "C" fn(*mut Pd, *mut Dm, u64, usize, u32) -> *mut Mr;
/// `alloc` of `struct ibv_parent_domain_init_attr`
pub type AllocMemory = unsafe extern "C" fn(*mut Pd, *mut c_void, usize, usize, u64) -> *mut c_void;
/// `free` of `struct ibv_parent_domain_init_attr`
pub type FreeMemory = unsafe extern "C" fn(*mut Pd, *mut c_void, *mut c_void, u64);
/// `ibv_alloc_parent_domain`
pub type AllocParentDomain = unsafe extern "C" fn(*mut Context, *mut ParentDomainInitAttr) -> *mut Pd;
/// `ibv_create_cq_ex`
pub type CreateCqEx = unsafe extern "C" fn(*mut Context, *mut CqInitAttrEx) -> *mut CqEx;
/// `ibv_modify_cq`
pub type ModifyCq = unsafe extern "C" fn(*mut Cq, *mut ModifyCqAttr) -> c_int;
/// `ibv_query_rt_values_ex`
pub type QueryRtValues = unsafe extern "C" fn(*mut Context, *mut ValuesEx) -> c_int;
/// `ibv_create_srq_ex`
pub type CreateSrqEx = unsafe extern "C" fn(*mut Context, *mut SrqInitAttrEx) -> *mut Srq;
/// `ibv_get_srq_num`
pub type GetSrqNum = unsafe extern "C" fn(*mut Srq, *mut u32) -> c_int;
/// `ibv_open_qp`
pub type OpenQp = unsafe extern "C" fn(*mut Context, *mut QpOpenAttr) -> *mut Qp;
/// `ibv_open_xrcd`
pub type OpenXrcd = unsafe extern "C" fn(*mut Context, *mut XrcdInitAttr) -> *mut Xrcd;
/// `ibv_close_xrcd`
pub type CloseXrcd = unsafe extern "C" fn(*mut Xrcd) -> c_int;
/// `ibv_wr_start` and `ibv_wr_abort`
pub type WrStart = unsafe extern "C" fn(*mut QpEx);
/// `ibv_wr_complete`
pub type WrComplete = unsafe extern "C" fn(*mut QpEx) -> c_int;
/// `ibv_wr_atomic_write`
pub type WrAtomicWrite = unsafe extern "C" fn(*mut QpEx, u32, u64, *const c_void);
/// `ibv_wr_flush`: key, address, bytes, placement types, selectivity.
pub type WrFlush = unsafe extern "C" fn(*mut QpEx, u32, u64, usize, u8, u8);

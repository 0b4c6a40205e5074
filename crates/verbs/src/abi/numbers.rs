//! The numbers of the interface, under the names of the C headers without their prefix. `cargo xtask abi` compares them with the headers.

/// `enum ibv_qp_attr_mask`.
pub mod qp_attr {
    pub const STATE: u32 = 1;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    pub const CAP: u32 = 1 << 19;
    pub const DEST_QPN: u32 = 1 << 20;
    pub const RATE_LIMIT: u32 = 1 << 25;
    /// Bits that stand for no attribute, either no longer or not yet.
    pub const UNKNOWN: u32 = !(RATE_LIMIT | ((1 << 21) - 1));
}

/// `enum ibv_qp_type`.
pub mod qp_type {
    pub const RC: u32 = 2;
    pub const UC: u32 = 3;
    pub const UD: u32 = 4;
    pub const XRC_SEND: u32 = 9;
    pub const XRC_RECV: u32 = 10;
}

/// `enum ibv_qp_init_attr_mask`.
pub mod qp_init {
    pub const PD: u32 = 1;
    pub const XRCD: u32 = 1 << 1;
    pub const CREATE_FLAGS: u32 = 1 << 2;
    pub const SEND_OPS_FLAGS: u32 = 1 << 6;
}

/// `enum ibv_qp_open_attr_mask`.
pub mod qp_open {
    pub const NUM: u32 = 1;
    pub const XRCD: u32 = 1 << 1;
    pub const CONTEXT: u32 = 1 << 2;
    pub const TYPE: u32 = 1 << 3;
}

/// `enum ibv_qp_create_send_ops_flags`.
pub mod qp_ex {
    pub const FLUSH: u64 = 1 << 11;
    pub const ATOMIC_WRITE: u64 = 1 << 12;
}

/// `enum ibv_srq_init_attr_mask`, `enum ibv_srq_type` and `enum ibv_srq_attr_mask`.
pub mod srq {
    use std::ffi::c_int;

    pub const INIT_TYPE: u32 = 1;
    pub const INIT_PD: u32 = 1 << 1;
    pub const INIT_XRCD: u32 = 1 << 2;
    pub const INIT_CQ: u32 = 1 << 3;
    pub const TYPE_BASIC: u32 = 0;
    pub const TYPE_XRC: u32 = 1;
    pub const MAX_WR: c_int = 1;
    pub const LIMIT: c_int = 1 << 1;
}

/// `enum ibv_parent_domain_init_attr_mask`.
pub mod parent_domain {
    pub const ALLOCATORS: u32 = 1;
    pub const PD_CONTEXT: u32 = 1 << 1;
    pub const ALLOW_CC_UNPROTECTED_ALLOC: u32 = 1 << 2;
}

/// `IBV_DM_MASK_HANDLE`.
pub const DM_MASK_HANDLE: u32 = 1;

/// `enum ibv_xrcd_init_attr_mask`.
pub mod xrcd {
    pub const FD: u32 = 1;
    pub const OFLAGS: u32 = 1 << 1;
}

/// `enum ibv_wr_opcode`.
pub mod wr_opcode {
    pub const RDMA_WRITE: u32 = 0;
    pub const RDMA_WRITE_WITH_IMM: u32 = 1;
    pub const SEND: u32 = 2;
    pub const SEND_WITH_IMM: u32 = 3;
    pub const RDMA_READ: u32 = 4;
    pub const ATOMIC_CMP_AND_SWP: u32 = 5;
    pub const ATOMIC_FETCH_AND_ADD: u32 = 6;
    pub const LOCAL_INV: u32 = 7;
    pub const BIND_MW: u32 = 8;
    pub const SEND_WITH_INV: u32 = 9;
}

/// Flag of `enum ibv_send_flags` that [`crate::SendFlags`] does not have.
pub const SEND_INLINE: u32 = 1 << 3;

/// `enum ibv_wc_opcode`.
pub mod wc_opcode {
    pub const SEND: u32 = 0;
    pub const RDMA_WRITE: u32 = 1;
    pub const RDMA_READ: u32 = 2;
    pub const COMP_SWAP: u32 = 3;
    pub const FETCH_ADD: u32 = 4;
    pub const BIND_MW: u32 = 5;
    pub const LOCAL_INV: u32 = 6;
    pub const FLUSH: u32 = 8;
    pub const ATOMIC_WRITE: u32 = 9;
    pub const RECV: u32 = 128;
    pub const RECV_RDMA_WITH_IMM: u32 = 129;
}

/// `enum ibv_wc_flags`.
pub mod wc_flags {
    pub const GRH: u32 = 1;
    pub const WITH_IMM: u32 = 1 << 1;
    pub const WITH_INV: u32 = 1 << 3;
}

/// `enum ibv_create_cq_wc_flags`, `enum ibv_create_cq_attr_flags`, `enum ibv_cq_init_attr_mask`, `enum ibv_cq_attr_mask` and
/// `enum ibv_values_mask`.
pub mod cq_ex {
    /// `IBV_WC_STANDARD_FLAGS`
    pub const WITH_STANDARD: u64 = (1 << 7) - 1;
    pub const WITH_COMPLETION_TIMESTAMP: u64 = 1 << 7;
    pub const WITH_COMPLETION_TIMESTAMP_WALLCLOCK: u64 = 1 << 11;
    pub const SINGLE_THREADED: u32 = 1;
    pub const INIT_FLAGS: u32 = 1;
    pub const INIT_PD: u32 = 1 << 1;
    pub const MODERATE: u32 = 1;
    pub const RAW_CLOCK: u32 = 1;
}

/// `enum ibv_wc_status`.
pub mod wc_status {
    pub const SUCCESS: u32 = 0;
    pub const LOC_LEN_ERR: u32 = 1;
    pub const LOC_QP_OP_ERR: u32 = 2;
    pub const LOC_PROT_ERR: u32 = 4;
    pub const WR_FLUSH_ERR: u32 = 5;
    pub const MW_BIND_ERR: u32 = 6;
    pub const BAD_RESP_ERR: u32 = 7;
    pub const LOC_ACCESS_ERR: u32 = 8;
    pub const REM_INV_REQ_ERR: u32 = 9;
    pub const REM_ACCESS_ERR: u32 = 10;
    pub const REM_OP_ERR: u32 = 11;
    pub const RETRY_EXC_ERR: u32 = 12;
    pub const RNR_RETRY_EXC_ERR: u32 = 13;
}

/// `enum ibv_event_type`.
pub mod event_type {
    pub const CQ_ERR: u32 = 0;
    pub const QP_FATAL: u32 = 1;
    pub const QP_REQ_ERR: u32 = 2;
    pub const QP_ACCESS_ERR: u32 = 3;
    pub const COMM_EST: u32 = 4;
    pub const SQ_DRAINED: u32 = 5;
    pub const PATH_MIG: u32 = 6;
    pub const PATH_MIG_ERR: u32 = 7;
    pub const DEVICE_FATAL: u32 = 8;
    pub const PORT_ACTIVE: u32 = 9;
    pub const PORT_ERR: u32 = 10;
    pub const SRQ_ERR: u32 = 14;
    pub const SRQ_LIMIT_REACHED: u32 = 15;
    pub const QP_LAST_WQE_REACHED: u32 = 16;
}

/// `enum rdma_cm_event_type`.
pub mod cm_event {
    pub const ADDR_RESOLVED: u32 = 0;
    pub const ADDR_ERROR: u32 = 1;
    pub const ROUTE_RESOLVED: u32 = 2;
    pub const ROUTE_ERROR: u32 = 3;
    pub const CONNECT_REQUEST: u32 = 4;
    pub const CONNECT_RESPONSE: u32 = 5;
    pub const CONNECT_ERROR: u32 = 6;
    pub const UNREACHABLE: u32 = 7;
    pub const REJECTED: u32 = 8;
    pub const ESTABLISHED: u32 = 9;
    pub const DISCONNECTED: u32 = 10;
    pub const DEVICE_REMOVAL: u32 = 11;
    pub const MULTICAST_JOIN: u32 = 12;
    pub const MULTICAST_ERROR: u32 = 13;
    pub const TIMEWAIT_EXIT: u32 = 15;
}

/// `enum rdma_port_space`.
pub mod port_space {
    pub const IPOIB: u32 = 0x0002;
    pub const TCP: u32 = 0x0106;
    pub const UDP: u32 = 0x0111;
    pub const IB: u32 = 0x013f;
}

/// Levels and names of `rdma_set_option`.
pub mod cm_option {
    pub const LEVEL_ID: i32 = 0;
    pub const TOS: i32 = 0;
    pub const ACK_TIMEOUT: i32 = 3;
}

/// `enum ibv_gid_type`.
pub const GID_TYPE_ROCE_V2: u32 = 2;
/// `IBV_LINK_LAYER_ETHERNET`.
pub const LINK_LAYER_ETHERNET: u8 = 2;

/// `enum ibv_device_cap_flags`, and bits that are only in `device_cap_flags_ex`.
pub mod device_cap {
    pub const MEM_WINDOW: u64 = 1 << 17;
    pub const XRC: u64 = 1 << 20;
    pub const MEM_MGT_EXTENSIONS: u64 = 1 << 21;
    pub const MEM_WINDOW_TYPE_2A: u64 = 1 << 23;
    pub const MEM_WINDOW_TYPE_2B: u64 = 1 << 24;
    pub const FLUSH_GLOBAL: u64 = 1 << 38;
    pub const FLUSH_PERSISTENT: u64 = 1 << 39;
    pub const ATOMIC_WRITE: u64 = 1 << 40;
}

/// `IBV_ODP_SUPPORT`.
pub const ODP_SUPPORT: u64 = 1;
/// `IBV_ODP_SUPPORT_WRITE` and `IBV_ODP_SUPPORT_READ`, of a transport.
pub const ODP_WRITE_AND_READ: u32 = 1 << 2 | 1 << 3;

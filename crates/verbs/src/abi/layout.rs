//! Sizes and offsets of the structures that are shared with the libraries, in bytes. This file compares them with this crate as
//! compiled; `cargo xtask abi` compares them with the C headers.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use std::mem::{offset_of, size_of};

use super::*;

/// Fails to compile where a number differs.
macro_rules! layout {
    ($($name:ident = $size:literal { $($field:ident = $offset:literal),* })*) => {
        $(
            const _: () = assert!(size_of::<$name>() == $size);
            $(const _: () = assert!(offset_of!($name, $field) == $offset);)*
        )*
    };
}

layout! {
    Device = 664 { node_type = 16, transport_type = 20, name = 24, dev_name = 88, dev_path = 152, ibdev_path = 408 }
    ContextOps = 256 { alloc_mw = 56, bind_mw = 64, dealloc_mw = 72, poll_cq = 88, req_notify_cq = 96, post_srq_recv = 160,
        post_send = 200, post_recv = 208 }
    Context = 328 { device = 0, ops = 8, cmd_fd = 264, async_fd = 268, num_comp_vectors = 272, mutex = 280, abi_compat = 320 }
    VerbsContext = 648 { query_port = 0, advise_mr = 8, alloc_null_mr = 16, read_counters = 24, attach_counters_point_flow = 32,
        create_counters = 40, destroy_counters = 48, reg_dm_mr = 56, alloc_dm = 64, free_dm = 72, modify_flow_action_esp = 80,
        destroy_flow_action = 88, create_flow_action_esp = 96, modify_qp_rate_limit = 104, alloc_parent_domain = 112,
        dealloc_td = 120, alloc_td = 128, modify_cq = 136, post_srq_ops = 144, destroy_rwq_ind_table = 152,
        create_rwq_ind_table = 160, destroy_wq = 168, modify_wq = 176, create_wq = 184, query_rt_values = 192,
        create_cq_ex = 200, private = 208, query_device_ex = 216, destroy_flow = 224, create_flow = 240, open_qp = 256,
        create_qp_ex = 264, get_srq_num = 272, create_srq_ex = 280, open_xrcd = 288, close_xrcd = 296, size = 312, context = 320 }
    Pd = 16 { context = 0, handle = 8 }
    Td = 8 { context = 0 }
    TdInitAttr = 4 { comp_mask = 0 }
    ParentDomainInitAttr = 48 { pd = 0, td = 8, comp_mask = 16, alloc = 24, free = 32, pd_context = 40 }
    Dm = 32 { context = 0, memcpy_to_dm = 8, memcpy_from_dm = 16, comp_mask = 24, handle = 28 }
    AllocDmAttr = 16 { length = 0, log_align_req = 8, comp_mask = 12 }
    Xrcd = 8 { context = 0 }
    Ah = 24 { context = 0, pd = 8, handle = 16 }
    Mr = 48 { context = 0, pd = 8, addr = 16, length = 24, handle = 32, lkey = 36, rkey = 40 }
    Mw = 32 { context = 0, pd = 8, rkey = 16, handle = 20, mw_type = 24 }
    CompChannel = 16 { context = 0, fd = 8, refcnt = 12 }
    Cq = 128 { context = 0, channel = 8, cq_context = 16, handle = 24, cqe = 28, mutex = 32, cond = 72,
        comp_events_completed = 120, async_events_completed = 124 }
    CqEx = 288 { comp_mask = 128, status = 132, wr_id = 136, start_poll = 144, next_poll = 152, end_poll = 160,
        read_opcode = 168, read_vendor_err = 176, read_byte_len = 184, read_imm_data = 192, read_qp_num = 200, read_src_qp = 208,
        read_wc_flags = 216, read_slid = 224, read_sl = 232, read_dlid_path_bits = 240, read_completion_ts = 248,
        read_cvlan = 256, read_flow_tag = 264, read_tm_info = 272, read_completion_wallclock_ns = 280 }
    PollCqAttr = 4 { comp_mask = 0 }
    CqInitAttrEx = 56 { cqe = 0, cq_context = 8, channel = 16, comp_vector = 24, wc_flags = 32, comp_mask = 40, flags = 44,
        parent_domain = 48 }
    ModifyCqAttr = 8 { attr_mask = 0, cq_count = 4, cq_period = 6 }
    ValuesEx = 24 { comp_mask = 0, raw_clock = 8 }
    Srq = 128 { context = 0, srq_context = 8, pd = 16, handle = 24, mutex = 32, cond = 72, events_completed = 120 }
    Qp = 160 { context = 0, qp_context = 8, pd = 16, send_cq = 24, recv_cq = 32, srq = 40, handle = 48, qp_num = 52, state = 56,
        qp_type = 60, mutex = 64, cond = 104, events_completed = 152 }
    QpEx = 360 { comp_mask = 160, wr_id = 168, wr_flags = 176, wr_atomic_cmp_swp = 184, wr_atomic_fetch_add = 192,
        wr_bind_mw = 200, wr_local_inv = 208, wr_rdma_read = 216, wr_rdma_write = 224, wr_rdma_write_imm = 232, wr_send = 240,
        wr_send_imm = 248, wr_send_inv = 256, wr_send_tso = 264, wr_set_ud_addr = 272, wr_set_xrc_srqn = 280,
        wr_set_inline_data = 288, wr_set_inline_data_list = 296, wr_set_sge = 304, wr_set_sge_list = 312, wr_start = 320,
        wr_complete = 328, wr_abort = 336, wr_atomic_write = 344, wr_flush = 352 }
    Wc = 48 { wr_id = 0, status = 8, opcode = 12, vendor_err = 16, byte_len = 20, imm_data = 24, qp_num = 28, src_qp = 32,
        wc_flags = 36, pkey_index = 40, slid = 42, sl = 44, dlid_path_bits = 45 }
    Sge = 16 { addr = 0, length = 8, lkey = 12 }
    DataBuf = 16 { addr = 0, length = 8 }
    RecvWr = 32 { wr_id = 0, next = 8, sg_list = 16, num_sge = 24 }
    Rdma = 16 { remote_addr = 0, rkey = 8 }
    Atomic = 32 { remote_addr = 0, compare_add = 8, swap = 16, rkey = 24 }
    Ud = 16 { ah = 0, remote_qpn = 8, remote_qkey = 12 }
    Remote = 32 { rdma = 0, atomic = 0, ud = 0 }
    MwBindInfo = 32 { mr = 0, addr = 8, length = 16, mw_access_flags = 24 }
    MwBind = 48 { wr_id = 0, send_flags = 8, bind_info = 16 }
    BindMwWr = 48 { mw = 0, rkey = 8, bind_info = 16 }
    SendWr = 128 { wr_id = 0, next = 8, sg_list = 16, num_sge = 24, opcode = 28, send_flags = 32, imm_data = 36, wr = 40,
        remote_srqn = 72, bind_mw = 80 }
    QpCap = 20 { max_send_wr = 0, max_recv_wr = 4, max_send_sge = 8, max_recv_sge = 12, max_inline_data = 16 }
    QpInitAttr = 64 { qp_context = 0, send_cq = 8, recv_cq = 16, srq = 24, cap = 32, qp_type = 52, sq_sig_all = 56 }
    RxHashConf = 24 { rx_hash_function = 0, rx_hash_key_len = 1, rx_hash_key = 8, rx_hash_fields_mask = 16 }
    QpInitAttrEx = 136 { qp_context = 0, send_cq = 8, recv_cq = 16, srq = 24, cap = 32, qp_type = 52, sq_sig_all = 56,
        comp_mask = 60, pd = 64, xrcd = 72, create_flags = 80, max_tso_header = 84, rwq_ind_tbl = 88, rx_hash_conf = 96,
        source_qpn = 120, send_ops_flags = 128 }
    GlobalRoute = 24 { dgid = 0, flow_label = 16, sgid_index = 20, hop_limit = 21, traffic_class = 22 }
    AhAttr = 32 { grh = 0, dlid = 24, sl = 26, src_path_bits = 27, static_rate = 28, is_global = 29, port_num = 30 }
    QpAttr = 144 { qp_state = 0, cur_qp_state = 4, path_mtu = 8, path_mig_state = 12, qkey = 16, rq_psn = 20, sq_psn = 24,
        dest_qp_num = 28, qp_access_flags = 32, cap = 36, ah_attr = 56, alt_ah_attr = 88, pkey_index = 120, alt_pkey_index = 122,
        en_sqd_async_notify = 124, sq_draining = 125, max_rd_atomic = 126, max_dest_rd_atomic = 127, min_rnr_timer = 128,
        port_num = 129, timeout = 130, retry_cnt = 131, rnr_retry = 132, alt_port_num = 133, alt_timeout = 134, rate_limit = 136 }
    QpRateLimitAttr = 16 { rate_limit = 0, max_burst_sz = 4, typical_pkt_sz = 8, comp_mask = 12 }
    SrqAttr = 12 { max_wr = 0, max_sge = 4, srq_limit = 8 }
    SrqInitAttr = 24 { srq_context = 0, attr = 8 }
    SrqInitAttrEx = 64 { srq_context = 0, attr = 8, comp_mask = 20, srq_type = 24, pd = 32, xrcd = 40, cq = 48,
        max_num_tags = 56, max_ops = 60 }
    XrcdInitAttr = 12 { comp_mask = 0, fd = 4, oflags = 8 }
    QpOpenAttr = 32 { comp_mask = 0, qp_num = 4, xrcd = 8, qp_context = 16, qp_type = 24 }
    GidEntry = 32 { gid = 0, gid_index = 16, port_num = 20, gid_type = 24, ndev_ifindex = 28 }
    PortAttr = 56 { state = 0, max_mtu = 4, active_mtu = 8, gid_tbl_len = 12, port_cap_flags = 16, max_msg_sz = 20,
        bad_pkey_cntr = 24, qkey_viol_cntr = 28, pkey_tbl_len = 32, lid = 34, sm_lid = 36, lmc = 38, max_vl_num = 39, sm_sl = 40,
        subnet_timeout = 41, init_type_reply = 42, active_width = 43, active_speed = 44, phys_state = 45, link_layer = 46,
        flags = 47, port_cap_flags2 = 48, active_speed_ex = 52 }
    DeviceAttr = 232 { fw_ver = 0, node_guid = 64, sys_image_guid = 72, max_mr_size = 80, page_size_cap = 88, vendor_id = 96,
        vendor_part_id = 100, hw_ver = 104, max_qp = 108, max_qp_wr = 112, device_cap_flags = 116, max_sge = 120,
        max_sge_rd = 124, max_cq = 128, max_cqe = 132, max_mr = 136, max_pd = 140, max_qp_rd_atom = 144, max_ee_rd_atom = 148,
        max_res_rd_atom = 152, max_qp_init_rd_atom = 156, max_ee_init_rd_atom = 160, atomic_cap = 164, max_ee = 168,
        max_rdd = 172, max_mw = 176, max_raw_ipv6_qp = 180, max_raw_ethy_qp = 184, max_mcast_grp = 188,
        max_mcast_qp_attach = 192, max_total_mcast_qp_attach = 196, max_ah = 200, max_fmr = 204, max_map_per_fmr = 208,
        max_srq = 212, max_srq_wr = 216, max_srq_sge = 220, max_pkeys = 224, local_ca_ack_delay = 226, phys_port_cnt = 227 }
    DeviceAttrEx = 400 { orig_attr = 0, comp_mask = 232, odp_general_caps = 240, odp_rc = 248, odp_uc = 252, odp_ud = 256,
        completion_timestamp_mask = 264, hca_core_clock = 272, device_cap_flags_ex = 280, qp_rate_limit_min = 332,
        qp_rate_limit_max = 336, qp_rate_limit_types = 340, raw_packet_caps = 344,
        tag_matching = 348, max_cq_count = 368, max_cq_period = 370, max_dm_size = 376, pci_atomics = 384, xrc_odp = 392,
        phys_port_cnt_ex = 396 }
    AsyncEvent = 16 { element = 0, event_type = 8 }
    EventChannel = 4 { fd = 0 }
    CmId = 416 { verbs = 0, channel = 8, context = 16, qp = 24, src_addr = 32, dst_addr = 160, sgid = 288, dgid = 304,
        pkey = 320, path_rec = 328, num_paths = 336, ps = 344, port_num = 348, event = 352, send_cq_channel = 360, send_cq = 368,
        recv_cq_channel = 376, recv_cq = 384, srq = 392, pd = 400, qp_type = 408 }
    ConnParam = 24 { private_data = 0, private_data_len = 8, responder_resources = 9, initiator_depth = 10, flow_control = 11,
        retry_count = 12, rnr_retry_count = 13, srq = 14, qp_num = 16 }
    UdParam = 56 { private_data = 0, private_data_len = 8, ah_attr = 16, qp_num = 48, qkey = 52 }
    CmParam = 56 { conn = 0, ud = 0 }
    CmEvent = 80 { id = 0, listen_id = 8, event = 16, status = 20, param = 24 }
}

//! Names of numbers, and rates.

use std::ffi::{CStr, c_char, c_int};

/// Returns the name of a number, as C reads it.
pub(crate) fn name(
    names: &'static [&'static CStr],
    number: c_int,
    otherwise: &'static CStr,
) -> *const c_char {
    let found = usize::try_from(number).ok().and_then(|number| names.get(number));
    found.unwrap_or(&otherwise).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    const NAMES: [&CStr; 24] = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"work request flushed error",
        c"memory bind operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"remote aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"tag matching error",
        c"tag matching rendezvous incomplete",
    ];
    name(&NAMES, status, c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_event_type_str(event: c_int) -> *const c_char {
    const NAMES: [&CStr; 20] = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    name(&NAMES, event, c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_node_type_str(node_type: c_int) -> *const c_char {
    const NAMES: [&CStr; 8] = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    name(&NAMES, node_type, c"unknown")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    const NAMES: [&CStr; 6] = [
        c"no state change (NOP)",
        c"down",
        c"init",
        c"armed",
        c"active",
        c"active defer",
    ];
    name(&NAMES, state, c"invalid state")
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wr_opcode_str(opcode: c_int) -> *const c_char {
    const NAMES: [&CStr; 16] = [
        c"rdma write",
        c"rdma write with immediate",
        c"send",
        c"send with immediate",
        c"rdma read",
        c"atomic compare and swap",
        c"atomic fetch and add",
        c"local invalidate",
        c"bind memory window",
        c"send with invalidate",
        c"tcp segmentation offload",
        c"driver 1",
        c"unknown",
        c"unknown",
        c"flush",
        c"atomic write",
    ];
    name(&NAMES, opcode, c"unknown")
}

/// `enum ibv_rate` by number: multiples of 2.5 Gb/s, and Mb/s. Zero: there is none.
const RATES: [(c_int, c_int); 25] = [
    (0, 0),
    (0, 0),
    (1, 2_500),
    (4, 10_000),
    (12, 30_000),
    (2, 5_000),
    (8, 20_000),
    (16, 40_000),
    (24, 60_000),
    (32, 80_000),
    (48, 120_000),
    (0, 14_062),
    (0, 56_250),
    (0, 112_500),
    (0, 168_750),
    (0, 25_781),
    (0, 103_125),
    (0, 206_250),
    (0, 309_375),
    (11, 28_125),
    (20, 53_125),
    (160, 425_000),
    (240, 637_500),
    (320, 850_000),
    (480, 1_275_000),
];

fn rate(number: c_int) -> Option<(c_int, c_int)> {
    usize::try_from(number)
        .ok()
        .and_then(|number| RATES.get(number))
        .copied()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mult(number: c_int) -> c_int {
    rate(number)
        .map(|(mult, _)| mult)
        .filter(|mult| *mult > 0)
        .unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_int {
    let found = RATES.iter().position(|(known, _)| *known == mult && mult > 0);
    found.unwrap_or(0) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn ibv_rate_to_mbps(number: c_int) -> c_int {
    rate(number)
        .map(|(_, mbps)| mbps)
        .filter(|mbps| *mbps > 0)
        .unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    let found = RATES.iter().position(|(_, known)| *known == mbps && mbps > 0);
    found.unwrap_or(0) as c_int
}

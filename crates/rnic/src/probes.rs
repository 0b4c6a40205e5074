//! USDT probes of the engine, enabled by feature `probes`; docs/probes.md lists them with their arguments. Without the feature no code
//! of them remains, and their arguments are not evaluated. With it each probe is a `nop` plus an ELF note that says where its arguments
//! are.

use crate::cq::{Status, WcOpcode};
use crate::qp::QpState;

/// A probe `rdmux:NAME` with up to six arguments, all of them numbers.
#[cfg(feature = "probes")]
macro_rules! probe {
    ($name:ident, $($argument:expr),+ $(,)?) => {
        ::probe::probe!(rdmux, $name, $($argument),+)
    };
}

#[cfg(not(feature = "probes"))]
macro_rules! probe {
    ($name:ident, $($argument:expr),+ $(,)?) => {
        if false {
            $(let _ = $argument;)+
        }
    };
}

/// The number of `enum ibv_wc_status`, which tracers know.
pub(crate) fn status(status: Status) -> u32 {
    match status {
        Status::Success => 0,
        Status::LocalLength => 1,
        Status::LocalQpOperation => 2,
        Status::LocalProtection => 4,
        Status::Flushed => 5,
        Status::MemoryBind => 6,
        Status::BadResponse => 7,
        Status::RemoteInvalidRequest => 9,
        Status::RemoteAccess => 10,
        Status::RemoteOperation => 11,
        Status::RetryExceeded => 12,
        Status::RnrRetryExceeded => 13,
    }
}

/// The number of `enum ibv_wc_opcode`, or `IB_WC_REG_MR` of the kernel.
pub(crate) fn opcode(opcode: WcOpcode) -> u32 {
    match opcode {
        WcOpcode::Send => 0,
        WcOpcode::Write => 1,
        WcOpcode::Read => 2,
        WcOpcode::CompareSwap => 3,
        WcOpcode::FetchAdd => 4,
        WcOpcode::BindWindow => 5,
        WcOpcode::LocalInvalidate => 6,
        WcOpcode::Flush => 8,
        WcOpcode::AtomicWrite => 9,
        WcOpcode::Register => 10,
        WcOpcode::Recv => 128,
        WcOpcode::RecvRdmaWithImm => 129,
    }
}

/// The number of `enum ibv_qp_state`.
pub(crate) fn state(state: QpState) -> u32 {
    match state {
        QpState::Reset => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        QpState::Rts => 3,
        QpState::Sqd => 4,
        QpState::Sqe => 5,
        QpState::Error => 6,
    }
}

/// Returns the big-endian 24-bit number at an offset of a packet, or 0 if the packet is too short.
pub(crate) fn word24(packet: &[u8], at: usize) -> u32 {
    let bytes = packet.get(at..at + 3);
    bytes.map_or(0, |b| u32::from_be_bytes([0, b[0], b[1], b[2]]))
}

//! Transmit schedulers: they decide who sends next, and how much. IEEE 802.1Qaz: strict classes come first, in descending order; the
//! other classes share by weights, in bytes (deficit round robin, as Linux's sch_ets).
//!
//! The device schedules its QPs by [`Scheduler`]: classes, and in each class senders by turns. A device that several users share has a
//! [`Hierarchy`] above: tenants, in each of them the same classes, and in each class connections.

mod bucket;
mod classes;
mod connection;
mod device_window;
mod hierarchy;
mod list;
mod piece;
mod senders;
mod slots;
mod tenant;
#[cfg(test)]
mod tests;
mod window;

use std::num::NonZeroU8;

pub use bucket::burst_bytes;
pub use device_window::{DeviceFlight, DeviceLimits, DeviceWindow};
pub use hierarchy::{ConnectionId, GroupId, Hierarchy, Quanta, TenantId, Turn};
pub use piece::{PIECE_BYTES_MAX, PIECE_BYTES_MIN, PIECE_BYTES_SHARED, piece_bytes};
pub use senders::{Quantum, Scheduler};
pub use tenant::Entitlement;
pub use window::{InFlight, Window, WindowLimits};

/// Traffic classes.
pub const CLASSES: usize = 8;
/// A sender's quantum: a little less than a train takes, so that one quantum is one train.
pub const QUANTUM_BYTES: u32 = 60_000;

/// Service policy of a class: the transmission selection of IEEE 802.1Qaz.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Served before all lower classes and before all classes that share.
    Strict,
    /// Enhanced transmission selection: shares what strict classes leave, in proportion to this weight.
    Ets(NonZeroU8),
}

impl Default for Policy {
    /// An equal share. (The standard's default for an unconfigured port is strict; but here any program chooses its class, and with
    /// equal shares no program can starve the others.)
    fn default() -> Policy {
        Policy::Ets(NonZeroU8::MIN)
    }
}

/// Returns the class of a packet: the class selector of its DSCP, which is the default mapping of DSCP to priority in NICs. Class n is
/// the class of CSn (DSCP 8 n). `tos` is the IPv4 TOS or the IPv6 traffic class.
pub const fn class_of(tos: u8) -> usize {
    (tos >> 5) as usize
}

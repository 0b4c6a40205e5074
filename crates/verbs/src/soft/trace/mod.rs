//! What devices note of themselves, also for after the end of their processes: changes of state, errors and what led to them, connections,
//! faults. `RDMUX_TRACE` says how much.

mod file;
mod record;

use std::io;

use rdmux_rnic::Time;

pub use self::file::{KEPT_MAX, TRACES_MAX, Trace, folders, runtime_folder, traces};
pub(in crate::soft) use self::file::{TraceFile, fuzz};
pub use self::record::Entry;
use super::resources::DeviceAt;

/// How much is noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Level {
    Off,
    Events,
    /// Every packet too.
    Packets,
}

impl Level {
    /// What the environment asks for.
    pub(in crate::soft) fn of_environment() -> Level {
        match std::env::var_os("RDMUX_TRACE") {
            Some(value) if value == "off" => Level::Off,
            Some(value) if value == "packets" => Level::Packets,
            _ => Level::Events,
        }
    }
}

/// The trace of a device that is opened. Where it cannot be kept, the device goes without.
pub(in crate::soft) fn begin(level: Level, device: DeviceAt, now: Time) -> Option<io::Result<TraceFile>> {
    (level != Level::Off).then(|| TraceFile::create(device, now, level == Level::Packets))
}

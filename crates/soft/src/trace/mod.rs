//! Traces: notes that devices keep, also beyond the end of their processes, of changes of state, errors and what led to them, connections,
//! and faults. `RDMUX_TRACE` sets how much they note.

mod file;
mod record;

use std::io;

use rdmux_rnic::Time;
use rdmux_verbs::resources::DeviceAt;

pub use self::file::{KEPT_MAX, TRACES_MAX, Trace, folders, traces};
pub(crate) use self::file::{TraceFile, fuzz};
pub use self::record::TraceEntry;

/// Level of detail of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Off,
    Events,
    /// Events and every packet.
    Packets,
}

impl Level {
    /// Returns the level that the environment variable `RDMUX_TRACE` asks for.
    pub(crate) fn of_environment() -> Level {
        match std::env::var_os("RDMUX_TRACE") {
            Some(value) if value == "off" => Level::Off,
            Some(value) if value == "packets" => Level::Packets,
            _ => Level::Events,
        }
    }
}

/// Creates the trace of a device that is opened, unless the level is `Off`. If the trace cannot be kept, the device runs without one.
pub(crate) fn begin(level: Level, device: DeviceAt, now: Time) -> Option<io::Result<TraceFile>> {
    (level != Level::Off).then(|| TraceFile::create(device, now, level == Level::Packets))
}

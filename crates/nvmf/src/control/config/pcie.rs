//! Drives that the target drives itself.

use rdmux_drive::MemoryKind;

use crate::backend::drive::DrivePlace;

/// A drive that the target drives itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcieStorage {
    /// The drive and its namespace.
    pub place: DrivePlace,
    /// Memory that takes the data.
    pub buffers: MemoryKind,
    /// The kernel's driver loses the drive, if it has it.
    pub unbind: bool,
}

//! Drives that the target drives itself.

use rdmux_drive::MemoryKind;

use crate::backend::drive::DrivePlace;
use crate::backend::peer::PeerToPeer;

/// A drive that the target drives itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcieStorage {
    /// The drive and its namespace.
    pub place: DrivePlace,
    /// Memory that takes the data.
    pub buffers: MemoryKind,
    /// Commands whose data go between the queue pair and the drive's memory.
    pub p2p: PeerToPeer,
    /// The kernel's driver loses the drive, if it has it.
    pub unbind: bool,
}

impl PcieStorage {
    /// Checks that what is asked for goes together.
    pub(super) fn new(
        place: DrivePlace,
        buffers: MemoryKind,
        p2p: PeerToPeer,
        unbind: bool,
    ) -> Result<PcieStorage, String> {
        if p2p != PeerToPeer::Off && buffers == MemoryKind::Dram {
            return Err("p2p is for the drive's own memory: give buffers=cmb or buffers=pmr with it".into());
        }
        Ok(PcieStorage {
            place,
            buffers,
            p2p,
            unbind,
        })
    }
}

//! Peer-to-peer: data of a command that lie in the drive's own memory, between the queue pair and the drive.
//!
//! The device that serves a host reads and writes that memory over PCIe, and so does the drive: no byte crosses the target's memory, and the processor
//! copies none.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_drive::{Buffer, Pool};

/// Commands whose data go between the queue pair and the drive's own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerToPeer {
    /// None.
    #[default]
    Off,
    /// Those for which there is room; others go by the target's memory, and are counted.
    Prefer,
    /// All reads and writes by RDMA: one without room waits, and fails for now if there is none in time.
    Require,
}

impl PeerToPeer {
    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            PeerToPeer::Off => "off",
            PeerToPeer::Prefer => "prefer",
            PeerToPeer::Require => "require",
        }
    }
}

impl FromStr for PeerToPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<PeerToPeer, String> {
        let all = [PeerToPeer::Off, PeerToPeer::Prefer, PeerToPeer::Require];
        let found = all.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| format!("'{text}' is none of p2p=prefer, require and off"))
    }
}

/// Memory of a drive that takes the data of one command: buffers in a row. It is free once this is dropped, and a drive that has it lets it go.
#[derive(Debug, Default)]
pub struct PeerData(pub(super) Vec<Buffer>);

impl PeerData {
    /// Takes all of it.
    pub(crate) fn take(&mut self) -> PeerData {
        PeerData(std::mem::take(&mut self.0))
    }

    /// Returns its bytes: whole pages, and none if a drive has kept it.
    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(Buffer::bytes).sum()
    }

    /// Returns the pool, and the offset of the data there. `None`: a drive has kept it.
    pub(crate) fn place(&self) -> Option<(&Arc<Pool>, u64)> {
        self.0.first().map(Buffer::place)
    }
}

/// Commands of a namespace whose drive may take their data itself.
#[derive(Debug, Default)]
pub struct PeerCounts {
    direct: AtomicU64,
    copied: AtomicU64,
}

impl PeerCounts {
    pub(crate) fn count_direct(&self) {
        self.direct.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_copied(&self) {
        self.copied.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of commands whose data went between the queue pair and the drive's memory.
    pub fn direct(&self) -> u64 {
        self.direct.load(Ordering::Relaxed)
    }

    /// Returns the number of commands whose data went by the target's memory, for lack of room or of a region.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_to_peer__is_known_by_its_name() {
        for mode in [PeerToPeer::Off, PeerToPeer::Prefer, PeerToPeer::Require] {
            assert_eq!(mode.name().parse(), Ok(mode));
        }
        assert!("on".parse::<PeerToPeer>().unwrap_err().contains("p2p=prefer"));
    }
}

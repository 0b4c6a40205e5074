//! Namespaces of a drive.

use rdmux_wire::Malformed;
use rdmux_wire::nvme::{IdentifyNamespace, NsId, Status};

/// A namespace of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveNamespace {
    /// Its id.
    pub nsid: NsId,
    /// Its blocks.
    pub blocks: u64,
    /// Bytes of a block as a power of two, 9 to 16.
    pub block_shift: u8,
    /// Deallocated blocks read as zeros.
    pub zeroes: bool,
}

/// Reason for which a namespace of a drive cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// The drive does not describe it.
    #[error("the drive refuses Identify of the namespace: {0}")]
    Refused(Status),
    /// Its description has no meaning here.
    #[error("the drive's description of the namespace has no meaning here: {0}")]
    Malformed(#[from] Malformed),
    /// Its blocks have metadata.
    #[error("its blocks have {0} bytes of metadata: format it without")]
    Metadata(u16),
    /// It has more bytes than 64 bits count.
    #[error("it says that it has {0} blocks")]
    Size(u64),
}

impl DriveNamespace {
    /// Reads what Identify has returned. NVM Command Set 1.0, 4.1.5.1.
    pub(crate) fn parse(nsid: NsId, bytes: &[u8]) -> Result<DriveNamespace, Unusable> {
        let described = IdentifyNamespace::parse(bytes)?;
        let format = 128 + 4 * usize::from(bytes[26] & 0xf);
        let metadata = u16::from_le_bytes([bytes[format], bytes[format + 1]]);
        if metadata > 0 {
            return Err(Unusable::Metadata(metadata));
        }
        let blocks = described.blocks;
        if blocks > u64::MAX >> described.block_shift {
            return Err(Unusable::Size(blocks));
        }
        Ok(DriveNamespace {
            nsid,
            blocks,
            block_shift: described.block_shift,
            zeroes: described.zeroes,
        })
    }
}

//! Commands of namespaces.

use rdmux_wire::nvme::{Cid, DatasetRange, IdentifyController, NsId, Opcode, Rw, Sqe, Status};

use crate::memory::{Buffer, MemoryKind};

/// A command. Blocks are those of its namespace, at least one and at most 65,536; with `Flush` they have no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Action on the blocks.
    pub action: Action,
    /// Their namespace.
    pub nsid: NsId,
    /// First block.
    pub slba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// Action of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads into its buffers.
    Read,
    /// Writes from its buffers.
    Write,
    /// Makes durable what was written before.
    Flush,
    /// Writes zeros, and may give the blocks' room back.
    WriteZeroes,
    /// Gives the blocks' room back.
    Deallocate,
}

impl Action {
    /// Returns true if the command has data in buffers.
    pub(crate) const fn has_data(self) -> bool {
        matches!(self, Action::Read | Action::Write)
    }

    /// Returns the bit of ONCS that a drive has which knows it; 0: each drive does.
    pub(crate) const fn optional(self) -> u16 {
        match self {
            Action::Read | Action::Write | Action::Flush => 0,
            Action::WriteZeroes => IdentifyController::WRITE_ZEROES,
            Action::Deallocate => IdentifyController::DATASET_MANAGEMENT,
        }
    }
}

/// Write Zeroes, dword 12: the drive may deallocate (DEAC). NVM 3.2.8.
const MAY_DEALLOCATE: u32 = 1 << 25;

impl Command {
    pub(crate) fn sqe(&self, cid: Cid, prps: [u64; 2]) -> Sqe {
        let (opcode, prps) = match self.action {
            Action::Read => (Opcode::READ, prps),
            Action::Write => (Opcode::WRITE, prps),
            Action::Flush => (Opcode::FLUSH, [0; 2]),
            Action::WriteZeroes => (Opcode::WRITE_ZEROES, [0; 2]),
            Action::Deallocate => (Opcode::DATASET_MANAGEMENT, prps),
        };
        let mut sqe = Sqe::in_memory(opcode, cid, self.nsid, prps);
        match self.action {
            Action::Flush => {}
            // One range.
            Action::Deallocate => sqe.set_dword(11, DatasetRange::DEALLOCATE),
            Action::Read | Action::Write | Action::WriteZeroes => {
                let blocks = Rw {
                    slba: self.slba,
                    blocks: self.blocks,
                    fua: false,
                };
                blocks.emit(&mut sqe);
                if self.action == Action::WriteZeroes {
                    sqe.set_dword(12, sqe.dword(12) | MAY_DEALLOCATE);
                }
            }
        }
        sqe
    }
}

/// End of a command.
#[derive(Debug)]
pub struct Completion {
    /// The number that its submitter has given it.
    pub token: u64,
    /// Its end.
    pub outcome: Outcome,
    /// Its buffers, of which the drive has let go. Those of a drive that did not stop when it was to stay with the driver, and this is empty.
    pub data: Vec<Buffer>,
}

/// End of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The drive has completed it with a status.
    Done(Status),
    /// The drive was reset before: nobody knows if it was carried out.
    Reset,
    /// The drive has gone.
    Gone,
}

/// A command that was not submitted, with its buffers.
#[derive(Debug)]
pub struct Refused {
    /// The reason.
    pub reason: RefusedReason,
    /// Its buffers.
    pub data: Vec<Buffer>,
}

/// Reason for which a command is not submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedReason {
    /// The drive starts, or is reset: later it may take the command.
    #[error("the drive is not ready")]
    NotReady,
    /// The drive has failed, has gone or is off.
    #[error("the drive is out of use")]
    Ended,
    /// The queue has as many commands as it takes.
    #[error("the queue is full")]
    Full,
    /// There is no such queue.
    #[error("the drive has no such queue")]
    NoQueue,
    /// There is no such namespace, or none that can be used.
    #[error("the drive has no such namespace")]
    NoNamespace,
    /// The blocks are not all in the namespace, or none, or more than a command may have.
    #[error("the blocks are not within the namespace")]
    Range,
    /// More bytes than the drive moves at once.
    #[error("more bytes than the drive moves at once")]
    TooLong,
    /// The buffers do not hold the data.
    #[error("the buffers are shorter than the data")]
    Short,
    /// The buffers are of several kinds of memory, which one command must not mix.
    #[error("the buffers are of several kinds of memory")]
    MixedKinds,
    /// The drive does not move data of this direction to or from such memory.
    #[error("the drive does not move such data by its {0}")]
    Direction(MemoryKind),
    /// A buffer is not of this drive.
    #[error("a buffer is of another drive")]
    Foreign,
    /// The drive does not know the command.
    #[error("the drive does not have the command")]
    Unsupported,
}

//! An I/O command that a backend carries out.

use std::fs::File;
use std::sync::Arc;

use rdmux_runtime::{Direction, Pages};
use rdmux_wire::nvme::{NsId, Opcode, Rw, Sqe, Status};

use super::subsystem::{Namespace, Namespaces, Running, Session};

/// An I/O of more bytes does not run on a reactor's thread, whose other connections would wait.
const INLINE_MAX: u32 = 1 << 20;

/// An I/O command that was checked: its blocks are in its namespace, and its data are as long as they.
#[derive(Clone, Debug)]
pub struct Io {
    /// The namespace.
    pub namespace: Arc<Namespace>,
    /// The operation.
    pub operation: Operation,
    /// Offset in the namespace, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
    /// It runs only while this lasts.
    pub(super) session: Option<Session>,
}

/// An operation of the NVM command set. NVM 3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reads into the data.
    Read,
    /// Writes the data.
    Write {
        /// The bytes are durable when the command is done.
        fua: bool,
    },
    /// Compares the data with the blocks.
    Compare,
    /// Makes what was written durable.
    Flush,
    /// Writes zeros.
    WriteZeroes {
        /// The bytes are durable when the command is done.
        fua: bool,
    },
    /// Reads, and discards what was read.
    Verify,
}

impl Operation {
    /// Returns true if the host sends the data.
    pub const fn is_to_controller(self) -> bool {
        matches!(self, Operation::Write { .. } | Operation::Compare)
    }

    /// Returns true if the command has data.
    pub const fn has_data(self) -> bool {
        matches!(
            self,
            Operation::Read | Operation::Write { .. } | Operation::Compare
        )
    }

    const fn changes(self) -> bool {
        matches!(self, Operation::Write { .. } | Operation::WriteZeroes { .. })
    }
}

/// The I/O commands that there are, and whether each changes blocks.
pub(super) const SUPPORTED: [(Opcode, bool); 6] = [
    (Opcode::FLUSH, false),
    (Opcode::WRITE, true),
    (Opcode::READ, false),
    (Opcode::COMPARE, false),
    (Opcode::WRITE_ZEROES, true),
    (Opcode::VERIFY, false),
];

impl Io {
    /// Checks a command of which the transport moves `data_len` bytes, `data_max` at most.
    pub(super) fn check(
        namespaces: &Namespaces,
        sqe: &Sqe,
        data_len: u32,
        data_max: u32,
    ) -> Result<Io, Status> {
        let rw = Rw::parse(sqe);
        let fua = rw.fua;
        let operation = match sqe.opcode() {
            Opcode::READ => Operation::Read,
            Opcode::WRITE => Operation::Write { fua },
            Opcode::FLUSH => Operation::Flush,
            Opcode::COMPARE => Operation::Compare,
            Opcode::WRITE_ZEROES => Operation::WriteZeroes { fua },
            Opcode::VERIFY => Operation::Verify,
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        };
        let nsid = sqe.nsid();
        if nsid == NsId::ALL {
            return Err(Status::INVALID_NAMESPACE.do_not_retry());
        }
        let namespace = namespaces.get(&nsid);
        let namespace = namespace.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?.clone();
        if operation == Operation::Flush {
            let (offset, length) = (0, 0);
            return Ok(Io {
                namespace,
                operation,
                offset,
                length,
                session: None,
            });
        }
        if operation.changes() && namespace.is_protected {
            return Err(Status::WRITE_PROTECTED.do_not_retry());
        }
        let end = rw.slba.checked_add(rw.blocks.into());
        if end.is_none_or(|end| end > namespace.blocks()) {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
        let offset = rw.slba << namespace.block_shift;
        // At most 2^16 blocks of 2^16 bytes, less 1: not more than 2^32.
        let length = u64::from(rw.blocks) << namespace.block_shift;
        let Ok(length) = u32::try_from(length) else {
            return Err(Status::INVALID_FIELD.do_not_retry());
        };
        if operation.has_data() {
            if length > data_max {
                return Err(Status::INVALID_FIELD.do_not_retry());
            }
            if length != data_len {
                return Err(Status::SGL_LENGTH_INVALID.do_not_retry());
            }
        }
        Ok(Io {
            namespace,
            operation,
            offset,
            length,
            session: None,
        })
    }

    /// Returns true if [`Io::execute`] may take long: then it must not run on a reactor's thread.
    pub fn may_wait(&self) -> bool {
        self.namespace.backend.may_wait() || self.length > INLINE_MAX
    }

    /// Returns the file, and the direction, by which an io_uring moves the data between the range and their buffer, if one can. The I/O runs until the last
    /// result is dropped.
    pub(crate) fn start(&self) -> Option<(Arc<File>, Direction, Option<Running>)> {
        let direction = match self.operation {
            Operation::Read => Direction::Read,
            Operation::Write { fua: false } => Direction::Write,
            _ => return None,
        };
        let file = self.namespace.backend.file(direction)?.clone();
        let running = match &self.session {
            Some(session) => Some(session.enter()?),
            None => None,
        };
        Some((file, direction, running))
    }

    /// Carries the command out. `data` has the command's length if it has data.
    pub fn execute(&self, data: &mut [u8]) -> Status {
        match self.try_execute(data) {
            Ok(()) => Status::SUCCESS,
            Err(status) => status,
        }
    }

    fn try_execute(&self, data: &mut [u8]) -> Result<(), Status> {
        let backend = &self.namespace.backend;
        let running = self.session.as_ref().map(Session::enter);
        if let Some(None) = running {
            return Err(Status::SQ_DELETED);
        }
        match self.operation {
            Operation::Read => backend.read(self.offset, data),
            Operation::Write { fua } => {
                backend.write(self.offset, data)?;
                if fua { backend.flush() } else { Ok(()) }
            }
            Operation::WriteZeroes { fua } => {
                backend.write_zeroes(self.offset, self.length.into())?;
                if fua { backend.flush() } else { Ok(()) }
            }
            Operation::Flush => backend.flush(),
            Operation::Compare => self.by_parts(|at, stored| {
                let given = data.get(at..at + stored.len());
                match given == Some(stored) {
                    true => Ok(()),
                    false => Err(Status::COMPARE_FAILURE.do_not_retry()),
                }
            }),
            Operation::Verify => self.by_parts(|_, _| Ok(())),
        }
    }

    /// Reads the blocks in parts.
    fn by_parts(&self, mut part: impl FnMut(usize, &[u8]) -> Result<(), Status>) -> Result<(), Status> {
        const PART: usize = 64 << 10;
        let length = self.length as usize;
        let mut stored = Pages::new(length.min(PART));
        for at in (0..length).step_by(PART) {
            let stored = &mut stored[..(length - at).min(PART)];
            self.namespace.backend.read(self.offset + at as u64, stored)?;
            part(at, stored)?;
        }
        Ok(())
    }
}

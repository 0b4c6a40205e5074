//! Commands and completions. 3.3.3.

use std::fmt;

use super::{Sgl, Status};
use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};

/// Bytes of a command.
pub const SQE_LEN: usize = 64;
/// Bytes of a completion.
pub const CQE_LEN: usize = 16;

/// Command id: names a command of a queue until it is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cid(pub u16);

/// Namespace id. 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NsId(pub u32);

impl NsId {
    /// No namespace.
    pub const NONE: NsId = NsId(0);
    /// All namespaces that the command may name.
    pub const ALL: NsId = NsId(u32::MAX);
}

impl fmt::Display for NsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Opcode of a command. Admin and I/O commands share the numbers; the queue decides.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

impl Opcode {
    /// I/O: makes what was written durable. NVM 3.2.2 and Base 7.1.
    pub const FLUSH: Opcode = Opcode(0x00);
    /// I/O: NVM 3.2.6.
    pub const WRITE: Opcode = Opcode(0x01);
    /// I/O: NVM 3.2.4.
    pub const READ: Opcode = Opcode(0x02);
    /// I/O: NVM 3.2.1.
    pub const COMPARE: Opcode = Opcode(0x05);
    /// I/O: NVM 3.2.8.
    pub const WRITE_ZEROES: Opcode = Opcode(0x08);
    /// I/O: Dataset Management. NVM 3.2.3.
    pub const DATASET_MANAGEMENT: Opcode = Opcode(0x09);
    /// I/O: NVM 3.2.5.
    pub const VERIFY: Opcode = Opcode(0x0c);
    /// I/O: Reservation Register. 7.3.
    pub const RESERVATION_REGISTER: Opcode = Opcode(0x0d);
    /// I/O: Reservation Report. 7.5.
    pub const RESERVATION_REPORT: Opcode = Opcode(0x0e);
    /// I/O: Reservation Acquire. 7.2.
    pub const RESERVATION_ACQUIRE: Opcode = Opcode(0x11);
    /// I/O: Reservation Release. 7.4.
    pub const RESERVATION_RELEASE: Opcode = Opcode(0x15);
    /// I/O: NVM 3.2.2 (1.0c) and TP4130.
    pub const COPY: Opcode = Opcode(0x19);
    /// Admin: 5.16.
    pub const GET_LOG_PAGE: Opcode = Opcode(0x02);
    /// Admin: 5.17.
    pub const IDENTIFY: Opcode = Opcode(0x06);
    /// Admin: 5.1.
    pub const ABORT: Opcode = Opcode(0x08);
    /// Admin: 5.27.
    pub const SET_FEATURES: Opcode = Opcode(0x09);
    /// Admin: 5.15.
    pub const GET_FEATURES: Opcode = Opcode(0x0a);
    /// Admin: 5.2.
    pub const ASYNC_EVENT_REQUEST: Opcode = Opcode(0x0c);
    /// Admin: 5.18.
    pub const KEEP_ALIVE: Opcode = Opcode(0x18);
    /// Fabrics commands, on every queue. 6.
    pub const FABRICS: Opcode = Opcode(0x7f);
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opcode({:#04x})", self.0)
    }
}

/// Position of a command in a fused pair. 3.4.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// No fused command.
    None,
    /// The first.
    First,
    /// The second.
    Second,
    /// A value that is not defined.
    Reserved,
}

/// A command: submission queue entry.
///
/// ```text
///  0  opcode u8 | flags u8: fuse 1:0, PSDT 7:6 | command id u16
///  4  namespace id u32, of a fabrics command its type u8
///  8  command dwords 2 and 3; metadata pointer u64
/// 24  data pointer: one SGL descriptor
/// 40  command dwords 10 to 15
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sqe([u8; SQE_LEN]);

impl Sqe {
    const PSDT_SGL: u8 = 0x40;

    /// Returns a command without data. All other fields are zero.
    pub fn new(opcode: Opcode, cid: Cid, nsid: NsId) -> Sqe {
        let mut bytes = [0; SQE_LEN];
        bytes[0] = opcode.0;
        bytes[1] = Sqe::PSDT_SGL;
        put(&mut bytes, 2, &cid.0.to_le_bytes());
        put(&mut bytes, 4, &nsid.0.to_le_bytes());
        let mut sqe = Sqe(bytes);
        sqe.set_sgl(Sgl::Transport { length: 0 });
        sqe
    }

    /// Reads a command, of which every combination of bytes has a meaning or a status.
    ///
    /// # Errors
    /// There are fewer than [`SQE_LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Sqe, Malformed> {
        need("NVMe command", bytes, SQE_LEN)?;
        let mut sqe = [0; SQE_LEN];
        sqe.copy_from_slice(&bytes[..SQE_LEN]);
        Ok(Sqe(sqe))
    }

    /// Returns the command's bytes.
    pub fn as_bytes(&self) -> &[u8; SQE_LEN] {
        &self.0
    }

    /// Returns the opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0[0])
    }

    /// Returns the position in a fused pair.
    pub fn fuse(&self) -> Fuse {
        match self.0[1] & 3 {
            0 => Fuse::None,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// Returns true if the data pointer is an SGL descriptor, as all commands over fabrics have it.
    pub fn has_sgl(&self) -> bool {
        self.0[1] & 0xc0 == Sqe::PSDT_SGL
    }

    /// Returns true if it has the form of all commands over fabrics but fused ones.
    pub fn is_plain(&self) -> bool {
        self.has_sgl() && self.fuse() == Fuse::None
    }

    /// Returns the command id.
    pub fn cid(&self) -> Cid {
        Cid(le16(&self.0, 2))
    }

    /// Changes the command id.
    pub fn set_cid(&mut self, cid: Cid) {
        put(&mut self.0, 2, &cid.0.to_le_bytes());
    }

    /// Returns the namespace.
    pub fn nsid(&self) -> NsId {
        NsId(le32(&self.0, 4))
    }

    /// Returns a command dword of 2 to 15.
    ///
    /// # Panics
    /// There is no such dword.
    pub fn dword(&self, nr: usize) -> u32 {
        le32(&self.0, 4 * nr)
    }

    /// Changes a command dword of 2 to 15.
    ///
    /// # Panics
    /// There is no such dword.
    pub fn set_dword(&mut self, nr: usize, value: u32) {
        put(&mut self.0, 4 * nr, &value.to_le_bytes());
    }

    /// Returns where the data are.
    ///
    /// # Errors
    /// The status with which a controller refuses the command.
    pub fn sgl(&self) -> Result<Sgl, Status> {
        Sgl::parse(&self.0[24..40])
    }

    /// Changes where the data are.
    pub fn set_sgl(&mut self, sgl: Sgl) {
        sgl.emit(&mut self.0[24..40]);
    }

    /// Returns true if the host sends data with the command: bit 0 of the opcode, of a fabrics command that of its type. 3.3.3.1 and 6.
    pub fn is_to_controller(&self) -> bool {
        match self.opcode() {
            Opcode::FABRICS => self.0[4] & 1 != 0,
            opcode => opcode.0 & 1 != 0,
        }
    }

    /// Returns true if the controller sends data with the command: bit 1 of the opcode, of a fabrics command that of its type. 3.3.3.1 and 6.
    pub fn is_to_host(&self) -> bool {
        match self.opcode() {
            Opcode::FABRICS => self.0[4] & 2 != 0,
            opcode => opcode.0 & 2 != 0,
        }
    }

    pub(super) fn byte(&self, at: usize) -> u8 {
        self.0[at]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8; SQE_LEN] {
        &mut self.0
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqe")
            .field("opcode", &self.opcode())
            .field("cid", &self.cid().0)
            .field("nsid", &self.nsid().0)
            .field("dwords", &(10..16).map(|nr| self.dword(nr)).collect::<Vec<_>>())
            .finish()
    }
}

/// Blocks that a command reads, writes or compares: dwords 10 to 12 of Read, Write, Compare, Write Zeroes and Verify. NVM 3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rw {
    /// First block.
    pub slba: u64,
    /// Number of blocks, 1 to 65,536.
    pub blocks: u32,
    /// Force Unit Access: what is written is durable when the command is done.
    pub fua: bool,
}

impl Rw {
    const FUA: u32 = 1 << 30;

    /// Reads the blocks of a command.
    pub fn parse(sqe: &Sqe) -> Rw {
        let dword = sqe.dword(12);
        Rw {
            slba: u64::from(sqe.dword(10)) | u64::from(sqe.dword(11)) << 32,
            blocks: (dword & 0xffff) + 1,
            fua: dword & Rw::FUA != 0,
        }
    }

    /// Writes the blocks into a command.
    ///
    /// # Panics
    /// The number of blocks is 0 or too large.
    pub fn emit(&self, sqe: &mut Sqe) {
        assert!((1..=0x1_0000).contains(&self.blocks), "{} blocks", self.blocks);
        sqe.set_dword(10, self.slba as u32);
        sqe.set_dword(11, (self.slba >> 32) as u32);
        sqe.set_dword(12, (self.blocks - 1) | if self.fua { Rw::FUA } else { 0 });
    }
}

/// A completion: completion queue entry.
///
/// ```text
///  0  result u64
///  8  submission queue head u16 | submission queue id u16, 0 over fabrics
/// 12  command id u16 | status u16 << 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// Dwords 0 and 1, whose meaning depends on the command.
    pub result: u64,
    /// Head of the submission queue; 0xffff if the host has turned its flow control off.
    pub sq_head: u16,
    /// The command.
    pub cid: Cid,
    /// The status.
    pub status: Status,
}

impl Cqe {
    /// Reads a completion.
    ///
    /// # Errors
    /// There are fewer than [`CQE_LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Cqe, Malformed> {
        need("NVMe completion", bytes, CQE_LEN)?;
        Ok(Cqe {
            result: le64(bytes, 0),
            sq_head: le16(bytes, 8),
            cid: Cid(le16(bytes, 12)),
            status: Status(le16(bytes, 14) >> 1),
        })
    }

    /// Writes [`CQE_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        put(bytes, 0, &self.result.to_le_bytes());
        put(bytes, 8, &self.sq_head.to_le_bytes());
        put(bytes, 10, &[0, 0]);
        put(bytes, 12, &self.cid.0.to_le_bytes());
        put(bytes, 14, &(self.status.0 << 1).to_le_bytes());
    }
}

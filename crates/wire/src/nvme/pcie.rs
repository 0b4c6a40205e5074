//! Registers and commands of controllers on PCIe: doorbells, and memory that a controller has. 3.1.3; NVMe over PCIe Transport 1.0 (PCIe) 3.1.

use super::{Capabilities, Cid, Configuration, NsId, Opcode, Register, Sqe};
use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};

impl Register {
    /// Admin Queue Attributes, 4 bytes: entries of the submission queue in bits 11:0, of the completion queue in bits 27:16, both 0-based.
    pub const ADMIN_QUEUES: Register = Register(0x24);
    /// Address of the admin submission queue, 8 bytes.
    pub const ADMIN_SUBMISSION: Register = Register(0x28);
    /// Address of the admin completion queue, 8 bytes.
    pub const ADMIN_COMPLETION: Register = Register(0x30);
    /// Location of the controller's memory buffer (CMBLOC), 4 bytes.
    pub const CMB_LOCATION: Register = Register(0x38);
    /// Its size (CMBSZ), 4 bytes.
    pub const CMB_SIZE: Register = Register(0x3c);
    /// Its control (CMBMSC), 8 bytes.
    pub const CMB_CONTROL: Register = Register(0x50);
    /// Its status (CMBSTS), 4 bytes: bit 0, the address in CMBMSC is invalid.
    pub const CMB_STATUS: Register = Register(0x58);
    /// Capabilities of the persistent memory region (PMRCAP), 4 bytes.
    pub const PMR_CAPABILITIES: Register = Register(0xe00);
    /// Its control (PMRCTL), 4 bytes: bit 0 enables it.
    pub const PMR_CONTROL: Register = Register(0xe04);
    /// Its status (PMRSTS), 4 bytes.
    pub const PMR_STATUS: Register = Register(0xe08);
    /// Lower half of its control (PMRMSCL), 4 bytes.
    pub const PMR_CONTROL_LOW: Register = Register(0xe14);
    /// Upper half of its control (PMRMSCU), 4 bytes.
    pub const PMR_CONTROL_HIGH: Register = Register(0xe18);

    /// Returns the doorbell of a submission queue's tail, `stride` bytes from the next one. PCIe 3.1.2.1.
    pub const fn tail_doorbell(qid: u16, stride: u32) -> Register {
        Register(0x1000 + 2 * qid as u32 * stride)
    }

    /// Returns the doorbell of a completion queue's head. PCIe 3.1.2.2.
    pub const fn head_doorbell(qid: u16, stride: u32) -> Register {
        Register(0x1000 + (2 * qid as u32 + 1) * stride)
    }
}

/// Capabilities that matter to a controller on PCIe, beside [`Capabilities`]. 3.1.3.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieCapabilities {
    /// What all controllers have.
    pub common: Capabilities,
    /// Queues must be contiguous (CQR).
    pub contiguous: bool,
    /// Bytes between doorbells (DSTRD).
    pub doorbell_stride: u32,
    /// It has the NVM command set (CSS).
    pub nvm: bool,
    /// Bytes of the smallest page as a power of two (MPSMIN).
    pub page_shift_min: u8,
    /// It has a persistent memory region (PMRS).
    pub pmr: bool,
    /// It has a memory buffer that hosts enable by CMBMSC (CMBS).
    pub cmb: bool,
}

impl PcieCapabilities {
    const CONTIGUOUS: u64 = 1 << 16;
    const NVM: u64 = 1 << 37;
    const PMR: u64 = 1 << 56;
    const CMB: u64 = 1 << 57;

    /// Reads the register.
    pub const fn parse(register: u64) -> PcieCapabilities {
        PcieCapabilities {
            common: Capabilities::parse(register),
            contiguous: register & PcieCapabilities::CONTIGUOUS != 0,
            doorbell_stride: 4 << (register >> 32 & 0xf),
            nvm: register & PcieCapabilities::NVM != 0,
            page_shift_min: 12 + (register >> 48 & 0xf) as u8,
            pmr: register & PcieCapabilities::PMR != 0,
            cmb: register & PcieCapabilities::CMB != 0,
        }
    }

    /// Returns the register, with pages of the smallest size alone.
    pub const fn register(&self) -> u64 {
        let page = (self.page_shift_min as u64 - 12) & 0xf;
        (self.common.queue_entries as u64 - 1) & 0xffff
            | if self.contiguous {
                PcieCapabilities::CONTIGUOUS
            } else {
                0
            }
            | (self.common.timeout as u64) << 24
            | ((self.doorbell_stride.ilog2() as u64 - 2) & 0xf) << 32
            | if self.nvm { PcieCapabilities::NVM } else { 0 }
            | page << 48
            | page << 52
            | if self.pmr { PcieCapabilities::PMR } else { 0 }
            | if self.cmb { PcieCapabilities::CMB } else { 0 }
    }
}

impl Configuration {
    /// Announces a normal shutdown (SHN).
    pub const SHUT_DOWN: u32 = 1 << 14;
}

/// Controller Status. 3.1.3.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerStatus(pub u32);

impl ControllerStatus {
    /// It takes commands (RDY).
    pub const READY: u32 = 1;
    /// It has failed (CFS).
    pub const FATAL: u32 = 1 << 1;
    /// It has shut down (SHST).
    pub const SHUT_DOWN: u32 = 2 << 2;

    /// Returns true if it takes commands.
    pub const fn is_ready(self) -> bool {
        self.0 & ControllerStatus::READY != 0
    }

    /// Returns true if it has failed.
    pub const fn is_fatal(self) -> bool {
        self.0 & ControllerStatus::FATAL != 0
    }

    /// Returns true if it has shut down.
    pub const fn is_shut_down(self) -> bool {
        self.0 & 3 << 2 == ControllerStatus::SHUT_DOWN
    }

    /// Returns true if nothing answers: a function that was removed reads as all ones.
    pub const fn is_gone(self) -> bool {
        self.0 == u32::MAX
    }
}

/// Memory buffer of a controller: CMBLOC and CMBSZ. 3.1.3.11 and 3.1.3.12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmbLayout {
    /// Its BAR.
    pub bar: u8,
    /// Its offset in the BAR.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Submission queues may lie in it (SQS).
    pub submission_queues: bool,
    /// Completion queues may lie in it (CQS).
    pub completion_queues: bool,
    /// PRP lists may lie in it (LISTS).
    pub lists: bool,
    /// Data of reads may lie in it (RDS).
    pub reads: bool,
    /// Data of writes may lie in it (WDS).
    pub writes: bool,
}

impl CmbLayout {
    /// Reads the registers. `None` if there is no buffer, or one whose unit is not defined.
    pub const fn parse(location: u32, size: u32) -> Option<CmbLayout> {
        let (exponent, units) = (size >> 8 & 0xf, size >> 12);
        if units == 0 || exponent > 6 {
            return None;
        }
        let unit_shift = 12 + 4 * exponent;
        Some(CmbLayout {
            bar: (location & 7) as u8,
            offset: (location as u64 >> 12) << unit_shift,
            bytes: (units as u64) << unit_shift,
            submission_queues: size & 1 != 0,
            completion_queues: size & 1 << 1 != 0,
            lists: size & 1 << 2 != 0,
            reads: size & 1 << 3 != 0,
            writes: size & 1 << 4 != 0,
        })
    }

    /// Returns CMBLOC and CMBSZ, in units of 4 KiB.
    pub const fn registers(&self) -> (u32, u32) {
        let location = self.bar as u32 & 7 | (self.offset >> 12 << 12) as u32;
        let size = self.submission_queues as u32
            | (self.completion_queues as u32) << 1
            | (self.lists as u32) << 2
            | (self.reads as u32) << 3
            | (self.writes as u32) << 4
            | ((self.bytes >> 12) as u32) << 12;
        (location, size)
    }
}

/// Control of a memory buffer: CMBMSC. 3.1.3.14.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmbControl(pub u64);

impl CmbControl {
    /// CMBLOC and CMBSZ tell of it (CRE).
    pub const REGISTERS: u64 = 1;
    /// Addresses of commands reach it (CMSE).
    pub const SPACE: u64 = 1 << 1;

    /// Returns the value by which commands reach it at an address, a multiple of 4 KiB.
    pub const fn at(address: u64) -> CmbControl {
        CmbControl(address & !0xfff | CmbControl::SPACE | CmbControl::REGISTERS)
    }

    /// Returns its address (CBA).
    pub const fn address(self) -> u64 {
        self.0 & !0xfff
    }
}

/// Capabilities of a persistent memory region: PMRCAP. 3.1.3.21.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmrCapabilities {
    /// Its BAR.
    pub bar: u8,
    /// Data of reads may lie in it (RDS).
    pub reads: bool,
    /// Data of writes may lie in it (WDS).
    pub writes: bool,
    /// Hosts choose the address by which commands reach it (CMSS).
    pub space: bool,
    /// Longest time to become ready, in ms (PMRTO and PMRTU).
    pub timeout_ms: u32,
}

impl PmrCapabilities {
    /// Reads the register.
    pub const fn parse(register: u32) -> PmrCapabilities {
        let unit_ms = match register >> 8 & 3 {
            0 => 500,
            _ => 60_000,
        };
        PmrCapabilities {
            bar: (register >> 5 & 7) as u8,
            reads: register & 1 << 3 != 0,
            writes: register & 1 << 4 != 0,
            space: register & 1 << 24 != 0,
            timeout_ms: (register >> 16 & 0xff) * unit_ms,
        }
    }

    /// Returns the register, with the time in units of 500 ms.
    pub const fn register(&self) -> u32 {
        (self.reads as u32) << 3
            | (self.writes as u32) << 4
            | (self.bar as u32 & 7) << 5
            | (self.timeout_ms.div_ceil(500) & 0xff) << 16
            | (self.space as u32) << 24
    }
}

/// PMRCTL: the region is enabled. 3.1.3.22.
pub const PMR_ENABLE: u32 = 1;
/// PMRSTS: it is not ready. 3.1.3.23.
pub const PMR_NOT_READY: u32 = 1 << 8;
/// PMRMSCL: addresses of commands reach it (CMSE). 3.1.3.26.
pub const PMR_SPACE: u32 = 1 << 1;

impl Opcode {
    /// Admin: PCIe has it alone. 5.5.
    pub const CREATE_SUBMISSION_QUEUE: Opcode = Opcode(0x01);
    /// Admin: PCIe has it alone. 5.4.
    pub const CREATE_COMPLETION_QUEUE: Opcode = Opcode(0x05);
}

impl Sqe {
    /// Returns a command of a queue in memory, with the addresses of its data: PRP entries 1 and 2. 4.1.1.
    pub fn in_memory(opcode: Opcode, cid: Cid, nsid: NsId, prps: [u64; 2]) -> Sqe {
        let mut sqe = Sqe::new(opcode, cid, nsid);
        let bytes = sqe.bytes_mut();
        bytes[1] = 0;
        put(bytes, 24, &prps[0].to_le_bytes());
        put(bytes, 32, &prps[1].to_le_bytes());
        sqe
    }

    /// Returns the PRP entries 1 and 2.
    pub fn prps(&self) -> [u64; 2] {
        [le64(self.as_bytes(), 24), le64(self.as_bytes(), 32)]
    }
}

/// A controller on PCIe, as Identify describes it: what a driver needs of it. 5.17.2.1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveController {
    /// Serial number.
    pub serial: String,
    /// Model.
    pub model: String,
    /// Firmware revision.
    pub firmware: String,
    /// Most bytes of a command's data, as a power of two of the smallest pages; 0 is no limit (MDTS).
    pub mdts: u8,
    /// Aborts at a time (ACL).
    pub aborts: u16,
    /// Log2 of bytes of a command, at least and at most (SQES), and of a completion (CQES).
    pub entry_sizes: [u8; 2],
    /// Highest namespace id (NN).
    pub namespaces: u32,
    /// Optional NVM commands (ONCS), as [`super::IdentifyController`] has them.
    pub optional_commands: u16,
    /// There is a volatile write cache, which Flush makes durable (VWC).
    pub has_write_cache: bool,
}

impl DriveController {
    /// Parses what Identify has returned.
    ///
    /// # Errors
    /// There are fewer than [`super::IDENTIFY_LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<DriveController, Malformed> {
        need("Identify Controller", bytes, super::IDENTIFY_LEN)?;
        let text = super::identify::parse_text;
        Ok(DriveController {
            serial: text(&bytes[4..24]),
            model: text(&bytes[24..64]),
            firmware: text(&bytes[64..72]),
            mdts: bytes[77],
            aborts: u16::from(bytes[258]) + 1,
            entry_sizes: [bytes[512], bytes[513]],
            namespaces: le32(bytes, 516),
            optional_commands: le16(bytes, 520),
            has_write_cache: bytes[525] & 1 != 0,
        })
    }

    /// Returns true if a command may have 64 bytes and a completion 16.
    pub const fn has_usual_entries(&self) -> bool {
        const fn holds(field: u8, shift: u8) -> bool {
            field & 0xf <= shift && shift <= field >> 4
        }
        holds(self.entry_sizes[0], 6) && holds(self.entry_sizes[1], 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Registers of QEMU's drive, with a buffer of 16 MiB and a persistent memory region.
    #[test]
    fn registers__of_a_drive_are_read() {
        let capabilities = PcieCapabilities::parse(0x0240_1820_0f01_07ff);
        assert_eq!(capabilities.common.queue_entries, 2048);
        assert_eq!(
            (
                capabilities.common.timeout,
                capabilities.doorbell_stride,
                capabilities.page_shift_min
            ),
            (15, 4, 12)
        );
        assert!(capabilities.cmb && !capabilities.pmr && capabilities.nvm && capabilities.contiguous);
        let cmb = CmbLayout::parse(0x62, 0x1021d).unwrap();
        assert_eq!((cmb.bar, cmb.offset, cmb.bytes), (2, 0, 16 << 20));
        assert!(cmb.submission_queues && cmb.lists && cmb.reads && cmb.writes && !cmb.completion_queues);
        let pmr = PmrCapabilities::parse(0x100_0898);
        assert_eq!((pmr.bar, pmr.timeout_ms), (4, 0));
        assert!(pmr.reads && pmr.writes && pmr.space);
    }

    #[test]
    fn registers__are_read_as_they_are_written() {
        let capabilities = PcieCapabilities {
            common: Capabilities {
                queue_entries: 1024,
                timeout: 20,
            },
            contiguous: true,
            doorbell_stride: 16,
            nvm: true,
            page_shift_min: 13,
            pmr: true,
            cmb: false,
        };
        assert_eq!(PcieCapabilities::parse(capabilities.register()), capabilities);
        let cmb = CmbLayout {
            bar: 4,
            offset: 8192,
            bytes: 1 << 20,
            submission_queues: true,
            completion_queues: false,
            lists: false,
            reads: true,
            writes: false,
        };
        let (location, size) = cmb.registers();
        assert_eq!(CmbLayout::parse(location, size), Some(cmb));
        let pmr = PmrCapabilities {
            bar: 2,
            reads: false,
            writes: true,
            space: true,
            timeout_ms: 1500,
        };
        assert_eq!(PmrCapabilities::parse(pmr.register()), pmr);
        assert_eq!(Register::tail_doorbell(3, 8), Register(0x1030));
        assert_eq!(Register::head_doorbell(3, 8), Register(0x1038));
    }

    #[test]
    fn cmb__of_no_bytes_or_of_an_undefined_unit_is_none() {
        assert_eq!(CmbLayout::parse(0, 0), None);
        assert_eq!(CmbLayout::parse(2, 0x1701), None);
        // The largest that the registers can name.
        let largest = CmbLayout::parse(u32::MAX, 0xffff_f600).unwrap();
        assert_eq!(largest.bytes, 0xf_ffff << 36);
    }
}

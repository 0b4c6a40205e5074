//! The part of the target in what a drive tells of itself: fields of the fabric are the target's, and what hosts may not do is not offered. The offsets are
//! those of NVMe Base 2.0, 5.17.2.1, and NVM 1.0, 4.1.5.1.

use rdmux_wire::nvme::{CopyFormat, IdentifyController, Opcode};

use super::{Allow, Geometry, rules};

/// OACS: Format.
const FORMAT: u16 = 1 << 1;
/// OACS: Firmware Commit and Firmware Image Download.
const FIRMWARE: u16 = 1 << 2;
/// LPA: the log of health is there for each namespace.
const HEALTH_OF_NAMESPACES: u8 = 1;

/// Fields of the controller that are the target's: offset and bytes.
const OWN: [(usize, usize); 15] = [
    (76, 1),     // CMIC
    (77, 1),     // MDTS
    (78, 2),     // CNTLID
    (80, 4),     // VER
    (92, 4),     // OAES
    (96, 4),     // CTRATT
    (111, 1),    // CNTRLTYPE
    (258, 2),    // ACL, AERL
    (320, 2),    // KAS
    (342, 10),   // ANATT, ANACAP, ANAGRPMAX, NANAGRPID
    (512, 2),    // SQES, CQES
    (514, 2),    // MAXCMD
    (536, 4),    // SGLS
    (768, 256),  // SUBNQN
    (1792, 256), // IOCCSZ, IORCSZ, ICDOFF, FCATT, MSDBD, OFCS
];

/// Fields of what no host may do or use: offset and bytes.
const ABSENT: [(usize, usize); 9] = [
    (253, 3), // NVMSR, VWCI, MEC: management interface
    (265, 1), // APSTA: autonomous power states are the kernel's
    (272, 8), // HMPRE, HMMIN: memory of the drive's own host
    (312, 4), // RPMBS
    (332, 6), // HMMINDS, HMMAXD
    (522, 2), // FUSES
    (531, 1), // NWPC: write protection of namespaces
    (532, 2), // ACWU: of fused pairs
    (328, 4), // SANICAP, unless Sanitize is allowed
];

/// Puts the target's fields, as `own` has them, into what a drive tells of its controller.
pub(super) fn controller(bytes: &mut [u8], own: &[u8], allow: Allow) {
    let absent = match allow.sanitize {
        true => &ABSENT[..ABSENT.len() - 1],
        false => &ABSENT,
    };
    for (at, len) in OWN {
        bytes[at..at + len].copy_from_slice(&own[at..at + len]);
    }
    for (at, len) in absent {
        bytes[*at..at + len].fill(0);
    }
    let mut keep = |at: usize, mask: u16| {
        let value = u16::from_le_bytes([bytes[at], bytes[at + 1]]) & mask;
        bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    };
    let admin = [(allow.format, FORMAT), (allow.firmware, FIRMWARE)].into_iter();
    let admin = admin.filter_map(|(is_allowed, bit)| is_allowed.then_some(bit));
    keep(256, admin.sum());
    keep(520, !IdentifyController::RESERVATIONS);
    keep(534, CopyFormat::Same.bit());
    bytes[261] &= HEALTH_OF_NAMESPACES | IdentifyController::EFFECTS_LOG | IdentifyController::EXTENDED_LOGS;
    // A Flush of all namespaces is refused.
    bytes[525] = match bytes[525] & 1 {
        0 => 0,
        _ => 1 | 2 << 1,
    };
    // MNAN: hosts take no more namespaces than NN for possible.
    let number = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let namespaces = number(&bytes[516..]).min(number(&own[540..]));
    bytes[540..544].copy_from_slice(&namespaces.to_le_bytes());
}

/// Puts the target's fields into what a drive tells of a namespace. One Copy moves `copy_bytes_max` at most.
pub(super) fn namespace(bytes: &mut [u8], ana_group: u32, geometry: Geometry, copy_bytes_max: u64) {
    // NMIC: several controllers of the target have it.
    bytes[30] |= 1;
    // RESCAP.
    bytes[31] = 0;
    bytes[92..96].copy_from_slice(&ana_group.to_le_bytes());
    let blocks = copy_bytes_max >> geometry.block_shift;
    // MSSRL, MCL: 0 where the drive has no Copy.
    let single = u16::from_le_bytes([bytes[74], bytes[75]]).min(u16::try_from(blocks).unwrap_or(u16::MAX));
    bytes[74..76].copy_from_slice(&single.to_le_bytes());
    let all = u32::from_le_bytes([bytes[76], bytes[77], bytes[78], bytes[79]]);
    let all = all.min(u32::try_from(blocks).unwrap_or(u32::MAX));
    bytes[76..80].copy_from_slice(&all.to_le_bytes());
}

/// As [`namespace`], of what is told whatever the command set. 5.17.2.8.
pub(super) fn independent_namespace(bytes: &mut [u8], ana_group: u32) {
    bytes[1] |= 1;
    bytes[2] = 0;
    bytes[4..8].copy_from_slice(&ana_group.to_le_bytes());
}

/// Takes commands that are refused out of the log of commands and their effects (5.16.1.6), of which `bytes` begin at an offset.
pub(super) fn effects(bytes: &mut [u8], offset: u64, allow: Allow) {
    // 256 admin commands, then 256 I/O commands, of 4 bytes each.
    for (at, byte) in (offset..).zip(bytes) {
        let command = at / 4;
        let is_offered = match u8::try_from(command) {
            Ok(admin) => rules::offers_admin(Opcode(admin), allow),
            Err(_) if command < 512 => rules::offers_io(Opcode((command - 256) as u8)),
            Err(_) => true,
        };
        if !is_offered {
            *byte = 0;
        }
    }
}

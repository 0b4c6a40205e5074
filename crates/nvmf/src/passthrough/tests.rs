use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rdmux_verbs::sync::Mutex;
use rdmux_wire::nvme::{CopyFormat, DatasetRange as Range, IdentifyController, LogId};

use super::rules::opcode;
use super::*;

/// Bytes of the longest transfer of the fake drive.
pub(crate) const DATA_MAX: u32 = 128 << 10;
const FINAL_OPCODE: Status = Status::INVALID_OPCODE.do_not_retry();
const FINAL_FIELD: Status = Status::INVALID_FIELD.do_not_retry();
const FINAL_LENGTH: Status = Status::SGL_LENGTH_INVALID.do_not_retry();
pub(crate) const ALL: Allow = Allow {
    format: true,
    sanitize: true,
    firmware: true,
    vendor: true,
};

/// A drive with namespaces 1 and 3, of 1 MiB each. It checks that no command moves more than its buffer has.
#[derive(Debug)]
pub(crate) struct FakeDrive {
    /// MDTS.
    mdts: u8,
    /// AVSCC and ICSVSCC.
    has_lengths: bool,
    /// For an io_uring.
    file: Arc<File>,
    state: Mutex<FakeState>,
}

#[derive(Debug)]
struct FakeState {
    block_shift: u8,
    metadata: u16,
    bytes: BTreeMap<NsId, Vec<u8>>,
    /// Opcodes that have reached it, and true for those of the controller.
    seen: Vec<(bool, Opcode)>,
    fails: Option<Status>,
}

impl FakeDrive {
    pub(crate) fn new(mdts: u8, has_lengths: bool) -> Arc<FakeDrive> {
        let bytes = [1, 3].map(|nsid| (NsId(nsid), vec![0; 1 << 20]));
        Arc::new(FakeDrive {
            mdts,
            has_lengths,
            file: Arc::new(tempfile::tempfile().unwrap()),
            state: Mutex::new(FakeState {
                block_shift: 9,
                metadata: 0,
                bytes: bytes.into(),
                seen: Vec::new(),
                fails: None,
            }),
        })
    }

    /// Returns how often a command has reached it, which then counts no more.
    pub(crate) fn take_seen(&self, opcode: Opcode, is_admin: bool) -> usize {
        let mut state = self.state.lock();
        let before = state.seen.len();
        state.seen.retain(|seen| *seen != (is_admin, opcode));
        before - state.seen.len()
    }

    /// Has all commands fail from now on.
    pub(crate) fn fail(&self, status: Status) {
        self.state.lock().fails = Some(status);
    }

    fn identify(&self, state: &FakeState, sqe: &Sqe, data: &mut [u8]) {
        assert_eq!(data.len(), IDENTIFY_LEN, "Identify moves 4096 bytes");
        match Cns(sqe.dword(10) as u8) {
            Cns::CONTROLLER => {
                data.fill(0x5a);
                data[4..24].copy_from_slice(b"fake serial         ");
                data[24..64].fill(b'm');
                data[77] = self.mdts;
                data[80..84].copy_from_slice(&0x1_0400u32.to_le_bytes());
                data[516..520].copy_from_slice(&8u32.to_le_bytes());
                data[256..258].fill(0xff);
                data[520..522].fill(0xff);
                data[534..536].fill(0xff);
                data[525] = 7;
                data[264] = self.has_lengths.into();
                data[530] = self.has_lengths.into();
            }
            Cns::NAMESPACE => {
                data.fill(0);
                let blocks = state.bytes[&sqe.nsid()].len() as u64 >> state.block_shift;
                data[..8].copy_from_slice(&blocks.to_le_bytes());
                data[31] = 0xff;
                data[74..80].fill(0xff);
                data[104..120].fill(0x77);
                let formats = [(state.block_shift, state.metadata), (12, 0), (9, 8), (9, 0)];
                for (at, (shift, metadata)) in formats.into_iter().enumerate() {
                    data[128 + 4 * at..][..2].copy_from_slice(&metadata.to_le_bytes());
                    data[128 + 4 * at + 2] = shift;
                }
            }
            _ => data.fill(0),
        }
    }
}

impl CommandPath for FakeDrive {
    fn file(&self, _: NsId) -> Option<&Arc<File>> {
        Some(&self.file)
    }

    fn admin(&self, sqe: &Sqe, data: &mut [u8], _: Duration) -> Result<u64, Status> {
        let mut state = self.state.lock();
        state.seen.push((true, sqe.opcode()));
        if let Some(status) = state.fails {
            return Err(status);
        }
        match sqe.opcode() {
            Opcode::IDENTIFY => self.identify(&state, sqe, data),
            Opcode::GET_LOG_PAGE => {
                let dwords = (sqe.dword(10) >> 16) as usize + 1;
                assert_eq!(data.len(), dwords * 4, "a log moves what NUMD says");
                // A part alone: the drive has no more.
                let half = data.len() / 2;
                data[..half].fill(sqe.dword(10) as u8);
            }
            Opcode::GET_FEATURES | Opcode::SET_FEATURES => {
                let bytes = match sqe.dword(10) as u8 {
                    0x03 => 4096,
                    0x0c => 256,
                    0x0e => 8,
                    0x13 => 512,
                    _ => 0,
                };
                assert!(data.len() >= bytes, "a feature moves its data");
                data[..bytes].fill(0x66);
            }
            opcode::FORMAT => {
                assert!(data.is_empty());
                (state.block_shift, state.metadata) = match sqe.dword(10) & 0xf {
                    1 => (12, 0),
                    2 => (9, 8),
                    _ => (9, 0),
                };
            }
            opcode::FIRMWARE_DOWNLOAD => assert_eq!(data.len(), (sqe.dword(10) as usize + 1) * 4),
            opcode::SANITIZE | opcode::FIRMWARE_COMMIT => assert!(data.is_empty()),
            // It reads or writes as much as it moves at most, or what the command says.
            Opcode(0xc1..) => {
                let moved = match (sqe.opcode().0 & 3, self.has_lengths) {
                    (0, _) => 0,
                    (_, true) => sqe.dword(10) as usize * 4,
                    (_, false) => (4096 << self.mdts) as usize,
                };
                assert!(moved <= data.len(), "a vendor's command moves {moved} bytes");
                if sqe.opcode().0 & 3 == 2 {
                    data[..moved].fill(0xcc);
                }
                return Ok(0x1234_5678_9abc);
            }
            _ => return Err(FINAL_OPCODE),
        }
        Ok(7)
    }

    fn io(&self, sqe: &Sqe, data: &mut [u8], _: Duration) -> Result<u64, Status> {
        let mut state = self.state.lock();
        state.seen.push((false, sqe.opcode()));
        if let Some(status) = state.fails {
            return Err(status);
        }
        let shift = state.block_shift;
        let bytes = state.bytes.get_mut(&sqe.nsid()).expect("a known namespace");
        let rw = Rw::parse(sqe);
        let (at, length) = ((rw.slba << shift) as usize, (rw.blocks as usize) << shift);
        match sqe.opcode() {
            Opcode::READ | Opcode::WRITE | Opcode::COMPARE => {
                assert_eq!(data.len(), length, "{sqe:?} moves its blocks");
                let stored = &mut bytes[at..at + length];
                match sqe.opcode() {
                    Opcode::READ => data.copy_from_slice(stored),
                    Opcode::WRITE => stored.copy_from_slice(data),
                    _ if *stored != *data => return Err(Status::COMPARE_FAILURE.do_not_retry()),
                    _ => {}
                }
            }
            Opcode::DATASET_MANAGEMENT => {
                assert_eq!(data.len(), usize::from(Range::count(sqe)) * Range::LEN);
            }
            Opcode::COPY => assert_eq!(data.len(), usize::from(Copy::parse(sqe).ranges) * CopyRange::LEN),
            Opcode::WRITE_ZEROES => bytes[at..at + length].fill(0),
            Opcode::FLUSH | Opcode::VERIFY => assert!(data.is_empty()),
            _ => {
                let moved = match (sqe.opcode().0 & 3, self.has_lengths) {
                    (0, _) => 0,
                    (_, true) => sqe.dword(10) as usize * 4,
                    (_, false) => (4096 << self.mdts) as usize,
                };
                assert!(moved <= data.len(), "a vendor's command moves {moved} bytes");
                return Err(Status(0x1c0).do_not_retry());
            }
        }
        Ok(0)
    }
}

pub(crate) fn controller(drive: &Arc<FakeDrive>, allow: Allow) -> PassedController {
    let ids = [NsId(1), NsId(3)];
    PassedController::new(drive.clone(), ids, DATA_MAX, allow).unwrap()
}

fn command(opcode: u8, dwords: &[(usize, u32)]) -> Sqe {
    let mut sqe = Sqe::new(Opcode(opcode), Cid(1), NsId(1));
    for (nr, value) in dwords {
        sqe.set_dword(*nr, *value);
    }
    sqe
}

/// Returns the admin opcodes of which some form passes or is the target's own.
fn admin_opcodes(allow: Allow, has_lengths: bool, mdts: u8) -> Vec<u8> {
    let controller = controller(&FakeDrive::new(mdts, has_lengths), allow);
    let offered = |opcode: &u8| {
        // Lengths and fields that suit some command: 4 bytes, power management, the log of health.
        let sqe = command(*opcode, &[(10, 2)]);
        let checks = [0, 4, 8, 12, 4096].map(|len| controller.check_admin(&sqe, len));
        let is_unknown = |check: &Result<_, _>| matches!(check, Err(FINAL_OPCODE));
        !checks.iter().all(is_unknown)
    };
    (0..=255).filter(offered).collect()
}

#[test]
fn check_admin__takes_the_opcodes_of_the_list() {
    let standard = [0x02, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x18];
    let vendors: Vec<u8> = (0xc0..=255).filter(|opcode| opcode & 3 != 3).collect();
    let without_data: Vec<u8> = (0xc0..=255).filter(|opcode| opcode & 3 == 0).collect();
    let expected = |others: &[u8], vendors: &[u8]| {
        let mut all = [&standard, others, vendors].concat();
        all.sort_unstable();
        all
    };
    assert_eq!(admin_opcodes(Allow::default(), true, 9), expected(&[], &vendors));
    assert_eq!(admin_opcodes(Allow::default(), false, 5), expected(&[], &vendors));
    let named = [0x10, 0x11, 0x80, 0x84];
    assert_eq!(admin_opcodes(ALL, false, 0), expected(&named, &vendors));
    // The drive may move more than a buffer has, or does not say how much it may.
    for mdts in [6, 0, 52, 255] {
        assert_eq!(
            admin_opcodes(Allow::default(), false, mdts),
            expected(&[], &without_data)
        );
    }
}

#[test]
fn check_io__takes_the_opcodes_of_the_list() {
    let controller = controller(&FakeDrive::new(5, false), ALL);
    let is_unknown = |opcode: &u8| {
        let checks = [0, 512, 16, 32].map(|len| controller.check_io(&command(*opcode, &[]), len));
        checks.iter().all(|check| matches!(check, Err(FINAL_OPCODE)))
    };
    let offered: Vec<u8> = (0..=255).filter(|opcode| !is_unknown(opcode)).collect();
    let standard = [0x00, 0x01, 0x02, 0x05, 0x08, 0x09, 0x0c, 0x19];
    let vendors = (0x80..=255).filter(|opcode| opcode & 3 != 3);
    assert_eq!(offered, standard.into_iter().chain(vendors).collect::<Vec<_>>());
}

#[test]
fn check_io__the_length_is_that_of_the_blocks() {
    let controller = controller(&FakeDrive::new(5, false), Allow::default());
    for opcode in [Opcode::READ, Opcode::WRITE, Opcode::COMPARE] {
        let check = |blocks: u32, len| {
            let sqe = command(opcode.0, &[(12, blocks - 1)]);
            controller.check_io(&sqe, len).map(|(_, bytes)| bytes)
        };
        assert_eq!(check(8, 4096), Ok(4096));
        for len in [0, 512, 4095, 4097, 8192, u32::MAX] {
            assert_eq!(check(8, len), Err(FINAL_LENGTH), "{opcode:?} {len}");
        }
        assert_eq!(check(256, DATA_MAX), Ok(DATA_MAX.into()));
        assert_eq!(
            check(512, 2 * DATA_MAX),
            Err(FINAL_FIELD),
            "more than the drive takes"
        );
    }
    let beyond = Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
    for slba in [2048, u64::MAX] {
        let sqe = command(0x02, &[(10, slba as u32), (11, (slba >> 32) as u32)]);
        assert_eq!(controller.check_io(&sqe, 512).map(drop), beyond);
    }
    let mut other = command(0x02, &[]);
    other.set_dword(1, 2);
    assert_eq!(
        controller.check_io(&other, 512).unwrap_err(),
        Status::INVALID_NAMESPACE.do_not_retry()
    );
}

#[test]
fn check_io__lists_are_whole() {
    let controller = controller(&FakeDrive::new(5, false), Allow::default());
    let manage = command(0x09, &[(10, 1)]);
    let copy = command(0x19, &[(12, 1)]);
    for (sqe, bytes) in [(manage, 32), (copy, 64)] {
        for len in [0, bytes - 1, 8193] {
            assert_eq!(controller.check_io(&sqe, len).unwrap_err(), FINAL_LENGTH);
        }
        assert!(controller.check_io(&sqe, bytes).is_ok());
        // The drive is given the list alone.
        assert!(controller.io(&sqe, &mut vec![0; 4096]).is_ok());
    }
    let other_format = command(0x19, &[(12, (CopyFormat::Any as u32) << 8)]);
    assert_eq!(controller.check_io(&other_format, 32).unwrap_err(), FINAL_FIELD);
    let directive = command(0x01, &[(12, 1 << 20)]);
    assert_eq!(controller.check_io(&directive, 512).unwrap_err(), FINAL_FIELD);
}

#[test]
fn check_admin__the_length_is_that_of_the_command() {
    let controller = controller(&FakeDrive::new(5, true), ALL);
    let check = |sqe: Sqe, len| controller.check_admin(&sqe, len).map(|pass| pass.is_some());
    let identify = command(0x06, &[(10, 1)]);
    assert_eq!(check(identify, 4096), Ok(true));
    let health = command(0x02, &[(10, 0x02 | 127 << 16)]);
    assert_eq!(check(health, 512), Ok(true));
    let download = command(0x11, &[(10, 15)]);
    assert_eq!(check(download, 64), Ok(true));
    let vendor = command(0xc1, &[(10, 16)]);
    assert_eq!(check(vendor, 64), Ok(true));
    for (sqe, len) in [
        (identify, 4092),
        (identify, 8192),
        (health, 508),
        (health, 516),
        (download, 60),
        (vendor, 68),
    ] {
        assert_eq!(check(sqe, len), Err(FINAL_LENGTH), "{sqe:?} {len}");
    }
    // Dwords of which the product overflows 32 bits.
    for sqe in [command(0xc1, &[(10, 1 << 30)]), command(0x11, &[(10, u32::MAX)])] {
        assert_eq!(check(sqe, 0), Err(FINAL_LENGTH));
    }
    let most = command(0x02, &[(10, 0xffff_0002), (11, 0xffff)]);
    assert_eq!(check(most, u32::MAX), Err(FINAL_LENGTH));
    let long = command(0x02, &[(10, 0xffff_0002)]);
    assert_eq!(
        check(long, 256 << 10),
        Err(FINAL_FIELD),
        "more than the drive takes"
    );
}

#[test]
fn check_admin__logs_and_features_are_the_drives_or_the_targets_or_refused() {
    let controller = controller(&FakeDrive::new(5, false), Allow::default());
    let log = |log: u8| controller.check_admin(&command(0x02, &[(10, u32::from(log))]), 4);
    for drives in [0x01, 0x02, 0x03, 0x05, 0x06, 0x81, 0xc0, 0xff] {
        assert!(matches!(log(drives), Ok(Some(_))), "{drives:#x}");
    }
    for targets in [LogId::CHANGED_NAMESPACES, LogId::ANA] {
        assert_eq!(log(targets.0), Ok(None));
    }
    for refused in [0x00, 0x07, 0x08, 0x0d, 0x12, 0x70, 0x80] {
        assert_eq!(
            log(refused),
            Err(Status::INVALID_LOG.do_not_retry()),
            "{refused:#x}"
        );
    }
    let get = |id, len| controller.check_admin(&command(0x0a, &[(10, id)]), len);
    let set = |id, len| controller.check_admin(&command(0x09, &[(10, id)]), len);
    for targets in [0x07, 0x0b, 0x0f, 0x81] {
        assert_eq!([get(targets, 0), set(targets, 0)], [Ok(None), Ok(None)]);
    }
    // Interrupts, host memory, host behaviour, reservations, write protection, a vendor's.
    for refused in [0x08, 0x09, 0x0d, 0x16, 0x82, 0x83, 0x84, 0xc0] {
        assert_eq!(
            [get(refused, 4096), set(refused, 4096)],
            [Err(FINAL_FIELD), Err(FINAL_FIELD)]
        );
    }
    assert!(matches!((get(0x06, 0), set(0x06, 0)), (Ok(Some(_)), Ok(Some(_)))));
    assert_eq!(set(0x0c, 256), Err(Status::FEATURE_NOT_CHANGEABLE.do_not_retry()));
    assert_eq!(
        (get(0x0c, 255), set(0x0e, 16)),
        (Err(FINAL_LENGTH), Err(FINAL_LENGTH))
    );
    assert!(matches!(
        (get(0x0c, 4096), set(0x0e, 8)),
        (Ok(Some(_)), Ok(Some(_)))
    ));
}

fn run_admin(controller: &PassedController, sqe: &Sqe, data: &mut [u8]) -> Result<u64, Status> {
    let own = Own {
        controller: Some(vec![0xa5; IDENTIFY_LEN].into()),
        ana_group: 9,
    };
    let pass = controller
        .check_admin(sqe, data.len() as u32)?
        .expect("it passes");
    match pass.transfer {
        Transfer::None => controller.admin(sqe, pass, &mut [], &own),
        _ => controller.admin(sqe, pass, data, &own),
    }
}

#[test]
fn admin__identify_is_the_drives_but_for_the_fabrics_fields() {
    let drive = FakeDrive::new(5, false);
    let mut own = vec![0; IDENTIFY_LEN];
    drive.identify(&drive.state.lock(), &command(0x06, &[(10, 1)]), &mut own);
    let before = own;
    let mut data = vec![0xee; IDENTIFY_LEN];
    run_admin(
        &controller(&drive, Allow::default()),
        &command(0x06, &[(10, 1)]),
        &mut data,
    )
    .unwrap();
    let mut differs = Vec::new();
    for at in (0..IDENTIFY_LEN).filter(|at| before[*at] != data[*at]) {
        match differs.last_mut() {
            Some((_, end)) if *end == at => *end += 1,
            _ => differs.push((at, at + 1)),
        }
    }
    let expected = [
        (76, 84),
        (92, 100),
        (111, 112),
        (253, 258),
        (258, 260),
        (261, 262),
        (265, 266),
        (272, 280),
        (312, 316),
        (320, 322),
        (328, 338),
        (342, 352),
        (512, 516),
        (520, 521),
        (522, 524),
        (525, 526),
        (531, 544),
        (768, 1024),
        (1792, 2048),
    ];
    let merged = |ranges: &[(usize, usize)]| {
        ranges
            .iter()
            .flat_map(|(from, to)| *from..*to)
            .collect::<Vec<_>>()
    };
    assert_eq!(merged(&differs), merged(&expected));
    let parse = |at| u16::from_le_bytes([data[at], data[at + 1]]);
    assert_eq!(parse(256), 0, "OACS");
    assert_eq!(parse(520), !IdentifyController::RESERVATIONS, "ONCS");
    assert_eq!(parse(534), 1, "OCFS");
    run_admin(&controller(&drive, ALL), &command(0x06, &[(10, 1)]), &mut data).unwrap();
    assert_eq!(
        u16::from_le_bytes([data[256], data[257]]),
        6,
        "OACS: format and firmware"
    );
    assert_eq!(data[328..332], [0x5a; 4], "SANICAP");
}

#[test]
fn admin__a_namespace_is_the_drives_but_for_what_is_shared() {
    let controller = controller(&FakeDrive::new(5, false), Allow::default());
    let mut data = vec![0xee; IDENTIFY_LEN];
    run_admin(&controller, &command(0x06, &[(10, 0)]), &mut data).unwrap();
    assert_eq!(data[..8], 2048u64.to_le_bytes());
    assert_eq!((data[30], data[31]), (1, 0));
    assert_eq!(data[92..96], 9u32.to_le_bytes());
    assert_eq!(data[104..120], [0x77; 16]);
    assert_eq!(data[76..80], ((COPY_BYTES_MAX >> 9) as u32).to_le_bytes());
}

#[test]
fn admin__effects_leave_out_what_is_refused_at_any_offset() {
    let whole = |allow| {
        let mut bytes = vec![0xff; 4096];
        identify::effects(&mut bytes, 0, allow);
        bytes
    };
    let bytes = whole(Allow::default());
    let offers = |bytes: &[u8], at: usize| bytes[at * 4..at * 4 + 4] == [0xff; 4];
    assert!(
        offers(&bytes, 0x06) && offers(&bytes, 0xc1) && offers(&bytes, 256 + 0x02) && offers(&bytes, 700)
    );
    assert!(
        !offers(&bytes, 0x80)
            && !offers(&bytes, 0x0d)
            && !offers(&bytes, 256 + 0x0d)
            && !offers(&bytes, 256 + 0x04)
    );
    assert!(offers(&whole(ALL), 0x80));
    for offset in [1, 4, 510, 1024, 4092] {
        let mut part = vec![0xff; 4096 - offset];
        identify::effects(&mut part, offset as u64, Allow::default());
        assert_eq!(part, bytes[offset..]);
    }
}

#[test]
fn admin__what_the_drive_does_not_write_is_zero() {
    let controller = controller(&FakeDrive::new(5, false), Allow::default());
    let mut data = vec![0xee; 512];
    assert_eq!(
        run_admin(&controller, &command(0x02, &[(10, 0x02 | 127 << 16)]), &mut data),
        Ok(7)
    );
    assert_eq!(data, [[0x02; 256], [0; 256]].concat());
    let mut data = vec![0xee; 4096];
    run_admin(&controller, &command(0x0a, &[(10, 0x0c)]), &mut data).unwrap();
    assert_eq!(data[256..], [0; 4096 - 256]);
}

#[test]
fn admin__a_vendors_command_moves_no_more_than_the_host_has() {
    let drive = FakeDrive::new(5, false);
    let passed = controller(&drive, Allow::default());
    for len in [0, 4, 512] {
        let mut data = vec![0xee; len];
        let result = run_admin(&passed, &command(0xc2, &[]), &mut data);
        assert_eq!(result, Ok(0x1234_5678_9abc), "all of the result comes back");
        assert_eq!(data, vec![0xcc; len]);
        assert!(run_admin(&passed, &command(0xc5, &[]), &mut data).is_ok());
    }
    // Its refusal is the drive's.
    assert_eq!(
        run_admin(&passed, &command(0xc0, &[]), &mut []),
        Err(FINAL_OPCODE)
    );
    assert_eq!(drive.take_seen(Opcode(0xc0), true), 1);
    assert_eq!(
        passed.io(&command(0x82, &[]), &mut [0; 512]),
        Err(Status(0x1c0).do_not_retry())
    );
    for opcode in [0xc3, 0x0d, 0x15, 0x7c, 0x81, 0x82, 0x1c, 0x19, 0x00, 0x04] {
        assert_eq!(
            passed.check_admin(&command(opcode, &[]), 0),
            Err(FINAL_OPCODE),
            "{opcode:#x}"
        );
    }
}

#[test]
fn admin__a_format_changes_what_commands_move() {
    let drive = FakeDrive::new(5, false);
    let passed = controller(&drive, ALL);
    let read = |blocks: u32, len: usize| passed.io(&command(0x02, &[(12, blocks - 1)]), &mut vec![0; len]);
    assert_eq!(read(8, 4096), Ok(0));
    assert_eq!(
        run_admin(&passed, &command(0x80, &[(10, 2)]), &mut []),
        Err(Status::INVALID_FORMAT.do_not_retry()),
        "blocks with metadata"
    );
    assert_eq!(drive.take_seen(opcode::FORMAT, true), 0);
    assert_eq!(run_admin(&passed, &command(0x80, &[(10, 1)]), &mut []), Ok(7));
    // One that was checked before would move 8 blocks of 4096 bytes now.
    assert_eq!(read(8, 4096), Err(FINAL_LENGTH));
    assert_eq!(read(1, 4096), Ok(0));
    let (_, namespace) = passed.namespaces().next().unwrap();
    assert_eq!((namespace.block_shift(), namespace.bytes()), (Some(12), 1 << 20));
    let meanwhile = passed.formatting.alone(|| {}, || read(1, 4096));
    assert_eq!(meanwhile, Err(Status::FORMAT_IN_PROGRESS));
    drive.state.lock().metadata = 8;
    let _ = namespace.measure();
    assert_eq!(read(1, 4096), Err(Status::NAMESPACE_NOT_READY.do_not_retry()));
}

#[test]
fn new__refuses_what_hosts_cannot_use() {
    let drive = FakeDrive::new(5, false);
    drive.state.lock().metadata = 8;
    let new = |ids: &[u32], drive: &Arc<FakeDrive>| {
        let ids = ids.iter().copied().map(NsId);
        PassedController::new(drive.clone(), ids, DATA_MAX, Allow::default()).map(drop)
    };
    assert!(matches!(
        new(&[1], &drive),
        Err(PassthroughError::Metadata(NsId(1)))
    ));
    assert!(matches!(new(&[4000], &drive), Err(PassthroughError::Id(_))));
    assert!(matches!(new(&[], &drive), Err(PassthroughError::Empty)));
    drive.fail(Status::INTERNAL_ERROR);
    assert!(matches!(new(&[1], &drive), Err(PassthroughError::Identify(_))));
}

/// The fake drive panics if a command moves more than its buffer has.
#[test]
fn commands__of_any_bytes_move_no_more_than_their_buffers() {
    let seed = 23;
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for (mdts, has_lengths) in [(5, false), (5, true), (9, true)] {
        let passed = controller(&FakeDrive::new(mdts, has_lengths), Allow { vendor: false, ..ALL });
        let mut passes = 0;
        for _ in 0..20_000 {
            let mut bytes = [0; 64];
            random.fill_bytes(&mut bytes);
            let mut sqe = Sqe::parse(&bytes).unwrap();
            sqe.set_dword(1, random.next_u32() % 5);
            let dwords = if random.next_u32() % 2 == 0 {
                0xff
            } else {
                u32::MAX
            };
            for nr in 10..14 {
                sqe.set_dword(nr, random.next_u32() & dwords);
            }
            let lens = [
                0,
                4,
                16,
                512,
                4096,
                8192,
                (sqe.dword(10) & 0xff) * 4,
                (sqe.dword(12) & 0xff) * 512 + 512,
            ];
            let len = lens[random.next_u32() as usize % lens.len()];
            let mut data = Pages::new(len as usize);
            if random.next_u32() % 2 == 0 {
                if let Ok((pass, _)) = passed.check_io(&sqe, len) {
                    passes += 1;
                    let data = if pass.transfer == Transfer::None {
                        &mut [][..]
                    } else {
                        &mut data[..]
                    };
                    let _ = passed.io(&sqe, data);
                }
            } else if let Ok(Some(_)) = passed.check_admin(&sqe, len) {
                passes += 1;
                let _ = run_admin(&passed, &sqe, &mut data);
            }
        }
        assert!(passes > 500, "{passes} commands have passed");
    }
}

#[test]
fn config__is_a_path_and_words() {
    let parse = |text: &str| text.parse::<ControllerConfig>();
    let config = parse("/dev/nvme0,allow=format+firmware").unwrap();
    assert_eq!(config.path, PathBuf::from("/dev/nvme0"));
    assert!(config.allow.format && config.allow.firmware && !config.allow.sanitize);
    assert_eq!(config.to_string(), "/dev/nvme0,allow=format+firmware");
    assert_eq!(parse("/dev/nvme0").unwrap().to_string(), "/dev/nvme0");
    assert!(
        parse("/dev/nvme0,allow=all")
            .unwrap_err()
            .contains("'all' is nothing to allow")
    );
    assert!(parse("/dev/nvme0,ro").unwrap_err().contains("'ro' is not allow="));
    assert!(parse("").unwrap_err().contains("no controller given"));
}

//! The model under a host of few lines, which does what a driver must not do, too.

use std::sync::Arc;

use rdmux_drive::{DmaMemory, Function};
use rdmux_rnic::Memory;
use rdmux_rnic::ledger::{Class, Link};
use rdmux_wire::nvme::{
    CmbControl, CmbLayout, Configuration, ControllerStatus, Cqe, DriveController, IdentifyNamespace, NsId,
    Opcode, PMR_ENABLE, PMR_SPACE, PcieCapabilities, Register, Rw, Sqe, Status,
};

use super::bus::PAGE;
use super::*;

/// Entries of each queue.
const ENTRIES: u32 = 16;
const STEPS_MAX: u32 = 10_000;

/// A pair of queues.
struct Pair {
    id: u16,
    sq: Buffer,
    cq: Buffer,
    tail: u32,
    head: u32,
    phase: bool,
}

/// Memory, and the addresses of its pages.
#[derive(Clone)]
struct Buffer {
    memory: Arc<dyn Memory>,
    offset: u64,
    pages: Vec<u64>,
}

impl From<DmaMemory> for Buffer {
    fn from(dma: DmaMemory) -> Buffer {
        Buffer {
            memory: dma.memory,
            offset: 0,
            pages: dma.pages,
        }
    }
}

impl Buffer {
    fn read(&self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.read(self.offset, &mut out).unwrap();
        out
    }

    fn write(&self, bytes: &[u8]) {
        self.memory.write(self.offset, bytes).unwrap();
    }
}

struct Host {
    drive: Arc<Drive>,
    pairs: Vec<Pair>,
    now: u64,
    cid: u16,
    lists: Vec<Buffer>,
}

impl Host {
    fn new(shape: Shape, blocks: u64, seed: u64) -> Host {
        let drive = Drive::new(shape, Bytes::new(blocks), seed);
        Host::of(drive)
    }

    fn of(drive: Arc<Drive>) -> Host {
        drive.set_faults(Faults {
            latency_ns: 1000,
            ..Faults::default()
        });
        Host {
            drive,
            pairs: Vec::new(),
            now: 0,
            cid: 0,
            lists: Vec::new(),
        }
    }

    fn started(seed: u64) -> Host {
        let mut host = Host::new(Shape::default(), 1024, seed);
        host.start();
        host.create_queue(None);
        host
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        self.drive.dma(bytes).unwrap().into()
    }

    fn pair(&self, id: u16, sq: Option<Buffer>) -> Pair {
        Pair {
            id,
            sq: sq.unwrap_or_else(|| self.buffer(4096)),
            cq: self.buffer(4096),
            tail: 0,
            head: 0,
            phase: true,
        }
    }

    fn start(&mut self) {
        let drive = &self.drive;
        let pair = self.pair(0, None);
        drive.write_u32(Register::ADMIN_QUEUES.0, (ENTRIES - 1) | (ENTRIES - 1) << 16);
        drive.write_u64(Register::ADMIN_SUBMISSION.0, pair.sq.pages[0]);
        drive.write_u64(Register::ADMIN_COMPLETION.0, pair.cq.pages[0]);
        drive.write_u32(Register::CONFIGURATION.0, Configuration::enabled().0);
        self.pairs.push(pair);
        self.until(|drive| ControllerStatus(drive.read_u32(Register::STATUS.0)).is_ready());
    }

    fn until(&mut self, done: impl Fn(&Drive) -> bool) {
        for _ in 0..STEPS_MAX {
            if done(&self.drive) {
                return;
            }
            self.step();
        }
        panic!("it does not happen: {:?}", self.drive.violation());
    }

    fn step(&mut self) {
        if !self.drive.step() {
            self.now = self.drive.next_due().min(self.now + 100_000);
            self.drive.set_now(self.now);
        }
    }

    fn create_queue(&mut self, sq: Option<Buffer>) {
        let pair = self.pair(1, sq);
        let sized = |opcode, pair: &Buffer, dword| {
            let mut sqe = sqe(opcode, NsId::NONE, [pair.pages[0], 0]);
            sqe.set_dword(10, 1 | (ENTRIES - 1) << 16);
            sqe.set_dword(11, dword);
            sqe
        };
        let cq = sized(Opcode::CREATE_COMPLETION_QUEUE, &pair.cq, 1);
        assert_eq!(self.run(0, cq), (Status::SUCCESS, 0));
        let sq = sized(Opcode::CREATE_SUBMISSION_QUEUE, &pair.sq, 1 | 1 << 16);
        assert_eq!(self.run(0, sq), (Status::SUCCESS, 0));
        self.pairs.push(pair);
    }

    fn submit(&mut self, queue: usize, mut sqe: Sqe) {
        self.cid += 1;
        sqe.set_cid(Cid(self.cid));
        self.submit_as_it_is(queue, &sqe);
    }

    fn submit_as_it_is(&mut self, queue: usize, sqe: &Sqe) {
        let pair = &mut self.pairs[queue];
        let at = pair.sq.offset + u64::from(pair.tail) * 64;
        pair.sq.memory.write(at, sqe.as_bytes()).unwrap();
        pair.tail = (pair.tail + 1) % ENTRIES;
        self.drive
            .write_u32(Register::tail_doorbell(pair.id, 4).0, pair.tail);
    }

    fn poll(&mut self, queue: usize) -> Option<(Cqe, u16)> {
        let pair = &mut self.pairs[queue];
        let mut bytes = [0; 16];
        pair.cq
            .memory
            .read(u64::from(pair.head) * 16, &mut bytes)
            .unwrap();
        if (bytes[14] & 1 != 0) != pair.phase {
            return None;
        }
        pair.head = (pair.head + 1) % ENTRIES;
        pair.phase ^= pair.head == 0;
        self.drive
            .write_u32(Register::head_doorbell(pair.id, 4).0, pair.head);
        Some((
            Cqe::parse(&bytes).unwrap(),
            u16::from_le_bytes([bytes[10], bytes[11]]),
        ))
    }

    fn wait(&mut self, queue: usize) -> (Cqe, u16) {
        for _ in 0..STEPS_MAX {
            if let Some(cqe) = self.poll(queue) {
                return cqe;
            }
            self.step();
        }
        panic!("no completion: {:?}", self.drive.violation());
    }

    fn run(&mut self, queue: usize, sqe: Sqe) -> (Status, u64) {
        self.submit(queue, sqe);
        let (cqe, sq) = self.wait(queue);
        assert_eq!((cqe.cid, usize::from(sq)), (Cid(self.cid), queue));
        (cqe.status, cqe.result)
    }

    /// Returns a command with blocks at the beginning of pages.
    fn rw(&mut self, opcode: Opcode, slba: u64, blocks: u32, pages: &[u64]) -> Sqe {
        let prps = match pages {
            [] => [0, 0],
            [one] => [*one, 0],
            [one, two] => [*one, *two],
            [first, rest @ ..] => {
                let list = self.buffer(rest.len() * 8);
                let bytes: Vec<u8> = rest.iter().flat_map(|page| page.to_le_bytes()).collect();
                list.write(&bytes);
                let at = list.pages[0];
                self.lists.push(list);
                [*first, at]
            }
        };
        let mut sqe = sqe(opcode, NsId(1), prps);
        let rw = Rw {
            slba,
            blocks,
            fua: false,
        };
        rw.emit(&mut sqe);
        sqe
    }

    fn check(&self) {
        assert_eq!(self.drive.violation(), None);
    }
}

use rdmux_wire::nvme::Cid;

fn sqe(opcode: Opcode, nsid: NsId, prps: [u64; 2]) -> Sqe {
    Sqe::in_memory(opcode, Cid(0), nsid, prps)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ seed).collect()
}

#[test]
fn drive__tells_what_it_is() {
    let mut host = Host::new(Shape::default(), 1024, 1);
    let capabilities = PcieCapabilities::parse(host.drive.read_u64(0));
    assert!(capabilities.cmb && capabilities.pmr && capabilities.nvm);
    assert_eq!(host.drive.read_u32(Register::VERSION.0), 0x1_0400);
    host.start();
    let buffer = host.buffer(4096);
    let mut identify = sqe(Opcode::IDENTIFY, NsId::NONE, [buffer.pages[0], 0]);
    identify.set_dword(10, 1);
    assert_eq!(host.run(0, identify), (Status::SUCCESS, 0));
    let controller = DriveController::parse(&buffer.read(4096)).unwrap();
    assert!(controller.has_usual_entries() && controller.has_write_cache);
    let identify = sqe(Opcode::IDENTIFY, NsId(1), [buffer.pages[0], 0]);
    assert_eq!(host.run(0, identify), (Status::SUCCESS, 0));
    let namespace = IdentifyNamespace::parse(&buffer.read(4096)).unwrap();
    assert_eq!((namespace.blocks, namespace.block_shift), (1024, 9));
    let mut queues = sqe(Opcode::SET_FEATURES, NsId::NONE, [0; 2]);
    queues.set_dword(10, 7);
    assert_eq!(host.run(0, queues), (Status::SUCCESS, 7 | 7 << 16));
    host.check();
}

#[test]
fn data__come_back_through_lists_of_pages() {
    for seed in 0..20 {
        let mut host = Host::started(seed);
        let (from, to) = (host.buffer(10 * 4096), host.buffer(10 * 4096));
        let bytes = pattern(10 * 4096, seed as u8);
        from.write(&bytes);
        let write = host.rw(Opcode::WRITE, 8, 79, &from.pages);
        assert_eq!(host.run(1, write).0, Status::SUCCESS);
        let read = host.rw(Opcode::READ, 8, 79, &to.pages);
        assert_eq!(host.run(1, read).0, Status::SUCCESS);
        assert_eq!(to.read(79 * 512), &bytes[..79 * 512], "seed {seed}");
        let zeroes = host.rw(Opcode::WRITE_ZEROES, 9, 3, &[]);
        assert_eq!(host.run(1, zeroes).0, Status::SUCCESS);
        let read = host.rw(Opcode::READ, 8, 8, &to.pages[..1]);
        assert_eq!(host.run(1, read).0, Status::SUCCESS);
        assert_eq!(to.read(512), &bytes[..512]);
        assert!(to.read(4 * 512)[512..].iter().all(|byte| *byte == 0));
        let beyond = host.rw(Opcode::READ, 1024, 1, &to.pages[..1]);
        assert!(host.run(1, beyond).0.is(Status::LBA_OUT_OF_RANGE));
        host.check();
    }
}

/// Counts by hand what a write of three pages and its completion move.
#[test]
fn entries__are_what_a_write_moves() {
    let mut host = Host::started(3);
    let buffer = host.buffer(3 * 4096);
    let write = host.rw(Opcode::WRITE, 0, 24, &buffer.pages);
    let before = host.drive.entries();
    assert_eq!(host.run(1, write).0, Status::SUCCESS);
    let moved = host.drive.entries() - before;
    for link in [Link::RootDrive, Link::RootDram] {
        assert_eq!(moved.get(link, Class::Data), 3 * 4096);
        assert_eq!(moved.get(link, Class::Command), 64 + 2 * 8);
        assert_eq!(moved.get(link, Class::Completion), 16);
    }
    assert_eq!(moved.get(Link::RootDrive, Class::Doorbell), 8);
    assert_eq!(moved.of_link(Link::NicDrive) + moved.of_link(Link::Wire), 0);
}

/// Returns the CMB as a buffer, by the scheme of version 1.4.
fn cmb(host: &Host) -> Buffer {
    let drive = &host.drive;
    assert_eq!(drive.read_u32(Register::CMB_SIZE.0), 0, "nobody has asked for it");
    drive.write_u64(Register::CMB_CONTROL.0, CmbControl::REGISTERS);
    let (location, size) = (
        drive.read_u32(Register::CMB_LOCATION.0),
        drive.read_u32(Register::CMB_SIZE.0),
    );
    let layout = CmbLayout::parse(location, size).unwrap();
    let bar = drive.bar(layout.bar).unwrap();
    let address = bar.address + layout.offset;
    drive.write_u64(Register::CMB_CONTROL.0, CmbControl::at(address).0);
    Buffer {
        memory: bar.memory,
        offset: layout.offset,
        pages: (0..layout.bytes / PAGE)
            .map(|page| address + page * PAGE)
            .collect(),
    }
}

#[test]
fn cmb__takes_data_that_touch_no_dram() {
    for offset in [0, 65536] {
        let mut shape = Shape::default();
        shape.cmb.as_mut().unwrap().layout.offset = offset;
        let mut host = Host::new(shape, 1024, 5);
        let cmb = cmb(&host);
        host.start();
        host.create_queue(None);
        let bytes = pattern(2 * 4096, 9);
        let before = host.drive.entries();
        host.drive.clone().as_nic(|| cmb.write(&bytes));
        let write = host.rw(Opcode::WRITE, 0, 16, &cmb.pages[..2]);
        assert_eq!(host.run(1, write).0, Status::SUCCESS);
        let moved = host.drive.entries() - before;
        assert_eq!(moved.get(Link::RootDram, Class::Data), 0);
        assert_eq!(moved.get(Link::RootDrive, Class::Data), 0);
        assert_eq!(moved.get(Link::NicDrive, Class::Data), 2 * 4096);
        let buffer = host.buffer(2 * 4096);
        let read = host.rw(Opcode::READ, 0, 16, &buffer.pages);
        assert_eq!(host.run(1, read).0, Status::SUCCESS);
        assert_eq!(buffer.read(2 * 4096), bytes);
        // One command does not mix memories: as QEMU's drive answers.
        let mixed = host.rw(Opcode::READ, 0, 16, &[buffer.pages[0], cmb.pages[0]]);
        assert_eq!(host.run(1, mixed).0, Status(0x4012));
        host.check();
    }
}

#[test]
fn cmb__is_there_at_once_by_the_old_scheme_and_may_refuse_a_direction() {
    let mut shape = Shape::default();
    let cmb = shape.cmb.as_mut().unwrap();
    cmb.is_legacy = true;
    cmb.layout.writes = false;
    let mut host = Host::new(shape, 1024, 5);
    assert!(!PcieCapabilities::parse(host.drive.read_u64(0)).cmb);
    assert_ne!(host.drive.read_u32(Register::CMB_SIZE.0), 0);
    let bar = host.drive.bar(2).unwrap();
    host.start();
    // Its submission queue lies there, too.
    host.create_queue(Some(Buffer {
        memory: bar.memory.clone(),
        offset: 8192,
        pages: vec![bar.address + 8192],
    }));
    let before = host.drive.entries();
    let read = host.rw(Opcode::READ, 0, 8, &[bar.address]);
    assert_eq!(host.run(1, read).0, Status::SUCCESS);
    let moved = host.drive.entries() - before;
    assert_eq!(moved.get(Link::RootDrive, Class::Command), 64, "by the processor");
    assert_eq!(moved.get(Link::RootDram, Class::Command), 0);
    let write = host.rw(Opcode::WRITE, 0, 8, &[bar.address]);
    assert_eq!(host.run(1, write).0, Status(0x4012));
    assert_eq!(host.drive.counts().queues_in_drive, 1);
    host.check();
}

#[test]
fn pmr__takes_data_and_outlasts_a_power_cut() {
    let pmr = Arc::new(HeapMemory::new(1 << 20));
    let drive = Drive::with_pmr(Shape::default(), Bytes::new(64), pmr.clone(), 1);
    let mut host = Host::of(drive);
    host.drive.write_u32(Register::PMR_CONTROL.0, PMR_ENABLE);
    host.until(|drive| drive.read_u32(Register::PMR_STATUS.0) == 0);
    let bar = host.drive.bar(4).unwrap();
    host.drive
        .write_u32(Register::PMR_CONTROL_HIGH.0, (bar.address >> 32) as u32);
    host.drive
        .write_u32(Register::PMR_CONTROL_LOW.0, bar.address as u32 | PMR_SPACE);
    host.start();
    host.create_queue(None);
    let bytes = pattern(4096, 3);
    bar.memory.write(8192, &bytes).unwrap();
    let write = host.rw(Opcode::WRITE, 0, 8, &[bar.address + 8192]);
    assert_eq!(host.run(1, write).0, Status::SUCCESS);
    let read = host.rw(Opcode::READ, 0, 8, &[bar.address]);
    assert_eq!(host.run(1, read).0, Status::SUCCESS);
    host.check();
    let mut after = vec![0; 4096];
    pmr.read(0, &mut after).unwrap();
    assert_eq!(after, bytes);
}

/// A host that takes a command for ended, and gives its buffer to another one, while the drive has it.
#[test]
fn buffer__used_again_too_soon_is_found() {
    let mut host = Host::started(2);
    let buffer = host.buffer(4096);
    let page = buffer.pages[0];
    host.drive.lend(page);
    let read = host.rw(Opcode::READ, 0, 8, &[page]);
    host.submit(1, read);
    while host.drive.counts().commands < 3 {
        host.step();
    }
    host.check();
    host.drive.take_back(page);
    host.drive.lend(page);
    while host.poll(1).is_none() {
        host.step();
    }
    let violation = host.drive.violation().unwrap();
    assert!(
        violation.starts_with("a buffer is used again too soon"),
        "{violation}"
    );
}

#[test]
fn buffer__dropped_too_soon_is_found() {
    let mut host = Host::started(2);
    let buffer = host.buffer(4096);
    let read = host.rw(Opcode::READ, 0, 8, &buffer.pages);
    host.submit(1, read);
    drop(buffer);
    assert!(host.wait(1).0.status.is(Status::DATA_TRANSFER_ERROR));
    let violation = host.drive.violation().unwrap();
    assert!(violation.contains("where no memory is"), "{violation}");
}

#[test]
fn command_id__of_two_commands_is_found() {
    let mut host = Host::started(4);
    let buffer = host.buffer(4096);
    let read = host.rw(Opcode::READ, 0, 8, &buffer.pages);
    host.submit_as_it_is(1, &read);
    host.submit_as_it_is(1, &read);
    host.drive.set_faults(Faults {
        never: 1,
        ..Faults::default()
    });
    while host.drive.step() {}
    assert!(host.drive.violation().unwrap().contains("second command with id"));
}

#[test]
fn doorbell__beyond_the_queue_is_found_and_reported() {
    let mut host = Host::started(4);
    host.submit(0, sqe(Opcode::ASYNC_EVENT_REQUEST, NsId::NONE, [0; 2]));
    for _ in 0..100 {
        host.step();
    }
    assert!(host.poll(0).is_none(), "nothing has happened");
    host.drive.write_u32(Register::tail_doorbell(1, 4).0, ENTRIES);
    assert_eq!(host.wait(0).0.result, 1 << 8);
    assert!(host.drive.violation().unwrap().contains("doorbell"));
}

#[test]
fn abort__ends_a_command_that_hangs() {
    let is_aborted = |seed| {
        let mut host = Host::started(seed);
        let buffer = host.buffer(4096);
        host.drive.set_faults(Faults {
            never: 1,
            ..Faults::default()
        });
        let read = host.rw(Opcode::READ, 0, 8, &buffer.pages);
        host.submit(1, read);
        let cid = host.cid;
        while host.drive.step() {}
        host.drive.set_faults(Faults::default());
        let mut abort = sqe(Opcode::ABORT, NsId::NONE, [0; 2]);
        abort.set_dword(10, 1 | u32::from(cid) << 16);
        let (status, result) = host.run(0, abort);
        assert_eq!(status, Status::SUCCESS);
        if result == 0 {
            let (cqe, _) = host.wait(1);
            assert_eq!((cqe.cid, cqe.status), (Cid(cid), Status::ABORT_REQUESTED));
        }
        host.check();
        result == 0
    };
    let aborted = (0..20).filter(|seed| is_aborted(*seed)).count();
    assert!((1..20).contains(&aborted), "{aborted} of 20 aborts did something");
}

#[test]
fn failure__lasts_until_a_reset() {
    let mut host = Host::started(6);
    let buffer = host.buffer(4096);
    host.drive.fail();
    let read = host.rw(Opcode::READ, 0, 8, &buffer.pages);
    host.submit(1, read);
    (0..100).for_each(|_| host.step());
    assert!(host.poll(1).is_none());
    assert!(ControllerStatus(host.drive.read_u32(Register::STATUS.0)).is_fatal());
    host.drive.write_u32(Register::CONFIGURATION.0, 0);
    host.until(|drive| drive.read_u32(Register::STATUS.0) == 0);
    host.pairs.clear();
    host.start();
    host.create_queue(None);
    let read = host.rw(Opcode::READ, 0, 8, &buffer.pages);
    assert_eq!(host.run(1, read).0, Status::SUCCESS);
    host.check();
}

#[test]
fn vanished__reads_as_ones_and_accesses_nothing() {
    let mut host = Host::started(7);
    let buffer = host.buffer(4096);
    let read = host.rw(Opcode::READ, 0, 8, &buffer.pages);
    host.submit(1, read);
    let bar = host.drive.bar(2).unwrap();
    host.drive.vanish();
    drop(buffer);
    assert!(!host.drive.step());
    assert_eq!(host.drive.read_u32(Register::STATUS.0), u32::MAX);
    assert_eq!(host.drive.read_u64(0), u64::MAX);
    let mut bytes = [0; 8];
    bar.memory.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0xff; 8]);
    host.check();
}

#[test]
fn completion__of_a_hostile_drive_is_wrong() {
    let mut host = Host::started(8);
    let buffer = host.buffer(4096);
    host.drive.set_faults(Faults {
        hostile: 1,
        ..Faults::default()
    });
    for _ in 0..12 {
        let read = host.rw(Opcode::READ, 0, 8, &buffer.pages);
        host.submit(1, read);
        let (cqe, sq) = host.wait(1);
        let is_right = cqe.cid == Cid(host.cid) && sq == 1 && u32::from(cqe.sq_head) < ENTRIES;
        assert!(!is_right, "{cqe:?} of queue {sq}");
    }
}

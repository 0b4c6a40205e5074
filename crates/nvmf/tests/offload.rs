//! The offload engine: reads, writes and flushes of NVMe/RDMA by a queue pair of a drive, which is the model of the simulation.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod peered;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rdmux_drive::MemoryKind;
use rdmux_nvmf::backend::Backend;
use rdmux_nvmf::backend::drive::{DriveBackend, DriveSettings};
use rdmux_nvmf::backend::offload::OffloadCounter;
use rdmux_nvmf::backend::peer::PeerToPeer;
use rdmux_nvmf::host::command;
use rdmux_nvmf::host::{Options, Session, Transport};
use rdmux_nvmf::server::{Listen, OFFLOAD_THREAD};
use rdmux_nvmf::target::Listener;
use rdmux_sim::drive::{Bytes, Faults, Media};
use rdmux_verbs::ledger::{Class, Link};
use rdmux_wire::nvme::{Cid, NsId, Opcode, Rw, Sqe, Status, TransportKind};

use peered::*;

fn offloaded(buffers: MemoryKind) -> DriveSettings {
    DriveSettings {
        buffers,
        offload: true,
        ..DriveSettings::default()
    }
}

fn target(buffers: MemoryKind) -> Peered {
    Peered::with_settings(Bytes::new(64 << 10), offloaded(buffers), |backend| backend)
}

fn counter(target: &Peered, counter: OffloadCounter) -> u64 {
    target.backend.offload().unwrap().get(counter)
}

#[test]
fn data__go_by_static_memory_and_no_processor_copies_them() {
    for kind in [MemoryKind::Dram, MemoryKind::Cmb, MemoryKind::Pmr] {
        let settings = DriveSettings {
            p2p: PeerToPeer::Require,
            ..offloaded(kind)
        };
        let target = Peered::with_settings(Bytes::new(64 << 10), settings, |backend| backend);
        let session = target.server.session(&device(), 1);
        let mut queue = session.queue(1, 16).unwrap();
        let before = target.entries();
        // The model tells the RNIC's accesses from the processor's only by this.
        let bytes = target.drive.as_nic(|| write_and_read(&mut queue, 3));
        let after = target.entries();
        let (booked, drive) = (after.0 - before.0, after.1 - before.1);
        // The write of one block comes in its capsule, but where the drive's own memory takes the data.
        let in_capsule = if kind == MemoryKind::Dram {
            u64::from(BLOCK)
        } else {
            0
        };
        let moved = 2 * bytes - in_capsule;
        let expected = match kind {
            // Of both directions, once by the RNIC and once by the drive.
            MemoryKind::Dram => [moved, moved + 2 * bytes, 2 * bytes, 0],
            _ => [0, 0, 0, 2 * bytes],
        };
        let links = [Link::NicRoot, Link::RootDram, Link::RootDrive, Link::NicDrive];
        assert_eq!(
            links.map(|link| booked.get(link, Class::Data)),
            expected,
            "{kind}"
        );
        let of_drive = drive.get(Link::RootDrive, Class::Data);
        assert_eq!(of_drive, expected[2], "{kind}");
        let blocks = bytes / 512;
        for (name, value) in [
            (OffloadCounter::NumReadCmd, 7),
            (OffloadCounter::NumReadBlocks, blocks),
            (OffloadCounter::NumWriteCmd, 7),
            (OffloadCounter::NumWriteBlocks, blocks),
            (OffloadCounter::NumWriteInlineCmd, u64::from(in_capsule > 0)),
            (OffloadCounter::NumFlushCmd, 0),
            (OffloadCounter::NumErrorCmd, 0),
            (OffloadCounter::NumBackendErrorCmd, 0),
            (OffloadCounter::QueueDepth, 0),
        ] {
            assert_eq!(counter(&target, name), value, "{}, {kind}", name.name());
        }
        drop(queue);
        target.wait_until_free();
    }
}

#[test]
fn commands__of_other_kinds_are_the_software_targets() {
    let target = target(MemoryKind::Cmb);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    let data = vec![5; 4 * BLOCK as usize];
    let write = rw(Opcode::WRITE, 1, 0, 4);
    assert_eq!(io.run(write, &data, 4 * BLOCK).0.status, Status::SUCCESS);
    assert_eq!(
        io.run(rw(Opcode::COMPARE, 2, 0, 4), &data, 4 * BLOCK).0.status,
        Status::SUCCESS
    );
    assert_eq!(
        io.run(rw(Opcode::COMPARE, 3, 1, 4), &data, 4 * BLOCK).0.status,
        Status::COMPARE_FAILURE.do_not_retry()
    );
    for sqe in [
        rw(Opcode::WRITE_ZEROES, 4, 0, 2),
        Sqe::new(Opcode::FLUSH, Cid(5), NsId(1)),
    ] {
        assert_eq!(io.run(sqe, &[], 0).0.status, Status::SUCCESS);
    }
    let (_, read) = io.run(rw(Opcode::READ, 6, 0, 4), &[], 4 * BLOCK);
    assert_eq!((read[0], read[2 * BLOCK as usize]), (0, 5));
    let counted = [
        OffloadCounter::NumReadCmd,
        OffloadCounter::NumWriteCmd,
        OffloadCounter::NumFlushCmd,
        OffloadCounter::NumErrorCmd,
    ];
    assert_eq!(counted.map(|name| counter(&target, name)), [1, 1, 1, 0]);
}

#[test]
fn hosts__by_tcp_and_rdma_see_the_same_blocks() {
    let target = target(MemoryKind::Dram);
    let listener = Listener {
        transport: TransportKind::Tcp,
        address: "127.0.0.1:0".parse().unwrap(),
    };
    let tcp = target.server.handle.listen(Listen::from(listener)).unwrap();
    let options = Options {
        transport: Transport::Tcp,
        ..Options::new(vec![tcp.address], nqn(SUBSYSTEM))
    };
    let by_tcp = Session::connect(options, 1).unwrap();
    let by_rdma = target.server.session(&device(), 1);
    let mut queues = [by_tcp.queue(1, 16).unwrap(), by_rdma.queue(1, 16).unwrap()];
    for round in 0..20u8 {
        let (writer, reader) = (usize::from(round % 2), usize::from(1 - round % 2));
        let data = vec![round; BLOCK as usize];
        run_all(
            &mut queues[writer],
            [command::write(NsId(1), 7, 1, BLOCK, data.clone())],
        );
        let read = command::read(NsId(1), 7, 1, BLOCK, vec![0; BLOCK as usize]);
        assert_eq!(run_all(&mut queues[reader], [read])[0].bytes(), data);
    }
    // The others went by the threads of the media.
    let counted = [OffloadCounter::NumReadCmd, OffloadCounter::NumWriteCmd];
    assert_eq!(counted.map(|name| counter(&target, name)), [10, 10]);
}

#[test]
fn commands__beyond_the_drives_queue_pair_wait_in_their_order() {
    let target = target(MemoryKind::Dram);
    let session = target.server.session(&device(), 2);
    let mut queues = [session.queue(1, 100).unwrap(), session.queue(2, 100).unwrap()];
    // Each queue has more commands at a time than the drive's takes, and both have them at once.
    for round in 0..5u64 {
        let slbas = |number: u64| (0..100).map(move |at| (round * 100 + at) * 2 + number);
        let write = |slba| command::write(NsId(1), slba, 1, BLOCK, vec![slba as u8; BLOCK as usize]);
        slbas(0).map(write).for_each(|write| queues[0].submit(write));
        run_all(&mut queues[1], slbas(1).map(write));
        run_all(&mut queues[0], []);
    }
    let read = |slba| command::read(NsId(1), slba, 1, BLOCK, vec![0; BLOCK as usize]);
    for first in (0..1000).step_by(100) {
        for (slba, done) in (first..).zip(run_all(&mut queues[0], (first..first + 100).map(read))) {
            assert_eq!(done.bytes(), vec![slba as u8; BLOCK as usize]);
        }
    }
    assert_eq!(counter(&target, OffloadCounter::NumErrorCmd), 0);
    assert_eq!(counter(&target, OffloadCounter::QueueDepth), 0);
}

#[test]
fn commands__that_the_drive_fails_are_tried_by_the_software_target() {
    let target = target(MemoryKind::Cmb);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    target.drive.set_faults(Faults {
        fails: 2,
        ..Faults::default()
    });
    let (mut done, mut failed) = (0, 0);
    for cid in 0..200 {
        let (cqe, _) = io.run(rw(Opcode::READ, cid, 0, 2), &[], 2 * BLOCK);
        match cqe.status.is_success() {
            true => done += 1,
            false => failed += 1,
        }
    }
    let errors = counter(&target, OffloadCounter::NumBackendErrorCmd);
    assert_eq!(counter(&target, OffloadCounter::NumErrorCmd), errors);
    assert!(
        errors > failed,
        "{errors} errors of the engine, {failed} of the host"
    );
    assert!(
        done > counter(&target, OffloadCounter::NumReadCmd),
        "some went by the software target"
    );
}

#[test]
fn drive__that_is_reset_loses_no_command_of_a_host() {
    let target = target(MemoryKind::Dram);
    let session = target.server.session(&device(), 1);
    let mut queue = session.queue(1, 64).unwrap();
    for round in 0..5u8 {
        let write = |slba: u64| command::write(NsId(1), slba, 1, BLOCK, vec![round; BLOCK as usize]);
        if round > 0 {
            target.drive.fail();
        }
        run_all(&mut queue, (0..40).map(write));
        write_and_read(&mut queue, round);
    }
}

#[test]
fn drive__that_is_pulled_fails_commands_and_keeps_no_connection() {
    let target = target(MemoryKind::Cmb);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    for cid in 0..8 {
        let write = rw(Opcode::WRITE, cid, u64::from(cid) * 16, 16);
        io.command(write, &[1; 64 << 10], 64 << 10);
    }
    target.drive.vanish();
    for cid in 0..8 {
        io.completion(Cid(cid));
    }
    let (cqe, _) = io.run(rw(Opcode::READ, 9, 0, 1), &[], BLOCK);
    assert_eq!(cqe.status, Status::NAMESPACE_NOT_READY.do_not_retry());
    assert_eq!(counter(&target, OffloadCounter::NumReadCmd), 0);
}

#[test]
fn room__of_a_full_memory_is_not_needed_if_only_preferred() {
    let target = target(MemoryKind::Dram);
    let session = target.server.session(&device(), 1);
    let mut queue = session.queue(1, 16).unwrap();
    let all = target.take_all();
    write_and_read(&mut queue, 7);
    let peers = target.backend.peers();
    // The write that has come in its capsule needs no memory of a host's queue pair.
    assert_eq!((peers.direct(), peers.copied()), (0, 13));
    drop(all);
    write_and_read(&mut queue, 9);
    assert!(peers.direct() > 0);
}

#[test]
fn capsules__have_no_data_where_the_drives_memory_is_required() {
    let settings = DriveSettings {
        p2p: PeerToPeer::Require,
        ..offloaded(MemoryKind::Cmb)
    };
    let target = Peered::with_settings(Bytes::new(64 << 10), settings, |backend| backend);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    io.in_capsule(rw(Opcode::WRITE, 4, 0, 1), &[8; BLOCK as usize]);
    assert_eq!(
        io.completion(Cid(4)).status,
        Status::SGL_TYPE_INVALID.do_not_retry()
    );
}

#[test]
fn namespace__that_is_removed_leaves_its_drive_with_its_last_command() {
    let target = target(MemoryKind::Dram);
    let session = target.server.session(&device(), 1);
    let mut queue = session.queue(1, 16).unwrap();
    write_and_read(&mut queue, 1);
    target.server.subsystem.remove_namespace(NsId(1)).unwrap();
    target.server.handle.tell_of_change();
    let deadline = std::time::Instant::now() + LONG;
    while Arc::strong_count(&target.backend) > 1 {
        assert!(std::time::Instant::now() < deadline, "somebody has the drive");
        std::thread::yield_now();
    }
}

/// A drive with which the engine panics, once it is to.
#[derive(Debug)]
struct Panicking {
    drive: Arc<DriveBackend>,
    panics: AtomicBool,
}

impl Backend for Panicking {
    fn bytes(&self) -> u64 {
        self.drive.bytes()
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn peer(&self) -> Option<&DriveBackend> {
        self.drive.peer()
    }

    fn has_write_cache(&self) -> bool {
        let is_engine = std::thread::current().name() == Some(OFFLOAD_THREAD);
        assert!(
            !is_engine || !self.panics.load(Ordering::Relaxed),
            "a deliberate panic"
        );
        self.drive.has_write_cache()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        self.drive.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        self.drive.write(offset, bytes)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status> {
        self.drive.write_zeroes(offset, length)
    }

    fn flush(&self) -> Result<(), Status> {
        self.drive.flush()
    }
}

#[test]
fn engine__that_panics_ends_its_commands_once_the_drive_has_none_and_all_others_go_on() {
    let mut made = None;
    let mut target = Peered::with_settings(Bytes::new(64 << 10), offloaded(MemoryKind::Dram), |drive| {
        let panicking = Arc::new(Panicking {
            drive,
            panics: AtomicBool::new(false),
        });
        made = Some(panicking.clone());
        panicking
    });
    let panicking = made.unwrap();
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    let write = |cid, slba| rw(Opcode::WRITE, cid, slba, 2);
    let data = |byte: u8| vec![byte; 2 * BLOCK as usize];
    assert_eq!(io.run(write(1, 0), &data(1), 2 * BLOCK).0.status, Status::SUCCESS);
    // The drive stands still with a command of the engine.
    let began = target.mover.take().map(Mover::stop).unwrap();
    io.command(write(2, 0), &data(2), 2 * BLOCK);
    while counter(&target, OffloadCounter::QueueDepth) == 0 {
        std::thread::yield_now();
    }
    panicking.panics.store(true, Ordering::Relaxed);
    io.command(write(3, 2), &data(3), 2 * BLOCK);
    // Admin commands, and those of other queues, go on meanwhile.
    let (_other, _) = target.server.admin(&device);
    let depth = || counter(&target, OffloadCounter::QueueDepth);
    assert_eq!(depth(), 1, "the drive has it still");
    target.mover = Some(Mover::new(&target.drive, began));
    for cid in [2, 3] {
        let status = io.completion(Cid(cid)).status;
        assert_eq!(status, Status::INTERNAL_ERROR);
        assert!(!status.is_final(), "the host tries again");
    }
    assert_eq!(counter(&target, OffloadCounter::NumErrorCmd), 2);
    assert_eq!(counter(&target, OffloadCounter::QueueDepth), 0);
    // From now on the software target has them.
    for cid in [2, 3] {
        let slba = u64::from(cid - 2) * 2;
        assert_eq!(
            io.run(write(cid, slba), &data(cid as u8), 2 * BLOCK).0.status,
            Status::SUCCESS
        );
        let (cqe, read) = io.run(rw(Opcode::READ, cid, slba, 2), &[], 2 * BLOCK);
        assert_eq!((cqe.status, read), (Status::SUCCESS, data(cid as u8)));
    }
    assert_eq!(counter(&target, OffloadCounter::NumWriteCmd), 1);
    drop(io);
    target.wait_until_free();
}

/// Media that count flushes.
#[derive(Debug, Default)]
struct Flushed(AtomicU64);

impl Flushed {
    fn flushes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Media for Flushed {
    fn block_shift(&self) -> u8 {
        12
    }

    fn blocks(&self) -> u64 {
        1 << 10
    }

    fn read(&self, _: u64, out: &mut [u8]) {
        out.fill(0);
    }

    fn write(&self, _: u64, _: &[u8], _: bool) {}

    fn tear(&self, _: u64, _: &[u8]) {}

    fn flush(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn fua__is_durable_when_the_write_is_done() {
    let media = Arc::new(Flushed::default());
    let target = Peered::with_settings(media.clone(), offloaded(MemoryKind::Dram), |backend| backend);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    for (cid, fua) in [(1, false), (2, true), (3, true)] {
        let before = media.flushes();
        let mut write = Sqe::new(Opcode::WRITE, Cid(cid), NsId(1));
        let blocks = 2;
        Rw { slba: 0, blocks, fua }.emit(&mut write);
        let (cqe, _) = io.run(write, &[cid as u8; 2 * BLOCK as usize], 2 * BLOCK);
        assert_eq!(cqe.status, Status::SUCCESS);
        assert_eq!(media.flushes() - before, u64::from(fua));
    }
}

//! The offload engine: reads, writes and flushes of NVMe/RDMA by a queue pair of a drive, which is the model of the simulation.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod peered;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{OsRng, RngCore, SeedableRng, TryRngCore};
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

/// Has the drive stand still. Returns the begin of its time, with which another mover goes on.
fn stop_drive(target: &Peered) -> Instant {
    target.mover.take().map(Mover::stop).unwrap()
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
        let opcode = if cid % 2 == 0 { Opcode::READ } else { Opcode::WRITE };
        let (cqe, _) = io.run(rw(opcode, cid, 0, 2), &[5; 2 * BLOCK as usize], 2 * BLOCK);
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
fn drive__that_is_reset_fails_commands_for_now() {
    let target = target(MemoryKind::Dram);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    let data = |round: u16| vec![round as u8; BLOCK as usize];
    let mut repeated = 0;
    for round in 1..6 {
        // The drive stands still with commands, of which some are the engine's.
        let began = stop_drive(&target);
        (0..8).for_each(|cid| io.command(rw(Opcode::WRITE, cid, cid.into(), 1), &data(round), BLOCK));
        target.drive.fail();
        *target.mover.borrow_mut() = Some(Mover::new(&target.drive, began));
        for cid in 0..8 {
            let mut status = io.completion(Cid(cid)).status;
            while status == Status::INTERNAL_ERROR {
                repeated += 1;
                status = io
                    .run(rw(Opcode::WRITE, cid, cid.into(), 1), &data(round), BLOCK)
                    .0
                    .status;
            }
            assert_eq!(status, Status::SUCCESS);
        }
        for cid in 0..8 {
            let (cqe, read) = io.run(rw(Opcode::READ, cid, cid.into(), 1), &[], BLOCK);
            assert_eq!((cqe.status, read), (Status::SUCCESS, data(round)));
        }
    }
    assert!(repeated > 0);
}

#[test]
fn flush__that_fails_is_final_for_those_that_wait_and_come() {
    let target = target(MemoryKind::Dram);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    let data = [7; BLOCK as usize];
    let write = |cid| rw(Opcode::WRITE, cid, 0, 1);
    assert_eq!(io.run(write(1), &data, BLOCK).0.status, Status::SUCCESS);
    let began = stop_drive(&target);
    for cid in [2, 3] {
        io.command(Sqe::new(Opcode::FLUSH, Cid(cid), NsId(1)), &[], 0);
    }
    wait_for(|| counter(&target, OffloadCounter::QueueDepth) == 2);
    // The drive fails the one that it has, and would carry out the other.
    let fails = |fails| Faults {
        fails,
        ..Faults::default()
    };
    target.drive.set_faults(fails(1));
    *target.mover.borrow_mut() = Some(Mover::new(&target.drive, began));
    let lost = Status::WRITE_FAULT.do_not_retry();
    assert_eq!([2, 3].map(|cid| io.completion(Cid(cid)).status), [lost; 2]);
    target.drive.set_faults(fails(0));
    assert_eq!(io.run(write(4), &data, BLOCK).0.status, lost);
    let read = io.run(rw(Opcode::READ, 5, 0, 1), &[], BLOCK);
    assert_eq!((read.0.status, read.1), (Status::SUCCESS, data.to_vec()));
    assert_eq!(counter(&target, OffloadCounter::NumFlushCmd), 0);
}

#[test]
fn buffers__are_free_once_a_dead_queue_pair_has_let_go() {
    for kind in [MemoryKind::Dram, MemoryKind::Cmb] {
        let target = target(kind);
        let device = device();
        target.lose_queue_pairs(&device);
        let session = target.server.session(&device, 1);
        write_and_read(&mut session.queue(1, 16).unwrap(), 1);
    }
}

#[test]
fn listener__that_comes_later_is_the_engines_too() {
    let target = target(MemoryKind::Dram);
    let listener = Listener {
        transport: TransportKind::Rdma,
        address: (address(), PORT).into(),
    };
    let handle = &target.server.handle;
    assert_eq!(handle.listen(Listen::from(listener)).unwrap(), listener);
    let settings = Listen {
        in_capsule_bytes: 0,
        ..Listen::from(listener)
    };
    handle.set(handle.prepare(settings).unwrap()).unwrap();
    let options = Options {
        transport: Transport::Rdma,
        ..Options::new(vec![listener.address], nqn(SUBSYSTEM))
    };
    let session = Session::connect(options, 1).unwrap();
    write_and_read(&mut session.queue(1, 16).unwrap(), 1);
    let counted = [OffloadCounter::NumWriteCmd, OffloadCounter::NumWriteInlineCmd];
    assert_eq!(counted.map(|name| counter(&target, name)), [7, 0]);
    assert!(handle.stop_listening(&listener) && !handle.stop_listening(&listener));
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
        let status = io.completion(Cid(cid)).status;
        assert!(
            status.is_success() || status == Status::NAMESPACE_NOT_READY.do_not_retry(),
            "{status}"
        );
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
    assert_eq!((peers.direct(), peers.copied()), (0, 14));
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
    wait_for(|| Arc::strong_count(&target.backend) == 1);
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
    let target = Peered::with_settings(Bytes::new(64 << 10), offloaded(MemoryKind::Dram), |drive| {
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
    let began = stop_drive(&target);
    io.command(write(2, 0), &data(2), 2 * BLOCK);
    wait_for(|| counter(&target, OffloadCounter::QueueDepth) > 0);
    panicking.panics.store(true, Ordering::Relaxed);
    io.command(write(3, 2), &data(3), 2 * BLOCK);
    // Admin commands, and those of other queues, go on meanwhile.
    let (_other, _) = target.server.admin(&device);
    let depth = || counter(&target, OffloadCounter::QueueDepth);
    assert_eq!(depth(), 1, "the drive has it still");
    *target.mover.borrow_mut() = Some(Mover::new(&target.drive, began));
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

type Blocks = HashMap<u64, Vec<u8>>;

/// Media with stable blocks, and a volatile cache of others.
#[derive(Debug, Default)]
struct Cached(Mutex<(Blocks, Blocks)>);

impl Cached {
    fn cut_power(&self) {
        self.0.lock().unwrap().1.clear();
    }
}

impl Media for Cached {
    fn block_shift(&self) -> u8 {
        12
    }

    fn blocks(&self) -> u64 {
        1 << 10
    }

    fn read(&self, block: u64, out: &mut [u8]) {
        let (stable, cache) = &*self.0.lock().unwrap();
        for (block, out) in (block..).zip(out.chunks_mut(4096)) {
            match cache.get(&block).or(stable.get(&block)) {
                Some(bytes) => out.copy_from_slice(bytes),
                None => out.fill(0),
            }
        }
    }

    fn write(&self, block: u64, bytes: &[u8], _: bool) {
        let (_, cache) = &mut *self.0.lock().unwrap();
        cache.extend((block..).zip(bytes.chunks(4096).map(<[u8]>::to_vec)));
    }

    fn tear(&self, _: u64, _: &[u8]) {}

    fn flush(&self) {
        let (stable, cache) = &mut *self.0.lock().unwrap();
        stable.extend(cache.drain());
    }
}

#[test]
fn power__that_is_cut_loses_nothing_that_was_acknowledged_as_durable() {
    const BLOCKS: u64 = 8;
    let seed = OsRng.try_next_u64().unwrap();
    println!("seed {seed}");
    let mut dice = ChaCha8Rng::seed_from_u64(seed);
    let media = Arc::new(Cached::default());
    let target = Peered::with_settings(media.clone(), offloaded(MemoryKind::Dram), |backend| backend);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    // By block, the values that it may have after a loss of power.
    let mut may_be = vec![BTreeSet::from([0u8]); BLOCKS as usize];
    let mut durable = 0;
    for round in 1..=60u8 {
        let began = stop_drive(&target);
        let mut written = Vec::new();
        for block in 0..BLOCKS {
            let fua = dice.next_u32().is_multiple_of(2);
            let mut write = Sqe::new(Opcode::WRITE, Cid(block as u16), NsId(1));
            let blocks = 1;
            Rw {
                slba: block,
                blocks,
                fua,
            }
            .emit(&mut write);
            io.command(write, &[round; BLOCK as usize], BLOCK);
            written.push(fua);
            may_be[block as usize].insert(round);
        }
        io.command(Sqe::new(Opcode::FLUSH, Cid(BLOCKS as u16), NsId(1)), &[], 0);
        // Some of the commands are carried out before the power is cut.
        let steps = dice.next_u32() % 120;
        for _ in 0..steps {
            target.drive.set_now(began.elapsed().as_nanos() as u64);
            target.drive.step();
            std::thread::yield_now();
        }
        media.cut_power();
        target.drive.fail();
        *target.mover.borrow_mut() = Some(Mover::new(&target.drive, began));
        for (block, fua) in written.into_iter().enumerate() {
            if io.completion(Cid(block as u16)).status.is_success() && fua {
                may_be[block] = BTreeSet::from([round]);
                durable += 1;
            }
        }
        io.completion(Cid(BLOCKS as u16));
        for (block, may_be) in may_be.iter().enumerate() {
            let mut read = || io.run(rw(Opcode::READ, 20, block as u64, 1), &[], BLOCK);
            let data = loop {
                match read() {
                    (cqe, data) if cqe.status.is_success() => break data,
                    // The reset has ended it.
                    (cqe, _) => assert_eq!(cqe.status, Status::INTERNAL_ERROR),
                }
            };
            let whole = data.iter().all(|byte| *byte == data[0]);
            assert!(
                whole && may_be.contains(&data[0]),
                "block {block} has {}, not of {may_be:?}",
                data[0]
            );
        }
    }
    assert!(durable > 0);
}

//! Peer-to-peer: data of NVMe/RDMA go between the queue pair and the memory of a drive, which is the model of the simulation.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod peered;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use rdmux_drive::{Function, MemoryKind};
use rdmux_nvmf::backend::Backend;
use rdmux_nvmf::backend::drive::{DriveBackend, DriveSettings};
use rdmux_nvmf::backend::ending::Endings;
use rdmux_nvmf::backend::peer::PeerToPeer;
use rdmux_sim::drive::{Bytes, Drive, Media, Shape};
use rdmux_verbs::ledger::{Class, Entries, Link};
use rdmux_wire::nvme::{Cid, Opcode, Status};

use peered::*;

#[test]
fn data__of_a_peer_never_cross_the_targets_memory() {
    for kind in [MemoryKind::Cmb, MemoryKind::Pmr] {
        let target = Peered::new(kind, PeerToPeer::Require);
        let session = target.server.session(&device(), 1);
        let mut queue = session.queue(1, 16).unwrap();
        let before = target.entries();
        // The model tells the RNIC's accesses from the processor's only by this: all are booked as the RNIC's, and there are no more than those.
        let bytes = target.drive.as_nic(|| write_and_read(&mut queue, 3));
        let after = target.entries();
        let (booked, drive) = (after.0 - before.0, after.1 - before.1);
        let moved = |entries: &Entries, link| entries.get(link, Class::Data);
        assert_eq!(moved(&booked, Link::Wire), 2 * bytes);
        for entries in [booked, drive] {
            assert_eq!(moved(&entries, Link::NicDrive), 2 * bytes, "{kind}");
            for link in [Link::NicRoot, Link::RootDram, Link::RootDrive] {
                assert_eq!(moved(&entries, link), 0, "{link:?}, {kind}");
            }
        }
        let peers = target.backend.peers();
        assert_eq!((peers.direct(), peers.copied()), (14, 0));
        drop(queue);
        target.wait_until_free();
    }
}

#[test]
fn data__of_others_cross_the_targets_memory_twice() {
    let target = Peered::new(MemoryKind::Dram, PeerToPeer::Off);
    let session = target.server.session(&device(), 1);
    let mut queue = session.queue(1, 16).unwrap();
    let before = target.entries();
    let bytes = write_and_read(&mut queue, 5);
    let after = target.entries();
    let (booked, drive) = (after.0 - before.0, after.1 - before.1);
    let in_dram = [booked, drive].map(|entries| entries.get(Link::RootDram, Class::Data));
    // Data in capsules are commands to the RNIC, data to the drive.
    let in_capsules = u64::from(BLOCK);
    assert_eq!(in_dram, [4 * bytes - in_capsules, 2 * bytes]);
    assert_eq!(booked.get(Link::RootDrive, Class::Data), 2 * bytes);
    assert_eq!(booked.get(Link::NicDrive, Class::Data), 0);
    assert_eq!(target.backend.peers().direct(), 0);
}

#[test]
fn room__of_a_full_drive_is_not_needed_if_only_preferred() {
    let target = Peered::new(MemoryKind::Cmb, PeerToPeer::Prefer);
    let session = target.server.session(&device(), 1);
    let mut queue = session.queue(1, 16).unwrap();
    let all = target.take_all();
    write_and_read(&mut queue, 7);
    let peers = target.backend.peers();
    assert_eq!((peers.direct(), peers.copied()), (0, 14));
    drop(all);
    write_and_read(&mut queue, 9);
    assert!(peers.direct() > 0);
    assert_eq!(peers.direct() + peers.copied(), 28);
}

#[test]
fn room__of_a_full_drive_is_waited_for_if_required() {
    let target = Peered::new(MemoryKind::Cmb, PeerToPeer::Require);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    let all = target.take_all();
    // Time is meant: it waits as long as the target lets it.
    let (cqe, _) = io.run(rw(Opcode::READ, 1, 0, 1), &[], BLOCK);
    assert_eq!(cqe.status, Status::INTERRUPTED);
    assert!(!cqe.status.is_final(), "the host tries again");
    io.command(rw(Opcode::WRITE, 2, 0, 1), &[7; BLOCK as usize], BLOCK);
    drop(all);
    assert_eq!(io.completion(Cid(2)).status, Status::SUCCESS);
    let (cqe, data) = io.run(rw(Opcode::READ, 3, 0, 1), &[], BLOCK);
    assert_eq!((cqe.status, data), (Status::SUCCESS, vec![7; BLOCK as usize]));
    // Its bytes are in the target's memory before the target has seen it.
    io.in_capsule(rw(Opcode::WRITE, 4, 0, 1), &[8; BLOCK as usize]);
    assert_eq!(
        io.completion(Cid(4)).status,
        Status::SGL_TYPE_INVALID.do_not_retry()
    );
    assert_eq!(target.backend.peers().copied(), 0);
}

#[test]
fn buffers__are_free_once_a_dead_queue_pair_has_let_go() {
    let target = Peered::new(MemoryKind::Cmb, PeerToPeer::Require);
    let device = device();
    target.lose_queue_pairs(&device);
    let all = target.take_all();
    let pattern = vec![0xa5; all.bytes()];
    all.write(0, &pattern).unwrap();
    // The end of a session behind it has come by all reactors.
    drop(target.server.session(&device, 2));
    let mut bytes = vec![0; all.bytes()];
    all.read(0, &mut bytes).unwrap();
    assert!(bytes == pattern, "somebody writes to free memory");
    drop(all);
    let session = target.server.session(&device, 1);
    write_and_read(&mut session.queue(1, 16).unwrap(), 1);
}

#[test]
fn drive__that_is_pulled_fails_commands_and_keeps_no_connection() {
    let target = Peered::new(MemoryKind::Cmb, PeerToPeer::Require);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    for cid in 0..8 {
        io.command(
            rw(Opcode::WRITE, cid, u64::from(cid) * 16, 16),
            &[1; 64 << 10],
            64 << 10,
        );
    }
    target.drive.vanish();
    for cid in 0..8 {
        io.completion(Cid(cid));
    }
    let before = target.backend.peers().direct();
    let (cqe, _) = io.run(rw(Opcode::READ, 9, 0, 1), &[], BLOCK);
    assert!(!cqe.status.is_success());
    assert_eq!(target.backend.peers().direct(), before, "it has not run");
}

#[test]
fn drive__that_is_out_of_use_and_keeps_its_memory_fails_commands() {
    let target = Peered::new(MemoryKind::Cmb, PeerToPeer::Off);
    // As the commands of a drive that does not stop.
    let _kept = target.take_all();
    target.drive.vanish();
    let gone = Status::NAMESPACE_NOT_READY.do_not_retry();
    assert_eq!(target.backend.read(0, &mut [0; 4096]), Err(gone));
    assert_eq!(target.backend.write(0, &[0; 4096]), Err(gone));
}

#[test]
fn drive__that_is_out_of_use_and_keeps_its_memory_fails_commands_of_peers() {
    let target = Peered::new(MemoryKind::Cmb, PeerToPeer::Require);
    let device = device();
    let (_admin, cntlid) = target.server.admin(&device);
    let mut io = target.server.io(&device, cntlid, 1);
    // As the commands of a drive that does not stop.
    let _kept = target.take_all();
    target.drive.vanish();
    for (cid, opcode) in [(1, Opcode::READ), (2, Opcode::WRITE)] {
        io.command(rw(opcode, cid, 0, 1), &[1; BLOCK as usize], BLOCK);
        assert_eq!(
            io.completion(Cid(cid)).status,
            Status::NAMESPACE_NOT_READY.do_not_retry()
        );
    }
}

#[test]
fn drive__ends_on_a_thread_of_its_own_and_its_last_user_does_not_wait() {
    let drive = Drive::new(Shape::default(), Bytes::new(64 << 10), 1);
    let began = Instant::now();
    let mover = Mover::new(&drive, began);
    let endings = Arc::new(Endings::default());
    let settings = DriveSettings {
        endings: endings.clone(),
        ..DriveSettings::default()
    };
    let backend = DriveBackend::of_function(drive.clone(), None, settings).unwrap();
    assert_eq!(backend.write(0, &[1; 4096]), Ok(()));
    drop(mover);
    // The drive stands still, and does not shut down.
    drop(backend);
    assert!(!drive.is_shut_down());
    let _mover = Mover::new(&drive, began);
    endings.wait_for("another");
    endings.wait_for(drive.address());
    assert!(drive.is_shut_down(), "a drive that ends is waited for");
    assert_eq!(Arc::strong_count(&drive), 2, "its driver has let it go");
    assert_eq!(drive.violation(), None);
}

/// Media whose blocks somebody else makes smaller.
#[derive(Debug)]
struct Formatted {
    is_formatted: AtomicBool,
    written: AtomicU64,
}

impl Media for Formatted {
    fn block_shift(&self) -> u8 {
        match self.is_formatted.load(Ordering::Relaxed) {
            true => 9,
            false => 12,
        }
    }

    fn blocks(&self) -> u64 {
        (1 << 20) >> self.block_shift()
    }

    fn read(&self, _: u64, out: &mut [u8]) {
        out.fill(0);
    }

    fn write(&self, _: u64, bytes: &[u8], _: bool) {
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }

    fn tear(&self, _: u64, _: &[u8]) {}

    fn flush(&self) {}
}

#[test]
fn drive__with_other_blocks_after_a_reset_is_not_written() {
    let media = Arc::new(Formatted {
        is_formatted: AtomicBool::new(false),
        written: AtomicU64::new(0),
    });
    let target = Peered::with_media(media.clone(), MemoryKind::Dram, PeerToPeer::Off);
    assert_eq!(target.backend.write(8192, &[1; 4096]), Ok(()));
    assert_eq!(media.written.load(Ordering::Relaxed), 4096);
    media.is_formatted.store(true, Ordering::Relaxed);
    target.drive.fail();
    let status = loop {
        match target.backend.write(8192, &[2; 4096]) {
            // The reset has ended it.
            Err(Status::INTERNAL_ERROR) => {}
            ended => break ended,
        }
    };
    assert_eq!(status, Err(Status::NAMESPACE_NOT_READY.do_not_retry()));
    assert_eq!(media.written.load(Ordering::Relaxed), 4096);
}

//! Fused Compare and Write.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;

fn fused(opcode: Opcode, cid: u16, fuse: u8, slba: u64, number: u32) -> Sqe {
    let mut bytes = *blocks(opcode, 1, slba, number).as_bytes();
    bytes[1] |= fuse;
    bytes[2..4].copy_from_slice(&cid.to_le_bytes());
    Sqe::parse(&bytes).unwrap()
}

fn pair(slba: u64, number: u32) -> (Sqe, Sqe) {
    (
        fused(Opcode::COMPARE, 1, 1, slba, number),
        fused(Opcode::WRITE, 2, 2, slba, number),
    )
}

fn admits(queue: &mut Queue, sqe: &Sqe, bytes: u32) -> Status {
    match queue.admit(sqe, bytes, Instant::now()) {
        Ok(Admitted::Command { receives }) => {
            assert_eq!(receives, bytes);
            Status::SUCCESS
        }
        Ok(Admitted::Io(_)) => Status::SUCCESS,
        Err(cqe) => Status(cqe.status.code()),
    }
}

fn waits(queue: &mut Queue, sqe: &Sqe, data: &[u8]) {
    assert!(matches!(queue.execute(sqe, data, Instant::now()), Step::Wait));
}

/// Runs what the queue asks for, and returns the completions.
fn finish(queue: &mut Queue) -> Vec<(u16, Status)> {
    while let Some(io) = queue.poll_flush() {
        assert!(io.may_wait() && !io.operation.has_data());
        let status = io.execute(&mut []);
        queue.flushed(status);
    }
    std::iter::from_fn(|| queue.poll_event())
        .map(|cqe| (cqe.cid.0, Status(cqe.status.code())))
        .collect()
}

#[test]
fn pair__writes_what_was_compared() {
    let (target, _) = target();
    let mut host = Host::new(&target, 1, Instant::now());
    let (compare, write) = pair(3, 1);
    for (round, first) in [(0, Status::SUCCESS), (1, Status::COMPARE_FAILURE)] {
        assert_eq!(admits(&mut host.io, &compare, 512), Status::SUCCESS);
        assert_eq!(admits(&mut host.io, &write, 512), Status::SUCCESS);
        // Data of the second may be here first.
        waits(&mut host.io, &write, &[7 + round; 512]);
        assert!(host.io.poll_flush().is_none());
        waits(&mut host.io, &compare, &[0; 512]);
        let second = match first {
            Status::SUCCESS => Status::SUCCESS,
            _ => Status::FAILED_FUSED,
        };
        assert_eq!(finish(&mut host.io), [(1, first), (2, second)]);
        assert_eq!(host.read(1, 3, 1), [7; 512]);
    }
}

#[test]
fn pair__is_complete_or_fails() {
    let (target, _) = target();
    let mut host = Host::new(&target, 1, Instant::now());
    let (compare, write) = pair(3, 1);
    let queue = &mut host.io;
    assert_eq!(admits(queue, &write, 512), Status::MISSING_FUSED, "no first one");
    // Another command comes between, before the data or after them.
    for has_data in [true, false] {
        assert_eq!(admits(queue, &compare, 512), Status::SUCCESS);
        if has_data {
            waits(queue, &compare, &[0; 512]);
        }
        assert_eq!(
            admits(queue, &blocks(Opcode::READ, 1, 0, 1), 512),
            Status::SUCCESS
        );
        if has_data {
            assert_eq!(finish(queue), [(1, Status::MISSING_FUSED)]);
        } else {
            let cqe = completed(queue.execute(&compare, &[0; 512], Instant::now()));
            assert_eq!(cqe.status, Status::MISSING_FUSED);
        }
        assert_eq!(admits(queue, &write, 512), Status::MISSING_FUSED);
    }
    // The first is refused.
    for first in [
        fused(Opcode::COMPARE, 1, 1, 1 << 30, 1),
        fused(Opcode::READ, 1, 1, 3, 1),
        fused(Opcode::COMPARE, 1, 1, 3, 9),
    ] {
        let number = if first.dword(12) == 8 { 9 } else { 1 };
        assert_ne!(admits(queue, &first, number * 512), Status::SUCCESS);
        assert_eq!(admits(queue, &write, 512), Status::FAILED_FUSED);
    }
    // The second is refused: other blocks, another opcode.
    for second in [
        fused(Opcode::WRITE, 2, 2, 4, 1),
        fused(Opcode::WRITE, 2, 2, 3, 2),
        fused(Opcode::COMPARE, 2, 2, 3, 1),
    ] {
        assert_eq!(admits(queue, &compare, 512), Status::SUCCESS);
        waits(queue, &compare, &[0; 512]);
        let number = second.dword(12) + 1;
        assert_eq!(admits(queue, &second, number * 512), Status::INVALID_FIELD);
        assert_eq!(finish(queue), [(1, Status::FAILED_FUSED)]);
    }
    // Data of one are lost at the transport.
    assert_eq!(admits(queue, &compare, 512), Status::SUCCESS);
    assert_eq!(admits(queue, &write, 512), Status::SUCCESS);
    waits(queue, &write, &[1; 512]);
    queue.complete(Cid(1), Status::TRANSIENT_TRANSPORT, 0);
    assert_eq!(finish(queue), [(2, Status::FAILED_FUSED)]);
    assert_eq!(
        admits(queue, &fused(Opcode::READ, 1, 3, 3, 1), 512),
        Status::INVALID_FIELD
    );
    assert_eq!(host.read(1, 3, 1), [0; 512]);
}

/// Hosts increment a counter by fused pairs, as another writes beside it: no increment is lost, and none happens twice.
#[test]
fn pair__is_atomic_among_writers() {
    const INCREMENTS: u64 = 200;
    let seed = std::env::var("RDMUX_SEED").map_or(17, |seed| seed.parse().unwrap());
    println!("RDMUX_SEED={seed}");
    let (target, subsystem) = target();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let on_file = Namespace {
        backend: Arc::new(FileBackend::open(file.path(), false, 512).unwrap()),
        ..memory(2, 512)
    };
    subsystem.add_namespace(on_file).unwrap();
    for nsid in [1, 2] {
        let is_over = AtomicBool::new(false);
        let writes = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let mut counters = Vec::new();
            for id in 1..4 {
                let mut host = Host::new(&target, id, Instant::now());
                counters.push(scope.spawn(move || {
                    let mut done = 0;
                    while done < INCREMENTS {
                        let old = host.read(nsid, 5, 1);
                        let value = u64::from_le_bytes(old[..8].try_into().unwrap());
                        let mut new = old.clone();
                        new[..8].copy_from_slice(&(value + 1).to_le_bytes());
                        let (mut compare, mut write) = pair(5, 1);
                        for sqe in [&mut compare, &mut write] {
                            let mut bytes = *sqe.as_bytes();
                            bytes[4..8].copy_from_slice(&nsid.to_le_bytes());
                            *sqe = Sqe::parse(&bytes).unwrap();
                        }
                        assert_eq!(admits(&mut host.io, &compare, 512), Status::SUCCESS);
                        assert_eq!(admits(&mut host.io, &write, 512), Status::SUCCESS);
                        waits(&mut host.io, &compare, &old);
                        waits(&mut host.io, &write, &new);
                        let statuses = finish(&mut host.io);
                        done += u64::from(statuses[1].1 == Status::SUCCESS);
                    }
                }));
            }
            // Plain writes of the blocks before it have the pairs wait again and again.
            let mut host = Host::new(&target, 9, Instant::now());
            let (is_over, writes) = (&is_over, &writes);
            scope.spawn(move || {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                loop {
                    let number = rng.next_u32() % 5 + 1;
                    let mut data = vec![rng.next_u32() as u8; number as usize * 512];
                    assert_eq!(
                        host.blocks(Opcode::WRITE, nsid, u64::from(5 - number), &mut data),
                        Status::SUCCESS
                    );
                    writes.fetch_add(1, Ordering::Relaxed);
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            for counter in counters {
                counter.join().unwrap();
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let mut host = Host::new(&target, 1, Instant::now());
        let value = u64::from_le_bytes(host.read(nsid, 5, 1)[..8].try_into().unwrap());
        assert_eq!(value, 3 * INCREMENTS, "namespace {nsid}");
        assert!(writes.into_inner() > 0);
    }
}

/// A plain write of the block comes wholly before or wholly after each pair: what it wrote is never overwritten by a pair that compared what was before.
#[test]
fn pair__does_not_overwrite_a_plain_write() {
    let (target, _) = target();
    std::thread::scope(|scope| {
        let mut fused_host = Host::new(&target, 1, Instant::now());
        let mut plain_host = Host::new(&target, 2, Instant::now());
        // The block holds 0 or 1. The pair turns 0 into 0: if it did so around a plain write of 1, that would be lost.
        let pairs = scope.spawn(move || {
            for _ in 0..3000 {
                let (compare, write) = pair(9, 1);
                admits(&mut fused_host.io, &compare, 512);
                admits(&mut fused_host.io, &write, 512);
                waits(&mut fused_host.io, &compare, &[0; 512]);
                waits(&mut fused_host.io, &write, &[0; 512]);
                finish(&mut fused_host.io);
            }
        });
        let plain = scope.spawn(move || {
            for _ in 0..3000 {
                for value in [1, 0] {
                    let mut data = vec![value; 512];
                    assert_eq!(plain_host.blocks(Opcode::WRITE, 1, 9, &mut data), Status::SUCCESS);
                    assert_eq!(plain_host.read(1, 9, 1), vec![value; 512], "it was acknowledged");
                }
            }
        });
        pairs.join().unwrap();
        plain.join().unwrap();
    });
}

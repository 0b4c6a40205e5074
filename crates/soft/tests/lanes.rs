//! WRITEs and READs in a peer's memory by several threads, without the engine's lock.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use common::{END_BYTES, End, LONG, connect_ends, open, shareable};
use rdmux_verbs::*;

/// Makes ends on two devices of an address, and connects each pair.
fn pairs(address: [u8; 4], count: usize) -> (Device, Vec<(End, End, [Connection; 2])>) {
    let address = IpAddr::from(address);
    let (client, server) = (open(address).unwrap(), open(address).unwrap());
    let pair = |_| {
        let ends = [&client, &server].map(|device| End::on(device, shareable(END_BYTES)));
        let [client, server] = ends;
        let held = connect_ends(&client, &server);
        (client, server, held)
    };
    let pairs = (0..count).map(pair).collect();
    (client, pairs)
}

fn write_to(server: &End, at: u64) -> Operation {
    Operation::Write {
        va: server.mr.iova() + at,
        rkey: server.mr.rkey(),
        imm: None,
    }
}

/// Writes until the peer has granted its memory.
fn warm(client: &End, server: &End) {
    let direct = || client.device.counters().direct_requests;
    let (before, deadline) = (direct(), Instant::now() + LONG);
    while direct() < before + 2 {
        client.does(write_to(server, 0), client.mr.sge(0, 8));
        assert!(Instant::now() < deadline, "the memory is not granted");
    }
}

/// Each thread writes its numbers, reads them back, and finds its completions in order.
#[test]
fn post_send__by_threads_with_a_queue_pair_each() {
    const EACH: u64 = 20_000;
    let (device, pairs) = pairs([127, 0, 75, 1], 3);
    pairs.iter().for_each(|(client, server, _)| warm(client, server));
    let before = device.counters().direct_requests;
    thread::scope(|scope| {
        for (client, server, _) in &pairs {
            scope.spawn(move || {
                for n in 0..EACH {
                    client.memory.write(64, &n.to_ne_bytes()).unwrap();
                    let read = Operation::Read {
                        va: server.mr.iova() + 128,
                        rkey: server.mr.rkey(),
                    };
                    client.post(write_to(server, 128), client.mr.sge(64, 8));
                    client.post(read, client.mr.sge(256, 8));
                    let kinds = [WcOpcode::Write, WcOpcode::Read];
                    for kind in kinds {
                        assert_eq!(client.wait_success().opcode, kind);
                    }
                    assert_eq!(client.word(256), n);
                }
            });
        }
    });
    let direct = device.counters().direct_requests - before;
    assert_eq!(
        direct,
        2 * EACH * pairs.len() as u64,
        "no request needed a packet"
    );
}

/// A SEND and the WRITEs around it keep their order, whichever way each of them takes, and whoever holds the engine's lock meanwhile.
#[test]
fn post_send__keeps_the_order_of_sends_and_writes() {
    const ROUNDS: u64 = 2_000;
    let (device, pairs) = pairs([127, 0, 75, 2], 1);
    let (client, server, _) = &pairs[0];
    warm(client, server);
    let heard = AtomicU64::new(0);
    let deadline = Instant::now() + LONG;
    thread::scope(|scope| {
        scope.spawn(|| {
            while heard.load(Ordering::Relaxed) < ROUNDS && Instant::now() < deadline {
                device.counters();
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            for round in 0..ROUNDS {
                let wc = server.recv_cq.wait(LONG).unwrap().expect("a message");
                assert_eq!(wc.status, Status::Success);
                // What was written before the message is there. What is written after it may be.
                assert!(server.word(64) > round, "the WRITE before the SEND");
                heard.store(round + 1, Ordering::Relaxed);
            }
        });
        for round in 0..ROUNDS {
            // The queue for the receiver's completions has room for no more than 1,024.
            while round > heard.load(Ordering::Relaxed) + 500 && Instant::now() < deadline {
                thread::yield_now();
            }
            let sges = server.mr.sge(1024, 64).into();
            server.qp.post_recv(RecvRequest { wr_id: 0, sges }).unwrap();
            client.memory.write(0, &(round + 1).to_ne_bytes()).unwrap();
            client.post(write_to(server, 64), client.mr.sge(0, 8));
            client.post(Operation::Send { imm: None }, client.mr.sge(8, 8));
            client.post(write_to(server, 72), client.mr.sge(0, 8));
            for kind in [WcOpcode::Write, WcOpcode::Send, WcOpcode::Write] {
                assert_eq!(client.wait_success().opcode, kind);
            }
        }
    });
}

/// Memory that notices accesses after it was given back.
#[derive(Debug, Default)]
struct Watched {
    given_back: AtomicBool,
    accessed_late: AtomicBool,
    accesses: AtomicU64,
}

impl Memory for Watched {
    fn len(&self) -> u64 {
        4096
    }

    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        // The access takes a while.
        for byte in out {
            *byte = 7;
            if self.given_back.load(Ordering::SeqCst) {
                self.accessed_late.store(true, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Ok(())
    }
}

/// Once the deregistration returns, no thread is inside of the memory, and none gets there later.
#[test]
fn dereg__while_another_thread_writes() {
    let (_, pairs) = pairs([127, 0, 75, 3], 20);
    for (round, (client, server, _)) in pairs.iter().enumerate() {
        warm(client, server);
        let memory = Arc::new(Watched::default());
        let mr = client.pd.reg_mr_all(memory.clone(), 0, Access::empty()).unwrap();
        let sge = mr.sge(0, 4096);
        let deadline = Instant::now() + LONG;
        thread::scope(|scope| {
            let writing = scope.spawn(|| {
                loop {
                    let request = SendRequest {
                        wr_id: 1,
                        operation: write_to(server, 0),
                        sges: sge.into(),
                        flags: SendFlags::empty(),
                        to: Target::Connected,
                    };
                    client.qp.post_send(request).unwrap();
                    if let Some(wc) = client.cq.poll() {
                        return wc.status;
                    }
                    assert!(Instant::now() < deadline, "the key is still valid");
                }
            });
            while memory.accesses.load(Ordering::Relaxed) < 100 * (round as u64 + 1) {
                thread::yield_now();
                assert!(Instant::now() < deadline, "nothing is written");
            }
            drop(mr);
            memory.given_back.store(true, Ordering::SeqCst);
            assert_eq!(Arc::strong_count(&memory), 1, "the device has given it back");
            assert_eq!(writing.join().unwrap(), Status::LocalProtection);
        });
        assert!(!memory.accessed_late.load(Ordering::SeqCst));
    }
}

/// Threads that write by one queue pair.
const SHARERS: u64 = 4;
/// Requests of these threads before a region is deregistered.
const POSTED: u64 = 30_000;

/// Posts WRITEs of 4 KiB without completions by one queue pair from several threads, each to its own part of the memory at `(va, rkey)`, until a
/// request fails; returns after `end`, which runs beside them, and they have ended.
fn write_by_threads(client: &End, (va, rkey): (u64, RKey), sge: Sge, end: impl FnOnce()) {
    let (posted, has_failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let deadline = Instant::now() + LONG;
    thread::scope(|scope| {
        for thread in 0..SHARERS {
            let (posted, has_failed) = (&posted, &has_failed);
            scope.spawn(move || {
                while !has_failed.load(Ordering::Relaxed) {
                    let request = SendRequest {
                        wr_id: 1,
                        operation: Operation::Write {
                            va: va + thread * 4096,
                            rkey,
                            imm: None,
                        },
                        sges: sge.into(),
                        flags: SendFlags::empty(),
                        to: Target::Connected,
                    };
                    // The queue is full while requests wait for a grant.
                    let _ = client.qp.post_send(request);
                    posted.fetch_add(1, Ordering::Relaxed);
                    if client.cq.poll().is_some() {
                        has_failed.store(true, Ordering::Relaxed);
                    }
                    assert!(Instant::now() < deadline, "the key is still valid");
                }
            });
        }
        // Enough of them for the threads to meet, so that each has its own way to the memory.
        while posted.load(Ordering::Relaxed) < POSTED {
            thread::yield_now();
            assert!(Instant::now() < deadline, "nothing is posted");
        }
        end();
    });
}

/// The requests of each thread are carried out, whichever way they take, and all completions come.
#[test]
fn post_send__by_threads_that_share_a_queue_pair() {
    const EACH: u64 = 20_000;
    let (device, pairs) = pairs([127, 0, 75, 5], 1);
    let (client, server, _) = &pairs[0];
    warm(client, server);
    let before = device.counters().direct_requests;
    thread::scope(|scope| {
        for thread in 0..SHARERS {
            scope.spawn(move || {
                let own = thread * 256;
                for n in 1..=EACH {
                    let mut flags = SendFlags::empty();
                    flags.set(SendFlags::SIGNALED, n == EACH);
                    let request = SendRequest {
                        wr_id: thread,
                        operation: write_to(server, own),
                        sges: SgeList::inline(&n.to_ne_bytes()),
                        flags,
                        to: Target::Connected,
                    };
                    while client.qp.post_send(request.clone()).is_err() {
                        thread::yield_now();
                    }
                }
            });
        }
    });
    let mut ended: Vec<u64> = (0..SHARERS).map(|_| client.wait_success().wr_id).collect();
    ended.sort_unstable();
    assert_eq!(ended, (0..SHARERS).collect::<Vec<_>>());
    for thread in 0..SHARERS {
        assert_eq!(server.word(thread * 256), EACH, "thread {thread}");
    }
    let direct = device.counters().direct_requests - before;
    assert_eq!(direct, SHARERS * EACH, "no request needed a packet");
}

/// Once the deregistration returns, none of the threads that share a queue pair is inside of the memory, and none gets there later.
#[test]
fn dereg__while_threads_that_share_a_queue_pair_write() {
    let (_, pairs) = pairs([127, 0, 75, 6], 5);
    for (client, server, _) in &pairs {
        warm(client, server);
        let memory = Arc::new(Watched::default());
        let mr = client.pd.reg_mr_all(memory.clone(), 0, Access::empty()).unwrap();
        let sge = mr.sge(0, 4096);
        write_by_threads(client, (server.mr.iova(), server.mr.rkey()), sge, || {
            drop(mr);
            memory.given_back.store(true, Ordering::SeqCst);
            assert_eq!(Arc::strong_count(&memory), 1, "the device has given it back");
        });
        assert!(!memory.accessed_late.load(Ordering::SeqCst));
    }
}

/// Once a peer's deregistration returns, none of the threads that share a queue pair writes to its memory.
#[test]
fn dereg__of_memory_of_a_peer_while_threads_that_share_a_queue_pair_write() {
    const BYTES: usize = 4096 * SHARERS as usize;
    let (_, pairs) = pairs([127, 0, 75, 7], 5);
    for (client, server, _) in &pairs {
        warm(client, server);
        let memory = Arc::new(shareable(BYTES));
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = server.pd.reg_mr_all(memory.clone(), 0, access).unwrap();
        let kept = [9; BYTES];
        client.memory.write(0, &[7; 4096]).unwrap();
        let sge = client.mr.sge(0, 4096);
        write_by_threads(client, (mr.iova(), mr.rkey()), sge, || {
            drop(mr);
            memory.write(0, &kept).unwrap();
        });
        let mut found = [0; BYTES];
        memory.read(0, &mut found).unwrap();
        assert!(found == kept, "the peer has written late");
    }
}

/// A thread that waits for completions learns of those that other threads cause without the engine.
#[test]
fn wait__is_ended_by_a_write_of_another_thread() {
    const WRITES: u64 = 2_000;
    let (_, pairs) = pairs([127, 0, 75, 4], 1);
    let (client, server, _) = &pairs[0];
    warm(client, server);
    let seen = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..WRITES {
                client.wait_success();
                seen.store(n + 1, Ordering::Release);
            }
        });
        let deadline = Instant::now() + LONG;
        for n in 0..WRITES {
            client.post(write_to(server, 0), client.mr.sge(0, 8));
            while seen.load(Ordering::Acquire) <= n {
                thread::yield_now();
                assert!(Instant::now() < deadline, "completion {n}");
            }
        }
    });
}

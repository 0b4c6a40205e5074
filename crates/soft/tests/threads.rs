//! Many threads on one queue pair and its completion queues: posting, polling, waiting and sleeping by a descriptor at once.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{END_BYTES, End, LONG, connect_ends, shareable};
use rdmux_verbs::{
    Operation, Options, PostError, QpOptions, RecvRequest, SendFlags, SendRequest, SharedMemory, Status,
    Target,
};

const POSTERS: u64 = 4;
const EACH: u64 = 2_000;

fn end(address: IpAddr, shared_memory: SharedMemory) -> End {
    let options = Options {
        shared_memory,
        ..Options::default()
    };
    let device = common::open_with(address, options).unwrap();
    let depth = (2 * POSTERS * EACH) as u32;
    End::with(&device, shareable(END_BYTES), |_, options| QpOptions {
        send_cq: device.create_cq(depth).unwrap(),
        recv_cq: device.create_cq(depth).unwrap(),
        max_recv_wr: depth,
        ..options
    })
}

/// Checks that every message is posted once, received once and completed once, whoever drives, polls and sleeps meanwhile.
fn exchange(address: [u8; 4], shared_memory: SharedMemory) {
    let (a, b) = (
        end(address.into(), shared_memory),
        end(address.into(), shared_memory),
    );
    let _connections = connect_ends(&a, &b);
    let all = POSTERS * EACH;
    for wr_id in 0..all {
        let sges = b.mr.sge(0, 64).into();
        b.qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let deadline = Instant::now() + LONG;
    let (sent, received) = (&sent, &received);
    let count = &|counter: &AtomicU64, found: bool| {
        if found {
            counter.fetch_add(1, Ordering::Relaxed);
        } else {
            thread::yield_now();
        }
        assert!(
            Instant::now() < deadline,
            "{sent:?} sent, {received:?} received of {all}"
        );
        counter.load(Ordering::Relaxed) < all
    };
    thread::scope(|scope| {
        for poster in 0..POSTERS {
            let (a, deadline) = (&a, deadline);
            scope.spawn(move || {
                let mut left = EACH;
                while left > 0 {
                    let request = SendRequest {
                        wr_id: poster * EACH + left,
                        operation: Operation::Send { imm: None },
                        sges: a.mr.sge(64 * poster, 8).into(),
                        flags: SendFlags::SIGNALED,
                        to: Target::Connected,
                    };
                    match a.qp.post_send(request) {
                        Ok(()) => left -= 1,
                        Err(PostError::QueueFull) => thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                    assert!(Instant::now() < deadline, "{left} are not posted");
                }
            });
        }
        for (cq, counter) in [(&a.cq, sent), (&b.recv_cq, received)] {
            let ok = |wc: rdmux_verbs::WorkCompletion| assert_eq!(wc.status, Status::Success);
            scope.spawn(move || while count(counter, cq.poll().map(ok).is_some()) {});
            for _ in 0..2 {
                let short = Duration::from_millis(100);
                scope.spawn(move || while count(counter, cq.wait(short).unwrap().map(ok).is_some()) {});
            }
            scope.spawn(move || while count(counter, cq.wait(Duration::ZERO).unwrap().map(ok).is_some()) {});
        }
    });
    let counts = [sent, received].map(|counter| counter.load(Ordering::Relaxed));
    assert_eq!(counts, [all, all]);
    assert!(a.cq.poll().is_none() && b.recv_cq.poll().is_none());
}

#[test]
fn threads__share_a_queue_pair_within_a_host() {
    exchange([127, 0, 74, 1], SharedMemory::Auto);
}

#[test]
fn threads__share_a_queue_pair_over_udp() {
    exchange([127, 0, 74, 2], SharedMemory::Off);
}

/// One side waits, the other answers after a while. Checks that each answer ends the wait, whoever drives.
#[test]
fn wait__is_ended_by_every_answer() {
    let address = IpAddr::from([127, 0, 74, 3]);
    let (a, b) = (end(address, SharedMemory::Auto), end(address, SharedMemory::Auto));
    let _connections = connect_ends(&a, &b);
    const TRIPS: u64 = 2_000;
    let receive = |end: &End| {
        let sges = end.mr.sge(0, 64).into();
        end.qp.post_recv(RecvRequest { wr_id: 0, sges }).unwrap();
    };
    let send = |end: &End| {
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Send { imm: None },
            sges: end.mr.sge(64, 8).into(),
            flags: SendFlags::empty(),
            to: Target::Connected,
        };
        end.qp.post_send(request).unwrap();
    };
    receive(&a);
    receive(&b);
    thread::scope(|scope| {
        scope.spawn(|| {
            for trip in 0..TRIPS {
                let wc = b.recv_cq.wait(LONG).unwrap().expect("a request");
                assert_eq!(wc.status, Status::Success);
                receive(&b);
                // Short and long gaps make both sides poll at some times and sleep at others.
                if trip % 64 >= 48 {
                    thread::sleep(Duration::from_micros(30 * (trip % 7)));
                }
                send(&b);
            }
        });
        for trip in 0..TRIPS {
            send(&a);
            let since = Instant::now();
            let wc = a.recv_cq.wait(LONG).unwrap().expect("an answer");
            assert_eq!(wc.status, Status::Success);
            assert!(since.elapsed() < LONG / 2, "trip {trip}");
            receive(&a);
        }
    });
}

/// Two threads wait for one queue. The first message ends one wait; the second ends the other, though the thread that was the
/// leader has left.
#[test]
fn wait__of_another_thread_is_ended_when_the_first_has_left() {
    let address = IpAddr::from([127, 0, 74, 4]);
    let (a, b) = (end(address, SharedMemory::Auto), end(address, SharedMemory::Auto));
    let _connections = connect_ends(&a, &b);
    let send = |wr_id| {
        let request = SendRequest {
            wr_id,
            operation: Operation::Send { imm: None },
            sges: a.mr.sge(0, 8).into(),
            flags: SendFlags::empty(),
            to: Target::Connected,
        };
        a.qp.post_send(request).unwrap();
    };
    for round in 0..300 {
        for wr_id in 0..2 {
            let sges = b.mr.sge(0, 64).into();
            b.qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
        }
        let (left, ends) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..2 {
                let (left, cq) = (left.clone(), &b.recv_cq);
                scope.spawn(move || left.send(cq.wait(LONG).unwrap().map(|wc| wc.status)).unwrap());
            }
            // The messages come at different moments while the threads fall asleep.
            thread::sleep(Duration::from_micros(7 * (round % 43)));
            for wr_id in 0..2 {
                send(wr_id);
                let ended = ends.recv_timeout(LONG / 6);
                assert_eq!(ended, Ok(Some(Status::Success)), "round {round}, message {wr_id}");
            }
        });
    }
}

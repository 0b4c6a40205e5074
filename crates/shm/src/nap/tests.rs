use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rdmux_rnic::{Psn, Qpn, Taken, Ticket};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::*;
use crate::skip::skip;
use crate::{Channel, Meta};

const LONG: Duration = Duration::from_secs(60);
const META: Meta = Meta {
    segment_bytes: 1024,
    traffic_class: 0,
};

/// Returns both ends of a link, each with a mapping of its own.
fn ends() -> [Channel; 2] {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let (segment, file) = Segment::create().unwrap();
    let other = Segment::from_file(std::os::fd::AsFd::as_fd(&file)).unwrap();
    [
        Channel::new(segment, Side::Asking, a, None, &Arc::default()),
        Channel::new(other, Side::Answering, b, None, &Arc::default()),
    ]
}

/// Returns whether this test can run.
fn naps() -> bool {
    let supported = is_supported();
    if !supported {
        skip("the system has no futex_waitv");
    }
    supported
}

/// Naps on the words of these channels until one of them has a packet.
fn nap_until_ready(nap: &Nap, channels: &mut [&mut Channel]) {
    let deadline = Instant::now() + LONG;
    loop {
        nap.begin();
        let words: Vec<_> = channels.iter_mut().map_while(|end| end.prepare_nap()).collect();
        if words.len() == channels.len() {
            wait(nap, &words, Some(LONG)).unwrap();
        }
        nap.end();
        channels.iter_mut().for_each(|end| end.end_nap());
        if channels.iter().any(|end| end.is_ready()) {
            return;
        }
        assert!(Instant::now() < deadline, "a wake-up was lost");
    }
}

#[test]
fn wait__two_sides_that_wake_each_other() {
    const MESSAGES: usize = 20_000;
    if !naps() {
        return;
    }
    let [mut a, mut b] = ends();
    let side = |end: &mut Channel, first: bool| {
        let nap = Nap::default();
        for message in 0..MESSAGES {
            if first == message.is_multiple_of(2) {
                end.send(META, &[7; 20]).unwrap();
                continue;
            }
            nap_until_ready(&nap, &mut [end]);
            assert!(end.receive().unwrap().is_some());
            end.release();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| side(&mut a, true));
        scope.spawn(|| side(&mut b, false));
    });
}

#[test]
fn wait__for_any_of_several_peers() {
    if !naps() {
        return;
    }
    let [[mut a, mut peer], [mut b, mut other]] = [ends(), ends()];
    let nap = Nap::default();
    for speaker in [&mut peer, &mut other] {
        thread::scope(|scope| {
            scope.spawn(|| speaker.send(META, &[7; 20]).unwrap());
            nap_until_ready(&nap, &mut [&mut a, &mut b]);
        });
        for end in [&mut a, &mut b] {
            let _ = end.receive().unwrap();
            end.release();
        }
    }
}

#[test]
fn wait__is_ended_by_its_own_process() {
    if !naps() {
        return;
    }
    let [mut end, _peer] = ends();
    for _ in 0..100 {
        let nap = Nap::default();
        let words = [end.prepare_nap().unwrap()];
        nap.begin();
        thread::scope(|scope| {
            scope.spawn(|| nap.wake());
            let began = Instant::now();
            wait(&nap, &words, Some(LONG)).unwrap();
            assert!(began.elapsed() < LONG / 2);
        });
        end.end_nap();
    }
}

/// A peer that stores anything into the word, and has waiters and calls of its own there, ends naps or does not: the napper goes on when its
/// time is over, and who ends naps never waits.
#[test]
fn wait__beside_a_peer_that_misuses_the_word() {
    if !naps() {
        return;
    }
    let [mut end, peer] = ends();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let stops = || stop.load(std::sync::atomic::Ordering::Relaxed);
    let elsewhere = AtomicU32::new(0);
    thread::scope(|scope| {
        let word = peer.segment().napping(Side::Answering);
        for _ in 0..2 {
            scope.spawn(|| {
                let soon = Timespec {
                    tv_sec: 0,
                    tv_nsec: 100_000,
                };
                while !stops() {
                    let _ = futex::wait(word, futex::Flags::empty(), NAPPING, Some(&soon));
                }
            });
        }
        scope.spawn(|| {
            let mut value = 0u32;
            while !stops() {
                word.store(value, std::sync::atomic::Ordering::Relaxed);
                value = value.wrapping_mul(5).wrapping_add(3);
                let _ = futex::requeue(word, futex::Flags::empty(), 0, 1, &elsewhere);
            }
        });
        let nap = Nap::default();
        for _ in 0..200 {
            nap.begin();
            if let Some(word) = end.prepare_nap() {
                wait(&nap, &[word], Some(Duration::from_millis(1))).unwrap();
            }
            end.end_nap();
            nap.end();
            end.send(META, &[7; 20]).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// Requests that end one after another during one nap, of which the thread that guards takes in the first.
#[test]
fn announce_nap__has_the_peer_tell_of_later_ends_too() {
    let ticket = Ticket {
        qpn: Qpn::new(7),
        end: Psn::new(1),
        incarnation: 0,
    };
    let [mut asking, mut peer] = ends();
    let take = |peer: &mut Channel| {
        assert!(peer.receive().unwrap().is_some());
        peer.release();
        let waits = peer.ends().owes_ends();
        peer.tell_ends();
        waits
    };
    assert!(asking.request(ticket, 8, &mut |_| true).unwrap());
    assert!(asking.prepare_nap().is_some());
    assert!(take(&mut peer), "the napper waits for the end");
    asking.look_for_ends().unwrap();
    assert_eq!(asking.ended(), Some((ticket, Taken::Done)));
    assert!(asking.announce_nap());
    assert!(asking.request(ticket, 8, &mut |_| true).unwrap());
    assert!(take(&mut peer), "and for the next");
    assert!(!asking.announce_nap(), "it has ended meanwhile");
    asking.end_nap();
}

use std::array;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::{Duration, Instant};

use rdmux_rnic::{Psn, Qpn, RingBytes};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::*;
use crate::channel::Channel;
use crate::ring::Word;

const META: Meta = Meta {
    segment_bytes: 1024,
    traffic_class: 0,
};
/// Bytes of the requests here, if not said otherwise: the numbers of queue pair and request.
const BYTES: usize = 8;

/// Returns both ends of a link, each with a mapping of its own.
fn link() -> [Channel; 2] {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let (segment, file) = Segment::create().unwrap();
    let other = Segment::from_file(file.as_fd()).unwrap();
    [
        Channel::new(segment, Side::Asking, a, None, &Arc::default()),
        Channel::new(other, Side::Answering, b, None, &Arc::default()),
    ]
}

fn ticket(qpn: u32, number: u32) -> Ticket {
    Ticket {
        qpn: Qpn::new(qpn),
        end: Psn::new(number),
        incarnation: 0,
    }
}

fn numbers(bytes: &impl RingBytes) -> (u32, u32) {
    let mut both = [0; BYTES];
    bytes.read(0, &mut both).unwrap();
    let number = |at: usize| u32::from_ne_bytes(array::from_fn(|i| both[at + i]));
    (number(0), number(4))
}

/// Puts a request of `bytes` bytes.
fn put_long(ends: &Ends, qpn: u32, number: u32, bytes: usize) -> Result<Put, Corrupt> {
    ends.request(ticket(qpn, number), bytes, &mut |room| {
        room.write(0, &qpn.to_ne_bytes());
        room.write(4, &number.to_ne_bytes());
        true
    })
}

fn put(ends: &Ends, qpn: u32, number: u32) {
    assert_eq!(put_long(ends, qpn, number, BYTES), Ok(Put::Done));
}

/// Takes requests whose queue pair is not `but`; returns their numbers too.
fn take(ends: &Ends, max: usize, late: bool, but: u32) -> (TookRequests, Vec<(u32, u32)>) {
    let mut all = Vec::new();
    let took = ends.take_requests(max, late, &mut |bytes| {
        let both = numbers(bytes);
        let takes = both.0 != but;
        if takes {
            all.push(both);
        }
        takes
    });
    (took.expect("nobody has it").unwrap(), all)
}

fn took(taken: usize, is_more: bool) -> TookRequests {
    TookRequests { taken, is_more }
}

/// Takes the end of requests of any queue pair.
fn end(ends: &Ends) -> Option<Ticket> {
    ends.take_end(&mut |_| true).expect("nobody has it").unwrap()
}

#[test]
fn request__is_taken_and_ends_without_the_engine() {
    let [a, b] = link().map(|channel| Arc::clone(channel.ends()));
    assert_eq!(take(&b, 8, false, 0), (took(0, false), Vec::new()));
    assert_eq!(end(&a), None);
    for number in 0..5 {
        put(&a, 1, number);
    }
    assert_eq!(end(&a), None);
    assert_eq!(take(&b, 2, false, 0), (took(2, true), vec![(1, 0), (1, 1)]));
    assert_eq!(end(&a), Some(ticket(1, 1)), "which ends the first too");
    assert_eq!(
        take(&b, 3, false, 0),
        (took(3, false), vec![(1, 2), (1, 3), (1, 4)])
    );
    assert_eq!(end(&a), Some(ticket(1, 4)));
    assert_eq!(end(&a), None);
    assert!(!a.has_news() && !b.has_news());
}

#[test]
fn request__that_is_not_filled_or_has_no_room() {
    let [a, b] = link().map(|channel| Arc::clone(channel.ends()));
    assert_eq!(a.request(ticket(1, 0), BYTES, &mut |_| false), Ok(Put::Not));
    let mut number = 0;
    while put_long(&a, 1, number, 60_000).unwrap() == Put::Done {
        number += 1;
    }
    assert_eq!(take(&b, 100, false, 0).0, took(number as usize, false));
    assert_eq!(
        put_long(&a, 1, number, 60_000),
        Ok(Put::Not),
        "ends are to be looked at"
    );
    assert_eq!(end(&a), Some(ticket(1, number - 1)));
    assert_eq!(put_long(&a, 1, number, 60_000), Ok(Put::Done));
}

#[test]
fn take_requests__leaves_the_engine_what_is_its() {
    let [mut a, mut b] = link();
    let (ends, peer) = (Arc::clone(a.ends()), Arc::clone(b.ends()));
    put(&ends, 1, 0);
    a.send(META, &[7; 20]).unwrap();
    put(&ends, 1, 1);
    let named = ends.request_with_parts(ticket(1, 2), 40, 1, |_, _| true);
    assert_eq!(named, Ok(Put::Done));
    put(&ends, 2, 0);
    put(&ends, 1, 3);
    // Up to the train.
    assert_eq!(take(&peer, 8, false, 2), (took(1, true), vec![(1, 0)]));
    assert_eq!(take(&peer, 8, false, 2), (took(0, true), Vec::new()));
    let train = b.receive().unwrap().expect("a train");
    assert_eq!(train.train, Some(META));
    b.release();
    // Up to the request that names its payload.
    assert_eq!(take(&peer, 8, false, 2), (took(1, true), vec![(1, 1)]));
    let named = b.receive().unwrap().expect("a request");
    assert_eq!((named.parts, named.bytes, named.train), (1, 40, None));
    b.answer(&named, Taken::Again);
    b.release();
    // Up to the request that is refused.
    assert_eq!(take(&peer, 8, false, 2), (took(0, true), Vec::new()));
    let refused = b.receive().unwrap().expect("a request");
    assert_eq!(numbers(&b.bytes(&refused)), (2, 0));
    b.answer(&refused, Taken::Deferred);
    b.release();
    assert_eq!(take(&peer, 8, false, 2), (took(1, false), vec![(1, 3)]));
    assert_eq!(b.receive(), Ok(None));
    // The other end leaves the rest to its engine.
    assert_eq!(end(&ends), Some(ticket(1, 1)));
    assert_eq!(end(&ends), None);
    a.look_for_ends().unwrap();
    assert_eq!(a.ended(), Some((ticket(1, 2), Taken::Again)));
    assert_eq!(end(&ends), None);
    assert_eq!(a.ended(), Some((ticket(2, 0), Taken::Deferred)));
    assert_eq!(end(&ends), Some(ticket(1, 3)));
    assert_eq!(a.ended(), None);
}

#[test]
fn take_requests__none_while_the_engine_has_records() {
    let [a, mut b] = link();
    let (ends, peer) = (Arc::clone(a.ends()), Arc::clone(b.ends()));
    for number in 0..4 {
        put(&ends, 1, number);
    }
    // One that is executed, but not released; then the engine has one that it has not executed.
    assert_eq!(take(&peer, 1, true, 0).0, took(1, true));
    assert!(b.receive().unwrap().is_some());
    assert!(peer.take_requests(1, false, &mut |_| true).is_none());
    peer.release();
    assert!(!peer.owes_ends() && peer.is_unreleased());
    assert!(!b.progress().all);
    assert_eq!(end(&ends), None);
    b.release();
    assert!(!peer.is_unreleased());
    assert_eq!(end(&ends), Some(ticket(1, 1)));
    assert_eq!(take(&peer, 8, false, 0).0, took(2, false));
    // No record: the engine has none.
    assert_eq!(b.receive(), Ok(None));
    assert_eq!(take(&peer, 8, false, 0).0, took(0, false));
}

#[test]
fn take_requests__nothing_while_responses_wait_for_room() {
    let [mut a, mut b] = link();
    let (ends, peer) = (Arc::clone(a.ends()), Arc::clone(b.ends()));
    while !b.has_waiting() {
        b.send(META, &[7; 60_000]).unwrap();
    }
    put(&ends, 1, 0);
    assert_eq!(
        put_long(&peer, 1, 0, BYTES),
        Ok(Put::Not),
        "nothing goes past them"
    );
    assert!(peer.has_waiting());
    assert_eq!(take(&peer, 8, false, 0), (took(0, true), Vec::new()));
    while a.receive().unwrap().is_some() {}
    a.release();
    b.send_waiting().unwrap();
    assert_eq!(take(&peer, 8, false, 0).0, took(1, false));
}

#[test]
fn take_requests__late_ends_with_the_release() {
    let [a, b] = link().map(|channel| Arc::clone(channel.ends()));
    put(&a, 1, 0);
    assert!(!b.is_unreleased());
    assert_eq!(take(&b, 8, true, 0).0, took(1, false));
    assert!(b.is_unreleased() && !b.is_ready());
    assert_eq!((end(&a), a.has_news()), (None, false));
    b.release();
    assert!(!b.owes_ends());
    assert!(!b.is_unreleased() && a.has_news());
    assert_eq!(end(&a), Some(ticket(1, 0)));
    // Not with nothing, not with several, not with a long one, and only one.
    assert_eq!(take(&b, 8, true, 0).0, took(0, false));
    assert!(!b.is_unreleased());
    for (count, bytes, late) in [
        (2, BYTES, false),
        (1, LATE_BYTES_MAX, true),
        (1, LATE_BYTES_MAX + 1, false),
    ] {
        for number in 0..count {
            assert_eq!(put_long(&a, 1, number, bytes), Ok(Put::Done));
        }
        assert_eq!(take(&b, 8, true, 0).0, took(count as usize, false));
        assert_eq!(b.is_unreleased(), late, "{count} of {bytes} bytes");
        b.release();
        assert_eq!(end(&a), Some(ticket(1, count - 1)));
    }
    put(&a, 1, 0);
    assert_eq!(take(&b, 8, true, 0).0, took(1, false));
    put(&a, 1, 1);
    assert_eq!(take(&b, 8, true, 0).0, took(1, false));
    assert!(!b.is_unreleased());
    assert_eq!(end(&a), Some(ticket(1, 1)));
}

#[test]
fn prepare_sleep__and_others_release_what_is_late() {
    type Step = fn(&mut Channel);
    let steps: [(&str, Step); 4] = [
        ("prepare_sleep", |b| {
            assert!(b.prepare_sleep().unwrap());
            b.awake();
        }),
        ("prepare_nap", |b| {
            assert!(b.prepare_nap().is_some());
            b.end_nap();
        }),
        ("progress", |b| assert!(b.progress().all)),
        ("release", |b| {
            b.release();
            assert!(b.ends().owes_ends(), "the peer waits");
        }),
    ];
    for (name, step) in steps {
        let [mut a, mut b] = link();
        let (ends, peer) = (Arc::clone(a.ends()), Arc::clone(b.ends()));
        put(&ends, 1, 0);
        assert_eq!(take(&peer, 1, true, 0).0, took(1, false));
        assert!(a.prepare_sleep().unwrap(), "{name}: it has not ended");
        step(&mut b);
        assert!(!peer.is_unreleased(), "{name}");
        // Nobody else tells the peer, unless the caller is told to.
        assert_eq!(a.awake(), name != "release", "{name}");
        assert_eq!(end(&ends), Some(ticket(1, 0)), "{name}");
    }
}

#[test]
fn take_end__of_one_queue_pair_at_a_time() {
    let [a, b] = link().map(|channel| Arc::clone(channel.ends()));
    for (qpn, number) in [(1, 0), (1, 1), (2, 0), (1, 2), (3, 0), (3, 1)] {
        put(&a, qpn, number);
    }
    let again = Ticket {
        incarnation: 1,
        ..ticket(3, 2)
    };
    let filled = a.request(again, BYTES, &mut |room| {
        room.write(0, &[1; BYTES]);
        true
    });
    assert_eq!(filled, Ok(Put::Done));
    assert_eq!(take(&b, 8, false, 0).0, took(7, false));
    assert_eq!(end(&a), Some(ticket(1, 1)));
    assert_eq!(end(&a), Some(ticket(2, 0)));
    let mut asked = Vec::new();
    let refused = a.take_end(&mut |ticket| {
        asked.push(*ticket);
        false
    });
    assert_eq!((refused, asked), (Some(Ok(None)), vec![ticket(1, 2)]));
    assert!(a.has_news());
    assert_eq!(end(&a), Some(ticket(1, 2)));
    assert_eq!(end(&a), Some(ticket(3, 1)));
    assert_eq!(end(&a), Some(again));
    assert_eq!(end(&a), None);
}

/// Responses that came before ends which another thread has found may not be received yet.
#[test]
fn ended__what_the_engine_has_found() {
    let [mut a, b] = link();
    let (ends, peer) = (Arc::clone(a.ends()), Arc::clone(b.ends()));
    for number in 0..2 {
        put(&ends, 1, number);
    }
    assert_eq!(take(&peer, 1, false, 0).0, took(1, true));
    a.look_for_ends().unwrap();
    assert_eq!(take(&peer, 1, false, 0).0, took(1, false));
    assert_eq!(ends.take_end(&mut |_| false), Some(Ok(None)));
    assert_eq!(a.ended(), Some((ticket(1, 0), Taken::Done)));
    assert_eq!(a.ended(), None);
    assert!(a.has_news());
    a.look_for_ends().unwrap();
    assert_eq!(a.ended(), Some((ticket(1, 1), Taken::Done)));
}

#[test]
fn locks__are_one_for_each_side() {
    let [a, b] = link();
    let (ends, peer) = (a.ends(), b.ends());
    put(ends, 1, 0);
    let took_one = peer.take_requests(1, false, &mut |_| {
        assert!(peer.take_requests(1, false, &mut |_| true).is_none());
        // The other side is free.
        assert_eq!(end(peer), None);
        true
    });
    assert_eq!(took_one, Some(Ok(took(1, false))));
    let filled = ends.request(ticket(1, 1), BYTES, &mut |_| {
        assert!(ends.take_end(&mut |_| true).is_none());
        assert_eq!(take(ends, 1, false, 0).0, took(0, false));
        true
    });
    assert_eq!(filled, Ok(Put::Done));
    let ended = ends.take_end(&mut |_| {
        assert!(ends.take_end(&mut |_| true).is_none());
        true
    });
    assert_eq!(ended, Some(Ok(Some(ticket(1, 0)))));
}

#[test]
fn request__wakes_a_sleeper_once() {
    let [mut a, mut b] = link();
    let ends = Arc::clone(a.ends());
    assert!(b.prepare_sleep().unwrap());
    put(&ends, 1, 0);
    put(&ends, 1, 1);
    assert!(b.awake());
    b.answer_doorbell();
    assert!(!b.awake());
    // A thread that naps, and one that sleeps beside it.
    assert_eq!(take(b.ends(), 8, false, 0).0, took(2, false));
    assert!(b.prepare_nap().is_some() && b.prepare_sleep().unwrap());
    let napping = || a.segment().napping(Side::Asking).load(Ordering::Relaxed);
    assert_eq!(napping(), 1);
    put(&ends, 1, 2);
    assert_eq!(napping(), 0);
    b.end_nap();
    assert!(b.awake());
    // A train of the engine as well.
    assert_eq!(take(b.ends(), 8, false, 0).0, took(1, false));
    assert!(b.prepare_sleep().unwrap());
    a.send(META, &[7; 20]).unwrap();
    assert!(b.awake());
}

#[test]
fn request__tells_the_peer_of_who_sleeps() {
    let [mut a, b] = link();
    let (ends, peer) = (Arc::clone(a.ends()), Arc::clone(b.ends()));
    // There is no request yet that the sleeper waits for.
    assert!(a.prepare_sleep().unwrap());
    put(&ends, 1, 0);
    assert_eq!(take(&peer, 8, false, 0).0, took(1, false));
    assert!(peer.owes_ends());
    let rings = |a: &mut Channel| {
        let rung = a.awake();
        assert!(a.prepare_sleep().is_ok());
        rung
    };
    peer.tell_ends();
    assert!(!peer.owes_ends() && rings(&mut a));
    // The first has ended before this end announces the sleep.
    assert_eq!(put_long(&ends, 1, 1, BYTES), Ok(Put::DoneAndEnded));
    assert!(a.has_untold_ends());
    assert_eq!(end(&ends), Some(ticket(1, 0)));
    assert!(!a.has_untold_ends());
    // The end of a late one is owed once it is released.
    put(&ends, 1, 2);
    assert_eq!(take(&peer, 1, false, 0).0, took(1, true));
    assert!(peer.owes_ends());
    peer.tell_ends();
    assert!(rings(&mut a));
    assert_eq!(end(&ends), Some(ticket(1, 1)));
    put(&ends, 1, 3);
    assert_eq!(take(&peer, 1, false, 0).0, took(1, true));
    assert!(peer.owes_ends());
    peer.tell_ends();
    assert_eq!(end(&ends), Some(ticket(1, 2)));
    a.awake();
    a.answer_doorbell();
    assert!(a.prepare_sleep().unwrap());
    assert_eq!(take(&peer, 1, true, 0).0, took(1, false));
    peer.release();
    assert!(peer.owes_ends());
    // The ring for a request of the peer's own stands for it.
    put(&peer, 1, 0);
    peer.tell_ends();
    assert!(a.awake());
    assert!(!a.awake(), "it was told twice");
}

/// A request that is put while the end of another one is not seen yet: the peer is told once that end is.
#[test]
fn take_end__tells_the_peer_of_who_sleeps_for_what_is_left() {
    for by_engine in [false, true] {
        let [mut a, b] = link();
        let (ends, peer) = (Arc::clone(a.ends()), Arc::clone(b.ends()));
        assert!(a.prepare_sleep().unwrap());
        put(&ends, 1, 0);
        assert_eq!(take(&peer, 8, false, 0).0, took(1, false));
        peer.tell_ends();
        // One of two sleepers has woken.
        a.awake();
        assert!(a.prepare_sleep().is_ok());
        assert_eq!(put_long(&ends, 1, 1, BYTES), Ok(Put::DoneAndEnded));
        if by_engine {
            a.look_for_ends().unwrap();
            assert_eq!(a.ended(), Some((ticket(1, 0), Taken::Done)));
            assert_eq!(a.ended(), None);
        } else {
            assert_eq!(end(&ends), Some(ticket(1, 0)));
        }
        assert_eq!(take(&peer, 8, false, 0).0, took(1, false));
        assert!(peer.owes_ends(), "by the engine: {by_engine}");
        peer.tell_ends();
        assert!(a.awake());
    }
}

#[test]
fn request__does_not_wait_for_who_takes_requests() {
    let [mut a, b] = link();
    let (ends, peer) = (Arc::clone(a.ends()), b.ends());
    put(&ends, 1, 0);
    assert!(a.prepare_sleep().unwrap());
    let took_one = peer.take_requests(1, false, &mut |_| {
        thread::scope(|scope| {
            scope.spawn(|| put(peer, 1, 0));
        });
        true
    });
    assert_eq!(took_one.unwrap().unwrap().taken, 1);
    assert!(a.awake());
}

#[test]
fn has_news__as_the_locked_sides_say() {
    for seed in 0..200 {
        let mut dice = Dice(seed);
        let [mut a, mut b] = link();
        for step in 0..100 {
            let channel = if dice.below(2) == 0 { &mut a } else { &mut b };
            let ends = Arc::clone(channel.ends());
            let what = dice.below(9);
            match what {
                0 | 1 => drop(put_long(&ends, 1, step, BYTES + dice.below(30_000)).unwrap()),
                2 => channel.send(META, &vec![0; 1 + dice.below(60_000)]).unwrap(),
                3 => drop(take(&ends, 1 + dice.below(3), dice.below(2) == 0, 0)),
                4 => drop(ends.take_end(&mut |_| dice.below(2) == 0)),
                5 => {
                    let _ = channel.receive().unwrap();
                    channel.release();
                }
                6 => {
                    channel.look_for_ends().unwrap();
                    let _ = channel.ended();
                    channel.send_waiting().unwrap();
                }
                7 => ends.release(),
                _ => {
                    let _ = channel.prepare_sleep().unwrap();
                    channel.awake();
                }
            }
            for channel in [&a, &b] {
                let ends = channel.ends();
                let (ready, unreleased) = {
                    let rx = ends.rx.lock();
                    (rx.consumer.is_ready(), rx.unreleased)
                };
                let (ended, waiting) = {
                    let tx = ends.tx.lock();
                    (tx.producer.has_news(), !tx.waiting.is_empty())
                };
                let at = format!("seed {seed}, step {step}, {what}");
                assert_eq!(ends.is_ready(), ready, "{at}");
                assert_eq!(ends.has_news(), ready || ended, "{at}");
                assert_eq!(ends.is_unreleased(), unreleased, "{at}");
                assert_eq!(ends.has_waiting(), waiting, "{at}");
            }
        }
    }
}

#[test]
fn take_requests__refuses_nonsense() {
    let [a, b] = link().map(|channel| Arc::clone(channel.ends()));
    let mut none = |_: &HeldBytes<'_>| -> bool { panic!("there is no request") };
    let stamp = a.segment.ring(Side::Asking);
    stamp.store(Word::Stamp(0), 77, Ordering::Relaxed);
    assert_eq!(b.take_requests(8, false, &mut none), Some(Err(Corrupt)));
    stamp.store(Word::Stamp(0), 0, Ordering::Relaxed);
    // Behind requests that are taken: those end first.
    put(&a, 1, 0);
    stamp.store(Word::Stamp(1), 77, Ordering::Relaxed);
    assert_eq!(take(&b, 8, true, 0).0, took(1, true));
    b.release();
    assert_eq!(end(&a), Some(ticket(1, 0)));
    assert_eq!(b.take_requests(8, false, &mut none), Some(Err(Corrupt)));
}

#[test]
fn take_end__refuses_nonsense() {
    let [a, _b] = link();
    let ends = a.ends();
    let word = ends.segment.ring(Side::Asking);
    word.store(Word::Head, 1 << 31, Ordering::Relaxed);
    assert_eq!(end(ends), None, "there is nothing to look for");
    put(ends, 1, 0);
    assert_eq!(ends.take_end(&mut |_| true), Some(Err(Corrupt)));
    // So does a request without room.
    let mut number = 1;
    let put = loop {
        match put_long(ends, 1, number, 60_000) {
            Ok(Put::Done) => number += 1,
            other => break other,
        }
    };
    assert_eq!(put, Err(Corrupt));
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// Requests of each queue pair in the soak.
const REQUESTS: u32 = 20_000;
/// Threads of each end, each with its queue pairs.
const THREADS: u32 = 2;
const QPS: u32 = 2;

/// Lets other threads run in the middle of something, now and then.
fn pause(dice: &mut Dice) {
    if dice.below(8) == 0 {
        thread::yield_now();
    }
}

/// One end in the soak.
struct Soaked {
    /// Locked by the thread that is the engine for the moment.
    channel: Mutex<Channel>,
    ends: Arc<Ends>,
    /// Number of the next request to take, by queue pair.
    expected: Mutex<HashMap<u32, u32>>,
    taken: AtomicUsize,
    /// Requests that the engine has deferred, and those that have ended so.
    deferred: AtomicUsize,
    ended_deferred: AtomicUsize,
    /// Number behind the last request that has ended, by queue pair.
    ended: [AtomicU32; (THREADS * QPS) as usize],
    trains: AtomicUsize,
}

impl Soaked {
    fn new(channel: Channel) -> Soaked {
        Soaked {
            ends: Arc::clone(channel.ends()),
            channel: Mutex::new(channel),
            expected: Mutex::default(),
            taken: AtomicUsize::new(0),
            deferred: AtomicUsize::new(0),
            ended_deferred: AtomicUsize::new(0),
            ended: array::from_fn(|_| AtomicU32::new(0)),
            trains: AtomicUsize::new(0),
        }
    }

    /// Executes a request.
    fn execute(&self, bytes: &HeldBytes<'_>) {
        let (qpn, number) = numbers(bytes);
        let mut expected = self.expected.lock();
        let next = expected.entry(qpn).or_default();
        assert_eq!(*next, number, "request of queue pair {qpn}");
        *next += 1;
        self.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// Acts as the engine when that runs.
    fn run_engine(&self, dice: &mut Dice, ends: &mut HashMap<u32, u32>) {
        let mut channel = self.channel.lock();
        channel.send_waiting().unwrap();
        if dice.below(4) == 0 {
            channel.send(META, &vec![0; 1 + dice.below(5000)]).unwrap();
            self.trains.fetch_add(1, Ordering::Relaxed);
        }
        channel.look_for_ends().unwrap();
        for _ in 0..1 + dice.below(4) {
            let Some(record) = channel.receive().unwrap() else {
                break;
            };
            if record.train.is_some() {
                continue;
            }
            pause(dice);
            self.execute(&channel.bytes(&record));
            if dice.below(8) == 0 {
                channel.answer(&record, Taken::Deferred);
                self.deferred.fetch_add(1, Ordering::Relaxed);
            }
        }
        channel.release();
        while let Some((ticket, taken)) = channel.ended() {
            if taken == Taken::Deferred {
                self.ended_deferred.fetch_add(1, Ordering::Relaxed);
            }
            self.note_end(ticket, ends);
        }
        match dice.below(4) {
            0 => {
                let _ = channel.prepare_sleep().unwrap();
                channel.awake();
            }
            1 => {
                let _ = channel.prepare_nap();
                channel.end_nap();
            }
            2 => drop(channel.progress()),
            _ => {}
        }
        channel.answer_doorbell();
    }

    /// Notes an end. What one thread takes comes in order.
    fn note_end(&self, ticket: Ticket, ends: &mut HashMap<u32, u32>) {
        let (qpn, behind) = (ticket.qpn.value(), ticket.end.value() + 1);
        let last = ends.insert(qpn, behind).unwrap_or_default();
        assert!(last < behind, "ends of queue pair {qpn}: {last}, {behind}");
        self.ended[qpn as usize].fetch_max(behind, Ordering::Relaxed);
    }

    fn is_done(&self) -> bool {
        let all = |ended: &AtomicU32| ended.load(Ordering::Relaxed) == REQUESTS;
        let taken = self.taken.load(Ordering::Relaxed);
        self.ended.iter().all(all) && taken == (THREADS * QPS * REQUESTS) as usize
    }

    /// A thread that puts the requests of its queue pairs, takes those of the peer and learns ends.
    fn run(&self, thread: u32, seed: u64, done: &dyn Fn() -> bool) {
        let mut dice = Dice(seed);
        let mut next = [0; QPS as usize];
        let mut ends = HashMap::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(
                Instant::now() < deadline,
                "seed {seed}: requests or ends were lost"
            );
            let qp = dice.below(next.len());
            let bytes = BYTES + (dice.below(4000) >> dice.below(10));
            let qpn = thread * QPS + qp as u32;
            if next[qp] < REQUESTS && put_long(&self.ends, qpn, next[qp], bytes).unwrap() != Put::Not {
                next[qp] += 1;
            }
            if dice.below(3) > 0 {
                let (max, late) = (1 + dice.below(3), dice.below(2) == 0);
                let _ = self.ends.take_requests(max, late, &mut |bytes| {
                    pause(&mut dice);
                    let takes = dice.below(16) > 0;
                    if takes {
                        self.execute(bytes);
                    }
                    takes
                });
                pause(&mut dice);
                self.ends.release();
            }
            if dice.below(3) == 0
                && let Some(ended) = self.ends.take_end(&mut |ticket| ticket.end.value() % 16 > 0)
                && let Some(ticket) = ended.unwrap()
            {
                self.note_end(ticket, &mut ends);
            }
            if dice.below(16) == 0 {
                self.run_engine(&mut dice, &mut ends);
            }
        }
    }
}

/// Two threads of each end put requests, take them and learn ends, each of which is the engine now and then.
#[test]
fn soak__threads_beside_the_engine() {
    for seed in 0..3 {
        println!("seed {seed}");
        let both = link().map(Soaked::new);
        let done = || both.iter().all(Soaked::is_done);
        thread::scope(|scope| {
            for (i, end) in both.iter().enumerate() {
                for thread in 0..THREADS {
                    let seed = 1000 * seed + 10 * i as u64 + u64::from(thread);
                    let done = &done;
                    scope.spawn(move || end.run(thread, seed, done));
                }
            }
        });
        for (end, peer) in [(&both[0], &both[1]), (&both[1], &both[0])] {
            let deferred = end.deferred.load(Ordering::Relaxed);
            assert_eq!(
                peer.ended_deferred.load(Ordering::Relaxed),
                deferred,
                "seed {seed}"
            );
            assert!(deferred > 0 && end.trains.load(Ordering::Relaxed) > 0);
            assert!(!end.ends.tx.lock().producer.has_requests());
        }
    }
}

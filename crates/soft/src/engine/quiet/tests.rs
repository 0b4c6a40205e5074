//! A quiet engine misses nothing. The engines' threads have ended here, so only polls drive, and a quiet does not end by itself.

use std::collections::VecDeque;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use rdmux_rnic::{Arm, QpAttributes, QpState, RecvRequest, SgeList, Status, WorkCompletion};
use rdmux_shm::Meta;
use rdmux_verbs::{Options, QpOptions, SharedMemory};

use super::super::tests::{EngineEnd, LONG, OVERSUBSCRIBED, bring_up, ends_with, link_up, send};
use super::super::{Engine, LOOKS_PER_LOOK_AROUND};
use super::*;
use crate::capture::{Capture, Filter};
use crate::shm::link::LINKS_PER_LOOK;
use crate::testing::Inside;

/// Polls that find everything that is there.
const POLLS: u32 = 100_000;

/// Returns two ends without threads, and with a link.
fn linked(hosts: [u8; 2]) -> [EngineEnd; 2] {
    let ends = ends_with(hosts, Options::default);
    link_up(&ends);
    ends.iter().for_each(end_thread);
    ends
}

fn end_thread((device, ..): &EngineEnd) {
    let engine = device.engine();
    engine.stop.store(true, Ordering::Release);
    engine.kick.wake();
    let thread = engine.thread.lock().take();
    thread.unwrap().join().unwrap();
}

/// Returns a new queue pair of an end's device.
fn another((device, cq, _): &EngineEnd) -> EngineEnd {
    let qp = device.alloc_pd().unwrap().create_qp(&QpOptions::new(cq)).unwrap();
    (device.clone(), cq.clone(), qp)
}

fn receive((_, _, qp): &EngineEnd) {
    let sges = SgeList::EMPTY;
    qp.post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
}

/// Lets the polls until now appear to have taken no time: that of a test proves nothing.
fn hurry(core: &mut Core) {
    core.quiet.driven.1 = core.polls.wrapping_sub(1 << 20);
}

/// Polls until the engine is quiet, and makes that last.
fn hush((device, cq, _): &EngineEnd) {
    let engine = device.engine();
    let deadline = Instant::now() + LONG;
    while !is_quiet(engine) {
        assert!(Instant::now() < deadline, "the engine is never quiet");
        hurry(&mut engine.core.lock());
        assert_eq!(cq.poll(), None);
    }
    engine.core.lock().quiet.polls = u32::MAX;
}

fn is_quiet(engine: &Engine) -> bool {
    engine.core.lock().quiet.polls > 0
}

fn find((_, cq, _): &EngineEnd) -> WorkCompletion {
    let found = (0..POLLS).find_map(|_| cq.poll());
    found.expect("a completion")
}

/// Returns whether the engine is quiet after a drive at that time which found nothing. Other tests may use memory so much that each engine
/// looks once whether it is to share some.
fn is_quiet_after_drive(core: &mut Core, now: Time) -> bool {
    (0..100).any(|_| {
        core.receive_linked(now);
        (core.quiet.polls, core.quiet.idle, core.quiet.driven.0) = (0, true, now);
        hurry(core);
        core.has_driven(now, true);
        core.quiet.polls > 0
    })
}

/// Records that sockets and the messages of other engines were looked at just then.
fn look(core: &mut Core, now: Time) {
    core.looks.looked(now, false);
    core.served_at = now;
}

#[test]
fn poll__of_a_quiet_engine_finds_what_a_peer_sends() {
    let ends = linked([101, 102]);
    receive(&ends[0]);
    hush(&ends[0]);
    ends[1].2.post_send(send()).unwrap();
    let wc = find(&ends[0]);
    assert_eq!((wc.wr_id, wc.status), (2, Status::Success));
    assert!(!is_quiet(ends[0].0.engine()));
}

#[test]
fn poll__of_a_quiet_engine_finds_the_end_of_a_request() {
    let ends = linked([103, 104]);
    receive(&ends[1]);
    ends[0].2.post_send(send()).unwrap();
    hush(&ends[0]);
    assert_eq!(find(&ends[1]).wr_id, 2);
    let wc = find(&ends[0]);
    assert_eq!((wc.wr_id, wc.status), (1, Status::Success));
}

#[test]
fn poll__of_a_quiet_engine_looks_at_all_links() {
    const PEERS: u8 = 2 * LINKS_PER_LOOK as u8;
    let first = ends_with([105, 106], Options::default);
    let pairs = (0..PEERS / 2).flat_map(|i| ends_with([107 + 2 * i, 108 + 2 * i], Options::default));
    let pairs: Vec<_> = pairs.map(|peer| [another(&first[0]), peer]).collect();
    pairs.iter().for_each(link_up);
    end_thread(&first[0]);
    for pair in &pairs {
        receive(&pair[0]);
        hush(&pair[0]);
        pair[1].2.post_send(send()).unwrap();
        assert_eq!(find(&pair[0]).qpn, pair[0].2.qpn());
    }
}

#[test]
fn poll__of_a_quiet_engine_serves_what_others_leave() {
    let ends = linked([123, 124]);
    let engine = ends[0].0.engine();
    hush(&ends[0]);
    {
        let _held = engine.core.lock();
        ends[0].2.post_send(send()).unwrap();
    }
    assert!(engine.core.has_left() && is_quiet(engine));
    assert_eq!(ends[0].1.poll(), None);
    assert!(!engine.core.has_left() && !is_quiet(engine));
    receive(&ends[1]);
    assert_eq!(find(&ends[1]).wr_id, 2);
}

#[test]
fn poll__of_a_quiet_engine_gives_up_the_cpu_as_often() {
    let ends = linked([125, 126]);
    let engine = ends[0].0.engine();
    hush(&ends[0]);
    engine.core.lock().quiet.polls = 1;
    OVERSUBSCRIBED.set(true);
    // A quiet poll looks once, and one that gives up the CPU three times.
    let (mut quiet, mut since) = (0, 0);
    for _ in 0..POLLS {
        hurry(&mut engine.core.lock());
        let mut looks = 0;
        engine.poll(|| {
            looks += 1;
            None::<()>
        });
        quiet += u32::from(looks == 1);
        since = if looks == 3 { 0 } else { since + 1 };
        assert!(since <= LOOKS_PER_LOOK_AROUND + POLLS_MAX as u32);
    }
    assert!(quiet > 0);
}

#[test]
fn poll__beside_an_armed_queue_always_drives() {
    let ends = linked([127, 128]);
    let engine = ends[0].0.engine();
    hush(&ends[0]);
    ends[0].1.arm(Arm::Next);
    for _ in 0..1_000 {
        let mut core = engine.core.lock();
        let now = engine.now();
        look(&mut core, Time(now.0 + LONG.as_nanos() as u64));
        hurry(&mut core);
        drop(core);
        assert_eq!(ends[0].1.poll(), None);
        assert!(!is_quiet(engine));
    }
}

#[test]
fn lock__ends_the_quiet() {
    let ends = linked([129, 130]);
    let engine = ends[0].0.engine();
    hush(&ends[0]);
    assert!(is_quiet(engine));
    drop(engine.lock());
    assert!(!is_quiet(engine));
}

/// A caller that finds a completion at every poll drives all the same: it may keep the engine's threads from their CPU.
#[test]
fn poll__that_always_finds_something_drives_now_and_then() {
    const POLLS: u64 = 1_000;
    let ends = linked([141, 142]);
    let [(device, cq, qp), _] = &ends;
    let engine = device.engine();
    let before = engine.core.lock().polls;
    let mut into = VecDeque::new();
    // Receives of this queue pair complete at once.
    qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    for wr_id in 0..POLLS {
        let sges = SgeList::EMPTY;
        qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
        assert_eq!(cq.poll_many(1, &mut into), 1);
    }
    assert!(engine.core.lock().polls > before);
}

#[test]
fn link__that_comes_up_ends_the_quiet() {
    let ends = linked([131, 132]);
    let [peer, _] = ends_with([133, 134], Options::default);
    hush(&ends[0]);
    // The peer's queue pair asks for the link.
    let pair = [peer, another(&ends[0])];
    link_up(&pair);
    receive(&pair[1]);
    hush(&pair[1]);
    pair[0].2.post_send(send()).unwrap();
    assert_eq!(find(&pair[1]).qpn, pair[1].2.qpn());
}

#[test]
fn link__that_ends_ends_the_quiet() {
    let [end, peer] = linked([135, 136]);
    hush(&end);
    drop(peer);
    let deadline = Instant::now() + LONG;
    while is_quiet(end.0.engine()) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    assert_eq!(end.1.poll(), None);
}

#[test]
fn has_driven__leaves_a_timer_its_time() {
    let ends = linked([137, 138]);
    // Nobody takes it, so the timer of its retransmission runs.
    ends[0].2.post_send(send()).unwrap();
    // Posts the request, too, if another thread had the lock.
    let mut core = ends[0].0.engine().lock();
    let due = core.rnic.poll_timeout().expect("a timer").0;
    for (before_ns, quiet) in [(2 * QUIET_NS, true), (QUIET_NS / 2, false), (0, false)] {
        let now = Time(due - before_ns);
        look(&mut core, now);
        assert_eq!(
            is_quiet_after_drive(&mut core, now),
            quiet,
            "{before_ns} ns before"
        );
    }
}

#[test]
fn has_driven__leaves_sockets_and_messages_their_time() {
    let ends = linked([139, 140]);
    let mut core = ends[0].0.engine().core.lock();
    let now = Time(core.served_at.0 + LONG.as_nanos() as u64);
    look(&mut core, now);
    assert!(is_quiet_after_drive(&mut core, now));
    core.served_at = Time(now.0 - SERVE_NS);
    assert!(!is_quiet_after_drive(&mut core, now));
    look(&mut core, now);
    core.looks.sent(now);
    assert!(!is_quiet_after_drive(&mut core, now), "a response may come");
}

/// A drive that finds a request leaves its acknowledgement to the next one.
#[test]
fn has_driven__leaves_no_acknowledgement_pending() {
    let ends = ends_with([141, 142], || Options {
        shared_memory: SharedMemory::Off,
        ..Options::default()
    });
    bring_up(&ends);
    ends.iter().for_each(end_thread);
    hush(&ends[0]);
    ends[0].0.engine().core.lock().quiet.end();
    receive(&ends[0]);
    ends[1].2.post_send(send()).unwrap();
    assert_eq!(find(&ends[0]).wr_id, 2);
    let mut core = ends[0].0.engine().core.lock();
    let now = Time(core.served_at.0 + LONG.as_nanos() as u64);
    look(&mut core, now);
    assert!(core.rnic.has_transmit(true));
    assert!(!is_quiet_after_drive(&mut core, now));
    core.finish(now, true);
    let later = Time(now.0 + LONG.as_nanos() as u64);
    look(&mut core, later);
    assert!(is_quiet_after_drive(&mut core, later));
}

#[test]
fn has_driven__with_something_left_to_do() {
    let ends = linked([143, 144]);
    let peer = (ends[1].0.address(), ends[1].0.engine().lock().rnic.config().slot);
    let mut core = ends[0].0.engine().core.lock();
    let now = Time(core.served_at.0 + LONG.as_nanos() as u64);
    look(&mut core, now);
    assert!(is_quiet_after_drive(&mut core, now));
    core.blocked = Some(now);
    assert!(!is_quiet_after_drive(&mut core, now), "a socket is full");
    core.blocked = None;
    // Nobody takes these.
    let meta = Meta {
        segment_bytes: 1024,
        traffic_class: 0,
    };
    while !core.links.have_waiting() {
        assert!(core.links.send(peer, meta, &[0; 1024]));
    }
    assert!(!is_quiet_after_drive(&mut core, now), "a train waits for room");
}

#[test]
fn has_driven__while_a_capture_sees_packets() {
    let ends = linked([145, 146]);
    let mut core = ends[0].0.engine().core.lock();
    let now = Time(core.served_at.0 + LONG.as_nanos() as u64);
    look(&mut core, now);
    let (done, _told) = UnixDatagram::pair().unwrap();
    let file = tempfile::tempfile().unwrap().into();
    let capture = Capture::to(file, done.into(), "device".into(), Filter::default()).unwrap();
    core.rnic.capture(capture);
    assert!(!is_quiet_after_drive(&mut core, now));
    core.rnic.end_capture();
    assert!(is_quiet_after_drive(&mut core, now));
}

#[test]
fn begin__lasts_as_long_at_each_pace() {
    for (polls, took_ns, fit) in [
        (1, QUIET_NS + 1, 0),
        (1, QUIET_NS, 1),
        (1, 60, QUIET_NS as u32 / 60),
        (100, 5_000, 40),
        (100, 0, POLLS_MAX as u32),
    ] {
        let mut quiet = Quiet::default();
        // The count of polls may start again at 0.
        let before = u32::MAX - 50;
        quiet.begin((Time(7), before), Time(7 + took_ns), before.wrapping_add(polls));
        assert_eq!(quiet.polls, fit, "{polls} polls in {took_ns} ns");
    }
}

//! A leader that naps is woken by everything that wakes one that sleeps on descriptors.

use std::thread;
use std::time::Instant;

use rdmux_rnic::{RecvRequest, SgeList, Status};
use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{Options, QpOptions, SharedMemory};

use super::super::tests::{EngineEnd, LONG, bring_up, ends_with, link_up, send, until};
use super::*;
use crate::skip::skip;
use crate::testing::{Inside, open_with};

fn sleepers() -> Options {
    Options {
        waiting: Some(WaitMode::Blocked),
        ..Options::default()
    }
}

/// Returns two ends with a link, whose callers sleep at once; `None` where the system does not support naps.
fn linked(hosts: [u8; 2]) -> Option<[EngineEnd; 2]> {
    if !is_supported() {
        skip("the system has no futex_waitv");
        return None;
    }
    let ends = ends_with(hosts, sleepers);
    link_up(&ends);
    Some(ends)
}

fn receive((_, _, qp): &EngineEnd) {
    let sges = SgeList::EMPTY;
    qp.post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
}

/// Waits for a message; completions of messages that were sent may come first.
fn wait_for_message((_, cq, _): &EngineEnd) {
    loop {
        let wc = cq.wait(LONG).unwrap().expect("a completion");
        assert_eq!(wc.status, Status::Success);
        if wc.wr_id == 2 {
            return;
        }
    }
}

/// Exchanges messages until both sides have napped as often as `naps`.
fn exchange_until_napped(ends: &[EngineEnd; 2], naps: u64) {
    let deadline = Instant::now() + LONG;
    let napped = || ends.iter().all(|end| end.0.engine().lock().napped >= naps);
    ends.iter().for_each(receive);
    while !napped() {
        assert!(Instant::now() < deadline, "nobody naps");
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..100 {
                    wait_for_message(&ends[1]);
                    receive(&ends[1]);
                    ends[1].2.post_send(send()).unwrap();
                }
            });
            for _ in 0..100 {
                ends[0].2.post_send(send()).unwrap();
                wait_for_message(&ends[0]);
                receive(&ends[0]);
            }
        });
    }
}

/// Waits in the name of `end` while `others` act once it naps.
fn wakes(end: &EngineEnd, others: impl FnOnce()) {
    thread::scope(|scope| {
        scope.spawn(|| wait_for_message(end));
        let engine = end.0.engine();
        until(engine, |core| {
            // Let both decide anew: the leader sleeps on descriptors until the thread guards.
            if !core.napping {
                engine.leader_kick.wake();
                engine.kick.wake();
            }
            core.napping
        });
        others();
    });
}

#[test]
fn wait__of_two_sides_that_nap_loses_no_wake_up() {
    let Some(ends) = linked([61, 62]) else {
        return;
    };
    exchange_until_napped(&ends, 2_000);
    let engine = ends[0].0.engine();
    assert!(!engine.lock().napping);
}

#[test]
fn wait__datagram_wakes_a_napper() {
    let Some(ends) = linked([63, 64]) else {
        return;
    };
    // Another queue pair of the napper, whose peer has no link.
    let (device, cq, _) = &ends[0];
    let qp = device.alloc_pd().unwrap().create_qp(&QpOptions::new(cq)).unwrap();
    let far = open_with(
        [127, 0, 14, 65].into(),
        Options {
            shared_memory: SharedMemory::Off,
            ..sleepers()
        },
    )
    .unwrap();
    let far_cq = far.create_cq(64).unwrap();
    let far_qp = far
        .alloc_pd()
        .unwrap()
        .create_qp(&QpOptions::new(&far_cq))
        .unwrap();
    let pair = [(device.clone(), cq.clone(), qp), (far, far_cq, far_qp)];
    bring_up(&pair);
    exchange_until_napped(&ends, 10);
    for _ in 0..3 {
        receive(&pair[0]);
        wakes(&ends[0], || {
            pair[1].2.post_send(send()).unwrap();
            let wc = pair[1].1.wait(LONG).unwrap().expect("an acknowledgement");
            assert_eq!(wc.status, Status::Success);
        });
        // Datagrams keep the leader from napping for a time, not for ever.
        let napped = ends[0].0.engine().lock().napped;
        exchange_until_napped(&ends, napped + 10);
    }
}

#[test]
fn wait__link_that_comes_up_wakes_a_napper() {
    let Some(ends) = linked([66, 67]) else {
        return;
    };
    let (device, cq, _) = &ends[0];
    let qp = device.alloc_pd().unwrap().create_qp(&QpOptions::new(cq)).unwrap();
    let other = open_with([127, 0, 14, 68].into(), sleepers()).unwrap();
    let other_cq = other.create_cq(64).unwrap();
    let other_qp = other
        .alloc_pd()
        .unwrap()
        .create_qp(&QpOptions::new(&other_cq))
        .unwrap();
    let pair = [(device.clone(), cq.clone(), qp), (other, other_cq, other_qp)];
    exchange_until_napped(&ends, 10);
    wakes(&ends[0], || {
        bring_up(&pair);
        receive(&pair[0]);
        pair[1].2.post_send(send()).unwrap();
        let wc = pair[1].1.wait(LONG).unwrap().expect("an acknowledgement");
        assert_eq!(wc.status, Status::Success);
    });
}

/// Another thread waits for the same queue, and takes one of two completions: the rest is the napper's.
#[test]
fn wait__of_several_threads_for_one_queue() {
    const MESSAGES: usize = 500;
    let Some(ends) = linked([69, 70]) else {
        return;
    };
    exchange_until_napped(&ends, 10);
    for _ in 0..MESSAGES / 8 {
        (0..3).for_each(|_| receive(&ends[0]));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| wait_for_message(&ends[0]));
            }
            for _ in 0..3 {
                ends[1].2.post_send(send()).unwrap();
                let wc = ends[1].1.wait(LONG).unwrap().expect("an acknowledgement");
                assert_eq!(wc.status, Status::Success);
            }
        });
    }
}

#[test]
fn wait__ends_with_its_time() {
    let Some(ends) = linked([71, 72]) else {
        return;
    };
    exchange_until_napped(&ends, 10);
    let (_, cq, _) = &ends[0];
    while cq.poll().is_some() {}
    let napped = ends[0].0.engine().lock().napped;
    while ends[0].0.engine().lock().napped == napped {
        // An acknowledgement may be late.
        let _ = cq.wait(Duration::from_millis(5)).unwrap();
    }
    assert!(!ends[0].0.engine().lock().napping);
}

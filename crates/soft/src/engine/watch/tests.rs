//! A caller in the thread's place: it is woken, the thread is not, and whoever leaves the place leaves nothing behind.

use std::thread;
use std::time::Instant;

use rdmux_rnic::{Arm, RecvRequest, SgeList, Status};
use rdmux_verbs::provider::Waker;
use rdmux_verbs::{CompletionQueue, EngineWatch, Options, SharedMemory};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::tests::{EngineEnd, LONG, bring_up, ends_with, exchange, is_told, link_up, send, until};
use super::*;
use crate::testing::Inside;

/// With links within the host, and without.
const CARRIERS: [SharedMemory; 2] = [SharedMemory::Auto, SharedMemory::Off];

fn connected(hosts: [u8; 2], carrier: SharedMemory) -> [EngineEnd; 2] {
    let options = || Options {
        shared_memory: carrier,
        ..Options::default()
    };
    let ends = ends_with(hosts, options);
    match carrier {
        SharedMemory::Auto => link_up(&ends),
        SharedMemory::Off => bring_up(&ends),
    }
    ends
}

fn receive((_, _, qp): &EngineEnd) {
    let sges = SgeList::EMPTY;
    qp.post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
}

/// Sends a message, and waits until it is acknowledged.
fn send_and_wait((_, cq, qp): &EngineEnd) {
    qp.post_send(send()).unwrap();
    assert_eq!(cq.wait(LONG).unwrap().unwrap().status, Status::Success);
}

/// Takes the place; waits for those who have it.
fn watch(end: &EngineEnd) -> EngineWatch {
    loop {
        if let Some(watch) = end.0.watch() {
            return watch;
        }
        thread::yield_now();
    }
}

/// Sleeps until one of these is readable.
fn sleep(fds: &[BorrowedFd<'_>]) {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let long = Timespec::try_from(LONG).unwrap();
    assert!(
        poll(&mut fds, Some(&long)).unwrap() > 0,
        "nobody wakes the caller"
    );
}

/// Sleeps in the place until the queue has a completion, and takes it. Another thread may drive, and take the packets in.
fn take_one(watch: &mut EngineWatch, cq: &CompletionQueue) {
    loop {
        cq.arm(Arm::Next);
        if cq.poll().is_some() {
            return;
        }
        if watch.prepare() {
            sleep(&[watch.as_fd(), cq.as_fd()]);
        }
    }
}

/// Prepares until the caller may sleep.
fn prepare(watch: &mut EngineWatch) {
    while !watch.prepare() {}
}

#[test]
fn watch__arrivals_wake_the_caller_and_not_the_thread() {
    const MESSAGES: u64 = 100;
    for (carrier, hosts) in CARRIERS.into_iter().zip([[31, 32], [33, 34]]) {
        let ends = connected(hosts, carrier);
        let (device, cq, _) = &ends[0];
        let engine = device.engine();
        until(engine, |core| core.thread_asleep);
        let before = engine.lock().thread_woken;
        thread::scope(|scope| {
            for _ in 0..MESSAGES {
                receive(&ends[0]);
                let mut watch = watch(&ends[0]);
                prepare(&mut watch);
                let sender = scope.spawn(|| send_and_wait(&ends[1]));
                take_one(&mut watch, cq);
                // The acknowledgement may wait for the next sleep.
                prepare(&mut watch);
                sender.join().unwrap();
            }
        });
        // A doorbell that is rung late wakes the thread after the caller has left the place.
        let woken = engine.lock().thread_woken - before;
        assert!(woken <= MESSAGES / 4, "{carrier:?}: {woken}");
    }
}

#[test]
fn watch__dropped_leaves_arrivals_to_the_thread() {
    for (carrier, hosts) in CARRIERS.into_iter().zip([[35, 36], [37, 38]]) {
        let ends = connected(hosts, carrier);
        let (_, cq, _) = &ends[0];
        for _ in 0..100 {
            receive(&ends[0]);
            cq.arm(Arm::Next);
            let mut watch = watch(&ends[0]);
            prepare(&mut watch);
            thread::scope(|scope| {
                let sender = scope.spawn(|| send_and_wait(&ends[1]));
                // Before, while or after the message arrives.
                drop(watch);
                assert!(is_told(cq), "{carrier:?}");
                assert!(cq.poll().is_some());
                sender.join().unwrap();
            });
        }
    }
}

#[test]
fn report__what_others_bring_until_the_caller_drives_or_leaves() {
    let is_readable = |cq: &CompletionQueue| {
        let now = Timespec::default();
        poll(&mut [PollFd::new(cq, PollFlags::IN)], Some(&now)).unwrap() > 0
    };
    for (carrier, hosts) in CARRIERS.into_iter().zip([[95, 96], [97, 98]]) {
        let ends = connected(hosts, carrier);
        let (_, cq, _) = &ends[0];
        for leaves in [false, true] {
            let mut watch = watch(&ends[0]);
            prepare(&mut watch);
            watch.report(cq);
            receive(&ends[0]);
            thread::scope(|scope| {
                scope.spawn(|| {
                    send_and_wait(&ends[1]);
                });
                // For the engine this is another caller that drives.
                let deadline = Instant::now() + LONG;
                while !is_readable(cq) {
                    assert!(Instant::now() < deadline, "{carrier:?}: no report");
                    ends[0].0.progress();
                }
            });
            assert!(cq.poll().is_some());
            watch.report(cq);
            let kept = match leaves {
                true => {
                    drop(watch);
                    None
                }
                false => {
                    prepare(&mut watch);
                    Some(watch)
                }
            };
            receive(&ends[0]);
            thread::scope(|scope| {
                let sender = scope.spawn(|| send_and_wait(&ends[1]));
                while !sender.is_finished() {
                    ends[0].0.progress();
                }
            });
            assert!(!is_readable(cq), "{carrier:?}");
            assert!(cq.poll().is_some());
            drop(kept);
        }
    }
}

/// Both sides exchange messages, and sleep in the place, or beside another caller that has it.
#[test]
fn watch__loses_no_wake_up() {
    for (carrier, hosts) in CARRIERS.into_iter().zip([[39, 40], [41, 42]]) {
        for keeps in [false, true] {
            exchange(
                &connected(hosts, carrier),
                || None::<EngineWatch>,
                |(device, cq, _), place| {
                    *place = place.take().or_else(|| device.watch());
                    match place {
                        None => sleep(&[cq.as_fd()]),
                        Some(watch) => {
                            if watch.prepare() {
                                sleep(&[cq.as_fd(), watch.as_fd()]);
                            }
                        }
                    }
                    *place = place.take().filter(|_| keeps);
                },
            );
        }
    }
}

/// A caller that has prepared for its sleep, and is busy meanwhile, keeps nobody from the messages of a link that comes up.
#[test]
fn watch__awake_while_a_link_comes_up() {
    let ends = ends_with([93, 94], Options::default);
    let engine = ends[0].0.engine();
    until(engine, |core| core.thread_asleep);
    let mut watch = watch(&ends[0]);
    prepare(&mut watch);
    link_up(&ends);
    for _ in 0..3 {
        receive(&ends[0]);
        engine.sleep_while(|| send_and_wait(&ends[1]));
    }
}

/// Sleeps in the place, for nothing of its own, until woken.
pub(in super::super) fn watch_until(end: &EngineEnd, woken: &Waker) {
    let mut watch = watch(end);
    while !woken.reset() {
        if watch.prepare() {
            sleep(&[watch.as_fd(), woken.fd().as_fd()]);
        }
    }
}

#[test]
fn watch__serves_callers_that_wait_beside_it() {
    for (carrier, hosts) in CARRIERS.into_iter().zip([[43, 44], [45, 46]]) {
        let ends = connected(hosts, carrier);
        let stop = Waker::new().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| watch_until(&ends[0], &stop));
            until(ends[0].0.engine(), |core| core.watcher_asleep);
            assert!(ends[0].0.watch().is_none(), "the place is taken");
            for _ in 0..200 {
                receive(&ends[0]);
                let waiter = scope.spawn(|| ends[0].1.wait(LONG).unwrap().unwrap());
                send_and_wait(&ends[1]);
                assert_eq!(waiter.join().unwrap().status, Status::Success);
            }
            stop.wake();
        });
        drop(watch(&ends[0]));
    }
}

#[test]
fn serves_others__after_many_wake_ups_for_them() {
    let ends = connected([47, 48], SharedMemory::Auto);
    let (_, cq, _) = &ends[0];
    let mut watch = watch(&ends[0]);
    for _ in 0..4 * WAKE_UPS_FOR_OTHERS {
        if watch.serves_others() {
            return;
        }
        receive(&ends[0]);
        prepare(&mut watch);
        thread::scope(|scope| {
            scope.spawn(|| send_and_wait(&ends[1]));
            take_one(&mut watch, cq);
            prepare(&mut watch);
        });
    }
    panic!("it serves others only, and does not notice");
}

/// The caller is awake and does something else. Two others wait for a completion queue, one as the leader, one relying on others.
#[test]
fn watch__awake_holds_up_nobody_who_waits() {
    for carrier in CARRIERS {
        let ends = connected([91, 92], carrier);
        let mut watch = watch(&ends[0]);
        prepare(&mut watch);
        for _ in 0..20 {
            receive(&ends[0]);
            receive(&ends[0]);
            thread::scope(|scope| {
                let waiters = [(); 2].map(|()| scope.spawn(|| ends[0].1.wait(LONG).unwrap()));
                send_and_wait(&ends[1]);
                send_and_wait(&ends[1]);
                for waiter in waiters {
                    assert_eq!(waiter.join().unwrap().unwrap().status, Status::Success);
                }
            });
        }
    }
}

/// A link comes up while the caller sleeps: its peer must ring the doorbell for the caller.
#[test]
fn watch__is_woken_for_a_link_that_comes_up() {
    let ends = ends_with([49, 50], Options::default);
    let mut watch = watch(&ends[0]);
    prepare(&mut watch);
    ends[0].0.engine().watch_kick.reset_if_woken();
    bring_up(&ends);
    let slot = ends[1].0.engine().lock().rnic.config().slot;
    until(ends[0].0.engine(), |core| {
        core.links.reach((ends[1].0.address(), slot))
    });
    // Nothing else uses this waker: packets make the sockets readable.
    assert!(ends[0].0.engine().watch_kick.wait(Some(LONG)));
    receive(&ends[0]);
    thread::scope(|scope| {
        scope.spawn(|| send_and_wait(&ends[1]));
        take_one(&mut watch, &ends[0].1);
        prepare(&mut watch);
    });
}

//! Completion queues of a pool: how users share them, and that one user does the others no harm.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use common::{END_BYTES, End, LONG, connect_ends, private, shareable};
use rdmux_verbs::*;
use rustix::event::{PollFd, PollFlags, poll};

/// A user of a pool, whose queue pair is connected to a peer.
struct User {
    end: End,
    share: CqShare,
    peer: End,
    _connections: [Connection; 2],
}

impl User {
    /// `own`: the device of the pool's vector 0; `shared`: whether the peer is reached through shared memory.
    fn new(pool: &CqPool, nr: u32, devices: [&Device; 2], shared: bool) -> User {
        let share = pool.get(nr, Some(0)).unwrap();
        let memory = || match shared {
            true => shareable(END_BYTES),
            false => private(END_BYTES),
        };
        let end = End::with(devices[0], memory(), |_, options| QpOptions {
            send_cq: share.queue(),
            recv_cq: share.queue(),
            ..options
        });
        let peer = End::on(devices[1], memory());
        let _connections = connect_ends(&end, &peer);
        User {
            end,
            share,
            peer,
            _connections,
        }
    }

    fn send_empty(from: &End, to: &End, wr_id: u64) -> Result<(), PostError> {
        let sges = SgeList::EMPTY;
        to.qp.post_recv(RecvRequest { wr_id, sges })?;
        from.qp.post_send(SendRequest {
            wr_id,
            ..SendRequest::send(SgeList::EMPTY).signaled()
        })
    }

    fn is_in_error(&self) -> bool {
        self.end
            .qp
            .query()
            .is_some_and(|info| info.state == QpState::Error)
    }

    /// Has a message there and back, with the completions of this user; those of others are counted.
    fn ping(&self, wr_id: u64, others: &mut Vec<WorkCompletion>) {
        User::send_empty(&self.end, &self.peer, wr_id).unwrap();
        User::send_empty(&self.peer, &self.end, wr_id).unwrap();
        let mut left = 2;
        while left > 0 {
            let wc = self.share.wait(LONG).unwrap().expect("a completion");
            if wc.qpn != self.end.qp.qpn() {
                others.push(wc);
                continue;
            }
            assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
            left -= 1;
        }
        for _ in 0..2 {
            let wc = self.peer.cq.wait(LONG).unwrap().expect("a completion");
            assert_eq!(wc.status, Status::Success);
        }
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

fn devices(net: u8, shared_memory: SharedMemory) -> [Device; 2] {
    [1, 2].map(|host| {
        let options = Options {
            shared_memory,
            ..Options::default()
        };
        common::open_with(IpAddr::from([127, 56, net, host]), options).unwrap()
    })
}

/// Runs a test with the peer reached through shared memory, and by packets.
fn by_either_carrier(net: u8, test: impl Fn(CqPool, [&Device; 2], bool)) {
    for shared in [true, false] {
        let devices = devices(
            net + u8::from(shared),
            match shared {
                true => SharedMemory::Auto,
                false => SharedMemory::Off,
            },
        );
        let pool = CqPool::new(vec![devices[0].clone()], 64);
        test(pool, [&devices[0], &devices[1]], shared);
    }
}

#[test]
fn get__grows_by_an_array_and_keeps_what_was_made() {
    let [one, _other] = devices(1, SharedMemory::Auto);
    let engine = one.open_engine().unwrap();
    let pool = CqPool::new(vec![one.clone(), engine.clone()], 16);
    assert!(pool.usage().is_empty() && pool.queues(0).is_empty());
    let first = pool.get(10, None).unwrap();
    assert_eq!(
        (first.vector(), first.nr()),
        (1, 10),
        "the counter is incremented first"
    );
    let second = pool.get(10, Some(3)).unwrap();
    assert!(!second.is(&first) && second.device().is(&engine), "no room");
    let third = pool.get(6, Some(1)).unwrap();
    assert!(third.is(&second), "the head of the list");
    let fourth = pool.get(6, Some(1)).unwrap();
    assert!(fourth.is(&first));
    let usage = |pool: &CqPool| -> Vec<_> {
        let all = pool.usage().into_iter();
        all.map(|queue| (queue.vector, queue.used, queue.size, queue.users))
            .collect()
    };
    let expected = [(0, 0, 16, 0), (1, 16, 16, 2), (0, 0, 16, 0), (1, 16, 16, 2)];
    assert_eq!(usage(&pool), expected);
    assert_eq!([&one, &engine].map(|device| device.object_counts().2), [2, 2]);
    let clone = fourth.clone();
    drop((first, second, third, fourth));
    assert_eq!(usage(&pool)[1], (1, 6, 16, 1), "a clone is the same user");
    drop(clone);
    assert!(usage(&pool).iter().all(|queue| queue.1 == 0 && queue.3 == 0));
    assert_eq!(engine.object_counts().2, 2, "the pool keeps its queues");
    drop(pool);
    assert_eq!(engine.object_counts().2, 0);
}

#[test]
fn get__of_a_user_that_outlives_pool_and_device() {
    let [own, peer] = devices(2, SharedMemory::Auto);
    let pool = CqPool::new(vec![own.clone()], 16);
    let user = User::new(&pool, 16, [&own, &peer], true);
    drop((pool, own, peer));
    for wr_id in 0..10 {
        user.ping(wr_id, &mut Vec::new());
    }
    assert!(matches!(user.share.resize(20), Err(ResizeError::NoRoom)));
}

#[test]
fn create_qp__needs_a_share() {
    let [device, _] = devices(3, SharedMemory::Auto);
    let pool = CqPool::new(vec![device.clone()], 16);
    let share = pool.get(4, None).unwrap();
    let pd = device.alloc_pd().unwrap();
    let [whole] = &pool.queues(0)[..] else {
        panic!("one queue")
    };
    assert!(whole.is(&share));
    for cq in [whole, &share.pool_queue()] {
        let refused = pd.create_qp(&QpOptions::new(cq)).map(drop);
        assert!(matches!(refused, Err(CreateError::NoShare)));
    }
    let xrcd = device.alloc_xrcd().unwrap();
    let refused = pd.create_xrc_srq(4, &xrcd, &share).map(drop);
    assert!(matches!(refused, Err(CreateError::NoShare)));
    assert!(matches!(whole.resize(100), Err(ResizeError::Pooled)));
    pd.create_qp(&QpOptions::new(&share)).unwrap();
    // Two shares of a queue would count each other's completions.
    let other = pool.get(4, None).unwrap();
    let mut options = QpOptions::new(&share);
    options.recv_cq = other.queue();
    let refused = pd.create_qp(&options).map(drop);
    assert!(other.is(&share) && matches!(refused, Err(CreateError::TwoShares)));
    options.recv_cq = share.queue();
    pd.create_qp(&options).unwrap();
}

#[test]
fn resize__of_a_share() {
    let [device, _] = devices(4, SharedMemory::Auto);
    let pool = CqPool::new(vec![device.clone()], 16);
    let [one, other] = [4, 4].map(|nr| pool.get(nr, None).unwrap());
    assert!(matches!(one.resize(13), Err(ResizeError::NoRoom)));
    one.resize(12).unwrap();
    assert!(matches!(other.resize(5), Err(ResizeError::NoRoom)));
    // The queue pair's completions are as many as the share has now, and no less.
    let pd = device.alloc_pd().unwrap();
    let qp = pd.create_qp(&QpOptions::new(&one)).unwrap();
    qp.init().unwrap();
    for wr_id in 0..12 {
        let sges = SgeList::EMPTY;
        qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    assert!(!one.has_lost(&qp));
    assert!(matches!(one.resize(11), Err(ResizeError::TooShort)));
    assert!(other.poll().is_some());
    one.resize(11).unwrap();
    other.resize(5).unwrap();
    assert_eq!((one.nr(), other.nr(), pool.usage()[0].used), (11, 5, 16));
}

#[test]
fn get__completions_of_a_user_that_is_gone_take_room_until_they_are_polled() {
    let [device, _] = devices(5, SharedMemory::Auto);
    let pool = CqPool::new(vec![device.clone()], 8);
    let share = pool.get(8, None).unwrap();
    let qp = device
        .alloc_pd()
        .unwrap()
        .create_qp(&QpOptions::new(&share))
        .unwrap();
    qp.init().unwrap();
    for wr_id in 0..8 {
        let sges = SgeList::EMPTY;
        qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    let queue = share.pool_queue();
    drop((share, qp));
    assert_eq!(pool.usage()[0].used, 0);
    let elsewhere = pool.get(1, None).unwrap();
    assert!(!elsewhere.is(&queue), "no room");
    assert_eq!(pool.get(8, None).unwrap().nr(), 8);
    (0..3).for_each(|_| assert_eq!(queue.poll().unwrap().status, Status::Flushed));
    let next = pool.get(8, None).unwrap();
    assert!(!next.is(&queue), "in a third one");
    drop(next);
    let fits: Vec<CqShare> = (0..3).map(|_| pool.get(7, None).unwrap()).collect();
    assert!(!fits.iter().any(|share| share.is(&queue)));
    assert!(pool.get(3, None).is_ok_and(|share| share.is(&queue)));
}

#[test]
fn get__a_device_may_be_several_vectors() {
    let [device, _] = devices(6, SharedMemory::Auto);
    let pool = CqPool::new(vec![device.clone(); 3], 8);
    let shares = [0, 1, 2, 3].map(|hint| pool.get(2, Some(hint)).unwrap());
    assert_eq!(device.object_counts().2, 3);
    assert_eq!(shares.each_ref().map(CqShare::vector), [0, 1, 2, 0]);
    assert!(shares[0].is(&shares[3]) && !shares[0].is(&shares[1]));
}

#[test]
fn quota__only_the_user_whose_sends_overrun_its_share_is_in_error() {
    by_either_carrier(10, |pool, devices, shared| {
        let [culprit, other] = [4, 16].map(|nr| User::new(&pool, nr, devices, shared));
        assert!(culprit.share.is(&other.share));
        let mut others = Vec::new();
        other.ping(0, &mut others);
        for wr_id in 0..8 {
            // It polls nothing.
            if User::send_empty(&culprit.end, &culprit.peer, wr_id).is_err() {
                break;
            }
        }
        until("the culprit is not in error", || {
            culprit.end.device.progress();
            culprit.is_in_error()
        });
        assert_eq!(culprit.end.qp.error(), Some(Status::LocalQpOperation));
        assert!(culprit.share.has_lost(&culprit.end.qp) && !other.share.has_lost(&other.end.qp));
        assert_eq!(
            culprit.end.device.wait_async_event(LONG),
            Some(AsyncEvent::QpFatal(culprit.end.qp.qpn()))
        );
        assert_eq!(
            culprit.end.device.poll_async_event(),
            None,
            "no event of the queue"
        );
        for wr_id in 1..200 {
            other.ping(wr_id, &mut others);
        }
        let of_culprit: Vec<_> = others.iter().map(|wc| (wc.qpn, wc.wr_id, wc.status)).collect();
        let expected = |wr_id| (culprit.end.qp.qpn(), wr_id, Status::Success);
        assert_eq!(
            of_culprit,
            [0, 1, 2, 3].map(expected),
            "the first ones, and none behind a gap"
        );
        assert!(!other.is_in_error());
    });
}

#[test]
fn quota__only_the_user_whose_receives_overrun_its_share_is_in_error() {
    by_either_carrier(20, |pool, devices, shared| {
        let [culprit, other] = [4, 16].map(|nr| User::new(&pool, nr, devices, shared));
        for wr_id in 0..8 {
            if User::send_empty(&culprit.peer, &culprit.end, wr_id).is_err() {
                break;
            }
        }
        until("the culprit is not in error", || {
            culprit.peer.device.progress();
            culprit.end.device.progress();
            culprit.is_in_error()
        });
        let mut others = Vec::new();
        for wr_id in 0..200 {
            other.ping(wr_id, &mut others);
        }
        let received: Vec<_> = others.iter().map(|wc| wc.wr_id).collect();
        assert_eq!(received, [0, 1, 2, 3]);
        assert_eq!(culprit.end.qp.error(), Some(Status::LocalQpOperation));
        assert!(!other.is_in_error());
    });
}

#[test]
fn quota__as_many_as_the_share_has_again_and_again() {
    by_either_carrier(30, |pool, devices, shared| {
        let user = User::new(&pool, 4, devices, shared);
        for round in 0..100 {
            for wr_id in 0..4 {
                User::send_empty(&user.end, &user.peer, 4 * round + wr_id).unwrap();
            }
            for wr_id in 0..4 {
                let wc = user.share.wait(LONG).unwrap().expect("a completion");
                assert_eq!((wc.wr_id, wc.status), (4 * round + wr_id, Status::Success));
            }
            while user.peer.cq.poll().is_some() {}
        }
        assert!(!user.share.has_lost(&user.end.qp));
    });
}

/// Makes a queue pair of a share, and has it complete so many receives.
fn flushed(share: &CqShare, receives: u64) -> QueuePair {
    let pd = share.device().alloc_pd().unwrap();
    let qp = pd.create_qp(&QpOptions::new(share)).unwrap();
    qp.init().unwrap();
    for wr_id in 0..receives {
        let sges = SgeList::EMPTY;
        qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    qp
}

/// A user that makes one queue pair after the other fills its own share, and not the queue.
#[test]
fn quota__queue_pairs_that_are_gone_count_until_they_are_polled() {
    let [device, _] = devices(34, SharedMemory::Auto);
    let pool = CqPool::new(vec![device.clone()], 8);
    let [one, other] = [4, 4].map(|nr| pool.get(nr, None).unwrap());
    let others = flushed(&other, 3);
    drop(flushed(&one, 4));
    let again = flushed(&one, 4);
    assert!(one.has_lost(&again) && !other.has_lost(&others));
    let queue = one.pool_queue();
    assert_eq!(std::iter::from_fn(|| queue.poll()).count(), 7);
    let mut events = std::iter::from_fn(|| device.poll_async_event());
    assert!(!events.any(|event| matches!(event, AsyncEvent::CqError(_))));
    let once_more = flushed(&one, 4);
    assert!(!one.has_lost(&once_more));
    assert_eq!(std::iter::from_fn(|| queue.poll()).count(), 4);
}

#[test]
fn with_common__users_of_every_queue_draw_on_it() {
    let [device, _] = devices(41, SharedMemory::Auto);
    let pool = CqPool::with_common(vec![device.clone()], 16, 4);
    let mut shares: Vec<CqShare> = (0..4).map(|_| pool.get(4, None).unwrap()).collect();
    let usage = || -> Vec<_> {
        let all = pool.usage().into_iter();
        all.map(|queue| (queue.used, queue.size, queue.users)).collect()
    };
    assert_eq!(usage(), [(16, 16, 4), (8, 16, 2)]);
    assert!(!shares[0].is(&shares[3]), "the first queue is full");
    // A user of the first queue takes all that is in common there, and one of the second queue has as much.
    for share in [&shares[0], &shares[3]] {
        let qp = flushed(share, 8);
        assert!(!share.has_lost(&qp));
        assert_eq!(std::iter::from_fn(|| share.poll()).count(), 8);
        let one_more = flushed(share, 9);
        assert!(share.has_lost(&one_more));
        assert_eq!(std::iter::from_fn(|| share.poll()).count(), 8);
    }
    shares.clear();
    assert_eq!(usage(), [(4, 16, 1), (4, 16, 1)]);
    let most = pool.get(12, None).unwrap();
    assert_eq!((most.nr(), usage()), (12, vec![(4, 16, 1), (16, 16, 2)]));
    let longer = pool.get(17, None).unwrap();
    assert_eq!((longer.nr(), usage()[2]), (17, (21, 21, 2)));
    drop(pool);
    let qp = flushed(&most, 16);
    assert!(!most.has_lost(&qp), "what is in common outlives the pool");
}

/// Waits by the descriptor alone; another thread drives the device.
fn is_readable(user: &PoolUser, timeout: Duration) -> bool {
    let timeout = timeout.try_into().unwrap();
    poll(&mut [PollFd::new(user, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

#[test]
fn user__each_gets_its_own_whoever_polls() {
    by_either_carrier(50, |pool, devices, shared| {
        let users: Vec<User> = (0..4).map(|_| User::new(&pool, 16, devices, shared)).collect();
        thread::scope(|scope| {
            for user in &users {
                scope.spawn(move || {
                    let own = user.share.user().unwrap();
                    for round in 0..500 {
                        User::send_empty(&user.end, &user.peer, 2 * round).unwrap();
                        User::send_empty(&user.end, &user.peer, 2 * round + 1).unwrap();
                        for wr_id in [2 * round, 2 * round + 1] {
                            let wc = own.wait(LONG).unwrap().expect("a completion");
                            let found = (wc.qpn, wc.wr_id, wc.status);
                            assert_eq!(found, (user.end.qp.qpn(), wr_id, Status::Success));
                        }
                        while user.peer.cq.poll().is_some() {}
                    }
                });
            }
        });
        let left: Vec<_> = pool.queues(0)[0].poll().into_iter().collect();
        assert_eq!(left, []);
    });
}

#[test]
fn user__one_that_never_polls_overruns_its_share_alone() {
    by_either_carrier(60, |pool, devices, shared| {
        let [silent, busy] = [4, 16].map(|nr| User::new(&pool, nr, devices, shared));
        let [of_silent, of_busy] = [&silent, &busy].map(|user| user.share.user().unwrap());
        let ping = |wr_id| {
            User::send_empty(&busy.end, &busy.peer, wr_id).unwrap();
            let wc = of_busy.wait(LONG).unwrap().expect("a completion");
            assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
        };
        // The busy one takes all of them out of the queue, four at most, which wait in the other one's inbox.
        for wr_id in 0..8 {
            if User::send_empty(&silent.end, &silent.peer, wr_id).is_err() {
                break;
            }
            ping(wr_id);
        }
        until("it is not in error", || {
            assert_eq!(of_busy.poll(), None);
            silent.is_in_error()
        });
        assert_eq!(silent.end.qp.error(), Some(Status::LocalQpOperation));
        (100..300).for_each(ping);
        let taken: Vec<_> = std::iter::from_fn(|| of_silent.poll())
            .map(|wc| wc.wr_id)
            .collect();
        assert_eq!(taken, [0, 1, 2, 3]);
        assert!(!busy.is_in_error());
        // Brought to Reset, it has room again.
        silent
            .end
            .qp
            .modify(QpState::Reset, &QpAttributes::default())
            .unwrap();
        assert!(!silent.share.has_lost(&silent.end.qp));
    });
}

#[test]
fn arm__of_a_user_whose_completions_another_one_takes() {
    let devices = devices(70, SharedMemory::Auto);
    let pool = CqPool::new(vec![devices[0].clone()], 64);
    let [one, other] = [8, 8].map(|nr| User::new(&pool, nr, [&devices[0], &devices[1]], true));
    let [of_one, of_other] = [&one, &other].map(|user| user.share.user().unwrap());
    assert_eq!(
        one.share.user().map(drop).unwrap_err().kind(),
        std::io::ErrorKind::AlreadyExists
    );
    for arm in [Arm::Next, Arm::Solicited] {
        for rearms in [false, true] {
            of_one.arm(arm);
            assert!(!is_readable(&of_one, Duration::ZERO));
            // A completion of an error is solicited.
            match arm {
                Arm::Next => User::send_empty(&one.end, &one.peer, 1).unwrap(),
                Arm::Solicited => {
                    let sges = SgeList::EMPTY;
                    one.end
                        .qp
                        .modify(QpState::Error, &QpAttributes::default())
                        .unwrap();
                    one.end.qp.post_recv(RecvRequest { wr_id: 1, sges }).unwrap();
                }
            }
            until("nothing came", || {
                if rearms {
                    of_other.arm(Arm::Next);
                }
                assert_eq!(of_other.poll(), None);
                is_readable(&of_one, Duration::ZERO)
            });
            assert_eq!(of_one.poll().map(|wc| wc.wr_id), Some(1));
            while one.peer.cq.poll().is_some() {}
            if arm == Arm::Next {
                let (later, none) = (User::send_empty(&one.end, &one.peer, 2), of_one.poll());
                later.unwrap();
                let second = none.or_else(|| of_one.wait(LONG).unwrap()).expect("a completion");
                assert_eq!(second.wr_id, 2);
                while one.peer.cq.poll().is_some() {}
            }
        }
    }
    // Asleep, each is woken by its own.
    thread::scope(|scope| {
        let waits = scope.spawn(|| of_other.wait(LONG).unwrap().expect("a completion"));
        User::send_empty(&other.end, &other.peer, 9).unwrap();
        assert_eq!(waits.join().unwrap().wr_id, 9);
    });
    assert_eq!(of_other.wait(Duration::ZERO).unwrap(), None);
    assert_eq!(of_other.wait(Duration::from_millis(5)).unwrap(), None);
}

#[test]
fn user__that_is_gone_leaves_nothing() {
    let devices = devices(71, SharedMemory::Auto);
    let pool = CqPool::new(vec![devices[0].clone()], 64);
    let [stays, goes] = [8, 8].map(|nr| User::new(&pool, nr, [&devices[0], &devices[1]], true));
    let [of_stays, of_goes] = [&stays, &goes].map(|user| user.share.user().unwrap());
    let fill = || {
        (0..8).for_each(|wr_id| User::send_empty(&goes.end, &goes.peer, wr_id).unwrap());
        let done = || goes.end.qp.query().is_some_and(|info| info.send_outstanding == 0);
        until("they are not done", || {
            assert_eq!(of_stays.poll(), None);
            done()
        });
        assert_eq!(of_stays.poll(), None);
        while goes.peer.cq.poll().is_some() {}
    };
    fill();
    drop(of_goes);
    // The next user of the share begins with its whole number.
    let again = goes.share.user().unwrap();
    assert_eq!(again.poll(), None);
    fill();
    for wr_id in 0..8 {
        assert_eq!(again.poll().map(|wc| wc.wr_id), Some(wr_id));
    }
    fill();
    goes.end
        .qp
        .modify(QpState::Reset, &QpAttributes::default())
        .unwrap();
    assert_eq!(again.poll(), None, "discarded");
}

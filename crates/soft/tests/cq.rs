//! Completion queues: their vectors, length, moderation, times.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::{LONG, connect};
use rdmux_verbs::moderation::dim;
use rdmux_verbs::*;
use rustix::event::{PollFd, PollFlags, poll};

/// A queue pair that is connected to one of the same process, and the queue for the completions of its sends.
struct Bed {
    _connections: [Connection; 2],
    cq: CompletionQueue,
    pairs: [QueuePair; 2],
}

impl Bed {
    fn new(address: [u8; 4]) -> Bed {
        let device = common::open(IpAddr::from(address)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let [cq, other] = [16, 64].map(|depth| device.create_cq(depth).unwrap());
        let pairs = [&cq, &other].map(|cq| pd.create_qp(&QpOptions::new(cq)).unwrap());
        let _connections = connect(&pairs[0], &pairs[1], &ConnectParams::default());
        Bed {
            _connections,
            cq,
            pairs,
        }
    }

    fn send(&self, wr_id: u64) {
        let sges = SgeList::EMPTY;
        self.pairs[1].post_recv(RecvRequest { wr_id, sges }).unwrap();
        let request = SendRequest {
            wr_id,
            operation: Operation::Send { imm: None },
            sges: SgeList::EMPTY,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.pairs[0].post_send(request).unwrap();
    }

    /// Waits by the descriptor alone; another thread drives the device.
    fn is_told(&self) -> bool {
        let timeout = LONG.try_into().unwrap();
        poll(&mut [PollFd::new(&self.cq, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    }
}

#[test]
fn create_cq_on__a_vector_for_each_cpu() {
    let device = common::open([127, 27, 0, 4].into()).unwrap();
    let count = device.completion_vectors();
    assert!(count >= 1);
    device.create_cq_on(4, count - 1).unwrap();
    let events = EventQueue::new().unwrap();
    device.create_cq_reporting_on(4, count - 1, &events, 1).unwrap();
    for vector in [count, u32::MAX] {
        let refused = device.create_cq_on(4, vector).unwrap_err();
        assert!(matches!(refused, CreateError::NoVector { .. }), "{refused}");
        let refused = device.create_cq_reporting_on(4, vector, &events, 1).unwrap_err();
        assert!(matches!(refused, CreateError::NoVector { .. }), "{refused}");
    }
    assert_eq!(device.object_counts().2, 0);
}

#[test]
fn moderate__who_sleeps_is_told_by_count_and_by_age() {
    let bed = Bed::new([127, 27, 0, 1]);
    let mut taken = VecDeque::new();
    for (count, period_us, sends) in [(3, u16::MAX, 3), (100, 1000, 2)] {
        bed.cq
            .moderate(ModerationPolicy::Fixed(Moderation { count, period_us }))
            .unwrap();
        bed.cq.arm(Arm::Next);
        (0..sends).for_each(|wr_id| bed.send(wr_id));
        assert!(bed.is_told());
        while taken.len() < sends as usize {
            taken.push_back(bed.cq.wait(LONG).unwrap().expect("a completion"));
        }
        taken.clear();
    }
    bed.cq.moderate(ModerationPolicy::Off).unwrap();
    bed.cq.arm(Arm::Next);
    bed.send(0);
    assert!(bed.is_told());
}

#[test]
fn moderate__an_adaptive_policy_counts_each_arming_after_an_event() {
    let bed = Bed::new([127, 27, 0, 6]);
    let profile_of = |count: u16| dim::PROFILES.iter().position(|profile| profile.count == count);
    bed.cq.moderate(ModerationPolicy::Dim).unwrap();
    let mut highest = 0;
    // Windows of 64 events; each event of the second window brings ten times as many completions.
    for sends in [1, 10, 14, 14] {
        for event in 0..70 {
            bed.cq.arm(Arm::Next);
            (0..sends).for_each(|i| bed.send(event * sends + i));
            assert!(bed.is_told());
            assert!(
                bed.cq.take_event(),
                "the event is taken before the queue is armed again"
            );
            for _ in 0..sends {
                bed.cq.wait(LONG).unwrap().expect("a completion");
            }
        }
        let (policy, moderation) = bed.cq.moderation();
        assert_eq!(policy, ModerationPolicy::Dim);
        highest = highest.max(profile_of(moderation.unwrap().count).unwrap());
    }
    assert!(highest > 0, "the load rose, and the profile did not");
    bed.cq.moderate(ModerationPolicy::Off).unwrap();
    assert_eq!(bed.cq.moderation(), (ModerationPolicy::Off, None));
}

#[test]
fn resize__of_a_queue_in_use() {
    let bed = Bed::new([127, 27, 0, 2]);
    (0..16).for_each(|wr_id| bed.send(wr_id));
    bed.cq.resize(40).unwrap();
    (16..40).for_each(|wr_id| bed.send(wr_id));
    for wr_id in 0..3 {
        let wc = bed.cq.wait(LONG).unwrap().expect("a completion");
        assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
    }
    let all_came = || {
        bed.pairs[0]
            .query()
            .is_some_and(|info| info.send_outstanding == 0)
    };
    while !all_came() {
        std::thread::yield_now();
    }
    assert!(matches!(bed.cq.resize(36), Err(ResizeError::TooShort)));
    bed.cq.resize(37).unwrap();
    for wr_id in 3..40 {
        let wc = bed.cq.wait(LONG).unwrap().expect("a completion");
        assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
    }
}

#[test]
fn keep_times__of_each_completion() {
    let bed = Bed::new([127, 27, 0, 3]);
    bed.cq.keep_times().unwrap();
    let began = Instant::now();
    (0..8).for_each(|wr_id| bed.send(wr_id));
    let mut last = began;
    for wr_id in 0..8 {
        let (wc, came) = loop {
            if let Some(found) = bed.cq.poll_with_time() {
                break found;
            }
            assert!(began.elapsed() < LONG);
        };
        assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
        assert!(
            last <= came + Duration::from_nanos(1) && came <= Instant::now(),
            "{wr_id}"
        );
        last = came;
    }
}

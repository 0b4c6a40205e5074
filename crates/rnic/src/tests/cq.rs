//! Completion queues: moderation, resizing, and times.

use super::util::*;
use crate::*;

/// A side whose queue pair is in error: each receive that is posted completes at once.
struct Bed {
    pair: Pair,
    cq: Cqn,
}

impl Bed {
    fn new() -> Bed {
        let mut pair = Pair::new();
        pair.modify(0, QpState::Error, &QpAttributes::default());
        let cq = pair.sides[0].cq;
        Bed { pair, cq }
    }

    fn rnic(&mut self) -> &mut Rnic {
        &mut self.pair.sides[0].rnic
    }

    /// Completes a request `ns` after the beginning; returns whether an event is raised.
    fn complete(&mut self, ns: u64, wr_id: u64) -> bool {
        let (now, qpn) = (self.pair.now + ns, self.pair.sides[0].qpn);
        let sges = SgeList::EMPTY;
        self.rnic()
            .post_recv(now, qpn, RecvRequest { wr_id, sges })
            .unwrap();
        self.is_told()
    }

    fn is_told(&mut self) -> bool {
        let cq = self.cq;
        let events: Vec<Event> = std::iter::from_fn(|| self.rnic().poll_event()).collect();
        assert!(events.len() <= 1, "{events:?}");
        events.contains(&Event::Completion(cq))
    }

    fn moderate(&mut self, count: u16, period_us: u16) {
        let cq = self.cq;
        let moderation = Some(Moderation { count, period_us });
        self.rnic().moderate_cq(cq, ModerationKind::Fixed, moderation);
        self.rnic().arm_cq(cq, Arm::Next);
    }
}

#[test]
fn moderation__tells_at_the_count() {
    let mut bed = Bed::new();
    bed.moderate(3, 10);
    for round in 0..2 {
        assert!(!bed.complete(0, 0) && !bed.complete(0, 1), "round {round}");
        assert!(bed.complete(0, 2), "round {round}");
        assert!(!bed.complete(0, 3), "not armed");
        let cq = bed.cq;
        bed.rnic().arm_cq(cq, Arm::Next);
    }
}

#[test]
fn moderation__tells_when_the_first_is_old() {
    let mut bed = Bed::new();
    bed.moderate(100, 10);
    let before = bed.rnic().poll_timeout();
    assert!(!bed.complete(0, 0) && !bed.complete(4_000, 1));
    let due = bed.pair.now + 10_000;
    assert_ne!(before, Some(due));
    assert_eq!(
        bed.rnic().poll_timeout(),
        Some(due),
        "of the first, not of the second"
    );
    bed.rnic().handle_timeout(Time(due.0 - 1));
    assert!(!bed.is_told());
    bed.rnic().handle_timeout(due);
    assert!(bed.is_told());
    assert!(!bed.complete(20_000, 2), "not armed any more");
    assert_eq!(bed.rnic().poll_timeout(), before);
}

#[test]
fn moderation__a_time_that_was_for_an_earlier_waiter_tells_nobody() {
    let mut bed = Bed::new();
    bed.moderate(2, 10);
    assert!(!bed.complete(0, 0) && bed.complete(1, 1));
    let cq = bed.cq;
    bed.rnic().arm_cq(cq, Arm::Next);
    assert!(!bed.complete(5_000, 2));
    let now = bed.pair.now;
    bed.rnic().handle_timeout(now + 10_000);
    assert!(!bed.is_told());
    bed.rnic().handle_timeout(now + 15_000);
    assert!(bed.is_told());
}

#[test]
fn moderation__begins_anew_when_an_armed_queue_is_armed() {
    let mut bed = Bed::new();
    bed.moderate(2, 10);
    assert!(!bed.complete(0, 0));
    let (cq, now) = (bed.cq, bed.pair.now);
    bed.rnic().arm_cq(cq, Arm::Next);
    bed.rnic().handle_timeout(now + 10_000);
    assert!(!bed.is_told(), "who arms the queue polls after that");
    assert!(!bed.complete(0, 1), "the first since then");
    assert!(bed.complete(0, 2));
}

#[test]
fn moderation__armed_for_each_completion_has_one_timer() {
    let mut bed = Bed::new();
    bed.moderate(100, 10);
    let cq = bed.cq;
    let began = bed.pair.now;
    for wr_id in 0..5 {
        assert!(!bed.complete(1_000, wr_id));
        let due = bed.rnic().poll_timeout();
        assert_eq!(due, Some(began + 11_000), "that of the first, cancelled as it is");
        bed.rnic().arm_cq(cq, Arm::Next);
    }
    // It is not due when that has come: nothing has arrived since the queue was armed.
    bed.rnic().handle_timeout(began + 11_000);
    assert!(!bed.is_told());
    // The timer of the one that is due begins anew.
    assert!(!bed.complete(0, 5));
    let now = bed.pair.now;
    bed.rnic().handle_timeout(now + 10_000);
    assert!(bed.is_told());
}

#[test]
fn moderation__of_one_or_of_no_time_is_none() {
    for (count, period_us) in [(0, 0), (0, 10), (1, 10), (5, 0)] {
        let mut bed = Bed::new();
        bed.moderate(count, period_us);
        assert!(bed.complete(0, 0), "{count} {period_us}");
    }
}

#[test]
fn resize__keeps_what_is_there_and_holds_what_it_says() {
    let mut bed = Bed::new();
    let cq = bed.cq;
    for wr_id in 0..3 {
        bed.complete(0, wr_id);
    }
    assert_eq!(bed.rnic().resize_cq(cq, 2), Err(TooShort));
    assert_eq!(bed.rnic().resize_cq(cq, 3), Ok(()));
    bed.rnic().poll_cq(cq).unwrap();
    bed.complete(0, 3);
    assert_eq!(bed.rnic().cq_state(cq), Some((3, false)));
    assert_eq!(bed.rnic().resize_cq(cq, 4), Ok(()));
    bed.complete(0, 4);
    assert_eq!(bed.rnic().cq_state(cq), Some((4, false)));
    bed.complete(0, 5);
    assert_eq!(bed.rnic().cq_state(cq), Some((4, true)), "one too many");
    let left: Vec<u64> = bed.pair.sides[0]
        .completed()
        .iter()
        .map(|(wr_id, _)| *wr_id)
        .collect();
    assert_eq!(left, [1, 2, 3, 4]);
}

#[test]
fn times__stay_with_their_completions() {
    let mut bed = Bed::new();
    let (cq, now) = (bed.cq, bed.pair.now);
    bed.complete(0, 0);
    bed.rnic().keep_cq_times(cq);
    let queue = bed.rnic().cq(cq).unwrap();
    for wr_id in 1..7 {
        bed.complete(wr_id * 100, wr_id);
    }
    let next = || queue.poll_with_time().map(|(wc, came)| (wc.wr_id, came));
    assert_eq!(next(), Some((0, Time::default())), "came before times were kept");
    assert_eq!(next(), Some((1, now + 100)));
    assert_eq!(queue.poll().unwrap().wr_id, 2);
    assert_eq!(next(), Some((3, now + 300)));
    let mut taken = std::collections::VecDeque::new();
    assert_eq!(queue.poll_many(2, &mut taken), 2);
    assert_eq!(next(), Some((6, now + 600)));
    assert_eq!(next(), None);
    // Reset discards the queue pair's completions together with their times.
    bed.complete(700, 7);
    bed.pair.modify(0, QpState::Reset, &QpAttributes::default());
    assert_eq!(next(), None);
}

#[test]
fn poll_into__takes_the_oldest_and_their_times() {
    let mut bed = Bed::new();
    let (cq, now) = (bed.cq, bed.pair.now);
    bed.rnic().keep_cq_times(cq);
    let queue = bed.rnic().cq(cq).unwrap();
    for wr_id in 1..6 {
        bed.complete(wr_id * 100, wr_id);
    }
    let mut taken = [WorkCompletion::default(); 3];
    assert_eq!(queue.poll_into(&mut taken), 3);
    assert_eq!(taken.map(|wc| wc.wr_id), [1, 2, 3]);
    let next = queue.poll_with_time().map(|(wc, came)| (wc.wr_id, came));
    assert_eq!(next, Some((4, now + 400)));
    assert_eq!(queue.poll_into(&mut taken), 1);
    assert_eq!(taken.map(|wc| wc.wr_id), [5, 2, 3], "the rest of the slice stays");
    assert_eq!(queue.poll_into(&mut taken), 0);
}

#[test]
fn armed_queues__any_until_told_or_destroyed() {
    let mut bed = Bed::new();
    let armed = bed.rnic().armed_queues();
    let (cq, other) = (bed.cq, bed.rnic().create_cq_on(4, 7));
    assert!(!armed.any());
    bed.rnic().arm_cq(cq, Arm::Solicited);
    bed.rnic().arm_cq(cq, Arm::Next);
    assert!(armed.any());
    assert!(bed.complete(0, 0) && !armed.any(), "told");
    assert!(!bed.complete(0, 1) && !armed.any(), "not armed");

    bed.rnic().arm_cq(cq, Arm::Next);
    bed.rnic().arm_cq(other, Arm::Next);
    assert!(bed.complete(0, 2) && armed.any(), "the other one is");
    bed.rnic().destroy_cq(other);
    assert!(!armed.any(), "destroyed");

    bed.moderate(2, 10);
    assert!(!bed.complete(0, 3) && armed.any(), "to be told later");
    let due = bed.pair.now + 10_000;
    bed.rnic().handle_timeout(due);
    assert!(bed.is_told() && !armed.any(), "told at its time");
}

#[test]
fn arm__solicited_tells_of_solicited_messages_and_errors() {
    let mut pair = Pair::new();
    let cq = pair.sides[1].cq;
    pair.sides[1].rnic.arm_cq(cq, Arm::Solicited);
    for (flags, told) in [(SendFlags::empty(), false), (SendFlags::SOLICITED, true)] {
        pair.recv(1, 0, 0, 64);
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Send { imm: None },
            sges: SgeList::inline(b"message"),
            flags,
            to: Target::Connected,
        };
        let side = &mut pair.sides[0];
        side.rnic.post_send(pair.now, side.qpn, request).unwrap();
        pair.run();
        assert_eq!(pair.sides[1].completions().len(), 1);
        let event = pair.sides[1].rnic.poll_event();
        assert_eq!(event, told.then_some(Event::Completion(cq)), "{flags:?}");
    }

    let mut bed = Bed::new();
    let cq = bed.cq;
    bed.rnic().arm_cq(cq, Arm::Solicited);
    assert!(bed.complete(0, 0), "an error");
}

#[test]
fn keep_times__of_others_stay_when_a_queue_pair_is_forgotten() {
    let mut bed = Bed::new();
    let (other, _) = bed.pair.second_qps();
    bed.pair.sides[0]
        .rnic
        .modify_qp(bed.pair.now, other, QpState::Error, &QpAttributes::default())
        .unwrap();
    let (cq, now, first) = (bed.cq, bed.pair.now, bed.pair.sides[0].qpn);
    bed.rnic().keep_cq_times(cq);
    for (wr_id, qpn) in [(1, first), (2, other), (3, other), (4, first), (5, other)] {
        let sges = SgeList::EMPTY;
        let request = RecvRequest { wr_id, sges };
        bed.rnic().post_recv(now + 100 * wr_id, qpn, request).unwrap();
    }
    bed.pair.modify(0, QpState::Reset, &QpAttributes::default());
    let queue = bed.rnic().cq(cq).unwrap();
    let left = std::iter::from_fn(|| queue.poll_with_time().map(|(wc, came)| (wc.wr_id, came)));
    assert_eq!(
        left.collect::<Vec<_>>(),
        [2, 3, 5].map(|wr_id| (wr_id, now + 100 * wr_id))
    );
}

#[test]
fn is_notified__until_it_is_taken_or_the_queue_is_armed_again() {
    let mut bed = Bed::new();
    let (cq, due) = (bed.cq, bed.pair.now + 10_000);
    let queue = bed.rnic().cq(cq).unwrap();
    assert!(!bed.complete(0, 0) && !queue.is_notified(), "not armed");
    queue.arm(Arm::Next);
    assert!(!queue.is_notified(), "of what is in the queue already");
    assert!(bed.complete(0, 1) && queue.is_notified());
    assert!(!bed.complete(0, 2) && queue.is_notified(), "still pending");
    queue.take_notification();
    assert!(!queue.is_notified(), "taken");

    queue.arm(Arm::Next);
    assert!(bed.complete(0, 3) && queue.is_notified());
    bed.moderate(2, 10);
    assert!(!queue.is_notified(), "armed again");
    assert!(!bed.complete(0, 4) && !queue.is_notified(), "to be told later");
    bed.rnic().handle_timeout(due);
    assert!(bed.is_told() && queue.is_notified(), "told at its time");
}

#[test]
fn watch__tells_of_one_completion_whatever_the_queue_is_armed_for() {
    let mut bed = Bed::new();
    let cq = bed.cq;
    let queue = bed.rnic().cq(cq).unwrap();
    queue.watch(true);
    assert!(
        bed.complete(0, 0) && !queue.is_notified(),
        "the driver, not a waiter"
    );
    assert!(!bed.complete(0, 1), "one");
    queue.watch(true);
    queue.watch(false);
    assert!(!bed.complete(0, 2), "the driver is awake");
    bed.moderate(3, 10);
    queue.watch(true);
    assert!(
        bed.complete(0, 3) && queue.is_notified(),
        "the waiter together with the driver"
    );
}

#[test]
fn list_cqs__tells_depth_and_fill() {
    let mut bed = Bed::new();
    let (cq, other) = (bed.cq, bed.rnic().create_cq_on(4, 7));
    bed.complete(0, 0);
    bed.rnic().resize_cq(cq, 100).unwrap();
    let (listed, more) = bed.rnic().list_cqs(0, 8);
    let told = |cq: &CqDetail| (cq.cqn, cq.depth, cq.waiting, cq.overrun, cq.users);
    assert_eq!(
        listed.iter().map(told).collect::<Vec<_>>(),
        [(cq, 100, 1, false, 1), (other, 4, 0, false, 0)]
    );
    assert_eq!((listed[0].vector, listed[1].vector), (0, 7));
    assert!(!more);
}

#[test]
fn add_share__only_the_queue_pair_that_exceeds_it_goes_to_error_until_it_is_reset() {
    let mut pair = Pair::new();
    let (first, cq) = (pair.sides[0].qpn, pair.sides[0].cq);
    let (other, _) = pair.second_qps();
    let queue = pair.sides[0].rnic.cq(cq).unwrap();
    for qpn in [first, other] {
        let share = queue.add_share(2);
        queue.add_user(qpn, share);
    }
    let now = pair.now;
    let write = |pair: &mut Pair, qpn, wr_id| {
        let request = SendRequest {
            wr_id,
            operation: Operation::Write {
                va: IOVA,
                rkey: pair.sides[1].rkey,
                imm: None,
            },
            sges: pair.sides[0].sge(0, 8),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        pair.sides[0].rnic.post_send(now, qpn, request).unwrap();
    };
    (0..4).for_each(|wr_id| write(&mut pair, first, wr_id));
    (4..6).for_each(|wr_id| write(&mut pair, other, wr_id));
    pair.run();
    let rnic = &mut pair.sides[0].rnic;
    let state = |rnic: &Rnic, qpn| rnic.query_qp(qpn).unwrap().state;
    assert_eq!(
        (state(rnic, first), state(rnic, other)),
        (QpState::Error, QpState::Rts)
    );
    let events: Vec<Event> = std::iter::from_fn(|| rnic.poll_event()).collect();
    let failed = Event::QpError(first, Status::LocalQpOperation, Cause::ShareOverrun);
    assert_eq!(events, [failed]);
    assert_eq!(rnic.cq_state(cq), Some((4, false)));
    assert!(queue.has_lost(first) && !queue.has_lost(other));
    let completed = pair.sides[0].completed();
    let wr_ids: Vec<u64> = completed.iter().map(|(wr_id, _)| *wr_id).collect();
    assert_eq!(wr_ids, [0, 1, 4, 5]);
    // Those that would be flushed are lost as well, though there is room.
    let receive = |pair: &mut Pair, wr_id| {
        let sges = SgeList::EMPTY;
        let side = &mut pair.sides[0];
        side.rnic
            .post_recv(now, first, RecvRequest { wr_id, sges })
            .unwrap();
    };
    receive(&mut pair, 6);
    assert!(pair.sides[0].completed().is_empty());
    pair.modify(0, QpState::Reset, &QpAttributes::default());
    assert!(!queue.has_lost(first));
    pair.modify(0, QpState::Error, &QpAttributes::default());
    receive(&mut pair, 7);
    assert_eq!(pair.sides[0].completed().len(), 1);
}

#[test]
fn list_cqs__tells_wake_ups_and_moderation() {
    let mut bed = Bed::new();
    let cq = bed.cq;
    let told = |bed: &mut Bed| bed.rnic().list_cqs(0, 1).0[0].moderation;
    assert_eq!(told(&mut bed), CqModeration::default());
    bed.moderate(2, 10);
    assert!(!bed.complete(0, 0) && bed.complete(0, 1));
    // Nobody is notified of this one.
    assert!(!bed.complete(0, 2));
    assert!(bed.rnic().poll_cq(cq).is_some());
    let fixed = CqModeration {
        kind: ModerationKind::Fixed,
        moderation: Some(Moderation {
            count: 2,
            period_us: 10,
        }),
        changes: 0,
        events: 1,
        taken: 1,
    };
    assert_eq!(told(&mut bed), fixed);
    // An event that comes by its age counts too.
    bed.rnic().arm_cq(cq, Arm::Next);
    assert!(!bed.complete(0, 3));
    let due = bed.pair.now + 10_000;
    bed.rnic().handle_timeout(due);
    assert!(bed.is_told());
    while bed.rnic().poll_cq(cq).is_some() {}
    let moderation = Some(Moderation {
        count: 4,
        period_us: 20,
    });
    for kind in [ModerationKind::Dim, ModerationKind::Dim] {
        bed.rnic().moderate_cq(cq, kind, moderation);
        assert_eq!(
            told(&mut bed).changes,
            0,
            "it is another policy, or the same moderation"
        );
    }
    bed.rnic().moderate_cq(cq, ModerationKind::Dim, None);
    let dim = CqModeration {
        kind: ModerationKind::Dim,
        moderation: None,
        changes: 1,
        events: 2,
        taken: 4,
    };
    assert_eq!(told(&mut bed), dim);
}

#[test]
fn counters__of_completion_queues_that_are_there_and_that_were() {
    let mut bed = Bed::new();
    let counted = |bed: &mut Bed| {
        let counters = bed.rnic().counters();
        (
            counters.cq_events,
            counters.cq_completions,
            counters.cq_moderation_changes,
        )
    };
    bed.moderate(1, 10);
    assert!(bed.complete(0, 0) && !bed.complete(0, 1));
    let cq = bed.cq;
    assert!(bed.rnic().poll_cq(cq).is_some());
    let other = bed.rnic().create_cq(4);
    for moderation in [None, Some((4, 1)), Some((8, 2))] {
        let moderation = moderation.map(|(count, period_us)| Moderation { count, period_us });
        bed.rnic().moderate_cq(other, ModerationKind::Rate, moderation);
    }
    assert_eq!(counted(&mut bed), (1, 1, 2));
    bed.rnic().destroy_cq(other);
    assert_eq!(counted(&mut bed), (1, 1, 2));
    assert!(bed.rnic().poll_cq(cq).is_some());
    bed.rnic().destroy_cq(cq);
    assert_eq!(counted(&mut bed), (1, 2, 2));
}

#[test]
fn list_cqs__completions_that_a_reset_discards_were_not_taken() {
    let mut bed = Bed::new();
    let cq = bed.cq;
    bed.complete(0, 0);
    bed.complete(0, 1);
    assert!(bed.rnic().poll_cq(cq).is_some());
    bed.pair.modify(0, QpState::Reset, &QpAttributes::default());
    let cq = bed.rnic().list_cqs(0, 1).0[0];
    assert_eq!((cq.waiting, cq.moderation.taken), (0, 1));
}

#[test]
fn deliver__to_a_queue_of_no_engine() {
    let armed = ArmedQueues::default();
    let queue = CompletionQueue::without_engine(2, 0, armed.clone());
    let wc = WorkCompletion::default();
    assert_eq!(queue.deliver(wc, false), Delivered::Quiet);
    queue.arm(Arm::Next);
    assert!(armed.any());
    assert_eq!(queue.deliver(wc, false), Delivered::Tell);
    assert!(queue.is_notified() && !armed.any());
    assert_eq!(queue.deliver(wc, false), Delivered::Overrun { first: true });
    assert_eq!(queue.poll(), Some(wc));
    assert_eq!(queue.deliver(wc, false), Delivered::Overrun { first: false });
}

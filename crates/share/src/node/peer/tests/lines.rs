//! Lines whose queue pairs fail and are put away, on real devices.

use std::collections::HashMap;

use super::*;

/// A queue pair as its user knows it.
#[derive(Default)]
struct Use {
    /// Requests that were posted and have not completed.
    posted: u32,
    received: u32,
    is_stopped: bool,
    is_ending: bool,
}

/// The part of the users of the lines at a host.
struct User {
    host: Host,
    lines: HashMap<SharedId, Use>,
    /// Answer to [`PeerEvent::MayEnd`] for a line on which nothing is in flight.
    may_end: bool,
    /// The messages that were received.
    messages: Vec<(SharedId, Vec<u8>)>,
}

impl User {
    fn new(host: Host) -> User {
        User {
            host,
            lines: HashMap::new(),
            may_end: true,
            messages: Vec::new(),
        }
    }

    fn turn(&mut self) {
        let now = Instant::now();
        while let Some(wc) = self.host.peers.shared_cq().poll() {
            // One of a line that is over.
            let Some(id) = self.host.peers.shared_by_qpn(wc.qpn) else {
                continue;
            };
            let line = self.lines.entry(id).or_default();
            if wc.wr_id & RECEIVE == 0 {
                line.posted -= 1;
                continue;
            }
            let qp = self.host.peers.shared_qp(id).unwrap();
            qp.slot_came();
            if wc.status == Status::Success {
                let slot = (wc.wr_id & !RECEIVE) as u16;
                let mut bytes = vec![0; wc.byte_len as usize];
                qp.read_slot(slot, 0, &mut bytes).unwrap();
                line.received += 1;
                if !line.is_ending {
                    qp.post_slot(slot).unwrap();
                }
                self.messages.push((id, bytes));
            }
        }
        let before = self.host.seen.len();
        self.host.turn();
        for event in &self.host.seen[before..] {
            match event {
                PeerEvent::QpEnding { id } => {
                    let line = self.lines.entry(*id).or_default();
                    (line.is_stopped, line.is_ending) = (true, true);
                }
                PeerEvent::QpReady { id } => self.lines.entry(*id).or_default().is_stopped = false,
                PeerEvent::MayEnd { id, .. } => {
                    let line = self.lines.entry(*id).or_default();
                    let may = self.may_end && line.posted == 0;
                    line.is_stopped |= may;
                    self.host.peers.may_end(now, *id, may);
                }
                _ => {}
            }
        }
        let is_new =
            |event: &PeerEvent| !matches!(event, PeerEvent::QpEnding { .. } | PeerEvent::MayEnd { .. });
        self.host.seen.retain(is_new);
        let drained = |(id, line): (&SharedId, &Use)| {
            // A line that is over has none.
            let out = self.host.peers.shared_qp(*id).map_or(0, |qp| qp.slots_out());
            (line.is_ending && line.posted == 0 && out == 0).then_some(*id)
        };
        let drained: Vec<SharedId> = self.lines.iter().filter_map(drained).collect();
        for id in drained {
            let line = self.lines.entry(id).or_default();
            line.is_ending = false;
            let received = std::mem::take(&mut line.received);
            self.host.peers.drained(now, id, received);
        }
    }

    fn send(&mut self, id: SharedId, bytes: &[u8]) {
        let send = Operation::Send { imm: None };
        let request = SendRequest::new(send, rdmux_verbs::SgeList::inline(bytes)).signaled();
        let qp = self.host.peers.shared_qp(id).unwrap();
        qp.qp().post_send(request).unwrap();
        self.lines.entry(id).or_default().posted += 1;
    }

    /// Returns the number of messages that were received, and forgets them.
    fn received(&mut self) -> usize {
        std::mem::take(&mut self.messages).len()
    }
}

/// Runs two users until there is a result.
fn run_users<T>(a: &mut User, b: &mut User, mut done: impl FnMut(&mut User, &mut User) -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        let now = Instant::now();
        a.turn();
        b.turn();
        if let Some(result) = done(a, b) {
            return result;
        }
        assert!(now < end, "{:?}\n{:?}", a.host.seen, b.host.seen);
        std::thread::yield_now();
    }
}

fn ended(event: &PeerEvent) -> Option<(SharedId, Ended)> {
    match event {
        PeerEvent::QpEnded { id, ended } => Some((*id, Ended::clone(ended))),
        _ => None,
    }
}

fn is_gone(event: &PeerEvent) -> Option<SharedId> {
    match event {
        PeerEvent::QpGone { id } => Some(*id),
        _ => None,
    }
}

fn users(first: u8, second: u8) -> (User, User) {
    users_within((first, 8), second)
}

fn users_within(first: (u8, usize), second: u8) -> (User, User) {
    let (a, b) = connected_within(first, second);
    (User::new(a), User::new(b))
}

/// Returns the line that both are ready to use, after one of them has wanted it.
fn ready_at_both(a: &mut User, b: &mut User) -> (SharedId, SharedId) {
    let mut ids = (None, None);
    run_users(a, b, |a, b| {
        ids.0 = ids.0.or_else(|| a.host.find(ready));
        ids.1 = ids.1.or_else(|| b.host.find(ready));
        ids.0.zip(ids.1)
    })
}

/// Returns what both users are told of the end of a queue pair.
fn ended_at_both(a: &mut User, b: &mut User) -> ((SharedId, Ended), (SharedId, Ended)) {
    let here = run_users(a, b, |a, _| a.host.find(ended));
    (here, run_users(a, b, |_, b| b.host.find(ended)))
}

#[test]
fn end_qp__both_ends_tell_what_took_effect_and_go_on_with_a_fresh_one() {
    let (mut a, mut b) = users(31, 32);
    let (by, by_there) = (shared_by(&b.host, &a.host), shared_by(&a.host, &b.host));
    a.host.peers.want_qp(Instant::now(), &by);
    let ids = ready_at_both(&mut a, &mut b);
    let mut before = None;
    for round in 0..3_u32 {
        for at in 0..3 + round {
            a.send(ids.0, &[at as u8]);
        }
        let mut received = 0_u32;
        run_users(&mut a, &mut b, |a, b| {
            received += b.received() as u32;
            (a.lines[&ids.0].posted == 0 && received == 3 + round).then_some(())
        });
        // One more on the way, of which either outcome is right.
        a.send(ids.0, b"last");
        a.host.peers.end_qp(Instant::now(), ids.0);
        a.host.peers.end_qp(Instant::now(), ids.0);
        let (here, there) = ended_at_both(&mut a, &mut b);
        b.received();
        assert_eq!((here.0, there.0), ids);
        let (here, there) = (here.1, there.1);
        let (own, theirs) = (here.own.unwrap(), here.theirs.unwrap());
        assert_eq!(Some(&own.done), there.theirs.as_ref(), "as it was told");
        assert_eq!(Some(&theirs), there.own.as_ref().map(|own| &own.done));
        assert_eq!(there.messages, 0);
        let unfinished: Vec<_> = own.sent.iter().filter_map(|sent| sent.psns).collect();
        let took_effect =
            |(first, count): &(rdmux_verbs::Psn, u32)| theirs.expected.since(first.plus(*count)) >= 0;
        let in_doubt = unfinished.iter().filter(|psns| took_effect(psns)).count();
        assert!(here.messages == 3 + round || here.messages == 4 + round);
        assert!(in_doubt <= 1, "{own:?} {theirs:?}");
        for user in [&a, &b] {
            assert_eq!(user.host.peers.shared_count(), 0, "it costs nothing");
        }
        assert!(a.host.peers.shared_qp(ids.0).is_none());
        // Either end goes on.
        match round % 2 {
            0 => b.host.peers.want_qp(Instant::now(), &by_there),
            _ => a.host.peers.want_qp(Instant::now(), &by),
        };
        assert_eq!(ready_at_both(&mut a, &mut b), ids);
        let qpn = a.host.peers.shared_qp(ids.0).unwrap().qp().qpn();
        assert_ne!(before.replace(qpn), Some(qpn));
    }
}

#[test]
fn end_qp__at_both_ends_at_once_and_wanted_meanwhile() {
    let (mut a, mut b) = users(33, 34);
    let (by, by_there) = (shared_by(&b.host, &a.host), shared_by(&a.host, &b.host));
    a.host.peers.want_qp(Instant::now(), &by);
    let ids = ready_at_both(&mut a, &mut b);
    for _ in 0..4 {
        let now = Instant::now();
        a.host.peers.end_qp(now, ids.0);
        b.host.peers.end_qp(now, ids.1);
        assert_eq!(a.host.peers.want_qp(now, &by), None);
        assert_eq!(b.host.peers.want_qp(now, &by_there), None);
        assert_eq!(ready_at_both(&mut a, &mut b), ids);
        for user in [&mut a, &mut b] {
            assert!(user.host.find(ended).is_some(), "before it was ready");
            assert_eq!(user.host.find(is_gone), None);
        }
    }
}

/// A line that was put away is wanted again, and one of the devices has no room for a queue pair: who waits for it is told.
#[test]
fn want_qp__of_a_known_line_on_a_full_device() {
    for full in 0..2 {
        let (mut a, mut b) = users(45, 46);
        let by = shared_by(&b.host, &a.host);
        a.host.peers.want_qp(Instant::now(), &by);
        let ids = ready_at_both(&mut a, &mut b);
        a.host.peers.end_qp(Instant::now(), ids.0);
        ended_at_both(&mut a, &mut b);
        let device = [&a, &b][full].host.device.clone();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(1).unwrap());
        let options = QpOptions::new(&cq);
        // Meanwhile the peers answer each other's probes.
        let mut others = Vec::new();
        while let Ok(qp) = pd.create_qp(&options) {
            others.push(qp);
            if others.len() % 256 == 0 {
                run_users(&mut a, &mut b, |_, _| Some(()));
            }
        }
        assert_eq!(a.host.peers.want_qp(Instant::now(), &by), None);
        let refused = |event: &PeerEvent| match event {
            PeerEvent::QpRefused { by } => Some(by.clone()),
            _ => None,
        };
        assert_eq!(run_users(&mut a, &mut b, |a, _| a.host.find(refused)), by);
        assert!(!a.host.peers.is_qp_coming(&by));
        // The line had connections, which end with it.
        assert_eq!(a.host.find(is_gone), Some(ids.0));
        while !others.is_empty() {
            others.truncate(others.len().saturating_sub(256));
            run_users(&mut a, &mut b, |_, _| Some(()));
        }
        a.host.peers.want_qp(Instant::now(), &by);
        assert!(a.host.peers.is_qp_coming(&by));
        assert_ne!(ready_at_both(&mut a, &mut b).0, ids.0, "another line");
    }
}

#[test]
fn fail_qp__ends_a_line_at_both_ends_at_any_stage() {
    // While it is in use, while it ends, and while it is away.
    for stage in 0..3 {
        let (mut a, mut b) = users(35, 36);
        let by = shared_by(&b.host, &a.host);
        a.host.peers.want_qp(Instant::now(), &by);
        let ids = ready_at_both(&mut a, &mut b);
        if stage > 0 {
            a.host.peers.end_qp(Instant::now(), ids.0);
        }
        if stage > 1 {
            ended_at_both(&mut a, &mut b);
        }
        a.host.peers.fail_qp(Instant::now(), ids.0);
        assert_eq!(run_users(&mut a, &mut b, |a, _| a.host.find(is_gone)), ids.0);
        assert_eq!(run_users(&mut a, &mut b, |_, b| b.host.find(is_gone)), ids.1);
        a.host.peers.want_qp(Instant::now(), &by);
        let next = ready_at_both(&mut a, &mut b);
        assert!(next.0 != ids.0 && next.1 != ids.1, "another line");
    }
}

#[test]
fn want_qp__at_the_limit_puts_a_line_away_that_neither_end_needs() {
    let (mut a, mut b) = users_within((37, 2), 38);
    let of_class = |class| SharedBy {
        class,
        ..shared_by(&b.host, &a.host)
    };
    let classes = [0, 32, 64].map(of_class);
    let now = Instant::now();
    let mut lines = Vec::new();
    for by in &classes[..2] {
        a.host.peers.want_qp(now, by);
        lines.push(ready_at_both(&mut a, &mut b));
    }
    // The peer needs both.
    b.may_end = false;
    assert_eq!(a.host.peers.want_qp(Instant::now(), &classes[2]), None);
    let again = run_users(&mut a, &mut b, |a, _| a.host.find(ready));
    assert!(lines.iter().any(|line| line.0 == again), "it stays");
    b.may_end = true;
    // Those that stayed are ready again, perhaps more than once.
    run_users(&mut a, &mut b, |a, _| {
        let id = a.host.find(ready)?;
        lines.iter().all(|line| line.0 != id).then_some(())
    });
    let put_away = a.host.find(ended).unwrap();
    assert_eq!(
        b.host.find(ended).map(|(id, _)| id),
        lines.iter().find(|line| line.0 == put_away.0).map(|line| line.1)
    );
    assert_eq!(a.host.peers.shared_count(), 2);
    // It is wanted again, for which another one goes; its name stays.
    let by = &classes[lines.iter().position(|line| line.0 == put_away.0).unwrap()];
    assert_eq!(a.host.peers.want_qp(Instant::now(), by), None);
    run_users(&mut a, &mut b, |a, _| {
        let id = a.host.find(ready)?;
        (id == put_away.0).then_some(())
    });
    assert_eq!(a.host.peers.shared_count(), 2);
}

#[test]
fn want_qp__within_the_limits_of_both_nodes() {
    let (mut a, mut b) = users_within((41, 3), 42);
    for class in 0..20 {
        let by = SharedBy {
            class,
            ..shared_by(&b.host, &a.host)
        };
        run_users(&mut a, &mut b, |a, b| {
            let counts = [&a.host, &b.host].map(|host| host.peers.shared_count());
            assert!(counts[0] <= 3 && counts[1] <= 8, "{counts:?}");
            a.host.peers.want_qp(Instant::now(), &by)
        });
    }
    assert_eq!(a.host.peers.shared_count(), 3);
}

#[test]
fn forget_qp__of_one_end_makes_a_new_line_there_alone() {
    let (mut a, mut b) = users(39, 40);
    let (by, by_there) = (shared_by(&b.host, &a.host), shared_by(&a.host, &b.host));
    a.host.peers.want_qp(Instant::now(), &by);
    let mut ids = ready_at_both(&mut a, &mut b);
    for wants_here in [true, false] {
        a.host.peers.end_qp(Instant::now(), ids.0);
        ended_at_both(&mut a, &mut b);
        a.host.peers.forget_qp(Instant::now(), ids.0);
        match wants_here {
            true => a.host.peers.want_qp(Instant::now(), &by),
            false => b.host.peers.want_qp(Instant::now(), &by_there),
        };
        let next = ready_at_both(&mut a, &mut b);
        assert_ne!(next.0, ids.0);
        assert_eq!(next.1, ids.1);
        ids = next;
    }
}

/// More lines than queue pairs at a time, and messages from both ends on all of them: each arrives once, in order, and the limits hold.
#[test]
fn want_qp__on_more_lines_than_queue_pairs_all_messages_arrive_once() {
    const LINES: u8 = 12;
    const MESSAGES: u32 = 60;
    let (mut a, mut b) = users_within((43, 3), 44);
    let classes = |peer: &Host, own: &Host| -> Vec<SharedBy> {
        let by = shared_by(peer, own);
        (0..LINES).map(|class| SharedBy { class, ..by.clone() }).collect()
    };
    let all = [classes(&b.host, &a.host), classes(&a.host, &b.host)];
    // Numbers of the messages that were sent, and of those that came, at each end and for each line.
    let mut sent = [[0u32; LINES as usize]; 2];
    let mut came = [[0u32; LINES as usize]; 2];
    let mut ended = 0;
    run_users(&mut a, &mut b, |a, b| {
        let counts = [&a.host, &b.host].map(|host| host.peers.shared_count());
        assert!(counts[0] <= 3 && counts[1] <= 8, "{counts:?}");
        for (at, user) in [a, b].into_iter().enumerate() {
            for (_, bytes) in std::mem::take(&mut user.messages) {
                let (line, number) = bytes.split_first().unwrap();
                let next = &mut came[at][usize::from(*line)];
                assert_eq!(number, next.to_be_bytes(), "on line {line}");
                *next += 1;
            }
            for line in 0..LINES {
                let sent = &mut sent[at][usize::from(line)];
                if *sent == MESSAGES {
                    continue;
                }
                let by = &all[at][usize::from(line)];
                let Some(id) = user.host.peers.want_qp(Instant::now(), by) else {
                    continue;
                };
                // Fewer than the peer has slots.
                if user
                    .lines
                    .get(&id)
                    .is_some_and(|it| !it.is_stopped && it.posted < 8)
                {
                    let mut bytes = vec![line];
                    bytes.extend_from_slice(&sent.to_be_bytes());
                    user.send(id, &bytes);
                    *sent += 1;
                }
            }
            ended += user
                .host
                .seen
                .iter()
                .filter(|event| matches!(event, PeerEvent::QpEnded { .. }))
                .count();
            assert!(user.host.seen.iter().all(|event| is_gone(event).is_none()));
            user.host.seen.clear();
        }
        (came == [[MESSAGES; LINES as usize]; 2]).then_some(())
    });
    assert!(
        ended >= 2 * (usize::from(LINES) - 3),
        "only {ended} were put away"
    );
}

//! Rates, ceilings, strict classes with a cap, new connections, groups, and connections that come and go.

use std::num::{NonZeroU8, NonZeroU16};

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use crate::sched::{CLASSES, ConnectionId, Entitlement, GroupId, Hierarchy, Policy, Quanta, TenantId};
use crate::time::Time;

const GBPS: u64 = 1_000_000_000;
/// The rate at which [`Link`] sends.
const LINK_BPS: u64 = 100 * GBPS;
const PIECE_BYTES: u32 = 16 << 10;

/// A link that sends what the hierarchy picks. Connections are named by their number.
struct Link {
    hierarchy: Hierarchy<usize>,
    now: Time,
    /// Bytes that each connection has sent.
    sent: Vec<u64>,
    /// Bytes that each connection has to send.
    queued: Vec<u64>,
    /// Longest piece of each connection: the length of its messages, if they are short.
    piece_bytes: Vec<u32>,
    connections: Vec<ConnectionId>,
    idle_ns: u64,
}

impl Link {
    fn new(quanta: Quanta) -> Link {
        Link {
            hierarchy: Hierarchy::new(quanta),
            now: Time(1_000_000_000),
            sent: Vec::new(),
            queued: Vec::new(),
            piece_bytes: Vec::new(),
            connections: Vec::new(),
            idle_ns: 0,
        }
    }

    fn tenant(&mut self, weight: u16, rate_bps: u64, ceiling_bps: Option<u64>) -> TenantId {
        self.hierarchy
            .add_tenant(&entitlement(weight, rate_bps, ceiling_bps))
    }

    fn connect(&mut self, group: GroupId) -> usize {
        let at = self.connections.len();
        self.connections
            .push(self.hierarchy.add_connection(group, at).unwrap());
        self.sent.push(0);
        self.queued.push(0);
        self.piece_bytes.push(PIECE_BYTES);
        at
    }

    /// Adds a group with one connection.
    fn connection(&mut self, tenant: TenantId, class: usize) -> usize {
        let group = self.hierarchy.add_group(tenant, class).unwrap();
        self.connect(group)
    }

    fn post(&mut self, at: usize, bytes: u64) {
        self.queued[at] += bytes;
        self.hierarchy.wake(self.now, self.connections[at]);
    }

    /// Sends one piece; returns its connection, or `None` after the time in which nobody may send, or if nobody waits.
    fn send(&mut self) -> Option<usize> {
        let Some(turn) = self.hierarchy.pick(self.now) else {
            let at = self.hierarchy.next_time()?;
            assert!(at > self.now);
            self.idle_ns += at.since_ns(self.now);
            self.now = at;
            return None;
        };
        let at = turn.id;
        let bytes = self.queued[at].min(self.piece_bytes[at].into());
        assert!(turn.bytes > 0 && bytes > 0);
        self.queued[at] -= bytes;
        self.sent[at] += bytes;
        self.now = self.now + bytes * 8 * GBPS / LINK_BPS;
        let more = self.queued[at] > 0;
        self.hierarchy.end(self.now, turn, bytes as u32, more);
        Some(at)
    }

    /// Sends for `ns`; returns the rate of each connection in Gbit/s.
    fn run(&mut self, ns: u64) -> Vec<f64> {
        let (begin, before) = (self.now, self.sent.clone());
        while self.now.since_ns(begin) < ns {
            self.send();
        }
        let ns = self.now.since_ns(begin) as f64;
        let rate = |(sent, before): (&u64, &u64)| (sent - before) as f64 * 8.0 / ns;
        self.sent.iter().zip(&before).map(rate).collect()
    }
}

fn entitlement(weight: u16, rate_bps: u64, ceiling_bps: Option<u64>) -> Entitlement {
    Entitlement {
        weight: NonZeroU16::new(weight).unwrap(),
        rate_bps,
        ceiling_bps,
        ..Entitlement::default()
    }
}

fn classes(strict: &[usize]) -> [Policy; CLASSES] {
    std::array::from_fn(|class| match strict.contains(&class) {
        true => Policy::Strict,
        false => Policy::Ets(NonZeroU8::MIN),
    })
}

#[track_caller]
fn assert_rates(rates: &[f64], expected: &[f64]) {
    let near = |(rate, expected): (&f64, &f64)| (rate - expected).abs() <= 0.01 * expected.max(1.0);
    assert!(
        rates.iter().zip(expected).all(near),
        "{rates:.2?} are not {expected:?}"
    );
}

const MUCH: u64 = 1 << 40;

#[test]
fn pick__tenants_share_by_weight_and_what_one_leaves_goes_to_the_others() {
    let mut link = Link::new(Quanta::default());
    for weight in [1, 2, 5] {
        let tenant = link.tenant(weight, 0, None);
        // The number of connections does not count.
        for _ in 0..weight {
            link.connection(tenant, 0);
        }
    }
    (0..8).for_each(|at| link.post(at, MUCH));
    assert_rates(&link.run(20_000_000), &[12.5; 8]);
    for at in 3..8 {
        link.hierarchy.rest(link.now, link.connections[at]);
    }
    let third = 100.0 / 3.0;
    assert_rates(&link.run(20_000_000), &[third, third, third, 0.0]);
}

#[test]
fn set_tenant__weights_and_rates_change_while_traffic_runs() {
    let mut link = Link::new(Quanta::default());
    let tenants = [1, 1].map(|weight| link.tenant(weight, 0, None));
    for tenant in tenants {
        let at = link.connection(tenant, 0);
        link.post(at, MUCH);
    }
    assert_rates(&link.run(10_000_000), &[50.0, 50.0]);
    let set = |link: &mut Link, tenant: usize, entitlement| {
        link.hierarchy.set_tenant(link.now, tenants[tenant], &entitlement);
    };
    set(&mut link, 0, entitlement(3, 0, None));
    assert_rates(&link.run(10_000_000), &[75.0, 25.0]);
    set(&mut link, 1, entitlement(1, 40 * GBPS, None));
    assert_rates(&link.run(50_000_000), &[45.0, 55.0]);
    set(&mut link, 0, entitlement(3, 0, Some(10 * GBPS)));
    link.run(1_000_000);
    assert_rates(&link.run(50_000_000), &[10.0, 90.0]);
    set(&mut link, 1, entitlement(1, 0, Some(20 * GBPS)));
    link.run(1_000_000);
    assert_rates(&link.run(50_000_000), &[10.0, 20.0]);
    set(&mut link, 0, entitlement(1, 0, None));
    assert_rates(&link.run(50_000_000), &[80.0, 20.0]);
}

#[test]
fn pick__guaranteed_rates_first_and_the_rest_by_weight() {
    let mut link = Link::new(Quanta::default());
    // (weight, guaranteed rate, ceiling)
    for (weight, rate, ceiling) in [
        (1, 30, None),
        (1, 0, None),
        (2, 10, None),
        (1, 5, Some(8)),
        (4, 0, Some(2)),
    ] {
        let tenant = link.tenant(weight, rate * GBPS, ceiling.map(|rate| rate * GBPS));
        let at = link.connection(tenant, 0);
        link.post(at, MUCH);
    }
    link.run(5_000_000);
    // 55 Gbit/s are left for the weights; the ceilings leave of their parts 50 to the first three.
    assert_rates(&link.run(200_000_000), &[42.5, 12.5, 35.0, 8.0, 2.0]);
}

#[test]
fn pick__guaranteed_rates_that_exceed_the_link_share_it_by_weight() {
    let mut link = Link::new(Quanta::default());
    for weight in [1, 4] {
        let tenant = link.tenant(weight, 90 * GBPS, None);
        let at = link.connection(tenant, 0);
        link.post(at, MUCH);
    }
    link.run(5_000_000);
    assert_rates(&link.run(50_000_000), &[20.0, 80.0]);
}

#[test]
fn pick__ceilings_hold_in_every_interval() {
    for (seed, ceiling_bps) in [(1, 10_000_000), (2, GBPS), (3, 40 * GBPS)] {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut link = Link::new(Quanta::default());
        let limited = link.tenant(1, 0, Some(ceiling_bps));
        let other = link.tenant(1, 0, None);
        let (limited, other) = (link.connection(limited, 0), link.connection(other, 0));
        let mut history = vec![(link.now, 0)];
        for _ in 0..10_000 {
            if rng.next_u32() % 3 == 0 {
                let bytes = 1 + u64::from(rng.next_u32()) % (64 << 10);
                link.post(limited, bytes);
            }
            if rng.next_u32() % 16 == 0 {
                link.post(other, 1 + u64::from(rng.next_u32()) % (256 << 10));
            }
            if link.send() == Some(limited) {
                history.push((link.now, link.sent[limited]));
            } else if rng.next_u32() % 8 == 0 {
                link.now = link.now + u64::from(rng.next_u32()) % 1_000_000;
            }
        }
        let burst = (ceiling_bps / 80_000).max(128 << 10) + u64::from(PIECE_BYTES);
        for (at, (begin, before)) in history.iter().enumerate().step_by(31) {
            for (end, after) in &history[at..] {
                let allowed = u128::from(end.since_ns(*begin)) * u128::from(ceiling_bps) / 8_000_000_000
                    + u128::from(burst);
                assert!(
                    u128::from(after - before) <= allowed,
                    "seed {seed}: {} bytes, allowed {allowed}",
                    after - before
                );
            }
        }
        assert!(link.sent[limited] > burst, "seed {seed}");
    }
}

#[test]
fn next_time__when_the_first_tenant_at_its_ceiling_may_send() {
    let mut link = Link::new(Quanta::default());
    let slow = link.tenant(1, 0, Some(GBPS));
    let fast = link.tenant(1, 0, Some(10 * GBPS));
    let idle = link.tenant(1, 20 * GBPS, Some(20 * GBPS));
    let connections = [slow, fast, idle].map(|tenant| link.connection(tenant, 0));
    connections[..2].iter().for_each(|at| link.post(*at, MUCH));
    link.post(connections[2], 300 << 10);
    let begin = link.now;
    while link.now.since_ns(begin) < 10_000_000 {
        let before = link.now;
        if link.send().is_none() {
            let picked = link.hierarchy.pick(link.now);
            assert!(
                picked.is_some(),
                "nobody may send at {:?}, named at {before:?}",
                link.now
            );
            // A turn without use changes nothing.
            link.hierarchy.end(link.now, picked.unwrap(), 0, true);
        }
    }
    assert_eq!(link.queued[connections[2]], 0);
    assert!(link.idle_ns > 5_000_000);
    // Nobody waits: there is nothing to wake up for.
    connections
        .iter()
        .for_each(|at| link.hierarchy.rest(link.now, link.connections[*at]));
    assert_eq!(
        (link.hierarchy.pick(link.now), link.hierarchy.next_time()),
        (None, None)
    );
}

#[test]
fn set_rate__all_tenants_share_it_as_they_are_entitled() {
    let mut link = Link::new(Quanta::default());
    let tenants = [(1, 0, None), (3, 0, None), (1, 5, None), (1, 0, Some(GBPS / 2))];
    let tenants = tenants.map(|(weight, rate, ceiling)| link.tenant(weight, rate * GBPS, ceiling));
    for tenant in tenants {
        let at = link.connection(tenant, 0);
        link.post(at, MUCH);
    }
    let mut rates = |rate: Option<u64>| {
        link.hierarchy.set_rate(link.now, rate.map(|rate| rate * GBPS));
        link.run(5_000_000);
        link.run(200_000_000)
    };
    assert_rates(&rates(Some(10)), &[0.9, 2.7, 5.9, 0.5]);
    // A rate below the guaranteed ones leaves nothing for tenants that have none.
    assert_rates(&rates(Some(4)), &[0.0, 0.0, 4.0, 0.0]);
    let rest = 94.5 / 5.0;
    assert_rates(&rates(None), &[rest, 3.0 * rest, 5.0 + rest, 0.5]);
}

#[test]
fn next_time__when_the_device_may_send() {
    let mut link = Link::new(Quanta::default());
    let slow = link.tenant(1, 0, Some(GBPS / 10));
    let slow = link.connection(slow, 0);
    link.hierarchy.set_rate(link.now, Some(GBPS));
    assert_eq!(link.hierarchy.next_time(), None, "nobody waits");
    link.post(slow, MUCH);
    while link.send().is_some() {}
    // The tenant's ceiling is what it waits for, and later than the device's rate allows.
    assert!(link.hierarchy.pick(link.now).is_some());
    let other = link.tenant(1, 0, None);
    let other = link.connection(other, 0);
    link.post(other, MUCH);
    let (begin, before) = (link.now, link.idle_ns);
    assert_rates(&link.run(100_000_000), &[0.1, 0.9]);
    let busy_ns = link.now.since_ns(begin) - (link.idle_ns - before);
    // It sends at 100 Gbit/s, so it sends in 1 % of the time.
    assert!(busy_ns < 2_000_000, "{busy_ns}");
}

#[test]
fn pick__a_strict_class_takes_nine_tenths_while_others_wait() {
    for (strict, expected) in [(vec![2], [5.0, 5.0, 90.0]), (vec![1, 2], [1.0, 9.0, 90.0])] {
        let mut link = Link::new(Quanta::default());
        let tenant = link.hierarchy.add_tenant(&Entitlement {
            classes: classes(&strict),
            ..Entitlement::default()
        });
        for class in 0..3 {
            let at = link.connection(tenant, class);
            // The cap counts bytes, however short the pieces.
            link.piece_bytes[at] = [3000, PIECE_BYTES, 250][class];
            link.post(at, MUCH);
        }
        assert_rates(&link.run(50_000_000), &expected);
        for at in 0..2 {
            link.hierarchy.rest(link.now, link.connections[at]);
        }
        assert_rates(&link.run(1_000_000), &[0.0, 0.0, 100.0]);
    }
}

#[test]
fn pick__equal_shares_whatever_the_lengths_of_messages() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut link = Link::new(Quanta::default());
    let tenant = link.tenant(1, 0, None);
    let groups: Vec<GroupId> = (0..3)
        .map(|_| link.hierarchy.add_group(tenant, 0).unwrap())
        .collect();
    for _ in 0..50 {
        let at = link.connect(groups[rng.next_u32() as usize % groups.len()]);
        link.piece_bytes[at] = 250 << (rng.next_u32() % 9);
        link.post(at, MUCH);
    }
    let rates = link.run(40_000_000);
    let (sum, squares) = (
        rates.iter().sum::<f64>(),
        rates.iter().map(|rate| rate * rate).sum::<f64>(),
    );
    let jain = sum * sum / (rates.len() as f64 * squares);
    println!("Jain {jain:.5}");
    assert!(jain >= 0.999, "{jain}: {rates:.2?}");
}

#[test]
fn pick__a_new_connection_comes_first_with_its_advance() {
    let mut link = Link::new(Quanta::default());
    let tenant = link.tenant(1, 0, None);
    let bulk: Vec<usize> = (0..7).map(|_| link.connection(tenant, 0)).collect();
    bulk.iter().for_each(|at| link.post(*at, MUCH));
    link.run(1_000_000);
    assert!(link.hierarchy.sparse_seen() < Some(link.now));
    let mouse = link.connection(tenant, 0);
    link.post(mouse, 64 << 10);
    assert_eq!(link.hierarchy.sparse_seen(), Some(link.now));
    assert_eq!(
        (0..5).filter_map(|_| link.send()).position(|at| at != mouse),
        Some(4)
    );
    // It has to pass through the other list before it is new again.
    link.post(mouse, 16 << 10);
    assert_ne!(link.send(), Some(mouse));
    let sent: Vec<usize> = (0..60).filter_map(|_| link.send()).collect();
    assert!(sent.iter().filter(|at| **at == mouse).count() == 1);
    link.post(mouse, 16 << 10);
    assert_eq!(link.send(), Some(mouse));
}

#[test]
fn wake__a_connection_whose_last_burst_was_long_is_not_new() {
    let mut link = Link::new(Quanta::default());
    let tenant = link.tenant(1, 0, None);
    let all: Vec<usize> = (0..3).map(|_| link.connection(tenant, 0)).collect();
    all[1..].iter().for_each(|at| link.post(*at, MUCH));
    for (burst_bytes, new) in [(1 << 20, true), (16 << 10, false), (16 << 10, true)] {
        link.run(1_000_000);
        link.post(0, burst_bytes);
        assert_eq!(
            link.hierarchy.sparse_seen() == Some(link.now),
            new,
            "{burst_bytes}"
        );
        assert_eq!(link.send() == Some(0), new, "{burst_bytes}");
        while link.queued[0] > 0 {
            link.send();
        }
    }
}

#[test]
fn pick__groups_with_new_connections_take_turns() {
    let mut link = Link::new(Quanta::default());
    let tenant = link.tenant(1, 0, None);
    let groups = [0, 1].map(|_| link.hierarchy.add_group(tenant, 0).unwrap());
    for group in [0, 0, 1] {
        let at = link.connect(groups[group]);
        link.post(at, 32 << 10);
    }
    let sent: Vec<usize> = (0..6).filter_map(|_| link.send()).collect();
    assert_eq!(sent, [0, 0, 2, 2, 1, 1]);
}

#[test]
fn pick__bursts_that_seem_new_gain_nothing() {
    // Each burst is as long as the advance, and the next one comes as soon as it is sent, or a little later, or after a pause for which
    // the connection seems to lack credits.
    for (burst_bytes, pause_ns, rests) in [
        (64 << 10, 0, false),
        (64 << 10, 20_000, false),
        (16 << 10, 3_000, false),
        (1 << 20, 0, false),
        (MUCH, 5_000, true),
    ] {
        let mut link = Link::new(Quanta::default());
        let tenant = link.tenant(1, 0, None);
        let all: Vec<usize> = (0..8).map(|_| link.connection(tenant, 0)).collect();
        all[1..].iter().for_each(|at| link.post(*at, MUCH));
        let begin = link.now;
        let mut due = link.now;
        while link.now.since_ns(begin) < 50_000_000 {
            if link.now >= due && link.queued[0] == 0 {
                link.post(0, burst_bytes);
            } else if link.now >= due && rests {
                link.hierarchy.wake(link.now, link.connections[0]);
            }
            if link.send() == Some(0) && (link.queued[0] == 0 || rests) {
                link.hierarchy.rest(link.now, link.connections[0]);
                due = link.now + pause_ns;
            }
        }
        let fair = link.sent.iter().sum::<u64>() / 8;
        assert!(
            link.sent[0] <= fair + (128 << 10) + 2 * u64::from(PIECE_BYTES),
            "bursts of {burst_bytes} with pauses of {pause_ns} ns: {} of {fair}",
            link.sent[0]
        );
    }
}

#[test]
fn rest__a_connection_without_credits_holds_nothing_and_stops_nobody() {
    let mut link = Link::new(Quanta::default());
    let tenant = link.hierarchy.add_tenant(&Entitlement {
        classes: classes(&[7]),
        ..Entitlement::default()
    });
    let (strict, other) = (link.connection(tenant, 7), link.connection(tenant, 0));
    link.post(strict, MUCH);
    link.post(other, MUCH);
    link.run(100_000);
    link.hierarchy.rest(link.now, link.connections[strict]);
    assert_rates(&link.run(1_000_000), &[0.0, 100.0]);
    link.hierarchy.wake(link.now, link.connections[strict]);
    assert_rates(&link.run(1_000_000), &[90.0, 10.0]);
}

#[test]
fn set_open__a_group_with_a_full_window_keeps_its_turn() {
    let mut link = Link::new(Quanta::default());
    let tenant = link.tenant(1, 0, None);
    let groups = [0, 1].map(|_| link.hierarchy.add_group(tenant, 0).unwrap());
    for (group, connections) in [(0, 1), (1, 3)] {
        for _ in 0..connections {
            let at = link.connect(groups[group]);
            link.piece_bytes[at] = 4 << 10;
            link.post(at, MUCH);
        }
    }
    // The first group is shut after every piece for the time of the next one.
    let begin = link.now;
    while link.now.since_ns(begin) < 10_000_000 {
        let shut = link.send() == Some(0);
        link.hierarchy.set_open(link.now, groups[0], !shut);
    }
    let fair = link.sent.iter().sum::<u64>() / 4;
    assert!(
        link.sent.iter().all(|sent| sent.abs_diff(fair) < 256 << 10),
        "{:?}",
        link.sent
    );
    link.hierarchy.set_open(link.now, groups[1], false);
    link.hierarchy.set_open(link.now, groups[0], true);
    assert_rates(&link.run(1_000_000), &[100.0, 0.0, 0.0, 0.0]);
    link.hierarchy.set_open(link.now, groups[0], false);
    assert!(link.hierarchy.pick(link.now).is_none());
    // A connection that is woken in a group that is shut waits.
    let late = link.connect(groups[0]);
    link.post(late, 1000);
    assert!(link.hierarchy.pick(link.now).is_none());
    link.hierarchy.set_open(link.now, groups[0], true);
    assert_eq!(link.send(), Some(late));
}

#[test]
fn take_slot__a_connection_with_many_reads_leaves_slots_to_others() {
    let mut link = Link::new(Quanta::default());
    let tenant = link.tenant(1, 0, None);
    let group = link.hierarchy.add_group(tenant, 0).unwrap();
    link.hierarchy.add_slots(link.now, group, 4);
    let all: Vec<usize> = (0..3).map(|_| link.connect(group)).collect();
    // The last one needs no slots, and does not wait for those that do.
    all.iter().for_each(|at| link.post(*at, MUCH));
    let (mut reads, mut in_flight) = ([0; 2], 0);
    for step in 0..3_000 {
        if step % 3 == 0 && in_flight > 0 {
            in_flight -= 1;
            link.hierarchy.return_slot(link.now, group);
        }
        // The first one always has more; the second one has a READ now and then.
        link.hierarchy.wake(link.now, link.connections[0]);
        if step % 30 == 0 {
            link.hierarchy.wake(link.now, link.connections[1]);
        }
        let turn = link.hierarchy.pick(link.now).unwrap();
        let at = turn.id;
        if at == 2 {
            link.hierarchy.end(link.now, turn, PIECE_BYTES, true);
            continue;
        }
        if link.hierarchy.take_slot(link.now, turn.connection) {
            in_flight += 1;
            reads[at] += 1;
            link.hierarchy.end(link.now, turn, 100, at == 0);
        } else {
            link.hierarchy.end(link.now, turn, 0, true);
        }
        assert!(in_flight <= 4);
    }
    assert!(reads[1] >= 98 && reads[0] > 800, "{reads:?}");
    // A slot that is kept for a connection that goes is free for others.
    for _ in 0..in_flight {
        link.hierarchy.return_slot(link.now, group);
    }
    link.connections
        .iter()
        .for_each(|one| link.hierarchy.remove_connection(link.now, *one));
    let connections: Vec<usize> = (0..5).map(|_| link.connect(group)).collect();
    let slots = connections.iter().map(|at| {
        link.hierarchy.wake(link.now, link.connections[*at]);
        link.hierarchy.take_slot(link.now, link.connections[*at])
    });
    assert_eq!(slots.collect::<Vec<_>>(), [true, true, true, true, false]);
}

#[test]
fn end__a_turn_without_use_goes_to_the_next_connection() {
    let mut link = Link::new(Quanta::default());
    let tenant = link.tenant(1, 0, None);
    let group = link.hierarchy.add_group(tenant, 0).unwrap();
    for _ in 0..3 {
        let at = link.connect(group);
        link.post(at, MUCH);
    }
    let mut turns = [0; 3];
    for _ in 0..30 {
        let turn = link.hierarchy.pick(link.now).unwrap();
        turns[turn.id] += 1;
        link.hierarchy.end(link.now, turn, 0, true);
    }
    assert_eq!(turns, [10; 3]);
}

#[test]
fn remove__everything_in_any_order_while_traffic_runs() {
    for seed in 1..=20 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut below = |n: usize| rng.next_u32() as usize % n;
        let mut hierarchy = Hierarchy::new(Quanta::default());
        let mut now = Time(1_000_000);
        let (mut tenants, mut groups, mut connections) = (Vec::new(), Vec::new(), Vec::new());
        let mut waiting = Vec::new();
        for step in 0..5_000 {
            now = now + below(20_000) as u64;
            match below(20) {
                0 => {
                    let rate = [0, GBPS][below(2)];
                    let ceiling = [None, Some(2 * GBPS)][below(2)];
                    tenants.push(hierarchy.add_tenant(&entitlement(1 + below(9) as u16, rate, ceiling)));
                }
                1 if !tenants.is_empty() => {
                    let tenant = tenants[below(tenants.len())];
                    groups.push((hierarchy.add_group(tenant, below(CLASSES)).unwrap(), tenant));
                }
                2..5 if !groups.is_empty() => {
                    let (group, _) = groups[below(groups.len())];
                    connections.push((hierarchy.add_connection(group, step).unwrap(), group, step));
                }
                5 if !connections.is_empty() => {
                    let (connection, _, name) = connections.swap_remove(below(connections.len()));
                    hierarchy.remove_connection(now, connection);
                    // Its name may be used again, but it is somebody else.
                    hierarchy.wake(now, connection);
                    waiting.retain(|one| *one != name);
                }
                6 if !groups.is_empty() => {
                    let at = below(groups.len());
                    let (group, _) = groups[at];
                    if !connections.iter().any(|(_, of, _)| *of == group) {
                        hierarchy.remove_group(group);
                        groups.swap_remove(at);
                    } else {
                        hierarchy.set_open(now, group, below(4) != 0);
                    }
                }
                7 if !tenants.is_empty() => {
                    let at = below(tenants.len());
                    if groups.iter().any(|(_, of)| *of == tenants[at]) {
                        hierarchy.set_tenant(now, tenants[at], &entitlement(1 + below(9) as u16, GBPS, None));
                    } else {
                        hierarchy.remove_tenant(tenants.swap_remove(at));
                    }
                }
                8..12 if !connections.is_empty() => {
                    let (connection, _, name) = connections[below(connections.len())];
                    hierarchy.wake(now, connection);
                    waiting.retain(|one| *one != name);
                    waiting.push(name);
                }
                12 if !connections.is_empty() => {
                    let (connection, _, name) = connections[below(connections.len())];
                    hierarchy.rest(now, connection);
                    waiting.retain(|one| *one != name);
                }
                _ => {
                    if let Some(turn) = hierarchy.pick(now) {
                        assert!(
                            waiting.contains(&turn.id),
                            "seed {seed}: picked without anything to send"
                        );
                        // It may go during its turn.
                        if below(20) == 0 {
                            hierarchy.remove_connection(now, turn.connection);
                            connections.retain(|(_, _, name)| *name != turn.id);
                            waiting.retain(|one| *one != turn.id);
                        }
                        let more = below(3) != 0;
                        if !more {
                            waiting.retain(|one| *one != turn.id);
                        }
                        hierarchy.end(now, turn, 1 + below(64 << 10) as u32, more);
                    }
                }
            }
        }
        // Everybody who waits gets a turn once nothing keeps them from it.
        groups
            .iter()
            .for_each(|(group, _)| hierarchy.set_open(now, *group, true));
        for _ in 0..100_000 {
            if waiting.is_empty() {
                break;
            }
            match hierarchy.pick(now) {
                Some(turn) => {
                    waiting.retain(|one| *one != turn.id);
                    hierarchy.end(now, turn, 1000, false);
                }
                None => now = hierarchy.next_time().expect("somebody waits"),
            }
        }
        assert!(waiting.is_empty(), "seed {seed}: {} wait for ever", waiting.len());
        assert_eq!(hierarchy.pick(now), None);
        connections
            .iter()
            .for_each(|(one, _, _)| hierarchy.remove_connection(now, *one));
        groups.iter().for_each(|(one, _)| hierarchy.remove_group(*one));
        tenants.iter().for_each(|one| hierarchy.remove_tenant(*one));
        assert_eq!((hierarchy.pick(now), hierarchy.next_time()), (None, None));
    }
}

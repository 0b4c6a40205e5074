use std::net::Ipv4Addr;

use rdmux_wire::node::peer::TenantName;

use super::*;

fn by(peer: u32, class: u8) -> SharedBy {
    SharedBy {
        peer: PeerId {
            address: Ipv4Addr::from_bits(0x0a00_0000 + peer).into(),
            engine: 0,
        },
        here: TenantName::default(),
        there: TenantName::new("db").unwrap(),
        class,
    }
}

fn after(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Opens a queue pair at once.
fn open(pool: &mut Pool, now: Instant, by: &SharedBy) -> SharedId {
    assert_eq!(pool.want(now, by), None);
    let Some(Step::Open(id, opened)) = pool.next_step() else {
        panic!("nothing is opened");
    };
    assert_eq!(&opened, by);
    pool.opened(now, id);
    id
}

#[test]
fn want__opens_one_for_each_pair_of_tenants() {
    let (mut pool, now) = (Pool::new(8), Instant::now());
    let first = open(&mut pool, now, &by(1, 0));
    assert_eq!(pool.want(now, &by(1, 0)), Some(first));
    let other = SharedBy {
        here: TenantName::new("x").unwrap(),
        ..by(1, 0)
    };
    for one in [by(1, 1), by(2, 0), other] {
        assert_ne!(open(&mut pool, now, &one), first);
    }
    assert_eq!((pool.len(), pool.next_step()), (4, None));
}

/// Pools of the engines of a node give no number twice.
#[test]
fn want__numbers_of_several_pools() {
    let now = Instant::now();
    let mut pools = [1, 2, 3].map(|first| Pool::new(8).with_numbers((first, 3)));
    let mut ids = BTreeSet::new();
    for class in 0..4 {
        for pool in &mut pools {
            ids.insert(open(pool, now, &by(1, class)));
        }
    }
    assert_eq!(ids, (1..=12).map(SharedId).collect());
}

#[test]
fn want__while_it_is_opened_asks_once() {
    let (mut pool, now) = (Pool::new(8), Instant::now());
    assert_eq!(pool.want(now, &by(1, 0)), None);
    assert_eq!(pool.want(now, &by(1, 0)), None);
    assert!(matches!(pool.next_step(), Some(Step::Open(..))));
    assert_eq!(pool.next_step(), None);
}

#[test]
fn want__at_the_limit_puts_away_the_one_that_was_not_seen_for_longest() {
    let (mut pool, now) = (Pool::new(3), Instant::now());
    let ids = [1, 2, 3].map(|peer| open(&mut pool, now + after(peer), &by(peer as u32, 0)));
    assert_eq!(pool.want(now + after(10), &by(1, 0)), Some(ids[0]));
    assert_eq!(pool.want(now + after(21), &by(4, 0)), None);
    // It has been open for long enough in a moment.
    assert_eq!(pool.next_step(), None);
    assert_eq!(pool.deadline(), Some(now + after(2) + AGAIN_TIME));
    pool.check_time(now + after(40));
    assert_eq!(
        pool.next_step(),
        Some(Step::Close {
            id: ids[1],
            for_room: true
        })
    );
    assert_eq!(pool.next_step(), None, "there is no room yet");
    // Nobody sends on it any more, and who wants it waits until it is away, and then for room.
    assert_eq!(pool.want(now + after(41), &by(2, 0)), None);
    assert_eq!(pool.next_step(), None);
    pool.away(now + after(42), ids[1]);
    assert!(matches!(pool.next_step(), Some(Step::Open(_, one)) if one == by(4, 0)));
    assert_eq!(
        pool.next_step(),
        Some(Step::Close {
            id: ids[2],
            for_room: true
        })
    );
    pool.away(now + after(43), ids[2]);
    assert_eq!(
        pool.next_step(),
        Some(Step::Open(ids[1], by(2, 0))),
        "the same line"
    );
    assert_eq!((pool.next_step(), pool.len()), (None, 3));
}

#[test]
fn stays__another_one_is_asked_and_later_this_one_again() {
    let (mut pool, now) = (Pool::new(2), Instant::now());
    let ids = [1, 2].map(|peer| open(&mut pool, now, &by(peer, 0)));
    let now = now + AGAIN_TIME;
    assert_eq!(pool.want(now, &by(3, 0)), None);
    for id in ids {
        assert_eq!(pool.next_step(), Some(Step::Close { id, for_room: true }));
        assert_eq!(pool.next_step(), None);
        pool.stays(now, id);
    }
    assert_eq!(pool.next_step(), None, "neither can go now");
    assert_eq!(pool.want(now, &by(2, 0)), Some(ids[1]));
    let again = pool.deadline().unwrap();
    assert_eq!(again, now + AGAIN_TIME);
    pool.check_time(again);
    assert_eq!(
        pool.next_step(),
        Some(Step::Close {
            id: ids[0],
            for_room: true
        }),
        "and again"
    );
    pool.away(again, ids[0]);
    assert!(matches!(pool.next_step(), Some(Step::Open(_, one)) if one == by(3, 0)));
    assert_eq!(pool.deadline(), Some(now + IDLE_TIME));
}

#[test]
fn want__of_one_that_stays_is_over() {
    let (mut pool, now) = (Pool::new(1), Instant::now());
    let id = open(&mut pool, now, &by(1, 0));
    let now = now + AGAIN_TIME;
    pool.want(now, &by(2, 0));
    assert_eq!(pool.next_step(), Some(Step::Close { id, for_room: true }));
    assert_eq!(pool.want(now, &by(1, 0)), None);
    pool.stays(now, id);
    assert_eq!(pool.want(now, &by(1, 0)), Some(id));
    // Nothing is left of the wish for it, only the one for the other line.
    pool.ends(id);
    pool.away(now, id);
    assert!(matches!(pool.next_step(), Some(Step::Open(_, one)) if one == by(2, 0)));
    assert_eq!(pool.next_step(), None);
}

#[test]
fn ended__who_wants_it_gets_another_line() {
    let (mut pool, now) = (Pool::new(2), Instant::now());
    let id = open(&mut pool, now, &by(1, 0));
    pool.ends(id);
    assert_eq!(pool.want(now, &by(1, 0)), None);
    pool.ended(now, id);
    assert!(matches!(pool.next_step(), Some(Step::Open(other, one)) if other != id && one == by(1, 0)));
    // One that is away and not wanted leaves nothing.
    let other = open(&mut pool, now, &by(2, 0));
    pool.ends(other);
    pool.away(now, other);
    assert_eq!(pool.len(), 1);
    pool.ended(now, other);
    assert_eq!((pool.len(), pool.next_step()), (1, None));
}

#[test]
fn is_coming__until_nobody_opens_it() {
    let (mut pool, now) = (Pool::new(1), Instant::now());
    let (one, other) = (by(1, 0), by(2, 0));
    assert!(!pool.is_coming(&one));
    let id = open(&mut pool, now, &one);
    pool.want(now, &other);
    assert!(pool.is_coming(&one) && pool.is_coming(&other));
    // Its next queue pair is wanted, and then not any more.
    pool.ends(id);
    pool.want(now, &one);
    pool.away(now, id);
    assert!(pool.is_coming(&one));
    pool.unwant(&one);
    assert!(!pool.is_coming(&one));
    let Some(Step::Open(id, _)) = pool.next_step() else {
        panic!("nothing is opened");
    };
    assert!(pool.is_coming(&other));
    pool.ended(now, id);
    assert!(!pool.is_coming(&other));
}

#[test]
fn check_time__puts_away_what_is_idle() {
    let (mut pool, now) = (Pool::new(8), Instant::now());
    let ids = [1, 2].map(|peer| open(&mut pool, now, &by(peer, 0)));
    assert_eq!(pool.deadline(), Some(now + IDLE_TIME));
    pool.check_time(now + IDLE_TIME - after(1));
    assert_eq!(pool.next_step(), None);
    let now = now + IDLE_TIME;
    pool.check_time(now);
    assert_eq!(
        pool.next_step(),
        Some(Step::Close {
            id: ids[0],
            for_room: false
        })
    );
    assert_eq!(
        pool.next_step(),
        Some(Step::Close {
            id: ids[1],
            for_room: false
        })
    );
    assert_eq!((pool.next_step(), pool.deadline()), (None, None));
    // One of them is in use.
    pool.stays(now, ids[0]);
    pool.away(now, ids[1]);
    assert_eq!((pool.next_step(), pool.deadline()), (None, Some(now + IDLE_TIME)));
}

#[test]
fn later__asks_a_peer_without_room_again() {
    let (mut pool, now) = (Pool::new(8), Instant::now());
    pool.want(now, &by(1, 0));
    let Some(Step::Open(id, _)) = pool.next_step() else {
        panic!("nothing is opened");
    };
    pool.later(now, id);
    assert_eq!(pool.want(now, &by(1, 0)), None);
    assert_eq!((pool.next_step(), pool.len()), (None, 0));
    let again = pool.deadline().unwrap();
    assert_eq!(again, now + AGAIN_TIME);
    pool.check_time(again);
    assert!(matches!(pool.next_step(), Some(Step::Open(..))));
    assert_eq!((pool.next_step(), pool.deadline()), (None, None));
}

#[test]
fn accept__what_a_peer_opens_serves_this_node_too() {
    let (mut pool, now) = (Pool::new(1), Instant::now());
    let id = pool.accept(now, &by(1, 0)).unwrap();
    assert_eq!(pool.want(now, &by(1, 0)), None, "it is not ready yet");
    assert_eq!(pool.next_step(), None);
    pool.opened(now, id);
    assert_eq!(pool.want(now, &by(1, 0)), Some(id));
    assert_eq!(pool.accept(now, &by(2, 0)), None);
    assert_eq!(pool.next_step(), None);
    let now = now + AGAIN_TIME;
    assert_eq!(pool.accept(now, &by(2, 0)), None);
    assert_eq!(pool.next_step(), Some(Step::Close { id, for_room: true }));
    pool.ended(now, id);
    assert!(pool.accept(now, &by(2, 0)).is_some());
}

#[test]
fn accept__in_place_of_the_own_attempt() {
    let (mut pool, now) = (Pool::new(1), Instant::now());
    pool.want(now, &by(1, 0));
    let Some(Step::Open(id, _)) = pool.next_step() else {
        panic!("nothing is opened");
    };
    assert_eq!(pool.asked_for(&by(1, 0)), Some(id));
    assert_eq!(pool.asked_for(&by(2, 0)), None);
    assert_eq!(pool.accept(now, &by(1, 0)), Some(id));
    assert_eq!(pool.asked_for(&by(1, 0)), None);
    pool.opened(now, id);
    assert_eq!(pool.want(now, &by(1, 0)), Some(id));
}

#[test]
fn forget__what_is_wanted_of_a_peer() {
    let (mut pool, now) = (Pool::new(1), Instant::now());
    let id = open(&mut pool, now, &by(1, 0));
    for (peer, class) in [(2, 0), (3, 0), (2, 1)] {
        pool.want(now, &by(peer, class));
    }
    let mut forgotten = pool.forget(by(2, 0).peer);
    forgotten.sort();
    assert_eq!(forgotten, [by(2, 0), by(2, 1)]);
    pool.ended(now, id);
    assert!(matches!(pool.next_step(), Some(Step::Open(_, one)) if one == by(3, 0)));
}

/// 10,000 connections to 1,000 peers, of which any may want to send at any time, under a limit of 64: it is never exceeded, and each of them has its turn.
#[test]
fn want__ten_thousand_connections_to_a_thousand_peers() {
    const LIMIT: usize = 64;
    let (mut pool, mut now) = (Pool::new(LIMIT), Instant::now());
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    // Connections that have something to send, by those who share it, and the queue pairs in use.
    let mut waiting: HashMap<SharedBy, usize> = HashMap::new();
    let mut sending: Vec<(SharedId, SharedBy)> = Vec::new();
    let mut steps: Vec<Step> = Vec::new();
    let (mut sent, mut evicted, mut rounds) = (0, 0, 0);
    let mut left = 10_000;
    while left > 0 || !waiting.is_empty() || !sending.is_empty() {
        rounds += 1;
        assert!(rounds < 200_000, "{} wait", waiting.len());
        now += Duration::from_micros(50);
        for _ in 0..random(40).min(left) {
            left -= 1;
            *waiting.entry(by(random(1000) as u32, 0)).or_default() += 1;
        }
        let all: Vec<SharedBy> = waiting.keys().cloned().collect();
        for one in all {
            if let Some(id) = pool.want(now, &one) {
                sent += waiting.remove(&one).unwrap_or(0);
                sending.push((id, one));
            }
        }
        if !sending.is_empty() {
            sending.swap_remove(random(sending.len()));
        }
        steps.extend(std::iter::from_fn(|| pool.next_step()));
        // Peers answer in any order, and sometimes they are in use themselves, or have no room.
        while !steps.is_empty() && random(3) > 0 {
            match steps.swap_remove(random(steps.len())) {
                Step::Open(id, _) if random(10) == 0 => pool.later(now, id),
                Step::Open(id, _) => pool.opened(now, id),
                Step::Close { id, .. }
                    if random(10) == 0 || sending.iter().any(|(other, _)| *other == id) =>
                {
                    pool.stays(now, id);
                }
                Step::Close { id, .. } => {
                    evicted += 1;
                    pool.away(now, id);
                }
            }
            assert!(pool.len() <= LIMIT, "{} queue pairs", pool.len());
            steps.extend(std::iter::from_fn(|| pool.next_step()));
        }
        if pool.deadline().is_some_and(|deadline| deadline <= now) {
            pool.check_time(now);
        }
    }
    assert_eq!(sent, 10_000);
    assert!(evicted > 900, "{evicted}");
}

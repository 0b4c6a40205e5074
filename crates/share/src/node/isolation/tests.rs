//! Each victim beside each attacker: the victim's 99th percentile is at most twice its value alone, and its bandwidth at least 0.95 of its share.

use super::*;

const WARM_UP_NS: u64 = 12_000_000;
const MEASURED_NS: u64 = 12_000_000;

const BANDWIDTH: Load = load(Kind::Write, MIB, 4, 1);

/// An attacker, and the part of the link that it leaves to a victim whose share is equal to its own, or to that of each of its connections.
struct Attacker {
    name: &'static str,
    load: Load,
    leaves: [f64; 2],
}

const fn attacker(name: &'static str, load: Load, leaves: [f64; 2]) -> Attacker {
    Attacker { name, load, leaves }
}

const ATTACKERS: [Attacker; 9] = [
    attacker("small messages", load(Kind::Write, 64, 256, 4), [0.5, 0.2]),
    attacker("small SENDs", load(Kind::Send, 64, 64, 4), [0.5, 0.2]),
    attacker("READs", load(Kind::Read, MIB, 16, 4), [0.5, 0.2]),
    attacker("bad keys", load(Kind::BadKey, 64, 4, 8), [1.0, 1.0]),
    attacker("registrations", load(Kind::Register, 64, 0, 0), [1.0, 1.0]),
    attacker("connects", load(Kind::Connect, 64, 1, 16), [1.0, 1.0]),
    // The others send 950,000 messages a second, of which each counts for 4 KiB.
    attacker(
        "a slow receiver of 100",
        Load {
            without_receives: 1,
            answer_ns: 100_000,
            ..load(Kind::Send, 64, 1, 100)
        },
        [0.68, 0.68],
    ),
    attacker(
        "100 slow receivers",
        Load {
            without_receives: 100,
            ..load(Kind::Send, 64, 64, 100)
        },
        [1.0, 1.0],
    ),
    attacker("unequal messages", load(Kind::Write, 4 * KIB, 64, 4), [0.5, 0.2]),
];

/// Runs a victim beside an attacker: each on a queue pair of its tenant, or both on one.
fn beside(victim: Load, attacker: Option<Load>, is_shared: bool) -> Measured {
    let loads: Vec<(Load, usize)> = std::iter::once(victim)
        .chain(attacker)
        .enumerate()
        .map(|(at, load)| (load, if is_shared { 0 } else { at }))
        .collect();
    World::new(&loads).run(WARM_UP_NS, MEASURED_NS)
}

/// Asserts that the 99th percentile of a victim with one request outstanding is at most twice its value alone, beside each attacker.
#[track_caller]
fn assert_latency(kind: Kind, bytes: u32) {
    let victim = load(kind, bytes, 1, 1);
    let alone = beside(victim, None, true);
    println!(
        "{kind:?} of {bytes} bytes alone: {:.1} / {:.1} us",
        alone.p(50),
        alone.p(99)
    );
    for Attacker { name, load, .. } in ATTACKERS {
        for is_shared in [false, true] {
            let measured = beside(victim, Some(load), is_shared);
            let times = measured.p(99) / alone.p(99);
            println!(
                "  beside {name}, on a shared queue pair: {is_shared}: {:.1} / {:.1} us, {times:.2} times",
                measured.p(50),
                measured.p(99),
            );
            assert!(times <= 2.0, "{kind:?} of {bytes} bytes beside {name}");
        }
    }
}

#[test]
fn latency__of_short_writes_at_most_twice_that_alone() {
    assert_latency(Kind::Write, 64);
}

#[test]
fn latency__of_longer_writes_at_most_twice_that_alone() {
    assert_latency(Kind::Write, 16 * KIB);
}

#[test]
fn latency__of_reads_at_most_twice_that_alone() {
    assert_latency(Kind::Read, 64);
}

#[test]
fn latency__of_short_sends_at_most_twice_that_alone() {
    assert_latency(Kind::Send, 64);
}

#[test]
fn latency__of_longer_sends_at_most_twice_that_alone() {
    assert_latency(Kind::Send, 16 * KIB);
}

#[test]
fn bandwidth__at_least_its_share() {
    let alone = beside(BANDWIDTH, None, true).gbps();
    println!("alone: {alone:.1} Gbit/s");
    for Attacker { name, load, leaves } in ATTACKERS {
        for is_shared in [false, true] {
            let measured = beside(BANDWIDTH, Some(load), is_shared).gbps();
            let share = alone * leaves[usize::from(is_shared)];
            println!(
                "  beside {name}, on a shared queue pair: {is_shared}: {measured:.1} Gbit/s, {:.2} of its share",
                measured / share
            );
            assert!(measured >= 0.95 * share, "beside {name}");
        }
    }
}

/// Returns how many WRITEs of 4 KiB the node posts at once, 1,024 of which are in flight.
fn posted_at_once(connections: usize, others: Option<Load>) -> f64 {
    let load = load(Kind::Write, 4 * KIB, 1024 / connections, connections);
    let measured = beside(load, others, true);
    measured.latencies_ns.len() as f64 / measured.lists as f64
}

#[test]
fn lists__of_many_connections_have_the_requests_of_many() {
    for connections in [1, 64, 256, 1024] {
        let requests = posted_at_once(connections, None);
        println!("{connections} connections: {requests:.1} requests in a list");
        assert!(requests > 12.0, "{requests:.1} of {connections} connections");
    }
}

#[test]
fn lists__are_short_beside_short_messages_of_others() {
    let requests = posted_at_once(1024, Some(load(Kind::Write, 64, 1, 1)));
    assert!(requests <= 4.0, "{requests:.1}");
}

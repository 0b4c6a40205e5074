//! Fuzzing of the engine by stable means: random events of every kind, and the seeds of `fuzz/corpus/rnic/`, mutated.
//! `fuzz/stable.rs` says how long, and how to run one input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../../fuzz/stable.rs"]
mod stable;

use rdmux_rnic::{Counters, Status, WcOpcode};
use rdmux_sim::fuzz::Reach;
use stable::{Rng, corpus, mutate};
use strum::VariantArray;

/// Number of random inputs that, together with the corpus, must reach every part of the engine.
const JUDGED_INPUTS: u64 = 2_000;
/// Minimum numbers of distinct packets and completions that they reach; see [`Reach`].
const PACKETS_MIN: usize = 650;
const COMPLETIONS_MIN: usize = 240;
const EVENTS: [&str; 16] = [
    "CQ error",
    "QP error",
    "SQ drained",
    "SRQ limit reached",
    "communication established",
    "completion",
    "last WQE reached",
    "SIDR reply",
    "SIDR request",
    "disconnected",
    "established",
    "rejected",
    "reply",
    "request",
    "unreachable",
    "wants a grant",
];

/// Returns events of every kind; the engine's own traffic makes the packets that are then changed.
fn random(seed: u64) -> Vec<u8> {
    let mut rng = Rng(seed);
    (0..20 + rng.below(2400)).map(|_| rng.next() as u8).collect()
}

fn run(seed: u64) -> Reach {
    rdmux_sim::fuzz::rnic(&random(seed))
}

#[test]
fn fuzz__rnic() {
    let corpus = corpus("rnic");
    let input = |seed| match seed % 2 {
        0 => random(seed),
        _ => mutate(&mut Rng(seed), &corpus),
    };
    stable::fuzz("rnic", &corpus, input, |input| drop(rdmux_sim::fuzz::rnic(input)));
}

#[test]
fn fuzz__is_the_same_for_the_same_input() {
    for seed in 0..20 {
        assert_eq!(run(seed), run(seed));
    }
}

/// These inputs are always the same, so this fails when a change of the fuzzer or of the engine cuts it off from something.
#[test]
fn fuzz__reaches_every_part_of_the_engine() {
    let mut reach = Reach::default();
    for seed in 0..JUDGED_INPUTS {
        reach.add(run(seed));
    }
    for input in corpus("rnic") {
        reach.add(rdmux_sim::fuzz::rnic(&input));
    }
    println!(
        "{JUDGED_INPUTS} inputs: {} packets by service, state and opcode, {} completions by service, operation and status",
        reach.packets.len(),
        reach.completions.len(),
    );
    let missing_events: Vec<&str> = EVENTS
        .into_iter()
        .filter(|name| !reach.events.contains(name))
        .collect();
    assert!(missing_events.is_empty(), "{missing_events:?}");
    let counters = Counters::default();
    let missing_counters: Vec<&str> = counters
        .iter()
        .map(|(name, ..)| name)
        .filter(|name| !reach.counters.contains(name))
        .collect();
    assert!(missing_counters.is_empty(), "{missing_counters:?}");
    let succeeds = |opcode: &WcOpcode| {
        let done = |(_, of, status): &(u8, u8, u8)| *of == *opcode as u8 && *status == Status::Success as u8;
        reach.completions.iter().any(done)
    };
    let never_done: Vec<WcOpcode> = WcOpcode::VARIANTS
        .iter()
        .copied()
        .filter(|opcode| !succeeds(opcode))
        .collect();
    assert!(never_done.is_empty(), "{never_done:?}");
    let ends = |status: &Status| {
        let ended = |(_, _, with): &(u8, u8, u8)| *with == *status as u8;
        reach.completions.iter().any(ended)
    };
    let never_seen: Vec<Status> = Status::VARIANTS
        .iter()
        .copied()
        .filter(|status| !ends(status))
        .collect();
    assert!(never_seen.is_empty(), "{never_seen:?}");
    assert!(reach.packets.len() >= PACKETS_MIN && reach.completions.len() >= COMPLETIONS_MIN);
}

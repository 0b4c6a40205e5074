//! Fuzzing of the engine by stable means, for RDMUX_FUZZ_SECONDS (1 unless given). A failure prints its seed;
//! RDMUX_FUZZ_SEED=N runs that input again.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::panic::{catch_unwind, resume_unwind};
use std::time::{Duration, Instant, SystemTime};

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_rnic::{Counters, Status, WcOpcode};
use rdmux_sim::fuzz::Reach;

/// Inputs by which it is judged what inputs reach.
const JUDGED_INPUTS: u64 = 2_000;
/// Distinct packets and completions that they reach at least; see [`Reach`].
const PACKETS_MIN: usize = 700;
const COMPLETIONS_MIN: usize = 250;
const EVENTS: [&str; 15] = [
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
];
const OPERATIONS: [WcOpcode; 12] = [
    WcOpcode::Send,
    WcOpcode::Write,
    WcOpcode::Read,
    WcOpcode::CompareSwap,
    WcOpcode::FetchAdd,
    WcOpcode::AtomicWrite,
    WcOpcode::Flush,
    WcOpcode::BindWindow,
    WcOpcode::Register,
    WcOpcode::LocalInvalidate,
    WcOpcode::Recv,
    WcOpcode::RecvRdmaWithImm,
];
const STATUSES: [Status; 12] = [
    Status::Success,
    Status::LocalLength,
    Status::LocalProtection,
    Status::LocalQpOperation,
    Status::Flushed,
    Status::BadResponse,
    Status::RemoteInvalidRequest,
    Status::RemoteAccess,
    Status::RemoteOperation,
    Status::RetryExceeded,
    Status::RnrRetryExceeded,
    Status::MemoryBind,
];

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    let number = value.parse();
    Some(number.unwrap_or_else(|_| panic!("{variable}={value} is not a number")))
}

/// Events of every kind; the engine's own traffic makes the packets that are then changed.
fn input(seed: u64) -> Vec<u8> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut bytes = vec![0; 20 + (rng.next_u32() % 2400) as usize];
    rng.fill_bytes(&mut bytes);
    bytes
}

fn run(seed: u64) -> Reach {
    catch_unwind(|| rdmux_sim::fuzz::rnic(&input(seed))).unwrap_or_else(|panic| {
        eprintln!("fuzz rnic: RDMUX_FUZZ_SEED={seed} failed");
        resume_unwind(panic)
    })
}

#[test]
fn fuzz__rnic() {
    if let Some(seed) = number("RDMUX_FUZZ_SEED") {
        run(seed);
        return;
    }
    let duration = Duration::from_secs(number("RDMUX_FUZZ_SECONDS").unwrap_or(1));
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let first = (since_epoch.as_nanos() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
    let (begin, mut count) = (Instant::now(), 0);
    while begin.elapsed() < duration {
        run(first + count);
        count += 1;
    }
    println!("fuzz rnic: {count} inputs from seed {first}");
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
    let never_done: Vec<WcOpcode> = OPERATIONS
        .into_iter()
        .filter(|opcode| !succeeds(opcode))
        .collect();
    assert!(never_done.is_empty(), "{never_done:?}");
    let ends = |status: &Status| {
        let ended = |(_, _, with): &(u8, u8, u8)| *with == *status as u8;
        reach.completions.iter().any(ended)
    };
    let never_seen: Vec<Status> = STATUSES.into_iter().filter(|status| !ends(status)).collect();
    assert!(never_seen.is_empty(), "{never_seen:?}");
    assert!(reach.packets.len() >= PACKETS_MIN && reach.completions.len() >= COMPLETIONS_MIN);
}

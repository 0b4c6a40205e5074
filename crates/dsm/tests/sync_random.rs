//! Random runs of synchronisation with more nodes, threads and objects than the model checker can do.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod network;
mod seeds;
mod sync_world;

use std::num::NonZeroU32;
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;
use rdmux_dsm::sync::{Body, Call, Mode, Operation, Refusal, THREADS_MAX};

use seeds::below;
use sync_world::{Act, Mishaps, Place, SPOILT, World, id};

const NODES: usize = 5;
const THREADS: usize = 10;
const LOCKS: usize = 6;
/// Rounds of a run, each of which ends with all threads at a barrier.
const ROUNDS: usize = 6;

/// Returns acts in which a lock is held.
fn section(object: u64, mode: Mode, inside: &[Act]) -> Vec<Act> {
    let lock = [Act::Call(Call::Lock { object, mode })];
    let unlock = [Act::Call(Call::Unlock { object, mode })];
    [&lock, inside, &unlock].concat()
}

/// Adds a few calls for which nobody else has to do anything, about objects from a first one on.
fn add_calls(dice: &mut ChaCha8Rng, first: u64, acts: &mut Vec<Act>) {
    for _ in 0..below(dice, 4) {
        let object = first + below(dice, LOCKS) as u64;
        match below(dice, 6) {
            0 => acts.push(Act::Call(Call::FetchAdd { object, value: 1 })),
            1 => acts.push(Act::Call(Call::Signal { condition: object })),
            2 => acts.extend(section(object, Mode::Exclusive, &[])),
            3 => {
                let word = Act::Call(Call::Load { object });
                acts.extend(section(object, Mode::Shared, &[word]));
            }
            _ => acts.extend(section(object, Mode::Shared, &[])),
        }
    }
}

/// Adds a round: some threads wait until one has set a flag, and then all meet.
fn add_round(dice: &mut ChaCha8Rng, round: usize, programs: &mut [Vec<Act>]) {
    let setter = below(dice, THREADS);
    let (flag, condition, lock) = (round, below(dice, LOCKS) as u64, below(dice, LOCKS) as u64);
    let is_alone = below(dice, 2) == 0;
    let is_sum = below(dice, 2) == 0;
    let mut waiters = 0;
    for (thread, acts) in programs.iter_mut().enumerate() {
        add_calls(dice, 0, acts);
        if thread == setter {
            acts.extend(section(lock, Mode::Exclusive, &[Act::Set { flag, lock }]));
            acts.push(Act::Call(Call::Broadcast { condition }));
        } else if below(dice, 3) == 0 && (!is_alone || waiters == 0) {
            waiters += 1;
            let until = Act::Until {
                flag,
                condition,
                lock,
                setter: setter % NODES,
            };
            acts.extend(section(lock, Mode::Exclusive, &[until]));
        }
        add_calls(dice, 0, acts);
        let (object, parties) = (3, NonZeroU32::new(THREADS as u32).unwrap());
        acts.push(Act::Call(match is_sum {
            true => Call::Reduce {
                object,
                parties,
                operation: Operation::SumF64,
                value: (below(dice, 1000) as f64 / 7.0).to_bits(),
            },
            false => Call::Barrier { object, parties },
        }));
    }
}

fn world(programs: Vec<Vec<Act>>, dice: &mut ChaCha8Rng, mishaps: Mishaps) -> World {
    let programs = programs.into_iter().enumerate();
    let threads: Vec<_> = programs.map(|(it, acts)| (it % NODES, Arc::from(acts))).collect();
    let homes: Vec<Place> = (0..7).map(|_| below(dice, NODES)).collect();
    World::new(&threads, &homes, mishaps)
}

/// Runs a world to its end, and returns the numbers of steps and of calls that were carried out.
fn run(seed: u64) -> (usize, usize) {
    let dice = &mut ChaCha8Rng::seed_from_u64(seed);
    let mut programs = vec![vec![]; THREADS];
    (0..ROUNDS).for_each(|round| add_round(dice, round, &mut programs));
    let is_calm = below(dice, 3) == 0;
    let mishaps = Mishaps {
        duplicates: below(dice, 50) as u8,
        crashes: if is_calm { 0 } else { below(dice, 3) as u8 },
        expulsions: if is_calm { 0 } else { below(dice, 2) as u8 },
        reorders: below(dice, 2) == 1,
        hostile: None,
    };
    let mut world = world(programs, dice, mishaps);
    let mut steps = vec![];
    for count in 0.. {
        steps.clear();
        world.steps(&mut steps);
        if below(dice, 1000) >= 5 {
            steps.retain(|it| !it.is_mishap());
        }
        if steps.is_empty() {
            assert_eq!(world.stuck(), None, "seed {seed}");
            let successes = world.threads.iter().map(|it| it.successes).sum();
            return (count, successes);
        }
        world.take(steps[below(dice, steps.len())]);
        assert_eq!(world.flaw, None, "seed {seed}, step {count}");
    }
    unreachable!("a run ends")
}

fn body(dice: &mut ChaCha8Rng) -> Body {
    // The last one never was a member.
    let node = id(below(dice, NODES + 1));
    let named = Some(node).filter(|_| below(dice, 2) == 0);
    let mode = [Mode::Shared, Mode::Exclusive][below(dice, 2)];
    let value = below(dice, 3) as u64;
    match below(dice, 14) {
        0 => Body::Lock(mode),
        1 => Body::Unlock(mode),
        2 | 3 => {
            let operation = Some(Operation::SumU64).filter(|_| below(dice, 2) == 0);
            Body::Gather {
                operation,
                parties: NonZeroU32::new(1 + below(dice, 3) as u32).unwrap(),
                value: operation.map_or(0, |_| value),
            }
        }
        4 => Body::Wait,
        5 => Body::Signal,
        6 => Body::Broadcast,
        7 => Body::FetchAdd(value),
        8 => Body::CompareSwap {
            expected: value,
            new: 1,
        },
        9 => Body::Done(value),
        10 => Body::Granted { recovered: named },
        11 => Body::Queued,
        12 => Body::Woken { gone: named },
        _ => {
            let refusals = [Refusal::Gone(node), Refusal::Mismatch, Refusal::NoRoom];
            Body::Refused(refusals[below(dice, 3)])
        }
    }
}

/// Runs a world with a node that sends what it likes about some objects until it is expelled; then all others go on to their end. Returns how many
/// calls were carried out.
fn run_with_hostile(seed: u64) -> usize {
    const HOSTILE: Place = NODES - 1;
    let dice = &mut ChaCha8Rng::seed_from_u64(seed);
    let mut programs = vec![vec![]; THREADS];
    for (thread, acts) in programs.iter_mut().enumerate() {
        for _ in 0..20 {
            add_calls(dice, SPOILT, acts);
            if thread % NODES != HOSTILE {
                add_calls(dice, 0, acts);
            }
        }
        let (object, parties) = (SPOILT, NonZeroU32::new(2).unwrap());
        acts.push(Act::Call(Call::Barrier { object, parties }));
    }
    let mishaps = Mishaps {
        hostile: Some(HOSTILE),
        ..Mishaps::default()
    };
    let mut world = world(programs, dice, mishaps);
    let mut steps = vec![];
    for count in 0.. {
        steps.clear();
        world.steps(&mut steps);
        if count == 3000 {
            world.expel(HOSTILE);
        } else if count < 3000 && (steps.is_empty() || below(dice, 4) == 0) {
            let thread = below(dice, 4) as u16 + THREADS_MAX * u16::from(below(dice, 50) == 0);
            let object = SPOILT + below(dice, LOCKS) as u64;
            world.forge(below(dice, NODES - 1), thread, object, body(dice));
        } else if steps.is_empty() {
            break;
        } else {
            world.take(steps[below(dice, steps.len())]);
        }
        assert_eq!(world.flaw, None, "seed {seed}, step {count}");
    }
    assert_eq!(world.stuck(), None, "seed {seed}");
    world.threads.iter().map(|it| it.successes).sum()
}

#[test]
fn hostile_node__spoils_only_objects_that_it_uses() {
    let successes: usize = (0..200).map(run_with_hostile).sum();
    println!("{successes} calls beside a hostile node");
    assert!(successes > 0);
}

#[test]
fn sync__keeps_the_rules_in_random_runs() {
    seeds::run_all(run, "calls");
}

//! Random runs of more nodes and units than the model checker can do.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod network;
mod seeds;
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;
use rdmux_dsm::protocol::{Access, Body, Right};

use seeds::below;
use world::{Mishaps, Operation, Place, Step, World, id};

const NODES: usize = 5;
const UNITS: usize = 20;
const THREADS: usize = 10;
/// Accesses of a run.
const ACCESSES: usize = 1000;

fn program(dice: &mut ChaCha8Rng, units: usize, writes: usize) -> Arc<[Operation]> {
    let operation = |_| match below(dice, 10) < writes {
        true => (Access::Write, below(dice, units)),
        false => (Access::Read, below(dice, units)),
    };
    (0..ACCESSES / THREADS).map(operation).collect()
}

/// The order of the versions of each unit, and the last one that each thread has seen.
#[derive(Default)]
struct Versions {
    orders: BTreeMap<usize, BTreeMap<u32, usize>>,
    seen: BTreeMap<(usize, usize), usize>,
}

impl Versions {
    /// Takes an access, and returns whether it goes back to a version before the one that its thread has seen.
    fn goes_back(&mut self, thread: usize, (access, unit): Operation, value: u32) -> bool {
        let order = self
            .orders
            .entry(unit)
            .or_insert_with(|| BTreeMap::from([(0, 0)]));
        if access == Access::Write {
            order.insert(value, order.len());
        }
        let Some(version) = order.get(&value) else {
            return true;
        };
        let before = self.seen.insert((thread, unit), *version);
        before.is_some_and(|before| before > *version)
    }
}

/// Runs a world to its end, and returns the numbers of steps and of accesses that took place.
fn run(seed: u64) -> (usize, usize) {
    let dice = &mut ChaCha8Rng::seed_from_u64(seed);
    // Runs differ in how often units change hands.
    let (units, writes) = (1 + below(dice, UNITS), 1 + below(dice, 9));
    let threads: Vec<_> = (0..THREADS)
        .map(|it| (it % NODES, program(dice, units, writes)))
        .collect();
    let homes: Vec<Place> = (0..UNITS).map(|_| below(dice, NODES)).collect();
    let is_calm = below(dice, 3) == 0;
    let mishaps = Mishaps {
        duplicates: below(dice, 50) as u8,
        crashes: if is_calm { 0 } else { below(dice, 3) as u8 },
        expulsions: if is_calm { 0 } else { below(dice, 2) as u8 },
        repeats: below(dice, 20) as u8,
        leaver: None,
        reorders: below(dice, 2) == 1,
        hostile: None,
    };
    let is_first_touch = below(dice, 2) == 1;
    let mut world = World::new(&threads, (&homes, is_first_touch), mishaps, u8::MAX);
    let mut versions = Versions::default();
    let (mut steps, mut accesses) = (vec![], 0);
    for count in 0.. {
        steps.clear();
        world.steps(&mut steps);
        if below(dice, 1000) >= 5 {
            steps.retain(|it| !it.is_mishap());
        }
        if steps.is_empty() {
            assert_eq!(world.stuck(), None, "seed {seed}");
            return (count, accesses);
        }
        let step = steps[below(dice, steps.len())];
        let ended = |world: &World| match step {
            Step::Access(thread) => world.threads[thread].results.len(),
            _ => 0,
        };
        let before = ended(&world);
        world.take(step);
        assert_eq!(world.flaw, None, "seed {seed}, step {count}");
        if let Step::Access(thread) = step
            && ended(&world) > before
            && let Some((operation, value)) = world.threads[thread].last()
        {
            accesses += 1;
            let goes_back = versions.goes_back(thread, operation, value);
            assert!(
                !goes_back,
                "seed {seed}, step {count}: thread {thread}, {operation:?}, {value}"
            );
        }
    }
    unreachable!("a run ends")
}

fn body(dice: &mut ChaCha8Rng) -> Body {
    // The last one never was a member.
    let node = id(below(dice, NODES + 1));
    let right = [Right::Shared, Right::Exclusive][below(dice, 2)];
    match below(dice, 10) {
        0 => Body::Ask(right),
        1 => Body::Recall([Right::Invalid, Right::Shared][below(dice, 2)]),
        2 => Body::Yielded,
        3 => Body::Grant { right, source: None },
        4 => Body::Grant {
            right,
            source: Some(node),
        },
        5 => Body::Installed,
        6 => Body::Failed,
        7 => Body::Locate,
        8 => Body::Home(node),
        _ => Body::Refuse(node),
    }
}

/// Runs a world with a node that sends what it likes until it is expelled; then all others go on to their end. It asks for the first half of the
/// units only. Returns how many accesses took place to units in which it had no part.
fn run_with_hostile(seed: u64) -> usize {
    const HOSTILE: Place = NODES - 1;
    let dice = &mut ChaCha8Rng::seed_from_u64(seed);
    let (units, writes) = (1 + below(dice, UNITS), 1 + below(dice, 9));
    let asked = units.div_ceil(2);
    let threads: Vec<_> = (0..THREADS)
        .map(|it| it % NODES)
        .map(|at| {
            (
                at,
                program(dice, if at == HOSTILE { asked } else { units }, writes),
            )
        })
        .collect();
    let homes: Vec<Place> = (0..UNITS).map(|_| below(dice, NODES)).collect();
    let mishaps = Mishaps {
        hostile: Some(HOSTILE),
        ..Mishaps::default()
    };
    let is_first_touch = below(dice, 2) == 1;
    let mut world = World::new(&threads, (&homes, is_first_touch), mishaps, 20);
    let mut steps = vec![];
    for count in 0.. {
        steps.clear();
        world.steps(&mut steps);
        if count == 2000 {
            world.expel(HOSTILE);
        } else if count < 2000 && (steps.is_empty() || below(dice, 4) == 0) {
            let (to, body) = (below(dice, NODES - 1), body(dice));
            let units = if matches!(body, Body::Ask(_) | Body::Locate) {
                asked
            } else {
                units
            };
            let (unit, request) = (below(dice, units), below(dice, 60));
            world.forge(to, unit as u64, request as u64, body);
        } else if steps.is_empty() {
            break;
        } else {
            world.take(steps[below(dice, steps.len())]);
        }
        assert_eq!(world.flaw, None, "seed {seed}, step {count}");
    }
    assert_eq!(world.stuck(), None, "seed {seed}");
    world.untouched()
}

#[test]
fn hostile_node__spoils_only_units_that_it_has_a_part_in() {
    let untouched: usize = (0..200).map(run_with_hostile).sum();
    println!("{untouched} accesses to units in which the hostile node had no part");
    assert!(untouched > 0);
}

#[test]
fn protocol__keeps_the_rules_in_random_runs() {
    seeds::run_all(run, "accesses");
}

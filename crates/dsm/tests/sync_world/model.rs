//! All states of small worlds, by the model checker `stateright`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_dsm::sync::{Call, Mode, Operation};
use stateright::{Checker, HasDiscoveries, Model, Property};

use super::{Act, Mishaps, Place, Step, World};

/// A set of worlds.
#[derive(Clone, Debug)]
pub(crate) struct Worlds {
    pub(crate) name: &'static str,
    /// Homes of the objects in turn.
    pub(crate) homes: &'static [Place],
    /// Returns the programs of the threads of each world.
    pub(crate) programs: fn() -> Vec<Threads>,
    pub(crate) mishaps: Mishaps,
    #[cfg(feature = "mutants")]
    pub(crate) mutant: Option<rdmux_dsm::mutant::Mutant>,
}

pub(crate) type Threads = Vec<(Place, Vec<Act>)>;

/// Kinds of mishaps.
const NONE: Mishaps = Mishaps {
    duplicates: 0,
    crashes: 0,
    expulsions: 0,
    reorders: false,
    hostile: None,
};
const REORDERS: Mishaps = Mishaps {
    reorders: true,
    ..NONE
};
const DUPLICATES: Mishaps = Mishaps {
    duplicates: 1,
    ..REORDERS
};
const CRASH: Mishaps = Mishaps { crashes: 1, ..NONE };
const TWO_CRASHES: Mishaps = Mishaps { crashes: 2, ..NONE };
const EXPULSION: Mishaps = Mishaps {
    expulsions: 1,
    ..NONE
};
const CRASH_AND_EXPULSION: Mishaps = Mishaps {
    expulsions: 1,
    ..CRASH
};
const ALL_BUT_EXPULSION: Mishaps = Mishaps {
    crashes: 1,
    ..DUPLICATES
};

const EXCLUSIVE: Mode = Mode::Exclusive;

fn parties(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

fn lock(object: u64, mode: Mode) -> Act {
    Act::Call(Call::Lock { object, mode })
}

fn unlock(object: u64, mode: Mode) -> Act {
    Act::Call(Call::Unlock { object, mode })
}

/// Each takes a lock once, in all combinations of modes.
fn locks(at: &[Place]) -> Vec<Threads> {
    let modes = (0..1 << at.len()).map(|bits: u32| {
        let threads = at.iter().enumerate().map(|(index, at)| {
            let mode = if bits >> index & 1 == 1 {
                Mode::Shared
            } else {
                EXCLUSIVE
            };
            (*at, vec![lock(0, mode), unlock(0, mode)])
        });
        threads.collect()
    });
    modes.collect()
}

fn same(at: &[Place], program: &[Act]) -> Vec<Threads> {
    vec![at.iter().map(|it| (*it, program.to_vec())).collect()]
}

/// All come to a barrier twice. Node 0 is in each world.
fn barriers(at: &[Place]) -> Vec<Threads> {
    let parties = parties(at.len() as u32);
    let barrier = Act::Call(Call::Barrier { object: 0, parties });
    let mut threads = same(at, &[barrier, barrier]);
    threads[0].push((0, vec![]));
    threads
}

/// All reduce twice, values of which a sum depends on the order.
fn reductions(at: &[Place]) -> Vec<Threads> {
    let reduce = |value: f64| {
        Act::Call(Call::Reduce {
            object: 0,
            parties: parties(at.len() as u32),
            operation: Operation::SumF64,
            value: value.to_bits(),
        })
    };
    let values = [[1e16, 1.0], [1.0, -1e16], [-1e16, 1e16]];
    let threads = at.iter().zip(values);
    vec![
        threads
            .map(|(at, values)| (*at, values.map(reduce).to_vec()))
            .collect(),
    ]
}

/// Some wait until a flag is set by the last one, which wakes them by a call.
fn conditions(at: &[Place], wake: Call) -> Vec<Threads> {
    let (condition, object) = (0, 1);
    let set = Act::Set {
        flag: 0,
        lock: object,
    };
    let (take, give) = (lock(object, EXCLUSIVE), unlock(object, EXCLUSIVE));
    let (setter, waiters) = at.split_last().unwrap();
    let until = Act::Until {
        flag: 0,
        condition,
        lock: object,
        setter: *setter,
    };
    let mut threads = same(waiters, &[take, until, give]);
    threads[0].push((*setter, vec![take, set, Act::Call(wake), give]));
    threads
}

const SIGNAL: Call = Call::Signal { condition: 0 };
const BROADCAST: Call = Call::Broadcast { condition: 0 };

fn additions(at: &[Place]) -> Vec<Threads> {
    let add = Act::Call(Call::FetchAdd { object: 0, value: 1 });
    same(at, &[add, add])
}

const fn worlds(
    name: &'static str,
    homes: &'static [Place],
    programs: fn() -> Vec<Threads>,
    mishaps: Mishaps,
) -> Worlds {
    Worlds {
        name,
        homes,
        programs,
        mishaps,
        #[cfg(feature = "mutants")]
        mutant: None,
    }
}

/// Sets that are checked in every run of the tests.
pub(crate) const SMALL: &[Worlds] = &[
    worlds("lock, 2 nodes, crash", &[0], || locks(&[0, 1]), CRASH),
    worlds(
        "lock, 2 of 3 threads at the home, crash",
        &[0],
        || locks(&[0, 0, 1]),
        CRASH,
    ),
    worlds(
        "lock, 2 of 3 threads at one node, crash",
        &[0],
        || locks(&[0, 1, 1]),
        CRASH,
    ),
    worlds("lock, 3 nodes, crash", &[0], || locks(&[0, 1, 2]), CRASH),
    worlds("lock, 3 nodes, expulsion", &[0], || locks(&[0, 1, 2]), EXPULSION),
    worlds(
        "lock, 3 nodes, reordered, duplicate",
        &[0],
        || locks(&[0, 1, 2]),
        DUPLICATES,
    ),
    worlds(
        "lock twice, 2 nodes, reordered, duplicate, crash",
        &[0],
        || {
            let (take, give) = (lock(0, EXCLUSIVE), unlock(0, EXCLUSIVE));
            same(&[0, 1], &[take, give, take, give])
        },
        ALL_BUT_EXPULSION,
    ),
    worlds("barrier, 3 nodes, crash", &[0], || barriers(&[0, 1, 2]), CRASH),
    worlds(
        "barrier, 3 nodes, expulsion",
        &[0],
        || barriers(&[0, 1, 2]),
        EXPULSION,
    ),
    worlds(
        "barrier, 2 of 3 nodes, 2 crashes",
        &[0],
        || barriers(&[1, 2]),
        TWO_CRASHES,
    ),
    worlds(
        "barrier, 2 nodes, reordered, duplicate, crash",
        &[0],
        || barriers(&[0, 1]),
        ALL_BUT_EXPULSION,
    ),
    worlds(
        "reduction, 3 threads, reordered",
        &[1],
        || reductions(&[0, 1, 0]),
        REORDERS,
    ),
    worlds(
        "condition, 2 nodes, crash",
        &[0, 1],
        || conditions(&[0, 1], SIGNAL),
        CRASH,
    ),
    worlds(
        "condition, 3 nodes, crash",
        &[0, 1],
        || conditions(&[1, 2], SIGNAL),
        CRASH,
    ),
    worlds(
        "condition, 3 nodes, a lock at a third one, crash",
        &[2, 0],
        || conditions(&[1, 2], SIGNAL),
        CRASH,
    ),
    worlds(
        "condition, 3 nodes, both at a third one, crash",
        &[0],
        || conditions(&[1, 2], SIGNAL),
        CRASH,
    ),
    worlds(
        "condition, 3 nodes, a lock at a third one, crash and expulsion",
        &[2, 0],
        || conditions(&[1, 2], SIGNAL),
        CRASH_AND_EXPULSION,
    ),
    worlds(
        "condition, 3 nodes, expulsion",
        &[0, 1],
        || conditions(&[1, 2], SIGNAL),
        EXPULSION,
    ),
    worlds(
        "condition, 3 threads, reordered",
        &[0, 1],
        || conditions(&[1, 1, 0], BROADCAST),
        REORDERS,
    ),
    worlds(
        "condition, 3 nodes, reordered, duplicate, crash",
        &[0, 1],
        || conditions(&[1, 2], SIGNAL),
        ALL_BUT_EXPULSION,
    ),
    worlds(
        "condition, 2 nodes, reordered, duplicate",
        &[0, 1],
        || conditions(&[1, 0], SIGNAL),
        DUPLICATES,
    ),
    worlds("word, 3 nodes, crash", &[0], || additions(&[0, 1, 2]), CRASH),
    worlds(
        "word, 2 nodes, reordered, duplicate",
        &[0],
        || additions(&[0, 1]),
        DUPLICATES,
    ),
];

/// Sets that take longer.
pub(crate) const LARGE: &[Worlds] = &[
    worlds(
        "lock, 3 nodes, reordered, duplicate, crash",
        &[0],
        || locks(&[0, 1, 2]),
        ALL_BUT_EXPULSION,
    ),
    worlds(
        "lock, 3 nodes, 2 crashes",
        &[0],
        || locks(&[0, 1, 2]),
        TWO_CRASHES,
    ),
    worlds(
        "lock, 4 threads of 3 nodes, crash",
        &[0],
        || locks(&[0, 1, 2, 2]),
        CRASH,
    ),
    worlds(
        "lock, 3 nodes, crash and expulsion",
        &[0],
        || locks(&[0, 1, 2]),
        CRASH_AND_EXPULSION,
    ),
    worlds(
        "barrier, 3 nodes, reordered, duplicate, crash",
        &[0],
        || barriers(&[0, 1, 2]),
        ALL_BUT_EXPULSION,
    ),
    worlds(
        "barrier, 4 threads, crash and expulsion",
        &[0],
        || barriers(&[0, 1, 1, 2]),
        CRASH_AND_EXPULSION,
    ),
    worlds(
        "condition, 2 waiters, crash and expulsion",
        &[0, 1],
        || conditions(&[1, 2, 0], BROADCAST),
        CRASH_AND_EXPULSION,
    ),
    worlds(
        "condition, 2 waiters at one node, reordered, duplicate, crash",
        &[0, 1],
        || conditions(&[2, 2, 0], BROADCAST),
        ALL_BUT_EXPULSION,
    ),
    worlds(
        "condition, reordered, duplicate, 2 crashes",
        &[0, 0, 2],
        || conditions(&[1, 2], SIGNAL),
        Mishaps {
            crashes: 2,
            ..DUPLICATES
        },
    ),
    worlds(
        "word, 3 nodes, reordered, duplicate, crash",
        &[0],
        || additions(&[0, 1, 2]),
        ALL_BUT_EXPULSION,
    ),
];

/// Result of a check.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) states: usize,
    pub(crate) time: Duration,
    /// The broken rule, and the steps that break it.
    pub(crate) broken: Option<String>,
}

impl Model for Worlds {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        self.switch();
        let world = |threads: Threads| {
            let threads = threads.into_iter();
            let threads: Vec<_> = threads.map(|(at, it)| (at, Arc::from(it))).collect();
            World::new(&threads, self.homes, self.mishaps)
        };
        (self.programs)().into_iter().map(world).collect()
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        world.steps(steps);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        self.switch();
        let mut world = world.clone();
        world.take(step);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("the rules hold", |_, world: &World| {
            world.broken().is_none()
        })]
    }
}

impl Worlds {
    /// Visits all states, or those up to the first that breaks a rule. No step leads back to an earlier state, since nodes count their messages and
    /// threads the steps of their programs. So a rule about states in which nothing is left to happen is one about all runs.
    pub(crate) fn check(self) -> Checked {
        let begun = Instant::now();
        let checker = self.checker().finish_when(HasDiscoveries::Any).spawn_bfs().join();
        let broken = checker.discovery("the rules hold").map(|path| {
            let rule = path.last_state().broken();
            format!("{rule:?} after {:#?}", path.into_actions())
        });
        Checked {
            states: checker.unique_state_count(),
            time: begun.elapsed(),
            broken,
        }
    }

    /// Switches the defect on, for what this thread runs.
    fn switch(&self) {
        #[cfg(feature = "mutants")]
        rdmux_dsm::mutant::set(self.mutant);
    }
}

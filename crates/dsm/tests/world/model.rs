//! All states of small worlds, by the model checker `stateright`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_dsm::protocol::Access;
use stateright::{Checker, HasDiscoveries, Model, Property};

use super::{Mishaps, Operation, Place, Step, World};

/// A set of worlds.
#[derive(Clone, Debug)]
pub(crate) struct Worlds {
    pub(crate) name: &'static str,
    /// Homes of the units, or their registrars if the first touch makes the home.
    pub(crate) homes: &'static [Place],
    pub(crate) is_first_touch: bool,
    pub(crate) programs: Programs,
    pub(crate) mishaps: Mishaps,
    /// Faults that an access may take before its program gives it up.
    pub(crate) faults_max: u8,
    #[cfg(feature = "mutants")]
    pub(crate) mutant: Option<rdmux_dsm::mutant::Mutant>,
}

/// Programs of threads, each at a node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Programs {
    /// All combinations of programs of so many accesses.
    All {
        threads: &'static [Place],
        accesses: usize,
    },
    /// These.
    These(&'static [(Place, &'static [Operation])]),
}

/// Kinds of mishaps.
const NONE: Mishaps = Mishaps {
    duplicates: 0,
    crashes: 0,
    expulsions: 0,
    repeats: 0,
    leaver: None,
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
const ALL_BUT_EXPULSION: Mishaps = Mishaps {
    crashes: 1,
    ..DUPLICATES
};
const CRASH: Mishaps = Mishaps { crashes: 1, ..NONE };
const TWO_CRASHES: Mishaps = Mishaps { crashes: 2, ..NONE };
const EXPULSION: Mishaps = Mishaps {
    expulsions: 1,
    ..NONE
};

/// A node that is expelled by the home of unit 0, where it shares the unit, could read in unit 1, whose home has not heard of the expulsion, what
/// another node writes after it has written unit 0; and then its old copy of unit 0.
const STOPPED_READER: Worlds = Worlds {
    name: "3 nodes, 2 units, a reader that is stopped and goes on",
    homes: &[1, 0],
    is_first_touch: false,
    programs: Programs::These(&[
        (0, &[(Access::Read, 1)]),
        (1, &[(Access::Read, 0), (Access::Write, 0), (Access::Write, 1)]),
        (2, &[(Access::Read, 0), (Access::Read, 1), (Access::Read, 0)]),
    ]),
    mishaps: Mishaps {
        leaver: Some(2),
        ..EXPULSION
    },
    faults_max: 1,
    #[cfg(feature = "mutants")]
    mutant: None,
};

/// Two nodes leave while the home reads what one of them has written.
const TWO_LEAVE: Worlds = Worlds {
    name: "4 nodes, 1 unit, 2 crashes",
    homes: &[0],
    is_first_touch: false,
    programs: Programs::These(&[
        (0, &[(Access::Read, 0)]),
        (1, &[(Access::Write, 0)]),
        (2, &[]),
        (3, &[(Access::Read, 0)]),
    ]),
    mishaps: TWO_CRASHES,
    faults_max: 1,
    #[cfg(feature = "mutants")]
    mutant: None,
};

/// Two nodes read from a third one at a time, which leaves.
const TWO_READ: Worlds = Worlds {
    name: "4 nodes, 1 unit, two reads from one that leaves",
    homes: &[0],
    is_first_touch: false,
    programs: Programs::These(&[
        (0, &[]),
        (1, &[(Access::Write, 0)]),
        (2, &[(Access::Read, 0)]),
        (3, &[(Access::Read, 0)]),
    ]),
    mishaps: Mishaps {
        leaver: Some(1),
        ..CRASH
    },
    faults_max: 2,
    #[cfg(feature = "mutants")]
    mutant: None,
};

/// A read from a node that leaves fails, its end is reported again, and meanwhile the contents are read from another node.
const ENDS_TWICE: Worlds = Worlds {
    name: "3 nodes, 1 unit, a failed read that ends twice",
    homes: &[2],
    is_first_touch: false,
    programs: Programs::These(&[
        (0, &[(Access::Write, 0)]),
        (1, &[(Access::Read, 0)]),
        (2, &[(Access::Read, 0)]),
    ]),
    mishaps: Mishaps {
        leaver: Some(0),
        repeats: 1,
        ..CRASH
    },
    faults_max: 1,
    #[cfg(feature = "mutants")]
    mutant: None,
};

/// Two nodes share a unit and write it, and their home has no part.
const UPGRADES: Programs = Programs::These(&[
    (0, &[]),
    (1, &[(Access::Read, 0), (Access::Write, 0)]),
    (2, &[(Access::Read, 0), (Access::Write, 0)]),
]);

/// Nodes of the threads.
const TWO: &[Place] = &[0, 1];
const TWO_AND_ONE: &[Place] = &[0, 1, 1];
const THREE: &[Place] = &[0, 1, 2];

const fn all(threads: &'static [Place], accesses: usize) -> Programs {
    Programs::All { threads, accesses }
}

const fn worlds(name: &'static str, homes: &'static [Place], programs: Programs, mishaps: Mishaps) -> Worlds {
    Worlds {
        name,
        homes,
        is_first_touch: false,
        programs,
        mishaps,
        faults_max: 2,
        #[cfg(feature = "mutants")]
        mutant: None,
    }
}

/// The same, where the first touch makes the home. `homes` are the registrars.
const fn touched(
    name: &'static str,
    homes: &'static [Place],
    programs: Programs,
    mishaps: Mishaps,
) -> Worlds {
    Worlds {
        is_first_touch: true,
        ..worlds(name, homes, programs, mishaps)
    }
}

/// Two nodes use a unit first, and its registrar has no part.
const TOUCHES: Programs = Programs::These(&[
    (0, &[]),
    (1, &[(Access::Write, 0)]),
    (2, &[(Access::Read, 0), (Access::Write, 0)]),
]);

/// Sets that are checked in every run of the tests: 3.3 million states, 46 s of a processor. The last one has 950,000.
pub(crate) const SMALL: &[Worlds] = &[
    worlds(
        "2 nodes, 1 unit, 1 access, expulsion",
        &[0],
        all(TWO, 1),
        EXPULSION,
    ),
    worlds("2 nodes, 2 units, 1 access, crash", &[0, 1], all(TWO, 1), CRASH),
    worlds(
        "2 nodes, 2 units, 1 access, expulsion",
        &[0, 1],
        all(TWO, 1),
        EXPULSION,
    ),
    worlds("2 nodes, 1 unit, 2 accesses", &[0], all(TWO, 2), NONE),
    worlds(
        "2 nodes, 2 threads at one, 1 unit, 1 access",
        &[0],
        all(TWO_AND_ONE, 1),
        REORDERS,
    ),
    worlds("3 nodes, 1 unit, 1 access", &[0], all(THREE, 1), NONE),
    worlds(
        "3 nodes, 1 unit, 1 access, reordered",
        &[0],
        all(THREE, 1),
        REORDERS,
    ),
    worlds("2 nodes, 1 unit, 2 accesses, crash", &[0], all(TWO, 2), CRASH),
    worlds(
        "2 nodes, 2 units, 2 accesses, reordered",
        &[0, 1],
        all(TWO, 2),
        REORDERS,
    ),
    worlds(
        "2 nodes, 1 unit, 1 access, reordered, duplicate, crash",
        &[0],
        all(TWO, 1),
        ALL_BUT_EXPULSION,
    ),
    worlds(
        "2 nodes, 1 unit, 2 accesses, reordered, duplicate",
        &[0],
        all(TWO, 2),
        DUPLICATES,
    ),
    TWO_LEAVE,
    TWO_READ,
    ENDS_TWICE,
    worlds("3 nodes, 1 unit, two upgrades, crash", &[0], UPGRADES, CRASH),
    worlds(
        "3 nodes, 1 unit, two upgrades, expulsion",
        &[0],
        UPGRADES,
        EXPULSION,
    ),
    STOPPED_READER,
    touched(
        "2 nodes, 2 units, 1 access, first touch, crash",
        &[0, 1],
        all(TWO, 1),
        CRASH,
    ),
    touched(
        "3 nodes, 1 unit, 1 access, first touch, reordered",
        &[0],
        all(THREE, 1),
        REORDERS,
    ),
    touched("3 nodes, 1 unit, first touches, crash", &[0], TOUCHES, CRASH),
    touched(
        "3 nodes, 1 unit, first touches, 2 crashes",
        &[0],
        TOUCHES,
        TWO_CRASHES,
    ),
    touched(
        "3 nodes, 1 unit, first touches, expulsion",
        &[0],
        TOUCHES,
        EXPULSION,
    ),
    worlds("3 nodes, 1 unit, 1 access, crash", &[0], all(THREE, 1), CRASH),
];

/// Sets that take minutes in a release build, with about so many millions of states: 0.3, 0.8, 2.4, 3.9, 1.3, 3.9, 3.1, 8.4, 1.5, 3.8 and 1.2.
pub(crate) const LARGE: &[Worlds] = &[
    worlds(
        "2 nodes, 1 unit, 2 accesses, expulsion",
        &[0],
        all(TWO, 2),
        EXPULSION,
    ),
    worlds(
        "3 nodes, 1 unit, 1 access, reordered, duplicate",
        &[0],
        all(THREE, 1),
        DUPLICATES,
    ),
    worlds(
        "3 nodes, 1 unit, 1 access, expulsion",
        &[0],
        all(THREE, 1),
        EXPULSION,
    ),
    worlds(
        "3 nodes, 1 unit, 1 access, 2 crashes",
        &[0],
        all(THREE, 1),
        TWO_CRASHES,
    ),
    worlds("2 nodes, 2 units, 2 accesses, crash", &[0, 1], all(TWO, 2), CRASH),
    worlds(
        "2 nodes, 2 units, 2 accesses, expulsion",
        &[0, 1],
        all(TWO, 2),
        EXPULSION,
    ),
    worlds("3 nodes, 2 units, 1 access, crash", &[0, 1], all(THREE, 1), CRASH),
    worlds(
        "3 nodes, 2 units, 1 access, expulsion",
        &[0, 1],
        all(THREE, 1),
        EXPULSION,
    ),
    touched(
        "3 nodes, 1 unit, 1 access, first touch, crash",
        &[0],
        all(THREE, 1),
        CRASH,
    ),
    touched(
        "3 nodes, 1 unit, 1 access, first touch, expulsion",
        &[0],
        all(THREE, 1),
        EXPULSION,
    ),
    touched(
        "2 nodes, 2 units, 2 accesses, first touch, crash",
        &[0, 1],
        all(TWO, 2),
        CRASH,
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
        let world = |threads: &[(Place, Arc<[Operation]>)]| {
            World::new(
                threads,
                (self.homes, self.is_first_touch),
                self.mishaps,
                self.faults_max,
            )
        };
        match self.programs {
            Programs::These(threads) => {
                let threads: Vec<_> = threads.iter().map(|(at, it)| (*at, Arc::from(*it))).collect();
                vec![world(&threads)]
            }
            Programs::All { threads, accesses } => {
                let one = sequences(&operations(self.homes.len()), accesses);
                let one: Vec<Arc<[Operation]>> = one.iter().map(|it| Arc::from(&it[..])).collect();
                let together = sequences(&one, threads.len());
                let placed = together.into_iter().map(|it| threads.iter().copied().zip(it));
                placed.map(|it| world(&it.collect::<Vec<_>>())).collect()
            }
        }
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
    /// Visits all states, or those up to the first that breaks a rule. No step leads back to an earlier state, since nodes count their messages.
    /// (A message of a newer epoch that is delivered changes nothing, but then the receiver can hear of that epoch.) So a rule about states in which
    /// nothing is left to happen is one about all runs.
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

fn operations(units: usize) -> Vec<Operation> {
    (0..units)
        .flat_map(|unit| [(Access::Read, unit), (Access::Write, unit)])
        .collect()
}

/// Returns all sequences of so many of the items.
fn sequences<T: Clone>(items: &[T], length: usize) -> Vec<Vec<T>> {
    (0..length).fold(vec![vec![]], |shorter, _| {
        shorter
            .iter()
            .flat_map(|it| {
                items
                    .iter()
                    .map(|item| [&it[..], std::slice::from_ref(item)].concat())
            })
            .collect()
    })
}

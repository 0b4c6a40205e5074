//! Litmus tests of release consistency: short programs of several nodes on real pages, whose outcomes must be among those of a small model.
//!
//! `RDMUX_DSM_LITMUS=100000` sets the number of runs of each.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod board;
mod common;
mod litmus_runner;

use std::collections::{BTreeSet, HashSet};

use common::{MODES, run_as_node};
use litmus_runner::Operation::{self, Acquire, Read, Release, Write};
use litmus_runner::{Place, Program, VARIABLES, X, Y};
use rdmux_dsm::{Consistency, Session};

/// Runs of each program.
const RUNS: usize = 512;
/// Reads of a thread at most.
const READS: usize = 2;
/// Nodes of a program at most.
const NODES: usize = 4;

const TESTS: [Program; 22] = [
    Program {
        name: "MP, release, acquire",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 0],
        is_possible: false,
    },
    Program {
        name: "MP, release",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Read(X)],
        ],
        outcome: &[1, 0],
        is_possible: true,
    },
    Program {
        name: "MP, acquire",
        threads: &[
            &[Write(X, 1), Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 0],
        is_possible: true,
    },
    Program {
        name: "SB, release, acquire",
        threads: &[
            &[Write(X, 1), Release, Acquire, Read(Y)],
            &[Write(Y, 1), Release, Acquire, Read(X)],
        ],
        outcome: &[0, 0],
        is_possible: false,
    },
    Program {
        name: "SB",
        threads: &[&[Write(X, 1), Release, Read(Y)], &[Write(Y, 1), Release, Read(X)]],
        outcome: &[0, 0],
        is_possible: true,
    },
    Program {
        name: "LB",
        threads: &[
            &[Acquire, Read(X), Write(Y, 1), Release],
            &[Acquire, Read(Y), Write(X, 1), Release],
        ],
        outcome: &[1, 1],
        is_possible: false,
    },
    Program {
        name: "R, release, acquire",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Write(Y, 2), Release, Acquire, Read(X)],
        ],
        outcome: &[0, 1, 2],
        is_possible: false,
    },
    Program {
        name: "R, release",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Write(Y, 2), Release, Read(X)],
        ],
        outcome: &[0, 1, 2],
        is_possible: true,
    },
    Program {
        name: "R, acquire",
        threads: &[
            &[Write(X, 1), Write(Y, 1), Release],
            &[Write(Y, 2), Release, Acquire, Read(X)],
        ],
        outcome: &[0, 1, 2],
        is_possible: true,
    },
    Program {
        name: "S, release, acquire",
        threads: &[
            &[Write(X, 2), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Write(X, 1), Release],
        ],
        outcome: &[1, 2, 1],
        is_possible: false,
    },
    // The home has the first write before the second one begins, whatever the writer's copy has.
    Program {
        name: "S, release",
        threads: &[
            &[Write(X, 2), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Write(X, 1), Release],
        ],
        outcome: &[1, 2, 1],
        is_possible: false,
    },
    Program {
        name: "S, acquire",
        threads: &[
            &[Write(X, 2), Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Write(X, 1), Release],
        ],
        outcome: &[1, 2, 1],
        is_possible: true,
    },
    Program {
        name: "CoRR",
        threads: &[&[Write(X, 1), Release], &[Acquire, Read(X), Acquire, Read(X)]],
        outcome: &[1, 0],
        is_possible: false,
    },
    Program {
        name: "CoWW, release",
        threads: &[&[Write(X, 1), Release, Write(X, 2), Release], &[Acquire, Read(X)]],
        outcome: &[0, 1, 0],
        is_possible: false,
    },
    Program {
        name: "CoWW",
        threads: &[&[Write(X, 1), Write(X, 2), Release], &[Read(X)]],
        outcome: &[0, 1, 0],
        is_possible: false,
    },
    Program {
        name: "CoRW, release, acquire",
        threads: &[
            &[Acquire, Read(X), Acquire, Write(X, 1), Release],
            &[Write(X, 2), Release],
        ],
        outcome: &[2, 2, 0],
        is_possible: false,
    },
    Program {
        name: "CoRW",
        threads: &[&[Read(X), Write(X, 1)], &[Write(X, 2)]],
        outcome: &[1, 1, 0],
        is_possible: false,
    },
    Program {
        name: "CoWR",
        threads: &[&[Write(X, 1), Acquire, Read(X)], &[Read(X), Release]],
        outcome: &[0, 0],
        is_possible: false,
    },
    Program {
        name: "2+2W",
        threads: &[
            &[Write(X, 1), Write(Y, 2), Release, Acquire, Read(X), Read(Y)],
            &[Write(Y, 1), Write(X, 2), Release],
        ],
        outcome: &[1, 1],
        is_possible: true,
    },
    Program {
        name: "WRC, release, acquire",
        threads: &[
            &[Write(X, 1), Release],
            &[Acquire, Read(X), Acquire, Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 1, 0],
        is_possible: true,
    },
    Program {
        name: "ISA2, release, acquire",
        threads: &[
            &[Write(X, 1), Release, Write(Y, 1), Release],
            &[Acquire, Read(Y), Acquire, Read(X)],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 0, 1, 0],
        is_possible: false,
    },
    Program {
        name: "IRIW, release, acquire",
        threads: &[
            &[Write(X, 1), Release],
            &[Write(Y, 1), Release],
            &[Acquire, Read(X), Acquire, Read(Y)],
            &[Acquire, Read(Y), Acquire, Read(X)],
        ],
        outcome: &[1, 0, 1, 0],
        is_possible: true,
    },
];

/// Some of the nodes, the pages or the variables: a bit for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Set(u8);

impl Set {
    fn of(members: impl IntoIterator<Item = usize>) -> Set {
        Set(members.into_iter().fold(0, |set, member| set | 1 << member))
    }

    fn has(self, member: usize) -> bool {
        self.0 & 1 << member != 0
    }

    fn members(self) -> impl Iterator<Item = usize> {
        (0..8).filter(move |member| self.has(*member))
    }

    fn without(self, member: usize) -> Set {
        Set(self.0 & !(1 << member))
    }

    fn and(self, other: Set) -> Set {
        Set(self.0 & other.0)
    }

    fn or(self, other: Set) -> Set {
        Set(self.0 | other.0)
    }

    fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Values of the variables on a page. Those on another page are 0.
type Contents = [u8; VARIABLES];

/// Task of a node beside its program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Doing {
    #[default]
    Nothing,
    /// A page, its variables that are not read yet, and the values of those that are.
    Pulling(Set, Set, Contents),
    /// Variables that the home has not compared with their twins, and pages of the release. Then an acquire goes on that noticed some pages, if it has
    /// begun the release.
    Releasing(Set, Set, Option<Set>),
    /// Nodes whose logs are not read, and pages that were noticed.
    Acquiring(Set, Set),
}

/// A node of the model: a thread, and copies of the pages whose home is another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Node {
    at: u8,
    /// The program's own operation is in progress.
    is_own: bool,
    doing: Doing,
    /// Contents and twin of each page.
    copies: [Option<(Contents, Contents)>; VARIABLES],
    dirty: Set,
    /// Pages in the log of each other node since the last look.
    news: [Set; NODES],
    reads: [u8; READS],
    read: u8,
}

/// State of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    memory: Contents,
    nodes: [Node; NODES],
}

/// A program at its place.
struct World<'a> {
    threads: &'a [&'a [Operation]],
    place: &'a Place,
    /// Pages that each thread uses from each operation on.
    used: Vec<Vec<Set>>,
    /// Nodes that write. Others have no notices.
    writers: Set,
}

/// Returns all outcomes of a program. Other programs that the nodes run at the same time may have them acquire before this one, and release after it.
fn model(program: &Program, place: &Place) -> BTreeSet<Vec<u8>> {
    World::new(program.threads, place).outcomes()
}

impl<'a> World<'a> {
    fn new(threads: &'a [&'a [Operation]], place: &'a Place) -> World<'a> {
        let page = |operation: &Operation| match operation {
            Read(variable) | Write(variable, _) => Some(place.pages[*variable]),
            Release | Acquire => None,
        };
        let used = |operations: &&[Operation]| {
            let from = |at: usize| Set::of(operations[at..].iter().filter_map(page));
            (0..=operations.len()).map(from).collect()
        };
        let writes = |number: &usize| threads[*number].iter().any(|it| matches!(it, Write(..)));
        World {
            threads,
            place,
            used: threads.iter().map(used).collect(),
            writers: Set::of((0..threads.len()).filter(writes)),
        }
    }

    fn outcomes(&self) -> BTreeSet<Vec<u8>> {
        let mut first = State::default();
        for number in 0..self.threads.len() {
            let pages = self.used[number][0].members();
            pages.for_each(|page| first.nodes[number].copies[page] = Some(Default::default()));
            self.forget(&mut first, number);
        }
        let mut seen = HashSet::from([first]);
        let mut found = BTreeSet::new();
        let mut states = vec![first];
        while let Some(state) = states.pop() {
            let next = self.next(&state);
            if next.is_empty() {
                let reads = state
                    .nodes
                    .iter()
                    .flat_map(|node| &node.reads[..node.read.into()]);
                found.insert(reads.chain(&state.memory).copied().collect());
            }
            states.extend(next.into_iter().filter(|next| seen.insert(*next)));
        }
        found
    }

    /// Returns the states that follow. The step of a node that neither needs nor changes what others can see comes before the steps of others: their
    /// order makes no difference.
    fn next(&self, state: &State) -> Vec<State> {
        let mut all = Vec::new();
        for number in 0..self.threads.len() {
            let mut next = self.steps(state, number);
            next.iter_mut().for_each(|next| self.forget(next, number));
            if next.len() == 1 && self.is_local(&state.nodes[number], number) {
                return next;
            }
            all.append(&mut next);
        }
        all
    }

    /// Returns whether a node takes a step of its own next, if there is one alone.
    fn is_local(&self, node: &Node, number: usize) -> bool {
        match node.doing {
            // At the beginning there may be others to come.
            Doing::Nothing if node.at == 0 => false,
            Doing::Nothing => match self.threads[number].get(usize::from(node.at)) {
                Some(Read(variable) | Write(variable, _)) => {
                    let page = self.place.pages[*variable];
                    self.place.homes[page] != number && node.copies[page].is_some()
                }
                Some(Release | Acquire) | None => true,
            },
            Doing::Acquiring(left, _) => left.is_empty(),
            Doing::Releasing(left, pages, _) => left.is_empty() && pages.is_empty(),
            Doing::Pulling(..) => false,
        }
    }

    /// Drops what makes no difference any more, so that there are fewer states.
    fn forget(&self, state: &mut State, number: usize) {
        let node = &mut state.nodes[number];
        let used = self.used[number][usize::from(node.at)];
        let mut kept = used.or(node.dirty);
        if let Doing::Releasing(_, pages, _) = node.doing {
            kept = kept.or(pages);
        }
        // A home has no copy, and notices mean nothing to it.
        let away = Set::of((0..VARIABLES).filter(|page| self.place.homes[*page] != number));
        let kept = kept.and(away);
        for page in (0..VARIABLES).filter(|page| !kept.has(*page)) {
            node.copies[page] = None;
        }
        let has_acquire = self.threads[number][node.at.into()..].contains(&Acquire) || node.at == 0;
        for news in &mut node.news {
            *news = match has_acquire {
                true => news.and(kept),
                false => Set::default(),
            };
        }
        if let Doing::Acquiring(_, noticed) = &mut node.doing {
            *noticed = noticed.and(kept);
        }
    }

    /// Returns the states that follow by a step of a node.
    fn steps(&self, state: &State, number: usize) -> Vec<State> {
        let node = &state.nodes[number];
        let with = |doing: Doing| {
            let mut next = *state;
            next.nodes[number].doing = doing;
            next
        };
        match node.doing {
            Doing::Nothing => {
                let mut next = Vec::new();
                match self.threads[number].get(usize::from(node.at)) {
                    // A node may have no copy of some pages when it begins.
                    Some(operation) if node.at == 0 => {
                        let present = (0..VARIABLES).filter(|page| node.copies[*page].is_some());
                        let present = Set::of(present);
                        let missing = (0..1 << VARIABLES).map(Set);
                        for missing in missing.filter(|it| it.and(present) == *it) {
                            let mut without = *state;
                            let copies = &mut without.nodes[number].copies;
                            missing.members().for_each(|page| copies[page] = None);
                            next.push(self.begin(&without, number, *operation, true));
                        }
                    }
                    Some(operation) => next.push(self.begin(state, number, *operation, true)),
                    None if node.dirty.is_empty() => {}
                    None => next.push(self.begin(state, number, Release, false)),
                }
                // One that finds nothing changes nothing.
                if node.at == 0 && node.news.iter().any(|news| !news.is_empty()) {
                    next.push(self.begin(state, number, Acquire, false));
                }
                next
            }
            Doing::Pulling(page, left, contents) => {
                let read = |variable: usize| {
                    let mut contents = contents;
                    contents[variable] = state.memory[variable];
                    let left = left.without(variable);
                    let mut next = with(Doing::Pulling(page, left, contents));
                    if left.is_empty() {
                        next.nodes[number].doing = Doing::Nothing;
                        let pages = page.members();
                        pages.for_each(|it| next.nodes[number].copies[it] = Some((contents, contents)));
                    }
                    next
                };
                left.members().map(read).collect()
            }
            Doing::Releasing(left, pages, noticed) if left.is_empty() => {
                let mut next = *state;
                for (other, node) in next.nodes.iter_mut().enumerate() {
                    if other != number {
                        node.news[number] = node.news[number].or(pages);
                    }
                }
                next.nodes[number].end(noticed.unwrap_or_default());
                (0..self.threads.len()).for_each(|other| self.forget(&mut next, other));
                vec![next]
            }
            Doing::Releasing(left, pages, noticed) => {
                let store = |variable: usize| {
                    let mut next = with(Doing::Releasing(left.without(variable), pages, noticed));
                    if let Some((contents, twin)) = node.copies[self.place.pages[variable]]
                        && contents[variable] != twin[variable]
                    {
                        next.memory[variable] = contents[variable];
                    }
                    next
                };
                left.members().map(store).collect()
            }
            Doing::Acquiring(left, noticed) if left.is_empty() => {
                if noticed.and(node.dirty).is_empty() {
                    let mut next = *state;
                    next.nodes[number].end(noticed);
                    return vec![next];
                }
                vec![self.release(state, number, Some(noticed))]
            }
            Doing::Acquiring(left, noticed) => {
                let look = |other: usize| {
                    let noticed = noticed.or(node.news[other]);
                    let mut next = with(Doing::Acquiring(left.without(other), noticed));
                    next.nodes[number].news[other] = Set::default();
                    next
                };
                left.members().map(look).collect()
            }
        }
    }

    /// Begins an operation, or carries it out if it takes one step.
    fn begin(&self, state: &State, number: usize, operation: Operation, is_own: bool) -> State {
        let mut next = *state;
        let node = &mut next.nodes[number];
        match operation {
            Read(variable) | Write(variable, _) => {
                let page = self.place.pages[variable];
                let is_home = self.place.homes[page] == number;
                if !is_home && node.copies[page].is_none() {
                    // The copy comes in steps of its own.
                    let variables = (0..VARIABLES).filter(|it| self.place.pages[*it] == page);
                    node.doing = Doing::Pulling(Set::of([page]), Set::of(variables), Contents::default());
                    return next;
                }
                node.at += 1;
                match (operation, &mut node.copies[page]) {
                    (Write(_, value), Some((contents, twin))) => {
                        if !node.dirty.has(page) {
                            *twin = *contents;
                        }
                        contents[variable] = value;
                    }
                    (Write(_, value), None) => next.memory[variable] = value,
                    (_, copy) => {
                        let value = copy.map_or(state.memory[variable], |(contents, _)| contents[variable]);
                        node.reads[usize::from(node.read)] = value;
                        node.read += 1;
                        return next;
                    }
                }
                let node = &mut next.nodes[number];
                node.dirty = node.dirty.or(Set::of([page]));
                next
            }
            Release => {
                let mut next = self.release(state, number, None);
                next.nodes[number].is_own = is_own;
                next
            }
            Acquire => {
                node.is_own = is_own;
                let others = self.writers.without(number);
                node.doing = Doing::Acquiring(others, Set::default());
                next
            }
        }
    }

    /// Begins a release. A home has its own writes already.
    fn release(&self, state: &State, number: usize, noticed: Option<Set>) -> State {
        let mut next = *state;
        let node = &mut next.nodes[number];
        let pages = std::mem::take(&mut node.dirty);
        let is_away = |variable: &usize| {
            let page = self.place.pages[*variable];
            pages.has(page) && self.place.homes[page] != number
        };
        let variables = Set::of((0..VARIABLES).filter(is_away));
        node.doing = Doing::Releasing(variables, pages, noticed);
        next
    }
}

impl Node {
    /// Ends a release or an acquire, which takes pages away.
    fn end(&mut self, noticed: Set) {
        noticed.members().for_each(|page| self.copies[page] = None);
        self.doing = Doing::Nothing;
        self.at += u8::from(std::mem::take(&mut self.is_own));
    }
}

#[test]
fn model__excludes_what_release_and_acquire_forbid_and_nothing_else() {
    litmus_runner::check_model(&TESTS, model);
}

#[test]
fn node() {
    run_as_node(&[("litmus", run)]);
}

fn run(session: &Session) {
    litmus_runner::run(session, Consistency::Release, &TESTS, model, RUNS);
}

#[test]
fn pages__answered_by_the_service_thread_are_release_consistent() {
    litmus_runner::run_all(&TESTS, MODES[0]);
}

#[test]
fn pages__answered_by_the_faulting_thread_are_release_consistent() {
    litmus_runner::run_all(&TESTS, MODES[1]);
}

#[test]
fn pages__of_mprotect_are_release_consistent() {
    litmus_runner::run_all(&TESTS, MODES[2]);
}

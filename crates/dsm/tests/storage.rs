//! Memory that nodes take: none for an event in the steady state, and no more than the module's text says for units that are used.
#![allow(non_snake_case, reason = "tests are named function__case")]
#![allow(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;

use rdmux_dsm::protocol::{Access, Action, Body, Homes, Message, Node, NodeId, Right, Settings};

/// The system's allocator, which counts what each thread does.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

fn count(allocations: usize, bytes: usize) {
    ALLOCATIONS.set(ALLOCATIONS.get() + allocations);
    BYTES.set(BYTES.get().wrapping_add(bytes));
}

// SAFETY: all is done by the system's allocator, with the caller's arguments. The counters are thread-local cells without a destructor, and do
// not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size());
        // SAFETY: the caller keeps to the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, layout.size().wrapping_neg());
        // SAFETY: the caller keeps to the contract of `dealloc`, and `memory` is of the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of the parts, as the module's text says.
const COPY_MAX: usize = 80;
const ENTRY_MAX: usize = 120;
const REQUEST_MAX: usize = 62;
const HOME_MAX: usize = 24;
const TREE_NODE: usize = 76;

const fn id(number: u32) -> NodeId {
    NodeId::new(number).unwrap()
}

fn settings(nodes: u32, units: u64) -> Settings {
    Settings {
        region: 1,
        units,
        homes: Homes::cyclic((0..nodes).map(id).collect::<Vec<_>>(), 1).unwrap(),
        epoch: 0,
        members: (0..nodes).map(id).collect(),
    }
}

/// Nodes whose drivers do at once what they are told.
struct Cluster {
    nodes: Vec<Node>,
    underway: VecDeque<(NodeId, NodeId, Message)>,
    events: usize,
}

impl Cluster {
    fn new(nodes: u32, units: u64) -> Cluster {
        let settings = settings(nodes, units);
        Cluster {
            nodes: settings
                .members
                .iter()
                .map(|it| Node::new(*it, &settings))
                .collect(),
            underway: VecDeque::new(),
            events: 0,
        }
    }

    fn fault(&mut self, at: u32, unit: u64, access: Access) {
        self.nodes[at as usize].handle_fault(unit, access);
        self.carry_out(at as usize);
    }

    /// Delivers all messages.
    fn settle(&mut self) {
        while let Some((from, to, message)) = self.underway.pop_front() {
            let at = to.number() as usize;
            self.nodes[at].handle_message(from, &message).unwrap();
            self.carry_out(at);
        }
    }

    fn carry_out(&mut self, at: usize) {
        self.events += 1;
        while let Some(action) = self.nodes[at].poll_action() {
            let node = &mut self.nodes[at];
            match action {
                Action::Send { to, message } => self.underway.push_back((node.id(), to, message)),
                Action::Pull { unit, task, .. } => node.handle_pulled(unit, task, true),
                Action::Protect { unit, task, .. } => node.handle_protected(unit, task),
                Action::Wake { .. } => {}
                Action::Poison { .. } | Action::Accuse { .. } => panic!("{action:?}"),
            }
        }
    }

    /// Has all nodes ask for each unit at once, so that requests wait, in turn for all rights.
    fn round(&mut self, round: u64, units: u64) {
        let nodes = self.nodes.len() as u64;
        for unit in 0..units {
            for node in 0..nodes {
                let access = match (round + unit + node) % 3 {
                    0 => Access::Read,
                    _ => Access::Write,
                };
                let at = u32::try_from((node + round) % nodes).unwrap();
                self.fault(at, unit, access);
            }
        }
        self.settle();
    }
}

/// Nodes beyond the first 64 have sets that are stored apart.
#[test]
fn events__allocate_nothing_in_the_steady_state() {
    for nodes in [2, 3, 70] {
        let mut cluster = Cluster::new(nodes, 40);
        (0..100).for_each(|round| cluster.round(round, 40));
        let (events, before) = (cluster.events, ALLOCATIONS.get());
        (100..250).for_each(|round| cluster.round(round, 40));
        let allocations = ALLOCATIONS.get() - before;
        println!(
            "{nodes} nodes: {allocations} allocations in {} events",
            cluster.events - events
        );
        assert_eq!(allocations, 0);
        assert!(cluster.events - events > 20_000);
    }
}

/// Returns the bytes that a node has taken for events.
fn taken(events: impl FnOnce()) -> usize {
    let before = BYTES.get();
    events();
    BYTES.get().wrapping_sub(before)
}

#[test]
fn large_region__takes_memory_for_units_that_are_used_only() {
    const UNITS: u64 = 1 << 32;
    let mut node = None;
    let settings = settings(1, UNITS);
    let bytes = taken(|| node = Some(Node::new(id(0), &settings)));
    assert!(bytes < 1000, "{bytes} bytes before any use");
    let mut node = node.unwrap();
    let mut used = |units: &mut dyn Iterator<Item = u64>| {
        taken(|| {
            for unit in units {
                node.handle_fault(unit, Access::Write);
                while let Some(action) = node.poll_action() {
                    if let Action::Protect { unit, task, .. } = action {
                        node.handle_protected(unit, task);
                    }
                }
            }
        })
    };
    const USED: u64 = 1 << 14;
    let (dense, sparse) = (
        used(&mut (0..USED)),
        used(&mut (1..=USED).map(|it| it * (UNITS / USED) - 1)),
    );
    let count = usize::try_from(USED).unwrap();
    println!(
        "bytes of a unit: {} dense, {} sparse",
        dense / count,
        sparse / count
    );
    // The home is the node itself: the unit has a copy and an entry.
    assert!(dense < count * (COPY_MAX + ENTRY_MAX));
    // 2^32 units are 8 levels.
    assert!(sparse < count * (COPY_MAX + ENTRY_MAX + 2 * 8 * TREE_NODE));
}

/// Makes node 0, home of all units, of so many members.
fn home(units: u64, members: u32) -> Node {
    node_with(units, members, Homes::hash([id(0)]).unwrap())
}

fn node_with(units: u64, members: u32, homes: Homes) -> Node {
    let settings = Settings {
        homes,
        members: (0..members).map(id).collect(),
        ..settings(1, units)
    };
    Node::new(id(0), &settings)
}

/// Makes a message of the request that has the number of its unit.
fn message(sequence: u64, unit: u64, body: Body) -> Message {
    Message {
        region: 1,
        epoch: 0,
        sequence,
        request: unit,
        unit,
        body,
    }
}

/// A member asks for every unit whose home a node is, and mostly does not answer. Then it leaves.
#[test]
fn hostile_member__costs_its_home_a_bounded_number_of_bytes_a_unit() {
    const UNITS: u64 = 1 << 14;
    for members in [2, 200] {
        let mut node = home(UNITS, members);
        let hostile = id(members - 1);
        let mut sequence = 0;
        let mut send = |node: &mut Node, body| {
            for unit in 0..UNITS {
                node.handle_message(hostile, &message(sequence, unit, body))
                    .unwrap();
                sequence += 1;
                while node.poll_action().is_some() {}
            }
        };
        let count = usize::try_from(UNITS).unwrap();
        // Messages that nothing has asked for make no entry.
        let wrong = [
            Body::Yielded,
            Body::Installed,
            Body::Failed,
            Body::Recall(Right::Invalid),
            Body::Locate,
            Body::Home(id(0)),
        ];
        let bytes = taken(|| wrong.into_iter().for_each(|body| send(&mut node, body)));
        assert!(bytes < 4096, "{bytes} bytes for messages that are wrong");
        let (read, write) = (Body::Ask(Right::Shared), Body::Ask(Right::Exclusive));
        let asked = [read, Body::Installed, write, read, read, write];
        let bytes = taken(|| asked.into_iter().for_each(|body| send(&mut node, body)));
        println!("{members} members, bytes of a unit: {}", bytes / count);
        // A request is carried out, another one waits, and more are refused.
        let sets = if members > 64 { 3 * members as usize / 8 } else { 0 };
        assert!(bytes < count * (ENTRY_MAX + sets + 2 * REQUEST_MAX));
        let bytes = taken(|| node.handle_gone(1, &[hostile]));
        // The list of those that have left has them; what is freed counts against them.
        let bytes = bytes.cast_signed();
        assert!(bytes < 128, "the end of a member takes {bytes} bytes");
    }
}

#[test]
fn hostile_member__costs_a_registrar_a_bounded_number_of_bytes_a_unit() {
    const UNITS: u64 = 1 << 14;
    let mut node = node_with(UNITS, 2, Homes::first_touch([id(0)]).unwrap());
    let bytes = taken(|| {
        for sequence in 0..2 * UNITS {
            let locate = message(sequence, sequence % UNITS, Body::Locate);
            node.handle_message(id(1), &locate).unwrap();
            while node.poll_action().is_some() {}
        }
    });
    let count = usize::try_from(UNITS).unwrap();
    println!("bytes of a unit: {}", bytes / count);
    assert!(bytes < count * HOME_MAX);
}

/// The home has a unit, a member asks to write it, and leaves before the home has yielded.
#[test]
fn entry__that_is_as_at_the_beginning_makes_room_for_another() {
    const UNITS: u64 = 1 << 12;
    let mut node = home(2 * UNITS, 2);
    let mut protects = vec![];
    for unit in 0..UNITS {
        node.handle_fault(unit, Access::Write);
        while let Some(action) = node.poll_action() {
            if let Action::Protect { unit, task, .. } = action {
                node.handle_protected(unit, task);
            }
        }
        let ask = message(unit, unit, Body::Ask(Right::Exclusive));
        node.handle_message(id(1), &ask).unwrap();
        let recall = std::iter::from_fn(|| node.poll_action());
        protects.extend(recall.filter_map(|it| match it {
            Action::Protect { unit, task, .. } => Some((unit, task)),
            _ => None,
        }));
    }
    assert_eq!(protects.len() as u64, UNITS);
    node.handle_gone(1, &[id(1)]);
    for (unit, task) in protects {
        node.handle_protected(unit, task);
        assert_eq!(node.lost(unit), None);
        assert!(node.holders(unit).is_empty());
    }
    // The other units have entries, too, but only the copies take more memory.
    let bytes = taken(|| {
        for unit in UNITS..2 * UNITS {
            node.handle_fault(unit, Access::Write);
            while node.poll_action().is_some() {}
        }
    });
    let count = usize::try_from(UNITS).unwrap();
    println!("bytes of a unit: {}", bytes / count);
    assert!(bytes < count * COPY_MAX);
}

/// The first touch makes the home, node 1 knows it, and two members ask a node that is none, the first of which leaves.
#[test]
fn entry__without_requests_for_a_home_that_is_not_known_makes_room_for_another() {
    const UNITS: u64 = 1 << 12;
    let mut node = node_with(2 * UNITS, 3, Homes::first_touch([id(1)]).unwrap());
    let ask = |node: &mut Node, from, units: std::ops::Range<u64>| {
        for unit in units {
            let ask = message(unit, unit, Body::Ask(Right::Shared));
            node.handle_message(id(from), &ask).unwrap();
            assert_eq!(node.poll_action(), None);
        }
    };
    ask(&mut node, 2, 0..UNITS);
    node.handle_gone(1, &[id(2)]);
    let bytes = taken(|| ask(&mut node, 1, UNITS..2 * UNITS));
    assert!(bytes < 4096, "{bytes} bytes for {UNITS} units");
}

//! Answers of one node of a region with release consistency to single events.
#![allow(non_snake_case, reason = "tests are named function__case")]

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::protocol::{Access, Body, Homes, Message, NodeId, Right, Settings, Violation};
use rdmux_dsm::release::{Action, Looked, Node, Run};

const fn id(number: u32) -> NodeId {
    NodeId::new(number).unwrap()
}

/// Makes node 0, of the members 0, 1 and 2, which are the homes of the units 0, 1 and 2. It carries out two flushes at a time.
fn node() -> Node {
    let settings = Settings {
        region: 7,
        units: 3,
        homes: Homes::cyclic([id(0), id(1), id(2)], 1).unwrap(),
        epoch: 0,
        members: (0..3).map(id).collect(),
    };
    Node::new(id(0), &settings, 2)
}

fn actions(node: &mut Node) -> Vec<Action> {
    std::iter::from_fn(|| node.poll_action()).collect()
}

/// Hands a message to a node, and returns what follows.
fn take(node: &mut Node, (from, sequence): (u32, u64), unit: u64, body: Body) -> Vec<Action> {
    let message = Message {
        region: 7,
        epoch: 0,
        sequence,
        request: 1,
        unit,
        body,
    };
    node.handle_message(id(from), &message).unwrap();
    actions(node)
}

/// Has node 0 write unit 1, and begin to release it.
fn releasing() -> Node {
    let mut node = node();
    node.handle_fault(1, Access::Write);
    assert_eq!(actions(&mut node), [Action::Pull { unit: 1, task: 0 }]);
    node.handle_pulled(1, 0, true);
    let right = Right::Exclusive;
    assert_eq!(
        actions(&mut node),
        [Action::Copy { unit: 1 }, Action::Protect { unit: 1, right }]
    );
    assert_eq!(node.handle_release(), 1);
    let right = Right::Shared;
    let all = actions(&mut node);
    assert!(
        matches!(&all[..], [protect, Action::Send { to, message }]
            if *protect == Action::Protect { unit: 1, right } && *to == id(1) && message.body == Body::Flush),
        "{all:?}"
    );
    assert_eq!(node.waits().map(|it| it.node).collect::<Vec<_>>(), [id(1)]);
    node
}

#[test]
fn handle_message__that_no_correct_node_sends_accuses_and_changes_nothing() {
    for (from, unit, body, violation) in [
        (2, 1, Body::Flushed, Violation::NotHome),
        (1, 2, Body::Flush, Violation::NotHome),
        (1, 3, Body::Flush, Violation::NoSuchUnit),
        (2, 2, Body::Flushed, Violation::Unexpected),
        (1, 1, Body::Recall(Right::Invalid), Violation::Unexpected),
    ] {
        let mut node = releasing();
        let accusation = Action::Accuse {
            node: id(from),
            violation,
        };
        assert_eq!(take(&mut node, (from, 0), unit, body), [accusation], "{body:?}");
        assert_eq!(node.released(1), None);
        let run = Run { first: 1, count: 1 };
        let ended = [Action::Append { run }, Action::Ended];
        assert_eq!(take(&mut node, (1, 5), 1, Body::Flushed), ended);
        assert_eq!(node.released(1), Some(Ok(())));
    }
}

#[test]
fn handle_message__to_flush_twice_at_once_is_refused_and_later_ones_wait_for_a_slot() {
    let mut node = node();
    let fetch = |slot, from| Action::Fetch {
        unit: 0,
        slot,
        from: id(from),
    };
    assert_eq!(take(&mut node, (1, 0), 0, Body::Flush), [fetch(0, 1)]);
    let violation = Violation::Unexpected;
    let accusation = Action::Accuse {
        node: id(1),
        violation,
    };
    assert_eq!(take(&mut node, (1, 1), 0, Body::Flush), [accusation]);
    assert_eq!(take(&mut node, (2, 0), 0, Body::Flush), [fetch(1, 2)]);
    node.handle_fetched(1, true);
    let all = actions(&mut node);
    let apply = Action::Apply { unit: 0, slot: 1 };
    assert!(
        matches!(&all[..], [first, Action::Send { to, message }]
            if *first == apply && *to == id(2) && message.body == Body::Flushed && message.request == 1),
        "{all:?}"
    );
    assert_eq!(take(&mut node, (2, 1), 0, Body::Flush), [fetch(1, 2)]);
}

#[test]
fn handle_looked__of_units_that_the_region_lacks_takes_away_those_that_it_has() {
    let mut node = node();
    node.handle_fault(2, Access::Read);
    actions(&mut node);
    node.handle_pulled(2, 0, true);
    actions(&mut node);
    let round = node.handle_acquire();
    assert_eq!(actions(&mut node), [1, 2].map(|it| Action::Look { node: id(it) }));
    let (first, count) = (1, u32::MAX - 1);
    node.handle_looked(id(1), Looked::Runs(vec![Run { first, count }]));
    assert!(!node.acquired(round));
    node.handle_looked(id(2), Looked::Runs(vec![]));
    let right = Right::Invalid;
    assert_eq!(
        actions(&mut node),
        [Action::Protect { unit: 2, right }, Action::Ended]
    );
    assert!(node.acquired(round));
}

/// The home is gone while it flushes: the release ends with its name, and later ones of other units do not.
#[test]
fn handle_gone__of_a_home_ends_the_release() {
    let mut node = releasing();
    node.handle_gone(1, &[id(1)]);
    let all = actions(&mut node);
    let poison = Action::Poison { unit: 1, node: id(1) };
    assert_eq!(all, [poison, Action::Ended]);
    assert_eq!(node.released(1), Some(Err(id(1))));
    let round = node.handle_release();
    assert_eq!(node.released(round), Some(Ok(())));
    node.handle_fault(0, Access::Write);
    let round = node.handle_release();
    assert_eq!(node.released(round), Some(Ok(())));
}

/// Has an event happen to a node whose peers send anything. Returns the rounds of a release or an acquire that it began.
fn happen(node: &mut Node, sequence: u64, dice: &mut ChaCha8Rng) -> (Option<u64>, Option<u64>) {
    const BODIES: [Body; 5] = [
        Body::Flush,
        Body::Flushed,
        Body::Flushed,
        Body::Yielded,
        Body::Refuse(id(1)),
    ];
    let mut number = |below: u32| dice.next_u32() % below;
    let (unit, from) = (u64::from(number(3)), id(1 + number(2)));
    match number(8) {
        0 => node.handle_fault(unit, [Access::Read, Access::Write][number(2) as usize]),
        1 | 2 => {
            let message = Message {
                region: 7,
                epoch: 0,
                sequence,
                request: number(6).into(),
                unit: unit + u64::from(number(8) / 7),
                body: BODIES[number(5) as usize],
            };
            node.handle_message(from, &message).unwrap();
        }
        3 => node.handle_pulled(unit, number(20).into(), number(2) == 0),
        4 => node.handle_fetched(number(2) as usize, number(2) == 0),
        5 => {
            let (first, count) = (number(5), 1 + number(u32::MAX - 9));
            let looked = match number(4) {
                0 => Looked::Lapped,
                1 => Looked::Failed,
                _ => Looked::Runs(vec![Run { first, count }]),
            };
            node.handle_looked(from, looked);
        }
        6 => return (Some(node.handle_release()), None),
        _ => return (None, Some(node.handle_acquire())),
    }
    (None, None)
}

#[test]
fn rounds__all_end_with_the_other_nodes_whatever_these_have_sent() {
    for seed in 0..3000 {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mut node = node();
        let mut rounds = (0, 0);
        for sequence in 0..100 {
            let (release, acquire) = happen(&mut node, sequence, &mut dice);
            rounds = (
                rounds.0.max(release.unwrap_or(0)),
                rounds.1.max(acquire.unwrap_or(0)),
            );
            actions(&mut node);
        }
        let first = 1 + (seed % 2) as u32;
        node.handle_gone(1, &[id(first)]);
        node.handle_gone(2, &[id(3 - first)]);
        assert!(node.released(rounds.0).is_some(), "seed {seed}: {node:?}");
        assert!(node.acquired(rounds.1), "seed {seed}: {node:?}");
        assert_eq!(node.waits().count(), 0, "seed {seed}");
    }
}

//! Answers of one node of a region with release consistency to single events.
#![allow(non_snake_case, reason = "tests are named function__case")]

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::protocol::{Access, Body, Homes, Message, NodeId, Right, Settings, Violation};
use rdmux_dsm::release::{Action, Looked, Node, Run};

const fn id(number: u32) -> NodeId {
    NodeId::new(number).unwrap()
}

/// Makes node 0, of the members 0, 1 and 2, which are the homes of so many units each, in turn. It carries out two flushes at a time, of at most 4 units.
fn node_of(units: u64) -> Node {
    node_with(units, Homes::cyclic([id(0), id(1), id(2)], units).unwrap())
}

/// Makes the same with other homes.
fn node_with(units: u64, homes: Homes) -> Node {
    let settings = Settings {
        region: 7,
        units: 3 * units,
        homes,
        epoch: 0,
        members: (0..3).map(id).collect(),
    };
    Node::new(id(0), &settings, 2, 4)
}

fn node() -> Node {
    node_of(1)
}

const FLUSH: Body = Body::Flush { units: 1 };
const FLUSHED: Body = Body::Flushed { units: 1 };
const NOTHING: [Action; 0] = [];

fn run(first: u32, count: u32) -> Run {
    Run { first, count }
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

/// Returns the news that a node stores nothing more of nodes that are gone by an epoch.
fn settled(epoch: u64) -> Message {
    Message {
        region: 7,
        epoch,
        sequence: epoch,
        request: 0,
        unit: 0,
        body: Body::Settled,
    }
}

/// Has node 0 write units of other homes.
fn write(node: &mut Node, units: std::ops::Range<u64>) {
    for (task, unit) in (0..).zip(units) {
        node.handle_fault(unit, Access::Write);
        assert_eq!(
            actions(node),
            [Action::Pull {
                unit,
                task,
                from: node.home(unit).unwrap()
            }]
        );
        node.handle_pulled(unit, task, true);
        let right = Right::Exclusive;
        assert_eq!(
            actions(node),
            [Action::Copy { unit }, Action::Protect { unit, right }]
        );
    }
}

/// Returns receiver, first unit and content of the messages among actions.
fn sent(actions: &[Action]) -> Vec<(NodeId, u64, Body)> {
    let sent = actions.iter().filter_map(|it| match it {
        Action::Send { to, message } => Some((*to, message.unit, message.body)),
        _ => None,
    });
    sent.collect()
}

/// Returns the run that is to be compared, with the number of the task, after other actions.
fn compared(actions: &[Action]) -> (Run, u64) {
    match actions {
        [.., Action::Compare { run, task }] => (*run, *task),
        others => panic!("{others:?}"),
    }
}

/// Has node 0 write unit 1, and begin to release it.
fn releasing() -> Node {
    let mut node = node();
    write(&mut node, 1..2);
    assert_eq!(node.handle_release(), 1);
    let right = Right::Shared;
    let all = actions(&mut node);
    assert_eq!(all[..1], [Action::Protect { unit: 1, right }]);
    let (of, task) = compared(&all[1..]);
    assert_eq!((of, all.len()), (run(1, 1), 2));
    assert_eq!(node.waits().count(), 0);
    node.handle_compared(task + 1, &[false]);
    node.handle_compared(task, &[true]);
    assert_eq!(sent(&actions(&mut node)), [(id(1), 1, FLUSH)]);
    assert_eq!(node.waits().map(|it| it.node).collect::<Vec<_>>(), [id(1)]);
    node
}

#[test]
fn handle_message__that_no_correct_node_sends_accuses_and_changes_nothing() {
    for (from, unit, body, violation) in [
        (2, 1, FLUSHED, Violation::NotHome),
        (1, 2, FLUSH, Violation::NotHome),
        (1, 3, FLUSH, Violation::NoSuchUnit),
        (
            1,
            u64::MAX,
            Body::Flush { units: u32::MAX },
            Violation::NoSuchUnit,
        ),
        (2, 2, FLUSHED, Violation::Unexpected),
        (1, 1, Body::Flushed { units: 2 }, Violation::Unexpected),
        (1, 1, Body::Flushed { units: u32::MAX }, Violation::Unexpected),
        (1, 1, Body::Recall(Right::Invalid), Violation::Unexpected),
        (1, 3, Body::Settled, Violation::NoSuchUnit),
    ] {
        let mut node = releasing();
        let accusation = Action::Accuse {
            node: id(from),
            violation,
        };
        assert_eq!(take(&mut node, (from, 0), unit, body), [accusation], "{body:?}");
        assert_eq!(node.released(1), None);
        let ended = [Action::Append { run: run(1, 1) }, Action::Ended];
        assert_eq!(take(&mut node, (1, 5), 1, FLUSHED), ended);
        assert_eq!(node.released(1), Some(Ok(())));
    }
}

/// Node 0 is the home of the units 0 to 7, and of no others of 24.
#[test]
fn handle_message__to_flush_a_wrong_run_accuses_and_changes_nothing() {
    for (unit, units, violation) in [
        (0, 0, Violation::NoSuchUnit),
        (23, 2, Violation::NoSuchUnit),
        (0, 25, Violation::NoSuchUnit),
        (0, u32::MAX, Violation::NoSuchUnit),
        (0, 5, Violation::TooMany),
        (6, 3, Violation::NotHome),
        (7, 2, Violation::NotHome),
        (8, 1, Violation::NotHome),
        // Those of the node that are being flushed, and that wait.
        (2, 2, Violation::Unexpected),
        (0, 3, Violation::Unexpected),
        (4, 1, Violation::Unexpected),
    ] {
        let mut node = node_of(8);
        let land = |run, slot| Action::Land {
            run,
            slot,
            from: id(1),
        };
        let two = Body::Flush { units: 2 };
        assert_eq!(take(&mut node, (1, 0), 2, two), [land(run(2, 2), 0)]);
        let others = Action::Land {
            run: run(7, 1),
            slot: 1,
            from: id(2),
        };
        assert_eq!(take(&mut node, (2, 0), 7, FLUSH), [others]);
        assert_eq!(take(&mut node, (1, 1), 4, two), NOTHING);
        let accusation = Action::Accuse {
            node: id(1),
            violation,
        };
        let body = Body::Flush { units };
        assert_eq!(
            take(&mut node, (1, 2), unit, body),
            [accusation],
            "{units} units from {unit} on"
        );
        node.handle_fetched(0, true);
        let all = actions(&mut node);
        assert_eq!(sent(&all), [(id(1), 2, Body::Flushed { units: 2 })]);
        assert_eq!(all[1..], [land(run(4, 2), 0)]);
    }
}

#[test]
fn handle_message__to_flush_what_others_have_written_reads_twins_and_waits_for_what_lands() {
    let mut node = node();
    let land = |slot, from| Action::Land {
        run: run(0, 1),
        slot,
        from: id(from),
    };
    let fetch = |slot, from| Action::Fetch {
        run: run(0, 1),
        slot,
        from: id(from),
    };
    let apply = |slot, is_shared| Action::Apply {
        run: run(0, 1),
        slot,
        is_shared,
    };
    assert_eq!(take(&mut node, (1, 0), 0, FLUSH), [land(0, 1)]);
    assert_eq!(take(&mut node, (2, 0), 0, FLUSH), NOTHING);
    node.handle_fetched(0, true);
    let all = actions(&mut node);
    assert_eq!(sent(&all), [(id(1), 0, FLUSHED)]);
    assert_eq!(all[1..], [fetch(0, 2)]);
    // The copy of node 1 lacks what node 2 has written.
    assert_eq!(take(&mut node, (1, 1), 0, FLUSH), [fetch(1, 1)]);
    node.handle_fetched(0, true);
    assert_eq!(actions(&mut node), [apply(0, false)]);
    node.handle_applied(0, &[false]);
    assert_eq!(sent(&actions(&mut node)), [(id(2), 0, FLUSHED)]);
    node.handle_fetched(1, true);
    assert_eq!(actions(&mut node), [apply(1, false)]);
    node.handle_applied(1, &[true]);
    actions(&mut node);
    // Copy and frame are the same now.
    assert_eq!(take(&mut node, (1, 2), 0, FLUSH), [land(0, 1)]);
    node.handle_fetched(0, true);
    actions(&mut node);
    // The home's program writes.
    node.handle_fault(0, Access::Write);
    actions(&mut node);
    assert_eq!(take(&mut node, (1, 3), 0, FLUSH), [fetch(0, 1)]);
    node.handle_fetched(0, true);
    assert_eq!(actions(&mut node), [apply(0, true)]);
    node.handle_applied(0, &[true]);
    actions(&mut node);
    assert_eq!(take(&mut node, (1, 4), 0, FLUSH), [fetch(0, 1)]);
}

/// The home's program writes one unit of a run: from the beginning on, or when the others are about to be stored.
#[test]
fn handle_applied__beside_the_homes_program_takes_the_units_that_it_does_not_write_for_the_same() {
    let four = Body::Flush { units: 4 };
    for was_written in [true, false] {
        for is_released in [true, false] {
            let mut node = node_of(8);
            // Node 2 has written all, so that nothing lands.
            take(&mut node, (2, 0), 0, four);
            node.handle_fetched(0, true);
            actions(&mut node);
            if was_written {
                node.handle_fault(1, Access::Write);
                actions(&mut node);
            }
            let fetch = Action::Fetch {
                run: run(0, 4),
                slot: 0,
                from: id(1),
            };
            assert_eq!(take(&mut node, (1, 0), 0, four), [fetch]);
            node.handle_fetched(0, true);
            if !was_written {
                node.handle_fault(1, Access::Write);
            }
            if is_released {
                node.handle_release();
            }
            let is_shared = was_written;
            let apply = Action::Apply {
                run: run(0, 4),
                slot: 0,
                is_shared,
            };
            assert_eq!(actions(&mut node)[0], apply);
            node.handle_applied(0, &[true, true, false, true]);
            actions(&mut node);
            for (sequence, unit) in (1..).zip(0..4) {
                let all = take(&mut node, (1, sequence), unit, FLUSH);
                let lands = matches!(all[..], [Action::Land { .. }]);
                let case = format!("unit {unit}, written before: {was_written}, released: {is_released}");
                assert_eq!(lands, [0, 3].contains(&unit), "{case}");
                node.handle_fetched(0, true);
                actions(&mut node);
                node.handle_applied(0, &[true]);
                actions(&mut node);
            }
        }
    }
}

#[test]
fn handle_fault__to_write_what_lands_waits_for_the_end() {
    for has_landed in [true, false] {
        for was_read in [true, false] {
            let mut node = node();
            let protect = |right| Action::Protect { unit: 0, right };
            if was_read {
                node.handle_fault(0, Access::Read);
                assert_eq!(actions(&mut node), [protect(Right::Shared)]);
            }
            take(&mut node, (1, 0), 0, FLUSH);
            node.handle_fault(0, Access::Write);
            let read = match was_read {
                true => vec![],
                false => vec![protect(Right::Shared)],
            };
            assert_eq!(actions(&mut node), read);
            assert!(node.is_awaited(0));
            node.handle_fault(0, Access::Write);
            assert_eq!(actions(&mut node), NOTHING);
            node.handle_fetched(0, has_landed);
            let all = actions(&mut node);
            assert_eq!(sent(&all).len(), usize::from(has_landed));
            assert_eq!(all.last(), Some(&protect(Right::Exclusive)));
            assert!(!node.is_awaited(0));
        }
    }
}

/// Units 8 to 15 have home 1, 16 to 23 home 2.
#[test]
fn handle_release__tells_homes_of_runs_that_have_changed_and_logs_no_others() {
    let mut node = node_of(8);
    write(&mut node, 10..18);
    assert_eq!(node.handle_release(), 1);
    let (of, task) = compared(&actions(&mut node)[8..]);
    assert_eq!(of, run(10, 4));
    node.handle_compared(task, &[true, true, false, true]);
    let all = actions(&mut node);
    let flush = |node, unit: u64, units| (id(node), unit, Body::Flush { units });
    assert_eq!(sent(&all), [flush(1, 10, 2), flush(1, 13, 1)]);
    let (of, task) = compared(&all[2..]);
    assert_eq!(of, run(14, 2));
    node.handle_compared(task, &[true, true]);
    let all = actions(&mut node);
    assert_eq!(sent(&all), [flush(1, 14, 2)]);
    let (of, task) = compared(&all[1..]);
    assert_eq!(of, run(16, 2));
    node.handle_compared(task, &[false, false]);
    assert_eq!(actions(&mut node), NOTHING);
    for (sequence, (unit, units)) in (0..).zip([(13, 1), (10, 2), (14, 2)]) {
        assert_eq!(node.released(1), None);
        let all = take(&mut node, (1, sequence), unit, Body::Flushed { units });
        let ended = [
            Action::Append { run: run(10, 2) },
            Action::Append { run: run(13, 3) },
            Action::Ended,
        ];
        assert_eq!(all, if unit == 14 { &ended[..] } else { &[] });
    }
    assert_eq!(node.released(1), Some(Ok(())));
}

/// Has node 0 compare units that have all changed, as long as it wants to. Returns what it tells homes.
fn compare_all(node: &mut Node, mut all: Vec<Action>) -> Vec<(NodeId, u64, Body)> {
    let mut told = sent(&all);
    while let Some(Action::Compare { run, task }) = all.last() {
        node.handle_compared(*task, &vec![true; run.count as usize]);
        all = actions(node);
        told.extend(sent(&all));
    }
    told
}

/// Units 1200 to 2399 have home 1.
#[test]
fn handle_release__of_many_runs_goes_on_as_the_home_answers() {
    let mut node = node_of(1200);
    write(&mut node, 1200..2400);
    let round = node.handle_release();
    let all = actions(&mut node);
    let mut told = compare_all(&mut node, all);
    assert_eq!(told.len(), 256);
    for answer in 0..300 {
        assert_eq!(node.released(round), None);
        let body = Body::Flushed { units: 4 };
        let all = take(&mut node, (1, answer), 1200 + 4 * answer, body);
        told.extend(compare_all(&mut node, all));
        assert_eq!(told.len() as u64, 300.min(257 + answer));
    }
    assert_eq!(node.released(round), Some(Ok(())));
}

/// The flush of node 2 is read while node 1 flushes twice, the second time when no slot is free.
#[test]
fn handle_fetched__of_others_lets_nothing_land_before_it_is_stored() {
    let mut node = node_of(8);
    take(&mut node, (1, 0), 0, FLUSH);
    node.handle_fetched(0, true);
    actions(&mut node);
    take(&mut node, (2, 0), 0, FLUSH);
    take(&mut node, (1, 1), 0, FLUSH);
    node.handle_fetched(1, true);
    actions(&mut node);
    node.handle_applied(1, &[true]);
    actions(&mut node);
    take(&mut node, (1, 2), 4, FLUSH);
    assert_eq!(take(&mut node, (1, 3), 0, FLUSH), NOTHING);
    node.handle_fetched(0, true);
    let is_shared = false;
    let apply = Action::Apply {
        run: run(0, 1),
        slot: 0,
        is_shared,
    };
    assert_eq!(actions(&mut node), [apply]);
    node.handle_applied(0, &[false]);
    let all = actions(&mut node);
    assert_eq!(sent(&all), [(id(2), 0, FLUSHED)]);
    let fetch = Action::Fetch {
        run: run(0, 1),
        slot: 0,
        from: id(1),
    };
    assert_eq!(all[1..], [fetch]);
}

#[test]
fn handle_release__of_units_that_have_not_changed_ends_at_once() {
    let mut node = node();
    write(&mut node, 1..2);
    let round = node.handle_release();
    let (_, task) = compared(&actions(&mut node));
    // A thread writes it while it is compared.
    node.handle_fault(1, Access::Write);
    node.handle_compared(task, &[false]);
    let right = Right::Exclusive;
    assert_eq!(
        actions(&mut node),
        [
            Action::Copy { unit: 1 },
            Action::Protect { unit: 1, right },
            Action::Ended
        ]
    );
    assert_eq!(node.released(round), Some(Ok(())));
    assert_eq!(node.handle_release(), round + 1);
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
    assert_eq!((all[0], all[2..].to_vec()), (poison, vec![Action::Ended]));
    assert_eq!(sent(&all), [(id(2), 0, Body::Settled)]);
    assert_eq!(node.released(1), Some(Err(id(1))));
    let round = node.handle_release();
    assert_eq!(node.released(round), Some(Ok(())));
    node.handle_fault(0, Access::Write);
    let round = node.handle_release();
    assert_eq!(node.released(round), Some(Ok(())));
}

/// The home of a unit that was noticed is gone before it has what this node has written of it.
#[test]
fn handle_release__after_one_for_an_acquire_that_has_lost_units_fails() {
    let mut node = node();
    write(&mut node, 1..2);
    let round = node.handle_acquire();
    actions(&mut node);
    node.handle_looked(id(1), Looked::Runs(vec![run(1, 1)]));
    node.handle_looked(id(2), Looked::Runs(vec![]));
    let (_, task) = compared(&actions(&mut node));
    node.handle_compared(task, &[true]);
    node.handle_gone(1, &[id(1)]);
    actions(&mut node);
    node.handle_message(id(2), &settled(1)).unwrap();
    assert!(node.acquired(round));
    let release = node.handle_release();
    assert_eq!(node.released(release), Some(Err(id(1))));
    let later = node.handle_release();
    assert_eq!(node.released(later), Some(Ok(())));
}

/// A thread asks for a release while one for an acquire is carried out, which then loses units.
#[test]
fn handle_release__behind_one_that_loses_units_fails_and_no_later_one() {
    let mut node = node();
    write(&mut node, 1..2);
    node.handle_acquire();
    actions(&mut node);
    node.handle_looked(id(1), Looked::Runs(vec![run(1, 1)]));
    node.handle_looked(id(2), Looked::Runs(vec![]));
    let (_, task) = compared(&actions(&mut node));
    node.handle_compared(task, &[true]);
    let release = node.handle_release();
    assert_eq!(node.released(release), None);
    node.handle_gone(1, &[id(1)]);
    assert_eq!(node.released(release), Some(Err(id(1))));
    let later = node.handle_release();
    assert_eq!(node.released(later), Some(Ok(())));
}

/// Node 1 has flushed the home's unit, and is gone before that is stored.
#[test]
fn handle_acquire__after_a_departure_waits_until_nobody_stores_what_the_node_has_written() {
    for is_own_last in [true, false] {
        let mut node = node();
        take(&mut node, (2, 9), 0, FLUSH);
        node.handle_fetched(0, true);
        take(&mut node, (1, 9), 0, FLUSH);
        node.handle_fetched(0, true);
        let stored = Action::Apply {
            run: run(0, 1),
            slot: 0,
            is_shared: false,
        };
        assert_eq!(actions(&mut node).last(), Some(&stored));
        node.handle_gone(1, &[id(1)]);
        assert_eq!(actions(&mut node), NOTHING);
        assert_eq!(node.awaits_settled().count(), 0, "nobody acquires");
        let round = node.handle_acquire();
        assert_eq!(actions(&mut node), [Action::Look { node: id(2) }]);
        node.handle_looked(id(2), Looked::Runs(vec![]));
        assert_eq!(node.awaits_settled().collect::<Vec<_>>(), [(1, id(2))]);
        let settle = |node: &mut Node| {
            node.handle_applied(0, &[true]);
            let all = actions(node);
            assert_eq!(sent(&all), [(id(2), 0, Body::Settled)]);
            all
        };
        if !is_own_last {
            settle(&mut node);
        }
        // One of an earlier epoch says nothing about this one.
        node.handle_message(id(2), &settled(0)).unwrap();
        assert!(!node.acquired(round));
        node.handle_message(id(2), &settled(1)).unwrap();
        let mut all = actions(&mut node);
        if is_own_last {
            assert_eq!((all, node.acquired(round)), (vec![], false));
            all = settle(&mut node);
        }
        assert_eq!((all.last(), node.acquired(round)), (Some(&Action::Ended), true));
        assert_eq!(node.awaits_settled().count(), 0);
    }
}

/// Makes node 0 of a region whose homes the first touch makes, with one registrar of all units.
fn touched(registrar: u32) -> Node {
    node_with(1, Homes::first_touch([id(registrar)]).unwrap())
}

/// Has the program of node 0 touch a unit whose registrar is node 1, which hears of that.
fn locating(unit: u64, access: Access) -> Node {
    let mut node = touched(1);
    node.handle_fault(unit, access);
    assert_eq!(sent(&actions(&mut node)), [(id(1), unit, Body::Locate)]);
    assert_eq!(node.waits().map(|it| it.node).collect::<Vec<_>>(), [id(1)]);
    assert_eq!((node.home(unit), node.is_awaited(unit)), (None, true));
    node
}

#[test]
fn handle_fault__where_the_home_is_not_known_asks_the_registrar() {
    let (unit, task) = (2, 0);
    let mut node = locating(unit, Access::Read);
    // A later fault waits for the same answer.
    node.handle_fault(unit, Access::Write);
    assert_eq!(actions(&mut node), NOTHING);
    let pull = Action::Pull {
        unit,
        task,
        from: id(2),
    };
    assert_eq!(take(&mut node, (1, 0), unit, Body::Home(id(2))), [pull]);
    assert_eq!(node.waits().count(), 0);
    node.handle_pulled(unit, task, true);
    let right = Right::Exclusive;
    assert_eq!(
        actions(&mut node),
        [Action::Copy { unit }, Action::Protect { unit, right }]
    );
    node.handle_release();
    let (of, task) = compared(&actions(&mut node));
    node.handle_compared(task, &[true]);
    assert_eq!(of, run(2, 1));
    assert_eq!(sent(&actions(&mut node)), [(id(2), unit, FLUSH)]);

    let mut node = locating(unit, Access::Write);
    let protect = Action::Protect { unit, right };
    assert_eq!(take(&mut node, (1, 0), unit, Body::Home(id(0))), [protect]);
}

/// Otherwise the limit of that wait would begin again with each release.
#[test]
fn waits__for_a_registrar_stay_the_same_while_releases_begin_and_end() {
    let mut node = locating(0, Access::Read);
    let before: Vec<_> = node.waits().collect();
    node.handle_fault(1, Access::Write);
    actions(&mut node);
    take(&mut node, (1, 0), 1, Body::Home(id(2)));
    node.handle_pulled(1, 0, true);
    actions(&mut node);
    let round = node.handle_release();
    let (_, task) = compared(&actions(&mut node));
    assert_eq!(node.waits().collect::<Vec<_>>(), before);
    node.handle_compared(task, &[false]);
    assert_eq!(node.released(round), Some(Ok(())));
    assert_eq!(node.waits().collect::<Vec<_>>(), before);
}

#[test]
fn handle_message__of_nodes_that_do_not_know_the_home_names_the_first_of_them() {
    let mut node = touched(0);
    for (from, unit, home) in [(2, 0, 2), (1, 0, 2), (2, 0, 2), (1, 1, 1)] {
        let answer = (id(from), unit, Body::Home(id(home)));
        let sequence = 2 * unit + u64::from(from == 2 && node.home(0).is_some());
        assert_eq!(
            sent(&take(&mut node, (from, sequence), unit, Body::Locate)),
            [answer]
        );
    }
    node.handle_fault(0, Access::Read);
    let pull = |unit, task, from| Action::Pull {
        unit,
        task,
        from: id(from),
    };
    assert_eq!(actions(&mut node), [pull(0, 0, 2)]);
    // The registrar itself is the first one that touches the last unit.
    let right = Right::Shared;
    node.handle_fault(2, Access::Read);
    assert_eq!(actions(&mut node), [Action::Protect { unit: 2, right }]);
    let answer = (id(1), 2, Body::Home(id(0)));
    assert_eq!(sent(&take(&mut node, (1, 5), 2, Body::Locate)), [answer]);
}

#[test]
fn handle_message__to_flush_before_the_home_knows_that_it_is_lands() {
    let mut node = locating(0, Access::Write);
    let land = Action::Land {
        run: run(0, 1),
        slot: 0,
        from: id(2),
    };
    assert_eq!(take(&mut node, (2, 0), 0, FLUSH), [land]);
    // The program waits until it has landed.
    let protect = |right| Action::Protect { unit: 0, right };
    assert_eq!(
        take(&mut node, (1, 0), 0, Body::Home(id(0))),
        [protect(Right::Shared)]
    );
    node.handle_fetched(0, true);
    let all = actions(&mut node);
    assert_eq!(sent(&all), [(id(2), 0, FLUSHED)]);
    assert_eq!(all.last(), Some(&protect(Right::Exclusive)));
}

#[test]
fn handle_message__about_homes_that_no_correct_node_sends_accuses_and_changes_nothing() {
    for (from, unit, body, violation) in [
        (1, 0, Body::Locate, Violation::NotHome),
        (2, 0, Body::Home(id(2)), Violation::NotHome),
        (1, 0, Body::Home(id(3)), Violation::WrongNode),
        (1, 1, Body::Home(id(2)), Violation::Unexpected),
    ] {
        let mut node = locating(0, Access::Read);
        let accusation = Action::Accuse {
            node: id(from),
            violation,
        };
        assert_eq!(take(&mut node, (from, 0), unit, body), [accusation], "{body:?}");
        let pull = Action::Pull {
            unit: 0,
            task: 0,
            from: id(2),
        };
        assert_eq!(take(&mut node, (1, 1), 0, Body::Home(id(2))), [pull]);
    }
    for body in [Body::Locate, Body::Home(id(1))] {
        let accusation = Action::Accuse {
            node: id(1),
            violation: Violation::NotHome,
        };
        assert_eq!(
            take(&mut node(), (1, 0), 0, body),
            [accusation],
            "all know the homes"
        );
    }
}

#[test]
fn handle_gone__of_a_registrar_ends_the_waits_for_its_answer_and_no_others() {
    let mut node = locating(0, Access::Read);
    node.handle_fault(1, Access::Read);
    actions(&mut node);
    let pull = Action::Pull {
        unit: 1,
        task: 0,
        from: id(2),
    };
    assert_eq!(take(&mut node, (1, 0), 1, Body::Home(id(2))), [pull]);
    node.handle_gone(1, &[id(1)]);
    let poison = |unit| Action::Poison { unit, node: id(1) };
    assert_eq!(actions(&mut node)[0], poison(0));
    assert_eq!(node.waits().count(), 0);
    node.handle_pulled(1, 0, true);
    let right = Right::Shared;
    assert_eq!(actions(&mut node), [Action::Protect { unit: 1, right }]);
    // Nobody knows the home of a unit of which this node hears first.
    node.handle_fault(2, Access::Read);
    assert_eq!(actions(&mut node), [poison(2)]);
}

/// Has an event happen to a node whose peers send anything. Returns the rounds of a release or an acquire that it began.
fn happen(node: &mut Node, epoch: u64, sequence: u64, dice: &mut ChaCha8Rng) -> (Option<u64>, Option<u64>) {
    const BODIES: [Body; 10] = [
        Body::Locate,
        Body::Home(id(0)),
        Body::Home(id(2)),
        Body::Settled,
        FLUSH,
        Body::Flush { units: 2 },
        FLUSHED,
        FLUSHED,
        Body::Yielded,
        Body::Refuse(id(1)),
    ];
    let mut number = |below: u32| dice.next_u32() % below;
    let (unit, from) = (u64::from(number(3)), id(1 + number(2)));
    match number(10) {
        0 => node.handle_fault(unit, [Access::Read, Access::Write][number(2) as usize]),
        1 | 2 => {
            let message = Message {
                region: 7,
                epoch,
                sequence,
                request: number(6).into(),
                unit: unit + u64::from(number(8) / 7),
                body: BODIES[number(BODIES.len() as u32) as usize],
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
        6 => node.handle_compared(number(20).into(), &[number(2) == 0]),
        7 => node.handle_applied(number(2) as usize, &[number(2) == 0]),
        8 => return (Some(node.handle_release()), None),
        _ => return (None, Some(node.handle_acquire())),
    }
    (None, None)
}

#[test]
fn rounds__all_end_with_the_other_nodes_whatever_these_have_sent() {
    for seed in 0..3000 {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mut node = match seed % 3 {
            0 => node_with(1, Homes::first_touch([id(0), id(1), id(2)]).unwrap()),
            _ => node(),
        };
        let mut rounds = (0, 0);
        let first = 1 + (seed % 2) as u32;
        for (epoch, gone) in [(0, first), (1, 3 - first)] {
            for sequence in 0..100 {
                let (release, acquire) = happen(&mut node, epoch, 100 * epoch + sequence, &mut dice);
                rounds = (
                    rounds.0.max(release.unwrap_or(0)),
                    rounds.1.max(acquire.unwrap_or(0)),
                );
                actions(&mut node);
            }
            node.handle_gone(epoch + 1, &[id(gone)]);
        }
        // The flushes that had begun end, two at a time.
        for slot in [0, 1, 0, 1] {
            node.handle_fetched(slot, false);
            node.handle_applied(slot, &[false]);
        }
        assert!(node.released(rounds.0).is_some(), "seed {seed}: {node:?}");
        assert!(node.acquired(rounds.1), "seed {seed}: {node:?}");
        assert_eq!(
            node.waits().count() + node.awaits_settled().count(),
            0,
            "seed {seed}"
        );
    }
}

//! Answers of one node to single events.
#![allow(non_snake_case, reason = "tests are named function__case")]

use rdmux_dsm::protocol::{
    Access, Action, Ahead, Body, Homes, HomesError, Message, Node, NodeId, Right, Settings, Violation,
};

const fn id(number: u32) -> NodeId {
    NodeId::new(number).unwrap()
}

/// Makes node 0, of the members 0, 1 and 2. Node 0 is the home of unit 0, node 1 that of unit 1.
fn node() -> Node {
    node_with(Homes::cyclic([id(0), id(1)], 1).unwrap())
}

fn node_with(homes: Homes) -> Node {
    let settings = Settings {
        region: 7,
        units: 2,
        homes,
        epoch: 0,
        members: (0..3).map(id).collect(),
    };
    Node::new(id(0), &settings)
}

fn message(sequence: u64, unit: u64, body: Body) -> Message {
    Message {
        region: 7,
        epoch: 0,
        sequence,
        request: 0,
        unit,
        body,
    }
}

fn actions(node: &mut Node) -> Vec<Action> {
    std::iter::from_fn(|| node.poll_action()).collect()
}

#[test]
fn handle_message__of_a_newer_epoch_changes_nothing_until_that_has_begun() {
    let mut node = node();
    let before = node.clone();
    let ask = Message {
        epoch: 1,
        ..message(0, 0, Body::Ask(Right::Shared))
    };
    assert_eq!(node.handle_message(id(1), &ask), Err(Ahead { epoch: 1 }));
    assert_eq!(node, before);
    node.handle_gone(1, &[id(2)]);
    assert_eq!(actions(&mut node), []);
    assert_eq!(node.handle_message(id(1), &ask), Ok(()));
    assert!(matches!(
        actions(&mut node)[..],
        [Action::Send { to, message }] if to == id(1) && matches!(message.body, Body::Grant { .. })
    ));
}

/// The first read is given up, its source has left, and the read from the next source is in progress.
#[test]
fn handle_pulled__of_an_earlier_read_is_ignored() {
    let mut node = node();
    let grant = |sequence, source| {
        let (right, source) = (Right::Shared, Some(id(source)));
        message(sequence, 1, Body::Grant { right, source })
    };
    let pull = |node: &mut Node| match actions(node)[..] {
        [Action::Pull { task, .. }] => task,
        ref other => panic!("{other:?}"),
    };
    node.handle_fault(1, Access::Read);
    actions(&mut node);
    node.handle_message(id(1), &grant(0, 2)).unwrap();
    let first = pull(&mut node);
    node.handle_gone(1, &[id(2)]);
    node.handle_pulled(1, first, false);
    actions(&mut node);
    node.handle_message(id(1), &grant(1, 1)).unwrap();
    let second = pull(&mut node);
    node.handle_pulled(1, first, true);
    assert_eq!(actions(&mut node), []);
    node.handle_pulled(1, second, true);
    assert!(matches!(actions(&mut node)[..], [Action::Protect { .. }]));
}

#[test]
fn handle_message__that_names_a_wrong_node_changes_nothing() {
    let grant = |source| Body::Grant {
        right: Right::Shared,
        source: Some(id(source)),
    };
    let (stranger, member) = (3, 2);
    for body in [
        grant(stranger),
        Body::Refuse(id(stranger)),
        Body::Refuse(id(member)),
    ] {
        let mut node = node();
        node.handle_fault(1, Access::Read);
        actions(&mut node);
        node.handle_message(id(1), &message(0, 1, body)).unwrap();
        let accusation = Action::Accuse {
            node: id(1),
            violation: Violation::WrongNode,
        };
        assert_eq!(actions(&mut node), [accusation]);
        // The answer of the home still counts.
        node.handle_message(id(1), &message(1, 1, grant(member))).unwrap();
        assert!(matches!(actions(&mut node)[..], [Action::Pull { .. }]));
    }
}

#[test]
fn homes__need_a_node_and_a_unit_of_a_run() {
    assert_eq!(Homes::cyclic([], 1), Err(HomesError::NoNodes));
    assert_eq!(Homes::hash([]), Err(HomesError::NoNodes));
    assert_eq!(Homes::cyclic([id(0)], 0), Err(HomesError::EmptyRun));
    let homes = Homes::cyclic([id(0), id(1)], 2).unwrap();
    assert_eq!(
        [0, 1, 2, 3, 4].map(|unit| homes.of(unit).number()),
        [0, 0, 1, 1, 0]
    );
    assert_eq!(Homes::hash([id(5)]).unwrap().of(u64::MAX), id(5));
}

#[test]
fn homes__by_name_have_each_unit_in_one_range() {
    let explicit = |ranges: &[(u64, u32)]| {
        let ranges = ranges.iter().map(|(first, node)| (*first, id(*node)));
        Homes::explicit(ranges.collect::<Vec<_>>())
    };
    assert_eq!(explicit(&[]), Err(HomesError::NoNodes));
    assert_eq!(explicit(&[(1, 0)]), Err(HomesError::Uncovered(1)));
    assert_eq!(explicit(&[(0, 0), (5, 1), (5, 2)]), Err(HomesError::Unsorted(5)));
    assert_eq!(explicit(&[(0, 0), (5, 1), (4, 2)]), Err(HomesError::Unsorted(4)));
    let homes = explicit(&[(0, 7), (5, 1), (6, 7)]).unwrap();
    let units = [0, 4, 5, 6, u64::MAX];
    assert_eq!(units.map(|unit| homes.of(unit).number()), [7, 7, 1, 7, 7]);
}

#[test]
fn waits_for__names_the_nodes_that_have_not_answered() {
    let mut node = node();
    let waits_for = |node: &Node| -> Vec<u32> {
        let of_all: Vec<NodeId> = node.waits().map(|wait| wait.node).collect();
        assert!(node.waits_for(0).eq(of_all.iter().copied()));
        of_all.into_iter().map(NodeId::number).collect()
    };
    let mut numbers = [0; 3];
    let mut take = |node: &mut Node, from: u32, request, body| {
        let sequence = &mut numbers[from as usize];
        let message = Message {
            request,
            ..message(*sequence, 0, body)
        };
        *sequence += 1;
        node.handle_message(id(from), &message).unwrap();
        assert!(!actions(node).iter().any(|it| matches!(it, Action::Accuse { .. })));
    };
    assert_eq!(waits_for(&node), []);
    take(&mut node, 1, 0, Body::Ask(Right::Exclusive));
    assert_eq!(waits_for(&node), [1]);
    take(&mut node, 1, 0, Body::Installed);
    assert_eq!(waits_for(&node), []);
    take(&mut node, 2, 5, Body::Ask(Right::Shared));
    assert_eq!(waits_for(&node), [1]);
    let (request, node_1) = ((id(2), 5), id(1));
    assert_eq!(
        node.waits().next().map(|it| (it.unit, it.request, it.node)),
        Some((0, request, node_1))
    );
    take(&mut node, 1, 5, Body::Yielded);
    assert_eq!(waits_for(&node), [2]);
    // Node 2 cannot read from node 1.
    take(&mut node, 2, 5, Body::Failed);
    assert_eq!(waits_for(&node), [1]);
}

/// Has node 0, the home of unit 0, take messages, in turn with their numbers from their senders. Returns what it sends for the last one.
fn take(node: &mut Node, messages: &[(u32, Body)]) -> Vec<(u32, Body)> {
    let mut numbers = [0; 5];
    let mut last = vec![];
    for (from, body) in messages {
        let sequence = &mut numbers[*from as usize];
        node.handle_message(id(*from), &message(*sequence, 0, *body))
            .unwrap();
        *sequence += 1;
        last = sent(node);
    }
    last
}

const READ: Body = Body::Ask(Right::Shared);
const WRITE: Body = Body::Ask(Right::Exclusive);

fn grant(from: u32) -> Body {
    let (right, source) = (Right::Shared, Some(id(from)));
    Body::Grant { right, source }
}

/// Makes node 0, of 5 members. Node 1 has written unit 0, and the nodes 2 and 3 are getting to read it from there.
fn two_readers() -> Node {
    let settings = Settings {
        region: 7,
        units: 1,
        homes: Homes::hash([id(0)]).unwrap(),
        epoch: 0,
        members: (0..5).map(id).collect(),
    };
    let mut node = Node::new(id(0), &settings);
    let before = [(1, WRITE), (1, Body::Installed), (2, READ), (1, Body::Yielded)];
    assert_eq!(take(&mut node, &before), [(2, grant(1))]);
    let ask = message(0, 0, READ);
    node.handle_message(id(3), &ask).unwrap();
    assert_eq!(sent(&mut node), [(3, grant(1))]);
    assert_eq!(node.waits_for(0).collect::<Vec<_>>(), [id(2), id(3)]);
    node
}

/// Hands a message to a node, and returns what it sends.
fn answers(node: &mut Node, (from, sequence): (u32, u64), body: Body) -> Vec<(u32, Body)> {
    let epoch = node.epoch();
    let message = Message {
        epoch,
        ..message(sequence, 0, body)
    };
    node.handle_message(id(from), &message).unwrap();
    sent(node)
}

#[test]
fn handle_message__that_asks_to_read_does_not_wait_for_other_reads() {
    let mut node = two_readers();
    // A write waits for all, and a read behind it for the write.
    assert_eq!(answers(&mut node, (4, 0), WRITE), []);
    assert_eq!(answers(&mut node, (1, 3), READ), []);
    assert_eq!(answers(&mut node, (3, 1), Body::Installed), []);
    let recall = |to| (to, Body::Recall(Right::Invalid));
    assert_eq!(answers(&mut node, (2, 1), Body::Installed), [1, 2, 3].map(recall));
}

/// Node 1 leaves while both read from it.
#[test]
fn handle_message__that_a_read_failed_waits_for_another_read_of_the_same_contents() {
    let mut node = two_readers();
    node.handle_gone(1, &[id(1)]);
    assert_eq!(answers(&mut node, (2, 1), Body::Failed), []);
    assert_eq!(node.waits_for(0).collect::<Vec<_>>(), [id(3)]);
    assert_eq!(answers(&mut node, (3, 1), Body::Installed), [(2, grant(3))]);
    assert_eq!(node.lost(0), None);
}

#[test]
fn handle_message__that_the_last_read_failed_has_all_refused() {
    let mut node = two_readers();
    node.handle_gone(1, &[id(1)]);
    assert_eq!(answers(&mut node, (2, 1), Body::Failed), []);
    let refuse = |to| (to, Body::Refuse(id(1)));
    assert_eq!(answers(&mut node, (3, 1), Body::Failed), [2, 3].map(refuse));
    assert_eq!(node.lost(0), Some(id(1)));
}

/// Makes node 0 as in [`node`], where the first touch makes the home and node 1 is the registrar. Its program has touched unit 0, and node 2 asks for
/// it.
fn toucher() -> Node {
    let mut node = node_with(Homes::first_touch([id(1)]).unwrap());
    node.handle_fault(0, Access::Write);
    let sent = actions(&mut node);
    assert!(
        matches!(&sent[..], [Action::Send { to, message }] if *to == id(1) && message.body == Body::Locate)
    );
    let ask = message(0, 0, Body::Ask(Right::Shared));
    node.handle_message(id(2), &ask).unwrap();
    assert_eq!(actions(&mut node), []);
    assert_eq!(node.home(0), None);
    node
}

/// Returns the messages that a node sends.
fn sent(node: &mut Node) -> Vec<(u32, Body)> {
    let actions = actions(node).into_iter();
    let message = |it| match it {
        Action::Send { to, message } => Some((to.number(), message.body)),
        _ => None,
    };
    actions.filter_map(message).collect()
}

#[test]
fn handle_message__that_asks_early_is_answered_when_the_home_is_known() {
    let mut node = toucher();
    node.handle_message(id(1), &message(0, 0, Body::Home(id(0))))
        .unwrap();
    assert_eq!(node.home(0), Some(id(0)));
    let (right, source) = (Right::Exclusive, Some(id(0)));
    assert_eq!(sent(&mut node), [(2, Body::Grant { right, source })]);
    assert_eq!(node.waits_for(0).collect::<Vec<_>>(), [id(2)]);
}

/// The registrar has told node 2 another home than node 0.
#[test]
fn handle_message__that_asks_a_node_that_is_not_the_home_waits_for_the_end_of_the_registrar() {
    let mut node = toucher();
    node.handle_message(id(1), &message(0, 0, Body::Home(id(1))))
        .unwrap();
    assert_eq!(sent(&mut node), [(1, Body::Ask(Right::Exclusive))]);
    // A second answer, which would make the node the home, too.
    node.handle_message(id(1), &message(1, 0, Body::Home(id(0))))
        .unwrap();
    assert!(matches!(actions(&mut node)[..], [Action::Accuse { node, .. }] if node == id(1)));
    assert_eq!(node.home(0), Some(id(1)));
    node.handle_gone(1, &[id(1)]);
    assert_eq!(sent(&mut node), [(2, Body::Refuse(id(1)))]);
}

#[test]
fn handle_message__that_asks_early_or_late_is_refused_if_the_registrar_is_gone() {
    let mut node = toucher();
    node.handle_gone(1, &[id(1)]);
    let refuse = (2, Body::Refuse(id(1)));
    let all = actions(&mut node);
    let (unit, lost) = (0, id(1));
    assert!(all.contains(&Action::Poison { unit, node: lost }), "{all:?}");
    let refused =
        |it: &Action| matches!(it, Action::Send { to, message } if (to.number(), message.body) == refuse);
    assert!(all.iter().any(refused), "{all:?}");
    let late = message(1, 0, Body::Ask(Right::Exclusive));
    node.handle_message(id(2), &late).unwrap();
    assert_eq!(sent(&mut node), [refuse]);
}

/// Node 0 is the registrar.
#[test]
fn handle_message__that_locates_gets_the_first_that_did() {
    let mut node = node_with(Homes::first_touch([id(0)]).unwrap());
    for from in [2, 1] {
        node.handle_message(id(from), &message(0, 1, Body::Locate))
            .unwrap();
        assert_eq!(sent(&mut node), [(from, Body::Home(id(2)))]);
    }
    node.handle_fault(1, Access::Read);
    assert_eq!(sent(&mut node), [(2, Body::Ask(Right::Shared))]);
}

/// Node 2 reads the only contents from node 1, and both leave in one epoch.
#[test]
fn handle_gone__of_a_reader_and_its_source_names_the_source() {
    for gone in [[id(1), id(2)], [id(2), id(1)]] {
        let mut node = node();
        for (from, sequence, body) in [
            (1, 0, Body::Ask(Right::Exclusive)),
            (1, 1, Body::Installed),
            (2, 0, Body::Ask(Right::Shared)),
            (1, 2, Body::Yielded),
        ] {
            node.handle_message(id(from), &message(sequence, 0, body))
                .unwrap();
        }
        assert_eq!(node.waits_for(0).collect::<Vec<_>>(), [id(2)]);
        node.handle_gone(1, &gone);
        assert_eq!(node.lost(0), Some(id(1)));
    }
}

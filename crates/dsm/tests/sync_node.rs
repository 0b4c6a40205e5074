//! Answers of one node's synchronisation to single events.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::num::NonZeroU32;

use rdmux_dsm::protocol::Homes;
use rdmux_dsm::sync::{
    Action, Ahead, BUDGET, Body, Call, Failure, Message, Mode, Node, NodeId, Operation, Outcome, Refusal,
    Success, THREADS_MAX, Violation,
};

const fn id(number: u32) -> NodeId {
    NodeId::new(number).unwrap()
}

/// Makes node 0, of the members 0, 1 and 2. Object n has node n % 3 for its home.
fn node() -> Node {
    let members = [id(0), id(1), id(2)];
    let homes = Homes::cyclic(members, 1).unwrap();
    Node::new(id(0), 7, 0, &members, homes)
}

fn message(sequence: u64, object: u64, body: Body) -> Message {
    Message {
        region: 7,
        epoch: 0,
        sequence,
        thread: 0,
        object,
        body,
    }
}

fn actions(node: &mut Node) -> Vec<Action> {
    std::iter::from_fn(|| node.poll_action()).collect()
}

fn done(ticket: u64, outcome: Outcome) -> Action {
    Action::Done { ticket, outcome }
}

const fn parties(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

const LOCKED: Outcome = Ok(Success::Locked { recovered: None });

#[test]
fn handle_call__of_one_node_goes_through_all_calls() {
    let mut node = node();
    let mut call = |call, ticket| {
        node.handle_call(call, ticket);
        actions(&mut node)
    };
    let (object, mode) = (0, Mode::Exclusive);
    assert_eq!(call(Call::Lock { object, mode }, 0), [done(0, LOCKED)]);
    assert_eq!(call(Call::Lock { object, mode }, 1), []);
    assert_eq!(
        call(Call::Unlock { object, mode }, 0),
        [done(0, Ok(Success::Done)), done(1, LOCKED)]
    );
    let lock = object;
    let condition = object;
    assert_eq!(call(Call::Wait { condition, lock }, 1), []);
    assert_eq!(call(Call::Lock { object, mode }, 0), [done(0, LOCKED)]);
    assert_eq!(call(Call::Signal { condition }, 0), [done(0, Ok(Success::Done))]);
    let (gone, recovered) = (None, None);
    assert_eq!(
        call(Call::Unlock { object, mode }, 0),
        [
            done(0, Ok(Success::Done)),
            done(1, Ok(Success::Woken { gone, recovered }))
        ]
    );
    let parties = parties(2);
    assert_eq!(call(Call::Barrier { object, parties }, 1), []);
    assert_eq!(
        call(Call::Barrier { object, parties }, 0),
        [done(0, Ok(Success::Done)), done(1, Ok(Success::Done))]
    );
    let mut reduce = |value: f64, ticket| {
        let operation = Operation::SumF64;
        let value = value.to_bits();
        call(
            Call::Reduce {
                object,
                parties,
                operation,
                value,
            },
            ticket,
        )
    };
    assert_eq!(reduce(1.5, 1), []);
    let sum = Ok(Success::Value(4.0_f64.to_bits()));
    assert_eq!(reduce(2.5, 0), [done(0, sum), done(1, sum)]);
    let value = |value| [done(0, Ok(Success::Value(value)))];
    assert_eq!(call(Call::FetchAdd { object, value: 5 }, 0), value(0));
    let (expected, new) = (5, 9);
    assert_eq!(
        call(
            Call::CompareSwap {
                object,
                expected,
                new
            },
            0
        ),
        value(5)
    );
    assert_eq!(call(Call::Load { object }, 0), value(9));
}

/// Takes messages of other nodes in a row, and returns the actions of the last one.
struct Others {
    node: Node,
    numbers: [u64; 3],
}

impl Others {
    fn new() -> Others {
        Others {
            node: node(),
            numbers: [0; 3],
        }
    }

    fn take(&mut self, from: u32, thread: u16, object: u64, body: Body) -> Vec<Action> {
        let sequence = &mut self.numbers[from as usize];
        let message = Message {
            thread,
            ..message(*sequence, object, body)
        };
        *sequence += 1;
        self.node.handle_message(id(from), &message).unwrap();
        actions(&mut self.node)
    }

    /// Returns the answers to a message: node, thread and body.
    fn answers(&mut self, from: u32, thread: u16, object: u64, body: Body) -> Vec<(u32, u16, Body)> {
        let actions = self.take(from, thread, object, body).into_iter();
        let answers = actions.map(|action| match action {
            Action::Send { to, message } if message.object == object => {
                (to.number(), message.thread, message.body)
            }
            other => panic!("{other:?}"),
        });
        answers.collect()
    }

    /// Takes a message that no correct node sends, which changes nothing but the number of the next one.
    fn violates(&mut self, from: u32, thread: u16, object: u64, body: Body, expected: Violation) {
        let actions = self.take(from, thread, object, body);
        let (node, violation) = (id(from), expected);
        assert_eq!(actions, [Action::Accuse { node, violation }], "{body:?}");
    }
}

const GRANTED: Body = Body::Granted { recovered: None };
const SHARED: Mode = Mode::Shared;
const EXCLUSIVE: Mode = Mode::Exclusive;

#[test]
fn lock__is_given_in_order_and_shared_by_readers_in_a_row() {
    let mut home = Others::new();
    let done = Body::Done(0);
    assert_eq!(home.answers(1, 0, 0, Body::Lock(SHARED)), [(1, 0, GRANTED)]);
    assert_eq!(home.answers(2, 0, 0, Body::Lock(SHARED)), [(2, 0, GRANTED)]);
    assert_eq!(home.answers(1, 1, 0, Body::Lock(EXCLUSIVE)), []);
    // These readers do not overtake the writer.
    assert_eq!(home.answers(2, 1, 0, Body::Lock(SHARED)), []);
    assert_eq!(home.answers(2, 2, 0, Body::Lock(SHARED)), []);
    assert_eq!(home.answers(1, 2, 0, Body::Lock(EXCLUSIVE)), []);
    assert_eq!(home.answers(2, 3, 0, Body::Lock(SHARED)), []);
    assert_eq!(home.answers(1, 0, 0, Body::Unlock(SHARED)), [(1, 0, done)]);
    assert_eq!(
        home.answers(2, 0, 0, Body::Unlock(SHARED)),
        [(2, 0, done), (1, 1, GRANTED)]
    );
    assert_eq!(
        home.answers(1, 1, 0, Body::Unlock(EXCLUSIVE)),
        [(1, 1, done), (2, 1, GRANTED), (2, 2, GRANTED)]
    );
    assert_eq!(home.answers(2, 1, 0, Body::Unlock(SHARED)), [(2, 1, done)]);
    assert_eq!(
        home.answers(2, 2, 0, Body::Unlock(SHARED)),
        [(2, 2, done), (1, 2, GRANTED)]
    );
}

#[test]
fn condition__wakes_the_thread_that_has_waited_longest() {
    let mut home = Others::new();
    let woken = Body::Woken { gone: None };
    let done = Body::Done(0);
    for thread in 0..4 {
        assert_eq!(
            home.answers(1, thread, 3, Body::Wait),
            [(1, thread, Body::Queued)]
        );
    }
    assert_eq!(home.answers(2, 0, 3, Body::Signal), [(1, 0, woken), (2, 0, done)]);
    assert_eq!(
        home.answers(2, 0, 3, Body::Broadcast),
        [(1, 1, woken), (1, 2, woken), (1, 3, woken), (2, 0, done)]
    );
    assert_eq!(home.answers(2, 0, 3, Body::Signal), [(2, 0, done)]);
}

#[test]
fn handle_gone__marks_a_lock_for_all_up_to_the_first_that_has_it_for_itself() {
    let mut node = node();
    let call = |node: &mut Node, call, ticket| {
        node.handle_call(call, ticket);
        actions(node)
    };
    let take = |mode| Call::Lock { object: 0, mode };
    let give = |mode| Call::Unlock { object: 0, mode };
    node.handle_message(id(1), &message(0, 0, Body::Lock(EXCLUSIVE)))
        .unwrap();
    actions(&mut node);
    assert_eq!(call(&mut node, take(SHARED), 0), []);
    assert_eq!(call(&mut node, take(EXCLUSIVE), 1), []);
    assert_eq!(call(&mut node, take(EXCLUSIVE), 2), []);
    node.handle_gone(1, &[id(1)]);
    let recovered = Ok(Success::Locked {
        recovered: Some(id(1)),
    });
    assert_eq!(actions(&mut node), [done(0, recovered)]);
    let passed = Ok(Success::Done);
    assert_eq!(
        call(&mut node, give(SHARED), 0),
        [done(0, passed), done(1, recovered)]
    );
    assert_eq!(
        call(&mut node, give(EXCLUSIVE), 1),
        [done(1, passed), done(2, LOCKED)]
    );
}

#[test]
fn handle_gone__of_a_home_ends_calls_with_its_name() {
    let mut node = node();
    let gone = Err(Failure::Gone(id(1)));
    node.handle_call(Call::Load { object: 1 }, 0);
    let (object, parties) = (4, parties(2));
    node.handle_call(Call::Barrier { object, parties }, 1);
    actions(&mut node);
    node.handle_gone(1, &[id(1)]);
    assert_eq!(actions(&mut node), [done(0, gone), done(1, gone)]);
    node.handle_call(Call::Load { object: 1 }, 0);
    assert_eq!(actions(&mut node), [done(0, gone)]);
    // The home of this object is there.
    node.handle_call(Call::Load { object: 0 }, 0);
    assert_eq!(actions(&mut node), [done(0, Ok(Success::Value(0)))]);
}

#[test]
fn handle_gone__breaks_a_barrier_only_if_a_party_has_left() {
    for (gone, is_broken) in [(1, true), (2, false)] {
        let mut home = Others::new();
        let (object, parties) = (0, parties(2));
        let arrival = Body::Gather {
            operation: None,
            parties,
            value: 0,
        };
        let call = Call::Barrier { object, parties };
        home.take(1, 0, object, arrival);
        home.node.handle_call(call, 0);
        let node = &mut home.node;
        assert!(actions(node).contains(&done(0, Ok(Success::Done))));
        node.handle_gone(1, &[id(gone)]);
        node.handle_call(call, 0);
        let failed = done(0, Err(Failure::Gone(id(gone))));
        let expected: &[Action] = if is_broken { &[failed] } else { &[] };
        assert_eq!(actions(node), expected);
    }
}

#[test]
fn handle_call__that_cannot_be_carried_out_is_an_error() {
    let mut node = node();
    let mut call = |call, ticket| {
        node.handle_call(call, ticket);
        actions(&mut node)
    };
    let object = 0;
    let (take, give) = (
        |mode| Call::Lock { object, mode },
        |mode| Call::Unlock { object, mode },
    );
    let wait = Call::Wait {
        condition: 0,
        lock: 0,
    };
    let not_held = [done(0, Err(Failure::NotHeld))];
    assert_eq!(call(give(EXCLUSIVE), 0), not_held);
    assert_eq!(call(wait, 0), not_held);
    assert_eq!(call(take(SHARED), 0), [done(0, LOCKED)]);
    assert_eq!(call(give(EXCLUSIVE), 0), not_held);
    assert_eq!(call(wait, 0), not_held);
    assert_eq!(call(take(EXCLUSIVE), 0), [done(0, Err(Failure::AlreadyHeld))]);
    // Another thread of the node does not have it.
    assert_eq!(call(give(SHARED), 1), [done(1, Err(Failure::NotHeld))]);
    let barrier = |count| Call::Barrier {
        object,
        parties: parties(count),
    };
    assert_eq!(call(barrier(2), 0), []);
    assert_eq!(call(barrier(3), 1), [done(1, Err(Failure::Mismatch))]);
    let reduce = Call::Reduce {
        object,
        parties: parties(2),
        operation: Operation::MaxI64,
        value: 0,
    };
    assert_eq!(call(reduce, 1), [done(1, Err(Failure::Mismatch))]);
}

#[test]
fn barrier__is_for_the_nodes_that_came_first() {
    let mut home = Others::new();
    let arrival = Body::Gather {
        operation: None,
        parties: parties(1),
        value: 0,
    };
    assert_eq!(home.answers(1, 0, 0, arrival), [(1, 0, Body::Done(0))]);
    let mismatch = Body::Refused(Refusal::Mismatch);
    assert_eq!(home.answers(2, 0, 0, arrival), [(2, 0, mismatch)]);
    assert_eq!(home.answers(1, 1, 0, arrival), [(1, 1, Body::Done(0))]);
}

#[test]
fn handle_message__of_a_newer_epoch_changes_nothing_until_that_has_begun() {
    let mut node = node();
    let before = node.clone();
    let ask = Message {
        epoch: 1,
        ..message(0, 0, Body::Lock(EXCLUSIVE))
    };
    assert_eq!(node.handle_message(id(1), &ask), Err(Ahead { epoch: 1 }));
    assert_eq!(node, before);
    node.handle_gone(1, &[id(2)]);
    assert_eq!(node.handle_message(id(1), &ask), Ok(()));
    assert!(matches!(actions(&mut node)[..], [Action::Send { .. }]));
}

#[test]
fn handle_message__that_no_correct_node_sends_is_an_accusation() {
    let mut home = Others::new();
    let arrival = Body::Gather {
        operation: None,
        parties: parties(3),
        value: 0,
    };
    home.take(1, 0, 0, Body::Lock(EXCLUSIVE));
    home.take(1, 1, 0, Body::Lock(EXCLUSIVE));
    home.take(1, 2, 0, arrival);
    home.take(1, 3, 0, Body::Wait);
    let unexpected = Violation::Unexpected;
    for (thread, object, body, violation) in [
        // It is a thread's second request, or it has the lock already.
        (0, 0, Body::Lock(SHARED), unexpected),
        (1, 0, Body::Lock(SHARED), unexpected),
        (2, 0, Body::FetchAdd(1), unexpected),
        (3, 3, Body::Wait, unexpected),
        // It does not have the lock, or in another mode.
        (0, 3, Body::Unlock(EXCLUSIVE), unexpected),
        (0, 0, Body::Unlock(SHARED), unexpected),
        (3, 0, Body::Unlock(EXCLUSIVE), unexpected),
        (THREADS_MAX, 0, Body::FetchAdd(1), Violation::NoSuchThread),
        (u16::MAX, 0, Body::Done(0), Violation::NotHome),
        (0, 1, Body::FetchAdd(1), Violation::NotHome),
        (0, 2, Body::Done(0), Violation::NotHome),
        // No thread waits.
        (0, 1, Body::Done(0), unexpected),
        (u16::MAX, 1, Body::Queued, unexpected),
        (0, 1, Body::Refused(Refusal::Gone(id(2))), Violation::WrongNode),
        (0, 1, Body::Woken { gone: Some(id(9)) }, Violation::WrongNode),
    ] {
        let before = home.node.clone();
        home.violates(1, thread, object, body, violation);
        let mut after = before;
        let sequence = home.numbers[1] - 1;
        // A message about another region is no more than its number.
        let other = Message {
            region: 8,
            ..message(sequence, 0, body)
        };
        after.handle_message(id(1), &other).unwrap();
        let (node, violation) = (id(1), Violation::WrongRegion);
        assert_eq!(actions(&mut after), [Action::Accuse { node, violation }]);
        assert_eq!(home.node, after, "{body:?}");
    }
    // The calls from before go on.
    assert_eq!(
        home.answers(1, 0, 0, Body::Unlock(EXCLUSIVE)),
        [(1, 0, Body::Done(0)), (1, 1, GRANTED)]
    );
}

#[test]
fn home__refuses_objects_above_the_budget_of_a_node() {
    let mut home = Others::new();
    let refused = Body::Refused(Refusal::NoRoom);
    for object in 0..BUDGET.into() {
        let object = object * 3;
        let value = home.answers(1, 0, object, Body::FetchAdd(1));
        assert_eq!(value, [(1, 0, Body::Done(0))]);
    }
    let next = u64::from(BUDGET) * 3;
    assert_eq!(home.answers(1, 0, next, Body::FetchAdd(1)), [(1, 0, refused)]);
    assert_eq!(home.answers(1, 0, next, Body::Lock(SHARED)), [(1, 0, refused)]);
    // Words that are there, and other nodes' objects, are as before.
    assert_eq!(home.answers(1, 0, 3, Body::FetchAdd(1)), [(1, 0, Body::Done(1))]);
    assert_eq!(
        home.answers(2, 0, next, Body::FetchAdd(1)),
        [(2, 0, Body::Done(0))]
    );
    // A word of 0 gives its room back.
    let (expected, new) = (1, 0);
    let swap = Body::CompareSwap { expected, new };
    assert_eq!(home.answers(2, 0, 0, swap), [(2, 0, Body::Done(1))]);
    assert_eq!(home.answers(1, 0, next, Body::Lock(SHARED)), [(1, 0, GRANTED)]);
}

#[test]
fn reduction__takes_the_values_in_the_order_of_nodes_and_threads() {
    let values = [((1, 0), 1e16), ((1, 1), 1.0), ((2, 0), -1e16)];
    for first in 0..3 {
        let mut home = Others::new();
        let mut answers = vec![];
        for ((from, thread), value) in values.iter().cycle().skip(first).take(3) {
            let arrival = Body::Gather {
                operation: Some(Operation::SumF64),
                parties: parties(3),
                value: f64::to_bits(*value),
            };
            answers = home.answers(*from, *thread, 0, arrival);
        }
        let sum = Body::Done(((1e16 + 1.0) - 1e16_f64).to_bits());
        assert_eq!(answers, [(1, 0, sum), (1, 1, sum), (2, 0, sum)]);
    }
}

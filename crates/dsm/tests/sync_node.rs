//! Answers of one node's synchronisation to single events.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::num::NonZeroU32;

use rdmux_dsm::protocol::Homes;
use rdmux_dsm::sync::{
    Action, Ahead, Body, Call, Failure, Message, Mode, Node, NodeId, Operation, Outcome, Success,
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

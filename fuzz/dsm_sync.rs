//! Messages of two nodes for the synchronisation of a third, as a fuzz target.
//!
//! Two programs share this file, as they do `targets.rs`: `fuzz_targets/dsm_sync.rs`, and `crates/dsm/tests/fuzz.rs`.

use std::num::NonZeroU32;

use rdmux_dsm::protocol::Homes;
use rdmux_dsm::sync::{Action, Call, Message, Mode, Node, NodeId, Operation, THREADS_MAX};

/// `rdmux_wire::dsm::MESSAGE_LEN`.
const MESSAGE_LEN: usize = 48;
const REGION: u32 = 7;
const OBJECTS: u64 = 4;
const THREADS: usize = 3;

/// Events of a byte and a message each: the node takes the message, or one of its threads makes a call, or a node leaves. Each call ends once, and
/// there is one way to write a message, so emitting gives back the input.
///
/// The byte: 0 to 2 of its low bits are the kind of event, 4 to 6 a thread or the node that leaves, 7 that the message is taken as it is. Otherwise
/// its number, its thread and its object are changed to some that the node knows.
pub(crate) fn dsm_sync(input: &[u8]) {
    let ids = [0, 1, 2].map(|it| NodeId::new(it).unwrap());
    let homes = Homes::cyclic(ids, 1).unwrap();
    let mut node = Node::new(ids[0], REGION, 0, &ids, homes);
    let mut waits = [false; THREADS];
    let mut sent = [0; 3];
    let mut epoch = 0;
    let (events, _) = input.as_chunks::<{ 1 + MESSAGE_LEN }>();
    for [event, bytes @ ..] in events {
        let choice = usize::from(event >> 4 & 7);
        match event & 15 {
            0..8 => {
                let Ok(mut message) = Message::parse(bytes) else {
                    continue;
                };
                let mut emitted = [0xee; MESSAGE_LEN];
                message.emit(&mut emitted);
                assert_eq!(emitted, *bytes);
                let from = 1 + usize::from(event & 1);
                if event >> 7 == 0 {
                    message.region = REGION;
                    message.epoch = message.epoch.min(epoch);
                    message.sequence = sent[from];
                    message.thread %= THREADS as u16 + 1;
                    message.object %= OBJECTS;
                    sent[from] += 1;
                }
                let _ = node.handle_message(ids[from], &message);
            }
            8..15 => {
                let thread = choice % THREADS;
                if !waits[thread] {
                    waits[thread] = true;
                    node.handle_call(call(bytes), thread as u64);
                }
            }
            _ => {
                epoch += 1;
                node.handle_gone(epoch, &ids[choice % 3..][..1]);
            }
        }
        while let Some(action) = node.poll_action() {
            match action {
                Action::Done { ticket, .. } => {
                    assert!(waits[ticket as usize], "a call has ended twice");
                    waits[ticket as usize] = false;
                }
                Action::Send { to, message } => {
                    assert!(node.is_member(to) && message.thread < THREADS_MAX);
                    let mut emitted = [0xee; MESSAGE_LEN];
                    message.emit(&mut emitted);
                    assert_eq!(Message::parse(&emitted), Ok(message));
                }
                Action::Accuse { node, .. } => assert_ne!(node, ids[0], "this node keeps to the protocol"),
            }
        }
        for (thread, waits) in waits.iter().enumerate() {
            assert_eq!(node.is_waiting(thread as u64), *waits);
        }
    }
    node.handle_gone(u64::MAX, &ids);
    while let Some(action) = node.poll_action() {
        if let Action::Done { ticket, .. } = action {
            waits[ticket as usize] = false;
        }
    }
    assert_eq!(waits, [false; THREADS], "each call ends");
}

fn call(bytes: &[u8; MESSAGE_LEN]) -> Call {
    let [kind, code, object, other, value, ..] = *bytes;
    let (object, other) = (u64::from(object) % OBJECTS, u64::from(other) % OBJECTS);
    let parties = NonZeroU32::new(1 + u32::from(code & 3)).unwrap();
    let mode = [Mode::Shared, Mode::Exclusive][usize::from(code & 1)];
    let value = u64::from(value);
    match kind % 11 {
        0 => Call::Barrier { object, parties },
        1 => Call::Reduce {
            object,
            parties,
            operation: [Operation::MinF64, Operation::SumI64][usize::from(code >> 4 & 1)],
            value,
        },
        2 | 3 => Call::Lock { object, mode },
        4 => Call::Unlock { object, mode },
        5 => Call::Wait {
            condition: object,
            lock: other,
        },
        6 => Call::Signal { condition: object },
        7 => Call::Broadcast { condition: object },
        8 => Call::FetchAdd { object, value },
        9 => Call::CompareSwap {
            object,
            expected: other,
            new: value,
        },
        _ => Call::Load { object },
    }
}

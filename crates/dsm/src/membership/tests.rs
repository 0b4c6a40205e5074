//! Random runs: connections fail, nodes die, and all that is left agrees.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use super::*;

#[derive(Clone, Debug)]
enum Sent {
    Membership(Message),
    /// Any other message, with the nodes that have left as its sender knew when it sent it.
    Other(Vec<NodeId>),
}

/// One way of a connection.
#[derive(Clone, Debug, Default)]
struct Way {
    messages: VecDeque<Sent>,
    /// Other messages of epochs of which the receiver has not heard.
    held: Vec<Vec<NodeId>>,
    /// The sender has ended the connection: the receiver learns it after the messages before, or without them.
    is_ended: bool,
    /// The receiver has ended it.
    is_deaf: bool,
}

struct World {
    nodes: BTreeMap<NodeId, Membership>,
    ways: BTreeMap<(NodeId, NodeId), Way>,
    /// Nodes that have left, as each node knows.
    applied: BTreeMap<NodeId, Vec<NodeId>>,
    dice: ChaCha8Rng,
}

fn id(number: u32) -> NodeId {
    NodeId::new(number).unwrap()
}

impl World {
    fn new(nodes: u32, seed: u64) -> World {
        let all = || (0..nodes).map(id);
        let pairs = all().flat_map(|a| all().map(move |b| (a, b)));
        World {
            nodes: all().map(|node| (node, Membership::new(node, all()))).collect(),
            ways: pairs
                .filter(|(a, b)| a != b)
                .map(|pair| (pair, Way::default()))
                .collect(),
            applied: all().map(|node| (node, Vec::new())).collect(),
            dice: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    fn below(&mut self, end: usize) -> usize {
        self.dice.next_u32() as usize % end
    }

    fn act(&mut self, node: NodeId) {
        while let Some(action) = self.nodes.get_mut(&node).and_then(Membership::poll_action) {
            match action {
                Action::Send { to, message } => {
                    let way = self.ways.get_mut(&(node, to)).unwrap();
                    if !way.is_ended {
                        way.messages.push_back(Sent::Membership(message));
                    }
                }
                Action::Drop(other) => self.cut(node, other),
                Action::Present(_) => panic!("nobody has asked"),
                Action::Gone { epoch, node: left } => {
                    let applied = self.applied.get_mut(&node).unwrap();
                    assert!(!applied.contains(&left), "{left:?} leaves {node:?} twice");
                    applied.push(left);
                    assert_eq!(epoch, applied.len() as u64);
                    assert!(left == node || self.ways[&(left, node)].is_deaf);
                    self.take_held(node);
                }
            }
        }
    }

    /// A node ends its connection to another one.
    fn cut(&mut self, node: NodeId, other: NodeId) {
        self.ways.get_mut(&(node, other)).unwrap().is_ended = true;
        let way = self.ways.get_mut(&(other, node)).unwrap();
        way.is_deaf = true;
        way.messages.clear();
        way.held.clear();
    }

    /// A node sends any other message.
    fn talk(&mut self, node: NodeId, to: NodeId) {
        let known = self.applied[&node].clone();
        let way = self.ways.get_mut(&(node, to)).unwrap();
        if !way.is_ended {
            way.messages.push_back(Sent::Other(known));
        }
    }

    /// A node takes messages that it can take now. Whoever is heard knows of no one's leaving of which the hearer does not know.
    fn take_held(&mut self, node: NodeId) {
        let applied = &self.applied[&node];
        for ((from, to), way) in &mut self.ways {
            if *to == node {
                let now = way.held.extract_if(.., |known| known.len() <= applied.len());
                now.for_each(|known| assert!(applied.starts_with(&known), "{from:?} {to:?} {known:?}"));
            }
        }
    }

    /// Delivers one message or the end of a connection. Returns false if there is none.
    fn step(&mut self) -> bool {
        let can_move = |(pair, way): (&(NodeId, NodeId), &Way)| {
            let is_heard = self.nodes.contains_key(&pair.1) && !way.is_deaf;
            (is_heard && (!way.messages.is_empty() || way.is_ended)).then_some(*pair)
        };
        let ready: Vec<_> = self.ways.iter().filter_map(can_move).collect();
        if ready.is_empty() {
            return false;
        }
        let at = self.below(ready.len());
        let (from, to) = ready[at];
        let loses = self.below(2) == 0;
        let way = self.ways.get_mut(&(from, to)).unwrap();
        if way.is_ended && loses {
            way.messages.clear();
        }
        let message = way.messages.pop_front();
        let node = self.nodes.get_mut(&to).unwrap();
        match message {
            Some(Sent::Other(known)) => {
                way.held.push(known);
                self.take_held(to);
            }
            Some(Sent::Membership(message)) => {
                assert!(node.handle_message(from, message), "{from:?} {to:?} {message:?}")
            }
            None => node.handle_failed(from),
        }
        self.act(to);
        true
    }

    fn kill(&mut self, node: NodeId) {
        self.nodes.remove(&node);
        let others: Vec<NodeId> = self.applied.keys().copied().filter(|it| *it != node).collect();
        others.into_iter().for_each(|other| self.cut(node, other));
    }

    /// Checks the nodes that live when nothing more happens.
    fn check(&self) {
        for (a, of_a) in &self.nodes {
            let members: BTreeSet<NodeId> = of_a.members().collect();
            assert!(
                members.iter().all(|it| self.nodes.contains_key(it)),
                "{a:?} waits for the dead"
            );
            assert!(of_a.asked.is_none() && of_a.failed.is_empty(), "{a:?} {of_a:?}");
            for b in &members {
                let of_b = &self.nodes[b];
                assert_eq!(of_b.members, of_a.members, "{a:?} {b:?}");
                assert_eq!(of_b.gone, of_a.gone, "{a:?} {b:?}");
            }
        }
    }
}

fn run(nodes: u32, seed: u64, kills: usize, cuts: usize) -> World {
    println!("{nodes} nodes, seed {seed}, {kills} kills, {cuts} cuts");
    let mut world = World::new(nodes, seed);
    let mut mishaps: Vec<bool> = [vec![true; kills], vec![false; cuts]].concat();
    loop {
        let nodes: Vec<NodeId> = world.nodes.keys().copied().collect();
        let first = nodes[world.below(nodes.len())];
        let second = nodes[world.below(nodes.len())];
        let is_due = !mishaps.is_empty() && world.below(6) == 0;
        if first != second && !mishaps.is_empty() {
            world.talk(first, second);
        }
        if is_due {
            let at = world.below(mishaps.len());
            let is_kill = mishaps.swap_remove(at);
            if is_kill && nodes.len() > 1 {
                world.kill(first);
            } else if first != second {
                world.nodes.get_mut(&first).unwrap().handle_failed(second);
                world.act(first);
            }
        } else if !world.step() && mishaps.is_empty() {
            world.check();
            return world;
        }
    }
}

#[test]
fn membership__of_nodes_that_die_is_the_living_ones() {
    for seed in 0..3000 {
        let nodes = 2 + (seed % 5) as u32;
        let kills = 1 + (seed / 5 % u64::from(nodes - 1)) as usize;
        let world = run(nodes, seed, kills, 0);
        for node in world.nodes.values() {
            assert_eq!(node.members.len(), world.nodes.len());
        }
    }
}

#[test]
fn membership__of_nodes_whose_connections_fail_too_is_one_of_several_groups() {
    for seed in 0..3000 {
        run(
            2 + (seed % 5) as u32,
            seed,
            (seed / 5 % 2) as usize,
            1 + (seed / 10 % 3) as usize,
        );
    }
}

#[test]
fn handle_message__a_question_is_answered() {
    let mut node = Membership::new(id(0), [id(1)]);
    assert!(node.handle_message(id(1), Message::Probe));
    let (to, message) = (id(1), Message::Present);
    assert_eq!(node.poll_action(), Some(Action::Send { to, message }));
    assert!(node.handle_message(id(1), Message::Present));
    assert_eq!(node.poll_action(), Some(Action::Present(id(1))));
    assert_eq!(node.poll_action(), None);
}

#[test]
fn waits_for__names_who_has_to_expel_or_to_consent() {
    let mut node = Membership::new(id(1), [id(0), id(2), id(3)]);
    let waits_for = |node: &Membership| -> Vec<NodeId> { node.waits_for().collect() };
    assert_eq!(waits_for(&node), []);
    node.handle_failed(id(3));
    assert_eq!(waits_for(&node), [id(0)]);
    node.handle_failed(id(0));
    assert_eq!(waits_for(&node), [id(2)]);
    assert!(node.handle_message(id(2), Message::Consent { epoch: 0 }));
    assert_eq!(waits_for(&node), []);
}

#[test]
fn handle_message__of_wrong_epochs_and_nodes_is_refused() {
    let mut second = Membership::new(id(1), [id(0), id(2)]);
    let wrong = [
        (
            2,
            Message::Expel {
                epoch: 1,
                node: id(0),
            },
        ),
        (
            0,
            Message::Expel {
                epoch: 2,
                node: id(2),
            },
        ),
        (
            0,
            Message::Expel {
                epoch: 0,
                node: id(2),
            },
        ),
        (
            0,
            Message::Expel {
                epoch: 1,
                node: id(9),
            },
        ),
        (2, Message::Takeover { epoch: 0 }),
        (2, Message::Consent { epoch: 0 }),
    ];
    for (from, message) in wrong {
        assert!(!second.handle_message(id(from), message), "{message:?}");
    }
    assert!(second.handle_message(
        id(0),
        Message::Expel {
            epoch: 1,
            node: id(2)
        }
    ));
}

fn message(kind: u32, node: NodeId, epoch: u64) -> Message {
    match kind {
        0 => Message::Suspect(node),
        1 => Message::Expel { epoch, node },
        2 => Message::Takeover { epoch },
        3 => Message::Consent { epoch },
        4 => Message::Probe,
        _ => Message::Present,
    }
}

/// Takes the actions of an event: messages go to connected nodes, a connection ends once and before its node leaves, and epochs are in order.
fn check_actions(node: &mut Membership, connected: &mut BTreeSet<NodeId>, gone: &mut Vec<NodeId>) {
    while let Some(action) = node.poll_action() {
        match action {
            Action::Send { to, message } => {
                assert!(connected.contains(&to), "{message:?} to {to:?}");
                assert_eq!(Message::parse(&message.emit()), Ok(message));
            }
            Action::Drop(other) => assert!(connected.remove(&other), "{other:?}"),
            Action::Present(other) => assert!(connected.contains(&other), "{other:?}"),
            Action::Gone { epoch, node: other } => {
                assert!(!connected.contains(&other) && !gone.contains(&other));
                gone.push(other);
                assert_eq!(epoch, gone.len() as u64);
            }
        }
    }
    assert_eq!(node.epoch(), gone.len() as u64);
}

/// The other nodes send any messages. When all connections to them have failed, the node is alone, or it has left.
#[test]
fn handle_message__of_any_content_and_order_leaves_the_node_in_order() {
    const NODES: u32 = 5;
    for seed in 0..3000 {
        println!("seed {seed}");
        let dice = &mut ChaCha8Rng::seed_from_u64(seed);
        let mut below = |end: u32| dice.next_u32() % end;
        let own = id(below(NODES));
        let others = (0..NODES).map(id).filter(|it| *it != own);
        let mut node = Membership::new(own, others.clone());
        let (mut connected, mut gone) = (others.clone().collect(), vec![]);
        for _ in 0..below(60) {
            // The last one never was a member.
            let (from, of) = (id(below(NODES)), id(below(NODES + 1)));
            let epoch = match below(8) {
                0 => u64::MAX,
                _ => (node.epoch() + u64::from(below(3))).saturating_sub(1),
            };
            let kind = below(7);
            if kind == 6 {
                node.handle_failed(of);
            } else if from != own && !node.handle_message(from, message(kind, of, epoch)) {
                node.handle_failed(from);
            }
            check_actions(&mut node, &mut connected, &mut gone);
        }
        for other in others {
            node.handle_failed(other);
            check_actions(&mut node, &mut connected, &mut gone);
        }
        assert_eq!(node.waits_for().next(), None);
        assert!(node.members().all(|it| it == own));
    }
}

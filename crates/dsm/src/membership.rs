//! Agreement of the nodes on who has left, as a state machine without I/O or clock.
//!
//! The driver tells [`Membership`] which of this node's connections have failed, and passes the messages ([`rdmux_wire::dsm::membership`]); it
//! learns which connections to end ([`Action::Drop`]), and who has left by which epoch ([`Action::Gone`]). A connection delivers messages in their
//! order until it fails, at both ends in the end.
//!
//! # Protocol
//!
//! The *coordinator* is the member of the lowest number. A member whose connection to another one fails tells it, and it expels that one, with an
//! epoch of its own for each. If all members below a member have failed for it, that one asks all others to consent to its taking over. Who consents
//! ends its connections to all below the new coordinator, and says how many epochs it knows of; of those of which only it knows it tells first. Who
//! follows another coordinator already has ended the connection to the one that asks, which counts as failed then. When all have answered, the
//! new coordinator has all end their connections to those that have failed, and expels these: the highest first.
//!
//! # What holds
//!
//! Members of a node, of which it is a member, too, have the same epochs, as far as both know them. If the network falls apart, the nodes that
//! can reach each other may end in several groups that go on without one another. No node of a group takes a message of another group that was sent
//! after the group had expelled anybody: whoever consents ends the connections to the old coordinator before the new one decides; and those that
//! followed the old one are expelled before it is, since the highest go first. All connections to those that are expelled end before an epoch begins. So what a group gives on of an expelled node's, a lock or a page, is
//! never seen by nodes that still count it as a member.

use std::collections::{BTreeSet, VecDeque};

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::membership::Membership as Message;

/// A task of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    /// Send a message.
    Send {
        /// The receiver.
        to: NodeId,
        /// The message.
        message: Message,
    },
    /// End the connection to a node: no message comes from it any more, and it cannot read this node's memory.
    Drop(NodeId),
    /// A node takes messages: it has answered a question of the driver's.
    Present(NodeId),
    /// A node, maybe this one, has left with an epoch. Its connection has ended before.
    Gone {
        /// The epoch.
        epoch: u64,
        /// The node.
        node: NodeId,
    },
}

/// One node's view of the membership.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Membership {
    own: NodeId,
    members: BTreeSet<NodeId>,
    /// Members whose connection to this node has ended.
    failed: BTreeSet<NodeId>,
    /// Nodes that have left, in the order of the epochs that began with that.
    gone: Vec<NodeId>,
    /// Members that have to consent before this node is the coordinator, unless it is.
    asked: Option<BTreeSet<NodeId>>,
    actions: VecDeque<Action>,
}

impl Membership {
    pub(crate) fn new(own: NodeId, members: impl IntoIterator<Item = NodeId>) -> Membership {
        Membership {
            own,
            members: members.into_iter().chain([own]).collect(),
            failed: BTreeSet::new(),
            gone: Vec::new(),
            asked: None,
            actions: VecDeque::new(),
        }
    }

    /// Returns the last epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.gone.len() as u64
    }

    /// Returns the members.
    pub(crate) fn members(&self) -> impl Iterator<Item = NodeId> {
        self.members.iter().copied()
    }

    /// Returns the nodes for which this one waits: to consent to its taking over, or to expel those whose connections have failed. A node that
    /// stays among them longer than the driver allows for is to be treated as one whose connection has failed.
    pub(crate) fn waits_for(&self) -> impl Iterator<Item = NodeId> {
        let asked = self.asked.iter().flatten().copied();
        let is_telling = self.asked.is_none() && !self.failed.is_empty();
        let coordinator = self.lowest().filter(|it| is_telling && *it != self.own);
        asked.chain(coordinator)
    }

    /// Returns the next task of the driver.
    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Takes the news that the connection to a node has failed, or that the node does not keep to a protocol.
    pub(crate) fn handle_failed(&mut self, node: NodeId) {
        if node == self.own || !self.members.contains(&node) || !self.failed.insert(node) {
            return;
        }
        self.actions.push_back(Action::Drop(node));
        if let Some(asked) = &mut self.asked {
            asked.remove(&node);
        } else if let Some(lowest) = self.lowest()
            && lowest != self.own
        {
            self.send(lowest, Message::Suspect(node));
        }
        self.settle();
    }

    /// Takes a message of a node. Returns false if no correct node sends it.
    #[must_use]
    pub(crate) fn handle_message(&mut self, from: NodeId, message: Message) -> bool {
        if !self.members.contains(&from) || self.failed.contains(&from) {
            return true;
        }
        match message {
            Message::Suspect(node) => self.suspected(from, node),
            Message::Expel { epoch, node } => return self.expelled(from, epoch, node),
            Message::Takeover { epoch } => return self.taken_over(from, epoch),
            Message::Consent { epoch } => return self.consented(from, epoch),
            Message::Probe => self.send(from, Message::Present),
            Message::Present => self.actions.push_back(Action::Present(from)),
        }
        true
    }

    /// Returns the lowest member whose connection has not failed: this node if it is alone.
    fn lowest(&self) -> Option<NodeId> {
        self.members.difference(&self.failed).next().copied()
    }

    fn is_coordinator(&self) -> bool {
        self.members.first() == Some(&self.own)
    }

    fn send(&mut self, to: NodeId, message: Message) {
        self.actions.push_back(Action::Send { to, message });
    }

    /// Members with a connection.
    fn others(&self) -> Vec<NodeId> {
        let connected = self.members.difference(&self.failed);
        connected.copied().filter(|it| *it != self.own).collect()
    }

    fn suspected(&mut self, from: NodeId, node: NodeId) {
        // Of the two one has to leave. If this node is suspected, the other has ended no connection to it, or will say so itself.
        if node != self.own && node != from {
            self.handle_failed(node);
        }
    }

    /// Asks to take over, or expels those that have failed, if it is this node's turn.
    fn settle(&mut self) {
        if self.lowest() != Some(self.own) {
            return;
        }
        if !self.is_coordinator() && self.asked.is_none() {
            let others = self.others();
            let epoch = self.epoch();
            for to in &others {
                self.send(*to, Message::Takeover { epoch });
            }
            self.asked = Some(others.into_iter().collect());
        }
        if self.asked.as_ref().is_some_and(|asked| !asked.is_empty()) {
            return;
        }
        self.asked = None;
        // All connections to them end first: the epochs of another group have the same numbers.
        for node in self.failed.clone() {
            for to in self.others() {
                self.send(to, Message::Suspect(node));
            }
        }
        while let Some(node) = self.failed.pop_last() {
            let epoch = self.leave(node);
            for to in self.others() {
                self.send(to, Message::Expel { epoch, node });
            }
        }
    }

    /// Ends a node's membership. Returns the epoch that begins.
    fn leave(&mut self, node: NodeId) -> u64 {
        self.members.remove(&node);
        self.failed.remove(&node);
        self.gone.push(node);
        let epoch = self.epoch();
        self.actions.push_back(Action::Gone { epoch, node });
        epoch
    }

    fn expelled(&mut self, from: NodeId, epoch: u64, node: NodeId) -> bool {
        let is_known = self.gone.get((epoch as usize).wrapping_sub(1)) == Some(&node);
        if is_known {
            return true;
        }
        let may_tell =
            self.lowest() == Some(from) || self.asked.as_ref().is_some_and(|asked| asked.contains(&from));
        if !may_tell || epoch != self.epoch() + 1 || !self.members.contains(&node) || node == from {
            return false;
        }
        if node != self.own && self.failed.insert(node) {
            self.actions.push_back(Action::Drop(node));
        }
        self.leave(node);
        if node == self.own {
            // Alone, it has nobody to agree with.
            self.members.clear();
            self.failed.clear();
            self.asked = None;
        } else if let Some(mut asked) = self.asked.take() {
            asked.remove(&node);
            // Those that have consented may not know of it.
            for to in self.others().into_iter().filter(|to| !asked.contains(to)) {
                self.send(to, Message::Expel { epoch, node });
            }
            self.asked = Some(asked);
            self.settle();
        }
        true
    }

    fn taken_over(&mut self, from: NodeId, epoch: u64) -> bool {
        if from < self.own {
            for node in self.members.range(..from).copied().collect::<Vec<_>>() {
                if self.failed.insert(node) {
                    self.actions.push_back(Action::Drop(node));
                }
            }
        } else {
            // It cannot have lost this node, which it asks.
            return false;
        }
        for (index, node) in self.gone.clone().into_iter().enumerate().skip(epoch as usize) {
            let epoch = index as u64 + 1;
            self.send(from, Message::Expel { epoch, node });
        }
        let epoch = self.epoch();
        self.send(from, Message::Consent { epoch });
        // A coordinator that was told of these before may be lost with that.
        for node in self
            .failed
            .iter()
            .copied()
            .filter(|it| *it > from)
            .collect::<Vec<_>>()
        {
            self.send(from, Message::Suspect(node));
        }
        true
    }

    fn consented(&mut self, from: NodeId, epoch: u64) -> bool {
        let Some(asked) = &mut self.asked else {
            return false;
        };
        if !asked.remove(&from) || epoch > self.gone.len() as u64 {
            return false;
        }
        for (index, node) in self.gone.clone().into_iter().enumerate().skip(epoch as usize) {
            let epoch = index as u64 + 1;
            self.send(from, Message::Expel { epoch, node });
        }
        self.settle();
        true
    }
}

#[cfg(test)]
mod tests;

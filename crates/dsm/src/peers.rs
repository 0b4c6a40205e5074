//! The membership as this node knows it, and which messages of the others are handled when.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rdmux_wire::dsm::NodeId;

/// A message cannot be taken yet: its sender knows of an epoch of which this node has not heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("a message of epoch {epoch}, of which this node has not heard")]
pub struct Ahead {
    /// The epoch.
    pub epoch: u64,
}

/// The other members.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Peers {
    own: NodeId,
    epoch: u64,
    is_expelled: bool,
    /// Nodes that have left, in this order, and the epochs with which this node heard of that.
    departed: Vec<(u64, NodeId)>,
    members: BTreeMap<NodeId, Peer>,
    /// All that were members when the region began, this node included.
    first: Arc<BTreeSet<NodeId>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Peer {
    /// Messages sent to it.
    sent: u64,
    received: Received,
}

/// Numbers of the messages received from a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Received {
    /// One more than the highest number.
    end: u64,
    /// Bit n is set if the message `end - 1 - n` has come.
    last: u64,
}

impl Peers {
    pub(crate) fn new(own: NodeId, epoch: u64, members: &[NodeId]) -> Peers {
        let others = members.iter().filter(|it| **it != own);
        Peers {
            own,
            epoch,
            is_expelled: false,
            departed: Vec::new(),
            members: others.map(|it| (*it, Peer::default())).collect(),
            first: Arc::new(members.iter().copied().chain([own]).collect()),
        }
    }

    pub(crate) fn own(&self) -> NodeId {
        self.own
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns whether a node, this one included, is a member.
    pub(crate) fn is_member(&self, node: NodeId) -> bool {
        match node == self.own {
            true => !self.is_expelled,
            false => self.members.contains_key(&node),
        }
    }

    /// Returns whether a node, this one included, is or was a member.
    pub(crate) fn was_member(&self, node: NodeId) -> bool {
        self.first.contains(&node)
    }

    /// Returns the nodes that have left, in this order, and the epochs with which this node heard of that.
    pub(crate) fn departed(&self) -> &[(u64, NodeId)] {
        &self.departed
    }

    /// Returns the number of the next message to another member.
    pub(crate) fn number(&mut self, to: NodeId) -> Option<u64> {
        let peer = self.members.get_mut(&to)?;
        peer.sent += 1;
        Some(peer.sent - 1)
    }

    /// Takes note of a message by its epoch and its number, and returns whether it is to be handled. Messages of a node that is gone and duplicates
    /// are not.
    pub(crate) fn arrived(&mut self, from: NodeId, epoch: u64, sequence: u64) -> Result<bool, Ahead> {
        let Some(peer) = self.members.get_mut(&from) else {
            return Ok(mutant!(GoneHeard) && from != self.own && !self.is_expelled);
        };
        if epoch > self.epoch && !mutant!(NewerNotHeld) {
            return Err(Ahead { epoch });
        }
        Ok(peer.received.is_new(sequence) || mutant!(DuplicateTaken))
    }

    /// Ends the membership of nodes with a new epoch.
    pub(crate) fn remove(&mut self, epoch: u64, gone: &[NodeId]) {
        self.epoch = epoch;
        self.departed.extend(gone.iter().map(|node| (epoch, *node)));
        self.members.retain(|node, _| !gone.contains(node));
        if gone.contains(&self.own) {
            self.is_expelled = true;
            self.members.clear();
        }
    }
}

impl Received {
    /// Notes a number, and returns whether it is new. One that 64 later ones have overtaken counts as old.
    fn is_new(&mut self, number: u64) -> bool {
        if number >= self.end {
            let Some(end) = number.checked_add(1) else {
                return false;
            };
            let ahead = u32::try_from(end - self.end).unwrap_or(u32::MAX);
            self.last = self.last.checked_shl(ahead).unwrap_or(0) | 1;
            self.end = end;
            return true;
        }
        let behind = self.end - 1 - number;
        let is_new = behind < 64 && self.last & (1 << behind) == 0;
        if is_new {
            self.last |= 1 << behind;
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn received__takes_each_number_once() {
        let mut received = Received::default();
        let order = [0, 2, 1, 70, 7, 8, 7, 6, 2, 70, 69, u64::MAX, 71, 70];
        let new: Vec<u64> = order.into_iter().filter(|it| received.is_new(*it)).collect();
        assert_eq!(new, [0, 2, 1, 70, 7, 8, 69, 71]);
    }
}

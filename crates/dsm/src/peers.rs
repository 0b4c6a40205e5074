//! The membership as this node knows it, and which messages of the others are handled when.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rdmux_wire::dsm::NodeId;

/// A message cannot be taken yet: its sender knows of an epoch of which this node has not heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("a message of epoch {epoch}, of which this node has not heard")]
pub struct Ahead {
    /// The epoch.
    pub epoch: u64,
}

/// A node's position among the first members of the region, in the order of their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place(pub(crate) u32);

/// The nodes of the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peers {
    own: Place,
    epoch: u64,
    /// Nodes that have left, in this order, and the epochs with which this node heard of that.
    departed: Vec<(u64, NodeId)>,
    /// By place.
    peers: Vec<Peer>,
    /// All that were members when the region began, this node included, in the order of their numbers.
    first: Arc<[NodeId]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Peer {
    is_member: bool,
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

/// Leaves out the parts that never change.
impl Hash for Peers {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.epoch.hash(state);
        self.departed.hash(state);
        self.peers.hash(state);
    }
}

fn place(nodes: &[NodeId], node: NodeId) -> Option<Place> {
    let index = nodes.binary_search(&node).ok()?;
    u32::try_from(index).ok().map(Place)
}

impl Peers {
    pub(crate) fn new(own: NodeId, epoch: u64, members: &[NodeId]) -> Peers {
        let mut first = [members, &[own]].concat();
        first.sort_unstable();
        first.dedup();
        let peer = |_| Peer {
            is_member: true,
            sent: 0,
            received: Received::default(),
        };
        Peers {
            own: place(&first, own).expect("fewer than 2^32 nodes, this one among them"),
            epoch,
            departed: Vec::new(),
            peers: first.iter().map(peer).collect(),
            first: first.into(),
        }
    }

    /// Returns the number of this node.
    pub(crate) fn own(&self) -> NodeId {
        self.node(self.own)
    }

    /// Returns the place of this node.
    pub(crate) fn own_place(&self) -> Place {
        self.own
    }

    /// Returns the node of a place.
    pub(crate) fn node(&self, place: Place) -> NodeId {
        self.first[place.0 as usize]
    }

    /// Returns the place of a node that is or was a member.
    pub(crate) fn place(&self, node: NodeId) -> Option<Place> {
        place(&self.first, node)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns whether a node, this one included, is a member.
    pub(crate) fn is_member(&self, node: NodeId) -> bool {
        self.place(node)
            .is_some_and(|it| self.peers[it.0 as usize].is_member)
    }

    /// Returns whether a node, this one included, is or was a member.
    pub(crate) fn was_member(&self, node: NodeId) -> bool {
        self.place(node).is_some()
    }

    /// Returns the members, in the order of their numbers.
    pub(crate) fn members(&self) -> impl Iterator<Item = NodeId> {
        let peers = self.peers.iter().zip(&*self.first);
        peers.filter(|(peer, _)| peer.is_member).map(|(_, node)| *node)
    }

    /// Returns the nodes that have left, in this order, and the epochs with which this node heard of that.
    pub(crate) fn departed(&self) -> &[(u64, NodeId)] {
        &self.departed
    }

    /// Returns another member.
    fn member(&mut self, node: NodeId) -> Option<&mut Peer> {
        let place = self.place(node).filter(|it| *it != self.own)?;
        Some(&mut self.peers[place.0 as usize]).filter(|it| it.is_member)
    }

    /// Returns the number of the next message to another member.
    pub(crate) fn number(&mut self, to: NodeId) -> Option<u64> {
        let peer = self.member(to)?;
        peer.sent += 1;
        Some(peer.sent - 1)
    }

    /// Takes note of a message by its epoch and its number, and returns whether it is to be handled. Messages of a node that is gone and duplicates
    /// are not.
    pub(crate) fn arrived(&mut self, from: NodeId, epoch: u64, sequence: u64) -> Result<bool, Ahead> {
        let known = self.epoch;
        let Some(peer) = self.member(from) else {
            return Ok(mutant!(GoneHeard) && from != self.own() && self.is_member(self.own()));
        };
        if epoch > known && !mutant!(NewerNotHeld) {
            return Err(Ahead { epoch });
        }
        Ok(peer.received.is_new(sequence) || mutant!(DuplicateTaken))
    }

    /// Ends the membership of nodes with a new epoch. For this node, its own end is that of all.
    pub(crate) fn remove(&mut self, epoch: u64, gone: &[NodeId]) {
        self.epoch = epoch;
        self.departed.extend(gone.iter().map(|node| (epoch, *node)));
        let is_expelled = gone.contains(&self.own());
        for (peer, node) in self.peers.iter_mut().zip(&*self.first) {
            peer.is_member &= !is_expelled && !gone.contains(node);
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

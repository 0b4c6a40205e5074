//! Homes of the units of a region, as a program chooses them.

use rdmux_wire::dsm::NodeId;

use crate::protocol::{Homes, HomesError};

/// Homes of a region's units, the same on all nodes. A node's own units cost it no message where nobody else has them, so the home of a unit is best
/// the node that writes it most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// So many units in a row have one home, from node 0 on, those of the next row the next node, and so on.
    InTurn(u64),
    /// A hash of the unit's number chooses the home, so neighbours are spread over the nodes.
    Hash,
    /// The first node that touches a unit is its home.
    FirstTouch,
    /// Ranges of units have homes by name. Each begins at its unit and ends before the next one; the last one has all further units.
    Named(Vec<(u64, u32)>),
}

impl Placement {
    /// Gives all units to one node.
    pub fn node(node: u32) -> Placement {
        Placement::Named(vec![(0, node)])
    }

    /// Returns the homes among some nodes.
    ///
    /// # Errors
    /// A row has no units; a range has a node that is none of them; or the ranges do not ascend from unit 0 on.
    pub fn homes(&self, nodes: Vec<NodeId>) -> Result<Homes, HomesError> {
        match self {
            Placement::InTurn(row) => Homes::cyclic(nodes, *row),
            Placement::Hash => Homes::hash(nodes),
            Placement::FirstTouch => Homes::first_touch(nodes),
            Placement::Named(ranges) => {
                let named = |(first, number): &(u64, u32)| {
                    let node = nodes.iter().find(|node| node.number() == *number);
                    node.map(|node| (*first, *node))
                        .ok_or(HomesError::Stranger(*number))
                };
                Homes::explicit(ranges.iter().map(named).collect::<Result<Vec<_>, _>>()?)
            }
        }
    }

    /// Adds the placement to a checksum.
    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        match self {
            Placement::InTurn(row) => digest.add(0).add(*row),
            Placement::Hash => digest.add(1),
            Placement::FirstTouch => digest.add(2),
            Placement::Named(ranges) => ranges.iter().fold(digest.add(3), |digest, (first, node)| {
                digest.add(*first).add((*node).into())
            }),
        }
    }
}

/// Checksum of a region's settings, by which nodes notice that theirs differ. FNV-1a of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) const NEW: Digest = Digest(0xcbf2_9ce4_8422_2325);

    /// Adds a number.
    pub(crate) fn add(self, number: u64) -> Digest {
        let add = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Digest(number.to_le_bytes().into_iter().fold(self.0, add))
    }

    pub(crate) fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes() -> Vec<NodeId> {
        (0..3).filter_map(NodeId::new).collect()
    }

    fn homes(placement: &Placement, units: u64) -> Vec<u32> {
        let homes = placement.homes(nodes()).unwrap();
        (0..units).map(|unit| homes.of(unit).number()).collect()
    }

    #[test]
    fn homes__are_those_of_the_placement() {
        assert_eq!(homes(&Placement::InTurn(2), 7), [0, 0, 1, 1, 2, 2, 0]);
        assert_eq!(homes(&Placement::node(1), 3), [1; 3]);
        let named = Placement::Named(vec![(0, 2), (3, 0)]);
        assert_eq!(homes(&named, 5), [2, 2, 2, 0, 0]);
        let hashed = homes(&Placement::Hash, 300);
        for node in 0..3 {
            let count = hashed.iter().filter(|home| **home == node).count();
            assert!((80..120).contains(&count), "node {node} has {count} of 300");
        }
    }

    #[test]
    fn homes__of_no_row_or_a_node_that_is_not_there_are_refused() {
        let refused = |placement: Placement| placement.homes(nodes()).unwrap_err();
        assert_eq!(refused(Placement::InTurn(0)), HomesError::EmptyRun);
        assert_eq!(refused(Placement::node(3)), HomesError::Stranger(3));
        assert_eq!(refused(Placement::Named(vec![])), HomesError::NoNodes);
        assert_eq!(refused(Placement::Named(vec![(1, 0)])), HomesError::Uncovered(1));
        let unsorted = Placement::Named(vec![(0, 0), (4, 1), (4, 2)]);
        assert_eq!(refused(unsorted), HomesError::Unsorted(4));
    }

    #[test]
    fn digest__of_each_placement_is_its_own() {
        let all = [
            Placement::InTurn(1),
            Placement::InTurn(2),
            Placement::InTurn(3),
            Placement::Hash,
            Placement::FirstTouch,
            Placement::node(0),
            Placement::node(1),
            Placement::Named(vec![(0, 0), (1, 1)]),
            Placement::Named(vec![(0, 0), (2, 1)]),
        ];
        for (at, placement) in all.iter().enumerate() {
            for other in &all[..at] {
                let [left, right] = [placement, other].map(|it| it.digest(Digest::NEW));
                assert_ne!(left, right, "{placement:?} {other:?}");
            }
        }
    }
}

//! The nodes that decide about units.

use std::num::NonZeroU64;
use std::sync::Arc;

use rdmux_wire::dsm::NodeId;

/// Homes of the units of a region. All nodes of a region have the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Homes(Rule);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Rule {
    /// Runs of so many consecutive units go to the nodes in turn.
    Cyclic(Arc<[NodeId]>, NonZeroU64),
    /// A hash of the unit's number chooses the node.
    Hash(Arc<[NodeId]>),
    /// Ranges with their first units, sorted. A range ends before the next one.
    Explicit(Arc<[(u64, NodeId)]>),
    /// The first node that uses a unit. A hash of the unit's number chooses the node that knows it.
    FirstTouch(Arc<[NodeId]>),
}

/// Units cannot be given homes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum HomesError {
    /// There are no nodes.
    #[error("no nodes to be the homes of units")]
    NoNodes,
    /// A run has no units.
    #[error("a run of no units")]
    EmptyRun,
    /// The first range does not begin at unit 0.
    #[error("units before {0} have no home: the first range has to begin at unit 0")]
    Uncovered(u64),
    /// A range does not begin behind the one before.
    #[error("a range of units begins at {0}, which is not behind the beginning of the range before")]
    Unsorted(u64),
    /// A node is none of those that share the region.
    #[error("node {0} cannot be a home: it is none of the nodes")]
    Stranger(u32),
}

impl Homes {
    /// Gives runs of `run` consecutive units to the nodes in turn.
    ///
    /// # Errors
    /// There are no nodes, or a run has no units.
    pub fn cyclic(nodes: impl Into<Arc<[NodeId]>>, run: u64) -> Result<Homes, HomesError> {
        let run = NonZeroU64::new(run).ok_or(HomesError::EmptyRun)?;
        Ok(Homes(Rule::Cyclic(some(nodes.into())?, run)))
    }

    /// Gives each unit to the node that a hash of its number chooses.
    ///
    /// # Errors
    /// There are no nodes.
    pub fn hash(nodes: impl Into<Arc<[NodeId]>>) -> Result<Homes, HomesError> {
        Ok(Homes(Rule::Hash(some(nodes.into())?)))
    }

    /// Gives ranges of units to nodes by name. Each range begins at its unit and ends before the next one; the last one has all further units.
    ///
    /// # Errors
    /// There are no ranges, the first one does not begin at unit 0, or their beginnings do not ascend.
    pub fn explicit(ranges: impl Into<Arc<[(u64, NodeId)]>>) -> Result<Homes, HomesError> {
        let ranges = some(ranges.into())?;
        if ranges[0].0 != 0 {
            return Err(HomesError::Uncovered(ranges[0].0));
        }
        match ranges.windows(2).find(|it| it[0].0 >= it[1].0) {
            Some(pair) => Err(HomesError::Unsorted(pair[1].0)),
            None => Ok(Homes(Rule::Explicit(ranges))),
        }
    }

    /// Gives each unit to the node that uses it first. A hash of the unit's number chooses its *registrar* among `nodes`, which knows that node.
    /// The frames of all nodes have the units' first contents.
    ///
    /// # Errors
    /// There are no nodes.
    pub fn first_touch(nodes: impl Into<Arc<[NodeId]>>) -> Result<Homes, HomesError> {
        Ok(Homes(Rule::FirstTouch(some(nodes.into())?)))
    }

    /// Returns the home of a unit; its registrar if the first use makes the home.
    pub fn of(&self, unit: u64) -> NodeId {
        let (nodes, turn) = match &self.0 {
            Rule::Cyclic(nodes, run) => (nodes, unit / *run),
            // The multiplier is 2^64 divided by the golden ratio; the upper half depends on all bits.
            Rule::Hash(nodes) | Rule::FirstTouch(nodes) => {
                (nodes, unit.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32)
            }
            Rule::Explicit(ranges) => {
                let behind = ranges.partition_point(|it| it.0 <= unit);
                return ranges[behind - 1].1;
            }
        };
        nodes[(turn % nodes.len() as u64) as usize]
    }

    /// Returns whether [`Homes::of`] is the registrar.
    pub(crate) fn is_first_touch(&self) -> bool {
        matches!(self.0, Rule::FirstTouch(_))
    }
}

/// Returns the items if there are any.
fn some<T>(items: Arc<[T]>) -> Result<Arc<[T]>, HomesError> {
    match items.is_empty() {
        true => Err(HomesError::NoNodes),
        false => Ok(items),
    }
}

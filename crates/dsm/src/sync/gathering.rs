//! A barrier or reduction at its home.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::sync::{Body, Operation, Refusal};

use super::home::{Answers, Party};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Gathering {
    parties: NonZeroU32,
    /// Nodes of the parties, which are known when all have come for the first time.
    nodes: Option<BTreeSet<NodeId>>,
    /// Operation of those that have come.
    operation: Option<Operation>,
    /// Those that have come, with their values.
    arrived: Vec<(Party, u64)>,
    /// A party that has left.
    gone: Option<NodeId>,
}

impl Gathering {
    pub(super) fn new(parties: NonZeroU32) -> Gathering {
        Gathering {
            parties,
            nodes: None,
            operation: None,
            arrived: Vec::new(),
            gone: None,
        }
    }

    /// Takes a party, and answers all when it is the last one.
    pub(super) fn come(
        &mut self,
        object: u64,
        party: Party,
        (operation, parties, value): (Option<Operation>, NonZeroU32, u64),
        answers: &mut Answers<'_>,
    ) {
        if let Some(node) = self.gone {
            answers.end(party, object, Body::Refused(Refusal::Gone(node)));
            return;
        }
        let is_party = self.nodes.as_ref().is_none_or(|it| it.contains(&party.0));
        let is_alike = self.arrived.is_empty() || operation == self.operation;
        if parties != self.parties || !is_party || !is_alike {
            answers.end(party, object, Body::Refused(Refusal::Mismatch));
            return;
        }
        self.operation = operation;
        self.arrived.push((party, value));
        if self.arrived.len() + usize::from(mutant!(BarrierShort)) == parties.get() as usize {
            self.pass(object, answers);
        }
    }

    /// Lets all parties go on.
    fn pass(&mut self, object: u64, answers: &mut Answers<'_>) {
        if !mutant!(ReductionUnordered) {
            self.arrived.sort_unstable();
        }
        let values = self.arrived.iter().map(|it| it.1);
        let result = self
            .operation
            .and_then(|operation| values.reduce(|sum, it| apply(operation, sum, it)));
        let parties = &self.arrived;
        self.nodes
            .get_or_insert_with(|| parties.iter().map(|it| it.0.0).collect());
        for (party, _) in self.arrived.drain(..) {
            answers.end(party, object, Body::Done(result.unwrap_or(0)));
        }
    }

    /// Ends all waits if a node has left that is a party, or may be one.
    pub(super) fn gone(&mut self, object: u64, gone: &[NodeId], answers: &mut Answers<'_>) {
        let is_party = |node: &&NodeId| {
            let nodes = self.nodes.as_ref();
            nodes.map_or(!mutant!(StrangerAwaited), |it| it.contains(node))
        };
        let Some(node) = gone.iter().find(is_party).filter(|_| self.gone.is_none()) else {
            return;
        };
        if !mutant!(BreakForgotten) {
            self.gone = Some(*node);
        }
        for (party, _) in self.arrived.drain(..) {
            answers.end(party, object, Body::Refused(Refusal::Gone(*node)));
        }
    }
}

/// Combines two values.
fn apply(operation: Operation, one: u64, other: u64) -> u64 {
    let signed = |function: fn(i64, i64) -> i64| function(one as i64, other as i64) as u64;
    let float =
        |function: fn(f64, f64) -> f64| function(f64::from_bits(one), f64::from_bits(other)).to_bits();
    match operation {
        Operation::SumI64 | Operation::SumU64 => one.wrapping_add(other),
        Operation::MinI64 => signed(i64::min),
        Operation::MaxI64 => signed(i64::max),
        Operation::MinU64 => one.min(other),
        Operation::MaxU64 => one.max(other),
        Operation::SumF64 => float(|one, other| one + other),
        Operation::MinF64 => float(|one, other| choose(one, other, one.total_cmp(&other).is_lt())),
        Operation::MaxF64 => float(|one, other| choose(one, other, one.total_cmp(&other).is_gt())),
    }
}

/// Returns one of two numbers, or NaN if one of them is that.
fn choose(one: f64, other: f64, is_one: bool) -> f64 {
    match (one.is_nan() || other.is_nan(), is_one) {
        (true, _) => f64::NAN,
        (false, true) => one,
        (false, false) => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apply__floats_order_zeros_and_keep_nan() {
        let float = |operation, one: f64, other: f64| {
            f64::from_bits(apply(operation, one.to_bits(), other.to_bits()))
        };
        for (one, other) in [(0.0, -0.0), (-0.0, 0.0)] {
            assert!(float(Operation::MinF64, one, other).is_sign_negative());
            assert!(float(Operation::MaxF64, one, other).is_sign_positive());
        }
        for (one, other) in [(f64::NAN, 1.0), (1.0, -f64::NAN)] {
            for operation in [Operation::MinF64, Operation::MaxF64, Operation::SumF64] {
                assert!(float(operation, one, other).is_nan());
            }
        }
        assert_eq!(float(Operation::MinF64, -1.5, f64::INFINITY), -1.5);
        assert_eq!(float(Operation::MaxF64, -1.5, f64::INFINITY), f64::INFINITY);
    }

    #[test]
    fn apply__integers_have_signs_and_wrap() {
        let minus = -1_i64 as u64;
        assert_eq!(apply(Operation::MinI64, minus, 1), minus);
        assert_eq!(apply(Operation::MaxI64, minus, 1), 1);
        assert_eq!(apply(Operation::MinU64, minus, 1), 1);
        assert_eq!(apply(Operation::MaxU64, minus, 1), minus);
        assert_eq!(apply(Operation::SumI64, minus, 1), 0);
        assert_eq!(apply(Operation::SumU64, minus, 2), 1);
    }
}

//! The purpose of a work request, which its completion reports.

use crate::connection::SendSlot;

/// Bits of the number.
const KIND_SHIFT: u32 = 62;
const NUMBER_MASK: u64 = (1 << KIND_SHIFT) - 1;

/// The purpose of a work request of a [`MessageConnection`](crate::MessageConnection). It becomes the request's `wr_id`: the kind is
/// in the top two bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkId {
    /// A receive into the buffer with this index.
    Receive(u32),
    /// A message from this slot.
    Send(SendSlot),
    /// An RDMA operation with the caller's number, of which the low 62 bits count.
    Operation(u64),
    /// A probe of the peer.
    Probe,
    /// An empty request of a connection that is over: its completion follows those of all messages that have arrived.
    End,
    /// An empty request of a connection that was closed: no other completion of its queue pair follows its completion.
    Last,
}

impl From<WorkId> for u64 {
    fn from(id: WorkId) -> u64 {
        let (kind, number) = match id {
            WorkId::Receive(index) => (0, index.into()),
            WorkId::Send(slot) => (1, slot.index() as u64),
            WorkId::Operation(number) => (2, number & NUMBER_MASK),
            WorkId::Probe => (3, 0),
            WorkId::End => (3, 1),
            WorkId::Last => (3, 2),
        };
        kind << KIND_SHIFT | number
    }
}

impl From<u64> for WorkId {
    fn from(wr_id: u64) -> WorkId {
        let number = wr_id & NUMBER_MASK;
        match wr_id >> KIND_SHIFT {
            0 => WorkId::Receive(number as u32),
            1 => WorkId::Send(SendSlot::new(number as usize)),
            2 => WorkId::Operation(number),
            _ => match number {
                1 => WorkId::End,
                2 => WorkId::Last,
                _ => WorkId::Probe,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from__the_number_is_the_same_after_both_ways() {
        let slot = |index| WorkId::Send(SendSlot::new(index));
        let ids = [
            WorkId::Receive(0),
            WorkId::Receive(u32::MAX),
            slot(0),
            slot(65_535),
            WorkId::Operation(0),
            WorkId::Operation(NUMBER_MASK),
            WorkId::Probe,
            WorkId::End,
            WorkId::Last,
        ];
        for id in ids {
            assert_eq!(WorkId::from(u64::from(id)), id);
        }
        let mut numbers: Vec<u64> = ids.map(u64::from).to_vec();
        numbers.dedup();
        assert_eq!(numbers.len(), ids.len());
    }

    #[test]
    fn from__a_number_that_is_too_large_changes_no_kind() {
        let id = WorkId::from(u64::from(WorkId::Operation(u64::MAX)));
        assert_eq!(id, WorkId::Operation(NUMBER_MASK));
    }
}

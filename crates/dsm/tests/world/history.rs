//! Search for an order of all accesses that explains what each node has read.

use std::collections::{BTreeMap, HashSet};

use rdmux_dsm::protocol::Access;

use super::Operation;

/// Accesses of each node in its order, with the values read or written. Units hold 0 at first.
pub(crate) fn is_sequentially_consistent(history: &[Vec<(Operation, u32)>]) -> bool {
    let mut seen = HashSet::new();
    search(history, vec![0; history.len()], BTreeMap::new(), &mut seen)
}

type Seen = HashSet<(Vec<usize>, BTreeMap<usize, u32>)>;

fn search(
    history: &[Vec<(Operation, u32)>],
    done: Vec<usize>,
    memory: BTreeMap<usize, u32>,
    seen: &mut Seen,
) -> bool {
    if done.iter().zip(history).all(|(done, all)| *done == all.len()) {
        return true;
    }
    if !seen.insert((done.clone(), memory.clone())) {
        return false;
    }
    (0..history.len()).any(|node| {
        let Some(((access, unit), value)) = history[node].get(done[node]) else {
            return false;
        };
        let mut memory = memory.clone();
        match access {
            Access::Write => {
                memory.insert(*unit, *value);
            }
            Access::Read if memory.get(unit).copied().unwrap_or(0) != *value => return false,
            Access::Read => {}
        }
        let mut done = done.clone();
        done[node] += 1;
        search(history, done, memory, seen)
    })
}

//! Search for an order of all accesses of some threads that explains what each has read (sequential consistency).

use std::collections::HashSet;

/// An access of a thread. One that reads and writes does so at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub place: usize,
    /// The value that was read, if it reads.
    pub read: Option<u64>,
    /// The value that was written, if it writes.
    pub written: Option<u64>,
}

impl Event {
    pub(crate) fn read(place: usize, value: u64) -> Event {
        Event {
            place,
            read: Some(value),
            written: None,
        }
    }

    pub(crate) fn write(place: usize, value: u64) -> Event {
        Event {
            place,
            read: None,
            written: Some(value),
        }
    }
}

/// Returns whether there is such an order, in which the events of each thread are in theirs. All places hold 0 at first, and `end` in the end, if that
/// is known.
pub(crate) fn has_order(threads: &[Vec<Event>], end: Option<&[u64]>) -> bool {
    let places = threads.iter().flatten().map(|event| event.place + 1).max();
    let places = places.unwrap_or(0).max(end.map_or(0, <[u64]>::len));
    // Events of each thread that are over, and the memory then. Each such state is looked at once.
    let mut open = vec![(vec![0; threads.len()], vec![0; places])];
    let mut seen: HashSet<(Vec<usize>, Vec<u64>)> = open.iter().cloned().collect();
    while let Some((done, memory)) = open.pop() {
        let mut is_over = true;
        for (thread, events) in threads.iter().enumerate() {
            let Some(event) = events.get(done[thread]) else {
                continue;
            };
            is_over = false;
            if event.read.is_some_and(|value| memory[event.place] != value) {
                continue;
            }
            let (mut done, mut memory) = (done.clone(), memory.clone());
            done[thread] += 1;
            if let Some(value) = event.written {
                memory[event.place] = value;
            }
            if seen.insert((done.clone(), memory.clone())) {
                open.push((done, memory));
            }
        }
        if is_over && end.is_none_or(|end| end == memory) {
            return true;
        }
    }
    false
}

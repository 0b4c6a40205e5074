//! Check of a history against release consistency: a read returns what some write has put there, and no value that another write has replaced *before*
//! the read. What is before what follows from the order of each thread and from locks, words and barriers. So if all accesses of a place are ordered,
//! each read has one possible value, that of the last write, as under sequential consistency.

use std::collections::BTreeMap;

/// An event of a thread. Places hold 0 at first, and no two writes of a history write the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Read {
        place: usize,
        value: u64,
    },
    Write {
        place: usize,
        value: u64,
    },
    /// Takes a lock that so many have had for themselves before.
    Lock {
        lock: usize,
        number: u64,
        is_shared: bool,
    },
    Unlock {
        lock: usize,
    },
    /// Adds 1 to a word that had a value.
    Add {
        word: usize,
        value: u64,
    },
    /// All threads wait for each other.
    Barrier,
}
use Event::{Add, Barrier, Lock, Read, Unlock, Write};

/// Number of events of each thread that are before an event or are that event.
type Clock = Vec<usize>;

fn join(clock: &mut Clock, other: &Clock) {
    clock
        .iter_mut()
        .zip(other)
        .for_each(|(it, other)| *it = (*it).max(*other));
}

/// A lock while the events are put in order.
struct LockState {
    /// Number of those that have had it for themselves.
    passed: u64,
    is_held: bool,
    /// Threads that have yet to give it back, by the number before theirs.
    sharing: BTreeMap<u64, usize>,
    /// Clock of the last exclusive release, and of all releases.
    exclusive: Clock,
    all: Clock,
}

/// The order of a history's events.
struct Order {
    clocks: Vec<Vec<Clock>>,
}

impl Order {
    /// Puts the events in an order.
    ///
    /// # Errors
    /// There is none: numbers of holders of a lock or values of a word come twice, are missing, or contradict the rest.
    fn of(threads: &[Vec<Event>]) -> Result<Order, String> {
        let zero = vec![0; threads.len()];
        let mut locks: BTreeMap<usize, LockState> = BTreeMap::new();
        for event in threads.iter().flatten() {
            let Lock {
                lock,
                number,
                is_shared,
            } = *event
            else {
                continue;
            };
            let state = locks.entry(lock).or_insert_with(|| LockState {
                passed: 0,
                is_held: false,
                sharing: BTreeMap::new(),
                exclusive: zero.clone(),
                all: zero.clone(),
            });
            *state.sharing.entry(number).or_default() += usize::from(is_shared);
        }
        let mut words: BTreeMap<usize, (u64, Clock)> = BTreeMap::new();
        // The lock that each thread has, and how.
        let mut held: Vec<BTreeMap<usize, (u64, bool)>> = vec![BTreeMap::new(); threads.len()];
        let mut now = vec![zero.clone(); threads.len()];
        let mut clocks: Vec<Vec<Clock>> = vec![Vec::new(); threads.len()];
        loop {
            let mut is_over = true;
            let mut has_moved = false;
            for (thread, events) in threads.iter().enumerate() {
                while let Some(event) = events.get(clocks[thread].len()) {
                    let mut clock = now[thread].clone();
                    clock[thread] += 1;
                    match *event {
                        Read { .. } | Write { .. } => {}
                        Lock {
                            lock,
                            number,
                            is_shared,
                        } => {
                            let state = locks.get_mut(&lock).expect("it was seen");
                            let is_free =
                                is_shared || state.sharing.get(&number).is_none_or(|left| *left == 0);
                            if state.is_held || state.passed != number || !is_free {
                                break;
                            }
                            state.is_held = !is_shared;
                            join(&mut clock, if is_shared { &state.exclusive } else { &state.all });
                            held[thread].insert(lock, (number, is_shared));
                        }
                        Unlock { lock } => {
                            let (number, is_shared) =
                                held[thread].remove(&lock).ok_or("a lock that it has not")?;
                            let state = locks.get_mut(&lock).expect("it was seen");
                            join(&mut state.all, &clock);
                            if is_shared {
                                *state.sharing.entry(number).or_default() -= 1;
                            } else {
                                join(&mut state.exclusive, &clock);
                                state.passed += 1;
                                state.is_held = false;
                            }
                        }
                        Add { word, value } => {
                            let (next, before) = words.entry(word).or_insert_with(|| (0, zero.clone()));
                            if *next != value {
                                break;
                            }
                            *next += 1;
                            join(&mut clock, before);
                            before.clone_from(&clock);
                        }
                        // Below, for all.
                        Barrier => break,
                    }
                    now[thread].clone_from(&clock);
                    clocks[thread].push(clock);
                    has_moved = true;
                }
                is_over &= clocks[thread].len() == events.len();
            }
            if is_over {
                return Ok(Order { clocks });
            }
            let next = |thread: usize| threads[thread].get(clocks[thread].len());
            if (0..threads.len()).all(|it| next(it) == Some(&Barrier)) {
                let mut all = zero.clone();
                for (thread, clock) in now.iter_mut().enumerate() {
                    clock[thread] += 1;
                    join(&mut all, clock);
                }
                now.fill(all.clone());
                clocks.iter_mut().for_each(|clocks| clocks.push(all.clone()));
            } else if !has_moved {
                let next: Vec<_> = (0..threads.len()).map(next).collect();
                return Err(format!("no order of what synchronises: {next:?} come next"));
            }
        }
    }

    /// Returns whether an event, thread and number, is before another one.
    fn is_before(&self, event: (usize, usize), other: (usize, usize)) -> bool {
        event != other && self.clocks[other.0][other.1][event.0] > event.1
    }
}

/// Checks a history. Returns the number of its data races: pairs of accesses of a place without an order, of which one writes.
///
/// # Errors
/// Release consistency does not allow it, and why.
pub(crate) fn check(threads: &[Vec<Event>]) -> Result<usize, String> {
    let order = Order::of(threads)?;
    let events = || {
        threads.iter().enumerate().flat_map(|(thread, events)| {
            let event = move |(nth, event)| ((thread, nth), event);
            events.iter().copied().enumerate().map(event)
        })
    };
    let writes = |at: usize| {
        events().filter_map(move |(id, event)| match event {
            Write { place, value } if place == at => Some((id, value)),
            _ => None,
        })
    };
    let mut races = 0;
    for (id, event) in events() {
        let (Read { place, value } | Write { place, value }) = event else {
            continue;
        };
        let is_race = |(write, _): &((usize, usize), u64)| {
            // A pair of writes counts at the first of them.
            let is_counted = matches!(event, Read { .. }) || id < *write;
            *write != id && is_counted && !order.is_before(*write, id) && !order.is_before(id, *write)
        };
        races += writes(place).filter(is_race).count();
        if matches!(event, Write { .. }) {
            continue;
        }
        let written = writes(place).find(|(_, it)| *it == value).map(|(write, _)| write);
        if written.is_none() && value != 0 {
            return Err(format!("{id:?}: {event:?} is of no write"));
        }
        if written.is_some_and(|written| order.is_before(id, written)) {
            return Err(format!("{id:?}: {event:?} is of a later write"));
        }
        let replaces = |(write, _): &((usize, usize), u64)| {
            order.is_before(*write, id) && written.is_none_or(|written| order.is_before(written, *write))
        };
        if let Some((write, _)) = writes(place).find(replaces) {
            return Err(format!("{id:?}: {event:?} was replaced by {write:?} before"));
        }
    }
    Ok(races)
}

//! The transmit scheduler: it decides who sends next, and how much. IEEE 802.1Qaz: strict classes come first, in descending order; the
//! other classes share by weights, in bytes (deficit round robin). Inside a class all senders have the same quantum of bytes, round robin.
//!
//! The scheduler knows its senders only by an id. The device schedules its QPs; a device that several users share schedules its users.

use std::collections::VecDeque;
use std::num::NonZeroU8;

/// Traffic classes.
pub const CLASSES: usize = 8;
/// A sender's quantum: a little less than a train takes, so that one quantum is one train.
pub const QUANTUM_BYTES: u32 = 60_000;

/// Service policy of a class: the transmission selection of IEEE 802.1Qaz.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Served before all lower classes and before all classes that share.
    Strict,
    /// Enhanced transmission selection: shares what strict classes leave, in proportion to this weight.
    Ets(NonZeroU8),
}

impl Default for Policy {
    /// An equal share. (The standard's default for an unconfigured port is strict; but here any program chooses its class, and with
    /// equal shares no program can starve the others.)
    fn default() -> Policy {
        Policy::Ets(NonZeroU8::MIN)
    }
}

/// Returns the class of a packet: the class selector of its DSCP, which is the default mapping of DSCP to priority in NICs. Class n is
/// the class of CSn (DSCP 8 n). `tos` is the IPv4 TOS or the IPv6 traffic class.
pub const fn class_of(tos: u8) -> usize {
    (tos >> 5) as usize
}

/// The quantum of sender `id`: it may begin packets until it has sent `bytes`; the last packet may exceed them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "every quantum ends with `Scheduler::end`"]
pub struct Quantum<Id> {
    /// The sender.
    pub id: Id,
    /// Bytes within which the sender may begin packets.
    pub bytes: u32,
    class: usize,
    credit: i64,
}

#[derive(Debug)]
struct Class<Id> {
    /// The quantum of the class: bytes that a visit adds to the credit; `None` for a strict class.
    quantum: Option<i64>,
    /// Bytes that the class may still send in this visit; negative when its last packet exceeded the credit.
    credit: i64,
    /// Waiting senders, each with the rest of its quantum; negative when the sender's last packet exceeded the quantum.
    waiting: VecDeque<(Id, i64)>,
}

/// See the module.
#[derive(Debug)]
pub struct Scheduler<Id> {
    classes: [Class<Id>; CLASSES],
    /// The sharing class that is being visited.
    visited: usize,
    waiting: usize,
}

impl<Id: Copy + PartialEq> Scheduler<Id> {
    /// Returns a scheduler without waiting senders.
    pub fn new(policies: [Policy; CLASSES]) -> Scheduler<Id> {
        let weight = |policy| match policy {
            Policy::Strict => None,
            Policy::Ets(weight) => Some(i64::from(weight.get())),
        };
        let least = policies.into_iter().filter_map(weight).min().unwrap_or(1);
        Scheduler {
            classes: policies.map(|policy| Class {
                // The smallest quantum of a class is that of a sender, which is larger than the excess of one packet: one visit always pays the debt.
                quantum: weight(policy).map(|weight| i64::from(QUANTUM_BYTES) * weight / least),
                credit: 0,
                waiting: VecDeque::new(),
            }),
            visited: 0,
            waiting: 0,
        }
    }

    /// Adds `id`, which has something to send and does not wait yet. `class` is below [`CLASSES`].
    pub fn push(&mut self, class: usize, id: Id) {
        self.waiting += 1;
        self.classes[class].waiting.push_back((id, 0));
    }

    /// Returns the number of waiting senders.
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Returns whether no sender waits.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Forgets `id`. Unlike the other functions this one looks at every waiting sender.
    pub fn forget(&mut self, id: Id) {
        for class in &mut self.classes {
            class.waiting.retain(|(other, _)| *other != id);
        }
        self.waiting = self.classes.iter().map(|class| class.waiting.len()).sum();
    }

    /// Returns the next sender and its quantum. The sender does not wait until [`Scheduler::end`].
    pub fn pick(&mut self) -> Option<Quantum<Id>> {
        let at = self.strict().or_else(|| self.visit())?;
        let class = &mut self.classes[at];
        let (id, mut credit) = class.waiting.pop_front()?;
        self.waiting -= 1;
        if credit <= 0 {
            credit = (credit + i64::from(QUANTUM_BYTES)).max(1);
        }
        let bytes = class.quantum.map_or(credit, |_| credit.min(class.credit));
        Some(Quantum {
            id,
            bytes: bytes as u32,
            class: at,
            credit,
        })
    }

    /// Ends a quantum: the sender has sent `sent` bytes, and has `more` to send or not. A sender that could not use up its quantum goes
    /// on with it when its class is picked next.
    pub fn end(&mut self, quantum: Quantum<Id>, sent: usize, more: bool) {
        let sent = sent as i64;
        let class = &mut self.classes[quantum.class];
        if class.quantum.is_some() {
            class.credit -= sent;
        }
        if more {
            self.waiting += 1;
            let left = quantum.credit - sent;
            if left > 0 && sent > 0 {
                class.waiting.push_front((quantum.id, left));
            } else {
                class.waiting.push_back((quantum.id, left.min(0)));
            }
        } else if class.waiting.is_empty() {
            // An empty class saves up no credit.
            class.credit = class.credit.min(0);
        }
    }

    fn strict(&self) -> Option<usize> {
        let strict = |class: &Class<Id>| class.quantum.is_none() && !class.waiting.is_empty();
        self.classes.iter().rposition(strict)
    }

    /// Returns the sharing class to serve: the visited class until its credit is used up, then the next class with a waiting sender.
    fn visit(&mut self) -> Option<usize> {
        for step in 0..=CLASSES {
            let at = (self.visited + step) % CLASSES;
            let class = &mut self.classes[at];
            let Some(quantum) = class.quantum.filter(|_| !class.waiting.is_empty()) else {
                continue;
            };
            if step > 0 {
                class.credit = (class.credit + quantum).clamp(1, quantum);
            }
            if class.credit > 0 {
                self.visited = at;
                return Some(at);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_core::{RngCore, SeedableRng};

    use super::*;

    fn ets(weight: u8) -> Policy {
        Policy::Ets(NonZeroU8::new(weight).unwrap())
    }

    /// Lets the waiting senders send packets of `packet_bytes(id)` until `total` bytes are sent; returns the bytes of each id.
    fn run(
        scheduler: &mut Scheduler<usize>,
        ids: usize,
        total: usize,
        mut packet_bytes: impl FnMut(usize) -> usize,
    ) -> Vec<usize> {
        let mut bytes = vec![0; ids];
        let mut all = 0;
        while all < total {
            let quantum = scheduler.pick().unwrap();
            let mut sent = 0;
            while sent < quantum.bytes as usize {
                sent += packet_bytes(quantum.id);
            }
            bytes[quantum.id] += sent;
            all += sent;
            scheduler.end(quantum, sent, true);
        }
        bytes
    }

    #[test]
    fn pick__highest_strict_class_first() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut policies = [Policy::Strict; CLASSES];
        policies[2] = ets(1);
        policies[5] = ets(200);
        let mut scheduler = Scheduler::new(policies);
        let mut waiting = [0; CLASSES];
        for _ in 0..10_000 {
            let class = rng.next_u32() as usize % CLASSES;
            if rng.next_u32() % 2 == 0 {
                scheduler.push(class, class);
                waiting[class] += 1;
            } else if let Some(quantum) = scheduler.pick() {
                waiting[quantum.id] -= 1;
                let strict = |class: &usize| policies[*class] == Policy::Strict;
                let waits = |class: &usize| strict(class) && waiting[*class] > 0;
                let highest = (0..CLASSES).filter(waits).max();
                let picked = Some(quantum.id).filter(strict);
                assert!(highest <= picked, "class {highest:?} waited for {}", quantum.id);
                scheduler.end(quantum, 1500, false);
            }
            assert_eq!(scheduler.len(), waiting.iter().sum::<usize>());
            assert_eq!(scheduler.is_empty(), waiting == [0; CLASSES]);
        }
    }

    #[test]
    fn pick__classes_share_by_weight() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        for _ in 0..10 {
            let weights: [u8; CLASSES] = std::array::from_fn(|_| rng.next_u32() as u8 % 100 + 1);
            let mut scheduler = Scheduler::new(weights.map(ets));
            for class in 0..CLASSES {
                scheduler.push(class, class);
            }
            let sizes: [usize; CLASSES] = std::array::from_fn(|_| rng.next_u32() as usize % 4200 + 64);
            let total = 20_000_000_000;
            // Large packets stand for many small ones.
            let bytes = run(&mut scheduler, CLASSES, total, |id| sizes[id] * 14);
            let sum: f64 = weights.iter().map(|w| f64::from(*w)).sum();
            for class in 0..CLASSES {
                let expected = f64::from(weights[class]) / sum;
                let share = bytes[class] as f64 / bytes.iter().sum::<usize>() as f64;
                assert!(
                    (share / expected - 1.0).abs() < 0.01,
                    "weights {weights:?}: class {class} got {share}, not {expected}"
                );
            }
        }
    }

    #[test]
    fn pick__what_a_class_leaves_goes_to_the_others() {
        let mut scheduler = Scheduler::new([50, 30, 20, 1, 1, 1, 1, 1].map(ets));
        scheduler.push(1, 1);
        scheduler.push(2, 2);
        let bytes = run(&mut scheduler, 3, 100_000_000, |_| 1040);
        let share = bytes[1] as f64 / (bytes[1] + bytes[2]) as f64;
        assert!((share - 0.6).abs() < 0.006, "{share}");
    }

    #[test]
    fn pick__equal_bytes_inside_of_a_class_whatever_the_packets() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for policy in [Policy::Strict, Policy::default()] {
            let mut scheduler = Scheduler::new([policy; CLASSES]);
            let ids = 9;
            for id in 0..ids {
                scheduler.push(4, id);
            }
            let sizes: Vec<usize> = (0..ids).map(|_| rng.next_u32() as usize % 4200 + 64).collect();
            let bytes = run(&mut scheduler, ids, 200_000_000, |id| sizes[id]);
            let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
            assert!(
                most - least <= 2 * QUANTUM_BYTES as usize,
                "{bytes:?} with {sizes:?}"
            );
        }
    }

    #[test]
    fn pick__nobody_in_a_class_starves() {
        // Every sender is served before any sender is served again, even if some come and go and the buffer ends quanta early.
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        let mut scheduler = Scheduler::new([Policy::default(); CLASSES]);
        let ids = 20;
        let mut since = vec![0u64; ids];
        let mut waits = vec![true; ids];
        (0..ids).for_each(|id| scheduler.push(id % 2, id));
        for _ in 0..100_000 {
            let Some(quantum) = scheduler.pick() else { break };
            since.iter_mut().for_each(|n| *n += 1);
            since[quantum.id] = 0;
            let sent = if rng.next_u32() % 4 == 0 {
                quantum.bytes / 2
            } else {
                quantum.bytes + 900
            };
            waits[quantum.id] = rng.next_u32() % 3 != 0;
            scheduler.end(quantum, sent as usize, waits[quantum.id]);
            for id in 0..ids {
                if !waits[id] && rng.next_u32() % 2 == 0 {
                    (waits[id], since[id]) = (true, 0);
                    scheduler.push(id % 2, id);
                }
            }
            let longest = (0..ids).filter(|id| waits[*id]).map(|id| since[id]).max();
            assert!(
                longest <= Some(20 * ids as u64),
                "somebody waited for {longest:?} quanta"
            );
        }
    }

    #[test]
    fn end__a_turn_cut_short_goes_on() {
        let mut scheduler = Scheduler::new([Policy::Strict; CLASSES]);
        scheduler.push(0, 'a');
        scheduler.push(0, 'b');
        let quantum = scheduler.pick().unwrap();
        assert_eq!((quantum.id, quantum.bytes), ('a', QUANTUM_BYTES));
        scheduler.end(quantum, 1000, true);
        let quantum = scheduler.pick().unwrap();
        assert_eq!((quantum.id, quantum.bytes), ('a', QUANTUM_BYTES - 1000));
        // Bytes in excess of a quantum are deducted from the sender's next quantum.
        scheduler.end(quantum, QUANTUM_BYTES as usize, true);
        let quantum = scheduler.pick().unwrap();
        assert_eq!((quantum.id, quantum.bytes), ('b', QUANTUM_BYTES));
        scheduler.end(quantum, 5, false);
        let quantum = scheduler.pick().unwrap();
        assert_eq!((quantum.id, quantum.bytes), ('a', QUANTUM_BYTES - 1000));
        scheduler.end(quantum, 0, true);
        scheduler.forget('a');
        assert!(scheduler.is_empty());
    }

    #[test]
    fn end__a_turn_without_use_goes_to_the_next_sender() {
        for policy in [Policy::Strict, Policy::default()] {
            let mut scheduler = Scheduler::new([policy; CLASSES]);
            scheduler.push(0, 'a');
            scheduler.push(0, 'b');
            for id in ['a', 'b', 'a'] {
                let quantum = scheduler.pick().unwrap();
                assert_eq!((quantum.id, quantum.bytes), (id, QUANTUM_BYTES), "{policy:?}");
                scheduler.end(quantum, 0, true);
            }
        }
    }

    #[test]
    fn class_of__class_selectors() {
        for class in 0..CLASSES {
            let dscp = 8 * class as u8;
            assert_eq!(class_of(dscp << 2), class);
            assert_eq!(class_of((dscp + 7) << 2 | 3), class);
        }
    }
}

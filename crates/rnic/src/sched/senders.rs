//! The transmit scheduler of a device: classes, and inside a class senders with the same quantum of bytes, round robin.

use std::collections::VecDeque;

use super::classes::Classes;
use super::{CLASSES, Policy, QUANTUM_BYTES};

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

/// See the module.
#[derive(Debug)]
pub struct Scheduler<Id> {
    classes: Classes,
    /// Waiting senders of each class, each with the rest of its quantum; negative when the sender's last packet exceeded the quantum.
    senders: [VecDeque<(Id, i64)>; CLASSES],
    waiting: usize,
}

impl<Id: Copy + PartialEq> Scheduler<Id> {
    /// Returns a scheduler without waiting senders. Its strict classes may take everything.
    pub fn new(policies: [Policy; CLASSES]) -> Scheduler<Id> {
        Scheduler {
            // An excess is one packet, which is shorter than the smallest quantum: one visit always pays the debt.
            classes: Classes::new(policies, QUANTUM_BYTES, i64::from(QUANTUM_BYTES) - 1, 100),
            senders: std::array::from_fn(|_| VecDeque::new()),
            waiting: 0,
        }
    }

    /// Adds `id`, which has something to send and does not wait yet. `class` is below [`CLASSES`].
    pub fn push(&mut self, class: usize, id: Id) {
        self.waiting += 1;
        self.classes.wait(class);
        self.senders[class].push_back((id, 0));
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
        for (class, senders) in self.senders.iter_mut().enumerate() {
            senders.retain(|(other, _)| *other != id);
            if senders.is_empty() {
                self.classes.rest(class);
            }
        }
        self.waiting = self.senders.iter().map(VecDeque::len).sum();
    }

    /// Returns the next sender and its quantum. The sender does not wait until [`Scheduler::end`].
    pub fn pick(&mut self) -> Option<Quantum<Id>> {
        let (class, most) = self.classes.pick()?;
        let senders = &mut self.senders[class];
        let (id, mut credit) = senders.pop_front()?;
        if senders.is_empty() {
            self.classes.pause(class);
        }
        self.waiting -= 1;
        if credit <= 0 {
            credit = (credit + i64::from(QUANTUM_BYTES)).max(1);
        }
        Some(Quantum {
            id,
            bytes: credit.min(most) as u32,
            class,
            credit,
        })
    }

    /// Ends a quantum: the sender has sent `sent` bytes, and has `more` to send or not. A sender that could not use up its quantum goes
    /// on with it when its class is picked next.
    pub fn end(&mut self, quantum: Quantum<Id>, sent: usize, more: bool) {
        let sent = sent as i64;
        self.classes.charge(quantum.class, sent);
        let senders = &mut self.senders[quantum.class];
        if more {
            self.waiting += 1;
            let left = quantum.credit - sent;
            if left > 0 && sent > 0 {
                senders.push_front((quantum.id, left));
            } else {
                senders.push_back((quantum.id, left.min(0)));
            }
            self.classes.wait(quantum.class);
        } else if senders.is_empty() {
            self.classes.rest(quantum.class);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU8;

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
}

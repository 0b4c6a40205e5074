//! The choice among classes: strict ones first, the others by deficit round robin. Both schedulers use it.

use super::{CLASSES, Policy};

/// Which classes have something to send, and what each may still send.
#[derive(Debug)]
pub(super) struct Classes {
    /// Strict classes, a bit each.
    strict: u8,
    /// Classes with something to send, a bit each.
    waiting: u8,
    /// The sharing class that is being visited.
    visited: usize,
    /// Bytes that a visit adds to the credit of a sharing class.
    quantum: [i64; CLASSES],
    /// Bytes that a sharing class may still send in this visit; negative when its last packet exceeded the credit.
    credit: [i64; CLASSES],
    /// Largest excess that is remembered.
    debt_max: i64,
    /// Debt of a strict class to all lower classes together, for what it sent while they waited, in hundredths of bytes.
    owed: [i64; CLASSES],
    /// Percent of the bytes that a strict class may take while lower ones wait, and the debt at which these are served.
    strict_percent: i64,
    owed_max: i64,
}

impl Classes {
    /// Returns classes without anything to send. The smallest quantum of a class is `quantum_bytes`. A strict class gets at most
    /// `strict_percent` of the bytes while lower classes wait.
    pub(super) fn new(
        policies: [Policy; CLASSES],
        quantum_bytes: u32,
        debt_max: i64,
        strict_percent: u8,
    ) -> Classes {
        let weight = |policy| match policy {
            Policy::Strict => None,
            Policy::Ets(weight) => Some(i64::from(weight.get())),
        };
        let least = policies.into_iter().filter_map(weight).min().unwrap_or(1);
        let strict_percent = i64::from(strict_percent.clamp(1, 100));
        Classes {
            strict: (0..CLASSES)
                .filter(|at| policies[*at] == Policy::Strict)
                .fold(0, |mask, at| mask | 1 << at),
            waiting: 0,
            visited: 0,
            quantum: policies.map(|policy| i64::from(quantum_bytes) * weight(policy).unwrap_or(1) / least),
            credit: [0; CLASSES],
            debt_max,
            owed: [0; CLASSES],
            strict_percent,
            owed_max: i64::from(quantum_bytes) * strict_percent,
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waiting != 0
    }

    /// Sets that class `at` has something to send.
    #[inline]
    pub(super) fn wait(&mut self, at: usize) {
        self.waiting |= 1 << at;
    }

    /// Sets that what class `at` has to send has been taken out; it may come back.
    #[inline]
    pub(super) fn pause(&mut self, at: usize) {
        self.waiting &= !(1 << at);
    }

    /// Sets that class `at` has nothing to send. It saves up no credit.
    #[inline]
    pub(super) fn rest(&mut self, at: usize) {
        self.waiting &= !(1 << at);
        self.credit[at] = self.credit[at].min(0);
    }

    /// Returns the class that sends next, and the bytes that it may send at once.
    #[inline]
    pub(super) fn pick(&mut self) -> Option<(usize, i64)> {
        if let Some(at) = self.pick_strict() {
            return Some((at, i64::MAX));
        }
        let sharing = self.waiting & !self.strict;
        if sharing == 0 {
            return None;
        }
        let mut at = self.visited;
        if sharing >> at & 1 == 0 || self.credit[at] <= 0 {
            loop {
                at = next(sharing, at);
                self.credit[at] = (self.credit[at] + self.quantum[at]).min(self.quantum[at]);
                if self.credit[at] > 0 {
                    break;
                }
            }
            self.visited = at;
        }
        Some((at, self.credit[at]))
    }

    /// Accounts for bytes that class `at` has sent.
    #[inline]
    pub(super) fn charge(&mut self, at: usize, sent: i64) {
        let above = self.strict & !below(at + 1);
        if above != 0 {
            for higher in (at + 1..CLASSES).filter(|higher| above >> higher & 1 != 0) {
                self.owed[higher] = (self.owed[higher] - sent * self.strict_percent).max(0);
            }
        }
        if self.strict >> at & 1 == 0 {
            self.credit[at] = (self.credit[at] - sent).max(-self.debt_max);
        } else if self.below_strict(at) != 0 {
            self.owed[at] += sent * (100 - self.strict_percent);
        }
    }

    /// Returns the highest strict class that has not had its part. Whatever is below a strict class waits for it: sharing classes too.
    #[inline]
    fn pick_strict(&self) -> Option<usize> {
        let mut strict = self.waiting & self.strict;
        while strict != 0 {
            let at = strict.ilog2() as usize;
            if self.owed[at] < self.owed_max || self.below_strict(at) == 0 {
                return Some(at);
            }
            strict &= !(1 << at);
        }
        None
    }

    /// Classes with something to send that come after strict class `at`.
    fn below_strict(&self, at: usize) -> u8 {
        self.waiting & (below(at) | !self.strict)
    }
}

/// Classes below `at`.
fn below(at: usize) -> u8 {
    ((1u16 << at) - 1) as u8
}

/// Returns the class of `mask`, which is not 0, that follows `at`, in a circle.
fn next(mask: u8, at: usize) -> usize {
    let above = mask & !below(at + 1);
    (if above == 0 { mask } else { above }).trailing_zeros() as usize
}

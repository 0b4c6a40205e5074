//! Withdrawals: an application deregisters a region into which the peer's node may write, as it was told of receives there.
//!
//! The peer's node is told the region's key on shared queue pairs, writes into none of those receives any more, and says so behind all that it has
//! posted before. A number in the answer says for how many withdrawals of the connection it is, so one answer is enough for several, and there is
//! never more than one to be sent. A connection that has failed needs no answer: the peer's end comes behind its last WRITE.

use std::collections::VecDeque;

use rdmux_rnic::RKey;
use rdmux_wire::node::mux::{Extra, Kind};

use super::Violation;

/// The withdrawals of a connection, in both directions.
#[derive(Debug, Default)]
pub(super) struct Withdrawals {
    /// Own regions whose withdrawal the peer has not answered, by the keys of their applications and those on shared queue pairs, in order. For one
    /// without the former nobody waits any more.
    open: VecDeque<(Option<RKey>, RKey)>,
    /// The first so many of them of which the peer knows.
    told: usize,
    /// Those that it has answered, modulo 2^32.
    answered: u32,
    /// The peer's that have been carried out, and those of which it knows that, modulo 2^32.
    carried_out: u32,
    confirmed: u32,
}

impl Withdrawals {
    /// Withdraws receives in a region with this key of its application, and this one on shared queue pairs.
    pub(super) fn add(&mut self, region: RKey, key: RKey) {
        self.open.push_back((Some(region), key));
    }

    /// Ends what waits for the answers of a region. Returns whether there was anything.
    pub(super) fn release(&mut self, region: RKey) -> bool {
        let mut told = self.open.iter_mut().take(self.told);
        match told.find(|(open, _)| *open == Some(region)) {
            // The answer counts it.
            Some((open, _)) => {
                *open = None;
                true
            }
            None => {
                let before = self.open.len();
                self.open.retain(|(open, _)| *open != Some(region));
                self.open.len() < before
            }
        }
    }

    /// Takes note that a withdrawal of the peer has been carried out.
    pub(super) fn carried_out(&mut self) {
        self.carried_out = self.carried_out.wrapping_add(1);
    }

    /// Returns whether the peer's node is to be told something.
    pub(super) fn has_news(&self) -> bool {
        self.told < self.open.len() || self.confirmed != self.carried_out
    }

    /// Returns what is to be told next.
    pub(super) fn tell(&mut self) -> Option<(Kind, Extra)> {
        if let Some((_, key)) = self.open.get(self.told) {
            self.told += 1;
            return Some((Kind::Withdraw, Extra::Withdraw(*key)));
        }
        let has_more = self.confirmed != self.carried_out;
        self.confirmed = self.carried_out;
        has_more.then_some((Kind::Withdrawn, Extra::Withdrawn(self.carried_out)))
    }

    /// Handles an answer, for so many withdrawals. Returns the regions into which the peer does not write any more, by the keys of their
    /// applications.
    ///
    /// # Errors
    /// No node answers more withdrawals than it was told.
    pub(super) fn answered(&mut self, count: u32) -> Result<Vec<RKey>, Violation> {
        let more = count.wrapping_sub(self.answered) as usize;
        if more > self.told {
            return Err(Violation("an answer to what was not withdrawn"));
        }
        self.answered = count;
        self.told -= more;
        Ok(self.open.drain(..more).filter_map(|(region, _)| region).collect())
    }

    /// Ends them all, as nothing comes from the peer any more. Returns their regions.
    pub(super) fn end(&mut self) -> Vec<RKey> {
        self.told = 0;
        self.open.drain(..).filter_map(|(region, _)| region).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tell__each_once_and_answers_together() {
        let mut withdrawals = Withdrawals::default();
        assert!(!withdrawals.has_news());
        withdrawals.add(RKey(1), RKey(11));
        withdrawals.carried_out();
        withdrawals.add(RKey(2), RKey(12));
        withdrawals.carried_out();
        let told: Vec<_> = std::iter::from_fn(|| withdrawals.tell()).collect();
        assert_eq!(
            told,
            [
                (Kind::Withdraw, Extra::Withdraw(RKey(11))),
                (Kind::Withdraw, Extra::Withdraw(RKey(12))),
                (Kind::Withdrawn, Extra::Withdrawn(2)),
            ]
        );
        assert!(!withdrawals.has_news());
    }

    #[test]
    fn answered__by_number() {
        let mut withdrawals = Withdrawals {
            answered: u32::MAX,
            ..Withdrawals::default()
        };
        (1..=3).for_each(|n| withdrawals.add(RKey(n), RKey(10 + n)));
        assert!(withdrawals.answered(0).is_err());
        (0..2).for_each(|_| _ = withdrawals.tell());
        assert!(withdrawals.answered(2).is_err());
        assert_eq!(withdrawals.answered(u32::MAX), Ok(vec![]));
        assert_eq!(withdrawals.answered(1), Ok(vec![RKey(1), RKey(2)]));
        assert_eq!(
            withdrawals.tell(),
            Some((Kind::Withdraw, Extra::Withdraw(RKey(13))))
        );
        assert_eq!(withdrawals.end(), [RKey(3)]);
        assert!(!withdrawals.has_news());
        assert!(withdrawals.answered(2).is_err());
    }

    #[test]
    fn release__of_told_and_others() {
        let mut withdrawals = Withdrawals::default();
        (1..=4).for_each(|n| withdrawals.add(RKey(n), RKey(10 + n)));
        (0..2).for_each(|_| _ = withdrawals.tell());
        assert!(withdrawals.release(RKey(1)) && withdrawals.release(RKey(3)));
        assert!(!withdrawals.release(RKey(1)) && !withdrawals.release(RKey(3)));
        assert_eq!(
            withdrawals.tell(),
            Some((Kind::Withdraw, Extra::Withdraw(RKey(14))))
        );
        assert!(!withdrawals.has_news());
        assert_eq!(withdrawals.answered(1), Ok(vec![]));
        assert_eq!(withdrawals.answered(3), Ok(vec![RKey(2), RKey(4)]));
    }
}

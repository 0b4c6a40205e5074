//! Rounds: work that is done for all threads which have asked for it before it began.

/// Numbers of rounds, one at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Rounds {
    asked: u64,
    begun: u64,
    ended: u64,
}

impl Rounds {
    /// Returns the number of the next round, which does what a caller asks for at this moment, and whether it begins at once.
    pub(super) fn ask(&mut self) -> (u64, bool) {
        if mutant!(RoundShared) && !self.is_idle() {
            return (self.begun, false);
        }
        self.asked = self.begun + 1;
        let begins = self.is_idle();
        self.begun += u64::from(begins);
        (self.asked, begins)
    }

    /// Ends the round in progress. Returns whether the next one begins.
    pub(super) fn end(&mut self) -> bool {
        self.ended = self.begun;
        let begins = self.asked > self.begun;
        self.begun += u64::from(begins);
        begins
    }

    /// Returns the number of the last round that was asked for.
    pub(super) fn asked(&self) -> u64 {
        self.asked
    }

    pub(super) fn is_idle(&self) -> bool {
        self.begun == self.ended
    }

    /// Returns the number of the round in progress, or of the last one.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    pub(super) fn has_ended(&self, round: u64) -> bool {
        self.ended >= round
    }
}

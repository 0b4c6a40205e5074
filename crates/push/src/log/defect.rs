//! Deliberate defects, one at a time, by which the tests prove that they can fail.

/// Whether a defect is switched on; never outside of tests.
macro_rules! defect {
    ($name:ident) => {
        $crate::log::defect::is_on($crate::log::defect::Defect::$name)
    };
}
pub(super) use defect;

macro_rules! defects {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// A defect of the log.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Defect {
            $($(#[doc = $doc])+ $name,)+
        }

        #[cfg(all(test, not(debug_assertions)))]
        impl Defect {
            pub(super) const ALL: &[Defect] = &[$(Defect::$name),+];
        }
    };
}

defects! {
    /// One replica fewer than a majority acknowledges.
    AckBeforeQuorum,
    /// A record counts where it was written, flushed or not.
    AckBeforeFlush,
    /// The flush of a batch ends one line short.
    FlushTooShort,
    /// A writer that connects again does not look whether it was fenced.
    PromiseIgnored,
    /// The promise is not flushed before the log is read.
    PromiseNotFlushed,
    /// Recovery takes the shortest log.
    ShortestChosen,
    /// Recovery takes the longest log, whoever wrote it.
    LongestChosen,
    /// Recovery reads what a loss of power may take back.
    OldNotFlushed,
    /// Recovery is content with a minority.
    MinorityRecovers,
    /// A replica that lost what it held has a say in a recovery.
    BlankHasSay,
    /// A replica that has not caught up has a say in a recovery.
    JoiningHasSay,
    /// A replica that lost what it held is taken in without a new epoch.
    JoinsAnyTime,
    /// A replica that was blank before the promises is taken in when it is blank again.
    SeenBlankOnce,
    /// A majority is counted though some of it may be lost again.
    NotConfirmed,
    /// Checksums of frames are not looked at.
    ChecksumIgnored,
    /// What an earlier writer wrote counts as acknowledged before the epoch's start does.
    OldEpochAcked,
    /// A replica that comes back gets what is new, whatever it misses.
    GapLeft,
    /// A writer that raises its epoch goes on behind what another one appended meanwhile.
    FollowedUnnoticed,
    /// Both header slots are the same one.
    OneSlot,
}

#[cfg(not(test))]
#[inline(always)]
pub(super) fn is_on(_: Defect) -> bool {
    false
}

#[cfg(test)]
thread_local! {
    static ON: std::cell::Cell<Option<Defect>> = const { std::cell::Cell::new(None) };
}

/// Switches one defect on for this thread, or all off.
#[cfg(all(test, not(debug_assertions)))]
pub(super) fn set(defect: Option<Defect>) {
    ON.set(defect);
}

#[cfg(test)]
pub(super) fn is_on(defect: Defect) -> bool {
    ON.get() == Some(defect)
}

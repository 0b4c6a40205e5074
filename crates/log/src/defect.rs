//! Deliberate defects, enabled one at a time, with which the tests prove that they can fail.

/// Returns whether a defect is switched on; false outside of tests.
macro_rules! defect {
    ($name:ident) => {
        $crate::defect::is_on($crate::defect::Defect::$name)
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
    /// One replica fewer than a majority is enough for an acknowledgement.
    AckBeforeQuorum,
    /// A record counts once it is written, flushed or not.
    AckBeforeFlush,
    /// The flush of a batch ends one line short.
    FlushTooShort,
    /// A writer that reconnects does not check whether it was fenced.
    PromiseIgnored,
    /// The promise is not flushed before the log is read.
    PromiseNotFlushed,
    /// Recovery takes the shortest log.
    ShortestChosen,
    /// Recovery takes the longest log, whoever wrote it.
    LongestChosen,
    /// Recovery reads bytes that a loss of power may revert.
    OldNotFlushed,
    /// Recovery accepts a minority.
    MinorityRecovers,
    /// A replica that lost what it held has a say in a recovery.
    BlankHasSay,
    /// A replica that has not caught up has a say in a recovery.
    JoiningHasSay,
    /// A replica that lost its contents joins without a new epoch.
    JoinsAnyTime,
    /// A replica that was blank before the promises joins when it is blank again.
    SeenBlankOnce,
    /// A majority is counted although some of its replicas may be lost again.
    NotConfirmed,
    /// Checksums of frames are not checked.
    ChecksumIgnored,
    /// Frames of an earlier writer count as acknowledged before the start of the epoch does.
    OldEpochAcked,
    /// A replica that comes back receives only new frames, whatever it lacks.
    GapLeft,
    /// A writer that raises its epoch continues behind frames that another writer appended meanwhile.
    FollowedUnnoticed,
    /// Both headers go to the same slot.
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

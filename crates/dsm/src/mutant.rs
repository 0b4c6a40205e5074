//! Deliberate defects of the protocol (`crates/mutant.rs`), which its checks must catch.

#[macro_use]
#[path = "../../mutant.rs"]
mod switch;

#[cfg(feature = "mutants")]
mutants! {
    "A defect of the protocol.";
    /// A right is granted although a node that was recalled has not yielded.
    RecallNotAwaited,
    /// A node yields before its view of the unit is protected.
    YieldedEarly,
    /// Of several nodes that share a unit, only one is recalled.
    OneSharerRecalled,
    /// A node that may write keeps its right while another one gets to read.
    OwnerKeepsRight,
    /// A request for a busy unit is forgotten.
    BusyForgotten,
    /// A node that waits for the right to write keeps its shared copy when it is recalled.
    UpgradeKeepsCopy,
    /// The home goes on to the next request when it has sent the grant.
    InstalledNotAwaited,
    /// A duplicate is handled again.
    DuplicateTaken,
    /// A message of a node that is gone is handled.
    GoneHeard,
    /// A message of a newer membership is handled at once.
    NewerNotHeld,
    /// A unit that a node could write when it left is served from a copy of before.
    ExclusiveNotLost,
    /// A unit that a node was getting to write when it left is served from a copy of before.
    GrantNotLost,
    /// A recalled node that is gone is still waited for.
    GoneAwaited,
    /// A node that is gone still gets its turn.
    GoneGranted,
    /// A request to a home that is gone is kept.
    HomeGoneAwaited,
    /// Frames that were fresh before a write still count as fresh.
    FreshKept,
    /// A right is taken before the contents have landed.
    TakenEarly,
    /// A read of the contents that failed counts as one that has landed.
    FailureTaken,
    /// The end of an earlier task counts as the end of the one in progress.
    EarlierTaskTaken,
    /// A read that failed before its source is known to be gone is not tried again.
    FailureForgotten,
    /// A unit is lost although a node may have read its contents from the one that is gone.
    ReadNotAwaited,
    /// The contents of a unit that is shared are lost with the first node that had them.
    SharedLost,
    /// A registrar makes each node that asks the home.
    RegistrationForgotten,
    /// A node acts as the home before it knows that it is.
    EarlyTaken,
    /// A request that comes before its receiver knows that it is the home is forgotten.
    EarlyForgotten,
    /// Requests that wait for the news of the home are kept when the registrar is gone.
    EarlyNotRefused,
    /// A node gets to write while others get to read.
    WriterJoins,
    /// A node gets to read while another one gets to write.
    WriterJoined,

    // Those of release consistency.
    /// The log has a notice before the homes have the writes.
    NoticedEarly,
    /// The home's view of a unit stays unprotected when the home releases it.
    HomeUnprotected,
    /// A unit that was written is taken away without a flush.
    DirtyDropped,
    /// Contents that were read before a notice count as read after it.
    StaleTaken,
    /// A unit is written without a twin of its own.
    TwinForgotten,
    /// A release that begins while one is carried out ends with that.
    RoundShared,
    /// A log that has lapped has no notices.
    LapForgotten,
    /// The notices of a node that is gone are forgotten.
    DepartureForgotten,
    /// An acquire does not wait for homes that may still store what a node has written that is gone.
    LateStoreNotAwaited,
    /// A unit that has changed counts as unchanged: it gets neither flush nor notice.
    ChangeForgotten,
    /// A flush has units of several homes.
    HomesMixed,
    /// A home reads units straight into its frames although others have written them.
    OthersOverwritten,
    /// A node that has flushed counts as the only writer although the frame differs from its copy.
    DifferenceForgotten,
    /// The program of a home writes a unit while a flush lands in its frame.
    LandingNotAwaited,
    /// A flush is carried out while another one lands in the same frame.
    LandingOvertaken,
    /// Units are compared with their twins before the program may not write them any more.
    ComparedEarly,
    /// A home answers a flush before it has stored what was written.
    AnsweredEarly,
    /// A flush lands although another one, which was read into its slot, is to be stored into the same frame.
    StoreOvertaken,
    /// A registrar makes each node that asks the home.
    TouchForgotten,
    /// A node makes itself the home by its touch, without asking the registrar.
    TouchNotAgreed,
    /// A node waits for the answer of a registrar that is gone.
    RegistrarGoneAwaited,

    // Those of synchronisation.
    /// A lock that others share is given to one for itself.
    WriterAmongReaders,
    /// A lock that one has for itself is shared with others.
    ReaderBesideWriter,
    /// The mark of a recovered lock is taken off by one that only shares it.
    ReaderTakesMark,
    /// A node that is gone still gets a lock.
    GoneLocks,
    /// A lock that was recovered has no mark.
    RecoveryUnmarked,
    /// A lock is not taken from a node that is gone.
    GoneKeepsLock,
    /// A barrier is passed although one party has not come.
    BarrierShort,
    /// A reduction takes the values in the order of their arrival.
    ReductionUnordered,
    /// A barrier that a party has left waits for it the next time.
    BreakForgotten,
    /// A barrier that was never passed waits for a party that is gone before it has come.
    StrangerAwaited,
    /// A barrier that is first used after a party has left waits for it.
    LateBarrierAwaited,
    /// A thread that has not heard that a node is gone is put into a condition's queue by a home that has.
    LateWaitAwaited,
    /// A word keeps its value.
    WordNotWritten,
    /// The waits for a condition go on after a node has left.
    GoneSignalAwaited,
    /// A thread that was not told that a node is gone waits for a condition.
    DepartureNotTold,
    /// A signal that overtakes the message that the thread is in the queue is lost.
    EarlySignalLost,
    /// A call to a home that is gone is kept.
    LostHomeAwaited,
    /// A thread waits until a home that is gone has taken a lock back.
    LostUnlockAwaited,
}

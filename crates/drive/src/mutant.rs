//! Deliberate defects of the driver (`crates/mutant.rs`), which the simulation must catch.

#[macro_use]
#[path = "../../mutant.rs"]
mod switch;

#[cfg(feature = "mutants")]
mutants! {
    "A defect of the driver.";
    /// A command that has taken too long ends for its submitter while the drive has it.
    EndedAtTimeout,
    /// Commands end when the drive is told to stop, and not when it has stopped.
    ResetNotAwaited,
    /// An Abort ends its command whatever the drive answers.
    AbortTrusted,
    /// The memory of a driver that is dropped is freed while the drive may move data.
    FreedWhileRunning,
    /// Buffers of a drive that does not stop are given back.
    HeldGivenBack,
    /// Completions are taken whatever their phase.
    PhaseIgnored,
    /// The head of a completion queue stays with the driver.
    HeadNotTold,
    /// A completion may name any command of its slot, also one that has ended.
    GenerationIgnored,
    /// A Flush ends without being sent.
    FlushNotSent,
    /// A command is done whatever its status is.
    StatusIgnored,
    /// Lists of pages begin with the first page, which is in the command.
    ListFromFirst,
    /// All commands of a queue have one page for their lists.
    ListsShared,
    /// Data in the drive's memory are copied through the host's.
    CopiedThroughDram,
    /// One command has data in two kinds of memory.
    KindsMixed,
    /// Doorbells lie 4 bytes from each other.
    StrideIgnored,
    /// A drive is off before it has written its cache.
    ShutdownNotAwaited,
    /// Each doorbell is booked twice.
    DoorbellBookedTwice,
}

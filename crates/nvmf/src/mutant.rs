//! Deliberate defects of the target (`crates/mutant.rs`), which the simulation must catch.

#[macro_use]
#[path = "../../mutant.rs"]
mod switch;

#[cfg(feature = "mutants")]
mutants! {
    "A defect of the target.";
    /// Other writes run between Compare and Write of a fused pair.
    PairNotAlone,
    /// A fused pair writes whatever its Compare has found.
    PairNotCompared,
    /// The first command of a fused pair waits for another command when the second is refused.
    PairHalfForgotten,
    /// A reservation takes effect while writes run that it forbids.
    ReservationNotAwaited,
    /// Reservations are checked when a command comes, and not when it runs.
    ReservationCheckedOnce,
    /// A host that is preempted keeps its registration.
    PreemptedStay,
    /// Reservations that are to outlast the target do not.
    ReservationsNotKept,
    /// A failed flush is forgotten.
    FailedFlushForgotten,
    /// A write with FUA is acknowledged before it is durable.
    FuaNotFlushed,
    /// All ranges of a Copy are written to the place of the first one.
    CopyRangesPiled,
    /// A Copy reads whatever reservations its source has.
    CopySourceUnchecked,
    /// The limits of a host hold none of its commands up.
    LimitIgnored,
    /// A host may save what its limits have let it and it has not used, for as long as it likes.
    LimitSaved,
    /// A shutdown flushes nothing.
    ShutdownNotFlushed,
    /// A controller is ready, and takes commands, although an I/O runs that its host has sent to the one before.
    ReadyTooEarly,
    /// A reset is over although an I/O runs that was sent before.
    ResetTooEarly,
    /// An I/O of a controller that is over begins all the same.
    LateBegins,
    /// A host that is silent keeps its controller.
    KeepAliveEndless,
    /// A command is carried out although its namespace is not accessible.
    AccessIgnored,
    /// By RDMA a key stays valid that its host has asked to be invalidated.
    KeyKept,
    /// By RDMA an aborted command completes although its data are being fetched.
    AbortedWhileFetched,
    /// The place of a command that waits is not given back.
    PlaceKept,
}

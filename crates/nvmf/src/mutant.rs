//! Deliberate defects, one at a time, with which the simulation proves that it can fail. Only feature `mutants` compiles them in.

/// Evaluates to true when a defect is switched on; constant `false` without feature `mutants`.
macro_rules! mutant {
    ($name:ident) => {{
        #[cfg(feature = "mutants")]
        {
            $crate::mutant::is_on($crate::mutant::Mutant::$name)
        }
        #[cfg(not(feature = "mutants"))]
        {
            false
        }
    }};
}

#[cfg(feature = "mutants")]
mod switch {
    use std::cell::Cell;

    macro_rules! mutants {
        ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
            /// A defect of the target.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum Mutant {
                $($(#[doc = $doc])+ $name,)+
            }

            impl Mutant {
                /// All defects.
                pub const ALL: &[Mutant] = &[$(Mutant::$name),+];
            }
        };
    }

    mutants! {
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
        /// The place of a command that waits is not given back.
        PlaceKept,
    }

    thread_local! {
        static ON: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Switches one defect on for what this thread runs, or switches all off.
    pub fn set(mutant: Option<Mutant>) {
        ON.set(mutant);
    }

    pub(crate) fn is_on(mutant: Mutant) -> bool {
        ON.get() == Some(mutant)
    }
}

#[cfg(feature = "mutants")]
pub(crate) use switch::is_on;
#[cfg(feature = "mutants")]
pub use switch::{Mutant, set};

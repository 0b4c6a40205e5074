//! Deliberate defects, one at a time, by which the tests prove that they can fail. Compiled in by feature `mutants` only.

/// Whether a defect is switched on; constant `false` without feature `mutants`.
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

    /// A defect of the engine.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Mutant {
        /// A region reaches one byte too far.
        BoundOffByOne,
        /// A request is acknowledged although its bytes were not placed.
        AckBeforePlacement,
        /// A duplicate SEND is executed again.
        DuplicateExecuted,
        /// A packet after a gap is executed.
        GapAccepted,
        /// A PSN comparison does not wrap.
        PsnDoesNotWrap,
        /// A NAK that reports a gap acknowledges the packet that it asks for.
        GapNakAcknowledges,
        /// An RNR NAK is taken as an acknowledgement.
        RnrIsAck,
        /// A READ response is placed one packet too low.
        ReadPlacedLow,
        /// A FLUSH is answered before it has finished.
        FlushAnsweredEarly,
        /// An acknowledgement past a READ completes it without its data.
        AckCompletesRead,
        /// The ICRC is not checked.
        IcrcIgnored,
        /// The last packet of a message is never sent again.
        LastNotResent,
        /// A READ or FLUSH that is replayed waits behind answers to later requests.
        ReplayBehindAll,
        /// Retries are not counted.
        RetriesNeverEnd,
        /// A QP in error does not flush its receives.
        ReceivesForgotten,
        /// A type 2 window serves every QP.
        WindowOfAnyQp,
        /// A SEND with invalidate leaves the key as it was.
        InvalidateForgotten,
        /// A QP in SQD begins new requests.
        SqdBeginsNew,
        /// A fenced request does not wait.
        FenceIgnored,
        /// An atomic operation takes any address.
        AtomicMisaligned,
        /// An atomic operation does not wait for a FLUSH before it.
        AtomicPassesFlush,
        /// A message of UC goes on after a gap.
        UcGapAccepted,
        /// A packet of UC that is late or a copy begins a message.
        UcLateAccepted,
        /// A message of UC that is dropped uses up its receive.
        UcDropUsesReceive,
        /// A send request of UC or UD that fails leaves the QP in RTS.
        SqeNotEntered,
        /// The Q_Key is not checked.
        QkeyIgnored,
        /// A datagram's header is not placed.
        GrhLeftOut,
        /// The header is not counted among a datagram's bytes.
        GrhNotCounted,
        /// What is sent to a group reaches QPs that are not attached.
        McastToAll,
        /// What is sent to a group reaches one of the attached QPs alone.
        McastToFirst,
        /// A send request of UC or UD that fails takes the QP to Error.
        SqeIsError,
    }

    impl Mutant {
        /// The defects that the simulation's traffic comes upon.
        pub const SIMULATED: [Mutant; 25] = [
            Mutant::BoundOffByOne,
            Mutant::AckBeforePlacement,
            Mutant::DuplicateExecuted,
            Mutant::GapAccepted,
            Mutant::PsnDoesNotWrap,
            Mutant::GapNakAcknowledges,
            Mutant::RnrIsAck,
            Mutant::ReadPlacedLow,
            Mutant::FlushAnsweredEarly,
            Mutant::AckCompletesRead,
            Mutant::IcrcIgnored,
            Mutant::LastNotResent,
            Mutant::ReplayBehindAll,
            Mutant::RetriesNeverEnd,
            Mutant::ReceivesForgotten,
            Mutant::UcGapAccepted,
            Mutant::UcLateAccepted,
            Mutant::UcDropUsesReceive,
            Mutant::SqeNotEntered,
            Mutant::QkeyIgnored,
            Mutant::GrhLeftOut,
            Mutant::GrhNotCounted,
            Mutant::McastToAll,
            Mutant::McastToFirst,
            Mutant::SqeIsError,
        ];
    }

    thread_local! {
        static ON: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Switches one defect on for engines driven by this thread, or all off.
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

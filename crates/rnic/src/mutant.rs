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

    macro_rules! mutants {
        ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
            /// A defect of the engine.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum Mutant {
                $($(#[doc = $doc])+ $name,)+
            }

            impl Mutant {
                /// All of them.
                pub const ALL: &[Mutant] = &[$(Mutant::$name),+];
            }
        };
    }

    mutants! {
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
        /// A gap is reported by bitmap to a peer that did not agree to it.
        SackUnagreed,
        /// A gap is kept to oneself.
        SackNeverSent,
        /// A bitmap begins one packet too late.
        SackBeginsLate,
        /// A bitmap acknowledges the packet that it asks for.
        SackAcknowledgesHole,
        /// What comes after a gap is dropped.
        KeptNothing,
        /// What was kept is executed before all that is missing has come.
        KeptBeforeGapCloses,
        /// A message that was kept is not solicited any more.
        KeptSolicitedLost,
        /// A request that was kept and finds no receive is passed over.
        KeptRefusedSkipped,
        /// What was kept behind the next gap is acknowledged.
        AckPastHole,
        /// A hole counts as filled without a packet.
        HoleNeverResent,
        /// A hole that was filled in vain is not filled again.
        HoleFilledOnce,
        /// Nobody asks what the peer has when no answer comes.
        ProbeNeverSent,
        /// READ data that came late completes all that was sent.
        AnsweredIsAll,
        /// Packets that are reported as arrived count as under way.
        ArrivedStillInFlight,
        /// Every loss halves the window.
        EveryLossHalves,
        /// The limit of a shared receive queue is not disarmed when it was told.
        SrqLimitStaysArmed,
        /// The limit of a shared receive queue is not told.
        SrqLimitUntold,
        /// Nobody is told that a QP in error uses no more of a shared receive queue.
        LastWqeUntold,
        /// A message of XRC takes its receive from another queue than it names.
        XrcSrqIgnored,
        /// A solicited message wakes nobody.
        SolicitedIgnored,
        /// A key is looked up without its tag.
        TagIgnored,
        /// Binding a window does not change its key.
        WindowKeyStays,
        /// A window may be bound beyond its region.
        BindUnchecked,
        /// A local invalidation leaves the key as it was.
        LocalInvalidateForgotten,
        /// A region that is registered anew keeps its old memory.
        ReregisterKeepsMemory,
        /// A region that is deregistered stays.
        DeregisterForgotten,
        /// A repeated atomic operation is executed again.
        AtomicReplayExecutes,
        /// A repeated atomic operation is answered without what it found.
        AtomicReplayLost,
        /// A repeated ATOMIC WRITE is executed again.
        AtomicWriteReplayExecutes,
        /// A FLUSH leaves out its last byte.
        FlushShort,
        /// A FLUSH that failed is answered as one that succeeded.
        FailedFlushAnswered,
        /// A part of a READ that is asked for again is taken from its beginning.
        ReadReplayedFromStart,
        /// The responder remembers one request less than it promised.
        ResourceForgotten,
        /// The responder keeps for replay what is so old that it seems to come after a repeat.
        OldResourceKept,
        /// More requests are sent than the peer can remember.
        InitiatorDepthIgnored,
        /// The send queue is said to have drained while requests are under way.
        SqDrainedEarly,
        /// Nobody is told that the send queue has drained.
        SqDrainedUntold,
        /// RNR retries are not counted.
        RnrRetriesNeverEnd,
        /// A QP in error flushes its send requests in the wrong order.
        FlushedBackwards,
        /// Nobody is told that a QP went to error.
        QpErrorUntold,
        /// Nobody is told that a completion queue overran.
        OverrunUntold,
        /// Nobody is told of the first request in RTR.
        EstablishedUntold,
        /// A device that was restarted numbers its QPs from the beginning.
        NumbersBeginAgain,
        /// A new path is not taken.
        PathStays,
        /// A request that comes again when its connection has ended gets no answer.
        CmAnswerNotRepeated,
        /// A connection that has ended is forgotten at once.
        TimeWaitSkipped,
        /// A DREQ is not answered.
        DreqUnanswered,
        /// A peer that asks for time gets none.
        MraIgnored,
        /// A request by a QP that is connected opens a second connection.
        StaleUnnoticed,
        /// A request that comes again is taken for a new one.
        RequestTaken,
        /// An RTU that was lost is not repeated.
        RtuNotRepeated,
        /// The answer to a resolution that comes again is not repeated.
        SidrAnswerNotRepeated,
        /// The passive user is not told that the connection stands.
        CmEstablishedUntold,
        /// A QP that is detached from a group stays attached.
        DetachForgotten,
        /// A datagram longer than the path MTU is sent.
        UdTooLongSent,
        /// An address handle's traffic class is not sent.
        UdTrafficClassLost,
        /// A request that needs no packet is done before those in front of it.
        DirectOvertakes,
        /// A request that needs no packet is begun in SQD.
        DirectInSqd,
        /// A request whose grant has ended counts as done.
        EndedIsDone,
        /// What a QP's peer was granted stays granted when the QP takes no requests any more.
        GrantOutlivesError,
        /// What a QP's peer was granted stays granted when the QP is destroyed.
        GrantOutlivesQp,
        /// A grant reaches one byte too far.
        GrantOffByOne,
        /// A grant allows what the region does not.
        GrantWithoutRight,
        /// A key is asked for with every request.
        GrantAskedTwice,
        /// A QP whose link within the host broke goes on sending through it.
        LinkOutlived,
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

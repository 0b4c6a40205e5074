//! Deliberate defects of the engine (`crates/mutant.rs`), which the simulation must catch.
//!
//! A defect here violates the protocol in a way that no change of a single operator, condition or function body gives: those changes
//! are what cargo-mutants makes (`.cargo/mutants.toml`).

#[macro_use]
#[path = "../../mutant.rs"]
mod switch;

#[cfg(feature = "mutants")]
mutants! {
    "A defect of the engine.";
    /// A region extends one byte too far.
    BoundOffByOne,
    /// A request is acknowledged although its bytes were not placed.
    AckBeforePlacement,
    /// A duplicate SEND is executed again.
    DuplicateExecuted,
    /// A packet after a gap is executed.
    GapAccepted,
    /// A PSN comparison does not wrap.
    PsnDoesNotWrap,
    /// A NAK that reports a gap also acknowledges the packet that it requests.
    GapNakAcknowledges,
    /// An RNR NAK is taken as an acknowledgement.
    RnrIsAck,
    /// A READ response is placed one packet too low.
    ReadPlacedLow,
    /// A FLUSH is answered before it has finished.
    FlushAnsweredEarly,
    /// An acknowledgement past a READ completes it without its data.
    AckCompletesRead,
    /// The last packet of a message is never sent again.
    LastNotResent,
    /// Retries are not counted.
    RetriesNeverEnd,
    /// A QP in SQD begins new requests.
    SqdBeginsNew,
    /// An atomic operation does not wait for a FLUSH before it.
    AtomicPassesFlush,
    /// A UC packet that is late or a duplicate begins a message.
    UcLateAccepted,
    /// A failed send request of UC or UD leaves the QP in RTS.
    SqeNotEntered,
    /// The GRH of a datagram is not placed.
    GrhLeftOut,
    /// A datagram to a group reaches QPs that are not attached to it.
    McastToAll,
    /// A datagram to a group reaches only one of the attached QPs.
    McastToFirst,
    /// A failed send request of UC or UD moves the QP to Error.
    SqeIsError,
    /// The responder reports a gap by bitmap to a peer that did not agree to it.
    SackUnagreed,
    /// A bitmap begins one packet too late.
    SackBeginsLate,
    /// A bitmap acknowledges the packet that it requests.
    SackAcknowledgesHole,
    /// The responder executes kept packets before all missing packets have arrived.
    KeptBeforeGapCloses,
    /// A kept message loses its solicited event.
    KeptSolicitedLost,
    /// The responder skips a kept request that finds no receive.
    KeptRefusedSkipped,
    /// The responder acknowledges packets that it keeps behind the next gap.
    AckPastHole,
    /// The requester fills a hole only once, even if that packet is lost as well.
    HoleFilledOnce,
    /// READ data that arrives late completes every request that was sent.
    AnsweredIsAll,
    /// Packets that the peer reports as arrived still count as in flight.
    ArrivedStillInFlight,
    /// Every loss halves the window.
    EveryLossHalves,
    /// The limit of a shared receive queue stays armed after its event.
    SrqLimitStaysArmed,
    /// The limit of a shared receive queue raises no event.
    SrqLimitUntold,
    /// The device raises no event when a QP in Error stops using its shared receive queue.
    LastWqeUntold,
    /// An XRC message takes its receive from a queue other than the one that it names.
    XrcSrqIgnored,
    /// A key is looked up without its tag.
    TagIgnored,
    /// Binding a window does not change its key.
    WindowKeyStays,
    /// A region that is registered anew keeps its old memory.
    ReregisterKeepsMemory,
    /// A repeated atomic operation is executed again.
    AtomicReplayExecutes,
    /// The response to a repeated atomic operation lacks the original value.
    AtomicReplayLost,
    /// A repeated ATOMIC WRITE is executed again.
    AtomicWriteReplayExecutes,
    /// A FLUSH omits its last byte.
    FlushShort,
    /// A FLUSH that failed is answered as one that succeeded.
    FailedFlushAnswered,
    /// The responder answers a repeated request for part of a READ from the beginning of the READ.
    ReadReplayedFromStart,
    /// The responder remembers one request fewer than it announced.
    ResourceForgotten,
    /// The responder keeps a request for replay for so long that its PSN seems to follow that of a repeat.
    OldResourceKept,
    /// The requester sends more requests than the peer can remember.
    InitiatorDepthIgnored,
    /// A QP in error flushes its send requests in the wrong order.
    FlushedBackwards,
    /// The device raises no event when a QP enters Error.
    QpErrorUntold,
    /// A restarted device numbers its QPs from the beginning again.
    NumbersBeginAgain,
    /// A QP ignores a new path.
    PathStays,
    /// A connection that has ended is forgotten at once.
    TimeWaitSkipped,
    /// A DREQ is not answered.
    DreqUnanswered,
    /// A request from a QP that is already connected opens a second connection.
    StaleUnnoticed,
    /// An address handle's traffic class is not sent.
    UdTrafficClassLost,
    /// A request whose grant has ended counts as done.
    EndedIsDone,
    /// Grants to a QP's peer stay valid when the QP is destroyed.
    GrantOutlivesQp,
    /// A grant extends one byte too far.
    GrantOffByOne,
    /// A QP whose link within the host broke continues to send through that link.
    LinkOutlived,
    /// A coalesced packet takes one PSN.
    CoalescedCountsOne,
    /// The acknowledgement of a coalesced packet covers the packet behind it.
    CoalescedAckPast,
    /// A request that its peer took out of a ring, but left to packets, is done.
    DeferredIsDone,
    /// A request that is to be sent again counts as done.
    AgainIsDone,
    /// A request whose memory can no longer be read counts as placed.
    EndedIsPlaced,
    /// A request that its peer took out of a ring and executed ends the one behind it too.
    TakenPast,
    /// A request in a ring is executed although its turn has not come.
    TakenOutOfTurn,
    /// News of a request that the peer has taken end the one behind it in the lane too.
    LaneEndsPast,
    /// The device forgets the PSNs of the youngest request that it takes back from a lane.
    LaneRecallForgets,
    /// The device takes the peer's sequence back from a lane as it lent it.
    RecallForgetsTurn,
    /// A request carries an acknowledgement to a peer that did not agree to it.
    CarriedUnagreed,
    /// A carried acknowledgement covers one packet too many.
    CarriedPast,
    /// A request carries an acknowledgement past a FLUSH that runs.
    CarriedPassesFlush,
}

//! One end of a line: a shared queue pair between two nodes, and the ones after it. No I/O, no clock, no device.
//!
//! A line outlives its queue pairs. One ends when it has failed, at either end, or when nobody needs it now: the user of each end stops, takes what
//! is still to come, and says so, and both ends tell each other how far they have executed the other's requests. Then the line is *away*: it costs
//! nothing, and whichever end wants to send opens the next queue pair, as it did the first one. What did not take effect on one is sent on
//! the next.
//!
//! ```text
//! Away -> Asked --------------> Ready -> (Stopping -> Closing ->) Ending -> Told -> Away
//!      -> Answered -----------> Ready
//! ```
//!
//! Both ends are alike. Questions of a node arrive in order, and so do its answers, but an answer may arrive behind a later question. So an end that was
//! opened by its peer tells nothing of its end until the peer has said that it is ready.

/// Progress of an end. `A` names a question of the peer, `T` is what the peer tells of its end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Line<A, T> {
    stage: Stage<A, T>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage<A, T> {
    /// There is no queue pair.
    Away,
    /// The peer was asked for its end.
    Asked,
    /// The peer was told of this end, which receives. Set if that has failed already.
    Answered(bool),
    /// Both ends are ready.
    Ready,
    /// The user is asked whether it needs the queue pair, on behalf of a question of the peer if there is one.
    Stopping(Option<A>),
    /// The user has stopped, and the peer is asked whether it needs the queue pair.
    Closing,
    /// The user takes what is still to come. What the peer has told.
    Ending(Option<T>),
    /// The peer was told. It has told nothing yet.
    Told,
}

/// An event of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input<A, T> {
    /// There is an own end, and the peer was asked for the other one.
    Asks,
    /// The peer has asked; the own end is up.
    Accepts,
    /// The peer has told of its end; the own one is up.
    Opened,
    /// The peer does not open it now.
    Later,
    /// The peer is ready.
    PeerReady,
    /// The queue pair is to be put away if nobody needs it, or to make room for another one.
    Close { for_room: bool },
    /// The peer asks for that.
    CloseAsked(A),
    /// The user of the line does not need it now, and has stopped; or it does.
    UserSays(bool),
    /// The peer does not need it now, and stops; or it does.
    PeerSays(bool),
    /// The queue pair has failed.
    Failed,
    /// The peer has told of its end.
    Told(T),
    /// The user has taken all that was to come. So many messages of the peer were handled.
    Drained(u32),
}

/// An action for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Do<A, T> {
    /// Tell the peer that this end is ready.
    TellReady,
    /// Tell the user that the queue pair can be used.
    Ready,
    /// Ask the user whether it needs the queue pair: [`Input::UserSays`].
    AskUser { for_room: bool },
    /// Ask the peer whether it does: [`Input::PeerSays`].
    AskPeer,
    /// Answer a question of the peer.
    Answer(A, bool),
    /// The queue pair is not put away.
    Stays,
    /// Put the queue pair in error, and have the user stop and take what is to come: [`Input::Drained`].
    Stop,
    /// Destroy the queue pair, and tell the peer what was executed.
    Tell(u32),
    /// Tell the user what the peer has told: the line is away.
    Away(T),
    /// The peer does not keep to the protocol: end the line.
    Over,
}

impl<A: Copy, T: Clone> Line<A, T> {
    /// Returns an end without a queue pair.
    pub(super) fn new() -> Line<A, T> {
        Line { stage: Stage::Away }
    }

    /// Returns whether the peer was asked for its end, and has not answered.
    pub(super) fn is_asked(&self) -> bool {
        matches!(self.stage, Stage::Asked)
    }

    /// Returns whether there is no queue pair.
    pub(super) fn is_away(&self) -> bool {
        matches!(self.stage, Stage::Away)
    }

    /// Returns whether the user takes what is still to come.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.stage, Stage::Ending(_))
    }

    /// Returns whether it waits for somebody who may not keep it waiting for long.
    pub(super) fn is_timed(&self) -> bool {
        matches!(self.stage, Stage::Answered(_) | Stage::Ending(_) | Stage::Told)
    }

    /// Handles an event. Returns what is to be done, in this order. An event that comes too late changes nothing.
    pub(super) fn on(&mut self, input: Input<A, T>) -> Vec<Do<A, T>> {
        let stage = std::mem::replace(&mut self.stage, Stage::Away);
        let (next, what) = step(stage, input);
        self.stage = next;
        what
    }
}

fn step<A: Copy, T>(stage: Stage<A, T>, input: Input<A, T>) -> (Stage<A, T>, Vec<Do<A, T>>) {
    /// Begins the end of a queue pair in use.
    fn stop<A, T>(asked: Option<A>, told: Option<T>) -> (Stage<A, T>, Vec<Do<A, T>>) {
        let answer = asked.map(|asked| Do::Answer(asked, true));
        let what = answer.into_iter().chain([Do::Stop]).collect();
        (Stage::Ending(told), what)
    }
    match (stage, input) {
        // Opening.
        (Stage::Away, Input::Asks) => (Stage::Asked, vec![]),
        (Stage::Away | Stage::Asked, Input::Accepts) => (Stage::Answered(false), vec![]),
        (Stage::Asked, Input::Opened) => (Stage::Ready, vec![Do::TellReady, Do::Ready]),
        (Stage::Asked, Input::Later) => (Stage::Away, vec![]),
        (Stage::Answered(false), Input::PeerReady) => (Stage::Ready, vec![Do::Ready]),
        (Stage::Answered(true), Input::PeerReady) => (Stage::Ending(None), vec![Do::Ready, Do::Stop]),
        // Putting away.
        (Stage::Ready, Input::Close { for_room }) => (Stage::Stopping(None), vec![Do::AskUser { for_room }]),
        // Its user does not need the queue pair, or has to do without it.
        (Stage::Ready, Input::CloseAsked(asked)) => {
            (Stage::Stopping(Some(asked)), vec![Do::AskUser { for_room: true }])
        }
        (Stage::Stopping(None), Input::CloseAsked(asked)) => (Stage::Stopping(Some(asked)), vec![]),
        (Stage::Closing, Input::CloseAsked(asked)) => stop(Some(asked), None),
        (stage, Input::CloseAsked(asked)) => {
            let ends = matches!(stage, Stage::Ending(_) | Stage::Told);
            (stage, vec![Do::Answer(asked, ends)])
        }
        (Stage::Stopping(None), Input::UserSays(true)) => (Stage::Closing, vec![Do::AskPeer]),
        (Stage::Stopping(Some(asked)), Input::UserSays(true)) => stop(Some(asked), None),
        // A connection may have come meanwhile, which waits for news of the queue pair.
        (Stage::Stopping(asked), Input::UserSays(false)) => {
            let answer = asked.map(|asked| Do::Answer(asked, false));
            let what = answer.into_iter().chain([Do::Stays, Do::Ready]).collect();
            (Stage::Ready, what)
        }
        (Stage::Closing, Input::PeerSays(true)) => stop(None, None),
        (Stage::Closing, Input::PeerSays(false)) => (Stage::Ready, vec![Do::Stays, Do::Ready]),
        // Ending.
        (Stage::Answered(_), Input::Failed) => (Stage::Answered(true), vec![]),
        (Stage::Ready | Stage::Closing, Input::Failed) => stop(None, None),
        (Stage::Ready | Stage::Closing, Input::Told(told)) => stop(None, Some(told)),
        (Stage::Stopping(asked), Input::Failed) => stop(asked, None),
        (Stage::Stopping(asked), Input::Told(told)) => stop(asked, Some(told)),
        (Stage::Ending(None), Input::Told(told)) => (Stage::Ending(Some(told)), vec![]),
        (Stage::Ending(None), Input::Drained(messages)) => (Stage::Told, vec![Do::Tell(messages)]),
        (Stage::Ending(Some(told)), Input::Drained(messages)) => {
            (Stage::Away, vec![Do::Tell(messages), Do::Away(told)])
        }
        (Stage::Told, Input::Told(told)) => (Stage::Away, vec![Do::Away(told)]),
        (stage, Input::Told(_)) => (stage, vec![Do::Over]),
        (stage, _) => (stage, vec![]),
    }
}

#[cfg(test)]
mod tests;

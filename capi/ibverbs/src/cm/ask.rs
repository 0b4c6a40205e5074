//! Asking a peer for a connection, or for a datagram service: the answer comes as an event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::EventQueue;

use super::id::IdShared;

/// Time between two tries to reach a peer that does not listen yet.
const LISTENS_SOON: Duration = Duration::from_millis(50);
const LISTENS_SOON_TRIES: u32 = 6;

/// A question to a peer.
pub(super) trait Question: Send + 'static {
    /// The request, which waits for its answer. Dropping it withdraws it.
    type Pending: Send;
    type Answer;
    type Error;

    fn ask(&self) -> Result<Self::Pending, Self::Error>;

    fn notify(pending: &Self::Pending, events: &EventQueue, token: u64);

    fn poll(pending: &mut Self::Pending) -> Option<Result<Self::Answer, Self::Error>>;

    /// Returns whether the peer has answered that nobody listens.
    fn nobody_listens(error: &Self::Error) -> bool;

    /// Reports the result to the program.
    fn report(&self, shared: &Arc<IdShared>, result: Result<Self::Answer, Self::Error>);

    /// Ends what waits for the answer, when the program no longer does.
    fn withdrawn(&self) {}
}

/// State of a question.
enum Step<P> {
    Asked(P),
    /// Nobody listened: asks again at this time.
    AsksAt(Instant),
    Over,
}

/// A question that is being asked. While nobody listens, it is asked again for a moment. Programs that start together rely on resolving
/// an address to take longer than listening, as it does where it asks the network; here it does not.
struct Asking<Q: Question> {
    question: Q,
    step: Step<Q::Pending>,
    tries: u32,
}

/// A question of any kind.
pub(super) trait Ask: Send {
    /// Takes the steps that are possible now. Returns the time of the next one if it needs no event.
    fn advance(&mut self, shared: &Arc<IdShared>, queue: (&EventQueue, u64)) -> Option<Instant>;

    fn withdraw(self: Box<Self>);
}

/// Returns a question that is asked by [`Ask::advance`].
pub(super) fn asking<Q: Question>(question: Q) -> Box<dyn Ask> {
    let step = Step::AsksAt(Instant::now());
    Box::new(Asking {
        question,
        step,
        tries: 0,
    })
}

impl<Q: Question> Ask for Asking<Q> {
    fn advance(&mut self, shared: &Arc<IdShared>, queue: (&EventQueue, u64)) -> Option<Instant> {
        let result = match &mut self.step {
            Step::Asked(pending) => Q::poll(pending)?,
            Step::AsksAt(at) if *at > Instant::now() => return Some(*at),
            Step::AsksAt(_) => {
                self.tries += 1;
                match self.question.ask() {
                    Ok(pending) => {
                        Q::notify(&pending, queue.0, queue.1);
                        self.step = Step::Asked(pending);
                        return None;
                    }
                    Err(error) => Err(error),
                }
            }
            Step::Over => return None,
        };
        if result.as_ref().is_err_and(Q::nobody_listens) && self.tries <= LISTENS_SOON_TRIES {
            // There is no notification when a peer begins to listen.
            let at = Instant::now() + LISTENS_SOON;
            self.step = Step::AsksAt(at);
            return Some(at);
        }
        self.step = Step::Over;
        self.question.report(shared, result);
        None
    }

    fn withdraw(self: Box<Self>) {
        let Asking { question, step, .. } = *self;
        if !matches!(step, Step::Over) {
            drop(step);
            question.withdrawn();
        }
    }
}

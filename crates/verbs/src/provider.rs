//! Which provider an object is of. The types of the vocabulary hold what their provider made, and what all providers have in common:
//! who keeps whom alive, and that objects of different devices do not go together.

/// What a provider made: an object of [`crate::soft`], or of an RNIC.
#[derive(Clone, Debug)]
pub(crate) enum Provided<S, H> {
    /// The RNIC in user space.
    Soft(S),
    /// An RNIC, through the system's libraries.
    #[expect(dead_code, reason = "no provider makes it yet")]
    Hw(H),
}

impl<S, H> Provided<S, H> {
    pub(crate) fn soft(&self) -> Option<&S> {
        match self {
            Provided::Soft(object) => Some(object),
            Provided::Hw(_) => None,
        }
    }
}

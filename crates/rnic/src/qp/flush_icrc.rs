//! Which ICRC a peer wants on a FLUSH: the specification's, or rxe's (see [`Flow::rxe_flush_icrc`]).
//!
//! A peer drops the other one without a word, so a requester that is not told tries both: it changes over whenever it goes
//! back to a FLUSH. A FLUSH that was answered at once settles it. One that was answered after going back does not, since
//! that answer may have been a late one to the ICRC before.
//!
//! [`Flow::rxe_flush_icrc`]: rdmux_wire::icrc::Flow::rxe_flush_icrc

/// What a requester knows about its peer's ICRC of FLUSHes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlushIcrc {
    of_rxe: bool,
    settled: bool,
    resent: bool,
}

impl FlushIcrc {
    /// Knowledge from outside: the peer is rdmux, or sent a FLUSH itself.
    pub(crate) fn settle(&mut self, of_rxe: bool) {
        *self = FlushIcrc {
            of_rxe,
            settled: true,
            resent: false,
        };
    }

    /// Whether FLUSHes go out with rxe's ICRC.
    pub(crate) fn is_of_rxe(self) -> bool {
        self.of_rxe
    }

    /// The oldest request without an answer is a FLUSH, and is sent again.
    pub(crate) fn resend(&mut self) {
        if !self.settled {
            self.of_rxe = !self.of_rxe;
            self.resent = true;
        }
    }

    /// A FLUSH was answered.
    pub(crate) fn answered(&mut self) {
        self.settled |= !self.resent;
        self.resent = false;
    }
}

//! The ICRC that a peer expects on a FLUSH: the specification's, or rxe's (see [`Flow::rxe_flush_icrc`]).
//!
//! A peer silently drops a FLUSH with the other one. So a requester that does not know the peer's variant tries both: it changes
//! over whenever it retransmits a FLUSH. A FLUSH that was answered without retransmission settles the variant. One that was
//! answered after a retransmission does not, since that response may have been a late one to the FLUSH with the previous ICRC.
//!
//! [`Flow::rxe_flush_icrc`]: rdmux_wire::roce::icrc::Flow::rxe_flush_icrc

/// State of a requester's knowledge of the ICRC that its peer expects on FLUSHes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlushIcrc {
    of_rxe: bool,
    settled: bool,
    resent: bool,
}

impl FlushIcrc {
    /// Settles the variant by other evidence: the peer is rdmux, or sent a FLUSH itself.
    pub(crate) fn settle(&mut self, of_rxe: bool) {
        *self = FlushIcrc {
            of_rxe,
            settled: true,
            resent: false,
        };
    }

    /// Returns whether the requester sends FLUSHes with rxe's ICRC.
    pub(crate) fn is_of_rxe(self) -> bool {
        self.of_rxe
    }

    /// Notes that the requester retransmits from a FLUSH, the oldest request without a response.
    pub(crate) fn resend(&mut self) {
        if !self.settled {
            self.of_rxe = !self.of_rxe;
            self.resent = true;
        }
    }

    /// Notes that a FLUSH was answered.
    pub(crate) fn answered(&mut self) {
        self.settled |= !self.resent;
        self.resent = false;
    }
}

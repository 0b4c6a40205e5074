//! State that a device keeps because of its peers, and its upper bounds.

use crate::cm;
use crate::qp::responder::ANSWERS_MAX;

/// Amount of state that a device keeps at the moment because of packets that peers sent. A peer cannot make it exceed the bounds
/// that [`Backlog::is_bounded`] checks, whatever it sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Packets that were received ahead of a gap, over all QPs.
    pub kept_packets: usize,
    /// Responses that are not sent yet, over all QPs.
    pub answers: usize,
    /// Messages of the connection manager that wait to be sent.
    pub cm_messages: usize,
    /// Connections in TimeWait.
    pub cm_resting: usize,
}

impl Backlog {
    /// Returns whether each amount is within its bound for a device with this many QPs.
    pub fn is_bounded(&self, qps: usize) -> bool {
        // A SACK bitmap reports every packet that a responder keeps; a requester does not ask for more READ data ahead of a gap
        // either.
        let kept_max = 2 * 8 * rdmux_wire::roce::sack::Sack::BYTES_MAX;
        // A replayed response may be inserted in front of one that is pending already.
        let answers_max = ANSWERS_MAX + 1;
        self.kept_packets <= qps * kept_max
            && self.answers <= qps * answers_max
            && self.cm_messages <= cm::OUT_MAX
            && self.cm_resting <= 2 * cm::RESTING_MAX
    }
}

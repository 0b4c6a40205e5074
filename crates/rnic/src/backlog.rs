//! What a device keeps because of its peers, and how much that may be.

use crate::cm;
use crate::qp::responder::ANSWERS_MAX;

/// How much a device keeps at the moment because of what peers sent. A peer cannot make it more than [`Backlog::is_bounded`]
/// says, whatever it sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Packets that came before their turn, of all QPs.
    pub kept_packets: usize,
    /// Answers that are owed, of all QPs.
    pub answers: usize,
    /// Messages of the connection manager that wait to be sent.
    pub cm_messages: usize,
    /// Connections and requests at rest.
    pub cm_resting: usize,
}

impl Backlog {
    /// Whether it is as small as it has to be for this many QPs.
    pub fn is_bounded(&self, qps: usize) -> bool {
        // A bitmap says of every packet kept by a responder that it is there; a requester asks for no more either.
        let kept_max = 2 * 8 * rdmux_wire::sack::Sack::BYTES_MAX;
        // An answer may be put before one that is owed already.
        let answers_max = ANSWERS_MAX + 1;
        self.kept_packets <= qps * kept_max
            && self.answers <= qps * answers_max
            && self.cm_messages <= cm::OUT_MAX
            && self.cm_resting <= 2 * cm::RESTING_MAX
    }
}

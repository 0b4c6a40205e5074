//! The nodes that a person has been warned of.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::sync::Mutex;

use super::machine::PEERS_MAX;

/// Time between two warnings about one node.
const WARNING_TIME: Duration = Duration::from_secs(60);

/// See the module. Clones are one: all engines of a node together warn of another node so often.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warned(Arc<Mutex<HashMap<IpAddr, Instant>>>);

impl Warned {
    /// Returns whether it is time to warn of the node of an address, and takes note that this is done.
    pub(super) fn is_due(&self, now: Instant, address: IpAddr) -> bool {
        let mut warned = self.0.lock();
        warned.retain(|_, at| now < *at + WARNING_TIME);
        let is_due = warned.len() < PEERS_MAX && !warned.contains_key(&address);
        if is_due {
            warned.insert(address, now);
        }
        is_due
    }
}

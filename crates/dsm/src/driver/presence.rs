//! Presence of nodes: questions to all of them, and limits of the waits for what they have to answer.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::membership::Membership as Message;

use super::{Driver, Loss};
use crate::protocol;

/// Times for which a node may be silent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Its device, and the node itself once it has sent anything.
    pub lease: Duration,
    /// A node that has sent nothing yet: it may wait for others to join.
    pub joining: Duration,
    /// A node that answers questions, but not what a home, an acquire or the coordinator has to know. Its answer may take as long as another node's end.
    pub answers: Duration,
}

/// Questions to a node whether it takes messages.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// Time of the one that was not answered yet.
    asked: Option<Instant>,
    /// The node has sent a message: it has joined.
    pub(super) has_begun: bool,
}

/// A wait for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wait {
    /// Of a home, or of a writer for one.
    Page(u32, protocol::Wait),
    /// Of an acquire, for a node that may still store what another one has written that is gone by an epoch.
    Settled(u32, u64, NodeId),
    /// Of a member that has lost others, in an epoch.
    Membership(u64, NodeId),
    /// Of a node that makes a region, in an attempt that all others have answered.
    Making(u32, u32),
}

impl Wait {
    fn node(self) -> NodeId {
        match self {
            Wait::Page(_, wait) => wait.node,
            Wait::Membership(_, node) | Wait::Settled(_, _, node) => node,
            Wait::Making(..) => NodeId::FIRST,
        }
    }
}

impl Driver {
    /// Asks all nodes whether they are there, and ends the connections to those that have disconnected, or are silent for too long. Called several
    /// times in a lease.
    pub(crate) fn probe(&mut self, patience: Patience) {
        let now = Instant::now();
        for number in 0..self.peers.len() as u32 {
            if let Some(loss) = self.question(number, now, patience) {
                self.lose(number, loss);
            }
        }
        self.limit_waits(now, patience.answers);
    }

    /// Asks a node, unless it has not answered the question before. Returns a reason to end the connection to it.
    fn question(&mut self, number: u32, now: Instant, patience: Patience) -> Option<Loss> {
        let peer = self.peers.get_mut(number as usize)?;
        let link = peer.link.as_mut()?;
        if link.is_ended() {
            return Some(Loss::Left);
        }
        match link.probe(now) {
            Ok(Some(since)) if now - since >= patience.lease => return Some(Loss::Silent(now - since)),
            Ok(_) => {}
            Err(error) => return Some(error.into()),
        }
        let Questions { asked, has_begun } = &mut peer.questions;
        let Some(since) = *asked else {
            *asked = Some(now);
            self.send(number, Message::Probe.emit());
            return None;
        };
        let limit = match *has_begun {
            true => patience.lease,
            false => patience.lease.max(patience.joining),
        };
        (now - since >= limit).then(|| Loss::Hung(now - since))
    }

    /// Takes an answer.
    pub(super) fn has_answered(&mut self, node: NodeId) {
        if let Some(peer) = self.peer(node.number()) {
            peer.questions.asked = None;
        }
    }

    /// Ends the connections to nodes for whose answers to anything else this one has waited for too long.
    fn limit_waits(&mut self, now: Instant, limit: Duration) {
        let regions = || {
            let regions = (0..).zip(&self.regions);
            regions.filter_map(|(number, region)| Some((number, region.as_ref()?)))
        };
        let pages =
            regions().flat_map(|(number, it)| it.coherence.waits().map(move |wait| Wait::Page(number, wait)));
        let settled = regions().flat_map(|(number, it)| {
            let nodes = it.coherence.awaits_settled().into_iter().flatten();
            nodes.map(move |(epoch, node)| Wait::Settled(number, epoch, node))
        });
        let epoch = self.membership.epoch();
        let members = self.membership.waits_for().map(|it| Wait::Membership(epoch, it));
        let makings = (0..).zip(&self.making);
        let makings =
            makings.filter_map(|(number, it)| Some(Wait::Making(number, it.awaits_outcome(self.own)?)));
        let waits = pages
            .chain(settled)
            .chain(members)
            .chain(makings)
            .filter(|wait| wait.node() != self.own);
        let since = |wait| (wait, self.waits.get(&wait).copied().unwrap_or(now));
        self.waits = waits.map(since).collect::<BTreeMap<Wait, Instant>>();
        let late =
            |(wait, since): (&Wait, &Instant)| (now - *since >= limit).then(|| (wait.node(), now - *since));
        let late: Vec<(NodeId, Duration)> = self.waits.iter().filter_map(late).collect();
        for (node, time) in late {
            self.lose(node.number(), Loss::Unanswered(time));
        }
    }
}

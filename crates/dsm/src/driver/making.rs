//! Regions that are being made: the nodes agree on an address, and learn each other's keys.

use rdmux_verbs::{MemoryRegion, RKey, RemoteBuffer};
use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::joining::{Joining, Step};

use super::release::{Coherence, Shadow};
use super::{Driver, REGIONS_MAX, Region};
use crate::heap::Arena;
use crate::memory::PageBatch;
use crate::protocol;
use crate::region::Pages;

/// An offer of an address by node 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub attempt: u32,
    pub address: u64,
    pub pages: u64,
    pub digest: u64,
}

/// Keys of a node's memory of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    /// That of the frames.
    pub frames: u32,
    /// That of its [`Shadow`], or 0.
    pub shadow: u32,
}

/// Answer of a node to an [`Offer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Mapped(Keys),
    Taken,
}

/// All that the others have said about a region that is being made.
#[derive(Clone, Debug)]
pub(crate) struct Making {
    /// The last offer.
    pub offer: Option<Offer>,
    /// Answers with their attempts, by the numbers of the nodes.
    answers: Vec<Option<(u32, Answer)>>,
    /// The last attempt that this node has answered, and whether it has mapped the region; `None` once nobody waits for the region any more.
    answered: Option<(u32, bool)>,
    /// The attempt that all have agreed to.
    pub agreed: Option<u32>,
    /// The node that cannot make the region.
    pub refused: Option<u32>,
}

impl Making {
    fn new(nodes: usize) -> Making {
        Making {
            offer: None,
            answers: vec![None; nodes],
            answered: None,
            agreed: None,
            refused: None,
        }
    }

    /// Returns the answers of all but one node to an attempt, as far as they have come.
    pub(crate) fn answers(
        &self,
        attempt: u32,
        but: NodeId,
    ) -> impl Iterator<Item = (NodeId, Option<Answer>)> {
        let of_attempt = move |answer: &Option<(u32, Answer)>| {
            answer.filter(|(of, _)| *of == attempt).map(|(_, answer)| answer)
        };
        let nodes = (0..).map_while(NodeId::new).zip(&self.answers);
        nodes
            .map(move |(node, answer)| (node, of_attempt(answer)))
            .filter(move |(node, _)| *node != but)
    }

    /// Returns the attempt whose outcome node 0 has to tell this one, since all others have answered. Agreed is no outcome unless all have mapped the region.
    pub(super) fn awaits_outcome(&self, own: NodeId) -> Option<u32> {
        let (attempt, has_mapped) = self.answered?;
        let have_answered = self
            .answers(attempt, own)
            .all(|(node, answer)| node == NodeId::FIRST || answer.is_some());
        let mut answers = self.answers(attempt, own);
        let is_made = self.agreed == Some(attempt)
            && has_mapped
            && answers.all(|(_, it)| matches!(it, Some(Answer::Mapped(_))));
        let is_told = is_made || self.offer.is_some_and(|it| it.attempt > attempt);
        (have_answered && !is_told && self.refused.is_none()).then_some(attempt)
    }
}

impl Driver {
    /// Takes a message about a region that is being made. Returns false if no correct node sends it.
    pub(super) fn joined(&mut self, from: u32, message: &Joining) -> bool {
        let Joining { region, attempt, .. } = *message;
        let is_first = from == 0;
        let Some(making) = self.making(region) else {
            return false;
        };
        let answer = match message.step {
            Step::Propose {
                address,
                pages,
                digest,
            } => {
                if is_first {
                    making.offer = Some(Offer {
                        attempt,
                        address,
                        pages,
                        digest,
                    });
                }
                return is_first;
            }
            Step::Agreed => {
                if is_first {
                    making.agreed = Some(attempt);
                }
                return is_first;
            }
            Step::Mapped { key, shadow } => Answer::Mapped(Keys { frames: key, shadow }),
            Step::Taken => Answer::Taken,
            Step::Differs => {
                making.refused.get_or_insert(from);
                return true;
            }
        };
        making.answers[from as usize] = Some((attempt, answer));
        self.learn_key(region, from, answer);
        true
    }

    /// Notes that this node waits no more for a region, which is made, or which it cannot make.
    pub(crate) fn end_making(&mut self, region: u32) {
        if let Some(making) = self.making(region) {
            making.answered = None;
        }
    }

    /// Notes that all nodes have mapped a region, and have said by which keys it is read.
    pub(crate) fn agreed(&mut self, region: u32) {
        if let Some(region) = self.region(region) {
            region.is_made = true;
        }
    }

    /// Returns whether a node has answered an offer of a region.
    pub(super) fn has_answered_offer(&self, region: u32, node: u32) -> bool {
        let making = self.making.get(region as usize);
        making.is_some_and(|it| it.answers[node as usize].is_some())
    }

    /// Returns what the others have said about a region; `None` if there cannot be one of this number.
    pub(crate) fn making(&mut self, region: u32) -> Option<&mut Making> {
        let index = region as usize;
        if index >= REGIONS_MAX {
            return None;
        }
        let nodes = self.peers.len();
        while self.making.len() <= index {
            self.making.push(Making::new(nodes));
        }
        self.making.get_mut(index)
    }

    /// Tells all nodes a step of making a region. From its answer on, this node waits for the outcome.
    pub(crate) fn tell_all(&mut self, joining: &Joining) {
        let mapped = match joining.step {
            Step::Mapped { .. } => Some(true),
            Step::Taken => Some(false),
            _ => None,
        };
        if let Some((making, mapped)) = self.making(joining.region).zip(mapped) {
            making.answered = Some((joining.attempt, mapped));
        }
        self.send_to_all(joining.emit());
    }

    /// Adds a region, whose pages this node has mapped and of which it hands out an arena: the others may use it from now on. One with a shadow has
    /// release consistency.
    pub(crate) fn add(
        &mut self,
        pages: Pages,
        mr: MemoryRegion,
        settings: &protocol::Settings,
        arena: Option<Arena>,
        shadow: Option<Shadow>,
    ) {
        let index = settings.region as usize;
        self.regions.resize_with(index, || None);
        self.regions.push(Some(Region {
            coherence: Coherence::new(self.own, settings, shadow),
            pages,
            mr,
            keys: vec![None; self.peers.len()],
            protections: Vec::new(),
            batch: PageBatch::new(),
            is_made: false,
            arena,
            number: settings.region,
            sheet: self.sheet.clone(),
        }));
        for from in 0..self.peers.len() as u32 {
            let making = self.making(settings.region);
            if let Some((_, answer)) = making.and_then(|it| it.answers[from as usize]) {
                self.learn_key(settings.region, from, answer);
            }
        }
    }

    fn learn_key(&mut self, region: u32, from: u32, answer: Answer) {
        if let Some(region) = self.region(region)
            && let Answer::Mapped(keys) = answer
        {
            region.coherence.learn_key(from, keys.shadow);
            region.keys[from as usize] = Some(RemoteBuffer {
                address: 0,
                length: region.mr.length(),
                rkey: RKey(keys.frames),
            });
        }
    }
}

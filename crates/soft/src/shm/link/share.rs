//! Memory of the program that moves into files which peers can map (`rdmux_memory`, `convert.rs`).
//!
//! A peer that gets such memory reaches it by calls at first. After some calls it asks again; then all peers' grants of the region are
//! revoked, its pages move, a chunk in each pass of the engine, and whoever asked meanwhile is granted the file. A region that this process
//! itself has accessed by many calls moves too.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_memory::{ApplicationMemory, Progress};
use rdmux_rnic::{LKey, Memory, NotShared, Rnic, Sharing};

use super::{Ask, LinkState, Links, grantable};

/// Time for which a region waits to move, while a peer is inside of it or the program's thread does something else.
const PATIENCE: Duration = Duration::from_millis(10);
/// Most requests for one region that are answered together.
const ASKS_MAX: usize = 1024;

/// Regions whose memory moves.
#[derive(Debug, Default)]
pub(super) struct Sharings {
    list: Vec<SharedRegion>,
    /// Value of [`ApplicationMemory::wanted_sharing`] at the last look.
    wanted: u32,
    /// Set while pages are left that this thread can move.
    go_on: bool,
}

#[derive(Debug)]
struct SharedRegion {
    /// `None` once the region has lost it.
    memory: Option<Arc<dyn Memory>>,
    lkey: LKey,
    /// Requests of peers, by the ids of their links.
    asks: Vec<(u64, Ask)>,
    since: Instant,
}

impl Sharings {
    /// Returns whether there is something to do.
    #[inline]
    pub(super) fn are_due(&self) -> bool {
        !self.list.is_empty() || self.wanted != ApplicationMemory::wanted_sharing()
    }

    /// Returns whether pages are left that the next pass can move.
    #[inline]
    pub(super) fn can_go_on(&self) -> bool {
        self.go_on
    }

    /// Looks again for regions that this process accesses by many calls: a peer has come.
    pub(super) fn look_again(&mut self) {
        self.wanted = ApplicationMemory::wanted_sharing().wrapping_sub(1);
    }

    /// Returns whether these bytes move, or are about to: no peer may reach them by calls.
    pub(super) fn moves(&self, memory: &ApplicationMemory) -> bool {
        let is_it = |other: &Arc<dyn Memory>| application(other).is_some_and(|other| other.is_same(memory));
        memory.sharing() == Some(Sharing::Moving)
            || self
                .list
                .iter()
                .any(|region| region.memory.as_ref().is_some_and(is_it))
    }

    /// Forgets the memory of a region. Whoever asked for it is answered in the next pass: the region may have got other memory.
    pub(super) fn forget(&mut self, lkey: LKey) {
        for region in self.list.iter_mut().filter(|region| region.lkey == lkey) {
            region.memory = None;
            self.go_on = true;
        }
    }
}

pub(super) fn application(memory: &Arc<dyn Memory>) -> Option<&ApplicationMemory> {
    memory.as_any()?.downcast_ref()
}

/// Why pages do not move now.
enum Hindrance {
    /// May be over in a moment.
    Passing(NotShared),
    Lasting(NotShared),
}

/// The regions of a device that have the same bytes.
struct Same {
    lkeys: Vec<LKey>,
    /// Number of the memories.
    memories: usize,
}

impl Same {
    fn of(rnic: &Rnic, memory: &ApplicationMemory) -> Same {
        let is_it = |other: &Arc<dyn Memory>| application(other).is_some_and(|other| other.is_same(memory));
        let regions = rnic.memories().filter(|(_, other)| is_it(other));
        let (lkeys, mut memories): (_, Vec<_>) = regions
            .map(|(lkey, other)| (lkey, Arc::as_ptr(&other).addr()))
            .unzip();
        memories.sort_unstable();
        memories.dedup();
        Same {
            lkeys,
            memories: memories.len(),
        }
    }
}

/// Returns the memory that a peer asks for if it may be moved into a file.
pub(super) fn movable(rnic: &mut Rnic, peer: (IpAddr, u8), ask: Ask) -> Option<Arc<dyn Memory>> {
    let memory = grantable(rnic, peer, ask).ok()?.memory;
    let sharing = application(&memory)?.sharing();
    matches!(sharing, Some(Sharing::NotYet | Sharing::Moving)).then_some(memory)
}

impl Links {
    /// Begins to move a region's memory, for a peer that waits for it or for this process.
    pub(super) fn begin_sharing(
        &mut self,
        rnic: &Rnic,
        memory: Arc<dyn Memory>,
        lkey: LKey,
        ask: Option<(u64, Ask)>,
    ) {
        let mut begun = self.sharings.list.iter_mut();
        let Some(region) = begun.find(|region| region.lkey == lkey) else {
            // From now on peers access it by packets, and this process waits for itself.
            let lkeys = application(&memory).map(|memory| Same::of(rnic, memory).lkeys);
            self.revoke(|given| lkeys.iter().flatten().any(|lkey| *lkey == given.lkey));
            self.sharings.list.push(SharedRegion {
                memory: Some(memory),
                lkey,
                asks: ask.into_iter().collect(),
                since: Instant::now(),
            });
            return;
        };
        if region.asks.len() < ASKS_MAX {
            region.asks.extend(ask);
        }
    }

    /// Moves the next pages of the regions.
    #[cold]
    pub(super) fn share(&mut self, rnic: &mut Rnic) {
        self.begin_wanted(rnic);
        self.sharings.go_on = false;
        for region in std::mem::take(&mut self.sharings.list) {
            let Some(memory) = region.memory.as_ref().and_then(application) else {
                self.answer_all(rnic, &region.asks);
                continue;
            };
            let same = Same::of(rnic, memory);
            let inside = self.stays.of(|given| same.lkeys.contains(&given.lkey));
            inside.iter().for_each(|stay| stay.close_gate());
            let progress = if inside.iter().any(|stay| !stay.is_over()) {
                Err(Hindrance::Passing(NotShared::PeerInside))
            } else {
                match memory.share_some(same.memories) {
                    Ok(Progress::NotHere) => Err(Hindrance::Passing(NotShared::ThreadAway)),
                    Ok(Progress::Elsewhere) => Err(Hindrance::Passing(NotShared::Overlaps)),
                    Ok(progress) => Ok(progress),
                    Err(reason) => Err(Hindrance::Lasting(reason)),
                }
            };
            let waits = memory.sharing() != Some(Sharing::Shared) && region.since.elapsed() < PATIENCE;
            match progress {
                Ok(Progress::More) => {
                    self.sharings.go_on = true;
                    self.sharings.list.push(region);
                }
                Err(Hindrance::Passing(_)) if waits => self.sharings.list.push(region),
                Err(Hindrance::Passing(reason) | Hindrance::Lasting(reason)) => {
                    memory.refuse_sharing(reason);
                    self.answer_all(rnic, &region.asks);
                }
                Ok(_) => self.answer_all(rnic, &region.asks),
            }
        }
    }

    /// Begins to move the regions that this process accesses by many calls.
    fn begin_wanted(&mut self, rnic: &mut Rnic) {
        let is_up = |link: &super::ShmLink| matches!(link.state, LinkState::Up(_));
        let wanted = ApplicationMemory::wanted_sharing();
        if self.sharings.wanted == wanted {
            return;
        }
        self.sharings.wanted = wanted;
        if !self.grants || !self.list.iter().any(is_up) {
            return;
        }
        let wants =
            |memory: &Arc<dyn Memory>| application(memory).is_some_and(ApplicationMemory::wants_sharing);
        let regions: Vec<_> = rnic.memories().filter(|(_, memory)| wants(memory)).collect();
        for (lkey, memory) in regions {
            self.begin_sharing(rnic, memory, lkey, None);
        }
    }

    fn answer_all(&mut self, rnic: &mut Rnic, asks: &[(u64, Ask)]) {
        for (id, ask) in asks {
            if let Some(link) = self.list.iter_mut().find(|link| link.id == *id) {
                link.answer(rnic, *ask, self.grants);
            }
        }
    }
}

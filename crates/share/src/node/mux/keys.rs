//! Keys: those of own regions, and those of peers' regions as their nodes have told.
//!
//! A request's keys are those of the protection domains of the two applications. On a shared queue pair a region has other keys, of a domain
//! that nodes alone use. So a range and the rights to it are checked here, before anything is posted: the queue pair would fail for all.

use std::collections::HashMap;

use rdmux_rnic::Access;
use rdmux_wire::{LKey, RKey};

/// Most keys of a peer's domains that are kept.
const PEER_KEYS_MAX: usize = 1 << 16;

/// Knowledge of a peer's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum PeerKey {
    /// The region's key on shared queue pairs.
    Known(RKey),
    /// Nothing yet.
    Unknown,
    /// There is no such key, range or right.
    Refused,
}

/// The keys that a connection's requests need.
pub(in crate::node) trait Keys {
    /// Returns the keys on shared queue pairs of a range of an own region; `None` if the region has no such range or rights.
    fn own(&mut self, domain: u64, lkey: LKey, range: (u64, u64), access: Access) -> Option<(LKey, RKey)>;

    /// Returns the key on shared queue pairs of a range of a peer's region. One that is [`PeerKey::Unknown`] is asked for.
    fn peer(&mut self, domain: u64, rkey: RKey, range: (u64, u64), access: Access) -> PeerKey;
}

/// A range of memory with rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) struct Extent {
    pub(in crate::node) start: u64,
    pub(in crate::node) length: u64,
    pub(in crate::node) access: Access,
}

impl Extent {
    /// Returns whether it has a range, `(address, length)`, and the rights.
    pub(in crate::node) fn has(&self, (addr, length): (u64, u64), access: Access) -> bool {
        let at = addr.checked_sub(self.start);
        let end = at.and_then(|at| at.checked_add(length));
        self.access.contains(access) && end.is_some_and(|end| end <= self.length)
    }
}

/// An own region, `T`, with its rights.
#[derive(Debug)]
struct OwnRegion<T> {
    domain: u64,
    extent: Extent,
    rkey: RKey,
    region: T,
}

/// The regions of the node's applications, by the keys that the applications know. The device gives no key to two regions.
#[derive(Debug)]
pub(in crate::node) struct OwnRegions<T> {
    by_lkey: HashMap<u32, OwnRegion<T>>,
    by_rkey: HashMap<u32, LKey>,
}

impl<T> Default for OwnRegions<T> {
    fn default() -> OwnRegions<T> {
        OwnRegions {
            by_lkey: HashMap::new(),
            by_rkey: HashMap::new(),
        }
    }
}

impl<T> OwnRegions<T> {
    /// Adds a region.
    pub(in crate::node) fn insert(
        &mut self,
        domain: u64,
        (lkey, rkey): (LKey, RKey),
        extent: Extent,
        region: T,
    ) {
        let region = OwnRegion {
            domain,
            extent,
            rkey,
            region,
        };
        self.by_lkey.insert(lkey.0, region);
        self.by_rkey.insert(rkey.0, lkey);
    }

    /// Returns the region of a key.
    pub(in crate::node) fn of_lkey(&self, lkey: LKey) -> Option<&T> {
        Some(&self.by_lkey.get(&lkey.0)?.region)
    }

    /// Removes a region. Returns it with its protection domain.
    pub(in crate::node) fn remove(&mut self, lkey: LKey) -> Option<(u64, T)> {
        let removed = self.by_lkey.remove(&lkey.0)?;
        self.by_rkey.remove(&removed.rkey.0);
        Some((removed.domain, removed.region))
    }

    /// Returns the region of a key that a domain's queue pairs may use for a range.
    pub(in crate::node) fn get(
        &mut self,
        domain: u64,
        lkey: LKey,
        range: (u64, u64),
        access: Access,
    ) -> Option<&mut T> {
        let found = self.by_lkey.get_mut(&lkey.0)?;
        (found.domain == domain && found.extent.has(range, access)).then_some(&mut found.region)
    }

    /// Returns the region of a key that a peer of a domain's queue pairs may use, for the peer's node.
    #[cfg(test)]
    pub(in crate::node) fn get_remote(&mut self, domain: u64, rkey: RKey) -> Option<(Extent, &mut T)> {
        let lkey = self.by_rkey.get(&rkey.0)?;
        let found = self.by_lkey.get_mut(&lkey.0)?;
        (found.domain == domain).then_some((found.extent, &mut found.region))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Asked,
    There(RKey, Extent),
    Gone,
}

/// The keys of one peer's regions.
#[derive(Debug, Default)]
pub(in crate::node) struct PeerKeys {
    told: HashMap<(u64, u32), Told>,
    /// Those to ask for.
    wanted: Vec<(u64, RKey)>,
}

impl PeerKeys {
    /// Returns what is known of a key.
    pub(in crate::node) fn get(
        &mut self,
        domain: u64,
        rkey: RKey,
        range: (u64, u64),
        access: Access,
    ) -> PeerKey {
        let name = (domain, rkey.0);
        match self.told.get(&name) {
            Some(Told::There(key, extent)) => match extent.has(range, access) {
                true => PeerKey::Known(*key),
                false => PeerKey::Refused,
            },
            Some(Told::Asked) => PeerKey::Unknown,
            // It may be there when it is used for the next time.
            Some(Told::Gone) => {
                self.told.remove(&name);
                PeerKey::Refused
            }
            None => {
                if self.told.len() >= PEER_KEYS_MAX {
                    self.told.retain(|_, told| *told == Told::Asked);
                }
                if self.told.len() < PEER_KEYS_MAX {
                    self.told.insert(name, Told::Asked);
                    self.wanted.push((domain, rkey));
                }
                PeerKey::Unknown
            }
        }
    }

    /// Returns a key to ask for.
    pub(in crate::node) fn poll_wanted(&mut self) -> Option<(u64, RKey)> {
        self.wanted.pop()
    }

    /// Notes an answer: a key on shared queue pairs and its range, or that there is no such key. One that was not asked for is ignored.
    pub(in crate::node) fn answered(&mut self, domain: u64, rkey: RKey, answer: Option<(RKey, Extent)>) {
        if let Some(told @ Told::Asked) = self.told.get_mut(&(domain, rkey.0)) {
            *told = match answer {
                Some((key, extent)) => Told::There(key, extent),
                None => Told::Gone,
            };
        }
    }

    /// Forgets a key. What has been posted with it may still be in flight.
    pub(in crate::node) fn forget(&mut self, domain: u64, rkey: RKey) {
        let name = (domain, rkey.0);
        match self.told.get_mut(&name) {
            // The answer may be on its way: it is the newer one, or says the same.
            Some(Told::Asked) | None => {}
            Some(_) => drop(self.told.remove(&name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent {
        start: 0x1000,
        length: 0x100,
        access: Access::LOCAL_WRITE.union(Access::REMOTE_WRITE),
    };

    #[test]
    fn has__ranges_and_rights() {
        for (range, access, has) in [
            ((0x1000, 0x100), Access::REMOTE_WRITE, true),
            ((0x1100, 0), Access::empty(), true),
            ((0x1001, 0x100), Access::empty(), false),
            ((0xfff, 1), Access::empty(), false),
            ((0x10ff, 1), Access::REMOTE_READ, false),
            ((u64::MAX, 2), Access::empty(), false),
            ((0x1000, u64::MAX), Access::empty(), false),
            ((0x1001, u64::MAX), Access::empty(), false),
        ] {
            assert_eq!(EXTENT.has(range, access), has, "{range:x?} {access:?}");
        }
    }

    #[test]
    fn own_regions__by_domain_and_range() {
        let mut regions = OwnRegions::default();
        regions.insert(1, (LKey(7), RKey(8)), EXTENT, 'a');
        let rights = Access::LOCAL_WRITE;
        assert_eq!(regions.get(1, LKey(7), (0x1080, 0x80), rights), Some(&mut 'a'));
        assert_eq!(regions.get(2, LKey(7), (0x1080, 0x80), rights), None);
        assert_eq!(regions.get(1, LKey(7), (0x1080, 0x81), rights), None);
        assert_eq!(regions.get(1, LKey(8), (0x1080, 1), rights), None);
        assert_eq!(regions.get_remote(1, RKey(8)), Some((EXTENT, &mut 'a')));
        assert_eq!(regions.get_remote(2, RKey(8)), None);
        assert_eq!(regions.remove(LKey(7)), Some((1, 'a')));
        assert_eq!(regions.get_remote(1, RKey(8)), None);
        assert_eq!(regions.remove(LKey(7)), None);
    }

    #[test]
    fn peer_keys__asked_for_once() {
        let mut keys = PeerKeys::default();
        let get = |keys: &mut PeerKeys| keys.get(3, RKey(9), (0x1000, 8), Access::REMOTE_WRITE);
        assert_eq!(get(&mut keys), PeerKey::Unknown);
        assert_eq!(get(&mut keys), PeerKey::Unknown);
        assert_eq!(keys.poll_wanted(), Some((3, RKey(9))));
        assert_eq!(keys.poll_wanted(), None);
        keys.answered(3, RKey(9), Some((RKey(77), EXTENT)));
        assert_eq!(get(&mut keys), PeerKey::Known(RKey(77)));
        let beyond = keys.get(3, RKey(9), (0x1000, 0x101), Access::REMOTE_WRITE);
        assert_eq!(beyond, PeerKey::Refused);
        keys.answered(3, RKey(9), None);
        assert_eq!(get(&mut keys), PeerKey::Known(RKey(77)));
        keys.forget(3, RKey(9));
        assert_eq!(get(&mut keys), PeerKey::Unknown);
        keys.answered(3, RKey(9), None);
        assert_eq!(get(&mut keys), PeerKey::Refused);
        assert_eq!(get(&mut keys), PeerKey::Unknown);
    }

    #[test]
    fn peer_keys__bounded() {
        let mut keys = PeerKeys::default();
        let get = |keys: &mut PeerKeys, key| keys.get(0, RKey(key), (0, 0), Access::empty());
        for key in 0..PEER_KEYS_MAX as u32 + 10 {
            assert_eq!(get(&mut keys, key), PeerKey::Unknown);
        }
        assert_eq!(keys.told.len(), PEER_KEYS_MAX);
        keys.answered(0, RKey(0), None);
        assert_eq!(get(&mut keys, u32::MAX), PeerKey::Unknown);
        assert_eq!(keys.told.len(), PEER_KEYS_MAX);
        assert_eq!(keys.poll_wanted(), Some((0, RKey(u32::MAX))));
    }
}

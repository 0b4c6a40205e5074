//! Words that revoke a grant while its holder may be writing.
//!
//! The owner of a grant has a word per grant, which holds the grant's generation as long as the grant lasts. The holder has some words
//! `inside`, one for each of its threads that may write at a time. Each is even, or an *entry*, which names the grant and is odd. The holder
//! stores the entry, then looks at the grant; the owner clears the grant, then looks at all of the words. A `SeqCst` fence stands between the
//! two steps on both sides, so at least one of them sees the other: either the holder does not write, or the owner knows the entry that it
//! has to wait for.
//!
//! READs enter nothing: they check the grant again after the copy, and discard the copied bytes if the grant has ended.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::segment::GRANTS;

/// The words, as one end sees them. Tests implement them with other memory.
pub trait Words {
    /// Loads a word `inside`.
    fn inside(&self, place: u32, order: Ordering) -> u32;
    /// Stores a word `inside`. Only one thread at a time does so.
    fn set_inside(&self, place: u32, value: u32, order: Ordering);
    /// Loads the word of a grant.
    fn grant(&self, index: u32, order: Ordering) -> u32;
    /// Stores the word of a grant.
    fn set_grant(&self, index: u32, generation: u32, order: Ordering);
    /// Orders the accesses before it and after it.
    fn fence(&self, order: Ordering);
}

/// Unit of the count in an entry; the bits below hold the grant's index and the bit for "inside".
const COUNT_ONE: u32 = 2 * GRANTS;

const _: () = assert!(GRANTS.is_power_of_two());

/// An entry that the owner of a grant found when it revoked the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inside {
    /// Place of the word that holds the entry.
    pub place: u32,
    /// The entry.
    pub entry: u32,
    /// Index of the grant that it names.
    pub index: u32,
}

/// Enters a grant in order to write, by the word at a place. Returns the entry for [`leave`], or `None` if the grant has ended.
#[inline]
pub fn enter(words: &impl Words, place: u32, index: u32, generation: u32) -> Option<u32> {
    let before = words.inside(place, Ordering::Relaxed);
    let count = before.wrapping_add(COUNT_ONE) & !(COUNT_ONE - 1);
    let entry = count | (index % GRANTS) << 1 | 1;
    // A reader of this entry sees all bytes written under the entries before it.
    words.set_inside(place, entry, Ordering::Release);
    words.fence(Ordering::SeqCst);
    if words.grant(index, Ordering::Acquire) == generation {
        return Some(entry);
    }
    leave(words, place, entry);
    None
}

/// Ends an entry: all bytes of the write are in place.
#[inline]
pub fn leave(words: &impl Words, place: u32, entry: u32) {
    words.set_inside(place, entry & !1, Ordering::Release);
}

/// Returns whether a grant has held during a copy out of it: call it after the copy.
#[inline]
pub fn still_holds(words: &impl Words, index: u32, generation: u32) -> bool {
    words.fence(Ordering::Acquire);
    words.grant(index, Ordering::Acquire) == generation
}

/// Revokes grants. Returns the entries under which the holder may be writing to one of them; the holder has words at `places`.
pub fn take_back(words: &impl Words, places: Range<u32>, grants: &[u32]) -> Vec<Inside> {
    for index in grants {
        words.set_grant(*index, 0, Ordering::Relaxed);
    }
    words.fence(Ordering::SeqCst);
    let look = |place| {
        let entry = words.inside(place, Ordering::Acquire);
        let index = entry / 2 % GRANTS;
        let is_inside = entry & 1 == 1 && grants.contains(&index);
        is_inside.then_some(Inside { place, entry, index })
    };
    places.filter_map(look).collect()
}

/// Returns whether the holder has left since `entry` was seen.
pub fn has_left(words: &impl Words, place: u32, entry: u32) -> bool {
    words.inside(place, Ordering::Acquire) != entry
}

#[cfg(test)]
mod tests;

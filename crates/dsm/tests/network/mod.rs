//! Messages underway between nodes.

use std::collections::BTreeMap;

/// Number of a node, as an index.
pub(crate) type Place = usize;

/// A message is overtaken by fewer later ones than this.
const OVERTAKEN: u64 = 64;

/// The messages with their numbers, by sender and receiver, in their order if that counts, sorted otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Network<M> {
    messages: BTreeMap<(Place, Place), Vec<(u64, M)>>,
    /// Messages of a pair of nodes overtake each other.
    reorders: bool,
}

/// A message underway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Underway {
    pub(crate) from: Place,
    pub(crate) to: Place,
    pub(crate) index: usize,
}

impl<M: Copy + Ord> Network<M> {
    pub(crate) fn new(reorders: bool) -> Network<M> {
        let messages = BTreeMap::new();
        Network { messages, reorders }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(crate) fn send(&mut self, from: Place, to: Place, sequence: u64, message: M) {
        let messages = self.messages.entry((from, to)).or_default();
        messages.push((sequence, message));
        if self.reorders {
            messages.sort_unstable();
        }
    }

    /// Returns those that can arrive next.
    pub(crate) fn ready(&self) -> impl Iterator<Item = Underway> {
        self.messages.iter().flat_map(|(pair, messages)| {
            let ready = if self.reorders { messages.len() } else { 1 };
            let oldest = messages.iter().map(|it| it.0).min().unwrap();
            let can_arrive = move |index: &usize| {
                let is_first = *index == 0 || messages[index - 1] != messages[*index];
                is_first && messages[*index].0 < oldest + OVERTAKEN
            };
            let (from, to) = *pair;
            let indices = (0..ready).filter(can_arrive);
            indices.map(move |index| Underway { from, to, index })
        })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Underway> {
        self.messages.iter().flat_map(|(pair, messages)| {
            let (from, to) = *pair;
            (0..messages.len()).map(move |index| Underway { from, to, index })
        })
    }

    pub(crate) fn get(&self, Underway { from, to, index }: Underway) -> M {
        self.messages[&(from, to)][index].1
    }

    pub(crate) fn remove(&mut self, Underway { from, to, index }: Underway) {
        let messages = self.messages.get_mut(&(from, to)).unwrap();
        messages.remove(index);
        if messages.is_empty() {
            self.messages.remove(&(from, to));
        }
    }

    pub(crate) fn duplicate(&mut self, Underway { from, to, index }: Underway) {
        let (sequence, message) = self.messages[&(from, to)][index];
        self.send(from, to, sequence, message);
    }

    /// Drops what is underway to a node.
    pub(crate) fn stop(&mut self, to: Place) {
        self.messages.retain(|pair, _| pair.1 != to);
    }
}

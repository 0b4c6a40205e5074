//! Requests that name their payload instead of holding it, so that it is copied once.
//!
//! The sender lends the peer a region that a request names: a grant to read ([`crate::Granted`]), which the sender offers of its own accord,
//! and which the peer accepts once it can reach the memory. From then on the sender puts the numbers of that grant and a range of the region
//! in place of payload. The peer copies from there when it executes the request. If the grant has ended by the end of the copy, the bytes
//! may be others, and the peer has the sender send the request again ([`Taken::Again`]).
//!
//! A region is lent as long as the queue pair whose requests named it works. The sender ends that at once when it completes a request
//! that the peer has not taken ([`rdmux_rnic::Lending`]).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rdmux_rnic::{LKey, Lending, Memory, PARTS_MAX, Part, PeerFault, PeerMemory, Qpn, RingBytes, Room};
use rdmux_verbs::sync::Mutex;

use crate::channel::Offer;
use crate::grant::Granted;
use crate::record::RecordBytes;
use crate::ring::PART_BYTES;
use crate::segment::{GRANTS, Segment, Side};

/// Requests that name a region which the peer reaches by calls, after which it is worth while to share the region's memory.
const CALLS_BEFORE_SHARING: u32 = 32;
/// Requests that would name a region, after which it is offered again to a peer that has declined it, or has not answered.
const PATIENCE: u32 = 1000;

/// Answer of the peer to an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Offered,
    Accepted,
    /// The peer cannot reach the memory.
    Declined,
}

/// A region that is lent to the peer.
#[derive(Clone, Copy, Debug)]
struct Lent {
    qpn: Qpn,
    lkey: LKey,
    index: u32,
    generation: u32,
    state: State,
    /// Requests that would have named it before the peer accepted it.
    waited: u32,
    /// Requests left until it is worth while to share the memory; `None` if the peer maps it already.
    calls_left: Option<u32>,
}

/// Why parts of memory cannot be named in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotLent {
    /// The peer cannot reach the memory, or has not answered yet.
    NotNow,
    /// The region was not offered to the peer, or it is time to share its memory first.
    Offer(LKey),
}

/// Regions that one end of a link lends the other.
#[derive(Debug)]
pub(crate) struct Lender {
    list: Vec<Lent>,
    words: Arc<LentWords>,
}

/// The words of the grants, which also whoever ends a request can revoke.
#[derive(Debug)]
struct LentWords {
    segment: Arc<Segment>,
    side: Side,
    /// Queue pair, index and generation of each grant.
    grants: Mutex<Vec<(Qpn, u32, u32)>>,
}

/// What is lent for the requests of one queue pair.
#[derive(Debug)]
struct LentFor {
    qpn: Qpn,
    words: Arc<LentWords>,
}

impl Lending for LentFor {
    fn end(&self) {
        let LentWords {
            segment,
            side,
            grants,
        } = &*self.words;
        grants.lock().retain(|(qpn, index, generation)| {
            if *qpn == self.qpn {
                // The word may belong to a later grant.
                let word = segment.grant(*side, *index);
                let _ = word.compare_exchange(*generation, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
            *qpn != self.qpn
        });
        // The peer that copies bytes which the program writes from here on finds that the grant has ended.
        fence(Ordering::SeqCst);
    }
}

impl Lender {
    pub(crate) fn new(segment: &Arc<Segment>, side: Side) -> Lender {
        Lender {
            list: Vec::new(),
            words: Arc::new(LentWords {
                segment: Arc::clone(segment),
                side,
                grants: Mutex::default(),
            }),
        }
    }

    /// Returns the handle by which the device ends what is lent for a queue pair.
    pub(crate) fn lending(&self, qpn: Qpn) -> Arc<dyn Lending> {
        let words = Arc::clone(&self.words);
        Arc::new(LentFor { qpn, words })
    }

    /// Notes that a region is offered to the peer, by a grant.
    pub(crate) fn offered(&mut self, qpn: Qpn, lkey: LKey, offer: &Offer, may_be_shared: bool) {
        let (index, generation) = (offer.index, offer.generation);
        let mut grants = self.words.grants.lock();
        // The same grant may be offered again.
        grants.retain(|(_, other, _)| *other != index);
        grants.push((qpn, index, generation));
        drop(grants);
        self.list.push(Lent {
            qpn,
            lkey,
            index,
            generation,
            state: State::Offered,
            waited: 0,
            calls_left: may_be_shared.then_some(CALLS_BEFORE_SHARING),
        });
    }

    /// Handles the peer's answer to an offer.
    pub(crate) fn answered(&mut self, index: u32, generation: u32, accepts: bool) {
        let is_it = |lent: &&mut Lent| (lent.index, lent.generation) == (index, generation);
        if let Some(lent) = self.list.iter_mut().find(is_it) {
            lent.state = if accepts { State::Accepted } else { State::Declined };
        }
    }

    /// Forgets grants that were revoked.
    pub(crate) fn forget(&mut self, indices: &[u32]) {
        if self.list.iter().any(|lent| indices.contains(&lent.index)) {
            self.list.retain(|lent| !indices.contains(&lent.index));
            let mut grants = self.words.grants.lock();
            grants.retain(|(_, index, _)| !indices.contains(index));
        }
    }

    /// Describes parts of regions for the peer, if it has accepted all of them for a queue pair.
    pub(crate) fn name(&mut self, qpn: Qpn, parts: &[Part]) -> Result<[NamedPart; PARTS_MAX], NotLent> {
        let mut named = [NamedPart::default(); PARTS_MAX];
        for (part, named) in parts.iter().zip(&mut named) {
            let is_it = |lent: &&mut Lent| lent.lkey == part.lkey && lent.qpn == qpn;
            let lent = self.list.iter_mut().find(is_it);
            let lent = lent.ok_or(NotLent::Offer(part.lkey))?;
            if lent.state != State::Accepted {
                lent.waited += 1;
                if lent.waited < PATIENCE {
                    return Err(NotLent::NotNow);
                }
                let index = lent.index;
                self.list.retain(|lent| lent.index != index);
                return Err(NotLent::Offer(part.lkey));
            }
            if let Some(left) = &mut lent.calls_left {
                match left.checked_sub(1) {
                    Some(less) => *left = less,
                    None => {
                        // Once: whatever comes of it, the region is lent as it is then.
                        lent.calls_left = None;
                        return Err(NotLent::Offer(part.lkey));
                    }
                }
            }
            *named = NamedPart {
                index: lent.index,
                generation: lent.generation,
                offset: part.offset,
                len: part.len,
            };
        }
        Ok(named)
    }

    /// Returns whether another region may be lent: most grants are for those who ask.
    pub(crate) fn has_room(&self) -> bool {
        self.list.len() < GRANTS as usize / 2
    }

    /// Returns whether a region is offered or lent for a queue pair.
    pub(crate) fn has(&self, qpn: Qpn, lkey: LKey) -> bool {
        self.list.iter().any(|lent| (lent.qpn, lent.lkey) == (qpn, lkey))
    }
}

/// A part of a lent region, as a request names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NamedPart {
    index: u32,
    generation: u32,
    /// Offset in the region.
    offset: u64,
    len: u32,
}

impl NamedPart {
    /// Writes the parts to the start of a record.
    pub(crate) fn write_all(parts: &[NamedPart], record: &RecordBytes<'_>) {
        for (i, part) in parts.iter().enumerate() {
            let mut bytes = [0; PART_BYTES];
            bytes[..4].copy_from_slice(&part.index.to_ne_bytes());
            bytes[4..8].copy_from_slice(&part.generation.to_ne_bytes());
            bytes[8..16].copy_from_slice(&part.offset.to_ne_bytes());
            bytes[16..20].copy_from_slice(&part.len.to_ne_bytes());
            record.write(i * PART_BYTES, &bytes);
        }
    }

    fn read(record: &RecordBytes<'_>, i: usize) -> NamedPart {
        let mut bytes = [0; PART_BYTES];
        record.copy_out(i * PART_BYTES, &mut bytes);
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
        NamedPart {
            index: word(0),
            generation: word(4),
            offset: u64::from_ne_bytes(std::array::from_fn(|i| bytes[8 + i])),
            len: word(16),
        }
    }
}

/// Regions that the other end of a link lends this one, by the indices of their grants.
#[derive(Debug, Default)]
pub(crate) struct Borrower(Vec<Option<Borrowed>>);

#[derive(Debug)]
struct Borrowed {
    memory: Granted,
    /// Where the region begins in the memory, and its bytes.
    begin: u64,
    length: u64,
}

impl Borrower {
    /// Adds a region, and drops those whose grants have ended.
    pub(crate) fn add(&mut self, memory: Granted, begin: u64, length: u64) {
        for borrowed in &mut self.0 {
            borrowed.take_if(|borrowed| !borrowed.memory.holds());
        }
        let index = memory.index as usize;
        debug_assert!(index < GRANTS as usize);
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        self.0[index] = Some(Borrowed {
            memory,
            begin,
            length,
        });
    }

    /// Returns the bytes of a request of `held` bytes that names so many parts, at most [`PARTS_MAX`] of them. Those that are not lent to
    /// this end cannot be read.
    pub(crate) fn request<'a>(
        &'a self,
        record: RecordBytes<'a>,
        held: usize,
        parts: usize,
    ) -> NamedBytes<'a> {
        let mut sources = [Source::default(); PARTS_MAX];
        let held = held - parts * PART_BYTES;
        for (i, source) in sources.iter_mut().enumerate().take(parts) {
            let part = NamedPart::read(&record, i);
            *source = Source {
                memory: self.find(&part),
                len: part.len as usize,
            };
        }
        NamedBytes {
            heads: record.from(parts * PART_BYTES),
            held,
            sources,
            len: held + sources.iter().map(|source| source.len).sum::<usize>(),
        }
    }

    /// Returns the memory of a part, and where the part begins in it.
    fn find(&self, part: &NamedPart) -> Option<(&Granted, u64)> {
        let borrowed = self.0.get(part.index as usize)?.as_ref()?;
        let end = part.offset.checked_add(part.len.into())?;
        let is_it = borrowed.memory.generation == part.generation && end <= borrowed.length;
        is_it.then(|| (&borrowed.memory, borrowed.begin + part.offset))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Source<'a> {
    /// `None` if this end cannot read it.
    memory: Option<(&'a Granted, u64)>,
    len: usize,
}

/// The bytes of a request that names its payload.
#[derive(Debug)]
pub struct NamedBytes<'a> {
    heads: RecordBytes<'a>,
    /// Bytes of the heads.
    held: usize,
    sources: [Source<'a>; PARTS_MAX],
    len: usize,
}

impl NamedBytes<'_> {
    /// Calls `f` for each piece of a range of the payload, with the memory, the offset in it, the offset in the range, and the bytes.
    fn pieces(
        &self,
        at: usize,
        len: usize,
        mut f: impl FnMut(&Granted, u64, usize, usize) -> Result<(), PeerFault>,
    ) -> Result<(), PeerFault> {
        let (mut skip, mut done) = (at, 0);
        for source in &self.sources {
            if skip >= source.len {
                skip -= source.len;
                continue;
            }
            let n = (source.len - skip).min(len - done);
            if n == 0 {
                break;
            }
            let (memory, begin) = source.memory.ok_or(PeerFault::Ended)?;
            f(memory, begin + skip as u64, done, n)?;
            done += n;
            skip = 0;
        }
        if done < len { Err(PeerFault::Ended) } else { Ok(()) }
    }
}

impl RingBytes for NamedBytes<'_> {
    fn bytes(&self) -> usize {
        self.len
    }

    fn held(&self) -> usize {
        self.held
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<(), PeerFault> {
        let heads = self.held.saturating_sub(at).min(out.len());
        self.heads.copy_out(at, &mut out[..heads]);
        let from = at.saturating_sub(self.held);
        let out = &mut out[heads..];
        self.pieces(from, out.len(), |memory, offset, done, n| {
            memory.read_bytes(offset, &mut out[done..done + n])
        })
    }

    fn read_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), PeerFault> {
        // Only payload is placed.
        let from = at.checked_sub(self.held).ok_or(PeerFault::Ended)?;
        self.pieces(from, len, |memory, begin, done, n| {
            memory.read(begin, to, offset + done as u64, n as u64)
        })
    }
}

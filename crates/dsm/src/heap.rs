//! A heap: memory that any node allocates and frees, in objects.
//!
//! A heap has a region for each size of small objects, whose units have that size, and one of pages for the others: so two objects never share a
//! unit, and nodes that use different objects do not disturb each other. In each region each node is the home of one range of the units, and *it
//! alone hands them out*. The records are in its own memory, out of the reach of what any program writes: no foreign pointer harms them, and they end
//! with the node, as what they are about does. To allocate at another node and to free another node's memory is a request to it, and an answer.
//! Allocating at the own node takes no message.
//!
//! With release consistency, a free synchronises with the allocation that hands the same memory out again, as in C. [`Heap::free`] releases before it
//! asks: a copy of this node that is still to be flushed would change what the next owner writes. [`Heap::allocate`] acquires after the answer: an old
//! copy would be the twin of what the new owner writes, and bytes that it writes with their old values would not be flushed. A home needs no acquire
//! for its own memory, as its frames have all that was released.

mod arena;

use std::alloc::Layout;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::heap::Body;

pub(crate) use self::arena::Arena;
use crate::array::{Array, Number};
use crate::geometry::{Geometry, UNIT_BYTES_MIN};
use crate::memory::Access;
use crate::placement::Placement;
use crate::protocol::HomesError;
use crate::region::Region;
use crate::session::{Consistency, Error, FaultMode, RegionOptions, Session};

/// Settings of a heap, the same on all nodes but for the mode.
#[derive(Clone, Debug)]
pub struct HeapOptions {
    /// Bytes that each node has for the objects of each size, rounded up to whole pages: 64 bytes, each power of two up to half a page, and pages. What
    /// is not used takes addresses alone.
    pub bytes: u64,
    /// The way by which faults are answered at this node.
    pub mode: FaultMode,
    /// The order of accesses of different nodes to an object.
    pub consistency: Consistency,
}

impl HeapOptions {
    /// Describes a heap with sequential consistency whose faults are answered as the environment says.
    ///
    /// # Errors
    /// [`Error::FaultMode`].
    pub fn new(bytes: u64) -> Result<HeapOptions, Error> {
        let mode = FaultMode::of_environment()?;
        let consistency = Consistency::Sequential;
        Ok(HeapOptions {
            bytes,
            mode,
            consistency,
        })
    }

    /// Sets the order of accesses of different nodes.
    #[must_use]
    pub fn consistency(self, consistency: Consistency) -> HeapOptions {
        HeapOptions { consistency, ..self }
    }
}

/// Home of an object that is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The node that allocates it.
    Here,
    /// A node, by its number.
    Node(u32),
    /// The nodes in turn, for the objects that this node allocates.
    InTurn,
}

/// The regions of a heap that is being made.
pub(crate) struct Plan {
    /// Settings of each region, with the units of it that this node hands out.
    pub regions: Vec<(RegionOptions, Range<u32>)>,
}

impl Plan {
    /// Plans the heap of node `own` of `nodes`.
    ///
    /// # Errors
    /// [`Error::Size`] if it has no bytes, or more than there may be.
    pub(crate) fn new(options: &HeapOptions, own: u32, nodes: u32) -> Result<Plan, Error> {
        let page = rustix::param::page_size() as u64;
        let units = std::iter::successors(Some(UNIT_BYTES_MIN), |unit| Some(2 * unit));
        let plan = |unit: u64| {
            let of_node = Geometry::new(options.bytes, unit.max(page))?.bytes();
            let bytes = of_node.checked_mul(nodes.into());
            let bytes = bytes.ok_or(Error::Size(options.bytes))?;
            // A number of units that cannot be is one of bytes that cannot.
            Geometry::new(bytes, unit)?;
            let each = (of_node / unit) as u32;
            let named = (0..nodes).map(|node| (u64::from(node) * u64::from(each), node));
            let options = RegionOptions {
                unit,
                homes: Placement::Named(named.collect()),
                consistency: options.consistency,
                ..RegionOptions::in_mode(bytes, options.mode)
            };
            Ok((options, own * each..(own + 1) * each))
        };
        let regions = units.take_while(|unit| *unit <= page).map(plan);
        Ok(Plan {
            regions: regions.collect::<Result<_, Error>>()?,
        })
    }
}

/// Memory that any node allocates and frees. An object is at the same address on all nodes.
///
/// Bytes that a program writes behind the end of an object are lost or harm another object, but never the records of what is allocated.
/// An object whose node has allocated it and left stays allocated. If its home leaves, it is as any memory whose home has left, and cannot be freed.
#[derive(Debug)]
pub struct Heap<'a> {
    session: &'a Session,
    consistency: Consistency,
    /// By the sizes of their units.
    regions: Vec<Region<'a>>,
    /// Objects that were placed in turn.
    turns: AtomicU32,
}

impl<'a> Heap<'a> {
    pub(crate) fn new(session: &'a Session, consistency: Consistency, regions: Vec<Region<'a>>) -> Heap<'a> {
        Heap {
            session,
            consistency,
            regions,
            turns: AtomicU32::new(session.node()),
        }
    }

    /// Allocates an object, at home at a node, and returns its address. Its bytes are 0 if they were never allocated before, and else what they were.
    /// Other nodes may use and free it.
    ///
    /// In a heap with release consistency this acquires, as [`Thread::acquire`](crate::Thread::acquire) does, if the object is at home at another node:
    /// so what was written there before it was freed neither changes what this node writes, nor hides it.
    ///
    /// # Errors
    /// [`Error::NoRoom`] if the node has no room for it; [`Error::Object`] if it is to be aligned to more than a page; the node is gone, or there is
    /// none of that number; or the system has refused a change of pages, and the object stays allocated.
    pub fn allocate(&self, layout: Layout, place: Place) -> Result<u64, Error> {
        let nodes = self.session.nodes();
        let node = match place {
            Place::Here => self.session.node(),
            Place::Node(node) => node,
            Place::InTurn => self.turns.fetch_add(1, Ordering::Relaxed) % nodes,
        };
        let home = NodeId::new(node).filter(|_| node < nodes);
        let home = home.ok_or(HomesError::Stranger(node))?;
        let bytes = layout.size().max(1) as u64;
        let needed = bytes.max(layout.align() as u64);
        let fitting = |region: &&Region<'_>| needed <= region.unit_bytes();
        let region = self.regions.iter().find(fitting).or(self.regions.last());
        let region = region.filter(|region| layout.align() as u64 <= region.unit_bytes());
        let region = region.ok_or(Error::Object {
            bytes,
            alignment: layout.align() as u64,
        })?;
        let units = bytes.div_ceil(region.unit_bytes());
        let answer = self
            .session
            .shared()
            .memory(home, region.number(), Body::Allocate { units })?;
        let unit = match answer {
            Body::Done { unit } => unit.checked_mul(region.unit_bytes()),
            _ => return Err(Error::NoRoom { node, bytes }),
        };
        // No correct node hands out memory that is not its own.
        let offset = unit.filter(|offset| self.owner(region, *offset) == node);
        let offset = offset.ok_or_else(|| Error::Failed(format!("node {node} hands out foreign memory")))?;
        if self.is_release() && node != self.session.node() {
            self.session.shared().acquire_released()?;
        }
        Ok(region.address() + region.place(offset))
    }

    /// Frees an object by its address, on any node. In a heap with release consistency this releases before that, as
    /// [`Thread::release`](crate::Thread::release) does.
    ///
    /// # Errors
    /// [`Error::NotAllocated`] if no object begins there, or it was freed already; or the object's home is gone; or, with release consistency,
    /// [`Error::Unreleased`] if something that this node has written, there or elsewhere, is lost with its home. Nothing is freed then: after
    /// [`Error::Unreleased`] the object is still allocated, and another call frees it if its own home is there.
    pub fn free(&self, address: u64) -> Result<(), Error> {
        let stranger = Error::NotAllocated { address };
        let whole = |region: &&Region<'_>| region.bytes_at(address, region.unit_bytes()).is_some();
        let Some(region) = self.regions.iter().find(whole) else {
            return Err(stranger);
        };
        let offset = region.bytes_at(address, 1).map(|bytes| bytes.start);
        let offset = offset.filter(|offset| offset.is_multiple_of(region.unit_bytes()));
        let Some(offset) = offset else {
            return Err(stranger);
        };
        let home = NodeId::new(self.owner(region, offset)).ok_or(HomesError::NoNodes)?;
        let unit = offset / region.unit_bytes();
        let shared = self.session.shared();
        if self.is_release() {
            shared.release()?;
        }
        match shared.memory(home, region.number(), Body::Free { unit })? {
            Body::Done { .. } => Ok(()),
            _ => Err(stranger),
        }
    }

    fn is_release(&self) -> bool {
        self.consistency == Consistency::Release
    }

    /// Returns the node that hands out a byte of a region.
    fn owner(&self, region: &Region<'_>, offset: u64) -> u32 {
        let of_node = region.bytes() / u64::from(self.session.nodes());
        u32::try_from(offset / of_node).unwrap_or(u32::MAX)
    }

    /// Returns the region that has some bytes, and their place there.
    ///
    /// # Errors
    /// [`Error::NotInHeap`] if they are not in the heap, or in more than one small object's place.
    pub fn find(&self, address: u64, bytes: u64) -> Result<(&Region<'a>, Range<u64>), Error> {
        let found = |region: &'_ Region<'a>| region.bytes_at(address, bytes);
        let mut regions = self.regions.iter();
        regions
            .find_map(|region| found(region).map(|bytes| (region, bytes)))
            .ok_or(Error::NotInHeap { address, bytes })
    }

    /// Returns `len` numbers at an address.
    ///
    /// # Errors
    /// As [`Heap::find`].
    ///
    /// # Panics
    /// If the address is no multiple of 8.
    pub fn array<T: Number>(&self, address: u64, len: usize) -> Result<Array<'_, T>, Error> {
        let bytes = (len as u64).saturating_mul(8);
        let (region, bytes) = self.find(address, bytes)?;
        Ok(region.array(bytes.start, len))
    }

    /// Gets a right to bytes at an address, as [`Region::acquire`] does.
    ///
    /// # Errors
    /// As [`Heap::find`], and as there.
    pub fn acquire(&self, address: u64, bytes: u64, access: Access) -> Result<(), Error> {
        let (region, bytes) = self.find(address, bytes)?;
        region.acquire(bytes, access)
    }

    /// Copies bytes at an address, as [`Region::read`] does.
    ///
    /// # Errors
    /// As [`Heap::find`], and as there.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Error> {
        let (region, bytes) = self.find(address, out.len() as u64)?;
        region.read(bytes.start, out)
    }

    /// Writes bytes at an address, as [`Region::write`] does.
    ///
    /// # Errors
    /// As [`Heap::find`], and as there.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let (region, place) = self.find(address, bytes.len() as u64)?;
        region.write(place.start, bytes)
    }

    /// Returns the regions, by the sizes of their units: for their counts.
    pub fn regions(&self) -> &[Region<'a>] {
        &self.regions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan__has_a_region_for_each_size_with_a_range_of_each_node() {
        let page = rustix::param::page_size() as u64;
        let options = HeapOptions {
            bytes: 3 * page - 1,
            mode: FaultMode::Mprotect,
            consistency: Consistency::Release,
        };
        let plan = Plan::new(&options, 1, 2).unwrap();
        let sizes: Vec<u64> = plan.regions.iter().map(|(options, _)| options.unit).collect();
        assert_eq!(sizes.first(), Some(&64));
        assert_eq!(sizes.last(), Some(&page));
        assert!(sizes.windows(2).all(|pair| pair[1] == 2 * pair[0]));
        for (options, own) in plan.regions {
            assert_eq!(options.bytes, 6 * page);
            let each = (3 * page / options.unit) as u32;
            assert_eq!(own, each..2 * each);
            let homes = Placement::Named(vec![(0, 0), (each.into(), 1)]);
            assert_eq!(options.homes, homes);
            assert_eq!(options.consistency, Consistency::Release);
        }
    }

    #[test]
    fn plan__of_no_bytes_or_too_many_is_refused() {
        for bytes in [0, u64::MAX, 1 << 50] {
            let options = HeapOptions {
                bytes,
                mode: FaultMode::Mprotect,
                consistency: Consistency::Sequential,
            };
            let refused = Plan::new(&options, 0, 3).err().unwrap();
            assert!(matches!(refused, Error::Size(_)), "{refused}");
        }
    }
}

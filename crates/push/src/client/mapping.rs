//! A client's mappings.

use std::fmt;
use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_runtime as runtime;
use rdmux_verbs::{Placement, RKey};
use rdmux_wire::push::{Access, Conflict, Domain, Extent, Name, Ways};

use super::{Answer, Error};

/// Maximum number of bytes of one request.
pub const REQUEST_BYTES_MAX: u64 = 1 << 30;

/// A way to durability, of those that a region may offer ([`Ways`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// An RDMA FLUSH.
    Flush,
    /// A message to the server's processor, behind the WRITEs.
    SoftwareFlush,
    /// An RDMA READ behind the WRITEs, where they are placed straight into the persistence domain.
    ReadAfterWrite,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Flush, Way::ReadAfterWrite, Way::SoftwareFlush];

    /// Returns the flag with which regions offer it.
    pub fn flag(self) -> Ways {
        match self {
            Way::Flush => Ways::FLUSH,
            Way::SoftwareFlush => Ways::SOFTWARE_FLUSH,
            Way::ReadAfterWrite => Ways::READ_AFTER_WRITE,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Way::Flush => "FLUSH",
            Way::SoftwareFlush => "software flush",
            Way::ReadAfterWrite => "READ after WRITE",
        })
    }
}

/// A range to map, and the lease to map it under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRequest {
    /// Access that the client wants.
    pub access: Access,
    /// Access that others may have there meanwhile.
    pub share: Access,
    /// Treatment of a conflicting lease.
    pub conflict: Conflict,
    /// First byte.
    pub offset: u64,
    /// Bytes; 0 is the rest.
    pub length: u64,
    /// The upload whose progress the server is to remember; 0 for none.
    pub transfer: u64,
}

impl MapRequest {
    /// Requests the whole region, for one writer or several readers; holders of conflicting leases are asked to release.
    pub fn new(access: Access) -> MapRequest {
        let alone = access.contains(Access::WRITE);
        MapRequest {
            access,
            share: if alone { Access::empty() } else { Access::READ },
            conflict: Conflict::Break,
            offset: 0,
            length: 0,
            transfer: 0,
        }
    }
}

/// A request for a mapping, which the server may answer only once the holders of conflicting leases have released them. Dropping it
/// leaves the mapping, should there be one, until the connection ends or somebody else needs the range.
#[derive(Debug)]
pub struct PendingMap {
    pub(super) answer: Answer,
    /// Number of the connection.
    pub(super) connection: u64,
    pub(super) region: Name,
    pub(super) access: Access,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// A mapping: the part of a region that RDMA reaches.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub(super) id: u64,
    /// Number of the connection.
    pub(super) connection: u64,
    pub(super) region: Name,
    pub(super) access: Access,
    pub(super) domain: Domain,
    pub(super) placement: Placement,
    pub(super) ways: Ways,
    pub(super) region_bytes: u64,
    pub(super) extents: Vec<Extent>,
    /// Set if RDMA reaches the bytes; otherwise the server's device cannot reach them, and requests go by message.
    pub(super) direct: bool,
}

impl Mapping {
    /// Returns its number on this connection.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the region.
    pub fn region(&self) -> &Name {
        &self.region
    }

    /// Returns how much of it survives a loss of power.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// Returns the kinds of flush that it offers.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Returns the ways to durability that it offers.
    pub fn ways(&self) -> Ways {
        self.ways
    }

    /// Returns the size of the region.
    pub fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    /// Returns the strongest flush that it offers.
    pub fn strongest(&self) -> Placement {
        if self.placement.contains(Placement::PERSISTENT) {
            Placement::PERSISTENT
        } else {
            Placement::GLOBAL
        }
    }

    /// Returns whether RDMA reaches it. If not, reads and writes go by message, through the server's processor.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Returns the mapped extents.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Returns the way for a flush of this kind: `wanted` if it is offered, otherwise an error; without `wanted`, the best way
    /// there is.
    pub fn way(&self, placement: Placement, wanted: Option<Way>) -> Result<Way, Error> {
        if !self.placement.contains(placement) {
            return Err(Error::NotPersistent {
                region: self.region.clone(),
            });
        }
        let offers = |way: &Way| {
            let may = *way != Way::ReadAfterWrite || self.access.contains(Access::READ);
            // Every way makes bytes visible to every processor.
            let is_offered = self.ways.contains(way.flag());
            // A FLUSH that is missing from the ways that are offered is one that a device lacks.
            let lacks = *way == Way::Flush && !self.ways.is_empty() && !is_offered;
            may && !lacks && (!placement.contains(Placement::PERSISTENT) || is_offered)
        };
        let way = match wanted {
            Some(way) => Some(way).filter(offers),
            None => Way::ALL.into_iter().find(offers),
        };
        way.ok_or_else(|| {
            let offered: Vec<_> = Way::ALL
                .iter()
                .filter(|way| offers(way))
                .map(Way::to_string)
                .collect();
            Error::NoWay {
                region: self.region.clone(),
                way: wanted.unwrap_or(Way::Flush),
                offered: offered.join(", "),
            }
        })
    }

    /// Returns address and key of a range of the region, for one request.
    pub(super) fn locate(&self, offset: u64, length: u64) -> Result<(u64, RKey), Error> {
        if length > REQUEST_BYTES_MAX {
            return Err(self.out_of_range(offset, length));
        }
        let extent = self.extent(offset, length)?;
        Ok((extent.va + (offset - extent.offset), extent.rkey))
    }

    /// Returns the extent that contains a range.
    pub(super) fn extent(&self, offset: u64, length: u64) -> Result<&Extent, Error> {
        let inside = |extent: &&Extent| {
            let end = offset.checked_add(length);
            offset >= extent.offset && end.is_some_and(|end| end <= extent.offset + extent.length)
        };
        let extent = self.extents.iter().find(inside);
        extent.ok_or_else(|| self.out_of_range(offset, length))
    }

    pub(super) fn out_of_range(&self, offset: u64, length: u64) -> Error {
        Error::OutOfRange {
            region: self.region.clone(),
            offset,
            length,
        }
    }

    pub(super) fn needs(&self, access: Access, right: &'static str) -> Result<(), Error> {
        if self.access.contains(access) {
            return Ok(());
        }
        Err(Error::NoRight {
            region: self.region.clone(),
            right,
        })
    }
}

/// Own memory, from which requests take bytes and into which they put bytes. It may be dropped before they are done.
#[derive(Debug)]
pub struct Buffer(pub(super) Arc<runtime::Buffer>);

impl Buffer {
    /// Returns the bytes.
    pub fn memory(&self) -> &AnonymousMemory {
        self.0.memory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn way__flush_that_a_device_lacks() {
        let mapping = |ways, placement| Mapping {
            id: 1,
            connection: 1,
            region: Name::new("a").unwrap(),
            access: Access::WRITE,
            domain: Domain::File,
            placement,
            ways,
            region_bytes: 1,
            extents: Vec::new(),
            direct: false,
        };
        let (global, both) = (Placement::GLOBAL, Placement::GLOBAL | Placement::PERSISTENT);
        let of = |ways, offers, placement| mapping(ways, offers).way(placement, None).ok();
        // Memory offers no way to durability, but FLUSH for visibility to every processor.
        assert_eq!(of(Ways::empty(), global, global), Some(Way::Flush));
        assert_eq!(of(Ways::SOFTWARE_FLUSH, global, global), Some(Way::SoftwareFlush));
        assert_eq!(
            of(Ways::SOFTWARE_FLUSH, both, Placement::PERSISTENT),
            Some(Way::SoftwareFlush)
        );
        assert_eq!(of(Ways::all(), both, Placement::PERSISTENT), Some(Way::Flush));
        let wanted = mapping(Ways::SOFTWARE_FLUSH, both).way(global, Some(Way::Flush));
        assert!(matches!(wanted, Err(Error::NoWay { .. })));
    }
}

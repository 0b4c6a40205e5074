//! Geometry of a region: the places of its units, in its frames and in the program's views.
//!
//! The frames, which devices read, have the units one behind the other. A unit of a page or more is one page of the program's single view. Of
//! smaller units several are in one page, and each must have rights of its own: the program sees the frames by as many views as a page has units,
//! and each unit by one of them alone. So unit `u` of `k` in a page is in page `u / k` of view `u % k`, at its offset in that page
//! (MultiView: Itzkovitz and Schuster, OSDI 1999). The views follow each other: together they are the *area* that the program has.

use std::ops::Range;

use crate::session::Error;

/// Bytes of the smallest unit: a line of the processor's caches, which it can write without the bytes beside it.
pub const UNIT_BYTES_MIN: u64 = 64;

/// Bytes of the largest unit.
pub const UNIT_BYTES_MAX: u64 = 2 << 20;

/// Places of the units of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    unit_bytes: u64,
    /// Bytes whose rights change together: of the system's page, or of a larger unit.
    page_bytes: u64,
    /// Pages of one view.
    pages: u32,
    /// Views, a power of two.
    views: u32,
}

impl Geometry {
    /// Describes a region of some bytes, rounded up to whole units and pages.
    ///
    /// # Errors
    /// [`Error::Unit`] if a unit cannot have so many bytes, [`Error::Size`] if the region cannot.
    pub(crate) fn new(bytes: u64, unit_bytes: u64) -> Result<Geometry, Error> {
        let is_possible = (UNIT_BYTES_MIN..=UNIT_BYTES_MAX).contains(&unit_bytes);
        if !is_possible || !unit_bytes.is_power_of_two() {
            return Err(Error::Unit(unit_bytes));
        }
        let page_bytes = unit_bytes.max(rustix::param::page_size() as u64);
        let views = page_bytes / unit_bytes;
        let pages = bytes.div_ceil(page_bytes);
        let units = pages.checked_mul(views).filter(|units| *units < u32::MAX.into());
        match units {
            None | Some(0) => Err(Error::Size(bytes)),
            Some(_) => Ok(Geometry {
                unit_bytes,
                page_bytes,
                pages: pages as u32,
                views: views as u32,
            }),
        }
    }

    pub(crate) fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Returns the number of units.
    pub(crate) fn units(&self) -> u32 {
        self.pages * self.views
    }

    /// Returns the number of views.
    pub(crate) fn views(&self) -> u32 {
        self.views
    }

    /// Returns the number of pages of one view.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the bytes of the region, and of each view.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.pages) * self.page_bytes
    }

    /// Returns the page of the area by which the program sees a unit.
    pub(crate) fn page_of(&self, unit: u32) -> u32 {
        unit % self.views * self.pages + unit / self.views
    }

    /// Returns the unit that the program sees by a page of the area.
    pub(crate) fn unit_of(&self, page: u32) -> u32 {
        page % self.pages * self.views + page / self.pages
    }

    /// Returns the bytes of the region that a unit has.
    pub(crate) fn bytes_of(&self, unit: u32) -> Range<u64> {
        let start = u64::from(unit) * self.unit_bytes;
        start..start + self.unit_bytes
    }

    /// Returns the unit that has a byte of the region.
    pub(crate) fn unit_with(&self, offset: u64) -> u32 {
        (offset / self.unit_bytes) as u32
    }

    /// Returns the units that have some bytes of the region.
    pub(crate) fn units_with(&self, bytes: &Range<u64>) -> Range<u32> {
        let end = bytes.end.div_ceil(self.unit_bytes) as u32;
        match bytes.is_empty() {
            true => end..end,
            false => self.unit_with(bytes.start)..end,
        }
    }

    /// Returns the place in the area of a byte of the region. It may be the one behind the last.
    pub(crate) fn place_of(&self, offset: u64) -> u64 {
        let view = offset / self.unit_bytes % u64::from(self.views);
        view * self.bytes() + offset
    }

    /// Returns the byte of the region at a place in the area, if the program sees it there: the other bytes of that page are those of units that it
    /// sees by other views.
    pub(crate) fn offset_at(&self, place: u64) -> Option<u64> {
        let offset = place % self.bytes();
        (self.place_of(offset) == place).then_some(offset)
    }

    /// Returns the unit whose rights those to a place in the area are.
    ///
    /// # Panics
    /// If it is not in the area.
    pub(crate) fn unit_at(&self, place: u64) -> u32 {
        let page = place / self.page_bytes;
        assert!(page < self.units().into(), "place {place} of {self:?}");
        self.unit_of(page as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> u64 {
        rustix::param::page_size() as u64
    }

    fn all() -> Vec<Geometry> {
        let mut all = Vec::new();
        let mut unit_bytes = UNIT_BYTES_MIN;
        while unit_bytes <= UNIT_BYTES_MAX {
            let bytes = 3 * unit_bytes.max(page());
            all.push(Geometry::new(bytes, unit_bytes).unwrap());
            unit_bytes *= 2;
        }
        all
    }

    #[test]
    fn page_of__each_unit_is_one_page_of_the_area() {
        for geometry in all() {
            let mut pages: Vec<u32> = (0..geometry.units()).map(|unit| geometry.page_of(unit)).collect();
            for (unit, page) in pages.iter().enumerate() {
                assert_eq!(geometry.unit_of(*page), unit as u32, "{geometry:?}");
            }
            pages.sort_unstable();
            assert!(pages.into_iter().eq(0..geometry.units()), "{geometry:?}");
        }
    }

    /// The program sees a unit at the offset that it has in its frame, by a page of no other unit.
    #[test]
    fn place_of__is_in_the_page_of_the_unit() {
        for geometry in all() {
            for unit in 0..geometry.units() {
                let bytes = geometry.bytes_of(unit);
                for offset in [bytes.start, bytes.start + 8, bytes.end - 1] {
                    let place = geometry.place_of(offset);
                    assert_eq!(geometry.unit_with(offset), unit);
                    assert_eq!(geometry.unit_at(place), unit, "{geometry:?}");
                    assert_eq!(geometry.offset_at(place), Some(offset), "{geometry:?}");
                    assert_eq!(place % page(), offset % page(), "{geometry:?}");
                    let page = u64::from(geometry.page_of(unit)) * geometry.page_bytes;
                    assert!(
                        (page..page + geometry.page_bytes).contains(&place),
                        "{geometry:?}"
                    );
                }
                assert_eq!(geometry.units_with(&bytes), unit..unit + 1);
            }
        }
    }

    #[test]
    fn offset_at__of_a_unit_that_another_view_shows_is_none() {
        let geometry = Geometry::new(2 * page(), page() / 4).unwrap();
        let (unit, bytes) = (page() / 4, 2 * page());
        assert_eq!(geometry.views(), 4);
        assert_eq!(geometry.place_of(unit), bytes + unit);
        assert_eq!(geometry.offset_at(bytes + unit), Some(unit));
        for place in [unit, bytes, bytes + 2 * unit, 2 * bytes + unit] {
            assert_eq!(geometry.offset_at(place), None, "{place}");
        }
    }

    #[test]
    fn units_with__are_those_of_the_bytes() {
        let geometry = Geometry::new(page(), 64).unwrap();
        for (bytes, units) in [
            (0..0, 0..0),
            (64..64, 1..1),
            (0..1, 0..1),
            (63..65, 0..2),
            (64..128, 1..2),
        ] {
            assert_eq!(geometry.units_with(&bytes), units, "{bytes:?}");
        }
    }

    #[test]
    fn new__rounds_up() {
        let bytes = |bytes, unit_bytes| Geometry::new(bytes, unit_bytes).unwrap().bytes();
        assert_eq!(bytes(1, 64), page());
        assert_eq!(bytes(page() + 1, page()), 2 * page());
        assert_eq!(bytes(1, 1 << 20), 1 << 20);
    }

    #[test]
    fn new__refuses_units_and_sizes_that_cannot_be() {
        for unit_bytes in [0, 1, 32, 96, 4097, 4 << 20, u64::MAX] {
            let refused = Geometry::new(1 << 20, unit_bytes).unwrap_err();
            assert!(
                matches!(refused, Error::Unit(bytes) if bytes == unit_bytes),
                "{refused}"
            );
        }
        for (bytes, unit_bytes) in [(0, 4096), (1 << 60, 4096), (u64::MAX, 64), (1 << 38, 64)] {
            let refused = Geometry::new(bytes, unit_bytes).unwrap_err();
            assert!(matches!(refused, Error::Size(size) if size == bytes), "{refused}");
        }
    }
}

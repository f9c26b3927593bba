//! Guest memory: regions as the frontend shared them, checked once, then read
//! through a flat table.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use pollux_packet::SpanMut;
use pollux_sys::{MapError, Mapping};

/// Where a region lies in the three address spaces that a frontend speaks of
/// (vhost-user, "Memory region description"). All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionPlace {
    /// First guest physical address.
    pub guest_addr: u64,
    /// Length.
    pub size: u64,
    /// First address in the frontend's own process: ring addresses are given
    /// in these.
    pub user_addr: u64,
    /// Offset of the region in its file.
    pub file_offset: u64,
}

/// A region or a set of regions that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No byte.
    #[error("region at guest address {guest_addr:#x} has size 0")]
    Empty {
        /// First guest address.
        guest_addr: u64,
    },
    /// The end is beyond 2^64, or the size beyond this machine's addresses.
    #[error(
        "region at guest address {guest_addr:#x} with size {size:#x} ends beyond the address space"
    )]
    Wraps {
        /// First guest address.
        guest_addr: u64,
        /// Length in bytes.
        size: u64,
    },
    /// Two regions share guest addresses.
    #[error("regions at guest addresses {first:#x} and {second:#x} overlap")]
    Overlap {
        /// First guest address of the lower region.
        first: u64,
        /// First guest address of the upper region.
        second: u64,
    },
    /// The file cannot be mapped there.
    #[error("region at guest address {guest_addr:#x} cannot be mapped")]
    Map {
        /// First guest address.
        guest_addr: u64,
        /// Why.
        #[source]
        source: MapError,
    },
}

/// One mapped region. Cloning shares the mapping.
#[derive(Clone, Debug)]
pub struct Region {
    place: RegionPlace,
    mapping: Arc<Mapping>,
}

impl Region {
    /// Maps a region of a frontend's file.
    ///
    /// The offset in the file need not be a multiple of its page size (see
    /// [`Mapping::map`]).
    ///
    /// # Errors
    /// If the region is empty, wraps or lies outside the file, or if the kernel
    /// refuses.
    pub fn map(fd: BorrowedFd<'_>, place: RegionPlace) -> Result<Self, MemoryError> {
        let RegionPlace {
            guest_addr,
            size,
            user_addr,
            file_offset,
        } = place;
        if size == 0 {
            return Err(MemoryError::Empty { guest_addr });
        }
        let wraps = MemoryError::Wraps { guest_addr, size };
        let len = usize::try_from(size).ok();
        let (Some(len), Some(_), Some(_), Some(_)) = (
            len,
            guest_addr.checked_add(size),
            user_addr.checked_add(size),
            file_offset.checked_add(size),
        ) else {
            return Err(wraps);
        };
        let mapping = Mapping::map(fd, file_offset, len)
            .map_err(|source| MemoryError::Map { guest_addr, source })?;
        Ok(Self {
            place,
            mapping: Arc::new(mapping),
        })
    }

    /// Where the region lies.
    #[must_use]
    pub fn place(&self) -> RegionPlace {
        self.place
    }

    /// True once the file was shortened under the mapping and a touch of the
    /// missing bytes was caught. What is read since then is not the guest's.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }
}

/// A region in the table that the data path searches.
#[derive(Clone, Copy, Debug)]
struct Row {
    guest_addr: u64,
    size: u64,
    host: *mut u8,
}

/// All memory of a guest. Immutable: a change makes a new one.
#[derive(Debug)]
pub struct GuestMemory {
    /// Ascending by guest address, no two overlapping. `rows` mirrors it.
    regions: Box<[Region]>,
    rows: Box<[Row]>,
}

// SAFETY: the pointers in `rows` are into the mappings that `regions` own; what
// is read or written through them goes through spans, which are Send.
unsafe impl Send for GuestMemory {}
// SAFETY: as above: nothing in it changes, and spans may race by definition.
unsafe impl Sync for GuestMemory {}

/// Number of a region, to find it again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place(u32);

impl Place {
    /// No region.
    pub(crate) const NONE: Self = Self(u32::MAX);
}

/// Up to here a linear search is as fast as a binary one: QEMU and DPDK guests
/// have one to five regions.
const LINEAR_ROWS_MAX: usize = 8;

impl GuestMemory {
    /// Makes the memory of a guest from its regions, in any order.
    ///
    /// # Errors
    /// If two regions overlap in guest addresses.
    pub fn new(regions: impl IntoIterator<Item = Region>) -> Result<Self, MemoryError> {
        let mut regions: Vec<Region> = regions.into_iter().collect();
        regions.sort_by_key(|region| region.place.guest_addr);
        for pair in regions.windows(2) {
            let (lower, upper) = (pair[0].place, pair[1].place);
            if upper.guest_addr - lower.guest_addr < lower.size {
                return Err(MemoryError::Overlap {
                    first: lower.guest_addr,
                    second: upper.guest_addr,
                });
            }
        }
        let rows = regions
            .iter()
            .map(|region| Row {
                guest_addr: region.place.guest_addr,
                size: region.place.size,
                host: region.mapping.as_ptr().as_ptr(),
            })
            .collect();
        Ok(Self {
            regions: regions.into_boxed_slice(),
            rows,
        })
    }

    /// The regions, ascending by guest address.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// True once a region was shortened under us; see [`Region::is_poisoned`].
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.regions.iter().any(Region::is_poisoned)
    }

    /// Guest address of an address in the frontend's process.
    #[must_use]
    pub fn guest_addr_of_user(&self, user_addr: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user_addr.checked_sub(region.place.user_addr)?;
            (offset < region.place.size).then(|| region.place.guest_addr + offset)
        })
    }

    /// `len` bytes at `guest_addr` if one region holds them all. `len` 0 gives
    /// an empty span wherever it is.
    #[inline]
    #[must_use]
    pub fn span(&self, guest_addr: u64, len: u32) -> Option<SpanMut<'_>> {
        let (row, offset) = self.row(guest_addr)?;
        if row.size - offset < u64::from(len) {
            return None;
        }
        Some(Self::span_of(row, offset, len))
    }

    /// `len` bytes at `guest_addr` and the region that holds them all, if one
    /// does, for [`span_in`](Self::span_in). `near` is looked at first.
    #[inline]
    pub(crate) fn locate(
        &self,
        near: Place,
        guest_addr: u64,
        len: u32,
    ) -> Option<(Place, SpanMut<'_>)> {
        match self.span_in(near, guest_addr, len) {
            Some(span) => Some((near, span)),
            None => self.locate_far(guest_addr, len),
        }
    }

    #[cold]
    fn locate_far(&self, guest_addr: u64, len: u32) -> Option<(Place, SpanMut<'_>)> {
        let above = self
            .rows
            .partition_point(|row| row.guest_addr <= guest_addr);
        let place = Place(u32::try_from(above.checked_sub(1)?).ok()?);
        Some((place, self.span_in(place, guest_addr, len)?))
    }

    /// `len` bytes at `guest_addr` if region `place` holds them all; never for
    /// [`Place::NONE`].
    #[inline]
    pub(crate) fn span_in(&self, place: Place, guest_addr: u64, len: u32) -> Option<SpanMut<'_>> {
        let row = self.rows.get(place.0 as usize)?;
        let offset = guest_addr.wrapping_sub(row.guest_addr);
        (offset < row.size && row.size - offset >= u64::from(len))
            .then(|| Self::span_of(row, offset, len))
    }

    /// The first of `len` bytes at `guest_addr`: as many as one region holds.
    /// The rest is asked for at the address behind them, so that a buffer over
    /// adjacent regions is walked piece by piece.
    #[inline]
    #[must_use]
    pub fn piece(&self, guest_addr: u64, len: u32) -> Option<SpanMut<'_>> {
        let (row, offset) = self.row(guest_addr)?;
        let rest = u32::try_from(row.size - offset).unwrap_or(u32::MAX);
        Some(Self::span_of(row, offset, len.min(rest)))
    }

    /// Copies `into.len()` bytes at `guest_addr`, over adjacent regions too;
    /// `None` if a byte of them is in no region.
    #[must_use]
    pub fn read(&self, guest_addr: u64, into: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < into.len() {
            let addr = guest_addr.checked_add(u64::try_from(done).ok()?)?;
            let rest = u32::try_from(into.len() - done).unwrap_or(u32::MAX);
            done += self
                .piece(addr, rest)?
                .as_span()
                .snapshot(&mut into[done..]);
        }
        Some(())
    }

    /// Writes `bytes` at `guest_addr`, over adjacent regions too; `None` if a
    /// byte of them would be in no region (those before it are written).
    #[must_use]
    pub fn write(&self, guest_addr: u64, bytes: &[u8]) -> Option<()> {
        let mut done = 0;
        while done < bytes.len() {
            let addr = guest_addr.checked_add(u64::try_from(done).ok()?)?;
            let rest = u32::try_from(bytes.len() - done).unwrap_or(u32::MAX);
            let piece = self.piece(addr, rest)?;
            let len = piece.len() as usize;
            piece.write(&bytes[done..done + len]);
            done += len;
        }
        Some(())
    }

    /// The row that holds `guest_addr`, and the offset in it.
    #[inline]
    fn row(&self, guest_addr: u64) -> Option<(&Row, u64)> {
        let row = if self.rows.len() <= LINEAR_ROWS_MAX {
            self.rows
                .iter()
                .find(|row| guest_addr.wrapping_sub(row.guest_addr) < row.size)?
        } else {
            let above = self
                .rows
                .partition_point(|row| row.guest_addr <= guest_addr);
            self.rows[..above].last()?
        };
        let offset = guest_addr.wrapping_sub(row.guest_addr);
        (offset < row.size).then_some((row, offset))
    }

    /// # Panics
    /// Never: sizes fit the address space since the region is mapped.
    #[inline]
    fn span_of(row: &Row, offset: u64, len: u32) -> SpanMut<'_> {
        let offset = usize::try_from(offset).expect("a mapped offset");
        // SAFETY: callers keep `offset + len` within the row's size, which is
        // the length of a mapping that lives as long as `self`; the mapping
        // stays readable and writable even when its file is shortened (the
        // SIGBUS action of `sys` puts memory there), and nothing makes
        // references into it.
        unsafe { SpanMut::new(row.host.wrapping_add(offset), len) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const PAGE: u64 = 4096;

    fn region(guest_addr: u64, pages: u64) -> Region {
        let fd = pollux_sys::memfd("test", pages * PAGE).expect("memfd");
        Region::map(
            fd.as_fd(),
            RegionPlace {
                guest_addr,
                size: pages * PAGE,
                user_addr: guest_addr + 0x7000_0000_0000,
                file_offset: 0,
            },
        )
        .expect("map")
    }

    #[test]
    fn spans_stay_inside_one_region_and_pieces_cross() {
        let memory = GuestMemory::new([region(3 * PAGE, 1), region(PAGE, 2)]).expect("adjacent");
        assert!(memory.span(0, 1).is_none());
        assert!(memory.span(PAGE, 8192).is_some());
        assert!(memory.span(PAGE, 8193).is_none());
        assert!(memory.span(4 * PAGE, 0).is_none());
        assert!(memory.span(u64::MAX, 2).is_none());
        assert_eq!(
            memory.piece(3 * PAGE - 8, 64).expect("first piece").len(),
            8
        );
        let bytes: Vec<u8> = (0..64).collect();
        memory.write(3 * PAGE - 8, &bytes).expect("adjacent");
        let mut back = [0; 64];
        memory.read(3 * PAGE - 8, &mut back).expect("adjacent");
        assert_eq!(back[..], bytes);
        assert!(
            memory.read(4 * PAGE - 8, &mut back).is_none(),
            "runs into a hole"
        );
    }

    #[test]
    fn many_regions_are_found_by_binary_search() {
        let memory = GuestMemory::new((0..20).map(|i| region(2 * i * PAGE, 1))).expect("apart");
        for i in 0..20 {
            assert!(memory.span(2 * i * PAGE + 1, 4095).is_some());
            assert!(memory.span(2 * i * PAGE + 1, 4096).is_none());
            assert!(memory.span((2 * i + 1) * PAGE, 1).is_none());
        }
    }

    #[test]
    fn bad_regions_are_refused_with_their_numbers() {
        let overlap =
            GuestMemory::new([region(PAGE, 2), region(2 * PAGE, 1)]).expect_err("overlap");
        assert_eq!(
            overlap.to_string(),
            "regions at guest addresses 0x1000 and 0x2000 overlap"
        );
        let fd = pollux_sys::memfd("test", PAGE).expect("memfd");
        let place = RegionPlace {
            guest_addr: u64::MAX - 1,
            size: PAGE,
            user_addr: 0,
            file_offset: 0,
        };
        assert!(matches!(
            Region::map(fd.as_fd(), place),
            Err(MemoryError::Wraps { .. })
        ));
        let place = RegionPlace {
            guest_addr: 0,
            size: 2 * PAGE,
            ..place
        };
        assert!(matches!(
            Region::map(fd.as_fd(), place),
            Err(MemoryError::Map { .. })
        ));
        let place = RegionPlace { size: 0, ..place };
        assert!(matches!(
            Region::map(fd.as_fd(), place),
            Err(MemoryError::Empty { .. })
        ));
    }

    #[test]
    fn a_region_may_start_inside_a_page_of_its_file() {
        let fd = pollux_sys::memfd("test", 3 * PAGE).expect("memfd");
        let region = |file_offset, size| {
            let place = RegionPlace {
                guest_addr: file_offset,
                size,
                user_addr: 0,
                file_offset,
            };
            Region::map(fd.as_fd(), place).expect("inside the file")
        };
        let whole = GuestMemory::new([region(0, 3 * PAGE)]).expect("one");
        let cut = GuestMemory::new([region(0, 1000), region(1000, 3 * PAGE - 1000)]);
        let cut = cut.expect("they meet");
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        for addr in [996, 1000, PAGE - 4, 3 * PAGE - 8] {
            cut.write(addr, &bytes).expect("adjacent");
            let mut back = [0; 8];
            whole.read(addr, &mut back).expect("one region");
            assert_eq!(back, bytes, "{addr}");
        }
    }

    #[test]
    fn user_addresses_translate_to_guest_addresses() {
        let memory = GuestMemory::new([region(PAGE, 1)]).expect("one");
        assert_eq!(
            memory.guest_addr_of_user(0x7000_0000_0000 + PAGE + 5),
            Some(PAGE + 5)
        );
        assert_eq!(memory.guest_addr_of_user(0x7000_0000_0000 + 2 * PAGE), None);
    }
}

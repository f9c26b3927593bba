//! Where rings lie and what is in them, in both layouts (virtio 1.2, sections
//! 2.7 and 2.8).
//!
//! A ring exists only if its areas lie whole and aligned in guest memory, and
//! positions are kept inside it. So both halves of a ring are written in safe
//! code, and no value that a peer writes can lead outside.

pub(crate) mod packed;
pub(crate) mod split;

use std::ptr::NonNull;

use crate::memory::GuestMemory;
use crate::spec::{DESC_BYTES, DescFlags, RING_SIZE_MAX};

/// Where a ring lies, in guest addresses (bytes), and its size in descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAreas {
    /// Number of descriptors, at most [`RING_SIZE_MAX`](crate::RING_SIZE_MAX);
    /// in a split ring a power of two.
    pub size: u16,
    /// Descriptor table, or the descriptor ring of a packed ring: aligned to 16.
    pub desc_addr: u64,
    /// Driver area: the available ring, aligned to 2; of a packed ring the
    /// driver's event suppression, aligned to 4.
    pub avail_addr: u64,
    /// Device area: the used ring, or the device's event suppression; aligned
    /// to 4.
    pub used_addr: u64,
}

impl RingAreas {
    /// Bytes of the descriptor table.
    #[must_use]
    pub const fn desc_bytes(size: u16) -> u32 {
        DESC_BYTES * size as u32
    }

    /// Bytes of the available ring, `used_event` included.
    #[must_use]
    pub const fn avail_bytes(size: u16) -> u32 {
        6 + 2 * size as u32
    }

    /// Bytes of an event suppression area of a packed ring.
    pub const EVENTS_BYTES: u32 = 4;

    /// Bytes of the used ring, `avail_event` included.
    #[must_use]
    pub const fn used_bytes(size: u16) -> u32 {
        6 + 8 * size as u32
    }
}

/// A ring that cannot be used as it was configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Not a power of two from 1 to [`RING_SIZE_MAX`].
    #[error("ring size {size} is not a power of two from 1 to {RING_SIZE_MAX}")]
    Size {
        /// Descriptors asked for.
        size: u16,
    },
    /// A packed ring of no descriptor, or of more than [`RING_SIZE_MAX`].
    #[error("packed ring size {size} is not from 1 to {RING_SIZE_MAX}")]
    PackedSize {
        /// Descriptors asked for.
        size: u16,
    },
    /// A packed ring is to start behind its end.
    #[error("position {index} is outside a packed ring of {size} descriptors")]
    Position {
        /// Index asked for, without the wrap counter.
        index: u16,
        /// Descriptors of the ring.
        size: u16,
    },
    /// An area is not aligned as section 2.7 asks.
    #[error("{area} at guest address {addr:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// Which area.
        area: &'static str,
        /// Its guest address.
        addr: u64,
        /// Alignment in bytes.
        align: usize,
    },
    /// An area does not lie in one region of guest memory.
    #[error(
        "{area} at guest address {addr:#x} with {bytes} bytes does not lie in one memory region"
    )]
    Unmapped {
        /// Which area.
        area: &'static str,
        /// Its guest address.
        addr: u64,
        /// Its length.
        bytes: u32,
    },
}

/// A descriptor, copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: DescFlags,
    pub(crate) next: u16,
}

impl Descriptor {
    /// From the two little-endian words of the table.
    #[inline]
    pub(crate) fn from_words(addr: u64, rest: u64) -> Self {
        let [l0, l1, l2, l3, f0, f1, n0, n1] = rest.to_le_bytes();
        Self {
            addr,
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: DescFlags(u16::from_le_bytes([f0, f1])),
            next: u16::from_le_bytes([n0, n1]),
        }
    }

    /// The two little-endian words of the table.
    #[inline]
    pub(crate) fn to_words(self) -> (u64, u64) {
        let rest = u64::from(self.len) | u64::from(self.flags.0) << 32 | u64::from(self.next) << 48;
        (self.addr, rest)
    }
}

/// Checks an area of a ring and finds where it is.
fn area(
    memory: &GuestMemory,
    area: &'static str,
    addr: u64,
    bytes: u32,
    align: usize,
) -> Result<NonNull<u8>, RingError> {
    let span = memory
        .span(addr, bytes)
        .ok_or(RingError::Unmapped { area, addr, bytes })?;
    // Regions need not start at a multiple of what their file does, so it is the
    // address that will be used that has to be aligned.
    let ptr = span.as_ptr().cast_mut();
    if !ptr.addr().is_multiple_of(align) {
        return Err(RingError::Misaligned { area, addr, align });
    }
    Ok(NonNull::new(ptr).expect("a mapping is not at address 0"))
}

/// The descriptors of a ring, for a walk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingTable<'r> {
    /// Descriptors lead to each other by `next`.
    Split(&'r split::SplitRing),
    /// Descriptors follow each other.
    Packed(&'r packed::PackedRing),
}

impl RingTable<'_> {
    /// Copies a descriptor; `None` if the ring has no such.
    #[inline]
    pub(crate) fn desc(self, index: u16) -> Option<Descriptor> {
        match self {
            Self::Split(ring) => (index < ring.size()).then(|| ring.desc(index)),
            Self::Packed(ring) => (index < ring.size()).then(|| ring.desc(index)),
        }
    }

    /// Reads the two words of an entry of an indirect table of `len` entries.
    /// Those of a packed ring follow each other, all of them, whatever their
    /// flags say (section 2.8.7).
    pub(crate) fn indirect_desc(self, index: u16, len: u32, addr: u64, rest: u64) -> Descriptor {
        match self {
            Self::Split(_) => Descriptor::from_words(addr, rest),
            Self::Packed(_) => {
                let next = index.checked_add(1).filter(|&next| u32::from(next) < len);
                packed::Word(rest).table_entry(addr, next)
            }
        }
    }
}

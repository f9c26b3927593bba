//! The three areas of a split ring (virtio 1.2, section 2.7), checked once.
//!
//! A [`SplitRing`] exists only if its areas lie whole and aligned in guest
//! memory; positions are masked into the ring. So both halves of a ring are
//! written in safe code, and no value that a peer writes can lead outside.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::{Descriptor, RingAreas, RingError, area};
use crate::memory::GuestMemory;
use crate::spec::{DESC_BYTES, RING_SIZE_MAX};

/// An entry of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UsedEntry {
    pub(crate) id: u32,
    pub(crate) len: u32,
}

/// The used ring from some position on, for writing many entries in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsedSlots<'r> {
    entries: *mut [u32; 2],
    mask: u16,
    first: u16,
    ring: PhantomData<&'r SplitRing>,
}

impl UsedSlots<'_> {
    /// Writes the entry `offset` behind the first.
    #[inline]
    pub(crate) fn set(self, offset: u16, entry: UsedEntry) {
        self.word(offset, 0)
            .store(entry.id.to_le(), Ordering::Relaxed);
        self.set_len(offset, entry.len);
    }

    /// Changes the length in the entry `offset` behind the first.
    #[inline]
    pub(crate) fn set_len(self, offset: u16, len: u32) {
        self.word(offset, 1).store(len.to_le(), Ordering::Relaxed);
    }

    #[inline]
    fn word(&self, offset: u16, word: usize) -> &AtomicU32 {
        let index = self.first.wrapping_add(offset) & self.mask;
        let entry = self.entries.wrapping_add(usize::from(index));
        // SAFETY: the masked index lies in the used ring, which was checked for
        // length and alignment (4) and stays mapped while the ring is borrowed;
        // `word` is 0 or 1.
        unsafe { AtomicU32::from_ptr(entry.cast::<u32>().wrapping_add(word)) }
    }
}

/// The areas of a ring as checked pointers.
#[derive(Debug)]
pub(crate) struct SplitRing {
    size: u16,
    desc: NonNull<u8>,
    avail: NonNull<u8>,
    used: NonNull<u8>,
    /// Keeps the areas mapped.
    _memory: Arc<GuestMemory>,
}

// SAFETY: the pointers lead into mappings that `_memory` owns and are used
// through atomics only (a guest may lay areas of two rings over each other).
unsafe impl Send for SplitRing {}

const IDX: usize = 2;
const RING: usize = 4;

impl SplitRing {
    pub(crate) fn new(memory: Arc<GuestMemory>, areas: RingAreas) -> Result<Self, RingError> {
        let RingAreas {
            size,
            desc_addr,
            avail_addr,
            used_addr,
        } = areas;
        if !size.is_power_of_two() || size > RING_SIZE_MAX {
            return Err(RingError::Size { size });
        }
        let desc = area(
            &memory,
            "descriptor table",
            desc_addr,
            RingAreas::desc_bytes(size),
            16,
        )?;
        let avail = area(
            &memory,
            "available ring",
            avail_addr,
            RingAreas::avail_bytes(size),
            2,
        )?;
        let used = area(
            &memory,
            "used ring",
            used_addr,
            RingAreas::used_bytes(size),
            4,
        )?;
        Ok(Self {
            size,
            desc,
            avail,
            used,
            _memory: memory,
        })
    }

    #[inline]
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Ring position to index: sizes are powers of two.
    #[inline]
    fn index(&self, position: u16) -> usize {
        usize::from(position & (self.size - 1))
    }

    #[inline]
    fn desc_word(&self, index: u16, word: usize) -> &AtomicU64 {
        let offset = self.index(index) * DESC_BYTES as usize + word * 8;
        let ptr = self.desc.as_ptr().wrapping_add(offset).cast();
        // SAFETY: the masked index lies in the table, which was checked for
        // length and alignment (16) and stays mapped as the memory is owned.
        unsafe { AtomicU64::from_ptr(ptr) }
    }

    #[inline]
    fn avail_word(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset < RingAreas::avail_bytes(self.size) as usize);
        let ptr = self.avail.as_ptr().wrapping_add(offset).cast();
        // SAFETY: callers give a fixed field or a masked index, so the offset
        // lies in the area, which was checked for length and alignment (2) and
        // stays mapped as the memory is owned.
        unsafe { AtomicU16::from_ptr(ptr) }
    }

    #[inline]
    fn used_word(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset < RingAreas::used_bytes(self.size) as usize);
        let ptr = self.used.as_ptr().wrapping_add(offset).cast();
        // SAFETY: as `avail_word`, with the used ring (alignment 4).
        unsafe { AtomicU16::from_ptr(ptr) }
    }

    #[inline]
    fn used_entry_ptr(&self, position: u16) -> *const u8 {
        let offset = RING + 8 * self.index(position);
        self.used.as_ptr().wrapping_add(offset)
    }

    // Descriptor table: written by the driver, read by the device.

    /// Copies a descriptor. The two halves may be of different moments if the
    /// driver changes it meanwhile: then the driver lies, and the copy is
    /// judged as it is.
    #[inline]
    pub(crate) fn desc(&self, index: u16) -> Descriptor {
        let addr = self.desc_word(index, 0).load(Ordering::Relaxed);
        let rest = self.desc_word(index, 1).load(Ordering::Relaxed);
        Descriptor::from_words(u64::from_le(addr), u64::from_le(rest))
    }

    #[inline]
    pub(crate) fn set_desc(&self, index: u16, descriptor: Descriptor) {
        let (addr, rest) = descriptor.to_words();
        self.desc_word(index, 0)
            .store(addr.to_le(), Ordering::Relaxed);
        self.desc_word(index, 1)
            .store(rest.to_le(), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn prefetch_desc(&self, index: u16) {
        pollux_sys::prefetch_read(self.desc_word(index, 0).as_ptr().cast());
    }

    // Available ring: written by the driver, read by the device.

    /// Acquire: what the driver wrote before it moved the index is seen.
    #[inline]
    pub(crate) fn avail_idx(&self) -> u16 {
        u16::from_le(self.avail_word(IDX).load(Ordering::Acquire))
    }

    #[inline]
    pub(crate) fn set_avail_idx(&self, idx: u16) {
        self.avail_word(IDX).store(idx.to_le(), Ordering::Release);
    }

    #[inline]
    pub(crate) fn avail_head(&self, position: u16) -> u16 {
        let offset = RING + 2 * self.index(position);
        u16::from_le(self.avail_word(offset).load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn set_avail_head(&self, position: u16, head: u16) {
        let offset = RING + 2 * self.index(position);
        self.avail_word(offset)
            .store(head.to_le(), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn avail_flags(&self) -> u16 {
        u16::from_le(self.avail_word(0).load(Ordering::Relaxed))
    }

    pub(crate) fn set_avail_flags(&self, flags: u16) {
        self.avail_word(0).store(flags.to_le(), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn used_event(&self) -> u16 {
        let offset = RING + 2 * usize::from(self.size);
        u16::from_le(self.avail_word(offset).load(Ordering::Relaxed))
    }

    pub(crate) fn set_used_event(&self, event: u16) {
        let offset = RING + 2 * usize::from(self.size);
        self.avail_word(offset)
            .store(event.to_le(), Ordering::Relaxed);
    }

    // Used ring: written by the device, read by the driver.

    /// Acquire: what the device wrote before it moved the index is seen.
    #[inline]
    pub(crate) fn used_idx(&self) -> u16 {
        u16::from_le(self.used_word(IDX).load(Ordering::Acquire))
    }

    /// Release: entries and buffers written before are seen by the driver.
    #[inline]
    pub(crate) fn set_used_idx(&self, idx: u16) {
        self.used_word(IDX).store(idx.to_le(), Ordering::Release);
    }

    #[inline]
    pub(crate) fn used_entry(&self, position: u16) -> UsedEntry {
        let slots = self.used_slots(position);
        let load = |word| u32::from_le(slots.word(0, word).load(Ordering::Relaxed));
        UsedEntry {
            id: load(0),
            len: load(1),
        }
    }

    /// Used entries from `first` on, to write.
    #[inline]
    pub(crate) fn used_slots(&self, first: u16) -> UsedSlots<'_> {
        UsedSlots {
            entries: self.used.as_ptr().wrapping_add(RING).cast(),
            mask: self.size - 1,
            first,
            ring: PhantomData,
        }
    }

    #[inline]
    pub(crate) fn prefetch_used_entry(&self, position: u16) {
        pollux_sys::prefetch_write(self.used_entry_ptr(position));
    }

    pub(crate) fn used_flags(&self) -> u16 {
        u16::from_le(self.used_word(0).load(Ordering::Relaxed))
    }

    pub(crate) fn set_used_flags(&self, flags: u16) {
        self.used_word(0).store(flags.to_le(), Ordering::Relaxed);
    }

    pub(crate) fn avail_event(&self) -> u16 {
        let offset = RING + 8 * usize::from(self.size);
        u16::from_le(self.used_word(offset).load(Ordering::Relaxed))
    }

    pub(crate) fn set_avail_event(&self, event: u16) {
        let offset = RING + 8 * usize::from(self.size);
        self.used_word(offset)
            .store(event.to_le(), Ordering::Relaxed);
    }
}

//! The three areas of a packed ring (virtio 1.2, section 2.8), checked once.
//!
//! One ring of descriptors is written by both sides in turn: whose a descriptor
//! is, its AVAIL and USED flags say, against a wrap counter that each side
//! flips whenever it passes the end. Length, buffer id and flags are one aligned
//! word, which is always read and written at once.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{Descriptor, RingAreas, RingError, area};
use crate::memory::GuestMemory;
use crate::notify::Wish;
use crate::spec::{DESC_BYTES, DescFlags, RING_SIZE_MAX};

/// VIRTQ_DESC_F_AVAIL (section 2.8.1).
const AVAIL: u16 = 1 << 7;
/// VIRTQ_DESC_F_USED (section 2.8.1).
const USED: u16 = 1 << 15;

/// RING_EVENT_FLAGS_ENABLE (section 2.8.10).
const EVENTS_ENABLE: u16 = 0;
/// RING_EVENT_FLAGS_DISABLE.
const EVENTS_DISABLE: u16 = 1;
/// RING_EVENT_FLAGS_DESC: at a position, with VIRTIO_F_EVENT_IDX only.
const EVENTS_DESC: u16 = 2;

/// A position in a packed ring: an index, and the wrap counter of the lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    /// The wrap counter in SET_VRING_BASE and in event suppression.
    const WRAP: u16 = 1 << 15;

    #[inline]
    pub(crate) fn from_bits(bits: u16) -> Self {
        Self {
            index: bits & !Self::WRAP,
            wrap: bits & Self::WRAP != 0,
        }
    }

    #[inline]
    pub(crate) fn to_bits(self) -> u16 {
        self.index | if self.wrap { Self::WRAP } else { 0 }
    }

    #[inline]
    pub(crate) fn index(self) -> u16 {
        self.index
    }

    /// `count` descriptors further, at most a lap, in a ring of `size`.
    #[inline]
    pub(crate) fn advance(self, count: u16, size: u16) -> Self {
        debug_assert!(count <= size && self.index < size);
        // Less than 2^15, plus at most 2^15.
        let index = self.index + count;
        if index < size {
            Self { index, ..self }
        } else {
            Self {
                index: index - size,
                wrap: !self.wrap,
            }
        }
    }

    /// How far this position is past the one that `event` names, modulo 2^16:
    /// both counted from the start of this one's lap (section 2.8.10).
    #[inline]
    fn past(self, event: Self, size: u16) -> u16 {
        let distance = self.index.wrapping_sub(event.index);
        if event.wrap == self.wrap {
            distance
        } else {
            distance.wrapping_add(size)
        }
    }

    /// Descriptors from here to `end`, which is at least one and at most a lap
    /// further.
    #[inline]
    pub(crate) fn distance_to(self, end: Self, size: u16) -> u16 {
        end.past(self, size)
    }

    /// Flags that make a descriptor of this lap available.
    #[inline]
    fn available(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// Flags that make a descriptor of this lap used.
    #[inline]
    fn used(self) -> u16 {
        if self.wrap { AVAIL | USED } else { 0 }
    }
}

/// The word of length, buffer id and flags of a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word(pub(crate) u64);

impl Word {
    #[inline]
    fn new(len: u32, id: u16, flags: u16) -> Self {
        Self(u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48)
    }

    /// A descriptor that the driver makes available at `position`.
    #[inline]
    pub(crate) fn available(position: Position, len: u32, id: u16, flags: DescFlags) -> Self {
        Self::new(len, id, flags.0 | position.available())
    }

    /// A descriptor that the device returns at `position`. WRITE says that bytes
    /// were written (section 2.8.5).
    #[inline]
    pub(crate) fn used(position: Position, id: u16, written: u32) -> Self {
        let flags = if written > 0 { DescFlags::WRITE.0 } else { 0 };
        Self::new(written, id, flags | position.used())
    }

    /// [`is_available`](Self::is_available), and the only one of its chain.
    #[inline]
    pub(crate) fn is_available_alone(self, position: Position) -> bool {
        const NEXT: u16 = DescFlags::NEXT.0;
        (self.0 >> 48) as u16 & (AVAIL | USED | NEXT) == position.available()
    }

    #[inline]
    fn ownership(self) -> u16 {
        (self.0 >> 48) as u16 & (AVAIL | USED)
    }

    /// True if the driver made it available for the lap of `position`.
    #[inline]
    pub(crate) fn is_available(self, position: Position) -> bool {
        self.ownership() == position.available()
    }

    /// True if the device returned it in the lap of `position`.
    #[inline]
    pub(crate) fn is_used(self, position: Position) -> bool {
        self.ownership() == position.used()
    }

    #[inline]
    pub(crate) fn id(self) -> u16 {
        ((self.0 >> 32) & 0xffff) as u16
    }

    #[inline]
    pub(crate) fn len(self) -> u32 {
        (self.0 & 0xffff_ffff) as u32
    }

    #[inline]
    pub(crate) fn has_next(self) -> bool {
        self.flags().intersects(DescFlags::NEXT)
    }

    #[inline]
    fn flags(self) -> DescFlags {
        DescFlags((self.0 >> 48) as u16).known()
    }

    /// A buffer as the two words of an entry of an indirect table.
    pub(crate) fn in_table(buffer: Descriptor) -> (u64, u64) {
        (buffer.addr, Self::new(buffer.len, 0, buffer.flags.0).0)
    }

    /// As an entry of an indirect table, with `next` behind it.
    pub(crate) fn table_entry(self, addr: u64, next: Option<u16>) -> Descriptor {
        let keep = DescFlags::WRITE.union(DescFlags::INDIRECT);
        let flags = DescFlags(self.flags().0 & keep.0);
        let flags = match next {
            Some(_) => flags.union(DescFlags::NEXT),
            None => flags,
        };
        Descriptor {
            addr,
            len: self.len(),
            flags,
            next: next.unwrap_or_default(),
        }
    }

    /// As a descriptor that leads to `next`.
    #[inline]
    pub(crate) fn descriptor(self, addr: u64, next: u16) -> Descriptor {
        Descriptor {
            addr,
            len: self.len(),
            flags: self.flags(),
            next,
        }
    }
}

/// An event suppression area: what a half wishes to be told (section 2.8.10).
/// One word, so that position and flags belong together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Events(pub(crate) u32);

impl Events {
    /// Nothing.
    pub(crate) const NEVER: Self = Self::new(EVENTS_DISABLE, 0);

    const fn new(flags: u16, position: u16) -> Self {
        Self(position as u32 | (flags as u32) << 16)
    }

    /// When `position` is reached; or, without EVENT_IDX, everything.
    pub(crate) fn at(position: Position, event_idx: bool) -> Self {
        let flags = if event_idx {
            EVENTS_DESC
        } else {
            EVENTS_ENABLE
        };
        Self::new(flags, position.to_bits())
    }

    /// As a wish of the half that wrote it, in a ring of `size` where all before
    /// `position` was given to it, `added` descriptors at last.
    #[inline]
    pub(crate) fn wish(self, position: Position, added: u16, size: u16, event_idx: bool) -> Wish {
        let event = Position::from_bits((self.0 & 0xffff) as u16);
        match (self.0 >> 16) as u16 & 3 {
            EVENTS_DISABLE => Wish::Never,
            EVENTS_DESC if event_idx => Wish::Event {
                past: position.past(event, size),
                added,
            },
            // The reserved value too: who is told too often loses nothing.
            _ => Wish::Always,
        }
    }
}

/// Which half wrote an event suppression area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Driver,
    Device,
}

/// The areas of a ring as checked pointers.
#[derive(Debug)]
pub(crate) struct PackedRing {
    size: u16,
    desc: NonNull<u8>,
    driver_events: NonNull<u8>,
    device_events: NonNull<u8>,
    /// Keeps the areas mapped.
    _memory: Arc<GuestMemory>,
}

// SAFETY: the pointers lead into mappings that `_memory` owns and are used
// through atomics only (a guest may lay areas of two rings over each other).
unsafe impl Send for PackedRing {}

impl PackedRing {
    pub(crate) fn new(memory: Arc<GuestMemory>, areas: RingAreas) -> Result<Self, RingError> {
        let RingAreas {
            size,
            desc_addr,
            avail_addr,
            used_addr,
        } = areas;
        if size == 0 || size > RING_SIZE_MAX {
            return Err(RingError::PackedSize { size });
        }
        let bytes = RingAreas::desc_bytes(size);
        let desc = area(&memory, "descriptor ring", desc_addr, bytes, 16)?;
        let events = |name, addr| area(&memory, name, addr, RingAreas::EVENTS_BYTES, 4);
        Ok(Self {
            size,
            desc,
            driver_events: events("driver event suppression", avail_addr)?,
            device_events: events("device event suppression", used_addr)?,
            _memory: memory,
        })
    }

    #[inline]
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// A position that a peer names, if the ring has it.
    pub(crate) fn position(&self, bits: u16) -> Result<Position, RingError> {
        let position = Position::from_bits(bits);
        if position.index < self.size {
            return Ok(position);
        }
        Err(RingError::Position {
            index: position.index,
            size: self.size,
        })
    }

    #[inline]
    fn word_of(&self, index: u16, word: usize) -> &AtomicU64 {
        assert!(index < self.size, "a position of this ring");
        let offset = usize::from(index) * DESC_BYTES as usize + word * 8;
        let ptr = self.desc.as_ptr().wrapping_add(offset).cast();
        // SAFETY: the index was checked and `word` is 0 or 1, so it lies in the
        // ring, which was checked for length and alignment (16) and stays mapped
        // as the memory is owned.
        unsafe { AtomicU64::from_ptr(ptr) }
    }

    /// Acquire: what the other side wrote before it gave the descriptor away is
    /// seen.
    #[inline]
    pub(crate) fn word(&self, index: u16) -> Word {
        Word(u64::from_le(self.word_of(index, 1).load(Ordering::Acquire)))
    }

    /// Address and word of a descriptor, the word first.
    #[inline]
    pub(crate) fn slot(&self, index: u16) -> (u64, Word) {
        let word = self.word(index);
        let addr = u64::from_le(self.word_of(index, 0).load(Ordering::Relaxed));
        (addr, word)
    }

    #[inline]
    pub(crate) fn set_addr(&self, index: u16, addr: u64) {
        self.word_of(index, 0)
            .store(addr.to_le(), Ordering::Relaxed);
    }

    /// For all descriptors of a batch but its first: the other side looks at
    /// them in order, so it sees none of them before that one.
    #[inline]
    pub(crate) fn set_word(&self, index: u16, word: Word) {
        self.word_of(index, 1)
            .store(word.0.to_le(), Ordering::Relaxed);
    }

    /// For the first descriptor of a batch, after all others: the other side
    /// sees the batch whole.
    #[inline]
    pub(crate) fn release_word(&self, index: u16, word: Word) {
        self.word_of(index, 1)
            .store(word.0.to_le(), Ordering::Release);
    }

    /// As if its last lap before `position` were over: nothing in it is
    /// available or used.
    pub(crate) fn clear(&self, position: Position) {
        for index in 0..self.size {
            let lap = if index < position.index() {
                position
            } else {
                position.advance(self.size, self.size)
            };
            self.set_addr(index, 0);
            self.set_word(index, Word::new(0, 0, lap.used()));
        }
    }

    /// The descriptor at `index`, for a walk: the next one is behind it.
    #[inline]
    pub(crate) fn desc(&self, index: u16) -> Descriptor {
        let (addr, word) = self.slot(index);
        word.descriptor(addr, self.behind(index))
    }

    /// Index behind `index`.
    #[inline]
    pub(crate) fn behind(&self, index: u16) -> u16 {
        if index + 1 < self.size { index + 1 } else { 0 }
    }

    #[inline]
    pub(crate) fn prefetch_desc(&self, index: u16) {
        let offset = usize::from(index) * DESC_BYTES as usize;
        pollux_sys::prefetch_write(self.desc.as_ptr().wrapping_add(offset));
    }

    // Event suppression (section 2.8.10).

    #[inline]
    fn events(&self, half: Half) -> &AtomicU32 {
        let area = match half {
            Half::Driver => self.driver_events,
            Half::Device => self.device_events,
        };
        // SAFETY: the area was checked for length and alignment (4) and stays
        // mapped as the memory is owned.
        unsafe { AtomicU32::from_ptr(area.as_ptr().cast()) }
    }

    fn set_events(&self, half: Half, events: Events) {
        self.events(half).store(events.0.to_le(), Ordering::Relaxed);
    }

    /// Writes that `half` needs no notification.
    pub(crate) fn disable_events(&self, half: Half) {
        self.set_events(half, Events::NEVER);
    }

    /// Writes that `half` wishes a notification when `position` is reached, or,
    /// without EVENT_IDX, for everything.
    pub(crate) fn enable_events(&self, half: Half, position: Position, event_idx: bool) {
        self.set_events(half, Events::at(position, event_idx));
    }

    /// What `half` wishes to be told, read after everything before `position` was
    /// given to it, `added` descriptors at last.
    #[inline]
    pub(crate) fn wish(&self, half: Half, position: Position, added: u16, event_idx: bool) -> Wish {
        let events = Events(u32::from_le(self.events(half).load(Ordering::Relaxed)));
        events.wish(position, added, self.size, event_idx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_flip_their_wrap_counter_at_the_end() {
        let start = Position::from_bits(0x8000);
        assert_eq!(start.advance(0, 5), start);
        assert_eq!(start.advance(4, 5).to_bits(), 0x8004);
        assert_eq!(start.advance(5, 5).to_bits(), 0);
        assert_eq!(start.advance(4, 5).advance(3, 5).to_bits(), 2);
        assert_eq!(start.advance(5, 5).advance(5, 5), start);
        let largest = Position::from_bits(0xffff);
        assert_eq!(
            largest.advance(RING_SIZE_MAX, RING_SIZE_MAX).to_bits(),
            0x7fff
        );
        assert_eq!(largest.advance(1, RING_SIZE_MAX).to_bits(), 0);
    }

    #[test]
    fn distances_count_over_the_end() {
        let size = 6;
        let event = Position::from_bits(0x8004);
        let mut position = event;
        for past in 0..=size {
            assert_eq!(position.past(event, size), past);
            position = position.advance(1, size);
        }
    }

    #[test]
    fn a_descriptor_belongs_to_one_side_in_one_lap() {
        for bits in [0, 0x8000] {
            let position = Position::from_bits(bits);
            let other = Position::from_bits(bits ^ 0x8000);
            let available = Word::available(position, 7, 3, DescFlags::NEXT);
            assert!(available.is_available(position) && !available.is_available(other));
            assert!(!available.is_used(position) && !available.is_used(other));
            let used = Word::used(position, 3, 7);
            assert!(used.is_used(position) && !used.is_used(other));
            assert!(!used.is_available(position) && !used.is_available(other));
            assert_eq!((available.len(), available.id()), (7, 3));
            assert!(available.has_next() && !used.has_next());
        }
    }
}

//! Chains of buffers into a ring and back, in either layout.

use std::sync::Arc;

use super::packed::PackedDriver;
use super::split::SplitDriver;
use crate::memory::GuestMemory;
use crate::notify::{Signal, Wish};
use crate::ring::packed::{PackedRing, Word};
use crate::ring::split::SplitRing;
use crate::ring::{Descriptor, RingAreas, RingError};
use crate::spec::{DESC_BYTES, DescFlags, Features};

/// A buffer to make available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The device writes to it (and it comes after those that it reads).
    pub writable: bool,
}

impl Buffer {
    fn descriptor(self, next: Option<u16>) -> Descriptor {
        let mut flags = DescFlags::default();
        if self.writable {
            flags = flags.union(DescFlags::WRITE);
        }
        if next.is_some() {
            flags = flags.union(DescFlags::NEXT);
        }
        Descriptor {
            addr: self.addr,
            len: self.len,
            flags,
            next: next.unwrap_or_default(),
        }
    }
}

/// A chain that the device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// First descriptor of the chain, as [`DriverRing::add`] gave it.
    pub head: u16,
    /// Bytes that the device says it wrote.
    pub len: u32,
}

/// Why a driver's call did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// Fewer descriptors are free than the chain needs.
    #[error("not enough free descriptors")]
    Full,
    /// A chain needs at least one buffer.
    #[error("a chain without a buffer")]
    NoBuffer,
    /// The indirect table is not in guest memory.
    #[error("indirect table at guest address {0:#x} is outside guest memory")]
    Table(u64),
    /// The device returned what it was not given, or too much.
    #[error("the device returned head {0}, which is not out")]
    Device(u32),
}

/// The driver's own notes on a descriptor: the table itself may be changed by a
/// device that should not.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Next descriptor of the chain.
    next: u16,
    /// Descriptors of the chain that starts here; 0 if none is out.
    chain_len: u16,
}

/// Free descriptors.
#[derive(Debug)]
struct FreeList {
    len: u16,
    order: FreeOrder,
}

#[derive(Debug)]
enum FreeOrder {
    /// The last freed comes first: it and its buffer are the likeliest to be in
    /// the cache.
    LastFreed(Box<[u16]>),
    /// One after the other, as they also come back (section 2.7.9): the next one.
    InOrder { next: u16, size: u16 },
}

impl FreeList {
    /// All of `size`. In order they begin at `first`.
    fn all(size: u16, in_order: bool, first: u16) -> Self {
        let order = if in_order {
            FreeOrder::InOrder { next: first, size }
        } else {
            FreeOrder::LastFreed((0..size).rev().collect())
        };
        Self { len: size, order }
    }

    /// The entry that comes `offset` after the next.
    #[inline]
    fn peek(&self, offset: u16) -> Option<u16> {
        let above = self.len.checked_sub(offset)?.checked_sub(1)?;
        Some(match &self.order {
            FreeOrder::LastFreed(entries) => entries[usize::from(above)],
            FreeOrder::InOrder { next, size } => behind(*next, offset, *size),
        })
    }

    /// Takes the next `count` away.
    #[inline]
    fn take(&mut self, count: u16) {
        self.len -= count;
        if let FreeOrder::InOrder { next, size } = &mut self.order {
            *next = behind(*next, count, *size);
        }
    }

    #[inline]
    fn push(&mut self, entry: u16) {
        if let FreeOrder::LastFreed(entries) = &mut self.order {
            entries[usize::from(self.len)] = entry;
        }
        self.len += 1;
    }
}

/// Index `count` behind `index` in a ring of `size`, at most a lap.
#[inline]
fn behind(index: u16, count: u16, size: u16) -> u16 {
    // Less than 2^15, plus at most 2^15.
    let index = index + count;
    if index < size { index } else { index - size }
}

/// The driver half of a layout: where chains go, and where they come back.
pub(super) trait Positions {
    /// Writes descriptor `index` of the chain at `head`; those of a chain one
    /// after the other.
    fn put(&mut self, index: u16, head: u16, descriptor: Descriptor);
    /// The chain at `head` is complete. The device does not see it yet.
    fn push(&mut self, head: u16);
    /// Id and length of the next chain that was returned.
    fn used(&mut self) -> Option<(u32, u32)>;
    /// That chain, of `descriptors`, was taken.
    fn pass(&mut self, descriptors: u16);
}

/// Positions in one of the layouts.
#[derive(Debug)]
enum Layout {
    Split(SplitDriver),
    Packed(PackedDriver),
}

/// Chains that the device has returned with one entry (VIRTIO_F_IN_ORDER).
#[derive(Clone, Copy, Debug)]
struct InOrder {
    /// First descriptor of the last of them.
    last: u32,
    /// Bytes that the device says it wrote to that one.
    len: u32,
}

/// The driver half of a ring.
#[derive(Debug)]
pub struct DriverRing {
    memory: Arc<GuestMemory>,
    layout: Layout,
    free: FreeList,
    /// By descriptor, or by buffer id in a packed ring.
    slots: Box<[Slot]>,
    in_order: bool,
    /// The chain that comes back next, in order.
    oldest: u16,
    /// What is left of the last entry, in order.
    batch: Option<InOrder>,
    signal: Signal,
}

impl DriverRing {
    /// Starts the driver half: clears the ring and begins at position `base` on
    /// both sides. After a reset that is 0, or 0x8000 in a packed ring (the wrap
    /// counter is bit 15); others exercise the wrap.
    ///
    /// # Errors
    /// If the areas are not whole and aligned in guest memory.
    pub fn new(
        memory: Arc<GuestMemory>,
        areas: RingAreas,
        features: Features,
        base: u16,
    ) -> Result<Self, RingError> {
        let (layout, first) = if features.packed {
            let ring = PackedRing::new(Arc::clone(&memory), areas)?;
            let position = ring.position(base)?;
            let driver = PackedDriver::new(ring, features.event_idx, position);
            (Layout::Packed(driver), position.index())
        } else {
            let ring = SplitRing::new(Arc::clone(&memory), areas)?;
            let driver = SplitDriver::new(ring, features.event_idx, base);
            (Layout::Split(driver), base % areas.size)
        };
        let size = areas.size;
        Ok(Self {
            memory,
            layout,
            free: FreeList::all(size, features.in_order, first),
            slots: vec![Slot::default(); usize::from(size)].into_boxed_slice(),
            in_order: features.in_order,
            oldest: first,
            batch: None,
            signal: Signal::default(),
        })
    }

    /// Descriptors in the ring.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u16 {
        match &self.layout {
            Layout::Split(split) => split.ring().size(),
            Layout::Packed(packed) => packed.ring().size(),
        }
    }

    /// Descriptors that are free.
    #[inline]
    #[must_use]
    pub fn free_len(&self) -> u16 {
        self.free.len
    }

    /// Position up to which the device has been told, as in SET_VRING_BASE.
    #[must_use]
    pub fn avail_idx(&self) -> u16 {
        match &self.layout {
            Layout::Split(split) => split.published(),
            Layout::Packed(packed) => packed.published(),
        }
    }

    /// The descriptor that the next chain starts with; the buffer id of the next
    /// chain in a packed ring.
    #[inline]
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        self.free.peek(0)
    }

    /// Puts up to `count` chains of one buffer into the ring, as many as
    /// descriptors are free; the device sees them after
    /// [`publish`](Self::publish). `buffer` is asked for the buffer of each head.
    /// Returns how many.
    #[inline]
    pub fn add_many(&mut self, count: u16, buffer: impl FnMut(u16) -> Buffer) -> u16 {
        let count = count.min(self.free.len);
        let (free, slots) = (&mut self.free, &mut self.slots);
        match &mut self.layout {
            Layout::Split(split) => add_many(split, free, slots, count, buffer),
            Layout::Packed(packed) => add_many(packed, free, slots, count, buffer),
        }
        count
    }

    /// Puts a chain of one buffer into the ring. Returns its head.
    ///
    /// # Errors
    /// If no descriptor is free.
    #[inline]
    pub fn add_one(&mut self, buffer: Buffer) -> Result<u16, DriverError> {
        let head = self.next_head().ok_or(DriverError::Full)?;
        self.add_many(1, |_| buffer);
        Ok(head)
    }

    /// Puts a chain of several buffers into the ring.
    ///
    /// # Errors
    /// If too few descriptors are free, or there is no buffer.
    pub fn add(&mut self, buffers: &[Buffer]) -> Result<u16, DriverError> {
        let len = u16::try_from(buffers.len()).map_err(|_| DriverError::Full)?;
        if len == 0 {
            return Err(DriverError::NoBuffer);
        }
        if len > self.free.len {
            return Err(DriverError::Full);
        }
        let head = self.next_head().ok_or(DriverError::Full)?;
        for (offset, buffer) in (0..len).zip(buffers) {
            let index = self.free.peek(offset).ok_or(DriverError::Full)?;
            let next = if offset + 1 < len {
                self.free.peek(offset + 1)
            } else {
                None
            };
            self.put(index, head, buffer.descriptor(next));
            self.slots[usize::from(index)].next = next.unwrap_or_default();
        }
        self.push_head(head, len);
        Ok(head)
    }

    /// Puts a chain into the ring as one descriptor that leads to a table of
    /// them, which is written at `table_addr` (sections 2.7.5.3 and 2.8.7).
    ///
    /// # Errors
    /// If no descriptor is free, there is no buffer, or the table is not in
    /// guest memory.
    pub fn add_indirect(
        &mut self,
        table_addr: u64,
        buffers: &[Buffer],
    ) -> Result<u16, DriverError> {
        let len = u16::try_from(buffers.len()).map_err(|_| DriverError::Full)?;
        if len == 0 {
            return Err(DriverError::NoBuffer);
        }
        let head = self.next_head().ok_or(DriverError::Full)?;
        for (index, buffer) in (0..len).zip(buffers) {
            let next = (index + 1 < len).then_some(index + 1);
            let (addr, rest) = match &self.layout {
                Layout::Split(_) => buffer.descriptor(next).to_words(),
                Layout::Packed(_) => Word::in_table(buffer.descriptor(None)),
            };
            let at = table_addr + u64::from(DESC_BYTES) * u64::from(index);
            self.memory
                .write(at, &addr.to_le_bytes())
                .and_then(|()| self.memory.write(at + 8, &rest.to_le_bytes()))
                .ok_or(DriverError::Table(at))?;
        }
        let table = Descriptor {
            addr: table_addr,
            len: DESC_BYTES * u32::from(len),
            flags: DescFlags::INDIRECT,
            next: 0,
        };
        self.put(head, head, table);
        self.push_head(head, 1);
        Ok(head)
    }

    fn put(&mut self, index: u16, head: u16, descriptor: Descriptor) {
        match &mut self.layout {
            Layout::Split(split) => split.put(index, head, descriptor),
            Layout::Packed(packed) => packed.put(index, head, descriptor),
        }
    }

    /// Completes a chain of the next `descriptors` free ones.
    fn push_head(&mut self, head: u16, descriptors: u16) {
        self.free.take(descriptors);
        self.slots[usize::from(head)].chain_len = descriptors;
        match &mut self.layout {
            Layout::Split(split) => split.push(head),
            Layout::Packed(packed) => packed.push(head),
        }
    }

    /// Shows the device everything that was added, with one store. True if the
    /// device asks for a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let wish = match &mut self.layout {
            Layout::Split(split) => split.publish(),
            Layout::Packed(packed) => packed.publish(),
        };
        wish.is_some_and(|wish: Wish| self.signal.decide(wish))
    }

    /// Takes the next chain that the device has returned.
    ///
    /// In order, a chain that the device skipped comes with length 0, since the
    /// device says nothing else of it.
    ///
    /// # Errors
    /// If the device returned what is not out. The entry is skipped.
    #[inline]
    pub fn take_used(&mut self) -> Result<Option<Used>, DriverError> {
        if self.in_order {
            return self.take_in_order();
        }
        let (free, slots) = (&mut self.free, &mut self.slots);
        match &mut self.layout {
            Layout::Split(split) => take_used(split, free, slots),
            Layout::Packed(packed) => take_used(packed, free, slots),
        }
    }

    #[inline(never)]
    fn take_in_order(&mut self) -> Result<Option<Used>, DriverError> {
        let used = match &mut self.layout {
            Layout::Split(split) => split.used(),
            Layout::Packed(packed) => packed.used(),
        };
        let InOrder { last, len } = match (self.batch, used) {
            (Some(batch), _) => batch,
            (None, Some((last, len))) => InOrder { last, len },
            (None, None) => return Ok(None),
        };
        if used.is_none() && matches!(self.layout, Layout::Split(_)) {
            // The index says that fewer chains came back.
            self.batch = None;
            return Err(DriverError::Device(last));
        }
        let head = self.oldest;
        let descriptors = std::mem::take(&mut self.slots[usize::from(head)].chain_len);
        if descriptors == 0 {
            // All chains came back and that was not among them.
            self.batch = None;
            self.pass(1);
            return Err(DriverError::Device(last));
        }
        self.pass(descriptors);
        free_chain(&mut self.free, &self.slots, head, descriptors);
        self.oldest = behind(head, descriptors, self.size());
        if last == u32::from(head) {
            self.batch = None;
            return Ok(Some(Used { head, len }));
        }
        self.batch = Some(InOrder { last, len });
        Ok(Some(Used { head, len: 0 }))
    }

    fn pass(&mut self, descriptors: u16) {
        match &mut self.layout {
            Layout::Split(split) => split.pass(descriptors),
            Layout::Packed(packed) => packed.pass(descriptors),
        }
    }

    /// Tells the device that no call is needed: the driver polls.
    pub fn suppress_calls(&mut self) {
        match &mut self.layout {
            Layout::Split(split) => split.suppress_calls(),
            Layout::Packed(packed) => packed.suppress_calls(),
        }
    }

    /// Asks for a call on the next returned chain, then looks again: true if
    /// one is there already, and the driver must not wait.
    pub fn request_call(&mut self) -> bool {
        match &mut self.layout {
            Layout::Split(split) => split.request_call(),
            Layout::Packed(packed) => packed.request_call(),
        }
    }
}

#[inline]
fn add_many(
    positions: &mut impl Positions,
    free: &mut FreeList,
    slots: &mut [Slot],
    count: u16,
    mut buffer: impl FnMut(u16) -> Buffer,
) {
    for offset in 0..count {
        let Some(head) = free.peek(offset) else { break };
        positions.put(head, head, buffer(head).descriptor(None));
        slots[usize::from(head)].chain_len = 1;
        positions.push(head);
    }
    free.take(count);
}

/// Takes the chain that the next used entry names.
#[inline]
fn take_used(
    positions: &mut impl Positions,
    free: &mut FreeList,
    slots: &mut [Slot],
) -> Result<Option<Used>, DriverError> {
    let Some((id, len)) = positions.used() else {
        return Ok(None);
    };
    let out = u16::try_from(id).ok().and_then(|head| {
        let slot = slots.get_mut(usize::from(head))?;
        Some((head, std::mem::take(&mut slot.chain_len))).filter(|&(_, len)| len > 0)
    });
    let Some((head, descriptors)) = out else {
        positions.pass(1);
        return Err(DriverError::Device(id));
    };
    positions.pass(descriptors);
    free_chain(free, slots, head, descriptors);
    Ok(Some(Used { head, len }))
}

#[inline]
fn free_chain(free: &mut FreeList, slots: &[Slot], head: u16, descriptors: u16) {
    free.push(head);
    let mut index = head;
    for _ in 1..descriptors {
        index = slots[usize::from(index)].next;
        free.push(index);
    }
}

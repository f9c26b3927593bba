//! Chains of buffers into a split ring and back.

use std::sync::Arc;

use crate::memory::GuestMemory;
use crate::notify::{Signal, Wish, arm_then_look, publish_then_ask};
use crate::ring::{Descriptor, RingAreas, RingError, split::SplitRing};
use crate::spec::{AVAIL_NO_INTERRUPT, DESC_BYTES, DescFlags, Features, USED_NO_NOTIFY};

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

/// Free descriptors, the last freed first: it and its buffer are the likeliest
/// to be in the cache.
#[derive(Debug)]
struct FreeList {
    entries: Box<[u16]>,
    len: u16,
}

impl FreeList {
    fn all(size: u16) -> Self {
        Self {
            entries: (0..size).rev().collect(),
            len: size,
        }
    }

    /// The entry that comes `offset` after the next.
    #[inline]
    fn peek(&self, offset: u16) -> Option<u16> {
        let above = usize::from(offset) + 1;
        let index = usize::from(self.len).checked_sub(above)?;
        Some(self.entries[index])
    }

    /// Takes the next `count` away.
    #[inline]
    fn take(&mut self, count: u16) {
        self.len -= count;
    }

    #[inline]
    fn push(&mut self, entry: u16) {
        self.entries[usize::from(self.len)] = entry;
        self.len += 1;
    }
}

/// The driver half of a split ring.
#[derive(Debug)]
pub struct DriverRing {
    ring: SplitRing,
    event_idx: bool,
    free: FreeList,
    /// By descriptor.
    slots: Box<[Slot]>,
    /// Where the next chain goes.
    next_avail: u16,
    /// What the device has been told.
    published: u16,
    /// Next used entry to take.
    next_used: u16,
    /// `used.idx` as last read.
    used_seen: u16,
    signal: Signal,
}

impl DriverRing {
    /// Starts the driver half: clears the ring and begins at position `base`
    /// on both sides (0 after a reset; others exercise the wrap).
    ///
    /// # Errors
    /// If the areas are not whole and aligned in guest memory.
    pub fn new(
        memory: Arc<GuestMemory>,
        areas: RingAreas,
        features: Features,
        base: u16,
    ) -> Result<Self, RingError> {
        let ring = SplitRing::new(memory, areas)?;
        let size = ring.size();
        for index in 0..size {
            ring.set_desc(index, Descriptor::default());
            ring.set_avail_head(index, 0);
        }
        ring.set_avail_flags(0);
        ring.set_used_event(0);
        ring.set_used_flags(0);
        ring.set_avail_event(0);
        ring.set_used_idx(base);
        ring.set_avail_idx(base);
        Ok(Self {
            ring,
            event_idx: features.event_idx,
            free: FreeList::all(size),
            slots: vec![Slot::default(); usize::from(size)].into_boxed_slice(),
            next_avail: base,
            published: base,
            next_used: base,
            used_seen: base,
            signal: Signal::default(),
        })
    }

    /// Descriptors in the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Descriptors that are free.
    #[inline]
    #[must_use]
    pub fn free_len(&self) -> u16 {
        self.free.len
    }

    /// Position in the available ring that the device has been told.
    #[must_use]
    pub fn avail_idx(&self) -> u16 {
        self.published
    }

    /// The descriptor that the next chain starts with.
    #[inline]
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        self.free.peek(0)
    }

    /// Puts a chain of one buffer into the ring; the device sees it after
    /// [`publish`](Self::publish). Returns its head.
    ///
    /// # Errors
    /// If no descriptor is free.
    #[inline]
    pub fn add_one(&mut self, buffer: Buffer) -> Result<u16, DriverError> {
        let head = self.next_head().ok_or(DriverError::Full)?;
        self.ring.set_desc(head, buffer.descriptor(None));
        self.push_head(head, 1);
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
            self.ring.set_desc(index, buffer.descriptor(next));
            self.slots[usize::from(index)].next = next.unwrap_or_default();
        }
        self.push_head(head, len);
        Ok(head)
    }

    /// Puts a chain into the ring as one descriptor that leads to a table of
    /// them, which is written at `table_addr` (section 2.7.5.3).
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
            let (addr, rest) = buffer.descriptor(next).to_words();
            let at = table_addr + u64::from(DESC_BYTES) * u64::from(index);
            self.ring
                .memory()
                .write(at, &addr.to_le_bytes())
                .and_then(|()| self.ring.memory().write(at + 8, &rest.to_le_bytes()))
                .ok_or(DriverError::Table(at))?;
        }
        self.ring.set_desc(
            head,
            Descriptor {
                addr: table_addr,
                len: DESC_BYTES * u32::from(len),
                flags: DescFlags::INDIRECT,
                next: 0,
            },
        );
        self.push_head(head, 1);
        Ok(head)
    }

    /// Makes a chain of the next `descriptors` free ones available.
    #[inline]
    fn push_head(&mut self, head: u16, descriptors: u16) {
        self.free.take(descriptors);
        self.slots[usize::from(head)].chain_len = descriptors;
        self.ring.set_avail_head(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Shows the device everything that was added, with one store. True if the
    /// device asks for a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let old = self.published;
        if old == self.next_avail {
            return false;
        }
        self.published = self.next_avail;
        let new = self.next_avail;
        let wish = publish_then_ask(
            || self.ring.set_avail_idx(new),
            || {
                if self.event_idx {
                    Wish::at_event(self.ring.avail_event(), new, new.wrapping_sub(old))
                } else if self.ring.used_flags() & USED_NO_NOTIFY == 0 {
                    Wish::Always
                } else {
                    Wish::Never
                }
            },
        );
        self.signal.decide(wish)
    }

    /// Takes the next chain that the device has returned. The index is read
    /// only when all that was known is taken.
    ///
    /// # Errors
    /// If the device returned what is not out. The entry is skipped.
    #[inline]
    pub fn take_used(&mut self) -> Result<Option<Used>, DriverError> {
        if self.next_used == self.used_seen {
            self.used_seen = self.ring.used_idx();
            if self.next_used == self.used_seen {
                return Ok(None);
            }
        }
        let entry = self.ring.used_entry(self.next_used);
        self.next_used = self.next_used.wrapping_add(1);
        let not_out = DriverError::Device(entry.id);
        let head = u16::try_from(entry.id).map_err(|_| not_out)?;
        let slot = self.slots.get_mut(usize::from(head)).ok_or(not_out)?;
        let descriptors = std::mem::take(&mut slot.chain_len);
        if descriptors == 0 {
            return Err(not_out);
        }
        self.free.push(head);
        let mut index = head;
        for _ in 1..descriptors {
            index = self.slots[usize::from(index)].next;
            self.free.push(index);
        }
        Ok(Some(Used {
            head,
            len: entry.len,
        }))
    }

    /// Tells the device that no call is needed: the driver polls.
    pub fn suppress_calls(&mut self) {
        if self.event_idx {
            // As far away as can be (section 2.7.7.1).
            self.ring.set_used_event(self.next_used.wrapping_sub(1));
        } else {
            self.ring.set_avail_flags(AVAIL_NO_INTERRUPT);
        }
    }

    /// Asks for a call on the next returned chain, then looks again: true if
    /// one is there already, and the driver must not wait.
    pub fn request_call(&mut self) -> bool {
        let arm = || {
            if self.event_idx {
                self.ring.set_used_event(self.next_used);
            } else {
                self.ring.set_avail_flags(0);
            }
        };
        arm_then_look(arm, || self.ring.used_idx()) != self.next_used
    }
}

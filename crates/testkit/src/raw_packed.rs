//! A packed ring written by hand (virtio 1.2, section 2.8).

use std::sync::Arc;

use pollux_virtio::{DESC_BYTES, DescFlags, GuestMemory, RingAreas};

use crate::raw::{RawDesc, RawMemory, RawUsed};

/// VIRTQ_DESC_F_AVAIL (section 2.8.1).
const AVAIL: u16 = 1 << 7;
/// VIRTQ_DESC_F_USED (section 2.8.1).
const USED: u16 = 1 << 15;
/// The wrap counter in a position.
const WRAP: u16 = 1 << 15;
/// Offset of the flags in a descriptor: they are written last.
const FLAGS: usize = 14;

impl RawDesc {
    /// As it lies in a packed ring or its tables, with `next` as the buffer id.
    #[must_use]
    pub fn to_packed_bytes(self) -> [u8; DESC_BYTES as usize] {
        let mut bytes = self.to_bytes();
        bytes[12..14].copy_from_slice(&self.next.to_le_bytes());
        bytes[FLAGS..].copy_from_slice(&self.flags.0.to_le_bytes());
        bytes
    }

    /// From a packed ring.
    #[must_use]
    pub fn from_packed_bytes(bytes: [u8; DESC_BYTES as usize]) -> Self {
        // The two words behind the length change places.
        let swapped = Self::from_bytes(bytes);
        Self {
            flags: DescFlags(swapped.next),
            next: swapped.flags.0,
            ..swapped
        }
    }
}

/// The driver's side of a packed ring without any rule. Positions are an index,
/// with the wrap counter in bit 15.
#[derive(Clone, Debug)]
pub struct RawPacked {
    memory: RawMemory,
    areas: RingAreas,
    /// Where the next descriptor goes.
    next: u16,
    /// Slot and flags of the first descriptor that was not published.
    held: Option<(u16, u16)>,
}

impl RawPacked {
    /// Writes to the ring at `areas` from position `base` on. The ring is taken
    /// as it is: a driver half must have cleared it.
    #[must_use]
    pub fn new(memory: Arc<GuestMemory>, areas: RingAreas, base: u16) -> Self {
        Self {
            memory: RawMemory(memory),
            areas,
            next: base,
            held: None,
        }
    }

    /// Descriptors in the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.areas.size
    }

    /// Position of the next descriptor.
    #[must_use]
    pub fn position(&self) -> u16 {
        self.next
    }

    /// Goes on writing at any position of the ring.
    pub fn set_position(&mut self, position: u16) {
        self.next = position;
    }

    /// The position `count` descriptors behind another, at most a lap.
    #[must_use]
    pub fn behind(&self, position: u16, count: u16) -> u16 {
        let index = (position & !WRAP) + count;
        if index < self.areas.size {
            index | position & WRAP
        } else {
            (index - self.areas.size) | !position & WRAP
        }
    }

    /// Flags that make a descriptor at a position available.
    #[must_use]
    pub fn available_flags(position: u16) -> DescFlags {
        DescFlags(if position & WRAP != 0 { AVAIL } else { USED })
    }

    /// Guest address of the descriptor in a slot.
    #[must_use]
    pub fn desc_addr(&self, slot: u16) -> u64 {
        self.areas.desc_addr + u64::from(DESC_BYTES) * u64::from(slot)
    }

    /// Writes the descriptor in a slot, flags last, all of them as they are.
    pub fn set_desc(&self, slot: u16, desc: RawDesc) {
        let (addr, bytes) = (self.desc_addr(slot), desc.to_packed_bytes());
        self.memory.write(addr, &bytes[..FLAGS]);
        self.memory.write_u16(addr + FLAGS as u64, desc.flags.0);
    }

    /// The descriptor in a slot, as whoever wrote it last has left it.
    #[must_use]
    pub fn desc(&self, slot: u16) -> RawDesc {
        let mut bytes = [0; DESC_BYTES as usize];
        self.memory.read_into(self.desc_addr(slot), &mut bytes);
        RawDesc::from_packed_bytes(bytes)
    }

    /// Writes the next descriptor as it is, but for the two flags that make it
    /// available. The device sees it after [`publish`](Self::publish).
    pub fn put(&mut self, desc: RawDesc) {
        let flags = desc.flags.0 & !(AVAIL | USED) | Self::available_flags(self.next).0;
        let slot = self.next & !WRAP;
        let addr = self.desc_addr(slot);
        self.memory.write(addr, &desc.to_packed_bytes()[..FLAGS]);
        if self.held.is_none() {
            self.held = Some((slot, flags));
        } else {
            self.memory.write_u16(addr + FLAGS as u64, flags);
        }
        self.next = self.behind(self.next, 1);
    }

    /// Puts a chain whose last descriptor has the buffer id; those before it
    /// have another, which nobody may look at (section 2.8.6).
    pub fn offer_chain(&mut self, id: u16, chain: &[RawDesc]) {
        let Some((last, rest)) = chain.split_last() else {
            return;
        };
        for desc in rest {
            self.put(desc.then(!id));
        }
        self.put(RawDesc { next: id, ..*last });
    }

    /// Makes everything that was put available.
    pub fn publish(&mut self) {
        if let Some((slot, flags)) = self.held.take() {
            let addr = self.desc_addr(slot) + FLAGS as u64;
            self.memory.write_u16(addr, flags);
        }
    }

    /// What the device returned at a position, if it did.
    #[must_use]
    pub fn used(&self, position: u16) -> Option<RawUsed> {
        let slot = position & !WRAP;
        let wanted = if position & WRAP != 0 {
            AVAIL | USED
        } else {
            0
        };
        // The flags first: what is behind them was written before.
        let flags = self.memory.read_u16(self.desc_addr(slot) + FLAGS as u64);
        (flags & (AVAIL | USED) == wanted).then(|| {
            let desc = self.desc(slot);
            RawUsed {
                id: desc.next.into(),
                len: desc.len,
            }
        })
    }

    /// Writes the driver's event suppression (section 2.8.10): any position, any
    /// flags.
    pub fn set_driver_events(&self, position: u16, flags: u16) {
        self.memory.write_u16(self.areas.avail_addr, position);
        self.memory.write_u16(self.areas.avail_addr + 2, flags);
    }

    /// Position and flags of the device's event suppression.
    #[must_use]
    pub fn device_events(&self) -> (u16, u16) {
        let addr = self.areas.used_addr;
        (self.memory.read_u16(addr), self.memory.read_u16(addr + 2))
    }
}

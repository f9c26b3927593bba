//! Rings written by hand: whatever a lying guest can write, at the guest
//! addresses where it would. Here memory, descriptors and split rings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use pollux_virtio::{DESC_BYTES, DescFlags, GuestMemory, RingAreas};

/// A descriptor as it lies in a table (virtio 1.2, sections 2.7.5 and 2.8.13);
/// nothing of it needs to make sense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawDesc {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Any 16 bits.
    pub flags: DescFlags,
    /// Any index; in a packed ring the buffer id.
    pub next: u16,
}

impl RawDesc {
    /// A buffer for the device to read, the last of its chain.
    #[must_use]
    pub fn readable(addr: u64, len: u32) -> Self {
        Self {
            addr,
            len,
            ..Self::default()
        }
    }

    /// A buffer for the device to write, the last of its chain.
    #[must_use]
    pub fn writable(addr: u64, len: u32) -> Self {
        Self::readable(addr, len).with(DescFlags::WRITE)
    }

    /// An indirect table of `bytes` at `addr`.
    #[must_use]
    pub fn indirect(addr: u64, bytes: u32) -> Self {
        Self::readable(addr, bytes).with(DescFlags::INDIRECT)
    }

    /// The same with further flags.
    #[must_use]
    pub fn with(self, flags: DescFlags) -> Self {
        Self {
            flags: self.flags.union(flags),
            ..self
        }
    }

    /// The same with another one behind it.
    #[must_use]
    pub fn then(self, next: u16) -> Self {
        Self {
            next,
            ..self.with(DescFlags::NEXT)
        }
    }

    /// As it lies in a split ring or its tables.
    #[must_use]
    pub fn to_bytes(self) -> [u8; DESC_BYTES as usize] {
        let mut bytes = [0; DESC_BYTES as usize];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.0.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }

    /// From a split ring.
    #[must_use]
    pub fn from_bytes(bytes: [u8; DESC_BYTES as usize]) -> Self {
        let (addr, rest) = bytes.split_first_chunk().expect("8 of 16 bytes");
        let (len, rest) = rest.split_first_chunk().expect("4 of 8 bytes");
        let (flags, rest) = rest.split_first_chunk().expect("2 of 4 bytes");
        let (next, _) = rest.split_first_chunk().expect("2 of 2 bytes");
        Self {
            addr: u64::from_le_bytes(*addr),
            len: u32::from_le_bytes(*len),
            flags: DescFlags(u16::from_le_bytes(*flags)),
            next: u16::from_le_bytes(*next),
        }
    }
}

/// What the device says of a chain that it returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawUsed {
    /// Head of the chain, or its buffer id in a packed ring.
    pub id: u32,
    /// Bytes that the device says it wrote.
    pub len: u32,
}

/// Guest memory as a guest uses it: any address, at any moment.
#[derive(Clone, Debug)]
pub(crate) struct RawMemory(pub(crate) Arc<GuestMemory>);

impl RawMemory {
    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        self.0
            .write(addr, bytes)
            .unwrap_or_else(|| panic!("{addr:#x} is outside guest memory"));
    }

    pub(crate) fn read_into(&self, addr: u64, bytes: &mut [u8]) {
        self.0
            .read(addr, bytes)
            .unwrap_or_else(|| panic!("{addr:#x} is outside guest memory"));
    }

    pub(crate) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read_into(addr, &mut bytes);
        bytes
    }

    /// A 16-bit field as the hardware sees it, so that a test may race.
    fn word(&self, addr: u64) -> &AtomicU16 {
        let span = self
            .0
            .span(addr, 2)
            .unwrap_or_else(|| panic!("{addr:#x} is outside guest memory"));
        let ptr: *mut u16 = span.as_ptr().cast_mut().cast();
        assert!(ptr.is_aligned(), "{addr:#x} is odd");
        // SAFETY: aligned, and mapped for as long as the memory is owned.
        unsafe { AtomicU16::from_ptr(ptr) }
    }

    pub(crate) fn read_u16(&self, addr: u64) -> u16 {
        u16::from_le(self.word(addr).load(Ordering::Acquire))
    }

    pub(crate) fn write_u16(&self, addr: u64, value: u16) {
        self.word(addr).store(value.to_le(), Ordering::Release);
    }

    fn read_u32(&self, addr: u64) -> u32 {
        let mut bytes = [0; 4];
        self.read_into(addr, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}

/// The driver's side of a split ring without any rule: no free list, no check.
#[derive(Clone, Debug)]
pub struct RawRing {
    memory: RawMemory,
    areas: RingAreas,
    /// Position of the next available entry.
    next_avail: u16,
    /// Position of the next used entry.
    next_used: u16,
}

/// Offset of the index in the available and the used ring.
const IDX: u64 = 2;
/// Offset of the entries in the available and the used ring.
const RING: u64 = 4;

impl RawRing {
    /// Writes to the ring at `areas` from position `base` on. The ring is taken
    /// as it is: a driver half must have cleared it.
    #[must_use]
    pub fn new(memory: Arc<GuestMemory>, areas: RingAreas, base: u16) -> Self {
        Self {
            memory: RawMemory(memory),
            areas,
            next_avail: base,
            next_used: base,
        }
    }

    /// The memory that the ring lies in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory.0
    }

    /// Descriptors in the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.areas.size
    }

    /// Position of the next available entry.
    #[must_use]
    pub fn position(&self) -> u16 {
        self.next_avail
    }

    /// Writes bytes anywhere in guest memory.
    ///
    /// # Panics
    /// If a byte is outside.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        self.memory.write(addr, bytes);
    }

    /// Reads bytes anywhere in guest memory.
    ///
    /// # Panics
    /// If a byte is outside.
    #[must_use]
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        self.memory.read(addr, len)
    }

    fn index(&self, position: u16) -> u64 {
        u64::from(position % self.areas.size)
    }

    /// Guest address of a descriptor of the ring's table.
    #[must_use]
    pub fn desc_addr(&self, index: u16) -> u64 {
        self.areas.desc_addr + u64::from(DESC_BYTES) * u64::from(index)
    }

    /// Guest address of the available entry at a position.
    #[must_use]
    pub fn avail_entry_addr(&self, position: u16) -> u64 {
        self.areas.avail_addr + RING + 2 * self.index(position)
    }

    /// Writes a descriptor of the ring's table.
    pub fn set_desc(&self, index: u16, desc: RawDesc) {
        self.write(self.desc_addr(index), &desc.to_bytes());
    }

    /// A descriptor of the ring's table.
    ///
    /// # Panics
    /// If there is no such descriptor.
    #[must_use]
    pub fn desc(&self, index: u16) -> RawDesc {
        let bytes = self.read(self.desc_addr(index), DESC_BYTES as usize);
        RawDesc::from_bytes(bytes.try_into().expect("16 bytes were read"))
    }

    /// Writes an indirect table.
    pub fn set_table(&self, addr: u64, table: &[RawDesc]) {
        let bytes: Vec<u8> = table.iter().flat_map(|desc| desc.to_bytes()).collect();
        self.write(addr, &bytes);
    }

    /// Writes descriptors from `first` on, each leading to the one after it, and
    /// offers the chain. The device sees it after [`publish`](Self::publish).
    pub fn offer_chain(&mut self, first: u16, chain: &[RawDesc]) {
        for (index, desc) in (first..).zip(chain) {
            let last = usize::from(index - first) + 1 == chain.len();
            let desc = if last { *desc } else { desc.then(index + 1) };
            self.set_desc(index, desc);
        }
        self.offer(first);
    }

    /// Writes the next available entry, whatever `head` is.
    pub fn offer(&mut self, head: u16) {
        self.memory
            .write_u16(self.avail_entry_addr(self.next_avail), head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Moves `avail.idx` behind everything that was offered.
    pub fn publish(&self) {
        self.set_avail_idx(self.next_avail);
    }

    /// Writes any `avail.idx`.
    pub fn set_avail_idx(&self, idx: u16) {
        self.memory.write_u16(self.areas.avail_addr + IDX, idx);
    }

    /// Writes `flags` of the available ring.
    pub fn set_avail_flags(&self, flags: u16) {
        self.memory.write_u16(self.areas.avail_addr, flags);
    }

    /// Writes `used_event`.
    pub fn set_used_event(&self, event: u16) {
        let offset = RING + 2 * u64::from(self.areas.size);
        self.memory.write_u16(self.areas.avail_addr + offset, event);
    }

    /// `flags` of the used ring.
    #[must_use]
    pub fn used_flags(&self) -> u16 {
        self.memory.read_u16(self.areas.used_addr)
    }

    /// Writes any `used.idx`, which is the device's to write.
    pub fn set_used_idx(&self, idx: u16) {
        self.memory.write_u16(self.areas.used_addr + IDX, idx);
    }

    /// `used.idx`.
    #[must_use]
    pub fn used_idx(&self) -> u16 {
        self.memory.read_u16(self.areas.used_addr + IDX)
    }

    /// `avail_event`.
    #[must_use]
    pub fn avail_event(&self) -> u16 {
        self.memory
            .read_u16(self.areas.used_addr + RING + 8 * u64::from(self.areas.size))
    }

    /// The used entry at a position, published or not.
    #[must_use]
    pub fn used_entry(&self, position: u16) -> RawUsed {
        let addr = self.areas.used_addr + RING + 8 * self.index(position);
        RawUsed {
            id: self.memory.read_u32(addr),
            len: self.memory.read_u32(addr + 4),
        }
    }

    /// Everything that the device has returned since the last call.
    ///
    /// # Panics
    /// If it returned more than the ring holds.
    pub fn take_used(&mut self) -> Vec<RawUsed> {
        let count = self.used_idx().wrapping_sub(self.next_used);
        assert!(count <= self.areas.size, "used.idx moved by {count}");
        let used = (0..count).map(|offset| self.used_entry(self.next_used.wrapping_add(offset)));
        let used = used.collect();
        self.next_used = self.next_used.wrapping_add(count);
        used
    }
}

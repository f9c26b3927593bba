//! A packed ring as virtio 1.2, section 2.8, tells it, with nothing of pollux's:
//! one descriptor after the other, one step after the other.

use std::collections::VecDeque;

/// Descriptor flags (sections 2.8.1 and 2.8.13).
pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// The bits of a descriptor's flags that nobody has given a meaning.
const RESERVED: u16 = !(NEXT | WRITE | INDIRECT | AVAIL | USED);

/// Event flags (section 2.8.10).
pub(super) const ENABLE: u16 = 0;
pub(super) const DISABLE: u16 = 1;
pub(super) const DESC: u16 = 2;

/// A descriptor of the ring (section 2.8.13).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) id: u16,
    pub(super) flags: u16,
}

impl Slot {
    pub(super) fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.id.to_le_bytes());
        bytes[14..].copy_from_slice(&self.flags.to_le_bytes());
        bytes
    }

    /// From memory, to say what is wrong.
    pub(super) fn from_bytes(bytes: [u8; 16]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let quad = |at: usize| u32::from(word(at)) | u32::from(word(at + 2)) << 16;
        Self {
            addr: u64::from(quad(0)) | u64::from(quad(4)) << 32,
            len: quad(8),
            id: word(12),
            flags: word(14),
        }
    }
}

/// A place in the ring and the wrap counter of the side that is there (section
/// 2.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) index: u16,
    pub(super) wrap: bool,
}

impl At {
    /// One descriptor further: the counter changes when the last was passed.
    fn step(&mut self, size: u16) {
        self.index += 1;
        if self.index == size {
            self.index = 0;
            self.wrap = !self.wrap;
        }
    }

    pub(super) fn behind(mut self, count: u16, size: u16) -> Self {
        for _ in 0..count {
            self.step(size);
        }
        self
    }

    /// As in off_wrap of an event structure (section 2.8.14) and in
    /// SET_VRING_BASE.
    pub(super) fn to_bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// Available: AVAIL is the driver's counter, USED is not (section 2.8.1).
    fn available(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// Used: both are the device's counter.
    fn used(self) -> u16 {
        if self.wrap { AVAIL | USED } else { 0 }
    }
}

/// A chain of the driver's.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    /// Which buffers and table are its own.
    pub(super) key: u16,
    pub(super) id: u16,
    /// Address and length of each buffer.
    pub(super) buffers: Vec<(u64, u32)>,
    /// Where the table lies that they are in, if they are.
    pub(super) table: Option<u64>,
    /// Where it begins.
    pub(super) at: At,
}

impl Chain {
    /// Descriptors of the ring.
    pub(super) fn descs(&self) -> u16 {
        match self.table {
            Some(_) => 1,
            None => u16::try_from(self.buffers.len()).expect("no longer than a ring"),
        }
    }

    pub(super) fn bytes(&self) -> u32 {
        self.buffers.iter().map(|&(_, len)| len).sum()
    }
}

/// The ring and both sides of it.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) size: u16,
    /// The driver adds to an RX ring.
    is_rx: bool,
    pub(super) slots: Vec<Slot>,
    /// Where the driver makes the next descriptor available.
    avail: At,
    /// Where the device takes and returns the next descriptor.
    pub(super) device: At,
    /// Where the driver looks for the next used descriptor.
    used: At,
    /// Written, but for the flags of the first descriptor of each.
    pub(super) held: VecDeque<(Chain, u16)>,
    /// Available to the device.
    pub(super) out: VecDeque<Chain>,
    /// Returned, and not seen by the driver.
    returned: VecDeque<(Chain, u32)>,
    pub(super) in_order: bool,
    pub(super) event_idx: bool,
    /// The driver's event structure: off_wrap, flags.
    pub(super) driver_events: (u16, u16),
    /// A notification was decided since the start.
    pub(super) is_known: bool,
}

impl Model {
    /// A ring that was gone around up to `at`: nothing in it is available or used.
    /// What else is in the descriptors has no meaning.
    pub(super) fn new(size: u16, at: At, is_rx: bool, noise: u64) -> Self {
        let slots = (0..size).map(|index| {
            let junk = noise.wrapping_mul(u64::from(index) * 2 + 1);
            let [a, b, c, d, ..] = junk.to_le_bytes();
            // Used in this lap, or in the one before.
            let lap = At {
                index,
                wrap: at.wrap == (index < at.index),
            };
            Slot {
                addr: junk,
                len: u32::from_le_bytes([a, b, c, d]),
                id: u16::from_le_bytes([c, d]),
                flags: u16::from_le_bytes([a, b]) & !(AVAIL | USED) | lap.used(),
            }
        });
        Self {
            size,
            is_rx,
            slots: slots.collect(),
            avail: at,
            device: at,
            used: at,
            held: VecDeque::new(),
            out: VecDeque::new(),
            returned: VecDeque::new(),
            in_order: false,
            event_idx: false,
            driver_events: (0, ENABLE),
            is_known: false,
        }
    }

    /// Descriptors that the driver may write.
    pub(super) fn free(&self) -> u16 {
        let held = self.held.iter().map(|(chain, _)| chain);
        let returned = self.returned.iter().map(|(chain, _)| chain);
        let taken = held.chain(&self.out).chain(returned);
        self.size - taken.map(Chain::descs).sum::<u16>()
    }

    /// True if the chain is the driver's own.
    pub(super) fn is_unused(&self, key: u16) -> bool {
        let held = self.held.iter().map(|(chain, _)| chain);
        let returned = self.returned.iter().map(|(chain, _)| chain);
        let mut taken = held.chain(&self.out).chain(returned);
        taken.all(|chain| chain.key != key)
    }

    /// The driver writes a chain (sections 2.8.6 and 2.8.7): everything but the
    /// flags of its first descriptor. `reserved` is what it sets of flags without
    /// a meaning.
    pub(super) fn add(&mut self, mut chain: Chain, reserved: u16) {
        assert!(chain.descs() <= self.free(), "a driver counts");
        chain.at = self.avail;
        let write = if self.is_rx { WRITE } else { 0 };
        let descs: Vec<(u64, u32, u16)> = match chain.table {
            Some(table) => {
                let entries = u32::try_from(chain.buffers.len()).expect("few");
                vec![(table, 16 * entries, INDIRECT)]
            }
            None => {
                let buffers = chain.buffers.iter();
                buffers.map(|&(addr, len)| (addr, len, write)).collect()
            }
        };
        let mut first_flags = 0;
        for (number, &(addr, len, flags)) in descs.iter().enumerate() {
            let is_last = number + 1 == descs.len();
            let next = if is_last { 0 } else { NEXT };
            let flags = flags | next | self.avail.available() | reserved & RESERVED;
            let slot = &mut self.slots[usize::from(self.avail.index)];
            (slot.addr, slot.len) = (addr, len);
            // The id is in the last descriptor; what it is in others has no
            // meaning.
            slot.id = if is_last { chain.id } else { !chain.id };
            if number == 0 {
                first_flags = flags;
            } else {
                slot.flags = flags;
            }
            self.avail.step(self.size);
        }
        self.held.push_back((chain, first_flags));
    }

    /// The driver writes the flags that make `count` chains available.
    pub(super) fn publish(&mut self, count: usize) {
        for _ in 0..count {
            let Some((chain, flags)) = self.held.pop_front() else {
                break;
            };
            self.slots[usize::from(chain.at.index)].flags = flags;
            self.out.push_back(chain);
        }
    }

    /// The device returns chains, having written so many bytes to each: a used
    /// descriptor for each where it began, or with `as_one` (section 2.8.8) one
    /// for all of them.
    pub(super) fn give_back(&mut self, written: &[u32], as_one: bool) {
        let start = self.device;
        let mut last_id = 0;
        for &len in written {
            let chain = self.out.pop_front().expect("what was not out");
            assert_eq!(chain.at, self.device, "the model keeps its place");
            if !as_one {
                self.use_slot(self.device, chain.id, len);
            }
            last_id = chain.id;
            self.device = self.device.behind(chain.descs(), self.size);
            self.returned.push_back((chain, len));
        }
        if as_one && !written.is_empty() {
            self.use_slot(start, last_id, 0);
        }
    }

    /// A used descriptor (sections 2.8.1 and 2.8.5): the address is not touched.
    fn use_slot(&mut self, at: At, id: u16, len: u32) {
        let slot = &mut self.slots[usize::from(at.index)];
        slot.id = id;
        slot.len = len;
        slot.flags = at.used() | if len > 0 { WRITE } else { 0 };
    }

    /// Whether a call has to be sent for what was returned from `start` on
    /// (section 2.8.10).
    pub(super) fn must_call(&mut self, start: At) -> bool {
        let is_first = !std::mem::replace(&mut self.is_known, true);
        let (off_wrap, flags) = self.driver_events;
        match flags & 3 {
            DISABLE => false,
            // What the device returned before it was started is not known to the
            // one that was started.
            DESC if self.event_idx => is_first || self.has_passed(start, off_wrap),
            // Without the feature, and the value that is reserved: rather call.
            _ => true,
        }
    }

    /// True if the descriptor that `off_wrap` names lies between `start` and where
    /// the device is now.
    pub(super) fn has_passed(&self, start: At, off_wrap: u16) -> bool {
        let mut at = start;
        loop {
            if at.to_bits() == off_wrap {
                return true;
            }
            at.step(self.size);
            if at == self.device {
                return false;
            }
        }
    }

    /// The driver takes what was returned, by what is in the ring; gives keys of
    /// the chains and what was written to them.
    pub(super) fn take_used(&mut self) -> Vec<(u16, u32)> {
        let mut taken = Vec::new();
        loop {
            // A driver with nothing out does not look: flags of two laps ago look
            // the same.
            let has_out = !self.returned.is_empty() || !self.out.is_empty();
            let slot = self.slots[usize::from(self.used.index)];
            if !has_out || slot.flags & (AVAIL | USED) != self.used.used() {
                break;
            }
            // With IN_ORDER, all up to this one are returned.
            loop {
                let (chain, len) = self.returned.pop_front().expect("returned once");
                self.used = self.used.behind(chain.descs(), self.size);
                taken.push((chain.key, len));
                if chain.id == slot.id {
                    assert_eq!(slot.len, len, "the length that was returned");
                    break;
                }
                assert!(self.in_order, "id {} is not the next", slot.id);
                assert_eq!(len, 0, "nothing was written to what is in a batch");
            }
        }
        assert!(self.returned.is_empty(), "the driver sees all of them");
        assert_eq!(self.used, self.device, "the driver goes as far");
        taken
    }
}

//! A driver that keeps every rule: what it writes goes into the model and into
//! memory.

use std::sync::Arc;

use pollux_virtio::device::RingConfig;
use pollux_virtio::{Features, RingAreas};

use super::memory::{BUFFERS, BUFFERS_BYTES, Memory, PLACES, TABLE_LEN, TABLES};
use super::model::{At, Chain, DESC, DISABLE, ENABLE, INDIRECT, Model, Slot, WRITE};
use crate::bytes::Bytes;
use crate::marks;

/// Lengths of buffers that are met often.
const LENS: [u32; 12] = [100, 12, 0, 1, 11, 26, 25, 14, 60, 500, 1526, 65_547];

/// What the device has to have said in its event structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    Everything,
    At(At),
}

/// Memory, the model, and where the ring lies.
#[derive(Debug)]
pub(super) struct Driver {
    pub(super) memory: Memory,
    pub(super) model: Model,
    pub(super) features: Features,
    pub(super) is_rx: bool,
    /// Index of [`PLACES`].
    place: usize,
    pub(super) is_cut: bool,
    /// What ids are made of.
    salt: u16,
    /// The device's event structure.
    pub(super) wish: Wish,
}

impl Driver {
    pub(super) fn new(bytes: &mut Bytes<'_>) -> Self {
        let bits = bytes.u8();
        let features = Features {
            version_1: bits & 1 == 0,
            mergeable: bits & 2 != 0,
            event_idx: bits & 4 != 0,
            in_order: bits & 8 != 0,
            packed: true,
        };
        let is_rx = bits & 16 != 0;
        let size = u16::try_from(1 + bytes.below(70)).expect("small");
        let at = At {
            index: u16::from(bytes.u8()) % size,
            wrap: bits & 32 == 0,
        };
        let salt = bytes.u16();
        let mut model = Model::new(
            size,
            at,
            is_rx,
            u64::from(salt).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        );
        (model.in_order, model.event_idx) = (features.in_order, features.event_idx);
        let mut driver = Self {
            memory: Memory::new(),
            model,
            features,
            is_rx,
            place: usize::from(bits & 64 != 0),
            is_cut: bits & 128 != 0,
            salt,
            wish: Wish::Nothing,
        };
        driver.write_ring();
        driver
    }

    pub(super) fn areas(&self) -> RingAreas {
        let [desc_addr, avail_addr, used_addr] = PLACES[self.place];
        RingAreas {
            size: self.model.size,
            desc_addr,
            avail_addr,
            used_addr,
        }
    }

    pub(super) fn header_bytes(&self) -> u32 {
        // Section 5.1.6.1.
        if self.features.version_1 || self.features.mergeable {
            12
        } else {
            10
        }
    }

    /// What the device is started with.
    pub(super) fn config(&self, base: u16) -> RingConfig {
        RingConfig {
            areas: self.areas(),
            features: self.features,
            base,
            call: None,
            counters: Arc::default(),
        }
    }

    fn slot_addr(&self, index: u16) -> u64 {
        PLACES[self.place][0] + 16 * u64::from(index)
    }

    fn write_slot(&mut self, index: u16) {
        let bytes = self.model.slots[usize::from(index)].to_bytes();
        self.memory.write(self.slot_addr(index), &bytes);
    }

    fn write_events(&mut self) {
        let (off_wrap, flags) = self.model.driver_events;
        let [a, b] = off_wrap.to_le_bytes();
        let [c, d] = flags.to_le_bytes();
        self.memory.write(PLACES[self.place][1], &[a, b, c, d]);
    }

    /// Everything but the device's event structure.
    fn write_ring(&mut self) {
        for index in 0..self.model.size {
            self.write_slot(index);
        }
        self.write_events();
    }

    /// Copies the ring to another place.
    pub(super) fn go_elsewhere(&mut self, bytes: &mut Bytes<'_>) {
        let bits = bytes.u8();
        self.is_cut = bits & 1 != 0;
        if bits & 2 == 0 {
            self.place = 1 - self.place;
            self.write_ring();
        }
    }

    /// One operation of the driver's.
    pub(super) fn step(&mut self, op: u32, bytes: &mut Bytes<'_>) {
        match op {
            0..=4 => self.add(bytes),
            5 => {
                let count = usize::from(bytes.u8());
                self.publish(count);
            }
            6 | 7 => {
                let taken = self.model.take_used();
                if taken.len() > 1 {
                    marks::reach("several-taken");
                }
            }
            _ => self.set_events(bytes),
        }
    }

    pub(super) fn publish(&mut self, count: usize) {
        let heads: Vec<u16> = self
            .model
            .held
            .iter()
            .map(|(chain, _)| chain.at.index)
            .collect();
        self.model.publish(count);
        for &head in heads.iter().take(count) {
            self.write_slot(head);
        }
        if heads.len() > count {
            marks::reach("some-published");
        }
    }

    fn set_events(&mut self, bytes: &mut Bytes<'_>) {
        let flags = bytes.choose(&[DESC, DESC, DESC, ENABLE, DISABLE, 3, DESC | 0xfff0, 0x100]);
        // Around where the device is, or anywhere in the ring.
        let by = bytes.u8();
        let size = self.model.size;
        let at = if by < 128 {
            self.model.device.behind(u16::from(by % 8), size)
        } else {
            self.model.device.behind(u16::from(by) % (2 * size), size)
        };
        self.model.driver_events = (at.to_bits(), flags);
        self.write_events();
    }

    /// Adds one chain or several like it, as far as there is room.
    fn add(&mut self, bytes: &mut Bytes<'_>) {
        let kind = bytes.below(8);
        let repeat = bytes.choose(&[1, 1, 1, 1, 2, 3, 8, 70]);
        let is_long = kind == 5;
        let table_max = u32::from(TABLE_LEN.min(self.model.size));
        let count = match kind {
            0..=3 => 1,
            4 => 1 + bytes.below(8),
            5 => u32::from(self.model.free()),
            _ => 1 + bytes.below(table_max),
        };
        let reserved = bytes.choose(&[0_u16, 0, 0, 0x7f78]);
        let lens: Vec<u32> = if is_long {
            vec![Self::len(bytes).min(900); count as usize]
        } else {
            (0..count).map(|_| Self::len(bytes)).collect()
        };
        let place = bytes.u16();
        let is_held = bytes.one_in(4);
        for number in 0..repeat {
            let has_room = if kind > 5 {
                self.model.free() > 0
            } else {
                u32::from(self.model.free()) >= count && count > 0
            };
            if !has_room {
                break;
            }
            let place = place.wrapping_add(number * 0x50);
            self.add_chain(kind > 5, &lens, place, reserved);
        }
        if !is_held {
            self.publish(usize::MAX);
        }
    }

    fn len(bytes: &mut Bytes<'_>) -> u32 {
        let byte = bytes.u8();
        match byte % 16 {
            choice @ 0..12 => LENS[usize::from(choice)],
            _ => bytes.below_wide(2000),
        }
    }

    fn add_chain(&mut self, in_table: bool, lens: &[u32], place: u16, reserved: u16) {
        let size = self.model.size;
        let key = (0..size).find(|&key| self.model.is_unused(key));
        let key = key.expect("fewer chains than descriptors");
        let buffers = if self.is_rx {
            Self::rx_buffers(size, key, lens)
        } else {
            Self::tx_buffers(place, lens)
        };
        let table = TABLES + u64::from(key) * 16 * u64::from(TABLE_LEN);
        if in_table {
            self.write_table(table, &buffers, reserved);
        }
        let chain = Chain {
            key,
            id: key.wrapping_mul(0x6e2b).wrapping_add(self.salt),
            buffers,
            table: in_table.then_some(table),
            at: self.model.device,
        };
        let descs = chain.descs();
        if descs == size && size > 1 {
            marks::reach("chain-as-long-as-the-ring");
        }
        self.model.add(chain, reserved);
        let (chain, _) = self.model.held.back().expect("just added");
        let at = chain.at;
        let end = at.behind(descs, size);
        if end.wrap != at.wrap && end.index > 0 {
            marks::reach("chain-over-the-end");
        }
        for offset in 0..descs {
            self.write_slot(at.behind(offset, size).index);
        }
    }

    /// Anywhere, over each other: the device only reads.
    fn tx_buffers(place: u16, lens: &[u32]) -> Vec<(u64, u32)> {
        let mut at = u32::from(place);
        if at % 16 != 15 {
            // Most begin with a net header that asks for nothing.
            at &= !15;
        }
        let buffers = lens.iter().map(|&len| {
            let start = at.min(BUFFERS_BYTES - len);
            at = (at + len + 0x1230) & !15;
            (BUFFERS + u64::from(start), len)
        });
        buffers.collect()
    }

    /// In the memory of this key, with a byte between them: the device writes.
    fn rx_buffers(size: u16, key: u16, lens: &[u32]) -> Vec<(u64, u32)> {
        let room = BUFFERS_BYTES / u32::from(size);
        let start = u32::from(key) * room;
        let (mut at, end) = (start, start + room);
        let buffers = lens.iter().map(|&len| {
            let len = len.min((end - at).saturating_sub(1));
            let addr = BUFFERS + u64::from(at);
            at = (at + len + 1).min(end);
            (addr, len)
        });
        buffers.collect()
    }

    /// The entries lie in order; of their flags only WRITE has a meaning (section
    /// 2.8.7). The device must not mind the others, but no driver sets INDIRECT
    /// (section 2.8.19). DPDK's driver (22.11) says WRITE of a net header that is
    /// to be read, which the device must not mind either.
    fn write_table(&mut self, table: u64, buffers: &[(u64, u32)], reserved: u16) {
        let flags = match (reserved, self.is_rx) {
            (0, false) => 0,
            (0, true) => WRITE,
            _ => !INDIRECT,
        };
        for (number, &(addr, len)) in (0..).zip(buffers) {
            let entry = Slot {
                addr,
                len,
                id: reserved,
                flags,
            };
            self.memory.write(table + 16 * number, &entry.to_bytes());
        }
    }

    /// Memory is as the model says, slot by slot; `what` has just been done.
    pub(super) fn check_ring(&mut self, what: &str) {
        for index in 0..self.model.size {
            let wanted = self.model.slots[usize::from(index)];
            let addr = self.slot_addr(index);
            let now = Slot::from_bytes(self.memory.read(addr));
            assert_eq!(now, wanted, "{what}: descriptor {index}");
            self.memory.device_writes(addr, &wanted.to_bytes());
        }
        let addr = PLACES[self.place][2];
        let [a, b, c, d] = self.memory.read(addr);
        let (off_wrap, flags) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
        let wanted = match self.wish {
            Wish::Nothing => DISABLE,
            Wish::Everything => ENABLE,
            Wish::At(at) => {
                assert_eq!(off_wrap, at.to_bits(), "{what}: event position");
                DESC
            }
        };
        assert_eq!(flags, wanted, "{what}: the device's event flags");
        // The position has no meaning without DESC.
        self.memory.device_writes(addr, &[a, b, c, d]);
    }
}

//! The liar: where its memory and rings lie, and what it writes.

use std::sync::Arc;

use pollux_testkit::RawDesc;
use pollux_virtio::device::RingConfig;
use pollux_virtio::{DESC_BYTES, DescFlags, Features, RegionPlace, RingAreas};

use crate::arena::{Allowed, Arena, FILE_BYTES, Map};
use crate::bytes::Bytes;
use crate::features::is_packed;

/// Index of the guest TX ring in [`Guest::sides`].
pub(super) const TX: usize = 0;
/// Index of the guest RX ring.
pub(super) const RX: usize = 1;

/// Bytes of memory for indirect tables.
const TABLES_BYTES: u64 = 2048;
/// Entries of indirect tables that are looked at for what they allow; where there
/// are more, everything is.
const TABLE_LOOK_MAX: u64 = 1024;
/// Descriptor flags of a packed ring: available and used with wrap counter 1
/// (virtio 1.2, section 2.8.1).
const PACKED_AVAIL: u16 = 1 << 7;
const PACKED_USED: u16 = 1 << 15;

/// One ring as the guest knows it.
#[derive(Debug)]
pub(super) struct Side {
    /// Where the device takes it to be.
    pub(super) areas: RingAreas,
    /// Memory as the device knows it.
    pub(super) map: Map,
    /// Next available entry, as an honest driver would count. Of a packed ring:
    /// the next descriptor, and whether its wrap counter is 1.
    pub(super) next: u16,
    pub(super) wrap: bool,
}

/// The guest and its memory.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) arena: Arena,
    pub(super) features: Features,
    pub(super) sides: [Side; 2],
    /// The memory as it was first given.
    map: Map,
    /// Offsets in the file: of the areas of each ring, and of the tables.
    file_areas: [[u64; 3]; 2],
    tables: u64,
    /// First byte of the file behind the tables: buffers.
    buffers: u64,
    /// What the RX ring's descriptors have said since the ring started.
    rx_descs: Vec<(u64, u32, DescFlags)>,
}

/// Bytes of the three areas of a ring.
fn area_bytes(size: u16, features: Features) -> [u64; 3] {
    let desc = u64::from(DESC_BYTES) * u64::from(size);
    if is_packed(features) {
        // Two event suppression structures (section 2.8.14).
        return [desc, 4, 4];
    }
    [
        desc,
        u64::from(RingAreas::avail_bytes(size)),
        u64::from(RingAreas::used_bytes(size)),
    ]
}

impl Guest {
    /// Lays the memory out as the bytes say.
    pub(super) fn new(features: Features, bytes: &mut Bytes<'_>) -> Self {
        let sizes: &[u16] = if is_packed(features) {
            // Any size will do (section 2.8.10.1).
            &[1, 2, 3, 5, 8, 16, 33, 128, 255]
        } else {
            &[1, 2, 4, 8, 16, 32, 64, 128, 256]
        };
        let sizes = [bytes.choose(sizes), bytes.choose(sizes)];
        // Before the first region there are canaries.
        let first = 64 + 16 * u64::from(bytes.below(16));
        let mut at = first;
        let mut file_areas = [[0; 3]; 2];
        for (areas, size) in file_areas.iter_mut().zip(sizes) {
            for (area, len) in areas.iter_mut().zip(area_bytes(size, features)) {
                *area = at;
                // Areas may touch, as far as alignment allows.
                at += len.next_multiple_of(16);
            }
        }
        let tables = at;
        let buffers = tables + TABLES_BYTES;
        let end = buffers + bytes.choose(&[2048_u64, 300, 9000]) + u64::from(bytes.below(16));

        let base = bytes.choose(&[0x10_0000_u64, 0, 1 << 32, u64::MAX - (1 << 20)]);
        let mut places = vec![RegionPlace {
            guest_addr: base,
            size: end - first,
            user_addr: base,
            file_offset: first,
        }];
        let mut file_offset = end.next_multiple_of(16);
        let mut guest_addr = base + (end - first);
        for _ in 0..bytes.below(5) {
            file_offset += 16 * u64::from(1 + bytes.below(8));
            guest_addr += bytes.choose(&[0_u64, 0, 0, 1, 16, 4096, 65_536]);
            let size = bytes.choose(&[16_u64, 1, 48, 1000, 4097]);
            places.push(RegionPlace {
                guest_addr,
                size,
                user_addr: guest_addr,
                file_offset,
            });
            file_offset += size.next_multiple_of(16);
            guest_addr += size;
        }
        let file_bytes = usize::try_from(file_offset + 256).expect("small");
        assert!(file_bytes <= FILE_BYTES, "the largest layout fits");
        let mut arena = Arena::new(file_bytes);
        let map = arena.map(&places);
        for place in &places {
            let size = usize::try_from(place.size).expect("small");
            arena.write(&map, place.guest_addr, &vec![0; size]);
        }
        let base = if bytes.one_in(3) { bytes.u16() } else { 0 };
        let mut guest = Self {
            arena,
            features,
            sides: [0, 1].map(|side: usize| Side {
                areas: areas_in(&map, sizes[side], file_areas[side]).expect("in the first region"),
                map: map.clone(),
                next: if is_packed(features) { 0 } else { base },
                wrap: true,
            }),
            map,
            file_areas,
            tables,
            buffers,
            rx_descs: Vec::new(),
        };
        if !is_packed(features) {
            for side in [TX, RX] {
                guest.set_avail_idx(side, base);
                let used_addr = guest.sides[side].areas.used_addr;
                guest.write(side, used_addr + 2, &base.to_le_bytes());
            }
        }
        guest
    }

    /// What a session would start the ring with.
    pub(super) fn config(&self, side: usize) -> RingConfig {
        let Side {
            areas, next, wrap, ..
        } = self.sides[side];
        RingConfig {
            areas,
            features: self.features,
            base: if is_packed(self.features) {
                next | u16::from(wrap) << 15
            } else {
                next
            },
            call: None,
            counters: Arc::default(),
        }
    }

    fn write(&mut self, side: usize, addr: u64, bytes: &[u8]) {
        let map = self.sides[side].map.clone();
        self.arena.write(&map, addr, bytes);
    }

    fn set_avail_idx(&mut self, side: usize, idx: u16) {
        let addr = self.sides[side].areas.avail_addr + 2;
        self.write(side, addr, &idx.to_le_bytes());
    }

    /// `used.idx` as it is known to be.
    pub(super) fn used_idx(&self, side: usize) -> u16 {
        let Side { areas, map, .. } = &self.sides[side];
        u16::from_le_bytes(self.arena.known(map, areas.used_addr + 2))
    }

    /// The used entry at a position: id and length.
    pub(super) fn used_entry(&self, side: usize, position: u16) -> (u32, u32) {
        let Side { areas, map, .. } = &self.sides[side];
        let addr = areas.used_addr + 4 + 8 * u64::from(position % areas.size);
        let entry: [u8; 8] = self.arena.known(map, addr);
        let (id, len) = entry.split_at(4);
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
        (word(id), word(len))
    }

    // What the device may change.

    /// What it may change in the ring itself.
    pub(super) fn allow_ring(&self, side: usize, allowed: &mut Allowed) {
        let Side { areas, map, .. } = &self.sides[side];
        let [desc, _, used] = area_bytes(areas.size, self.features);
        allowed.add(map, areas.used_addr, used);
        if is_packed(self.features) {
            allowed.add(map, areas.desc_addr, desc);
        }
    }

    /// The buffers to write to that any descriptor of the RX ring leads to. All
    /// memory if one of them is over what says where buffers are: what the
    /// device writes there says where it writes next.
    ///
    /// A chain that was looked up is not read again, so what a descriptor said at
    /// an earlier call counts as well.
    pub(super) fn allow_buffers(&mut self, allowed: &mut Allowed) {
        let Side { areas, map, .. } = &self.sides[RX];
        let mut tables = Vec::new();
        let mut buffers = Allowed::default();
        for index in 0..u64::from(areas.size) {
            let desc = self.desc(map, areas.desc_addr + 16 * index);
            if !self.rx_descs.contains(&desc) {
                self.rx_descs.push(desc);
            }
        }
        for &(addr, len, flags) in &self.rx_descs {
            if flags.intersects(DescFlags::INDIRECT) {
                tables.push((addr, len / DESC_BYTES));
            } else if flags.intersects(DescFlags::WRITE) {
                buffers.add(map, addr, len.into());
            }
        }
        let entries: u64 = tables.iter().map(|&(_, len)| u64::from(len)).sum();
        let too_many = entries > TABLE_LOOK_MAX;
        for &(addr, len) in tables.iter().filter(|_| !too_many) {
            for index in 0..u64::from(len) {
                let (addr, len, flags) = self.desc(map, addr.wrapping_add(16 * index));
                if flags.intersects(DescFlags::WRITE) {
                    buffers.add(map, addr, len.into());
                }
            }
        }
        let [desc, avail, used] = area_bytes(areas.size, self.features);
        let mut sources = vec![
            (areas.desc_addr, desc),
            (areas.avail_addr, avail),
            (areas.used_addr, used),
        ];
        sources.extend(
            tables
                .iter()
                .map(|&(addr, len)| (addr, 16 * u64::from(len))),
        );
        let is_written = |&(addr, len): &(u64, u64)| buffers.includes_any(map, addr, len);
        if too_many || sources.iter().any(is_written) {
            buffers.add_all(map);
        }
        allowed.merge(buffers);
    }

    /// What a descriptor says that lies at an address: address, length, flags.
    fn desc(&self, map: &Map, addr: u64) -> (u64, u32, DescFlags) {
        let mut raw = RawDesc::from_bytes(self.arena.known(map, addr));
        if is_packed(self.features) {
            raw.flags = DescFlags(raw.next);
        }
        (raw.addr, raw.len, raw.flags)
    }

    /// The device looks the RX ring's chains up anew.
    pub(super) fn forget_rx_descs(&mut self) {
        self.rx_descs.clear();
    }

    // Lies.

    /// Writes one thing, plausible or not.
    pub(super) fn lie(&mut self, bytes: &mut Bytes<'_>) {
        let side = usize::from(bytes.u8() & 1);
        match bytes.below(12) {
            0..=4 => self.offer_chain(side, bytes),
            5 => self.offer_many(side, bytes),
            6 => {
                let index = bytes.u8();
                let desc = self.any_desc(side, bytes);
                self.set_desc(side, index.into(), desc);
            }
            7 => {
                let addr = self.any_addr(side, bytes);
                let count = 1 + usize::from(bytes.u8() % 32);
                let data = bytes.take(count);
                self.write(side, addr, &data);
            }
            8 => {
                // Somewhere, or just before or behind where it is.
                let idx = match bytes.below(4) {
                    0 => bytes.u16(),
                    _ => self.sides[side].next.wrapping_add(u16::from(bytes.u8())),
                };
                self.set_avail_idx(side, idx);
                if bytes.one_in(2) {
                    self.sides[side].next = idx;
                }
            }
            9 => {
                let event = self.used_idx(side).wrapping_add(u16::from(bytes.u8() & 3));
                let flags = bytes.u8();
                self.wish(side, flags.into(), event);
            }
            10 => {
                let idx = bytes.u16();
                let addr = self.sides[side].areas.used_addr + 2;
                self.write(side, addr, &idx.to_le_bytes());
            }
            _ => {
                let head = u16::from(bytes.u8());
                self.offer_head(side, head);
                self.publish(side);
            }
        }
    }

    /// Whether to be called: `flags` and `used_event`, or the driver event area.
    fn wish(&mut self, side: usize, flags: u16, event: u16) {
        let RingAreas {
            size, avail_addr, ..
        } = self.sides[side].areas;
        if is_packed(self.features) {
            let [e0, e1] = event.to_le_bytes();
            let [f0, f1] = flags.to_le_bytes();
            self.write(side, avail_addr, &[e0, e1, f0, f1]);
        } else {
            self.write(side, avail_addr, &flags.to_le_bytes());
            let at = avail_addr + 4 + 2 * u64::from(size);
            self.write(side, at, &event.to_le_bytes());
        }
    }

    fn set_desc(&mut self, side: usize, index: u16, desc: RawDesc) {
        let RingAreas {
            size, desc_addr, ..
        } = self.sides[side].areas;
        let addr = desc_addr + 16 * u64::from(index % size);
        self.write(side, addr, &desc.to_bytes());
    }

    fn offer_head(&mut self, side: usize, head: u16) {
        let Side { areas, next, .. } = &mut self.sides[side];
        let addr = areas.avail_addr + 4 + 2 * u64::from(*next % areas.size);
        *next = next.wrapping_add(1);
        self.write(side, addr, &head.to_le_bytes());
    }

    fn publish(&mut self, side: usize) {
        self.set_avail_idx(side, self.sides[side].next);
    }

    /// An address that is worth a lie.
    fn any_addr(&self, side: usize, bytes: &mut Bytes<'_>) -> u64 {
        let Side { areas, map, .. } = &self.sides[side];
        let region = map.places[usize::from(bytes.u8()) % map.places.len()];
        let near = |addr: u64, bytes: &mut Bytes<'_>| {
            addr.wrapping_sub(40).wrapping_add(bytes.below(80).into())
        };
        match bytes.below(10) {
            0..=3 => {
                // In the buffers, wherever they are by now.
                let offset = u64::from(bytes.below_wide(1024));
                let addr = map.addr_of(self.buffers + offset);
                addr.unwrap_or(region.guest_addr)
            }
            4 => near(region.guest_addr + region.size, bytes),
            5 => near(region.guest_addr, bytes),
            6 => {
                let area = [areas.desc_addr, areas.avail_addr, areas.used_addr];
                bytes.choose(&area).wrapping_add(bytes.u8().into())
            }
            7 => bytes.choose(&[0, u64::MAX, u64::MAX - 15, 1 << 63]),
            8 => self.table_addr(side, bytes),
            _ => bytes.u64(),
        }
    }

    fn table_addr(&self, side: usize, bytes: &mut Bytes<'_>) -> u64 {
        let offset = 16 * u64::from(bytes.below(128));
        let map = &self.sides[side].map;
        map.addr_of(self.tables + offset).unwrap_or(offset)
    }

    /// A length that is worth a lie.
    fn any_len(&self, bytes: &mut Bytes<'_>) -> u32 {
        let header = self.features.net_header_bytes();
        match bytes.below(8) {
            0..=2 => header + 14 + bytes.below(128),
            3 => bytes.below(32),
            4 => bytes.below_wide(2048),
            5 => header + 65_535 - 20 + bytes.below(40),
            6 => header,
            _ => bytes.u32(),
        }
    }

    fn any_desc(&self, side: usize, bytes: &mut Bytes<'_>) -> RawDesc {
        let desc = RawDesc {
            addr: self.any_addr(side, bytes),
            len: self.any_len(bytes),
            flags: DescFlags(bytes.u16()),
            next: bytes.u8().into(),
        };
        if bytes.one_in(2) {
            self.buffer(side, desc.addr, desc.len)
        } else {
            desc
        }
    }

    /// A descriptor with the direction that the ring has.
    fn buffer(&self, side: usize, addr: u64, len: u32) -> RawDesc {
        if side == RX {
            RawDesc::writable(addr, len)
        } else {
            RawDesc::readable(addr, len)
        }
    }

    /// A chain as a driver would offer it, with one flaw or none.
    fn offer_chain(&mut self, side: usize, bytes: &mut Bytes<'_>) {
        let count = 1 + bytes.below(5);
        let mut chain: Vec<RawDesc> = (0..count)
            .map(|_| {
                let addr = self.any_addr(side, bytes);
                let len = if count > 2 {
                    bytes.below(100)
                } else {
                    self.any_len(bytes)
                };
                self.buffer(side, addr, len)
            })
            .collect();
        let flaw = bytes.below(16);
        let at = usize::from(bytes.u8()) % chain.len();
        match flaw {
            0 => chain[at].flags.0 ^= DescFlags::WRITE.0,
            1 => chain[at].flags = chain[at].flags.union(DescFlags::INDIRECT),
            2 => chain[at].flags = DescFlags(bytes.u16()),
            _ => {}
        }
        let table_from = match bytes.below(3) {
            0 => Some(usize::from(bytes.u8()) % chain.len()),
            _ => None,
        };
        if side == TX && bytes.one_in(2) {
            // A net header that asks for nothing is what most frames have.
            self.write(TX, chain[0].addr, &[0; 12]);
        }
        let (direct, table) = chain.split_at(table_from.unwrap_or(chain.len()));
        let mut direct = direct.to_vec();
        if !table.is_empty() {
            let addr = self.table_addr(side, bytes);
            let mut table_bytes = 16 * u32::try_from(table.len()).expect("short");
            if flaw == 3 {
                table_bytes = bytes.choose(&[0, 8, 17, 1 << 20, 0xffff_fff0, u32::MAX]);
            }
            let next = (flaw == 4).then(|| bytes.u16());
            self.write_table(side, addr, table, next);
            let mut desc = RawDesc::indirect(addr, table_bytes);
            if flaw == 5 {
                desc = desc.with(DescFlags::NEXT);
            }
            direct.push(desc);
        }
        let last_next = (flaw == 6).then(|| u16::from(bytes.u8()));
        self.write_chain(side, &direct, last_next);
        if !bytes.one_in(8) {
            self.publish_unless_packed(side);
        }
    }

    /// As many of the same small buffer as a ring has descriptors, or one more,
    /// or all in one table.
    fn offer_many(&mut self, side: usize, bytes: &mut Bytes<'_>) {
        let size = usize::from(self.sides[side].areas.size);
        let first = self.sides[side].map.places[0];
        let addr = if bytes.one_in(2) {
            // Over the border, and over small regions behind it.
            first.guest_addr + first.size - 1 - u64::from(bytes.u8() & 7)
        } else {
            self.any_addr(side, bytes)
        };
        let len = bytes.below(128);
        let desc = self.buffer(side, addr, len);
        match bytes.below(3) {
            0 => {
                let count = (size + usize::from(bytes.u8() & 1)).min(128);
                let table = self.table_addr(side, bytes);
                self.write_table(side, table, &vec![desc; count], None);
                let table_bytes = 16 * u32::try_from(count).expect("short");
                self.write_chain(side, &[RawDesc::indirect(table, table_bytes)], None);
            }
            1 => {
                // A loop; in a packed ring, which has none, the whole ring.
                let last_next = (!is_packed(self.features)).then_some(0);
                self.write_chain(side, &vec![desc; size], last_next);
            }
            _ => {
                for _ in 0..bytes.below(64).min(u32::from(self.sides[side].areas.size)) {
                    self.write_chain(side, &[desc], None);
                }
            }
        }
        self.publish_unless_packed(side);
    }

    fn publish_unless_packed(&mut self, side: usize) {
        if !is_packed(self.features) {
            self.publish(side);
        }
    }

    fn write_table(&mut self, side: usize, addr: u64, table: &[RawDesc], last_next: Option<u16>) {
        let packed = is_packed(self.features);
        let mut written = Vec::new();
        for (index, &desc) in (0..).zip(table) {
            let last = usize::from(index) + 1 == table.len();
            let desc = match (packed, last) {
                // Tables of a packed ring have no links (section 2.8.7).
                (true, _) => RawDesc {
                    next: desc.flags.0,
                    flags: DescFlags(index),
                    ..desc
                },
                (false, false) => desc.then(index + 1),
                (false, true) => last_next.map_or(desc, |next| desc.then(next)),
            };
            written.extend(desc.to_bytes());
        }
        self.write(side, addr, &written);
    }

    /// Writes a chain to the ring and its head to the available ring.
    fn write_chain(&mut self, side: usize, chain: &[RawDesc], last_next: Option<u16>) {
        let size = self.sides[side].areas.size;
        if is_packed(self.features) {
            return self.write_packed_chain(side, chain, last_next.is_some());
        }
        let head = self.sides[side].next.wrapping_mul(3) % size;
        for (index, &desc) in (0..size).zip(chain) {
            let at = (head + index) % size;
            let last = usize::from(index) + 1 == chain.len().min(size.into());
            let desc = match last_next {
                Some(next) if last => desc.then(next),
                None if last => desc,
                _ => desc.then((at + 1) % size),
            };
            self.set_desc(side, at, desc);
        }
        self.offer_head(side, head);
    }

    fn write_packed_chain(&mut self, side: usize, chain: &[RawDesc], goes_on: bool) {
        let id = self.sides[side].next;
        for (index, &desc) in chain.iter().enumerate() {
            let Side {
                next, wrap, areas, ..
            } = &mut self.sides[side];
            let (at, avail) = (*next, *wrap);
            *next = next.wrapping_add(1);
            if *next >= areas.size {
                *next = 0;
                *wrap = !*wrap;
            }
            let mut flags = desc.flags.0 & !(PACKED_AVAIL | PACKED_USED);
            flags |= if avail { PACKED_AVAIL } else { PACKED_USED };
            if goes_on || index + 1 < chain.len() {
                flags |= DescFlags::NEXT.0;
            }
            let desc = RawDesc {
                flags: DescFlags(id),
                next: flags,
                ..desc
            };
            self.set_desc(side, at, desc);
        }
    }

    // Memory that changes.

    /// Another map of the same memory, and where a ring would be in it.
    pub(super) fn other_map(&self, bytes: &mut Bytes<'_>) -> (Map, [Option<RingAreas>; 2]) {
        let mut places = self.map.places.to_vec();
        match bytes.below(4) {
            // All at other addresses.
            0 => {
                let delta = 16 * u64::from(bytes.u8());
                for place in &mut places {
                    place.guest_addr = place.guest_addr.wrapping_sub(delta);
                }
                // Not around the end of the address space.
                let wraps =
                    |place: &RegionPlace| place.guest_addr.checked_add(place.size).is_none();
                if places.iter().any(wraps) {
                    places = self.map.places.to_vec();
                }
            }
            // Without the last region.
            1 if places.len() > 1 => drop(places.pop()),
            // Rings are cut off.
            2 => places[0].size = places[0].size.min(1 + u64::from(bytes.u16())),
            _ => {}
        }
        let map = self.arena.map(&places);
        let areas = [TX, RX].map(|side| {
            let size = self.sides[side].areas.size;
            let mut areas = areas_in(&map, size, self.file_areas[side])?;
            match bytes.below(8) {
                1 => areas.used_addr = self.any_addr(side, bytes),
                2 => areas.desc_addr = self.any_addr(side, bytes) & !15,
                3 => areas.size = bytes.u16(),
                _ => {}
            }
            Some(areas)
        });
        (map, areas)
    }
}

/// The guest addresses of areas that lie at these offsets of the file.
fn areas_in(map: &Map, size: u16, file: [u64; 3]) -> Option<RingAreas> {
    Some(RingAreas {
        size,
        desc_addr: map.addr_of(file[0])?,
        avail_addr: map.addr_of(file[1])?,
        used_addr: map.addr_of(file[2])?,
    })
}

//! Split rings beside rust-vmm's `virtio-queue` on the same bytes: a driver that
//! makes sound and broken chains, the device half, and the oracle. Which
//! operations come, a test or a fuzz target says.
//!
//! Accepted differences are listed with [`TxModel`] and [`RxModel`].

#![expect(
    clippy::cast_possible_truncation,
    reason = "lengths of test frames are far below 2^32"
)]

mod rx;
mod tx;

use virtio_queue::{DescriptorChain, Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

use pollux_virtio::driver::{Guest, GuestSpec, NetConfig};
use pollux_virtio::{DescFlags, RingAreas};

use crate::raw::{RawDesc, RawRing};

pub use rx::{RxModel, RxOp};
pub use tx::{TxModel, TxOp};

/// Descriptors of an indirect table: more than most of the rings have.
pub const TABLE_LEN: u16 = 12;

/// What is wrong with a chain; `at` is reduced to one of its descriptors.
#[derive(Clone, Copy, Debug)]
pub enum Flaw {
    /// Nothing.
    None,
    /// The address is in no region.
    Unmapped {
        /// Which descriptor.
        at: usize,
    },
    /// The buffer ends behind all memory.
    OverEnd {
        /// Which descriptor.
        at: usize,
    },
    /// The last descriptor leads to one of the chain.
    Loop {
        /// Which descriptor.
        at: usize,
    },
    /// The last descriptor leads to a descriptor that there is not.
    NextOutside {
        /// Its index.
        next: u16,
    },
    /// The wrong direction.
    Direction {
        /// Of which descriptor.
        at: usize,
    },
    /// Length of the indirect table, if it is one.
    TableLength {
        /// In bytes.
        bytes: u32,
    },
    /// A table inside the table, if it is one.
    Nested {
        /// Which descriptor.
        at: usize,
    },
    /// INDIRECT with NEXT, if it is a table.
    TableNext {
        /// Where it leads to.
        next: u16,
    },
}

/// A chain to make available.
#[derive(Clone, Debug)]
pub struct Chain {
    /// Length of each buffer.
    pub lens: Vec<u32>,
    /// Descriptors before an indirect table; `None` without a table.
    pub direct: Option<usize>,
    /// What is wrong with it.
    pub flaw: Flaw,
    /// Where the buffers of a TX chain lie.
    pub seed: u32,
}

/// Our guest, and rust-vmm's view of the same bytes.
#[derive(Debug)]
pub struct Twin {
    /// Memory, and the device halves.
    pub guest: Guest,
    /// The ring as the driver writes it.
    pub raw: RawRing,
    /// Layout of the ring.
    pub(crate) config: NetConfig,
    /// rust-vmm's memory.
    pub memory: GuestMemoryMmap,
    /// rust-vmm's ring.
    pub queue: Queue,
    /// First and last guest address.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Descriptors that are free, in the order in which they became so.
    free: Vec<u16>,
    /// Descriptors of the chain at each head that is out.
    out: Vec<(u16, Vec<u16>)>,
    is_tx: bool,
}

impl Twin {
    /// The TX ring of a guest, or its RX ring.
    ///
    /// # Panics
    /// If there cannot be such a guest.
    #[must_use]
    pub fn new(spec: GuestSpec, tx: bool) -> Self {
        let guest = Guest::new(spec).expect("guest memory");
        let config = if tx {
            guest.tx_config()
        } else {
            guest.rx_config()
        };
        let regions = guest.memory.regions();
        let places: Vec<_> = regions.iter().map(|region| region.place()).collect();
        let ranges: Vec<_> = places
            .iter()
            .map(|place| {
                let size = usize::try_from(place.size).expect("small");
                (GuestAddress(place.guest_addr), size)
            })
            .collect();
        let memory = GuestMemoryMmap::from_ranges(&ranges).expect("memory");
        let RingAreas {
            size,
            desc_addr,
            avail_addr,
            used_addr,
        } = config.areas;
        let mut queue = Queue::new(size).expect("a power of two");
        queue
            .try_set_desc_table_address(GuestAddress(desc_addr))
            .expect("aligned");
        queue
            .try_set_avail_ring_address(GuestAddress(avail_addr))
            .expect("aligned");
        queue
            .try_set_used_ring_address(GuestAddress(used_addr))
            .expect("aligned");
        queue.set_event_idx(spec.features.event_idx);
        queue.set_next_avail(spec.base);
        queue.set_next_used(spec.base);
        queue.set_ready(true);
        assert!(queue.is_valid(&memory));
        let last = places.last().expect("a region");
        Self {
            raw: RawRing::new(guest.memory.clone(), config.areas, spec.base),
            start: places[0].guest_addr,
            end: last.guest_addr + last.size,
            free: (0..size).collect(),
            out: Vec::new(),
            is_tx: tx,
            guest,
            config,
            memory,
            queue,
        }
    }

    /// Fills the buffers with bytes of `noise`, on both sides, and begins to poll.
    ///
    /// # Panics
    /// If there are more buffers than noise.
    pub fn begin(&mut self, noise: &[u8]) {
        let bytes = usize::try_from(self.end - self.config.buffers_addr).expect("small");
        self.raw.write(self.config.buffers_addr, &noise[..bytes]);
        self.copy_to_oracle();
        self.queue
            .disable_notification(&self.memory)
            .expect("memory");
    }

    pub(crate) fn header_bytes(&self) -> u32 {
        self.config.features.net_header_bytes()
    }

    /// All bytes of our memory.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.raw.read(
            self.start,
            usize::try_from(self.end - self.start).expect("small"),
        )
    }

    /// Gives the oracle the bytes that the driver has written.
    ///
    /// # Panics
    /// Never: the regions are the same.
    pub fn copy_to_oracle(&self) {
        let bytes = self.bytes();
        self.memory
            .write_slice(&bytes, GuestAddress(self.start))
            .expect("same regions");
    }

    /// The used ring as each device has written it: entries, index, flags and
    /// avail_event.
    pub(crate) fn used_rings(&self) -> (Vec<u8>, Vec<u8>) {
        let RingAreas {
            size, used_addr, ..
        } = self.config.areas;
        let len = RingAreas::used_bytes(size) as usize;
        let mut oracle = vec![0; len];
        self.memory
            .read_slice(&mut oracle, GuestAddress(used_addr))
            .expect("the ring");
        (self.raw.read(used_addr, len), oracle)
    }

    /// Descriptors that the driver has.
    pub(crate) fn free_len(&self) -> usize {
        self.free.len()
    }

    /// Writes a chain whose buffers lie at `addrs` and offers it. True if there
    /// were descriptors for it; an indirect chain needs one.
    pub(crate) fn offer(
        &mut self,
        chain: &Chain,
        writable: bool,
        addr_of: impl Fn(u16, usize) -> u64,
    ) -> Option<u16> {
        let count = chain.lens.len();
        let direct = chain.direct.map_or(count, |direct| direct.min(count - 1));
        let table_len = count - direct;
        let needed = direct + usize::from(table_len > 0);
        if needed > self.free.len() || table_len > usize::from(TABLE_LEN) {
            return None;
        }
        let ids: Vec<u16> = self.free.drain(..needed).collect();
        let head = ids[0];
        let table = self.config.tables_addr + u64::from(head) * 16 * u64::from(TABLE_LEN);
        let buffer = |index: usize| {
            let at = addr_of(head, index);
            if writable {
                RawDesc::writable(at, chain.lens[index])
            } else {
                RawDesc::readable(at, chain.lens[index])
            }
        };
        let mut descs: Vec<RawDesc> = (0..count).map(buffer).collect();
        match chain.flaw {
            Flaw::Unmapped { at } => descs[at % count].addr = self.end + 64,
            Flaw::OverEnd { at } => descs[at % count].addr = self.end - 3,
            Flaw::Direction { at } => descs[at % count].flags.0 ^= DescFlags::WRITE.0,
            Flaw::Nested { at } => {
                let at = direct + at % table_len.max(1);
                if at < count && table_len > 0 {
                    descs[at] = RawDesc::indirect(table, 16);
                }
            }
            _ => {}
        }
        // Link within the ring and within the table.
        for index in 0..count {
            let last = index + 1 == count;
            descs[index] = if last {
                match chain.flaw {
                    Flaw::Loop { at } if table_len > 0 => {
                        descs[index].then(u16::try_from(at % table_len).expect("small"))
                    }
                    Flaw::Loop { at } => descs[index].then(ids[at % count]),
                    Flaw::NextOutside { next } => descs[index].then(next),
                    _ => descs[index],
                }
            } else if index < direct {
                descs[index].then(ids[index + 1])
            } else {
                descs[index].then(u16::try_from(index + 1 - direct).expect("small"))
            };
        }
        for (&id, &desc) in ids.iter().zip(&descs[..direct]) {
            self.raw.set_desc(id, desc);
        }
        if table_len > 0 {
            self.raw.set_table(table, &descs[direct..]);
            let mut bytes = 16 * u32::try_from(table_len).expect("small");
            if let Flaw::TableLength { bytes: flawed } = chain.flaw {
                bytes = flawed;
            }
            let mut desc = RawDesc::indirect(table, bytes);
            if let Flaw::TableNext { next } = chain.flaw {
                desc = desc.then(next);
            }
            self.raw.set_desc(ids[direct], desc);
        }
        self.raw.offer(head);
        self.out.push((head, ids));
        Some(head)
    }

    /// The device gives a batch back with one entry: IN_ORDER, of a ring to which
    /// it writes nothing.
    fn returns_as_one(&self) -> bool {
        self.is_tx && self.config.features.in_order
    }

    /// The oracle returns chains: head, and bytes written.
    pub(crate) fn add_used(&mut self, returned: &[(u16, u32)]) {
        let RingAreas {
            size, used_addr, ..
        } = self.config.areas;
        let entries_bytes = 8 * usize::from(size);
        let entries = GuestAddress(used_addr + 4);
        let mut wanted = vec![0; entries_bytes];
        let read = self.memory.read_slice(&mut wanted, entries);
        read.expect("the ring");
        let first = usize::from(self.queue.next_used() % size);
        for &(head, len) in returned {
            let added = self.queue.add_used(&self.memory, head, len);
            added.expect("a head");
        }
        let (true, [.., (last, 0)]) = (self.returns_as_one(), returned) else {
            return;
        };
        // One entry, in the place of the first, with the last one's id (section
        // 2.7.9); rust-vmm has written all of them.
        wanted[8 * first..][..4].copy_from_slice(&u32::from(*last).to_le_bytes());
        wanted[8 * first + 4..][..4].fill(0);
        let wrote = self.memory.write_slice(&wanted, entries);
        wrote.expect("the ring");
    }

    /// Takes back what was returned; gives the heads in order.
    pub(crate) fn take_used(&mut self) -> Vec<u16> {
        let mut heads = Vec::new();
        let is_tx_in_order = self.returns_as_one();
        for used in self.raw.take_used() {
            let mut head = u16::try_from(used.id).expect("a head");
            if is_tx_in_order {
                // Not every one has an entry.
                head = self.out[0].0;
            }
            let at = self.out.iter().position(|(out, _)| *out == head);
            let (_, mut ids) = self.out.remove(at.expect("returned once and only if out"));
            self.free.append(&mut ids);
            heads.push(head);
        }
        heads
    }
}

/// Why the walk over a chain of the oracle's ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// The buffers of a chain as rust-vmm's iterator gives them, then an error if
/// it is one that rust-vmm ends silently, or one of the accepted differences.
///
/// At most `buffers_max` buffers: rust-vmm starts to count anew in a table.
pub(crate) struct OracleWalk<'m> {
    chain: DescriptorChain<&'m GuestMemoryMmap>,
    /// Buffers before a table that has NEXT, which rust-vmm does not mind.
    flawed_table_at: Option<u16>,
    pub(crate) taken: u16,
    buffers_max: u16,
    ended: bool,
    more: bool,
}

impl<'m> OracleWalk<'m> {
    pub(crate) fn new(
        memory: &'m GuestMemoryMmap,
        areas: RingAreas,
        chain: DescriptorChain<&'m GuestMemoryMmap>,
        buffers_max: u16,
    ) -> Self {
        let mut flawed_table_at = None;
        let mut index = chain.head_index();
        for taken in 0..areas.size {
            if index >= areas.size {
                break;
            }
            let addr = areas.desc_addr + 16 * u64::from(index);
            let bytes: [u8; 16] = memory.read_obj(GuestAddress(addr)).expect("the table");
            let desc = RawDesc::from_bytes(bytes);
            let both = DescFlags::INDIRECT.union(DescFlags::NEXT);
            if desc.flags.0 & both.0 == both.0 {
                flawed_table_at = Some(taken);
            }
            if desc.flags.intersects(DescFlags::INDIRECT) || !desc.flags.intersects(DescFlags::NEXT)
            {
                break;
            }
            index = desc.next;
        }
        Self {
            chain,
            flawed_table_at,
            taken: 0,
            buffers_max,
            ended: false,
            more: true,
        }
    }

    /// The next buffer: address, length, writable.
    pub(crate) fn buffer(&mut self) -> Result<Option<(u64, u32, bool)>, Broken> {
        if self.ended {
            return Ok(None);
        }
        if self.flawed_table_at == Some(self.taken) {
            return Err(Broken);
        }
        match self.chain.next() {
            // It ends without an error wherever it cannot go on.
            None if self.more => Err(Broken),
            None => {
                self.ended = true;
                Ok(None)
            }
            Some(_) if self.taken == self.buffers_max => Err(Broken),
            Some(desc) => {
                self.taken += 1;
                self.more = desc.has_next();
                Ok(Some((
                    desc.addr().raw_value(),
                    desc.len(),
                    desc.is_write_only(),
                )))
            }
        }
    }
}

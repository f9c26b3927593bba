//! A ring of either layout written by hand, for tests that run over both.

use std::collections::VecDeque;
use std::sync::Arc;

use pollux_virtio::GuestMemory;
use pollux_virtio::driver::NetConfig;

use crate::raw::{RawDesc, RawMemory, RawRing, RawUsed};
use crate::raw_packed::RawPacked;

/// What cannot be said in both layouts is said to the ring itself:
/// [`split`](RawQueue::split) and [`packed`](RawQueue::packed).
#[derive(Clone, Debug)]
pub struct RawQueue {
    layout: Layout,
    memory: RawMemory,
    in_order: bool,
    /// Chains that are out, the first one first: a packed ring does not say how
    /// long they are, nor an IN_ORDER device which it returned. Not kept of a
    /// split ring without IN_ORDER.
    out: VecDeque<Chain>,
    /// Where the device returns the first of them.
    next_used: u16,
}

#[derive(Clone, Debug)]
enum Layout {
    Split(RawRing),
    Packed(RawPacked),
}

#[derive(Clone, Copy, Debug)]
struct Chain {
    id: u16,
    descs: u16,
}

impl RawQueue {
    /// Writes to the ring of a queue from its first position on.
    #[must_use]
    pub fn new(memory: &Arc<GuestMemory>, config: &NetConfig) -> Self {
        let NetConfig {
            areas,
            features,
            base,
            ..
        } = *config;
        let ring = Arc::clone(memory);
        Self {
            layout: if features.packed {
                Layout::Packed(RawPacked::new(ring, areas, base))
            } else {
                Layout::Split(RawRing::new(ring, areas, base))
            },
            memory: RawMemory(Arc::clone(memory)),
            in_order: features.in_order,
            out: VecDeque::new(),
            next_used: base,
        }
    }

    /// The split ring.
    ///
    /// # Panics
    /// If it is packed.
    pub fn split(&mut self) -> &mut RawRing {
        match &mut self.layout {
            Layout::Split(ring) => ring,
            Layout::Packed(_) => panic!("the ring is packed"),
        }
    }

    /// The packed ring.
    ///
    /// # Panics
    /// If it is split.
    pub fn packed(&mut self) -> &mut RawPacked {
        match &mut self.layout {
            Layout::Packed(ring) => ring,
            Layout::Split(_) => panic!("the ring is split"),
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
        match &self.layout {
            Layout::Split(ring) => ring.size(),
            Layout::Packed(ring) => ring.size(),
        }
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

    /// Writes an indirect table.
    pub fn set_table(&self, addr: u64, table: &[RawDesc]) {
        let bytes: Vec<u8> = match &self.layout {
            Layout::Split(_) => table.iter().flat_map(|desc| desc.to_bytes()).collect(),
            Layout::Packed(_) => {
                let bytes = table.iter().map(|desc| desc.to_packed_bytes());
                bytes.flatten().collect()
            }
        };
        self.write(addr, &bytes);
    }

    /// Offers a chain that comes back as `id`: in a split ring the descriptors
    /// from `id` on. The device sees it after [`publish`](Self::publish).
    ///
    /// # Panics
    /// If it has more than 65,535 descriptors.
    pub fn offer_chain(&mut self, id: u16, chain: &[RawDesc]) {
        match &mut self.layout {
            Layout::Split(ring) => ring.offer_chain(id, chain),
            Layout::Packed(ring) => ring.offer_chain(id, chain),
        }
        self.note(id, chain.len());
    }

    /// Offers descriptors of a packed ring as they are (but for the flags that
    /// make them available), which the device takes for one chain with the id.
    ///
    /// # Panics
    /// If the ring is split.
    pub fn offer_as_it_is(&mut self, id: u16, chain: &[RawDesc]) {
        for &desc in chain {
            self.packed().put(desc);
        }
        self.note(id, chain.len());
    }

    fn note(&mut self, id: u16, descs: usize) {
        if self.in_order || matches!(self.layout, Layout::Packed(_)) {
            let descs = u16::try_from(descs).expect("a chain is no longer than a ring");
            self.out.push_back(Chain { id, descs });
        }
    }

    /// Makes everything that was offered available.
    pub fn publish(&mut self) {
        match &mut self.layout {
            Layout::Split(ring) => ring.publish(),
            Layout::Packed(ring) => ring.publish(),
        }
    }

    /// Everything that the device has returned since the last call. An IN_ORDER
    /// device returns a batch as its last chain: those before it are named with
    /// length 0.
    ///
    /// # Panics
    /// If the device returned what is not out, or not in order.
    pub fn take_used(&mut self) -> Vec<RawUsed> {
        if let Layout::Split(ring) = &mut self.layout
            && !self.in_order
        {
            return ring.take_used();
        }
        let mut all = Vec::new();
        while let Some(used) = self.next_entry() {
            let batch = self.take_out(used);
            for chain in batch {
                let is_last = u32::from(chain.id) == used.id;
                let len = if is_last { used.len } else { 0 };
                let id = chain.id.into();
                all.push(RawUsed { id, len });
                self.next_used = match &self.layout {
                    Layout::Split(_) => self.next_used.wrapping_add(1),
                    Layout::Packed(ring) => ring.behind(self.next_used, chain.descs),
                };
            }
        }
        all
    }

    fn next_entry(&self) -> Option<RawUsed> {
        match &self.layout {
            Layout::Split(ring) => {
                (ring.used_idx() != self.next_used).then(|| ring.used_entry(self.next_used))
            }
            Layout::Packed(ring) => ring
                .used(self.next_used)
                // Flags of two laps ago look the same.
                .filter(|_| !self.out.is_empty()),
        }
    }

    /// The chains that an entry returns.
    fn take_out(&mut self, used: RawUsed) -> Vec<Chain> {
        let is_it = |chain: &Chain| u32::from(chain.id) == used.id;
        let last = self.out.iter().position(is_it);
        let last = last.unwrap_or_else(|| panic!("{used:?} is not out: {:?}", self.out));
        assert!(
            self.in_order || last == 0,
            "{used:?} is not the first of {:?}",
            self.out
        );
        self.out.drain(..=last).collect()
    }
}

impl From<RawRing> for RawQueue {
    /// A split ring without IN_ORDER.
    fn from(ring: RawRing) -> Self {
        Self {
            memory: RawMemory(Arc::clone(ring.memory())),
            layout: Layout::Split(ring),
            in_order: false,
            out: VecDeque::new(),
            next_used: 0,
        }
    }
}

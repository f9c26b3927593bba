//! The device half of a guest RX ring beside a plain writer over rust-vmm's.

use std::sync::LazyLock;

use pollux_packet::{DropCounts, DropReason};
use pollux_sys::EventFd;
use pollux_virtio::device::RxRing;
use pollux_virtio::driver::GuestSpec;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::{Broken, Chain, OracleWalk, Twin};
use crate::frames::{frame_bytes, transmit};
use crate::raw::RawUsed;

/// An operation on an RX ring.
#[derive(Clone, Debug)]
pub enum RxOp {
    /// The driver writes a chain.
    Post(Chain),
    /// It makes all that were written available.
    Publish,
    /// Frames of these lengths in one call.
    Transmit {
        /// In bytes.
        lens: Vec<u32>,
        /// What their bytes are.
        seed: u32,
    },
    /// The driver takes chains back.
    TakeUsed,
    /// The device stops, and another goes on.
    Restart,
    /// The device is told where the ring lies, which is where it was.
    Relocate,
    /// NO_INTERRUPT, or used_event relative to used.idx.
    Wish {
        /// NO_INTERRUPT or nothing.
        flags: u16,
        /// From used.idx on.
        event: i16,
    },
}

/// Bytes of guest memory in which a chain's buffers lie, one after the other
/// with a byte between them.
const SLOT_BYTES: u64 = 2048;
/// Slots begin here in the buffers, so that some lie over two regions.
const SLOT_OFFSET: u64 = 1000;
/// Longer than the memory of a guest with small rings.
static NOISE: LazyLock<Vec<u8>> =
    LazyLock::new(|| (0..1_u32 << 20).map(|i| ((i * 131) >> 2) as u8).collect());
/// Buffers that the device walks in one call at least.
const WALK_MIN: usize = 256;

/// An RX ring beside a plain writer: used rings and what lies in every returned
/// buffer must be equal, and no byte outside the posted buffers may change.
///
/// The plain writer and the accepted differences are those of [`TxModel`](super::TxModel),
/// and:
///
/// | plain writer | pollux | Why |
/// |--------------|--------|-----|
/// | tries every frame on a short ring | remembers that longer ones do not fit | same result, less work (B-56) |
/// | writes a used entry when it is certain | may write entries behind used.idx that it does not publish | the driver does not look there |
/// | writes nothing unless the frame fits | may write to buffers that it does not return, or returns with `len` 0 | they are the guest's, and it is not told to read them |
/// | walks whatever there is | walks a bounded number of buffers in a call | frames beyond that are not sent here |
#[derive(Debug)]
pub struct RxModel {
    twin: Twin,
    device: RxRing,
    /// Why frames were dropped so far.
    pub drops: DropCounts,
    /// Calls so far, and publications without one.
    pub calls: [u64; 2],
    /// Most chains that went back at once.
    pub batch_max: usize,
    /// Frames that filled more than one chain.
    pub merged: u64,
    call: EventFd,
    decided: bool,
    /// Buffers of the chain at each head, as long as it is out.
    posted: Vec<Vec<(u64, u32)>>,
}

/// Head of a chain and what is written to which of its buffers.
type Filled = (u16, Vec<(u64, Vec<u8>)>);

/// What becomes of one frame.
enum Fate {
    /// Head and bytes of each chain that it fills.
    Fills(Vec<Filled>),
    /// These chains go back unused.
    Returns(Vec<u16>),
    Keeps(DropReason),
}

impl RxModel {
    /// The RX ring of a guest.
    ///
    /// # Panics
    /// If there cannot be such a guest, it has more than 1 MiB, or the ring is packed.
    #[must_use]
    pub fn new(spec: GuestSpec) -> Self {
        assert!(!spec.features.packed, "a split ring");
        let mut twin = Twin::new(spec, false);
        let call = EventFd::new().expect("eventfd");
        let (_, device) = twin.guest.device_with_calls(None, call.try_clone().ok());
        twin.begin(&NOISE);
        let size = usize::from(spec.ring_size);
        Self {
            twin,
            device,
            drops: DropCounts::default(),
            calls: [0; 2],
            batch_max: 0,
            merged: 0,
            call,
            decided: false,
            posted: vec![Vec::new(); size],
        }
    }

    /// One operation.
    ///
    /// # Panics
    /// If the two differ.
    pub fn run(&mut self, op: &RxOp) {
        match op {
            RxOp::Post(chain) => {
                let slots = self.twin.config.buffers_addr + SLOT_OFFSET;
                let addr_of = |head: u16, index: usize| {
                    let before: u32 = chain.lens[..index].iter().map(|len| len + 1).sum();
                    slots + u64::from(head) * SLOT_BYTES + u64::from(before)
                };
                // The last slot is cut short by the offset.
                let room = if self.twin.config.areas.size == 1 {
                    1000
                } else {
                    2040
                };
                if chain.lens.iter().map(|len| len + 1).sum::<u32>() > room {
                    return;
                }
                if let Some(head) = self.twin.offer(chain, true, addr_of) {
                    let buffers = chain.lens.iter().enumerate();
                    self.posted[usize::from(head)] = buffers
                        .map(|(index, &len)| (addr_of(head, index), len))
                        .collect();
                }
            }
            RxOp::Publish => self.twin.raw.publish(),
            RxOp::TakeUsed => {
                for head in self.twin.take_used() {
                    self.posted[usize::from(head)].clear();
                }
            }
            RxOp::Transmit { lens, seed } => {
                let frames = (0..).zip(lens);
                let mut frames: Vec<_> = frames
                    .map(|(index, &len)| frame_bytes(seed.wrapping_add(index), len))
                    .collect();
                frames.truncate(WALK_MIN / self.walk_max().max(1));
                if !frames.is_empty() {
                    self.transmit(&frames);
                }
            }
            RxOp::Restart => {
                let call = self.call.try_clone().ok();
                (_, self.device) = self.twin.guest.device_with_calls(None, call);
                self.decided = false;
                assert_eq!(
                    self.device.base(),
                    self.twin.queue.next_avail(),
                    "it goes on"
                );
            }
            RxOp::Relocate => {
                let memory = self.twin.guest.memory.clone();
                let moved = self.device.relocate(memory, self.twin.config.areas);
                moved.expect("where it is");
            }
            RxOp::Wish { flags, event } => {
                if self.twin.config.features.event_idx {
                    let used = self.twin.raw.used_idx();
                    self.twin
                        .raw
                        .set_used_event(used.wrapping_add_signed(*event));
                } else {
                    self.twin.raw.set_avail_flags(*flags);
                }
            }
        }
    }

    /// Buffers that a frame may have to walk.
    fn walk_max(&self) -> usize {
        // A loop is walked as often as the ring has descriptors.
        let size = self.posted.len();
        let posted = self.posted.iter().filter(|buffers| !buffers.is_empty());
        let walk = |buffers: &Vec<(u64, u32)>| match buffers.iter().any(|&(_, len)| len > 0) {
            true => buffers.len(),
            false => buffers.len().max(size),
        };
        posted.map(walk).sum()
    }

    /// Where a frame goes if the oracle's ring is at its present position.
    fn fate(&mut self, bytes: &[u8]) -> Fate {
        let twin = &mut self.twin;
        let (areas, features) = (twin.config.areas, twin.config.features);
        let header_bytes = twin.header_bytes() as usize;
        let mut rest = [&vec![0; header_bytes], bytes].concat();
        let mut filled: Vec<Filled> = Vec::new();
        while !rest.is_empty() {
            let heads = twin.queue.iter(&twin.memory);
            let Some(chain) = heads.expect("no jump").next() else {
                return Fate::Keeps(DropReason::RxRingFull);
            };
            let head = chain.head_index();
            let mut walk = OracleWalk::new(&twin.memory, areas, chain, areas.size);
            let mut parts = Vec::new();
            let mut done = 0;
            let mut bad = false;
            while done < rest.len() {
                match walk.buffer() {
                    Ok(None) => break,
                    Ok(Some((addr, len, true))) => {
                        let now = (len as usize).min(rest.len() - done);
                        // Only to see whether they are there.
                        let mut old = vec![0; now];
                        let there = twin.memory.read_slice(&mut old, GuestAddress(addr));
                        if now > 0 && there.is_err() {
                            bad = true;
                            break;
                        }
                        parts.push((addr, rest[done..done + now].to_vec()));
                        done += now;
                    }
                    Ok(Some(_)) | Err(Broken) => {
                        bad = true;
                        break;
                    }
                }
            }
            let too_small = done < rest.len() && !features.mergeable;
            if bad || done == 0 || (too_small && done < header_bytes) {
                let mut heads: Vec<u16> = filled.iter().map(|(head, _)| *head).collect();
                heads.push(head);
                return Fate::Returns(heads);
            }
            if too_small {
                return Fate::Keeps(DropReason::RxBufferTooSmall);
            }
            rest.drain(..done);
            filled.push((head, parts));
        }
        // num_buffers, wherever it lies.
        if header_bytes == 12 {
            let count = (filled.len() as u16).to_le_bytes();
            let all = filled.iter_mut().flat_map(|(_, parts)| parts);
            let mut header = all.flat_map(|(_, part)| part.iter_mut()).skip(10);
            for value in count {
                *header.next().expect("12 bytes") = value;
            }
        }
        Fate::Fills(filled)
    }

    fn transmit(&mut self, frames: &[Vec<u8>]) {
        self.twin.copy_to_oracle();
        let before = self.twin.bytes();
        let mut drops = Vec::new();
        let mut returned = Vec::new();
        for bytes in frames {
            let position = self.twin.queue.next_avail();
            match self.fate(bytes) {
                Fate::Fills(filled) => {
                    self.merged += u64::from(filled.len() > 1);
                    for (head, parts) in filled {
                        let len = parts.iter().map(|(_, part)| part.len() as u32).sum();
                        for (addr, part) in parts {
                            let wrote = self.twin.memory.write_slice(&part, GuestAddress(addr));
                            wrote
                                .or(part.is_empty().then_some(()).ok_or(()))
                                .expect("there");
                        }
                        returned.push((head, len));
                    }
                }
                Fate::Returns(heads) => {
                    drops.push(DropReason::BadRxChain);
                    // The oracle stands where it stopped: behind the bad one.
                    let count = heads.len() as u16;
                    assert_eq!(self.twin.queue.next_avail(), position.wrapping_add(count));
                    returned.extend(heads.into_iter().map(|head| (head, 0)));
                }
                Fate::Keeps(reason) => {
                    drops.push(reason);
                    self.twin.queue.set_next_avail(position);
                }
            }
        }
        self.twin.add_used(&returned);
        self.batch_max = self.batch_max.max(returned.len());
        for &reason in &drops {
            self.drops.add(reason, 1);
        }

        let report = transmit(&mut self.device, frames);
        assert_eq!(report.frames as usize, frames.len() - drops.len());
        assert_eq!(report.dropped as usize, drops.len());
        for &reason in DropReason::ALL {
            let wanted = drops.iter().filter(|&&drop| drop == reason).count();
            assert_eq!(report.drops.get(reason), wanted as u64, "{reason:?}");
        }
        assert_eq!(self.device.base(), self.twin.queue.next_avail());
        let (ours, theirs) = self.twin.used_rings();
        // The entries that count are compared below.
        assert_eq!(ours[..4], theirs[..4], "flags and index");
        assert_eq!(ours[ours.len() - 2..], theirs[ours.len() - 2..]);

        // What was written is what the oracle wrote, and nothing else changed.
        let after = self.twin.bytes();
        let start = self.twin.start;
        let mut may_change = vec![false; after.len()];
        let areas = self.twin.config.areas;
        let used_bytes = pollux_virtio::RingAreas::used_bytes(areas.size);
        // Three bytes of a buffer that goes on behind the end are there.
        let posted = self.posted.iter().flatten().copied();
        for (addr, len) in posted.chain([(areas.used_addr, used_bytes), (self.twin.end - 3, 3)]) {
            let at = (addr - start) as usize;
            let end = (at + len as usize).min(after.len());
            may_change[at.min(end)..end].fill(true);
        }
        let pieces = before.chunks(256).zip(after.chunks(256));
        let changed = pieces
            .enumerate()
            .filter(|(_, (before, after))| before != after);
        for at in changed.flat_map(|(piece, (before, _))| (256 * piece..).take(before.len())) {
            let is_same = before[at] == after[at];
            assert!(may_change[at] || is_same, "{:#x}", start + at as u64);
        }
        let first = self.twin.raw.used_idx().wrapping_sub(returned.len() as u16);
        for (offset, &(head, len)) in (0..).zip(&returned) {
            let entry = self.twin.raw.used_entry(first.wrapping_add(offset));
            let wanted = RawUsed {
                id: u32::from(head),
                len,
            };
            assert_eq!(entry, wanted);
            let mut rest = len;
            for &(addr, len) in &self.posted[usize::from(head)] {
                let now = len.min(rest) as usize;
                let mut wanted = vec![0; now];
                let read = self.twin.memory.read_slice(&mut wanted, GuestAddress(addr));
                read.or((now == 0).then_some(()).ok_or(())).expect("there");
                assert_eq!(self.twin.raw.read(addr, now), wanted);
                rest -= now as u32;
            }
        }

        let called = self.call.drain() > 0;
        if returned.is_empty() {
            assert!(!called, "nothing was published");
            return;
        }
        let theirs = self.twin.queue.needs_notification(&self.twin.memory);
        let wanted = if self.twin.config.features.event_idx {
            theirs.expect("memory") || !self.decided
        } else {
            self.twin.raw.read(areas.avail_addr, 1)[0] & 1 == 0
        };
        self.decided = true;
        self.calls[usize::from(!wanted)] += 1;
        assert_eq!(called, wanted, "call");
    }

    /// The ring is whole.
    ///
    /// # Panics
    /// If it is not.
    pub fn end(&self) {
        assert_eq!(self.device.fault(), None);
    }
}

//! The device half of a ring in either layout: chains, notifications, faults.

use std::io::ErrorKind;
use std::ops::Deref;
use std::sync::Arc;

use pollux_packet::{BATCH_MAX, SpanMut};
use pollux_sys::{EventFd, poison_count};

use super::RingConfig;
use super::counters::{Notifications, RingCounters};
use super::packed::PackedDevice;
use super::split::SplitDevice;
use crate::chain::Walk;
use crate::memory::{GuestMemory, Place};
use crate::notify::{Signal, Wish};
use crate::ring::packed::PackedRing;
use crate::ring::split::SplitRing;
use crate::ring::{Descriptor, RingAreas, RingError, RingTable};

/// Why a ring was broken. A broken ring does nothing until it is set up anew;
/// other rings go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RingFault {
    /// The driver moved `avail.idx` by more than the ring size, or back.
    #[error("avail.idx moved to {to}: back, or more than the ring size from {from}")]
    AvailIndex {
        /// Position up to which the ring was processed.
        from: u16,
        /// What the driver wrote.
        to: u16,
    },
    /// The driver made a descriptor available that the ring does not have.
    #[error("head {head} is outside the descriptor table")]
    Head {
        /// What the driver wrote.
        head: u16,
    },
    /// The driver made more available than a packed ring holds, or a chain whose
    /// end is not in sight: where the next one starts cannot be known.
    #[error(
        "the chain at descriptor {index} of a packed ring does not end within {within} descriptors"
    )]
    ChainEnd {
        /// Where it starts.
        index: u16,
        /// Descriptors that it might have had.
        within: u16,
    },
    /// The guest's memory file was shortened under the switch.
    #[error("guest memory was truncated")]
    MemoryTruncated,
    /// A call waited until it was interrupted: whoever owns the eventfd has
    /// cleared O_NONBLOCK on it and filled it, and so stopped a worker.
    #[error(
        "the call eventfd blocks: its owner cleared O_NONBLOCK on it and let it fill up, \
         which stopped a worker until the watchdog interrupted it"
    )]
    CallBlocks,
}

/// An available chain that was looked up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Its first descriptor, copied once.
    pub(super) head: Descriptor,
    /// What to return it as: the head's index, or a packed ring's buffer id.
    pub(super) id: u16,
    /// Descriptors that it takes up in a packed ring.
    pub(super) descs: u16,
    /// Bytes that the device wrote to it, to be returned with it.
    pub(super) written: u32,
}

/// How chains are given back to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Give {
    /// An entry for each.
    Each,
    /// One entry, that of the last: VIRTIO_F_IN_ORDER, and nothing was written.
    InOrder,
}

/// The chains of one burst: the whole buffer of each that is one buffer and can
/// be used as it is (nearly always); else an empty span, and the chain has to be
/// walked.
#[derive(Debug)]
pub(super) struct Chains<'m> {
    whole: [SpanMut<'m>; BATCH_MAX],
    len: usize,
}

impl<'m> Chains<'m> {
    pub(super) fn new() -> Self {
        Self {
            whole: [SpanMut::EMPTY; BATCH_MAX],
            len: 0,
        }
    }
}

impl<'m> Deref for Chains<'m> {
    type Target = [SpanMut<'m>];

    #[inline]
    fn deref(&self) -> &[SpanMut<'m>] {
        &self.whole[..self.len]
    }
}

/// Descriptors that are prefetched behind those of a burst.
pub(super) const LOOK_AHEAD: u16 = 64;

/// The device half of a layout: where the next chain is, and how chains go back.
pub(super) trait Positions {
    /// Copies the heads of up to `wanted` chains behind the first `known`, which
    /// were looked up; returns how many there were.
    fn look_up(&mut self, known: u16, wanted: u16, found: &mut [Found]) -> Result<u16, RingFault>;

    /// The chain behind the first `found`, which were looked up, if there is one.
    fn look_behind(&mut self, found: u16) -> Result<Option<Found>, RingFault>;

    /// Gives the chains back that were looked up first, as many used entries as
    /// `give` says, with one release store; reads what the driver wishes to be
    /// told after that.
    fn publish(&mut self, found: &[Found], give: Give) -> Wish;
}

/// Positions in one of the layouts. Which it is, is asked once in each phase.
#[derive(Debug)]
enum Layout {
    Split(SplitDevice),
    Packed(PackedDevice),
}

#[derive(Debug)]
pub(super) struct DeviceRing {
    layout: Layout,
    memory: Arc<GuestMemory>,
    /// The chains that were looked up, from the next one on.
    found: Box<[Found]>,
    found_len: u16,
    /// Where the last buffer was.
    near: Place,
    /// How chains are given back to which nothing was written.
    give_unwritten: Give,
    signal: Signal,
    call: Option<EventFd>,
    /// [`poison_count`] when this ring's memory was last known to be whole.
    poison_seen: u32,
    fault: Option<RingFault>,
    counters: Arc<RingCounters>,
}

impl DeviceRing {
    /// At most `chains_max` chains are looked up at one time.
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        config: RingConfig,
        chains_max: u16,
    ) -> Result<Self, RingError> {
        let event_idx = config.features.event_idx;
        let layout = if config.features.packed {
            let ring = PackedRing::new(Arc::clone(&memory), config.areas)?;
            let position = ring.position(config.base)?;
            Layout::Packed(PackedDevice::new(ring, position, event_idx))
        } else {
            let ring = SplitRing::new(Arc::clone(&memory), config.areas)?;
            Layout::Split(SplitDevice::new(ring, event_idx))
        };
        let chains_max = usize::from(chains_max).max(BATCH_MAX);
        let mut device = Self {
            layout,
            memory,
            found: vec![Found::default(); chains_max].into_boxed_slice(),
            found_len: 0,
            near: Place::default(),
            give_unwritten: if config.features.in_order {
                Give::InOrder
            } else {
                Give::Each
            },
            signal: Signal::default(),
            call: config.call,
            // Something may have been cut between mapping and now: compare on
            // the first burst.
            poison_seen: 0,
            fault: None,
            counters: config.counters,
        };
        device.suppress_kicks();
        Ok(device)
    }

    /// Goes on at the same position in another place: the memory was mapped
    /// anew, or the frontend says where the ring lies now (SET_MEM_TABLE and
    /// SET_VRING_ADDR on a running ring).
    pub(super) fn relocate(
        &mut self,
        memory: Arc<GuestMemory>,
        areas: RingAreas,
    ) -> Result<(), RingError> {
        if areas.size != self.size() {
            return Err(RingError::Size { size: areas.size });
        }
        match &mut self.layout {
            Layout::Split(split) => {
                split.relocate(SplitRing::new(Arc::clone(&memory), areas)?);
            }
            Layout::Packed(packed) => {
                packed.relocate(PackedRing::new(Arc::clone(&memory), areas)?);
            }
        }
        self.memory = memory;
        self.found_len = 0;
        self.near = Place::default();
        self.poison_seen = 0;
        self.suppress_kicks();
        Ok(())
    }

    /// Changes whom to call. What was published before the new eventfd came may
    /// have gone to the old one, so the next publication calls (B-18).
    pub(super) fn set_call(&mut self, call: Option<EventFd>) -> Option<EventFd> {
        self.signal = Signal::default();
        std::mem::replace(&mut self.call, call)
    }

    #[inline]
    pub(super) fn size(&self) -> u16 {
        match &self.layout {
            Layout::Split(split) => split.ring().size(),
            Layout::Packed(packed) => packed.ring().size(),
        }
    }

    pub(super) fn fault(&self) -> Option<RingFault> {
        self.fault
    }

    /// Position at which the ring goes on, in the form of SET_VRING_BASE.
    pub(super) fn position(&self) -> u16 {
        match &self.layout {
            Layout::Split(split) => split.position(),
            Layout::Packed(packed) => packed.position(),
        }
    }

    pub(super) fn notifications(&self) -> Notifications {
        self.counters.notifications()
    }

    #[cold]
    fn set_fault(&mut self, fault: RingFault) {
        // What was read may be zeros in the place of the guest's bytes.
        if self.is_whole() {
            self.fault.get_or_insert(fault);
        }
    }

    /// Looks up to `wanted` available chains up: copies each head's descriptor,
    /// locates its buffer and prefetches the first bytes of that. Chains that were
    /// looked up and not given back are not read again.
    ///
    /// `is_usable` says whether a chain of this one buffer can be used as it is.
    #[inline]
    pub(super) fn look_up<'m>(
        &mut self,
        memory: &'m GuestMemory,
        wanted: u16,
        is_usable: impl Fn(Descriptor) -> bool,
        prefetch: impl Fn(*const u8),
        chains: &mut Chains<'m>,
    ) {
        if self.fault.is_some() {
            return;
        }
        let known = self.found_len;
        if known < wanted {
            let found = &mut self.found[usize::from(known)..];
            let found = match &mut self.layout {
                Layout::Split(split) => split.look_up(known, wanted - known, found),
                Layout::Packed(packed) => packed.look_up(known, wanted - known, found),
            };
            match found {
                Ok(count) => self.found_len += count,
                Err(fault) => self.set_fault(fault),
            }
        }
        if !self.is_whole() {
            // Zeros in the place of the ring.
            self.found_len = 0;
        }
        chains.len = usize::from(self.found_len.min(wanted)).min(BATCH_MAX);
        let mut near = self.near;
        for (whole, chain) in chains.whole[..chains.len].iter_mut().zip(&*self.found) {
            let head = chain.head;
            if is_usable(head)
                && let Some((place, buffer)) = memory.locate(near, head.addr, head.len)
            {
                near = place;
                // Net header and head are 76 bytes: two lines for most buffers.
                // What lies behind the buffer is not read, only brought nearer.
                prefetch(buffer.as_ptr());
                prefetch(buffer.as_ptr().wrapping_add(64));
                *whole = buffer;
            } else {
                if let Some(piece) = memory.piece(head.addr, head.len) {
                    prefetch(piece.as_ptr());
                }
                *whole = SpanMut::EMPTY;
            }
        }
        self.near = near;
    }

    /// True if there is a chain `offset` behind the next one. Those before it
    /// were looked up.
    #[inline]
    pub(super) fn has_chain(&mut self, offset: u16) -> bool {
        offset < self.found_len || self.look_behind(offset)
    }

    #[cold]
    fn look_behind(&mut self, offset: u16) -> bool {
        debug_assert_eq!(offset, self.found_len, "one after the other");
        let Some(slot) = self.found.get_mut(usize::from(offset)) else {
            return false;
        };
        if self.fault.is_some() {
            return false;
        }
        let behind = match &mut self.layout {
            Layout::Split(split) => split.look_behind(offset),
            Layout::Packed(packed) => packed.look_behind(offset),
        };
        match behind {
            Ok(Some(chain)) => {
                *slot = chain;
                self.found_len += 1;
                true
            }
            Ok(None) => false,
            Err(fault) => {
                self.set_fault(fault);
                false
            }
        }
    }

    /// Starts to walk a chain that was looked up. At most `buffers_max` buffers
    /// may follow.
    #[inline]
    pub(super) fn walk<'r>(
        &'r self,
        memory: &'r GuestMemory,
        offset: u16,
        buffers_max: u16,
    ) -> Walk<'r> {
        let table = match &self.layout {
            Layout::Split(split) => RingTable::Split(split.ring()),
            Layout::Packed(packed) => RingTable::Packed(packed.ring()),
        };
        let head = self.found[usize::from(offset)].head;
        Walk::new(memory, table, head, buffers_max)
    }

    /// Work units of a chain that was looked up and walked over `descriptors`: one,
    /// and one for every descriptor after its second, whether it was found while
    /// the chain's end was looked for or walked over.
    #[inline]
    pub(super) fn units(&self, offset: u16, descriptors: u32) -> u32 {
        let descs = self.found[usize::from(offset)].descs;
        descriptors.max(descs.into()).saturating_sub(2) + 1
    }

    /// Notes how many bytes were written to a chain that was looked up.
    #[inline]
    pub(super) fn set_written(&mut self, offset: u16, bytes: u32) {
        self.found[usize::from(offset)].written = bytes;
    }

    /// Position behind all chains that were looked up.
    pub(super) fn position_behind_found(&self) -> u16 {
        match &self.layout {
            Layout::Split(split) => split.position_behind(self.found_len),
            Layout::Packed(packed) => packed.position_behind_found(),
        }
    }

    /// True if there is still no chain at `position`, up to which all were looked
    /// up once.
    pub(super) fn ends_at(&mut self, position: u16) -> bool {
        match &mut self.layout {
            Layout::Split(split) => split.ends_at(position),
            Layout::Packed(packed) => packed.ends_at(position),
        }
    }

    /// Phase 4: gives the first `count` chains that were looked up back to the
    /// driver with one release store and decides one notification. False (and
    /// nothing given) on a ring whose memory was cut meanwhile.
    #[inline]
    pub(super) fn publish(&mut self, count: u16) -> bool {
        self.publish_as(count, Give::Each)
    }

    /// [`publish`](Self::publish) for chains to which nothing was written.
    #[inline]
    pub(super) fn publish_unwritten(&mut self, count: u16) -> bool {
        self.publish_as(count, self.give_unwritten)
    }

    #[inline]
    fn publish_as(&mut self, count: u16, give: Give) -> bool {
        if count == 0 {
            return true;
        }
        if !self.is_whole() {
            return false;
        }
        let found = &self.found[..usize::from(count)];
        let wish = match &mut self.layout {
            Layout::Split(split) => split.publish(found, give),
            Layout::Packed(packed) => packed.publish(found, give),
        };
        self.found
            .copy_within(usize::from(count)..usize::from(self.found_len), 0);
        self.found_len -= count;
        if self.signal.decide(wish) {
            self.call();
        } else {
            self.counters.call_suppressed();
        }
        true
    }

    /// False once the guest's memory was cut: then the ring is broken, since
    /// what was read may not be what the guest wrote. One load in the common
    /// case: no mapping of the process was cut since the last look.
    #[inline]
    pub(super) fn is_whole(&mut self) -> bool {
        let count = poison_count();
        if count != self.poison_seen {
            if self.memory.is_poisoned() {
                self.fault.get_or_insert(RingFault::MemoryTruncated);
                return false;
            }
            self.poison_seen = count;
        }
        true
    }

    #[cold]
    fn call(&mut self) {
        let Some(call) = &self.call else { return };
        match call.signal() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {
                // A write that does not wait is never interrupted. Nothing is
                // written to this eventfd again, since the ring is broken. It is
                // closed with the ring, by control: closing what a frontend sent
                // (a socket that lingers) may wait as well.
                self.set_fault(RingFault::CallBlocks);
            }
            // A full counter means that a call is pending: delivered. Other
            // errors are the frontend's doing and its loss.
            Ok(()) | Err(_) => self.counters.call_sent(),
        }
    }

    /// Tells the driver that no kick is needed: the ring is polled.
    pub(super) fn suppress_kicks(&mut self) {
        match &mut self.layout {
            Layout::Split(split) => split.suppress_kicks(),
            Layout::Packed(packed) => packed.suppress_kicks(),
        }
    }

    /// Asks the driver for a kick when it makes the next chain available, then
    /// looks again: true if there is work already, and the caller must not
    /// sleep.
    pub(super) fn request_kick(&mut self) -> bool {
        if self.fault.is_some() {
            return false;
        }
        let requested = match &mut self.layout {
            Layout::Split(split) => split.request_kick(),
            Layout::Packed(packed) => Ok(packed.request_kick()),
        };
        requested.unwrap_or_else(|fault| {
            self.set_fault(fault);
            false
        })
    }
}

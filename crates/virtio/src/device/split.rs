//! Position and notification state of the device half of a split ring.

use std::io::ErrorKind;
use std::sync::Arc;

use arrayvec::ArrayVec;
use pollux_packet::{BATCH_MAX, SpanMut};
use pollux_sys::{EventFd, full_fence, poison_count};

use super::RingConfig;
use crate::memory::{GuestMemory, Place};
use crate::notify::Signal;
use crate::spec::{AVAIL_NO_INTERRUPT, USED_NO_NOTIFY};
use crate::split::{Descriptor, RingAreas, RingError, SplitRing, UsedSlots};

/// Why a ring was broken. A broken ring does nothing until it is set up anew;
/// other rings go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RingFault {
    /// The driver moved `avail.idx` by more than the ring size.
    #[error("avail.idx moved from {from} to {to}, more than the ring size")]
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

/// Notifications of a ring since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notifications {
    /// Calls written to the driver's eventfd.
    pub sent: u64,
    /// Publications for which the driver did not ask for a call.
    pub suppressed: u64,
}

/// An available chain as it was looked up: its first descriptor, copied once,
/// and the whole buffer if the chain is one buffer that can be used as it is
/// (nearly always); else an empty span, and the chain has to be walked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain<'m> {
    pub(super) whole: SpanMut<'m>,
    pub(super) head: Descriptor,
}

/// The chains of one burst.
pub(super) type Chains<'m> = ArrayVec<Chain<'m>, BATCH_MAX>;

/// Descriptors that are prefetched behind those of a burst.
const LOOK_AHEAD: u16 = 64;

/// Entries of the used ring that share a cache line.
const USED_ENTRIES_PER_LINE: u16 = 8;

#[derive(Debug)]
pub(super) struct SplitDevice {
    ring: SplitRing,
    event_idx: bool,
    /// Next available entry to process.
    next_avail: u16,
    /// `avail.idx` as last read, so that it is not read again while enough is
    /// known to be there.
    avail_seen: u16,
    /// Descriptors of the available entries before this one were prefetched.
    prefetched: u16,
    /// Heads of the chains that were looked up last.
    heads: Box<[u16; BATCH_MAX]>,
    /// Where the last buffer was.
    near: Place,
    /// Next used entry to write; published up to here between bursts.
    next_used: u16,
    signal: Signal,
    call: Option<EventFd>,
    /// [`poison_count`] when this ring's memory was last known to be whole.
    poison_seen: u32,
    fault: Option<RingFault>,
    notifications: Notifications,
}

impl SplitDevice {
    pub(super) fn new(memory: Arc<GuestMemory>, config: RingConfig) -> Result<Self, RingError> {
        let ring = SplitRing::new(memory, config.areas)?;
        // Whoever served the ring before has returned every chain up to here. If
        // the frontend names another place (a backend that was killed cannot say
        // where it was; virtio-user then says 0), this one holds: chains that
        // were taken and not returned are processed again, and none is skipped.
        let next_used = ring.used_idx();
        let mut device = Self {
            ring,
            event_idx: config.features.event_idx,
            next_avail: next_used,
            avail_seen: next_used,
            prefetched: next_used,
            heads: Box::new([0; BATCH_MAX]),
            near: Place::default(),
            next_used,
            signal: Signal::default(),
            call: config.call,
            // Something may have been cut between mapping and now: compare on
            // the first burst.
            poison_seen: 0,
            fault: None,
            notifications: Notifications::default(),
        };
        device.suppress_kicks();
        Ok(device)
    }

    /// Goes on at the same positions in another place: the memory was mapped
    /// anew, or the frontend says where the ring lies now (SET_MEM_TABLE and
    /// SET_VRING_ADDR on a running ring). Both positions are kept, not read
    /// again: the bytes of the ring are the same, and what they say of the
    /// device's own index is the driver's word.
    pub(super) fn relocate(
        &mut self,
        memory: Arc<GuestMemory>,
        areas: RingAreas,
    ) -> Result<(), RingError> {
        if areas.size != self.ring.size() {
            return Err(RingError::Size { size: areas.size });
        }
        self.ring = SplitRing::new(memory, areas)?;
        self.near = Place::default();
        self.avail_seen = self.next_avail;
        self.prefetched = self.next_avail;
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
    pub(super) fn ring(&self) -> &SplitRing {
        &self.ring
    }

    pub(super) fn fault(&self) -> Option<RingFault> {
        self.fault
    }

    pub(super) fn base(&self) -> u16 {
        self.next_avail
    }

    pub(super) fn notifications(&self) -> Notifications {
        self.notifications
    }

    #[cold]
    pub(super) fn set_fault(&mut self, fault: RingFault) {
        self.fault.get_or_insert(fault);
    }

    /// Entries that can be processed, at least `wanted` if there are so many:
    /// the index is read only if fewer are known. 0 on a broken ring.
    #[inline]
    pub(super) fn available(&mut self, wanted: u16) -> u16 {
        if self.fault.is_some() {
            return 0;
        }
        let known = self.avail_seen.wrapping_sub(self.next_avail);
        if known >= wanted {
            return known;
        }
        let seen = self.ring.avail_idx();
        if !self.is_whole() {
            // The index is a zero in the place of the guest's.
            return 0;
        }
        let available = seen.wrapping_sub(self.next_avail);
        if available > self.ring.size() {
            self.set_fault(RingFault::AvailIndex {
                from: self.next_avail,
                to: seen,
            });
            return 0;
        }
        self.avail_seen = seen;
        available
    }

    /// Position behind the last available entry, as the driver says now.
    pub(super) fn avail_end(&mut self) -> u16 {
        let available = self.available(u16::MAX);
        self.next_avail.wrapping_add(available)
    }

    /// Looks up to `wanted` available chains up: copies each head's descriptor,
    /// locates its buffer and prefetches the first bytes of that.
    ///
    /// Descriptors are prefetched a burst ahead: they are on their way while
    /// this one is worked on. (Buffers were, too, for a while: it cost more
    /// instructions than it saved stalls.)
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
        let available = self.available(wanted);
        let count = available.min(wanted);
        if count == 0 {
            return;
        }
        self.prefetch_descriptors(available.min(wanted + LOOK_AHEAD));
        self.prefetch_used(count);
        let Self { ring, heads, .. } = self;
        let (first, mut near) = (self.next_avail, self.near);
        chains.extend(
            (0..count)
                .zip(heads.iter_mut())
                .map_while(|(offset, slot)| {
                    let id = ring.avail_head(first.wrapping_add(offset));
                    if id >= ring.size() {
                        return None;
                    }
                    *slot = id;
                    let head = ring.desc(id);
                    if is_usable(head)
                        && let Some((place, whole)) = memory.locate(near, head.addr, head.len)
                    {
                        near = place;
                        // Net header and head are 76 bytes: two lines for most buffers.
                        // What lies behind the buffer is not read, only brought nearer.
                        prefetch(whole.as_ptr());
                        prefetch(whole.as_ptr().wrapping_add(64));
                        return Some(Chain { whole, head });
                    }
                    if let Some(piece) = memory.piece(head.addr, head.len) {
                        prefetch(piece.as_ptr());
                    }
                    let whole = SpanMut::EMPTY;
                    Some(Chain { whole, head })
                }),
        );
        self.near = near;
        if chains.is_empty() {
            let head = self.ring.avail_head(first);
            self.set_fault(RingFault::Head { head });
        }
    }

    #[inline]
    fn prefetch_descriptors(&mut self, count: u16) {
        let done = self.prefetched.wrapping_sub(self.next_avail);
        for offset in done..count {
            let position = self.next_avail.wrapping_add(offset);
            self.ring.prefetch_desc(self.ring.avail_head(position));
        }
        self.prefetched = self.next_avail.wrapping_add(count.max(done));
    }

    #[inline]
    fn prefetch_used(&self, count: u16) {
        let mut offset = 0;
        while offset < count {
            self.ring
                .prefetch_used_entry(self.next_used.wrapping_add(offset));
            offset += USED_ENTRIES_PER_LINE;
        }
    }

    /// Head of the chain `offset` behind the next one, which was looked up.
    #[inline]
    pub(super) fn head(&self, offset: u16) -> u16 {
        self.heads[usize::from(offset) % BATCH_MAX]
    }

    /// Head and first descriptor of a chain behind those that were looked up;
    /// `None` if it is not available, or the ring breaks over it.
    pub(super) fn chain_behind(&mut self, offset: u16) -> Option<(u16, Descriptor)> {
        if self.available(offset + 1) <= offset {
            return None;
        }
        let id = self.ring.avail_head(self.next_avail.wrapping_add(offset));
        if id >= self.ring.size() {
            self.set_fault(RingFault::Head { head: id });
            return None;
        }
        Some((id, self.ring.desc(id)))
    }

    /// Used entries from the next one on, to write; the driver sees them when
    /// they are published. As many as are available are free: the driver has
    /// that many chains out, and has read that many entries of the used ring.
    #[inline]
    pub(super) fn used_slots(&self) -> UsedSlots<'_> {
        self.ring.used_slots(self.next_used)
    }

    /// Phase 4: gives `count` used entries to the driver with one release store
    /// and decides one notification. False (and nothing given) on a ring whose
    /// memory was cut meanwhile.
    #[inline]
    pub(super) fn publish(&mut self, count: u16) -> bool {
        if count == 0 {
            return true;
        }
        if !self.is_whole() {
            return false;
        }
        let prefetched = self.prefetched.wrapping_sub(self.next_avail);
        self.next_avail = self.next_avail.wrapping_add(count);
        self.prefetched = self
            .next_avail
            .wrapping_add(prefetched.saturating_sub(count));
        self.next_used = self.next_used.wrapping_add(count);
        self.ring.set_used_idx(self.next_used);
        if self.driver_wants_call() {
            self.call();
        } else {
            self.notifications.suppressed += 1;
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
            if self.ring.memory().is_poisoned() {
                self.set_fault(RingFault::MemoryTruncated);
                return false;
            }
            self.poison_seen = count;
        }
        true
    }

    /// Whether the driver asked to be called for what was just published.
    #[inline]
    fn driver_wants_call(&mut self) -> bool {
        // B-17: the index must be visible before the driver's wish is read, or
        // a driver that arms and then re-checks the index may be missed. The
        // fence in the driver between these two pairs with this one.
        full_fence();
        if self.event_idx {
            self.signal.by_event(self.ring.used_event(), self.next_used)
        } else {
            self.ring.avail_flags() & AVAIL_NO_INTERRUPT == 0
        }
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
            Ok(()) | Err(_) => self.notifications.sent += 1,
        }
    }

    /// Tells the driver that no kick is needed: the ring is polled. With
    /// EVENT_IDX there is no way to say so but not to move `avail_event`: one
    /// kick in 65,536 entries is left (section 2.7.10).
    pub(super) fn suppress_kicks(&mut self) {
        if !self.event_idx {
            self.ring.set_used_flags(USED_NO_NOTIFY);
        }
    }

    /// Asks the driver for a kick when it makes the next entry available, then
    /// looks again: true if there is work already, and the caller must not
    /// sleep.
    pub(super) fn request_kick(&mut self) -> bool {
        if self.event_idx {
            self.ring.set_avail_event(self.avail_seen);
        } else {
            self.ring.set_used_flags(0);
        }
        // B-58: the wish must be visible before the index is read again.
        full_fence();
        self.available(u16::MAX) > 0
    }
}

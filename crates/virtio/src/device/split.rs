//! Position and notification state of the device half of a split ring.

use std::sync::Arc;

use arrayvec::ArrayVec;
use pollux_packet::{BATCH_MAX, BurstLimit};
use pollux_sys::{EventFd, full_fence, poison_count};

use super::RingConfig;
use crate::memory::GuestMemory;
use crate::notify::Signal;
use crate::spec::{AVAIL_NO_INTERRUPT, USED_NO_NOTIFY};
use crate::split::{RingError, SplitRing, UsedSlots};

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
}

/// Notifications of a ring since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notifications {
    /// Calls written to the driver's eventfd.
    pub sent: u64,
    /// Publications for which the driver did not ask for a call.
    pub suppressed: u64,
}

/// Heads that were made available, copied.
pub(super) type Heads = ArrayVec<u16, BATCH_MAX>;

/// Descriptors that are prefetched at one time: this burst's and the next's.
const PREFETCH_MAX: u16 = 2 * BurstLimit::MAX.frames;

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
        let next_used = ring.used_idx();
        let mut device = Self {
            ring,
            event_idx: config.features.event_idx,
            next_avail: config.base,
            avail_seen: config.base,
            prefetched: config.base,
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

    /// Phase 1: copies up to `wanted` heads, and prefetches the used entries
    /// that will be written and the descriptors: those of this burst, if that
    /// was not done before, and those of the next one, which are on their way
    /// while this one is worked on.
    #[inline]
    pub(super) fn take_heads(&mut self, wanted: u16, heads: &mut Heads) {
        heads.clear();
        let available = self.available(wanted);
        let count = available.min(wanted);
        self.prefetch_descriptors(available.min(2 * wanted));
        let Self {
            ring, next_avail, ..
        } = self;
        let mut outside = None;
        let all = (0..count).map(|offset| ring.avail_head(next_avail.wrapping_add(offset)));
        heads.extend(all.take_while(|&head| {
            let inside = head < ring.size();
            if !inside {
                outside = Some(head);
            }
            inside
        }));
        if let Some(head) = outside {
            self.set_fault(RingFault::Head { head });
        }
        let mut offset = 0;
        while offset < count {
            self.ring
                .prefetch_used_entry(self.next_used.wrapping_add(offset));
            offset += USED_ENTRIES_PER_LINE;
        }
    }

    /// Prefetches the descriptors of the next `count` available entries, each
    /// once. What the driver changes in its ring meanwhile costs it time.
    #[inline]
    fn prefetch_descriptors(&mut self, count: u16) {
        let ahead = self.prefetched.wrapping_sub(self.next_avail);
        let done = if ahead <= PREFETCH_MAX { ahead } else { 0 };
        for offset in done..count {
            let position = self.next_avail.wrapping_add(offset);
            self.ring.prefetch_desc(self.ring.avail_head(position));
        }
        self.prefetched = self.next_avail.wrapping_add(count.max(done));
    }

    /// The head that is `offset` entries behind the next one; `None` breaks the
    /// ring. `offset` must be less than [`available`](Self::available) said.
    #[inline]
    pub(super) fn head(&mut self, offset: u16) -> Option<u16> {
        let head = self.ring.avail_head(self.next_avail.wrapping_add(offset));
        if head >= self.ring.size() {
            self.set_fault(RingFault::Head { head });
            return None;
        }
        Some(head)
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
        self.next_avail = self.next_avail.wrapping_add(count);
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
        if let Some(call) = &self.call {
            // A full counter means that a call is pending: delivered. Other
            // errors are the frontend's doing and its loss.
            let _ = call.signal();
            self.notifications.sent += 1;
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

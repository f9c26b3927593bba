//! Positions of the device half in a split ring (virtio 1.2, section 2.7).

use super::ring::{Found, Give, LOOK_AHEAD, Positions, RingFault};
use crate::notify::{Wish, arm_then_look, publish_then_ask};
use crate::ring::split::{SplitRing, UsedEntry};
use crate::spec::{AVAIL_NO_INTERRUPT, USED_NO_NOTIFY};

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
}

impl SplitDevice {
    pub(super) fn new(ring: SplitRing, event_idx: bool) -> Self {
        // Whoever served the ring before has returned every chain up to here. If
        // the frontend names another place (a backend that was killed cannot say
        // where it was; virtio-user then says 0), this one holds: chains that
        // were taken and not returned are processed again, and none is skipped.
        let next_used = ring.used_idx();
        Self {
            ring,
            event_idx,
            next_avail: next_used,
            avail_seen: next_used,
            prefetched: next_used,
            next_used,
        }
    }

    /// Goes on in another place. Both positions are kept, not read again: the
    /// bytes of the ring are the same, and what they say of the device's own
    /// index is the driver's word.
    pub(super) fn relocate(&mut self, ring: SplitRing) {
        self.ring = ring;
        self.avail_seen = self.next_avail;
        self.prefetched = self.next_avail;
    }

    #[inline]
    pub(super) fn ring(&self) -> &SplitRing {
        &self.ring
    }

    pub(super) fn position(&self) -> u16 {
        self.next_avail
    }

    /// Position behind the first `found` chains.
    pub(super) fn position_behind(&self, found: u16) -> u16 {
        self.next_avail.wrapping_add(found)
    }

    /// True if no chain is available at `position`, which was the end.
    pub(super) fn ends_at(&mut self, position: u16) -> bool {
        self.available(u16::MAX)
            .is_ok_and(|available| self.next_avail.wrapping_add(available) == position)
    }

    /// Entries that can be processed, at least `wanted` if there are so many:
    /// the index is read only if fewer are known.
    #[inline]
    fn available(&mut self, wanted: u16) -> Result<u16, RingFault> {
        let known = self.avail_seen.wrapping_sub(self.next_avail);
        if known >= wanted {
            return Ok(known);
        }
        let seen = self.ring.avail_idx();
        let available = seen.wrapping_sub(self.next_avail);
        // Nor can it go back behind what was there: chains from there may be in use.
        if available > self.ring.size() || available < known {
            return Err(RingFault::AvailIndex {
                from: self.next_avail,
                to: seen,
            });
        }
        self.avail_seen = seen;
        Ok(available)
    }

    #[inline]
    fn chain(&self, offset: u16) -> Result<Found, RingFault> {
        let id = self.ring.avail_head(self.next_avail.wrapping_add(offset));
        if id >= self.ring.size() {
            return Err(RingFault::Head { head: id });
        }
        Ok(Found {
            head: self.ring.desc(id),
            id,
            descs: 1,
            written: 0,
        })
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

    /// With EVENT_IDX there is no way to say so but not to move `avail_event`:
    /// one kick in 65,536 entries is left (section 2.7.10).
    pub(super) fn suppress_kicks(&mut self) {
        if !self.event_idx {
            self.ring.set_used_flags(USED_NO_NOTIFY);
        }
    }

    /// Asks for a kick on the next available entry. True if there is one already.
    pub(super) fn request_kick(&mut self) -> Result<bool, RingFault> {
        let arm = || {
            if self.event_idx {
                self.ring.set_avail_event(self.avail_seen);
            } else {
                self.ring.set_used_flags(0);
            }
        };
        arm_then_look(arm, || self.ring.avail_idx());
        Ok(self.available(u16::MAX)? > 0)
    }
}

impl Positions for SplitDevice {
    /// Descriptors are prefetched a burst ahead: they are on their way while
    /// this one is worked on. (Buffers were, too, for a while: it cost more
    /// instructions than it saved stalls.)
    #[inline]
    fn look_up(&mut self, known: u16, wanted: u16, found: &mut [Found]) -> Result<u16, RingFault> {
        let available = self.available(known + wanted)?;
        let count = (available - known).min(wanted);
        if count == 0 {
            return Ok(0);
        }
        self.prefetch_descriptors(available.min(known + wanted + LOOK_AHEAD));
        self.prefetch_used(known + count);
        for (offset, slot) in (0..count).zip(found) {
            match self.chain(known + offset) {
                Ok(chain) => *slot = chain,
                Err(fault) if offset == 0 => return Err(fault),
                // What is before it is good; it comes first next time.
                Err(_) => return Ok(offset),
            }
        }
        Ok(count)
    }

    fn look_behind(&mut self, found: u16) -> Result<Option<Found>, RingFault> {
        if self.available(found + 1)? <= found {
            return Ok(None);
        }
        self.chain(found).map(Some)
    }

    #[inline]
    fn publish(&mut self, found: &[Found], give: Give) -> Wish {
        let count = u16::try_from(found.len()).expect("no more chains than a ring has");
        let slots = self.ring.used_slots(self.next_used);
        let entry = |chain: &Found| UsedEntry {
            id: chain.id.into(),
            len: chain.written,
        };
        match (give, found) {
            // One entry in the place of the first, with the last one's id
            // (section 2.7.9).
            (Give::InOrder, [.., last]) => slots.set(0, entry(last)),
            _ => {
                for (offset, chain) in (0..count).zip(found) {
                    slots.set(offset, entry(chain));
                }
            }
        }
        let prefetched = self.prefetched.wrapping_sub(self.next_avail);
        self.next_avail = self.next_avail.wrapping_add(count);
        self.prefetched = self
            .next_avail
            .wrapping_add(prefetched.saturating_sub(count));
        self.next_used = self.next_used.wrapping_add(count);
        publish_then_ask(
            || self.ring.set_used_idx(self.next_used),
            || {
                if self.event_idx {
                    Wish::at_event(self.ring.used_event(), self.next_used, count)
                } else if self.ring.avail_flags() & AVAIL_NO_INTERRUPT == 0 {
                    Wish::Always
                } else {
                    Wish::Never
                }
            },
        )
    }
}

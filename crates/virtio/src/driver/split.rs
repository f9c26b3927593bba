//! Positions of the driver half in a split ring (virtio 1.2, section 2.7).

use super::ring::Positions;
use crate::notify::{Wish, arm_then_look, publish_then_ask};
use crate::ring::Descriptor;
use crate::ring::split::SplitRing;
use crate::spec::{AVAIL_NO_INTERRUPT, USED_NO_NOTIFY};

#[derive(Debug)]
pub(super) struct SplitDriver {
    ring: SplitRing,
    event_idx: bool,
    /// Where the next chain goes.
    next_avail: u16,
    /// What the device has been told.
    published: u16,
    /// Next used entry to take.
    next_used: u16,
    /// `used.idx` as last read.
    used_seen: u16,
}

impl SplitDriver {
    /// Clears the ring and begins at `base` on both sides.
    pub(super) fn new(ring: SplitRing, event_idx: bool, base: u16) -> Self {
        for index in 0..ring.size() {
            ring.set_desc(index, Descriptor::default());
            ring.set_avail_head(index, 0);
        }
        ring.set_avail_flags(0);
        ring.set_used_event(0);
        ring.set_used_flags(0);
        ring.set_avail_event(0);
        ring.set_used_idx(base);
        ring.set_avail_idx(base);
        Self {
            ring,
            event_idx,
            next_avail: base,
            published: base,
            next_used: base,
            used_seen: base,
        }
    }

    #[inline]
    pub(super) fn ring(&self) -> &SplitRing {
        &self.ring
    }

    #[inline]
    pub(super) fn published(&self) -> u16 {
        self.published
    }

    #[inline]
    pub(super) fn publish(&mut self) -> Option<Wish> {
        let new = self.next_avail;
        let added = new.wrapping_sub(self.published);
        if added == 0 {
            return None;
        }
        self.published = new;
        Some(publish_then_ask(
            || self.ring.set_avail_idx(new),
            || {
                if self.event_idx {
                    Wish::at_event(self.ring.avail_event(), new, added)
                } else if self.ring.used_flags() & USED_NO_NOTIFY == 0 {
                    Wish::Always
                } else {
                    Wish::Never
                }
            },
        ))
    }

    #[inline]
    fn has_used(&self) -> bool {
        self.next_used != self.used_seen
    }

    pub(super) fn suppress_calls(&mut self) {
        if self.event_idx {
            // As far away as can be (section 2.7.7.1).
            self.ring.set_used_event(self.next_used.wrapping_sub(1));
        } else {
            self.ring.set_avail_flags(AVAIL_NO_INTERRUPT);
        }
    }

    pub(super) fn request_call(&mut self) -> bool {
        let arm = || {
            if self.event_idx {
                self.ring.set_used_event(self.next_used);
            } else {
                self.ring.set_avail_flags(0);
            }
        };
        arm_then_look(arm, || self.ring.used_idx()) != self.next_used
    }
}

impl Positions for SplitDriver {
    #[inline]
    fn put(&mut self, index: u16, _head: u16, descriptor: Descriptor) {
        self.ring.set_desc(index, descriptor);
    }

    #[inline]
    fn push(&mut self, head: u16) {
        self.ring.set_avail_head(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// The index is read only when all that was known is taken.
    #[inline]
    fn used(&mut self) -> Option<(u32, u32)> {
        if !self.has_used() {
            self.used_seen = self.ring.used_idx();
            if !self.has_used() {
                return None;
            }
        }
        let entry = self.ring.used_entry(self.next_used);
        Some((entry.id, entry.len))
    }

    #[inline]
    fn pass(&mut self, _descriptors: u16) {
        self.next_used = self.next_used.wrapping_add(1);
    }
}

//! Positions of the driver half in a packed ring (virtio 1.2, section 2.8).

use super::ring::Positions;
use crate::notify::{Wish, arm_then_look, publish_then_ask};
use crate::ring::Descriptor;
use crate::ring::packed::{Half, PackedRing, Position, Word};

#[derive(Debug)]
pub(super) struct PackedDriver {
    ring: PackedRing,
    event_idx: bool,
    /// Where the next descriptor goes.
    next: Position,
    /// What the device has been told: up to here.
    published: Position,
    /// Descriptors between the two.
    added: u16,
    /// Of the first of those: written last, so that the device sees the batch
    /// whole.
    first: Option<Word>,
    /// Where the device returns the next chain.
    next_used: Position,
}

impl PackedDriver {
    /// Clears the ring and begins at `base` on both sides.
    pub(super) fn new(ring: PackedRing, event_idx: bool, base: Position) -> Self {
        ring.clear(base);
        ring.enable_events(Half::Driver, base, false);
        ring.enable_events(Half::Device, base, false);
        Self {
            ring,
            event_idx,
            next: base,
            published: base,
            added: 0,
            first: None,
            next_used: base,
        }
    }

    #[inline]
    pub(super) fn ring(&self) -> &PackedRing {
        &self.ring
    }

    #[inline]
    pub(super) fn published(&self) -> u16 {
        self.published.to_bits()
    }

    #[inline]
    pub(super) fn publish(&mut self) -> Option<Wish> {
        let (first, added) = (self.first.take()?, std::mem::take(&mut self.added));
        let start = std::mem::replace(&mut self.published, self.next);
        Some(publish_then_ask(
            || self.ring.release_word(start.index(), first),
            || {
                self.ring
                    .wish(Half::Device, self.next, added, self.event_idx)
            },
        ))
    }

    #[inline]
    fn next_word(&self) -> Word {
        self.ring.word(self.next_used.index())
    }

    pub(super) fn suppress_calls(&mut self) {
        self.ring.disable_events(Half::Driver);
    }

    pub(super) fn request_call(&mut self) -> bool {
        let arm = || {
            self.ring
                .enable_events(Half::Driver, self.next_used, self.event_idx);
        };
        arm_then_look(arm, || self.next_word().is_used(self.next_used))
    }
}

impl Positions for PackedDriver {
    /// Behind the last one. The head is the buffer id.
    #[inline]
    fn put(&mut self, _index: u16, head: u16, descriptor: Descriptor) {
        let index = self.next.index();
        self.ring.set_addr(index, descriptor.addr);
        let word = Word::available(self.next, descriptor.len, head, descriptor.flags);
        if self.first.is_none() {
            self.first = Some(word);
        } else {
            self.ring.set_word(index, word);
        }
        self.next = self.next.advance(1, self.ring.size());
        self.added += 1;
    }

    #[inline]
    fn push(&mut self, _head: u16) {}

    #[inline]
    fn used(&mut self) -> Option<(u32, u32)> {
        let word = self.next_word();
        word.is_used(self.next_used)
            .then(|| (word.id().into(), word.len()))
    }

    #[inline]
    fn pass(&mut self, descriptors: u16) {
        self.next_used = self.next_used.advance(descriptors, self.ring.size());
    }
}

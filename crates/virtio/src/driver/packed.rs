//! Positions of the driver half in a packed ring (virtio 1.2, section 2.8).

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

    /// Puts a descriptor of the chain with buffer id `id` behind the last one.
    #[inline]
    pub(super) fn put(&mut self, id: u16, descriptor: Descriptor) {
        let index = self.next.index();
        self.ring.set_addr(index, descriptor.addr);
        let word = Word::available(self.next, descriptor.len, id, descriptor.flags);
        if self.first.is_none() {
            self.first = Some(word);
        } else {
            self.ring.set_word(index, word);
        }
        self.next = self.next.advance(1, self.ring.size());
        self.added += 1;
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

    /// Id and length of the next chain that was returned.
    #[inline]
    pub(super) fn used(&self) -> Option<(u32, u32)> {
        let word = self.ring.word(self.next_used.index());
        word.is_used(self.next_used)
            .then(|| (word.id().into(), word.len()))
    }

    /// A chain of so many descriptors was taken.
    #[inline]
    pub(super) fn pass(&mut self, descs: u16) {
        self.next_used = self.next_used.advance(descs, self.ring.size());
    }

    pub(super) fn suppress_calls(&mut self) {
        self.ring.disable_events(Half::Driver);
    }

    pub(super) fn request_call(&mut self) -> bool {
        let arm = || {
            self.ring
                .enable_events(Half::Driver, self.next_used, self.event_idx);
        };
        arm_then_look(arm, || self.used().is_some())
    }
}

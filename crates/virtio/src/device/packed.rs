//! Position of the device half in a packed ring (virtio 1.2, section 2.8).
//!
//! Chains are returned in the order in which they were found, so the next
//! descriptor to return is always the next one that was not processed: one
//! position is all there is.

use super::ring::{Found, Give, Positions, RingFault};
use crate::notify::{Wish, arm_then_look, publish_then_ask};
use crate::ring::Descriptor;
use crate::ring::packed::{Half, PackedRing, Position, Word};

/// Descriptors that share a cache line.
const DESCRIPTORS_PER_LINE: u16 = 4;
/// Where looking chains up ends, in descriptors: their ends have to be found, and
/// a burst of long chains is not processed at one time anyway.
const LOOK_UP_MAX: u16 = 256;

#[derive(Debug)]
pub(super) struct PackedDevice {
    ring: PackedRing,
    event_idx: bool,
    /// The first descriptor that was not given back.
    next: Position,
    /// Behind the chains that were looked up.
    cursor: Position,
    /// Descriptors of those.
    looked_up: u16,
    /// Descriptors that the last burst had: as many are likely to be there.
    expected: u16,
}

impl PackedDevice {
    pub(super) fn new(ring: PackedRing, next: Position, event_idx: bool) -> Self {
        Self {
            ring,
            event_idx,
            next,
            cursor: next,
            looked_up: 0,
            expected: 0,
        }
    }

    /// Goes on in another place of the same size, at the same position.
    pub(super) fn relocate(&mut self, ring: PackedRing) {
        self.ring = ring;
        self.rewind();
    }

    #[inline]
    fn rewind(&mut self) {
        self.cursor = self.next;
        self.looked_up = 0;
    }

    #[inline]
    pub(super) fn ring(&self) -> &PackedRing {
        &self.ring
    }

    pub(super) fn position(&self) -> u16 {
        self.next.to_bits()
    }

    /// Position behind the chains that were looked up.
    pub(super) fn position_behind_found(&self) -> u16 {
        self.cursor.to_bits()
    }

    /// True if no chain is available at `position`, which was the end.
    pub(super) fn ends_at(&self, position: u16) -> bool {
        let position = Position::from_bits(position);
        !self.ring.word(position.index()).is_available(position)
    }

    /// The chain behind those that were looked up, if there is one.
    #[inline]
    fn chain(&mut self) -> Option<Found> {
        let (ring, at) = (&self.ring, self.cursor);
        let word = ring.word(at.index());
        if !word.is_available(at) {
            return None;
        }
        let head = word.descriptor(ring.addr(at.index()), ring.behind(at.index()));
        let (descs, id) = if word.has_next() {
            self.end_of_chain(at)
        } else {
            (1, word.id())
        };
        // No driver has more out than the ring holds: one that says so writes
        // faster than we look, and is not to keep us.
        let looked_up = self.looked_up + descs;
        if looked_up > ring.size() {
            return None;
        }
        self.looked_up = looked_up;
        self.cursor = at.advance(descs, ring.size());
        Some(Found {
            head,
            id,
            descs,
            written: 0,
        })
    }

    /// Descriptors of the chain that starts at `at`, and its buffer id: that of
    /// its last descriptor (section 2.8.6). One that does not end takes up the
    /// whole ring.
    #[cold]
    fn end_of_chain(&self, at: Position) -> (u16, u16) {
        let mut index = at.index();
        for descs in 1..self.ring.size() {
            index = self.ring.behind(index);
            let word = self.ring.word(index);
            if !word.has_next() {
                return (descs + 1, word.id());
            }
        }
        (self.ring.size(), self.ring.word(index).id())
    }

    #[inline]
    fn has_next(&self) -> bool {
        self.ring.word(self.next.index()).is_available(self.next)
    }

    /// No further than the driver is likely to be: the lines behind that are the
    /// driver's to write.
    #[inline]
    fn prefetch_descriptors(&self) {
        let size = self.ring.size();
        let count = self.expected.min(size);
        let mut offset = DESCRIPTORS_PER_LINE;
        while offset < count {
            let at = self.next.advance(offset, size);
            self.ring.prefetch_desc(at.index());
            offset += DESCRIPTORS_PER_LINE;
        }
    }

    pub(super) fn suppress_kicks(&mut self) {
        self.ring.disable_events(Half::Device);
    }

    /// Asks for a kick on the next available chain. True if there is one already.
    pub(super) fn request_kick(&mut self) -> bool {
        arm_then_look(
            || {
                self.ring
                    .enable_events(Half::Device, self.next, self.event_idx);
            },
            || self.has_next(),
        )
    }
}

impl Positions for PackedDevice {
    #[inline]
    fn look_up(
        &mut self,
        wanted: u16,
        found: &mut [Found],
        mut each: impl FnMut(Descriptor),
    ) -> Result<u16, RingFault> {
        self.rewind();
        if !self.has_next() {
            return Ok(0);
        }
        self.prefetch_descriptors();
        let mut count = 0;
        for slot in found.iter_mut().take(usize::from(wanted)) {
            let Some(chain) = self.chain() else { break };
            *slot = chain;
            each(chain.head);
            count += 1;
            if self.looked_up >= LOOK_UP_MAX {
                break;
            }
        }
        self.expected = self.looked_up;
        Ok(count)
    }

    fn look_behind(&mut self, _found: u16) -> Result<Option<Found>, RingFault> {
        Ok(self.chain())
    }

    /// The first of them is written last.
    #[inline]
    fn publish(&mut self, found: &[Found], give: Give) -> Wish {
        let [first, rest @ ..] = found else {
            return Wish::Never;
        };
        let (ring, start) = (&self.ring, self.next);
        let size = ring.size();
        let mut at = start.advance(first.descs, size);
        let mut added = first.descs;
        let mut head = first;
        for chain in rest {
            match give {
                Give::Each => {
                    let word = Word::used(at, chain.id, chain.written);
                    ring.set_word(at.index(), word);
                }
                // One descriptor in the place of the first, with the last one's
                // id (section 2.8.8).
                Give::InOrder => head = chain,
            }
            at = at.advance(chain.descs, size);
            added += chain.descs;
        }
        let wish = publish_then_ask(
            || ring.release_word(start.index(), Word::used(start, head.id, head.written)),
            || ring.wish(Half::Driver, at, added, self.event_idx),
        );
        self.next = at;
        self.rewind();
        wish
    }
}

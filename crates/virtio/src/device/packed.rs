//! Position of the device half in a packed ring (virtio 1.2, section 2.8).
//!
//! Chains are returned in the order in which they were found, so the next
//! descriptor to return is always the next one that was not processed: one
//! position is all there is.

use super::ring::{Found, Give, Positions, RingFault};
use crate::notify::{Wish, arm_then_look, publish_then_ask};
use crate::ring::packed::{Half, PackedRing, Position, Word};

/// Descriptors that share a cache line.
const DESCRIPTORS_PER_LINE: u16 = 4;
/// Where looking chains up ends, in descriptors: 64 frames of 20.
const LOOK_UP_MAX: u16 = 1280;
/// Longest chain whose end is looked for: as in QEMU (`VIRTQUEUE_MAX_SIZE`).
const CHAIN_LEN_MAX: u16 = 1024;

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

    /// Chains of one descriptor behind those that were looked up, to the end of the
    /// lap at most: nearly all. Returns how many there were.
    #[inline]
    fn single_chains(&self, found: &mut [Found]) -> u16 {
        let (at, mut count) = (self.cursor, 0);
        for (index, slot) in (at.index()..self.ring.size()).zip(found) {
            let (addr, word) = self.ring.slot(index);
            if !word.is_available_alone(at) {
                break;
            }
            *slot = Found {
                head: word.descriptor(addr, 0),
                id: word.id(),
                descs: 1,
                written: 0,
            };
            count += 1;
        }
        count
    }

    /// The chain behind those that were looked up, if one is available there.
    ///
    /// No driver has more out than the ring holds: what does not fit into what is
    /// left is a lie.
    fn chain(&self) -> Result<Option<Found>, RingFault> {
        let at = self.cursor;
        let (addr, word) = self.ring.slot(at.index());
        if !word.is_available(at) {
            return Ok(None);
        }
        let left = (self.ring.size() - self.looked_up).min(CHAIN_LEN_MAX);
        let (descs, id) = self.end_of_chain(at, word, left)?;
        Ok(Some(Found {
            head: word.descriptor(addr, self.ring.behind(at.index())),
            id,
            descs,
            written: 0,
        }))
    }

    /// Descriptors of a chain, and its buffer id, which is that of its last
    /// descriptor (section 2.8.6).
    fn end_of_chain(&self, at: Position, head: Word, within: u16) -> Result<(u16, u16), RingFault> {
        let (mut index, mut word) = (at.index(), head);
        for descs in 1..=within {
            if !word.has_next() {
                return Ok((descs, word.id()));
            }
            index = self.ring.behind(index);
            word = self.ring.word(index);
        }
        Err(RingFault::ChainEnd {
            index: at.index(),
            within,
        })
    }

    fn pass(&mut self, descs: u16) {
        self.looked_up += descs;
        self.cursor = self.cursor.advance(descs, self.ring.size());
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
            let at = self.cursor.advance(offset, size);
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
    fn look_up(&mut self, _known: u16, wanted: u16, found: &mut [Found]) -> Result<u16, RingFault> {
        if !self
            .ring
            .word(self.cursor.index())
            .is_available(self.cursor)
        {
            return Ok(0);
        }
        self.prefetch_descriptors();
        let before = self.looked_up;
        let mut count = 0;
        while count < wanted && self.looked_up < LOOK_UP_MAX {
            let free = &mut found[usize::from(count)..usize::from(wanted)];
            let left = usize::from(self.ring.size() - self.looked_up);
            let len = left.min(free.len());
            let singles = self.single_chains(&mut free[..len]);
            if singles > 0 {
                count += singles;
                self.pass(singles);
                continue;
            }
            match self.chain() {
                Ok(None) => break,
                Ok(Some(chain)) => {
                    free[0] = chain;
                    count += 1;
                    self.pass(chain.descs);
                }
                Err(fault) if count == 0 => return Err(fault),
                // What is before it is good; it comes first next time.
                Err(_) => break,
            }
        }
        self.expected = self.looked_up - before;
        Ok(count)
    }

    fn look_behind(&mut self, _found: u16) -> Result<Option<Found>, RingFault> {
        let chain = self.chain()?;
        if let Some(chain) = chain {
            self.pass(chain.descs);
        }
        Ok(chain)
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
        let head = match (give, rest) {
            // One descriptor in the place of the first, with the last one's id
            // (section 2.8.8).
            (Give::InOrder, [.., last]) => {
                let descs: u16 = rest.iter().map(|chain| chain.descs).sum();
                at = at.advance(descs, size);
                last
            }
            _ => {
                for chain in rest {
                    let word = Word::used(at, chain.id, chain.written);
                    ring.set_word(at.index(), word);
                    at = at.advance(chain.descs, size);
                }
                first
            }
        };
        let added = start.distance_to(at, size);
        let wish = publish_then_ask(
            || ring.release_word(start.index(), Word::used(start, head.id, head.written)),
            || ring.wish(Half::Driver, at, added, self.event_idx),
        );
        self.next = at;
        self.looked_up -= added;
        wish
    }
}

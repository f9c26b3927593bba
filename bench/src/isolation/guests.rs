//! Guests that cost their thread next to nothing: an attacker whose ring is full
//! at every moment, and a sink whose receive buffers are all posted at every
//! moment. Descriptors and available entries are written once; a step is one
//! load of `used.idx` and, if it moved, one store of `avail.idx`.

use std::sync::Arc;

use clap::ValueEnum;
use pollux_testkit::{GUEST_BASE, Guest, RawDesc, RawRing};
use pollux_virtio::DescFlags;
use serde::Serialize;

use super::bed::{MAC_EVERYBODY, frame, mac};

/// `flags` of the available ring: no calls (virtio 1.2, section 2.7.6).
const NO_INTERRUPT: u16 = 1;
/// Bytes of the net header that all guests here negotiate.
const NET_HEADER_BYTES: u32 = 12;
/// Frames of the attacker are shorter than those of the pair, so that the
/// receiver tells them apart by the length that it is given.
pub(super) const ATTACK_FRAME_BYTES: u32 = 60;
/// Longest frame that the attacker cuts into pieces.
const CUT_FRAME_BYTES_MAX: u32 = 1514;

/// What the attacker sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Attack {
    /// In equal parts: an address outside memory, a loop, an indirect table
    /// with a bad length, a nested indirect table.
    Malformed,
    /// Addresses outside memory alone: the shortest malformed chain.
    Unmapped,
    /// Loops around the whole ring alone: the longest malformed chain.
    Looped,
    /// Sound frames to a sink, each a chain of as many descriptors as the ring
    /// has, of a few bytes each.
    Tiny,
    /// Broadcasts to every other port.
    Broadcast,
}

impl Attack {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Unmapped => "unmapped",
            Self::Looped => "looped",
            Self::Tiny => "tiny",
            Self::Broadcast => "broadcast",
        }
    }

    /// Work units of a chain, on average, as `Budget` counts them.
    pub(super) fn units_per_chain(self, ring_size: u16, ports: usize) -> f64 {
        let walk = f64::from(ring_size.saturating_sub(1).max(1));
        match self {
            // The walk ends when it has seen one descriptor more than the ring
            // has; the other three cost one unit.
            Self::Malformed => (walk + 1.0 + 3.0) / 4.0,
            Self::Unmapped => 1.0,
            Self::Looped => walk + 1.0,
            Self::Tiny => walk,
            #[expect(clippy::cast_precision_loss, reason = "a few ports")]
            Self::Broadcast => ports as f64,
        }
    }
}

/// The ring of a guest that does not look at what comes back.
#[derive(Debug)]
struct FullRing {
    ring: RawRing,
    posted_idx: u16,
}

impl FullRing {
    /// Every available entry is the head of its own number.
    fn new(ring: RawRing, head: impl Fn(u16) -> u16) -> Self {
        let mut ring = ring;
        ring.set_avail_flags(NO_INTERRUPT);
        let base = ring.position();
        for _ in 0..ring.size() {
            ring.offer(head(ring.position() % ring.size()));
        }
        Self {
            ring,
            posted_idx: base,
        }
    }

    fn step(&mut self) -> bool {
        let wanted = self.ring.used_idx().wrapping_add(self.ring.size());
        let moved = wanted != self.posted_idx;
        if moved {
            self.ring.set_avail_idx(wanted);
            self.posted_idx = wanted;
        }
        moved
    }

    fn is_empty(&self) -> bool {
        self.ring.used_idx() == self.posted_idx
    }
}

/// The attacker: all of its ring is available whenever it has had its step.
#[derive(Debug)]
pub(super) struct Flood {
    ring: FullRing,
}

impl Flood {
    /// Takes the TX ring of `guest` over. Its driver half must have nothing out,
    /// and is not to be used any more.
    pub(super) fn new(guest: &Guest, attack: Attack, sink: [u8; 6]) -> Self {
        let config = guest.tx_config();
        let memory = &guest.memory;
        let base = RawRing::new(Arc::clone(memory), config.areas, 0).used_idx();
        let ring = RawRing::new(Arc::clone(memory), config.areas, base);
        let size = ring.size();
        let buffers = config.buffers_addr;
        for index in 0..size {
            let own = buffers + u64::from(index) * u64::from(config.buffer_bytes);
            let desc = match attack {
                Attack::Malformed => malformed(&ring, index, own),
                Attack::Unmapped => RawDesc::readable(0, 100),
                Attack::Looped => RawDesc::readable(buffers, 1).then((index + 1) % size),
                Attack::Tiny => {
                    let bytes = tiny_bytes(size);
                    let addr = buffers + u64::from(bytes) * u64::from(index);
                    let desc = RawDesc::readable(addr, bytes);
                    if index + 1 == size {
                        desc
                    } else {
                        desc.then(index + 1)
                    }
                }
                Attack::Broadcast => {
                    let bytes = frame(MAC_EVERYBODY, mac(0), ATTACK_FRAME_BYTES);
                    ring.write(own, &[0; NET_HEADER_BYTES as usize]);
                    ring.write(own + u64::from(NET_HEADER_BYTES), &bytes);
                    RawDesc::readable(own, NET_HEADER_BYTES + ATTACK_FRAME_BYTES)
                }
            };
            ring.set_desc(index, desc);
        }
        if attack == Attack::Tiny {
            let bytes = u32::from(size) * tiny_bytes(size) - NET_HEADER_BYTES;
            ring.write(buffers, &[0; NET_HEADER_BYTES as usize]);
            let bytes = frame(sink, mac(0), bytes);
            ring.write(buffers + u64::from(NET_HEADER_BYTES), &bytes);
        }
        // One chain has all descriptors: it is offered again and again.
        let head = |index| if attack == Attack::Tiny { 0 } else { index };
        Self {
            ring: FullRing::new(ring, head),
        }
    }

    /// Offers everything again that came back, if it `posts` at all; true if
    /// something had.
    pub(super) fn step(&mut self, posts: bool) -> bool {
        if posts {
            self.ring.step()
        } else {
            std::hint::black_box(self.ring.is_empty());
            false
        }
    }

    /// Whether everything came back.
    pub(super) fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }
}

/// Bytes of each of `ring_size` descriptors that hold one frame of usual length.
fn tiny_bytes(ring_size: u16) -> u32 {
    ((CUT_FRAME_BYTES_MAX + NET_HEADER_BYTES) / u32::from(ring_size)).max(1)
}

fn malformed(ring: &RawRing, index: u16, own: u64) -> RawDesc {
    match index % 4 {
        0 => RawDesc::readable(u64::MAX - 10, 100),
        1 => RawDesc::readable(own, 1).then(index),
        2 => RawDesc::indirect(GUEST_BASE, 17),
        _ => {
            let nested = RawDesc::readable(own, 16).with(DescFlags::INDIRECT);
            ring.set_table(own, &[nested]);
            RawDesc::indirect(own, 16)
        }
    }
}

/// A guest that takes everything and reads nothing.
#[derive(Debug)]
pub(super) struct Sink {
    ring: FullRing,
}

impl Sink {
    /// Takes the RX ring of `guest` over, of which nothing is posted yet.
    pub(super) fn new(guest: &Guest) -> Self {
        let config = guest.rx_config();
        let ring = RawRing::new(Arc::clone(&guest.memory), config.areas, config.base);
        for index in 0..ring.size() {
            let addr = config.buffers_addr + u64::from(index) * u64::from(config.buffer_bytes);
            ring.set_desc(index, RawDesc::writable(addr, config.buffer_bytes));
        }
        let mut ring = FullRing::new(ring, |index| index);
        ring.step();
        Self { ring }
    }

    /// Posts again what came back; true if something had.
    pub(super) fn step(&mut self) -> bool {
        self.ring.step()
    }
}

#[cfg(test)]
mod tests {
    use pollux_testkit::GuestSpec;

    use super::*;

    #[test]
    fn an_attackers_ring_is_full_after_each_step() {
        let guest = Guest::new(GuestSpec::default()).unwrap();
        let mut flood = Flood::new(&guest, Attack::Tiny, mac(1));
        assert!(flood.is_empty());
        assert!(!flood.step(false) && flood.is_empty());
        assert!(flood.step(true) && !flood.is_empty());
        assert!(!flood.step(true), "nothing came back");
    }

    #[test]
    fn one_chain_has_all_descriptors() {
        for ring_size in [64, 256, 1024, 4096] {
            let bytes = u32::from(ring_size) * tiny_bytes(ring_size);
            assert!((1000..9000).contains(&bytes) || ring_size > 1024, "{bytes}");
            assert!(bytes > NET_HEADER_BYTES + ATTACK_FRAME_BYTES);
        }
    }
}

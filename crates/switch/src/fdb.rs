//! The forwarding database: on which port each key was seen last.
//!
//! One table for all workers. A lookup takes no lock and touches one or two
//! cache lines of the table and one of the port. Changes take the `try_lock`
//! of a shard: a worker that does not get it goes on and learns next time.
//! Capacity is fixed; when a key's places are all taken, the port that holds
//! most of them gives one up (the way of OVS `lib/mac-learning.h`), so a guest
//! that invents addresses loses its own.
//!
//! An entry is valid only in its port's current generation, so a flush is one
//! store. What it leaves behind is void: it is not found, not counted, used
//! for new entries first and removed by [`age`](Fdb::age).
//!
//! Time is a tick of one second in a `u16` that wraps; a tick up to 32,767
//! seconds back is the past, all others are the future and count as age 0.

mod bucket;
mod control;
mod lane;
mod learn;

#[cfg(test)]
mod tests;

use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering};

use crossbeam::utils::CachePadded;

use self::bucket::{Bucket, Slot, Tag, Value, WAYS};
use self::lane::{PortLane, Shard};
use crate::{MacVlan, PortId};

pub use self::control::{FdbEntry, FdbStats};

/// Most entries a table can be made for.
pub const CAPACITY_MAX: usize = 1 << 24;
/// Longest ageing time, in seconds: well inside half the range of a tick, so
/// that an entry which is due is not taken for one from the future if
/// [`Fdb::age`] is called at least every 700 seconds.
pub const AGEING_SECONDS_MAX: u16 = 32_000;
/// How often a key may change ports within one second. A loop or a guest that
/// takes another's address cannot move it with every frame (B-71).
///
/// It is even: of two ports that take a key from each other, the one that had
/// it when the second began moves it back last and keeps it for the rest of the
/// second. With an odd number the other one would, however rarely it sends.
pub const MOVES_PER_TICK_MAX: u8 = 2;
const _: () = {
    assert!(MOVES_PER_TICK_MAX & 1 == 0);
    assert!(MOVES_PER_TICK_MAX <= Value::MOVES_MAX);
};

/// Both places of a key are in one shard, so there must be enough of them.
const SHARD_BUCKETS_MIN: usize = 64;
const SHARDS_MAX: usize = 64;

// Parts of a key's hash: two bucket numbers, the shard, the tag.
const SECOND_SHIFT: u32 = 23;
const SHARD_SHIFT: u32 = 46;
const TAG_SHIFT: u32 = 52;
const _: () = {
    let slots_max = (CAPACITY_MAX + CAPACITY_MAX / 4).next_power_of_two();
    let buckets_max = slots_max / WAYS;
    assert!(buckets_max / SHARDS_MAX <= 1 << SECOND_SHIFT);
    assert!(SECOND_SHIFT * 2 <= SHARD_SHIFT);
    assert!(SHARDS_MAX <= 1 << (TAG_SHIFT - SHARD_SHIFT));
};

/// Size and habits of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdbConfig {
    /// Entries it is meant for, at most [`CAPACITY_MAX`]. A quarter more is
    /// allocated, rounded up to a power of two: with 4 places in each of 2
    /// buckets, a key then rarely finds all of them taken. 16 bytes per place.
    pub capacity: usize,
    /// Learned entries not seen for longer than this are removed; 0 = never.
    /// At most [`AGEING_SECONDS_MAX`].
    pub ageing_seconds: u16,
    /// Port numbers are below this. 64 bytes per port.
    pub max_ports: u16,
    /// Most learned entries of one port; `None` = three quarters of `capacity`.
    pub port_limit: Option<usize>,
    /// Random number that no guest knows: with it, one could make keys that
    /// all want the same places.
    pub seed: u64,
}

impl Default for FdbConfig {
    /// 16,384 entries, 300 seconds (the default of IEEE 802.1Q table 8-3),
    /// 1,024 ports, and NO random seed: set one.
    fn default() -> Self {
        Self {
            capacity: 16_384,
            ageing_seconds: 300,
            max_ports: 1024,
            port_limit: None,
            seed: 0,
        }
    }
}

/// Why control's change was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FdbError {
    /// The number is not below [`FdbConfig::max_ports`].
    #[error("port {0} is beyond the FDB's number of ports")]
    PortOutOfRange(PortId),
    /// The port was closed or opened again since the [`PortRef`](crate::PortRef)
    /// was made.
    #[error("port {0} was closed in the meantime")]
    PortStale(PortId),
    /// A group or zero address is on no port.
    #[error("{0} is a group or zero address, which is on no port")]
    NotAnAddress(MacVlan),
    /// Static entries hold every place where the key could be.
    #[error("no room for {0}: its places hold static entries")]
    NoRoom(MacVlan),
}

/// What [`Fdb::learn`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearnOutcome {
    /// It was there, and seen in this tick already.
    Known,
    /// A new entry.
    Learned,
    /// It was there; its age is 0 again.
    Refreshed,
    /// It was on another port before.
    Moved {
        /// The port it was on.
        from: PortId,
    },
    /// It is on another port and has moved [`MOVES_PER_TICK_MAX`] times in
    /// this tick: it stays.
    MoveHeld,
    /// A static entry, on this port or another: learning does not change it.
    Static,
    /// A group or zero address, or a port that is not open (any more).
    Ignored,
    /// Somebody else is changing this part of the table: try again later.
    Busy,
    /// No fair place, or the port has as many entries as it may.
    Full,
}

/// Where a key can be.
#[derive(Clone, Copy, Debug)]
struct Place {
    first: usize,
    second: usize,
    shard: usize,
    tag: Tag,
}

/// The forwarding database.
///
/// [`lookup`](Self::lookup) and [`learn`](Self::learn) are for workers: they
/// never block, allocate or wait. All other changes are for control, and wait
/// for a shard's lock if they must.
pub struct Fdb {
    buckets: Box<[Bucket]>,
    shards: Box<[Shard]>,
    ports: Box<[PortLane]>,
    generation: CachePadded<AtomicU32>,
    /// Buckets of a shard - 1.
    bucket_mask: usize,
    port_limit: u64,
    ageing_seconds: u16,
    seeds: [u64; 2],
}

impl Fdb {
    /// An empty table without open ports. All its memory is allocated here.
    /// Values beyond their limit are lowered to it.
    #[must_use]
    pub fn new(config: FdbConfig) -> Self {
        let capacity = config.capacity.clamp(1, CAPACITY_MAX);
        let slots_len = (capacity + capacity.div_ceil(4)).next_power_of_two();
        let buckets_len = (slots_len / WAYS).max(2);
        let shards_len = (buckets_len / SHARD_BUCKETS_MIN).clamp(1, SHARDS_MAX);
        let limit = config.port_limit.unwrap_or(capacity.div_ceil(4) * 3);
        Self {
            buckets: (0..buckets_len).map(|_| Bucket::new()).collect(),
            shards: (0..shards_len).map(|_| Shard::default()).collect(),
            ports: (0..config.max_ports).map(|_| PortLane::default()).collect(),
            generation: CachePadded::new(AtomicU32::new(0)),
            bucket_mask: buckets_len / shards_len - 1,
            port_limit: u64::try_from(limit).unwrap_or(u64::MAX),
            ageing_seconds: config.ageing_seconds.min(AGEING_SECONDS_MAX),
            seeds: [
                fold(config.seed ^ MIX[0], MIX[1]),
                // A multiplier must be odd, or it loses bits.
                fold(config.seed ^ MIX[1], MIX[0]) | 1,
            ],
        }
    }

    /// The port that `key` is on.
    #[inline]
    #[must_use]
    pub fn lookup(&self, key: MacVlan) -> Option<PortId> {
        let (_, value) = self.find(key, self.place(key))?;
        self.is_current(value).then_some(value.port())
    }

    /// Changes whenever the port that a lookup returned may no longer be the
    /// right one: a move, a removal, an eviction, a flush, ageing, a port
    /// opened or closed. A new entry does not change it, so a miss must not be
    /// remembered. It wraps.
    ///
    /// Read it BEFORE the lookups that are to be remembered for it.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Number of places for entries.
    #[must_use]
    pub fn slots_len(&self) -> usize {
        self.buckets.len() * WAYS
    }

    /// Most learned entries of one port.
    #[must_use]
    pub fn port_limit(&self) -> u64 {
        self.port_limit
    }

    /// To be called AFTER the change: who reads the new generation then also
    /// sees the change, and remembers nothing from before it.
    fn bump_generation(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    #[inline]
    fn place(&self, key: MacVlan) -> Place {
        let hash = fold(fold(key.to_bits() ^ self.seeds[0], self.seeds[1]), MIX[0]);
        let part = |shift: u32, mask: usize| {
            // A shard's mask has 23 bits at most.
            usize::try_from(hash >> shift & 0x7f_ffff).unwrap_or(0) & mask
        };
        let shard = part(SHARD_SHIFT, self.shards.len() - 1);
        let base = shard * (self.bucket_mask + 1);
        let first = part(0, self.bucket_mask);
        let mut second = part(SECOND_SHIFT, self.bucket_mask);
        if second == first {
            second ^= 1;
        }
        Place {
            first: base + first,
            second: base + second,
            shard,
            tag: Tag::of_hash(hash),
        }
    }

    /// The entry of `key`, current or void, without a lock.
    #[inline]
    fn find(&self, key: MacVlan, place: Place) -> Option<(Slot<'_>, Value)> {
        self.buckets[place.first]
            .find(key, place.tag)
            .or_else(|| self.buckets[place.second].find(key, place.tag))
    }

    /// True if the entry is of its port's current generation.
    #[inline]
    fn is_current(&self, value: Value) -> bool {
        let Some(port) = self.ports.get(value.port().index()) else {
            return false;
        };
        let lane = if value.is_static() {
            &port.life
        } else {
            &port.flush
        };
        lane.generation() == value.generation()
    }

    /// The port's lane has one entry less, if this one was counted.
    fn uncount(&self, value: Value) {
        if let Some(port) = self.ports.get(value.port().index()) {
            if value.is_static() {
                port.life.release(value.generation());
            } else {
                port.flush.release(value.generation());
            }
        }
    }
}

impl fmt::Debug for Fdb {
    /// Without the entries, and without the seeds, which nobody may learn.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fdb")
            .field("slots_len", &self.slots_len())
            .field("ageing_seconds", &self.ageing_seconds)
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

/// Odd constants without structure: 64 bits each of the fractions of pi and e.
const MIX: [u64; 2] = [0x243f_6a88_85a3_08d3, 0xb7e1_5162_8aed_2a6b];

/// Both halves of the product, folded: every input bit reaches every output
/// bit in one multiplication (the mixing step of wyhash).
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let [
        l0,
        l1,
        l2,
        l3,
        l4,
        l5,
        l6,
        l7,
        h0,
        h1,
        h2,
        h3,
        h4,
        h5,
        h6,
        h7,
    ] = (u128::from(a) * u128::from(b)).to_le_bytes();
    u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7])
        ^ u64::from_le_bytes([h0, h1, h2, h3, h4, h5, h6, h7])
}

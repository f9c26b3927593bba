//! Memory of the table: one cache line holds four keys and their values.
//!
//! Readers take no lock. They load key, value and key again; writers, who hold
//! the lock of the bucket's shard, make the key [`MacVlan::NONE`] before they
//! change whose value it is. A reader who saw a new value therefore does not
//! see the old key again. It could see it if the key came back to the same
//! place between its loads (A, B, A): then the tag in the value, 12 bits of
//! the key's hash, is what tells the two apart, and beyond that one frame goes
//! to where B is.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::{MacVlan, PortId};

pub(super) const WAYS: usize = 4;

/// Four entries in one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Bucket {
    keys: [AtomicU64; WAYS],
    values: [AtomicU64; WAYS],
}

const _: () = assert!(size_of::<Bucket>() == 64);

impl Bucket {
    pub(super) fn new() -> Self {
        Self {
            keys: [const { AtomicU64::new(MacVlan::NONE.to_bits()) }; WAYS],
            values: [const { AtomicU64::new(0) }; WAYS],
        }
    }

    /// The place and value of `key`, without a lock.
    #[inline]
    pub(super) fn find(&self, key: MacVlan, tag: Tag) -> Option<(Slot<'_>, Value)> {
        // All four compares, then one branch: which of them holds the key is
        // not predictable.
        let mut matches = 0_u32;
        for (way, stored) in self.keys.iter().enumerate() {
            // Acquire: the value loaded next is at least as new as the key.
            let equal = stored.load(Ordering::Acquire) == key.to_bits();
            matches |= u32::from(equal) << way;
        }
        if matches == 0 {
            return None;
        }
        let slot = self.slot((matches.trailing_zeros() as usize) % WAYS);
        let value = slot.value();
        // Not above the value's load, which acquires.
        (slot.key() == key && value.is_for(tag)).then_some((slot, value))
    }

    #[inline]
    fn slot(&self, way: usize) -> Slot<'_> {
        Slot {
            key: &self.keys[way],
            value: &self.values[way],
        }
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = Slot<'_>> {
        self.keys
            .iter()
            .zip(&self.values)
            .map(|(key, value)| Slot { key, value })
    }
}

/// Place of one entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot<'a> {
    key: &'a AtomicU64,
    value: &'a AtomicU64,
}

impl Slot<'_> {
    #[inline]
    pub(super) fn key(self) -> MacVlan {
        MacVlan::from_bits(self.key.load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn value(self) -> Value {
        Value(self.value.load(Ordering::Acquire))
    }

    /// Key and value that belong together, without a lock.
    pub(super) fn read(self) -> Option<(MacVlan, Value)> {
        let key = self.key();
        let value = self.value();
        (key != MacVlan::NONE && value.is_valid() && self.key() == key).then_some((key, value))
    }

    /// Puts a value in place of `old` without the lock. Only the age may
    /// differ. If another entry with the very same value took the place in
    /// between, its age is refreshed in error: it is of the same port.
    #[inline]
    pub(super) fn refresh(self, old: Value, new: Value) -> bool {
        self.value
            .compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// New value for the key that is here. Needs the shard's lock. A refresh
    /// at the same time is lost, or fails since it expects the old value.
    pub(super) fn set_value(self, value: Value) {
        self.value.store(value.0, Ordering::Release);
    }

    /// Empties the place. Needs the shard's lock.
    pub(super) fn clear(self) {
        self.value.store(0, Ordering::Release);
        self.key.store(MacVlan::NONE.to_bits(), Ordering::Release);
    }

    /// New entry in an empty place. Needs the shard's lock.
    pub(super) fn fill(self, key: MacVlan, value: Value) {
        debug_assert_eq!(self.key(), MacVlan::NONE);
        self.value.store(value.0, Ordering::Release);
        self.key.store(key.to_bits(), Ordering::Release);
    }
}

/// Part of a key's hash that its value repeats: the top 12 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u64);

impl Tag {
    #[inline]
    pub(super) const fn of_hash(hash: u64) -> Self {
        Self(hash & Value::TAG_MASK)
    }
}

/// Where a key is: port 16 bits, generation 16, tick 16, moves 2, static 1,
/// valid 1, tag 12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value(u64);

impl Value {
    const GENERATION_SHIFT: u32 = 16;
    const PORT_SHIFT: u32 = 32;
    const VALID: u64 = 1 << 48;
    const STATIC: u64 = 1 << 49;
    const MOVES_SHIFT: u32 = 50;
    const MOVES_MASK: u64 = 0b11 << Self::MOVES_SHIFT;
    const TAG_MASK: u64 = 0xfff << 52;
    /// What fits the field for the moves of one tick.
    pub(super) const MOVES_MAX: u8 = 0b11;

    #[inline]
    pub(super) fn learned(tag: Tag, port: PortId, generation: u16, tick: u16, moves: u8) -> Self {
        debug_assert!(moves <= Self::MOVES_MAX);
        Self(
            tag.0
                | Self::VALID
                | u64::from(moves) << Self::MOVES_SHIFT
                | u64::from(port.0) << Self::PORT_SHIFT
                | u64::from(generation) << Self::GENERATION_SHIFT
                | u64::from(tick),
        )
    }

    pub(super) fn fixed(tag: Tag, port: PortId, generation: u16) -> Self {
        Self(Self::learned(tag, port, generation, 0, 0).0 | Self::STATIC)
    }

    /// The same entry, seen at `tick`: the first time of that tick.
    #[inline]
    pub(super) fn at_tick(self, tick: u16) -> Self {
        let kept = self.0 & !(Self::MOVES_MASK | u64::from(u16::MAX));
        Self(kept | u64::from(tick))
    }

    #[inline]
    pub(super) const fn is_valid(self) -> bool {
        self.0 & Self::VALID != 0
    }

    #[inline]
    fn is_for(self, tag: Tag) -> bool {
        self.0 & (Self::TAG_MASK | Self::VALID) == tag.0 | Self::VALID
    }

    #[inline]
    pub(super) const fn is_static(self) -> bool {
        self.0 & Self::STATIC != 0
    }

    #[inline]
    pub(super) const fn tick(self) -> u16 {
        let [low, high, ..] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    #[inline]
    pub(super) const fn generation(self) -> u16 {
        let [_, _, low, high, ..] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    #[inline]
    pub(super) const fn port(self) -> PortId {
        let [_, _, _, _, low, high, ..] = self.0.to_le_bytes();
        PortId(u16::from_le_bytes([low, high]))
    }

    /// How often the entry changed ports in its tick.
    pub(super) const fn moves(self) -> u8 {
        let [_, _, _, _, _, _, flags, _] = self.0.to_le_bytes();
        flags >> (Self::MOVES_SHIFT - 48) & Self::MOVES_MAX
    }

    /// Seconds since the entry was seen, 0 if that was after `now`.
    pub(super) const fn age_seconds(self, now: u16) -> u16 {
        let age = now.wrapping_sub(self.tick());
        if age > u16::MAX / 2 { 0 } else { age }
    }

    /// True if `tick` is after the entry's.
    #[inline]
    pub(super) const fn is_older_than(self, tick: u16) -> bool {
        self.age_seconds(tick) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_overlap() {
        let tag = Tag::of_hash(u64::MAX);
        let value = Value::learned(tag, PortId(0xabcd), 0x1234, 0xfedc, 2);
        assert_eq!(value.port(), PortId(0xabcd));
        assert_eq!(value.generation(), 0x1234);
        assert_eq!(value.tick(), 0xfedc);
        assert_eq!(value.moves(), 2);
        assert!(value.is_valid() && !value.is_static() && value.is_for(tag));
        assert!(!value.is_for(Tag::of_hash(1 << 60)));
        let later = value.at_tick(7);
        assert_eq!((later.tick(), later.moves()), (7, 0));
        assert_eq!(later.port(), PortId(0xabcd));
        let fixed = Value::fixed(tag, PortId(9), 3);
        assert!(fixed.is_static() && fixed.is_valid());
        assert_eq!((fixed.port(), fixed.generation()), (PortId(9), 3));
    }

    #[test]
    fn age_wraps_and_the_future_is_new() {
        let value = Value::learned(Tag::of_hash(0), PortId(0), 0, 65_530, 0);
        assert_eq!(value.age_seconds(4), 10);
        assert_eq!(value.age_seconds(65_529), 0);
        assert!(value.is_older_than(0));
        assert!(!value.is_older_than(65_530) && !value.is_older_than(65_000));
    }

    #[test]
    fn a_place_is_found_only_for_its_key_and_tag() {
        let bucket = Bucket::new();
        let key = MacVlan::new([2, 0, 0, 0, 0, 1], 5);
        let tag = Tag::of_hash(0x123 << 52);
        assert!(bucket.find(key, tag).is_none());
        assert!(bucket.find(MacVlan::NONE, Tag::of_hash(0)).is_none());
        let value = Value::learned(tag, PortId(1), 1, 0, 0);
        bucket.slot(2).fill(key, value);
        let (slot, found) = bucket.find(key, tag).expect("filled");
        assert_eq!((slot.key(), found), (key, value));
        assert!(bucket.find(key, Tag::of_hash(0)).is_none());
        slot.clear();
        assert!(bucket.find(key, tag).is_none());
    }
}

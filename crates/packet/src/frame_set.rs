//! A set of frames of one batch, one bit each.

use crate::BATCH_MAX;

const _: () = assert!(BATCH_MAX == u64::BITS as usize);

/// Some of the frames of one batch; walking it yields them in order of arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameSet(u64);

impl FrameSet {
    /// No frame.
    pub const EMPTY: Self = Self(0);

    /// The set with exactly these bits, bit 0 being the oldest frame.
    #[inline]
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The first `count` frames.
    ///
    /// # Panics
    /// If `count` exceeds [`BATCH_MAX`].
    #[inline]
    #[must_use]
    pub const fn first(count: usize) -> Self {
        assert!(count <= BATCH_MAX);
        if count == BATCH_MAX {
            Self(u64::MAX)
        } else {
            Self((1 << count) - 1)
        }
    }

    /// The bits, bit 0 being the oldest frame.
    #[inline]
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Adds frame `index`.
    #[inline]
    pub const fn insert(&mut self, index: usize) {
        debug_assert!(index < BATCH_MAX);
        self.0 |= 1 << (index & (BATCH_MAX - 1));
    }

    /// True if frame `index` is in the set.
    #[inline]
    #[must_use]
    pub const fn contains(self, index: usize) -> bool {
        index < BATCH_MAX && self.0 & (1 << index) != 0
    }

    /// Frames of either set.
    #[inline]
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Frames of both sets.
    #[inline]
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Number of frames.
    #[inline]
    #[must_use]
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// True if no frame is in the set.
    #[inline]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl Iterator for FrameSet {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let index = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walks_in_order_of_arrival() {
        let mut set = FrameSet::EMPTY;
        for index in [63, 0, 17, 4] {
            set.insert(index);
        }
        assert_eq!(set.count(), 4);
        assert!(set.contains(17) && !set.contains(18) && !set.contains(64));
        assert_eq!(set.collect::<Vec<_>>(), [0, 4, 17, 63]);
    }

    #[test]
    fn first_covers_the_whole_batch() {
        assert_eq!(FrameSet::first(0), FrameSet::EMPTY);
        assert_eq!(FrameSet::first(3).bits(), 0b111);
        assert_eq!(FrameSet::first(64).count(), 64);
    }
}

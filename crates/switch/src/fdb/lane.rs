//! State per port (generations with the entries they hold) and per shard (the
//! lock with the counters it protects).

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A generation and the number of entries that carry it, in one word: so an
/// entry is counted exactly while its generation is the current one, whoever
/// flushes at the same time.
#[derive(Debug, Default)]
pub(super) struct GenCount(AtomicU64);

/// Why an entry was not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The generation is not the current one (any more).
    Stale,
    /// The limit is reached.
    Full,
}

const GENERATION_SHIFT: u32 = 48;
const COUNT_MASK: u64 = 0xffff_ffff;

impl GenCount {
    const fn generation_of(word: u64) -> u16 {
        let [.., low, high] = word.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    #[inline]
    pub(super) fn generation(&self) -> u16 {
        Self::generation_of(self.0.load(Ordering::Acquire))
    }

    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire) & COUNT_MASK
    }

    /// Next generation, without entries. It wraps.
    pub(super) fn advance(&self) -> u16 {
        let next = |word| u64::from(Self::generation_of(word).wrapping_add(1)) << GENERATION_SHIFT;
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            match self.0.compare_exchange_weak(
                word,
                next(word),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Self::generation_of(next(word)),
                Err(now) => word = now,
            }
        }
    }

    /// Counts one more entry of `generation`, unless there are `limit`.
    pub(super) fn reserve(&self, generation: u16, limit: u64) -> Result<(), Refused> {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            if Self::generation_of(word) != generation {
                return Err(Refused::Stale);
            }
            if word & COUNT_MASK >= limit {
                return Err(Refused::Full);
            }
            match self
                .0
                .compare_exchange_weak(word, word + 1, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// One entry of `generation` less. Entries of earlier ones are not counted.
    pub(super) fn release(&self, generation: u16) {
        let mut word = self.0.load(Ordering::Acquire);
        while Self::generation_of(word) == generation {
            debug_assert!(word & COUNT_MASK != 0, "an entry was counted twice");
            match self
                .0
                .compare_exchange_weak(word, word - 1, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

/// What the table knows of a port.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct PortLane {
    /// Generation of the port's life, with its static entries.
    pub(super) life: GenCount,
    /// Generation between flushes, with its learned entries. A new life is
    /// also a flush; `life` is advanced first.
    pub(super) flush: GenCount,
    /// Entries that moved to this port.
    pub(super) moved: AtomicU64,
}

/// Lock of a part of the table, with that part's counters.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Shard {
    locked: AtomicBool,
    /// Not under the lock: counts who did not get it.
    pub(super) busy: AtomicU64,
    pub(super) learned: Tally,
    pub(super) moved: Tally,
    pub(super) moves_held: Tally,
    pub(super) evicted: Tally,
    pub(super) refused: Tally,
    pub(super) aged: Tally,
}

/// Counter that only the holder of the shard's lock adds to.
#[derive(Debug, Default)]
pub(super) struct Tally(AtomicU64);

impl Tally {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Shard {
    /// The lock, if it is free. Never waits, never makes a system call: that
    /// is why it is no `std` mutex.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<ShardGuard<'_>> {
        let free = !self.locked.load(Ordering::Relaxed)
            && self
                .locked
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        // Lazily: a guard that is made and dropped would free another's lock.
        free.then(|| ShardGuard(self))
    }

    /// The lock, however long it takes: for control. Workers hold it for one
    /// entry, but may be preempted while they do.
    pub(super) fn lock(&self) -> ShardGuard<'_> {
        const SPINS_BEFORE_YIELD: u32 = 64;
        let mut spins = 0;
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            spins += 1;
            if spins >= SPINS_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                core::hint::spin_loop();
            }
        }
    }
}

/// Right to change a shard's entries and counters.
#[derive(Debug)]
pub(super) struct ShardGuard<'a>(&'a Shard);

impl ShardGuard<'_> {
    /// Adds one to a counter of the shard.
    pub(super) fn tally(&self, counter: impl FnOnce(&Shard) -> &Tally) {
        let Tally(counter) = counter(self.0);
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

impl Drop for ShardGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.locked.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_belong_to_their_generation() {
        let lane = GenCount::default();
        assert_eq!(lane.reserve(0, 2), Ok(()));
        assert_eq!(lane.reserve(0, 2), Ok(()));
        assert_eq!(lane.reserve(0, 2), Err(Refused::Full));
        assert_eq!(lane.advance(), 1);
        assert_eq!((lane.generation(), lane.count()), (1, 0));
        assert_eq!(lane.reserve(0, 2), Err(Refused::Stale));
        // An entry of the earlier generation was counted there, not here.
        lane.release(0);
        assert_eq!(lane.count(), 0);
        assert_eq!(lane.reserve(1, 2), Ok(()));
        lane.release(1);
        assert_eq!(lane.count(), 0);
    }

    #[test]
    fn generations_wrap_without_touching_the_count() {
        let lane = GenCount::default();
        for _ in 0..=u16::MAX {
            lane.advance();
        }
        assert_eq!((lane.generation(), lane.count()), (0, 0));
    }

    #[test]
    fn one_holder_at_a_time() {
        let shard = Shard::default();
        let guard = shard.try_lock().expect("free");
        for _ in 0..2 {
            assert!(shard.try_lock().is_none());
        }
        guard.tally(|shard| &shard.learned);
        drop(guard);
        drop(shard.lock());
        assert_eq!(shard.learned.get(), 1);
    }
}

//! The workers' changes: learn, refresh, move, evict.

use core::cmp::Reverse;
use core::sync::atomic::Ordering;

use super::bucket::{Slot, Value};
use super::lane::{PortLane, Refused, ShardGuard};
use super::{Fdb, LearnOutcome, MOVES_PER_TICK_MAX, Place};
use crate::{MacVlan, PortId, PortRef};

/// Who wants to hold a key, as found when the shard was locked.
#[derive(Clone, Copy, Debug)]
struct Learner<'a> {
    port: PortId,
    lane: &'a PortLane,
    /// Flush generation of the port: not newer than its life.
    generation: u16,
    tick: u16,
}

impl Fdb {
    /// Notes that `key` was seen as a source on `port` at `tick` (seconds,
    /// wrapping).
    ///
    /// Takes no lock if there is nothing to change but the age, and changes
    /// that only once per tick. Group and zero addresses are never learned.
    pub fn learn(&self, key: MacVlan, port: PortRef, tick: u16) -> LearnOutcome {
        if key.is_group() || key.is_zero_mac() {
            return LearnOutcome::Ignored;
        }
        let Some(lane) = self.ports.get(port.id.index()) else {
            return LearnOutcome::Ignored;
        };
        // The flush generation is read first. A port that is closed advances
        // its life first: if the life is still ours below, this generation is
        // not one of a later life.
        let generation = lane.flush.generation();
        if lane.life.generation() != port.generation {
            return LearnOutcome::Ignored;
        }
        let place = self.place(key);
        let found = self.find(key, place);
        if let Some((slot, value)) = found
            && let Some(outcome) = self.see_again(slot, value, port.id, tick)
        {
            return outcome;
        }
        let learner = Learner {
            port: port.id,
            lane,
            generation,
            tick,
        };
        let shard = &self.shards[place.shard];
        match shard.try_lock() {
            Some(guard) => self.learn_locked(&guard, key, place, learner),
            None => {
                shard.busy.fetch_add(1, Ordering::Relaxed);
                LearnOutcome::Busy
            }
        }
    }

    /// What needs no lock: the entry is right, all but its age.
    #[inline]
    fn see_again(
        &self,
        slot: Slot<'_>,
        value: Value,
        port: PortId,
        tick: u16,
    ) -> Option<LearnOutcome> {
        if !self.is_current(value) {
            return None;
        }
        if value.is_static() {
            return Some(LearnOutcome::Static);
        }
        if value.port() != port {
            return None;
        }
        if !value.is_older_than(tick) {
            return Some(LearnOutcome::Known);
        }
        slot.refresh(value, value.at_tick(tick))
            .then_some(LearnOutcome::Refreshed)
    }

    fn learn_locked(
        &self,
        guard: &ShardGuard<'_>,
        key: MacVlan,
        place: Place,
        learner: Learner<'_>,
    ) -> LearnOutcome {
        let Some((slot, value)) = self.find(key, place) else {
            return self.insert(guard, key, place, learner);
        };
        if let Some(outcome) = self.see_again(slot, value, learner.port, learner.tick) {
            return outcome;
        }
        if !self.is_current(value) {
            // Void: a new entry in its old place.
            if let Err(refused) = self.reserve(learner) {
                return Self::refuse(guard, refused);
            }
            slot.set_value(learner.value(place, 0));
            guard.tally(|shard| &shard.learned);
            return LearnOutcome::Learned;
        }
        if value.port() == learner.port {
            // A refresh by another worker came between: as good as ours.
            return LearnOutcome::Known;
        }
        self.relocate(guard, slot, value, place, learner)
    }

    /// The key was seen on another port than before.
    fn relocate(
        &self,
        guard: &ShardGuard<'_>,
        slot: Slot<'_>,
        value: Value,
        place: Place,
        learner: Learner<'_>,
    ) -> LearnOutcome {
        // Ticks of two workers may differ by one for a moment: the later one
        // is the entry's.
        let (tick, moves) = if value.is_older_than(learner.tick) {
            (learner.tick, 0)
        } else {
            (value.tick(), value.moves())
        };
        if moves >= MOVES_PER_TICK_MAX {
            guard.tally(|shard| &shard.moves_held);
            return LearnOutcome::MoveHeld;
        }
        if let Err(refused) = self.reserve(learner) {
            return Self::refuse(guard, refused);
        }
        slot.set_value(Learner { tick, ..learner }.value(place, moves + 1));
        self.uncount(value);
        self.bump_generation();
        guard.tally(|shard| &shard.moved);
        learner.lane.moved.fetch_add(1, Ordering::Relaxed);
        LearnOutcome::Moved { from: value.port() }
    }

    fn insert(
        &self,
        guard: &ShardGuard<'_>,
        key: MacVlan,
        place: Place,
        learner: Learner<'_>,
    ) -> LearnOutcome {
        let held_len = learner.lane.flush.count();
        let at_limit = held_len >= self.port_limit;
        if !at_limit && let Some(slot) = self.free_slot(place) {
            return match self.reserve(learner) {
                Ok(()) => Self::put(guard, slot, key, learner.value(place, 0)),
                Err(refused) => Self::refuse(guard, refused),
            };
        }
        // One's own entry, or one of a port that holds more than oneself.
        let slot = self.victim(place, learner.tick, |owner| {
            owner == learner.port || (!at_limit && self.learned_len(owner) > held_len)
        });
        let Some(slot) = slot else {
            return Self::refuse(guard, Refused::Full);
        };
        self.evict(guard, slot);
        match self.reserve(learner) {
            Ok(()) => Self::put(guard, slot, key, learner.value(place, 0)),
            Err(refused) => Self::refuse(guard, refused),
        }
    }

    fn put(guard: &ShardGuard<'_>, slot: Slot<'_>, key: MacVlan, value: Value) -> LearnOutcome {
        slot.fill(key, value);
        guard.tally(|shard| &shard.learned);
        LearnOutcome::Learned
    }

    fn refuse(guard: &ShardGuard<'_>, refused: Refused) -> LearnOutcome {
        match refused {
            Refused::Stale => LearnOutcome::Ignored,
            Refused::Full => {
                guard.tally(|shard| &shard.refused);
                LearnOutcome::Full
            }
        }
    }

    fn reserve(&self, learner: Learner<'_>) -> Result<(), Refused> {
        learner
            .lane
            .flush
            .reserve(learner.generation, self.port_limit)
    }

    /// An empty place, after removing what is void. The first bucket is
    /// preferred until it is nearly full: a lookup looks there first.
    pub(super) fn free_slot(&self, place: Place) -> Option<Slot<'_>> {
        const FIRST_PREFERRED_MAX: usize = 2;
        let (first_len, first) = self.bucket_room(place.first);
        if first_len <= FIRST_PREFERRED_MAX {
            return first;
        }
        let (second_len, second) = self.bucket_room(place.second);
        if second_len < first_len {
            second
        } else {
            first
        }
    }

    /// Number of current entries of a bucket, and one of its empty places.
    fn bucket_room(&self, bucket: usize) -> (usize, Option<Slot<'_>>) {
        let mut used_len = 0;
        let mut free = None;
        for slot in self.buckets[bucket].slots() {
            let value = slot.value();
            if value.is_valid() && self.is_current(value) {
                used_len += 1;
            } else {
                slot.clear();
                free = Some(slot);
            }
        }
        (used_len, free)
    }

    /// The learned entry to give up among those where the key can be: of the
    /// `eligible` port that holds most in the whole table, the oldest.
    pub(super) fn victim(
        &self,
        place: Place,
        tick: u16,
        eligible: impl Fn(PortId) -> bool,
    ) -> Option<Slot<'_>> {
        [place.first, place.second]
            .into_iter()
            .flat_map(|bucket| self.buckets[bucket].slots())
            .map(|slot| (slot, slot.value()))
            .filter(|&(_, value)| value.is_valid() && !value.is_static() && self.is_current(value))
            .filter(|(_, value)| eligible(value.port()))
            .max_by_key(|(_, value)| {
                let port = value.port();
                // Two ports with equally many and equally old entries: the
                // choice must not jump between them.
                let tie = Reverse(port);
                (self.learned_len(port), value.age_seconds(tick), tie)
            })
            .map(|(slot, _)| slot)
    }

    pub(super) fn evict(&self, guard: &ShardGuard<'_>, slot: Slot<'_>) {
        self.uncount(slot.value());
        slot.clear();
        self.bump_generation();
        guard.tally(|shard| &shard.evicted);
    }

    fn learned_len(&self, port: PortId) -> u64 {
        self.ports
            .get(port.index())
            .map_or(0, |lane| lane.flush.count())
    }
}

impl Learner<'_> {
    fn value(self, place: Place, moves: u8) -> Value {
        Value::learned(place.tag, self.port, self.generation, self.tick, moves)
    }
}

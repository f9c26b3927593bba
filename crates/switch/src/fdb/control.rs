//! Control's part: ports, flushes, static entries, ageing, what to show.

use core::sync::atomic::Ordering;

use super::bucket::{Slot, Value};
use super::lane::{GenCount, PortLane};
use super::{Fdb, FdbError};
use crate::{MacVlan, PortId, PortRef};

/// An entry, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdbEntry {
    /// Address and VLAN.
    pub key: MacVlan,
    /// The port it is on.
    pub port: PortId,
    /// Seconds since a frame came from it; 0 for a static entry.
    pub age_seconds: u16,
    /// Put there by control: it does not age, move, or go with a flush.
    pub is_static: bool,
}

/// Numbers of a table. Entries are a state; the others count since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FdbStats {
    /// Learned entries now.
    pub learned_entries: u64,
    /// Static entries now.
    pub static_entries: u64,
    /// New entries learned.
    pub learned: u64,
    /// Moves of an entry to another port.
    pub moved: u64,
    /// Moves refused because the entry had moved too often in that second.
    pub moves_held: u64,
    /// Entries that gave way to others.
    pub evicted: u64,
    /// Keys not learned: no fair place, or the port's limit.
    pub refused: u64,
    /// Keys not learned because that part of the table was being changed.
    pub busy: u64,
    /// Entries removed because of their age.
    pub aged: u64,
}

impl Fdb {
    /// Begins a new life of port number `id`: what is in the table for that
    /// number is void, static entries too.
    ///
    /// # Errors
    /// [`FdbError::PortOutOfRange`].
    pub fn open_port(&self, id: PortId) -> Result<PortRef, FdbError> {
        let lane = self
            .ports
            .get(id.index())
            .ok_or(FdbError::PortOutOfRange(id))?;
        let generation = self.end_life(lane);
        Ok(PortRef { id, generation })
    }

    /// Ends a port's life: its entries are void, and nothing is learned for it
    /// any more. False if it was over already.
    pub fn close_port(&self, port: PortRef) -> bool {
        let lane = self.live_lane(port);
        if let Ok(lane) = lane {
            self.end_life(lane);
        }
        lane.is_ok()
    }

    /// Voids the learned entries of a port in constant time; static ones stay
    /// (B-70), and so does the [`PortRef`]. False if the port is not open.
    pub fn flush_port(&self, port: PortRef) -> bool {
        let lane = self.live_lane(port);
        if let Ok(lane) = lane {
            self.advance(&lane.flush);
            self.bump_generation();
        }
        lane.is_ok()
    }

    /// Voids the learned entries of all ports, in time proportional to the
    /// number of ports; static ones stay (B-70).
    pub fn flush_all(&self) {
        for lane in &self.ports {
            self.advance(&lane.flush);
        }
        self.bump_generation();
    }

    /// Puts `key` on `port` for good: until it is removed or the port closed.
    /// A learned entry of the key gives way, as does a static one.
    ///
    /// # Errors
    /// See [`FdbError`]; the table is then unchanged.
    pub fn add_static(&self, key: MacVlan, port: PortRef) -> Result<(), FdbError> {
        if key.is_group() || key.is_zero_mac() {
            return Err(FdbError::NotAnAddress(key));
        }
        let lane = self.live_lane(port)?;
        let place = self.place(key);
        let guard = self.shards[place.shard].lock();
        // Who gives way is a question of numbers here; any entry of that port
        // will do.
        const NO_TICK: u16 = 0;
        let value = Value::fixed(place.tag, port.id, port.generation);
        let count = || {
            lane.life
                .reserve(port.generation, u64::MAX)
                .map_err(|_| FdbError::PortStale(port.id))
        };
        if let Some((slot, _)) = self.find(key, place) {
            count()?;
            // Read again: a worker may refresh without the lock, but nothing
            // that counts can have changed.
            self.uncount(slot.value());
            slot.set_value(value);
            self.bump_generation();
            return Ok(());
        }
        let free = self.free_slot(place);
        let slot = free
            .or_else(|| self.victim(place, NO_TICK, |_| true))
            .ok_or(FdbError::NoRoom(key))?;
        count()?;
        if free.is_none() {
            self.evict(&guard, slot);
        }
        slot.fill(key, value);
        Ok(())
    }

    /// Removes `key`, learned or static. False if it was not there.
    pub fn remove(&self, key: MacVlan) -> bool {
        let place = self.place(key);
        let _guard = self.shards[place.shard].lock();
        let Some((slot, value)) = self.find(key, place) else {
            return false;
        };
        let was_current = self.is_current(value);
        self.take_out(slot, value);
        self.bump_generation();
        was_current
    }

    /// Removes learned entries not seen for longer than the ageing time, and
    /// void ones. Returns how many were removed for their age.
    ///
    /// `now` is the workers' tick: seconds, wrapping. To be called about once
    /// a second; memory may be used again without it, but an entry would live
    /// longer, and one that is not removed for 32,767 seconds becomes new.
    ///
    /// Every lock is held for one bucket, and only if something is due there.
    pub fn age(&self, now: u16) -> usize {
        let removed = self.sweep(|value| {
            self.ageing_seconds != 0 && value.age_seconds(now) > self.ageing_seconds
        });
        if removed != 0 {
            self.bump_generation();
        }
        removed
    }

    /// Every entry; `now` as for [`age`](Self::age). Changes made meanwhile
    /// may or may not be seen.
    pub fn entries(&self, now: u16) -> impl Iterator<Item = FdbEntry> + '_ {
        self.buckets
            .iter()
            .flat_map(|bucket| bucket.slots())
            .filter_map(Slot::read)
            .filter(|&(_, value)| self.is_current(value))
            .map(move |(key, value)| entry(key, value, now))
    }

    /// The entry of `key`; `now` as for [`age`](Self::age).
    #[must_use]
    pub fn entry(&self, key: MacVlan, now: u16) -> Option<FdbEntry> {
        let (_, value) = self.find(key, self.place(key))?;
        self.is_current(value).then(|| entry(key, value, now))
    }

    /// The numbers. Exact if nobody changes the table meanwhile.
    #[must_use]
    pub fn stats(&self) -> FdbStats {
        let mut stats = FdbStats::default();
        for lane in &self.ports {
            stats.learned_entries += lane.flush.count();
            stats.static_entries += lane.life.count();
        }
        for shard in &self.shards {
            stats.learned += shard.learned.get();
            stats.moved += shard.moved.get();
            stats.moves_held += shard.moves_held.get();
            stats.evicted += shard.evicted.get();
            stats.refused += shard.refused.get();
            stats.busy += shard.busy.load(Ordering::Relaxed);
            stats.aged += shard.aged.get();
        }
        stats
    }

    /// Learned entries of a port now. Never above the port limit.
    #[must_use]
    pub fn port_learned_entries(&self, port: PortId) -> u64 {
        self.ports
            .get(port.index())
            .map_or(0, |lane| lane.flush.count())
    }

    /// Static entries of a port now.
    #[must_use]
    pub fn port_static_entries(&self, port: PortId) -> u64 {
        self.ports
            .get(port.index())
            .map_or(0, |lane| lane.life.count())
    }

    /// Entries that moved to the port number since the start: a port with many
    /// is part of a loop, or takes others' addresses.
    #[must_use]
    pub fn port_moves(&self, port: PortId) -> u64 {
        self.ports
            .get(port.index())
            .map_or(0, |lane| lane.moved.load(Ordering::Relaxed))
    }

    fn live_lane(&self, port: PortRef) -> Result<&PortLane, FdbError> {
        self.ports
            .get(port.id.index())
            .filter(|lane| lane.life.generation() == port.generation)
            .ok_or(FdbError::PortStale(port.id))
    }

    /// Life first, then flush: see [`learn`](Self::learn).
    fn end_life(&self, lane: &PortLane) -> u16 {
        let life = self.advance(&lane.life);
        self.advance(&lane.flush);
        self.bump_generation();
        life
    }

    /// Next generation. Void entries of 65,536 generations ago would be valid
    /// again, so all void ones are removed twice per round.
    fn advance(&self, lane: &GenCount) -> u16 {
        const SWEEP_EVERY: u16 = 1 << 15;
        let generation = lane.advance();
        if generation.is_multiple_of(SWEEP_EVERY) {
            self.sweep(|_| false);
        }
        generation
    }

    /// Removes void entries, and learned ones that are `due`: returns the
    /// number of the latter.
    fn sweep(&self, due: impl Fn(Value) -> bool) -> usize {
        let is_due = |value: Value| !value.is_static() && due(value);
        let goes = |value: Value| value.is_valid() && (!self.is_current(value) || is_due(value));
        let mut removed = 0;
        for (shard, buckets) in self
            .shards
            .iter()
            .zip(self.buckets.chunks_exact(self.bucket_mask + 1))
        {
            for bucket in buckets {
                if !bucket.slots().any(|slot| goes(slot.value())) {
                    continue;
                }
                let guard = shard.lock();
                for slot in bucket.slots() {
                    let value = slot.value();
                    if !goes(value) {
                        continue;
                    }
                    if self.is_current(value) {
                        removed += 1;
                        guard.tally(|shard| &shard.aged);
                    }
                    self.take_out(slot, value);
                }
            }
        }
        removed
    }

    /// Needs the shard's lock.
    fn take_out(&self, slot: Slot<'_>, value: Value) {
        self.uncount(value);
        slot.clear();
    }
}

fn entry(key: MacVlan, value: Value, now: u16) -> FdbEntry {
    FdbEntry {
        key,
        port: value.port(),
        age_seconds: if value.is_static() {
            0
        } else {
            value.age_seconds(now)
        },
        is_static: value.is_static(),
    }
}

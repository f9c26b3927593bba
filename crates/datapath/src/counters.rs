//! Counters: one writer each, readers that never touch a worker.
//!
//! A worker adds into plain memory of its own and publishes once per visit, in
//! one write of a sequence lock. A reader copies until it meets no write in
//! between, so what it gets is of one moment and the identities hold in it
//! exactly. A reader that fails for a while, because a copy takes longer than a
//! visit, asks the worker to leave the next publications out, which costs the
//! worker nothing and loses nothing:
//!
//! * `rx_frames = unicast + flooded + Σ drops of side Rx`, for each port;
//! * `copies = Σ (tx_frames + drops of side Tx)` over the ports of a worker,
//!   where `copies` is one for each unicast frame and one for each port that a
//!   flooded frame goes to.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crossbeam::utils::CachePadded;
use pollux_packet::{DropCounts, DropReason, DropSide, Transmitted};
use pollux_switch::PortId;

use crate::PORTS_MAX;

/// What one worker (or, added up, the switch) did for one port. `rx` is what
/// the switch received from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Chains or NIC frames received, dropped ones included.
    pub rx_frames: u64,
    /// Bytes of the frames among them.
    pub rx_bytes: u64,
    /// Received frames with one destination.
    pub unicast: u64,
    /// Received frames for every other port.
    pub flooded: u64,
    /// Deliveries tried for received frames.
    pub copies: u64,
    /// Frames that the port got.
    pub tx_frames: u64,
    /// Their bytes.
    pub tx_bytes: u64,
    /// Frames dropped, by reason: of side Rx among those received from the
    /// port, of side Tx among those for it.
    pub drops: DropCounts,
}

const PORT_FIXED: usize = 7;
const PORT_WORDS: usize = PORT_FIXED + DropReason::COUNT;

impl PortCounters {
    #[inline]
    pub(crate) fn add_transmitted(&mut self, transmitted: &Transmitted) {
        self.tx_frames += u64::from(transmitted.frames);
        self.tx_bytes += transmitted.bytes;
        if transmitted.dropped != 0 {
            self.drops.add_burst(&transmitted.drops);
        }
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.rx_frames += other.rx_frames;
        self.rx_bytes += other.rx_bytes;
        self.unicast += other.unicast;
        self.flooded += other.flooded;
        self.copies += other.copies;
        self.tx_frames += other.tx_frames;
        self.tx_bytes += other.tx_bytes;
        self.drops.merge(&other.drops);
    }

    /// What was counted since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self::from_words(&difference(self.to_words(), earlier.to_words()))
    }

    /// Frames received from the port and dropped.
    #[must_use]
    pub fn rx_drops(&self) -> u64 {
        self.drops.total(DropSide::Rx)
    }

    /// Frames for the port that it did not get.
    #[must_use]
    pub fn tx_drops(&self) -> u64 {
        self.drops.total(DropSide::Tx)
    }

    #[inline]
    fn to_words(self) -> [u64; PORT_WORDS] {
        let mut words = [0; PORT_WORDS];
        words[..PORT_FIXED].copy_from_slice(&[
            self.rx_frames,
            self.rx_bytes,
            self.unicast,
            self.flooded,
            self.copies,
            self.tx_frames,
            self.tx_bytes,
        ]);
        for (reason, count) in self.drops.iter() {
            words[PORT_FIXED + reason as usize] = count;
        }
        words
    }

    fn from_words(words: &[u64; PORT_WORDS]) -> Self {
        let mut drops = DropCounts::default();
        for &reason in DropReason::ALL {
            drops.add(reason, words[PORT_FIXED + reason as usize]);
        }
        Self {
            rx_frames: words[0],
            rx_bytes: words[1],
            unicast: words[2],
            flooded: words[3],
            copies: words[4],
            tx_frames: words[5],
            tx_bytes: words[6],
            drops,
        }
    }
}

/// Counts of `now` less those of `earlier`.
fn difference<const N: usize>(now: [u64; N], earlier: [u64; N]) -> [u64; N] {
    std::array::from_fn(|index| now[index].wrapping_sub(earlier[index]))
}

/// What a worker did with its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCounters {
    /// Passes over all queues.
    pub turns: u64,
    /// Visits to a queue that found work.
    pub visits: u64,
    /// Bursts with at least one chain.
    pub batches: u64,
    /// Chains or NIC frames received, dropped ones included.
    pub frames: u64,
    /// Clock ticks of visits that found work.
    pub busy_ticks: u64,
    /// Clock ticks of visits that found none.
    pub idle_ticks: u64,
    /// Looks at a cell that another worker held, while transmitting.
    pub spins: u64,
    /// Visits that ended because the budget was spent.
    pub exhausted: u64,
}

const WORKER_WORDS: usize = 8;

impl WorkerCounters {
    /// What was counted since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self::from_words(&difference(self.to_words(), earlier.to_words()))
    }

    /// Clock ticks spent on each chain received; `None` before the first.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn cycles_per_packet(&self) -> Option<f64> {
        (self.frames != 0).then(|| self.busy_ticks as f64 / self.frames as f64)
    }

    /// Chains in each burst; `None` before the first.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn packets_per_batch(&self) -> Option<f64> {
        (self.batches != 0).then(|| self.frames as f64 / self.batches as f64)
    }

    #[inline]
    fn to_words(self) -> [u64; WORKER_WORDS] {
        [
            self.turns,
            self.visits,
            self.batches,
            self.frames,
            self.busy_ticks,
            self.idle_ticks,
            self.spins,
            self.exhausted,
        ]
    }

    fn from_words(words: &[u64; WORKER_WORDS]) -> Self {
        let [
            turns,
            visits,
            batches,
            frames,
            busy_ticks,
            idle_ticks,
            spins,
            exhausted,
        ] = *words;
        Self {
            turns,
            visits,
            batches,
            frames,
            busy_ticks,
            idle_ticks,
            spins,
            exhausted,
        }
    }
}

/// All counters of one worker, of one moment.
#[derive(Clone, Debug)]
pub struct WorkerSnapshot {
    /// Time and turns.
    pub worker: WorkerCounters,
    /// By port number.
    pub ports: Vec<PortCounters>,
}

impl WorkerSnapshot {
    /// Everything that was done for any port.
    #[must_use]
    pub fn total(&self) -> PortCounters {
        let mut total = PortCounters::default();
        self.ports.iter().for_each(|port| total.merge(port));
        total
    }
}

type Words<const N: usize> = CachePadded<[AtomicU64; N]>;

fn zeroed<const N: usize>() -> Words<N> {
    CachePadded::new([const { AtomicU64::new(0) }; N])
}

/// Counters as readers see them.
#[derive(Debug)]
pub(crate) struct SharedCounters {
    /// Odd while the worker writes.
    sequence: CachePadded<AtomicU64>,
    /// Readers that would like the worker not to write.
    readers: CachePadded<AtomicU32>,
    worker: Words<WORKER_WORDS>,
    ports: Box<[Words<PORT_WORDS>]>,
}

/// How often a reader tries before it asks for a moment without a write. A
/// visit lasts microseconds; so does the copy of a few dozen ports.
const READ_TRIES: u32 = 8;

impl SharedCounters {
    pub(crate) fn new() -> Self {
        Self {
            sequence: CachePadded::new(AtomicU64::new(0)),
            readers: CachePadded::new(AtomicU32::new(0)),
            worker: zeroed(),
            ports: (0..PORTS_MAX).map(|_| zeroed()).collect(),
        }
    }

    /// Copies the counters of one moment, of the ports below `ports_len`.
    pub(crate) fn read(&self, ports_len: usize) -> WorkerSnapshot {
        let mut worker = [0; WORKER_WORDS];
        let mut ports = vec![[0; PORT_WORDS]; ports_len.min(self.ports.len())];
        self.at_one_moment(|| {
            load(&self.worker, &mut worker);
            for (shared, copy) in self.ports.iter().zip(&mut ports) {
                load(shared, copy);
            }
        });
        WorkerSnapshot {
            worker: WorkerCounters::from_words(&worker),
            ports: ports.iter().map(PortCounters::from_words).collect(),
        }
    }

    /// Copies the counters of one port, of one moment.
    ///
    /// # Panics
    /// If the number is not below [`PORTS_MAX`].
    pub(crate) fn read_port(&self, id: PortId) -> PortCounters {
        let shared = &self.ports[id.index()];
        let mut words = [0; PORT_WORDS];
        self.at_one_moment(|| load(shared, &mut words));
        PortCounters::from_words(&words)
    }

    /// A number that changes with every publication, so at least with every turn
    /// and every visit that had work (unless a reader asks for a moment without).
    pub(crate) fn progress(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    /// Calls `copy` until the worker wrote nothing meanwhile.
    fn at_one_moment(&self, mut copy: impl FnMut()) {
        let mut is_whole = || {
            let before = self.sequence.load(Ordering::Acquire);
            copy();
            fence(Ordering::Acquire);
            before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before
        };
        if !(0..READ_TRIES).any(|_| is_whole()) {
            self.readers.fetch_add(1, Ordering::Relaxed);
            while !is_whole() {
                // The worker writes for the last time, or has no core.
                std::thread::yield_now();
            }
            self.readers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// One sequence-locked write, by the one worker that these belong to.
    #[inline]
    fn write(&self, write: impl FnOnce(&Self)) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        write(self);
        self.sequence.store(sequence + 2, Ordering::Release);
    }
}

#[inline]
fn load<const N: usize>(shared: &Words<N>, copy: &mut [u64; N]) {
    for (shared, copy) in shared.iter().zip(copy) {
        *copy = shared.load(Ordering::Relaxed);
    }
}

#[inline]
fn store<const N: usize>(shared: &Words<N>, words: &[u64; N]) {
    for (shared, &word) in shared.iter().zip(words) {
        shared.store(word, Ordering::Relaxed);
    }
}

/// Counters as their worker keeps them.
#[derive(Debug)]
pub(crate) struct LocalCounters {
    pub(crate) worker: WorkerCounters,
    ports: Box<[PortCounters]>,
    /// Ports counted for since the last publication, each once: room for all.
    touched: Vec<PortId>,
    is_touched: Box<[bool]>,
}

impl LocalCounters {
    pub(crate) fn new() -> Self {
        let ports = usize::from(PORTS_MAX);
        Self {
            worker: WorkerCounters::default(),
            ports: vec![PortCounters::default(); ports].into_boxed_slice(),
            touched: Vec::with_capacity(ports),
            is_touched: vec![false; ports].into_boxed_slice(),
        }
    }

    /// The counters of a port, to add to.
    ///
    /// # Panics
    /// If the number is not below [`PORTS_MAX`].
    #[inline]
    pub(crate) fn port(&mut self, id: PortId) -> &mut PortCounters {
        let index = id.index();
        if !std::mem::replace(&mut self.is_touched[index], true) {
            self.touched.push(id);
        }
        &mut self.ports[index]
    }

    /// Shows readers what was counted since the last time, now or, if one of
    /// them is reading, later.
    #[inline]
    pub(crate) fn publish(&mut self, shared: &SharedCounters) {
        if shared.readers.load(Ordering::Relaxed) == 0 {
            self.publish_now(shared);
        }
    }

    /// The same, at once: before control is told that something was done.
    #[inline]
    pub(crate) fn publish_now(&mut self, shared: &SharedCounters) {
        shared.write(|shared| {
            store(&shared.worker, &self.worker.to_words());
            for id in self.touched.drain(..) {
                self.is_touched[id.index()] = false;
                store(
                    &shared.ports[id.index()],
                    &self.ports[id.index()].to_words(),
                );
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_reader_sees_one_moment() {
        let shared = SharedCounters::new();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut local = LocalCounters::new();
                for round in 1..=200_000_u64 {
                    for id in 0..3 {
                        local.port(PortId(id)).rx_frames = round;
                        local.port(PortId(id)).drops.add(DropReason::Runt, 1);
                    }
                    local.worker.turns = round;
                    local.publish(&shared);
                }
                local.publish_now(&shared);
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                let snapshot = shared.read(4);
                for port in &snapshot.ports[..3] {
                    assert_eq!(port.rx_frames, snapshot.worker.turns);
                    assert_eq!(port.rx_drops(), snapshot.worker.turns);
                }
                assert_eq!(snapshot.ports[3], PortCounters::default());
                let port = shared.read_port(PortId(2));
                assert_eq!(port.rx_frames, port.rx_drops());
                assert!(port.rx_frames >= snapshot.worker.turns);
            }
        });
        assert_eq!(shared.read(1).ports[0].rx_frames, 200_000);
        assert_eq!(shared.read_port(PortId(2)), shared.read(3).ports[2]);
        assert_eq!(shared.read_port(PortId(3)), PortCounters::default());
    }

    /// All ports take longer to copy than a worker with little to do takes to
    /// publish again.
    #[test]
    fn a_reader_of_all_ports_sees_one_moment() {
        const IDS: [u16; 3] = [0, PORTS_MAX / 2, PORTS_MAX - 1];
        let shared = SharedCounters::new();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut local = LocalCounters::new();
                for round in 1.. {
                    for id in IDS {
                        local.port(PortId(id)).rx_frames = round;
                    }
                    local.worker.turns = round;
                    local.publish(&shared);
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
                local.publish_now(&shared);
            });
            for _ in 0..300 {
                let snapshot = shared.read(usize::from(PORTS_MAX));
                for id in IDS {
                    let port = &snapshot.ports[usize::from(id)];
                    assert_eq!(port.rx_frames, snapshot.worker.turns);
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(shared.readers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn words_carry_every_counter() {
        let mut words = [0; PORT_WORDS];
        for (index, word) in (1..).zip(&mut words) {
            *word = index;
        }
        let counters = PortCounters::from_words(&words);
        assert_eq!(counters.to_words(), words);
        assert_eq!(counters.since(&PortCounters::default()), counters);
        assert_eq!(counters.since(&counters), PortCounters::default());
        let mut words = [0; WORKER_WORDS];
        for (index, word) in (1..).zip(&mut words) {
            *word = index;
        }
        assert_eq!(WorkerCounters::from_words(&words).to_words(), words);
    }
}

//! The poll loop.

mod inbox;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use pollux_packet::{Batch, BurstLimit, DropReason, FrameSet, Transmitted};
use pollux_switch::{Forwarding, Memo, PortId, Verdicts};
use pollux_sys::{Clock, Raised, pause};

pub(crate) use self::inbox::{Message, WorkerShared};
use crate::budget::{Allowance, Budget, UNLIMITED_VISIT};
use crate::counters::{LocalCounters, PortCounters};
use crate::port::{Burst, Port};

/// Ports by number.
pub(crate) type PortTable = Box<[Option<Arc<Port>>]>;

/// What a worker is to do: computed by control, walked by the worker, dropped
/// by the reaper.
pub(crate) struct Task {
    pub(crate) forwarding: Arc<Forwarding>,
    pub(crate) ports: Arc<PortTable>,
    pub(crate) queues: Vec<PolledQueue>,
}

/// A queue that a worker visits in each turn.
pub(crate) struct PolledQueue {
    port: Arc<Port>,
    budget: Budget,
    memo: Memo,
}

impl PolledQueue {
    pub(crate) fn new(port: Arc<Port>, budget: Budget) -> Self {
        Self {
            port,
            budget,
            memo: Memo::new(),
        }
    }
}

/// A thread that forwards. After it has started it neither allocates nor frees,
/// makes no system call but those of its ports, and waits for nobody but, for
/// one burst, another worker in the queue that it transmits through.
pub(crate) struct Worker {
    shared: Arc<WorkerShared>,
    tick: Arc<AtomicU16>,
    task: Box<Task>,
    path: Path,
    clock: Clock,
    /// When the last visit ended.
    visited_at: u64,
}

/// What the path of a frame needs besides the task.
struct Path {
    verdicts: Verdicts,
    counters: LocalCounters,
}

impl Worker {
    pub(crate) fn new(shared: Arc<WorkerShared>, tick: Arc<AtomicU16>, task: Box<Task>) -> Self {
        let clock = Clock::calibrate();
        Self {
            shared,
            tick,
            task,
            path: Path {
                verdicts: Verdicts::new(),
                counters: LocalCounters::new(),
            },
            clock,
            visited_at: clock.now(),
        }
    }

    /// Takes turns until control says stop.
    pub(crate) fn run(mut self) {
        loop {
            if self.shared.has_message() && !self.take_messages() {
                return;
            }
            if !self.turn() {
                pause();
            }
        }
    }

    /// One pass over all queues; false if none had work.
    fn turn(&mut self) -> bool {
        let tick = self.tick.load(Ordering::Relaxed);
        let mut worked = false;
        for index in 0..self.task.queues.len() {
            worked |= self.visit(index, tick);
            if self.shared.has_message() {
                break;
            }
        }
        self.path.counters.worker.turns += 1;
        if !worked {
            self.account_time(false);
            self.path.counters.publish(self.shared.counters());
        }
        worked
    }

    /// One queue's share of a turn: bursts until it is empty, its budget is
    /// spent, or control wants to be heard. False if there was no work.
    fn visit(&mut self, index: usize, tick: u16) -> bool {
        let Task {
            forwarding,
            ports,
            queues,
        } = &mut *self.task;
        let queue = &mut queues[index];
        let mut left = None;
        let mut worked = false;
        loop {
            // Held means that the owner is being changed over; raised, that
            // control is at work. Either way: next turn.
            let Ok(mut cell) = queue.port.rx().try_lock() else {
                break;
            };
            let Some(rx) = cell.as_deref_mut() else { break };
            let left: &mut Allowance = left.get_or_insert_with(|| queue.budget.open(rx.size()));
            let Some(limit) = left.burst() else {
                self.path.counters.worker.exhausted += 1;
                break;
            };

            let burst = rx.receive(limit);
            let cost =
                self.path
                    .forward(forwarding, ports, &queue.port, &mut queue.memo, tick, burst);
            if cost.chains == 0 {
                if rx.is_broken() {
                    queue.port.set_rx_broken();
                }
                break;
            }
            worked = true;
            left.spend(cost.units, cost.bytes);
            if !cost.is_full(limit)
                || self.shared.has_message()
                || is_late(queue.budget, self.clock, self.visited_at)
            {
                break;
            }
        }
        if worked {
            self.account_time(true);
            self.path.counters.publish(self.shared.counters());
        }
        worked
    }
}

/// What a burst cost.
struct Cost {
    chains: u32,
    units: u32,
    bytes: u64,
    received_bytes: u64,
}

impl Cost {
    /// True if the burst ended at its limit: there may be more.
    #[inline]
    fn is_full(&self, limit: BurstLimit) -> bool {
        self.chains >= u32::from(limit.frames)
            || self.units >= limit.units
            || self.received_bytes >= limit.bytes
    }
}

impl Path {
    /// The path of a burst that was received, in phases: classify, transmit,
    /// return, count.
    #[inline]
    fn forward(
        &mut self,
        forwarding: &Forwarding,
        ports: &PortTable,
        source: &Port,
        memo: &mut Memo,
        tick: u16,
        burst: Burst<'_>,
    ) -> Cost {
        let Burst { batch, returns } = burst;
        let identity = source.identity();
        let mut cost = Cost {
            chains: returns.chains(),
            units: returns.units(),
            bytes: 0,
            received_bytes: batch.bytes(),
        };
        if cost.chains == 0 {
            return cost;
        }
        let mut copies = 0;
        if !batch.is_empty() {
            forwarding.classify(identity, memo, tick, batch.heads(), &mut self.verdicts);
            let counters = &mut self.counters;
            self.verdicts
                .for_each_egress(identity.id(), forwarding.members(), |id, frames| {
                    let sent = transmit(ports, id, &batch, frames, &mut counters.worker.spins);
                    counters.port(id).add_transmitted(&sent);
                    copies += frames.count();
                    cost.units += sent.units;
                    cost.bytes += sent.bytes;
                });
        }
        returns.finish(batch.len());

        let counters = self.counters.port(identity.id());
        counters.rx_frames += u64::from(cost.chains);
        counters.rx_bytes += cost.received_bytes;
        counters.copies += u64::from(copies);
        if !batch.is_empty() {
            count_verdicts(counters, &self.verdicts);
        }
        returns.drops(&mut |reason| counters.drops.add(reason, 1));
        self.counters.worker.batches += 1;
        self.counters.worker.frames += u64::from(cost.chains);

        let frames = u32::try_from(batch.len()).expect("at most 64");
        cost.units += copies.saturating_sub(frames);
        // What was received and not delivered was work too.
        cost.bytes = cost.bytes.max(cost.received_bytes);
        cost
    }
}

#[inline]
fn count_verdicts(counters: &mut PortCounters, verdicts: &Verdicts) {
    counters.unicast += u64::from(verdicts.unicast().count());
    counters.flooded += u64::from(verdicts.flood().count());
    for (reason, frames) in verdicts.drops() {
        counters.drops.add(reason, u64::from(frames.count()));
    }
}

/// Hands frames to a port. Waits for another worker's burst at most; not for
/// control.
#[inline]
fn transmit(
    ports: &PortTable,
    id: PortId,
    batch: &Batch<'_>,
    frames: FrameSet,
    spins: &mut u64,
) -> Transmitted {
    let dropped = |reason| {
        let mut nothing = Transmitted::default();
        nothing.drop_frames(frames.count(), reason);
        nothing
    };
    let Some(Some(port)) = ports.get(id.index()) else {
        return dropped(DropReason::PortDown);
    };
    match port.tx().lock_unless_raised() {
        Err(Raised) => dropped(DropReason::PortReconfiguring),
        Ok((mut cell, waited)) => {
            *spins += u64::from(waited);
            let Some(tx) = cell.as_deref_mut() else {
                return dropped(DropReason::PortDown);
            };
            let sent = tx.transmit(batch, frames);
            if sent.dropped != 0 && tx.is_broken() {
                port.set_tx_broken();
            }
            sent
        }
    }
}

impl Worker {
    /// Takes what control sent; false to stop. What it replaces goes to the
    /// reaper, for which there must be room: control waits, not the worker.
    #[cold]
    fn take_messages(&mut self) -> bool {
        while let Some(message) = self.shared.take_message() {
            // Who sees the acknowledgement sees everything counted before.
            self.path.counters.publish_now(self.shared.counters());
            match message {
                Message::Stop => {
                    self.shared.acknowledge();
                    return false;
                }
                Message::Task(task) => {
                    let old = std::mem::replace(&mut self.task, task);
                    self.shared.retire(old);
                    self.shared.acknowledge();
                }
            }
        }
        true
    }

    /// Puts the time since the last visit to busy or idle.
    #[inline]
    fn account_time(&mut self, busy: bool) {
        let now = self.clock.now();
        let ticks = now.wrapping_sub(self.visited_at);
        self.visited_at = now;
        let counters = &mut self.path.counters.worker;
        if busy {
            counters.busy_ticks += ticks;
            counters.visits += 1;
        } else {
            counters.idle_ticks += ticks;
        }
    }
}

/// True if a visit with an unlimited budget that began at `since` has lasted
/// long enough.
#[inline]
fn is_late(budget: Budget, clock: Clock, since: u64) -> bool {
    budget.is_timed() && {
        let limit = UNLIMITED_VISIT.as_nanos().try_into().unwrap_or(u64::MAX);
        clock.now().wrapping_sub(since) >= clock.from_ns(limit)
    }
}

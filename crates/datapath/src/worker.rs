//! The poll loop.

mod inbox;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use pollux_packet::{Batch, DropReason, FrameSet, Transmitted};
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
/// one burst, another worker in the queue that it transmits through. Housekeeping
/// interrupts it if a peer makes one of those calls wait.
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
    /// Seconds that addresses are stamped with in this turn.
    tick: u16,
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
                tick: 0,
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
        self.path.tick = self.tick.load(Ordering::Relaxed);
        let mut worked = false;
        for index in 0..self.task.queues.len() {
            worked |= self.visit(index);
            if self.shared.has_message() {
                break;
            }
        }
        self.path.counters.worker.turns += 1;
        if !worked {
            if self.task.queues.is_empty() {
                self.account_time(false);
            }
            self.path.counters.publish(self.shared.counters());
        }
        worked
    }

    /// One queue's share of a turn: bursts until it is empty, its budget is
    /// spent, or control wants to be heard. False if there was no work.
    fn visit(&mut self, index: usize) -> bool {
        let Task {
            forwarding,
            ports,
            queues,
        } = &mut *self.task;
        let PolledQueue { port, budget, memo } = &mut queues[index];
        let mut left = None;
        let mut worked = false;
        loop {
            // Held means that the owner is being changed over; raised, that
            // control is at work. Either way: next turn.
            let Ok(mut cell) = port.rx().try_lock() else {
                break;
            };
            let Some(rx) = cell.as_deref_mut() else { break };
            let left: &mut Allowance = left.get_or_insert_with(|| budget.open(rx.size()));
            let Some(limit) = left.burst() else {
                self.path.counters.worker.exhausted += 1;
                break;
            };

            let burst = rx.receive(limit);
            let cost = self
                .path
                .forward(forwarding, ports, port, memo, *left, burst);
            if cost.chains == 0 {
                if rx.is_broken() {
                    port.set_rx_broken();
                }
                break;
            }
            worked = true;
            left.spend(cost.units, cost.bytes);
            let is_full = cost.is_full
                || cost.chains >= u32::from(limit.frames)
                || cost.units >= limit.units
                || cost.bytes >= limit.bytes;
            if !is_full
                || self.shared.has_message()
                || is_late(*budget, self.clock, self.visited_at)
            {
                break;
            }
        }
        self.account_time(worked);
        if worked {
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
    /// The burst ended at its limit: there may be more.
    is_full: bool,
}

impl Cost {
    const NOTHING: Self = Self {
        chains: 0,
        units: 0,
        bytes: 0,
        is_full: false,
    };
}

impl Path {
    /// The path of a burst that was received, in phases: classify, transmit,
    /// return, count.
    #[inline]
    fn forward(
        &mut self,
        forwarding: &Forwarding,
        ports: &PortTable,
        port: &Port,
        memo: &mut Memo,
        left: Allowance,
        burst: Burst<'_>,
    ) -> Cost {
        let Burst { batch, returns } = burst;
        if returns.chains() == 0 {
            return Cost::NOTHING;
        }
        let source = port.identity();
        let (verdicts, counters) = (&mut self.verdicts, &mut self.counters);
        let (mut taken, mut fan_out) = (batch.len(), 0);
        let (mut copies, mut units, mut bytes) = (0, returns.units(), 0);
        if taken != 0 {
            forwarding.classify(source, memo, self.tick, batch.heads(), verdicts);
            // Asked for only if there are flooded frames.
            let members = forwarding.members().iter().filter(|id| is_up(ports, id));
            if !verdicts.flood().is_empty() {
                fan_out = members.clone().filter(|&&id| id != source.id()).count();
                taken = affordable(&batch, verdicts, fan_out, left);
            }
            let now = FrameSet::first(taken);
            verdicts.for_each_egress(source.id(), members, |id, frames| {
                let frames = frames.intersection(now);
                let sent = transmit(ports, id, &batch, frames, &mut counters.worker.spins);
                counters.port(id).add_transmitted(&sent);
                copies += u64::from(frames.count());
                units += sent.units;
                bytes += sent.bytes;
            });
            let flood = verdicts.flood().intersection(now);
            units = units.saturating_add(further_units(&batch, flood, fan_out));
        }
        let received_bytes = batch.bytes_of_first(taken);
        let is_cut = taken < batch.len();
        returns.finish(taken);

        let chains = returns.chains();
        let port = counters.port(source.id());
        port.rx_frames += u64::from(chains);
        port.rx_bytes += received_bytes;
        port.copies += copies;
        if taken != 0 {
            count_verdicts(port, verdicts, FrameSet::first(taken), fan_out);
        }
        returns.drops(&mut |reason| port.drops.add(reason, 1));
        counters.worker.batches += u64::from(chains != 0);
        counters.worker.frames += u64::from(chains);
        Cost {
            chains,
            units,
            // What was received and not delivered was work too.
            bytes: bytes.max(received_bytes),
            is_full: is_cut,
        }
    }
}

/// How many frames of a batch with flooded ones can be forwarded before what is
/// left of the visit is spent, at least one: a flooded frame costs a copy for
/// each port. The others are received again by the next visit.
#[cold]
fn affordable(batch: &Batch<'_>, verdicts: &Verdicts, fan_out: usize, left: Allowance) -> usize {
    let (mut units, mut bytes) = (0, 0);
    for index in batch.all() {
        let is_flooded = verdicts.flood().contains(index);
        let copies = if is_flooded { fan_out as u64 } else { 1 };
        units += copies * u64::from(units_of_copy(batch, index));
        bytes += copies * u64::from(batch.frame_bytes(index));
        if index > 0 && left.is_exceeded_by(units, bytes) {
            return index;
        }
    }
    batch.len()
}

/// Work of copying a frame once more: it lies in as many pieces as its chain
/// had buffers, or more.
fn units_of_copy(batch: &Batch<'_>, index: usize) -> u32 {
    let pieces = batch.frame(index).body.len();
    1 + u32::try_from(pieces.saturating_sub(2)).unwrap_or(u32::MAX - 1)
}

/// Work of the copies of flooded frames after the first of each, which the
/// frame's own unit pays for.
#[inline]
fn further_units(batch: &Batch<'_>, flood: FrameSet, fan_out: usize) -> u32 {
    if flood.is_empty() || fan_out < 2 {
        return 0;
    }
    let units: u32 = flood.map(|index| units_of_copy(batch, index)).sum();
    units.saturating_mul(u32::try_from(fan_out - 1).unwrap_or(u32::MAX))
}

/// True if a port can take frames now: others are left out of floods.
#[inline]
fn is_up(ports: &PortTable, id: &PortId) -> bool {
    let port = ports.get(id.index());
    port.is_some_and(|port| port.as_ref().is_some_and(|port| port.is_up()))
}

/// Counts what was decided on the frames of `now`.
#[inline]
fn count_verdicts(counters: &mut PortCounters, verdicts: &Verdicts, now: FrameSet, fan_out: usize) {
    let count = |frames: FrameSet| u64::from(frames.intersection(now).count());
    counters.unicast += count(verdicts.unicast());
    if fan_out != 0 {
        counters.flooded += count(verdicts.flood());
    } else {
        counters
            .drops
            .add(DropReason::NoDestination, count(verdicts.flood()));
    }
    for (reason, frames) in verdicts.drops() {
        counters.drops.add(reason, count(frames));
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
            // Its call may have broken it, after every frame was delivered.
            if tx.is_broken() {
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

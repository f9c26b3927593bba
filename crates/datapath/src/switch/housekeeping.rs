//! The reaper and the clock: one ordinary thread.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pollux_switch::Fdb;
use pollux_sys::Interrupt;

use super::Time;
use crate::port::Port;
use crate::worker::WorkerShared;

/// How long retired values and broken queues may wait.
const PERIOD: Duration = Duration::from_millis(10);
const SECOND: Duration = Duration::from_secs(1);

/// How often is looked whether workers make progress. One that made none from
/// one look to the next has been stuck for one to two periods.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

/// A worker as it is looked after.
pub(super) struct WatchedWorker {
    name: String,
    pub(super) shared: Arc<WorkerShared>,
    /// Ends a wait of its thread.
    interrupt: Interrupt,
    /// Its thread has the value, and drops it however it ends.
    alive: Weak<()>,
    /// Control wants it to end, or it was reported that it has.
    is_end_known: AtomicBool,
    /// Its progress at the last look.
    progress_seen: AtomicU64,
    /// It had made none.
    is_stuck: AtomicBool,
}

impl WatchedWorker {
    /// A worker whose thread has started and keeps the value of `alive` until it
    /// ends.
    pub(super) fn new(
        name: &str,
        shared: Arc<WorkerShared>,
        interrupt: Interrupt,
        alive: Weak<()>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            shared,
            interrupt,
            alive,
            is_end_known: AtomicBool::new(false),
            // It cannot have come so far.
            progress_seen: AtomicU64::new(u64::MAX),
            is_stuck: AtomicBool::new(false),
        }
    }

    /// Interrupts the worker if it has made no progress since the last look, and
    /// again at each look until it makes some. The first time is reported.
    ///
    /// What stops a worker is a peer that made one of its system calls wait;
    /// that call's queue breaks over the interruption (`RingFault::CallBlocks`
    /// of a guest's ring). A worker that only had no core does not notice.
    fn watch(&self) {
        let progress = self.shared.counters().progress();
        let is_stuck = self.progress_seen.swap(progress, Ordering::Relaxed) == progress
            && self.alive.strong_count() != 0;
        if is_stuck {
            // It may end at this moment: then there is nobody to interrupt.
            let _ = self.interrupt.send();
        }
        if is_stuck && !self.is_stuck.load(Ordering::Relaxed) {
            tracing::warn!(
                worker = self.name,
                "the worker made no progress for a second: it is interrupted, in case that a \
                 peer keeps it in a system call; else it has no core"
            );
        }
        self.is_stuck.store(is_stuck, Ordering::Relaxed);
    }

    /// From now on the end of the thread is no news. True if it was none before.
    pub(super) fn expect_end(&self) -> bool {
        self.is_end_known.swap(true, Ordering::Relaxed)
    }

    /// Says that the thread has ended by itself, once.
    pub(super) fn report_end(&self) {
        if self.alive.strong_count() == 0 && !self.expect_end() {
            tracing::error!(
                worker = self.name,
                "the worker has ended by itself: its queues are not polled"
            );
        }
    }
}

/// What the thread looks after.
#[derive(Default)]
struct Watched {
    workers: Vec<Arc<WatchedWorker>>,
    ports: Vec<Arc<Port>>,
}

struct Shared {
    fdb: Arc<Fdb>,
    tick: Arc<AtomicU16>,
    stop: AtomicBool,
    watched: Mutex<Watched>,
}

/// Interrupts workers that are stuck, drops what they have retired, reports
/// workers that ended by themselves and queues that broke, moves the tick and
/// ages the FDB. Nothing of this waits for a worker.
pub(super) struct Housekeeping {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Housekeeping {
    pub(super) fn start(fdb: Arc<Fdb>, time: Time) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            fdb,
            tick: Arc::new(AtomicU16::new(0)),
            stop: AtomicBool::new(false),
            watched: Mutex::default(),
        });
        let run = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("pollux-house".to_owned())
            .spawn(move || run.run(time))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Seconds that workers stamp addresses with.
    pub(super) fn tick(&self) -> Arc<AtomicU16> {
        Arc::clone(&self.shared.tick)
    }

    /// Replaces what is looked after. Retired values of a worker that is left
    /// out are dropped first.
    pub(super) fn watch(&self, workers: Vec<Arc<WatchedWorker>>, ports: Vec<Arc<Port>>) {
        let mut watched = self.shared.watched();
        watched.reap();
        *watched = Watched { workers, ports };
    }

    /// Drops what is retired now rather than within [`PERIOD`].
    pub(super) fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    pub(super) fn advance_seconds(&self, seconds: u16) {
        self.shared.advance(seconds);
    }
}

impl Drop for Housekeeping {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // It has nothing to say but that it panicked, which it has said.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, time: Time) {
        let mut next_second = Instant::now() + SECOND;
        let mut next_watch = Instant::now() + WATCH_PERIOD;
        while !self.stop.load(Ordering::Relaxed) {
            thread::park_timeout(PERIOD);
            let watched = self.watched();
            // By the clock, whatever ages addresses; and first, since nothing
            // else comes right while a worker is stuck.
            let now = Instant::now();
            if now >= next_watch {
                watched.workers.iter().for_each(|worker| worker.watch());
                next_watch = now + WATCH_PERIOD;
            }
            watched.reap();
            watched.report_ended();
            watched.report_broken();
            drop(watched);
            let now = Instant::now();
            if time == Time::Real && now >= next_second {
                let seconds = 1 + (now - next_second).as_secs();
                self.advance(u16::try_from(seconds).unwrap_or(u16::MAX));
                next_second += SECOND * u32::try_from(seconds).unwrap_or(u32::MAX);
            }
        }
        self.watched().reap();
    }

    fn advance(&self, seconds: u16) {
        let before = self.tick.fetch_add(seconds, Ordering::Relaxed);
        self.fdb.age(before.wrapping_add(seconds));
    }

    fn watched(&self) -> std::sync::MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched {
    fn reap(&self) {
        for worker in &self.workers {
            while worker.shared.reap().is_some() {}
        }
    }

    fn report_ended(&self) {
        self.workers.iter().for_each(|worker| worker.report_end());
    }

    fn report_broken(&self) {
        for port in &self.ports {
            for (queue, fault) in [("rx", port.take_rx_fault()), ("tx", port.take_tx_fault())] {
                if let Some(fault) = fault {
                    tracing::warn!(port = port.name(), queue, fault, "queue is broken");
                }
            }
        }
    }
}

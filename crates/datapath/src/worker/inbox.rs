//! Between control and one worker: messages in, retired values out, counters.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::CachePadded;

use super::Task;
use crate::counters::SharedCounters;

/// What control tells a worker.
pub(crate) enum Message {
    /// From now on do this.
    Task(Box<Task>),
    /// End.
    Stop,
}

/// Messages that wait at one time: control waits for each to be taken.
const INBOX_LEN: usize = 4;
/// Values that wait for the reaper.
const RETIRED_LEN: usize = 16;

/// The part of a worker that others may touch.
///
/// The queues are crossbeam's `ArrayQueue`, not its channel: a channel wakes
/// sleepers, which is a system call that a worker must not make.
pub(crate) struct WorkerShared {
    /// The one atomic that is looked at between bursts.
    pending: CachePadded<AtomicBool>,
    messages: ArrayQueue<Message>,
    acknowledged: CachePadded<AtomicU64>,
    retired: ArrayQueue<Box<Task>>,
    counters: SharedCounters,
}

impl WorkerShared {
    pub(crate) fn new() -> Self {
        Self {
            pending: CachePadded::new(AtomicBool::new(false)),
            messages: ArrayQueue::new(INBOX_LEN),
            acknowledged: CachePadded::new(AtomicU64::new(0)),
            retired: ArrayQueue::new(RETIRED_LEN),
            counters: SharedCounters::new(),
        }
    }

    pub(crate) fn counters(&self) -> &SharedCounters {
        &self.counters
    }

    /// Control: sends a message; gives it back if the inbox is full.
    pub(crate) fn send(&self, message: Message) -> Result<(), Message> {
        self.messages.push(message)?;
        self.pending.store(true, Ordering::Release);
        Ok(())
    }

    /// Control: messages that the worker has acted on since it started.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Reaper: takes what the worker does not use any more.
    pub(crate) fn reap(&self) -> Option<Box<Task>> {
        self.retired.pop()
    }

    /// Worker: is there a message?
    #[inline]
    pub(super) fn has_message(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// Worker: takes a message, if what it replaces would have somewhere to go.
    pub(super) fn take_message(&self) -> Option<Message> {
        if self.retired.is_full() {
            return None;
        }
        // Lowered before the look, so that a message pushed after it raises the
        // flag again.
        self.pending.swap(false, Ordering::Acquire);
        let message = self.messages.pop()?;
        self.pending.store(true, Ordering::Relaxed);
        Some(message)
    }

    /// Worker: gives a value to the reaper.
    pub(super) fn retire(&self, task: Box<Task>) {
        let refused = self.retired.push(task).is_err();
        debug_assert!(!refused, "room was checked before the message was taken");
    }

    /// Worker: what control asked for is in force.
    pub(super) fn acknowledge(&self) {
        let done = self.acknowledged.load(Ordering::Relaxed) + 1;
        self.acknowledged.store(done, Ordering::Release);
    }
}

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

    /// Worker: is there a message that it can take? While the reaper has made no
    /// room there is none: else every visit would end for it, in vain.
    #[inline]
    pub(super) fn has_message(&self) -> bool {
        self.pending.load(Ordering::Relaxed) && !self.retired.is_full()
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use pollux_switch::{Fdb, FdbConfig, Forwarding, ForwardingConfig, Mode};

    use super::*;
    use crate::worker::PortTable;

    /// Tasks that are told apart by their tables of `id` ports.
    fn tasks() -> impl Fn(usize) -> Box<Task> {
        let config = ForwardingConfig {
            mode: Mode::Learn,
            fdb: Arc::new(Fdb::new(FdbConfig {
                capacity: 16,
                ..FdbConfig::default()
            })),
            members: Vec::new(),
            forward_bpdu: false,
        };
        let forwarding = Arc::new(Forwarding::new(config).expect("no pairs"));
        move |id| {
            let ports: PortTable = (0..id).map(|_| None).collect();
            Box::new(Task {
                forwarding: Arc::clone(&forwarding),
                ports: Arc::new(ports),
                queues: Vec::new(),
            })
        }
    }

    fn id(task: &Task) -> usize {
        task.ports.len()
    }

    fn take(shared: &WorkerShared) -> Option<Box<Task>> {
        match shared.take_message()? {
            Message::Task(task) => Some(task),
            Message::Stop => panic!("nobody sent it"),
        }
    }

    #[test]
    fn messages_wait_until_the_reaper_has_made_room() {
        let task = tasks();
        let shared = WorkerShared::new();
        assert!(!shared.has_message());
        for id in 0..RETIRED_LEN {
            shared.retire(task(id));
        }
        assert!(shared.send(Message::Task(task(100))).is_ok());
        assert!(shared.send(Message::Task(task(101))).is_ok());
        for _ in 0..3 {
            assert!(!shared.has_message(), "it goes on with its visits");
            assert!(shared.take_message().is_none());
        }
        assert_eq!(shared.acknowledged(), 0);

        assert_eq!(shared.reap().map(|task| id(&task)), Some(0));
        assert!(shared.has_message());
        let taken = take(&shared).expect("there is room for what it replaces");
        assert_eq!(id(&taken), 100);
        shared.retire(taken);
        shared.acknowledge();
        assert!(shared.take_message().is_none(), "full again");
        for expected in (1..RETIRED_LEN).chain([100]) {
            assert_eq!(shared.reap().map(|task| id(&task)), Some(expected));
        }
        assert_eq!(take(&shared).map(|task| id(&task)), Some(101));
        assert!(shared.take_message().is_none());
        assert!(!shared.has_message(), "one look at an empty inbox");
        assert_eq!(shared.acknowledged(), 1);
    }

    #[test]
    fn a_full_inbox_gives_the_message_back() {
        let task = tasks();
        let shared = WorkerShared::new();
        for id in 0..INBOX_LEN {
            assert!(shared.send(Message::Task(task(id))).is_ok());
        }
        match shared.send(Message::Task(task(99))) {
            Err(Message::Task(task)) => assert_eq!(id(&task), 99),
            _ => panic!("there is no room"),
        }
        for expected in 0..INBOX_LEN {
            assert_eq!(take(&shared).map(|task| id(&task)), Some(expected));
        }
    }

    /// Control, worker and reaper, each as fast as it gets: everything that is
    /// sent is taken, replaced and dropped, once and in order.
    #[test]
    fn nothing_is_lost_between_three_threads() {
        const MESSAGES: usize = 2000;
        let task = tasks();
        let shared = WorkerShared::new();
        let reaped = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut current = task(0);
                let mut taken = 0;
                while taken < MESSAGES {
                    if shared.has_message()
                        && let Some(next) = take(&shared)
                    {
                        shared.retire(std::mem::replace(&mut current, next));
                        shared.acknowledge();
                        taken += 1;
                    } else {
                        std::thread::yield_now();
                    }
                }
                assert_eq!(id(&current), MESSAGES);
            });
            scope.spawn(|| {
                for expected in 0..MESSAGES {
                    let task = loop {
                        match shared.reap() {
                            Some(task) => break task,
                            None => std::thread::yield_now(),
                        }
                    };
                    assert_eq!(id(&task), expected);
                    reaped.fetch_add(1, Ordering::Relaxed);
                }
            });
            for id in 1..=MESSAGES {
                let mut message = Message::Task(task(id));
                while let Err(back) = shared.send(message) {
                    message = back;
                    std::thread::yield_now();
                }
            }
        });
        assert_eq!(shared.acknowledged(), MESSAGES as u64);
        assert_eq!(reaped.load(Ordering::Relaxed), MESSAGES);
        assert!(shared.reap().is_none());
    }
}

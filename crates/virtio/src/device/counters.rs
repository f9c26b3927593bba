//! What a ring counts for others to read.

use std::sync::atomic::{AtomicU64, Ordering};

/// Notifications of a ring, both ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notifications {
    /// Calls written to the driver's eventfd.
    pub calls_sent: u64,
    /// Publications for which the driver did not ask for a call.
    pub calls_suppressed: u64,
    /// Kicks that the driver wrote to its eventfd.
    pub kicks: u64,
}

/// Counters of a ring that live longer than it does, so that they go on when the
/// ring is started anew. Calls are written by whoever has the ring, kicks by
/// whoever has the eventfd; everybody may read.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct RingCounters {
    calls_sent: AtomicU64,
    calls_suppressed: AtomicU64,
    kicks: AtomicU64,
}

impl RingCounters {
    /// What was counted so far.
    #[must_use]
    pub fn notifications(&self) -> Notifications {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Notifications {
            calls_sent: load(&self.calls_sent),
            calls_suppressed: load(&self.calls_suppressed),
            kicks: load(&self.kicks),
        }
    }

    /// Counts kicks that were read from the eventfd.
    pub fn add_kicks(&self, count: u64) {
        add(&self.kicks, count);
    }

    #[inline]
    pub(super) fn call_sent(&self) {
        add(&self.calls_sent, 1);
    }

    #[inline]
    pub(super) fn call_suppressed(&self) {
        add(&self.calls_suppressed, 1);
    }
}

/// There is one writer, so this needs no locked instruction.
#[inline]
fn add(counter: &AtomicU64, count: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(count);
    counter.store(sum, Ordering::Relaxed);
}

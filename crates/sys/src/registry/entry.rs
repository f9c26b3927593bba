//! One entry of the registry, and why a signal action may use it.
//!
//! The state is one word: a phase, and how many actions ("visitors") are inside.
//!
//! ```text
//! FREE -> CLAIMED -> LIVE -> POISONING -> POISONED
//!  ^        |         |          \-> LOST    |
//!  |        |         v               v      v
//!  \--------/<----- CLAIMED (only with no visitor)
//! ```
//!
//! * `start` and `len` change only in CLAIMED, which belongs to one thread.
//! * A visitor enters only in LIVE, POISONING, POISONED or LOST, and the way from
//!   these back to CLAIMED is open only with no visitor inside. So what a visitor
//!   reads stays as it is until it leaves, and the range that it lays memory over
//!   is still mapped by its owner, who unmaps after the removal.
//! * Forbidden: to decide anything from `start` and `len` outside of that. The
//!   first look is a hint that saves the visit. It may find too much (a mixture of
//!   two owners' numbers), and the visitor looks again; it cannot miss the entry
//!   that it is looking for, since the faulting thread uses that mapping, so it
//!   was published before and is not being removed.
//! * LIVE to POISONING is a compare-exchange, so one visitor lays memory over the
//!   range, once. Another that faulted at the same time waits for POISONED and
//!   then runs its instruction again. Were it to lay memory over the range too, it
//!   would throw away what the first thread may have written there since. Nobody
//!   reads that in earnest, but memory that a thread has written and then finds
//!   empty is a surprise that nothing needs. It waits for one system call, which
//!   depends on no thread that can wait for it: all signals are blocked in the
//!   action, and the kernel's lock on the address space is not held by a thread
//!   that runs one.
//! * A fault in a POISONED entry is taken for one that happened before the memory
//!   was there. (If hardware lost a page of that memory, too, it would come again
//!   and again; the watchdog over workers ends that.)

use super::atomics::{AtomicU32, AtomicUsize, Ordering, spin_loop};

/// Nobody's.
pub(super) const FREE: u32 = 0;
/// Being filled or emptied by one thread.
const CLAIMED: u32 = 1;
/// A mapping.
const LIVE: u32 = 2;
/// A mapping over which one visitor is laying memory.
const POISONING: u32 = 3;
/// A mapping that has been laid over.
const POISONED: u32 = 4;
/// A mapping that the kernel refused to lay memory over.
const LOST: u32 = 5;

const PHASE_MASK: u32 = 7;
/// One action inside.
const VISITOR: u32 = 8;

const _: () = assert!(LOST <= PHASE_MASK && VISITOR == PHASE_MASK + 1);

/// What became of a fault, as far as one entry is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Not in this range.
    Elsewhere,
    /// The instruction can run again.
    Contained,
    /// In this range, but the kernel refused other memory.
    Lost,
}

/// A range of addresses, or room for one.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) start: AtomicUsize,
    /// In bytes.
    pub(super) len: AtomicUsize,
    pub(super) state: AtomicU32,
}

impl Entry {
    /// Takes the entry if it is free.
    pub(super) fn claim(&self) -> bool {
        // Acquire: what the last owner did to the numbers comes before.
        self.state
            .compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Fills the entry that the caller has claimed.
    pub(super) fn publish(&self, start: usize, len: usize) {
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        // A store is enough: nobody else changes the word of a CLAIMED entry.
        self.state.store(LIVE, Ordering::Release);
    }

    /// Empties the entry that the caller has filled; waits for visitors.
    pub(super) fn remove(&self) {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            // A visitor here is one that read the numbers of an earlier owner, or
            // a fault of somebody who uses the mapping still, against the rules.
            // Either is gone after a system call at most.
            if state >= VISITOR {
                spin_loop();
                state = self.state.load(Ordering::Relaxed);
                continue;
            }
            // Acquire: the visitors' system calls come before our munmap.
            match self.state.compare_exchange_weak(
                state,
                CLAIMED,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        self.len.store(0, Ordering::Relaxed);
        self.start.store(0, Ordering::Relaxed);
        self.state.store(FREE, Ordering::Release);
    }

    /// From the beginning of a poisoning on.
    #[inline]
    pub(super) fn is_poisoned(&self) -> bool {
        self.state.load(Ordering::Acquire) & PHASE_MASK >= POISONING
    }

    pub(super) fn is_used(&self) -> bool {
        self.state.load(Ordering::Relaxed) & PHASE_MASK != FREE
    }

    /// Cures a fault at `addr` if this entry is about it: the first to come calls
    /// `overlay(start, len)`, which says whether it laid memory over the range.
    pub(super) fn contain(
        &self,
        addr: usize,
        overlay: impl FnOnce(usize, usize) -> bool,
    ) -> Outcome {
        if !self.covers(addr) || !self.enter() {
            return Outcome::Elsewhere;
        }
        let outcome = if self.covers(addr) {
            self.poison(overlay)
        } else {
            Outcome::Elsewhere
        };
        // Release: see `remove`.
        self.state.fetch_sub(VISITOR, Ordering::Release);
        outcome
    }

    /// Whether the numbers contain `addr`: a hint outside of a visit.
    fn covers(&self, addr: usize) -> bool {
        let start = self.start.load(Ordering::Relaxed);
        addr.wrapping_sub(start) < self.len.load(Ordering::Relaxed)
    }

    /// Becomes a visitor of a filled entry; afterwards its numbers do not change.
    fn enter(&self) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        while state & PHASE_MASK >= LIVE {
            // Acquire: sees the numbers of `publish`. Every change after it is a
            // read-modify-write, so the release sequence holds.
            match self.state.compare_exchange_weak(
                state,
                state + VISITOR,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// As a visitor: lays memory over the range, or waits for the one who does.
    fn poison(&self, overlay: impl FnOnce(usize, usize) -> bool) -> Outcome {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            match state & PHASE_MASK {
                LIVE => {
                    // Release: the mark is up before the memory changes.
                    match self.state.compare_exchange_weak(
                        state,
                        state + (POISONING - LIVE),
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    ) {
                        Ok(_) => break,
                        Err(now) => state = now,
                    }
                }
                POISONING => {
                    spin_loop();
                    state = self.state.load(Ordering::Acquire);
                }
                POISONED => return Outcome::Contained,
                _ => return Outcome::Lost,
            }
        }
        let start = self.start.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let (step, outcome) = if overlay(start, len) {
            (POISONED - POISONING, Outcome::Contained)
        } else {
            (LOST - POISONING, Outcome::Lost)
        };
        // Addition: other visitors come and go.
        self.state.fetch_add(step, Ordering::Release);
        outcome
    }
}

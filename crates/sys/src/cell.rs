//! What workers and control share on the packet path.
//!
//! A [`RingCell`] holds a value (the state of a ring, say) that one thread at a
//! time may touch. Workers take it once per burst; control (a session that maps
//! new memory, a plan that is applied) takes it rarely, but must get it at once,
//! whatever the guests do. So there is one atomic word:
//!
//! ```text
//! bit 0       LOCKED: somebody holds the value
//! bits 1-31   RAISED x number of control threads that want it or have it
//! ```
//!
//! * A worker enters by changing the word from 0 to LOCKED, and by nothing
//!   else. While the count is not 0 that cannot succeed.
//! * Control adds one to the count, waits until LOCKED is clear, sets it, and
//!   takes both back in one step at the end. Control that may not wait changes
//!   the word from 0 to both, or gives up.
//!
//! So from the instant at which the flag is up, no worker can enter: at most the
//! one that is inside finishes its burst. That is an argument about one word's
//! modification order, not about two variables, and needs no fence.
//!
//! # Cost
//!
//! Two atomic read-modify-writes for each burst (enter and leave), on a line
//! that stays with the core as long as nobody else wants the cell: 18 cycles for
//! both (measured, AMD EPYC), a third of a cycle per packet at 64 packets. Leaving
//! cannot be a plain store, because it would wipe out a flag that is raised at
//! that instant. With the flag in a word of its own it could, but the argument
//! above would be lost: a worker could then enter after the flag went up, look,
//! and have to leave again.
//!
//! # Who waits for whom
//!
//! | caller | cell free | held | raised |
//! |---|---|---|---|
//! | [`RingCell::try_lock`] (polled ring) | enters | [`Busy::Held`] | [`Busy::Raised`] |
//! | [`RingCell::lock_unless_raised`] (transmit) | enters | spins | [`Raised`] |
//! | [`RingCell::control`] | enters | waits | waits for its turn |
//! | [`RingCell::try_control`] | enters | gives up | gives up |
//!
//! There is no queue: among transmitting workers and among control threads the
//! order is whatever the processor makes it. Taking a cell again while holding
//! it never ends ([`RingCell::control`], [`RingCell::lock_unless_raised`]).

use core::{
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut},
};

use crate::primitive::{AtomicU32, MutPtr, Ordering, UnsafeCell, shared, spin_loop, yield_now};

/// Somebody holds the value.
const LOCKED: u32 = 1;
/// One control thread that wants the value or has it.
const RAISED: u32 = 2;
/// How often control looks before it gives its core away: a burst of 64 frames
/// takes a few microseconds, 128 pauses about as long.
const SPINS_BEFORE_YIELD: u32 = 128;

/// Why [`RingCell::try_lock`] did not enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Busy {
    /// A control thread wants the cell or has it. Go on with other work; trying
    /// again before the next turn is of no use.
    Raised,
    /// Another worker is in the cell, for one burst at most.
    Held,
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raised => "cell is being reconfigured",
            Self::Held => "cell is held by another worker",
        })
    }
}

impl core::error::Error for Busy {}

/// A control thread wants the cell or has it: [`RingCell::lock_unless_raised`]
/// gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raised;

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Busy::Raised.fmt(f)
    }
}

impl core::error::Error for Raised {}

/// The word on a line of its own: a worker that spins on it does not take the
/// holder's data away.
#[repr(align(64))]
struct Line(AtomicU32);

/// A value that workers lock once per burst and control can always get; see the
/// [module](self) for the rules.
///
/// The cell is aligned to 128 bytes, with the word on the first line and the
/// value from the second on: neighbours in an array do not disturb each other,
/// and a processor that fetches lines in pairs brings the start of the value
/// along with the word.
#[repr(C, align(128))]
pub struct RingCell<T> {
    word: Line,
    value: UnsafeCell<T>,
}

// SAFETY: the word lets one thread at a time reach the value (`Unlock` is made
// only after LOCKED was set by this thread), and that thread may be any, so the
// value moves between threads: `T: Send` is needed and enough, as for a mutex.
unsafe impl<T: Send> Sync for RingCell<T> {}

impl<T> RingCell<T> {
    /// A free cell that holds `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self {
            word: Line(AtomicU32::new(0)),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the cell for one burst if nobody has it or wants it: one
    /// compare-exchange, never waits. For a ring that is polled: what cannot be
    /// taken now is visited in the next turn.
    ///
    /// # Errors
    ///
    /// [`Busy::Raised`] if control wants the cell (also when a worker still
    /// holds it), otherwise [`Busy::Held`].
    #[inline]
    pub fn try_lock(&self) -> Result<Guard<'_, T>, Busy> {
        // Acquire: pairs with the release of whoever left the cell last. Other
        // threads' raises may lie in between; as read-modify-writes they
        // continue that release sequence.
        match self
            .word
            .0
            .compare_exchange(0, LOCKED, Ordering::Acquire, Ordering::Relaxed)
        {
            Ok(_) => Ok(self.entered()),
            Err(LOCKED) => Err(Busy::Held),
            Err(_) => Err(Busy::Raised),
        }
    }

    /// Takes the cell for one burst, spinning while another worker holds it. For
    /// a worker that transmits: it has frames in its hands, and the holder is
    /// gone after a burst. Returns the guard and how many times it looked and
    /// found the cell held (0 = uncontended), for the worker to count.
    ///
    /// # Errors
    ///
    /// [`Raised`] as soon as control wants the cell, also in the middle of
    /// spinning: the frames are then dropped or held by the caller.
    #[inline]
    pub fn lock_unless_raised(&self) -> Result<(Guard<'_, T>, u32), Raised> {
        let mut spins: u32 = 0;
        loop {
            match self.try_lock() {
                Ok(guard) => return Ok((guard, spins)),
                Err(Busy::Raised) => return Err(Raised),
                Err(Busy::Held) => {}
            }
            // Wait with plain loads, so that the line is shared and the holder's
            // release is disturbed only once.
            loop {
                spins = spins.saturating_add(1);
                spin_loop();
                if self.word.0.load(Ordering::Relaxed) != LOCKED {
                    break;
                }
            }
        }
    }

    /// Raises the flag, waits for the holder to leave, runs `change` on the
    /// value, and lowers the flag. Several control threads take turns.
    ///
    /// Workers are kept out from the call to the return, so everything slow
    /// (mapping, checks of file descriptors) belongs before the call. What
    /// `change` takes out of the value is best dropped after the call as well.
    ///
    /// The wait is one worker's burst, plus the closures of other control
    /// threads; it spins briefly and then gives the core away.
    ///
    /// # Panics
    ///
    /// If `change` panics. The flag is then lowered and the cell is usable, with
    /// the value as `change` left it.
    pub fn control<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        // Relaxed: the flag publishes nothing; the compare-exchange below
        // acquires the value.
        self.word.0.fetch_add(RAISED, Ordering::Relaxed);
        let mut looks: u32 = 0;
        let mut seen = self.word.0.load(Ordering::Relaxed);
        // Weak: a spurious failure costs one more round.
        while seen & LOCKED != 0
            || self
                .word
                .0
                .compare_exchange_weak(seen, seen | LOCKED, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
        {
            if looks < SPINS_BEFORE_YIELD {
                looks += 1;
                spin_loop();
            } else {
                yield_now();
            }
            seen = self.word.0.load(Ordering::Relaxed);
        }
        let mut guard = self.entered();
        // Both go in one step when the guard is dropped, so also when `change`
        // panics.
        guard.unlock.amount = LOCKED + RAISED;
        change(&mut guard)
    }

    /// Like [`control`](Self::control) if nobody has the cell or wants it now;
    /// otherwise `None`, without having kept anybody out. For a thread that must
    /// not wait even for a worker that is stuck in a burst, and can ask again.
    ///
    /// # Panics
    ///
    /// If `change` panics, as for [`control`](Self::control).
    pub fn try_control<R>(&self, change: impl FnOnce(&mut T) -> R) -> Option<R> {
        // The flag goes up with the lock: a worker that comes meanwhile gives up
        // at once instead of spinning for a thread that may have no core.
        self.word
            .0
            .compare_exchange(0, LOCKED + RAISED, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        let mut guard = self.entered();
        guard.unlock.amount = LOCKED + RAISED;
        Some(change(&mut guard))
    }

    /// Takes the value out of a cell that nobody else refers to any more.
    #[must_use]
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }

    /// The guard of a thread that has just set LOCKED.
    #[inline]
    fn entered(&self) -> Guard<'_, T> {
        Guard {
            access: self.value.get_mut(),
            unlock: Unlock {
                word: &self.word.0,
                amount: LOCKED,
            },
            borrow: PhantomData,
        }
    }
}

impl<T> fmt::Debug for RingCell<T> {
    /// Shows the state of the word, never the value: that would need the lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.word.0.load(Ordering::Relaxed);
        f.debug_struct("RingCell")
            .field("locked", &(word & LOCKED != 0))
            .field("raised", &(word / RAISED))
            .finish_non_exhaustive()
    }
}

/// The value of a [`RingCell`], held until this is dropped. Hold it for one
/// burst: control and other workers wait for it.
///
/// It stays on the thread that made it.
#[must_use = "the cell is released as soon as the guard is dropped"]
pub struct Guard<'a, T> {
    // Dropped in this order: the access ends before the cell is free.
    access: MutPtr<T>,
    unlock: Unlock<'a>,
    /// Neither Send nor Sync by itself: see the impl below.
    borrow: PhantomData<*mut T>,
}

// SAFETY: sharing a guard shares `&T` and nothing else, which `T: Sync` allows.
// (Derived from the fields it would need `T: Send` only, which is wrong.)
unsafe impl<T: Sync> Sync for Guard<'_, T> {}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: `unlock` borrows the cell, so it is alive, and LOCKED is set
        // by us until `unlock` is dropped, so no other guard exists; the shared
        // borrow of `self` keeps `deref_mut` out, and other shared borrows do
        // not change the value.
        unsafe { shared(&self.access) }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and the borrow of `self` is exclusive.
        unsafe { self.access.deref() }
    }
}

impl<T: fmt::Debug> fmt::Debug for Guard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Guard").field(&**self).finish()
    }
}

/// Gives back what its thread added to the word.
struct Unlock<'a> {
    word: &'a AtomicU32,
    amount: u32,
}

impl Drop for Unlock<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: what was written to the value is seen by whoever enters next.
        // Subtraction, not a store: others may raise the flag at any time.
        self.word.fetch_sub(self.amount, Ordering::Release);
    }
}

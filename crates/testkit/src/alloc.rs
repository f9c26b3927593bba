//! An allocator that counts by thread, to prove that a worker does not use it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Calls of watched threads.
static WATCHED_CALLS: AtomicU64 = AtomicU64::new(0);

/// The system allocator with a count of calls for each thread. A test binary
/// installs it with `#[global_allocator]`.
#[derive(Debug)]
pub struct CountingAllocator;

impl CountingAllocator {
    /// Allocations and frees of the calling thread so far.
    #[must_use]
    pub fn calls() -> u64 {
        CALLS.get()
    }

    /// From now on the calling thread's calls are counted where other threads
    /// see them: in [`watched_calls`](Self::watched_calls).
    pub fn watch_this_thread() {
        IS_WATCHED.set(true);
    }

    /// Allocations and frees of all watched threads so far.
    #[must_use]
    pub fn watched_calls() -> u64 {
        WATCHED_CALLS.load(Ordering::Relaxed)
    }
}

fn count() {
    // A thread that is ending has no counter any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    if IS_WATCHED.try_with(Cell::get).unwrap_or(false) {
        WATCHED_CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to `System` with the arguments as they came.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller's.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller's.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

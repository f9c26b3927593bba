//! An allocator that counts by thread, to prove that a worker does not use it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

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
}

fn count() {
    // A thread that is ending has no counter any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
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

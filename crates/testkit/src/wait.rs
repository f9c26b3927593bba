//! Waiting for another thread, never for ever.

use std::time::{Duration, Instant};

/// Longest wait. Generous: a shared machine may give a thread nothing for
/// seconds, and a test that waits in vain has failed anyway.
pub const WAIT_MAX: Duration = Duration::from_secs(20);

/// Waits until `done`, which is asked again and again and may do work.
///
/// # Panics
/// After [`WAIT_MAX`], with `what` was waited for.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_MAX;
    while !done() {
        assert!(
            Instant::now() < deadline,
            "waited {WAIT_MAX:?} in vain: {what}"
        );
        // Workers poll: with fewer cores than threads they need this one.
        std::thread::yield_now();
    }
}

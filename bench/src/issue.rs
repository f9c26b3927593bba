//! How fast a core executes independent instructions just now.
//!
//! A virtual core may share its physical core with somebody else's. That does
//! not show in steal time, in the clock, or in a chain of dependent
//! instructions; it shows in how many independent ones are executed per tick,
//! and a switch is made of those. On one such machine the same code took 1.0 to
//! 1.7 times its best, for seconds on end.

use std::hint::black_box;

use pollux_sys::Clock;

/// Additions that do not wait for each other.
const LANES: usize = 6;
const STEPS: u32 = 2000;
const ROUNDS: usize = 41;

/// Clock ticks for each step of six independent additions through memory, on
/// the calling thread's core: the median of some two milliseconds.
#[must_use]
pub(crate) fn ticks_per_step(clock: &Clock) -> f64 {
    let mut rounds = [0_u64; ROUNDS];
    for round in &mut rounds {
        let mut lanes = [1_u64; LANES];
        let start = clock.now();
        for _ in 0..STEPS {
            for lane in &mut lanes {
                *lane = black_box(lane.wrapping_add(3));
            }
        }
        *round = clock.now().wrapping_sub(start);
        black_box(lanes);
    }
    rounds.sort_unstable();
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let median = rounds[ROUNDS / 2] as f64;
    median / f64::from(STEPS)
}

//! The state of the machine: how far apart two cores are, and what took time
//! away from a measurement and was not its own doing.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use pollux_sys::Clock;

/// Unit of the times in `/proc/stat`: USER_HZ is 100 on every architecture that
/// this runs on (proc_stat(5), time(7)).
const STAT_TICK_MS: u64 = 10;

/// Rounds of which the median counts.
const ROUND_COUNT: usize = 21;
/// Round trips of a cache line in each round: about a millisecond in all.
const ROUND_TRIP_COUNT: u32 = 200;

/// The line that moves. 128 bytes: processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct SharedLine(AtomicU32);

impl SharedLine {
    fn wait_for(&self, value: u32) {
        while self.0.load(Ordering::Acquire) != value {}
    }
}

/// Round trip of a cache line between two cores in ns: what every exchange
/// between worker and guests is made of. A virtual machine's cores may be near
/// in one minute (110 to 130 ns) and far in the next (450 to 550 ns). `None` if
/// the threads could not be started there.
pub(crate) fn round_trip_ns([asking, answering]: [usize; 2]) -> Option<u64> {
    let clock = Clock::calibrate();
    let line = SharedLine::default();
    let last = 2 * ROUND_TRIP_COUNT * u32::try_from(ROUND_COUNT).ok()?;
    // Both are pinned before either waits for the other.
    let is_ready = AtomicU32::new(0);
    let pin = |core| {
        let pinned = pollux_sys::pin_current_thread(core).is_ok();
        is_ready.fetch_add(1, Ordering::AcqRel);
        while is_ready.load(Ordering::Acquire) < 2 {
            thread::yield_now();
        }
        pinned
    };
    let (line, pin) = (&line, &pin);
    thread::scope(|scope| {
        let answer = scope.spawn(move || {
            let pinned = pin(answering);
            for value in (2..=last).step_by(2) {
                line.wait_for(value - 1);
                line.0.store(value, Ordering::Release);
            }
            pinned
        });
        let ask = scope.spawn(move || {
            let pinned = pin(asking);
            (pinned, ask_rounds(line, clock))
        });
        let (pinned, mut rounds) = ask.join().ok()?;
        rounds.sort_unstable();
        (pinned && answer.join().ok()?).then(|| rounds[ROUND_COUNT / 2])
    })
}

/// Asks until all is answered; ns a round trip, for each round.
fn ask_rounds(line: &SharedLine, clock: Clock) -> [u64; ROUND_COUNT] {
    let mut answered = 0;
    std::array::from_fn(|_| {
        let start = clock.now();
        for _ in 0..ROUND_TRIP_COUNT {
            line.0.store(answered + 1, Ordering::Release);
            answered += 2;
            line.wait_for(answered);
        }
        clock.to_ns(clock.now().saturating_sub(start)) / u64::from(ROUND_TRIP_COUNT)
    })
}

/// Counts that only grow; taken by the thread that is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Disturbance {
    /// Time that the hypervisor took from all cores together, in ms, in steps of
    /// 10.
    pub(crate) steal_ms: u64,
    /// Times that the kernel took the core from this thread.
    pub(crate) involuntary_switches: u64,
}

impl Disturbance {
    /// Reads the counts; 0 where the kernel does not say.
    pub(crate) fn of_this_thread() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            steal_ms: steal_ticks(&read("/proc/stat")).unwrap_or(0) * STAT_TICK_MS,
            involuntary_switches: involuntary_switches(&read("/proc/thread-self/status"))
                .unwrap_or(0),
        }
    }

    /// What came to it since `earlier`. Steal time has been seen to step back
    /// after a virtual machine was moved.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            steal_ms: self.steal_ms.saturating_sub(earlier.steal_ms),
            involuntary_switches: self
                .involuntary_switches
                .saturating_sub(earlier.involuntary_switches),
        }
    }
}

/// The eighth number of the line "cpu" of `/proc/stat`.
fn steal_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find(|line| line.starts_with("cpu "))?;
    line.split_whitespace().nth(8)?.parse().ok()
}

fn involuntary_switches(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_needs_some_time_for_a_round_trip() {
        if let [first, second, ..] = pollux_sys::available_cores()[..] {
            let ns = round_trip_ns([first, second]).unwrap();
            assert!(ns > 0, "{ns}");
        }
    }

    #[test]
    fn the_kernel_is_read() {
        let stat = "cpu  1 2 3 4 5 6 7 88 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(steal_ticks(stat), Some(88));
        assert_eq!(steal_ticks("cpu 1 2"), None);
        let status = "voluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t7\n";
        assert_eq!(involuntary_switches(status), Some(7));
        let earlier = Disturbance {
            steal_ms: 20,
            involuntary_switches: 1,
        };
        assert_eq!(
            Disturbance::default().since(earlier),
            Disturbance::default()
        );
    }
}

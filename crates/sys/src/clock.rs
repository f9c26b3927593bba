//! Time as workers measure it: ticks of the processor's time-stamp counter, read
//! without a system call.

use std::{sync::OnceLock, thread, time::Duration};

const NS_PER_SECOND: u64 = 1_000_000_000;

/// How long the counter is measured against the kernel's clock, once per
/// process. The error of one reading is some tens of nanoseconds, so 20 ms give
/// a rate that is right to a few parts in a million.
const CALIBRATION: Duration = Duration::from_millis(20);

/// Slower than any time-stamp counter: a rate under this is a measuring error.
const MIN_TSC_HZ: u64 = 1_000_000;

/// A source of ticks and their rate. It is a small value: copy it into every
/// worker.
///
/// On x86-64 with an invariant time-stamp counter a tick is a tick of that
/// counter; elsewhere it is a nanosecond of `CLOCK_MONOTONIC`. Compare and
/// subtract ticks in the loop and convert when reporting: [`Clock::to_ns`]
/// divides 128 bits.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    ticks_per_second: u64,
    tsc: bool,
}

impl Clock {
    /// The clock of this machine. The first call sleeps about 20 ms to measure
    /// the counter's rate against `CLOCK_MONOTONIC`; later calls return the same
    /// answer at once.
    #[must_use]
    pub fn calibrate() -> Self {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        *CLOCK.get_or_init(|| {
            let tsc_hz = if tsc::is_invariant() {
                measure_tsc_hz()
            } else {
                None
            };
            match tsc_hz {
                Some(ticks_per_second) => Self {
                    ticks_per_second,
                    tsc: true,
                },
                None => Self {
                    ticks_per_second: NS_PER_SECOND,
                    tsc: false,
                },
            }
        })
    }

    /// Now, in ticks from an origin that means nothing. Not ordered with the
    /// instructions around it: the counter may be read some tens of cycles early
    /// or late, which does not matter at the scale of a burst.
    #[inline]
    #[must_use]
    pub fn now(&self) -> u64 {
        if self.tsc {
            tsc::read()
        } else {
            monotonic_ns()
        }
    }

    /// The rate, in ticks per second; never 0.
    #[inline]
    #[must_use]
    pub fn ticks_per_second(&self) -> u64 {
        self.ticks_per_second
    }

    /// A span of `ticks` in nanoseconds, rounded down; `u64::MAX` if it is more
    /// than that (584 years).
    #[must_use]
    pub fn to_ns(&self, ticks: u64) -> u64 {
        scale(ticks, NS_PER_SECOND, self.ticks_per_second)
    }

    /// A span of `ns` nanoseconds in ticks, rounded down; `u64::MAX` if it is
    /// more than that.
    #[must_use]
    pub fn from_ns(&self, ns: u64) -> u64 {
        scale(ns, self.ticks_per_second, NS_PER_SECOND)
    }

    /// Whether ticks are those of the time-stamp counter.
    #[inline]
    #[must_use]
    pub fn is_tsc(&self) -> bool {
        self.tsc
    }
}

/// `value * numerator / denominator` without overflow on the way.
fn scale(value: u64, numerator: u64, denominator: u64) -> u64 {
    let wide = u128::from(value) * u128::from(numerator) / u128::from(denominator);
    u64::try_from(wide).unwrap_or(u64::MAX)
}

/// Counter ticks per second of `CLOCK_MONOTONIC`; `None` if the answer makes no
/// sense (a counter that stands still or runs backwards).
fn measure_tsc_hz() -> Option<u64> {
    let start = paired_reading();
    thread::sleep(CALIBRATION);
    let end = paired_reading();
    let ticks = end.ticks.checked_sub(start.ticks)?;
    let ns = end.ns.checked_sub(start.ns).filter(|&ns| ns > 0)?;
    Some(scale(ticks, NS_PER_SECOND, ns)).filter(|&hz| hz >= MIN_TSC_HZ)
}

/// Both clocks at one instant.
struct Reading {
    ticks: u64,
    ns: u64,
}

/// Reads the kernel's clock between two readings of the counter, several times,
/// and keeps the tightest: an interrupt in between spoils only its own try.
fn paired_reading() -> Reading {
    let try_once = || {
        let before = tsc::read();
        let ns = monotonic_ns();
        let width = tsc::read().saturating_sub(before);
        let ticks = before.saturating_add(width / 2);
        (width, Reading { ticks, ns })
    };
    let mut best = try_once();
    for _ in 0..15 {
        let next = try_once();
        if next.0 < best.0 {
            best = next;
        }
    }
    best.1
}

/// `CLOCK_MONOTONIC` in nanoseconds.
///
/// Not `CLOCK_MONOTONIC_RAW`: rates are shown per second as other programs on
/// the host count seconds.
fn monotonic_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a timespec that we own. The call cannot fail with a clock
    // that Linux always has; if it did, the time would be 0.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(NS_PER_SECOND).saturating_add(nanos)
}

#[cfg(target_arch = "x86_64")]
mod tsc {
    use core::arch::x86_64::{__cpuid, _rdtsc};

    /// Whether the counter runs at one rate in all power states (Intel SDM
    /// vol. 3, "Invariant TSC"; AMD APM vol. 3, CPUID Fn8000_0007 EDX bit 8).
    pub(super) fn is_invariant() -> bool {
        const MAX_EXTENDED_LEAF: u32 = 0x8000_0000;
        const POWER_MANAGEMENT_LEAF: u32 = 0x8000_0007;
        const INVARIANT_TSC: u32 = 1 << 8;
        __cpuid(MAX_EXTENDED_LEAF).eax >= POWER_MANAGEMENT_LEAF
            && __cpuid(POWER_MANAGEMENT_LEAF).edx & INVARIANT_TSC != 0
    }

    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: every x86-64 has `rdtsc`; Linux lets user space run it unless a
        // process asked for the opposite (PR_SET_TSC), which nothing here does.
        unsafe { _rdtsc() }
    }
}

/// Where there is no such counter: never used, because never invariant.
#[cfg(not(target_arch = "x86_64"))]
mod tsc {
    pub(super) fn is_invariant() -> bool {
        false
    }

    #[inline]
    pub(super) fn read() -> u64 {
        super::monotonic_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const MONOTONIC: Clock = Clock {
        ticks_per_second: NS_PER_SECOND,
        tsc: false,
    };

    #[test]
    fn a_tenth_of_a_second_is_one() {
        let clock = Clock::calibrate();
        let start = Instant::now();
        let ticks = clock.now();
        thread::sleep(Duration::from_millis(100));
        let ticks = clock.now() - ticks;
        let elapsed = start.elapsed();
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap();
        let error_ns = clock.to_ns(ticks).abs_diff(elapsed_ns);
        assert!(
            error_ns < elapsed_ns / 100,
            "{clock:?}: {error_ns} ns off in {elapsed:?}"
        );
    }

    #[test]
    fn later_calls_are_cheap_and_equal() {
        let first = Clock::calibrate();
        let start = Instant::now();
        let second = Clock::calibrate();
        assert!(start.elapsed() < CALIBRATION / 2);
        assert_eq!(first.ticks_per_second(), second.ticks_per_second());
        assert_eq!(first.is_tsc(), second.is_tsc());
    }

    #[test]
    fn nanoseconds_are_their_own_ticks() {
        for ns in [0, 1, 999, u64::MAX] {
            assert_eq!(MONOTONIC.to_ns(ns), ns);
            assert_eq!(MONOTONIC.from_ns(ns), ns);
        }
        let first = MONOTONIC.now();
        assert!(MONOTONIC.now() >= first);
    }

    #[test]
    fn conversions_saturate() {
        let clock = Clock {
            ticks_per_second: 3_000_000_000,
            tsc: true,
        };
        assert_eq!(clock.to_ns(3), 1);
        assert_eq!(clock.to_ns(u64::MAX), u64::MAX / 3);
        assert_eq!(clock.from_ns(1), 3);
        assert_eq!(clock.from_ns(u64::MAX), u64::MAX);
        let slow = Clock {
            ticks_per_second: MIN_TSC_HZ,
            tsc: true,
        };
        assert_eq!(slow.to_ns(u64::MAX), u64::MAX);
    }
}

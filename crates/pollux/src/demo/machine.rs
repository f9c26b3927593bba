//! What took time away from a measurement and was not its own doing.

use std::fs;

/// Unit of the times in `/proc/stat`: USER_HZ is 100 on every architecture that
/// this runs on (proc_stat(5), time(7)).
const STAT_TICK_MS: u64 = 10;

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

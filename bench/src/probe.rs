//! State of the machine, taken before and after every measurement.
//!
//! A virtual machine may change under a benchmark: its two cores sit close
//! together in one minute and far apart in the next, and every figure that
//! moves cache lines between cores changes by a factor of two or more. The
//! probe measures that distance directly, so that only runs of the same state
//! are compared.

use std::{
    fmt,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
};

use anyhow::{Context as _, ensure};
use pollux_sys::Clock;
use serde::Serialize;

/// Version of the JSON form of [`MachineState`].
const SCHEMA: u32 = 1;
/// Rounds of which the median counts.
const ROUND_COUNT: usize = 21;
/// Round trips in one round: about a millisecond.
const ROUND_TRIP_COUNT: u32 = 3000;
/// Longest median round trip between cores that are near: on a virtual machine
/// with two cores, 108 to 133 ns were seen in one state, 420 to 525 in the other.
const NEAR_LIMIT_NS: f64 = 250.0;
/// Unit of the times in `/proc/stat`: USER_HZ is 100 on every architecture
/// that this runs on (proc_stat(5), time(7)).
const STAT_TICK_NS: u64 = 10_000_000;

/// How far apart the two cores of a measurement are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Distance {
    /// A cache line goes there and back in at most 250 ns.
    Near,
    /// A cache line takes longer than 250 ns there and back.
    Far,
    /// This process may use only one core.
    Single,
}

impl Distance {
    fn classify(ping_pong: Option<&PingPong>) -> Self {
        match ping_pong {
            None => Self::Single,
            Some(ping_pong) if ping_pong.median_ns <= NEAR_LIMIT_NS => Self::Near,
            Some(_) => Self::Far,
        }
    }
}

impl Distance {
    /// The name in reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Near => "NEAR",
            Self::Far => "FAR",
            Self::Single => "SINGLE",
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Round trip of a cache line between two cores: nanoseconds in which a question
/// and its answer both arrive, so two transfers of the line. Half of it is what
/// one transfer costs.
///
/// Two pinned threads answer each other through one atomic: the first writes
/// an odd number, the second waits for it and writes the next even one, the
/// first waits for that. Both wait with plain loads: with a pause instruction
/// in the loop the same machine measured a third less when its cores were near.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct PingPong {
    /// Cores that took part.
    pub(crate) cores: [usize; 2],
    /// Median of the rounds.
    pub(crate) median_ns: f64,
    /// Fastest round.
    pub(crate) min_ns: f64,
    /// Slowest round: far above the median when something else ran.
    pub(crate) max_ns: f64,
}

/// What took time away from a thread and was not its own doing.
///
/// Both numbers only grow: take one before and one after, in the thread that
/// is measured, and look at [`Disturbance::since`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Disturbance {
    /// Time that the hypervisor took from all cores together, in steps of 10 ms.
    pub(crate) steal_ns: u64,
    /// Times that the kernel took the core from the thread.
    pub(crate) involuntary_switch_count: u64,
}

impl Disturbance {
    /// Reads the counters of the calling thread and the machine.
    ///
    /// # Errors
    /// The kernel does not say (`/proc` is not mounted).
    pub(crate) fn of_this_thread() -> anyhow::Result<Self> {
        let stat = read("/proc/stat")?;
        let status = read("/proc/thread-self/status")?;
        Ok(Self {
            steal_ns: steal_ticks(&stat).context("/proc/stat has no steal time")? * STAT_TICK_NS,
            involuntary_switch_count: involuntary_switches(&status)
                .context("/proc/thread-self/status does not count involuntary switches")?,
        })
    }

    /// What came to it since `earlier`.
    pub(crate) const fn since(self, earlier: Self) -> Self {
        Self {
            // Saturating: steal time has been seen to step back after a
            // virtual machine was moved to another host.
            steal_ns: self.steal_ns.saturating_sub(earlier.steal_ns),
            involuntary_switch_count: self
                .involuntary_switch_count
                .saturating_sub(earlier.involuntary_switch_count),
        }
    }
}

/// Everything about the machine that a figure depends on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct MachineState {
    schema: u32,
    /// State that must be the same for two figures to be comparable.
    pub(crate) distance: Distance,
    /// `None` when there is only one core.
    pub(crate) ping_pong: Option<PingPong>,
    /// Clock ticks for a step of independent instructions on the first core:
    /// see [`issue`](crate::issue). More than at other times says that somebody
    /// shares the core.
    pub(crate) issue_ticks: f64,
    /// During the probe: other than zero says that `ping_pong` may be off.
    pub(crate) disturbance: Disturbance,
    pub(crate) cpu_model: String,
    /// Cores that are online.
    pub(crate) core_count: usize,
    /// Cores that this process may use.
    pub(crate) usable_cores: Vec<usize>,
    pub(crate) kernel_release: String,
    /// Ticks per second of the clock that all figures are taken with.
    pub(crate) clock_hz: u64,
    /// Whether that clock is the processor's time stamp counter.
    pub(crate) clock_is_tsc: bool,
}

/// Whether threads of this process, or the whole machine, were kept waiting:
/// asked for before and after something short.
#[derive(Debug)]
pub(crate) struct Waits {
    /// `schedstat` of each thread.
    threads: Vec<File>,
    stat: File,
}

/// What [`Waits`] counts; it only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waited {
    /// Time in which one of the threads wanted a core and another one had it.
    run_delay_ns: u64,
    steal_ns: u64,
}

/// Threads of the kernel, and housekeeping, take a core for some microseconds
/// now and then. A ring of 1024 holds what comes at 10 million frames a second
/// for twice this long.
const RUN_DELAY_LIMIT_NS: u64 = 50_000;

impl Waited {
    /// True if threads waited since `earlier` for no longer than 50 us, and the
    /// hypervisor took nothing.
    pub(crate) const fn is_undisturbed_since(self, earlier: Self) -> bool {
        self.run_delay_ns.saturating_sub(earlier.run_delay_ns) <= RUN_DELAY_LIMIT_NS
            && self.steal_ns <= earlier.steal_ns
    }

    /// Nanoseconds waited since `earlier`, all threads together.
    pub(crate) const fn run_delay_ns_since(self, earlier: Self) -> u64 {
        self.run_delay_ns.saturating_sub(earlier.run_delay_ns)
    }
}

impl Waits {
    /// Watches this process's threads of these names.
    ///
    /// # Errors
    /// There is no such thread, or the kernel does not say (it has no
    /// `schedstat`, `/proc` is not mounted).
    pub(crate) fn of_threads(names: &[&str]) -> anyhow::Result<Self> {
        let mut threads = Vec::new();
        for name in names {
            let tasks = fs::read_dir("/proc/self/task").context("cannot list threads")?;
            // A thread may end while the list is read.
            let mut paths = tasks.flatten().map(|task| task.path());
            let path = paths.find(|path| {
                let comm = fs::read_to_string(path.join("comm")).unwrap_or_default();
                comm.trim_end() == *name
            });
            let path = path.with_context(|| format!("no thread is named {name}"))?;
            let file = File::open(path.join("schedstat"));
            threads.push(file.context("the kernel has no schedstat of threads")?);
        }
        Ok(Self {
            threads,
            stat: File::open("/proc/stat").context("cannot open /proc/stat")?,
        })
    }

    /// Up to now.
    ///
    /// # Errors
    /// A thread has ended.
    pub(crate) fn so_far(&self) -> anyhow::Result<Waited> {
        let mut bytes = [0; 256];
        let mut waited = Waited::default();
        for thread in &self.threads {
            let text = read_start(thread, &mut bytes)?;
            // Time on a core, time waiting for one, times put on one.
            let run_delay = text
                .split_whitespace()
                .nth(1)
                .and_then(|ns| ns.parse().ok());
            let run_delay: u64 = run_delay.context("schedstat has no waiting time")?;
            waited.run_delay_ns += run_delay;
        }
        let stat = read_start(&self.stat, &mut bytes)?;
        let ticks = steal_ticks(stat).context("/proc/stat has no steal time")?;
        waited.steal_ns = ticks * STAT_TICK_NS;
        Ok(waited)
    }
}

/// The start of a file of the kernel's, as it is now.
fn read_start<'a>(file: &File, bytes: &'a mut [u8]) -> anyhow::Result<&'a str> {
    let count = file.read_at(bytes, 0)?;
    Ok(std::str::from_utf8(&bytes[..count])?)
}

impl MachineState {
    /// Measures and reads the state; takes some tens of milliseconds and both
    /// of the first two usable cores.
    ///
    /// # Errors
    /// A thread cannot be pinned, or the kernel does not describe itself.
    pub(crate) fn probe() -> anyhow::Result<Self> {
        let clock = Clock::calibrate();
        let usable_cores = pollux_sys::available_cores();
        let issue_ticks = on_core(usable_cores.first().copied(), move || {
            crate::issue::ticks_per_step(&clock)
        })?;
        let (ping_pong, disturbance) = match usable_cores[..] {
            [first, second, ..] => {
                let (ping_pong, disturbance) = measure_ping_pong(&clock, [first, second])?;
                (Some(ping_pong), disturbance)
            }
            _ => (None, Disturbance::default()),
        };
        Ok(Self {
            schema: SCHEMA,
            distance: Distance::classify(ping_pong.as_ref()),
            ping_pong,
            issue_ticks,
            disturbance,
            cpu_model: cpu_model(&read("/proc/cpuinfo")?)
                .unwrap_or("unknown")
                .to_owned(),
            core_count: core_count(&read("/proc/stat")?),
            usable_cores,
            kernel_release: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            clock_hz: clock.ticks_per_second(),
            clock_is_tsc: clock.is_tsc(),
        })
    }
}

impl MachineState {
    /// Round trip of a cache line in nanoseconds; 0 with one core.
    pub(crate) fn ping_pong_ns(&self) -> f64 {
        self.ping_pong
            .as_ref()
            .map_or(0.0, |measured| measured.median_ns)
    }
}

impl fmt::Display for MachineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "state        {}", self.distance)?;
        if let Some(PingPong {
            cores: [first, second],
            median_ns,
            min_ns,
            max_ns,
        }) = &self.ping_pong
        {
            write!(
                f,
                ": cache line round trip between cores {first} and {second} {median_ns:.0} ns \
                 (median of {ROUND_COUNT} rounds from {min_ns:.0} to {max_ns:.0})"
            )?;
        }
        write!(f, "\nissue        {:.2} ticks a step", self.issue_ticks)?;
        let Disturbance {
            steal_ns,
            involuntary_switch_count,
        } = self.disturbance;
        writeln!(
            f,
            "\ndisturbance  {} ms stolen, {involuntary_switch_count} involuntary switches \
             during the probe",
            steal_ns / 1_000_000
        )?;
        writeln!(
            f,
            "cpu          {}, {} cores online, {} usable",
            self.cpu_model,
            self.core_count,
            self.usable_cores.len()
        )?;
        writeln!(f, "kernel       {}", self.kernel_release)?;
        let clock = if self.clock_is_tsc {
            "TSC"
        } else {
            "kernel clock"
        };
        write!(
            f,
            "clock        {clock}, {:.3} MHz",
            self.clock_hz as f64 / 1e6
        )
    }
}

/// The line that moves. 128 bytes: processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct SharedLine(AtomicU32);

impl SharedLine {
    fn wait_for(&self, value: u32) {
        while self.0.load(Ordering::Acquire) != value {}
    }
}

/// Runs `measure` on a thread of its own, pinned to `core`.
fn on_core(core: Option<usize>, measure: impl FnOnce() -> f64 + Send) -> anyhow::Result<f64> {
    thread::scope(|scope| {
        let measuring = scope.spawn(move || -> anyhow::Result<f64> {
            if let Some(core) = core {
                pollux_sys::pin_current_thread(core)?;
            }
            Ok(measure())
        });
        measuring
            .join()
            .map_err(|_| anyhow::anyhow!("the measuring thread panicked"))?
    })
}

/// Measures on two threads of its own, so that the caller stays unpinned.
fn measure_ping_pong(clock: &Clock, cores: [usize; 2]) -> anyhow::Result<(PingPong, Disturbance)> {
    let line = SharedLine::default();
    let last = ROUND_TRIP_COUNT * 2 * u32::try_from(ROUND_COUNT)?;
    let (ready, is_ready) = mpsc::channel();
    thread::scope(|scope| {
        let line = &line;
        scope.spawn(move || {
            let pinned = pollux_sys::pin_current_thread(cores[1]);
            let can_answer = pinned.is_ok();
            // The receiver is gone only when the other thread failed to be
            // pinned; it starts nothing then.
            if ready.send(pinned).is_err() || !can_answer {
                return;
            }
            for value in (2..=last).step_by(2) {
                line.wait_for(value - 1);
                line.0.store(value, Ordering::Release);
            }
        });
        let asking = scope.spawn(move || -> anyhow::Result<_> {
            let answering = is_ready.recv().context("the answering thread died")?;
            answering.with_context(|| format!("cannot run on core {}", cores[1]))?;
            let pinned = pollux_sys::pin_current_thread(cores[0]);
            let before = Disturbance::of_this_thread();
            // Once the other thread waits, it has to be asked to the end.
            let rounds = ask(line, clock, last);
            pinned.with_context(|| format!("cannot run on core {}", cores[0]))?;
            Ok((rounds, Disturbance::of_this_thread()?.since(before?)))
        });
        let (rounds, disturbance) = asking
            .join()
            .map_err(|_| anyhow::anyhow!("the asking thread panicked"))??;
        Ok((summarise(cores, rounds)?, disturbance))
    })
}

/// Asks until `last` is answered; nanoseconds a round trip, for each round.
fn ask(line: &SharedLine, clock: &Clock, last: u32) -> Vec<f64> {
    let mut rounds = Vec::with_capacity(ROUND_COUNT);
    let mut answered = 0;
    while answered < last {
        let start = clock.now();
        for _ in 0..ROUND_TRIP_COUNT {
            line.0.store(answered + 1, Ordering::Release);
            answered += 2;
            line.wait_for(answered);
        }
        let round_ns = clock.to_ns(clock.now() - start);
        rounds.push(round_ns as f64 / f64::from(ROUND_TRIP_COUNT));
    }
    rounds
}

fn summarise(cores: [usize; 2], mut rounds: Vec<f64>) -> anyhow::Result<PingPong> {
    ensure!(!rounds.is_empty(), "no round was measured");
    rounds.sort_unstable_by(f64::total_cmp);
    Ok(PingPong {
        cores,
        median_ns: rounds[rounds.len() / 2],
        min_ns: rounds[0],
        max_ns: rounds[rounds.len() - 1],
    })
}

fn read(path: &str) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

/// Steal time of all cores: the eighth number of the `cpu` line (proc_stat(5)).
fn steal_ticks(stat: &str) -> Option<u64> {
    stat.lines()
        .find_map(|line| line.strip_prefix("cpu "))?
        .split_whitespace()
        .nth(7)?
        .parse()
        .ok()
}

/// Cores that are online: the `cpuN` lines (proc_stat(5)).
fn core_count(stat: &str) -> usize {
    let is_core = |line: &&str| {
        line.strip_prefix("cpu")
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    stat.lines().filter(is_core).count()
}

/// Involuntary context switches of one thread (proc_pid_status(5)).
fn involuntary_switches(status: &str) -> Option<u64> {
    let count = status
        .lines()
        .find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?;
    count.trim().parse().ok()
}

/// Name of the first processor; some architectures give none.
fn cpu_model(cpuinfo: &str) -> Option<&str> {
    let (_, model) = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?
        .split_once(':')?;
    Some(model.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  10 20 30 40 50 60 70 80 90 100\ncpu0 1 2\ncpu1 3 4\nintr 9\n";

    #[test]
    fn kernel_texts_are_read() {
        assert_eq!(steal_ticks(STAT), Some(80));
        assert_eq!(core_count(STAT), 2);
        let status = "voluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t3\n";
        assert_eq!(involuntary_switches(status), Some(3));
        assert_eq!(
            cpu_model("processor\t: 0\nmodel name\t: Some CPU\n"),
            Some("Some CPU")
        );
        assert_eq!(cpu_model("processor\t: 0\n"), None);
    }

    #[test]
    fn the_median_decides_the_distance() {
        let far = summarise([0, 1], vec![100.0, 900.0, 251.0]).unwrap();
        assert_eq!(
            (far.min_ns, far.median_ns, far.max_ns),
            (100.0, 251.0, 900.0)
        );
        assert_eq!(Distance::classify(Some(&far)), Distance::Far);
        let near = summarise([0, 1], vec![250.0]).unwrap();
        assert_eq!(Distance::classify(Some(&near)), Distance::Near);
        assert_eq!(Distance::classify(None), Distance::Single);
    }

    #[test]
    fn disturbance_is_a_difference() {
        let early = Disturbance {
            steal_ns: 5,
            involuntary_switch_count: 1,
        };
        let late = Disturbance {
            steal_ns: 3,
            involuntary_switch_count: 4,
        };
        assert_eq!(
            late.since(early),
            Disturbance {
                steal_ns: 0,
                involuntary_switch_count: 3
            }
        );
    }

    #[test]
    fn a_thread_that_waits_is_noticed() {
        let before = Waited {
            run_delay_ns: 10_000,
            steal_ns: 20_000_000,
        };
        let after = |run_delay_ns, steal_ns| Waited {
            run_delay_ns,
            steal_ns,
        };
        assert!(after(60_000, 20_000_000).is_undisturbed_since(before));
        assert!(!after(60_001, 20_000_000).is_undisturbed_since(before));
        assert!(!after(10_000, 30_000_000).is_undisturbed_since(before));
        assert_eq!(after(16_000, 0).run_delay_ns_since(before), 6_000);
        assert!(Waits::of_threads(&["no such thread"]).is_err());
    }

    #[test]
    fn this_machine_can_be_probed() {
        let state = MachineState::probe().unwrap();
        assert!(state.core_count >= state.usable_cores.len());
        assert!(state.clock_hz > 0);
        assert!(
            serde_json::to_string(&state)
                .unwrap()
                .contains("\"schema\":1")
        );
    }
}

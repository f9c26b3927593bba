//! What a guest at full attack speed leaves of its neighbour's rate.
//!
//! One worker on one core; all guests on another, driven by one thread that
//! takes a step of the neighbours B -> C and a step of the attacker A in turn.
//! So the attack costs the neighbour twice: in the switch, which is the
//! question, and in the thread that drives both, which is not. The control
//! measurement, in which the attacker takes its steps and posts nothing, and the
//! share of the thread's time that each has, tell one from the other.
//!
//! A round of one attack is one switch and its guests, and many slices of 2.5 ms, four of each in turn:
//! B alone; the control; B at full speed under attack; B open loop at half of the
//! 45 % of its rate alone that it has to be left, where nothing may be lost; the
//! same without the attack, since the machine loses frames by itself; and again. So
//! the five meet the same moods of the machine. Slices in which one of the two
//! threads had to wait for a core do not count, as long as there are others.

mod bed;
mod guests;
mod report;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use pollux_datapath::{PortCounters, Switch, WorkerCounters};
use serde::Serialize;

use self::bed::{A, B, C, Company, Guests, Tally, WORKER, Work};
use self::guests::Attack;
use self::report::Report;
use crate::probe::{MachineState, Waits};

/// Options of `isolation`.
#[derive(Args, Clone, Debug)]
pub(crate) struct IsolationArgs {
    /// What the attacker sends; may be repeated.
    #[arg(long, value_enum, value_delimiter = ',',
        default_values_t = [Attack::Malformed, Attack::Tiny, Attack::Broadcast])]
    attack: Vec<Attack>,
    /// Descriptors in each ring.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u16).range(64..=4096))]
    ring: u16,
    /// Ports that a broadcast goes to: B, C, and sinks.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(3..=200))]
    ports: u16,
    /// Seconds of each of the four measurements of an attack in a round.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Rounds.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Core of the worker.
    #[arg(long, default_value_t = 0)]
    worker_core: usize,
    /// Core of the thread that drives all guests.
    #[arg(long, default_value_t = 1)]
    generator_core: usize,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
}

/// What is measured, in the order in which it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Phase {
    /// B at full speed, the attacker not even looked at.
    Alone,
    /// B at full speed; the attacker takes its steps and posts nothing.
    Control,
    /// B at full speed under attack.
    Attacked,
    /// B open loop under attack.
    Half,
    /// B open loop at the same rate, the attacker not looked at: what the machine
    /// loses by itself, when it takes a core away for longer than a ring lasts.
    HalfAlone,
}

impl Phase {
    const ALL: [Self; 5] = [
        Self::Alone,
        Self::Control,
        Self::Attacked,
        Self::Half,
        Self::HalfAlone,
    ];

    /// At half of the share of its rate alone that B has to be left.
    const fn is_half(self) -> bool {
        matches!(self, Self::Half | Self::HalfAlone)
    }

    const fn company(self) -> Company {
        match self {
            Self::Alone | Self::HalfAlone => Company::Nobody,
            Self::Control => Company::Idle,
            Self::Attacked | Self::Half => Company::Attacking,
        }
    }
}

/// What the worker did in the measured time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct WorkerFigures {
    /// Of the measured time: ticks of visits that found work, and of others.
    busy_share: f64,
    idle_share: f64,
    turns_per_second: f64,
    /// Ticks of busy visits for each turn.
    busy_cycles_per_turn: f64,
    /// Ticks of busy visits for each chain of any port.
    busy_cycles_per_chain: f64,
    pair_frames_per_turn: f64,
    attack_chains_per_turn: f64,
    /// Work units of these chains.
    attack_units_per_turn: f64,
    /// Visits that a budget ended.
    exhausted_per_turn: f64,
}

/// What the thread that drives the guests did in the measured time.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct DriverFigures {
    /// Of its time: B's and C's steps, and those of attacker and sinks.
    pair_share: f64,
    company_share: f64,
    steps_per_second: f64,
    /// Frames of the attacker that C had to receive, for each of B's.
    strangers_per_frame: f64,
}

/// All that was measured of one phase in a round.
#[derive(Clone, Debug, Serialize)]
struct Sample {
    phase: Phase,
    /// Slices, and those in which no thread had to wait. Rates and figures are
    /// of these, if there are any.
    slices: u32,
    quiet_slices: u32,
    /// Received by C from B.
    mpps: f64,
    /// The same in all slices.
    mpps_of_all: f64,
    /// Of B's frames, in all slices; those under way were waited for.
    sent: u64,
    received: u64,
    /// Due in the open loop, and B's ring was full.
    refused: u64,
    /// Never offered, since the driver thread had been away.
    skipped: u64,
    /// Sent and not received, or refused; and of these, in quiet slices.
    lost: u64,
    lost_in_quiet: u64,
    refused_in_quiet: u64,
    /// Due in quiet slices.
    offered_in_quiet: u64,
    /// Chains taken from the attacker, million per second.
    attack_mpps: f64,
    worker: WorkerFigures,
    driver: DriverFigures,
    /// By port and reason, in all slices.
    drops: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
}

/// One attack, measured in one go.
#[derive(Clone, Debug, Serialize)]
struct Round {
    attack: Attack,
    /// NEAR, FAR, or MIXED if it changed in between.
    state: &'static str,
    ping_pong_ns: [f64; 2],
    /// See the engine's report: high when somebody shares the core.
    issue_ticks: [f64; 2],
    /// Time that driver thread and worker waited for their cores.
    run_delay_ms: f64,
    samples: Vec<Sample>,
}

impl Round {
    fn of_phase(&self, phase: Phase) -> &Sample {
        let mut samples = self.samples.iter();
        let sample = samples.find(|sample| sample.phase == phase);
        sample.expect("a round has a sample of each phase")
    }

    /// B's rate under attack by that of another phase.
    fn share_of(&self, phase: Phase) -> f64 {
        self.of_phase(Phase::Attacked).mpps / self.of_phase(phase).mpps
    }
}

const MIXED: &str = "MIXED";
/// Of the thread that drives all guests: no longer than the kernel's names.
const DRIVER: &str = "bench-driver";
/// Short enough that some are quiet while others use the cores too.
const SLICE: Duration = Duration::from_micros(2500);
/// Of one phase before the next one's.
const SLICES_RUN: u32 = 4;
/// Before each slice is measured: rings fill.
const LEAD_IN: Duration = Duration::from_micros(500);

/// Takes all rounds and prints the report.
///
/// # Errors
/// If cores are missing or a guest finds something wrong.
pub(crate) fn run(args: &IsolationArgs) -> anyhow::Result<()> {
    let cores = pollux_sys::available_cores();
    ensure!(
        cores.contains(&args.worker_core)
            && cores.contains(&args.generator_core)
            && args.worker_core != args.generator_core,
        "isolation bench: two cores are needed, {} and {} are asked for, this process has \
         {cores:?}; give others with --worker-core and --generator-core",
        args.worker_core,
        args.generator_core,
    );
    let mut machine = MachineState::probe()?;
    let mut rounds = Vec::new();
    for number in 1..=args.rounds {
        for &attack in &args.attack {
            eprintln!("round {number} of {}: {}", args.rounds, attack.name());
            let measured = std::thread::scope(|scope| {
                std::thread::Builder::new()
                    .name(DRIVER.to_owned())
                    .spawn_scoped(scope, || take_round(args, attack))?
                    .join()
                    .map_err(|_| anyhow::anyhow!("the thread that drives the guests panicked"))?
            })?;
            let after = MachineState::probe()?;
            let is_same = machine.distance == after.distance;
            rounds.push(Round {
                state: if is_same {
                    after.distance.name()
                } else {
                    MIXED
                },
                ping_pong_ns: [machine.ping_pong_ns(), after.ping_pong_ns()],
                issue_ticks: [machine.issue_ticks, after.issue_ticks],
                ..measured
            });
            machine = after;
        }
    }
    let report = Report::new(args, machine, rounds);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{report}");
    }
    Ok(())
}

/// Sums over slices.
#[derive(Clone, Debug, Default)]
struct Sums {
    slices: u32,
    ticks: u64,
    /// In the measured time.
    tally: Tally,
    worker: WorkerCounters,
    pair_frames: u64,
    attack_chains: u64,
    /// Of the whole slice, lead-in included, with all under way arrived.
    whole: Tally,
}

/// One phase's slices of a round.
#[derive(Debug, Default)]
struct Slices {
    all: Sums,
    quiet: Sums,
    ports: Vec<PortCounters>,
}

/// The last few rates under attack: the machine changes its mood, and one slice
/// is short.
#[derive(Debug, Default)]
struct Rates {
    last: VecDeque<f64>,
    has_quiet: bool,
}

/// Slices whose median counts.
const RATES_LEN: usize = 9;

impl Rates {
    /// A disturbed slice is slow, and half of its rate is too easy; but there may
    /// be no other yet.
    fn push(&mut self, rate: f64, is_quiet: bool) {
        if is_quiet && !self.has_quiet {
            self.last.clear();
            self.has_quiet = true;
        }
        if is_quiet || !self.has_quiet {
            self.last.truncate(RATES_LEN - 1);
            self.last.push_front(rate);
        }
    }

    fn median(&self) -> f64 {
        let mut rates: Vec<f64> = self.last.iter().copied().collect();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or(0.0)
    }
}

fn take_round(args: &IsolationArgs, attack: Attack) -> anyhow::Result<Round> {
    pollux_sys::pin_current_thread(args.generator_core)?;
    let sinks = usize::from(args.ports) - 2;
    let (switch, mut guests) = bed::start(args.worker_core, sinks, args.ring, attack)?;
    let waits = Waits::of_threads(&[DRIVER, &format!("pollux-{WORKER}")])?;
    let begin = waits.so_far()?;
    let mut slices = [(); Phase::ALL.len()].map(|()| Slices::default());
    let cycles = (args.seconds / (SLICE * SLICES_RUN).as_secs_f64())
        .ceil()
        .max(1.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at least 1, and nobody has that many seconds"
    )]
    let cycles = cycles as u64;
    let mut alone = Rates::default();
    for _ in 0..cycles {
        for (phase, slices) in Phase::ALL.into_iter().zip(&mut slices) {
            let pace = phase
                .is_half()
                .then(|| alone.median() * report::SHARE_WANTED / 2.0);
            for _ in 0..SLICES_RUN {
                let (sums, is_quiet) =
                    take_slice(phase, pace, &switch, &mut guests, &waits, slices)?;
                if phase == Phase::Alone {
                    alone.push(rate(&sums, &guests) * 1e6, is_quiet);
                }
            }
        }
        guests.cease(&switch)?;
    }
    let run_delay_ns = waits.so_far()?.run_delay_ns_since(begin);
    let units = attack.units_per_chain(args.ring, usize::from(args.ports));
    let samples = Phase::ALL.into_iter().zip(&slices);
    Ok(Round {
        attack,
        state: "",
        ping_pong_ns: [0.0; 2],
        issue_ticks: [0.0; 2],
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        run_delay_ms: run_delay_ns as f64 / 1e6,
        samples: samples
            .map(|(phase, slices)| sample_of(phase, slices, &guests, units))
            .collect(),
    })
}

fn take_slice(
    phase: Phase,
    pace: Option<f64>,
    switch: &Switch,
    guests: &mut Guests,
    waits: &Waits,
    slices: &mut Slices,
) -> anyhow::Result<(Sums, bool)> {
    let company = phase.company();
    let work = Work { company, pace };
    let ports_before = bed::port_counters(switch, guests.len());
    let waited_before = waits.so_far()?;
    let whole = guests.tally;
    guests.drive(work, LEAD_IN)?;
    if pace.is_some() {
        // The open loop begins anew.
        guests.settle(company)?;
    }
    let counters = || switch.worker_counters(WORKER).context("it runs");
    let (tally, before, begin) = (guests.tally, counters()?, guests.clock.now());
    guests.drive(work, SLICE)?;
    let ticks = guests.clock.now().wrapping_sub(begin);
    let (measured, after) = (guests.tally.since(&tally), counters()?);
    guests.settle(company)?;
    let is_quiet = waits.so_far()?.is_undisturbed_since(waited_before);
    let ports = bed::port_counters(switch, guests.len());
    slices.ports.resize(ports.len(), PortCounters::default());
    let changes = ports.iter().zip(&ports_before);
    for (sum, (after, before)) in slices.ports.iter_mut().zip(changes) {
        sum.merge(&after.since(before));
    }
    let of_port = |port: usize| after.ports[port].rx_frames - before.ports[port].rx_frames;
    let sums = Sums {
        slices: 1,
        ticks,
        tally: measured,
        worker: after.worker.since(&before.worker),
        pair_frames: of_port(B),
        attack_chains: of_port(A),
        whole: guests.tally.since(&whole),
    };
    slices.all.add(&sums);
    if is_quiet {
        slices.quiet.add(&sums);
    }
    Ok((sums, is_quiet))
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.slices += other.slices;
        self.ticks += other.ticks;
        self.tally.add(&other.tally);
        self.whole.add(&other.whole);
        self.pair_frames += other.pair_frames;
        self.attack_chains += other.attack_chains;
        let (mine, theirs) = (&mut self.worker, &other.worker);
        mine.turns += theirs.turns;
        mine.frames += theirs.frames;
        mine.busy_ticks += theirs.busy_ticks;
        mine.idle_ticks += theirs.idle_ticks;
        mine.exhausted += theirs.exhausted;
    }
}

/// Million frames per second that C received.
#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(sums: &Sums, guests: &Guests) -> f64 {
    let seconds = sums.ticks as f64 / guests.clock.ticks_per_second() as f64;
    sums.tally.received as f64 / seconds.max(f64::MIN_POSITIVE) / 1e6
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn sample_of(phase: Phase, slices: &Slices, guests: &Guests, units: f64) -> Sample {
    let Slices { all, quiet, ports } = slices;
    let counted = if quiet.slices > 0 { quiet } else { all };
    let ticks = counted.ticks as f64;
    let seconds = ticks / guests.clock.ticks_per_second() as f64;
    let (worker, tally) = (&counted.worker, &counted.tally);
    let per = |count: u64, of: u64| count as f64 / of.max(1) as f64;
    let driver_ticks = tally.pair_ticks + tally.company_ticks;
    let attack_chains_per_turn = per(counted.attack_chains, worker.turns);
    Sample {
        phase,
        slices: all.slices,
        quiet_slices: quiet.slices,
        mpps: rate(counted, guests),
        mpps_of_all: rate(all, guests),
        sent: all.whole.sent,
        received: all.whole.received,
        refused: all.whole.refused,
        skipped: all.whole.skipped,
        lost: all.whole.lost(),
        lost_in_quiet: quiet.whole.lost(),
        refused_in_quiet: quiet.whole.refused,
        offered_in_quiet: quiet.whole.sent + quiet.whole.refused,
        attack_mpps: counted.attack_chains as f64 / seconds / 1e6,
        worker: WorkerFigures {
            busy_share: worker.busy_ticks as f64 / ticks,
            idle_share: worker.idle_ticks as f64 / ticks,
            turns_per_second: worker.turns as f64 / seconds,
            busy_cycles_per_turn: per(worker.busy_ticks, worker.turns),
            busy_cycles_per_chain: per(worker.busy_ticks, worker.frames),
            pair_frames_per_turn: per(counted.pair_frames, worker.turns),
            attack_chains_per_turn,
            attack_units_per_turn: attack_chains_per_turn * units,
            exhausted_per_turn: per(worker.exhausted, worker.turns),
        },
        driver: DriverFigures {
            pair_share: per(tally.pair_ticks, driver_ticks),
            company_share: per(tally.company_ticks, driver_ticks),
            steps_per_second: tally.steps as f64 / seconds,
            strangers_per_frame: per(tally.strangers, tally.received),
        },
        drops: drops(ports),
    }
}

/// Drops by port and reason, the sinks' together, without those that are 0.
fn drops(ports: &[PortCounters]) -> BTreeMap<&'static str, BTreeMap<&'static str, u64>> {
    let mut drops: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for (guest, counters) in ports.iter().enumerate() {
        let port = match guest {
            A => "attacker",
            B => "b",
            C => "c",
            _ => "sinks",
        };
        for (reason, count) in counters.drops.iter().filter(|&(_, count)| count > 0) {
            *drops
                .entry(port)
                .or_default()
                .entry(reason.name())
                .or_insert(0) += count;
        }
    }
    drops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quiet_rates_are_preferred_and_old_ones_forgotten() {
        let mut rates = Rates::default();
        rates.push(1.0, false);
        assert_eq!(rates.median(), 1.0);
        rates.push(8.0, true);
        rates.push(2.0, false);
        assert_eq!(rates.median(), 8.0);
        (0..RATES_LEN).for_each(|_| rates.push(6.0, true));
        assert_eq!(rates.median(), 6.0);
        assert_eq!(rates.last.len(), RATES_LEN);
    }
}

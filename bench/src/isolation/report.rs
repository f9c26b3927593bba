//! What all rounds say: one row for each attack and state of the machine.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::bed::FRAME_BYTES;
use super::guests::Attack;
use super::{IsolationArgs, Phase, Round, Sample};
use crate::probe::MachineState;

/// What a neighbour is to keep of its rate alone.
pub(super) const SHARE_WANTED: f64 = 0.45;
/// Quiet slices of a phase in a round from which on its rate is judged.
const QUIET_MIN: u32 = 10;

/// Minimum, median, maximum.
type Spread = [f64; 3];

/// All rounds of an attack in one state.
#[derive(Debug, Serialize)]
struct Row {
    attack: Attack,
    state: &'static str,
    rounds: usize,
    alone_mpps: Spread,
    control_mpps: Spread,
    attacked_mpps: Spread,
    /// Round by round: attacked by alone, and by the control.
    share_of_alone: Spread,
    share_of_control: Spread,
    /// Whether the median of `share_of_alone` is what is wanted; `None` if a
    /// round had too few quiet slices.
    meets_share: Option<bool>,
    half_mpps: Spread,
    /// In all slices.
    half_sent: u64,
    half_lost: u64,
    /// In slices in which no thread had to wait: what counts.
    half_offered_in_quiet: u64,
    /// The same without an attack: what the machine loses by itself.
    half_alone_lost_in_quiet: u64,
    half_alone_offered_in_quiet: u64,
    half_lost_in_quiet: u64,
    /// Frames that the generator itself was too late for: not counted as lost.
    half_skipped: u64,
    /// None of `half_offered_in_quiet` was lost; `None` as above.
    meets_loss: Option<bool>,
    /// Ticks that the worker spends for each work unit of the attacker: what a
    /// turn costs beyond the pair's frames at the price they have alone.
    attack_cycles_per_unit: Option<f64>,
    /// Ticks for each of the pair's frames, alone.
    pair_cycles_per_frame: f64,
    /// Medians, by phase.
    phases: Vec<PhaseRow>,
}

/// Medians of one phase of a row.
#[derive(Debug, Serialize)]
struct PhaseRow {
    phase: Phase,
    mpps: f64,
    attack_mpps: f64,
    worker_busy_share: f64,
    worker_busy_cycles_per_turn: f64,
    pair_frames_per_turn: f64,
    attack_chains_per_turn: f64,
    attack_units_per_turn: f64,
    exhausted_per_turn: f64,
    driver_company_share: f64,
    driver_steps_per_second: f64,
    strangers_per_frame: f64,
    /// Sums over all rounds.
    slices: u32,
    quiet_slices: u32,
    lost: u64,
    /// Sum over all rounds, by port and reason.
    drops: BTreeMap<&'static str, BTreeMap<&'static str, u64>>,
}

/// The document.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: u32,
    machine: MachineState,
    frame_bytes: u32,
    ring: u16,
    ports: u16,
    seconds: f64,
    share_wanted: f64,
    rows: Vec<Row>,
    rounds: Vec<Round>,
}

impl Report {
    pub(super) fn new(args: &IsolationArgs, machine: MachineState, rounds: Vec<Round>) -> Self {
        let mut rows = Vec::new();
        for &attack in &args.attack {
            for state in ["NEAR", "FAR", super::MIXED] {
                let of = |round: &&Round| round.state == state && round.attack == attack;
                let rounds: Vec<&Round> = rounds.iter().filter(of).collect();
                if !rounds.is_empty() {
                    rows.push(Row::of(attack, state, &rounds));
                }
            }
        }
        Self {
            schema: 1,
            machine,
            frame_bytes: FRAME_BYTES,
            ring: args.ring,
            ports: args.ports,
            seconds: args.seconds,
            share_wanted: SHARE_WANTED,
            rows,
            rounds,
        }
    }
}

const fn verdict(is_met: Option<bool>) -> &'static str {
    match is_met {
        Some(true) => "met",
        Some(false) => "MISSED",
        None => "NOT JUDGED (too few quiet slices)",
    }
}

fn spread(figures: impl Iterator<Item = f64>) -> Spread {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    [
        figures[0],
        figures[figures.len() / 2],
        figures[figures.len() - 1],
    ]
}

impl Row {
    fn of(attack: Attack, state: &'static str, rounds: &[&Round]) -> Self {
        let of_phase = |phase| rounds.iter().map(move |round| round.of_phase(phase));
        let mpps = |phase| spread(of_phase(phase).map(|sample| sample.mpps));
        let share = |phase| spread(rounds.iter().map(|round| round.share_of(phase)));
        let half = || of_phase(Phase::Half);
        let share_of_alone = share(Phase::Alone);
        let judged = [Phase::Alone, Phase::Attacked];
        let is_judged = judged
            .into_iter()
            .flat_map(of_phase)
            .all(|sample| sample.quiet_slices >= QUIET_MIN);
        let alone = of_phase(Phase::Alone).map(|sample| sample.worker.busy_cycles_per_chain);
        let pair_cycles_per_frame = spread(alone)[1];
        let costs: Vec<f64> = of_phase(Phase::Attacked)
            .filter(|sample| sample.worker.attack_units_per_turn > 0.0)
            .map(|sample| {
                let worker = &sample.worker;
                let pair = worker.pair_frames_per_turn * pair_cycles_per_frame;
                (worker.busy_cycles_per_turn - pair) / worker.attack_units_per_turn
            })
            .collect();
        let costs = (!costs.is_empty()).then(|| spread(costs.into_iter()));
        Self {
            attack,
            state,
            rounds: rounds.len(),
            alone_mpps: mpps(Phase::Alone),
            control_mpps: mpps(Phase::Control),
            attacked_mpps: mpps(Phase::Attacked),
            share_of_alone,
            share_of_control: share(Phase::Control),
            meets_share: is_judged.then_some(share_of_alone[1] >= SHARE_WANTED),
            half_mpps: mpps(Phase::Half),
            half_sent: half().map(|sample| sample.sent).sum(),
            half_lost: half().map(|sample| sample.lost).sum(),
            half_offered_in_quiet: half().map(|sample| sample.offered_in_quiet).sum(),
            half_lost_in_quiet: half().map(|sample| sample.lost_in_quiet).sum(),
            half_alone_lost_in_quiet: of_phase(Phase::HalfAlone)
                .map(|sample| sample.lost_in_quiet)
                .sum(),
            half_alone_offered_in_quiet: of_phase(Phase::HalfAlone)
                .map(|sample| sample.offered_in_quiet)
                .sum(),
            half_skipped: half().map(|sample| sample.skipped).sum(),
            // Half of a rate that was not measured says nothing.
            meets_loss: of_phase(Phase::Attacked)
                .chain(half())
                .all(|sample| sample.quiet_slices >= QUIET_MIN)
                .then(|| half().all(|sample| sample.lost_in_quiet == 0)),
            attack_cycles_per_unit: costs.map(|[_, median, _]| median),
            pair_cycles_per_frame,
            phases: Phase::ALL
                .into_iter()
                .map(|phase| PhaseRow::of(phase, &of_phase(phase).collect::<Vec<_>>()))
                .collect(),
        }
    }

    /// Why the neighbour has less than is wanted, in the worker's own figures.
    fn explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [_, share, _] = self.share_of_alone;
        let share_verdict = verdict(self.meets_share);
        let attacked = self.phases.iter().find(|row| row.phase == Phase::Attacked);
        let attacked = attacked.expect("there is a row for each phase");
        let pair = attacked.pair_frames_per_turn * self.pair_cycles_per_frame;
        let cost = self.attack_cycles_per_unit.unwrap_or(0.0);
        writeln!(
            f,
            "{} {}: {:.0} % wanted, {share_verdict} with {:.0} % of alone ({:.0} % of the control). The \
             worker is busy for {:.0} % of the time; a turn is {:.0} frames of B ({:.0} cycles at \
             the {:.0} that each costs alone) and {:.0} units of A ({:.0} cycles, {:.1} a unit), so \
             A has {:.0} % of it. The driver thread spends {:.0} % on A and the sinks, and C \
             receives {:.2} frames of A for each of B.",
            self.attack.name(),
            self.state,
            SHARE_WANTED * 100.0,
            share * 100.0,
            self.share_of_control[1] * 100.0,
            attacked.worker_busy_share * 100.0,
            attacked.pair_frames_per_turn,
            pair,
            self.pair_cycles_per_frame,
            attacked.attack_units_per_turn,
            attacked.attack_units_per_turn * cost,
            cost,
            100.0 * (1.0 - pair / attacked.worker_busy_cycles_per_turn).max(0.0),
            attacked.driver_company_share * 100.0,
            attacked.strangers_per_frame,
        )?;
        writeln!(
            f,
            "  at half of the share that is wanted: loss 0 wanted, {}: {} of {} frames lost in quiet slices; in all \
             slices {} of {}; {} not offered because the driver thread was away; without an \
             attack the machine lost {} of {} in quiet slices",
            verdict(self.meets_loss),
            self.half_lost_in_quiet,
            self.half_offered_in_quiet,
            self.half_lost,
            self.half_sent,
            self.half_skipped,
            self.half_alone_lost_in_quiet,
            self.half_alone_offered_in_quiet,
        )
    }
}

impl PhaseRow {
    fn of(phase: Phase, samples: &[&Sample]) -> Self {
        let median = |figure: fn(&Sample) -> f64| spread(samples.iter().map(|s| figure(s)))[1];
        let mut drops: BTreeMap<_, BTreeMap<_, u64>> = BTreeMap::new();
        for sample in samples {
            for (&port, reasons) in &sample.drops {
                for (&reason, count) in reasons {
                    *drops.entry(port).or_default().entry(reason).or_insert(0) += count;
                }
            }
        }
        Self {
            phase,
            mpps: median(|s| s.mpps),
            attack_mpps: median(|s| s.attack_mpps),
            worker_busy_share: median(|s| s.worker.busy_share),
            worker_busy_cycles_per_turn: median(|s| s.worker.busy_cycles_per_turn),
            pair_frames_per_turn: median(|s| s.worker.pair_frames_per_turn),
            attack_chains_per_turn: median(|s| s.worker.attack_chains_per_turn),
            attack_units_per_turn: median(|s| s.worker.attack_units_per_turn),
            exhausted_per_turn: median(|s| s.worker.exhausted_per_turn),
            driver_company_share: median(|s| s.driver.company_share),
            driver_steps_per_second: median(|s| s.driver.steps_per_second),
            strangers_per_frame: median(|s| s.driver.strangers_per_frame),
            lost: samples.iter().map(|s| s.lost).sum(),
            slices: samples.iter().map(|s| s.slices).sum(),
            quiet_slices: samples.iter().map(|s| s.quiet_slices).sum(),
            drops,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine)?;
        writeln!(
            f,
            "isolation: B -> C {} B, split rings of {}, broadcasts to {} ports, one worker, one \
             thread drives all guests, {} s each in slices of 2.5 ms, \
             of which those count in which no thread waited (quiet); min med max",
            self.frame_bytes, self.ring, self.ports, self.seconds
        )?;
        writeln!(
            f,
            "{:>9} {:>6} {:>6} {:>17} {:>17} {:>17} {:>11} {:>13} {:>9} {:>9} {:>9}",
            "attack",
            "state",
            "rounds",
            "alone Mpps",
            "control Mpps",
            "attacked Mpps",
            "% of alone",
            "% of control",
            "half Mpps",
            "lost",
            "in all"
        )?;
        let three = |[min, median, max]: Spread| format!("{min:.2} {median:.2} {max:.2}");
        let percent = |[min, median, max]: Spread| {
            format!(
                "{:.0} {:.0} {:.0}",
                min * 100.0,
                median * 100.0,
                max * 100.0
            )
        };
        for row in &self.rows {
            writeln!(
                f,
                "{:>9} {:>6} {:>6} {:>17} {:>17} {:>17} {:>11} {:>13} {:>9.2} {:>9} {:>9}",
                row.attack.name(),
                row.state,
                row.rounds,
                three(row.alone_mpps),
                three(row.control_mpps),
                three(row.attacked_mpps),
                percent(row.share_of_alone),
                percent(row.share_of_control),
                row.half_mpps[1],
                row.half_lost_in_quiet,
                row.half_lost,
            )?;
        }
        writeln!(
            f,
            "\n{:>9} {:>6} {:>10} {:>7} {:>8} {:>6} {:>11} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8} {:>9}",
            "attack",
            "state",
            "phase",
            "Mpps",
            "A Mpps",
            "busy %",
            "cycles/turn",
            "B/turn",
            "A/turn",
            "units",
            "exhausted",
            "driver %",
            "Mstep/s",
            "quiet"
        )?;
        for row in &self.rows {
            for phase in &row.phases {
                writeln!(
                    f,
                    "{:>9} {:>6} {:>10} {:>7.2} {:>8.3} {:>6.1} {:>11.0} {:>8.1} {:>8.1} {:>8.1} \
                     {:>9.2} {:>8.1} {:>8.3} {:>9}",
                    row.attack.name(),
                    row.state,
                    phase_name(phase.phase),
                    phase.mpps,
                    phase.attack_mpps,
                    phase.worker_busy_share * 100.0,
                    phase.worker_busy_cycles_per_turn,
                    phase.pair_frames_per_turn,
                    phase.attack_chains_per_turn,
                    phase.attack_units_per_turn,
                    phase.exhausted_per_turn,
                    phase.driver_company_share * 100.0,
                    phase.driver_steps_per_second / 1e6,
                    format!("{}/{}", phase.quiet_slices, phase.slices),
                )?;
            }
        }
        writeln!(f, "\ndrops, all rounds together:")?;
        for row in &self.rows {
            for phase in &row.phases {
                for (port, reasons) in &phase.drops {
                    for (reason, count) in reasons {
                        let name = phase_name(phase.phase);
                        let (attack, state) = (row.attack.name(), row.state);
                        writeln!(
                            f,
                            "{attack:>9} {state:>6} {name:>8} {port:>9} {reason:>16} {count:>12}"
                        )?;
                    }
                }
            }
        }
        writeln!(f)?;
        self.rows.iter().try_for_each(|row| row.explain(f))
    }
}

const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Alone => "alone",
        Phase::Control => "control",
        Phase::Attacked => "attacked",
        Phase::Half => "half",
        Phase::HalfAlone => "half alone",
    }
}

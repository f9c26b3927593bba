//! The engine alone: guests of this process, no sockets, no kernel in between.
//!
//! Two guests with rings over memfd memory; one generator thread runs the
//! driver halves of both, one worker forwards. What is measured is what the
//! worker spends: clock ticks of visits that found work, divided by frames.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use pollux_datapath::{
    Budget, PacketBudget, Plan, PlannedMode, PortPlan, Switch, SwitchConfig, WorkerPlan,
};
use pollux_packet::BurstLimit;
use pollux_sys::{Clock, pause};
use pollux_testkit::{Guest, GuestSpec};
use pollux_virtio::driver::ChainShape;
use serde::Serialize;

use crate::probe::MachineState;
use crate::rings::RingArgs;

/// Options of `engine`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// Bytes of a frame, without the virtio-net header; may be repeated.
    #[arg(long, default_values_t = [64, 1518])]
    size: Vec<u32>,
    /// Most frames in a burst; may be repeated.
    #[arg(long, default_values_t = [1, 4, 16, 64])]
    batch: Vec<u32>,
    /// Descriptors in each ring.
    #[arg(long, default_value_t = 1024)]
    ring: u16,
    /// How destinations are found.
    #[arg(long, value_enum, default_value_t = ModeArg::Learn)]
    mode: ModeArg,
    /// Both guests send.
    #[arg(long)]
    both: bool,
    #[command(flatten)]
    rings: RingArgs,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Measurements of each case, taken in turn with the others.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Core of the worker.
    #[arg(long, default_value_t = 0)]
    worker_core: usize,
    /// Core of the generator.
    #[arg(long, default_value_t = 1)]
    generator_core: usize,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum ModeArg {
    Learn,
    Xconnect,
}

/// One case: what is sent, and in what bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Case {
    frame_bytes: u32,
    batch: u32,
}

/// What one measurement gave.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    /// Distance of the cores before and after: a sample counts for a state only
    /// if both agree.
    ping_pong_ns: [f64; 2],
    /// Ticks of a step of independent instructions before and after: high when
    /// somebody shares the worker's core.
    issue_ticks: [f64; 2],
    mpps: f64,
    gbps: f64,
    cycles_per_packet: f64,
    packets_per_batch: f64,
    dropped: u64,
}

/// All measurements of a case in one machine state.
#[derive(Debug, Serialize)]
struct CaseReport {
    case: Case,
    state: &'static str,
    samples: Vec<Sample>,
    cycles_per_packet_min: f64,
    cycles_per_packet_median: f64,
    cycles_per_packet_max: f64,
    /// Samples before and after which nobody shared the worker's core, and the
    /// median of these.
    quiet_samples: usize,
    quiet_cycles_per_packet_median: Option<f64>,
    mpps_median: f64,
    packets_per_batch_median: f64,
    issue_ticks_median: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    machine: MachineState,
    mode: ModeArg,
    ring: u16,
    both: bool,
    rings: RingArgs,
    seconds: f64,
    cases: Vec<CaseReport>,
}

/// Runs every case in turn, `rounds` times, and prints the report.
///
/// # Errors
/// If cores are missing or a guest gets a frame that it should not.
pub(crate) fn run(args: &EngineArgs) -> anyhow::Result<()> {
    let cores = pollux_sys::available_cores();
    ensure!(
        cores.contains(&args.worker_core) && cores.contains(&args.generator_core),
        "engine bench: cores {} and {} are asked for, this process has {cores:?}; \
         give others with --worker-core and --generator-core",
        args.worker_core,
        args.generator_core,
    );
    if args.worker_core == args.generator_core {
        eprintln!("worker and generator share a core: the figures are worth little");
    }
    let cases: Vec<Case> = args
        .size
        .iter()
        .flat_map(|&frame_bytes| {
            args.batch
                .iter()
                .map(move |&batch| Case { frame_bytes, batch })
        })
        .collect();
    let mut samples: Vec<Vec<(&'static str, Sample)>> = vec![Vec::new(); cases.len()];
    let mut machine = MachineState::probe()?;
    for _ in 0..args.rounds {
        for (case, samples) in cases.iter().zip(&mut samples) {
            let measured = measure(args, *case)?;
            let after = MachineState::probe()?;
            let same = machine.distance == after.distance;
            let state = if same { after.distance.name() } else { "MIXED" };
            samples.push((
                state,
                Sample {
                    ping_pong_ns: [machine.ping_pong_ns(), after.ping_pong_ns()],
                    issue_ticks: [machine.issue_ticks, after.issue_ticks],
                    ..measured
                },
            ));
            machine = after;
        }
    }
    let fastest = samples
        .iter()
        .flatten()
        .flat_map(|(_, sample)| sample.issue_ticks)
        .fold(f64::INFINITY, f64::min);
    let report = Report {
        schema: 1,
        machine,
        mode: args.mode,
        ring: args.ring,
        both: args.both,
        rings: args.rings,
        seconds: args.seconds,
        cases: cases
            .iter()
            .zip(samples)
            .flat_map(|(case, samples)| by_state(*case, samples, fastest))
            .collect(),
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{report}");
    }
    Ok(())
}

/// A sample is quiet if its steps of independent instructions took at most this
/// much longer than the fastest of the run.
const QUIET: f64 = 1.05;

fn by_state(case: Case, samples: Vec<(&'static str, Sample)>, fastest: f64) -> Vec<CaseReport> {
    let mut states: Vec<_> = samples.iter().map(|(state, _)| *state).collect();
    states.sort_unstable();
    states.dedup();
    let report = |state: &'static str| {
        let samples: Vec<Sample> = samples
            .iter()
            .filter(|(s, _)| *s == state)
            .map(|(_, s)| *s)
            .collect();
        let of = |figure: fn(&Sample) -> f64| {
            let mut figures: Vec<f64> = samples.iter().map(figure).collect();
            figures.sort_by(f64::total_cmp);
            figures
        };
        let cycles = of(|s| s.cycles_per_packet);
        let mut quiet: Vec<f64> = samples
            .iter()
            .filter(|s| s.issue_ticks.iter().all(|&ticks| ticks <= fastest * QUIET))
            .map(|s| s.cycles_per_packet)
            .collect();
        quiet.sort_by(f64::total_cmp);
        let median = |figures: &[f64]| figures[figures.len() / 2];
        CaseReport {
            case,
            state,
            cycles_per_packet_min: cycles[0],
            cycles_per_packet_median: median(&cycles),
            cycles_per_packet_max: cycles[cycles.len() - 1],
            quiet_samples: quiet.len(),
            quiet_cycles_per_packet_median: quiet.get(quiet.len() / 2).copied(),
            mpps_median: median(&of(|s| s.mpps)),
            packets_per_batch_median: median(&of(|s| s.packets_per_batch)),
            issue_ticks_median: median(&of(|s| (s.issue_ticks[0] + s.issue_ticks[1]) / 2.0)),
            samples,
        }
    };
    states.into_iter().map(report).collect()
}

/// One guest with its addresses.
struct Side {
    guest: Guest,
    received: u64,
}

const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
const PORTS: [&str; 2] = ["a", "b"];
/// Before anything is counted.
const WARM_UP: Duration = Duration::from_millis(200);

/// Starts a switch with two guests, lets it run, and counts.
fn measure(args: &EngineArgs, case: Case) -> anyhow::Result<Sample> {
    let spec = GuestSpec {
        ring_size: args.ring,
        features: args.rings.features(),
        base: args.rings.base(),
        buffer_bytes: 2048.max(case.frame_bytes + 12).next_multiple_of(64),
        ..GuestSpec::default()
    };
    let (switch, mut sides) = start(args, case, spec)?;
    let clock = Clock::calibrate();
    let (mpps, gbps, counted) = std::thread::scope(|scope| {
        let generator = scope.spawn(|| -> anyhow::Result<_> {
            pollux_sys::pin_current_thread(args.generator_core)?;
            learn(&mut sides)?;
            generate(args, case, &mut sides, WARM_UP)?;
            let before = switch
                .worker_counters("w0")
                .context("the worker is there")?;
            let received_before: u64 = sides.iter().map(|side| side.received).sum();
            let begin = clock.now();
            generate(
                args,
                case,
                &mut sides,
                Duration::from_secs_f64(args.seconds),
            )?;
            let ns = clock.to_ns(clock.now().wrapping_sub(begin));
            let received: u64 =
                sides.iter().map(|side| side.received).sum::<u64>() - received_before;
            let after = switch
                .worker_counters("w0")
                .context("the worker is there")?;
            #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
            let mpps = received as f64 * 1e3 / ns as f64;
            let gbps = mpps * f64::from(case.frame_bytes) * 8.0 / 1e3;
            let dropped = after.total().tx_drops() - before.total().tx_drops();
            Ok((mpps, gbps, (after.worker.since(&before.worker), dropped)))
        });
        generator.join().expect("the generator does not panic")
    })?;
    let (worker, dropped) = counted;
    let (Some(cycles_per_packet), Some(packets_per_batch)) =
        (worker.cycles_per_packet(), worker.packets_per_batch())
    else {
        bail!("the worker forwarded nothing");
    };
    Ok(Sample {
        ping_pong_ns: [0.0; 2],
        issue_ticks: [0.0; 2],
        mpps,
        gbps,
        cycles_per_packet,
        packets_per_batch,
        dropped,
    })
}

/// A budget that ends each burst after `batch` frames; at the longest burst
/// there is, the default.
fn budget(batch: u32) -> Budget {
    if batch >= u32::from(BurstLimit::MAX.frames) {
        return Budget::default();
    }
    Budget {
        packets: PacketBudget::Units(batch),
        ..Budget::default()
    }
}

fn start(args: &EngineArgs, case: Case, spec: GuestSpec) -> anyhow::Result<(Switch, Vec<Side>)> {
    let switch = Switch::new(SwitchConfig::default())?;
    let budget = budget(case.batch);
    let plan = Plan {
        mode: match args.mode {
            ModeArg::Learn => PlannedMode::Learn,
            ModeArg::Xconnect => {
                PlannedMode::CrossConnect(vec![(PORTS[0].to_owned(), PORTS[1].to_owned())])
            }
        },
        workers: vec![WorkerPlan {
            name: "w0".to_owned(),
            core: Some(args.worker_core),
        }],
        ports: PORTS
            .iter()
            .map(|name| PortPlan {
                budget,
                ..PortPlan::new(name)
            })
            .collect(),
        ..Plan::default()
    };
    switch.apply(&plan)?;
    let mut sides = Vec::new();
    for (index, name) in PORTS.iter().enumerate() {
        let mut guest = Guest::new(spec).expect("guest memory");
        guest.tx.prepare(|head, span| {
            let frame = frame(MACS[1 - index], MACS[index], span.len(), head);
            span.write(&frame);
        });
        guest.tx.ring().suppress_calls();
        guest.rx.ring().suppress_calls();
        let (tx, rx) = guest.device();
        let port = switch.port(name).context("the port was planned")?;
        port.start_tx(Box::new(rx)).expect("it was just planned");
        port.start_rx(Box::new(tx)).expect("it was just planned");
        sides.push(Side { guest, received: 0 });
    }
    Ok((switch, sides))
}

/// An Ethernet frame of experimental type (IEEE 802 local, 0x88B5).
fn frame(dst: [u8; 6], src: [u8; 6], len: u32, seed: u16) -> Vec<u8> {
    let mut frame = vec![0; len as usize];
    frame[..6].copy_from_slice(&dst);
    frame[6..12].copy_from_slice(&src);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    for (byte, value) in frame[14..].iter_mut().zip(seed..) {
        *byte = value.to_le_bytes()[0];
    }
    frame
}

/// Each guest sends one frame and both are seen, so that both are learned.
fn learn(sides: &mut [Side]) -> anyhow::Result<()> {
    for sender in 0..sides.len() {
        for side in sides.iter_mut() {
            side.guest.rx.refill();
            side.guest.rx.publish();
        }
        let frame = frame(MACS[1 - sender], MACS[sender], 60, 0);
        sides[sender].guest.tx.send(&frame, ChainShape::JOINED)?;
        sides[sender].guest.tx.publish();
        let deadline = Instant::now() + Duration::from_secs(5);
        let receiver = &mut sides[1 - sender].guest.rx;
        let mut seen = false;
        while !seen {
            receiver.receive(1, |received| seen = received.to_vec() == frame)?;
            ensure!(
                Instant::now() < deadline,
                "a frame did not arrive within 5 s"
            );
        }
    }
    Ok(())
}

/// Sends as fast as buffers come back, for so long.
fn generate(
    args: &EngineArgs,
    case: Case,
    sides: &mut [Side],
    time: Duration,
) -> anyhow::Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        for _ in 0..64 {
            let mut idle = true;
            for (index, side) in sides.iter_mut().enumerate() {
                if index == 0 || args.both {
                    side.guest.tx.reclaim()?;
                    if side.guest.tx.send_batch(64, case.frame_bytes, |_| {}) > 0 {
                        side.guest.tx.publish();
                        idle = false;
                    }
                }
                let mut bytes = 0;
                let frames = side
                    .guest
                    .rx
                    .receive(64, |received| bytes += received.len())?;
                ensure!(
                    bytes == frames * case.frame_bytes,
                    "a frame has a wrong length"
                );
                if frames > 0 {
                    side.received += u64::from(frames);
                    side.guest.rx.refill();
                    side.guest.rx.publish();
                    idle = false;
                }
            }
            if idle {
                pause();
            }
        }
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine)?;
        writeln!(
            f,
            "engine: {:?}, ring {}, {:?}, both directions {}, {} s a sample, 1 worker",
            self.mode,
            self.ring,
            self.rings.features(),
            self.both,
            self.seconds
        )?;
        writeln!(
            f,
            "{:>6} {:>6} {:>6} {:>8} {:>9} {:>9} {:>25} {:>11} {:>9}",
            "bytes",
            "batch",
            "state",
            "samples",
            "Mpps",
            "Gbit/s",
            "cycles/packet min-med-max",
            "quiet n-med",
            "pkt/batch"
        )?;
        for case in &self.cases {
            let gbps = case.mpps_median * f64::from(case.case.frame_bytes) * 8.0 / 1e3;
            let quiet = case
                .quiet_cycles_per_packet_median
                .map_or_else(|| "-".to_owned(), |cycles| format!("{cycles:.1}"));
            writeln!(
                f,
                "{:>6} {:>6} {:>6} {:>8} {:>9.2} {:>9.2} {:>9.1} {:>7.1} {:>7.1} {:>5} {:>5} {:>9.1}",
                case.case.frame_bytes,
                case.case.batch,
                case.state,
                case.samples.len(),
                case.mpps_median,
                gbps,
                case.cycles_per_packet_min,
                case.cycles_per_packet_median,
                case.cycles_per_packet_max,
                case.quiet_samples,
                quiet,
                case.packets_per_batch_median,
            )?;
        }
        Ok(())
    }
}

//! What the demo says at its end.

use std::fmt;

use hdrhistogram::Histogram;
use pollux_datapath::WorkerCounters;
use serde::Serialize;

use super::guests::Phase;
use super::machine::Disturbance;
use super::verify::Tally;

/// Version of the JSON form.
const SCHEMA: u32 = 1;
/// Longest round trip of a cache line between cores that are near.
const NEAR_MAX_NS: u64 = 250;

/// Percentiles of the latency, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LatencyNs {
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
}

/// The result, as it is printed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    schema: u32,
    /// Million frames a second that were received, all guests together.
    pub(crate) mpps: f64,
    /// The same in 10^9 bits a second of frames, without FCS and gaps.
    pub(crate) gbps: f64,
    /// Clock ticks of the worker's visits that found work, for each frame.
    pub(crate) cycles_per_packet: Option<f64>,
    /// Frames in each burst of the worker.
    pub(crate) packets_per_batch: Option<f64>,
    /// Part of the worker's time in visits that found work: below about 90 the
    /// guests were the slower side, and the worker could do more.
    worker_busy_percent: Option<f64>,
    /// `None` if no frame came in that phase.
    pub(crate) latency_ns: Option<LatencyNs>,
    /// What the latency is.
    latency_method: String,
    /// Frames a second while the latency was measured.
    latency_pps: u64,
    /// Frames of which the latency was measured.
    latency_frames: u64,
    pub(crate) lost: u64,
    pub(crate) reordered: u64,
    pub(crate) duplicated: u64,
    pub(crate) corrupt: u64,
    /// Frames sent in the whole run, each of which was judged.
    frames: u64,
    /// Frames of which the whole payload was compared.
    payloads_compared: u64,
    guests: u16,
    /// Bytes of a frame, without FCS.
    size: u32,
    /// Descriptors of each ring.
    ring: u16,
    /// Frames of each guest under way.
    window: u64,
    /// Length of the window over which rates and cycles were taken.
    seconds: f64,
    worker_core: Option<usize>,
    guest_core: Option<usize>,
    /// Round trip of a cache line between these cores, in ns.
    core_round_trip_ns: Option<u64>,
    /// What the figures are worth.
    pub(crate) remarks: Vec<String>,
}

/// How the demo was set up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) guests: u16,
    pub(crate) size: u32,
    pub(crate) ring: u16,
    pub(crate) window: u64,
    pub(crate) worker_core: Option<usize>,
    pub(crate) guest_core: Option<usize>,
    pub(crate) core_round_trip_ns: Option<u64>,
    pub(crate) is_tsc: bool,
}

/// What was measured.
#[derive(Debug)]
pub(crate) struct Measured {
    /// The closed loop.
    pub(crate) saturated: Phase,
    /// The worker, in the same window.
    pub(crate) worker: WorkerCounters,
    /// The open loop, and its rate in frames a second.
    pub(crate) paced: Phase,
    pub(crate) pps: u64,
    pub(crate) latency: Histogram<u64>,
    /// The whole run.
    pub(crate) tally: Tally,
    /// The guests' thread, both loops.
    pub(crate) disturbance: Disturbance,
    /// A signal ended it.
    pub(crate) is_interrupted: bool,
}

impl Report {
    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    pub(crate) fn new(setup: &Setup, measured: &Measured) -> Self {
        let Measured {
            saturated, tally, ..
        } = measured;
        let mpps = saturated.received as f64 * 1e3 / saturated.ns.max(1) as f64;
        let latency = &measured.latency;
        let at = |quantile| latency.value_at_quantile(quantile);
        Self {
            schema: SCHEMA,
            mpps: round(mpps, 3),
            gbps: round(mpps * f64::from(setup.size) * 8.0 / 1e3, 3),
            cycles_per_packet: measured.worker.cycles_per_packet().map(|c| round(c, 1)),
            packets_per_batch: measured.worker.packets_per_batch().map(|p| round(p, 1)),
            worker_busy_percent: busy_percent(&measured.worker),
            latency_ns: (!latency.is_empty()).then(|| LatencyNs {
                p50: at(0.5),
                p90: at(0.9),
                p99: at(0.99),
            }),
            latency_method: format!(
                "open loop at {} frames/s after the closed loop: from before the sender \
                 publishes a frame until the receiver's poll finds it; one thread polls all \
                 guests, and its own pauses delay no frame that was not sent yet",
                measured.pps
            ),
            latency_pps: measured.pps,
            latency_frames: latency.len(),
            lost: tally.lost,
            reordered: tally.reordered,
            duplicated: tally.duplicated,
            corrupt: tally.corrupt,
            frames: tally.sent,
            payloads_compared: tally.samples,
            guests: setup.guests,
            size: setup.size,
            ring: setup.ring,
            window: setup.window,
            seconds: round(saturated.ns as f64 / 1e9, 3),
            worker_core: setup.worker_core,
            guest_core: setup.guest_core,
            core_round_trip_ns: setup.core_round_trip_ns,
            remarks: remarks(setup, measured),
        }
    }

    /// The JSON form, in one line.
    ///
    /// # Errors
    /// Never: there is nothing in it that JSON cannot say.
    pub(crate) fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn busy_percent(worker: &WorkerCounters) -> Option<f64> {
    let ticks = worker.busy_ticks + worker.idle_ticks;
    (ticks != 0).then(|| round(worker.busy_ticks as f64 * 100.0 / ticks as f64, 1))
}

fn round(value: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (value * factor).round() / factor
}

fn remarks(setup: &Setup, measured: &Measured) -> Vec<String> {
    let mut remarks = Vec::new();
    if setup.guest_core.is_none() {
        remarks.push("worker and guests share one core: figures are worth little".to_owned());
    }
    if cfg!(debug_assertions) {
        remarks.push(
            "built without optimisation: use cargo run --release, figures are worth little"
                .to_owned(),
        );
    }
    if !setup.is_tsc {
        remarks
            .push("no invariant TSC: cycles are nanoseconds of the kernel's clock here".to_owned());
    }
    if setup.core_round_trip_ns.is_some_and(|ns| ns > NEAR_MAX_NS) {
        remarks.push(
            "the two cores are far apart just now: near ones forward about twice as much"
                .to_owned(),
        );
    }
    let Disturbance {
        steal_ms,
        involuntary_switches,
    } = measured.disturbance;
    if steal_ms > 0 {
        remarks.push(format!(
            "the hypervisor took {steal_ms} ms from this machine's cores during the run"
        ));
    }
    if involuntary_switches > 0 && setup.guest_core.is_some() {
        remarks.push(format!(
            "the kernel took the core from the guests' thread {involuntary_switches} times"
        ));
    }
    if measured.is_interrupted {
        remarks.push("interrupted: the window is shorter than was asked for".to_owned());
    }
    if measured.saturated.is_stalled || measured.paced.is_stalled {
        remarks.push("the traffic stopped: no frame arrived for 2 s".to_owned());
    }
    remarks
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = |figure: Option<f64>, digits: usize| {
            figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.digits$}"))
        };
        let core = |core: Option<usize>| {
            core.map_or_else(|| "not pinned".to_owned(), |core| format!("core {core}"))
        };
        writeln!(
            f,
            "pollux demo: {} guests, {} bytes, {:.1} s closed loop, ring {}, window {}",
            self.guests, self.size, self.seconds, self.ring, self.window
        )?;
        writeln!(f, "  rate         {:>10.2} Mpps", self.mpps)?;
        writeln!(f, "               {:>10.2} Gbit/s", self.gbps)?;
        writeln!(
            f,
            "  worker       {:>10} cycles/packet (TSC), {} packets/batch, {} % busy",
            known(self.cycles_per_packet, 1),
            known(self.packets_per_batch, 1),
            known(self.worker_busy_percent, 0)
        )?;
        match self.latency_ns {
            Some(LatencyNs { p50, p90, p99 }) => writeln!(
                f,
                "  latency      p50 {} us, p90 {} us, p99 {} us (open loop, {} frames/s)",
                us(p50),
                us(p90),
                us(p99),
                self.latency_pps
            )?,
            None => writeln!(f, "  latency      not measured")?,
        }
        writeln!(
            f,
            "  frames       {} sent: {} lost, {} reordered, {} duplicated, {} corrupt \
             ({} payloads compared)",
            self.frames,
            self.lost,
            self.reordered,
            self.duplicated,
            self.corrupt,
            self.payloads_compared
        )?;
        write!(
            f,
            "  cores        worker {}, guests {}",
            core(self.worker_core),
            core(self.guest_core)
        )?;
        if let Some(ns) = self.core_round_trip_ns {
            write!(f, ", cache line there and back {ns} ns")?;
        }
        for remark in &self.remarks {
            write!(f, "\n  remark       {remark}")?;
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "a time for people")]
fn us(ns: u64) -> String {
    format!("{:.2}", ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETUP: Setup = Setup {
        guests: 2,
        size: 64,
        ring: 1024,
        window: 512,
        worker_core: Some(0),
        guest_core: Some(1),
        core_round_trip_ns: Some(480),
        is_tsc: true,
    };

    fn measured() -> Measured {
        let phase = Phase {
            received: 40_000_000,
            ns: 2_000_000_000,
            is_stalled: false,
        };
        let mut latency = Histogram::new_with_bounds(1, 1_000_000, 3).unwrap();
        for ns in 1..=100 {
            latency.record(ns).unwrap();
        }
        Measured {
            saturated: phase,
            worker: WorkerCounters {
                batches: 10,
                frames: 500,
                busy_ticks: 25_000,
                idle_ticks: 75_000,
                ..WorkerCounters::default()
            },
            paced: phase,
            pps: 1_000_000,
            latency,
            tally: Tally {
                sent: 7,
                received: 7,
                ..Tally::default()
            },
            disturbance: Disturbance::default(),
            is_interrupted: false,
        }
    }

    #[test]
    fn the_json_has_what_is_promised() {
        let text = Report::new(&SETUP, &measured()).to_json().unwrap();
        assert!(!text.contains('\n'));
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(json["mpps"], 20.0);
        assert_eq!(json["gbps"], 10.24);
        assert_eq!(json["cycles_per_packet"], 50.0);
        assert_eq!(json["packets_per_batch"], 50.0);
        assert_eq!(json["worker_busy_percent"], 25.0);
        assert_eq!(json["latency_ns"]["p50"], 50);
        assert_eq!(json["latency_ns"]["p90"], 90);
        assert_eq!(json["latency_ns"]["p99"], 99);
        for field in ["lost", "reordered", "corrupt", "duplicated"] {
            assert_eq!(json[field], 0, "{field}");
        }
        assert_eq!(json["guests"], 2);
        assert_eq!(json["size"], 64);
        assert_eq!(json["seconds"], 2.0);
        assert_eq!(
            (&json["worker_core"], &json["guest_core"]),
            (&0.into(), &1.into())
        );
        assert!(json["remarks"].is_array());
    }

    #[test]
    fn one_core_and_disturbances_are_remarked() {
        let setup = Setup {
            worker_core: None,
            guest_core: None,
            is_tsc: false,
            ..SETUP
        };
        let mut measured = measured();
        measured.disturbance.steal_ms = 30;
        measured.saturated.is_stalled = true;
        let text = Report::new(&setup, &measured).to_string();
        for part in [
            "share one core",
            "TSC",
            "far apart",
            "30 ms",
            "stopped",
            "not pinned",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

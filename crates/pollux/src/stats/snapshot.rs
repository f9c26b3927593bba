//! What happened in a window. The serialised form is an interface: fields are
//! added, and [`SCHEMA`] counts up when one changes or goes.

use std::collections::BTreeMap;
use std::time::Duration;

use pollux_datapath::{PortCounters, WorkerCounters};
use pollux_vhost::{PortStatus, RingLayout, RingStatus, SessionState};
use pollux_virtio::device::Notifications;
use serde::Serialize;

use super::{PortReading, Reading, TickRate, WorkerReading};

/// Version of the serialised form.
const SCHEMA: u32 = 1;

/// Totals up to a moment, and rates in the window before it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Snapshot {
    pub(crate) schema: u32,
    /// Since the switch was started.
    pub(crate) uptime_seconds: f64,
    /// Length of the window that all rates and fractions are of.
    pub(crate) interval_seconds: f64,
    pub(crate) workers: Vec<WorkerStats>,
    pub(crate) ports: Vec<PortStats>,
}

/// A worker in the window.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct WorkerStats {
    pub(crate) name: String,
    /// `None`: not pinned.
    pub(crate) core: Option<usize>,
    /// Fraction of the window spent in visits that found work. What is missing
    /// from busy and idle to 1 the kernel gave to others, or control took.
    pub(crate) busy: f64,
    /// Fraction of the window spent in visits that found none.
    pub(crate) idle: f64,
    /// Million packets received per second, dropped ones included.
    pub(crate) mpps: f64,
    /// Time-stamp counter cycles of visits that found work, for each packet
    /// received; `None` if there was none, or the machine has no such counter.
    pub(crate) cycles_per_packet: Option<f64>,
    /// Packets in each burst that had one; `None` if there was none.
    pub(crate) packets_per_batch: Option<f64>,
}

/// A port: totals since it was added, rates in the window.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PortStats {
    pub(crate) name: String,
    /// The worker that polls it.
    pub(crate) worker: Option<String>,
    /// Of the vhost-user session.
    pub(crate) state: Option<SessionState>,
    /// What has to happen next for the port to run, and who has to do it.
    pub(crate) missing: Option<String>,
    /// What the switch received from the guest.
    pub(crate) rx: Traffic,
    /// What the guest got.
    pub(crate) tx: Traffic,
    /// Feature bits that the guest's driver has acknowledged.
    pub(crate) features: Vec<&'static str>,
    /// Rings of the session, by vring index.
    pub(crate) rings: Vec<RingStats>,
    /// Totals by reason, without those that are 0.
    pub(crate) drops: BTreeMap<&'static str, u64>,
    /// Of the session; it stays when the connection has ended.
    pub(crate) last_error: Option<String>,
}

/// A ring: totals since the session began.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RingStats {
    pub(crate) name: &'static str,
    pub(crate) layout: RingLayout,
    /// Descriptors; `None` before the frontend has told.
    pub(crate) size: Option<u16>,
    /// True if workers use it.
    pub(crate) running: bool,
    /// Calls (interrupts) that the guest asked for and got.
    pub(crate) calls_sent: u64,
    /// Publications for which it asked for none.
    pub(crate) calls_suppressed: u64,
    /// Kicks of the guest.
    pub(crate) kicks: u64,
}

impl RingStats {
    fn new(ring: &RingStatus) -> Self {
        let Notifications {
            calls_sent,
            calls_suppressed,
            kicks,
        } = ring.counters.notifications();
        Self {
            name: ring.name,
            layout: ring.layout,
            size: ring.size,
            running: ring.running,
            calls_sent,
            calls_suppressed,
            kicks,
        }
    }
}

/// One direction of a port.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Traffic {
    /// Total.
    pub(crate) packets: u64,
    /// Total, of Ethernet frames without FCS.
    pub(crate) bytes: u64,
    /// In the window.
    pub(crate) packets_per_second: f64,
    /// In the window, of Ethernet frames without FCS, preamble and gap.
    pub(crate) bits_per_second: f64,
}

impl Snapshot {
    /// What `now` says, with rates since `earlier`. What `earlier` does not know
    /// began with 0.
    pub(crate) fn between(earlier: &Reading, now: &Reading) -> Self {
        let window = now.uptime.saturating_sub(earlier.uptime);
        let worker = |worker: &WorkerReading| {
            let before = earlier
                .workers
                .iter()
                .find(|other| other.name == worker.name);
            let before = before.map(|other| other.counters).unwrap_or_default();
            WorkerStats::new(worker, &worker.counters.since(&before), now.ticks, window)
        };
        let port = |port: &PortReading| {
            let before = earlier.ports.iter().find(|other| other.name == port.name);
            let before = before.map(|other| other.counters).unwrap_or_default();
            PortStats::new(port, &port.counters.since(&before), window)
        };
        Self {
            schema: SCHEMA,
            uptime_seconds: round(now.uptime.as_secs_f64(), 3),
            interval_seconds: round(window.as_secs_f64(), 6),
            workers: now.workers.iter().map(worker).collect(),
            ports: now.ports.iter().map(port).collect(),
        }
    }
}

impl WorkerStats {
    fn new(
        worker: &WorkerReading,
        spent: &WorkerCounters,
        ticks: TickRate,
        window: Duration,
    ) -> Self {
        let seconds = |count: u64| to_f64(count) / to_f64(ticks.per_second);
        // The window's ends are not read together with the counters.
        let fraction = |count| round(per_second(seconds(count), window).min(1.0), 4);
        Self {
            name: worker.name.clone(),
            core: worker.core,
            busy: fraction(spent.busy_ticks),
            idle: fraction(spent.idle_ticks),
            mpps: round(per_second(to_f64(spent.frames), window) / 1e6, 6),
            cycles_per_packet: spent
                .cycles_per_packet()
                .filter(|_| ticks.is_tsc)
                .map(|cycles| round(cycles, 2)),
            packets_per_batch: spent.packets_per_batch().map(|packets| round(packets, 2)),
        }
    }
}

impl PortStats {
    fn new(port: &PortReading, moved: &PortCounters, window: Duration) -> Self {
        let total = &port.counters;
        let status = port.status.as_ref();
        let of_status = |part: fn(&PortStatus) -> &Option<String>| {
            status.and_then(|status| part(status).clone())
        };
        Self {
            name: port.name.clone(),
            worker: port.worker.clone(),
            state: status.map(|status| status.state),
            missing: of_status(|status| &status.missing),
            rx: Traffic {
                packets: total.rx_frames,
                bytes: total.rx_bytes,
                ..Traffic::rates(moved.rx_frames, moved.rx_bytes, window)
            },
            tx: Traffic {
                packets: total.tx_frames,
                bytes: total.tx_bytes,
                ..Traffic::rates(moved.tx_frames, moved.tx_bytes, window)
            },
            features: status.map_or_else(Vec::new, |status| status.features.clone()),
            rings: status.map_or_else(Vec::new, |status| {
                status.rings.iter().map(RingStats::new).collect()
            }),
            drops: total
                .drops
                .iter()
                .filter(|(_, count)| *count != 0)
                .map(|(reason, count)| (reason.name(), count))
                .collect(),
            last_error: of_status(|status| &status.last_error),
        }
    }
}

impl Traffic {
    fn rates(packets: u64, bytes: u64, window: Duration) -> Self {
        Self {
            packets_per_second: round(per_second(to_f64(packets), window), 1),
            bits_per_second: round(per_second(to_f64(bytes) * 8.0, window), 1),
            ..Self::default()
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

/// 0 for an empty window.
fn per_second(amount: f64, window: Duration) -> f64 {
    if window.is_zero() {
        0.0
    } else {
        amount / window.as_secs_f64()
    }
}

fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
pub(super) mod tests {
    use pollux_packet::DropReason;

    use super::*;

    /// A window of 2 s on a machine of 1 GHz; the first worker had work in half
    /// of it, the second had none.
    pub(in crate::stats) fn example() -> Snapshot {
        let worker = |name: &str, core| WorkerReading {
            name: name.to_owned(),
            core,
            counters: WorkerCounters::default(),
        };
        let port = |name: &str| PortReading {
            name: name.to_owned(),
            worker: Some("w0".to_owned()),
            counters: PortCounters::default(),
            status: None,
        };
        let earlier = Reading {
            uptime: Duration::from_secs(60),
            ticks: TickRate {
                per_second: 1_000_000_000,
                is_tsc: true,
            },
            workers: vec![worker("w0", Some(0)), worker("spare", None)],
            ports: vec![port("vm1"), port("vm2")],
        };
        let mut now = earlier.clone();
        now.uptime += Duration::from_secs(2);
        now.workers[0].counters = WorkerCounters {
            batches: 400_000,
            frames: 10_000_000,
            busy_ticks: 1_000_000_000,
            idle_ticks: 900_000_000,
            ..WorkerCounters::default()
        };
        now.ports[0].counters.rx_frames = 10_000_000;
        now.ports[0].counters.rx_bytes = 640_000_000;
        now.ports[0].status = Some(status(SessionState::Running));
        now.ports[1].counters.tx_frames = 9_999_000;
        now.ports[1].counters.tx_bytes = 639_936_000;
        now.ports[1]
            .counters
            .drops
            .add(DropReason::RxRingFull, 1000);
        now.ports[1].status = Some(PortStatus {
            missing: Some("the frontend has to send SET_MEM_TABLE".to_owned()),
            last_error: Some("the frontend went away".to_owned()),
            ..status(SessionState::Negotiating)
        });
        Snapshot::between(&earlier, &now)
    }

    fn status(state: SessionState) -> PortStatus {
        PortStatus {
            socket: "/run/pollux/x.sock".into(),
            mode: pollux_vhost::SocketMode::Server,
            state,
            missing: None,
            connections: 1,
            refused: 0,
            last_request: None,
            last_error: None,
            features_offered: Vec::new(),
            features: Vec::new(),
            protocol_features: Vec::new(),
            memory: Vec::new(),
            rings: Vec::new(),
        }
    }

    #[test]
    fn the_serialised_form_is_an_interface() {
        assert_eq!(
            serde_json::to_string(&example()).unwrap(),
            concat!(
                r#"{"schema":1,"uptime_seconds":62.0,"interval_seconds":2.0,"workers":["#,
                r#"{"name":"w0","core":0,"busy":0.5,"idle":0.45,"mpps":5.0,"cycles_per_packet":100.0,"packets_per_batch":25.0},"#,
                r#"{"name":"spare","core":null,"busy":0.0,"idle":0.0,"mpps":0.0,"cycles_per_packet":null,"packets_per_batch":null}],"#,
                r#""ports":["#,
                r#"{"name":"vm1","worker":"w0","state":"running","missing":null,"#,
                r#""rx":{"packets":10000000,"bytes":640000000,"packets_per_second":5000000.0,"bits_per_second":2560000000.0},"#,
                r#""tx":{"packets":0,"bytes":0,"packets_per_second":0.0,"bits_per_second":0.0},"#,
                r#""features":[],"rings":[],"drops":{},"last_error":null},"#,
                r#"{"name":"vm2","worker":"w0","state":"negotiating","missing":"the frontend has to send SET_MEM_TABLE","#,
                r#""rx":{"packets":0,"bytes":0,"packets_per_second":0.0,"bits_per_second":0.0},"#,
                r#""tx":{"packets":9999000,"bytes":639936000,"packets_per_second":4999500.0,"bits_per_second":2559744000.0},"#,
                r#""features":[],"rings":[],"drops":{"rx-ring-full":1000},"last_error":"the frontend went away"}]}"#,
            )
        );
    }

    #[test]
    fn an_empty_window_has_no_rates() {
        let reading = Reading {
            uptime: Duration::ZERO,
            ticks: TickRate {
                per_second: 1,
                is_tsc: false,
            },
            workers: vec![WorkerReading {
                name: "w0".to_owned(),
                core: None,
                counters: WorkerCounters {
                    frames: 1,
                    busy_ticks: 9,
                    ..WorkerCounters::default()
                },
            }],
            ports: Vec::new(),
        };
        let mut empty = reading.clone();
        empty.workers.clear();
        let worker = &Snapshot::between(&empty, &reading).workers[0];
        assert_eq!((worker.busy, worker.mpps), (0.0, 0.0));
        assert_eq!(worker.cycles_per_packet, None, "nanoseconds are no cycles");
    }
}

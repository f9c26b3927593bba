//! DPDK guests through pollux, beside the same guests through DPDK's own vhost
//! ports.
//!
//! Both subjects get the same frontends: two virtio-user ports of one testpmd on
//! one core, frames circulating between them. Samples alternate, so that both
//! meet the same moods of the machine. A polling core is always busy, so what can
//! be compared between the two is the core's whole time: ticks per second divided
//! by packets per second. Of pollux there is besides what it says itself: ticks
//! of visits that found work.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use pollux_testkit::testpmd::{self, Testpmd, TestpmdSpec, VirtioUser, mac_text};
use serde::Serialize;
use serde_json::Value;

use crate::probe::MachineState;

/// Options of `testpmd`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TestpmdArgs {
    /// Bytes of a frame.
    #[arg(long, default_value_t = 64)]
    size: u32,
    /// Descriptors in each ring.
    #[arg(long, default_value_t = 1024)]
    ring: u16,
    /// Bursts of 32 frames that each port sends at first.
    #[arg(long, default_value_t = 24)]
    tx_first: u32,
    /// More device arguments of the guests, such as in_order=0.
    #[arg(long, default_value = "", hide_default_value = true)]
    device: String,
    /// Seconds of each sample.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Samples of each subject, taken in turn.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The switch [default: beside this program]
    #[arg(long, value_name = "PROGRAM")]
    pollux: Option<PathBuf>,
    /// Its plan, with ports vm1 and vm2 and a worker on core 0.
    #[arg(long, value_name = "FILE", default_value = "configs/two-guests.toml")]
    plan: PathBuf,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
}

/// What forwards between the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Subject {
    /// `pollux run`, learning.
    Pollux,
    /// testpmd io between two net_vhost ports: two copies, no look-up.
    DpdkVhost,
}

impl Subject {
    const fn name(self) -> &'static str {
        match self {
            Self::Pollux => "pollux",
            Self::DpdkVhost => "dpdk-vhost",
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    subject: Subject,
    /// NEAR, FAR, or MIXED if it changed in between.
    state: &'static str,
    ping_pong_ns: [f64; 2],
    /// See the engine's report: high when somebody shares the core.
    issue_ticks: [f64; 2],
    /// Received by both ports of the guests.
    mpps: f64,
    /// Ticks of the forwarding core for each packet, idle ones included.
    core_cycles_per_packet: f64,
    /// As pollux says: ticks of visits that found work.
    busy_cycles_per_packet: Option<f64>,
    packets_per_batch: Option<f64>,
}

/// All samples of a subject in one state.
#[derive(Debug, Serialize)]
struct Row {
    subject: Subject,
    state: &'static str,
    samples: usize,
    mpps: [f64; 3],
    core_cycles_per_packet: [f64; 3],
    busy_cycles_per_packet: Option<[f64; 3]>,
    packets_per_batch: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    machine: MachineState,
    size: u32,
    ring: u16,
    tx_first: u32,
    device: String,
    seconds: f64,
    rows: Vec<Row>,
    samples: Vec<Sample>,
}

/// Takes the samples and prints the report.
///
/// # Errors
/// If testpmd or the switch cannot run.
pub(crate) fn run(args: &TestpmdArgs) -> anyhow::Result<()> {
    if let Some(reason) = testpmd::missing() {
        anyhow::bail!("testpmd bench: {reason}");
    }
    let mut samples = Vec::new();
    let mut machine = MachineState::probe()?;
    for _ in 0..args.rounds {
        for subject in [Subject::Pollux, Subject::DpdkVhost] {
            let measured = measure(args, subject, &machine)?;
            let after = MachineState::probe()?;
            let is_same = machine.distance == after.distance;
            samples.push(Sample {
                state: if is_same {
                    after.distance.name()
                } else {
                    "MIXED"
                },
                ping_pong_ns: [machine.ping_pong_ns(), after.ping_pong_ns()],
                issue_ticks: [machine.issue_ticks, after.issue_ticks],
                ..measured
            });
            machine = after;
        }
    }
    let report = Report {
        schema: 1,
        machine,
        size: args.size,
        ring: args.ring,
        tx_first: args.tx_first,
        device: args.device.clone(),
        seconds: args.seconds,
        rows: rows(&samples),
        samples,
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{report}");
    }
    Ok(())
}

/// What forwards, running; it ends when this is dropped.
enum Running {
    Pollux {
        child: Child,
        lines: Option<JoinHandle<Vec<(Instant, String)>>>,
    },
    DpdkVhost {
        _testpmd: Testpmd,
    },
}

impl Running {
    fn start(args: &TestpmdArgs, subject: Subject, sockets: [&Path; 2]) -> anyhow::Result<Self> {
        match subject {
            Subject::Pollux => Self::start_pollux(args, sockets[0]),
            Subject::DpdkVhost => {
                let device = |index: usize| {
                    let socket = sockets[index].display();
                    format!("net_vhost{index},iface={socket},queues=1")
                };
                let mut testpmd = Testpmd::start(&TestpmdSpec {
                    devices: vec![device(0), device(1)],
                    cores: [1, 0],
                    forward: "io",
                    arguments: &[],
                });
                testpmd.run("start");
                Ok(Self::DpdkVhost { _testpmd: testpmd })
            }
        }
    }

    fn start_pollux(args: &TestpmdArgs, socket: &Path) -> anyhow::Result<Self> {
        let beside = std::env::current_exe()?.with_file_name("pollux");
        let program = args.pollux.as_ref().unwrap_or(&beside);
        let directory = socket.parent().context("a socket is in a directory")?;
        let log = File::create(directory.join("pollux.log"))?;
        let mut child = Command::new(program)
            .args(["run", "--json", "--interval", "0.5", "-c"])
            .arg(&args.plan)
            .arg("--socket-dir")
            .arg(directory)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| {
                let program = program.display();
                format!("cannot start {program}; build it first: cargo build --release")
            })?;
        let stdout = child.stdout.take().context("it is piped")?;
        let lines = thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.map(|line| (Instant::now(), line)).collect()
        });
        Ok(Self::Pollux {
            child,
            lines: Some(lines),
        })
    }

    /// Ends it, and returns its documents of the time between.
    fn finish(mut self, begin: Instant, end: Instant) -> anyhow::Result<Vec<Value>> {
        let Self::Pollux { child, lines } = &mut self else {
            return Ok(Vec::new());
        };
        child.kill()?;
        let lines = lines.take().context("it is finished once")?.join();
        let lines = lines.map_err(|_| anyhow::anyhow!("the reader of the statistics panicked"))?;
        let within = lines.iter().filter(|(at, _)| (begin..=end).contains(at));
        within
            .map(|(_, line)| serde_json::from_str(line).context("a line of statistics"))
            .collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Self::Pollux { child, .. } = self {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn measure(args: &TestpmdArgs, subject: Subject, machine: &MachineState) -> anyhow::Result<Sample> {
    let directory = tempfile::tempdir()?;
    let sockets = ["vm1.sock", "vm2.sock"].map(|name| directory.path().join(name));
    let running = Running::start(args, subject, [&sockets[0], &sockets[1]])?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while !sockets.iter().all(|socket| socket.exists()) {
        ensure!(
            Instant::now() < deadline,
            "{} made no sockets: {}",
            subject.name(),
            std::fs::read_to_string(directory.path().join("pollux.log")).unwrap_or_default()
        );
        thread::sleep(Duration::from_millis(10));
    }
    let port = |index: usize, station| VirtioUser {
        socket: &sockets[index],
        station,
        queue_size: args.ring,
        options: &args.device,
    };
    // Each frame is for the other port: known unicast.
    let arguments = [
        format!("--eth-peer=0,{}", mac_text(2)),
        format!("--eth-peer=1,{}", mac_text(1)),
        format!("--txpkts={}", args.size),
        format!("--rxd={}", args.ring),
        format!("--txd={}", args.ring),
    ];
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut guests = Testpmd::start(&TestpmdSpec {
        arguments: &arguments,
        ..TestpmdSpec::virtio_user(&[port(0, 1), port(1, 2)], "io")
    });
    // Links come up after the prompt.
    thread::sleep(Duration::from_millis(300));
    guests.run(&format!("start tx_first {}", args.tx_first));
    thread::sleep(Duration::from_secs(1));
    let mut received = || {
        let ports = guests.port_stats();
        let packets: u64 = ports.iter().map(|port| port.rx_packets).sum();
        (Instant::now(), packets)
    };
    let (begin, before) = received();
    thread::sleep(Duration::from_secs_f64(args.seconds));
    let (end, after) = received();
    guests.quit();
    let documents = running.finish(begin, end)?;
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let (packets, ticks_per_second) = ((after - before) as f64, machine.clock_hz as f64);
    ensure!(packets > 0.0, "{}: no frame came through", subject.name());
    let packets_per_second = packets / (end - begin).as_secs_f64();
    let of_worker = |key: &str| {
        let worker = |document: &Value| document["workers"][0][key].as_f64();
        let mut values: Vec<f64> = documents.iter().filter_map(worker).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    Ok(Sample {
        subject,
        state: "",
        ping_pong_ns: [0.0; 2],
        issue_ticks: [0.0; 2],
        mpps: packets_per_second / 1e6,
        core_cycles_per_packet: ticks_per_second / packets_per_second,
        busy_cycles_per_packet: of_worker("cycles_per_packet"),
        packets_per_batch: of_worker("packets_per_batch"),
    })
}

/// Minimum, median, maximum.
fn spread(samples: &[&Sample], figure: impl Fn(&Sample) -> Option<f64>) -> Option<[f64; 3]> {
    let mut figures: Vec<f64> = samples.iter().filter_map(|sample| figure(sample)).collect();
    figures.sort_by(f64::total_cmp);
    Some([
        *figures.first()?,
        figures[figures.len() / 2],
        *figures.last()?,
    ])
}

fn rows(samples: &[Sample]) -> Vec<Row> {
    let mut rows = Vec::new();
    for state in ["NEAR", "FAR", "MIXED", "SINGLE"] {
        for subject in [Subject::Pollux, Subject::DpdkVhost] {
            let samples: Vec<&Sample> = samples
                .iter()
                .filter(|sample| (sample.subject, sample.state) == (subject, state))
                .collect();
            let (Some(mpps), Some(core)) = (
                spread(&samples, |sample| Some(sample.mpps)),
                spread(&samples, |sample| Some(sample.core_cycles_per_packet)),
            ) else {
                continue;
            };
            rows.push(Row {
                subject,
                state,
                samples: samples.len(),
                mpps,
                core_cycles_per_packet: core,
                busy_cycles_per_packet: spread(&samples, |sample| sample.busy_cycles_per_packet),
                packets_per_batch: spread(&samples, |sample| sample.packets_per_batch)
                    .map(|[_, median, _]| median),
            });
        }
    }
    rows
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine)?;
        writeln!(
            f,
            "testpmd: 2 virtio-user ports \"{}\", io, split ring {}, {} B, tx_first {}, \
             {} s a sample; min med max",
            self.device, self.ring, self.size, self.tx_first, self.seconds
        )?;
        writeln!(
            f,
            "{:>6} {:>11} {:>8} {:>20} {:>23} {:>23} {:>9}",
            "state",
            "subject",
            "samples",
            "Mpps, both ways",
            "core cycles/packet",
            "busy cycles/packet",
            "pkt/batch"
        )?;
        for row in &self.rows {
            let three = |[min, median, max]: [f64; 3]| format!("{min:.1} {median:.1} {max:.1}");
            let of = |figure: Option<String>| figure.unwrap_or_else(|| "-".to_owned());
            writeln!(
                f,
                "{:>6} {:>11} {:>8} {:>20} {:>23} {:>23} {:>9}",
                row.state,
                row.subject.name(),
                row.samples,
                three(row.mpps),
                three(row.core_cycles_per_packet),
                of(row.busy_cycles_per_packet.map(three)),
                of(row.packets_per_batch.map(|packets| format!("{packets:.1}"))),
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_compared_within_a_state() {
        let sample = |subject, state, mpps| Sample {
            subject,
            state,
            ping_pong_ns: [100.0; 2],
            issue_ticks: [1.0; 2],
            mpps,
            core_cycles_per_packet: 2000.0 / mpps,
            busy_cycles_per_packet: (subject == Subject::Pollux).then_some(90.0),
            packets_per_batch: None,
        };
        let rows = rows(&[
            sample(Subject::Pollux, "FAR", 8.0),
            sample(Subject::Pollux, "NEAR", 20.0),
            sample(Subject::DpdkVhost, "NEAR", 15.0),
            sample(Subject::Pollux, "NEAR", 16.0),
            sample(Subject::Pollux, "NEAR", 18.0),
        ]);
        assert_eq!(rows.len(), 3);
        assert_eq!((rows[0].state, rows[0].mpps), ("NEAR", [16.0, 18.0, 20.0]));
        assert_eq!(rows[1].subject, Subject::DpdkVhost);
        assert_eq!(rows[1].busy_cycles_per_packet, None);
        assert_eq!((rows[2].state, rows[2].samples), ("FAR", 1));
    }
}

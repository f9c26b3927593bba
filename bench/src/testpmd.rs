//! DPDK guests through pollux, beside the same guests through DPDK's own vhost
//! ports.
//!
//! Both subjects get the same frontends: two virtio-user ports of one testpmd on
//! one core, frames circulating between them. Samples alternate, so that both
//! meet the same moods of the machine. A polling core is always busy, so what can
//! be compared between the two is the core's whole time: ticks per second divided
//! by packets per second. Of pollux there is besides what it says itself: ticks
//! of visits that found work.

mod variant;

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use pollux_testkit::testpmd::{self, Testpmd, TestpmdSpec, VirtioUser, mac_text};
use serde::Serialize;
use serde_json::Value;

use self::variant::{Choice, Taken, Variant, chosen};
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
    /// Paths of the guests' driver, comma-separated, each measured on its own
    /// [default: the driver's own choice]
    #[arg(long, value_enum, value_delimiter = ',')]
    variant: Vec<Choice>,
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
#[derive(Clone, Debug, Serialize)]
struct Sample {
    subject: Subject,
    /// What was asked of the guests, and what they say they took.
    variant: Option<Variant>,
    taken: Option<Taken>,
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
    variant: Option<Variant>,
    /// Of its last sample; and how a sample differs from what was asked, if one
    /// does: then the row is not about the variant.
    taken: Option<Taken>,
    differs: Option<String>,
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
    let mut variants: Vec<_> = chosen(&args.variant).into_iter().map(Some).collect();
    if variants.is_empty() {
        variants.push(None);
    }
    let mut samples = Vec::new();
    let mut machine = MachineState::probe()?;
    for round in 1..=args.rounds {
        for &variant in &variants {
            if let Some(variant) = variant {
                eprintln!("round {round} of {}: {}", args.rounds, variant.name());
            }
            for subject in [Subject::Pollux, Subject::DpdkVhost] {
                let measured = measure_patiently(args, subject, variant, &machine)?;
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
    }
    let report = Report {
        schema: 2,
        machine,
        size: args.size,
        ring: args.ring,
        tx_first: args.tx_first,
        device: args.device.clone(),
        seconds: args.seconds,
        rows: rows(&variants, &samples),
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
        testpmd: Testpmd,
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
                Ok(Self::DpdkVhost { testpmd })
            }
        }
    }

    fn start_pollux(args: &TestpmdArgs, socket: &Path) -> anyhow::Result<Self> {
        let beside = std::env::current_exe()?.with_file_name("pollux");
        let program = args.pollux.as_ref().unwrap_or(&beside);
        let directory = socket.parent().context("a socket is in a directory")?;
        ensure!(
            program.is_file(),
            "{} is missing; build it first: cargo build --release",
            program.display()
        );
        let log = File::create(directory.join("pollux.log"))?;
        // It ends by itself if this program cannot end it any more.
        let mut child = Command::new("timeout")
            .args(["--kill-after=2", LIFE_MAX_SECONDS])
            .arg(program)
            .args(["run", "--json", "--interval", "0.5", "-c"])
            .arg(&args.plan)
            .arg("--socket-dir")
            .arg(directory)
            .stdout(Stdio::piped())
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("cannot start timeout(1)")?;
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

    /// Ends it, and returns what it said in the time between: pollux documents,
    /// DPDK a log.
    fn finish(mut self, begin: Instant, end: Instant) -> anyhow::Result<(Vec<Value>, String)> {
        let (child, lines) = match &mut self {
            Self::Pollux { child, lines } => (child, lines),
            Self::DpdkVhost { testpmd } => return Ok((Vec::new(), testpmd.log())),
        };
        end_group(child);
        let lines = lines.take().context("it is finished once")?.join();
        let lines = lines.map_err(|_| anyhow::anyhow!("the reader of the statistics panicked"))?;
        let within = lines.iter().filter(|(at, _)| (begin..=end).contains(at));
        let documents = within
            .map(|(_, line)| serde_json::from_str(line).context("a line of statistics"))
            .collect::<anyhow::Result<_>>()?;
        Ok((documents, String::new()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Self::Pollux { child, .. } = self {
            end_group(child);
        }
    }
}

/// Ends timeout(1) and what it runs. They may have ended by themselves; their
/// number is not given to others before the wait.
fn end_group(child: &mut Child) {
    if let Ok(None) = child.try_wait() {
        let group = format!("-{}", child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
    }
    let _ = child.wait();
}

/// Longest life of a switch that is measured, in seconds.
const LIFE_MAX_SECONDS: &str = "150";
/// Others may hold the huge pages just now, or take the cores for so long that
/// a testpmd does not come up.
const TRIES: u32 = 4;
const TRY_AGAIN: Duration = Duration::from_secs(10);

/// Measures, and tries again if the machine was not up to it.
fn measure_patiently(
    args: &TestpmdArgs,
    subject: Subject,
    variant: Option<Variant>,
    machine: &MachineState,
) -> anyhow::Result<Sample> {
    for left in (0..TRIES).rev() {
        let measured = thread::scope(|scope| {
            // The testkit panics if a testpmd does not do as it is told.
            let measuring = scope.spawn(|| measure(args, subject, variant, machine));
            let panicked = |_| Err(anyhow::anyhow!("testpmd did not do as it was told"));
            measuring.join().unwrap_or_else(panicked)
        });
        match measured {
            Err(error) if left > 0 => eprintln!("{}: {error:#}; again", subject.name()),
            measured => return measured,
        }
        thread::sleep(TRY_AGAIN);
    }
    anyhow::bail!("{} could not be measured", subject.name())
}

fn measure(
    args: &TestpmdArgs,
    subject: Subject,
    variant: Option<Variant>,
    machine: &MachineState,
) -> anyhow::Result<Sample> {
    if let Some(reason) = testpmd::missing() {
        anyhow::bail!("{reason}");
    }
    let asked = variant.map(Variant::device).into_iter();
    let more = Some(args.device.clone()).filter(|device| !device.is_empty());
    let device = asked.chain(more).collect::<Vec<_>>().join(",");
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
        options: &device,
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
    if variant.is_some() {
        // The driver says which functions it takes when a port starts, at a
        // level that can be chosen only now.
        guests.run("set log pmd.net.virtio.init 7");
        guests.run("port stop all");
        guests.run("port start all");
    }
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
    let guests_log = guests.log();
    guests.quit();
    let (documents, log) = running.finish(begin, end)?;
    let taken = match subject {
        Subject::Pollux => Taken::of_pollux(&documents, &guests_log),
        Subject::DpdkVhost => Taken::of_dpdk(&log, &guests_log),
    };
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
        variant,
        taken: variant.is_some().then_some(taken),
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

fn rows(variants: &[Option<Variant>], samples: &[Sample]) -> Vec<Row> {
    let mut rows = Vec::new();
    for &variant in variants {
        for state in ["NEAR", "FAR", "MIXED", "SINGLE"] {
            for subject in [Subject::Pollux, Subject::DpdkVhost] {
                let of = |sample: &&Sample| {
                    (sample.variant, sample.subject, sample.state) == (variant, subject, state)
                };
                let samples: Vec<&Sample> = samples.iter().filter(of).collect();
                rows.extend(Row::of(&samples));
            }
        }
    }
    rows
}

impl Row {
    /// Of samples of one kind; `None` without any.
    fn of(samples: &[&Sample]) -> Option<Self> {
        let last = samples.last()?;
        let core = |sample: &Sample| Some(sample.core_cycles_per_packet);
        let differs = |sample: &&Sample| {
            let (variant, taken) = (sample.variant?, sample.taken.as_ref()?);
            taken.differs(variant)
        };
        Some(Self {
            subject: last.subject,
            variant: last.variant,
            taken: last.taken.clone(),
            differs: samples.iter().find_map(differs),
            state: last.state,
            samples: samples.len(),
            mpps: spread(samples, |sample| Some(sample.mpps))?,
            core_cycles_per_packet: spread(samples, core)?,
            busy_cycles_per_packet: spread(samples, |sample| sample.busy_cycles_per_packet),
            packets_per_batch: spread(samples, |sample| sample.packets_per_batch)
                .map(|[_, median, _]| median),
        })
    }
}

fn three([min, median, max]: [f64; 3]) -> String {
    format!("{min:.1} {median:.1} {max:.1}")
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.machine)?;
        writeln!(
            f,
            "testpmd: 2 virtio-user ports \"{}\", io, ring {}, {} B, tx_first {}, \
             {} s a sample; min med max",
            self.device, self.ring, self.size, self.tx_first, self.seconds
        )?;
        if self.rows.iter().any(|row| row.variant.is_some()) {
            self.write_variants(f)
        } else {
            self.write_subjects(f)
        }
    }
}

impl Report {
    /// A row for each subject and state.
    fn write_subjects(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

    /// A row for each variant and state, both subjects beside each other; then
    /// what the guests took.
    fn write_variants(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>25} {:>6} {:>5} {:>16} {:>19} {:>19} {:>16} {:>19} {:>6}  as asked",
            "variant",
            "state",
            "n+n",
            "pollux Mpps",
            "core cycles/packet",
            "busy cycles/packet",
            "dpdk Mpps",
            "core cycles/packet",
            "ratio"
        )?;
        for pollux in self
            .rows
            .iter()
            .filter(|row| row.subject == Subject::Pollux)
        {
            self.write_variant(f, pollux)?;
        }
        writeln!(f, "\nwhat the guests took:")?;
        let mut told = Vec::new();
        for row in &self.rows {
            let (Some(variant), Some(taken)) = (row.variant, &row.taken) else {
                continue;
            };
            let verdict = match &row.differs {
                None => "as asked".to_owned(),
                Some(differs) => format!("NOT AS ASKED: {differs}"),
            };
            let (name, subject) = (variant.name(), row.subject.name());
            let line = format!("{name:>25} {subject:>11}  {taken}: {verdict}");
            if !told.contains(&line) {
                writeln!(f, "{line}")?;
                told.push(line);
            }
        }
        Ok(())
    }

    fn write_variant(&self, f: &mut fmt::Formatter<'_>, pollux: &Row) -> fmt::Result {
        let key = |row: &Row| (row.variant, row.state);
        let mut dpdk = self.rows.iter();
        let dpdk = dpdk.find(|row| row.subject == Subject::DpdkVhost && key(row) == key(pollux));
        let none = || "-".to_owned();
        let of_dpdk = |text: fn(&Row) -> String| dpdk.map_or_else(none, text);
        let ratio = dpdk.map(|dpdk| format!("{:.2}", pollux.mpps[1] / dpdk.mpps[1]));
        let differs = |row: &Row| row.differs.is_some();
        let as_asked = match (differs(pollux), dpdk.is_some_and(differs)) {
            (false, false) => "both",
            (true, false) => "NOT behind pollux",
            (false, true) => "NOT behind dpdk",
            (true, true) => "NEITHER",
        };
        writeln!(
            f,
            "{:>25} {:>6} {:>5} {:>16} {:>19} {:>19} {:>16} {:>19} {:>6}  {as_asked}",
            pollux.variant.map_or_else(String::new, Variant::name),
            pollux.state,
            format!("{}+{}", pollux.samples, dpdk.map_or(0, |row| row.samples)),
            three(pollux.mpps),
            three(pollux.core_cycles_per_packet),
            pollux.busy_cycles_per_packet.map_or_else(none, three),
            of_dpdk(|row| three(row.mpps)),
            of_dpdk(|row| three(row.core_cycles_per_packet)),
            ratio.unwrap_or_else(none),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_compared_within_a_state() {
        let sample = |subject, state, mpps| Sample {
            subject,
            variant: None,
            taken: None,
            state,
            ping_pong_ns: [100.0; 2],
            issue_ticks: [1.0; 2],
            mpps,
            core_cycles_per_packet: 2000.0 / mpps,
            busy_cycles_per_packet: (subject == Subject::Pollux).then_some(90.0),
            packets_per_batch: None,
        };
        let samples = [
            sample(Subject::Pollux, "FAR", 8.0),
            sample(Subject::Pollux, "NEAR", 20.0),
            sample(Subject::DpdkVhost, "NEAR", 15.0),
            sample(Subject::Pollux, "NEAR", 16.0),
            sample(Subject::Pollux, "NEAR", 18.0),
        ];
        let rows = rows(&[None], &samples);
        assert_eq!(rows.len(), 3);
        assert_eq!((rows[0].state, rows[0].mpps), ("NEAR", [16.0, 18.0, 20.0]));
        assert_eq!(rows[1].subject, Subject::DpdkVhost);
        assert_eq!(rows[1].busy_cycles_per_packet, None);
        assert_eq!((rows[2].state, rows[2].samples), ("FAR", 1));
    }
}

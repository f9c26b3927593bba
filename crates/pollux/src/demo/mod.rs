//! `pollux demo`: a switch with guests of this process that speak vhost-user over
//! real sockets. No root, no huge pages, no configuration.
//!
//! Each guest sends to the next one, in a ring; one thread drives them all. First
//! a closed loop, in which every guest keeps a window of frames under way: its
//! rate and the worker's cycles are the result, and since no ring can overflow,
//! no frame may be lost. In a saturated closed loop the latency is the window
//! divided by the rate and says nothing, so it is measured in an open loop after
//! that, at a tenth of the rate. Every frame of the whole run is judged.

mod frame;
mod guests;
mod machine;
mod report;
mod verify;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use pollux_datapath::{Plan, PortPlan, Switch, SwitchConfig, WorkerPlan, WorkerSnapshot};
use pollux_sys::Clock;
use pollux_vhost::frontend::Frontend;
use pollux_vhost::{Backend, PortConfig, SocketMode};
use pollux_virtio::driver::{Guest, GuestSpec};

use self::frame::{SIZE_MAX, SIZE_MIN};
use self::guests::{Guests, Member, Progress};
use self::machine::Disturbance;
use self::report::{Measured, Report, Setup};

const GUESTS_MIN: u32 = 2;
const GUESTS_MAX: u32 = 64;
const SECONDS_MAX: u32 = 86_400;
const WORKER: &str = "w0";
/// Before anything is measured.
const WARM_UP: Duration = Duration::from_millis(300);
/// Of the open loop, at most; a fifth of the closed one if that is less.
const PACED_MAX: Duration = Duration::from_secs(1);
/// Fewest and most frames a second of the open loop.
const PPS: std::ops::RangeInclusive<u64> = 1_000..=1_000_000;
/// A tenth of the closed loop's rate.
const PPS_DIVISOR: f64 = 10.0;
/// Largest ring.
const RING_MAX: u16 = 1024;
/// Smallest ring, however many guests there are.
const RING_MIN: u16 = 256;
/// Bytes of all buffers, above which rings get smaller.
const BUFFERS_BYTES_MAX: u64 = 512 << 20;
/// As virtio-net drivers have them: a frame of 1518 bytes and its header fit.
const BUFFER_BYTES_MIN: u32 = 2048;
/// For the switch to take a connection.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Options of `demo`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DemoArgs {
    /// Length of the measurement in seconds.
    #[arg(long, default_value_t = 5, value_parser = parse_seconds)]
    seconds: u32,
    /// Bytes of a frame, without FCS: 64 to 9018.
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = parse_size)]
    size: u32,
    /// Number of guests: 2 to 64. Each sends to the next.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse_guests)]
    guests: u16,
    /// Print the result as one JSON document, on the last line.
    #[arg(long)]
    json: bool,
}

fn parse_seconds(text: &str) -> Result<u32, String> {
    let why = "a run has to end and to measure something";
    parse(text, 1, SECONDS_MAX, "seconds", why)
}

fn parse_size(text: &str) -> Result<u32, String> {
    let why = "an Ethernet frame is not shorter, a jumbo frame not longer";
    parse(text, SIZE_MIN, SIZE_MAX, "bytes", why)
}

fn parse_guests(text: &str) -> Result<u16, String> {
    let why = "one guest has nobody to talk to, and one thread drives them all";
    let guests = parse(text, GUESTS_MIN, GUESTS_MAX, "guests", why)?;
    u16::try_from(guests).map_err(|error| error.to_string())
}

/// The rest of the error: clap says what was asked for, and of which option.
fn parse(text: &str, min: u32, max: u32, unit: &str, why: &str) -> Result<u32, String> {
    let number = text.parse::<u32>().ok();
    number
        .filter(|number| (min..=max).contains(number))
        .ok_or_else(|| format!("{why}; give a number of {unit} from {min} to {max}"))
}

/// Runs the demo and prints the result on stdout.
///
/// # Errors
/// If something cannot be set up, or a frame was lost, reordered, duplicated or
/// damaged; the result is printed before that.
pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let setup = set_up(args);
    let progress = Progress::default();
    let stop = stop_on_signal()?;
    let (measured, report) = {
        let directory = tempfile::Builder::new()
            .prefix("pollux-demo-")
            .tempdir()
            .context(
                "demo: no directory for sockets could be made; \
                 set TMPDIR to a directory that is writable",
            )?;
        let switch = start_switch(&setup)?;
        let backend =
            Backend::start().context("demo: the vhost-user thread could not be started")?;
        let members = connect(&setup, directory.path(), &switch, &backend)?;
        let shares_core = setup.guest_core.is_none();
        let mut guests = Guests::new(members, setup.size, setup.window, shares_core, &progress);
        let measured = measure(args, &setup, &switch, &mut guests, &progress, &stop)?;
        let report = Report::new(&setup, &measured);
        (measured, report)
    };
    let mut stdout = std::io::stdout().lock();
    if args.json {
        writeln!(stdout, "{}", report.to_json()?)?;
    } else {
        writeln!(stdout, "{report}")?;
    }
    stdout.flush()?;
    if !measured.tally.is_clean() {
        bail!(
            "demo: of {} frames {} were lost, {} reordered, {} duplicated, {} corrupt: \
             a closed loop loses none; please report this with the lines above",
            measured.tally.sent,
            report.lost,
            report.reordered,
            report.duplicated,
            report.corrupt
        );
    }
    if measured.saturated.received == 0 && !measured.is_interrupted {
        bail!("demo: no frame arrived; run with RUST_LOG=debug and report it");
    }
    Ok(())
}

/// SIGINT and SIGTERM end the measurement, and what there is is reported.
fn stop_on_signal() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // The second one ends the process, should the first not be heard.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("demo: signals could not be caught")?;
    }
    Ok(stop)
}

fn set_up(args: &DemoArgs) -> Setup {
    let (worker_core, guest_core) = match pollux_sys::available_cores()[..] {
        [worker, guests, ..] => (Some(worker), Some(guests)),
        _ => (None, None),
    };
    // Before the worker has one of the cores for itself.
    let core_round_trip_ns = match (worker_core, guest_core) {
        (Some(worker), Some(guests)) => machine::round_trip_ns([worker, guests]),
        _ => None,
    };
    let ring = ring_size(args.guests, buffer_bytes(args.size));
    Setup {
        guests: args.guests,
        size: args.size,
        ring,
        // Half a ring: the other half is on its way back to the sender.
        window: u64::from(ring / 2),
        worker_core,
        guest_core,
        core_round_trip_ns,
        is_tsc: Clock::calibrate().is_tsc(),
    }
}

/// Net header and frame in one buffer.
fn buffer_bytes(size: u32) -> u32 {
    BUFFER_BYTES_MIN.max((size + 12).next_multiple_of(64))
}

/// Largest ring with which the buffers of all guests stay small.
fn ring_size(guests: u16, buffer_bytes: u32) -> u16 {
    let bytes = |ring: u16| 2 * u64::from(guests) * u64::from(ring) * u64::from(buffer_bytes);
    let mut ring = RING_MAX;
    while ring > RING_MIN && bytes(ring) > BUFFERS_BYTES_MAX {
        ring /= 2;
    }
    ring
}

fn port_name(number: u16) -> String {
    format!("vm{}", number + 1)
}

fn start_switch(setup: &Setup) -> anyhow::Result<Switch> {
    let switch = Switch::new(SwitchConfig::default())?;
    switch.apply(&Plan {
        workers: vec![WorkerPlan {
            name: WORKER.to_owned(),
            core: setup.worker_core,
        }],
        ports: (0..setup.guests)
            .map(|number| PortPlan::new(&port_name(number)))
            .collect(),
        ..Plan::default()
    })?;
    Ok(switch)
}

/// Makes the guests and attaches each over a socket of its own.
fn connect(
    setup: &Setup,
    directory: &Path,
    switch: &Switch,
    backend: &Backend,
) -> anyhow::Result<Vec<Member>> {
    let connect = |number: u16| -> anyhow::Result<Member> {
        let name = port_name(number);
        let socket = directory.join(format!("{name}.sock"));
        let port = switch.port(&name).context("the port was planned")?;
        backend.add(
            port,
            PortConfig {
                socket: socket.clone(),
                mode: SocketMode::Server,
                any_memory: false,
            },
        )?;
        let guest = Guest::new(GuestSpec {
            ring_size: setup.ring,
            buffer_bytes: buffer_bytes(setup.size),
            table_len: 0,
            ..GuestSpec::default()
        })?;
        let mut frontend = Frontend::connect(&socket, CONNECT_TIME)?;
        frontend.attach(&guest)?;
        Ok(Member::new(
            guest,
            frontend,
            number,
            setup.guests,
            setup.size,
        ))
    };
    let connect_named = |number: u16| {
        connect(number).with_context(|| {
            let name = port_name(number);
            format!("demo: guest {name} could not be attached to the switch")
        })
    };
    (0..setup.guests).map(connect_named).collect()
}

/// Runs the guests on a thread of their own and shows how far they are.
fn measure(
    args: &DemoArgs,
    setup: &Setup,
    switch: &Switch,
    guests: &mut Guests<'_>,
    progress: &Progress,
    stop: &AtomicBool,
) -> anyhow::Result<Measured> {
    thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let driving = thread::Builder::new()
            .name("pollux-guests".to_owned())
            .spawn_scoped(scope, move || {
                // Dropped when this thread ends, in whatever way.
                let _done = done;
                drive(args, setup, switch, guests)
            })
            .context("demo: the thread of the guests could not be started")?;
        let mut live = Live::start(switch);
        loop {
            let waited = is_done.recv_timeout(Duration::from_millis(100));
            if waited != Err(RecvTimeoutError::Timeout) {
                break;
            }
            if stop.load(Ordering::Relaxed) {
                progress.stop.store(true, Ordering::Relaxed);
            }
            live.show(switch, progress);
        }
        let Ok(measured) = driving.join() else {
            bail!("demo: the thread of the guests panicked; please report this");
        };
        let mut measured = measured?;
        measured.is_interrupted = stop.load(Ordering::Relaxed);
        Ok(measured)
    })
}

/// The phases, on the guests' core.
fn drive(
    args: &DemoArgs,
    setup: &Setup,
    switch: &Switch,
    guests: &mut Guests<'_>,
) -> anyhow::Result<Measured> {
    if let Some(core) = setup.guest_core {
        pollux_sys::pin_current_thread(core)?;
    }
    let worker = || -> anyhow::Result<WorkerSnapshot> {
        switch
            .worker_counters(WORKER)
            .context("the worker has died")
    };
    guests.learn()?;
    guests.saturate(WARM_UP)?;
    let time = Duration::from_secs(args.seconds.into());
    let disturbance = Disturbance::of_this_thread();
    let before = worker()?;
    let saturated = guests.saturate(time)?;
    let after = worker()?;
    guests.drain()?;
    let pps = pps_of(saturated.received, saturated.ns);
    let (paced, latency) = guests.pace(PACED_MAX.min(time / 5), pps)?;
    let disturbance = Disturbance::of_this_thread().since(disturbance);
    guests.drain()?;
    guests.stop()?;
    Ok(Measured {
        saturated,
        worker: after.worker.since(&before.worker),
        paced,
        pps,
        latency,
        tally: guests.tally(),
        disturbance,
        is_interrupted: false,
    })
}

/// Rate of the open loop in frames a second, after `received` frames in `ns`.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate, which is clamped"
)]
fn pps_of(received: u64, ns: u64) -> u64 {
    let pps = received as f64 * 1e9 / ns.max(1) as f64 / PPS_DIVISOR;
    (pps as u64).clamp(*PPS.start(), *PPS.end())
}

/// A line a second for people, on stderr.
struct Live {
    is_terminal: bool,
    start: Instant,
    shown: Instant,
    received: u64,
    worker: Option<WorkerSnapshot>,
}

impl Live {
    fn start(switch: &Switch) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        if is_terminal {
            eprintln!(
                "{:>5} {:>9} {:>14} {:>13}",
                "s", "Mpps", "cycles/packet", "packets/batch"
            );
        }
        Self {
            is_terminal,
            start: Instant::now(),
            shown: Instant::now(),
            received: 0,
            worker: switch.worker_counters(WORKER),
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    fn show(&mut self, switch: &Switch, progress: &Progress) {
        let elapsed = self.shown.elapsed();
        if !self.is_terminal || elapsed < Duration::from_secs(1) {
            return;
        }
        let received = progress.received.load(Ordering::Relaxed);
        let worker = switch.worker_counters(WORKER);
        let spent = match (&worker, &self.worker) {
            (Some(now), Some(before)) => now.worker.since(&before.worker),
            _ => Default::default(),
        };
        eprintln!(
            "{:>5.1} {:>9.2} {:>14.1} {:>13.1}",
            self.start.elapsed().as_secs_f64(),
            (received - self.received) as f64 / elapsed.as_secs_f64() / 1e6,
            spent.cycles_per_packet().unwrap_or(0.0),
            spent.packets_per_batch().unwrap_or(0.0)
        );
        self.shown = Instant::now();
        self.received = received;
        self.worker = worker;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused_with_a_way_out() {
        for text in ["63", "9019", "-1", "many"] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains("from 64 to 9018"), "{error}");
        }
        assert_eq!(parse_size("9018"), Ok(9018));
        assert!(parse_guests("1").unwrap_err().contains("from 2 to 64"));
        assert_eq!(parse_guests("64"), Ok(64));
        assert!(parse_seconds("0").is_err());
    }

    #[test]
    fn rings_shrink_with_many_guests_and_hold_a_frame() {
        assert_eq!(ring_size(2, buffer_bytes(64)), 1024);
        assert_eq!(ring_size(2, buffer_bytes(SIZE_MAX)), 1024);
        assert_eq!(ring_size(64, buffer_bytes(64)), 1024);
        assert_eq!(ring_size(64, buffer_bytes(SIZE_MAX)), 256);
        assert!(buffer_bytes(SIZE_MAX) >= SIZE_MAX + 12);
    }

    #[test]
    fn the_open_loop_has_a_tenth_of_the_rate_within_bounds() {
        assert_eq!(pps_of(5_000_000, 1_000_000_000), 500_000);
        assert_eq!(pps_of(50_000_000, 1_000_000_000), 1_000_000);
        assert_eq!(pps_of(0, 0), 1_000);
    }
}

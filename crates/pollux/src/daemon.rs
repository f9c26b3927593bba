//! `pollux run`: a plan is read, checked, started, watched and stopped.

mod machine;
mod report;
mod signals;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use crossbeam::channel::RecvTimeoutError;
use pollux_datapath::{Switch, SwitchConfig};
use pollux_vhost::Backend;

use self::report::Report;
pub(crate) use self::report::wants_colour;
use crate::config::{Config, connect_hint};
use crate::error::{Exit, Fault, Refusal};
use crate::stats::{Reading, Snapshot};

/// Shortest window of statistics.
const INTERVAL_MIN_SECONDS: f64 = 0.1;
/// Longest window of statistics: a day.
const INTERVAL_MAX_SECONDS: f64 = 86_400.0;

/// Arguments of `pollux run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The plan (TOML); see configs/
    #[arg(short = 'c', long = "config", value_name = "FILE")]
    config: PathBuf,
    /// Where sockets with relative names live, in place of the plan's
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
    /// Statistics as JSON on stdout, one document a line
    #[arg(long)]
    json: bool,
    /// Window of the statistics
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (INTERVAL_MIN_SECONDS..=INTERVAL_MAX_SECONDS).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!(
            "give {INTERVAL_MIN_SECONDS} to {INTERVAL_MAX_SECONDS} seconds"
        ))
    }
}

/// Runs the switch until a signal ends it.
///
/// # Errors
/// A [`Refusal`] if the plan is wrong, or cannot be started; nothing is left
/// behind then.
pub(crate) fn run(args: &RunArgs) -> anyhow::Result<()> {
    let name = args.config.display().to_string();
    let asked = format!("run the switch of plan {name}");
    let refuse = |exit| {
        let asked = asked.clone();
        move |faults| Refusal::new(exit, asked, faults)
    };
    let text = read_plan(&args.config).map_err(|fault| refuse(Exit::Usage)(vec![fault]))?;
    let surroundings = machine::surroundings(args.socket_dir.as_deref())?;
    let config = Config::parse(&name, &text, &surroundings).map_err(refuse(Exit::Usage))?;
    let (socket_dir, faults) = machine::check(&config);
    if !faults.is_empty() {
        return Err(refuse(Exit::Refused)(faults).into());
    }

    // From here on a first signal ends the run in order, wherever it is.
    let stop = signals::watch().context("signals cannot be waited for")?;
    let started = Instant::now();
    let running = Running::start(&config).map_err(|fault| refuse(Exit::Failed)(vec![fault]))?;
    socket_dir.keep();

    let mut report = Report::new(args.json);
    let mut goes_on = report.starts(&start_lines(&config))?;
    let mut earlier = running.read(started);
    let mut due = Instant::now() + args.interval;
    while goes_on {
        match stop.recv_deadline(due) {
            Ok(signal) => {
                tracing::info!(signal, "stopping; another signal ends at once");
                break;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the signal thread has ended"),
        }
        let now = running.read(started);
        goes_on = report.show(&Snapshot::between(&earlier, &now))?;
        earlier = now;
        // After a pause of this process there is nothing to catch up with.
        due = (due + args.interval).max(Instant::now());
    }
    Ok(())
}

fn read_plan(path: &Path) -> Result<String, Fault> {
    std::fs::read_to_string(path).map_err(|error| {
        let next = match error.kind() {
            std::io::ErrorKind::NotFound => "give the path of a plan; configs/ has examples",
            std::io::ErrorKind::InvalidData => "save it as UTF-8",
            _ => "make it a file that you may read",
        };
        Fault::new(
            path.display().to_string(),
            format!("it cannot be read: {error}"),
            next,
        )
    })
}

fn start_lines(config: &Config) -> String {
    let mut lines: String = config
        .vhost
        .iter()
        .map(|(port, config)| connect_hint(port, config))
        .collect();
    lines.push_str(
        "QEMU guests have to share their memory: \
         -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem\n",
    );
    lines
}

/// The parts of a running switch, in the order in which they end: rings stop
/// and sockets go before the workers do.
struct Running {
    backend: Backend,
    switch: Switch,
}

impl Running {
    /// Starts everything, or leaves nothing behind.
    fn start(config: &Config) -> Result<Self, Fault> {
        let failed = |object: &str, why: &dyn std::error::Error| {
            let why = error_chain(why);
            Fault::new(object, why, "correct what it names, then start again")
        };
        let backend = Backend::start().map_err(|error| failed("vhost-user backend", &error))?;
        let switch =
            Switch::new(SwitchConfig::default()).map_err(|error| failed("switch", &error))?;
        let running = Self { backend, switch };
        running
            .switch
            .apply(&config.plan)
            .map_err(|error| failed("switch", &error))?;
        for (name, config) in &config.vhost {
            let port = running.switch.port(name).ok_or_else(|| {
                let object = format!("port \"{name}\"");
                Fault::new(
                    object,
                    "it is not in the plan that was applied",
                    "report this",
                )
            })?;
            running
                .backend
                .add(port, config.clone())
                .map_err(|error| machine::socket_fault(name, config, &error))?;
        }
        Ok(running)
    }

    fn read(&self, started: Instant) -> Reading {
        Reading::take(&self.switch, &self.backend, started)
    }
}

/// An error and its sources, one after the other.
fn error_chain(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(Some(error), |error| error.source());
    let texts: Vec<String> = sources.map(ToString::to_string).collect();
    texts.join(": ")
}

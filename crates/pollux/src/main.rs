//! pollux: a poll-mode vhost-user switch.
//!
//! Exit codes: 0 done · 1 failed, and undone · 2 the command line or a plan is
//! wrong as written · 5 refused by the machine, nothing was changed.
#![forbid(unsafe_code)]

mod config;
mod daemon;
mod demo;
mod error;
mod stats;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::error::{Exit, Fault, Refusal};

/// Without RUST_LOG: what changes with a port, and what goes wrong.
const LOG_OF_RUN: &str = "warn,pollux=info,pollux_datapath=warn";
/// Without RUST_LOG, where ports come and go as they should.
const LOG_OF_DEMO: &str = "warn";

/// A poll-mode vhost-user switch.
#[derive(Debug, Parser)]
#[command(version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed, and undone
  2  the command line or the plan is wrong as written
  5  the machine refuses it (core not there, socket taken); nothing was changed";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the switch of a plan until SIGINT or SIGTERM
    #[command(after_help = EXIT_CODES)]
    Run(daemon::RunArgs),
    /// Measure the switch with embedded guests: no root, no huge pages, no plan
    Demo(demo::DemoArgs),
}

impl Command {
    /// What is logged without RUST_LOG.
    fn log_default(&self) -> &'static str {
        match self {
            Self::Run(_) => LOG_OF_RUN,
            Self::Demo(_) => LOG_OF_DEMO,
        }
    }

    fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Run(args) => daemon::run(args),
            Self::Demo(args) => demo::run(args),
        }
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help is no error. Who cannot read either is told by the code.
            let _ = error.print();
            let is_wrong = error.use_stderr();
            return if is_wrong { Exit::Usage } else { Exit::Done }.into();
        }
    };
    match start_log(cli.command.log_default()).and_then(|()| cli.command.run()) {
        Ok(()) => Exit::Done.into(),
        Err(error) => match error.downcast_ref::<Refusal>() {
            Some(refusal) => {
                eprint!("{refusal}");
                refusal.exit.into()
            }
            None => {
                eprintln!("pollux: failed: {error:#}");
                Exit::Failed.into()
            }
        },
    }
}

/// Logs to stderr what RUST_LOG asks for.
fn start_log(default: &str) -> anyhow::Result<()> {
    let asked = std::env::var("RUST_LOG")
        .ok()
        .filter(|asked| !asked.is_empty());
    let directives = asked.as_deref().unwrap_or(default);
    let filter = EnvFilter::builder().parse(directives).map_err(|error| {
        let next = "write RUST_LOG=LEVEL or RUST_LOG=TARGET=LEVEL,…, or unset it";
        let fault = Fault::new("$RUST_LOG", error.to_string(), next);
        Refusal::new(Exit::Usage, "log what RUST_LOG asks for", vec![fault])
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && daemon::wants_colour())
        .init();
    Ok(())
}

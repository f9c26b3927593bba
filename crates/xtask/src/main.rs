//! `cargo xtask …`: set-up, every layer of tests, and the tidy checks.
//!
//! What `cargo xtask test` touches, in the order of the work:
//!
//! 1. [`setup`] brings a fresh machine to the point where the layers can run.
//! 2. [`layers`] runs each layer through [`command`] (streamed, with a time
//!    limit) and adds up a [`report::Tally`] for it.
//! 3. [`report`] prints the summary. The last line is always exactly
//!    `N passed, N failed, N skipped`.
//!
//! The tidy checks are pure functions in [`tidy`] over text that
//! [`rust_source`] has split into code and comments; [`checkout`] is what
//! reads the files for them.
#![forbid(unsafe_code)]

mod checkout;
mod command;
mod fuzz;
mod layers;
mod report;
mod rust_source;
mod setup;
mod tidy;

use std::{path::Path, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};

use crate::{checkout::Workspace, layers::Layer, report::Report};

/// Developer tasks of pollux.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Set up this machine and run every layer of tests.
    ///
    /// Every layer runs even when an earlier one failed. The last line printed
    /// is exactly `N passed, N failed, N skipped`; the exit code is 1 when
    /// anything failed and 0 otherwise (skipped tests do not fail a run, they
    /// are named with what is missing).
    Test(TestArgs),
    /// Search for new inputs of the fuzz targets, for a bounded time.
    ///
    /// The seconds are divided among the targets; building comes on top. For
    /// each target: executions, executions a second, features covered, size of
    /// the corpus, and the situations that were reached. The exit code is 1 if
    /// an input was found that fails (it is saved under crates/fuzz/regress) or
    /// if a situation that has to be reached was not.
    Fuzz(FuzzArgs),
    /// Check the house rules that no compiler checks.
    Tidy,
}

#[derive(Args, Debug)]
struct TestArgs {
    /// Run only this layer; may be repeated. Layers keep their order.
    #[arg(long, value_name = "LAYER")]
    only: Vec<Layer>,
    /// Minutes that one layer may take before its processes are killed.
    #[arg(long, value_name = "MINUTES", default_value_t = 20)]
    limit_minutes: u64,
    /// Install nothing: skip the layers for which something is missing.
    #[arg(long)]
    no_install: bool,
}

#[derive(Args, Debug)]
struct FuzzArgs {
    /// Seconds for all targets together.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Run only this target.
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Under AddressSanitizer.
    #[arg(long)]
    asan: bool,
    /// Install nothing: skip if something is missing.
    #[arg(long)]
    no_install: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let task = Cli::parse().task;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .context("asked: find the workspace; crates/xtask has no directory two levels up")?;
    std::env::set_current_dir(root)
        .with_context(|| format!("cannot enter the workspace root {}", root.display()))?;
    match task {
        Task::Test(args) => test(&args),
        Task::Fuzz(args) => fuzz(&args),
        Task::Tidy => tidy(),
    }
}

fn test(args: &TestArgs) -> anyhow::Result<ExitCode> {
    let limit = Duration::from_secs(args.limit_minutes.saturating_mul(60));
    let chosen = Layer::chosen(&args.only);
    let tools = setup::prepare(&chosen, !args.no_install, limit);
    let _huge_pages = setup::HugePages::set_aside(&chosen, !args.no_install, limit);
    let reports: Vec<Report> = match Workspace::load() {
        Ok(workspace) => chosen
            .into_iter()
            .map(|layer| layers::run(layer, &workspace, &tools, limit))
            .collect(),
        Err(error) => {
            let mut report = Report {
                title: "set-up",
                ..Report::default()
            };
            report.fail(format!("no layer could run: {error:#}"));
            vec![report]
        }
    };
    exit_code(&reports)
}

fn fuzz(args: &FuzzArgs) -> anyhow::Result<ExitCode> {
    let limit = Duration::from_secs(20 * 60);
    let tools = setup::prepare(&[Layer::Fuzz], !args.no_install, limit);
    let mut report = Report {
        title: Layer::Fuzz.title(),
        ..Report::default()
    };
    if let Some(reason) = tools.missing(Layer::Fuzz) {
        println!("SKIPPED: {reason}");
        report.skip(reason);
    } else {
        let plan = fuzz::Plan {
            seconds: args.seconds,
            target: args.target.clone(),
            asan: args.asan,
            fresh: false,
        };
        fuzz::run(&mut report, &Workspace::load()?, &plan, limit);
    }
    exit_code(&[report])
}

fn exit_code(reports: &[Report]) -> anyhow::Result<ExitCode> {
    let total = report::print_summary(reports)?;
    Ok(if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn tidy() -> anyhow::Result<ExitCode> {
    let findings = Workspace::load()?.tidy()?;
    for finding in &findings {
        println!("{finding}");
    }
    eprintln!("tidy: {} findings", findings.len());
    Ok(if findings.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

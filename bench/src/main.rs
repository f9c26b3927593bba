//! Benchmarks of pollux. Every result comes with the state of the machine it
//! was taken on: see [`probe`].
#![forbid(unsafe_code)]

mod engine;
mod isolation;
mod issue;
mod path;
mod probe;
mod rings;
mod testpmd;

use clap::{Args, Parser, Subcommand};

use crate::probe::MachineState;

/// Benchmarks of pollux.
#[derive(Debug, Parser)]
#[command(name = "pollux-bench")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Say what state this machine is in; compare only runs of the same state.
    Probe(ProbeArgs),
    /// Measure the engine in this process: guests, rings and a worker.
    Engine(engine::EngineArgs),
    /// Measure what guests at full attack speed leave of a neighbour's rate.
    Isolation(isolation::IsolationArgs),
    /// Measure the path of a frame on one core, without cache misses.
    Path(path::PathArgs),
    /// Measure DPDK guests through pollux, and through DPDK's own vhost ports.
    Testpmd(testpmd::TestpmdArgs),
}

#[derive(Args, Debug)]
struct ProbeArgs {
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().task {
        Task::Probe(args) => print_probe(&args),
        Task::Engine(args) => engine::run(&args),
        Task::Isolation(args) => isolation::run(&args),
        Task::Path(args) => path::run(&args),
        Task::Testpmd(args) => testpmd::run(&args),
    }
}

fn print_probe(args: &ProbeArgs) -> anyhow::Result<()> {
    let state = MachineState::probe()?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&state)?);
    } else {
        println!("{state}");
    }
    Ok(())
}

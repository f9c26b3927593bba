//! The layers of `cargo xtask test`, each one command or one pass of tidy.

use std::{
    env, fs,
    io::{self, IsTerminal as _},
    process::Command,
    time::{Duration, Instant},
};

use clap::ValueEnum;

use crate::{
    checkout::Workspace,
    command::{self, Ended},
    fuzz,
    report::{Report, TestOutput},
    setup::Tools,
};

/// File to which a test that cannot run here appends `test: what is missing`.
const SKIP_FILE_VARIABLE: &str = "POLLUX_SKIP_FILE";
/// Bound of loom's search: more than three preemptions cost minutes a test and
/// find few further bugs. The environment may set it higher.
const LOOM_PREEMPTIONS: (&str, &str) = ("LOOM_MAX_PREEMPTIONS", "3");
/// Loom needs optimised code but not the whole-program optimisation of the
/// switch, which would be linked once a test program.
const LOOM_PROFILE: [(&str, &str); 4] = [
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only"),
    ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true"),
];

/// The saved corpus and a little more: a longer search is `cargo xtask fuzz`.
const FUZZ_PLAN: fuzz::Plan = fuzz::Plan {
    seconds: 24,
    target: None,
    asan: true,
    fresh: true,
};

/// One layer of the tests, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Layer {
    /// Formatting (one test).
    Fmt,
    /// Clippy over all targets, warnings are errors (one test).
    Clippy,
    /// House rules that no compiler checks (one test).
    Tidy,
    /// Unit, integration and documentation tests.
    Test,
    /// Concurrency models (loom), in `tests/loom_*.rs` and in src.
    Loom,
    /// Fuzz targets for some seconds, under AddressSanitizer (a test for the
    /// build and one for each target).
    Fuzz,
    /// Release build of the switch and the benchmarks, so that they cannot rot
    /// (one test).
    Bench,
}

impl Layer {
    /// The layers to run: those of `only`, or all, in their order.
    pub(crate) fn chosen(only: &[Self]) -> Vec<Self> {
        let mut layers = if only.is_empty() {
            Self::value_variants().to_vec()
        } else {
            only.to_vec()
        };
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Title in the output and the summary.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Clippy => "clippy",
            Self::Tidy => "tidy",
            Self::Test => "unit, integration, doc",
            Self::Loom => "loom",
            Self::Fuzz => "fuzz",
            Self::Bench => "release build",
        }
    }
}

/// Runs `layer`. What goes wrong is counted in the report: an error never
/// keeps the next layer from running.
pub(crate) fn run(layer: Layer, workspace: &Workspace, tools: &Tools, limit: Duration) -> Report {
    println!("\n=== {}", layer.title());
    let start = Instant::now();
    let mut report = Report {
        title: layer.title(),
        ..Report::default()
    };
    if let Some(reason) = tools.missing(layer) {
        println!("SKIPPED: {reason}");
        report.skip(reason);
    } else {
        match layer {
            Layer::Fmt => {
                one_command(&mut report, cargo(["fmt", "--all", "--check"]), limit);
            }
            Layer::Clippy => {
                let clippy = cargo([
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ]);
                one_command(&mut report, clippy, limit);
            }
            Layer::Tidy => tidy(&mut report, workspace),
            Layer::Test => {
                // Without this, cargo stops at the first program that fails.
                let test = cargo(["test", "--workspace", "--no-fail-fast"]);
                test_command(&mut report, test, workspace, limit);
            }
            Layer::Loom => loom(&mut report, workspace, limit),
            Layer::Fuzz => fuzz::run(&mut report, workspace, &FUZZ_PLAN, limit),
            Layer::Bench => {
                let build = cargo([
                    "build",
                    "--release",
                    "--package",
                    "pollux",
                    "--package",
                    "pollux-bench",
                ]);
                one_command(&mut report, build, limit);
            }
        }
    }
    report.duration = start.elapsed();
    println!(
        "--- {}: {} in {:.1} s",
        report.title,
        report.tally,
        report.duration.as_secs_f64()
    );
    report
}

/// A command whose exit status is one test. True if it passed.
pub(crate) fn one_command(report: &mut Report, command: Command, limit: Duration) -> bool {
    let shown = describe(&command);
    println!("$ {shown}");
    let failure = match command::run(command, limit, &mut io::stdout(), |_| {}) {
        Ok(Ended::Success) => {
            report.tally.passed += 1;
            return true;
        }
        Ok(Ended::Failure) => format!("`{shown}` (see above)"),
        Ok(Ended::TimedOut(limit)) => too_slow(&shown, limit),
        Err(error) => format!("`{shown}` could not be run: {error}"),
    };
    report.fail(failure);
    false
}

/// A `cargo test` whose programs report their own results.
fn test_command(report: &mut Report, mut command: Command, workspace: &Workspace, limit: Duration) {
    let shown = describe(&command);
    println!("$ {shown}");
    let skip_file = workspace
        .target_dir
        .join(format!("xtask-skips-{}", std::process::id()));
    command.env(SKIP_FILE_VARIABLE, &skip_file);
    let mut output = TestOutput::default();
    match command::run(command, limit, &mut io::stdout(), |line| output.line(line)) {
        Ok(Ended::TimedOut(limit)) => {
            // The program that was cut off has no result: it is counted too.
            output.finish(false, report);
            report.failures.push(too_slow(&shown, limit));
        }
        Ok(ended) => output.finish(ended == Ended::Success, report),
        Err(error) => report.fail(format!("`{shown}` could not be run: {error}")),
    }
    match fs::read_to_string(&skip_file) {
        Ok(skips) => report.add_self_skips(&skips),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => report.fail(format!("cannot read {}: {error}", skip_file.display())),
    }
    if let Err(error) = fs::remove_file(&skip_file) {
        println!("xtask: cannot remove {}: {error}", skip_file.display());
    }
}

/// Models lie in `tests/loom_*.rs`, and in modules under
/// `#[cfg(all(test, loom))]` where they have to see private items.
fn loom(report: &mut Report, workspace: &Workspace, limit: Duration) {
    let mut commands = Vec::new();
    let packages = workspace.packages_with_tests("loom_");
    if !packages.is_empty() {
        let mut command = loom_cargo(workspace);
        for package in packages {
            command.args(["--package", package]);
        }
        command.args(["--test", "loom_*"]);
        commands.push(command);
    }
    match workspace.loom_modules() {
        Ok(found) => commands.extend(found.into_iter().map(|(package, modules)| {
            let mut command = loom_cargo(workspace);
            // Only these: other unit tests have run, and may use a primitive
            // of loom outside of a model, where it panics.
            command.args(["--package", package, "--lib", "--"]);
            command.args(modules.iter().map(|module| format!("{module}::")));
            command
        })),
        Err(error) => report.fail(format!("models in src could not be looked for: {error:#}")),
    }
    if commands.is_empty() {
        println!("no package has models for loom");
    }
    let start = Instant::now();
    for command in commands {
        test_command(
            report,
            command,
            workspace,
            limit.saturating_sub(start.elapsed()),
        );
    }
}

fn loom_cargo(workspace: &Workspace) -> Command {
    let mut command = cargo(["test", "--release", "--no-fail-fast"]);
    let mut flags = env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" --cfg loom");
    command
        .env("RUSTFLAGS", flags.trim_start())
        // Other flags mean other artefacts: sharing the directory would rebuild
        // everything twice a run.
        .env("CARGO_TARGET_DIR", workspace.target_dir.join("loom"))
        .envs(LOOM_PROFILE);
    let (variable, default) = LOOM_PREEMPTIONS;
    if env::var_os(variable).is_none() {
        command.env(variable, default);
    }
    command
}

fn tidy(report: &mut Report, workspace: &Workspace) {
    match workspace.tidy() {
        Ok(findings) if findings.is_empty() => report.tally.passed += 1,
        Ok(findings) => {
            for finding in &findings {
                println!("{finding}");
            }
            report.fail(format!("{} findings (see above)", findings.len()));
        }
        Err(error) => report.fail(format!("could not be checked: {error:#}")),
    }
}

fn too_slow(shown: &str, limit: Duration) -> String {
    format!(
        "`{shown}` was killed after {} s (--limit-minutes changes the limit)",
        limit.as_secs()
    )
}

/// Cargo, free from what `cargo run` told this process about its own package.
pub(crate) fn cargo<const N: usize>(args: [&str; N]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name.as_ref());
        }
    }
    if io::stdout().is_terminal()
        && env::var_os("NO_COLOR").is_none()
        && env::var_os("CARGO_TERM_COLOR").is_none()
    {
        // Cargo writes to our pipe and would not see the terminal behind it.
        command.env("CARGO_TERM_COLOR", "always");
    }
    command.args(args);
    command
}

fn describe(command: &Command) -> String {
    let args: Vec<_> = command
        .get_args()
        .map(|arg| arg.to_string_lossy())
        .collect();
    let program = command.get_program().to_string_lossy();
    let program = program.rsplit('/').next().unwrap_or_default();
    format!("{program} {}", args.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_keep_their_order_and_run_once() {
        assert_eq!(
            Layer::chosen(&[Layer::Loom, Layer::Fmt, Layer::Loom]),
            [Layer::Fmt, Layer::Loom]
        );
        assert_eq!(Layer::chosen(&[]).len(), Layer::value_variants().len());
    }
}

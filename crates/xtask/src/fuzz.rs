//! `cargo xtask fuzz`: a bounded search for new inputs of the fuzz targets, on
//! the stable toolchain.
//!
//! The program is package `pollux-fuzz` with its feature `libfuzzer`. Stable
//! rustc instruments it through LLVM's own flags, the ones that cargo-fuzz gives.
//! AddressSanitizer is an unstable flag of the compiler, which the same stable
//! compiler takes with `RUSTC_BOOTSTRAP=1`. Both go into target directories of
//! their own, and with `--target`, so that build scripts are left alone.

use std::{
    collections::BTreeSet,
    env, fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};

use crate::{
    checkout::Workspace,
    command::{self, Ended},
    layers::{cargo, one_command},
    report::Report,
};

/// What cargo-fuzz gives to rustc: counters of edges, their addresses, and the
/// operands of comparisons.
const COVERAGE: &str = "-Cpasses=sancov-module \
     -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
     -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares \
     -Cllvm-args=-sanitizer-coverage-stack-depth \
     -Cllvm-args=-simplifycfg-branch-fold-threshold=0";
const ASAN: &str = " -Zsanitizer=address";
/// Optimised and with every check, but without the whole-program optimisation of
/// the switch; more codegen units than cargo-fuzz has, for shorter builds.
const PROFILE: [(&str, &str); 5] = [
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "4"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only"),
    ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true"),
    ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true"),
];
/// The only target for which the flags above are tried.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
const PROGRAM: &str = "pollux-fuzz";
/// Inputs to start from, a directory for each target: the list of targets.
const CORPUS: &str = "crates/fuzz/corpus";
/// Inputs that found a bug.
const REGRESS: &str = "crates/fuzz/regress";
/// Longest input: more operations than a target runs need no more.
const MAX_LEN: &str = "-max_len=2048";
/// One input that takes so many seconds is a finding.
const TIMEOUT: &str = "-timeout=10";
/// Memory in MiB beyond which an input is a finding.
const RSS_LIMIT: &str = "-rss_limit_mb=2048";

/// What is searched, and for how long.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Seconds for all targets together.
    pub(crate) seconds: u64,
    /// One target only.
    pub(crate) target: Option<String>,
    pub(crate) asan: bool,
    /// Start from the saved corpus alone, not from what earlier runs found.
    pub(crate) fresh: bool,
}

/// Builds the program and runs each target; each is one test of the report.
pub(crate) fn run(report: &mut Report, workspace: &Workspace, plan: &Plan, limit: Duration) {
    if let Err(error) = run_targets(report, workspace, plan, limit) {
        report.fail(format!("fuzz: {error:#}"));
    }
}

fn run_targets(
    report: &mut Report,
    workspace: &Workspace,
    plan: &Plan,
    limit: Duration,
) -> anyhow::Result<()> {
    let mut targets = targets()?;
    if let Some(wanted) = &plan.target {
        let all = targets.join(", ");
        targets.retain(|target| target == wanted);
        ensure!(
            !targets.is_empty(),
            "asked: fuzz {wanted}; there is no such target; there are {all}"
        );
    }
    let kind = if plan.asan { "fuzz-asan" } else { "fuzz" };
    let target_dir = workspace.target_dir.join(kind);
    let start = Instant::now();
    if !one_command(report, build(&target_dir, plan.asan), limit) {
        return Ok(());
    }
    println!("built in {:.0} s", start.elapsed().as_secs_f64());
    let program = target_dir.join(TRIPLE).join("release").join(PROGRAM);
    let each = (plan.seconds / targets.len() as u64).max(1);
    println!("{each} s for each of {} targets", targets.len());
    let results: Vec<_> = targets
        .iter()
        .map(|target| one_target(report, &program, target, each, plan, &target_dir))
        .collect::<anyhow::Result<_>>()?;
    println!(
        "\n{:<18} {:>10} {:>8} {:>9} {:>7} {:>9}",
        "target", "executions", "exec/s", "features", "corpus", "marks"
    );
    for (target, result) in targets.iter().zip(&results) {
        println!("{target:<18} {result}");
    }
    for (target, result) in targets.iter().zip(&results) {
        println!("\n{target} reached:");
        for line in columns(&result.reached) {
            println!("    {line}");
        }
    }
    Ok(())
}

/// The directories of the corpus: a test of `pollux-fuzz` keeps them equal to its
/// list of targets.
fn targets() -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(CORPUS).with_context(|| format!("cannot list {CORPUS}"))?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn build(target_dir: &Path, asan: bool) -> Command {
    let mut flags = env::var("RUSTFLAGS").unwrap_or_default();
    flags.push(' ');
    flags.push_str(COVERAGE);
    let mut command = cargo([
        "build",
        "--release",
        "--package",
        PROGRAM,
        "--features",
        "libfuzzer",
        "--target",
        TRIPLE,
        // libFuzzer itself is C++ of some size and waits for nobody.
        "--config",
        "profile.release.package.libfuzzer-sys.opt-level=1",
    ]);
    if asan {
        flags.push_str(ASAN);
        command.env("RUSTC_BOOTSTRAP", "1");
    }
    command
        .env("RUSTFLAGS", flags.trim_start())
        .env("CARGO_TARGET_DIR", target_dir)
        .envs(PROFILE);
    command
}

/// Runs one target: passed, or failed with what was found.
fn one_target(
    report: &mut Report,
    program: &Path,
    target: &str,
    seconds: u64,
    plan: &Plan,
    target_dir: &Path,
) -> anyhow::Result<Numbers> {
    println!("\n--- {target}, {seconds} s");
    let found = target_dir.join("found").join(target);
    if plan.fresh && found.exists() {
        fs::remove_dir_all(&found).with_context(|| format!("cannot empty {}", found.display()))?;
    }
    let corpus = Path::new(CORPUS).join(target);
    let regress = Path::new(REGRESS).join(target);
    for dir in [&found, &corpus, &regress] {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let known = names_in(&regress)?;
    let marks = target_dir.join(format!("marks-{target}-{}", std::process::id()));

    let mut command = Command::new(program);
    command
        .env("POLLUX_FUZZ_TARGET", target)
        .env("POLLUX_FUZZ_MARKS", &marks)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", regress.display()))
        .args([MAX_LEN, TIMEOUT, RSS_LIMIT, "-print_final_stats=1"])
        // New inputs are written to the first one.
        .args([&found, &corpus, &regress]);
    let mut numbers = Numbers::default();
    let mut said = String::new();
    // libFuzzer prints a line for each new input: only the essence is shown.
    let ended = command::run(
        command,
        Duration::from_secs(seconds * 2 + 120),
        &mut io::sink(),
        |line| {
            numbers.line(line);
            if !line.starts_with('#') && !line.starts_with("INFO:") && said.len() < 1 << 16 {
                said.push_str(line);
                said.push('\n');
            }
        },
    )?;
    numbers.read_marks(&fs::read_to_string(&marks).unwrap_or_default());
    // Nothing depends on whether it can be removed.
    let _ = fs::remove_file(&marks);
    let new: Vec<String> = names_in(&regress)?.difference(&known).cloned().collect();
    if ended != Ended::Success || !new.is_empty() {
        println!("{said}");
        for name in &new {
            let path = regress.join(name);
            describe(&path, target, &said)?;
            println!("input saved: {}", path.display());
        }
        let inputs = new
            .iter()
            .map(|name| regress.join(name).display().to_string())
            .collect::<Vec<_>>()
            .join(", ");
        report.fail(format!("fuzz {target}: {ended:?}, see above; {inputs}"));
    } else if numbers.missing().is_empty() {
        report.tally.passed += 1;
    } else {
        report.fail(format!(
            "fuzz {target}: never reached: {}",
            numbers.missing().join(", ")
        ));
    }
    println!("{numbers}");
    Ok(numbers)
}

/// A text beside an input that found something: what was said.
fn describe(input: &Path, target: &str, said: &str) -> anyhow::Result<()> {
    let text = input.with_added_extension("txt");
    let said: Vec<&str> = said
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with("WARNING:"))
        .take(30)
        .collect();
    let text_bytes = format!(
        "Found by `cargo xtask fuzz --target {target}`. Say here what was wrong. It said:\n\n{}\n",
        said.join("\n")
    );
    fs::write(&text, text_bytes).with_context(|| format!("cannot write {}", text.display()))
}

fn names_in(dir: &PathBuf) -> anyhow::Result<BTreeSet<String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        names.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// What a run of libFuzzer tells.
#[derive(Debug, Default)]
struct Numbers {
    executions: u64,
    per_second: u64,
    features: u64,
    corpus: u64,
    wanted: Vec<String>,
    reached: BTreeSet<String>,
}

impl Numbers {
    /// One line of its output: `#123 DONE cov: 1 ft: 2 corp: 3/4b … exec/s: 5 …`
    /// or `stat::number_of_executed_units: 6`.
    fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix('#') {
            let after = |label: &str| {
                let rest = rest.split_once(label)?.1.trim_start();
                let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
                digits.parse().ok()
            };
            self.features = after(" ft: ").unwrap_or(self.features);
            self.corpus = after(" corp: ").unwrap_or(self.corpus);
        }
        let stat = |name: &str| line.strip_prefix(name)?.trim().parse().ok();
        if let Some(count) = stat("stat::number_of_executed_units:") {
            self.executions = count;
        }
        if let Some(rate) = stat("stat::average_exec_per_sec:") {
            self.per_second = rate;
        }
    }

    /// The lines `wanted MARK` and `reached MARK`.
    fn read_marks(&mut self, text: &str) {
        for line in text.lines() {
            match line.split_once(' ') {
                Some(("wanted", mark)) => self.wanted.push(mark.to_owned()),
                Some(("reached", mark)) => drop(self.reached.insert(mark.to_owned())),
                _ => {}
            }
        }
    }

    fn missing(&self) -> Vec<String> {
        let wanted = self.wanted.iter();
        wanted
            .filter(|mark| !self.reached.contains(*mark))
            .cloned()
            .collect()
    }
}

impl std::fmt::Display for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:>10} {:>8} {:>9} {:>7} {:>5}/{}",
            self.executions,
            self.per_second,
            self.features,
            self.corpus,
            self.wanted.len() - self.missing().len(),
            self.wanted.len()
        )
    }
}

/// Words in lines of at most 100 characters.
fn columns(words: &BTreeSet<String>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() < 99 => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.clone()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_a_run_are_read() {
        let mut numbers = Numbers::default();
        for line in [
            "#3\tINITED cov: 9 ft: 10 corp: 2/5b exec/s: 0 rss: 27Mb",
            "#8348443\tDONE   cov: 12 ft: 1234 corp: 37/9b lim: 4096 exec/s: 1391407 rss: 27Mb",
            "stat::number_of_executed_units: 8348443",
            "stat::average_exec_per_sec:     1391407",
        ] {
            numbers.line(line);
        }
        assert_eq!((numbers.features, numbers.corpus), (1234, 37));
        assert_eq!(numbers.executions, 8_348_443);
        assert_eq!(numbers.per_second, 1_391_407);
        numbers.read_marks("wanted tx-runt\nwanted tx-loop\nreached tx-runt\n");
        assert_eq!(numbers.missing(), ["tx-loop"]);
    }
}

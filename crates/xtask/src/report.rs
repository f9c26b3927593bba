//! Counting: what each layer passed, failed and skipped, and the summary.

use std::{
    fmt,
    io::{self, Write as _},
    ops::AddAssign,
    time::Duration,
};

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Outcome of one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) title: &'static str,
    pub(crate) duration: Duration,
    pub(crate) tally: Tally,
    /// Names of what failed.
    pub(crate) failures: Vec<String>,
    /// Names of what was skipped, each with its reason.
    pub(crate) skips: Vec<String>,
}

impl Report {
    /// Counts one failure and names it.
    pub(crate) fn fail(&mut self, what: impl Into<String>) {
        self.tally.failed += 1;
        self.failures.push(what.into());
    }

    /// Counts one skipped test and names it with its reason.
    pub(crate) fn skip(&mut self, what: impl Into<String>) {
        self.tally.skipped += 1;
        self.skips.push(what.into());
    }

    /// Takes in what tests wrote about themselves to the skip file, one
    /// `test: reason` a line. The harness has counted such a test as passed.
    pub(crate) fn add_self_skips(&mut self, skip_file: &str) {
        let mut seen: Vec<&str> = Vec::new();
        for line in skip_file.lines() {
            let line = line.trim();
            let line = line.strip_prefix("SKIPPED:").map_or(line, str::trim_start);
            let name = line.split(": ").next().unwrap_or(line);
            if name.is_empty() || seen.contains(&name) {
                continue;
            }
            seen.push(name);
            self.tally.passed = self.tally.passed.saturating_sub(1);
            self.skip(line);
        }
    }
}

/// Reads the output of `cargo test` and adds up its results.
#[derive(Debug, Default)]
pub(crate) struct TestOutput {
    /// Test program that is running, and whether its summary has been seen.
    program: Option<(String, bool)>,
    tally: Tally,
    failures: Vec<String>,
    ignored: Vec<String>,
    /// Programs that ended without a summary.
    silent: Vec<String>,
}

impl TestOutput {
    /// Takes in one line of plain text.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(program) = program_name(line) {
            self.end_program();
            self.program = Some((program, false));
        } else if let Some(counts) = parse_summary(line) {
            self.tally += counts;
            if let Some((_, summarised)) = &mut self.program {
                *summarised = true;
            }
        } else if let Some((name, outcome)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        {
            let program = self
                .program
                .as_ref()
                .map_or("", |(program, _)| program.as_str());
            if outcome.starts_with("FAILED") {
                self.failures.push(format!("{program}: {name}"));
            } else if let Some(reason) = outcome.strip_prefix("ignored") {
                let reason = reason.strip_prefix(", ").unwrap_or("marked #[ignore]");
                self.ignored.push(format!("{program}: {name}: {reason}"));
            }
        }
    }

    fn end_program(&mut self) {
        if let Some((program, false)) = self.program.take() {
            self.silent.push(program);
        }
    }

    /// Adds the results to `report`; `success` is the exit status of cargo.
    pub(crate) fn finish(mut self, success: bool, report: &mut Report) {
        self.end_program();
        report.tally += self.tally;
        report.skips.append(&mut self.ignored);
        report.failures.append(&mut self.failures);
        if success {
            // A program without libtest's harness: its exit status is its result.
            report.tally.passed += self.silent.len();
            return;
        }
        for program in &self.silent {
            report.fail(format!(
                "{program}: ended without a result (crashed or killed)"
            ));
        }
        if self.tally.failed == 0 && self.silent.is_empty() {
            report.fail(
                "cargo test failed before or between the tests (see above: does it compile?)",
            );
        }
    }
}

/// The test program that cargo announces on this line.
fn program_name(line: &str) -> Option<String> {
    let line = line.trim_start();
    if let Some(package) = line.strip_prefix("Doc-tests ") {
        return Some(format!("doc tests of {package}"));
    }
    // `Running tests/x.rs (target/debug/deps/x-0123456789abcdef)`
    let (source, binary) = line.strip_prefix("Running ")?.rsplit_once(" (")?;
    let binary = binary.strip_suffix(')')?.rsplit('/').next()?;
    let name = binary.rsplit_once('-').map_or(binary, |(name, _hash)| name);
    let source = source.strip_prefix("unittests ").unwrap_or(source);
    Some(format!("{name} ({source})"))
}

/// Counts of a line `test result: ok. 1 passed; 0 failed; 2 ignored; …`.
fn parse_summary(line: &str) -> Option<Tally> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        let (number, _) = counts
            .split("; ")
            .filter_map(|part| part.split_once(' '))
            .find(|(_, w)| *w == word)?;
        number.parse().ok()
    };
    Some(Tally {
        passed: count("passed")?,
        failed: count("failed")?,
        skipped: count("ignored")?,
    })
}

/// Prints the table of layers, the names of what failed and was skipped, and
/// as the last line the total.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn print_summary(reports: &[Report]) -> io::Result<Tally> {
    let mut out = io::stdout().lock();
    writeln!(out, "\n=== summary")?;
    let mut total = Tally::default();
    for Report {
        title,
        duration,
        tally,
        ..
    } in reports
    {
        writeln!(
            out,
            "{title:<24} {:>7.1} s   {tally}",
            duration.as_secs_f64()
        )?;
        total += *tally;
    }
    for report in reports {
        for name in &report.skips {
            writeln!(out, "SKIPPED  {}: {name}", report.title)?;
        }
    }
    for report in reports {
        for name in &report.failures {
            writeln!(out, "FAILED   {}: {name}", report.title)?;
        }
    }
    writeln!(out, "{total}")?;
    out.flush()?;
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str, success: bool) -> Report {
        let mut parser = TestOutput::default();
        output.lines().for_each(|line| parser.line(line));
        let mut report = Report::default();
        parser.finish(success, &mut report);
        report
    }

    #[test]
    fn results_are_summed_and_named() {
        let report = read(
            "     Running unittests src/lib.rs (target/debug/deps/pollux_sys-0123456789abcdef)\n\
             test a::b ... ok\n\
             test a::c ... ignored, needs a second core\n\
             test a::d ... FAILED\n\
             test result: FAILED. 7 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
             \x20  Doc-tests pollux_sys\n\
             test crates/sys/src/lib.rs - f (line 3) ... ignored\n\
             test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s\n",
            false,
        );
        assert_eq!(
            report.tally,
            Tally {
                passed: 9,
                failed: 1,
                skipped: 2
            }
        );
        assert_eq!(report.failures, ["pollux_sys (src/lib.rs): a::d"]);
        assert_eq!(
            report.skips,
            [
                "pollux_sys (src/lib.rs): a::c: needs a second core",
                "doc tests of pollux_sys: crates/sys/src/lib.rs - f (line 3): marked #[ignore]",
            ]
        );
    }

    #[test]
    fn a_run_that_does_not_compile_is_one_failure() {
        let report = read(
            "error: could not compile `x` (lib) due to 1 previous error",
            false,
        );
        assert_eq!(
            report.tally,
            Tally {
                failed: 1,
                ..Tally::default()
            }
        );
        assert!(report.failures[0].contains("compile"));
    }

    #[test]
    fn a_program_that_crashes_is_one_failure() {
        let report = read(
            "Running tests/a.rs (target/debug/deps/a-0)\nrunning 3 tests\n\
             Running tests/b.rs (target/debug/deps/b-0)\n\
             test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
            false,
        );
        assert_eq!(
            report.tally,
            Tally {
                passed: 4,
                failed: 1,
                skipped: 0
            }
        );
        assert_eq!(
            report.failures,
            ["a (tests/a.rs): ended without a result (crashed or killed)"]
        );
    }

    #[test]
    fn a_test_that_skipped_itself_did_not_pass() {
        let mut report = Report {
            tally: Tally {
                passed: 3,
                ..Tally::default()
            },
            ..Report::default()
        };
        report.add_self_skips("x::y: no namespaces\n\nSKIPPED: z: no guest\nx::y: again\n");
        assert_eq!(
            report.tally,
            Tally {
                passed: 1,
                failed: 0,
                skipped: 2
            }
        );
        assert_eq!(report.skips, ["x::y: no namespaces", "z: no guest"]);
    }

    #[test]
    fn the_last_line_has_its_exact_form() {
        let tally = Tally {
            passed: 12,
            failed: 0,
            skipped: 3,
        };
        assert_eq!(tally.to_string(), "12 passed, 0 failed, 3 skipped");
    }
}

//! Tests that this machine cannot run.

use std::fs::OpenOptions;
use std::io::Write;

/// A test that cannot run here calls this and returns: the reason is printed,
/// and appended to the file named by `POLLUX_SKIP_FILE`, from which the test
/// report counts it. A test must not just pass when it did nothing.
///
/// # Panics
/// If the file cannot be written.
pub fn skip(test: &str, reason: &str) {
    println!("SKIPPED: {test}: {reason}");
    if let Some(path) = std::env::var_os("POLLUX_SKIP_FILE") {
        // One line in one write: tests of several processes append.
        let line = format!("{test}: {reason}\n");
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .unwrap_or_else(|error| panic!("{} cannot be written: {error}", path.display()));
    }
}

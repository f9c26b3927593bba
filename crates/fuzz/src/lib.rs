//! Fuzz targets: plain functions from bytes to a verdict, so that one body
//! serves every engine.
//!
//! * libFuzzer looks for new bytes: `cargo xtask fuzz` builds the program of
//!   this package with coverage instrumentation (feature `libfuzzer`), with or
//!   without AddressSanitizer.
//! * `cargo test` replays `corpus/TARGET/*` and `regress/TARGET/*`
//!   (`tests/replay.rs`).
//! * `pollux-fuzz TARGET FILE…` replays single files, for a debugger.
//!
//! A target never refuses its input: bytes are read as a list of operations, and
//! zeros follow when they are used up. A panic is a finding. What an input led
//! to is noted as [marks]; the corpus holds the smallest known input of each
//! mark, named after it.
#![forbid(unsafe_code)]

mod arena;
mod bytes;
mod features;
pub mod lying_guest;
pub mod marks;
pub mod packed_oracle;
pub mod session_messages;
pub mod split_oracle;

use std::path::{Path, PathBuf};

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name on command lines, and the directory of its corpus.
    pub name: &'static str,
    /// Runs one input. Panics if something is wrong with pollux.
    pub run: fn(&[u8]),
    /// The marks that have to be reached by the corpus and what is found from
    /// there, or the target has become blind.
    pub wanted: fn() -> Vec<String>,
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target {
        name: "lying_guest",
        run: lying_guest::run,
        wanted: lying_guest::wanted,
    },
    Target {
        name: "packed_oracle",
        run: packed_oracle::run,
        wanted: packed_oracle::wanted,
    },
    Target {
        name: "session_messages",
        run: session_messages::run,
        wanted: session_messages::wanted,
    },
    Target {
        name: "split_oracle",
        run: split_oracle::run,
        wanted: split_oracle::wanted,
    },
];

/// The target of this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Where the inputs of a kind ("corpus", "regress") lie for a target.
#[must_use]
pub fn inputs_dir(kind: &str, target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(kind)
        .join(target)
}

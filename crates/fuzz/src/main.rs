//! The program of the fuzz targets: a libFuzzer binary with feature `libfuzzer`,
//! else what replays inputs and picks the corpus.
//!
//! As a libFuzzer binary it takes libFuzzer's own arguments; which target it
//! runs is named by `POLLUX_FUZZ_TARGET`. Marks go to the file named by
//! `POLLUX_FUZZ_MARKS`, a line `wanted MARK` or `reached MARK` for each.
#![forbid(unsafe_code)]
#![cfg_attr(feature = "libfuzzer", no_main)]

#[cfg(feature = "libfuzzer")]
mod fuzzer;
#[cfg(not(feature = "libfuzzer"))]
mod replay;

#[cfg(not(feature = "libfuzzer"))]
fn main() -> std::process::ExitCode {
    replay::main()
}

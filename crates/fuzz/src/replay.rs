//! Without libFuzzer: replays single inputs, and picks a small corpus out of a
//! large one and of random inputs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use pollux_testkit::Random;

use pollux_fuzz::{TARGETS, Target, inputs_dir, marks, target};

/// Random inputs that are tried when a corpus is picked: with none to begin with
/// a search takes long to find the first long list of operations.
const RANDOM_INPUTS: u64 = 30_000;

const USAGE: &str = "usage: pollux-fuzz TARGET FILE…         replay inputs and say what they reach
       pollux-fuzz --pick TARGET DIR…  write the smallest input of each mark found in these
                                       directories to the target's corpus";

pub(super) fn main() -> ExitCode {
    let mut args: Vec<String> = env::args().skip(1).collect();
    let pick = args.first().is_some_and(|first| first == "--pick");
    if pick {
        args.remove(0);
    }
    let named = args.split_first();
    let Some((target, rest)) = named.and_then(|(name, rest)| Some((target(name)?, rest))) else {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("{USAGE}\ntargets: {}", names.join(", "));
        return ExitCode::from(2);
    };
    if pick {
        return pick_corpus(target, rest);
    }
    for path in rest {
        let Some(bytes) = read(Path::new(path)) else {
            return ExitCode::FAILURE;
        };
        println!("{path}: {} bytes", bytes.len());
        (target.run)(&bytes);
        for mark in marks::take() {
            println!("    {mark}");
        }
    }
    ExitCode::SUCCESS
}

fn read(path: &Path) -> Option<Vec<u8>> {
    fs::read(path)
        .inspect_err(|error| eprintln!("{} cannot be read: {error}", path.display()))
        .ok()
}

/// The smallest input of each mark, the old corpus included.
fn pick_corpus(target: &Target, dirs: &[String]) -> ExitCode {
    let corpus = inputs_dir("corpus", target.name);
    let dirs = dirs.iter().map(PathBuf::from).chain([corpus.clone()]);
    let mut best: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut look = |bytes: &[u8]| {
        if panics(target, bytes) {
            return save_finding(target, bytes);
        }
        for mark in marks::take() {
            let old = best.entry(mark).or_insert_with(|| bytes.to_vec());
            if bytes.len() < old.len() {
                *old = bytes.to_vec();
            }
        }
    };
    for seed in 0..RANDOM_INPUTS {
        let mut random = Random::new(seed);
        let len = 16 + random.below(600);
        let bytes: Vec<u8> = (0..len).map(|_| random.bits().to_le_bytes()[0]).collect();
        look(&bytes);
    }
    for dir in dirs {
        let Ok(entries) = fs::read_dir(&dir) else {
            eprintln!("{} cannot be listed", dir.display());
            continue;
        };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let Some(bytes) = read(&path) else {
                return ExitCode::FAILURE;
            };
            look(&bytes);
        }
    }
    // An input that is the smallest of several marks is kept once, under the
    // name of the first.
    let mut kept: Vec<(String, Vec<u8>)> = Vec::new();
    for (mark, bytes) in best {
        let bytes = shrink(target, &mark, bytes);
        if !kept.iter().any(|(_, other)| *other == bytes) {
            kept.push((mark, bytes));
        }
    }
    let written = fs::remove_dir_all(&corpus)
        .or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })
        .and_then(|()| fs::create_dir_all(&corpus))
        .and_then(|()| {
            let mut files = kept.iter();
            files.try_for_each(|(mark, bytes)| fs::write(corpus.join(mark), bytes))
        });
    match written {
        Ok(()) => {
            println!("{} inputs in {}", kept.len(), corpus.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{} cannot be written: {error}", corpus.display());
            ExitCode::FAILURE
        }
    }
}

/// Runs an input that may be a finding.
fn panics(target: &Target, bytes: &[u8]) -> bool {
    let _ = marks::take();
    std::panic::catch_unwind(|| (target.run)(bytes)).is_err()
}

/// Makes an input that panics short, and keeps it.
fn save_finding(target: &Target, bytes: &[u8]) {
    let bytes = shrink_by(bytes.to_vec(), |less| panics(target, less));
    let dir = inputs_dir("regress", target.name);
    let path = dir.join(format!("picked-{}-bytes", bytes.len()));
    let saved = fs::create_dir_all(&dir).and_then(|()| fs::write(&path, &bytes));
    match saved {
        Ok(()) => eprintln!("an input that panics: {}", path.display()),
        Err(error) => eprintln!("{} cannot be written: {error}", path.display()),
    }
}

/// Leaves out what the mark does not need.
fn shrink(target: &Target, mark: &str, bytes: Vec<u8>) -> Vec<u8> {
    shrink_by(bytes, |less| {
        !panics(target, less) && marks::take().contains(mark)
    })
}

/// Leaves out what is not needed for `is_still`: halves, then less and less.
fn shrink_by(mut bytes: Vec<u8>, is_still: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let mut part = bytes.len().div_ceil(2);
    while part > 0 {
        let mut start = 0;
        while start < bytes.len() {
            let end = (start + part).min(bytes.len());
            let less = [&bytes[..start], &bytes[end..]].concat();
            if is_still(&less) {
                bytes = less;
            } else {
                start = end;
            }
        }
        part /= 2;
    }
    bytes
}

//! Every saved input of every target, and every input that once found a bug.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use pollux_fuzz::{TARGETS, inputs_dir, marks, target};

/// Descriptors of the process are counted: one target at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The inputs of a kind, in the order of their names.
fn inputs(kind: &str, target: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(inputs_dir(kind, target)) else {
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.expect("a file").path());
    let mut paths: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_none_or(|end| end != "txt"))
        .collect();
    paths.sort();
    paths
}

fn replay(name: &str) {
    let _alone = alone();
    let target = target(name).expect("a target of this name");
    let corpus = inputs("corpus", name);
    assert!(corpus.len() >= 8, "{name} has no corpus to speak of");
    let mut reached = BTreeSet::new();
    let _ = marks::take();
    for path in corpus.iter().chain(&inputs("regress", name)) {
        let bytes = fs::read(path).expect("a file");
        println!("{}", path.display());
        (target.run)(&bytes);
        reached.extend(marks::take());
    }
    let missing: Vec<String> = (target.wanted)()
        .into_iter()
        .filter(|mark| !reached.contains(mark))
        .collect();
    assert!(missing.is_empty(), "no input reaches {missing:?}");
    // The empty input, and one that is all zeros or all ones.
    for bytes in [&[][..], &[0; 300], &[0xff; 300]] {
        (target.run)(bytes);
    }
}

#[test]
fn lying_guest() {
    replay("lying_guest");
}

#[test]
fn packed_oracle() {
    replay("packed_oracle");
}

#[test]
fn session_messages() {
    replay("session_messages");
}

#[test]
fn split_oracle() {
    replay("split_oracle");
}

#[test]
fn every_target_is_replayed_and_has_its_directory() {
    let source = include_str!("replay.rs");
    for target in TARGETS {
        let call = format!("replay(\"{}\");", target.name);
        assert!(source.contains(&call), "{} is not replayed", target.name);
    }
    let corpus = inputs_dir("corpus", "");
    let mut dirs: Vec<String> = fs::read_dir(corpus)
        .expect("the corpus")
        .map(|entry| entry.expect("a directory").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    dirs.sort();
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    // What `cargo xtask fuzz` takes for the list of targets.
    assert_eq!(dirs, names);
}

#[test]
fn every_input_that_found_a_bug_is_described() {
    for target in TARGETS {
        for path in inputs("regress", target.name) {
            let text = path.with_added_extension("txt");
            let described = fs::read_to_string(&text).is_ok_and(|text| !text.trim().is_empty());
            assert!(described, "say what was wrong in {}", text.display());
        }
    }
}

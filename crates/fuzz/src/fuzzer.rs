//! The entry points that libFuzzer calls.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::env;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use pollux_fuzz::{Target, marks, target};

static TARGET: OnceLock<&Target> = OnceLock::new();

thread_local! {
    static SEEN: RefCell<Seen> = RefCell::default();
}

/// The marks of all inputs so far, and the file that they are written to.
#[derive(Default)]
struct Seen {
    marks: BTreeSet<String>,
    file: Option<File>,
}

fn start() {
    let name = env::var("POLLUX_FUZZ_TARGET").expect("POLLUX_FUZZ_TARGET names the target");
    let target = target(&name).unwrap_or_else(|| panic!("there is no target {name}"));
    TARGET.set(target).expect("libFuzzer initializes once");
    // Rust's own start, which libFuzzer's `main` replaces, ignores SIGPIPE: a
    // peer's closed socket is an error for who writes, not the end.
    let broken_pipe = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGPIPE, broken_pipe)
        .expect("SIGPIPE can be caught");
    SEEN.with_borrow_mut(|seen| {
        seen.file = env::var_os("POLLUX_FUZZ_MARKS").map(|path| {
            let file = OpenOptions::new().create(true).append(true).open(path);
            file.expect("POLLUX_FUZZ_MARKS can be written")
        });
        for mark in (target.wanted)() {
            seen.write("wanted", &mark);
        }
    });
}

impl Seen {
    fn write(&mut self, what: &str, mark: &str) {
        if let Some(file) = &mut self.file {
            writeln!(file, "{what} {mark}").expect("POLLUX_FUZZ_MARKS can be written");
        }
    }
}

fn run(bytes: &[u8]) {
    let target = TARGET.get().expect("libFuzzer initializes first");
    (target.run)(bytes);
    SEEN.with_borrow_mut(|seen| {
        for mark in marks::take() {
            if !seen.marks.contains(&mark) {
                seen.write("reached", &mark);
                seen.marks.insert(mark);
            }
        }
    });
}

libfuzzer_sys::fuzz_target!(init: start(), |bytes: &[u8]| {
    run(bytes);
});

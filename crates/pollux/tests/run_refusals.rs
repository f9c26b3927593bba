//! What `pollux run` refuses, with which code and which words, and that nothing
//! is left behind.

mod common;

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

use common::{Finished, Pollux, core, wait_until, write_plan, write_text};

const FAILED: i32 = 1;
const USAGE: i32 = 2;
const REFUSED: i32 = 5;

/// Runs to the end, which has to be a refusal with these words, all four parts,
/// and nothing on stdout.
fn refuses(pollux: Pollux, code: i32, words: &[&str]) -> Finished {
    let finished = pollux.finish();
    let stderr = &finished.stderr;
    assert_eq!(finished.status.code(), Some(code), "{stderr}");
    assert_eq!(finished.stdout, "");
    for word in [
        "refused, nothing was changed",
        "  asked   run the switch of plan ",
        "  object  ",
        "  why     ",
        "  next    ",
    ]
    .iter()
    .chain(words)
    {
        assert!(stderr.contains(word), "no {word:?} in:\n{stderr}");
    }
    finished
}

fn run(plan: &Path, dir: &Path) -> Pollux {
    Pollux::run(plan, dir, &[])
}

#[test]
fn a_wrong_command_line() {
    for args in [
        &["run"][..],
        &["run", "-c", "x", "--interval", "0"],
        &["run", "-c", "x", "--interval", "soon"],
        &["run", "-c", "x", "--no-such-option"],
        &["fly"],
    ] {
        let finished = Pollux::start(args).finish();
        assert_eq!(finished.status.code(), Some(USAGE), "{args:?}");
        assert_eq!(finished.stdout, "");
        assert!(finished.stderr.contains("--help"), "{}", finished.stderr);
    }
}

#[test]
fn help_tells_the_exit_codes() {
    let finished = Pollux::start(&["run", "--help"]).finish();
    assert_eq!(finished.status.code(), Some(0));
    assert!(finished.stdout.contains("Exit codes:"));
}

#[test]
fn a_plan_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.toml");
    refuses(
        run(&missing, dir.path()),
        USAGE,
        &[
            "missing.toml\n",
            "it cannot be read",
            "give the path of a plan",
        ],
    );
    refuses(run(dir.path(), dir.path()), USAGE, &["make it a file"]);
    std::fs::write(&missing, b"\xff\xfe").unwrap();
    refuses(run(&missing, dir.path()), USAGE, &["save it as UTF-8"]);
}

#[test]
fn a_plan_that_is_no_toml() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_text(dir.path(), "[[worker]\n");
    refuses(
        run(&plan, dir.path()),
        USAGE,
        &["plan.toml:1:", "not TOML", "correct line 1"],
    );
}

#[test]
fn all_that_is_wrong_with_a_plan() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_text(
        dir.path(),
        "[[worker]]\nname = \"w0\"\ncore = \"0\"\n[[port]]\nname = \"vm1\"\nkind = \"vhost\"\nsokcet = \"a\"\n",
    );
    let sockets = dir.path().join("sockets");
    let finished = refuses(
        run(&plan, &sockets),
        USAGE,
        &[
            "2 problems",
            "plan.toml:3, worker \"w0\"",
            "plan.toml:7, port \"vm1\"",
            "did you mean `socket`?",
        ],
    );
    assert_eq!(finished.stderr.matches("  why  ").count(), 2);
    assert!(!sockets.exists());
}

#[test]
fn a_core_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_text(
        dir.path(),
        "worker = [{ name = \"w0\", core = 4095 }]\nport = [{ name = \"vm1\", kind = \"vhost\" }]\n",
    );
    let sockets = dir.path().join("sockets");
    refuses(
        run(&plan, &sockets),
        REFUSED,
        &[
            "worker \"w0\"",
            "core 4095 is not there",
            "choose a core of",
        ],
    );
    assert!(!sockets.exists(), "the directory was made and goes again");
}

#[test]
fn a_socket_directory_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let deep = dir.path().join("no/such");
    refuses(
        run(&plan, &deep),
        REFUSED,
        &["socket directory ", "parent directory", "make the parent"],
    );
    assert!(!dir.path().join("no").exists());
    refuses(run(&plan, &plan), REFUSED, &["it is not a directory"]);
}

#[test]
fn an_ordinary_user_without_a_runtime_directory() {
    let dir = tempfile::tempdir().unwrap();
    if dir.path().metadata().unwrap().uid() == 0 {
        // Root has /run/pollux; the rule itself has a unit test.
        return;
    }
    let plan = write_plan(dir.path(), &["vm1"]);
    let pollux = Pollux::start_with(&["run", "-c", plan.to_str().unwrap()], |command| {
        command.env_remove("XDG_RUNTIME_DIR");
    });
    refuses(
        pollux,
        USAGE,
        &["$XDG_RUNTIME_DIR is not set", "give --socket-dir DIR"],
    );
}

#[test]
fn a_socket_path_that_is_too_long() {
    let dir = tempfile::tempdir().unwrap();
    let name = "x".repeat(120);
    let plan = write_plan(dir.path(), &[&name]);
    refuses(
        run(&plan, dir.path()),
        REFUSED,
        &["at most 107", "give a shorter --socket-dir"],
    );
}

#[test]
fn a_file_where_a_socket_should_be() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let file = dir.path().join("vm1.sock");
    std::fs::write(&file, "precious").unwrap();
    refuses(
        run(&plan, dir.path()),
        REFUSED,
        &["port \"vm1\", socket ", "no socket", "remove it"],
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_socket_that_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1", "vm2"]);
    let _listener = UnixListener::bind(dir.path().join("vm2.sock")).unwrap();
    refuses(
        run(&plan, dir.path()),
        REFUSED,
        &["port \"vm2\", socket ", "it is taken", "end that process"],
    );
    assert!(!dir.path().join("vm1.sock").exists());
}

/// Nobody can make a file in /proc. An ordinary user is told so beforehand; the
/// kernel lets root look as if that worked, so the start fails and is undone.
#[test]
fn a_directory_that_is_not_writable() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_text(
        dir.path(),
        &format!(
            "worker = [{{ name = \"w0\", core = {} }}]\n\
             port = [{{ name = \"vm1\", kind = \"vhost\" }}, \
                     {{ name = \"vm2\", kind = \"vhost\", socket = \"/proc/vm2.sock\" }}]\n",
            core()
        ),
    );
    let sockets = dir.path().join("sockets");
    let finished = run(&plan, &sockets).finish();
    let stderr = &finished.stderr;
    let is_root = dir.path().metadata().unwrap().uid() == 0;
    let (code, outcome) = if is_root {
        (FAILED, "pollux: failed, and undone\n")
    } else {
        (REFUSED, "pollux: refused, nothing was changed\n")
    };
    assert_eq!(finished.status.code(), Some(code), "{stderr}");
    for word in [
        outcome,
        "port \"vm2\", socket /proc/vm2.sock",
        "it cannot be made",
        "you may write to it",
    ] {
        assert!(stderr.contains(word), "no {word:?} in:\n{stderr}");
    }
    assert!(!sockets.exists());
}

#[test]
fn a_second_switch_on_the_same_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let first = run(&plan, dir.path());
    let socket = dir.path().join("vm1.sock");
    wait_until("the first listens", || socket.exists());
    refuses(run(&plan, dir.path()), REFUSED, &["it is taken"]);
    assert!(socket.exists(), "the first goes on");
    first.signal("TERM");
    assert_eq!(first.finish().status.code(), Some(0));
}

#[test]
fn a_log_filter_that_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let finished = Pollux::start_with(&["run", "-c", plan.to_str().unwrap()], |command| {
        command.env("RUST_LOG", "pollux=loud");
    })
    .finish();
    assert_eq!(finished.status.code(), Some(USAGE));
    assert!(
        finished.stderr.contains("object  $RUST_LOG"),
        "{}",
        finished.stderr
    );
}

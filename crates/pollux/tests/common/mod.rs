//! A `pollux` process with a time limit, and plans for it.
#![allow(
    dead_code,
    reason = "each test file is a crate of its own and uses a part"
)]

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// A process that has not done what is expected by then never will.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(10);

/// Calls `condition` until it holds.
///
/// # Panics
/// If it does not in time.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        thread::sleep(POLL);
    }
}

/// A core that this process may run on.
pub(crate) fn core() -> usize {
    pollux_sys::available_cores()[0]
}

/// A plan with one worker and the vhost ports `names`, in `dir`.
pub(crate) fn write_plan(dir: &Path, names: &[&str]) -> PathBuf {
    let mut text = format!("[[worker]]\nname = \"w0\"\ncore = {}\n", core());
    for name in names {
        write!(text, "[[port]]\nname = \"{name}\"\nkind = \"vhost\"\n").unwrap();
    }
    write_text(dir, &text)
}

/// A plan of that text, in `dir`.
pub(crate) fn write_text(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("plan.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// A `pollux` process; killed when dropped.
pub(crate) struct Pollux {
    child: Child,
}

/// What a process left.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Pollux {
    /// Starts the program with its output in pipes.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_with(args, |_| {})
    }

    /// The same, after `change` to the command.
    pub(crate) fn start_with(args: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pollux"));
        command
            .args(args)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        change(&mut command);
        Self {
            child: command.spawn().unwrap(),
        }
    }

    /// `pollux run` of a plan, sockets in `socket_dir`.
    pub(crate) fn run(plan: &Path, socket_dir: &Path, more: &[&str]) -> Self {
        let mut args = vec!["run", "-c", plan.to_str().unwrap(), "--socket-dir"];
        args.push(socket_dir.to_str().unwrap());
        args.extend(more);
        Self::start(&args)
    }

    /// Its lines on stdout. When the receiver is dropped the pipe ends with the
    /// line after that.
    pub(crate) fn stdout_lines(&mut self) -> Receiver<String> {
        let pipe = self.child.stdout.take().unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut lines = BufReader::new(pipe).lines().map_while(Result::ok);
            lines.all(|line| sender.send(line).is_ok());
        });
        receiver
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, by name.
    pub(crate) fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.unwrap().success());
    }

    /// Waits for the end.
    ///
    /// # Panics
    /// If it does not come in time.
    pub(crate) fn finish(mut self) -> Finished {
        let mut status = None;
        wait_until("the process ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        // The pipes hold what a test's process writes, and have no writer now.
        let mut stdout = String::new();
        if let Some(mut pipe) = self.child.stdout.take() {
            pipe.read_to_string(&mut stdout).unwrap();
        }
        let mut stderr = String::new();
        if let Some(mut pipe) = self.child.stderr.take() {
            pipe.read_to_string(&mut stderr).unwrap();
        }
        Finished {
            status: status.unwrap(),
            stdout,
            stderr,
        }
    }
}

impl Drop for Pollux {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! Runs one command: its output streams through and is read line by line, and
//! nothing that it started outlives it or its time limit.

use std::{
    io::{self, Read, Write},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// How often a quiet command is checked for its end.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// How long output may still arrive after the command itself has ended. What
/// holds the pipe open for longer is a process that it left behind.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);
/// Same, after everything in the process group was killed.
const KILLED_DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Exit status 0.
    Success,
    /// Any other exit status, or a signal.
    Failure,
    /// It was killed after this time limit.
    TimedOut(Duration),
}

/// Runs `command`, copying its output to `out` as it comes and giving every
/// line of it (without terminal escapes) to `on_line`.
///
/// # Errors
/// The command cannot be started, or `out` cannot be written.
pub(crate) fn run(
    mut command: Command,
    limit: Duration,
    out: &mut impl Write,
    mut on_line: impl FnMut(&str),
) -> io::Result<Ended> {
    // One pipe for both streams keeps them in order: cargo names the test
    // program on stderr, the program writes its results on stdout.
    let (reader, writer) = io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0);
    let mut child = command.spawn()?;
    // Closes our copies of the writing end, or the end would never be seen.
    drop(command);
    let mut guard = Some(GroupGuard::start(&child)?);
    let chunks = read_in_background(reader);

    let mut lines = LineSplitter::default();
    let mut drain_until = None;
    let deadline = Instant::now() + limit;
    let mut timed_out = false;
    let mut status = None;
    loop {
        match chunks.recv_timeout(CHECK_INTERVAL) {
            Ok(chunk) => {
                out.write_all(&chunk)?;
                out.flush()?;
                lines.push(&chunk, &mut on_line);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if status.is_some() => break,
            // Output is closed but the command still runs: wait for its end.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(CHECK_INTERVAL),
        }
        if status.is_none() {
            status = child.try_wait()?;
        }
        let now = Instant::now();
        if status.is_none() && now >= deadline && guard.is_some() {
            timed_out = true;
            guard = None;
        }
        if status.is_some() {
            let until = *drain_until.get_or_insert(now + DRAIN_LIMIT);
            if now >= until {
                if guard.take().is_none() {
                    break;
                }
                writeln!(
                    out,
                    "xtask: the command left processes behind; they were killed"
                )?;
                drain_until = Some(now + KILLED_DRAIN_LIMIT);
            }
        }
    }
    lines.finish(&mut on_line);
    if let Some(guard) = guard {
        guard.release();
    }
    Ok(if timed_out {
        Ended::TimedOut(limit)
    } else {
        ended(status)
    })
}

fn ended(status: Option<ExitStatus>) -> Ended {
    if status.is_some_and(|status| status.success()) {
        Ended::Success
    } else {
        Ended::Failure
    }
}

/// Kills a process group when it is dropped, or when this process dies in any
/// way (an interrupt, a kill by CI): then the pipe to the guard closes.
///
/// It is a shell because the standard library can neither signal a group nor
/// ask the kernel for a parent-death signal without unsafe code.
#[derive(Debug)]
struct GroupGuard {
    shell: Child,
    /// `None` only while the guard is being ended.
    pipe: Option<ChildStdin>,
}

impl GroupGuard {
    /// Starts to guard the group that `leader` leads.
    fn start(leader: &Child) -> io::Result<Self> {
        let mut shell = Command::new("sh")
            .args([
                "-c",
                r#"read -r _ && exit 0; kill -s KILL -- "-$1""#,
                "guard",
            ])
            .arg(leader.id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A group of its own: an interrupt from the terminal must not end
            // the guard before it has done its work.
            .process_group(0)
            .spawn()?;
        let pipe = shell.stdin.take();
        Ok(Self { shell, pipe })
    }

    /// Ends the guard without killing the group.
    fn release(mut self) {
        if let Some(mut pipe) = self.pipe.take() {
            // A guard that is already gone needs no word from us.
            let _ = pipe.write_all(b"done\n");
        }
    }
}

impl Drop for GroupGuard {
    fn drop(&mut self) {
        self.pipe = None;
        // Nothing is left to do about a guard that cannot be waited for.
        let _ = self.shell.wait();
    }
}

fn read_in_background(mut reader: io::PipeReader) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return,
                Ok(read_bytes) => {
                    if sender.send(buffer[..read_bytes].to_vec()).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    receiver
}

/// Cuts a stream of bytes into lines of plain text.
#[derive(Debug, Default)]
struct LineSplitter {
    partial: Vec<u8>,
}

impl LineSplitter {
    fn push(&mut self, chunk: &[u8], on_line: &mut impl FnMut(&str)) {
        for piece in chunk.split_inclusive(|&byte| byte == b'\n') {
            self.partial.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                self.finish(on_line);
            }
        }
    }

    fn finish(&mut self, on_line: &mut impl FnMut(&str)) {
        if !self.partial.is_empty() {
            on_line(plain(&String::from_utf8_lossy(&self.partial)).trim_end());
            self.partial.clear();
        }
    }
}

/// `text` without terminal escapes (`ESC [ … letter`).
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            // The introducer `[` is consumed by the search for the last letter.
            chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> (Ended, Vec<String>) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut lines = Vec::new();
        let ended = run(command, limit, &mut io::sink(), |line| {
            lines.push(line.to_owned())
        })
        .unwrap();
        (ended, lines)
    }

    #[test]
    fn lines_of_both_streams_arrive_in_order() {
        let (ended, lines) = shell("echo a; echo b >&2; printf c", Duration::from_secs(20));
        assert_eq!(ended, Ended::Success);
        assert_eq!(lines, ["a", "b", "c"]);
    }

    #[test]
    fn failure_is_reported() {
        assert_eq!(shell("exit 3", Duration::from_secs(20)).0, Ended::Failure);
    }

    #[test]
    fn the_time_limit_kills_grandchildren_too() {
        let limit = Duration::from_millis(300);
        let start = Instant::now();
        let (ended, lines) = shell("echo begin; sleep 60; echo never", limit);
        assert_eq!(ended, Ended::TimedOut(limit));
        assert_eq!(lines, ["begin"]);
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn left_behind_processes_do_not_hold_the_run() {
        let start = Instant::now();
        let (ended, lines) = shell("sleep 60 & echo done", Duration::from_secs(40));
        assert_eq!(ended, Ended::Success);
        assert_eq!(lines, ["done"]);
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn terminal_escapes_are_removed() {
        assert_eq!(
            plain("\u{1b}[1m\u{1b}[92m  Running\u{1b}[0m tests"),
            "  Running tests"
        );
    }
}

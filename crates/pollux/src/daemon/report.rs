//! What `run` writes to stdout: JSON Lines, or a page on a terminal, or nothing
//! but how to connect. A daemon whose output goes to a file or a journal is not
//! expected to fill it: its numbers are asked for, with `--json` or otherwise.

use std::io::{self, IsTerminal as _, Write as _};

use crate::stats::Snapshot;
use crate::stats::table::{self, Style};

/// Home, clear to the end of the screen.
const REPAINT: &str = "\x1b[H\x1b[J";

/// Where statistics go, and in which form.
pub(super) enum Report {
    /// One document a line.
    Json,
    /// A page that is painted again and again.
    Page(Style),
    /// Not a terminal.
    Quiet,
}

impl Report {
    pub(super) fn new(json: bool) -> Self {
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if json {
            Self::Json
        } else if io::stdout().is_terminal() && !is_dumb {
            Self::Page(if wants_colour() {
                Style::Colour
            } else {
                Style::Plain
            })
        } else {
            Self::Quiet
        }
    }

    /// Says how to connect: on stdout, which `--json` keeps for documents. False
    /// if nobody reads any more.
    pub(super) fn starts(&self, lines: &str) -> io::Result<bool> {
        match self {
            Self::Json => is_read(io::stderr().write_all(lines.as_bytes())),
            Self::Page(_) | Self::Quiet => write(lines),
        }
    }

    /// Shows a snapshot. False if nobody reads any more.
    pub(super) fn show(&mut self, snapshot: &Snapshot) -> io::Result<bool> {
        match self {
            Self::Json => write(&(serde_json::to_string(snapshot)? + "\n")),
            Self::Page(style) => write(&format!("{REPAINT}{}", table::render(snapshot, *style))),
            Self::Quiet => Ok(true),
        }
    }
}

/// <https://no-color.org>
pub(crate) fn wants_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Writes all at once, so that a reader sees it now.
fn write(text: &str) -> io::Result<bool> {
    let mut stdout = io::stdout().lock();
    is_read(
        stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush()),
    )
}

/// The end of a reader is not an error, but the end.
fn is_read(written: io::Result<()>) -> io::Result<bool> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

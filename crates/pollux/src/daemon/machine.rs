//! What the machine says to a plan, before anything starts.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use pollux_vhost::{Backend, PortConfig, SocketError};

use crate::config::{Config, Surroundings};
use crate::error::Fault;

/// What the environment says about where sockets live.
pub(super) fn surroundings(socket_dir: Option<&Path>) -> anyhow::Result<Surroundings> {
    let socket_dir = socket_dir
        .map(std::path::absolute)
        .transpose()
        .context("--socket-dir is no path")?;
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    Ok(Surroundings {
        socket_dir,
        // Its owner is the effective user.
        is_root: std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0),
        runtime_dir: runtime_dir.filter(|dir| dir.is_absolute()),
    })
}

/// Looks at the cores and sockets of a plan. The socket directory is made for
/// that if it was missing.
pub(super) fn check(config: &Config) -> (SocketDir, Vec<Fault>) {
    let mut faults = config.check_cores(&pollux_sys::available_cores());
    let socket_dir = match SocketDir::open(config.socket_dir.as_deref()) {
        Ok(socket_dir) => socket_dir,
        Err(fault) => {
            faults.push(fault);
            return (SocketDir::default(), faults);
        }
    };
    for (name, config) in &config.vhost {
        if let Err(error) = Backend::check(config) {
            faults.push(socket_fault(name, config, &error));
        }
    }
    (socket_dir, faults)
}

/// Why a port's socket cannot be used.
pub(super) fn socket_fault(port: &str, config: &PortConfig, error: &SocketError) -> Fault {
    let object = format!("port \"{port}\", socket {}", config.socket.display());
    let (why, next) = match error {
        SocketError::TooLong { bytes, .. } => (
            format!("its path has {bytes} bytes, and a Unix socket's has at most 107"),
            "give a shorter --socket-dir, or a shorter `socket`",
        ),
        SocketError::Taken { .. } => (
            "it is taken: another process listens on it".to_owned(),
            "end that process, or give another --socket-dir or `socket`",
        ),
        SocketError::NotASocket { .. } => (
            "there is a file of that name that is no socket".to_owned(),
            "remove it, or give another `socket`",
        ),
        SocketError::Make { source, .. } => (
            format!("it cannot be made: {source}"),
            "see that its directory exists and that you may write to it",
        ),
        other => (other.to_string(), "correct what it names, then start again"),
    };
    Fault::new(object, why, next)
}

/// The directory of the sockets. If it was made here it goes again with this
/// value, unless it is kept.
#[derive(Debug, Default)]
pub(super) struct SocketDir {
    made: Option<PathBuf>,
}

impl SocketDir {
    /// Makes the directory if it is missing: the last part of its path only,
    /// lest a slip of the pen becomes a tree.
    fn open(dir: Option<&Path>) -> Result<Self, Fault> {
        let Some(dir) = dir else {
            return Ok(Self::default());
        };
        let fault = |why: String, next: &str| {
            Err(Fault::new(
                format!("socket directory {}", dir.display()),
                why,
                next,
            ))
        };
        match std::fs::create_dir(dir) {
            Ok(()) => Ok(Self {
                made: Some(dir.to_owned()),
            }),
            Err(_) if dir.is_dir() => Ok(Self::default()),
            Err(error) => match error.kind() {
                io::ErrorKind::AlreadyExists => fault(
                    "it is not a directory".to_owned(),
                    "remove it, or give another --socket-dir",
                ),
                io::ErrorKind::NotFound => fault(
                    "neither it nor its parent directory exists".to_owned(),
                    "make the parent directory, or give another --socket-dir",
                ),
                _ => fault(
                    format!("it cannot be made: {error}"),
                    "give a --socket-dir that you may write to",
                ),
            },
        }
    }

    /// The directory stays.
    pub(super) fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        if let Some(dir) = &self.made {
            // Somebody may have put something into it: then it is theirs.
            let _ = std::fs::remove_dir(dir);
        }
    }
}

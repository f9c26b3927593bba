//! The plan file of `pollux run`: text to values, without I/O.
//!
//! It is read key by key ([`read`]) rather than deserialised at a stroke, so
//! that all that is wrong is told at once, with lines and suggestions. A kind of
//! port is a variant of [`file::PortKind`] with keys of its own; a new kind, a
//! new key or a new section changes nothing for plans without it.

mod check;
mod file;
mod hint;
mod read;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use pollux_datapath::{Plan, PlannedMode, PortPlan, WorkerPlan};
use pollux_vhost::PortConfig;

pub(crate) use self::hint::connect_hint;

use self::file::{Mode, PlanFile, PortEntry, PortKind};
use self::read::{At, Document};
use crate::error::Fault;

/// What a plan means depends on these besides its text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Surroundings {
    /// `--socket-dir`, absolute.
    pub(crate) socket_dir: Option<PathBuf>,
    /// Whether the user is root.
    pub(crate) is_root: bool,
    /// `$XDG_RUNTIME_DIR`.
    pub(crate) runtime_dir: Option<PathBuf>,
}

impl Surroundings {
    /// Where sockets with relative names live.
    fn socket_dir(&self, file: &PlanFile) -> Option<PathBuf> {
        let default = || match (self.is_root, &self.runtime_dir) {
            (true, _) => Some(PathBuf::from("/run/pollux")),
            (false, Some(dir)) => Some(dir.join("pollux")),
            (false, None) => None,
        };
        let in_file = file.socket_dir.as_ref().map(|dir| dir.value.clone());
        self.socket_dir.clone().or(in_file).or_else(default)
    }
}

/// A plan that does not contradict itself.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// For the datapath.
    pub(crate) plan: Plan,
    /// Sockets of the vhost ports, by name of port, with absolute paths.
    pub(crate) vhost: Vec<(String, PortConfig)>,
    /// Where relative socket names live; `None` if there are none.
    pub(crate) socket_dir: Option<PathBuf>,
    /// Cores, by what a fault calls their place in the file.
    cores: Vec<(String, usize)>,
}

impl Config {
    /// Reads a plan that the operator calls `name`.
    ///
    /// # Errors
    /// All that is wrong: first what cannot be read, and if there is nothing of
    /// that, what contradicts itself.
    pub(crate) fn parse(
        name: &str,
        text: &str,
        surroundings: &Surroundings,
    ) -> Result<Self, Vec<Fault>> {
        let document = Document::new(name, text);
        let file = document
            .parse()
            .map(|table| PlanFile::read(&document, &table));
        let Some(file) = file.filter(|_| document.is_sound()) else {
            return Err(document.into_faults());
        };
        let socket_dir = surroundings.socket_dir(&file);
        let needs_dir = file
            .ports
            .iter()
            .any(|port| vhost_socket(port).is_relative());
        if needs_dir && socket_dir.is_none() {
            document.fault_of_file(
                "no directory for its sockets is known: you are not root and $XDG_RUNTIME_DIR is not set",
                "give --socket-dir DIR",
            );
        }
        let socket_dir = socket_dir.filter(|_| needs_dir);
        check::contradictions(&document, &file, socket_dir.as_deref());
        if document.is_sound() {
            Ok(Self::from_file(name, &file, socket_dir))
        } else {
            Err(document.into_faults())
        }
    }

    fn from_file(name: &str, file: &PlanFile, socket_dir: Option<PathBuf>) -> Self {
        let dir = socket_dir.as_deref();
        Self {
            plan: plan(file),
            vhost: file
                .ports
                .iter()
                .map(|port| (port.name.value.clone(), port_config(port, dir)))
                .collect(),
            socket_dir,
            cores: file
                .workers
                .iter()
                .map(|worker| {
                    let At { value: core, line } = worker.core;
                    let object = format!("{name}:{line}, worker \"{}\"", worker.name.value);
                    (object, core)
                })
                .collect(),
        }
    }

    /// What is wrong for a process that may run on the cores `available`.
    pub(crate) fn check_cores(&self, available: &[usize]) -> Vec<Fault> {
        let names: Vec<String> = available.iter().map(ToString::to_string).collect();
        self.cores
            .iter()
            .filter(|(_, core)| !available.contains(core))
            .map(|(object, core)| {
                Fault::new(
                    object,
                    format!("core {core} is not there, or this process may not run on it"),
                    format!("choose a core of {}", names.join(", ")),
                )
            })
            .collect()
    }
}

/// The socket of a port as the plan names it.
fn vhost_socket(port: &PortEntry) -> PathBuf {
    let PortKind::Vhost(vhost) = &port.kind;
    match &vhost.socket {
        Some(socket) => socket.value.clone(),
        None => PathBuf::from(format!("{}.sock", port.name.value)),
    }
}

/// The socket of a port; relative ones live in `dir`.
fn vhost_socket_in(port: &PortEntry, dir: Option<&Path>) -> PathBuf {
    dir.unwrap_or(Path::new("")).join(vhost_socket(port))
}

fn port_config(port: &PortEntry, dir: Option<&Path>) -> PortConfig {
    let PortKind::Vhost(vhost) = &port.kind;
    PortConfig {
        socket: vhost_socket_in(port, dir),
        mode: vhost.mode,
        any_memory: vhost.any_memory,
    }
}

fn plan(file: &PlanFile) -> Plan {
    let pairs = file
        .pairs
        .iter()
        .map(|pair| (pair.a.value.clone(), pair.b.value.clone()));
    let workers = file.workers.iter().map(|worker| WorkerPlan {
        name: worker.name.value.clone(),
        core: Some(worker.core.value),
    });
    let ports = file.ports.iter().map(|port| PortPlan {
        worker: port.worker.as_ref().map(|worker| worker.value.clone()),
        ..PortPlan::new(&port.name.value)
    });
    Plan {
        mode: match file.mode {
            Mode::Learn => PlannedMode::Learn,
            Mode::Xconnect => PlannedMode::CrossConnect(pairs.collect()),
        },
        forward_bpdu: file.forward_bpdu,
        workers: workers.collect(),
        ports: ports.collect(),
    }
}

//! What a plan file says, as values: names are not looked up yet.

use std::path::PathBuf;

use pollux_vhost::SocketMode;
use serde::Deserialize;
use toml::de::DeTable;

use super::read::{At, Document, Section};

/// How destinations are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// A learning bridge.
    #[default]
    Learn,
    /// Wires between pairs of ports.
    Xconnect,
}

impl Mode {
    const NAMES: [&str; 2] = ["learn", "xconnect"];
}

/// The value of `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KindName {
    Vhost,
}

impl KindName {
    const NAMES: [&str; 1] = ["vhost"];
}

const SOCKET_MODE_NAMES: [&str; 2] = ["server", "client"];

/// A plan file.
#[derive(Clone, Debug)]
pub(super) struct PlanFile {
    pub(super) socket_dir: Option<At<PathBuf>>,
    pub(super) mode: Mode,
    pub(super) forward_bpdu: bool,
    pub(super) pairs: Vec<PairEntry>,
    pub(super) workers: Vec<WorkerEntry>,
    pub(super) ports: Vec<PortEntry>,
}

/// `[[switch.pair]]`: names of ports.
#[derive(Clone, Debug)]
pub(super) struct PairEntry {
    pub(super) line: usize,
    pub(super) a: At<String>,
    pub(super) b: At<String>,
}

/// `[[worker]]`
#[derive(Clone, Debug)]
pub(super) struct WorkerEntry {
    pub(super) name: At<String>,
    pub(super) core: At<usize>,
}

/// `[[port]]`
#[derive(Clone, Debug)]
pub(super) struct PortEntry {
    pub(super) name: At<String>,
    pub(super) worker: Option<At<String>>,
    pub(super) kind: PortKind,
}

/// What a port is, with the keys of that kind.
#[derive(Clone, Debug)]
pub(super) enum PortKind {
    Vhost(VhostEntry),
}

/// `kind = "vhost"`
#[derive(Clone, Debug)]
pub(super) struct VhostEntry {
    /// `None`: NAME.sock
    pub(super) socket: Option<At<PathBuf>>,
    pub(super) mode: SocketMode,
    pub(super) any_memory: bool,
}

impl PlanFile {
    /// Reads what can be read; what cannot is a fault of the document, and then
    /// the value is not whole.
    pub(super) fn read(document: &Document<'_>, table: &DeTable<'_>) -> Self {
        let mut root = Section::root(document, table);
        let mut file = Self {
            socket_dir: None,
            mode: Mode::default(),
            forward_bpdu: false,
            pairs: Vec::new(),
            workers: Vec::new(),
            ports: Vec::new(),
        };
        if let Some(daemon) = root.section("daemon", "daemon") {
            file.read_daemon(daemon);
        }
        if let Some(switch) = root.section("switch", "switch") {
            file.read_switch(switch);
        }
        let workers = root.sections("worker", "worker");
        file.workers = workers.into_iter().filter_map(WorkerEntry::read).collect();
        let ports = root.sections("port", "port");
        file.ports = ports.into_iter().filter_map(PortEntry::read).collect();
        root.finish();
        file
    }

    fn read_daemon(&mut self, mut daemon: Section<'_, '_>) {
        self.socket_dir = path(&mut daemon, "socket_dir");
        if let Some(dir) = &self.socket_dir
            && dir.value.is_relative()
        {
            daemon.fault(
                dir.line,
                format!("`socket_dir` is the relative path {}", dir.value.display()),
                "write it from / on, or leave it out and give --socket-dir DIR",
            );
        }
        daemon.finish();
    }

    fn read_switch(&mut self, mut switch: Section<'_, '_>) {
        let mode = switch.choice("mode", &Mode::NAMES);
        self.mode = mode.map(|mode| mode.value).unwrap_or_default();
        self.forward_bpdu = switch.flag("forward_bpdu").unwrap_or(false);
        let pairs = switch.sections("pair", "switch.pair");
        self.pairs = pairs.into_iter().filter_map(PairEntry::read).collect();
        switch.finish();
    }
}

impl PairEntry {
    fn read(mut pair: Section<'_, '_>) -> Option<Self> {
        let a = pair.required_text("a");
        let b = pair.required_text("b");
        let line = pair.line;
        pair.finish();
        Some(Self { line, a: a?, b: b? })
    }
}

impl WorkerEntry {
    fn read(mut worker: Section<'_, '_>) -> Option<Self> {
        let name = name(&mut worker, "worker");
        let core = worker.required_number("core");
        worker.finish();
        Some(Self {
            name: name?,
            core: core?,
        })
    }
}

impl PortEntry {
    fn read(mut port: Section<'_, '_>) -> Option<Self> {
        let name = name(&mut port, "port");
        let worker = port.text("worker");
        if !port.has("kind") {
            port.missing("kind", "kind = \"vhost\"");
        }
        // Which keys there are depends on the kind: without one, none is unknown.
        let kind = match port.choice("kind", &KindName::NAMES)?.value {
            KindName::Vhost => PortKind::Vhost(VhostEntry::read(&mut port)),
        };
        port.finish();
        Some(Self {
            name: name?,
            worker,
            kind,
        })
    }
}

impl VhostEntry {
    fn read(port: &mut Section<'_, '_>) -> Self {
        let mode = port.choice("mode", &SOCKET_MODE_NAMES);
        Self {
            socket: path(port, "socket"),
            mode: mode.map(|mode| mode.value).unwrap_or_default(),
            any_memory: port.flag("any_memory").unwrap_or(false),
        }
    }
}

/// The name of a worker or port, which is what its section is called from now
/// on.
fn name(section: &mut Section<'_, '_>, kind: &str) -> Option<At<String>> {
    let name = section.required_text("name")?;
    section.object = format!("{kind} \"{}\"", name.value);
    if name.value.contains('/') {
        section.fault(
            name.line,
            "its name contains a slash, and files are named after it",
            "choose a name without one",
        );
    }
    Some(name)
}

fn path(section: &mut Section<'_, '_>, key: &'static str) -> Option<At<PathBuf>> {
    section.text(key).map(|At { value, line }| At {
        value: value.into(),
        line,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lists that faults show are those that serde reads.
    #[test]
    fn every_listed_name_is_known() {
        fn reads<T: serde::de::DeserializeOwned>(names: &[&str]) {
            for name in names {
                serde_json::from_value::<T>((*name).into()).unwrap();
            }
        }
        reads::<Mode>(&Mode::NAMES);
        reads::<KindName>(&KindName::NAMES);
        reads::<SocketMode>(&SOCKET_MODE_NAMES);
    }
}

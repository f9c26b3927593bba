//! A `pollux run` between guests, and what it says of its ports.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Pollux, write_text};

/// Longest wait for traffic on a machine that is busy with other things.
const LIMIT: Duration = Duration::from_secs(40);

/// Waits for what other processes do, without taking their cores.
///
/// # Panics
/// If it does not come in time.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "waited {LIMIT:?} in vain: {what}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// The test's turn: guests and switch need two cores for themselves. `None`,
/// counted as skipped, if testpmd cannot run here.
pub(crate) fn turn(test: &str) -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(reason) = pollux_testkit::testpmd::missing() {
        pollux_testkit::skip(test, &reason);
        return None;
    }
    Some(turn)
}

/// How the plan's ports find destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Learn,
    /// vm1 with vm2, vm3 with vm4.
    CrossConnect,
}

/// Ports vm1, vm2 ... of the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestPorts {
    count: usize,
    mode: &'static str,
}

impl TestPorts {
    pub(crate) fn server(count: usize) -> Self {
        Self {
            count,
            mode: "server",
        }
    }

    pub(crate) fn client(count: usize) -> Self {
        Self {
            count,
            mode: "client",
        }
    }
}

/// What pollux says of a port.
#[derive(Clone, Debug, Default)]
pub(crate) struct Port {
    pub(crate) state: String,
    /// Names without their prefixes: "RING_PACKED".
    pub(crate) features: Vec<String>,
    pub(crate) rx: u64,
    pub(crate) tx: u64,
    pub(crate) drops: BTreeMap<String, u64>,
    pub(crate) rx_drops: u64,
    pub(crate) tx_drops: u64,
}

impl Port {
    pub(crate) fn drop(&self, reason: &str) -> u64 {
        self.drops.get(reason).copied().unwrap_or(0)
    }

    fn of(port: &Value) -> Self {
        let drops: BTreeMap<String, u64> = port["drops"]
            .as_object()
            .expect("an object")
            .iter()
            .map(|(reason, count)| (reason.clone(), count.as_u64().expect("a count")))
            .collect();
        let side = |side| {
            let of_side = pollux_packet::DropReason::ALL
                .iter()
                .filter(|reason| reason.side() == side);
            of_side
                .map(|reason| drops.get(reason.name()).copied().unwrap_or(0))
                .sum()
        };
        let features = port["features"].as_array().expect("a list");
        let name = |feature: &Value| {
            let name = feature.as_str().expect("a name");
            name.rsplit_once("_F_")
                .map_or(name, |(_, name)| name)
                .to_owned()
        };
        Self {
            state: port["state"].as_str().expect("a state").to_owned(),
            features: features.iter().map(name).collect(),
            rx: port["rx"]["packets"].as_u64().expect("a count"),
            tx: port["tx"]["packets"].as_u64().expect("a count"),
            rx_drops: side(pollux_packet::DropSide::Rx),
            tx_drops: side(pollux_packet::DropSide::Tx),
            drops,
        }
    }
}

type Ports = Arc<Mutex<BTreeMap<String, Port>>>;

/// A running switch with its plan in a directory of its own.
pub(crate) struct Bed {
    directory: tempfile::TempDir,
    plan: PathBuf,
    /// `None` between two runs only.
    pollux: Option<Pollux>,
    ports: Ports,
}

impl Bed {
    pub(crate) fn new(mode: Mode, ports: TestPorts) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut text = String::from("[[worker]]\nname = \"w0\"\ncore = 0\n");
        for port in 1..=ports.count {
            let mode = ports.mode;
            write!(
                text,
                "[[port]]\nname = \"vm{port}\"\nkind = \"vhost\"\nmode = \"{mode}\"\n"
            )
            .expect("a string");
        }
        if mode == Mode::CrossConnect {
            text.push_str("[switch]\nmode = \"xconnect\"\n");
            for port in (1..ports.count).step_by(2) {
                let next = port + 1;
                write!(
                    text,
                    "[[switch.pair]]\na = \"vm{port}\"\nb = \"vm{next}\"\n"
                )
                .expect("a string");
            }
        }
        let plan = write_text(directory.path(), &text);
        let (pollux, ports) = run(&plan, &directory);
        Self {
            directory,
            plan,
            pollux: Some(pollux),
            ports,
        }
    }

    /// Sockets of the first ports.
    pub(crate) fn sockets<const N: usize>(&self) -> [PathBuf; N] {
        std::array::from_fn(|index| {
            let name = format!("vm{}.sock", index + 1);
            self.directory.path().join(name)
        })
    }

    /// What pollux said last of a port.
    pub(crate) fn port(&self, name: &str) -> Port {
        let ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.get(name).cloned().unwrap_or_default()
    }

    pub(crate) fn wait_state(&self, name: &str, state: &str) {
        wait_until(&format!("{name} is {state}"), || {
            self.port(name).state == state
        });
    }

    pub(crate) fn wait_running(&self, names: &[&str]) {
        names
            .iter()
            .for_each(|name| self.wait_state(name, "running"));
    }

    /// Ends the process and starts it again.
    pub(crate) fn restart(&mut self) {
        self.end();
        let (pollux, ports) = run(&self.plan, &self.directory);
        self.pollux = Some(pollux);
        self.ports = ports;
    }

    /// Ends the process, which has to end well.
    pub(crate) fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let pollux = self.pollux.take().expect("it runs");
        pollux.signal("TERM");
        let finished = pollux.finish();
        assert!(finished.status.success(), "{finished:?}");
    }
}

impl Drop for Bed {
    /// A test that fails says what it has seen last.
    fn drop(&mut self) {
        if thread::panicking() {
            let ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
            eprintln!("{ports:#?}");
        }
    }
}

fn run(plan: &std::path::Path, directory: &tempfile::TempDir) -> (Pollux, Ports) {
    let more = ["--json", "--interval", "0.1"];
    let mut pollux = Pollux::run(plan, directory.path(), &more);
    let ports = Ports::default();
    let lines = pollux.stdout_lines();
    let latest = Arc::clone(&ports);
    thread::spawn(move || {
        for line in lines {
            let document: Value = serde_json::from_str(&line).expect("one document a line");
            let ports = document["ports"].as_array().expect("a list").iter();
            let ports = ports.map(|port| {
                let name = port["name"].as_str().expect("a name").to_owned();
                (name, Port::of(port))
            });
            *latest.lock().unwrap_or_else(PoisonError::into_inner) = ports.collect();
        }
    });
    (pollux, ports)
}

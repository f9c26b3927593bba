//! The wanted configuration as a value, and the way from one to the next.

use std::collections::HashSet;
use std::fmt;

use crate::PORTS_MAX;
use crate::budget::Budget;

/// The wanted configuration of a switch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// How destinations are found.
    pub mode: PlannedMode,
    /// Flood 01:80:C2:00:00:00 to 0F instead of dropping them.
    pub forward_bpdu: bool,
    /// Threads that forward.
    pub workers: Vec<WorkerPlan>,
    /// Ports.
    pub ports: Vec<PortPlan>,
}

/// How destinations are found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PlannedMode {
    /// A learning bridge.
    #[default]
    Learn,
    /// Wires between ports, by name. A port in no pair drops what it receives.
    CrossConnect(Vec<(String, String)>),
}

/// A thread that forwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlan {
    /// Unique among workers.
    pub name: String,
    /// Core to pin it to; `None` leaves that to the kernel.
    pub core: Option<usize>,
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    /// Unique among ports.
    pub name: String,
    /// Worker that polls it; `None` = the one that polls fewest.
    pub worker: Option<String>,
    /// Where a visit to it ends.
    pub budget: Budget,
}

impl PortPlan {
    /// A port with defaults.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            worker: None,
            budget: Budget::default(),
        }
    }
}

/// A plan that contradicts itself or the machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Names are how ports and workers are addressed.
    #[error("a {kind} has an empty name; give it one")]
    EmptyName {
        /// "port" or "worker".
        kind: &'static str,
    },
    /// A NUL would end the name of a thread, others would garble a screen.
    #[error("the {kind} name {name:?} contains a control character; leave it out")]
    ControlCharacter {
        /// "port" or "worker".
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// Two objects of a kind with one name.
    #[error("two {kind}s are named \"{name}\"; rename one")]
    DuplicateName {
        /// "port" or "worker".
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// Two workers on one core would take turns by the kernel's clock.
    #[error("workers \"{first}\" and \"{second}\" are both on core {core}; give each its own")]
    CoreTwice {
        /// The core.
        core: usize,
        /// One worker.
        first: String,
        /// The other.
        second: String,
    },
    /// This process may not run there.
    #[error(
        "worker \"{worker}\" is on core {core}, which is not among {available:?}; choose one of these"
    )]
    NoSuchCore {
        /// The worker.
        worker: String,
        /// The core.
        core: usize,
        /// Cores of this process.
        available: Vec<usize>,
    },
    /// Nothing would be forwarded.
    #[error("there are ports but no worker to poll them; add a worker")]
    NoWorker,
    /// A port names a worker that is not in the plan.
    #[error("port \"{port}\" is to be polled by worker \"{worker}\", which is not in the plan")]
    UnknownWorker {
        /// The port.
        port: String,
        /// The worker.
        worker: String,
    },
    /// A cross-connect names a port that is not in the plan.
    #[error("a cross-connect names port \"{port}\", which is not in the plan")]
    UnknownPort {
        /// The port.
        port: String,
    },
    /// A wire has two ends.
    #[error("port \"{port}\" is cross-connected more than once")]
    PairedTwice {
        /// The port.
        port: String,
    },
    /// More ports than there are numbers.
    #[error("{count} ports are more than {PORTS_MAX}")]
    TooManyPorts {
        /// Ports in the plan.
        count: usize,
    },
}

impl Plan {
    /// The port of that name.
    #[must_use]
    pub fn port(&self, name: &str) -> Option<&PortPlan> {
        self.ports.iter().find(|port| port.name == name)
    }

    /// The worker of that name.
    #[must_use]
    pub fn worker(&self, name: &str) -> Option<&WorkerPlan> {
        self.workers.iter().find(|worker| worker.name == name)
    }

    /// Checks the plan for a process that may run on `cores`.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self, cores: &[usize]) -> Result<(), PlanError> {
        check_names("worker", self.workers.iter().map(|worker| &worker.name))?;
        check_names("port", self.ports.iter().map(|port| &port.name))?;
        self.check_cores(cores)?;
        if self.ports.len() > usize::from(PORTS_MAX) {
            return Err(PlanError::TooManyPorts {
                count: self.ports.len(),
            });
        }
        if self.workers.is_empty() && !self.ports.is_empty() {
            return Err(PlanError::NoWorker);
        }
        for port in &self.ports {
            if let Some(worker) = &port.worker
                && self.worker(worker).is_none()
            {
                return Err(PlanError::UnknownWorker {
                    port: port.name.clone(),
                    worker: worker.clone(),
                });
            }
        }
        self.check_pairs()
    }

    fn check_cores(&self, available: &[usize]) -> Result<(), PlanError> {
        let mut taken: Vec<(usize, &str)> = Vec::new();
        for worker in &self.workers {
            let Some(core) = worker.core else { continue };
            if !available.contains(&core) {
                return Err(PlanError::NoSuchCore {
                    worker: worker.name.clone(),
                    core,
                    available: available.to_vec(),
                });
            }
            if let Some((_, first)) = taken.iter().find(|(taken, _)| *taken == core) {
                return Err(PlanError::CoreTwice {
                    core,
                    first: (*first).to_owned(),
                    second: worker.name.clone(),
                });
            }
            taken.push((core, &worker.name));
        }
        Ok(())
    }

    fn check_pairs(&self) -> Result<(), PlanError> {
        let PlannedMode::CrossConnect(pairs) = &self.mode else {
            return Ok(());
        };
        let mut paired = HashSet::new();
        for port in pairs.iter().flat_map(|(a, b)| [a, b]) {
            if self.port(port).is_none() {
                return Err(PlanError::UnknownPort { port: port.clone() });
            }
            if !paired.insert(port) {
                return Err(PlanError::PairedTwice { port: port.clone() });
            }
        }
        Ok(())
    }
}

/// Names are there, can be shown, and are told apart.
fn check_names<'a>(
    kind: &'static str,
    names: impl Iterator<Item = &'a String>,
) -> Result<(), PlanError> {
    let mut seen = HashSet::new();
    for name in names {
        if name.is_empty() {
            return Err(PlanError::EmptyName { kind });
        }
        if name.contains(char::is_control) {
            return Err(PlanError::ControlCharacter {
                kind,
                name: name.clone(),
            });
        }
        if !seen.insert(name) {
            return Err(PlanError::DuplicateName {
                kind,
                name: name.clone(),
            });
        }
    }
    Ok(())
}

/// One step from plan to plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Takes a port away: frames for it are dropped, its addresses forgotten.
    RemovePort(String),
    /// Starts a thread.
    AddWorker(WorkerPlan),
    /// Moves a worker's queues to others and ends its thread.
    RemoveWorker(String),
    /// Changes budget or worker of a port that goes on.
    ChangePort(PortPlan),
    /// Makes a port, with its queues stopped.
    AddPort(PortPlan),
    /// Changes how destinations are found.
    SetMode {
        /// How.
        mode: PlannedMode,
        /// See [`Plan::forward_bpdu`].
        forward_bpdu: bool,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RemovePort(name) => write!(f, "remove port {name}"),
            Self::AddWorker(worker) => match worker.core {
                Some(core) => write!(f, "add worker {} on core {core}", worker.name),
                None => write!(f, "add worker {}", worker.name),
            },
            Self::RemoveWorker(name) => write!(f, "remove worker {name}"),
            Self::ChangePort(port) => write!(f, "change port {}", port.name),
            Self::AddPort(port) => write!(f, "add port {}", port.name),
            Self::SetMode {
                mode: PlannedMode::Learn,
                ..
            } => f.write_str("learn"),
            Self::SetMode {
                mode: PlannedMode::CrossConnect(pairs),
                ..
            } => {
                write!(f, "cross-connect {} pairs", pairs.len())
            }
        }
    }
}

/// The actions that lead from `old` to `new`, in order. What is the same in
/// both is in none of them.
///
/// Ports go first, so that their numbers are free; workers come before ports;
/// the mode is last, when every port that it names is there.
///
/// Workers come before others go, so that a queue finds somewhere to move. But
/// no worker comes while another has its core (two threads that spin would
/// share it) or its name: those go first, and their queues wait or move
/// meanwhile. So a worker that changes its core goes and comes back.
#[must_use]
pub fn diff(old: &Plan, new: &Plan) -> Vec<Action> {
    let mut actions = Vec::new();
    for port in &old.ports {
        if new.port(&port.name).is_none() {
            actions.push(Action::RemovePort(port.name.clone()));
        }
    }
    diff_workers(old, new, &mut actions);
    for port in &new.ports {
        match old.port(&port.name) {
            None => actions.push(Action::AddPort(port.clone())),
            Some(before) if before != port => actions.push(Action::ChangePort(port.clone())),
            Some(_) => {}
        }
    }
    if (&old.mode, old.forward_bpdu) != (&new.mode, new.forward_bpdu) {
        actions.push(Action::SetMode {
            mode: new.mode.clone(),
            forward_bpdu: new.forward_bpdu,
        });
    }
    actions
}

/// The part of [`diff`] about workers: adds whatever can be added, and only
/// when something is in the way removes the first worker that is.
fn diff_workers(old: &Plan, new: &Plan, actions: &mut Vec<Action>) {
    let differs = |worker: &&WorkerPlan, plan: &Plan| plan.worker(&worker.name) != Some(worker);
    let going = old.workers.iter().filter(|worker| differs(worker, new));
    let coming = new.workers.iter().filter(|worker| differs(worker, old));
    let (mut going, mut coming): (Vec<_>, Vec<_>) = (going.collect(), coming.collect());
    loop {
        coming.retain(|worker| {
            let waits = going.iter().any(|other| is_in_the_way(other, worker));
            if !waits {
                actions.push(Action::AddWorker((*worker).clone()));
            }
            waits
        });
        if going.is_empty() {
            return;
        }
        let in_the_way = |other: &&WorkerPlan| coming.iter().any(|w| is_in_the_way(other, w));
        let next = going.iter().position(in_the_way).unwrap_or(0);
        actions.push(Action::RemoveWorker(going.remove(next).name.clone()));
    }
}

/// True if `worker` cannot come before `other` has gone.
fn is_in_the_way(other: &WorkerPlan, worker: &WorkerPlan) -> bool {
    other.name == worker.name || (other.core.is_some() && other.core == worker.core)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PacketBudget;

    fn worker(name: &str, core: usize) -> WorkerPlan {
        WorkerPlan {
            name: name.to_owned(),
            core: Some(core),
        }
    }

    fn plan(workers: &[(&str, usize)], ports: &[&str]) -> Plan {
        Plan {
            workers: workers
                .iter()
                .map(|(name, core)| worker(name, *core))
                .collect(),
            ports: ports.iter().map(|name| PortPlan::new(name)).collect(),
            ..Plan::default()
        }
    }

    #[test]
    fn from_nothing_workers_come_before_ports() {
        let new = plan(&[("w0", 0)], &["a", "b"]);
        assert_eq!(
            diff(&Plan::default(), &new),
            [
                Action::AddWorker(worker("w0", 0)),
                Action::AddPort(PortPlan::new("a")),
                Action::AddPort(PortPlan::new("b")),
            ]
        );
        assert_eq!(diff(&new, &new), []);
    }

    #[test]
    fn only_what_differs_is_touched() {
        let old = plan(&[("w0", 0), ("w1", 1)], &["a", "b", "c"]);
        let mut new = plan(&[("w0", 0), ("w2", 2)], &["a", "c", "d"]);
        new.ports[1].budget.packets = PacketBudget::Units(7);
        new.mode = PlannedMode::CrossConnect(vec![("a".to_owned(), "d".to_owned())]);
        assert_eq!(
            diff(&old, &new),
            [
                Action::RemovePort("b".to_owned()),
                Action::AddWorker(worker("w2", 2)),
                Action::RemoveWorker("w1".to_owned()),
                Action::ChangePort(new.ports[1].clone()),
                Action::AddPort(PortPlan::new("d")),
                Action::SetMode {
                    mode: new.mode.clone(),
                    forward_bpdu: false
                },
            ]
        );
    }

    #[test]
    fn a_new_core_is_a_new_thread() {
        let old = plan(&[("w0", 0)], &["a"]);
        assert_eq!(
            diff(&old, &plan(&[("w0", 1)], &["a"])),
            [
                Action::RemoveWorker("w0".to_owned()),
                Action::AddWorker(worker("w0", 1)),
            ]
        );
    }

    /// The workers of the actions: "+name" and "-name".
    fn workers_of(old: &[(&str, usize)], new: &[(&str, usize)]) -> Vec<String> {
        let actions = diff(&plan(old, &[]), &plan(new, &[]));
        let text = actions.iter().map(|action| match action {
            Action::AddWorker(worker) => format!("+{}", worker.name),
            Action::RemoveWorker(name) => format!("-{name}"),
            other => panic!("{other}"),
        });
        text.collect()
    }

    #[test]
    fn no_core_has_two_workers_at_any_time() {
        assert_eq!(workers_of(&[("a", 0)], &[("b", 0)]), ["-a", "+b"]);
        // One that is in nobody's way stays until the queues have a new place.
        assert_eq!(
            workers_of(&[("a", 0), ("b", 1)], &[("c", 2), ("d", 1)]),
            ["+c", "-b", "+d", "-a"]
        );
        // Workers that change places, and a chain of them.
        assert_eq!(
            workers_of(&[("a", 0), ("b", 1)], &[("a", 1), ("b", 0)]),
            ["-a", "-b", "+a", "+b"]
        );
        assert_eq!(
            workers_of(&[("a", 0), ("b", 1)], &[("a", 1), ("c", 0)]),
            ["-a", "+c", "-b", "+a"]
        );
        // Whatever has no core of its own is in nobody's way.
        let unpinned = |names: &[&str]| {
            let mut plan = plan(
                &names.iter().map(|name| (*name, 0)).collect::<Vec<_>>(),
                &[],
            );
            plan.workers
                .iter_mut()
                .for_each(|worker| worker.core = None);
            plan
        };
        let actions = diff(&unpinned(&["a"]), &unpinned(&["b"]));
        assert!(matches!(&actions[0], Action::AddWorker(worker) if worker.name == "b"));
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        let check = |plan: &Plan| plan.check(&[0, 1]).map_err(|error| error.to_string());
        assert_eq!(check(&plan(&[("w0", 0), ("w1", 1)], &["a"])), Ok(()));
        let refused = |plan: &Plan, part: &str| {
            let error = check(plan).expect_err(part);
            assert!(error.contains(part), "{error}");
        };
        refused(
            &plan(&[("w", 0), ("w", 1)], &[]),
            "two workers are named \"w\"",
        );
        refused(&plan(&[("w", 0)], &["a", "a"]), "two ports are named \"a\"");
        refused(&plan(&[("w", 0)], &[""]), "empty name");
        refused(
            &plan(&[("w\0", 0)], &[]),
            "the worker name \"w\\0\" contains a control character",
        );
        refused(
            &plan(&[("w", 0)], &["a\nb"]),
            "the port name \"a\\nb\" contains",
        );
        refused(&plan(&[("w", 0), ("x", 0)], &[]), "both on core 0");
        refused(&plan(&[("w", 9)], &[]), "not among [0, 1]");
        refused(&plan(&[], &["a"]), "no worker");
        let mut pinned = plan(&[("w", 0)], &["a"]);
        pinned.ports[0].worker = Some("x".to_owned());
        refused(&pinned, "worker \"x\"");
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let mut wired = plan(&[("w", 0)], &["a", "b", "c"]);
        wired.mode = PlannedMode::CrossConnect(vec![pair("a", "x")]);
        refused(&wired, "names port \"x\"");
        wired.mode = PlannedMode::CrossConnect(vec![pair("a", "b"), pair("b", "c")]);
        refused(&wired, "\"b\" is cross-connected more than once");
    }
}

//! The handle by which control runs a switch.

mod housekeeping;
mod state;

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use pollux_switch::{Fdb, FdbConfig, FdbError};
use pollux_sys::PinError;

use self::housekeeping::Housekeeping;
use self::state::State;
use crate::PORTS_MAX;
use crate::counters::{PortCounters, WorkerSnapshot};
use crate::plan::{Action, Plan, PlanError, diff};
use crate::port::Port;

/// Where the seconds come from by which addresses age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Time {
    /// The clock.
    #[default]
    Real,
    /// [`Switch::advance_seconds`], for tests.
    Manual,
}

/// What a switch is made with and keeps.
#[derive(Clone, Copy, Debug)]
pub struct SwitchConfig {
    /// The forwarding database. Its `max_ports` is lowered to [`PORTS_MAX`].
    pub fdb: FdbConfig,
    /// Where seconds come from.
    pub time: Time,
    /// Called on each new worker thread before its first turn, for what a
    /// program wants to set on it (or a test wants to watch).
    pub thread_start: Option<fn()>,
}

impl Default for SwitchConfig {
    /// A default FDB with a random seed, real time.
    fn default() -> Self {
        Self {
            fdb: FdbConfig {
                max_ports: PORTS_MAX,
                seed: RandomState::new().hash_one("fdb"),
                ..FdbConfig::default()
            },
            time: Time::Real,
            thread_start: None,
        }
    }
}

/// Why a switch was not made, or a plan not applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Nothing was changed.
    #[error("the plan was refused, nothing was changed")]
    Plan(#[from] PlanError),
    /// The kernel gave no thread to a new switch.
    #[error("the housekeeping thread of the switch could not be started")]
    Housekeeping(#[source] std::io::Error),
    /// The kernel gave no thread.
    #[error("worker \"{worker}\" could not be started")]
    Thread {
        /// The worker.
        worker: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The worker could not be pinned.
    #[error("worker \"{worker}\" could not be started")]
    Pin {
        /// The worker.
        worker: String,
        /// Why.
        #[source]
        source: PinError,
    },
    /// The worker has ended by itself: a bug. The plan is in force but for that
    /// worker: its queues are not polled.
    #[error(
        "worker \"{worker}\" has died and its queues are not polled; \
         apply a plan without it to give them to others, and report this"
    )]
    WorkerDied {
        /// The worker.
        worker: String,
    },
    /// The FDB has no such port number.
    #[error("port \"{port}\" was refused by the forwarding database: {source}")]
    Fdb {
        /// The port.
        port: String,
        /// Why.
        source: FdbError,
    },
}

/// A running switch. Dropping it ends its workers.
pub struct Switch {
    state: Mutex<State>,
    housekeeping: Housekeeping,
    fdb: Arc<Fdb>,
}

impl Switch {
    /// A switch without ports or workers.
    ///
    /// # Errors
    /// [`ApplyError::Housekeeping`].
    pub fn new(config: SwitchConfig) -> Result<Self, ApplyError> {
        // Workers have tables by port number: whoever holds the FDB must not be
        // able to put an address on a port beyond them.
        let fdb = Arc::new(Fdb::new(FdbConfig {
            max_ports: config.fdb.max_ports.min(PORTS_MAX),
            ..config.fdb
        }));
        let housekeeping =
            Housekeeping::start(Arc::clone(&fdb), config.time).map_err(ApplyError::Housekeeping)?;
        Ok(Self {
            state: Mutex::new(State::new(Arc::clone(&fdb), config.thread_start)),
            housekeeping,
            fdb,
        })
    }

    /// Makes `plan` the configuration, step by step, and returns the steps.
    /// What is the same in the old plan and the new is not touched: it goes on
    /// without losing a frame.
    ///
    /// # Errors
    /// * [`ApplyError::Plan`]: nothing was changed.
    /// * [`ApplyError::WorkerDied`]: every step was done, and all other workers
    ///   act on it. It is returned for as long as a dead worker is in the plan.
    ///   A plan without it gives its queues to others; with the next one it may
    ///   come back.
    /// * Any other: the steps before the one that failed were done, that one and
    ///   those after it were not. [`plan`](Self::plan) tells what is in force;
    ///   applying again does the rest.
    pub fn apply(&self, plan: &Plan) -> Result<Vec<Action>, ApplyError> {
        plan.check(&pollux_sys::available_cores())?;
        let mut state = self.state();
        let actions = diff(&state.plan(), plan);
        for action in &actions {
            tracing::info!(%action, "apply");
            state.perform(action, &self.housekeeping)?;
        }
        state.reorder(plan);
        match state.dead_worker() {
            None => Ok(actions),
            Some(worker) => Err(ApplyError::WorkerDied {
                worker: worker.to_owned(),
            }),
        }
    }

    /// The configuration in force, with workers that have died.
    #[must_use]
    pub fn plan(&self) -> Plan {
        self.state().plan()
    }

    /// The port of that name, to start and stop its queues.
    #[must_use]
    pub fn port(&self, name: &str) -> Option<Arc<Port>> {
        self.state().port(name)
    }

    /// What was done for a port by all workers since it was made.
    #[must_use]
    pub fn port_counters(&self, name: &str) -> Option<PortCounters> {
        self.state().port_counters(name)
    }

    /// Counters of a worker, of one moment.
    #[must_use]
    pub fn worker_counters(&self, name: &str) -> Option<WorkerSnapshot> {
        self.state().worker_counters(name)
    }

    /// Worker that polls a port; `None` if it has died, or nobody does.
    #[must_use]
    pub fn worker_of_port(&self, name: &str) -> Option<String> {
        self.state().worker_of_port(name)
    }

    /// The forwarding database.
    #[must_use]
    pub fn fdb(&self) -> &Fdb {
        &self.fdb
    }

    /// Moves the time by which addresses age, and lets them age.
    pub fn advance_seconds(&self, seconds: u16) {
        self.housekeeping.advance_seconds(seconds);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // A panic under the lock leaves lists that are consistent: each step
        // changes them at once and tells the workers after that, and the next
        // step tells them everything again.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.state().stop(&self.housekeeping);
    }
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch").finish_non_exhaustive()
    }
}

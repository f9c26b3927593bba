//! What control knows of a running switch, and the steps that change it.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pollux_switch::{Fdb, Forwarding, ForwardingConfig, Mode, PortId};
use pollux_sys::{Interrupt, PinError};

use super::ApplyError;
use super::housekeeping::{Housekeeping, WatchedWorker};
use crate::PORTS_MAX;
use crate::counters::{PortCounters, WorkerSnapshot};
use crate::plan::{Action, Plan, PlannedMode, PortPlan, WorkerPlan};
use crate::port::Port;
use crate::worker::{Message, PolledQueue, PortTable, Task, Worker, WorkerShared};

/// How often control looks whether a worker has acted. A burst lasts
/// microseconds.
const ACKNOWLEDGE_POLL: Duration = Duration::from_micros(50);

/// A worker of the plan. It may have died: then it is never asked for anything,
/// and polls nothing, until a plan removes it.
struct RunningWorker {
    plan: WorkerPlan,
    watched: Arc<WatchedWorker>,
    thread: JoinHandle<()>,
    /// Messages sent; as many acknowledgements will come.
    sent: u64,
}

struct PlannedPort {
    plan: PortPlan,
    port: Arc<Port>,
    /// Name of the worker that is to poll it.
    worker: Option<String>,
    /// Name of the worker that polls it.
    polled_by: Option<String>,
    /// What the port number had counted before this port had it.
    baseline: PortCounters,
}

pub(super) struct State {
    fdb: Arc<Fdb>,
    thread_start: Option<fn()>,
    mode: PlannedMode,
    forward_bpdu: bool,
    workers: Vec<RunningWorker>,
    ports: Vec<PlannedPort>,
    /// By port number: what workers that have ended had counted.
    ended: Vec<PortCounters>,
    /// Port numbers that have been in use are below this.
    numbers_len: usize,
}

impl State {
    pub(super) fn new(fdb: Arc<Fdb>, thread_start: Option<fn()>) -> Self {
        Self {
            fdb,
            thread_start,
            mode: PlannedMode::Learn,
            forward_bpdu: false,
            workers: Vec::new(),
            ports: Vec::new(),
            ended: vec![PortCounters::default(); usize::from(PORTS_MAX)],
            numbers_len: 0,
        }
    }

    pub(super) fn plan(&self) -> Plan {
        Plan {
            mode: self.mode.clone(),
            forward_bpdu: self.forward_bpdu,
            workers: self
                .workers
                .iter()
                .map(|worker| worker.plan.clone())
                .collect(),
            ports: self.ports.iter().map(|port| port.plan.clone()).collect(),
        }
    }

    /// Puts workers and ports in the order of the plan, so that what is in
    /// force reads like what was asked for.
    pub(super) fn reorder(&mut self, plan: &Plan) {
        let place = |name: &str| plan.ports.iter().position(|port| port.name == name);
        self.ports.sort_by_key(|port| place(&port.plan.name));
        let place = |name: &str| plan.workers.iter().position(|worker| worker.name == name);
        self.workers.sort_by_key(|worker| place(&worker.plan.name));
    }

    pub(super) fn port(&self, name: &str) -> Option<Arc<Port>> {
        self.planned(name).map(|port| Arc::clone(&port.port))
    }

    /// The worker that polls a port; not one that has died.
    pub(super) fn worker_of_port(&self, name: &str) -> Option<String> {
        let polled_by = self.planned(name)?.polled_by.as_ref()?;
        let worker = self.worker(polled_by)?;
        (!worker.is_dead()).then(|| polled_by.clone())
    }

    /// A worker of the plan that has died.
    pub(super) fn dead_worker(&self) -> Option<&str> {
        let dead = self.workers.iter().find(|worker| worker.is_dead())?;
        Some(&dead.plan.name)
    }

    pub(super) fn port_counters(&self, name: &str) -> Option<PortCounters> {
        let port = self.planned(name)?;
        Some(
            self.counted(port.port.identity().id())
                .since(&port.baseline),
        )
    }

    pub(super) fn worker_counters(&self, name: &str) -> Option<WorkerSnapshot> {
        let worker = self.worker(name)?;
        Some(worker.watched.shared.counters().read(self.numbers_len))
    }

    fn worker(&self, name: &str) -> Option<&RunningWorker> {
        self.workers.iter().find(|worker| worker.plan.name == name)
    }

    fn planned(&self, name: &str) -> Option<&PlannedPort> {
        self.ports.iter().find(|port| port.plan.name == name)
    }

    /// Everything ever counted for a port number.
    fn counted(&self, id: PortId) -> PortCounters {
        let mut sum = self.ended[id.index()];
        for worker in &self.workers {
            sum.merge(&worker.watched.shared.counters().read_port(id));
        }
        sum
    }

    /// Takes one step; on an error it was not taken.
    ///
    /// A worker that has died, or dies meanwhile, is no error here and holds up
    /// nothing: all others are brought up to date. [`dead_worker`] names it.
    ///
    /// [`dead_worker`]: Self::dead_worker
    pub(super) fn perform(
        &mut self,
        action: &Action,
        housekeeping: &Housekeeping,
    ) -> Result<(), ApplyError> {
        match action {
            Action::AddWorker(plan) => return self.add_worker(plan, housekeeping),
            Action::AddPort(plan) => return self.add_port(plan, housekeeping),
            Action::RemovePort(name) => self.remove_port(name, housekeeping),
            Action::RemoveWorker(name) => self.remove_worker(name, housekeeping),
            Action::ChangePort(plan) => self.change_port(plan, housekeeping),
            Action::SetMode { mode, forward_bpdu } => {
                self.mode = mode.clone();
                self.forward_bpdu = *forward_bpdu;
                self.publish(housekeeping);
            }
        }
        Ok(())
    }

    fn add_port(&mut self, plan: &PortPlan, housekeeping: &Housekeeping) -> Result<(), ApplyError> {
        let id = self.free_number();
        let identity = self.fdb.open_port(id).map_err(|source| ApplyError::Fdb {
            port: plan.name.clone(),
            source,
        })?;
        self.ports.push(PlannedPort {
            plan: plan.clone(),
            port: Arc::new(Port::new(&plan.name, identity, Arc::clone(&self.fdb))),
            worker: None,
            polled_by: None,
            baseline: self.counted(id),
        });
        self.publish(housekeeping);
        Ok(())
    }

    fn remove_port(&mut self, name: &str, housekeeping: &Housekeeping) {
        let Some(index) = self.ports.iter().position(|port| port.plan.name == name) else {
            return;
        };
        let removed = self.ports.remove(index);
        self.publish(housekeeping);
        // No worker learns for the port any more, and none has its queues.
        self.fdb.close_port(removed.port.identity());
        removed.port.remove();
    }

    fn change_port(&mut self, plan: &PortPlan, housekeeping: &Housekeeping) {
        if let Some(port) = self
            .ports
            .iter_mut()
            .find(|port| port.plan.name == plan.name)
        {
            if port.plan.worker != plan.worker {
                port.worker = None;
            }
            port.plan = plan.clone();
        }
        self.publish(housekeeping);
    }

    fn add_worker(
        &mut self,
        plan: &WorkerPlan,
        housekeeping: &Housekeeping,
    ) -> Result<(), ApplyError> {
        let shared = Arc::new(WorkerShared::new());
        let task = self.task(&self.forwarding(), &self.table(), |_| false);
        let tick = housekeeping.tick();
        let (core, thread_start) = (plan.core, self.thread_start);
        let own = Arc::clone(&shared);
        let alive = Arc::new(());
        let is_alive = Arc::downgrade(&alive);
        let (report, started) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(format!("pollux-{}", plan.name))
            .spawn(move || {
                let _alive = alive;
                let ready = make_ready(core);
                let failed = ready.is_err();
                // The other end waits for this one message.
                let _ = report.send(ready);
                drop(report);
                if failed {
                    return;
                }
                let worker = Worker::new(own, tick, task);
                if let Some(thread_start) = thread_start {
                    thread_start();
                }
                worker.run();
            })
            .map_err(|source| ApplyError::Thread {
                worker: plan.name.clone(),
                source,
            })?;
        let worker = plan.name.clone();
        let interrupt = match started.recv() {
            Ok(Ok(interrupt)) => interrupt,
            Ok(Err(NotReady::Pin(source))) => return Err(ApplyError::Pin { worker, source }),
            Ok(Err(NotReady::Interrupt(source))) => {
                return Err(ApplyError::Thread { worker, source });
            }
            Err(mpsc::RecvError) => return Err(ApplyError::WorkerDied { worker }),
        };
        let watched = WatchedWorker::new(&plan.name, shared, interrupt, is_alive);
        self.workers.push(RunningWorker {
            plan: plan.clone(),
            watched: Arc::new(watched),
            thread,
            sent: 0,
        });
        self.publish(housekeeping);
        Ok(())
    }

    fn remove_worker(&mut self, name: &str, housekeeping: &Housekeeping) {
        let Some(index) = self
            .workers
            .iter()
            .position(|worker| worker.plan.name == name)
        else {
            return;
        };
        for port in &mut self.ports {
            if port.worker.as_deref() == Some(name) {
                port.worker = None;
            }
        }
        self.assign(Some(name));
        self.publish_assigned(housekeeping);
        let worker = self.workers.remove(index);
        self.end(worker, housekeeping);
        self.watch(housekeeping);
    }

    /// Ends a thread, unless it has ended, and keeps what it has counted.
    fn end(&mut self, mut worker: RunningWorker, housekeeping: &Housekeeping) {
        worker.watched.report_end();
        let was_known = worker.watched.expect_end();
        // Dead or alive, it is gone afterwards.
        worker.send(Message::Stop, housekeeping);
        let shared = &worker.watched.shared;
        let counted = shared.counters().read(usize::from(PORTS_MAX));
        for (ended, counters) in self.ended.iter_mut().zip(&counted.ports) {
            ended.merge(counters);
        }
        while shared.reap().is_some() {}
        if worker.thread.join().is_err() && !was_known {
            tracing::error!(worker = worker.plan.name, "the worker panicked at its end");
        }
    }

    pub(super) fn stop(&mut self, housekeeping: &Housekeeping) {
        while let Some(worker) = self.workers.pop() {
            self.end(worker, housekeeping);
        }
        for port in self.ports.drain(..) {
            port.port.remove();
        }
        self.watch(housekeeping);
    }

    /// The lowest port number that is not in use: tables stay dense. What was
    /// learned for an earlier port of that number is void, since each port is a
    /// new life of its number.
    fn free_number(&mut self) -> PortId {
        let used = |id| {
            self.ports
                .iter()
                .any(|port| port.port.identity().id() == id)
        };
        let number = (0..PORTS_MAX)
            .map(PortId)
            .find(|&id| !used(id))
            .expect("the plan was checked for the number of ports");
        self.numbers_len = self.numbers_len.max(number.index() + 1);
        number
    }

    fn forwarding(&self) -> Arc<Forwarding> {
        let id_of = |name: &String| self.port(name).map(|port| port.identity().id());
        let mode = match &self.mode {
            PlannedMode::Learn => Mode::Learn,
            // A pair whose ports are not both there (yet, or any more) waits.
            PlannedMode::CrossConnect(pairs) => Mode::CrossConnect(
                pairs
                    .iter()
                    .filter_map(|(a, b)| id_of(a).zip(id_of(b)))
                    .collect(),
            ),
        };
        let config = ForwardingConfig {
            mode,
            fdb: Arc::clone(&self.fdb),
            members: self
                .ports
                .iter()
                .map(|port| port.port.identity().id())
                .collect(),
            forward_bpdu: self.forward_bpdu,
        };
        let forwarding = Forwarding::new(config);
        Arc::new(forwarding.expect("Plan::check refuses a port in two pairs"))
    }

    fn table(&self) -> Arc<PortTable> {
        let mut table = vec![None; usize::from(PORTS_MAX)].into_boxed_slice();
        for port in &self.ports {
            table[port.port.identity().id().index()] = Some(Arc::clone(&port.port));
        }
        Arc::new(table)
    }

    fn task(
        &self,
        forwarding: &Arc<Forwarding>,
        table: &Arc<PortTable>,
        polls: impl Fn(&PlannedPort) -> bool,
    ) -> Box<Task> {
        let queues = self.ports.iter().filter(|port| polls(port));
        Box::new(Task {
            forwarding: Arc::clone(forwarding),
            ports: Arc::clone(table),
            queues: queues
                .map(|port| PolledQueue::new(Arc::clone(&port.port), port.plan.budget))
                .collect(),
        })
    }

    /// Gives every port without a worker one: the one it asks for, or the one
    /// that polls fewest. `leaving` takes none, and no worker that has died
    /// does. Who has one keeps it, dead or alive: what killed a worker may be in
    /// its queues, so only a plan gives them to another.
    fn assign(&mut self, leaving: Option<&str>) {
        for index in 0..self.ports.len() {
            if self.ports[index].worker.is_some() {
                continue;
            }
            let load = |name: &str| {
                let on_it = |port: &&PlannedPort| port.worker.as_deref() == Some(name);
                self.ports.iter().filter(on_it).count()
            };
            let staying = self
                .workers
                .iter()
                .filter(|worker| !worker.is_dead())
                .map(|worker| &worker.plan.name)
                .filter(|name| leaving != Some(name.as_str()));
            let wanted = self.ports[index].plan.worker.as_ref();
            let chosen = match wanted {
                Some(wanted) => staying.clone().find(|name| *name == wanted),
                None => staying.clone().min_by_key(|name| load(name)),
            };
            self.ports[index].worker = chosen.cloned();
        }
    }

    /// Brings every worker that lives up to date and waits until all are.
    fn publish(&mut self, housekeeping: &Housekeeping) {
        self.assign(None);
        self.publish_assigned(housekeeping);
    }

    /// In two steps: every queue leaves the worker that polled it before the
    /// next one gets it, so that its frames stay in order; and every worker
    /// knows a port before any polls it.
    fn publish_assigned(&mut self, housekeeping: &Housekeeping) {
        self.watch(housekeeping);
        let forwarding = self.forwarding();
        let table = self.table();
        self.send_tasks(&forwarding, &table, housekeeping, |port, worker| {
            port.polled_by.as_deref() == Some(worker) && port.worker.as_deref() == Some(worker)
        });
        let moved = |port: &PlannedPort| port.polled_by != port.worker;
        if self.ports.iter().any(moved) {
            for port in &mut self.ports {
                port.polled_by.clone_from(&port.worker);
            }
            self.send_tasks(&forwarding, &table, housekeeping, |port, worker| {
                port.polled_by.as_deref() == Some(worker)
            });
        }
    }

    fn send_tasks(
        &mut self,
        forwarding: &Arc<Forwarding>,
        table: &Arc<PortTable>,
        housekeeping: &Housekeeping,
        polls: impl Fn(&PlannedPort, &str) -> bool,
    ) {
        let tasks: Vec<_> = self
            .workers
            .iter()
            .map(|worker| self.task(forwarding, table, |port| polls(port, &worker.plan.name)))
            .collect();
        for (worker, task) in self.workers.iter_mut().zip(tasks) {
            worker.send(Message::Task(task), housekeeping);
        }
    }

    fn watch(&self, housekeeping: &Housekeeping) {
        housekeeping.watch(
            self.workers
                .iter()
                .map(|worker| Arc::clone(&worker.watched))
                .collect(),
            self.ports
                .iter()
                .map(|port| Arc::clone(&port.port))
                .collect(),
        );
    }
}

/// Why a worker's thread cannot begin.
enum NotReady {
    Pin(PinError),
    Interrupt(std::io::Error),
}

/// Pins the calling thread, which is to be a worker's; it can be interrupted
/// from now on.
fn make_ready(core: Option<usize>) -> Result<Interrupt, NotReady> {
    core.map_or(Ok(()), pollux_sys::pin_current_thread)
        .map_err(NotReady::Pin)?;
    Interrupt::of_this_thread().map_err(NotReady::Interrupt)
}

impl RunningWorker {
    /// The thread has ended, although control has not ended it.
    fn is_dead(&self) -> bool {
        self.thread.is_finished()
    }

    /// Sends one message and waits until the worker has acted on it, or is dead.
    fn send(&mut self, message: Message, housekeeping: &Housekeeping) {
        let shared = &self.watched.shared;
        let mut unsent = Some(message);
        while !self.thread.is_finished() {
            if let Some(message) = unsent.take() {
                match shared.send(message) {
                    Ok(()) => self.sent += 1,
                    Err(message) => unsent = Some(message),
                }
            } else if shared.acknowledged() >= self.sent {
                return;
            }
            housekeeping.wake();
            thread::sleep(ACKNOWLEDGE_POLL);
        }
    }
}

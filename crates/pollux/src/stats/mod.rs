//! Statistics: a [`Reading`] is what the switch has counted up to a moment, a
//! [`Snapshot`] is what two readings say about the window between them, and
//! [`table`] makes a page of it. Only [`Reading::take`] looks at the switch.

mod snapshot;
pub(crate) mod table;

use std::time::{Duration, Instant};

use pollux_datapath::{PortCounters, Switch, WorkerCounters};
use pollux_sys::Clock;
use pollux_vhost::{Backend, PortStatus};

pub(crate) use self::snapshot::Snapshot;

/// Everything counted since the start, at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    uptime: Duration,
    ticks: TickRate,
    workers: Vec<WorkerReading>,
    ports: Vec<PortReading>,
}

/// What a worker's tick is.
#[derive(Clone, Copy, Debug)]
struct TickRate {
    per_second: u64,
    /// Whether ticks are cycles of the processor's time-stamp counter.
    is_tsc: bool,
}

#[derive(Clone, Debug)]
struct WorkerReading {
    name: String,
    core: Option<usize>,
    counters: WorkerCounters,
}

#[derive(Clone, Debug)]
struct PortReading {
    name: String,
    worker: Option<String>,
    counters: PortCounters,
    status: Option<PortStatus>,
}

impl Reading {
    /// Reads all counters of a switch that runs since `started`. No worker is
    /// disturbed.
    pub(crate) fn take(switch: &Switch, backend: &Backend, started: Instant) -> Self {
        let clock = Clock::calibrate();
        let plan = switch.plan();
        let workers = plan.workers.into_iter().filter_map(|worker| {
            let counters = switch.worker_counters(&worker.name)?.worker;
            Some(WorkerReading {
                name: worker.name,
                core: worker.core,
                counters,
            })
        });
        let ports = plan.ports.into_iter().filter_map(|port| {
            Some(PortReading {
                worker: switch.worker_of_port(&port.name),
                counters: switch.port_counters(&port.name)?,
                status: backend.status(&port.name),
                name: port.name,
            })
        });
        Self {
            uptime: started.elapsed(),
            ticks: TickRate {
                per_second: clock.ticks_per_second(),
                is_tsc: clock.is_tsc(),
            },
            workers: workers.collect(),
            ports: ports.collect(),
        }
    }
}

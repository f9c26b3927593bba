//! The switch at run time: ports, workers, and the handle by which control
//! changes them.
//!
//! * A [`Port`] is a name and the cells of its queues. Whoever owns the device
//!   (a vhost-user session, a NIC) puts an [`RxQueue`] and a [`TxQueue`] into
//!   them and takes them out again.
//! * A worker is a pinned thread that takes turns over its queues: receive a
//!   burst, classify it, transmit it, give the buffers back.
//! * A [`Plan`] is the wanted configuration as a value; [`Switch::apply`] gets
//!   there by [`Action`]s and touches nothing that stays as it is.
//!
//! From the switch's view: it receives from an `RxQueue` what the guest sent
//! through its TX ring, and transmits through a `TxQueue` into the guest's RX
//! ring.
#![forbid(unsafe_code)]

mod budget;
mod counters;
mod guest;
mod plan;
mod port;
mod switch;
mod worker;

pub use budget::{BYTE_BUDGET_DEFAULT, Budget, PacketBudget, UNLIMITED_UNITS, UNLIMITED_VISIT};
pub use counters::{PortCounters, WorkerCounters, WorkerSnapshot};
pub use plan::{Action, Plan, PlanError, PlannedMode, PortPlan, WorkerPlan, diff};
pub use port::{Burst, Port, PortRemoved, Queue, QueueState, Returns, RxQueue, TxQueue};
pub use switch::{ApplyError, Switch, SwitchConfig, Time};

/// Ports that can exist at one time.
pub const PORTS_MAX: u16 = 1024;

//! vhost-user, both sides of it.
//!
//! * [`Backend`] is the switch's side: one thread drives the sockets of all
//!   ports. Each connection is a session, a state machine without I/O: messages
//!   in, replies and changes to the port's queues out. No worker ever waits for
//!   it.
//! * [`frontend`] is a guest's side of the same sockets, for the demo, load
//!   generators and tests.
//!
//! Follows the vhost-user specification as QEMU publishes it
//! (docs/interop/vhost-user.rst); where DPDK and QEMU differ, the place says so.
#![forbid(unsafe_code)]

mod backend;
mod features;
mod framing;
pub mod frontend;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod rings;
mod session;
mod socket;
mod status;

pub use backend::{Backend, PortConfig, SocketError, SocketMode};
pub use status::{MemoryStatus, PortStatus, RingLayout, RingStatus, SessionState};

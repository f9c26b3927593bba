//! The driver half of a guest's rings: what a guest kernel or a DPDK guest
//! does, for load generators, embedded guests and tests.
//!
//! [`DriverRing`] puts chains of buffers into a ring and takes them back;
//! [`TxRing`] and [`RxRing`] send and receive Ethernet frames through one, with
//! one buffer of guest memory for each descriptor; a [`Guest`] is both, with the
//! memory around them.

mod guest;
mod net;
mod packed;
mod ring;
mod split;

pub use guest::{GUEST_BASE, Guest, GuestError, GuestSpec, USER_BASE};
pub use net::{ChainShape, NetConfig, NetError, Received, RxRing, TxRing};
pub use ring::{Buffer, DriverError, DriverRing, Used};

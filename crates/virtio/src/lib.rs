//! Guest memory and virtqueues: what a poll-mode switch needs of virtio 1.2,
//! from both sides of a ring.
//!
//! * [`GuestMemory`] is a guest's memory as its frontend shared it: checked
//!   regions in a flat table, from which the only thing to be had are
//!   [`Span`](pollux_packet::Span)s.
//! * [`device`] is the device half of a ring: [`device::TxRing`] receives from a
//!   guest TX ring, [`device::RxRing`] transmits into a guest RX ring. The peer
//!   is taken for an attacker: every shared field is read once, every walk is
//!   bounded, and a fault breaks that ring alone.
//! * [`driver`] is the guest's half of the same rings, for load generators,
//!   embedded guests and tests.
//!
//! Names are the specification's. `TX` and `RX` are always the guest's view.
//!
//! `unsafe` is allowed here for guest memory alone (`memory.rs`, `split.rs`):
//! everything above works with checked tables and spans.

mod chain;
pub mod device;
pub mod driver;
mod memory;
mod notify;
mod ring;
mod spec;

pub use chain::{ChainError, ChainErrorCounts};
pub use memory::{GuestMemory, MemoryError, Region, RegionPlace};
pub use ring::{RingAreas, RingError};
pub use spec::{DESC_BYTES, DescFlags, Features, RING_SIZE_MAX};

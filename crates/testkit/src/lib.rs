//! Test guests and measuring tools: what tests and benches of several crates
//! need, and nothing that runs in production.

mod alloc;
mod frames;
mod random;
mod raw;
mod raw_packed;
mod raw_queue;
mod skip;
#[cfg(feature = "split-model")]
pub mod split_model;
pub mod testpmd;
mod traffic;
mod wait;

pub use alloc::CountingAllocator;
pub use frames::{frame_bytes, gather, transmit};
pub use pollux_virtio::driver::{GUEST_BASE, Guest, GuestSpec};
pub use random::Random;
pub use raw::{RawDesc, RawRing, RawUsed};
pub use raw_packed::RawPacked;
pub use raw_queue::RawQueue;
pub use skip::skip;
pub use traffic::{
    Device, EVERYBODY, Flow, NUMBERED_BYTES_MIN, Numbered, NumberedError, Station, mac_of,
    plain_frame,
};
pub use wait::{WAIT_MAX, wait_until};

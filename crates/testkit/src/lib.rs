//! Test guests and measuring tools: what tests and benches of several crates
//! need, and nothing that runs in production.

mod alloc;
mod random;
mod raw;
mod skip;
pub mod testpmd;
mod traffic;
mod wait;

pub use alloc::CountingAllocator;
pub use pollux_virtio::driver::{GUEST_BASE, Guest, GuestSpec};
pub use random::Random;
pub use raw::{RawDesc, RawRing, RawUsed};
pub use skip::skip;
pub use traffic::{
    Device, EVERYBODY, Flow, NUMBERED_BYTES_MIN, Numbered, NumberedError, Station, mac_of,
    plain_frame,
};
pub use wait::{WAIT_MAX, wait_until};

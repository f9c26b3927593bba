//! Test guests and measuring tools: what tests and benches of several crates
//! need, and nothing that runs in production.

mod alloc;
mod guest;

pub use alloc::CountingAllocator;
pub use guest::{GUEST_BASE, Guest, GuestSpec};

//! Frames, batches, drop reasons, header parsing and copies.
mod drop;
pub use drop::{DropCounts, DropReason, DropSide};

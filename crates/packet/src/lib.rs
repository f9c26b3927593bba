//! Frames in flight: what a port receives, the switch looks at and another
//! port sends, without a pool in between.
//!
//! * [`Span`] and [`SpanMut`] are bytes in memory that a peer (a guest, the
//!   kernel) may change at any moment. They can only be copied, never borrowed
//!   as a slice.
//! * [`Batch`] holds up to [`BATCH_MAX`] frames of one queue. A frame is
//!   `{offload, head, body}`: the head is a private snapshot of the first
//!   [`HEAD_BYTES`], taken once with volatile loads, from which every decision
//!   and the bytes sent are made; the body stays where the sender put it.
//! * [`FrameSet`] names frames of a batch by one bit each.
//! * [`DropReason`] is the one list of reasons for not delivering a frame.
//!
//! `unsafe` is allowed here for the copies alone (`span.rs`, `copy.rs`,
//! `batch.rs`).

mod batch;
mod burst;
mod copy;
mod drop;
mod frame_set;
mod offload;
mod span;

pub use batch::{Batch, BatchStore, Frame, FrameReader, OpenFrame, SpansFull};
pub use burst::{BurstLimit, Transmitted};
pub use drop::{BurstDrops, DropCounts, DropReason, DropSide};
pub use frame_set::FrameSet;
pub use offload::{NET_HEADER_BYTES, NET_HEADER_LEGACY_BYTES, Offload};
pub use span::{Span, SpanMut};

/// Most frames in one [`Batch`]; one bit each in a [`FrameSet`].
pub const BATCH_MAX: usize = 64;
/// Bytes of a frame's head that are copied into private memory: one cache line
/// holds every field that layer 2 decides on.
pub const HEAD_BYTES: u32 = 64;
/// Bytes of an Ethernet header: destination, source, type.
pub const ETHERNET_HEADER_BYTES: u32 = 14;
/// Longest frame that is carried, without the virtio-net header.
pub const FRAME_BYTES_MAX: u32 = 65_535;

//! The terms in which every kind of port receives and transmits.

use crate::{BurstDrops, DropReason};

/// Where a burst ends; at least one frame is taken if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BurstLimit {
    /// Frames, at most [`BATCH_MAX`](crate::BATCH_MAX).
    pub frames: u16,
    /// Work units: for a virtqueue one a chain, and one for each descriptor
    /// after its second.
    pub units: u32,
    /// Bytes of frames.
    pub bytes: u64,
}

impl BurstLimit {
    /// The longest burst for which a queue may be held: 64 frames or 64 KiB.
    pub const MAX: Self = Self {
        frames: 64,
        units: u32::MAX,
        bytes: 64 << 10,
    };
}

/// What became of the frames that were to be transmitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transmitted {
    /// Frames that the destination has now.
    pub frames: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Work beyond one unit a frame: chains after a frame's first, descriptors
    /// after a chain's second, chains returned unused.
    pub units: u32,
    /// Frames that the destination did not get.
    pub dropped: u32,
    /// Why. All zero if `dropped` is 0.
    pub drops: BurstDrops,
}

impl Transmitted {
    /// Counts `frames` as dropped for `reason`.
    #[inline]
    pub fn drop_frames(&mut self, frames: u32, reason: DropReason) {
        self.dropped += frames;
        self.drops.add(reason, frames);
    }
}

//! What the rings of embedded guests are like, on the command line.

use clap::Args;
use pollux_virtio::Features;
use serde::Serialize;

/// Layout and features of rings.
#[derive(Args, Clone, Copy, Debug, Serialize)]
pub(crate) struct RingArgs {
    /// Packed rings.
    #[arg(long)]
    packed: bool,
    /// VIRTIO_F_IN_ORDER: chains come back in order.
    #[arg(long)]
    in_order: bool,
    /// Without mergeable receive buffers.
    #[arg(long)]
    no_mergeable: bool,
}

impl RingArgs {
    pub(crate) fn features(self) -> Features {
        Features {
            packed: self.packed,
            in_order: self.in_order,
            mergeable: !self.no_mergeable,
            ..Features::MODERN
        }
    }

    /// Position of a ring after a reset.
    pub(crate) fn base(self) -> u16 {
        if self.packed { 0x8000 } else { 0 }
    }
}

//! The device half of a guest's rings: what the switch runs.
//!
//! A burst goes through named phases over all of its frames, so that cache
//! misses overlap: take heads, look descriptors up, copy, publish. The index is
//! read once and written once per burst.

mod counters;
mod packed;
mod ring;
mod rx_ring;
mod split;
mod tx_ring;

pub use counters::{Notifications, RingCounters};
pub use ring::RingFault;
pub use rx_ring::RxRing;
pub use tx_ring::{Burst, Returns, TxRing};

pub use pollux_packet::{BurstLimit, Transmitted};

use std::sync::Arc;

use pollux_sys::EventFd;

use crate::ring::RingAreas;
use crate::spec::Features;

/// How a ring is set up when it starts.
#[derive(Debug)]
pub struct RingConfig {
    /// Where the ring lies.
    pub areas: RingAreas,
    /// What was negotiated.
    pub features: Features,
    /// Position at which to go on, as the frontend says (SET_VRING_BASE). A split
    /// ring goes on at its own `used.idx` if that differs: see
    /// [`TxRing::base`]. Of a packed ring the index, with the wrap counter in bit
    /// 15: 0x8000 in a ring that is new.
    pub base: u16,
    /// Written to call the driver; `None` if it polls.
    pub call: Option<EventFd>,
    /// Where the ring counts.
    pub counters: Arc<RingCounters>,
}

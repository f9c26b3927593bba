//! Layer 2 decisions: frame keys, the forwarding database (FDB), verdicts.
//!
//! Nothing here does I/O, reads a clock, logs, or blocks: time comes in as a
//! coarse tick, frames come in as the private snapshot of their first bytes.
//! After construction nothing on the classify path allocates.
//!
//! - [`FrameKeys`]: what a frame's head says, as two [`MacVlan`] words.
//! - [`Fdb`]: which port a key was last seen on. One table, shared by all
//!   workers, read without locks, bounded, fair between ports.
//! - [`Forwarding`]: the immutable value that workers share; its
//!   [`classify`](Forwarding::classify) sorts one batch into [`Verdicts`].
#![forbid(unsafe_code)]

mod fdb;
mod forward;
mod key;
mod port;
mod verdict;

pub use fdb::{
    AGEING_SECONDS_MAX, CAPACITY_MAX, Fdb, FdbConfig, FdbEntry, FdbError, FdbStats, LearnOutcome,
    MOVES_PER_TICK_MAX,
};
pub use forward::{Forwarding, ForwardingConfig, ForwardingError, Memo, Mode};
pub use key::{FrameKeys, MacVlan};
pub use port::{PortId, PortRef};
pub use verdict::{Group, Verdicts};

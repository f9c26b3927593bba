//! What a session knows of one ring.

use std::sync::Arc;

use pollux_sys::EventFd;
use pollux_virtio::device::RingCounters;
use pollux_virtio::{GuestMemory, RingAreas};

use super::error::RequestError;
use crate::status::{RingLayout, RingStatus};

/// Number of rings: one pair.
pub(crate) const RINGS: usize = 2;
/// Index of the ring that the guest receives through; the other one is that it
/// sends through (virtio 1.2, section 5.1.2).
pub(crate) const GUEST_RX: usize = 0;

/// What a ring is called on screens.
pub(crate) const fn ring_name(index: usize) -> &'static str {
    if index == GUEST_RX {
        "guest RX"
    } else {
        "guest TX"
    }
}

/// Where a ring lies in the frontend's own process (bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UserAddrs {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
}

impl UserAddrs {
    /// The guest addresses of a ring of `size` descriptors.
    pub(super) fn translate(
        self,
        memory: &GuestMemory,
        size: u16,
    ) -> Result<RingAreas, RequestError> {
        let guest_addr = |area, user_addr| {
            memory
                .guest_addr_of_user(user_addr)
                .ok_or(RequestError::RingOutside { area, user_addr })
        };
        Ok(RingAreas {
            size,
            desc_addr: guest_addr("descriptor table", self.desc)?,
            avail_addr: guest_addr("available ring", self.avail)?,
            used_addr: guest_addr("used ring", self.used)?,
        })
    }
}

/// A ring as the frontend set it up so far.
#[derive(Debug, Default)]
pub(super) struct Vring {
    /// SET_VRING_NUM.
    pub(super) size: Option<u16>,
    /// SET_VRING_ADDR. Translated anew whenever the ring starts or the memory
    /// changes.
    pub(super) addrs: Option<UserAddrs>,
    /// SET_VRING_BASE as it came, or the position at which the ring stopped.
    pub(super) base: Option<u32>,
    /// From SET_VRING_KICK, with a descriptor or without, to GET_VRING_BASE.
    pub(super) started: bool,
    /// The last SET_VRING_ENABLE.
    pub(super) enable: Option<bool>,
    /// Kept open for the frontend, and read only to be counted: rings are polled.
    pub(super) kick: Option<EventFd>,
    pub(super) call: Option<EventFd>,
    pub(super) err: Option<EventFd>,
    /// The port has the ring.
    pub(super) running: bool,
    /// Why it does not run though it was started.
    pub(super) fault: Option<String>,
    /// Of all rings that this one was.
    pub(super) counters: Arc<RingCounters>,
}

impl Vring {
    /// Where the ring starts. Of a packed ring, where both positions may come, the
    /// available one is in the lower half.
    pub(super) fn position(&self, is_packed: bool) -> Result<u16, RequestError> {
        let base = match self.base {
            Some(base) if is_packed => base & 0xffff,
            Some(base) => base,
            // As after a reset: index 0, of a packed ring in its first lap.
            None => u32::from(is_packed) << 15,
        };
        u16::try_from(base).map_err(|_| RequestError::RingBase(base))
    }

    /// Counts the kicks that came since the last look.
    pub(super) fn count_kicks(&self) {
        if let Some(kick) = &self.kick {
            self.counters.add_kicks(kick.drain_nowait());
        }
    }

    pub(super) fn status(&self, index: usize, enabled: bool, layout: RingLayout) -> RingStatus {
        RingStatus {
            name: ring_name(index),
            size: self.size,
            layout,
            started: self.started,
            enabled,
            running: self.running,
            fault: self.fault.clone(),
            counters: Arc::clone(&self.counters),
        }
    }

    /// The first step that is missing for the ring to run.
    pub(super) fn missing(&self, index: usize, enabled: bool) -> Option<String> {
        let name = ring_name(index);
        if let Some(fault) = &self.fault {
            return Some(format!(
                "the {name} ring (vring {index}) cannot run: {fault}"
            ));
        }
        let step = if !self.started {
            "SET_VRING_KICK: the driver in the guest has not started it, or was stopped"
        } else if self.size.is_none() {
            "SET_VRING_NUM: the frontend has not said how large it is"
        } else if self.addrs.is_none() {
            "SET_VRING_ADDR: the frontend has not said where it lies"
        } else if !enabled {
            "SET_VRING_ENABLE: the frontend has not enabled it, or has disabled it"
        } else {
            return None;
        };
        Some(format!("the {name} ring (vring {index}) waits for {step}"))
    }
}

//! The rings of a session as queues of its port.

use std::any::Any;
use std::sync::Arc;

use pollux_datapath::{Port, QueueState, RxQueue, TxQueue};
use pollux_sys::EventFd;
use pollux_virtio::device::{self, RingConfig};
use pollux_virtio::{GuestMemory, RingAreas, RingError};

use crate::session::{GUEST_RX, RequestError, Rings};

/// The queues of a port, of which one session at a time has hold. The port's rx
/// queue is the guest's TX ring, and the other way round.
#[derive(Debug)]
pub(crate) struct PortRings {
    port: Arc<Port>,
    /// The guest's RX ring while it is disabled: to the switch it is not there.
    disabled_rx: Option<Box<device::RxRing>>,
}

impl PortRings {
    pub(crate) fn new(port: Arc<Port>) -> Self {
        Self {
            port,
            disabled_rx: None,
        }
    }

    fn start_rx_ring(&mut self, ring: Box<device::RxRing>) -> Result<(), RequestError> {
        self.port
            .start_tx(ring)
            .map(drop)
            .map_err(|_| RequestError::PortRemoved)
    }

    fn stop_rx_ring(&mut self) -> Option<Box<device::RxRing>> {
        let queue: Box<dyn Any> = self.port.stop_tx()?;
        queue.downcast().ok()
    }

    /// Changes the guest's RX ring, wherever it is.
    fn change_rx_ring<R>(&mut self, change: impl FnOnce(&mut device::RxRing) -> R) -> Option<R> {
        if let Some(ring) = &mut self.disabled_rx {
            return Some(change(ring));
        }
        let change = |queue: &mut dyn TxQueue| {
            let queue: &mut dyn Any = queue;
            queue.downcast_mut().map(change)
        };
        self.port.change_tx(change).flatten()
    }

    /// Changes the guest's TX ring.
    fn change_tx_ring<R>(&mut self, change: impl FnOnce(&mut device::TxRing) -> R) -> Option<R> {
        let change = |queue: &mut dyn RxQueue| {
            let queue: &mut dyn Any = queue;
            queue.downcast_mut().map(change)
        };
        self.port.change_rx(change).flatten()
    }
}

impl Rings for PortRings {
    fn start(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        config: RingConfig,
        enabled: bool,
    ) -> Result<u16, RequestError> {
        let memory = Arc::clone(memory);
        if ring == GUEST_RX {
            let ring = Box::new(device::RxRing::new(memory, config)?);
            let position = ring.base();
            if enabled {
                self.start_rx_ring(ring)?;
            } else {
                self.disabled_rx = Some(ring);
            }
            return Ok(position);
        }
        let mut ring = device::TxRing::new(memory, config)?;
        let position = ring.base();
        ring.set_discard(!enabled);
        self.port
            .start_rx(Box::new(ring))
            .map_err(|_| RequestError::PortRemoved)?;
        Ok(position)
    }

    fn stop(&mut self, ring: usize) -> Option<u16> {
        if ring == GUEST_RX {
            let ring = self.disabled_rx.take().or_else(|| self.stop_rx_ring())?;
            return Some(ring.base());
        }
        let queue: Box<dyn Any> = self.port.stop_rx()?;
        queue.downcast_ref().map(device::TxRing::base)
    }

    fn set_enabled(&mut self, ring: usize, enabled: bool) -> Result<(), RequestError> {
        if ring != GUEST_RX {
            self.change_tx_ring(|ring| ring.set_discard(!enabled));
            return Ok(());
        }
        if !enabled {
            self.disabled_rx = self.stop_rx_ring();
        } else if let Some(ring) = self.disabled_rx.take() {
            self.start_rx_ring(ring)?;
        }
        Ok(())
    }

    fn set_call(&mut self, ring: usize, call: Option<EventFd>) {
        let old = if ring == GUEST_RX {
            self.change_rx_ring(|ring| ring.set_call(call))
        } else {
            self.change_tx_ring(|ring| ring.set_call(call))
        };
        // Closed here, when the workers go on.
        drop(old);
    }

    fn relocate(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        areas: RingAreas,
    ) -> Result<(), RingError> {
        let memory = Arc::clone(memory);
        let moved = if ring == GUEST_RX {
            self.change_rx_ring(|ring| ring.relocate(memory, areas))
        } else {
            self.change_tx_ring(|ring| ring.relocate(memory, areas))
        };
        // A ring that is not there was taken away with its port.
        moved.unwrap_or(Ok(()))
    }

    fn fault(&self, ring: usize) -> Option<String> {
        let state = if ring == GUEST_RX {
            match &self.disabled_rx {
                Some(ring) => return ring.fault().map(|fault| fault.to_string()),
                None => self.port.tx_state(),
            }
        } else {
            self.port.rx_state()
        };
        match state {
            QueueState::Broken(fault) => Some(fault),
            QueueState::Removed => Some(RequestError::PortRemoved.to_string()),
            QueueState::Running | QueueState::Stopped => None,
        }
    }
}

//! What a port is to a worker.

use std::sync::atomic::{AtomicU8, Ordering};

use pollux_packet::{Batch, BurstLimit, DropReason, FrameSet, Transmitted};
use pollux_switch::PortRef;
use pollux_sys::RingCell;

/// A queue that the switch receives from: a guest's TX ring, a NIC's RX queue.
///
/// Called once per burst, by the worker that polls it, which holds the queue's
/// cell. Implementations neither allocate, log, nor block.
pub trait RxQueue: Send {
    /// Receives one burst; an empty one if nothing is there or the queue is
    /// broken. Nothing is taken before [`Returns::finish`].
    fn receive(&mut self, limit: BurstLimit) -> Burst<'_>;

    /// Places in the queue: what a budget of "2 x" multiplies.
    fn size(&self) -> u16;

    /// True if the queue does nothing until it is set up anew.
    fn is_broken(&self) -> bool;

    /// Why, for an operator; called by control only.
    fn fault(&self) -> Option<String>;
}

/// A queue that the switch transmits through: a guest's RX ring, a NIC's TX
/// queue. Called once per burst and group of frames, by any worker, which holds
/// the queue's cell.
pub trait TxQueue: Send {
    /// Transmits the frames of `set`, in order; what cannot go is dropped with
    /// a reason.
    fn transmit(&mut self, batch: &Batch<'_>, set: FrameSet) -> Transmitted;

    /// True if the queue does nothing until it is set up anew.
    fn is_broken(&self) -> bool;

    /// Why, for an operator; called by control only.
    fn fault(&self) -> Option<String>;
}

/// Frames of one burst and what must go back where they came from.
pub struct Burst<'q> {
    /// The frames, in order of arrival.
    pub batch: Batch<'q>,
    /// The queue, waiting for its buffers.
    pub returns: &'q mut dyn Returns,
}

impl std::fmt::Debug for Burst<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Burst")
            .field("batch", &self.batch)
            .field("chains", &self.returns.chains())
            .finish_non_exhaustive()
    }
}

/// The buffers of one burst.
pub trait Returns {
    /// Chains (or NIC frames) that were looked at: frames and drops. After
    /// [`finish`](Self::finish), those that went back.
    fn chains(&self) -> u32;

    /// Work units spent on receiving.
    fn units(&self) -> u32;

    /// Tells why each chain without a frame was dropped. After
    /// [`finish`](Self::finish), of those that went back.
    fn drops(&self, each: &mut dyn FnMut(DropReason));

    /// Gives the buffers of the first `frames` frames back, and those of the
    /// drops among them. The others are received again.
    fn finish(&mut self, frames: usize);
}

/// The cell of a queue that the switch receives from; `None` while stopped.
pub(crate) type RxCell = RingCell<Option<Box<dyn RxQueue>>>;
/// The cell of a queue that the switch transmits through; `None` while stopped.
pub(crate) type TxCell = RingCell<Option<Box<dyn TxQueue>>>;

/// State of a port's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// No queue is there: nothing is received, frames for it are dropped
    /// `port-down`.
    Stopped,
    /// At work.
    Running,
    /// Broken by its peer, for the reason given.
    Broken(String),
}

/// What is known of a queue without taking its cell, which would keep workers
/// out and so drop frames: whoever only looks must change nothing (B-66).
/// Written by whoever holds the cell.
struct Status(AtomicU8);

impl Status {
    const STOPPED: u8 = 0;
    const RUNNING: u8 = 1;
    const BROKEN: u8 = 2;
    const REPORTED: u8 = 3;

    fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, status: u8) {
        self.0.store(status, Ordering::Relaxed);
    }

    /// A worker met the queue and it was broken, perhaps not for the first time.
    #[cold]
    fn set_broken(&self) {
        if self.get() == Self::RUNNING {
            self.set(Self::BROKEN);
        }
    }
}

/// One port: a name and the cells of its queues.
///
/// The owner of the device starts and stops the queues at any time; a worker is
/// out of a queue when the call returns.
pub struct Port {
    name: Box<str>,
    identity: PortRef,
    rx: RxCell,
    tx: TxCell,
    rx_status: Status,
    tx_status: Status,
}

impl Port {
    pub(crate) fn new(name: &str, identity: PortRef) -> Self {
        Self {
            name: name.into(),
            identity,
            rx: RingCell::new(None),
            tx: RingCell::new(None),
            rx_status: Status(AtomicU8::new(Status::STOPPED)),
            tx_status: Status(AtomicU8::new(Status::STOPPED)),
        }
    }

    /// The name in the plan.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number and life of the port.
    #[must_use]
    pub fn identity(&self) -> PortRef {
        self.identity
    }

    /// Starts receiving from `queue`; gives back the one that was there. Waits
    /// for a worker's burst at most.
    pub fn start_rx(&self, queue: Box<dyn RxQueue>) -> Option<Box<dyn RxQueue>> {
        self.rx.control(|slot| {
            self.rx_status.set(Status::RUNNING);
            slot.replace(queue)
        })
    }

    /// Stops receiving and gives the queue back. Everything that was received
    /// has been returned to it.
    pub fn stop_rx(&self) -> Option<Box<dyn RxQueue>> {
        self.rx.control(|slot| {
            self.rx_status.set(Status::STOPPED);
            slot.take()
        })
    }

    /// Starts transmitting through `queue`; gives back the one that was there.
    pub fn start_tx(&self, queue: Box<dyn TxQueue>) -> Option<Box<dyn TxQueue>> {
        self.tx.control(|slot| {
            self.tx_status.set(Status::RUNNING);
            slot.replace(queue)
        })
    }

    /// Stops transmitting and gives the queue back.
    pub fn stop_tx(&self) -> Option<Box<dyn TxQueue>> {
        self.tx.control(|slot| {
            self.tx_status.set(Status::STOPPED);
            slot.take()
        })
    }

    /// State of the queue that the switch receives from. Asking disturbs no
    /// worker.
    #[must_use]
    pub fn rx_state(&self) -> QueueState {
        match self.rx_status.get() {
            Status::STOPPED => QueueState::Stopped,
            Status::RUNNING => QueueState::Running,
            _ => self.rx.control(|slot| match slot {
                None => QueueState::Stopped,
                Some(queue) => queue
                    .fault()
                    .map_or(QueueState::Running, QueueState::Broken),
            }),
        }
    }

    /// State of the queue that the switch transmits through. Asking disturbs no
    /// worker.
    #[must_use]
    pub fn tx_state(&self) -> QueueState {
        match self.tx_status.get() {
            Status::STOPPED => QueueState::Stopped,
            Status::RUNNING => QueueState::Running,
            _ => self.tx.control(|slot| match slot {
                None => QueueState::Stopped,
                Some(queue) => queue
                    .fault()
                    .map_or(QueueState::Running, QueueState::Broken),
            }),
        }
    }

    pub(crate) fn rx(&self) -> &RxCell {
        &self.rx
    }

    pub(crate) fn tx(&self) -> &TxCell {
        &self.tx
    }

    /// By a worker that holds the queue: it is broken.
    pub(crate) fn set_rx_broken(&self) {
        self.rx_status.set_broken();
    }

    /// By a worker that holds the queue: it is broken.
    pub(crate) fn set_tx_broken(&self) {
        self.tx_status.set_broken();
    }

    /// Why the receive queue broke, once for each time that one did.
    pub(crate) fn take_rx_fault(&self) -> Option<String> {
        if self.rx_status.get() != Status::BROKEN {
            return None;
        }
        self.rx.control(|slot| {
            let fault = slot.as_ref()?.fault()?;
            self.rx_status.set(Status::REPORTED);
            Some(fault)
        })
    }

    /// Why the transmit queue broke, once for each time that one did.
    pub(crate) fn take_tx_fault(&self) -> Option<String> {
        if self.tx_status.get() != Status::BROKEN {
            return None;
        }
        self.tx.control(|slot| {
            let fault = slot.as_ref()?.fault()?;
            self.tx_status.set(Status::REPORTED);
            Some(fault)
        })
    }
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port")
            .field("name", &self.name)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

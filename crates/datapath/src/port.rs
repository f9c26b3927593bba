//! What a port is to a worker.

use std::sync::atomic::{AtomicBool, Ordering};

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

/// One port: a name and the cells of its queues.
///
/// The owner of the device starts and stops the queues at any time; a worker is
/// out of a queue when the call returns.
pub struct Port {
    name: Box<str>,
    identity: PortRef,
    rx: RxCell,
    tx: TxCell,
    /// Set by a worker that met a broken queue; control reports it once.
    broken: AtomicBool,
}

impl Port {
    pub(crate) fn new(name: &str, identity: PortRef) -> Self {
        Self {
            name: name.into(),
            identity,
            rx: RingCell::new(None),
            tx: RingCell::new(None),
            broken: AtomicBool::new(false),
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
        self.rx.control(|slot| slot.replace(queue))
    }

    /// Stops receiving and gives the queue back. Everything that was received
    /// has been returned to it.
    pub fn stop_rx(&self) -> Option<Box<dyn RxQueue>> {
        self.rx.control(Option::take)
    }

    /// Starts transmitting through `queue`; gives back the one that was there.
    pub fn start_tx(&self, queue: Box<dyn TxQueue>) -> Option<Box<dyn TxQueue>> {
        self.tx.control(|slot| slot.replace(queue))
    }

    /// Stops transmitting and gives the queue back.
    pub fn stop_tx(&self) -> Option<Box<dyn TxQueue>> {
        self.tx.control(Option::take)
    }

    /// State of the queue that the switch receives from.
    #[must_use]
    pub fn rx_state(&self) -> QueueState {
        self.rx.control(|slot| match slot {
            None => QueueState::Stopped,
            Some(queue) => queue
                .fault()
                .map_or(QueueState::Running, QueueState::Broken),
        })
    }

    /// State of the queue that the switch transmits through.
    #[must_use]
    pub fn tx_state(&self) -> QueueState {
        self.tx.control(|slot| match slot {
            None => QueueState::Stopped,
            Some(queue) => queue
                .fault()
                .map_or(QueueState::Running, QueueState::Broken),
        })
    }

    pub(crate) fn rx(&self) -> &RxCell {
        &self.rx
    }

    pub(crate) fn tx(&self) -> &TxCell {
        &self.tx
    }

    #[cold]
    pub(crate) fn set_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    /// True once for each time that a worker met a broken queue.
    pub(crate) fn take_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed) && self.broken.swap(false, Ordering::Relaxed)
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

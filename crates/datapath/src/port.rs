//! What a port is to a worker.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use pollux_packet::{Batch, BurstLimit, DropReason, FrameSet, Transmitted};
use pollux_switch::{Fdb, PortRef};
use pollux_sys::RingCell;

/// A queue of either direction. It belongs to whoever holds its cell.
///
/// `Any`, so that the owner of a device finds its own type again in a queue that
/// it stops or changes.
pub trait Queue: Send + Any {
    /// True if the queue does nothing until it is set up anew.
    fn is_broken(&self) -> bool;

    /// Why, for an operator; called by control only.
    fn fault(&self) -> Option<String>;
}

/// A queue that the switch receives from: a guest's TX ring, a NIC's RX queue.
///
/// Called once per burst, by the worker that polls it, which holds the queue's
/// cell. Implementations neither allocate, log, nor block. A system call that
/// its peer made to wait is interrupted by the watchdog: EINTR, which a call that
/// does not wait never returns, has to break the queue. So for [`TxQueue`].
pub trait RxQueue: Queue {
    /// Receives one burst; an empty one if nothing is there or the queue is
    /// broken. Nothing is taken before [`Returns::finish`].
    fn receive(&mut self, limit: BurstLimit) -> Burst<'_>;

    /// Places in the queue: what a budget of "2 x" multiplies.
    fn size(&self) -> u16;
}

/// A queue that the switch transmits through: a guest's RX ring, a NIC's TX
/// queue. Called once per burst and group of frames, by any worker, which holds
/// the queue's cell.
pub trait TxQueue: Queue {
    /// Transmits the frames of `set`, in order; what cannot go is dropped with
    /// a reason.
    fn transmit(&mut self, batch: &Batch<'_>, set: FrameSet) -> Transmitted;
}

/// Frames of one burst and what must go back where they came from.
pub struct Burst<'q> {
    /// The frames, in order of arrival.
    pub batch: Batch<'q>,
    /// The queue, waiting for its buffers; finished after the last look at the
    /// batch.
    pub(crate) returns: &'q mut dyn Returns,
}

impl<'q> Burst<'q> {
    /// A burst whose buffers go back through `returns`.
    #[inline]
    #[must_use]
    pub fn new(batch: Batch<'q>, returns: &'q mut dyn Returns) -> Self {
        Self { batch, returns }
    }
}

impl fmt::Debug for Burst<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// State of a port's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// No queue is there: nothing is received, no flooded frame is sent to it,
    /// unicast frames for it are dropped `port-down`.
    Stopped,
    /// At work.
    Running,
    /// Broken by its peer, for the reason given.
    Broken(String),
    /// The port is not in the plan any more: no queue can be started.
    Removed,
}

/// A queue was to be started on a port that is not in the plan any more. Here
/// it is again.
pub struct PortRemoved<Q: ?Sized> {
    /// Name of the port.
    pub port: Box<str>,
    /// The queue, untouched.
    pub queue: Box<Q>,
}

impl<Q: ?Sized> fmt::Display for PortRemoved<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = &self.port;
        write!(
            f,
            "no queue can be started on port \"{port}\": it was removed from the plan; \
             take the port from the switch again"
        )
    }
}

impl<Q: ?Sized> fmt::Debug for PortRemoved<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortRemoved")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl<Q: ?Sized> std::error::Error for PortRemoved<Q> {}

/// What is known of a queue without taking its cell, which would keep workers
/// out and so drop frames: whoever only looks must change nothing (B-66).
/// Written by whoever holds the cell.
struct Status(AtomicU8);

impl Status {
    const STOPPED: u8 = 0;
    const RUNNING: u8 = 1;
    const BROKEN: u8 = 2;
    const REPORTED: u8 = 3;
    /// For good.
    const REMOVED: u8 = 4;

    #[inline]
    fn get(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, status: u8) {
        self.0.store(status, Ordering::Relaxed);
    }
}

/// The cell of a queue; `None` while stopped.
pub(crate) type QueueCell<Q> = RingCell<Option<Box<Q>>>;

/// The place of a queue, of either direction.
struct QueueSlot<Q: ?Sized> {
    cell: QueueCell<Q>,
    status: Status,
}

impl<Q: Queue + ?Sized> QueueSlot<Q> {
    fn new() -> Self {
        Self {
            cell: RingCell::new(None),
            status: Status(AtomicU8::new(Status::STOPPED)),
        }
    }

    /// Puts a queue in place of another, or gives it back if that is over.
    fn start(&self, queue: Box<Q>) -> Result<Option<Box<Q>>, Box<Q>> {
        self.cell.control(|slot| {
            if self.status.get() == Status::REMOVED {
                return Err(queue);
            }
            self.status.set(Status::RUNNING);
            Ok(slot.replace(queue))
        })
    }

    fn stop(&self) -> Option<Box<Q>> {
        self.cell.control(|slot| {
            if self.status.get() != Status::REMOVED {
                self.status.set(Status::STOPPED);
            }
            slot.take()
        })
    }

    /// Stops for good.
    fn remove(&self) -> Option<Box<Q>> {
        self.cell.control(|slot| {
            self.status.set(Status::REMOVED);
            slot.take()
        })
    }

    /// Changes the queue that is there, if one is.
    fn change<R>(&self, change: impl FnOnce(&mut Q) -> R) -> Option<R> {
        self.cell.control(|slot| {
            let queue = slot.as_deref_mut()?;
            let result = change(queue);
            match (queue.is_broken(), self.status.get()) {
                (false, _) => self.status.set(Status::RUNNING),
                (true, Status::RUNNING) => self.status.set(Status::BROKEN),
                (true, _) => {}
            }
            Some(result)
        })
    }

    fn state(&self) -> QueueState {
        match self.status.get() {
            Status::STOPPED => QueueState::Stopped,
            Status::RUNNING => QueueState::Running,
            Status::REMOVED => QueueState::Removed,
            _ => self.cell.control(|slot| match slot {
                // It was changed since.
                None if self.status.get() == Status::REMOVED => QueueState::Removed,
                None => QueueState::Stopped,
                Some(queue) => queue
                    .fault()
                    .map_or(QueueState::Running, QueueState::Broken),
            }),
        }
    }

    #[inline]
    fn is_running(&self) -> bool {
        self.status.get() == Status::RUNNING
    }

    fn is_stopped(&self) -> bool {
        matches!(self.status.get(), Status::STOPPED | Status::REMOVED)
    }

    /// A worker met the queue and it was broken, perhaps not for the first time.
    #[cold]
    fn set_broken(&self) {
        if self.is_running() {
            self.status.set(Status::BROKEN);
        }
    }

    /// Why the queue broke, once for each time that it did. `None` also while
    /// somebody is in the queue: housekeeping asks again, and must not wait for
    /// a worker that it has to interrupt (another queue may have come in place
    /// of the broken one, and stopped it).
    fn take_fault(&self) -> Option<String> {
        if self.status.get() != Status::BROKEN {
            return None;
        }
        let fault = self.cell.try_control(|slot| {
            let fault = slot.as_ref()?.fault()?;
            self.status.set(Status::REPORTED);
            Some(fault)
        });
        fault.flatten()
    }
}

/// One port: a name and the places of its queues.
///
/// The owner of the device starts and stops the queues at any time; a worker is
/// out of a queue when the call returns. When both have been stopped the
/// addresses learned on the port are forgotten: frames for them are flooded,
/// not dropped until they age.
pub struct Port {
    name: Box<str>,
    identity: PortRef,
    fdb: Arc<Fdb>,
    rx: QueueSlot<dyn RxQueue>,
    tx: QueueSlot<dyn TxQueue>,
}

impl Port {
    pub(crate) fn new(name: &str, identity: PortRef, fdb: Arc<Fdb>) -> Self {
        Self {
            name: name.into(),
            identity,
            fdb,
            rx: QueueSlot::new(),
            tx: QueueSlot::new(),
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
    ///
    /// # Errors
    /// [`PortRemoved`], with the queue, if the port is not in the plan any more.
    pub fn start_rx(
        &self,
        queue: Box<dyn RxQueue>,
    ) -> Result<Option<Box<dyn RxQueue>>, PortRemoved<dyn RxQueue>> {
        self.rx.start(queue).map_err(|queue| self.removed(queue))
    }

    /// Stops receiving and gives the queue back. Everything that was received
    /// has been returned to it.
    pub fn stop_rx(&self) -> Option<Box<dyn RxQueue>> {
        let queue = self.rx.stop();
        self.forget_if_down(queue.is_some());
        queue
    }

    /// Starts transmitting through `queue`; gives back the one that was there.
    ///
    /// # Errors
    /// [`PortRemoved`], with the queue, if the port is not in the plan any more.
    pub fn start_tx(
        &self,
        queue: Box<dyn TxQueue>,
    ) -> Result<Option<Box<dyn TxQueue>>, PortRemoved<dyn TxQueue>> {
        self.tx.start(queue).map_err(|queue| self.removed(queue))
    }

    /// Stops transmitting and gives the queue back.
    pub fn stop_tx(&self) -> Option<Box<dyn TxQueue>> {
        let queue = self.tx.stop();
        self.forget_if_down(queue.is_some());
        queue
    }

    /// Changes the queue that the switch receives from; `None` if it is stopped.
    ///
    /// No worker is in the queue while `change` runs, and the queue goes on
    /// afterwards: what arrives meanwhile waits in it. So slow work comes before,
    /// and `change` must not call this port: it would wait for itself. The
    /// [state](Self::rx_state) afterwards is that of the queue: one that was
    /// repaired is running, one that was broken is broken.
    pub fn change_rx<R>(&self, change: impl FnOnce(&mut dyn RxQueue) -> R) -> Option<R> {
        self.rx.change(change)
    }

    /// State of the queue that the switch receives from. Asking disturbs no
    /// worker.
    #[must_use]
    pub fn rx_state(&self) -> QueueState {
        self.rx.state()
    }

    /// Changes the queue that the switch transmits through; `None` if it is
    /// stopped. As [`change_rx`](Self::change_rx), but frames for the port are
    /// dropped `port-reconfiguring` meanwhile: their senders wait for nobody.
    pub fn change_tx<R>(&self, change: impl FnOnce(&mut dyn TxQueue) -> R) -> Option<R> {
        self.tx.change(change)
    }

    /// State of the queue that the switch transmits through. Asking disturbs no
    /// worker.
    #[must_use]
    pub fn tx_state(&self) -> QueueState {
        self.tx.state()
    }

    fn removed<Q: ?Sized>(&self, queue: Box<Q>) -> PortRemoved<Q> {
        PortRemoved {
            port: self.name.clone(),
            queue,
        }
    }

    /// After a queue was stopped: forgets what was learned if the other one is
    /// stopped too. No worker learns for the port any more: it would have to
    /// hold the receive queue.
    fn forget_if_down(&self, has_stopped: bool) {
        // Two threads that stop one queue each: at least one sees both.
        fence(Ordering::SeqCst);
        if has_stopped && self.rx.is_stopped() && self.tx.is_stopped() {
            self.fdb.flush_port(self.identity);
        }
    }

    /// Takes the queues away for good, once no worker knows the port.
    pub(crate) fn remove(&self) {
        // Dropped here, when the cells are free again.
        drop((self.rx.remove(), self.tx.remove()));
    }

    pub(crate) fn rx(&self) -> &QueueCell<dyn RxQueue> {
        &self.rx.cell
    }

    pub(crate) fn tx(&self) -> &QueueCell<dyn TxQueue> {
        &self.tx.cell
    }

    /// True if frames can be transmitted: a port that is not up gets no flooded
    /// ones. A look at one byte, which changes with the port's state only and
    /// is on no line that workers write.
    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.tx.is_running()
    }

    /// By a worker that holds the queue: it is broken.
    pub(crate) fn set_rx_broken(&self) {
        self.rx.set_broken();
    }

    /// By a worker that holds the queue: it is broken.
    pub(crate) fn set_tx_broken(&self) {
        self.tx.set_broken();
    }

    /// Why the receive queue broke, once for each time that one did.
    pub(crate) fn take_rx_fault(&self) -> Option<String> {
        self.rx.take_fault()
    }

    /// Why the transmit queue broke, once for each time that one did.
    pub(crate) fn take_tx_fault(&self) -> Option<String> {
        self.tx.take_fault()
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("name", &self.name)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

//! A guest's rings as queues of a port.

use pollux_packet::{Batch, BurstLimit, DropReason, FrameSet, Transmitted};
use pollux_virtio::device;

use crate::port::{Burst, Queue, Returns, RxQueue, TxQueue};

impl Queue for device::TxRing {
    fn is_broken(&self) -> bool {
        Self::fault(self).is_some()
    }

    fn fault(&self) -> Option<String> {
        Self::fault(self).map(|fault| fault.to_string())
    }
}

impl RxQueue for device::TxRing {
    #[inline]
    fn receive(&mut self, limit: BurstLimit) -> Burst<'_> {
        let (batch, returns) = Self::receive(self, limit).into_parts();
        Burst::new(batch, returns)
    }

    fn size(&self) -> u16 {
        Self::size(self)
    }
}

impl Returns for device::Returns {
    #[inline]
    fn chains(&self) -> u32 {
        Self::chains(self)
    }

    #[inline]
    fn units(&self) -> u32 {
        Self::units(self)
    }

    #[inline]
    fn drops(&self, each: &mut dyn FnMut(DropReason)) {
        Self::drops(self).for_each(each);
    }

    #[inline]
    fn finish(&mut self, frames: usize) {
        Self::finish(self, frames);
    }
}

impl Queue for device::RxRing {
    fn is_broken(&self) -> bool {
        Self::fault(self).is_some()
    }

    fn fault(&self) -> Option<String> {
        Self::fault(self).map(|fault| fault.to_string())
    }
}

impl TxQueue for device::RxRing {
    #[inline]
    fn transmit(&mut self, batch: &Batch<'_>, set: FrameSet) -> Transmitted {
        Self::transmit(self, batch, set)
    }
}

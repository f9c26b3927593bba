//! A guest in this process: memory in a memfd and both rings, of which a test
//! holds the driver halves and gives the device halves to the switch.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pollux_sys::EventFd;
use pollux_virtio::device::{self, RingConfig};
use pollux_virtio::driver::{self, NetConfig};
use pollux_virtio::{DESC_BYTES, Features, GuestMemory, Region, RegionPlace, RingAreas};

/// What a guest is made of.
#[derive(Clone, Copy, Debug)]
pub struct GuestSpec {
    /// Descriptors of each ring.
    pub ring_size: u16,
    /// What was negotiated.
    pub features: Features,
    /// Bytes of a buffer, one for each descriptor.
    pub buffer_bytes: u32,
    /// Ring position to start at.
    pub base: u16,
    /// Descriptors of each indirect table.
    pub table_len: u16,
    /// Memory regions: more than one cuts the memory into adjacent regions that
    /// are not adjacent in this process.
    pub regions: u16,
}

impl Default for GuestSpec {
    fn default() -> Self {
        Self {
            ring_size: 256,
            features: Features {
                version_1: true,
                mergeable: true,
                event_idx: false,
            },
            buffer_bytes: 2048,
            base: 0,
            table_len: 32,
            regions: 1,
        }
    }
}

/// A guest and the driver halves of its rings.
#[derive(Debug)]
pub struct Guest {
    /// The file that the memory lies in.
    pub file: OwnedFd,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// Sends.
    pub tx: driver::TxRing,
    /// Receives.
    pub rx: driver::RxRing,
    tx_config: NetConfig,
    rx_config: NetConfig,
}

/// First guest address: not 0, so that an address 0 is outside.
pub const GUEST_BASE: u64 = 0x10_0000;
const PAGE: u64 = 4096;

impl Guest {
    /// Makes the memory and starts the driver halves; nothing is posted.
    ///
    /// # Panics
    /// If the machine has no memory for it or the specification is unusable.
    #[must_use]
    pub fn new(spec: GuestSpec) -> Self {
        let mut next = GUEST_BASE;
        let tx_config = lay_out(spec, &mut next);
        let rx_config = lay_out(spec, &mut next);
        let size = next - GUEST_BASE;
        let file = pollux_sys::memfd("pollux-test-guest", size).expect("memfd");
        let memory = Arc::new(map(&file, size, spec.regions));
        Self {
            tx: driver::TxRing::new(Arc::clone(&memory), tx_config).expect("laid out above"),
            rx: driver::RxRing::new(Arc::clone(&memory), rx_config).expect("laid out above"),
            file,
            memory,
            tx_config,
            rx_config,
        }
    }

    /// The device halves of both rings, as a session would make them.
    ///
    /// # Panics
    /// Never: the layout was checked by the driver halves.
    #[must_use]
    pub fn device(&self) -> (device::TxRing, device::RxRing) {
        self.device_with_calls(None, None)
    }

    /// Like [`device`](Self::device), with an eventfd for each direction.
    ///
    /// # Panics
    /// Never: the layout was checked by the driver halves.
    #[must_use]
    pub fn device_with_calls(
        &self,
        tx_call: Option<EventFd>,
        rx_call: Option<EventFd>,
    ) -> (device::TxRing, device::RxRing) {
        let ring = |config: NetConfig, call| RingConfig {
            areas: config.areas,
            features: config.features,
            base: config.base,
            call,
        };
        let tx = device::TxRing::new(Arc::clone(&self.memory), ring(self.tx_config, tx_call));
        let rx = device::RxRing::new(Arc::clone(&self.memory), ring(self.rx_config, rx_call));
        (tx.expect("checked"), rx.expect("checked"))
    }

    /// Layout of the TX ring, for tests that write to it by hand.
    #[must_use]
    pub fn tx_config(&self) -> NetConfig {
        self.tx_config
    }

    /// Layout of the RX ring, for tests that write to it by hand.
    #[must_use]
    pub fn rx_config(&self) -> NetConfig {
        self.rx_config
    }
}

/// Takes addresses for one queue from `next` on.
fn lay_out(spec: GuestSpec, next: &mut u64) -> NetConfig {
    let mut take = |bytes: u64| {
        let addr = *next;
        *next += bytes.next_multiple_of(PAGE);
        addr
    };
    let size = u64::from(spec.ring_size);
    NetConfig {
        areas: RingAreas {
            size: spec.ring_size,
            desc_addr: take(u64::from(RingAreas::desc_bytes(spec.ring_size))),
            avail_addr: take(u64::from(RingAreas::avail_bytes(spec.ring_size))),
            used_addr: take(u64::from(RingAreas::used_bytes(spec.ring_size))),
        },
        features: spec.features,
        base: spec.base,
        tables_addr: take(size * u64::from(spec.table_len) * u64::from(DESC_BYTES)),
        table_len: spec.table_len,
        buffers_addr: take(size * u64::from(spec.buffer_bytes)),
        buffer_bytes: spec.buffer_bytes,
    }
}

/// Maps `size` bytes of `file` as guest memory.
fn map(file: &OwnedFd, size: u64, regions: u16) -> GuestMemory {
    let pages = size / PAGE;
    let regions = u64::from(regions.max(1)).min(pages);
    let map = |index: u64| {
        let first = pages * index / regions * PAGE;
        let end = pages * (index + 1) / regions * PAGE;
        let place = RegionPlace {
            guest_addr: GUEST_BASE + first,
            size: end - first,
            user_addr: 0x7f00_0000_0000 + first,
            file_offset: first,
        };
        Region::map(file.as_fd(), place).expect("a part of the file")
    };
    GuestMemory::new((0..regions).map(map)).expect("regions do not overlap")
}

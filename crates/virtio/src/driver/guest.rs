//! A guest of this process: memory in a memfd, both rings laid out, and the
//! driver halves of them.
//!
//! The memory is as a frontend has it: guest addresses from [`GUEST_BASE`] on,
//! addresses of the frontend's process from [`USER_BASE`] on, and one file that
//! can be shared. Nothing needs huge pages or a privilege.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pollux_sys::EventFd;

use super::net::{NetConfig, NetError, RxRing, TxRing};
use crate::device::{self, RingConfig};
use crate::memory::{GuestMemory, MemoryError, Region, RegionPlace};
use crate::ring::RingAreas;
use crate::spec::{DESC_BYTES, Features};

/// First guest address: not 0, so that an address 0 is outside.
pub const GUEST_BASE: u64 = 0x10_0000;
/// Address of [`GUEST_BASE`] in the frontend's process, as far as the backend is
/// told: ring addresses are given in these, and nobody follows them here.
pub const USER_BASE: u64 = 0x7f00_0000_0000;
const PAGE_BYTES: u64 = 4096;

/// What a guest is made of.
#[derive(Clone, Copy, Debug)]
pub struct GuestSpec {
    /// Descriptors of each ring.
    pub ring_size: u16,
    /// What was negotiated.
    pub features: Features,
    /// Bytes of a buffer, one for each descriptor.
    pub buffer_bytes: u32,
    /// Ring position to start at: 0 after a reset, 0x8000 in a packed ring. See
    /// [`DriverRing::new`](super::DriverRing::new).
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
                ..Features::LEGACY
            },
            buffer_bytes: 2048,
            base: 0,
            table_len: 32,
            regions: 1,
        }
    }
}

/// Why a guest could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The kernel gave no memory file.
    #[error("a memory file of {bytes} bytes for a guest could not be made: {source}")]
    File {
        /// Bytes of the guest's memory.
        bytes: u64,
        /// Why.
        source: io::Error,
    },
    /// The memory file could not be mapped.
    #[error("the memory of a guest could not be mapped")]
    Memory(#[from] MemoryError),
    /// The specification asks for an unusable ring, or the cuts between regions
    /// go through one.
    #[error("the rings of a guest could not be laid out")]
    Rings(#[from] NetError),
}

/// A guest and the driver halves of its rings.
#[derive(Debug)]
pub struct Guest {
    /// The file that the memory lies in.
    pub file: OwnedFd,
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// Sends.
    pub tx: TxRing,
    /// Receives.
    pub rx: RxRing,
    tx_config: NetConfig,
    rx_config: NetConfig,
    memory_bytes: u64,
}

impl Guest {
    /// Makes the memory and starts the driver halves; nothing is posted.
    ///
    /// # Errors
    /// If the machine has no memory for it or the specification is unusable.
    pub fn new(spec: GuestSpec) -> Result<Self, GuestError> {
        let mut next = GUEST_BASE;
        let tx_config = lay_out(spec, &mut next);
        let rx_config = lay_out(spec, &mut next);
        let bytes = next - GUEST_BASE;
        let file = pollux_sys::memfd("pollux-guest", bytes)
            .map_err(|source| GuestError::File { bytes, source })?;
        let memory = Arc::new(map(&file, bytes, spec.regions)?);
        Ok(Self {
            tx: TxRing::new(Arc::clone(&memory), tx_config)?,
            rx: RxRing::new(Arc::clone(&memory), rx_config)?,
            file,
            memory,
            tx_config,
            rx_config,
            memory_bytes: bytes,
        })
    }

    /// The device halves of both rings, as a session would make them: for a
    /// guest whose switch is in the same process and needs no socket.
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
            counters: Arc::default(),
        };
        let tx = device::TxRing::new(Arc::clone(&self.memory), ring(self.tx_config, tx_call));
        let rx = device::RxRing::new(Arc::clone(&self.memory), ring(self.rx_config, rx_call));
        let checked = "the driver halves checked the layout";
        (tx.expect(checked), rx.expect(checked))
    }

    /// Layout of the TX ring, in guest addresses.
    #[must_use]
    pub fn tx_config(&self) -> NetConfig {
        self.tx_config
    }

    /// Layout of the RX ring, in guest addresses.
    #[must_use]
    pub fn rx_config(&self) -> NetConfig {
        self.rx_config
    }

    /// What the rings were laid out for: must be negotiated.
    #[must_use]
    pub fn features(&self) -> Features {
        self.tx_config.features
    }

    /// Bytes of the guest's memory and of its file.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Where the memory regions lie, as a frontend tells it.
    pub fn places(&self) -> impl ExactSizeIterator<Item = RegionPlace> + '_ {
        self.memory.regions().iter().map(Region::place)
    }

    /// A guest address as an address of the frontend's process.
    #[must_use]
    pub const fn user_addr(guest_addr: u64) -> u64 {
        guest_addr.wrapping_sub(GUEST_BASE).wrapping_add(USER_BASE)
    }
}

/// Takes addresses for one queue from `next` on.
fn lay_out(spec: GuestSpec, next: &mut u64) -> NetConfig {
    let mut take = |bytes: u64| {
        let addr = *next;
        *next += bytes.next_multiple_of(PAGE_BYTES);
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

/// Maps `bytes` of `file` as guest memory.
fn map(file: &OwnedFd, bytes: u64, regions: u16) -> Result<GuestMemory, MemoryError> {
    let pages = bytes / PAGE_BYTES;
    let regions = u64::from(regions.max(1)).min(pages);
    let map = |index: u64| {
        let first = pages * index / regions * PAGE_BYTES;
        let end = pages * (index + 1) / regions * PAGE_BYTES;
        let place = RegionPlace {
            guest_addr: GUEST_BASE + first,
            size: end - first,
            user_addr: USER_BASE + first,
            file_offset: first,
        };
        Region::map(file.as_fd(), place)
    };
    let regions: Vec<Region> = (0..regions).map(map).collect::<Result<_, _>>()?;
    GuestMemory::new(regions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_tells_what_a_frontend_has_to() {
        let guest = Guest::new(GuestSpec {
            regions: 3,
            ..GuestSpec::default()
        })
        .unwrap();
        let places: Vec<_> = guest.places().collect();
        assert_eq!(places.len(), 3);
        assert_eq!(places[0].guest_addr, GUEST_BASE);
        assert_eq!(
            places.iter().map(|place| place.size).sum::<u64>(),
            guest.memory_bytes()
        );
        let desc_addr = guest.rx_config().areas.desc_addr;
        assert_eq!(
            guest.memory.guest_addr_of_user(Guest::user_addr(desc_addr)),
            Some(desc_addr)
        );
    }

    #[test]
    fn an_unusable_ring_is_an_error() {
        for ring_size in [0, 3, 40_000] {
            let spec = GuestSpec {
                ring_size,
                ..GuestSpec::default()
            };
            assert!(Guest::new(spec).is_err(), "{ring_size}");
        }
    }
}

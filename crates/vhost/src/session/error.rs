//! Why a request was refused.

use pollux_sys::MapError;
use pollux_virtio::{MemoryError, RING_SIZE_MAX, RingError};

use super::memory::{BASELINE_REGIONS, SLOTS_MAX};
use super::vring::RINGS;

/// Why a request of the frontend was not carried out. What was there before is
/// unchanged, and the connection goes on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("the request is not known")]
    Unknown,
    #[error("the request needs a feature that is not offered")]
    NotOffered,
    #[error("the request needs protocol feature {0}, which was not negotiated")]
    NotNegotiated(&'static str),
    #[error("its body has {got} bytes instead of {wanted}")]
    BodyLength { got: usize, wanted: usize },
    #[error("{got} file descriptors came with it instead of {wanted}")]
    FdCount { got: usize, wanted: &'static str },
    #[error("a field of it has a value that the specification forbids")]
    Invalid,
    #[error("feature bits {0:#x} are not offered")]
    Features(u64),
    #[error("features cannot change while rings run; stop them with GET_VRING_BASE")]
    FeaturesWhileRunning,
    #[error("there is no vring {index}: {RINGS} are offered")]
    NoSuchRing { index: u32 },
    #[error("vring {0} is running; stop it with GET_VRING_BASE")]
    RingRunning(usize),
    #[error(
        "{0} is no ring size: rings have 1 to {RING_SIZE_MAX} descriptors, split rings a power of two"
    )]
    RingSize(u32),
    #[error("{0:#x} is no position in a split ring: it has 16 bits")]
    RingBase(u32),
    #[error("the {area} at user address {user_addr:#x} is in no memory region")]
    RingOutside { area: &'static str, user_addr: u64 },
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error("the port was removed from the switch")]
    PortRemoved,
    #[error("{0} regions are not from 1 to {BASELINE_REGIONS}; more need memory slots")]
    RegionCount(u32),
    #[error("all {SLOTS_MAX} memory slots are in use")]
    SlotsFull,
    #[error("no region at guest address {guest_addr:#x} with this size and user address")]
    NoSuchRegion { guest_addr: u64 },
    #[error("{error}{}", source_text(.error))]
    Memory { error: MemoryError },
    #[error(
        "the region at guest address {guest_addr:#x} is in a file on {found}, which could \
         stall the switch; share memory as memfd, tmpfs or hugetlbfs (QEMU: \
         memory-backend-memfd,share=on), or set any_memory = true on the port"
    )]
    MemoryFile { guest_addr: u64, found: String },
    #[error("its file descriptor cannot be used: {0}")]
    Notifier(String),
}

impl From<MemoryError> for RequestError {
    fn from(error: MemoryError) -> Self {
        Self::Memory { error }
    }
}

/// The reason below, for those who see one line.
fn source_text(error: &MemoryError) -> String {
    let MemoryError::Map { source, .. } = error else {
        return String::new();
    };
    match source {
        MapError::Mmap { source: io, .. } => format!(": {source}: {io}"),
        _ => format!(": {source}"),
    }
}

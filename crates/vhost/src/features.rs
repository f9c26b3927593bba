//! Feature bits: what is offered, and their names.
//!
//! Offered is only what tests drive: an offer that is not kept stalls a guest.

use pollux_virtio::Features;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};

/// VIRTIO_NET_F_MRG_RXBUF (virtio 1.2, section 5.1.3).
pub(crate) const MRG_RXBUF: u64 = 1 << 15;
/// VIRTIO_F_INDIRECT_DESC (section 6).
pub(crate) const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX (section 6).
pub(crate) const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1 (section 6).
pub(crate) const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_RING_PACKED (section 6).
pub(crate) const RING_PACKED: u64 = 1 << 34;
/// VIRTIO_F_IN_ORDER (section 6).
pub(crate) const IN_ORDER: u64 = 1 << 35;
/// VIRTIO_F_RING_RESET (section 6): a ring can be stopped and started alone.
pub(crate) const RING_RESET: u64 = 1 << 40;
/// VHOST_USER_F_PROTOCOL_FEATURES: for the frontend, never for the driver.
pub(crate) const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
/// VHOST_F_LOG_ALL: the one bit that may change while rings run.
pub(crate) const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();

/// Feature bits that a session offers.
pub(crate) const OFFERED: u64 = MRG_RXBUF
    | INDIRECT_DESC
    | EVENT_IDX
    | PROTOCOL_FEATURES
    | VERSION_1
    | RING_PACKED
    | IN_ORDER
    | RING_RESET;

/// Protocol feature bits that a session offers.
pub(crate) const PROTOCOL_OFFERED: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// What the acknowledged bits mean for a ring. Indirect descriptors are
/// followed whether they were negotiated or not, and any ring can be stopped alone.
pub(crate) fn of_ring(features: u64) -> Features {
    Features {
        version_1: features & VERSION_1 != 0,
        mergeable: features & MRG_RXBUF != 0,
        event_idx: features & EVENT_IDX != 0,
        in_order: features & IN_ORDER != 0,
        packed: features & RING_PACKED != 0,
    }
}

const NAMES: [(u64, &str); 9] = [
    (MRG_RXBUF, "VIRTIO_NET_F_MRG_RXBUF"),
    (LOG_ALL, "VHOST_F_LOG_ALL"),
    (INDIRECT_DESC, "VIRTIO_F_INDIRECT_DESC"),
    (EVENT_IDX, "VIRTIO_F_EVENT_IDX"),
    (PROTOCOL_FEATURES, "VHOST_USER_F_PROTOCOL_FEATURES"),
    (VERSION_1, "VIRTIO_F_VERSION_1"),
    (RING_PACKED, "VIRTIO_F_RING_PACKED"),
    (IN_ORDER, "VIRTIO_F_IN_ORDER"),
    (RING_RESET, "VIRTIO_F_RING_RESET"),
];

/// Names of the bits that are set, of those that can be negotiated.
pub(crate) fn names(features: u64) -> Vec<&'static str> {
    let set = NAMES.iter().filter(|(bit, _)| features & bit != 0);
    set.map(|(_, name)| *name).collect()
}

/// Names of protocol features.
pub(crate) fn protocol_names(features: u64) -> Vec<&'static str> {
    let features = VhostUserProtocolFeatures::from_bits_truncate(features);
    features.iter_names().map(|(name, _)| name).collect()
}

//! Constants of virtio 1.2 that both halves of a ring use.

/// Largest ring (sections 2.7 and 2.8.10.1).
pub const RING_SIZE_MAX: u16 = 32_768;
/// Bytes of a descriptor (section 2.7.5).
pub const DESC_BYTES: u32 = 16;

/// `flags` of a descriptor (section 2.7.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescFlags(pub u16);

impl DescFlags {
    /// VIRTQ_DESC_F_NEXT: the chain goes on at `next`.
    pub const NEXT: Self = Self(1);
    /// VIRTQ_DESC_F_WRITE: the device writes to the buffer.
    pub const WRITE: Self = Self(2);
    /// VIRTQ_DESC_F_INDIRECT: the buffer is a table of descriptors.
    pub const INDIRECT: Self = Self(4);

    /// True if any bit of `other` is set.
    #[inline]
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The three defined bits; the others are ignored (section 2.7.5).
    #[inline]
    #[must_use]
    pub const fn known(self) -> Self {
        Self(self.0 & 7)
    }

    /// Bits of both.
    #[inline]
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// VIRTQ_AVAIL_F_NO_INTERRUPT: the driver needs no call (section 2.7.6).
pub(crate) const AVAIL_NO_INTERRUPT: u16 = 1;
/// VIRTQ_USED_F_NO_NOTIFY: the device needs no kick (section 2.7.8).
pub(crate) const USED_NO_NOTIFY: u16 = 1;

/// Negotiated features that change how a ring is read or written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// VIRTIO_F_VERSION_1: the net header has 12 bytes (section 5.1.6.1).
    pub version_1: bool,
    /// VIRTIO_NET_F_MRG_RXBUF: a frame may fill several receive buffers, and
    /// the net header has 12 bytes.
    pub mergeable: bool,
    /// VIRTIO_F_EVENT_IDX: notifications are suppressed by index.
    pub event_idx: bool,
    /// VIRTIO_F_IN_ORDER: chains come back in the order in which they were made
    /// available, many with one entry (section 2.7.9).
    pub in_order: bool,
    /// VIRTIO_F_RING_PACKED: the ring has the layout of section 2.8.
    pub packed: bool,
}

impl Features {
    /// A driver of before virtio 1.0 that took nothing.
    pub const LEGACY: Self = Self {
        version_1: false,
        mergeable: false,
        event_idx: false,
        in_order: false,
        packed: false,
    };
    /// A driver of today with mergeable buffers and nothing else.
    pub const MODERN: Self = Self {
        version_1: true,
        mergeable: true,
        ..Self::LEGACY
    };

    /// Bytes of the virtio-net header: 12, or 10 for a legacy driver without
    /// mergeable buffers (section 5.1.6.1).
    #[must_use]
    pub const fn net_header_bytes(self) -> u32 {
        if self.version_1 || self.mergeable {
            12
        } else {
            10
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_legacy_driver_without_mergeable_buffers_has_the_short_header() {
        let mut features = Features::default();
        assert_eq!(features.net_header_bytes(), 10);
        features.mergeable = true;
        assert_eq!(features.net_header_bytes(), 12);
        features = Features {
            version_1: true,
            ..Features::default()
        };
        assert_eq!(features.net_header_bytes(), 12);
    }
}

//! The ring features that an input asks for: one line for each field of
//! [`Features`].

use pollux_virtio::Features;

/// Features out of the bits of a byte.
pub(crate) fn of_bits(bits: u8) -> Features {
    Features {
        version_1: bits & 1 != 0,
        mergeable: bits & 2 != 0,
        event_idx: bits & 4 != 0,
        in_order: bits & 8 != 0,
        packed: bits & 16 != 0,
    }
}

/// Whether these ask for a packed ring.
pub(crate) fn is_packed(features: Features) -> bool {
    features.packed
}

/// What a ring of this kind is called in marks.
pub(crate) fn layout(features: Features) -> &'static str {
    if is_packed(features) {
        "packed"
    } else {
        "split"
    }
}

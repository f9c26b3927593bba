//! pollux-virtio.

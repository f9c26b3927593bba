//! Frames as plain bytes, into rings and out of them.

use pollux_packet::{BatchStore, Frame, FrameSet, Offload, Span, Transmitted};
use pollux_virtio::device;

/// Bytes that tell where in a frame and in which frame they are.
#[must_use]
pub fn frame_bytes(seed: u32, len: u32) -> Vec<u8> {
    (0..len)
        .map(|i| {
            let word = (i ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
            word.to_le_bytes()[3]
        })
        .collect()
}

/// A copy of a received frame.
#[must_use]
pub fn gather(frame: &Frame<'_>) -> Vec<u8> {
    let mut bytes = frame.head.to_vec();
    for span in frame.body {
        let start = bytes.len();
        bytes.resize(start + span.len() as usize, 0);
        span.snapshot(&mut bytes[start..]);
    }
    assert_eq!(bytes.len(), frame.len as usize);
    bytes
}

/// Transmits frames in one call.
pub fn transmit(ring: &mut device::RxRing, frames: &[Vec<u8>]) -> Transmitted {
    let mut store = BatchStore::new(frames.len());
    let mut batch = store.begin();
    for frame in frames {
        batch
            .push(Offload::default(), Span::from_slice(frame))
            .expect("room");
    }
    ring.transmit(&batch, FrameSet::first(frames.len()))
}

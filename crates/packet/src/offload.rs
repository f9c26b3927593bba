//! Offload fields of the virtio-net header (virtio 1.2, section 5.1.6).

use crate::SpanMut;

/// Bytes of `struct virtio_net_hdr` with `num_buffers`: VERSION_1 or MRG_RXBUF.
pub const NET_HEADER_BYTES: usize = 12;
/// Bytes of the legacy header without `num_buffers`.
pub const NET_HEADER_LEGACY_BYTES: usize = 10;

const NEEDS_CSUM: u64 = 1;
const GSO_TYPE_SHIFT: u32 = 8;

/// What a sender asks to be done with its frame: the first ten bytes of the
/// virtio-net header, copied once into private memory.
///
/// Default: nothing is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// `flags`, `gso_type`, `hdr_len`, `gso_size`, `csum_start`, little endian.
    low: u64,
    /// `csum_offset`.
    high: u16,
}

impl Offload {
    /// Takes the fields from a header snapshot; `num_buffers` is not part of it.
    #[inline]
    #[must_use]
    pub fn from_header(header: &[u8; NET_HEADER_BYTES]) -> Self {
        let (low, rest) = header.split_first_chunk().expect("8 of 12 bytes");
        let (high, _) = rest.split_first_chunk().expect("2 of 4 bytes");
        Self {
            low: u64::from_le_bytes(*low),
            high: u16::from_le_bytes(*high),
        }
    }

    /// True if a checksum or segmentation is asked for. Other fields carry no
    /// request by themselves.
    #[inline]
    #[must_use]
    pub fn is_requested(self) -> bool {
        self.low & (NEEDS_CSUM | 0xff << GSO_TYPE_SHIFT) != 0
    }

    /// Writes the header of `bytes` (10 or 12) to the start of `to`; the short
    /// one has no `num_buffers`.
    ///
    /// # Panics
    /// If `to` is shorter.
    #[inline]
    pub fn write_header(self, bytes: u32, num_buffers: u16, to: SpanMut<'_>) {
        to.write(&self.low.to_le_bytes());
        let high = u32::from(self.high) | u32::from(num_buffers) << 16;
        if bytes as usize == NET_HEADER_BYTES {
            to.skip(8).write(&high.to_le_bytes());
        } else {
            to.skip(8).write(&self.high.to_le_bytes());
        }
    }

    /// The header to write in front of this frame; `num_buffers` is ignored by
    /// whoever writes only the first ten bytes.
    #[inline]
    #[must_use]
    pub fn to_header(self, num_buffers: u16) -> [u8; NET_HEADER_BYTES] {
        let mut header = [0; NET_HEADER_BYTES];
        header[..8].copy_from_slice(&self.low.to_le_bytes());
        header[8..10].copy_from_slice(&self.high.to_le_bytes());
        header[10..].copy_from_slice(&num_buffers.to_le_bytes());
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trip_keeps_every_field() {
        let header = [1, 4, 54, 0, 0xb4, 5, 34, 0, 16, 0, 0xff, 0xff];
        let offload = Offload::from_header(&header);
        assert!(offload.is_requested());
        let written = offload.to_header(1);
        assert_eq!(written[..10], header[..10]);
        assert_eq!(written[10..], [1, 0]);
    }

    #[test]
    fn only_checksum_and_gso_are_requests() {
        assert!(!Offload::default().is_requested());
        // DATA_VALID and a header length ask for nothing.
        assert!(!Offload::from_header(&[2, 0, 54, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_requested());
        assert!(Offload::from_header(&[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_requested());
    }
}

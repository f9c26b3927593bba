//! What the switch wants to know of a frame's head, in two words.

use core::fmt;

use pollux_packet::ETHERNET_HEADER_BYTES;

/// Packet's number, as a length. Shorter frames are runts (B-30: CVE-2024-41090
/// and 41091 are what happens to others who read past them).
pub(crate) const HEADER_BYTES: usize = ETHERNET_HEADER_BYTES as usize;

const MAC_MASK: u64 = 0xffff_ffff_ffff;
const VLAN_SHIFT: u32 = 48;
const VID_MASK: u16 = 0x0fff;
/// IEEE 802.1Q C-TAG and S-TAG, as a little-endian load of the two wire bytes.
const TPID_CUSTOMER: u64 = 0x0081;
const TPID_SERVICE: u64 = 0xa888;

/// A MAC address in a VLAN: the key of the FDB, in one word.
///
/// The six bytes of the address are the low 48 bits of a little-endian load,
/// so the first byte on the wire is the lowest and the group bit is bit 0. The
/// VLAN id is in bits 48 to 59; bits 60 to 63 are always 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacVlan(u64);

impl MacVlan {
    /// Equal to the key of no frame: bits 60 to 63 are set.
    pub(crate) const NONE: Self = Self(u64::MAX);

    /// Key of `mac` (in wire order) in VLAN `vid`, of which the low 12 bits count.
    #[inline]
    #[must_use]
    pub const fn new(mac: [u8; 6], vid: u16) -> Self {
        let [a, b, c, d, e, f] = mac;
        let vlan = (vid & VID_MASK) as u64;
        Self(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) | vlan << VLAN_SHIFT)
    }

    /// The address in wire order.
    #[inline]
    #[must_use]
    pub const fn mac(self) -> [u8; 6] {
        let [a, b, c, d, e, f, _, _] = self.0.to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// The VLAN id, 0 for untagged and priority-tagged frames.
    #[inline]
    #[must_use]
    pub const fn vlan(self) -> u16 {
        let [.., low, high] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high]) & VID_MASK
    }

    /// The whole key as a number.
    #[inline]
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// True for multicast and broadcast addresses.
    #[inline]
    #[must_use]
    pub const fn is_group(self) -> bool {
        self.0 & 1 != 0
    }

    /// True for the address 00:00:00:00:00:00 in any VLAN.
    #[inline]
    #[must_use]
    pub const fn is_zero_mac(self) -> bool {
        self.0 & MAC_MASK == 0
    }

    /// True for 01:80:C2:00:00:00 to 0F, which a bridge keeps to the link
    /// (IEEE 802.1Q table 8-1).
    #[inline]
    #[must_use]
    pub const fn is_reserved(self) -> bool {
        const PREFIX: u64 = u64::from_le_bytes([0x01, 0x80, 0xc2, 0, 0, 0, 0, 0]);
        const LAST_NIBBLE: u64 = 0x0f << 40;
        self.0 & (MAC_MASK & !LAST_NIBBLE) == PREFIX
    }
}

impl fmt::Display for MacVlan {
    /// `52:54:00:12:34:56`, and `52:54:00:12:34:56@7` in VLAN 7.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.mac();
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")?;
        match self.vlan() {
            0 => Ok(()),
            vid => write!(f, "@{vid}"),
        }
    }
}

/// Both keys of a frame. They are in the same VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameKeys {
    /// Where the frame goes.
    pub dst: MacVlan,
    /// Where it comes from.
    pub src: MacVlan,
}

impl FrameKeys {
    /// Reads the keys from the first bytes of a frame; `None` below
    /// [`ETHERNET_HEADER_BYTES`].
    ///
    /// The outermost tag counts, 802.1Q or 802.1ad. VLAN id 0 (a priority tag)
    /// is untagged, and so is a tag with less than 18 bytes of head: there is
    /// no whole header behind it.
    #[inline]
    #[must_use]
    pub fn parse(head: &[u8]) -> Option<Self> {
        let (header, rest) = Header::split(head)?;
        Some(header.keys(rest))
    }
}

/// The 14 bytes of an Ethernet header in two loads, which overlap by two
/// bytes. Equal headers without a tag have equal keys: comparing them is
/// cheaper than making keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Destination, and two bytes of the source.
    front: u64,
    /// Source and EtherType.
    back: u64,
}

impl Header {
    /// Equal to no header: the bytes that overlap differ.
    pub(crate) const NONE: Self = Self {
        front: 0,
        back: u64::MAX,
    };

    /// The header and what follows it; `None` for a runt.
    #[inline]
    pub(crate) fn split(head: &[u8]) -> Option<(Self, &[u8])> {
        let (header, rest) = head.split_first_chunk::<HEADER_BYTES>()?;
        // Whole chunks: taken apart byte by byte, they become loads of bytes.
        // Neither can be missing from 14 bytes, and no code remains for it.
        let header = Self {
            front: u64::from_le_bytes(*header.first_chunk()?),
            back: u64::from_le_bytes(*header.last_chunk()?),
        };
        Some((header, rest))
    }

    #[inline]
    pub(crate) const fn is_tagged(self) -> bool {
        let ethertype = self.back >> 48;
        ethertype == TPID_CUSTOMER || ethertype == TPID_SERVICE
    }

    /// The keys; `rest` is what follows the header.
    #[inline]
    pub(crate) fn keys(self, rest: &[u8]) -> FrameKeys {
        let vlan = if self.is_tagged() {
            outer_vlan(rest)
        } else {
            0
        };
        FrameKeys {
            dst: MacVlan(self.front & MAC_MASK | vlan),
            src: MacVlan(self.back & MAC_MASK | vlan),
        }
    }
}

/// VLAN id of the tag whose TCI `rest` starts with, at its place in the key.
#[inline]
fn outer_vlan(rest: &[u8]) -> u64 {
    match rest.first_chunk::<4>() {
        Some(&[high, low, ..]) => {
            u64::from(u16::from_be_bytes([high, low]) & VID_MASK) << VLAN_SHIFT
        }
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DST: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
    const SRC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

    fn head(after: &[u8]) -> Vec<u8> {
        [&DST[..], &SRC[..], after].concat()
    }

    #[test]
    fn untagged() {
        let keys = FrameKeys::parse(&head(&[8, 0])).expect("14 bytes");
        assert_eq!(keys.dst, MacVlan::new(DST, 0));
        assert_eq!(keys.src, MacVlan::new(SRC, 0));
        assert_eq!(keys.src.mac(), SRC);
    }

    #[test]
    fn outer_tag_counts_for_both_tpids() {
        for tpid in [[0x81, 0x00], [0x88, 0xa8]] {
            let after = [&tpid[..], &[0xef, 0xfe, 0x81, 0x00, 0x00, 0x05, 8, 0]].concat();
            let keys = FrameKeys::parse(&head(&after)).expect("tagged");
            assert_eq!(keys.dst, MacVlan::new(DST, 0xffe));
            assert_eq!(keys.src, MacVlan::new(SRC, 0xffe));
            assert_eq!(keys.src.vlan(), 0xffe);
        }
        // Both bytes of 0x0081 swapped are no tag.
        let keys = FrameKeys::parse(&head(&[0x00, 0x81, 0, 7, 8, 0])).expect("untagged");
        assert_eq!(keys.dst.vlan(), 0);
    }

    #[test]
    fn priority_tag_is_untagged() {
        let keys = FrameKeys::parse(&head(&[0x81, 0, 0xe0, 0, 8, 0])).expect("tagged");
        assert_eq!(keys.dst, MacVlan::new(DST, 0));
    }

    #[test]
    fn truncated_tag_is_untagged() {
        for more in 0..4 {
            let after = &[0x81, 0, 0, 7, 8][..2 + more.min(3)];
            let keys = FrameKeys::parse(&head(after)).expect("14 bytes");
            assert_eq!(keys.dst.vlan(), 0, "{more} bytes of tag");
        }
        let keys = FrameKeys::parse(&head(&[0x81, 0, 0, 7, 8, 0])).expect("18 bytes");
        assert_eq!(keys.dst.vlan(), 7);
    }

    #[test]
    fn runts_have_no_keys() {
        let frame = head(&[8, 0]);
        for len in 0..HEADER_BYTES {
            assert_eq!(FrameKeys::parse(&frame[..len]), None);
        }
    }

    #[test]
    fn predicates() {
        let group = |mac| MacVlan::new(mac, 9).is_group();
        assert!(group([0xff; 6]) && group([0x33, 0x33, 0, 0, 0, 1]));
        assert!(!group(DST));
        assert!(MacVlan::new([0; 6], 9).is_zero_mac());
        assert!(!MacVlan::new([0, 0, 0, 0, 0, 1], 0).is_zero_mac());
        for last in 0..=0xff {
            let key = MacVlan::new([0x01, 0x80, 0xc2, 0, 0, last], 3);
            assert_eq!(key.is_reserved(), last <= 0x0f, "{key}");
        }
        assert!(!MacVlan::new([0x01, 0x80, 0xc2, 0, 1, 0], 0).is_reserved());
    }

    #[test]
    fn display() {
        assert_eq!(MacVlan::new(DST, 0).to_string(), "52:54:00:00:00:01");
        assert_eq!(MacVlan::new(DST, 7).to_string(), "52:54:00:00:00:01@7");
    }
}

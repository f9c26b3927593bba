//! The frames of the demo: what is in them and where.
//!
//! ```text
//! byte 0        6        12     14      16         24      32 … size
//!      dst MAC  src MAC  type   source  sequence   sent    payload
//! ```
//! Numbers are little-endian. `sent` is a tick of the clock, not used to judge
//! anything. The payload of every [`SAMPLE`]th frame is made from its source and
//! sequence; the others carry what was left in their buffer, which is faster.

/// Shortest frame, in bytes, without FCS: what a 64-byte buffer of testpmd is.
pub(crate) const SIZE_MIN: u32 = 64;
/// Longest frame, in bytes: a jumbo frame of 9,000 bytes with its headers.
pub(crate) const SIZE_MAX: u32 = 9018;
/// Bytes before the payload.
pub(crate) const FIELDS_BYTES: usize = 32;
/// Payloads are checked of one frame in so many.
pub(crate) const SAMPLE: u64 = 64;

/// Ethernet types for local experiments (IEEE 802, 9.2.4).
const TYPE_TRAFFIC: [u8; 2] = [0x88, 0xb5];
const TYPE_ANNOUNCE: [u8; 2] = [0x88, 0xb6];

/// What stands before the payload.
pub(crate) type Fields = [u8; FIELDS_BYTES];

/// Address of a guest.
fn mac_of(guest: u16) -> [u8; 6] {
    let [high, low] = guest.to_be_bytes();
    [0x02, 0, 0, 0x70, high, low]
}

/// Fields of a flow, with sequence and time 0.
pub(crate) fn flow_fields(from: u16, to: u16) -> Fields {
    fields(mac_of(to), from, TYPE_TRAFFIC)
}

/// A broadcast frame by which the switch learns where a guest is, as a gratuitous
/// ARP would be.
pub(crate) fn announcement(from: u16) -> [u8; SIZE_MIN as usize] {
    let mut frame = [0; SIZE_MIN as usize];
    frame[..FIELDS_BYTES].copy_from_slice(&fields([0xff; 6], from, TYPE_ANNOUNCE));
    frame
}

/// The guest that announces itself by a frame with these fields.
pub(crate) fn announced_by(fields: &Fields) -> Option<u16> {
    (fields[12..14] == TYPE_ANNOUNCE).then(|| u16::from_le_bytes([fields[14], fields[15]]))
}

fn fields(dst: [u8; 6], from: u16, ethernet_type: [u8; 2]) -> Fields {
    let mut fields = [0; FIELDS_BYTES];
    fields[..6].copy_from_slice(&dst);
    fields[6..12].copy_from_slice(&mac_of(from));
    fields[12..14].copy_from_slice(&ethernet_type);
    fields[14..16].copy_from_slice(&from.to_le_bytes());
    fields
}

/// Sets what differs from frame to frame of a flow.
#[inline]
pub(crate) fn stamp(fields: &mut Fields, sequence: u64, sent: u64) {
    fields[16..24].copy_from_slice(&sequence.to_le_bytes());
    fields[24..].copy_from_slice(&sent.to_le_bytes());
}

/// Sequence and time of a frame.
#[inline]
pub(crate) fn read_stamp(fields: &Fields) -> (u64, u64) {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&fields[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    (word(16), word(24))
}

/// True if the payload of this frame is made from its source and sequence.
#[inline]
pub(crate) const fn is_sample(sequence: u64) -> bool {
    sequence.is_multiple_of(SAMPLE)
}

/// Makes the payload of a sample.
pub(crate) fn fill_payload(payload: &mut [u8], source: u16, sequence: u64) {
    // SplitMix64: every word differs from those around it and in other frames.
    let mut state = sequence ^ (u64::from(source) << 48) ^ 0x706f_6c6c_7578;
    for chunk in payload.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_read_back_and_leave_the_rest() {
        let mut fields = flow_fields(3, 4);
        let before = fields;
        stamp(&mut fields, 7, u64::MAX);
        assert_eq!(read_stamp(&fields), (7, u64::MAX));
        assert_eq!(fields[..16], before[..16]);
        assert_eq!(announced_by(&fields), None);
    }

    #[test]
    fn announcements_say_who_is_there() {
        let frame = announcement(300);
        let fields = frame.first_chunk().unwrap();
        assert_eq!(announced_by(fields), Some(300));
        assert_eq!(fields[..6], [0xff; 6]);
    }

    #[test]
    fn payloads_depend_on_source_and_sequence() {
        let payload = |source, sequence| {
            let mut payload = [0; 30];
            fill_payload(&mut payload, source, sequence);
            payload
        };
        assert_eq!(payload(1, 64), payload(1, 64));
        assert_ne!(payload(1, 64), payload(2, 64));
        assert_ne!(payload(1, 64), payload(1, 128));
        assert!(is_sample(0) && is_sample(64) && !is_sample(65));
    }
}

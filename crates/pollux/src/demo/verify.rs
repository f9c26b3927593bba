//! Judges every frame that a guest receives.

use std::collections::BTreeSet;

use pollux_packet::Span;

use super::frame::{self, FIELDS_BYTES, Fields};

/// What became of a flow, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Frames sent.
    pub(crate) sent: u64,
    /// Frames that came as they were sent, each counted once.
    pub(crate) received: u64,
    /// Frames sent that did not come, or came damaged.
    pub(crate) lost: u64,
    /// Frames that came after one that was sent later (RFC 4737).
    pub(crate) reordered: u64,
    /// Frames that came again.
    pub(crate) duplicated: u64,
    /// Frames with a wrong address, source, sequence, length or payload.
    pub(crate) corrupt: u64,
    /// Frames of which the whole payload was compared.
    pub(crate) samples: u64,
}

impl Tally {
    /// True if nothing is wrong.
    pub(crate) fn is_clean(&self) -> bool {
        (self.lost, self.reordered, self.duplicated, self.corrupt) == (0, 0, 0, 0)
    }

    /// Adds another flow's.
    pub(crate) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.lost += other.lost;
        self.reordered += other.reordered;
        self.duplicated += other.duplicated;
        self.corrupt += other.corrupt;
        self.samples += other.samples;
    }
}

/// The receiving end of one flow.
#[derive(Debug)]
pub(crate) struct Verifier {
    /// Fields of the flow; the first 16 bytes of every frame are these.
    expected: Fields,
    source: u16,
    size: u32,
    /// Sequence behind the highest that came.
    next: u64,
    received: u64,
    /// Sequences below `next` that have not come. Never longer than a window.
    missing: BTreeSet<u64>,
    reordered: u64,
    duplicated: u64,
    corrupt: u64,
    samples: u64,
    /// Payload as it came and as it should be.
    payloads: [Vec<u8>; 2],
}

impl Verifier {
    /// For frames of `size` bytes from guest `from` to guest `to`.
    pub(crate) fn new(from: u16, to: u16, size: u32) -> Self {
        let payload = vec![0; size as usize - FIELDS_BYTES];
        Self {
            expected: frame::flow_fields(from, to),
            source: from,
            size,
            next: 0,
            received: 0,
            missing: BTreeSet::new(),
            reordered: 0,
            duplicated: 0,
            corrupt: 0,
            samples: 0,
            payloads: [payload.clone(), payload],
        }
    }

    /// Sequence behind the highest that came: what is before it is no longer
    /// under way, unless it is late.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Frames that came as they were sent.
    #[inline]
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Judges a frame of a flow of which `sent` frames were sent. Returns when
    /// it was sent, in ticks, unless it is damaged or came before.
    #[inline]
    pub(crate) fn see(&mut self, pieces: &[Span<'_>], sent: u64) -> Option<u64> {
        let [whole] = pieces else {
            self.corrupt += 1;
            return None;
        };
        if whole.len() != self.size {
            self.see_other(*whole);
            return None;
        }
        let fields: Fields = whole.snapshot_array();
        let (sequence, ticks) = frame::read_stamp(&fields);
        if fields[..16] != self.expected[..16] || sequence >= sent {
            self.see_other(*whole);
            return None;
        }
        if frame::is_sample(sequence) && !self.has_payload(*whole, sequence) {
            self.corrupt += 1;
            return None;
        }
        if sequence == self.next {
            self.next += 1;
        } else if !self.see_out_of_order(sequence) {
            return None;
        }
        self.received += 1;
        Some(ticks)
    }

    /// A frame that is not of the flow: an announcement, or damaged.
    #[cold]
    fn see_other(&mut self, whole: Span<'_>) {
        if whole.len() as usize >= FIELDS_BYTES {
            let fields: Fields = whole.snapshot_array();
            if frame::announced_by(&fields).is_some() {
                return;
            }
        }
        self.corrupt += 1;
    }

    /// False for a frame that came before.
    #[cold]
    fn see_out_of_order(&mut self, sequence: u64) -> bool {
        if sequence > self.next {
            self.missing.extend(self.next..sequence);
            self.next = sequence + 1;
            return true;
        }
        let is_late = self.missing.remove(&sequence);
        if is_late {
            self.reordered += 1;
        } else {
            self.duplicated += 1;
        }
        is_late
    }

    fn has_payload(&mut self, whole: Span<'_>, sequence: u64) -> bool {
        let [came, wanted] = &mut self.payloads;
        let head_bytes = u32::try_from(FIELDS_BYTES).unwrap_or(u32::MAX);
        whole.skip(head_bytes).snapshot(came);
        frame::fill_payload(wanted, self.source, sequence);
        self.samples += 1;
        came == wanted
    }

    /// What became of the flow, of which `sent` frames were sent and none is
    /// under way.
    pub(crate) fn tally(&self, sent: u64) -> Tally {
        Tally {
            sent,
            received: self.received,
            lost: sent - self.received,
            reordered: self.reordered,
            duplicated: self.duplicated,
            corrupt: self.corrupt,
            samples: self.samples,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u32 = 100;

    fn frame_of(sequence: u64) -> Vec<u8> {
        let mut fields = frame::flow_fields(1, 2);
        frame::stamp(&mut fields, sequence, 1000 + sequence);
        let mut bytes = vec![0; SIZE as usize];
        bytes[..FIELDS_BYTES].copy_from_slice(&fields);
        if frame::is_sample(sequence) {
            frame::fill_payload(&mut bytes[FIELDS_BYTES..], 1, sequence);
        }
        bytes
    }

    fn see(verifier: &mut Verifier, bytes: &[u8], sent: u64) -> Option<u64> {
        verifier.see(&[Span::from_slice(bytes)], sent)
    }

    /// What becomes of `sent` frames if those of `sequences` come, in order.
    fn tally(sequences: impl IntoIterator<Item = u64>, sent: u64) -> Tally {
        let mut verifier = Verifier::new(1, 2, SIZE);
        for sequence in sequences {
            see(&mut verifier, &frame_of(sequence), sent);
        }
        verifier.tally(sent)
    }

    #[test]
    fn a_whole_flow_is_clean() {
        let clean = tally(0..200, 200);
        assert!(clean.is_clean());
        assert_eq!((clean.received, clean.samples), (200, 4));
        let mut verifier = Verifier::new(1, 2, SIZE);
        assert_eq!(see(&mut verifier, &frame_of(0), 1), Some(1000));
    }

    #[test]
    fn loss_is_counted_in_the_middle_and_at_the_end() {
        let holes = tally((0..10).filter(|n| ![3, 4].contains(n)), 12);
        assert_eq!((holes.lost, holes.reordered, holes.corrupt), (4, 0, 0));
        assert!(!holes.is_clean());
        assert_eq!(tally([], 5).lost, 5);
    }

    #[test]
    fn a_late_frame_is_reordered_and_not_lost() {
        let late = tally([0, 2, 3, 1, 4], 5);
        assert_eq!((late.lost, late.reordered, late.duplicated), (0, 1, 0));
        assert!(!late.is_clean());
    }

    #[test]
    fn a_second_copy_hides_no_loss() {
        let twice = tally([0, 1, 1, 3], 4);
        assert_eq!((twice.lost, twice.reordered, twice.duplicated), (1, 0, 1));
        assert_eq!(twice.received, 3);
    }

    #[test]
    fn every_damaged_field_and_sampled_byte_is_noticed() {
        for index in 0..SIZE as usize {
            // Bytes of the time are not judged: nothing can be known of it.
            if (24..32).contains(&index) {
                continue;
            }
            let mut verifier = Verifier::new(1, 2, SIZE);
            let mut damaged = frame_of(64);
            damaged[index] ^= 0x40;
            let first = see(&mut verifier, &damaged, 65);
            let tally = verifier.tally(65);
            // A sequence that was sent but is not the right one has another
            // payload.
            assert_eq!((first, tally.corrupt), (None, 1), "byte {index}");
            assert_eq!(tally.received, 0, "byte {index}");
        }
    }

    #[test]
    fn foreign_short_and_cut_frames_are_corrupt() {
        let mut verifier = Verifier::new(1, 2, SIZE);
        let frame = frame_of(0);
        see(&mut verifier, &frame[..99], 1);
        see(&mut verifier, &frame[..20], 1);
        verifier.see(&[Span::from_slice(&frame), Span::from_slice(&frame)], 1);
        let mut foreign = frame_of(0);
        foreign[..FIELDS_BYTES].copy_from_slice(&frame::flow_fields(3, 2));
        see(&mut verifier, &foreign, 1);
        assert_eq!(verifier.tally(1).corrupt, 4);
        // Not sent yet.
        see(&mut verifier, &frame_of(1), 1);
        assert_eq!(verifier.tally(1).corrupt, 5);
    }

    #[test]
    fn announcements_are_no_traffic() {
        let mut verifier = Verifier::new(1, 2, SIZE);
        assert_eq!(see(&mut verifier, &frame::announcement(7), 0), None);
        assert!(verifier.tally(0).is_clean());
        let mut verifier = Verifier::new(1, 2, frame::SIZE_MIN);
        see(&mut verifier, &frame::announcement(7), 0);
        assert!(verifier.tally(0).is_clean());
    }
}

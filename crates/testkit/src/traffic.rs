//! Numbered frames between test guests, and what came of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use pollux_virtio::device::{self, RingConfig};
use pollux_virtio::driver::{ChainShape, Guest, GuestSpec, NetConfig};
use pollux_virtio::{GuestMemory, RingAreas};

use crate::random::Random;
use crate::raw::RawRing;

/// Station number that stands for the broadcast address.
pub const EVERYBODY: u16 = u16::MAX;
/// Shortest numbered frame, in bytes: tag, addresses, numbers, checksum.
pub const NUMBERED_BYTES_MIN: u32 = 14 + 4 + 20;

/// Ethernet types for local experiments (IEEE 802, 9.2.4).
const TYPE_NUMBERED: [u8; 2] = [0x88, 0xb5];
const TYPE_PLAIN: [u8; 2] = [0x88, 0xb6];
const TYPE_VLAN: [u8; 2] = [0x81, 0x00];

/// Address of a station.
#[must_use]
pub fn mac_of(station: u16) -> [u8; 6] {
    if station == EVERYBODY {
        return [0xff; 6];
    }
    let [high, low] = station.to_be_bytes();
    [0x02, 0, 0, 0x57, high, low]
}

/// What a numbered frame says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// Station that sent it.
    pub from: u16,
    /// Station that it is for, or [`EVERYBODY`].
    pub to: u16,
    /// VLAN tag.
    pub vlan: Option<u16>,
    /// Place in the flow from `from` to `to`.
    pub number: u64,
}

/// What is wrong with a frame that should be a numbered one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NumberedError {
    /// Not of our type: another frame.
    #[error("not a numbered frame")]
    Other,
    /// Shorter than its fields.
    #[error("a numbered frame of {0} bytes is too short")]
    Short(usize),
    /// A byte is not the one that was sent.
    #[error("the checksum is wrong")]
    Checksum,
}

impl Numbered {
    /// The frame, `bytes` long: every byte depends on the number.
    ///
    /// # Panics
    /// If `bytes` is less than [`NUMBERED_BYTES_MIN`].
    #[must_use]
    pub fn to_frame(self, bytes: u32) -> Vec<u8> {
        assert!(bytes >= NUMBERED_BYTES_MIN, "too short for its fields");
        let mut frame = Vec::with_capacity(bytes as usize);
        frame.extend(mac_of(self.to));
        frame.extend(mac_of(self.from));
        if let Some(vlan) = self.vlan {
            frame.extend(TYPE_VLAN);
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend(TYPE_NUMBERED);
        frame.extend(self.from.to_be_bytes());
        frame.extend(self.to.to_be_bytes());
        frame.extend(self.number.to_be_bytes());
        let checksum_at = frame.len();
        frame.extend([0; 8]);
        fill(&mut frame, bytes, self.number);
        let sum = checksum(&frame);
        frame[checksum_at..checksum_at + 8].copy_from_slice(&sum.to_be_bytes());
        frame
    }

    /// Reads a frame and checks every byte of it.
    ///
    /// # Errors
    /// See [`NumberedError`].
    pub fn of_frame(frame: &[u8]) -> Result<Self, NumberedError> {
        let short = NumberedError::Short(frame.len());
        let mut rest = frame.get(12..).ok_or(short)?;
        let mut take = |len: usize| -> Result<&[u8], NumberedError> {
            let (taken, behind) = rest.split_at_checked(len).ok_or(short)?;
            rest = behind;
            Ok(taken)
        };
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, &b| sum << 8 | u64::from(b));
        let word = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
        let mut ethernet_type = take(2)?;
        let mut vlan = None;
        if ethernet_type == TYPE_VLAN {
            vlan = Some(word(take(2)?));
            ethernet_type = take(2)?;
        }
        if ethernet_type != TYPE_NUMBERED {
            return Err(NumberedError::Other);
        }
        let (from, to) = (word(take(2)?), word(take(2)?));
        let numbered = Self {
            from,
            to,
            vlan,
            number: number(take(8)?),
        };
        let sum = number(take(8)?);
        let mut sent = frame.to_vec();
        let checksum_at = frame.len() - rest.len() - 8;
        sent[checksum_at..checksum_at + 8].fill(0);
        if checksum(&sent) == sum {
            Ok(numbered)
        } else {
            Err(NumberedError::Checksum)
        }
    }
}

/// A frame that is not numbered, `bytes` long (14 or more): for tests that
/// compare it whole.
///
/// # Panics
/// If it is shorter.
#[must_use]
pub fn plain_frame(dst: [u8; 6], src: [u8; 6], bytes: u32, seed: u64) -> Vec<u8> {
    assert!(bytes >= 14, "too short for its addresses");
    let mut frame = Vec::with_capacity(bytes as usize);
    frame.extend(dst);
    frame.extend(src);
    frame.extend(TYPE_PLAIN);
    fill(&mut frame, bytes, seed);
    frame
}

fn fill(frame: &mut Vec<u8>, bytes: u32, seed: u64) {
    let mut random = Random::new(seed ^ 0x706f_6c6c_7578);
    while frame.len() < bytes as usize {
        frame.extend(random.bits().to_le_bytes());
    }
    frame.truncate(bytes as usize);
}

/// FNV-1a over words, length included.
fn checksum(frame: &[u8]) -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325 ^ u64::try_from(frame.len()).unwrap_or(0);
    for chunk in frame.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        sum = (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x100_0000_01b3);
        sum ^= sum >> 32;
    }
    sum
}

/// What a station got of one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Frames that came.
    pub received: u64,
    /// Numbers that were left out.
    pub lost: u64,
    next: u64,
}

impl Flow {
    /// Takes the next frame of the flow.
    fn see(&mut self, frame: &Numbered) {
        assert!(
            frame.number >= self.next,
            "{frame:?} came after number {}: twice or out of order",
            self.next - 1
        );
        self.lost += frame.number - self.next;
        self.next = frame.number + 1;
        self.received += 1;
    }

    /// Number behind the last one that came.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }
}

/// What a session knows of a guest: enough to make the device halves of its
/// rings again and again.
#[derive(Clone, Debug)]
pub struct Device {
    memory: Arc<GuestMemory>,
    tx_config: NetConfig,
    rx_config: NetConfig,
}

impl Device {
    /// That of `guest`.
    #[must_use]
    pub fn of(guest: &Guest) -> Self {
        Self {
            memory: Arc::clone(&guest.memory),
            tx_config: guest.tx_config(),
            rx_config: guest.rx_config(),
        }
    }

    /// Both device halves, which go on where those before them stopped: a split
    /// ring is resumed from `used.idx`.
    ///
    /// # Panics
    /// Never: the layout was checked by the driver halves.
    #[must_use]
    pub fn resume(&self) -> (device::TxRing, device::RxRing) {
        let config = |config: NetConfig| RingConfig {
            areas: config.areas,
            features: config.features,
            base: self.used_idx(config.areas),
            call: None,
            counters: Arc::default(),
        };
        let tx = device::TxRing::new(Arc::clone(&self.memory), config(self.tx_config));
        let rx = device::RxRing::new(Arc::clone(&self.memory), config(self.rx_config));
        (tx.expect("checked"), rx.expect("checked"))
    }

    fn used_idx(&self, areas: RingAreas) -> u16 {
        RawRing::new(Arc::clone(&self.memory), areas, 0).used_idx()
    }
}

/// A guest that sends numbered frames and checks what it receives: every byte,
/// and the order of each flow.
#[derive(Debug)]
pub struct Station {
    /// The guest.
    pub guest: Guest,
    number: u16,
    next: BTreeMap<u16, u64>,
    flows: BTreeMap<(u16, u16), Flow>,
    others: Vec<Vec<u8>>,
    sent: u64,
    returned: u64,
    received: u64,
}

impl Station {
    /// A guest with all of its receive buffers posted.
    #[must_use]
    pub fn new(number: u16, spec: GuestSpec) -> Self {
        let mut station = Self::without_buffers(number, spec);
        station.guest.rx.refill();
        station.guest.rx.publish();
        station
    }

    /// A guest that posts no receive buffers before it is [polled](Self::poll).
    #[must_use]
    pub fn without_buffers(number: u16, spec: GuestSpec) -> Self {
        let mut guest = Guest::new(spec).expect("guest memory");
        guest.tx.ring().suppress_calls();
        guest.rx.ring().suppress_calls();
        Self {
            guest,
            number,
            next: BTreeMap::new(),
            flows: BTreeMap::new(),
            others: Vec::new(),
            sent: 0,
            returned: 0,
            received: 0,
        }
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Its address.
    #[must_use]
    pub fn mac(&self) -> [u8; 6] {
        mac_of(self.number)
    }

    /// Sends the next frame of the flow to `to`; false if the ring is full. The
    /// switch sees it after [`publish`](Self::publish).
    pub fn send(&mut self, to: u16, bytes: u32) -> bool {
        self.send_tagged(to, bytes, None)
    }

    /// Like [`send`](Self::send), with a VLAN tag.
    pub fn send_tagged(&mut self, to: u16, bytes: u32, vlan: Option<u16>) -> bool {
        let number = self.next.get(&to).copied().unwrap_or(0);
        let frame = Numbered {
            from: self.number,
            to,
            vlan,
            number,
        };
        let sent = self.send_frame(&frame.to_frame(bytes), ChainShape::JOINED);
        if sent {
            self.next.insert(to, number + 1);
        }
        sent
    }

    /// Sends any frame; false if the ring is full.
    ///
    /// # Panics
    /// If the frame does not fit a buffer.
    pub fn send_frame(&mut self, frame: &[u8], shape: ChainShape<'_>) -> bool {
        let descriptors = match shape.indirect {
            true => 1,
            false => shape.cuts.len() + 1,
        };
        if usize::from(self.guest.tx.ring().free_len()) < descriptors {
            return false;
        }
        self.guest
            .tx
            .send(frame, shape)
            .expect("the frame fits a buffer");
        self.sent += 1;
        true
    }

    /// Shows the switch what was sent.
    pub fn publish(&mut self) {
        self.guest.tx.publish();
    }

    /// Takes back what was sent and what arrived, checks it, and posts the
    /// receive buffers again. Returns how many frames arrived.
    ///
    /// # Panics
    /// If a numbered frame is damaged, came twice or out of order, or the
    /// device returned what it was not given.
    pub fn poll(&mut self) -> u32 {
        self.reclaim();
        let (flows, others) = (&mut self.flows, &mut self.others);
        let count = self.guest.rx.receive(u32::MAX, |received| {
            let frame = received.to_vec();
            match Numbered::of_frame(&frame) {
                Ok(numbered) => flows
                    .entry((numbered.from, numbered.to))
                    .or_default()
                    .see(&numbered),
                Err(NumberedError::Other) => others.push(frame),
                Err(error) => panic!("a frame was damaged: {error}: {frame:02x?}"),
            }
        });
        let count = count.expect("the device returns what it was given");
        self.received += u64::from(count);
        if self.guest.rx.refill() > 0 {
            self.guest.rx.publish();
        }
        count
    }

    /// Takes back what was sent and posts nothing.
    ///
    /// # Panics
    /// If the device returned what it was not given.
    pub fn reclaim(&mut self) {
        let count = self.guest.tx.reclaim();
        self.returned += u64::from(count.expect("the device returns what it was given"));
    }

    /// Frames that were sent and did not come back.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.sent - self.returned
    }

    /// Frames sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Numbered frames sent to `to`.
    #[must_use]
    pub fn sent_to(&self, to: u16) -> u64 {
        self.next.get(&to).copied().unwrap_or(0)
    }

    /// Frames received, of any kind.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received
    }

    /// What came of the numbered frames that `from` sent to `to`.
    #[must_use]
    pub fn flow(&self, from: u16, to: u16) -> Flow {
        self.flows.get(&(from, to)).copied().unwrap_or_default()
    }

    /// Frames received that are not numbered, since the last call.
    pub fn take_others(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: Numbered = Numbered {
        from: 3,
        to: 0x1234,
        vlan: None,
        number: 77,
    };

    #[test]
    fn frames_say_what_they_are() {
        for bytes in [NUMBERED_BYTES_MIN, 60, 61, 1514, 65_535] {
            for vlan in [None, Some(5)] {
                let frame = Numbered { vlan, ..FRAME }.to_frame(bytes);
                assert_eq!(frame.len(), bytes as usize);
                assert_eq!(Numbered::of_frame(&frame), Ok(Numbered { vlan, ..FRAME }));
            }
        }
        let plain = plain_frame(mac_of(1), mac_of(2), 60, 0);
        assert_eq!(Numbered::of_frame(&plain), Err(NumberedError::Other));
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        let frame = FRAME.to_frame(64);
        for index in 0..frame.len() {
            let mut damaged = frame.clone();
            damaged[index] ^= 0x40;
            assert!(Numbered::of_frame(&damaged).is_err(), "byte {index}");
        }
        assert!(Numbered::of_frame(&frame[..63]).is_err());
        assert!(Numbered::of_frame(&frame[..20]).is_err());
    }

    #[test]
    fn gaps_are_counted() {
        let mut flow = Flow::default();
        for number in [0, 1, 4] {
            flow.see(&Numbered { number, ..FRAME });
        }
        assert_eq!((flow.received, flow.lost, flow.next()), (3, 2, 5));
    }

    #[test]
    #[should_panic(expected = "twice or out of order")]
    fn a_duplicate_is_noticed() {
        let mut flow = Flow::default();
        flow.see(&FRAME);
        flow.see(&FRAME);
    }
}

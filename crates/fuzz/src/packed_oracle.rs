//! One packed ring of any size, at any position, between a driver that keeps
//! every rule, the device half of pollux, and a plain model of the ring that was
//! written from virtio 1.2, section 2.8, with nothing of pollux's.
//!
//! After each step of the device the model says, and memory is compared byte by
//! byte:
//!
//! * which frames come out of a TX ring, in which order, with which bytes, and
//!   which chains are counted as dropped and why;
//! * what is in every buffer of an RX ring that was returned, and that nothing
//!   changed but buffers that the device has;
//! * every descriptor of the ring: that those which had to be used are (slot, id,
//!   length, AVAIL, USED and WRITE), and no other changed;
//! * whether a call was sent;
//! * the position that the device reports, and what it wishes to be told.
//!
//! What the specification leaves open is pollux's to say and is in the model as
//! it is documented there: limits and cost of a burst; that a chain too short
//! for its headers goes back with length 0; and that a frame which finds no room
//! takes nothing.

mod driver;
mod judge;
mod memory;
mod model;

use std::ops::Range;
use std::sync::LazyLock;

use pollux_packet::{BatchStore, DropReason, FrameSet, Offload, Span};
use pollux_sys::EventFd;
use pollux_testkit::gather;
use pollux_virtio::RingAreas;
use pollux_virtio::device::{Burst, BurstLimit, RingConfig, RxRing, TxRing};

use self::driver::{Driver, Wish};
use self::judge::{Fill, Judged, Outcome, fill, judge};
use crate::bytes::Bytes;
use crate::marks;

/// Operations of one input at most.
const OPS_MAX: usize = 96;
/// Buffers that the device walks at least in one call: more are its own affair.
const WALK_MIN: usize = 256;

/// What frames for an RX ring are cut from: other bytes than the guest's.
static SOURCE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    (0..1000 + 65_536_u32)
        .map(|at| (at.wrapping_mul(0x85eb_ca6b) >> 23).to_le_bytes()[0])
        .collect()
});

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let mut world = World::new(&mut bytes);
    for _ in 0..OPS_MAX {
        if bytes.is_empty() {
            break;
        }
        world.step(&mut bytes);
    }
    world.end();
}

/// What has to be reached: see [`Target::wanted`](crate::Target::wanted).
#[must_use]
pub fn wanted() -> Vec<String> {
    let marks = [
        "called-at-event",
        "called-at-first",
        "called-for-all",
        "chain-as-long-as-the-ring",
        "chain-over-the-end",
        "not-called-at-all",
        "not-called-before-event",
        "rx-bad-rx-chain",
        "rx-merged",
        "rx-rx-buffer-too-small",
        "rx-rx-ring-full",
        "rx-fits-after-full",
        "several-taken",
        "some-published",
        "tx-bad-offload",
        "tx-kept",
        "tx-oversize",
        "tx-returned-as-one",
        "tx-runt",
        "went-on-after-move",
        "went-on-after-restart",
    ];
    marks.map(str::to_owned).to_vec()
}

/// The device half.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one of them")]
enum Device {
    Tx(TxRing),
    Rx(RxRing),
}

impl Device {
    fn new(driver: &Driver, config: RingConfig) -> Self {
        let memory = driver.memory.map(driver.is_cut);
        if driver.is_rx {
            Self::Rx(RxRing::new(memory, config).expect("a ring that can be"))
        } else {
            Self::Tx(TxRing::new(memory, config).expect("a ring that can be"))
        }
    }

    fn base(&self) -> u16 {
        match self {
            Self::Tx(ring) => ring.base(),
            Self::Rx(ring) => ring.base(),
        }
    }

    fn calls_sent(&self) -> u64 {
        match self {
            Self::Tx(ring) => ring.notifications().calls_sent,
            Self::Rx(ring) => ring.notifications().calls_sent,
        }
    }
}

struct World {
    driver: Driver,
    device: Device,
    call: EventFd,
    /// Calls that this device has sent.
    calls: u64,
    /// The frontend has disabled the ring.
    discards: bool,
    /// What has to happen once more chains are returned.
    went_on: Option<&'static str>,
    /// A frame has found the ring too short.
    was_full: bool,
}

impl World {
    fn new(bytes: &mut Bytes<'_>) -> Self {
        let driver = Driver::new(bytes);
        let call = EventFd::new().expect("an eventfd");
        let device = start(&driver, &call, driver.model.device.to_bits());
        let mut world = Self {
            driver,
            device,
            call,
            calls: 0,
            discards: false,
            went_on: None,
            was_full: false,
        };
        world.check("start");
        world
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.below(16) {
            op @ 0..=9 => self.driver.step(op, bytes),
            10..=13 => match self.device {
                Device::Tx(_) => self.receive(bytes),
                Device::Rx(_) => self.transmit(bytes),
            },
            14 => self.kicks_and_calls(bytes),
            _ => self.move_or_restart(bytes),
        }
    }

    /// Everything is as the model says.
    fn check(&mut self, what: &str) {
        assert_eq!(
            self.device.base(),
            self.driver.model.device.to_bits(),
            "{what}: the base"
        );
        self.driver.check_ring(what);
        self.driver.memory.check(false, what);
    }

    fn kicks_and_calls(&mut self, bytes: &mut Bytes<'_>) {
        let choice = bytes.below(4);
        let model = &mut self.driver.model;
        match (&mut self.device, choice) {
            (Device::Tx(ring), 0) => {
                let has_work = ring.request_kick();
                assert_eq!(has_work, !model.out.is_empty(), "work is there already");
                self.driver.wish = if model.event_idx {
                    Wish::At(model.device)
                } else {
                    Wish::Everything
                };
            }
            (Device::Tx(ring), 1) => {
                ring.suppress_kicks();
                self.driver.wish = Wish::Nothing;
            }
            (Device::Tx(ring), 2) => {
                self.discards = !self.discards;
                ring.set_discard(self.discards);
            }
            (Device::Tx(ring), _) => {
                drop(ring.set_call(self.call.try_clone().ok()));
                model.is_known = false;
            }
            (Device::Rx(ring), _) => {
                drop(ring.set_call(self.call.try_clone().ok()));
                model.is_known = false;
            }
        }
        self.check("kicks and calls");
    }

    fn move_or_restart(&mut self, bytes: &mut Bytes<'_>) {
        let is_restart = bytes.one_in(3);
        if bytes.one_in(8) {
            // Not in this size: nothing happens.
            let areas = self.driver.areas();
            let size = areas.size + 1;
            assert!(self.relocate(RingAreas { size, ..areas }).is_err());
            self.check("a move that cannot be");
        }
        self.driver.go_elsewhere(bytes);
        self.driver.wish = Wish::Nothing;
        if is_restart {
            let base = self.device.base();
            self.device = start(&self.driver, &self.call, base);
            self.driver.model.is_known = false;
            (self.calls, self.discards) = (0, false);
            self.check("restart");
            self.went_on = Some("went-on-after-restart");
        } else {
            let moved = self.relocate(self.driver.areas());
            moved.expect("the ring can be there");
            self.check("move");
            self.went_on = Some("went-on-after-move");
        }
    }

    fn relocate(&mut self, areas: RingAreas) -> Result<(), pollux_virtio::RingError> {
        let memory = self.driver.memory.map(self.driver.is_cut);
        match &mut self.device {
            Device::Tx(ring) => ring.relocate(memory, areas),
            Device::Rx(ring) => ring.relocate(memory, areas),
        }
    }

    /// Chains were returned, with so many bytes in each: memory, position and call
    /// have to say so.
    fn returned(&mut self, written: &[u32], as_one: bool, what: &str) {
        let model = &mut self.driver.model;
        let start = model.device;
        model.give_back(written, as_one);
        let called = self.call.drain() > 0;
        if written.is_empty() {
            assert!(!called, "{what}: nothing to call for");
        } else {
            let was_known = model.is_known;
            let wanted = model.must_call(start);
            let (off_wrap, flags) = model.driver_events;
            assert_eq!(
                called, wanted,
                "{what}: a call, for {off_wrap:#x} {flags:#x} from {start:?} to {:?}",
                model.device
            );
            let is_event = flags & 3 == model::DESC && model.event_idx;
            marks::reach(match (is_event, wanted) {
                (false, false) => "not-called-at-all",
                (false, true) => "called-for-all",
                (true, false) => "not-called-before-event",
                (true, true) if was_known => "called-at-event",
                (true, true) => "called-at-first",
            });
            self.calls += u64::from(wanted);
            if let Some(mark) = self.went_on.take() {
                marks::reach(mark);
            }
        }
        assert_eq!(
            self.device.calls_sent(),
            self.calls,
            "{what}: calls are counted"
        );
        self.check(what);
    }

    fn receive(&mut self, bytes: &mut Bytes<'_>) {
        let limit = BurstLimit {
            frames: bytes.choose(&[64, 64, 1, 2, 3, 7, 200, 0]),
            units: bytes.choose(&[u32::MAX, u32::MAX, 0, 5, 20]),
            bytes: bytes.choose(&[64 << 10, u64::MAX, 1, 500, 3000]),
        };
        self.receive_with(limit, bytes);
    }

    fn receive_with(&mut self, limit: BurstLimit, bytes: &mut Bytes<'_>) {
        let wanted = self.judge_burst(limit);
        let Self {
            driver,
            device: Device::Tx(ring),
            ..
        } = self
        else {
            return;
        };
        let burst = ring.receive(limit);
        let judged = check_burst(&burst, limit, wanted, driver.model.size);
        // The driver goes on meanwhile.
        if bytes.one_in(4) {
            let op = bytes.below(10);
            driver.step(op, bytes);
        }
        if bytes.one_in(8) {
            marks::reach("tx-burst-left");
            return self.returned(&[], false, "a burst that was left");
        }
        let frames = burst.batch.len();
        let kept = usize::from(bytes.choose(&[0_u8, 0, 0, 1, 3, 64]));
        let taken = frames.saturating_sub(kept);
        let returns = burst.finish(taken);
        // Up to the chain of the first frame that stays.
        let mut frames_seen = 0;
        let end = judged.iter().position(|judged| {
            let is_frame = matches!(judged.outcome, Outcome::Frame(_));
            let is_it = is_frame && frames_seen == taken;
            frames_seen += usize::from(is_frame);
            is_it
        });
        let chains = end.unwrap_or(judged.len());
        if chains < judged.len() {
            marks::reach("tx-kept");
        }
        let drops: Vec<DropReason> = judged[..chains].iter().filter_map(Judged::drop).collect();
        assert_eq!(returns.chains() as usize, chains);
        assert_eq!(returns.drops().collect::<Vec<_>>(), drops);
        for reason in drops {
            marks::reach_variant("tx", reason);
        }
        let as_one = driver.features.in_order;
        if as_one && chains > 1 {
            marks::reach("tx-returned-as-one");
        }
        self.returned(&vec![0; chains], as_one, "finish");
    }

    /// What has to come out.
    fn judge_burst(&self, limit: BurstLimit) -> Vec<Judged> {
        let (model, memory) = (&self.driver.model, &self.driver.memory);
        let frames_max = usize::from(limit.frames.clamp(1, 64));
        let mut all = Vec::new();
        let mut bytes = 0;
        for chain in model.out.iter().take(frames_max) {
            if self.discards {
                all.push(Judged::discarded());
                continue;
            }
            let judged = judge(memory, chain, self.driver.header_bytes());
            if let Outcome::Frame(frame) = &judged.outcome {
                bytes += frame.len() as u64;
            }
            all.push(judged);
            if bytes >= limit.bytes {
                break;
            }
        }
        all
    }

    fn transmit(&mut self, bytes: &mut Bytes<'_>) {
        let count = bytes.choose(&[1_u32, 2, 5, 16, 64]);
        let is_same = bytes.one_in(2);
        let mut len = 0;
        let frames: Vec<(u32, u32)> = (0..count)
            .map(|number| {
                if number == 0 || !is_same {
                    len = match bytes.u8() % 12 {
                        choice @ 0..=7 => {
                            [60, 14, 15, 88, 89, 500, 1514, 9000][usize::from(choice)]
                        }
                        8 => 65_535,
                        _ => 14 + bytes.below_wide(3000),
                    };
                }
                // From where its bytes are cut.
                (number * 37 % 1000, len)
            })
            .collect();
        let mut set = FrameSet::first(frames.len());
        if bytes.one_in(4) {
            set = set.intersection(FrameSet::from_bits(bytes.u64()));
        }
        self.transmit_set(&frames, set);
    }

    fn transmit_set(&mut self, frames: &[(u32, u32)], set: FrameSet) {
        let Device::Rx(ring) = &mut self.device else {
            return;
        };
        let driver = &mut self.driver;
        let cut = |&(start, len): &(u32, u32)| &SOURCE[start as usize..][..len as usize];
        let sent: Vec<&[u8]> = set.map(|index| cut(&frames[index])).collect();
        let fill = fill(
            &driver.model,
            &sent,
            driver.header_bytes(),
            driver.features.mergeable,
        );
        if fill.walked > WALK_MIN {
            return;
        }
        let mut store = BatchStore::new(frames.len());
        let mut batch = store.begin();
        for frame in frames {
            let pushed = batch.push(Offload::default(), Span::from_slice(cut(frame)));
            pushed.expect("the store has room for one piece each");
        }
        let report = ring.transmit(&batch, set);
        assert_eq!(report.dropped as usize, fill.drops.len(), "{report:?}");
        assert_eq!(report.frames as usize, sent.len() - fill.drops.len());
        assert_eq!(report.bytes, fill.frame_bytes);
        for &reason in DropReason::ALL {
            let wanted = fill.drops.iter().filter(|&&drop| drop == reason).count();
            assert_eq!(report.drops.get(reason), wanted as u64, "{reason:?}");
            if wanted > 0 {
                marks::reach_variant("rx", reason);
            }
        }
        if self.was_full && fill.drops.is_empty() {
            marks::reach("rx-fits-after-full");
        }
        self.was_full = fill.drops.contains(&DropReason::RxRingFull);
        self.check_filled(&fill);
    }

    /// Buffers are as they have to be, and the ring.
    fn check_filled(&mut self, fill: &Fill) {
        let driver = &mut self.driver;
        let buffers = driver.model.out.iter().flat_map(|chain| &chain.buffers);
        let free: Vec<Range<u64>> = buffers
            .map(|&(addr, len)| addr..addr + u64::from(len))
            .collect();
        let chains: Vec<_> = driver
            .model
            .out
            .iter()
            .map(|chain| chain.buffers.clone())
            .collect();
        if fill.chains.len() > 1 && fill.merged {
            marks::reach("rx-merged");
        }
        let written: Vec<u32> = fill
            .chains
            .iter()
            .map(|bytes| u32::try_from(bytes.len()).expect("short"))
            .collect();
        self.returned(&written, false, "transmit");
        let memory = &mut self.driver.memory;
        memory.check_but(&free, "transmit");
        for (wanted, buffers) in fill.chains.iter().zip(chains) {
            let mut rest = &wanted[..];
            for (addr, len) in buffers {
                let now = rest.len().min(len as usize);
                let (part, later) = rest.split_at(now);
                let there = memory.known(addr, u32::try_from(now).expect("short"));
                assert!(there == part, "the buffer at {addr:#x} holds other bytes");
                rest = later;
            }
        }
    }

    /// Everything goes through in the end.
    fn end(&mut self) {
        self.driver.publish(usize::MAX);
        let mut nothing = Bytes::new(&[]);
        for round in 0..2 * self.driver.model.size {
            if self.driver.model.out.is_empty() {
                break;
            }
            match self.device {
                Device::Tx(_) => self.receive_with(BurstLimit::MAX, &mut nothing),
                Device::Rx(_) => {
                    // Many at once, if the device walks that many buffers.
                    let count = if round % 2 == 0 { 16 } else { 1 };
                    self.transmit_set(&[(0, 60); 16][..count], FrameSet::first(count));
                }
            }
        }
        self.driver.model.take_used();
        if !self.driver.is_rx {
            assert_eq!(
                self.driver.model.free(),
                self.driver.model.size,
                "all came back"
            );
        }
        self.driver.memory.check(true, "the end");
    }
}

/// The device half, with a call and nothing counted.
fn start(driver: &Driver, call: &EventFd, base: u16) -> Device {
    let call = call.try_clone().expect("a descriptor");
    let config = RingConfig {
        call: Some(call),
        ..driver.config(base)
    };
    Device::new(driver, config)
}

/// The burst is the first of what had to come; gives those that it has.
fn check_burst(
    burst: &Burst<'_>,
    limit: BurstLimit,
    mut judged: Vec<Judged>,
    size: u16,
) -> Vec<Judged> {
    let chains = burst.returns().chains() as usize;
    // What a chain costs is pollux's to say, but one unit at least.
    let units = burst.returns().units();
    assert!(
        units as usize >= chains,
        "{units} units for {chains} chains"
    );
    if chains < judged.len() && units >= limit.units {
        assert!(chains > 0, "a burst has a chain if there is one");
        marks::reach("tx-ended-by-units");
        judged.truncate(chains);
    } else if chains < judged.len() {
        // A burst has room for so many pieces at least, and for one chain.
        let pieces: usize = judged[..=chains]
            .iter()
            .map(|judged| judged.pieces_max)
            .sum();
        assert!(chains > 0, "a burst has a chain if there is one");
        assert!(
            pieces > 2 * usize::from(size) + 64,
            "a burst that ended early: {pieces} pieces"
        );
        marks::reach("tx-no-room-for-pieces");
        judged.truncate(chains);
    }
    assert_eq!(chains, judged.len(), "chains of a burst");
    let frames = judged.iter().filter_map(|judged| match &judged.outcome {
        Outcome::Frame(frame) => Some(frame),
        Outcome::Drop(_) => None,
    });
    let mut count = 0;
    for (index, wanted) in frames.enumerate() {
        assert!(
            index < burst.batch.len(),
            "{} frames came out",
            burst.batch.len()
        );
        let frame = burst.batch.frame(index);
        assert_eq!(frame.offload, Offload::default());
        assert!(gather(&frame) == *wanted, "frame {index} has other bytes");
        count += 1;
    }
    assert_eq!(burst.batch.len(), count, "frames of a burst");
    judged
}

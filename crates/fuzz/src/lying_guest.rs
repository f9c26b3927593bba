//! A guest that writes whatever it likes, wherever it has memory, between the
//! steps of both device halves of its rings.
//!
//! What has to hold:
//!
//! * no byte changes that is not in the guest's memory, and of those only what
//!   is the device's to write: the used ring, and buffers that descriptors of
//!   the RX ring lead to;
//! * a frame is from 14 to 65,535 bytes long, asks for no offload, and its head,
//!   body and length agree with each other and with its batch; a head stays as
//!   it is whatever the guest writes;
//! * a burst is at most 64 chains, costs at least one unit for each, and stays
//!   within its limits but for its last chain;
//! * positions move by exactly the chains that went back, each with its entry;
//! * an honest guest beside this one gets what it sent, in order, and is not
//!   disturbed.

mod guest;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use pollux_packet::{
    BATCH_MAX, Batch, BatchStore, DropReason, ETHERNET_HEADER_BYTES, FRAME_BYTES_MAX, FrameSet,
    HEAD_BYTES, Offload, Span, Transmitted,
};
use pollux_sys::EventFd;
use pollux_testkit::{Guest as HonestGuest, GuestSpec, Random};
use pollux_virtio::device::{Burst, BurstLimit, Notifications, RxRing, TxRing};
use pollux_virtio::{ChainError, GuestMemory};

use self::guest::{Guest, RX, TX};
use crate::arena::{Allowed, FILE_BYTES};
use crate::bytes::Bytes;
use crate::{features, marks};

/// Operations of one input at most: what is found later is found in fewer.
const OPS_MAX: usize = 64;
/// Longest frame that is transmitted to the liar, and what it is cut from.
static NOISE: [u8; 9000] = noise();

const fn noise() -> [u8; 9000] {
    let mut noise = [0; 9000];
    let mut at = 0;
    while at < noise.len() {
        noise[at] = ((at * 31) >> 3).to_le_bytes()[0] | 1;
        at += 1;
    }
    noise
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let Some(mut world) = World::new(&mut bytes, false) else {
        return;
    };
    for _ in 0..OPS_MAX {
        if bytes.is_empty() {
            break;
        }
        world.step(&mut bytes);
    }
    world.end();
}

/// Runs one input `rounds` times while another thread writes all over the
/// guest's memory: what depends on nobody else writing is not checked then.
pub fn run_racing(input: &[u8], rounds: u64) {
    for round in 0..rounds {
        let mut bytes = Bytes::new(input);
        let Some(mut world) = World::new(&mut bytes, true) else {
            return;
        };
        let whole = world.guest.arena.whole();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stopping = Stop(&stop);
            scope.spawn(|| flip(&whole, &stop, round));
            for _ in 0..OPS_MAX {
                world.step(&mut bytes);
            }
            drop(stopping);
        });
        world.end();
    }
}

/// What has to be reached: see [`Target::wanted`](crate::Target::wanted).
#[must_use]
pub fn wanted() -> Vec<String> {
    // A receive chain has no length that is too long for it, and is no frame
    // that lies in pieces.
    let never_rx = [ChainError::TooManyPieces, ChainError::Oversize];
    let mut wanted = marks::chain_error_marks("split-tx", &[]);
    wanted.extend(marks::chain_error_marks("split-rx", &never_rx));
    // Descriptors and tables of a packed ring have no `next`, and its chains end
    // with the ring.
    let never_tx = [ChainError::NextOutside];
    let never_rx = [&never_rx[..], &never_tx].concat();
    wanted.extend(marks::chain_error_marks("packed-tx", &never_tx));
    wanted.extend(marks::chain_error_marks("packed-rx", &never_rx));
    wanted
}

/// Ends the other thread also when this one panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Flips words and bytes at random places, mostly where rings and tables are.
fn flip(memory: &GuestMemory, stop: &AtomicBool, seed: u64) {
    let mut random = Random::new(seed);
    let file_bytes = u32::try_from(FILE_BYTES).expect("a small file");
    while !stop.load(Ordering::Relaxed) {
        let end = *random.choose(&[1024, 8192, file_bytes - 8]);
        let addr = u64::from(random.below(end));
        let mut old = [0; 8];
        memory.read(addr, &mut old).expect("inside the file");
        let value = match random.below(3) {
            0 => u64::from_le_bytes(old) ^ 1 << random.below(64),
            1 => random.bits() & 0x0007_0000_ffff_ffff,
            _ => u64::from_le_bytes(old).wrapping_add(1),
        };
        let len = *random.choose(&[1, 2, 8]);
        let wrote = memory.write(addr, &value.to_le_bytes()[..len]);
        wrote.expect("inside the file");
    }
}

/// The liar, the device halves of its rings, and an honest guest beside it.
struct World {
    guest: Guest,
    tx: TxRing,
    rx: RxRing,
    tx_notifications: Notifications,
    honest: Option<Honest>,
    /// Another thread writes to the guest's memory.
    racing: bool,
    layout: &'static str,
}

struct Honest {
    guest: HonestGuest,
    rx: RxRing,
}

impl World {
    /// `None` if the rings cannot be, which the device said without harm.
    fn new(bytes: &mut Bytes<'_>, racing: bool) -> Option<Self> {
        let features = features::of_bits(bytes.u8());
        let guest = Guest::new(features, bytes);
        let (tx, rx) = start(&guest)?;
        let mut world = Self {
            guest,
            tx,
            rx,
            tx_notifications: Notifications::default(),
            honest: None,
            racing,
            layout: features::layout(features),
        };
        world.check_rings("the start of a ring");
        Some(world)
    }

    fn reach(&self, side: &str, mark: &str) {
        marks::reach(&format!("{}-{side}-{mark}", self.layout));
    }

    /// One operation.
    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.below(16) {
            0..=5 => self.guest.lie(bytes),
            6..=8 => self.receive(bytes),
            9..=11 => self.transmit(bytes),
            12 => {
                let has_work = self.tx.request_kick();
                if has_work && self.tx.fault().is_none() {
                    self.reach("tx", "kick-not-needed");
                }
                if !self.racing && has_work {
                    assert!(self.tx.fault().is_none(), "a broken ring has no work");
                }
                self.check_rings("request_kick");
                if bytes.one_in(2) {
                    self.tx.suppress_kicks();
                    self.check_rings("suppress_kicks");
                }
            }
            13 => self.relocate(bytes),
            14 => {
                let call = bytes.one_in(2).then(|| EventFd::new().expect("an eventfd"));
                if bytes.one_in(2) {
                    drop(self.tx.set_call(call));
                } else {
                    drop(self.rx.set_call(call));
                }
                self.tx.set_discard(bytes.one_in(4));
            }
            _ => self.restart(bytes),
        }
    }

    /// Both rings are set up anew, as after GET_VRING_BASE.
    fn restart(&mut self, bytes: &mut Bytes<'_>) {
        self.note();
        for (side, base) in [(TX, self.tx.base()), (RX, self.rx.base())] {
            let side = &mut self.guest.sides[side];
            if features::layout(self.guest.features) == "packed" {
                (side.next, side.wrap) = (base & 0x7fff, base >> 15 != 0);
            } else if bytes.one_in(2) {
                side.next = base;
            }
        }
        if let Some((tx, rx)) = start(&self.guest) {
            self.guest.forget_rx_descs();
            (self.tx, self.rx) = (tx, rx);
            self.tx_notifications = Notifications::default();
            self.check_rings("the start of a ring");
        }
    }

    /// What the device may always change.
    fn check_rings(&mut self, what: &str) {
        let mut allowed = Allowed::default();
        self.guest.allow_ring(TX, &mut allowed);
        self.guest.allow_ring(RX, &mut allowed);
        self.check(&allowed, what);
    }

    fn check(&mut self, allowed: &Allowed, what: &str) {
        if self.racing {
            return;
        }
        self.guest.arena.check(allowed, what);
    }

    fn receive(&mut self, bytes: &mut Bytes<'_>) {
        let limit = BurstLimit {
            frames: bytes.choose(&[64, 1, 3, 64, 200, 0]),
            units: bytes.choose(&[u32::MAX, 0, 5, 100]),
            bytes: bytes.choose(&[64 << 10, 64 << 10, 1, 500]),
        };
        let was_broken = self.tx.fault().is_some();
        let before = self.tx.base();
        let Self {
            guest,
            tx,
            rx,
            honest,
            racing,
            layout,
            ..
        } = self;
        let size = tx.size();
        let burst = tx.receive(limit);
        assert!(!was_broken || burst.returns().chains() == 0);
        let heads = check_burst(&burst, limit, size);
        let reach = |mark: &str| marks::reach(&format!("{layout}-tx-{mark}"));
        if !*racing {
            guest.arena.check(&Allowed::default(), "receive");
        }
        // The guest goes on while the burst is worked on.
        for _ in 0..bytes.below(3) {
            guest.lie(bytes);
        }
        if bytes.one_in(3) {
            // To itself.
            let mut allowed = Allowed::default();
            guest.allow_ring(RX, &mut allowed);
            guest.allow_buffers(&mut allowed);
            let set = FrameSet::first(burst.batch.len());
            let report = rx.transmit(&burst.batch, set);
            check_report(&report, &burst.batch, set);
            if report.frames > 0 {
                reach("to-itself");
            }
            if !*racing {
                guest.arena.check(&allowed, "transmit");
            }
        }
        if bytes.one_in(4) && !burst.batch.is_empty() {
            let honest = honest.get_or_insert_with(Honest::new);
            honest.forward(&burst.batch);
            reach("to-another");
        }
        for (index, head) in heads.iter().enumerate() {
            assert_eq!(burst.batch.head(index), head, "a head is private");
        }
        let count = heads.len();
        let kept = usize::from(bytes.choose(&[0_u8, 0, 1, 64, 3]));
        if bytes.one_in(8) {
            // Nothing is taken before it is finished.
            assert_eq!(self.tx.base(), before, "a burst that was dropped stays");
            return;
        }
        let chains_seen = burst.returns().chains();
        let returns = burst.finish(count.saturating_sub(kept));
        let chains = returns.chains();
        assert!(chains <= chains_seen);
        let drops: Vec<DropReason> = returns.drops().collect();
        let frames = count.saturating_sub(kept);
        assert_eq!(chains as usize, frames + drops.len(), "each chain counts");
        for reason in drops {
            marks::reach_variant(&format!("{layout}-tx-drop"), reason);
        }
        if kept > 0 && count > 0 {
            reach("kept");
        }
        self.check_returned(before, chains);
    }

    /// The TX ring has returned `chains` chains since it was at `before`.
    fn check_returned(&mut self, before: u16, chains: u32) {
        self.check_rings("finish");
        let now = self.tx.notifications();
        let decided = |n: Notifications| n.calls_sent + n.calls_suppressed;
        let decisions = decided(now) - decided(self.tx_notifications);
        assert!(decisions <= u64::from(chains > 0), "one decision a burst");
        self.tx_notifications = now;
        if self.racing || self.layout == "packed" {
            return;
        }
        let moved = self.tx.base().wrapping_sub(before);
        assert_eq!(u32::from(moved), chains, "the position");
        if chains == 0 {
            return;
        }
        assert_eq!(self.guest.used_idx(TX), self.tx.base(), "used.idx");
        // IN_ORDER: one entry, in the place of the first, for all of them.
        let entries = if self.guest.features.in_order {
            1
        } else {
            moved
        };
        for offset in 0..entries {
            let (id, len) = self.guest.used_entry(TX, before.wrapping_add(offset));
            assert!(id < u32::from(self.tx.size()), "used.id {id}");
            assert_eq!(len, 0, "nothing was written to a TX chain");
        }
    }

    fn transmit(&mut self, bytes: &mut Bytes<'_>) {
        let count = bytes.choose(&[1_usize, 2, 8, 64]);
        let lens = [60_u16, 14, 1500, 64, 65, 9000, 300, 128];
        let mut store = BatchStore::new(count);
        let mut batch = store.begin();
        let same = bytes.one_in(2).then(|| bytes.choose(&lens));
        for _ in 0..count {
            let len = same.unwrap_or_else(|| bytes.choose(&lens));
            let pushed = batch.push(
                Offload::default(),
                Span::from_slice(&NOISE[..usize::from(len)]),
            );
            pushed.expect("the store has room for one piece each");
        }
        let mut set = batch.all();
        if bytes.one_in(3) {
            set = FrameSet::first(usize::from(bytes.u8()) % (count + 1));
        }
        let mut allowed = Allowed::default();
        self.guest.allow_ring(RX, &mut allowed);
        self.guest.allow_buffers(&mut allowed);
        let before = self.rx.base();
        let was_broken = self.rx.fault().is_some();
        let report = self.rx.transmit(&batch, set);
        assert!(!was_broken || report.frames == 0);
        check_report(&report, &batch, set);
        self.check(&allowed, "transmit");
        for &reason in DropReason::ALL {
            if report.drops.get(reason) > 0 {
                marks::reach_variant(&format!("{}-rx-drop", self.layout), reason);
            }
        }
        let moved = self.rx.base().wrapping_sub(before);
        if report.frames > 0 {
            self.reach("rx", "delivered");
        }
        if self.layout == "packed" {
            return;
        }
        assert!(u32::from(moved) >= report.frames, "a frame takes a chain");
        assert!(
            moved <= self.rx.size(),
            "{moved} chains of {}: {report:?}",
            self.rx.size()
        );
        if u32::from(moved) > report.frames && report.dropped == 0 {
            self.reach("rx", "merged");
        }
    }

    fn relocate(&mut self, bytes: &mut Bytes<'_>) {
        let (map, areas) = self.guest.other_map(bytes);
        let [tx, rx] = areas;
        let (tx_base, rx_base) = (self.tx.base(), self.rx.base());
        for (side, areas) in [(TX, tx), (RX, rx)] {
            let Some(areas) = areas else { continue };
            let memory = Arc::clone(&map.memory);
            let moved = if side == TX {
                self.tx.relocate(memory, areas)
            } else {
                self.rx.relocate(memory, areas)
            };
            let name = ["tx", "rx"][side];
            match moved {
                Ok(()) => {
                    self.reach(name, "moved");
                    self.guest.sides[side].areas = areas;
                    self.guest.sides[side].map = map.clone();
                }
                Err(error) => {
                    marks::reach_variant(&format!("{}-{name}-refused", self.layout), error);
                }
            }
        }
        assert_eq!((self.tx.base(), self.rx.base()), (tx_base, rx_base));
        self.check_rings("relocate");
    }

    /// Notes what the rings have counted.
    fn note(&self) {
        let layout = self.layout;
        marks::reach_chain_errors(&format!("{layout}-tx"), self.tx.chain_errors());
        marks::reach_chain_errors(&format!("{layout}-rx"), self.rx.chain_errors());
        for (side, fault) in [("tx", self.tx.fault()), ("rx", self.rx.fault())] {
            if let Some(fault) = fault {
                marks::reach_variant(&format!("{layout}-{side}-fault"), fault);
            }
        }
        if self.tx.notifications().calls_sent > 0 {
            self.reach("tx", "called");
        }
        if self.rx.notifications().calls_suppressed > 0 {
            self.reach("rx", "not-called");
        }
    }

    fn end(&mut self) {
        self.note();
        self.check_rings("the end");
        if let Some(honest) = &mut self.honest {
            honest.check();
        }
    }
}

/// The device halves, or `None` if they cannot be.
fn start(guest: &Guest) -> Option<(TxRing, RxRing)> {
    let memory = |side: usize| Arc::clone(&guest.sides[side].map.memory);
    let tx = TxRing::new(memory(TX), guest.config(TX)).ok()?;
    let rx = RxRing::new(memory(RX), guest.config(RX)).ok()?;
    Some((tx, rx))
}

/// What holds for every burst; gives copies of the heads.
fn check_burst(burst: &Burst<'_>, limit: BurstLimit, size: u16) -> Vec<Vec<u8>> {
    let batch = &burst.batch;
    let (chains, units) = (burst.returns().chains(), burst.returns().units());
    let frames_max = u32::from(limit.frames.clamp(1, BurstLimit::MAX.frames));
    assert!(chains <= frames_max, "{chains} chains of {frames_max}");
    assert!(batch.len() <= BATCH_MAX.min(chains as usize));
    assert!(units >= chains, "{units} units for {chains} chains");
    let last_max = u64::from(size) + 1;
    let units_max = u64::from(limit.units.max(1)) + last_max;
    assert!(u64::from(units) <= units_max, "{units} units");
    let mut bytes = 0;
    let mut heads = Vec::with_capacity(batch.len());
    for index in 0..batch.len() {
        let frame = batch.frame(index);
        assert!((ETHERNET_HEADER_BYTES..=FRAME_BYTES_MAX).contains(&frame.len));
        assert_eq!(frame.offload, Offload::default());
        assert_eq!(frame.head.len(), frame.len.min(HEAD_BYTES) as usize);
        let body: u64 = frame.body.iter().map(|piece| u64::from(piece.len())).sum();
        assert_eq!(body, u64::from(frame.len - frame.len.min(HEAD_BYTES)));
        // Every byte can be read: AddressSanitizer and the kernel look on.
        for piece in frame.body {
            let mut copy = vec![0; piece.len() as usize];
            assert_eq!(piece.snapshot(&mut copy), copy.len());
        }
        bytes += u64::from(frame.len);
        heads.push(frame.head.to_vec());
    }
    assert_eq!(bytes, batch.bytes(), "the bytes of a batch");
    heads
}

/// What holds for every report of a transmission.
fn check_report(report: &Transmitted, batch: &Batch<'_>, set: FrameSet) {
    assert_eq!(report.frames + report.dropped, set.count());
    assert!(report.bytes <= batch.bytes());
    let drops = DropReason::ALL
        .iter()
        .map(|&reason| report.drops.get(reason));
    assert_eq!(drops.sum::<u64>(), u64::from(report.dropped));
}

impl Honest {
    fn new() -> Self {
        let guest = HonestGuest::new(GuestSpec {
            ring_size: 64,
            ..GuestSpec::default()
        })
        .expect("guest memory");
        let (_, rx) = guest.device();
        Self { guest, rx }
    }

    /// Gets a batch of the liar's.
    fn forward(&mut self, batch: &Batch<'_>) {
        self.guest.rx.refill();
        self.guest.rx.publish();
        let report = self.rx.transmit(batch, batch.all());
        check_report(&report, batch, batch.all());
        let mut delivered = 0;
        let mut bytes = 0;
        let received = self.guest.rx.receive(u32::MAX, |received| {
            assert_eq!(received.header[..10], [0; 10], "no offload is passed on");
            assert_eq!(received.num_buffers(), received.buffers);
            bytes += u64::from(received.len());
            delivered += 1;
        });
        assert_eq!(received, Ok(delivered), "an honest driver finds no fault");
        assert_eq!((delivered, bytes), (report.frames, report.bytes));
        self.check();
    }

    fn check(&mut self) {
        assert_eq!(self.rx.fault(), None, "an honest guest is not disturbed");
        assert_eq!(self.guest.rx.unused(), 0, "its buffers come back filled");
    }
}

//! A driver that changes what it has handed over, at full speed, while the
//! device looks at it (B-06, B-07, B-19, B-20), and the races of honest ones
//! (B-17, B-58). The table is in `hostile_split.rs`.
//!
//! Each test runs for a bounded time; a seed is printed with every failure.

#![expect(
    clippy::cast_possible_truncation,
    reason = "positions are reduced to 16 bits"
)]

mod common;

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use common::{MODERN, UNMERGED, frame, transmit};
use pollux_packet::{FrameSet, NET_HEADER_BYTES};
use pollux_sys::EventFd;
use pollux_testkit::{Guest, GuestSpec, RawDesc, RawRing};
use pollux_virtio::device::{BurstLimit, RingFault};
use pollux_virtio::driver::{ChainShape, NetConfig};
use pollux_virtio::{DescFlags, Features, GuestMemory, Region};

/// Who waits longer has been forgotten.
const PATIENCE: Duration = Duration::from_secs(5);

/// Races need both cores.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const EVENT_IDX: Features = Features {
    event_idx: true,
    ..MODERN
};

/// The guest's memory mapped once more, as the guest itself has it.
fn as_the_guest_sees_it(guest: &Guest) -> Arc<GuestMemory> {
    let regions = guest
        .memory
        .regions()
        .iter()
        .map(|region| Region::map(guest.file.as_fd(), region.place()).expect("mapped before"));
    Arc::new(GuestMemory::new(regions).expect("made before"))
}

/// Ends the other thread, also when an assertion fails in this one.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Numbers from a seed (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn word(&mut self) -> u16 {
        self.next().to_le_bytes()[..2]
            .try_into()
            .map_or(0, u16::from_le_bytes)
    }
}

/// Writes good and hostile values over each other in one queue.
struct Liar {
    ring: RawRing,
    config: NetConfig,
    end: u64,
    writable: bool,
    random: Random,
}

impl Liar {
    fn desc(&mut self) -> RawDesc {
        let random = &mut self.random;
        let slot = random.below(u64::from(self.config.areas.size));
        let addr = self.config.buffers_addr + slot * u64::from(self.config.buffer_bytes);
        let good = random.below(4) != 0;
        let addr = match random.below(12) {
            _ if good => addr,
            0 => 0,
            1 => self.end - random.below(100),
            2 => u64::MAX - random.below(100),
            3 => self.config.areas.used_addr + random.below(64),
            _ => addr + random.below(4096),
        };
        let len = match random.below(12) {
            _ if good => 90 + u32::try_from(random.below(1500)).expect("small"),
            0 => u32::MAX,
            1 => 70_000,
            2..4 => u32::try_from(random.below(30)).expect("small"),
            4..6 => 0,
            _ => u32::try_from(random.below(65_547)).expect("small"),
        };
        let flags = match random.below(10) {
            _ if good => 2 * u16::from(self.writable),
            0 => random.word(),
            1..3 => 4,
            _ => random.word() % 8,
        };
        let next = if random.below(8) == 0 {
            random.word()
        } else {
            random.word() % self.config.areas.size
        };
        let table = self.config.tables_addr + 16 * random.below(64);
        let flags = DescFlags(flags);
        if flags.intersects(DescFlags::INDIRECT) && random.below(4) != 0 {
            RawDesc {
                addr: table,
                len: 16 * (len % 40),
                flags,
                next,
            }
        } else {
            RawDesc {
                addr,
                len,
                flags,
                next,
            }
        }
    }

    /// One lie. `position` is where the device is.
    fn lie(&mut self, position: u16) {
        let size = self.config.areas.size;
        let index = self.random.word() % size;
        match self.random.below(64) {
            0..24 => {
                let desc = self.desc();
                // A descriptor at once, or half of it.
                let addr = self.ring.desc_addr(index);
                match self.random.below(3) {
                    0 => self.ring.write(addr, &desc.to_bytes()),
                    1 => self.ring.write(addr + 8, &desc.to_bytes()[8..]),
                    _ => self.ring.write(addr + 8, &desc.to_bytes()[8..12]),
                }
            }
            24..32 => {
                let desc = self.desc();
                let table = self.config.tables_addr + 16 * self.random.below(64);
                self.ring.write(table, &desc.to_bytes());
            }
            32..48 => {
                let slot = u64::from(index) * u64::from(self.config.buffer_bytes);
                let header = [self.random.next(), self.random.next()];
                let header = match self.random.below(3) {
                    0 => header.map(u64::to_le_bytes).concat(),
                    _ => vec![0; 16],
                };
                self.ring
                    .write(self.config.buffers_addr + slot, &header[..NET_HEADER_BYTES]);
            }
            48..56 => {
                let entry = self.ring.avail_entry_addr(self.random.word());
                let bad = self.random.below(2000) == 0;
                let head = if bad { self.random.word() } else { index };
                self.ring.write(entry, &head.to_le_bytes());
            }
            56..58 => self.ring.set_used_idx(self.random.word()),
            58..60 => self.ring.set_used_event(self.random.word()),
            60 => self.ring.set_avail_flags(self.random.word()),
            // Mostly what may be: up to a whole ring more.
            61..63 => {}
            _ if self.random.below(100) == 0 => self.ring.set_avail_idx(self.random.word()),
            _ => {
                let ahead = self.random.word() % (size + 1);
                self.ring.set_avail_idx(position.wrapping_add(ahead));
            }
        }
    }
}

/// Bytes of each receive buffer of the honest guest that are posted; the rest is
/// a canary.
const POSTED_BYTES: u32 = 1526;
const CANARY: u8 = 0xc5;

fn check_canaries(guest: &Guest) {
    let config = guest.rx_config();
    let len = config.buffer_bytes - POSTED_BYTES;
    let mut bytes = vec![0; len as usize];
    for index in 0..u64::from(config.areas.size) {
        let addr =
            config.buffers_addr + index * u64::from(config.buffer_bytes) + u64::from(POSTED_BYTES);
        guest.memory.read(addr, &mut bytes).expect("mapped");
        assert!(bytes.iter().all(|&byte| byte == CANARY), "buffer {index}");
    }
    for config in [guest.rx_config(), guest.tx_config()] {
        let len = 16 * u32::from(config.table_len) * u32::from(config.areas.size);
        bytes.resize(len as usize, 0);
        guest
            .memory
            .read(config.tables_addr, &mut bytes)
            .expect("mapped");
        assert!(bytes.iter().all(|&byte| byte == CANARY), "tables");
    }
}

/// Runs a lying guest against an honest one for `time`.
fn lie_for(time: Duration, seed: u64, features: Features) {
    const SIZE: u16 = 64;
    println!("seed {seed}, {features:?}");
    let liar = Guest::new(GuestSpec {
        ring_size: SIZE,
        features,
        regions: 2,
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let mut honest = Guest::new(GuestSpec::default()).expect("guest memory");
    for config in [honest.rx_config(), honest.tx_config()] {
        let start = config.tables_addr;
        let end =
            config.buffers_addr + u64::from(config.buffer_bytes) * u64::from(config.areas.size);
        let bytes = vec![CANARY; usize::try_from(end - start).expect("small")];
        honest.memory.write(start, &bytes).expect("mapped");
    }
    let (mut liar_tx, mut liar_rx) = liar.device();
    let (mut honest_tx, mut honest_rx) = honest.device();

    let stop = AtomicBool::new(false);
    // Where the devices are, so that the lies about the index are subtle.
    let positions = [AtomicU16::new(0), AtomicU16::new(0)];
    let memory = as_the_guest_sees_it(&liar);
    let last = liar.memory.regions().last().expect("two").place();
    let end = last.guest_addr + last.size;
    let configs = [(liar.tx_config(), false), (liar.rx_config(), true)];
    let mut broken = 0_u64;
    let mut frames = 0_u64;
    thread::scope(|scope| {
        let _stopping = Stop(&stop);
        scope.spawn(|| {
            let mut queues = configs.map(|(config, writable)| {
                let salt = u64::from(writable) + 1;
                let mut liar = Liar {
                    ring: RawRing::new(Arc::clone(&memory), config.areas, 0),
                    config,
                    end,
                    writable,
                    random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | salt),
                };
                for index in 0..SIZE {
                    let desc = liar.desc();
                    liar.ring.set_desc(index, desc);
                }
                liar
            });
            while !stop.load(Ordering::Relaxed) {
                for liar in &mut queues {
                    for _ in 0..8 {
                        let position = &positions[usize::from(liar.writable)];
                        liar.lie(position.load(Ordering::Relaxed));
                    }
                }
            }
        });
        let end = Instant::now() + time;
        let mut round = 0_u32;
        while Instant::now() < end {
            round += 1;
            // What the honest guest does.
            while honest.rx.post(POSTED_BYTES, ChainShape::JOINED).is_ok() {}
            honest.rx.publish();
            for seed in 0..4 {
                let sent = honest.tx.send(&frame(seed, 700), ChainShape::JOINED);
                sent.expect("it is taken back each round");
            }
            honest.tx.publish();

            // The switch: liar to honest and to itself, honest to liar.
            let begun = Instant::now();
            let limit = BurstLimit {
                units: 200,
                ..BurstLimit::MAX
            };
            let burst = liar_tx.receive(limit);
            let (chains, units) = (burst.returns().chains(), burst.returns().units());
            assert!(units >= chains && chains <= 64);
            // The last chain may go over it, by a walk that the ring bounds.
            assert!(units <= 200 + u32::from(SIZE) + 1, "{units} units");
            let count = burst.batch.len();
            for index in 0..count {
                let frame = burst.batch.frame(index);
                assert!((14..=65_535).contains(&frame.len));
                assert_eq!(frame.offload, pollux_packet::Offload::default());
                let body: u32 = frame.body.iter().map(|piece| piece.len()).sum();
                assert_eq!(frame.head.len(), frame.len.min(64) as usize);
                assert_eq!(body, frame.len - frame.len.min(64));
            }
            let report = honest_rx.transmit(&burst.batch, FrameSet::first(count));
            assert_eq!((report.frames + report.dropped) as usize, count);
            let delivered = report.frames;
            let report = liar_rx.transmit(&burst.batch, FrameSet::first(count));
            assert_eq!((report.frames + report.dropped) as usize, count);
            burst.finish(count - usize::try_from(round % 2).expect("0 or 1").min(count));
            let burst = honest_tx.receive(BurstLimit::MAX);
            assert_eq!(burst.batch.len(), 4, "the honest ring is not disturbed");
            let report = liar_rx.transmit(&burst.batch, FrameSet::first(4));
            assert_eq!(report.frames + report.dropped, 4);
            burst.finish(4);
            assert!(begun.elapsed() < Duration::from_secs(2), "a burst ends");

            assert_eq!(honest.tx.reclaim(), Ok(4));
            let got = honest.rx.receive(u32::MAX, |received| {
                assert_eq!(received.header[..10], [0; 10], "no offload is passed on");
                assert_eq!(received.num_buffers(), received.buffers);
                assert!((14..=65_535).contains(&received.len()));
            });
            assert_eq!(got, Ok(delivered));
            assert_eq!(honest.rx.unused(), 0);
            assert_eq!((honest_tx.fault(), honest_rx.fault()), (None, None));
            frames += u64::from(delivered);

            // A broken ring is set up anew, as its session would.
            if let Some(fault) = liar_tx.fault().or(liar_rx.fault()) {
                assert_ne!(fault, RingFault::MemoryTruncated);
                broken += 1;
                for (config, _) in configs {
                    RawRing::new(Arc::clone(&liar.memory), config.areas, 0).set_avail_idx(0);
                }
                (liar_tx, liar_rx) = liar.device();
            }
            positions[0].store(liar_tx.base(), Ordering::Relaxed);
            positions[1].store(liar_rx.base(), Ordering::Relaxed);
            if round.is_multiple_of(64) {
                check_canaries(&honest);
            }
        }
        println!("{round} rounds, {frames} frames delivered, {broken} rings broken");
    });
    check_canaries(&honest);
    assert!(frames > 0, "a liar that gets nothing through tests little");
    assert!(broken > 0, "indices were among the lies");
}

#[test]
fn b06_b07_everything_changes_under_the_device() {
    let _alone = alone();
    for (seed, features) in [(1, MODERN), (2, UNMERGED), (3, MODERN)] {
        lie_for(Duration::from_millis(700), seed, features);
    }
}

#[test]
fn b06_a_net_header_that_flips() {
    let _alone = alone();
    // One joined frame whose header flips between nothing and everything: it is
    // delivered without offload or dropped.
    let guest = Guest::new(GuestSpec::default()).expect("guest memory");
    let (mut device, _) = guest.device();
    let memory = as_the_guest_sees_it(&guest);
    let config = guest.tx_config();
    let mut ring = RawRing::new(Arc::clone(&memory), config.areas, 0);
    ring.set_desc(0, RawDesc::readable(config.buffers_addr, 112));
    let stop = AtomicBool::new(false);
    let (mut passed, mut dropped) = (0, 0);
    thread::scope(|scope| {
        let _stopping = Stop(&stop);
        scope.spawn(|| {
            let bad = [[0xff; 10], [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0], [0; 10]];
            while !stop.load(Ordering::Relaxed) {
                for header in bad {
                    memory.write(config.buffers_addr, &header).expect("mapped");
                }
            }
        });
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {
            for _ in 0..64 {
                ring.offer(0);
            }
            ring.publish();
            let burst = device.receive(BurstLimit::MAX);
            for index in 0..burst.batch.len() {
                let offload = burst.batch.frame(index).offload;
                assert_eq!(offload.to_header(0), [0; NET_HEADER_BYTES]);
            }
            passed += burst.batch.len();
            dropped += burst.returns().drops().count();
            burst.finish(64);
        }
    });
    println!("{passed} passed, {dropped} dropped");
    assert!(passed > 0 && dropped > 0);
}

/// A notification to sleep on: a socket, which vhost-user allows in the place of
/// an eventfd, because std can wait for one.
fn notification() -> (EventFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("socket pair");
    theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let event = EventFd::from_peer(ours.into()).expect("a socket is allowed");
    (event, theirs)
}

/// Sleeps as a driver or a worker does: it looks at nothing else.
fn sleep_on(mut socket: &UnixStream, what: &str) {
    let mut bytes = [0; 64];
    if let Err(error) = socket.read(&mut bytes) {
        panic!("{what} was missed: {error}");
    }
}

#[test]
fn b17_b58_no_call_and_no_kick_is_missed() {
    let _alone = alone();
    // Ping-pong with both sides asleep whenever they may: every round is a
    // chance to miss the other.
    for features in [MODERN, EVENT_IDX] {
        let mut guest = Guest::new(GuestSpec {
            ring_size: 16,
            features,
            base: 65_000,
            ..GuestSpec::default()
        })
        .expect("guest memory");
        let (call, called) = notification();
        let (kick, kicked) = notification();
        let (mut device, _) = guest.device_with_calls(Some(call), None);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stopping = Stop(&stop);
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let burst = device.receive(BurstLimit::MAX);
                    let count = burst.batch.len();
                    burst.finish(count);
                    if count > 0 {
                        continue;
                    }
                    if !device.request_kick() {
                        sleep_on(&kicked, "a kick");
                    }
                    device.suppress_kicks();
                }
            });
            let end = Instant::now() + Duration::from_millis(500);
            let (mut sent, mut returned) = (0_u32, 0_u32);
            while Instant::now() < end {
                // One or a few at a time, so that the ring is often empty.
                for _ in 0..=sent % 3 {
                    if guest.tx.send(&frame(1, 60), ChainShape::JOINED).is_ok() {
                        sent += 1;
                    }
                }
                if guest.tx.publish() {
                    kick.signal().expect("a socket");
                }
                while returned < sent {
                    let count = guest.tx.reclaim().expect("own chains");
                    returned += count;
                    if returned == sent {
                        break;
                    }
                    if count == 0 {
                        if !guest.tx.ring().request_call() {
                            sleep_on(&called, "a call");
                        }
                        guest.tx.ring().suppress_calls();
                    }
                }
            }
            drop(stopping);
            kick.signal().expect("a socket");
            println!("{sent} chains, event_idx {}", features.event_idx);
            assert!(sent > 1000);
        });
    }
}

/// Waits for a notification without sleeping, so that rounds are short.
fn spin_on(event: &EventFd, what: &str) {
    let end = Instant::now() + PATIENCE;
    while event.drain() == 0 {
        assert!(Instant::now() < end, "{what} was missed");
        thread::yield_now();
    }
}

/// One chain a round; whoever waits arms at a random moment around the one at
/// which the other notifies, and then looks at nothing but the eventfd. Without
/// the full fences this misses within some ten thousand rounds.
fn arm_at_any_moment(features: Features, driver_arms: bool, time: Duration) {
    let mut guest = Guest::new(GuestSpec {
        ring_size: 16,
        features,
        base: 65_000,
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let [call, kick] = [(); 2].map(|()| EventFd::new().expect("eventfd"));
    let (mut device, _) = guest.device_with_calls(call.try_clone().ok(), None);
    let stop = AtomicBool::new(false);
    let mut random = Random(0x5eed);
    thread::scope(|scope| {
        let (stop, kick) = (&stop, &kick);
        let stopping = Stop(stop);
        scope.spawn(move || {
            let mut random = Random(0xfeed);
            while !stop.load(Ordering::Relaxed) {
                let burst = device.receive(BurstLimit::MAX);
                let count = burst.batch.len();
                burst.finish(count);
                if count == 0 && !driver_arms {
                    pause(random.below(60));
                    if !device.request_kick() {
                        spin_on(kick, "a kick");
                    }
                    device.suppress_kicks();
                }
            }
        });
        let end = Instant::now() + time;
        let mut rounds = 0_u32;
        while Instant::now() < end {
            rounds += 1;
            guest
                .tx
                .send(&[1; 60], ChainShape::JOINED)
                .expect("all are back");
            pause(random.below(60));
            if guest.tx.publish() {
                kick.signal().expect("eventfd");
            }
            pause(random.below(60));
            let begun = Instant::now();
            while guest.tx.reclaim() == Ok(0) {
                assert!(begun.elapsed() < 2 * PATIENCE, "the device is gone");
                if driver_arms {
                    if !guest.tx.ring().request_call() {
                        spin_on(&call, "a call");
                    }
                    guest.tx.ring().suppress_calls();
                } else {
                    thread::yield_now();
                }
            }
        }
        drop(stopping);
        kick.signal().expect("eventfd");
        println!("{rounds} rounds, driver arms {driver_arms}, {features:?}");
    });
}

fn pause(count: u64) {
    for _ in 0..count {
        std::hint::spin_loop();
    }
}

#[test]
fn b17_a_driver_that_arms_while_the_device_publishes() {
    let _alone = alone();
    arm_at_any_moment(MODERN, true, Duration::from_millis(500));
    arm_at_any_moment(EVENT_IDX, true, Duration::from_millis(500));
}

#[test]
fn b58_a_device_that_arms_while_the_driver_publishes() {
    let _alone = alone();
    arm_at_any_moment(MODERN, false, Duration::from_millis(500));
    arm_at_any_moment(EVENT_IDX, false, Duration::from_millis(500));
}

#[test]
fn b20_the_used_index_is_never_torn() {
    const BASE: u16 = 0x00f0;
    let _alone = alone();
    // 0x00ff to 0x0100 and so on through the whole circle: a torn index would be
    // 0x0000 or 0x01ff.
    let mut guest = Guest::new(GuestSpec {
        ring_size: 256,
        base: BASE,
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (_, mut device) = guest.device();
    let memory = as_the_guest_sees_it(&guest);
    let ring = RawRing::new(memory, guest.rx_config().areas, 0);
    let stop = AtomicBool::new(false);
    let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stopping = Stop(&stop);
        scope.spawn(|| {
            let mut reads = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let least = done.load(Ordering::SeqCst);
                let idx = ring.used_idx();
                let most = begun.load(Ordering::SeqCst);
                if most - least < 0x8000 {
                    let position = |count: u64| BASE.wrapping_add((count % 0x1_0000) as u16);
                    let moved = idx.wrapping_sub(position(least));
                    let bound = (most - least) as u16;
                    assert!(moved <= bound, "{idx:#x}, {least} to {most}");
                    reads += 1;
                }
            }
            println!("{reads} reads");
        });
        let end = Instant::now() + Duration::from_millis(300);
        let bytes = [frame(1, 60)];
        while Instant::now() < end {
            guest.rx.refill();
            guest.rx.publish();
            for _ in 0..100 {
                begun.fetch_add(1, Ordering::SeqCst);
                assert_eq!(transmit(&mut device, &bytes).frames, 1);
                done.fetch_add(1, Ordering::SeqCst);
            }
            assert_eq!(guest.rx.receive(200, |_| ()), Ok(100));
        }
        println!("{} frames", done.load(Ordering::SeqCst));
    });
}

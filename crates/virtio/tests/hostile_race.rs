//! A driver that changes what it has handed over, at full speed, while the
//! device looks at it (B-06, B-07, B-19). The table is in `bugs_table.rs`.
//!
//! Each test runs for a bounded time; a seed is printed with every failure.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::race::{Stop, alone, as_the_guest_sees_it};
use common::{MODERN, UNMERGED, first_base, frame, in_every_layout, poll, transmit};
use pollux_packet::{FrameSet, NET_HEADER_BYTES};
use pollux_testkit::{Guest, GuestSpec, Random, RawDesc, RawPacked, RawQueue, RawRing};
use pollux_virtio::device::{BurstLimit, RingFault};
use pollux_virtio::driver::{ChainShape, NetConfig};
use pollux_virtio::{DescFlags, Features};

/// Any 16 bits.
fn word(random: &mut Random) -> u16 {
    let [low, high, ..] = random.bits().to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// Writes good and hostile values over each other in one queue.
struct Liar {
    ring: RawQueue,
    config: NetConfig,
    end: u64,
    writable: bool,
    random: Random,
}

impl Liar {
    fn desc(&mut self) -> RawDesc {
        let random = &mut self.random;
        let slot = random.below(self.config.areas.size.into());
        let addr = self.config.buffers_addr + u64::from(slot * self.config.buffer_bytes);
        let good = !random.one_in(4);
        let addr = match random.below(12) {
            _ if good => addr,
            0 => 0,
            1 => self.end - u64::from(random.below(100)),
            2 => u64::MAX - u64::from(random.below(100)),
            3 => self.config.areas.used_addr + u64::from(random.below(64)),
            _ => addr + u64::from(random.below(4096)),
        };
        let len = match random.below(12) {
            _ if good => 90 + random.below(1500),
            0 => u32::MAX,
            1 => 70_000,
            2..4 => random.below(30),
            4..6 => 0,
            _ => random.below(65_547),
        };
        let flags = match random.below(10) {
            _ if good => 2 * u16::from(self.writable),
            0 => word(random),
            1..3 => 4,
            _ => word(random) % 8,
        };
        let next = if random.one_in(8) {
            word(random)
        } else {
            word(random) % self.config.areas.size
        };
        let desc = RawDesc {
            addr,
            len,
            flags: DescFlags(flags),
            next,
        };
        if desc.flags.intersects(DescFlags::INDIRECT) && !self.random.one_in(4) {
            RawDesc {
                addr: self.table_entry(),
                len: 16 * (len % 40),
                ..desc
            }
        } else {
            desc
        }
    }

    fn table_entry(&mut self) -> u64 {
        self.config.tables_addr + u64::from(16 * self.random.below(64))
    }

    /// One lie. `position` is where the device is.
    fn lie(&mut self, position: u16) {
        match self.random.below(64) {
            0..24 => {
                let desc = self.desc();
                let index = word(&mut self.random) % self.config.areas.size;
                if self.config.features.packed {
                    self.write_packed(index, desc, position);
                } else {
                    self.write_split(index, desc);
                }
            }
            24..32 => {
                let desc = self.desc();
                let entry = self.table_entry();
                self.ring.set_table(entry, &[desc]);
            }
            32..48 => {
                let slot = self.random.below(self.config.areas.size.into());
                let addr = self.config.buffers_addr + u64::from(slot * self.config.buffer_bytes);
                let header = [self.random.bits(), self.random.bits()];
                let header = match self.random.below(3) {
                    0 => header.map(u64::to_le_bytes).concat(),
                    _ => vec![0; 16],
                };
                self.ring.write(addr, &header[..NET_HEADER_BYTES]);
            }
            kind if self.config.features.packed => self.lie_packed(kind, position),
            kind => self.lie_split(kind, position),
        }
    }

    /// A descriptor at once, or half of it, or its length alone.
    fn write_split(&mut self, index: u16, desc: RawDesc) {
        let ring = self.ring.split();
        let (addr, bytes) = (ring.desc_addr(index), desc.to_bytes());
        match self.random.below(3) {
            0 => self.ring.write(addr, &bytes),
            1 => self.ring.write(addr + 8, &bytes[8..]),
            _ => self.ring.write(addr + 8, &bytes[8..12]),
        }
    }

    fn lie_split(&mut self, kind: u32, position: u16) {
        let size = self.config.areas.size;
        let (ring, random) = (self.ring.split(), &mut self.random);
        match kind {
            48..56 => {
                let entry = ring.avail_entry_addr(word(random));
                let bad = random.one_in(2000);
                let head = word(random);
                let head = if bad { head } else { head % size };
                ring.write(entry, &head.to_le_bytes());
            }
            56..58 => ring.set_used_idx(word(random)),
            58..60 => ring.set_used_event(word(random)),
            60 => ring.set_avail_flags(word(random)),
            61..63 => {}
            _ if random.one_in(100) => ring.set_avail_idx(word(random)),
            // Mostly what may be: up to a whole ring more.
            _ => {
                let ahead = word(random) % (size + 1);
                ring.set_avail_idx(position.wrapping_add(ahead));
            }
        }
    }

    /// A descriptor that is available, mostly: at once, or its word of length,
    /// id and flags, or one of these alone.
    fn write_packed(&mut self, slot: u16, desc: RawDesc, position: u16) {
        let flags = if self.random.one_in(8) {
            word(&mut self.random)
        } else {
            let defined = DescFlags(desc.flags.0 & 7);
            defined.union(Self::available_in(slot, position)).0
        };
        let flags = DescFlags(flags);
        let ring = self.ring.packed();
        let (addr, bytes) = (
            ring.desc_addr(slot),
            RawDesc { flags, ..desc }.to_packed_bytes(),
        );
        match self.random.below(5) {
            0 | 1 => self.ring.write(addr, &bytes),
            2 => self.ring.write(addr + 8, &bytes[8..]),
            3 => self.ring.write(addr + 8, &bytes[8..12]),
            _ => self.ring.write(addr + 14, &bytes[14..]),
        }
    }

    /// Flags that make a slot available to a device at `position`.
    fn available_in(slot: u16, position: u16) -> DescFlags {
        let is_passed = slot < position & 0x7fff;
        let lap = position & 0x8000;
        RawPacked::available_flags(if is_passed { !lap & 0x8000 } else { lap })
    }

    fn lie_packed(&mut self, kind: u32, position: u16) {
        let size = self.config.areas.size;
        let random = &mut self.random;
        match kind {
            // One lap after another.
            48..56 => {
                let slot = word(random) % size;
                let lap = word(random) & 0x8000;
                let lap = if random.one_in(4) { lap } else { position };
                let flags = Self::available_in(slot, lap);
                let write = DescFlags(2 * u16::from(self.writable));
                let addr = self.ring.packed().desc_addr(slot) + 14;
                let bytes = flags.union(write).0.to_le_bytes();
                self.ring.write(addr, &bytes);
            }
            56..60 => {
                let (position, flags) = (word(random), word(random));
                self.ring.packed().set_driver_events(position, flags);
            }
            // What the device asks for is not the driver's to write.
            60 => {
                let bytes = word(random).to_le_bytes();
                self.ring.write(self.config.areas.used_addr + 2, &bytes);
            }
            _ => {}
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
        base: first_base(features),
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
    let positions = [(); 2].map(|()| AtomicU16::new(first_base(features)));
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
                    ring: RawQueue::new(&memory, &config),
                    config,
                    end,
                    writable,
                    random: Random::new(2 * seed + salt),
                };
                for index in 0..SIZE {
                    let desc = liar.desc();
                    if features.packed {
                        liar.ring.packed().set_desc(index, desc);
                    } else {
                        liar.ring.split().set_desc(index, desc);
                    }
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
        let begun = Instant::now();
        let mut round = 0_u32;
        // On a busy machine the two run in turns, and then little of it matters.
        let enough = |frames, broken| frames > 0 && (broken > 0 || features.packed);
        while begun.elapsed() < time || !enough(frames, broken) {
            assert!(
                begun.elapsed() < 20 * time,
                "{frames} frames came through, {broken} rings broke: this tests little"
            );
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
                for (config, _) in configs.into_iter().filter(|_| !features.packed) {
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
}

#[test]
fn b06_b07_everything_changes_under_the_device() {
    let _alone = alone();
    for (seed, features) in (1..).zip(in_every_layout(&[MODERN, UNMERGED])) {
        lie_for(Duration::from_millis(500), seed, features);
    }
}

#[test]
fn b06_a_net_header_that_flips() {
    let _alone = alone();
    in_every_layout(&[MODERN]).for_each(flip_net_header);
}

/// Joined frames whose common header flips between nothing and everything: each
/// is delivered without offload or dropped.
fn flip_net_header(features: Features) {
    let guest = Guest::new(GuestSpec {
        features,
        base: first_base(features),
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (mut device, _) = guest.device();
    let memory = as_the_guest_sees_it(&guest);
    let config = guest.tx_config();
    let mut ring = RawQueue::new(&memory, &config);
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
            for id in 0..64 {
                ring.offer_chain(id, &[RawDesc::readable(config.buffers_addr, 112)]);
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
            assert_eq!(ring.take_used().len(), 64);
        }
    });
    println!("{passed} passed, {dropped} dropped, {features:?}");
    assert!(passed > 0 && dropped > 0);
}

/// B-19 in a packed ring, which has no index that could jump: the driver makes
/// all of it available in both laps, again and again, while the device looks. More
/// than the ring holds breaks it.
#[test]
fn b19_a_ring_that_is_always_available_again_is_bounded() {
    let _alone = alone();
    let packed = in_every_layout(&[MODERN]).filter(|features| features.packed);
    for (features, size) in packed.flat_map(|features| [1, 4, 7].map(|size| (features, size))) {
        always_available(features, size);
    }
}

fn always_available(features: Features, size: u16) {
    let guest = Guest::new(GuestSpec {
        ring_size: size,
        features,
        base: first_base(features),
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (mut device_tx, mut device_rx) = guest.device();
    let memory = as_the_guest_sees_it(&guest);
    let configs = [guest.tx_config(), guest.rx_config()];
    let stop = AtomicBool::new(false);
    let (mut received, mut delivered, mut broken) = (0, 0, 0);
    thread::scope(|scope| {
        let _stopping = Stop(&stop);
        scope.spawn(|| {
            let [tx, rx] = configs.map(|config| RawPacked::new(memory.clone(), config.areas, 0));
            let [tx_desc, rx_desc] = [
                RawDesc::readable(configs[0].buffers_addr, 100),
                RawDesc::writable(configs[1].buffers_addr, 30),
            ];
            while !stop.load(Ordering::Relaxed) {
                for lap in [0x8000, 0] {
                    let flags = RawPacked::available_flags(lap);
                    for slot in 0..size {
                        tx.set_desc(slot, tx_desc.with(flags));
                        rx.set_desc(slot, rx_desc.with(flags));
                    }
                }
            }
        });
        let frames = vec![frame(1, 60); 64];
        let begun = Instant::now();
        // The two may run in turns on a busy machine.
        while begun.elapsed() < Duration::from_millis(100)
            || (received == 0 || size >= 3 && delivered == 0)
        {
            assert!(begun.elapsed() < Duration::from_secs(10), "nothing is seen");
            let polled = poll(&mut device_tx);
            assert!(polled.chains <= size.into(), "{} chains", polled.chains);
            received += polled.chains;
            let before = device_rx.base();
            let report = transmit(&mut device_rx, &frames);
            assert_eq!(report.frames + report.dropped, 64);
            // Three buffers a frame.
            assert!(3 * report.frames <= size.into(), "{report:?}");
            assert!(device_rx.base() & 0x7fff < size, "from {before:#x}");
            delivered += report.frames;
            if let Some(fault) = device_tx.fault().or(device_rx.fault()) {
                assert!(matches!(fault, RingFault::ChainEnd { .. }), "{fault}");
                broken += 1;
                (device_tx, device_rx) = guest.device();
            }
        }
    });
    println!("{received} received, {delivered} delivered, {broken} broken, {size}, {features:?}");
}

//! Rings that do not lie in guest memory as they should, and guest memory that
//! goes away.

mod common;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{MODERN, World, base_of, first_base, frame, gather, in_every_layout, poll, transmit};
use pollux_packet::{DropReason, FrameSet};
use pollux_testkit::{Guest, GuestSpec, RawDesc, RawRing};
use pollux_virtio::device::{BurstLimit, RingConfig, RingCounters, RingFault, RxRing, TxRing};
use pollux_virtio::driver::ChainShape;
use pollux_virtio::{ChainError, Features, GuestMemory, Region, RegionPlace, RingAreas, RingError};

const PAGE: u64 = 4096;

/// Memory of regions of these sizes in bytes, one after the other from guest
/// address 0x10000 on. Each has pages of its own in the file.
fn memory(sizes: &[u64]) -> Arc<GuestMemory> {
    let pages: u64 = sizes.iter().map(|size| size.div_ceil(PAGE)).sum();
    let file = pollux_sys::memfd("pollux-test-regions", pages * PAGE).expect("memfd");
    let (mut guest_addr, mut file_offset) = (0x10000, 0);
    let regions: Vec<_> = sizes
        .iter()
        .map(|&size| {
            let place = RegionPlace {
                guest_addr,
                size,
                user_addr: guest_addr,
                file_offset,
            };
            guest_addr += size;
            file_offset += size.next_multiple_of(PAGE);
            Region::map(file.as_fd(), place).expect("a part of the file")
        })
        .collect();
    Arc::new(GuestMemory::new(regions).expect("regions do not overlap"))
}

fn config(areas: RingAreas) -> RingConfig {
    RingConfig {
        areas,
        features: MODERN,
        base: 0,
        call: None,
        counters: Arc::default(),
    }
}

#[test]
fn ring_areas_that_do_not_fit_are_refused_by_name() {
    let memory = memory(&[2 * PAGE, 2 * PAGE]);
    let good = RingAreas {
        size: 16,
        desc_addr: 0x10000,
        avail_addr: 0x10400,
        used_addr: 0x10800,
    };
    let refused = |areas: RingAreas| {
        let tx = TxRing::new(Arc::clone(&memory), config(areas)).err();
        let rx = RxRing::new(Arc::clone(&memory), config(areas)).err();
        assert_eq!(tx, rx);
        tx
    };
    assert_eq!(refused(good), None);
    for size in [0, 3, 24, 32_769, 65_535] {
        let areas = RingAreas { size, ..good };
        assert_eq!(refused(areas), Some(RingError::Size { size }));
    }
    let misaligned = |area, addr, align| Some(RingError::Misaligned { area, addr, align });
    for offset in [1, 2, 4, 8, 15] {
        let addr = good.desc_addr + offset;
        let areas = RingAreas {
            desc_addr: addr,
            ..good
        };
        assert_eq!(refused(areas), misaligned("descriptor table", addr, 16));
    }
    for offset in [1, 2, 3] {
        let addr = good.avail_addr + offset;
        let areas = RingAreas {
            avail_addr: addr,
            ..good
        };
        let wanted = if offset == 2 {
            None
        } else {
            misaligned("available ring", addr, 2)
        };
        assert_eq!(refused(areas), wanted);
        let addr = good.used_addr + offset;
        let areas = RingAreas {
            used_addr: addr,
            ..good
        };
        assert_eq!(refused(areas), misaligned("used ring", addr, 4));
    }
    // Outside, over the end, over two regions, at the end of all addresses.
    let (border, end) = (0x12000, 0x14000);
    for (addr, bytes) in [
        (0, 0),
        (0xfff0, 0),
        (end, 0),
        (end, 16),
        (border, 16),
        (u64::MAX - 15, 0),
        (u64::MAX - 255, 0),
    ] {
        let addr = addr - bytes;
        for (area, bytes) in [
            ("descriptor table", RingAreas::desc_bytes(16)),
            ("available ring", RingAreas::avail_bytes(16)),
            ("used ring", RingAreas::used_bytes(16)),
        ] {
            let mut areas = good;
            match area {
                "descriptor table" => areas.desc_addr = addr,
                "available ring" => areas.avail_addr = addr,
                _ => areas.used_addr = addr,
            }
            let wanted = RingError::Unmapped { area, addr, bytes };
            assert_eq!(refused(areas), Some(wanted), "{addr:#x}");
        }
    }
    // Up to the last byte is inside.
    let areas = RingAreas {
        desc_addr: border - u64::from(RingAreas::desc_bytes(16)),
        avail_addr: end - u64::from(RingAreas::avail_bytes(16)),
        ..good
    };
    assert_eq!(refused(areas), None);
    let areas = RingAreas {
        size: 32_768,
        ..good
    };
    assert!(matches!(refused(areas), Some(RingError::Unmapped { .. })));
}

#[test]
fn packed_ring_areas_that_do_not_fit_are_refused_by_name() {
    let memory = memory(&[2 * PAGE, 2 * PAGE]);
    let good = RingAreas {
        size: 15,
        desc_addr: 0x10000,
        avail_addr: 0x10400,
        used_addr: 0x10404,
    };
    let refused = |areas: RingAreas, base| {
        let config = || RingConfig {
            features: Features {
                packed: true,
                ..MODERN
            },
            base,
            ..config(areas)
        };
        let tx = TxRing::new(Arc::clone(&memory), config()).err();
        let rx = RxRing::new(Arc::clone(&memory), config()).err();
        assert_eq!(tx, rx);
        tx
    };
    // Any size, and any position that the ring has, in either lap.
    for size in [1, 3, 24, 64] {
        for base in [0, size - 1, 0x8000, 0x8000 | (size - 1)] {
            assert_eq!(refused(RingAreas { size, ..good }, base), None);
        }
        for base in [size, 0x7fff, 0x8000 | size, 0xffff] {
            let index = base & 0x7fff;
            let wanted = RingError::Position { index, size };
            assert_eq!(refused(RingAreas { size, ..good }, base), Some(wanted));
        }
    }
    for size in [0, 32_769, 65_535] {
        let wanted = RingError::PackedSize { size };
        assert_eq!(refused(RingAreas { size, ..good }, 0), Some(wanted));
    }
    let end = 0x14000;
    for (area, bytes, align) in [
        ("descriptor ring", RingAreas::desc_bytes(15), 16),
        ("driver event suppression", RingAreas::EVENTS_BYTES, 4),
        ("device event suppression", RingAreas::EVENTS_BYTES, 4),
    ] {
        let at = |addr| {
            let mut areas = good;
            match align {
                16 => areas.desc_addr = addr,
                _ if area.starts_with("driver") => areas.avail_addr = addr,
                _ => areas.used_addr = addr,
            }
            refused(areas, 0)
        };
        for offset in 1..align {
            let addr = 0x10800 + offset as u64;
            assert_eq!(at(addr), Some(RingError::Misaligned { area, addr, align }));
        }
        for addr in [0, end, end + 16 - u64::from(bytes), u64::MAX - 15] {
            let addr = addr & !15;
            assert_eq!(at(addr), Some(RingError::Unmapped { area, addr, bytes }));
        }
        assert_eq!(at(end - u64::from(bytes)), None, "to the last byte");
    }
}

/// B-64: large memory is mapped at once, and only what is used becomes pages.
#[test]
fn b64_setting_up_touches_few_pages() {
    const BYTES: u64 = 32 << 30;
    let file = pollux_sys::memfd("pollux-test-large", BYTES).expect("memfd");
    let pages = |file: &File| file.metadata().expect("open").blocks() * 512 / PAGE;
    let place = RegionPlace {
        guest_addr: 0x10000,
        size: BYTES,
        user_addr: 0,
        file_offset: 0,
    };
    let begun = Instant::now();
    let region = Region::map(file.as_fd(), place).expect("it is sparse");
    let memory = Arc::new(GuestMemory::new([region]).expect("one region"));
    let file = File::from(file);
    assert_eq!(pages(&file), 0);
    for packed in [false, true] {
        let base = 0x10000 + u64::from(packed) * (BYTES / 2);
        let areas = RingAreas {
            size: 32_768,
            desc_addr: base,
            avail_addr: base + (1 << 20),
            used_addr: base + (2 << 20),
        };
        let config = RingConfig {
            features: Features { packed, ..MODERN },
            ..config(areas)
        };
        let mut device = TxRing::new(Arc::clone(&memory), config).expect("inside");
        assert_eq!(poll(&mut device).chains, 0);
    }
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert!(pages(&file) <= 8, "{} pages", pages(&file));
}

/// B-64: what two workers write does not share a line (or its neighbour, which is
/// fetched with it).
#[test]
fn b64_counters_of_two_rings_share_no_line() {
    assert!(align_of::<RingCounters>() >= 128);
}

#[test]
fn chains_in_too_many_pieces_are_dropped_and_bounded() {
    // Six regions of one byte between two large ones: every buffer over them
    // lies in eight pieces.
    let memory = memory(&[8 * PAGE, 1, 1, 1, 1, 1, 1, 8 * PAGE]);
    let areas = RingAreas {
        size: 16,
        desc_addr: 0x10000,
        avail_addr: 0x11000,
        used_addr: 0x12000,
    };
    let mut device = TxRing::new(Arc::clone(&memory), config(areas)).expect("fits");
    let mut ring = RawRing::new(Arc::clone(&memory), areas, 0);
    let addr = 0x10000 + 8 * PAGE - 20;
    let sent = frame(1, 60);
    ring.write(addr, &[&[0; 12], &sent[..]].concat());
    let good = RawDesc::readable(addr, 72);
    let longest = vec![good; 16];
    ring.offer_chain(0, &longest);
    ring.publish();
    assert_eq!(poll(&mut device).drops, [DropReason::BadChain]);
    let count = |device: &TxRing| device.chain_errors().get(ChainError::TooManyPieces);
    assert_eq!(count(&device), 1);
    ring.take_used();

    // Behind other frames it waits for the next burst; the rest goes on.
    for index in 0..8 {
        ring.offer_chain(index, &[good]);
    }
    let mut table: Vec<_> = (1..16).map(|next| good.then(next)).collect();
    table.push(good);
    ring.set_table(0x13000, &table);
    ring.offer_chain(8, &[RawDesc::indirect(0x13000, 256)]);
    ring.offer_chain(9, &[good]);
    ring.publish();
    assert_eq!(poll(&mut device).frames, vec![sent.clone(); 8]);
    assert_eq!(count(&device), 1);
    let polled = poll(&mut device);
    assert_eq!(polled.drops, [DropReason::BadChain]);
    assert_eq!(polled.frames, [sent]);
    assert_eq!(count(&device), 2);
    let heads: Vec<_> = ring.take_used().iter().map(|entry| entry.id).collect();
    assert_eq!(heads, (0..10).collect::<Vec<_>>());
}

/// Shortens the file that a guest's memory lies in to nothing.
fn truncate(guest: &Guest) {
    let file = File::from(guest.file.try_clone().expect("dup"));
    file.set_len(0).expect("a memfd that is not sealed");
}

/// Rings in every layout, at their start, in the middle and before their end.
fn worlds() -> impl Iterator<Item = (World, u16)> {
    let bases = |features| [0, 5, 65_530].map(|base| (features, base_of(features, base, 16)));
    in_every_layout(&[MODERN])
        .flat_map(bases)
        .map(|(features, base)| {
            let world = World::new(GuestSpec {
                base,
                features,
                ring_size: 16,
                ..GuestSpec::default()
            });
            (world, base)
        })
}

#[test]
fn memory_cut_under_an_idle_ring() {
    for (mut world, base) in worlds() {
        world.neighbour_passes();
        truncate(&world.guest);
        assert_eq!(poll(&mut world.device_tx).chains, 0);
        assert_eq!(world.device_tx.fault(), Some(RingFault::MemoryTruncated));
        let report = transmit(&mut world.device_rx, &[frame(1, 60), frame(2, 1514)]);
        assert_eq!(report.drops.get(DropReason::PortDown), 2);
        assert_eq!(world.device_rx.fault(), Some(RingFault::MemoryTruncated));
        assert_eq!(
            (world.device_tx.base(), world.device_rx.base()),
            (base, base)
        );
        world.neighbour_passes();
    }
}

#[test]
fn memory_cut_before_a_burst_is_received() {
    for (mut world, base) in worlds() {
        for index in 0..4 {
            let addr = world.tx_buffer(index);
            let len = world.write_frame(addr, &frame(1, 100));
            world.tx.offer_chain(index, &[RawDesc::readable(addr, len)]);
        }
        world.tx.publish();
        // The index is known already, the frames are not.
        let limit = BurstLimit {
            frames: 1,
            ..BurstLimit::MAX
        };
        let mut device = world.device_tx;
        let burst = device.receive(limit);
        assert_eq!(burst.batch.len(), 1);
        burst.finish(1);
        truncate(&world.guest);
        assert_eq!(poll(&mut device).chains, 0);
        assert_eq!(device.fault(), Some(RingFault::MemoryTruncated));
        assert_eq!(device.base(), base.wrapping_add(1));
        let kinds = ChainError::ALL.iter();
        let errors: u64 = kinds.map(|&kind| device.chain_errors().get(kind)).sum();
        assert_eq!(errors, 0, "what was cut away is not the guest's");
        world.device_tx = device;
        world.neighbour_passes();
    }
}

#[test]
fn memory_cut_between_receive_and_finish() {
    for (mut world, base) in worlds() {
        let mut honest = Guest::new(GuestSpec::default()).expect("guest memory");
        let (_, mut honest_rx) = honest.device();
        honest.rx.refill();
        honest.rx.publish();
        let sent: Vec<_> = (0..3).map(|seed| frame(seed, 5000)).collect();
        for (index, sent) in (0..).zip(&sent) {
            let addr = world.tx_buffer(3 * index);
            let len = world.write_frame(addr, sent);
            world.tx.offer_chain(index, &[RawDesc::readable(addr, len)]);
        }
        world.tx.publish();
        let burst = world.device_tx.receive(BurstLimit::MAX);
        assert_eq!(burst.batch.len(), 3);
        assert_eq!(gather(&burst.batch.frame(0)), sent[0]);
        truncate(&world.guest);
        // The honest guest gets what there is: heads, and zeros or old bytes.
        let report = honest_rx.transmit(&burst.batch, FrameSet::first(3));
        assert_eq!((report.frames, report.bytes), (3, 15_000));
        burst.finish(3);
        assert_eq!(world.device_tx.fault(), Some(RingFault::MemoryTruncated));
        assert_eq!(world.device_tx.base(), base, "nothing was given back");
        let mut index = 0;
        let count = honest.rx.receive(9, |received| {
            let bytes = received.to_vec();
            assert_eq!(bytes.len(), 5000);
            assert_eq!(bytes[..64], sent[index][..64]);
            index += 1;
        });
        assert_eq!(count, Ok(3));
        assert_eq!(honest_rx.fault(), None);
        // And goes on.
        let report = transmit(&mut honest_rx, std::slice::from_ref(&sent[0]));
        assert_eq!(report.frames, 1);
        let count = honest
            .rx
            .receive(9, |received| assert_eq!(received.to_vec(), sent[0]));
        assert_eq!(count, Ok(1));
        world.neighbour_passes();
    }
}

#[test]
fn memory_cut_under_receive_buffers() {
    for frames in [1, 8] {
        for (mut world, base) in worlds() {
            let limit = if frames == 1 { 2048 } else { 64 };
            for index in 0..16 {
                let addr = world.rx_buffer(index);
                world
                    .rx
                    .offer_chain(index, &[RawDesc::writable(addr, limit)]);
            }
            world.rx.publish();
            // The index is known already.
            let report = transmit(&mut world.device_rx, &[frame(1, 40)]);
            assert_eq!(report.frames, 1);
            truncate(&world.guest);
            let report = transmit(&mut world.device_rx, &vec![frame(2, 80); frames]);
            assert_eq!(report.drops.get(DropReason::PortDown), frames as u64);
            assert_eq!((report.frames, report.bytes), (0, 0));
            assert_eq!(world.device_rx.fault(), Some(RingFault::MemoryTruncated));
            assert_eq!(world.device_rx.base(), base.wrapping_add(1));
            // The other ring of that guest is broken too, when it is looked at.
            assert_eq!(poll(&mut world.device_tx).chains, 0);
            assert_eq!(world.device_tx.fault(), Some(RingFault::MemoryTruncated));
            world.neighbour_passes();
        }
    }
}

#[test]
fn memory_cut_in_one_of_several_regions() {
    in_every_layout(&[MODERN]).for_each(cut_one_of_two);
}

fn cut_one_of_two(features: Features) {
    let mut world = World::new(GuestSpec {
        regions: 2,
        features,
        base: first_base(features),
        ..GuestSpec::default()
    });
    // The upper one holds the RX ring.
    let upper = world.guest.memory.regions()[1].place();
    let file = File::from(world.guest.file.try_clone().expect("dup"));
    file.set_len(upper.file_offset).expect("not sealed");
    // Nobody has touched it.
    world.tx_passes();
    // A frame that lies in it is not judged.
    let addr = upper.guest_addr + upper.size / 2;
    world.tx.offer_chain(0, &[RawDesc::readable(addr, 500)]);
    world.tx.publish();
    assert_eq!(poll(&mut world.device_tx).chains, 0);
    assert_eq!(world.device_tx.fault(), Some(RingFault::MemoryTruncated));
    assert!(world.guest.memory.regions()[1].is_poisoned());
    assert!(!world.guest.memory.regions()[0].is_poisoned());
    world.neighbour_passes();
}

#[test]
fn a_ring_in_memory_that_was_cut_before_it_started() {
    let guest = Guest::new(GuestSpec::default()).expect("guest memory");
    truncate(&guest);
    let (mut tx, mut rx) = guest.device();
    assert_eq!(poll(&mut tx).chains, 0);
    assert_eq!(tx.fault(), Some(RingFault::MemoryTruncated));
    assert_eq!(transmit(&mut rx, &[frame(1, 60)]).frames, 0);
    assert_eq!(rx.fault(), Some(RingFault::MemoryTruncated));
    let mut honest = Guest::new(GuestSpec::default()).expect("guest memory");
    let (mut tx, _) = honest.device();
    honest
        .tx
        .send(&frame(1, 60), ChainShape::JOINED)
        .expect("room");
    honest.tx.publish();
    assert_eq!(poll(&mut tx).frames, [frame(1, 60)]);
}

/// Chains that fill the store of pieces to the last place, then a frame in one
/// buffer: it waits for the next burst (it once ended the worker).
#[test]
fn a_frame_behind_an_exactly_full_store_comes_with_the_next_burst() {
    let mut guest = Guest::new(GuestSpec {
        ring_size: 256,
        table_len: 256,
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (mut device_tx, _) = guest.device();
    let cuts = [2; 255];
    // 2 x 256 + 64 pieces and one for the region: 577 places.
    for pieces in [256, 256, 65] {
        let shape = ChainShape {
            cuts: &cuts[..pieces - 1],
            indirect: true,
        };
        let frame = vec![1; 2 * pieces - 12];
        guest.tx.send(&frame, shape).expect("room");
    }
    guest.tx.send(&[2; 100], ChainShape::JOINED).expect("room");
    guest.tx.publish();
    for frames in [3, 1] {
        let burst = device_tx.receive(BurstLimit::MAX);
        assert_eq!(burst.batch.len(), frames);
        burst.finish(frames);
    }
    assert_eq!(guest.tx.reclaim(), Ok(4));
}

/// A receive chain of many empty buffers that no frame fits: it is walked once,
/// not for each frame of each burst.
#[test]
fn a_long_chain_that_is_too_small_is_walked_once() {
    let features = Features {
        version_1: true,
        ..Features::default()
    };
    let mut guest = Guest::new(GuestSpec {
        ring_size: 1024,
        features,
        buffer_bytes: 4096,
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (_, mut device_rx) = guest.device();
    let mut cuts = vec![0; 1000];
    cuts[0] = 12;
    let shape = ChainShape {
        cuts: &cuts,
        indirect: false,
    };
    guest.rx.post(12, shape).expect("room");
    guest.rx.publish();
    let frames = vec![frame(1, 60); 64];
    let report = transmit(&mut device_rx, &frames);
    assert_eq!(report.drops.get(DropReason::RxBufferTooSmall), 64);
    assert!((900..1100).contains(&report.units), "{}", report.units);
    for _ in 0..10 {
        let report = transmit(&mut device_rx, &frames);
        assert_eq!((report.dropped, report.units), (64, 0));
    }
}

//! Hostile and unusual guests, the part that only packed rings have; the table is
//! in `bugs_table.rs`.

mod common;

use common::{MODERN, Polled, World, assert_bad_rx, frame, poll, transmit, used};
use pollux_packet::DropReason;
use pollux_sys::EventFd;
use pollux_testkit::{GuestSpec, RawDesc};
use pollux_virtio::device::RingFault;
use pollux_virtio::{ChainError, DescFlags, Features};

/// VIRTQ_DESC_F_AVAIL and VIRTQ_DESC_F_USED (section 2.8.1).
const OWNERSHIP: u16 = 1 << 7 | 1 << 15;
/// RING_EVENT_FLAGS_* (section 2.8.10).
const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
const DESC: u16 = 2;
const RESERVED: u16 = 3;

const PACKED: Features = Features {
    packed: true,
    ..MODERN
};
const PACKED_IN_ORDER: Features = Features {
    in_order: true,
    ..PACKED
};
const PACKED_EVENTS: Features = Features {
    event_idx: true,
    ..PACKED
};

/// Both orders of returns.
const ORDERS: [Features; 2] = [PACKED, PACKED_IN_ORDER];

/// Positions of a ring in both laps: at its start, in it and before its end.
fn bases(size: u16) -> impl Iterator<Item = u16> {
    let indices = [0, size / 2, size - 1];
    [0, 0x8000]
        .into_iter()
        .flat_map(move |lap| indices.map(move |index| index | lap))
}

fn based(size: u16, features: Features, base: u16) -> World {
    World::new(GuestSpec {
        ring_size: size,
        features,
        base,
        ..GuestSpec::default()
    })
}

/// What one of four descriptors in a cache line can be.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Good,
    /// Outside of guest memory.
    Unmapped,
    /// Outside as well, and of length 0.
    Empty,
}

/// Every way to have good and bad ones among the four descriptors of a line.
fn lines() -> impl Iterator<Item = [Kind; 4]> {
    let kinds = [Kind::Good, Kind::Unmapped, Kind::Empty];
    (0..81).map(move |n| [1, 3, 9, 27].map(|digit| kinds[n / digit % 3]))
}

#[test]
fn b04_descriptors_of_a_line_are_checked_one_by_one() {
    for features in ORDERS {
        let mut world = World::of_size(8, features);
        let hole = world.end();
        for line in lines() {
            let (mut sent, mut dropped) = (Vec::new(), Vec::new());
            for (index, kind) in (0..).zip(line) {
                let addr = world.tx_buffer(index);
                let bytes = frame(index.into(), 60);
                let len = world.write_frame(addr, &bytes);
                let desc = match kind {
                    Kind::Good => RawDesc::readable(addr, len),
                    Kind::Unmapped => RawDesc::readable(hole + addr, len),
                    Kind::Empty => RawDesc::readable(hole + addr, 0),
                };
                match kind {
                    Kind::Good => sent.push(bytes),
                    Kind::Unmapped => dropped.push(DropReason::BadChain),
                    Kind::Empty => dropped.push(DropReason::Runt),
                }
                world.tx.offer_chain(index, &[desc]);
            }
            world.tx.publish();
            let polled = poll(&mut world.device_tx);
            assert_eq!((polled.frames, polled.drops), (sent, dropped));
            let returned = (0..4).map(|id| used(id, 0)).collect::<Vec<_>>();
            assert_eq!(world.tx.take_used(), returned);

            let mut wanted = Vec::new();
            for (index, kind) in (0..).zip(line) {
                let addr = world.rx_buffer(index);
                let desc = match kind {
                    Kind::Good => RawDesc::writable(addr, 2048),
                    Kind::Unmapped => RawDesc::writable(hole + addr, 2048),
                    Kind::Empty => RawDesc::writable(hole + addr, 0),
                };
                let len = if kind == Kind::Good { 72 } else { 0 };
                wanted.push(used(index, len));
                world.rx.offer_chain(index, &[desc]);
            }
            world.rx.publish();
            let frames: Vec<_> = (0..4).map(|seed| frame(seed, 60)).collect();
            let report = transmit(&mut world.device_rx, &frames);
            let good = line.map(|kind| u32::from(kind == Kind::Good)).iter().sum();
            assert_eq!((report.frames, report.dropped), (good, 4 - good));
            let bad = report.drops.get(DropReason::BadRxChain);
            assert_eq!(bad, u64::from(4 - good));
            assert_eq!(world.rx.take_used(), wanted);
            for (index, kind) in (0..).zip(line) {
                if kind == Kind::Good {
                    let bytes = world.rx.read(world.rx_buffer(index) + 12, 60);
                    assert_eq!(bytes, frames[usize::from(index)]);
                }
            }
        }
        world.tx_passes();
        world.rx_passes();
    }
}

/// Entries of a packed table follow each other: NEXT and what lies where a split
/// ring has `next` mean nothing in it (section 2.8.7).
#[test]
fn b08_next_means_nothing_in_a_packed_table() {
    const SIZE: u16 = 8;
    for features in ORDERS {
        let mut world = World::of_size(SIZE, features);
        let table = world.tx_table() + 3;
        let buffer = world.tx_buffer(0);
        let sent = frame(8, 60);
        let len = world.write_frame(buffer, &sent);
        let pieces = [
            RawDesc::readable(buffer, 10),
            RawDesc::readable(buffer + 10, 20),
            RawDesc::readable(buffer + 30, len - 30),
        ];
        for next in [0, 1, 2, 3, 0xffff] {
            // WRITE too: DPDK's driver says it of the net header.
            for flags in [0, DescFlags::NEXT.0, DescFlags::WRITE.0, OWNERSHIP, 0xfff8] {
                let entries = pieces.map(|piece| RawDesc { next, ..piece });
                let entries = entries.map(|entry| entry.with(DescFlags(flags)));
                world.tx.set_table(table, &entries);
                // WRITE of the table itself is ignored.
                let desc = RawDesc::indirect(table, 48).with(DescFlags::WRITE);
                let polled = world.send_chain(2, &[desc]);
                assert_eq!(polled.frames, std::slice::from_ref(&sent));
                assert_eq!(world.tx.take_used(), [used(2, 0)]);
            }
        }
        // As many entries as the ring is large, and not one more.
        let mut entries = vec![RawDesc::default(); usize::from(SIZE)];
        entries[7] = RawDesc::readable(buffer, len);
        world.tx.set_table(table, &entries);
        let desc = RawDesc::indirect(table, 16 * u32::from(SIZE));
        assert_eq!(world.send_chain(2, &[desc]).frames, [sent]);
        world.tx_passes();

        let table = world.rx_table();
        let addr = world.rx_buffer(0);
        let entries = [
            RawDesc::writable(addr, 50).then(0),
            RawDesc::writable(addr + 50, 50).then(7),
        ];
        world.rx.set_table(table, &entries);
        world.post_chain(5, &[RawDesc::indirect(table, 32)]);
        let sent = frame(9, 80);
        assert_eq!(
            transmit(&mut world.device_rx, std::slice::from_ref(&sent)).frames,
            1
        );
        assert_eq!(world.rx.take_used(), [used(5, 92)]);
        assert_eq!(world.rx.read(addr + 12, 80), sent);
        world.rx_passes();
        // But who receives has to be allowed to write.
        world.rx.set_table(table, &[RawDesc::readable(addr, 200)]);
        let desc = RawDesc::indirect(table, 16).with(DescFlags::WRITE);
        assert_bad_rx(&mut world, 5, &[desc], ChainError::Direction);
    }
}

/// Where the chain behind one that does not end would start cannot be known. What
/// came before is kept, and the other ring goes on.
#[test]
fn b11_a_chain_that_does_not_end_breaks_that_ring_alone() {
    for features in ORDERS {
        for size in [1, 2, 3, 5, 64, 255, 2000] {
            for (base, len) in bases(size).flat_map(|base| [(base, 0), (base, 1)]) {
                let mut world = based(size, features, base);
                let tx = RawDesc::readable(world.tx_buffer(0), len);
                world.tx.offer_as_it_is(7, &vec![tx.then(7); size.into()]);
                world.tx.publish();
                let fault = RingFault::ChainEnd {
                    index: base & 0x7fff,
                    within: size.min(1024),
                };
                for _ in 0..2 {
                    assert_eq!(poll(&mut world.device_tx), Polled::default());
                    assert_eq!(world.device_tx.fault(), Some(fault));
                }
                assert!(!world.device_tx.request_kick());
                assert_eq!(world.device_tx.base(), base);
                assert!(world.tx.take_used().is_empty());
                world.rx_passes();

                let mut world = based(size, features, base);
                let rx = RawDesc::writable(world.rx_buffer(0), len);
                world.rx.offer_as_it_is(7, &vec![rx.then(7); size.into()]);
                world.rx.publish();
                let frames = vec![frame(1, 60); 3];
                for _ in 0..2 {
                    let report = transmit(&mut world.device_rx, &frames);
                    assert_eq!(report.drops.get(DropReason::PortDown), 3);
                    assert_eq!(world.device_rx.fault(), Some(fault));
                }
                assert_eq!(world.device_rx.base(), base);
                assert!(world.rx.take_used().is_empty());
                world.tx_passes();
            }
        }
    }
}

#[test]
fn b11_what_came_before_a_chain_that_does_not_end_is_kept() {
    const SIZE: u16 = 8;
    for features in ORDERS {
        for base in bases(SIZE) {
            let mut world = based(SIZE, features, base);
            let sent = frame(1, 60);
            let addr = world.tx_buffer(0);
            let len = world.write_frame(addr, &sent);
            world.tx.offer_chain(3, &[RawDesc::readable(addr, len)]);
            let endless = vec![RawDesc::default().then(0); 7];
            world.tx.offer_as_it_is(0, &endless);
            world.tx.publish();
            let polled = poll(&mut world.device_tx);
            assert_eq!(polled.frames, std::slice::from_ref(&sent));
            assert_eq!(world.tx.take_used(), [used(3, 0)]);

            let addr = world.rx_buffer(0);
            world.rx.offer_chain(3, &[RawDesc::writable(addr, 2048)]);
            world.rx.offer_as_it_is(0, &endless);
            world.rx.publish();
            let report = transmit(&mut world.device_rx, &[sent.clone(), sent]);
            assert_eq!((report.frames, report.dropped), (1, 1));
            assert_eq!(report.drops.get(DropReason::PortDown), 1);
            assert_eq!(world.rx.take_used(), [used(3, 72)]);
            assert!(matches!(
                world.device_rx.fault(),
                Some(RingFault::ChainEnd { .. })
            ));
            world.neighbour_passes();
        }
    }
}

/// A chain that leads into descriptors that are not there has lost its driver's
/// count, and no more.
#[test]
fn b11_a_chain_that_leads_out_of_what_is_available() {
    for features in ORDERS {
        let mut world = World::of_size(8, features);
        let desc = RawDesc::readable(world.tx_buffer(0), 30);
        for _ in 0..3 {
            world.tx.packed().put(desc.with(DescFlags::NEXT));
        }
        world.tx.publish();
        let polled = poll(&mut world.device_tx);
        assert_eq!(polled.chains, 1);
        assert_eq!(world.device_tx.base(), 0x8004, "one more than were put");
        assert_eq!(poll(&mut world.device_tx).chains, 0);
        let rx = RawDesc::writable(world.rx_buffer(0), 1);
        for _ in 0..3 {
            world.rx.packed().put(rx.with(DescFlags::NEXT));
        }
        world.rx.publish();
        let report = transmit(&mut world.device_rx, &[frame(1, 60)]);
        assert_eq!((report.frames, report.dropped), (0, 1));
        assert_eq!(
            (world.device_tx.fault(), world.device_rx.fault()),
            (None, None)
        );
        world.neighbour_passes();
    }
}

#[test]
fn b18_calls_by_position_on_each_side_of_the_wrap() {
    for size in [1, 5, 16] {
        for base in bases(size) {
            for in_order in [false, true] {
                let features = Features {
                    in_order,
                    ..PACKED_EVENTS
                };
                calls_by_position(size, features, base);
            }
        }
    }
}

fn calls_by_position(size: u16, features: Features, base: u16) {
    let spec = GuestSpec {
        ring_size: size,
        features,
        base,
        ..GuestSpec::default()
    };
    let [tx_call, rx_call] = [(); 2].map(|()| EventFd::new().expect("eventfd"));
    let mut world = World::with_calls(spec, Some(&tx_call), Some(&rx_call));
    let arm = |world: &mut World, position| {
        world.tx.packed().set_driver_events(position, DESC);
        world.rx.packed().set_driver_events(position, DESC);
    };
    // Where it was before the restart, or far away: the first one calls.
    let far = world.tx.packed().behind(base, size - 1);
    arm(&mut world, far);
    let passes = |world: &mut World| {
        world.tx_passes();
        world.rx_passes();
        assert_eq!(world.device_tx.base(), world.device_rx.base());
        let calls = (tx_call.drain(), rx_call.drain());
        assert_eq!(calls.0, calls.1);
        calls.0
    };
    assert_eq!(passes(&mut world), 1, "the first signal is unconditional");
    // At every distance, from every place: the call comes with that descriptor,
    // and not a lap later, when the wrap counter differs.
    for _ in 0..2 * size {
        for distance in 0..size {
            let event = world.tx.packed().behind(world.device_tx.base(), distance);
            arm(&mut world, event);
            for step in 0..2 * size - 1 {
                let wanted = u64::from(step == distance);
                assert_eq!(passes(&mut world), wanted, "{event:#x}, step {step}");
            }
        }
    }
}

/// B-18: a batch that goes over the event calls, wherever its ends are.
#[test]
fn b18_a_batch_calls_if_the_event_is_in_it() {
    const SIZE: u16 = 7;
    for in_order in [false, true] {
        for base in bases(SIZE) {
            let spec = GuestSpec {
                ring_size: SIZE,
                features: Features {
                    in_order,
                    ..PACKED_EVENTS
                },
                base,
                ..GuestSpec::default()
            };
            let call = EventFd::new().expect("eventfd");
            let mut world = World::with_calls(spec, Some(&call), None);
            world.tx_passes();
            call.drain();
            for round in 0..200_u16 {
                // Chains of two, but for the last.
                let count = 1 + round % SIZE;
                let distance = round / SIZE % SIZE;
                let start = world.device_tx.base();
                let event = world.tx.packed().behind(start, distance);
                world.tx.packed().set_driver_events(event, DESC);
                let desc = RawDesc::readable(world.tx_buffer(0), 30);
                for id in 0..count / 2 {
                    world.tx.offer_chain(id, &[desc, desc]);
                }
                if count % 2 == 1 {
                    world.tx.offer_chain(100, &[desc]);
                }
                world.tx.publish();
                poll(&mut world.device_tx);
                let taken = world.tx.take_used().len();
                assert_eq!(taken, usize::from(count.div_ceil(2)));
                let called = call.drain() == 1;
                assert_eq!(called, distance < count, "{distance} of {count}");
            }
        }
    }
}

#[test]
fn b18_calls_by_flags_of_a_packed_ring() {
    for features in [PACKED, PACKED_EVENTS] {
        for (flags, is_called) in [
            (ENABLE, true),
            (DISABLE, false),
            (RESERVED, true),
            // Bits that are not defined mean nothing.
            (0xfffc, true),
            (0xfffd, false),
        ] {
            for position in [0, 3, 7, 0x7fff, 0x8000, 0xffff] {
                assert_called(features, position, flags, [is_called; 2]);
            }
        }
    }
    // At a position that the ring does not have: the first one, perhaps more.
    for position in [8, 0x7fff, 0x8008, 0xffff] {
        assert_called(PACKED_EVENTS, position, DESC, [true, false]);
    }
    // Without EVENT_IDX there is no position to wait for (section 2.8.10).
    assert_called(PACKED, 0x8003, DESC, [true, true]);
}

/// Whether the first publication calls, and the second.
fn assert_called(features: Features, position: u16, flags: u16, wanted: [bool; 2]) {
    let spec = GuestSpec {
        ring_size: 8,
        features,
        base: 0x8000,
        ..GuestSpec::default()
    };
    let [tx_call, rx_call] = [(); 2].map(|()| EventFd::new().expect("eventfd"));
    let mut world = World::with_calls(spec, Some(&tx_call), Some(&rx_call));
    world.tx.packed().set_driver_events(position, flags);
    world.rx.packed().set_driver_events(position, flags);
    for is_called in wanted {
        world.tx_passes();
        world.rx_passes();
        let calls = [tx_call.drain(), rx_call.drain()];
        assert_eq!(calls, [u64::from(is_called); 2], "{position:#x} {flags}");
    }
}

/// What the device asks for: nothing while it polls, the next position while it
/// sleeps, whatever the driver writes over it.
#[test]
fn b58_kicks_of_a_packed_ring_are_asked_for_at_the_position() {
    const SIZE: u16 = 5;
    for features in [PACKED, PACKED_EVENTS] {
        for base in bases(SIZE) {
            let mut world = based(SIZE, features, base);
            let wanted = if features.event_idx { DESC } else { ENABLE };
            for _ in 0..4 * SIZE {
                assert_eq!(world.tx.packed().device_events().1, DISABLE);
                assert!(!world.device_tx.request_kick());
                let (position, flags) = world.tx.packed().device_events();
                assert_eq!(flags, wanted);
                if features.event_idx {
                    assert_eq!(position, world.device_tx.base());
                }
                // There already is a chain: nobody may sleep.
                let addr = world.tx_buffer(0);
                world.tx.offer_chain(0, &[RawDesc::readable(addr, 1)]);
                world.tx.publish();
                assert!(world.device_tx.request_kick());
                world.device_tx.suppress_kicks();
                assert_eq!(poll(&mut world.device_tx).drops, [DropReason::Runt]);
                assert_eq!(world.tx.take_used(), [used(0, 0)]);
            }
            world.tx_passes();
        }
    }
}

#[test]
fn b21_used_descriptors_name_the_last_id_and_the_bytes_written() {
    for base in bases(8) {
        let mut world = based(8, PACKED, base);
        // Any 16 bits can be an id; those of a chain's first descriptors are
        // another (see `RawPacked::offer_chain`).
        let addr = world.tx_buffer(0);
        let sent = frame(3, 60);
        let len = world.write_frame(addr, &sent);
        let chain = [
            RawDesc::readable(addr, 12),
            RawDesc::readable(addr + 12, 20),
            RawDesc::readable(addr + 32, len - 32),
        ];
        let polled = world.send_chain(0xabcd, &chain);
        assert_eq!(polled.frames, [sent]);
        let returned = world.tx.packed().desc(base & 0x7fff);
        assert_eq!((returned.next, returned.len), (0xabcd, 0));
        let lap = if base & 0x8000 == 0 { 0 } else { OWNERSHIP };
        assert_eq!(returned.flags, DescFlags(lap), "nothing was written");
        assert_eq!(world.tx.take_used(), [used(0xabcd, 0)]);

        // One frame over three receive chains of two buffers each, and a chain
        // that cannot be used.
        for (chain, id) in [(0, 0xffff), (1, 9), (2, 0)] {
            let addr = world.rx_buffer(chain);
            let buffers = [
                RawDesc::writable(addr, 40),
                RawDesc::writable(addr + 100, 60),
            ];
            world.rx.offer_chain(id, &buffers);
        }
        world.rx.offer_chain(77, &[RawDesc::writable(0, 60)]);
        world.rx.publish();
        let sent = frame(4, 250);
        let report = transmit(&mut world.device_rx, &[sent.clone(), frame(5, 60)]);
        assert_eq!((report.frames, report.dropped, report.bytes), (1, 1, 250));
        let ring = world.rx.packed();
        for (offset, id, len) in [(0, 0xffff, 100), (2, 9, 100), (4, 0, 62), (6, 77, 0)] {
            let at = ring.behind(base, offset);
            let lap = if at & 0x8000 == 0 { 0 } else { OWNERSHIP };
            let write = if len > 0 { DescFlags::WRITE.0 } else { 0 };
            let desc = ring.desc(at & 0x7fff);
            assert_eq!((desc.next, desc.len), (id, len), "at {at:#x}");
            assert_eq!(desc.flags, DescFlags(lap | write), "at {at:#x}");
        }
        assert_eq!(world.rx.take_used().len(), 4);
        let mut bytes = Vec::new();
        for chain in 0..3 {
            let addr = world.rx_buffer(chain);
            bytes.extend(world.rx.read(addr, 40));
            bytes.extend(world.rx.read(addr + 100, 60));
        }
        assert_eq!(bytes[10..12], [3, 0], "num_buffers");
        assert_eq!(bytes[12..262], sent);
        world.tx_passes();
        world.rx_passes();
    }
}

/// IN_ORDER: a batch is one used descriptor, in the place of its first and with
/// the id of its last chain; what lies behind is the driver's (section 2.8.8).
#[test]
fn b21_a_batch_in_order_is_one_used_descriptor() {
    for base in bases(8) {
        let mut world = based(8, PACKED_IN_ORDER, base);
        let desc = RawDesc::readable(world.tx_buffer(0), 26);
        for (id, len) in [(7, 1), (300, 3), (12, 2)] {
            world.tx.offer_chain(id, &vec![desc; len]);
        }
        world.tx.publish();
        let ring = world.tx.packed();
        let slots: Vec<_> = (0..6).map(|i| ring.behind(base, i) & 0x7fff).collect();
        let before: Vec<_> = slots.iter().map(|&slot| ring.desc(slot)).collect();
        assert_eq!(poll(&mut world.device_tx).chains, 3);
        let ring = world.tx.packed();
        let lap = if base & 0x8000 == 0 { 0 } else { OWNERSHIP };
        let first = ring.desc(slots[0]);
        assert_eq!((first.next, first.len), (12, 0));
        assert_eq!(first.flags, DescFlags(lap));
        for (&slot, &before) in slots.iter().zip(&before).skip(1) {
            assert_eq!(ring.desc(slot), before, "not the device's to write");
        }
        let returned = world.tx.take_used();
        assert_eq!(returned, [used(7, 0), used(300, 0), used(12, 0)]);
        world.tx_passes();
    }
}

/// B-19: what a driver writes over descriptors that are not its own, and over
/// the device's event suppression, leads nowhere.
#[test]
fn b19_the_device_keeps_its_own_position_in_a_packed_ring() {
    for base in bases(8) {
        let mut world = based(8, PACKED, base);
        let mut random = pollux_testkit::Random::new(19);
        for _ in 0..300 {
            let junk = |bits: u64| RawDesc {
                addr: bits,
                len: u32::MAX,
                // One that does not end would break the ring.
                flags: DescFlags((bits >> 48) as u16 & !DescFlags::NEXT.0),
                next: (bits & 0xffff) as u16,
            };
            for slot in 0..8 {
                let desc = junk(random.bits());
                world.tx.packed().set_desc(slot, desc);
                world.rx.packed().set_desc(slot, desc);
            }
            let polled = poll(&mut world.device_tx);
            assert!(polled.chains <= 8 && polled.frames.is_empty());
            let report = transmit(&mut world.device_rx, &vec![frame(1, 60); 9]);
            assert_eq!((report.frames, report.dropped), (0, 9));
        }
        assert_eq!(
            (world.device_tx.fault(), world.device_rx.fault()),
            (None, None)
        );
        world.neighbour_passes();
    }
}

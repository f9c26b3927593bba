//! Hostile and unusual guests, the part about chains: one test for each kind of
//! public fault of ring parsing, named by its number in the project's list of
//! them (`bugs_table.rs`), in every layout and order of returns.
//!
//! After each case a good frame must pass on the same ring (unless the ring is
//! broken by design) and on another guest's.

mod common;

use common::{
    LEGACY, MODERN, Polled, World, assert_bad_rx, first_base, frame, in_every_layout, poll,
    transmit, used,
};
use pollux_packet::{DropReason, NET_HEADER_BYTES};
use pollux_testkit::{GuestSpec, RawDesc};
use pollux_virtio::{ChainError, ChainErrorCounts, DescFlags, Features};

/// The chain goes back with length 0 and is dropped for this reason.
#[track_caller]
fn assert_bad(world: &mut World, head: u16, chain: &[RawDesc], error: ChainError) {
    let before = world.device_tx.chain_errors().get(error);
    let polled = world.send_chain(head, chain);
    let reason = match error {
        ChainError::Runt => DropReason::Runt,
        ChainError::Oversize => DropReason::Oversize,
        _ => DropReason::BadChain,
    };
    assert!(polled.frames.is_empty(), "{error}");
    assert_eq!(polled.drops, [reason], "{error}");
    assert_eq!(world.tx.take_used(), [used(head, 0)], "{error}");
    assert_eq!(world.device_tx.chain_errors().get(error), before + 1);
    assert_eq!(world.device_tx.fault(), None);
    world.tx_passes();
}

fn of_regions(regions: u16, features: Features) -> World {
    World::new(GuestSpec {
        regions,
        features,
        base: first_base(features),
        ..GuestSpec::default()
    })
}

#[test]
fn b01_buffers_and_tables_over_the_end_of_a_region() {
    for features in in_every_layout(&[MODERN, LEGACY]) {
        let mut world = of_regions(2, features);
        let border = world.guest.memory.regions()[1].place().guest_addr;
        let end = world.end();
        // Guest addresses go on there, those of this process do not. The RX ring
        // begins at the border: it is not used here.
        assert!(world.guest.memory.span(border - 1, 2).is_none());
        assert_eq!(border, world.guest.rx_config().areas.desc_addr);

        for before in [1, 8, 11, 12, 13, 40, 76, 77] {
            let sent = frame(before, 78);
            let addr = border - u64::from(before);
            let len = world.write_frame(addr, &sent);
            let polled = world.send_chain(3, &[RawDesc::readable(addr, len)]);
            assert_eq!(polled.frames, [sent], "{before} bytes before the border");
            world.tx.take_used();

            // A table whose first entries lie before the border.
            let sent = frame(before + 100, 60);
            let buffer = world.tx_buffer(0);
            let len = world.write_frame(buffer, &sent);
            let table = border - 16 - u64::from(before);
            let entries = [
                RawDesc::readable(buffer, 5).then(2),
                RawDesc::default(),
                RawDesc::readable(buffer + 5, len - 5),
            ];
            world.tx.set_table(table, &entries);
            let polled = world.send_chain(3, &[RawDesc::indirect(table, 48)]);
            assert_eq!(polled.frames, [sent], "{before} bytes before the border");
            world.tx.take_used();
        }

        // Into the hole behind the last region.
        let desc = RawDesc::readable(end - 8, 64);
        assert_bad(&mut world, 3, &[desc], ChainError::Unmapped);
        let table = end - 40;
        let entry = RawDesc::readable(world.tx_buffer(0), 40);
        world.tx.set_table(table, &[entry.then(1), entry.then(2)]);
        let desc = RawDesc::indirect(table, 48);
        assert_bad(&mut world, 3, &[desc], ChainError::Unmapped);
        for addr in [0, u64::MAX, u64::MAX - 50] {
            let desc = RawDesc::readable(addr, 64);
            assert_bad(&mut world, 3, &[desc], ChainError::Unmapped);
            let desc = RawDesc::indirect(addr, 64);
            assert_bad(&mut world, 3, &[desc], ChainError::Unmapped);
            let desc = RawDesc::writable(addr, 2048);
            assert_bad_rx(&mut world, 3, &[desc], ChainError::Unmapped);
        }
        let hole = RawDesc::writable(end - 30, 2048);
        assert_bad_rx(&mut world, 3, &[hole], ChainError::Unmapped);
    }
}

#[test]
fn b01_receive_buffers_over_a_border() {
    for features in in_every_layout(&[MODERN, LEGACY]) {
        // Cut so that the border lies in the RX buffers.
        let mut world = of_regions(3, features);
        let header = u64::from(world.header_bytes());
        let border = world.guest.memory.regions()[2].place().guest_addr;
        assert!(border > world.rx_buffer(1) && border < world.rx_buffer(200));
        for before in [1, 8, 11, 12, 13, 64, 109] {
            let addr = border - before;
            world.rx.write(addr - 4, &[0xee; 300]);
            world.post_chain(3, &[RawDesc::writable(addr, 200)]);
            let sent = frame(7, 100);
            let report = transmit(&mut world.device_rx, std::slice::from_ref(&sent));
            assert_eq!(report.frames, 1);
            assert_eq!(world.rx.take_used(), [used(3, 100 + world.header_bytes())]);
            assert_eq!(world.rx.read(addr + header, 100), sent);
            assert_eq!(world.rx.read(addr - 4, 4), [0xee; 4]);
            assert_eq!(world.rx.read(addr + header + 100, 90), [0xee; 90]);
            world.rx_passes();
        }
    }
}

#[test]
fn b03_chains_as_short_as_their_net_header() {
    for features in in_every_layout(&[MODERN, LEGACY]) {
        let mut world = World::of_size(8, features);
        let header = world.header_bytes();
        let addr = world.tx_buffer(0);
        for len in [0, 1, 9, 10, 11, 12, 13, 14, header + 13] {
            let one = RawDesc::readable(addr, len);
            assert_bad(&mut world, 0, &[one], ChainError::Runt);
            let two = [RawDesc::readable(addr, 0), one];
            assert_bad(&mut world, 0, &two, ChainError::Runt);
        }
        // Nothing is used up by them.
        for round in 0..100_000_u32 {
            world
                .tx
                .offer_chain(0, &[RawDesc::readable(addr, round % 2), RawDesc::default()]);
            world.tx.publish();
            let polled = poll(&mut world.device_tx);
            assert_eq!(polled.drops, [DropReason::Runt]);
            assert_eq!(world.tx.take_used(), [used(0, 0)]);
        }
        world.tx_passes();
    }
}

#[test]
fn b05_offload_fields_are_not_trusted() {
    in_every_layout(&[MODERN]).for_each(offload_fields);
}

fn offload_fields(features: Features) {
    let mut world = World::of_size(8, features);
    let addr = world.tx_buffer(0);
    let len = world.write_frame(addr, &frame(1, 100));
    let fields = |flags, gso_type, hdr_len: u16, gso_size: u16, start: u16, offset: u16| {
        let mut header = [0; NET_HEADER_BYTES];
        header[0] = flags;
        header[1] = gso_type;
        for (at, value) in [(2, hdr_len), (4, gso_size), (6, start), (8, offset)] {
            header[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        header
    };
    for header in [
        fields(1, 0, 0, 0, 0xffff, 0),
        fields(1, 0, 0, 0, 100, 0),
        fields(1, 0, 0, 0, 90, 9),
        fields(1, 0, 0, 0, 34, 16),
        fields(3, 0, 0, 0, 34, 16),
        fields(0, 1, 54, 0, 0, 0),
        fields(1, 1, 54, 1448, 34, 16),
        fields(1, 1, 0xffff, 0xffff, 34, 16),
        fields(0, 3, 42, 1472, 0, 0),
        fields(1, 0x84, 74, 1428, 54, 16),
        fields(0, 5, 42, 1400, 0, 0),
        fields(0, 0x80, 0, 0, 0, 0),
        fields(0xff, 0xff, 0xffff, 0xffff, 0xffff, 0xffff),
    ] {
        world.tx.write(addr, &header);
        for cut in [len, 5, 20] {
            let chain = [
                RawDesc::readable(addr, cut),
                RawDesc::readable(addr + u64::from(cut), len - cut),
            ];
            let polled = world.send_chain(0, &chain[..1 + usize::from(cut < len)]);
            assert_eq!(polled.drops, [DropReason::BadOffload], "{header:?}");
            assert!(polled.frames.is_empty());
            assert_eq!(world.tx.take_used(), [used(0, 0)]);
        }
        world.tx_passes();
    }
    // What asks for nothing passes, and is not passed on.
    world.tx.write(addr, &fields(2, 0, 54, 1448, 34, 16));
    let polled = world.send_chain(0, &[RawDesc::readable(addr, len)]);
    assert_eq!(polled.frames.len(), 1);
    world.post_chain(0, &[RawDesc::writable(world.rx_buffer(0), 2048)]);
    assert_eq!(transmit(&mut world.device_rx, &polled.frames).frames, 1);
    let header = world.rx.read(world.rx_buffer(0), NET_HEADER_BYTES);
    assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
}

#[test]
fn b08_indirect_tables() {
    in_every_layout(&[MODERN]).for_each(indirect_tables);
}

fn indirect_tables(features: Features) {
    const SIZE: u16 = 8;
    let mut world = World::of_size(SIZE, features);
    let table = world.tx_table();
    let buffer = world.tx_buffer(0);
    let sent = frame(8, 60);
    let len = world.write_frame(buffer, &sent);
    let entry = RawDesc::readable(buffer, len);

    for bytes in [0, 1, 8, 15, 17, 16 + 8, 3 * 16 + 8, u32::MAX] {
        let desc = RawDesc::indirect(table, bytes);
        assert_bad(&mut world, 2, &[desc], ChainError::IndirectLength);
    }
    // A table in a table, as first and as later entry.
    let nested = RawDesc::indirect(table + 64, 16);
    world.tx.set_table(table + 64, &[entry]);
    for entries in [
        &[nested][..],
        &[RawDesc::readable(buffer, 2).then(1), nested],
    ] {
        world.tx.set_table(table, entries);
        let bytes = 16 * u32::try_from(entries.len()).expect("1 or 2");
        let desc = RawDesc::indirect(table, bytes);
        assert_bad(&mut world, 2, &[desc], ChainError::IndirectNested);
    }
    // INDIRECT with NEXT.
    world.tx.set_table(table, &[entry]);
    let chain = [RawDesc::indirect(table, 16), entry];
    assert_bad(&mut world, 2, &chain, ChainError::IndirectNext);
    // A chain longer than the ring, though the table is longer still.
    let piece = RawDesc::readable(buffer, 12);
    let long: Vec<_> = (1..=SIZE + 1).map(|next| piece.then(next)).collect();
    world.tx.set_table(table, &[&long[..], &[piece]].concat());
    for entries in [u32::from(SIZE) + 1, 0xffff, 0x1_0000, 0x0fff_ffff] {
        let desc = RawDesc::indirect(table, 16 * entries);
        assert_bad(&mut world, 2, &[desc], ChainError::TooLong);
    }

    // A table at any alignment, behind a direct descriptor.
    let odd = table + 3;
    let rest = RawDesc::readable(buffer + 7, len - 7);
    world.tx.set_table(odd, &[rest]);
    let chain = [RawDesc::readable(buffer, 7), RawDesc::indirect(odd, 16)];
    assert_eq!(world.send_chain(2, &chain).frames, [sent]);
    world.tx_passes();

    // The same walker on the RX side.
    let table = world.rx_table();
    let entry = RawDesc::writable(world.rx_buffer(0), 64);
    for bytes in [0, 8, 24] {
        let desc = RawDesc::indirect(table, bytes);
        assert_bad_rx(&mut world, 2, &[desc], ChainError::IndirectLength);
    }
    world.rx.set_table(
        table,
        &[
            RawDesc::writable(world.rx_buffer(0), 64).then(1),
            RawDesc::indirect(table, 16),
        ],
    );
    let desc = RawDesc::indirect(table, 32);
    assert_bad_rx(&mut world, 2, &[desc], ChainError::IndirectNested);
    assert_bad_rx(&mut world, 2, &[desc, entry], ChainError::IndirectNext);
}

/// The length of a table bounds where its entries may lead, not the chain.
#[test]
fn b08_entries_of_a_split_table_lead_anywhere_in_it() {
    const SIZE: u16 = 8;
    let mut world = World::of_size(SIZE, MODERN);
    let table = world.tx_table();
    let buffer = world.tx_buffer(0);
    let sent = frame(8, 60);
    let len = world.write_frame(buffer, &sent);
    let entry = RawDesc::readable(buffer, len);
    // `next` at the end of the table and beyond, though memory is there.
    for next in [2, 3, 0xffff] {
        let entries = [entry.then(1), entry.then(next)];
        world.tx.set_table(table, &entries);
        let desc = RawDesc::indirect(table, 32);
        assert_bad(&mut world, 2, &[desc], ChainError::NextOutside);
    }
    // Out of order; WRITE of the table itself is ignored.
    let entries = [
        RawDesc::readable(buffer, 10).then(2),
        RawDesc::readable(buffer + 30, len - 30),
        RawDesc::readable(buffer + 10, 20).then(1),
    ];
    world.tx.set_table(table + 3, &entries);
    for bytes in [48, 16 * u32::from(SIZE + 1), 16 * 65_536, 0xffff_fff0] {
        let desc = RawDesc::indirect(table + 3, bytes).with(DescFlags::WRITE);
        let polled = world.send_chain(2, &[desc]);
        assert_eq!(polled.frames, std::slice::from_ref(&sent));
    }
    world.tx_passes();

    let table = world.rx_table();
    let entry = RawDesc::writable(world.rx_buffer(0), 64);
    world.rx.set_table(table, &[entry.then(1)]);
    let desc = RawDesc::indirect(table, 16);
    assert_bad_rx(&mut world, 2, &[desc], ChainError::NextOutside);
}

#[test]
fn b11_loops_of_a_split_ring_end() {
    const SIZE: u16 = 64;
    let mut world = World::of_size(SIZE, MODERN);
    for len in [0, 1] {
        let tx = RawDesc::readable(world.tx_buffer(0), len);
        let rx = RawDesc::writable(world.rx_buffer(0), len.min(1));
        // Rings of one, two and all descriptors.
        for count in [1, 2, SIZE - 1] {
            for index in 0..count {
                let next = (index + 1) % count;
                world.tx.split().set_desc(index, tx.then(next));
                world.rx.split().set_desc(index, rx.then(next));
            }
            let before = world.device_tx.chain_errors().get(ChainError::TooLong);
            world.tx.split().offer(0);
            world.tx.publish();
            let polled = poll(&mut world.device_tx);
            assert_eq!(polled.drops, [DropReason::BadChain]);
            assert!(polled.units >= u32::from(SIZE) - 1, "{}", polled.units);
            let after = world.device_tx.chain_errors().get(ChainError::TooLong);
            assert_eq!(after, before + 1);
            assert_eq!(world.tx.take_used(), [used(0, 0)]);

            world.rx.split().offer(0);
            world.rx.publish();
            let report = transmit(&mut world.device_rx, &[frame(1, 100)]);
            assert_eq!(report.drops.get(DropReason::BadRxChain), 1);
            assert!(report.units >= u32::from(SIZE) - 1, "{}", report.units);
            assert_eq!(world.rx.take_used(), [used(0, 0)]);
        }
        world.tx_passes();
        world.rx_passes();
        // In an indirect table.
        let (tx_table, rx_table) = (world.tx_table(), world.rx_table());
        world.tx.set_table(tx_table, &[tx.then(1), tx.then(0)]);
        let desc = RawDesc::indirect(tx_table, 32);
        assert_bad(&mut world, 0, &[desc], ChainError::TooLong);
        world.rx.set_table(rx_table, &[rx.then(1), rx.then(0)]);
        let desc = RawDesc::indirect(rx_table, 32);
        assert_bad_rx(&mut world, 0, &[desc], ChainError::TooLong);
    }
}

/// 2^32 bytes and more: the bytes end the walk before the descriptors do.
#[test]
fn b11_long_buffers_end_a_walk() {
    for features in in_every_layout(&[MODERN, LEGACY]) {
        let mut world = World::of_size(64, features);
        let addr = world.tx_buffer(0);
        for len in [u32::MAX, 1 << 31, 65_548] {
            let desc = RawDesc::readable(addr, len);
            assert_bad(&mut world, 0, &[desc, desc, desc], ChainError::Oversize);
        }
        let desc = RawDesc::readable(addr, 40_000);
        assert_bad(&mut world, 0, &[desc, desc], ChainError::Oversize);
    }
}

#[test]
fn b15_zero_lengths_anywhere() {
    in_every_layout(&[MODERN]).for_each(zero_lengths);
}

fn zero_lengths(features: Features) {
    const SIZE: u16 = 64;
    for at in [0, 1, 31, SIZE - 1] {
        let mut world = World::of_size(SIZE, features);
        let sent = frame(u32::from(at), 77);
        let (source, target) = (world.tx_buffer(0), world.rx_buffer(0));
        let len = world.write_frame(source, &sent);
        // Zero lengths point nowhere: there is nothing to check.
        let chain = |good: RawDesc, empty: RawDesc| -> Vec<RawDesc> {
            (0..SIZE)
                .map(|index| if index == at { good } else { empty })
                .collect()
        };
        let tx = chain(
            RawDesc::readable(source, len),
            RawDesc::readable(u64::MAX, 0),
        );
        let polled = world.send_chain(0, &tx);
        assert_eq!(polled.frames, std::slice::from_ref(&sent));
        assert_eq!(polled.units, u32::from(SIZE) - 1);
        assert_eq!(world.tx.take_used(), [used(0, 0)]);

        let rx = chain(RawDesc::writable(target, len), RawDesc::writable(0, 0));
        world.post_chain(0, &rx);
        let report = transmit(&mut world.device_rx, std::slice::from_ref(&sent));
        assert_eq!(report.frames, 1);
        assert_eq!(world.rx.take_used(), [used(0, len)]);
        assert_eq!(world.rx.read(target + 12, sent.len()), sent);
        world.tx_passes();
        world.rx_passes();
    }
}

#[test]
fn b26_bad_addresses_stop_nothing_else() {
    in_every_layout(&[MODERN]).for_each(bad_addresses);
}

fn bad_addresses(features: Features) {
    let mut world = World::of_size(256, features);
    let mut sent = Vec::new();
    let mut got = Polled::default();
    for round in 0..50_u16 {
        for index in 0..100 {
            let seed = u32::from(round) * 100 + u32::from(index);
            let bytes = frame(seed, 60 + seed % 40);
            let addr = world.tx_buffer(index);
            let len = world.write_frame(addr, &bytes);
            let desc = if index % 10 == 3 {
                RawDesc::readable(world.end() + addr, len)
            } else {
                sent.push(bytes);
                RawDesc::readable(addr, len)
            };
            world.tx.offer_chain(index, &[desc]);
        }
        world.tx.publish();
        for _ in 0..2 {
            let polled = poll(&mut world.device_tx);
            got.frames.extend(polled.frames);
            got.drops.extend(polled.drops);
        }
        let returned: Vec<_> = (0..100).map(|head| used(head, 0)).collect();
        assert_eq!(world.tx.take_used(), returned, "all, in order");
    }
    assert_eq!(got.frames, sent, "9 of 10, in order");
    assert_eq!(got.drops, [DropReason::BadChain; 500]);
    world.tx_passes();

    // Every other receive buffer is bad: every other frame gets through.
    for index in 0..64 {
        let addr = world.rx_buffer(index) + if index % 2 == 0 { 0 } else { world.end() };
        world
            .rx
            .offer_chain(index, &[RawDesc::writable(addr, 2048)]);
    }
    world.rx.publish();
    let frames: Vec<_> = (0..64).map(|seed| frame(seed, 60)).collect();
    let report = transmit(&mut world.device_rx, &frames);
    assert_eq!((report.frames, report.dropped), (32, 32));
    assert_eq!(report.drops.get(DropReason::BadRxChain), 32);
    for (index, entry) in (0..64).zip(world.rx.take_used()) {
        let good = index % 2 == 0;
        assert_eq!(entry, used(index, if good { 72 } else { 0 }));
        if good {
            let bytes = world.rx.read(world.rx_buffer(index) + 12, 60);
            assert_eq!(bytes, frames[usize::from(index)]);
        }
    }
    world.rx_passes();
}

#[test]
fn b30_frames_shorter_than_an_ethernet_header() {
    for features in in_every_layout(&[MODERN, LEGACY]) {
        let mut world = World::of_size(8, features);
        let addr = world.tx_buffer(0);
        for len in 1..14 {
            let bytes = world.write_frame(addr, &frame(9, len));
            for cut in [0, 1, bytes - 1, bytes] {
                let chain = [
                    RawDesc::readable(addr, cut),
                    RawDesc::readable(addr + u64::from(cut), bytes - cut),
                ];
                assert_bad(&mut world, 0, &chain, ChainError::Runt);
            }
            let whole = RawDesc::readable(addr, bytes);
            assert_bad(&mut world, 0, &[whole], ChainError::Runt);
        }
        let sent = frame(9, 14);
        let bytes = world.write_frame(addr, &sent);
        let polled = world.send_chain(0, &[RawDesc::readable(addr, bytes)]);
        assert_eq!(polled.frames, [sent]);
    }
}

#[test]
fn every_chain_error_has_its_own_count() {
    in_every_layout(&[MODERN]).for_each(chain_errors);
}

fn chain_errors(features: Features) {
    const SIZE: u16 = 8;
    let mut world = World::of_size(SIZE, features);
    let addr = world.tx_buffer(0);
    let table = world.tx_table();
    let good = RawDesc::readable(addr, 100);
    let entries = vec![RawDesc::readable(addr, 1).then(0); usize::from(SIZE) + 1];
    world.tx.set_table(table, &entries);
    world
        .tx
        .set_table(table + 512, &[RawDesc::indirect(table, 16)]);
    let indirect = |offset, bytes| RawDesc::indirect(table + offset, bytes);
    let cases: &[(ChainError, &[RawDesc])] = &[
        (ChainError::Unmapped, &[RawDesc::readable(8, 100)]),
        (ChainError::TooLong, &[indirect(0, 16 * 9)]),
        (ChainError::IndirectLength, &[indirect(0, 17)]),
        (ChainError::IndirectNested, &[indirect(512, 16)]),
        (ChainError::IndirectNext, &[indirect(0, 16), good]),
        (ChainError::Direction, &[RawDesc::writable(addr, 100)]),
        (ChainError::Direction, &[good, RawDesc::writable(addr, 0)]),
        (ChainError::Runt, &[RawDesc::readable(addr, 25)]),
        (ChainError::Oversize, &[RawDesc::readable(addr, 65_548)]),
    ];
    let check = |world: &mut World, error, before: ChainErrorCounts| {
        let after = world.device_tx.chain_errors();
        for &kind in ChainError::ALL {
            let added = after.get(kind) - before.get(kind);
            assert_eq!(added, u64::from(kind == error), "{kind}, wanted {error}");
        }
        world.tx_passes();
    };
    for &(error, chain) in cases {
        let before = world.device_tx.chain_errors();
        world.send_chain(0, chain);
        check(&mut world, error, before);
    }
    if !features.packed && !features.in_order {
        for next in [SIZE, 0xffff] {
            let before = world.device_tx.chain_errors();
            world.tx.split().set_desc(0, good.then(next));
            world.tx.split().offer(0);
            world.tx.publish();
            poll(&mut world.device_tx);
            check(&mut world, ChainError::NextOutside, before);
        }
    }
    // Unknown flags mean nothing (section 2.7.5).
    let sent = frame(1, 60);
    let len = world.write_frame(addr, &sent);
    let desc = RawDesc::readable(addr, len).with(DescFlags(0xfff8));
    assert_eq!(world.send_chain(0, &[desc]).frames, [sent]);
}

//! Hostile and unusual guests, the part about receive buffers, in every layout
//! and order of returns; the table is in `bugs_table.rs`.

mod common;

use common::{
    LEGACY, MODERN, UNMERGED, World, assert_bad_rx, first_base, frame, in_every_layout, poll_with,
    transmit, used,
};
use pollux_packet::DropReason;
use pollux_testkit::{Guest, GuestSpec, RawDesc};
use pollux_virtio::device::BurstLimit;
use pollux_virtio::{ChainError, Features};

#[test]
fn b09_receive_chains_smaller_than_the_net_header() {
    for features in in_every_layout(&[UNMERGED, LEGACY]) {
        let mut world = World::of_size(8, features);
        let header = world.header_bytes();
        let addr = world.rx_buffer(0);
        for len in 0..header {
            let desc = RawDesc::writable(addr, len);
            assert_bad_rx(&mut world, 0, &[desc], ChainError::Runt);
        }
        for len in [header, header + 1, header + 99] {
            world.post_chain(0, &[RawDesc::writable(addr, len)]);
            let report = transmit(&mut world.device_rx, &[frame(1, 100)]);
            assert_eq!(report.drops.get(DropReason::RxBufferTooSmall), 1);
            assert!(world.rx.take_used().is_empty(), "the chain stays");
            // And serves a frame that fits, if there is one.
            if len == header + 99 {
                let report = transmit(&mut world.device_rx, &[frame(1, 99)]);
                assert_eq!(report.frames, 1);
                world.rx.take_used();
                world.rx_passes();
            } else {
                world = World::of_size(8, features);
            }
        }
    }
}

/// Mergeable: the net header goes over as many buffers as it takes.
#[test]
fn b09_a_net_header_over_many_buffers() {
    in_every_layout(&[MODERN]).for_each(net_header_over_many_buffers);
}

fn net_header_over_many_buffers(features: Features) {
    let mut world = World::of_size(256, features);
    for len in [1, 5, 11, 12, 13] {
        let addr = world.rx_buffer(0);
        world.rx.write(addr, &[0xee; 2048]);
        for index in 0..112_u16.div_ceil(len) {
            let at = addr + u64::from(index) * u64::from(len + 3);
            world
                .rx
                .offer_chain(index, &[RawDesc::writable(at, u32::from(len))]);
        }
        world.rx.publish();
        let sent = frame(2, 100);
        let report = transmit(&mut world.device_rx, std::slice::from_ref(&sent));
        assert_eq!(report.frames, 1, "buffers of {len} bytes");
        let returned = world.rx.take_used();
        let mut bytes = Vec::new();
        for (index, entry) in (0..).zip(&returned) {
            assert_eq!(entry.id, index);
            let at = addr + u64::from(entry.id) * u64::from(len + 3);
            bytes.extend(world.rx.read(at, entry.len as usize));
            assert_eq!(world.rx.read(at + u64::from(entry.len), 3), [0xee; 3]);
        }
        let count = u16::try_from(returned.len()).expect("at most 112");
        assert_eq!(count, 112_u16.div_ceil(len));
        assert_eq!(bytes[..10], [0; 10]);
        assert_eq!(bytes[10..12], count.to_le_bytes());
        assert_eq!(bytes[12..], sent);
        world.rx_passes();
    }
    let desc = RawDesc::writable(world.rx_buffer(0), 0);
    assert_bad_rx(&mut world, 0, &[desc], ChainError::Runt);
}

#[test]
fn b13_one_frame_in_a_thousand_chains_behind_a_full_batch() {
    in_every_layout(&[MODERN]).for_each(one_frame_in_a_thousand_chains);
}

fn one_frame_in_a_thousand_chains(features: Features) {
    let mut guest = Guest::new(GuestSpec {
        ring_size: 2048,
        features,
        base: first_base(features),
        buffer_bytes: 64,
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (_, mut device) = guest.device();
    assert_eq!(guest.rx.refill(), 2048);
    guest.rx.publish();
    let mut frames: Vec<_> = (0..63).map(|seed| frame(seed, 52)).collect();
    frames.push(frame(63, 65_535));
    let report = transmit(&mut device, &frames);
    assert_eq!((report.frames, report.dropped), (64, 0));
    assert!(report.units >= 1000, "each chain is work");
    let mut got = Vec::new();
    let count = guest.rx.receive(100, |received| {
        got.push((received.to_vec(), received.num_buffers(), received.buffers));
    });
    assert_eq!(count, Ok(64));
    for (index, (bytes, num_buffers, buffers)) in got.iter().enumerate() {
        assert_eq!(bytes, &frames[index]);
        let wanted = if index < 63 { 1 } else { 1025 };
        assert_eq!((*num_buffers, *buffers), (wanted, wanted));
    }
}

#[test]
fn b14_a_frame_larger_than_its_buffer() {
    for features in in_every_layout(&[UNMERGED, LEGACY]) {
        let mut world = World::of_size(8, features);
        let addr = world.rx_buffer(0);
        world.rx.write(addr, &[0xee; 2048]);
        world.post_chain(0, &[RawDesc::writable(addr, 256)]);
        for len in [1514, 256, 257 - world.header_bytes()] {
            let report = transmit(&mut world.device_rx, &[frame(1, len)]);
            assert_eq!(report.drops.get(DropReason::RxBufferTooSmall), 1);
            assert_eq!(report.frames, 0);
        }
        assert_eq!(world.rx.read(addr + 256, 1700), [0xee; 1700]);
        assert!(world.rx.take_used().is_empty());
        // A frame that fits gets the buffer.
        let len = 256 - world.header_bytes();
        let report = transmit(&mut world.device_rx, &[frame(1, 1514), frame(2, len)]);
        assert_eq!((report.frames, report.dropped), (1, 1));
        assert_eq!(world.rx.take_used(), [used(0, 256)]);
        assert_eq!(world.rx.read(addr + 256, 1700), [0xee; 1700]);
        world.rx_passes();
    }
}

#[test]
fn b56_malformed_tx_chains_cost_the_budget() {
    in_every_layout(&[MODERN]).for_each(malformed_tx_chains);
}

fn malformed_tx_chains(features: Features) {
    let limit = BurstLimit {
        units: 10,
        ..BurstLimit::MAX
    };
    // Nothing but malformed chains, refilled at once.
    let mut world = World::of_size(64, features);
    for index in 0..64 {
        world.tx.offer_chain(index, &[RawDesc::readable(0, 1)]);
    }
    world.tx.publish();
    for _ in 0..1000 {
        let polled = poll_with(&mut world.device_tx, limit);
        assert_eq!((polled.chains, polled.units), (10, 10));
        let returned = world.tx.take_used();
        assert_eq!(returned.len(), 10);
        for entry in returned {
            let head = u16::try_from(entry.id).expect("a head");
            world.tx.offer_chain(head, &[RawDesc::readable(0, 1)]);
        }
        world.tx.publish();
    }
    // A long bad chain ends the burst by itself.
    let mut world = World::of_size(64, features);
    let mut chain = [RawDesc::default(); 16];
    chain[15] = RawDesc::readable(0, 1);
    for index in 0..4 {
        world.tx.offer_chain(16 * index, &chain);
    }
    world.tx.publish();
    for _ in 0..4 {
        let polled = poll_with(&mut world.device_tx, limit);
        assert_eq!((polled.chains, polled.units), (1, 15));
    }
}

#[test]
fn b56_tiny_receive_buffers_cost_the_budget() {
    in_every_layout(&[MODERN]).for_each(tiny_receive_buffers);
}

fn tiny_receive_buffers(features: Features) {
    // A ring of 1-byte buffers and a sender that floods it.
    let mut world = World::of_size(256, features);
    for index in 0..256 {
        let desc = RawDesc::writable(world.rx_buffer(index), 1);
        world.rx.offer_chain(index, &[desc]);
    }
    world.rx.publish();
    let frames = vec![frame(1, 1514); 42];
    let report = transmit(&mut world.device_rx, &frames);
    assert_eq!(report.drops.get(DropReason::RxRingFull), 42);
    assert!(report.units >= 255, "the walk over all chains is paid");
    assert!(report.units < 2 * 256, "and done once, not for each frame");
    for _ in 0..100 {
        let report = transmit(&mut world.device_rx, &frames);
        assert_eq!((report.dropped, report.units), (42, 0), "nor again");
    }
    // What fits does get through, in as many buffers as it takes.
    let report = transmit(&mut world.device_rx, &[frames[0].clone(), frame(2, 244)]);
    assert_eq!((report.frames, report.dropped), (1, 1));
    assert!(report.units >= 255);
    assert_eq!(world.rx.take_used().len(), 256);
    world.rx_passes();
}

/// Chains of a split ring that share a tail of empty descriptors must not
/// multiply.
#[test]
fn b56_receive_chains_that_share_a_tail() {
    let mut world = World::of_size(256, MODERN);
    let frames = vec![frame(1, 1514); 42];
    let addr = world.rx_buffer(0);
    let ring = world.rx.split();
    for index in 0..255 {
        ring.set_desc(index, RawDesc::writable(addr, 0).then(index + 1));
    }
    ring.set_desc(255, RawDesc::writable(addr, 1));
    for index in 0..256 {
        ring.offer(index);
    }
    ring.publish();
    let report = transmit(&mut world.device_rx, &frames[..1]);
    assert_eq!(report.drops.get(DropReason::BadRxChain), 1);
    assert!(report.units <= 3 * 256, "{} units", report.units);
    while !world.rx.take_used().is_empty() {
        transmit(&mut world.device_rx, &frames);
    }
    // The last few are short, not bad: they wait for more.
    world.post_chain(255, &[RawDesc::writable(addr, 2048)]);
    let report = transmit(&mut world.device_rx, &frames[..1]);
    assert_eq!((report.frames, report.dropped), (1, 0));
    world.neighbour_passes();
}

#[test]
fn rx_chains_with_buffers_to_read_are_unusable() {
    for features in in_every_layout(&[MODERN, UNMERGED]) {
        let mut world = World::of_size(8, features);
        let addr = world.rx_buffer(0);
        let (readable, writable) = (RawDesc::readable(addr, 64), RawDesc::writable(addr, 64));
        for chain in [&[readable, writable][..], &[writable, readable]] {
            assert_bad_rx(&mut world, 0, chain, ChainError::Direction);
        }
        let hole = RawDesc::writable(16, 2048);
        assert_bad_rx(&mut world, 0, &[writable, hole], ChainError::Unmapped);
    }
}

/// A frame that meets a bad chain as its third returns all three, and the next
/// frame starts behind them.
#[test]
fn rx_chains_before_a_bad_one_go_back_with_it() {
    in_every_layout(&[MODERN]).for_each(chains_before_a_bad_one);
}

fn chains_before_a_bad_one(features: Features) {
    let mut world = World::of_size(8, features);
    for index in 0..4 {
        let addr = world.rx_buffer(index);
        let desc = match index {
            2 => RawDesc::writable(0, 64),
            3 => RawDesc::writable(addr, 2048),
            _ => RawDesc::writable(addr, 64),
        };
        world.rx.offer_chain(index, &[desc]);
    }
    world.rx.publish();
    let frames = [frame(1, 200), frame(2, 60)];
    let report = transmit(&mut world.device_rx, &frames);
    assert_eq!((report.frames, report.dropped), (1, 1));
    let returned = world.rx.take_used();
    assert_eq!(returned, [used(0, 0), used(1, 0), used(2, 0), used(3, 72)]);
    assert_eq!(world.rx.read(world.rx_buffer(3) + 12, 60), frames[1]);
    world.rx_passes();
}

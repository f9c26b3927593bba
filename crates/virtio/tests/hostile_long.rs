//! Hostile guests with packed rings, the part about long chains: their ends have
//! to be found, and rings can be large. The table is in `bugs_table.rs`.

mod common;

use common::{MODERN, UNMERGED, World, frame, transmit, used};
use pollux_packet::DropReason;
use pollux_testkit::{GuestSpec, RawDesc, RawPacked};
use pollux_virtio::device::{BurstLimit, RingFault};
use pollux_virtio::{DescFlags, Features};

const PACKED: Features = Features {
    packed: true,
    ..MODERN
};
/// Both orders of returns.
const ORDERS: [Features; 2] = [
    PACKED,
    Features {
        in_order: true,
        ..PACKED
    },
];
const LARGE: u16 = 32_768;
/// The longest chain whose end is looked for, in descriptors.
const LONGEST: u16 = 1024;

/// A guest with the largest ring, whose buffers overlap.
fn large(features: Features) -> World {
    World::new(GuestSpec {
        ring_size: LARGE,
        features: Features {
            packed: true,
            ..features
        },
        base: 0x8000,
        buffer_bytes: 64,
        table_len: 1,
        ..GuestSpec::default()
    })
}

/// B-19: a ring whose buffers are its own first descriptor: a frame in it makes
/// the ring available in the next lap, before it was returned in this one. That is
/// more than the ring holds.
#[test]
fn b19_frames_that_make_their_own_descriptor_available_again() {
    for features in ORDERS {
        // Chains of one descriptor, and one chain that is the whole ring.
        for (size, len) in [(1, 1), (2, 1), (5, 1), (5, 5), (1024, 1024)] {
            for flags in [DescFlags::default(), DescFlags::NEXT] {
                let mut world = World::of_size(size, features);
                let slot = world.rx.packed().desc_addr(0);
                let desc = RawDesc::writable(slot - 12, 28);
                let count = size / len;
                for id in 0..count {
                    world.rx.offer_chain(id, &vec![desc; len.into()]);
                }
                world.rx.publish();
                let again = desc.with(RawPacked::available_flags(0)).with(flags);
                let sent = again.to_packed_bytes().to_vec();
                let report = transmit(&mut world.device_rx, &vec![sent; 64]);
                assert_eq!(report.frames, u32::from(count));
                let down = report.drops.get(DropReason::PortDown);
                assert_eq!(down, 64 - u64::from(count));
                let filled: Vec<_> = (0..count).map(|id| used(id, 28)).collect();
                assert_eq!(world.rx.take_used(), filled);
                assert_eq!(world.device_rx.base(), 0, "a lap further");
                let fault = RingFault::ChainEnd {
                    index: 0,
                    within: 0,
                };
                assert_eq!(world.device_rx.fault(), Some(fault));
                world.neighbour_passes();
            }
        }
    }
}

/// Many receive chains that cannot hold a frame, the last of which says that it
/// goes on at the first: nobody walks them for each frame.
#[test]
fn b56_a_last_chain_that_leads_to_the_first_breaks_the_ring() {
    const SIZE: u16 = 256;
    for features in ORDERS {
        let mut world = World::of_size(SIZE, features);
        let desc = RawDesc::writable(world.rx_buffer(0), 1);
        for index in 0..SIZE - 1 {
            world.rx.offer_chain(index, &[desc]);
        }
        world.rx.offer_as_it_is(SIZE - 1, &[desc.then(0)]);
        world.rx.publish();
        let frames = vec![frame(1, 1514); 42];
        let report = transmit(&mut world.device_rx, &frames);
        assert_eq!((report.frames, report.dropped), (0, 42));
        assert!(report.units < 4 * u32::from(SIZE), "{}", report.units);
        let fault = RingFault::ChainEnd {
            index: SIZE - 1,
            within: 1,
        };
        assert_eq!(world.device_rx.fault(), Some(fault));
        let report = transmit(&mut world.device_rx, &frames);
        assert_eq!(report.drops.get(DropReason::PortDown), 42);
        assert_eq!(report.units, 0);
        world.neighbour_passes();
    }
}

/// The end of a packed chain has to be found before the chain behind it is, so
/// every descriptor costs, also those behind the one that decides.
#[test]
fn b56_every_descriptor_of_a_packed_chain_is_paid_for() {
    const SIZE: u16 = 256;
    for features in ORDERS {
        let mut world = World::of_size(SIZE, features);
        // Too long for a frame at its first descriptor.
        let chain = vec![RawDesc::readable(world.tx_buffer(0), 70_000); usize::from(SIZE)];
        let polled = world.send_chain(0, &chain);
        assert_eq!(polled.drops, [DropReason::Oversize]);
        assert!(polled.units >= u32::from(SIZE) - 2, "{}", polled.units);
        // Filled at its first descriptor.
        let chain = vec![RawDesc::writable(world.rx_buffer(0), 2048); usize::from(SIZE)];
        world.post_chain(0, &chain);
        let report = transmit(&mut world.device_rx, &[frame(1, 60)]);
        assert_eq!(report.frames, 1);
        assert!(report.units >= u32::from(SIZE) - 3, "{}", report.units);
    }
}

/// The longest chain behind one that no frame fits: whoever sends to this guest
/// does not look for its end in each burst. It has another end by then, too far
/// away, which nobody sees.
#[test]
fn b56_the_end_of_a_long_receive_chain_is_looked_for_once() {
    for features in [false, true].map(|in_order| Features {
        in_order,
        ..UNMERGED
    }) {
        let mut world = large(features);
        let addr = world.rx_buffer(0);
        world.rx.offer_chain(0, &[RawDesc::writable(addr, 20)]);
        let chain = vec![RawDesc::writable(addr, 0); usize::from(LONGEST)];
        world.rx.offer_chain(1, &chain);
        world.rx.publish();
        let frames = vec![frame(1, 60); 2];
        transmit(&mut world.device_rx, &frames);
        let ring = world.rx.packed();
        ring.set_desc(LONGEST, ring.desc(LONGEST).with(DescFlags::NEXT));
        for _ in 0..40 {
            let report = transmit(&mut world.device_rx, &frames);
            assert_eq!(report.drops.get(DropReason::RxBufferTooSmall), 2);
            assert_eq!((report.units, world.device_rx.fault()), (0, None));
        }
        world.neighbour_passes();
    }
}

/// The same on the other side: bursts end by their bytes, and the long chain is
/// ahead of each of them.
#[test]
fn b56_the_end_of_a_long_chain_ahead_of_a_burst_is_looked_for_once() {
    let mut world = large(UNMERGED);
    let addr = world.tx_buffer(0);
    for id in 0..62 {
        let desc = RawDesc::readable(addr, 12 + 65_535);
        world.tx.offer_chain(id, &[desc]);
    }
    let chain = vec![RawDesc::readable(addr, 0); usize::from(LONGEST)];
    world.tx.offer_chain(62, &chain);
    world.tx.publish();
    let limit = BurstLimit {
        bytes: 1,
        ..BurstLimit::MAX
    };
    for burst in 0..62 {
        let received = world.device_tx.receive(limit);
        assert_eq!((received.batch.len(), received.returns().units()), (1, 1));
        received.finish(1);
        if burst == 0 {
            let (ring, last) = (world.tx.packed(), 62 + LONGEST - 1);
            ring.set_desc(last, ring.desc(last).with(DescFlags::NEXT));
        }
    }
    assert_eq!(world.device_tx.fault(), None);
    world.neighbour_passes();
}

//! Rings that control changes while they run: whom they call, where they lie,
//! whether what they bring is wanted.

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;

use common::{
    MODERN, World, base_of, first_base, frame, in_every_layout, poll, poll_with, transmit, used,
};
use pollux_packet::DropReason;
use pollux_sys::EventFd;
use pollux_testkit::{Guest, GuestSpec, RawDesc, RawQueue, RawRing};
use pollux_virtio::device::{BurstLimit, RingFault};
use pollux_virtio::{ChainErrorCounts, Features, GuestMemory, Region, RingAreas, RingError};

const EVENT_IDX: Features = Features {
    event_idx: true,
    ..MODERN
};

/// Asks a driver that reads `avail.flags` not to be called.
const NO_INTERRUPT: u16 = 1;

fn eventfd() -> EventFd {
    EventFd::new().expect("eventfd")
}

fn dup(eventfd: &EventFd) -> EventFd {
    eventfd.try_clone().expect("dup")
}

/// The driver asks for no call that a few chains would reach.
fn wait_for_later(ring: &mut RawQueue, features: Features) {
    /// RING_EVENT_FLAGS_DESC (section 2.8.10).
    const DESC: u16 = 2;
    if features.packed {
        let ring = ring.packed();
        let later = ring.behind(ring.position(), 200);
        ring.set_driver_events(later, DESC);
    } else {
        ring.split().set_used_event(20_000);
    }
}

#[test]
fn the_first_publication_for_a_new_eventfd_calls() {
    in_every_layout(&[EVENT_IDX]).for_each(first_publication_calls);
}

fn first_publication_calls(features: Features) {
    let [old_tx, old_rx, new_tx, new_rx] = [(); 4].map(|()| eventfd());
    let spec = GuestSpec {
        features,
        base: first_base(features),
        ..GuestSpec::default()
    };
    let mut world = World::with_calls(spec, Some(&old_tx), Some(&old_rx));
    wait_for_later(&mut world.tx, features);
    wait_for_later(&mut world.rx, features);
    for called in [1, 0] {
        world.tx_passes();
        world.rx_passes();
        assert_eq!((old_tx.drain(), old_rx.drain()), (called, called));
    }

    let back = world.device_tx.set_call(Some(dup(&new_tx)));
    back.expect("there was one").signal().expect("open");
    let back = world.device_rx.set_call(Some(dup(&new_rx)));
    back.expect("there was one").signal().expect("open");
    assert_eq!((old_tx.drain(), old_rx.drain()), (1, 1), "the old ones");
    assert_eq!(
        (new_tx.drain(), new_rx.drain()),
        (0, 0),
        "no call by itself"
    );
    // B-18: what the driver saw of the old one is not known.
    for called in [1, 0] {
        world.tx_passes();
        world.rx_passes();
        assert_eq!((new_tx.drain(), new_rx.drain()), (called, called));
    }
    assert_eq!((old_tx.drain(), old_rx.drain()), (0, 0));

    assert!(world.device_tx.set_call(None).is_some());
    assert!(world.device_rx.set_call(None).is_some());
    world.tx_passes();
    world.rx_passes();
    assert!(world.device_tx.set_call(None).is_none());
    assert_eq!((new_tx.drain(), new_rx.drain()), (0, 0));
    assert_eq!(world.device_tx.notifications().calls_sent, 2);
}

#[test]
fn with_flags_a_new_eventfd_is_called_whenever_the_driver_asks() {
    let [old, new] = [(); 2].map(|()| eventfd());
    let mut world = World::with_calls(GuestSpec::default(), Some(&old), Some(&old));
    world.tx_passes();
    world.rx_passes();
    assert_eq!(old.drain(), 2);
    drop(world.device_tx.set_call(Some(dup(&new))));
    drop(world.device_rx.set_call(Some(dup(&new))));
    world.tx_passes();
    world.rx_passes();
    assert_eq!((old.drain(), new.drain()), (0, 2));
    world.tx.split().set_avail_flags(NO_INTERRUPT);
    world.rx.split().set_avail_flags(NO_INTERRUPT);
    world.tx_passes();
    world.rx_passes();
    assert_eq!(new.drain(), 0);
}

/// The guest's memory, mapped once more and so at other addresses of ours.
fn mapped_again(guest: &Guest) -> Arc<GuestMemory> {
    let regions = guest.places().map(|place| {
        let region = Region::map(guest.file.as_fd(), place);
        region.expect("it was mapped before")
    });
    Arc::new(GuestMemory::new(regions).expect("as before"))
}

/// `areas` copied, byte by byte, to `to`.
fn copied(memory: &GuestMemory, areas: RingAreas, to: u64) -> RingAreas {
    let moved = RingAreas {
        size: areas.size,
        desc_addr: to,
        avail_addr: to + 0x2000,
        used_addr: to + 0x4000,
    };
    let size = areas.size;
    for (from, to, bytes) in [
        (
            areas.desc_addr,
            moved.desc_addr,
            RingAreas::desc_bytes(size),
        ),
        (
            areas.avail_addr,
            moved.avail_addr,
            RingAreas::avail_bytes(size),
        ),
        (
            areas.used_addr,
            moved.used_addr,
            RingAreas::used_bytes(size),
        ),
    ] {
        let mut copy = vec![0; bytes as usize];
        memory.read(from, &mut copy).expect("mapped");
        memory.write(to, &copy).expect("mapped");
    }
    moved
}

/// SET_MEM_TABLE: the same memory at other addresses of the switch.
#[test]
fn a_ring_goes_on_in_memory_that_was_mapped_anew() {
    let bases = |features| [0, 65_534].map(|index| (features, base_of(features, index, 256)));
    for (features, base) in in_every_layout(&[MODERN]).flat_map(bases) {
        let mut world = World::new(GuestSpec {
            features,
            base,
            ..GuestSpec::default()
        });
        for round in 0..6 {
            world.tx_passes();
            world.rx_passes();
            // Frames and buffers that wait are neither lost nor taken twice.
            let sent = [frame(round, 70), frame(round + 100, 80)];
            for (index, sent) in (0..).zip(&sent) {
                let addr = world.tx_buffer(index);
                let len = world.write_frame(addr, sent);
                world.tx.offer_chain(index, &[RawDesc::readable(addr, len)]);
            }
            world.tx.publish();
            world.post_chain(0, &[RawDesc::writable(world.rx_buffer(0), 2048)]);

            let again = mapped_again(&world.guest);
            let [tx, rx] = [world.guest.tx_config(), world.guest.rx_config()];
            let moved = world.device_tx.relocate(Arc::clone(&again), tx.areas);
            assert_eq!(moved, Ok(()));
            let moved = world.device_rx.relocate(Arc::clone(&again), rx.areas);
            assert_eq!(moved, Ok(()));

            assert_eq!(poll(&mut world.device_tx).frames, sent);
            assert_eq!(world.tx.take_used(), [used(0, 0), used(1, 0)]);
            let report = transmit(&mut world.device_rx, &sent[..1]);
            assert_eq!((report.frames, report.dropped), (1, 0));
            assert_eq!(world.rx.take_used().len(), 1);
            // Nothing is kept of the map before.
            let before = Arc::downgrade(&again);
            drop(again);
            assert!(before.upgrade().is_some());
            let first = Arc::clone(&world.guest.memory);
            for moved in [
                world.device_tx.relocate(Arc::clone(&first), tx.areas),
                world.device_rx.relocate(Arc::clone(&first), rx.areas),
            ] {
                assert_eq!(moved, Ok(()));
            }
            assert!(before.upgrade().is_none());
        }
    }
}

/// SET_VRING_ADDR: the ring lies elsewhere from now on.
#[test]
fn a_ring_goes_on_at_other_addresses_at_its_own_position() {
    for features in [MODERN, EVENT_IDX] {
        let mut world = World::of_size(256, features);
        for _ in 0..3 {
            world.tx_passes();
            world.rx_passes();
        }
        world.post_chain(0, &[RawDesc::writable(world.rx_buffer(0), 2048)]);
        let memory = Arc::clone(&world.guest.memory);
        let [tx, rx] = [world.guest.tx_config(), world.guest.rx_config()];
        let tx_areas = copied(&memory, tx.areas, tx.tables_addr);
        let rx_areas = copied(&memory, rx.areas, rx.tables_addr);
        let [old_tx, old_rx] = [&mut world.tx, &mut world.rx].map(|ring| ring.split().clone());
        world.tx = RawRing::new(Arc::clone(&memory), tx_areas, old_tx.position()).into();
        world.rx = RawRing::new(Arc::clone(&memory), rx_areas, old_rx.used_idx()).into();
        // What a driver writes to used.idx is its word on our position.
        world.tx.split().set_used_idx(999);
        world.rx.split().set_used_idx(999);
        let moved = world.device_tx.relocate(Arc::clone(&memory), tx_areas);
        assert_eq!(moved, Ok(()));
        let moved = world.device_rx.relocate(Arc::clone(&memory), rx_areas);
        assert_eq!(moved, Ok(()));
        assert_eq!((world.device_tx.base(), world.device_rx.base()), (3, 3));
        if !features.event_idx {
            assert_ne!(
                world.tx.split().used_flags(),
                0,
                "kicks are still not wanted"
            );
        }

        // Whatever becomes of the old place is nobody's concern.
        old_tx.set_avail_idx(30_000);
        old_rx.set_avail_idx(30_000);
        let report = transmit(&mut world.device_rx, &[frame(7, 64)]);
        assert_eq!(
            (report.frames, report.dropped),
            (1, 0),
            "into the one posted"
        );
        assert_eq!(world.rx.split().used_idx(), 4);
        assert_eq!(world.rx.split().used_entry(3).id, 0);
        let addr = world.tx_buffer(9);
        let len = world.write_frame(addr, &frame(8, 64));
        let polled = world.send_chain(9, &[RawDesc::readable(addr, len)]);
        assert_eq!(polled.frames, [frame(8, 64)]);
        assert_eq!(world.tx.take_used(), [used(9, 0)]);
        // The driver half counts on from here.
        world.rx = RawRing::new(memory, rx_areas, 4).into();
        world.tx_passes();
        world.rx_passes();
        assert_eq!((old_tx.used_idx(), old_rx.used_idx()), (3, 3));
    }
}

#[test]
fn a_ring_that_cannot_be_moved_is_unchanged() {
    let mut world = World::of_size(256, MODERN);
    world.tx_passes();
    world.rx_passes();
    let addr = world.tx_buffer(0);
    let len = world.write_frame(addr, &frame(1, 60));
    world.tx.offer_chain(0, &[RawDesc::readable(addr, len)]);
    world.tx.publish();
    let [tx, rx] = [world.guest.tx_config(), world.guest.rx_config()].map(|config| config.areas);
    let outside = world.end();
    let bad = |areas: RingAreas| {
        [
            RingAreas {
                used_addr: outside,
                ..areas
            },
            RingAreas {
                desc_addr: areas.desc_addr + 8,
                ..areas
            },
        ]
    };
    let small = |areas| RingAreas { size: 128, ..areas };
    for (tx, rx) in bad(tx).into_iter().zip(bad(rx)) {
        // In other memory, which must not stay either.
        let again = mapped_again(&world.guest);
        assert!(world.device_tx.relocate(Arc::clone(&again), tx).is_err());
        assert!(world.device_rx.relocate(Arc::clone(&again), rx).is_err());
        assert_eq!(Arc::strong_count(&again), 1);
    }
    let memory = Arc::clone(&world.guest.memory);
    let refused = Err(RingError::Size { size: 128 });
    let moved = world.device_tx.relocate(Arc::clone(&memory), small(tx));
    assert_eq!(moved, refused, "a ring keeps its size");
    assert_eq!(world.device_rx.relocate(memory, small(rx)), refused);

    assert_eq!(poll(&mut world.device_tx).frames, [frame(1, 60)]);
    world.tx_passes();
    world.rx_passes();
}

#[test]
fn a_broken_ring_stays_broken_wherever_it_lies() {
    let mut world = World::of_size(16, MODERN);
    world.tx.split().set_avail_idx(17);
    assert_eq!(poll(&mut world.device_tx).chains, 0);
    let fault = Some(RingFault::AvailIndex { from: 0, to: 17 });
    assert_eq!(world.device_tx.fault(), fault);
    world.tx.split().set_avail_idx(0);
    let again = mapped_again(&world.guest);
    let areas = world.guest.tx_config().areas;
    assert_eq!(world.device_tx.relocate(again, areas), Ok(()));
    drop(world.device_tx.set_call(Some(eventfd())));
    assert_eq!(world.device_tx.fault(), fault);
    assert_eq!(poll(&mut world.device_tx).chains, 0);
}

#[test]
fn a_disabled_ring_gives_every_chain_back_without_its_frame() {
    const COUNT: u16 = 100;
    let mut world = World::of_size(256, MODERN);
    world.tx_passes();
    world.device_tx.set_discard(true);
    let end = world.end();
    for index in 0..COUNT {
        let addr = world.tx_buffer(index);
        let len = world.write_frame(addr, &frame(1, 60));
        // Also chains that would be bad: they are not looked at.
        let desc = match index % 3 {
            0 => RawDesc::readable(addr, len),
            1 => RawDesc::readable(end, len),
            _ => RawDesc::readable(addr, 1).then(index),
        };
        world.tx.offer_chain(index, &[desc]);
    }
    world.tx.publish();

    // Nothing is taken before the end of a burst, as of any other.
    let burst = world.device_tx.receive(BurstLimit::MAX);
    assert_eq!(burst.returns().chains(), 64);
    assert!(world.tx.take_used().is_empty());
    let limit = BurstLimit {
        frames: 3,
        ..BurstLimit::MAX
    };
    let mut given_back = 0;
    for (limit, chains) in [(limit, 3), (BurstLimit::MAX, 64), (BurstLimit::MAX, 33)] {
        let polled = poll_with(&mut world.device_tx, limit);
        assert_eq!((polled.chains, polled.units), (chains, chains));
        assert_eq!(
            polled.drops,
            vec![DropReason::QueueDisabled; chains as usize]
        );
        let back: Vec<_> = (given_back..)
            .take(chains as usize)
            .map(|id| used(id, 0))
            .collect();
        assert_eq!(world.tx.take_used(), back, "in order");
        given_back += u16::try_from(chains).expect("at most 64");
    }
    assert_eq!(given_back, COUNT);
    assert_eq!(poll(&mut world.device_tx).chains, 0);
    assert_eq!(world.device_tx.chain_errors(), ChainErrorCounts::default());
    assert_eq!(world.device_tx.fault(), None);

    // Enabled again, and nothing of what was discarded comes back.
    world.device_tx.set_discard(false);
    world.tx_passes();
}

#[test]
fn a_disabled_ring_breaks_like_others() {
    let mut world = World::of_size(16, MODERN);
    world.device_tx.set_discard(true);
    world.tx.split().offer(16);
    world.tx.publish();
    assert_eq!(poll(&mut world.device_tx).chains, 0);
    let fault = Some(RingFault::Head { head: 16 });
    assert_eq!(world.device_tx.fault(), fault);
    world.neighbour_passes();
}

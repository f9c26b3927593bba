//! Hostile and unusual guests, the part about indices, used entries and
//! notifications; the table is in `bugs_table.rs`. What packed rings have in the
//! place of indices and event indices is in `hostile_packed.rs`.

mod common;

use common::{
    LEGACY, MODERN, UNMERGED, World, base_of, frame, in_every_layout, poll, transmit, used,
};
use pollux_packet::DropReason;
use pollux_sys::EventFd;
use pollux_testkit::{Guest, GuestSpec, RawDesc};
use pollux_virtio::Features;
use pollux_virtio::device::{BurstLimit, RingFault};
use pollux_virtio::driver::ChainShape;

#[test]
fn b18_the_first_signal_after_a_start_is_unconditional() {
    for base in [40_000_u16, 0, 65_535] {
        // The driver waits for an entry that was returned before the restart,
        // or for one that is far away.
        for event in [base.wrapping_sub(1), base.wrapping_add(20_000)] {
            let spec = GuestSpec {
                base,
                features: Features {
                    event_idx: true,
                    ..MODERN
                },
                ..GuestSpec::default()
            };
            let [tx_call, rx_call] = [(); 2].map(|()| EventFd::new().expect("eventfd"));
            let mut world = World::with_calls(spec, Some(&tx_call), Some(&rx_call));
            world.tx.split().set_used_event(event);
            world.rx.split().set_used_event(event);
            world.tx_passes();
            world.rx_passes();
            assert_eq!((tx_call.drain(), rx_call.drain()), (1, 1));
            world.tx_passes();
            world.rx_passes();
            assert_eq!((tx_call.drain(), rx_call.drain()), (0, 0), "not the second");
            for notifications in [
                world.device_tx.notifications(),
                world.device_rx.notifications(),
            ] {
                assert_eq!(
                    (notifications.calls_sent, notifications.calls_suppressed),
                    (1, 1)
                );
            }
            // Nor is one lost that is asked for.
            for ring in [&mut world.tx, &mut world.rx] {
                let ring = ring.split();
                ring.set_used_event(ring.used_idx());
            }
            world.tx_passes();
            world.rx_passes();
            assert_eq!((tx_call.drain(), rx_call.drain()), (1, 1));
        }
    }
}

#[test]
fn b19_index_jumps_break_that_ring_alone() {
    const SIZE: u16 = 16;
    for base in [0, 40_000, 65_530] {
        // The last one goes back by one.
        for jump in [SIZE + 1, 100, 32_768, 65_535] {
            let mut world = World::new(GuestSpec {
                base,
                ring_size: SIZE,
                ..GuestSpec::default()
            });
            for _ in 0..3 {
                world.tx_passes();
                world.rx_passes();
            }
            let from = base.wrapping_add(3);
            let to = from.wrapping_add(jump);
            let fault = Some(RingFault::AvailIndex { from, to });
            world.tx.split().set_avail_idx(to);
            world.rx.split().set_avail_idx(to);
            assert_eq!(poll(&mut world.device_tx).chains, 0);
            assert_eq!(world.device_tx.fault(), fault);
            let report = transmit(&mut world.device_rx, &[frame(1, 60), frame(2, 60)]);
            assert_eq!(report.drops.get(DropReason::PortDown), 2);
            assert_eq!(world.device_rx.fault(), fault);
            // It stays so, also when the index looks good again.
            world.tx.split().set_avail_idx(from.wrapping_add(1));
            world.rx.split().set_avail_idx(from.wrapping_add(1));
            assert_eq!(poll(&mut world.device_tx).chains, 0);
            assert!(!world.device_tx.request_kick());
            let report = transmit(&mut world.device_rx, &[frame(1, 60)]);
            assert_eq!(report.drops.get(DropReason::PortDown), 1);
            assert_eq!(world.device_tx.fault(), fault);
            // GET_VRING_BASE still answers.
            assert_eq!(
                (world.device_tx.base(), world.device_rx.base()),
                (from, from)
            );
            assert!(world.tx.take_used().is_empty());
            world.neighbour_passes();
        }
    }
}

/// Chains that were seen and not returned yet may be in use.
#[test]
fn b19_an_index_never_goes_back_behind_what_was_seen() {
    for base in [0_u16, 65_534] {
        let mut world = World::new(GuestSpec {
            base,
            ring_size: 16,
            ..GuestSpec::default()
        });
        for index in 0..3 {
            let addr = world.tx_buffer(index);
            let len = world.write_frame(addr, &frame(index.into(), 60));
            world.tx.offer_chain(index, &[RawDesc::readable(addr, len)]);
        }
        world.tx.publish();
        let burst = world.device_tx.receive(BurstLimit::MAX);
        assert_eq!(burst.batch.len(), 3);
        burst.finish(1);
        let (from, to) = (base.wrapping_add(1), base.wrapping_add(2));
        world.tx.split().set_avail_idx(to);
        assert!(poll(&mut world.device_tx).chains <= 2, "what was seen");
        let fault = Some(RingFault::AvailIndex { from, to });
        assert_eq!(world.device_tx.fault(), fault);
        assert_eq!(poll(&mut world.device_tx).chains, 0);
        world.rx_passes();
    }
}

#[test]
fn heads_outside_the_table_break_that_ring_alone() {
    for head in [8, 9, 0x8000, 0xffff] {
        let mut world = World::of_size(8, MODERN);
        let addr = world.tx_buffer(0);
        let sent = frame(1, 60);
        let len = world.write_frame(addr, &sent);
        world.tx.offer_chain(0, &[RawDesc::readable(addr, len)]);
        world.tx.split().offer(head);
        world.tx.publish();
        assert_eq!(
            poll(&mut world.device_tx).frames,
            std::slice::from_ref(&sent)
        );
        assert_eq!(
            world.tx.take_used(),
            [used(0, 0)],
            "what came before is kept"
        );
        assert_eq!(poll(&mut world.device_tx).chains, 0);
        let fault = Some(RingFault::Head { head });
        assert_eq!(world.device_tx.fault(), fault);
        assert_eq!(world.device_tx.base(), 1);

        let addr = world.rx_buffer(0);
        world.rx.offer_chain(0, &[RawDesc::writable(addr, 2048)]);
        world.rx.split().offer(head);
        world.rx.publish();
        let report = transmit(&mut world.device_rx, &[sent.clone(), sent]);
        assert_eq!((report.frames, report.dropped), (1, 1));
        assert_eq!(report.drops.get(DropReason::PortDown), 1);
        assert_eq!(world.rx.take_used(), [used(0, 72)]);
        assert_eq!(world.device_rx.fault(), fault);
        world.neighbour_passes();
    }
}

#[test]
fn the_device_keeps_its_own_position_in_the_used_ring() {
    let mut world = World::of_size(8, MODERN);
    for idx in [5, 0x8000, 0xffff] {
        world.tx.split().set_used_idx(idx);
        world.rx.split().set_used_idx(idx);
        // The next publication repairs what the driver has done to itself.
        let position = world.tx.split().position();
        world.tx.offer_chain(0, &[RawDesc::default()]);
        world.tx.publish();
        assert_eq!(poll(&mut world.device_tx).drops, [DropReason::Runt]);
        assert_eq!(world.tx.split().used_idx(), position.wrapping_add(1));
        world.post_chain(0, &[RawDesc::writable(world.rx_buffer(0), 100)]);
        assert_eq!(transmit(&mut world.device_rx, &[frame(1, 60)]).frames, 1);
        assert_eq!(world.rx.split().used_idx(), position.wrapping_add(1));
        world.tx_passes();
        world.rx_passes();
    }
}

#[test]
fn b21_used_entries_of_a_split_ring_name_the_head_and_the_bytes_written() {
    const SIZE: u16 = 16;
    let mut world = World::of_size(SIZE, MODERN);
    // A TX chain whose head is not its lowest descriptor.
    let addr = world.tx_buffer(0);
    let sent = frame(3, 60);
    let len = world.write_frame(addr, &sent);
    let first = RawDesc::readable(addr, 12);
    let second = RawDesc::readable(addr + 12, len - 12);
    world.tx.split().set_desc(9, first.then(2));
    world.tx.split().set_desc(2, second);
    world.tx.split().offer(9);
    world.tx.publish();
    assert_eq!(poll(&mut world.device_tx).frames, [sent]);
    assert_eq!(world.tx.take_used(), [used(9, 0)]);

    // One frame over three receive chains of two buffers each.
    for (chain, head, next) in [(0, 7, 3), (1, 11, 0), (2, 5, 12)] {
        let addr = world.rx_buffer(chain);
        let one = RawDesc::writable(addr, 40);
        world.rx.split().set_desc(head, one.then(next));
        let two = RawDesc::writable(addr + 100, 60);
        world.rx.split().set_desc(next, two);
        world.rx.split().offer(head);
    }
    world.rx.publish();
    let sent = frame(4, 250);
    let report = transmit(&mut world.device_rx, std::slice::from_ref(&sent));
    assert_eq!((report.frames, report.bytes), (1, 250));
    let returned = world.rx.take_used();
    assert_eq!(returned, [used(7, 100), used(11, 100), used(5, 62)]);
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

#[test]
fn b22_num_buffers_of_every_kind_of_driver() {
    for features in in_every_layout(&[MODERN, UNMERGED, LEGACY]) {
        let mut world = World::of_size(8, features);
        let addr = world.rx_buffer(0);
        let header = world.header_bytes() as usize;
        world.rx.write(addr, &[0xee; 200]);
        let cuts = [RawDesc::writable(addr, 7), RawDesc::writable(addr + 7, 150)];
        for chain in [&[RawDesc::writable(addr, 157)][..], &cuts] {
            world.post_chain(0, chain);
            let sent = frame(5, 60);
            transmit(&mut world.device_rx, std::slice::from_ref(&sent));
            let bytes = world.rx.read(addr, header + 61);
            let wanted = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
            assert_eq!(bytes[..header], wanted[..header], "{features:?}");
            assert_eq!(bytes[header..header + 60], sent);
            assert_eq!(bytes[header + 60], 0xee);
        }
        world.rx_passes();
    }
}

#[test]
fn b25_header_and_frame_cut_anywhere() {
    for features in in_every_layout(&[MODERN, LEGACY]) {
        let mut world = World::of_size(8, features);
        let addr = world.tx_buffer(0);
        let sent = frame(6, 60);
        let len = world.write_frame(addr, &sent);
        for cut in 0..=len {
            let chain = [
                RawDesc::readable(addr, cut),
                RawDesc::readable(addr + u64::from(cut), len - cut),
            ];
            let polled = world.send_chain(0, &chain);
            assert_eq!(polled.frames, std::slice::from_ref(&sent), "cut at {cut}");
            assert_eq!(world.tx.take_used(), [used(0, 0)]);
        }
        world.tx_passes();
    }
}

#[test]
fn b27_all_of_a_frames_buffers_or_none() {
    in_every_layout(&[MODERN]).for_each(all_buffers_or_none);
}

fn all_buffers_or_none(features: Features) {
    let mut guest = Guest::new(GuestSpec {
        ring_size: 32,
        features,
        base: base_of(features, 65_000, 32),
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (_, mut device) = guest.device();
    let needs_five = frame(1, 5 * 100 - 12);
    // Round the 16-bit positions more than once.
    for round in 0..14_000_u32 {
        for _ in 0..3 {
            guest.rx.post(100, ChainShape::JOINED).expect("room");
        }
        guest.rx.publish();
        let base = device.base();
        let report = transmit(&mut device, std::slice::from_ref(&needs_five));
        assert_eq!(report.drops.get(DropReason::RxRingFull), 1);
        assert_eq!(device.base(), base, "nothing is taken");
        let small = frame(round, 80);
        if round % 2 == 0 {
            // A frame that fits may pass it, and takes one buffer.
            let both = [needs_five.clone(), small.clone()];
            let report = transmit(&mut device, &both);
            assert_eq!((report.frames, report.dropped), (1, 1));
            guest.rx.post(100, ChainShape::JOINED).expect("room");
        }
        for _ in 0..2 {
            guest.rx.post(100, ChainShape::JOINED).expect("room");
        }
        guest.rx.publish();
        let report = transmit(&mut device, std::slice::from_ref(&needs_five));
        assert_eq!((report.frames, report.dropped), (1, 0));
        let mut got = Vec::new();
        let count = guest.rx.receive(9, |received| {
            got.push((received.num_buffers(), received.to_vec()));
        });
        let big = (5, needs_five.clone());
        if round % 2 == 0 {
            assert_eq!(got, [(1, small), big]);
        } else {
            assert_eq!(got, [big]);
        }
        assert_eq!(count.map(|count| count as usize), Ok(got.len()));
        assert_eq!(guest.rx.unused(), 0);
        assert_eq!(device.fault(), None);
        assert_eq!(guest.rx.ring().free_len(), 32);
    }
}

//! Where frames go, that they arrive as they were sent and in order, and that
//! every one of them is counted once.

mod common;

use common::{BYTES, Bed, attach, config, cross_connect, key, plan, port_name};
use pollux_datapath::{PlannedMode, QueueState, SwitchConfig, Time};
use pollux_packet::DropReason;
use pollux_switch::{FdbConfig, MacVlan};
use pollux_testkit::{Device, EVERYBODY, GuestSpec, Random, mac_of, plain_frame, skip, wait_until};
use pollux_virtio::Features;
use pollux_virtio::driver::ChainShape;

/// Frames of a flow that each station got since the test began.
fn received(bed: &Bed, from: u16, to: u16) -> Vec<u64> {
    bed.stations
        .iter()
        .map(|station| station.flow(from, to).received)
        .collect()
}

#[test]
fn unknown_floods_and_a_reply_is_unicast() {
    let mut bed = Bed::new(4, 1);
    bed.send(0, 1, 8);
    assert_eq!(received(&bed, 0, 1), [0, 8, 8, 8]);
    let counters = bed.counters(0);
    assert_eq!(
        (counters.flooded, counters.unicast, counters.copies),
        (8, 0, 24)
    );
    assert_eq!(counters.rx_bytes, 8 * u64::from(BYTES));

    bed.send(1, 0, 8);
    assert_eq!(received(&bed, 1, 0), [8, 0, 0, 0]);
    bed.send(0, 1, 8);
    assert_eq!(received(&bed, 0, 1), [0, 16, 8, 8]);
    let counters = bed.counters(0);
    assert_eq!(
        (counters.flooded, counters.unicast, counters.copies),
        (8, 8, 32)
    );
    assert_eq!((counters.tx_frames, counters.tx_bytes), (8, 512));
}

#[test]
fn broadcast_and_multicast_go_to_all_but_the_sender() {
    let mut bed = Bed::new(3, 2);
    bed.teach();
    bed.send(0, EVERYBODY, 5);
    assert_eq!(received(&bed, 0, EVERYBODY), [0, 6, 6]);

    let group = [0x01, 0x00, 0x5e, 1, 2, 3];
    let frame = plain_frame(group, mac_of(2), BYTES, 1);
    assert!(bed.station(2).send_frame(&frame, ChainShape::JOINED));
    bed.station(2).publish();
    bed.settle();
    for (station, expected) in [(0, 1), (1, 1), (2, 0)] {
        assert_eq!(bed.station(station).take_others().len(), expected);
    }
    assert_eq!(bed.switch.fdb().stats().learned_entries, 3);
}

/// Sends one frame as it is and waits until it was counted.
fn send_plain(bed: &mut Bed, from: u16, dst: [u8; 6], src: [u8; 6]) {
    let frame = plain_frame(dst, src, BYTES, 0);
    assert!(bed.station(from).send_frame(&frame, ChainShape::JOINED));
    bed.station(from).publish();
    bed.settle();
}

#[test]
fn drops_before_a_destination_have_a_reason() {
    let mut bed = Bed::new(2, 1);
    bed.teach();
    let lldp = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
    send_plain(&mut bed, 0, lldp, mac_of(0));
    assert_eq!(bed.drops(0, DropReason::ReservedMulticast), 1);

    let neighbour = [2, 0, 0, 0, 0, 9];
    send_plain(&mut bed, 0, mac_of(1), neighbour);
    send_plain(&mut bed, 0, neighbour, mac_of(0));
    assert_eq!(bed.drops(0, DropReason::SamePort), 1);

    for bytes in [0, 1, 13] {
        let runt = vec![0; bytes];
        assert!(bed.station(0).send_frame(&runt, ChainShape::JOINED));
    }
    bed.station(0).publish();
    bed.settle();
    assert_eq!(bed.drops(0, DropReason::Runt), 3);

    let mut header = [0; 12];
    // VIRTIO_NET_HDR_F_NEEDS_CSUM, which was not negotiated.
    header[0] = 1;
    let frame = plain_frame(mac_of(1), mac_of(0), BYTES, 0);
    let sent = bed
        .station(0)
        .guest
        .tx
        .send_with_header(&header, &frame, ChainShape::JOINED);
    sent.unwrap();
    bed.station(0).publish();
    wait_until("the frame is dropped", || {
        bed.drops(0, DropReason::BadOffload) == 1
    });
    bed.assert_identities();
    let counters = bed.counters(0);
    assert_eq!((counters.rx_frames, counters.rx_drops()), (8, 6));
    assert_eq!(bed.counters(1).tx_drops(), 0);

    // The same frame passes when the plan says so, without a new port.
    let mut plan = bed.switch.plan();
    plan.forward_bpdu = true;
    let id = bed.switch.port("p0").unwrap().identity();
    bed.switch.apply(&plan).unwrap();
    assert_eq!(bed.switch.port("p0").unwrap().identity(), id);
    let before = bed.counters(1).tx_frames;
    let frame = plain_frame(lldp, mac_of(0), BYTES, 0);
    assert!(bed.station(0).send_frame(&frame, ChainShape::JOINED));
    bed.station(0).publish();
    wait_until("the frame is flooded", || {
        bed.poll();
        bed.counters(1).tx_frames == before + 1
    });
    assert_eq!(bed.drops(0, DropReason::ReservedMulticast), 1);
}

#[test]
fn a_port_alone_has_no_destination() {
    let mut bed = Bed::new(1, 1);
    bed.send(0, 1, 3);
    bed.send(0, EVERYBODY, 2);
    assert_eq!(bed.drops(0, DropReason::NoDestination), 5);
    assert_eq!(bed.counters(0).copies, 0);
}

#[test]
fn a_port_without_a_queue_is_down_and_left_out_of_floods() {
    let mut bed = Bed::new(3, 1);
    bed.teach();
    let port = bed.switch.port("p1").unwrap();
    let stopped = port.stop_tx().unwrap();
    let before = bed.counters(0);
    // In one batch.
    for _ in 0..4 {
        assert!(bed.station(0).send(1, BYTES));
        assert!(bed.station(0).send(EVERYBODY, BYTES));
    }
    bed.station(0).publish();
    bed.settle();
    assert_eq!(bed.drops(1, DropReason::PortDown), 4, "of unicast alone");
    let counted = bed.counters(0).since(&before);
    assert_eq!((counted.unicast, counted.flooded), (4, 4));
    assert_eq!(counted.copies, 8, "not one for the port that is down");
    assert_eq!(received(&bed, 0, EVERYBODY), [0, 1, 5]);
    // It can still send.
    bed.send(1, 0, 2);
    assert_eq!(received(&bed, 1, 0), [2, 0, 0]);

    // With no other port up a flooded frame is dropped, and that has a name.
    let other = bed.switch.port("p2").unwrap().stop_tx();
    assert!(other.is_some());
    bed.send(0, EVERYBODY, 3);
    let counted = bed.counters(0).since(&before);
    assert_eq!((counted.flooded, counted.copies), (4, 8));
    assert_eq!(bed.drops(0, DropReason::NoDestination), 3);
    assert_eq!(bed.counters(2).tx_drops(), 0);

    assert!(port.start_tx(stopped).unwrap().is_none());
    bed.send(0, EVERYBODY, 2);
    assert_eq!(received(&bed, 0, EVERYBODY), [0, 3, 5]);
}

#[test]
fn addresses_of_a_guest_that_went_away_are_forgotten() {
    let mut bed = Bed::new(3, 2);
    bed.teach();
    let port = bed.switch.port("p1").unwrap();
    bed.switch
        .fdb()
        .add_static(key(7), port.identity())
        .unwrap();
    let known = |bed: &Bed| [0, 1, 2, 7].map(|s| bed.switch.fdb().lookup(key(s)).is_some());
    let _rx = port.stop_rx().unwrap();
    assert_eq!(known(&bed), [true; 4], "it still receives");
    let _tx = port.stop_tx().unwrap();
    assert_eq!(known(&bed), [true, false, true, true]);
    bed.send(0, 1, 4);
    assert_eq!(received(&bed, 0, 1), [0, 0, 4], "it may be there now");
    assert_eq!(bed.drops(1, DropReason::PortDown), 0);
    let generation = bed.switch.fdb().generation();
    assert!(port.stop_rx().is_none() && port.stop_tx().is_none());
    assert_eq!(bed.switch.fdb().generation(), generation, "nothing changed");

    // In the other order.
    let device = Device::of(&bed.station(1).guest);
    attach(&bed.switch, 1, &device);
    bed.send(1, 0, 1);
    let _tx = port.stop_tx().unwrap();
    assert_eq!(known(&bed), [true; 4], "it still sends");
    let _rx = port.stop_rx().unwrap();
    assert_eq!(known(&bed), [true, false, true, true]);
}

#[test]
fn group_and_zero_sources_are_not_learned() {
    let mut bed = Bed::new(2, 1);
    for src in [[0; 6], [0xff; 6], [0x01, 0x00, 0x5e, 1, 2, 3]] {
        send_plain(&mut bed, 0, mac_of(1), src);
    }
    assert_eq!(bed.counters(0).flooded, 3);
    assert_eq!(bed.switch.fdb().stats().learned_entries, 0);
}

#[test]
fn vlans_are_apart() {
    let mut bed = Bed::new(3, 1);
    let tagged = |bed: &mut Bed, from: u16, to: u16, vlan| {
        assert!(bed.station(from).send_tagged(to, BYTES, vlan));
        bed.station(from).publish();
        bed.settle();
    };
    tagged(&mut bed, 1, 0, Some(5));
    tagged(&mut bed, 0, 1, Some(5));
    assert_eq!(received(&bed, 0, 1), [0, 1, 0], "known in VLAN 5");
    tagged(&mut bed, 0, 1, Some(6));
    assert_eq!(received(&bed, 0, 1), [0, 2, 1], "unknown in VLAN 6");
    tagged(&mut bed, 0, 1, None);
    assert_eq!(received(&bed, 0, 1), [0, 3, 2], "unknown without a tag");

    // One address on two ports, in two VLANs.
    let twin = [2, 0, 0, 0, 0, 9];
    let fdb = bed.switch.fdb();
    for (port, vlan) in [(1, 7), (2, 8)] {
        let identity = bed.switch.port(&port_name(port)).unwrap().identity();
        fdb.add_static(MacVlan::new(twin, vlan), identity).unwrap();
    }
    for (vlan, station) in [(7_u16, 1_u16), (8, 2)] {
        let mut frame = plain_frame(twin, mac_of(0), BYTES, 0);
        frame[12..14].copy_from_slice(&[0x81, 0x00]);
        frame[14..16].copy_from_slice(&vlan.to_be_bytes());
        frame[16..18].copy_from_slice(&[0x88, 0xb6]);
        assert!(bed.station(0).send_frame(&frame, ChainShape::JOINED));
        bed.station(0).publish();
        bed.settle();
        assert_eq!(bed.station(station).take_others(), [frame]);
        assert_eq!(bed.station(3 - station).take_others().len(), 0);
    }
}

#[test]
fn wires_connect_pairs_and_nothing_else() {
    let mut plan = plan(5, 1);
    plan.mode = cross_connect(&[(0, 1), (2, 3)]);
    let mut bed = Bed::with(config(), &plan, &[GuestSpec::default(); 5]);
    bed.send(0, EVERYBODY, 3);
    assert_eq!(received(&bed, 0, EVERYBODY), [0, 3, 0, 0, 0]);
    bed.send(1, 4, 3);
    assert_eq!(received(&bed, 1, 4), [3, 0, 0, 0, 0], "whatever is in it");
    bed.send(3, 0, 3);
    assert_eq!(received(&bed, 3, 0), [0, 0, 3, 0, 0]);
    send_plain(&mut bed, 2, [0x01, 0x80, 0xc2, 0, 0, 0], mac_of(2));
    assert_eq!(bed.station(3).take_others().len(), 1, "as on a wire");
    bed.send(4, 0, 2);
    assert_eq!(bed.drops(4, DropReason::NoDestination), 2);
    assert_eq!(bed.switch.fdb().stats().learned_entries, 0);
    assert_eq!(bed.counters(0).unicast, 3);
}

#[test]
fn the_mode_changes_while_frames_flow() {
    let mut bed = Bed::new(3, 2);
    bed.teach();
    let learn = bed.switch.plan();
    let mut wired = learn.clone();
    wired.mode = cross_connect(&[(0, 1)]);
    let mut changes = 0;
    bed.exchange_while(&[], |bed| {
        let next = [&wired, &learn][changes % 2];
        assert_eq!(bed.switch.apply(next).unwrap().len(), 1);
        changes += 1;
        bed.exchanged() < 4000
    });
    assert!(changes > 10, "the mode changed {changes} times");
    assert_eq!(bed.counters(2).tx_frames, 2, "known all the time");
    assert_eq!(
        bed.switch.plan().mode,
        [wired.mode, PlannedMode::Learn][(changes + 1) % 2]
    );
}

#[test]
fn addresses_age_and_are_refreshed() {
    let config = SwitchConfig {
        fdb: FdbConfig {
            ageing_seconds: 300,
            ..config().fdb
        },
        ..config()
    };
    let mut bed = Bed::with(config, &plan(3, 1), &[GuestSpec::default(); 3]);
    bed.teach();
    let advance = |bed: &Bed, seconds| {
        bed.switch.advance_seconds(seconds);
        bed.turns();
    };
    advance(&bed, 200);
    bed.send(1, 0, 1);
    advance(&bed, 100);
    bed.send(0, 1, 1);
    assert_eq!(received(&bed, 0, 1), [0, 1, 0], "unicast after 300 seconds");
    advance(&bed, 1);
    let known = |bed: &Bed| [0, 1, 2].map(|s| bed.switch.fdb().lookup(key(s)).is_some());
    assert_eq!(known(&bed), [true, true, false], "seen at 300, 200, and 0");
    advance(&bed, 200);
    assert_eq!(known(&bed), [true, false, false]);
    bed.send(0, 1, 1);
    assert_eq!(received(&bed, 0, 1), [0, 2, 1], "flooded again");
    assert_eq!(bed.switch.fdb().stats().aged, 2);
}

#[test]
fn in_real_time_addresses_age_by_themselves() {
    let config = SwitchConfig {
        fdb: FdbConfig {
            ageing_seconds: 1,
            ..config().fdb
        },
        time: Time::Real,
        ..config()
    };
    let mut bed = Bed::with(config, &plan(2, 1), &[GuestSpec::default(); 2]);
    bed.teach();
    wait_until("both addresses are forgotten", || {
        bed.switch.fdb().stats().learned_entries == 0
    });
    assert_eq!(bed.switch.fdb().stats().aged, 2);
}

#[test]
fn static_addresses_neither_move_nor_age() {
    let mut bed = Bed::new(3, 1);
    let identity = bed.switch.port("p1").unwrap().identity();
    bed.switch.fdb().add_static(key(7), identity).unwrap();
    bed.send(0, 7, 2);
    assert_eq!(received(&bed, 0, 7), [0, 2, 0]);
    // Another port claims the address.
    send_plain(&mut bed, 2, mac_of(0), mac_of(7));
    bed.switch.advance_seconds(10_000);
    bed.turns();
    bed.send(0, 7, 2);
    assert_eq!(received(&bed, 0, 7), [0, 4, 0]);
}

#[test]
fn a_new_port_inherits_nothing_from_the_number_before() {
    let mut bed = Bed::new(3, 1);
    bed.teach();
    let before = bed.switch.port("p2").unwrap().identity();
    bed.switch.fdb().add_static(key(7), before).unwrap();
    bed.send(0, 2, 4);
    assert_eq!(bed.counters(2).tx_frames, 6);
    assert_eq!(bed.switch.fdb().port_learned_entries(before.id()), 1);

    let full = bed.switch.plan();
    let mut less = full.clone();
    less.ports.truncate(2);
    let removed = bed.switch.port("p2").unwrap();
    bed.switch.apply(&less).unwrap();
    assert!(bed.switch.port("p2").is_none());
    // Who still holds the port does not hold its queues.
    for state in [removed.rx_state(), removed.tx_state()] {
        assert_eq!(state, QueueState::Removed);
    }
    assert!(bed.switch.port_counters("p2").is_none());
    for address in [2, 7] {
        assert_eq!(bed.switch.fdb().lookup(key(address)), None);
    }
    for station in [0, 1] {
        assert!(bed.switch.fdb().lookup(key(station)).is_some());
    }

    // The number comes back, for the same name and then for another.
    bed.switch.apply(&full).unwrap();
    let after = bed.switch.port("p2").unwrap().identity();
    assert_eq!(after.id(), before.id());
    assert_ne!(after, before);
    assert_eq!(bed.counters(2), Default::default());
    for address in [2, 7] {
        assert_eq!(bed.switch.fdb().lookup(key(address)), None);
    }
    assert!(bed.switch.fdb().add_static(key(7), before).is_err());
    bed.attach(2);
    bed.send(0, 2, 3);
    assert_eq!(received(&bed, 0, 2), [0, 3, 7], "flooded: it is unknown");
    bed.send(2, 0, 1);
    bed.send(0, 2, 1);
    assert_eq!(received(&bed, 0, 2), [0, 3, 8]);
    assert_eq!(bed.counters(2).tx_frames, 4);

    let mut renamed = full.clone();
    renamed.ports[2].name = "other".to_owned();
    bed.switch.apply(&renamed).unwrap();
    let other = bed.switch.port("other").unwrap().identity();
    assert_eq!(other.id(), before.id());
    assert_eq!(bed.switch.port_counters("other"), Some(Default::default()));
    assert_eq!(bed.switch.fdb().lookup(key(2)), None);
}

/// A source that can send the longest frame, and what is done with it.
fn giant(features: Features) -> GuestSpec {
    GuestSpec {
        ring_size: 64,
        features,
        // With the gaps between the pieces of a chain.
        buffer_bytes: (65_535_u32 + 12 + 128).next_multiple_of(4096),
        ..GuestSpec::default()
    }
}

const MERGEABLE: Features = Features {
    version_1: true,
    mergeable: true,
    event_idx: true,
    ..Features::LEGACY
};
const LEGACY: Features = Features {
    version_1: false,
    mergeable: false,
    event_idx: false,
    ..Features::LEGACY
};

#[test]
fn frames_of_every_length_arrive_as_they_were_sent() {
    let small = GuestSpec {
        features: MERGEABLE,
        ring_size: 512,
        regions: 7,
        ..GuestSpec::default()
    };
    let specs = [giant(MERGEABLE), small, giant(LEGACY)];
    let mut bed = Bed::with(config(), &plan(3, 1), &specs);
    let mut random = Random::new(11);
    let edges = [14, 15, 17, 18, 52, 63, 64, 65, 255, 256, 257, 1514, 1524]
        .into_iter()
        .chain([1525, 2036, 2037, 9000, 65_534, 65_535]);
    let lengths: Vec<_> = edges
        .chain((0..150).map(|_| {
            let end = *random.choose(&[200, 1600, 65_522]);
            14 + random.below(end)
        }))
        .collect();
    let shapes: [&[u32]; 6] = [
        &[],
        &[12],
        &[5],
        &[12, 14, 1],
        &[13, 0, 70, 400],
        &[26, 999],
    ];
    for (number, &length) in (0_u64..).zip(&lengths) {
        let shape = ChainShape {
            cuts: shapes[random.below(6) as usize],
            indirect: random.one_in(3),
        };
        let from = [0_u16, 2][usize::from(random.one_in(2))];
        let frame = plain_frame([0xff; 6], mac_of(from), length, number);
        assert!(bed.station(from).send_frame(&frame, shape));
        bed.station(from).publish();
        bed.settle();
        for to in [1, 2 - from] {
            let frames = bed.station(to).take_others();
            assert!(
                frames == [frame.clone()],
                "{length} bytes in {shape:?} from {from} to {to}: {} frames",
                frames.len()
            );
        }
    }
    let count = u64::try_from(lengths.len()).unwrap();
    assert_eq!(bed.counters(1).tx_frames, count);
}

#[test]
fn a_frame_that_does_not_fit_an_unmerged_buffer_is_dropped_alone() {
    let narrow = GuestSpec {
        features: LEGACY,
        buffer_bytes: 1536,
        ..GuestSpec::default()
    };
    let specs = [giant(MERGEABLE), narrow];
    let mut bed = Bed::with(config(), &plan(2, 1), &specs);
    for bytes in [1526, 1527, 60, 9000, 61] {
        assert!(bed.station(0).send(1, bytes));
    }
    bed.station(0).publish();
    bed.settle();
    let flow = bed.stations[1].flow(0, 1);
    assert_eq!((flow.received, flow.lost), (3, 2));
    assert_eq!(bed.drops(1, DropReason::RxBufferTooSmall), 2);
}

#[test]
fn a_flow_stays_in_order_while_its_destination_is_learned_and_forgotten() {
    // Two workers: one learns in the middle of the other's batch.
    let mut bed = Bed::new(3, 2);
    let mut rounds = 0;
    bed.exchange_while(&[], |bed| {
        rounds += 1;
        if rounds % 3 == 0 {
            bed.switch.fdb().flush_all();
        }
        bed.exchanged() < 5000
    });
    for from in [0, 1] {
        let counters = bed.counters(from);
        assert!(counters.flooded > 0 && counters.unicast > 0, "{counters:?}");
    }
}

#[test]
fn positions_wrap() {
    let spec = GuestSpec {
        base: u16::MAX - 100,
        ring_size: 128,
        ..GuestSpec::default()
    };
    let mut bed = Bed::with(config(), &plan(2, 1), &[spec; 2]);
    bed.exchange(3000, &[]);
}

#[test]
fn pinned_workers_forward_like_others() {
    let cores = pollux_sys::available_cores();
    let &[first, second, ..] = &cores[..] else {
        skip(
            "pinned_workers_forward_like_others",
            "needs two cores to pin two workers",
        );
        return;
    };
    let mut plan = plan(2, 2);
    plan.workers[0].core = Some(first);
    plan.workers[1].core = Some(second);
    let mut bed = Bed::with(config(), &plan, &[GuestSpec::default(); 2]);
    bed.exchange(1000, &[]);
}

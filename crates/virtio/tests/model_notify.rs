//! The device half against the driver half: where a burst ends, what stays when
//! it is finished in part, and who notifies whom when.

mod common;

use common::{MODERN, frame, gather, poll, transmit};
use pollux_packet::DropReason;
use pollux_sys::EventFd;
use pollux_testkit::{Guest, GuestSpec, RawRing};
use pollux_virtio::device::{self, BurstLimit};
use pollux_virtio::driver::ChainShape;
use pollux_virtio::{ChainError, Features};

const EVENT_IDX: Features = Features {
    event_idx: true,
    ..MODERN
};

fn guest(features: Features, base: u16) -> Guest {
    Guest::new(GuestSpec {
        ring_size: 128,
        features,
        base,
        ..GuestSpec::default()
    })
    .expect("guest memory")
}

fn send(guest: &mut Guest, seed: u32, len: u32) {
    let sent = guest.tx.send(&frame(seed, len), ChainShape::JOINED);
    sent.expect("room");
}

/// Something to be dropped: shorter than an Ethernet header.
fn send_runt(guest: &mut Guest) {
    send(guest, 0, 5);
}

#[test]
fn a_burst_ends_at_its_limits_and_takes_at_least_one_chain() {
    let mut guest = guest(MODERN, 0);
    let (mut device, _) = guest.device();
    for round in 0..100 {
        send(&mut guest, round, 100);
    }
    guest.tx.publish();
    let mut taken = |limit: BurstLimit, wanted: usize| {
        let burst = device.receive(limit);
        assert_eq!(burst.batch.len(), wanted, "{limit:?}");
        // Nothing is taken: the next look sees the same.
        burst.returns().chains()
    };
    let max = BurstLimit::MAX;
    for frames in [1, 2, 63, 64] {
        let chains = taken(BurstLimit { frames, ..max }, usize::from(frames));
        assert_eq!(chains, u32::from(frames));
    }
    for (units, wanted) in [(0, 1), (1, 1), (2, 2), (64, 64), (1000, 64)] {
        taken(BurstLimit { units, ..max }, wanted);
    }
    for (bytes, wanted) in [(0, 1), (1, 1), (100, 1), (101, 2), (6300, 63), (6301, 64)] {
        taken(BurstLimit { bytes, ..max }, wanted);
    }
    // The strictest counts.
    let limit = BurstLimit {
        frames: 10,
        units: 5,
        bytes: 300,
    };
    taken(limit, 3);
    assert_eq!(poll(&mut device).chains, 64);
    assert_eq!(poll(&mut device).chains, 36);
    assert_eq!(poll(&mut device).chains, 0);

    // Units are descriptors, too: one a chain, one for each after its second.
    guest.tx.reclaim().expect("own chains");
    for (cuts, units) in [(0, 1), (1, 1), (2, 2), (3, 3), (9, 9)] {
        let cuts = vec![7; cuts];
        for indirect in [false, true] {
            let shape = ChainShape {
                cuts: &cuts,
                indirect,
            };
            guest.tx.send(&frame(1, 100), shape).expect("room");
            guest.tx.publish();
            let polled = poll(&mut device);
            // The table itself is a descriptor as well.
            let wanted = match (indirect, cuts.len()) {
                (true, 0) => 1,
                (true, len) => u32::try_from(len).expect("small") + 1,
                (false, _) => units,
            };
            assert_eq!(polled.units, wanted, "{shape:?}");
        }
    }
}

#[test]
fn a_burst_finished_in_part_leaves_the_rest_and_counts_drops_once() {
    for kept in 0..=6_usize {
        let mut guest = guest(MODERN, 65_533);
        let (mut device, _) = guest.device();
        // Drops before, between and behind frames.
        let mut sent = Vec::new();
        for seed in 0..6 {
            send_runt(&mut guest);
            send(&mut guest, seed, 60 + seed);
            sent.push(frame(seed, 60 + seed));
        }
        send_runt(&mut guest);
        guest.tx.publish();
        let taken = 6 - kept;
        let burst = device.receive(BurstLimit::MAX);
        assert_eq!(burst.batch.len(), 6);
        assert_eq!(burst.returns().drops().count(), 7);
        let returns = burst.finish(taken);
        let runts = u32::try_from(taken + 1).expect("small");
        let all = kept == 0;
        let chains = if all { 13 } else { 2 * runts - 1 };
        assert_eq!(returns.chains(), chains);
        assert_eq!(returns.drops().count(), if all { 7 } else { taken + 1 });
        assert_eq!(guest.tx.reclaim(), Ok(chains));
        let expected_base = 65_533_u16.wrapping_add(u16::try_from(chains).expect("small"));
        assert_eq!(device.base(), expected_base);

        let rest = poll(&mut device);
        assert_eq!(rest.frames, sent[taken..]);
        assert_eq!(rest.chains, 13 - chains);
        assert_eq!(
            rest.drops,
            vec![DropReason::Runt; if all { 0 } else { 6 - taken }]
        );
        assert_eq!(device.chain_errors().get(ChainError::Runt), 7, "once each");
        assert_eq!(guest.tx.reclaim(), Ok(13 - chains));
    }
}

/// One frame through the TX ring; true if the device called.
fn tx_called(guest: &mut Guest, device: &mut device::TxRing, call: &EventFd, count: u32) -> bool {
    for seed in 0..count {
        send(guest, seed, 60);
    }
    guest.tx.publish();
    let before = device.notifications();
    assert_eq!(poll(device).chains, count);
    let after = device.notifications();
    let called = call.drain() > 0;
    assert_eq!(after.calls_sent - before.calls_sent, u64::from(called));
    assert_eq!(
        after.calls_suppressed - before.calls_suppressed,
        u64::from(!called)
    );
    called
}

#[test]
fn calls_by_flag() {
    let mut guest = guest(MODERN, 0);
    let call = EventFd::new().expect("eventfd");
    let (mut device, _) = guest.device_with_calls(call.try_clone().ok(), None);
    assert!(tx_called(&mut guest, &mut device, &call, 3), "one for all");
    assert_eq!(guest.tx.reclaim(), Ok(3));
    guest.tx.ring().suppress_calls();
    assert!(!tx_called(&mut guest, &mut device, &call, 1));
    assert!(guest.tx.ring().request_call(), "something is there");
    assert_eq!(guest.tx.reclaim(), Ok(1));
    assert!(!guest.tx.ring().request_call());
    assert!(tx_called(&mut guest, &mut device, &call, 1));
    assert!(tx_called(&mut guest, &mut device, &call, 64));
    // An empty burst is no event.
    assert!(poll(&mut device).frames.is_empty());
    assert_eq!(call.drain(), 0);
}

#[test]
fn calls_by_event_index() {
    for base in [0, 65_500, 40_000] {
        let mut guest = guest(EVENT_IDX, base);
        let call = EventFd::new().expect("eventfd");
        let (mut device, _) = guest.device_with_calls(call.try_clone().ok(), None);
        assert!(tx_called(&mut guest, &mut device, &call, 1), "the first");
        assert_eq!(guest.tx.reclaim(), Ok(1));
        guest.tx.ring().suppress_calls();
        // The driver's wish is as far away as can be: never, while it polls.
        for _ in 0..500 {
            assert!(!tx_called(&mut guest, &mut device, &call, 7));
            assert_eq!(guest.tx.reclaim(), Ok(7));
            guest.tx.ring().suppress_calls();
        }
        // Armed: on the next one, and only once.
        assert!(!guest.tx.ring().request_call());
        assert!(tx_called(&mut guest, &mut device, &call, 1));
        assert!(!tx_called(&mut guest, &mut device, &call, 1));
        assert_eq!(guest.tx.reclaim(), Ok(2));
        // Armed for one in the middle of a burst.
        let areas = guest.tx_config().areas;
        let raw = RawRing::new(guest.memory.clone(), areas, base);
        let next = raw.used_idx();
        raw.set_used_event(next.wrapping_add(5));
        assert!(!tx_called(&mut guest, &mut device, &call, 5));
        assert!(tx_called(&mut guest, &mut device, &call, 3), "in it");
        assert!(!tx_called(&mut guest, &mut device, &call, 3), "behind it");
    }
}

#[test]
fn calls_for_received_frames() {
    for features in [MODERN, EVENT_IDX] {
        let mut guest = guest(features, 65_500);
        let call = EventFd::new().expect("eventfd");
        let (_, mut device) = guest.device_with_calls(None, call.try_clone().ok());
        guest.rx.refill();
        guest.rx.publish();
        // Several frames, one call.
        let frames = [frame(1, 60), frame(2, 60), frame(3, 3000)];
        assert_eq!(transmit(&mut device, &frames).frames, 3);
        assert_eq!(call.drain(), 1);
        assert_eq!(guest.rx.receive(9, |_| ()), Ok(3));
        guest.rx.ring().suppress_calls();
        assert_eq!(transmit(&mut device, &frames).frames, 3);
        assert_eq!(call.drain(), 0);
        assert!(guest.rx.ring().request_call());
        assert_eq!(guest.rx.receive(9, |_| ()), Ok(3));
        assert!(!guest.rx.ring().request_call());
        // A drop publishes nothing and calls nobody.
        assert_eq!(guest.rx.ring().free_len(), 8);
        let too_long = vec![frame(1, 65_535); 5];
        assert!(transmit(&mut device, &too_long).dropped > 0);
        call.drain();
        let report = transmit(&mut device, &too_long);
        assert_eq!((report.frames, call.drain()), (0, 0));
    }
}

#[test]
fn kicks_by_flag_and_event_index() {
    for features in [MODERN, EVENT_IDX] {
        for base in [0, 65_500] {
            let mut guest = guest(features, base);
            let (mut device, _) = guest.device();
            let kick = |guest: &mut Guest, count: u32| {
                for seed in 0..count {
                    send(guest, seed, 60);
                }
                guest.tx.publish()
            };
            if features.event_idx {
                // Without flags a wish holds until it is met, then for a whole
                // circle nothing is asked for.
                assert!(!device.request_kick());
                assert!(kick(&mut guest, 1));
                poll(&mut device);
                guest.tx.reclaim().expect("own chains");
            }
            // The ring is polled: no kick.
            for _ in 0..100 {
                assert!(!kick(&mut guest, 3));
                assert_eq!(poll(&mut device).chains, 3);
                assert_eq!(guest.tx.reclaim(), Ok(3));
            }
            // Armed on an empty ring: nothing is there, and the next one kicks.
            assert!(!device.request_kick());
            assert!(kick(&mut guest, 1));
            // B-58: armed while something is there.
            assert!(device.request_kick());
            device.suppress_kicks();
            assert_eq!(poll(&mut device).chains, 1);
            assert!(!device.request_kick());
            assert!(kick(&mut guest, 2), "and that is asked for as well");
            device.suppress_kicks();
            assert_eq!(poll(&mut device).chains, 2);
            if !features.event_idx {
                assert!(!kick(&mut guest, 1), "not asked for");
            }
            guest.tx.reclaim().expect("own chains");
        }
    }
}

#[test]
fn work_that_is_left_over_is_seen_before_sleeping() {
    for features in [MODERN, EVENT_IDX] {
        let mut guest = guest(features, 0);
        let (mut device, _) = guest.device();
        for seed in 0..3 {
            send(&mut guest, seed, 60);
        }
        guest.tx.publish();
        let burst = device.receive(BurstLimit::MAX);
        burst.finish(1);
        assert!(device.request_kick(), "two are left");
        let limit = BurstLimit {
            frames: 1,
            ..BurstLimit::MAX
        };
        let burst = device.receive(limit);
        assert_eq!(gather(&burst.batch.frame(0)), frame(1, 60));
        burst.finish(1);
        assert!(device.request_kick(), "one is left");
        assert_eq!(poll(&mut device).frames, [frame(2, 60)]);
        assert!(!device.request_kick());
        send(&mut guest, 3, 60);
        assert!(guest.tx.publish(), "and the next one kicks");
    }
}

//! How long one guest can keep another waiting, and what goes by the clock.

mod common;

use std::time::{Duration, Instant};

use common::{BYTES, Bed, config, key, plan};
use pollux_datapath::{Budget, PacketBudget, SwitchConfig, Time};
use pollux_switch::FdbConfig;
use pollux_testkit::{GuestSpec, wait_until};

/// B-57: station 0 floods station 2, station 1 sends one frame at a time to
/// station 3; a turn takes no more of the flood than its budget says.
fn ping_beside_a_flood(budget: Budget, bytes: u32, per_turn: u64) {
    const PINGS: u64 = 200;
    let mut plan = plan(4, 1);
    plan.ports[0].budget = budget;
    let mut bed = Bed::with(config(), &plan, &[GuestSpec::default(); 4]);
    bed.teach();
    let (before, frames) = (bed.worker(0), bed.counters(0).rx_frames);
    wait_until("the pings are answered", || {
        while bed.station(0).send(2, bytes) {}
        bed.station(0).publish();
        bed.poll();
        let arrived = bed.stations[3].flow(1, 3).received;
        if bed.station(1).sent_to(3) == arrived {
            assert!(bed.station(1).send(3, BYTES));
            bed.station(1).publish();
        }
        arrived >= PINGS
    });
    bed.settle();
    bed.turns();
    let counted = bed.worker(0).since(&before);
    let taken = bed.counters(0).rx_frames - frames;
    assert!(counted.exhausted > 0, "it is a flood: {counted:?}");
    assert!(
        taken <= (counted.turns + 1) * per_turn,
        "{taken} frames, {per_turn} a turn, {counted:?}"
    );
    assert_eq!(bed.stations[3].flow(1, 3).lost, 0);
}

#[test]
fn b57_tiny_frames_end_a_visit_by_their_number() {
    let budget = Budget {
        packets: PacketBudget::Units(32),
        ..Budget::default()
    };
    ping_beside_a_flood(budget, 60, 32);
}

#[test]
fn b57_long_frames_end_a_visit_by_their_bytes() {
    let budget = Budget {
        bytes: 10_000,
        ..Budget::default()
    };
    // The frame that goes over it is taken.
    ping_beside_a_flood(budget, 1500, 7);
}

#[test]
fn b57_a_visit_can_be_a_ring_of_tiny_frames() {
    let budget = Budget {
        packets: PacketBudget::RingMultiple(1),
        ..Budget::default()
    };
    ping_beside_a_flood(budget, 60, 256);
}

fn ageing(seconds: u16, time: Time) -> SwitchConfig {
    SwitchConfig {
        fdb: FdbConfig {
            ageing_seconds: seconds,
            ..config().fdb
        },
        time,
        ..config()
    }
}

/// B-61: an idle address is forgotten by the clock while the worker has no idle
/// turn, and those that are in use stay.
#[test]
fn b61_ageing_goes_by_the_clock_under_load() {
    let mut bed = Bed::with(
        ageing(2, Time::Real),
        &plan(3, 1),
        &[GuestSpec::default(); 3],
    );
    bed.teach();
    let begun = Instant::now();
    bed.exchange_while(&[2], |bed| bed.switch.fdb().lookup(key(2)).is_some());
    let forgotten = begun.elapsed();
    // Whole seconds are counted, and the last look may have been late.
    assert!(forgotten > Duration::from_millis(900), "{forgotten:?}");
    assert!(forgotten < Duration::from_secs(8), "{forgotten:?}");
    for station in [0, 1] {
        assert!(bed.switch.fdb().lookup(key(station)).is_some());
    }
}

/// The other way round: no number of turns makes anything older.
#[test]
fn b61_turns_age_nothing() {
    let mut bed = Bed::with(
        ageing(1, Time::Manual),
        &plan(3, 1),
        &[GuestSpec::default(); 3],
    );
    bed.teach();
    bed.exchange(5000, &[2]);
    assert!(bed.worker(0).turns > 100);
    assert_eq!(bed.switch.fdb().stats().aged, 0);
    assert!(bed.switch.fdb().lookup(key(2)).is_some());
}

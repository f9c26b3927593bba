//! Frontends and ports that come and go under load: the others lose nothing
//! (B-43, B-54).

mod common;

use common::{Bed, Pair, Sink, fd_count, name, plan};
use pollux_testkit::wait_until;
use pollux_vhost::SessionState;

/// Frames that the pair exchanges at least while others come and go.
const FRAMES_MIN: u64 = 10_000;

#[test]
fn five_hundred_frontends_vanish_in_the_middle_of_a_burst() {
    let bed = Bed::new(4);
    let mut pair = Pair::new(&bed);
    let mut sink = Sink::new(&bed, 3);
    let mut was_inside = 0;
    for round in 0..500_u32 {
        let mut guest = bed.attach(2);
        for _ in 0..round % 5 + 1 {
            sink.fill(&mut guest.station);
            sink.exchange(2);
            pair.exchange();
            guest.station.poll();
        }
        sink.fill(&mut guest.station);
        drop(guest.client);
        bed.wait_for(2, SessionState::Listening);
        guest.station.poll();
        was_inside += u32::from(guest.station.in_flight() > 0);
        pair.exchange();
        sink.poll();
    }
    println!("{was_inside} of 500 vanished with frames under way");
    wait_until("the pair has exchanged enough", || {
        pair.exchange();
        pair.arrived() > FRAMES_MIN
    });
    pair.assert_nothing_lost();
    assert_eq!(bed.status(2).connections, 500);
}

#[test]
fn a_port_is_added_and_removed_five_hundred_times_under_load_on_another_pair() {
    let bed = Bed::new(2);
    bed.switch
        .apply(&plan([0, 1, 3]))
        .expect("the plan is good");
    bed.serve(3);
    let mut pair = Pair::new(&bed);
    let mut sink = Sink::new(&bed, 3);
    let before = (fd_count(), pollux_sys::mapping_count());
    for round in 0..500_u32 {
        bed.switch
            .apply(&plan([0, 1, 3, 2]))
            .expect("the plan is good");
        bed.serve(2);
        pair.exchange();
        let guest = (round % 2 == 0).then(|| {
            let mut guest = bed.attach(2);
            sink.fill(&mut guest.station);
            guest
        });
        pair.exchange();
        if round % 3 == 0 {
            // In the other order: the port goes before its session.
            bed.switch
                .apply(&plan([0, 1, 3]))
                .expect("the plan is good");
            assert!(bed.backend.remove(&name(2)));
        } else {
            assert!(bed.backend.remove(&name(2)));
            bed.switch
                .apply(&plan([0, 1, 3]))
                .expect("the plan is good");
        }
        assert!(!bed.socket(2).exists());
        drop(guest);
        pair.exchange();
        sink.poll();
    }
    wait_until("the pair has exchanged enough", || {
        pair.exchange();
        pair.arrived() > FRAMES_MIN
    });
    pair.assert_nothing_lost();
    wait_until("nothing is left behind", || {
        (fd_count(), pollux_sys::mapping_count()) == before
    });
}

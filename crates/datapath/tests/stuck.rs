//! A frontend stops a worker inside a call: it shares the open file of its call
//! eventfd, clears O_NONBLOCK on it and fills it. Stations 0 and 1 wait for the
//! watchdog, and lose nothing.

mod common;

use std::any::Any;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{BYTES, Bed, events, port_name, worker_name};
use pollux_datapath::{Port, QueueState};
use pollux_packet::DropReason;
use pollux_sys::EventFd;
use pollux_testkit::{RawRing, wait_until};
use pollux_virtio::device;
use pollux_virtio::driver::NetConfig;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// Number of the station that misbehaves.
const BAD: u16 = 2;
const BAD_PORT: &str = "p2";
const REASON: &str = "the call eventfd blocks";
/// A worker is stuck for two seconds at most; a shared machine may take longer.
const STUCK_MAX: Duration = Duration::from_secs(6);

/// A call eventfd on which the next write waits.
fn full_and_blocking() -> EventFd {
    let ours = EventFd::new().expect("eventfd");
    let theirs = OwnedFd::from(ours.try_clone().expect("dup"));
    let flags = fcntl_getfl(&theirs).expect("it is open");
    fcntl_setfl(&theirs, flags - OFlags::NONBLOCK).expect("it is open");
    let full = u64::MAX - 1;
    File::from(theirs)
        .write_all(&full.to_ne_bytes())
        .expect("it is empty");
    ours
}

/// Stations 0 and 1 and the bad one, which talk to each other.
fn bed(workers: u16) -> Bed {
    let mut bed = Bed::new(3, workers);
    events::begin();
    bed.teach();
    bed
}

fn bad_port(bed: &Bed) -> Arc<Port> {
    bed.switch.port(BAD_PORT).expect("it is in the plan")
}

/// From now on the bad guest wants a call for each publication of a ring.
fn ask_for_calls(bed: &Bed, config: NetConfig) {
    let memory = Arc::clone(&bed.stations[usize::from(BAD)].guest.memory);
    RawRing::new(memory, config.areas, 0).set_avail_flags(0);
}

/// The next frame of the bad guest stops the worker that takes it.
fn arm_rx(bed: &Bed) {
    ask_for_calls(bed, bed.stations[usize::from(BAD)].guest.tx_config());
    let armed = bad_port(bed).change_rx(|queue| {
        let queue: &mut dyn Any = queue;
        let ring = queue.downcast_mut::<device::TxRing>();
        ring.expect("a guest's").set_call(Some(full_and_blocking()))
    });
    assert!(armed.is_some_and(|before| before.is_none()));
}

/// The next frame for the bad guest stops the worker that delivers it.
fn arm_tx(bed: &Bed) {
    ask_for_calls(bed, bed.stations[usize::from(BAD)].guest.rx_config());
    let armed = bad_port(bed).change_tx(|queue| {
        let queue: &mut dyn Any = queue;
        let ring = queue.downcast_mut::<device::RxRing>();
        ring.expect("a guest's").set_call(Some(full_and_blocking()))
    });
    assert!(armed.is_some_and(|before| before.is_none()));
}

fn is_broken(state: &QueueState) -> bool {
    matches!(state, QueueState::Broken(fault) if fault.contains(REASON))
}

/// A queue's fault was reported once, and that its worker was interrupted.
fn assert_reported(queue: &str) {
    let reported = events::faults(BAD_PORT, queue);
    assert!(
        matches!(&reported[..], [fault] if fault.contains(REASON)),
        "{reported:?}"
    );
    let of_worker = events::of_worker(&worker_name(0));
    assert!(
        of_worker.iter().any(|text| text.contains("no progress")),
        "{of_worker:?}"
    );
}

#[test]
fn a_worker_that_returns_to_a_blocking_guest_is_freed() {
    let mut bed = bed(1);
    let bad = bad_port(&bed);
    arm_rx(&bed);
    let begun = Instant::now();
    assert!(bed.station(BAD).send(0, BYTES));
    bed.station(BAD).publish();
    bed.exchange_while(&[BAD], |_| bad.rx_state() == QueueState::Running);
    let stuck = begun.elapsed();
    assert!(stuck > Duration::from_millis(500), "{stuck:?}: no wait");
    assert!(stuck < STUCK_MAX, "{stuck:?}");
    assert!(is_broken(&bad.rx_state()), "{:?}", bad.rx_state());
    bed.exchange_while(&[BAD], |_| events::faults(BAD_PORT, "rx").is_empty());
    bed.exchange(3000, &[BAD]);
    assert_reported("rx");

    // What was published was published, and the other ring goes on.
    assert_eq!(bed.stations[0].flow(BAD, 0).received, 1);
    assert_eq!(bad.tx_state(), QueueState::Running);
    let received = bed.stations[usize::from(BAD)].received();
    assert!(bed.station(0).send(BAD, BYTES));
    bed.station(0).publish();
    wait_until("its receive ring goes on", || {
        bed.poll();
        bed.stations[usize::from(BAD)].received() == received + 1
    });
}

/// Two workers: one is stuck in the cell of the queue, the other spins for it.
#[test]
fn workers_that_deliver_to_a_blocking_guest_are_freed() {
    let mut bed = bed(2);
    let bad = bad_port(&bed);
    arm_tx(&bed);
    let before = bed.counters(BAD).tx_frames;
    let begun = Instant::now();
    bed.exchange_while(&[BAD], |bed| {
        for station in [0, 1] {
            if bed.station(station).in_flight() < 100 {
                bed.station(station).send(BAD, BYTES);
            }
        }
        bad.tx_state() == QueueState::Running
    });
    let stuck = begun.elapsed();
    assert!(stuck > Duration::from_millis(500), "{stuck:?}: no wait");
    assert!(stuck < STUCK_MAX, "{stuck:?}");
    assert!(is_broken(&bad.tx_state()), "{:?}", bad.tx_state());
    bed.exchange_while(&[BAD], |_| events::faults(BAD_PORT, "tx").is_empty());
    let reported = events::faults(BAD_PORT, "tx");
    assert!(reported.len() == 1 && reported[0].contains(REASON));

    // The burst that was published counts as delivered; nothing behind it does.
    let counters = bed.counters(BAD);
    assert!(counters.tx_frames > before);
    assert!(counters.drops.get(DropReason::PortDown) > 0);
    assert_eq!(bad.rx_state(), QueueState::Running);
    let received = bed.stations[0].flow(BAD, 0).received;
    assert!(bed.station(BAD).send(0, BYTES));
    bed.station(BAD).publish();
    wait_until("it can still send", || {
        bed.poll();
        bed.stations[0].flow(BAD, 0).received == received + 1
    });
}

/// It says so at once, not with the next frame: there may be none for long.
#[test]
fn a_ring_that_its_call_broke_needs_no_further_frame_to_be_reported() {
    let mut bed = bed(1);
    let bad = bad_port(&bed);
    arm_tx(&bed);
    let before = bed.counters(BAD).tx_frames;
    assert!(bed.station(0).send(BAD, BYTES));
    bed.station(0).publish();
    wait_until("the ring is broken", || is_broken(&bad.tx_state()));
    wait_until("the frame is counted", || {
        bed.counters(BAD).tx_frames != before
    });
    let counters = bed.counters(BAD);
    assert_eq!(
        counters.drops.get(DropReason::PortDown),
        0,
        "it was delivered"
    );
    assert_eq!(counters.tx_frames, before + 1);
}

/// Whoever wants the queue, or the worker's attention, waits for the watchdog at
/// most.
#[test]
fn control_gets_a_worker_that_is_stuck() {
    let mut bed = bed(1);
    let bad = bad_port(&bed);
    let stick = |bed: &mut Bed| {
        arm_rx(bed);
        assert!(bed.station(BAD).send(0, BYTES));
        bed.station(BAD).publish();
        // The worker is in the queue until its chain has gone back.
        wait_until("the frame is delivered", || bed.stations[0].poll() > 0);
    };
    stick(&mut bed);
    let begun = Instant::now();
    let queue = bad.stop_rx().expect("it ran");
    assert!(queue.is_broken(), "the worker was interrupted first");
    assert!(begun.elapsed() < STUCK_MAX);
    drop(queue);

    bed.attach(BAD);
    stick(&mut bed);
    let begun = Instant::now();
    let mut plan = bed.switch.plan();
    plan.ports.retain(|port| port.name != port_name(BAD));
    bed.switch.apply(&plan).expect("the plan is good");
    assert!(begun.elapsed() < STUCK_MAX);
    assert_eq!(bad.rx_state(), QueueState::Removed);
    bed.exchange(2000, &[BAD]);
}

/// A worker is not taken for stuck because it has nothing to do.
#[test]
fn an_idle_worker_makes_progress() {
    let mut bed = bed(1);
    std::thread::sleep(Duration::from_millis(2500));
    bed.exchange(1000, &[]);
    let reported = events::of_worker(&worker_name(0));
    assert!(reported.is_empty(), "{reported:?}");
}

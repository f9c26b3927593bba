//! A driver and a device that sleep whenever they may, and never miss each other
//! (B-17, B-58), and what a driver sees of the device's words while they are
//! written (B-20). The table is in `bugs_table.rs`; `loom_*` and
//! `src/notify/model.rs` model the same order of stores and loads.

#![expect(
    clippy::cast_possible_truncation,
    reason = "positions are reduced to 16 bits"
)]

mod common;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::race::{Stop, alone, as_the_guest_sees_it};
use common::{MODERN, base_of, first_base, frame, in_every_layout, transmit};
use pollux_sys::EventFd;
use pollux_testkit::{Guest, GuestSpec, Random, RawRing};
use pollux_virtio::Features;
use pollux_virtio::device::BurstLimit;
use pollux_virtio::driver::ChainShape;

/// Who waits longer has been forgotten.
const PATIENCE: Duration = Duration::from_secs(5);

const EVENT_IDX: Features = Features {
    event_idx: true,
    ..MODERN
};

/// A guest whose rings are near the end of their lap.
fn guest_of(features: Features) -> Guest {
    let spec = GuestSpec {
        ring_size: 16,
        features,
        base: base_of(features, 65_000, 16),
        ..GuestSpec::default()
    };
    Guest::new(spec).expect("guest memory")
}

/// A notification to sleep on: a socket, which vhost-user allows in the place of
/// an eventfd, because std can wait for one.
fn notification() -> (EventFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("socket pair");
    theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let event = EventFd::from_peer(ours.into()).expect("a socket is allowed");
    (event, theirs)
}

/// Sleeps as a driver or a worker does: it looks at nothing else.
fn sleep_on(mut socket: &UnixStream, what: &str) {
    let mut bytes = [0; 64];
    if let Err(error) = socket.read(&mut bytes) {
        panic!("{what} was missed: {error}");
    }
}

#[test]
fn b17_b58_no_call_and_no_kick_is_missed() {
    let _alone = alone();
    // Ping-pong with both sides asleep whenever they may: every round is a
    // chance to miss the other.
    for features in in_every_layout(&[MODERN, EVENT_IDX]) {
        let mut guest = guest_of(features);
        let (call, called) = notification();
        let (kick, kicked) = notification();
        let (mut device, _) = guest.device_with_calls(Some(call), None);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let stopping = Stop(&stop);
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let burst = device.receive(BurstLimit::MAX);
                    let count = burst.batch.len();
                    burst.finish(count);
                    if count > 0 {
                        continue;
                    }
                    if !device.request_kick() {
                        sleep_on(&kicked, "a kick");
                    }
                    device.suppress_kicks();
                }
            });
            let end = Instant::now() + Duration::from_millis(300);
            let (mut sent, mut returned) = (0_u32, 0_u32);
            while Instant::now() < end {
                // One or a few at a time, so that the ring is often empty.
                for _ in 0..=sent % 3 {
                    if guest.tx.send(&frame(1, 60), ChainShape::JOINED).is_ok() {
                        sent += 1;
                    }
                }
                if guest.tx.publish() {
                    kick.signal().expect("a socket");
                }
                while returned < sent {
                    let count = guest.tx.reclaim().expect("own chains");
                    returned += count;
                    if returned == sent {
                        break;
                    }
                    if count == 0 {
                        if !guest.tx.ring().request_call() {
                            sleep_on(&called, "a call");
                        }
                        guest.tx.ring().suppress_calls();
                    }
                }
            }
            drop(stopping);
            kick.signal().expect("a socket");
            println!("{sent} chains, {features:?}");
            assert!(sent > 100);
        });
    }
}

/// Waits for a notification without sleeping, so that rounds are short.
fn spin_on(event: &EventFd, what: &str) {
    let end = Instant::now() + PATIENCE;
    while event.drain() == 0 {
        assert!(Instant::now() < end, "{what} was missed");
        thread::yield_now();
    }
}

/// One chain a round; whoever waits arms at a random moment around the one at
/// which the other notifies, and then looks at nothing but the eventfd. Without
/// the full fences this misses within some ten thousand rounds.
fn arm_at_any_moment(features: Features, driver_arms: bool, time: Duration) {
    let mut guest = guest_of(features);
    let [call, kick] = [(); 2].map(|()| EventFd::new().expect("eventfd"));
    let (mut device, _) = guest.device_with_calls(call.try_clone().ok(), None);
    let stop = AtomicBool::new(false);
    let mut random = Random::new(0x5eed);
    thread::scope(|scope| {
        let (stop, kick) = (&stop, &kick);
        let stopping = Stop(stop);
        scope.spawn(move || {
            let mut random = Random::new(0xfeed);
            while !stop.load(Ordering::Relaxed) {
                let burst = device.receive(BurstLimit::MAX);
                let count = burst.batch.len();
                burst.finish(count);
                if count == 0 && !driver_arms {
                    pause(random.below(60));
                    if !device.request_kick() {
                        spin_on(kick, "a kick");
                    }
                    device.suppress_kicks();
                }
            }
        });
        let end = Instant::now() + time;
        let mut rounds = 0_u32;
        while Instant::now() < end {
            rounds += 1;
            guest
                .tx
                .send(&[1; 60], ChainShape::JOINED)
                .expect("all are back");
            pause(random.below(60));
            if guest.tx.publish() {
                kick.signal().expect("eventfd");
            }
            pause(random.below(60));
            let begun = Instant::now();
            while guest.tx.reclaim() == Ok(0) {
                assert!(begun.elapsed() < 2 * PATIENCE, "the device is gone");
                if driver_arms {
                    if !guest.tx.ring().request_call() {
                        spin_on(&call, "a call");
                    }
                    guest.tx.ring().suppress_calls();
                } else {
                    thread::yield_now();
                }
            }
        }
        drop(stopping);
        kick.signal().expect("eventfd");
        println!("{rounds} rounds, driver arms {driver_arms}, {features:?}");
    });
}

fn pause(count: u32) {
    for _ in 0..count {
        std::hint::spin_loop();
    }
}

#[test]
fn b17_a_driver_that_arms_while_the_device_publishes() {
    let _alone = alone();
    for features in in_every_layout(&[MODERN, EVENT_IDX]) {
        arm_at_any_moment(features, true, Duration::from_millis(300));
    }
}

#[test]
fn b58_a_device_that_arms_while_the_driver_publishes() {
    let _alone = alone();
    for features in in_every_layout(&[MODERN, EVENT_IDX]) {
        arm_at_any_moment(features, false, Duration::from_millis(300));
    }
}

#[test]
fn b20_the_used_index_is_never_torn() {
    const BASE: u16 = 0x00f0;
    let _alone = alone();
    // 0x00ff to 0x0100 and so on through the whole circle: a torn index would be
    // 0x0000 or 0x01ff.
    let mut guest = Guest::new(GuestSpec {
        ring_size: 256,
        base: BASE,
        ..GuestSpec::default()
    })
    .expect("guest memory");
    let (_, mut device) = guest.device();
    let memory = as_the_guest_sees_it(&guest);
    let ring = RawRing::new(memory, guest.rx_config().areas, 0);
    let stop = AtomicBool::new(false);
    let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stopping = Stop(&stop);
        scope.spawn(|| {
            let mut reads = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let least = done.load(Ordering::SeqCst);
                let idx = ring.used_idx();
                let most = begun.load(Ordering::SeqCst);
                if most - least < 0x8000 {
                    let position = |count: u64| BASE.wrapping_add((count % 0x1_0000) as u16);
                    let moved = idx.wrapping_sub(position(least));
                    let bound = (most - least) as u16;
                    assert!(moved <= bound, "{idx:#x}, {least} to {most}");
                    reads += 1;
                }
            }
            println!("{reads} reads");
        });
        let end = Instant::now() + Duration::from_millis(300);
        let bytes = [frame(1, 60)];
        while Instant::now() < end {
            guest.rx.refill();
            guest.rx.publish();
            for _ in 0..100 {
                begun.fetch_add(1, Ordering::SeqCst);
                assert_eq!(transmit(&mut device, &bytes).frames, 1);
                done.fetch_add(1, Ordering::SeqCst);
            }
            assert_eq!(guest.rx.receive(200, |_| ()), Ok(100));
        }
        println!("{} frames", done.load(Ordering::SeqCst));
    });
}

/// What a returned chain says is of one moment: id, length and flags of a packed
/// ring are one word, and with EVENT_IDX or not the frame is there before it.
#[test]
fn b20_what_comes_back_is_whole() {
    let _alone = alone();
    for features in in_every_layout(&[MODERN]) {
        let mut guest = Guest::new(GuestSpec {
            ring_size: 8,
            features,
            base: first_base(features),
            ..GuestSpec::default()
        })
        .expect("guest memory");
        let (_, mut device) = guest.device();
        guest.rx.refill();
        guest.rx.publish();
        let stop = AtomicBool::new(false);
        let mut seen = 0;
        thread::scope(|scope| {
            let _stopping = Stop(&stop);
            scope.spawn(|| {
                let frames: Vec<_> = (0..32).map(|n| vec![n as u8; 14 + 9 * n]).collect();
                let mut next = 0;
                while !stop.load(Ordering::Relaxed) {
                    let one = std::slice::from_ref(&frames[next]);
                    if transmit(&mut device, one).frames == 1 {
                        next = (next + 1) % frames.len();
                    }
                }
            });
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                let count = guest.rx.receive(u32::MAX, |received| {
                    let number = seen % 32;
                    assert_eq!(received.to_vec(), vec![number as u8; 14 + 9 * number]);
                    seen += 1;
                });
                count.expect("the device returns what is out");
                guest.rx.refill();
                guest.rx.publish();
            }
        });
        println!("{seen} frames, {features:?}");
        assert!(seen > 0);
    }
}

//! A batch that a packed ring gives back is seen whole: its first descriptor is
//! written last (virtio 1.2, section 2.8.13.1 asks the same of the driver). The
//! oracle is another thread that looks at the ring all the time.

mod common;

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::thread;

use common::{MODERN, frame};
use pollux_packet::{BatchStore, FrameSet, Offload, Span};
use pollux_testkit::{Guest, GuestSpec, RawPacked};
use pollux_virtio::Features;
use pollux_virtio::device::BurstLimit;
use pollux_virtio::driver::ChainShape;

const BATCH: u16 = 64;
const ROUNDS: u32 = 4000;

/// What the two threads tell each other: where the next batch begins, and how
/// many the other one has seen.
#[derive(Default)]
struct Turns {
    start: AtomicU16,
    begun: AtomicU32,
    seen: AtomicU32,
}

impl Turns {
    /// The device's side: `give` gives a batch back that begins at `start`.
    fn give(&self, round: u32, start: u16, give: impl FnOnce()) {
        self.start.store(start, Ordering::Relaxed);
        self.begun.store(round + 1, Ordering::Release);
        give();
        while self.seen.load(Ordering::Acquire) <= round {
            thread::yield_now();
        }
    }

    /// The driver's side: once the first of a batch is there, all of it is.
    fn watch(&self, ring: &RawPacked) {
        for round in 0..ROUNDS {
            while self.begun.load(Ordering::Acquire) <= round {
                thread::yield_now();
            }
            let start = self.start.load(Ordering::Relaxed);
            while ring.used(start).is_none() {
                std::hint::spin_loop();
            }
            // The last one first: it has had the least time.
            for offset in (0..BATCH).rev() {
                let used = ring.used(ring.behind(start, offset));
                assert!(used.is_some(), "round {round}: {offset} is not there yet");
            }
            self.seen.store(round + 1, Ordering::Release);
        }
    }
}

fn guest() -> Guest {
    let features = Features {
        packed: true,
        ..MODERN
    };
    let spec = GuestSpec {
        // So that batches begin everywhere, and some go over the end.
        ring_size: BATCH + 37,
        features,
        base: 0x8000,
        ..GuestSpec::default()
    };
    Guest::new(spec).expect("guest memory")
}

/// The watcher's panic is the test's, and does not leave the other side waiting.
fn watched(turns: &Turns, ring: &RawPacked, device: impl FnOnce()) {
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let result =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| turns.watch(ring)));
            turns.seen.store(u32::MAX, Ordering::Release);
            result
        });
        device();
        let result = watcher.join().expect("caught");
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn a_driver_sees_what_was_sent_on_whole() {
    let mut guest = guest();
    let ring = RawPacked::new(guest.memory.clone(), guest.tx_config().areas, 0x8000);
    let (mut device, _) = guest.device();
    let turns = Turns::default();
    watched(&turns, &ring, || {
        for round in 0..ROUNDS {
            for seed in 0..u32::from(BATCH) {
                let sent = guest.tx.send(&frame(seed, 60), ChainShape::JOINED);
                sent.expect("room");
            }
            guest.tx.publish();
            let start = device.base();
            let burst = device.receive(BurstLimit::MAX);
            let frames = burst.batch.len();
            assert_eq!(frames, usize::from(BATCH));
            turns.give(round, start, || {
                burst.finish(frames);
            });
            assert_eq!(guest.tx.reclaim(), Ok(u32::from(BATCH)));
        }
    });
}

#[test]
fn a_driver_sees_what_it_received_whole() {
    let mut guest = guest();
    let ring = RawPacked::new(guest.memory.clone(), guest.rx_config().areas, 0x8000);
    let (_, mut device) = guest.device();
    let turns = Turns::default();
    let bytes = frame(1, 60);
    let mut store = BatchStore::new(usize::from(BATCH));
    watched(&turns, &ring, || {
        for round in 0..ROUNDS {
            guest.rx.refill();
            guest.rx.publish();
            let mut batch = store.begin();
            for _ in 0..BATCH {
                let pushed = batch.push(Offload::default(), Span::from_slice(&bytes));
                pushed.expect("room");
            }
            let start = device.base();
            turns.give(round, start, || {
                let report = device.transmit(&batch, FrameSet::first(usize::from(BATCH)));
                assert_eq!(report.frames, u32::from(BATCH));
            });
            assert_eq!(guest.rx.receive(u32::MAX, |_| ()), Ok(u32::from(BATCH)));
        }
    });
}

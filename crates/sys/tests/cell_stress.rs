//! `RingCell` on real threads: what `loom_cell` proves for a few steps, many times
//! over; and panics, which loom does not model.

#![cfg(not(loom))]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use pollux_sys::{Busy, Guard, Raised, RingCell};

/// Large enough that a torn view would show.
#[derive(Debug, PartialEq, Eq)]
struct Ring {
    numbers: [u64; 32],
    owner: Box<u64>,
}

impl Ring {
    fn new(owner: u64) -> Self {
        Self {
            numbers: [0; 32],
            owner: Box::new(owner),
        }
    }

    fn bump(&mut self) {
        let first = self.numbers[0];
        for number in &mut self.numbers {
            assert_eq!(*number, first, "two inside at once, or a stale view");
            *number += 1;
        }
    }
}

#[test]
fn the_word_keeps_to_its_line() {
    assert_eq!(align_of::<RingCell<u8>>(), 128);
    assert_eq!(size_of::<RingCell<u8>>(), 128);
    let cell = RingCell::new([0_u8; 64]);
    let value = cell.try_lock().unwrap().as_ptr().addr();
    assert_eq!(value - (&raw const cell).addr(), 64);
}

#[test]
fn every_state_answers_as_documented() {
    let cell = RingCell::new(1);
    let (guard, spins) = cell.lock_unless_raised().unwrap();
    assert_eq!(spins, 0);
    assert_eq!(cell.try_lock().unwrap_err(), Busy::Held);
    assert_eq!(format!("{guard:?}"), "Guard(1)");
    drop(guard);
    cell.control(|value| {
        assert_eq!(cell.try_lock().unwrap_err(), Busy::Raised);
        assert_eq!(cell.lock_unless_raised().unwrap_err(), Raised);
        *value = 2;
    });
    assert_eq!(*cell.try_lock().unwrap(), 2);
    assert_eq!(cell.into_inner(), 2);
}

#[test]
fn a_panic_leaves_the_cell_usable() {
    let cell = RingCell::new(0);
    let control = catch_unwind(AssertUnwindSafe(|| {
        cell.control(|value| {
            *value = 1;
            panic!("on purpose");
        })
    }));
    assert!(control.is_err());
    assert_eq!(*cell.try_lock().unwrap(), 1);
    let worker = catch_unwind(AssertUnwindSafe(|| {
        *cell.try_lock().unwrap() = 2;
        let _guard = cell.try_lock().unwrap();
        panic!("on purpose");
    }));
    assert!(worker.is_err());
    assert_eq!(cell.control(|value| *value), 2);
    assert_eq!(*cell.try_lock().unwrap(), 2);
}

#[test]
fn workers_and_control_threads_lose_nothing() {
    const CONTROL_TURNS: u64 = 2_000;
    let cell = Arc::new(RingCell::new(Ring::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let worker = |transmits: bool| {
        let (cell, stop) = (cell.clone(), stop.clone());
        thread::spawn(move || {
            let mut entries = 0;
            while !stop.load(Ordering::Relaxed) {
                let guard = if transmits {
                    cell.lock_unless_raised().ok().map(|(guard, _)| guard)
                } else {
                    cell.try_lock().ok()
                };
                match guard {
                    Some(mut ring) => {
                        ring.bump();
                        entries += 1;
                    }
                    // Two cores run all of this: let control have one.
                    None => thread::yield_now(),
                }
            }
            entries
        })
    };
    let workers = [worker(false), worker(true), worker(true)];
    let control = |id: u64| {
        let cell = cell.clone();
        thread::spawn(move || {
            let mut taken_out = 0;
            for _ in 0..CONTROL_TURNS {
                let old = cell.control(|ring| std::mem::replace(ring, Ring::new(id)));
                assert!(old.numbers.iter().all(|number| *number == old.numbers[0]));
                assert!(*old.owner <= 2);
                taken_out += old.numbers[0];
            }
            taken_out
        })
    };
    let controls = [control(1), control(2)];
    let mut counted: u64 = controls.map(|thread| thread.join().unwrap()).iter().sum();
    stop.store(true, Ordering::Relaxed);
    let entries: u64 = workers.map(|thread| thread.join().unwrap()).iter().sum();
    counted += cell.try_lock().unwrap().numbers[0];
    assert_eq!(entries, counted);
}

#[test]
fn control_gets_in_although_a_worker_never_pauses() {
    let cell = Arc::new(RingCell::new(Ring::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let after_flag = Arc::new(AtomicU64::new(0));
    let worker = {
        let (cell, stop, after_flag) = (cell.clone(), stop.clone(), after_flag.clone());
        thread::spawn(move || {
            let mut flag_seen = false;
            while !stop.load(Ordering::Relaxed) {
                match cell.try_lock() {
                    Ok(mut ring) => {
                        ring.bump();
                        // Control's turn shows in the value.
                        if flag_seen && *ring.owner == 0 {
                            after_flag.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    Err(busy) => flag_seen |= busy == Busy::Raised,
                }
            }
        })
    };
    thread::sleep(Duration::from_millis(10));
    cell.control(|ring| {
        thread::sleep(Duration::from_millis(10));
        *ring.owner = 1;
    });
    thread::sleep(Duration::from_millis(10));
    stop.store(true, Ordering::Relaxed);
    worker.join().unwrap();
    assert_eq!(after_flag.load(Ordering::Relaxed), 0);
}

/// Compiles only if the bounds are what they should be.
#[test]
fn a_cell_is_shared_where_its_value_can_be_sent() {
    fn shared<T: Sync>() {}
    shared::<RingCell<std::cell::Cell<u8>>>();
    shared::<Guard<'static, u8>>();
}

#[test]
fn control_that_may_not_wait_gives_up_and_disturbs_nobody() {
    let cell = RingCell::new(1);
    let changed = cell.try_control(|value| {
        assert_eq!(cell.try_lock().unwrap_err(), Busy::Raised);
        assert_eq!(cell.lock_unless_raised().unwrap_err(), Raised);
        assert_eq!(cell.try_control(|_| ()), None);
        *value += 1;
        *value
    });
    assert_eq!(changed, Some(2));
    let guard = cell.try_lock().unwrap();
    assert_eq!(cell.try_control(|_| ()), None);
    assert_eq!(cell.try_lock().unwrap_err(), Busy::Held, "not raised");
    drop(guard);
    let panicked = catch_unwind(AssertUnwindSafe(|| cell.try_control(|_| panic!("change"))));
    assert!(panicked.is_err());
    assert_eq!(*cell.try_lock().unwrap(), 2, "free again");
}

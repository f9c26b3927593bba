//! `RingCell` under every interleaving that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pollux-sys --test loom_cell --release`

#![cfg(loom)]

use loom::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use pollux_sys::{Busy, Raised, RingCell};

/// Two numbers that are equal whenever nobody is inside: a torn or stale view
/// shows. loom also checks that accesses do not overlap.
#[derive(Debug, PartialEq, Eq)]
struct Pair(u32, u32);

impl Pair {
    fn add(&mut self, n: u32) {
        assert_eq!(self.0, self.1);
        self.0 += n;
        self.1 += n;
    }
}

/// Three threads that all want the word have too many interleavings to try them
/// all: those with at most `preemptions` forced switches are tried. (Switches where
/// a thread waits are not counted.)
fn bounded(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn a_worker_sees_the_value_before_or_after_a_replacement() {
    loom::model(|| {
        let cell = Arc::new(RingCell::new(Pair(1, 1)));
        let worker = {
            let cell = cell.clone();
            thread::spawn(move || match cell.try_lock() {
                Ok(mut pair) => {
                    pair.add(10);
                    true
                }
                Err(Busy::Raised) => false,
                Err(Busy::Held) => panic!("control always has its flag up"),
            })
        };
        let old = cell.control(|pair| std::mem::replace(pair, Pair(2, 2)));
        let entered = worker.join().unwrap();
        let new = cell.control(|pair| pair.0);
        match (old.0, new) {
            (1, 2) => assert!(!entered),
            (11, 2) | (1, 12) => assert!(entered),
            other => panic!("impossible: {other:?}"),
        }
    });
}

#[test]
fn what_control_hands_out_is_seen_whole() {
    loom::model(|| {
        let cell = Arc::new(RingCell::new(None::<Box<Pair>>));
        let worker = {
            let cell = cell.clone();
            thread::spawn(move || {
                let Ok(guard) = cell.try_lock() else { return };
                if let Some(pair) = guard.as_ref() {
                    assert_eq!(**pair, Pair(7, 7));
                }
            })
        };
        cell.control(|value| *value = Some(Box::new(Pair(7, 7))));
        worker.join().unwrap();
    });
}

#[test]
fn two_transmitters_both_write() {
    loom::model(|| {
        let cell = Arc::new(RingCell::new(Pair(0, 0)));
        let other = {
            let cell = cell.clone();
            thread::spawn(move || {
                let (mut pair, _spins) = cell.lock_unless_raised().unwrap();
                pair.add(1);
            })
        };
        {
            let (mut pair, _spins) = cell.lock_unless_raised().unwrap();
            pair.add(2);
        }
        other.join().unwrap();
        assert_eq!(*cell.try_lock().unwrap(), Pair(3, 3));
    });
}

#[test]
fn a_flag_raised_while_held_gives_control_the_next_turn() {
    loom::model(|| {
        let cell = Arc::new(RingCell::new(Pair(0, 0)));
        let mut guard = cell.try_lock().unwrap();
        let control = {
            let cell = cell.clone();
            thread::spawn(move || {
                cell.control(|pair| {
                    assert_eq!(*pair, Pair(5, 5), "the holder had finished");
                    pair.add(100);
                });
            })
        };
        while cell.try_lock().unwrap_err() != Busy::Raised {
            thread::yield_now();
        }
        // A transmitter that arrives now does not wait, although it is held: if it
        // did, this thread would wait for itself.
        assert!(matches!(cell.lock_unless_raised(), Err(Raised)));
        guard.add(5);
        drop(guard);
        match cell.try_lock() {
            Ok(pair) => assert_eq!(*pair, Pair(105, 105), "control came first"),
            Err(busy) => assert_eq!(busy, Busy::Raised),
        }
        control.join().unwrap();
    });
}

#[test]
fn a_transmitter_that_spins_leaves_when_the_flag_goes_up() {
    loom::model(|| {
        let cell = Arc::new(RingCell::new(Pair(0, 0)));
        let guard = cell.try_lock().unwrap();
        let transmitter = {
            let cell = cell.clone();
            thread::spawn(move || cell.lock_unless_raised().map(|_| ()))
        };
        let control = {
            let cell = cell.clone();
            thread::spawn(move || cell.control(|pair| pair.add(1)))
        };
        // The holder stays until the transmitter has gone: only the flag can
        // have sent it away.
        assert_eq!(transmitter.join().unwrap(), Err(Raised));
        drop(guard);
        control.join().unwrap();
        assert_eq!(*cell.try_lock().unwrap(), Pair(1, 1));
    });
}

/// Once anybody has seen the flag, nobody enters before control has been in: so
/// at most the one holder is ahead of it, however often workers try.
#[test]
fn control_does_not_starve() {
    bounded(3, || {
        let cell = Arc::new(RingCell::new(false));
        let flag_seen = Arc::new(AtomicBool::new(false));
        let workers = [(); 2].map(|()| {
            let (cell, flag_seen) = (cell.clone(), flag_seen.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    let too_late = flag_seen.load(Ordering::Acquire);
                    match cell.try_lock() {
                        Ok(control_was_in) => assert!(*control_was_in || !too_late),
                        Err(Busy::Raised) => flag_seen.store(true, Ordering::Release),
                        Err(Busy::Held) => {}
                    }
                }
            })
        });
        cell.control(|control_was_in| *control_was_in = true);
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

#[test]
fn two_controls_exclude_each_other() {
    loom::model(|| {
        let cell = Arc::new(RingCell::new(Pair(0, 0)));
        let other = {
            let cell = cell.clone();
            thread::spawn(move || cell.control(|pair| pair.add(1)))
        };
        cell.control(|pair| pair.add(10));
        other.join().unwrap();
        assert_eq!(*cell.try_lock().unwrap(), Pair(11, 11), "flag is down");
    });
}

/// Two preemptions: with three, loom lets the two control threads look in turns,
/// thousands of times, while it keeps the worker inside from leaving.
#[test]
fn a_worker_and_two_controls_exclude_each_other() {
    bounded(2, || {
        let cell = Arc::new(RingCell::new(Pair(0, 0)));
        let worker = {
            let cell = cell.clone();
            thread::spawn(move || match cell.try_lock() {
                Ok(mut pair) => {
                    pair.add(100);
                    100
                }
                Err(busy) => {
                    assert_eq!(busy, Busy::Raised);
                    0
                }
            })
        };
        let other = {
            let cell = cell.clone();
            thread::spawn(move || cell.control(|pair| pair.add(1)))
        };
        cell.control(|pair| pair.add(10));
        other.join().unwrap();
        let sum = 11 + worker.join().unwrap();
        assert_eq!(*cell.try_lock().unwrap(), Pair(sum, sum), "flag is down");
    });
}

#[test]
fn control_that_may_not_wait_enters_a_free_cell_only() {
    bounded(3, || {
        let cell = Arc::new(RingCell::new(Pair(0, 0)));
        let enter = |enter: fn(&RingCell<Pair>) -> bool| {
            let cell = cell.clone();
            thread::spawn(move || enter(&cell))
        };
        let asking = enter(|cell| cell.try_control(|pair| pair.add(1)).is_some());
        let worker = enter(|cell| cell.try_lock().map(|mut pair| pair.add(10)).is_ok());
        cell.control(|pair| pair.add(100));
        let (asked, worked) = (asking.join().unwrap(), worker.join().unwrap());
        let wanted = 100 + u32::from(asked) + 10 * u32::from(worked);
        // Nobody has left a flag behind.
        let mut pair = cell.try_lock().unwrap();
        pair.add(0);
        assert_eq!(pair.0, wanted);
    });
}

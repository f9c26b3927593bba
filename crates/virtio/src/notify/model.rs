//! Notification suppression under loom, both sides: no notification that
//! somebody waits for is lost, whatever the order of the two halves.
//!
//! One half publishes entries one by one and notifies when the other wishes it;
//! the other takes what is there, and when nothing is there arms, looks again,
//! and sleeps. A lost notification leaves it asleep, which loom reports as a
//! deadlock. The rules, words and positions are those of the rings; only the
//! memory is loom's. Either half may be the device: calls and kicks differ in the
//! names of the words alone.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pollux-virtio --lib --release notify`

use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;
use std::sync::atomic::AtomicBool;

use super::{Signal, Wish, arm_then_look, publish_then_ask};
use crate::ring::packed::{Events, Position, Word};
use crate::spec::DescFlags;

/// Entries that are published.
const ENTRIES: u16 = 2;

/// The words that both halves share, and what each does with them. Entries are
/// numbered from 0; `taken` of them were taken.
trait Ring: Send + Sync + 'static {
    /// Makes entry `number` visible.
    fn publish(&self, number: u16);
    /// What the other half wishes to be told after entry `number`.
    fn wish(&self, number: u16) -> Wish;
    /// Wishes to be told of entry `taken`.
    fn arm(&self, taken: u16);
    /// Wishes to be told of nothing, as far as it can be said.
    fn disarm(&self, taken: u16);
    /// True if entry `taken` is there.
    fn has(&self, taken: u16) -> bool;
}

/// Split ring, by flags: `avail.flags` for calls, `used.flags` for kicks.
struct SplitFlags {
    idx: AtomicU16,
    flags: AtomicU16,
}

impl Ring for SplitFlags {
    fn publish(&self, number: u16) {
        self.idx.store(number + 1, Ordering::Release);
    }

    fn wish(&self, _number: u16) -> Wish {
        match self.flags.load(Ordering::Relaxed) {
            0 => Wish::Always,
            _ => Wish::Never,
        }
    }

    fn arm(&self, _taken: u16) {
        self.flags.store(0, Ordering::Relaxed);
    }

    fn disarm(&self, _taken: u16) {
        self.flags.store(1, Ordering::Relaxed);
    }

    fn has(&self, taken: u16) -> bool {
        self.idx.load(Ordering::Acquire) != taken
    }
}

/// Split ring with EVENT_IDX, over the wrap of the index.
struct SplitEvent {
    idx: AtomicU16,
    event: AtomicU16,
}

impl SplitEvent {
    const BASE: u16 = 0xffff;

    fn index(number: u16) -> u16 {
        Self::BASE.wrapping_add(number)
    }
}

impl Ring for SplitEvent {
    fn publish(&self, number: u16) {
        self.idx.store(Self::index(number + 1), Ordering::Release);
    }

    fn wish(&self, number: u16) -> Wish {
        let event = self.event.load(Ordering::Relaxed);
        Wish::at_event(event, Self::index(number + 1), 1)
    }

    fn arm(&self, taken: u16) {
        self.event.store(Self::index(taken), Ordering::Relaxed);
    }

    fn disarm(&self, taken: u16) {
        let far = Self::index(taken).wrapping_sub(1);
        self.event.store(far, Ordering::Relaxed);
    }

    fn has(&self, taken: u16) -> bool {
        self.idx.load(Ordering::Acquire) != Self::index(taken)
    }
}

/// Packed ring, over the end of the ring: the wrap counter flips between the two
/// entries. The publishing half is the driver, so these are kicks, if
/// `by_driver`.
struct Packed {
    words: [AtomicU64; Self::SIZE as usize],
    events: AtomicU32,
    event_idx: bool,
    by_driver: bool,
}

impl Packed {
    const SIZE: u16 = 3;

    fn new(event_idx: bool, by_driver: bool) -> Self {
        let start = Self::position(0);
        let before = |index: u16| {
            // What the slot held when its last lap was over.
            let lap = if index < start.index() {
                start
            } else {
                start.advance(3, 3)
            };
            Word::used(lap, 0, 0).0
        };
        Self {
            words: [0, 1, 2].map(|index| AtomicU64::new(before(index))),
            events: AtomicU32::new(Events::NEVER.0),
            event_idx,
            by_driver,
        }
    }

    fn position(number: u16) -> Position {
        Position::from_bits(0x8002).advance(number, Self::SIZE)
    }

    fn word(&self, number: u16) -> &AtomicU64 {
        &self.words[usize::from(Self::position(number).index())]
    }
}

impl Ring for Packed {
    fn publish(&self, number: u16) {
        let position = Self::position(number);
        let word = if self.by_driver {
            Word::available(position, 1, 1, DescFlags::default())
        } else {
            Word::used(position, 1, 1)
        };
        self.word(number).store(word.0, Ordering::Release);
    }

    fn wish(&self, number: u16) -> Wish {
        let events = Events(self.events.load(Ordering::Relaxed));
        events.wish(Self::position(number + 1), 1, Self::SIZE, self.event_idx)
    }

    fn arm(&self, taken: u16) {
        let events = Events::at(Self::position(taken), self.event_idx);
        self.events.store(events.0, Ordering::Relaxed);
    }

    fn disarm(&self, _taken: u16) {
        self.events.store(Events::NEVER.0, Ordering::Relaxed);
    }

    fn has(&self, taken: u16) -> bool {
        let word = Word(self.word(taken).load(Ordering::Acquire));
        let position = Self::position(taken);
        if self.by_driver {
            word.is_available(position)
        } else {
            word.is_used(position)
        }
    }
}

/// A ring, what its entries hold, and the eventfd.
struct World<R> {
    ring: R,
    contents: [AtomicU32; ENTRIES as usize],
    eventfd: Notify,
}

impl<R: Ring> World<R> {
    fn of(ring: R) -> Arc<Self> {
        Arc::new(Self {
            ring,
            contents: [0, 1].map(|_| AtomicU32::new(0)),
            eventfd: Notify::new(),
        })
    }

    /// The half that publishes.
    fn publish(&self, numbers: impl Iterator<Item = u16>) {
        let mut signal = Signal::default();
        for number in numbers {
            self.contents[usize::from(number)].store(7, Ordering::Relaxed);
            let wish = publish_then_ask(|| self.ring.publish(number), || self.ring.wish(number));
            if signal.decide(wish) {
                self.eventfd.notify();
            }
        }
    }

    /// The half that waits, until it has taken everything.
    fn take(&self) {
        let mut taken = 0;
        while taken < ENTRIES {
            if self.ring.has(taken) {
                let content = self.contents[usize::from(taken)].load(Ordering::Relaxed);
                assert_eq!(content, 7, "an entry is visible before what it holds");
                taken += 1;
                continue;
            }
            let is_there = arm_then_look(|| self.ring.arm(taken), || self.ring.has(taken));
            if !is_there {
                self.eventfd.wait();
            }
            self.ring.disarm(taken);
        }
    }
}

/// Nothing is lost between a half that publishes and one that sleeps.
fn assert_nothing_is_lost<R: Ring>(ring: impl Fn() -> R + Send + Sync + 'static) {
    loom::model(move || {
        let world = World::of(ring());
        world.ring.disarm(0);
        let publisher = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.publish(0..ENTRIES))
        };
        world.take();
        publisher.join().expect("no panic");
    });
}

fn split_flags() -> SplitFlags {
    SplitFlags {
        idx: AtomicU16::new(0),
        flags: AtomicU16::new(1),
    }
}

fn split_event() -> SplitEvent {
    SplitEvent {
        idx: AtomicU16::new(SplitEvent::BASE),
        event: AtomicU16::new(0),
    }
}

#[test]
fn split_rings_by_flags_lose_nothing() {
    assert_nothing_is_lost(split_flags);
}

#[test]
fn split_rings_by_event_index_lose_nothing() {
    assert_nothing_is_lost(split_event);
}

#[test]
fn packed_rings_by_flags_lose_no_call_and_no_kick() {
    for by_driver in [false, true] {
        assert_nothing_is_lost(move || Packed::new(false, by_driver));
    }
}

#[test]
fn packed_rings_by_position_lose_no_call_and_no_kick() {
    for by_driver in [false, true] {
        assert_nothing_is_lost(move || Packed::new(true, by_driver));
    }
}

/// B-18: whoever published before was killed between the entry and the signal,
/// while the other half slept. The first publication after the restart wakes it,
/// though its event is long past.
fn assert_restart_wakes<R: Ring>(ring: impl Fn() -> R + Send + Sync + 'static) {
    loom::model(move || {
        let world = World::of(ring());
        world.ring.arm(0);
        world.contents[0].store(7, Ordering::Relaxed);
        world.ring.publish(0);
        let publisher = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.publish(1..ENTRIES))
        };
        world.eventfd.wait();
        world.take();
        publisher.join().expect("no panic");
    });
}

#[test]
fn the_first_publication_after_a_restart_wakes_a_sleeper() {
    assert_restart_wakes(split_event);
    for by_driver in [false, true] {
        assert_restart_wakes(move || Packed::new(true, by_driver));
        assert_restart_wakes(move || Packed::new(false, by_driver));
    }
    assert_restart_wakes(split_flags);
}

/// The models can fail: in some execution, who looks before it arms sleeps though
/// an entry is there and nobody will tell.
#[test]
fn looking_before_arming_loses_a_notification() {
    let is_lost = std::sync::Arc::new(AtomicBool::new(false));
    let found = std::sync::Arc::clone(&is_lost);
    loom::model(move || {
        let world = World::of(split_event());
        world.ring.disarm(0);
        let publisher = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                // Not the first, which reaches every event.
                let mut signal = Signal { is_known: true };
                let wish = publish_then_ask(|| world.ring.publish(0), || world.ring.wish(0));
                signal.decide(wish)
            })
        };
        let is_there = world.ring.has(0);
        world.ring.arm(0);
        let is_told = publisher.join().expect("no panic");
        if !is_there && !is_told {
            found.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    });
    assert!(is_lost.load(std::sync::atomic::Ordering::Relaxed));
}

//! The entry protocol under loom. The memory of a mapping is a loom cell here, so
//! a memory laid over it while its owner unmaps it is an error that loom finds.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pollux-sys --lib --release registry`

/// What [`entry`] is built from here.
mod atomics {
    pub(super) use loom::{
        hint::spin_loop,
        sync::atomic::{AtomicU32, AtomicUsize, Ordering},
    };
}

#[path = "entry.rs"]
#[allow(dead_code, reason = "the model leaves out what reports use")]
#[allow(clippy::duplicate_mod, reason = "the same text over other atomics")]
mod entry;

use atomics::{AtomicU32, AtomicUsize, Ordering};
use entry::{Entry, Outcome};
use loom::{cell::UnsafeCell, sync::Arc, thread};

const START: usize = 0x1000;
const LEN: usize = 0x1000;
const FAULT: usize = START + 0x10;

/// What lies in the range of addresses of the first owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    OfPeer,
    Overlay,
    Unmapped,
}

struct World {
    entry: Entry,
    memory: UnsafeCell<Memory>,
    overlays: AtomicU32,
}

impl World {
    fn with_mapping() -> Arc<Self> {
        let world = Self {
            entry: Entry {
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                state: AtomicU32::new(entry::FREE),
            },
            memory: UnsafeCell::new(Memory::OfPeer),
            overlays: AtomicU32::new(0),
        };
        assert!(world.entry.claim());
        world.entry.publish(START, LEN);
        Arc::new(world)
    }

    fn memory(&self) -> Memory {
        // SAFETY: loom checks that nothing writes meanwhile.
        self.memory.with(|memory| unsafe { *memory })
    }

    fn set_memory(&self, new: Memory) {
        // SAFETY: loom checks that nothing else reads or writes meanwhile.
        self.memory.with_mut(|memory| unsafe { *memory = new });
    }

    fn fault(&self) -> Outcome {
        self.entry.contain(FAULT, |start, len| {
            assert_eq!((start, len), (START, LEN));
            assert_eq!(self.memory(), Memory::OfPeer);
            self.overlays.fetch_add(1, Ordering::Relaxed);
            self.set_memory(Memory::Overlay);
            true
        })
    }

    /// What dropping a mapping does.
    fn unmap(&self) {
        self.entry.remove();
        self.set_memory(Memory::Unmapped);
    }
}

#[test]
fn two_faults_at_once_lay_memory_over_once_and_both_see_it() {
    loom::model(|| {
        let world = World::with_mapping();
        let other = world.clone();
        let other = thread::spawn(move || {
            assert_eq!(other.fault(), Outcome::Contained);
            assert_eq!(other.memory(), Memory::Overlay);
        });
        assert_eq!(world.fault(), Outcome::Contained);
        assert_eq!(world.memory(), Memory::Overlay);
        other.join().unwrap();
        assert_eq!(world.overlays.load(Ordering::Relaxed), 1);
        assert!(world.entry.is_poisoned());
        world.unmap();
    });
}

/// The fault is one that should not be: its thread uses a mapping that is being
/// dropped. It is contained or not found; never is memory laid over what the range
/// has become, nor over the range of the entry's next owner.
#[test]
fn a_removed_entry_is_never_mapped_over() {
    loom::model(|| {
        let world = World::with_mapping();
        let other = world.clone();
        let other = thread::spawn(move || other.fault());
        world.unmap();
        assert!(world.entry.claim());
        world.entry.publish(START + LEN, LEN);
        let outcome = other.join().unwrap();
        let overlays = world.overlays.load(Ordering::Relaxed);
        match outcome {
            Outcome::Contained => assert_eq!(overlays, 1),
            _ => assert_eq!(overlays, 0),
        }
        assert!(!world.entry.is_poisoned(), "the next owner starts clean");
    });
}

/// A search for a fault elsewhere comes past while the entry changes hands.
#[test]
fn a_fault_in_the_next_mapping_finds_it_while_the_entry_is_reused() {
    loom::model(|| {
        let world = World::with_mapping();
        let passer_by = world.clone();
        let passer_by = thread::spawn(move || {
            passer_by.entry.contain(START + 2 * LEN, |_, _| {
                panic!("laid memory over a range without the address")
            })
        });
        world.unmap();
        assert!(world.entry.claim());
        world.entry.publish(START + LEN, LEN);
        let next = world.entry.contain(START + LEN, |start, len| {
            assert_eq!((start, len), (START + LEN, LEN));
            true
        });
        assert_eq!(next, Outcome::Contained);
        assert_eq!(passer_by.join().unwrap(), Outcome::Elsewhere);
    });
}

/// The rule for readers: bytes first, mark second.
#[test]
fn who_has_read_the_new_memory_sees_the_mark() {
    loom::model(|| {
        let world = World::with_mapping();
        let byte = Arc::new(AtomicU32::new(1));
        let (other, others_byte) = (world.clone(), byte.clone());
        let other = thread::spawn(move || {
            other.entry.contain(FAULT, |_, _| {
                // The kernel changes page tables under a lock and interrupts
                // other cores: stronger than a release.
                others_byte.store(0, Ordering::Release);
                true
            })
        });
        if byte.load(Ordering::Acquire) == 0 {
            assert!(world.entry.is_poisoned());
        }
        assert_eq!(other.join().unwrap(), Outcome::Contained);
    });
}

#[test]
fn a_refusal_is_seen_by_both() {
    loom::model(|| {
        let world = World::with_mapping();
        let other = world.clone();
        let other = thread::spawn(move || other.entry.contain(FAULT, |_, _| false));
        assert_eq!(world.entry.contain(FAULT, |_, _| false), Outcome::Lost);
        assert_eq!(other.join().unwrap(), Outcome::Lost);
        world.unmap();
    });
}

//! Two threads at one ring.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pollux_testkit::Guest;
use pollux_virtio::{GuestMemory, Region};

/// Races need both cores.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The guest's memory mapped once more, as the guest itself has it.
pub(crate) fn as_the_guest_sees_it(guest: &Guest) -> Arc<GuestMemory> {
    let regions = guest.places().map(|place| {
        let region = Region::map(guest.file.as_fd(), place);
        region.expect("mapped before")
    });
    Arc::new(GuestMemory::new(regions).expect("made before"))
}

/// Ends the other thread, also when an assertion fails in this one.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

//! The few things that [`crate::cell`] is built from, in two versions: those of
//! the standard library, and those of loom (`--cfg loom`), which runs a test
//! under every interleaving that the memory model allows.

#[cfg(loom)]
pub(crate) use loom::{
    cell::{MutPtr, UnsafeCell},
    hint::spin_loop,
    sync::atomic::{AtomicU32, Ordering},
    thread::yield_now,
};

#[cfg(not(loom))]
pub(crate) use self::native::{MutPtr, UnsafeCell, shared};

/// The value behind a pointer, borrowed and not to be changed. Loom's pointer
/// gives no shared borrow; no model takes two at one time.
///
/// # Safety
///
/// The cell is alive, and nobody changes its value while the reference lives.
#[cfg(loom)]
pub(crate) unsafe fn shared<T>(pointer: &MutPtr<T>) -> &T {
    // SAFETY: as the caller's.
    unsafe { pointer.deref() }
}
#[cfg(not(loom))]
pub(crate) use core::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::thread::yield_now;

/// loom's shape of an `UnsafeCell`, without its bookkeeping.
#[cfg(not(loom))]
mod native {
    /// A cell whose pointer is taken with [`UnsafeCell::get_mut`].
    pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(core::cell::UnsafeCell::new(value))
        }

        #[inline]
        pub(crate) fn get_mut(&self) -> MutPtr<T> {
            MutPtr(self.0.get())
        }

        pub(crate) fn into_inner(self) -> T {
            self.0.into_inner()
        }
    }

    /// A pointer into an [`UnsafeCell`]. Under loom its lifetime IS the access,
    /// so it is kept exactly as long as the value may be touched.
    pub(crate) struct MutPtr<T>(*mut T);

    impl<T> MutPtr<T> {
        /// The value, borrowed from this pointer.
        ///
        /// # Safety
        ///
        /// The cell is alive, and nothing else touches its value while the
        /// reference lives.
        #[inline]
        #[expect(
            clippy::mut_from_ref,
            reason = "loom's signature; exclusivity is the caller's promise"
        )]
        pub(crate) unsafe fn deref(&self) -> &mut T {
            // SAFETY: the pointer comes from `UnsafeCell::get`, so it is aligned
            // and initialised; the caller promises life and exclusivity.
            unsafe { &mut *self.0 }
        }
    }

    /// The value behind a pointer, borrowed and not to be changed.
    ///
    /// # Safety
    ///
    /// The cell is alive, and nobody changes its value while the reference
    /// lives.
    #[inline]
    pub(crate) unsafe fn shared<T>(pointer: &MutPtr<T>) -> &T {
        // SAFETY: the pointer comes from `UnsafeCell::get`, so it is aligned and
        // initialised; the caller promises life and no change.
        unsafe { &*pointer.0 }
    }
}

//! Single instructions: pause, prefetch, and the full fence.

use core::sync::atomic::{Ordering, fence};

/// Tells the core that this is a spin loop (`pause` on x86-64, 40 to 140 cycles
/// by model; `isb` on aarch64).
#[inline]
pub fn pause() {
    core::hint::spin_loop();
}

/// Starts to load the line at `ptr` into the first-level cache, for reading.
///
/// Safe for every address: a prefetch that cannot be translated is dropped by
/// the processor, without a fault.
#[inline]
#[allow(
    clippy::pointers_in_nomem_asm_block,
    reason = "a prefetch does not access memory as far as the program can tell"
)]
pub fn prefetch_read(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `prefetcht0` neither faults nor changes what a program can see
    // (Intel SDM vol. 2, PREFETCHh); it takes any address.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(ptr.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: `prfm` is a hint that never faults synchronously (Arm ARM,
    // "Prefetch memory"); it takes any address.
    unsafe {
        core::arch::asm!(
            "prfm pldl1keep, [{0}]",
            in(reg) ptr,
            options(nomem, nostack, preserves_flags)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = ptr;
}

/// Starts to load the line at `ptr` into the first-level cache, to be written:
/// the line is taken away from other cores now, not at the store.
///
/// Safe for every address, like [`prefetch_read`].
#[inline]
#[allow(
    clippy::pointers_in_nomem_asm_block,
    reason = "a prefetch does not access memory as far as the program can tell"
)]
pub fn prefetch_write(ptr: *const u8) {
    // Through asm: the compiler emits `prefetchw` for its intrinsic only with a
    // target feature that the baseline lacks. Every 64-bit x86 runs it: those
    // that do not implement it decode it as a no-op.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `prefetchw` neither faults nor changes what a program can see
    // (Intel SDM vol. 2, PREFETCHW); it takes any address.
    unsafe {
        core::arch::asm!(
            "prefetchw byte ptr [{0}]",
            in(reg) ptr,
            options(nomem, nostack, preserves_flags)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: `prfm` is a hint that never faults synchronously (Arm ARM,
    // "Prefetch memory"); it takes any address.
    unsafe {
        core::arch::asm!(
            "prfm pstl1keep, [{0}]",
            in(reg) ptr,
            options(nomem, nostack, preserves_flags)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = ptr;
}

/// A full barrier: no load after it is done before every store before it is
/// visible. It is what a device needs between publishing `used.idx` and reading
/// the driver's notification fields (VIRTIO 1.2, 2.7.7 and 2.7.10); acquire and
/// release do not order a store with a later load.
///
/// One per burst and ring, because it waits for the store buffer to drain. On
/// x86-64 rustc 1.95 emits `lock or dword ptr [rsp - 64], 0` for it, not
/// `mfence`. That is the one we want: both order ordinary memory, but `mfence`
/// also waits for weakly ordered (non-temporal, write-combining) accesses, of
/// which there are none here, and takes 70 cycles after a store where the locked
/// `or` takes 6 (measured, AMD EPYC). `fence` also stops the compiler from moving
/// accesses across, which asm alone would not promise for atomics.
#[inline]
pub fn full_fence() {
    fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetches_of_any_address_do_not_fault() {
        let line = [0_u8; 64];
        for ptr in [
            line.as_ptr(),
            core::ptr::null(),
            core::ptr::without_provenance(usize::MAX),
            // Not canonical on x86-64.
            core::ptr::without_provenance(1 << 62),
        ] {
            prefetch_read(ptr);
            prefetch_write(ptr);
        }
        pause();
        full_fence();
    }
}

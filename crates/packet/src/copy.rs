//! The copies. Three kinds, by what may change underneath:
//!
//! * [`snapshot`]: shared to private, volatile, for bytes that are judged;
//! * [`private`]: private to shared, for headers and heads;
//! * [`body`]: shared to shared, for bytes that nobody looks at.
//!
//! A peer may write to shared memory while it is copied. The result is then a
//! mix of old and new bytes, which is the peer's own affair; no decision rests
//! on bytes read by [`body`].

/// Up to here a copy is a few overlapping fixed-size moves; beyond, the C
/// library's `memcpy`, which knows the machine's widest registers, is faster
/// than its call costs.
const SMALL_MAX: usize = 128;

/// Copies `len` bytes of shared memory, each of them loaded exactly once: the
/// compiler can neither repeat such a load nor leave it out.
///
/// # Safety
/// `src..src + len` readable, `dst..dst + len` writable, not overlapping.
#[inline]
pub(crate) unsafe fn snapshot(src: *const u8, dst: *mut u8, len: usize) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::__m128i;
        macro_rules! load {
            ($type:ty, $class:ident, $text:literal) => {{
                let value: $type;
                // SAFETY: the caller of the macro keeps the bytes inside `len`;
                // SSE2 is part of x86_64.
                unsafe {
                    core::arch::asm!(
                        $text,
                        out($class) value,
                        in(reg) src.wrapping_add(done),
                        options(nostack, preserves_flags, readonly),
                    );
                }
                let to = dst.wrapping_add(done).cast::<$type>();
                // SAFETY: as above.
                unsafe { to.write_unaligned(value) };
                done += size_of::<$type>();
            }};
        }
        while done + 16 <= len {
            load!(__m128i, xmm_reg, "movups {}, [{}]");
        }
        if done + 8 <= len {
            load!(u64, reg, "mov {}, [{}]");
        }
        if done + 4 <= len {
            load!(u32, reg, "mov {:e}, [{}]");
        }
    }
    while done < len {
        // SAFETY: `done < len`.
        let byte = unsafe { src.wrapping_add(done).read_volatile() };
        // SAFETY: `done < len`.
        unsafe { dst.wrapping_add(done).write(byte) };
        done += 1;
    }
}

/// Copies private bytes into shared memory.
///
/// # Safety
/// `src..src + len` readable, `dst..dst + len` writable, not overlapping.
#[inline]
pub(crate) unsafe fn private(src: *const u8, dst: *mut u8, len: usize) {
    if len <= SMALL_MAX {
        // SAFETY: as the caller's.
        unsafe { small(src, dst, len) };
    } else {
        // SAFETY: as the caller's.
        unsafe { dst.copy_from_nonoverlapping(src, len) };
    }
}

/// Copies bytes that nobody judges from shared to shared memory. The two may
/// overlap: which bytes arrive is then unspecified for small copies.
///
/// # Safety
/// `src..src + len` readable, `dst..dst + len` writable.
#[inline]
pub(crate) unsafe fn body(src: *const u8, dst: *mut u8, len: usize) {
    if len <= SMALL_MAX {
        // SAFETY: as the caller's.
        unsafe { small(src, dst, len) };
    } else {
        // SAFETY: as the caller's; `copy_from` allows overlap. glibc's memmove
        // and memcpy are one function on x86_64, so this costs nothing.
        unsafe { dst.copy_from(src, len) };
    }
}

/// Copies at most [`SMALL_MAX`] bytes by two fixed-size moves that meet or
/// overlap in the middle: one well-predicted branch for each class of length.
///
/// # Safety
/// As [`body`], `len <= SMALL_MAX`.
#[inline]
unsafe fn small(src: *const u8, dst: *mut u8, len: usize) {
    debug_assert!(len <= SMALL_MAX);
    macro_rules! class {
        ($n:literal) => {
            if len > $n {
                // SAFETY: `$n <= len`.
                return unsafe { ends::<$n>(src, dst, len) };
            }
        };
    }
    class!(64);
    class!(32);
    class!(16);
    class!(8);
    class!(4);
    class!(2);
    if len >= 1 {
        // SAFETY: `1 <= len`.
        unsafe { ends::<1>(src, dst, len) }
    }
}

/// Moves the first and the last `N` bytes of `len`, `N <= len <= 2 N`.
///
/// # Safety
/// As [`body`], `N <= len`.
#[inline]
unsafe fn ends<const N: usize>(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: `N <= len`; arrays of bytes have no alignment.
    let first = unsafe { src.cast::<[u8; N]>().read() };
    // SAFETY: `len - N + N == len`.
    let last = unsafe { src.wrapping_add(len - N).cast::<[u8; N]>().read() };
    // SAFETY: `N <= len`.
    unsafe { dst.cast::<[u8; N]>().write(first) };
    // SAFETY: `len - N + N == len`.
    unsafe { dst.wrapping_add(len - N).cast::<[u8; N]>().write(last) };
}

//! Bytes that a peer may change while we look at them.

use std::marker::PhantomData;
use std::sync::atomic::AtomicU8;

use crate::copy;

/// Readable bytes in memory shared with a peer, valid for `'a`.
///
/// There is no way to a `&[u8]`: the bytes may change between two reads, so
/// they are copied once and the copy is judged.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    ptr: *const u8,
    len: u32,
    memory: PhantomData<&'a [AtomicU8]>,
}

/// Like [`Span`], writable too.
#[derive(Clone, Copy, Debug)]
pub struct SpanMut<'a>(
    /// Made from a pointer that may be written through.
    Span<'a>,
);

// SAFETY: a span is a shared borrow of bytes that anyone may change, like
// `&[AtomicU8]`, which is Send. Copies through it may race with the peer's
// writes by definition.
unsafe impl Send for Span<'_> {}
impl<'a> Span<'a> {
    /// No byte.
    pub const EMPTY: Self = Self {
        ptr: std::ptr::null(),
        len: 0,
        memory: PhantomData,
    };

    /// # Safety
    /// `ptr..ptr + len` must stay mapped and readable for `'a`, and lie in
    /// memory to which no Rust reference exists.
    #[inline]
    #[must_use]
    pub const unsafe fn new(ptr: *const u8, len: u32) -> Self {
        Self {
            ptr,
            len,
            memory: PhantomData,
        }
    }

    /// Private bytes as a span, for frames that no peer can change.
    ///
    /// # Panics
    /// If `bytes` is longer than `u32::MAX`.
    #[must_use]
    pub fn from_slice(bytes: &'a [u8]) -> Self {
        let len = u32::try_from(bytes.len()).expect("spans are shorter than 4 GiB");
        Self {
            ptr: bytes.as_ptr(),
            len,
            memory: PhantomData,
        }
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub const fn len(self) -> u32 {
        self.len
    }

    /// True for length 0.
    #[inline]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Address, for prefetching.
    #[inline]
    #[must_use]
    pub const fn as_ptr(self) -> *const u8 {
        self.ptr
    }

    /// Everything behind the first `bytes` (nothing if it is shorter).
    #[inline]
    #[must_use]
    pub fn skip(self, bytes: u32) -> Self {
        let bytes = bytes.min(self.len);
        Self {
            ptr: self.ptr.wrapping_add(bytes as usize),
            len: self.len - bytes,
            memory: PhantomData,
        }
    }

    /// The first `bytes` (all if it is shorter).
    #[inline]
    #[must_use]
    pub fn first(self, bytes: u32) -> Self {
        Self {
            len: self.len.min(bytes),
            ..self
        }
    }

    /// Copies the start of the span into private memory, loading each byte
    /// exactly once. Returns how many bytes were copied: the shorter of the two.
    #[inline]
    pub fn snapshot(self, into: &mut [u8]) -> usize {
        let len = into.len().min(self.len as usize);
        // SAFETY: `len` bytes are readable by the span's invariant and writable
        // by the slice's; private memory does not overlap shared memory.
        unsafe { copy::snapshot(self.ptr, into.as_mut_ptr(), len) };
        len
    }

    /// The first `N` bytes as a private copy, each loaded exactly once.
    ///
    /// # Panics
    /// If the span is shorter.
    #[inline]
    #[must_use]
    pub fn snapshot_array<const N: usize>(self) -> [u8; N] {
        assert!(N <= self.len as usize, "snapshot past the end of a span");
        let mut bytes = [0; N];
        // SAFETY: `N` bytes are readable by the check and the span's invariant;
        // private memory does not overlap shared memory.
        unsafe { copy::snapshot(self.ptr, bytes.as_mut_ptr(), N) };
        bytes
    }

    /// Copies the whole span to `to`, which must be at least as long.
    ///
    /// # Panics
    /// If `to` is shorter.
    #[inline]
    pub fn copy_to(self, to: SpanMut<'_>) {
        assert!(self.len <= to.0.len, "copy past the end of a span");
        // SAFETY: both lengths were just checked against the spans' invariants.
        // `copy::body` allows overlap: two regions of a guest may be one file.
        unsafe { copy::body(self.ptr, to.0.ptr.cast_mut(), self.len as usize) };
    }
}

impl<'a> SpanMut<'a> {
    /// No byte.
    pub const EMPTY: Self = Self(Span::EMPTY);

    /// # Safety
    /// `ptr..ptr + len` must stay mapped, readable and writable for `'a`, and
    /// lie in memory to which no Rust reference exists.
    #[inline]
    #[must_use]
    pub const unsafe fn new(ptr: *mut u8, len: u32) -> Self {
        // SAFETY: as the caller's.
        Self(unsafe { Span::new(ptr, len) })
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub const fn len(self) -> u32 {
        self.0.len
    }

    /// True for length 0.
    #[inline]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// Address, for prefetching.
    #[inline]
    #[must_use]
    pub const fn as_ptr(self) -> *const u8 {
        self.0.ptr
    }

    /// The same bytes, read only.
    #[inline]
    #[must_use]
    pub const fn as_span(self) -> Span<'a> {
        self.0
    }

    /// Everything behind the first `bytes` (nothing if it is shorter).
    #[inline]
    #[must_use]
    pub fn skip(self, bytes: u32) -> Self {
        Self(self.0.skip(bytes))
    }

    /// The first `bytes` (all if it is shorter).
    #[inline]
    #[must_use]
    pub fn first(self, bytes: u32) -> Self {
        Self(self.0.first(bytes))
    }

    /// Writes private bytes to the start of the span.
    ///
    /// # Panics
    /// If `bytes` is longer than the span.
    #[inline]
    pub fn write(self, bytes: &[u8]) {
        assert!(
            bytes.len() <= self.0.len as usize,
            "write past the end of a span"
        );
        // SAFETY: the length was just checked; private memory does not overlap
        // shared memory.
        unsafe { copy::private(bytes.as_ptr(), self.0.ptr.cast_mut(), bytes.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span_of(bytes: &mut [u8]) -> SpanMut<'_> {
        let len = u32::try_from(bytes.len()).expect("short");
        // SAFETY: the borrow of `bytes` lasts as long as the span.
        unsafe { SpanMut::new(bytes.as_mut_ptr(), len) }
    }

    #[test]
    fn snapshot_and_write_copy_exactly_the_length_asked() {
        let source: Vec<u8> = (0..=255).collect();
        for len in 0..=200 {
            let mut private = vec![0xee; 201];
            let span = Span::from_slice(&source[3..]);
            assert_eq!(span.snapshot(&mut private[..len]), len);
            assert_eq!(private[..len], source[3..3 + len]);
            assert!(private[len..].iter().all(|&b| b == 0xee), "{len}");

            let mut shared = vec![0xee; 201];
            span_of(&mut shared).write(&source[5..5 + len]);
            assert_eq!(shared[..len], source[5..5 + len]);
            assert!(shared[len..].iter().all(|&b| b == 0xee), "{len}");
        }
    }

    #[test]
    fn copy_to_copies_exactly_the_length_of_the_source() {
        let source: Vec<u8> = (0u32..70_000)
            .map(|i| i.to_le_bytes()[0] ^ i.to_le_bytes()[1])
            .collect();
        for len in (0..300).chain([1454, 4096, 65_535]) {
            let mut shared = vec![0xee; len + 64];
            Span::from_slice(&source[..len]).copy_to(span_of(&mut shared));
            assert_eq!(shared[..len], source[..len]);
            assert!(shared[len..].iter().all(|&b| b == 0xee), "{len}");
        }
    }

    #[test]
    fn skip_and_first_stay_inside() {
        let bytes = [1, 2, 3, 4];
        let span = Span::from_slice(&bytes);
        assert_eq!(span.skip(9).len(), 0);
        assert_eq!(span.first(9).len(), 4);
        let mut out = [0; 2];
        assert_eq!(span.skip(1).first(2).snapshot(&mut out), 2);
        assert_eq!(out, [2, 3]);
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn write_past_the_end_is_refused() {
        let mut bytes = [0; 4];
        span_of(&mut bytes).write(&[0; 5]);
    }
}

//! Decisions out of the bytes of an input.

use arbitrary::Unstructured;

/// The bytes of an input that are left. Behind the last one come zeros, so that
/// every input means something and a prefix of it nearly the same.
#[derive(Debug)]
pub(crate) struct Bytes<'a>(Unstructured<'a>);

impl<'a> Bytes<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(Unstructured::new(bytes))
    }

    /// Everything is used up.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn u8(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u16(&mut self) -> u16 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u32(&mut self) -> u32 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// A number below `end`, which is at most 256; one byte.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        u32::from(self.u8()) % end
    }

    /// A number below `end`, which is at most 65,536; two bytes.
    pub(crate) fn below_wide(&mut self, end: u32) -> u32 {
        u32::from(self.u16()) % end
    }

    /// True for one byte value in `times`, never for 0.
    pub(crate) fn one_in(&mut self, times: u32) -> bool {
        self.below(times) == times - 1
    }

    /// One of at most 256 values.
    pub(crate) fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::from(self.u8()) % values.len()]
    }

    /// Up to `count` bytes, fewer if there are no more.
    pub(crate) fn take(&mut self, count: usize) -> Vec<u8> {
        let count = count.min(self.0.len());
        self.0.bytes(count).map(<[u8]>::to_vec).unwrap_or_default()
    }
}

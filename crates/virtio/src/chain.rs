//! Walking a descriptor chain: the only place where a guest's chain is
//! followed. Each descriptor is copied once; the walk is bounded by the ring
//! size and by the bytes that the caller takes.

use crate::memory::GuestMemory;
use crate::ring::{Descriptor, RingTable};
use crate::spec::{DESC_BYTES, DescFlags};

/// A chain that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ChainError {
    /// A buffer or an indirect table is not in guest memory.
    #[error("an address is outside guest memory")]
    Unmapped,
    /// More descriptors than the ring has: a loop, or a driver against section
    /// 2.7.5.3.1.
    #[error("more descriptors than the ring size")]
    TooLong,
    /// `next` is outside its table.
    #[error("next is outside the table")]
    NextOutside,
    /// An indirect table whose length is 0 or no multiple of 16.
    #[error("indirect table with a bad length")]
    IndirectLength,
    /// An indirect table inside an indirect table.
    #[error("nested indirect table")]
    IndirectNested,
    /// INDIRECT together with NEXT (section 2.7.5.3.1).
    #[error("indirect descriptor with a next")]
    IndirectNext,
    /// A buffer to write to in a TX ring, or to read in an RX ring.
    #[error("buffer with the wrong direction")]
    Direction,
    /// The chain lies in more pieces than a burst can hold.
    #[error("too many pieces")]
    TooManyPieces,
    /// Shorter than the virtio-net header plus an Ethernet header.
    #[error("shorter than its headers")]
    Runt,
    /// Longer than the longest frame.
    #[error("longer than the longest frame")]
    Oversize,
}

impl ChainError {
    /// Every error, in the order of [`ChainErrorCounts`].
    pub const ALL: &'static [Self] = &[
        Self::Unmapped,
        Self::TooLong,
        Self::NextOutside,
        Self::IndirectLength,
        Self::IndirectNested,
        Self::IndirectNext,
        Self::Direction,
        Self::TooManyPieces,
        Self::Runt,
        Self::Oversize,
    ];
}

/// How often each [`ChainError`] was met on a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainErrorCounts([u64; ChainError::ALL.len()]);

impl ChainErrorCounts {
    #[cold]
    pub(crate) fn add(&mut self, error: ChainError) {
        self.0[error as usize] += 1;
    }

    /// How often `error` was met.
    #[must_use]
    pub fn get(&self, error: ChainError) -> u64 {
        self.0[error as usize]
    }
}

/// An indirect table (section 2.7.5.3), of which nothing but the length was
/// checked: guests may place it anywhere, at any alignment, over regions.
#[derive(Clone, Copy, Debug)]
struct IndirectTable {
    addr: u64,
    len: u32,
}

/// A walk over the buffers of one chain.
#[derive(Debug)]
pub(crate) struct Walk<'m> {
    memory: &'m GuestMemory,
    ring: RingTable<'m>,
    indirect: Option<IndirectTable>,
    /// What comes next: a descriptor that was copied, or an index to copy.
    next: Next,
    /// Buffers that may still follow.
    left: u16,
    /// Descriptors copied so far, tables included.
    descriptors: u32,
}

#[derive(Clone, Copy, Debug)]
enum Next {
    Copied(Descriptor),
    Index(u16),
    End,
}

impl<'m> Walk<'m> {
    /// Starts at a head that was copied already. At most `buffers_max` buffers
    /// may follow: no chain has more than the ring size (section 2.7.5.3.1).
    #[inline]
    pub(crate) fn new(
        memory: &'m GuestMemory,
        ring: RingTable<'m>,
        head: Descriptor,
        buffers_max: u16,
    ) -> Self {
        Self {
            memory,
            ring,
            indirect: None,
            next: Next::Copied(head),
            left: buffers_max,
            descriptors: 0,
        }
    }

    /// Descriptors copied so far: what the chain costs.
    #[inline]
    pub(crate) fn descriptors(&self) -> u32 {
        self.descriptors
    }

    /// True in an indirect table of a packed ring.
    #[inline]
    pub(crate) fn is_in_packed_table(&self) -> bool {
        self.indirect.is_some() && matches!(self.ring, RingTable::Packed(_))
    }

    /// Buffers that might have followed.
    #[inline]
    pub(crate) fn left(&self) -> u16 {
        self.left
    }

    /// The next buffer, or `None` behind the last.
    #[inline]
    pub(crate) fn buffer(&mut self) -> Result<Option<Descriptor>, ChainError> {
        let mut descriptor = match self.next {
            Next::End => return Ok(None),
            Next::Copied(descriptor) => descriptor,
            Next::Index(index) => self.copy(index)?,
        };
        self.descriptors += 1;
        if descriptor.flags.intersects(DescFlags::INDIRECT) {
            self.enter(descriptor)?;
            descriptor = self.copy(0)?;
            self.descriptors += 1;
            if descriptor.flags.intersects(DescFlags::INDIRECT) {
                return Err(ChainError::IndirectNested);
            }
        }
        self.left = self.left.checked_sub(1).ok_or(ChainError::TooLong)?;
        self.next = if descriptor.flags.intersects(DescFlags::NEXT) {
            Next::Index(descriptor.next)
        } else {
            Next::End
        };
        Ok(Some(descriptor))
    }

    /// Goes on in an indirect table. Its WRITE flag is ignored (section
    /// 2.7.5.3.2).
    fn enter(&mut self, descriptor: Descriptor) -> Result<(), ChainError> {
        if self.indirect.is_some() {
            return Err(ChainError::IndirectNested);
        }
        if descriptor.flags.intersects(DescFlags::NEXT) {
            return Err(ChainError::IndirectNext);
        }
        if descriptor.len == 0 || !descriptor.len.is_multiple_of(DESC_BYTES) {
            return Err(ChainError::IndirectLength);
        }
        self.indirect = Some(IndirectTable {
            addr: descriptor.addr,
            len: descriptor.len / DESC_BYTES,
        });
        Ok(())
    }

    fn copy(&self, index: u16) -> Result<Descriptor, ChainError> {
        let Some(table) = self.indirect else {
            return self.ring.desc(index).ok_or(ChainError::NextOutside);
        };
        if u32::from(index) >= table.len {
            return Err(ChainError::NextOutside);
        }
        let addr = table
            .addr
            .checked_add(u64::from(index) * u64::from(DESC_BYTES))
            .ok_or(ChainError::Unmapped)?;
        let mut bytes = [0; DESC_BYTES as usize];
        self.memory
            .read(addr, &mut bytes)
            .ok_or(ChainError::Unmapped)?;
        let (addr, rest) = bytes.split_first_chunk::<8>().expect("16 bytes");
        let rest = rest.first_chunk::<8>().expect("8 more bytes");
        let (addr, rest) = (u64::from_le_bytes(*addr), u64::from_le_bytes(*rest));
        Ok(self.ring.indirect_desc(index, table.len, addr, rest))
    }
}

/// Gives the pieces of a buffer in guest memory to `each`, at most `bytes_max`
/// bytes of them; returns how many bytes that was.
///
/// A buffer of length 0 is allowed wherever it points (section 2.7.5 sets no
/// rule for it, and drivers send them).
#[inline]
pub(crate) fn pieces<'m>(
    memory: &'m GuestMemory,
    buffer: Descriptor,
    bytes_max: u32,
    mut each: impl FnMut(pollux_packet::SpanMut<'m>) -> Result<(), ChainError>,
) -> Result<u32, ChainError> {
    let wanted = buffer.len.min(bytes_max);
    let mut addr = buffer.addr;
    let mut rest = wanted;
    while rest > 0 {
        let piece = memory.piece(addr, rest).ok_or(ChainError::Unmapped)?;
        each(piece)?;
        rest -= piece.len();
        addr = match addr.checked_add(u64::from(piece.len())) {
            Some(addr) => addr,
            None if rest == 0 => break,
            None => return Err(ChainError::Unmapped),
        };
    }
    Ok(wanted)
}

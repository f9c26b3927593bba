//! Memory of a peer, mapped so that the peer cannot kill the switch.
//!
//! A frontend sends file descriptors of a guest's memory and keeps its own. If
//! it shortens the file, touching what is gone raises SIGBUS in the switch, whose
//! default action ends the process and so every other guest's network. (Sealing
//! would prevent it, but only the sender can seal, and file systems other than
//! memfd's do not know seals.)
//!
//! So each [`Mapping`] is in a registry that the SIGBUS action can search. On a
//! fault in a mapping the action lays anonymous memory over ALL of it, marks it
//! poisoned, and lets the faulting instruction run again; the worker goes on
//! reading zeros and writing to nobody. It looks at [`poison_count`] once per
//! burst before it publishes anything, finds the mapping with
//! [`Mapping::is_poisoned`], and breaks that ring.
//!
//! The mark is set BEFORE the memory is laid over: whoever has read a byte of the
//! new memory sees the mark if it looks afterwards.
//!
//! The action is installed with the first mapping and stays. A SIGBUS that is not
//! about a mapping gets the action that was there before, which is put back
//! first: nearly always that ends the process.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
};

use crate::{descriptor, memory_file, registry};

/// How many mappings a process can have at a time. Far above need (8 regions and
/// a log for each of 1,000 ports is 9,000) and small enough for a table of fixed
/// size, 384 KiB of zero pages until they are used.
pub const MAPPING_CAPACITY: usize = registry::CAPACITY;

/// Why memory could not be mapped. Lengths and offsets are in bytes.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// A mapping of nothing.
    #[error("cannot map 0 bytes at offset {offset}")]
    Empty {
        /// Where in the file.
        offset: u64,
    },
    /// `offset + len` is more than an offset can say.
    #[error("{len} bytes at offset {offset} end beyond the largest file offset")]
    Overflow {
        /// Where in the file.
        offset: u64,
        /// How much.
        len: usize,
    },
    /// The file is too short.
    #[error("{len} bytes at offset {offset} end beyond the file, which has {file_bytes} bytes")]
    OutsideFile {
        /// Where in the file.
        offset: u64,
        /// How much.
        len: usize,
        /// The length of the file; 0 if it is not a file with a length.
        file_bytes: u64,
    },
    /// `statx(2)` or `fstatfs(2)` failed.
    #[error("cannot ask for the size of the file to be mapped")]
    Inspect(#[source] io::Error),
    /// `mmap(2)` failed: the descriptor is not open for reading and writing, the
    /// file cannot be mapped, or there are too many mappings.
    #[error("cannot map {len} bytes at offset {offset}")]
    Mmap {
        /// Where in the file.
        offset: u64,
        /// How much.
        len: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The SIGBUS action could not be installed.
    #[error("cannot install the SIGBUS action that protects mappings")]
    Action(#[source] io::Error),
    /// There are [`MAPPING_CAPACITY`] mappings already.
    #[error("all {capacity} entries of the mapping registry are in use")]
    RegistryFull {
        /// How many there are.
        capacity: usize,
    },
}

/// A part of a peer's file, mapped shared, readable and writable, and unmapped
/// when this is dropped.
///
/// The peer writes to this memory whenever it likes, so it is handed out as a raw
/// pointer only: reading and writing it is for code that knows how (volatile or
/// atomic, each field once). Nothing may use the pointer after the drop.
#[derive(Debug)]
pub struct Mapping {
    /// What was asked for.
    first: NonNull<u8>,
    len: usize,
    /// What the kernel mapped: whole pages of the file, from the one with the
    /// first byte to the one with the last.
    start: NonNull<u8>,
    mapped_bytes: usize,
    slot: registry::Slot,
}

// SAFETY: a mapping belongs to the process, not to a thread; the type itself never
// touches the memory and has nothing else that is bound to a thread.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference one gets a pointer, two numbers and a flag
// that is read atomically.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` on. The descriptor may be closed
    /// afterwards.
    ///
    /// The offset is in bytes and need not be on a page boundary: frontends cut
    /// a file of huge pages where the guest's address space has a hole (QEMU:
    /// guest address and offset 0xc0000). The kernel maps whole pages, so what
    /// lies around the range in its first and last page is mapped too, and is
    /// replaced with it when the mapping is poisoned.
    ///
    /// What kind of file it is, is not checked; see
    /// [`memory_file`](crate::memory_file()). The size is checked now; that it
    /// stays so is not to be relied on, and not relied on.
    ///
    /// # Errors
    ///
    /// See [`MapError`].
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, MapError> {
        if len == 0 {
            return Err(MapError::Empty { offset });
        }
        let page_bytes = memory_file::page_bytes(fd).map_err(MapError::Inspect)?;
        let part = Part::of(offset, len, page_bytes).ok_or(MapError::Overflow { offset, len })?;
        let file_bytes = descriptor::stat(fd).map_err(MapError::Inspect)?.bytes;
        if part.end > file_bytes {
            return Err(MapError::OutsideFile {
                offset,
                len,
                file_bytes,
            });
        }

        registry::install_action().map_err(MapError::Action)?;
        let mapped_bytes = part.mapped_bytes;
        let start = map_shared(fd, part.start, mapped_bytes).map_err(|source| MapError::Mmap {
            offset,
            len,
            source,
        })?;
        let Some(slot) = registry::insert(start.addr().get(), mapped_bytes) else {
            unmap(start, mapped_bytes);
            return Err(MapError::RegistryFull {
                capacity: MAPPING_CAPACITY,
            });
        };
        // SAFETY: less than a page, of which at least one is mapped at `start`.
        let first = unsafe { start.add(part.skipped_bytes) };
        Ok(Self {
            first,
            len,
            start,
            mapped_bytes,
            slot,
        })
    }

    /// The first byte.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.first
    }

    /// The length in bytes, as asked for.
    #[inline]
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a mapping is never empty, so there is nothing to ask"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether a fault has cut this mapping off from the peer: what is read is
    /// made of zeros, and what is written nobody sees. It stays so.
    ///
    /// One load, but of a line that faults elsewhere may take away: look at
    /// [`poison_count`] first.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        registry::is_poisoned(&self.slot)
    }
}

/// A part of a file in whole pages. All in bytes.
struct Part {
    /// Offset of the first page.
    start: libc::off_t,
    /// How much of that page lies before the part.
    skipped_bytes: usize,
    /// Length of all pages: hugetlbfs maps whole pages, and unmaps (and lays
    /// other memory over) nothing less.
    mapped_bytes: usize,
    /// Offset behind the part.
    end: u64,
}

impl Part {
    /// `len` bytes from `offset` on; `None` if an offset cannot say where they
    /// or their pages end.
    fn of(offset: u64, len: usize, page_bytes: u64) -> Option<Self> {
        let skipped = offset % page_bytes;
        let skipped_bytes = usize::try_from(skipped).ok()?;
        let mapped_bytes = skipped_bytes
            .checked_add(len)?
            .checked_next_multiple_of(usize::try_from(page_bytes).ok()?)?;
        let start = offset - skipped;
        // The kernel counts in signed offsets.
        let start_offset = libc::off_t::try_from(start).ok()?;
        start_offset.checked_add(libc::off_t::try_from(mapped_bytes).ok()?)?;
        Some(Self {
            start: start_offset,
            skipped_bytes,
            mapped_bytes,
            end: offset.checked_add(u64::try_from(len).ok()?)?,
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: once the range is unmapped, something else may be mapped there,
        // and the action must not lay memory over that.
        registry::remove(&self.slot);
        unmap(self.start, self.mapped_bytes);
    }
}

/// How many mappings of this process have been poisoned so far (it wraps after
/// 2^32). A worker compares it with the number it saw last, once per burst before
/// publishing: one acquire load (after an acquire fence, which is free on x86-64)
/// of a line that changes only with a poisoning.
///
/// If it has not changed, nothing that was read before the call came from memory
/// that was laid over a mapping since the number was seen last.
#[inline]
#[must_use]
pub fn poison_count() -> u32 {
    registry::poison_count()
}

/// How many mappings there are now, of [`MAPPING_CAPACITY`]: a walk over the
/// registry, for reports and tests.
#[must_use]
pub fn mapping_count() -> usize {
    registry::count()
}

/// A new memory file of `len` bytes, all zero, close-on-exec, that can be sealed
/// (`memfd_create(2)`). `name` shows up in `/proc/PID/maps`.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidInput`] if `name` has a zero byte or `len` is more than
/// a file offset can say; otherwise those of `memfd_create(2)` and `ftruncate(2)`.
pub fn memfd(name: &str, len: u64) -> io::Result<OwnedFd> {
    let invalid = |what| io::Error::new(io::ErrorKind::InvalidInput, what);
    let name = CString::new(name).map_err(|_| invalid("memfd name has a zero byte"))?;
    let len = libc::off_t::try_from(len).map_err(|_| invalid("memfd length is too large"))?;
    // SAFETY: `name` is a C string that outlives the call.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nothing else knows
    // it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: no pointers are passed, and `fd` is open.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), len) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

fn map_shared(
    fd: BorrowedFd<'_>,
    offset: libc::off_t,
    mapped_bytes: usize,
) -> io::Result<NonNull<u8>> {
    // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing uses.
    let start = unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            mapped_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            offset,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // The kernel does not map at 0 unless it is told to.
    NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Gives a range back that [`map_shared`] returned.
fn unmap(start: NonNull<u8>, mapped_bytes: usize) {
    // SAFETY: the range is whole and ours, from `map_shared`; its owner is being
    // dropped or was never made, so nothing uses it (see `Mapping`).
    let result = unsafe { libc::munmap(start.as_ptr().cast(), mapped_bytes) };
    // It can fail only if the process is at its limit of mappings and the kernel
    // had joined this one with a neighbour. Then the addresses stay taken, which
    // harms nobody.
    debug_assert_eq!(result, 0, "munmap of a range that mmap returned");
}

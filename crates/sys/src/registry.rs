//! All mappings of the process, where a signal action can find them, and that
//! action.
//!
//! A table of fixed size, made of atomics, without a lock: the SIGBUS action can
//! interrupt any instruction of any thread, so it must not wait for something that
//! the interrupted thread holds. What an [`Entry`] promises is in its module; this
//! one has the table, the system calls, and the order of events.

mod entry;
#[cfg(all(test, loom))]
mod model;

/// What [`entry`] is built from; its loom test builds it from loom's.
mod atomics {
    pub(super) use core::{
        hint::spin_loop,
        sync::atomic::{AtomicU32, AtomicUsize, Ordering},
    };
}

use core::{
    ffi::{c_int, c_long, c_void},
    mem::MaybeUninit,
    ptr,
    sync::atomic::fence,
};
use std::{io, sync::OnceLock};

use atomics::{AtomicU32, AtomicUsize, Ordering};
use entry::{Entry, Outcome};

/// Entries of the table.
pub(crate) const CAPACITY: usize = 16_384;

static TABLE: [Entry; CAPACITY] = [const {
    Entry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        state: AtomicU32::new(entry::FREE),
    }
}; CAPACITY];

/// One more than the highest entry that was ever used: how far a search goes. It
/// never falls. Entries are taken from the lowest free one on, so it is the
/// largest number of mappings that there ever were at a time.
static HIGH_WATER: AtomicUsize = AtomicUsize::new(0);

/// A number on a line (and pair of lines) that it shares with nothing.
#[repr(align(128))]
struct Line(AtomicU32);

static POISON_COUNT: Line = Line(AtomicU32::new(0));

/// An entry of the table that its owner has filled.
#[derive(Debug)]
pub(crate) struct Slot(&'static Entry);

/// Enters a range; `None` if the table is full.
///
/// The range is protected when this returns. Whoever touches it later got its
/// address from the caller, so sees the entry, and the high-water mark above it.
pub(crate) fn insert(start: usize, len: usize) -> Option<Slot> {
    let (index, entry) = TABLE.iter().enumerate().find(|(_, entry)| entry.claim())?;
    // Relaxed: ordered for those who need it by the way the address reaches them.
    HIGH_WATER.fetch_max(index + 1, Ordering::Relaxed);
    entry.publish(start, len);
    Some(Slot(entry))
}

/// Takes a range out. When this returns, no action is working on it, and none
/// will.
pub(crate) fn remove(slot: &Slot) {
    slot.0.remove();
}

#[inline]
pub(crate) fn is_poisoned(slot: &Slot) -> bool {
    slot.0.is_poisoned()
}

#[inline]
pub(crate) fn poison_count() -> u32 {
    // Keeps loads of guest memory, which precede, from being done after the count
    // is read. No instruction on x86-64, where loads are in order.
    fence(Ordering::Acquire);
    POISON_COUNT.0.load(Ordering::Acquire)
}

/// How many entries are in use.
pub(crate) fn count() -> usize {
    used_part().filter(|entry| entry.is_used()).count()
}

fn used_part() -> impl Iterator<Item = &'static Entry> {
    TABLE.iter().take(HIGH_WATER.load(Ordering::Relaxed))
}

/// The action that was there before ours. Set before ours is installed, so the
/// action finds it always.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the SIGBUS action, at the first call.
///
/// # Errors
///
/// What `sigaction(2)` said at the first call.
pub(crate) fn install_action() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EINVAL);
        let previous = sigaction(None).map_err(errno)?;
        PREVIOUS.get_or_init(|| previous);
        sigaction(Some(&our_action())).map_err(errno)?;
        Ok(())
    });
    installed.map_err(io::Error::from_raw_os_error)
}

fn our_action() -> libc::sigaction {
    // SAFETY: `sigaction` is integers and an optional function pointer; zero is a
    // value of each.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
    action.sa_sigaction = handler as usize;
    // On the alternative stack if the thread has one (Rust's threads do): the
    // fault may have happened near the end of the ordinary one.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // All other signals wait: an action of theirs that touched the same mapping
    // while we lay memory over it would wait for us, and we for it.
    // SAFETY: the set is ours.
    unsafe { libc::sigfillset(&raw mut action.sa_mask) };
    action
}

/// Sets the action of SIGBUS if there is a new one; returns the one before.
fn sigaction(new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut old = MaybeUninit::<libc::sigaction>::uninit();
    let new = new.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: both point to whole `sigaction`s or are null. A new action is ours,
    // whose code is written for a signal (see `on_sigbus`), or the one that was
    // installed before.
    if unsafe { libc::sigaction(libc::SIGBUS, new, old.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel's answer has been written.
    Ok(unsafe { old.assume_init() })
}

/// The SIGBUS action.
///
/// It may interrupt anything, so it uses atomics and system calls and nothing
/// else: it does not allocate, lock, panic, or touch thread-local values except
/// `errno`, which it leaves as it found it.
extern "C" fn on_sigbus(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: returns the address of this thread's `errno`, always.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: that address is valid in this thread, and aligned.
    let saved = unsafe { errno.read() };
    // SAFETY: with SA_SIGINFO the kernel passes a `siginfo_t` on our stack.
    let info = unsafe { &*info };
    let code = info.si_code;
    if is_fault(code) {
        // SAFETY: for these codes the kernel has filled in the address member.
        let addr = unsafe { info.si_addr() }.addr();
        if !contain(addr) {
            // Returning runs the instruction again, and it faults again, under
            // the previous action.
            restore_previous_action();
        }
    } else {
        restore_previous_action();
        if code <= 0 {
            // Sent by a process (kill, tgkill, sigqueue): it does not come by
            // itself a second time. Blocked until we return, then delivered.
            send_again();
        }
    }
    // SAFETY: as for the read.
    unsafe { errno.write(saved) };
}

/// Whether a SIGBUS says that the memory behind an address is gone, so that other
/// memory in its place cures it. The codes are those of `sigaction(2)`:
/// BUS_ADRERR, the file is too short; BUS_OBJERR, the same on some architectures;
/// BUS_MCEERR_AR, the hardware lost the page that was accessed, which for a
/// guest's memory should cost us that guest only. Not BUS_ADRALN, which would
/// repeat for ever, nor BUS_MCEERR_AO, which no access caused.
fn is_fault(code: c_int) -> bool {
    matches!(
        code,
        libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR
    )
}

/// Finds the mapping around `addr` and poisons it. Returns whether the fault is
/// cured; otherwise the address is not in a mapping, or the kernel refused.
fn contain(addr: usize) -> bool {
    for entry in used_part() {
        match entry.contain(addr, poison) {
            Outcome::Elsewhere => {}
            Outcome::Contained => return true,
            Outcome::Lost => return false,
        }
    }
    false
}

/// Counts a poisoning, then lays private memory over the range. The entry has its
/// mark already; that and the count come first for the reason in
/// [`crate::mapping`].
fn poison(start: usize, len: usize) -> bool {
    // Release: whoever sees the new count sees the mark.
    POISON_COUNT.0.fetch_add(1, Ordering::Release);
    // By number: the C library's function may be a point where its threads are
    // cancelled, or interposed by a tool. NORESERVE: a guest's memory is large,
    // hardly a page of this will be touched, and a kernel that counts must not
    // refuse.
    // All arguments as wide as a register: `syscall` reads them so.
    let protection = c_long::from(libc::PROT_READ | libc::PROT_WRITE);
    let flags = c_long::from(
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
    );
    let no_fd: c_long = -1;
    let no_offset: c_long = 0;
    // SAFETY: the range is one whole mapping of a `Mapping` whose removal waits
    // for us (`Entry::contain` holds the entry), so replacing it takes nothing
    // away from anyone else; the `Mapping` hands out raw pointers only, and says
    // that its bytes may change at any time.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            start,
            len,
            protection,
            flags,
            no_fd,
            no_offset,
        )
    };
    result != -1
}

/// Puts the action back that was there before ours. Also for other threads and
/// later faults: the process has met a SIGBUS that it was not built for, and is
/// about to end unless that action knows better.
fn restore_previous_action() {
    // `OnceLock::get` is one atomic load.
    if let Some(previous) = PREVIOUS.get() {
        // It cannot fail: the kernel gave us this action itself.
        let _ = sigaction(Some(previous));
    }
}

/// Sends this thread the SIGBUS that it is handling once more.
fn send_again() {
    let signal = c_long::from(libc::SIGBUS);
    // SAFETY: no arguments.
    let process = unsafe { libc::syscall(libc::SYS_getpid) };
    // SAFETY: no arguments.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    // SAFETY: no pointers are passed; a signal to ourselves has no effect on
    // memory.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
}

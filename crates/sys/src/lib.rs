//! The floor that pollux stands on: everything in the switch that has to speak
//! to the kernel or the processor directly, behind interfaces that are safe to
//! use.
//!
//! # What is here
//!
//! * [`mapping`]: memory of a peer, mapped so that the peer cannot kill the
//!   switch by shortening the file under it ([`Mapping`], [`poison_count`]).
//! * [`cell`]: what workers and control share on the packet path, one lock per
//!   burst and a flag by which control always gets its turn ([`RingCell`]).
//! * [`memory_file`]: whether a file that a peer sent as memory is memory.
//! * [`clock`]: time in ticks of the processor's counter ([`Clock`]).
//! * [`pin`]: one thread, one core ([`pin_current_thread`]).
//! * [`eventfd`]: kicks and calls that never block a worker ([`EventFd`]).
//! * [`interrupt`]: what ends the wait of a worker that was made to block
//!   ([`Interrupt`]).
//! * [`hint`]: pause, prefetch, and the one fence that the rings need.
//!
//! # Why `unsafe` is allowed here
//!
//! A system call, a signal action and a lock around a bare value cannot be
//! written without it, so it is gathered in this crate, where it can be read as
//! a whole; crates above that need none forbid it. The rules: one operation in
//! a block, one `SAFETY` comment that names the invariant and who keeps it, and
//! no invariant may rest on a guest or a frontend behaving well: only on types
//! of this crate and on what the kernel promises.
//!
//! # What it runs on
//!
//! 64-bit Linux. The x86-64 instructions have portable stand-ins.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("pollux-sys needs 64-bit Linux: it uses memfd, eventfd and 64-bit mmap offsets");

pub mod cell;
pub mod clock;
mod descriptor;
pub mod eventfd;
pub mod hint;
pub mod interrupt;
pub mod mapping;
pub mod memory_file;
pub mod pin;
mod primitive;
mod registry;

pub use cell::{Busy, Guard, Raised, RingCell};
pub use clock::Clock;
pub use eventfd::{EventFd, NotifierError};
pub use hint::{full_fence, pause, prefetch_read, prefetch_write};
pub use interrupt::Interrupt;
pub use mapping::{MAPPING_CAPACITY, MapError, Mapping, mapping_count, memfd, poison_count};
pub use memory_file::{MemoryFile, memory_file};
pub use pin::{PinError, available_cores, pin_current_thread};

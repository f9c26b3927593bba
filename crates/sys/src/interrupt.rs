//! Ending the wait of a thread that should not be waiting.
//!
//! A worker makes no system call that waits, but a peer can turn one into such a
//! call: it shares the open file of its call eventfd with us, clears
//! `O_NONBLOCK` on it and fills it. A signal whose action does nothing ends such
//! a wait: without SA_RESTART the call returns EINTR (`signal(7)`, "Interruption
//! of system calls and library functions by signal handlers"). A thread that is
//! not waiting does not notice it, nor does a call that does not wait.
//!
//! It does not end a wait for a page of memory; see [`crate::memory_file`].

use std::{io, mem::MaybeUninit, ptr, sync::OnceLock};

use libc::c_int;

/// A thread that can be interrupted.
///
/// The number of a thread that has ended may be given to another one of this
/// process, which is then interrupted in its place: whoever keeps this beyond
/// the thread's end should know that and not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupt {
    process: libc::pid_t,
    thread: libc::pid_t,
}

impl Interrupt {
    /// The signal: real-time, which no library or tool uses by itself, and high,
    /// because the first ones are taken (by the C library and by programs that
    /// count from SIGRTMIN).
    #[must_use]
    pub fn signal() -> c_int {
        libc::SIGRTMAX() - 1
    }

    /// For the calling thread, which can be interrupted from now on: the signal
    /// is unblocked in it, and its action installed at the first call.
    ///
    /// # Errors
    ///
    /// Those of `sigaction(2)` and `pthread_sigmask(3)`.
    pub fn of_this_thread() -> io::Result<Self> {
        install_action()?;
        unblock()?;
        Ok(Self {
            // SAFETY: no arguments.
            process: unsafe { libc::getpid() },
            // SAFETY: no arguments.
            thread: unsafe { libc::gettid() },
        })
    }

    /// Ends the system call in which the thread waits, if it does.
    ///
    /// # Errors
    ///
    /// Those of `tgkill(2)`: the thread has ended (ESRCH), or too many signals
    /// wait to be delivered (EAGAIN).
    pub fn send(&self) -> io::Result<()> {
        let signal = Self::signal();
        // SAFETY: no pointers are passed; the action of the signal does nothing.
        let result = unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, signal) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// The action: that the signal was delivered is all.
extern "C" fn on_interrupt(_signal: c_int) {}

/// Installs the action, at the first call.
fn install_action() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: `sigaction` is integers and an optional function pointer; zero
        // is a value of each.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        let handler: extern "C" fn(c_int) = on_interrupt;
        action.sa_sigaction = handler as usize;
        // Not SA_RESTART: that is the point.
        action.sa_flags = libc::SA_ONSTACK;
        // SAFETY: `action` is whole, and its code may run at any point.
        let result =
            unsafe { libc::sigaction(Interrupt::signal(), &raw const action, ptr::null_mut()) };
        if result < 0 {
            return Err(io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EINVAL));
        }
        Ok(())
    });
    installed.map_err(io::Error::from_raw_os_error)
}

/// Lets the signal through to this thread: a program may start its threads with
/// everything blocked.
fn unblock() -> io::Result<()> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is ours.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: `sigemptyset` cannot fail and has filled it in.
    let mut set = unsafe { set.assume_init() };
    // SAFETY: the set is ours, and the signal exists.
    unsafe { libc::sigaddset(&raw mut set, Interrupt::signal()) };
    // SAFETY: the set is whole; the old mask is not asked for.
    let error =
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut()) };
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{ErrorKind, Write},
        os::fd::{FromRawFd, OwnedFd},
        sync::{
            atomic::{AtomicBool, Ordering},
            mpsc,
        },
        thread,
        time::Duration,
    };

    use super::*;
    use crate::EventFd;

    /// A counter that is full, and makes its writers wait.
    fn full_and_blocking() -> OwnedFd {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor was made for us just now.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut file = File::from(fd);
        file.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        file.into()
    }

    fn block_signal() {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the set is ours.
        unsafe { libc::sigfillset(set.as_mut_ptr()) };
        // SAFETY: the set was filled in.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()) };
    }

    #[test]
    fn a_write_that_waits_is_ended() {
        let (report, started) = mpsc::channel();
        let writer = thread::spawn(move || {
            block_signal();
            report.send(Interrupt::of_this_thread().unwrap()).unwrap();
            let mut file = File::from(full_and_blocking());
            file.write(&1_u64.to_ne_bytes()).unwrap_err().kind()
        });
        let interrupt = started.recv().unwrap();
        // It may not be waiting yet.
        while !writer.is_finished() {
            interrupt.send().unwrap_or_default();
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(writer.join().unwrap(), ErrorKind::Interrupted);
        // The kernel may still be taking the thread apart.
        let gone = loop {
            match interrupt.send() {
                Ok(()) => thread::yield_now(),
                Err(error) => break error,
            }
        };
        assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_write_that_does_not_wait_is_not() {
        let (report, started) = mpsc::channel();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                report.send(Interrupt::of_this_thread().unwrap()).unwrap();
                let full = EventFd::from_peer(full_and_blocking()).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    full.signal().unwrap();
                }
            });
            let interrupt = started.recv().unwrap();
            // Not as fast as it gets: the writer would do nothing else.
            for _ in 0..500 {
                interrupt.send().unwrap();
                thread::sleep(Duration::from_micros(50));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

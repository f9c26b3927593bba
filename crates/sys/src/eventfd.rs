//! Kicks and calls: event counters (`eventfd(2)`) that never block a worker.

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// A non-blocking event counter, or what a frontend sent in its place: vhost-user
/// allows a pipe or a socket as well.
///
/// A frontend shares the open file with us and can clear `O_NONBLOCK` at any
/// time, so a write can still block if its sender wants that; the switch's
/// watchdog, not this type, ends such a wait (the call then returns
/// [`ErrorKind::Interrupted`]). Writing to a pipe or socket whose other end is
/// closed raises SIGPIPE unless the process ignores it, as Rust programs do.
#[derive(Debug)]
pub struct EventFd {
    file: File,
}

impl EventFd {
    /// A new counter at 0, close-on-exec and non-blocking.
    ///
    /// # Errors
    ///
    /// Those of `eventfd(2)`: too many open files, out of memory.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us; nothing else
        // knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { file: fd.into() })
    }

    /// Takes over a descriptor that a frontend sent, and sets `O_NONBLOCK` on it.
    /// Whether it is of a kind that vhost-user allows is for the caller to check.
    ///
    /// # Errors
    ///
    /// Those of `fcntl(2)`.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: no pointers are passed, and `fd` is open as long as we own it.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        let result =
            unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file: fd.into() })
    }

    /// Adds one to the counter: one `write(2)`, nothing is allocated. A counter
    /// (or pipe) that is full counts as delivered, since its reader has not yet
    /// seen what is there.
    ///
    /// # Errors
    ///
    /// Any other error of `write(2)`. Nobody needs to stop for it: the signal is
    /// lost, and the port may count it.
    pub fn signal(&self) -> io::Result<()> {
        match (&self.file).write(&1_u64.to_ne_bytes()) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes what is in the counter: how many signals came since the last call,
    /// 0 if none (or if reading failed).
    ///
    /// It is one `read(2)` of 8 bytes, which empties an eventfd. Of a pipe or
    /// socket only "none" and "some" mean something, and what its sender wrote
    /// beyond 8 bytes is left for the next call: a sender cannot keep us here.
    pub fn drain(&self) -> u64 {
        let mut count = [0_u8; 8];
        match (&self.file).read(&mut count) {
            Ok(0) | Err(_) => 0,
            Ok(_) => u64::from_ne_bytes(count).max(1),
        }
    }

    /// A second handle of the same counter.
    ///
    /// # Errors
    ///
    /// Those of `fcntl(2)`, `F_DUPFD_CLOEXEC`: too many open files.
    pub fn try_clone(&self) -> io::Result<Self> {
        let file = self.file.try_clone()?;
        Ok(Self { file })
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.file.as_raw_fd()
    }
}

impl From<EventFd> for OwnedFd {
    fn from(eventfd: EventFd) -> Self {
        eventfd.file.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_drains() {
        let eventfd = EventFd::new().unwrap();
        assert_eq!(eventfd.drain(), 0);
        eventfd.signal().unwrap();
        eventfd.try_clone().unwrap().signal().unwrap();
        assert_eq!(eventfd.drain(), 2);
        assert_eq!(eventfd.drain(), 0);
    }

    #[test]
    fn a_full_counter_counts_as_delivered() {
        let eventfd = EventFd::new().unwrap();
        let full = u64::MAX - 1;
        (&eventfd.file).write_all(&full.to_ne_bytes()).unwrap();
        eventfd.signal().unwrap();
        assert_eq!(eventfd.drain(), full);
    }

    #[test]
    fn a_pipe_serves_too() {
        let (reader, writer) = io::pipe().unwrap();
        let reader = EventFd::from_fd(reader.into()).unwrap();
        let writer = EventFd::from_fd(writer.into()).unwrap();
        assert_eq!(reader.drain(), 0, "from_fd made it non-blocking");
        // More than a pipe holds: still no wait and no error.
        for _ in 0..20_000 {
            writer.signal().unwrap();
        }
        assert!(reader.drain() > 0);
        drop(reader);
        assert_eq!(writer.signal().unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}

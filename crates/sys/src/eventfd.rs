//! Kicks and calls: event counters (`eventfd(2)`) that never block a worker.

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use crate::descriptor;

/// What `/proc` calls an eventfd.
const EVENTFD_LINK: &str = "anon_inode:[eventfd]";

/// Why a descriptor of a frontend cannot be a kick, a call or an error signal.
#[derive(Debug, thiserror::Error)]
pub enum NotifierError {
    /// It is something else.
    #[error("{found} is neither an eventfd nor a Unix socket")]
    Kind {
        /// What it is: "a regular file", "anon_inode:[timerfd]".
        found: String,
    },
    /// `statx(2)` failed.
    #[error("cannot ask what kind of file it is")]
    Inspect(#[source] io::Error),
    /// `fcntl(2)` failed.
    #[error("cannot set O_NONBLOCK on it")]
    Nonblocking(#[source] io::Error),
}

/// A non-blocking event counter, or a Unix socket that a frontend sent in its
/// place.
///
/// A frontend shares the open file with us and can clear `O_NONBLOCK` at any
/// time, so a write can still block if its sender wants that; the switch's
/// watchdog, not this type, ends such a wait (the call then returns
/// [`ErrorKind::Interrupted`]). Writing to a socket whose other end is closed raises SIGPIPE unless the process ignores it, as Rust programs do.
#[derive(Debug)]
pub struct EventFd {
    file: File,
    /// Not a socket.
    is_counter: bool,
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
        Ok(Self {
            file: fd.into(),
            is_counter: true,
        })
    }

    /// Takes over a kick, call or error descriptor that a frontend sent, and sets
    /// `O_NONBLOCK` on its open file. It has to be an eventfd or a Unix socket.
    ///
    /// Not a pipe, though vhost-user has them in use: whoever reads a pipe holds
    /// its lock while the bytes are copied, and if they go to memory whose pages
    /// it supplies itself (userfaultfd, FUSE) it keeps every writer waiting in
    /// the kernel, `O_NONBLOCK` or not, where no signal reaches it. The same goes
    /// for the sockets of TCP. Eventfds and Unix sockets copy without a lock that
    /// writers take.
    ///
    /// An eventfd has no format bits in its mode; it is told from other anonymous
    /// files by the name that `/proc` has for it. Where there is no `/proc` the
    /// missing bits suffice.
    ///
    /// # Errors
    ///
    /// See [`NotifierError`]. The descriptor is closed.
    pub fn from_peer(fd: OwnedFd) -> Result<Self, NotifierError> {
        let mode = descriptor::stat(fd.as_fd())
            .map_err(NotifierError::Inspect)?
            .mode;
        let found = match mode & libc::S_IFMT {
            0 => descriptor::link(fd.as_fd()).filter(|found| found != EVENTFD_LINK),
            libc::S_IFSOCK if descriptor::is_unix_socket(fd.as_fd()) => None,
            libc::S_IFSOCK => Some("a socket that is not a Unix socket".to_owned()),
            _ => Some(descriptor::kind(mode).to_owned()),
        };
        if let Some(found) = found {
            return Err(NotifierError::Kind { found });
        }
        set_nonblocking(fd.as_fd()).map_err(NotifierError::Nonblocking)?;
        Ok(Self {
            file: fd.into(),
            is_counter: mode & libc::S_IFMT == 0,
        })
    }

    /// Adds one to the counter: one `write(2)`, nothing is allocated. A counter
    /// (or socket) that is full counts as delivered, since its reader has not yet
    /// seen what is there.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Interrupted`] if the write waited, which means that the peer
    /// has cleared `O_NONBLOCK`, and a signal ended the wait: a write that does
    /// not wait is never interrupted. Else any other error of `write(2)`, for
    /// which nobody needs to stop: the signal is lost.
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
    /// It is one `read(2)` of 8 bytes, which empties an eventfd. Of a socket only "none" and "some" mean something, and what its sender wrote
    /// beyond 8 bytes is left for the next call: a sender cannot keep us here.
    pub fn drain(&self) -> u64 {
        let mut count = [0_u8; 8];
        match (&self.file).read(&mut count) {
            Ok(0) | Err(_) => 0,
            Ok(_) => u64::from_ne_bytes(count).max(1),
        }
    }

    /// [`drain`](Self::drain) for what a peer sent: never waits, even if the peer
    /// made the counter blocking (RWF_NOWAIT).
    ///
    /// 0 for a socket, which is not read: whoever reads a Unix socket holds its
    /// lock while the bytes are copied, to pages that may never come (see
    /// [`from_peer`](Self::from_peer)), and every other reader waits with it.
    #[must_use]
    pub fn drain_nowait(&self) -> u64 {
        if !self.is_counter {
            return 0;
        }
        let mut count = 0_u64;
        let vector = libc::iovec {
            iov_base: (&raw mut count).cast(),
            iov_len: size_of::<u64>(),
        };
        // SAFETY: `vector` is one vector and leads to 8 bytes of `count`, which
        // live until the call returns; -1 stands for "no offset".
        let got =
            unsafe { libc::preadv2(self.as_raw_fd(), &raw const vector, 1, -1, libc::RWF_NOWAIT) };
        if got == 8 { count } else { 0 }
    }

    /// A second handle of the same counter.
    ///
    /// # Errors
    ///
    /// Those of `fcntl(2)`, `F_DUPFD_CLOEXEC`: too many open files.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            file: self.file.try_clone()?,
            is_counter: self.is_counter,
        })
    }
}

/// Sets `O_NONBLOCK` on an open file, for everybody who shares it.
fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers are passed, and `fd` is open.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
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
    fn a_counter_that_was_made_blocking_keeps_nobody() {
        let eventfd = EventFd::new().unwrap();
        let flags = {
            // SAFETY: no pointers are passed.
            unsafe { libc::fcntl(eventfd.as_raw_fd(), libc::F_SETFL, 0) }
        };
        assert_eq!(flags, 0);
        assert_eq!(eventfd.drain_nowait(), 0);
        eventfd.signal().unwrap();
        eventfd.signal().unwrap();
        assert_eq!(eventfd.drain_nowait(), 2);
        assert_eq!(eventfd.drain_nowait(), 0);
    }

    #[test]
    fn a_socket_is_not_read_for_its_count() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        (&theirs).write_all(&7_u64.to_ne_bytes()).unwrap();
        let socket = EventFd::from_peer(ours.into()).unwrap();
        assert_eq!(socket.drain_nowait(), 0);
        assert!(socket.drain() > 0, "the bytes are still there");
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
    fn a_unix_socket_serves_too() {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let reader = EventFd::from_peer(reader.into()).unwrap();
        let writer = EventFd::from_peer(writer.into()).unwrap();
        assert_eq!(reader.drain(), 0, "from_peer made it non-blocking");
        // More than a socket holds: still no wait and no error.
        for _ in 0..20_000 {
            writer.signal().unwrap();
        }
        assert!(reader.drain() > 0);
        drop(reader);
        assert_eq!(writer.signal().unwrap_err().kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn an_eventfd_of_a_peer_becomes_nonblocking() {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor was made for us just now.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let eventfd = EventFd::from_peer(fd).unwrap();
        assert_eq!(eventfd.drain(), 0, "a blocking one would wait here");
        eventfd.signal().unwrap();
        assert_eq!(eventfd.drain(), 1);
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = EventFd::from_peer(ours.into()).unwrap();
        assert_eq!(socket.drain(), 0);
        (&theirs).write_all(&[1]).unwrap();
        assert!(socket.drain() > 0);
    }

    #[test]
    fn anything_else_is_refused_by_its_name() {
        let open = |path| OwnedFd::from(File::open(path).unwrap());
        // SAFETY: no pointers are passed.
        let timer = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC) };
        assert!(timer >= 0);
        // SAFETY: the descriptor was made for us just now.
        let timer = unsafe { OwnedFd::from_raw_fd(timer) };
        let (_reader, pipe) = io::pipe().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for (fd, what) in [
            (pipe.into(), "a pipe"),
            (tcp.into(), "a socket that is not a Unix socket"),
            (crate::memfd("a file", 8).unwrap(), "a regular file"),
            (open("/dev/null"), "a device"),
            (open("/"), "a directory"),
            (timer, "anon_inode:[timerfd]"),
        ] {
            let error = EventFd::from_peer(fd).unwrap_err();
            assert!(matches!(&error, NotifierError::Kind { found } if found == what));
            let text = format!("{what} is neither an eventfd nor a Unix socket");
            assert_eq!(error.to_string(), text);
        }
    }
}

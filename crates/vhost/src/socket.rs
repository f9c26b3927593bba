//! Unix sockets: listening, connecting, and messages with descriptors.
//!
//! Nothing here blocks: all sockets are non-blocking, and connecting to a Unix
//! socket either works at once or not at all.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

use crate::backend::{PortConfig, SocketError, SocketMode};
use crate::framing::{BODY_BYTES_MAX, FDS_MAX, Framer, FramingError, HEADER_BYTES, Message};

/// Longest path that a Unix socket's address holds (sun_path is 108 with a zero).
const PATH_BYTES_MAX: usize = 107;
/// Connections that wait to be refused.
const BACKLOG: i32 = 16;
/// Room for descriptors: one more than a message may have tells of too many.
const FDS_ROOM: usize = FDS_MAX + 1;

/// A socket that listens. Dropping it removes the file, if it is still ours.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file.
    file: (u64, u64),
}

impl Listener {
    /// Listens at `path`. A socket file on which nobody listens any more is
    /// replaced.
    ///
    /// # Errors
    /// See [`SocketError`].
    pub(crate) fn bind(path: &Path) -> Result<Self, SocketError> {
        let make = |errno: Errno| SocketError::Make {
            path: path.to_owned(),
            source: errno.into(),
        };
        let address = address(path)?;
        let fd = socket().map_err(make)?;
        match rustix::net::bind(&fd, &address) {
            Err(Errno::ADDRINUSE) => {
                refuse_if_in_use(path)?;
                match rustix::fs::unlink(path) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(errno) => return Err(make(errno)),
                }
                rustix::net::bind(&fd, &address).map_err(make)?;
            }
            bound => bound.map_err(make)?,
        }
        let stat = stat(path).map_err(make)?;
        let listener = Self {
            fd,
            path: path.to_owned(),
            file: (stat.st_dev, stat.st_ino),
        };
        rustix::net::listen(&listener.fd, BACKLOG).map_err(make)?;
        Ok(listener)
    }

    /// The next connection that waits, if one does.
    pub(crate) fn accept(&self) -> rustix::io::Result<Option<OwnedFd>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.fd, flags) {
            Ok(fd) => Ok(Some(fd)),
            // Whoever it was has gone again.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Somebody may have put another file in its place.
        if stat(&self.path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.file) {
            // It may go at this very moment: as good.
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

/// Connects to whoever listens at `path`.
///
/// # Errors
/// Nobody listens, or too many wait there.
pub(crate) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let fd = socket()?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

/// Tells whether a port's socket could be used, and changes nothing.
///
/// # Errors
/// See [`SocketError`].
pub(crate) fn check(config: &PortConfig) -> Result<(), SocketError> {
    let path = &config.socket;
    address(path)?;
    if config.mode == SocketMode::Client {
        return Ok(());
    }
    match stat(path) {
        Ok(_) => refuse_if_in_use(path)?,
        Err(Errno::NOENT) => {}
        Err(errno) => return Err(make_error(path, errno)),
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::accessat(rustix::fs::CWD, directory, access, AtFlags::EACCESS)
        .map_err(|errno| make_error(path, errno))
}

fn make_error(path: &Path, errno: Errno) -> SocketError {
    SocketError::Make {
        path: path.to_owned(),
        source: errno.into(),
    }
}

fn address(path: &Path) -> Result<SocketAddrUnix, SocketError> {
    let bytes = path.as_os_str().len();
    if bytes > PATH_BYTES_MAX {
        return Err(SocketError::TooLong {
            path: path.to_owned(),
            bytes,
        });
    }
    SocketAddrUnix::new(path).map_err(|errno| make_error(path, errno))
}

fn socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn stat(path: &Path) -> rustix::io::Result<Stat> {
    rustix::fs::statat(rustix::fs::CWD, path, AtFlags::SYMLINK_NOFOLLOW)
}

/// Of a file at `path`: an error unless it is a socket on which nobody listens.
fn refuse_if_in_use(path: &Path) -> Result<(), SocketError> {
    let taken = || SocketError::Taken {
        path: path.to_owned(),
    };
    match stat(path) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
            return Err(SocketError::NotASocket {
                path: path.to_owned(),
            });
        }
        Ok(_) => {}
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(make_error(path, errno)),
    }
    let fd = socket().map_err(|errno| make_error(path, errno))?;
    match rustix::net::connect(&fd, &address(path)?) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(()),
        // Too many wait there already.
        Ok(()) | Err(Errno::AGAIN) => Err(taken()),
        // A socket of another kind, on which somebody is.
        Err(Errno::PROTOTYPE) => Err(taken()),
        Err(errno) => Err(make_error(path, errno)),
    }
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("the frontend closed the connection")]
    Closed,
    #[error("the connection was ended: {0}")]
    Framing(#[from] FramingError),
    #[error("the connection failed: {0}")]
    Failed(Errno),
    #[error("the connection was ended: the frontend does not read its replies")]
    Unread,
}

/// A connection, with the message that is being received.
#[derive(Debug)]
pub(crate) struct Stream {
    fd: OwnedFd,
    framer: Framer,
}

impl Stream {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            framer: Framer::default(),
        }
    }

    /// Reads until a message is whole; `None` if the rest is not there yet.
    pub(crate) fn receive(&mut self) -> Result<Option<Message>, Ended> {
        let mut bytes = [0; HEADER_BYTES + BODY_BYTES_MAX];
        loop {
            let wanted = &mut bytes[..self.framer.wanted()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_ROOM))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received = rustix::net::recvmsg(
                &self.fd,
                &mut [IoSliceMut::new(wanted)],
                &mut ancillary,
                flags,
            );
            let received = match received {
                Ok(received) => received,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(Ended::Failed(errno)),
            };
            if received.flags.contains(ReturnFlags::CTRUNC) {
                return Err(FramingError::FdsCutOff.into());
            }
            if received.bytes == 0 {
                self.framer.end()?;
                return Err(Ended::Closed);
            }
            let fds = ancillary.drain().flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let message = self.framer.push(&bytes[..received.bytes], fds.flatten())?;
            if message.is_some() {
                return Ok(message);
            }
        }
    }

    /// True if the frontend has closed its end.
    pub(crate) fn has_hung_up(&self) -> bool {
        let mut poll = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let now = Timespec::default();
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        rustix::event::poll(&mut poll, Some(&now)).is_ok() && poll[0].revents().intersects(gone)
    }

    /// Sends a reply. A frontend has at most a few requests out: if the socket is
    /// full, it does not read.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&self.fd, bytes, flags) {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(Ended::Unread),
            Err(errno) => Err(Ended::Failed(errno)),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

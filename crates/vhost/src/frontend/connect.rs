//! A connected socket, from either side, in bounded time.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Between two tries to connect.
const RETRY: Duration = Duration::from_millis(5);

/// Connects to `path`, and tries again until `timeout` has passed: the backend
/// may not have come so far.
pub(super) fn connect_to(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let deadline = Instant::now() + timeout;
    loop {
        match try_connect(&address) {
            Ok(stream) => return Ok(stream),
            Err(error) if is_temporary(&error) && Instant::now() < deadline => {
                std::thread::sleep(RETRY);
            }
            Err(error) => return Err(error),
        }
    }
}

fn try_connect(address: &SocketAddrUnix) -> io::Result<UnixStream> {
    // Non-blocking: else the call waits for a place in the queue of a backend
    // that accepts nobody.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// True for a backend that does not listen yet, or has no place in its queue.
fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
    )
}

/// Waits at most `timeout` for a backend that connects to `listener`.
pub(super) fn accept_from(listener: &UnixListener, timeout: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + timeout;
    loop {
        let rest = deadline.saturating_duration_since(Instant::now());
        let rest = Timespec::try_from(rest).map_err(io::Error::other)?;
        let mut polled = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut polled, Some(&rest)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

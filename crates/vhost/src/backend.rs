//! The switch's side of all sockets: what callers see of it.

mod event_loop;
mod served;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crossbeam::channel;
use pollux_datapath::Port;
use pollux_sys::EventFd;
use serde::{Deserialize, Serialize};

use self::event_loop::{Command, EventLoop};
use self::served::Door;
use crate::socket;
use crate::status::PortStatus;

/// Who listens on a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketMode {
    /// The switch listens, the frontend connects (QEMU: `-chardev socket,path=…`).
    #[default]
    Server,
    /// The frontend listens, the switch connects and tries again when it cannot.
    Client,
}

/// How a port meets its frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// The Unix socket; at most 107 bytes.
    pub socket: PathBuf,
    /// Who listens.
    pub mode: SocketMode,
    /// Accept guest memory in any file that can be mapped, not only in memfd,
    /// tmpfs and hugetlbfs files: a file system may then stall a worker in a
    /// page fault.
    pub any_memory: bool,
}

/// Why a port cannot be served. Each text says what, which, why and what to do.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The kernel has room for 107 bytes.
    #[error(
        "socket path {path} has {bytes} bytes, a Unix socket's has at most 107; \
         choose a shorter directory"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// Somebody answers there.
    #[error(
        "socket {path} is taken: a process listens on it; end that process or choose another name"
    )]
    Taken {
        /// The path.
        path: PathBuf,
    },
    /// There is a file of another kind.
    #[error("{path} exists and is not a socket; remove it or choose another name")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error(
        "socket {path} cannot be made: {source}; check that its directory exists and is writable"
    )]
    Make {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A port is served by one session.
    #[error("port \"{port}\" is served already; remove it first")]
    ServedAlready {
        /// Name of the port.
        port: String,
    },
    /// The backend's thread is gone: a bug, which the log tells of.
    #[error("port \"{port}\" cannot be served: the backend's thread has ended; report this")]
    Ended {
        /// Name of the port.
        port: String,
    },
}

/// What is known of each port, by name; written by the event loop.
type Statuses = Arc<Mutex<HashMap<Box<str>, PortStatus>>>;

fn lock(statuses: &Statuses) -> MutexGuard<'_, HashMap<Box<str>, PortStatus>> {
    // Each change is one insertion or removal.
    statuses.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The vhost-user backend: sockets and sessions of all ports, on one thread of
/// its own. Dropping it stops every ring, and removes the sockets.
#[derive(Debug)]
pub struct Backend {
    commands: channel::Sender<Command>,
    wake: EventFd,
    statuses: Statuses,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Starts the thread, without ports.
    ///
    /// # Errors
    /// If the kernel gives no thread or no descriptor.
    pub fn start() -> io::Result<Self> {
        let (commands, receiver) = channel::unbounded();
        let wake = EventFd::new()?;
        let statuses = Statuses::default();
        let event_loop = EventLoop::new(receiver, wake.try_clone()?, Arc::clone(&statuses))?;
        let thread = thread::Builder::new()
            .name("pollux-vhost".to_owned())
            .spawn(move || event_loop.run())?;
        Ok(Self {
            commands,
            wake,
            statuses,
            thread: Some(thread),
        })
    }

    /// Tells whether [`add`](Self::add) would find the socket usable, and
    /// changes nothing.
    ///
    /// # Errors
    /// See [`SocketError`].
    pub fn check(config: &PortConfig) -> Result<(), SocketError> {
        socket::check(config)
    }

    /// Serves a port from now on: listens, or begins to connect.
    ///
    /// # Errors
    /// See [`SocketError`]; then nothing was changed.
    pub fn add(&self, port: Arc<Port>, config: PortConfig) -> Result<(), SocketError> {
        let name = port.name().to_owned();
        if self.status(&name).is_some() {
            return Err(SocketError::ServedAlready { port: name });
        }
        let door = Door::open(&config)?;
        let (done, answer) = channel::bounded(1);
        self.send(Command::Add {
            port,
            config,
            door,
            done,
        });
        match answer.recv() {
            Ok(result) => result,
            Err(channel::RecvError) => Err(SocketError::Ended { port: name }),
        }
    }

    /// Ends a port's session, stops its rings, removes its socket. When it
    /// returns no worker uses the guest's memory. False if there is no such port.
    pub fn remove(&self, port: &str) -> bool {
        let (done, answer) = channel::bounded(1);
        self.send(Command::Remove {
            port: port.into(),
            done,
        });
        answer.recv().unwrap_or(false)
    }

    /// State of a port's session; disturbs neither the session nor a worker.
    #[must_use]
    pub fn status(&self, port: &str) -> Option<PortStatus> {
        lock(&self.statuses).get(port).cloned()
    }

    fn send(&self, command: Command) {
        // A thread that has ended drops the command, and so the answer's sender:
        // whoever waits for it hears of that.
        let _ = self.commands.send(command);
        self.wake();
    }

    fn wake(&self) {
        self.wake
            .signal()
            .expect("an eventfd of our own can be written");
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // It has nothing to say but that it panicked, which it has said.
            let _ = thread.join();
        }
    }
}

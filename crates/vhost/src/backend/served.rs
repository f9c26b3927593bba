//! One port: its socket, its frontend, its session.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pollux_datapath::Port;
use pollux_sys::EventFd;

use super::{PortConfig, SocketError, SocketMode};
use crate::features;
use crate::framing::Message;
use crate::rings::PortRings;
use crate::session::{RequestError, Session};
use crate::socket::{self, Ended, Listener, Stream};
use crate::status::{PortStatus, SessionState};

/// First and longest time between two tries to connect.
const RETRY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// Messages of one frontend that are carried out before the others get a turn.
const MESSAGES_PER_TURN: u32 = 32;
/// Lines about a port in each second at most: a frontend must not be able to
/// fill a disk.
const LINES_PER_SECOND: u32 = 20;

/// How a frontend comes in.
#[derive(Debug)]
pub(super) enum Door {
    /// We listen.
    Listening(Listener),
    /// We connect, and wait so long after the last failure.
    Connecting { retry: Duration, at: Instant },
}

impl Door {
    pub(super) fn open(config: &PortConfig) -> Result<Self, SocketError> {
        match config.mode {
            SocketMode::Server => Listener::bind(&config.socket).map(Self::Listening),
            SocketMode::Client => {
                socket::check(config)?;
                Ok(Self::Connecting {
                    retry: RETRY.0,
                    at: Instant::now(),
                })
            }
        }
    }
}

/// A frontend that is connected.
#[derive(Debug)]
struct Connection {
    stream: Stream,
    session: Session,
    rings: PortRings,
}

/// How much may still be logged about a port.
#[derive(Debug)]
struct LogBudget {
    since: Instant,
    lines: u32,
}

impl LogBudget {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            lines: 0,
        }
    }

    /// True if one more line may be logged now.
    fn take(&mut self) -> bool {
        let now = Instant::now();
        if now.duration_since(self.since) >= Duration::from_secs(1) {
            *self = Self {
                since: now,
                lines: 0,
            };
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= LINES_PER_SECOND
    }
}

/// A port as the event loop has it.
#[derive(Debug)]
pub(super) struct Served {
    port: Arc<Port>,
    config: PortConfig,
    door: Door,
    connection: Option<Connection>,
    connections: u64,
    refused: u64,
    last_request: Option<String>,
    last_error: Option<String>,
    log: LogBudget,
}

/// What became of a frontend that wanted to connect.
#[derive(Debug)]
pub(super) enum Admitted {
    /// It is connected now.
    Connected,
    /// There is one already.
    Refused,
    /// Nobody is there.
    Nobody,
}

impl Served {
    pub(super) fn new(port: Arc<Port>, config: PortConfig, door: Door) -> Self {
        Self {
            port,
            config,
            door,
            connection: None,
            connections: 0,
            refused: 0,
            last_request: None,
            last_error: None,
            log: LogBudget::new(),
        }
    }

    pub(super) fn name(&self) -> &str {
        self.port.name()
    }

    /// The socket on which frontends come in, if we listen.
    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        match &self.door {
            Door::Listening(listener) => Some(listener.as_fd()),
            Door::Connecting { .. } => None,
        }
    }

    /// The connected frontend's socket.
    pub(super) fn stream(&self) -> Option<BorrowedFd<'_>> {
        self.connection
            .as_ref()
            .map(|connection| connection.stream.as_fd())
    }

    /// When to try to connect, if that is to be done.
    pub(super) fn connect_at(&self) -> Option<Instant> {
        match self.door {
            Door::Connecting { at, .. } if self.connection.is_none() => Some(at),
            _ => None,
        }
    }

    /// Somebody waits at our socket.
    ///
    /// # Errors
    /// If the kernel gives no descriptor: the frontend still waits.
    pub(super) fn accept(&mut self) -> rustix::io::Result<Admitted> {
        let Door::Listening(listener) = &self.door else {
            return Ok(Admitted::Nobody);
        };
        let Some(fd) = listener.accept()? else {
            return Ok(Admitted::Nobody);
        };
        // A frontend that starts again may be here before we know that the one
        // before has gone.
        if self
            .connection
            .as_ref()
            .is_some_and(|old| old.stream.has_hung_up())
        {
            self.disconnect(&Ended::Closed);
        }
        if self.connection.is_some() {
            self.refused += 1;
            if self.log.take() {
                tracing::warn!(
                    port = self.name(),
                    "a second frontend was refused: one is connected"
                );
            }
            return Ok(Admitted::Refused);
        }
        self.connect_to(fd);
        Ok(Admitted::Connected)
    }

    /// Tries to connect.
    pub(super) fn connect(&mut self) -> Admitted {
        match socket::connect(&self.config.socket) {
            Ok(fd) => {
                self.connect_to(fd);
                Admitted::Connected
            }
            Err(error) => {
                self.last_error = Some(format!("cannot connect: {error}"));
                self.wait_before_connecting();
                Admitted::Nobody
            }
        }
    }

    fn connect_to(&mut self, fd: OwnedFd) {
        self.connections += 1;
        self.last_error = None;
        self.connection = Some(Connection {
            stream: Stream::new(fd),
            session: Session::new(self.config.any_memory),
            rings: PortRings::new(Arc::clone(&self.port)),
        });
        if self.log.take() {
            tracing::info!(port = self.name(), "a frontend has connected");
        }
    }

    fn wait_before_connecting(&mut self) {
        if let Door::Connecting { retry, at } = &mut self.door {
            *at = Instant::now() + *retry;
            *retry = (*retry * 2).min(RETRY.1);
        }
    }

    /// Carries out what the frontend has sent, some of it if it is much.
    /// `publish` is told of each message before its reply goes out: who has the
    /// reply finds its effect in the status.
    ///
    /// # Errors
    /// If the connection cannot go on; [`disconnect`](Self::disconnect) is next.
    pub(super) fn serve(&mut self, publish: impl Fn(&Self)) -> Result<(), Ended> {
        for _ in 0..MESSAGES_PER_TURN {
            let Some(connection) = &mut self.connection else {
                return Ok(());
            };
            let Some(message) = connection.stream.receive()? else {
                return Ok(());
            };
            let reply = self.carry_out(message);
            publish(self);
            if let (Some(reply), Some(connection)) = (reply, &mut self.connection) {
                connection.stream.send(&reply)?;
            }
        }
        Ok(())
    }

    /// Carries a message out and returns the reply.
    fn carry_out(&mut self, message: Message) -> Option<Vec<u8>> {
        let connection = self.connection.as_mut()?;
        let was_running = connection.session.missing().is_none();
        let outcome = connection.session.handle(message, &mut connection.rings);
        let port = self.port.name();
        tracing::trace!(port, request = outcome.request, error = ?outcome.error, "request");
        for note in outcome.notes {
            if self.log.take() {
                tracing::warn!(port, request = outcome.request, "{note}");
            }
        }
        if let Some(error) = outcome.error {
            let request = &outcome.request;
            if matches!(error, RequestError::Unknown | RequestError::NotOffered) {
                tracing::debug!(port, request, "{error}");
            } else if self.log.take() {
                tracing::warn!(port, request, "refused: {error}");
            }
            self.last_error = Some(format!("{} was refused: {error}", outcome.request));
        }
        self.last_request = Some(outcome.request);
        let is_running = connection.session.missing().is_none();
        if is_running != was_running && self.log.take() {
            let state = if is_running {
                "both rings run"
            } else {
                "stopped"
            };
            tracing::info!(port = self.port.name(), "{state}");
        }
        if is_running && let Door::Connecting { retry, .. } = &mut self.door {
            // Only a session that came up is a reason to be quick next time.
            *retry = RETRY.0;
        }
        outcome.reply
    }

    /// Ends the session: no ring runs afterwards, the guest's memory is unmapped.
    pub(super) fn disconnect(&mut self, why: &Ended) {
        let Some(mut connection) = self.connection.take() else {
            return;
        };
        connection.session.end(&mut connection.rings);
        let may_log = self.log.take();
        if !matches!(why, Ended::Closed) {
            self.last_error = Some(why.to_string());
            if may_log {
                tracing::warn!(port = self.name(), "{why}");
            }
        } else if may_log {
            tracing::info!(port = self.name(), "{why}");
        }
        self.wait_before_connecting();
    }

    /// Err descriptors that are to be signalled.
    pub(super) fn take_signals(&mut self) -> Vec<EventFd> {
        let connection = self.connection.as_mut();
        connection.map_or_else(Vec::new, |connection| connection.session.take_signals())
    }

    /// Looks whether the guest has broken a ring. True if that is new.
    pub(super) fn notice_faults(&mut self) -> bool {
        let connection = self.connection.as_mut();
        connection.is_some_and(|connection| connection.session.notice_faults(&connection.rings))
    }

    pub(super) fn status(&self) -> PortStatus {
        let mut status = PortStatus {
            socket: self.config.socket.clone(),
            mode: self.config.mode,
            state: match self.door {
                Door::Listening(_) => SessionState::Listening,
                Door::Connecting { .. } => SessionState::Connecting,
            },
            missing: None,
            connections: self.connections,
            refused: self.refused,
            last_request: self.last_request.clone(),
            last_error: self.last_error.clone(),
            features_offered: features::names(features::OFFERED),
            features: Vec::new(),
            protocol_features: Vec::new(),
            memory: Vec::new(),
            rings: Vec::new(),
        };
        let socket = self.config.socket.display();
        let Some(Connection { session, .. }) = &self.connection else {
            status.missing = Some(match self.config.mode {
                SocketMode::Server => {
                    format!("no frontend is connected: start the VM with {socket} as its socket")
                }
                SocketMode::Client => {
                    format!("nobody listens on {socket}: start the VM with it as its server socket")
                }
            });
            return status;
        };
        status.missing = session.missing();
        status.state = match &status.missing {
            None => SessionState::Running,
            Some(_) if session.is_broken() => SessionState::Broken,
            Some(_) => SessionState::Negotiating,
        };
        status.features = session.feature_names();
        status.protocol_features = session.protocol_feature_names();
        status.memory = session.memory_status();
        status.rings = session.ring_status();
        status
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.disconnect(&Ended::Closed);
    }
}

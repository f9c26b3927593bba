//! One thread for all sockets.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel;
use pollux_datapath::Port;
use pollux_sys::EventFd;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::served::{Admitted, Door, Served};
use super::{PortConfig, SocketError, Statuses, lock};
use crate::socket::Ended;

/// What callers ask of the thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Serve a port.
    Add {
        port: Arc<Port>,
        config: PortConfig,
        door: Door,
        done: channel::Sender<Result<(), SocketError>>,
    },
    /// Serve it no more.
    Remove {
        port: Box<str>,
        done: channel::Sender<bool>,
    },
    /// End.
    Stop,
}

/// How often rings are looked at that may have been broken by their guests.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a socket is left alone when the process has no descriptor left.
const PAUSE: Duration = Duration::from_millis(200);
/// Events taken at a time.
const EVENTS_MAX: usize = 64;

/// Err descriptors that may wait to be signalled; what is more is left out.
const ERRS_MAX: usize = 64;

/// What an event is about, as a number that epoll keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Wake,
    Listener(u64),
    Stream(u64),
}

impl Source {
    fn data(self) -> epoll::EventData {
        epoll::EventData::new_u64(match self {
            Self::Wake => u64::MAX,
            Self::Listener(id) => id << 1,
            Self::Stream(id) => id << 1 | 1,
        })
    }

    fn of(data: epoll::EventData) -> Self {
        match data.u64() {
            u64::MAX => Self::Wake,
            data if data & 1 == 0 => Self::Listener(data >> 1),
            data => Self::Stream(data >> 1),
        }
    }
}

/// The thread's state.
#[derive(Debug)]
pub(super) struct EventLoop {
    epoll: OwnedFd,
    commands: channel::Receiver<Command>,
    wake: EventFd,
    statuses: Statuses,
    /// By a number that is used once, so that an event for a port that has gone
    /// meets nobody.
    ports: BTreeMap<u64, Served>,
    next_id: u64,
    look_at: Instant,
    /// Listeners that are left alone until then.
    paused: Vec<(u64, Instant)>,
    /// To the thread that signals err descriptors.
    errs: channel::Sender<EventFd>,
}

impl EventLoop {
    pub(super) fn new(
        commands: channel::Receiver<Command>,
        wake: EventFd,
        statuses: Statuses,
    ) -> io::Result<Self> {
        let event_loop = Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            commands,
            wake,
            statuses,
            ports: BTreeMap::new(),
            next_id: 0,
            look_at: Instant::now(),
            paused: Vec::new(),
            errs: start_errs()?,
        };
        event_loop.watch(event_loop.wake.as_fd(), Source::Wake)?;
        Ok(event_loop)
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            let timeout = Timespec::try_from(self.timeout()).ok();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    // Nothing that we pass can be refused.
                    tracing::error!(%errno, "epoll_wait failed: no session is served any more");
                    return;
                }
            }
            let sources: Vec<Source> = events
                .drain(..)
                .map(|event: epoll::Event| Source::of(event.data))
                .collect();
            for source in sources {
                match source {
                    Source::Wake => {
                        self.wake.drain();
                        if !self.take_commands() {
                            return;
                        }
                    }
                    Source::Listener(id) => self.accept(id),
                    Source::Stream(id) => self.serve(id),
                }
            }
            self.do_what_is_due();
        }
    }

    /// How long nothing is due.
    fn timeout(&self) -> Duration {
        let is_connected = self.ports.values().any(|served| served.stream().is_some());
        let look_at = is_connected.then_some(self.look_at);
        let connect_at = self.ports.values().filter_map(Served::connect_at);
        let resume_at = self.paused.iter().map(|(_, at)| *at);
        let next = connect_at.chain(resume_at).chain(look_at).min();
        next.map_or(Duration::from_secs(3600), |at| {
            at.saturating_duration_since(Instant::now())
        })
    }

    /// False to end.
    fn take_commands(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Stop => return false,
                Command::Add {
                    port,
                    config,
                    door,
                    done,
                } => {
                    // The caller waits for the answer, or has gone.
                    let _ = done.send(self.add(Served::new(port, config, door)));
                }
                Command::Remove { port, done } => {
                    let _ = done.send(self.remove(&port));
                }
            }
        }
        true
    }

    fn add(&mut self, served: Served) -> Result<(), SocketError> {
        let name = served.name().to_owned();
        if self.ports.values().any(|other| other.name() == name) {
            return Err(SocketError::ServedAlready { port: name });
        }
        let id = self.next_id;
        self.next_id += 1;
        if let Some(listener) = served.listener() {
            self.watch(listener, Source::Listener(id))
                .map_err(|errno| SocketError::Make {
                    path: served.status().socket,
                    source: errno.into(),
                })?;
        }
        self.ports.insert(id, served);
        self.tell(id);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> bool {
        let mut ids = self.ports.iter();
        let Some(id) = ids.find_map(|(id, served)| (served.name() == name).then_some(*id)) else {
            return false;
        };
        self.paused.retain(|(paused, _)| *paused != id);
        // Dropping it ends the session and removes the socket.
        drop(self.ports.remove(&id));
        lock(&self.statuses).remove(name);
        true
    }

    fn accept(&mut self, id: u64) {
        let Some(served) = self.ports.get_mut(&id) else {
            return;
        };
        match served.accept() {
            Ok(Admitted::Connected) => self.begin(id),
            Ok(Admitted::Refused) => self.tell(id),
            Ok(Admitted::Nobody) => {}
            Err(errno) => {
                // The frontend goes on waiting, and we would be told of it again
                // and again.
                tracing::warn!(port = served.name(), %errno, "cannot accept a frontend");
                if let Some(listener) = served.listener() {
                    // Not watched (any more) is what it is to be.
                    let _ = epoll::delete(&self.epoll, listener);
                }
                self.paused.push((id, Instant::now() + PAUSE));
            }
        }
    }

    /// A frontend has connected.
    fn begin(&mut self, id: u64) {
        let Some(served) = self.ports.get_mut(&id) else {
            return;
        };
        let watched = served.stream().map_or(Ok(()), |stream| {
            watch(&self.epoll, stream, Source::Stream(id))
        });
        if let Err(errno) = watched {
            served.disconnect(&Ended::Failed(errno));
        }
        self.tell(id);
    }

    fn serve(&mut self, id: u64) {
        let Some(served) = self.ports.get_mut(&id) else {
            return;
        };
        if let Err(ended) = served.serve(|served| publish(&self.statuses, served)) {
            // Closing the socket ends its being watched.
            served.disconnect(&ended);
            publish(&self.statuses, served);
        }
        let errs = served.take_signals();
        self.signal(errs);
    }

    fn do_what_is_due(&mut self) {
        let now = Instant::now();
        let due: Vec<u64> = self
            .ports
            .iter()
            .filter(|(_, served)| served.connect_at().is_some_and(|at| at <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            if let Some(served) = self.ports.get_mut(&id) {
                match served.connect() {
                    Admitted::Connected => self.begin(id),
                    Admitted::Refused | Admitted::Nobody => self.tell(id),
                }
            }
        }
        self.resume(now);
        if self.look_at <= now {
            self.look_at = now + LOOK_EVERY;
            let news: Vec<u64> = self
                .ports
                .iter_mut()
                .filter_map(|(id, served)| served.notice_faults().then_some(*id))
                .collect();
            for id in news {
                let errs = self.ports.get_mut(&id).map(Served::take_signals);
                self.signal(errs.unwrap_or_default());
                self.tell(id);
            }
        }
    }

    fn signal(&self, errs: Vec<EventFd>) {
        for err in errs {
            // Full: somebody makes the thread wait. Nobody else shall.
            let _ = self.errs.try_send(err);
        }
    }

    /// Listens again where that was left off.
    fn resume(&mut self, now: Instant) {
        let due: Vec<u64> = self
            .paused
            .extract_if(.., |(_, at)| *at <= now)
            .map(|(id, _)| id)
            .collect();
        for id in due {
            let listener = self.ports.get(&id).and_then(Served::listener);
            if listener.is_some_and(|fd| self.watch(fd, Source::Listener(id)).is_err()) {
                self.paused.push((id, now + PAUSE));
            }
        }
    }

    fn watch(&self, fd: BorrowedFd<'_>, source: Source) -> rustix::io::Result<()> {
        watch(&self.epoll, fd, source)
    }

    /// Publishes what is known of a port.
    fn tell(&self, id: u64) {
        if let Some(served) = self.ports.get(&id) {
            publish(&self.statuses, served);
        }
    }
}

/// Starts the thread that signals err descriptors. Their owners can make a write
/// wait for as long as they like (clear O_NONBLOCK and fill the counter): then
/// signals are lost, and nothing else is. It ends with the sender, unless it
/// waits.
fn start_errs() -> io::Result<channel::Sender<EventFd>> {
    let (sender, receiver) = channel::bounded::<EventFd>(ERRS_MAX);
    std::thread::Builder::new()
        .name("pollux-err".to_owned())
        .spawn(move || {
            for err in receiver {
                // Whoever made it unusable will not hear of it.
                let _ = err.signal();
            }
        })?;
    Ok(sender)
}

fn publish(statuses: &Statuses, served: &Served) {
    let status = served.status();
    lock(statuses).insert(served.name().into(), status);
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, source: Source) -> rustix::io::Result<()> {
    epoll::add(epoll, fd, source.data(), epoll::EventFlags::IN)
}

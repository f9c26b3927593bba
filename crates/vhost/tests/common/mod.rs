//! A switch with a backend, and frontends that speak raw messages.
#![allow(
    dead_code,
    reason = "each test file is a crate of its own and uses a part"
)]

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pollux_datapath::{Plan, PortPlan, Switch, SwitchConfig, Time, WorkerPlan};
use pollux_switch::FdbConfig;
use pollux_sys::EventFd;
use pollux_testkit::{EVERYBODY, GuestSpec, Station, mac_of, plain_frame, wait_until};
use pollux_vhost::{Backend, PortConfig, PortStatus, SessionState, SocketMode};
use pollux_virtio::driver::{ChainShape, Guest, NetConfig};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
pub(crate) use vhost::vhost_user::message::FrontendReq as Req;

/// VERSION_1 and MRG_RXBUF, as `GuestSpec::default` has them.
pub(crate) const FEATURES: u64 = 1 << 32 | 1 << 15;
pub(crate) const NEED_REPLY: u32 = 8;
pub(crate) const NOFD: u64 = 1 << 8;
/// Longer than anything takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Workers spin and descriptors are counted: one switch at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn name(port: u16) -> String {
    format!("p{port}")
}

pub(crate) fn plan(ports: impl IntoIterator<Item = u16>) -> Plan {
    Plan {
        workers: vec![WorkerPlan {
            name: "w0".to_owned(),
            core: None,
        }],
        ports: ports
            .into_iter()
            .map(|port| PortPlan::new(&name(port)))
            .collect(),
        ..Plan::default()
    }
}

/// A switch, ports `p0`, `p1` ... and a server socket for each.
pub(crate) struct Bed {
    pub(crate) backend: Backend,
    pub(crate) switch: Switch,
    pub(crate) directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Bed {
    pub(crate) fn new(ports: u16) -> Self {
        let alone = alone();
        let config = SwitchConfig {
            fdb: FdbConfig {
                seed: 7,
                ..FdbConfig::default()
            },
            time: Time::Manual,
            thread_start: None,
        };
        let switch = Switch::new(config).expect("the kernel gives a thread");
        switch.apply(&plan(0..ports)).expect("the plan is good");
        let bed = Self {
            backend: Backend::start().expect("the kernel gives a thread"),
            switch,
            directory: tempfile::tempdir().expect("a directory"),
            _alone: alone,
        };
        (0..ports).for_each(|port| bed.serve(port));
        bed
    }

    pub(crate) fn socket(&self, port: u16) -> PathBuf {
        self.directory.path().join(format!("{}.sock", name(port)))
    }

    pub(crate) fn config(&self, port: u16) -> PortConfig {
        PortConfig {
            socket: self.socket(port),
            mode: SocketMode::Server,
            any_memory: false,
        }
    }

    /// Lets the backend serve a port of the plan.
    pub(crate) fn serve(&self, port: u16) {
        let in_plan = self.switch.port(&name(port)).expect("in the plan");
        self.backend
            .add(in_plan, self.config(port))
            .expect("the socket is free");
    }

    pub(crate) fn client(&self, port: u16) -> Client {
        Client::connect(&self.socket(port))
    }

    /// A guest whose frontend has connected and started both rings.
    pub(crate) fn attach(&self, port: u16) -> Attached {
        let station = Station::new(port, GuestSpec::default());
        let mut client = self.client(port);
        client.attach(&station.guest);
        Attached { client, station }
    }

    pub(crate) fn status(&self, port: u16) -> PortStatus {
        self.backend.status(&name(port)).expect("it is served")
    }

    /// Waits until the worker has begun a turn after this call.
    pub(crate) fn turn(&self) {
        let turns = || {
            let counters = self.switch.worker_counters("w0");
            counters.expect("the worker runs").worker.turns
        };
        // One may have begun before, and one may be under way.
        let end = turns() + 2;
        wait_until("the worker takes turns", || turns() >= end);
    }

    /// Waits until the `count`th frontend of a port has come and gone.
    pub(crate) fn wait_until_gone(&self, port: u16, count: u64) {
        wait_until("the frontend has come and gone", || {
            let status = self.status(port);
            status.connections == count && status.state == SessionState::Listening
        });
    }

    pub(crate) fn wait_for(&self, port: u16, state: SessionState) {
        wait_until(&format!("port {port} is {}", state.name()), || {
            self.status(port).state == state
        });
    }
}

/// A guest and its frontend.
pub(crate) struct Attached {
    pub(crate) client: Client,
    pub(crate) station: Station,
}

/// Two guests that send to each other in a closed loop, and lose nothing.
pub(crate) struct Pair(pub(crate) [Station; 2], [Option<Client>; 2]);

impl Pair {
    /// On ports `p0` and `p1`.
    pub(crate) fn new(bed: &Bed) -> Self {
        let [a, b] = [0, 1].map(|port| bed.attach(port));
        Self([a.station, b.station], [Some(a.client), Some(b.client)])
    }

    /// Moves some frames; call it again and again.
    pub(crate) fn exchange(&mut self) {
        const WINDOW: u64 = 64;
        for (from, to) in [(0, 1), (1, 0)] {
            let numbers = [from, to].map(|index| self.0[index].number());
            let arrived = self.0[to].flow(numbers[0], numbers[1]).next();
            let station = &mut self.0[from];
            while station.sent_to(numbers[1]) < arrived + WINDOW && station.send(numbers[1], 64) {}
            station.publish();
        }
        for station in &mut self.0 {
            station.poll();
            // Flooded to everybody.
            station.take_others();
        }
    }

    /// Waits for what is under way; every frame has arrived, in order.
    pub(crate) fn assert_nothing_lost(&mut self) {
        let frames = |pair: &Self, from: usize, to: usize| {
            let numbers = [from, to].map(|index| pair.0[index].number());
            let flow = pair.0[to].flow(numbers[0], numbers[1]);
            (pair.0[from].sent_to(numbers[1]), flow)
        };
        wait_until("every frame has arrived", || {
            self.0.iter_mut().for_each(|station| {
                station.poll();
            });
            [(0, 1), (1, 0)].iter().all(|&(from, to)| {
                let (sent, flow) = frames(self, from, to);
                flow.next() == sent
            })
        });
        for (from, to) in [(0, 1), (1, 0)] {
            let (sent, flow) = frames(self, from, to);
            assert_eq!((flow.received, flow.lost), (sent, 0), "{from} to {to}");
            assert!(sent > 0);
        }
    }

    /// Ends the session of one of the two.
    pub(crate) fn disconnect(&mut self, index: usize) {
        self.1[index] = None;
    }

    /// Frames that have arrived, both ways.
    pub(crate) fn arrived(&self) -> u64 {
        self.0.iter().map(Station::received).sum()
    }
}

/// A guest that anybody may send to, so that nothing meant for it is flooded.
pub(crate) struct Sink(Attached);

impl Sink {
    pub(crate) fn new(bed: &Bed, port: u16) -> Self {
        let mut guest = bed.attach(port);
        assert!(guest.station.send(EVERYBODY, 64));
        guest.station.publish();
        wait_until("the address is learned", || {
            guest.station.poll();
            guest.station.in_flight() == 0
        });
        Self(guest)
    }

    /// Fills the TX ring of `station` with frames for the sink; how many there
    /// was room for.
    pub(crate) fn fill(&mut self, station: &mut Station) -> u32 {
        let to = self.0.station.mac();
        let mut count = 0;
        while station.send_frame(&plain_frame(to, station.mac(), 64, 1), ChainShape::JOINED) {
            count += 1;
        }
        station.publish();
        count
    }

    /// Sends some frames to `port`, and receives. While the port is not known
    /// they are flooded: so few that the others have room for them.
    pub(crate) fn exchange(&mut self, port: u16) {
        let (to, station) = (mac_of(port), &mut self.0.station);
        for _ in station.in_flight()..32 {
            let frame = plain_frame(to, station.mac(), 64, 2);
            assert!(station.send_frame(&frame, ChainShape::JOINED));
        }
        station.publish();
        self.poll();
    }

    pub(crate) fn poll(&mut self) {
        self.0.station.poll();
        for frame in self.0.station.take_others() {
            assert_eq!(frame.len(), 64);
        }
    }
}

/// A frontend that sends whatever it is told to.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
}

impl Client {
    pub(crate) fn connect(path: &std::path::Path) -> Self {
        let stream = UnixStream::connect(path).expect("the backend listens");
        Self::of(stream)
    }

    pub(crate) fn of(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        stream.set_write_timeout(Some(TIMEOUT)).expect("a timeout");
        Self { stream }
    }

    /// Sends bytes and descriptors in one message; false if the backend has
    /// closed the connection.
    pub(crate) fn send_raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent = rustix::net::sendmsg(
            &self.stream,
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
        sent.is_ok_and(|sent| sent == bytes.len())
    }

    pub(crate) fn send(&mut self, request: u32, flags: u32, body: &[u8], fds: &[OwnedFd]) -> bool {
        let mut bytes = Vec::new();
        for word in [
            request,
            1 | flags,
            u32::try_from(body.len()).expect("short"),
        ] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(body);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.send_raw(&bytes, &fds)
    }

    /// The next reply; `None` if the backend has closed the connection.
    pub(crate) fn reply(&mut self) -> Option<(u32, Vec<u8>)> {
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).ok()?;
        let word = |index: usize| {
            u32::from_ne_bytes(header[4 * index..][..4].try_into().expect("4 bytes"))
        };
        assert_eq!(word(1), 5, "version 1, reply");
        let mut body = vec![0; word(2) as usize];
        self.stream.read_exact(&mut body).ok()?;
        Some((word(0), body))
    }

    /// Sends a request that is acknowledged; true if it was carried out.
    pub(crate) fn set(&mut self, request: Req, body: &[u8], fds: &[OwnedFd]) -> bool {
        assert!(self.send(request as u32, NEED_REPLY, body, fds));
        let (code, body) = self.reply().expect("an acknowledgement");
        assert_eq!((code, body.len()), (request as u32, 8));
        body == 0_u64.to_ne_bytes()
    }

    pub(crate) fn ok(&mut self, request: Req, body: &[u8], fds: &[OwnedFd]) {
        assert!(self.set(request, body, fds), "{request:?} was refused");
    }

    pub(crate) fn get(&mut self, request: Req, body: &[u8]) -> Vec<u8> {
        assert!(self.send(request as u32, 0, body, &[]));
        let (code, body) = self.reply().expect("a reply");
        assert_eq!(code, request as u32);
        body
    }

    pub(crate) fn share(&mut self, guest: &Guest) {
        let places: Vec<_> = guest.places().collect();
        let mut body = words(&[u32::try_from(places.len()).expect("few"), 0]);
        for place in &places {
            body.extend(longs(&[
                place.guest_addr,
                place.size,
                place.user_addr,
                place.file_offset,
            ]));
        }
        let fds: Vec<_> = places
            .iter()
            .map(|_| guest.file.try_clone().expect("dup"))
            .collect();
        self.ok(Req::SET_MEM_TABLE, &body, &fds);
    }

    /// Sets a ring up and starts it.
    pub(crate) fn start(&mut self, ring: u32, config: &NetConfig, base: u16) {
        let areas = config.areas;
        self.ok(Req::SET_VRING_NUM, &words(&[ring, areas.size.into()]), &[]);
        self.ok(Req::SET_VRING_BASE, &words(&[ring, base.into()]), &[]);
        let mut addr = words(&[ring, 0]);
        let addrs = [areas.desc_addr, areas.used_addr, areas.avail_addr].map(Guest::user_addr);
        addr.extend(longs(&addrs));
        addr.extend(longs(&[0]));
        self.ok(Req::SET_VRING_ADDR, &addr, &[]);
        self.ok(Req::SET_VRING_KICK, &longs(&[u64::from(ring) | NOFD]), &[]);
    }

    /// The whole handshake of a frontend without protocol features.
    pub(crate) fn attach(&mut self, guest: &Guest) {
        self.ok(Req::SET_OWNER, &[], &[]);
        self.ok(Req::SET_FEATURES, &longs(&[FEATURES]), &[]);
        self.share(guest);
        self.start(0, &guest.rx_config(), guest.rx_config().base);
        self.start(1, &guest.tx_config(), guest.tx_config().base);
    }

    /// GET_VRING_BASE: stops a ring.
    pub(crate) fn stop(&mut self, ring: u32) -> u16 {
        let body = self.get(Req::GET_VRING_BASE, &words(&[ring, 0]));
        assert_eq!(body[..4], ring.to_ne_bytes());
        let base = u32::from_ne_bytes(body[4..].try_into().expect("8 bytes"));
        u16::try_from(base).expect("16 bits")
    }

    /// True once the backend has closed the connection.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0))
    }
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(crate) fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

pub(crate) fn eventfd() -> OwnedFd {
    EventFd::new().expect("eventfd").into()
}

/// Open descriptors of this process.
pub(crate) fn fd_count() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

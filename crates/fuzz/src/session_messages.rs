//! Messages of a frontend that sends whatever it likes, with whatever
//! descriptors, to a session whose rings are polled in between.
//!
//! What has to hold:
//!
//! * each request gets exactly one reply if it has one of its own or asks for an
//!   acknowledgement, else none, and the reply is well formed;
//! * after the connection is gone no descriptor and no mapping is left;
//! * rings run only in memory that is there (they are polled).

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use pollux_sys::EventFd;
use pollux_testkit::RawDesc;
use pollux_vhost::fuzz::{Connection, Handled};
use pollux_virtio::GuestMemory;

use crate::bytes::Bytes;
use crate::{arena, marks};

/// Operations of one input at most.
const OPS_MAX: usize = 48;
const PAGE: u64 = 4096;
/// Bytes of the memory file.
const MEMORY_BYTES: u64 = 16 * PAGE;
const USER_BASE: u64 = 0x7f00_0000_0000;
/// Bytes that one ring's areas and buffers have.
const RING_BYTES: u64 = 4 * PAGE;
/// Descriptors of the rings of a frontend that means well.
const RING_SIZE: u64 = 16;

// Requests (vhost-user specification, "Front-end message types").
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const SET_VRING_ENABLE: u32 = 18;
const GET_MAX_MEM_SLOTS: u32 = 36;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;
/// Largest request number that the specification has, and some.
const REQUEST_END: u32 = 48;
const NEED_REPLY: u32 = 8;
/// No descriptor comes with a notifier.
const NOFD: u64 = 0x100;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    // What is made once and stays is made before the count.
    let _ = pollux_sys::mapping_count();
    let before = (open_files(), pollux_sys::mapping_count());
    let mut frontend = Frontend::new(Bytes::new(bytes));
    for _ in 0..OPS_MAX {
        if frontend.bytes.is_empty() || frontend.ended {
            break;
        }
        frontend.step();
    }
    frontend.connection.end();
    drop(frontend);
    let after = (open_files(), pollux_sys::mapping_count());
    assert_eq!(after, before, "descriptors and mappings are left");
}

/// What has to be reached: see [`Target::wanted`](crate::Target::wanted).
#[must_use]
pub fn wanted() -> Vec<String> {
    let marks = [
        "rings-chains-returned",
        "rings-frames-delivered",
        "rings-broken",
        "refused-ring-outside",
        "refused-memory-file",
        "refused-fd-count",
        "refused-notifier",
    ];
    marks.map(str::to_owned).to_vec()
}

/// How many descriptors this process has.
fn open_files() -> usize {
    fs::read_dir("/proc/self/fd")
        .expect("Linux has /proc")
        .count()
}

struct Frontend<'a> {
    bytes: Bytes<'a>,
    connection: Connection,
    ended: bool,
    file: OwnedFd,
    /// How the guest writes to the file.
    memory: GuestMemory,
    /// The other ends of sockets that stay open.
    peers: Vec<UnixStream>,
    /// Chains offered on the TX ring.
    offered: u16,
}

impl<'a> Frontend<'a> {
    fn new(mut bytes: Bytes<'a>) -> Self {
        let (file, memory) = arena::map_file("pollux-fuzz-session", MEMORY_BYTES);
        Self {
            connection: Connection::new(bytes.one_in(2)),
            bytes,
            ended: false,
            file,
            memory,
            peers: Vec::new(),
            offered: 0,
        }
    }

    fn step(&mut self) {
        match self.bytes.below(12) {
            0 => self.set_up(),
            1 => {
                let request = self.bytes.u32();
                let flags = self.bytes.u32();
                let count = usize::from(self.bytes.u8());
                let body = self.bytes.take(count);
                let fds = self.any_fds();
                self.send(request, flags, &body, fds);
            }
            2 => self.guest_writes(),
            3 => self.poll(),
            _ => self.typed(),
        }
    }

    /// A request whose body is as it should be, but for its values, and perhaps
    /// a mutation.
    fn typed(&mut self) {
        let known = [
            SET_FEATURES,
            SET_MEM_TABLE,
            SET_VRING_NUM,
            SET_VRING_ADDR,
            SET_VRING_BASE,
            GET_VRING_BASE,
            SET_VRING_KICK,
            SET_VRING_CALL,
            SET_VRING_ERR,
            SET_PROTOCOL_FEATURES,
            SET_VRING_ENABLE,
            ADD_MEM_REG,
            REM_MEM_REG,
        ];
        let request = if self.bytes.one_in(4) {
            self.bytes.below(REQUEST_END)
        } else {
            self.bytes.choose(&known)
        };
        let ring = self.bytes.choose(&[0_u64, 1, 0, 1, 2, 0xff]);
        let (mut body, mut fds) = match request {
            SET_FEATURES | SET_PROTOCOL_FEATURES => (longs(&[self.any_features(request)]), vec![]),
            SET_MEM_TABLE => self.memory_table(),
            ADD_MEM_REG | REM_MEM_REG => {
                let region = self.region();
                let count = usize::from(request == ADD_MEM_REG);
                (longs(&[&[0], &region[..]].concat()), self.memory_fds(count))
            }
            SET_VRING_ADDR => {
                let base = self.ring_base(ring);
                (self.addr(ring, base), vec![])
            }
            SET_VRING_NUM | SET_VRING_BASE | GET_VRING_BASE | SET_VRING_ENABLE => {
                let value = match self.bytes.below(4) {
                    0 => u64::from(self.bytes.u32()),
                    _ => self
                        .bytes
                        .choose(&[1, 0, RING_SIZE, 256, 3, 32_768, 65_536]),
                };
                (longs(&[ring | value << 32]), vec![])
            }
            SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => {
                if self.bytes.one_in(4) {
                    (longs(&[ring | NOFD]), vec![])
                } else {
                    let fd = self.any_fd();
                    (longs(&[ring]), vec![fd])
                }
            }
            _ => (vec![], vec![]),
        };
        let mut flags = 1 | self.bytes.choose(&[0, NEED_REPLY]);
        match self.bytes.below(12) {
            7 => body.truncate(usize::from(self.bytes.u8())),
            8 => {
                let count = usize::from(self.bytes.u8());
                let more = self.bytes.take(count);
                body.extend(more);
            }
            9 => fds = self.any_fds(),
            10 if !body.is_empty() => {
                let at = usize::from(self.bytes.u8()) % body.len();
                body[at] = self.bytes.u8();
            }
            11 => flags = self.bytes.u8().into(),
            _ => {}
        }
        self.send(request, flags, &body, fds);
    }

    fn any_features(&mut self, request: u32) -> u64 {
        let offered = self.ask(if request == SET_FEATURES {
            GET_FEATURES
        } else {
            GET_PROTOCOL_FEATURES
        });
        match self.bytes.below(4) {
            0 => self.bytes.u64(),
            1 => offered & self.bytes.u64(),
            2 => offered & !(1 << 30),
            _ => offered,
        }
    }

    /// The number that a request without a body is answered with.
    fn ask(&mut self, request: u32) -> u64 {
        let reply = self.send(request, 1, &[], vec![]);
        let reply = reply.expect("the stream goes on");
        let number = reply.last_chunk().expect("the answer is 8 bytes");
        u64::from_ne_bytes(*number)
    }

    /// Guest address, size, user address and offset of a region.
    fn region(&mut self) -> [u64; 4] {
        match self.bytes.below(6) {
            0 => [0, MEMORY_BYTES, USER_BASE, 0],
            1 => [0, RING_BYTES, USER_BASE, 0],
            2 => [
                RING_BYTES,
                MEMORY_BYTES - RING_BYTES,
                USER_BASE + RING_BYTES,
                RING_BYTES,
            ],
            3 => {
                // Not at the beginning of a page, and elsewhere.
                let offset = 16 * u64::from(self.bytes.u8());
                [offset, 3 * PAGE, USER_BASE + (1 << 30) + offset, offset]
            }
            4 => [0, 0, 0, 0].map(|_: u64| self.bytes.u64()),
            _ => {
                let page = u64::from(self.bytes.below(20));
                [page * PAGE, PAGE, USER_BASE + page * PAGE, page * PAGE]
            }
        }
    }

    fn memory_table(&mut self) -> (Vec<u8>, Vec<OwnedFd>) {
        let count = match self.bytes.below(4) {
            0 => usize::from(self.bytes.u8() % 10),
            1 => 2,
            _ => 1,
        };
        let mut body = longs(&[count as u64]);
        for _ in 0..count {
            body.extend(longs(&self.region()));
        }
        (body, self.memory_fds(count))
    }

    fn memory_fds(&mut self, count: usize) -> Vec<OwnedFd> {
        let fds = (0..count).map(|_| {
            if self.bytes.one_in(6) {
                self.any_fd()
            } else {
                self.file.try_clone().expect("dup")
            }
        });
        fds.collect()
    }

    fn any_fds(&mut self) -> Vec<OwnedFd> {
        (0..self.bytes.below(11)).map(|_| self.any_fd()).collect()
    }

    fn any_fd(&mut self) -> OwnedFd {
        match self.bytes.below(9) {
            0 => self.file.try_clone().expect("dup"),
            1 => EventFd::new().expect("an eventfd").into(),
            2 => io::pipe().expect("a pipe").0.into(),
            3 => io::pipe().expect("a pipe").1.into(),
            4 => File::open("/dev/null").expect("there is one").into(),
            // Its other end is closed.
            5 => UnixStream::pair().expect("sockets").0.into(),
            6 => {
                let (ours, theirs) = UnixStream::pair().expect("sockets");
                self.peers.push(theirs);
                ours.into()
            }
            7 => pollux_sys::memfd("small", PAGE).expect("a memfd"),
            _ => File::open("/proc/self/status").expect("a file").into(),
        }
    }

    /// Where the areas of a ring are, or a lie.
    fn ring_base(&mut self, ring: u64) -> u64 {
        let base = USER_BASE + (ring & 1) * RING_BYTES;
        match self.bytes.below(4) {
            0 => self.bytes.u64(),
            1 => base + 16 * u64::from(self.bytes.u8()),
            _ => base,
        }
    }

    fn addr(&mut self, ring: u64, base: u64) -> Vec<u8> {
        let [desc, used, avail] = [0, 1, 2].map(|page| base.wrapping_add(page * PAGE));
        longs(&[ring, desc, used, avail, 0])
    }

    /// What a frontend sends that means well, for both rings.
    fn set_up(&mut self) {
        let offered = self.ask(GET_FEATURES);
        let refused = u64::from(self.bytes.u8()) << 28;
        self.send(SET_FEATURES, 1, &longs(&[offered & !refused]), vec![]);
        let protocol = self.ask(GET_PROTOCOL_FEATURES);
        self.send(SET_PROTOCOL_FEATURES, 1, &longs(&[protocol]), vec![]);
        let regions = [
            [0, RING_BYTES, USER_BASE, 0],
            [
                RING_BYTES,
                MEMORY_BYTES - RING_BYTES,
                USER_BASE + RING_BYTES,
                RING_BYTES,
            ],
        ];
        let fd = self.file.try_clone().expect("dup");
        if self.bytes.one_in(2) {
            for region in regions {
                let fd = fd.try_clone().expect("dup");
                let body = longs(&[&[0], &region[..]].concat());
                self.send(ADD_MEM_REG, 1, &body, vec![fd]);
            }
        } else {
            let fds = vec![fd.try_clone().expect("dup"), fd];
            let body = longs(&[&[2], regions.as_flattened()].concat());
            self.send(SET_MEM_TABLE, 1, &body, fds);
        }
        for ring in [0, 1] {
            self.send(SET_VRING_NUM, 1, &longs(&[ring | RING_SIZE << 32]), vec![]);
            self.send(SET_VRING_BASE, 1, &longs(&[ring]), vec![]);
            let addr = self.addr(ring, USER_BASE + ring * RING_BYTES);
            self.send(SET_VRING_ADDR, 1, &addr, vec![]);
            for request in [SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK] {
                let fd = EventFd::new().expect("an eventfd").into();
                self.send(request, 1 | NEED_REPLY, &longs(&[ring]), vec![fd]);
            }
            self.send(SET_VRING_ENABLE, 1, &longs(&[ring | 1 << 32]), vec![]);
        }
    }

    /// Chains in both rings, as they lie after [`set_up`](Self::set_up).
    fn guest_writes(&mut self) {
        self.offered = self
            .offered
            .wrapping_add(1 + u16::from(self.bytes.u8() & 3));
        let mut idx = self.offered;
        if self.bytes.one_in(8) {
            idx = self.bytes.u16();
        }
        for (ring, writable) in [(0, true), (1, false)] {
            let base = ring * RING_BYTES;
            let buffer = base + 3 * PAGE;
            for index in 0..RING_SIZE {
                let mut desc = if writable {
                    RawDesc::writable(buffer, 256)
                } else {
                    RawDesc::readable(buffer, 100)
                };
                if self.bytes.one_in(16) {
                    desc.flags.0 = self.bytes.u16();
                    desc.addr = self.bytes.u32().into();
                }
                self.write(base + 16 * index, &desc.to_bytes());
                let entry = u16::try_from(index).expect("small").to_le_bytes();
                self.write(base + 2 * PAGE + 4 + 2 * index, &entry);
            }
            self.write(base + 2 * PAGE + 2, &idx.to_le_bytes());
        }
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        let wrote = self.memory.write(addr, bytes);
        wrote.expect("inside the file");
    }

    /// The event loop and a worker have a turn.
    fn poll(&mut self) {
        let (chains, frames) = self.connection.poll();
        if chains > 0 {
            marks::reach("rings-chains-returned");
        }
        if frames > 0 {
            marks::reach("rings-frames-delivered");
        }
        if self.connection.look_after() {
            marks::reach("rings-broken");
        }
    }

    /// Sends a message, in one piece or in several, and judges what comes back.
    fn send(
        &mut self,
        request: u32,
        flags: u32,
        body: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Option<Vec<u8>> {
        if self.ended {
            return Some(vec![0; 8]);
        }
        let size = u32::try_from(body.len()).expect("short");
        let mut message = Vec::new();
        for word in [request, flags, size] {
            message.extend(word.to_ne_bytes());
        }
        message.extend(body);
        let piece_max = self
            .bytes
            .choose(&[usize::MAX, usize::MAX, usize::MAX, 1, 5, 12]);
        let mut rest = &message[..];
        let mut fds = Some(fds);
        loop {
            let count = self.connection.wanted().min(piece_max).min(rest.len());
            assert!(count > 0, "the framer wants more than the message has");
            let (now, later) = rest.split_at(count);
            rest = later;
            match self.connection.push(now, fds.take().unwrap_or_default()) {
                Ok(None) => {}
                Ok(Some(handled)) => {
                    assert!(rest.is_empty(), "the framer wants less than there is");
                    judge(&handled, request, flags, body);
                    return handled.reply;
                }
                Err(error) => {
                    marks::reach_variant("ended", Word(&error));
                    self.ended = true;
                    return Some(vec![0; 8]);
                }
            }
        }
    }
}

/// Text that is a variant already.
struct Word<'a>(&'a str);

impl std::fmt::Debug for Word<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// Exactly the reply that the request calls for.
fn judge(handled: &Handled, request: u32, flags: u32, body: &[u8]) {
    assert_eq!(handled.request, request);
    assert_eq!(handled.needs_reply, flags & NEED_REPLY != 0);
    match &handled.refusal {
        Some(refusal) => marks::reach_variant("refused", Word(refusal)),
        None => marks::reach(&format!("request-{request}")),
    }
    let has_own = match request {
        GET_FEATURES | GET_PROTOCOL_FEATURES | GET_QUEUE_NUM | GET_MAX_MEM_SLOTS => true,
        GET_VRING_BASE => body.len() == 8,
        _ => false,
    };
    let Some(reply) = &handled.reply else {
        assert!(!has_own && !handled.needs_reply, "a reply is missing");
        return;
    };
    assert!(has_own || handled.needs_reply, "nobody asked for a reply");
    let word = |at: usize| {
        let bytes = reply[at..at + 4].try_into().expect("4 bytes");
        u32::from_ne_bytes(bytes)
    };
    assert_eq!((word(0), word(4)), (request, 5), "version 1 and reply");
    assert_eq!(word(8) as usize, reply.len() - 12);
    assert_eq!(reply.len(), 20, "every reply is 8 bytes");
    if !has_own {
        let status = u64::from(handled.refused.is_some());
        assert_eq!(reply[12..], status.to_ne_bytes());
    }
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

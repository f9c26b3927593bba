mod packed;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use vhost::vhost_user::message::FrontendReq as Req;

use super::*;
use crate::framing::Framer;

const PAGE: u64 = 4096;
const USER_BASE: u64 = 0x7f00_0000_0000;
const MEMORY_BYTES: u64 = 64 * PAGE;
const NEED_REPLY: u32 = 8;

/// Queues that only remember.
#[derive(Debug, Default)]
struct FakeRings {
    running: HashMap<usize, (RingConfig, bool)>,
    calls_set: u32,
    relocated: Vec<(usize, RingAreas)>,
    /// Where rings go on, if not where they are told to.
    position: Option<u16>,
    /// How far a ring gets while it runs.
    progress: u16,
    fault: Option<String>,
}

impl Rings for FakeRings {
    fn start(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        config: RingConfig,
        enabled: bool,
    ) -> Result<u16, RequestError> {
        if memory.span(config.areas.desc_addr, 16).is_none() {
            return Err(RequestError::PortRemoved);
        }
        let size = config.areas.size;
        if !config.features.packed && !size.is_power_of_two() {
            return Err(RingError::Size { size }.into());
        }
        let position = self.position.unwrap_or(config.base);
        assert!(self.running.insert(ring, (config, enabled)).is_none());
        Ok(position)
    }

    fn stop(&mut self, ring: usize) -> Option<u16> {
        let (config, _) = self.running.remove(&ring).expect("it runs");
        Some(config.base.wrapping_add(self.progress))
    }

    fn set_enabled(&mut self, ring: usize, enabled: bool) -> Result<(), RequestError> {
        self.running.get_mut(&ring).expect("it runs").1 = enabled;
        Ok(())
    }

    fn set_call(&mut self, ring: usize, call: Option<EventFd>) {
        self.running.get_mut(&ring).expect("it runs").0.call = call;
        self.calls_set += 1;
    }

    fn relocate(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        areas: RingAreas,
    ) -> Result<(), RingError> {
        assert!(memory.span(areas.desc_addr, 16).is_some());
        self.running.get_mut(&ring).expect("it runs").0.areas = areas;
        self.relocated.push((ring, areas));
        Ok(())
    }

    fn fault(&self, _ring: usize) -> Option<String> {
        self.fault.clone()
    }
}

struct Rig {
    session: Session,
    rings: FakeRings,
    file: OwnedFd,
    notes: Vec<String>,
}

/// What a request led to.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    None,
    Ack,
    Nack,
    Body(Vec<u8>),
}

impl Rig {
    fn new() -> Self {
        Self {
            session: Session::new(false),
            rings: FakeRings::default(),
            file: pollux_sys::memfd("guest", MEMORY_BYTES).expect("memfd"),
            notes: Vec::new(),
        }
    }

    fn send(
        &mut self,
        request: u32,
        flags: u32,
        body: &[u8],
        fds: Vec<OwnedFd>,
    ) -> (Reply, String) {
        let mut bytes = Vec::new();
        for word in [
            request,
            1 | flags,
            u32::try_from(body.len()).expect("short"),
        ] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(body);
        let mut framer = Framer::default();
        let mut fds = Some(fds);
        let mut rest = &bytes[..];
        let message = loop {
            let (now, later) = rest.split_at(framer.wanted());
            rest = later;
            let fds = fds.take().unwrap_or_default();
            if let Some(message) = framer.push(now, fds).expect("sound") {
                break message;
            }
        };
        let outcome = self.session.handle(message, &mut self.rings);
        self.notes.extend(outcome.notes);
        let error = outcome.error.map(|error| error.to_string());
        let reply = match outcome.reply {
            None => Reply::None,
            Some(reply) => {
                assert_eq!(reply[..4], request.to_ne_bytes());
                assert_eq!(reply[4..8], 5_u32.to_ne_bytes(), "version 1 and reply");
                assert_eq!(
                    reply[8..12],
                    u32::try_from(reply.len() - 12)
                        .expect("short")
                        .to_ne_bytes()
                );
                match &reply[12..] {
                    body if flags & NEED_REPLY == 0 || is_get(request) => {
                        Reply::Body(body.to_vec())
                    }
                    body if body == 0_u64.to_ne_bytes() => Reply::Ack,
                    _ => Reply::Nack,
                }
            }
        };
        (reply, error.unwrap_or_default())
    }

    fn ok(&mut self, request: Req, body: &[u8], fds: Vec<OwnedFd>) {
        let (reply, error) = self.send(request as u32, NEED_REPLY, body, fds);
        assert_eq!((reply, &error[..]), (Reply::Ack, ""), "{request:?}");
    }

    /// The text of the refusal.
    fn refused(&mut self, request: Req, body: &[u8], fds: Vec<OwnedFd>) -> String {
        let (reply, error) = self.send(request as u32, NEED_REPLY, body, fds);
        assert_eq!(reply, Reply::Nack, "{request:?}");
        error
    }

    fn get(&mut self, request: Req, body: &[u8]) -> Vec<u8> {
        match self.send(request as u32, NEED_REPLY, body, vec![]).0 {
            Reply::Body(body) => body,
            other => panic!("{request:?}: {other:?}"),
        }
    }

    fn memory_table(&self, regions: &[(u64, u64, u64)]) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut body = words(&[u32::try_from(regions.len()).expect("few"), 0]);
        for &(guest_addr, size, user_addr) in regions {
            body.extend(longs(&[guest_addr, size, user_addr, 0]));
        }
        (
            body,
            regions
                .iter()
                .map(|_| self.file.try_clone().expect("dup"))
                .collect(),
        )
    }

    fn share_memory(&mut self) {
        let (body, fds) = self.memory_table(&[(0, MEMORY_BYTES, USER_BASE)]);
        self.ok(Req::SET_MEM_TABLE, &body, fds);
    }

    fn set_up(&mut self, ring: u32) {
        self.ok(Req::SET_VRING_NUM, &words(&[ring, 256]), vec![]);
        self.ok(Req::SET_VRING_BASE, &words(&[ring, 7]), vec![]);
        self.ok(Req::SET_VRING_ADDR, &addr(ring, USER_BASE), vec![]);
        self.ok(
            Req::SET_VRING_KICK,
            &longs(&[u64::from(ring)]),
            vec![eventfd()],
        );
    }

    fn features(&mut self, features: u64) {
        self.ok(Req::SET_FEATURES, &longs(&[features]), vec![]);
    }

    /// Both rings run.
    fn running() -> Self {
        let mut rig = Self::new();
        rig.features(SPLIT);
        rig.share_memory();
        for ring in 0..2 {
            rig.set_up(ring);
            rig.ok(Req::SET_VRING_ENABLE, &words(&[ring, 1]), vec![]);
        }
        assert_eq!(rig.session.missing(), None);
        rig
    }

    fn base(&mut self, ring: u32) -> u32 {
        let body = self.get(Req::GET_VRING_BASE, &words(&[ring, 0]));
        assert_eq!(body[..4], ring.to_ne_bytes());
        u32::from_ne_bytes(body[4..].try_into().expect("8 bytes"))
    }
}

/// All that is offered for split rings.
const SPLIT: u64 = features::OFFERED & !features::RING_PACKED;

fn is_get(request: u32) -> bool {
    let own = [
        Req::GET_FEATURES,
        Req::GET_PROTOCOL_FEATURES,
        Req::GET_QUEUE_NUM,
        Req::GET_MAX_MEM_SLOTS,
        Req::GET_VRING_BASE,
    ];
    own.iter().any(|own| *own as u32 == request)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

fn addr(ring: u32, user_addr: u64) -> Vec<u8> {
    let mut body = words(&[ring, 0]);
    let [desc, used, avail] = [0, 2, 4].map(|page| user_addr + page * PAGE);
    body.extend(longs(&[desc, used, avail, 0]));
    body
}

fn eventfd() -> OwnedFd {
    EventFd::new().expect("eventfd").into()
}

#[test]
fn a_frontend_in_the_usual_order_gets_two_running_rings() {
    let mut rig = Rig::new();
    let u64_of = |body: Vec<u8>| u64::from_ne_bytes(body.try_into().expect("8 bytes"));
    assert_eq!(u64_of(rig.get(Req::GET_FEATURES, &[])), features::OFFERED);
    let protocol = u64_of(rig.get(Req::GET_PROTOCOL_FEATURES, &[]));
    assert_eq!(
        protocol,
        1 | 1 << 3 | 1 << 15,
        "MQ, REPLY_ACK, CONFIGURE_MEM_SLOTS"
    );
    rig.ok(Req::SET_PROTOCOL_FEATURES, &longs(&[protocol]), vec![]);
    assert_eq!(u64_of(rig.get(Req::GET_QUEUE_NUM, &[])), 1);
    assert_eq!(u64_of(rig.get(Req::GET_MAX_MEM_SLOTS, &[])), 509);
    rig.ok(Req::SET_OWNER, &[], vec![]);
    let missing = |rig: &Rig, part: &str| {
        let missing = rig.session.missing().expect("not complete");
        assert!(missing.contains(part), "{missing}");
    };
    missing(&rig, "SET_FEATURES");
    rig.features(SPLIT);
    missing(&rig, "SET_MEM_TABLE");
    rig.share_memory();
    for ring in 0..2 {
        missing(&rig, &format!("vring {ring}) waits for SET_VRING_KICK"));
        rig.set_up(ring);
        missing(&rig, &format!("vring {ring}) waits for SET_VRING_ENABLE"));
        assert!(
            !rig.rings.running[&(ring as usize)].1,
            "started and disabled"
        );
        rig.ok(Req::SET_VRING_ENABLE, &words(&[ring, 1]), vec![]);
    }
    assert_eq!(rig.session.missing(), None);
    for ring in 0..2 {
        let (config, enabled) = &rig.rings.running[&ring];
        assert!(*enabled && config.features.version_1 && config.features.mergeable);
        assert_eq!((config.base, config.areas.size), (7, 256));
        assert_eq!(
            config.areas.used_addr,
            2 * PAGE,
            "translated to a guest address"
        );
    }
    rig.rings.progress = 5;
    assert_eq!(rig.base(1), 12);
    assert_eq!(rig.rings.running.len(), 1);
    missing(&rig, "vring 1) waits for SET_VRING_KICK");
    rig.session.end(&mut rig.rings);
    assert!(rig.rings.running.is_empty());
}

/// Every order of the messages that a ring needs ends with a running ring.
#[test]
fn messages_may_come_in_any_order() {
    let orders = permutations(&[0, 1, 2, 3, 4]);
    assert_eq!(orders.len(), 120);
    for order in orders {
        let mut rig = Rig::new();
        for step in &order {
            match step {
                0 => rig.features(SPLIT & !features::PROTOCOL_FEATURES),
                1 => rig.share_memory(),
                2 => rig.ok(Req::SET_VRING_NUM, &words(&[1, 128]), vec![]),
                3 => rig.ok(Req::SET_VRING_ADDR, &addr(1, USER_BASE), vec![]),
                _ => rig.ok(Req::SET_VRING_KICK, &longs(&[1]), vec![eventfd()]),
            }
        }
        let (config, enabled) = rig.rings.running.get(&1).expect("it runs");
        assert!(
            *enabled,
            "{order:?}: without protocol features a started ring is enabled"
        );
        assert_eq!(config.areas.size, 128);
    }
}

fn permutations(items: &[u8]) -> Vec<Vec<u8>> {
    if items.is_empty() {
        return vec![vec![]];
    }
    let mut all = Vec::new();
    for index in 0..items.len() {
        let mut rest = items.to_vec();
        let item = rest.remove(index);
        for mut tail in permutations(&rest) {
            tail.insert(0, item);
            all.push(tail);
        }
    }
    all
}

#[test]
fn a_kick_without_a_descriptor_polls_and_one_that_should_have_one_is_refused() {
    const NOFD: u64 = 1 << 8;
    let mut rig = Rig::new();
    for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
        rig.ok(request, &longs(&[NOFD]), vec![]);
        rig.ok(request, &longs(&[1]), vec![eventfd()]);
        assert!(
            rig.refused(request, &longs(&[0]), vec![])
                .contains("0 file descriptors")
        );
        assert!(
            rig.refused(request, &longs(&[NOFD]), vec![eventfd()])
                .contains("1 file")
        );
        assert!(
            rig.refused(request, &longs(&[0]), vec![eventfd(), eventfd()])
                .contains("2 file")
        );
        assert!(
            rig.refused(request, &longs(&[2]), vec![eventfd()])
                .contains("no vring 2")
        );
        rig.refused(request, &longs(&[1 << 32]), vec![eventfd()]);
        rig.refused(request, &longs(&[1 << 9]), vec![eventfd()]);
        let file = File::open("/proc/self/exe").expect("readable").into();
        assert!(
            rig.refused(request, &longs(&[0]), vec![file])
                .contains("descriptor cannot")
        );
    }
}

#[test]
fn ring_numbers_and_values_outside_of_the_specification_are_refused() {
    let mut rig = Rig::new();
    rig.features(SPLIT);
    let indices = [2, 0x100, 0x1_0000, u32::MAX];
    for index in indices {
        for request in [
            Req::SET_VRING_NUM,
            Req::SET_VRING_BASE,
            Req::SET_VRING_ENABLE,
        ] {
            let error = rig.refused(request, &words(&[index, 1]), vec![]);
            assert_eq!(error, format!("there is no vring {index}: 2 are offered"));
        }
        rig.refused(Req::SET_VRING_ADDR, &addr(index, USER_BASE), vec![]);
        assert_eq!(rig.base(index), 0, "a frontend waits for an answer (B-41)");
    }
    for size in [0, 3, 32_769, 65_535, 65_536, u32::MAX] {
        rig.refused(Req::SET_VRING_NUM, &words(&[0, size]), vec![]);
    }
    rig.refused(Req::SET_VRING_BASE, &words(&[0, 0x1_0000]), vec![]);
    rig.refused(Req::SET_VRING_ENABLE, &words(&[0, 2]), vec![]);
    assert_eq!(rig.base(0), 0, "never touched");
    let error = rig.refused(Req::SET_FEATURES, &longs(&[1 << 41]), vec![]);
    assert!(error.contains("0x20000000000"), "{error}");
    rig.refused(Req::SET_PROTOCOL_FEATURES, &longs(&[1 << 12]), vec![]);
    for request in [Req::SET_VRING_NUM, Req::SET_FEATURES, Req::SET_MEM_TABLE] {
        let error = rig.refused(request, &[0; 3], vec![]);
        assert!(error.contains("3 bytes instead of"), "{error}");
    }
}

#[test]
fn every_request_gets_exactly_the_reply_that_it_calls_for() {
    for request in (0..64).chain([u32::MAX]) {
        for flags in [0, NEED_REPLY] {
            let mut rig = Rig::new();
            let (reply, _) = rig.send(request, flags, &words(&[0, 0]), vec![]);
            match reply {
                Reply::Body(_) => assert!(is_get(request)),
                Reply::None => assert!(flags == 0 && !is_get(request)),
                Reply::Ack | Reply::Nack => assert!(flags != 0 && !is_get(request)),
            }
        }
    }
}

#[test]
fn the_memory_table_is_checked_and_a_refused_one_leaves_the_old() {
    let mut rig = Rig::running();
    let relocated = rig.rings.relocated.len();
    let bad: [&[(u64, u64, u64)]; 7] = [
        &[],
        &[(0, MEMORY_BYTES + PAGE, USER_BASE)],
        &[(0, 0, USER_BASE)],
        &[(u64::MAX - PAGE + 1, 2 * PAGE, USER_BASE)],
        &[(0, PAGE, u64::MAX - 5)],
        &[(0, 2 * PAGE, USER_BASE), (PAGE, PAGE, USER_BASE + 2 * PAGE)],
        &[(0, PAGE, 0); 9],
    ];
    for table in bad {
        let (body, mut fds) = rig.memory_table(table);
        fds.truncate(8);
        rig.refused(Req::SET_MEM_TABLE, &body, fds);
    }
    let (body, mut fds) = rig.memory_table(&[(0, PAGE, 0), (PAGE, PAGE, PAGE)]);
    fds.pop();
    assert!(
        rig.refused(Req::SET_MEM_TABLE, &body, fds)
            .contains("one for each region")
    );
    let (body, mut fds) = rig.memory_table(&[(0, PAGE, 0)]);
    fds.push(eventfd());
    rig.refused(Req::SET_MEM_TABLE, &body, fds);
    let (mut body, fds) = rig.memory_table(&[(0, PAGE, 0)]);
    body.pop();
    rig.refused(Req::SET_MEM_TABLE, &body, fds);
    assert_eq!(rig.rings.relocated.len(), relocated, "nothing was touched");
    assert_eq!(rig.session.missing(), None);
    assert_eq!(rig.session.memory_status().len(), 1);
}

#[test]
fn a_memory_table_may_have_room_for_more_regions_than_it_has() {
    let mut rig = Rig::new();
    let (mut body, fds) = rig.memory_table(&[(0, PAGE, 0)]);
    body.extend([0xff; 32]);
    rig.ok(Req::SET_MEM_TABLE, &body, fds);
    assert_eq!(rig.session.memory_status().len(), 1);
}

#[test]
fn memory_of_an_ordinary_file_is_refused_unless_the_port_allows_it() {
    // The file system of the build: nearly always a disk's.
    let file = || {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        file.set_len(MEMORY_BYTES).expect("room");
        OwnedFd::from(file)
    };
    if memory::check_memory_file(file().as_fd(), 0).is_ok() {
        return pollux_testkit::skip(
            "memory_of_an_ordinary_file_is_refused_unless_the_port_allows_it",
            "the sources lie on tmpfs",
        );
    }
    let mut rig = Rig::new();
    let (body, _) = rig.memory_table(&[(0, MEMORY_BYTES, USER_BASE)]);
    let error = rig.refused(Req::SET_MEM_TABLE, &body, vec![file()]);
    assert!(error.contains("any_memory = true"), "{error}");
    rig.session = Session::new(true);
    rig.ok(Req::SET_MEM_TABLE, &body, vec![file()]);
}

#[test]
fn running_rings_move_with_the_memory_and_stop_if_they_have_no_place_in_it() {
    let mut rig = Rig::running();
    let (body, fds) = rig.memory_table(&[(0x10_0000, MEMORY_BYTES, USER_BASE)]);
    rig.ok(Req::SET_MEM_TABLE, &body, fds);
    assert_eq!(rig.rings.relocated.len(), 2);
    assert_eq!(rig.rings.relocated[1].1.desc_addr, 0x10_0000);
    assert_eq!(rig.session.missing(), None);

    let (body, fds) = rig.memory_table(&[(0, MEMORY_BYTES, 2 * USER_BASE)]);
    rig.rings.progress = 3;
    rig.ok(Req::SET_MEM_TABLE, &body, fds);
    assert!(rig.rings.running.is_empty());
    let missing = rig.session.missing().expect("stopped");
    assert!(missing.contains("in no memory region"), "{missing}");
    // The memory comes back: so do the rings, where they were.
    rig.share_memory();
    assert_eq!(rig.session.missing(), None);
    assert_eq!(rig.rings.running[&0].0.base, 10);
}

#[test]
fn slots_are_added_and_removed_one_by_one() {
    let mut rig = Rig::new();
    let slot = |guest_addr: u64, user_addr: u64| longs(&[0, guest_addr, PAGE, user_addr, 0]);
    let fd = |rig: &Rig| vec![rig.file.try_clone().expect("dup")];
    let fds = fd(&rig);
    let error = rig.refused(Req::ADD_MEM_REG, &slot(0, 0), fds);
    assert!(error.contains("CONFIGURE_MEM_SLOTS"), "{error}");
    rig.ok(
        Req::SET_PROTOCOL_FEATURES,
        &longs(&[1 << 15 | 1 << 3]),
        vec![],
    );
    for index in 0..509 {
        let fds = fd(&rig);
        rig.ok(
            Req::ADD_MEM_REG,
            &slot(index * PAGE, USER_BASE + index * PAGE),
            fds,
        );
    }
    let fds = fd(&rig);
    assert!(
        rig.refused(Req::ADD_MEM_REG, &slot(1 << 40, 0), fds)
            .contains("509")
    );
    rig.refused(Req::ADD_MEM_REG, &slot(1 << 40, 0), vec![]);
    rig.refused(Req::REM_MEM_REG, &slot(3 * PAGE, 5), vec![]);
    rig.ok(
        Req::REM_MEM_REG,
        &slot(3 * PAGE, USER_BASE + 3 * PAGE),
        vec![],
    );
    rig.refused(
        Req::REM_MEM_REG,
        &slot(3 * PAGE, USER_BASE + 3 * PAGE),
        vec![],
    );
    let fds = fd(&rig);
    rig.refused(Req::ADD_MEM_REG, &slot(4 * PAGE, 0), fds);
    let fds = fd(&rig);
    rig.ok(Req::ADD_MEM_REG, &slot(3 * PAGE, 0), fds);
    assert_eq!(rig.session.memory_status().len(), 509);
}

#[test]
fn what_decides_how_a_ring_is_read_cannot_change_while_it_runs() {
    let mut rig = Rig::running();
    let error = rig.refused(
        Req::SET_FEATURES,
        &longs(&[SPLIT & !features::MRG_RXBUF]),
        vec![],
    );
    assert!(error.contains("while rings run"), "{error}");
    rig.features(SPLIT & !features::PROTOCOL_FEATURES);
    rig.refused(Req::SET_VRING_NUM, &words(&[0, 128]), vec![]);
    rig.ok(Req::SET_VRING_NUM, &words(&[0, 256]), vec![]);
    rig.refused(Req::SET_VRING_BASE, &words(&[0, 0]), vec![]);
    assert_eq!(rig.session.missing(), None);
    // Sent again at another place, as at the start of a migration.
    rig.ok(Req::SET_VRING_ADDR, &addr(0, USER_BASE + 8 * PAGE), vec![]);
    assert_eq!(rig.rings.relocated[0].1.desc_addr, 8 * PAGE);
    rig.refused(Req::SET_VRING_ADDR, &addr(0, 0), vec![]);
    assert_eq!(rig.rings.running[&0].0.areas.desc_addr, 8 * PAGE);
}

#[test]
fn a_call_can_change_at_any_time() {
    let mut rig = Rig::running();
    rig.ok(Req::SET_VRING_CALL, &longs(&[0]), vec![eventfd()]);
    assert_eq!(rig.rings.calls_set, 1);
    assert!(rig.rings.running[&0].0.call.is_some());
    rig.ok(Req::SET_VRING_CALL, &longs(&[1 << 8]), vec![]);
    assert!(rig.rings.running[&0].0.call.is_none());
    // Kept from before the start.
    rig.base(1);
    rig.ok(Req::SET_VRING_CALL, &longs(&[1]), vec![eventfd()]);
    rig.set_up(1);
    assert!(rig.rings.running[&1].0.call.is_some());
}

#[test]
fn a_ring_that_goes_on_elsewhere_says_so_and_stays_there() {
    let mut rig = Rig::new();
    rig.features(SPLIT);
    rig.share_memory();
    rig.rings.position = Some(9);
    rig.set_up(1);
    assert_eq!(rig.notes.len(), 1);
    assert!(rig.notes[0].contains("used.idx, 9"), "{}", rig.notes[0]);
    rig.rings.position = None;
    rig.share_memory();
    assert_eq!(rig.notes.len(), 1, "nothing new");
}

#[test]
fn reset_owner_stops_the_rings_and_keeps_the_session() {
    let mut rig = Rig::running();
    rig.ok(Req::RESET_OWNER, &[], vec![]);
    assert!(rig.rings.running.is_empty());
    rig.set_up(0);
    assert!(!rig.rings.running[&0].1, "disabled until SET_VRING_ENABLE");
}

#[test]
fn a_broken_ring_is_told_to_the_frontend_once_and_can_be_set_up_anew() {
    let mut rig = Rig::running();
    let err = EventFd::new().expect("eventfd");
    let fds = vec![err.try_clone().expect("dup").into()];
    rig.ok(Req::SET_VRING_ERR, &longs(&[1]), fds);
    assert!(!rig.session.notice_faults(&rig.rings));
    rig.rings.fault = Some("avail.idx jumped".to_owned());
    assert!(rig.session.notice_faults(&rig.rings));
    assert!(!rig.session.notice_faults(&rig.rings));
    let errs = rig.session.take_signals();
    assert_eq!(errs.len(), 1);
    errs[0].signal().expect("an eventfd");
    assert_eq!(
        err.drain(),
        1,
        "the one that the frontend gave for this ring"
    );
    assert!(rig.session.is_broken());
    assert!(
        rig.session
            .missing()
            .expect("broken")
            .contains("avail.idx jumped")
    );
    rig.rings.fault = None;
    for ring in 0..2 {
        assert_eq!(rig.base(ring), 7);
        rig.set_up(ring);
    }
    assert_eq!(rig.session.missing(), None);
}

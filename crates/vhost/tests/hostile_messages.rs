//! Frontends that send anything: the switch neither panics nor leaks, and the
//! other ports lose nothing (BUGS of other backends: B-31 to B-50).

mod common;

use std::os::fd::{AsFd, OwnedFd};

use common::{Bed, Client, FEATURES, NEED_REPLY, Pair, Req, Sink, eventfd, fd_count, longs, words};
use pollux_testkit::{EVERYBODY, GUEST_BASE, Guest, GuestSpec, Random, Station, wait_until};
use pollux_vhost::SessionState;

const PAGE: u64 = 4096;
/// Port of the attacker; 0 and 1 are the pair that must not notice.
const ATTACKER: u16 = 2;

/// What is open and mapped while nobody is connected to the attacker's port.
fn resources(bed: &Bed) -> (usize, usize) {
    bed.wait_for(ATTACKER, SessionState::Listening);
    (fd_count(), pollux_sys::mapping_count())
}

/// Everything is as before, and a well-behaved frontend is served.
fn assert_unharmed(bed: &Bed, pair: &mut Pair, before: (usize, usize)) {
    pair.exchange();
    pair.assert_nothing_lost();
    wait_until("everything is closed and unmapped", || {
        resources(bed) == before
    });
    let mut guest = bed.attach(ATTACKER);
    assert!(guest.station.send(EVERYBODY, 64));
    guest.station.publish();
    wait_until("the port still works", || {
        guest.station.poll();
        pair.exchange();
        guest.station.in_flight() == 0
    });
    assert_eq!(bed.status(ATTACKER).state, SessionState::Running);
}

/// Values near which mistakes are made.
fn number(random: &mut Random) -> u64 {
    const EDGES: [u64; 14] = [
        0,
        1,
        2,
        7,
        0xff,
        0x100,
        0x101,
        256,
        PAGE,
        0x10_0000,
        0x7f00_0000_0000,
        1 << 32,
        u64::MAX - PAGE + 1,
        u64::MAX,
    ];
    match random.below(4) {
        0 => random.bits(),
        1 => u64::from(random.below(4)),
        _ => EDGES[random.below(14) as usize],
    }
}

fn some_fd(random: &mut Random, guest: &Station) -> OwnedFd {
    match random.below(6) {
        0 | 1 => guest.guest.file.try_clone().expect("dup"),
        2 | 3 => eventfd(),
        4 => std::fs::File::open("/dev/null").expect("there").into(),
        _ => pollux_sys::memfd("tiny", 100).expect("memfd"),
    }
}

/// A message: half of the time one that is nearly right.
fn send_anything(random: &mut Random, client: &mut Client, guest: &Station) -> bool {
    let request = match random.below(8) {
        0 => u32::try_from(random.bits() & 0xffff_ffff).expect("32 bits"),
        _ => random.below(46),
    };
    let flags = match random.below(16) {
        0 if random.one_in(4) => u32::try_from(random.bits() & 0xff).expect("8 bits"),
        low => (low & 1) * NEED_REPLY,
    };
    let body = match random.below(6) {
        0 => (0..random.below(64))
            .map(|_| random.bits().to_le_bytes()[0])
            .collect(),
        1 => longs(&[number(random)]),
        2 | 3 => words(&[random.below(3), random.below(1025)]),
        4 => {
            let mut body = words(&[random.below(3), 0]);
            let addr = Guest::user_addr(GUEST_BASE) + u64::from(random.below(8)) * PAGE;
            body.extend(longs(&[addr, addr + PAGE, addr + 2 * PAGE, 0]));
            body
        }
        _ => {
            let count = random.below(10);
            let mut body = words(&[count, 0]);
            for _ in 0..count {
                body.extend(longs(&[
                    number(random),
                    number(random),
                    number(random),
                    number(random),
                ]));
            }
            body
        }
    };
    let fds: Vec<_> = (0..*random.choose(&[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 8, 8, 9, 30]))
        .map(|_| some_fd(random, guest))
        .collect();
    client.send(request, flags, &body, &fds)
}

/// A right message of the handshake, at any time.
fn send_something_right(random: &mut Random, client: &mut Client, guest: &Station) {
    let ring = random.below(2);
    let config = [guest.guest.rx_config(), guest.guest.tx_config()][ring as usize];
    let number = |request: Req, number: u32| (request as u32, words(&[ring, number]), vec![]);
    let (request, body, fds) = match random.below(9) {
        0 => (Req::SET_FEATURES as u32, longs(&[FEATURES]), vec![]),
        1 => {
            let place = guest.guest.places().next().expect("one");
            let mut body = words(&[1, 0]);
            body.extend(longs(&[place.guest_addr, place.size, place.user_addr, 0]));
            let fd = guest.guest.file.try_clone().expect("dup");
            (Req::SET_MEM_TABLE as u32, body, vec![fd])
        }
        2 => number(Req::SET_VRING_NUM, config.areas.size.into()),
        3 if random.one_in(8) => number(Req::SET_VRING_BASE, random.below(65_536)),
        3 => number(Req::SET_VRING_BASE, 0),
        4 => number(Req::SET_VRING_ENABLE, random.below(2)),
        5 => number(Req::GET_VRING_BASE, 0),
        6 => (
            Req::SET_VRING_CALL as u32,
            longs(&[ring.into()]),
            vec![eventfd()],
        ),
        7 => (
            Req::SET_VRING_KICK as u32,
            longs(&[ring.into()]),
            vec![eventfd()],
        ),
        _ => {
            let areas = config.areas;
            let mut body = words(&[ring, 0]);
            let addrs = [areas.desc_addr, areas.used_addr, areas.avail_addr];
            body.extend(longs(&addrs.map(Guest::user_addr)));
            body.extend(longs(&[0]));
            (Req::SET_VRING_ADDR as u32, body, vec![])
        }
    };
    client.send(request, NEED_REPLY, &body, &fds);
}

#[test]
fn random_messages_with_random_descriptors_harm_nobody() {
    let bed = Bed::new(4);
    let mut pair = Pair::new(&bed);
    let mut sink = Sink::new(&bed, 3);
    let before = resources(&bed);
    let (mut ran, mut received) = (0, 0);
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let mut guest = Station::new(ATTACKER, GuestSpec::default());
        let mut client = bed.client(ATTACKER);
        if seed % 2 == 0 {
            client.attach(&guest.guest);
        }
        for _ in 0..random.below(120) {
            let goes_on = if random.one_in(6) {
                send_anything(&mut random, &mut client, &guest)
            } else {
                send_something_right(&mut random, &mut client, &guest);
                true
            };
            if !goes_on {
                break;
            }
            if random.below(4) == 0 {
                sink.fill(&mut guest);
            }
            if random.below(8) == 0 {
                pair.exchange();
            }
        }
        sink.fill(&mut guest);
        bed.turn();
        // What it was answered is read by nobody: also right.
        drop(client);
        bed.wait_until_gone(ATTACKER, seed + 1);
        let counters = bed.switch.port_counters(&common::name(ATTACKER));
        let frames = counters.expect("in the plan").rx_frames;
        ran += u32::from(frames > received);
        received = frames;
        pair.exchange();
        sink.poll();
    }
    assert!(
        ran > 60,
        "{ran} of 400 had a ring that ran: the test tests little"
    );
    assert_unharmed(&bed, &mut pair, before);
}

#[test]
fn surplus_descriptors_are_closed_whatever_they_come_with() {
    let bed = Bed::new(4);
    let mut pair = Pair::new(&bed);
    let before = resources(&bed);
    let spares: Vec<OwnedFd> = (0..9).map(|_| eventfd()).collect();
    for request in 0..48 {
        for count in 1..=9 {
            let mut client = bed.client(ATTACKER);
            for _ in 0..3 {
                let fds: Vec<_> = spares[..count].iter().map(AsFd::as_fd).collect();
                let mut bytes = words(&[request, 1, 8]);
                bytes.extend(longs(&[0]));
                if !client.send_raw(&bytes, &fds) {
                    break;
                }
            }
            drop(client);
            bed.wait_for(ATTACKER, SessionState::Listening);
        }
        pair.exchange();
    }
    drop(spares);
    assert_unharmed(&bed, &mut pair, before);
}

#[test]
fn a_stream_that_makes_no_sense_ends_and_one_in_pieces_does_not() {
    let bed = Bed::new(4);
    let mut pair = Pair::new(&bed);
    let before = resources(&bed);
    let garbage: [Vec<u8>; 5] = [
        words(&[1, 2, 0]),
        words(&[1, 0, 0]),
        words(&[1, 5, 0]),
        words(&[1, 1, 4097]),
        words(&[1, 1, u32::MAX]),
    ];
    for bytes in garbage {
        let mut client = bed.client(ATTACKER);
        client.send_raw(&bytes, &[]);
        assert!(client.is_closed());
        wait_until("the reason is kept", || {
            bed.status(ATTACKER)
                .last_error
                .is_some_and(|error| error.contains("header") || error.contains("reply"))
        });
        bed.wait_for(ATTACKER, SessionState::Listening);
    }
    // Cut off inside of a message, with a descriptor in it.
    let mut client = bed.client(ATTACKER);
    let fd = eventfd();
    client.send_raw(&words(&[5, 1, 40, 0]), &[fd.as_fd()]);
    drop((client, fd));
    bed.wait_for(ATTACKER, SessionState::Listening);
    // One byte at a time.
    let mut client = bed.client(ATTACKER);
    for byte in words(&[Req::GET_FEATURES as u32, 1, 0]) {
        client.send_raw(&[byte], &[]);
    }
    let (code, body) = client.reply().expect("put together");
    assert_eq!((code, body.len()), (Req::GET_FEATURES as u32, 8));
    // Many at a time.
    let many: Vec<u8> = (0..100)
        .flat_map(|_| words(&[Req::GET_FEATURES as u32, 1, 0]))
        .collect();
    client.send_raw(&many, &[]);
    for _ in 0..100 {
        client.reply().expect("one for each");
    }
    drop(client);
    assert_unharmed(&bed, &mut pair, before);
}

#[test]
fn a_frontend_that_does_not_read_its_replies_is_cut_off() {
    let bed = Bed::new(4);
    let mut pair = Pair::new(&bed);
    let before = resources(&bed);
    let mut client = bed.client(ATTACKER);
    client.stream.set_nonblocking(true).expect("a flag");
    let request = words(&[Req::GET_FEATURES as u32, 1, 0]);
    wait_until("the backend has had enough", || {
        while client.send_raw(&request, &[]) {}
        pair.exchange();
        let error = bed.status(ATTACKER).last_error;
        error.is_some_and(|error| error.contains("does not read its replies"))
    });
    drop(client);
    assert_unharmed(&bed, &mut pair, before);
}

#[test]
fn memory_that_is_not_what_the_table_says_is_refused_and_a_cut_file_breaks_that_port_alone() {
    let bed = Bed::new(4);
    let mut pair = Pair::new(&bed);
    let before = resources(&bed);
    let mut guest = bed.attach(ATTACKER);
    assert!(guest.station.send(0, 64));
    guest.station.publish();
    wait_until("it works", || {
        guest.station.poll();
        guest.station.in_flight() == 0
    });
    assert!(guest.station.send(0, 64));
    rustix::fs::ftruncate(&guest.station.guest.file, 0).expect("ours");
    // Its own mapping is cut as well: nothing of it may be touched any more.
    std::mem::forget(guest.station);
    wait_until("the port is broken, and says why", || {
        pair.exchange();
        let missing = bed.status(ATTACKER).missing;
        missing.is_some_and(|missing| missing.contains("truncated"))
    });
    assert_eq!(bed.status(ATTACKER).state, SessionState::Broken);
    drop(guest.client);
    pair.assert_nothing_lost();
    let _ = before;
}

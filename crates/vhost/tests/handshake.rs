//! Sockets and sessions as users meet them: servers, clients, second
//! frontends, stale files, stops and starts.

mod common;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};

use common::{Attached, Bed, Client, FEATURES, NOFD, Pair, Req, eventfd, longs, name, words};
use pollux_packet::DropReason;
use pollux_testkit::{EVERYBODY, GuestSpec, Station, wait_until};
use pollux_vhost::{Backend, PortConfig, SessionState, SocketError, SocketMode};

#[test]
fn two_frontends_exchange_frames_and_the_status_tells_each_step() {
    let bed = Bed::new(2);
    let status = bed.status(0);
    assert_eq!(status.state, SessionState::Listening);
    assert!(status.missing.expect("nobody").contains("p0.sock"));
    let mut pair = Pair::new(&bed);
    let status = bed.status(1);
    assert_eq!(
        (status.state, status.missing),
        (SessionState::Running, None)
    );
    assert_eq!(
        status.features,
        ["VIRTIO_NET_F_MRG_RXBUF", "VIRTIO_F_VERSION_1"]
    );
    assert_eq!((status.memory.len(), status.rings.len()), (1, 2));
    wait_until("frames go both ways", || {
        pair.exchange();
        pair.arrived() > 10_000
    });
    pair.assert_nothing_lost();
}

#[test]
fn a_second_frontend_is_refused_at_once_and_the_first_goes_on() {
    let bed = Bed::new(2);
    let mut pair = Pair::new(&bed);
    for count in 1..=20 {
        assert!(bed.client(0).is_closed());
        pair.exchange();
        wait_until("it is counted", || bed.status(0).refused == count);
    }
    pair.assert_nothing_lost();
    assert_eq!(bed.status(0).connections, 1);
}

#[test]
fn a_port_waits_for_the_next_frontend_when_one_has_gone() {
    let bed = Bed::new(2);
    let sent_before = {
        let mut pair = Pair::new(&bed);
        wait_until("frames go both ways", || {
            pair.exchange();
            pair.arrived() > 1000
        });
        bed.switch
            .port_counters(&name(0))
            .expect("in the plan")
            .rx_frames
    };
    for port in 0..2 {
        bed.wait_for(port, SessionState::Listening);
    }
    let mut pair = Pair::new(&bed);
    wait_until("frames go both ways", || {
        pair.exchange();
        pair.arrived() > 1000
    });
    pair.assert_nothing_lost();
    let counters = bed.switch.port_counters(&name(0)).expect("in the plan");
    assert!(
        counters.rx_frames > sent_before,
        "the counters of a port stay"
    );
    assert_eq!(bed.status(0).connections, 2);
}

#[test]
fn a_stopped_ring_goes_on_where_it_was() {
    let bed = Bed::new(2);
    let mut pair = Pair::new(&bed);
    let Attached {
        mut client,
        mut station,
    } = {
        // A third station in place of the first: stopped and started often.
        pair.disconnect(0);
        bed.wait_for(0, SessionState::Listening);
        bed.attach(0)
    };
    let mut sent = 0_u16;
    for round in 0..50_u16 {
        let count = round % 7 + 1;
        for _ in 0..count {
            assert!(station.send(EVERYBODY, 64));
        }
        station.publish();
        sent = sent.wrapping_add(count);
        wait_until("they were taken", || {
            station.poll();
            station.in_flight() == 0
        });
        assert_eq!(
            client.stop(1),
            sent,
            "the position in the available ring (B-42)"
        );
        let base = client.stop(0);
        client.start(0, &station.guest.rx_config(), base);
        client.start(1, &station.guest.tx_config(), sent);
    }
    let receiver = &mut pair.0[1];
    wait_until("every frame came once", || {
        receiver.poll();
        receiver.flow(0, EVERYBODY).received == u64::from(sent)
    });
    assert_eq!(receiver.flow(0, EVERYBODY).lost, 0);
}

#[test]
fn a_disabled_ring_is_drained_and_gets_nothing() {
    let bed = Bed::new(2);
    let mut sender = bed.attach(0);
    let mut receiver = Station::new(1, GuestSpec::default());
    let mut client = bed.client(1);
    // With protocol features a started ring is disabled at first.
    client.ok(Req::SET_FEATURES, &longs(&[FEATURES | 1 << 30]), &[]);
    client.share(&receiver.guest);
    client.start(0, &receiver.guest.rx_config(), 0);
    client.start(1, &receiver.guest.tx_config(), 0);
    assert!(
        bed.status(1)
            .missing
            .expect("disabled")
            .contains("SET_VRING_ENABLE")
    );
    let drops = |port: u16, reason| {
        let counters = bed.switch.port_counters(&name(port));
        counters.expect("in the plan").drops.get(reason)
    };
    assert!(receiver.send(0, 64) && sender.station.send(EVERYBODY, 64));
    receiver.publish();
    sender.station.publish();
    wait_until("what it sends comes back and is discarded", || {
        receiver.poll();
        sender.station.poll();
        receiver.in_flight() == 0 && sender.station.in_flight() == 0
    });
    assert_eq!(drops(1, DropReason::QueueDisabled), 1);
    assert_eq!(drops(0, DropReason::NoDestination), 1);
    for ring in 0..2 {
        client.ok(Req::SET_VRING_ENABLE, &words(&[ring, 1]), &[]);
    }
    assert_eq!(bed.status(1).state, SessionState::Running);
    assert!(receiver.send(0, 64) && sender.station.send(EVERYBODY, 64));
    receiver.publish();
    sender.station.publish();
    wait_until("frames arrive", || {
        receiver.poll();
        sender.station.poll();
        receiver.received() == 1 && sender.station.received() == 1
    });
    // And off again, under way.
    for ring in 0..2 {
        client.ok(Req::SET_VRING_ENABLE, &words(&[ring, 0]), &[]);
    }
    assert!(receiver.send(0, 64));
    receiver.publish();
    wait_until("it is discarded", || {
        drops(1, DropReason::QueueDisabled) == 2
    });
}

#[test]
fn a_guest_that_asks_for_calls_gets_them_also_through_a_new_eventfd() {
    let bed = Bed::new(2);
    let mut sender = bed.attach(0);
    let mut receiver = bed.attach(1);
    receiver.station.guest.rx.ring().request_call();
    for _ in 0..10 {
        let call = pollux_sys::EventFd::new().expect("eventfd");
        let fd = call.try_clone().expect("dup").into();
        receiver.client.ok(Req::SET_VRING_CALL, &longs(&[0]), &[fd]);
        let before = receiver.station.received();
        assert!(sender.station.send(EVERYBODY, 64));
        sender.station.publish();
        wait_until("the call comes", || call.drain() > 0);
        wait_until("and the frame", || {
            receiver.station.poll();
            receiver.station.guest.rx.ring().request_call();
            receiver.station.received() > before
        });
        receiver
            .client
            .ok(Req::SET_VRING_CALL, &longs(&[NOFD]), &[]);
    }
}

#[test]
fn memory_can_move_while_frames_flow() {
    let bed = Bed::new(3);
    let mut pair = Pair::new(&bed);
    // The same memory again and again: every ring is relocated, twice a round.
    let mut third = bed.attach(2);
    for _ in 0..200 {
        third.client.share(&third.station.guest);
        assert!(third.station.send(EVERYBODY, 64));
        third.station.publish();
        pair.exchange();
        third.station.poll();
    }
    let (station, pair_stations) = (&mut third.station, &mut pair.0);
    wait_until("every frame of the moved rings arrives, in order", || {
        station.poll();
        pair_stations[0].poll();
        pair_stations[1].poll();
        pair_stations[0].flow(2, EVERYBODY).received == 200
    });
    pair.assert_nothing_lost();
    assert_eq!(bed.status(2).state, SessionState::Running);
}

#[test]
fn client_mode_connects_when_somebody_listens_and_again_after_that() {
    let bed = Bed::new(1);
    let socket = bed.directory.path().join("vm.sock");
    assert!(bed.backend.remove(&name(0)));
    let config = PortConfig {
        socket: socket.clone(),
        mode: SocketMode::Client,
        any_memory: false,
    };
    let port = bed.switch.port(&name(0)).expect("in the plan");
    bed.backend.add(port, config).expect("nothing to refuse");
    wait_until("it says that nobody listens", || {
        let missing = bed.status(0).missing;
        missing.is_some_and(|missing| missing.contains("nobody listens"))
    });
    assert_eq!(bed.status(0).state, SessionState::Connecting);
    for round in 1..=3 {
        // What a frontend that was killed leaves behind is there at times.
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).expect("free");
        let (stream, _) = listener.accept().expect("the backend connects");
        let station = Station::new(0, GuestSpec::default());
        let mut client = Client::of(stream);
        client.attach(&station.guest);
        bed.wait_for(0, SessionState::Running);
        assert_eq!(bed.status(0).connections, round);
        drop((client, listener));
        bed.wait_for(0, SessionState::Connecting);
    }
}

#[test]
fn a_listener_that_accepts_nothing_holds_nobody_up() {
    let bed = Bed::new(3);
    let socket = bed.directory.path().join("hung.sock");
    let listener = UnixListener::bind(&socket).expect("free");
    assert!(bed.backend.remove(&name(2)));
    // Its queue is full: a blocking connect would wait for ever (B-53).
    rustix::net::listen(&listener, 0).expect("a shorter queue");
    let waiting: Vec<_> = (0..2)
        .map_while(|_| {
            let stream = rustix::net::socket_with(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::NONBLOCK,
                None,
            )
            .expect("a socket");
            let address = rustix::net::SocketAddrUnix::new(&socket).expect("short");
            rustix::net::connect(&stream, &address)
                .ok()
                .map(|()| stream)
        })
        .collect();
    assert!(!waiting.is_empty());
    let config = PortConfig {
        socket,
        mode: SocketMode::Client,
        any_memory: false,
    };
    let port = bed.switch.port(&name(2)).expect("in the plan");
    bed.backend.add(port, config).expect("nothing to refuse");
    let mut pair = Pair::new(&bed);
    wait_until("frames go both ways", || {
        pair.exchange();
        pair.arrived() > 10_000
    });
    pair.assert_nothing_lost();
    assert_eq!(bed.status(2).state, SessionState::Connecting);
}

#[test]
fn sockets_that_cannot_be_had_are_refused_with_the_reason() {
    let bed = Bed::new(2);
    let directory = bed.directory.path();
    let config = |path: std::path::PathBuf| PortConfig {
        socket: path,
        mode: SocketMode::Server,
        any_memory: false,
    };
    let port = || bed.switch.port(&name(1)).expect("in the plan");
    assert!(matches!(
        bed.backend.add(port(), bed.config(1)),
        Err(SocketError::ServedAlready { .. })
    ));
    assert!(bed.backend.remove(&name(1)));
    assert!(!bed.backend.remove(&name(1)));
    assert!(!bed.socket(1).exists(), "the file goes with the port");

    let refused = |config: &PortConfig| {
        let checked = Backend::check(config).expect_err("unusable").to_string();
        let added = bed.backend.add(port(), config.clone());
        assert_eq!(added.expect_err("unusable").to_string(), checked);
        assert!(bed.backend.status(&name(1)).is_none());
        checked
    };
    let long = directory.join("x".repeat(108));
    assert!(refused(&config(long)).contains("at most 107"));
    assert!(refused(&bed.config(0)).contains("is taken"));
    let file = directory.join("file");
    std::fs::write(&file, "precious").expect("writable");
    assert!(refused(&config(file.clone())).contains("not a socket"));
    assert_eq!(std::fs::read_to_string(&file).expect("there"), "precious");
    let nowhere = directory.join("missing").join("a.sock");
    assert!(
        Backend::check(&config(nowhere))
            .expect_err("unusable")
            .to_string()
            .contains("directory")
    );

    // A socket on which nobody listens any more is replaced.
    let stale = directory.join("stale.sock");
    drop(UnixListener::bind(&stale).expect("free"));
    assert!(
        std::fs::symlink_metadata(&stale)
            .expect("there")
            .file_type()
            .is_socket()
    );
    Backend::check(&config(stale.clone())).expect("usable");
    bed.backend
        .add(port(), config(stale.clone()))
        .expect("usable");
    UnixStream::connect(&stale).expect("the backend listens");
    // Somebody else's file in its place is not ours to remove.
    std::fs::remove_file(&stale).expect("there");
    std::fs::write(&stale, "other").expect("writable");
    assert!(bed.backend.remove(&name(1)));
    assert!(stale.exists());
}

#[test]
fn a_descriptor_number_above_1023_is_one_like_any_other() {
    let bed = Bed::new(2);
    // select(2) could not name what comes after these (B-50).
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let many = match limit.maximum {
        Some(maximum) if maximum < 2200 => {
            return pollux_testkit::skip(
                "a_descriptor_number_above_1023_is_one_like_any_other",
                "this process may open less than 2200 files",
            );
        }
        maximum => rustix::process::Rlimit {
            current: Some(2200),
            maximum,
        },
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, many).expect("within bounds");
    let fillers: Vec<_> = (0..2000).map(|_| eventfd()).collect();
    assert!(fillers.last().expect("some").as_raw_fd() > 1023);
    let mut pair = Pair::new(&bed);
    wait_until("frames go both ways", || {
        pair.exchange();
        pair.arrived() > 1000
    });
    pair.assert_nothing_lost();
}

#[test]
fn the_err_eventfd_tells_of_a_ring_that_the_guest_broke() {
    let bed = Bed::new(2);
    let mut guest = bed.attach(0);
    let err = pollux_sys::EventFd::new().expect("eventfd");
    let fd = err.try_clone().expect("dup").into();
    guest.client.ok(Req::SET_VRING_ERR, &longs(&[1]), &[fd]);
    // The available index of the TX ring jumps by half of all numbers.
    let addr = guest.station.guest.tx_config().areas.avail_addr + 2;
    let written = guest
        .station
        .guest
        .memory
        .write(addr, &0x8000_u16.to_le_bytes());
    written.expect("in its memory");
    wait_until("the frontend is told", || err.drain() == 1);
    wait_until("and the operator", || {
        let missing = bed.status(0).missing;
        missing.is_some_and(|missing| missing.contains("avail.idx moved"))
    });
    assert_eq!(bed.status(0).state, SessionState::Broken);
}

#[test]
fn a_new_call_eventfd_is_signalled_for_what_was_published_before() {
    let bed = Bed::new(2);
    let mut sender = bed.attach(0);
    let mut receiver = bed.attach(1);
    assert!(sender.station.send(EVERYBODY, 64));
    sender.station.publish();
    wait_until("the frame is in the ring", || {
        let counters = bed.switch.port_counters(&name(1));
        counters.expect("in the plan").tx_frames == 1
    });
    let call = pollux_sys::EventFd::new().expect("eventfd");
    let fd = call.try_clone().expect("dup").into();
    receiver.client.ok(Req::SET_VRING_CALL, &longs(&[0]), &[fd]);
    wait_until("the guest is called without another frame", || {
        call.drain() > 0
    });
}

//! The frontend half against our own backend: guests of this process, real
//! sockets, a switch in between.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use pollux_datapath::{Plan, PortPlan, Switch, SwitchConfig, WorkerPlan};
use pollux_testkit::{GuestSpec, Station, wait_until};
use pollux_vhost::frontend::{Frontend, FrontendOptions, feature_bits};
use pollux_vhost::{Backend, PortConfig, SessionState, SocketMode};
use pollux_virtio::Features;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

const CONNECT_TIME: Duration = Duration::from_secs(10);
const PORTS: [&str; 2] = ["vm1", "vm2"];
const SIZES: [u32; 5] = [60, 64, 65, 1000, 1514];

/// A switch with two ports and their sockets. Fields go in this order.
struct Rig {
    backend: Backend,
    switch: Switch,
    directory: tempfile::TempDir,
}

impl Rig {
    fn new(mode: SocketMode) -> Self {
        let rig = Self {
            backend: Backend::start().unwrap(),
            switch: Switch::new(SwitchConfig::default()).unwrap(),
            directory: tempfile::tempdir().unwrap(),
        };
        let plan = Plan {
            workers: vec![WorkerPlan {
                name: "w0".to_owned(),
                core: None,
            }],
            ports: PORTS.map(PortPlan::new).to_vec(),
            ..Plan::default()
        };
        rig.switch.apply(&plan).unwrap();
        for port in PORTS {
            let config = PortConfig {
                socket: rig.socket(port),
                mode,
                any_memory: false,
            };
            rig.backend
                .add(rig.switch.port(port).unwrap(), config)
                .unwrap();
        }
        rig
    }

    fn socket(&self, port: &str) -> PathBuf {
        self.directory.path().join(format!("{port}.sock"))
    }

    fn connect(&self, port: &str) -> Frontend {
        Frontend::connect(&self.socket(port), CONNECT_TIME).unwrap()
    }

    fn state(&self, port: &str) -> SessionState {
        self.backend.status(port).unwrap().state
    }
}

/// Two attached guests, of which neither has sent anything.
fn pair(rig: &Rig, spec: GuestSpec, options: FrontendOptions) -> [(Station, Frontend); 2] {
    let mut number = 0;
    PORTS.map(|port| {
        number += 1;
        let station = Station::new(number, spec);
        let mut frontend = rig.connect(port);
        frontend.set_options(options);
        frontend.attach(&station.guest).unwrap();
        assert_eq!(rig.state(port), SessionState::Running);
        (station, frontend)
    })
}

/// Sends `rounds` of frames of all sizes both ways and waits until all came.
fn exchange(a: &mut Station, b: &mut Station, rounds: u32) {
    for _ in 0..rounds {
        for bytes in SIZES {
            let numbers = [a.number(), b.number()];
            assert!(a.send(numbers[1], bytes) && b.send(numbers[0], bytes));
            a.publish();
            b.publish();
        }
        wait_until("all frames came", || {
            a.poll();
            b.poll();
            [(&*a, &*b), (&*b, &*a)].iter().all(|(from, to)| {
                let flow = to.flow(from.number(), to.number());
                flow.next() == from.sent_to(to.number()) && from.in_flight() == 0
            })
        });
    }
    for (from, to) in [(&*a, &*b), (&*b, &*a)] {
        assert_eq!(to.flow(from.number(), to.number()).lost, 0);
    }
}

#[test]
fn frames_go_both_ways_whatever_was_negotiated() {
    let rig = Rig::new(SocketMode::Server);
    for bits in 0..32_u32 {
        let [version_1, mergeable, event_idx, in_order, packed] =
            [1, 2, 4, 8, 16].map(|bit| bits & bit != 0);
        let spec = GuestSpec {
            features: Features {
                version_1,
                mergeable,
                event_idx,
                in_order,
                packed,
            },
            // Only a packed ring may have that size.
            ring_size: if packed { 200 } else { 256 },
            base: if packed { 0x8000 } else { 0 },
            ..GuestSpec::default()
        };
        let mut guests = pair(&rig, spec, FrontendOptions::default());
        for (station, frontend) in &guests {
            let agreed = frontend.agreed();
            assert_eq!(agreed.ring_features(), station.guest.features());
            assert_eq!(agreed.protocol, FrontendOptions::default().protocol);
        }
        let [(a, _), (b, _)] = &mut guests;
        exchange(a, b, 20);
        drop(guests);
        wait_until("both ports listen again", || {
            PORTS
                .iter()
                .all(|port| rig.state(port) == SessionState::Listening)
        });
    }
}

#[test]
fn memory_is_shared_as_a_table_and_by_slots() {
    for slots in [false, true] {
        let rig = Rig::new(SocketMode::Server);
        let options = FrontendOptions {
            slots,
            ..FrontendOptions::default()
        };
        let spec = GuestSpec {
            ring_size: 1024,
            regions: 3,
            base: 65_530,
            ..GuestSpec::default()
        };
        let mut guests = pair(&rig, spec, options);
        for port in PORTS {
            let memory = rig.backend.status(port).unwrap().memory;
            assert_eq!(memory.len(), 3, "slots: {slots}");
        }
        let [(a, _), (b, _)] = &mut guests;
        exchange(a, b, 20);
        if slots {
            let [(a, frontend), _] = &mut guests;
            frontend.stop().unwrap();
            frontend.unshare(&a.guest).unwrap();
            assert!(rig.backend.status(PORTS[0]).unwrap().memory.is_empty());
        }
    }
}

#[test]
fn a_stopped_ring_goes_on_where_it_stopped() {
    let split = GuestSpec::default();
    let packed = GuestSpec {
        features: Features {
            packed: true,
            ..split.features
        },
        ring_size: 77,
        base: 0x8000,
        ..split
    };
    for spec in [split, packed] {
        let rig = Rig::new(SocketMode::Server);
        let mut guests = pair(&rig, spec, FrontendOptions::default());
        for _ in 0..15 {
            let [(a, frontend), (b, _)] = &mut guests;
            exchange(a, b, 7);
            let bases = frontend.stop().unwrap();
            assert_eq!(rig.state(PORTS[0]), SessionState::Negotiating);
            assert_eq!(bases.tx, a.guest.tx.ring().avail_idx());
            if !spec.features.packed {
                assert_eq!(u64::from(bases.rx), a.received() % 65_536);
            }
            // It waits in the ring until somebody looks again.
            assert!(a.send(b.number(), 100));
            a.publish();
            frontend.start_at(&a.guest, bases).unwrap();
            assert_eq!(rig.state(PORTS[0]), SessionState::Running);
        }
        let [(a, _), (b, _)] = &mut guests;
        exchange(a, b, 1);
    }
}

#[test]
fn a_disabled_guest_sends_into_nothing_and_receives_nothing() {
    let rig = Rig::new(SocketMode::Server);
    let mut guests = pair(&rig, GuestSpec::default(), FrontendOptions::default());
    let [(a, frontend), (b, _)] = &mut guests;
    exchange(a, b, 1);
    frontend.set_enabled(false).unwrap();
    let (received_a, received_b) = (a.received(), b.received());
    for (from, to) in [(&mut *a, 2), (&mut *b, 1)] {
        assert!(from.send(to, 100));
        from.publish();
    }
    wait_until("the frames were taken", || {
        a.poll();
        b.poll();
        a.in_flight() == 0 && b.in_flight() == 0
    });
    assert_eq!((a.received(), b.received()), (received_a, received_b));
    frontend.set_enabled(true).unwrap();
    assert!(b.send(1, 100));
    b.publish();
    wait_until("a frame came again", || a.poll() > 0);
    assert_eq!(a.flow(2, 1).lost, 1);
}

#[test]
fn without_protocol_features_a_kick_is_enough() {
    let rig = Rig::new(SocketMode::Server);
    let mut number = 0;
    let mut stations = PORTS.map(|port| {
        number += 1;
        let station = Station::new(number, GuestSpec::default());
        let mut frontend = rig.connect(port);
        let agreed = frontend
            .negotiate(feature_bits(station.guest.features()))
            .unwrap();
        assert_eq!(agreed.protocol, VhostUserProtocolFeatures::empty());
        frontend.share(&station.guest).unwrap();
        frontend.start(&station.guest).unwrap();
        // Nothing was acknowledged: the last answer came with no request.
        wait_until("the rings run", || rig.state(port) == SessionState::Running);
        (station, frontend)
    });
    let [(a, _), (b, _)] = &mut stations;
    exchange(a, b, 5);
}

#[test]
fn a_guest_that_asks_for_it_is_called() {
    let rig = Rig::new(SocketMode::Server);
    let options = FrontendOptions {
        calls: true,
        ..FrontendOptions::default()
    };
    let mut guests = pair(&rig, GuestSpec::default(), options);
    let [(a, _), (b, frontend)] = &mut guests;
    wait_until("the ring calls once when it starts", || {
        frontend.take_calls(Frontend::RX) == 1
    });
    exchange(a, b, 1);
    assert_eq!(frontend.take_calls(Frontend::RX), 0, "calls are suppressed");
    assert!(!b.guest.rx.ring().request_call());
    assert!(a.send(2, 100));
    a.publish();
    wait_until("a call came", || frontend.take_calls(Frontend::RX) > 0);
    assert_eq!(b.poll(), 1);
}

#[test]
fn a_frontend_that_listens_is_found() {
    // Client mode: the switch connects, and tries again until somebody listens.
    let rig = Rig::new(SocketMode::Client);
    let mut number = 0;
    let mut guests = PORTS.map(|port| {
        number += 1;
        let listener = UnixListener::bind(rig.socket(port)).unwrap();
        let station = Station::new(number, GuestSpec::default());
        let mut frontend = Frontend::accept(&listener, CONNECT_TIME).unwrap();
        frontend.attach(&station.guest).unwrap();
        (station, frontend, listener)
    });
    let [(a, ..), (b, ..)] = &mut guests;
    exchange(a, b, 5);
}

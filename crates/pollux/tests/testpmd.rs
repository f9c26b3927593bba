//! DPDK guests through `pollux run`: testpmd with virtio-user ports.

mod common;
mod testpmd_bed;

use std::time::Duration;

use pollux_testkit::testpmd::{Testpmd, TestpmdSpec, VirtioUser, mac_text};

use testpmd_bed::{Bed, Mode, TestPorts, wait_until};

/// Frames that show that a way works.
const FRAMES: u64 = 100_000;
/// The same where sender and receivers share a core: while one has it the
/// others stand still, and no more than a ring is delivered each time.
const FRAMES_IN_TURNS: u64 = 20_000;

/// Two ports in one process, and frames that circulate between them: what goes
/// out of one comes into the other.
fn closed_loop(bed: &Bed, ports: &[VirtioUser<'_>; 2], arguments: &[&str]) -> Testpmd {
    let mut spec = TestpmdSpec::virtio_user(ports, "io");
    spec.arguments = arguments;
    let mut testpmd = Testpmd::start(&spec);
    bed.wait_running(&["vm1", "vm2"]);
    testpmd.run("start tx_first 24");
    testpmd
}

/// Frames flow through both ports; then every single one is accounted for.
fn assert_flows_and_adds_up(bed: &Bed, mut testpmd: Testpmd, names: [&str; 2]) {
    let before = names.map(|name| bed.port(name));
    wait_until("frames flow through both ports", || {
        let now = names.map(|name| bed.port(name));
        (0..2).all(|index| now[index].tx > before[index].tx + FRAMES)
    });
    testpmd.run("stop");
    let [first, second] = testpmd.port_stats()[..] else {
        panic!("testpmd has two ports");
    };
    for stats in [first, second] {
        assert_eq!((stats.rx_missed, stats.tx_errors), (0, 0));
    }
    wait_until(
        "what testpmd sent was received, and sent on or dropped",
        || {
            let [a, b] = names.map(|name| bed.port(name));
            a.rx == first.tx_packets
                && b.rx == second.tx_packets
                && b.tx + b.tx_drops == a.rx
                && a.tx + a.tx_drops == b.rx
        },
    );
    for name in names {
        let port = bed.port(name);
        assert_eq!(port.rx_drops, 0, "{name}: {:?}", port.drops);
        // The window of the loop is larger than a ring: a guest that is not
        // scheduled for a while misses frames, and nothing else may happen.
        assert_eq!(
            port.tx_drops,
            port.drop("rx-ring-full"),
            "{name}: {:?}",
            port.drops
        );
    }
    testpmd.quit();
}

/// A path of DPDK's driver (`drivers/net/virtio`: which is used depends on what
/// was negotiated).
struct Variant {
    /// Of the device.
    options: &'static str,
    queue_size: u16,
    arguments: &'static [&'static str],
    /// What of MRG_RXBUF, RING_PACKED and IN_ORDER has to be negotiated.
    negotiated: &'static [&'static str],
}

const fn variant(
    options: &'static str,
    queue_size: u16,
    arguments: &'static [&'static str],
    negotiated: &'static [&'static str],
) -> Variant {
    Variant {
        options,
        queue_size,
        arguments,
        negotiated,
    }
}

const VARIANTS: &[Variant] = &[
    // IN_ORDER is what virtio-user asks for unless told otherwise.
    variant("", 1024, &[], &["MRG_RXBUF", "IN_ORDER"]),
    variant("in_order=0", 1024, &[], &["MRG_RXBUF"]),
    variant("mrg_rxbuf=0", 256, &[], &["IN_ORDER"]),
    variant("mrg_rxbuf=0,in_order=0", 1024, &[], &[]),
    variant("mrg_rxbuf=0,in_order=0,vectorized=1", 1024, &[], &[]),
    variant(
        "packed_vq=1,in_order=0",
        1024,
        &[],
        &["MRG_RXBUF", "RING_PACKED"],
    ),
    variant(
        "packed_vq=1",
        256,
        &[],
        &["MRG_RXBUF", "RING_PACKED", "IN_ORDER"],
    ),
    variant(
        "packed_vq=1,in_order=0,mrg_rxbuf=0",
        256,
        &[],
        &["RING_PACKED"],
    ),
    variant(
        "packed_vq=1,mrg_rxbuf=0",
        1024,
        &[],
        &["RING_PACKED", "IN_ORDER"],
    ),
    variant(
        "packed_vq=1,mrg_rxbuf=0,vectorized=1",
        1024,
        &[],
        &["RING_PACKED", "IN_ORDER"],
    ),
    // Frames of several segments are chains.
    variant("in_order=0", 256, &["--txpkts=64,64"], &["MRG_RXBUF"]),
    variant(
        "packed_vq=1,in_order=0",
        1024,
        &["--txpkts=128,256"],
        &["MRG_RXBUF", "RING_PACKED"],
    ),
    variant("", 1024, &["--txpkts=1518"], &["MRG_RXBUF", "IN_ORDER"]),
    variant(
        "packed_vq=1",
        256,
        &["--txpkts=1518"],
        &["MRG_RXBUF", "RING_PACKED", "IN_ORDER"],
    ),
];

#[test]
fn frames_circulate_between_two_ports_in_every_variant_of_the_driver() {
    let Some(_turn) =
        testpmd_bed::turn("frames_circulate_between_two_ports_in_every_variant_of_the_driver")
    else {
        return;
    };
    for Variant {
        options,
        queue_size,
        arguments,
        negotiated,
    } in VARIANTS
    {
        println!("options \"{options}\", queue_size {queue_size}, {arguments:?}");
        let bed = Bed::new(Mode::Learn, TestPorts::server(2));
        let [a, b] = bed.sockets();
        let port = |socket, station| VirtioUser {
            socket,
            station,
            queue_size: *queue_size,
            options,
        };
        let testpmd = closed_loop(&bed, &[port(&a, 1), port(&b, 2)], arguments);
        for name in ["vm1", "vm2"] {
            let features = bed.port(name).features;
            for feature in ["MRG_RXBUF", "RING_PACKED", "IN_ORDER"] {
                let got = features.iter().any(|name| name == feature);
                assert_eq!(
                    got,
                    negotiated.contains(&feature),
                    "{feature} in {features:?}"
                );
            }
        }
        assert_flows_and_adds_up(&bed, testpmd, ["vm1", "vm2"]);
        bed.wait_state("vm1", "listening");
        bed.stop();
    }
}

#[test]
fn the_order_of_the_ports_does_not_matter_and_macs_can_be_swapped() {
    let Some(_turn) =
        testpmd_bed::turn("the_order_of_the_ports_does_not_matter_and_macs_can_be_swapped")
    else {
        return;
    };
    let bed = Bed::new(Mode::Learn, TestPorts::server(2));
    let [a, b] = bed.sockets();
    let port = |socket, station| VirtioUser {
        socket,
        station,
        queue_size: 256,
        options: "",
    };
    let testpmd = closed_loop(&bed, &[port(&b, 2), port(&a, 1)], &[]);
    assert_flows_and_adds_up(&bed, testpmd, ["vm2", "vm1"]);
    bed.stop();

    // Each port sends back what it received: known unicast both ways.
    let bed = Bed::new(Mode::Learn, TestPorts::server(2));
    let [a, b] = bed.sockets();
    let peers = [
        format!("--eth-peer=0,{}", mac_text(2)),
        format!("--eth-peer=1,{}", mac_text(1)),
    ];
    let arguments = ["--port-topology=loop", &peers[0], &peers[1]];
    let mut spec = TestpmdSpec::virtio_user(&[port(&a, 1), port(&b, 2)], "macswap");
    spec.arguments = &arguments;
    let mut testpmd = Testpmd::start(&spec);
    bed.wait_running(&["vm1", "vm2"]);
    testpmd.run("start tx_first 8");
    assert_flows_and_adds_up(&bed, testpmd, ["vm1", "vm2"]);
    bed.stop();
}

#[test]
fn every_frame_between_two_processes_is_delivered_or_counted() {
    let Some(_turn) =
        testpmd_bed::turn("every_frame_between_two_processes_is_delivered_or_counted")
    else {
        return;
    };
    let bed = Bed::new(Mode::Learn, TestPorts::server(2));
    let [a, b] = bed.sockets();
    let port = |socket, station| VirtioUser {
        socket,
        station,
        queue_size: 1024,
        options: "",
    };
    let mut receiver = Testpmd::start(&TestpmdSpec::virtio_user(&[port(&b, 2)], "rxonly"));
    let mut sender = Testpmd::start(&TestpmdSpec::virtio_user(&[port(&a, 1)], "txonly"));
    bed.wait_running(&["vm1", "vm2"]);
    receiver.run("start");
    sender.run("start");
    wait_until("frames flow", || bed.port("vm2").tx > FRAMES_IN_TURNS);
    sender.run("stop");
    let sent = sender.port_stats()[0].tx_packets;
    wait_until("every frame was received, and sent on or dropped", || {
        let [a, b] = ["vm1", "vm2"].map(|name| bed.port(name));
        a.rx == sent && b.tx + b.tx_drops == sent
    });
    let port = bed.port("vm2");
    assert_eq!(port.tx_drops, port.drop("rx-ring-full"));
    wait_until("the receiver has what it was sent", || {
        receiver.port_stats()[0].rx_packets == port.tx
    });
    assert!(port.tx > FRAMES_IN_TURNS);
    bed.stop();
}

#[test]
fn a_killed_guest_comes_back_and_the_others_lose_nothing() {
    let Some(_turn) = testpmd_bed::turn("a_killed_guest_comes_back_and_the_others_lose_nothing")
    else {
        return;
    };
    let bed = Bed::new(Mode::CrossConnect, TestPorts::server(4));
    let [a, b, c, d] = bed.sockets();
    let port = |socket, station| VirtioUser {
        socket,
        station,
        queue_size: 1024,
        options: "",
    };
    // A window smaller than a ring: nothing can be lost, however late a guest.
    let mut bystander =
        Testpmd::start(&TestpmdSpec::virtio_user(&[port(&a, 1), port(&b, 2)], "io"));
    bed.wait_running(&["vm1", "vm2"]);
    bystander.run("start tx_first 8");
    for _ in 0..4 {
        let spec = TestpmdSpec::virtio_user(&[port(&c, 3), port(&d, 4)], "io");
        let mut victim = Testpmd::start(&spec);
        bed.wait_running(&["vm3", "vm4"]);
        let before = bed.port("vm3").tx;
        victim.run("start tx_first 24");
        wait_until("the victim's frames flow", || {
            bed.port("vm3").tx > before + FRAMES
        });
        victim.kill();
        bed.wait_state("vm3", "listening");
        bed.wait_state("vm4", "listening");
    }
    let before = bed.port("vm1").tx;
    wait_until("the others' frames still flow", || {
        bed.port("vm1").tx > before + FRAMES
    });
    bystander.run("stop");
    let stats = bystander.port_stats();
    for (name, stats) in ["vm1", "vm2"].iter().zip(&stats) {
        wait_until("all of them were received", || {
            bed.port(name).rx == stats.tx_packets
        });
        let port = bed.port(name);
        assert_eq!(port.rx_drops + port.tx_drops, 0, "{name}: {:?}", port.drops);
    }
    bed.stop();
}

#[test]
fn in_client_mode_either_side_can_be_restarted() {
    let Some(_turn) = testpmd_bed::turn("in_client_mode_either_side_can_be_restarted") else {
        return;
    };
    let mut bed = Bed::new(Mode::Learn, TestPorts::client(2));
    let [a, b] = bed.sockets();
    let port = |socket, station| VirtioUser {
        socket,
        station,
        queue_size: 1024,
        options: "server=1",
    };
    let ports = [port(a.as_path(), 1), port(b.as_path(), 2)];
    for _ in 0..2 {
        let testpmd = closed_loop(&bed, &ports, &[]);
        let before = bed.port("vm1").tx;
        wait_until("frames flow", || bed.port("vm1").tx > before + FRAMES);
        testpmd.kill();
        bed.wait_state("vm1", "connecting");
        bed.wait_state("vm2", "connecting");
        // What the killed process left behind.
        for socket in [&a, &b] {
            let _ = std::fs::remove_file(socket);
        }
    }
    let mut testpmd = closed_loop(&bed, &ports, &[]);
    bed.restart();
    bed.wait_running(&["vm1", "vm2"]);
    // What was under way is gone with the rings of the process before.
    std::thread::sleep(Duration::from_millis(200));
    testpmd.run("stop");
    testpmd.run("start tx_first 24");
    wait_until("frames flow again", || bed.port("vm1").tx > FRAMES);
    testpmd.quit();
    bed.stop();
}

#[test]
fn what_one_guest_sends_to_everybody_or_nobody_reaches_all_others() {
    let Some(_turn) =
        testpmd_bed::turn("what_one_guest_sends_to_everybody_or_nobody_reaches_all_others")
    else {
        return;
    };
    for destination in ["ff:ff:ff:ff:ff:ff", &mac_text(0xEE)] {
        println!("destination {destination}");
        assert_is_flooded(destination);
    }
}

/// Frames of one guest to that address reach the two others.
fn assert_is_flooded(destination: &str) {
    let bed = Bed::new(Mode::Learn, TestPorts::server(3));
    let [a, b, c] = bed.sockets();
    let port = |socket, station| VirtioUser {
        socket,
        station,
        queue_size: 1024,
        options: "",
    };
    let spec = TestpmdSpec::virtio_user(&[port(&b, 2), port(&c, 3)], "rxonly");
    let mut receivers = Testpmd::start(&spec);
    let mut spec = TestpmdSpec::virtio_user(&[port(&a, 1)], "txonly");
    let peer = format!("--eth-peer=0,{destination}");
    let arguments = [peer.as_str()];
    spec.arguments = &arguments;
    let mut sender = Testpmd::start(&spec);
    bed.wait_running(&["vm1", "vm2", "vm3"]);
    receivers.run("start");
    sender.run("start");
    wait_until("frames reach both", || {
        bed.port("vm2").tx > FRAMES_IN_TURNS && bed.port("vm3").tx > FRAMES_IN_TURNS
    });
    sender.run("stop");
    let sent = sender.port_stats()[0].tx_packets;
    for (index, name) in ["vm2", "vm3"].into_iter().enumerate() {
        wait_until("each frame was sent to each, or dropped", || {
            let port = bed.port(name);
            port.tx + port.tx_drops == sent
        });
        let port = bed.port(name);
        assert_eq!(
            port.tx_drops,
            port.drop("rx-ring-full"),
            "{name}: {:?}",
            port.drops
        );
        wait_until("the receiver has what it was sent", || {
            receivers.port_stats()[index].rx_packets == port.tx
        });
    }
    assert_eq!(bed.port("vm1").rx, sent);
    assert_eq!(bed.port("vm1").tx, 0, "never back to the sender");
    bed.stop();
}

//! After its start a worker neither allocates nor frees.

mod common;

use common::{BYTES, Bed, attach, config, key, plan, port_name};
use pollux_datapath::{PacketBudget, Plan, SwitchConfig};
use pollux_packet::DropReason;
use pollux_switch::FdbConfig;
use pollux_testkit::{
    CountingAllocator, Device, EVERYBODY, GuestSpec, Random, RawDesc, RawRing, Station, mac_of,
    plain_frame,
};
use pollux_virtio::driver::ChainShape;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Two workers that are watched, and a small FDB so that addresses are evicted.
fn watched_bed(specs: &[GuestSpec]) -> Bed {
    let config = SwitchConfig {
        fdb: FdbConfig {
            capacity: 256,
            ..config().fdb
        },
        thread_start: Some(CountingAllocator::watch_this_thread),
        ..config()
    };
    let ports = u16::try_from(specs.len()).unwrap();
    let bed = Bed::with(config, &plan(ports, 2), specs);
    assert_eq!(CountingAllocator::watched_calls(), 0, "at the start");
    bed
}

fn assert_no_call(when: &str) {
    assert_eq!(CountingAllocator::watched_calls(), 0, "{when}");
}

/// Both halves in one test, since the count is the process's: first that
/// nothing is counted, then that something would have been.
#[test]
fn workers_neither_allocate_nor_free() {
    let narrow = GuestSpec {
        buffer_bytes: 256,
        ..GuestSpec::default()
    };
    let default = GuestSpec::default();
    let mut bed = watched_bed(&[default, default, narrow, default]);
    bed.teach();
    bed.exchange(2000, &[]);
    assert_no_call("after unicast");
    bed.send(0, EVERYBODY, 500);
    bed.send(1, 77, 500);
    assert_no_call("after floods");

    shapes_and_drops(&mut bed);
    assert_no_call("after chains of all kinds");
    addresses(&mut bed);
    assert_no_call("after learning, moves, evictions, ageing");
    full_rings(&mut bed);
    assert_no_call("after full rings");
    changes(&mut bed);
    assert_no_call("after changes of ports and tasks");
    broken_chains(&mut bed);
    assert_no_call("after broken chains");

    // That a worker is watched at all: it frees its task when it ends.
    drop(bed);
    assert!(CountingAllocator::watched_calls() > 0, "nobody was watched");
    let before = CountingAllocator::watched_calls();
    drop(std::hint::black_box(vec![1, 2, 3]));
    assert_eq!(
        CountingAllocator::watched_calls(),
        before,
        "not this thread"
    );
    std::thread::spawn(|| {
        CountingAllocator::watch_this_thread();
        let before = CountingAllocator::watched_calls();
        drop(std::hint::black_box(vec![1, 2, 3]));
        assert_eq!(CountingAllocator::watched_calls(), before + 2);
    })
    .join()
    .unwrap();
}

/// Frames in many pieces into many buffers, and all that is no frame.
fn shapes_and_drops(bed: &mut Bed) {
    let cuts: [&[u32]; 5] = [&[], &[12], &[3, 9, 14], &[12, 14, 100, 0, 1], &[500]];
    for (number, cuts) in (0..).zip(cuts) {
        for indirect in [false, true] {
            let shape = ChainShape { cuts, indirect };
            for bytes in [14, 60, 300, 1500] {
                // Station 2 needs up to six buffers for one.
                let frame = plain_frame(mac_of(2), mac_of(0), bytes, number);
                assert!(bed.station(0).send_frame(&frame, shape));
            }
        }
    }
    bed.station(0).publish();
    bed.settle();
    let lldp = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
    for frame in [
        vec![0; 5],
        plain_frame(mac_of(0), mac_of(0), BYTES, 0),
        plain_frame(lldp, mac_of(0), BYTES, 0),
    ] {
        assert!(bed.station(0).send_frame(&frame, ChainShape::JOINED));
    }
    bed.station(0).publish();
    bed.settle();
    assert!(bed.counters(0).rx_drops() >= 3);
}

fn addresses(bed: &mut Bed) {
    let mut random = Random::new(3);
    for round in 0..40_u16 {
        for _ in 0..50 {
            let [a, b, ..] = random.bits().to_le_bytes();
            // Two stations take them from each other.
            let from = u16::from(random.one_in(2));
            let frame = plain_frame(mac_of(from), [2, 2, 2, 2, a, b & 3], BYTES, 0);
            bed.station(from).send_frame(&frame, ChainShape::JOINED);
            bed.station(from).publish();
        }
        bed.switch.advance_seconds(round);
        if round % 10 == 0 {
            bed.switch.fdb().flush_all();
        }
        bed.settle();
    }
    let stats = bed.switch.fdb().stats();
    assert!(
        stats.moved > 0 && stats.evicted + stats.refused > 0,
        "{stats:?}"
    );
    assert!(stats.aged > 0, "{stats:?}");
    bed.teach_again();
}

impl Bed {
    fn teach_again(&mut self) {
        self.switch.fdb().flush_all();
        self.teach();
    }
}

/// Station 3 does not receive.
fn full_rings(bed: &mut Bed) {
    bed.exchange_while(&[3], |bed| {
        while bed.station(0).sent_to(3) < 2000 && bed.station(0).send(3, BYTES) {}
        bed.station(0).sent_to(3) < 2000
    });
    assert!(bed.drops(3, DropReason::RxRingFull) > 0);
    bed.settle();
}

/// Ports come and go 50 times, queues change workers, budgets change.
fn changes(bed: &mut Bed) {
    let planned = bed.switch.plan();
    let device = Device::of(&bed.station(3).guest);
    let mut changed = 0_u32;
    bed.exchange_while(&[3], |bed| {
        let station = bed.station(2);
        while station.in_flight() < 32 && station.send(3, BYTES) {}
        let mut plan: Plan = planned.clone();
        if changed.is_multiple_of(2) {
            plan.ports.truncate(3);
        }
        plan.ports[0].worker = Some(format!("w{}", changed % 2));
        plan.ports[1].budget.packets = PacketBudget::Units(1 + changed);
        bed.switch.apply(&plan).unwrap();
        if !changed.is_multiple_of(2) {
            attach(&bed.switch, 3, &device);
        }
        changed += 1;
        changed < 100
    });
    bed.switch.apply(&planned).unwrap();
    assert!(bed.switch.port(&port_name(3)).is_some());
    assert_eq!(bed.switch.fdb().lookup(key(0)).map(|id| id.0), Some(0));
}

/// Chains that cannot be followed, and then an index that breaks the ring.
fn broken_chains(bed: &mut Bed) {
    let station: &Station = bed.station(2);
    let tx = station.guest.tx_config();
    let memory = std::sync::Arc::clone(&station.guest.memory);
    let position = RawRing::new(std::sync::Arc::clone(&memory), tx.areas, 0).used_idx();
    let mut ring = RawRing::new(memory, tx.areas, position);
    let before = bed.drops(2, DropReason::BadChain);
    let chains = [
        RawDesc::readable(0, 100),
        RawDesc::readable(tx.buffers_addr, 1).then(1),
        RawDesc::readable(tx.buffers_addr, 1).then(9999),
        RawDesc::indirect(tx.buffers_addr, 17),
        RawDesc::indirect(tx.buffers_addr, 0),
        RawDesc::writable(tx.buffers_addr, 100),
    ];
    for (index, desc) in (0..).zip(chains) {
        ring.set_desc(index, desc);
        ring.offer(index);
    }
    ring.publish();
    pollux_testkit::wait_until("the chains come back", || {
        ring.used_idx() == ring.position()
    });
    pollux_testkit::wait_until("they are counted", || {
        bed.drops(2, DropReason::BadChain) == before + 6
    });
    ring.set_avail_idx(ring.position().wrapping_add(1000));
    let port = bed.switch.port(&port_name(2)).unwrap();
    pollux_testkit::wait_until("the ring is broken", || {
        matches!(port.rx_state(), pollux_datapath::QueueState::Broken(_))
    });
    bed.exchange(3000, &[2, 3]);
}

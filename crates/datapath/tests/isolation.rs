//! A guest that lies, sleeps, or loses its memory harms itself alone. In every
//! test stations 0 and 1 are the neighbours that must not notice.

mod common;

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{BYTES, Bed, attach, config, events, key, plan, port_name};
use pollux_datapath::{PacketBudget, Plan, QueueState, SwitchConfig};
use pollux_packet::DropReason;
use pollux_switch::FdbConfig;
use pollux_testkit::{
    Device, EVERYBODY, GUEST_BASE, GuestSpec, Random, RawDesc, RawRing, Station, mac_of,
    plain_frame, wait_until,
};
use pollux_virtio::driver::{ChainShape, NetConfig};

/// Number of the station that misbehaves.
const BAD: u16 = 2;
const BAD_PORT: &str = "p2";

/// Stations 0 and 1 and the bad one, on one worker.
fn bed(spec: GuestSpec) -> Bed {
    let default = GuestSpec::default();
    let mut bed = Bed::with(config(), &plan(3, 1), &[default, default, spec]);
    // Not before: the test before this one may have been running.
    events::begin();
    bed.teach();
    bed
}

/// Keeps the pair busy until the queues are reported, and then for several
/// periods of housekeeping: they must not be reported again.
fn exchange_until_reported(bed: &mut Bed, queues: &[&str]) {
    bed.exchange_while(&[BAD], |_| {
        queues
            .iter()
            .any(|queue| events::faults(BAD_PORT, queue).is_empty())
    });
    let end = Instant::now() + Duration::from_millis(60);
    bed.exchange_while(&[BAD], |_| Instant::now() < end);
}

/// The queue says why it is broken, and that was reported once.
fn assert_broken(queue: &str, state: &QueueState, reason: &str) {
    assert!(
        matches!(state, QueueState::Broken(fault) if fault.contains(reason)),
        "{queue}: {state:?}"
    );
    let reported = events::faults(BAD_PORT, queue);
    assert!(
        matches!(&reported[..], [fault] if fault.contains(reason)),
        "{queue}: {reported:?}"
    );
}

/// B-38: the file is cut at `cut`, and everything behind is gone.
fn truncate(cut: impl Fn(&NetConfig, &NetConfig) -> u64) {
    let mut bed = bed(GuestSpec {
        // One and a half pages: a frame can be cut in two.
        buffer_bytes: 6144,
        ..GuestSpec::default()
    });
    let bad = bed.switch.port(BAD_PORT).unwrap();
    // Frames wait in its ring, so that the worker reads what is cut.
    let queue = bad.stop_rx().unwrap();
    for number in 0..40 {
        let frame = plain_frame(mac_of(0), mac_of(BAD), 6000, number);
        let sent = bed.station(BAD).send_frame(&frame, ChainShape::JOINED);
        assert!(sent);
    }
    bed.station(BAD).publish();
    let guest = &bed.station(BAD).guest;
    let at = cut(&guest.tx_config(), &guest.rx_config()) - GUEST_BASE;
    let file: File = guest.file.try_clone().unwrap().into();
    file.set_len(at).unwrap();
    bad.start_rx(queue).unwrap();

    let is_broken = |state| matches!(state, QueueState::Broken(_));
    bed.exchange_while(&[BAD], |bed| {
        let from = bed.station(0);
        if from.in_flight() < 100 {
            from.send(BAD, BYTES);
        }
        !(is_broken(bad.rx_state()) && is_broken(bad.tx_state()))
    });
    let before = bed.counters(BAD);
    bed.send_to_bad(10);
    exchange_until_reported(&mut bed, &["rx", "tx"]);
    for (queue, state) in [("rx", bad.rx_state()), ("tx", bad.tx_state())] {
        assert_broken(queue, &state, "guest memory was truncated");
    }
    let after = bed.counters(BAD);
    assert_eq!(after.rx_frames, before.rx_frames, "nothing more is taken");
    let down = |counters: &pollux_datapath::PortCounters| counters.drops.get(DropReason::PortDown);
    assert_eq!(down(&after), down(&before) + 10);

    // A new guest takes its place.
    bed.stations[usize::from(BAD)] = Station::new(BAD, GuestSpec::default());
    attach(
        &bed.switch,
        BAD,
        &Device::of(&bed.stations[usize::from(BAD)].guest),
    );
    assert_eq!(bad.rx_state(), QueueState::Running);
    assert_eq!(bad.tx_state(), QueueState::Running);
    bed.station(BAD).send(0, BYTES);
    bed.station(BAD).publish();
    let sent = bed.station(0).sent_to(BAD);
    bed.station(0).send(BAD, BYTES);
    bed.station(0).publish();
    wait_until("the new guest talks", || {
        bed.poll();
        let arrived = bed.stations[usize::from(BAD)].flow(0, BAD);
        arrived.next() == sent + 1 && bed.stations[0].flow(BAD, 0).received > 0
    });
}

impl Bed {
    /// Frames from station 0 to the bad one, of which nobody cares.
    fn send_to_bad(&mut self, count: u64) {
        for _ in 0..count {
            assert!(self.station(0).send(BAD, BYTES));
        }
        self.station(0).publish();
    }
}

#[test]
fn memory_is_cut_under_the_tx_ring() {
    truncate(|tx, _| tx.areas.desc_addr);
}

#[test]
fn memory_is_cut_under_the_tx_used_ring() {
    truncate(|tx, _| tx.areas.used_addr);
}

#[test]
fn memory_is_cut_under_the_tx_buffers() {
    truncate(|tx, _| tx.buffers_addr);
}

#[test]
fn memory_is_cut_in_the_middle_of_a_frame() {
    truncate(|tx, _| tx.buffers_addr + 4096);
}

#[test]
fn memory_is_cut_in_the_middle_of_a_receive_buffer() {
    truncate(|_, rx| rx.buffers_addr + 4096);
}

#[test]
fn memory_is_cut_under_the_rx_ring() {
    truncate(|_, rx| rx.areas.desc_addr);
}

#[test]
fn memory_is_cut_under_the_rx_used_ring() {
    truncate(|_, rx| rx.areas.used_addr);
}

#[test]
fn memory_is_cut_under_the_rx_buffers() {
    truncate(|_, rx| rx.buffers_addr);
}

/// B-59: A to B and A to C one to one, C posts nothing.
#[test]
fn a_guest_without_buffers_costs_others_nothing() {
    let stations = (0..3).map(|number| match number {
        BAD => Station::without_buffers(number, GuestSpec::default()),
        _ => Station::new(number, GuestSpec::default()),
    });
    let mut bed = Bed::of_stations(config(), &plan(3, 1), stations.collect());
    bed.station(BAD).send(EVERYBODY, BYTES);
    bed.station(BAD).publish();
    bed.exchange(100, &[BAD]);
    assert!(bed.switch.fdb().lookup(key(BAD)).is_some());
    let full = |bed: &Bed| bed.drops(BAD, DropReason::RxRingFull);
    let before = full(&bed);
    bed.exchange_while(&[BAD], |bed| {
        // A to C as much as A to B, and now and then to all.
        let sent = bed.station(0).sent_to(1);
        while bed.station(0).sent_to(BAD) < sent && bed.station(0).send(BAD, BYTES) {}
        if bed.station(1).in_flight() < 100 {
            bed.station(1).send(EVERYBODY, BYTES);
        }
        bed.exchanged() < 5000
    });
    let (direct, to_all) = (
        bed.station(0).sent_to(BAD),
        bed.station(1).sent_to(EVERYBODY),
    );
    assert!(direct > 1000 && to_all > 0);
    assert_eq!(full(&bed), before + direct + to_all);
    assert_eq!(bed.counters(BAD).tx_frames, 0);
    assert_eq!(bed.stations[0].flow(1, EVERYBODY).received, to_all);
    assert_eq!(
        bed.switch.port(BAD_PORT).unwrap().tx_state(),
        QueueState::Running
    );
}

/// B-56: each frame needs 76 buffers of one byte.
#[test]
fn a_guest_with_buffers_of_one_byte_costs_others_nothing() {
    let stations = (0..3).map(|number| match number {
        BAD => Station::without_buffers(number, GuestSpec::default()),
        _ => Station::new(number, GuestSpec::default()),
    });
    let mut bed = Bed::of_stations(config(), &plan(3, 1), stations.collect());
    bed.station(BAD).send(EVERYBODY, BYTES);
    bed.station(BAD).publish();
    bed.exchange(100, &[BAD]);
    let before = bed.drops(BAD, DropReason::RxRingFull);
    bed.exchange_while(&[BAD], |bed| {
        let sent = bed.station(0).sent_to(1);
        while bed.station(0).sent_to(BAD) < sent && bed.station(0).send(BAD, BYTES) {}
        let bad = &mut bed.station(BAD).guest.rx;
        while bad.post(1, ChainShape::JOINED).is_ok() {}
        bad.publish();
        bad.receive(u32::MAX, |_| {}).unwrap();
        bed.exchanged() < 5000
    });
    let counters = bed.counters(BAD);
    let full = counters.drops.get(DropReason::RxRingFull) - before;
    assert!(counters.tx_frames > 0, "some frames fit: {counters:?}");
    assert_eq!(counters.tx_frames + full, bed.station(0).sent_to(BAD));
}

/// A guest whose ring is full of chains at every moment, written by hand.
struct Flood {
    ring: RawRing,
    heads: Vec<u16>,
}

impl Flood {
    fn new(station: &Station, heads: Vec<u16>) -> Self {
        let guest = &station.guest;
        let areas = guest.tx_config().areas;
        let position = RawRing::new(Arc::clone(&guest.memory), areas, 0).used_idx();
        Self {
            ring: RawRing::new(Arc::clone(&guest.memory), areas, position),
            heads,
        }
    }

    /// Offers everything again that came back.
    fn refill(&mut self) {
        let used = self.ring.used_idx();
        let size = self.ring.size();
        while self.ring.position().wrapping_sub(used) < size {
            let index = usize::from(self.ring.position()) % self.heads.len();
            self.ring.offer(self.heads[index]);
        }
        self.ring.publish();
    }

    fn is_empty(&self) -> bool {
        self.ring.position() == self.ring.used_idx()
    }
}

/// The bad guest's budget in the test below, in work units.
const UNITS: u32 = 64;

/// A flood of chains which the worker takes `per_turn` of at most. Returns by
/// what reasons they were dropped.
fn flood(per_turn: u64, reason: DropReason, chains: impl FnOnce(&Station) -> Flood) {
    let mut plan = plan(3, 1);
    plan.ports[usize::from(BAD)].budget.packets = PacketBudget::Units(UNITS);
    let mut bed = Bed::with(config(), &plan, &[GuestSpec::default(); 3]);
    bed.teach();
    let mut flood = chains(bed.station(BAD));
    let worker = |bed: &Bed| bed.switch.worker_counters("w0").unwrap().worker;
    let (before, taken_before) = (worker(&bed), bed.counters(BAD).rx_frames);
    bed.exchange_while(&[BAD], |bed| {
        flood.refill();
        let full = bed.counters(BAD).rx_frames - taken_before < 1000;
        full || bed.exchanged() < 2000
    });
    wait_until("every chain came back", || flood.is_empty());
    bed.turns();
    let counted = worker(&bed).since(&before);
    let counters = bed.counters(BAD);
    let taken = counters.rx_frames - taken_before;
    assert!(counted.exhausted > 0, "{counted:?}");
    assert!(
        taken <= (counted.turns + 1) * per_turn,
        "{taken} chains in {counted:?}"
    );
    assert_eq!(counters.drops.get(reason), taken);
    assert_eq!(
        bed.switch.port(BAD_PORT).unwrap().rx_state(),
        QueueState::Running
    );
    bed.assert_identities();
}

#[test]
fn a_flood_of_looped_chains_spends_its_own_budget() {
    // A walk around the whole ring is worth more than the budget.
    flood(1, DropReason::BadChain, |station| {
        let flood = Flood::new(station, (0..256).collect());
        let addr = station.guest.tx_config().buffers_addr;
        for index in 0..flood.ring.size() {
            flood
                .ring
                .set_desc(index, RawDesc::readable(addr, 1).then(index));
        }
        flood
    });
}

#[test]
fn a_flood_of_chains_outside_memory_spends_its_own_budget() {
    flood(u64::from(UNITS), DropReason::BadChain, |station| {
        let flood = Flood::new(station, (0..256).collect());
        for index in 0..flood.ring.size() {
            let desc = match index % 4 {
                0 => RawDesc::readable(0, 100),
                1 => RawDesc::readable(u64::MAX - 10, 100),
                2 => RawDesc::indirect(GUEST_BASE, 17),
                _ => RawDesc::writable(GUEST_BASE, 100),
            };
            flood.ring.set_desc(index, desc);
        }
        flood
    });
}

#[test]
fn a_flood_of_runts_spends_its_own_budget() {
    flood(u64::from(UNITS), DropReason::Runt, |station| {
        let flood = Flood::new(station, (0..256).collect());
        let addr = station.guest.tx_config().buffers_addr;
        for (index, len) in (0..flood.ring.size()).zip((0..26).cycle()) {
            flood.ring.set_desc(index, RawDesc::readable(addr, len));
        }
        flood
    });
}

/// Sound frames, in as many pieces as a ring can hold.
#[test]
fn a_flood_of_longest_chains_spends_its_own_budget() {
    flood(1, DropReason::SamePort, |station| {
        let mut flood = Flood::new(station, vec![0]);
        let addr = station.guest.tx_config().buffers_addr;
        // To itself, so that it is not flooded to the pair.
        let frame = plain_frame(station.mac(), station.mac(), 1000, 1);
        flood.ring.write(addr, &[0; 12]);
        flood.ring.write(addr + 12, &frame);
        let size = flood.ring.size();
        let pieces = (0..size).map(|index| RawDesc::readable(addr + 3 * u64::from(index), 3));
        flood.ring.offer_chain(0, &pieces.collect::<Vec<_>>());
        flood
    });
}

/// B-68: one port invents addresses.
#[test]
fn a_flood_of_addresses_leaves_others_unicast() {
    let config = SwitchConfig {
        fdb: FdbConfig {
            capacity: 512,
            ..config().fdb
        },
        ..config()
    };
    let plan: Plan = plan(3, 1);
    let mut bed = Bed::with(config, &plan, &[GuestSpec::default(); 3]);
    bed.teach();
    let flooded = [0, 1].map(|station| bed.counters(station).flooded);
    let mut random = Random::new(68);
    let mut invented = 0;
    bed.exchange_while(&[], |bed| {
        while bed.station(BAD).in_flight() < 64 {
            let [a, b, c, d, ..] = random.bits().to_le_bytes();
            // To itself: what it does to the table is the question here.
            let frame = plain_frame(mac_of(BAD), [2, 1, a, b, c, d], BYTES, 0);
            assert!(bed.station(BAD).send_frame(&frame, ChainShape::JOINED));
            invented += 1;
        }
        bed.station(BAD).publish();
        invented < 20_000
    });
    for station in [0, 1] {
        assert_eq!(
            bed.switch.fdb().lookup(key(station)).map(|id| id.0),
            Some(station)
        );
        assert_eq!(
            bed.counters(station).flooded,
            flooded[usize::from(station)],
            "of {invented} addresses"
        );
    }
    let stats = bed.switch.fdb().stats();
    let bad = bed.switch.port(BAD_PORT).unwrap().identity().id();
    assert!(stats.learned > 1000, "{stats:?}");
    assert!(stats.refused + stats.evicted > 10_000, "{stats:?}");
    assert!(bed.switch.fdb().port_learned_entries(bad) <= bed.switch.fdb().port_limit());
}

#[test]
fn a_wild_tx_index_breaks_that_queue_alone() {
    let mut bed = bed(GuestSpec::default());
    let bad = bed.switch.port(BAD_PORT).unwrap();
    let flood = Flood::new(bed.station(BAD), vec![0]);
    let position = flood.ring.position();
    flood.ring.set_avail_idx(position.wrapping_add(257));
    bed.exchange_while(&[BAD], |_| bad.rx_state() == QueueState::Running);
    exchange_until_reported(&mut bed, &["rx"]);
    assert_broken("rx", &bad.rx_state(), "avail.idx moved");
    assert_eq!(bad.tx_state(), QueueState::Running);
    assert_eq!(events::faults(BAD_PORT, "tx").len(), 0);

    // It can still receive, and be repaired.
    bed.send_to_bad(10);
    wait_until("its receive ring goes on", || {
        bed.poll();
        bed.stations[usize::from(BAD)].flow(0, BAD).received == 10
    });
    flood.ring.set_avail_idx(position);
    let device = Device::of(&bed.station(BAD).guest);
    attach(&bed.switch, BAD, &device);
    bed.send(BAD, 0, 10);
    assert_eq!(bad.rx_state(), QueueState::Running);

    // Broken again, it is reported again.
    let position = Flood::new(bed.station(BAD), vec![0]).ring.position();
    flood.ring.set_avail_idx(position.wrapping_sub(1));
    bed.exchange_while(&[BAD], |_| events::faults(BAD_PORT, "rx").len() < 2);
    exchange_until_reported(&mut bed, &["rx"]);
    assert_eq!(events::faults(BAD_PORT, "rx").len(), 2);
}

#[test]
fn a_head_outside_the_table_breaks_that_queue_alone() {
    let mut bed = bed(GuestSpec::default());
    let bad = bed.switch.port(BAD_PORT).unwrap();
    let mut flood = Flood::new(bed.station(BAD), vec![256]);
    flood.refill();
    bed.exchange_while(&[BAD], |_| bad.rx_state() == QueueState::Running);
    exchange_until_reported(&mut bed, &["rx"]);
    assert_broken("rx", &bad.rx_state(), "head 256 is outside");
}

#[test]
fn a_wild_rx_index_breaks_that_queue_alone() {
    let mut bed = bed(GuestSpec::default());
    let bad = bed.switch.port(BAD_PORT).unwrap();
    let guest = &bed.station(BAD).guest;
    let ring = RawRing::new(Arc::clone(&guest.memory), guest.rx_config().areas, 0);
    let posted = bed.station(BAD).guest.rx.ring().avail_idx();
    ring.set_avail_idx(posted.wrapping_add(300));
    // Known buffers may be filled first.
    bed.exchange_while(&[BAD], |bed| {
        if bed.station(0).in_flight() < 100 {
            bed.station(0).send(BAD, BYTES);
        }
        bad.tx_state() == QueueState::Running
    });
    exchange_until_reported(&mut bed, &["tx"]);
    assert_broken("tx", &bad.tx_state(), "avail.idx moved");
    assert_eq!(bad.rx_state(), QueueState::Running);
    assert_eq!(events::faults(BAD_PORT, "rx").len(), 0);
    let down = bed.drops(BAD, DropReason::PortDown);
    assert!(down > 0);

    // It can still send.
    assert!(bed.station(BAD).send(1, BYTES));
    bed.station(BAD).publish();
    wait_until("its transmit ring goes on", || {
        bed.stations[1].poll();
        bed.stations[1].flow(BAD, 1).received == 1
    });
    assert_eq!(port_name(BAD), BAD_PORT);
}

/// Copies of flooded frames are work: a guest that broadcasts gets as many
/// frames into a visit as their copies leave of its budget, and no frame is
/// lost or doubled by being cut off the burst.
#[test]
fn b56_floods_end_a_visit_by_their_copies() {
    let mut plan = plan(9, 1);
    plan.ports[0].budget.packets = PacketBudget::Units(64);
    let mut bed = Bed::with(config(), &plan, &[GuestSpec::default(); 9]);
    bed.teach();
    let before = bed.worker(0);
    let stopped = bed.switch.port("p0").unwrap().stop_rx().unwrap();
    for _ in 0..64 {
        assert!(bed.station(0).send(EVERYBODY, BYTES));
    }
    bed.station(0).publish();
    bed.switch.port("p0").unwrap().start_rx(stopped).unwrap();
    bed.settle();
    // 8 copies of a frame: 8 frames are 64 units.
    let after = bed.worker(0).since(&before);
    assert_eq!((after.frames, after.batches, after.visits), (64, 8, 8));
    for station in 1..9 {
        assert_eq!(bed.counters(station).tx_drops(), 0);
    }
    assert_eq!(bed.counters(0).rx_drops(), 0);
}

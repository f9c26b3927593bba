//! Guests with packed rings that harm themselves alone; what no layout changes is
//! in `isolation.rs`. Stations 0 and 1 are the neighbours that must not notice.

mod common;

use common::{BYTES, Bed, config, events, plan, port_name};
use pollux_datapath::{PacketBudget, Plan, QueueState};
use pollux_packet::DropReason;
use pollux_testkit::{
    EVERYBODY, GUEST_BASE, GuestSpec, RawDesc, RawQueue, Station, plain_frame, wait_until,
};
use pollux_virtio::Features;
use pollux_virtio::driver::ChainShape;

/// Number of the station that misbehaves.
const BAD: u16 = 2;
/// The bad guest's budget, in work units.
const UNITS: u32 = 64;
const RING_SIZE: u16 = 256;

/// Both orders of returns.
fn specs() -> [GuestSpec; 2] {
    [false, true].map(|in_order| GuestSpec {
        ring_size: RING_SIZE,
        features: Features {
            packed: true,
            in_order,
            ..Features::MODERN
        },
        base: 0x8000,
        ..GuestSpec::default()
    })
}

/// Stations 0 and 1 and a bad one with packed rings, on one worker.
fn bed(plan: &Plan, bad: Station) -> Bed {
    let mut bed = Bed::with(config(), plan, &[GuestSpec::default(); 3]);
    bed.teach();
    // From here on the address is that of a guest with other rings.
    let (tx, rx) = bad.guest.device();
    let port = bed.switch.port(&port_name(BAD)).expect("in the plan");
    port.start_tx(Box::new(rx)).expect("in the plan");
    port.start_rx(Box::new(tx)).expect("in the plan");
    bed.stations[usize::from(BAD)] = bad;
    bed
}

/// Chains of so many descriptors, of which the ring is always full.
struct Flood<F> {
    ring: RawQueue,
    chain: F,
    len: u16,
    out: u16,
    next: u16,
}

impl<F: Fn(u16) -> Vec<RawDesc>> Flood<F> {
    fn reclaim(&mut self) {
        let returned = self.ring.take_used();
        for used in &returned {
            assert_eq!(used.len, 0, "nothing is written to a TX chain");
        }
        self.out -= u16::try_from(returned.len()).expect("no more than are out");
    }

    /// Offers a chain for each that came back.
    fn refill(&mut self) {
        self.reclaim();
        let room = self.ring.size() / self.len;
        while self.out < room {
            let chain = (self.chain)(self.next);
            assert_eq!(chain.len(), usize::from(self.len));
            self.ring.offer_as_it_is(self.next, &chain);
            self.next = (self.next + 1) % room;
            self.out += 1;
        }
        self.ring.publish();
    }
}

/// A flood of chains, of which the worker takes `per_turn` at most. `chain` gets
/// the address of a buffer and the buffer id.
fn flood(per_turn: u64, reason: DropReason, len: u16, chain: fn(u64, u16) -> Vec<RawDesc>) {
    for spec in specs() {
        let mut plan = plan(3, 1);
        plan.ports[usize::from(BAD)].budget.packets = PacketBudget::Units(UNITS);
        let mut bed = bed(&plan, Station::new(BAD, spec));
        let guest = &bed.station(BAD).guest;
        let config = guest.tx_config();
        let ring = RawQueue::new(&guest.memory, &config);
        // To itself, so that it is not flooded to the pair.
        let mac = bed.station(BAD).mac();
        ring.write(config.buffers_addr, &[0; 12]);
        ring.write(config.buffers_addr + 12, &plain_frame(mac, mac, 1000, 1));
        let mut flood = Flood {
            ring,
            chain: |id| chain(config.buffers_addr, id),
            len,
            out: 0,
            next: 0,
        };
        let (before, taken_before) = (bed.worker(0), bed.counters(BAD));
        bed.exchange_while(&[BAD], |bed| {
            flood.refill();
            let taken = bed.counters(BAD).rx_frames - taken_before.rx_frames;
            taken < 500 || bed.exchanged() < 2000
        });
        wait_until("every chain came back", || {
            flood.reclaim();
            flood.out == 0
        });
        bed.turns();
        let counted = bed.worker(0).since(&before);
        let counters = bed.counters(BAD);
        let taken = counters.rx_frames - taken_before.rx_frames;
        assert!(counted.exhausted > 0, "{counted:?}");
        assert!(
            taken <= (counted.turns + 1) * per_turn,
            "{taken} chains in {counted:?}"
        );
        let dropped = counters.drops.get(reason) - taken_before.drops.get(reason);
        assert_eq!(dropped, taken);
        let port = bed.switch.port(&port_name(BAD)).expect("in the plan");
        assert_eq!(port.rx_state(), QueueState::Running);
        bed.assert_identities();
    }
}

/// B-11: where the next chain would start cannot be known.
#[test]
fn b11_a_chain_that_does_not_end_breaks_that_queue_alone() {
    for spec in specs() {
        let mut bed = bed(&plan(3, 1), Station::new(BAD, spec));
        events::begin();
        let guest = &bed.station(BAD).guest;
        let mut ring = RawQueue::new(&guest.memory, &guest.tx_config());
        let desc = RawDesc::default().then(0);
        ring.offer_as_it_is(0, &vec![desc; usize::from(RING_SIZE)]);
        ring.publish();
        bed.exchange_while(&[BAD], |bed| {
            events::faults(&port_name(BAD), "rx").is_empty() || bed.exchanged() < 2000
        });
        let port = bed.switch.port(&port_name(BAD)).expect("in the plan");
        let state = port.rx_state();
        assert!(
            matches!(&state, QueueState::Broken(fault) if fault.contains("does not end")),
            "{state:?}"
        );
        assert_eq!(events::faults(&port_name(BAD), "rx").len(), 1);
        assert_eq!(port.tx_state(), QueueState::Running);
    }
}

#[test]
fn b56_longest_bad_chains() {
    // A walk around the whole ring is worth more than the budget.
    flood(1, DropReason::BadChain, RING_SIZE, |addr, id| {
        let desc = RawDesc::readable(addr, 1).then(id);
        let mut chain = vec![desc; usize::from(RING_SIZE) - 1];
        chain.push(RawDesc {
            next: id,
            ..RawDesc::readable(0, 1)
        });
        chain
    });
}

#[test]
fn b56_chains_outside_memory() {
    flood(UNITS.into(), DropReason::BadChain, 1, |_, id| {
        let desc = match id % 4 {
            0 => RawDesc::readable(0, 100),
            1 => RawDesc::readable(u64::MAX - 10, 100),
            2 => RawDesc::indirect(GUEST_BASE, 17),
            _ => RawDesc::writable(GUEST_BASE, 100),
        };
        vec![RawDesc { next: id, ..desc }]
    });
}

#[test]
fn b56_runts() {
    flood(UNITS.into(), DropReason::Runt, 1, |addr, id| {
        let desc = RawDesc::readable(addr, u32::from(id) % 26);
        vec![RawDesc { next: id, ..desc }]
    });
}

/// Sound frames, in as many pieces as the ring can hold.
#[test]
fn b56_longest_chains() {
    flood(1, DropReason::SamePort, RING_SIZE, |addr, id| {
        let piece = |index: u16| {
            let addr = addr + 3 * u64::from(index);
            RawDesc::readable(addr, 3).then(id)
        };
        let mut chain: Vec<_> = (0..RING_SIZE).map(piece).collect();
        chain[usize::from(RING_SIZE) - 1].flags = pollux_virtio::DescFlags::default();
        chain
    });
}

/// B-56 and B-59: no buffers, or buffers of one byte of which each frame needs
/// 76; broadcasts come too.
#[test]
fn b59_a_packed_guest_without_room_costs_others_nothing() {
    for (spec, posts) in specs().into_iter().flat_map(|s| [(s, false), (s, true)]) {
        let mut bed = bed(&plan(3, 1), Station::without_buffers(BAD, spec));
        let before = bed.counters(BAD);
        let (direct_before, all_before) = (
            bed.station(0).sent_to(BAD),
            bed.station(1).sent_to(EVERYBODY),
        );
        bed.exchange_while(&[BAD], |bed| {
            let sent = bed.station(0).sent_to(1);
            while bed.station(0).sent_to(BAD) < sent && bed.station(0).send(BAD, BYTES) {}
            if bed.station(1).in_flight() < 100 {
                bed.station(1).send(EVERYBODY, BYTES);
            }
            let bad = &mut bed.station(BAD).guest.rx;
            while posts && bad.post(1, ChainShape::JOINED).is_ok() {}
            bad.publish();
            bad.receive(u32::MAX, |_| {}).expect("what was posted");
            bed.exchanged() < 3000
        });
        let direct = bed.station(0).sent_to(BAD) - direct_before;
        let to_all = bed.station(1).sent_to(EVERYBODY) - all_before;
        assert!(direct > 1000 && to_all > 0);
        let after = bed.counters(BAD);
        let full = after.drops.get(DropReason::RxRingFull);
        let full = full - before.drops.get(DropReason::RxRingFull);
        let delivered = after.tx_frames - before.tx_frames;
        assert_eq!(full + delivered, direct + to_all);
        assert_eq!(delivered > 0, posts);
        let port = bed.switch.port(&port_name(BAD)).expect("in the plan");
        assert_eq!(port.tx_state(), QueueState::Running);
    }
}

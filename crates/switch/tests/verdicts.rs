//! Batches through [`Forwarding::classify`].

use std::collections::HashMap;
use std::sync::Arc;

use pollux_packet::{BATCH_MAX, DropReason, FrameSet};
use pollux_switch::{
    Fdb, FdbConfig, Forwarding, ForwardingConfig, ForwardingError, MacVlan, Memo, Mode, PortId,
    PortRef, Verdicts,
};
use proptest::prelude::*;

const BROADCAST: [u8; 6] = [0xff; 6];

fn mac(number: u16) -> [u8; 6] {
    let [high, low] = number.to_be_bytes();
    [0x02, 0, 0, 0, high, low]
}

fn frame(dst: [u8; 6], src: [u8; 6]) -> Vec<u8> {
    [&dst[..], &src, &[8, 0], &[0; 46]].concat()
}

fn tagged(dst: [u8; 6], src: [u8; 6], tpid: [u8; 2], vid: u16) -> Vec<u8> {
    [&dst[..], &src, &tpid, &vid.to_be_bytes(), &[8, 0], &[0; 42]].concat()
}

/// A switch with 80 ports of which the first `members_len` are members.
struct Bench {
    fdb: Arc<Fdb>,
    ports: Vec<PortRef>,
    forwarding: Forwarding,
    verdicts: Verdicts,
    memo: Memo,
    tick: u16,
}

impl Bench {
    fn new(members_len: u16, mode: Mode, forward_bpdu: bool) -> Self {
        let fdb = Arc::new(Fdb::new(FdbConfig {
            max_ports: 80,
            seed: 7,
            ..FdbConfig::default()
        }));
        let open = |id| fdb.open_port(PortId(id)).expect("in range");
        let ports = (0..80).map(open).collect();
        let forwarding = Forwarding::new(ForwardingConfig {
            mode,
            fdb: Arc::clone(&fdb),
            members: (0..members_len).map(PortId).collect(),
            forward_bpdu,
        })
        .expect("valid");
        Self {
            fdb,
            ports,
            forwarding,
            verdicts: Verdicts::new(),
            memo: Memo::new(),
            tick: 0,
        }
    }

    fn learning(members_len: u16) -> Self {
        Self::new(members_len, Mode::Learn, false)
    }

    /// Frames from port 0.
    fn send(&mut self, frames: &[Vec<u8>]) {
        let heads = frames.iter().map(Vec::as_slice);
        self.forwarding.classify(
            self.ports[0],
            &mut self.memo,
            self.tick,
            heads,
            &mut self.verdicts,
        );
    }

    fn learn(&self, key: MacVlan, port: u16) {
        self.fdb
            .learn(key, self.ports[usize::from(port)], self.tick);
    }

    fn groups(&self) -> Vec<(u16, u64)> {
        let groups = self.verdicts.groups().iter();
        groups.map(|g| (g.port.0, g.frames.bits())).collect()
    }

    fn drops(&self) -> Vec<(DropReason, u64)> {
        let drops = self.verdicts.drops();
        drops.map(|(reason, set)| (reason, set.bits())).collect()
    }

    fn egress(&self) -> Vec<(u16, u64)> {
        let mut egress = Vec::new();
        self.verdicts
            .for_each_egress(PortId(0), self.forwarding.members(), |port, set| {
                egress.push((port.0, set.bits()));
            });
        egress
    }

    /// Every frame has exactly one fate, and every copy a port of its own.
    fn assert_accounts(&self) {
        let verdicts = &self.verdicts;
        let mut fates: Vec<_> = verdicts.groups().iter().map(|group| group.frames).collect();
        fates.push(verdicts.flood());
        fates.extend(verdicts.drops().map(|(_, frames)| frames));
        let sum: u32 = fates.iter().map(|frames| frames.count()).sum();
        let all = fates
            .iter()
            .fold(FrameSet::EMPTY, |all, &set| all.union(set));
        assert_eq!(all, verdicts.frames());
        assert_eq!(sum, verdicts.frames().count());
        let egress = self.egress();
        assert!(egress.iter().all(|&(port, set)| port != 0 && set != 0));
        let mut ports: Vec<_> = egress.iter().map(|&(port, _)| port).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), egress.len());
    }
}

#[test]
fn unknown_is_flooded_then_known_is_unicast() {
    let mut bench = Bench::learning(4);
    let frames = [frame(mac(2), mac(1)), frame(mac(2), mac(1))];
    bench.send(&frames);
    assert_eq!(bench.verdicts.flood().bits(), 0b11);
    assert_eq!(bench.egress(), [(1, 0b11), (2, 0b11), (3, 0b11)]);
    assert_eq!(bench.fdb.lookup(MacVlan::new(mac(1), 0)), Some(PortId(0)));
    bench.learn(MacVlan::new(mac(2), 0), 3);
    // A miss is not remembered, though the FDB's generation is the same.
    bench.send(&frames);
    assert_eq!(bench.groups(), [(3, 0b11)]);
    assert_eq!(bench.egress(), [(3, 0b11)]);
    bench.assert_accounts();
}

#[test]
fn flooded_and_unicast_frames_of_a_port_are_one_set_in_order() {
    let mut bench = Bench::learning(3);
    bench.learn(MacVlan::new(mac(2), 0), 2);
    bench.send(&[
        frame(mac(2), mac(1)),
        frame(BROADCAST, mac(1)),
        frame(mac(9), mac(1)),
        frame(mac(2), mac(1)),
        frame([0x33, 0x33, 0, 0, 0, 1], mac(1)),
    ]);
    assert_eq!(bench.groups(), [(2, 0b01001)]);
    assert_eq!(bench.verdicts.flood().bits(), 0b10110);
    assert_eq!(bench.egress(), [(1, 0b10110), (2, 0b11111)]);
    bench.assert_accounts();
}

#[test]
fn sixty_four_destinations_in_one_batch() {
    let mut bench = Bench::learning(70);
    let frames: Vec<_> = (1..=64).map(|n| frame(mac(n), mac(1000))).collect();
    for n in 1..=64 {
        bench.learn(MacVlan::new(mac(n), 0), n);
    }
    bench.send(&frames);
    let expected: Vec<_> = (1..=64_u16).map(|n| (n, 1_u64 << (n - 1))).collect();
    assert_eq!(bench.groups(), expected);
    bench.assert_accounts();
    // The same ones two by two, in an order that alternates.
    let frames: Vec<_> = (0..64).map(|n| frame(mac(n % 32 + 1), mac(1000))).collect();
    bench.send(&frames);
    assert_eq!(bench.groups().len(), 32);
    assert_eq!(bench.groups()[0], (1, 1 << 32 | 1));
    bench.assert_accounts();
}

#[test]
#[should_panic(expected = "at most 64 frames")]
fn more_than_a_batch_is_the_callers_fault() {
    let mut bench = Bench::learning(2);
    bench.send(&vec![frame(mac(2), mac(1)); BATCH_MAX + 1]);
}

#[test]
fn vlans_are_separate() {
    let mut bench = Bench::learning(4);
    for tpid in [[0x81, 0x00], [0x88, 0xa8]] {
        bench.learn(MacVlan::new(mac(2), 5), 1);
        bench.learn(MacVlan::new(mac(2), 6), 2);
        bench.send(&[
            tagged(mac(2), mac(1), tpid, 5),
            tagged(mac(2), mac(1), tpid, 6),
            tagged(mac(2), mac(1), tpid, 0xe005),
            tagged(mac(2), mac(1), tpid, 7),
            frame(mac(2), mac(1)),
        ]);
        assert_eq!(bench.groups(), [(1, 0b00101), (2, 0b00010)]);
        assert_eq!(bench.verdicts.flood().bits(), 0b11000);
        bench.assert_accounts();
    }
    // The source was learned in each VLAN, and only in those.
    for vid in [0, 5, 6, 7] {
        let port = bench.fdb.lookup(MacVlan::new(mac(1), vid));
        assert_eq!(port, Some(PortId(0)), "VLAN {vid}");
    }
    assert_eq!(bench.fdb.lookup(MacVlan::new(mac(1), 8)), None);
}

#[test]
fn b71_a_frame_never_goes_back() {
    let mut bench = Bench::learning(3);
    bench.send(&[frame(mac(2), mac(1)), frame(mac(1), mac(3))]);
    assert_eq!(bench.drops(), [(DropReason::SamePort, 0b10)]);
    // Also from the memo.
    bench.send(&[frame(mac(1), mac(3))]);
    assert_eq!(bench.drops(), [(DropReason::SamePort, 1)]);
    bench.assert_accounts();
}

#[test]
fn reserved_addresses() {
    let reserved = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
    let frames = [frame(reserved, mac(1)), frame(BROADCAST, mac(1))];
    let mut bench = Bench::learning(2);
    bench.send(&frames);
    assert_eq!(bench.drops(), [(DropReason::ReservedMulticast, 1)]);
    assert_eq!(bench.verdicts.flood().bits(), 0b10);
    let mut bench = Bench::new(2, Mode::Learn, true);
    bench.send(&frames);
    assert_eq!(bench.verdicts.flood().bits(), 0b11);
    let mut bench = Bench::new(2, Mode::CrossConnect(vec![(PortId(0), PortId(1))]), false);
    bench.send(&frames);
    assert_eq!(bench.groups(), [(1, 0b11)]);
}

#[test]
fn group_and_zero_sources_are_forwarded_but_not_learned() {
    let mut bench = Bench::learning(2);
    bench.send(&[frame(mac(2), BROADCAST), frame(mac(2), [0; 6])]);
    assert_eq!(bench.verdicts.flood().bits(), 0b11);
    assert_eq!(bench.fdb.stats().learned_entries, 0);
    bench.send(&[frame([0; 6], mac(1))]);
    assert_eq!(bench.verdicts.flood().bits(), 1);
}

#[test]
fn a_switch_with_no_other_port() {
    let mut bench = Bench::learning(1);
    bench.send(&[frame(mac(2), mac(1)), frame(BROADCAST, mac(1))]);
    assert_eq!(bench.drops(), [(DropReason::NoDestination, 0b11)]);
    bench.assert_accounts();
}

#[test]
fn b30_runts_in_the_middle_of_a_batch() {
    let mut bench = Bench::learning(3);
    bench.learn(MacVlan::new(mac(2), 0), 1);
    let good = frame(mac(2), mac(1));
    let runt = good[..13].to_vec();
    bench.send(&[good.clone(), runt.clone(), Vec::new(), good[..14].to_vec()]);
    assert_eq!(bench.groups(), [(1, 0b1001)]);
    assert_eq!(bench.drops(), [(DropReason::Runt, 0b0110)]);
    bench.assert_accounts();
    let mut bench = Bench::new(2, Mode::CrossConnect(vec![(PortId(1), PortId(0))]), false);
    bench.send(&[good, runt]);
    assert_eq!(bench.groups(), [(1, 0b01)]);
    assert_eq!(bench.drops(), [(DropReason::Runt, 0b10)]);
    bench.assert_accounts();
}

#[test]
fn cross_connects() {
    let pair = |a, b| (PortId(a), PortId(b));
    // Port 9 is no member: its peer has none.
    let mut bench = Bench::new(4, Mode::CrossConnect(vec![pair(0, 9), pair(1, 2)]), false);
    bench.send(&[frame(mac(2), mac(1))]);
    assert_eq!(bench.drops(), [(DropReason::NoDestination, 1)]);
    assert_eq!(bench.forwarding.peer(PortId(2)), Some(PortId(1)));
    assert_eq!(bench.forwarding.peer(PortId(3)), None);
    assert_eq!(bench.fdb.stats().learned_entries, 0, "wires do not learn");
    for pairs in [vec![pair(1, 1)], vec![pair(1, 2), pair(3, 1)]] {
        let config = ForwardingConfig {
            mode: Mode::CrossConnect(pairs),
            fdb: Arc::clone(&bench.fdb),
            members: vec![],
            forward_bpdu: false,
        };
        let error = Forwarding::new(config).expect_err("twice");
        assert_eq!(error, ForwardingError::PairedTwice(PortId(1)));
    }
}

#[test]
fn a_source_is_learned_again_after_flush_removal_and_every_tick() {
    let mut bench = Bench::learning(3);
    let source = MacVlan::new(mac(1), 0);
    let frames = [frame(mac(2), mac(1))];
    bench.send(&frames);
    bench.fdb.flush_port(bench.ports[0]);
    assert_eq!(bench.fdb.lookup(source), None);
    bench.send(&frames);
    assert_eq!(bench.fdb.lookup(source), Some(PortId(0)));
    assert!(bench.fdb.remove(source));
    bench.send(&frames);
    assert_eq!(bench.fdb.lookup(source), Some(PortId(0)));
    bench.tick = 9;
    bench.send(&frames);
    let entry = bench.fdb.entry(source, 10).expect("there");
    assert_eq!(entry.age_seconds, 1);
}

#[test]
fn a_memo_does_not_outlive_its_port() {
    let mut bench = Bench::learning(3);
    bench.learn(MacVlan::new(mac(2), 0), 1);
    let frames = [frame(mac(2), mac(1))];
    bench.send(&frames);
    assert_eq!(bench.groups(), [(1, 1)]);
    assert!(bench.fdb.close_port(bench.ports[1]));
    bench.send(&frames);
    assert_eq!(bench.groups(), []);
    // The queue is given to another port: what is "same port" changed.
    let mut bench = Bench::learning(3);
    bench.send(&[frame(mac(1), mac(1))]);
    assert_eq!(bench.drops(), [(DropReason::SamePort, 1)]);
    bench.ports.swap(0, 2);
    bench.learn(MacVlan::new(mac(1), 0), 2);
    bench.send(&[frame(mac(1), mac(3))]);
    assert_eq!(bench.groups(), [(0, 1)]);
}

#[derive(Clone, Debug)]
enum Step {
    Batch(Vec<u16>),
    Learn(u16, u16),
    Remove(u16),
    Flush(u16),
    Tick,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Few keys and long runs, so that memos matter.
    let runs = proptest::collection::vec((0..6_u16, 1..6_usize), 0..20).prop_map(|runs| {
        let keys = runs.into_iter().flat_map(|(key, len)| vec![key; len]);
        Step::Batch(keys.take(BATCH_MAX).collect())
    });
    let step = prop_oneof![
        4 => runs,
        2 => (0..6_u16, 0..4_u16).prop_map(|(key, port)| Step::Learn(key, port)),
        1 => (0..6_u16).prop_map(Step::Remove),
        1 => (0..4_u16).prop_map(Step::Flush),
        1 => Just(Step::Tick),
    ];
    proptest::collection::vec(step, 1..80)
}

proptest! {
    /// Batches over one memo give what asking a map for every frame gives.
    #[test]
    fn model_of_batches(steps in steps()) {
        let mut bench = Bench::learning(3);
        let mut model: HashMap<u16, u16> = HashMap::new();
        let key = |number| MacVlan::new(mac(number), 0);
        for step in steps {
            match step {
                Step::Batch(keys) => {
                    let frames: Vec<_> = keys.iter().map(|&k| frame(mac(k), mac(100))).collect();
                    bench.send(&frames);
                    bench.assert_accounts();
                    let (mut flood, mut same) = (0_u64, 0_u64);
                    let mut groups: Vec<(u16, u64)> = Vec::new();
                    for (index, number) in keys.iter().enumerate() {
                        let bit = 1_u64 << index;
                        match model.get(number) {
                            None => flood |= bit,
                            Some(0) => same |= bit,
                            Some(&port) => match groups.iter_mut().find(|g| g.0 == port) {
                                Some(group) => group.1 |= bit,
                                None => groups.push((port, bit)),
                            },
                        }
                    }
                    prop_assert_eq!(bench.groups(), groups);
                    prop_assert_eq!(bench.verdicts.flood().bits(), flood);
                    prop_assert_eq!(bench.verdicts.dropped().bits(), same);
                }
                Step::Learn(number, port) => {
                    // Moves are held back after two in a tick.
                    bench.tick += 1;
                    bench.learn(key(number), port);
                    model.insert(number, port);
                }
                Step::Remove(number) => {
                    prop_assert_eq!(bench.fdb.remove(key(number)), model.remove(&number).is_some());
                }
                Step::Flush(port) => {
                    bench.fdb.flush_port(bench.ports[usize::from(port)]);
                    model.retain(|_, on| *on != port);
                }
                Step::Tick => bench.tick += 1,
            }
        }
    }

    /// Whatever a guest sends, every frame gets a verdict and none a panic.
    #[test]
    fn arbitrary_bytes(
        batches in proptest::collection::vec(
            proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..24), 0..=64),
            1..4,
        ),
        wire: bool,
    ) {
        let mode = if wire {
            Mode::CrossConnect(vec![(PortId(0), PortId(1))])
        } else {
            Mode::Learn
        };
        let mut bench = Bench::new(3, mode, false);
        for frames in &batches {
            bench.send(frames);
            bench.assert_accounts();
            let runts = frames.iter().filter(|frame| frame.len() < 14).count();
            let runts_len = bench.verdicts.drops()
                .find(|(reason, _)| *reason == DropReason::Runt)
                .map_or(0, |(_, set)| set.count());
            prop_assert_eq!(runts_len, u32::try_from(runts).expect("64 at most"));
        }
    }
}

//! The FDB against a plain map: as long as the table is not full, every
//! outcome, lookup, entry and count is the map's.

use std::collections::HashMap;

use pollux_switch::{
    Fdb, FdbConfig, FdbError, LearnOutcome, MOVES_PER_TICK_MAX, MacVlan, PortId, PortRef,
};
use proptest::prelude::*;

const PORTS_LEN: u16 = 4;
const KEYS_LEN: u16 = 24;
const AGEING_SECONDS: u64 = 300;
/// Longest time without ageing that the table allows.
const AGE_EVERY_SECONDS: u64 = 700;

#[derive(Clone, Debug)]
enum Op {
    /// The time is that of a worker which is up to 2 seconds late.
    Learn {
        key: u16,
        port: u16,
        late: u64,
    },
    Pass {
        seconds: u64,
    },
    Age,
    FlushPort {
        port: u16,
    },
    FlushAll,
    Open {
        port: u16,
    },
    Close {
        port: u16,
    },
    AddStatic {
        key: u16,
        port: u16,
    },
    Remove {
        key: u16,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (key, port) = (0..KEYS_LEN, 0..PORTS_LEN);
    let op = prop_oneof![
        30 => (key.clone(), port.clone(), 0..3_u64)
            .prop_map(|(key, port, late)| Op::Learn { key, port, late }),
        6 => (0..400_u64).prop_map(|seconds| Op::Pass { seconds }),
        4 => Just(Op::Pass { seconds: 1 }),
        4 => Just(Op::Age),
        2 => port.clone().prop_map(|port| Op::FlushPort { port }),
        1 => Just(Op::FlushAll),
        1 => port.clone().prop_map(|port| Op::Open { port }),
        1 => port.clone().prop_map(|port| Op::Close { port }),
        3 => (key.clone(), port).prop_map(|(key, port)| Op::AddStatic { key, port }),
        3 => key.prop_map(|key| Op::Remove { key }),
    ];
    proptest::collection::vec(op, 1..300)
}

/// A third of the addresses is there in two VLANs; one is a group address,
/// one is zero.
fn key(number: u16) -> MacVlan {
    let [high, low] = (number / 2 * 2).to_be_bytes();
    match number {
        0 => MacVlan::new([0; 6], 5),
        1 => MacVlan::new([0x33, 0x33, 0, 0, 0, 1], 0),
        _ if number < KEYS_LEN / 3 => MacVlan::new([2, 0, 0, 0, high, low], number % 2),
        _ => MacVlan::new([2, 0, 0, 1, 0, number.to_be_bytes()[1]], 0),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Known {
    port: u16,
    time: u64,
    moves: u8,
    is_static: bool,
}

struct Model {
    time: u64,
    aged: u64,
    entries: HashMap<MacVlan, Known>,
    /// For each port number the valid reference, and an outdated one.
    refs: Vec<Option<PortRef>>,
    stale: Vec<Option<PortRef>>,
}

fn tick(time: u64) -> u16 {
    u16::try_from(time % 65_536).expect("16 bits")
}

impl Model {
    fn learn(&mut self, key: MacVlan, port: u16, time: u64) -> LearnOutcome {
        if key.is_group() || key.is_zero_mac() || self.refs[usize::from(port)].is_none() {
            return LearnOutcome::Ignored;
        }
        let fresh = Known {
            port,
            time,
            moves: 0,
            is_static: false,
        };
        let Some(known) = self.entries.get_mut(&key) else {
            self.entries.insert(key, fresh);
            return LearnOutcome::Learned;
        };
        if known.is_static {
            return LearnOutcome::Static;
        }
        let newer = time > known.time;
        if known.port == port {
            if newer {
                *known = fresh;
                return LearnOutcome::Refreshed;
            }
            return LearnOutcome::Known;
        }
        if newer {
            (known.time, known.moves) = (time, 0);
        } else if known.moves == MOVES_PER_TICK_MAX {
            return LearnOutcome::MoveHeld;
        }
        let from = PortId(known.port);
        known.port = port;
        known.moves += 1;
        LearnOutcome::Moved { from }
    }

    fn age(&mut self) -> usize {
        let before = self.entries.len();
        let time = self.time;
        self.entries.retain(|_, known| {
            known.is_static || time.saturating_sub(known.time) <= AGEING_SECONDS
        });
        self.aged = time;
        before - self.entries.len()
    }

    fn void(&mut self, port: u16, static_too: bool) {
        self.entries
            .retain(|_, known| known.port != port || (known.is_static && !static_too));
    }
}

/// Does `op` to both. A closed port is tried with the reference of its last life.
fn apply(fdb: &Fdb, model: &mut Model, op: &Op) -> Result<(), TestCaseError> {
    match *op {
        Op::Learn { key: k, port, late } => {
            let index = usize::from(port);
            let time = model.time - late;
            let Some(port_ref) = model.refs[index].or(model.stale[index]) else {
                return Ok(());
            };
            let expected = model.learn(key(k), port, time);
            prop_assert_eq!(fdb.learn(key(k), port_ref, tick(time)), expected);
        }
        Op::Pass { seconds } => {
            model.time += seconds;
            if model.time - model.aged > AGE_EVERY_SECONDS {
                prop_assert_eq!(fdb.age(tick(model.time)), model.age());
            }
        }
        Op::Age => prop_assert_eq!(fdb.age(tick(model.time)), model.age()),
        Op::FlushPort { port } => {
            if let Some(port_ref) = model.refs[usize::from(port)] {
                prop_assert!(fdb.flush_port(port_ref));
                model.void(port, false);
            }
        }
        Op::FlushAll => {
            fdb.flush_all();
            model.entries.retain(|_, known| known.is_static);
        }
        Op::Open { port } => {
            let old = model.refs[usize::from(port)];
            model.stale[usize::from(port)] = old.or(model.stale[usize::from(port)]);
            model.refs[usize::from(port)] = Some(fdb.open_port(PortId(port)).expect("in range"));
            model.void(port, true);
        }
        Op::Close { port } => {
            let index = usize::from(port);
            if let Some(old) = model.refs[index].take() {
                prop_assert!(fdb.close_port(old));
                prop_assert!(!fdb.close_port(old));
                model.stale[index] = Some(old);
                model.void(port, true);
            }
        }
        Op::AddStatic { key: k, port } => {
            let (k, index) = (key(k), usize::from(port));
            let Some(port_ref) = model.refs[index].or(model.stale[index]) else {
                return Ok(());
            };
            let expected = if k.is_group() || k.is_zero_mac() {
                Err(FdbError::NotAnAddress(k))
            } else if model.refs[index].is_none() {
                Err(FdbError::PortStale(PortId(port)))
            } else {
                let known = Known {
                    port,
                    time: 0,
                    moves: 0,
                    is_static: true,
                };
                model.entries.insert(k, known);
                Ok(())
            };
            prop_assert_eq!(fdb.add_static(k, port_ref), expected);
        }
        Op::Remove { key: k } => {
            let was_there = model.entries.remove(&key(k)).is_some();
            prop_assert_eq!(fdb.remove(key(k)), was_there);
        }
    }
    Ok(())
}

fn compare(fdb: &Fdb, model: &Model) -> Result<(), TestCaseError> {
    for number in 0..KEYS_LEN {
        let expected = model.entries.get(&key(number)).map(|k| PortId(k.port));
        prop_assert_eq!(fdb.lookup(key(number)), expected);
    }
    let mut entries_len = 0;
    for entry in fdb.entries(tick(model.time)) {
        entries_len += 1;
        let known = model.entries[&entry.key];
        let age = if known.is_static {
            0
        } else {
            model.time.saturating_sub(known.time)
        };
        prop_assert_eq!(entry.port, PortId(known.port));
        prop_assert_eq!(entry.is_static, known.is_static);
        prop_assert_eq!(u64::from(entry.age_seconds), age);
        prop_assert_eq!(fdb.entry(entry.key, tick(model.time)), Some(entry));
    }
    prop_assert_eq!(entries_len, model.entries.len());
    for port in 0..PORTS_LEN {
        let count = |is_static| {
            let of_port = |k: &&Known| k.port == port && k.is_static == is_static;
            model.entries.values().filter(of_port).count()
        };
        let (learned, fixed) = (
            fdb.port_learned_entries(PortId(port)),
            fdb.port_static_entries(PortId(port)),
        );
        prop_assert_eq!(learned, count(false) as u64);
        prop_assert_eq!(fixed, count(true) as u64);
    }
    Ok(())
}

proptest! {
    #[test]
    fn like_a_map_while_not_full(ops in ops(), start in 65_000..66_000_u64, seed: u64) {
        let fdb = Fdb::new(FdbConfig {
            capacity: 2048,
            ageing_seconds: 300,
            max_ports: PORTS_LEN,
            port_limit: None,
            seed,
        });
        let open = |port| fdb.open_port(PortId(port)).expect("in range");
        let mut model = Model {
            time: start,
            aged: start,
            entries: HashMap::new(),
            refs: (0..PORTS_LEN).map(|port| Some(open(port))).collect(),
            stale: vec![None; usize::from(PORTS_LEN)],
        };
        for op in &ops {
            let before: Vec<_> = (0..KEYS_LEN).map(|n| fdb.lookup(key(n))).collect();
            let generation = fdb.generation();
            apply(&fdb, &mut model, op)?;
            compare(&fdb, &model)?;
            // What a memo would hold is wrong only in a new generation.
            let stale = (0..KEYS_LEN)
                .zip(before)
                .any(|(n, was)| was.is_some() && fdb.lookup(key(n)) != was);
            prop_assert!(!stale || fdb.generation() != generation, "{op:?}");
        }
        let stats = fdb.stats();
        prop_assert_eq!(
            stats.learned_entries + stats.static_entries,
            model.entries.len() as u64
        );
        prop_assert_eq!((stats.evicted, stats.refused, stats.busy), (0, 0, 0));
    }
}

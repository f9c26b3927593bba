//! Faults of other switches (BUGS.md section 4) that must not be ours, and the
//! table under concurrent use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;

use pollux_switch::{
    Fdb, FdbConfig, FdbError, Forwarding, ForwardingConfig, LearnOutcome, MOVES_PER_TICK_MAX,
    MacVlan, Memo, Mode, PortId, PortRef, Verdicts,
};

fn key(number: u32) -> MacVlan {
    let [a, b, c, d] = number.to_be_bytes();
    MacVlan::new([0x02, 0, a, b, c, d], 0)
}

fn frame(dst: MacVlan, src: MacVlan) -> Vec<u8> {
    [&dst.mac()[..], &src.mac(), &[8, 0]].concat()
}

fn table(config: FdbConfig) -> (Arc<Fdb>, [PortRef; 4]) {
    let fdb = Fdb::new(FdbConfig {
        max_ports: 4,
        seed: 0x0dd5_eed5,
        ..config
    });
    let ports = [0, 1, 2, 3].map(|id| fdb.open_port(PortId(id)).expect("in range"));
    (Arc::new(fdb), ports)
}

/// Ends the loops of other threads, also if this one panics.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Counts are exactly what is in the table.
fn assert_counts(fdb: &Fdb) {
    let (mut learned, mut fixed) = ([0_u64; 4], [0_u64; 4]);
    for entry in fdb.entries(0) {
        let counts = if entry.is_static {
            &mut fixed
        } else {
            &mut learned
        };
        counts[entry.port.index()] += 1;
    }
    for id in 0..4_u16 {
        let port = PortId(id);
        assert_eq!(
            fdb.port_learned_entries(port),
            learned[port.index()],
            "port {id}"
        );
        assert_eq!(
            fdb.port_static_entries(port),
            fixed[port.index()],
            "port {id}"
        );
    }
    let stats = fdb.stats();
    assert_eq!(stats.learned_entries, learned.iter().sum::<u64>());
    assert_eq!(stats.static_entries, fixed.iter().sum::<u64>());
}

#[test]
fn b67_a_static_entry_does_not_stop_ageing() {
    let (fdb, [a, ..]) = table(FdbConfig::default());
    fdb.add_static(key(0), a).expect("room");
    for number in 1..=100 {
        assert_eq!(fdb.learn(key(number), a, 0), LearnOutcome::Learned);
    }
    assert_eq!(fdb.age(300), 0, "not longer than the ageing time");
    assert_eq!(fdb.age(301), 100);
    let left: Vec<_> = fdb.entries(301).collect();
    assert_eq!(left.len(), 1);
    assert!(left[0].is_static && left[0].key == key(0));
    assert_eq!(fdb.stats().aged, 100);
    assert_counts(&fdb);
}

/// Port A sends 100,000 source addresses; B and C, who were there before or
/// come when the table is full, stay unicast to each other.
fn mac_flood(config: FdbConfig, late: bool) {
    let (fdb, [a, b, c, _]) = table(config);
    let forwarding = Forwarding::new(ForwardingConfig {
        mode: Mode::Learn,
        fdb: Arc::clone(&fdb),
        members: vec![PortId(0), PortId(1), PortId(2)],
        forward_bpdu: false,
    })
    .expect("learning");
    let (mut memo_a, mut memo_b, mut memo_c) = (Memo::new(), Memo::new(), Memo::new());
    let mut verdicts = Verdicts::new();
    let mut send = |source, memo: &mut Memo, frames: &[Vec<u8>], tick| {
        let heads = frames.iter().map(Vec::as_slice);
        forwarding.classify(source, memo, tick, heads, &mut verdicts);
        verdicts.groups().to_vec()
    };
    let (of_b, of_c) = (0xb000_0000, 0xc000_0000);
    let batch = |dst, src| {
        (0..32)
            .map(|n| frame(key(dst + n), key(src + n)))
            .collect::<Vec<_>>()
    };
    let (to_b, to_c) = (batch(of_b, of_c), batch(of_c, of_b));
    let batches_len = 100_000 / 64 + 1;
    for number in 0..batches_len {
        // 1,000 addresses in each second.
        let tick = u16::try_from(number / 16).expect("short");
        let flood: Vec<_> = (0..64)
            .map(|n| frame(key(of_b), key(number * 64 + n)))
            .collect();
        send(a, &mut memo_a, &flood, tick);
        if late && number < batches_len / 2 {
            continue;
        }
        send(b, &mut memo_b, &to_c, tick);
        send(c, &mut memo_c, &to_b, tick);
        // From the second time on.
        let groups = send(b, &mut memo_b, &to_c, tick);
        assert_eq!(groups.len(), 1, "batch {number}");
        assert_eq!((groups[0].port, groups[0].frames.count()), (PortId(2), 32));
        let groups = send(c, &mut memo_c, &to_b, tick);
        assert_eq!((groups[0].port, groups[0].frames.count()), (PortId(1), 32));
    }
    assert!(fdb.port_learned_entries(PortId(0)) <= fdb.port_limit());
    assert!(fdb.stats().evicted > 1000);
    assert_counts(&fdb);
}

#[test]
fn b68_a_flood_of_addresses_evicts_its_own() {
    let config = FdbConfig {
        capacity: 1024,
        ..FdbConfig::default()
    };
    mac_flood(config, false);
    mac_flood(config, true);
}

#[test]
fn b68_without_a_port_limit_too() {
    let config = FdbConfig {
        capacity: 1024,
        port_limit: Some(usize::MAX),
        ..FdbConfig::default()
    };
    mac_flood(config, false);
    mac_flood(config, true);
}

#[test]
fn b68_a_small_port_takes_from_a_large_one_but_not_back() {
    // 16 places in 4 buckets, so that every key meets full ones.
    let (fdb, [a, b, ..]) = table(FdbConfig {
        capacity: 12,
        port_limit: Some(16),
        ..FdbConfig::default()
    });
    let learn = |range: core::ops::Range<u32>, port| {
        range
            .map(|number| fdb.learn(key(number), port, 0))
            .filter(|&outcome| outcome == LearnOutcome::Learned)
            .count()
    };
    assert_eq!(learn(0..1000, a), 1000, "its own oldest entry gives way");
    assert_eq!(fdb.port_learned_entries(PortId(0)), 16);
    assert_eq!(learn(2000..2100, b), 100);
    // B took until it had as many as A where they meet, and no more.
    let (of_a, of_b) = (
        fdb.port_learned_entries(PortId(0)),
        fdb.port_learned_entries(PortId(1)),
    );
    assert_eq!((of_a + of_b, of_b), (16, 8));
    learn(0..1000, a);
    assert_eq!(fdb.port_learned_entries(PortId(1)), 8);
    assert_counts(&fdb);
}

#[test]
fn b69_learning_at_the_limit_while_ageing() {
    const LIMIT: u64 = 200;
    let (fdb, [a, b, ..]) = table(FdbConfig {
        capacity: 512,
        ageing_seconds: 2,
        port_limit: Some(200),
        ..FdbConfig::default()
    });
    let now = AtomicU16::new(0);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = StopOnDrop(&done);
        let learners = [(a, 0), (a, 5_000), (b, 10_000)].map(|(port, offset)| {
            let (fdb, now) = (&fdb, &now);
            scope.spawn(move || {
                for number in 0..60_000 {
                    let tick = now.load(Ordering::Relaxed);
                    fdb.learn(key(offset + number % 700), port, tick);
                }
            })
        });
        let control = scope.spawn(|| {
            let mut scans = 0_u32;
            while !done.load(Ordering::Relaxed) {
                let tick = now.fetch_add(1, Ordering::Relaxed);
                fdb.age(tick);
                for id in [0, 1] {
                    assert!(fdb.port_learned_entries(PortId(id)) <= LIMIT);
                }
                scans += 1;
                if scans.is_multiple_of(16) {
                    fdb.flush_port(b);
                }
            }
        });
        for learner in learners {
            learner.join().expect("learner");
        }
        drop(stop);
        control.join().expect("control");
    });
    assert_counts(&fdb);
    assert!(fdb.stats().refused > 0 || fdb.stats().evicted > 0);
    fdb.age(now.load(Ordering::Relaxed).wrapping_add(3));
    assert_eq!(fdb.entries(0).count(), 0);
    assert_counts(&fdb);
}

#[test]
fn b70_flush_keeps_static_entries() {
    let (fdb, [a, b, ..]) = table(FdbConfig::default());
    fdb.add_static(key(1), a).expect("room");
    fdb.learn(key(2), a, 0);
    fdb.learn(key(3), b, 0);
    assert!(fdb.flush_port(a));
    assert_eq!(fdb.lookup(key(1)), Some(PortId(0)));
    assert_eq!(fdb.lookup(key(2)), None);
    assert_eq!(fdb.lookup(key(3)), Some(PortId(1)), "another port's");
    fdb.flush_all();
    assert_eq!(fdb.lookup(key(3)), None);
    assert_eq!(fdb.lookup(key(1)), Some(PortId(0)));
    // The reference outlives flushes.
    assert_eq!(fdb.learn(key(2), a, 0), LearnOutcome::Learned);
    assert_counts(&fdb);
}

#[test]
fn b70_data_keeps_an_entry_young() {
    let (fdb, [a, ..]) = table(FdbConfig::default());
    fdb.learn(key(1), a, 65_000);
    fdb.learn(key(2), a, 65_000);
    for seconds in (0..2000_u16).step_by(250) {
        let tick = 65_000_u16.wrapping_add(seconds);
        fdb.learn(key(1), a, tick);
        fdb.age(tick);
    }
    assert_eq!(fdb.lookup(key(1)), Some(PortId(0)));
    assert_eq!(fdb.lookup(key(2)), None);
}

#[test]
fn b71_a_loop_does_not_flood_moves() {
    let (fdb, [a, b, ..]) = table(FdbConfig::default());
    fdb.learn(key(1), a, 0);
    let generation = fdb.generation();
    for _ in 0..1000 {
        fdb.learn(key(1), b, 0);
        fdb.learn(key(1), a, 0);
    }
    assert_eq!(fdb.stats().moved, u64::from(MOVES_PER_TICK_MAX));
    assert_eq!(fdb.generation() - generation, u32::from(MOVES_PER_TICK_MAX));
    assert_eq!(fdb.port_moves(PortId(1)), 1);
    assert_eq!(fdb.port_moves(PortId(0)), 1);
    assert!(fdb.stats().moves_held > 900);
    // A second later it may move again: it is where it was before the loop.
    assert_eq!(
        fdb.learn(key(1), b, 1),
        LearnOutcome::Moved { from: PortId(0) }
    );
    assert_counts(&fdb);
}

/// Who had the address when the second began keeps it, if it sends at all.
#[test]
fn b71_a_hijacker_does_not_keep_an_address() {
    let (fdb, [victim, attacker, ..]) = table(FdbConfig::default());
    let moved = |from| LearnOutcome::Moved { from: PortId(from) };
    fdb.learn(key(1), victim, 0);
    for tick in 0..3 {
        assert_eq!(fdb.learn(key(1), attacker, tick), moved(0));
        assert_eq!(fdb.learn(key(1), victim, tick), moved(1));
        for _ in 0..10 {
            assert_eq!(fdb.learn(key(1), attacker, tick), LearnOutcome::MoveHeld);
            assert_eq!(fdb.lookup(key(1)), Some(PortId(0)));
            assert_eq!(fdb.learn(key(1), victim, tick), LearnOutcome::Known);
        }
    }
    assert_counts(&fdb);
}

#[test]
fn b71_static_entries_never_move_and_group_sources_are_never_learned() {
    let (fdb, [a, b, ..]) = table(FdbConfig::default());
    fdb.add_static(key(1), a).expect("room");
    assert_eq!(fdb.learn(key(1), b, 5), LearnOutcome::Static);
    assert_eq!(fdb.lookup(key(1)), Some(PortId(0)));
    for mac in [[0xff; 6], [0x01, 0, 0x5e, 0, 0, 1], [0; 6]] {
        let key = MacVlan::new(mac, 7);
        assert_eq!(fdb.learn(key, a, 0), LearnOutcome::Ignored);
        assert_eq!(fdb.add_static(key, a), Err(FdbError::NotAnAddress(key)));
        assert_eq!(fdb.lookup(key), None);
    }
    assert_counts(&fdb);
}

#[test]
fn static_entries_cannot_be_more_than_their_places() {
    let (fdb, [a, b, ..]) = table(FdbConfig {
        capacity: 1,
        ..FdbConfig::default()
    });
    let added = (0..100)
        .filter(|&n| fdb.add_static(key(n), a).is_ok())
        .count();
    assert_eq!(added, fdb.slots_len());
    assert_eq!(fdb.add_static(key(200), a), Err(FdbError::NoRoom(key(200))));
    assert_eq!(fdb.learn(key(201), b, 0), LearnOutcome::Full);
    assert_counts(&fdb);
}

#[test]
fn ports_out_of_range_or_closed() {
    let (fdb, [a, ..]) = table(FdbConfig::default());
    assert_eq!(
        fdb.open_port(PortId(4)),
        Err(FdbError::PortOutOfRange(PortId(4)))
    );
    fdb.learn(key(1), a, 0);
    let again = fdb.open_port(PortId(0)).expect("in range");
    assert_ne!(a, again);
    assert_eq!(fdb.lookup(key(1)), None, "the earlier port's entry");
    assert_eq!(fdb.learn(key(1), a, 0), LearnOutcome::Ignored);
    assert!(!fdb.flush_port(a) && !fdb.close_port(a));
    assert_eq!(fdb.learn(key(1), again, 0), LearnOutcome::Learned);
    assert_counts(&fdb);
}

/// Readers, while keys move between two ports each, are evicted, removed,
/// flushed and aged: a lookup never returns a port that the key never was on.
#[test]
fn lookups_are_never_of_another_key() {
    const KEYS_LEN: u32 = 400;
    let (fdb, ports) = table(FdbConfig {
        capacity: 48,
        ageing_seconds: 1,
        port_limit: Some(64),
        ..FdbConfig::default()
    });
    let allowed = |number: u32| [number % 4, (number + 1) % 4];
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (fdb, done) = (&fdb, &done);
        let stop = StopOnDrop(done);
        let writers = [1_u32, 2].map(|writer| {
            scope.spawn(move || {
                let mut random = writer.wrapping_mul(0x9e37_79b9);
                for step in 0..250_000_u32 {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let number = (random >> 8) % KEYS_LEN;
                    let port = allowed(number)[(random >> 30) as usize % 2];
                    let tick = u16::try_from(step / 64 % 65_536).expect("16 bits");
                    fdb.learn(key(number), ports[port as usize], tick);
                    match random >> 20 {
                        0..4 => drop(fdb.remove(key(number))),
                        4..6 => drop(fdb.flush_port(ports[port as usize])),
                        6..8 => drop(fdb.age(tick)),
                        _ => {}
                    }
                }
            })
        });
        let readers = [3_u32, 7].map(|step| {
            scope.spawn(move || {
                let (mut number, mut hits) = (0, 0_u32);
                while !done.load(Ordering::Relaxed) {
                    number = (number + step) % KEYS_LEN;
                    if let Some(port) = fdb.lookup(key(number)) {
                        assert!(allowed(number).contains(&u32::from(port.0)), "key {number}");
                        hits += 1;
                    }
                }
                hits
            })
        });
        for writer in writers {
            writer.join().expect("writer");
        }
        drop(stop);
        for reader in readers {
            assert!(reader.join().expect("reader") > 0);
        }
    });
    assert!(fdb.stats().evicted > 0 && fdb.stats().moved > 0);
    assert_counts(&fdb);
}

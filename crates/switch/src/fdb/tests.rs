//! What needs to see inside the table.

use super::*;
use crate::PortRef;

fn key(number: u32) -> MacVlan {
    let [a, b, c, d] = number.to_be_bytes();
    MacVlan::new([0x02, 0, a, b, c, d], 0)
}

fn table(capacity: usize) -> (Fdb, PortRef) {
    let fdb = Fdb::new(FdbConfig {
        capacity,
        max_ports: 4,
        seed: 0x5eed,
        ..FdbConfig::default()
    });
    let port = fdb.open_port(PortId(1)).expect("in range");
    (fdb, port)
}

#[test]
fn a_worker_never_waits_for_a_shard() {
    let (fdb, port) = table(1000);
    assert_eq!(fdb.learn(key(1), port, 0), LearnOutcome::Learned);
    let guards: Vec<_> = fdb.shards.iter().map(|shard| shard.lock()).collect();
    assert_eq!(fdb.learn(key(2), port, 0), LearnOutcome::Busy);
    // What is there is found and kept young without the lock.
    assert_eq!(fdb.learn(key(1), port, 1), LearnOutcome::Refreshed);
    assert_eq!(fdb.lookup(key(1)), Some(PortId(1)));
    assert_eq!(fdb.lookup(key(2)), None);
    drop(guards);
    assert_eq!(fdb.learn(key(2), port, 0), LearnOutcome::Learned);
    assert_eq!(fdb.stats().busy, 1);
}

#[test]
fn both_places_are_two_buckets_of_one_shard() {
    for capacity in [1, 8, 1000, 100_000] {
        let (fdb, _) = table(capacity);
        assert!(fdb.slots_len() >= capacity);
        let shard_buckets = fdb.buckets.len() / fdb.shards.len();
        for number in 0..10_000 {
            let place = fdb.place(key(number));
            assert_ne!(place.first, place.second);
            assert_eq!(place.first / shard_buckets, place.shard);
            assert_eq!(place.second / shard_buckets, place.shard);
        }
    }
}

#[test]
fn keys_spread_evenly() {
    let (fdb, _) = table(10_000);
    let mut shards = vec![0_u32; fdb.shards.len()];
    let mut buckets = vec![0_u32; fdb.buckets.len()];
    for number in 0..100_000 {
        let place = fdb.place(key(number));
        shards[place.shard] += 1;
        buckets[place.first] += 1;
    }
    // 4,096 buckets with 24.4 on average, 64 shards with 1,562: beyond these
    // bounds (7 standard deviations) the hash is no good.
    assert!(
        buckets.iter().all(|&len| len < 60),
        "{:?}",
        buckets.iter().max()
    );
    assert!(shards.iter().all(|&len| (1290..1840).contains(&len)));
}

#[test]
fn seeds_change_the_places() {
    let with_seed = |seed| {
        Fdb::new(FdbConfig {
            seed,
            ..FdbConfig::default()
        })
    };
    let (a, b) = (with_seed(1), with_seed(2));
    let same = (0..1000)
        .filter(|&number| a.place(key(number)).first == b.place(key(number)).first)
        .count();
    assert!(same < 10, "{same} of 1000");
}

#[test]
fn nothing_comes_back_when_generations_wrap() {
    let (fdb, port) = table(100);
    assert_eq!(fdb.learn(key(1), port, 0), LearnOutcome::Learned);
    for _ in 0..=u16::MAX {
        assert!(fdb.flush_port(port));
        assert_eq!(fdb.lookup(key(1)), None);
    }
    // The same over lives, for a static entry.
    fdb.add_static(key(2), port).expect("room");
    for _ in 0..=u16::MAX {
        fdb.open_port(PortId(1)).expect("in range");
        assert_eq!(fdb.lookup(key(2)), None);
    }
}

#[test]
fn debug_output_has_no_seed() {
    let (fdb, _) = table(100);
    let text = format!("{fdb:?}");
    assert!(text.len() < 200 && !text.contains("seed"), "{text}");
}

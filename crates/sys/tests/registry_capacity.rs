//! The registry as a whole, in a process of its own: how many it holds, and that
//! it forgets what is gone.

use std::os::fd::AsFd;

use pollux_sys::{MAPPING_CAPACITY, MapError, Mapping, mapping_count, memfd, poison_count};

const PAGE: usize = 4096;

/// One test, because the registry is one for the process.
#[test]
fn fills_up_refuses_and_empties() {
    let file = memfd("capacity", 4096).unwrap();
    for _ in 0..20_000 {
        let mapping = Mapping::map(file.as_fd(), 0, PAGE).unwrap();
        assert!(!mapping.is_poisoned());
    }
    assert_eq!(mapping_count(), 0);

    let mut mappings: Vec<Mapping> = (0..MAPPING_CAPACITY)
        .map(|_| Mapping::map(file.as_fd(), 0, PAGE).unwrap())
        .collect();
    assert_eq!(mapping_count(), MAPPING_CAPACITY);
    let error = Mapping::map(file.as_fd(), 0, PAGE).unwrap_err();
    assert!(matches!(error, MapError::RegistryFull { .. }), "{error}");
    assert!(error.to_string().contains("16384"), "{error}");

    // The last entry is protected as well as the first.
    let victim = memfd("victim", 4096).unwrap();
    drop(mappings.pop());
    let last = Mapping::map(victim.as_fd(), 0, PAGE).unwrap();
    assert_eq!(mapping_count(), MAPPING_CAPACITY);
    std::fs::File::from(victim).set_len(0).unwrap();
    // SAFETY: the mapping is alive and page-aligned; a fault is cured.
    assert_eq!(unsafe { last.as_ptr().as_ptr().read_volatile() }, 0);
    assert!(last.is_poisoned());
    assert_eq!(poison_count(), 1);
    assert!(mappings.iter().all(|mapping| !mapping.is_poisoned()));

    drop(last);
    // Entries that are given back can be used again.
    mappings.truncate(MAPPING_CAPACITY / 2);
    let again = Mapping::map(file.as_fd(), 0, PAGE).unwrap();
    assert!(!again.is_poisoned(), "an entry starts clean");
    drop(again);
    drop(mappings);
    assert_eq!(mapping_count(), 0);
}

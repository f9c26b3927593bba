//! The guest's memory, what has to be in every byte of it, and where things lie.

use std::ops::Range;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;

use pollux_virtio::{GuestMemory, Region, RegionPlace};

/// First guest address.
pub(super) const BASE: u64 = 0x4_0000;
/// Where the ring may lie: descriptors, driver events, device events.
pub(super) const PLACES: [[u64; 3]; 2] = [
    [BASE + 0x40, BASE + 0x4a4, BASE + 0x4ac],
    [BASE + 0x600, BASE + 0x504, BASE + 0x508],
];
/// Indirect tables, at an odd address since nothing asks for more.
pub(super) const TABLES: u64 = BASE + 0x1001;
/// Entries of a table.
pub(super) const TABLE_LEN: u16 = 10;
/// Buffers.
pub(super) const BUFFERS: u64 = BASE + 0x4000;
/// Bytes of memory for buffers: the longest frame, and some.
pub(super) const BUFFERS_BYTES: u32 = 0x1_1000;
/// Where the second map of the memory is cut into regions: through buffers.
const CUTS: [u64; 4] = [
    0,
    BUFFERS - BASE + 1003,
    BUFFERS - BASE + 0x8001,
    BUFFERS - BASE + BUFFERS_BYTES as u64,
];
/// Bytes of rings and tables.
const RINGS_BYTES: usize = 0x4000;

thread_local! {
    /// Making a file costs more than most inputs.
    static BACKING: Rc<Backing> = Rc::new(Backing::new());
}

#[derive(Debug)]
struct Backing {
    /// In one region and in three.
    maps: [Arc<GuestMemory>; 2],
    /// What the memory is at first: see [`noise`].
    noise: Vec<u8>,
}

impl Backing {
    fn new() -> Self {
        let bytes = CUTS[CUTS.len() - 1];
        let file = pollux_sys::memfd("pollux-oracle", bytes).expect("a memfd");
        let map = |cuts: &[u64]| {
            let regions = cuts.windows(2).map(|cut| {
                let place = RegionPlace {
                    guest_addr: BASE + cut[0],
                    size: cut[1] - cut[0],
                    user_addr: BASE + cut[0],
                    file_offset: cut[0],
                };
                Region::map(file.as_fd(), place).expect("inside the file")
            });
            Arc::new(GuestMemory::new(regions).expect("they do not overlap"))
        };
        Self {
            maps: [map(&[0, bytes]), map(&CUTS)],
            noise: (0..u32::try_from(bytes).expect("small"))
                .map(noise)
                .collect(),
        }
    }
}

/// Bytes that tell where they are, and two zeros wherever a net header may
/// begin: one that asks for nothing.
fn noise(at: u32) -> u8 {
    if at % 16 < 2 {
        return 0;
    }
    (at.wrapping_mul(0x9e37_79b1) >> 24).to_le_bytes()[0] | 1
}

fn offset(addr: u64) -> usize {
    usize::try_from(addr - BASE).expect("small")
}

/// Memory, and what should be in it.
#[derive(Debug)]
pub(super) struct Memory {
    backing: Rc<Backing>,
    known: Vec<u8>,
    now: Vec<u8>,
}

impl Memory {
    pub(super) fn new() -> Self {
        let backing = BACKING.with(Rc::clone);
        let wrote = backing.maps[0].write(BASE, &backing.noise);
        wrote.expect("all of it is mapped");
        Self {
            known: backing.noise.clone(),
            now: backing.noise.clone(),
            backing,
        }
    }

    /// As the device gets it: in one region, or cut into several.
    pub(super) fn map(&self, is_cut: bool) -> Arc<GuestMemory> {
        Arc::clone(&self.backing.maps[usize::from(is_cut)])
    }

    /// The guest writes.
    pub(super) fn write(&mut self, addr: u64, bytes: &[u8]) {
        self.device_writes(addr, bytes);
        let wrote = self.backing.maps[0].write(addr, bytes);
        wrote.expect("all of it is mapped");
    }

    /// The device has to have written this when memory is looked at next.
    pub(super) fn device_writes(&mut self, addr: u64, bytes: &[u8]) {
        self.known[offset(addr)..][..bytes.len()].copy_from_slice(bytes);
    }

    /// What should be there.
    pub(super) fn known(&self, addr: u64, len: u32) -> &[u8] {
        &self.known[offset(addr)..][..len as usize]
    }

    /// What is there.
    pub(super) fn read<const N: usize>(&self, addr: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let read = self.backing.maps[0].read(addr, &mut bytes);
        read.expect("all of it is mapped");
        bytes
    }

    /// Every byte is as it has to be; without the buffers, or with them.
    pub(super) fn check(&mut self, with_buffers: bool, what: &str) {
        let end = if with_buffers {
            self.known.len()
        } else {
            RINGS_BYTES
        };
        self.look(end);
        self.compare(end, what);
    }

    /// [`check`](Self::check) with the buffers; in these ranges of addresses
    /// anything may be.
    pub(super) fn check_but(&mut self, free: &[Range<u64>], what: &str) {
        let end = self.known.len();
        self.look(end);
        for range in free {
            let range = offset(range.start)..offset(range.end);
            self.known[range.clone()].copy_from_slice(&self.now[range]);
        }
        self.compare(end, what);
    }

    fn look(&mut self, end: usize) {
        let read = self.backing.maps[0].read(BASE, &mut self.now[..end]);
        read.expect("all of it is mapped");
    }

    fn compare(&self, end: usize, what: &str) {
        let (now, known) = (&self.now[..end], &self.known[..end]);
        if now != known {
            let mut pairs = now.iter().zip(known);
            let at = pairs.position(|(now, known)| now != known);
            let at = at.expect("they differ");
            let addr = BASE + at as u64;
            panic!(
                "{what}: byte {addr:#x} is {:#x}, not {:#x}",
                now[at], known[at]
            );
        }
    }
}

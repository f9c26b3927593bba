//! Guest memory in which every byte is known: regions lie in a file with bytes
//! of nobody's between them, which are mapped wherever a region does not begin
//! or end with a page. After each step of the device the whole file is compared
//! with what the guest has written and what the device may have.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use pollux_virtio::{GuestMemory, Region, RegionPlace};

/// Bytes of the file.
pub(crate) const FILE_BYTES: usize = 64 << 10;
/// Bytes that are compared at a time.
const PIECE: usize = 256;
/// What the bytes between regions are.
const CANARY: u8 = 0xa5;

thread_local! {
    /// Making a file costs more than most inputs.
    static BACKING: Rc<Backing> = Rc::new(Backing::new());
}

#[derive(Debug)]
struct Backing {
    file: OwnedFd,
    /// The whole file at address 0: how the guest writes, and how the checks
    /// read.
    whole: Arc<GuestMemory>,
}

impl Backing {
    fn new() -> Self {
        let (file, whole) = map_file("pollux-fuzz", FILE_BYTES as u64);
        let whole = Arc::new(whole);
        Self { file, whole }
    }
}

/// A file of `bytes`, and the whole of it as memory at address 0.
pub(crate) fn map_file(name: &str, bytes: u64) -> (OwnedFd, GuestMemory) {
    let file = pollux_sys::memfd(name, bytes).expect("a memfd");
    let place = RegionPlace {
        guest_addr: 0,
        size: bytes,
        user_addr: 0,
        file_offset: 0,
    };
    let region = Region::map(file.as_fd(), place).expect("the file can be mapped");
    let memory = GuestMemory::new([region]).expect("one region");
    (file, memory)
}

/// Regions of the file as a guest has them.
#[derive(Clone, Debug)]
pub(crate) struct Map {
    pub(crate) places: Rc<[RegionPlace]>,
    pub(crate) memory: Arc<GuestMemory>,
}

impl Map {
    /// The bytes of the file at guest addresses from `addr` on, region by region,
    /// up to the first that is in none.
    pub(crate) fn file_ranges(&self, addr: u64, len: u64) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        let (mut addr, mut rest) = (addr, len);
        while rest > 0 {
            let find = |place: &&RegionPlace| addr.wrapping_sub(place.guest_addr) < place.size;
            let Some(place) = self.places.iter().find(find) else {
                break;
            };
            let offset = addr - place.guest_addr;
            let now = rest.min(place.size - offset);
            let start = usize::try_from(place.file_offset + offset).expect("inside the file");
            ranges.push(start..start + usize::try_from(now).expect("inside the file"));
            rest -= now;
            let Some(next) = addr.checked_add(now) else {
                break;
            };
            addr = next;
        }
        ranges
    }

    /// The first guest address of a byte of the file.
    pub(crate) fn addr_of(&self, file_offset: u64) -> Option<u64> {
        self.places.iter().find_map(|place| {
            let offset = file_offset.checked_sub(place.file_offset)?;
            (offset < place.size).then(|| place.guest_addr + offset)
        })
    }
}

/// Which bytes of the file the device may change.
#[derive(Debug, Default)]
pub(crate) struct Allowed(Vec<Range<usize>>);

impl Allowed {
    pub(crate) fn add(&mut self, map: &Map, addr: u64, len: u64) {
        self.0.extend(map.file_ranges(addr, len));
    }

    pub(crate) fn includes_any(&self, map: &Map, addr: u64, len: u64) -> bool {
        let overlaps = |one: &Range<usize>| {
            let mut ours = self.0.iter();
            ours.any(|other| one.start < other.end && other.start < one.end)
        };
        map.file_ranges(addr, len).iter().any(overlaps)
    }

    fn includes(&self, offset: usize) -> bool {
        self.0.iter().any(|range| range.contains(&offset))
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Everything that the guest has.
    pub(crate) fn add_all(&mut self, map: &Map) {
        self.0.clear();
        for place in map.places.iter() {
            self.add(map, place.guest_addr, place.size);
        }
    }
}

/// The file, and what should be in it.
#[derive(Debug)]
pub(crate) struct Arena {
    backing: Rc<Backing>,
    known: Vec<u8>,
    now: Vec<u8>,
}

impl Arena {
    /// A file whose first `bytes` are canaries and are looked at.
    pub(crate) fn new(bytes: usize) -> Self {
        let arena = Self {
            backing: BACKING.with(Rc::clone),
            known: vec![CANARY; bytes],
            now: vec![0; bytes],
        };
        let wrote = arena.backing.whole.write(0, &arena.known);
        wrote.expect("the whole file is mapped");
        arena
    }

    /// Maps regions of the file.
    pub(crate) fn map(&self, places: &[RegionPlace]) -> Map {
        let regions = places
            .iter()
            .map(|&place| Region::map(self.backing.file.as_fd(), place).expect("inside the file"));
        Map {
            places: places.into(),
            memory: Arc::new(GuestMemory::new(regions).expect("they do not overlap")),
        }
    }

    /// The whole file, for a thread that writes to it meanwhile.
    pub(crate) fn whole(&self) -> Arc<GuestMemory> {
        Arc::clone(&self.backing.whole)
    }

    /// The guest writes, as far as there is memory.
    pub(crate) fn write(&mut self, map: &Map, addr: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for range in map.file_ranges(addr, bytes.len() as u64) {
            let (part, later) = rest.split_at(range.len());
            self.known[range.clone()].copy_from_slice(part);
            let wrote = self.backing.whole.write(range.start as u64, part);
            wrote.expect("the whole file is mapped");
            rest = later;
        }
    }

    /// What is known to be at an address; zeros where no memory is.
    pub(crate) fn known<const N: usize>(&self, map: &Map, addr: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let mut at = 0;
        for range in map.file_ranges(addr, N as u64) {
            bytes[at..at + range.len()].copy_from_slice(&self.known[range.clone()]);
            at += range.len();
        }
        bytes
    }

    /// The device has done something: nothing but what is allowed has changed.
    pub(crate) fn check(&mut self, allowed: &Allowed, what: &str) {
        let read = self.backing.whole.read(0, &mut self.now);
        read.expect("the whole file is mapped");
        if self.now == self.known {
            return;
        }
        let pieces = self.now.chunks(PIECE).zip(self.known.chunks(PIECE));
        let changed = (0..).step_by(PIECE).zip(pieces);
        for (start, (now, known)) in changed.filter(|(_, (now, known))| now != known) {
            let bytes = (start..).zip(now.iter().zip(known));
            for (offset, (now, known)) in bytes.filter(|(_, (now, known))| now != known) {
                assert!(
                    allowed.includes(offset),
                    "{what} has changed byte {offset:#x} of guest memory's file, which is not \
                     its to write, from {known:#x} to {now:#x}"
                );
            }
        }
        std::mem::swap(&mut self.now, &mut self.known);
    }
}

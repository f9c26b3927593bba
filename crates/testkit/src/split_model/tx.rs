//! The device half of a guest TX ring beside rust-vmm's.

use std::sync::LazyLock;

use pollux_packet::{DropCounts, DropReason, FRAME_BYTES_MAX, NET_HEADER_BYTES, Offload};
use pollux_sys::EventFd;
use pollux_virtio::device::{BurstLimit, TxRing};
use pollux_virtio::driver::GuestSpec;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{Broken, Chain, OracleWalk, Twin};
use crate::frames::gather;

/// An operation on a TX ring.
#[derive(Clone, Debug)]
pub enum TxOp {
    /// The driver writes a chain.
    Offer(Chain),
    /// It makes all that were written available.
    Publish,
    /// A burst; `kept` frames of it stay in the ring.
    Burst {
        /// How much of it.
        limit: BurstLimit,
        /// Frames that stay.
        kept: usize,
    },
    /// The driver takes chains back.
    TakeUsed,
    /// The device is about to sleep.
    RequestKick,
    /// The device polls.
    SuppressKicks,
    /// The device stops, and another goes on.
    Restart,
    /// The device is told where the ring lies, which is where it was.
    Relocate,
    /// NO_INTERRUPT, or used_event relative to used.idx.
    Wish {
        /// NO_INTERRUPT or nothing.
        flags: u16,
        /// From used.idx on.
        event: i16,
    },
}

/// Longer than the memory of a guest with small rings.
static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    (0..1_u32 << 20)
        .map(|i| {
            if i % 256 < 128 {
                0
            } else {
                ((i * 31) >> 3) as u8
            }
        })
        .collect()
});

/// What a chain is to the oracle.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Frame(Vec<u8>),
    Drop(DropReason),
}

/// The frame of a TX chain by rust-vmm's iterator and memory.
fn judge(memory: &GuestMemoryMmap, walk: &mut OracleWalk<'_>, header_bytes: u32) -> Outcome {
    let bytes_max = header_bytes + FRAME_BYTES_MAX;
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        match walk.buffer() {
            Err(Broken) => return Outcome::Drop(DropReason::BadChain),
            Ok(None) => break,
            Ok(Some((_, _, true))) => return Outcome::Drop(DropReason::BadChain),
            Ok(Some((_, len, _))) if len > bytes_max - bytes.len() as u32 => {
                return Outcome::Drop(DropReason::Oversize);
            }
            Ok(Some((addr, len, _))) => {
                let start = bytes.len();
                bytes.resize(start + len as usize, 0);
                if len > 0
                    && memory
                        .read_slice(&mut bytes[start..], GuestAddress(addr))
                        .is_err()
                {
                    return Outcome::Drop(DropReason::BadChain);
                }
            }
        }
    }
    if bytes.len() < header_bytes as usize + 14 {
        return Outcome::Drop(DropReason::Runt);
    }
    let frame = bytes.split_off(header_bytes as usize);
    if bytes[0] & 1 != 0 || bytes[1] != 0 {
        return Outcome::Drop(DropReason::BadOffload);
    }
    Outcome::Frame(frame)
}

/// A TX ring beside rust-vmm's: heads, frames, drops, the whole used ring
/// (entries, index, flags, avail_event) and calls must be equal.
///
/// Accepted differences:
///
/// | rust-vmm | pollux | Why |
/// |----------|--------|-----|
/// | a chain may be longer than the ring through an indirect table | bad chain | section 2.7.5.3.1 forbids it, and the ring size is our bound of a walk |
/// | INDIRECT with NEXT is followed into the table | bad chain | section 2.7.5.3.1 forbids it |
/// | a chain that cannot be followed looks shorter than it is | bad chain: `len` 0, counted | a part of a frame is not a frame |
/// | a table of more than 65,535 entries is refused | followed within the chain's bound | no rule against it; not generated here |
/// | with EVENT_IDX the first decision is like others | the first call after a start is unconditional | what the driver saw before is unknown (B-18) |
/// | NO_INTERRUPT is not supported: always calls | obeyed | section 2.7.7.2 |
/// | avail_event is the position while chains are pending | it is avail.idx as last seen | either way there is work, and nobody sleeps on it |
/// | a head outside the table is an empty chain | the ring breaks | the driver is broken, and `used.id` would be made up |
/// | an index jump is an error for each call | the ring breaks | the same, told once |
/// | a burst is whatever comes | it ends early when there is no room for the pieces of a chain | it comes first in the next |
/// | each chain has its entry | with IN_ORDER a batch has one | section 2.7.9 |
#[derive(Debug)]
pub struct TxModel {
    twin: Twin,
    device: TxRing,
    /// Why chains were dropped so far.
    pub drops: DropCounts,
    /// Calls so far, and publications without one.
    pub calls: [u64; 2],
    /// Most chains that went back at once.
    pub batch_max: usize,
    call: EventFd,
    /// The first decision is ours alone.
    decided: bool,
    /// Kicks were asked for while chains were pending.
    early_kick: bool,
}

impl TxModel {
    /// The TX ring of a guest.
    ///
    /// # Panics
    /// If there cannot be such a guest, it has more than 1 MiB, or the ring is packed.
    #[must_use]
    pub fn new(spec: GuestSpec) -> Self {
        assert!(!spec.features.packed, "a split ring");
        let mut twin = Twin::new(spec, true);
        let call = EventFd::new().expect("eventfd");
        let (device, _) = twin.guest.device_with_calls(call.try_clone().ok(), None);
        // Bytes that are no header, so that many offloads are refused, behind
        // zeros, so that many are not.
        twin.begin(&NOISE);
        Self {
            twin,
            device,
            drops: DropCounts::default(),
            calls: [0; 2],
            batch_max: 0,
            call,
            decided: false,
            early_kick: false,
        }
    }

    /// One operation.
    ///
    /// # Panics
    /// If the two differ.
    pub fn run(&mut self, op: &TxOp) {
        let features = self.twin.config.features;
        match op {
            TxOp::Offer(chain) => {
                let room = (self.twin.end - self.twin.config.buffers_addr) as u32;
                let seed = chain.seed;
                let start = self.twin.config.buffers_addr;
                // Anywhere, at any alignment: device and driver only read.
                self.twin.offer(chain, false, |_, index| {
                    let spread = seed.rotate_left(index as u32 * 7) % room;
                    start + u64::from(spread.min(room.saturating_sub(chain.lens[index])))
                });
                if seed % 4 != 0 {
                    // Most net headers ask for nothing.
                    self.clear_header(chain);
                }
            }
            TxOp::Publish => self.twin.raw.publish(),
            TxOp::TakeUsed => {
                self.twin.take_used();
            }
            TxOp::Burst { limit, kept } => self.burst(*limit, *kept),
            TxOp::RequestKick => {
                self.twin.copy_to_oracle();
                let ours = self.device.request_kick();
                let theirs = self.twin.queue.enable_notification(&self.twin.memory);
                assert_eq!(ours, theirs.expect("memory"), "work is there already");
                self.early_kick = ours;
            }
            TxOp::SuppressKicks => {
                self.twin.copy_to_oracle();
                self.device.suppress_kicks();
                self.twin
                    .queue
                    .disable_notification(&self.twin.memory)
                    .expect("memory");
            }
            TxOp::Restart => {
                self.twin.copy_to_oracle();
                let call = self.call.try_clone().ok();
                (self.device, _) = self.twin.guest.device_with_calls(call, None);
                let quiet = self.twin.queue.disable_notification(&self.twin.memory);
                quiet.expect("memory");
                self.decided = false;
                assert_eq!(
                    self.device.base(),
                    self.twin.queue.next_avail(),
                    "it goes on"
                );
            }
            TxOp::Relocate => {
                self.twin.copy_to_oracle();
                let memory = self.twin.guest.memory.clone();
                let moved = self.device.relocate(memory, self.twin.config.areas);
                moved.expect("where it is");
                let quiet = self.twin.queue.disable_notification(&self.twin.memory);
                quiet.expect("memory");
            }
            TxOp::Wish { flags, event } => {
                if features.event_idx {
                    let used = self.twin.raw.used_idx();
                    self.twin
                        .raw
                        .set_used_event(used.wrapping_add_signed(*event));
                } else {
                    self.twin.raw.set_avail_flags(*flags);
                }
            }
        }
        let (mut ours, mut theirs) = self.twin.used_rings();
        if self.early_kick {
            // Without the avail_events.
            ours.truncate(ours.len() - 2);
            theirs.truncate(theirs.len() - 2);
        }
        assert_eq!(ours, theirs, "used rings");
    }

    /// Zeros for the net header of the chain that was offered last.
    fn clear_header(&mut self, chain: &Chain) {
        let room = (self.twin.end - self.twin.config.buffers_addr) as u32;
        let mut rest = NET_HEADER_BYTES as u32;
        for (index, &len) in chain.lens.iter().enumerate() {
            let spread = chain.seed.rotate_left(index as u32 * 7) % room;
            let at = spread.min(room.saturating_sub(len));
            let now = rest.min(len).min(room - at);
            let addr = self.twin.config.buffers_addr + u64::from(at);
            self.twin.raw.write(addr, &vec![0; now as usize]);
            rest -= now;
        }
    }

    fn burst(&mut self, limit: BurstLimit, kept: usize) {
        self.twin.copy_to_oracle();
        let Self {
            twin, device, call, ..
        } = self;
        let (areas, header_bytes) = (twin.config.areas, twin.header_bytes());

        // The oracle: chain by chain, as the limits are documented.
        let memory = twin.memory.clone();
        let before = twin.queue.next_avail();
        let mut outcomes = Vec::new();
        // Buffers of each chain.
        let mut taken = Vec::new();
        let (mut units, mut bytes) = (0, 0);
        while outcomes.len() < usize::from(limit.frames) {
            let heads = twin.queue.iter(&memory);
            let Some(chain) = heads.expect("no jump").next() else {
                break;
            };
            let head = chain.head_index();
            let mut walk = OracleWalk::new(&memory, areas, chain, areas.size);
            let outcome = judge(&memory, &mut walk, header_bytes);
            // A lower bound: tables are work too.
            units += u32::from(walk.taken).saturating_sub(2) + 1;
            if let Outcome::Frame(frame) = &outcome {
                bytes += frame.len() as u64;
            }
            outcomes.push((head, outcome));
            taken.push(usize::from(walk.taken));
            if bytes >= limit.bytes {
                break;
            }
        }

        let burst = device.receive(limit);
        let chains = burst.returns().chains() as usize;
        assert!(chains <= outcomes.len());
        if chains < outcomes.len() {
            assert!(chains > 0, "at least one");
            // Where units end a burst, ours says; or there is no room for the
            // pieces of the next chain.
            let regions = twin.guest.memory.regions().len();
            let pieces_max = regions * taken[..=chains].iter().sum::<usize>();
            let is_full = pieces_max > 2 * usize::from(areas.size) + 64;
            assert!(
                is_full || burst.returns().units() >= limit.units,
                "{chains} chains"
            );
            outcomes.truncate(chains);
            units = 0;
        }
        assert!(burst.returns().units() >= units);
        let frames: Vec<_> = (0..burst.batch.len())
            .map(|index| burst.batch.frame(index))
            .inspect(|frame| assert_eq!(frame.offload, Offload::default()))
            .map(|frame| gather(&frame))
            .collect();
        let is_frame = |outcome: &&(u16, Outcome)| matches!(outcome.1, Outcome::Frame(_));
        let wanted: Vec<_> = outcomes
            .iter()
            .filter_map(|(_, outcome)| match outcome {
                Outcome::Frame(frame) => Some(frame.clone()),
                Outcome::Drop(_) => None,
            })
            .collect();
        assert_eq!(frames, wanted);

        // The last `kept` frames stay, with everything behind the first of them.
        let taken = frames.len().saturating_sub(kept);
        let returns = burst.finish(taken);
        let mut seen = 0;
        let end = outcomes.iter().position(|outcome| {
            let hit = is_frame(&outcome) && seen == taken;
            seen += usize::from(is_frame(&outcome));
            hit
        });
        outcomes.truncate(end.unwrap_or(outcomes.len()));
        assert_eq!(returns.chains() as usize, outcomes.len());
        let drops: Vec<_> = returns.drops().collect();
        let wanted: Vec<_> = outcomes
            .iter()
            .filter_map(|(_, outcome)| match outcome {
                Outcome::Frame(_) => None,
                Outcome::Drop(reason) => Some(*reason),
            })
            .collect();
        assert_eq!(drops, wanted);

        let returned: Vec<(u16, u32)> = outcomes.iter().map(|&(head, _)| (head, 0)).collect();
        twin.add_used(&returned);
        self.batch_max = self.batch_max.max(returned.len());
        for &reason in &drops {
            self.drops.add(reason, 1);
        }
        let count = outcomes.len() as u16;
        twin.queue.set_next_avail(before.wrapping_add(count));
        assert_eq!(device.base(), twin.queue.next_avail());
        let called = call.drain() > 0;
        if count == 0 {
            assert!(!called, "nothing was published");
            return;
        }
        let theirs = twin.queue.needs_notification(&memory).expect("memory");
        let wanted = if !twin.config.features.event_idx {
            self.twin.raw.read(areas.avail_addr, 1)[0] & 1 == 0
        } else {
            theirs || !self.decided
        };
        self.decided = true;
        self.calls[usize::from(!wanted)] += 1;
        assert_eq!(called, wanted, "call");
    }

    /// Everything comes back in the end.
    ///
    /// # Panics
    /// If it does not, or the ring is broken.
    pub fn end(&mut self) {
        assert_eq!(self.device.fault(), None);
        self.twin.raw.publish();
        for _ in 0..64 {
            self.burst(BurstLimit::MAX, 0);
            self.twin.take_used();
            if self.twin.free_len() == usize::from(self.twin.config.areas.size) {
                break;
            }
        }
        assert_eq!(
            self.twin.free_len(),
            usize::from(self.twin.config.areas.size)
        );
    }
}

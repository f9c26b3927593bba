//! Transmitting into a guest RX ring.

use std::sync::Arc;

use arrayvec::ArrayVec;
use pollux_packet::{
    Batch, BurstLimit, DropReason, Frame, FrameReader, FrameSet, NET_HEADER_BYTES, SpanMut,
    Transmitted,
};
use pollux_sys::{EventFd, prefetch_write};

use super::ring::{Chains, DeviceRing};
use super::{Notifications, RingConfig, RingFault};
use crate::chain::{ChainError, ChainErrorCounts, Walk, pieces};
use crate::memory::GuestMemory;
use crate::ring::{Descriptor, RingAreas, RingError};
use crate::spec::DescFlags;

/// The device half of a guest RX ring.
#[derive(Debug)]
pub struct RxRing {
    memory: Arc<GuestMemory>,
    device: DeviceRing,
    layout: Layout,
    /// Set by the last frame that did not fit into all chains together.
    short: Option<Short>,
    chain_errors: ChainErrorCounts,
}

/// What was found too short for a frame. Until the driver has changed that,
/// longer frames need not be tried: else a guest with tiny buffers would cost
/// every sender a walk over all of them for each frame (B-56, B-59).
#[derive(Clone, Copy, Debug)]
enum Short {
    /// All chains together: those before position `end` hold `bytes`, less once
    /// some are taken.
    Ring { end: u16, bytes: u32 },
    /// The chain `offset` behind the next one, which alone must hold a frame.
    Chain { offset: u16, bytes: u32 },
}

/// Longest receive chain that is walked; QEMU's bound (`VIRTQUEUE_MAX_SIZE`).
/// Drivers post one to 19 buffers for a frame.
const CHAIN_LEN_MAX: u16 = 1024;
/// Buffers that are walked in one call beyond the longest chain: a burst is at
/// most 64 KiB in 64 frames, for which drivers that post pages need no more.
const WALK_SPARE: u16 = 4 * BurstLimit::MAX.frames;

/// Buffers that one call may walk.
fn walk_max(size: u16) -> u16 {
    size.min(CHAIN_LEN_MAX) + WALK_SPARE
}

/// How a frame is laid out in receive buffers.
#[derive(Clone, Copy, Debug)]
struct Layout {
    net_header_bytes: u32,
    mergeable: bool,
}

impl RxRing {
    /// Starts the device half of a guest RX ring.
    ///
    /// # Errors
    /// If the ring's areas are not whole and aligned in guest memory.
    pub fn new(memory: Arc<GuestMemory>, config: RingConfig) -> Result<Self, RingError> {
        let layout = Layout {
            net_header_bytes: config.features.net_header_bytes(),
            mergeable: config.features.mergeable,
        };
        let chains_max = BurstLimit::MAX.frames + walk_max(config.areas.size);
        Ok(Self {
            device: DeviceRing::new(Arc::clone(&memory), config, chains_max)?,
            memory,
            layout,
            short: None,
            chain_errors: ChainErrorCounts::default(),
        })
    }

    /// Copies the frames of `set`, in order, into the guest's buffers and gives
    /// them to the guest at once: one index store, one decision whether to
    /// call.
    ///
    /// A frame that finds no room is dropped and the next one is tried. A frame
    /// that meets an unusable chain is dropped; every chain up to and including
    /// that one goes back with length 0, in order.
    #[inline]
    pub fn transmit(&mut self, batch: &Batch<'_>, set: FrameSet) -> Transmitted {
        let mut report = Transmitted::default();
        if self.device.fault().is_some() {
            report.drop_frames(set.count(), DropReason::PortDown);
            return report;
        }
        let wanted = u16::try_from(set.count()).expect("at most 64 frames");
        let mut filling = Filling {
            chains: Chains::new(),
            used: 0,
            units: 0,
            walk_left: walk_max(self.size()),
            memory: &self.memory,
            device: &mut self.device,
            layout: self.layout,
            short: &mut self.short,
            chain_errors: &mut self.chain_errors,
        };
        filling.look_up(wanted);
        let rest = filling.frames_in_one_buffer(batch, set, &mut report);
        for index in rest {
            let frame = batch.frame(index);
            match filling.frame(&frame) {
                Ok(()) => {
                    report.frames += 1;
                    report.bytes += u64::from(frame.len);
                }
                Err(reason) => report.drop_frames(1, reason),
            }
        }
        report.units = filling.units;
        filling.forget_short();
        if !filling.device.publish(filling.used) {
            // The buffers were cut away: what was written reached nobody.
            report = Transmitted {
                units: report.units,
                ..Transmitted::default()
            };
            report.drop_frames(set.count(), DropReason::PortDown);
        }
        report
    }

    /// Moves a ring that goes on: to `areas` in `memory`, at the same
    /// positions. The size has to stay.
    ///
    /// # Errors
    /// If the areas are not whole and aligned in `memory`; the ring is unchanged.
    pub fn relocate(
        &mut self,
        memory: Arc<GuestMemory>,
        areas: RingAreas,
    ) -> Result<(), RingError> {
        self.device.relocate(Arc::clone(&memory), areas)?;
        self.memory = memory;
        self.short = None;
        Ok(())
    }

    /// Changes whom the ring calls, and returns whom it called until now. The
    /// next publication calls.
    pub fn set_call(&mut self, call: Option<EventFd>) -> Option<EventFd> {
        self.device.set_call(call)
    }

    /// Why the ring is broken, if it is.
    #[must_use]
    pub fn fault(&self) -> Option<RingFault> {
        self.device.fault()
    }

    /// Descriptors in the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.device.size()
    }

    /// Position in the available ring, for GET_VRING_BASE: every chain before
    /// it was returned.
    #[must_use]
    pub fn base(&self) -> u16 {
        self.device.position()
    }

    /// Calls sent and suppressed, kicks seen.
    #[must_use]
    pub fn notifications(&self) -> Notifications {
        self.device.notifications()
    }

    /// How often each kind of unusable chain was met.
    #[must_use]
    pub fn chain_errors(&self) -> ChainErrorCounts {
        self.chain_errors
    }
}

/// Why a frame did not get into the ring.
enum Refused {
    /// The chains that were tried stay available.
    Keep(DropReason),
    /// The last of so many chains cannot be used: they go back with length 0.
    Return(u16),
}

/// One call of [`RxRing::transmit`].
struct Filling<'r> {
    memory: &'r GuestMemory,
    device: &'r mut DeviceRing,
    layout: Layout,
    short: &'r mut Option<Short>,
    chain_errors: &'r mut ChainErrorCounts,
    /// Chains that were looked up.
    chains: Chains<'r>,
    /// Chains filled or returned so far.
    used: u16,
    units: u32,
    /// Buffers that may still be walked: a ring of long chains costs a burst no
    /// more than this.
    walk_left: u16,
}

impl<'r> Filling<'r> {
    /// Phases 1 and 2: looks up to `wanted` chains up.
    #[inline]
    fn look_up(&mut self, wanted: u16) {
        let net_header_bytes = self.layout.net_header_bytes;
        let is_buffer = |head: Descriptor| {
            head.flags.known() == DescFlags::WRITE && head.len >= net_header_bytes
        };
        self.device.look_up(
            self.memory,
            wanted,
            is_buffer,
            prefetch_write,
            &mut self.chains,
        );
    }

    /// Phase 3 for nearly all frames: each into the one buffer of the next
    /// chain. Stops at the first that does not fit and returns it and what is
    /// behind it.
    #[inline]
    fn frames_in_one_buffer(
        &mut self,
        batch: &Batch<'_>,
        set: FrameSet,
        report: &mut Transmitted,
    ) -> FrameSet {
        let layout = self.layout;
        let mut rest = set;
        let (mut used, mut bytes) = (0, 0);
        for &buffer in self.chains.iter() {
            let mut behind = rest;
            let Some(index) = behind.next() else { break };
            let frame = batch.frame(index);
            let Some(len) = fill_one_buffer(layout, &frame, buffer) else {
                break;
            };
            self.device.set_written(used, len);
            used += 1;
            bytes += u64::from(frame.len);
            rest = behind;
        }
        self.used = used;
        report.frames = u32::from(used);
        report.bytes = bytes;
        rest
    }

    /// Phase 3: copies one frame into the next chain, whatever it is like.
    fn frame(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        if let Some(&buffer) = self.chains.get(usize::from(self.used))
            && let Some(len) = fill_one_buffer(self.layout, frame, buffer)
        {
            self.device.set_written(self.used, len);
            self.used += 1;
            return Ok(());
        }
        self.frame_over_chains(frame)
    }

    fn frame_over_chains(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        match self.scatter(frame) {
            Ok(chains) => {
                self.used += chains;
                Ok(())
            }
            Err(Refused::Keep(reason)) => Err(reason),
            Err(Refused::Return(chains)) => {
                for offset in self.used..self.used + chains {
                    self.device.set_written(offset, 0);
                }
                self.used += chains;
                self.units += u32::from(chains);
                Err(DropReason::BadRxChain)
            }
        }
    }

    /// Fills as many chains as the frame needs, and takes none unless it fits
    /// (B-27). Buffers may be written before that is known: they are the
    /// guest's own and it does not get them.
    fn scatter(&mut self, frame: &Frame<'_>) -> Result<u16, Refused> {
        let needed = self.layout.net_header_bytes + frame.len;
        if let Some(reason) = self.known_short(needed) {
            return Err(Refused::Keep(reason));
        }
        let has_whole_walk = self.walk_left == walk_max(self.device.size());
        let mut cut = Cut::new(frame, self.layout);
        let mut rest = needed;
        let mut chains = 0;
        while rest > 0 {
            let offset = self.used + chains;
            if !self.device.has_chain(offset) {
                return Err(Refused::Keep(self.no_chain(needed - rest)));
            }
            let bytes = match self.fill_chain(offset, rest, &mut cut, chains == 0) {
                Ok(0) => return Err(self.bad_chain(ChainError::Runt, chains)),
                Ok(bytes) => bytes,
                Err(ChainError::TooLong) if self.walk_left == 0 && !has_whole_walk => {
                    // Perhaps not this chain's fault: the next call will tell.
                    return Err(Refused::Keep(DropReason::RxRingFull));
                }
                Err(error) => return Err(self.bad_chain(error, chains)),
            };
            if bytes < rest && !self.layout.mergeable {
                if bytes < self.layout.net_header_bytes {
                    return Err(self.bad_chain(ChainError::Runt, chains));
                }
                *self.short = Some(Short::Chain { offset, bytes });
                return Err(Refused::Keep(DropReason::RxBufferTooSmall));
            }
            self.device.set_written(offset, bytes);
            rest -= bytes;
            chains += 1;
        }
        cut.write_net_header(self.layout, frame, chains);
        Ok(chains)
    }

    /// Writes up to `bytes_max` bytes of a frame into one chain; returns how
    /// many.
    fn fill_chain(
        &mut self,
        offset: u16,
        bytes_max: u32,
        cut: &mut Cut<'_, 'r>,
        is_first: bool,
    ) -> Result<u32, ChainError> {
        let longest = self.device.size().min(CHAIN_LEN_MAX);
        let allowed = longest.min(self.walk_left);
        let mut walk = self.device.walk(self.memory, offset, allowed);
        let filled = fill_buffers(self.memory, &mut walk, bytes_max, cut);
        // The frame's own unit pays for its first chain.
        let (descriptors, left) = (walk.descriptors(), walk.left());
        self.units += self.device.units(offset, descriptors) - u32::from(is_first);
        self.walk_left -= allowed - left;
        filled
    }

    /// Positions come again after 65,536 chains: once chains were taken, what
    /// was short is another chain or holds less, and has to be found anew.
    fn forget_short(&mut self) {
        if self.used != 0 {
            *self.short = None;
        }
    }

    /// Why a frame of `needed` bytes with its net header need not be tried.
    fn known_short(&mut self, needed: u32) -> Option<DropReason> {
        match (*self.short)? {
            Short::Ring { end, bytes } => {
                (needed > bytes && self.device.ends_at(end)).then_some(DropReason::RxRingFull)
            }
            Short::Chain { offset, bytes } => {
                (needed > bytes && self.used == offset).then_some(DropReason::RxBufferTooSmall)
            }
        }
    }

    /// The chain behind `filled` others cannot be used.
    fn bad_chain(&mut self, error: ChainError, filled: u16) -> Refused {
        self.chain_errors.add(error);
        Refused::Return(filled + 1)
    }

    /// Why there is no further chain. Those that are there hold `bytes`.
    fn no_chain(&mut self, bytes: u32) -> DropReason {
        if self.device.fault().is_some() {
            return DropReason::PortDown;
        }
        // Not the end as it may be by now: the driver may just have posted more.
        let end = self.device.position_behind_found();
        *self.short = Some(Short::Ring { end, bytes });
        DropReason::RxRingFull
    }
}

/// Copies net header and frame into one buffer, if they fit; returns how many
/// bytes they are. Modern drivers expect `num_buffers` 1 even without mergeable
/// buffers (section 5.1.6.4.1, B-22).
#[inline]
fn fill_one_buffer(layout: Layout, frame: &Frame<'_>, buffer: SpanMut<'_>) -> Option<u32> {
    let header_bytes = layout.net_header_bytes;
    let len = header_bytes + frame.len;
    if buffer.len() < len {
        return None;
    }
    frame.offload.write_header(header_bytes, 1, buffer);
    frame.copy_to(buffer.skip(header_bytes));
    Some(len)
}

/// A frame that is being written over several pieces, net header first.
struct Cut<'f, 'r> {
    reader: FrameReader<'f>,
    /// Where the net header goes: its `num_buffers` is known at the end. It may
    /// lie in as many pieces as it has bytes (B-09).
    net_header: ArrayVec<SpanMut<'r>, NET_HEADER_BYTES>,
    net_header_rest: u32,
}

impl<'f, 'r> Cut<'f, 'r> {
    fn new(frame: &Frame<'f>, layout: Layout) -> Self {
        Self {
            reader: frame.reader(),
            net_header: ArrayVec::new(),
            net_header_rest: layout.net_header_bytes,
        }
    }

    fn write(&mut self, piece: SpanMut<'r>) {
        let mut piece = piece;
        if self.net_header_rest > 0 {
            let part = piece.first(self.net_header_rest);
            self.net_header.push(part);
            self.net_header_rest -= part.len();
            piece = piece.skip(part.len());
        }
        self.reader.copy_to(piece);
    }

    fn write_net_header(&self, layout: Layout, frame: &Frame<'_>, num_buffers: u16) {
        let header = frame.offload.to_header(num_buffers);
        let mut rest = &header[..layout.net_header_bytes as usize];
        for part in &self.net_header {
            let (now, later) = rest.split_at(part.len() as usize);
            part.write(now);
            rest = later;
        }
    }
}

/// Writes up to `bytes_max` bytes of a frame into the buffers of one chain;
/// returns how many.
fn fill_buffers<'r>(
    memory: &'r GuestMemory,
    walk: &mut Walk<'_>,
    bytes_max: u32,
    cut: &mut Cut<'_, 'r>,
) -> Result<u32, ChainError> {
    let mut bytes = 0;
    while bytes < bytes_max
        && let Some(buffer) = walk.buffer()?
    {
        if !buffer.flags.intersects(DescFlags::WRITE) {
            return Err(ChainError::Direction);
        }
        bytes += pieces(memory, buffer, bytes_max - bytes, |piece| {
            cut.write(piece);
            Ok(())
        })?;
    }
    Ok(bytes)
}

//! Transmitting into a guest RX ring.

use std::sync::Arc;

use arrayvec::ArrayVec;
use pollux_packet::{
    BATCH_MAX, Batch, DropReason, Frame, FrameReader, FrameSet, NET_HEADER_BYTES, SpanMut,
    Transmitted,
};
use pollux_sys::prefetch_write;

use super::split::{Heads, SplitDevice};
use super::tx_ring::{prefetch_frame, units_of_chain};
use super::{Notifications, RingConfig, RingFault};
use crate::chain::{ChainError, ChainErrorCounts, Walk, pieces};
use crate::memory::{GuestMemory, Near};
use crate::spec::DescFlags;
use crate::split::{Descriptor, RingError, UsedEntry};

/// The device half of a guest RX ring.
#[derive(Debug)]
pub struct RxRing {
    memory: Arc<GuestMemory>,
    device: SplitDevice,
    layout: Layout,
    near: Near,
    /// Set by the last frame that did not fit into all chains together.
    short: Option<Short>,
    chain_errors: ChainErrorCounts,
}

/// What a ring holds that was too short for a frame: until the driver posts
/// more, frames that are longer need not be tried. Else a guest with a ring of
/// tiny buffers would cost every sender a walk over all of them for each frame
/// (B-56, B-59).
#[derive(Clone, Copy, Debug)]
struct Short {
    /// Position behind the last available chain.
    end: u16,
    /// Bytes of all chains before it; less once some are taken.
    bytes: u32,
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
        Ok(Self {
            device: SplitDevice::new(Arc::clone(&memory), config)?,
            memory,
            layout,
            near: Near::default(),
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
            heads: Heads::new(),
            found: ArrayVec::new(),
            used: 0,
            units: 0,
            memory: &self.memory,
            device: &mut self.device,
            layout: self.layout,
            near: &mut self.near,
            short: &mut self.short,
            chain_errors: &mut self.chain_errors,
        };
        filling.device.take_heads(wanted, &mut filling.heads);
        filling.look_up();
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

    /// Why the ring is broken, if it is.
    #[must_use]
    pub fn fault(&self) -> Option<RingFault> {
        self.device.fault()
    }

    /// Descriptors in the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.device.ring().size()
    }

    /// Position in the available ring, for GET_VRING_BASE: every chain before
    /// it was returned.
    #[must_use]
    pub fn base(&self) -> u16 {
        self.device.base()
    }

    /// Calls sent and suppressed.
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

/// A receive buffer after the look-up: its bytes if the chain is one writable
/// buffer (nearly always), else an empty span.
#[derive(Clone, Copy)]
struct Found<'r> {
    whole: SpanMut<'r>,
    head: Descriptor,
}

/// Why a frame did not get into the ring.
enum Refused {
    /// The chains that were tried stay available.
    Keep(DropReason),
    /// So many chains go back with length 0.
    Return(u16),
}

/// One call of [`RxRing::transmit`].
struct Filling<'r> {
    memory: &'r GuestMemory,
    device: &'r mut SplitDevice,
    layout: Layout,
    near: &'r mut Near,
    short: &'r mut Option<Short>,
    chain_errors: &'r mut ChainErrorCounts,
    heads: Heads,
    found: ArrayVec<Found<'r>, BATCH_MAX>,
    /// Chains filled or returned so far.
    used: u16,
    units: u32,
}

impl Filling<'_> {
    /// Phase 2: copies each head's descriptor, translates it and prefetches,
    /// for writing, the first bytes that it leads to.
    #[inline]
    fn look_up(&mut self) {
        let net_header_bytes = self.layout.net_header_bytes;
        let (memory, device) = (self.memory, &self.device);
        let mut near = *self.near;
        self.found.extend(self.heads.iter().map(|&index| {
            let head = device.ring().desc(index);
            if head.flags.known() == DescFlags::WRITE
                && head.len >= net_header_bytes
                && let Some(whole) = memory.span_near(&mut near, head.addr, head.len)
            {
                prefetch_frame(whole.as_ptr(), prefetch_write);
                return Found { whole, head };
            }
            let whole = SpanMut::EMPTY;
            Found { whole, head }
        }));
        *self.near = near;
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
        let slots = self.device.used_slots();
        let mut rest = set;
        let (mut chains, mut bytes) = (0, 0);
        for (found, &head) in self.found.iter().zip(&self.heads) {
            let mut behind = rest;
            let Some(index) = behind.next() else { break };
            let frame = batch.frame(index);
            let Some(len) = fill_one_buffer(layout, &frame, found.whole) else {
                break;
            };
            slots.set(
                chains,
                UsedEntry {
                    id: head.into(),
                    len,
                },
            );
            chains += 1;
            bytes += u64::from(frame.len);
            rest = behind;
        }
        self.used = chains;
        report.frames = u32::from(chains);
        report.bytes = bytes;
        rest
    }

    /// Phase 3: copies one frame into the next chain, whatever it is like.
    fn frame(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        let next = usize::from(self.used);
        if let Some(found) = self.found.get(next)
            && let Some(len) = fill_one_buffer(self.layout, frame, found.whole)
        {
            self.set_used(self.used, self.heads[next], len);
            self.used += 1;
            return Ok(());
        }
        self.frame_over_chains(frame)
    }

    fn set_used(&self, offset: u16, head: u16, len: u32) {
        let entry = UsedEntry {
            id: head.into(),
            len,
        };
        self.device.used_slots().set(offset, entry);
    }

    fn frame_over_chains(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        match self.scatter(frame) {
            Ok(chains) => {
                self.used += chains;
                Ok(())
            }
            Err(Refused::Keep(reason)) => Err(reason),
            Err(Refused::Return(chains)) => {
                for _ in 0..chains {
                    // Chains already filled for this frame go back unused too;
                    // their heads were in range a moment ago.
                    let head = self.head(self.used).unwrap_or_default();
                    self.set_used(self.used, head, 0);
                    self.used += 1;
                }
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
        if let Some(short) = *self.short
            && needed > short.bytes
            && self.device.avail_end() == short.end
        {
            return Err(Refused::Keep(DropReason::RxRingFull));
        }
        let mut cut = Cut::new(frame, self.layout);
        let mut rest = needed;
        let mut chains = 0;
        // Not for each chain: chains that share descriptors, which no driver
        // makes, would multiply (B-56).
        let mut buffers_max = self.device.ring().size();
        while rest > 0 {
            let offset = self.used + chains;
            let Some((head, first)) = self.chain(offset) else {
                return Err(Refused::Keep(self.no_chain(offset, needed - rest)));
            };
            let mut walk = Walk::new(self.memory, self.device.ring(), first, buffers_max);
            let filled = fill_chain(self.memory, &mut walk, rest, &mut cut);
            buffers_max = walk.left();
            // The frame's own unit pays for the first chain.
            self.units += units_of_chain(walk.descriptors()) - u32::from(chains == 0);
            let bytes = match filled {
                Ok(0) => return Err(self.bad_chain(ChainError::Runt, chains)),
                Ok(bytes) => bytes,
                Err(error) => return Err(self.bad_chain(error, chains)),
            };
            if bytes < rest && !self.layout.mergeable {
                if bytes < self.layout.net_header_bytes {
                    return Err(self.bad_chain(ChainError::Runt, chains));
                }
                return Err(Refused::Keep(DropReason::RxBufferTooSmall));
            }
            self.set_used(offset, head, bytes);
            rest -= bytes;
            chains += 1;
        }
        cut.write_net_header(self.layout, frame, chains);
        Ok(chains)
    }

    fn bad_chain(&mut self, error: ChainError, chains_before: u16) -> Refused {
        self.chain_errors.add(error);
        Refused::Return(chains_before + 1)
    }

    /// Why there is no chain `offset` behind the next one. Those before it hold
    /// `bytes`.
    fn no_chain(&mut self, offset: u16, bytes: u32) -> DropReason {
        if self.device.fault().is_some() {
            return DropReason::PortDown;
        }
        // Not the end as it may be by now: the driver may just have posted more.
        let end = self.device.base().wrapping_add(offset);
        *self.short = Some(Short { end, bytes });
        DropReason::RxRingFull
    }

    /// Head and first descriptor of the chain `offset` behind the next one.
    fn chain(&mut self, offset: u16) -> Option<(u16, Descriptor)> {
        let head = self.head(offset)?;
        let first = match self.found.get(usize::from(offset)) {
            Some(found) => found.head,
            None => self.device.ring().desc(head),
        };
        Some((head, first))
    }

    /// The head `offset` behind the next one, if it is available.
    fn head(&mut self, offset: u16) -> Option<u16> {
        match self.heads.get(usize::from(offset)) {
            Some(&head) => Some(head),
            None if self.device.available(offset + 1) > offset => self.device.head(offset),
            None => None,
        }
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
struct Cut<'f> {
    reader: FrameReader<'f>,
    /// Where the net header goes: its `num_buffers` is known at the end. It may
    /// lie in as many pieces as it has bytes (B-09).
    net_header: ArrayVec<SpanMut<'f>, NET_HEADER_BYTES>,
    net_header_rest: u32,
}

impl<'f> Cut<'f> {
    fn new(frame: &Frame<'f>, layout: Layout) -> Self {
        Self {
            reader: frame.reader(),
            net_header: ArrayVec::new(),
            net_header_rest: layout.net_header_bytes,
        }
    }

    fn write(&mut self, piece: SpanMut<'f>) {
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

/// Writes up to `bytes_max` bytes of a frame into one chain; returns how many.
fn fill_chain<'r>(
    memory: &'r GuestMemory,
    walk: &mut Walk<'_>,
    bytes_max: u32,
    cut: &mut Cut<'r>,
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

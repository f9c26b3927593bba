//! Transmitting into a guest RX ring.

use std::sync::Arc;

use arrayvec::ArrayVec;
use pollux_packet::{
    BATCH_MAX, Batch, DropReason, Frame, FrameReader, FrameSet, HEAD_BYTES, NET_HEADER_BYTES,
    NET_HEADER_LEGACY_BYTES, SpanMut, Transmitted,
};
use pollux_sys::prefetch_write;

use super::split::{Heads, SplitDevice};
use super::tx_ring::units_of_chain;
use super::{Notifications, RingConfig, RingFault};
use crate::chain::{ChainError, ChainErrorCounts, Walk, pieces};
use crate::memory::GuestMemory;
use crate::spec::DescFlags;
use crate::split::{Descriptor, RingError};

/// The device half of a guest RX ring.
#[derive(Debug)]
pub struct RxRing {
    memory: Arc<GuestMemory>,
    device: SplitDevice,
    layout: Layout,
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
            heads: self.device.take_heads(wanted),
            found: ArrayVec::new(),
            used: 0,
            units: 0,
            memory: &self.memory,
            device: &mut self.device,
            layout: self.layout,
            short: &mut self.short,
            chain_errors: &mut self.chain_errors,
        };
        filling.look_up();
        for index in set {
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
        let written_bytes = self.layout.net_header_bytes + HEAD_BYTES;
        for &index in &self.heads {
            let head = self.device.ring().desc(index);
            let mut whole = SpanMut::EMPTY;
            if head.flags.known() == DescFlags::WRITE
                && head.len >= self.layout.net_header_bytes
                && let Some(span) = self.memory.span(head.addr, head.len)
            {
                whole = span;
                prefetch_write(whole.as_ptr());
                let last = whole.len().min(written_bytes) - 1;
                prefetch_write(whole.skip(last).as_ptr());
            }
            self.found.push(Found { whole, head });
        }
    }

    /// Phase 3: copies one frame into the next chain.
    #[inline]
    fn frame(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        let needed = self.layout.net_header_bytes + frame.len;
        let next = usize::from(self.used);
        if let Some(found) = self.found.get(next)
            && found.whole.len() >= needed
        {
            write_net_header(self.layout, frame, 1, found.whole);
            frame.copy_to(found.whole.skip(self.layout.net_header_bytes));
            self.device.set_used(self.used, self.heads[next], needed);
            self.used += 1;
            return Ok(());
        }
        self.frame_over_chains(frame, needed)
    }

    #[cold]
    fn frame_over_chains(&mut self, frame: &Frame<'_>, needed: u32) -> Result<(), DropReason> {
        match self.scatter(frame, needed) {
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
                    self.device.set_used(self.used, head, 0);
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
    fn scatter(&mut self, frame: &Frame<'_>, needed: u32) -> Result<u16, Refused> {
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
            self.device.set_used(offset, head, bytes);
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

/// Writes the net header of a frame that lies in one buffer. Modern drivers
/// expect `num_buffers` 1 even without mergeable buffers (section 5.1.6.4.1,
/// B-22).
#[inline]
fn write_net_header(layout: Layout, frame: &Frame<'_>, num_buffers: u16, to: SpanMut<'_>) {
    let header = frame.offload.to_header(num_buffers);
    if layout.net_header_bytes == 12 {
        to.write(&header);
    } else {
        to.write(&header[..NET_HEADER_LEGACY_BYTES]);
    }
}

//! Receiving from a guest TX ring.

use std::fmt;
use std::sync::Arc;

use arrayvec::ArrayVec;
use pollux_packet::{
    BATCH_MAX, Batch, BatchStore, BurstLimit, DropReason, ETHERNET_HEADER_BYTES, FRAME_BYTES_MAX,
    NET_HEADER_BYTES, Offload, OpenFrame, Span, SpansFull,
};
use pollux_sys::{EventFd, prefetch_read};

use super::ring::{Chains, DeviceRing};
use super::{Notifications, RingConfig, RingFault};
use crate::chain::{ChainError, ChainErrorCounts, Walk, pieces};
use crate::memory::GuestMemory;
use crate::ring::{Descriptor, RingAreas, RingError};
use crate::spec::DescFlags;

/// Pieces that a burst can hold beyond the ring size: buffers that lie over two
/// regions are two.
const SPARE_PIECES: usize = 64;

/// The device half of a guest TX ring.
#[derive(Debug)]
pub struct TxRing {
    memory: Arc<GuestMemory>,
    store: BatchStore,
    returns: Returns,
    net_header_bytes: u32,
    /// Nothing is to be received: see [`set_discard`](Self::set_discard).
    discards: bool,
}

/// Frames of one burst, and the chains that they came in.
///
/// Nothing is taken from the ring before [`finish`](Self::finish): a burst that
/// is dropped is received again. No frame is of use after its burst was
/// finished, since the guest has its buffers again:
///
/// ```compile_fail,E0505
/// # use pollux_virtio::device::{BurstLimit, TxRing};
/// fn late(ring: &mut TxRing) -> u32 {
///     let burst = ring.receive(BurstLimit::MAX);
///     let frame = burst.batch.frame(0);
///     burst.finish(1); // error: moved while borrowed
///     frame.len
/// }
/// ```
///
/// nor does a second burst start while a frame of the first is in use:
///
/// ```compile_fail,E0499
/// # use pollux_virtio::device::{BurstLimit, TxRing};
/// fn two(ring: &mut TxRing) -> usize {
///     let first = ring.receive(BurstLimit::MAX);
///     let second = ring.receive(BurstLimit::MAX); // error: second mutable borrow
///     first.batch.len() + second.batch.len()
/// }
/// ```
#[derive(Debug)]
pub struct Burst<'q> {
    /// The frames, in order of arrival.
    pub batch: Batch<'q>,
    returns: &'q mut Returns,
}

impl<'q> Burst<'q> {
    /// What is to go back to the guest.
    #[must_use]
    pub fn returns(&self) -> &Returns {
        self.returns
    }

    /// Ends the burst: [`Returns::finish`]. Tells what went back.
    #[inline]
    pub fn finish(self, frames: usize) -> &'q Returns {
        self.returns.finish(frames);
        self.returns
    }

    /// The frames and what must be [finished](Returns::finish) after them, for
    /// ports that wrap a ring.
    #[inline]
    #[must_use]
    pub fn into_parts(self) -> (Batch<'q>, &'q mut Returns) {
        (self.batch, self.returns)
    }
}

/// The chains of a burst and the ring that they go back to.
pub struct Returns {
    device: DeviceRing,
    /// Between a burst and its return.
    is_open: bool,
    /// Chains that were looked at; those behind stay available.
    chains: u16,
    units: u32,
    /// Chains that gave no frame, ascending.
    rejected: ArrayVec<(u16, Rejected), BATCH_MAX>,
    chain_errors: ChainErrorCounts,
}

impl TxRing {
    /// Starts the device half of a guest TX ring.
    ///
    /// # Errors
    /// If the ring's areas are not whole and aligned in guest memory.
    pub fn new(memory: Arc<GuestMemory>, config: RingConfig) -> Result<Self, RingError> {
        let net_header_bytes = config.features.net_header_bytes();
        let store = store_for(&memory, config.areas.size);
        let device = DeviceRing::new(Arc::clone(&memory), config, BurstLimit::MAX.frames)?;
        Ok(Self {
            store,
            returns: Returns {
                device,
                is_open: false,
                chains: 0,
                units: 0,
                rejected: ArrayVec::new(),
                chain_errors: ChainErrorCounts::default(),
            },
            memory,
            net_header_bytes,
            discards: false,
        })
    }

    /// Receives one burst. An empty one (no chain) means that nothing is there
    /// or that the ring is broken: see [`fault`](Self::fault).
    #[inline]
    pub fn receive(&mut self, limit: BurstLimit) -> Burst<'_> {
        let Self {
            memory,
            store,
            returns,
            net_header_bytes,
            discards,
        } = self;
        let mut batch = store.begin();
        returns.clear();
        let wanted = limit.frames.clamp(1, BurstLimit::MAX.frames);
        let mut chains = Chains::new();
        returns.look_up(memory, wanted, *net_header_bytes, &mut chains);
        if chains.is_empty() {
            return Burst { batch, returns };
        }
        if *discards {
            returns.discard(chains.len());
            return Burst { batch, returns };
        }
        returns.snapshot(memory, &chains, &mut batch, limit, *net_header_bytes);
        if !returns.device.is_whole() {
            // What was read may be zeros in the place of the guest's bytes.
            batch.clear();
            returns.clear();
        }
        Burst { batch, returns }
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
        let store = store_for(&memory, areas.size);
        self.returns.device.relocate(Arc::clone(&memory), areas)?;
        self.memory = memory;
        self.store = store;
        Ok(())
    }

    /// Changes whom the ring calls, and returns whom it called until now. The
    /// next publication calls.
    pub fn set_call(&mut self, call: Option<EventFd>) -> Option<EventFd> {
        self.returns.device.set_call(call)
    }

    /// Whether every chain goes back without its frame, counted as
    /// [`DropReason::QueueDisabled`]: a ring that the frontend has disabled
    /// (vhost-user, "Ring states": started but disabled).
    pub fn set_discard(&mut self, discards: bool) {
        self.discards = discards;
    }

    /// Why the ring is broken, if it is.
    #[must_use]
    pub fn fault(&self) -> Option<RingFault> {
        self.returns.device.fault()
    }

    /// Descriptors in the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.returns.device.size()
    }

    /// Position in the available ring, for GET_VRING_BASE: every chain before
    /// it was returned.
    #[must_use]
    pub fn base(&self) -> u16 {
        self.returns.device.position()
    }

    /// Calls sent and suppressed, kicks seen.
    #[must_use]
    pub fn notifications(&self) -> Notifications {
        self.returns.device.notifications()
    }

    /// How often each kind of unusable chain was met.
    #[must_use]
    pub fn chain_errors(&self) -> ChainErrorCounts {
        self.returns.chain_errors
    }

    /// Asks for a kick on the next chain, before sleeping. True if there is a
    /// chain already: do not sleep.
    pub fn request_kick(&mut self) -> bool {
        self.returns.device.request_kick()
    }

    /// Back to polling: kicks cost the guest an exit and are not needed.
    pub fn suppress_kicks(&mut self) {
        self.returns.device.suppress_kicks();
    }
}

impl Returns {
    #[inline]
    fn clear(&mut self) {
        self.is_open = false;
        self.chains = 0;
        self.units = 0;
        self.rejected.clear();
    }

    /// Phases 1 and 2: looks up to `wanted` chains up.
    #[inline]
    fn look_up<'q>(
        &mut self,
        memory: &'q GuestMemory,
        wanted: u16,
        net_header_bytes: u32,
        chains: &mut Chains<'q>,
    ) {
        let len_min = net_header_bytes + ETHERNET_HEADER_BYTES;
        let len_span = FRAME_BYTES_MAX - ETHERNET_HEADER_BYTES;
        let is_frame = |head: Descriptor| {
            head.flags.known() == DescFlags::default() && head.len.wrapping_sub(len_min) <= len_span
        };
        self.device
            .look_up(memory, wanted, is_frame, prefetch_read, chains);
    }

    /// Phase 3: copies each net header and head, and judges the copies.
    #[inline]
    fn snapshot<'q>(
        &mut self,
        memory: &'q GuestMemory,
        found: &Chains<'q>,
        batch: &mut Batch<'q>,
        limit: BurstLimit,
        net_header_bytes: u32,
    ) {
        let (mut chains, mut units) = (0, 0);
        for whole in found.iter() {
            let (pushed, cost) = if whole.is_empty() {
                let mut walk = self.device.walk(memory, chains, self.device.size());
                let pushed = push_chain(memory, &mut walk, batch, net_header_bytes);
                (pushed, self.device.units(chains, walk.descriptors()))
            } else {
                (push_whole(whole.as_span(), batch, net_header_bytes), 1)
            };
            if let Err(rejected) = pushed {
                if rejected == Rejected::Chain(ChainError::TooManyPieces) && chains > 0 {
                    // The pieces of this chain do not fit behind those of the
                    // frames before it: it comes first in the next burst.
                    break;
                }
                self.rejected.push((chains, rejected));
            }
            units += cost;
            chains += 1;
            if units >= limit.units || batch.bytes() >= limit.bytes {
                break;
            }
        }
        (self.chains, self.units, self.is_open) = (chains, units, true);
    }

    /// In place of phase 3: none of the chains gives a frame.
    #[cold]
    fn discard(&mut self, chains: usize) {
        self.chains = u16::try_from(chains).unwrap_or(u16::MAX);
        self.units = (0..self.chains)
            .map(|chain| self.device.units(chain, 1))
            .sum();
        self.rejected
            .extend((0..self.chains).map(|chain| (chain, Rejected::Disabled)));
        self.is_open = true;
    }

    /// Chains that were looked at, frames and drops; after
    /// [`finish`](Self::finish), chains that went back.
    #[inline]
    #[must_use]
    pub fn chains(&self) -> u32 {
        u32::from(self.chains)
    }

    /// Why each chain without a frame was dropped; after
    /// [`finish`](Self::finish), of those that went back.
    #[inline]
    pub fn drops(&self) -> impl Iterator<Item = DropReason> + '_ {
        self.rejected.iter().map(|&(_, rejected)| rejected.reason())
    }

    /// Work units spent on receiving.
    #[inline]
    #[must_use]
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Gives the chains back to the guest, up to but without that of frame
    /// `frames`; all of them if `frames` is the length of the batch. Later
    /// chains stay available and come first in the next burst.
    ///
    /// The guest sees all of them at once: one index store, one decision
    /// whether to call. A second call does nothing.
    #[inline]
    pub fn finish(&mut self, frames: usize) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let chain = self.chain_of_frame(frames);
        if chain < self.chains {
            self.chains = chain;
            self.rejected.retain(|&mut (rejected, _)| rejected < chain);
        }
        // The device wrote nothing to a TX chain (B-21).
        self.device.publish_unwritten(self.chains);
        for &(_, rejected) in &self.rejected {
            // Not before they go back: a chain that stays is judged again.
            if let Rejected::Chain(error) = rejected {
                self.chain_errors.add(error);
            }
        }
    }

    /// The chain that frame `index` came in: rejected chains come in between.
    #[inline]
    fn chain_of_frame(&self, index: usize) -> u16 {
        let mut chain = u16::try_from(index).unwrap_or(u16::MAX);
        for &(rejected, _) in &self.rejected {
            if rejected > chain {
                break;
            }
            chain = chain.saturating_add(1);
        }
        chain
    }
}

impl fmt::Debug for Returns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returns")
            .field("device", &self.device)
            .field("chains", &self.chains)
            .field("units", &self.units)
            .finish_non_exhaustive()
    }
}

/// Why a chain gives no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rejected {
    Chain(ChainError),
    /// The chain is sound, its net header asks for what was not negotiated.
    Offload,
    /// The ring is disabled: the chain was not looked at.
    Disabled,
}

impl Rejected {
    fn reason(self) -> DropReason {
        match self {
            Self::Offload => DropReason::BadOffload,
            Self::Disabled => DropReason::QueueDisabled,
            Self::Chain(ChainError::Runt) => DropReason::Runt,
            Self::Chain(ChainError::Oversize) => DropReason::Oversize,
            Self::Chain(_) => DropReason::BadChain,
        }
    }
}

/// Room for the pieces of a burst from a ring of `size` descriptors.
fn store_for(memory: &GuestMemory, size: u16) -> BatchStore {
    BatchStore::new(2 * usize::from(size) + SPARE_PIECES + memory.regions().len())
}

/// Adds the frame of a chain that is one buffer.
#[inline]
fn push_whole<'q>(
    whole: Span<'q>,
    batch: &mut Batch<'q>,
    net_header_bytes: u32,
) -> Result<(), Rejected> {
    // `num_buffers` is not used in this direction, so 10 bytes or 12 are one.
    let header = whole.snapshot_array::<NET_HEADER_BYTES>();
    if Offload::from_header(&header).is_requested() {
        return Err(Rejected::Offload);
    }
    batch
        .push(Offload::default(), whole.skip(net_header_bytes))
        .map_err(|SpansFull| Rejected::Chain(ChainError::TooManyPieces))
}

/// Follows a chain of several buffers and adds its frame.
fn push_chain<'q>(
    memory: &'q GuestMemory,
    walk: &mut Walk<'_>,
    batch: &mut Batch<'q>,
    net_header_bytes: u32,
) -> Result<(), Rejected> {
    let mut open = batch.open();
    let offload = gather(memory, walk, &mut open, net_header_bytes).map_err(Rejected::Chain)?;
    if offload.is_requested() {
        return Err(Rejected::Offload);
    }
    open.close(Offload::default());
    Ok(())
}

/// Collects the pieces of a chain and takes the net header off, wherever it
/// ends (B-25).
fn gather<'q>(
    memory: &'q GuestMemory,
    walk: &mut Walk<'_>,
    open: &mut OpenFrame<'_, 'q>,
    net_header_bytes: u32,
) -> Result<Offload, ChainError> {
    let bytes_max = net_header_bytes + FRAME_BYTES_MAX;
    let mut bytes = 0;
    while let Some(buffer) = walk.buffer()? {
        // DPDK's driver says WRITE of the net header in a packed ring's indirect
        // table (22.11, `vring_desc_init_indirect_packed`). We only read.
        if buffer.flags.intersects(DescFlags::WRITE) && !walk.is_in_packed_table() {
            return Err(ChainError::Direction);
        }
        if buffer.len > bytes_max - bytes {
            return Err(ChainError::Oversize);
        }
        bytes += pieces(memory, buffer, buffer.len, |piece| {
            open.add(piece.as_span())
                .map_err(|SpansFull| ChainError::TooManyPieces)
        })?;
    }
    if bytes < net_header_bytes + ETHERNET_HEADER_BYTES {
        return Err(ChainError::Runt);
    }
    let mut header = [0; NET_HEADER_BYTES];
    open.take_front(&mut header[..net_header_bytes as usize]);
    Ok(Offload::from_header(&header))
}

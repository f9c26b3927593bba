//! Ethernet frames through the driver half of a guest's rings.

use std::sync::Arc;

use pollux_packet::{NET_HEADER_BYTES, NET_HEADER_LEGACY_BYTES, Offload, Span, SpanMut};

use super::ring::{Buffer, DriverError, DriverRing, Used};
use crate::memory::{GuestMemory, Place};
use crate::ring::{RingAreas, RingError};
use crate::spec::{DESC_BYTES, Features};

/// Where the ring and the buffers of a guest's queue lie.
#[derive(Clone, Copy, Debug)]
pub struct NetConfig {
    /// The ring.
    pub areas: RingAreas,
    /// What was negotiated.
    pub features: Features,
    /// Position to start at on both sides.
    pub base: u16,
    /// First buffer (guest address); one follows the other, one for each
    /// descriptor.
    pub buffers_addr: u64,
    /// Bytes of a buffer, net header included.
    pub buffer_bytes: u32,
    /// First indirect table (guest address), one for each descriptor; needed
    /// for shapes that are indirect.
    pub tables_addr: u64,
    /// Descriptors of an indirect table.
    pub table_len: u16,
}

/// Why a frame cannot be sent or a queue cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// The ring's areas are unusable.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The ring refused the chain.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Buffers or tables are not in guest memory.
    #[error("buffers at guest address {0:#x} are outside guest memory")]
    Buffers(u64),
    /// The chain does not fit its buffer.
    #[error("a chain of {bytes} bytes does not fit a buffer of {buffer_bytes}")]
    TooLong {
        /// Bytes of net header, frame and gaps.
        bytes: u64,
        /// Bytes of a buffer.
        buffer_bytes: u32,
    },
}

/// How net header and frame are cut into buffers: at these lengths, and what is
/// left in one more. The pieces do not touch each other in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainShape<'a> {
    /// Bytes of each buffer but the last; 0 is allowed.
    pub cuts: &'a [u32],
    /// As an indirect table.
    pub indirect: bool,
}

impl ChainShape<'_> {
    /// Net header and frame in one buffer, as most drivers send.
    pub const JOINED: Self = Self {
        cuts: &[],
        indirect: false,
    };
}

/// Bytes between the pieces of a chain: odd, so that pieces are misaligned.
const GAP_BYTES: u32 = 3;

/// The buffers of a queue, one for each descriptor.
#[derive(Debug)]
struct Buffers {
    memory: Arc<GuestMemory>,
    /// Guest address of the first.
    first: u64,
    /// Bytes of each.
    bytes: u32,
    /// Region of the first buffer: likely that of all.
    place: Place,
}

impl Buffers {
    fn new(memory: Arc<GuestMemory>, config: &NetConfig) -> Result<Self, NetError> {
        let (first, bytes) = (config.buffers_addr, config.buffer_bytes);
        let found = memory.locate(Place::default(), first, bytes);
        let place = found.map_or(Place::NONE, |(place, _)| place);
        let buffers = Self {
            memory,
            first,
            bytes,
            place,
        };
        for head in 0..config.areas.size {
            let outside = NetError::Buffers(buffers.addr(head));
            buffers.start(head, bytes).ok_or(outside)?;
        }
        Ok(buffers)
    }

    #[inline]
    fn addr(&self, head: u16) -> u64 {
        self.first + u64::from(head) * u64::from(self.bytes)
    }

    #[inline]
    fn whole(&self, head: u16) -> SpanMut<'_> {
        let whole = self.start(head, self.bytes);
        whole.expect("checked when the queue started")
    }

    /// The first `len` bytes of a buffer.
    #[inline]
    fn start(&self, head: u16, len: u32) -> Option<SpanMut<'_>> {
        let addr = self.addr(head);
        self.memory
            .span_in(self.place, addr, len)
            .or_else(|| self.memory.span(addr, len))
    }
}

#[derive(Debug)]
struct Queue {
    ring: DriverRing,
    buffers: Buffers,
    net_header_bytes: u32,
    config: NetConfig,
    /// Reused for chains of several buffers.
    chain: Vec<Buffer>,
}

impl Queue {
    fn new(memory: Arc<GuestMemory>, config: NetConfig) -> Result<Self, NetError> {
        let NetConfig {
            areas,
            features,
            base,
            ..
        } = config;
        Ok(Self {
            ring: DriverRing::new(Arc::clone(&memory), areas, features, base)?,
            buffers: Buffers::new(memory, &config)?,
            net_header_bytes: features.net_header_bytes(),
            config,
            chain: Vec::new(),
        })
    }

    /// Lays `bytes` out in the next head's buffer as `shape` says and fills
    /// `self.chain`; returns the head.
    fn lay_out(
        &mut self,
        bytes: u32,
        shape: ChainShape<'_>,
        writable: bool,
    ) -> Result<u16, NetError> {
        let head = self.ring.next_head().ok_or(DriverError::Full)?;
        let mut addr = self.buffers.addr(head);
        let mut rest = bytes;
        self.chain.clear();
        for &cut in shape.cuts {
            let len = cut.min(rest);
            self.chain.push(Buffer {
                addr,
                len,
                writable,
            });
            addr += u64::from(len + GAP_BYTES);
            rest -= len;
        }
        if rest > 0 || self.chain.is_empty() {
            self.chain.push(Buffer {
                addr,
                len: rest,
                writable,
            });
        }
        let end = addr + u64::from(rest) - self.buffers.addr(head);
        if end > u64::from(self.config.buffer_bytes) {
            return Err(NetError::TooLong {
                bytes: end,
                buffer_bytes: self.config.buffer_bytes,
            });
        }
        Ok(head)
    }

    /// Puts `self.chain` into the ring.
    fn add_chain(&mut self, head: u16, shape: ChainShape<'_>) -> Result<(), NetError> {
        let added = if shape.indirect {
            let table_bytes = u64::from(DESC_BYTES) * u64::from(self.config.table_len);
            if self.chain.len() > usize::from(self.config.table_len) {
                return Err(DriverError::Full.into());
            }
            let table = self.config.tables_addr + u64::from(head) * table_bytes;
            self.ring.add_indirect(table, &self.chain)?
        } else {
            self.ring.add(&self.chain)?
        };
        debug_assert_eq!(added, head);
        Ok(())
    }
}

/// The driver half of a guest TX ring: it sends frames.
#[derive(Debug)]
pub struct TxRing {
    queue: Queue,
}

impl TxRing {
    /// Clears the ring and starts.
    ///
    /// # Errors
    /// If ring or buffers are not whole in guest memory.
    pub fn new(memory: Arc<GuestMemory>, config: NetConfig) -> Result<Self, NetError> {
        Ok(Self {
            queue: Queue::new(memory, config)?,
        })
    }

    /// The ring below, for notifications and positions.
    pub fn ring(&mut self) -> &mut DriverRing {
        &mut self.queue.ring
    }

    /// Gives the frame part of every buffer to `fill` once, for generators
    /// whose frames stay the same.
    pub fn prepare(&mut self, mut fill: impl FnMut(u16, SpanMut<'_>)) {
        for head in 0..self.queue.ring.size() {
            let buffer = self.queue.buffers.whole(head);
            fill(head, buffer.skip(self.queue.net_header_bytes));
        }
    }

    /// Sends up to `count` frames of `frame_bytes` from joined buffers, as many
    /// as are free; `fill` may write each frame. The device sees them after
    /// [`publish`](Self::publish). Returns how many.
    ///
    /// # Panics
    /// If the frame does not fit a buffer.
    #[inline]
    pub fn send_batch(
        &mut self,
        count: u16,
        frame_bytes: u32,
        mut fill: impl FnMut(SpanMut<'_>),
    ) -> u16 {
        let Queue {
            ring,
            buffers,
            net_header_bytes,
            ..
        } = &mut self.queue;
        let len = *net_header_bytes + frame_bytes;
        ring.add_many(count, |head| {
            let buffer = buffers.whole(head);
            Offload::default().write_header(*net_header_bytes, 0, buffer);
            assert!(len <= buffer.len(), "the frame does not fit a buffer");
            fill(buffer.skip(*net_header_bytes).first(frame_bytes));
            Buffer {
                addr: buffers.addr(head),
                len,
                writable: false,
            }
        })
    }

    /// Sends one frame in a chain of any shape, with an empty net header.
    ///
    /// # Errors
    /// If descriptors or the buffer do not suffice.
    pub fn send(&mut self, frame: &[u8], shape: ChainShape<'_>) -> Result<(), NetError> {
        self.send_with_header(&[0; NET_HEADER_BYTES], frame, shape)
    }

    /// Sends one frame with a net header of the caller's, of which as many
    /// bytes are used as were negotiated.
    ///
    /// # Errors
    /// If descriptors or the buffer do not suffice.
    pub fn send_with_header(
        &mut self,
        header: &[u8; NET_HEADER_BYTES],
        frame: &[u8],
        shape: ChainShape<'_>,
    ) -> Result<(), NetError> {
        let header = &header[..self.queue.net_header_bytes as usize];
        let bytes = u32::try_from(header.len() + frame.len()).unwrap_or(u32::MAX);
        let head = self.queue.lay_out(bytes, shape, false)?;
        let mut source = header.iter().chain(frame).copied();
        for buffer in &self.queue.chain {
            let piece: Vec<u8> = source.by_ref().take(buffer.len as usize).collect();
            self.queue
                .buffers
                .memory
                .write(buffer.addr, &piece)
                .ok_or(NetError::Buffers(buffer.addr))?;
        }
        self.queue.add_chain(head, shape)
    }

    /// Shows the device what was sent. True if it asks for a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.queue.ring.publish()
    }

    /// Takes back what the device has sent on; returns how many frames.
    ///
    /// # Errors
    /// If the device returned what is not out.
    #[inline]
    pub fn reclaim(&mut self) -> Result<u32, DriverError> {
        let mut count = 0;
        while self.queue.ring.take_used()?.is_some() {
            count += 1;
        }
        Ok(count)
    }
}

/// A frame that the guest received.
#[derive(Debug)]
pub struct Received<'a> {
    /// The net header.
    pub header: [u8; NET_HEADER_BYTES],
    /// The frame, in the pieces in which it lies.
    pub pieces: &'a [Span<'a>],
    /// Buffers that it fills.
    pub buffers: u16,
}

impl Received<'_> {
    /// `num_buffers` of the net header.
    #[must_use]
    pub fn num_buffers(&self) -> u16 {
        u16::from_le_bytes([self.header[10], self.header[11]])
    }

    /// Bytes of the frame.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.pieces.iter().map(|piece| piece.len()).sum()
    }

    /// True for a frame without a byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of the frame.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in self.pieces {
            let start = bytes.len();
            bytes.resize(start + piece.len() as usize, 0);
            piece.snapshot(&mut bytes[start..]);
        }
        bytes
    }
}

/// The driver half of a guest RX ring: it receives frames.
#[derive(Debug)]
pub struct RxRing {
    queue: Queue,
    mergeable: bool,
    /// Buffers of the chain at each head that is out; none if it is the head's
    /// own buffer, whole.
    posted: Box<[Vec<Buffer>]>,
    /// Chains that came back with length 0: the device could not use them.
    unused: u64,
}

impl RxRing {
    /// Clears the ring and starts; nothing is posted yet.
    ///
    /// # Errors
    /// If ring or buffers are not whole in guest memory.
    pub fn new(memory: Arc<GuestMemory>, config: NetConfig) -> Result<Self, NetError> {
        Ok(Self {
            queue: Queue::new(memory, config)?,
            mergeable: config.features.mergeable,
            posted: vec![Vec::new(); usize::from(config.areas.size)].into_boxed_slice(),
            unused: 0,
        })
    }

    /// The ring below, for notifications and positions.
    pub fn ring(&mut self) -> &mut DriverRing {
        &mut self.queue.ring
    }

    /// Chains that came back with length 0.
    #[must_use]
    pub fn unused(&self) -> u64 {
        self.unused
    }

    /// Posts every free buffer whole. The device sees them after
    /// [`publish`](Self::publish). Returns how many.
    #[inline]
    pub fn refill(&mut self) -> u16 {
        let Queue { ring, buffers, .. } = &mut self.queue;
        let posted = &mut self.posted;
        ring.add_many(u16::MAX, |head| {
            let posted = &mut posted[usize::from(head)];
            if !posted.is_empty() {
                posted.clear();
            }
            Buffer {
                addr: buffers.addr(head),
                len: buffers.bytes,
                writable: true,
            }
        })
    }

    /// Posts one chain of `bytes`, cut as `shape` says.
    ///
    /// # Errors
    /// If descriptors or the buffer do not suffice.
    pub fn post(&mut self, bytes: u32, shape: ChainShape<'_>) -> Result<(), NetError> {
        let head = self.queue.lay_out(bytes, shape, true)?;
        self.posted[usize::from(head)].clone_from(&self.queue.chain);
        self.queue.add_chain(head, shape)
    }

    /// Shows the device what was posted. True if it asks for a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.queue.ring.publish()
    }

    /// Takes up to `max` frames. The buffers are free to be posted again after
    /// `each` has seen them. Returns how many frames there were.
    ///
    /// # Errors
    /// If the device returned what is not out, or says to have written more
    /// than the buffers hold. What it said until then is lost.
    #[inline]
    pub fn receive(
        &mut self,
        max: u32,
        mut each: impl FnMut(Received<'_>),
    ) -> Result<u32, DriverError> {
        let mut frames = 0;
        while frames < max {
            let Some(used) = self.queue.ring.take_used()? else {
                break;
            };
            if used.len == 0 {
                self.unused += 1;
                continue;
            }
            let is_whole = self.posted[usize::from(used.head)].is_empty();
            let fits = used.len <= self.queue.config.buffer_bytes;
            if is_whole && fits && used.len as usize >= NET_HEADER_BYTES {
                let span = self.queue.buffers.start(used.head, used.len);
                let span = span
                    .expect("buffers were checked when the queue started")
                    .as_span();
                let mut header = span.snapshot_array::<NET_HEADER_BYTES>();
                if self.queue.net_header_bytes as usize == NET_HEADER_LEGACY_BYTES {
                    header[NET_HEADER_LEGACY_BYTES..].fill(0);
                }
                let received = Received {
                    header,
                    pieces: &[span.skip(self.queue.net_header_bytes)],
                    buffers: 1,
                };
                if !self.mergeable || received.num_buffers() <= 1 {
                    each(received);
                    frames += 1;
                    continue;
                }
            }
            self.receive_merged(used, &mut each)?;
            frames += 1;
        }
        Ok(frames)
    }

    /// Takes a frame that lies in several buffers or chains.
    #[cold]
    fn receive_merged(
        &mut self,
        first: Used,
        each: &mut impl FnMut(Received<'_>),
    ) -> Result<(), DriverError> {
        let mut chains = vec![first];
        let mut header = [0; NET_HEADER_BYTES];
        let mut wanted = None;
        loop {
            let (pieces, buffers) = self.pieces(&chains)?;
            let (header_pieces, frame) = split_front(&pieces, self.queue.net_header_bytes);
            let mut done = 0;
            for piece in &header_pieces {
                done += piece.snapshot(&mut header[done..]);
            }
            let complete = done == self.queue.net_header_bytes as usize;
            if complete && wanted.is_none() {
                let num_buffers = u16::from_le_bytes([header[10], header[11]]);
                wanted = Some(if self.mergeable { num_buffers } else { 1 });
            }
            if wanted.is_some_and(|wanted| chains.len() >= usize::from(wanted)) {
                each(Received {
                    header,
                    pieces: &frame,
                    buffers,
                });
                return Ok(());
            }
            // The device publishes the buffers of a frame at once.
            let next = self
                .queue
                .ring
                .take_used()?
                .ok_or(DriverError::Device(u32::from(first.head)))?;
            chains.push(next);
        }
    }

    /// Where the bytes lie that the device wrote to `chains`, and how many
    /// chains they are.
    fn pieces(&self, chains: &[Used]) -> Result<(Vec<Span<'_>>, u16), DriverError> {
        let mut pieces = Vec::new();
        for used in chains {
            let mut rest = used.len;
            let own = [Buffer {
                addr: self.queue.buffers.addr(used.head),
                len: self.queue.config.buffer_bytes,
                writable: true,
            }];
            let posted = match &self.posted[usize::from(used.head)][..] {
                [] => &own,
                posted => posted,
            };
            for buffer in posted {
                let len = buffer.len.min(rest);
                rest -= len;
                if len > 0 {
                    let span = self.queue.buffers.memory.span(buffer.addr, len);
                    pieces.push(span.expect("checked when the queue started").as_span());
                }
            }
            if rest > 0 {
                return Err(DriverError::Device(u32::from(used.head)));
            }
        }
        let count = u16::try_from(chains.len()).expect("no more chains than a ring has");
        Ok((pieces, count))
    }
}

/// Parts the first `bytes` from the rest.
fn split_front<'a>(pieces: &[Span<'a>], bytes: u32) -> (Vec<Span<'a>>, Vec<Span<'a>>) {
    let (mut front, mut back) = (Vec::new(), Vec::new());
    let mut rest = bytes;
    for &piece in pieces {
        let part = piece.first(rest);
        rest -= part.len();
        if !part.is_empty() {
            front.push(part);
        }
        let part = piece.skip(part.len());
        if !part.is_empty() {
            back.push(part);
        }
    }
    (front, back)
}

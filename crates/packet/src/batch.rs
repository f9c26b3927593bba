//! A batch: up to [`BATCH_MAX`] frames received from one queue.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU8;

use crate::{BATCH_MAX, FrameSet, HEAD_BYTES, Offload, Span, SpanMut};

/// A frame that is being switched. It lives no longer than the burst it came
/// from.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'b> {
    /// What the sender asks to be done with the frame.
    pub offload: Offload,
    /// Private copy of the first bytes, at most [`HEAD_BYTES`].
    pub head: &'b [u8],
    /// The bytes behind the head, where the sender left them.
    pub body: &'b [Span<'b>],
    /// Bytes of head and body.
    pub len: u32,
}

impl<'b> Frame<'b> {
    /// Starts to copy the frame piece by piece.
    #[must_use]
    pub fn reader(&self) -> FrameReader<'b> {
        FrameReader {
            head: self.head,
            piece: Span::EMPTY,
            body: self.body,
        }
    }

    /// Copies the frame into one contiguous buffer.
    ///
    /// # Panics
    /// If `to` is shorter than the frame.
    #[inline]
    pub fn copy_to(&self, to: SpanMut<'_>) {
        to.write(self.head);
        if self.len <= HEAD_BYTES {
            return;
        }
        let mut rest = to.skip(HEAD_BYTES);
        for span in self.body {
            span.copy_to(rest);
            rest = rest.skip(span.len());
        }
    }
}

/// Copies a frame into pieces of any lengths, in order.
#[derive(Clone, Copy, Debug)]
pub struct FrameReader<'b> {
    head: &'b [u8],
    /// What is left of the piece of the body that was begun.
    piece: Span<'b>,
    body: &'b [Span<'b>],
}

impl FrameReader<'_> {
    /// Fills `to` with the next bytes of the frame; its end stays as it is if
    /// the frame ends earlier.
    pub fn copy_to(&mut self, to: SpanMut<'_>) {
        let (now, later) = self.head.split_at(self.head.len().min(to.len() as usize));
        to.write(now);
        self.head = later;
        let mut to = to.skip(u32::try_from(now.len()).expect("a head is short"));
        while !to.is_empty() {
            if self.piece.is_empty() {
                let Some((&piece, rest)) = self.body.split_first() else {
                    return;
                };
                (self.piece, self.body) = (piece, rest);
            }
            let part = self.piece.first(to.len());
            part.copy_to(to);
            self.piece = self.piece.skip(part.len());
            to = to.skip(part.len());
        }
    }
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Head([u8; HEAD_BYTES as usize]);

impl Head {
    const ZERO: Self = Self([0; HEAD_BYTES as usize]);

    /// The bytes that the frame has.
    #[inline]
    fn of(&self, meta: &Meta) -> &[u8] {
        &self.0[..meta.len.min(HEAD_BYTES) as usize]
    }
}

#[derive(Clone, Copy, Default)]
struct Meta {
    offload: Offload,
    len: u32,
    span_first: u32,
    span_count: u32,
}

/// Memory for the batches of one queue, allocated once.
pub struct BatchStore {
    heads: Box<[Head; BATCH_MAX]>,
    metas: Box<[Meta; BATCH_MAX]>,
    /// Lifetimes are erased here; [`Batch`] gives them back.
    spans: Box<[Span<'static>]>,
}

impl BatchStore {
    /// Memory for frames that lie in at most `spans_len` pieces in all, at
    /// least [`BATCH_MAX`].
    #[must_use]
    pub fn new(spans_len: usize) -> Self {
        Self {
            heads: Box::new([Head::ZERO; BATCH_MAX]),
            metas: Box::new([Meta::default(); BATCH_MAX]),
            spans: vec![Span::EMPTY; spans_len.max(BATCH_MAX)].into_boxed_slice(),
        }
    }

    /// Starts an empty batch; what an earlier batch held is gone.
    #[inline]
    pub fn begin(&mut self) -> Batch<'_> {
        Batch {
            store: self,
            frames_len: 0,
            spans_len: 0,
            bytes: 0,
            memory: PhantomData,
        }
    }
}

impl fmt::Debug for BatchStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchStore")
            .field("spans_len", &self.spans.len())
            .finish_non_exhaustive()
    }
}

/// The pieces of a frame do not fit into what is left of the [`BatchStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpansFull;

/// Up to [`BATCH_MAX`] frames whose bodies stay valid for `'q`.
pub struct Batch<'q> {
    store: &'q mut BatchStore,
    frames_len: usize,
    spans_len: usize,
    bytes: u64,
    memory: PhantomData<&'q [AtomicU8]>,
}

impl<'q> Batch<'q> {
    /// Forgets every frame.
    pub fn clear(&mut self) {
        self.frames_len = 0;
        self.spans_len = 0;
        self.bytes = 0;
    }

    /// Number of frames.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames_len
    }

    /// True without a frame.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames_len == 0
    }

    /// Bytes of all frames.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the first `count` frames.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    #[must_use]
    pub fn bytes_of_first(&self, count: usize) -> u64 {
        if count == self.frames_len {
            return self.bytes;
        }
        (0..count)
            .map(|index| u64::from(self.frame_bytes(index)))
            .sum()
    }

    /// Every frame.
    #[inline]
    #[must_use]
    pub fn all(&self) -> FrameSet {
        FrameSet::first(self.frames_len)
    }

    /// Private copy of the first bytes of frame `index`.
    ///
    /// # Panics
    /// If there is no such frame.
    #[inline]
    #[must_use]
    pub fn head(&self, index: usize) -> &[u8] {
        let (head, meta) = self.parts(index);
        head.of(meta)
    }

    /// The heads of all frames, in order.
    #[inline]
    pub fn heads(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        let heads = self.store.heads.iter().zip(self.store.metas.iter());
        heads
            .take(self.frames_len)
            .map(|(head, meta)| head.of(meta))
    }

    /// Length of frame `index` in bytes.
    ///
    /// # Panics
    /// If there is no such frame.
    #[inline]
    #[must_use]
    pub fn frame_bytes(&self, index: usize) -> u32 {
        self.parts(index).1.len
    }

    /// Frame `index`.
    ///
    /// # Panics
    /// If there is no such frame.
    #[inline]
    #[must_use]
    pub fn frame(&self, index: usize) -> Frame<'_> {
        let (head, meta) = self.parts(index);
        let first = meta.span_first as usize;
        let body = if meta.span_count == 0 {
            &[]
        } else {
            &self.store.spans[first..first + meta.span_count as usize]
        };
        Frame {
            offload: meta.offload,
            head: head.of(meta),
            body,
            len: meta.len,
        }
    }

    /// What is stored of frame `index`. What an earlier batch left behind it
    /// must not be reached: its spans may lead nowhere.
    #[inline]
    fn parts(&self, index: usize) -> (&Head, &Meta) {
        assert!(index < self.frames_len, "no such frame in the batch");
        // `frames_len <= BATCH_MAX`, which the compiler does not know.
        let index = index % BATCH_MAX;
        (&self.store.heads[index], &self.store.metas[index])
    }

    /// Adds a frame that lies in one piece and takes the snapshot of its head.
    ///
    /// # Errors
    /// If the store has no room for the piece: frames of many pieces came
    /// before.
    ///
    /// # Panics
    /// If the batch is full.
    #[inline]
    pub fn push(&mut self, offload: Offload, frame: Span<'q>) -> Result<(), SpansFull> {
        let index = self.frames_len;
        let head = &mut self.store.heads[index].0;
        let len = frame.len();
        let span_first = self.spans_len;
        let mut span_count = 0;
        if len >= HEAD_BYTES {
            frame.snapshot(head);
        } else {
            frame.snapshot(&mut head[..len as usize]);
        }
        if len > HEAD_BYTES {
            let slot = self.store.spans.get_mut(span_first).ok_or(SpansFull)?;
            *slot = erase(frame.skip(HEAD_BYTES));
            span_count = 1;
        }
        self.store.metas[index] = Meta {
            offload,
            len,
            span_first: u32::try_from(span_first).expect("fewer than 4 G spans"),
            span_count,
        };
        self.spans_len += span_count as usize;
        self.frames_len += 1;
        self.bytes += u64::from(len);
        Ok(())
    }

    /// Starts a frame that lies in several pieces. Dropping the [`OpenFrame`]
    /// leaves the batch as it was.
    ///
    /// # Panics
    /// If the batch is full.
    #[inline]
    pub fn open(&mut self) -> OpenFrame<'_, 'q> {
        assert!(self.frames_len < BATCH_MAX, "the batch is full");
        OpenFrame {
            first: self.spans_len,
            end: self.spans_len,
            batch: self,
        }
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("frames_len", &self.frames_len)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// A frame that is being put together from the pieces of a chain.
pub struct OpenFrame<'b, 'q> {
    batch: &'b mut Batch<'q>,
    first: usize,
    end: usize,
}

impl<'q> OpenFrame<'_, 'q> {
    /// Adds the next piece; empty pieces are left out.
    ///
    /// # Errors
    /// If the store has no room for it.
    #[inline]
    pub fn add(&mut self, piece: Span<'q>) -> Result<(), SpansFull> {
        if piece.is_empty() {
            return Ok(());
        }
        let slot = self.batch.store.spans.get_mut(self.end).ok_or(SpansFull)?;
        *slot = erase(piece);
        self.end += 1;
        Ok(())
    }

    /// Takes bytes off the front into private memory, whatever pieces they lie
    /// in; returns how many there were.
    #[inline]
    pub fn take_front(&mut self, into: &mut [u8]) -> usize {
        let mut done = 0;
        while done < into.len() && self.first < self.end {
            let piece = &mut self.batch.store.spans[self.first];
            let copied = piece.snapshot(&mut into[done..]);
            *piece = piece.skip(u32::try_from(copied).expect("pieces are shorter than 4 GiB"));
            if piece.is_empty() {
                self.first += 1;
            }
            done += copied;
        }
        done
    }

    /// Bytes that have not been taken.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.batch.store.spans[self.first..self.end]
            .iter()
            .map(|piece| u64::from(piece.len()))
            .sum()
    }

    /// Completes the frame: takes the snapshot of its head.
    ///
    /// # Panics
    /// If the frame is 4 GiB or longer.
    #[inline]
    pub fn close(mut self, offload: Offload) {
        let len = u32::try_from(self.bytes()).expect("frames are bounded by their port");
        let index = self.batch.frames_len;
        let mut head = Head::ZERO;
        self.take_front(&mut head.0);
        self.batch.store.heads[index] = head;
        self.batch.store.metas[index] = Meta {
            offload,
            len,
            span_first: u32::try_from(self.first).expect("fewer than 4 G spans"),
            span_count: u32::try_from(self.end - self.first).expect("fewer than 4 G spans"),
        };
        self.batch.spans_len = self.end;
        self.batch.frames_len += 1;
        self.batch.bytes += u64::from(len);
    }
}

impl fmt::Debug for OpenFrame<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFrame")
            .field("pieces", &(self.end - self.first))
            .finish_non_exhaustive()
    }
}

/// Forgets the lifetime of a span that enters the store.
#[inline]
fn erase(span: Span<'_>) -> Span<'static> {
    // SAFETY: spans in the store are reached only through the `Batch<'q>` into
    // which they were put as `Span<'q>` (its length bounds what is handed out,
    // and `begin` starts from none), and only under a borrow of that batch.
    unsafe { Span::new(span.as_ptr(), span.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gather(frame: &Frame<'_>) -> Vec<u8> {
        let mut bytes = frame.head.to_vec();
        for span in frame.body {
            let mut piece = vec![0; span.len() as usize];
            span.snapshot(&mut piece);
            bytes.extend(piece);
        }
        assert_eq!(bytes.len(), frame.len as usize);
        bytes
    }

    #[test]
    fn a_frame_reads_the_same_however_it_was_cut() {
        let whole: Vec<u8> = (0..150).collect();
        let mut store = BatchStore::new(400);
        for cut in 0..=whole.len() {
            let mut batch = store.begin();
            batch
                .push(Offload::default(), Span::from_slice(&whole))
                .expect("room");
            let mut open = batch.open();
            open.add(Span::from_slice(&whole[..cut])).expect("room");
            open.add(Span::from_slice(&whole[cut..])).expect("room");
            open.close(Offload::default());
            assert_eq!(batch.len(), 2);
            assert_eq!(batch.bytes(), 300);
            for index in batch.all() {
                assert_eq!(gather(&batch.frame(index)), whole, "cut {cut}");
                assert_eq!(batch.head(index), &whole[..HEAD_BYTES as usize]);
            }
        }
    }

    #[test]
    fn an_abandoned_frame_leaves_nothing() {
        let bytes = [7; 100];
        let mut store = BatchStore::new(0);
        let mut batch = store.begin();
        batch
            .push(Offload::default(), Span::from_slice(&bytes))
            .expect("room");
        let mut open = batch.open();
        open.add(Span::from_slice(&[1; 90])).expect("room");
        let _ = open;
        batch
            .push(Offload::default(), Span::from_slice(&bytes[..70]))
            .expect("room");
        assert_eq!(batch.len(), 2);
        assert_eq!(gather(&batch.frame(0)), bytes);
        assert_eq!(gather(&batch.frame(1)), bytes[..70]);
    }

    #[test]
    fn pieces_beyond_the_store_are_refused() {
        let mut store = BatchStore::new(BATCH_MAX);
        let mut batch = store.begin();
        let mut open = batch.open();
        for _ in 0..BATCH_MAX {
            open.add(Span::from_slice(&[1])).expect("room");
        }
        assert_eq!(open.add(Span::from_slice(&[])), Ok(()));
        assert_eq!(open.add(Span::from_slice(&[1])), Err(SpansFull));
    }

    #[test]
    fn the_head_does_not_follow_later_changes() {
        let mut bytes = [1_u8; 80];
        let ptr = bytes.as_mut_ptr();
        // SAFETY: `bytes` outlives the batch and is touched only through `ptr`.
        let shared = unsafe { SpanMut::new(ptr, 80) };
        let mut store = BatchStore::new(0);
        let mut batch = store.begin();
        batch
            .push(Offload::default(), shared.as_span())
            .expect("room");
        shared.write(&[2; 80]);
        assert_eq!(batch.head(0), [1; HEAD_BYTES as usize]);
        let mut to = [0; 80];
        // SAFETY: `to` outlives the span.
        batch
            .frame(0)
            .copy_to(unsafe { SpanMut::new(to.as_mut_ptr(), 80) });
        assert_eq!(to[..HEAD_BYTES as usize], [1; HEAD_BYTES as usize]);
        assert_eq!(to[HEAD_BYTES as usize..], [2; 16]);
    }
}

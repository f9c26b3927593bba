//! From a batch of frame heads to verdicts.

use std::sync::Arc;

use pollux_packet::{BATCH_MAX, DropReason, FrameSet};

use crate::key::{HEADER_BYTES, Header};
use crate::verdict::{Decision, Verdicts, without};
use crate::{Fdb, LearnOutcome, MacVlan, PortId, PortRef};

/// How destinations are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A learning bridge: the FDB, and flooding for what it does not know.
    Learn,
    /// Wires: every frame of a port goes to the port it is paired with, both
    /// ways, whatever is in it. Nothing is learned.
    CrossConnect(Vec<(PortId, PortId)>),
}

/// What a [`Forwarding`] is made of.
#[derive(Clone, Debug)]
pub struct ForwardingConfig {
    /// How destinations are found.
    pub mode: Mode,
    /// The table, shared with control.
    pub fdb: Arc<Fdb>,
    /// Ports that exist: flooded frames go to these. Order does not matter.
    pub members: Vec<PortId>,
    /// Flood 01:80:C2:00:00:00 to 0F like other multicast instead of dropping.
    pub forward_bpdu: bool,
}

/// Why a [`ForwardingConfig`] makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardingError {
    /// The port is in two pairs of a cross-connect, or twice in one.
    #[error("port {0} is paired more than once in the cross-connect")]
    PairedTwice(PortId),
}

#[derive(Debug)]
enum Paths {
    Learn,
    /// The peer of each port, by port number.
    CrossConnect(Box<[Option<PortId>]>),
}

/// How frames are forwarded: an immutable value that all workers share. A
/// change of ports or mode makes a new one.
#[derive(Debug)]
pub struct Forwarding {
    paths: Paths,
    fdb: Arc<Fdb>,
    members: Box<[PortId]>,
    forward_bpdu: bool,
}

/// What one source queue remembers from batch to batch: the last destination
/// and the last source. Both hold for one generation of the FDB, the source
/// also for one tick.
///
/// It belongs to one queue and one [`Fdb`]: [`reset`](Self::reset) it when the
/// queue is given another table.
#[derive(Clone, Copy, Debug)]
pub struct Memo {
    generation: u32,
    source: Option<PortRef>,
    tick: u16,
    src: MacVlan,
    dst: MacVlan,
    /// For `dst`. Only decisions that the FDB generation covers are kept, so
    /// the memo survives a new [`Forwarding`].
    decision: Decision,
}

impl Default for Memo {
    fn default() -> Self {
        Self::new()
    }
}

impl Memo {
    /// Remembers nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            generation: 0,
            source: None,
            tick: 0,
            src: MacVlan::NONE,
            dst: MacVlan::NONE,
            decision: Decision::Flood,
        }
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Self::new();
    }

    /// Drops what does not hold for this batch.
    #[inline]
    fn renew(&mut self, generation: u32, source: PortRef, tick: u16) {
        if self.generation != generation || self.source != Some(source) {
            *self = Self {
                generation,
                source: Some(source),
                tick,
                ..Self::new()
            };
        } else if self.tick != tick {
            self.tick = tick;
            self.src = MacVlan::NONE;
        }
    }
}

impl Forwarding {
    /// Checks and prepares a configuration.
    ///
    /// # Errors
    /// If a cross-connect names a port twice.
    pub fn new(config: ForwardingConfig) -> Result<Self, ForwardingError> {
        let mut members = config.members;
        members.sort_unstable();
        members.dedup();
        let paths = match config.mode {
            Mode::Learn => Paths::Learn,
            Mode::CrossConnect(pairs) => Paths::CrossConnect(peers(&pairs, &members)?),
        };
        Ok(Self {
            paths,
            fdb: config.fdb,
            members: members.into_boxed_slice(),
            forward_bpdu: config.forward_bpdu,
        })
    }

    /// The FDB.
    #[inline]
    #[must_use]
    pub fn fdb(&self) -> &Arc<Fdb> {
        &self.fdb
    }

    /// The ports that exist, ascending, each once. Those of them that are up are
    /// the `members` of [`Verdicts::for_each_egress`].
    #[inline]
    #[must_use]
    pub fn members(&self) -> &[PortId] {
        &self.members
    }

    /// The port that `port` is wired to, if this is a cross-connect.
    #[must_use]
    pub fn peer(&self, port: PortId) -> Option<PortId> {
        match &self.paths {
            Paths::Learn => None,
            Paths::CrossConnect(peers) => peers.get(port.index()).copied().flatten(),
        }
    }

    /// Decides what happens to the frames that `source` sent, and learns where
    /// their senders are. `heads` are the first bytes of the frames, at least
    /// 18 of each frame that has them; `tick` is the time in seconds, which
    /// may wrap (see [`Fdb::age`]).
    ///
    /// Verdicts of the batch before are overwritten.
    ///
    /// # Panics
    /// If there are more than [`BATCH_MAX`] heads.
    #[inline]
    pub fn classify<'h>(
        &self,
        source: PortRef,
        memo: &mut Memo,
        tick: u16,
        heads: impl ExactSizeIterator<Item = &'h [u8]>,
        verdicts: &mut Verdicts,
    ) {
        assert!(heads.len() <= BATCH_MAX, "a batch has at most 64 frames");
        verdicts.start(heads.len());
        match &self.paths {
            Paths::Learn => self.classify_learn(source, memo, tick, heads, verdicts),
            Paths::CrossConnect(_) => self.classify_wire(source, heads, verdicts),
        }
    }

    /// One pass. A run of frames with the same header costs two loads and a
    /// compare per frame; all else happens where a key changes.
    #[inline]
    fn classify_learn<'h>(
        &self,
        source: PortRef,
        memo: &mut Memo,
        tick: u16,
        heads: impl Iterator<Item = &'h [u8]>,
        verdicts: &mut Verdicts,
    ) {
        // Read before any lookup: a result that goes stale later raises it,
        // so the memo made of that result does not outlive this batch.
        memo.renew(self.fdb.generation(), source, tick);
        let Memo {
            mut src,
            mut dst,
            mut decision,
            ..
        } = *memo;
        let mut src_done = true;
        let (mut run, mut runts) = (0_u64, 0_u64);
        let mut bit = 1_u64;
        // Of the frame before, if that had no tag: then `src` and `dst` are its.
        let mut last = Header::NONE;
        for head in heads {
            if let Some((header, rest)) = Header::split(head) {
                if header != last {
                    last = if header.is_tagged() {
                        Header::NONE
                    } else {
                        header
                    };
                    let keys = header.keys(rest);
                    if keys.src != src {
                        src = keys.src;
                        src_done = self.learn(src, source, tick);
                    }
                    if keys.dst != dst {
                        verdicts.add(decision, FrameSet::from_bits(run));
                        run = 0;
                        dst = keys.dst;
                        decision = self.decide(dst, source.id());
                    }
                }
                run |= bit;
            } else {
                runts |= bit;
            }
            bit <<= 1;
        }
        verdicts.add(decision, FrameSet::from_bits(run));
        verdicts.add(Decision::Drop(DropReason::Runt), FrameSet::from_bits(runts));
        memo.src = if src_done { src } else { MacVlan::NONE };
        memo.dst = match decision {
            Decision::Unicast(_) | Decision::Drop(DropReason::SamePort) => dst,
            // A miss is asked again each batch: learning a key that was not
            // there does not raise the generation. Group addresses depend on
            // this Forwarding, not on the FDB.
            _ => MacVlan::NONE,
        };
        memo.decision = decision;
    }

    /// Every frame to the peer. The bytes do not matter, only that there is a
    /// whole header: a reserved address passes, as it would on a wire.
    #[inline]
    fn classify_wire<'h>(
        &self,
        source: PortRef,
        heads: impl Iterator<Item = &'h [u8]>,
        verdicts: &mut Verdicts,
    ) {
        let mut runts = 0_u64;
        let mut bit = 1_u64;
        for head in heads {
            if head.len() < HEADER_BYTES {
                runts |= bit;
            }
            bit <<= 1;
        }
        let runts = FrameSet::from_bits(runts);
        let decision = match self.peer(source.id()) {
            Some(peer) => Decision::Unicast(peer),
            None => Decision::Drop(DropReason::NoDestination),
        };
        verdicts.add(decision, without(verdicts.frames(), runts));
        verdicts.add(Decision::Drop(DropReason::Runt), runts);
    }

    /// False if the table was busy and the source is to be tried again with
    /// the next batch (not the next frame: its lock is still held then).
    #[inline]
    fn learn(&self, src: MacVlan, source: PortRef, tick: u16) -> bool {
        self.fdb.learn(src, source, tick) != LearnOutcome::Busy
    }

    #[inline]
    fn decide(&self, dst: MacVlan, source: PortId) -> Decision {
        if !dst.is_group()
            && let Some(port) = self.fdb.lookup(dst)
        {
            return if port == source {
                Decision::Drop(DropReason::SamePort)
            } else {
                Decision::Unicast(port)
            };
        }
        if dst.is_reserved() && !self.forward_bpdu {
            return Decision::Drop(DropReason::ReservedMulticast);
        }
        // Members are distinct: this looks at two of them at most.
        if self.members.iter().any(|&port| port != source) {
            Decision::Flood
        } else {
            Decision::Drop(DropReason::NoDestination)
        }
    }
}

/// Table of peers by port number. A pair with a port that does not exist
/// leaves the other one without a peer.
fn peers(
    pairs: &[(PortId, PortId)],
    members: &[PortId],
) -> Result<Box<[Option<PortId>]>, ForwardingError> {
    let ports_len = pairs
        .iter()
        .map(|(a, b)| a.max(b).index() + 1)
        .max()
        .unwrap_or(0);
    let mut seen = vec![false; ports_len];
    let mut peers = vec![None; ports_len];
    for &(a, b) in pairs {
        for (port, peer) in [(a, b), (b, a)] {
            if core::mem::replace(&mut seen[port.index()], true) {
                return Err(ForwardingError::PairedTwice(port));
            }
            peers[port.index()] = members.contains(&peer).then_some(peer);
        }
    }
    Ok(peers.into_boxed_slice())
}

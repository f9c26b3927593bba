//! What happens to each frame of one batch.

use core::fmt;

use pollux_packet::{BATCH_MAX, DropReason, FrameSet};

use crate::PortId;

/// Frames with one known destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The destination.
    pub port: PortId,
    /// Its frames.
    pub frames: FrameSet,
}

/// Fate of a frame or of a run of frames with the same destination key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Unicast(PortId),
    Flood,
    Drop(DropReason),
}

/// The fate of every frame of a batch: it is in exactly one unicast group, in
/// the flood set, or in the set of exactly one drop reason.
///
/// Allocated once per worker and filled again for each batch. A destination
/// gets ONE set, its unicast frames and the flooded ones together, and walks
/// it in ascending order: so frames of a flow stay in order even where the
/// batch begins flooded and ends unicast because the destination was learned
/// in between.
pub struct Verdicts {
    all: FrameSet,
    groups: [Group; BATCH_MAX],
    groups_len: usize,
    flood: FrameSet,
    dropped: FrameSet,
    drops: [FrameSet; DropReason::COUNT],
    /// Where in `groups` a port was put last. It is never cleared: an entry
    /// counts only if the group there is in use and is the port's own. One
    /// byte for each `u16`, so that no index can be out of range.
    slot_of: Box<[u8; PORTS]>,
}

const PORTS: usize = 1 << 16;

impl fmt::Debug for Verdicts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verdicts")
            .field("groups", &self.groups())
            .field("flood", &self.flood)
            .field("drops", &self.drops().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl Default for Verdicts {
    fn default() -> Self {
        Self::new()
    }
}

impl Verdicts {
    /// An empty batch. Allocates 64 KiB, and nothing after that.
    #[must_use]
    pub fn new() -> Self {
        let unused = Group {
            port: PortId(0),
            frames: FrameSet::EMPTY,
        };
        Self {
            all: FrameSet::EMPTY,
            groups: [unused; BATCH_MAX],
            groups_len: 0,
            flood: FrameSet::EMPTY,
            dropped: FrameSet::EMPTY,
            drops: [FrameSet::EMPTY; DropReason::COUNT],
            slot_of: Box::new([0; PORTS]),
        }
    }

    /// Every frame of the batch.
    #[inline]
    #[must_use]
    pub fn frames(&self) -> FrameSet {
        self.all
    }

    /// Unicast groups in the order in which their ports appeared first. No
    /// port is in it twice and none of the frames is in another set.
    #[inline]
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups[..self.groups_len]
    }

    /// Frames of all unicast groups.
    #[inline]
    #[must_use]
    pub fn unicast(&self) -> FrameSet {
        without(self.all, self.flood.union(self.dropped))
    }

    /// Frames for every member but the source.
    #[inline]
    #[must_use]
    pub fn flood(&self) -> FrameSet {
        self.flood
    }

    /// Frames for nobody.
    #[inline]
    #[must_use]
    pub fn dropped(&self) -> FrameSet {
        self.dropped
    }

    /// The dropped frames by reason, reasons without frames left out.
    pub fn drops(&self) -> impl Iterator<Item = (DropReason, FrameSet)> + '_ {
        let reasons = if self.dropped.is_empty() {
            &[]
        } else {
            DropReason::ALL
        };
        reasons
            .iter()
            .map(|&reason| (reason, self.drops[reason as usize]))
            .filter(|(_, frames)| !frames.is_empty())
    }

    /// Calls `deliver` once for each destination port with all of its frames:
    /// its unicast group and, if it is one of `members`, the flooded frames.
    /// Returns how many ports got the flooded frames: 0 means that nobody did.
    ///
    /// Flooded frames never go back to `source`. `members` must not name a
    /// port twice; without flooded frames nobody asks for them, and the order
    /// is that of [`groups`](Self::groups); with them, members come first, in
    /// their order.
    #[inline]
    pub fn for_each_egress<'m>(
        &self,
        source: PortId,
        members: impl IntoIterator<Item = &'m PortId>,
        mut deliver: impl FnMut(PortId, FrameSet),
    ) -> u32 {
        let mut done = FrameSet::EMPTY;
        let mut fan_out = 0;
        if !self.flood.is_empty() {
            for &port in members.into_iter().filter(|&&port| port != source) {
                fan_out += 1;
                match self.slot(port) {
                    Some(slot) => {
                        done.insert(slot);
                        deliver(port, self.groups[slot].frames.union(self.flood));
                    }
                    None => deliver(port, self.flood),
                }
            }
        }
        for (slot, group) in self.groups().iter().enumerate() {
            if !done.contains(slot) {
                deliver(group.port, group.frames);
            }
        }
        fan_out
    }

    /// Starts a batch of `frames_len` frames.
    #[inline]
    pub(crate) fn start(&mut self, frames_len: usize) {
        self.all = FrameSet::first(frames_len);
        self.groups_len = 0;
        self.flood = FrameSet::EMPTY;
        if !self.dropped.is_empty() {
            self.dropped = FrameSet::EMPTY;
            self.drops.fill(FrameSet::EMPTY);
        }
    }

    /// Puts `frames` where `decision` says. Nothing happens for no frames.
    #[inline]
    pub(crate) fn add(&mut self, decision: Decision, frames: FrameSet) {
        if frames.is_empty() {
            return;
        }
        match decision {
            Decision::Unicast(port) => self.add_unicast(port, frames),
            Decision::Flood => self.flood = self.flood.union(frames),
            Decision::Drop(reason) => {
                self.dropped = self.dropped.union(frames);
                let drops = &mut self.drops[reason as usize];
                *drops = drops.union(frames);
            }
        }
    }

    #[inline]
    fn add_unicast(&mut self, port: PortId, frames: FrameSet) {
        if let Some(slot) = self.slot(port) {
            let group = &mut self.groups[slot].frames;
            *group = group.union(frames);
            return;
        }
        // Each group has a frame of its own, so the 65th cannot come.
        let slot = self.groups_len;
        self.groups[slot] = Group { port, frames };
        self.groups_len = slot + 1;
        self.slot_of[port.index()] = u8::try_from(slot).unwrap_or(u8::MAX);
    }

    /// Index of the port's group, if it has one in this batch.
    #[inline]
    fn slot(&self, port: PortId) -> Option<usize> {
        let slot = usize::from(self.slot_of[port.index()]);
        let group = self.groups().get(slot)?;
        (group.port == port).then_some(slot)
    }
}

/// The frames of `set` that are not in `other`.
#[inline]
pub(crate) const fn without(set: FrameSet, other: FrameSet) -> FrameSet {
    FrameSet::from_bits(set.bits() & !other.bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_once_with_unicast_and_flood_together() {
        let mut verdicts = Verdicts::new();
        verdicts.start(5);
        let set = FrameSet::from_bits;
        verdicts.add(Decision::Unicast(PortId(7)), set(0b00010));
        verdicts.add(Decision::Unicast(PortId(3)), set(0b00100));
        verdicts.add(Decision::Unicast(PortId(7)), set(0b01000));
        verdicts.add(Decision::Flood, set(0b10001));
        let mut egress = Vec::new();
        let members = [PortId(1), PortId(2), PortId(3)];
        let fan_out = verdicts.for_each_egress(PortId(1), &members, |port, frames| {
            egress.push((port.0, frames.bits()));
        });
        // Port 7 is no member: it gets its unicast frames only.
        assert_eq!(egress, [(2, 0b10001), (3, 0b10101), (7, 0b01010)]);
        assert_eq!(fan_out, 2);
        assert_eq!(verdicts.unicast().bits(), 0b01110);

        // Port 3 is left out of the flood, not of what is for it alone.
        egress.clear();
        let members = members.iter().filter(|&&port| port == PortId(1));
        let fan_out = verdicts.for_each_egress(PortId(1), members, |port, frames| {
            egress.push((port.0, frames.bits()));
        });
        assert_eq!(egress, [(7, 0b01010), (3, 0b00100)]);
        assert_eq!(fan_out, 0);
    }

    #[test]
    fn nothing_is_left_of_the_batch_before() {
        let mut verdicts = Verdicts::new();
        verdicts.start(3);
        verdicts.add(Decision::Unicast(PortId(4)), FrameSet::first(1));
        verdicts.add(Decision::Drop(DropReason::Runt), FrameSet::from_bits(4));
        assert_eq!(verdicts.drops().count(), 1);
        verdicts.start(1);
        assert!(verdicts.groups().is_empty() && verdicts.dropped().is_empty());
        assert_eq!(verdicts.drops().count(), 0);
        verdicts.add(Decision::Unicast(PortId(5)), FrameSet::first(1));
        // The old slot of port 4 now belongs to port 5.
        assert_eq!(verdicts.slot(PortId(4)), None);
    }
}

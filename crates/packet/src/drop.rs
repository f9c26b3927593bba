//! Why a frame was not delivered: one list from which counters, screens and
//! documentation are made.

/// Side of the switch on which a frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropSide {
    /// Before a destination was chosen: counted on the port that sent it.
    Rx,
    /// While it was handed to a destination: counted on that port, per copy.
    Tx,
}

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal, $side:ident, $meaning:literal;)+) => {
        /// Named reason for a frame (or one copy of it) not being delivered.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl DropReason {
            /// Every reason, in the order of the counters.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];
            /// Number of reasons.
            pub const COUNT: usize = Self::ALL.len();

            /// Stable name: part of metrics and of the `--json` output.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Side on which the reason is counted.
            #[must_use]
            pub const fn side(self) -> DropSide {
                match self { $(Self::$variant => DropSide::$side,)+ }
            }

            /// One sentence for an operator: what happened and where to look.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)+ }
            }
        }
    };
}

drop_reasons! {
    /// Descriptor chain that cannot be followed or points outside memory.
    BadChain = "bad-chain", Rx,
        "the guest sent a descriptor chain that loops, has a wrong direction or a bad indirect table, or points outside its memory";
    /// Shorter than the virtio-net header plus an Ethernet header.
    Runt = "runt", Rx,
        "the guest sent less than a virtio-net header plus 14 bytes of Ethernet header";
    /// Longer than 65,535 bytes.
    Oversize = "oversize", Rx,
        "the guest sent a frame longer than 65535 bytes";
    /// Offload request that was not negotiated or is inconsistent.
    BadOffload = "bad-offload", Rx,
        "the virtio-net header asks for an offload that was not negotiated or does not fit the frame";
    /// The queue is started and disabled (vhost-user, "Ring states").
    QueueDisabled = "queue-disabled", Rx,
        "the frontend has disabled the guest's transmit queue: what the guest sends is discarded";
    /// Destination 01:80:C2:00:00:00 to 0F (IEEE 802.1Q table 8-1).
    ReservedMulticast = "reserved-multicast", Rx,
        "link-local control frame (01:80:C2:00:00:0x), which a bridge does not forward";
    /// The destination is on the port that sent the frame.
    SamePort = "same-port", Rx,
        "the destination was learned on the port that sent the frame";
    /// No port could take the frame.
    NoDestination = "no-destination", Rx,
        "no other port is up, or a cross-connect has no peer";
    /// The destination has no running ring.
    PortDown = "port-down", Tx,
        "the destination port has no running receive ring";
    /// The destination's ring is being changed by control.
    PortReconfiguring = "port-reconfiguring", Tx,
        "the destination port was being reconfigured";
    /// The guest has posted no (or not enough) receive buffers.
    RxRingFull = "rx-ring-full", Tx,
        "the destination guest has no free receive buffers: it reads too slowly";
    /// The posted buffer is smaller than header plus frame.
    RxBufferTooSmall = "rx-buffer-too-small", Tx,
        "the frame does not fit the receive buffer that the guest posted, and mergeable buffers are off";
    /// The posted receive chain cannot be used.
    BadRxChain = "bad-rx-chain", Tx,
        "the destination guest posted a receive chain that loops, is not writable or points outside its memory";
}

/// A count for each [`DropReason`], indexed by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropCounts([u64; DropReason::COUNT]);

impl DropCounts {
    /// Adds `count` frames to `reason`.
    #[inline]
    pub fn add(&mut self, reason: DropReason, count: u64) {
        self.0[reason as usize] += count;
    }

    /// Frames dropped for `reason`.
    #[inline]
    #[must_use]
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// Frames dropped for any reason of `side`.
    #[must_use]
    pub fn total(&self, side: DropSide) -> u64 {
        self.iter()
            .filter(|(reason, _)| reason.side() == side)
            .map(|(_, count)| count)
            .sum()
    }

    /// True if nothing was dropped.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&count| count == 0)
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }

    /// Adds all of a burst's.
    pub fn add_burst(&mut self, burst: &BurstDrops) {
        for (mine, theirs) in self.0.iter_mut().zip(burst.0) {
            *mine += u64::from(theirs);
        }
    }

    /// Every reason with its count.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL
            .iter()
            .map(|&reason| (reason, self.get(reason)))
    }
}

/// Like [`DropCounts`] for one burst: small, since it is made for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BurstDrops([u16; DropReason::COUNT]);

impl BurstDrops {
    /// Adds `frames` to `reason`; a burst has at most 64.
    #[inline]
    pub fn add(&mut self, reason: DropReason, frames: u32) {
        let count = &mut self.0[reason as usize];
        *count = count.saturating_add(u16::try_from(frames).unwrap_or(u16::MAX));
    }

    /// Frames dropped for `reason`.
    #[must_use]
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_kebab_case() {
        let mut names: Vec<_> = DropReason::ALL.iter().map(|r| r.name()).collect();
        assert!(
            names
                .iter()
                .all(|n| n.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
        );
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DropReason::COUNT);
    }

    #[test]
    fn totals_split_by_side() {
        let mut counts = DropCounts::default();
        counts.add(DropReason::Runt, 2);
        counts.add(DropReason::RxRingFull, 3);
        let mut burst = BurstDrops::default();
        burst.add(DropReason::Runt, 2);
        burst.add(DropReason::RxRingFull, 3);
        let mut sum = counts;
        sum.merge(&counts);
        assert_eq!(sum.total(DropSide::Rx), 4);
        counts.add_burst(&burst);
        assert_eq!(counts, sum);
        assert_eq!(sum.total(DropSide::Tx), 6);
        assert!(!sum.is_empty());
    }
}

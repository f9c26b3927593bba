//! How much of a turn one queue may use: the bound on every other queue's wait.

use std::time::Duration;

use pollux_packet::BurstLimit;

/// Bytes copied in one visit, unless the plan says otherwise.
pub const BYTE_BUDGET_DEFAULT: u64 = 512 << 10;
/// What "unlimited" still ends at, in work units.
pub const UNLIMITED_UNITS: u32 = 65_536;
/// What "unlimited" still ends at, in time.
pub const UNLIMITED_VISIT: Duration = Duration::from_millis(10);

/// Work units of one visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketBudget {
    /// So many.
    Units(u32),
    /// So many times the size of the queue. A flood of tiny frames then holds
    /// up the other queues for two rings' worth and no more: the kernel's
    /// vhost went from 18.5 ms to 3.2 ms of ping time with it.
    RingMultiple(u32),
    /// [`UNLIMITED_UNITS`] or [`UNLIMITED_VISIT`].
    Unlimited,
}

/// Where a visit to a queue ends: at the first of two limits.
///
/// Work units: one for each chain, one for each of its descriptors after the
/// second, one for each further copy delivered, one for each chain returned
/// unused. Frames that are dropped cost like others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Work units.
    pub packets: PacketBudget,
    /// Bytes copied.
    pub bytes: u64,
}

impl Default for Budget {
    /// 2 x the size of the queue, [`BYTE_BUDGET_DEFAULT`].
    fn default() -> Self {
        Self {
            packets: PacketBudget::RingMultiple(2),
            bytes: BYTE_BUDGET_DEFAULT,
        }
    }
}

impl Budget {
    /// What a visit to a queue of `size` places may spend.
    #[inline]
    pub(crate) fn open(self, size: u16) -> Allowance {
        let units = match self.packets {
            PacketBudget::Units(units) => units,
            PacketBudget::RingMultiple(times) => times.saturating_mul(u32::from(size)),
            PacketBudget::Unlimited => UNLIMITED_UNITS,
        };
        Allowance {
            units: units.clamp(1, UNLIMITED_UNITS),
            bytes: self.bytes.max(1),
        }
    }

    /// True if the clock ends the visit too.
    #[inline]
    pub(crate) fn is_timed(self) -> bool {
        self.packets == PacketBudget::Unlimited
    }
}

/// What is left of a visit's budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowance {
    units: u32,
    bytes: u64,
}

impl Allowance {
    /// The limit of the next burst, or `None` when the budget is spent.
    #[inline]
    pub(crate) fn burst(self) -> Option<BurstLimit> {
        if self.units == 0 || self.bytes == 0 {
            return None;
        }
        let units = u16::try_from(self.units).unwrap_or(u16::MAX);
        Some(BurstLimit {
            frames: units.min(BurstLimit::MAX.frames),
            units: self.units,
            bytes: self.bytes.min(BurstLimit::MAX.bytes),
        })
    }

    /// True if this is more than what is left.
    #[inline]
    pub(crate) fn is_exceeded_by(self, units: u64, bytes: u64) -> bool {
        units > u64::from(self.units) || bytes > self.bytes
    }

    #[inline]
    pub(crate) fn spend(&mut self, units: u32, bytes: u64) {
        self.units = self.units.saturating_sub(units);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_twice_the_ring_and_half_a_mebibyte() {
        let mut left = Budget::default().open(256);
        let burst = left.burst().expect("open");
        assert_eq!(
            (burst.frames, burst.units, burst.bytes),
            (64, 512, 64 << 10)
        );
        left.spend(500, 0);
        let burst = left.burst().expect("12 units left");
        assert_eq!((burst.frames, burst.units), (12, 12));
        left.spend(1, 512 << 10);
        assert_eq!(left.burst(), None, "bytes are spent");
    }

    #[test]
    fn unlimited_is_limited_and_zero_is_one() {
        let unlimited = Budget {
            packets: PacketBudget::Unlimited,
            bytes: u64::MAX,
        };
        assert_eq!(unlimited.open(256).units, UNLIMITED_UNITS);
        assert!(unlimited.is_timed());
        let nothing = Budget {
            packets: PacketBudget::Units(0),
            bytes: 0,
        };
        assert!(
            nothing.open(256).burst().is_some(),
            "a queue is never shut out"
        );
        let huge = Budget {
            packets: PacketBudget::RingMultiple(u32::MAX),
            bytes: 1,
        };
        assert_eq!(huge.open(32_768).units, UNLIMITED_UNITS);
    }
}

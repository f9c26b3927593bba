//! When to notify the other half: one rule for calls and kicks.

/// `vring_need_event` (virtio 1.2, section 2.7.7.2): true if the index that the
/// other side waits for lies in what was added by moving from `old` to `new`.
#[inline]
pub(crate) fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// One half's memory of how far the other has been notified.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Signal {
    /// Index at the last decision; `None` after a (re)start, when what the
    /// other half saw is unknown and the first signal must go out.
    decided_at: Option<u16>,
}

impl Signal {
    /// Decides by event index, after `new` was released and a full fence.
    #[inline]
    pub(crate) fn by_event(&mut self, event: u16, new: u16) -> bool {
        let old = self.decided_at.replace(new);
        old.is_none_or(|old| need_event(event, new, old))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_event_must_lie_in_what_was_added() {
        assert!(need_event(5, 6, 5));
        assert!(!need_event(6, 6, 5));
        assert!(!need_event(4, 6, 5));
        assert!(need_event(0xffff, 0, 0xfffe));
        assert!(need_event(0, 1, 0xfffe), "across the wrap");
        assert!(!need_event(5, 9, 9), "nothing added");
    }

    #[test]
    fn the_first_signal_after_a_start_is_unconditional() {
        let mut signal = Signal::default();
        // B-18: base 40000 and used_event 40000 would wait for 64 K frames.
        assert!(signal.by_event(20_000, 40_001));
        assert!(!signal.by_event(20_000, 40_002));
        assert!(signal.by_event(40_002, 40_003));
    }
}

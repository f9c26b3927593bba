//! When to notify the other half: one rule for calls and kicks, for split and
//! packed rings, for both halves.
//!
//! The side that publishes and the side that waits each do two things, and the
//! order of the two is all that keeps a notification from being lost (B-17,
//! B-58; virtio 1.2, sections 2.7.7, 2.7.13.4.1 and 2.8.21.3.1): whoever comes
//! second sees what the other wrote. [`publish_then_ask`] and [`arm_then_look`]
//! are the only places with that order; `notify/model.rs` models them.

#[cfg(all(test, loom))]
mod model;

#[cfg(not(loom))]
use pollux_sys::full_fence;

/// loom's fence in the place of the processor's.
#[cfg(loom)]
fn full_fence() {
    loom::sync::atomic::fence(loom::sync::atomic::Ordering::SeqCst);
}

/// Publishes, then reads what the other half wishes to be told.
#[inline]
pub(crate) fn publish_then_ask<R>(publish: impl FnOnce(), ask: impl FnOnce() -> R) -> R {
    publish();
    full_fence();
    ask()
}

/// Writes the wish to be told, then looks whether there is something already:
/// whoever is told so must not wait.
#[inline]
pub(crate) fn arm_then_look<R>(arm: impl FnOnce(), look: impl FnOnce() -> R) -> R {
    arm();
    full_fence();
    look()
}

/// What the other half wishes to be told, as it was read after a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Nothing: it polls.
    Never,
    /// Every publication.
    Always,
    /// When its event is reached.
    Event {
        /// How far the position after the publication is past the event, modulo
        /// 2^16.
        past: u16,
        /// How far the publication moved the position.
        added: u16,
    },
}

impl Wish {
    /// By `used_event` or `avail_event` of a split ring, which was moved to
    /// `new` (section 2.7.7.2).
    #[inline]
    pub(crate) fn at_event(event: u16, new: u16, added: u16) -> Self {
        let past = new.wrapping_sub(event);
        Self::Event { past, added }
    }
}

/// One half's memory of whether the other was ever notified.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Signal {
    /// What the other half saw before the (re)start is not known, so the first
    /// publication reaches every event (B-18).
    is_known: bool,
}

impl Signal {
    /// Whether to notify for a publication.
    #[inline]
    pub(crate) fn decide(&mut self, wish: Wish) -> bool {
        let is_first = !std::mem::replace(&mut self.is_known, true);
        match wish {
            Wish::Never => false,
            Wish::Always => true,
            // The event lies in what was added: `vring_need_event`.
            Wish::Event { past, added } => is_first || past.wrapping_sub(1) < added,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_reached(event: u16, new: u16, old: u16) -> bool {
        let mut signal = Signal { is_known: true };
        signal.decide(Wish::at_event(event, new, new.wrapping_sub(old)))
    }

    #[test]
    fn the_event_must_lie_in_what_was_added() {
        assert!(is_reached(5, 6, 5));
        assert!(!is_reached(6, 6, 5));
        assert!(!is_reached(4, 6, 5));
        assert!(is_reached(0xffff, 0, 0xfffe));
        assert!(is_reached(0, 1, 0xfffe), "across the wrap");
        assert!(!is_reached(5, 9, 9), "nothing added");
    }

    #[test]
    fn the_first_signal_after_a_start_reaches_every_event() {
        let mut signal = Signal::default();
        // B-18: base 40000 and used_event 40000 would wait for 64 K frames.
        assert!(signal.decide(Wish::at_event(20_000, 40_001, 1)));
        assert!(!signal.decide(Wish::at_event(20_000, 40_002, 1)));
        assert!(signal.decide(Wish::at_event(40_002, 40_003, 1)));
    }

    #[test]
    fn a_driver_that_polls_is_never_called() {
        let mut signal = Signal::default();
        assert!(!signal.decide(Wish::Never));
        assert!(signal.decide(Wish::Always));
    }
}

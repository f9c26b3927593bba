//! pollux-switch.

//! pollux-testkit.

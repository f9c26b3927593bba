//! pollux-sys.

//! pollux-datapath.

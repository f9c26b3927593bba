//! Guests, chains and flaws at random, for the models of split rings.

use pollux_testkit::GuestSpec;
use pollux_testkit::split_model::{Flaw, TABLE_LEN};
use pollux_virtio::Features;
use proptest::prelude::*;

pub(crate) fn setup() -> impl Strategy<Value = GuestSpec> {
    let size = prop::sample::select(vec![1_u16, 2, 4, 8, 16, 32]);
    let base = prop_oneof![Just(0_u16), Just(65_530), Just(32_765), any::<u16>()];
    let kind = (any::<bool>(), any::<bool>(), any::<bool>());
    (size, base, kind, 1..6_u16).prop_map(|(ring_size, base, kind, regions)| GuestSpec {
        ring_size,
        base,
        features: Features {
            version_1: kind.0,
            mergeable: kind.1,
            event_idx: kind.2,
            ..Features::LEGACY
        },
        buffer_bytes: 2048,
        table_len: TABLE_LEN,
        regions,
    })
}

pub(crate) fn flaw() -> impl Strategy<Value = Flaw> {
    let at = || 0..16_usize;
    prop_oneof![
        12 => Just(Flaw::None),
        1 => at().prop_map(|at| Flaw::Unmapped { at }),
        1 => at().prop_map(|at| Flaw::OverEnd { at }),
        1 => at().prop_map(|at| Flaw::Loop { at }),
        1 => any::<u16>().prop_map(|next| Flaw::NextOutside { next: next | 0x40 }),
        1 => at().prop_map(|at| Flaw::Direction { at }),
        1 => prop::sample::select(vec![0_u32, 1, 8, 24, 40, 0xffff_ffff])
            .prop_map(|bytes| Flaw::TableLength { bytes }),
        1 => at().prop_map(|at| Flaw::Nested { at }),
        1 => (0..32_u16).prop_map(|next| Flaw::TableNext { next }),
    ]
}

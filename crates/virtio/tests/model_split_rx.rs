//! Our device half of a guest RX ring against a plain writer over rust-vmm's
//! `virtio-queue` on the same bytes: random chains, sound and broken, and random
//! frames. What has to be equal, and what may differ, is told with [`RxModel`].
//!
//! Failing cases print their input and a seed, which is kept in
//! `tests/regress/model_split_rx.txt` and tried first from then on.

mod model;

use model::{flaw, setup};
use pollux_testkit::split_model::{Chain, Flaw, RxModel, RxOp, TABLE_LEN};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 500,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/regress/model_split_rx.txt",
        ))),
        ..ProptestConfig::default()
    }
}

fn chain() -> impl Strategy<Value = Chain> {
    let len = prop_oneof![3 => 0..160_u32, 2 => 0..14_u32];
    let lens = prop_oneof![
        2 => prop::collection::vec(len, 1..usize::from(TABLE_LEN) + 1),
        2 => (0..2000_u32).prop_map(|len| vec![len]),
        1 => Just(vec![2000]),
        1 => Just(vec![12, 1900]),
    ];
    let direct = prop_oneof![2 => Just(None), 1 => (0..4_usize).prop_map(Some)];
    (lens, direct, flaw()).prop_map(|(mut lens, direct, flaw)| {
        if matches!(flaw, Flaw::Loop { .. }) {
            // A loop that holds the frame is one buffer written over and over.
            lens.fill(0);
        }
        Chain {
            lens,
            direct,
            flaw,
            seed: 0,
        }
    })
}

fn op() -> impl Strategy<Value = RxOp> {
    let len = prop_oneof![4 => 14..200_u32, 1 => 14..1600_u32, 1 => 14..9000_u32];
    let lens = prop::collection::vec(len, 1..12);
    prop_oneof![
        8 => chain().prop_map(RxOp::Post),
        3 => Just(RxOp::Publish),
        3 => (lens, any::<u32>()).prop_map(|(lens, seed)| RxOp::Transmit { lens, seed }),
        2 => Just(RxOp::TakeUsed),
        1 => (0..2_u16, -3..5_i16).prop_map(|(flags, event)| RxOp::Wish { flags, event }),
    ]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn an_rx_ring_does_what_a_plain_writer_does(setup in setup(), ops in prop::collection::vec(op(), 1..60)) {
        let mut model = RxModel::new(setup);
        for op in &ops {
            model.run(op);
        }
        model.end();
    }
}

//! Our device half of a split ring against rust-vmm's `virtio-queue` on the same
//! bytes: random chains, sound and broken, through random bursts. What has to be
//! equal, and what may differ, is told with [`TxModel`].
//!
//! Failing cases print their input and a seed, which is kept in
//! `tests/regress/model_split.txt` and tried first from then on.

mod model;

use model::{flaw, setup};
use pollux_testkit::split_model::{Chain, Flaw, TABLE_LEN, Twin, TxModel, TxOp};
use pollux_virtio::device::{BurstLimit, RingFault};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use virtio_queue::QueueOwnedT;

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 500,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/regress/model_split.txt",
        ))),
        ..ProptestConfig::default()
    }
}

fn tx_chain() -> impl Strategy<Value = Chain> {
    let len = prop_oneof![
        4 => 0..200_u32,
        2 => 0..20_u32,
        1 => 200..4000_u32,
    ];
    let lens = prop_oneof![
        6 => prop::collection::vec(len, 1..usize::from(TABLE_LEN) + 2),
        // Around the longest frame.
        1 => (65_520..65_560_u32).prop_map(|len| vec![len]),
        1 => (65_000..65_560_u32, 0..100_u32).prop_map(|(a, b)| vec![a, b]),
    ];
    let direct = prop_oneof![2 => Just(None), 1 => (0..6_usize).prop_map(Some)];
    (lens, direct, flaw(), any::<u32>()).prop_map(|(mut lens, direct, flaw, seed)| {
        if !matches!(flaw, Flaw::None) {
            // Which of two flaws is met first is not at issue.
            lens.iter_mut().for_each(|len| *len = (*len).min(1500));
        }
        Chain {
            lens,
            direct,
            flaw,
            seed,
        }
    })
}

fn tx_op() -> impl Strategy<Value = TxOp> {
    let limit = (
        1..65_u16,
        prop_oneof![Just(u32::MAX), 0..30_u32],
        prop_oneof![Just(64 << 10_u64), 0..5000_u64],
    )
        .prop_map(|(frames, units, bytes)| BurstLimit {
            frames,
            units,
            bytes,
        });
    let kept = prop_oneof![3 => Just(0_usize), 1 => 1..4_usize];
    prop_oneof![
        6 => tx_chain().prop_map(TxOp::Offer),
        3 => Just(TxOp::Publish),
        3 => (limit, kept).prop_map(|(limit, kept)| TxOp::Burst { limit, kept }),
        2 => Just(TxOp::TakeUsed),
        1 => Just(TxOp::RequestKick),
        1 => Just(TxOp::SuppressKicks),
        1 => (0..2_u16, -3..5_i16).prop_map(|(flags, event)| TxOp::Wish { flags, event }),
    ]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_tx_ring_does_what_rust_vmm_does(setup in setup(), ops in prop::collection::vec(tx_op(), 1..60)) {
        let mut model = TxModel::new(setup);
        for op in &ops {
            model.run(op);
        }
        model.end();
    }

    #[test]
    fn an_index_jump_breaks_the_ring_where_rust_vmm_refuses_it(setup in setup(), idx in any::<u16>()) {
        let mut twin = Twin::new(setup, true);
        let (mut device, _) = twin.guest.device();
        twin.raw.set_avail_idx(idx);
        twin.copy_to_oracle();
        let theirs = twin.queue.iter(&twin.memory).is_err();
        let chains = device.receive(BurstLimit::MAX).returns().chains();
        let wanted = theirs.then_some(RingFault::AvailIndex { from: setup.base, to: idx });
        assert_eq!(device.fault(), wanted);
        prop_assert!(!theirs || chains == 0);
    }
}

//! One split ring beside rust-vmm's `virtio-queue` on the same bytes: the model
//! of `pollux_testkit::split_model`, which the random tests of the virtio crate
//! use too, with operations out of an input. What has to be equal, and which
//! differences are accepted, is told with [`TxModel`] and [`RxModel`].

use pollux_packet::{DropCounts, DropReason};
use pollux_testkit::GuestSpec;
use pollux_testkit::split_model::{Chain, Flaw, RxModel, RxOp, TABLE_LEN, TxModel, TxOp};
use pollux_virtio::Features;
use pollux_virtio::device::BurstLimit;

use crate::bytes::Bytes;
use crate::marks;

/// Operations of one input at most.
const OPS_MAX: usize = 64;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let bits = bytes.u8();
    let spec = GuestSpec {
        ring_size: bytes.choose(&[1, 2, 4, 8, 16, 32]),
        base: bytes.choose(&[0, 65_530, 32_765, 40_000]),
        features: Features {
            version_1: bits & 1 == 0,
            mergeable: bits & 2 != 0,
            event_idx: bits & 4 != 0,
            in_order: bits & 8 != 0,
            packed: false,
        },
        buffer_bytes: 2048,
        table_len: TABLE_LEN,
        regions: bytes.choose(&[1, 2, 3, 5]),
    };
    if bits & 16 == 0 {
        run_tx(spec, &mut bytes);
    } else {
        run_rx(spec, &mut bytes);
    }
}

/// What has to be reached: see [`Target::wanted`](crate::Target::wanted).
#[must_use]
pub fn wanted() -> Vec<String> {
    let marks = [
        "rx-bad-rx-chain",
        "rx-batch",
        "rx-called",
        "rx-called-at-event",
        "rx-merged",
        "rx-moved",
        "rx-not-called",
        "rx-restarted",
        "rx-rx-buffer-too-small",
        "rx-rx-ring-full",
        "tx-bad-chain",
        "tx-bad-offload",
        "tx-batch",
        "tx-called",
        "tx-called-at-event",
        "tx-in-order",
        "tx-moved",
        "tx-not-called",
        "tx-oversize",
        "tx-restarted",
        "tx-runt",
    ];
    marks.map(str::to_owned).to_vec()
}

fn run_tx(spec: GuestSpec, bytes: &mut Bytes<'_>) {
    let mut model = TxModel::new(spec);
    let mut met = Met::default();
    for _ in 0..OPS_MAX {
        if bytes.is_empty() {
            break;
        }
        let (op, repeat) = tx_op(bytes, spec.ring_size);
        met.note_tx(&op, model.calls);
        for _ in 0..repeat {
            model.run(&op);
        }
    }
    model.end();
    note("tx", &model.drops, model.calls);
    if spec.features.event_idx && model.calls[0] > 1 {
        marks::reach("tx-called-at-event");
    }
    if model.batch_max > 4 {
        marks::reach("tx-batch");
    }
    met.reach("tx", model.drops.get(DropReason::BadChain), model.calls);
    if spec.features.in_order && model.calls != [0; 2] {
        marks::reach("tx-in-order");
    }
}

fn run_rx(spec: GuestSpec, bytes: &mut Bytes<'_>) {
    let mut model = RxModel::new(spec);
    let mut met = Met::default();
    for _ in 0..OPS_MAX {
        if bytes.is_empty() {
            break;
        }
        let (op, repeat) = rx_op(bytes, spec.ring_size);
        met.note_rx(&op, model.calls);
        for _ in 0..repeat {
            model.run(&op);
        }
    }
    model.end();
    note("rx", &model.drops, model.calls);
    if spec.features.event_idx && model.calls[0] > 1 {
        marks::reach("rx-called-at-event");
    }
    if model.batch_max > 4 {
        marks::reach("rx-batch");
    }
    met.reach("rx", model.drops.get(DropReason::BadRxChain), model.calls);
    if model.merged > 0 {
        marks::reach("rx-merged");
    }
}

/// What was among the operations.
#[derive(Debug, Default)]
struct Met {
    flaws: Vec<Flaw>,
    /// What there was, and publications before it.
    changes: Vec<(&'static str, u64)>,
}

impl Met {
    fn note_tx(&mut self, op: &TxOp, calls: [u64; 2]) {
        match op {
            TxOp::Offer(chain) => self.flaws.push(chain.flaw),
            TxOp::Restart => self.changes.push(("restarted", calls[0] + calls[1])),
            TxOp::Relocate => self.changes.push(("moved", calls[0] + calls[1])),
            _ => {}
        }
    }

    fn note_rx(&mut self, op: &RxOp, calls: [u64; 2]) {
        match op {
            RxOp::Post(chain) => self.flaws.push(chain.flaw),
            RxOp::Restart => self.changes.push(("restarted", calls[0] + calls[1])),
            RxOp::Relocate => self.changes.push(("moved", calls[0] + calls[1])),
            _ => {}
        }
    }

    /// Flaws that may be why chains could not be used, and changes between
    /// publications.
    fn reach(&self, side: &str, bad_chains: u64, calls: [u64; 2]) {
        if bad_chains > 0 {
            for flaw in self.flaws.iter().filter(|flaw| !matches!(flaw, Flaw::None)) {
                marks::reach_variant(&format!("{side}-flaw"), flaw);
            }
        }
        for &(change, before) in &self.changes {
            if before > 0 && calls[0] + calls[1] > before {
                marks::reach(&format!("{side}-{change}"));
            }
        }
    }
}

fn note(side: &str, drops: &DropCounts, calls: [u64; 2]) {
    for &reason in DropReason::ALL {
        if drops.get(reason) > 0 {
            marks::reach_variant(side, reason);
        }
    }
    for (count, mark) in calls.into_iter().zip(["called", "not-called"]) {
        if count > 0 {
            marks::reach(&format!("{side}-{mark}"));
        }
    }
}

/// An operation, and how often.
fn tx_op(bytes: &mut Bytes<'_>, ring_size: u16) -> (TxOp, usize) {
    let op = match bytes.below(16) {
        0..=5 => {
            let mut chain = tx_chain(bytes);
            just_outside(&mut chain, ring_size);
            return (TxOp::Offer(chain), repeat(bytes));
        }
        6 | 7 => TxOp::Publish,
        8..=10 => TxOp::Burst {
            limit: BurstLimit {
                frames: bytes.choose(&[64, 1, 2, 3, 9]),
                units: bytes.choose(&[u32::MAX, u32::MAX, 0, 5, 20]),
                bytes: bytes.choose(&[64 << 10, u64::MAX, 0, 500, 4000]),
            },
            kept: usize::from(bytes.choose(&[0_u8, 0, 0, 1, 3])),
        },
        11 => TxOp::TakeUsed,
        12 if bytes.one_in(2) => TxOp::SuppressKicks,
        12 => TxOp::RequestKick,
        13 => {
            let (flags, event) = wish(bytes);
            TxOp::Wish { flags, event }
        }
        14 => TxOp::Relocate,
        _ => TxOp::Restart,
    };
    (op, 1)
}

fn rx_op(bytes: &mut Bytes<'_>, ring_size: u16) -> (RxOp, usize) {
    let op = match bytes.below(16) {
        0..=5 => {
            let mut chain = rx_chain(bytes);
            just_outside(&mut chain, ring_size);
            return (RxOp::Post(chain), repeat(bytes));
        }
        6 | 7 => RxOp::Publish,
        8..=10 => {
            let count = bytes.choose(&[1, 1, 2, 3, 11]);
            let lens = (0..count).map(|_| match bytes.u8() {
                byte @ 0..128 => 14 + u32::from(byte),
                128 => 9000,
                _ => 14 + bytes.below_wide(1600),
            });
            RxOp::Transmit {
                lens: lens.collect(),
                seed: bytes.u32(),
            }
        }
        11 | 12 => RxOp::TakeUsed,
        13 => {
            let (flags, event) = wish(bytes);
            RxOp::Wish { flags, event }
        }
        14 => RxOp::Relocate,
        _ => RxOp::Restart,
    };
    (op, 1)
}

fn repeat(bytes: &mut Bytes<'_>) -> usize {
    usize::from(bytes.choose(&[1_u8, 1, 1, 1, 2, 5, 40]))
}

fn wish(bytes: &mut Bytes<'_>) -> (u16, i16) {
    (
        bytes.choose(&[0, 1]),
        bytes.choose(&[0, 1, 2, 3, 4, -1, -2, -3, 9]),
    )
}

fn flaw(bytes: &mut Bytes<'_>) -> Flaw {
    let at = usize::from(bytes.u8() % 16);
    match bytes.below(24) {
        1 => Flaw::Unmapped { at },
        2 => Flaw::OverEnd { at },
        3 => Flaw::Loop { at },
        // No ring and no table is that long; or see `just_outside`.
        4 => Flaw::NextOutside {
            next: bytes.choose(&[0x40, 0, 0x8000, u16::MAX]),
        },
        5 => Flaw::Direction { at },
        6 => Flaw::TableLength {
            bytes: bytes.choose(&[0, 1, 8, 24, 40, u32::MAX]),
        },
        7 => Flaw::Nested { at },
        8 => Flaw::TableNext {
            next: bytes.below(32).try_into().expect("small"),
        },
        _ => Flaw::None,
    }
}

fn direct(bytes: &mut Bytes<'_>) -> Option<usize> {
    bytes.choose(&[
        None,
        None,
        None,
        Some(0),
        Some(0),
        Some(1),
        Some(2),
        Some(5),
    ])
}

/// A `next` of 0 stands for the first that is outside.
fn just_outside(chain: &mut Chain, ring_size: u16) {
    let count = chain.lens.len();
    if let Flaw::NextOutside { next: next @ 0 } = &mut chain.flaw {
        *next = match chain.direct {
            Some(direct) => u16::try_from(count - direct.min(count - 1)).expect("short"),
            None => ring_size,
        };
    }
}

fn tx_chain(bytes: &mut Bytes<'_>) -> Chain {
    let flaw = flaw(bytes);
    let count = bytes.choose(&[1_u16, 1, 2, 3, 5, TABLE_LEN, TABLE_LEN + 1]);
    let mut lens: Vec<u32> = (0..count)
        .map(|_| match bytes.u8() {
            byte @ 0..200 => u32::from(byte),
            // Around the longest frame.
            200..208 => 65_520 + bytes.below(40),
            _ => bytes.below_wide(4000),
        })
        .collect();
    if !matches!(flaw, Flaw::None) {
        // Which of two flaws is met first is not at issue.
        lens.iter_mut().for_each(|len| *len = (*len).min(1500));
    }
    Chain {
        lens,
        direct: direct(bytes),
        flaw,
        seed: bytes.u32(),
    }
}

fn rx_chain(bytes: &mut Bytes<'_>) -> Chain {
    let flaw = flaw(bytes);
    let count = bytes.choose(&[1_u16, 1, 1, 2, 3, TABLE_LEN]);
    let mut lens: Vec<u32> = (0..count)
        .map(|_| match bytes.u8() {
            byte @ 0..160 => u32::from(byte),
            160..192 => 0,
            _ => bytes.below_wide(2001) / u32::from(count),
        })
        .collect();
    if matches!(flaw, Flaw::Loop { .. }) {
        // A loop that holds the frame is one buffer written over and over.
        lens.fill(0);
    }
    Chain {
        lens,
        direct: direct(bytes),
        flaw,
        seed: 0,
    }
}

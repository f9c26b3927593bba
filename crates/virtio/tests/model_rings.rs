//! The device half against the driver half: frames of every size and cut, over
//! every wrap, through two guests, arrive whole and in order. The oracle is a
//! queue of the frames that were sent.
//!
//! Buffers over two regions: `model_split.rs` and `hostile_chain.rs` (a driver
//! half keeps each of its buffers in one region). Notifications and burst limits:
//! `model_notify.rs`.

mod common;

use std::collections::VecDeque;

use common::{
    LEGACY, MODERN, UNMERGED, base_of, first_base, frame, in_every_layout, poll, transmit,
};
use pollux_packet::{BATCH_MAX, FRAME_BYTES_MAX, FrameSet};
use pollux_testkit::{Guest, GuestSpec};
use pollux_virtio::Features;
use pollux_virtio::device::{self, BurstLimit};
use pollux_virtio::driver::{ChainShape, DriverError, NetError, Received};
use proptest::prelude::*;

/// Two guests and the switch between them: what `a` sends, `b` receives.
struct Link {
    a: Guest,
    b: Guest,
    a_tx: device::TxRing,
    b_rx: device::RxRing,
    /// Sent and not yet received.
    flying: VecDeque<Vec<u8>>,
    b_features: Features,
}

impl Link {
    fn new(a: GuestSpec, b: GuestSpec) -> Self {
        let (guest_a, guest_b) = (
            Guest::new(a).expect("guest memory"),
            Guest::new(b).expect("guest memory"),
        );
        let (a_tx, _) = guest_a.device();
        let (_, b_rx) = guest_b.device();
        Self {
            a: guest_a,
            b: guest_b,
            a_tx,
            b_rx,
            flying: VecDeque::new(),
            b_features: b.features,
        }
    }

    /// Puts a frame into the ring of `a`, if there is room.
    fn send(&mut self, bytes: Vec<u8>, shape: ChainShape<'_>) -> bool {
        match self.a.tx.send(&bytes, shape) {
            Ok(()) => {
                self.flying.push_back(bytes);
                true
            }
            Err(NetError::Driver(DriverError::Full)) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// One burst from `a` to `b`; every frame must find a buffer. Returns how
    /// many frames there were.
    fn switch(&mut self, limit: BurstLimit) -> usize {
        let burst = self.a_tx.receive(limit);
        let count = burst.batch.len();
        assert_eq!(burst.returns().chains() as usize, count, "no drops");
        let report = self.b_rx.transmit(&burst.batch, FrameSet::first(count));
        assert_eq!((report.frames as usize, report.dropped), (count, 0));
        assert_eq!(report.bytes, burst.batch.bytes());
        burst.finish(count);
        count
    }

    /// Takes everything that came to `b`, in order, as it was sent.
    fn receive(&mut self) -> u32 {
        let Self {
            b,
            flying,
            b_features,
            ..
        } = self;
        let got = b.rx.receive(u32::MAX, |received: Received<'_>| {
            let sent = flying.pop_front().expect("nothing comes that was not sent");
            assert_eq!(received.to_vec(), sent);
            assert_eq!(received.header[..10], [0; 10]);
            if b_features.net_header_bytes() == 12 {
                let wanted = if b_features.mergeable {
                    received.buffers
                } else {
                    1
                };
                assert_eq!(received.num_buffers(), wanted, "B-22");
            }
        });
        assert_eq!(b.rx.unused(), 0);
        got.expect("the device returned what was out")
    }

    /// All the way, with as many buffers as `b` has room for.
    fn round(&mut self) {
        self.b.rx.refill();
        self.b.rx.publish();
        self.a.tx.publish();
        while self.switch(BurstLimit::MAX) > 0 {}
        self.receive();
        assert!(self.flying.is_empty());
        self.a
            .tx
            .reclaim()
            .expect("used entries are those of TX chains");
        let size = self.a_tx.size();
        assert_eq!(self.a.tx.ring().free_len(), size);
    }
}

fn spec(ring_size: u16, features: Features) -> GuestSpec {
    GuestSpec {
        ring_size,
        features,
        base: first_base(features),
        ..GuestSpec::default()
    }
}

#[test]
fn a_short_chain_cut_at_every_pair_of_points() {
    for features in in_every_layout(&[MODERN, LEGACY]) {
        let mut link = Link::new(spec(64, features), spec(64, MODERN));
        let header_bytes = features.net_header_bytes();
        let bytes = header_bytes + 60;
        let mut seed = 0;
        for indirect in [false, true] {
            for first in 0..=bytes {
                for second in 0..=bytes - first {
                    let cuts = [first, second];
                    let shape = ChainShape {
                        cuts: &cuts,
                        indirect,
                    };
                    seed += 1;
                    if !link.send(frame(seed, 60), shape) {
                        link.round();
                        assert!(link.send(frame(seed, 60), shape));
                    }
                }
            }
        }
        link.round();
    }
}

#[test]
fn receive_chains_cut_at_every_pair_of_points() {
    for features in in_every_layout(&[MODERN, UNMERGED, LEGACY]) {
        let mut link = Link::new(spec(64, MODERN), spec(64, features));
        let bytes = features.net_header_bytes() + 60;
        for indirect in [false, true] {
            for first in 0..=bytes {
                for second in 0..=bytes - first {
                    let cuts = [first, second];
                    let shape = ChainShape {
                        cuts: &cuts,
                        indirect,
                    };
                    link.b.rx.post(bytes, shape).expect("room");
                    link.b.rx.publish();
                    assert!(link.send(frame(first * 100 + second, 60), ChainShape::JOINED));
                    link.a.tx.publish();
                    assert_eq!(link.switch(BurstLimit::MAX), 1);
                    assert_eq!(link.receive(), 1);
                    assert_eq!(link.a.tx.reclaim(), Ok(1));
                }
            }
        }
    }
}

#[test]
fn chains_as_long_as_the_ring_and_the_table() {
    for features in in_every_layout(&[MODERN]) {
        let sizes: &[u16] = if features.packed {
            &[1, 2, 3, 5, 8, 100, 256]
        } else {
            &[1, 2, 4, 8, 64, 256]
        };
        for (&size, regions) in sizes.iter().flat_map(|size| [(size, 1), (size, 3)]) {
            let base = GuestSpec {
                table_len: size,
                regions,
                ..spec(size, features)
            };
            let mut link = Link::new(base, base);
            for len in 1..=usize::from(size) {
                for indirect in [false, true] {
                    // Zero lengths in between, and a last piece for the rest.
                    let cuts: Vec<u32> = (1..len).map(|i| if i % 3 == 0 { 0 } else { 2 }).collect();
                    let shape = ChainShape {
                        cuts: &cuts,
                        indirect,
                    };
                    let bytes = frame(u32::from(size) + 7, 600);
                    assert!(link.send(bytes.clone(), shape));
                    link.a.tx.publish();
                    // The same shape to receive in.
                    link.b.rx.post(612, shape).expect("room");
                    link.b.rx.publish();
                    assert_eq!(link.switch(BurstLimit::MAX), 1, "{len} of {size}");
                    assert_eq!(link.receive(), 1);
                    assert_eq!(link.a.tx.reclaim(), Ok(1));
                }
            }
        }
    }
}

/// Where a ring stands that has moved by so many chains of one descriptor.
fn moved(spec: GuestSpec, chains: u32) -> u16 {
    if !spec.features.packed {
        return u16::try_from((u32::from(spec.base) + chains) % 65_536).expect("reduced");
    }
    let size = u32::from(spec.ring_size);
    let passed = u32::from(spec.base & 0x7fff) + chains;
    let index = u16::try_from(passed % size).expect("less than the size");
    let flips = if passed / size % 2 == 1 { 0x8000 } else { 0 };
    index | (spec.base & 0x8000 ^ flips)
}

#[test]
fn every_position_of_the_rings_over_the_wrap() {
    for (base, size) in [(65_530, 256), (0, 64), (65_535, 1), (32_760, 32)] {
        let events = Features {
            event_idx: true,
            ..MODERN
        };
        for features in in_every_layout(&[MODERN, events]) {
            let based = GuestSpec {
                base: base_of(features, base, size),
                ..spec(size, features)
            };
            let mut link = Link::new(based, based);
            // Positions that are not equal in both rings.
            link.b.rx.post(100, ChainShape::JOINED).expect("room");
            link.b.rx.publish();
            assert_eq!(transmit(&mut link.b_rx, &[frame(0, 60)]).frames, 1);
            link.flying.push_back(frame(0, 60));
            link.receive();
            let total = if size == 1 { 66_000 } else { 140_000 };
            let mut sent = 0_u32;
            let mut burst = 0;
            while sent < total {
                burst = burst * 5 % 97 + 1;
                link.b.rx.refill();
                link.b.rx.publish();
                for _ in 0..burst {
                    if !link.send(sent.to_le_bytes().repeat(16), ChainShape::JOINED) {
                        break;
                    }
                    sent += 1;
                }
                link.a.tx.publish();
                let limit = BurstLimit {
                    frames: 1 + burst % 64,
                    ..BurstLimit::MAX
                };
                link.switch(limit);
                link.receive();
                link.a.tx.reclaim().expect("only what is out");
            }
            link.round();
            assert_eq!(link.a_tx.base(), moved(based, sent));
            assert_eq!(link.b_rx.base(), moved(based, sent + 1));
            assert_eq!((link.a_tx.fault(), link.b_rx.fault()), (None, None));
        }
    }
}

#[test]
fn every_frame_size() {
    let edges = (14..200)
        .chain([500, 1499, 1500, 1514, 1518, 1522, 2035, 2036, 2037, 2048])
        .chain([4083, 4084, 4085, 9000, 9018, 16_384, 32_767, 32_768, 40_001])
        .chain(65_500..=FRAME_BYTES_MAX);
    let big = |features| GuestSpec {
        buffer_bytes: 65_536 + 64,
        ..spec(4, features)
    };
    for from in in_every_layout(&[MODERN, LEGACY]) {
        let in_this_layout = |features| Features {
            packed: from.packed,
            in_order: from.in_order,
            ..features
        };
        for (to, merged) in [
            (big(in_this_layout(UNMERGED)), false),
            (big(in_this_layout(LEGACY)), false),
            (big(in_this_layout(MODERN)), false),
            (spec(64, in_this_layout(MODERN)), true),
        ] {
            let mut link = Link::new(big(from), to);
            for len in edges.clone() {
                assert!(link.send(frame(len, len), ChainShape::JOINED));
                link.b.rx.refill();
                link.b.rx.publish();
                link.a.tx.publish();
                assert_eq!(link.switch(BurstLimit::MAX), 1);
                let mut buffers = 0;
                let got = link.b.rx.receive(1, |received| {
                    assert_eq!(received.len(), len, "used.len");
                    assert_eq!(received.to_vec(), frame(len, len));
                    buffers = received.buffers;
                });
                assert_eq!(got, Ok(1));
                let wanted = if merged { (len + 12).div_ceil(2048) } else { 1 };
                assert_eq!(u32::from(buffers), wanted);
                link.flying.clear();
                assert_eq!(link.a.tx.reclaim(), Ok(1));
            }
        }
    }
}

#[test]
fn a_burst_that_is_dropped_is_received_again() {
    for features in in_every_layout(&[MODERN]) {
        let mut link = Link::new(spec(64, features), spec(64, features));
        for seed in 0..10 {
            link.send(frame(seed, 70), ChainShape::JOINED);
        }
        link.a.tx.publish();
        for _ in 0..3 {
            assert_eq!(link.a_tx.receive(BurstLimit::MAX).batch.len(), 10);
            assert_eq!(link.a.tx.reclaim(), Ok(0));
        }
        let frames: Vec<_> = link.flying.drain(..).collect();
        assert_eq!(poll(&mut link.a_tx).frames, frames);
        assert_eq!(link.a.tx.reclaim(), Ok(10));
    }
}

#[test]
fn the_longest_frame_in_the_smallest_buffers() {
    for features in in_every_layout(&[MODERN]) {
        let big = GuestSpec {
            buffer_bytes: 65_536 + 64,
            ..spec(4, features)
        };
        let tiny = GuestSpec {
            buffer_bytes: 64,
            ..spec(2048, features)
        };
        let mut link = Link::new(big, tiny);
        for _ in 0..3 {
            assert!(link.send(frame(1, FRAME_BYTES_MAX), ChainShape::JOINED));
            link.b.rx.refill();
            link.b.rx.publish();
            link.a.tx.publish();
            assert_eq!(link.switch(BurstLimit::MAX), 1);
            let mut buffers = 0;
            let got = link.b.rx.receive(1, |received| {
                buffers = received.buffers;
                assert_eq!(received.num_buffers(), buffers);
                assert_eq!(received.to_vec(), frame(1, FRAME_BYTES_MAX));
            });
            assert_eq!((got, buffers), (Ok(1), 1025));
            link.flying.clear();
            assert_eq!(link.a.tx.reclaim(), Ok(1));
        }
    }
}

#[derive(Clone, Debug)]
struct Sent {
    len: u32,
    cuts: Vec<u32>,
    indirect: bool,
}

fn features() -> impl Strategy<Value = Features> {
    any::<[bool; 5]>().prop_map(
        |[version_1, mergeable, event_idx, in_order, packed]| Features {
            version_1,
            mergeable,
            event_idx,
            in_order,
            packed,
        },
    )
}

fn sent() -> impl Strategy<Value = Sent> {
    let cut = prop_oneof![2 => 0..30_u32, 1 => Just(0_u32), 1 => 0..700_u32];
    let len = prop_oneof![3 => 14..130_u32, 1 => 14..1900_u32];
    let cuts = prop_oneof![1 => Just(Vec::new()), 2 => prop::collection::vec(cut, 0..12)];
    (len, cuts, any::<bool>()).prop_map(|(len, cuts, indirect)| Sent {
        len,
        cuts,
        indirect,
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: Some(Box::new(
            proptest::test_runner::FileFailurePersistence::Direct("tests/regress/model_rings.txt"),
        )),
        ..ProptestConfig::default()
    })]

    #[test]
    fn frames_arrive_whole_and_in_order(
        from in features(),
        to in features(),
        base in any::<u16>(),
        sizes in (4..9_u32, 5..9_u32),
        odd in 0..13_u16,
        regions in 1..5_u16,
        bursts in prop::collection::vec((prop::collection::vec(sent(), 1..40), 1..65_u16, any::<bool>()), 1..12),
    ) {
        let guest = |features: Features, log: u32| {
            let size = (1 << log) + if features.packed { odd } else { 0 };
            GuestSpec {
                base: base_of(features, base, size),
                regions,
                ..spec(size, features)
            }
        };
        let mut link = Link::new(guest(from, sizes.0), guest(to, sizes.1));
        let mut seed = 0;
        for (frames, limit, refill) in &bursts {
            for sent in frames {
                seed += 1;
                let shape = ChainShape { cuts: &sent.cuts, indirect: sent.indirect };
                if sent.cuts.len() >= 1 << sizes.0 {
                    continue;
                }
                if !link.send(frame(seed, sent.len), shape) {
                    break;
                }
            }
            link.a.tx.publish();
            // Receive buffers of shapes of their own.
            for sent in frames {
                if !refill {
                    break;
                }
                let shape = ChainShape { cuts: &sent.cuts, indirect: sent.indirect };
                if link.b.rx.post(1950, shape).is_err() {
                    break;
                }
            }
            link.b.rx.refill();
            link.b.rx.publish();
            let most = link.b.rx.ring().size() - link.b.rx.ring().free_len();
            prop_assert!(usize::from(most) <= 300 && *limit as usize <= BATCH_MAX);
            let limit = BurstLimit { frames: *limit, ..BurstLimit::MAX };
            // No more than there are buffers for.
            link.switch(BurstLimit { frames: limit.frames.min(2), ..limit });
            link.receive();
            link.a.tx.reclaim().expect("only what is out");
        }
        for _ in 0..64 {
            link.b.rx.refill();
            link.b.rx.publish();
            link.a.tx.publish();
            link.switch(BurstLimit { frames: 4, ..BurstLimit::MAX });
            link.receive();
        }
        prop_assert!(link.flying.is_empty());
    }
}

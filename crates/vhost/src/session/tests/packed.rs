//! What is different for packed rings: sizes and positions; and rings that are
//! stopped and started alone.

use super::*;

/// One ring of any size and position, running.
fn start(rig: &mut Rig, ring: u32, size: u32, base: u32) {
    rig.ok(Req::SET_VRING_NUM, &words(&[ring, size]), vec![]);
    rig.ok(Req::SET_VRING_BASE, &words(&[ring, base]), vec![]);
    rig.ok(Req::SET_VRING_ADDR, &addr(ring, USER_BASE), vec![]);
    let kick = longs(&[u64::from(ring)]);
    rig.ok(Req::SET_VRING_KICK, &kick, vec![eventfd()]);
}

#[test]
fn a_packed_ring_tells_its_position_in_both_halves() {
    // QEMU sends both positions, virtio-user the lower half.
    for base in [0x8000, 0x8007_8007, 7, 0x8007_0007] {
        let mut rig = Rig::new();
        rig.features(features::OFFERED);
        rig.share_memory();
        start(&mut rig, 1, 257, base);
        let (config, _) = &rig.rings.running[&1];
        assert!(config.features.packed);
        assert_eq!(
            (config.areas.size, u32::from(config.base)),
            (257, base & 0xffff)
        );
        rig.rings.progress = 3;
        let half = (base & 0xffff) + 3;
        assert_eq!(rig.base(1), half | half << 16);
    }
}

#[test]
fn any_size_will_do_for_a_packed_ring() {
    let mut rig = Rig::new();
    rig.features(features::OFFERED);
    for size in [1, 3, 257, 1000, 32_767, 32_768] {
        rig.ok(Req::SET_VRING_NUM, &words(&[0, size]), vec![]);
    }
    for size in [0, 32_769, 65_536 + 256, u32::MAX] {
        let error = rig.refused(Req::SET_VRING_NUM, &words(&[0, size]), vec![]);
        assert!(
            error.contains(&format!("{size} is no ring size")),
            "{error}"
        );
    }
}

/// The layout may come after what depends on it.
#[test]
fn sizes_and_positions_before_the_features_are_judged_when_the_ring_starts() {
    let cases = [
        (features::OFFERED, 100, 0x8005_8005, ""),
        (SPLIT, 100, 5, "ring size 100 is not a power of two"),
        (
            SPLIT,
            128,
            0x8005_8005,
            "0x80058005 is no position in a split ring",
        ),
        (SPLIT, 128, 5, ""),
    ];
    for (features, size, base, refusal) in cases {
        let mut rig = Rig::new();
        rig.ok(Req::SET_VRING_NUM, &words(&[1, size]), vec![]);
        rig.ok(Req::SET_VRING_BASE, &words(&[1, base]), vec![]);
        rig.share_memory();
        rig.features(features);
        rig.ok(Req::SET_VRING_ADDR, &addr(1, USER_BASE), vec![]);
        let (kick, ring) = (Req::SET_VRING_KICK, longs(&[1]));
        if refusal.is_empty() {
            rig.ok(kick, &ring, vec![eventfd()]);
            assert_eq!(rig.base(1), base);
        } else {
            let error = rig.refused(kick, &ring, vec![eventfd()]);
            assert!(error.contains(refusal), "{error}");
        }
    }
}

/// A frontend that names no position means that of a driver that was just reset.
#[test]
fn a_ring_without_a_position_starts_as_after_a_reset() {
    for (features, base) in [(features::OFFERED, 0x8000), (SPLIT, 0)] {
        let mut rig = Rig::new();
        rig.features(features);
        rig.share_memory();
        let both = base | if base == 0 { 0 } else { base << 16 };
        assert_eq!(rig.base(1), both, "never touched");
        rig.ok(Req::SET_VRING_NUM, &words(&[1, 256]), vec![]);
        rig.ok(Req::SET_VRING_ADDR, &addr(1, USER_BASE), vec![]);
        rig.ok(Req::SET_VRING_KICK, &longs(&[1]), vec![eventfd()]);
        assert_eq!(u32::from(rig.rings.running[&1].0.base), base);
    }
}

/// What VIRTIO_F_RING_RESET of the driver becomes: QEMU stops that vring, and
/// sets it up anew, perhaps smaller and elsewhere.
#[test]
fn one_ring_is_reset_while_the_other_runs() {
    for features in [features::OFFERED, SPLIT] {
        let mut rig = Rig::new();
        rig.features(features);
        rig.share_memory();
        for ring in 0..2 {
            start(&mut rig, ring, 256, 0x8000);
            rig.ok(Req::SET_VRING_ENABLE, &words(&[ring, 1]), vec![]);
        }
        for size in [64, 128, 256] {
            rig.base(1);
            assert_eq!(rig.rings.running.len(), 1);
            assert_eq!(rig.rings.running[&0].0.areas.size, 256, "not touched");
            start(&mut rig, 1, size, 0x8000);
            let (config, enabled) = &rig.rings.running[&1];
            assert_eq!((u32::from(config.areas.size), *enabled), (size, true));
            assert_eq!(rig.session.missing(), None);
        }
    }
}

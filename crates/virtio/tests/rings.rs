//! The device half against the driver half.

use pollux_packet::FrameSet;
use pollux_testkit::{Guest, GuestSpec};
use pollux_virtio::device::BurstLimit;
use pollux_virtio::driver::ChainShape;

#[test]
fn a_frame_arrives_as_it_was_sent() {
    let mut a = Guest::new(GuestSpec::default());
    let mut b = Guest::new(GuestSpec::default());
    let (mut a_tx, _) = a.device();
    let (_, mut b_rx) = b.device();
    b.rx.refill();
    b.rx.publish();
    for len in [14_u32, 60, 64, 65, 1518, 2000] {
        let frame: Vec<u8> = (0..len).map(|i| i.to_le_bytes()[0]).collect();
        a.tx.send(&frame, ChainShape::JOINED).expect("room");
        a.tx.publish();
        let burst = a_tx.receive(BurstLimit::MAX);
        assert_eq!(burst.batch.len(), 1);
        let sent = b_rx.transmit(&burst.batch, FrameSet::first(1));
        assert_eq!((sent.frames, sent.bytes), (1, u64::from(len)));
        burst.returns.finish(1);
        assert_eq!(a.tx.reclaim(), Ok(1));
        let got = b.rx.receive(1, |received| {
            assert_eq!(received.to_vec(), frame);
            assert_eq!(received.num_buffers(), 1);
        });
        assert_eq!(got, Ok(1));
    }
}

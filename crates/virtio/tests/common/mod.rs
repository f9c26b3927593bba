//! What several test files of this crate need.
#![allow(
    dead_code,
    reason = "each test file is a crate of its own and uses a part"
)]

pub(crate) mod race;

use pollux_packet::DropReason;
use pollux_sys::EventFd;
use pollux_testkit::{Guest, GuestSpec, RawDesc, RawQueue, RawUsed};
use pollux_virtio::device::{self, BurstLimit};
use pollux_virtio::driver::{ChainShape, NetConfig};
use pollux_virtio::{ChainError, Features};

pub(crate) use pollux_testkit::{frame_bytes as frame, gather, transmit};

/// A modern driver with mergeable buffers.
pub(crate) const MODERN: Features = Features {
    version_1: true,
    mergeable: true,
    event_idx: false,
    ..Features::LEGACY
};

/// A modern driver without mergeable buffers.
pub(crate) const UNMERGED: Features = Features {
    mergeable: false,
    ..MODERN
};

/// A legacy driver: the net header has 10 bytes.
pub(crate) const LEGACY: Features = Features {
    version_1: false,
    mergeable: false,
    event_idx: false,
    ..Features::LEGACY
};

/// The same in every layout and order of returns.
pub(crate) fn in_every_layout(features: &[Features]) -> impl Iterator<Item = Features> + '_ {
    let layouts = [(false, false), (false, true), (true, false), (true, true)];
    features.iter().flat_map(move |&features| {
        layouts.map(|(packed, in_order)| Features {
            packed,
            in_order,
            ..features
        })
    })
}

/// Position of a ring of `size` that was gone around and stands at `index`.
pub(crate) fn base_of(features: Features, index: u16, size: u16) -> u16 {
    match features.packed {
        false => index,
        true => (index % size) | (index & 0x8000),
    }
}

/// Position at which a driver starts after a reset.
pub(crate) fn first_base(features: Features) -> u16 {
    base_of(features, if features.packed { 0x8000 } else { 0 }, 1)
}

/// An entry of the used ring.
pub(crate) fn used(id: u16, len: u32) -> RawUsed {
    RawUsed {
        id: u32::from(id),
        len,
    }
}

/// What one burst brought.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Polled {
    pub(crate) frames: Vec<Vec<u8>>,
    pub(crate) drops: Vec<DropReason>,
    pub(crate) chains: u32,
    pub(crate) units: u32,
}

/// Receives one burst and gives everything back.
pub(crate) fn poll_with(ring: &mut device::TxRing, limit: BurstLimit) -> Polled {
    let burst = ring.receive(limit);
    let frames = (0..burst.batch.len())
        .map(|index| gather(&burst.batch.frame(index)))
        .collect::<Vec<_>>();
    let units = burst.returns().units();
    let returns = burst.finish(frames.len());
    let drops: Vec<_> = returns.drops().collect();
    let chains = returns.chains();
    assert_eq!(chains as usize, frames.len() + drops.len());
    assert!(units >= chains, "{units} units for {chains} chains");
    Polled {
        frames,
        drops,
        chains,
        units,
    }
}

/// Receives one burst as long as may be.
pub(crate) fn poll(ring: &mut device::TxRing) -> Polled {
    poll_with(ring, BurstLimit::MAX)
}

/// A guest whose rings are written by hand, and an honest one beside it.
pub(crate) struct World {
    pub(crate) guest: Guest,
    pub(crate) tx: RawQueue,
    pub(crate) rx: RawQueue,
    pub(crate) device_tx: device::TxRing,
    pub(crate) device_rx: device::RxRing,
    pub(crate) other: Guest,
    other_tx: device::TxRing,
    other_rx: device::RxRing,
    round: u32,
}

impl World {
    pub(crate) fn new(spec: GuestSpec) -> Self {
        Self::with_calls(spec, None, None)
    }

    /// With an eventfd for each ring that is written by hand.
    pub(crate) fn with_calls(spec: GuestSpec, tx: Option<&EventFd>, rx: Option<&EventFd>) -> Self {
        let guest = Guest::new(spec).expect("guest memory");
        let other = Guest::new(GuestSpec::default()).expect("guest memory");
        let [tx, rx] = [tx, rx].map(|fd| fd.map(|fd| fd.try_clone().expect("dup")));
        let (device_tx, device_rx) = guest.device_with_calls(tx, rx);
        let (other_tx, other_rx) = other.device();
        let raw = |config: NetConfig| RawQueue::new(&guest.memory, &config);
        Self {
            tx: raw(guest.tx_config()),
            rx: raw(guest.rx_config()),
            guest,
            device_tx,
            device_rx,
            other,
            other_tx,
            other_rx,
            round: 0,
        }
    }

    /// Ring of `size` with other things as usual.
    pub(crate) fn of_size(size: u16, features: Features) -> Self {
        Self::new(GuestSpec {
            ring_size: size,
            features,
            base: first_base(features),
            ..GuestSpec::default()
        })
    }

    /// Guest address of TX buffer `index`.
    pub(crate) fn tx_buffer(&self, index: u16) -> u64 {
        let config = self.guest.tx_config();
        config.buffers_addr + u64::from(index) * u64::from(config.buffer_bytes)
    }

    /// Guest address of RX buffer `index`.
    pub(crate) fn rx_buffer(&self, index: u16) -> u64 {
        let config = self.guest.rx_config();
        config.buffers_addr + u64::from(index) * u64::from(config.buffer_bytes)
    }

    /// Guest address of a TX indirect table.
    pub(crate) fn tx_table(&self) -> u64 {
        self.guest.tx_config().tables_addr
    }

    /// Guest address of an RX indirect table.
    pub(crate) fn rx_table(&self) -> u64 {
        self.guest.rx_config().tables_addr
    }

    /// First guest address behind all memory.
    pub(crate) fn end(&self) -> u64 {
        let place = self.guest.memory.regions().last().expect("memory").place();
        place.guest_addr + place.size
    }

    pub(crate) fn header_bytes(&self) -> u32 {
        self.guest.tx_config().features.net_header_bytes()
    }

    /// Writes an empty net header and a frame at `addr`; returns their length.
    pub(crate) fn write_frame(&self, addr: u64, frame: &[u8]) -> u32 {
        let header = vec![0; self.header_bytes() as usize];
        self.tx.write(addr, &[&header, frame].concat());
        self.header_bytes() + u32::try_from(frame.len()).expect("short")
    }

    /// Offers TX chains one by one: publishes each and takes a burst.
    pub(crate) fn send_chain(&mut self, first: u16, chain: &[RawDesc]) -> Polled {
        self.tx.offer_chain(first, chain);
        self.tx.publish();
        poll(&mut self.device_tx)
    }

    /// Posts an RX chain and publishes it.
    pub(crate) fn post_chain(&mut self, first: u16, chain: &[RawDesc]) {
        self.rx.offer_chain(first, chain);
        self.rx.publish();
    }

    /// A good frame passes the ring that was ill-treated.
    #[track_caller]
    pub(crate) fn tx_passes(&mut self) {
        self.round += 1;
        let sent = frame(self.round, 60 + self.round % 100);
        let index = self.tx.size() - 1;
        let addr = self.tx_buffer(index);
        let len = self.write_frame(addr, &sent);
        self.tx.take_used();
        let polled = self.send_chain(index, &[RawDesc::readable(addr, len)]);
        assert_eq!(polled.frames, [sent]);
        assert!(polled.drops.is_empty());
        let used = RawUsed {
            id: u32::from(index),
            len: 0,
        };
        assert_eq!(self.tx.take_used(), [used]);
        self.neighbour_passes();
    }

    /// A good buffer gets a frame on the ring that was ill-treated.
    #[track_caller]
    pub(crate) fn rx_passes(&mut self) {
        self.round += 1;
        let sent = frame(self.round, 60 + self.round % 100);
        let index = self.rx.size() - 1;
        let addr = self.rx_buffer(index);
        self.rx.take_used();
        self.post_chain(index, &[RawDesc::writable(addr, 2048)]);
        let report = transmit(&mut self.device_rx, std::slice::from_ref(&sent));
        assert_eq!((report.frames, report.dropped), (1, 0));
        let header = self.header_bytes();
        let used = RawUsed {
            id: u32::from(index),
            len: header + u32::try_from(sent.len()).expect("short"),
        };
        assert_eq!(self.rx.take_used(), [used]);
        assert_eq!(self.rx.read(addr + u64::from(header), sent.len()), sent);
        self.neighbour_passes();
    }

    /// A frame passes both rings of the other guest.
    #[track_caller]
    pub(crate) fn neighbour_passes(&mut self) {
        self.round += 1;
        let sent = frame(self.round, 64);
        self.other
            .tx
            .send(&sent, ChainShape::JOINED)
            .expect("the other ring has room");
        self.other.tx.publish();
        let polled = poll(&mut self.other_tx);
        assert_eq!(polled.frames, std::slice::from_ref(&sent));
        assert_eq!(self.other.tx.reclaim(), Ok(1));
        self.other.rx.refill();
        self.other.rx.publish();
        assert_eq!(transmit(&mut self.other_rx, &polled.frames).frames, 1);
        let got = self
            .other
            .rx
            .receive(1, |received| assert_eq!(received.to_vec(), sent));
        assert_eq!(got, Ok(1));
    }
}

/// A frame for this chain is dropped and the chain goes back with length 0.
#[track_caller]
pub(crate) fn assert_bad_rx(world: &mut World, head: u16, chain: &[RawDesc], error: ChainError) {
    let before = world.device_rx.chain_errors().get(error);
    world.post_chain(head, chain);
    let report = transmit(&mut world.device_rx, &[frame(1, 100)]);
    assert_eq!((report.frames, report.dropped), (0, 1), "{error}");
    assert_eq!(report.drops.get(DropReason::BadRxChain), 1, "{error}");
    assert_eq!(world.rx.take_used(), [used(head, 0)], "{error}");
    assert_eq!(world.device_rx.chain_errors().get(error), before + 1);
    assert_eq!(world.device_rx.fault(), None);
    world.rx_passes();
}

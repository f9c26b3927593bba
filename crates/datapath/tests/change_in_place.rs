//! Queues that control changes where they are: nobody else is in them, and they
//! go on.

mod common;

use std::any::Any;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{BYTES, Bed, events, port_name};
use pollux_datapath::{Plan, Port, QueueState, RxQueue, TxQueue};
use pollux_packet::{BurstLimit, DropReason};
use pollux_sys::EventFd;
use pollux_testkit::{Device, Guest, RawRing, wait_until};
use pollux_virtio::device;
use pollux_virtio::{GuestMemory, Region};

fn tx_ring(queue: &mut dyn RxQueue) -> &mut device::TxRing {
    let queue: &mut dyn Any = queue;
    queue.downcast_mut().expect("a guest's ring")
}

fn rx_ring(queue: &mut dyn TxQueue) -> &mut device::RxRing {
    let queue: &mut dyn Any = queue;
    queue.downcast_mut().expect("a guest's ring")
}

fn port(bed: &Bed, station: u16) -> Arc<Port> {
    let port = bed.switch.port(&port_name(station));
    port.expect("the port is in the plan")
}

/// The guest's memory, mapped once more.
fn mapped_again(guest: &Guest) -> Arc<GuestMemory> {
    let regions = guest.places().map(|place| {
        let region = Region::map(guest.file.as_fd(), place);
        region.expect("it was mapped before")
    });
    Arc::new(GuestMemory::new(regions).expect("as before"))
}

#[test]
fn a_queue_that_was_stopped_is_its_owners_type_again() {
    let bed = Bed::new(2, 1);
    let port = port(&bed, 0);
    let rx: Box<dyn Any> = port.stop_rx().expect("it ran");
    let tx: Box<dyn Any> = port.stop_tx().expect("it ran");
    let size = bed.stations[0].guest.tx_config().areas.size;
    let ring = rx.downcast::<device::TxRing>().expect("what was started");
    assert_eq!((ring.base(), ring.size()), (0, size));
    assert!(tx.downcast::<device::RxRing>().is_ok());
}

#[test]
fn where_no_queue_is_nothing_is_changed() {
    let bed = Bed::new(2, 1);
    let port = port(&bed, 0);
    let queues = (port.stop_rx(), port.stop_tx());
    assert!(queues.0.is_some() && queues.1.is_some());
    let change = || unreachable!("no queue is there");
    assert_eq!(port.change_rx(|_| change()), None::<()>);
    assert_eq!(port.change_tx(|_| change()), None::<()>);
    assert_eq!(port.rx_state(), QueueState::Stopped);
    bed.switch.apply(&Plan::default()).expect("an empty plan");
    assert_eq!(port.change_rx(|_| change()), None::<()>);
    assert_eq!(port.change_tx(|_| change()), None::<()>);
    assert_eq!(port.rx_state(), QueueState::Removed);
}

/// A queue to receive from is only visited later: frames wait in the ring.
#[test]
fn changes_of_receive_queues_lose_no_frame() {
    let mut bed = Bed::new(2, 2);
    bed.teach();
    let ports = [port(&bed, 0), port(&bed, 1)];
    let end = Instant::now() + Duration::from_millis(500);
    let mut changes = 0;
    bed.exchange_while(&[], |bed| {
        for (port, station) in ports.iter().zip(&bed.stations) {
            let memory = mapped_again(&station.guest);
            let areas = station.guest.tx_config().areas;
            let call = EventFd::new().expect("eventfd");
            let moved = port.change_rx(|queue| {
                let ring = tx_ring(queue);
                drop(ring.set_call(Some(call)));
                ring.relocate(memory, areas)
            });
            assert_eq!(moved, Some(Ok(())));
            changes += 1;
        }
        Instant::now() < end
    });
    assert!(changes > 10, "{changes}");
    for station in [0, 1] {
        assert_eq!(bed.counters(station).tx_drops(), 0);
    }
}

/// Under load: what does not arrive is counted, as one reason and no other.
#[test]
fn a_thousand_changes_of_a_transmit_queue_lose_only_what_is_counted() {
    let mut bed = Bed::new(3, 2);
    bed.teach();
    let port = port(&bed, 2);
    let arrived = bed.stations[2].received();
    let sent = |bed: &Bed| bed.stations[0].sent_to(2) + bed.stations[1].sent_to(2);
    let before = sent(&bed);
    let mut changes = 0;
    bed.exchange_while(&[], |bed| {
        for station in [0, 1] {
            while bed.station(station).in_flight() < 100 && bed.station(station).send(2, BYTES) {}
            bed.station(station).publish();
        }
        let old = port.change_tx(|queue| rx_ring(queue).set_call(None));
        assert!(old.is_some_and(|call| call.is_none()));
        bed.assert_identities();
        changes += 1;
        changes < 1000
    });
    let lost = bed.drops(2, DropReason::PortReconfiguring);
    let full = bed.drops(2, DropReason::RxRingFull);
    let arrived = bed.stations[2].received() - arrived;
    assert_eq!(sent(&bed) - before, arrived + lost + full);
    assert_eq!(bed.counters(2).tx_drops(), lost + full);
    assert!(
        arrived > 1000,
        "{arrived} arrived, {lost} and {full} did not"
    );
    assert_eq!(port.tx_state(), QueueState::Running);
}

#[test]
fn frames_for_a_queue_that_is_being_changed_are_dropped_with_a_reason() {
    const FRAMES: u64 = 20;
    let mut bed = Bed::new(3, 1);
    bed.teach();
    let port = port(&bed, 2);
    let memory = mapped_again(&bed.stations[2].guest);
    let areas = bed.stations[2].guest.rx_config().areas;
    let reconfiguring = |bed: &Bed| bed.drops(2, DropReason::PortReconfiguring);
    let arrived = bed.stations[2].received();
    let moved = port.change_tx(|queue| {
        for _ in 0..FRAMES {
            assert!(bed.station(0).send(2, BYTES));
        }
        bed.station(0).publish();
        // The worker neither waits for this nor comes in.
        wait_until("the frames are dropped", || reconfiguring(&bed) == FRAMES);
        rx_ring(queue).relocate(memory, areas)
    });
    assert_eq!(moved, Some(Ok(())));
    assert_eq!(port.tx_state(), QueueState::Running);
    bed.send(0, 2, FRAMES);
    bed.send(1, 2, FRAMES);
    assert_eq!(bed.stations[2].received() - arrived, 2 * FRAMES);
    assert_eq!(reconfiguring(&bed), FRAMES);
    assert_eq!(bed.counters(2).tx_drops(), FRAMES);
}

#[test]
fn what_a_change_repairs_or_breaks_shows_in_the_state() {
    let mut bed = Bed::new(3, 1);
    events::begin();
    bed.teach();
    let port = port(&bed, 2);
    let device = Device::of(&bed.stations[2].guest);
    let config = bed.stations[2].guest.tx_config();
    let memory = Arc::clone(&bed.stations[2].guest.memory);
    let ring = RawRing::new(memory, config.areas, 0);
    let avail_idx = bed.station(2).guest.tx.ring().avail_idx();

    // It breaks in the hands of control: no worker has to meet it.
    let fault = port.change_rx(|queue| {
        ring.set_avail_idx(avail_idx.wrapping_add(1000));
        assert!(queue.receive(BurstLimit::MAX).batch.is_empty());
        queue.fault().expect("it is broken")
    });
    assert_eq!(port.rx_state(), QueueState::Broken(fault.expect("it ran")));
    let reported = || events::faults("p2", "rx").len();
    wait_until("it is reported", || reported() == 1);
    // A change that leaves it as it is: still the same fault.
    let call = EventFd::new().expect("eventfd");
    let old = port.change_rx(|queue| tx_ring(queue).set_call(Some(call)));
    assert!(old.is_some_and(|call| call.is_none()));
    assert!(matches!(port.rx_state(), QueueState::Broken(_)));
    bed.exchange(2000, &[2]);
    assert_eq!(reported(), 1);

    ring.set_avail_idx(avail_idx);
    let (again, _) = device.resume();
    assert_eq!(port.change_rx(|queue| *tx_ring(queue) = again), Some(()));
    assert_eq!(port.rx_state(), QueueState::Running);
    bed.send(2, 0, 100);

    // When it breaks again that is news again.
    ring.set_avail_idx(avail_idx.wrapping_add(2000));
    wait_until("it is reported again", || reported() == 2);
    bed.exchange(4000, &[2]);
}

/// What a disabled guest sends is counted like any other drop.
#[test]
fn a_disabled_queue_is_drained_and_counted() {
    const FRAMES: u64 = 500;
    let mut bed = Bed::new(3, 1);
    bed.teach();
    let port = port(&bed, 2);
    let received = bed.stations[0].received();
    let set_discard = |discards| port.change_rx(|queue| tx_ring(queue).set_discard(discards));
    assert_eq!(set_discard(true), Some(()));
    bed.send(2, 0, FRAMES);
    assert_eq!(bed.drops(2, DropReason::QueueDisabled), FRAMES);
    assert_eq!(bed.stations[0].received(), received);
    assert_eq!(set_discard(false), Some(()));
    bed.exchange(1000, &[]);
    assert_eq!(bed.drops(2, DropReason::QueueDisabled), FRAMES);
    let lost = bed.stations[0].flow(2, 0).lost;
    bed.send(2, 0, 1);
    assert_eq!(bed.stations[0].flow(2, 0).lost, lost + FRAMES);
}

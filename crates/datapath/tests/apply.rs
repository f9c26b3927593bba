//! Plans that change while frames flow: what stays as it is notices nothing.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::{
    BYTES, Bed, alone, assert_port_identity, assert_worker_identities, attach, config,
    cross_connect, events, plan, port_name, worker_name,
};
use pollux_datapath::{
    Action, ApplyError, Budget, Burst, PORTS_MAX, PacketBudget, Plan, PortCounters, PortPlan,
    Queue, QueueState, RxQueue, Switch, SwitchConfig, WorkerPlan, diff,
};
use pollux_packet::{BurstLimit, DropReason};
use pollux_switch::{FdbConfig, FdbError, PortId};
use pollux_testkit::{Device, EVERYBODY, GuestSpec, Random, Station, wait_until};

/// Frames on their way from a station to its partner, and from each of the
/// others: together they fit a receive ring of 256, so no frame of the pair
/// need be lost.
const PAIR_WINDOW: u64 = 64;
const OTHER_WINDOW: u64 = 16;

/// One round of a closed loop between stations 0 and 1; what the others do is
/// their own loss.
fn round(stations: &mut [Station], random: &mut Random) {
    let count = u16::try_from(stations.len()).expect("few stations");
    for number in 2..count {
        let station = &mut stations[usize::from(number)];
        station.reclaim();
        let to = match random.below(10) {
            0 => EVERYBODY,
            _ => u16::try_from(random.below(count.into())).expect("few stations"),
        };
        while station.in_flight() < OTHER_WINDOW && station.send(to, BYTES) {}
        station.publish();
    }
    // After the others took their buffers back: what they sent is here then.
    stations.iter_mut().for_each(|station| {
        station.poll();
    });
    send_pair(stations, PAIR_WINDOW);
    std::thread::yield_now();
}

fn send_pair(stations: &mut [Station], window: u64) {
    for (from, to) in [(0_u16, 1_u16), (1, 0)] {
        let arrived = stations[usize::from(to)].flow(from, to).next();
        let station = &mut stations[usize::from(from)];
        while station.sent_to(to) < arrived + window && station.send(to, BYTES) {}
        station.publish();
    }
}

fn assert_pair_lost_nothing(bed: &mut Bed, without: &[u16]) {
    bed.settle_but(without);
    for (from, to) in [(0, 1), (1, 0)] {
        let sent = bed.stations[usize::from(from)].sent_to(to);
        let flow = bed.stations[usize::from(to)].flow(from, to);
        assert_eq!((flow.received, flow.lost), (sent, 0), "{from} to {to}");
    }
}

/// Runs `control` while the stations of `bed` send in a closed loop.
fn under_load(bed: &mut Bed, seed: u64, control: impl FnOnce(&Switch, &[Device])) {
    let devices: Vec<_> = bed
        .stations
        .iter()
        .map(|station| Device::of(&station.guest))
        .collect();
    let stop = AtomicBool::new(false);
    let exchanged = AtomicU64::new(0);
    let (stations, switch) = (&mut bed.stations, &bed.switch);
    std::thread::scope(|scope| {
        // The load ends also when `control` panics.
        let _stop = StopOnDrop(&stop);
        let (load, exchanged) = (&stop, &exchanged);
        scope.spawn(move || {
            let mut random = Random::new(seed);
            while !load.load(Ordering::Relaxed) {
                round(stations, &mut random);
                let flows = [stations[0].flow(1, 0), stations[1].flow(0, 1)];
                let frames = flows.map(|flow| flow.received).into_iter().min();
                exchanged.store(frames.unwrap_or(0), Ordering::Relaxed);
            }
        });
        control(switch, &devices);
        // Nothing is stuck, and it was not the scheduler that kept it quiet.
        let end = exchanged.load(Ordering::Relaxed) + 500;
        wait_until("the pair goes on", || {
            exchanged.load(Ordering::Relaxed) >= end
        });
    });
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn random_budget(random: &mut Random) -> Budget {
    Budget {
        packets: match random.below(4) {
            0 => PacketBudget::Units(1 + random.below(100)),
            1 => PacketBudget::RingMultiple(1 + random.below(4)),
            2 => PacketBudget::Unlimited,
            _ => Budget::default().packets,
        },
        bytes: u64::from(1 + random.below(1 << 20)),
    }
}

/// One of the changes that an operator can make, of any port but without
/// taking the pair away.
fn change(plan: &mut Plan, random: &mut Random) {
    match random.below(5) {
        0 | 1 => {
            let name = port_name(2 + u16::try_from(random.below(3)).expect("few"));
            match plan.ports.iter().position(|port| port.name == name) {
                Some(index) => drop(plan.ports.remove(index)),
                None => plan.ports.insert(
                    random.below(3) as usize,
                    PortPlan {
                        budget: random_budget(random),
                        ..PortPlan::new(&name)
                    },
                ),
            }
        }
        2 => {
            let index = random.below(u32::try_from(plan.ports.len()).expect("few")) as usize;
            plan.ports[index].budget = random_budget(random);
        }
        3 => {
            if plan.workers.len() == 2 {
                plan.workers.remove(random.below(2) as usize);
                for port in &mut plan.ports {
                    let stays = |name: &String| *name == plan.workers[0].name;
                    port.worker = port.worker.take().filter(stays);
                }
            } else {
                let name = worker_name(u16::from(plan.workers[0].name == "w0"));
                plan.workers.push(WorkerPlan { name, core: None });
            }
        }
        _ => {
            for port in &mut plan.ports {
                if random.one_in(2) {
                    port.worker = Some(random.choose(&plan.workers).name.clone());
                }
            }
        }
    }
}

/// Every counter of `after` is at least that of `before`.
fn assert_grown(port: &str, before: &PortCounters, after: &PortCounters) {
    let words = |counters: &PortCounters| {
        let PortCounters {
            rx_frames,
            rx_bytes,
            unicast,
            flooded,
            copies,
            tx_frames,
            tx_bytes,
            drops,
        } = *counters;
        let mut words = vec![rx_frames, rx_bytes, unicast, flooded, copies, tx_frames];
        words.push(tx_bytes);
        words.extend(drops.iter().map(|(_, count)| count));
        words
    };
    let grown = words(before)
        .iter()
        .zip(words(after))
        .all(|(before, after)| *before <= after);
    assert!(
        grown,
        "{port} counted backwards: {before:?}, then {after:?}"
    );
}

#[test]
fn a_pair_notices_nothing_of_200_changes() {
    const SEED: u64 = 38;
    let mut bed = Bed::new(5, 2);
    bed.teach();
    let mut planned = bed.switch.plan();
    let identities = ["p0", "p1"].map(|name| bed.switch.port(name).unwrap().identity());
    under_load(&mut bed, SEED, |switch, devices| {
        let mut random = Random::new(SEED);
        let mut counted = ["p0", "p1"].map(|name| switch.port_counters(name).unwrap());
        for _ in 0..200 {
            let before = planned.clone();
            change(&mut planned, &mut random);
            let actions = switch.apply(&planned).unwrap();
            assert_eq!(actions, diff(&before, &planned));
            assert_eq!(switch.plan(), planned);
            for (name, identity) in ["p0", "p1"].into_iter().zip(identities) {
                assert_eq!(switch.port(name).unwrap().identity(), identity);
            }
            for action in &actions {
                if let Action::AddPort(port) = action
                    && !random.one_in(4)
                {
                    let number: u16 = port.name[1..].parse().unwrap();
                    attach(switch, number, &devices[usize::from(number)]);
                }
            }
            for (name, counted) in ["p0", "p1"].into_iter().zip(&mut counted) {
                let now = switch.port_counters(name).unwrap();
                assert_port_identity(name, &now);
                assert_grown(name, counted, &now);
                *counted = now;
            }
            for worker in &planned.workers {
                assert_worker_identities(switch, &worker.name);
            }
        }
    });
    assert_pair_lost_nothing(&mut bed, &[2, 3, 4]);
}

#[test]
fn what_is_asked_for_is_in_force() {
    let mut bed = Bed::new(4, 2);
    let mut planned = bed.switch.plan();
    for (port, worker) in [("p0", "w0"), ("p1", "w1"), ("p2", "w0"), ("p3", "w1")] {
        assert_eq!(bed.switch.worker_of_port(port).as_deref(), Some(worker));
    }
    assert_eq!(bed.switch.apply(&planned).unwrap(), []);

    // The worker that polls p2 counts its frames.
    planned.ports[2].worker = Some("w1".to_owned());
    bed.switch.apply(&planned).unwrap();
    assert_eq!(bed.switch.worker_of_port("p2").as_deref(), Some("w1"));
    let frames = |bed: &Bed, worker| {
        let counters = bed.switch.worker_counters(worker);
        counters.unwrap().worker.frames
    };
    let before = frames(&bed, "w1");
    bed.send(2, EVERYBODY, 10);
    assert_eq!(frames(&bed, "w1"), before + 10);
    assert_eq!(frames(&bed, "w0"), 0);

    // Ports that ask for nobody go to who polls fewest.
    let mut fewer = planned.clone();
    fewer.workers.remove(1);
    for port in &mut fewer.ports {
        port.worker = None;
    }
    bed.switch.apply(&fewer).unwrap();
    assert_eq!(bed.switch.worker_of_port("p1").as_deref(), Some("w0"));
    assert!(bed.switch.worker_counters("w1").is_none());
    bed.send(1, EVERYBODY, 10);
    assert_eq!(frames(&bed, "w0"), 10);
}

#[test]
fn counters_outlive_their_worker() {
    let mut bed = Bed::new(2, 2);
    bed.teach();
    bed.send(1, 0, 50);
    let before = [0, 1].map(|station| bed.counters(station));
    let mut planned = bed.switch.plan();
    let removed = planned.workers.pop();
    planned.ports[1].worker = None;
    bed.switch.apply(&planned).unwrap();
    assert_eq!([0, 1].map(|station| bed.counters(station)), before);
    bed.send(1, 0, 7);
    assert_eq!(bed.counters(1).rx_frames, before[1].rx_frames + 7);
    // A new worker of that name starts at 0, the ports do not.
    planned.workers.extend(removed);
    bed.switch.apply(&planned).unwrap();
    let worker = bed.switch.worker_counters("w1").unwrap().worker;
    assert_eq!(worker.frames, 0);
    assert_eq!(bed.counters(1).rx_frames, before[1].rx_frames + 7);
}

#[test]
fn bad_plans_are_refused_whole() {
    let mut bed = Bed::new(3, 1);
    bed.teach();
    let good = bed.switch.plan();
    let counted = [0, 1, 2].map(|station| bed.counters(station));
    let bad = |change: &dyn Fn(&mut Plan)| {
        let mut plan = good.clone();
        // Something that could be done, first.
        plan.ports.push(PortPlan::new("new"));
        plan.ports.remove(0);
        change(&mut plan);
        plan
    };
    let nowhere = pollux_sys::available_cores().into_iter().max().unwrap() + 1;
    let plans = [
        bad(&|plan| plan.ports[0].name.clear()),
        bad(&|plan| plan.ports[0].name = "new".to_owned()),
        bad(&|plan| plan.ports[1].name = "p\0".to_owned()),
        bad(&|plan| plan.ports[1].worker = Some("nobody".to_owned())),
        bad(&|plan| plan.workers.clear()),
        bad(&|plan| plan.workers[0].core = Some(nowhere)),
        bad(&|plan| plan.workers.push(plan.workers[0].clone())),
        bad(&|plan| plan.mode = cross_connect(&[(1, 1)])),
        bad(&|plan| plan.mode = cross_connect(&[(0, 1)])),
        bad(&|plan| {
            let more = (0..1024).map(|port| PortPlan::new(&format!("more{port}")));
            plan.ports.extend(more);
        }),
    ];
    for plan in &plans {
        let refused = bed.switch.apply(plan);
        assert!(matches!(refused, Err(ApplyError::Plan(_))), "{refused:?}");
        assert_eq!(bed.switch.plan(), good);
    }
    assert_eq!([0, 1, 2].map(|station| bed.counters(station)), counted);
    bed.send(0, 1, 10);
    assert_eq!(bed.stations[1].flow(0, 1).received, 10);
    assert_eq!(bed.stations[2].flow(0, 1).received, 0);
}

#[test]
fn a_port_goes_and_comes_under_traffic_to_it() {
    let mut bed = Bed::new(3, 2);
    bed.teach();
    let full = bed.switch.plan();
    let mut less = full.clone();
    less.ports.pop();
    let device = Device::of(&bed.stations[2].guest);
    let stop = AtomicBool::new(false);
    let (stations, switch) = (&mut bed.stations, &bed.switch);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let load = &stop;
        scope.spawn(move || {
            while !load.load(Ordering::Relaxed) {
                for (station, to) in stations.iter_mut().zip([2, 2, 0]) {
                    while station.send(to, BYTES) {}
                    station.publish();
                }
                stations.iter_mut().for_each(|station| {
                    station.poll();
                });
                std::thread::yield_now();
            }
        });
        for _ in 0..40 {
            switch.apply(&less).unwrap();
            switch.apply(&full).unwrap();
            attach(switch, 2, &device);
        }
    });
    wait_until("the senders have all buffers back", || {
        bed.poll();
        bed.stations.iter().all(|station| station.in_flight() == 0)
    });
    bed.turns();
    bed.assert_identities();
    for from in [0, 1] {
        // What was not flooded was for port 2; nothing was dropped before.
        let counters = bed.counters(from);
        assert_eq!(counters.rx_frames, bed.stations[usize::from(from)].sent());
        assert_eq!(counters.rx_drops(), 0);
    }
    // It may still be sending.
    assert!(bed.counters(2).tx_frames <= bed.stations[2].received());
}

#[test]
fn a_receive_ring_may_be_taken_away_under_traffic() {
    let mut bed = Bed::new(2, 1);
    bed.teach();
    let stop = AtomicBool::new(false);
    let (stations, switch) = (&mut bed.stations, &bed.switch);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let load = &stop;
        scope.spawn(move || {
            while !load.load(Ordering::Relaxed) {
                while stations[0].send(1, BYTES) {}
                stations[0].publish();
                stations.iter_mut().for_each(|station| {
                    station.poll();
                });
                std::thread::yield_now();
            }
        });
        let port = switch.port("p1").unwrap();
        for turn in 0..200 {
            let queue = port.stop_tx().unwrap();
            if turn % 2 == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
            assert!(port.start_tx(queue).unwrap().is_none());
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    bed.settle();
    let counters = bed.counters(1);
    let missed = [
        DropReason::PortDown,
        DropReason::PortReconfiguring,
        DropReason::RxRingFull,
    ]
    .map(|reason| counters.drops.get(reason));
    assert!(missed[0] > 0, "{counters:?}");
    assert_eq!(counters.tx_drops(), missed.iter().sum::<u64>());
    let sent = bed.stations[0].sent_to(1);
    let received = bed.stations[1].flow(0, 1).received;
    assert_eq!(sent, received + counters.tx_drops());
}

#[test]
fn frames_wait_in_a_ring_that_is_stopped() {
    let mut bed = Bed::new(2, 2);
    bed.teach();
    under_load(&mut bed, 1, |switch, devices| {
        let mut random = Random::new(5);
        for turn in 0..300 {
            let number = u16::try_from(random.below(2)).unwrap();
            let port = switch.port(&port_name(number)).unwrap();
            let queue = port.stop_rx().unwrap();
            if random.one_in(4) {
                std::thread::sleep(Duration::from_micros(100));
            }
            let queue = match turn % 2 {
                0 => queue,
                // As after a reconnect: a new device half.
                _ => Box::new(devices[usize::from(number)].resume().0),
            };
            assert!(port.start_rx(queue).unwrap().is_none());
        }
    });
    assert_pair_lost_nothing(&mut bed, &[]);
    for station in [0, 1] {
        assert_eq!(bed.counters(station).tx_drops(), 0);
    }
}

/// B-66: whoever looks changes nothing, and sees one moment.
#[test]
fn looking_disturbs_nobody() {
    let mut bed = Bed::new(3, 2);
    bed.teach();
    under_load(&mut bed, 2, |switch, _| {
        let ports: Vec<_> = (0..3)
            .map(|n| switch.port(&port_name(n)).unwrap())
            .collect();
        let mut counted: Vec<_> = ports
            .iter()
            .map(|port| switch.port_counters(port.name()).unwrap())
            .collect();
        for _ in 0..300 {
            for (port, counted) in ports.iter().zip(&mut counted) {
                assert_eq!(port.rx_state(), QueueState::Running);
                assert_eq!(port.tx_state(), QueueState::Running);
                let now = switch.port_counters(port.name()).unwrap();
                assert_port_identity(port.name(), &now);
                assert_grown(port.name(), counted, &now);
                *counted = now;
            }
            for worker in ["w0", "w1"] {
                assert_worker_identities(switch, worker);
            }
            let _ = (switch.plan(), switch.fdb().stats());
            std::thread::yield_now();
        }
    });
    assert_pair_lost_nothing(&mut bed, &[]);
    for station in [0, 1] {
        assert_eq!(bed.drops(station, DropReason::PortReconfiguring), 0);
    }
}

/// Reading more counters takes longer than a visit does.
#[test]
fn snapshots_of_many_ports_are_of_one_moment() {
    const PORTS: u16 = 1000;
    let mut plan = plan(PORTS, 1);
    for port in &mut plan.ports {
        // A visit ends, and is published, after each frame.
        port.budget.packets = PacketBudget::Units(1);
    }
    let mut bed = Bed::with(config(), &plan, &[GuestSpec::default(); 2]);
    under_load(&mut bed, 3, |switch, _| {
        for _ in 0..100 {
            assert_worker_identities(switch, "w0");
        }
    });
    bed.settle();
}

/// A queue with a bug.
struct Panics;

impl Queue for Panics {
    fn is_broken(&self) -> bool {
        false
    }

    fn fault(&self) -> Option<String> {
        None
    }
}

impl RxQueue for Panics {
    fn receive(&mut self, _: BurstLimit) -> Burst<'_> {
        panic!("a bug, for the test");
    }

    fn size(&self) -> u16 {
        1
    }
}

/// The plan is in force but for a dead worker of that name.
fn assert_died(switch: &Switch, planned: &Plan, name: &str) {
    let applied = switch.apply(planned);
    assert!(
        matches!(&applied, Err(ApplyError::WorkerDied { worker }) if worker == name),
        "{applied:?}"
    );
    assert_eq!(switch.plan(), *planned);
}

#[test]
fn a_dead_worker_is_named_and_nobody_waits_for_it() {
    // Ports 1 and 3 are on worker 1, the others on worker 0, which polls more.
    let mut bed = Bed::new(5, 2);
    events::begin();
    bed.teach();
    let counted = [1, 3].map(|station| bed.counters(station));
    let port = bed.switch.port("p1").unwrap();
    let sound = port.start_rx(Box::new(Panics)).unwrap().unwrap();
    // Nobody has to ask.
    wait_until("the end is reported", || {
        !events::of_worker("w1").is_empty()
    });
    wait_until("the thread has ended", || {
        !pollux_threads().contains(&"pollux-w1\n".to_owned())
    });
    for (port, worker) in [("p0", Some("w0")), ("p1", None), ("p3", None)] {
        assert_eq!(bed.switch.worker_of_port(port).as_deref(), worker);
    }

    // All but the dead worker's part is done, and goes on being done.
    let mut planned = bed.switch.plan();
    planned.ports.push(PortPlan::new("p5"));
    assert_died(&bed.switch, &planned, "w1");
    assert_died(&bed.switch, &planned, "w1");
    planned.ports[0].budget.packets = PacketBudget::Units(9);
    assert_died(&bed.switch, &planned, "w1");
    assert_eq!(bed.switch.worker_of_port("p5").as_deref(), Some("w0"));
    let mut late = Station::new(5, GuestSpec::default());
    attach(&bed.switch, 5, &Device::of(&late.guest));
    assert!(late.send(0, BYTES));
    late.publish();
    wait_until("the new port is polled", || {
        bed.poll();
        bed.stations[0].flow(5, 0).received == 1
    });
    bed.send(0, 2, 10);
    assert_eq!(bed.stations[2].flow(0, 2).received, 10);
    assert_eq!([1, 3].map(|station| bed.counters(station)), counted);

    // A plan without it gives its queues to the other.
    drop(port.start_rx(sound).unwrap());
    let mut without = planned.clone();
    without.workers.pop();
    for index in [1, 3] {
        without.ports[index].worker = None;
    }
    bed.switch.apply(&without).unwrap();
    assert_eq!(bed.switch.plan(), without);
    assert_eq!([1, 3].map(|station| bed.counters(station)), counted);
    for station in [1, 3] {
        let worker = bed.switch.worker_of_port(&port_name(station));
        assert_eq!(worker.as_deref(), Some("w0"));
        bed.send(station, 0, 10);
    }

    // And the next one may have a worker of that name.
    bed.switch.apply(&planned).unwrap();
    assert_eq!(bed.switch.worker_of_port("p1").as_deref(), Some("w1"));
    bed.send(1, 0, 10);
    assert_eq!(events::of_worker("w1").len(), 1);
    let switch = bed.switch;
    drop(switch);
    assert_eq!(pollux_threads(), Vec::<String>::new());
}

#[test]
fn a_worker_that_dies_before_its_first_turn_is_named() {
    let _alone = alone();
    let switch = Switch::new(SwitchConfig {
        thread_start: Some(|| panic!("a bug, for the test")),
        ..config()
    });
    let switch = switch.unwrap();
    let planned = plan(2, 2);
    assert_died(&switch, &planned, "w0");
    assert_eq!(switch.worker_of_port("p0"), None);
    // With no worker left that could take them.
    assert_died(&switch, &plan(1, 1), "w0");
    switch.apply(&Plan::default()).unwrap();
    assert_eq!(switch.plan(), Plan::default());
}

/// Workers index their tables by the numbers that they find in the FDB.
#[test]
fn no_address_can_be_on_a_port_beyond_the_tables() {
    let _alone = alone();
    let switch = Switch::new(SwitchConfig {
        fdb: FdbConfig {
            max_ports: u16::MAX,
            ..config().fdb
        },
        ..config()
    });
    let beyond = PortId(PORTS_MAX);
    assert_eq!(
        switch.unwrap().fdb().open_port(beyond),
        Err(FdbError::PortOutOfRange(beyond))
    );
}

#[test]
fn a_handle_that_outlives_its_port_starts_nothing() {
    let mut bed = Bed::new(3, 1);
    bed.teach();
    let full = bed.switch.plan();
    let mut less = full.clone();
    less.ports.pop();
    let removed = bed.switch.port("p2").unwrap();
    bed.switch.apply(&less).unwrap();
    let (tx, rx) = Device::of(&bed.stations[2].guest).resume();
    let rx = removed.start_tx(Box::new(rx)).err().unwrap();
    let tx = removed.start_rx(Box::new(tx)).err().unwrap();
    assert_eq!(&*tx.port, "p2");
    assert!(rx.to_string().contains("\"p2\": it was removed"), "{rx}");
    assert!(removed.stop_rx().is_none() && removed.stop_tx().is_none());
    for state in [removed.rx_state(), removed.tx_state()] {
        assert_eq!(state, QueueState::Removed);
    }

    // Also when there is a port of that name again, which takes them.
    bed.switch.apply(&full).unwrap();
    let port = bed.switch.port("p2").unwrap();
    let rx = removed.start_tx(rx.queue).err().unwrap();
    assert!(port.start_tx(rx.queue).unwrap().is_none());
    assert!(port.start_rx(tx.queue).unwrap().is_none());
    assert_eq!(port.tx_state(), QueueState::Running);
    bed.attach(2);
    bed.send(0, 2, 3);
    assert_eq!(bed.stations[2].flow(0, 2).received, 3);
}

/// Names of this process's threads that begin with "pollux-".
fn pollux_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    // A thread may end while we look.
    let names = names.filter_map(Result::ok);
    names.filter(|name| name.starts_with("pollux-")).collect()
}

#[test]
fn dropping_a_switch_ends_its_threads_and_gives_everything_back() {
    let mut bed = Bed::new(3, 2);
    bed.teach();
    assert_eq!(pollux_threads().len(), 3, "{:?}", pollux_threads());
    let port = bed.switch.port("p0").unwrap();
    // In the middle of traffic.
    for station in &mut bed.stations {
        while station.send(EVERYBODY, BYTES) {}
        station.publish();
    }
    let Bed {
        switch, stations, ..
    } = bed;
    drop(switch);
    assert_eq!(pollux_threads(), Vec::<String>::new());
    assert_eq!(port.rx_state(), QueueState::Removed);
    assert_eq!(Arc::strong_count(&port), 1);
    let fresh = Station::new(9, GuestSpec::default());
    for station in &stations {
        assert_eq!(
            Arc::strong_count(&station.guest.memory),
            Arc::strong_count(&fresh.guest.memory),
            "nobody but the guest has its memory"
        );
    }
}

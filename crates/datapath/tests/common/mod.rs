//! A switch with test guests, for all test files of this crate.
#![allow(
    dead_code,
    reason = "each test file is a crate of its own and uses a part"
)]

pub(crate) mod events;

use std::sync::{Mutex, MutexGuard, PoisonError};

use pollux_datapath::{
    Plan, PlannedMode, PortCounters, PortPlan, Switch, SwitchConfig, Time, WorkerCounters,
    WorkerPlan,
};
use pollux_packet::DropReason;
use pollux_switch::{FdbConfig, MacVlan};
use pollux_testkit::{Device, EVERYBODY, GuestSpec, Station, mac_of, wait_until};

/// Bytes of a frame when its length does not matter.
pub(crate) const BYTES: u32 = 64;

/// Workers spin: one switch at a time in this process.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time stands still, and the FDB is the same in every run.
pub(crate) fn config() -> SwitchConfig {
    SwitchConfig {
        fdb: FdbConfig {
            seed: 7,
            ..FdbConfig::default()
        },
        time: Time::Manual,
        thread_start: None,
    }
}

pub(crate) fn port_name(station: u16) -> String {
    format!("p{station}")
}

pub(crate) fn worker_name(worker: u16) -> String {
    format!("w{worker}")
}

/// Ports `p0`, `p1` ... in turn on workers `w0`, `w1` ..., which are not pinned.
pub(crate) fn plan(ports: u16, workers: u16) -> Plan {
    Plan {
        workers: (0..workers)
            .map(|worker| WorkerPlan {
                name: worker_name(worker),
                core: None,
            })
            .collect(),
        ports: (0..ports)
            .map(|port| PortPlan {
                worker: Some(worker_name(port % workers)),
                ..PortPlan::new(&port_name(port))
            })
            .collect(),
        ..Plan::default()
    }
}

pub(crate) fn key(station: u16) -> MacVlan {
    MacVlan::new(mac_of(station), 0)
}

pub(crate) fn cross_connect(pairs: &[(u16, u16)]) -> PlannedMode {
    PlannedMode::CrossConnect(
        pairs
            .iter()
            .map(|&(a, b)| (port_name(a), port_name(b)))
            .collect(),
    )
}

/// Asserts what holds in counters of any one moment.
pub(crate) fn assert_port_identity(port: &str, counters: &PortCounters) {
    assert_eq!(
        counters.rx_frames,
        counters.unicast + counters.flooded + counters.rx_drops(),
        "{port}: {counters:?}"
    );
}

/// Asserts what holds in a worker's counters of any one moment.
pub(crate) fn assert_worker_identities(switch: &Switch, worker: &str) {
    let snapshot = switch.worker_counters(worker).expect("the worker runs");
    for port in &snapshot.ports {
        assert_port_identity(worker, port);
    }
    let total = snapshot.total();
    assert_eq!(
        total.copies,
        total.tx_frames + total.tx_drops(),
        "{worker}: {total:?}"
    );
    assert_eq!(snapshot.worker.frames, total.rx_frames, "{worker}");
    assert!(total.copies >= total.unicast, "{worker}: {total:?}");
}

/// A switch and a station behind each of its first ports.
pub(crate) struct Bed {
    pub(crate) switch: Switch,
    pub(crate) stations: Vec<Station>,
    /// What each station had sent and received when its port was made.
    attached: Vec<(u64, u64)>,
    _alone: MutexGuard<'static, ()>,
}

impl Bed {
    pub(crate) fn new(ports: u16, workers: u16) -> Self {
        Self::with(
            config(),
            &plan(ports, workers),
            &vec![GuestSpec::default(); usize::from(ports)],
        )
    }

    /// A station of each of `specs` behind ports `p0`, `p1` ... of the plan.
    pub(crate) fn with(config: SwitchConfig, plan: &Plan, specs: &[GuestSpec]) -> Self {
        let stations = (0..).zip(specs);
        Self::of_stations(
            config,
            plan,
            stations
                .map(|(number, &spec)| Station::new(number, spec))
                .collect(),
        )
    }

    pub(crate) fn of_stations(config: SwitchConfig, plan: &Plan, stations: Vec<Station>) -> Self {
        let alone = alone();
        let switch = Switch::new(config).expect("the kernel gives a thread");
        switch.apply(plan).expect("the plan is good");
        let mut bed = Self {
            switch,
            attached: vec![(0, 0); stations.len()],
            stations,
            _alone: alone,
        };
        for station in 0..u16::try_from(bed.stations.len()).expect("few stations") {
            bed.attach(station);
        }
        bed
    }

    pub(crate) fn station(&mut self, station: u16) -> &mut Station {
        &mut self.stations[usize::from(station)]
    }

    /// Starts the queues of a station's port, anew if they ran before.
    pub(crate) fn attach(&mut self, station: u16) {
        let place = &self.stations[usize::from(station)];
        attach(&self.switch, station, &Device::of(&place.guest));
        self.attached[usize::from(station)] = (place.sent(), place.received());
    }

    pub(crate) fn counters(&self, station: u16) -> PortCounters {
        self.switch
            .port_counters(&port_name(station))
            .expect("the port is in the plan")
    }

    pub(crate) fn worker(&self, worker: u16) -> WorkerCounters {
        let snapshot = self.switch.worker_counters(&worker_name(worker));
        snapshot.expect("the worker runs").worker
    }

    pub(crate) fn drops(&self, station: u16, reason: DropReason) -> u64 {
        self.counters(station).drops.get(reason)
    }

    /// Sends numbered frames and waits until everything is where it should be.
    pub(crate) fn send(&mut self, from: u16, to: u16, count: u64) {
        let end = self.station(from).sent_to(to) + count;
        wait_until("all frames are sent", || {
            let station = &mut self.stations[usize::from(from)];
            while station.sent_to(to) < end && station.send(to, BYTES) {}
            station.publish();
            self.poll();
            self.stations[usize::from(from)].sent_to(to) == end
        });
        self.settle();
    }

    /// One frame from each station to everybody: then all of them are learned.
    pub(crate) fn teach(&mut self) {
        for station in 0..u16::try_from(self.stations.len()).expect("few stations") {
            self.send(station, EVERYBODY, 1);
            assert!(self.switch.fdb().lookup(key(station)).is_some());
        }
    }

    pub(crate) fn poll(&mut self) {
        for station in &mut self.stations {
            station.poll();
        }
    }

    /// Waits until every buffer is back, every frame has arrived, and the
    /// counters agree with both; then asserts the identities.
    pub(crate) fn settle(&mut self) {
        self.settle_but(&[]);
    }

    /// The same, without stations that are gone or broken.
    pub(crate) fn settle_but(&mut self, without: &[u16]) {
        let count = u16::try_from(self.stations.len()).expect("few stations");
        let stations: Vec<_> = (0..count).filter(|s| !without.contains(s)).collect();
        let mut seen = Vec::new();
        wait_until("all buffers and frames have arrived", || {
            for &station in &stations {
                self.station(station).publish();
                self.station(station).poll();
            }
            // Before and after: a frame that was on its way is seen next time.
            let before: Vec<_> = stations.iter().map(|&s| self.arrived(s)).collect();
            let settled = before == seen && stations.iter().all(|&s| self.is_settled(s));
            seen = before;
            settled
        });
        self.assert_identities();
    }

    fn arrived(&self, station: u16) -> (u64, u64) {
        let station = &self.stations[usize::from(station)];
        (station.in_flight(), station.received())
    }

    /// Used count = taken count, and both as the counters say.
    fn is_settled(&self, station: u16) -> bool {
        let counters = self.counters(station);
        let (sent, received) = self.attached[usize::from(station)];
        let station = &self.stations[usize::from(station)];
        station.in_flight() == 0
            && counters.rx_frames == station.sent() - sent
            && counters.tx_frames == station.received() - received
    }

    pub(crate) fn assert_identities(&self) {
        let plan = self.switch.plan();
        for port in &plan.ports {
            let counters = self.switch.port_counters(&port.name);
            assert_port_identity(&port.name, &counters.expect("it is in the plan"));
        }
        for worker in &plan.workers {
            assert_worker_identities(&self.switch, &worker.name);
        }
    }

    /// Stations 0 and 1 send to each other in a closed loop for as long as there
    /// is `more`, which may do other things; then asserts that none of these
    /// frames was lost. Stations of `without` are not touched.
    pub(crate) fn exchange_while(
        &mut self,
        without: &[u16],
        mut more: impl FnMut(&mut Self) -> bool,
    ) {
        const WINDOW: u64 = 64;
        const PAIR: [(u16, u16); 2] = [(0, 1), (1, 0)];
        wait_until("the exchange has ended", || {
            for (from, to) in PAIR {
                let arrived = self.station(to).flow(from, to).next();
                let station = self.station(from);
                while station.sent_to(to) < arrived + WINDOW && station.send(to, BYTES) {}
                station.publish();
            }
            for station in &mut self.stations {
                if !without.contains(&station.number()) {
                    station.poll();
                }
            }
            !more(self)
        });
        self.settle_but(without);
        for (from, to) in PAIR {
            let sent = self.station(from).sent_to(to);
            let flow = self.station(to).flow(from, to);
            assert_eq!((flow.received, flow.lost), (sent, 0), "{from} to {to}");
        }
    }

    /// The same until `frames` have gone each way since the beginning.
    pub(crate) fn exchange(&mut self, frames: u64, without: &[u16]) {
        self.exchange_while(without, |bed| bed.exchanged() < frames);
    }

    /// Frames that have gone each way between stations 0 and 1.
    pub(crate) fn exchanged(&self) -> u64 {
        let there = self.stations[1].flow(0, 1).received;
        there.min(self.stations[0].flow(1, 0).received)
    }

    /// Waits until each worker has begun a turn after this call.
    pub(crate) fn turns(&self) {
        for worker in &self.switch.plan().workers {
            let turns = || {
                let counters = self.switch.worker_counters(&worker.name);
                counters.expect("the worker runs").worker.turns
            };
            // One may have begun before, and one may be under way.
            let end = turns() + 2;
            wait_until("the worker takes turns", || turns() >= end);
        }
    }
}

/// Starts the queues of a station's port.
pub(crate) fn attach(switch: &Switch, station: u16, device: &Device) {
    let (tx, rx) = device.resume();
    let port = switch
        .port(&port_name(station))
        .expect("the port is in the plan");
    port.start_tx(Box::new(rx)).expect("it is in the plan");
    port.start_rx(Box::new(tx)).expect("it is in the plan");
}

//! One switch with one worker, and the guests around it, all driven by one
//! thread: the pair B -> C that is measured, the attacker A, and sinks.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use pollux_datapath::{Plan, PortCounters, PortPlan, Switch, SwitchConfig, WorkerPlan};
use pollux_switch::MacVlan;
use pollux_sys::{Clock, pause};
use pollux_testkit::{Guest, GuestSpec};
use pollux_virtio::driver::ChainShape;

use super::guests::{ATTACK_FRAME_BYTES, Attack, Flood, Sink};

/// Numbers of the guests: the attacker, the pair, and sinks from there on.
pub(super) const A: usize = 0;
pub(super) const B: usize = 1;
pub(super) const C: usize = 2;
const SINKS: usize = 3;
/// Frames that B sends in a step.
const BATCH: u16 = 64;
pub(super) const FRAME_BYTES: u32 = 64;
pub(super) const WORKER: &str = "w0";
/// For an address to be learned.
const PATIENCE: Duration = Duration::from_secs(5);
/// For the pair's frames under way to arrive, and for the attacker's to be dealt
/// with: a ring of longest chains takes some 30 ms.
const DRAIN: Duration = Duration::from_secs(2);
/// Part of a ring that an open loop makes up for when its thread comes back: what
/// a ring can hold is to cover the worker's turns, not the thread's absence.
const BEHIND_PART: u16 = 8;
/// Steps between two looks at the time.
const STEPS: u32 = 64;

pub(super) const MAC_EVERYBODY: [u8; 6] = [0xff; 6];

/// The address of a guest.
pub(super) fn mac(guest: usize) -> [u8; 6] {
    let number = u8::try_from(guest + 1).expect("a few dozen guests");
    [2, 0, 0, 0, 0, number]
}

/// An Ethernet frame of experimental type (IEEE 802 local, 0x88B5).
pub(super) fn frame(dst: [u8; 6], src: [u8; 6], bytes: u32) -> Vec<u8> {
    let mut frame = vec![0; bytes as usize];
    frame[..6].copy_from_slice(&dst);
    frame[6..12].copy_from_slice(&src);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

/// What the attacker does while the pair is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Company {
    /// The driver thread does not even look at it.
    Nobody,
    /// The driver thread takes the attacker's steps and posts nothing.
    Idle,
    /// Full speed.
    Attacking,
}

/// What the pair does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) company: Company,
    /// Frames per second that are due; `None` = as fast as buffers come back.
    pub(super) pace: Option<f64>,
}

/// Frames of the pair, and where the driver thread's time went.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) sent: u64,
    pub(super) received: u64,
    /// Due, and B's ring was full: lost.
    pub(super) refused: u64,
    /// Not offered at all, since the driver thread itself had been away for too
    /// long.
    pub(super) skipped: u64,
    /// Frames of the attacker that C got.
    pub(super) strangers: u64,
    pub(super) steps: u64,
    pub(super) pair_ticks: u64,
    pub(super) company_ticks: u64,
}

impl Tally {
    /// Sent and not received, or refused: once what is under way has arrived.
    pub(super) fn lost(&self) -> u64 {
        (self.sent + self.refused).saturating_sub(self.received)
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.refused += other.refused;
        self.skipped += other.skipped;
        self.strangers += other.strangers;
        self.steps += other.steps;
        self.pair_ticks += other.pair_ticks;
        self.company_ticks += other.company_ticks;
    }

    pub(super) fn since(&self, earlier: &Self) -> Self {
        Self {
            sent: self.sent - earlier.sent,
            received: self.received - earlier.received,
            refused: self.refused - earlier.refused,
            skipped: self.skipped - earlier.skipped,
            strangers: self.strangers - earlier.strangers,
            steps: self.steps - earlier.steps,
            pair_ticks: self.pair_ticks - earlier.pair_ticks,
            company_ticks: self.company_ticks - earlier.company_ticks,
        }
    }
}

/// When frames are due.
#[derive(Clone, Copy, Debug)]
struct OpenLoop {
    begin: u64,
    per_tick: f64,
    /// Most frames that are made up for.
    behind_max: u64,
    /// Sent, refused or skipped.
    offered: u64,
}

impl OpenLoop {
    /// Frames due by `now` that were not offered yet, and how many of them
    /// are not to be made up for.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "seconds of ticks, times a positive rate"
    )]
    fn due(&self, now: u64) -> (u64, u64) {
        let due = (now.wrapping_sub(self.begin) as f64 * self.per_tick) as u64;
        let behind = due.saturating_sub(self.offered);
        let skipped = behind.saturating_sub(self.behind_max);
        (behind - skipped, skipped)
    }
}

/// The guests, and what their thread has counted.
pub(super) struct Guests {
    guests: Vec<Guest>,
    flood: Flood,
    /// B's own receive ring, A's, and those of the sinks.
    sinks: Vec<Sink>,
    next_sink: usize,
    pub(super) clock: Clock,
    ring_size: u16,
    pub(super) tally: Tally,
}

/// A switch with one worker on `core` and `sinks` guests besides A, B and C.
///
/// # Errors
/// If the switch cannot be started.
pub(super) fn start(
    core: usize,
    sinks: usize,
    ring_size: u16,
    attack: Attack,
) -> anyhow::Result<(Switch, Guests)> {
    let switch = Switch::new(SwitchConfig::default())?;
    let names: Vec<String> = (0..SINKS + sinks).map(port_name).collect();
    switch.apply(&Plan {
        workers: vec![WorkerPlan {
            name: WORKER.to_owned(),
            core: Some(core),
        }],
        ports: names.iter().map(|name| PortPlan::new(name)).collect(),
        ..Plan::default()
    })?;
    let mut guests = Vec::new();
    for name in &names {
        let mut guest = Guest::new(GuestSpec {
            ring_size,
            ..GuestSpec::default()
        })?;
        guest.tx.ring().suppress_calls();
        guest.rx.ring().suppress_calls();
        let (tx, rx) = guest.device();
        let port = switch.port(name).context("the port was planned")?;
        port.start_tx(Box::new(rx)).expect("it was just planned");
        port.start_rx(Box::new(tx)).expect("it was just planned");
        guests.push(guest);
    }
    let is_pair = |index: &usize| *index != C;
    let sinks = (0..guests.len()).filter(is_pair);
    let mut sinks: Vec<Sink> = sinks.map(|index| Sink::new(&guests[index])).collect();
    learn(&switch, &mut guests, &mut sinks)?;
    let target = mac(if guests.len() > SINKS { SINKS } else { B });
    let guests = Guests {
        flood: Flood::new(&guests[A], attack, target),
        guests,
        sinks,
        next_sink: 0,
        clock: Clock::calibrate(),
        ring_size,
        tally: Tally::default(),
    };
    Ok((switch, guests))
}

/// Everybody says something to everybody, until each address is known.
fn learn(switch: &Switch, guests: &mut [Guest], sinks: &mut [Sink]) -> anyhow::Result<()> {
    for sender in 0..guests.len() {
        let frame = frame(MAC_EVERYBODY, mac(sender), ATTACK_FRAME_BYTES);
        guests[sender].tx.send(&frame, ChainShape::JOINED)?;
        guests[sender].tx.publish();
        let deadline = Instant::now() + PATIENCE;
        let mut is_back = false;
        let key = MacVlan::new(mac(sender), 0);
        while !(is_back && switch.fdb().lookup(key).is_some()) {
            ensure!(
                Instant::now() < deadline,
                "guest {sender}'s address was not learned within {PATIENCE:?}"
            );
            is_back |= guests[sender].tx.reclaim()? > 0;
            guests[C].rx.receive(u32::MAX, |_| {})?;
            guests[C].rx.refill();
            guests[C].rx.publish();
            for sink in &mut *sinks {
                sink.step();
            }
        }
    }
    let frame = frame(mac(C), mac(B), FRAME_BYTES);
    guests[B].tx.prepare(|_, span| span.write(&frame));
    Ok(())
}

/// The port of a guest.
pub(super) fn port_name(guest: usize) -> String {
    match guest {
        A => "a".to_owned(),
        B => "b".to_owned(),
        C => "c".to_owned(),
        _ => format!("s{}", guest - SINKS),
    }
}

impl Guests {
    pub(super) fn len(&self) -> usize {
        self.guests.len()
    }

    /// Works for so long. An open loop begins anew; frames of the one before
    /// must have [settled](Self::settle).
    pub(super) fn drive(&mut self, work: Work, time: Duration) -> anyhow::Result<()> {
        let clock = self.clock;
        let span = clock.from_ns(u64::try_from(time.as_nanos())?);
        let begin = clock.now();
        let mut open = work.pace.map(|rate| OpenLoop {
            begin,
            #[expect(clippy::cast_precision_loss, reason = "a ratio")]
            per_tick: rate / clock.ticks_per_second() as f64,
            behind_max: u64::from(self.ring_size / BEHIND_PART),
            offered: 0,
        });
        let mut now = begin;
        while now.wrapping_sub(begin) < span {
            for _ in 0..STEPS {
                let mut worked = self.step_pair(open.as_mut(), now)?;
                let after_pair = clock.now();
                self.tally.pair_ticks += after_pair.wrapping_sub(now);
                now = after_pair;
                if work.company != Company::Nobody {
                    worked |= self.step_company(work.company);
                    let after_company = clock.now();
                    self.tally.company_ticks += after_company.wrapping_sub(now);
                    now = after_company;
                }
                self.tally.steps += 1;
                if !worked {
                    pause();
                    now = clock.now();
                }
            }
        }
        Ok(())
    }

    /// C receives, B sends. In this order: C has room for all that B has out
    /// when the thread comes back after a while.
    fn step_pair(&mut self, open: Option<&mut OpenLoop>, now: u64) -> anyhow::Result<bool> {
        let received = self.receive()?;
        let tx = &mut self.guests[B].tx;
        tx.reclaim()?;
        let sent = match open {
            None => tx.send_batch(BATCH, FRAME_BYTES, |_| {}),
            Some(open) => {
                let (due, skipped) = open.due(now);
                let wanted = u16::try_from(due).unwrap_or(u16::MAX);
                let sent = tx.send_batch(wanted, FRAME_BYTES, |_| {});
                open.offered += u64::from(wanted) + skipped;
                self.tally.skipped += skipped;
                self.tally.refused += u64::from(wanted - sent);
                sent
            }
        };
        if sent > 0 {
            tx.publish();
        }
        self.tally.sent += u64::from(sent);
        Ok(received || sent > 0)
    }

    /// C takes what there is.
    fn receive(&mut self) -> anyhow::Result<bool> {
        let rx = &mut self.guests[C].rx;
        let (mut received, mut strangers) = (0, 0);
        let frames = rx.receive(u32::from(self.ring_size), |frame| match frame.len() {
            FRAME_BYTES => received += 1,
            _ => strangers += 1,
        })?;
        self.tally.received += received;
        self.tally.strangers += strangers;
        if rx.refill() > 0 {
            rx.publish();
        }
        Ok(frames > 0)
    }

    /// A step of the attacker, and one of one sink.
    fn step_company(&mut self, company: Company) -> bool {
        let worked = self.flood.step(company == Company::Attacking);
        let sink = self.next_sink;
        self.next_sink = (sink + 1) % self.sinks.len();
        worked | self.sinks[sink].step()
    }

    /// B sends nothing more; waits until all that it has out has come back: C
    /// has received what is not lost.
    ///
    /// # Errors
    /// If it does not come back.
    pub(super) fn settle(&mut self, company: Company) -> anyhow::Result<()> {
        let deadline = Instant::now() + DRAIN;
        let is_out = |guests: &mut Self| guests.guests[B].tx.ring().free_len() < guests.ring_size;
        while is_out(self) {
            ensure!(Instant::now() < deadline, "B's frames do not come back");
            self.guests[B].tx.reclaim()?;
            self.receive()?;
            self.step_company(company);
        }
        self.receive()?;
        Ok(())
    }

    /// The attack ends: waits until all of its chains have come back and are
    /// counted.
    ///
    /// # Errors
    /// If they do not, or the worker stands still.
    pub(super) fn cease(&mut self, switch: &Switch) -> anyhow::Result<()> {
        let deadline = Instant::now() + DRAIN;
        while !self.flood.is_empty() {
            ensure!(Instant::now() < deadline, "A's chains do not come back");
            self.receive()?;
            self.step_company(Company::Idle);
        }
        self.receive()?;
        // A visit is counted at its end.
        let turns = || {
            let counters = switch.worker_counters(WORKER).context("it runs")?;
            anyhow::Ok(counters.worker.turns)
        };
        let at_rest = turns()? + 2;
        while turns()? < at_rest {
            ensure!(Instant::now() < deadline, "the worker stands still");
        }
        Ok(())
    }
}

/// Counters of every port, by guest.
pub(super) fn port_counters(switch: &Switch, guests: usize) -> Vec<PortCounters> {
    let of = |guest| switch.port_counters(&port_name(guest)).unwrap_or_default();
    (0..guests).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_loop_makes_up_for_little() {
        let due = |now, offered| {
            let open = OpenLoop {
                begin: 1000,
                per_tick: 0.5,
                behind_max: 100,
                offered,
            };
            open.due(now)
        };
        assert_eq!(due(1000, 0), (0, 0));
        assert_eq!(due(1020, 4), (6, 0));
        assert_eq!(due(3000, 0), (100, 900));
        assert_eq!(due(1020, 30), (0, 0));
    }

    #[test]
    fn a_pair_at_rest_loses_nothing_in_any_company() {
        for attack in [Attack::Malformed, Attack::Tiny, Attack::Broadcast] {
            let (switch, mut guests) = start(0, 2, 256, attack).unwrap();
            let taken = |switch: &Switch| port_counters(switch, 1)[A].rx_frames;
            for company in [Company::Nobody, Company::Idle, Company::Attacking] {
                let before = taken(&switch);
                let work = Work {
                    company,
                    pace: Some(10_000.0),
                };
                guests.drive(work, Duration::from_millis(50)).unwrap();
                guests.settle(company).unwrap();
                let is_attacked = taken(&switch) - before > 10;
                assert_eq!(is_attacked, company == Company::Attacking);
                guests.cease(&switch).unwrap();
            }
            let tally = guests.tally;
            let counters = port_counters(&switch, guests.len());
            let dropped = counters[C].tx_drops();
            assert!(tally.received > 0);
            assert_eq!(tally.sent, tally.received, "{attack:?}: {dropped}");
        }
    }
}

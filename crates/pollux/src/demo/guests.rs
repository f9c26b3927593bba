//! The guests of the demo, all driven by one thread: each sends to the next one
//! and judges what comes from the one before.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use hdrhistogram::Histogram;
use pollux_sys::{Clock, pause};
use pollux_vhost::frontend::Frontend;
use pollux_virtio::driver::{ChainShape, Guest};

use super::frame::{self, Fields};
use super::verify::{Tally, Verifier};

/// Frames that a guest sends or receives in one go.
const BATCH: u16 = 64;
/// Looks at all guests between two looks at the clock.
const ROUNDS_PER_LOOK: u32 = 32;
/// No frame for so long: the traffic is stuck, and what is under way is lost.
const STALL: Duration = Duration::from_secs(2);
/// For all guests to hear of each other.
const LEARN_TIME: Duration = Duration::from_secs(10);
/// Between two announcements of a guest that was not heard.
const ANNOUNCE_AGAIN: Duration = Duration::from_millis(100);
/// Longest latency that is told from longer ones.
const LATENCY_MAX_NS: u64 = 10_000_000_000;

/// What others may know while the guests run.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Frames received and judged good.
    pub(crate) received: AtomicU64,
    /// Set from outside: end every phase now.
    pub(crate) stop: AtomicBool,
}

/// What one phase gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    /// Frames received and judged good.
    pub(crate) received: u64,
    /// Length of the phase.
    pub(crate) ns: u64,
    /// No frame came any more: the phase was cut short.
    pub(crate) is_stalled: bool,
}

/// One guest, its connection, and both ends of its flows.
#[derive(Debug)]
pub(crate) struct Member {
    guest: Guest,
    frontend: Frontend,
    fields: Fields,
    sent: u64,
    /// Of the flow from the guest before.
    verifier: Verifier,
}

impl Member {
    /// Guest `number` of `guests`, connected.
    pub(crate) fn new(
        mut guest: Guest,
        frontend: Frontend,
        number: u16,
        guests: u16,
        size: u32,
    ) -> Self {
        // Every page is touched before anything is measured.
        let mut payload = vec![0; size as usize];
        guest.tx.prepare(|head, buffer| {
            frame::fill_payload(&mut payload, number, u64::from(head));
            buffer.write(&payload);
        });
        guest.tx.ring().suppress_calls();
        guest.rx.ring().suppress_calls();
        let before = (number + guests - 1) % guests;
        Self {
            guest,
            frontend,
            fields: frame::flow_fields(number, (number + 1) % guests),
            sent: 0,
            verifier: Verifier::new(before, number, size),
        }
    }

    /// Shows the switch what was sent.
    #[inline]
    fn publish(&mut self) {
        if self.guest.tx.publish() {
            self.frontend.kick(Frontend::TX);
        }
    }

    /// Gives receive buffers back to the switch.
    #[inline]
    fn refill(&mut self) {
        self.guest.rx.refill();
        if self.guest.rx.publish() {
            self.frontend.kick(Frontend::RX);
        }
    }

    /// Sends up to `count` frames, all stamped `now`; returns how many.
    #[inline]
    fn send(&mut self, count: u16, size: u32, now: u64) -> anyhow::Result<u16> {
        self.guest.tx.reclaim()?;
        let (fields, sequence) = (&mut self.fields, &mut self.sent);
        let source = u16::from_le_bytes([fields[14], fields[15]]);
        let sent = self.guest.tx.send_batch(count, size, |buffer| {
            frame::stamp(fields, *sequence, now);
            buffer.write(fields);
            if frame::is_sample(*sequence) {
                write_sample(buffer, source, *sequence);
            }
            *sequence += 1;
        });
        if sent > 0 {
            self.publish();
        }
        Ok(sent)
    }

    /// Receives up to a batch of a flow of which `sent` frames were sent and
    /// gives when each was sent to `each`. Returns how many frames came.
    #[inline]
    fn receive(&mut self, sent: u64, mut each: impl FnMut(u64)) -> anyhow::Result<u32> {
        let verifier = &mut self.verifier;
        let count = self.guest.rx.receive(u32::from(BATCH), |received| {
            if let Some(ticks) = verifier.see(received.pieces, sent) {
                each(ticks);
            }
        })?;
        if count > 0 {
            self.refill();
        }
        Ok(count)
    }

    /// Ends the session; the switch does not touch the guest any more.
    fn stop(&mut self) -> anyhow::Result<()> {
        self.frontend.stop()?;
        Ok(())
    }
}

/// One frame in [`frame::SAMPLE`]: its payload is made for it.
#[cold]
fn write_sample(buffer: pollux_packet::SpanMut<'_>, source: u16, sequence: u64) {
    const PIECE: usize = frame::SIZE_MAX as usize;
    let mut payload = [0; PIECE];
    let len = buffer.len() as usize - frame::FIELDS_BYTES;
    let payload = &mut payload[..len];
    frame::fill_payload(payload, source, sequence);
    let head_bytes = u32::try_from(frame::FIELDS_BYTES).unwrap_or(u32::MAX);
    buffer.skip(head_bytes).write(payload);
}

/// All guests.
#[derive(Debug)]
pub(crate) struct Guests<'a> {
    members: Vec<Member>,
    clock: Clock,
    size: u32,
    /// Frames of a flow that may be under way.
    window: u64,
    /// The switch's worker is on the same core and needs it now and then.
    shares_core: bool,
    progress: &'a Progress,
}

impl<'a> Guests<'a> {
    /// `members` with frames of `size` bytes, of which each keeps `window` under
    /// way: fewer than a ring has places, so that no ring overflows.
    pub(crate) fn new(
        members: Vec<Member>,
        size: u32,
        window: u64,
        shares_core: bool,
        progress: &'a Progress,
    ) -> Self {
        Self {
            members,
            clock: Clock::calibrate(),
            size,
            window,
            shares_core,
            progress,
        }
    }

    /// Every guest announces itself until every other one has heard it: from then
    /// on the switch knows where they are.
    ///
    /// # Errors
    /// If a guest is not heard.
    pub(crate) fn learn(&mut self) -> anyhow::Result<()> {
        let guests = self.members.len();
        // By hearer and announcer.
        let mut heard = vec![vec![false; guests]; guests];
        let start = self.clock.now();
        let mut announced = None;
        loop {
            let now = self.clock.now();
            let again = announced.is_none_or(|at| self.ns_since(at) >= ns(ANNOUNCE_AGAIN));
            if again {
                self.announce()?;
                announced = Some(now);
            }
            for (hearer, heard) in heard.iter_mut().enumerate() {
                self.hear(hearer, heard)?;
            }
            let others = |heard: &Vec<bool>| heard.iter().filter(|heard| **heard).count();
            if heard.iter().all(|heard| others(heard) == guests - 1) {
                return Ok(());
            }
            ensure!(
                self.ns_since(start) < ns(LEARN_TIME),
                "demo: a broadcast of a guest did not reach every other guest within \
                 {LEARN_TIME:?}; the switch forwards nothing, run with RUST_LOG=debug and report it"
            );
            self.idle();
        }
    }

    fn announce(&mut self) -> anyhow::Result<()> {
        for (number, member) in (0_u16..).zip(&mut self.members) {
            member.refill();
            member.guest.tx.reclaim()?;
            let frame = frame::announcement(number);
            member.guest.tx.send(&frame, ChainShape::JOINED)?;
            member.publish();
        }
        Ok(())
    }

    fn hear(&mut self, hearer: usize, heard: &mut [bool]) -> anyhow::Result<()> {
        let member = &mut self.members[hearer];
        let count = member.guest.rx.receive(u32::from(BATCH), |received| {
            let [whole] = received.pieces else { return };
            if whole.len() < frame::SIZE_MIN {
                return;
            }
            let from = frame::announced_by(&whole.snapshot_array());
            if let Some(heard) = from.and_then(|from| heard.get_mut(usize::from(from))) {
                *heard = true;
            }
        })?;
        if count > 0 {
            member.refill();
        }
        Ok(())
    }

    /// Closed loop: every guest keeps a window of frames under way, for `time`.
    ///
    /// # Errors
    /// If the switch breaks a rule of a ring.
    pub(crate) fn saturate(&mut self, time: Duration) -> anyhow::Result<Phase> {
        self.run(time, |guests| {
            let mut received = 0;
            for index in 0..guests.members.len() {
                let room = guests.window.saturating_sub(guests.under_way(index));
                let count = u16::try_from(room).unwrap_or(BATCH).min(BATCH);
                if count > 0 {
                    let now = guests.clock.now();
                    guests.members[index].send(count, guests.size, now)?;
                }
                received += guests.receive(index, |_| {})?;
            }
            Ok(received)
        })
    }

    /// Open loop: `rate` frames a second, from each guest in turn, one at a time.
    /// Gives how long each took, in ns, from before the sender published it until
    /// the receiver found it. Frames that this thread could not send in time,
    /// because it did not run, are left out.
    ///
    /// # Errors
    /// If the switch breaks a rule of a ring.
    pub(crate) fn pace(
        &mut self,
        time: Duration,
        rate: u64,
    ) -> anyhow::Result<(Phase, Histogram<u64>)> {
        let mut latency = Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3)
            .context("the bounds of the latency histogram")?;
        let clock = self.clock;
        let interval = (clock.ticks_per_second() / rate.max(1)).max(1);
        let behind_max = clock.from_ns(1_000_000).max(interval);
        let mut due = clock.now();
        let mut turn = 0;
        let phase = self.run(time, |guests| {
            let now = clock.now();
            if now.wrapping_sub(due) < u64::MAX / 2 {
                if now.wrapping_sub(due) > behind_max {
                    due = now;
                }
                if guests.under_way(turn) < guests.window {
                    guests.members[turn].send(1, guests.size, clock.now())?;
                }
                turn = (turn + 1) % guests.members.len();
                due = due.wrapping_add(interval);
            }
            let mut received = 0;
            for index in 0..guests.members.len() {
                received += guests.receive(index, |sent| {
                    let ticks = clock.now().saturating_sub(sent);
                    latency.saturating_record(clock.to_ns(ticks));
                })?;
            }
            // Until the next frame is due nothing has to arrive.
            Ok(received)
        })?;
        Ok((phase, latency))
    }

    /// Receives everything that is under way, or as much of it as comes.
    ///
    /// # Errors
    /// If the switch breaks a rule of a ring.
    pub(crate) fn drain(&mut self) -> anyhow::Result<()> {
        let mut last = self.clock.now();
        while (0..self.members.len()).any(|index| self.under_way(index) > 0) {
            let mut received = 0;
            for index in 0..self.members.len() {
                received += self.receive(index, |_| {})?;
            }
            if received > 0 {
                last = self.clock.now();
            } else if self.ns_since(last) > ns(STALL) {
                break;
            } else {
                self.idle();
            }
        }
        Ok(())
    }

    /// Ends all sessions.
    ///
    /// # Errors
    /// If the switch does not answer.
    pub(crate) fn stop(&mut self) -> anyhow::Result<()> {
        self.members.iter_mut().try_for_each(Member::stop)
    }

    /// What became of all frames; exact after [`drain`](Self::drain).
    pub(crate) fn tally(&self) -> Tally {
        let mut sum = Tally::default();
        for index in 0..self.members.len() {
            let verifier = &self.members[self.after(index)].verifier;
            sum.add(&verifier.tally(self.members[index].sent));
        }
        sum
    }

    /// Repeats `round` for `time`, until it is told to stop, or until nothing
    /// comes any more.
    fn run(
        &mut self,
        time: Duration,
        mut round: impl FnMut(&mut Self) -> anyhow::Result<u32>,
    ) -> anyhow::Result<Phase> {
        let start = self.clock.now();
        let before = self.received();
        let mut last = start;
        let mut is_stalled = false;
        loop {
            let mut received = 0;
            for _ in 0..ROUNDS_PER_LOOK {
                let in_round = round(self)?;
                received += in_round;
                if in_round == 0 {
                    self.idle();
                }
            }
            let now = self.clock.now();
            if received > 0 {
                last = now;
                let total = self.received();
                self.progress.received.store(total, Ordering::Relaxed);
            } else if self.clock.to_ns(now.saturating_sub(last)) > ns(STALL) {
                is_stalled = true;
            }
            let elapsed = self.clock.to_ns(now.saturating_sub(start));
            let is_told = self.progress.stop.load(Ordering::Relaxed);
            if is_stalled || is_told || elapsed >= ns(time) {
                return Ok(Phase {
                    received: self.received() - before,
                    ns: elapsed,
                    is_stalled,
                });
            }
        }
    }

    #[inline]
    fn receive(&mut self, index: usize, each: impl FnMut(u64)) -> anyhow::Result<u32> {
        let sent = self.members[self.before(index)].sent;
        self.members[index].receive(sent, each)
    }

    /// Frames of the flow from this guest that have not come and may still.
    #[inline]
    fn under_way(&self, index: usize) -> u64 {
        self.members[index].sent - self.members[self.after(index)].verifier.next()
    }

    fn received(&self) -> u64 {
        let received = |member: &Member| member.verifier.received();
        self.members.iter().map(received).sum()
    }

    #[inline]
    fn after(&self, index: usize) -> usize {
        if index + 1 == self.members.len() {
            0
        } else {
            index + 1
        }
    }

    #[inline]
    fn before(&self, index: usize) -> usize {
        index.checked_sub(1).unwrap_or(self.members.len() - 1)
    }

    fn ns_since(&self, ticks: u64) -> u64 {
        self.clock.to_ns(self.clock.now().saturating_sub(ticks))
    }

    #[inline]
    fn idle(&self) {
        if self.shares_core {
            std::thread::yield_now();
        } else {
            pause();
        }
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

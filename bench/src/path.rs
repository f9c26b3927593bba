//! The path of a frame on one core: guest and switch take turns on one thread,
//! so every line is in the cache and what remains is what the instructions
//! cost. Repeatable on a noisy machine (the fastest rounds count), and short
//! enough for an instruction counter.

use std::sync::Arc;

use anyhow::ensure;
use clap::Args;
use hdrhistogram::Histogram;
use pollux_packet::BurstLimit;
use pollux_switch::{Fdb, FdbConfig, Forwarding, ForwardingConfig, Memo, Mode, PortId, Verdicts};
use pollux_sys::Clock;
use pollux_testkit::{Guest, GuestSpec};

use crate::rings::RingArgs;

/// Options of `path`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PathArgs {
    /// Bytes of a frame.
    #[arg(long, default_value_t = 64)]
    size: u32,
    /// Frames in a burst.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=64))]
    batch: u16,
    /// Bursts.
    #[arg(long, default_value_t = 20_000)]
    rounds: u32,
    /// Descriptors in each ring.
    #[arg(long, default_value_t = 256)]
    ring: u16,
    #[command(flatten)]
    rings: RingArgs,
}

/// Phases of a burst, in the order in which they run.
const PHASES: [&str; 4] = ["receive", "classify", "transmit", "return"];

/// Runs the bursts and prints cycles per packet of each phase.
///
/// # Errors
/// If a frame does not arrive.
pub(crate) fn run(args: &PathArgs) -> anyhow::Result<()> {
    let spec = GuestSpec {
        ring_size: args.ring,
        features: args.rings.features(),
        base: args.rings.base(),
        buffer_bytes: 2048.max(args.size + 12).next_multiple_of(64),
        ..GuestSpec::default()
    };
    let mut a = Guest::new(spec).expect("guest memory");
    let mut b = Guest::new(spec).expect("guest memory");
    let (mut from_a, _) = a.device();
    let (_, mut to_b) = b.device();
    a.tx.ring().suppress_calls();
    b.rx.ring().suppress_calls();
    a.tx.prepare(|_, span| {
        let mut frame = vec![0; span.len() as usize];
        frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
        span.write(&frame);
    });

    let fdb = Arc::new(Fdb::new(FdbConfig::default()));
    let source = fdb.open_port(PortId(0))?;
    let destination = fdb.open_port(PortId(1))?;
    fdb.learn(
        pollux_switch::MacVlan::new([2, 0, 0, 0, 0, 2], 0),
        destination,
        0,
    );
    let forwarding = Forwarding::new(ForwardingConfig {
        mode: Mode::Learn,
        fdb,
        members: vec![source.id(), destination.id()],
        forward_bpdu: false,
    })?;
    let (mut memo, mut verdicts) = (Memo::new(), Verdicts::new());

    let clock = Clock::calibrate();
    let mut ticks = Vec::new();
    for _ in PHASES {
        ticks.push(Histogram::<u32>::new(3)?);
    }
    let limit = BurstLimit {
        frames: args.batch,
        ..BurstLimit::MAX
    };
    for _ in 0..args.rounds {
        b.rx.refill();
        b.rx.publish();
        a.tx.send_batch(args.batch, args.size, |_| {});
        a.tx.publish();

        let t0 = clock.now();
        let burst = from_a.receive(limit);
        let t1 = clock.now();
        forwarding.classify(source, &mut memo, 0, burst.batch.heads(), &mut verdicts);
        let t2 = clock.now();
        let mut sent = 0;
        verdicts.for_each_egress(source.id(), forwarding.members(), |_, frames| {
            sent += to_b.transmit(&burst.batch, frames).frames;
        });
        let t3 = clock.now();
        let frames = burst.batch.len();
        burst.finish(frames);
        let t4 = clock.now();

        for (phase, (from, to)) in ticks
            .iter_mut()
            .zip([(t0, t1), (t1, t2), (t2, t3), (t3, t4)])
        {
            phase.record(to.wrapping_sub(from))?;
        }
        a.tx.reclaim()?;
        let received = b.rx.receive(u32::from(args.batch), |_| {})?;
        ensure!(
            received == sent && sent > 0,
            "{sent} frames were sent, {received} arrived"
        );
    }

    println!(
        "path on one core: {} B, burst {}, ring {}, {:?}",
        args.size,
        args.batch,
        args.ring,
        args.rings.features()
    );
    println!("{:>9} {:>22}", "phase", "cycles/packet p10 p50");
    let mut total = [0.0; 2];
    for (name, ticks) in PHASES.iter().zip(&ticks) {
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        let at = |quantile| ticks.value_at_quantile(quantile) as f64 / f64::from(args.batch);
        let figures = [at(0.1), at(0.5)];
        println!("{name:>9} {:>16.1} {:>5.1}", figures[0], figures[1]);
        total[0] += figures[0];
        total[1] += figures[1];
    }
    println!("{:>9} {:>16.1} {:>5.1}", "sum", total[0], total[1]);
    Ok(())
}

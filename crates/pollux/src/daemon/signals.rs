//! SIGINT and SIGTERM.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{self, Receiver};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

const STOP_SIGNALS: [i32; 2] = [SIGINT, SIGTERM];
/// Signals so soon after the first are the same one: timeout(1) sends it to the
/// process and to its group, a terminal and a supervisor may both send one.
const SAME_SIGNAL: Duration = Duration::from_millis(200);
/// What a shell adds to the number of the signal that ended a process.
const SHELL_SIGNAL: i32 = 128;

/// The first signal comes out of the channel. One that comes later ends the
/// process at once, as if nobody had caught it: sockets stay behind.
pub(super) fn watch() -> io::Result<Receiver<i32>> {
    let impatient = Arc::new(AtomicBool::new(false));
    for signal in STOP_SIGNALS {
        let status = SHELL_SIGNAL + signal;
        flag::register_conditional_shutdown(signal, status, Arc::clone(&impatient))?;
    }
    let mut signals = Signals::new(STOP_SIGNALS)?;
    let (sender, receiver) = channel::bounded(1);
    thread::Builder::new()
        .name("pollux-signal".to_owned())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                // Nobody listens if the run ended by itself.
                let _ = sender.send(signal);
                thread::sleep(SAME_SIGNAL);
                impatient.store(true, Ordering::Relaxed);
                signals.forever().for_each(drop);
            }
        })?;
    Ok(receiver)
}

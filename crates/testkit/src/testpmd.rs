//! DPDK's testpmd as a guest: a process that drives virtio-user ports.
//!
//! testpmd is DPDK's own forwarding program; with `net_virtio_user` devices it is
//! the frontend of vhost-user sockets and the driver of their rings, in every
//! variant that DPDK knows. It needs root and huge pages.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::wait_until;

const PROGRAM: &str = "dpdk-testpmd";
const HUGE_PAGES: &str = "/dev/hugepages";
/// Where DPDK keeps what belongs to a process, by its prefix.
const RUN_TIME: &str = "/var/run/dpdk";
/// The process ends by then, whatever became of the test.
const LIFE_MAX_SECONDS: &str = "150";
/// Huge pages of 2 MiB that a process needs.
const PAGES_MIN: u64 = 128;

/// A virtio-user device: one port of testpmd.
#[derive(Clone, Debug)]
pub struct VirtioUser<'a> {
    /// The vhost-user socket.
    pub socket: &'a Path,
    /// Its address: 02:00:00:00:01:NN.
    pub station: u8,
    /// Descriptors of each ring.
    pub queue_size: u16,
    /// More device arguments, such as `mrg_rxbuf=0` or `server=1`.
    pub options: &'a str,
}

impl VirtioUser<'_> {
    fn argument(&self, index: usize) -> String {
        let mut text = format!(
            "net_virtio_user{index},path={},mac={},queue_size={}",
            self.socket.display(),
            mac_text(self.station),
            self.queue_size
        );
        if !self.options.is_empty() {
            text.push(',');
            text.push_str(self.options);
        }
        text
    }
}

/// The address of a [`VirtioUser`] with that station number.
#[must_use]
pub fn mac_text(station: u8) -> String {
    format!("02:00:00:00:01:{station:02x}")
}

/// How a process is started.
#[derive(Clone, Debug)]
pub struct TestpmdSpec<'a> {
    /// EAL devices, in the order of testpmd's ports.
    pub devices: Vec<String>,
    /// Core of the command line, and of forwarding.
    pub cores: [usize; 2],
    /// `--forward-mode`.
    pub forward: &'a str,
    /// More arguments of testpmd itself.
    pub arguments: &'a [&'a str],
}

impl<'a> TestpmdSpec<'a> {
    /// Virtio-user ports.
    #[must_use]
    pub fn virtio_user(ports: &[VirtioUser<'_>], forward: &'a str) -> Self {
        let ports = ports.iter().enumerate();
        Self {
            devices: ports.map(|(index, port)| port.argument(index)).collect(),
            cores: [0, 1],
            forward,
            arguments: &[],
        }
    }
}

/// Counters of a port, as testpmd shows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmdPort {
    /// Packets that it received.
    pub rx_packets: u64,
    /// Packets that it sent: the device has them in its ring.
    pub tx_packets: u64,
    /// Bytes that it received.
    pub rx_bytes: u64,
    /// Bytes that it sent.
    pub tx_bytes: u64,
}

/// A running testpmd with its command line. Dropping it kills it.
#[derive(Debug)]
pub struct Testpmd {
    child: Child,
    stdin: ChildStdin,
    log: Arc<Mutex<String>>,
    prefix: String,
    ports: usize,
}

/// Why testpmd cannot run here; `None` if it can.
#[must_use]
pub fn missing() -> Option<String> {
    let is_on_path = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| directory.join(PROGRAM).is_file())
    });
    if !is_on_path {
        return Some(format!(
            "{PROGRAM} is not installed (Debian: apt-get install dpdk-dev)"
        ));
    }
    if !rustix::process::geteuid().is_root() {
        return Some(format!("{PROGRAM} needs root for huge pages"));
    }
    if pollux_sys::available_cores().len() < 2 {
        return Some(format!("{PROGRAM} needs two cores"));
    }
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    if free < 2 * PAGES_MIN {
        return Some(format!(
            "{free} huge pages of 2 MiB are free and {} are needed (echo 1024 > \
             /proc/sys/vm/nr_hugepages)",
            2 * PAGES_MIN
        ));
    }
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    if !mounts
        .lines()
        .any(|line| line.split(' ').nth(2) == Some("hugetlbfs"))
    {
        return Some(format!(
            "no hugetlbfs is mounted (mount -t hugetlbfs none {HUGE_PAGES})"
        ));
    }
    None
}

impl Testpmd {
    /// Starts the process and waits for its prompt: all ports are up.
    ///
    /// # Panics
    /// If it does not come up; the text has the end of its log.
    #[must_use]
    pub fn start(spec: &TestpmdSpec<'_>) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("pollux-{}-{count}", std::process::id());
        let [main, forward] = spec.cores;
        let mut command = Command::new("timeout");
        // Its own output would stay in a buffer until the next prompt but one.
        command.args(["--kill-after=2", LIFE_MAX_SECONDS, "stdbuf", "-oL", PROGRAM]);
        command.arg(format!("--lcores={main},{forward}"));
        command.arg(format!("--main-lcore={main}"));
        command.args(["--no-pci", "--single-file-segments", "-m", "64"]);
        command.arg(format!("--file-prefix={prefix}"));
        for device in &spec.devices {
            command.args(["--vdev", device]);
        }
        command.args(["--", "-i", "--nb-cores=1", "--total-num-mbufs=16384"]);
        command.arg(format!("--forward-mode={}", spec.forward));
        command.args(spec.arguments);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("timeout(1) runs");
        let stdin = child.stdin.take().expect("piped");
        let log = Arc::new(Mutex::new(String::new()));
        read_into(child.stdout.take().expect("piped"), &log);
        read_into(child.stderr.take().expect("piped"), &log);
        let testpmd = Self {
            child,
            stdin,
            log,
            prefix,
            ports: spec.devices.len(),
        };
        testpmd.wait_for("testpmd>", 0);
        testpmd
    }

    /// Types a command.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn command(&mut self, text: &str) {
        let written = writeln!(self.stdin, "{text}");
        let flushed = written.and_then(|()| self.stdin.flush());
        assert!(flushed.is_ok(), "testpmd has ended:\n{}", self.log_end());
    }

    /// Types a command and waits until the prompt is back.
    ///
    /// # Panics
    /// If it does not come back.
    pub fn run(&mut self, text: &str) -> String {
        let from = self.log_len();
        self.command(text);
        self.wait_for("testpmd> ", from + text.len());
        self.log()[from..].to_owned()
    }

    /// Counters of all ports.
    ///
    /// # Panics
    /// If testpmd does not show them.
    pub fn port_stats(&mut self) -> Vec<PmdPort> {
        let from = self.log_len();
        self.command("show port stats all");
        // The last line of each port.
        for port in 1..=self.ports {
            wait_until(
                &format!("testpmd shows port {port} of {}", self.ports),
                || self.log()[from..].matches("Tx-bps:").count() >= port,
            );
        }
        self.wait_for(
            "testpmd>",
            from + self.log()[from..].rfind("Tx-bps:").unwrap_or(0),
        );
        parse_stats(&self.log()[from..])
    }

    /// Ends it as a crash would.
    pub fn kill(self) {
        drop(self);
    }

    /// Ends it as an operator would: its sessions are closed in order.
    ///
    /// # Panics
    /// If it does not end.
    pub fn quit(mut self) {
        self.command("quit");
        wait_until("testpmd ends", || {
            thread::sleep(Duration::from_millis(5));
            matches!(self.child.try_wait(), Ok(Some(_)))
        });
    }

    /// What it has printed.
    #[must_use]
    pub fn log(&self) -> String {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn log_len(&self) -> usize {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(25)..].join("\n")
    }

    fn wait_for(&self, text: &str, from: usize) {
        let deadline = std::time::Instant::now() + crate::WAIT_MAX;
        while !self.log().get(from..).is_some_and(|log| log.contains(text)) {
            assert!(
                std::time::Instant::now() < deadline,
                "testpmd did not print \"{text}\":\n{}",
                self.log_end()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It has ended by itself already: as good.
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(Path::new(RUN_TIME).join(&self.prefix));
        for entry in std::fs::read_dir(HUGE_PAGES)
            .into_iter()
            .flatten()
            .flatten()
        {
            if entry
                .file_name()
                .to_string_lossy()
                .starts_with(&self.prefix)
            {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn read_into(mut pipe: impl Read + Send + 'static, log: &Arc<Mutex<String>>) {
    let log = Arc::clone(log);
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut bytes) {
            let text = String::from_utf8_lossy(&bytes[..count]);
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            // A process that prints without end shall not take all memory.
            if log.len() < 1 << 24 {
                let _ = write!(log, "{text}");
            }
        }
    });
}

/// Reads `show port stats all`.
fn parse_stats(text: &str) -> Vec<PmdPort> {
    let mut ports: Vec<PmdPort> = Vec::new();
    for line in text.lines() {
        if line.contains("NIC statistics for port") {
            ports.push(PmdPort::default());
        }
        let Some(port) = ports.last_mut() else {
            continue;
        };
        let field = |name: &str| {
            let rest = &line[line.find(name)? + name.len()..];
            rest.split_whitespace().next()?.parse().ok()
        };
        for (name, value) in [
            ("RX-packets:", &mut port.rx_packets),
            ("RX-bytes:", &mut port.rx_bytes),
            ("TX-packets:", &mut port.tx_packets),
            ("TX-bytes:", &mut port.tx_bytes),
        ] {
            if let Some(found) = field(name) {
                *value = found;
            }
        }
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_read() {
        let text = "
  ######################## NIC statistics for port 0  ########################
  RX-packets: 5          RX-missed: 0          RX-bytes:  320
  RX-errors: 0
  TX-packets: 7          TX-errors: 0          TX-bytes:  448
  ######################## NIC statistics for port 1  ########################
  RX-packets: 9          RX-missed: 0          RX-bytes:  576
  TX-packets: 0          TX-errors: 0          TX-bytes:  0
";
        let ports = parse_stats(text);
        assert_eq!(ports.len(), 2);
        assert_eq!((ports[0].rx_packets, ports[0].tx_bytes), (5, 448));
        assert_eq!((ports[1].rx_packets, ports[1].rx_bytes), (9, 576));
    }
}

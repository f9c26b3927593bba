//! DPDK's testpmd as a guest: a process that drives virtio-user ports.
//!
//! testpmd is DPDK's own forwarding program; with `net_virtio_user` devices it is
//! the frontend of vhost-user sockets and the driver of their rings, in every
//! variant that DPDK knows. It needs root and huge pages.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

const PROGRAM: &str = "dpdk-testpmd";
const HUGE_PAGES: &str = "/dev/hugepages";
/// Where DPDK keeps what belongs to a process, by its prefix.
const RUN_TIME: &str = "/var/run/dpdk";
/// The process ends by then, whatever became of the test.
const LIFE_MAX_SECONDS: &str = "150";
/// Huge pages of 2 MiB that a process needs.
const PAGES_MIN: u64 = 128;
/// A process that prints without end shall not take all memory.
const LOG_MAX_BYTES: usize = 1 << 24;
/// Last lines of a log that an error shows.
const LOG_END_LINES: usize = 25;
/// Longest wait for what it prints, and for its end. Its threads poll: with
/// other pollers on the same cores each gets a fraction of one.
const WAIT_MAX: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);

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
    /// Packets that it could not receive.
    pub rx_missed: u64,
    /// Packets that it sent: the device has them in its ring.
    pub tx_packets: u64,
    /// Packets that it could not send.
    pub tx_errors: u64,
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
    /// Apart from each other: the prompt is written letter by letter, and a
    /// line on stderr may come in the middle of it.
    stdout: Log,
    stderr: Log,
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
        let stdout = Log::of(child.stdout.take().expect("piped"));
        let stderr = Log::of(child.stderr.take().expect("piped"));
        let mut testpmd = Self {
            child,
            stdin,
            stdout,
            stderr,
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

    /// Types a command and waits until the prompt is back. Returns what it
    /// printed.
    ///
    /// # Panics
    /// If it does not come back.
    pub fn run(&mut self, text: &str) -> String {
        let from = self.stdout.len();
        self.command(text);
        self.wait_for("testpmd> ", from + text.len());
        self.stdout.since(from)
    }

    /// Counters of all ports.
    ///
    /// # Panics
    /// If testpmd does not show them.
    pub fn port_stats(&mut self) -> Vec<PmdPort> {
        let from = self.stdout.len();
        self.command("show port stats all");
        let ports = self.ports;
        // The last line of each port.
        self.wait(&format!("show {ports} ports"), |stdout| {
            stdout.since(from).matches("Tx-bps:").count() >= ports
        });
        let shown = self.stdout.since(from).rfind("Tx-bps:").unwrap_or(0);
        self.wait_for("testpmd>", from + shown);
        parse_stats(&self.stdout.since(from))
    }

    /// Ends it as a crash would.
    pub fn kill(self) {
        drop(self);
    }

    /// Ends it as an operator would: its sessions are closed in order.
    ///
    /// # Panics
    /// If it does not end, or not well.
    pub fn quit(mut self) {
        self.command("quit");
        let deadline = Instant::now() + WAIT_MAX;
        let status = loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "testpmd did not end:\n{}",
                self.log_end()
            );
            thread::sleep(POLL);
        };
        assert!(
            status.success(),
            "testpmd ended with {status}:\n{}",
            self.log_end()
        );
    }

    /// What it has printed: stdout, then stderr.
    #[must_use]
    pub fn log(&self) -> String {
        self.stdout.since(0) + &self.stderr.since(0)
    }

    fn log_end(&self) -> String {
        format!(
            "{}\n--- stderr\n{}",
            self.stdout.last_lines(),
            self.stderr.last_lines()
        )
    }

    fn wait_for(&mut self, text: &str, from: usize) {
        self.wait(&format!("print \"{text}\""), |stdout| {
            stdout.since(from).contains(text)
        });
    }

    /// Waits for something on stdout.
    fn wait(&mut self, what: &str, done: impl Fn(&Log) -> bool) {
        let deadline = Instant::now() + WAIT_MAX;
        while !done(&self.stdout) {
            let status = self.child.try_wait();
            assert!(
                matches!(status, Ok(None)),
                "testpmd has ended ({status:?}) and did not {what}:\n{}",
                self.log_end()
            );
            assert!(
                Instant::now() < deadline,
                "testpmd did not {what}:\n{}",
                self.log_end()
            );
            thread::sleep(POLL);
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
        // The child is timeout(1). testpmd gives its memory back before its end
        // of the pipes, and who comes next needs the huge pages.
        let deadline = Instant::now() + WAIT_MAX;
        while !(self.stdout.has_ended() && self.stderr.has_ended()) && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        let _ = std::fs::remove_dir_all(Path::new(RUN_TIME).join(&self.prefix));
        // PREFIXmap_N; another process may be PREFIX0.
        let maps = format!("{}map", self.prefix);
        let entries = std::fs::read_dir(HUGE_PAGES).into_iter().flatten();
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(&maps) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// What a process has written to a pipe so far.
#[derive(Debug)]
struct Log {
    text: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Log {
    /// Reads the pipe in a thread of its own, until it ends.
    fn of(mut pipe: impl Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let read = Arc::clone(&text);
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut bytes) {
                let mut text = read.lock().unwrap_or_else(PoisonError::into_inner);
                if text.len() < LOG_MAX_BYTES {
                    text.push_str(&String::from_utf8_lossy(&bytes[..count]));
                }
            }
        });
        Self { text, reader }
    }

    /// Whether the pipe has ended: no process holds its other end any more.
    fn has_ended(&self) -> bool {
        self.reader.is_finished()
    }

    fn text(&self) -> MutexGuard<'_, String> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> usize {
        self.text().len()
    }

    /// What came after the first `from` bytes; nothing if they have not all come.
    fn since(&self, from: usize) -> String {
        self.text().get(from..).unwrap_or_default().to_owned()
    }

    fn last_lines(&self) -> String {
        let text = self.text();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_END_LINES)..].join("\n")
    }
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
            ("RX-missed:", &mut port.rx_missed),
            ("RX-bytes:", &mut port.rx_bytes),
            ("TX-packets:", &mut port.tx_packets),
            ("TX-errors:", &mut port.tx_errors),
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
  RX-packets: 9          RX-missed: 3          RX-bytes:  576
  TX-packets: 0          TX-errors: 4          TX-bytes:  0
";
        let ports = parse_stats(text);
        assert_eq!(ports.len(), 2);
        assert_eq!((ports[0].rx_packets, ports[0].tx_bytes), (5, 448));
        assert_eq!((ports[1].rx_packets, ports[1].rx_bytes), (9, 576));
        assert_eq!((ports[1].rx_missed, ports[1].tx_errors), (3, 4));
    }

    #[test]
    fn a_log_is_read_to_its_end() {
        let lines: String = (0..100).map(|line| format!("line {line}\n")).collect();
        let log = Log::of(std::io::Cursor::new(lines.clone()));
        crate::wait_until("all was read", || log.has_ended());
        assert_eq!(log.len(), lines.len());
        assert_eq!(log.since(lines.len() - 8), "line 99\n");
        assert_eq!(log.since(lines.len() + 1), "");
        let last = log.last_lines();
        assert!(last.starts_with("line 75\n") && last.ends_with("line 99"));
    }
}

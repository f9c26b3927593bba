//! `pollux run` from start to end.

mod common;

use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

use common::{LIMIT, Pollux, core, wait_until, write_plan};
use serde_json::Value;

fn is_socket(path: &Path) -> bool {
    path.symlink_metadata()
        .is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Stops with a signal; it has to end in order.
fn stop(pollux: Pollux, signal: &str) -> common::Finished {
    pollux.signal(signal);
    let finished = pollux.finish();
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    finished
}

#[test]
fn json_lines_until_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1", "vm2"]);
    let sockets = dir.path().join("sockets");
    let mut pollux = Pollux::run(&plan, &sockets, &["--json", "--interval", "0.2"]);
    let lines = pollux.stdout_lines();

    let mut uptime = 0.0;
    for _ in 0..3 {
        let document: Value = serde_json::from_str(&lines.recv_timeout(LIMIT).unwrap()).unwrap();
        assert_eq!(document["schema"], 1);
        assert!(document["uptime_seconds"].as_f64().unwrap() > uptime);
        uptime = document["uptime_seconds"].as_f64().unwrap();
        assert!(document["interval_seconds"].as_f64().unwrap() >= 0.15);
        let worker = &document["workers"][0];
        assert_eq!(worker["name"], "w0");
        assert_eq!(worker["core"], core());
        assert_eq!(worker["busy"], 0.0);
        assert!(worker["idle"].as_f64().unwrap() > 0.0, "{document}");
        assert_eq!(worker["cycles_per_packet"], Value::Null);
        for (index, name) in ["vm1", "vm2"].into_iter().enumerate() {
            let port = &document["ports"][index];
            assert_eq!(port["name"], name);
            assert_eq!(port["worker"], "w0");
            assert_eq!(port["state"], "listening");
            assert!(port["missing"].is_string(), "{port}");
            assert_eq!(port["rx"]["packets"], 0);
            assert_eq!(port["drops"], serde_json::json!({}));
        }
    }
    assert!(is_socket(&sockets.join("vm1.sock")) && is_socket(&sockets.join("vm2.sock")));

    let finished = stop(pollux, "TERM");
    assert!(
        finished.stderr.contains("port vm1 listens on "),
        "{}",
        finished.stderr
    );
    assert_eq!(sockets.read_dir().unwrap().count(), 0);
}

#[test]
fn without_a_terminal_there_are_start_lines_only() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let pollux = Pollux::run(&plan, dir.path(), &["--interval", "0.1"]);
    let socket = dir.path().join("vm1.sock");
    wait_until("it listens", || is_socket(&socket));
    std::thread::sleep(std::time::Duration::from_millis(500));
    let stdout = stop(pollux, "INT").stdout;
    assert!(
        stdout.starts_with(&format!("port vm1 listens on {}\n", socket.display())),
        "{stdout}"
    );
    assert!(stdout.contains(&format!(
        "--vdev=net_virtio_user0,path={},",
        socket.display()
    )));
    assert!(
        !stdout.contains('\x1b') && !stdout.contains("WORKER"),
        "{stdout}"
    );
    assert!(!socket.exists());
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let socket = dir.path().join("vm1.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let pollux = Pollux::run(&plan, dir.path(), &[]);
    wait_until("it listens", || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    stop(pollux, "TERM");
    assert!(!socket.exists());
}

#[test]
fn the_end_of_the_reader_is_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let mut pollux = Pollux::run(&plan, dir.path(), &["--json", "--interval", "0.1"]);
    let lines = pollux.stdout_lines();
    lines.recv_timeout(LIMIT).unwrap();
    drop(lines);
    let finished = pollux.finish();
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    assert!(!dir.path().join("vm1.sock").exists());
}

/// timeout(1) sends its signal to the process and to the group.
#[test]
fn a_signal_sent_twice_stops_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let plan = write_plan(dir.path(), &["vm1"]);
    let socket = dir.path().join("vm1.sock");
    let pollux = Pollux::run(&plan, dir.path(), &[]);
    wait_until("it listens", || is_socket(&socket));
    let pid = pollux.pid();
    let kills = format!("kill -s TERM {pid}; kill -s TERM {pid} 2>/dev/null || true");
    let status = std::process::Command::new("sh")
        .args(["-c", &kills])
        .status();
    assert!(status.unwrap().success());
    assert_eq!(pollux.finish().status.code(), Some(0));
    assert!(!socket.exists());
}

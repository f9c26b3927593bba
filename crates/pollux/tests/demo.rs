//! `pollux demo` as a user runs it.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A run measures for a second; building up and a busy machine come on top.
const TIME_MAX: Duration = Duration::from_secs(90);

fn pollux(args: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pollux"))
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary was built");
    let deadline = Instant::now() + TIME_MAX;
    while child.try_wait().expect("it is our child").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("it is our child");
            let output = child.wait_with_output().expect("it was killed");
            panic!("{args:?} did not end within {TIME_MAX:?}: {output:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().expect("it has ended")
}

/// The last line of a run that has to go well.
fn json_of(args: &[&str]) -> Value {
    let output = pollux(args);
    let stdout = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    assert!(output.status.success(), "{args:?}: {output:?}");
    let last = stdout.lines().last().expect("a line");
    serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {last}"))
}

fn assert_clean(json: &Value) {
    for field in ["lost", "reordered", "duplicated", "corrupt"] {
        assert_eq!(json[field], 0, "{field}: {json}");
    }
    assert_eq!(json["schema"], 1);
    for field in ["mpps", "gbps", "cycles_per_packet", "packets_per_batch"] {
        assert!(json[field].as_f64() > Some(0.0), "{field}: {json}");
    }
    let latency = &json["latency_ns"];
    let at = |name: &str| latency[name].as_u64().expect("a number");
    assert!(0 < at("p50") && at("p50") <= at("p90") && at("p90") <= at("p99"));
    assert!(json["payloads_compared"].as_u64() > Some(0), "{json}");
    assert!(json["remarks"].is_array());
}

#[test]
fn two_guests_lose_nothing() {
    let json = json_of(&["demo", "--seconds", "1", "--json"]);
    assert_clean(&json);
    assert_eq!((&json["guests"], &json["size"]), (&2.into(), &64.into()));
}

#[test]
fn three_guests_with_long_frames_lose_nothing() {
    let args = "demo --seconds 1 --guests 3 --size 1518 --json";
    let json = json_of(&args.split(' ').collect::<Vec<_>>());
    assert_clean(&json);
    assert_eq!((&json["guests"], &json["size"]), (&3.into(), &1518.into()));
}

#[test]
fn jumbo_frames_lose_nothing() {
    let json = json_of(&["demo", "--seconds", "1", "--size", "9018", "--json"]);
    assert_clean(&json);
}

#[test]
fn people_get_a_block_of_text() {
    let output = pollux(&["demo", "--seconds", "1"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    for part in [
        "Mpps",
        "Gbit/s",
        "cycles/packet",
        "p99",
        "0 lost, 0 reordered",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // No terminal: no live table.
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn what_cannot_be_is_refused_with_a_way_out() {
    for (option, value, hint) in [
        ("--size", "63", "from 64 to 9018"),
        ("--size", "10000", "from 64 to 9018"),
        ("--guests", "1", "from 2 to 64"),
        ("--seconds", "0", "from 1 to"),
    ] {
        let output = pollux(&["demo", option, value]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        for part in [option, value, hint] {
            assert!(stderr.contains(part), "{part}: {stderr}");
        }
    }
}

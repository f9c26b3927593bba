//! Plans, and what is said about those that are wrong.

use pollux_vhost::SocketMode;

use super::*;

const GOOD: &str = r#"
[daemon]
socket_dir = "/run/elsewhere"
[switch]
mode = "learn"
[[worker]]
name = "w0"
core = 0
[[port]]
name = "vm1"
kind = "vhost"
socket = "one.sock"
mode = "server"
[[port]]
name = "vm2"
kind = "vhost"
mode = "client"
worker = "w0"
any_memory = true
"#;

const MINIMAL: &str = r#"
worker = [{ name = "w0", core = 0 }]
port = [{ name = "vm1", kind = "vhost" }]
"#;

fn as_root() -> Surroundings {
    Surroundings {
        is_root: true,
        ..Surroundings::default()
    }
}

/// Faults as `object | why | next`.
fn faults(text: &str) -> Vec<String> {
    match Config::parse("p.toml", text, &as_root()) {
        Ok(_) => Vec::new(),
        Err(faults) => faults
            .into_iter()
            .map(|Fault { object, why, next }| format!("{object} | {why} | {next}"))
            .collect(),
    }
}

/// The faults of [`GOOD`] after a replacement.
fn faults_with(from: &str, to: &str) -> Vec<String> {
    assert!(GOOD.contains(from), "{from}");
    faults(&GOOD.replacen(from, to, 1))
}

#[test]
fn a_plan_becomes_configuration() {
    let config = Config::parse("p.toml", GOOD, &as_root()).unwrap();
    assert_eq!(
        config.socket_dir.as_deref(),
        Some(Path::new("/run/elsewhere"))
    );
    assert_eq!(config.plan.mode, PlannedMode::Learn);
    assert_eq!(config.plan.workers[0].core, Some(0));
    assert_eq!(config.plan.ports[1].worker.as_deref(), Some("w0"));
    let [(vm1, one), (vm2, two)] = &config.vhost[..] else {
        panic!("{:?}", config.vhost);
    };
    assert_eq!((vm1.as_str(), vm2.as_str()), ("vm1", "vm2"));
    assert_eq!(one.socket, Path::new("/run/elsewhere/one.sock"));
    assert_eq!(two.socket, Path::new("/run/elsewhere/vm2.sock"));
    assert_eq!(
        (one.mode, two.mode),
        (SocketMode::Server, SocketMode::Client)
    );
    assert!(two.any_memory && !one.any_memory);
    assert_eq!(config.plan.check(&[0]), Ok(()));
}

#[test]
fn pairs_become_a_cross_connect() {
    let text = GOOD.replace(
        "mode = \"learn\"",
        "mode = \"xconnect\"\nforward_bpdu = true\n[[switch.pair]]\na = \"vm1\"\nb = \"vm2\"",
    );
    let config = Config::parse("p.toml", &text, &as_root()).unwrap();
    let pairs = vec![("vm1".to_owned(), "vm2".to_owned())];
    assert_eq!(config.plan.mode, PlannedMode::CrossConnect(pairs));
    assert!(config.plan.forward_bpdu);
    assert_eq!(config.plan.check(&[0]), Ok(()));
}

#[test]
fn sockets_live_where_the_operator_expects_them() {
    let socket = |text: &str, surroundings: &Surroundings| {
        Config::parse("p.toml", text, surroundings).map(|config| config.vhost[0].1.socket.clone())
    };
    assert_eq!(
        socket(MINIMAL, &as_root()).unwrap(),
        Path::new("/run/pollux/vm1.sock")
    );
    let user = Surroundings {
        runtime_dir: Some("/run/user/1".into()),
        ..Surroundings::default()
    };
    assert_eq!(
        socket(MINIMAL, &user).unwrap(),
        Path::new("/run/user/1/pollux/vm1.sock")
    );
    let told = Surroundings {
        socket_dir: Some("/told".into()),
        ..as_root()
    };
    assert_eq!(socket(GOOD, &told).unwrap(), Path::new("/told/one.sock"));
    let faults = socket(MINIMAL, &Surroundings::default()).unwrap_err();
    assert_eq!(faults[0].next, "give --socket-dir DIR");
    // Nothing is needed by who says where.
    let absolute = MINIMAL.replace("\"vhost\"", "\"vhost\", socket = \"/a/b\"");
    assert_eq!(
        socket(&absolute, &Surroundings::default()).unwrap(),
        Path::new("/a/b")
    );
}

#[test]
fn syntax_is_told_with_line_and_column() {
    assert_eq!(
        faults_with("core = 0", "core = "),
        [
            "p.toml:8:8 | not TOML: string values must be quoted, expected literal string\ncore = | correct line 8"
        ]
    );
    assert!(
        faults_with("core = 0", "core = 0\ncore = 1")[0]
            .contains("p.toml:9:1 | not TOML: duplicate key")
    );
}

#[test]
fn unknown_keys_are_told_with_a_suggestion() {
    assert_eq!(
        faults_with("socket = \"one.sock\"", "sokcet = \"one.sock\""),
        ["p.toml:12, port \"vm1\" | the key `sokcet` is not known here | did you mean `socket`?"]
    );
    assert_eq!(
        faults_with("core = 0", "core = 0\ncpus = 4"),
        [
            "p.toml:9, worker \"w0\" | the key `cpus` is not known here | remove it; known here: `name`, `core`"
        ]
    );
    assert_eq!(
        faults_with("[daemon]", "[deamon]"),
        ["p.toml:2, the plan | the key `deamon` is not known here | did you mean `daemon`?"]
    );
    assert_eq!(
        faults_with("socket_dir", "SocketDir"),
        ["p.toml:3, [daemon] | the key `SocketDir` is not known here | did you mean `socket_dir`?"]
    );
    assert_eq!(
        faults_with("mode = \"learn\"", "mode = \"learn\"\nforward_bdpu = true"),
        [
            "p.toml:6, [switch] | the key `forward_bdpu` is not known here | did you mean `forward_bpdu`?"
        ]
    );
    assert_eq!(
        faults_with(
            "[[worker]]",
            "[[switch.pair]]\na = \"vm1\"\nb = \"vm2\"\nc = \"vm3\"\n[[worker]]"
        ),
        [
            "p.toml:9, [[switch.pair]] | the key `c` is not known here | remove it; known here: `a`, `b`"
        ]
    );
}

#[test]
fn unknown_values_are_told_with_the_list() {
    assert_eq!(
        faults_with("mode = \"learn\"", "mode = \"bridge\""),
        ["p.toml:5, [switch] | there is no mode \"bridge\" | use \"learn\" or \"xconnect\""]
    );
    assert_eq!(
        faults_with("kind = \"vhost\"", "kind = \"tap\""),
        ["p.toml:11, port \"vm1\" | there is no kind \"tap\" | use \"vhost\""]
    );
    assert_eq!(
        faults_with("mode = \"client\"", "mode = \"clinet\""),
        ["p.toml:17, port \"vm2\" | there is no mode \"clinet\" | did you mean \"client\"?"]
    );
}

#[test]
fn wrong_types_are_told_with_an_example() {
    assert_eq!(
        faults_with("core = 0", "core = \"0\""),
        [
            "p.toml:8, worker \"w0\" | `core` is a string and has to be a whole number | write core = 0, without quotes"
        ]
    );
    assert_eq!(
        faults_with("core = 0", "core = -1"),
        [
            "p.toml:8, worker \"w0\" | `core` is -1, and has to be a number from 0 | write core = 0, without quotes"
        ]
    );
    assert_eq!(
        faults_with("any_memory = true", "any_memory = \"yes\""),
        [
            "p.toml:19, port \"vm2\" | `any_memory` is a string and has to be true or false | write any_memory = true or any_memory = false, without quotes"
        ]
    );
    assert_eq!(
        faults_with("name = \"w0\"", "name = 0"),
        [
            "p.toml:7, [[worker]] | `name` is a whole number and has to be a string | write name = \"…\", with quotes"
        ]
    );
    assert_eq!(
        faults_with("[[worker]]", "[worker]"),
        [
            "p.toml:6, the plan | `worker` is a table and has to be a list of tables | write [[worker]] on a line of its own, and the keys of one worker below"
        ]
    );
    assert_eq!(
        faults_with("[switch]", "[[switch]]"),
        [
            "p.toml:4, the plan | `switch` is a list and has to be one table | write [switch] on a line of its own, and its keys below"
        ]
    );
}

#[test]
fn missing_and_useless_values_are_told() {
    assert_eq!(
        faults_with("core = 0\n", ""),
        ["p.toml:6, worker \"w0\" | `core` is missing | add core = 0, without quotes"]
    );
    assert_eq!(
        faults_with("name = \"vm1\"\n", ""),
        ["p.toml:9, [[port]] | `name` is missing | add name = \"…\""]
    );
    assert_eq!(
        faults_with("kind = \"vhost\"\n", ""),
        ["p.toml:9, port \"vm1\" | `kind` is missing | add kind = \"vhost\""]
    );
    assert_eq!(
        faults_with("name = \"vm1\"", "name = \"\""),
        ["p.toml:10, [[port]] | `name` is empty | give it a value"]
    );
    assert_eq!(
        faults_with("name = \"vm1\"", "name = \"a\\u0000\""),
        ["p.toml:10, [[port]] | `name` contains a control character | leave it out"]
    );
    assert!(faults_with("name = \"vm1\"", "name = \"../vm1\"")[0].contains("slash"));
    assert!(faults_with("/run/elsewhere", "elsewhere")[0].contains("relative path elsewhere"));
}

#[test]
fn contradictions_are_told() {
    assert_eq!(
        faults_with("name = \"vm2\"", "name = \"vm1\""),
        ["p.toml:15, port \"vm1\" | line 10 has a port of that name already | rename one"]
    );
    assert_eq!(
        faults_with("[[port]]", "[[worker]]\nname = \"w0\"\ncore = 0\n[[port]]"),
        [
            "p.toml:10, worker \"w0\" | line 7 has a worker of that name already | rename one",
            "p.toml:11, worker \"w0\" | core 0 is that of worker \"w0\" already | give each worker its own core"
        ]
    );
    assert_eq!(
        faults_with("one.sock", "vm2.sock"),
        [
            "p.toml:15, port \"vm2\" | its socket /run/elsewhere/vm2.sock is that of port \"vm1\" too | give each port a socket of its own"
        ]
    );
    assert_eq!(
        faults_with("worker = \"w0\"", "worker = \"w1\""),
        ["p.toml:18, port \"vm2\" | there is no worker \"w1\" in the plan | did you mean \"w0\"?"]
    );
    assert_eq!(
        faults(""),
        [
            "p.toml | it has no worker, so nothing would be forwarded | add [[worker]] with name = \"w0\" and core = 0",
            "p.toml | it has no port, so there is nothing to switch | add [[port]] with name = \"vm1\" and kind = \"vhost\""
        ]
    );
}

#[test]
fn pairs_that_are_none_are_told() {
    let with_pairs = |mode: &str, pairs: &str| {
        faults_with(
            "mode = \"learn\"",
            &format!("mode = \"{mode}\"\npair = [{pairs}]"),
        )
    };
    assert!(with_pairs("xconnect", "")[0].contains("no ports are paired"));
    assert!(
        with_pairs("learn", "{ a = \"vm1\", b = \"vm2\" }")[0]
            .contains("mode of the switch is \"learn\"")
    );
    assert_eq!(
        with_pairs("xconnect", "{ a = \"vm1\", b = \"database\" }"),
        [
            "p.toml:6, [[switch.pair]] | there is no port \"database\" in the plan | use one of \"vm1\", \"vm2\", or add it"
        ]
    );
    assert_eq!(
        with_pairs("xconnect", "{ a = \"vm1\", b = \"vm1\" }"),
        [
            "p.toml:6, [[switch.pair]] | port \"vm1\" is paired in line 6 already | pair each port with one other"
        ]
    );
}

#[test]
fn all_faults_are_told_in_order() {
    let text = GOOD
        .replace("core = 0", "core = \"zero\"")
        .replace("[daemon]", "[daemon]\ncolour = 1")
        .replace("mode = \"client\"", "mode = 7");
    let objects: Vec<String> = faults(&text)
        .iter()
        .map(|fault| fault.split(" | ").next().unwrap().to_owned())
        .collect();
    assert_eq!(
        objects,
        [
            "p.toml:3, [daemon]",
            "p.toml:9, worker \"w0\"",
            "p.toml:18, port \"vm2\""
        ]
    );
}

#[test]
fn cores_are_compared_with_the_machine() {
    let config = Config::parse("p.toml", GOOD, &as_root()).unwrap();
    assert_eq!(config.check_cores(&[0, 1]), []);
    let faults = config.check_cores(&[2, 3]);
    assert_eq!(faults[0].object, "p.toml:8, worker \"w0\"");
    assert_eq!(faults[0].next, "choose a core of 2, 3");
}

/// Whatever this reader lets pass, the datapath takes.
#[test]
fn every_shipped_plan_is_sound() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut count = 0;
    for entry in std::fs::read_dir(configs).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            let text = std::fs::read_to_string(&path).unwrap();
            let config = Config::parse(&path.to_string_lossy(), &text, &as_root()).unwrap();
            let cores: Vec<usize> = config.cores.iter().map(|(_, core)| *core).collect();
            assert_eq!(config.plan.check(&cores), Ok(()), "{}", path.display());
            count += 1;
        }
    }
    assert!(count > 0);
}

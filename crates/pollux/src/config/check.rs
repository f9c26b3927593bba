//! What a plan says that cannot all be true.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use pollux_datapath::PORTS_MAX;

use super::file::{Mode, PlanFile};
use super::read::{At, Document, did_you_mean, list};
use super::vhost_socket_in;

/// Notes every contradiction; sockets with relative names live in `dir`.
pub(super) fn contradictions(document: &Document<'_>, file: &PlanFile, dir: Option<&Path>) {
    let worker_names = file.workers.iter().map(|worker| &worker.name);
    names(document, "worker", worker_names);
    names(document, "port", file.ports.iter().map(|port| &port.name));
    if file.workers.is_empty() {
        document.fault_of_file(
            "it has no worker, so nothing would be forwarded",
            "add [[worker]] with name = \"w0\" and core = 0",
        );
    }
    if file.ports.is_empty() {
        document.fault_of_file(
            "it has no port, so there is nothing to switch",
            "add [[port]] with name = \"vm1\" and kind = \"vhost\"",
        );
    }
    if file.ports.len() > usize::from(PORTS_MAX) {
        document.fault_of_file(
            format!("it has {} ports, {PORTS_MAX} are allowed", file.ports.len()),
            "split it into several switches",
        );
    }
    cores(document, file);
    workers_of_ports(document, file);
    sockets(document, file, dir);
    pairs(document, file);
}

fn names<'f>(document: &Document<'_>, kind: &str, names: impl Iterator<Item = &'f At<String>>) {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for At { value: name, line } in names {
        if let Some(first) = seen.get(name.as_str()) {
            document.fault(
                *line,
                &format!("{kind} \"{name}\""),
                format!("line {first} has a {kind} of that name already"),
                "rename one",
            );
        } else {
            seen.insert(name, *line);
        }
    }
}

fn cores(document: &Document<'_>, file: &PlanFile) {
    let mut taken: HashMap<usize, &str> = HashMap::new();
    for worker in &file.workers {
        let At { value: core, line } = worker.core;
        if let Some(first) = taken.get(&core) {
            document.fault(
                line,
                &format!("worker \"{}\"", worker.name.value),
                format!("core {core} is that of worker \"{first}\" already"),
                "give each worker its own core",
            );
        } else {
            taken.insert(core, &worker.name.value);
        }
    }
}

fn workers_of_ports(document: &Document<'_>, file: &PlanFile) {
    let known: Vec<&str> = file
        .workers
        .iter()
        .map(|worker| worker.name.value.as_str())
        .collect();
    for port in &file.ports {
        if let Some(At { value: name, line }) = &port.worker {
            let object = format!("port \"{}\"", port.name.value);
            reference(document, *line, &object, "worker", name, &known);
        }
    }
}

/// Notes it if `name` is none of `known`.
fn reference(
    document: &Document<'_>,
    line: usize,
    object: &str,
    kind: &str,
    name: &str,
    known: &[&str],
) {
    if !known.contains(&name) {
        let next = did_you_mean(name, known, '"')
            .unwrap_or_else(|| format!("use one of {}, or add it", list(known, '"', ", ")));
        document.fault(
            line,
            object,
            format!("there is no {kind} \"{name}\" in the plan"),
            next,
        );
    }
}

fn sockets(document: &Document<'_>, file: &PlanFile, dir: Option<&Path>) {
    let mut taken: HashMap<PathBuf, &str> = HashMap::new();
    for port in &file.ports {
        let name = port.name.value.as_str();
        let socket = vhost_socket_in(port, dir);
        match taken.get(&socket) {
            // Two ports of one name are a fault already.
            Some(first) if *first == name => {}
            Some(first) => document.fault(
                port.name.line,
                &format!("port \"{name}\""),
                format!(
                    "its socket {} is that of port \"{first}\" too",
                    socket.display()
                ),
                "give each port a socket of its own",
            ),
            None => {
                taken.insert(socket, name);
            }
        }
    }
}

fn pairs(document: &Document<'_>, file: &PlanFile) {
    const OBJECT: &str = "[[switch.pair]]";
    if file.mode == Mode::Xconnect && file.pairs.is_empty() {
        document.fault_of_file(
            "its mode is \"xconnect\" and no ports are paired, so every frame would be dropped",
            "add [[switch.pair]] with a = \"PORT\" and b = \"PORT\", or set mode = \"learn\"",
        );
    }
    if file.mode == Mode::Learn
        && let Some(pair) = file.pairs.first()
    {
        document.fault(
            pair.line,
            OBJECT,
            "ports are paired, but the mode of the switch is \"learn\"",
            "set mode = \"xconnect\" in [switch], or remove the pairs",
        );
    }
    let known: Vec<&str> = file
        .ports
        .iter()
        .map(|port| port.name.value.as_str())
        .collect();
    let mut paired: HashMap<&str, usize> = HashMap::new();
    for At { value: name, line } in file.pairs.iter().flat_map(|pair| [&pair.a, &pair.b]) {
        reference(document, *line, OBJECT, "port", name, &known);
        if let Some(first) = paired.insert(name, *line) {
            document.fault(
                *line,
                OBJECT,
                format!("port \"{name}\" is paired in line {first} already"),
                "pair each port with one other",
            );
        }
    }
}

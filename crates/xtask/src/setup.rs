//! Brings a fresh machine to the point where every layer can run.
//!
//! What is missing is installed where that is possible; where it is not, the
//! layers that need it are skipped with the reason and what to do.
//!
//! A C linker is needed to build this program itself, so on a machine without
//! one `.ci/run` installs it first. It is checked here too, for an xtask that
//! was built elsewhere.

use std::{env, fs, io, path::Path, process::Command, time::Duration};

use crate::{
    command::{self, Ended},
    layers::{self, Layer},
};

/// What a layer may need that is not part of this workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// A program on PATH, from these Debian packages.
    Program {
        name: &'static str,
        packages: &'static [&'static str],
    },
    /// A component of the Rust toolchain, found by this cargo subcommand.
    Component {
        name: &'static str,
        subcommand: &'static str,
    },
}

const LINKER: Need = Need::Program {
    name: "cc",
    packages: &["gcc", "libc6-dev"],
};
/// For libFuzzer, which comes as C++.
const CXX: Need = Need::Program {
    name: "c++",
    packages: &["g++"],
};
const RUSTFMT: Need = Need::Component {
    name: "rustfmt",
    subcommand: "fmt",
};
const CLIPPY: Need = Need::Component {
    name: "clippy",
    subcommand: "clippy",
};

/// What each layer needs.
const fn needs(layer: Layer) -> &'static [Need] {
    match layer {
        Layer::Fmt => &[RUSTFMT],
        Layer::Clippy => &[LINKER, CLIPPY],
        Layer::Tidy => &[],
        Layer::Test | Layer::Loom | Layer::Bench => &[LINKER],
        Layer::Fuzz => &[LINKER, CXX],
    }
}

/// A DPDK guest for end-to-end tests.
const TESTPMD: Need = Need::Program {
    name: "dpdk-testpmd",
    packages: &["dpdk-dev"],
};

/// What some tests of a layer use. They say themselves what they miss, and are
/// counted as skipped; the others run without.
const fn wants(layer: Layer) -> &'static [Need] {
    match layer {
        Layer::Test => &[TESTPMD],
        _ => &[],
    }
}

/// Result of the set-up: which layers cannot run, and why.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tools {
    missing: Vec<(Layer, String)>,
}

impl Tools {
    /// Why `layer` cannot run here; `None` when it can.
    pub(crate) fn missing(&self, layer: Layer) -> Option<&str> {
        self.missing
            .iter()
            .find_map(|(other, reason)| (*other == layer).then_some(reason.as_str()))
    }
}

/// Checks what `layers` need and, if `install`, installs what is missing.
pub(crate) fn prepare(layers: &[Layer], install: bool, limit: Duration) -> Tools {
    println!("=== set-up");
    let mut tools = Tools::default();
    let mut done: Vec<(Need, Result<(), String>)> = Vec::new();
    for &layer in layers {
        for &want in wants(layer) {
            let shown = match provide(want, install, limit) {
                Ok(()) => "present".to_owned(),
                Err(reason) => format!("{reason}; tests that use it are skipped"),
            };
            println!("{}: {shown}", want.name());
        }
        for &need in needs(layer) {
            let known = done.iter().find(|(other, _)| *other == need);
            let result = if let Some((_, result)) = known {
                result.clone()
            } else {
                let result = provide(need, install, limit);
                println!(
                    "{}: {}",
                    need.name(),
                    match &result {
                        Ok(()) => "present",
                        Err(reason) => reason,
                    }
                );
                done.push((need, result.clone()));
                result
            };
            if let Err(reason) = result {
                tools.missing.push((layer, reason));
            }
        }
    }
    tools
}

/// Huge pages of 2 MiB for tests: 128 for each DPDK guest of a test, and those
/// that tests of mappings use; without them such a test is skipped.
const HUGE_PAGE_COUNT: u32 = 768;
const HUGE_PAGES_FILE: &str = "/proc/sys/vm/nr_hugepages";
const FREE_HUGE_PAGES_FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// Where DPDK looks for them.
const HUGE_PAGES_MOUNT: &str = "/dev/hugepages";

/// Huge pages that were set aside for the tests and mounted; both is undone at
/// the end.
#[derive(Debug, Default)]
pub(crate) struct HugePages {
    before: Option<String>,
    mounted: bool,
}

impl HugePages {
    /// Sets huge pages aside as far as too few are free, and mounts them if they
    /// are not, if tests will run and this is root on a kernel that has them.
    pub(crate) fn set_aside(layers: &[Layer], install: bool, limit: Duration) -> Self {
        let mut pages = Self::default();
        if !install || !layers.contains(&Layer::Test) || !is_root() {
            return pages;
        }
        let Ok(before) = fs::read_to_string(HUGE_PAGES_FILE) else {
            return pages;
        };
        let free = fs::read_to_string(FREE_HUGE_PAGES_FILE).unwrap_or_default();
        if let Some(count) = huge_pages_to_ask_for(&before, &free)
            && fs::write(HUGE_PAGES_FILE, count.to_string()).is_ok()
        {
            // The kernel gives as many as it finds, and reports no error.
            let got = fs::read_to_string(HUGE_PAGES_FILE).unwrap_or_default();
            println!("huge pages: {count} asked for, {} there", got.trim());
            pages.before = Some(before);
        }
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        if !has_hugetlbfs(&mounts) {
            let mounted = fs::create_dir_all(HUGE_PAGES_MOUNT)
                .map_err(|error| error.to_string())
                .and_then(|()| {
                    let args = ["-t", "hugetlbfs", "none", HUGE_PAGES_MOUNT];
                    run("mount", &args, limit)
                });
            match mounted {
                Ok(()) => pages.mounted = true,
                Err(error) => println!("{HUGE_PAGES_MOUNT} was not mounted: {error}"),
            }
        }
        pages
    }
}

/// How many huge pages there have to be so that enough are free; `None` if they
/// are, or what the kernel says is not understood.
fn huge_pages_to_ask_for(total: &str, free: &str) -> Option<u32> {
    let total: u32 = total.trim().parse().ok()?;
    let free = free.trim().parse().ok()?;
    let lacking = HUGE_PAGE_COUNT.checked_sub(free)?;
    (lacking > 0).then_some(total + lacking)
}

/// Whether a `/proc/mounts` text has huge pages somewhere.
fn has_hugetlbfs(mounts: &str) -> bool {
    let mut types = mounts.lines().map(|line| line.split(' ').nth(2));
    types.any(|kind| kind == Some("hugetlbfs"))
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = run("umount", &[HUGE_PAGES_MOUNT], Duration::from_secs(10))
        {
            eprintln!("cannot unmount {HUGE_PAGES_MOUNT}: {error}");
        }
        if let Some(before) = &self.before
            && let Err(error) = fs::write(HUGE_PAGES_FILE, before)
        {
            eprintln!("cannot give the huge pages back ({HUGE_PAGES_FILE}): {error}");
        }
    }
}

impl Need {
    const fn name(self) -> &'static str {
        match self {
            Self::Program { name, .. } | Self::Component { name, .. } => name,
        }
    }

    fn is_present(self) -> bool {
        match self {
            Self::Program { name, .. } => on_path(name),
            // A toolchain manager leaves a stand-in for a missing component,
            // so only running it tells.
            Self::Component { subcommand, .. } => layers::cargo([subcommand, "--version"])
                .output()
                .is_ok_and(|output| output.status.success()),
        }
    }

    /// The command that a person would type.
    fn remedy(self) -> String {
        match self {
            Self::Program { packages, .. } => {
                format!("as root: apt-get install {}", packages.join(" "))
            }
            Self::Component { name, .. } => format!("rustup component add {name}"),
        }
    }

    /// Installs it, or says why that cannot be tried or did not work.
    fn install(self, limit: Duration) -> Result<(), String> {
        match self {
            Self::Program { packages, .. } => {
                if !on_path("apt-get") {
                    return Err("there is no apt-get here".to_owned());
                }
                if !is_root() {
                    return Err("only root can install packages".to_owned());
                }
                run("apt-get", &["update"], limit)?;
                let mut args = vec!["install", "--yes", "--no-install-recommends"];
                args.extend(packages);
                run("apt-get", &args, limit)
            }
            Self::Component { name, .. } => {
                if !on_path("rustup") {
                    return Err("the Rust toolchain is not managed by rustup".to_owned());
                }
                run("rustup", &["component", "add", name], limit)
            }
        }
    }
}

/// Makes `need` present; the error says what is missing, why, and what to do.
fn provide(need: Need, install: bool, limit: Duration) -> Result<(), String> {
    if need.is_present() {
        return Ok(());
    }
    let installed = if install {
        need.install(limit)
    } else {
        Err("--no-install was given".to_owned())
    };
    let reason = match installed {
        Ok(()) if need.is_present() => return Ok(()),
        Ok(()) => "it was installed but still cannot be run".to_owned(),
        Err(reason) => reason,
    };
    Err(format!(
        "{} is missing and was not installed ({reason}); {}",
        need.name(),
        need.remedy()
    ))
}

fn run(program: &str, args: &[&str], limit: Duration) -> Result<(), String> {
    println!("$ {program} {}", args.join(" "));
    let mut command = Command::new(program);
    command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
    match command::run(command, limit, &mut io::stdout(), |_| {}) {
        Ok(Ended::Success) => Ok(()),
        Ok(Ended::Failure) => Err(format!("{program} failed, see above")),
        Ok(Ended::TimedOut(limit)) => Err(format!("{program} took over {} s", limit.as_secs())),
        Err(error) => Err(format!("{program} could not be run: {error}")),
    }
}

fn on_path(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

fn is_root() -> bool {
    fs::read_to_string(Path::new("/proc/self/status"))
        .is_ok_and(|status| effective_uid(&status) == Some(0))
}

/// Effective user of a `/proc/PID/status` text: the second number of `Uid:`
/// (proc_pid_status(5)).
fn effective_uid(status: &str) -> Option<u32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    numbers.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_user_is_read() {
        assert_eq!(effective_uid("Name:\tx\nUid:\t1000\t0\t0\t0\n"), Some(0));
        assert_eq!(effective_uid("Name:\tx\n"), None);
    }

    #[test]
    fn huge_pages_of_others_are_not_counted_on() {
        assert_eq!(huge_pages_to_ask_for("0\n", "0\n"), Some(HUGE_PAGE_COUNT));
        let total = huge_pages_to_ask_for("1024\n", "24\n");
        assert_eq!(total, Some(1000 + HUGE_PAGE_COUNT));
        assert_eq!(huge_pages_to_ask_for("4096\n", "1024\n"), None);
        let enough = HUGE_PAGE_COUNT.to_string();
        assert_eq!(huge_pages_to_ask_for(&enough, &enough), None);
        assert_eq!(huge_pages_to_ask_for("", ""), None);
    }

    #[test]
    fn what_tests_only_want_does_not_stop_a_layer() {
        assert!(wants(Layer::Test).contains(&TESTPMD));
        for layer in Layer::chosen(&[]) {
            assert!(!needs(layer).contains(&TESTPMD), "{layer:?}");
        }
    }

    #[test]
    fn a_mount_of_huge_pages_is_found() {
        assert!(has_hugetlbfs("none /dev/hugepages hugetlbfs rw 0 0\n"));
        assert!(!has_hugetlbfs("tmpfs /dev/shm tmpfs rw 0 0\n"));
    }

    #[test]
    fn what_cannot_be_installed_says_what_to_do() {
        let need = Need::Program {
            name: "no-such-program",
            packages: &["some-package"],
        };
        let reason = provide(need, false, Duration::from_secs(1)).unwrap_err();
        assert!(reason.contains("no-such-program is missing"), "{reason}");
        assert!(reason.contains("apt-get install some-package"), "{reason}");
    }
}

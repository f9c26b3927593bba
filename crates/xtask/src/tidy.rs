//! The house rules that no compiler checks, as pure functions over text.

use std::fmt;

use crate::rust_source::{self, Line};

/// Lines that a source file may have: what one can still read as one thing.
const MAX_LINES: usize = 700;
/// Where the reasons for drops are listed.
pub(crate) const DROP_REASONS: &str = "crates/packet/src/drop.rs";
/// The command that people and CI call.
const TEST_COMMAND: &str = "cargo xtask test";

/// The rooms, from the floor upwards. A package may depend only on packages of
/// a lower rung, so two rooms of one rung (switch and virtio) do not know each
/// other. The load generator uses the frontend half of vhost and the ports of
/// nic, hence its own rung.
const RUNGS: [&[&str]; 7] = [
    &["pollux-sys"],
    &["pollux-packet"],
    &["pollux-switch", "pollux-virtio"],
    &["pollux-datapath"],
    &["pollux-nic", "pollux-vhost"],
    &["pollux-loadgen"],
    &["pollux"],
];
/// Packages outside of the ladder: they may know every room, and no room may
/// depend on them except for its tests.
const TOOLS: [&str; 4] = ["pollux-bench", "pollux-fuzz", "pollux-testkit", "xtask"];
const TESTKIT: &str = "pollux-testkit";
/// Who may have testkit as an ordinary dependency.
const TESTKIT_USERS: [&str; 3] = ["pollux-bench", "pollux-fuzz", "xtask"];
/// Packages that may contain unsafe code.
const UNSAFE_ROOMS: [&str; 5] = [
    "pollux-nic",
    "pollux-packet",
    "pollux-sys",
    TESTKIT,
    "pollux-virtio",
];

/// What the top level holds, exactly.
const TOP_LEVEL: [&str; 12] = [
    ".cargo",
    ".ci",
    ".gitignore",
    "ARCHITECTURE.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "bench",
    "configs",
    "crates",
];

/// Macros that mark unfinished work or debugging.
const UNFINISHED_MACROS: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];
/// The same in comments. Spelled in pieces so that this file may name them.
const UNFINISHED_MARKS: [&str; 2] = [concat!("FIX", "ME"), concat!("X", "XX")];

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    path: String,
    /// Counted from 1; `None` when the rule is about the whole file.
    line: Option<usize>,
    /// What is wrong and what to do about it.
    message: String,
}

impl Finding {
    fn new(path: &str, line: Option<usize>, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// A package of the workspace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Path of its Cargo.toml.
    pub(crate) manifest: String,
    pub(crate) manifest_text: String,
    pub(crate) dependencies: Vec<Dependency>,
    /// Root files of its library and programs.
    pub(crate) roots: Vec<String>,
}

/// What a package depends on.
#[derive(Clone, Debug)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// For tests, examples and benches only.
    pub(crate) dev: bool,
}

fn rung(package: &str) -> Option<usize> {
    RUNGS.iter().position(|rung| rung.contains(&package))
}

/// Dependencies between our packages point downwards only.
pub(crate) fn arrows(packages: &[Package]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in packages {
        let is_tool = TOOLS.contains(&package.name.as_str());
        if rung(&package.name).is_none() && !is_tool {
            findings.push(Finding::new(
                &package.manifest,
                None,
                format!(
                    "`{}` has no place; add it to RUNGS in xtask's tidy.rs",
                    package.name
                ),
            ));
            continue;
        }
        for Dependency { name, .. } in package.dependencies.iter().filter(|other| !other.dev) {
            let ours = packages.iter().any(|other| other.name == *name);
            let Some(message) = ours.then(|| arrow_fault(&package.name, name)).flatten() else {
                continue;
            };
            let line = package
                .manifest_text
                .lines()
                .position(|line| line.trim_start().starts_with(name.as_str()))
                .map(|index| index + 1);
            findings.push(Finding::new(&package.manifest, line, message));
        }
    }
    findings
}

/// What is wrong with `from` depending on `to`, both of this workspace.
fn arrow_fault(from: &str, to: &str) -> Option<String> {
    if to == TESTKIT {
        return (!TESTKIT_USERS.contains(&from))
            .then(|| format!("`{to}` is for tests; move it to [dev-dependencies]"));
    }
    if TOOLS.contains(&to) {
        return Some(format!("`{to}` is a tool; no package may depend on it"));
    }
    // A tool knows every room; a package without a place is reported as such.
    let (from_rung, to_rung) = (rung(from)?, rung(to)?);
    (to_rung >= from_rung).then(|| {
        format!(
            "`{from}` must not know `{to}`, which is not below it; move the shared part down \
             or pass it in as a type parameter"
        )
    })
}

/// A crate root forbids unsafe code, unless its package is one that needs it.
pub(crate) fn unsafe_is_forbidden(package: &str, path: &str, source: &str) -> Option<Finding> {
    let forbidden = rust_source::split(source).iter().any(|line| {
        line.code
            .trim_start()
            .starts_with("#![forbid(unsafe_code)]")
    });
    (!forbidden && !UNSAFE_ROOMS.contains(&package)).then(|| {
        Finding::new(
            path,
            Some(1),
            "add #![forbid(unsafe_code)]; unsafe code belongs into sys, packet, virtio or nic",
        )
    })
}

/// Rules for every Rust file: length, unfinished work, `unwrap` in the product.
pub(crate) fn source_file(path: &str, source: &str, test_modules: &[String]) -> Vec<Finding> {
    let lines = rust_source::split(source);
    let mut findings = Vec::new();
    if lines.len() > MAX_LINES {
        findings.push(Finding::new(
            path,
            Some(MAX_LINES + 1),
            format!(
                "{} lines; split the file, {MAX_LINES} are allowed",
                lines.len()
            ),
        ));
    }
    let product = is_product(path, test_modules);
    for (index, line) in lines.iter().enumerate() {
        let mut find =
            |message: String| findings.push(Finding::new(path, Some(index + 1), message));
        for word in UNFINISHED_MACROS {
            if has_word(&line.code, word) {
                find(format!("`{word}` is unfinished work; finish or remove it"));
            }
        }
        for word in UNFINISHED_MARKS {
            if has_word(&line.comment, word) {
                find(format!(
                    "`{word}` is unfinished work; do it, or say what is and why"
                ));
            }
        }
        if product && unwraps(line) {
            find(
                "`unwrap` outside of tests; use expect(\"why it cannot fail\") or an error".into(),
            );
        }
    }
    findings
}

/// Where the modules lie that `path` declares for tests only, as paths without
/// `.rs`. A module written in place gives a path at which there is no file.
pub(crate) fn test_modules(path: &str, source: &str) -> Vec<String> {
    let dir = ["/lib.rs", "/main.rs", "/mod.rs", ".rs"]
        .iter()
        .find_map(|end| path.strip_suffix(end))
        .unwrap_or(path);
    rust_source::modules_under(&rust_source::split(source), &rust_source::TEST_ATTRIBUTES)
        .into_iter()
        .map(|module| format!("{dir}/{module}"))
        .collect()
}

/// Whether the file is part of what runs, as opposed to what tests it.
fn is_product(path: &str, test_modules: &[String]) -> bool {
    let in_test_module = test_modules.iter().any(|module| {
        let rest = path.strip_prefix(module.as_str());
        rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    });
    path.contains("/src/") && !path.starts_with("crates/testkit/") && !in_test_module
}

fn unwraps(line: &Line) -> bool {
    !line.in_test && line.code.contains(".unwrap()")
}

/// Whether `word` occurs in `text`, not as a part of a longer word.
fn has_word(text: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(start, _)| {
        !text[..start].ends_with(part_of_word)
            && !text[start + word.len()..].starts_with(part_of_word)
    })
}

/// The top level holds exactly what it should; `tracked` are paths of files.
pub(crate) fn top_level(tracked: &[String]) -> Vec<Finding> {
    let mut names: Vec<&str> = tracked
        .iter()
        .filter_map(|path| path.split('/').next())
        .collect();
    names.sort_unstable();
    names.dedup();
    let extra = names
        .iter()
        .filter(|name| !TOP_LEVEL.contains(name))
        .map(|name| {
            let message =
                "does not belong to the top level; move it into a room (crates, bench, …)";
            Finding::new(name, None, message)
        });
    let absent = TOP_LEVEL
        .iter()
        .filter(|name| !names.contains(name))
        .map(|name| {
            Finding::new(
                name,
                None,
                "is missing from the top level; write it and add it to git",
            )
        });
    extra.chain(absent).collect()
}

/// The README names the command that runs the tests, and CI runs that command.
pub(crate) fn entry_points(readme: &str, ci_run: &str) -> Vec<Finding> {
    [("README.md", readme), (".ci/run", ci_run)]
        .into_iter()
        .filter(|(_, text)| !text.contains(TEST_COMMAND))
        .map(|(path, _)| Finding::new(path, None, format!("does not name `{TEST_COMMAND}`")))
        .collect()
}

/// Every reason for a drop is explained in the documents. The list is the one
/// in `drop.rs`, an entry a line: `Variant = "name", …`.
pub(crate) fn drop_reasons(path: &str, source: &str, documents: &str) -> Vec<Finding> {
    source
        .lines()
        .enumerate()
        .filter_map(|(index, line)| {
            let (variant, rest) = line.trim().split_once(" = \"")?;
            let (name, _) = rest.split_once("\",")?;
            let is_entry = variant.chars().all(char::is_alphanumeric);
            (is_entry && !documents.contains(name)).then(|| {
                let message =
                    format!("drop reason `{name}` is in neither README.md nor ARCHITECTURE.md");
                Finding::new(path, Some(index + 1), message)
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[(&str, bool)]) -> Package {
        Package {
            name: name.to_owned(),
            manifest: format!("{name}.toml"),
            manifest_text: dependencies
                .iter()
                .map(|(name, _)| format!("{name} = 1\n"))
                .collect(),
            dependencies: dependencies
                .iter()
                .map(|&(name, dev)| Dependency {
                    name: name.to_owned(),
                    dev,
                })
                .collect(),
            roots: Vec::new(),
        }
    }

    fn arrow_messages(from: &str, dependencies: &[(&str, bool)]) -> Vec<String> {
        let mut packages = vec![package(from, dependencies)];
        packages.extend(dependencies.iter().map(|(name, _)| package(name, &[])));
        arrows(&packages).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn downward_arrows_are_allowed() {
        let down = [
            ("pollux-switch", false),
            ("pollux-virtio", false),
            ("pollux-sys", false),
        ];
        assert!(arrow_messages("pollux-datapath", &down).is_empty());
        assert!(arrow_messages("pollux-loadgen", &[("pollux-vhost", false)]).is_empty());
        assert!(arrow_messages("pollux-bench", &[("pollux", false)]).is_empty());
    }

    #[test]
    fn upward_and_sideways_arrows_are_found() {
        let messages = arrow_messages(
            "pollux-switch",
            &[("pollux-packet", false), ("pollux-virtio", false)],
        );
        assert_eq!(messages.len(), 1);
        assert!(
            messages[0].starts_with("pollux-switch.toml:2: "),
            "{}",
            messages[0]
        );
        assert_eq!(
            arrow_messages("pollux-sys", &[("pollux-packet", false)]).len(),
            1
        );
    }

    #[test]
    fn dev_dependencies_may_point_anywhere() {
        let dev = [("pollux-datapath", true), (TESTKIT, true)];
        assert!(arrow_messages("pollux-sys", &dev).is_empty());
    }

    #[test]
    fn tools_are_not_for_the_product() {
        assert_eq!(arrow_messages("pollux-vhost", &[(TESTKIT, false)]).len(), 1);
        assert!(arrow_messages("pollux-bench", &[(TESTKIT, false)]).is_empty());
        assert_eq!(
            arrow_messages("pollux-testkit", &[("pollux-bench", false)]).len(),
            1
        );
    }

    #[test]
    fn a_new_package_needs_a_place() {
        assert_eq!(arrow_messages("pollux-new", &[]).len(), 1);
    }

    #[test]
    fn unsafe_rooms_are_the_exception() {
        let forbids = "//! Doc.\n#![forbid(unsafe_code)]\n";
        assert!(unsafe_is_forbidden("pollux-switch", "lib.rs", forbids).is_none());
        assert!(unsafe_is_forbidden("pollux-sys", "lib.rs", "").is_none());
        let in_comment = "// #![forbid(unsafe_code)]\n";
        assert!(unsafe_is_forbidden("pollux-switch", "lib.rs", in_comment).is_some());
    }

    fn found_lines(path: &str, source: &str) -> Vec<usize> {
        source_file(path, source, &[])
            .iter()
            .filter_map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn long_files_are_found() {
        assert!(found_lines("a.rs", &"x;\n".repeat(MAX_LINES)).is_empty());
        assert_eq!(
            found_lines("a.rs", &"x;\n".repeat(MAX_LINES + 1)),
            [MAX_LINES + 1]
        );
    }

    #[test]
    fn unfinished_work_is_found_in_code_and_comments_only() {
        assert_eq!(
            found_lines("a.rs", "fn f() {\n    todo!()\n}\nlet x = dbg!(x);"),
            [2, 4]
        );
        assert!(found_lines("a.rs", "let s = \"todo!\"; // todo!\nmy_todo!();").is_empty());
        let marks: String = UNFINISHED_MARKS
            .iter()
            .map(|mark| format!("// {mark}: x\n"))
            .collect();
        assert_eq!(found_lines("a.rs", &marks), [1, 2]);
        assert!(found_lines("a.rs", "// mkstemp template .XXXXXX\n").is_empty());
    }

    #[test]
    fn unwrap_is_for_tests() {
        let source =
            "f.unwrap();\n#[cfg(test)]\nmod tests {\n    f.unwrap();\n}\n/// `.unwrap()`\n";
        assert_eq!(found_lines("crates/sys/src/lib.rs", source), [1]);
        assert!(found_lines("crates/sys/tests/model.rs", source).is_empty());
        assert!(found_lines("crates/testkit/src/lib.rs", source).is_empty());
    }

    #[test]
    fn test_modules_in_their_own_file_are_tests() {
        let declares = "#[cfg(all(test, loom))]\nmod model;\nmod entry;\n";
        let modules = test_modules("crates/sys/src/registry.rs", declares);
        assert_eq!(modules, ["crates/sys/src/registry/model"]);
        assert_eq!(
            test_modules("crates/sys/src/lib.rs", declares),
            ["crates/sys/src/model"]
        );
        let found = |path| source_file(path, "x.unwrap();", &modules).len();
        assert_eq!(found("crates/sys/src/registry/model.rs"), 0);
        assert_eq!(found("crates/sys/src/registry/model/world.rs"), 0);
        assert_eq!(found("crates/sys/src/registry/models.rs"), 1);
    }

    #[test]
    fn the_top_level_is_exact() {
        let mut tracked: Vec<String> = TOP_LEVEL.iter().map(|name| format!("{name}/x")).collect();
        assert!(top_level(&tracked).is_empty());
        tracked[0] = "notes.txt".to_owned();
        let paths: Vec<String> = top_level(&tracked).into_iter().map(|f| f.path).collect();
        assert_eq!(paths, ["notes.txt", TOP_LEVEL[0]]);
    }

    #[test]
    fn entry_points_name_the_command() {
        assert!(entry_points(TEST_COMMAND, TEST_COMMAND).is_empty());
        assert_eq!(entry_points("", TEST_COMMAND).len(), 1);
    }

    #[test]
    fn undocumented_drop_reasons_are_found() {
        let list =
            "    Runt = \"runt\", Rx,\n    PortDown = \"port-down\", Tx,\n  let x = \"y\", z";
        let findings = drop_reasons("drop.rs", list, "| runt | too short |");
        assert_eq!(findings.len(), 1);
        assert!(
            findings[0]
                .to_string()
                .starts_with("drop.rs:2: drop reason `port-down`")
        );
    }
}

//! What the checks and layers need to know about the checkout: the packages,
//! as cargo describes them, and the files, as git tracks them.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::{
    layers::cargo,
    rust_source,
    tidy::{self, Dependency, Finding, Package},
};

/// The workspace in the current directory.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Where cargo puts artefacts.
    pub(crate) target_dir: PathBuf,
    packages: Vec<Package>,
}

impl Workspace {
    /// Asks cargo for the packages of the workspace in the current directory.
    ///
    /// # Errors
    /// Cargo fails (a manifest is wrong) or answers with something unexpected.
    pub(crate) fn load() -> anyhow::Result<Self> {
        let output = cargo(["metadata", "--no-deps", "--format-version", "1"])
            .output()
            .context("cannot run cargo metadata")?;
        ensure!(
            output.status.success(),
            "cargo metadata failed; mend the manifest that it names:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metadata: Value =
            serde_json::from_slice(&output.stdout).context("cargo metadata is not JSON")?;
        let root = PathBuf::from(text(&metadata["workspace_root"])?);
        let packages = list(&metadata["packages"])?
            .iter()
            .map(|package| read_package(package, &root))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            target_dir: text(&metadata["target_directory"])?.into(),
            packages,
        })
    }

    /// Names of the packages that have a `tests/PREFIX*.rs`.
    pub(crate) fn packages_with_tests(&self, prefix: &str) -> Vec<&str> {
        self.packages
            .iter()
            .filter(|package| {
                let tests = Path::new(&package.manifest).with_file_name("tests");
                fs::read_dir(tests)
                    .into_iter()
                    .flatten()
                    .flatten()
                    .any(|entry| {
                        let name = entry.file_name();
                        let name = name.to_string_lossy();
                        name.starts_with(prefix) && name.ends_with(".rs")
                    })
            })
            .map(|package| package.name.as_str())
            .collect()
    }

    /// Packages that have modules of loom models in `src`, with their names.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn loom_modules(&self) -> anyhow::Result<Vec<(&str, Vec<String>)>> {
        let files = rust_files()?;
        let mut found = Vec::new();
        for package in &self.packages {
            let src = package.manifest.replace("Cargo.toml", "src/");
            let mut modules = Vec::new();
            for path in files.iter().filter(|path| path.starts_with(&src)) {
                let lines = rust_source::split(&read(path)?);
                modules.extend(rust_source::modules_under(
                    &lines,
                    &rust_source::LOOM_ATTRIBUTES,
                ));
            }
            if !modules.is_empty() {
                found.push((package.name.as_str(), modules));
            }
        }
        Ok(found)
    }

    /// Runs every tidy check.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn tidy(&self) -> anyhow::Result<Vec<Finding>> {
        let mut findings = tidy::arrows(&self.packages);
        for package in &self.packages {
            for root in &package.roots {
                findings.extend(tidy::unsafe_is_forbidden(&package.name, root, &read(root)?));
            }
        }
        let sources = rust_files()?
            .into_iter()
            .map(|path| Ok((read(&path)?, path)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let test_modules: Vec<String> = sources
            .iter()
            .flat_map(|(source, path)| tidy::test_modules(path, source))
            .collect();
        for (source, path) in &sources {
            findings.extend(tidy::source_file(path, source, &test_modules));
        }
        if let Some(tracked) = git_files(&["--cached"]) {
            findings.extend(tidy::top_level(&tracked));
        } else {
            eprintln!("tidy: no git checkout, or no git: the top level is not checked");
        }
        let readme = read_if_there("README.md")?;
        let architecture = read_if_there("ARCHITECTURE.md")?;
        findings.extend(tidy::entry_points(&readme, &read_if_there(".ci/run")?));
        findings.extend(tidy::drop_reasons(
            tidy::DROP_REASONS,
            &read_if_there(tidy::DROP_REASONS)?,
            &(readme + &architecture),
        ));
        Ok(findings)
    }
}

fn read_package(package: &Value, root: &Path) -> anyhow::Result<Package> {
    let manifest = relative(text(&package["manifest_path"])?, root);
    let mut roots = Vec::new();
    for target in list(&package["targets"])? {
        let kinds = list(&target["kind"])?;
        if kinds.iter().any(|kind| kind == "lib" || kind == "bin") {
            roots.push(relative(text(&target["src_path"])?, root));
        }
    }
    let dependencies = list(&package["dependencies"])?
        .iter()
        .map(|dependency| {
            Ok(Dependency {
                name: text(&dependency["name"])?.to_owned(),
                dev: dependency["kind"] == "dev",
            })
        })
        .collect::<anyhow::Result<_>>()?;
    Ok(Package {
        name: text(&package["name"])?.to_owned(),
        manifest_text: read(&manifest)?,
        manifest,
        dependencies,
        roots,
    })
}

fn text(value: &Value) -> anyhow::Result<&str> {
    value
        .as_str()
        .context("cargo metadata has no text where it should")
}

fn list(value: &Value) -> anyhow::Result<&[Value]> {
    value
        .as_array()
        .map(Vec::as_slice)
        .context("cargo metadata has no list where it should")
}

fn relative(path: &str, root: &Path) -> String {
    let path = Path::new(path);
    path.strip_prefix(root)
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}

fn read(path: &str) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {path}"))
}

/// The text of a file, empty when it does not exist: the check that needs the
/// text says then what is missing from it.
fn read_if_there(path: &str) -> anyhow::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other.with_context(|| format!("cannot read {path}")),
    }
}

/// Files that git lists, or `None` without git or outside of a git checkout.
fn git_files(which: &[&str]) -> Option<Vec<String>> {
    // A checkout may belong to another user than the one who tests it (CI in
    // a container); nothing here trusts its configuration for anything.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .args(which)
        .output()
        .ok()?;
    let listing = String::from_utf8_lossy(&output.stdout);
    let files: Vec<String> = listing
        .split('\0')
        .filter(|path| !path.is_empty())
        .map(str::to_owned)
        .collect();
    (output.status.success() && !files.is_empty()).then_some(files)
}

/// Every Rust file that is tracked or could be, new ones included.
fn rust_files() -> anyhow::Result<Vec<String>> {
    let mut files = match git_files(&["--cached", "--others", "--exclude-standard"]) {
        Some(files) => files,
        None => {
            let mut files = Vec::new();
            for room in ["bench", "crates"] {
                walk(Path::new(room), &mut files)?;
            }
            files
        }
    };
    // Git still lists a file that was removed but not committed.
    files.retain(|path| path.ends_with(".rs") && Path::new(path).is_file());
    files.sort_unstable();
    files.dedup();
    Ok(files)
}

fn walk(dir: &Path, files: &mut Vec<String>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), files)?;
        } else {
            files.push(entry.path().to_string_lossy().into_owned());
        }
    }
    Ok(())
}

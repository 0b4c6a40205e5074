//! The dependency policy: where crates come from, their licences, and the unwanted ones. It uses cargo alone, so it holds on every machine.
//! Advisories are not looked up, because they need a database from the network.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};
use cargo_metadata::{Metadata, MetadataCommand, Package, PackageId};
use spdx::{Expression, ParseMode};

use crate::process::{Signals, output};
use crate::{Outcome, root, say};

const ACCEPTED: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

const EXCEPTION: &str = "LLVM-exception";

/// Each crate that may not be used, and why.
const BANNED: [(&str, &str); 8] = [
    ("async-rdma", "GPL-3.0"),
    ("async-std", "no async runtime in a data path"),
    ("bindgen", "needs libclang to build"),
    ("cmake", "needs cmake to build"),
    ("crc32c", "five times slower than crc-fast at 4 KiB"),
    (
        "openssl-sys",
        "needs the system's OpenSSL, so a build would depend on it",
    ),
    ("tokio", "no async runtime in a data path"),
    ("userfaultfd", "needs libclang to build"),
];

pub(crate) fn run(signals: &Signals) -> Result<Outcome> {
    let lock = fs::read_to_string(root().join("Cargo.lock")).context("Cargo.lock")?;
    let mut complaints = foreign_sources(&lock);
    let mut cargo = MetadataCommand::new();
    cargo.current_dir(root());
    cargo.other_options(["--locked", "--filter-platform", &host(signals)?].map(str::to_owned));
    let metadata = MetadataCommand::parse(stdout(&cargo.cargo_command(), signals)?)?;
    let used = used(&metadata)?;
    for package in &used {
        complaints.extend(complaint(package));
    }
    for complaint in &complaints {
        eprintln!("policy: {complaint}");
    }
    if complaints.is_empty() {
        let count = used.len();
        say(format_args!(
            "policy: {count} resolved crates, all from crates.io or here, licences accepted"
        ))?;
    }
    Ok(Outcome::of(complaints.is_empty()))
}

/// Returns a complaint for each source in Cargo.lock that is not crates.io. Crates of this workspace have none there.
fn foreign_sources(lock: &str) -> Vec<String> {
    let sources: BTreeSet<&str> = lock
        .lines()
        .filter_map(|line| line.strip_prefix("source = \"")?.strip_suffix('"'))
        .collect();
    sources
        .into_iter()
        .filter(|source| !(source.starts_with("registry+") && source.ends_with("/crates.io-index")))
        .map(|source| format!("Cargo.lock takes a crate from {source}, which is not crates.io"))
        .collect()
}

/// Returns the target triple of this machine.
fn host(signals: &Signals) -> Result<String> {
    let said = stdout(Command::new("rustc").arg("-vV"), signals)?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

/// Returns the standard output of a command, which has to end well.
fn stdout(command: &Command, signals: &Signals) -> Result<String> {
    let output = output(command, signals)?;
    if !output.end.success() {
        let program = command.get_program().display();
        bail!("{program}: {} ({})", output.stderr.trim(), output.end);
    }
    Ok(output.stdout)
}

/// Returns the crates that cargo resolves for a build or a test on this machine.
fn used(metadata: &Metadata) -> Result<Vec<&Package>> {
    let graph = metadata
        .resolve
        .as_ref()
        .context("cargo metadata resolved nothing")?;
    let mut used: BTreeSet<&PackageId> = BTreeSet::new();
    let mut open: Vec<&PackageId> = metadata.workspace_members.iter().collect();
    while let Some(id) = open.pop() {
        if used.insert(id) {
            let node = graph.nodes.iter().find(|node| node.id == *id);
            open.extend(
                &node
                    .context("cargo metadata names a crate that it does not have")?
                    .dependencies,
            );
        }
    }
    Ok(metadata
        .packages
        .iter()
        .filter(|package| used.contains(&package.id))
        .collect())
}

fn complaint(package: &Package) -> Option<String> {
    let name = &package.name;
    if let Some((_, why)) = BANNED.iter().find(|(banned, _)| name.as_str() == *banned) {
        return Some(format!("{name} is banned: {why} (cargo tree -i {name})"));
    }
    let licence = package.license.as_deref().unwrap_or("");
    let version = &package.version;
    (!accepted(licence))
        .then(|| format!("{name} v{version} has the licence \"{licence}\", which is not accepted"))
}

/// Returns whether the accepted licences satisfy an SPDX expression. The only accepted exception adds permissions to a licence.
fn accepted(expression: &str) -> bool {
    Expression::parse_mode(expression, ParseMode::LAX).is_ok_and(|expression| {
        expression.evaluate(|licence| {
            let known = licence.license.id();
            let exception = licence.addition.as_ref();
            known.is_some_and(|id| ACCEPTED.contains(&id.name))
                && exception.is_none_or(|exception| exception.id().is_some_and(|id| id.name == EXCEPTION))
        })
    })
}

#[cfg(test)]
#[allow(non_snake_case, reason = "tests are named function__case")]
mod tests {
    use super::*;

    #[test]
    fn accepted__evaluates_expressions() {
        for expression in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0-only OR MIT",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0-only",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "GPL-2.0-only AND MIT OR ISC",
        ] {
            assert!(accepted(expression), "{expression}");
        }
        for expression in [
            "",
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "(MIT OR ISC) AND MPL-2.0",
            "MIT OR",
            "LicenseRef-own",
            "Apache-2.0 WITH Classpath-exception-2.0",
            "Apache-2.0 WITH AdditionRef-own",
        ] {
            assert!(!accepted(expression), "{expression}");
        }
    }

    #[test]
    fn foreign_sources__are_those_besides_crates_io() {
        let lock = "[[package]]\nname = \"here\"\n\n[[package]]\nname = \"a\"\n\
            source = \"registry+https://github.com/rust-lang/crates.io-index\"\n";
        assert!(foreign_sources(lock).is_empty());
        let lock = format!("{lock}[[package]]\nname = \"b\"\nsource = \"git+https://example.com/b#1\"\n");
        assert_eq!(
            foreign_sources(&lock),
            ["Cargo.lock takes a crate from git+https://example.com/b#1, which is not crates.io"]
        );
    }
}

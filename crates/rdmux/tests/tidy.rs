//! Lint where the compiler cannot help: the direction of crates, the files with unsafe code, dead files, stray prints.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Crates of this workspace that each crate may use, as ARCHITECTURE.md draws them.
const MAY_USE: [(&str, &[&str]); 26] = [
    ("crates/wire", &[]),
    ("crates/accel", &["wire"]),
    ("crates/capture", &["wire"]),
    ("crates/rnic", &["wire"]),
    ("crates/verbs", &["rnic", "wire"]),
    ("crates/memory", &["rnic", "verbs"]),
    ("crates/shm", &["memory", "rnic", "verbs"]),
    (
        "crates/soft",
        &["capture", "memory", "rnic", "shm", "verbs", "wire"],
    ),
    ("crates/hw", &["memory", "rnic", "verbs", "wire"]),
    ("crates/key", &[]),
    ("crates/runtime", &["memory", "verbs"]),
    ("crates/drive", &["memory", "verbs", "wire"]),
    (
        "crates/share",
        &["key", "memory", "rnic", "runtime", "shm", "verbs", "wire"],
    ),
    ("crates/push", &["key", "memory", "runtime", "verbs", "wire"]),
    ("crates/dsm", &["key", "memory", "runtime", "verbs", "wire"]),
    ("crates/log", &["push", "runtime", "verbs"]),
    (
        "crates/nvmf",
        &["accel", "drive", "key", "memory", "runtime", "verbs", "wire"],
    ),
    (
        "crates/sim",
        &[
            "drive", "dsm", "log", "memory", "nvmf", "push", "rnic", "runtime", "wire",
        ],
    ),
    (
        "crates/rdmux",
        &[
            "accel", "capture", "drive", "dsm", "hw", "key", "log", "memory", "nvmf", "push", "runtime",
            "share", "sim", "soft", "verbs", "wire",
        ],
    ),
    ("crates/lab-peer", &["hw", "memory", "soft", "verbs", "wire"]),
    (
        "crates/bench",
        &[
            "accel", "drive", "dsm", "memory", "nvmf", "runtime", "share", "sim", "soft", "verbs", "wire",
        ],
    ),
    ("capi/dsm", &["dsm", "hw", "key", "soft"]),
    (
        "capi/ibverbs",
        &["hw", "memory", "share", "soft", "verbs", "wire"],
    ),
    ("capi/sysfs", &[]),
    ("xtask", &[]),
    ("examples", &["dsm", "hw", "memory", "push", "soft", "verbs"]),
];

/// Providers of devices, and the programs, which alone choose among them.
const PROVIDERS: [&str; 3] = ["soft", "hw", "share"];
const PROGRAMS: [&str; 6] = [
    "crates/rdmux",
    "crates/lab-peer",
    "crates/bench",
    "capi/dsm",
    "capi/ibverbs",
    "examples",
];

/// Files that may hold unsafe code, besides those of `capi`, which are the C interface.
const UNSAFE_FILES: [&str; 34] = [
    "crates/drive/src/dma.rs",
    "crates/drive/src/passthru.rs",
    "crates/drive/src/vfio.rs",
    "crates/dsm/src/memory/userfault.rs",
    "crates/dsm/src/signal.rs",
    "crates/hw/src/cma.rs",
    "crates/hw/src/library.rs",
    "crates/hw/src/objects.rs",
    "crates/hw/src/objects/cq.rs",
    "crates/hw/src/objects/qp.rs",
    "crates/hw/src/objects/region.rs",
    "crates/hw/src/objects/srq.rs",
    "crates/memory/src/application.rs",
    "crates/memory/src/convert.rs",
    "crates/memory/src/convert/fork.rs",
    "crates/memory/src/convert/tests.rs",
    "crates/memory/src/convert/userfault.rs",
    "crates/memory/src/lease.rs",
    "crates/memory/src/mapping.rs",
    "crates/memory/src/mapping/placed.rs",
    "crates/memory/src/persist.rs",
    "crates/nvmf/src/tls/session.rs",
    "crates/runtime/src/file_ring.rs",
    "crates/runtime/src/pages.rs",
    "crates/shm/src/gate.rs",
    "crates/shm/src/grant.rs",
    "crates/soft/src/engine/lock.rs",
    "crates/soft/src/engine/media/ring.rs",
    "crates/soft/src/shm/link/tests.rs",
    "crates/soft/src/udp.rs",
    "crates/verbs/src/abi.rs",
    "crates/verbs/src/interface.rs",
    "crates/verbs/src/provider/user.rs",
    "crates/verbs/src/thread.rs",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// Returns every Rust file below the crates' `src`, as a path from the root, with its text.
fn sources() -> Vec<(String, String)> {
    files_in("src")
}

/// Returns the same below another folder that each crate may have.
fn files_in(folder: &str) -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = MAY_USE
        .iter()
        .map(|(name, _)| root.join(name).join(folder))
        .filter(|folder| folder.is_dir())
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                found.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(found.len() > 30, "the sources are where this test looks");
    found
}

/// Returns the line up to its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or("")
}

#[test]
fn crates__use_only_what_is_below_them() {
    for (name, may) in MAY_USE {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or("");
        // Tests may use more: they stand above everything.
        let dependencies = dependencies.split("[dev-dependencies]").next().unwrap_or("");
        for line in dependencies.lines() {
            if let Some(used) = line
                .strip_prefix("rdmux-")
                .map(|l| l.split(['.', ' ', '=']).next().unwrap_or(""))
            {
                assert!(
                    may.contains(&used),
                    "crate {name} uses {used}, which is not below it"
                );
            }
        }
    }
}

/// Checks the table itself, which says that no provider uses another one, and that neither the vocabulary nor a service uses any.
#[test]
fn providers__are_used_by_programs_alone() {
    for (name, may) in MAY_USE {
        let provider = may.iter().find(|used| PROVIDERS.contains(used));
        assert!(
            provider.is_none() || PROGRAMS.contains(&name),
            "crate {name} may use the provider {provider:?}"
        );
    }
}

/// Checks that the table has every crate of the workspace.
#[test]
fn crates__are_all_in_the_table() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = "));
    let members: BTreeSet<&str> = members.unwrap().split('"').skip(1).step_by(2).collect();
    let table: BTreeSet<&str> = MAY_USE.iter().map(|(name, _)| *name).collect();
    assert_eq!(members, table);
}

#[test]
fn unsafe_code__stands_only_in_the_files_that_are_named() {
    let with_unsafe: BTreeSet<String> = sources()
        .into_iter()
        .filter(|(name, _)| !name.starts_with("capi/"))
        .filter(|(_, text)| {
            text.lines().any(|line| {
                let code = code(line);
                ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"]
                    .iter()
                    .any(|word| code.contains(word))
            })
        })
        .map(|(name, _)| name)
        .collect();
    let allowed: BTreeSet<String> = UNSAFE_FILES.iter().map(|f| (*f).to_owned()).collect();
    assert_eq!(with_unsafe, allowed);
}

#[test]
fn libraries__print_nothing() {
    for (name, text) in sources() {
        // A program that is linked with the C libraries has no other way to learn why a device cannot be opened.
        if name.starts_with("crates/rdmux/")
            || name.starts_with("capi/")
            || name.starts_with("xtask/")
            || name.ends_with("tests.rs")
            || name.contains("/tests/")
        {
            continue;
        }
        let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or("");
        for word in ["println!", "eprintln!", "print!(", "dbg!"] {
            let stray = text.lines().map(code).find(|line| line.contains(word));
            assert!(stray.is_none(), "{name}: {word} in a library: {stray:?}");
        }
    }
}

#[test]
fn files__are_all_part_of_a_crate() {
    let sources = sources();
    for (name, _) in &sources {
        let path = Path::new(name);
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if ["lib", "main", "mod"].contains(&stem) {
            continue;
        }
        // `a/b.rs` is declared in `a.rs`, `a/mod.rs`, or the crate's root when `a` is `src`.
        let folder = path.parent().unwrap();
        let declaration = format!("mod {stem};");
        let parents = [
            folder.join("mod.rs"),
            folder.join("lib.rs"),
            folder.join("main.rs"),
            folder.with_extension("rs"),
        ];
        let declared = sources
            .iter()
            .filter(|(other, _)| parents.iter().any(|p| p == Path::new(other)))
            .any(|(_, text)| text.contains(&declaration));
        assert!(declared, "{name} belongs to no module");
    }
}

#[test]
fn words__of_unfinished_work_are_nowhere() {
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("unimpl", "emented!"),
        concat!("to", "do!("),
    ];
    for (name, text) in sources() {
        for word in words {
            assert!(!text.contains(word), "{name} says {word}");
        }
    }
}

/// Checks that tests skip only by `crates/skip.rs`, which `./test` counts.
#[test]
fn tests__skip_in_one_way() {
    for (name, text) in sources().into_iter().chain(files_in("tests")) {
        for word in [concat!("#[ign", "ore"), concat!("ln!(\"skip", "ped")] {
            assert!(
                !text.contains(word),
                "{name} says {word}: crates/skip.rs is the way"
            );
        }
    }
}

#[test]
fn docs__each_page_is_in_the_book_once() {
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let mut listed: Vec<&str> = summary
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .collect();
    listed.push("SUMMARY.md");
    listed.sort_unstable();
    let folder = fs::read_dir(root().join("docs")).unwrap();
    let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut pages: Vec<String> = names.filter(|name| name.ends_with(".md")).collect();
    pages.sort_unstable();
    assert_eq!(listed, pages);
}

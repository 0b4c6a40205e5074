//! The library as programs in C use it: its header, its pkg-config file, its man pages, and programs on one to three nodes.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rdmux_dsm::{Cluster, FaultMode};
use tempfile::TempDir;

#[path = "../../../crates/skip.rs"]
mod skip;

const MODES: [FaultMode; 3] = [FaultMode::Thread, FaultMode::Inline, FaultMode::Mprotect];

/// A busy host does not decide the outcome.
const LONG: Duration = Duration::from_secs(120);

/// Lease of the nodes of which one is killed.
const LEASE: Duration = Duration::from_secs(8);

/// This crate's folder.
fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the library of this profile. `cargo test` makes none, since no test can be linked to it; `cargo build` has to run before.
fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap();
    let library = profile.join("librdmux_dsm_c.so");
    let made = |file: &Path| fs::metadata(file).and_then(|meta| meta.modified());
    let build = format!("cargo build -p {} makes it", env!("CARGO_PKG_NAME"));
    let built = made(&library).unwrap_or_else(|error| panic!("{}: {error}: {build}", library.display()));
    // Beside it, Cargo lists its sources: "library: source source".
    let sources = fs::read_to_string(library.with_extension("d")).unwrap();
    for source in sources.lines().flat_map(|line| line.split(' ').skip(1)) {
        let newer = made(Path::new(source)).is_ok_and(|changed| changed > built);
        assert!(!newer, "{} is older than {source}: {build}", library.display());
    }
    library
}

fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// A prefix as `./install` makes it, and programs that are linked with its library.
struct Prefix(TempDir);

impl Prefix {
    /// Returns none, and says so, where programs cannot be compiled.
    fn new() -> Option<Prefix> {
        if !installed("cc") {
            skip::skip("there is no cc");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("lib");
        fs::create_dir_all(lib.join("pkgconfig")).unwrap();
        symlink(library(), lib.join("librdmux-dsm.so.0")).unwrap();
        symlink("librdmux-dsm.so.0", lib.join("librdmux-dsm.so")).unwrap();
        symlink(here().join("include"), folder.path().join("include")).unwrap();
        let template = fs::read_to_string(here().join("rdmux-dsm.pc.in")).unwrap();
        let text = template
            .replace("@prefix@", folder.path().to_str().unwrap())
            .replace("@version@", env!("CARGO_PKG_VERSION"))
            .replace("@rpath@", "-Wl,-rpath,${libdir} ");
        assert!(!text.contains('@'), "{text}");
        fs::write(lib.join("pkgconfig/rdmux-dsm.pc"), text).unwrap();
        Some(Prefix(folder))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the options of the compiler, which pkg-config gives where it is installed.
    fn options(&self) -> Vec<String> {
        let lib = self.path("lib").to_str().unwrap().to_owned();
        let include = self.path("include").to_str().unwrap().to_owned();
        vec![
            format!("-I{include}"),
            format!("-L{lib}"),
            format!("-Wl,-rpath,{lib}"),
            "-lrdmux-dsm".to_owned(),
        ]
    }

    /// Compiles a program without a warning.
    fn compile(&self, source: &Path) -> PathBuf {
        let program = self.path(source.file_stem().unwrap().to_str().unwrap());
        let output = Command::new("cc")
            .args([
                "-std=gnu11",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-O1",
                "-pthread",
                "-o",
            ])
            .args([&program, source])
            .args(self.options())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:#?}");
        program
    }
}

/// Returns a source of the tests.
fn test_source(name: &str) -> PathBuf {
    here().join("tests").join(name)
}

/// Returns a source of the examples.
fn example(name: &str) -> PathBuf {
    here().join("../../examples").join(name)
}

/// Returns an address of the loopback interface for one cluster: the processes that share an address are limited.
fn address() -> IpAddr {
    static CLUSTERS: AtomicU8 = AtomicU8::new(0);
    let cluster = CLUSTERS.fetch_add(1, Ordering::Relaxed);
    let pid = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | cluster & 0x3f, pid[2], pid[3]).into()
}

/// A node. Dropping it kills the process.
struct Node {
    child: Child,
    output: PathBuf,
}

impl Node {
    fn printed(&self) -> String {
        let mut text = String::new();
        File::open(&self.output)
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        text
    }

    /// Waits until it has printed some words.
    fn wait_for(&self, words: &str) {
        let deadline = Instant::now() + LONG;
        while !self.printed().contains(words) {
            assert!(Instant::now() < deadline, "{words}: {}", self.printed());
            // A look at the condition again and again: a file does not report that it has grown.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end. Returns whether it has succeeded, and what it has printed.
    fn wait(mut self) -> (bool, String) {
        (self.child.wait().unwrap().success(), self.printed())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a program as the nodes of a cluster, as `rdmux dsm run` does.
fn start(program: &Path, nodes: u32, mode: FaultMode, lease: Duration, arguments: &[&str]) -> Vec<Node> {
    rdmux_soft::register();
    let clusters = Cluster::on_this_host(address(), nodes).unwrap();
    let start = |mut cluster: Cluster| {
        cluster.lease = lease;
        let output = program.with_extension(format!("{mode}-{nodes}-{}", cluster.own().number()));
        let file = File::create(&output).unwrap();
        let child = Command::new(program)
            .args(arguments)
            .envs(cluster.environment())
            .env(FaultMode::VARIABLE, mode.to_string())
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        Node { child, output }
    };
    clusters.into_iter().map(start).collect()
}

/// Runs a program on some nodes, which must succeed. Returns what each has printed.
fn run(program: &Path, nodes: u32, mode: FaultMode, arguments: &[&str]) -> Vec<String> {
    let nodes = start(program, nodes, mode, LONG, arguments);
    let ended: Vec<(bool, String)> = nodes.into_iter().map(Node::wait).collect();
    assert!(
        ended.iter().all(|(succeeded, _)| *succeeded),
        "{mode}: {ended:#?}"
    );
    ended.into_iter().map(|(_, text)| text).collect()
}

/// Returns the word after another one in a line.
fn word_after<'a>(line: &'a str, word: &str) -> &'a str {
    let (_, rest) = line.split_once(word).unwrap_or_else(|| panic!("{word}: {line}"));
    rest.split([' ', ',', ':']).find(|it| !it.is_empty()).unwrap()
}

/// Returns the word before some words in a line.
fn word_before<'a>(line: &'a str, words: &str) -> &'a str {
    let (begin, _) = line
        .split_once(words)
        .unwrap_or_else(|| panic!("{words}: {line}"));
    begin.rsplit(' ').next().unwrap()
}

#[test]
fn header__compiles_as_strict_c11() {
    let Some(prefix) = Prefix::new() else { return };
    let source = prefix.path("header.c");
    fs::write(
        &source,
        "#include <rdmux_dsm.h>\n#include <rdmux_dsm.h>\nint main(void) { return 0; }\n",
    )
    .unwrap();
    let output = Command::new("cc")
        .args([
            "-std=c11",
            "-pedantic-errors",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
        ])
        .args(prefix.options().first())
        .arg(&source)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:#?}");
}

#[test]
fn pkg_config__gives_the_options_of_a_program() {
    let Some(prefix) = Prefix::new() else { return };
    if !installed("pkg-config") {
        return skip::skip("there is no pkg-config");
    }
    let output = Command::new("pkg-config")
        .args(["--cflags", "--libs", "rdmux-dsm"])
        .env("PKG_CONFIG_PATH", prefix.path("lib/pkgconfig"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let options: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(options, prefix.options());
}

/// Returns the names of functions in a text: `rdmux_dsm_` and what follows, before a character.
fn names(text: &str, before: char) -> BTreeSet<String> {
    let is_of_name = |it: char| it.is_ascii_alphanumeric() || it == '_';
    let found = text.match_indices("rdmux_dsm_").filter_map(|(at, _)| {
        let name: String = text[at..].chars().take_while(|it| is_of_name(*it)).collect();
        let is_followed = text[at + name.len()..].starts_with(before);
        is_followed.then_some(name)
    });
    found.collect()
}

fn header_functions() -> BTreeSet<String> {
    let header = fs::read_to_string(here().join("include/rdmux_dsm.h")).unwrap();
    let declarations = header.lines().filter(|line| line.ends_with(");"));
    names(&declarations.collect::<Vec<_>>().join("\n"), '(')
}

#[test]
fn library__exports_the_functions_of_the_header_alone() {
    if !installed("nm") {
        return skip::skip("there is no nm");
    }
    let library = library();
    let nm = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(&library)
        .output();
    let text = String::from_utf8(nm.unwrap().stdout).unwrap();
    let exported: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(str::to_owned)
        .collect();
    assert_eq!(exported, header_functions());
}

#[test]
fn man__describes_each_function_in_one_page() {
    let mut described = Vec::new();
    for page in fs::read_dir(here().join("man")).unwrap() {
        let page = page.unwrap().path();
        let text = fs::read_to_string(&page).unwrap();
        let (_, rest) = text.split_once(".SH NAME\n").unwrap();
        let (listed, _) = rest.split_once(" \\- ").unwrap();
        let listed: Vec<String> = listed.split(", ").map(str::to_owned).collect();
        let stem = page.file_stem().unwrap().to_str().unwrap();
        assert_eq!(listed[0], stem, "{}", page.display());
        let has_prototype = |name: &&String| text.contains(&format!("{name}("));
        described.extend(
            listed
                .iter()
                .filter(|it| *it != "rdmux_dsm")
                .filter(has_prototype)
                .cloned(),
        );
    }
    described.sort();
    assert_eq!(described, header_functions().into_iter().collect::<Vec<_>>());
}

#[test]
fn man__has_an_example_that_runs() {
    let Some(prefix) = Prefix::new() else { return };
    let page = fs::read_to_string(here().join("man/rdmux_dsm.3")).unwrap();
    let (_, rest) = page.split_once(".EX\n").unwrap();
    let (program, _) = rest.split_once(".EE\n").unwrap();
    let source = prefix.path("example.c");
    fs::write(&source, program.replace("\\e", "\\")).unwrap();
    let program = prefix.compile(&source);
    let printed = run(&program, 3, FaultMode::Thread, &[]);
    assert!(printed.iter().all(|text| text == "3 of 3\n"), "{printed:?}");
}

#[test]
fn calls__do_what_the_header_says_on_1_to_3_nodes_in_each_mode() {
    let Some(prefix) = Prefix::new() else { return };
    let program = prefix.compile(&test_source("calls.c"));
    for nodes in 1..=3 {
        for mode in MODES {
            for (node, text) in run(&program, nodes, mode, &[]).iter().enumerate() {
                assert_eq!(text, &format!("node {node} of {nodes}\n"));
            }
        }
    }
}

#[test]
fn calls__of_wrong_arguments_fail_and_say_why() {
    let Some(prefix) = Prefix::new() else { return };
    let program = prefix.compile(&test_source("wrong.c"));
    for mode in MODES {
        assert_eq!(run(&program, 1, mode, &[]), [""]);
    }
}

#[test]
fn join_file__joins_the_cluster_of_a_file_with_its_key() {
    const NODES: u32 = 2;
    let Some(prefix) = Prefix::new() else { return };
    let program = prefix.compile(&test_source("file.c"));
    rdmux_soft::register();
    let clusters = Cluster::on_this_host(address(), NODES).unwrap();
    let addresses: Vec<String> = clusters
        .iter()
        .map(|cluster| format!("'{}'", cluster.address(cluster.own()).unwrap()))
        .collect();
    let (file, key) = (prefix.path("cluster.toml"), prefix.path("key"));
    fs::write(&file, format!("nodes = [{}]", addresses.join(", "))).unwrap();
    rdmux_key::Key::load_or_create_at(&key).unwrap();
    let start = |node: u32| {
        let mut command = Command::new(&program);
        command.arg(&file).arg(node.to_string()).arg(&key);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let nodes: Vec<Child> = (0..NODES).map(|node| start(node).unwrap()).collect();
    for node in nodes {
        let output = node.wait_with_output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "2 nodes, sum 1\n",
            "{output:#?}"
        );
        assert!(output.status.success());
    }
}

#[test]
fn sor__is_right_and_reads_the_boundary_pages_alone() {
    const ITERATIONS: u64 = 4;
    let Some(prefix) = Prefix::new() else { return };
    let program = prefix.compile(&example("dsm_sor.c"));
    for mode in MODES {
        for nodes in 1..=3 {
            // Half of a row, which has one colour, is less than a page, and lies in one: so each neighbour's row is a page of each colour.
            let printed = run(&program, nodes, mode, &["62", &ITERATIONS.to_string()]);
            for (node, text) in (0..).zip(&printed) {
                assert!(text.starts_with(&format!("node {node}: ")), "{text}");
                assert!(text.ends_with(": correct\n"), "{text}");
                let neighbours = u64::from(node > 0) + u64::from(node + 1 < nodes);
                let pages: u64 = word_before(text, " pages read").parse().unwrap();
                assert_eq!(
                    pages,
                    neighbours * 2 * ITERATIONS,
                    "{mode}, {nodes} nodes: {text}"
                );
                assert_eq!(word_after(text, "sum"), word_after(&printed[0], "sum"));
            }
        }
    }
}

#[test]
fn kv__is_right_on_1_to_3_nodes_in_each_mode() {
    let Some(prefix) = Prefix::new() else { return };
    let program = prefix.compile(&example("dsm_kv.c"));
    for mode in MODES {
        for nodes in 1..=3 {
            let printed = run(&program, nodes, mode, &["500", "50"]);
            for (node, text) in printed.iter().enumerate() {
                assert!(text.starts_with(&format!("node {node}: ")), "{text}");
                assert!(text.ends_with(": correct\n"), "{text}");
                assert_eq!(word_after(text, "keys"), word_after(&printed[0], "keys"));
                assert_ne!(word_after(text, "keys"), "0");
            }
        }
    }
}

#[test]
fn programs__name_the_command_that_starts_their_nodes() {
    let Some(prefix) = Prefix::new() else { return };
    for name in ["dsm_sor.c", "dsm_kv.c"] {
        let Output { status, stderr, .. } = Command::new(prefix.compile(&example(name))).output().unwrap();
        let error = String::from_utf8(stderr).unwrap();
        assert!(
            error.contains("start the program by `rdmux dsm run`") && error.lines().count() == 1,
            "{error}"
        );
        assert_eq!(status.code(), Some(1));
    }
}

#[test]
fn call__after_a_node_was_killed_fails_and_names_it() {
    let Some(prefix) = Prefix::new() else { return };
    let program = prefix.compile(&test_source("dies.c"));
    for (mode, victim) in MODES.into_iter().zip([1, 0, 2]) {
        let mut nodes = start(&program, 3, mode, LEASE, &[]);
        nodes.iter().for_each(|node| node.wait_for("@ begins"));
        drop(nodes.remove(victim));
        let (mut recovered, mut lost) = (0, 0);
        for node in &nodes {
            node.wait_for("@ ends");
            let text = node.printed();
            let missed = text
                .lines()
                .find_map(|line| line.strip_prefix("@ misses "))
                .unwrap();
            let (number, why) = missed.split_once(": ").unwrap();
            assert_eq!(number, victim.to_string(), "{text}");
            assert!(why.contains(&format!("node {victim}")), "{text}");
            if let Some(line) = text.lines().find(|line| line.starts_with("@ lock ")) {
                assert!(line.contains(&format!(" {victim}: ")), "{text}");
                assert!(line.contains(&format!("node {victim} ")), "{text}");
                recovered += u32::from(line.starts_with("@ lock recovered"));
                lost += u32::from(line.starts_with("@ lock lost"));
            }
        }
        // The first of the others that gets a lock of the node is told so; a lock whose home it was is there for nobody.
        let had_lock = u32::from(victim == 1);
        assert!(
            (recovered, lost) == (had_lock, 0) || (recovered, lost) == (0, 2),
            "{mode}"
        );
    }
}

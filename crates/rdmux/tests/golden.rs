//! Output of every command, as text and as JSON, and its help: compared with the files in `golden/`, so that reviewers see a change of the
//! output that people and scripts read. `RDMUX_GOLDEN_WRITE=1` writes the files anew.
//!
//! Help is compared as it is. In output, the parts that differ from run to run are masked: a number, with its fraction or the further parts
//! of an address, is `N`; eight or more hexadecimal digits, and a GUID, are `H`; several spaces are two, since widths follow figures. JSON
//! is written with one key a line and its numbers as `"N"`.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod dsm_node;
mod host;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(60);

/// Commands whose output has files here, as text and as JSON; more words are a case of a command.
const OUTPUTS: [&str; 46] = [
    "accel checksum",
    "accel compress",
    "accel decompress",
    "accel list",
    "capture",
    "capture check",
    "ddio off",
    "ddio on",
    "dev show",
    "doctor",
    "dsm stat",
    "link show",
    "log append",
    "log bench",
    "log read",
    "log status",
    "log trim",
    "node check",
    "nvme ana list",
    "nvme discover",
    "nvme host list",
    "nvme id-ctrl",
    "nvme id-ns",
    "nvme list",
    "nvme listener list",
    "nvme ns list",
    "nvme perf",
    "nvme read",
    "nvme referral list",
    "nvme stat",
    "nvme target",
    "nvme write",
    "perf push-read",
    "perf storage",
    "perf write-bw",
    "perf write-lat",
    "pull",
    "push",
    "res show",
    "res show cm_id",
    "res show qp",
    "serve",
    "sim",
    "sim leases",
    "sim power",
    "stat show",
];

const CHANGES: &str = "it reports one value; cli_nvme_change looks at what it changes";

/// Commands whose output has no files, and why.
const WITHOUT: [(&str, &str); 23] = [
    (
        "accel header",
        "it writes bytes; cli_accel has a target read them",
    ),
    (
        "dev set",
        "it prints nothing; cli_objects looks at what it changes",
    ),
    (
        "demo fair",
        "its figures are of the host; cli_demo looks at what it reports",
    ),
    ("dsm run", "its output is that of its program; cli_dsm runs one"),
    (
        "demo push",
        "it measures for long; cli_push looks at what it reports",
    ),
    ("node", "it prints one line; cli_node looks at what it serves"),
    (
        "node url",
        "it prints a key's token; cli_web opens it in a browser",
    ),
    ("nvme ana group", CHANGES),
    ("nvme ana set", CHANGES),
    ("nvme host add", CHANGES),
    ("nvme host others", CHANGES),
    ("nvme host remove", CHANGES),
    ("nvme listener add", CHANGES),
    ("nvme listener remove", CHANGES),
    ("nvme ns add", CHANGES),
    ("nvme ns remove", CHANGES),
    ("nvme ns resize", CHANGES),
    ("nvme referral add", CHANGES),
    ("nvme referral remove", CHANGES),
    (
        "run",
        "what it prints is another program's; cargo xtask programs runs them",
    ),
    ("explain qp", "cli_explain looks at what it says of each cause"),
    (
        "top",
        "its own tests have its screen and its tables; cli_top looks at its JSON",
    ),
    ("trace dump", "cli_explain looks at what it holds"),
];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

/// Returns the file of a command: its words, joined.
fn file_of(folder: &str, command: &str, extension: &str) -> String {
    format!("{folder}/{}.{extension}", command.replace(' ', "-"))
}

/// Compares the output with a file, or writes the file.
fn compare(name: &str, found: &str) {
    let path = golden(name);
    let found = format!("{}\n", found.trim_end());
    if std::env::var_os("RDMUX_GOLDEN_WRITE").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, found).unwrap();
        return;
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        expected == found,
        "{name} is not what is printed now. If the change is meant, write it anew by RDMUX_GOLDEN_WRITE=1 cargo test -p rdmux \
         --test golden\n--- {name}\n{expected}\n--- now\n{found}"
    );
}

/// Masks and compares the output of a command.
fn compare_text(command: &str, home: &TempDir, out: &str) {
    assert!(OUTPUTS.contains(&command), "{command} is not in OUTPUTS");
    compare(&file_of("output", command, "txt"), &mask(&own(home, out)));
}

/// Masks and compares the JSON of a command, one value or several.
fn compare_json(command: &str, home: &TempDir, out: &str) {
    assert!(OUTPUTS.contains(&command), "{command} is not in OUTPUTS");
    let values = serde_json::Deserializer::from_str(out).into_iter::<Value>();
    let values: Vec<String> = values
        .map(|value| format!("{:#}", mask_json(home, value.unwrap())))
        .collect();
    assert!(!values.is_empty(), "{command}: no JSON in {out:?}");
    compare(&file_of("output", command, "json"), &values.join("\n"));
}

/// Replaces the name of this run's own folder, so that it is the same in each run.
fn own(home: &TempDir, text: &str) -> String {
    text.replace(home.path().to_str().unwrap(), "FOLDER")
}

fn mask_json(home: &TempDir, value: Value) -> Value {
    match value {
        Value::Number(_) => "N".into(),
        Value::String(text) => mask(&own(home, &text)).into(),
        Value::Array(values) => values.into_iter().map(|value| mask_json(home, value)).collect(),
        Value::Object(map) => {
            let masked = map.into_iter().map(|(key, value)| {
                // The keys of these objects depend on what was counted.
                let value = match (key.as_str(), value) {
                    ("counters" | "opcodes", Value::Object(counts)) => {
                        assert!(counts.values().all(Value::is_u64), "{counts:?}");
                        serde_json::json!({ "NAME": "N" })
                    }
                    (_, value) => mask_json(home, value),
                };
                (key, value)
            });
            Value::Object(masked.collect())
        }
        other => other,
    }
}

/// Masks a text as the head of this file describes.
fn mask(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let is_word = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    let mut masked = String::new();
    let mut at = 0;
    while at < chars.len() {
        if chars[at] == ' ' {
            let spaces = chars[at..].iter().take_while(|c| **c == ' ').count();
            masked += if spaces > 1 { "  " } else { " " };
            at += spaces;
        } else if is_guid(&chars[at..]) {
            masked.push('H');
            at += GUID_CHARS;
        } else if is_word(&chars[at]) {
            let word: String = chars[at..].iter().take_while(|c| is_word(c)).collect();
            at += word.len();
            let hexadecimal = word.len() >= 8 && word.chars().all(|c| c.is_ascii_hexdigit());
            if hexadecimal && word.contains(|c: char| c.is_ascii_digit()) {
                masked.push('H');
            } else if word
                .strip_prefix("0x")
                .is_some_and(|rest| rest.chars().all(|c| c.is_ascii_hexdigit()))
            {
                masked += "0xN";
            } else if word.starts_with(|c: char| c.is_ascii_digit()) {
                masked.push('N');
                masked += word.trim_start_matches(|c: char| c.is_ascii_digit());
                at += parts(&chars[at..]);
            } else {
                masked += &word;
                // `p99.9` is a name.
                let more = if word.ends_with(|c: char| c.is_ascii_digit()) {
                    parts(&chars[at..])
                } else {
                    0
                };
                masked.extend(&chars[at..at + more]);
                at += more;
            }
        } else {
            masked.push(chars[at]);
            at += 1;
        }
    }
    masked
}

const GUID_CHARS: usize = "0123:4567:89ab:cdef".len();

/// Returns whether the characters begin with a GUID.
fn is_guid(chars: &[char]) -> bool {
    let fits = |(i, c): (usize, &char)| {
        if i % 5 == 4 {
            *c == ':'
        } else {
            c.is_ascii_hexdigit()
        }
    };
    chars.len() >= GUID_CHARS && chars[..GUID_CHARS].iter().enumerate().all(fits)
}

/// Returns the length of the leading points that each have digits behind them, with these digits.
fn parts(chars: &[char]) -> usize {
    let mut n = 0;
    while chars.get(n) == Some(&'.') && chars.get(n + 1).is_some_and(char::is_ascii_digit) {
        n += 1;
        n += chars[n..].iter().take_while(|c| c.is_ascii_digit()).count();
    }
    n
}

#[test]
fn mask__what_differs_from_run_to_run() {
    for (text, masked) in [
        ("a  12.5 us   p99.9 7", "a  N us  p99.9 N"),
        ("127.0.0.1:7174 64K", "N:N NK"),
        ("crc64 de341cf46f3cef60 0x1f 12345678", "crc64 H 0xN H"),
        ("at 1.5, done 7.", "at N, done N."),
        ("-3 t_min 99.9%", "-N t_min N%"),
        ("node_guid 0123:4567:89ab:cdef pid 7", "node_guid H pid N"),
    ] {
        assert_eq!(mask(text), masked);
    }
}

fn rdmux(home: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    command
        .args(args)
        .env("XDG_CONFIG_HOME", home.path())
        .env_remove("COLUMNS")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Returns the output of a command that must succeed.
fn run(home: &TempDir, args: &[&str]) -> String {
    let output = rdmux(home, args).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {err}");
    String::from_utf8(output.stdout).unwrap()
}

/// Does the same, and repeats it while the command's server is not there yet.
fn run_when_there(home: &TempDir, args: &[&str]) -> String {
    let deadline = Instant::now() + LONG;
    loop {
        let output = rdmux(home, args).output().unwrap();
        if output.status.success() {
            return String::from_utf8(output.stdout).unwrap();
        }
        let err = String::from_utf8_lossy(&output.stderr);
        let early = err.contains("nothing listens") || err.contains("no answer");
        assert!(early && Instant::now() < deadline, "{args:?}: {err}");
    }
}

/// Returns an address of this run's own: other runs may go on beside it.
fn address(last: u8) -> String {
    let [low, high, ..] = std::process::id().to_le_bytes();
    format!("127.{}.{low}.{last}", high | 0x80)
}

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a process that keeps running; returns it and its output up to `last`.
fn start(home: &TempDir, args: &[&str], last: &str) -> (Running, String) {
    let mut command = rdmux(home, args);
    let errors = home.path().join("errors");
    command.stderr(fs::File::create(&errors).unwrap());
    let mut child = command.spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let child = Running(child);
    let mut said = String::new();
    while !said.contains(last) {
        let more = out.read_line(&mut said).unwrap() > 0;
        let error = || fs::read_to_string(&errors).unwrap_or_default();
        assert!(more, "{args:?}: {said}{}", error());
    }
    (child, said)
}

// Help.

fn help(command: &str) -> String {
    let home = tempfile::tempdir().unwrap();
    let words: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
    run(&home, &words)
}

/// Returns the commands that a help text lists, without `help` itself.
fn listed(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let entries = lines.take_while(|line| !line.is_empty());
    entries
        .filter_map(|line| {
            let entry = line.strip_prefix("  ")?;
            let name = entry.split(' ').next()?;
            // Further lines of a description begin farther in.
            (!name.is_empty() && name != "help").then(|| name.to_owned())
        })
        .collect()
}

/// Returns every command with its help, the program itself first.
fn commands() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open = vec![String::new()];
    while let Some(command) = open.pop() {
        let text = help(&command);
        open.extend(
            listed(&text)
                .iter()
                .map(|name| format!("{command} {name}").trim().to_owned()),
        );
        found.push((command, text));
    }
    assert!(found.len() > 15, "{found:?}");
    found
}

/// Returns whether a command does something itself, and does not only have commands below it.
fn is_leaf(help: &str) -> bool {
    let usage = help.lines().find(|line| line.starts_with("Usage: ")).unwrap();
    let words = usage.trim_start_matches("Usage: ").split(' ').skip(1);
    listed(help).is_empty()
        || words
            .into_iter()
            .any(|word| word.starts_with('[') || word.starts_with("--"))
}

/// Returns the names of the files in a folder of `golden/`.
fn files_in(folder: &str) -> BTreeSet<String> {
    let files = fs::read_dir(golden(folder)).unwrap();
    let names = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.map(|name| format!("{folder}/{name}")).collect()
}

#[test]
fn help__of_every_command() {
    let mut files = BTreeSet::new();
    for (command, text) in commands() {
        let name = format!("rdmux {command}");
        let file = file_of("help", name.trim(), "txt");
        compare(&file, &text);
        files.insert(file);
    }
    assert_eq!(files_in("help"), files, "a file without its command");
}

#[test]
fn help__says_the_keys_of_json() {
    for (command, text) in commands() {
        let json = text
            .lines()
            .any(|line| line.trim_start().starts_with("--json") || line.contains(" --json "));
        let keys = text
            .lines()
            .any(|line| line.starts_with("JSON: ") || line.contains("Print JSON: {"));
        // The program's own options are also options of the commands that have them.
        assert!(
            !json || keys || command.is_empty(),
            "rdmux {command} --help lists no keys of its JSON"
        );
    }
}

#[test]
fn output__of_every_command() {
    let known: Vec<&str> = OUTPUTS
        .into_iter()
        .chain(WITHOUT.map(|(command, _)| command))
        .collect();
    for (command, text) in commands() {
        let is_of = |name: &&str| **name == command || name.starts_with(&format!("{command} "));
        let has = known.iter().any(is_of);
        assert!(
            has || command.is_empty() || !is_leaf(&text),
            "rdmux {command} has no golden output: add a case to crates/rdmux/tests/golden.rs, or a reason to WITHOUT"
        );
    }
    if std::env::var_os("RDMUX_GOLDEN_WRITE").is_none() {
        let files = OUTPUTS
            .iter()
            .flat_map(|command| ["txt", "json"].map(|e| file_of("output", command, e)));
        assert_eq!(files_in("output"), files.collect(), "a file without its case");
    }
}

// Man pages and completions.

#[test]
fn generate__has_a_page_and_completions_for_every_command() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("prefix");
    run(&home, &["generate", folder.to_str().unwrap()]);
    let completions = [
        "bash-completion/completions/rdmux",
        "zsh/site-functions/_rdmux",
        "fish/vendor_completions.d/rdmux.fish",
    ]
    .map(|path| fs::read_to_string(folder.join("share").join(path)).unwrap());
    for (command, text) in commands() {
        let name = format!("rdmux {command}").trim().replace(' ', "-");
        let page = fs::read_to_string(folder.join(format!("share/man/man1/{name}.1")));
        let page = page
            .unwrap_or_else(|why| panic!("{name}.1: {why}"))
            .replace("\\-", "-");
        for option in options(&text) {
            assert!(page.contains(&option), "{name}.1 does not tell of {option}");
            let short = option.trim_start_matches('-');
            // clap_complete makes no options for fish below the second command of a line.
            let shells = if command.split(' ').count() > 2 { 2 } else { 3 };
            for (shell, script) in ["bash", "zsh", "fish"].iter().zip(&completions).take(shells) {
                assert!(script.contains(short), "{shell} does not complete {option}");
            }
        }
    }
}

/// Returns the long options that a help text lists.
fn options(help: &str) -> Vec<String> {
    let lines = help
        .lines()
        .filter(|line| line.starts_with("  ") && line.trim_start().starts_with('-'));
    let words = lines.flat_map(|line| line.split([' ', ',']).take(8));
    let long = words.filter(|word| word.starts_with("--"));
    // An option that may be given again has points behind it.
    long.map(|word| word.trim_end_matches("...").to_owned()).collect()
}

// Output.

/// Runs a command for its text and for its JSON.
fn both(home: &TempDir, name: &str, args: &[&str]) {
    compare_text(name, home, &run(home, args));
    compare_json(name, home, &run(home, &[args, &["--json"]].concat()));
}

#[test]
fn output__serve_push_and_pull() {
    let home = tempfile::tempdir().unwrap();
    let serve = ["serve", "--mem", "m,size=1M", "--mem", "n,size=64K"];
    let [first, second] = [1, 2].map(address);
    let text = [&serve[..], &["--listen", &first]].concat();
    let (_serving, said) = start(&home, &text, "listening on");
    compare_text("serve", &home, &said);
    let json = [&serve[..], &["--listen", &second, "--json"]].concat();
    compare_json("serve", &home, &start(&home, &json, "}\n").1);

    let file = home.path().join("file");
    fs::write(&file, [7; 300_000]).unwrap();
    let file = file.to_str().unwrap();
    let [m, n] = ["m", "n"].map(|region| format!("rdmux://{first}/{region}"));
    both(&home, "push", &["push", file, &m]);
    both(&home, "pull", &["pull", &n, file]);
    let args = ["perf", "push-read", &m, "-n", "5"];
    both(&home, "perf push-read", &args);
}

#[test]
fn output__nvme_target() {
    let home = tempfile::tempdir().unwrap();
    let namespaces = [
        "--ns",
        "mem:1M,uuid=01234567-89ab-8def-8123-456789abcdef",
        "--ns",
        "null:1G,block=4K,ro,uuid=01234567-89ab-8def-8123-456789abcdee",
    ];
    let socket = home.path().join("socket").display().to_string();
    let target = |name: &str, last: u8, more: &[&str]| {
        let listen = format!("tcp:{}", address(last));
        let nqn = format!("nqn.2014-08.org.example:{name}-{}", std::process::id());
        let args = [
            &[
                "nvme", "target", "--nqn", &nqn, "--listen", &listen, "--socket", &socket,
            ],
            &namespaces[..],
            more,
        ];
        let last = if more.contains(&"--json") {
            "}\n"
        } else {
            "listening"
        };
        start(&home, &args.concat(), last)
    };
    let (text, said) = target("text", 14, &["--allow-any-host"]);
    compare_text("nvme target", &home, &said);
    let at = ["--socket", &socket];
    run(
        &home,
        &[
            &[
                "nvme",
                "host",
                "add",
                "nqn.2014-08.org.example:host",
                "--queues",
                "2",
            ][..],
            &at,
        ]
        .concat(),
    );
    let referral = ["nvme", "referral", "add", "tcp:192.0.2.9:8009"];
    run(&home, &[&referral[..], &at].concat());
    for list in ["ana", "ns", "host", "listener", "referral"] {
        both(
            &home,
            &format!("nvme {list} list"),
            &[&["nvme", list, "list"][..], &at].concat(),
        );
    }
    let url = format!("nvme+tcp://{}", address(14));
    both(&home, "nvme discover", &["nvme", "discover", &url]);
    let url = &format!("{url}/nqn.2014-08.org.example:text-{}", std::process::id());
    for command in ["list", "id-ctrl", "id-ns"] {
        both(&home, &format!("nvme {command}"), &["nvme", command, url]);
    }
    let file = home.path().join("file");
    fs::write(&file, [7; 8192]).unwrap();
    let file = file.to_str().unwrap();
    both(&home, "nvme write", &["nvme", "write", url, file]);
    let read = ["nvme", "read", url, "--length", "8192", "--output", file];
    both(&home, "nvme read", &read);
    both(&home, "nvme stat", &[&["nvme", "stat"][..], &at].concat());
    let perf = ["nvme", "perf", url, "--time", "0.1", "--warmup", "0"];
    both(&home, "nvme perf", &perf);
    drop(text);
    let (_json, said) = target("json", 15, &["--json"]);
    compare_json("nvme target", &home, &said);
}

#[test]
fn node() {
    dsm_node::run();
}

#[test]
fn output__dsm_stat() {
    let home = tempfile::tempdir().unwrap();
    let (device, node) = (address(19), dsm_node::command(rdmux_dsm::Consistency::Sequential));
    // In the first mode that a host allows, the output would depend on the host.
    let mut words = vec![
        "dsm", "run", "-n", "2", "--device", &device, "--faults", "mprotect", "--",
    ];
    words.extend(node.iter().map(String::as_str));
    let (_running, said) = start(&home, &words, "READY ");
    let (_, cluster) = said.rsplit_once("READY ").unwrap();
    both(&home, "dsm stat", &["dsm", "stat", cluster.trim()]);
}

#[test]
fn output__accel() {
    let home = tempfile::tempdir().unwrap();
    let nqn = format!("nqn.2014-08.org.example:accel-{}", std::process::id());
    let listen = format!("tcp:{}", address(17));
    let socket = home.path().join("socket").display().to_string();
    let mut target = vec![
        "nvme", "target", "--nqn", &nqn, "--listen", &listen, "--socket", &socket,
    ];
    target.extend([
        "--allow-any-host",
        "--accel",
        "zstd:2,level=3",
        "--accel",
        "crc32c,window=1M,windows=4",
    ]);
    let (_running, _) = start(&home, &target, "listening");
    let via = &format!("nvme+tcp://{}/{nqn}:accel", address(17));
    let [file, packed, back] =
        ["file", "file.zst", "back"].map(|name| home.path().join(name).display().to_string());
    fs::write(&file, [7; 8192]).unwrap();
    both(&home, "accel list", &["accel", "list", "--via", via]);
    both(
        &home,
        "accel checksum",
        &["accel", "checksum", &file, "--via", via],
    );
    let compress = ["accel", "compress", &file, "--via", via, "--force"];
    both(&home, "accel compress", &compress);
    let decompress = [
        "accel",
        "decompress",
        &packed,
        "--via",
        via,
        "--force",
        "--output",
        &back,
    ];
    both(&home, "accel decompress", &decompress);
}

#[test]
fn output__log() {
    let home = tempfile::tempdir().unwrap();
    let serve = ["serve", "--listen", &address(3), "--mem", "a,size=1M"];
    let (_serving, _) = start(&home, &serve, "listening on");
    // A log of one region, which is never behind the others.
    let target = &format!("rdmux://{}/a", address(3));
    let log = |command: &str, more: &[&str], input: &str| {
        let args = [&["log", command, target], more].concat();
        let mut child = rdmux(&home, &args).stdin(Stdio::piped()).spawn().unwrap();
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    for (command, more, input) in [
        ("append", &[][..], "first\nsecond\n"),
        ("read", &[], ""),
        ("status", &[], ""),
        ("trim", &["--below", "2"], ""),
        ("bench", &["-n", "20"], ""),
    ] {
        let name = format!("log {command}");
        compare_text(&name, &home, &log(command, more, input));
        compare_json(&name, &home, &log(command, &[more, &["--json"]].concat(), input));
    }
}

#[test]
fn output__perf() {
    let home = tempfile::tempdir().unwrap();
    for (test, last) in [("write-lat", 4), ("write-bw", 6)] {
        for (more, at) in [(&[][..], last), (&["--json"], last + 1)] {
            let address = address(at);
            let serve = ["perf", test, "--bind", &address];
            let _serving = Running(
                rdmux(&home, &serve)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap(),
            );
            let args = [
                &["perf", test, &address, "--bind", &address, "-n", "20", "-s", "4K"],
                more,
            ]
            .concat();
            let out = run_when_there(&home, &args);
            let name = format!("perf {test}");
            if more.is_empty() {
                compare_text(&name, &home, &out);
            } else {
                compare_json(&name, &home, &out);
            }
        }
    }
}

#[test]
fn output__perf_storage() {
    let home = tempfile::tempdir().unwrap();
    let address = address(16);
    let (_serving, _) = start(&home, &["perf", "storage", "--bind", &address], "listening");
    let args = ["perf", "storage", &address, "--bind", &address, "--ios", "20"];
    both(&home, "perf storage", &args);
}

/// Checks the example of docs/node.md.
#[test]
fn output__node_check() {
    let home = tempfile::tempdir().unwrap();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/node.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, example) = page.split_once("```toml\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    let file = home.path().join("node.toml");
    fs::write(&file, example).unwrap();
    both(&home, "node check", &["node", "check", file.to_str().unwrap()]);
}

#[test]
fn output__sim() {
    let home = tempfile::tempdir().unwrap();
    both(&home, "sim", &["sim", "--operations", "50"]);
    both(&home, "sim power", &["sim", "--power", "--seed", "3"]);
    both(&home, "sim leases", &["sim", "--leases"]);
}

#[test]
fn output__doctor_and_ddio() {
    let host = host::skylake(0x99);
    let root = host.root.path().to_str().unwrap().to_owned();
    both(&host.root, "doctor", &["doctor", "ddio", "--root", &root]);
    // Each runs for its text, then for its JSON: the second run changes nothing.
    both(
        &host.root,
        "ddio off",
        &["ddio", "off", "mlx5_0", "--root", &root],
    );
    both(&host.root, "ddio on", &["ddio", "on", "mlx5_0", "--root", &root]);
}

/// Returns only the lines of this address: other tests have devices as well.
fn of_address(address: &str, out: &str) -> String {
    let lines = out.lines().filter(|line| line.contains(&format!("{address}/")));
    // PSNs and numbers of connections have a random number of digits, and the mask would take some for hexadecimal.
    let steady = |line: &str| {
        let mut before = "";
        let words = line.split(' ').map(|word| {
            let named = std::mem::replace(&mut before, word);
            if named.ends_with("-psn") || named == "cm-idn" {
                "7"
            } else {
                word
            }
        });
        words.collect::<Vec<_>>().join(" ") + "\n"
    };
    lines.map(steady).collect()
}

fn of_address_json(address: &str, out: &str) -> String {
    let values: Vec<Value> = serde_json::from_str(out).unwrap();
    let own: Vec<Value> = values
        .into_iter()
        .filter(|value| value["ifname"] == address)
        .collect();
    Value::Array(own).to_string()
}

#[test]
fn output__res_and_capture() {
    let home = tempfile::tempdir().unwrap();
    let (server, client) = (&*address(8), &*address(9));
    let serve = ["perf", "read-lat", "--bind", server];
    let deadline = Instant::now() + LONG;
    let file = home.path().join("c.pcapng").to_str().unwrap().to_owned();
    'again: loop {
        let _serving = Running(
            rdmux(&home, &serve)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let args = ["perf", "read-lat", server, "--bind", client, "-e", "-D", "60"];
        let mut measuring = Running(
            rdmux(&home, &args)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        // Wait until the client is connected and has mapped the memory that it reads.
        let shown = loop {
            assert!(Instant::now() < deadline);
            if measuring.0.try_wait().unwrap().is_some() {
                continue 'again;
            }
            let shown = run(&home, &["res", "show", "qp", "--json"]);
            let own = of_address_json(client, &shown);
            if own.contains("\"mapped\":1") {
                break own;
            }
        };
        compare_json("res show qp", &home, &shown);
        let show = |args: &[&str]| run(&home, &[&["res", "show"], args].concat());
        compare_text("res show qp", &home, &of_address(client, &show(&["qp"])));
        compare_text("res show", &home, &of_address(client, &show(&[])));
        compare_json("res show", &home, &of_address_json(client, &show(&["--json"])));

        for words in [
            &["dev", "show"][..],
            &["link", "show"],
            &["stat", "show"],
            &["res", "show", "cm_id"],
        ] {
            let json = run(&home, &[words, &["--json"]].concat());
            let name = words.join(" ");
            compare_text(&name, &home, &of_address(server, &run(&home, words)));
            compare_json(&name, &home, &of_address_json(server, &json));
        }

        let devices: Vec<Value> = serde_json::from_str(&show(&["--json"])).unwrap();
        let device = devices.iter().find(|device| device["ifname"] == client).unwrap();
        let device = format!("{client}/{}", device["port"]);
        let capture = ["capture", "-w", &file, "--device", &device, "--seconds", "1"];
        both(&home, "capture", &capture);
        break;
    }
    // Output of a capture that has ended in order.
    let file = home.path().join("d.pcapng").to_str().unwrap().to_owned();
    let address = &*address(10);
    let serve = ["perf", "send-lat", "--bind", address];
    let _serving = Running(
        rdmux(&home, &serve)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let args = [
        "perf",
        "send-lat",
        address,
        "--bind",
        address,
        "-n",
        "5",
        "--capture",
        &file,
    ];
    run_when_there(&home, &args);
    both(&home, "capture check", &["capture", "check", &file]);
}

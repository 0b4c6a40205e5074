//! `rdmux node --web` in a browser: Chromium without a window, told what to do by the DevTools protocol over a pipe.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../skip.rs"]
mod skip;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};
use skip::skip;
use tempfile::TempDir;

/// Address of the node's device.
const DEVICE: &str = "127.0.77.1";
/// Time that a page has until it shows what it should.
const PATIENCE_MS: u64 = 60_000;

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A user with a node that has a page.
struct Host {
    folder: TempDir,
}

impl Host {
    fn new() -> Host {
        let folder = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
        Host { folder }
    }

    fn rdmux(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .env("XDG_CONFIG_HOME", self.folder.path())
            .env_remove("RDMUX_PROVIDER")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Starts a node; returns the address of its page as well.
    fn node(&self) -> (Running, String) {
        let args = ["node", "--device", DEVICE, "--web", "127.0.0.1:0"];
        let mut node = Running(self.rdmux(&args).spawn().unwrap());
        let mut line = String::new();
        let mut errors = BufReader::new(node.0.stderr.take().unwrap());
        errors.read_line(&mut line).unwrap();
        let address = line
            .strip_prefix("rdmux: page at http://")
            .and_then(|rest| rest.split('/').next());
        let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();
        let mut ready = String::new();
        let mut out = BufReader::new(node.0.stdout.take().unwrap());
        out.read_line(&mut ready).unwrap();
        assert!(ready.contains("ready for applications"), "{ready}");
        (node, address)
    }

    fn url(&self, address: &str) -> String {
        let output = self.rdmux(&["node", "url", address]).output().unwrap();
        let url = String::from_utf8(output.stdout).unwrap().trim_end().to_owned();
        assert!(url.starts_with(&format!("http://{address}/#")), "{url}");
        url
    }

    /// Starts two applications, one of which writes to the other.
    fn traffic(&self, port: &str) -> [Running; 2] {
        let common = [
            "perf",
            "write-bw",
            "--bind",
            DEVICE,
            "--provider",
            "shared",
            "--port",
            port,
        ];
        let mut server = Running(self.rdmux(&common).spawn().unwrap());
        let out = BufReader::new(server.0.stdout.take().unwrap());
        assert!(
            out.lines()
                .any(|line| line.unwrap().contains("Waiting for client"))
        );
        let mut client = self.rdmux(&common);
        client.args([DEVICE, "-e", "--tx-depth", "4", "--duration", "3600"]);
        [server, Running(client.spawn().unwrap())]
    }
}

/// A browser.
struct Browser {
    _process: Running,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    last: u64,
    /// Reports of pages: errors that nobody caught, and lines of their logs.
    complaints: Vec<String>,
    _profile: TempDir,
}

/// A page of a browser.
struct Page<'a> {
    browser: &'a mut Browser,
    session: String,
}

impl Browser {
    /// Starts a browser; `None`, and a line that says so, if there is none.
    fn start() -> Option<Browser> {
        let program = ["chromium", "chromium-browser", "google-chrome"]
            .into_iter()
            .find(|program| {
                Command::new(program)
                    .arg("--version")
                    .output()
                    .is_ok_and(|output| output.status.success())
            });
        let Some(program) = program else {
            skip("there is no Chromium");
            return None;
        };
        let profile = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
        // The browser takes commands from descriptor 3, and answers on 4.
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 >/dev/null 2>&1", "sh", program])
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
            ])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ])
            .args(["--disable-dev-shm-usage", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .env("HOME", profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Some(Browser {
            commands: process.stdin.take().unwrap(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            _process: Running(process),
            last: 0,
            complaints: Vec::new(),
            _profile: profile,
        })
    }

    /// Has the browser, or a page of it, do something; returns the result.
    fn call(&mut self, session: Option<&str>, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut command = json!({ "id": self.last, "method": method, "params": params });
        if let Some(session) = session {
            command["sessionId"] = session.into();
        }
        self.commands
            .write_all(format!("{command}\0").as_bytes())
            .unwrap();
        loop {
            let mut bytes = Vec::new();
            self.answers.read_until(0, &mut bytes).unwrap();
            assert_eq!(bytes.pop(), Some(0), "the browser has ended");
            let mut message: Value = serde_json::from_slice(&bytes).unwrap();
            if message["id"] == self.last {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].take();
            }
            if matches!(
                message["method"].as_str(),
                Some("Runtime.exceptionThrown" | "Log.entryAdded")
            ) {
                self.complaints.push(message["params"].to_string());
            }
        }
    }

    /// Opens a page in a tab of its own.
    fn open(&mut self, url: &str) -> Page<'_> {
        let tab = self.call(None, "Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": tab["targetId"], "flatten": true });
        let session = self.call(None, "Target.attachToTarget", attach)["sessionId"]
            .as_str()
            .unwrap()
            .to_owned();
        let mut page = Page {
            browser: self,
            session,
        };
        page.call("Runtime.enable", json!({}));
        page.call("Log.enable", json!({}));
        page.go(url);
        page
    }
}

impl Page<'_> {
    fn go(&mut self, url: &str) {
        let navigated = self.call("Page.navigate", json!({ "url": url }));
        assert!(navigated["errorText"].is_null(), "{navigated}");
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.browser.call(Some(&self.session), method, params)
    }

    /// Returns the value of an expression, once it has one that counts as true.
    fn wait_for(&mut self, expression: &str) -> Value {
        let script = format!(
            "new Promise((resolve) => {{ const since = Date.now(); const look = () => {{
                const value = document.readyState === 'complete' && ({expression});
                if (value || Date.now() - since > {PATIENCE_MS}) resolve(value); else setTimeout(look, 50);
            }}; look(); }})"
        );
        let value = self.evaluate(&script);
        let is_true = !(value.is_null() || value == false || value == 0 || value == "");
        assert!(
            is_true,
            "{expression}: {value}: {}",
            self.evaluate("document.body.innerText")
        );
        value
    }

    fn evaluate(&mut self, script: &str) -> Value {
        let params = json!({ "expression": script, "awaitPromise": true, "returnByValue": true });
        let mut found = self.call("Runtime.evaluate", params);
        assert!(found["exceptionDetails"].is_null(), "{found}");
        found["result"]["value"].take()
    }
}

/// Waits until the page has what it should have of two applications that write to two others.
fn assert_shows_traffic(page: &mut Page<'_>) {
    let areas = "[...document.querySelectorAll('#share polygon')].filter((area) => Number(area.dataset.rate) > 0).length >= 2";
    page.wait_for(areas);
    for line in ["p50", "p99"] {
        page.wait_for(&format!(
            "Number(document.querySelector('#latency polyline.{line}')?.dataset.ns) >= 128"
        ));
    }
    page.wait_for("document.querySelectorAll('#latency rect.heat').length");
    page.wait_for("/^[0-9.]+ [kMGT]?bit\\/s, Jain index (0\\.[5-9]|1\\.0)/.test(document.getElementById('share-text').textContent)");
    page.wait_for("/^p50 .*s, p99 .*s$/.test(document.getElementById('latency-text').textContent)");
    for (table, rows) in [("tenants", 1), ("applications", 4), ("connections", 4)] {
        page.wait_for(&format!(
            "document.querySelectorAll('#{table} tbody tr').length === {rows}"
        ));
    }
}

#[test]
fn page__shows_traffic_to_who_has_the_token_alone() {
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let host = Host::new();
    let (_node, address) = host.node();
    let url = host.url(&address);
    let _traffic = [host.traffic("7301"), host.traffic("7302")];

    let mut page = browser.open(&url);
    assert_shows_traffic(&mut page);
    assert_eq!(page.evaluate("location.hash"), "");
    assert_eq!(page.evaluate("document.title"), format!("rdmux node {DEVICE}"));
    let screen = json!({ "width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": true });
    page.call("Emulation.setDeviceMetricsOverride", screen);
    page.wait_for("document.documentElement.scrollWidth <= 360");
    page.wait_for("document.getElementById('share').viewBox.baseVal.width < 360");
    // A tab keeps its token.
    page.go(&format!("http://{address}/"));
    assert_shows_traffic(&mut page);
    assert_eq!(browser.complaints, [""; 0]);

    for wrong in [
        format!("http://{address}/#{}", "0".repeat(64)),
        format!("http://{address}/#<b>"),
    ] {
        let mut page = browser.open(&wrong);
        page.wait_for("document.getElementById('status').textContent.startsWith('This is not the token')");
        assert_eq!(page.evaluate("document.getElementById('view').hidden"), true);
        assert_eq!(
            page.evaluate("document.querySelectorAll('polygon, td').length"),
            0
        );
        assert_eq!(page.evaluate("sessionStorage.getItem('token')"), Value::Null);
    }
    let mut page = browser.open(&format!("http://{address}/"));
    page.wait_for("!document.getElementById('ask').hidden");
    page.evaluate(&format!(
        "document.getElementById('token').value = '{url}'; document.getElementById('ask').requestSubmit()"
    ));
    assert_shows_traffic(&mut page);
}

#[test]
fn page__says_when_the_node_has_gone() {
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let host = Host::new();
    let (node, address) = host.node();
    let mut page = browser.open(&host.url(&address));
    page.wait_for("document.getElementById('latency-text').textContent === 'no request completes'");
    drop(node);
    page.wait_for("document.getElementById('status').textContent.startsWith('No answer from the node')");
}

#[test]
fn snapshot__needs_the_token() {
    let host = Host::new();
    let (_node, address) = host.node();
    let url = host.url(&address);
    let token = url.split_once('#').unwrap().1;
    let ask = |path: &str, authorization: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{authorization}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = ask("/snapshot.json", &format!("Authorization: Bearer {token}\r\n"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let snapshot: Value = serde_json::from_str(body).unwrap();
    assert_eq!(snapshot["node"]["address"], DEVICE);
    for (path, authorization) in [
        ("/snapshot.json", String::new()),
        (
            "/snapshot.json",
            format!("Authorization: Bearer {}\r\n", "0".repeat(64)),
        ),
        ("/snapshot.json", format!("Authorization: Basic {token}\r\n")),
        (&format!("/snapshot.json?token={token}"), String::new()),
    ] {
        let answer = ask(path, &authorization);
        assert!(
            answer.starts_with("HTTP/1.1 401 "),
            "{path} {authorization}: {answer}"
        );
        assert!(!answer.contains("tenants"), "{answer}");
    }
}

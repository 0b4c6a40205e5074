//! The folder and the processes of a demo, all of which end with it, also on Ctrl-C.

use std::fs::{self, DirBuilder, File};
use std::io::{BufRead, BufReader, Read};
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rdmux_push::{Key, file_system_of};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::measure::Cell;

/// File in the folder.
const SERVER_LOG: &str = "serve.log";

/// Processes and folder that Ctrl-C has to clean up.
#[derive(Debug)]
struct Litter {
    children: Vec<Pid>,
    folder: Option<PathBuf>,
}

static LITTER: Mutex<Litter> = Mutex::new(Litter {
    children: Vec::new(),
    folder: None,
});

fn litter() -> MutexGuard<'static, Litter> {
    LITTER.lock()
}

fn clean_up(litter: &mut Litter) {
    for pid in litter.children.drain(..) {
        let _ = kill_process(pid, Signal::KILL);
    }
    if let Some(folder) = litter.folder.take() {
        let _ = fs::remove_dir_all(folder);
    }
}

/// A process of the demo, killed when the value is dropped.
#[derive(Debug)]
pub(super) struct Actor(Child);

impl Actor {
    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(super) fn stdout(&mut self) -> Result<ChildStdout> {
        self.0
            .stdout
            .take()
            .context("the output of this process was taken before")
    }

    pub(super) fn kill(mut self) {
        self.end();
    }

    /// Returns the text that the process wrote to stderr; to be called once it has ended.
    pub(super) fn complaint(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            let _ = stderr.read_to_string(&mut text);
        }
        text.trim().trim_start_matches("rdmux: ").to_owned()
    }

    fn end(&mut self) {
        // While this thread holds the lock, no other thread signals the pid, which is free once it was waited for.
        let mut litter = litter();
        let pid = Pid::from_child(&self.0);
        litter.children.retain(|other| *other != pid);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.end();
    }
}

#[derive(Debug)]
pub(super) struct Stage {
    folder: PathBuf,
    exe: PathBuf,
    prefix: Vec<String>,
}

impl Stage {
    /// Creates a new folder in `parent`, or else on a disk where possible.
    pub(super) fn new(parent: Option<&Path>, prefix: Option<&str>) -> Result<Stage> {
        ctrlc::set_handler(|| {
            // The handler holds the lock to the end: the main thread, whose children vanish, must not end the process its own way.
            let mut litter = litter();
            clean_up(&mut litter);
            std::process::exit(130);
        })
        .context("cannot install signal handlers")?;
        let candidates = match parent {
            Some(parent) => vec![parent.to_owned()],
            None => {
                let temporary = std::env::temp_dir();
                let mut all = vec![temporary, "/var/tmp".into(), "/tmp".into()];
                // Folders on a disk come first; the sort keeps the order otherwise.
                all.sort_by_key(|folder| matches!(file_system_of(folder).as_str(), "tmpfs" | "ramfs"));
                all
            }
        };
        let exe = std::env::current_exe().context("cannot find the executable of this program")?;
        let mut failure = None;
        for parent in candidates {
            let folder = parent.join(format!("rdmux-demo-{}", std::process::id()));
            let mut litter = litter();
            match DirBuilder::new().mode(0o700).create(&folder) {
                Ok(()) => {
                    litter.folder = Some(folder.clone());
                    drop(litter);
                    Key::load_or_create_at(&folder.join("key"))?;
                    let prefix = prefix
                        .unwrap_or_default()
                        .split_whitespace()
                        .map(str::to_owned)
                        .collect();
                    return Ok(Stage { folder, exe, prefix });
                }
                Err(error) => failure = Some(format!("{}: {error}", parent.display())),
            }
        }
        bail!(
            "cannot create a folder for the served file: {}",
            failure.unwrap_or_default()
        )
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns a path in the folder, as an argument.
    pub(super) fn arg(&self, name: &str) -> Result<String> {
        self.arg_of(&self.path(name))
    }

    pub(super) fn arg_of(&self, path: &Path) -> Result<String> {
        let path = path
            .to_str()
            .with_context(|| format!("{}: its name is not UTF-8", path.display()))?;
        Ok(path.to_owned())
    }

    /// Starts a process. `log`: the file that its stderr goes to.
    fn spawn(&self, prefix: &[String], args: &[&str], log: Option<&str>) -> Result<Actor> {
        self.spawn_with(prefix, args, log, &[])
    }

    /// Starts a process with variables of its environment.
    fn spawn_with(
        &self,
        prefix: &[String],
        args: &[&str],
        log: Option<&str>,
        variables: &[(&str, &str)],
    ) -> Result<Actor> {
        let mut words: Vec<&std::ffi::OsStr> = prefix.iter().map(AsRef::as_ref).collect();
        words.push(self.exe.as_ref());
        words.extend(args.iter().map(AsRef::<std::ffi::OsStr>::as_ref));
        // Ctrl-C removes the folder while it has this lock: nobody adds a file meanwhile.
        let mut litter = litter();
        let stderr = match log {
            Some(name) => File::create(self.path(name))
                .context("no log of the server")?
                .into(),
            None => Stdio::piped(),
        };
        let child = Command::new(words[0])
            .args(&words[1..])
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .with_context(|| format!("cannot start {}", words[0].display()))?;
        litter.children.push(Pid::from_child(&child));
        Ok(Actor(child))
    }

    /// Starts a process that uses the stage's folder as the user's runtime folder, with variables of its environment.
    pub(super) fn start(&self, args: &[&str], variables: &[(&str, &str)]) -> Result<Actor> {
        let folder = self.arg_of(&self.folder)?;
        let mut all = vec![("XDG_RUNTIME_DIR", folder.as_str())];
        all.extend(variables);
        self.spawn_with(&[], args, None, &all)
    }

    /// Starts such a process, and waits until it prints that it is ready.
    pub(super) fn start_ready(&self, args: &[&str], variables: &[(&str, &str)]) -> Result<Actor> {
        let mut actor = self.start(args, variables)?;
        if first_line(&mut actor)?.is_empty() {
            bail!("rdmux {} did not start: {}", args[0], actor.complaint());
        }
        Ok(actor)
    }

    /// Starts a server and waits until it listens.
    pub(super) fn serve(&self, args: &[&str], ip: IpAddr) -> Result<Actor> {
        let (key, ip) = (self.arg("key")?, ip.to_string());
        let mut all = vec!["serve", "--json", "--key", &key, "--listen", &ip];
        all.extend(args);
        let mut server = self.spawn(&self.prefix, &all, Some(SERVER_LOG))?;
        if first_line(&mut server)?.is_empty() {
            bail!("the server did not start: {}", self.server_log());
        }
        Ok(server)
    }

    /// Returns the last line that the server wrote to stderr.
    fn server_log(&self) -> String {
        let text = fs::read_to_string(self.path(SERVER_LOG)).unwrap_or_default();
        text.lines().last().unwrap_or_default().to_owned()
    }

    /// Starts a server over TCP; returns its address too.
    pub(super) fn tcp_serve(&self, args: &[&str]) -> Result<(Actor, String)> {
        let mut server = self.spawn(&self.prefix, args, None)?;
        let address = first_line(&mut server)?;
        if address.is_empty() {
            bail!("the TCP server did not start: {}", server.complaint());
        }
        Ok((server, address))
    }

    /// Starts a client with the demo's key.
    pub(super) fn client(&self, args: &[&str]) -> Result<Actor> {
        let key = self.arg("key")?;
        let mut all = args.to_vec();
        all.extend(["--key", &key]);
        self.spawn(&[], &all, None)
    }

    /// Runs a client to its end; returns its report.
    pub(super) fn report(&self, args: &[&str]) -> Result<Value> {
        super::parse(&self.output(args)?)
    }

    /// Runs a measuring client to its end; returns its figures.
    pub(super) fn cells(&self, args: &[&str]) -> Result<Vec<Cell>> {
        let output = self.output(args)?;
        output
            .lines()
            .map(|line| serde_json::from_str(line).with_context(|| format!("'{line}' is not a measurement")))
            .collect()
    }

    fn output(&self, args: &[&str]) -> Result<String> {
        let mut client = self.client(args)?;
        let mut text = String::new();
        client.stdout()?.read_to_string(&mut text)?;
        let status = client.0.wait()?;
        if !status.success() {
            bail!(
                "{}: {} (last of the server: {})",
                args[0],
                client.complaint(),
                self.server_log()
            );
        }
        Ok(text)
    }

    /// Ends a server as Ctrl-C would.
    pub(super) fn end(&self, mut server: Actor) -> Result<()> {
        kill_process(Pid::from_child(&server.0), Signal::TERM)?;
        let status = server.0.wait()?;
        ensure!(
            status.success(),
            "the server ended with {status}: {}{}",
            server.complaint(),
            self.server_log()
        );
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        clean_up(&mut litter());
    }
}

fn first_line(actor: &mut Actor) -> Result<String> {
    let mut line = String::new();
    BufReader::new(actor.stdout()?).read_line(&mut line)?;
    Ok(line.trim_end().to_owned())
}

/// Returns the CPUs that this process may run on.
pub(super) fn cpus() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect();
    ensure!(!cpus.is_empty(), "no CPU to run on");
    Ok(cpus)
}

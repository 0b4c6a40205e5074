//! Processes of this program that take part in a measurement: the servers and clients of [`super::scale`] and [`super::load`].
//!
//! Such a process prints [`READY`] once it is, begins when its standard input ends, and then prints one line, its result. One that fails prints
//! the reason instead.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};

const READY: &str = "ready";
/// Begins the line of one that failed.
const FAILED: &str = "failed: ";

/// Such a process and those that it started, ended when the value is dropped.
pub(super) struct Side {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Side {
    /// Starts a process; returns once it is ready.
    pub(super) fn start(command: &mut Command) -> Result<Side> {
        let mut side = Side::spawn(command)?;
        let line = side.line()?;
        ensure!(line == READY, "a process of the bench printed {line:?}");
        Ok(side)
    }

    /// Starts one that may begin at once: nothing waits until it is ready.
    pub(super) fn spawn(command: &mut Command) -> Result<Side> {
        command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = BufReader::new(child.stdout.take().context("no pipe")?);
        Ok(Side { child, output })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let line = line.trim();
        ensure!(
            !line.is_empty(),
            "a process of the bench was killed: it took too long"
        );
        if let Some(why) = line.strip_prefix(FAILED) {
            bail!("{why}");
        }
        Ok(line.to_owned())
    }

    /// Has it begin, or a server end.
    pub(super) fn begin(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Waits for its result.
    pub(super) fn result(&mut self) -> Result<String> {
        self.line()
    }

    /// Has a server end, and waits until it has, or a client that has printed its result.
    pub(super) fn end(mut self) -> Result<()> {
        self.begin();
        self.child.wait()?;
        Ok(())
    }

    /// Ends it by a signal that no process can handle.
    pub(super) fn kill(&self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// Reports to the process that started this one.
pub(super) fn say(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Reports that this process is ready.
pub(super) fn say_ready() -> Result<()> {
    say(READY)
}

/// Reports the reason for which this process ends early.
pub(super) fn say_failed(error: &anyhow::Error) -> Result<()> {
    say(&format!("{FAILED}{}", format!("{error:#}").replace('\n', " ")))
}

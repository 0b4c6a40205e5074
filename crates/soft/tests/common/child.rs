//! Other processes, for what one process alone cannot show.

use std::io::Write;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::Receiver;

use super::{LONG, told};

/// This test binary, started again to run its test `child` alone. It ends with this value at the latest.
pub(crate) struct ChildProcess {
    process: Child,
    stdin: ChildStdin,
    events: Receiver<String>,
}

impl ChildProcess {
    /// Starts the process; `set` gives it the variables by which it knows that it is the child, and what it is to do.
    pub(crate) fn start(set: impl FnOnce(&mut Command)) -> ChildProcess {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
        set(&mut command);
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        ChildProcess {
            stdin: process.stdin.take().unwrap(),
            events: told(process.stdout.take().unwrap()),
            process,
        }
    }

    /// Returns the next line that it reports.
    #[track_caller]
    pub(crate) fn next(&self) -> String {
        let event = self.events.recv_timeout(LONG);
        event.unwrap_or_else(|why| panic!("process {}: {why}", self.process.id()))
    }

    #[track_caller]
    pub(crate) fn expect(&self, event: &str) {
        assert_eq!(self.next(), event, "process {}", self.process.id());
    }

    /// Writes a line to its standard input.
    #[track_caller]
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// Kills it, and returns when it is dead.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

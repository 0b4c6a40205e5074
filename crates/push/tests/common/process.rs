//! Other processes, for what one process alone cannot show.
#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A test of this program in a process of its own, killed when this is dropped. It prints lines that begin with `@`.
pub(crate) struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(test: &str, environment: &[(&str, &str)]) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Process { child, lines }
    }

    /// Returns the next line that the process prints for this test, without its `@`.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            // The test harness may have begun the line.
            if let Some((_, text)) = line.trim_end().split_once('@') {
                return text.to_owned();
            }
            line.clear();
        }
        panic!("the process ended without a word");
    }

    /// Gives the process a line. One that has ended does not get it.
    pub(crate) fn say(&mut self, line: &str) {
        let _ = writeln!(self.child.stdin.as_mut().unwrap(), "{line}");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

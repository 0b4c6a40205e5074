//! Processes that end with this one, and the signals that end this one.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Time between SIGTERM and SIGKILL for a process that does not end.
const GRACE: Duration = Duration::from_secs(2);
/// Longer than any check.
const UNLIMITED: Duration = Duration::from_secs(1 << 20);
/// Interval at which a condition without a descriptor is evaluated again.
const AGAIN: Duration = Duration::from_millis(2);

/// A signal has ended the check, which leaves no process and no file behind.
#[derive(Debug, thiserror::Error)]
#[error("ended by signal {0}")]
pub(crate) struct Interrupted(pub(crate) u8);

/// SIGINT, SIGTERM and SIGHUP, which every wait of this module returns as [`Interrupted`].
pub(crate) struct Signals {
    first: Arc<AtomicUsize>,
    /// Readable from the first signal on.
    arrived: UnixStream,
}

impl Signals {
    pub(crate) fn catch() -> Result<Self> {
        let (arrived, sender) = UnixStream::pair()?;
        let first = Arc::new(AtomicUsize::new(0));
        for (signal, number) in [(SIGINT, 2), (SIGTERM, 15), (SIGHUP, 1)] {
            // In this order, so that the number is there when the byte is.
            signal_hook::flag::register_usize(signal, first.clone(), number)?;
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        Ok(Self { first, arrived })
    }

    /// Fails if a signal has arrived.
    pub(crate) fn check(&self) -> Result<()> {
        self.wait(None, Duration::ZERO).map(|_| ())
    }

    /// Waits for the end of a process, up to `limit`, and returns whether it has ended.
    fn wait(&self, process: Option<&OwnedFd>, limit: Duration) -> Result<bool> {
        let deadline = Instant::now() + limit;
        loop {
            let mut watched = vec![PollFd::new(&self.arrived, PollFlags::IN)];
            watched.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
            let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
            match poll(&mut watched, Some(&left)) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            if !watched[0].revents().is_empty() {
                let number = self.first.load(Ordering::Relaxed);
                return Err(Interrupted(u8::try_from(number)?).into());
            }
            return Ok(watched
                .get(1)
                .is_some_and(|process| !process.revents().is_empty()));
        }
    }

    /// Waits until a condition holds, up to `limit`, and returns whether it does.
    pub(crate) fn until(&self, limit: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<bool> {
        let deadline = Instant::now() + limit;
        while !holds()? {
            if Instant::now() > deadline {
                return Ok(false);
            }
            self.wait(None, AGAIN)?;
        }
        Ok(true)
    }
}

/// A process with a process group of its own, which ends when this is dropped.
pub(crate) struct Job {
    child: Child,
    /// Readable once the process has ended.
    pidfd: OwnedFd,
    deadline: Instant,
    status: Option<ExitStatus>,
}

impl Job {
    /// Starts a command, which may take `limit`.
    pub(crate) fn start(command: &mut Command, limit: Duration) -> Result<Self> {
        let program = command.get_program().to_owned();
        let mut child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pidfd = match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                child.kill()?;
                child.wait()?;
                return Err(error.into());
            }
        };
        let deadline = Instant::now() + limit;
        Ok(Self {
            child,
            pidfd,
            deadline,
            status: None,
        })
    }

    /// Starts a command without a limit, and returns its standard input and output, which are pipes.
    pub(crate) fn start_piped(command: &mut Command) -> Result<(Self, ChildStdin, ChildStdout)> {
        let mut job = Self::start(command, UNLIMITED)?;
        let pipes = job.child.stdin.take().zip(job.child.stdout.take());
        let (input, output) = pipes.context("the command has no pipes")?;
        Ok((job, input, output))
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn has_ended(&self, signals: &Signals) -> Result<bool> {
        Ok(self.status.is_some() || signals.wait(Some(&self.pidfd), Duration::ZERO)?)
    }

    /// Waits until a condition holds or the process has ended, for a minute at most.
    pub(crate) fn until(&self, signals: &Signals, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !holds()? && Instant::now() < deadline && !signals.wait(Some(&self.pidfd), AGAIN)? {}
        Ok(())
    }

    /// Waits for the process and returns its status; a process over its limit is ended.
    pub(crate) fn wait(&mut self, signals: &Signals) -> Result<ExitStatus> {
        if self.status.is_none() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if !signals.wait(Some(&self.pidfd), left)? {
                self.signal(Signal::TERM);
            }
        }
        self.reap()
    }

    /// Ends the process and all of its group.
    pub(crate) fn end(&mut self) -> Result<ExitStatus> {
        if self.status.is_none() {
            self.signal(Signal::TERM);
        }
        self.reap()
    }

    /// Takes the status of a process that has ended or been told to end.
    fn reap(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.status {
            return Ok(status);
        }
        let mut watched = [PollFd::new(&self.pidfd, PollFlags::IN)];
        // An interrupted wait only makes the grace shorter.
        let _ended = poll(&mut watched, Some(&Timespec::try_from(GRACE)?));
        // Also ends what is left of the group. The process is not reaped yet, so its number cannot be another group's.
        self.signal(Signal::KILL);
        let status = self.child.wait()?;
        self.status = Some(status);
        Ok(status)
    }

    fn signal(&self, signal: Signal) {
        // Fails only where the whole group has ended.
        let _ended = kill_process_group(Pid::from_child(&self.child), signal);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // A status or an error has no receiver here.
        let _ended = self.end();
    }
}

#[cfg(test)]
#[allow(non_snake_case, reason = "tests are named function__case")]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    use super::*;

    /// Starts a shell with a child in its group, and returns the child's number.
    fn shell_with_child(limit: Duration) -> (Job, u32) {
        let mut command = Command::new("sh");
        command
            .args(["-c", "sleep 1000 & echo $!; wait"])
            .stdout(Stdio::piped());
        let mut job = Job::start(&mut command, limit).unwrap();
        let mut line = String::new();
        let output = job.child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        (job, line.trim().parse().unwrap())
    }

    /// Returns whether a process has ended; nobody may have reaped it yet.
    fn has_ended(process: u32) -> bool {
        let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else {
            return true;
        };
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with(['Z', 'X']))
    }

    fn expect_end(process: u32) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !has_ended(process) {
            assert!(Instant::now() < deadline, "process {process} runs on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn job__dropped_ends_its_group() {
        let (job, child) = shell_with_child(UNLIMITED);
        assert!(!has_ended(child));
        drop(job);
        expect_end(child);
    }

    #[test]
    fn job__over_its_limit_is_ended() {
        let signals = Signals::catch().unwrap();
        let (mut job, child) = shell_with_child(Duration::ZERO);
        assert!(!job.wait(&signals).unwrap().success());
        expect_end(child);
    }

    #[test]
    fn job__status_stays() {
        let signals = Signals::catch().unwrap();
        let mut job = Job::start(Command::new("sh").args(["-c", "exit 3"]), UNLIMITED).unwrap();
        assert_eq!(job.wait(&signals).unwrap().code(), Some(3));
        assert!(job.has_ended(&signals).unwrap());
        assert_eq!(job.end().unwrap().code(), Some(3));
    }
}

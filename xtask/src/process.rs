//! Processes that end with this one, and the signals that end this one.

use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Time between SIGTERM and SIGKILL for a process that does not end.
const GRACE: Duration = Duration::from_secs(2);
/// The limit of [`Job::start_piped`], which is longer than any check.
const UNLIMITED: Duration = Duration::from_secs(1 << 20);
/// The limit of [`output`], within which a compiler on a slow machine ends.
const OUTPUT_LIMIT: Duration = Duration::from_secs(300);
/// Interval at which a condition without a descriptor is evaluated again.
const AGAIN: Duration = Duration::from_millis(2);

/// A signal has ended the check, which leaves no process and no file behind.
#[derive(Debug, thiserror::Error)]
#[error("ended by signal {0}")]
pub(crate) struct Interrupted(pub(crate) u8);

/// SIGINT, SIGTERM and SIGHUP, which every wait of this module returns as [`Interrupted`].
pub(crate) struct Signals {
    first: Arc<OnceLock<u8>>,
    /// Readable from the first signal on.
    arrived: UnixStream,
    /// Keeps the thread in its wait where all of the signals are ignored.
    _sender: UnixStream,
}

impl Signals {
    /// Catches the signals, except those that this process was started to ignore, as `nohup` starts programs.
    pub(crate) fn catch() -> Result<Self> {
        let ignored = ignored()?;
        let (mut caught, sender) = UnixStream::pair()?;
        let latest = Arc::new(AtomicUsize::new(0));
        for (signal, number) in [(SIGINT, 2), (SIGTERM, 15), (SIGHUP, 1)] {
            if ignored & (1 << (number - 1)) == 0 {
                // In this order, so that the number is there when the byte is.
                signal_hook::flag::register_usize(signal, latest.clone(), number)?;
                signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
            }
        }
        let first = Arc::new(OnceLock::new());
        let (arrived, notice) = UnixStream::pair()?;
        // The thread keeps the first signal's number from a later signal, while the others do not wait.
        thread::Builder::new().spawn({
            let first = first.clone();
            move || {
                // Fails only once `Signals` is dropped.
                if caught.read_exact(&mut [0]).is_ok() {
                    first.get_or_init(|| u8::try_from(latest.load(Ordering::Relaxed)).unwrap_or(0));
                    drop(notice);
                }
            }
        })?;
        Ok(Self {
            first,
            arrived,
            _sender: sender,
        })
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
                return Err(Interrupted(self.first.get().copied().unwrap_or(0)).into());
            }
            return Ok(watched
                .get(1)
                .is_some_and(|process| !process.revents().is_empty()));
        }
    }

    /// Waits until a condition holds or `job` has ended, up to `limit`, and returns whether the condition holds.
    pub(crate) fn until(
        &self,
        job: Option<&Job>,
        limit: Duration,
        mut holds: impl FnMut() -> Result<bool>,
    ) -> Result<bool> {
        let deadline = Instant::now() + limit;
        while !holds()? {
            if self.wait(job.map(|job| &job.pidfd), AGAIN)? || Instant::now() > deadline {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the signals that this process ignores, each as the bit of its number less 1.
fn ignored() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.context("/proc/self/status has no SigIgn")?;
    Ok(u64::from_str_radix(mask.trim(), 16)?)
}

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The process ended by itself or was told to by [`Job::end`].
    Status(ExitStatus),
    /// The process was ended at its limit.
    OverLimit,
}

impl End {
    pub(crate) fn success(self) -> bool {
        matches!(self, Self::Status(status) if status.success())
    }
}

impl Display for End {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::OverLimit => f.write_str("not ended within its limit"),
        }
    }
}

/// The end and the output of a process.
pub(crate) struct Output {
    pub(crate) end: End,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a command that takes no input to its end.
pub(crate) fn output(command: &Command, signals: &Signals) -> Result<Output> {
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut job = Job::start(command, stdout.try_clone()?, stderr.try_clone()?, OUTPUT_LIMIT)?;
    Ok(Output {
        end: job.wait(signals)?,
        stdout: text(&mut stdout)?,
        stderr: text(&mut stderr)?,
    })
}

fn text(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A process with a process group of its own, which ends when this is dropped.
pub(crate) struct Job {
    child: Child,
    /// Readable once the process has ended.
    pidfd: OwnedFd,
    deadline: Instant,
    end: Option<End>,
}

impl Job {
    /// Starts a command, which has no input and may take `limit`. If this process is killed, `timeout` ends the command's group after the limit.
    pub(crate) fn start(command: &Command, output: File, errors: File, limit: Duration) -> Result<Self> {
        // Later than the end of this limit, which is the one that counts.
        let late = limit + 2 * GRACE;
        let mut guarded = Command::new("timeout");
        guarded
            .args(["-k", &GRACE.as_secs().to_string(), &late.as_secs().to_string()])
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => guarded.env(name, value),
                None => guarded.env_remove(name),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            guarded.current_dir(folder);
        }
        Self::spawn(&mut guarded, limit)
    }

    /// Starts a command without a limit, which ends when its input does, and returns its standard input and output.
    pub(crate) fn start_piped(command: &mut Command) -> Result<(Self, ChildStdin, ChildStdout)> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut job = Self::spawn(command, UNLIMITED)?;
        let pipes = job.child.stdin.take().zip(job.child.stdout.take());
        let (input, output) = pipes.context("the command has no pipes")?;
        Ok((job, input, output))
    }

    fn spawn(command: &mut Command, limit: Duration) -> Result<Self> {
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
        Ok(Self {
            child,
            pidfd,
            deadline: Instant::now() + limit,
            end: None,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ends the process after `limit` from now, if its own limit is not earlier.
    pub(crate) fn limit(&mut self, limit: Duration) {
        self.deadline = self.deadline.min(Instant::now() + limit);
    }

    pub(crate) fn has_ended(&self, signals: &Signals) -> Result<bool> {
        Ok(self.end.is_some() || signals.wait(Some(&self.pidfd), Duration::ZERO)?)
    }

    /// Waits for the end of the process; a process over its limit is ended, and has failed whatever its status is.
    pub(crate) fn wait(&mut self, signals: &Signals) -> Result<End> {
        if let Some(end) = self.end {
            return Ok(end);
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let in_time = signals.wait(Some(&self.pidfd), left)?;
        if !in_time {
            self.signal(Signal::TERM);
        }
        let status = self.reap()?;
        let end = if in_time {
            End::Status(status)
        } else {
            End::OverLimit
        };
        self.end = Some(end);
        Ok(end)
    }

    /// Ends the process and all of its group.
    pub(crate) fn end(&mut self) -> Result<End> {
        if let Some(end) = self.end {
            return Ok(end);
        }
        self.signal(Signal::TERM);
        let end = End::Status(self.reap()?);
        self.end = Some(end);
        Ok(end)
    }

    /// Takes the status of a process that has ended or been told to end.
    fn reap(&mut self) -> Result<ExitStatus> {
        let mut watched = [PollFd::new(&self.pidfd, PollFlags::IN)];
        // An interrupted wait only makes the grace shorter.
        let _ended = poll(&mut watched, Some(&Timespec::try_from(GRACE)?));
        // Also ends what is left of the group. The process is not reaped yet, so its number cannot be another group's.
        self.signal(Signal::KILL);
        Ok(self.child.wait()?)
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
    use std::io::{BufRead, BufReader};

    use super::*;

    /// Starts a shell with a child in its group and the given commands, and returns the child's number. The child's sleep stands for a
    /// program that does not end by itself: nobody waits for its time.
    fn shell_with_child(commands: &str) -> (Job, u32) {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{commands}; sleep 1000 & echo $!; wait")]);
        let (job, _input, output) = Job::start_piped(&mut command).unwrap();
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).unwrap();
        (job, line.trim().parse().unwrap())
    }

    fn null() -> File {
        File::create("/dev/null").unwrap()
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
            thread::yield_now();
        }
    }

    #[test]
    fn job__dropped_ends_its_group() {
        let (job, child) = shell_with_child(":");
        assert!(!has_ended(child));
        drop(job);
        expect_end(child);
    }

    #[test]
    fn job__over_its_limit_is_ended() {
        let signals = Signals::catch().unwrap();
        for commands in [":", "trap 'exit 0' TERM"] {
            let (mut job, child) = shell_with_child(commands);
            job.limit(Duration::ZERO);
            job.limit(UNLIMITED);
            assert_eq!(job.wait(&signals).unwrap(), End::OverLimit, "{commands}");
            assert!(!job.wait(&signals).unwrap().success());
            expect_end(child);
        }
    }

    #[test]
    fn job__status_stays() {
        let signals = Signals::catch().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "exit $STATUS"]).env("STATUS", "3");
        let mut job = Job::start(&command, null(), null(), UNLIMITED).unwrap();
        let end = job.wait(&signals).unwrap();
        assert!(matches!(end, End::Status(status) if status.code() == Some(3)));
        assert!(job.has_ended(&signals).unwrap());
        assert_eq!(job.end().unwrap(), end);
    }

    #[test]
    fn output__has_both_streams() {
        let signals = Signals::catch().unwrap();
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $0; pwd >&2; cat", "out"])
            .current_dir("/");
        let output = output(&command, &signals).unwrap();
        assert!(output.end.success());
        assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("out\n", "/\n"));
    }
}

//! `rdmux push --stream`: copies memory that another process keeps writing, in rounds, as the migration of a virtual machine does.
//!
//! Each round compares a checksum of each page to find the pages written since the last one. That needs no right over the writer and no
//! help from it, and works for every file: the kernel's own ways (soft-dirty bits, userfaultfd, PAGEMAP_SCAN) report on the page tables of
//! one process, which must be traced or must help itself. The price is reading all memory once a round, in the last round while the writer
//! is paused.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rdmux_push::{Client, Crc64, Mapping};
use rdmux_verbs::Memory;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use super::{Args, FLUSH, interrupted};

/// Bytes compared as one unit.
const PAGE: usize = 4096;
/// Maximum number of rounds while the writer runs.
const ROUNDS_MAX: usize = 30;

/// What only streaming takes.
#[derive(clap::Args, Debug)]
pub(super) struct StreamArgs {
    /// Stream memory that another process is writing (FILE is a memfd: /proc/PID/fd/N): copy the changed bytes in rounds, pause the writer
    /// for the last round, and let it continue.
    #[arg(
        long,
        conflicts_with = "resume",
        requires = "pausing",
        help_heading = "Streaming"
    )]
    pub(super) stream: bool,
    /// Pause this process for the last round (SIGSTOP, SIGCONT).
    #[arg(long, value_name = "PID", group = "pausing", requires = "stream", help_heading = "Streaming", value_parser = clap::value_parser!(i32).range(1..))]
    pause_pid: Option<i32>,
    /// Command that pauses the writer; it must return only when the writer writes no more.
    #[arg(
        long,
        value_name = "COMMAND",
        group = "pausing",
        requires = "stream",
        help_heading = "Streaming"
    )]
    pause: Option<String>,
    /// Command that lets the writer continue.
    #[arg(long, value_name = "COMMAND", requires = "pause", help_heading = "Streaming")]
    unpause: Option<String>,
    /// Pause the writer when at most this number of bytes changed in a round.
    #[arg(long, value_name = "BYTES", default_value = "1M", requires = "stream", value_parser = super::parse_flush_every, help_heading = "Streaming")]
    pause_below: u64,
}

/// A round of copying.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Round {
    /// Bytes that had changed.
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) paused: bool,
}

/// The paused writer; it goes on when this is dropped.
struct Paused<'a>(&'a StreamArgs, Instant);

impl<'a> Paused<'a> {
    fn new(args: &'a StreamArgs) -> Result<Paused<'a>> {
        let paused = Paused(args, Instant::now());
        if let Some(pid) = args.pause_pid {
            let process = Pid::from_raw(pid).context("there is no such process")?;
            kill_process(process, Signal::STOP).with_context(|| format!("cannot stop process {pid}"))?;
            wait_stopped(pid)?;
        }
        if let Some(command) = &args.pause {
            shell(command)?;
        }
        Ok(paused)
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if let Some(process) = self.0.pause_pid.and_then(Pid::from_raw) {
            let _ = kill_process(process, Signal::CONT);
        }
        if let Some(command) = &self.0.unpause
            && let Err(error) = shell(command)
        {
            crate::output::error(&error);
        }
    }
}

fn shell(command: &str) -> Result<()> {
    let status = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .status()?;
    ensure!(status.success(), "'{command}' failed: {status}");
    Ok(())
}

/// Waits until all threads of a process are stopped: a signal stops each thread when it gets there.
fn wait_stopped(pid: i32) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    let stopped = || -> std::io::Result<bool> {
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let stat = std::fs::read_to_string(task?.path().join("stat"))?;
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            if !matches!(state, Some('T' | 't' | 'Z' | 'X')) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    while !stopped().with_context(|| format!("process {pid}"))? {
        ensure!(Instant::now() < deadline, "process {pid} does not stop");
        // The kernel notifies only the parent of a process, so poll.
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// A copy of memory in progress.
pub(super) struct Stream<'a> {
    args: &'a Args,
    file: &'a File,
    length: u64,
    /// Checksum of each page as it was sent last.
    sums: Vec<u64>,
    pub(super) rounds: Vec<Round>,
    pub(super) paused_seconds: f64,
}

impl<'a> Stream<'a> {
    pub(super) fn new(args: &'a Args, file: &'a File, length: u64) -> Stream<'a> {
        Stream {
            args,
            file,
            length,
            sums: vec![0; length.div_ceil(PAGE as u64) as usize],
            rounds: Vec::new(),
            paused_seconds: 0.0,
        }
    }

    /// Copies until both sides have the memory of the moment of the pause; returns its checksum.
    pub(super) fn run(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        told: &mut dyn FnMut(&Round),
    ) -> Result<u64> {
        let chunk = u64::from(self.args.common.chunk).max(PAGE as u64);
        let buffer = client.buffer((chunk * u64::from(self.args.common.depth)) as usize)?;
        loop {
            let (bytes, _) = self.round(client, mapping, &buffer, false)?;
            if let Some(round) = self.rounds.last() {
                told(round);
            }
            // When a round is as long as the one before, the writer is as fast as this copy, and more rounds do not help.
            let shrinks = match &self.rounds[..] {
                [.., before, last] => last.bytes * 10 < before.bytes * 9,
                _ => true,
            };
            if bytes <= self.args.stream.pause_below || !shrinks || self.rounds.len() >= ROUNDS_MAX {
                break;
            }
        }
        let paused = Paused::new(&self.args.stream)?;
        let (_, crc) = self.round(client, mapping, &buffer, true)?;
        self.paused_seconds = paused.1.elapsed().as_secs_f64();
        drop(paused);
        if let Some(round) = self.rounds.last() {
            told(round);
        }
        Ok(crc)
    }

    /// Sends the pages that differ from those sent last, and flushes; returns their bytes, and the checksum of all pages.
    fn round(
        &mut self,
        client: &mut Client,
        mapping: &Mapping,
        buffer: &rdmux_push::client::Buffer,
        paused: bool,
    ) -> Result<(u64, u64)> {
        let begin = Instant::now();
        let first = self.rounds.is_empty();
        let chunk = u64::from(self.args.common.chunk).max(PAGE as u64) / PAGE as u64 * PAGE as u64;
        let depth = u64::from(self.args.common.depth);
        let base = self.args.target.offset;
        let mut bytes = vec![0; chunk as usize];
        let (mut crc, mut changed, mut writes, mut done) = (Crc64::default(), 0, 0u64, 0u64);
        for at in (0..self.length).step_by(chunk as usize) {
            ensure!(!interrupted(), "interrupted");
            let part = &mut bytes[..(self.length - at).min(chunk) as usize];
            self.file
                .read_exact_at(part, at)
                .with_context(|| format!("cannot read {} bytes at {at}: did it shrink?", part.len()))?;
            crc.update(part);
            // Runs of pages that changed.
            let mut run: Option<(usize, usize)> = None;
            let mut runs = Vec::new();
            for (nth, page) in part.chunks(PAGE).enumerate() {
                let mut sum = Crc64::default();
                sum.update(page);
                let known = &mut self.sums[(at / PAGE as u64) as usize + nth];
                let differs = first || *known != sum.value();
                *known = sum.value();
                run = match (run, differs) {
                    (Some((from, _)), true) => Some((from, nth * PAGE + page.len())),
                    (None, true) => Some((nth * PAGE, nth * PAGE + page.len())),
                    (Some(ended), false) => {
                        runs.push(ended);
                        None
                    }
                    (None, false) => None,
                };
            }
            runs.extend(run);
            for (from, to) in runs {
                while writes - done >= depth {
                    client.next_done()?;
                    done += 1;
                }
                let slot = writes % depth * chunk;
                buffer.memory().write(slot, &part[from..to])?;
                client.post_write(
                    mapping,
                    base + at + from as u64,
                    buffer,
                    slot,
                    (to - from) as u32,
                    0,
                )?;
                writes += 1;
                changed += (to - from) as u64;
            }
        }
        client.drain()?;
        // Flush in pieces of a size that one request may have.
        let piece = 1u64 << 30;
        for at in (0..self.length).step_by(piece as usize) {
            let length = piece.min(self.length - at);
            client.post_flush(mapping, base + at, length, mapping.strongest(), FLUSH | at)?;
        }
        client.drain()?;
        self.rounds.push(Round {
            bytes: changed,
            seconds: begin.elapsed().as_secs_f64(),
            paused,
        });
        Ok((changed, crc.value()))
    }
}

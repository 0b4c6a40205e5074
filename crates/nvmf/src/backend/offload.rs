//! The offload engine's part of a drive: a queue pair that no thread has, and its counters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdmux_drive::{Action, Buffer, Command, Completion, Refused, RefusedReason};
use strum::{IntoStaticStr, VariantArray};

use super::drive::{DriveBackend, OFFLOAD_QUEUE, OFFLOAD_TOKEN};
use super::peer::PeerData;

/// A counter of a namespace whose commands the offload engine carries out. Their names, and what they count, are those of the offload of ConnectX: of
/// mlx5's query of an NVMF namespace.
#[derive(Clone, Copy, Debug, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum OffloadCounter {
    /// Reads that were carried out.
    NumReadCmd,
    /// Their blocks.
    NumReadBlocks,
    /// Writes that were carried out.
    NumWriteCmd,
    /// Their blocks.
    NumWriteBlocks,
    /// Those of them whose data came with their capsules.
    NumWriteInlineCmd,
    /// Flushes that were carried out.
    NumFlushCmd,
    /// Commands that the software target got after the engine had begun them, and those that failed with the engine.
    NumErrorCmd,
    /// Those of them that the drive has failed, or did not complete.
    NumBackendErrorCmd,
    /// Time from the begin of the last read to its completion by the drive, in microseconds.
    LastReadLatency,
    /// As [`OffloadCounter::LastReadLatency`], of the last write.
    LastWriteLatency,
    /// Commands that the engine has now.
    QueueDepth,
}

impl OffloadCounter {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns true if it only grows, and those of several namespaces have a sum.
    pub const fn is_summed(self) -> bool {
        !matches!(
            self,
            OffloadCounter::LastReadLatency | OffloadCounter::LastWriteLatency | OffloadCounter::QueueDepth
        )
    }
}

/// The counters of a namespace.
#[derive(Debug, Default)]
pub struct OffloadCounts([AtomicU64; OffloadCounter::VARIANTS.len()]);

impl OffloadCounts {
    /// Returns the value of a counter.
    pub fn get(&self, counter: OffloadCounter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }

    /// Returns all counters with their values.
    pub fn iter(&self) -> impl Iterator<Item = (OffloadCounter, u64)> {
        let counters = OffloadCounter::VARIANTS.iter();
        counters.map(|counter| (*counter, self.get(*counter)))
    }

    fn count(&self, counter: OffloadCounter) {
        self.add(counter, 1);
    }

    fn add(&self, counter: OffloadCounter, number: u64) {
        self.0[counter as usize].fetch_add(number, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, counter: OffloadCounter, value: u64) {
        self.0[counter as usize].store(value, Ordering::Relaxed);
    }

    /// Counts a command that the drive has carried out; `is_inline`: its data came in the capsule.
    pub(crate) fn count_done(&self, action: Action, blocks: u64, is_inline: bool, took: Duration) {
        let (commands, all_blocks, latency) = match action {
            Action::Read => (
                OffloadCounter::NumReadCmd,
                OffloadCounter::NumReadBlocks,
                OffloadCounter::LastReadLatency,
            ),
            Action::Write => (
                OffloadCounter::NumWriteCmd,
                OffloadCounter::NumWriteBlocks,
                OffloadCounter::LastWriteLatency,
            ),
            _ => return self.count(OffloadCounter::NumFlushCmd),
        };
        self.count(commands);
        self.add(OffloadCounter::NumWriteInlineCmd, is_inline.into());
        self.add(all_blocks, blocks);
        self.set(latency, took.as_micros() as u64);
    }
}

/// Calls of the offload engine, which waits for nothing.
impl DriveBackend {
    /// Returns the counters of the offload engine; `None`: it has no queue pair of this drive.
    pub fn offload(&self) -> Option<&OffloadCounts> {
        self.offload.as_ref()
    }

    /// Copies data of a write into memory that the drive reaches. `None`: there is no room.
    pub(crate) fn stage(&self, bytes: &[u8]) -> Option<PeerData> {
        let buffer = self.pool().allocate(bytes.len())?;
        buffer.write(0, bytes).ok()?;
        self.book_copy(&buffer, bytes);
        Some(PeerData(vec![buffer]))
    }

    /// Submits a command to the engine's queue pair, by a token of the engine's own. Only one Flush of the drive runs at a time: another one is refused as by a
    /// full queue.
    ///
    /// # Errors
    /// The queue pair does not take it; the buffers are in the error.
    pub(crate) fn submit_offloaded(
        &self,
        command: Command,
        data: Vec<Buffer>,
        token: u64,
    ) -> Result<(), Refused> {
        let refused = |reason, data| Err(Refused { reason, data });
        let token = token | OFFLOAD_TOKEN;
        let flushing = match command.action {
            Action::Flush => match self.flushes.try_begin() {
                None => return refused(RefusedReason::Full, data),
                flushing => flushing,
            },
            _ => None,
        };
        let mut shared = self.shared();
        // After a reset the drive may have other blocks, and after a failed Flush it is not written. The software target tells the host.
        let writes = command.action != Action::Read;
        if !self.has_same_blocks(&shared.drive) || (writes && self.flushes.check().is_err()) {
            return refused(RefusedReason::NoNamespace, data);
        }
        let now = Instant::now();
        shared.drive.submit(now, OFFLOAD_QUEUE, command, data, token)?;
        if let Some(flushing) = flushing {
            shared.flushing = Some((token, flushing));
        }
        Ok(())
    }

    /// Returns the end of a command of the engine, with its token, if one has ended.
    pub(crate) fn poll_offloaded(&self) -> Option<Completion> {
        let mut shared = self.shared();
        if shared.offloaded.is_empty() {
            shared.poll();
        }
        let mut completion = shared.offloaded.pop_front()?;
        completion.token &= !OFFLOAD_TOKEN;
        Some(completion)
    }

    /// Drops the ends of commands of an engine that is no more. Returns true once the drive has none of its commands, and so none of its buffers.
    pub(crate) fn drain_offloaded(&self) -> bool {
        let mut shared = self.shared();
        shared.poll();
        shared.offloaded.clear();
        shared.drive.outstanding(OFFLOAD_QUEUE) == 0
    }

    /// Counts at the engine.
    pub(crate) fn count_offloaded(&self, counter: OffloadCounter) {
        self.offload.iter().for_each(|counts| counts.count(counter));
    }
}

//! Counts of what queues have carried out. Each has counters of its own, which only its thread changes; whoever asks adds them up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmux_verbs::sync::Mutex;
use rdmux_wire::nvme::HealthLog;

/// Counters of the commands that a queue has carried out. Only the queue's thread changes them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    media_errors: AtomicU64,
}

impl Counters {
    fn add(counter: &AtomicU64, value: u64) {
        // One thread writes it: no atomic addition is needed.
        counter.store(counter.load(Ordering::Relaxed) + value, Ordering::Relaxed);
    }

    /// Counts a command that was admitted.
    pub(super) fn read(&self, bytes: u32) {
        Counters::add(&self.reads, 1);
        Counters::add(&self.read_bytes, bytes.into());
    }

    /// As [`Counters::read`].
    pub(super) fn wrote(&self, bytes: u32) {
        Counters::add(&self.writes, 1);
        Counters::add(&self.written_bytes, bytes.into());
    }

    pub(super) fn media_error(&self) {
        Counters::add(&self.media_errors, 1);
    }

    fn add_to(&self, sum: &mut HealthLog) {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        sum.reads += value(&self.reads);
        sum.read_bytes += value(&self.read_bytes);
        sum.writes += value(&self.writes);
        sum.written_bytes += value(&self.written_bytes);
        sum.media_errors += value(&self.media_errors);
    }
}

/// Counters of the queues that there are, and the sum of those that were.
#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<(HealthLog, Vec<Arc<Counters>>)>);

impl Tally {
    pub(super) fn begin(&self, counters: Arc<Counters>) {
        self.0.lock().1.push(counters);
    }

    pub(super) fn end(&self, counters: &Arc<Counters>) {
        let mut all = self.0.lock();
        let (sum, queues) = &mut *all;
        counters.add_to(sum);
        queues.retain(|queue| !Arc::ptr_eq(queue, counters));
    }

    /// Returns what all of them have carried out, which never gets less.
    pub(super) fn sum(&self) -> HealthLog {
        let all = self.0.lock();
        let (mut sum, queues) = (all.0, &all.1);
        queues.iter().for_each(|queue| queue.add_to(&mut sum));
        sum
    }
}

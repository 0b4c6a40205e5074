//! What a server counts and measures. Figures alone: no names, no peers, no payload.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rdmux_verbs::Histogram;
use rdmux_wire::push::Message;

use super::Event;

/// What clients ask for by message; WRITE, READ and FLUSH go past the server and are the device's to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// To map.
    Map,
    /// To end a mapping.
    Unmap,
    /// To let go of a mapping's range.
    Release,
    /// To flush, where FLUSH does not reach or the client has none.
    Flush,
    /// To write, for a client without a mapping.
    Write,
    /// To read, for a client without a mapping.
    Read,
    /// To sum up a range.
    Checksum,
    /// To tell of a region, or of all.
    Stat,
}

impl RequestKind {
    /// All of them.
    pub const ALL: [RequestKind; 8] = [
        RequestKind::Map,
        RequestKind::Unmap,
        RequestKind::Release,
        RequestKind::Flush,
        RequestKind::Write,
        RequestKind::Read,
        RequestKind::Checksum,
        RequestKind::Stat,
    ];

    /// What an answer without an error is the answer to.
    fn answered_by(answer: &Message) -> Option<RequestKind> {
        Some(match answer {
            Message::Mapped { .. } => RequestKind::Map,
            Message::Unmapped => RequestKind::Unmap,
            Message::Released => RequestKind::Release,
            Message::Flushed => RequestKind::Flush,
            Message::Written => RequestKind::Write,
            Message::Bytes { .. } => RequestKind::Read,
            Message::Checksummed { .. } => RequestKind::Checksum,
            Message::Region(_) | Message::Regions { .. } => RequestKind::Stat,
            _ => return None,
        })
    }
}

/// What a server counted and measured since it was made. Counters only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerMetrics {
    /// Connections now, those included whose client has not shown its key.
    pub connections: usize,
    /// Mappings now that clients reach.
    pub mappings: usize,
    /// Clients that connected and showed the key.
    pub connected: u64,
    /// Connections that were refused.
    pub refused: u64,
    /// Connections that ended, those in their handshake included.
    pub ended: u64,
    /// Mappings that were made.
    pub mapped: u64,
    /// Holders of mappings that were asked to let go.
    pub breaks: u64,
    /// Mappings taken away because their holder did not let go in time.
    pub revoked: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes that came or went by message: of clients without a mapping, and of mappings that no device reaches by itself.
    pub message_bytes: u64,
    /// Processor time of the server's threads for those bytes, from the message in to the answer out, flushes of such mappings and the wait
    /// before each message included. What the device's own threads and the kernel's interrupts take is not.
    pub message_cpu_ns: u64,
    requests: [Histogram; RequestKind::ALL.len()],
}

impl ServerMetrics {
    /// How long requests took that were answered without an error, from the message in to the answer out; for a mapping, waiting for
    /// those who had to let go included.
    pub fn requests(&self, kind: RequestKind) -> &Histogram {
        &self.requests[kind as usize]
    }

    /// Seconds of processor time that a GiB by message took; `None`: there was no byte.
    pub fn message_cpu_seconds_per_gib(&self) -> Option<f64> {
        let gib = self.message_bytes as f64 / f64::from(1 << 30);
        (self.message_bytes > 0).then(|| self.message_cpu_ns as f64 * 1e-9 / gib)
    }
}

/// Reads a server's metrics while it runs.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Arc<Mutex<ServerMetrics>>);

impl Metrics {
    /// What there is now.
    pub fn read(&self) -> ServerMetrics {
        self.lock().clone()
    }

    /// Held for a copy at most.
    pub(super) fn lock(&self) -> MutexGuard<'_, ServerMetrics> {
        // No invariant spans a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self, event: &Event) {
        let metrics = &mut *self.lock();
        match event {
            Event::Connected { .. } => metrics.connected += 1,
            Event::Refused { .. } => metrics.refused += 1,
            Event::Ended { .. } => metrics.ended += 1,
            Event::Mapped { .. } => metrics.mapped += 1,
            Event::Breaking { .. } => metrics.breaks += 1,
            Event::Revoked { .. } => metrics.revoked += 1,
            Event::Unmapped { .. }
            | Event::Released { .. }
            | Event::Opened { .. }
            | Event::Closed { .. }
            | Event::Unwatched { .. } => {}
        }
    }

    /// A request that came at `began` is answered.
    pub(super) fn answered(&self, began: Option<Instant>, answer: &Message) {
        let metrics = &mut *self.lock();
        if matches!(answer, Message::Error { .. }) {
            metrics.errors += 1;
        } else if let (Some(began), Some(kind)) = (began, RequestKind::answered_by(answer)) {
            metrics.requests[kind as usize].record(began.elapsed().as_nanos() as u64);
        }
    }
}

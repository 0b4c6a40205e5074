//! The server's counters and measurements. Figures alone: no names, no peers, no payload.

use std::sync::Arc;
use std::time::Instant;

use rdmux_verbs::Histogram;
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_wire::push::Message;
use strum::VariantArray;

use super::ServerEvent;

/// Kind of a client's request by message; WRITE, READ and FLUSH bypass the server, and the device measures them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum RequestKind {
    /// Mapping of a range.
    Map,
    /// End of a mapping.
    Unmap,
    /// Release of a mapping's range.
    Release,
    /// Flush, where FLUSH does not reach or the client has none.
    Flush,
    /// Write, for a client without a mapping.
    Write,
    /// Read, for a client without a mapping.
    Read,
    /// Checksum of a range.
    Checksum,
    /// Description of a region, or of all.
    Stat,
}

impl RequestKind {
    /// Returns the kind of request that an answer without an error belongs to.
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

/// Counters and measurements of a server since it was made. Counters only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerMetrics {
    /// Current connections, including those whose client has not proved that it has the key.
    pub connections: usize,
    /// Current mappings that clients reach.
    pub mappings: usize,
    /// Clients that connected and proved that they have the key.
    pub connected: u64,
    /// Connections that were refused.
    pub refused: u64,
    /// Connections that ended, including those in their handshake.
    pub ended: u64,
    /// Mappings created.
    pub mapped: u64,
    /// Breaks: holders of mappings that were asked to release them.
    pub breaks: u64,
    /// Mappings revoked because their holder did not release them in time.
    pub revoked: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes that came or went by message: of clients without a mapping, and of mappings that no device reaches by itself.
    pub message_bytes: u64,
    /// Processor time of the server's threads for those bytes, from the message in to the answer out, including flushes of such
    /// mappings and the wait before each message. The time of the device's own threads and of the kernel's interrupts is not
    /// included.
    pub message_cpu_ns: u64,
    requests: [Histogram; RequestKind::VARIANTS.len()],
}

impl ServerMetrics {
    /// Returns the durations of requests that were answered without an error, from the message in to the answer out; for a
    /// mapping, including the wait for holders that had to release.
    pub fn requests(&self, kind: RequestKind) -> &Histogram {
        &self.requests[kind as usize]
    }

    /// Returns the processor time, in seconds, per GiB by message; `None` if there was no byte.
    pub fn message_cpu_seconds_per_gib(&self) -> Option<f64> {
        let gib = self.message_bytes as f64 / f64::from(1 << 30);
        (self.message_bytes > 0).then(|| self.message_cpu_ns as f64 * 1e-9 / gib)
    }
}

/// Reads a server's metrics while it runs.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Arc<Mutex<ServerMetrics>>);

impl Metrics {
    /// Returns the current metrics.
    pub fn read(&self) -> ServerMetrics {
        self.lock().clone()
    }

    /// Locks the metrics; callers hold the lock for a copy at most.
    pub(super) fn lock(&self) -> MutexGuard<'_, ServerMetrics> {
        self.0.lock()
    }

    pub(super) fn count(&self, event: &ServerEvent) {
        let metrics = &mut *self.lock();
        match event {
            ServerEvent::Connected { .. } => metrics.connected += 1,
            ServerEvent::Refused { .. } => metrics.refused += 1,
            ServerEvent::Ended { .. } => metrics.ended += 1,
            ServerEvent::Mapped { .. } => metrics.mapped += 1,
            ServerEvent::Breaking { .. } => metrics.breaks += 1,
            ServerEvent::Revoked { .. } => metrics.revoked += 1,
            // `answered` counts refused requests.
            ServerEvent::RequestRefused { .. }
            | ServerEvent::Unmapped { .. }
            | ServerEvent::Released { .. }
            | ServerEvent::Opened { .. }
            | ServerEvent::Closed { .. }
            | ServerEvent::Unwatched { .. } => {}
        }
    }

    /// Counts the answer to a request that came at `began`.
    pub(super) fn answered(&self, began: Option<Instant>, answer: &Message) {
        let metrics = &mut *self.lock();
        if matches!(answer, Message::Error { .. }) {
            metrics.errors += 1;
        } else if let (Some(began), Some(kind)) = (began, RequestKind::answered_by(answer)) {
            metrics.requests[kind as usize].record(began.elapsed().as_nanos() as u64);
        }
    }
}
